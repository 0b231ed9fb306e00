//! Three limiters must agree on random sequences: a large one that takes sets, a small one that is
//! restored from its own snapshots, and one that takes the charges of a set one by one.

use std::time::Duration;

use proptest::prelude::*;
use tower_ratelimit::{
    ConfigError, Key, MemoryLimiter, Policy, Quota,
    clock::{ManualClock, Timestamp},
    limiter::{Charge, ChargeDecision, Effect, Receipt, Refund},
    quota::{Algorithm, Anchor, Oldest},
};

use crate::support::{config, of_each_algorithm_but};

const MINUTE: Duration = Duration::from_secs(60);
const NAMES: [&str; 4] = ["a", "b", "c", "d"];
const START_US: u64 = 1_000_000_000_000_000;

/// Returns a quota of every algorithm in each of its layouts.
fn quotas() -> Vec<Quota> {
    let each = || -> Result<Vec<Quota>, ConfigError> {
        Ok(vec![
            Quota::token_bucket(5, MINUTE)?,
            Quota::token_bucket(7, Duration::from_secs(1))?.burst(9)?,
            Quota::gcra(5, MINUTE)?,
            Quota::leaky_bucket(5, MINUTE)?,
            Quota::leaky_queue(5, MINUTE)?.queue(4)?,
            Quota::token_bucket(5, MINUTE)?.max_debt(7)?,
            Quota::token_bucket(99_999, MINUTE)?.burst(6)?,
            Quota::step_bucket(5, MINUTE)?,
            Quota::step_bucket(5, MINUTE)?.anchor(Anchor::FirstRequest)?,
            Quota::fixed_window(6, MINUTE)?,
            Quota::fixed_window(5, MINUTE)?.anchor(Anchor::FirstRequest)?,
            Quota::sliding_window(5, MINUTE)?,
            Quota::sliding_window(8, MINUTE)?.buckets(6)?,
            Quota::sliding_window(5, MINUTE)?.buckets(60)?.oldest(Oldest::Counted)?,
            Quota::sliding_log(5, MINUTE)?,
            Quota::block(3, MINUTE, MINUTE / 2)?.growing(3, 5 * MINUTE, 2 * MINUTE)?,
            Quota::block(1, MINUTE, 2 * MINUTE)?.count_denied()?,
            Quota::meter(7, MINUTE)?,
            Quota::token_bucket(12, MINUTE)?.in_proportion()?,
            Quota::token_bucket(99_999, MINUTE)?.burst(8)?.in_proportion()?,
            Quota::fixed_window(11, MINUTE)?.in_proportion()?,
            Quota::sliding_log(9, MINUTE)?.in_proportion()?,
        ])
    };
    of_each_algorithm_but(&[], each().expect("the quotas are possible"))
}

/// One charge of a set. Its place in the set names its policy.
#[derive(Clone, Debug)]
struct One {
    policy: usize,
    key: u64,
    cost: u64,
    effect: Effect,
}

#[derive(Clone, Debug)]
enum Step {
    Take(Vec<One>),
    Refund { receipt: usize, units: u64 },
    Reset { policy: usize, key: u64 },
    Quota { policy: usize, quota: usize },
    Snapshot,
    Forward(u64),
    Back(u64),
}

fn one() -> impl Strategy<Value = One> {
    let cost = prop_oneof![1 => Just(0), 10 => 1..4_u64, 1 => 4..12_u64, 1 => Just(u64::MAX)];
    let effect = prop_oneof![
        6 => Just(Effect::Enforce),
        1 => Just(Effect::Observe),
        1 => Just(Effect::Force),
        3 => (0..4_u8).prop_map(|of| Effect::OnRefusal { of }),
    ];
    (0..NAMES.len(), 0..3_u64, cost, effect).prop_map(|(policy, key, cost, effect)| One { policy, key, cost, effect })
}

fn span() -> impl Strategy<Value = u64> {
    prop_oneof![0..10_u64, 0..1_000_000_u64, 0..20_000_000_u64, 0..130_000_000_u64]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => prop::collection::vec(one(), 1..5).prop_map(Step::Take),
        4 => (any::<usize>(), 0..9_u64).prop_map(|(receipt, units)| Step::Refund { receipt, units }),
        1 => (0..NAMES.len(), 0..3_u64).prop_map(|(policy, key)| Step::Reset { policy, key }),
        2 => (0..NAMES.len(), any::<usize>()).prop_map(|(policy, quota)| Step::Quota { policy, quota }),
        1 => Just(Step::Snapshot),
        6 => span().prop_map(Step::Forward),
        1 => span().prop_map(Step::Back),
    ]
}

/// The actions that a sequence may contain. A snapshot omits expired states, which a clock that steps back
/// would revive. A set that writes nothing converts no state; a single charge does, and the
/// conversion rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// Time advances, and snapshots are restored.
    Still,
    /// The clock may step back.
    Back,
    /// Like `Still`, and quotas change. Sets are not taken one by one.
    Changes,
    /// Like `Back`, and quotas change. Sets are not taken one by one.
    All,
}

