//! Values of single keys, which replace the chosen values for a time.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use foldhash::quality::RandomState;

use crate::base::head::Head;
use crate::base::sync::contained;
use crate::base::time::Timestamp;
use crate::clock::{Clock, MonotonicClock};
use crate::error::{ConfigError, ConfigErrorKind};
use crate::key::{IntoKey, Key};

/// The default of [`Overrides::max_entries`].
const ENTRIES_MAX: usize = 100_000;

/// From this number of entries on, adding an entry may first remove the entries that have ended.
const SWEPT_FROM: usize = 64;

/// A table is shrunk when it has few keys and its capacity is above this number.
const SPARE: usize = 256;

/// Gives single keys a value of their own instead of the usually chosen value, for a time or until the
/// override is ended. The value is a [quota](crate::Rule::quota_from), or the number of a
/// [plan](crate::Rule::plans). The table can be changed while requests are served. Clones are the same
/// table.
///
/// * Each override has an identity. If several overrides hold for a key, the latest counts. When the latest
///   override ends, because its time is over or [`end`](Self::end) is called, the override before it counts again,
///   unless that override has ended as well. So two operators who raise the quota of one customer do not undo each
///   other's change.
/// * Overrides whose time has passed are removed. An override without a time stays until it is
///   ended. [`max_entries`](Self::max_entries) bounds the table.
/// * The table belongs to the process, and is not kept in Redis. A `fleet::Fleet` provides tables
///   that are the same in all processes.
/// * While the table is empty, no request looks up its key. While the table has entries, a request
///   takes a read lock.
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::{
///     Head, MemoryLimiter, Quota, RateLimitLayer, Rule, key, middleware::Overrides,
/// };
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let overrides = Overrides::new();
/// let usual = |_: &Head<'_>| Quota::per_minute(60);
/// let customer =
///     Rule::quota_from("customer", overrides.or(key::header("x-api-key"), usual))?;
/// let layer = RateLimitLayer::new(MemoryLimiter::new(), customer, key::header("x-api-key"));
///
/// // From the next request on, for an hour:
/// let raised =
///     overrides.set("acme", Quota::per_minute(6_000), Duration::from_secs(3_600))?;
/// overrides.end(raised); // or before that
/// # Ok(()) }
/// ```
///
/// With plans, the values are the numbers of the plans:
///
/// ```
/// use tower_ratelimit::{Head, Quota, Rule, key, middleware::Overrides};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let overrides = Overrides::new();
/// let paying = |request: &Head<'_>| usize::from(request.headers.contains_key("x-paid"));
/// let quotas = [Quota::per_minute(10), Quota::per_minute(300), Quota::per_minute(5_000)];
/// let customer =
///     Rule::plans("customer", quotas, overrides.or(key::header("x-api-key"), paying))?;
///
/// overrides.set("one-that-may-do-more", 2, None)?; // until it is ended
/// # Ok(()) }
/// ```
pub struct Overrides<T>(Arc<Shared<T>>);

struct Shared<T> {
    clock: Arc<dyn Clock>,
    max_entries: usize,
    /// The number of entries. A request that reads 0 here takes no lock.
    count: AtomicUsize,
    table: RwLock<Table<T>>,
}

struct Table<T> {
    /// The overrides of each key, in the order in which they were made.
    keys: HashMap<Key, Vec<Entry<T>>, RandomState>,
    count: usize,
    /// When the table reaches this number of entries, the ended entries are removed.
    swept_at: usize,
    next: u64,
}

struct Entry<T> {
    number: u64,
    /// The value is shared, because cloning and dropping it runs the application's code, which is not called
    /// under the lock.
    value: Arc<T>,
    ends: Option<Timestamp>,
}

impl<T> Entry<T> {
    fn holds(&self, now: Timestamp) -> bool {
        self.ends.is_none_or(|ends| now < ends)
    }
}

/// The identity of an override, by which [`Overrides::end`] ends it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OverrideId {
    key: Key,
    number: u64,
}

impl OverrideId {
    /// Returns the key that has the override.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.key
    }
}

