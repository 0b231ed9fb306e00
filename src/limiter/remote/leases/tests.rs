//! Processes with leases, over one store in memory.

use proptest::prelude::*;

use super::*;
use crate::base::sampling::config;
use crate::{MemoryLimiter, clock::ManualClock, quota::Quota};

const MS: Duration = Duration::from_millis(1);

/// One process, and the store that it shares.
struct Process {
    store: MemoryLimiter,
    leases: Leases,
    policy: Policy,
    key: Key,
    calls: u64,
}

struct World {
    clock: ManualClock,
    processes: Vec<Process>,
}

impl World {
    fn new(processes: usize, most: u64, quota: Quota) -> Self {
        let clock = ManualClock::at(Timestamp::from_micros(1_700_000_000_000_000));
        let store = MemoryLimiter::builder().max_keys(100).clock(clock.clone()).build().unwrap();
        let process = || Process {
            store: store.clone(),
            leases: Leases::new(most, Tags::default(), Arc::new(clock.clone())),
            policy: Policy::new("hot", quota).unwrap(),
            key: Key::of("all").unwrap(),
            calls: 0,
        };
        Self { processes: (0..processes).map(|_| process()).collect(), clock }
    }

    fn remaining(&self) -> u64 {
        let Process { store, policy, key, .. } = &self.processes[0];
        store.peek_one(policy, key, 0).remaining()
    }
}

impl Process {
    /// As the limiter does it: from a lease, else from the store, and the lease that is wanted
    /// besides.
    fn take(&mut self, cost: u64) -> ChargeDecision {
        let charge = Charge::new(&self.policy, &self.key).cost(cost);
        let (granted, wanted) = self.leases.take(&charge);
        let decision = granted.unwrap_or_else(|| {
            self.calls += 1;
            let decision = self.store.take_one(&self.policy, &self.key, cost);
            self.leases.record_remaining(self.leases.tags.charge(&charge), &decision);
            decision
        });
        if let Some(wanted) = wanted {
            self.calls += 1;
            let answer = self.store.take_one(&self.policy, &self.key, wanted.units);
            assert!(self.leases.record_answer(&wanted, Some(answer)).is_none(), "it is watched");
        }
        decision
    }

    fn refund(&mut self, mut decision: ChargeDecision) {
        let receipt = decision.take_receipt().unwrap();
        self.store.refund_now(&[Refund::new(self.policy.clone(), self.key.clone(), receipt)]);
    }

    fn sweep(&mut self) {
        let over = self.leases.end_expired();
        self.store.refund_now(&over);
    }
}

#[test]
fn a_hot_key_costs_few_calls_and_a_cold_one_is_never_leased() {
    let quota = Quota::per_second(4_000_000);
    let mut world = World::new(1, 100_000, quota);
    let process = &mut world.processes[0];
    for _ in 0..100_000 {
        world.clock.advance(MS / 100);
        assert!(process.take(1).is_allowed());
    }
    assert!(process.calls < 1_000, "{} calls for 100,000 in a second", process.calls);

    let mut world = World::new(1, 100_000, quota);
    let process = &mut world.processes[0];
    for _ in 0..1_000 {
        world.clock.advance(2 * MS);
        process.take(1);
    }
    assert_eq!(process.calls, 1_000, "500 a second are asked for one by one");
}

#[test]
fn keys_for_which_there_is_no_place_are_asked_for_each_time() {
    let mut world = World::new(1, 100, Quota::fixed_window(1_000_000, Duration::from_secs(3_600)).unwrap());
    let process = &mut world.processes[0];
    let mut leased = 0;
    for number in 0..2 * SLOTS as u64 {
        process.key = Key::of(number % 50).unwrap(); // the store's own bound is not what is tested
        let stored = process.key.clone();
        process.policy = Policy::new(format!("p{number}"), *process.policy.quota()).unwrap();
        let before = process.calls;
        (0..50).for_each(|_| assert!(process.take(1).is_allowed()));
        let calls = process.calls - before;
        assert!(calls <= 50, "one each, or fewer with leases");
        leased += usize::from(calls < 50);
        // Nothing is charged twice, or lost: what was not used is in a lease.
        process.leases.forget(&process.policy, &stored);
        process.store.reset_now(&process.policy, &stored);
    }
    assert!((1..=SLOTS).contains(&leased), "{leased} of {} keys were leased", 2 * SLOTS);
}

#[test]
fn unused_lease_is_refunded() {
    let quota = Quota::fixed_window(1_000_000, Duration::from_secs(86_400)).unwrap();
    let mut world = World::new(1, 1_000, quota);
    for _ in 0..500 {
        world.clock.advance(MS / 10);
        assert!(world.processes[0].take(1).is_allowed());
    }
    assert!(world.remaining() < 1_000_000 - 500, "some are held");
    world.clock.advance(HELD);
    world.processes[0].sweep();
    assert_eq!(world.remaining(), 1_000_000 - 500);
}

