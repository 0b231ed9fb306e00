//! The store: turns changes into statements, and rows into answers.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::connections::{Connections, OwnConnections};
use super::failure::{Phase, is_conflict, is_of_an_insert, is_there, is_undone, store_error};
use super::statement::{Parameter, Rows, Statement, Uuid, parameter, time_of, value_of};
use super::table::{Durability, PostgresTable, SWEPT};
use crate::base::random;
use crate::base::sync::{Mutex, lock};
use crate::base::time::Timestamp;
use crate::error::BoxError;
use crate::event::StoreErrorKind;
use crate::limiter::remote::Deadline;
use crate::limiter::store::{Change, Loaded, Store, StoreError, Swapped, Then};

/// A sweep begins after this many values were inserted. A sweep looks at two rows for each inserted row, so there are
/// fewer expired rows than live rows.
const INSERTS: u64 = SWEPT as u64 / 2;

/// The longest time that a sweep takes.
const SWEEPS: Duration = Duration::from_secs(5);

/// The maximum number of swaps of one statement. The server needs some 10 µs for each swap.
const SWAPS: usize = 64;

/// The maximum number of times that a statement is run if the server rolls it back because of other statements.
const RUNS: u32 = 20;

/// The longest pause before a statement that was rolled back is run again.
const PAUSE: Duration = Duration::from_millis(2);

/// The longest time to live in seconds: 300 years. PostgreSQL can store instants that lie further ahead than this
/// time.
const LIVES_MAX: u64 = 300 * 366 * 24 * 3_600;

/// A [`Store`] in a table of PostgreSQL 12 or later.
///
/// A check is one statement, which is a transaction of its own. Statements are not prepared, so a PgBouncer that pools
/// transactions may be between the store and the server. Clones use the same connections, so several limiters can
/// share them, each with its own prefix. The table has a row for each key; see
/// [`create_sql`](super::PostgresStoreBuilder::create_sql). Only the store writes into the table. To reset all keys,
/// delete the table's rows.
///
/// A set of charges that is admitted is decided at one instant, but for one case. PostgreSQL cannot lock a row that is
/// missing. So if two sets at the same time each charge a key without a row, and each read the other set's key with
/// cost 0, both can see no row. No limit is exceeded by it.
///
/// The store removes expired rows: after every 50 inserted rows it looks at 100 rows, in a separate statement. So
/// the table has at most about a third more rows than there are live keys. No task runs permanently for this.
///
/// ```no_run
/// use tower_ratelimit::limiter::store::postgres::{Durability, PostgresStore};
/// use tower_ratelimit::{Quota, RateLimitLayer, StoreLimiter, key};
///
/// # async fn layer() -> Result<(), Box<dyn std::error::Error>> {
/// let builder = PostgresStore::builder().create_table(Durability::Unlogged);
/// let store = builder.connect("postgres://app:secret@localhost/shop").await?;
/// let limit = RateLimitLayer::new(
///     StoreLimiter::new(store)?,
///     Quota::per_minute(100),
///     key::peer_ip(),
/// );
/// # let _: RateLimitLayer<StoreLimiter<PostgresStore>> = limit;
/// # Ok(()) }
/// ```
pub struct PostgresStore<C: Connections = OwnConnections>(Arc<Inner<C>>);

struct Inner<C> {
    connections: C,
    table: PostgresTable,
    name: String,
    runtime: Handle,
    max_connections: usize,
    inserted: AtomicU64,
    /// How often the server has rolled a statement back.
    undone: AtomicU64,
    sweep: Sweep,
}

/// The state of sweeps.
#[derive(Default)]
struct Sweep {
    is_under_way: AtomicBool,
    /// The last key that was looked at.
    after: Mutex<String>,
}

/// Records the end of a sweep when this value is dropped, because the application's connections may
/// panic.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

impl<C: Connections> PostgresStore<C> {
    pub(super) fn new(
        connections: C,
        table: PostgresTable,
        name: String,
        max_connections: usize,
        runtime: Handle,
    ) -> Self {
        let (inserted, undone, sweep) = (AtomicU64::new(0), AtomicU64::new(0), Sweep::default());
        Self(Arc::new(Inner { connections, table, name, runtime, max_connections, inserted, undone, sweep }))
    }

