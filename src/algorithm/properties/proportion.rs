//! Changing between quotas in proportion never gives more than one whole. The test adds up the shares exactly.

use std::sync::LazyLock;
use std::time::Duration;

use proptest::prelude::*;

use super::key::State;
use super::plans::proportional_plans;
use super::run::at_least;
use crate::algorithm::Used;
use crate::base::sampling::config;
use crate::quota::Quota;

/// Limit, period and burst of a toy, where being off by one shows.
type Toy = (u64, u64, u64);

/// The usage of a capacity by all keys, counted in parts. The number of parts in the whole is such that the units and
/// intervals of all toys are whole numbers of parts.
struct Shares {
    whole: u128,
    used: u128,
}

impl Shares {
    fn of(toys: &[Toy]) -> Self {
        Self { whole: toys.iter().map(|(_, period, burst)| u128::from(period * burst)).product(), used: 0 }
    }

    /// Time passes under a quota.
    fn drain(&mut self, (limit, period, burst): Toy, us: u64) {
        let gone = self.whole / u128::from(period * burst) * u128::from(limit) * u128::from(us);
        self.used = self.used.saturating_sub(gone);
    }

    fn take(&mut self, (_, _, burst): Toy, units: u64) {
        self.used += self.whole / u128::from(burst) * u128::from(units);
    }
}

fn toys() -> impl Strategy<Value = Vec<Toy>> {
    prop::collection::vec((1..6_u64, 1..20_u64, 1..7_u64), 2..4)
}

proptest! {
    #![proptest_config(config(10_000))]

    /// The shares that a key takes in any time make at most one whole, and what has drained of them meanwhile under the
    /// quotas that it was under.
    #[test]
    fn proportional_changes_admit_one_whole_and_the_refill(
        toys in toys(),
        steps in prop::collection::vec((0..3_usize, 1..4_u64, prop_oneof![Just(0), 0..30_u64]), 1..60),
    ) {
        let quotas: Vec<Quota> = toys
            .iter()
            .map(|(limit, period, burst)| {
                let plain = Quota::token_bucket(*limit, Duration::from_micros(*period)).unwrap();
                plain.burst(*burst).unwrap().in_proportion().unwrap()
            })
            .collect();
        let (mut now, mut current) = (1_790_000_000_000_000, 0);
        let (mut state, mut shares) = (State::new(&quotas[0]), Shares::of(&toys));
        for (next, cost, later) in steps {
            let next = next % toys.len();
            now += later;
            shares.drain(toys[current], later);
            if next != current {
                state = state.taken_over(&quotas[current], &quotas[next], now).0;
                current = next;
            }
            if state.decide(now, cost, false).0.is_allowed() {
                shares.take(toys[current], cost);
            }
            prop_assert!(shares.used <= shares.whole, "{} of {} under {quotas:?}", shares.used, shares.whole);
            let used = state.used(now);
            let kept = used.parts * shares.whole >= shares.used * used.of * u128::from(quotas[current].capacity());
            prop_assert!(kept, "{used:?} is less than {} of {}", shares.used, shares.whole);
        }
    }
}

/// The plans of each limit below 20.
static PLANS: LazyLock<Vec<Vec<Quota>>> =
    LazyLock::new(|| (0..20).map(|limit: u64| proportional_plans(limit.max(1))).collect());

proptest! {
    #![proptest_config(config(50_000))]

    /// The share in use under one plan is in use under the next, rounded up by less than a unit of it.
    #[test]
    fn share_in_use_is_kept_by_a_plan_of_any_kind(
        from in (any::<prop::sample::Index>(), 1..20_u64),
        to in (any::<prop::sample::Index>(), 1..20_u64),
        steps in prop::collection::vec((1..4_u64, 0..40_000_000_u64), 1..10),
        later in 0..100_000_000_u64,
    ) {
        let plan = |(kind, limit): (prop::sample::Index, u64)| *kind.get(&PLANS[limit as usize]);
        let (from, to) = (plan(from), plan(to));
        let (mut now, mut state) = (1_790_000_000_000_000, State::new(&from));
        for (cost, later) in steps {
            state.decide(now, cost, false);
            now += later;
        }
        now += later;
        let used = state.used(now);
        let (parts, of) = (used.parts * u128::from(to.capacity()), used.of * u128::from(from.capacity()));
        let kept = state.taken_over(&from, &to, now).0.used(now);
        prop_assert!(at_least(kept, Used { parts, of }), "{used:?} of {from} became {kept:?} of {to}");
        prop_assert!(!at_least(kept, Used { parts: parts + of, of }), "{used:?} of {from} became {kept:?} of {to}");
    }
}

#[test]
fn plan_changes_alone_lose_less_than_a_unit_each() {
    let quota = |limit| Quota::per_minute(limit).in_proportion().unwrap();
    for (from, to, taken, found) in [(100, 1_000, 60, 600), (1_000, 100, 600, 60), (1_000, 10, 1, 1), (3, 7, 1, 3)] {
        let mut state = State::new(&quota(from));
        state.decide(0, taken, false);
        let state = state.taken_over(&quota(from), &quota(to), 0).0;
        assert_eq!(state.used(0).units_ceil(), found, "{taken} of {from} in {to}");
    }
}
