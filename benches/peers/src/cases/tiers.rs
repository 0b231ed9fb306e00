//! One layer of three policies, against three layers of one: in an axum router, and around a service that does nothing.

use std::net::SocketAddr;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::routing::get;
use tower::Layer;
use tower_ratelimit::{Head, Headers, Key, MemoryLimiter, Quota, RateLimitLayer};

use crate::contender::LayerSetup;
use crate::race::{Plan, Run};
use crate::report::{Better, Case};
use crate::requests::{Bare, drive, drive_app};

const AGAINST: &str = "three layers";

/// The key of each policy, as a function: equal ones are asked once. Of three keys each is as many as there are
/// addresses.
trait Extract: Fn(&Head<'_>) -> Option<Key> + Copy + Send + Sync + 'static {}

impl<F: Fn(&Head<'_>) -> Option<Key> + Copy + Send + Sync + 'static> Extract for F {}

fn peer(head: &Head<'_>) -> Option<SocketAddr> {
    head.extensions.get::<ConnectInfo<SocketAddr>>().map(|ConnectInfo(peer)| *peer)
}

fn address(head: &Head<'_>) -> Option<Key> {
    Key::of(peer(head)?.ip())
}

fn port(head: &Head<'_>) -> Option<Key> {
    Key::of(peer(head)?.port())
}

fn both(head: &Head<'_>) -> Option<Key> {
    let peer = peer(head)?;
    Key::of((peer.ip(), peer.port()))
}

pub fn run(plan: &Plan) -> Vec<Case> {
    let mut cases = Vec::new();
    for inside in [Inside::Router, Inside::Bare] {
        for of in ["of one key", "of three keys"] {
            for (fields, headers) in [("headers", Headers::default()), ("no headers", Headers::none())] {
                let place = match inside {
                    Inside::Router => "axum router",
                    Inside::Bare => "bare service",
                };
                let name = format!("{place}, three policies {of}, 10k addresses, {fields}");
                if plan.is_wanted(&name) {
                    cases.push(match of {
                        "of one key" => case(plan, name, &inside, &headers, (address, address, address)),
                        _ => case(plan, name, &inside, &headers, (address, port, both)),
                    });
                }
            }
        }
    }
    cases
}

/// The service within the layers.
enum Inside {
    Router,
    Bare,
}

fn case<A: Extract, B: Extract, C: Extract>(
    plan: &Plan,
    name: String,
    inside: &Inside,
    headers: &Headers,
    (a, b, c): (A, B, C),
) -> Case {
    let count = plan.scaled(10_000);
    let setup = &LayerSetup { keys: count, denied: false, headers: true };
    // Whole microseconds for each unit, as in most rules. The limits are above what a run asks of a key.
    let quotas = [Quota::per_second(10_000), Quota::per_minute(500_000), Quota::per_hour(20_000_000)];
    let limiter = || MemoryLimiter::builder().max_keys(8 * count).build().expect("the setup is possible");
    let first = RateLimitLayer::new(limiter(), quotas[0], a).headers(headers.clone());
    let second = RateLimitLayer::new(limiter(), quotas[1], b).headers(headers.clone());
    let third = RateLimitLayer::new(limiter(), quotas[2], c).headers(headers.clone());
    let one = RateLimitLayer::new(limiter(), quotas[0], a).and(quotas[1], b).and(quotas[2], c).headers(headers.clone());
    let app = || Router::new().route("/", get(|| async { "hello" }));
    let mut runs: Vec<Run<'_>> = match inside {
        Inside::Router => vec![
            drive_app(app(), setup),
            drive_app(app().layer(third).layer(second).layer(first), setup),
            drive_app(app().layer(one), setup),
        ],
        Inside::Bare => vec![
            drive::<Body, _, _>(Bare, setup),
            drive::<Body, _, _>((first, second, third).layer(Bare), setup),
            drive::<Body, _, _>(one.layer(Bare), setup),
        ],
    };
    let added = plan.race(&mut runs).beyond_first();
    let mut case = Case::new(name, "ns added", Better::Lower, AGAINST, vec![AGAINST, "one layer"], &added.medians());
    case.steadiness(&added);
    case.told()
}
