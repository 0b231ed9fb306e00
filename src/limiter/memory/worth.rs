//! What a state is worth: which one is forgotten when there is no room for another.

use crate::algorithm::{Fullness, PairRules, Rules};

/// In this order states are forgotten: those that have used least; when all are out of allowance, those that would expire
/// soonest; and closed blocks last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Worth {
    rank: Rank,
    /// The used part of the capacity, of states with something left.
    used: u64,
    /// When the state counts for nothing, in a unit of the table's own.
    expires: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    Left,
    Throttled,
    Closed,
}

impl Worth {
    pub(super) fn new(rules: &Rules, fullness: Fullness, expires: u64) -> Self {
        let rank = match rules {
            _ if !fullness.throttled => Rank::Left,
            Rules::Pair(PairRules::Block(_), _) => Rank::Closed,
            _ => Rank::Throttled,
        };
        Self { rank, used: if rank == Rank::Left { fullness.used } else { 0 }, expires }
    }

    /// Of a state whose quota is not known, since there were too many.
    pub(super) fn unknown(expires: u64) -> Self {
        Self { rank: Rank::Left, used: 0, expires }
    }

    /// Whether forgetting the state gives its client a fresh allowance.
    pub(super) fn is_throttled(&self) -> bool {
        self.rank != Rank::Left
    }
}
