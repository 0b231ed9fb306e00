//! The states of sliding windows and logs: dated entries, each of which stops counting at some instant.
//!
//! An entry is `(start, units)`: a sub-window of a sliding window, or an instant of a log. The entry counts in
//! full until `start + period`. After `start + period`, the edge of the trailing period passes over the
//! sub-window. While the edge passes, the quota's rule for the oldest sub-window says whether it counts in
//! part, in full, or not at all. Every decision therefore needs only the oldest few entries and the total.
//!
//! If the clock steps back by at most a period, time stands still for the key. If the clock steps back further, all
//! entries become one entry in the first sub-window that begins no earlier than now. No entry begins before that
//! sub-window: the newest entry is more than a period ahead of now, and each write drops the entries that have
//! expired at the start of the newest entry.

use crate::decision::ChargeDecision;
use crate::quota::spec::{Algorithm, Oldest, Spec};

use super::divisor::Divisor;
#[cfg(feature = "_redis")]
use super::state::UNBOUNDED;
use super::state::{Fullness, TakeMode};
use super::used::{Carried, Dated, Grid, Used};

/// Entries in the order of their starts, which all differ, and the sum of the entries' units.
pub(crate) trait LogEntries {
    fn total(&self) -> u64;

    fn newest(&self) -> Option<(u64, u64)>;

    /// Returns the entries from the oldest to the newest.
    fn iter(&self) -> impl Iterator<Item = (u64, u64)>;

    /// Returns the units of the entry that starts at this instant.
    fn find(&self, start: u64) -> Option<u64> {
        self.iter().find(|entry| entry.0 == start).map(|entry| entry.1)
    }
}

/// Entries in a list.
pub(crate) struct Listed<'a>(pub(crate) &'a [(u64, u64)]);

impl LogEntries for Listed<'_> {
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

/// The changes to the entries of a key, in the order in which they are made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Edit {
    /// The start of the entry into which all entries are merged after the clock stepped back. The merged
    /// entry has at most [`EntryLog::most`] units.
    pub(crate) move_to: Option<u64>,
    /// How many of the oldest entries no longer count and are dropped.
    pub(crate) drop: usize,
    /// The start of the newest entry or of a new one, and the units to add to this entry.
    pub(crate) add: Option<(u64, u64)>,
    /// The largest total to keep: the oldest units are dropped until the total is at most this number.
    pub(crate) keep: Option<u64>,
}

/// A decision, and the change to write if the charge is taken. A denied charge may also make a change.
#[derive(Debug)]
pub(crate) struct EntryAnswer {
    pub(crate) decision: ChargeDecision,
    pub(crate) edit: Option<Edit>,
}

/// Decides by a sliding window or a sliding log.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EntryLog {
    limit: u64,
    debt: u64,
    period_us: u64,
    /// The length of a sub-window; 1 for the log.
    grain: Divisor,
    /// How many units of an entry count while the edge of the period passes over the entry. This is `Dropped` for a
    /// log, because an entry of a log is a single instant.
    oldest: Oldest,
    log: bool,
    count_denied: bool,
}

/// The units that still count.
struct LogView {
    now: u64,
    /// The start of the entry in which a request at `now` is counted.
    start: u64,
    /// How many of the oldest entries no longer count.
    gone: usize,
    /// The units of the entries that still count. The oldest of these entries is counted in full.
    counted: u64,
    /// Units in use.
    used: u64,
}

impl EntryLog {
    pub(crate) fn new(spec: &Spec) -> Self {
        let log = spec.algorithm == Algorithm::SlidingLog;
        Self {
            limit: spec.limit,
            debt: spec.debt,
            period_us: spec.period_us,
            grain: Divisor::new(if log { 1 } else { spec.period_us / u64::from(spec.buckets) }),
            oldest: if log { Oldest::Dropped } else { spec.oldest },
            log,
            count_denied: spec.count_denied,
        }
    }

    /// Returns the maximum number of units in one entry of a sliding window, or in all entries of a log together.
    pub(crate) fn most(&self) -> u64 {
        self.limit + self.debt
    }

    /// Returns how many entries a key needs at most to use its whole quota. A log needs an entry for each unit. A
    /// sliding window needs an entry for each sub-window of the period, and two more.
    pub(crate) fn entries_max(&self) -> u64 {
        if self.log { self.limit } else { self.period_us / self.grain_us() + 2 }
    }

    #[inline]
    pub(crate) fn grain_us(&self) -> u64 {
        self.grain.get()
    }

