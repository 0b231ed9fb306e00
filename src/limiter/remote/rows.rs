//! The units of a concurrency limit that each process holds, and the processes whose requests wait in line for such
//! units. In Redis, `places.lua` does what this file does.
//!
//! The calls carry [claims](super::holdings).

use super::backend::ROW_MISSING;
use super::holdings::{Claim, CurrentRow};
use super::options::PLACES_LAPSE_MAX;
use crate::algorithm::TakeMode;
use crate::algorithm::places::{HELD_MAX, Places};
use crate::base::time::micros_floor;
use crate::decision::{ChargeDecision, Receipt};
use crate::limiter::{FirstInLine, Standing};

/// The maximum number of processes that can hold units of a key. [`LINE_MAX`] is the maximum number of
/// processes that can have requests in line for units of a key.
pub(crate) const HOLDERS_MAX: usize = 256;
pub(crate) const LINE_MAX: usize = 128;

/// The longest time after which a row lapses.
const LONGEST_US: u64 = PLACES_LAPSE_MAX.as_micros() as u64; // a day

/// The rows of a key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct KeyRows {
    pub(crate) held: Vec<HeldRow>,
    pub(crate) line: Vec<HolderInLine>,
}

/// The units that a process holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeldRow {
    pub(crate) holder: u64,
    pub(crate) row: CurrentRow,
    pub(crate) units: u64,
    pub(crate) lapses: u64,
}

/// The first request of a process that waits in line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HolderInLine {
    pub(crate) holder: u64,
    /// The number of the request in its process.
    pub(crate) number: u32,
    /// The instant since which the request waits.
    pub(crate) since: u64,
    pub(crate) cost: u64,
    pub(crate) lapses: u64,
}

/// A charge that was decided.
pub(crate) struct DecidedRows {
    /// The decision, whose receipt says whether the process had no row.
    pub(crate) decision: ChargeDecision,
    /// The rows to write if the units are taken.
    pub(crate) if_taken: Option<KeyRows>,
    /// The rows to write if the units are not taken.
    pub(crate) otherwise: Option<KeyRows>,
}

/// The row of a process, compared with a claim of that process.
struct Met {
    /// The index of the row.
    at: Option<usize>,
    /// The units that the process holds now.
    units: u64,
    /// The units that all other processes hold.
    others: u64,
    /// True if the claim differs from the row. The row is then written even if no units are taken.
    is_moved: bool,
}

impl KeyRows {
    /// Returns the row of the claim's process if the row refuses the call, because the row is of a later epoch or was
    /// reset.
    pub(crate) fn refuses(&self, claim: &Claim, now: u64) -> Option<CurrentRow> {
        let own = self.held.iter().find(|held| held.holder == claim.holder && held.lapses > now)?;
        let known = CurrentRow { resets: claim.resets, epoch: claim.epoch };
        ((own.row.resets, own.row.epoch) > (known.resets, known.epoch)).then_some(own.row)
    }

    /// Decides a charge. With `peeks`, no units are taken even if the charge is allowed.
    pub(crate) fn charge(
        &self,
        places: Places,
        claim: &Claim,
        (cost, how): (u64, TakeMode),
        peeks: bool,
        now: u64,
    ) -> DecidedRows {
        let rows = self.at(now);
        let mut met = rows.meet(claim);
        if let (true, Some(at)) = (peeks, met.at) {
            met.units = rows.held[at].units;
        }
        let sum = met.others.saturating_add(met.units);
        let waits = match claim.standing {
            Standing::First(first) => Some(first).filter(|first| first.asks_within.as_millis() > 0),
            Standing::Newcomer | Standing::HeldBack | Standing::Left => None,
        };
        let since = waits.map(|first| rows.since(claim.holder, first, now));
        let own_since = since.unwrap_or(now.saturating_add(1)); // one that does not wait comes after all that do
        let ahead = rows.line.iter().filter(|one| one.holder != claim.holder && one.since < own_since);
        let kept = ahead.fold(sum, |kept, one| kept.saturating_add(one.cost));
        let (_, is_forced) = how.plainly(cost);
        let shown = if is_forced {
            sum
        } else if claim.standing == Standing::HeldBack {
            sum.max(places.limit())
        } else {
            sum.max(kept.min(places.limit()))
        };

        let verdict = places.look(shown, cost, how);
        let (mut decision, mut taken) = (places.describe(verdict, 0), verdict.taken());
        if met.at.is_none() && taken > 0 && rows.held.len() >= HOLDERS_MAX {
            (decision, taken) = (places.decide_without_room(shown, how), 0);
        }
        taken = taken.min(HELD_MAX.saturating_sub(sum));
        let missing = if met.at.is_none() { ROW_MISSING } else { 0 };
        let is_allowed = decision.is_allowed();
        decision.put_receipt(Receipt::new(taken, missing, 0));

        let without = |mut rows: Self| {
            rows.line.retain(|one| waits.is_none() || one.holder != claim.holder);
            rows
        };
        let if_taken = is_allowed && (taken > 0 || met.is_moved);
        let if_taken =
            if_taken.then(|| without(rows.clone()).written(&met, claim, met.units.saturating_add(taken), now));
        let mut left = rows;
        let mut is_moved = met.is_moved;
        if let (Some(first), Some(since), false) = (waits, since, is_allowed) {
            let mut others = without(left.clone());
            if others.line.len() < LINE_MAX {
                let lapses = now.saturating_add(first.asks_within.as_millis() as u64 * 1_000); // at most some minutes
                others.line.push(HolderInLine { holder: claim.holder, number: first.number, since, cost, lapses });
                (left, is_moved) = (others, true);
            }
        }
        let otherwise = is_moved.then(|| left.written(&met, claim, met.units, now));
        DecidedRows { decision, if_taken, otherwise }
    }

