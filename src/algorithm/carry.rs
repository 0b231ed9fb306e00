//! The part of a key's use that another quota takes over: how much, and when it comes back.

use smallvec::SmallVec;

use super::trail::Entries;
use super::{How, Next, Pair, PairRules, Rules, Used};
use crate::decision::ChargeDecision;

/// Units in use whose instants are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dated {
    /// When the last of them was taken, if the state tells, or where it began to count them.
    pub(super) taken: Option<u64>,
    /// They were taken no later than then.
    pub(super) is_exact: bool,
    /// When the last of them comes back.
    pub(super) back: u64,
    pub(super) units: u64,
    /// The same, with what of them no longer counts because a period's edge passes over them.
    pub(super) whole: u64,
}

impl Dated {
    pub(super) fn new(taken: Option<u64>, back: u64, units: u64) -> Self {
        Self { taken, is_exact: false, back, units, whole: units }
    }
}

/// What is in use under one quota, as another takes it over.
#[derive(Clone, Debug)]
pub(crate) struct Carried {
    pub(super) used: Used,
    /// The oldest first. Their units together are those in use, rounded up.
    pub(super) dated: SmallVec<[Dated; 4]>,
    /// When a step bucket ticked last.
    pub(super) tick: Option<u64>,
    share: Option<(u64, u64)>,
}

/// A state as it is kept.
#[derive(Debug)]
pub(crate) enum Held<'a, E> {
    Pair(Pair),
    Trail(&'a E),
}

/// A state under another quota.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    Pair(Option<Pair>),
    Trail(Vec<(u64, u64)>),
}

/// Dated entries in a list.
struct Listed<'a>(&'a [(u64, u64)]);

impl Entries for Listed<'_> {
    fn total(&self) -> u64 {
        self.0.iter().map(|entry| entry.1).sum()
    }

    fn newest(&self) -> Option<(u64, u64)> {
        self.0.last().copied()
    }

    fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        self.0.iter().copied()
    }
}

impl Kept {
    /// The decision about a charge under these rules, and whether anything is to be written.
    pub(crate) fn decide(&self, rules: &Rules, now: u64, cost: u64, how: How) -> (ChargeDecision, bool) {
        match (rules, self) {
            (Rules::Pair(rules, _), kept) => {
                let state = if let Self::Pair(state) = kept { *state } else { None };
                let answer = rules.decide_how(state, now, cost, how);
                (answer.decision, answer.next != Next::Keep)
            }
            (Rules::Trail(rules), kept) => {
                let entries = if let Self::Trail(entries) = kept { entries.as_slice() } else { &[] };
                let answer = rules.decide_how(&Listed(entries), now, cost, how);
                (answer.decision, answer.edit.is_some())
            }
        }
    }

    /// Whether a receipt still holds anything of this.
    pub(crate) fn is_refundable(&self, rules: &Rules, now: u64, units: u64, own: Pair) -> bool {
        match (rules, self) {
            (Rules::Pair(rules, _), Self::Pair(Some(state))) => rules.refund(*state, now, units, own) != Next::Keep,
            (Rules::Trail(rules), Self::Trail(entries)) => {
                rules.refundable(&Listed(entries), now, units, own.at).is_some()
            }
            _ => false,
        }
    }
}

impl Carried {
    pub(super) fn new(used: Used, dated: impl IntoIterator<Item = Dated>) -> Self {
        Self { used, dated: dated.into_iter().filter(|dated| dated.whole > 0).collect(), tick: None, share: None }
    }

    /// The same share of a capacity of `to` as of one of `from`.
    fn in_proportion(self, from: u64, to: u64) -> Self {
        Self { used: self.used.in_proportion(from, to), share: Some((from, to)), ..self }
    }

    /// When nothing of it is in use any more.
    fn back(&self) -> u64 {
        self.dated.last().map_or(0, |dated| dated.back)
    }

    /// Until when all of it counts in a window of one period: a period after the last of it was taken, but no longer than
    /// a period from now, and no shorter than it would have counted.
    pub(super) fn until(&self, now: u64, period_us: u64) -> u64 {
        let last = self.dated.last();
        let taken = last.and_then(|last| last.taken).unwrap_or(now).min(now);
        (taken + period_us).max(self.back().min(now + period_us))
    }

    /// These units, oldest first, as this quota counts them: at most `most` of the newest, and at most `each` in one entry.
    /// They are rounded up from the newest on, so that what is left when the older ones have come back is rounded up too.
    pub(super) fn scaled(
        &self,
        entries: impl DoubleEndedIterator<Item = (u64, u64)>,
        most: u64,
        each: u64,
    ) -> Vec<(u64, u64)> {
        let (mut sum, mut before) = (0_u64, 0);
        let mut scaled: Vec<(u64, u64)> = Vec::new();
        for (start, units) in entries.rev() {
            sum = sum.saturating_add(units);
            let upto = match self.share {
                Some((from, to)) => Used::units(sum).in_proportion(from, to).units_ceil(),
                None => sum,
            };
            let upto = upto.min(most);
            match scaled.last_mut() {
                Some(last) if last.0 == start => last.1 += upto - before,
                _ if upto > before => scaled.push((start, upto - before)),
                _ => {}
            }
            before = upto;
        }
        scaled.iter_mut().for_each(|(_, units)| *units = (*units).min(each));
        scaled.reverse();
        scaled
    }
}

