//! Setting up a limiter on Redis.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::carrier::Courier;
use super::denials::Denials;
use super::error::{RedisError, RedisErrorKind};
use super::keys::{CallerKeys, KeySpace};
use super::leases::{HELD, Leases};
use super::queue::Queue;
use super::store::{Client, Pool, Settings, Store};
use super::tag::Tags;
use super::{Inner, RedisLimiter};
use crate::clock::{Clock, MonotonicClock};
use crate::limiter::Roster;
use crate::outcome::Observer;

/// How long a check may take, unless told otherwise.
const DEADLINE: Duration = Duration::from_millis(50);

/// How long a first connection is waited for, and then the answer to the question which rights it has.
const FIRST: Duration = Duration::from_millis(500);

/// The slots of a cluster.
const SLOTS: u16 = 16_384;

/// Sets up a [`RedisLimiter`].
#[must_use]
pub struct RedisLimiterBuilder {
    prefix: String,
    callers: CallerKeys,
    groups: Option<u16>,
    deadline: Duration,
    in_flight: usize,
    denials: usize,
    leases: u64,
    clock: Option<Arc<dyn Clock>>,
    observer: Option<Arc<dyn Observer>>,
}

impl RedisLimiterBuilder {
    pub(super) fn new() -> Self {
        Self {
            prefix: "ratelimit".to_owned(),
            callers: CallerKeys::Hashed(Default::default()),
            groups: None,
            deadline: DEADLINE,
            in_flight: 1_024,
            denials: 4_096,
            leases: 0,
            clock: None,
            observer: None,
        }
    }

    /// Sets what every stored key begins with; `ratelimit` by default. Limiters with the same prefix share their states: two
    /// applications on one Redis that both keep the default share the limits of policies of the same name.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Hashes callers' keys with this secret. All processes need the same secret; with another one all states begin anew.
    ///
    /// Callers' keys (API keys, tokens, addresses) are stored as a hash in any case: 128 bits of SHA-256, so that no key can be
    /// made that has the hash of another caller's. Without a secret, someone who reads Redis can find out by trying whether a
    /// guessable key, such as an address or a user's name, has a state. With a secret they cannot.
    pub fn key_secret(mut self, secret: [u8; 16]) -> Self {
        self.callers = CallerKeys::Hashed(secret);
        self
    }

    /// Stores callers' keys as they are, to be read with `redis-cli` while debugging. **Everybody who may read Redis, its
    /// backups or its slow log then reads them**: do not use this where a key is an API key, a token or a cookie. All processes
    /// need the same choice. Keys of more than 128 bytes, or with a `}`, are hashed all the same.
    pub fn readable_keys(mut self) -> Self {
        self.callers = CallerKeys::Readable;
        self
    }

    /// In a cluster: lets callers share one of so many groups, whose slots are spread evenly, instead of a slot of their
    /// own each. Checks of one slot go together in one call, so fewer groups mean fuller calls: it pays when several checks
    /// of each group are in flight at a time, and there should be some groups for each master; 1 to 16,384. All processes
    /// need the same number; with another one all states begin anew. Has no effect on one server.
    pub fn groups(mut self, groups: u16) -> Self {
        self.groups = Some(groups);
        self
    }

    /// Sets how long a check may take, from 1 ms to 60 s; 50 ms by default. After that, and at most
    /// 20 ms later, it fails, and the charge may or may not have been taken.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Sets how many checks may wait for an answer at a time; 1,024 by default. One more fails at once, as
    /// [`Overloaded`](RedisErrorKind::Overloaded). As many refunds may wait besides; what one more would return drains by
    /// itself.
    pub fn max_in_flight(mut self, checks: usize) -> Self {
        self.in_flight = checks;
        self
    }

    /// Sets how many denials are remembered, at about 200 bytes each; 4,096 by default, 0 for none. A key that Redis has
    /// denied is denied here until its wait is over, or a second has passed. So a caller that has to wait for longer than a
    /// second costs one call a second; where waits are some milliseconds, most checks of a denied key are still calls. A denial
    /// for which there is no room takes the place of an older one, whose key then costs a call again.
    ///
    /// Charges of a set that has one [on refusal](crate::Effect::OnRefusal), for a block or a meter, are asked for each time,
    /// and are not leased either.
    pub fn denials(mut self, denials: usize) -> Self {
        self.denials = denials;
        self
    }

    /// Lets this process take up to so many units of a hot key at once and hand them out by itself; none by default. Up to
    /// 1,024 keys are leased at a time; checks of others are calls.
    ///
    /// The total is never exceeded. With `n` processes, what is admitted in any interval is at most the quota's bound and
    /// `n · units`, since units leased before may be used in it; and up to `units` are denied to other processes for up to
    /// 0.1 s, after which what is unused goes back. `remaining` is then what this process last saw. What a process holds
    /// when it ends, drops the limiter or loses Redis does not go back: it is there again once it has drained.
    pub fn leases(mut self, units: u64) -> Self {
        self.leases = units;
        self
    }

    /// Tells Redis the time of this clock instead of asking for its own: for a manual clock in tests, and for servers that
    /// do not let scripts read theirs. All processes must then agree on the time.
    pub fn clock(mut self, clock: impl Clock + 'static) -> Self {
        self.clock = Some(Arc::new(clock));
        self
    }