    /// Returns units to the rows, or renews the row of the process. Returns the rows to write, and `true` if there was
    /// no row although the process held units.
    pub(crate) fn return_units(&self, claim: &Claim, units: u64, now: u64) -> (Self, bool) {
        let mut rows = self.at(now);
        let met = rows.meet(claim);
        let is_missing = met.at.is_none() && (claim.base > 0 || units > 0);
        if claim.standing == Standing::Left {
            rows.line.retain(|one| one.holder != claim.holder);
        }
        (rows.written(&met, claim, met.units.saturating_sub(units), now), is_missing)
    }

    /// Returns the rows after a reset. The rows stay until they lapse, and count the reset, so that earlier calls and
    /// places are recognised. Requests in line stay.
    pub(crate) fn reset(&self, now: u64) -> Self {
        let mut rows = self.at(now);
        for held in &mut rows.held {
            (held.units, held.row.resets) = (0, held.row.resets.wrapping_add(1));
        }
        rows
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.held.is_empty() && self.line.is_empty()
    }

    /// Returns the instant at which the last row lapses.
    pub(crate) fn lapse(&self) -> u64 {
        let held = self.held.iter().map(|held| held.lapses);
        held.chain(self.line.iter().map(|one| one.lapses)).max().unwrap_or(0)
    }

    /// Returns the rows that have not lapsed. If the clock stepped back, each of these rows lapses after
    /// [`LONGEST_US`] at the latest.
    fn at(&self, now: u64) -> Self {
        let mut rows = self.clone();
        let latest = now.saturating_add(LONGEST_US);
        rows.held.retain(|held| held.lapses > now);
        rows.line.retain(|one| one.lapses > now);
        rows.held.iter_mut().for_each(|held| held.lapses = held.lapses.min(latest));
        rows.line.iter_mut().for_each(|one| one.lapses = one.lapses.min(latest));
        rows
    }

    fn meet(&self, claim: &Claim) -> Met {
        let at = self.held.iter().position(|held| held.holder == claim.holder);
        let own = at.map(|at| self.held[at]);
        let others = self.held.iter().filter(|held| held.holder != claim.holder);
        let others = others.fold(0_u64, |sum, held| sum.saturating_add(held.units));
        let claimed = CurrentRow { resets: claim.resets, epoch: claim.epoch };
        let is_moved = own.map_or(claim.base > 0 || claim.keeps_row, |own| own.row != claimed);
        let units = own.filter(|_| !is_moved).map_or(claim.base, |own| own.units);
        Met { at, units, others, is_moved }
    }

    /// Returns the instant since which the first request of a process waits. Only the process's first report of the
    /// request sets this instant.
    fn since(&self, holder: u64, first: FirstInLine, now: u64) -> u64 {
        let own = self.line.iter().find(|one| one.holder == holder && one.number == first.number);
        own.map_or_else(|| now.saturating_sub(micros_floor(first.waited)), |own| own.since)
    }

    /// Writes the row of a process. A row without units is removed, unless the claim keeps the row or has a base.
    /// Without the row, a later call with the claim's epoch would count the base as held again.
    fn written(mut self, met: &Met, claim: &Claim, units: u64, now: u64) -> Self {
        let row = CurrentRow { resets: claim.resets, epoch: claim.epoch };
        let new = HeldRow { holder: claim.holder, row, units, lapses: now.saturating_add(claim.lapse_us) };
        match (met.at, units > 0 || claim.keeps_row || claim.base > 0) {
            (Some(at), true) => self.held[at] = new,
            (Some(at), false) => drop(self.held.remove(at)),
            (None, true) if self.held.len() < HOLDERS_MAX => self.held.push(new),
            (None, _) => {}
        }
        self
    }
}
