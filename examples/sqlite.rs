//! Limits that survive a restart, on one machine: a store of your own, in SQLite.
//!
//! ```sh
//! cargo run --example sqlite --features store   # stop it, and start it again
//! curl -i http://127.0.0.1:3000/
//! ```
//!
//! `cargo test --example sqlite --features store,conformance` checks the store, and the limiter over it.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, SystemTime};

use axum::{Router, routing::get};
use rusqlite::{Connection, OptionalExtension, Transaction, TransactionBehavior, params};
use tokio::sync::oneshot;
use tower_ratelimit::limiter::StoreErrorKind;
use tower_ratelimit::limiter::store::{
    Change, Loaded, Store, StoreError, StoreLimiterBuilder, Swapped, Then, Value, Version,
};
use tower_ratelimit::{Quota, RateLimitLayer, key};

/// A table of a database. A thread of its own has the connection, because SQLite waits for the disk.
struct Sqlite(mpsc::Sender<Call>);

type Call = Box<dyn FnOnce(&mut Connection) + Send>;

const TABLE: &str = "CREATE TABLE IF NOT EXISTS ratelimit (
    key TEXT PRIMARY KEY, version BLOB NOT NULL, expires INTEGER NOT NULL, value BLOB NOT NULL
) WITHOUT ROWID";

impl Sqlite {
    /// Opens a file. A call waits for up to `busy` while another process writes to the file.
    fn open(path: &Path, busy: Duration) -> rusqlite::Result<Self> {
        let mut connection = Connection::open(path)?;
        connection.busy_timeout(busy)?;
        connection.pragma_update(None, "journal_mode", "wal")?;
        connection.pragma_update(None, "synchronous", "normal")?;
        connection.execute(TABLE, [])?;
        connection.execute("DELETE FROM ratelimit WHERE expires < ?", [seconds()])?;
        let (calls, waiting) = mpsc::channel::<Call>();
        thread::spawn(move || waiting.iter().for_each(|call| call(&mut connection)));
        Ok(Self(calls))
    }

    /// Runs a function on the thread of the connection.
    async fn run<T: Send + 'static>(
        &self,
        run: impl FnOnce(&mut Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let gone = || StoreError::new(StoreErrorKind::Unavailable, "the thread of the database has ended");
        let (sender, answer) = oneshot::channel();
        let call: Call = Box::new(move |connection| drop(sender.send(run(connection)))); // the caller may have gone
        self.0.send(call).map_err(|_| gone())?;
        let failed = |error| StoreError::new(StoreErrorKind::Unavailable, "SQLite failed").with_source(error);
        answer.await.map_err(|_| gone())?.map_err(failed)
    }
}

fn seconds() -> i64 {
    SystemTime::UNIX_EPOCH.elapsed().map_or(0, |passed| passed.as_secs() as i64)
}

/// Returns the value of a key. A value whose time is over may be there still. The limiter knows what it is worth.
fn value(connection: &Connection, key: &str) -> rusqlite::Result<Option<Value>> {
    let mut select = connection.prepare_cached("SELECT version, value FROM ratelimit WHERE key = ?")?;
    let value = |row: &rusqlite::Row<'_>| Ok(Value::new(Version::from_bytes(row.get(0)?), row.get::<_, Vec<u8>>(1)?));
    select.query_row([key], value).optional()
}

fn make(transaction: &Transaction<'_>, Change { key, then, .. }: &Change) -> rusqlite::Result<()> {
    match then {
        Then::Put(value, lives) => {
            let expires = seconds() + lives.as_secs() as i64 + 1;
            let put = "INSERT OR REPLACE INTO ratelimit (key, version, expires, value) VALUES (?, ?, ?, ?)";
            let row = params![&**key, value.version.to_bytes(), expires, &*value.bytes];
            transaction.prepare_cached(put)?.execute(row)?;
        }
        Then::Delete => {
            transaction.execute("DELETE FROM ratelimit WHERE key = ?", [&**key])?;
        }
        Then::Keep => {}
    }
    Ok(())
}

