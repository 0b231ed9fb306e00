//! Servers that are stopped, crash, hang, cut connections, or hold locks. Each charge is taken once or not at all.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tower_ratelimit::Policy;
use tower_ratelimit::limiter::store::postgres::{Connections, Durability, Rows, Statement};
use tower_ratelimit::limiter::store::{StoreError, StoreLimiterBuilder};
use tower_ratelimit::limiter::{Charge, Limiter, StoreErrorKind};

use super::support::postgres::Server;
use super::support::proxy::{Fault, Proxy};
use super::{LONG, PostgresLimiter, connected, creating, daily, key, left, limiter, patient, take};

/// Waits until a check succeeds.
async fn recovered(limiter: &PostgresLimiter) {
    let began = Instant::now();
    while let Err(error) = limiter.peek(&[Charge::new(&daily(1), &key("recovered")).cost(0)]).await {
        assert!(began.elapsed() < LONG, "no check succeeds: {error}");
        sleep(Duration::from_millis(5)).await;
    }
}

/// Returns the most and the least that may be taken after this answer.
fn count(answer: Result<bool, StoreErrorKind>) -> (u64, u64) {
    match answer {
        Ok(is_allowed) => (is_allowed.into(), is_allowed.into()),
        Err(_) => (1, 0),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn charges_are_taken_once_while_connections_are_cut() {
    let server = Server::start();
    let limiter = limiter(&server.url()).await;
    let policy = daily(100_000);
    let wanted = u64::from(super::support::cases(300).max(100));
    let cutting = async {
        let client = server.client().await;
        let cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'tower-ratelimit'";
        for number in 0..60 {
            client.simple_query(cut).await.unwrap();
            sleep(Duration::from_millis(number % 17)).await; // at another phase each time
        }
    };
    let tasks = (0..4).map(|task| {
        let (limiter, policy) = (limiter.clone(), policy.clone());
        tokio::spawn(async move {
            let (mut most, mut least) = (0, 0);
            for number in 0..wanted {
                // One key of all tasks, and sets of two keys.
                let (hot, own) = (key("hot"), key(&format!("{task}-{}", number % 10)));
                let mut set = vec![Charge::new(&policy, &hot)];
                if number % 3 == 0 {
                    set.push(Charge::new(&policy, &own));
                }
                let answer = limiter.take(&set).await.map(|decision| decision.is_allowed());
                let (more, fewer) = count(answer.map_err(|error| error.kind()));
                (most, least) = (most + more, least + fewer);
            }
            (most, least)
        })
    });
    let tasks: Vec<_> = tasks.collect();
    cutting.await;
    let (mut most, mut least) = (0, 0);
    for task in tasks {
        let (more, fewer) = task.await.unwrap();
        (most, least) = (most + more, least + fewer);
    }
    recovered(&limiter).await;
    let taken = 100_000 - left(&limiter, &policy, "hot").await;
    assert!((least..=most).contains(&taken), "{taken} were taken, and {least} to {most} were answered");
    assert!(least > 0, "some checks succeed");
}

#[tokio::test]
async fn answers_that_were_cut_are_cleared_up() {
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    let url = proxy.url().replace("redis://", "postgres://postgres@") + "/postgres";
    let limiter = patient().build(super::store(&url).await).unwrap();
    let policy = daily(1_000);
    take(&limiter, &policy, "a").await.unwrap();
    let mut expected = 1;
    for fault in [Fault::Reset, Fault::Cut(0), Fault::Cut(1), Fault::Cut(20), Fault::HalfClose] {
        proxy.fault(fault.clone());
        let answer = take(&limiter, &policy, "a").await;
        expected += 1;
        let is_allowed = answer.map(|decision| decision.is_allowed());
        assert_eq!(is_allowed, Ok(true), "{fault:?}");
        assert_eq!(1_000 - left(&limiter, &policy, "a").await, expected, "{fault:?}");
        proxy.behave();
    }
}

/// A swap is not sent again because time passes: a store that is slow would do all work twice.
#[tokio::test]
async fn answer_that_is_lost_without_a_cut_fails_its_check_only() {
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    let url = proxy.url().replace("redis://", "postgres://postgres@") + "/postgres";
    let [slow, patient] = [Duration::from_secs(2), LONG].map(|deadline| patient().deadline(deadline));
    let store = super::store(&url).await;
    let (limiter, reader) = (slow.build(store.clone()).unwrap(), patient.build(store).unwrap());
    let policy = daily(1_000);
    // A busy machine may take longer than the deadline.
    let succeeds = async || {
        let began = Instant::now();
        while let Err(error) = take(&limiter, &policy, "a").await {
            assert!(began.elapsed() < LONG, "no check succeeds: {error}");
        }
    };
    for _ in 0..2 {
        // The limiter knows the state after this, so the next answer is that of its swap. Another connection is used for
        // the second one.
        succeeds().await;
        let before = 1_000 - left(&reader, &policy, "a").await;
        proxy.fault(Fault::Lose);
        let error = take(&limiter, &policy, "a").await.unwrap_err();
        // A busy process may say that it had no time to read an answer.
        assert!(matches!(error.kind(), StoreErrorKind::Timeout | StoreErrorKind::Overloaded), "{error}");
        proxy.behave();
        assert_eq!(1_000 - left(&reader, &policy, "a").await, before + 1, "it was taken once");
    }
    succeeds().await;
}

#[tokio::test]
async fn limits_survive_a_restart_and_logged_ones_a_crash() {
    let mut server = Server::start();
    let policy = daily(10);
    let of = async |durability: Durability, table: &str| {
        let store = connected(creating(durability).table(table), &server.url()).await;
        patient().build(store).unwrap()
    };
    let logged = of(Durability::Logged, "logged").await;
    let unlogged = of(Durability::Unlogged, "unlogged").await;
    for limiter in [&logged, &unlogged] {
        take(limiter, &policy, "a").await.unwrap();
    }
    server.stop();
    let error = take(&logged, &policy, "a").await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
    server.restart();
    for limiter in [&logged, &unlogged] {
        recovered(limiter).await;
        assert_eq!(left(limiter, &policy, "a").await, 9, "after a restart");
        take(limiter, &policy, "a").await.unwrap();
    }
    server.kill();
    server.restart();
    for (limiter, expected) in [(&logged, 8), (&unlogged, 10)] {
        recovered(limiter).await;
        assert_eq!(left(limiter, &policy, "a").await, expected, "after a crash");
        assert!(take(limiter, &policy, "a").await.unwrap().is_allowed());
        assert_eq!(left(limiter, &policy, "a").await, expected - 1);
    }
}

#[tokio::test]
async fn server_that_hangs_fails_checks_by_their_deadline() {
    let server = Server::start();
    let store = connected(creating(Durability::Unlogged), &server.url()).await;
    let reader = patient().build(store.clone()).unwrap();
    let limiter = StoreLimiterBuilder::new().deadline(Duration::from_millis(200)).max_denials(0).build(store).unwrap();
    let policy = daily(1_000);
    take(&reader, &policy, "a").await.unwrap();
    server.pause();
    let (mut failed, began) = (0, Instant::now());
    while failed < 20 {
        let error = take(&limiter, &policy, "a").await.unwrap_err();
        let kinds = [StoreErrorKind::Timeout, StoreErrorKind::Unavailable, StoreErrorKind::Overloaded];
        assert!(kinds.contains(&error.kind()), "{error}");
        failed += 1;
    }
    // Five checks wait for their deadline. The others fail at once.
    assert!(began.elapsed() < LONG, "{:?}", began.elapsed());
    server.resume();
    recovered(&limiter).await;
    let taken = 1_000 - left(&reader, &policy, "a").await;
    assert!((1..=1 + failed).contains(&taken), "{taken}");
}

#[tokio::test]
async fn locked_row_stops_its_key_only() {
    let server = Server::start();
    let builder = creating(Durability::Unlogged).max_lock_wait(Duration::from_millis(10));
    let limiter = patient().build(connected(builder, &server.url()).await).unwrap();
    let policy = daily(100);
    take(&limiter, &policy, "a").await.unwrap();
    let client = server.client().await;
    client.batch_execute("BEGIN; SELECT * FROM ratelimit FOR UPDATE").await.unwrap();
    let error = take(&limiter, &policy, "a").await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Contended, "{error}");
    take(&limiter, &policy, "b").await.expect("another key is not locked");
    client.batch_execute("COMMIT").await.unwrap();
    assert!(take(&limiter, &policy, "a").await.unwrap().is_allowed());
    assert_eq!(left(&limiter, &policy, "a").await, 98, "the check that failed was not charged");
}

/// A key that another transaction is about to insert has no row to lock.
#[tokio::test]
async fn unfinished_insert_stops_its_key_only() {
    let server = Server::start();
    let builder = creating(Durability::Unlogged).max_lock_wait(Duration::from_millis(10));
    let limiter = patient().build(connected(builder, &server.url()).await).unwrap();
    let (policy, other) = (daily(100), Policy::new("other", *daily(100).quota()).unwrap());
    take(&limiter, &policy, "a").await.unwrap();
    let client = server.client().await;
    client.batch_execute("CREATE TABLE copy AS SELECT * FROM ratelimit; DELETE FROM ratelimit").await.unwrap();
    take(&limiter, &policy, "b").await.unwrap();
    client.batch_execute("BEGIN; INSERT INTO ratelimit SELECT * FROM copy").await.unwrap();
    let a = key("a");
    for charges in [&[Charge::new(&policy, &a)][..], &[Charge::new(&policy, &a), Charge::new(&other, &a)]] {
        let error = limiter.take(charges).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Contended, "{error}");
    }
    take(&limiter, &policy, "c").await.expect("another key is not locked");
    client.batch_execute("COMMIT").await.unwrap();
    assert_eq!(left(&limiter, &policy, "a").await, 99, "the checks that failed were not charged");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn default_isolation_of_the_server_fails_no_check() {
    for isolation in ["repeatable read", "serializable"] {
        let server = Server::with(&[&format!("default_transaction_isolation={isolation}")]);
        let wanted = u64::from(super::support::cases(40).max(20));
        let (policy, shared) = (daily(1_000), Policy::new("shared", *daily(100_000).quota()).unwrap());
        let mut tasks = Vec::new();
        for rival in 0..4 {
            let limiter = limiter(&server.url()).await;
            for task in 0..4 {
                let (limiter, policy, shared) = (limiter.clone(), policy.clone(), shared.clone());
                tasks.push(tokio::spawn(async move {
                    for number in 0..wanted {
                        let (hot, own) = (key("hot"), key(&format!("{rival}-{task}-{}", number % 10)));
                        let charges = [Charge::new(&shared, &hot), Charge::new(&policy, &own)];
                        let charges = if number % 3 == 0 { &charges[..] } else { &charges[..1] };
                        limiter.take(charges).await.unwrap_or_else(|error| panic!("{isolation}: {error}"));
                    }
                }));
            }
        }
        for task in tasks {
            task.await.unwrap();
        }
        let limiter = limiter(&server.url()).await;
        assert_eq!(100_000 - left(&limiter, &shared, "hot").await, 16 * wanted);
    }
}

#[tokio::test]
async fn locked_table_leaves_no_statement_behind() {
    let server = Server::start();
    let store = connected(creating(Durability::Unlogged).max_connections(2), &server.url()).await;
    let limiter = StoreLimiterBuilder::new().deadline(Duration::from_millis(50)).max_denials(0).build(store).unwrap();
    let client = server.client().await;
    client.batch_execute("BEGIN; LOCK TABLE ratelimit").await.unwrap();
    let began = Instant::now();
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'tower-ratelimit'";
    // Longer than a statement may be without an answer.
    while began.elapsed() < Duration::from_secs(7) {
        take(&limiter, &daily(100), "a").await.unwrap_err();
        // Two, and those that are given up or opened at the moment. A busy machine ends those a moment later.
        let late = Instant::now();
        loop {
            let count: u32 = server.query(waiting).await[0].parse().unwrap();
            if count <= 5 {
                break;
            }
            assert!(late.elapsed() < LONG, "{count} connections");
            sleep(Duration::from_millis(20)).await;
        }
        sleep(Duration::from_millis(50)).await;
    }
    client.batch_execute("COMMIT").await.unwrap();
    recovered(&limiter).await;
    let began = Instant::now();
    while server.query(waiting).await[0].parse::<u32>().unwrap() > 2 {
        assert!(began.elapsed() < LONG, "given up connections are closed");
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn server_that_becomes_read_only_is_an_error_until_it_is_not() {
    let server = Server::start();
    let limiter = limiter(&server.url()).await;
    take(&limiter, &daily(100), "a").await.unwrap();
    server.query("ALTER SYSTEM SET default_transaction_read_only = on").await;
    server.query("SELECT pg_reload_conf()").await;
    let began = Instant::now();
    let error = loop {
        match take(&limiter, &daily(100), "a").await {
            Err(error) => break error,
            Ok(_) => assert!(began.elapsed() < LONG, "it becomes read-only"),
        }
    };
    // It passes by itself, as in a failover. Only `connect` takes it for a misconfiguration.
    assert!(error.kind() == StoreErrorKind::Unavailable && error.to_string().contains("read-only"), "{error}");
    let sql = "SET default_transaction_read_only = off; ALTER SYSTEM RESET default_transaction_read_only";
    let client = server.client().await;
    for statement in sql.split(';') {
        client.batch_execute(statement).await.unwrap();
    }
    client.batch_execute("SELECT pg_reload_conf()").await.unwrap();
    // Backends read the setting anew a moment later. A check of no cost, which only reads, does not show that.
    let began = Instant::now();
    while let Err(error) = take(&limiter, &daily(100), "a").await {
        assert!(began.elapsed() < LONG, "no check writes: {error}");
        sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn deleted_rows_are_a_reset() {
    let server = Server::start();
    let limiter = limiter(&server.url()).await;
    for _ in 0..3 {
        take(&limiter, &daily(10), "a").await.unwrap();
    }
    server.query("DELETE FROM ratelimit").await;
    take(&limiter, &daily(10), "a").await.unwrap();
    assert_eq!(left(&limiter, &daily(10), "a").await, 9);
}

/// A pool of the application, of one connection.
struct Own(tokio::sync::Mutex<super::support::postgres::Client>, Arc<AtomicU64>);

impl Connections for Own {
    async fn run(&self, statement: &Statement) -> Result<Rows, Box<dyn std::error::Error + Send + Sync>> {
        self.1.fetch_add(1, Ordering::Relaxed);
        Ok(statement.run(&*self.0.lock().await).await?)
    }
}

#[tokio::test]
async fn pool_of_the_application_is_used() {
    let (server, used) = (Server::start(), Arc::new(AtomicU64::new(0)));
    let own = Own(tokio::sync::Mutex::new(server.client().await), Arc::clone(&used));
    let store = creating(Durability::Logged).build(own).await.unwrap();
    let limiter = patient().build(store).unwrap();
    let policy = daily(10);
    // The first check asks for the time.
    limiter.peek(&[Charge::new(&policy, &key("a"))]).await.unwrap();
    let before = used.load(Ordering::Relaxed);
    for expected in [9, 8, 7] {
        let decision = limiter.take(&[Charge::new(&policy, &key("a"))]).await.unwrap();
        assert_eq!(decision.charges()[0].remaining(), expected);
    }
    assert_eq!(used.load(Ordering::Relaxed) - before, 3, "a check is one statement");
    server.query("DROP TABLE ratelimit").await;
    let error: StoreError = limiter.take(&[Charge::new(&policy, &key("a"))]).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "the code is found in the pool's error: {error}");
}

/// A file system of a megabyte for the user of the server, which is removed when it is dropped.
struct SmallDisk(std::path::PathBuf);

impl SmallDisk {
    /// Returns `None` if this process may not mount it.
    fn mount() -> Option<Self> {
        let directory = std::env::temp_dir().join(format!("tower-ratelimit-disk-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let mut mount = std::process::Command::new("mount");
        let mounted = mount.args(["-t", "tmpfs", "-o", "size=1m,mode=777", "tmpfs"]).arg(&directory).output();
        let disk = Self(directory);
        mounted.is_ok_and(|output| output.status.success()).then_some(disk)
    }

    /// Fills it, and returns the file that does.
    fn fill(&self) -> std::path::PathBuf {
        use std::io::Write;
        let path = self.0.join("full");
        let mut file = std::fs::File::create(&path).unwrap();
        while file.write_all(&[0; 4_096]).is_ok() {}
        path
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ =
            std::process::Command::new("umount").arg("-l").arg(&self.0).stderr(std::process::Stdio::null()).status();
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[tokio::test]
async fn full_disk_fails_checks_until_there_is_room() {
    let Some(disk) = SmallDisk::mount() else {
        println!("skipped: only root can mount a small disk");
        return;
    };
    let tables = disk.0.join("tables");
    std::fs::create_dir(&tables).unwrap();
    let server = Server::start();
    server.own(&tables);
    let limiter = limiter(&server.url()).await;
    server.query(&format!("CREATE TABLESPACE small LOCATION '{}'", tables.display())).await;
    server.query("ALTER TABLE ratelimit SET TABLESPACE small").await;
    let policy = daily(10);
    assert!(take(&limiter, &policy, "before").await.unwrap().is_allowed());
    let full = disk.fill();
    // The last page of the table has room for some more keys.
    let (mut number, began) = (0, Instant::now());
    let error = loop {
        number += 1;
        assert!(began.elapsed() < LONG, "the table has room for all keys");
        if let Err(error) = take(&limiter, &policy, &number.to_string()).await {
            break error;
        }
    };
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
    let why = std::iter::successors(std::error::Error::source(&error), |error| error.source());
    let why = why.map(ToString::to_string).collect::<Vec<_>>().join(": ");
    assert!(why.contains("No space left"), "{error}: {why}");
    std::fs::remove_file(full).unwrap();
    recovered(&limiter).await;
    assert!(take(&limiter, &policy, "after").await.unwrap().is_allowed());
    assert_eq!(left(&limiter, &policy, "before").await, 9, "nothing was lost");
}