impl<T> Overrides<T> {
    /// Makes an empty table.
    #[must_use]
    pub fn new() -> Self {
        Self::with(Arc::new(MonotonicClock::new()), ENTRIES_MAX)
    }

    /// Returns an empty table that reads this clock, instead of the [monotonic](MonotonicClock)
    /// clock.
    #[must_use]
    pub fn clock(self, clock: impl Clock + 'static) -> Self {
        Self::with(Arc::new(clock), self.0.max_entries)
    }

    /// Returns an empty table of at most this many overrides, at least one. The default is 100,000.
    #[must_use]
    pub fn max_entries(self, max_entries: usize) -> Self {
        Self::with(Arc::clone(&self.0.clock), max_entries.max(1))
    }

    fn with(clock: Arc<dyn Clock>, max_entries: usize) -> Self {
        let table = Table { keys: HashMap::default(), count: 0, swept_at: SWEPT_FROM, next: 0 };
        Self(Arc::new(Shared { clock, max_entries, count: AtomicUsize::new(0), table: RwLock::new(table) }))
    }

    fn table(&self) -> RwLockReadGuard<'_, Table<T>> {
        self.0.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the table. The closure puts the values that it removes into the list that it gets.
    fn change<R>(&self, change: impl FnOnce(&mut Table<T>, &mut Vec<Arc<T>>) -> R) -> R {
        let mut removed = Vec::new();
        let changed = {
            let mut table = self.0.table.write().unwrap_or_else(PoisonError::into_inner);
            let changed = change(&mut table, &mut removed);
            self.0.count.store(table.count, Ordering::Release); // with the Acquire in `may_hold`
            changed
        };
        // Drops the values one by one, because two panics at once would abort the process.
        removed.into_iter().for_each(|value| contained(|| drop(value)));
        changed
    }

    fn may_hold(&self) -> bool {
        self.0.count.load(Ordering::Acquire) > 0
    }

    /// Makes an override of a key, which begins now. The override holds for the time `lasting` or,
    /// without a time, until it is ended. Returns the override's identity.
    ///
    /// # Errors
    /// Returns an error if there is no key, or if the table is full of overrides that have not ended.
    pub fn set(
        &self,
        key: impl IntoKey,
        value: T,
        lasting: impl Into<Option<Duration>>,
    ) -> Result<OverrideId, ConfigError> {
        // Uses the key, the clock and the value before it takes the lock, because they are the application's code.
        let Some(key) = key.into_key() else {
            let message = "an override needs a key: pass the value that the rule's extractor returns";
            return Err(ConfigError::new(ConfigErrorKind::Missing, message));
        };
        let now = self.0.clock.now();
        let ends = lasting.into().map(|lasting| now.saturating_add(lasting));
        let (value, max_entries) = (Arc::new(value), self.0.max_entries);
        self.change(|table, removed| {
            if table.count >= table.swept_at.min(max_entries) {
                table.sweep(now, removed);
            }
            if table.count >= max_entries {
                let message = format!(
                    "the table is full: {max_entries} overrides have not ended; end overrides that are no longer \
                     needed, or raise Overrides::max_entries"
                );
                return Err(ConfigError::new(ConfigErrorKind::Full, message));
            }
            let number = table.next;
            (table.next, table.count) = (number + 1, table.count + 1);
            table.keys.entry(key.clone()).or_default().push(Entry { number, value: Arc::clone(&value), ends });
            Ok(OverrideId { key, number })
        })
    }

    /// Ends an override. Returns whether the override had not ended before.
    #[expect(clippy::needless_pass_by_value, reason = "the identity of an ended override is of no use")]
    pub fn end(&self, id: OverrideId) -> bool {
        let now = self.0.clock.now();
        self.change(|table, removed| table.keep_of(&id.key, |entry| entry.number != id.number, now, removed))
    }

    /// Ends all overrides of a key. Returns whether there were any.
    pub fn end_all(&self, key: impl IntoKey) -> bool {
        let Some(key) = key.into_key() else { return false };
        let now = self.0.clock.now();
        self.change(|table, removed| table.keep_of(&key, |_| false, now, removed))
    }

