//! The keys that are refused most often, or that use the most units, in bounded memory.
//!
//! The data structure is the Space-Saving sketch (Metwally, Agrawal and El Abbadi 2005), divided into sets: a key's
//! fingerprint selects a set, and each set is a sketch of eight counters. Therefore a request reads eight counters
//! instead of all counters.
//!
//! A key without a counter takes over the smallest counter of its set, and continues from the value of that counter.
//! Therefore a count is never too small. A count is too large by at most the value that was taken over, which is stored
//! as the error. A key that has more than an eighth of the counts of its set has a counter.

use std::fmt;
use std::sync::Arc;

use super::names::{KeyNames, KnownKey, short_fingerprint};
use crate::base::sync::{Mutex, lock, try_lock};
use crate::key::Key;

/// The number of sets in the sketch of all refused keys.
pub(super) const REFUSED_SETS: usize = 64;

/// The number of sets in the sketch of a policy's used units. Units of different policies cannot be compared, so each
/// policy has its own sketch.
pub(super) const USED_SETS: usize = 16;

const WAYS: usize = 8;

/// The time after which all counts are halved, in microseconds, so that old counts fade.
pub(super) const HALVED_EACH_US: u64 = 300_000_000;

#[derive(Default)]
struct SketchSlot {
    fingerprint: u64,
    policy: Option<Arc<str>>,
    count: u64,
    error: u64,
    /// The name and the key, or `None` before the key is counted for the second time.
    known: Option<KnownKey>,
}

/// The sketch. The full key is stored only if operators may act on keys.
pub(super) struct Sketch {
    sets: Box<[Mutex<[SketchSlot; WAYS]>]>,
}

impl Sketch {
    pub(super) fn new(sets: usize) -> Self {
        Self { sets: (0..sets).map(|_| Mutex::new(Default::default())).collect() }
    }

    /// Counts a refusal, or the used units, of the key with this fingerprint. If another thread has locked the key's
    /// set, the event is not counted, because the sketch is an estimate anyway. When a key is counted for the second
    /// time, its name is stored, and also the key itself if operators may act on keys.
    pub(super) fn count(&self, names: &KeyNames, policy: &Arc<str>, fingerprint: u64, key: &Key, by: u64) {
        let Some(set) = self.sets.get(fingerprint as usize % self.sets.len().max(1)) else { return }; // any bits do
        let Some(mut slots) = try_lock(set) else { return };
        let is_own = |slot: &SketchSlot| slot.is(fingerprint, policy);
        let at = slots.iter().position(is_own).or_else(|| (0..WAYS).min_by_key(|at| slots[*at].count));
        let Some(slot) = at.and_then(|at| slots.get_mut(at)) else { return };
        let is_due = is_own(slot) && slot.known.is_none();
        if !is_own(slot) {
            let error = slot.count;
            *slot = SketchSlot { fingerprint, policy: Some(Arc::clone(policy)), count: error, error, known: None };
        }
        slot.count = slot.count.saturating_add(by);
        drop(slots);
        if is_due && names.knows() {
            // Calls `names` without the lock, because `names` is the application's code.
            let known = names.known(key);
            let mut slots = lock(set);
            if let Some(slot) = slots.iter_mut().find(|slot| slot.is(fingerprint, policy)) {
                slot.known = Some(known);
            }
        }
    }

    /// Halves all counts, rounded down, `times` times. A counter of zero is free.
    pub(super) fn halve(&self, times: u64) {
        let by = u32::try_from(times).unwrap_or(u32::MAX);
        for set in &self.sets {
            for slot in lock(set).iter_mut() {
                let halved = |count: u64| count.checked_shr(by).unwrap_or(0);
                (slot.count, slot.error) = (halved(slot.count), halved(slot.error));
                if slot.count == 0 {
                    *slot = SketchSlot::default();
                }
            }
        }
    }

