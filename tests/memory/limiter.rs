//! The promises of `MemoryLimiter`: charges, refunds, eviction, snapshots and its clock.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tower_ratelimit::limiter::Limiter;
use tower_ratelimit::limiter::memory::OnFull;
use tower_ratelimit::{
    Key, MemoryLimiter, Policy, Quota, Wait,
    clock::{Clock, ManualClock, Timestamp},
    limiter::{Charge, ChargeDecision, Effect, Receipt, Refund},
    observe::{LimiterEvent, Observer},
    quota::{Algorithm, Anchor, Oldest},
};

use crate::support::{cases, every_algorithm, of_each_algorithm_but};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

fn key(n: u64) -> Key {
    Key::of(n).expect("an integer makes a key")
}

fn limiter(keys: usize, clock: &ManualClock) -> MemoryLimiter {
    MemoryLimiter::builder().max_keys(keys).clock(clock.clone()).build().expect("the setup is possible")
}

/// Returns a quota of each algorithm and layout, with capacity 5 in a minute.
fn quotas() -> Vec<Quota> {
    let five = || -> Result<Vec<Quota>, tower_ratelimit::ConfigError> {
        Ok(vec![
            Quota::token_bucket(5, MINUTE)?,
            Quota::gcra(5, MINUTE)?.burst(5)?,
            Quota::leaky_bucket(5, MINUTE)?,
            Quota::leaky_queue(5, MINUTE)?.queue(4)?,
            Quota::step_bucket(5, MINUTE)?,
            Quota::step_bucket(5, MINUTE)?.anchor(Anchor::FirstRequest)?,
            Quota::fixed_window(5, MINUTE)?,
            Quota::fixed_window(5, MINUTE)?.anchor(Anchor::FirstRequest)?,
            Quota::sliding_window(5, MINUTE)?,
            Quota::sliding_window(5, MINUTE)?.buckets(60)?,
            Quota::sliding_window(5, MINUTE)?.buckets(6)?.oldest(Oldest::Counted)?,
            Quota::sliding_window(5, MINUTE)?.buckets(6)?.oldest(Oldest::Dropped)?,
            Quota::sliding_log(5, MINUTE)?,
            // A state that does not fit a word: a numerator over 99,999.
            Quota::token_bucket(99_999, SECOND)?.burst(5)?,
        ])
    };
    of_each_algorithm_but(&[Algorithm::Block, Algorithm::Meter], five().expect("the quotas are possible"))
}

#[test]
fn fresh_key_passes_exactly_the_capacity_in_each_algorithm() {
    for quota in quotas() {
        let limiter = limiter(100, &ManualClock::new());
        let policy = Policy::from(quota);
        for n in 0..50 {
            let passed = (0..10).filter(|_| limiter.take_one(&policy, &key(n), 1).is_allowed()).count();
            assert_eq!(passed, 5, "{quota}, key {n}");
        }
    }
}

#[test]
fn denied_cost_passes_exactly_when_its_wait_is_over() {
    for quota in quotas() {
        let clock = ManualClock::new();
        let limiter = limiter(100, &clock);
        let policy = Policy::from(quota);
        assert!(limiter.take_one(&policy, &key(1), 4).is_allowed());
        let denied = limiter.take_one(&policy, &key(1), 3);
        let wait = denied.wait().duration().expect("it passes later");
        clock.advance(wait - Duration::from_micros(1));
        assert!(!limiter.peek_one(&policy, &key(1), 3).is_allowed(), "{quota}");
        clock.advance(Duration::from_micros(1));
        assert!(limiter.take_one(&policy, &key(1), 3).is_allowed(), "{quota} after {wait:?}");
    }
}

#[test]
fn peeking_and_cost_0_take_nothing() {
    for quota in quotas() {
        let limiter = limiter(100, &ManualClock::new());
        let policy = Policy::from(quota);
        assert!(limiter.take_one(&policy, &key(1), 2).is_allowed());
        for _ in 0..20 {
            assert_eq!(limiter.peek_one(&policy, &key(1), 1).remaining(), 2, "{quota}");
            assert_eq!(limiter.take_one(&policy, &key(1), 0).remaining(), 3, "{quota}");
        }
    }
}

#[test]
fn refund_returns_what_its_receipt_holds() {
    for quota in quotas() {
        let limiter = limiter(100, &ManualClock::new());
        let policy = Policy::from(quota);
        assert!(limiter.take_one(&policy, &key(1), 2).is_allowed());
        let mut taken = limiter.take_one(&policy, &key(1), 3);
        let receipt = taken.take_receipt().expect("it took something");
        assert!(!limiter.take_one(&policy, &key(1), 1).is_allowed(), "{quota}");
        limiter.refund_now(&[Refund::new(policy.clone(), key(1), receipt)]);
        assert_eq!(limiter.peek_one(&policy, &key(1), 0).remaining(), 3, "{quota}");
    }
}

/// As if the rules had changed, while this request still has those of before.
#[test]
fn smaller_quota_forgets_nothing_of_a_larger_one() {
    for small in quotas() {
        for large in every_algorithm(1_000, MINUTE) {
            let limiter = limiter(100, &ManualClock::new());
            let [small, large] = [small, large].map(|quota| Policy::new("changed", quota).expect("the name is fine"));
            let receipt = limiter.take_one(&small, &key(1), 2).take_receipt().expect("it took something");
            assert!(limiter.take_one(&large, &key(1), 500).is_allowed());
            let left = limiter.peek_one(&large, &key(1), 0).remaining();

            limiter.refund_now(&[Refund::new(small.clone(), key(1), receipt)]);
            let refunded = limiter.peek_one(&large, &key(1), 0).remaining();
            assert!((left..=left + 2).contains(&refunded), "{refunded}, not {left}: {small:?}, {large:?}");

            let first = limiter.take_now(&[Charge::new(&small, &key(1)).cost(3).effect(Effect::Force)]).take_receipts();
            let forced = limiter.peek_one(&large, &key(1), 0).remaining();
            assert!((refunded - 3..=refunded).contains(&forced), "{forced}, not {refunded}: {small:?}, {large:?}");
            let taken: u64 = first.iter().flatten().map(Receipt::units).sum();
            assert_eq!(refunded - forced, taken, "{small:?}, {large:?}");
        }
    }
}

