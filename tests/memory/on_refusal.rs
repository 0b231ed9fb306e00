//! `Effect::OnRefusal`: blocks count refusals, and meters count what exceeds a quota.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tower_ratelimit::{
    Key, MemoryLimiter, Policy, Quota, Wait,
    clock::ManualClock,
    limiter::{Blocks, Charge, Decision, Effect, Meters, Refund},
    observe::{LimiterEvent, Observer},
    quota::Anchor,
};

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3_600);

fn key(n: u64) -> Key {
    Key::of(n).expect("an integer makes a key")
}

fn limiter(clock: &ManualClock) -> MemoryLimiter {
    MemoryLimiter::builder().max_keys(1_000).clock(clock.clone()).build().expect("the setup is possible")
}

fn policy(name: &str, quota: Result<Quota, tower_ratelimit::ConfigError>) -> Policy {
    Policy::new(name, quota.expect("the quota is possible")).expect("the name is a name")
}

const ON_REFUSAL: Effect = Effect::OnRefusal { of: 1 };

/// A limit of two per minute, whose third refusal within ten minutes closes for an hour.
struct Login {
    clock: ManualClock,
    limiter: MemoryLimiter,
    tries: Policy,
    block: Policy,
}

impl Login {
    fn with(block: Quota) -> Self {
        let clock = ManualClock::new();
        let tries = policy("tries", Quota::fixed_window(2, MINUTE));
        Self { limiter: limiter(&clock), clock, tries, block: policy("block", Ok(block)) }
    }

    fn new() -> Self {
        Self::with(Quota::block(3, 10 * MINUTE, HOUR).expect("the block is possible"))
    }

    fn take(&self) -> Decision {
        let key = key(1);
        let charges = [Charge::new(&self.tries, &key), Charge::new(&self.block, &key).effect(ON_REFUSAL)];
        let peeked = self.limiter.peek_now(&charges);
        let taken = self.limiter.take_now(&charges);
        assert_eq!(peeked.charges(), taken.charges().to_vec(), "a peek says what a take does");
        taken
    }

    /// Returns the decision of the block, and how long it stays closed.
    fn closed_for(&self) -> Option<Duration> {
        let look = self.limiter.peek_one(&self.block, &key(1), 0);
        assert_eq!(look.is_allowed(), look.wait().duration().is_none());
        look.wait().duration()
    }

    /// Uses up the limit and the refusals that the block allows.
    fn get_blocked(&self) -> Duration {
        (0..100)
            .find_map(|_| {
                let _ = self.take();
                self.closed_for()
            })
            .expect("it is closed in the end")
    }
}

#[test]
fn block_closes_its_key_after_the_given_number_of_refusals() {
    let login = Login::new();
    for _ in 0..2 {
        assert!(login.take().is_allowed());
    }
    for strikes in 1..=2 {
        let refused = login.take();
        assert!(!refused.is_allowed() && refused.charges()[1].is_allowed(), "only the limit refuses");
        assert_eq!(refused.charges()[1].remaining(), 3 - strikes);
        assert_eq!(login.closed_for(), None);
    }
    let third = login.take();
    assert_eq!(third.charges()[1].wait(), Wait::After(HOUR), "what closes says until when");
    login.clock.advance(30 * MINUTE);
    let closed = login.take();
    assert!(closed.charges()[0].is_allowed(), "the limit itself would let it pass");
    assert!(!closed.is_allowed() && closed.charges()[1].wait() == Wait::After(30 * MINUTE), "nothing prolongs it");
    assert_eq!(login.limiter.peek_one(&login.tries, &key(1), 0).remaining(), 2, "and nothing is taken from the limit");
    login.clock.advance(30 * MINUTE - Duration::from_micros(1));
    assert!(!login.take().is_allowed());
    login.clock.advance(Duration::from_micros(1));
    assert!(login.take().is_allowed(), "as it was promised");
}

