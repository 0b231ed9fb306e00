//! Conversion of a key's state to the new quota after the key's quota changed.

use super::entry_log::LogEntries;
use super::state::Pair;
use super::used::{Carried, Used};
use super::{Decider, PairDecider};

/// A stored state that another quota wrote.
#[derive(Debug)]
pub(crate) enum OldState<'a, E> {
    Pair(Pair),
    Entries(&'a E),
}

/// The state after its conversion to the new quota.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NewState {
    Pair(Option<Pair>),
    Entries(Vec<(u64, u64)>),
}

/// How well the state of another quota fits into this quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fit {
    /// The converted state is written only with an admitted charge, a forced charge or a refund.
    Fits,
    /// Even a denied charge writes the converted state, for one of two reasons. Some units of the state are freed
    /// later than `longest_us` from now. Or the state is a block's, and closes its key or has a moved instant.
    Ahead,
    /// The converted state is never written. More units are in use than this quota could store, so writing would
    /// forget units.
    Over,
}

impl Decider {
    /// Converts a state that the decider `from` wrote into a state of this decider. Also returns when the
    /// converted state may be written.
    ///
    /// `share` has the capacities of the old and the new quota if the conversion keeps the used
    /// share. `None` keeps the used amount.
    pub(crate) fn take_over<E: LogEntries>(
        &self,
        from: &Self,
        old: &OldState<'_, E>,
        now: u64,
        share: Option<(u64, u64)>,
    ) -> (NewState, Fit) {
        if let (
            Self::Pair(PairDecider::Block(block), _),
            Self::Pair(PairDecider::Block(from), _),
            OldState::Pair(state),
        ) = (self, from, old)
        {
            let (adopted, moved) = block.adopt(from, *state, now);
            return (NewState::Pair(adopted), if moved { Fit::Ahead } else { Fit::Fits });
        }
        let carried = match (from, old) {
            (Self::Pair(from, _), OldState::Pair(state)) => from.get().carried(*state, now, self.is_dated()),
            (Self::EntryLog(from), OldState::Entries(entries)) => from.carried(*entries, now),
            _ => Carried::new(Used::units(0), []),
        };
        let carried = match share {
            Some((from, to)) => carried.in_proportion(from, to),
            None => carried,
        };
        let (most, longest_us) = match self {
            Self::Pair(decider, _) => (decider.get().most(), decider.get().longest_us(now)),
            Self::EntryLog(log) => (log.most(), log.longest_us()),
            // A concurrency limit counts held units and a rate counts used units, so neither count converts into the
            // other.
            Self::Places(_) => return (NewState::Pair(None), Fit::Fits),
        };
        let fit = match carried.back().saturating_sub(now) > longest_us {
            _ if carried.used.units_ceil() > most => Fit::Over,
            true => Fit::Ahead,
            false => Fit::Fits,
        };
        let kept = match self {
            Self::Pair(decider, _) => NewState::Pair(decider.get().take_over(&carried, now)),
            Self::EntryLog(log) => NewState::Entries(log.take_over(&carried, now)),
            Self::Places(_) => NewState::Pair(None),
        };
        (kept, fit)
    }

    /// Returns whether the states consist of dated entries or of two dated counters.
    fn is_dated(&self) -> bool {
        matches!(self, Self::EntryLog(_) | Self::Pair(PairDecider::TwoCounterWindow(_), _))
    }
}

impl PairDecider {
    /// Moves a state back if it lies further ahead of `now` than any state that this quota makes.
    pub(crate) fn brought_back(&self, state: Pair, now: u64) -> Option<Pair> {
        self.get().take_over(&self.get().carried(state, now, false), now)
    }
}