    /// Returns the number of overrides that have not ended. The running time grows with the table.
    #[must_use]
    pub fn len(&self) -> usize {
        let now = self.0.clock.now();
        self.table().keys.values().flatten().filter(|entry| entry.holds(now)).count()
    }

    /// Returns whether no override holds.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<T: Clone> Overrides<T> {
    /// Returns the value of a key's latest override that holds, if there is one.
    #[must_use]
    pub fn get(&self, key: &Key) -> Option<T> {
        if !self.may_hold() {
            return None;
        }
        let now = self.0.clock.now();
        let value = self.table().latest_of(key, now)?; // the lock ends here
        Some(T::clone(&value))
    }

    /// Returns the overrides that have not ended, in the order in which they were made. An entry has the identity,
    /// the value, and the remaining time, which is `None` if the override holds until it is ended. If a key has
    /// several overrides, the last one counts.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::{Quota, middleware::Overrides};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let overrides = Overrides::new();
    /// overrides.set("acme", Quota::per_minute(6_000), Duration::from_secs(3_600))?;
    ///
    /// for (id, quota, left) in overrides.entries() {
    ///     println!("{}: {quota}, for {left:?}", id.key().display());
    ///     overrides.end(id);
    /// }
    /// # assert!(overrides.is_empty());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn entries(&self) -> Vec<(OverrideId, T, Option<Duration>)> {
        let now = self.0.clock.now();
        let mut entries: Vec<_> = {
            let table = self.table();
            let held = |(key, entries): (&Key, &Vec<Entry<T>>)| {
                let held = entries.iter().filter(|entry| entry.holds(now));
                held.map(|entry| (entry.number, key.clone(), Arc::clone(&entry.value), entry.ends)).collect::<Vec<_>>()
            };
            table.keys.iter().flat_map(held).collect()
        };
        entries.sort_unstable_by_key(|(number, ..)| *number);
        let entry = |(number, key, value, ends): (u64, Key, Arc<T>, Option<Timestamp>)| {
            let left = ends.map(|ends| ends.saturating_since(now));
            (OverrideId { key, number }, T::clone(&value), left)
        };
        entries.into_iter().map(entry).collect()
    }
}