#[test]
fn meter_with_a_lower_limit_keeps_its_count() {
    let limiter = limiter(100, &ManualClock::new());
    let [large, small] = [1_000, 10].map(|limit| {
        Policy::new("meter", Quota::meter(limit, MINUTE).expect("it is possible")).expect("the name is fine")
    });
    assert!(limiter.take_one(&large, &key(1), 500).is_allowed());
    assert!(!limiter.take_one(&small, &key(1), 1).is_allowed());
    // A settlement, as `Meters::settle` sends it.
    let settled = Receipt::new(100, 1 << 52, 0);
    limiter.refund_now(&[Refund::new(small.clone(), key(1), settled)]);
    assert_eq!(limiter.peek_one(&large, &key(1), 0).remaining(), 600);
}

#[test]
fn refund_of_the_newest_units_moves_the_reset_back() {
    let seconds = |n: u64| Duration::from_secs(n);
    for quota in
        [Quota::sliding_log(40, MINUTE).unwrap(), Quota::sliding_window(40, MINUTE).unwrap().buckets(60).unwrap()]
    {
        let policy = Policy::from(quota);
        // Sends 20 requests in 20 seconds and refunds the last `refunded`, the newest first or
        // last.
        for refunded in [1, 6, 7, 8, 15, 19] {
            for newest_first in [true, false] {
                let clock = ManualClock::new();
                let (limiter, other) = (limiter(100, &clock), limiter(100, &clock));
                let mut receipts = Vec::new();
                for n in 0..20 {
                    receipts.extend(limiter.take_one(&policy, &key(1), 1).take_receipt());
                    if n < 20 - refunded {
                        let _ = other.take_one(&policy, &key(1), 1);
                    }
                    clock.advance(seconds(1));
                }
                let mut refunds = receipts.split_off(20 - refunded);
                if newest_first {
                    refunds.reverse();
                }
                for receipt in refunds {
                    limiter.refund_now(&[Refund::new(policy.clone(), key(1), receipt)]);
                }
                let [left, expected] = [&limiter, &other].map(|limiter| limiter.peek_one(&policy, &key(1), 1));
                assert_eq!(left.reset_after(), expected.reset_after(), "{quota}: {refunded}, {newest_first}");
                assert_eq!(left.remaining(), expected.remaining(), "{quota}: {refunded}, {newest_first}");
            }
        }
    }
}

#[test]
fn reset_gives_the_whole_quota_back() {
    for quota in quotas() {
        let limiter = limiter(100, &ManualClock::new());
        let policy = Policy::from(quota);
        assert!(limiter.take_one(&policy, &key(1), 5).is_allowed());
        limiter.reset_now(&policy, &key(1));
        assert!(limiter.take_one(&policy, &key(1), 5).is_allowed(), "{quota}");
    }
}

#[test]
fn changed_quota_keeps_what_was_used() {
    let ten = |quota: Quota| quota;
    for from in quotas() {
        for to in quotas() {
            let limiter = limiter(100, &ManualClock::new());
            let (old, new) =
                (Policy::new("plan", ten(from)).expect("a name"), Policy::new("plan", ten(to)).expect("a name"));
            assert!(limiter.take_one(&old, &key(1), 3).is_allowed());
            assert_eq!(limiter.peek_one(&new, &key(1), 0).remaining(), 2, "peek {from} to {to}");
            assert_eq!(limiter.take_one(&new, &key(1), 1).remaining(), 1, "{from} to {to}");
            for _ in 0..5 {
                assert_eq!(limiter.peek_one(&old, &key(1), 0).remaining(), 1, "and back, {from} to {to}");
                assert_eq!(limiter.take_one(&old, &key(1), 0).remaining(), 1, "and back, {from} to {to}");
                assert_eq!(limiter.take_one(&new, &key(1), 0).remaining(), 1, "and again, {from} to {to}");
            }
        }
    }
}

#[test]
fn slots_of_a_queue_refunded_in_any_order_are_all_free() {
    for (limit, order) in [(60, [0, 1, 2, 3, 4]), (7, [2, 0, 1, 4, 3]), (7, [4, 3, 2, 1, 0])] {
        let clock = ManualClock::new();
        let limiter = limiter(100, &clock);
        let quota = Quota::leaky_queue(limit, MINUTE).and_then(|quota| quota.queue(20)).expect("the quota is possible");
        let policy = Policy::from(quota);
        let left = || limiter.peek_one(&policy, &key(1), 0).remaining();
        let take = |cost| limiter.take_one(&policy, &key(1), cost).take_receipt();
        let mut slots = [1, 2, 1, 3, 1].map(take);
        let costs = [1, 2, 1, 3, 1];
        let mut is_free = [false; 5];
        for at in order {
            limiter.refund_now(&[Refund::new(policy.clone(), key(1), slots[at].take().expect("it was taken"))]);
            is_free[at] = true;
            let tail = (0..5).rev().take_while(|at| is_free[*at]).map(|at| costs[at]).sum::<u64>();
            assert_eq!(left(), 21 - 8 + tail, "only what no later slot is taken behind");
        }
        // A kept slot that is over is worth nothing.
        let [first, second] = [take(1), take(1)].map(|slot| slot.expect("there is room"));
        limiter.refund_now(&[Refund::new(policy.clone(), key(1), first)]);
        clock.advance(MINUTE / u32::try_from(limit).expect("it is small") + Duration::from_millis(1));
        let before = left();
        limiter.refund_now(&[Refund::new(policy.clone(), key(1), second)]);
        assert!(before == 20 && left() == 21, "{before}");
        // A reset forgets kept slots.
        let [first, second] = [take(1), take(1)].map(|slot| slot.expect("there is room"));
        limiter.refund_now(&[Refund::new(policy.clone(), key(1), first)]);
        limiter.reset_now(&policy, &key(1));
        let others = [take(1), take(1)];
        limiter.refund_now(&[Refund::new(policy.clone(), key(1), second)]);
        assert_eq!((others.map(|slot| slot.is_some()), left()), ([true; 2], 20));
    }
}

