//! Units of concurrency limits: they are held until they are refunded, and by nothing else.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tower_ratelimit::limiter::memory::OnFull;
use tower_ratelimit::{
    Key, MemoryLimiter, Policy, Quota, Wait,
    clock::{Clock, ManualClock, Timestamp},
    limiter::{Charge, ChargeDecision, Effect, Receipt, Refund},
    observe::{LimiterEvent, Observer},
};

use crate::support::{Events, cases};

const YEAR: Duration = Duration::from_secs(365 * 86_400);

fn key(n: u64) -> Key {
    Key::of(n).expect("an integer makes a key")
}

fn policy(name: &str, quota: Quota) -> Policy {
    Policy::new(name, quota).expect("it is a name")
}

fn exports(limit: u64) -> Policy {
    policy("exports", Quota::concurrent(limit))
}

fn small() -> MemoryLimiter {
    MemoryLimiter::builder().max_keys(100).clock(ManualClock::new()).build().expect("the setup is possible")
}

fn left(limiter: &MemoryLimiter, policy: &Policy) -> u64 {
    limiter.peek_one(policy, &key(1), 0).remaining()
}

/// Refunds what a decision took of the first key.
fn refund(limiter: &MemoryLimiter, policy: &Policy, decision: &mut ChargeDecision) {
    let receipt = decision.take_receipt().expect("it took something");
    limiter.refund_now(&[Refund::new(policy.clone(), key(1), receipt)]);
}

#[test]
fn units_are_held_until_they_are_refunded() {
    let clock = ManualClock::new();
    let limiter = MemoryLimiter::builder().max_keys(100).clock(clock.clone()).build().expect("the setup is possible");
    let policy = exports(3);
    let mut taken: Vec<_> = (0..3).map(|_| limiter.take_one(&policy, &key(1), 1)).collect();
    assert_eq!(taken.iter().map(ChargeDecision::remaining).collect::<Vec<_>>(), [2, 1, 0]);
    clock.advance(YEAR);
    let denied = limiter.take_one(&policy, &key(1), 1);
    assert_eq!((denied.is_allowed(), denied.wait(), denied.remaining()), (false, Wait::Unknown, 0));
    refund(&limiter, &policy, &mut taken[0]);
    clock.set(Timestamp::from_micros(0));
    assert_eq!(left(&limiter, &policy), 1, "a step of the clock changes nothing");
    taken.iter_mut().skip(1).for_each(|taken| refund(&limiter, &policy, taken));
    assert_eq!(left(&limiter, &policy), 3);
}

#[test]
fn place_returns_its_units_when_it_is_dropped() {
    let (limiter, policy) = (small(), exports(3));
    let two = limiter.hold(&policy, &key(1), 2).expect("three are free");
    assert_eq!(limiter.hold(&policy, &key(1), 2).expect_err("one is free").remaining(), 1);
    assert_eq!(limiter.hold(&policy, &key(1), 4).expect_err("it never fits").wait(), Wait::Never);
    let nothing = limiter.hold(&policy, &key(1), 0).expect("a cost of 0 looks");
    drop(two);
    assert_eq!(left(&limiter, &policy), 3);
    drop(nothing);
    assert_eq!(left(&limiter, &policy), 3);
}

#[test]
fn lowered_limit_refuses_until_enough_was_returned() {
    let (limiter, many, few) = (small(), exports(5), exports(2));
    let mut held: Vec<_> = (0..4).map(|_| limiter.hold(&many, &key(1), 1).expect("five are free")).collect();
    for _ in 0..3 {
        assert!(limiter.hold(&few, &key(1), 1).is_err(), "{} are held", held.len());
        held.pop();
    }
    assert_eq!(left(&limiter, &few), 1);
    held.push(limiter.hold(&few, &key(1), 1).expect("one is free"));
    assert!(limiter.hold(&few, &key(1), 1).is_err());
    assert_eq!(left(&limiter, &many), 3, "a raised limit counts the same units");
    drop(held);
    assert_eq!(left(&limiter, &many), 5);
}

#[test]
fn limit_that_changes_without_end_keeps_what_is_held() {
    let limiter = MemoryLimiter::builder().max_keys(50_000).clock(ManualClock::new()).build().expect("it is possible");
    let place = limiter.hold(&exports(3), &key(1), 1).expect("three are free");
    // More quotas than a limiter distinguishes, each with a live state.
    for n in 0..17_000 {
        assert!(limiter.take_one(&policy("plan", Quota::per_hour(10 + n)), &key(n), 1).is_allowed());
        assert_eq!(left(&limiter, &exports(4 + n)), 3 + n);
    }
    drop(place);
    assert_eq!(left(&limiter, &exports(3)), 3);
}