impl<T: Clone + Send + Sync + 'static> Overrides<T> {
    /// Returns a closure for [`Rule::quota_from`](crate::Rule::quota_from) or
    /// [`Rule::plans`](crate::Rule::plans). The closure returns the value of the override for a
    /// request's key or, if there is no override, the result of `choose`. `extract` may be the
    /// extractor of the layer or another extractor.
    pub fn or<E, K, F, P>(
        &self,
        extract: E,
        choose: F,
    ) -> impl Fn(&Head<'_>) -> Option<T> + Send + Sync + use<T, E, K, F, P>
    where
        E: Fn(&Head<'_>) -> K + Send + Sync + 'static,
        K: IntoKey + 'static,
        F: Fn(&Head<'_>) -> P + Send + Sync + 'static,
        P: Into<Option<T>> + 'static,
    {
        let table = self.clone();
        move |head| {
            let given = if table.may_hold() { extract(head).into_key() } else { None };
            given.and_then(|key| table.get(&key)).or_else(|| choose(head).into())
        }
    }
}

impl<T> Table<T> {
    fn latest_of(&self, key: &Key, now: Timestamp) -> Option<Arc<T>> {
        let latest = self.keys.get(key)?.iter().rev().find(|entry| entry.holds(now))?;
        Some(Arc::clone(&latest.value))
    }

    /// Removes the entries that have ended.
    fn sweep(&mut self, now: Timestamp, removed: &mut Vec<Arc<T>>) {
        self.keys.retain(|_, entries| {
            keep(entries, |entry| entry.holds(now), removed);
            !entries.is_empty()
        });
        self.count = self.keys.values().map(Vec::len).sum();
        // While the table has room, sweeps look on average at no more than two entries for each new entry.
        self.swept_at = (2 * self.count).max(SWEPT_FROM);
        self.shrink();
    }

    /// Shrinks the table if few keys are left.
    fn shrink(&mut self) {
        if self.keys.capacity() > SPARE && self.keys.len() < self.keys.capacity() / 8 {
            self.keys.shrink_to_fit();
        }
    }

    /// Removes the entries of a key that `is_kept` does not keep or that have ended. Returns whether an entry was
    /// removed that had not ended.
    fn keep_of(
        &mut self,
        key: &Key,
        is_kept: impl Fn(&Entry<T>) -> bool,
        now: Timestamp,
        removed: &mut Vec<Arc<T>>,
    ) -> bool {
        let Some(entries) = self.keys.get_mut(key) else { return false };
        let (before, mut removes) = (entries.len(), false);
        let is_kept = |entry: &Entry<T>| {
            let (is_kept, holds) = (is_kept(entry), entry.holds(now));
            removes |= holds && !is_kept;
            is_kept && holds
        };
        keep(entries, is_kept, removed);
        self.count -= before - entries.len();
        if entries.is_empty() {
            self.keys.remove(key);
            self.shrink();
        }
        removes
    }
}

/// Removes the entries that `is_kept` does not keep, and puts their values into `removed`, so that no value is
/// dropped here.
fn keep<T>(entries: &mut Vec<Entry<T>>, mut is_kept: impl FnMut(&Entry<T>) -> bool, removed: &mut Vec<Arc<T>>) {
    entries.retain(|entry| {
        let is_kept = is_kept(entry);
        if !is_kept {
            removed.push(Arc::clone(&entry.value));
        }
        is_kept
    });
}

impl<T> Default for Overrides<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Clone for Overrides<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> fmt::Debug for Overrides<T> {
    /// Prints the number of overrides, not the keys.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Overrides").field("len", &self.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::ManualClock;

    const HOUR: Duration = Duration::from_secs(3_600);

    /// Looks into the table when it is made into a key.
    struct Looks(Overrides<u32>);

    impl IntoKey for Looks {
        fn into_key(self) -> Option<Key> {
            Key::of(self.0.0.table.try_write().is_ok())
        }
    }

    fn key(name: &str) -> Key {
        Key::of(name).unwrap()
    }

    #[test]
    fn keys_are_made_when_the_table_is_not_locked() {
        let table = Overrides::new();
        table.set(Looks(table.clone()), 1, None).unwrap();
        assert_eq!(table.get(&Key::of(true).unwrap()), Some(1));
        assert!(table.end_all(Looks(table.clone())));
    }

    /// Looks whether the table is locked when it is cloned and dropped, and panics when it is dropped.
    struct Value(Overrides<Self>, Arc<AtomicUsize>);

    impl Value {
        fn look(&self) {
            let is_locked = self.0.0.table.try_write().is_err();
            self.1.fetch_add(usize::from(is_locked), Ordering::Relaxed);
        }
    }

    impl Clone for Value {
        fn clone(&self) -> Self {
            self.look();
            Self(self.0.clone(), Arc::clone(&self.1))
        }
    }

    impl Drop for Value {
        fn drop(&mut self) {
            self.look();
            if !std::thread::panicking() {
                panic!("the value's own");
            }
        }
    }

    #[test]
    fn overrides_are_listed_in_order_with_the_time_that_is_left() {
        let clock = ManualClock::new();
        let table = Overrides::new().clock(clock.clone());
        table.set("short", 1, Duration::from_secs(60)).unwrap();
        let acme = table.set("acme", 2, HOUR).unwrap();
        table.set("acme", 3, None).unwrap();
        table.set("beta", 4, 2 * HOUR).unwrap();
        clock.advance(Duration::from_secs(60));
        let entries = table.entries();
        let shown: Vec<_> =
            entries.iter().map(|(id, value, left)| (id.key().display().to_string(), *value, *left)).collect();
        let minute = Duration::from_secs(60);
        let expected = [("acme", 2, Some(HOUR - minute)), ("acme", 3, None), ("beta", 4, Some(2 * HOUR - minute))];
        assert_eq!(shown, expected.map(|(key, value, left)| (key.to_owned(), value, left)));
        assert_eq!(entries[0].0, acme);
        assert!(entries.into_iter().all(|(id, ..)| table.end(id)));
        assert!(table.entries().is_empty());
    }

    #[test]
    fn values_are_cloned_and_dropped_when_the_table_is_not_locked() {
        let (clock, locked) = (ManualClock::new(), Arc::new(AtomicUsize::new(0)));
        let table = Overrides::new().clock(clock.clone()).max_entries(SWEPT_FROM);
        let value = || Value(table.clone(), Arc::clone(&locked));
        let ended = table.set(0_u64, value(), None).unwrap();
        assert!(table.get(&Key::of(0_u64).unwrap()).map(std::mem::forget).is_some());
        table.entries().into_iter().for_each(std::mem::forget);
        assert!(table.end(ended) && table.is_empty());
        for at in 0..SWEPT_FROM as u64 {
            table.set(at, value(), HOUR).unwrap();
        }
        let full = || table.set("x", value(), HOUR).is_err();
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(full)).is_err(), "this value is the caller's");
        clock.advance(HOUR);
        assert!(table.set("x", value(), None).is_ok(), "what has ended made room");
        assert!(table.end_all("x"));
        let count = table.table().count;
        assert_eq!((count, locked.load(Ordering::Relaxed)), (0, 0));
    }

    #[test]
    fn override_that_ends_leaves_the_others_of_its_key() {
        let clock = ManualClock::new();
        let table = Overrides::new().clock(clock.clone());
        let long = table.set("a", 1, 10 * HOUR).unwrap();
        let short = table.set("a", 2, HOUR).unwrap();
        let other = table.set("b", 9, None).unwrap();
        assert_eq!((table.get(&key("a")), table.get(&key("b"))), (Some(2), Some(9)));
        clock.advance(HOUR - Duration::from_micros(1));
        assert_eq!(table.get(&key("a")), Some(2));
        clock.advance(Duration::from_micros(1));
        assert_eq!(
            (table.get(&key("a")), table.len()),
            (Some(1), 2),
            "the later one has ended, and not the earlier one"
        );
        assert!(!table.end(short), "it has ended before");
        let latest = table.set("a", 3, None).unwrap();
        assert!(table.end(long.clone()) && !table.end(long));
        assert_eq!(table.get(&key("a")), Some(3), "the latest one stays");
        assert!(table.end(latest) && table.end(other) && table.is_empty());
        assert_eq!((table.get(&key("a")), table.get(&key("b"))), (None, None));
    }

    #[test]
    fn table_shrinks_when_many_overrides_have_ended() {
        let clock = ManualClock::new();
        let table = Overrides::new().clock(clock.clone());
        let fill = |lasting: Option<Duration>| -> Vec<OverrideId> {
            (0..10_000_u64).map(|at| table.set(at, at, lasting).unwrap()).collect()
        };
        fill(None).into_iter().for_each(|id| assert!(table.end(id)));
        let room = || table.table().keys.capacity();
        assert!(room() <= SPARE, "room for {}", room());
        fill(Some(HOUR));
        clock.advance(HOUR);
        (0..20_000_u64).for_each(|at| assert!(table.set(at, at, None).is_ok_and(|id| table.end(id))));
        assert!(room() <= SPARE, "room for {}", room());
    }

    #[test]
    fn overrides_that_have_ended_make_room_by_themselves() {
        let clock = ManualClock::new();
        let table = Overrides::new().clock(clock.clone()).max_entries(1_000);
        for at in 0..1_000_u64 {
            table.set(at, at, HOUR).unwrap();
        }
        assert_eq!(table.set("x", 0, HOUR).unwrap_err().kind(), ConfigErrorKind::Full);
        assert_eq!(table.set(None::<Key>, 0, HOUR).unwrap_err().kind(), ConfigErrorKind::Missing);
        clock.advance(HOUR);
        for at in 0..100_000_u64 {
            table.set(at, at, HOUR).unwrap();
            clock.advance(HOUR / 100);
            assert!(table.table().count <= 2 * 100 + SWEPT_FROM || at < 1_000, "{at}");
        }
        assert!(table.len() <= 100);
    }
}
