//! Threads that use the same keys at once see answers that some order of their calls explains. Each recorded history is
//! searched for such an order.
//!
//! A refused set takes nothing, and one refusing charge is enough to refuse it. So it reads each of its states at an
//! instant of its own. A set that is admitted decides about all of its charges at one instant.

#![expect(clippy::disallowed_methods, reason = "the crate's clocks count microseconds, and a call may take less")]

use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use tower_ratelimit::{
    ConfigError, Head, Key, MemoryLimiter, Policy, Quota, RateLimitLayer, Rule,
    clock::{Clock, ManualClock, Sleep, Timer, Timestamp},
    limiter::{Effect, Ready, Receipt},
    middleware::{Admission, message_units},
    quota::{Algorithm, Oldest},
};

use crate::histories::{
    Apart, CALLERS, Call, LIMIT, Random, Recorded, Script, Seen, check_history, has_meeting, is_explained, policies,
};
use crate::support::{cases, of_each_algorithm_but};

const HOUR: Duration = Duration::from_secs(3_600);

/// The time that anything may take on a busy machine.
const LONG: Duration = Duration::from_secs(60);

/// Lets threads begin together. They spin, because a lock would wake them one after another.
#[derive(Default)]
struct Gate {
    came: AtomicUsize,
    is_broken: AtomicBool,
}

/// A thread that passes a gate. If it panics, it breaks the gate, so that no other thread waits for it.
struct Passer<'a>(&'a Gate);

impl Passer<'_> {
    fn pass(&self) {
        let Gate { came, is_broken } = self.0;
        let round = came.fetch_add(1, Ordering::SeqCst) / CALLERS;
        while came.load(Ordering::SeqCst) < (round + 1) * CALLERS {
            assert!(!is_broken.load(Ordering::SeqCst), "another thread has panicked");
            std::thread::yield_now();
        }
    }
}

impl Drop for Passer<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.is_broken.store(true, Ordering::SeqCst);
        }
    }
}

/// A clock that stands still, and lets two callers that ask for the time go on together. A limiter asks before it reads
/// a state, so the two callers read and write at about the same time. Without this clock, most callers are done before
/// the next one begins.
#[derive(Debug, Default)]
struct MeetingClock {
    clock: ManualClock,
    /// The number of callers that have come. The first of each two waits for the second.
    came: AtomicUsize,
}

impl Clock for MeetingClock {
    fn now(&self) -> Timestamp {
        let came = self.came.fetch_add(1, Ordering::SeqCst);
        if came % 2 == 0 {
            let has_come = |_| {
                std::hint::spin_loop();
                self.came.load(Ordering::SeqCst) > came + 1
            };
            // After some looks the first caller goes on alone, because it may hold a lock that the others wait for.
            if !(0..300).any(has_come) {
                let _ = self.came.compare_exchange(came + 1, came + 2, Ordering::SeqCst, Ordering::SeqCst);
            }
        } else {
            // The first caller sees the second one a little later. So the second one pauses, for up to 31 looks.
            (0..came / 2 % 32).for_each(|_| std::hint::spin_loop());
        }
        self.clock.now()
    }
}

/// Returns quotas of each algorithm that the specification has, in each of its layouts.
fn quotas() -> Vec<Quota> {
    let each = || -> Result<Vec<Quota>, ConfigError> {
        Ok(vec![
            Quota::token_bucket(LIMIT, HOUR)?,
            Quota::token_bucket(99_999_999, HOUR)?.burst(LIMIT)?,
            Quota::gcra(LIMIT, HOUR)?.burst(LIMIT)?,
            Quota::leaky_bucket(LIMIT, HOUR)?,
            Quota::step_bucket(LIMIT, HOUR)?,
            Quota::fixed_window(LIMIT, HOUR)?,
            Quota::sliding_window(LIMIT, HOUR)?,
            Quota::sliding_window(LIMIT, HOUR)?.buckets(6)?.oldest(Oldest::Counted)?,
            Quota::sliding_log(LIMIT, HOUR)?,
            Quota::concurrent(LIMIT),
        ])
    };
    // A refund to a leaky queue depends on who queued since. Blocks and meters are no counters that refuse.
    of_each_algorithm_but(
        &[Algorithm::LeakyQueue, Algorithm::Block, Algorithm::Meter],
        each().expect("they are possible"),
    )
}

