//! The counters of outcomes, and the counters of a policy. The counters are striped, so that threads on several
//! processors seldom share a cache line.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::state::PolicyState;
use crate::mode::Mode;
use crate::outcome::OutcomeKind;

/// The number of stripes. If there are more threads, some share a stripe.
const STRIPES: usize = 16;

pub(super) const KINDS: usize = OutcomeKind::ALL.len();
pub(super) const STATES: usize = PolicyState::ALL.len();
const MODES: usize = Mode::ALL.len();

/// A stripe of the counters of outcomes, to which one thread or a few threads add.
#[derive(Default)]
#[repr(align(64))]
struct OutcomeStripe([AtomicU64; KINDS]);

/// The counters of outcomes, about 2 KiB. Outcomes that a policy counts as [usual](Totals::usual) are not counted here.
#[derive(Default)]
pub(super) struct OutcomeCells([OutcomeStripe; STRIPES]);

/// A stripe of a policy's counters, to which one thread or a few threads add.
#[derive(Default)]
#[repr(align(64))]
struct Stripe {
    states: [[AtomicU64; STATES]; MODES],
    refused: AtomicU64,
    units: AtomicU64,
    /// The numbers of allowed requests that took one unit of an enforced policy. The first number counts the
    /// requests after which the policy was not near its limit, the second number those after which it was near.
    /// Counting a usual request needs one addition instead of three, which halves the time of a count, apart from
    /// reading the clock (`benches/stats.rs`).
    usual: [AtomicU64; 2],
}

/// The counters of a policy, about 2 KiB. Each addition is one relaxed atomic operation, so no count is lost. A reader
/// reads the counters one after another, not at one instant.
#[derive(Default)]
pub(super) struct Cells([Stripe; STRIPES]);

/// The index of the stripe to which the current thread adds. The index has no effect on requests.
#[derive(Clone, Copy)]
pub(super) struct StripeIndex(usize);

/// Sums over all stripes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Totals {
    pub(super) states: [[u64; STATES]; MODES],
    pub(super) refused: u64,
    pub(super) units: u64,
    /// The number of allowed requests whose outcome is counted only in the counters of the policy.
    pub(super) usual: u64,
}

impl StripeIndex {
    pub(super) fn of_thread() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        thread_local! {
            static OWN: usize = NEXT.fetch_add(1, Ordering::Relaxed) % STRIPES;
        }
        Self(OWN.try_with(|own| *own).unwrap_or(0))
    }
}

fn add(cell: &AtomicU64, count: u64) {
    cell.fetch_add(count, Ordering::Relaxed);
}

fn sum(into: &mut u64, cell: &AtomicU64) {
    *into = into.wrapping_add(cell.load(Ordering::Relaxed));
}

impl OutcomeCells {
    pub(super) fn count(&self, StripeIndex(at): StripeIndex, kind: OutcomeKind) {
        add(&self.0[at % STRIPES].0[kind as usize], 1);
    }

    pub(super) fn totals(&self) -> [u64; KINDS] {
        let mut totals = [0; KINDS];
        for stripe in &self.0 {
            totals.iter_mut().zip(&stripe.0).for_each(|(into, cell)| sum(into, cell));
        }
        totals
    }
}

impl Cells {
    fn stripe(&self, StripeIndex(at): StripeIndex) -> &Stripe {
        &self.0[at % STRIPES]
    }

    /// Counts an allowed request that took one unit of an enforced policy, and the request's
    /// outcome.
    pub(super) fn count_usual(&self, stripe: StripeIndex, is_near: bool) {
        add(&self.stripe(stripe).usual[usize::from(is_near)], 1);
    }

    pub(super) fn count_state(&self, stripe: StripeIndex, mode: Mode, state: PolicyState) {
        add(&self.stripe(stripe).states[mode as usize][state as usize], 1);
    }

    pub(super) fn count_refused(&self, stripe: StripeIndex) {
        add(&self.stripe(stripe).refused, 1);
    }

    pub(super) fn count_units(&self, stripe: StripeIndex, units: u64) {
        add(&self.stripe(stripe).units, units);
    }

    pub(super) fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        for stripe in &self.0 {
            let (into, cells) = (totals.states.iter_mut().flatten(), stripe.states.iter().flatten());
            into.zip(cells).for_each(|(into, cell)| sum(into, cell));
            sum(&mut totals.refused, &stripe.refused);
            sum(&mut totals.units, &stripe.units);
            for (usual, state) in stripe.usual.iter().zip([PolicyState::Within, PolicyState::Near]) {
                sum(&mut totals.usual, usual);
                sum(&mut totals.states[Mode::Enforce as usize][state as usize], usual);
                sum(&mut totals.units, usual);
            }
        }
        totals
    }
}

impl Totals {
    /// Returns the number of requests that found the policy in a state, in any mode.
    pub(super) fn in_state(&self, state: PolicyState) -> u64 {
        self.states.iter().map(|mode| mode[state as usize]).fold(0, u64::wrapping_add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_are_counted_under_their_own_numbers() {
        for (at, kind) in OutcomeKind::ALL.iter().enumerate() {
            assert_eq!(*kind as usize, at);
        }
    }

    #[test]
    fn counts_of_64_threads_are_exact() {
        let (cells, outcomes) = (Cells::default(), OutcomeCells::default());
        std::thread::scope(|scope| {
            for _ in 0..64 {
                scope.spawn(|| {
                    for _ in 0..1_000 {
                        let stripe = StripeIndex::of_thread();
                        outcomes.count(stripe, OutcomeKind::Limited);
                        cells.count_usual(stripe, true);
                        cells.count_state(stripe, Mode::Shadow, PolicyState::Over);
                        cells.count_units(stripe, 3);
                    }
                });
            }
        });
        let totals = cells.totals();
        assert_eq!(outcomes.totals()[OutcomeKind::Limited as usize], 64_000);
        assert_eq!([PolicyState::Over, PolicyState::Near].map(|state| totals.in_state(state)), [64_000; 2]);
        assert_eq!((totals.units, totals.refused, totals.usual), (256_000, 0, 64_000));
    }
}
