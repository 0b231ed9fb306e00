//! The versions of policies that a limiter has met: a number for each (policy, quota).
//!
//! A stored state names the version it was written under. So a state whose policy has another quota now is recognised and
//! converted, and a stranger's state can be judged when room must be made.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use crate::algorithm::{Layout, PairRules, Rules, WordLayout};
use crate::policy::Policy;

use super::words::VERSION_BITS;

/// The version of states that name none: of policies beyond the 16,383rd.
pub(super) const UNNAMED: u16 = 0;

/// Versions that are found without the lock.
const CACHED: usize = 1_024;

const NUMBERS: usize = 1 << VERSION_BITS;
const NUMBER_MASK: u64 = NUMBERS as u64 - 1;

/// The versions of policies that a limiter has met.
pub(super) struct Registry {
    /// The upper 50 bits of a version's fingerprint, and its number; at the place that the fingerprint's lower bits name.
    cache: Box<[AtomicU64; CACHED]>,
    versions: RwLock<Versions>,
    /// For each version in words the [shift](WordLayout::shift) of its layout: enough to tell what has expired.
    shifts: Box<[AtomicU8]>,
    /// Some policy has states both in words and elsewhere, so that who misses in one place has to look in the other.
    mixed: AtomicBool,
}

#[derive(Default)]
pub(super) struct Versions {
    /// Number 1 is at index 0.
    policies: Vec<Policy>,
    numbers: HashMap<u64, u16>,
    /// For each policy's name, whether it has versions in words, and elsewhere.
    places: HashMap<u64, (bool, bool)>,
}

impl Versions {
    /// The policy and quota of a version.
    pub(super) fn policy(&self, version: u16) -> Option<&Policy> {
        self.policies.get(usize::from(version).checked_sub(1)?)
    }

    /// The rules of a version whose states are words.
    pub(super) fn word_rules(&self, version: u16) -> Option<(&PairRules, &WordLayout)> {
        match self.policy(version)?.quota().rules() {
            Rules::Pair(rules, Layout::Word(layout)) => Some((rules, layout)),
            _ => None,
        }
    }

    /// All versions, in the order of their numbers.
    pub(super) fn policies(&self) -> &[Policy] {
        &self.policies
    }
}

impl Registry {
    pub(super) fn new() -> Self {
        Self {
            cache: bytemuck::zeroed_box(),
            versions: RwLock::default(),
            shifts: bytemuck::zeroed_slice_box(NUMBERS),
            mixed: AtomicBool::new(false),
        }
    }

    /// The number of a policy's version.
    #[inline]
    pub(super) fn version(&self, policy: &Policy) -> u16 {
        let fingerprint = policy.fingerprint();
        // Acquire, with the Release in `look_up`: who gets a number from here also sees its shift.
        let entry = self.cache[fingerprint as usize % CACHED].load(Ordering::Acquire);
        if (entry ^ fingerprint) & !NUMBER_MASK == 0 && entry & NUMBER_MASK != 0 {
            return (entry & NUMBER_MASK) as u16; // masked
        }
        self.look_up(policy)
    }

    /// Whether a state of a policy may lie elsewhere than its quota says.
    #[inline]
    pub(super) fn is_mixed(&self) -> bool {
        // Acquire, with the Release in `add`. It is asked under the key's stripe, and set before the stripe is taken for
        // the first state in the other place: whoever comes after that sees it.
        self.mixed.load(Ordering::Acquire)
    }

    /// The layout's shift of a version whose states are words.
    #[inline]
    pub(super) fn shift(&self, version: u16) -> u32 {
        // Relaxed: whoever has a version's number got it from an Acquire that ordered this, see `version`.
        self.shifts.get(usize::from(version)).map_or(0, |shift| u32::from(shift.load(Ordering::Relaxed)))
    }

    pub(super) fn versions(&self) -> RwLockReadGuard<'_, Versions> {
        self.versions.read().unwrap_or_else(PoisonError::into_inner)
    }

    #[cold]
    fn look_up(&self, policy: &Policy) -> u16 {
        let fingerprint = policy.fingerprint();
        let versions = self.versions();
        let known = match versions.numbers.get(&fingerprint) {
            // Not under the other lock: policies without a version are asked for at every charge.
            None if versions.policies.len() + 1 >= NUMBERS => Some(UNNAMED),
            number => number.copied(),
        };
        drop(versions);
        let number = known.unwrap_or_else(|| self.add(policy));
        if number != UNNAMED {
            let entry = fingerprint & !NUMBER_MASK | u64::from(number);
            self.cache[fingerprint as usize % CACHED].store(entry, Ordering::Release);
        }
        number
    }

    fn add(&self, policy: &Policy) -> u16 {
        let mut versions = self.versions.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(number) = versions.numbers.get(&policy.fingerprint()) {
            return *number;
        }
        let number = versions.policies.len() + 1;
        if number >= NUMBERS {
            return UNNAMED;
        }
        let number = number as u16; // below 2^14
        let in_words = match policy.quota().rules().layout() {
            Layout::Word(layout) => {
                self.shifts[usize::from(number)].store(layout.shift as u8, Ordering::Relaxed); // at most 40
                true
            }
            Layout::Pair | Layout::Trail => false,
        };
        let places = versions.places.entry(policy.name_fingerprint()).or_default();
        if in_words {
            places.0 = true;
        } else {
            places.1 = true;
        }
        if *places == (true, true) {
            self.mixed.store(true, Ordering::Release);
        }
        versions.policies.push(policy.clone());
        versions.numbers.insert(policy.fingerprint(), number);
        number
    }
}