#[test]
fn answers_to_concurrent_calls_are_those_of_some_order() {
    let (mut seed, mut played, mut met) = (0_u64, 0, 0);
    for first in quotas() {
        for second in quotas() {
            // It has room for all, so it forgets nothing, and its table grows meanwhile.
            let limiter =
                MemoryLimiter::builder().clock(MeetingClock::default()).build().expect("the setup is possible");
            let policies = policies(first, second);
            let histories: Vec<u64> = (0..u64::from(cases(100))).collect();
            let gate = Gate::default();
            seed += 1;
            let recorded: Vec<Vec<Vec<Recorded>>> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..CALLERS as u64)
                    .map(|thread| {
                        let (limiter, policies, histories, gate) = (&limiter, &policies, &histories, &gate);
                        scope.spawn(move || {
                            let (mut random, passer) = (Random::of(seed, thread), Passer(gate));
                            let each = histories.iter().map(|history| {
                                let keys = [2 * history, 2 * history + 1].map(|n| Key::of(n).expect("a number"));
                                // What a refund gives back after a reset is less certain, so most have none.
                                let has_resets = history % 4 == 3;
                                let script = Script { policies, keys: &keys, apart: Apart::Refused, has_resets };
                                passer.pass();
                                let recorded = script.record(limiter, &mut random).now_or_never();
                                passer.pass();
                                let (calls, held) = recorded.expect("a limiter in memory answers at once");
                                drop(held);
                                calls
                            });
                            each.collect()
                        })
                    })
                    .collect();
                threads.into_iter().map(|thread| thread.join().expect("a thread does not panic")).collect()
            });
            for history in histories {
                let callers: Vec<_> = recorded.iter().map(|thread| thread[history as usize].clone()).collect();
                played += 1;
                met += u64::from(has_meeting(&callers));
                check_history(&callers, &format!("{first} and {second}"));
            }
        }
    }
    println!("in {met} of {played} histories, two callers used the same key at the same time");
}

/// A timer whose time stands still: no caller is admitted because time passed.
#[derive(Debug)]
struct Stopped;

impl Timer for Stopped {
    fn now(&self) -> Duration {
        Duration::ZERO
    }

    fn sleep_until(&self, _: Duration) -> Sleep {
        Box::pin(std::future::pending())
    }
}

/// Wakes the thread that waits for a future.
#[derive(Default)]
struct Bell(Mutex<bool>, Condvar);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        *self.0.lock().unwrap() = true;
        self.1.notify_one();
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let (bell, mut future) = (Arc::new(Bell::default()), pin!(future));
    let waker = Waker::from(Arc::clone(&bell));
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return value;
        }
        let mut has_rung = bell.0.lock().unwrap();
        while !*has_rung {
            has_rung = bell.1.wait(has_rung).unwrap();
        }
        *has_rung = false;
    }
}

/// Lets callers wait for units of a key.
trait Line: Clone + Send + 'static {
    type Held;

    /// Waits until the units are taken. Returns how many remain.
    fn take(&self, key: &Key, cost: u64) -> (u64, Self::Held);

    fn refund(&self, key: &Key, held: Self::Held);

    fn waiting(&self) -> usize;
}

impl Line for (Ready<MemoryLimiter>, Policy) {
    type Held = Receipt;

    fn take(&self, key: &Key, cost: u64) -> (u64, Receipt) {
        let (ready, policy) = self;
        let mut decision = block_on(ready.take_one(policy, key, cost)).expect("units come back, and the line is short");
        assert!(decision.is_allowed());
        (decision.remaining(), decision.take_receipt().expect("it took units"))
    }

    fn refund(&self, key: &Key, receipt: Receipt) {
        self.0.refund(&self.1, key, receipt);
    }

    fn waiting(&self) -> usize {
        self.0.waiting()
    }
}

/// Each charge is that of a message.
impl Line for RateLimitLayer<MemoryLimiter> {
    type Held = Admission;

    fn take(&self, key: &Key, cost: u64) -> (u64, Admission) {
        let (mut head, ()) = http::Request::new(()).into_parts();
        head.extensions.insert(key.clone());
        let admitted = block_on(self.messages(&head).admit(cost));
        let admission = admitted.unwrap_or_else(|refused| panic!("units come back: {:?}", refused.outcome()));
        let remaining = {
            let decision = admission.outcome().policies()[0].decision();
            assert!(decision.is_allowed());
            decision.remaining()
        };
        (remaining, admission)
    }

    fn refund(&self, _: &Key, admission: Admission) {
        admission.refund();
    }

    fn waiting(&self) -> usize {
        Self::waiting(self)
    }
}

/// Takes units of a key, waits for them if need be, and returns them, some times.
fn wait_and_return(line: &impl Line, key: &Key, random: &mut Random) -> Vec<Recorded> {
    let mut calls = Vec::new();
    for _ in 0..3 {
        let cost = 1 + random.below(LIMIT);
        let began = Instant::now();
        let (remaining, held) = line.take(key, cost);
        let seen = Seen { counter: 0, cost, effect: Effect::Enforce, is_allowed: true, remaining };
        calls.push(Recorded { began, ended: Instant::now(), call: Call::Take(vec![seen]) });
        std::thread::yield_now(); // or one thread would take and return all before the next one comes
        let began = Instant::now();
        line.refund(key, held);
        let call = Call::Refund { counter: 0, units: cost, may_be_void: false };
        calls.push(Recorded { began, ended: Instant::now(), call });
    }
    calls
}

