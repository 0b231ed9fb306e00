//! The setup of a store in PostgreSQL.

use std::time::Duration;

use tokio::runtime::Handle;
use tokio_postgres::config::{Host, TargetSessionAttrs};
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};
use tokio_postgres::{Config, NoTls, Socket};

use super::connections::{Connections, OwnConnections, PING};
use super::store::PostgresStore;
use super::table::{Durability, PostgresTable};
use crate::event::StoreErrorKind;
use crate::limiter::store::StoreError;

/// The default number of connections, and the maximum.
const CONNECTIONS: usize = 10;
const CONNECTIONS_MAX: usize = 64;

/// The default time for which a statement waits for a lock, and the bounds of that time.
const LOCK_WAIT: Duration = Duration::from_millis(25);
const LOCK_WAIT_MIN: Duration = Duration::from_millis(1);
const LOCK_WAIT_MAX: Duration = Duration::from_secs(60);

/// The keep-alive settings of TCP: the time without traffic before the first probe, the time between probes and their
/// number, and the maximum time in which the server has to confirm sent data. Without these settings, a connection
/// that a firewall has dropped would seem open for hours.
const KEEPALIVE: Duration = Duration::from_secs(30);
const KEEPALIVE_AGAIN: (Duration, u32) = (Duration::from_secs(10), 3);
const UNCONFIRMED: Duration = Duration::from_secs(30);

/// The default of `Config::keepalives_idle`. The store treats this value as if the application had not set the
/// option.
const KEEPALIVE_UNSET: Duration = Duration::from_secs(2 * 3_600);

/// The longest time for connecting to a host, unless the configuration sets another time.
const REACH: Duration = Duration::from_secs(2);

/// Sets up a [`PostgresStore`].
#[derive(Clone, Debug)]
#[must_use]
pub struct PostgresStoreBuilder {
    table: String,
    created: Option<Durability>,
    max_connections: usize,
    max_lock_wait: Duration,
    ping_after: Duration,
}

impl PostgresStore {
    /// Begins the setup of a store.
    pub fn builder() -> PostgresStoreBuilder {
        PostgresStoreBuilder::new()
    }

    /// Connects with the default setup. See [`PostgresStoreBuilder::connect`].
    ///
    /// # Errors
    /// Returns the errors of [`PostgresStoreBuilder::connect`].
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        PostgresStoreBuilder::new().connect(url).await
    }
}

impl PostgresStoreBuilder {
    fn new() -> Self {
        Self {
            table: "ratelimit".to_owned(),
            created: None,
            max_connections: CONNECTIONS,
            max_lock_wait: LOCK_WAIT,
            ping_after: PING,
        }
    }

    /// Sets the name of the table: lowercase letters, digits and underscores, optionally after a schema and a dot;
    /// `ratelimit` by default.
    pub fn table(mut self, name: impl Into<String>) -> Self {
        self.table = name.into();
        self
    }

    /// Creates the table if it is missing. By default the table must exist. An existing table is not changed,
    /// whether it is logged or not.
    pub fn create_table(mut self, durability: Durability) -> Self {
        self.created = Some(durability);
        self
    }

    /// Sets how many connections the store uses at a time: 1 to 64, and 10 by default. The store opens a connection
    /// when all open connections are busy, and keeps the new connection open. If all connections are busy, checks
    /// wait, and up to 64 swaps share the next statement. So a few connections carry many checks.
    pub fn max_connections(mut self, connections: usize) -> Self {
        self.max_connections = connections;
        self
    }

    /// Sets how long a statement waits for a row that another transaction has locked: 1 ms to 60 s, and 25 ms by
    /// default, which is half of the default deadline of a limiter. After this time the statement fails as
    /// [`Contended`](StoreErrorKind::Contended), and its connection is free for other statements.
    pub fn max_lock_wait(mut self, time: Duration) -> Self {
        self.max_lock_wait = time;
        self
    }

    /// Sets the time after which idle connections are probed.
    #[cfg(test)]
    pub(super) fn ping_after(mut self, time: Duration) -> Self {
        self.ping_after = time;
        self
    }

    /// Returns the statement that creates the table, for your migrations.
    ///
    /// ```
    /// use tower_ratelimit::limiter::store::postgres::{Durability, PostgresStore};
    ///
    /// let sql = PostgresStore::builder().create_sql(Durability::Unlogged)?;
    /// assert!(sql.starts_with("CREATE UNLOGGED TABLE IF NOT EXISTS \"ratelimit\" ("));
    /// # Ok::<(), tower_ratelimit::limiter::store::StoreError>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if a setting is out of its range.
    pub fn create_sql(&self, durability: Durability) -> Result<String, StoreError> {
        Ok(self.checked_table()?.create(durability))
    }

