//! The setup of a limiter on Redis.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use tokio::runtime::Handle;

use super::backend::RedisBackend;
use super::client::RedisClient;
use super::connection::{ConnectionSettings, Identity, Pem, RedisConnections, SERVERS};
use super::credentials::{CredentialSource, RedisCredentials};
use super::dispatch::Dispatcher;
use super::error::RedisError;
use super::keys::{CallerKeys, KeySpace, SLOTS};
use super::limiter::RedisLimiter;
use super::wire;
use crate::event::StoreErrorKind;
use crate::limiter::remote::{Checks, Flights, Options, shared_options};

/// How long `connect` waits for the first connection to a server that refuses connections.
const FIRST: Duration = Duration::from_millis(500);

/// `connect` waits for four deadlines, but at least and at most these times, for the first connection to a server
/// that may be far. To measure round trips and to check the user's rights may each take the same time again.
const FAR: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(5));

/// Sets up a [`RedisLimiter`].
#[must_use]
pub struct RedisLimiterBuilder {
    shared: Options,
    client: RedisClient,
    credentials: Option<CredentialSource>,
    pem: Pem,
    readable_keys: bool,
    slot_groups: Option<u16>,
    lease_units: u64,
}

impl RedisLimiter {
    /// Connects with the default setup to the servers of a URL, such as `redis://127.0.0.1:6379`. See
    /// [`RedisLimiterBuilder::connect`].
    ///
    /// # Errors
    /// Returns an error if the URL is not valid, the server refuses the password, or the user lacks a right
    /// that checks need. A server that is not up yet is not an error.
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
            shared: Options::new(),
            client: RedisClient::default(),
            credentials: None,
            pem: Pem::default(),
            readable_keys: false,
            slot_groups: None,
            lease_units: 0,
        }
    }

    /// Sets the client library. By default the library is fred if the feature `fred` is enabled. The guide
    /// says [where the two libraries differ](crate::guide::redis_and_failures#the-client-library).
    pub fn client(mut self, client: RedisClient) -> Self {
        self.client = client;
        self
    }

    /// Sets the closure that returns the user and the password of each connection. The closure is for passwords
    /// that change while the process runs, such as tokens of a cloud's identity service. With a closure, the
    /// URL must have no user and no password.
    ///
    /// The limiter calls the closure for each attempt to connect to a server, and has a connection to each server of
    /// a cluster. While a server is away, there are about four attempts a second. The closure has 5 s to answer. If
    /// the credentials of a connection have a [time to renew](RedisCredentials::renew_after), the limiter calls the
    /// closure again after that time, and sends the newer credentials with `AUTH`. If there are no newer credentials,
    /// or the server refuses them, the observers get [`StoreFailed`](crate::observe::LimiterEvent::StoreFailed), and
    /// the limiter calls the closure again 5 s later.
    ///
    /// An error of the closure is reported in the same way as a connection that could not be made. Events and errors
    /// contain the text of the closure's error, so the text must not contain a secret. A closure for credentials is
    /// not possible with `redis-sentinel://`.
    ///
    /// ```no_run
    /// use std::time::Duration;
    /// use tower_ratelimit::{RedisLimiter, limiter::redis::RedisCredentials};
    ///
    /// # async fn token() -> Result<String, std::io::Error> { Ok(String::new()) }
    /// # async fn limiter() -> Result<(), Box<dyn std::error::Error>> {
    /// let builder = RedisLimiter::builder().credentials(|| async {
    ///     let token = token().await?; // valid for 15 minutes
    ///     Ok::<_, std::io::Error>(
    ///         RedisCredentials::new("shop", token).renew_after(Duration::from_secs(600)),
    ///     )
    /// });
    /// let limiter = builder.connect("rediss://cache.example:6379").await?;
    /// # Ok(()) }
    /// ```
    pub fn credentials<F, A, E>(mut self, ask: F) -> Self
    where
        F: Fn() -> A + Send + Sync + 'static,
        A: Future<Output = Result<RedisCredentials, E>> + Send + 'static,
        E: Into<Box<dyn Error + Send + Sync>>,
    {
        self.credentials = Some(CredentialSource::new(ask));
        self
    }

    /// Sets the certificates of the authorities that are trusted with `rediss://`, as PEM. These certificates
    /// replace those of the system. The server's certificate must be signed by one of these authorities, and be
    /// valid for the host of the URL. This setting needs TLS with rustls: one of the features `fred-rustls`,
    /// `fred-rustls-ring`, `redis-rs-rustls`, `redis-rs-rustls-ring`.
    ///
    /// ```no_run
    /// use tower_ratelimit::RedisLimiter;
    ///
    /// # async fn limiter() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = RedisLimiter::builder()
    ///     .tls_authorities(std::fs::read("/etc/shop/authority.pem")?)
    ///     .tls_identity(
    ///         std::fs::read("/etc/shop/client.pem")?,
    ///         std::fs::read("/etc/shop/client.key")?,
    ///     )
    ///     .connect("rediss://redis.internal:6379")
    ///     .await?;
    /// # Ok(()) }
    /// ```
    pub fn tls_authorities(mut self, certificates: impl Into<Vec<u8>>) -> Self {
        self.pem.authorities = Some(certificates.into());
        self
    }

    /// Sets the limiter's own certificate and its private key, as PEM. The limiter shows the certificate to servers
    /// that ask for one. `certificates` begins with this certificate. The intermediate certificates between
    /// this certificate and the authority follow. The key has the format PKCS #8, PKCS #1 or SEC 1, without a
    /// password. This setting needs [`tls_authorities`](Self::tls_authorities).
    pub fn tls_identity(mut self, certificates: impl Into<Vec<u8>>, key: impl Into<Vec<u8>>) -> Self {
        self.pem.identity = Some(Identity { certificates: certificates.into(), key: key.into() });
        self
    }

    /// Stores callers' keys as they are, to be read with `redis-cli` while debugging. **Everyone who can read
    /// Redis, its backups or its slow log can then read the keys**: do not use this if a key is an API key, a
    /// token or a cookie. All processes need the same setting. Keys of more than 128 bytes, or with a `}`, are still
    /// hashed, but without the [secret](Self::key_secret). By default all keys are hashed.
    pub fn readable_keys(mut self, readable: bool) -> Self {
        self.readable_keys = readable;
        self
    }

    /// Sets the number of groups into which the callers of a cluster are put, from 1 to 16,384. The callers
    /// of a group share a slot, and the slots of the groups are spread evenly. By default each caller has a
    /// slot of its own.
    ///
    /// Checks of one slot share calls, so with fewer groups, more checks share each call. Fewer groups pay
    /// off if several checks of each group are in flight at a time. Use several groups for each master. All
    /// processes need the same number of groups. A process with another number gives every key its whole quota once
    /// more. The setting has no effect with a single server.
    pub fn slot_groups(mut self, groups: u16) -> Self {
        self.slot_groups = Some(groups);
        self
    }

    /// Lets this process lease up to `units` units of a hot key: the process takes the units in one call and hands
    /// them out without asking Redis. By default `units` is 0, and nothing is leased. Up to 1,024 keys are leased at
    /// a time. Checks of other keys need calls to Redis.
    ///
    /// Leased units are charged before they are used, so none is handed out twice. The price is precision:
    ///
    /// * With `n` processes, the units admitted in any interval are at most the quota's bound plus
    ///   `n · units`, because units that were leased before the interval may be used within the interval.
    /// * A set of charges is no longer atomic, but
    ///   [compensated](crate::limiter::Atomicity::Compensated).
    /// * Up to `units` units of a key are denied to other processes, for up to 0.1 s. After that time, unused
    ///   units are refunded.
    /// * `remaining` is the number of remaining units that this process saw last.
    /// * If a process ends, drops the limiter or loses Redis, the units that it holds are not refunded. Such units
    ///   come back with time, as used units do.
    pub fn lease_units(mut self, units: u64) -> Self {
        self.lease_units = units;
        self
    }

    /// Connects to one server, to a cluster, or to the master that sentinels name.
    ///
    /// | URL | leads to |
    /// |---|---|
    /// | `redis://user:password@host:6379/0` | one server, and the database of this number |
    /// | `redis-cluster://user:password@host:6379?node=host:port&node=host:port` | a cluster. One of its servers is enough; the others are asked for its map if the first is away |
    /// | `redis-sentinel://user:password@host:26379/0?sentinelServiceName=name&node=host:port` | the master that the sentinels know by this name. The hosts are sentinels; user, password and database are the master's |
    ///
    /// * With `rediss://`, `rediss-cluster://` and `rediss-sentinel://` all connections use TLS, which needs
    ///   [a feature](crate::guide::redis_and_failures#the-client-library).
    /// * The user, the password, the port of the first host, the database and `node` may be left out. In a
    ///   user and a password, percent-encode the characters that have a meaning in a URL: `p%40ss`.
    /// * Sentinels get no password, unless the URL has `sentinelPassword` and, for a user, `sentinelUsername`.
    /// * Another parameter is an error.
    ///
    /// `connect` waits half a second for a server that refuses connections, and up to two seconds for a server that
    /// may be far. If the [deadline](Self::deadline) is above half a second, the wait for a far server is up to four
    /// deadlines, but at most 5 s. Then `connect` checks that the server's user has the rights that the script needs.
    /// If Redis is not up yet, checks fail until it is.
    ///
    /// A server whose round trips take longer than the deadline is not an error, because a far server looks like a
    /// server that is slow at the moment. If a round trip takes more than half of the deadline, observers and the log
    /// get [`StoreFar`](crate::observe::LimiterEvent::StoreFar).
    ///
    /// # Errors
    /// Returns an error if the URL or the setup is not valid, the server refuses the password, the user lacks
    /// a right that checks need (the error names it), or there is no tokio runtime. A server that is away, is
    /// loading, or has reached its maximum of clients is not an error: checks fail until the server can serve
    /// them.
    pub async fn connect(self, url: &str) -> Result<RedisLimiter, RedisError> {
        let store = RedisConnections::connect(url, self.settings()?)?;
        self.start(store).await
    }

    /// Uses the application's own connection to one server, instead of opening a connection. This method
    /// needs the feature `redis-rs`.
    ///
    /// The connection comes from the crate `redis`, version 1. A `ConnectionManager` reconnects. After a
    /// `MultiplexedConnection` is lost, every check fails. A `Client` makes both. A check ends at the limiter's
    /// [deadline](Self::deadline), or earlier if the connection's own response timeout is shorter.
    /// [`client`](Self::client) has no effect, and [`close`](RedisLimiter::close) leaves the connection open.
    ///
    /// ```no_run
    /// use tower_ratelimit::RedisLimiter;
    ///
    /// # async fn limiter(client: redis::Client) -> Result<(), Box<dyn std::error::Error>> {
    /// let connection = client.get_multiplexed_async_connection().await?;
    /// let limiter = RedisLimiter::builder().prefix("shop").over(connection).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// A connection to a cluster is refused. The crate's `ClusterConnection` sends a command again after it has lost
    /// a connection, so a check could be charged twice. A `ClusterConnection` also does not report which slots are
    /// being moved, so a set of charges could not be split. Connect with `redis-cluster://` instead: the limiter then
    /// has a connection of its own to each master.
    ///
    /// # Errors
    /// Returns the errors of [`connect`](Self::connect), except those of the URL. Also returns an error if the server
    /// is part of a cluster, or if [`credentials`](Self::credentials) or certificates are set.
    #[cfg(feature = "redis-rs")]
    pub async fn over<C>(self, connection: C) -> Result<RedisLimiter, RedisError>
    where
        C: redis::aio::ConnectionLike + Clone + Send + Sync + 'static,
    {
        if self.credentials.is_some() || !self.pem.is_empty() {
            return Err(misconfigured(
                "the application makes this connection, and has to set its credentials and certificates",
            ));
        }
        let store = RedisConnections::over(connection, self.settings()?)?;
        self.start(store).await
    }

    /// Makes the limiter of a process in a simulation. The process uses the simulation's clock, and gives its calls
    /// numbers from `number` on.
    #[cfg(test)]
    pub(super) fn simulated(
        mut self,
        wire: super::tests::simulation::Wire,
        clock: impl crate::clock::Clock + 'static,
        number: u64,
    ) -> Result<RedisLimiter, RedisError> {
        self.shared.own_clock = std::sync::Arc::new(clock);
        let store = RedisConnections::simulated(wire, self.settings()?)?;
        let limiter = self.build(store)?;
        limiter.0.backend().flights.store().calls.store(number, std::sync::atomic::Ordering::Relaxed);
        Ok(limiter)
    }

    async fn start(self, store: RedisConnections) -> Result<RedisLimiter, RedisError> {
        let longest = (4 * self.shared.deadline).clamp(FAR.0, FAR.1);
        let mut there = store.wait_until_ready(FIRST).await;
        let is_open = there.as_ref().is_err_and(|error| error.kind() != StoreErrorKind::Misconfigured);
        if is_open && !store.is_dead() {
            there = store.wait_until_ready(longest - FIRST).await;
        }
        if there.is_ok() {
            store.measure_distance(longest).await;
        }
        let limiter = self.build(store)?;
        let looked = match there {
            Ok(()) => limiter.check_rights(longest).await,
            Err(error) => Err(error),
        };
        match looked {
            Err(error) if error.kind() == StoreErrorKind::Misconfigured => Err(error),
            _ => Ok(limiter), // it is up, or will be found once it is
        }
    }

    fn settings(&self) -> Result<ConnectionSettings, RedisError> {
        self.shared.check().map_err(misconfigured)?;
        runtime()?;
        let (deadline, observers) = (self.shared.deadline, self.shared.observers.clone());
        let (client, credentials, pem) = (self.client, self.credentials.clone(), self.pem.clone());
        let probe = wire::probe();
        Ok(ConnectionSettings { client, credentials, pem, probe, deadline, observers, ..ConnectionSettings::default() })
    }

    fn build(self, store: RedisConnections) -> Result<RedisLimiter, RedisError> {
        let in_slots = store.is_cluster();
        let groups = if in_slots { self.slot_groups } else { None };
        let Options {
            prefix,
            key_secret,
            deadline,
            max_in_flight,
            max_denials,
            places_lapse_after,
            clock,
            own_clock,
            ..
        } = self.shared;
        let callers = if self.readable_keys { CallerKeys::Readable } else { CallerKeys::Hashed(key_secret) };
        let space = KeySpace::new(&prefix, callers, groups)?;
        let dispatcher = Dispatcher {
            store,
            clock,
            calls: AtomicU64::new(0),
            #[cfg(test)]
            splits: Default::default(),
        };
        let lanes = if in_slots { (SLOTS, SERVERS) } else { (1, 1) }; // each slot of a cluster is a lane
        let flights = Flights::new(dispatcher, lanes, max_in_flight, deadline, runtime()?);
        let backend = RedisBackend { flights, space, in_slots };
        Ok(RedisLimiter(Checks::new(backend, max_denials, self.lease_units, places_lapse_after, own_clock)))
    }
}

shared_options!(RedisLimiterBuilder);

/// Returns the runtime in which the limiter works.
fn runtime() -> Result<Handle, RedisError> {
    let message = "a limiter on Redis must be made within a tokio runtime, where its tasks run";
    Handle::try_current().map_err(|_| misconfigured(message))
}

fn misconfigured(message: impl Into<String>) -> RedisError {
    RedisError::new(StoreErrorKind::Misconfigured, message)
}

impl fmt::Debug for RedisLimiterBuilder {
    /// Leaves the secret out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisLimiterBuilder")
            .field("shared", &self.shared)
            .field("client", &self.client)
            .field("has_credentials", &self.credentials.is_some())
            .field("readable_keys", &self.readable_keys)
            .field("slot_groups", &self.slot_groups)
            .field("lease_units", &self.lease_units)
            .finish_non_exhaustive()
    }
}