#[test]
fn refusals_count_together_only_within_their_time() {
    let login = Login::new();
    for round in 0..5 {
        while login.take().is_allowed() {}
        assert!(!login.take().is_allowed());
        assert_eq!(login.closed_for(), None, "two refusals in each of many times: round {round}");
        login.clock.advance(10 * MINUTE);
    }
}

#[test]
fn blocks_grow_while_they_are_remembered_up_to_the_longest() {
    let block = Quota::block(1, MINUTE, MINUTE).and_then(|block| block.growing(3, 10 * MINUTE, HOUR));
    let login = Login::with(block.expect("the block is possible"));
    for minutes in [1, 3, 9, 10, 10] {
        assert_eq!(login.get_blocked(), minutes * MINUTE);
        login.clock.advance(minutes * MINUTE + HOUR - Duration::from_micros(1));
        assert_eq!(login.closed_for(), None);
    }
    assert_eq!(login.get_blocked(), 10 * MINUTE);
    login.clock.advance(10 * MINUTE + HOUR);
    assert_eq!(login.get_blocked(), MINUTE, "it is forgotten");
}

#[test]
fn block_that_counts_denied_stays_closed_while_hammered() {
    let block = Quota::block(1, MINUTE, MINUTE).and_then(Quota::count_denied);
    let login = Login::with(block.expect("the block is possible"));
    assert_eq!(login.get_blocked(), MINUTE);
    for _ in 0..5 {
        login.clock.advance(MINUTE / 2);
        assert_eq!(login.take().charges()[1].wait(), Wait::After(MINUTE));
    }
    login.clock.advance(MINUTE);
    assert!(login.take().is_allowed());
}

#[tokio::test]
async fn key_is_closed_by_an_admin_and_opened_by_a_reset() {
    let login = Login::new();
    let blocks = Blocks::new(login.limiter.clone(), login.block.clone()).expect("it is a block");
    let key = key(1);
    assert_eq!(blocks.block_for(&key, 5 * HOUR).await, Ok(Some(5 * HOUR)), "for longer than the policy's own");
    assert!(!login.take().is_allowed());
    assert_eq!(blocks.block_for(&key, MINUTE).await, Ok(Some(5 * HOUR)), "never for shorter than it is");
    assert_eq!(blocks.block_for(&key, 6 * HOUR).await, Ok(Some(6 * HOUR)));
    assert_eq!(blocks.unblock(&key).await, Ok(()));
    assert_eq!(blocks.blocked_for(&key).await, Ok(None));
    assert!(login.take().is_allowed());
    assert_eq!(blocks.block(&key).await, Ok(Some(HOUR)), "for the policy's own time");
    assert_eq!(login.closed_for(), Some(HOUR));
    assert!(Blocks::new(login.limiter.clone(), login.tries.clone()).is_err(), "a window closes nothing");
}

/// Adds a strike as an administrator.
fn strike(limiter: &MemoryLimiter, block: &Policy) -> Option<Duration> {
    let key = key(1);
    let charge = [Charge::new(block, &key).effect(Effect::Force)];
    limiter.take_now(&charge).charges()[0].wait().duration()
}

#[test]
fn changed_block_counts_strikes_for_its_own_window() {
    let clock = ManualClock::new();
    let limiter = limiter(&clock);
    let before = policy("block", Quota::block(3, HOUR, MINUTE));
    let after = policy("block", Quota::block(3, 10 * MINUTE, MINUTE));
    assert_eq!((strike(&limiter, &before), strike(&limiter, &before)), (None, None));
    assert_eq!(limiter.peek_one(&after, &key(1), 0).remaining(), 1);
    // The change holds from the first charge on, also a denied one.
    assert!(!limiter.take_one(&after, &key(1), 2).is_allowed());
    clock.advance(10 * MINUTE);
    assert_eq!(limiter.peek_one(&after, &key(1), 0).remaining(), 3, "both are over");
}

