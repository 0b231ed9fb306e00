//! The whole layer over a service that does nothing, beside tower_governor's: what each adds to a request, in time and in
//! allocations.
//!
//! `cargo bench --bench layer --features fast-clock`
//!
//! What was aimed at, and what it is: ratios of what is added for 10k addresses, on two shared CPUs, of several runs.
//!
//! | case | at most | is |
//! |---|---|---|
//! | allowed, header fields, against tower_governor with its own | 0.60 | 0.99–1.13 |
//! | refused, header fields, against tower_governor with its own | 0.015 | 0.017–0.022 |
//! | allowed, no header fields, monotonic clock | 0.90 | 2.3–2.7 |
//! | allowed, no header fields, fast clock | 0.65 | 2.2–2.5 |
//! | one layer of three policies of one key, against three layers | 0.60 | 0.51–0.77 |
//! | one layer of three policies of three keys, against three layers | 0.75 | 0.74–0.79 |
//!
//! Why not better. Beside the check (31 ns of about 130 with the fast clock and no fields) the layer takes some 600
//! instructions: a request is taken apart into its head and body and put together again, since a key may be made from
//! anything in the head (two copies of it); the peer's address is looked for under three types before axum's (116);
//! the key and the decision go into the future, which may have to give the charge back; and its shared part is counted up
//! and down. tower_governor looks up one type, moves nothing and gives nothing back. Of the header fields' 1,600
//! instructions half are the map's. Of three policies of one key, each still hashes that key under its own name.

mod support;

use std::convert::Infallible;
use std::future::{Future, Ready, ready};
use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::body::Body;
use axum::extract::ConnectInfo;
use http::request::Parts;
use http::{Request, Response};
use support::{Contender, Numbers, is_wanted, race};
use tower::{Layer, Service};
use tower_governor::GovernorLayer;
use tower_governor::governor::GovernorConfigBuilder;
use tower_ratelimit::{FastClock, Headers, Key, MemoryLimiter, Quota, RateLimitLayer, key};

#[derive(Clone)]
struct Bare;

impl Service<Request<Body>> for Bare {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        ready(Ok(Response::new(Body::empty())))
    }
}

/// Sends requests from so many addresses in turn, one after the other.
fn drive<S>(mut service: S, keys: u64) -> impl FnMut(u64)
where
    S: Service<Request<Body>>,
{
    let mut numbers = Numbers(0x9e37_79b9);
    move |n| {
        let mut context = Context::from_waker(Waker::noop());
        for _ in 0..n {
            let mut request = Request::new(Body::empty());
            let number = numbers.below(keys) as u32; // below 65,536, so a port as well
            let address = IpAddr::V4(Ipv4Addr::from(0x0a00_0000 + number));
            request.extensions_mut().insert(ConnectInfo(SocketAddr::new(address, number as u16)));
            let _ = service.poll_ready(&mut context);
            match pin!(service.call(request)).poll(&mut context) {
                Poll::Ready(Ok(response)) => drop(black_box(response)),
                _ => unreachable!("the service answers at once"),
            }
        }
    }
}

fn ours(quota: Quota, fast: bool, headers: Headers) -> RateLimitLayer<MemoryLimiter> {
    let builder = MemoryLimiter::builder().capacity(20_000);
    let builder = if fast { builder.fast_clock() } else { builder };
    let limiter = builder.build().expect("the setup is possible");
    RateLimitLayer::new(limiter, quota, key::peer_ip()).headers(headers)
}

/// Allocations of one request, once warm.
fn allocations(run: &mut dyn FnMut(u64)) -> u64 {
    run(1_000);
    allocation_counter::measure(|| run(1_000)).count_total.div_ceil(1_000)
}