    /// Connects without TLS to the server of a URL, such as
    /// `postgres://user:password@host/database`.
    ///
    /// An unreachable server is an error only if the table has to be created. Otherwise this method succeeds, and the
    /// first checks fail until the server can be reached.
    ///
    /// # Errors
    /// Returns an error of kind [`Misconfigured`](StoreErrorKind::Misconfigured) if a setting is out of its range, the
    /// URL is invalid, or there is no tokio runtime. Also returns such an error if the server refuses the user, is
    /// read-only, or has no such table, or if a right is missing. If the table is missing, the error's text has the
    /// statement that creates the table.
    pub async fn connect(self, url: &str) -> Result<PostgresStore, StoreError> {
        let config = url.parse().map_err(|error: tokio_postgres::Error| {
            let message = "this is not a URL of PostgreSQL: use postgres://user:password@host:5432/database";
            StoreError::new(StoreErrorKind::Misconfigured, message).caused_by(error)
        })?;
        self.connect_with(config, NoTls).await
    }

    /// Connects with a configuration and an implementation of TLS, such as `tokio-postgres-rustls` or
    /// `postgres-native-tls`. In all other respects, this method does the same as [`connect`](Self::connect).
    ///
    /// A configuration with several hosts connects to the first host that accepts writes.
    ///
    /// # Errors
    /// Returns the errors of [`connect`](Self::connect).
    pub async fn connect_with<T>(self, config: Config, tls: T) -> Result<PostgresStore, StoreError>
    where
        T: MakeTlsConnect<Socket> + Clone + Send + Sync + 'static,
        T::Stream: Send,
        T::TlsConnect: Send,
        <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
    {
        self.checked_table()?;
        let name = name_of(&config);
        let mut config = config;
        config.target_session_attrs(TargetSessionAttrs::ReadWrite);
        if config.get_connect_timeout().is_none() {
            config.connect_timeout(REACH);
        }
        if config.get_keepalives_idle() == KEEPALIVE_UNSET {
            config.keepalives_idle(KEEPALIVE);
        }
        if config.get_keepalives_interval().is_none() && config.get_keepalives_retries().is_none() {
            config.keepalives_interval(KEEPALIVE_AGAIN.0).keepalives_retries(KEEPALIVE_AGAIN.1);
        }
        if config.get_tcp_user_timeout().is_none() {
            config.tcp_user_timeout(UNCONFIRMED);
        }
        if config.get_application_name().is_none() {
            config.application_name("tower-ratelimit");
        }
        let connections = OwnConnections::new(config, tls, self.max_connections, self.ping_after, runtime()?);
        self.build_named(connections, name).await
    }

    /// Makes a store over the application's connections. The store uses up to `max_connections` at a time.
    ///
    /// # Errors
    /// Returns the errors of [`connect`](Self::connect).
    pub async fn build<C: Connections>(self, connections: C) -> Result<PostgresStore<C>, StoreError> {
        self.build_named(connections, "PostgreSQL".to_owned()).await
    }

    async fn build_named<C: Connections>(self, connections: C, name: String) -> Result<PostgresStore<C>, StoreError> {
        let table = self.checked_table()?;
        let store = PostgresStore::new(connections, table, name, self.max_connections, runtime()?);
        if let Some(durability) = self.created {
            store.create_table(durability).await?;
        }
        match store.check().await {
            Err(error) if error.kind() == StoreErrorKind::Misconfigured => Err(error),
            Ok(()) | Err(_) => Ok(store),
        }
    }

    /// Checks all settings.
    fn checked_table(&self) -> Result<PostgresTable, StoreError> {
        if !(LOCK_WAIT_MIN..=LOCK_WAIT_MAX).contains(&self.max_lock_wait) {
            let wait = self.max_lock_wait;
            return misconfigured(format!("a max_lock_wait of {wait:?} is not possible: use 1 ms to 60 s"));
        }
        if !(1..=CONNECTIONS_MAX).contains(&self.max_connections) {
            let connections = self.max_connections;
            return misconfigured(format!(
                "max_connections of {connections} is not possible: use 1 to {CONNECTIONS_MAX}"
            ));
        }
        PostgresTable::new(&self.table, self.max_lock_wait)
    }
}

fn runtime() -> Result<Handle, StoreError> {
    Handle::try_current().or_else(|_| misconfigured("a store must be made within a tokio runtime".to_owned()))
}

fn misconfigured<T>(message: String) -> Result<T, StoreError> {
    Err(StoreError::new(StoreErrorKind::Misconfigured, message))
}

/// Returns the hosts and ports, without user and password.
fn name_of(config: &Config) -> String {
    let hosts = config.get_hosts().iter().map(|host| match host {
        Host::Tcp(host) => host.clone(),
        #[cfg(unix)]
        Host::Unix(path) => path.display().to_string(),
    });
    let addresses = config.get_hostaddrs().iter().map(ToString::to_string);
    let hosts: Vec<String> = if config.get_hosts().is_empty() { addresses.collect() } else { hosts.collect() };
    let port = |index: usize| config.get_ports().get(index).or(config.get_ports().first()).copied().unwrap_or(5_432);
    let named: Vec<String> = hosts.iter().enumerate().map(|(at, host)| format!("{host}:{}", port(at))).collect();
    named.join(",")
}