    /// Returns the start of the sub-window that contains the instant `now`.
    #[inline]
    pub(super) fn start_of(&self, now: u64) -> u64 {
        self.grain.round_down(now)
    }

    pub(super) fn oldest(&self) -> Oldest {
        self.oldest
    }

    /// Returns the time from an entry's start until the entry no longer counts.
    #[inline]
    pub(crate) fn life_us(&self) -> u64 {
        match self.oldest {
            Oldest::Dropped => self.period_us,
            Oldest::Weighted | Oldest::Counted => self.period_us + self.grain_us(),
        }
    }

    /// Returns the decision for `cost` at `now`, and the change to write. `now` is at most
    /// [`CLOCK_US_MAX`](crate::base::time::CLOCK_US_MAX). The function reads only the oldest entries:
    /// those that have stopped counting, or will have stopped at the end of the wait.
    #[inline]
    pub(crate) fn decide(&self, entries: &impl LogEntries, now: u64, cost: u64, force: bool) -> EntryAnswer {
        if let Some(one) = self.gathered(entries, now) {
            return self.decide_gathered(one, now, cost, force);
        }
        let view = self.view(entries, now);
        let wanted = view.used.saturating_add(cost);
        if wanted > self.limit && !force && cost > 0 {
            return self.deny(entries, &view, cost);
        }
        let units = cost.min(self.most().saturating_sub(view.used));
        let decision = self.describe(entries, &view, units, Some(0)).receipted(units, view.start, 0);
        let edit = Edit { drop: view.gone, add: Some((view.start, units)), ..Edit::default() };
        EntryAnswer { decision, edit: (units > 0).then_some(edit) }
    }

    /// Returns the decision for a charge that is taken as `how` says, and the change to write.
    pub(crate) fn decide_how(&self, entries: &impl LogEntries, now: u64, cost: u64, how: TakeMode) -> EntryAnswer {
        let (cost, force) = how.plainly(cost);
        self.decide(entries, now, cost, force)
    }

    #[cold]
    #[inline(never)]
    fn decide_gathered(&self, one: [(u64, u64); 1], now: u64, cost: u64, force: bool) -> EntryAnswer {
        let mut answer = self.decide(&Listed(&one), now, cost, force);
        if cost > 0 {
            // A denied charge writes the state as well, because the state would otherwise stay ahead of the clock.
            answer.edit.get_or_insert_default().move_to = Some(one[0].0);
        }
        answer
    }

    #[inline(never)]
    fn deny(&self, entries: &impl LogEntries, view: &LogView, cost: u64) -> EntryAnswer {
        let target = self.limit.checked_sub(cost);
        if !self.count_denied {
            let retry_us = target.map(|target| self.wait(entries, view, target));
            return EntryAnswer { decision: self.describe(entries, view, 0, retry_us), edit: None };
        }
        let newest = entries.newest().filter(|(start, _)| *start == view.start);
        let there = if self.log { 0 } else { newest.map_or(0, |(_, units)| units) };
        let units = cost.min(self.limit.saturating_sub(there));
        let keep = self.log.then_some(self.limit.max(view.counted.min(self.most())));
        let edit = Edit { drop: view.gone, add: Some((view.start, units)), keep, ..Edit::default() };
        // The reported wait includes this refusal, because the refusal counts in the log until the wait ends.
        let edited = self.edited(entries, view, units, keep.unwrap_or(u64::MAX));
        let view = self.view(&edited, view.now);
        let retry_us = target.map(|target| self.wait(&edited, &view, target));
        let decision = self.describe(&edited, &view, 0, retry_us);
        EntryAnswer { decision, edit: (units > 0).then_some(edit) }
    }

    /// Returns the start `own`, and how many of `units` the entry with this start still holds. Returns `None` if no
    /// entry has this start, or if the entry no longer counts.
    pub(crate) fn refundable(&self, entries: &impl LogEntries, now: u64, units: u64, own: u64) -> Option<(u64, u64)> {
        let held = entries.find(own)?;
        (own.saturating_add(self.life_us()) > now).then_some((own, units.min(held))).filter(|(_, units)| *units > 0)
    }

    /// Returns the numbers with which the Lua twin decides on a charge.
    #[cfg(feature = "_redis")]
    pub(crate) fn numbers(&self, cost: u64, force: bool) -> [f64; 10] {
        let bound = if force || cost == 0 { UNBOUNDED } else { self.limit };
        let oldest = match self.oldest {
            Oldest::Weighted => 0,
            Oldest::Dropped => 1,
            Oldest::Counted => 2,
        };
        let (log, count_denied) = (u64::from(self.log), u64::from(self.count_denied));
        [
            cost.min(self.most() + 1),
            bound,
            self.limit,
            self.most(),
            self.period_us,
            self.grain_us(),
            oldest,
            log,
            count_denied,
            self.life_us(),
        ]
        .map(|number| number as f64)
    }