/// Each caller returns what it has before it takes again, so one of them can always go on.
fn wait_in_threads(quota: Quota, line: &impl Line) {
    let histories = u64::from(cases(1_000));
    let (gate, (sender, done)) = (Arc::new(Gate::default()), mpsc::channel());
    for caller in 0..CALLERS as u64 {
        let (line, gate, sender) = (line.clone(), Arc::clone(&gate), sender.clone());
        std::thread::spawn(move || {
            let (mut random, passer) = (Random::of(histories, caller), Passer(&gate));
            for history in 0..histories {
                passer.pass();
                let calls = wait_and_return(&line, &Key::of(history).expect("a number"), &mut random);
                let _ = sender.send((caller as usize, calls));
            }
        });
    }
    drop(sender);
    let mut callers = vec![Vec::new(); CALLERS];
    for _ in 0..CALLERS as u64 * histories {
        let (caller, calls) = done.recv_timeout(LONG).unwrap_or_else(|_| panic!("{quota}: a caller waits for ever"));
        callers[caller].push(calls);
    }
    for history in 0..histories as usize {
        let callers: Vec<_> = callers.iter().map(|caller| caller[history].clone()).collect();
        check_history(&callers, &quota.to_string());
    }
    assert_eq!(line.waiting(), 0, "{quota}");
}

/// Returns a limiter whose clock stands still.
fn stopped() -> MemoryLimiter {
    MemoryLimiter::builder().clock(ManualClock::new()).build().expect("the setup is possible")
}

#[test]
fn callers_that_wait_lose_no_wake_and_no_unit() {
    for quota in quotas() {
        // A caller that would have to wait for longer than it may gets an error at once.
        let ready = Ready::new(stopped()).timer(Stopped).max_wait(1_000 * HOUR);
        wait_in_threads(quota, &(ready, Policy::new("waits", quota).expect("it is a name")));
    }
}

#[test]
fn messages_that_wait_lose_no_wake_and_no_unit() {
    for quota in quotas() {
        let quota = match quota.algorithm() {
            Algorithm::Concurrency => quota.max_wait(HOUR).expect("it is a concurrency limit"),
            _ => quota,
        };
        let rule = Rule::new("waits", quota).expect("it is a name").cost(message_units);
        let layer = RateLimitLayer::new(stopped(), rule, |head: &Head<'_>| head.extensions.get::<Key>().cloned());
        wait_in_threads(quota, &layer.timer(Stopped).max_message_wait(1_000 * HOUR));
    }
}

/// The search rejects a history in which one of two charges was lost, and one that contradicts real time.
#[test]
fn search_rejects_answers_that_no_order_explains() {
    let start = Instant::now();
    let at = |ms: u64| start + Duration::from_millis(ms);
    let call = |began, ended, call| Recorded { began: at(began), ended: at(ended), call };
    let take = |began, ended, cost, remaining| {
        let seen = Seen { counter: 0, cost, effect: Effect::Enforce, is_allowed: true, remaining };
        call(began, ended, Call::Take(vec![seen]))
    };
    let reset = |began, ended| call(began, ended, Call::Reset { counter: 0 });
    let refund = |began, ended, may_be_void| call(began, ended, Call::Refund { counter: 0, units: 2, may_be_void });
    assert!(is_explained(&[take(0, 5, 1, 2), take(1, 6, 1, 3)]), "each may be the first");
    assert!(!is_explained(&[take(0, 5, 1, 3), take(1, 6, 1, 3)]), "one charge is lost");
    assert!(!is_explained(&[take(0, 1, 1, 2), take(2, 3, 1, 3)]), "the second was answered before the first");
    assert!(!is_explained(&[take(0, 5, 3, 1), take(1, 6, 3, 1)]), "together they are above the limit");
    assert!(is_explained(&[take(0, 1, 3, 1), reset(1, 5), take(2, 6, 3, 1)]), "the reset came between");
    assert!(!is_explained(&[take(0, 1, 3, 1), reset(4, 5), take(2, 3, 3, 1)]), "the reset came later");
    let (two, three) = (take(0, 1, 2, 2), |remaining| take(8, 9, 1, remaining));
    assert!(is_explained(&[two.clone(), refund(2, 3, false), three(3)]), "they came back");
    assert!(!is_explained(&[two.clone(), refund(2, 3, false), three(1)]), "they did not come back");
    assert!(is_explained(&[two, refund(2, 3, true), three(1)]), "they may have been there no more");
}