#[test]
fn slots_shorter_than_a_microsecond_are_all_free_again() {
    const COUNT: usize = 5_022;
    let second = Duration::from_secs(1);
    for (limit, period) in
        [(7_000_000, second), (3_000_000, second), (1_000_000, second), (999_999, second), (7, 3 * second)]
    {
        for step in [1, COUNT - 1, 5, 2_513] {
            let limiter = limiter(100, &ManualClock::new());
            let quota = Quota::leaky_queue(limit, period).and_then(|quota| quota.queue(COUNT as u64));
            let policy = Policy::from(quota.expect("the quota is possible"));
            let mut slots: Vec<_> = (0..COUNT)
                .map(|_| limiter.take_one(&policy, &key(1), 1).take_receipt().expect("there is room"))
                .map(Some)
                .collect();
            for turn in 0..COUNT {
                let slot = slots[turn * step % COUNT].take().expect("each slot has its turn");
                limiter.refund_now(&[Refund::new(policy.clone(), key(1), slot)]);
            }
            let left = limiter.peek_one(&policy, &key(1), 0).remaining();
            assert_eq!(left, COUNT as u64 + 1, "{limit} in {period:?}, each {step}th");
        }
    }
}

#[test]
fn set_is_charged_entirely_or_not_at_all() {
    for first in quotas() {
        for second in quotas() {
            let limiter = limiter(100, &ManualClock::new());
            let (a, b) = (Policy::new("a", first).expect("a name"), Policy::new("b", second).expect("a name"));
            let (one, two) = (key(1), key(2));
            assert!(limiter.take_one(&b, &two, 4).is_allowed());
            let decision = limiter.take_now(&[Charge::new(&a, &one).cost(2), Charge::new(&b, &two).cost(2)]);
            assert!(!decision.is_allowed(), "{first} and {second}");
            assert!(decision.charges()[0].is_allowed() && !decision.charges()[1].is_allowed());
            assert_eq!(limiter.peek_one(&a, &one, 0).remaining(), 5, "nothing was taken: {first} and {second}");
            assert_eq!(limiter.peek_one(&b, &two, 0).remaining(), 1, "nothing was taken: {first} and {second}");
            let mut decision = limiter.take_now(&[Charge::new(&a, &one).cost(2), Charge::new(&b, &two)]);
            assert!(decision.is_allowed());
            assert_eq!(limiter.peek_one(&a, &one, 0).remaining(), 3);
            assert_eq!(limiter.peek_one(&b, &two, 0).remaining(), 0);
            let receipts = decision.take_receipts();
            let refunds: Vec<Refund> = receipts
                .into_iter()
                .zip([(&a, &one), (&b, &two)])
                .map(|(receipt, (policy, key))| Refund::new(policy.clone(), key.clone(), receipt.expect("taken")))
                .collect();
            limiter.refund_now(&refunds);
            assert_eq!(limiter.peek_one(&a, &one, 0).remaining(), 5, "given back: {first} and {second}");
            assert_eq!(limiter.peek_one(&b, &two, 0).remaining(), 1, "given back: {first} and {second}");
        }
    }
}

#[test]
fn observed_charges_never_deny_and_forced_ones_go_into_debt() {
    for quota in quotas() {
        let limiter = limiter(100, &ManualClock::new());
        let policy = Policy::from(quota);
        let one = key(1);
        assert!(limiter.take_now(&[Charge::new(&policy, &one).cost(4).effect(Effect::Observe)]).is_allowed());
        let over = limiter.take_now(&[Charge::new(&policy, &one).cost(2).effect(Effect::Observe)]);
        assert!(over.is_allowed() && !over.charges()[0].is_allowed(), "{quota}");
        assert_eq!(limiter.peek_one(&policy, &one, 0).remaining(), 1, "a denied observation takes nothing: {quota}");
        assert!(limiter.take_now(&[Charge::new(&policy, &one).cost(3).effect(Effect::Force)]).is_allowed());
        let denied = limiter.peek_one(&policy, &one, 1);
        assert!(!denied.is_allowed() && denied.remaining() == 0, "{quota}");
    }
}

#[test]
fn set_with_a_policy_and_key_twice_is_denied_loudly() {
    for quota in quotas() {
        let limiter = limiter(100, &ManualClock::new());
        let policy = Policy::from(quota);
        let one = key(1);
        let decision = limiter.take_now(&[Charge::new(&policy, &one), Charge::new(&policy, &one)]);
        assert!(!decision.is_allowed());
        assert_eq!(limiter.peek_one(&policy, &one, 0).remaining(), 5, "{quota}");
    }
}

