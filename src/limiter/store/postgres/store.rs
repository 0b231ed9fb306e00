//! The store: changes to statements, and rows to answers.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio_postgres::types::Type;

use super::connections::{Connections, OwnConnections};
use super::failure::{is_conflict, is_there, store_error};
use super::statement::{Rows, Statement, Uuid, parameter, time_of, value_of};
use super::table::{Durability, SWEPT, Table};
use crate::error::BoxError;
use crate::event::StoreErrorKind;
use crate::limiter::remote::Due;
use crate::limiter::store::{Change, Loaded, Store, StoreError, Swapped, Then};
use crate::sync::{Mutex, lock};

/// A sweep begins after this many values were inserted. It looks at twice as many rows, so the rows whose time is over
/// are fewer than the others.
const INSERTS: u64 = SWEPT as u64 / 2;

/// The longest time that a sweep takes.
const SWEEPS: Duration = Duration::from_secs(5);

/// The longest time to live, which is 300 years. PostgreSQL's times end later.
const LIVES_MAX: u64 = 300 * 366 * 24 * 3_600;

/// A [`Store`] in a table of PostgreSQL 12 or later.
///
/// A check is one statement, which is a transaction of its own. Statements are not prepared, so a PgBouncer that pools
/// transactions may be between. Clones use the same connections: for several limiters, each with a prefix of its own.
/// The table has a row for each key; see [`create_sql`](super::PostgresStoreBuilder::create_sql). Nothing else writes
/// into it. To reset all keys, delete its rows.
///
/// Expired rows are removed as it goes: after every 50 inserted rows the store looks at 100 others, in a statement of
/// its own. So the table has at most about a third more rows than there are live keys. There is no task for it.
///
/// ```no_run
/// use tower_ratelimit::limiter::store::postgres::{Durability, PostgresStore};
/// use tower_ratelimit::{Quota, RateLimitLayer, StoreLimiter, key};
///
/// # async fn layer() -> Result<(), Box<dyn std::error::Error>> {
/// let builder = PostgresStore::builder().create_table(Durability::Unlogged);
/// let store = builder.connect("postgres://app:secret@localhost/shop").await?;
/// let limit = RateLimitLayer::new(StoreLimiter::new(store)?, Quota::per_minute(100), key::peer_ip());
/// # let _: RateLimitLayer<StoreLimiter<PostgresStore>> = limit;
/// # Ok(()) }
/// ```
pub struct PostgresStore<C: Connections = OwnConnections>(Arc<Inner<C>>);

struct Inner<C> {
    connections: C,
    table: Table,
    name: String,
    runtime: Handle,
    inserted: AtomicU64,
    sweep: Sweep,
}

/// The state of sweeps.
#[derive(Default)]
struct Sweep {
    is_under_way: AtomicBool,
    /// The last key that was looked at.
    after: Mutex<String>,
}

/// Notes the end of a sweep when it is dropped: connections of the application may panic.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

impl<C: Connections> PostgresStore<C> {
    pub(super) fn new(connections: C, table: Table, name: String, runtime: Handle) -> Self {
        let (inserted, sweep) = (AtomicU64::new(0), Sweep::default());
        Self(Arc::new(Inner { connections, table, name, runtime, inserted, sweep }))
    }