    /// Returns the keys, from the largest count to the smallest.
    pub(super) fn read(&self) -> Vec<TopKey> {
        let mut all = Vec::new();
        for set in &self.sets {
            let slots = lock(set);
            all.extend(slots.iter().filter_map(|slot| {
                Some(TopKey {
                    policy: Arc::clone(slot.policy.as_ref()?),
                    fingerprint: slot.fingerprint,
                    known: slot.known.clone().unwrap_or_default(),
                    count: slot.count,
                    error: slot.error,
                })
            }));
        }
        TopKey::sort(&mut all);
        all
    }
}

impl SketchSlot {
    fn is(&self, fingerprint: u64, policy: &str) -> bool {
        self.fingerprint == fingerprint && self.policy.as_deref() == Some(policy)
    }
}

/// A key that a policy refused often, that used many units of the policy, or that holds units of it.
#[derive(Clone)]
pub struct TopKey {
    policy: Arc<str>,
    pub(super) fingerprint: u64,
    pub(super) known: KnownKey,
    count: u64,
    error: u64,
}

impl TopKey {
    /// Makes a key with an exact count.
    pub(super) fn exact(policy: Arc<str>, fingerprint: u64, known: KnownKey, count: u64) -> Self {
        Self { policy, fingerprint, known, count, error: 0 }
    }

    /// Sorts the keys from the largest count to the smallest.
    pub(super) fn sort(all: &mut [Self]) {
        all.sort_by(|a, b| b.count.cmp(&a.count).then_with(|| a.fingerprint.cmp(&b.fingerprint)));
    }

    /// Returns the name of the policy.
    #[must_use]
    pub fn policy(&self) -> &str {
        &self.policy
    }

    /// Returns eight hex digits that identify the key in this process. The digits are made with a secret that is new in
    /// each process, so they do not reveal the key, and are different in another process.
    ///
    /// A key cannot be computed from the digits. On a [status page](crate::guide::observing#a-status-page) with
    /// operators, the digits are enough to unblock or reset a client.
    #[must_use]
    pub fn fingerprint(&self) -> String {
        short_fingerprint(self.fingerprint)
    }

    /// Returns the name that [`reveal`](super::StatsBuilder::reveal) gave to the key, if it gave a name.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.known.name.as_deref()
    }

    /// Returns about how often the key was refused, or about how many units it used. Older events count less, because
    /// the count is halved every five minutes. The count is too large by at most [`error`](Self::error). The count is
    /// too small by the events that were skipped while another thread counted, and by the rounding of halves.
    ///
    /// For the keys that [hold the most units](super::StatsSnapshot::most_held), returns the number of units that the
    /// key holds now.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns by how much [`count`](Self::count) may be too large.
    #[must_use]
    pub fn error(&self) -> u64 {
        self.error
    }

    /// Returns the full fingerprint and the key, if the key is stored.
    pub(crate) fn kept(&self) -> Option<(u64, &Arc<Key>)> {
        Some((self.fingerprint, self.known.key.as_ref()?))
    }
}

