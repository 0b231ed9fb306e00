//! States of a key whose quota changed, read and rewritten under the new one.

use super::entry_log::LogEntries;
use super::state::Pair;
use super::used::{Carried, Used};
use super::{Decider, PairDecider};

/// A state that another quota wrote.
#[derive(Debug)]
pub(crate) enum OldState<'a, E> {
    Pair(Pair),
    Entries(&'a E),
}

/// A state under the quota that takes it over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NewState {
    Pair(Option<Pair>),
    Entries(Vec<(u64, u64)>),
}

/// How well the state of another quota fits into this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fit {
    /// The state after an admitted charge, a forced charge or a refund.
    Fits,
    /// Even a denied charge writes the state, because its units come back later than this quota allows, or because it
    /// closes the key.
    Ahead,
    /// Nothing is written, because more units are in use than this quota could keep, and none may be forgotten.
    Over,
}

impl Decider {
    /// Returns a state that another decider wrote as one of this decider's, and what may be written of it.
    ///
    /// `share` are the capacities of the two quotas, if the used share is kept and not the amount.
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

    /// Returns whether the states are dated entries.
    fn is_dated(&self) -> bool {
        matches!(self, Self::EntryLog(_) | Self::Pair(PairDecider::TwoCounterWindow(_), _))
    }
}

impl PairDecider {
    /// Returns a state that is further ahead than the quota can put it, moved back.
    pub(crate) fn brought_back(&self, state: Pair, now: u64) -> Option<Pair> {
        self.get().take_over(&self.get().carried(state, now, false), now)
    }
}
