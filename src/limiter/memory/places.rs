//! Units that requests hold: taken and returned without waiting for a lock, if the key has its slot. Otherwise the
//! [long way](Store::charge_one) does it.
//!
//! A key keeps its slot for a while after its last unit was returned, so that its next request takes the short way: the
//! slot's word is then an instant, like that of a state that has expired. It is the second in which a key got a slot
//! last, so that no return reads the clock. If that is long ago, a new key may take the slot of a key that returned its
//! units just now, which then takes the long way once.
//!
//! # Resets
//!
//! The number of a run is the number of resets before it began. A reset raises that number before it locks the slot. A
//! thread that begins a run reads it before the slot, and compares it again when it has locked the slot. So a run has
//! another number than those that were reset before it. The numbers wrap after 4,194,304 resets: a receipt that old may
//! return units of another request.
//!
//! # Lines
//!
//! While requests wait in line for a key, the long way decides: see [`Hold::is_held_back`]. Whether any waits is read
//! under the slot's lock, and a request that waits asks in the long way. So no release is missed, see
//! [`PlaceLines`](crate::limiter::PlaceLines).
//!
//! [`Hold::is_held_back`]: super::state::Hold::is_held_back

use crate::algorithm::How;
use crate::algorithm::places::{Places, Verdict};
use crate::decision::{ChargeDecision, Receipt};
use crate::key::Key;
use crate::limiter::{Charge, Effect};
use crate::policy::Policy;
use crate::sync::Ordering;

use super::slot_table::{Fingerprint, HELD_VERSION, Seen};
use super::store::Store;
use super::word::HeldUnits;

impl Store {
    /// Returns the number of a run that begins now.
    #[inline]
    pub(super) fn run(&self) -> u64 {
        // Relaxed: the slot's lock orders it, see the module's documentation.
        HeldUnits::run_after(self.resets.load(Ordering::Relaxed))
    }

    /// Takes units, if the key has its slot and no other thread changes it.
    #[inline(always)]
    pub(super) fn take_places(&self, rules: Places, charge: Charge<'_>) -> Option<ChargeDecision> {
        let run = self.run();
        let plan = self.plan_places(rules, charge, run)?;
        let is_taken = plan.word == plan.seen.word || self.replace_places(plan.seen, plan.word, run, &charge);
        is_taken.then(|| rules.describe(plan.verdict, plan.run))
    }

    /// Decides about units, if the key has its slot. `run` was read before.
    #[inline(always)]
    pub(super) fn plan_places(&self, rules: Places, charge: Charge<'_>, run: u64) -> Option<PlacesPlan<'_>> {
        if !self.place_lines.has_no_line(charge.policy, charge.key) {
            return None;
        }
        let how = match charge.effect {
            Effect::Enforce | Effect::Observe => How::IfAllowed,
            Effect::Force => How::Force,
            Effect::OnRefusal { .. } => return None,
        };
        let seen = self.look_at_places(self.fingerprint_of_held(charge.policy, charge.key))?;
        let (verdict, after) = look(rules, HeldUnits::unpack(seen.word), run, (charge.cost, how), false);
        let word = if verdict.taken() == 0 { seen.word } else { after.pack() };
        Some(PlacesPlan { seen, verdict, run: after.run, word })
    }

    /// Returns what a receipt still holds, and wakes the first request that waits for it.
    #[inline(always)]
    pub(super) fn release(&self, policy: &Policy, key: &Key, receipt: &Receipt) {
        self.release_units(policy, key, receipt);
        self.place_lines.wake_first(policy, key);
    }

    #[inline(always)]
    fn release_units(&self, policy: &Policy, key: &Key, receipt: &Receipt) {
        if let Some(seen) = self.look_at_places(self.fingerprint_of_held(policy, key)) {
            let after = HeldUnits::unpack(seen.word).and_then(|held| without(held, receipt.units(), receipt.at_us()));
            let word = after.map(|after| if after.units > 0 { after.pack() } else { self.returned_word() });
            if word.is_none_or(|word| seen.replace(word)) {
                return;
            }
        }
        self.refund_once(policy, key, receipt);
    }

    /// Returns the word of a key of which nothing is held any more.
    #[inline]
    fn returned_word(&self) -> u64 {
        HeldUnits::returned(u64::from(self.claimed_s.load(Ordering::Relaxed)) * 1_000_000) // only a hint
    }

    #[inline(always)]
    fn look_at_places(&self, key: Fingerprint) -> Option<Seen<'_>> {
        let line = self.table.prefetch(key)?;
        self.table.look(&line, key, HELD_VERSION)
    }

    /// Replaces what was seen, if it is still the same, and if nothing has come between, see `is_run_without_lines`.
    #[inline]
    fn replace_places(&self, seen: Seen<'_>, word: u64, run: u64, charge: &Charge<'_>) -> bool {
        if !seen.try_lock() {
            return false;
        }
        let is_same = self.is_run_without_lines(run, std::slice::from_ref(charge));
        seen.place.set_word(if is_same { word } else { seen.word });
        is_same
    }

    /// Returns whether no key was reset since the number of `run` was read, and no request waits in the lines of these
    /// charges. The slots must be locked.
    #[inline]
    pub(super) fn is_run_without_lines(&self, run: u64, charges: &[Charge<'_>]) -> bool {
        self.run() == run && charges.iter().all(|charge| self.place_lines.has_no_line(charge.policy, charge.key))
    }
}

/// A charge of units that is decided on, and not written.
pub(super) struct PlacesPlan<'a> {
    pub(super) seen: Seen<'a>,
    pub(super) verdict: Verdict,
    /// The run that the units belong to.
    pub(super) run: u64,
    /// The word to write.
    pub(super) word: u64,
}

/// Looks what becomes of a charge. Returns what is held after it. `run` is the number of a run that would begin now.
/// `is_held_back` if a request that came before waits in line.
#[inline]
pub(super) fn look(
    rules: Places,
    held: Option<HeldUnits>,
    run: u64,
    (cost, how): (u64, How),
    is_held_back: bool,
) -> (Verdict, HeldUnits) {
    let held = held.unwrap_or(HeldUnits { units: 0, run });
    let verdict = match is_held_back {
        true => rules.hold_back(held.units, cost, how),
        false => rules.look(held.units, cost, how),
    };
    (verdict, HeldUnits { units: held.units + verdict.taken(), ..held })
}

/// Returns what is held when `units` that were taken in the run `run` are returned, or `None` if that run is over.
#[inline]
pub(super) fn without(held: HeldUnits, units: u64, run: u64) -> Option<HeldUnits> {
    (held.run == run).then(|| HeldUnits { units: held.units.saturating_sub(units), ..held })
}