    /// Returns the units in use, for the conversion to another quota.
    pub(super) fn carried(&self, entries: &impl LogEntries, now: u64) -> Carried {
        if let Some(one) = self.gathered(entries, now) {
            return self.carried(&Listed(&one), now);
        }
        let view = self.view(entries, now);
        let at = now.max(view.start);
        let dated = entries.iter().skip(view.gone).map(|(start, whole)| {
            let edge = start + self.period_us;
            let units = if at < edge { whole } else { self.partly(whole, at - edge) };
            let taken = Some((start + self.grain_us() - 1).min(now)); // at the latest
            Dated { start: Some(start), whole, ..Dated::new(taken, start + self.life_us(), units) }
        });
        Carried { grid: Some(self.grid()), ..Carried::new(Used::units(view.used), dated) }
    }

    fn grid(&self) -> Grid {
        (self.period_us, self.grain_us(), self.oldest)
    }

    /// Converts units that another quota counted into entries.
    ///
    /// If both quotas have the same grid, each entry keeps its units, or its share of the capacity if the
    /// conversion keeps the used share. Entries on another grid count as if their units had been taken under this
    /// quota. Units without entries count as if they had been taken one period before they are freed, but no later
    /// than now.
    pub(super) fn take_over(&self, carried: &Carried, now: u64) -> Vec<(u64, u64)> {
        if self.most() == 0 {
            return Vec::new();
        }
        if carried.grid == Some(self.grid()) {
            debug_assert!(carried.dated.iter().all(|dated| dated.start.is_some()), "each entry of a grid has a start");
            let entries = carried.dated.iter().filter_map(|dated| Some((dated.start?, dated.whole)));
            let mut entries = carried.scaled(&entries.collect::<Vec<_>>(), self.most_kept(), self.most());
            if carried.share.is_some() {
                self.weigh_oldest(&mut entries, now);
            }
            return entries;
        }
        let grid = |at: u64| at - at % self.grain_us();
        let (latest, mut most) = (grid(now), carried.used.units_ceil().min(self.most()));
        let mut entries: Vec<(u64, u64)> = Vec::new();
        for Dated { start, taken, back, units, whole } in carried.dated.iter().copied() {
            let (taken, late) = (taken.unwrap_or(0), back.saturating_sub(self.period_us));
            let is_counted = start.is_some() && late <= taken + 1 && grid(taken) + self.period_us > now;
            if is_counted {
                most = self.most_kept();
                entries.push((grid(taken), whole));
                continue;
            }
            // If only a part of an entry still counts, the entry keeps the units of that part.
            let is_partly_over = grid(late) + self.period_us < now;
            let start = match self.oldest {
                Oldest::Counted => grid(late),
                Oldest::Weighted if is_partly_over => grid(late),
                // Rounds the instant up: an earlier instant would make the entry stop counting before its units come
                // back.
                Oldest::Weighted | Oldest::Dropped => late.next_multiple_of(self.grain_us()),
            };
            entries.push((start.min(latest).max(grid(taken)), units));
        }
        let mut entries = carried.scaled(&entries, most, self.most());
        self.weigh_oldest(&mut entries, now);
        entries
    }

    /// If only a part of the oldest entry counts, changes the entry so that all of its units count. An entry holds
    /// at most [`most`](Self::most) units, and the remaining units are added to the next sub-window.
    fn weigh_oldest(&self, entries: &mut Vec<(u64, u64)>, now: u64) {
        let Some((start, units)) = entries.first().copied() else { return };
        let edge = start + self.period_us;
        if self.oldest != Oldest::Weighted || now <= edge {
            return;
        }
        let (units, grain_us) = (u128::from(units), u128::from(self.grain_us()));
        let covered_us = u128::from((edge + self.grain_us()).saturating_sub(now).max(1));
        // The new entry is the largest that counts as `units` now. With a smaller entry, the first unit would come back
        // before a whole unit has expired.
        let whole = (((units + 1) * grain_us).div_ceil(covered_us) - 1).min(u128::from(self.most()));
        let left = (units - whole * covered_us / grain_us) as u64; // at most the units
        let whole = whole as u64; // at most `most`
        entries[0].1 = whole;
        if left > 0 {
            match entries.get_mut(1).filter(|next| next.0 == start + self.grain_us()) {
                Some(next) => next.1 = (next.1 + left).min(self.most()),
                None => entries.insert(1, (start + self.grain_us(), left)),
            }
        }
    }