    /// Sets who sees when Redis goes away, comes back, or refuses what is needed.
    pub fn observer(mut self, observer: impl Observer + 'static) -> Self {
        self.observer = Some(Arc::new(observer));
        self
    }

    /// Connects to `redis://`, `rediss://`, `redis-cluster://` or `redis-sentinel://`, with the settings under which fred
    /// neither hangs nor repeats what may have run.
    ///
    /// It waits for the first connection, but no longer than half a second, and then as long at most to learn whether a right
    /// is missing: if Redis is not up yet, checks fail until it is.
    ///
    /// # Errors
    /// If the URL or the setup is not valid, the server refuses the password, the user lacks a right that checks need (the
    /// error names it), or there is no tokio runtime. A server that is away, is loading, or has as many clients as it may
    /// have is no error: checks fail until it can serve them.
    pub async fn connect(self, url: &str) -> Result<RedisLimiter, RedisError> {
        let store = Store::connect(url, self.settings()?)?;
        let there = store.connected(FIRST).await;
        let limiter = self.build(store)?;
        let looked = match there {
            Ok(()) => limiter.check_rights(FIRST).await,
            Err(error) => Err(error),
        };
        match looked {
            Err(error) if error.kind() == RedisErrorKind::Misconfigured => Err(error),
            _ => Ok(limiter), // up, or to be found when it is
        }
    }

    /// Uses a client of fred's of your own, which you have connected. Its settings are yours: without a reconnect policy
    /// fred does not come back after a lost connection. The deadline is kept whatever they are.
    ///
    /// Of a cluster it is weaker than [`connect`](Self::connect): fred reaches none of the servers while it looks for one
    /// that is away, and they are believed away or there together.
    ///
    /// # Errors
    /// If the setup means nothing, or there is no tokio runtime.
    pub fn fred_client(self, client: Client) -> Result<RedisLimiter, RedisError> {
        let store = Store::of_client(client, self.settings()?)?;
        self.build(store)
    }

    /// Uses a pool of fred's of your own; see [`fred_client`](Self::fred_client).
    ///
    /// # Errors
    /// If the setup means nothing, or there is no tokio runtime.
    pub fn fred_pool(self, pool: &Pool) -> Result<RedisLimiter, RedisError> {
        let store = Store::of_pool(pool, self.settings()?)?;
        self.build(store)
    }

    fn settings(&self) -> Result<Settings, RedisError> {
        let misconfigured = |message: String| Err(RedisError::new(RedisErrorKind::Misconfigured, message));
        if !(Duration::from_millis(1)..=Duration::from_secs(60)).contains(&self.deadline) {
            return misconfigured(format!("a deadline of {:?} is not possible: from 1 ms to 60 s", self.deadline));
        }
        if self.in_flight == 0 {
            return misconfigured("with a max_in_flight of 0 every check would fail: use at least 1".to_owned());
        }
        if tokio::runtime::Handle::try_current().is_err() {
            return misconfigured(
                "a limiter on Redis must be made within a tokio runtime, where its task runs".to_owned(),
            );
        }
        Ok(Settings { deadline: self.deadline, observer: self.observer.clone(), ..Settings::default() })
    }

    fn build(self, store: Store) -> Result<RedisLimiter, RedisError> {
        let in_slots = store.is_cluster();
        let groups = if in_slots { self.groups } else { None };
        let space = KeySpace::new(&self.prefix, self.callers, groups)?;
        let tags = Tags::default();
        let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::new());
        let leases = (self.leases > 0).then(|| Arc::new(Leases::new(self.leases, tags.clone(), Arc::clone(&clock))));
        let courier = Courier {
            store,
            clock: self.clock,
            #[cfg(test)]
            in_pieces: Default::default(),
        };
        let inner = Arc::new(Inner {
            queue: Queue::new(courier, if in_slots { SLOTS } else { 1 }, self.in_flight, self.deadline),
            space,
            denials: Denials::new(self.denials, tags.clone(), clock),
            tags,
            leases,
            roster: Roster::new(),
            in_slots,
        });
        if inner.leases.is_some() {
            tokio::spawn(give_back_what_is_over(Arc::downgrade(&inner)));
        }
        Ok(RedisLimiter(inner))
    }
}

/// Gives back what is left of leases, until the limiter is gone.
async fn give_back_what_is_over(limiter: Weak<Inner>) {
    let mut ticks = tokio::time::interval(HELD / 2);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Some(inner) = limiter.upgrade() else { return };
        if let Some(leases) = &inner.leases {
            let over = leases.over();
            if !over.is_empty() {
                inner.give_back(over);
            }
        }
    }
}

impl fmt::Debug for RedisLimiterBuilder {
    /// Without the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisLimiterBuilder")
            .field("prefix", &self.prefix)
            .field("readable_keys", &matches!(self.callers, CallerKeys::Readable))
            .field("groups", &self.groups)
            .field("deadline", &self.deadline)
            .field("max_in_flight", &self.in_flight)
            .field("denials", &self.denials)
            .field("leases", &self.leases)
            .finish_non_exhaustive()
    }
}
