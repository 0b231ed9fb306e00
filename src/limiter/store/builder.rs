//! The setup of a limiter over a store.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use foldhash::quality::RandomState;
use tokio::runtime::Handle;

use super::Store;
use super::checks::Checks;
use super::error::StoreError;
use super::groups::Groups;
use super::limiter::StoreLimiter;
use super::store_time::StoreTime;
use super::swapper::Swapper;
use crate::clock::{Clock, MonotonicClock};
use crate::event::StoreErrorKind;
use crate::limiter::PolicyRegistry;
use crate::limiter::queue_refunds::QueueRefunds;
use crate::limiter::remote::{CallerHash, DENIALS_MAX, DenialCache, Events, Tags};
use crate::outcome::Observer;

/// The longest prefix of keys, in bytes.
const PREFIX_MAX: usize = 128;

/// Sets up a [`StoreLimiter`].
#[must_use]
pub struct StoreLimiterBuilder {
    prefix: String,
    key_secret: [u8; 16],
    deadline: Duration,
    max_in_flight: usize,
    max_denials: usize,
    clock: Option<Arc<dyn Clock>>,
    observers: Vec<Arc<dyn Observer>>,
}

impl<S: Store> StoreLimiter<S> {
    /// Makes a limiter with the default setup. See [`StoreLimiterBuilder::build`].
    ///
    /// # Errors
    /// Returns an error if there is no tokio runtime.
    pub fn new(store: S) -> Result<Self, StoreError> {
        StoreLimiterBuilder::new().build(store)
    }
}

impl StoreLimiterBuilder {
    /// Begins the setup of a limiter.
    pub fn new() -> Self {
        Self {
            prefix: "ratelimit".to_owned(),
            key_secret: [0; 16],
            deadline: Duration::from_millis(50),
            max_in_flight: 1_024,
            max_denials: 4_096,
            clock: None,
            observers: Vec::new(),
        }
    }

    /// Sets what every key in the store begins with: 1 to 128 printable ASCII characters without blanks, `ratelimit`
    /// by default. Limiters with the same prefix share their states. So two applications on one store that both keep
    /// the default share the limits of policies of the same name.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Sets the secret with which callers' keys are hashed. All processes need the same secret. With another one every
    /// key has its whole quota once more.
    ///
    /// Callers' keys (API keys, tokens, addresses) are stored as a hash even without a secret: 128 bits of SHA-256. But
    /// without a secret a person who reads the store can try whether a guessable key, such as an address or a user's
    /// name, has a state.
    pub fn key_secret(mut self, secret: [u8; 16]) -> Self {
        self.key_secret = secret;
        self
    }

    /// Sets how long a check may take, from 1 ms to 60 s; 50 ms by default. A check that takes longer fails at most
    /// 20 ms later. Its charge may or may not have been taken.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Sets how many checks may wait for an answer at a time: at least 1, and 1,024 by default. A further check fails
    /// at once as [`Overloaded`](StoreErrorKind::Overloaded). The same number of refunds may wait. A further refund is
    /// not sent: its units return as they drain.
    pub fn max_in_flight(mut self, checks: usize) -> Self {
        self.max_in_flight = checks;
        self
    }

    /// Sets how many denials are remembered, at about 200 bytes each: from 0 to 1,048,576, and 4,096 by default. A key
    /// that was denied is denied without the store until its wait is over, or a second has passed.
    pub fn max_denials(mut self, denials: usize) -> Self {
        self.max_denials = denials;
        self
    }

    /// Sets the clock whose time is used instead of the store's: for a manual clock in tests. All processes must then
    /// agree on the time.
    pub fn clock(mut self, clock: impl Clock + 'static) -> Self {
        self.clock = Some(Arc::new(clock));
        self
    }

    /// Adds an observer from the beginning. It gets an event when a check has ended, when the store stops answering,
    /// and when it answers again. The observers of [layers](crate::RateLimitLayer::observer) get them without that,
    /// from the layer's first service on.
    pub fn observer(mut self, observer: impl Observer + 'static) -> Self {
        self.observers.push(Arc::new(observer));
        self
    }

    /// Makes the limiter. The store is not asked yet.
    ///
    /// # Errors
    /// Returns an error if a setting is out of its range, or there is no tokio runtime.
    pub fn build<S: Store>(self, store: S) -> Result<StoreLimiter<S>, StoreError> {
        let misconfigured = |message: String| Err(StoreError::new(StoreErrorKind::Misconfigured, message));
        if !(1..=PREFIX_MAX).contains(&self.prefix.len()) || !self.prefix.bytes().all(|byte| byte.is_ascii_graphic()) {
            return misconfigured(format!(
                "{:?} cannot be a prefix of keys: use 1 to {PREFIX_MAX} printable ASCII characters without blanks",
                self.prefix
            ));
        }
        if !(Duration::from_millis(1)..=Duration::from_secs(60)).contains(&self.deadline) {
            return misconfigured(format!("a deadline of {:?} is not possible: use 1 ms to 60 s", self.deadline));
        }
        if self.max_in_flight == 0 {
            return misconfigured("with a max_in_flight of 0 every check would fail: use at least 1".to_owned());
        }
        if self.max_denials > DENIALS_MAX {
            let denials = self.max_denials;
            return misconfigured(format!("max_denials of {denials} is not possible: use at most {DENIALS_MAX}"));
        }
        let Ok(runtime) = Handle::try_current() else {
            return misconfigured("a limiter over a store must be made within a tokio runtime".to_owned());
        };
        let before = format!("{}:1:", self.prefix).into_boxed_str();
        let probe = format!("{before}probe").into();
        let events = Events::new(&self.observers);
        let swapper = Swapper::new(store, StoreTime::new(self.clock), events, self.deadline, probe, runtime.clone());
        let tags = Tags::default();
        Ok(StoreLimiter(Arc::new(Checks {
            groups: Groups::new(swapper, self.max_in_flight, self.deadline, runtime),
            before,
            callers: CallerHash::new(self.key_secret),
            hash: RandomState::default(),
            denials: DenialCache::new(self.max_denials, tags.clone(), Arc::new(MonotonicClock::new())),
            tags,
            queue_refunds: QueueRefunds::new(),
            registry: PolicyRegistry::new(),
        })))
    }
}

impl Default for StoreLimiterBuilder {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for StoreLimiterBuilder {
    /// Leaves the secret out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreLimiterBuilder")
            .field("prefix", &self.prefix)
            .field("deadline", &self.deadline)
            .field("max_in_flight", &self.max_in_flight)
            .field("max_denials", &self.max_denials)
            .finish_non_exhaustive()
    }
}
