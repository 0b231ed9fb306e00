//! Requests that are settled, refunded and aborted in any order: what passes in an interval is never more than the quota
//! allows plus what was refunded in it. Windows and logs are exact: they are never more permissive than if each request had
//! cost from its beginning what it cost in the end.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::{Body as _, Frame};
use proptest::prelude::*;
use tower::{Layer, Service, service_fn};
use tower_ratelimit::middleware::Body;
use tower_ratelimit::{
    Bill, Charge, Effect, Key, ManualClock, MemoryLimiter, Oldest, OnAborted, Policy, Quota, RateLimitLayer, key,
};

/// A response's body that ends when it is told to.
#[derive(Clone, Default)]
struct Held(Arc<AtomicBool>);

impl http_body::Body for Held {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.0.load(Ordering::Relaxed) { Poll::Ready(None) } else { Poll::Pending }
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// A request of this cost; whether it is polled, or dropped before.
    Begin {
        cost: u64,
        polled: bool,
    },
    /// One of those that run says what it cost, and ends.
    Settle {
        which: usize,
        units: u64,
    },
    /// One says what it cost so far, and its client disconnects.
    Abort {
        which: usize,
        units: Option<u64>,
    },
    Pass {
        ms: u64,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        5 => (1..7_u64, prop::bool::weighted(0.9)).prop_map(|(cost, polled)| Step::Begin { cost, polled }),
        3 => (any::<usize>(), 0..9_u64).prop_map(|(which, units)| Step::Settle { which, units }),
        1 => (any::<usize>(), prop::option::of(0..9_u64)).prop_map(|(which, units)| Step::Abort { which, units }),
        3 => (0..4_000_u64).prop_map(|ms| Step::Pass { ms }),
    ];
    prop::collection::vec(step, 1..40)
}

const PERIOD: Duration = Duration::from_secs(20);

/// The units that may pass in an interval that is so long.
type Bound = fn(Duration) -> u64;

/// 20 units each 20 seconds, and 20 at once.
fn quotas() -> [(Quota, Bound, bool); 10] {
    const REFILLED: Bound = |length| 20 + length.as_secs();
    const ALIGNED: Bound = |length| 20 * (2 + length.as_secs() / 20);
    const TRAILING: Bound = |length| 20 * (1 + length.as_secs() / 20);
    let sliding = Quota::sliding_window(20, PERIOD).unwrap();
    [
        (Quota::token_bucket(20, PERIOD).unwrap(), REFILLED, false),
        (Quota::step_bucket(20, PERIOD).unwrap(), ALIGNED, false),
        (Quota::gcra(20, PERIOD).unwrap().burst(20).unwrap(), REFILLED, false),
        (Quota::leaky_bucket(20, PERIOD).unwrap(), REFILLED, false),
        (Quota::leaky_queue(20, PERIOD).unwrap().queue(19).unwrap(), REFILLED, false),
        (Quota::fixed_window(20, PERIOD).unwrap(), ALIGNED, true),
        (sliding, ALIGNED, true),
        (sliding.buckets(5).unwrap(), ALIGNED, true),
        (sliding.buckets(5).unwrap().oldest(Oldest::Counted).unwrap(), TRAILING, true),
        (Quota::sliding_log(20, PERIOD).unwrap(), TRAILING, true),
    ]
}

/// What passed, and what was refunded: when, and how many units.
#[derive(Default)]
struct History {
    passed: Vec<(Duration, u64)>,
    refunded: Vec<(Duration, u64)>,
}

impl History {
    /// Checks all intervals that end now, at which so much is left.
    fn check(&self, bound: Bound, now: Duration, left: u64) -> Result<(), String> {
        for (from, _) in &self.passed {
            let since = |all: &[(Duration, u64)]| -> u64 {
                all.iter().filter(|(when, _)| when >= from).map(|(_, units)| units).sum()
            };
            let (passed, refunded) = (since(&self.passed) + left, since(&self.refunded));
            let most = bound(now - *from) + refunded;
            if passed > most {
                return Err(format!("{passed} since {from:?}, {most} at most"));
            }
        }
        Ok(())
    }
}

/// What a request or a settlement took: when, and how much of it in the end.
type Taken = (Duration, u64);

