//! The builder of a `MemoryLimiter`.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use crate::clock::{Clock, MonotonicClock};
use crate::outcome::Observer;
use crate::time::CLOCK_US_MAX;

use super::MemoryLimiter;
use super::store::{AnyClock, Secret, Setup, Store};
use super::word::RELATIVE_US_MAX;

/// The most that a clock may step back before time stands still for the limiter: about 200 days.
const BACK_US: u64 = 1 << 44;

const CAPACITY: usize = 1_000_000;
const CAPACITY_MAX: usize = 1 << 32;
/// The least number of entries: a limiter for few keys may need many for one of them.
const ENTRIES_MIN: usize = 1 << 16;

/// Says what happens to a new key when all slots that it may use are live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OnFull {
    /// Forgets one of the keys in these slots: the key that has used the smallest part of its quota. If
    /// all of them are out of allowance, it forgets the key whose state expires first; a closed
    /// [block](crate::quota::Quota::block) goes only if all are closed.
    #[default]
    Evict,
    /// Denies the new key, with a retry after one second.
    Deny,
}

/// Sets up a [`MemoryLimiter`].
///
/// ```
/// use tower_ratelimit::limiter::memory::OnFull;
/// use tower_ratelimit::{clock::ManualClock, MemoryLimiter};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let clock = ManualClock::new();
/// let limiter = MemoryLimiter::builder().capacity(100_000).on_full(OnFull::Deny).clock(clock.clone()).build()?;
/// # let _ = limiter;
/// # Ok(()) }
/// ```
#[must_use]
pub struct MemoryLimiterBuilder {
    capacity: usize,
    entries: usize,
    on_full: OnFull,
    clock: AnyClock,
    observer: Option<Arc<dyn Observer>>,
    snapshot: Option<Vec<u8>>,
}

impl MemoryLimiterBuilder {
    pub(super) fn new() -> Self {
        Self {
            capacity: CAPACITY,
            entries: ENTRIES_MIN,
            on_full: OnFull::Evict,
            clock: AnyClock::Monotonic(MonotonicClock::new()),
            observer: None,
            snapshot: None,
        }
    }

    /// Sets how many keys the limiter holds, from 1 to 2^32; a million by default. This bounds the
    /// memory, see [`MemoryLimiter`].
    pub fn capacity(mut self, keys: usize) -> Self {
        self.capacity = keys;
        self
    }

    /// Sets the least number of dated entries that the limiter holds for all logs and sub-windows
    /// together; 65,536 by default. It holds at least 15 for each key of its capacity, whatever is set
    /// here. More entries take more memory, 21.3 bytes each.
    ///
    /// A single key may use all entries. The limiter does
    /// [not support](crate::limiter::Limiter::supports) a quota of which one key may need more: a log
    /// needs an entry for each unit of its limit, a sliding window one for each bucket and two more.
    pub fn entries(mut self, entries: usize) -> Self {
        self.entries = entries;
        self
    }

    /// Sets what happens to a new key when the table is full.
    pub fn on_full(mut self, on_full: OnFull) -> Self {
        self.on_full = on_full;
        self
    }

    /// Reads this clock instead of the [monotonic](MonotonicClock) one.
    ///
    /// The limiter's time reaches from about 200 days before it was built to 12 years after. Beyond that
    /// it stands still.
    pub fn clock(mut self, clock: impl Clock + 'static) -> Self {
        self.clock = AnyClock::Other(Arc::new(clock));
        self
    }

    /// Reads the CPU's time stamp counter, see [`FastClock`](crate::clock::FastClock).
    #[cfg(feature = "fast-clock")]
    pub fn fast_clock(mut self) -> Self {
        self.clock = AnyClock::Fast(crate::clock::FastClock::new());
        self
    }

    /// Reports keys that are forgotten or denied for want of room to this observer.
    pub fn observer(mut self, observer: impl Observer + 'static) -> Self {
        self.observer = Some(Arc::new(observer));
        self
    }

    /// Starts with the states of a [snapshot](MemoryLimiter::snapshot).
    pub fn restore(mut self, snapshot: impl Into<Vec<u8>>) -> Self {
        self.snapshot = Some(snapshot.into());
        self
    }

    /// Builds the limiter.
    ///
    /// # Errors
    /// If the capacity is 0 or above 2^32, or the snapshot cannot be read.
    pub fn build(self) -> Result<MemoryLimiter, MemoryLimiterError> {
        if self.capacity == 0 || self.capacity > CAPACITY_MAX {
            return Err(MemoryLimiterError::new(
                MemoryLimiterErrorKind::Capacity,
                format!("a limiter for {} keys is not possible: choose 1 to {CAPACITY_MAX}", self.capacity),
            ));
        }
        let entries = self.entries.min(CAPACITY_MAX);
        let snapshot = self.snapshot.as_deref().map(super::snapshot::Snapshot::read).transpose()?;
        // From the system's randomness, by way of the standard library's hash map keys.
        let random = || RandomState::new().hash_one(0_u64);
        let seeds = snapshot.as_ref().map_or_else(|| [random(), random()], |snapshot| snapshot.seeds);
        let base = base(self.clock.now_us());
        let store = Store::new(Setup {
            secret: Secret::new(seeds),
            clock: self.clock,
            base,
            capacity: self.capacity,
            entries,
            on_full: self.on_full,
            observer: self.observer,
        });
        if let Some(snapshot) = snapshot {
            snapshot.fill(&store);
        }
        Ok(MemoryLimiter(Arc::new(store)))
    }

    /// Builds a limiter with the default settings, none of which can fail.
    pub(super) fn build_default() -> MemoryLimiter {
        let clock = MonotonicClock::new();
        let base = base(clock.now().as_micros());
        let random = || RandomState::new().hash_one(0_u64);
        MemoryLimiter(Arc::new(Store::new(Setup {
            secret: Secret::new([random(), random()]),
            clock: AnyClock::Monotonic(clock),
            base,
            capacity: CAPACITY,
            entries: ENTRIES_MIN,
            on_full: OnFull::Evict,
            observer: None,
        })))
    }
}

/// Returns the instant that words count from: some time ago, and early enough that no sum overflows.
fn base(now_us: u64) -> u64 {
    now_us.saturating_sub(BACK_US).min(CLOCK_US_MAX - RELATIVE_US_MAX)
}

impl fmt::Debug for MemoryLimiterBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryLimiterBuilder")
            .field("capacity", &self.capacity)
            .field("entries", &self.entries)
            .field("on_full", &self.on_full)
            .finish_non_exhaustive()
    }
}

/// Why a limiter could not be built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryLimiterError {
    kind: MemoryLimiterErrorKind,
    message: String,
}

/// What was wrong with a limiter's setup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryLimiterErrorKind {
    /// The capacity is out of range.
    Capacity,
    /// The snapshot is not one, is of another version of this crate, or is damaged.
    Snapshot,
}

impl MemoryLimiterError {
    pub(super) fn new(kind: MemoryLimiterErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    /// Which case it is.
    #[must_use]
    pub fn kind(&self) -> MemoryLimiterErrorKind {
        self.kind
    }
}

impl fmt::Display for MemoryLimiterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for MemoryLimiterError {}
