//! A thread may read the clock, lose the processor, and then meet a state that is newer than its
//! reading. The limiter must not treat that as a clock that stepped back, which would refund the
//! state's usage. Or the clock steps back meanwhile, and the state is older than the reading says. The
//! limiter must not treat it as expired.

use std::fmt;
use std::slice::from_ref;
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use tower_ratelimit::{
    ConfigError, Key, MemoryLimiter, Policy, Quota,
    clock::{Clock, ManualClock, Timestamp},
    limiter::{Charge, Effect, Refund, memory::OnFull},
    quota::{Anchor, Oldest},
};

use crate::support::{of_each_algorithm_but, stride};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
const START_US: u64 = 1_735_689_600_000_000;

/// The time that other threads get while the decision under test pauses. If they are not done by then,
/// they wait for one of its locks and run after it.
const PAUSE: Duration = Duration::from_millis(20);

fn at(seconds: u64) -> Timestamp {
    Timestamp::from_micros(START_US + seconds * 1_000_000)
}

/// Returns quotas of ten units per second, in every algorithm and every size of state.
fn quotas() -> Vec<Quota> {
    let each = || -> Result<Vec<Quota>, ConfigError> {
        Ok(vec![
            Quota::token_bucket(10, SECOND)?,
            Quota::token_bucket(10, SECOND)?.max_debt(5)?,
            Quota::gcra(10, SECOND)?,
            Quota::gcra(10, SECOND)?.burst(10)?,
            Quota::leaky_bucket(10, SECOND)?,
            Quota::leaky_queue(10, SECOND)?.queue(9)?,
            Quota::token_bucket(99_999, MINUTE)?.burst(10)?, // two words
            Quota::step_bucket(10, SECOND)?,
            Quota::step_bucket(4, SECOND / 10)?.burst(10)?,
            Quota::step_bucket(10, SECOND)?.anchor(Anchor::FirstRequest)?,
            Quota::fixed_window(10, SECOND)?,
            Quota::fixed_window(10, SECOND)?.anchor(Anchor::FirstRequest)?,
            Quota::fixed_window(10_000_000, SECOND)?.anchor(Anchor::FirstRequest)?, // two words
            Quota::sliding_window(10, SECOND)?,
            Quota::sliding_window(10_000_000, SECOND)?, // two words
            Quota::sliding_window(10, SECOND)?.buckets(5)?,
            Quota::sliding_window(10, SECOND)?.buckets(5)?.oldest(Oldest::Counted)?,
            Quota::sliding_window(10, SECOND)?.buckets(5)?.oldest(Oldest::Dropped)?,
            Quota::sliding_log(10, SECOND)?,
            Quota::sliding_log(10, SECOND)?.count_denied()?,
            Quota::block(10, SECOND, SECOND)?,
            Quota::meter(10, SECOND)?,
        ])
    };
    of_each_algorithm_but(&[], each().expect("the quotas are possible"))
}

type Others = Box<dyn FnOnce() + Send>;

type Drained = Arc<Mutex<Vec<u64>>>;

/// A clock that pauses the thread that reads it, once, before or after one of its readings.
#[derive(Clone)]
struct Pausing {
    time: ManualClock,
    pause: Arc<Mutex<Pause>>,
}

#[derive(Default)]
struct Pause {
    /// The number of places before the pause. Each reading has a place before it and one after it.
    left: usize,
    others: Option<Others>,
    /// Receives a message when the other threads are done. `None` before the pause.
    done: Option<Receiver<()>>,
    /// The other threads finished while the thread paused.
    in_time: bool,
}

impl fmt::Debug for Pausing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pausing")
    }
}

impl Pausing {
    fn new() -> Self {
        Self { time: ManualClock::at(at(0)), pause: Arc::default() }
    }

    fn arm(&self, left: usize, others: Others) {
        *self.pause.lock().expect("no test panics with it") =
            Pause { left, others: Some(others), done: None, in_time: false };
    }

    /// Makes a limiter with this clock.
    fn limiter(&self) -> MemoryLimiter {
        MemoryLimiter::builder().max_keys(100).clock(self.clone()).build().expect("the setup is possible")
    }

    /// Lets another thread use up the quota of the keys at this second, in a pause at this place. Returns how many
    /// units pass then, of each key.
    fn arm_drain(&self, left: usize, second: u64, limiter: &MemoryLimiter, policy: &Policy, keys: &[Key]) -> Drained {
        let drained = Drained::default();
        let (limiter, policy, keys, units) = (limiter.clone(), policy.clone(), keys.to_vec(), drained.clone());
        let time = self.time.clone();
        let others = move || {
            time.set(at(second));
            *units.lock().expect("no test panics with it") =
                keys.iter().map(|key| drain(&limiter, &policy, key)).collect();
        };
        self.arm(left, Box::new(others));
        drained
    }

