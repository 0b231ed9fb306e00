//! The units of a quota that are in use, and when they are freed, for the conversion of a state to
//! another quota.

use crate::quota::spec::Oldest;

/// The exact number of units in use, as a fraction: `parts / of`.
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
    /// fit a `u128`, the units are first rounded up to whole units.
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

    /// Returns `⌈used · scale⌉`. If the exact product would not fit a `u128`, the units are first
    /// rounded up to whole units.
    pub(super) fn scaled_ceil(self, scale: u128) -> u128 {
        match self.parts.checked_mul(scale) {
            Some(product) => product.div_ceil(self.of),
            None => u128::from(self.units_ceil()).saturating_mul(scale),
        }
    }
}

/// Units in use, and when they are freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dated {
    /// The start of the entry that holds the units, if the old quota is a log or a sliding window.
    pub(super) start: Option<u64>,
    /// The latest instant at which the last of the units can have been taken, or the instant at which a window
    /// began to count the units.
    pub(super) taken: Option<u64>,
    /// The instant at which the last of the units is freed.
    pub(super) back: u64,
    pub(super) units: u64,
    /// The units of the whole entry, including the units that no longer count because the edge of the period
    /// passes over the entry.
    pub(super) whole: u64,
}

impl Dated {
    pub(super) fn new(taken: Option<u64>, back: u64, units: u64) -> Self {
        Self { start: None, taken, back, units, whole: units }
    }
}

/// The number of slices of equal length into which a bucket's units are split for the conversion to
/// a log or a sliding window.
const SLICES: u64 = 32;

/// The units in use under one quota, for the conversion to another quota.
#[derive(Clone, Debug)]
pub(crate) struct Carried {
    pub(super) used: Used,
    /// The dated units, in the order in which they are freed. The sum of the dated units is the number
    /// of units in use, rounded up.
    pub(super) dated: Vec<Dated>,
    /// The last tick, if the old quota is a step bucket.
    pub(super) tick: Option<u64>,
    /// The period, the sub-window, and the rule for the oldest sub-window, if the old quota is a log or a sliding
    /// window.
    pub(super) grid: Option<Grid>,
    /// The old and the new capacity, if the conversion keeps the used share instead of the used amount.
    pub(super) share: Option<(u64, u64)>,
}

/// The settings with which the entries of a log or a sliding window are read: the period, the length of a
/// sub-window, and how the oldest sub-window counts.
pub(super) type Grid = (u64, u64, Oldest);

impl Carried {
    pub(super) fn new(used: Used, dated: impl IntoIterator<Item = Dated>) -> Self {
        let dated = dated.into_iter().filter(|dated| dated.whole > 0).collect();
        Self { used, dated, tick: None, grid: None, share: None }
    }

    /// Splits the units of a bucket, which are freed one after the other, into a few slices. Each slice has the
    /// instant at which its last unit is freed. `in_use` returns how many units are still in use at a later instant.
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

    /// Converts the used share of the capacity `from` into the same share of the capacity `to`. An entry keeps only
    /// the units that count now. If it kept all its units, the number of units that count would be rounded down
    /// once more under the new quota, and the entry would count for less than its share.
    pub(super) fn in_proportion(mut self, from: u64, to: u64) -> Self {
        self.dated.iter_mut().for_each(|dated| dated.whole = dated.units);
        Self { used: self.used.in_proportion(from, to), share: Some((from, to)), ..self }
    }

    /// Returns the instant at which the last of the units is freed.
    pub(super) fn back(&self) -> u64 {
        self.dated.last().map_or(0, |dated| dated.back)
    }

    /// Returns the latest instant at which the last of the units can have been taken, if this instant
    /// is known.
    pub(super) fn taken(&self) -> Option<u64> {
        self.dated.last().and_then(|last| last.taken)
    }

    /// Returns the instant until which all units count in a window of one period. The returned instant is the
    /// later of two: one period after the last unit was taken, and the instant at which the last unit would
    /// have been freed. It is at most a period from now.
    pub(super) fn until(&self, now: u64, period_us: u64) -> u64 {
        let taken = self.taken().unwrap_or(now).min(now);
        (taken + period_us).max(self.back().min(now + period_us))
    }

    /// Returns the entries as the new quota counts them, the oldest first. The returned entries keep at most the
    /// newest `most` units, and at most `each` units in one entry. The sums of the newest entries are rounded up:
    /// of the newest one, of the newest two, and so on. Each entry is the difference of two such sums. So after
    /// older entries have expired, the sum of the remaining entries was rounded up only once.
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