impl fmt::Debug for TopKey {
    /// Leaves out the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TopKey")
            .field("policy", &self.policy)
            .field("fingerprint", &self.fingerprint())
            .field("name", &self.known.name)
            .field("count", &self.count)
            .field("error", &self.error)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u64) -> Key {
        Key::of(n).unwrap()
    }

    /// A sketch with the names of its keys.
    struct Named(Sketch, KeyNames);

    impl Named {
        fn new(reveal: impl Fn(&Key) -> Option<String> + Send + Sync + 'static) -> Self {
            Self(Sketch::new(REFUSED_SETS), KeyNames::new(Some(Box::new(reveal))))
        }

        fn nameless() -> Self {
            Self(Sketch::new(REFUSED_SETS), KeyNames::new(None))
        }

        fn count(&self, policy: &Arc<str>, n: u64) {
            self.0.count(&self.1, policy, self.fingerprint(n), &key(n), 1);
        }

        fn fingerprint(&self, n: u64) -> u64 {
            self.1.fingerprint(&key(n))
        }

        fn read(&self) -> Vec<TopKey> {
            self.0.read()
        }
    }

    #[test]
    fn heavy_keys_are_found_among_a_million() {
        let sketch = Named::nameless();
        let policy: Arc<str> = "client".into();
        for n in 0..1_000_000_u64 {
            sketch.count(&policy, n + 10);
            if n % 50 == 0 {
                sketch.count(&policy, n / 50 % 5); // 4,000 of each of five
            }
        }
        let found = sketch.read();
        assert!(found.len() <= REFUSED_SETS * WAYS);
        for n in 0..5 {
            let own = sketch.fingerprint(n);
            let found = found.iter().find(|one| one.fingerprint == own).unwrap();
            assert!((4_000..=4_000 + found.error).contains(&found.count), "{found:?}");
        }
    }

    #[test]
    fn million_refused_keys_allocate_nothing() {
        let sketch = Named::new(|_| unreachable!("no key is refused twice"));
        let policy: Arc<str> = "client".into();
        let allocated = allocation_counter::measure(|| {
            (0..1_000_000).for_each(|n| sketch.count(&policy, n));
        });
        assert_eq!(allocated.count_total, 0);
    }

    #[test]
    fn count_lies_between_the_truth_and_the_truth_plus_error() {
        let sketch = Named::nameless();
        let policy: Arc<str> = "client".into();
        let mut truth = std::collections::HashMap::new();
        let mut seed = 1_u64;
        for _ in 0..50_000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let n = (seed >> 33) % 2_000 * ((seed >> 50) % 2); // half of all are of one key
            *truth.entry(sketch.fingerprint(n)).or_insert(0_u64) += 1;
            sketch.count(&policy, n);
        }
        for found in sketch.read() {
            let truth = truth[&found.fingerprint];
            assert!(found.count >= truth && found.count - found.error <= truth, "{found:?}: {truth}");
        }
        assert_eq!(sketch.read()[0].fingerprint, sketch.fingerprint(0));
    }

    #[test]
    fn counts_fade_by_halves() {
        let sketch = Named::nameless();
        let policy: Arc<str> = "client".into();
        (0..100).for_each(|_| sketch.count(&policy, 1));
        sketch.count(&policy, 2);
        sketch.0.halve(1);
        let counts: Vec<u64> = sketch.read().iter().map(TopKey::count).collect();
        assert_eq!(counts, [50]);
        sketch.0.halve(u64::MAX);
        assert!(sketch.read().is_empty());
    }

    #[test]
    fn key_is_counted_for_each_policy() {
        let sketch = Named::nameless();
        for policy in ["a", "b", "b"] {
            sketch.count(&policy.into(), 1);
        }
        let found = sketch.read();
        assert_eq!(found.iter().map(|one| (one.policy(), one.count())).collect::<Vec<_>>(), [("b", 2), ("a", 1)]);
        assert_eq!(found[0].fingerprint(), found[1].fingerprint());
        assert_eq!(found[0].fingerprint().len(), 8);
    }

    #[test]
    fn name_is_given_once_and_has_a_bound() {
        let calls = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let counted = Arc::clone(&calls);
        let reveal = move |key: &Key| {
            counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            (*key != Key::of(2_u64).unwrap()).then(|| "ä".repeat(500))
        };
        let sketch = Named::new(reveal);
        for _ in 0..10 {
            sketch.count(&"client".into(), 1);
            sketch.count(&"client".into(), 2);
        }
        sketch.count(&"client".into(), 3);
        let names: Vec<Option<usize>> = sketch.read().iter().map(|one| one.name().map(str::len)).collect();
        assert_eq!(names.iter().flatten().collect::<Vec<_>>(), [&128]);
        assert_eq!(calls.load(std::sync::atomic::Ordering::Relaxed), 2);
    }

    #[test]
    fn key_that_is_hammered_by_threads_is_counted_and_named() {
        let sketch = Named::new(|_| Some("one".to_owned()));
        let policy: Arc<str> = "client".into();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| (0..10_000).for_each(|_| sketch.count(&policy, 1)));
            }
        });
        let found = sketch.read();
        assert_eq!((found.len(), found[0].name()), (1, Some("one")));
        assert!((1..=80_000).contains(&found[0].count()));
    }
}