    pub(super) async fn create_table(&self, durability: Durability) -> Result<(), StoreError> {
        let statement = Statement::new(&self.0.table.create(durability).into(), []);
        match self.0.connections.run(&statement).await {
            // Another process has created it at the same time.
            Err(error) if !is_there(&error) => Err(self.0.failed(error)),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Checks that the table is there, has the right form, and that all rights on it are there.
    pub(super) async fn check(&self) -> Result<(), StoreError> {
        let statement = self.0.swap_statement(&[]);
        self.0.connections.run(&statement).await.map(drop).map_err(|error| self.0.failed(error))
    }
}

impl<C: Connections> Store for PostgresStore<C> {
    async fn load(&self, keys: &[Arc<str>]) -> Result<Loaded, StoreError> {
        self.0.load(keys.iter().map(ToString::to_string).collect()).await
    }

    async fn swap(&self, changes: &[Change]) -> Result<Swapped, StoreError> {
        let inner = &self.0;
        if let [Change { key, expect, then: Then::Put(value, lives) }] = changes {
            let put = [
                parameter(Uuid::from(value.version), Type::UUID),
                parameter(value.bytes.to_vec(), Type::BYTEA),
                parameter(seconds(*lives), Type::FLOAT8),
            ];
            let key = parameter(key.to_string(), Type::TEXT);
            let statement = match expect {
                Some(version) => {
                    let before = [key, parameter(Uuid::from(*version), Type::UUID)];
                    Statement::new(&inner.table.replace, before.into_iter().chain(put).collect::<Vec<_>>())
                }
                None => Statement::new(&inner.table.insert, [key].into_iter().chain(put).collect::<Vec<_>>()),
            };
            let Rows(rows) = inner.connections.run(&statement).await.map_err(|error| inner.failed(error))?;
            let Some(row) = rows.first() else { return inner.conflict(changes).await };
            let now = inner.read(time_of(row))?;
            if expect.is_some() {
                return Ok(Swapped::done().at(now));
            }
            if inner.read(row.try_get(3))? {
                inner.note_inserted(changes);
                return Ok(Swapped::done().at(now));
            }
            return match inner.read(value_of(row))? {
                Some(value) => Ok(Swapped::conflict(vec![Some(value)]).at(now)),
                None => inner.conflict(changes).await, // it came after the statement began
            };
        }
        let rows = match inner.connections.run(&inner.swap_statement(changes)).await {
            Ok(Rows(rows)) => rows,
            Err(error) if is_conflict(&error) => return inner.conflict(changes).await,
            Err(error) => return Err(inner.failed(error)),
        };
        let Some(row) = rows.first() else { return Ok(Swapped::done()) };
        let now = inner.read(time_of(row))?;
        if inner.read(row.try_get(3))? {
            inner.note_inserted(changes);
            return Ok(Swapped::done().at(now));
        }
        let current = rows.iter().map(|row| inner.read(value_of(row)));
        Ok(Swapped::conflict(current.collect::<Result<_, _>>()?).at(now))
    }

    fn name(&self) -> String {
        self.0.name.clone()
    }
}

impl<C: Connections> Inner<C> {
    async fn load(&self, keys: Vec<String>) -> Result<Loaded, StoreError> {
        let statement = Statement::new(&self.table.load, [parameter(keys, Type::TEXT_ARRAY)]);
        let Rows(rows) = self.connections.run(&statement).await.map_err(|error| self.failed(error))?;
        let now = rows.last().map(time_of).transpose();
        let values: Result<_, _> = rows.iter().map(value_of).collect();
        let loaded = Loaded::new(self.read(values)?);
        Ok(match self.read(now)? {
            Some(now) => loaded.at(now),
            None => loaded,
        })
    }

    /// Returns that nothing was changed, with the current values. They are read by a statement of its own: one that has
    /// waited for another transaction does not see what that has written.
    async fn conflict(&self, changes: &[Change]) -> Result<Swapped, StoreError> {
        let loaded = self.load(changes.iter().map(|change| change.key.to_string()).collect()).await?;
        let conflict = Swapped::conflict(loaded.values().to_vec());
        Ok(match loaded.now() {
            Some(now) => conflict.at(now),
            None => conflict,
        })
    }

    fn swap_statement(&self, changes: &[Change]) -> Statement {
        fn column<'a, T: Send + Sync + 'static>(
            changes: &'a [Change],
            of: impl Fn(&'a Change) -> Option<T>,
        ) -> Vec<Option<T>> {
            changes.iter().map(of).collect()
        }
        let put = |change: &'_ Change| match &change.then {
            Then::Put(value, lives) => Some((Uuid::from(value.version), value.bytes.to_vec(), seconds(*lives))),
            Then::Keep | Then::Delete => None,
        };
        let keys: Vec<String> = changes.iter().map(|change| change.key.to_string()).collect();
        let is_put = |change: &Change| match &change.then {
            Then::Keep => None,
            Then::Put(..) => Some(true),
            Then::Delete => Some(false),
        };
        let parameters = [
            parameter(keys, Type::TEXT_ARRAY),
            parameter(column(changes, |change| change.expect.map(Uuid::from)), Type::UUID_ARRAY),
            parameter(column(changes, is_put), Type::BOOL_ARRAY),
            parameter(column(changes, |change| put(change).map(|put| put.0)), Type::UUID_ARRAY),
            parameter(column(changes, |change| put(change).map(|put| put.1)), Type::BYTEA_ARRAY),
            parameter(column(changes, |change| put(change).map(|put| put.2)), Type::FLOAT8_ARRAY),
        ];
        Statement::new(&self.table.swap, parameters)
    }

    /// Counts inserted values, and sweeps if there were enough.
    fn note_inserted(self: &Arc<Self>, changes: &[Change]) {
        let is_insert = |change: &&Change| change.expect.is_none() && matches!(change.then, Then::Put(..));
        let inserts = changes.iter().filter(is_insert).count() as u64;
        let before = self.inserted.fetch_add(inserts, Ordering::Relaxed);
        let is_due = before / INSERTS != (before + inserts) / INSERTS;
        if is_due && !self.sweep.is_under_way.swap(true, Ordering::Relaxed) {
            let inner = Arc::clone(self);
            self.runtime.spawn(async move { inner.sweep().await });
        }
    }

    /// Looks at some rows, and removes those whose time is over.
    async fn sweep(&self) {
        let _ends = Ends(&self.sweep.is_under_way);
        let after = lock(&self.sweep.after).clone();
        let statement = Statement::new(&self.table.sweep, [parameter(after, Type::TEXT)]);
        // A failure concerns no check. The next sweep looks at the same rows.
        if let Some(Ok(Rows(rows))) = Due::after(SWEEPS).timeout(self.connections.run(&statement)).await {
            let last = rows.first().and_then(|row| row.try_get(0).ok());
            // At the end it begins again.
            *lock(&self.sweep.after) = last.unwrap_or_default();
        }
    }

    fn failed(&self, error: BoxError) -> StoreError {
        store_error(error, &self.name, &self.table.create(Durability::Logged))
    }

    fn read<T>(&self, read: Result<T, tokio_postgres::Error>) -> Result<T, StoreError> {
        read.map_err(|error| {
            let message = format!("{} returned a row of another form", self.name);
            StoreError::new(StoreErrorKind::Foreign, message).caused_by(error)
        })
    }
}

/// Returns whole seconds, rounded up.
fn seconds(lives: Duration) -> f64 {
    lives.as_secs().min(LIVES_MAX) as f64 + 1.0
}

impl<C: Connections> Clone for PostgresStore<C> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<C: Connections> fmt::Debug for PostgresStore<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresStore").field("server", &self.0.name).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::store::{Value, Version};

    /// Connections of an application that panic, or never answer.
    struct Bad {
        panics: bool,
    }

    impl Connections for Bad {
        async fn run(&self, _statement: &Statement) -> Result<Rows, BoxError> {
            assert!(!self.panics, "the pool has a defect");
            std::future::pending().await
        }
    }

    #[tokio::test(start_paused = true)]
    async fn sweep_that_panics_or_hangs_is_not_the_last_one() {
        for panics in [true, false] {
            let table = Table::new("limits", Duration::from_millis(25)).unwrap();
            let store = PostgresStore::new(Bad { panics }, table, "the server".to_owned(), Handle::current());
            let value = Value::new(Version::from_bytes([1; 16]), vec![1]);
            let insert = Change::new("key", None, Then::Put(value, Duration::from_secs(1)));
            for _ in 0..3 {
                store.0.note_inserted(&vec![insert.clone(); INSERTS as usize]);
                assert!(store.0.sweep.is_under_way.load(Ordering::Relaxed));
                Due::after(2 * SWEEPS).wait().await;
                assert!(!store.0.sweep.is_under_way.load(Ordering::Relaxed));
            }
        }
    }
}
