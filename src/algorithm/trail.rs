//! What sliding windows and logs have in common: dated entries, and when each stops to count.
//!
//! An entry is `(start, units)`: a sub-window of the sliding window, or an instant of the log. It counts in full until
//! `start + period`; a sliding window's sub-window then counts in part, in full, or not at all while the period's edge
//! passes over it. So everything asked of a trail is asked of its oldest few entries and of the total.

use crate::decision::ChargeDecision;
use crate::quota::{Algorithm, Oldest, Spec};

#[cfg(feature = "redis")]
use super::UNBOUNDED;
use super::carry::{Carried, Dated};
use super::{Fullness, How, Used};

/// Entries in order of their start, all different, and the sum of their units.
pub(crate) trait Entries {
    fn total(&self) -> u64;
    fn newest(&self) -> Option<(u64, u64)>;
    /// From the oldest to the newest.
    fn iter(&self) -> impl Iterator<Item = (u64, u64)>;
    /// The units of the entry that starts then.
    fn find(&self, start: u64) -> Option<u64> {
        self.iter().find(|entry| entry.0 == start).map(|entry| entry.1)
    }
}

/// How a state of entries changes: in this order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Edit {
    /// Entries that start later are moved to this instant, where they are one entry of at most [`Trail::most`] units: the
    /// clock stepped back.
    pub(crate) move_to: Option<u64>,
    /// So many of the oldest entries no longer count.
    pub(crate) drop: usize,
    /// Units to add to the entry that starts then, which is the newest or newer.
    pub(crate) add: Option<(u64, u64)>,
    /// The oldest units go until the total is at most this.
    pub(crate) keep: Option<u64>,
}

/// A decision, and the change to write: if the charge is taken, or if this refusal is to be written.
#[derive(Debug)]
pub(crate) struct TrailAnswer {
    pub(crate) decision: ChargeDecision,
    pub(crate) edit: Option<Edit>,
}

/// The rule of a sliding window or of a log.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Trail {
    limit: u64,
    debt: u64,
    period_us: u64,
    /// The length of a sub-window; 1 for the log.
    grain_us: u64,
    /// What the entry counts for that the period's edge passes over; a log's has no length, so it is dropped.
    oldest: Oldest,
    log: bool,
    count_denied: bool,
}

/// What still counts.
struct View {
    now: u64,
    /// The start of the entry that a request of now belongs to.
    start: u64,
    /// Entries are read as if none started later.
    move_to: u64,
    /// So many of the oldest count no longer.
    gone: usize,
    /// Units of those that still count, the oldest of them in full.
    counted: u64,
    /// Units in use.
    used: u64,
}

impl Trail {
    pub(crate) fn new(spec: &Spec) -> Self {
        let log = spec.algorithm == Algorithm::SlidingLog;
        Self {
            limit: spec.limit,
            debt: spec.debt,
            period_us: spec.period_us,
            grain_us: if log { 1 } else { spec.period_us / u64::from(spec.buckets) },
            oldest: if log { Oldest::Dropped } else { spec.oldest },
            log,
            count_denied: spec.count_denied,
        }
    }

    /// The most units the entries can hold together, or, of a sliding window, one of them.
    pub(crate) fn most(&self) -> u64 {
        self.limit + self.debt
    }

    /// The entries that one key needs for its whole quota: one for each unit of a log; of a sliding window one for each
    /// sub-window that counts, with the oldest and the current one.
    pub(crate) fn entries_max(&self) -> u64 {
        if self.log { self.limit } else { self.period_us / self.grain_us + 2 }
    }

    pub(crate) fn grain_us(&self) -> u64 {
        self.grain_us
    }

    /// From an entry's start until it counts for nothing.
    pub(crate) fn life_us(&self) -> u64 {
        match self.oldest {
            Oldest::Dropped => self.period_us,
            Oldest::Weighted | Oldest::Counted => self.period_us + self.grain_us,
        }
    }

