//! The units of a quota that are in use, and when they are freed. Another quota takes them over.

use smallvec::SmallVec;

use crate::quota::spec::Oldest;

/// Units in use, exactly: `parts / of`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Used {
    pub(crate) parts: u128,
    pub(crate) of: u128,
}

impl Used {
    pub(super) fn units(units: u64) -> Self {
        Self { parts: u128::from(units), of: 1 }
    }

    /// Converts units of the capacity `from` to the same share of the capacity `to`. If the exact product would not
    /// fit, the units are first rounded up to whole ones.
    pub(crate) fn in_proportion(self, from: u64, to: u64) -> Self {
        let (from, to) = (u128::from(from.max(1)), u128::from(to)); // of a capacity of 0, nothing is in use
        match self.parts.checked_mul(to) {
            Some(parts) => Self { parts, of: self.of * from }, // below 2^45 · 2^50
            None => Self { parts: u128::from(self.units_ceil()) * to, of: from },
        }
    }

    pub(crate) fn units_ceil(self) -> u64 {
        u64::try_from(self.parts.div_ceil(self.of)).unwrap_or(u64::MAX)
    }

    /// Returns `⌈used · scale⌉`, rounded up to whole units first if the exact product would not fit.
    pub(super) fn scaled_ceil(self, scale: u128) -> u128 {
        match self.parts.checked_mul(scale) {
            Some(product) => product.div_ceil(self.of),
            None => u128::from(self.units_ceil()).saturating_mul(scale),
        }
    }
}

/// Units in use, and when they come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dated {
    /// The start of their entry, if they are of a log or a sliding window.
    pub(super) start: Option<u64>,
    /// The latest instant at which the last of them can have been taken, or when a window began to count them.
    pub(super) taken: Option<u64>,
    /// When the last of them comes back.
    pub(super) back: u64,
    pub(super) units: u64,
    /// The units of the whole entry, also those that no longer count because the period's edge passes over them.
    pub(super) whole: u64,
}

impl Dated {
    pub(super) fn new(taken: Option<u64>, back: u64, units: u64) -> Self {
        Self { start: None, taken, back, units, whole: units }
    }
}

/// The number of slices of equal length in which a log or a sliding window dates the units of a bucket.
const SLICES: u64 = 32;

/// The units in use under one quota, for another quota to take over.
#[derive(Clone, Debug)]
pub(crate) struct Carried {
    pub(super) used: Used,
    /// In the order in which they come back. Their sum is the number of units in use, rounded up.
    pub(super) dated: SmallVec<[Dated; 4]>,
    /// When a step bucket ticked last.
    pub(super) tick: Option<u64>,
    /// For units of a log or a sliding window: the period, the sub-window, and the rule for the oldest sub-window.
    pub(super) grid: Option<Grid>,
    /// The old and the new capacity, if the used share is kept and not the amount.
    pub(super) share: Option<(u64, u64)>,
}

/// The settings that entries of a log or a sliding window are read by: period, sub-window, and how the oldest one
/// counts.
pub(super) type Grid = (u64, u64, Oldest);

impl Carried {
    pub(super) fn new(used: Used, dated: impl IntoIterator<Item = Dated>) -> Self {
        let dated = dated.into_iter().filter(|dated| dated.whole > 0).collect();
        Self { used, dated, tick: None, grid: None, share: None }
    }

    /// Dates the units of a bucket, which come back one after the other, in a few slices: each slice by the instant at
    /// which its last unit comes back. `in_use` returns how many units are still in use at a later instant.
    pub(super) fn sliced(self, now: u64, in_use: impl Fn(u64) -> u64) -> Self {
        let (back, mut before) = (self.back(), self.used.units_ceil());
        let slice_us = back.saturating_sub(now).div_ceil(SLICES);
        let slices = (1..=SLICES).map(|nth| {
            let end = (now + nth * slice_us).min(back);
            let after = if end < back { in_use(end) } else { 0 };
            let units = before - after;
            before = after;
            Dated::new(None, end, units)
        });
        Self { dated: slices.filter(|slice| slice.units > 0).collect(), ..self }
    }

    /// Keeps the share of a capacity of `from` as a share of one of `to`. An entry keeps only the units that count. If
    /// it kept all, it would be rounded down once more, and count for less than its share.
    pub(super) fn in_proportion(mut self, from: u64, to: u64) -> Self {
        self.dated.iter_mut().for_each(|dated| dated.whole = dated.units);
        Self { used: self.used.in_proportion(from, to), share: Some((from, to)), ..self }
    }

    /// Returns when none of the units is in use any more.
    pub(super) fn back(&self) -> u64 {
        self.dated.last().map_or(0, |dated| dated.back)
    }

    /// Returns the latest instant at which the last of the units can have been taken, if that is known.
    pub(super) fn taken(&self) -> Option<u64> {
        self.dated.last().and_then(|last| last.taken)
    }

    /// Returns until when all units count in a window of one period: a period after the last of them was taken. That
    /// is at most a period from now. It is no earlier than the instant at which they would have come back, if that is
    /// within a period.
    pub(super) fn until(&self, now: u64, period_us: u64) -> u64 {
        let taken = self.taken().unwrap_or(now).min(now);
        (taken + period_us).max(self.back().min(now + period_us))
    }

    /// Returns these units, the oldest first, as the new quota counts them: at most `most` of the newest, and at most
    /// `each` in one entry. They are rounded up from the newest on, so that the sum is also rounded up after the older
    /// ones have come back.
    pub(super) fn scaled(&self, entries: &[(u64, u64)], most: u64, each: u64) -> Vec<(u64, u64)> {
        let (mut sum, mut before) = (0_u64, 0);
        let mut scaled: Vec<(u64, u64)> = Vec::new();
        for (start, units) in entries.iter().rev().copied() {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_units_are_kept_and_no_entry_is_empty() {
        let carried = Carried::new(Used::units(11), []);
        let entries = [(0, 3), (10, 4), (20, 4)];
        for (most, each, kept) in [
            (11, 11, vec![(0, 3), (10, 4), (20, 4)]),
            (9, 11, vec![(0, 1), (10, 4), (20, 4)]),
            (8, 11, vec![(10, 4), (20, 4)]),
            (4, 11, vec![(20, 4)]),
            (11, 3, vec![(0, 3), (10, 3), (20, 3)]),
            (0, 11, vec![]),
        ] {
            assert_eq!(carried.scaled(&entries, most, each), kept, "at most {most}, {each} each");
        }
        let half = carried.in_proportion(10, 5);
        assert_eq!(half.scaled(&entries, 11, 11), [(0, 2), (10, 2), (20, 2)], "rounded up from the newest on");
    }

    /// A number of parts that cannot be multiplied is rounded up to whole units before.
    #[test]
    fn share_of_more_parts_than_can_be_multiplied_is_rounded_up() {
        let used = Used { parts: u128::MAX / 4 + 1, of: 1 << 100 };
        assert_eq!(used.units_ceil(), 1 << 26);
        assert_eq!(used.in_proportion(2, 8).units_ceil(), 1 << 28);
        assert_eq!(used.scaled_ceil(8), 1 << 29);
    }
}