impl Mode {
    fn changes(self) -> bool {
        matches!(self, Self::Changes | Self::All)
    }

    fn goes_back(self) -> bool {
        matches!(self, Self::Back | Self::All)
    }
}

/// Returns a charge of a set as a single charge. `denied` says which charges before it were denied.
fn alone<'a>(limiter: &MemoryLimiter, charges: &[Charge<'a>], at: usize, denied: &[bool]) -> Charge<'a> {
    let charge = charges[at];
    let Effect::OnRefusal { of } = charge.effect else { return charge };
    let quota = charge.policy.quota();
    let refused = denied[at.saturating_sub(usize::from(of))..at].contains(&true);
    let closed = !limiter.peek_one(charge.policy, charge.key, 0).is_allowed();
    match (refused, quota.algorithm()) {
        (_, Algorithm::Block) if closed && quota.counts_denied() => charge.effect(Effect::Force),
        (_, Algorithm::Block) if closed => charge.effect(Effect::Enforce).cost(0), // no strike
        (true, Algorithm::Meter) => charge.effect(Effect::Enforce),
        (true, _) => charge.effect(Effect::Force),
        (false, _) => charge.effect(Effect::Enforce).cost(0),
    }
}

/// Returns whether a charge on refusal has an enforced partner, and whether its denial denies the
/// set.
fn on_refusal(charges: &[Charge<'_>], at: usize) -> (bool, bool) {
    let Effect::OnRefusal { of } = charges[at].effect else { return (false, charges[at].effect == Effect::Enforce) };
    let partners = &charges[at.saturating_sub(usize::from(of))..at];
    let enforced = partners.iter().any(|partner| partner.effect == Effect::Enforce);
    let is_meter = charges[at].policy.quota().algorithm() == Algorithm::Meter;
    (enforced, enforced || partners.is_empty() || is_meter)
}

fn build(capacity: usize, clock: &ManualClock) -> MemoryLimiter {
    MemoryLimiter::builder().max_keys(capacity).clock(clock.clone()).build().expect("the setup is possible")
}

fn plain(decisions: &[ChargeDecision]) -> Vec<ChargeDecision> {
    decisions.to_vec() // a clone has no receipt
}

fn play(mode: Mode, first: &[usize], steps: &[Step]) -> Result<(), TestCaseError> {
    let clock = ManualClock::at(Timestamp::from_micros(START_US));
    let mut now = START_US;
    let quotas = quotas();
    let named = |policy: usize, quota: usize| {
        Policy::new(NAMES[policy], quotas[quota % quotas.len()]).expect("the name is a name")
    };
    let mut policies: Vec<Policy> = first.iter().enumerate().map(|(policy, quota)| named(policy, *quota)).collect();
    let keys: Vec<Key> = (0..3_u64).map(|n| Key::of(n).expect("an integer makes a key")).collect();
    let large = build(10_000, &clock);
    let mut small = build(100, &clock);
    let single = build(1_000, &clock);
    let mut receipts: Vec<(Policy, u64, [u64; 3])> = Vec::new();
    let mut keeps_refunds = false;
    for step in steps {
        match step {
            Step::Take(ones) => {
                let mut ones = ones.clone();
                ones.sort_by_key(|one| one.policy);
                ones.dedup_by_key(|one| one.policy);
                let charges: Vec<Charge<'_>> = ones
                    .iter()
                    .map(|one| {
                        Charge::new(&policies[one.policy], &keys[one.key as usize]).cost(one.cost).effect(one.effect)
                    })
                    .collect();
                let peeked = large.peek_now(&charges);
                prop_assert_eq!(plain(peeked.charges()), plain(small.peek_now(&charges).charges()));
                prop_assert_eq!(plain(large.peek_now(&charges).charges()), plain(peeked.charges()), "peeking is still");
                let (mut ones_alone, mut told_alone) = (Vec::new(), Vec::new());
                let mut denied = Vec::new();
                for at in 0..charges.len() {
                    let one = alone(&single, &charges, at, &denied);
                    let told = plain(single.peek_now(std::slice::from_ref(&one)).charges());
                    denied.push(!told[0].is_allowed());
                    told_alone.extend(told);
                    ones_alone.push(one);
                }
                if !mode.changes() {
                    let is_refused = (0..charges.len()).any(|at| denied[at] && on_refusal(&charges, at).1);
                    prop_assert_eq!(peeked.is_allowed(), !is_refused);
                    for (at, told) in told_alone.iter_mut().enumerate() {
                        if is_refused && !denied[at] && !on_refusal(&charges, at).0 {
                            *told = single.peek_one(charges[at].policy, charges[at].key, 0);
                        }
                    }
                    prop_assert_eq!(
                        &told_alone,
                        &plain(peeked.charges()),
                        "one by one, and of a refusal as they stand"
                    );
                }
                let mut taken = large.take_now(&charges);
                let mut again = small.take_now(&charges);
                prop_assert_eq!(taken.is_allowed(), peeked.is_allowed());
                prop_assert_eq!(plain(taken.charges()), plain(peeked.charges()), "a peek says what a take does");
                prop_assert_eq!(plain(taken.charges()), plain(again.charges()));
                for (charge, decision) in charges.iter().zip(taken.charges()) {
                    prop_assert!(decision.remaining() <= charge.policy.quota().capacity());
                    if charge.effect == Effect::Enforce && !decision.is_allowed() {
                        prop_assert!(!taken.is_allowed());
                    }
                }
                let is_allowed = taken.is_allowed();
                let of_large = taken.take_receipts();
                prop_assert_eq!(&of_large, &again.take_receipts());
                for ((at, charge), receipt) in charges.iter().enumerate().zip(of_large) {
                    // A denial is written if it corrects a state that is ahead of the clock.
                    let counts = mode == Mode::Back || charge.policy.quota().counts_denied();
                    let writes = is_allowed
                        || on_refusal(&charges, at).0
                        || counts && charge.effect == Effect::Enforce && !taken.charges()[at].is_allowed();
                    if !is_allowed {
                        prop_assert!(receipt.is_none(), "a refused set took nothing");
                    }
                    let mut own = writes.then(|| single.take_now(std::slice::from_ref(&ones_alone[at])));
                    let own = own.as_mut().and_then(|own| own.charge_mut(0)?.take_receipt());
                    if !mode.changes() && is_allowed {
                        prop_assert_eq!(&receipt, &own, "one by one");
                    }
                    if let Some(receipt) = receipt {
                        let numbers = [receipt.units(), receipt.at_us(), receipt.part()];
                        prop_assert!(receipt.units() > 0);
                        receipts.push((charge.policy.clone(), ones[at].key, numbers));
                    }
                }
                let counts = |charge: &Charge<'_>| {
                    matches!(charge.effect, Effect::OnRefusal { .. }) || charge.policy.quota().counts_denied()
                };
                if !is_allowed && !charges.iter().any(counts) {
                    let after = large.peek_now(&charges);
                    prop_assert_eq!(plain(after.charges()), plain(peeked.charges()), "a refused set changes nothing");
                }
            }
            Step::Refund { receipt, units } => {
                if receipts.is_empty() {
                    continue;
                }
                let (policy, key, [taken, at, part]) = receipts.swap_remove(receipt % receipts.len());
                let key = &keys[key as usize];
                let before = large.peek_one(&policy, key, 0).remaining();
                for limiter in [&large, &small, &single] {
                    let _ = limiter.peek_one(&policy, key, 0);
                    let receipt = Receipt::new(taken, at, part).split(*units);
                    limiter.refund_now(&[Refund::new(policy.clone(), key.clone(), receipt)]);
                }
                let after = large.peek_one(&policy, key, 0).remaining();
                let _ = (small.peek_one(&policy, key, 0), single.peek_one(&policy, key, 0));
                if policy.quota().algorithm() == Algorithm::LeakyQueue {
                    // It may have been kept, and others with it. A snapshot does not hold these.
                    keeps_refunds = true;
                    prop_assert!(after >= before, "{} {}", before, after);
                } else if before == 0 && policy.quota().algorithm() == Algorithm::Block {
                    // The refund may open the key. Strikes of a window that is over no longer count then.
                    prop_assert!(after <= policy.quota().capacity());
                } else {
                    prop_assert!(after >= before && after - before <= taken.min(*units), "{} {}", before, after);
                }
            }
            Step::Reset { policy, key } => {
                for limiter in [&large, &small, &single] {
                    limiter.reset_now(&policies[*policy], &keys[*key as usize]);
                    let fresh = limiter.peek_one(&policies[*policy], &keys[*key as usize], 0);
                    prop_assert_eq!(fresh.remaining(), policies[*policy].quota().capacity());
                }
            }
            Step::Quota { policy, quota } if mode.changes() => policies[*policy] = named(*policy, *quota),
            Step::Snapshot if !mode.goes_back() && !keeps_refunds => {
                let builder = MemoryLimiter::builder().max_keys(100).clock(clock.clone()).restore(small.snapshot());
                small = builder.build().expect("the snapshot is whole");
            }
            Step::Forward(by) => {
                now += by;
                clock.set(Timestamp::from_micros(now));
            }
            Step::Back(by) if mode.goes_back() => {
                now -= by;
                clock.set(Timestamp::from_micros(now));
            }
            _ => {}
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(config(400))]

    #[test]
    fn limiters_of_any_size_agree_on_sets_and_single_charges(
        mode in prop::sample::select(vec![Mode::Still, Mode::Back, Mode::Changes, Mode::All]),
        first in prop::collection::vec(any::<usize>(), NAMES.len()),
        steps in prop::collection::vec(step(), 1..80),
    ) {
        play(mode, &first, &steps)?;
    }
}
