//! The versions of policies that a limiter has met: a number for each (policy, quota) pair.
//!
//! A stored state names the version it was written under. So the limiter can convert the state of a policy whose
//! quota has changed, and can compare states when it has to make room for a key.
//!
//! A number is used again if no charge asked for it during a whole [phase](Versions::begin_phase) and no live state
//! has it. A phase lasts at least [`PHASE_US`], so that no thread still uses a number that it got before the phase.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::algorithm::{Decider, Layout, WordLayout};
use crate::policy::Policy;

use super::slot_table::{HELD_VERSION, VERSION_BITS};
use super::word::BLOCK_SHIFT;

/// The version of states whose policies have no number, because all 16,382 are in use. Such a state lies in the arena,
/// behind a head with the numbers of its quota.
pub(super) const UNNUMBERED: u16 = 0;

/// The number of versions that can be found without the lock.
const CACHED: usize = 1_024;

const NUMBERS: usize = 1 << VERSION_BITS;
const NUMBER_MASK: u64 = NUMBERS as u64 - 1;
/// If at least this number of versions are in use, the limiter looks for unused versions.
const CROWDED: usize = NUMBERS / 4 * 3;

/// The least time between two searches for numbers that no state needs.
pub(super) const PHASE_US: u64 = 10_000_000;

/// The form of the words of a version: the shift of a word's instant, and two flags in the bits above.
#[derive(Clone, Copy, Debug)]
pub(super) struct WordForm(u8);

impl WordForm {
    const PINNED: u8 = 1 << 6;
    const IN_ARENA: u8 = 1 << 7;

    /// The form of states that name no version.
    const UNNUMBERED: Self = Self(BLOCK_SHIFT as u8 | Self::IN_ARENA);

    /// The form of units that requests hold.
    const HELD: Self = Self(Self::PINNED);

    fn of(rules: &Decider) -> Self {
        let form = match rules.layout() {
            Layout::Word(layout) => layout.shift as u8, // at most 40
            Layout::Pair | Layout::Entries => Self::UNNUMBERED.0,
            Layout::Count => Self::HELD.0,
        };
        let is_pinned = matches!(rules, Decider::Pair(rules, _) if rules.is_pinned());
        Self(if is_pinned { form | Self::PINNED } else { form })
    }

    /// Returns the shift of the word's instant.
    #[inline]
    pub(super) fn shift(self) -> u32 {
        u32::from(self.0 & (Self::PINNED - 1))
    }

    /// Returns whether the state is in the arena; the word then names its first block.
    pub(super) fn in_arena(self) -> bool {
        self.0 & Self::IN_ARENA != 0
    }

    /// Returns whether the state is kept while it counts, however full the table is.
    pub(super) fn is_pinned(self) -> bool {
        self.0 & Self::PINNED != 0
    }
}

/// Returns the layout of a state of these rules and this version, if the state is a word.
#[inline]
pub(super) fn word_layout(rules: &Decider, version: u16) -> Option<WordLayout> {
    match rules {
        Decider::Pair(_, Layout::Word(layout)) if version != UNNUMBERED => Some(*layout),
        _ => None,
    }
}

/// The versions of policies that a limiter has met.
pub(super) struct Versions {
    /// Each element has the upper 50 bits of a version's fingerprint, and the version's number. The fingerprint's
    /// lower bits are the index.
    cache: Box<[AtomicU64; CACHED]>,
    known: RwLock<KnownPolicies>,
    /// The [`WordForm`] of each number.
    forms: Box<[AtomicU8]>,
    /// The phase in which each number was last asked for.
    asked: Box<[AtomicU32]>,
    /// True if most numbers are in use.
    crowded: AtomicBool,
}

#[derive(Default)]
pub(super) struct KnownPolicies {
    /// The policies by number. The policy with number 1 is at index 0.
    policies: Vec<Policy>,
    numbers: HashMap<u64, u16>,
    /// The numbers that can be used again.
    free: Vec<u16>,
    phase: u32,
}

