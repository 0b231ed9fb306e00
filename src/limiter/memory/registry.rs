//! The versions of policies that a limiter has met: a number for each (policy, quota).
//!
//! A stored state names the version it was written under. So a state whose policy has another quota now is recognised and
//! converted, and a stranger's state can be judged when room must be made.
//!
//! A number is used again when it was not asked for during a whole [phase](Registry::begin_phase) and no live state has it.
//! Phases are [`PHASE_US`] long, so that no thread still holds a number that it was given before.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::algorithm::{Layout, PairRules, Rules, WordLayout};
use crate::policy::Policy;

use super::words::VERSION_BITS;

/// The version of states that name none: of policies that found all 16,383 numbers in use.
pub(super) const UNNAMED: u16 = 0;

/// Versions that are found without the lock.
const CACHED: usize = 1_024;

const NUMBERS: usize = 1 << VERSION_BITS;
/// From this number of versions in use on, the limiter looks for unused ones.
const CROWDED: usize = NUMBERS / 4 * 3;

/// The least time between two looks for numbers that nobody needs.
pub(super) const PHASE_US: u64 = 10_000_000;
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
    /// For each number the phase in which it was asked for last.
    asked: Box<[AtomicU32]>,
    /// Most numbers are in use.
    crowded: AtomicBool,
}

/// A set of version numbers.
pub(super) struct Numbers(Box<[bool]>);

impl Numbers {
    pub(super) fn new() -> Self {
        Self(vec![false; NUMBERS].into_boxed_slice())
    }

    pub(super) fn contains(&self, number: u16) -> bool {
        self.0.get(usize::from(number)).is_some_and(|is_in| *is_in)
    }

    pub(super) fn insert(&mut self, number: u16) {
        if let Some(is_in) = self.0.get_mut(usize::from(number)) {
            *is_in = true;
        }
    }

    pub(super) fn remove(&mut self, number: u16) {
        if let Some(is_in) = self.0.get_mut(usize::from(number)) {
            *is_in = false;
        }
    }
}

#[derive(Default)]
pub(super) struct Versions {
    /// Number 1 is at index 0.
    policies: Vec<Policy>,
    numbers: HashMap<u64, u16>,
    /// For each policy's name, whether it has versions in words, and elsewhere.
    places: HashMap<u64, (bool, bool)>,
    /// Numbers to use again.
    free: Vec<u16>,
    phase: u32,
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

    fn in_use(&self) -> usize {
        self.policies.len() - self.free.len()
    }

    /// Notes where a policy's states are, and returns whether those of its name are in both places.
    fn note_place(&mut self, policy: &Policy) -> bool {
        let places = self.places.entry(policy.name_fingerprint()).or_default();
        match policy.quota().rules().layout() {
            Layout::Word(_) => places.0 = true,
            Layout::Pair | Layout::Trail => places.1 = true,
        }
        *places == (true, true)
    }
}

impl Registry {
    pub(super) fn new() -> Self {
        Self {
            cache: bytemuck::zeroed_box(),
            versions: RwLock::default(),
            shifts: bytemuck::zeroed_slice_box(NUMBERS),
            mixed: AtomicBool::new(false),
            asked: bytemuck::zeroed_slice_box(NUMBERS),
            crowded: AtomicBool::new(false),
        }
    }

    /// The number of a policy's version, if it is found at once.
    #[inline]
    pub(super) fn cached(&self, policy: &Policy) -> Option<u16> {
        let fingerprint = policy.state_fingerprint();
        // Acquire, with the Release in `look_up`: who gets a number from here also sees its shift.
        let entry = self.cache[fingerprint as usize % CACHED].load(Ordering::Acquire);
        if (entry ^ fingerprint) & !NUMBER_MASK == 0 && entry & NUMBER_MASK != 0 {
            return Some((entry & NUMBER_MASK) as u16); // masked
        }
        None
    }