#[test]
fn changed_block_remembers_the_last_one_for_its_own_period() {
    let (clock, one) = (ManualClock::new(), MINUTE);
    let limiter = limiter(&clock);
    let quota = |memory| Quota::block(2, 5 * one, one).and_then(|block| block.growing(2, 8 * one, memory));
    let (before, after) = (policy("block", quota(HOUR)), policy("block", quota(10 * one)));
    assert_eq!((strike(&limiter, &before), strike(&limiter, &before)), (None, Some(one)));
    clock.advance(2 * one);
    // The state has one strike, and its last block is remembered for ten minutes from now.
    assert_eq!(strike(&limiter, &before), None);
    assert_eq!(limiter.peek_one(&after, &key(1), 0).remaining(), 1);
    assert!(!limiter.take_one(&after, &key(1), 2).is_allowed());
    clock.advance(11 * one);
    assert_eq!((strike(&limiter, &after), strike(&limiter, &after)), (None, Some(one)), "and not twice as long");
}

#[test]
fn changed_block_keeps_a_closed_key_closed_until_its_end() {
    let login = Login::new();
    assert_eq!(login.get_blocked(), HOUR);
    login.clock.advance(MINUTE);
    let changed = Quota::block(9, MINUTE, MINUTE).and_then(|block| block.growing(2, HOUR, HOUR));
    let changed = policy("block", changed);
    assert_eq!(login.limiter.peek_one(&changed, &key(1), 0).wait(), Wait::After(59 * MINUTE));
    assert!(!login.limiter.take_one(&changed, &key(1), 1).is_allowed());
    assert_eq!(login.closed_for(), Some(59 * MINUTE), "and back");
}

#[test]
fn block_of_observed_charges_is_only_observed() {
    let login = Login::new();
    let key = key(1);
    let charges =
        [Charge::new(&login.tries, &key).effect(Effect::Observe), Charge::new(&login.block, &key).effect(ON_REFUSAL)];
    let denied: Vec<bool> = (0..8)
        .map(|_| {
            let decision = login.limiter.take_now(&charges);
            assert!(decision.is_allowed());
            !decision.charges()[1].is_allowed()
        })
        .collect();
    assert_eq!(denied, [false, false, false, false, true, true, true, true], "it says when it would refuse");
}

#[test]
fn block_counts_only_the_charges_that_it_names() {
    let clock = ManualClock::new();
    let limiter = limiter(&clock);
    let (minute, hour) =
        (policy("minute", Quota::fixed_window(2, MINUTE)), policy("hour", Quota::fixed_window(3, HOUR)));
    let other = policy("other", Quota::fixed_window(1, HOUR));
    let (one, two) = (policy("one", Quota::block(1, HOUR, HOUR)), policy("two", Quota::block(1, HOUR, HOUR)));
    let (alice, bob) = (key(1), key(2));
    let _ = limiter.take_one(&other, &alice, 1);
    let both = |key| {
        limiter.take_now(&[
            Charge::new(&other, key),
            Charge::new(&minute, key),
            Charge::new(&hour, key),
            Charge::new(&one, key).effect(Effect::OnRefusal { of: 2 }),
            Charge::new(&two, key).effect(Effect::OnRefusal { of: 0 }),
        ])
    };
    assert!(!both(&alice).is_allowed());
    assert!(limiter.peek_one(&one, &alice, 0).is_allowed(), "another policy refused");
    assert!(both(&bob).is_allowed());
    assert!(!both(&bob).is_allowed(), "the other policy again");
    limiter.reset_now(&other, &bob);
    assert!(both(&bob).is_allowed());
    limiter.reset_now(&other, &bob);
    assert!(!both(&bob).charges()[3].is_allowed(), "the first of the two refused");
    assert!(limiter.peek_one(&two, &bob, 0).is_allowed(), "it belongs to none");
}