/// How much a limiter has left that was asked for what the requests cost in the end, and nothing more.
fn left_without_detours(policy: &Policy, taken: &[Taken], now: Duration) -> u64 {
    let clock = ManualClock::new();
    let limiter = MemoryLimiter::builder().capacity(64).clock(clock.clone()).build().unwrap();
    let mut at = Duration::ZERO;
    let mut pass = |to: Duration| {
        clock.advance(to - at);
        at = to;
    };
    for (when, units) in taken.iter().filter(|(_, units)| *units > 0) {
        pass(*when);
        let key = Key::global();
        let _ = limiter.take_now(&[Charge::new(policy, &key).cost(*units).effect(Effect::Force)]);
    }
    pass(now);
    limiter.peek_one(policy, &Key::global(), 0).remaining()
}

/// A request that runs: the place of what it took, its bill, and its response.
struct Running {
    place: usize,
    reserved: u64,
    bill: Bill,
    held: Held,
    body: Pin<Box<Body<Held>>>,
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn settlements_in_any_order_keep_the_law(
        algorithm in 0..10_usize,
        keeps in any::<bool>(),
        steps in steps(),
    ) {
        let (quota, bound, is_exact) = quotas()[algorithm];
        let mut history = History::default();
        // More than can be owed here, so that no debt is forgotten.
        let policy = Policy::new("tokens", quota.max_debt(1_000).unwrap()).unwrap();
        let clock = ManualClock::new();
        let limiter = MemoryLimiter::builder().capacity(64).clock(clock.clone()).build().unwrap();
        let on_aborted = if keeps { OnAborted::Keep } else { OnAborted::Refund };
        let rule = policy.clone().cost(|request| *request.extensions.get().unwrap()).settle_by_bill().on_aborted(on_aborted);
        let held = Arc::new(Mutex::new(Held::default()));
        let bill = Arc::new(Mutex::new(None));
        let (bodies, bills) = (Arc::clone(&held), Arc::clone(&bill));
        let mut service = RateLimitLayer::new(limiter.clone(), rule, key::global())
            .layer(service_fn(move |request: Request<()>| {
                *bills.lock().unwrap() = request.extensions().get::<Bill>().cloned();
                std::future::ready(Ok::<_, Infallible>(Response::new(bodies.lock().unwrap().clone())))
            }));
        let mut context = Context::from_waker(Waker::noop());
        let (mut now, mut taken, mut running) = (Duration::ZERO, Vec::<Taken>::new(), Vec::<Running>::new());
        for step in steps {
            match step {
                Step::Begin { cost, polled } => {
                    *held.lock().unwrap() = Held::default();
                    let mut response = Box::pin(service.call(Request::builder().extension(cost).body(()).unwrap()));
                    if polled {
                        let Poll::Ready(Ok(response)) = response.as_mut().poll(&mut context) else { unreachable!() };
                        if response.status() == StatusCode::OK {
                            let (bill, held) = (bill.lock().unwrap().take().unwrap(), held.lock().unwrap().clone());
                            let body = Box::pin(response.into_body());
                            running.push(Running { place: taken.len(), reserved: cost, bill, held, body });
                            taken.push((now, cost));
                            history.passed.push((now, cost));
                        }
                    }
                }
                Step::Settle { which, units } if !running.is_empty() => {
                    let mut one = running.swap_remove(which % running.len());
                    prop_assert!(one.bill.set(units));
                    one.held.0.store(true, Ordering::Relaxed);
                    prop_assert!(one.body.as_mut().poll_frame(&mut context).is_ready());
                    taken[one.place].1 = units.min(one.reserved);
                    taken.push((now, units.saturating_sub(one.reserved)));
                    history.refunded.push((now, one.reserved.saturating_sub(units)));
                }
                Step::Abort { which, units } if !running.is_empty() => {
                    let one = running.swap_remove(which % running.len());
                    units.into_iter().for_each(|units| assert!(one.bill.set(units)));
                    drop(one.body);
                    let said = units.unwrap_or(0);
                    taken[one.place].1 = if keeps { one.reserved } else { said.min(one.reserved) };
                    taken.push((now, said.saturating_sub(one.reserved)));
                    history.refunded.push((now, one.reserved - taken[one.place].1));
                }
                Step::Pass { ms } => {
                    now += Duration::from_millis(ms);
                    clock.advance(Duration::from_millis(ms));
                }
                Step::Settle { .. } | Step::Abort { .. } => {}
            }
            let left = limiter.peek_one(&policy, &Key::global(), 0).remaining();
            let checked = history.check(bound, now, left);
            prop_assert!(checked.is_ok(), "{}: {:?} after {:?} at {:?}", quota, checked, step, now);
            if is_exact {
                let most = left_without_detours(&policy, &taken, now);
                prop_assert!(left <= most, "{}: {} left, {} at most, after {:?} at {:?}", quota, left, most, step, now);
            }
        }
    }
}