    /// The decision for `cost` at `now`, which is at most [`CLOCK_US_MAX`](crate::time::CLOCK_US_MAX), and the change to
    /// write. It looks at the oldest entries that stopped to count or must before the wait is over, and at no others.
    pub(crate) fn decide(&self, entries: &impl Entries, now: u64, cost: u64, force: bool) -> TrailAnswer {
        let view = self.view(entries, now);
        let wanted = view.used.saturating_add(cost);
        if wanted > self.limit && !force && cost > 0 {
            return self.deny(entries, &view, cost);
        }
        let units = cost.min(self.most().saturating_sub(view.used));
        let added = Edit { add: Some((view.start, units)), ..self.cleaned(&view) };
        let decision = self.describe(entries, &view, units, Some(0));
        if units == 0 {
            return TrailAnswer { decision, edit: if cost > 0 { self.repaired(&view) } else { None } };
        }
        TrailAnswer { decision: decision.receipted(units, view.start, 0), edit: Some(added) }
    }

    /// The same for a charge that is taken in this way.
    pub(crate) fn decide_how(&self, entries: &impl Entries, now: u64, cost: u64, how: How) -> TrailAnswer {
        let (cost, force) = how.plainly(cost);
        self.decide(entries, now, cost, force)
    }

    fn deny(&self, entries: &impl Entries, view: &View, cost: u64) -> TrailAnswer {
        let target = self.limit.checked_sub(cost);
        if !self.count_denied {
            let retry_us = target.map(|target| self.wait(entries, view, target));
            return TrailAnswer { decision: self.describe(entries, view, 0, retry_us), edit: self.repaired(view) };
        }
        let newest = self.edited(entries, view, 0, u64::MAX).newest().filter(|(start, _)| *start == view.start);
        let there = if self.log { 0 } else { newest.map_or(0, |(_, units)| units) };
        let units = cost.min(self.limit.saturating_sub(there));
        let keep = self.log.then_some(self.limit.max(view.counted.min(self.most())));
        let counted = (units > 0).then(|| Edit { add: Some((view.start, units)), keep, ..self.cleaned(view) });
        let edit = counted.or_else(|| self.repaired(view));
        // The wait that is told counts this refusal too: it is as long as the newcomer itself will be remembered.
        let edited = self.edited(entries, view, units, keep.unwrap_or(u64::MAX));
        let view = self.view(&edited, view.now);
        let retry_us = target.map(|target| self.wait(&edited, &view, target));
        TrailAnswer { decision: self.describe(&edited, &view, 0, retry_us), edit }
    }

    /// Gives back `units` of the entry that starts at `own`: how many of them it still holds, while it counts.
    pub(crate) fn refundable(&self, entries: &impl Entries, now: u64, units: u64, own: u64) -> Option<(u64, u64)> {
        let life_us = self.life_us();
        let held = entries.find(own)?;
        (own.saturating_add(life_us) > now).then_some((own, units.min(held))).filter(|(_, units)| *units > 0)
    }