#[test]
fn a_limit_is_reached_to_the_unit() {
    let quota = Quota::fixed_window(5_000, Duration::from_secs(86_400)).unwrap();
    let mut world = World::new(1, 1_000, quota);
    let mut admitted = 0;
    for _ in 0..20_000 {
        world.clock.advance(MS / 100);
        admitted += u64::from(world.processes[0].take(1).is_allowed());
        world.processes[0].sweep();
    }
    assert_eq!(admitted, 5_000);
}

#[test]
fn queues_blocks_meters_and_counted_denials_are_not_leased() {
    let minute = Duration::from_secs(60);
    for quota in [
        Quota::leaky_queue(100_000, minute).unwrap(),
        Quota::fixed_window(100_000, minute).unwrap().count_denied().unwrap(),
        Quota::block(4_095, minute, minute).unwrap(),
        Quota::meter(100_000, minute).unwrap(),
    ] {
        let mut world = World::new(1, 1_000, quota);
        for _ in 0..1_000 {
            world.processes[0].take(1);
        }
        assert_eq!(world.processes[0].calls, 1_000);
    }
}

#[test]
fn lease_of_an_unwatched_key_is_refunded() {
    let world = World::new(1, 1_000, Quota::per_minute(100_000));
    let Process { store, leases, policy, key, .. } = &world.processes[0];
    let wanted = Wanted { policy: policy.clone(), key: key.clone(), units: 500 };
    let refund = leases.record_answer(&wanted, Some(store.take_one(policy, key, 500))).unwrap();
    store.refund_now(&[refund]);
    assert_eq!(world.remaining(), 100_000);
}

#[test]
fn lease_ends_at_a_reset_under_any_quota_of_its_policy() {
    let mut world = World::new(1, 1_000, Quota::fixed_window(1_000_000, Duration::from_secs(86_400)).unwrap());
    let clock = world.clock.clone();
    let Process { store, leases, policy, key, .. } = &mut world.processes[0];
    let charge = Charge::new(policy, key);
    let tag = leases.tags.charge(&charge);
    let mut under_way = None;
    while under_way.is_none() {
        clock.advance(MS / 100);
        let (_, wanted) = leases.take(&charge);
        leases.record_remaining(tag, &store.take_one(policy, key, 1));
        under_way = wanted;
    }
    let wanted = under_way.unwrap();
    let answer = store.take_one(policy, key, wanted.units);
    let other = Policy::new(policy.name(), Quota::per_hour(1)).unwrap();
    leases.forget(&other, key);
    store.reset_now(policy, key);
    assert!(leases.record_answer(&wanted, Some(answer)).is_none(), "it was of the state that is gone");
    assert!(leases.take(&charge).0.is_none());
    clock.advance(HELD);
    assert!(leases.end_expired().is_empty());
}

#[test]
fn leased_unit_has_the_receipt_of_its_own_place() {
    for quota in
        [Quota::per_second(700), Quota::step_bucket(70, Duration::from_millis(100)).unwrap().burst(700).unwrap()]
    {
        let world = World::new(1, 1_000, quota);
        let Process { store, policy, key, .. } = &world.processes[0];
        let whole = store.take_one(policy, key, 200).take_receipt().unwrap();
        store.reset_now(policy, key);
        for left in (0..200).rev() {
            let own = store.take_one(policy, key, 1).take_receipt().unwrap();
            assert_eq!(policy.quota().decider().first_of(&whole, 1, left), own, "{left} more of {quota}");
        }
    }
}

proptest! {
    #![proptest_config(config(256))]

    #[test]
    fn leases_charge_what_was_used_once_all_are_refunded(
        steps in proptest::collection::vec((0..3_usize, 1..4_u64, 0..3_000_u64, 0..20_u8), 1..2_000),
        most in 1..400_u64,
        limit in 50..5_000_u64,
    ) {
        let quota = Quota::fixed_window(limit, Duration::from_secs(86_400)).unwrap();
        let mut world = World::new(3, most, quota);
        let mut used = 0;
        for (process, cost, passed_us, what) in steps {
            world.clock.advance(Duration::from_micros(passed_us / 10));
            let process = &mut world.processes[process];
            let decision = process.take(cost);
            if decision.is_allowed() {
                used += cost;
                if what == 0 {
                    process.refund(decision);
                    used -= cost;
                }
            }
            if what == 1 {
                process.sweep();
            }
            prop_assert!(used <= limit, "never above the total");
            let remaining = world.remaining();
            prop_assert!(limit - remaining <= used + 3 * most, "no process holds more");
        }
        world.clock.advance(HELD);
        world.processes.iter_mut().for_each(Process::sweep);
        prop_assert_eq!(limit - world.remaining(), used);
    }
}