    /// Returns the time from now that decides whether a denied charge writes a converted state. If all units of the
    /// other quota are freed within this time, a denied charge does not write the converted state.
    pub(super) fn longest_us(&self) -> u64 {
        2 * self.period_us
    }

    /// Returns the maximum number of units that all entries hold together. A sliding window has no maximum, because
    /// its entries may count only in part.
    pub(crate) fn most_kept(&self) -> u64 {
        if self.is_log() { self.most() } else { u64::MAX }
    }

    /// Returns whether this is a sliding log. The length of a sub-window does not show this, because a
    /// sliding window may also have sub-windows of one microsecond.
    pub(crate) fn is_log(&self) -> bool {
        self.log
    }

    pub(crate) fn fullness(&self, entries: &impl LogEntries, now: u64) -> Fullness {
        Fullness::of(&self.decide(entries, now, 0, false).decision)
    }

    /// Merges all entries into one if the newest lies ahead by more than a period, which means that the clock
    /// stepped back. Otherwise returns `None`.
    #[inline]
    pub(crate) fn gathered(&self, entries: &impl LogEntries, now: u64) -> Option<[(u64, u64); 1]> {
        let (newest, _) = entries.newest()?;
        let is_ahead = newest > self.start_of(now) + self.period_us;
        is_ahead.then(|| [(now.next_multiple_of(self.grain_us()), entries.total().min(self.most()))])
    }

    /// Returns which entries still count. The newest entry must be at most a period ahead.
    #[inline]
    fn view(&self, entries: &impl LogEntries, now: u64) -> LogView {
        let start = self.start_of(now);
        // While the clock is behind the newest entry, the view uses that entry's instant as the current time.
        let (start, at) = match entries.newest() {
            Some((newest, _)) if newest > start => (newest, newest),
            _ => (start, now),
        };
        let total = entries.total();
        let mut view = LogView { now, start, gone: 0, counted: total, used: total };
        for (entry, units) in entries.iter() {
            let edge = entry + self.period_us;
            if at < edge {
                break;
            }
            if at < entry + self.life_us() {
                view.used -= units - self.partly(units, at - edge);
                break;
            }
            view.gone += 1;
            view.counted -= units;
            view.used -= units;
        }
        view
    }

    /// Returns how many of the oldest entry's `units` count after the edge of the period has passed over
    /// the first `passed` microseconds of the entry.
    #[inline]
    pub(super) fn partly(&self, units: u64, passed: u64) -> u64 {
        match self.oldest {
            Oldest::Dropped => 0,
            Oldest::Counted => units,
            Oldest::Weighted => {
                let covered_us = self.grain_us() - passed;
                match units.checked_mul(covered_us) {
                    Some(covered) if covered >> 63 == 0 => self.grain.floor(covered),
                    _ => (u128::from(units) * u128::from(covered_us) / u128::from(self.grain_us())) as u64, // below units
                }
            }
        }
    }

    /// Returns the time until at most `target` units are in use, if no further charge is taken.
    fn wait(&self, entries: &impl LogEntries, view: &LogView, target: u64) -> u64 {
        if view.used <= target {
            return 0;
        }
        let mut newer = view.counted;
        for (start, units) in entries.iter().skip(view.gone) {
            newer -= units;
            if newer <= target {
                return self.leaves(start, units, target - newer).saturating_sub(view.now);
            }
        }
        debug_assert!(false, "the entries hold all units in use");
        0
    }

    /// Returns the first instant at which an entry with more than `room` units counts for at most
    /// `room` units.
    #[inline]
    pub(super) fn leaves(&self, start: u64, units: u64, room: u64) -> u64 {
        let (edge, grain_us) = (start + self.period_us, self.grain_us());
        match self.oldest {
            Oldest::Dropped => edge,
            Oldest::Counted => edge + grain_us,
            Oldest::Weighted => {
                // Finds the first microsecond in which the covered part of the entry is below `room + 1` units. `room
                // + 1` is at most `units`.
                let (above, units) = (room + 1, units.max(1));
                let covered_us = match above.checked_mul(grain_us) {
                    Some(covered) => covered.div_ceil(units),
                    None => (u128::from(above) * u128::from(grain_us)).div_ceil(u128::from(units)) as u64,
                };
                edge + grain_us - covered_us + 1
            }
        }
    }