#[test]
fn rate_and_concurrency_limit_of_one_name_are_apart() {
    let (limiter, rate, places) = (small(), policy("api", Quota::per_minute(10)), policy("api", Quota::concurrent(3)));
    assert!(limiter.take_one(&rate, &key(1), 7).is_allowed());
    let place = limiter.hold(&places, &key(1), 2).expect("three are free");
    assert_eq!((left(&limiter, &rate), left(&limiter, &places)), (3, 1));
    limiter.reset_now(&rate, &key(1));
    assert_eq!((left(&limiter, &rate), left(&limiter, &places)), (10, 1));
    drop(place);
    assert_eq!((left(&limiter, &rate), left(&limiter, &places)), (10, 3));
}

#[test]
fn refused_set_holds_nothing_and_takes_nothing() {
    let (limiter, rate, places) = (small(), policy("rate", Quota::per_minute(2)), exports(1));
    let alice = key(1);
    let both = [Charge::new(&rate, &alice), Charge::new(&places, &alice)];
    let mut first = limiter.take_now(&both);
    assert!(first.is_allowed());
    let refused = limiter.take_now(&both);
    assert!(!refused.is_allowed());
    assert_eq!(refused.charges()[0].remaining(), 1, "the rate is reported as it stands");
    assert_eq!(left(&limiter, &rate), 1);
    refund(&limiter, &places, first.charge_mut(1).expect("it is the second charge"));
    assert!(limiter.take_one(&rate, &key(1), 1).is_allowed());
    let refused = limiter.take_now(&both);
    assert!(!refused.is_allowed());
    assert_eq!((refused.charges()[1].remaining(), left(&limiter, &places)), (1, 1), "the rate refuses");
}

#[test]
fn observed_charge_holds_only_what_is_free() {
    let (limiter, policy) = (small(), exports(2));
    let observed = |cost| {
        let mut decision = limiter.take_now(&[Charge::new(&policy, &key(1)).cost(cost).effect(Effect::Observe)]);
        assert!(decision.is_allowed(), "an observed charge refuses nothing");
        decision.charge_mut(0).and_then(ChargeDecision::take_receipt)
    };
    assert!(observed(2).is_some());
    assert!(observed(1).is_none());
    assert_eq!(left(&limiter, &policy), 0);
}

#[test]
fn forced_charge_holds_beyond_the_limit() {
    let (limiter, policy) = (small(), exports(2));
    let forced = || limiter.take_now(&[Charge::new(&policy, &key(1)).cost(3).effect(Effect::Force)]);
    let mut first = forced();
    assert!(first.is_allowed());
    assert!(limiter.hold(&policy, &key(1), 1).is_err());
    let mut second = forced();
    refund(&limiter, &policy, first.charge_mut(0).expect("it has one charge"));
    assert_eq!(left(&limiter, &policy), 0, "three of two are held");
    refund(&limiter, &policy, second.charge_mut(0).expect("it has one charge"));
    assert_eq!(left(&limiter, &policy), 2);
}

#[test]
fn part_of_a_receipt_returns_a_part() {
    let (limiter, policy) = (small(), exports(5));
    let receipt = limiter.take_one(&policy, &key(1), 4).take_receipt().expect("it took four");
    limiter.refund_now(&[Refund::new(policy.clone(), key(1), receipt.split(3))]);
    assert_eq!(left(&limiter, &policy), 4);
}

#[test]
fn place_that_was_reset_returns_nobody_elses_units() {
    let (limiter, policy) = (small(), exports(2));
    let old = limiter.hold(&policy, &key(1), 2).expect("two are free");
    let other = limiter.hold(&policy, &key(2), 1).expect("it is another key");
    limiter.reset_now(&policy, &key(1));
    assert_eq!(left(&limiter, &policy), 2, "an operator freed the key");
    let new = limiter.hold(&policy, &key(1), 1).expect("two are free");
    drop(old);
    assert_eq!(left(&limiter, &policy), 1, "what was reset returns nothing");
    drop(new);
    assert_eq!(left(&limiter, &policy), 2);
    drop(other);
    assert_eq!(limiter.peek_one(&policy, &key(2), 0).remaining(), 2, "other keys are not concerned");
}

#[test]
fn snapshot_leaves_held_units_out() {
    let (limiter, policy) = (small(), exports(2));
    let place = limiter.hold(&policy, &key(1), 2).expect("two are free");
    assert!(limiter.take_one(&self::policy("rate", Quota::per_minute(2)), &key(1), 1).is_allowed());
    let snapshot = limiter.snapshot();
    let restored = MemoryLimiter::builder()
        .max_keys(100)
        .clock(ManualClock::new())
        .restore(snapshot)
        .build()
        .expect("it is a snapshot");
    assert_eq!(left(&restored, &policy), 2, "the requests of the earlier process have ended");
    assert_eq!(left(&restored, &self::policy("rate", Quota::per_minute(2))), 1);
    drop(place);
}

