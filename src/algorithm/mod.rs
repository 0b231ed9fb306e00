//! The algorithms: pure functions of quota, state, instant and cost, without a clock, I/O, locks or allocations.
//!
//! [`Quota`](crate::Quota) chooses the algorithm. The guide says [which algorithm to
//! choose](crate::guide::choosing_an_algorithm). The docs of quotas list the
//! [laws](crate::quota#guarantees) that all algorithms keep, and say what happens to a state [when a
//! quota changes](crate::quota#when-a-quota-changes).

pub(crate) mod block;
pub(crate) mod carry;
pub(crate) mod divisor;
pub(crate) mod entry_log;
pub(crate) mod fixed_window;
pub(crate) mod gcra;
pub(crate) mod meter;
#[cfg(all(test, not(ratelimit_loom)))]
pub(crate) mod oracle;
pub(crate) mod places;
#[cfg(all(test, not(ratelimit_loom)))]
pub(crate) mod properties;
pub(crate) mod sliding_window;
pub(crate) mod state;
pub(crate) mod step_bucket;
pub(crate) mod used;

#[cfg(any(feature = "_redis", feature = "store"))]
use crate::decision::Receipt;
use crate::quota::spec::{Algorithm, Spec};

use block::Block;
use entry_log::EntryLog;
use fixed_window::FixedWindow;
use gcra::Gcra;
use meter::Meter;
use places::Places;
use sliding_window::TwoCounterWindow;
use step_bucket::StepBucket;

pub(crate) use state::{
    Fullness, Layout, NUMBER_BITS, Next, Pair, PairAlgorithm, TakeMode, Transition, WORD_AHEAD_US, WordLayout,
};
#[cfg(test)]
pub(crate) use used::Used;

/// Decides about charges of a quota: an algorithm, with the quota's numbers computed in advance.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Decider {
    Pair(PairDecider, Layout),
    EntryLog(EntryLog),
    Places(Places),
}

/// Decides by an algorithm whose state is a pair.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PairDecider {
    Gcra(Gcra<u64>),
    /// GCRA for quotas whose spans a `u64` cannot hold.
    WideGcra(Gcra<u128>),
    StepBucket(StepBucket),
    FixedWindow(FixedWindow),
    TwoCounterWindow(TwoCounterWindow),
    Block(Block),
    Meter(Meter),
}

/// Evaluates an expression in which the decider has its concrete type.
macro_rules! by_type {
    ($decider:expr, $one:ident => $call:expr) => {
        match $decider {
            $crate::algorithm::PairDecider::Gcra($one) => $call,
            $crate::algorithm::PairDecider::WideGcra($one) => $call,
            $crate::algorithm::PairDecider::StepBucket($one) => $call,
            $crate::algorithm::PairDecider::FixedWindow($one) => $call,
            $crate::algorithm::PairDecider::TwoCounterWindow($one) => $call,
            $crate::algorithm::PairDecider::Block($one) => $call,
            $crate::algorithm::PairDecider::Meter($one) => $call,
        }
    };
}
pub(crate) use by_type;

impl Decider {
    pub(crate) fn new(spec: &Spec) -> Self {
        use PairDecider as P;
        let decider = match spec.algorithm {
            Algorithm::TokenBucket | Algorithm::Gcra | Algorithm::LeakyBucket | Algorithm::LeakyQueue => {
                if gcra::is_narrow(spec) {
                    P::Gcra(Gcra::new(spec))
                } else {
                    P::WideGcra(Gcra::new(spec))
                }
            }
            Algorithm::StepBucket => P::StepBucket(StepBucket::new(spec)),
            Algorithm::FixedWindow => P::FixedWindow(FixedWindow::new(spec)),
            Algorithm::SlidingWindow if sliding_window::fits_pair(spec) => {
                P::TwoCounterWindow(TwoCounterWindow::new(spec))
            }
            Algorithm::Block => P::Block(Block::new(spec)),
            Algorithm::Meter => P::Meter(Meter::new(spec)),
            Algorithm::SlidingWindow | Algorithm::SlidingLog => return Self::EntryLog(EntryLog::new(spec)),
            Algorithm::Concurrency => return Self::Places(Places::new(spec)),
        };
        let layout = by_type!(&decider, decider => decider.layout());
        Self::Pair(decider, layout)
    }

    /// Returns the receipt for the first `units` of a charge. `whole` is the receipt of the whole charge, which has
    /// `last` more units.
    #[cfg(any(feature = "_redis", feature = "store"))]
    pub(crate) fn first_of(&self, whole: &Receipt, units: u64, last: u64) -> Receipt {
        let own = Pair { at: whole.at_us(), n: whole.part() };
        let own = match self {
            Self::Pair(decider, _) => decider.get().own_without(own, last),
            Self::EntryLog(_) | Self::Places(_) => own, // the instant, or nothing that depends on units
        };
        Receipt::new(units, own.at, own.n)
    }

    pub(crate) fn layout(&self) -> Layout {
        match self {
            Self::Pair(_, layout) => *layout,
            Self::EntryLog(_) => Layout::Entries,
            Self::Places(_) => Layout::Count,
        }
    }
}

impl PairDecider {
    /// Returns the algorithm, for calls that need not be fast.
    pub(crate) fn get(&self) -> &dyn PairAlgorithm {
        by_type!(self, decider => decider)
    }

    /// See [`PairAlgorithm::decide`].
    #[inline]
    pub(crate) fn decide(&self, state: Option<Pair>, now: u64, cost: u64, force: bool) -> Transition {
        by_type!(self, decider => decider.decide(state, now, cost, force))
    }

    /// See [`PairAlgorithm::decide_how`].
    #[inline]
    pub(crate) fn decide_how(&self, state: Option<Pair>, now: u64, cost: u64, how: TakeMode) -> Transition {
        by_type!(self, decider => decider.decide_how(state, now, cost, how))
    }

    /// See [`PairAlgorithm::is_clamped`].
    #[inline]
    pub(crate) fn is_clamped(&self, state: Pair, now: u64) -> bool {
        by_type!(self, decider => decider.is_clamped(state, now))
    }

    /// Returns whether a state is kept while it counts, even if the table is full.
    pub(crate) fn is_pinned(&self) -> bool {
        matches!(self, Self::Meter(_))
    }
}