impl Store for Sqlite {
    async fn load(&self, keys: &[Arc<str>]) -> Result<Loaded, StoreError> {
        let keys = keys.to_vec();
        let values = self.run(move |connection| keys.iter().map(|key| value(connection, key)).collect());
        Ok(Loaded::new(values.await?))
    }

    async fn swap(&self, changes: &[Change]) -> Result<Swapped, StoreError> {
        let changes = changes.to_vec();
        self.run(move |connection| {
            // Other processes that use the file wait from here on.
            let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let current = changes.iter().map(|change| value(&transaction, &change.key));
            let current: Vec<_> = current.collect::<Result<_, _>>()?;
            if changes.iter().zip(&current).any(|(change, value)| !change.expects(value.as_ref())) {
                return Ok(Swapped::conflict(current));
            }
            changes.iter().try_for_each(|change| make(&transaction, change))?;
            transaction.commit()?;
            Ok(Swapped::done())
        })
        .await
    }

    fn name(&self) -> String {
        "SQLite".to_owned()
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let store = Sqlite::open(&std::env::temp_dir().join("limits.sqlite"), Duration::from_millis(40))?;
    let limiter = StoreLimiterBuilder::new().deadline(Duration::from_millis(100)).build(store)?;
    let limit = RateLimitLayer::new(limiter, Quota::per_hour(10), key::peer_ip());
    let app = Router::new().route("/", get(|| async { "hello\n" })).layer(limit);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("listening on {}", listener.local_addr()?);
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}

#[cfg(all(test, feature = "conformance"))]
mod tests {
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicU32, Ordering};

    use tower_ratelimit::clock::ManualClock;
    use tower_ratelimit::conformance::{self, Subject, Task};
    use tower_ratelimit::limiter::{Charge, Limiter};
    use tower_ratelimit::{Key, Policy, StoreLimiter};

    use super::*;

    /// A folder that is removed at the end.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let folder = std::env::temp_dir().join(format!("ratelimit-sqlite-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&folder).unwrap();
            Self(folder)
        }

        fn open(&self) -> Sqlite {
            Sqlite::open(&self.0.join("limits"), Duration::from_secs(20)).unwrap() // as a busy machine needs
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    /// Limiters over one file, each with a prefix of its own.
    struct Mine {
        folder: Folder,
        clock: ManualClock,
        made: AtomicU32,
    }

    impl Subject for Mine {
        type Limiter = StoreLimiter<Sqlite>;

        async fn limiter(&self) -> StoreLimiter<Sqlite> {
            let prefix = self.made.fetch_add(1, Ordering::Relaxed).to_string();
            let builder = StoreLimiterBuilder::new().prefix(prefix).deadline(Duration::from_secs(20)).max_denials(0);
            // The clock is advanced by hours, and no process renews its places meanwhile.
            let builder = builder.places_lapse_after(Duration::from_secs(86_400));
            builder.clock(self.clock.clone()).build(self.folder.open()).unwrap()
        }

        async fn advance(&self, by: Duration) {
            self.clock.advance(by);
        }

        fn spawn(&self, task: Task) {
            tokio::spawn(task);
        }
    }

    #[tokio::test]
    async fn store_keeps_its_contract() {
        let folder = Folder::new("store");
        conformance::check_store(&folder.open()).await.unwrap_or_else(|failures| panic!("{failures}"));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn limiter_passes_the_suite() {
        let mine = Mine { folder: Folder::new("suite"), clock: ManualClock::new(), made: AtomicU32::new(0) };
        let report = conformance::check(&mine).await.unwrap_or_else(|failures| panic!("{failures}"));
        assert!(report.skipped().is_empty(), "{report}");
    }

    #[tokio::test]
    async fn limit_survives_a_restart() {
        let folder = Folder::new("restart");
        let policy = Policy::new("api", Quota::per_hour(3)).unwrap();
        let key = Key::of("alice").unwrap();
        for left in [2, 1, 0] {
            let limiter = StoreLimiterBuilder::new().deadline(Duration::from_secs(20)).build(folder.open()).unwrap();
            let decision = limiter.take(&[Charge::new(&policy, &key)]).await.unwrap();
            assert_eq!(decision.charges()[0].remaining(), left);
        }
    }
}
