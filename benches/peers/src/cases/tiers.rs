//! One layer of three policies, against three layers of one.

use std::net::SocketAddr;

use axum::body::Body;
use axum::extract::ConnectInfo;
use tower::Layer;
use tower_ratelimit::{Head, Headers, Key, MemoryLimiter, Quota, RateLimitLayer};

use crate::contender::LayerSetup;
use crate::race::{Plan, Run};
use crate::report::{Better, Case};
use crate::requests::{Bare, drive};

const AGAINST: &str = "three layers";

/// The key of a policy: of one, the address. Of three, the port, and both, so that each is as many as there are
/// addresses.
fn key(policy: usize, keys: usize) -> impl Fn(&Head<'_>) -> Option<Key> + Send + Sync + 'static {
    move |parts| {
        let ConnectInfo(peer) = parts.extensions.get::<ConnectInfo<SocketAddr>>()?;
        match policy % keys {
            0 => Key::of(peer.ip()),
            1 => Key::of(peer.port()),
            _ => Key::of((peer.ip(), peer.port())),
        }
    }
}

pub fn run(plan: &Plan) -> Vec<Case> {
    let mut cases = Vec::new();
    for (of, keys) in [("of one key", 1), ("of three keys", 3)] {
        for (fields, headers) in [("headers", Headers::default()), ("no headers", Headers::none())] {
            let name = format!("three policies {of}, 10k addresses, {fields}");
            if plan.is_wanted(&name) {
                cases.push(case(plan, name, keys, &headers));
            }
        }
    }
    cases
}

fn case(plan: &Plan, name: String, keys: usize, headers: &Headers) -> Case {
    let count = plan.scaled(10_000);
    let setup = &LayerSetup { keys: count, denied: false, headers: true };
    // Whole microseconds for each unit, as in most rules. The limits are above what a run asks of a key.
    let quotas = [Quota::per_second(10_000), Quota::per_minute(500_000), Quota::per_hour(20_000_000)];
    let layer = |policy: usize| {
        let limiter = MemoryLimiter::builder().max_keys(8 * count).build().expect("the setup is possible");
        RateLimitLayer::new(limiter, quotas[policy], key(policy, keys)).headers(headers.clone())
    };
    let one = layer(0).and(quotas[1], key(1, keys)).and(quotas[2], key(2, keys));
    let three = (layer(0), layer(1), layer(2));
    let mut runs: Vec<Run<'_>> = vec![
        drive::<Body, _, _>(Bare, setup),
        drive::<Body, _, _>(three.layer(Bare), setup),
        drive::<Body, _, _>(one.layer(Bare), setup),
    ];
    let added = plan.race(&mut runs).beyond_first();
    let mut case = Case::new(name, "ns added", Better::Lower, AGAINST, vec![AGAINST, "one layer"], &added.medians());
    case.steadiness(&added);
    case.told()
}
