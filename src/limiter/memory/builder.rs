//! The builder of a `MemoryLimiter`.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use crate::clock::Clock;
use crate::error::{ConfigError, ConfigErrorKind};
use crate::outcome::Observer;

use super::limiter::MemoryLimiter;
use super::setup::{AnyClock, OnFull, Setup};
use super::snapshot::Snapshot;
use super::states::States;

/// The largest numbers of keys and of entries that a limiter can be built for. Both numbers are lower on a 32-bit
/// target, which has less address space. The table takes 40 bytes for each key. The arena takes 128 bytes for every
/// six entries, or 128 bytes for every slot if that is more.
const CAPACITY_MAX: u64 = if usize::BITS > 32 { 1 << 32 } else { 1 << 22 };
const ENTRIES_MAX: u64 = if usize::BITS > 32 { 1 << 32 } else { 1 << 26 };

/// Sets up a [`MemoryLimiter`].
///
/// ```
/// use tower_ratelimit::limiter::memory::OnFull;
/// use tower_ratelimit::{MemoryLimiter, clock::ManualClock};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let clock = ManualClock::new();
/// let limiter = MemoryLimiter::builder()
///     .max_keys(100_000)
///     .on_full(OnFull::Deny)
///     .clock(clock.clone())
///     .build()?;
/// # let _ = limiter;
/// # Ok(()) }
/// ```
#[must_use]
pub struct MemoryLimiterBuilder {
    setup: Setup,
    /// The clock that was set. The default clock is made only if this is `None`, because a target without an
    /// operating system has no default clock.
    clock: Option<AnyClock>,
    snapshot: Option<Vec<u8>>,
}

impl MemoryLimiterBuilder {
    /// Sets the number of keys that the limiter is sure to hold: from 1 to 2^32, a million by default. The
    /// number of keys bounds the memory, see [`MemoryLimiter`]. On a 32-bit target the number is at most
    /// 2^22.
    ///
    /// The table has about two and a half slots for each key, and forgets no state before nearly all slots
    /// are in use. [`Occupancy::capacity`](crate::limiter::Occupancy::capacity) is the number of slots.
    pub fn max_keys(mut self, keys: usize) -> Self {
        self.setup.capacity = keys;
        self
    }

    /// Makes room for at least this number of dated entries, which all logs and sub-windows share:
    /// up to 2^32, 65,536 by default. The limiter always has room for at least 15 entries for each of its
    /// [`max_keys`](Self::max_keys). More entries take more memory: 21.3 bytes each. On a 32-bit target the number
    /// is at most 2^26. A larger number counts as the maximum.
    ///
    /// A single key may use all entries. The limiter does [not support](crate::limiter::Limiter::supports) a quota
    /// under which one key may need more entries than the limiter has. A log needs one entry for each unit of its
    /// limit, and a sliding window needs one for each bucket and two more.
    pub fn min_entries(mut self, entries: usize) -> Self {
        self.setup.entries = entries;
        self
    }

    /// Sets what happens to a new key when the table is full.
    pub fn on_full(mut self, on_full: OnFull) -> Self {
        self.setup.on_full = on_full;
        self
    }

    /// Reads this clock instead of the [system's](crate::clock::SystemClock).
    ///
    /// The limiter's time reaches from 1970 to the end of the year 2149. If the clock shows a later time, the
    /// limiter's time stands still.
    pub fn clock(mut self, clock: impl Clock + 'static) -> Self {
        self.clock = Some(AnyClock::Other(Arc::new(clock)));
        self
    }

    /// Adds an observer. The limiter reports to this observer each key that it forgets or denies for lack of
    /// room. The observers of [layers](crate::RateLimitLayer::observer) get these reports anyway.
    pub fn observer(self, observer: impl Observer + 'static) -> Self {
        self.setup.observers.add(&(Arc::new(observer) as Arc<dyn Observer>));
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
    /// Returns an error if [`max_keys`](Self::max_keys) is out of range, or the snapshot cannot be read.
    pub fn build(self) -> Result<MemoryLimiter, ConfigError> {
        let Self { setup, clock, snapshot } = self;
        if setup.capacity == 0 || setup.capacity as u64 > CAPACITY_MAX {
            return Err(ConfigError::new(
                ConfigErrorKind::Range,
                format!("max_keys of {} is not possible: use 1 to {CAPACITY_MAX}", setup.capacity),
            ));
        }
        let entries = usize::try_from(ENTRIES_MAX).map_or(setup.entries, |most| setup.entries.min(most));
        let snapshot = snapshot.as_deref().map(Snapshot::read).transpose()?;
        let seeds = snapshot.as_ref().map_or_else(random_seeds, |snapshot| snapshot.seeds);
        let states = States::new(Setup { entries, ..setup }, clock.unwrap_or_default(), seeds);
        if let Some(snapshot) = snapshot {
            snapshot.fill(&states);
        }
        Ok(MemoryLimiter(Arc::new(states)))
    }
}

/// Returns two random seeds, drawn from the system like those of the standard library's hash maps.
fn random_seeds() -> [u64; 2] {
    [(); 2].map(|()| RandomState::new().hash_one(0_u64))
}

impl MemoryLimiter {
    /// Makes a limiter for a million keys.
    #[must_use]
    pub fn new() -> Self {
        Self(Arc::new(States::new(Setup::default(), AnyClock::default(), random_seeds())))
    }

    /// Sets up a limiter.
    pub fn builder() -> MemoryLimiterBuilder {
        MemoryLimiterBuilder { setup: Setup::default(), clock: None, snapshot: None }
    }
}

impl Default for MemoryLimiter {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryLimiterBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryLimiterBuilder")
            .field("max_keys", &self.setup.capacity)
            .field("min_entries", &self.setup.entries)
            .field("on_full", &self.setup.on_full)
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, not(ratelimit_loom)))]
mod tests {
    use super::*;

    #[test]
    fn builder_makes_no_clock_of_its_own() {
        assert!(MemoryLimiter::builder().max_keys(1).clock.is_none(), "some targets have none");
    }
}