#[test]
fn meter_passes_and_counts_once_what_exceeds_a_quota() {
    let clock = ManualClock::new();
    let limiter = limiter(&clock);
    let (plan, meter) = (policy("plan", Quota::fixed_window(10, HOUR)), policy("over", Quota::meter(100, 24 * HOUR)));
    let key = key(1);
    let take = |cost| {
        limiter.take_now(&[
            Charge::new(&plan, &key).cost(cost).effect(Effect::Observe),
            Charge::new(&meter, &key).cost(cost).effect(ON_REFUSAL),
        ])
    };
    let units = || 100 - limiter.peek_one(&meter, &key, 0).remaining();
    assert!(take(7).is_allowed());
    assert_eq!(units(), 0);
    let mut over = take(4);
    assert!(over.is_allowed() && !over.charges()[0].is_allowed() && over.charges()[1].is_allowed());
    assert_eq!(units(), 4, "all of it: a cost is within the quota or beyond it");
    assert!(take(3).is_allowed());
    assert_eq!((units(), limiter.peek_one(&plan, &key, 0).remaining()), (4, 0));
    let [within, beyond] = &mut over.take_receipts()[..] else { panic!("two charges") };
    assert!(within.is_none(), "what is beyond took nothing from the quota");
    limiter.refund_now(&[Refund::new(meter.clone(), key.clone(), beyond.take().expect("it was metered"))]);
    assert_eq!(units(), 0, "and goes back to where it was counted");
    assert!(take(99).is_allowed());
    let full = take(2);
    assert!(!full.is_allowed() && !full.charges()[1].is_allowed(), "the meter's limit is the most beyond");
    assert!(take(1).is_allowed());
    clock.advance(24 * HOUR - Duration::from_micros(1));
    assert_eq!(units(), 100);
    clock.advance(Duration::from_micros(1));
    assert_eq!(units(), 0, "forgotten after its retention");
}

#[test]
fn meter_counts_refusals_of_its_partner_only() {
    let clock = ManualClock::new();
    let limiter = limiter(&clock);
    let (plan, meter) = (policy("plan", Quota::fixed_window(1, HOUR)), policy("over", Quota::meter(100, 24 * HOUR)));
    let closed = policy("closed", Quota::fixed_window(0, HOUR));
    let key = key(1);
    let _ = limiter.take_one(&plan, &key, 1);
    let charges = |effect| [Charge::new(&plan, &key).effect(effect), Charge::new(&meter, &key).effect(ON_REFUSAL)];
    let [observed, metered] = charges(Effect::Observe);
    assert!(!limiter.take_now(&[observed, metered, Charge::new(&closed, &key)]).is_allowed());
    assert_eq!(limiter.peek_one(&meter, &key, 0).remaining(), 100);
    assert!(!limiter.take_now(&charges(Effect::Enforce)).is_allowed());
    assert_eq!(limiter.peek_one(&meter, &key, 0).remaining(), 99, "a meter of refusals");
}

#[tokio::test]
async fn strikes_by_an_admin_count_with_those_of_the_layer() {
    let block = Quota::block(3, HOUR, MINUTE).and_then(|block| block.growing(2, HOUR, HOUR));
    let login = Login::with(block.expect("the block is possible"));
    let blocks = Blocks::new(login.limiter.clone(), login.block.clone()).expect("it is a block");
    let key = key(1);
    assert_eq!(blocks.strike(&key, 2).await, Ok(None));
    while login.take().is_allowed() {}
    assert_eq!(login.closed_for(), Some(MINUTE), "two wrong passwords and one refusal");
    assert_eq!(blocks.strike(&key, 99).await, Ok(Some(MINUTE)), "nothing more while it is closed");
    for (asked, lasts) in [(1, 1), (1_000, 1_000), (1_001, 1_020), (60_001, 61_200), (3_600_001, 3_628_800)] {
        blocks.unblock(&key).await.expect("memory has no trouble");
        let told = blocks.block_for(&key, Duration::from_secs(asked)).await;
        assert_eq!(told, Ok(Some(Duration::from_secs(lasts))));
    }
    blocks.unblock(&key).await.expect("memory has no trouble");
    assert_eq!(blocks.block_for(&key, 4 * HOUR).await, Ok(Some(4 * HOUR)));
    login.clock.advance(4 * HOUR);
    assert_eq!(blocks.block(&key).await, Ok(Some(2 * MINUTE)), "one by hand is remembered as any other");
}

