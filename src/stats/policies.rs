//! The policies that were seen, by name.

use std::hash::BuildHasher;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::cells::Cells;
use super::histogram::Histogram;
use super::rates::Rates;
use super::sketch::Sketch;
use crate::base::sync::{Mutex, lock};

/// The maximum number of policies that are counted separately.
pub(super) const POLICIES_MAX: usize = 200;

/// The name under which all further policies are counted together.
pub(super) const OTHER: &str = "other";

/// The number of slots. There are more than twice as many slots as policies, so that few names have to be compared.
const SLOTS: usize = 512;

/// The counts of one policy.
pub(super) struct PolicyCounts {
    pub(super) name: Arc<str>,
    pub(super) cells: Cells,
    /// How long requests waited because of the policy.
    pub(super) waited: Histogram,
    /// The units of a concurrency limit that requests hold now.
    pub(super) held: AtomicU64,
    /// How long requests held units of the concurrency limit.
    pub(super) held_for: Histogram,
    /// The number of requests that began to wait because of the policy. `waits_ended` is the number
    /// of these requests that no longer wait.
    pub(super) waits_begun: AtomicU64,
    pub(super) waits_ended: AtomicU64,
    /// The number of bodies that the policy began to pace. `paces_ended` is the number of these
    /// bodies that have ended, and `paced_bytes` the number of bytes of the ended bodies.
    pub(super) paces_begun: AtomicU64,
    pub(super) paces_ended: AtomicU64,
    pub(super) paced_bytes: AtomicU64,
    /// The time of the last refusal by the policy, in microseconds; 0 if it refused no request.
    pub(super) last_refused_us: AtomicU64,
    /// True if the policy is a block. Refusals by a block are normal.
    pub(super) is_block: AtomicBool,
    pub(super) rates: Mutex<Rates>,
    /// The keys that use the most units of the policy, if such keys are counted.
    pub(super) used: Option<Sketch>,
    #[cfg(feature = "tracing")]
    pub(super) log: super::log::RefusalLog,
}

impl PolicyCounts {
    fn new(name: &str, period: u64, used_sets: Option<usize>) -> Self {
        Self {
            name: name.into(),
            cells: Cells::default(),
            waited: Histogram::default(),
            held: AtomicU64::new(0),
            held_for: Histogram::default(),
            waits_begun: AtomicU64::new(0),
            waits_ended: AtomicU64::new(0),
            paces_begun: AtomicU64::new(0),
            paces_ended: AtomicU64::new(0),
            paced_bytes: AtomicU64::new(0),
            last_refused_us: AtomicU64::new(0),
            is_block: AtomicBool::new(false),
            rates: Mutex::new(Rates::new(period)),
            used: used_sets.map(Sketch::new),
            #[cfg(feature = "tracing")]
            log: super::log::RefusalLog::default(),
        }
    }
}

impl PolicyCounts {
    /// Returns how many requests wait because of the policy, or `None` if no request ever did.
    pub(super) fn waiting(&self) -> Option<u64> {
        under_way(&self.waits_begun, &self.waits_ended)
    }

    /// Returns how many bodies the policy paces, or `None` if it never paced a body.
    pub(super) fn pacing(&self) -> Option<u64> {
        under_way(&self.paces_begun, &self.paces_ended)
    }
}

fn under_way(begun: &AtomicU64, ended: &AtomicU64) -> Option<u64> {
    // Reads the ends first, because a wait that begins and ends between the two readings would otherwise count as
    // ended, but not as begun.
    let ended = ended.load(Ordering::Relaxed);
    let begun = begun.load(Ordering::Relaxed);
    (begun > 0).then(|| begun.saturating_sub(ended))
}

/// The policies, each with its counters. A policy is found without a lock. No policy is ever
/// removed.
pub(super) struct Policies {
    other: Box<PolicyCounts>,
    slots: Box<[OnceLock<Box<PolicyCounts>>]>,
    /// The number of policies. The lock is held while a policy is added.
    known: Mutex<usize>,
    is_full: AtomicBool,
    /// The number of sets in each policy's sketch of used units, if the used units of keys are
    /// counted.
    used_sets: Option<usize>,
}

impl Policies {
    pub(super) fn new(period: u64, used_sets: Option<usize>) -> Self {
        Self {
            other: Box::new(PolicyCounts::new(OTHER, period, used_sets)),
            slots: (0..SLOTS).map(|_| OnceLock::new()).collect(),
            known: Mutex::new(0),
            is_full: AtomicBool::new(false),
            used_sets,
        }
    }

    /// Returns the entry of a policy. The rates of a new entry begin in the bucket `period`.
    #[inline]
    pub(super) fn find(&self, name: &str, period: impl FnOnce() -> u64) -> &PolicyCounts {
        let hash = foldhash::fast::FixedState::default().hash_one(name);
        match self.look(hash, name) {
            Ok(entry) => entry,
            Err(_) => self.add(hash, name, period()),
        }
    }

    /// Returns the entry of a policy, or the free slot for it.
    #[inline]
    fn look(&self, hash: u64, name: &str) -> Result<&PolicyCounts, usize> {
        let mut at = hash as usize % SLOTS; // any bits do
        // The loop ends, because most slots stay free.
        loop {
            match self.slots[at].get() {
                Some(entry) if *entry.name == *name => return Ok(entry),
                Some(_) => at = (at + 1) % SLOTS,
                None => return Err(at),
            }
        }
    }

    #[cold]
    fn add(&self, hash: u64, name: &str, period: u64) -> &PolicyCounts {
        // The name `OTHER` must not get a second entry.
        if name == OTHER || self.is_full.load(Ordering::Relaxed) {
            return &self.other;
        }
        let mut known = lock(&self.known);
        match self.look(hash, name) {
            Ok(entry) => entry,
            Err(_) if *known == POLICIES_MAX => {
                self.is_full.store(true, Ordering::Relaxed);
                &self.other
            }
            Err(free) => {
                *known += 1;
                self.slots[free].get_or_init(|| Box::new(PolicyCounts::new(name, period, self.used_sets)))
            }
        }
    }

    /// Iterates over all policies. The entry for all further policies comes last.
    pub(super) fn iter(&self) -> impl Iterator<Item = &PolicyCounts> {
        self.slots.iter().filter_map(OnceLock::get).map(|entry| &**entry).chain([&*self.other])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_beyond_the_bound_are_counted_together() {
        let policies = Policies::new(7, None);
        for n in 0..10_000 {
            let name = format!("policy-{n}");
            let entry = policies.find(&name, || 7);
            assert_eq!(&*entry.name, if n < POLICIES_MAX { name.as_str() } else { OTHER });
            assert!(std::ptr::eq(entry, policies.find(&name, || 7)));
        }
        assert_eq!(policies.iter().count(), POLICIES_MAX + 1);
    }

    #[test]
    fn policy_that_is_named_other_is_no_second_series() {
        let policies = Policies::new(0, None);
        assert!(std::ptr::eq(policies.find(OTHER, || 0), &*policies.other));
        assert_eq!(policies.iter().count(), 1);
    }

    #[test]
    fn policy_that_threads_see_at_once_has_one_entry() {
        let policies = Policies::new(0, None);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for n in 0..300 {
                        policies.find(&format!("policy-{n}"), || 0);
                    }
                });
            }
        });
        let mut names: Vec<&str> = policies.iter().map(|entry| &*entry.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), POLICIES_MAX + 1);
    }
}