    /// What the Lua twin is told of a charge.
    #[cfg(feature = "redis")]
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
            self.grain_us,
            oldest,
            log,
            count_denied,
            self.life_us(),
        ]
        .map(|number| number as f64)
    }

    /// Whether the twin's products need more than 53 bits.
    #[cfg(feature = "redis")]
    pub(crate) fn is_wide(&self) -> bool {
        self.oldest == Oldest::Weighted && u128::from(self.most() + 1) * u128::from(self.grain_us) >= 1 << 53
    }

    /// What is in use.
    pub(super) fn carried(&self, entries: &impl Entries, now: u64) -> Carried {
        let view = self.view(entries, now);
        let at = now.max(if view.move_to == u64::MAX { view.start } else { view.move_to });
        let live = self.edited(entries, &view, 0, u64::MAX);
        let dated = live.iter().map(|(start, whole)| {
            let edge = start + self.period_us;
            let units = if at < edge { whole } else { self.partly(whole, at - edge) };
            let taken = Some((start + self.grain_us - 1).min(now)); // at the latest
            Dated { whole, is_exact: true, ..Dated::new(taken, start + self.life_us(), units) }
        });
        Carried::new(Used::units(view.used), dated.collect::<Vec<_>>())
    }

    /// The entries of dated units. Where it is known when they were taken, they count as if that had been under this quota;
    /// or, if they counted for longer than this quota's period, in full for as long, up to a period from now.
    pub(super) fn dated(&self, carried: &Carried, now: u64) -> Vec<(u64, u64)> {
        let grid = |at: u64| at - at % self.grain_us;
        let (latest, mut most) = (grid(now), carried.used.units_ceil().min(self.most()));
        let mut entries: Vec<(u64, u64)> = Vec::new();
        for Dated { taken, is_exact, back, units, whole } in carried.dated.iter().copied() {
            let (taken, late) = (taken.unwrap_or(0), back.saturating_sub(self.period_us));
            // One that would count in part only is kept at what it counted.
            if !is_exact || late > taken + 1 || grid(taken) + self.period_us <= now {
                let start = now.min(late).next_multiple_of(self.grain_us).min(latest);
                entries.push((start.max(grid(taken)), units));
                continue;
            }
            most = self.most_kept();
            entries.push((grid(taken), whole));
        }
        carried.scaled(entries.into_iter(), most, self.most())
    }

    /// How far ahead the units of another quota may be.
    pub(super) fn longest_us(&self) -> u64 {
        2 * self.period_us
    }

    /// The most units of dated entries that are taken over: of a log what it could hold itself.
    pub(super) fn most_kept(&self) -> u64 {
        if self.log { self.most() } else { u64::MAX }
    }

    /// Whether the entries of another are entries of this as they are.
    pub(crate) fn reads(&self, other: &Self) -> bool {
        (self.period_us, self.grain_us, self.oldest) == (other.period_us, other.grain_us, other.oldest)
    }

    /// The entries that still count.
    pub(super) fn live(&self, entries: &impl Entries, now: u64) -> Vec<(u64, u64)> {
        let view = self.view(entries, now);
        self.edited(entries, &view, 0, u64::MAX).iter().collect()
    }

    pub(crate) fn fullness(&self, entries: &impl Entries, now: u64) -> Fullness {
        let used = self.view(entries, now).used;
        Fullness { throttled: used >= self.limit, used: super::share(used, self.limit) }
    }

    fn view(&self, entries: &impl Entries, now: u64) -> View {
        let mut start = now - now % self.grain_us;
        let mut move_to = u64::MAX;
        let mut at = now;
        let mut total = entries.total();
        if let Some((newest, _)) = entries.newest().filter(|(newest, _)| *newest > start) {
            // The clock stepped back. By less than a period, and it stands still; by more, and the entries come along, to
            // the first sub-window that begins no earlier than now: none then counts for less time than it should.
            if newest - start <= self.period_us {
                (start, at) = (newest, newest);
            } else {
                move_to = now.next_multiple_of(self.grain_us);
                (start, at) = (move_to, move_to);
                total = merged(entries.iter(), move_to, self.most()).map(|(_, units)| units).sum();
            }
        }
        let mut view = View { now, start, move_to, gone: 0, counted: total, used: total };
        for (entry, units) in merged(entries.iter(), move_to, self.most()) {
            let edge = entry + self.period_us;
            if at < edge {
                break;
            }
            if at >= entry + self.life_us() {
                view.gone += 1;
                view.counted -= units;
                view.used -= units;
            } else {
                view.used -= units - self.partly(units, at - edge);
                break;
            }
        }
        view
    }

    /// What `units` of the oldest entry count for when `passed` of it is out of the period.
    fn partly(&self, units: u64, passed: u64) -> u64 {
        match self.oldest {
            Oldest::Dropped => 0,
            Oldest::Counted => units,
            Oldest::Weighted => {
                let covered_us = self.grain_us - passed;
                match units.checked_mul(covered_us) {
                    Some(covered) => covered / self.grain_us,
                    None => (u128::from(units) * u128::from(covered_us) / u128::from(self.grain_us)) as u64, // below units
                }
            }
        }
    }

    /// The time until at most `target` units are in use, if nothing else comes.
    fn wait(&self, entries: &impl Entries, view: &View, target: u64) -> u64 {
        if view.used <= target {
            return 0;
        }
        let mut newer = view.counted;
        for (start, units) in merged(entries.iter().skip(view.gone), view.move_to, self.most()) {
            newer -= units;
            if newer <= target {
                return self.leaves(start, units, target - newer).saturating_sub(view.now);
            }
        }
        0 // not reached: without its entries nothing is in use
    }

    /// The first instant at which an entry of more than `room` units counts for at most `room`.
    fn leaves(&self, start: u64, units: u64, room: u64) -> u64 {
        let edge = start + self.period_us;
        match self.oldest {
            Oldest::Dropped => edge,
            Oldest::Counted => edge + self.grain_us,
            Oldest::Weighted => {
                // The first microsecond in which the covered part is below room + 1, which is at most the units.
                let (above, units) = (room + 1, units.max(1));
                let covered_us = match above.checked_mul(self.grain_us) {
                    Some(covered) => covered.div_ceil(units),
                    None => (u128::from(above) * u128::from(self.grain_us)).div_ceil(u128::from(units)) as u64,
                };
                edge + self.grain_us - covered_us + 1
            }
        }
    }

    fn cleaned(&self, view: &View) -> Edit {
        Edit { move_to: (view.move_to != u64::MAX).then_some(view.move_to), drop: view.gone, ..Edit::default() }
    }

    fn repaired(&self, view: &View) -> Option<Edit> {
        (view.move_to != u64::MAX).then(|| self.cleaned(view))
    }

    /// The entries as they will be when the gone are dropped, the later moved, and `added` units counted now, of which the
    /// newest `keep` stay.
    fn edited<'a, E: Entries>(&self, entries: &'a E, view: &View, added: u64, keep: u64) -> Edited<'a, E> {
        let sum = view.counted + added;
        Edited {
            entries,
            gone: view.gone,
            move_to: view.move_to,
            most: self.most(),
            add: (added > 0).then_some((view.start, added)),
            over: sum.saturating_sub(keep),
            total: sum.min(keep),
        }
    }

    /// Describes the state after `added` more units.
    fn describe(&self, entries: &impl Entries, view: &View, added: u64, retry_us: Option<u64>) -> ChargeDecision {
        let used = view.used + added;
        let remaining = self.limit.saturating_sub(used);
        let after = self.edited(entries, view, added, u64::MAX);
        let seen = View { gone: 0, counted: after.total, used, move_to: u64::MAX, ..*view };
        let reset_us = match after.newest() {
            Some((start, units)) if used > 0 => self.leaves(start, units, 0).saturating_sub(view.now),
            _ => 0,
        };
        let window_us = match retry_us {
            Some(wait) if wait > 0 => wait,
            _ if self.limit == 0 => 0,
            _ if remaining == 0 => self.wait(&after, &seen, self.limit - 1),
            _ if self.log => match after.iter().next() {
                Some((oldest, _)) => (oldest + self.period_us).saturating_sub(view.now),
                None => self.period_us,
            },
            _ => (view.start + self.grain_us).saturating_sub(view.now),
        };
        ChargeDecision::found(self.limit, remaining, reset_us, window_us, retry_us)
    }
}