impl Rules {
    /// A state that was written under other rules, as one of these; and whether it has to be written even if nothing is
    /// taken: it comes back later than this quota can put it, or it closes the key. `share` are the capacities of the two,
    /// if the share that is in use is kept and not the amount.
    pub(crate) fn take_over<E: Entries>(
        &self,
        from: &Self,
        held: &Held<'_, E>,
        now: u64,
        share: Option<(u64, u64)>,
    ) -> (Kept, bool) {
        if let (Self::Pair(PairRules::Block(block), _), Self::Pair(PairRules::Block(from), _), Held::Pair(state)) =
            (self, from, held)
        {
            let (adopted, moved) = block.adopt(from, *state, now);
            return (Kept::Pair(adopted), moved);
        }
        let carried = match (from, held) {
            (Self::Pair(from, _), Held::Pair(state)) => from.carried(*state, now),
            (Self::Trail(from), Held::Trail(entries)) => from.carried(*entries, now),
            _ => Carried::new(Used::units(0), []),
        };
        let carried = match share {
            Some((from, to)) => carried.in_proportion(from, to),
            None => carried,
        };
        // What does not fit is not thrown away by a charge that is denied: it waits where it is.
        let ahead = carried.back().saturating_sub(now) > self.longest_us() && carried.used.units_ceil() <= self.most();
        // The same sub-windows: each entry stays as it is.
        let trail = match self {
            Self::Pair(PairRules::TwoCounters(counters), _) => Some(counters.trail()),
            Self::Trail(trail) => Some(trail),
            Self::Pair(..) => None,
        };
        let entries = trail.filter(|trail| trail.most() > 0).map(|trail| match (from, held) {
            (Self::Trail(from), Held::Trail(entries)) if trail.reads(from) => {
                carried.scaled(from.live(*entries, now).into_iter(), trail.most_kept(), trail.most())
            }
            (Self::Pair(PairRules::TwoCounters(from), _), Held::Pair(state)) if trail.reads(from.trail()) => {
                carried.scaled(from.live(*state, now).into_iter(), trail.most_kept(), trail.most())
            }
            _ => trail.dated(&carried, now),
        });
        let kept = match (self, entries) {
            (Self::Trail(_), Some(entries)) => Kept::Trail(entries),
            (Self::Pair(PairRules::TwoCounters(counters), _), Some(entries)) => Kept::Pair(counters.of(&entries)),
            (Self::Pair(rules, _), _) => Kept::Pair(rules.take_over(&carried, now)),
            (Self::Trail(_), None) => Kept::Trail(Vec::new()),
        };
        (kept, ahead)
    }

    /// The most units that a state can have in use.
    fn most(&self) -> u64 {
        match self {
            Self::Trail(trail) => trail.most(),
            Self::Pair(rules, _) => match rules {
                PairRules::Gcra(rules) => rules.most(),
                PairRules::StepBucket(rules) => rules.most(),
                PairRules::FixedWindow(rules) => rules.most(),
                PairRules::TwoCounters(rules) => rules.trail().most(),
                PairRules::Meter(rules) => rules.most(),
                PairRules::Block(_) => 0,
            },
        }
    }

    /// How far ahead the units of another quota may be: of buckets the longest that their own are, of the others two periods.
    fn longest_us(&self) -> u64 {
        match self {
            Self::Trail(trail) => trail.longest_us(),
            Self::Pair(rules, _) => match rules {
                PairRules::Gcra(rules) => rules.longest_us(),
                PairRules::StepBucket(rules) => rules.longest_us(),
                PairRules::FixedWindow(rules) => rules.longest_us(),
                PairRules::TwoCounters(rules) => rules.trail().longest_us(),
                PairRules::Meter(rules) => rules.longest_us(),
                PairRules::Block(_) => u64::MAX,
            },
        }
    }
}

impl PairRules {
    /// A state that is further ahead than the quota can put it, brought back.
    pub(crate) fn brought_back(&self, state: Pair, now: u64) -> Option<Pair> {
        match self {
            Self::TwoCounters(counters) => counters.of(&counters.live(state, now)),
            rules => rules.take_over(&rules.carried(state, now), now),
        }
    }

    #[cfg(test)]
    pub(super) fn used(&self, state: Pair, now: u64) -> Used {
        self.carried(state, now).used
    }

    /// What is in use.
    fn carried(&self, state: Pair, now: u64) -> Carried {
        match self {
            Self::Gcra(rules) => rules.carried(state, now),
            Self::StepBucket(rules) => rules.carried(state, now),
            Self::FixedWindow(rules) => rules.carried(state, now),
            Self::TwoCounters(rules) => rules.carried(state, now),
            Self::Block(rules) => rules.carried(state, now),
            Self::Meter(rules) => rules.carried(state, now),
        }
    }

    /// A state in which so much is in use, at most the capacity and the allowed debt.
    fn take_over(&self, carried: &Carried, now: u64) -> Option<Pair> {
        match self {
            Self::Gcra(rules) => rules.with_used(carried.used, now),
            Self::StepBucket(rules) => rules.take_over(carried, now),
            Self::FixedWindow(rules) => rules.take_over(carried, now),
            Self::Block(rules) => rules.take_over(carried, now),
            Self::Meter(rules) => rules.take_over(carried, now),
            Self::TwoCounters(_) => None, // of dated units, see `Rules::take_over`
        }
    }
}