    fn place(&self) {
        let mut pause = self.pause.lock().expect("no test panics with it");
        if pause.left > 0 {
            pause.left -= 1;
            return;
        }
        let Some(others) = pause.others.take() else { return };
        drop(pause); // the others read this clock too
        let (done, is_done) = mpsc::channel();
        thread::spawn(move || {
            others();
            let _ = done.send(()); // the receiver is gone if the test has failed
        });
        let in_time = is_done.recv_timeout(PAUSE).is_ok();
        let mut pause = self.pause.lock().expect("no test panics with it");
        (pause.done, pause.in_time) = (Some(is_done), in_time);
    }

    /// Returns whether there was a pause, and whether the other threads finished before its end.
    fn paused(&self) -> Option<bool> {
        let mut pause = self.pause.lock().expect("no test panics with it");
        pause.others = None;
        let (done, in_time) = (pause.done.take()?, pause.in_time);
        drop(pause); // the others read this clock too
        if !in_time {
            done.recv_timeout(Duration::from_secs(60)).expect("the others are done once the decision is");
        }
        Some(in_time)
    }
}

impl Clock for Pausing {
    fn now(&self) -> Timestamp {
        self.place();
        let now = self.time.now();
        self.place();
        now
    }
}

/// In daily work a part of the quotas: a decision that holds a lock makes each pause last.
fn sampled() -> impl Iterator<Item = Quota> {
    quotas().into_iter().step_by(stride().min(3))
}

/// Takes units until one is denied, and returns how many passed.
fn drain(limiter: &MemoryLimiter, policy: &Policy, key: &Key) -> u64 {
    let capacity = policy.quota().capacity();
    let step = (capacity / 10).max(1);
    (0..25).filter(|_| limiter.take_one(policy, key, step).is_allowed()).count() as u64 * step
}

/// Runs `decide` at second 0 with a pause at each of its places. In the pause, other threads use up
/// the quota at second 5. `decide` returns how many units passed. At most one full quota may pass,
/// unless `decide` came first.
fn check(what: &str, quota: Quota, used_before: bool, decide: impl Fn(&MemoryLimiter, &Policy, &Key) -> u64) {
    let policy = Policy::new("p", quota).expect("it is a name");
    let key = Key::of("k").expect("it is short");
    for place in 0.. {
        let clock = Pausing::new();
        let limiter = clock.limiter();
        if used_before {
            assert!(limiter.take_one(&policy, &key, 1).is_allowed(), "{quota}");
        }
        let drained = clock.arm_drain(place, 5, &limiter, &policy, from_ref(&key));
        let by_decision = decide(&limiter, &policy, &key);
        let Some(others_first) = clock.paused() else {
            assert!(place > 0, "{what}: {quota}: the clock was never read");
            return;
        };
        let by_others: u64 = drained.lock().expect("no test panics with it").iter().sum();
        let after = drain(&limiter, &policy, &key);
        let at_five = by_others + after + if others_first { by_decision } else { 0 };
        let most = quota.capacity();
        assert!(
            at_five <= most,
            "{what}: {quota}, pause {place}, used before: {used_before}: {by_decision} by the decision, {by_others} by \
             others, {after} after, of {most}"
        );
    }
}

fn check_all(what: &str, decide: impl Fn(&MemoryLimiter, &Policy, &Key) -> u64) {
    for quota in sampled() {
        for used_before in [false, true] {
            check(what, quota, used_before, &decide);
        }
    }
}

fn passed(allowed: bool, units: u64) -> u64 {
    if allowed { units } else { 0 }
}

#[test]
fn paused_take_passes_no_more_than_the_quota() {
    check_all("one unit", |limiter, policy, key| passed(limiter.take_one(policy, key, 1).is_allowed(), 1));
    check_all("three units", |limiter, policy, key| passed(limiter.take_one(policy, key, 3).is_allowed(), 3));
}

#[test]
fn paused_denial_gives_no_allowance_back() {
    check_all("all units", |limiter, policy, key| {
        let all = policy.quota().capacity();
        passed(limiter.take_one(policy, key, all).is_allowed(), all)
    });
}

#[test]
fn paused_forced_charge_gives_no_allowance_back() {
    check_all("forced", |limiter, policy, key| {
        let charge = Charge::new(policy, key).effect(Effect::Force);
        let _ = limiter.take_now(&[charge]);
        0 // what is forced is above the quota
    });
}

#[test]
fn paused_set_passes_no_more_than_the_quota() {
    for other in [Quota::per_minute(1_000), Quota::sliding_log(1_000, SECOND).expect("the quota is possible")] {
        let other = Policy::new("other", other).expect("it is a name");
        check_all("a set", |limiter, policy, key| {
            let charges = [Charge::new(&other, key), Charge::new(policy, key)];
            passed(limiter.take_now(&charges).is_allowed(), 1)
        });
    }
}

#[test]
fn paused_peek_changes_nothing() {
    check_all("a peek", |limiter, policy, key| {
        let _ = limiter.peek_one(policy, key, 1);
        let _ = limiter.peek_now(&[Charge::new(policy, key).cost(policy.quota().capacity())]);
        0
    });
}