/// Fresh keys without end, each used up.
fn flood(limiter: &MemoryLimiter, keys: u64) {
    let flood = policy("flood", Quota::per_hour(1));
    for n in 0..keys {
        let _ = limiter.take_one(&flood, &key(1_000 + n), 1);
    }
}

#[test]
fn held_units_are_not_forgotten_in_a_flood() {
    let limiter = small();
    let held: Vec<_> = (0..20).map(|n| limiter.hold(&exports(3), &key(n), 2).expect("none is held")).collect();
    flood(&limiter, 20_000);
    for n in 0..20 {
        assert_eq!(limiter.peek_one(&exports(3), &key(n), 0).remaining(), 1, "key {n}");
    }
    drop(held);
    assert_eq!(limiter.peek_one(&exports(3), &key(7), 0).remaining(), 3);
}

#[test]
fn key_without_room_is_denied_for_an_unknown_time() {
    for on_full in [OnFull::Evict, OnFull::Deny] {
        let events = Events::default();
        let builder = MemoryLimiter::builder().max_keys(10).on_full(on_full).observer(events.clone());
        let limiter = builder.clock(ManualClock::new()).build().expect("the setup is possible");
        let mut places = Vec::new();
        let denied = (0..1_000).find_map(|n| match limiter.hold(&exports(3), &key(n), 1) {
            Ok(place) => {
                places.push(place);
                None
            }
            Err(denied) => Some((n, denied)),
        });
        let (full, denied) = denied.expect("a thousand keys do not fit");
        assert_eq!((denied.wait(), denied.remaining()), (Wait::Unknown, 0), "{on_full:?}");
        assert_eq!(*events.lock(), [LimiterEvent::Full], "{on_full:?}");
        drop(places);
        assert!(limiter.hold(&exports(3), &key(full), 1).is_ok(), "{on_full:?}: what was returned is room");
    }
}

/// A key that returned its last place keeps its slot for a while. That must not depend on when the clock is there
/// again.
#[test]
fn returned_places_are_room_after_a_step_of_the_clock() {
    for (on_full, step) in [(OnFull::Evict, 3), (OnFull::Evict, 86_400), (OnFull::Deny, 86_400)] {
        let clock = ManualClock::new();
        let builder = MemoryLimiter::builder().max_keys(10).on_full(on_full).clock(clock.clone());
        let limiter = builder.build().expect("the setup is possible");
        for n in 0..1_000 {
            let held = limiter.hold(&exports(3), &key(n), 1);
            drop(held.unwrap_or_else(|_| panic!("{on_full:?}: key {n} finds what others returned")));
        }
        clock.set(Timestamp::from_micros(clock.now().as_micros() - step * 1_000_000));
        for n in 1_000..2_000 {
            let held = limiter.hold(&exports(3), &key(n), 1);
            drop(held.unwrap_or_else(|_| panic!("{on_full:?}: key {n} finds what others returned, {step} s before")));
        }
    }
}

/// Panics at each reading after the first ones.
#[derive(Debug, Default)]
struct Breaking(AtomicU64);

impl Clock for Breaking {
    fn now(&self) -> Timestamp {
        assert!(self.0.fetch_add(1, Ordering::Relaxed) < 100, "a clock's own trouble");
        Timestamp::from_micros(1_790_000_000_000_000)
    }
}

#[test]
fn place_is_returned_although_the_clock_panics() {
    let clock = Arc::new(Breaking::default());
    let builder = MemoryLimiter::builder().max_keys(10).clock(Arc::clone(&clock));
    let limiter = builder.build().expect("the setup is possible");
    let place = limiter.hold(&exports(1), &key(1), 1).expect("one is free");
    clock.0.store(100, Ordering::Relaxed);
    drop(place);
    assert!(limiter.hold(&exports(1), &key(1), 1).is_ok(), "it is free again");
}

/// Panics at each event.
struct Panics;

impl Observer for Panics {
    fn on_limiter_event(&self, event: &LimiterEvent) {
        panic!("{event:?}");
    }
}

#[test]
fn observer_that_panics_loses_no_receipt() {
    let builder = MemoryLimiter::builder().max_keys(10).clock(ManualClock::new()).observer(Panics);
    let limiter = builder.build().expect("the setup is possible");
    let rate = policy("rate", Quota::per_hour(5));
    let mut places = Vec::new();
    // Each new key of the rate makes the limiter forget another one, and so report that.
    for n in 0..200 {
        let mut decision = limiter
            .take_now(&[Charge::new(&rate, &key(n)).effect(Effect::Observe), Charge::new(&exports(1_000), &key(1))]);
        let receipt = decision.charge_mut(1).and_then(ChargeDecision::take_receipt).expect("a thousand are free");
        places.push(Refund::new(exports(1_000), key(1), receipt));
    }
    limiter.refund_now(&places);
    assert_eq!(left(&limiter, &exports(1_000)), 1_000);
}