    /// Returns the entries as they will be after an edit. The edit drops the entries that no longer count, adds
    /// `added` units now, and keeps only the newest `keep` units.
    #[inline]
    fn edited<'a, E: LogEntries>(&self, entries: &'a E, view: &LogView, added: u64, keep: u64) -> Edited<'a, E> {
        let sum = view.counted + added;
        Edited {
            entries,
            gone: view.gone,
            add: (added > 0).then_some((view.start, added)),
            over: sum.saturating_sub(keep),
            total: sum.min(keep),
        }
    }

    /// Describes the state after `added` more units.
    #[inline]
    fn describe(&self, entries: &impl LogEntries, view: &LogView, added: u64, retry_us: Option<u64>) -> ChargeDecision {
        let used = view.used + added;
        let remaining = self.limit.saturating_sub(used);
        let after = self.edited(entries, view, added, u64::MAX);
        let reset_us = match after.newest() {
            Some((start, units)) if used > 0 => self.leaves(start, units, 0).saturating_sub(view.now),
            _ => 0,
        };
        let window_us = match retry_us {
            Some(wait) if wait > 0 => wait,
            _ if self.limit == 0 => 0,
            _ if remaining == 0 => {
                self.wait(&after, &LogView { gone: 0, counted: after.total, used, ..*view }, self.limit - 1)
            }
            _ if self.log => match after.iter().next() {
                Some((oldest, _)) => (oldest + self.period_us).saturating_sub(view.now),
                None => self.period_us,
            },
            _ => (view.start + self.grain_us()).saturating_sub(view.now),
        };
        ChargeDecision::found(self.limit, remaining, reset_us, window_us, retry_us)
    }
}

/// Entries as they will be after an edit.
struct Edited<'a, E> {
    entries: &'a E,
    gone: usize,
    add: Option<(u64, u64)>,
    /// How many of the oldest units are not kept.
    over: u64,
    total: u64,
}

impl<E: LogEntries> LogEntries for Edited<'_, E> {
    fn total(&self) -> u64 {
        self.total
    }

    #[inline]
    fn newest(&self) -> Option<(u64, u64)> {
        match (self.entries.newest(), self.add) {
            (Some((start, units)), Some((at, more))) if start == at => Some((at, (units + more).min(self.total))),
            (last, add) => add.or(last),
        }
    }

    fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        let (add, mut over) = (self.add, self.over);
        let is_new = |(start, _): &(u64, u64)| self.entries.newest().is_none_or(|newest| newest.0 != *start);
        let added = move |(start, units)| match add {
            Some((at, more)) if at == start => (start, units + more),
            _ => (start, units),
        };
        let all = self.entries.iter().skip(self.gone).map(added).chain(add.filter(is_new));
        all.filter_map(move |(start, units)| {
            let trimmed = over.min(units);
            over -= trimmed;
            (units > trimmed).then_some((start, units - trimmed))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::quota::Quota;

    fn window(limit: u64) -> EntryLog {
        let quota = Quota::sliding_window(limit, Duration::from_micros(60)).and_then(|quota| quota.buckets(6));
        EntryLog::new(quota.and_then(|quota| quota.max_debt(0)).expect("a valid quota").spec())
    }

    #[test]
    fn entries_stay_as_they_are_when_only_the_limit_changes() {
        let entries = [(0, 5), (10, 3), (60, 1)];
        for now in [60, 65, 69] {
            assert_eq!(window(20).take_over(&window(10).carried(&Listed(&entries), now), now), entries, "at {now}");
        }
    }

    /// Half of the oldest sub-window counts, so it holds twice the units that it counts, up to the limit.
    #[test]
    fn units_that_the_oldest_sub_window_cannot_hold_go_to_the_next() {
        let log = window(10);
        for (entries, weighed) in [
            (vec![(0, 5), (10, 3)], vec![(0, 10), (10, 3)]),
            (vec![(0, 8), (10, 3)], vec![(0, 10), (10, 6)]),
            (vec![(0, 8), (10, 9)], vec![(0, 10), (10, 10)]),
            (vec![(0, 8), (20, 3)], vec![(0, 10), (10, 3), (20, 3)]),
            (vec![(0, 8)], vec![(0, 10), (10, 3)]),
        ] {
            let mut found = entries.clone();
            log.weigh_oldest(&mut found, 65);
            assert_eq!(found, weighed, "{entries:?}");
            found = entries.clone();
            log.weigh_oldest(&mut found, 60);
            assert_eq!(found, entries, "all of it counts");
        }
    }
}