/// One layer of three policies beside three layers of one.
fn several() {
    for (case, keys) in [("three policies of one key, 10k", 1), ("three policies of three keys, 10k", 3)] {
        if !is_wanted(case) {
            continue;
        }
        let quotas = [Quota::per_second(1_000_000_000), Quota::per_minute(900_000_000), Quota::per_hour(800_000_000)];
        // The second key is the port and the third both, so that each is as many as there are addresses.
        let key = move |policy: usize| {
            move |parts: &Parts| {
                let ConnectInfo(peer) = parts.extensions.get::<ConnectInfo<SocketAddr>>()?;
                match policy % keys {
                    0 => Key::of(peer.ip()),
                    1 => Key::of(peer.port()),
                    _ => Key::of((peer.ip(), peer.port())),
                }
            }
        };
        let layer = |headers: Headers, policy: usize| {
            let limiter = MemoryLimiter::builder().capacity(80_000).build().expect("the setup is possible");
            RateLimitLayer::new(limiter, quotas[policy], key(policy)).headers(headers)
        };
        let one = |headers: Headers| layer(headers, 0).and(quotas[1], key(1)).and(quotas[2], key(2));
        let three = |headers: Headers| (layer(headers.clone(), 0), layer(headers.clone(), 1), layer(headers, 2));
        let mut contenders = vec![Contender::new("bare", drive(Bare, 10_000))];
        for (names, headers) in [
            (["three layers, no headers", "one layer, no headers"], Headers::none()),
            (["three layers, headers", "one layer, headers"], Headers::default()),
        ] {
            contenders.push(Contender::new(names[0], drive(three(headers.clone()).layer(Bare), 10_000)));
            contenders.push(Contender::new(names[1], drive(one(headers).layer(Bare), 10_000)));
        }
        let counts: Vec<u64> = contenders.iter_mut().map(|contender| allocations(&mut contender.run)).collect();
        let times = race(&mut contenders);
        println!("\n{case}: added to the bare service's {:.1} ns and {} allocations", times[0], counts[0]);
        for at in 1..contenders.len() {
            let of = if at % 2 == 0 { at - 1 } else { at };
            println!(
                "  {:<32} {:>+9.1} ns   {:>6.3}x of three layers   {:>+3} allocations",
                contenders[at].name,
                times[at] - times[0],
                (times[at] - times[0]) / (times[of] - times[0]),
                counts[at] as i64 - counts[0] as i64,
            );
        }
    }
}

fn main() {
    let _ = FastClock::new(); // calibrates, once
    several();
    for (case, keys, plenty) in [
        ("allowed, hot", 1, true),
        ("allowed, 10k", 10_000, true),
        ("refused, hot", 1, false),
        ("refused, 10k", 10_000, false),
    ] {
        if !is_wanted(case) {
            continue;
        }
        // Governor's per_nanosecond(n) is one in n nanoseconds.
        let governor = |headers: bool| {
            let mut builder = GovernorConfigBuilder::default();
            if plenty {
                builder.per_nanosecond(1).burst_size(1_000_000_000);
            } else {
                builder.period(Duration::from_secs(3_600)).burst_size(1);
            }
            if headers {
                Contender::new("tower_governor, its headers", {
                    let config = Arc::new(builder.use_headers().finish().expect("the quota is possible"));
                    drive(GovernorLayer::new(config).layer(Bare), keys)
                })
            } else {
                Contender::new("tower_governor, no headers", {
                    let config = Arc::new(builder.finish().expect("the quota is possible"));
                    drive(GovernorLayer::new(config).layer(Bare), keys)
                })
            }
        };
        let quota = if plenty { Quota::per_second(1_000_000_000) } else { Quota::per_hour(1) };
        let mut contenders = vec![
            Contender::new("bare", drive(Bare, keys)),
            governor(false),
            governor(true),
            Contender::new("ours, fast clock, no headers", drive(ours(quota, true, Headers::none()).layer(Bare), keys)),
            Contender::new("ours, no headers", drive(ours(quota, false, Headers::none()).layer(Bare), keys)),
            Contender::new("ours, fast clock, headers", drive(ours(quota, true, Headers::default()).layer(Bare), keys)),
            Contender::new("ours, headers", drive(ours(quota, false, Headers::default()).layer(Bare), keys)),
        ];
        let counts: Vec<u64> = contenders.iter_mut().map(|contender| allocations(&mut contender.run)).collect();
        let times = race(&mut contenders);
        println!("\n{case}: added to the bare service's {:.1} ns and {} allocations", times[0], counts[0]);
        for at in 1..contenders.len() {
            let added = |at: usize| times[at] - times[0];
            println!(
                "  {:<32} {:>+9.1} ns   {:>6.3}x of tower_governor {}   {:>+3} allocations",
                contenders[at].name,
                added(at),
                added(at) / if contenders[at].name.contains("no headers") { added(1) } else { added(2) },
                if contenders[at].name.contains("no headers") { "without" } else { "with   " },
                counts[at] as i64 - counts[0] as i64,
            );
        }
    }
}