    /// Whether it is time to look for numbers that nobody needs.
    pub(super) fn is_crowded(&self) -> bool {
        self.crowded.load(Ordering::Relaxed) // only a hint
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

    /// The number of a policy's version, a new one if need be; [`UNNAMED`] if there is none left.
    pub(super) fn look_up(&self, policy: &Policy) -> u16 {
        let fingerprint = policy.state_fingerprint();
        let versions = self.versions();
        if let Some(number) = versions.numbers.get(&fingerprint) {
            self.hand_out(*number, fingerprint, &versions);
            return *number;
        }
        // Not under the other lock: policies without a version are asked for at every charge.
        let is_full = versions.free.is_empty() && versions.policies.len() + 1 >= NUMBERS;
        drop(versions);
        if is_full { UNNAMED } else { self.add(policy) }
    }

    /// Under the lock of the versions: notes that a number is needed, and where to find it.
    fn hand_out(&self, number: u16, fingerprint: u64, versions: &Versions) {
        if let Some(asked) = self.asked.get(usize::from(number)) {
            asked.store(versions.phase, Ordering::Relaxed); // read under the other lock
        }
        let entry = fingerprint & !NUMBER_MASK | u64::from(number);
        self.cache[fingerprint as usize % CACHED].store(entry, Ordering::Release);
    }

    fn versions_mut(&self) -> RwLockWriteGuard<'_, Versions> {
        self.versions.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, policy: &Policy) -> u16 {
        let fingerprint = policy.state_fingerprint();
        let mut versions = self.versions_mut();
        let number = match versions.numbers.get(&fingerprint) {
            Some(number) => *number,
            None => {
                let next = versions.policies.len() + 1;
                let number = match versions.free.pop() {
                    Some(number) => number,
                    None if next < NUMBERS => next as u16, // below 2^14
                    None => return UNNAMED,
                };
                let at = usize::from(number);
                if let Layout::Word(layout) = policy.quota().rules().layout() {
                    self.shifts[at].store(layout.shift as u8, Ordering::Relaxed); // at most 40
                }
                if versions.note_place(policy) {
                    self.mixed.store(true, Ordering::Release);
                }
                match versions.policies.get_mut(at - 1) {
                    Some(place) => *place = policy.clone(),
                    None => versions.policies.push(policy.clone()),
                }
                versions.numbers.insert(fingerprint, number);
                self.crowded.store(versions.in_use() >= CROWDED, Ordering::Relaxed);
                number
            }
        };
        self.hand_out(number, fingerprint, &versions);
        number
    }

    /// The numbers that were not asked for since the phase began.
    pub(super) fn idle(&self) -> Numbers {
        let versions = self.versions();
        let mut idle = Numbers::new();
        for number in versions.numbers.values() {
            if !self.is_asked(*number, versions.phase) {
                idle.insert(*number);
            }
        }
        idle
    }

    fn is_asked(&self, number: u16, phase: u32) -> bool {
        self.asked.get(usize::from(number)).is_some_and(|asked| asked.load(Ordering::Relaxed) == phase)
    }

    /// Frees these numbers, of which no live state is left, except those that were asked for meanwhile; and begins the next
    /// phase. From then on each policy that is used asks for its number again.
    pub(super) fn begin_phase(&self, unused: &Numbers) {
        let mut guard = self.versions_mut();
        let versions = &mut *guard;
        let phase = versions.phase;
        let free: Vec<u16> = versions
            .numbers
            .values()
            .copied()
            .filter(|number| unused.contains(*number) && !self.is_asked(*number, phase))
            .collect();
        if !free.is_empty() {
            versions.numbers.retain(|_, number| !unused.contains(*number) || self.is_asked(*number, phase));
            versions.free.extend(free);
            versions.places.clear();
            let used: Vec<Policy> = versions
                .numbers
                .values()
                .filter_map(|number| versions.policies.get(usize::from(*number).checked_sub(1)?).cloned())
                .collect();
            used.iter().for_each(|policy| {
                versions.note_place(policy);
            });
        }
        versions.phase = versions.phase.wrapping_add(1);
        self.crowded.store(versions.in_use() >= CROWDED, Ordering::Relaxed);
        self.cache.iter().for_each(|entry| entry.store(0, Ordering::Relaxed));
    }
}
