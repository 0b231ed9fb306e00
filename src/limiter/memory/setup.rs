//! The settings of a limiter, which its builder collects.

use std::sync::Arc;

use crate::clock::{Clock, SystemClock};
use crate::error::labelled;
use crate::limiter::observers::Observers;

/// The number of keys by default.
const KEYS: usize = 1_000_000;

/// The least number of entries by default. A limiter for few keys may need many entries for one key.
const ENTRIES_MIN: usize = 1 << 16;

labelled! {
    /// Says what happens to a new key when all slots that the key may use hold live states.
    #[derive(Default)]
    OnFull,
    /// Returns the label for files.
    as_str {
        /// Forgets one of the keys in these slots: the key that has used the smallest part of its quota. If
        /// all these keys are out of allowance, the limiter forgets the key whose state expires first. A
        /// closed [block](crate::quota::Quota::block) is forgotten only if all these keys are closed blocks.
        #[default]
        Evict = "evict",
        /// Denies the new key, and reports a wait of one second.
        ///
        /// In a flood of new keys, the check of a key takes about three times as long as with
        /// [`Evict`](Self::Evict). Before the limiter denies a key, it searches other cache lines for a slot to
        /// which it can move another key.
        Deny = "deny",
    }
}

/// The clock that a limiter reads. The enum has a tag of its own, because a tag in a niche of a clock's fields
/// takes longer to read.
#[repr(u8)]
pub(super) enum AnyClock {
    System(SystemClock),
    Other(Arc<dyn Clock>),
}

impl Default for AnyClock {
    fn default() -> Self {
        Self::System(SystemClock::new())
    }
}

impl AnyClock {
    #[inline(always)] // it would be a call in the usual charge (benches/instructions)
    pub(super) fn now_us(&self) -> u64 {
        match self {
            Self::System(clock) => clock.now(),
            Self::Other(clock) => clock.now(),
        }
        .as_micros()
    }

    /// Returns a clock that shows the same time.
    pub(super) fn share(&self) -> Arc<dyn Clock> {
        match self {
            Self::System(clock) => Arc::new(clock.clone()),
            Self::Other(clock) => Arc::clone(clock),
        }
    }

    pub(super) fn now_us_in_order(&self) -> u64 {
        match self {
            Self::System(clock) => clock.now_in_order().as_micros(),
            Self::Other(_) => self.now_us(),
        }
    }
}

/// The settings of a limiter; its builder describes each.
pub(super) struct Setup {
    pub(super) capacity: usize,
    pub(super) entries: usize,
    pub(super) on_full: OnFull,
    pub(super) observers: Observers,
}

impl Default for Setup {
    fn default() -> Self {
        Self { capacity: KEYS, entries: ENTRIES_MIN, on_full: OnFull::Evict, observers: Observers::default() }
    }
}