#[test]
fn paused_refund_returns_only_what_still_counts() {
    // The unit of second 0 has expired at second 5.
    check_all("a refund", |limiter, policy, key| {
        if let Some(receipt) = limiter.take_one(policy, key, 1).take_receipt() {
            limiter.refund_now(&[Refund::new(policy.clone(), key.clone(), receipt)]);
        }
        0
    });
}

#[test]
fn paused_conversion_gives_no_allowance_back() {
    // Twelve units per second under the same name keep the usage of ten per second.
    let larger = Quota::per_second(12);
    for quota in [Quota::per_second(10), Quota::sliding_log(10, SECOND).expect("the quota is possible")] {
        let policy = Policy::new("p", quota).expect("it is a name");
        let changed = Policy::new("p", larger).expect("it is a name");
        let key = Key::of("k").expect("it is short");
        for place in 0.. {
            let clock = Pausing::new();
            let limiter = clock.limiter();
            assert!(limiter.take_one(&policy, &key, 1).is_allowed());
            clock.arm_drain(place, 5, &limiter, &policy, from_ref(&key));
            let _ = limiter.take_one(&changed, &key, 12);
            let Some(others_first) = clock.paused() else { break };
            let after = drain(&limiter, &changed, &key);
            assert!(!others_first || after <= 2, "{quota}, pause {place}: {after} passed after ten of twelve");
        }
    }
}

/// Runs `decide` with a pause at each of its places. In the pause the clock steps back, and other
/// threads use up the quota. At most one full quota may pass after the step, besides `decide`.
fn check_step_back(what: &str, decide: impl Fn(&MemoryLimiter, &Policy, &Key)) {
    for quota in sampled() {
        for step in [SECOND / 2, SECOND, 3 * SECOND / 2, 5 * SECOND] {
            let policy = Policy::new("p", quota).expect("it is a name");
            let key = Key::of("k").expect("it is short");
            for place in 0.. {
                let clock = Pausing::new();
                let limiter = clock.limiter();
                let other = Policy::new("other", Quota::per_minute(1_000)).expect("it is a name");
                assert!(limiter.take_one(&other, &key, 1).is_allowed());
                // A state of the sub-window before, and one of the instant to which the clock steps back.
                clock.time.set(at(9));
                drain(&limiter, &policy, &key);
                clock.time.set(at(10));
                assert!(limiter.take_one(&policy, &key, 0).is_allowed());
                let _ = limiter.take_one(&policy, &key, 1);
                clock.time.advance(step);
                let drained = clock.arm_drain(place, 10, &limiter, &policy, from_ref(&key));
                decide(&limiter, &policy, &key);
                if clock.paused().is_none() {
                    assert!(place > 0, "{what}: {quota}: the clock was never read");
                    break;
                }
                let by_others: u64 = drained.lock().expect("no test panics with it").iter().sum();
                let after = drain(&limiter, &policy, &key);
                let most = quota.capacity();
                assert!(
                    by_others + after <= most,
                    "{what}: {quota}, pause {place}, back by {step:?}: {by_others} and then {after} passed, of {most}"
                );
            }
        }
    }
}

#[test]
fn step_back_during_a_take_passes_no_second_quota() {
    for cost in [1, 2] {
        check_step_back("a take", |limiter, policy, key| drop(limiter.take_one(policy, key, cost)));
    }
}

#[test]
fn step_back_during_a_set_passes_no_second_quota() {
    let other = Policy::new("other", Quota::per_minute(1_000)).expect("it is a name");
    check_step_back("a set", |limiter, policy, key| {
        drop(limiter.take_now(&[Charge::new(&other, key), Charge::new(policy, key)]));
    });
}

#[test]
fn step_back_while_a_new_key_gets_a_slot_forgets_no_key() {
    let policy = Policy::new("p", Quota::per_second(10)).expect("it is a name");
    // As many as there are slots for, in two lines of four.
    let keys: Vec<Key> = (0..8_u64).map(|number| Key::of(number).expect("it is short")).collect();
    for place in 0.. {
        let clock = Pausing::new();
        let builder = MemoryLimiter::builder().max_keys(1).on_full(OnFull::Deny).clock(clock.clone());
        let limiter = builder.build().expect("the setup is possible");
        keys.iter().for_each(|key| drop(limiter.take_one(&policy, key, 1)));
        clock.time.set(at(100));
        let drained = clock.arm_drain(place, 1, &limiter, &policy, &keys);
        let _ = limiter.take_one(&policy, &Key::of("new").expect("it is short"), 1);
        if clock.paused().is_none() {
            assert!(place > 0, "the clock was never read");
            return;
        }
        for (key, by_others) in keys.iter().zip(&*drained.lock().expect("no test panics with it")) {
            let left = limiter.peek_one(&policy, key, 0).remaining();
            assert!(by_others + left <= 10, "pause {place}: {by_others} passed, and {left} are left, of 10");
        }
    }
}
