//! The setup of a limiter on Redis.

use std::fmt;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::runtime::Handle;

use super::dispatch::Dispatcher;
use super::error::RedisError;
use super::keys::{CallerKeys, KeySpace, SLOTS};
use super::limiter::{Inner, RedisLimiter};
use super::store::{RedisStore, Settings};
use crate::clock::{Clock, MonotonicClock};
use crate::event::StoreErrorKind;
use crate::limiter::PolicyRegistry;
use crate::limiter::queue_refunds::QueueRefunds;
use crate::limiter::remote::{Batcher, DENIALS_MAX, DenialCache, HELD, Holdings, Leases, Tags};
use crate::outcome::Observer;

/// The time that `connect` waits for the first connection, and then for the answer which rights the user
/// has.
const FIRST: Duration = Duration::from_millis(500);

/// The times after which places may lapse. `places.lua` knows the longest, too.
const PLACES_LAPSE: RangeInclusive<Duration> = Duration::from_secs(3)..=Duration::from_secs(24 * 3_600);

/// The number of times within that time at which renewals are looked for.
const PLACES_LOOKS: u32 = 30;

/// Sets up a [`RedisLimiter`].
#[must_use]
pub struct RedisLimiterBuilder {
    prefix: String,
    key_secret: [u8; 16],
    readable_keys: bool,
    slot_groups: Option<u16>,
    deadline: Duration,
    max_in_flight: usize,
    max_denials: usize,
    lease_units: u64,
    places_lapse_after: Duration,
    clock: Option<Arc<dyn Clock>>,
    observers: Vec<Arc<dyn Observer>>,
}

impl RedisLimiter {
    /// Connects with the default setup to `redis://`, `rediss://`, `redis-cluster://` or
    /// `redis-sentinel://`. See [`RedisLimiterBuilder::connect`].
    ///
    /// # Errors
    /// Returns an error if the URL is not valid, or the server refuses what is needed. A server
    /// that is not up yet is no error.
    pub async fn connect(url: &str) -> Result<Self, RedisError> {
        Self::builder().connect(url).await
    }

    /// Begins the setup of a limiter.
    pub fn builder() -> RedisLimiterBuilder {
        RedisLimiterBuilder::new()
    }
}

impl RedisLimiterBuilder {
    fn new() -> Self {
        Self {
            prefix: "ratelimit".to_owned(),
            key_secret: [0; 16],
            readable_keys: false,
            slot_groups: None,
            deadline: Settings::default().deadline,
            max_in_flight: 1_024,
            max_denials: 4_096,
            lease_units: 0,
            places_lapse_after: Duration::from_secs(30),
            clock: None,
            observers: Vec::new(),
        }
    }

    /// Sets what every stored key begins with: 1 to 128 bytes without braces, `ratelimit` by
    /// default. Limiters with the same prefix share their states. So two applications on one Redis
    /// that both keep the default share the limits of policies of the same name.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Sets the secret with which callers' keys are hashed. All processes need the same secret.
    /// With another one every key has its whole quota once more.
    ///
    /// Callers' keys (API keys, tokens, addresses) are stored as a hash even without a secret: 128
    /// bits of SHA-256, so that an attacker cannot make a key with the hash of another caller's.
    /// But without a secret a person who reads Redis can try whether a guessable key, such as an
    /// address or a user's name, has a state.
    pub fn key_secret(mut self, secret: [u8; 16]) -> Self {
        self.key_secret = secret;
        self
    }

    /// Stores callers' keys as they are, to be read with `redis-cli` while debugging. **Everyone
    /// who can read Redis, its backups or its slow log can then read the keys**: do not use this if
    /// a key is an API key, a token or a cookie. All processes need the same choice. Keys of more
    /// than 128 bytes, or with a `}`, are still hashed, without the [secret](Self::key_secret). By
    /// default all keys are hashed.
    pub fn readable_keys(mut self, readable: bool) -> Self {
        self.readable_keys = readable;
        self
    }

    /// Sets into how many groups a cluster's callers are put, from 1 to 16,384. The callers of a
    /// group share a slot, and the slots of the groups are spread evenly. By default each caller
    /// has a slot of its own.
    ///
    /// Checks of one slot go together in one call, so fewer groups mean fuller calls. That pays if
    /// several checks of each group are in flight at a time. Use several groups for each master.
    /// All processes need the same number. With another one every key has its whole quota once
    /// more. The setting has no effect on one server.
    pub fn slot_groups(mut self, groups: u16) -> Self {
        self.slot_groups = Some(groups);
        self
    }

