//! Settlements, refunds and aborted requests in any order: in any interval no more passes than the
//! quota allows plus what was refunded in it.
//!
//! Windows and logs are exact: they are never more permissive than if each request had been charged
//! its final cost at the start.

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
use tower_ratelimit::middleware::WrappedBody;
use tower_ratelimit::{
    Key, MemoryLimiter, Policy, Quota, RateLimitLayer, Rule,
    clock::ManualClock,
    key,
    limiter::{Charge, Effect},
    middleware::{OnAborted, Usage},
    quota::Oldest,
};

use crate::support::config;

/// A response body that ends on command.
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
    /// A request of this cost, which is polled or dropped before.
    Begin {
        cost: u64,
        polled: bool,
    },
    /// A running request records its cost and ends.
    Settle {
        which: usize,
        units: u64,
    },
    /// A running request records its cost so far, and its client disconnects.
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

/// Returns the units that may pass in an interval of this length.
type Bound = fn(Duration) -> u64;

/// Returns quotas of 20 units per 20 seconds, and 20 at once.
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

/// The units that passed and those that were refunded, with their instants.
#[derive(Default)]
struct History {
    passed: Vec<(Duration, u64)>,
    refunded: Vec<(Duration, u64)>,
}

impl History {
    /// Checks all intervals that end now. `left` units are left.
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

/// The charge of a request or settlement: its instant and its final units.
type Taken = (Duration, u64);

/// Returns what is left in a limiter that was charged only the final costs.
fn left_without_detours(policy: &Policy, taken: &[Taken], now: Duration) -> u64 {
    let clock = ManualClock::new();
    let limiter = MemoryLimiter::builder().max_keys(64).clock(clock.clone()).build().unwrap();
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

/// A running request: the index of its charge, its usage, and its response.
struct Running {
    place: usize,
    reserved: u64,
    bill: Usage,
    held: Held,
    body: Pin<Box<WrappedBody<Held>>>,
}

proptest! {
    #![proptest_config(config(200))]

    #[test]
    fn settlements_in_any_order_keep_the_law(
        algorithm in 0..10_usize,
        keeps in any::<bool>(),
        steps in steps(),
    ) {
        let (quota, bound, is_exact) = quotas()[algorithm];
        let mut history = History::default();
        // More than can be owed here, so that all debt is kept.
        let policy = Rule::new("tokens", quota.max_debt(1_000).unwrap()).unwrap();
        let clock = ManualClock::new();
        let limiter = MemoryLimiter::builder().max_keys(64).clock(clock.clone()).build().unwrap();
        let on_aborted = if keeps { OnAborted::Keep } else { OnAborted::Refund };
        let rule = policy.clone().cost(|request| *request.extensions.get().unwrap()).settle_by_usage().on_aborted(on_aborted);
        let held = Arc::new(Mutex::new(Held::default()));
        let bill = Arc::new(Mutex::new(None));
        let (bodies, bills) = (Arc::clone(&held), Arc::clone(&bill));
        let mut service = RateLimitLayer::new(limiter.clone(), rule, key::global())
            .wrap_body()
            .layer(service_fn(move |request: Request<String>| {
                *bills.lock().unwrap() = request.extensions().get::<Usage>().cloned();
                std::future::ready(Ok::<_, Infallible>(Response::new(bodies.lock().unwrap().clone())))
            }));
        let mut context = Context::from_waker(Waker::noop());
        let (mut now, mut taken, mut running) = (Duration::ZERO, Vec::<Taken>::new(), Vec::<Running>::new());
        for step in steps {
            match step {
                Step::Begin { cost, polled } => {
                    *held.lock().unwrap() = Held::default();
                    let mut response = Box::pin(service.call(Request::builder().extension(cost).body(String::new()).unwrap()));
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
            let left = limiter.peek_one(&policy.policies()[0], &Key::global(), 0).remaining();
            let checked = history.check(bound, now, left);
            prop_assert!(checked.is_ok(), "{}: {:?} after {:?} at {:?}", quota, checked, step, now);
            if is_exact {
                let most = left_without_detours(&policy.policies()[0], &taken, now);
                prop_assert!(left <= most, "{}: {} left, {} at most, after {:?} at {:?}", quota, left, most, step, now);
            }
        }
    }
}
