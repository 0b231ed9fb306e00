//! Takes and returns units that requests hold. If the key has its slot, the call waits for no lock. Otherwise
//! the [long way](States::charge_one) takes or returns the units.
//!
//! A key keeps its slot for a while after its last unit was returned, so that its next request takes the short way. The
//! slot's word is then an instant, like the word of an expired state. A thread that returns units does not read the
//! clock, so the instant is the latest second in which some key got a slot. If that second is long ago, a new key may
//! take the slot of a key that has just returned its units. A key that lost its slot in this way takes the long way
//! once.
//!
//! # Resets
//!
//! The limiter counts resets. A *run* begins with the first unit that a key holds
//! ([`HeldUnits`](super::word::HeldUnits)), and its number is the count at that time. A reset raises the count
//! before it locks the slot. A thread that begins a run reads the count before it reads the slot, and compares the
//! count again after it has locked the slot. So the number of a run differs from the numbers of all runs that were
//! reset earlier. A slot's word has room for the first 4,194,303 run numbers. The units of later runs are in the
//! [arena](super::entry_arena), and take the long way.
//!
//! # Lines
//!
//! While requests wait in line for a key, the long way decides: see [`LockedKey::is_held_back`]. A thread on the short
//! way reads under the slot's lock whether a request waits in line. A request in line asks on the long way, which locks
//! the slot, too. So no release is missed, see [`PlaceLines`](crate::limiter::PlaceLines).
//!
//! [`LockedKey::is_held_back`]: super::locked_key::LockedKey::is_held_back

use crate::algorithm::TakeMode;
use crate::algorithm::places::{Places, PlacesVerdict};
use crate::base::sync::Ordering;
use crate::decision::{ChargeDecision, Receipt};
use crate::key::Key;
use crate::limiter::{Charge, Effect};
use crate::policy::Policy;

use super::slot_table::{Fingerprint, HELD_VERSION, Seen};
use super::states::States;
use super::word::{HeldUnits, HeldWord};

impl States {
    /// Returns the number of a run that begins now.
    #[inline]
    pub(super) fn run(&self) -> u64 {
        // `Relaxed` suffices, because the slot's lock orders this load (see the module's documentation).
        self.resets.load(Ordering::Relaxed)
    }

    /// Takes units, if the key has its slot and no other thread changes the slot.
    #[inline(always)]
    pub(super) fn take_places(&self, rules: Places, charge: Charge<'_>) -> Option<ChargeDecision> {
        let run = self.run();
        let plan = self.plan_places(rules, charge, run)?;
        let is_taken = plan.word == plan.seen.word || self.replace_places(plan.seen, plan.word, run);
        is_taken.then(|| rules.describe(plan.verdict, plan.run))
    }