#[test]
fn concurrent_holders_never_hold_more_than_the_limit() {
    const LIMIT: u64 = 3;
    const KEYS: usize = 4;
    let limiter = small();
    let rate = policy("rate", Quota::per_hour(999_999_999));
    let held: [AtomicU64; KEYS] = Default::default();
    let passed = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (limiter, held, passed, rate) = (&limiter, &held, &passed, &rate);
            scope.spawn(move || {
                let policy = exports(LIMIT);
                for round in 0..u64::from(cases(20_000)) {
                    let at = ((round + thread) % KEYS as u64) as usize;
                    let (charged, cost) = (key(at as u64), 1 + round % 2);
                    // One after the other alone and beside a rate, so that both ways are taken.
                    let mut decision = match round % 3 {
                        0 => {
                            limiter.take_now(&[Charge::new(rate, &charged), Charge::new(&policy, &charged).cost(cost)])
                        }
                        _ => limiter.take_now(&[Charge::new(&policy, &charged).cost(cost)]),
                    };
                    let last = decision.charges().len() - 1;
                    let receipt = decision.charge_mut(last).and_then(ChargeDecision::take_receipt);
                    assert_eq!(receipt.is_some(), decision.is_allowed());
                    let Some(receipt) = receipt else { continue };
                    let now = held[at].fetch_add(cost, Ordering::SeqCst) + cost;
                    assert!(now <= LIMIT, "{now} are held");
                    passed.fetch_add(1, Ordering::Relaxed);
                    if round % 7 == 0 {
                        std::thread::yield_now();
                    }
                    held[at].fetch_sub(cost, Ordering::SeqCst);
                    limiter.refund_now(&[Refund::new(policy.clone(), charged, receipt)]);
                }
            });
        }
    });
    assert!(passed.load(Ordering::Relaxed) > 0);
    for n in 0..KEYS as u64 {
        assert_eq!(limiter.peek_one(&exports(LIMIT), &key(n), 0).remaining(), LIMIT, "nothing stays held");
    }
}

/// Counts how often it is read.
#[derive(Clone, Debug, Default)]
struct Readings(Arc<AtomicU64>);

impl Clock for Readings {
    fn now(&self) -> Timestamp {
        self.0.fetch_add(1, Ordering::Relaxed);
        Timestamp::from_micros(1_790_000_000_000_000)
    }
}

#[test]
fn clock_is_not_read_for_places_of_a_key_that_has_its_slot() {
    let readings = Readings::default();
    let builder = MemoryLimiter::builder().max_keys(100).clock(readings.clone());
    let (limiter, policy) = (builder.build().expect("the setup is possible"), exports(3));
    drop(limiter.hold(&policy, &key(1), 1)); // makes the slot
    let before = readings.0.load(Ordering::Relaxed);
    let held: Vec<_> = (0..5).map(|_| limiter.hold(&policy, &key(1), 1)).collect();
    assert_eq!(held.iter().filter(|place| place.is_ok()).count(), 3);
    assert_eq!(readings.0.load(Ordering::Relaxed), before);
    drop(held);
    assert_eq!(readings.0.load(Ordering::Relaxed), before);
}

/// The long way reads the clock.
#[test]
fn keys_that_return_their_places_keep_their_slots() {
    let readings = Readings::default();
    let limiter = MemoryLimiter::builder().clock(readings.clone()).build().expect("the setup is possible");
    let hold_each = || {
        let before = readings.0.load(Ordering::Relaxed);
        (0..10_000).for_each(|n| drop(limiter.hold(&exports(3), &key(n), 1)));
        readings.0.load(Ordering::Relaxed) - before
    };
    hold_each();
    hold_each(); // keys on their way while the table grew are in their lines afterwards
    assert_eq!(hold_each(), 0);
}

#[test]
fn single_receipt_is_refunded_as_one_of_several() {
    let limiter = small();
    let quotas = [Quota::concurrent(3), Quota::per_hour(3), Quota::fixed_window(3, YEAR).expect("it is possible")];
    for quota in quotas {
        let policy = Policy::from(quota);
        let receipts: Vec<Receipt> =
            (0..3).filter_map(|_| limiter.take_one(&policy, &key(1), 1).take_receipt()).collect();
        assert_eq!(receipts.len(), 3, "{quota}");
        for (receipt, left) in receipts.into_iter().zip(1..) {
            limiter.refund_one(&policy, &key(1), receipt);
            assert_eq!(limiter.peek_one(&policy, &key(1), 0).remaining(), left, "{quota}");
        }
    }
}