#[test]
fn exactly_n_of_m_concurrent_requests_pass() {
    for quota in quotas() {
        let limiter = limiter(1_000, &ManualClock::new());
        let policy = Policy::from(quota);
        let passed = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                let (limiter, policy, passed) = (limiter.clone(), policy.clone(), &passed);
                scope.spawn(move || {
                    for n in 0..200 {
                        if limiter.take_one(&policy, &key(n), 1).is_allowed() {
                            passed.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        assert_eq!(passed.into_inner(), 1_000, "5 for each of 200 keys: {quota}");
    }
}

#[test]
fn concurrent_sets_never_leave_half_a_set_behind() {
    for second in quotas() {
        let limiter = limiter(1_000, &ManualClock::new());
        let a = Policy::new("a", Quota::per_hour(100_000)).expect("a name");
        let b = Policy::new("b", second).expect("a name");
        let passed = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                let (limiter, a, b, passed) = (limiter.clone(), a.clone(), b.clone(), &passed);
                scope.spawn(move || {
                    let everyone = Key::global();
                    for n in 0..300 {
                        let own = key((n + thread) % 100);
                        if limiter.take_now(&[Charge::new(&a, &everyone), Charge::new(&b, &own)]).is_allowed() {
                            passed.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        assert_eq!(passed.into_inner(), 500, "5 for each of 100 keys: {second}");
        assert_eq!(limiter.peek_one(&a, &Key::global(), 0).remaining(), 100_000 - 500, "{second}");
    }
}

#[derive(Default)]
struct Evictions {
    idle: AtomicU64,
    throttled: AtomicU64,
    full: AtomicU64,
}

struct Counting(Arc<Evictions>);

impl Observer for Counting {
    fn on_limiter_event(&self, event: &LimiterEvent) {
        match event {
            LimiterEvent::Evicted { throttled: true, .. } => self.0.throttled.fetch_add(1, Ordering::Relaxed),
            LimiterEvent::Evicted { .. } => self.0.idle.fetch_add(1, Ordering::Relaxed),
            _ => self.0.full.fetch_add(1, Ordering::Relaxed),
        };
    }
}

#[test]
fn full_table_forgets_fewer_than_ten_keys_in_a_million() {
    let (seen, capacity) = (Arc::new(Evictions::default()), cases(1_000_000));
    let limiter = MemoryLimiter::builder()
        .max_keys(capacity as usize)
        .clock(ManualClock::new())
        .observer(Counting(seen.clone()))
        .build()
        .expect("the setup is possible");
    let policy = Policy::from(Quota::per_hour(10));
    for n in 0..capacity {
        assert!(limiter.take_one(&policy, &key(n.into()), 1).is_allowed());
    }
    let forgotten = seen.idle.load(Ordering::Relaxed) + seen.throttled.load(Ordering::Relaxed);
    assert!(forgotten < 10, "{forgotten} of {capacity}");
    assert!(limiter.bytes() <= 40 * capacity as usize + 128);
}

#[test]
fn table_forgets_as_few_keys_after_a_flood_as_before() {
    let (seen, clock) = (Arc::new(Evictions::default()), ManualClock::new());
    let keys = cases(100_000);
    let limiter = MemoryLimiter::builder()
        .max_keys(keys as usize)
        .clock(clock.clone())
        .observer(Counting(seen.clone()))
        .build()
        .expect("the setup is possible");
    let (policy, keys) = (Policy::from(Quota::per_hour(10)), u64::from(keys));
    let take = |keys: std::ops::Range<u64>| {
        for n in keys {
            assert!(limiter.take_one(&policy, &key(n), 1).is_allowed());
        }
        seen.idle.swap(0, Ordering::Relaxed) + seen.throttled.swap(0, Ordering::Relaxed)
    };
    assert!(take(0..10 * keys) > 5 * keys, "the flood was larger than the table");
    clock.advance(Duration::from_secs(7_200));
    let forgotten = take(10 * keys..11 * keys);
    assert!(forgotten < 3, "{forgotten} of {keys}");
}

#[test]
fn throttled_key_stays_while_any_key_of_its_set_is_idle() {
    for quota in quotas() {
        let seen = Arc::new(Evictions::default());
        let limiter = MemoryLimiter::builder()
            .max_keys(1_000)
            .clock(ManualClock::new())
            .observer(Counting(seen.clone()))
            .build()
            .expect("the setup is possible");
        let policy = Policy::from(quota);
        let throttled: Vec<Key> = (0..50).map(|n| key(1_000_000 + n)).collect();
        for key in &throttled {
            assert!(limiter.take_one(&policy, key, 5).is_allowed());
        }
        for n in 0..12_000 {
            let _ = limiter.take_one(&policy, &key(n), 1);
        }
        assert!(seen.idle.load(Ordering::Relaxed) > 8_000, "the flood was larger than the table");
        assert_eq!(seen.throttled.load(Ordering::Relaxed), 0, "{quota}");
        for key in &throttled {
            assert!(!limiter.peek_one(&policy, key, 1).is_allowed(), "{quota}");
        }
    }
}

#[test]
fn full_table_that_denies_forgets_no_key() {
    for quota in quotas() {
        let seen = Arc::new(Evictions::default());
        let limiter = MemoryLimiter::builder()
            .max_keys(100)
            .on_full(OnFull::Deny)
            .clock(ManualClock::new())
            .observer(Counting(seen.clone()))
            .build()
            .expect("the setup is possible");
        let policy = Policy::from(quota);
        let held: Vec<u64> = (0..2_000).filter(|n| limiter.take_one(&policy, &key(*n), 1).is_allowed()).collect();
        assert!((100..1_000).contains(&held.len()), "{quota}: {}", held.len());
        assert_eq!(seen.full.load(Ordering::Relaxed), 2_000 - held.len() as u64);
        for n in held {
            assert_eq!(limiter.peek_one(&policy, &key(n), 0).remaining(), 4, "{quota}");
        }
    }
}

#[test]
fn full_table_that_denies_takes_a_key_where_a_slot_comes_free() {
    let builder = MemoryLimiter::builder().max_keys(8).on_full(OnFull::Deny).clock(ManualClock::new());
    let limiter = builder.build().expect("the setup is possible");
    let policy = Policy::from(Quota::per_hour(5));
    let is_taken = |n: &u64| limiter.take_one(&policy, &key(*n), 1).is_allowed();
    let (mut held, mut fresh, mut taken) = (Vec::new(), 0.., 0);
    for _ in 0..100 {
        // A flood, of which all keys but the first find no room.
        held.extend(fresh.by_ref().take(100).filter(is_taken));
        limiter.reset_now(&policy, &key(held.remove(0)));
        let next = fresh.next().filter(is_taken);
        taken += usize::from(next.is_some());
        held.extend(next);
    }
    assert!(taken > 75, "{taken} of 100 keys found room");
}

#[test]
fn full_arena_makes_room_without_growing() {
    let clock = ManualClock::new();
    let limiter =
        MemoryLimiter::builder().max_keys(1_000).min_entries(700).clock(clock.clone()).build().expect("possible");
    let policy = Policy::from(Quota::sliding_log(100, MINUTE).expect("possible"));
    let _ = limiter.take_one(&policy, &key(0), 1);
    let bytes = limiter.bytes();
    for n in 0..100_000 {
        clock.advance(Duration::from_micros(50));
        let _ = limiter.take_one(&policy, &key(n % 500), 1);
    }
    assert_eq!(limiter.bytes(), bytes);
}

#[test]
fn limiter_says_how_much_memory_its_slots_take() {
    let clock = ManualClock::new();
    for keys in [1_000, 100_000] {
        // Five slots of 16 bytes for two keys, in a number of lines that is a power of two times another.
        let (bytes, slots) = (limiter(keys, &clock).bytes(), keys * 40);
        assert!((slots * 9 / 10..2 * slots).contains(&bytes), "{bytes} for {keys} keys");
    }
}

/// Its oldest sub-window counts in part, so all of them may hold more units than the limit.
#[test]
fn snapshot_of_a_sliding_window_keeps_its_newest_units() {
    let clock = ManualClock::at(Timestamp::from_micros(1_000_000_000_000_000 / 60_000_000 * 60_000_000));
    let quota = Quota::sliding_window(4, MINUTE).and_then(|quota| quota.buckets(2)).expect("two buckets are possible");
    let policy = Policy::new("p", quota.max_debt(0).expect("no debt is possible")).expect("a name");
    let first = limiter(100, &clock);
    assert!(first.take_one(&policy, &key(1), 4).is_allowed());
    clock.advance(Duration::from_secs(75));
    assert!(first.take_one(&policy, &key(1), 2).is_allowed());
    let restored = MemoryLimiter::builder().clock(clock.clone()).restore(first.snapshot()).build();
    let restored = restored.expect("the snapshot is whole");
    assert_eq!(first.peek_one(&policy, &key(1), 0), restored.peek_one(&policy, &key(1), 0));
    assert!(!restored.take_one(&policy, &key(1), 1).is_allowed());
}

#[test]
fn snapshot_restores_every_state_into_a_table_of_any_size() {
    for quota in quotas() {
        let clock = ManualClock::new();
        let first = limiter(1_000, &clock);
        let policy = Policy::new("daily", quota).expect("a name");
        for n in 0..200 {
            assert!(first.take_one(&policy, &key(n), 1 + n % 4).is_allowed());
        }
        for capacity in [500, 1_000, 7_777] {
            let second = MemoryLimiter::builder()
                .max_keys(capacity)
                .clock(clock.clone())
                .restore(first.snapshot())
                .build()
                .expect("the snapshot is whole");
            for n in 0..200 {
                assert_eq!(
                    second.peek_one(&policy, &key(n), 1),
                    first.peek_one(&policy, &key(n), 1),
                    "{quota}, key {n}, capacity {capacity}"
                );
            }
        }
    }
}

/// The machine that restores it may not have been told the time yet.
#[test]
fn snapshot_restored_by_an_earlier_clock_forgets_nothing() {
    let clock = ManualClock::new();
    for quota in quotas() {
        let first = limiter(100, &clock);
        let policy = Policy::new("daily", quota).expect("a name");
        assert!(first.take_one(&policy, &key(1), 5).is_allowed());
        for back in [SECOND, MINUTE, 2 * MINUTE, 1_440 * MINUTE, Duration::MAX] {
            let now = clock.now().as_micros().saturating_sub(u64::try_from(back.as_micros()).unwrap_or(u64::MAX));
            let earlier = ManualClock::at(Timestamp::from_micros(now));
            let restored = MemoryLimiter::builder().clock(earlier.clone()).restore(first.snapshot()).build();
            let restored = restored.expect("the snapshot is whole");
            assert!(!restored.take_one(&policy, &key(1), 1).is_allowed(), "{quota}, {back:?} before");
            earlier.advance(4 * MINUTE);
            assert!(restored.take_one(&policy, &key(1), 5).is_allowed(), "{quota}, {back:?} before, and for too long");
        }
    }
}

/// A snapshot has the memory of blocks, and not only the strikes that count.
#[test]
fn restored_key_is_closed_for_longer_after_an_earlier_block() {
    let clock = ManualClock::new();
    let quota = Quota::block(2, MINUTE, MINUTE).and_then(|quota| quota.growing(2, 60 * MINUTE, 60 * MINUTE));
    let policy = Policy::new("login", quota.expect("a block that grows is possible")).expect("a name");
    let first = limiter(100, &clock);
    let strike = |limiter: &MemoryLimiter| drop(limiter.take_one(&policy, &key(1), 1));
    (0..2).for_each(|_| strike(&first));
    assert_eq!(first.peek_one(&policy, &key(1), 1).wait(), Wait::After(MINUTE));
    clock.advance(MINUTE);
    strike(&first);
    let restored = MemoryLimiter::builder().clock(clock.clone()).restore(first.snapshot()).build();
    let restored = restored.expect("the snapshot is whole");
    strike(&restored);
    assert_eq!(restored.peek_one(&policy, &key(1), 1).wait(), Wait::After(2 * MINUTE));
}

/// It made a slot for the state of no units, and so forgot a key in a full table.
#[test]
fn charge_of_a_closed_quota_takes_the_room_of_no_other() {
    let counting = Quota::fixed_window(0, MINUTE).and_then(|quota| quota.count_denied());
    let closed = [(counting, Effect::Enforce), (Quota::step_bucket(0, MINUTE), Effect::Force)];
    for (quota, effect) in closed.map(|(quota, effect)| (Policy::from(quota.expect("it is possible")), effect)) {
        let limiter = limiter(1, &ManualClock::new());
        let hourly = Policy::from(Quota::per_hour(5));
        for n in 0..8 {
            assert!(limiter.take_one(&hourly, &key(n), 1).is_allowed());
        }
        for n in 0..100 {
            let _ = limiter.take_now(&[Charge::new(&quota, &key(n)).effect(effect)]);
        }
        let left: Vec<u64> = (0..8).map(|n| limiter.peek_one(&hourly, &key(n), 0).remaining()).collect();
        assert_eq!(left, [4; 8], "{quota:?}");
    }
}

#[test]
fn expired_states_of_a_snapshot_take_the_room_of_no_other() {
    let clock = ManualClock::new();
    let first = limiter(1_000, &clock);
    let hourly = Policy::from(Quota::per_hour(5));
    let log = Policy::from(Quota::sliding_log(5, SECOND).expect("a log is possible"));
    for n in 0..500 {
        assert!(first.take_one(&log, &key(n), 1).is_allowed());
    }
    for n in 0..8 {
        assert!(first.take_one(&hourly, &key(n), 5).is_allowed());
    }
    let snapshot = first.snapshot();
    clock.advance(MINUTE);
    let seen = Arc::new(Evictions::default());
    let builder = MemoryLimiter::builder().max_keys(1).clock(clock).observer(Counting(seen.clone()));
    let restored = builder.restore(snapshot).build().expect("the snapshot is whole");
    assert!((0..8).all(|n| !restored.take_one(&hourly, &key(n), 5).is_allowed()), "there are eight slots");
    assert_eq!(seen.throttled.load(Ordering::Relaxed) + seen.idle.load(Ordering::Relaxed), 0);
}

#[test]
fn restored_state_that_finds_no_room_is_reported() {
    let clock = ManualClock::new();
    let first = limiter(1_000, &clock);
    let log = Quota::sliding_log(5, MINUTE).expect("a log is possible");
    let policies = [Policy::new("bucket", Quota::per_minute(5)), Policy::new("log", log)].map(|it| it.expect("a name"));
    for n in 0..100 {
        for (policy, cost) in policies.iter().zip([5, 4]) {
            assert!(first.take_one(policy, &key(n), cost).is_allowed());
        }
    }
    for on_full in [OnFull::Evict, OnFull::Deny] {
        let seen = Arc::new(Evictions::default());
        let builder = MemoryLimiter::builder().max_keys(20).on_full(on_full).clock(clock.clone());
        let restored = builder.observer(Counting(seen.clone())).restore(first.snapshot()).build();
        let left = restored.expect("the snapshot is whole").hooks().occupancy().map_or(0, |held| held.keys() as u64);
        let [idle, throttled, full] =
            [&seen.idle, &seen.throttled, &seen.full].map(|seen| seen.load(Ordering::Relaxed));
        assert_eq!((left + idle + throttled, full), (200, 0), "{on_full}: {left} are left");
        assert!(idle > 0 && throttled > 0, "{on_full}: {idle} with and {throttled} without allowance");
    }
}

/// A state names its policy by a number, and one number stands for units that are held elsewhere.
#[test]
fn snapshot_with_policies_beyond_the_last_number_is_harmless() {
    let clock = ManualClock::new();
    let number = |number: u64| number.to_le_bytes().to_vec();
    let text = |text: &str| [number(text.len() as u64), text.as_bytes().to_vec()].concat();
    let policies = (0..16_384).flat_map(|_| [text("p"), text("5 per minute")].concat());
    let state = [number(7 << 40 | 16_383), number(clock.now().as_micros() + 1_000_000), number(0)].concat();
    let bytes = [b"trl-snap\x01".to_vec(), number(1), number(2), number(16_384)].concat();
    let bytes = bytes.into_iter().chain(policies).chain(number(2)).chain(state.repeat(2)).collect::<Vec<u8>>();
    let restored = MemoryLimiter::builder().max_keys(100).clock(clock.clone()).restore(bytes).build();
    let restored = restored.expect("each policy is one");
    clock.advance(MINUTE);
    assert_eq!(restored.hooks().occupancy().map(|held| held.keys()), Some(0), "the state has expired");
}

#[test]
fn damaged_snapshot_is_refused_or_harmless() {
    let clock = ManualClock::new();
    let first = limiter(100, &clock);
    for (n, quota) in quotas().into_iter().enumerate() {
        let policy = Policy::new(format!("p{n}"), quota).expect("a name");
        let _ = first.take_one(&policy, &key(1), 3);
    }
    let whole = first.snapshot();
    let mut refused = 0;
    for at in 0..whole.len() {
        for damage in [0x01, 0x80, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] ^= damage;
            let restored = MemoryLimiter::builder().max_keys(100).clock(clock.clone()).restore(bytes).build();
            match restored {
                Err(error) => {
                    refused += 1;
                    assert!(
                        error.to_string().contains("start without it") || error.to_string().contains("restore what")
                    );
                }
                Ok(limiter) => {
                    for (n, quota) in quotas().into_iter().enumerate() {
                        let policy = Policy::new(format!("p{n}"), quota).expect("a name");
                        assert!(limiter.take_one(&policy, &key(1), 1).remaining() <= 5);
                    }
                }
            }
        }
        assert!(MemoryLimiter::builder().restore(&whole[..at]).build().is_err());
    }
    assert!(refused > 0);
}

#[test]
fn clock_at_either_end_of_time_never_panics() {
    use tower_ratelimit::clock::Timestamp;
    for quota in quotas() {
        for start in [0, 1, 1 << 52, u64::MAX - 1] {
            let clock = ManualClock::at(Timestamp::from_micros(start));
            let limiter = limiter(100, &clock);
            let policy = Policy::from(quota);
            for now in [start, u64::MAX, 0, start, start.saturating_add(60_000_000), 1 << 53, start, u64::MAX] {
                clock.set(Timestamp::from_micros(now));
                for cost in [0, 1, 5, 6, u64::MAX] {
                    assert!(limiter.take_one(&policy, &key(1), cost).remaining() <= 5, "{quota} from {start} at {now}");
                }
            }
        }
    }
}

#[test]
fn capacity_out_of_range_is_refused_by_the_builder() {
    for capacity in [0, usize::MAX] {
        let error = MemoryLimiter::builder().max_keys(capacity).build().expect_err("out of range");
        assert!(error.to_string().contains("use 1 to"));
    }
}

#[test]
fn clock_that_steps_back_costs_a_set_at_most_one_full_drain() {
    for quota in quotas() {
        let clock = ManualClock::at(Timestamp::from_micros(1_000_000_000_000));
        let limiter = limiter(100, &clock);
        let policy = Policy::new("a", quota).expect("a name");
        let other = Policy::new("b", Quota::per_hour(100)).expect("a name");
        let (one, two) = (key(1), key(2));
        assert!(limiter.take_one(&policy, &one, 5).is_allowed());
        clock.set(Timestamp::from_micros(900_000_000_000));
        let set = [Charge::new(&policy, &one), Charge::new(&other, &two)];
        let _ = limiter.take_now(&set);
        clock.advance(2 * MINUTE);
        assert!(limiter.take_now(&set).is_allowed(), "{quota}");
    }
}

/// Calls the limiter that reports to it, and then panics.
#[derive(Clone, Default)]
struct Rude(Arc<std::sync::OnceLock<(MemoryLimiter, Policy)>>);

impl Observer for Rude {
    fn on_limiter_event(&self, _: &LimiterEvent) {
        if let Some((limiter, policy)) = self.0.get() {
            for n in 0..300 {
                let _ = limiter.peek_one(policy, &key(n), 1);
            }
            panic!("an observer's own trouble");
        }
    }
}

#[test]
fn observer_may_call_the_limiter_and_panic_without_a_deadlock() {
    for quota in quotas() {
        let observer = Rude::default();
        let limiter = MemoryLimiter::builder()
            .max_keys(50)
            .clock(ManualClock::new())
            .observer(observer.clone())
            .build()
            .expect("the setup is possible");
        let policy = Policy::new("a", quota).expect("a name");
        let other = Policy::new("b", Quota::per_hour(1_000)).expect("a name");
        assert!(observer.0.set((limiter.clone(), policy.clone())).is_ok());
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        let mut panics = 0;
        for n in 0..300 {
            let (one, two) = (key(n), key(n + 1_000_000));
            let charges = [Charge::new(&policy, &one), Charge::new(&other, &two)];
            let call =
                std::panic::AssertUnwindSafe(|| limiter.take_now(if n % 2 == 0 { &charges[..1] } else { &charges }));
            panics += u32::from(std::panic::catch_unwind(call).is_err());
        }
        std::panic::set_hook(hook);
        assert!(panics > 10, "{quota}: the table was full");
        for n in 0..300 {
            assert!(limiter.peek_one(&policy, &key(n), 1).is_allowed(), "{quota}");
        }
    }
}

/// A clock that panics at each seventh reading, while it is set to.
#[derive(Clone, Debug, Default)]
struct Panicking {
    clock: ManualClock,
    panics: Arc<AtomicBool>,
    readings: Arc<AtomicU64>,
}

impl Clock for Panicking {
    fn now(&self) -> Timestamp {
        let reading = self.readings.fetch_add(1, Ordering::Relaxed);
        assert!(!self.panics.load(Ordering::Relaxed) || reading % 7 != 0, "a clock's own trouble");
        self.clock.now()
    }
}

#[test]
fn clock_that_panics_leaves_nothing_locked() {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    for quota in quotas() {
        let clock = Panicking::default();
        // The table grows, and its entries run out.
        let limiter = MemoryLimiter::builder().max_keys(4_000).min_entries(100).clock(clock.clone()).build();
        let limiter = limiter.expect("the setup is possible");
        let policy = Policy::new("a", quota).expect("a name");
        let other = Policy::new("b", Quota::per_hour(1_000)).expect("a name");
        clock.panics.store(true, Ordering::Relaxed);
        let mut panics = 0;
        for n in 0..6_000 {
            let (one, two) = (key(n), key(n + 1_000_000));
            let charges = [Charge::new(&policy, &one), Charge::new(&other, &two)];
            let call = || {
                let mut decision = limiter.take_now(if n % 2 == 0 { &charges[..1] } else { &charges });
                let receipt = decision.charge_mut(0).and_then(ChargeDecision::take_receipt);
                if let Some(receipt) = receipt.filter(|_| n % 3 == 0) {
                    limiter.refund_now(&[Refund::new(policy.clone(), one.clone(), receipt)]);
                }
            };
            panics += u32::from(std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).is_err());
            clock.clock.advance(Duration::from_millis(1));
        }
        clock.panics.store(false, Ordering::Relaxed);
        assert!(panics > 100, "{quota}: {panics}");
        for n in 0..6_000 {
            let _ = limiter.take_one(&policy, &key(n), 1); // waits for ever if its slot is locked
        }
    }
    std::panic::set_hook(hook);
}

#[test]
fn changed_quota_without_room_forgets_no_state() {
    let large = [
        Quota::sliding_log(5, MINUTE).expect("possible"),
        Quota::token_bucket(99_999, SECOND).and_then(|quota| quota.burst(5)).expect("possible"),
    ];
    for quota in large {
        let limiter = MemoryLimiter::builder()
            .max_keys(100)
            .min_entries(7)
            .on_full(OnFull::Deny)
            .clock(ManualClock::new())
            .build()
            .expect("the setup is possible");
        let before = Policy::new("a", Quota::fixed_window(5, MINUTE).expect("possible")).expect("a name");
        let after = Policy::new("a", quota).expect("a name");
        for n in 0..20 {
            assert!(limiter.take_one(&before, &key(n), 4).is_allowed());
        }
        let filler = Policy::new("filler", quota).expect("a name");
        let filled = key(0);
        for n in 0..2_000 {
            let _ = limiter.take_one(&filler, &key(n), 1);
        }
        for n in 0..20 {
            let key = key(n);
            let two = Charge::new(&after, &key).cost(2);
            assert!(!limiter.take_now(&[two]).is_allowed(), "{quota}: key {n} has one unit left");
            assert!(!limiter.take_now(&[two, Charge::new(&filler, &filled)]).is_allowed());
            assert!(!limiter.take_one(&before, &key, 2).is_allowed(), "{quota}: key {n} has one unit left");
        }
    }
}

#[test]
fn sliding_window_keeps_its_promise_when_the_clock_steps_back() {
    // 100 units in one sub-window, and 50 more as its weight shrinks: more than any sub-window
    // holds.
    let quota = Quota::sliding_window(100, MINUTE).and_then(|quota| quota.buckets(6)?.max_debt(0)).expect("possible");
    let (policy, key) = (Policy::from(quota), key(1));
    let clock = ManualClock::at(Timestamp::from_micros(1_800_000_000_000_000));
    let limiter = limiter(100, &clock);
    assert!(limiter.take_one(&policy, &key, 100).is_allowed());
    clock.advance(Duration::from_secs(65));
    assert!(limiter.take_one(&policy, &key, 50).is_allowed());
    clock.set(Timestamp::from_micros(1_799_999_000_000_000));
    let wait = limiter.take_one(&policy, &key, 1).wait().duration().expect("one unit fits");
    clock.advance(wait - Duration::from_micros(1));
    assert!(!limiter.take_one(&policy, &key, 1).is_allowed(), "{wait:?} is not over");
    clock.advance(Duration::from_micros(1));
    assert!(limiter.take_one(&policy, &key, 1).is_allowed(), "{wait:?} is over");
}

#[test]
fn reset_key_has_its_whole_quota_also_when_the_clock_steps_back() {
    for quota in quotas() {
        let clock = ManualClock::new();
        let limiter = limiter(100, &clock);
        let (policy, key) = (Policy::from(quota), key(1));
        clock.advance(10 * MINUTE);
        assert!(limiter.take_one(&policy, &key, policy.quota().capacity()).is_allowed(), "{quota}");
        limiter.reset_now(&policy, &key);
        clock.set(Timestamp::from_micros(1_735_689_600_000_000 + 510_000_000));
        assert!(limiter.take_one(&policy, &key, policy.quota().capacity()).is_allowed(), "{quota}");
    }
}

#[test]
fn occupancy_counts_the_states_that_live() {
    let clock = ManualClock::new();
    let limiter = MemoryLimiter::builder().max_keys(1_000).clock(clock.clone()).build().unwrap();
    let seen = || limiter.hooks().occupancy().map(|occupancy| (occupancy.keys(), occupancy.capacity()));
    assert_eq!(seen(), Some((0, 2_500)));
    let (short, long) = (Policy::from(Quota::per_second(1)), Policy::from(Quota::per_hour(1)));
    for number in 0..100_u64 {
        let key = Key::of(number).unwrap();
        assert!(limiter.take_one(&short, &key, 1).is_allowed());
        if number % 2 == 0 {
            assert!(limiter.take_one(&long, &key, 1).is_allowed());
        }
    }
    assert_eq!(seen(), Some((150, 2_500)));
    clock.advance(Duration::from_secs(2));
    assert_eq!(seen(), Some((50, 2_500)));
}

/// Returns the time that this thread has had the processor for: a busy machine takes none of that. Elsewhere than on
/// Linux it is the time that has passed.
#[expect(clippy::disallowed_methods, reason = "it measures how long a call takes")]
fn processor_time() -> Duration {
    static BEGAN: std::sync::LazyLock<std::time::Instant> = std::sync::LazyLock::new(std::time::Instant::now);
    let passed = BEGAN.elapsed();
    std::thread::yield_now(); // the system counts it when another thread may have the processor
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let nanoseconds = stat.and_then(|stat| stat.split(' ').next()?.parse().ok());
    nanoseconds.map_or(passed, Duration::from_nanos)
}

/// The time of a set grows with its charges, and not with their square: also while the table grows for fresh keys.
#[test]
fn large_set_takes_time_in_proportion() {
    let policy = Policy::new("hourly", Quota::per_hour(5)).unwrap();
    let time = |count: u64| {
        let limiter = MemoryLimiter::new();
        let keys: Vec<Key> = (0..count).map(|key| Key::of(key).unwrap()).collect();
        let charges: Vec<Charge<'_>> = keys.iter().map(|key| Charge::new(&policy, key)).collect();
        let before = processor_time();
        assert!(limiter.take_now(&charges).is_allowed());
        processor_time() - before
    };
    let quickest = |count| (0..3).map(|_| time(count)).min().unwrap();
    let (few, many) = (quickest(2_000), quickest(16_000));
    println!("2,000 fresh keys: {few:?}, 16,000: {many:?}");
    // Eight times as many. By the square it would be 64 times as long.
    assert!(many < 32 * few, "{few:?} {many:?}");
}

/// A set of many charges decides as one of few: each key that occurs twice is denied for good.
#[test]
fn key_that_a_large_set_has_twice_is_denied() {
    let policy = Policy::new("hourly", Quota::per_hour(5)).unwrap();
    for count in [3, 33, 400] {
        let limiter = MemoryLimiter::new();
        let keys: Vec<Key> = (0..count).map(|key| Key::of(key).unwrap()).collect();
        let mut charges: Vec<Charge<'_>> = keys.iter().map(|key| Charge::new(&policy, key)).collect();
        let decision = limiter.take_now(&charges);
        assert!(decision.is_allowed() && decision.charges().iter().all(|charge| charge.remaining() == 4), "{count}");
        charges.push(Charge::new(&policy, &keys[1]));
        let decision = limiter.take_now(&charges);
        assert!(!decision.is_allowed() && decision.charges()[keys.len()].wait() == Wait::Never, "{count}");
        let left = limiter.take_now(&charges[..keys.len()]);
        assert!(left.charges().iter().all(|charge| charge.remaining() == 3), "{count}: the refused set took nothing");
    }
}