    /// Sets how long a check may take, from 1 ms to 60 s; 50 ms by default. A check that takes
    /// longer fails at most 20 ms later. Its charge may or may not have been taken.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Sets how many checks may wait for an answer at a time: at least 1, and 1,024 by default. A further check
    /// fails at once as [`Overloaded`](StoreErrorKind::Overloaded). The same number of refunds may
    /// wait. A further refund is not sent: its units return as they drain.
    pub fn max_in_flight(mut self, checks: usize) -> Self {
        self.max_in_flight = checks;
        self
    }

    /// Sets how many denials are remembered, at about 200 bytes each: from 0 to 1,048,576, and 4,096 by
    /// default.
    /// A key that Redis has denied is denied here until its wait is over, or a second has passed.
    /// So a caller that has to wait for longer than a second costs one call a second. If waits are
    /// some milliseconds, most checks of a denied key are still calls. A denial for which there is
    /// no room replaces an older one, whose key then costs a call again.
    ///
    /// Charges of a set that has one [on refusal](crate::limiter::Effect::OnRefusal), for a block
    /// or a meter, go to Redis each time, and are not leased either.
    pub fn max_denials(mut self, denials: usize) -> Self {
        self.max_denials = denials;
        self
    }

    /// Lets this process lease up to `units` units of a hot key: take them at once and hand them out by
    /// itself. By default it is 0, and nothing is leased. Up to 1,024 keys are leased at a time. Checks
    /// of other keys are calls.
    ///
    /// The total is never exceeded. The price is precision:
    ///
    /// * With `n` processes, the units admitted in any interval are at most the quota's bound plus
    ///   `n · units`, because units that were leased before the interval may be used in it.
    /// * Up to `units` are denied to other processes, for up to 0.1 s. Then unused units are refunded.
    /// * `remaining` is the number that this process last saw.
    /// * If a process ends, drops the limiter or loses Redis, the units that it holds are not refunded.
    ///   They return as they drain.
    pub fn lease_units(mut self, units: u64) -> Self {
        self.lease_units = units;
        self
    }

    /// Sets after which time the places of this process are free again if it does not renew them, from 3 s to 24 h; 30 s
    /// by default. It concerns [concurrency limits](crate::Quota::concurrent) only.
    ///
    /// A process renews its places three times in this time. So the time should be longer than what a failover of Redis
    /// takes. The places of a process that was killed are held until it has passed.
    pub fn places_lapse_after(mut self, time: Duration) -> Self {
        self.places_lapse_after = time;
        self
    }

    /// Sets the clock whose time the scripts use instead of the server's: for a manual clock in
    /// tests, and for servers that do not let scripts read the time. All processes must then agree
    /// on the time.
    pub fn clock(mut self, clock: impl Clock + 'static) -> Self {
        self.clock = Some(Arc::new(clock));
        self
    }

    /// Adds an observer from the beginning. It gets an event when a check has ended, when Redis stops answering,
    /// when it answers again, and when it refuses a command. The observers of
    /// [layers](crate::RateLimitLayer::observer) get them without that, from the layer's first service on.
    pub fn observer(mut self, observer: impl Observer + 'static) -> Self {
        self.observers.push(Arc::new(observer));
        self
    }

    /// Connects to `redis://`, `rediss://`, `redis-cluster://` or `redis-sentinel://`.
    ///
    /// It waits at most half a second for the first connection, and then at most half a second to check
    /// that the server's user has the rights that the script needs. If Redis is not up yet, checks fail until it is.
    ///
    /// # Errors
    /// Returns an error if the URL or the setup is not valid, the server refuses the password, the
    /// user lacks a right that checks need (the error names it), or there is no tokio runtime. A
    /// server that is away, is loading, or has as many clients as it may have is no error: checks
    /// fail until it can serve them.
    pub async fn connect(self, url: &str) -> Result<RedisLimiter, RedisError> {
        let store = RedisStore::connect(url, self.settings()?)?;
        let there = store.wait_until_ready(FIRST).await;
        let limiter = self.build(store)?;
        let looked = match there {
            Ok(()) => limiter.check_rights(FIRST).await,
            Err(error) => Err(error),
        };
        match looked {
            Err(error) if error.kind() == StoreErrorKind::Misconfigured => Err(error),
            _ => Ok(limiter), // it is up, or will be found once it is
        }
    }

