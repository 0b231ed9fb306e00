//! The keys that hold units of concurrency limits now, in bounded memory.
//!
//! A key is listed while it holds units. If the list is full, the units that an unlisted key takes are not counted.
//! So the count of a key may be too small, but is never too large. Keys leave the list when their requests end.
//! Therefore the list is full only while the number of keys that hold units reaches the length of the list.

use std::sync::Arc;

use super::names::{KeyNames, KnownKey};
use super::sketch::TopKey;
use crate::base::sync::{Mutex, lock};
use crate::key::Key;

/// The number of parts of the list. Each part has its own lock.
const PARTS: usize = 16;

/// The maximum number of keys in a part.
const EACH_MAX: usize = 64;

/// The keys that hold units. The full key is stored only if operators may act on keys.
#[derive(Default)]
pub(super) struct Holders([Mutex<Vec<Holder>>; PARTS]);

struct Holder {
    fingerprint: u64,
    policy: Arc<str>,
    units: u64,
    /// The name and the key, or `None` until a key that holds units takes further units.
    known: Option<KnownKey>,
}

impl Holders {
    /// Notes that the key with this fingerprint took units. If the key already holds units, its name is stored, and
    /// also the key itself if operators may act on keys.
    pub(super) fn take(&self, names: &KeyNames, policy: &Arc<str>, fingerprint: u64, key: &Key, units: u64) {
        let Some(part) = self.part(fingerprint) else { return };
        let mut holders = lock(part);
        let is_due = match holders.iter_mut().find(|holder| holder.is(fingerprint, policy)) {
            Some(own) => {
                own.units = own.units.saturating_add(units);
                own.known.is_none()
            }
            None => {
                if holders.len() < EACH_MAX {
                    holders.push(Holder { fingerprint, policy: Arc::clone(policy), units, known: None });
                }
                false
            }
        };
        drop(holders);
        if is_due && names.knows() {
            // Calls `names` without the lock, because `names` is the application's code.
            let known = names.known(key);
            if let Some(own) = lock(part).iter_mut().find(|holder| holder.is(fingerprint, policy)) {
                own.known = Some(known);
            }
        }
    }

    /// Notes that a key returned units.
    pub(super) fn put_back(&self, policy: &str, fingerprint: u64, units: u64) {
        let Some(part) = self.part(fingerprint) else { return };
        let mut holders = lock(part);
        let Some(at) = holders.iter().position(|holder| holder.is(fingerprint, policy)) else { return };
        let left = holders.get(at).map_or(0, |own| own.units.saturating_sub(units));
        if left == 0 {
            holders.swap_remove(at);
        } else if let Some(own) = holders.get_mut(at) {
            own.units = left;
        }
    }

    /// Returns the keys, from the most units to the fewest.
    pub(super) fn read(&self) -> Vec<TopKey> {
        let mut all = Vec::new();
        for part in &self.0 {
            all.extend(lock(part).iter().map(|holder| {
                let known = holder.known.clone().unwrap_or_default();
                TopKey::exact(Arc::clone(&holder.policy), holder.fingerprint, known, holder.units)
            }));
        }
        TopKey::sort(&mut all);
        all
    }

    fn part(&self, fingerprint: u64) -> Option<&Mutex<Vec<Holder>>> {
        self.0.get(fingerprint as usize % PARTS) // any of its bits
    }
}

impl Holder {
    fn is(&self, fingerprint: u64, policy: &str) -> bool {
        self.fingerprint == fingerprint && *self.policy == *policy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Named(Holders, KeyNames);

    impl Named {
        fn take(&self, policy: &str, n: u64, units: u64) {
            let key = Key::of(n).unwrap();
            self.0.take(&self.1, &policy.into(), self.1.fingerprint(&key), &key, units);
        }

        fn put_back(&self, policy: &str, n: u64, units: u64) {
            self.0.put_back(policy, self.1.fingerprint(&Key::of(n).unwrap()), units);
        }

        fn found(&self) -> Vec<(String, String, u64)> {
            let all = self.0.read();
            all.iter().map(|one| (one.policy().into(), one.name().unwrap_or("-").into(), one.count())).collect()
        }
    }

    fn named() -> Named {
        let reveal = |key: &Key| (*key != Key::of(2_u64).unwrap()).then(|| "one".to_owned());
        Named(Holders::default(), KeyNames::new(Some(Box::new(reveal))))
    }

    #[test]
    fn holders_are_listed_while_they_hold_units() {
        let holders = named();
        holders.take("exports", 1, 1);
        holders.take("exports", 2, 2);
        holders.take("exports", 1, 2);
        holders.take("uploads", 1, 1);
        let own = |policy: &str, name: &str, units| (policy.to_owned(), name.to_owned(), units);
        assert_eq!(holders.found()[..2], [own("exports", "one", 3), own("exports", "-", 2)]);
        assert_eq!(holders.found()[2], own("uploads", "-", 1), "it is named when it takes for the second time");
        holders.put_back("exports", 1, 1);
        holders.put_back("exports", 2, 2);
        holders.put_back("exports", 2, 1);
        assert_eq!(holders.found(), [own("exports", "one", 2), own("uploads", "-", 1)]);
        holders.put_back("exports", 1, 2);
        holders.put_back("uploads", 1, 9);
        assert_eq!(holders.found(), []);
    }

    #[test]
    fn holders_are_bounded_and_keep_those_that_hold_already() {
        let holders = named();
        holders.take("exports", 0, 5);
        (1..100_000).for_each(|n| holders.take("exports", n, 1));
        let found = holders.found();
        assert_eq!((found.len(), found[0].2), (PARTS * EACH_MAX, 5));
        (0..100_000).for_each(|n| holders.put_back("exports", n, 5));
        assert_eq!(holders.found(), []);
    }
}