    /// Decides about a charge of units, if the key has its slot. The caller has read `run` before this method reads the
    /// slot.
    #[inline(always)]
    pub(super) fn plan_places(&self, rules: Places, charge: Charge<'_>, run: u64) -> Option<PlacesPlan<'_>> {
        let key = self.fingerprint_of_held(charge.policy, charge.key);
        if !self.place_lines.has_no_line(key.bits()) {
            return None;
        }
        let how = match charge.effect {
            Effect::Enforce | Effect::Observe => TakeMode::IfAllowed,
            Effect::Force => TakeMode::Force,
            Effect::OnRefusal { .. } => return None,
        };
        let (seen, held) = self.look_at_places(key)?;
        let (verdict, after) = look(rules, held, run, (charge.cost, how), false);
        let word = if verdict.taken() == 0 { seen.word } else { after.pack()? };
        Some(PlacesPlan { seen, verdict, run: after.run, word })
    }

    /// Refunds the units that a receipt still holds, and wakes the first request that waits for units of the
    /// key.
    #[inline(always)]
    pub(super) fn release(&self, policy: &Policy, key: &Key, receipt: &Receipt) {
        let held = self.fingerprint_of_held(policy, key);
        self.release_units(held, policy, key, receipt);
        // Reads the counter after the slot was unlocked, so that no request is missed (see `PlaceLines`).
        if !self.place_lines.has_no_line(held.bits()) {
            self.place_lines.wake_first_of(policy, key);
        }
    }

    #[inline(always)]
    fn release_units(&self, fingerprint: Fingerprint, policy: &Policy, key: &Key, receipt: &Receipt) {
        if let Some((seen, held)) = self.look_at_places(fingerprint) {
            let Some(after) = held.and_then(|held| without(held, receipt.units(), receipt.at_us())) else { return };
            let word = if after.units > 0 { after.pack() } else { Some(self.returned_word()) };
            if word.is_some_and(|word| seen.replace(word)) {
                return;
            }
        }
        self.refund_once(policy, key, receipt);
    }

    /// Returns the word of a key without held units.
    #[inline]
    fn returned_word(&self) -> u64 {
        HeldUnits::returned(u64::from(self.claimed_s.load(Ordering::Relaxed)) * 1_000_000) // only a hint
    }

    /// Returns the slot of a key, and the held units in its word. Returns `None` if the key has no slot, or if its
    /// units are in the arena.
    #[inline(always)]
    fn look_at_places(&self, key: Fingerprint) -> Option<(Seen<'_>, Option<HeldUnits>)> {
        let line = self.table.prefetch(key)?;
        let seen = self.table.look(&line, key, HELD_VERSION)?;
        match HeldWord::of(seen.word) {
            HeldWord::Nothing => Some((seen, None)),
            HeldWord::Units(held) => Some((seen, Some(held))),
            HeldWord::InArena(_) => None,
        }
    }

    /// Replaces the word that was seen, if the slot still has that word and `is_run_without_lines` returns
    /// `true`.
    #[inline]
    fn replace_places(&self, seen: Seen<'_>, word: u64, run: u64) -> bool {
        if !seen.try_lock() {
            return false;
        }
        let is_same = self.is_run_without_lines(run, [seen]);
        seen.slot.set_word(if is_same { word } else { seen.word });
        is_same
    }

    /// Returns `false` if a key was reset since the number of `run` was read, or if a request waits in a line of the
    /// keys of these slots. The slots must be locked.
    #[inline]
    pub(super) fn is_run_without_lines<'a>(&self, run: u64, slots: impl IntoIterator<Item = Seen<'a>>) -> bool {
        // The first bits of a tag are those of the key's hash.
        self.run() == run && slots.into_iter().all(|seen| self.place_lines.has_no_line(seen.tag))
    }
}

/// A charge of units that is decided but not yet written.
pub(super) struct PlacesPlan<'a> {
    pub(super) seen: Seen<'a>,
    pub(super) verdict: PlacesVerdict,
    /// The run that the units belong to.
    pub(super) run: u64,
    /// The word to write.
    pub(super) word: u64,
}

/// Decides about a charge without taking it. Returns the held units after the charge. `run` is the number of a run that
/// would begin now. `is_held_back` is true if an earlier request waits in line.
#[inline]
pub(super) fn look(
    rules: Places,
    held: Option<HeldUnits>,
    run: u64,
    (cost, how): (u64, TakeMode),
    is_held_back: bool,
) -> (PlacesVerdict, HeldUnits) {
    let held = held.unwrap_or(HeldUnits { units: 0, run });
    let verdict = match is_held_back {
        true => rules.hold_back(held.units, cost, how),
        false => rules.look(held.units, cost, how),
    };
    (verdict, HeldUnits { units: held.units + verdict.taken(), ..held })
}

/// Returns how many units are held after a refund of `units`, which were taken in `run`. Returns `None` if that run
/// is over.
#[inline]
pub(super) fn without(held: HeldUnits, units: u64, run: u64) -> Option<HeldUnits> {
    (held.run == run).then(|| HeldUnits { units: held.units.saturating_sub(units), ..held })
}

#[cfg(all(test, not(ratelimit_loom), not(ratelimit_shuttle)))]
mod tests {
    use std::task::{Context, Waker};

    use super::*;
    use crate::clock::ManualClock;
    use crate::limiter::memory::word::RUN_BITS;
    use crate::{MemoryLimiter, Quota};

    fn bench(limit: u64) -> (MemoryLimiter, Policy, Key) {
        let limiter = MemoryLimiter::builder().max_keys(100).clock(ManualClock::new()).build().unwrap();
        (limiter, Policy::new("places", Quota::concurrent(limit)).unwrap(), Key::global())
    }