    fn settings(&self) -> Result<Settings, RedisError> {
        let misconfigured = |message: String| Err(RedisError::new(StoreErrorKind::Misconfigured, message));
        if !(Duration::from_millis(1)..=Duration::from_secs(60)).contains(&self.deadline) {
            return misconfigured(format!("a deadline of {:?} is not possible: from 1 ms to 60 s", self.deadline));
        }
        if self.max_in_flight == 0 {
            return misconfigured("with a max_in_flight of 0 every check would fail: use at least 1".to_owned());
        }
        if self.max_denials > DENIALS_MAX {
            return misconfigured(format!(
                "max_denials of {} is not possible: use at most {DENIALS_MAX}",
                self.max_denials
            ));
        }
        if !PLACES_LAPSE.contains(&self.places_lapse_after) {
            return misconfigured(format!(
                "places_lapse_after of {:?} is not possible: from 3 s to 24 h",
                self.places_lapse_after
            ));
        }
        runtime()?;
        Ok(Settings { deadline: self.deadline, observers: self.observers.clone(), ..Settings::default() })
    }

    fn build(self, store: RedisStore) -> Result<RedisLimiter, RedisError> {
        let in_slots = store.is_cluster();
        let groups = if in_slots { self.slot_groups } else { None };
        let callers = if self.readable_keys { CallerKeys::Readable } else { CallerKeys::Hashed(self.key_secret) };
        let space = KeySpace::new(&self.prefix, callers, groups)?;
        let tags = Tags::default();
        let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::new());
        let leases =
            (self.lease_units > 0).then(|| Arc::new(Leases::new(self.lease_units, tags.clone(), Arc::clone(&clock))));
        let dispatcher = Dispatcher {
            store,
            clock: self.clock,
            calls: AtomicU64::new(0),
            #[cfg(test)]
            splits: Default::default(),
        };
        let inner = Arc::new(Inner {
            // Each slot of a cluster is a lane.
            batcher: Batcher::new(
                dispatcher,
                if in_slots { SLOTS } else { 1 },
                self.max_in_flight,
                self.deadline,
                runtime()?,
            ),
            space,
            denials: DenialCache::new(self.max_denials, tags.clone(), Arc::clone(&clock)),
            holdings: Arc::new(Holdings::new(self.places_lapse_after, clock)),
            is_closed: AtomicBool::new(false),
            tags,
            leases,
            queue_refunds: QueueRefunds::new(),
            registry: PolicyRegistry::new(),
            in_slots,
        });
        if inner.leases.is_some() {
            tokio::spawn(refund_leases(Arc::downgrade(&inner)));
        }
        tokio::spawn(renew_places(Arc::downgrade(&inner)));
        Ok(RedisLimiter(inner))
    }
}

/// Returns the runtime in which the limiter works.
fn runtime() -> Result<Handle, RedisError> {
    let message = "a limiter on Redis must be made within a tokio runtime, where its tasks run";
    Handle::try_current().map_err(|_| RedisError::new(StoreErrorKind::Misconfigured, message))
}

/// Refunds the remaining units of leases that are over, until the limiter is dropped.
async fn refund_leases(limiter: Weak<Inner>) {
    let mut ticks = tokio::time::interval(HELD / 2);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Some(inner) = limiter.upgrade() else { return };
        if let Some(leases) = &inner.leases {
            let over = leases.end_expired();
            if !over.is_empty() {
                inner.give_back(over);
            }
        }
    }
}

/// Renews what this process holds of concurrency limits, until the limiter is dropped.
async fn renew_places(limiter: Weak<Inner>) {
    let Some(lapse) = limiter.upgrade().map(|inner| inner.holdings.lapse()) else { return };
    let mut ticks = tokio::time::interval(lapse / PLACES_LOOKS);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Some(inner) = limiter.upgrade() else { return };
        inner.renew().await;
    }
}

impl fmt::Debug for RedisLimiterBuilder {
    /// Leaves the secret out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisLimiterBuilder")
            .field("prefix", &self.prefix)
            .field("readable_keys", &self.readable_keys)
            .field("slot_groups", &self.slot_groups)
            .field("deadline", &self.deadline)
            .field("max_in_flight", &self.max_in_flight)
            .field("max_denials", &self.max_denials)
            .field("lease_units", &self.lease_units)
            .field("places_lapse_after", &self.places_lapse_after)
            .finish_non_exhaustive()
    }
}