    pub(super) async fn create_table(&self, durability: Durability) -> Result<(), StoreError> {
        let statement = Statement::new(&self.0.table.create(durability).into(), []);
        match self.0.connections.run(&statement).await {
            // An error that says that the table exists is ignored, because another process has created the table at
            // the same time.
            Err(error) if !is_there(&error) => Err(self.0.failed_at(error, Phase::Setup)),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Checks that the table exists and has the right form, and that the user has all rights on it.
    pub(super) async fn check(&self) -> Result<(), StoreError> {
        let statement = self.0.swap_statement(&[]);
        self.0.connections.run(&statement).await.map(drop).map_err(|error| self.0.failed_at(error, Phase::Setup))
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
            let rows = inner.run(&statement).await.map_err(|error| inner.failed(error))?;
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
        let rows = match inner.run(&inner.swap_statement(changes)).await {
            Ok(rows) => rows,
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

    async fn swap_each(&self, swaps: &[&[Change]]) -> Vec<Result<Swapped, StoreError>> {
        let inner = &self.0;
        if let [changes] = swaps {
            return vec![self.swap(changes).await];
        }
        let is_replacement =
            |changes: &&[Change]| matches!(changes, [Change { expect: Some(_), then: Then::Put(..), .. }]);
        let answers = match swaps.iter().all(is_replacement) {
            true => inner.replace_each(&swaps.concat()).await,
            false => inner.swap_each(swaps).await,
        };
        answers.unwrap_or_else(|error| vec![Err(error); swaps.len()])
    }

    fn max_swaps(&self) -> usize {
        SWAPS
    }

    fn max_calls(&self) -> usize {
        self.0.max_connections
    }

    fn name(&self) -> String {
        self.0.name.clone()
    }
}

impl<C: Connections> Inner<C> {
    async fn load(&self, keys: Vec<String>) -> Result<Loaded, StoreError> {
        let statement = Statement::new(&self.table.load, [parameter(keys, Type::TEXT_ARRAY)]);
        let rows = self.run(&statement).await.map_err(|error| self.failed(error))?;
        let now = rows.last().map(time_of).transpose();
        let values: Result<_, _> = rows.iter().map(value_of).collect();
        let loaded = Loaded::new(self.read(values)?);
        Ok(match self.read(now)? {
            Some(now) => loaded.at(now),
            None => loaded,
        })
    }

    /// Returns the answer that nothing was changed, with the current values. A separate statement reads these
    /// values, because a statement that has waited for another transaction does not see the rows which that
    /// transaction wrote.
    async fn conflict(&self, changes: &[Change]) -> Result<Swapped, StoreError> {
        let loaded = self.load(changes.iter().map(|change| change.key.to_string()).collect()).await?;
        Ok(timed(Swapped::conflict(loaded.values().to_vec()), loaded.now()))
    }

    fn swap_statement(&self, changes: &[Change]) -> Statement {
        let Columns { keys, expected, is_put, versions, values, lives } = Columns::of(changes.iter());
        Statement::new(&self.table.swap, [keys, expected, is_put, versions, values, lives])
    }

    /// Replaces one value for each swap.
    async fn replace_each(&self, changes: &[Change]) -> Result<Vec<Result<Swapped, StoreError>>, StoreError> {
        let Columns { keys, expected, versions, values, lives, .. } = Columns::of(changes.iter());
        let statement = Statement::new(&self.table.replace_each, [keys, expected, versions, values, lives]);
        let rows = self.run(&statement).await.map_err(|error| self.failed(error))?;
        let mut made: Vec<Option<Timestamp>> = vec![None; changes.len()];
        for row in &rows {
            let (now, place) = (self.read(time_of(row))?, self.read(row.try_get::<_, i64>(1))?);
            if let Some(made) = usize::try_from(place - 1).ok().and_then(|place| made.get_mut(place)) {
                *made = Some(now);
            }
        }
        let others: Vec<&Change> =
            changes.iter().zip(&made).filter(|(_, made)| made.is_none()).map(|of| of.0).collect();
        let loaded = match others.is_empty() {
            true => Ok(Loaded::new(Vec::new())),
            false => self.load(others.iter().map(|change| change.key.to_string()).collect()).await,
        };
        let mut current = loaded.iter().flat_map(|loaded| loaded.values().iter().cloned());
        let answers = changes.iter().zip(&made).map(|(change, made)| match (made, &loaded) {
            (Some(now), _) => Ok(Swapped::done().at(*now)),
            (None, Err(error)) => Err(error.clone()),
            (None, Ok(loaded)) => Ok(match current.next().flatten() {
                // Another transaction has locked the row, or has changed it between the two statements.
                value if change.expects(value.as_ref()) => Swapped::skipped(),
                value => timed(Swapped::conflict(vec![value]), loaded.now()),
            }),
        });
        Ok(answers.collect())
    }

    async fn swap_each(self: &Arc<Self>, swaps: &[&[Change]]) -> Result<Vec<Result<Swapped, StoreError>>, StoreError> {
        let rows = match self.run(&self.swap_each_statement(swaps.iter().copied())).await {
            Ok(rows) => rows,
            Err(error) if is_of_an_insert(&error) => {
                let others: Vec<&[Change]> = swaps.iter().filter(|changes| !inserts(changes)).copied().collect();
                if others.len() == swaps.len() {
                    return Err(self.failed(error));
                }
                let others = self.swap_each_statement(others.into_iter());
                self.run(&others).await.map_err(|error| self.failed(error))?
            }
            Err(error) => return Err(self.failed(error)),
        };
        let mut rows = rows.iter();
        let is_complete = rows.len() == swaps.iter().map(|changes| changes.len()).sum::<usize>();
        let answers = swaps.iter().map(|changes| {
            if !is_complete && inserts(changes) {
                return Ok(Swapped::skipped());
            }
            let rows: Vec<&Row> = rows.by_ref().take(changes.len()).collect();
            let Some(row) = rows.first() else { return Ok(Swapped::done()) };
            let now = self.read(time_of(row))?;
            match self.read(row.try_get(3))? {
                Some(true) => {
                    self.note_inserted(changes);
                    Ok(Swapped::done().at(now))
                }
                None => Ok(Swapped::skipped()),
                Some(false) => {
                    let current = rows.iter().map(|row| self.read(value_of(row)));
                    Ok(Swapped::conflict(current.collect::<Result<_, _>>()?).at(now))
                }
            }
        });
        Ok(answers.collect())
    }

    fn swap_each_statement<'a>(&self, swaps: impl Iterator<Item = &'a [Change]> + Clone) -> Statement {
        let numbers = swaps.clone().zip(0..).flat_map(|(changes, number)| changes.iter().map(move |_| number));
        let numbers = parameter(numbers.collect::<Vec<i32>>(), Type::INT4_ARRAY);
        let Columns { keys, expected, is_put, versions, values, lives } = Columns::of(swaps.flatten());
        Statement::new(&self.table.swap_each, [keys, numbers, expected, is_put, versions, values, lives])
    }

    /// Runs a statement. If the server rolls the statement back because of concurrent statements, nothing was changed,
    /// and the statement is run again.
    async fn run(&self, statement: &Statement) -> Result<Vec<Row>, BoxError> {
        for runs in 1.. {
            match self.connections.run(statement).await {
                Err(error) if runs < RUNS && is_undone(&error) => {
                    let pause = PAUSE.mul_f64(f64::from(runs - 1) / f64::from(RUNS));
                    let part = random::mixed(self.undone.fetch_add(1, Ordering::Relaxed)) % 1_024;
                    Deadline::after(pause * (part as u32) / 1_024).wait().await; // below 1,024
                }
                answer => return answer.map(|Rows(rows)| rows),
            }
        }
        Err("no try of the statement succeeded".into())
    }

    /// Counts inserted values, and begins a sweep after every [`INSERTS`] of them, unless a sweep
    /// is under way.
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

    /// Looks at up to [`SWEPT`] rows, and removes the expired rows among them.
    async fn sweep(&self) {
        let _ends = Ends(&self.sweep.is_under_way);
        let after = lock(&self.sweep.after).clone();
        let statement = Statement::new(&self.table.sweep, [parameter(after, Type::TEXT)]);
        // A failed sweep affects no check, and the next sweep looks at the same rows.
        if let Some(Ok(Rows(rows))) = Deadline::after(SWEEPS).timeout(self.connections.run(&statement)).await {
            let last = rows.first().and_then(|row| row.try_get(0).ok());
            // After the last row the sweep begins again at the first row.
            *lock(&self.sweep.after) = last.unwrap_or_default();
        }
    }

    fn failed(&self, error: BoxError) -> StoreError {
        self.failed_at(error, Phase::Service)
    }

    fn failed_at(&self, error: BoxError, phase: Phase) -> StoreError {
        store_error(error, &self.name, &self.table.create(Durability::Logged), phase)
    }

    fn read<T>(&self, read: Result<T, tokio_postgres::Error>) -> Result<T, StoreError> {
        read.map_err(|error| {
            let message = format!("{} returned a row of another form", self.name);
            StoreError::new(StoreErrorKind::Foreign, message).caused_by(error)
        })
    }
}

/// The changes as parameters of a statement.
struct Columns {
    keys: Parameter,
    expected: Parameter,
    /// True if the value is put, false if it is removed, and null if it is kept.
    is_put: Parameter,
    versions: Parameter,
    values: Parameter,
    lives: Parameter,
}

impl Columns {
    fn of<'a>(changes: impl Iterator<Item = &'a Change>) -> Self {
        let (mut keys, mut expected, mut is_put) = (Vec::new(), Vec::new(), Vec::new());
        let (mut versions, mut values, mut lives) = (Vec::new(), Vec::new(), Vec::new());
        for change in changes {
            keys.push(change.key.to_string());
            expected.push(change.expect.map(Uuid::from));
            let put = match &change.then {
                Then::Put(value, lives) => Some((value, lives)),
                Then::Keep | Then::Delete => None,
            };
            is_put.push((change.then != Then::Keep).then_some(put.is_some()));
            versions.push(put.map(|(value, _)| Uuid::from(value.version)));
            values.push(put.map(|(value, _)| value.bytes.to_vec()));
            lives.push(put.map(|(_, lives)| seconds(*lives)));
        }
        Self {
            keys: parameter(keys, Type::TEXT_ARRAY),
            expected: parameter(expected, Type::UUID_ARRAY),
            is_put: parameter(is_put, Type::BOOL_ARRAY),
            versions: parameter(versions, Type::UUID_ARRAY),
            values: parameter(values, Type::BYTEA_ARRAY),
            lives: parameter(lives, Type::FLOAT8_ARRAY),
        }
    }
}

/// Returns whether one of the changes inserts a value.
fn inserts(changes: &[Change]) -> bool {
    changes.iter().any(|change| change.expect.is_none() && matches!(change.then, Then::Put(..)))
}

/// Adds the store's time to an answer, if the time is known.
fn timed(swapped: Swapped, now: Option<Timestamp>) -> Swapped {
    match now {
        Some(now) => swapped.at(now),
        None => swapped,
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
            let table = PostgresTable::new("limits", Duration::from_millis(25)).unwrap();
            let store = PostgresStore::new(Bad { panics }, table, "the server".to_owned(), 1, Handle::current());
            let value = Value::new(Version::from_bytes([1; 16]), vec![1]);
            let insert = Change::new("key", None, Then::Put(value, Duration::from_secs(1)));
            for _ in 0..3 {
                store.0.note_inserted(&vec![insert.clone(); INSERTS as usize]);
                assert!(store.0.sweep.is_under_way.load(Ordering::Relaxed));
                Deadline::after(2 * SWEEPS).wait().await;
                assert!(!store.0.sweep.is_under_way.load(Ordering::Relaxed));
            }
        }
    }
}