    /// Among so many keys, several share each counter of the lines.
    fn many_keys() -> Vec<Key> {
        (0..1_000_u32).map(|key| Key::of(key).unwrap()).collect()
    }

    #[test]
    fn waiter_holds_back_its_own_key_only() {
        let limiter = MemoryLimiter::builder().max_keys(10_000).clock(ManualClock::new()).build().unwrap();
        let (policy, keys) = (Policy::new("places", Quota::concurrent(2)).unwrap(), many_keys());
        let held: Vec<_> = keys.iter().map(|key| limiter.hold(&policy, key, 1).unwrap()).collect();
        let mut turns: Vec<_> = keys.iter().map(|key| Some(limiter.0.place_lines.join(&policy, key, None))).collect();
        for ((key, turn), place) in keys.iter().zip(&mut turns).zip(held) {
            assert!(limiter.hold(&policy, key, 1).is_err(), "an earlier request waits");
            let is_called = || {
                let mut context = Context::from_waker(Waker::noop());
                turn.as_ref().is_some_and(|turn| turn.poll(&mut context).is_ready())
            };
            assert!(is_called() && !is_called(), "it asks when it has joined");
            drop(place);
            assert!(is_called(), "the release wakes it");
            *turn = None;
            assert!(limiter.hold(&policy, key, 2).is_ok(), "only requests for other keys wait");
        }
        assert!(limiter.0.place_lines.is_empty());
    }

    #[test]
    fn one_waiter_leaves_most_keys_on_the_short_way() {
        let (limiter, policy, waiting) = bench(2);
        let takes_short_way = |key: &Key| {
            let held = limiter.0.fingerprint_of_held(&policy, key);
            limiter.0.place_lines.has_no_line(held.bits())
        };
        assert!(many_keys().iter().all(takes_short_way));
        let _turn = limiter.0.place_lines.join(&policy, &waiting, None);
        assert!(!takes_short_way(&waiting));
        let on_long_way = many_keys().iter().filter(|key| !takes_short_way(key)).count();
        assert!(on_long_way < 40, "{on_long_way} of 1,000"); // about 4
    }

    #[test]
    fn receipt_of_any_age_returns_nothing_of_a_later_run() {
        for resets in [1, (1 << RUN_BITS) - 2, (1 << RUN_BITS) - 1, 1 << RUN_BITS, 3 << RUN_BITS, u64::MAX - 9] {
            let (limiter, policy, key) = bench(5);
            let left = || limiter.peek_one(&policy, &key, 0).remaining();
            let hold = |cost| limiter.hold(&policy, &key, cost).unwrap();
            let old = hold(5);
            limiter.reset_now(&policy, &key);
            limiter.0.resets.store(resets, Ordering::Relaxed);
            let (two, one) = (hold(2), hold(1));
            assert!(limiter.hold(&policy, &key, 3).is_err(), "after {resets} resets");
            drop(old);
            assert_eq!(left(), 2, "after {resets} resets");
            let other = Key::of("other").unwrap();
            limiter.reset_now(&policy, &other);
            drop(two);
            assert_eq!(left(), 4, "after {resets} resets and that of another key");
            drop(one);
            assert_eq!(left(), 5, "after {resets} resets");
            let held = [hold(5)];
            limiter.reset_now(&policy, &key);
            let later = hold(3);
            drop(held);
            assert_eq!(left(), 2, "after {resets} resets and one more");
            drop(later);
            assert_eq!(left(), 5);
        }
    }

    #[test]
    fn late_runs_free_their_blocks_and_are_never_forgotten() {
        let (limiter, policy, _) = bench(2);
        limiter.0.resets.store(1 << 50, Ordering::Relaxed);
        let keys: Vec<Key> = (0..40_u32).map(|key| Key::of(key).unwrap()).collect();
        for round in 0..200 {
            let held: Vec<_> = keys.iter().map(|key| limiter.hold(&policy, key, 2).expect("two are free")).collect();
            assert!(keys.iter().all(|key| limiter.hold(&policy, key, 1).is_err()), "round {round}");
            if round % 2 == 1 {
                keys.iter().for_each(|key| limiter.reset_now(&policy, key));
            }
            drop(held);
        }
        assert!(keys.iter().all(|key| limiter.peek_one(&policy, key, 0).remaining() == 2));
    }
}
