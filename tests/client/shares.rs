//! The shares that obedient clients get of each quota: the layer, and clients that know only the draft.

use std::cell::Cell;
use std::convert::Infallible;
use std::rc::Rc;
use std::time::Duration;

use axum::body::Body;
use http::{Request, Response};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_ratelimit::client::{Advice, ObeyLayer};
use tower_ratelimit::clock::Timer;
use tower_ratelimit::quota::Oldest;
use tower_ratelimit::{Key, Policy, Quota, RateLimitLayer, Wait, key};

use super::round_trip::system_time;
use crate::support::memory;
use crate::support::waiting::World;

const SECONDS: u64 = 10;

/// The behaviour of the client.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Manner {
    /// The layer, with this many requests that want to be sent.
    Layer(usize),
    /// Sends one request after the other while something remains, and waits for `t` otherwise.
    Draft,
    /// Spreads what remains over `t`.
    DraftSpreading,
}

/// Returns how many requests pass and how many are refused, each taking `latency` there and back.
fn simulate(quota: &Quota, manner: Manner, latency: Duration) -> (u64, u64) {
    let mut world: World<()> = World::new();
    let limit = RateLimitLayer::new(memory(&world.clock), *quota, key::global());
    let served = service_fn(|_: Request<Body>| async { Ok::<_, Infallible>(Response::new(Body::empty())) });
    let server = limit.layer(served);
    let timer = world.timer.clone();
    let (passed, refused) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
    let remote = {
        let (timer, passed, refused) = (timer.clone(), Rc::clone(&passed), Rc::clone(&refused));
        service_fn(move |request: Request<Body>| {
            let (timer, server) = (timer.clone(), server.clone());
            let (passed, refused) = (Rc::clone(&passed), Rc::clone(&refused));
            async move {
                timer.sleep_until(timer.now() + latency / 2).await;
                let response = server.oneshot(request).await?;
                let count = if response.status() == 200 { &passed } else { &refused };
                count.set(count.get() + 1);
                timer.sleep_until(timer.now() + latency / 2).await;
                Ok::<_, Infallible>(response)
            }
        })
    };
    let request = || Request::get("http://example.org/").body(Body::empty()).unwrap();
    match manner {
        Manner::Layer(tasks) => {
            let layer = ObeyLayer::new(timer).jitter_seed(5);
            for _ in 0..tasks {
                let mut client = layer.layer(remote.clone());
                world.spawn(async move {
                    loop {
                        client.ready().await.unwrap().call(request()).await.unwrap();
                    }
                });
            }
        }
        Manner::Draft | Manner::DraftSpreading => {
            world.spawn(async move {
                loop {
                    let began = timer.now();
                    let response = remote.clone().oneshot(request()).await.unwrap();
                    let mut headers = response.headers().clone();
                    headers.remove("retry-after-ms");
                    let item = headers.get("ratelimit").map(|item| item.to_str().unwrap().to_owned());
                    if let Some(item) = item {
                        let known = item.split(";tower-").next().unwrap();
                        headers.insert("ratelimit", known.parse().unwrap());
                    }
                    let advice = Advice::read(&headers, system_time());
                    match (advice.wait(), advice.policies().first()) {
                        (Wait::After(wait), _) => timer.sleep_until(timer.now() + wait).await,
                        (_, Some(policy)) if manner == Manner::DraftSpreading => {
                            let left = u32::try_from(policy.remaining().unwrap().max(1)).unwrap();
                            let gap = policy.until_reset().unwrap_or_default() / left;
                            timer.sleep_until(began + gap).await;
                        }
                        _ => {}
                    }
                }
            });
        }
    }
    world.pass(SECONDS * 1_000_000);
    drop(world);
    (passed.get(), refused.get())
}

/// Returns how many requests a client could pass that knows everything: it tries each 500 µs.
fn possible(quota: &Quota) -> u64 {
    let clock = tower_ratelimit::clock::ManualClock::new();
    let limiter = memory(&clock);
    let policy = Policy::new("p", *quota).unwrap();
    let key = Key::of("k").unwrap();
    let mut passed = 0;
    for _ in 0..SECONDS * 2_000 {
        while limiter.take_now(&[tower_ratelimit::limiter::Charge::new(&policy, &key)]).is_allowed() {
            passed += 1;
        }
        clock.advance(Duration::from_micros(500));
    }
    passed
}

/// The quotas of the guide on algorithms, and short bursts of each.
fn quotas() -> Vec<Quota> {
    let (second, tenth, minute) = (Duration::from_secs(1), Duration::from_millis(100), Duration::from_secs(60));
    vec![
        Quota::per_minute(100),
        Quota::per_minute(100).burst(20).unwrap(),
        Quota::gcra(100, minute).unwrap(),
        Quota::per_second(50),
        Quota::per_second(50).burst(25).unwrap(),
        Quota::per_second(50).burst(10).unwrap(),
        Quota::gcra(2, second).unwrap(),
        Quota::gcra(3, second).unwrap(),
        Quota::gcra(50, second).unwrap(),
        Quota::gcra(1_000, second).unwrap(),
        Quota::leaky_bucket(50, second).unwrap(),
        Quota::leaky_bucket(50, second).unwrap().burst(5).unwrap(),
        Quota::leaky_queue(50, second).unwrap(),
        Quota::step_bucket(50, second).unwrap(),
        Quota::step_bucket(5, tenth).unwrap(),
        Quota::fixed_window(50, second).unwrap(),
        Quota::fixed_window(5, tenth).unwrap(),
        Quota::sliding_window(50, second).unwrap(),
        Quota::sliding_window(5, tenth).unwrap(),
        Quota::sliding_window(50, second).unwrap().buckets(10).unwrap().oldest(Oldest::Counted).unwrap(),
        Quota::sliding_log(50, second).unwrap(),
        Quota::sliding_log(5, tenth).unwrap(),
    ]
}

#[test]
fn obedient_clients_get_their_share_of_each_quota() {
    let (near, nearby, far) = (Duration::ZERO, Duration::from_micros(500), Duration::from_millis(20));
    let mut failed = Vec::new();
    println!("quota | possible | layer, near | layer, 20 ms | draft | draft, 20 ms | spreading");
    for quota in quotas() {
        let possible = possible(&quota);
        let of = |(passed, refused): (u64, u64)| format!("{} % ({refused})", passed * 100 / possible);
        let run = |manner, latency| simulate(&quota, manner, latency);
        let ours = run(Manner::Layer(64), near);
        let ours_far = run(Manner::Layer(64), far);
        let draft = run(Manner::Draft, nearby);
        let draft_far = run(Manner::Draft, far);
        let spreading = run(Manner::DraftSpreading, nearby);
        let row = format!(
            "{quota} | {possible} | {} | {} | {} | {} | {}",
            of(ours),
            of(ours_far),
            of(draft),
            of(draft_far),
            of(spreading)
        );
        println!("{row}");
        // While nothing remains, one request is on its way at a time. And all that come before the first response are
        // sent, so the first second over 20 ms is lost by a refusal.
        let fits_far = quota.limit() < 1_000;
        let is_short = |ours: (u64, u64), percent| ours.0 * 100 < possible * percent;
        let best = draft.0.max(draft_far.0).max(spreading.0);
        if is_short(ours, 95) || ours.1 > 0 || fits_far && is_short(ours_far, 85) || best * 2 < possible {
            failed.push(row);
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}