impl KnownPolicies {
    /// Returns the policy and quota of a version.
    pub(super) fn policy(&self, version: u16) -> Option<&Policy> {
        self.policies.get(usize::from(version).checked_sub(1)?)
    }

    pub(super) fn in_use(&self) -> usize {
        self.policies.len() - self.free.len()
    }
}

impl Versions {
    pub(super) fn new() -> Self {
        let forms: Box<[AtomicU8]> = bytemuck::zeroed_slice_box(NUMBERS);
        forms[usize::from(UNNUMBERED)].store(WordForm::UNNUMBERED.0, Ordering::Relaxed);
        forms[usize::from(HELD_VERSION)].store(WordForm::HELD.0, Ordering::Relaxed);
        Self {
            cache: bytemuck::zeroed_box(),
            known: RwLock::default(),
            forms,
            asked: bytemuck::zeroed_slice_box(NUMBERS),
            crowded: AtomicBool::new(false),
        }
    }

    /// Returns the number of a policy's version, if the cache has it.
    #[inline]
    pub(super) fn cached(&self, policy: &Policy) -> Option<u16> {
        let fingerprint = policy.state_fingerprint();
        // `Acquire` pairs with the `Release` in `hand_out`, so a thread that gets a number here also sees the
        // number's form.
        let entry = self.cache[fingerprint as usize % CACHED].load(Ordering::Acquire);
        // An entry of 0 is empty, because no fingerprint is 0. `!NUMBER_MASK` excludes the bits of the number from the
        // comparison.
        if (entry ^ fingerprint) & !NUMBER_MASK == 0 { Some((entry & NUMBER_MASK) as u16) } else { None }
    }

    /// Returns whether it is time to search for numbers that no state needs.
    pub(super) fn is_crowded(&self) -> bool {
        self.crowded.load(Ordering::Relaxed) // only a hint
    }

    /// Returns the form of the words of this version.
    #[inline]
    pub(super) fn form(&self, version: u16) -> WordForm {
        // `Relaxed` suffices, because this thread got the version's number by an `Acquire` load, which comes before
        // this load (see `cached`).
        WordForm(self.forms[usize::from(version)].load(Ordering::Relaxed))
    }

    pub(super) fn known(&self) -> RwLockReadGuard<'_, KnownPolicies> {
        self.known.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn known_mut(&self) -> RwLockWriteGuard<'_, KnownPolicies> {
        self.known.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of a policy's version, and assigns a new number if there is none yet. Returns
    /// [`UNNUMBERED`] if no number is left.
    pub(super) fn look_up(&self, policy: &Policy) -> u16 {
        let fingerprint = policy.state_fingerprint();
        let known = self.known();
        if let Some(number) = known.numbers.get(&fingerprint) {
            self.hand_out(*number, fingerprint, &known);
            return *number;
        }
        // Checks this without the write lock, because each charge of a policy without a version gets here.
        let is_full = known.free.is_empty() && known.policies.len() + 1 >= usize::from(HELD_VERSION);
        drop(known);
        if is_full { UNNUMBERED } else { self.add(policy) }
    }

    /// Notes that a charge asked for a number, and enters the number in the cache. The caller holds the lock.
    fn hand_out(&self, number: u16, fingerprint: u64, known: &KnownPolicies) {
        self.asked[usize::from(number)].store(known.phase, Ordering::Relaxed); // read under the write lock
        let entry = fingerprint & !NUMBER_MASK | u64::from(number);
        self.cache[fingerprint as usize % CACHED].store(entry, Ordering::Release); // with the Acquire in `cached`
    }