#[tokio::test]
async fn meter_is_settled_by_what_was_read() {
    let clock = ManualClock::new();
    let limiter = limiter(&clock);
    let meter = policy("over", Quota::meter(100, HOUR));
    let meters = Meters::new(limiter.clone(), meter.clone()).expect("it is a meter");
    let key = key(1);
    assert_eq!(meters.usage(&key).await, Ok(0));
    let _ = limiter.take_one(&meter, &key, 30);
    let read = meters.usage(&key).await.expect("memory has no trouble");
    let _ = limiter.take_one(&meter, &key, 5);
    assert_eq!((read, meters.settle(&key, read).await), (30, Ok(())));
    assert_eq!(meters.usage(&key).await, Ok(5), "what came meanwhile stays");
    assert_eq!(meters.settle(&key, 99).await, Ok(()));
    assert_eq!(meters.usage(&key).await, Ok(0));
    let _ = limiter.take_one(&meter, &key, 7);
    assert_eq!(meters.reset(&key).await, Ok(()));
    assert_eq!(meters.usage(&key).await, Ok(0));
}

/// Repeats the case `fw-rlf-block` from rate-limiter-flexible, with costs that can pass.
#[test]
fn block_outlasts_its_window_and_is_not_prolonged_by_retries() {
    let (second, ms) = (Duration::from_secs(1), Duration::from_millis(1));
    let clock = ManualClock::new();
    let limiter = limiter(&clock);
    let tries = policy("tries", Quota::fixed_window(1, second).and_then(|quota| quota.anchor(Anchor::FirstRequest)));
    let block = policy("block", Quota::block(1, second, 2 * second));
    let key = key(1);
    let take = || limiter.take_now(&[Charge::new(&tries, &key), Charge::new(&block, &key).effect(ON_REFUSAL)]);
    assert!(take().is_allowed());
    assert!(take().charges()[1].wait().duration() > Some(1_000 * ms));
    clock.advance(1_201 * ms);
    assert_eq!(take().charges()[1].wait(), Wait::After(799 * ms));
    clock.advance(809 * ms);
    assert!(take().is_allowed());
}