/// Entries as they will be after an edit.
struct Edited<'a, E> {
    entries: &'a E,
    gone: usize,
    move_to: u64,
    most: u64,
    add: Option<(u64, u64)>,
    /// So many of the oldest units are not kept.
    over: u64,
    total: u64,
}

impl<E: Entries> Entries for Edited<'_, E> {
    fn total(&self) -> u64 {
        self.total
    }

    fn newest(&self) -> Option<(u64, u64)> {
        if self.move_to != u64::MAX {
            return self.iter().last();
        }
        match (self.entries.newest(), self.add) {
            (Some((start, units)), Some((at, more))) if start == at => Some((at, (units + more).min(self.total))),
            (last, add) => add.or(last),
        }
    }

    fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        let mut over = self.over;
        let left = self.entries.iter().skip(self.gone).chain(self.add).filter_map(move |(start, units)| {
            let trimmed = over.min(units);
            over -= trimmed;
            (units > trimmed).then_some((start, units - trimmed))
        });
        merged(left, self.move_to, self.most)
    }
}

/// The entries as if none started after `move_to`, neighbours of one start in one of at most `most` units.
fn merged(entries: impl Iterator<Item = (u64, u64)>, move_to: u64, most: u64) -> impl Iterator<Item = (u64, u64)> {
    let mut entries = entries;
    let mut pending: Option<(u64, u64)> = None;
    std::iter::from_fn(move || {
        for (start, units) in entries.by_ref() {
            let start = start.min(move_to);
            match &mut pending {
                Some((last, sum)) if *last == start => *sum = (*sum + units).min(most),
                _ => {
                    if let Some(done) = pending.replace((start, units)) {
                        return Some(done);
                    }
                }
            }
        }
        pending.take()
    })
}