    fn add(&self, policy: &Policy) -> u16 {
        let fingerprint = policy.state_fingerprint();
        let mut known = self.known_mut();
        let number = match known.numbers.get(&fingerprint) {
            Some(number) => *number,
            None => {
                let next = known.policies.len() + 1;
                let number = match known.free.pop() {
                    Some(number) => number,
                    None if next < usize::from(HELD_VERSION) => next as u16, // below 2^14
                    None => return UNNUMBERED,
                };
                let at = usize::from(number);
                self.forms[at].store(WordForm::of(policy.quota().decider()).0, Ordering::Relaxed);
                match known.policies.get_mut(at - 1) {
                    Some(former) => *former = policy.clone(),
                    None => known.policies.push(policy.clone()),
                }
                known.numbers.insert(fingerprint, number);
                self.crowded.store(known.in_use() >= CROWDED, Ordering::Relaxed);
                number
            }
        };
        self.hand_out(number, fingerprint, &known);
        number
    }

    /// Returns for each number whether it is in use, but was not asked for since the phase began.
    pub(super) fn idle(&self) -> Vec<Cell<bool>> {
        let known = self.known();
        let idle = vec![Cell::new(false); NUMBERS];
        known.numbers.values().for_each(|number| idle[usize::from(*number)].set(!self.is_asked(*number, known.phase)));
        idle
    }

    fn is_asked(&self, number: u16, phase: u32) -> bool {
        self.asked[usize::from(number)].load(Ordering::Relaxed) == phase
    }

    /// Frees the unused numbers, except those that a charge asked for since the walk began. The next phase then
    /// begins, in which each used policy asks for its number again.
    pub(super) fn begin_phase(&self, unused: &[Cell<bool>]) {
        let mut guard = self.known_mut();
        let known = &mut *guard;
        let (phase, free) = (known.phase, &mut known.free);
        known.numbers.retain(|_, number| {
            let is_needed = !unused[usize::from(*number)].get() || self.is_asked(*number, phase);
            if !is_needed {
                free.push(*number);
            }
            is_needed
        });
        known.phase = phase.wrapping_add(1);
        self.crowded.store(known.in_use() >= CROWDED, Ordering::Relaxed);
        self.cache.iter().for_each(|entry| entry.store(0, Ordering::Relaxed));
    }
}

#[cfg(all(test, not(ratelimit_loom)))]
mod tests {
    use super::*;
    use crate::quota::Quota;

    fn policy(limit: u64) -> Policy {
        Policy::new("p", Quota::per_hour(limit)).expect("it is a name")
    }

    #[test]
    fn number_that_is_asked_for_during_a_look_stays() {
        let versions = Versions::new();
        let [idle, asked] = [1, 2].map(policy);
        let number = [&idle, &asked].map(|policy| versions.look_up(policy))[1];
        versions.begin_phase(&versions.idle());
        let unused = versions.idle();
        assert_eq!(versions.look_up(&asked), number);
        versions.begin_phase(&unused);
        assert_eq!(versions.known().in_use(), 1);
        assert_eq!((versions.look_up(&asked), versions.known().policy(number)), (number, Some(&asked)));
    }

    #[test]
    fn policy_asks_for_its_number_again_in_each_phase() {
        let versions = Versions::new();
        let policy = policy(1);
        let number = versions.look_up(&policy);
        assert_eq!(versions.cached(&policy), Some(number));
        versions.begin_phase(&versions.idle());
        assert_eq!(versions.cached(&policy), None, "or the next phase takes its number for unused");
        assert_eq!((versions.look_up(&policy), versions.cached(&policy)), (number, Some(number)));
    }

    #[test]
    fn numbers_are_looked_for_only_while_most_are_in_use() {
        let versions = Versions::new();
        (1..CROWDED as u64).for_each(|limit| assert!(versions.look_up(&policy(limit)) != UNNUMBERED));
        assert!(!versions.is_crowded());
        versions.look_up(&policy(CROWDED as u64));
        assert!(versions.is_crowded());
        versions.begin_phase(&versions.idle());
        assert!(versions.is_crowded(), "all were asked for");
        versions.begin_phase(&versions.idle());
        assert!(!versions.is_crowded() && versions.known().in_use() == 0);
    }
}