#[test]
fn block_closes_after_exactly_its_refusals_under_contention() {
    const STRIKES: u64 = 50;
    let limiter = limiter(&ManualClock::new());
    let tries = policy("tries", Quota::fixed_window(100, 24 * HOUR));
    let block = policy("block", Quota::block(STRIKES, 24 * HOUR, 24 * HOUR));
    let key = key(1);
    let (passed, refused, closed) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..64 {
            scope.spawn(|| {
                for _ in 0..100 {
                    let charges = [Charge::new(&tries, &key), Charge::new(&block, &key).effect(ON_REFUSAL)];
                    let decision = limiter.take_now(&charges);
                    let count = match (decision.is_allowed(), decision.charges()[1].is_allowed()) {
                        (true, _) => &passed,
                        (false, true) => &refused,
                        (false, false) => &closed,
                    };
                    count.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!((passed.into_inner(), refused.into_inner()), (100, STRIKES - 1), "the last of them closes it");
    assert_eq!(closed.into_inner(), 6_400 - 100 - (STRIKES - 1));
}

#[test]
fn meter_counts_every_excess_unit_under_contention() {
    let limiter = limiter(&ManualClock::new());
    let plan = policy("plan", Quota::fixed_window(1_000, 24 * HOUR));
    let meter = policy("over", Quota::meter(1_000_000, 24 * HOUR));
    let key = key(1);
    let asked = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..64 {
            let (limiter, plan, meter, key, asked) = (&limiter, &plan, &meter, &key, &asked);
            scope.spawn(move || {
                for n in 0..100 {
                    let cost = 1 + (thread + n) % 3;
                    let charges = [
                        Charge::new(plan, key).cost(cost).effect(Effect::Observe),
                        Charge::new(meter, key).cost(cost).effect(ON_REFUSAL),
                    ];
                    assert!(limiter.take_now(&charges).is_allowed());
                    asked.fetch_add(cost, Ordering::Relaxed);
                }
            });
        }
    });
    let left = limiter.peek_one(&plan, &key, 0).remaining();
    let metered = 1_000_000 - limiter.peek_one(&meter, &key, 0).remaining();
    assert_eq!((1_000 - left) + metered, asked.into_inner());
}

#[derive(Clone, Default)]
struct Full(Arc<AtomicU64>);

impl Observer for Full {
    fn on_limiter_event(&self, event: &LimiterEvent) {
        self.0.fetch_add(u64::from(*event == LimiterEvent::Full), Ordering::Relaxed);
    }
}

#[test]
fn meter_is_never_evicted_and_refuses_without_room() {
    let full = Full::default();
    let builder = MemoryLimiter::builder().max_keys(64).clock(ManualClock::new()).observer(full.clone());
    let limiter = builder.build().expect("the setup is possible");
    let closed = policy("closed", Quota::fixed_window(0, HOUR));
    let (meter, log) = (policy("over", Quota::meter(100, HOUR)), policy("log", Quota::sliding_log(3, HOUR)));
    let take = |n: u64| {
        let key = key(n);
        let charges =
            [Charge::new(&closed, &key).effect(Effect::Observe), Charge::new(&meter, &key).effect(ON_REFUSAL)];
        limiter.take_now(&charges).is_allowed()
    };
    let counted: Vec<u64> = (0..1_000).filter(|n| take(*n)).collect();
    // There are four slots of this size per key of the capacity. Meters get half of them.
    assert!((64..=128).contains(&counted.len()), "half of the slots: {}", counted.len());
    assert_eq!(full.0.load(Ordering::Relaxed), 1_000 - counted.len() as u64, "each that was refused was told of");
    for n in 0..2_000 {
        assert!(limiter.take_one(&log, &key(n), 1).is_allowed(), "others still find room");
    }
    for n in &counted {
        assert_eq!(limiter.peek_one(&meter, &key(*n), 0).remaining(), 99);
        assert!(take(*n));
    }
}

#[test]
fn meters_that_are_over_leave_their_slots_to_others() {
    let clock = ManualClock::new();
    let limiter = MemoryLimiter::builder().max_keys(64).clock(clock.clone()).build().expect("the setup is possible");
    let meter = policy("over", Quota::meter(100, HOUR));
    let mut counted = [0, 1_000, 2_000].map(|first| {
        let counted = (first..first + 1_000).filter(|n| limiter.take_one(&meter, &key(*n), 1).is_allowed()).count();
        clock.advance(2 * HOUR);
        counted
    });
    counted.sort_unstable();
    assert!((64..=128).contains(&counted[0]) && counted[2] <= 128, "{counted:?}");
}

#[test]
fn blocks_and_meters_are_in_snapshots() {
    let login = Login::new();
    assert_eq!(login.get_blocked(), HOUR);
    let meter = policy("over", Quota::meter(100, HOUR));
    let _ = login.limiter.take_one(&meter, &key(7), 42);
    let builder = MemoryLimiter::builder().clock(login.clock.clone()).restore(login.limiter.snapshot());
    let restored = builder.build().expect("the snapshot is whole");
    assert_eq!(restored.peek_one(&login.block, &key(1), 0).wait(), Wait::After(HOUR));
    assert_eq!(restored.peek_one(&meter, &key(7), 0).remaining(), 58);
}
