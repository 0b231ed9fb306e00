//! PostgreSQL: checks per second beside `pgbench` with the leanest statement that does as much, and how many checks
//! fail as contended if several limiters charge one key.
//!
//! The leanest statement replaces a row by its key and returns the server's time. It compares no version, and it is
//! parsed each time (`pgbench -M extended`), as behind a PgBouncer.
//!
//! One run on a quiet machine of two CPUs, with one thread for the limiter (2026-11-27). The process knows the keys.
//!
//! | case; 1, 10 and 50 in flight, against `pgbench` | aimed at | unlogged table | logged table |
//! |---|---|---|---|
//! | 1,000 keys | at least 0.8 | 0.81, 0.96, 1.64 | 0.97, 0.97, 1.68 |
//! | 10,000 keys | at least 0.8 | 0.86, 1.03, 1.74 | 0.94, 1.12, 1.67 |
//! | one hot key | at least 5 with 50 | 0.84, 1.71, 10.41 | 0.99, 1.36, 7.27 |
//!
//! | one hot key, 8 limiters with connections of their own | checks | contended | out of time |
//! |---|---|---|---|
//! | 1 in flight, deadline of 50 ms | 4,000 /s | 0 % | 0 % |
//! | 6 in flight, deadline of 50 ms | 14,400 /s | 0 % | 0 % |
//! | 6 in flight, deadline of 200 ms | 14,500 /s | 0 % | 0 % |
//!
//! The server's processor time for a check of 1,000 keys, with 1 and 10 in flight: 86 and 47 µs with an unlogged table,
//! 77 and 42 µs with a logged one, and 31 and 9 µs of Redis 7.0.
//!
//! A key that the process does not know costs a second statement: the first one guesses that it is new.
//!
//! It starts its own PostgreSQL on a free port. The contenders run in turn. The figures are medians.

#![expect(clippy::disallowed_methods, reason = "a bench reads the clock")]

mod support;

#[path = "../tests/support/postgres.rs"]
mod postgres;
#[path = "../tests/support/redis.rs"]
mod redis_server;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use postgres::{Server, command};
use support::{Numbers, is_smoke, is_wanted, median};
use tokio::runtime::Runtime;
use tower_ratelimit::limiter::store::StoreLimiterBuilder;
use tower_ratelimit::limiter::store::postgres::{Durability, PostgresStore};
use tower_ratelimit::limiter::{Charge, Limiter, StoreErrorKind};
use tower_ratelimit::{Key, Policy, Quota, StoreLimiter};

const KEYS: u64 = 10_000;

const FEW: u64 = 1_000;

/// Limiters with connections of their own, as many processes have.
const LIMITERS: u64 = 8;

type PostgresLimiter = StoreLimiter<PostgresStore>;

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let server = Server::with(&["max_connections=150"]);
    for durability in [Durability::Unlogged, Durability::Logged] {
        if is_wanted("throughput") || is_wanted(durability.as_str()) {
            let bench = Bench::new(&runtime, &server, durability);
            for tasks in if is_smoke() { vec![10] } else { vec![1, 10, 50] } {
                bench.throughput(tasks, FEW, "1,000 keys");
                bench.throughput(tasks, KEYS, "10,000 keys");
                bench.throughput(tasks, 1, "one hot key");
            }
        }
    }
    if is_wanted("contended") {
        contended(&runtime, &server);
    }
    if is_wanted("processor") {
        processor(&runtime, &server);
    }
}

/// Nothing is denied while it runs.
fn plenty() -> Policy {
    Policy::new("bench", Quota::token_bucket(1_000_000, Duration::from_secs(1)).unwrap()).unwrap()
}

async fn check(limiter: &PostgresLimiter, policy: &Policy, key: u64) -> Result<bool, StoreErrorKind> {
    let key = Key::of(key).unwrap();
    let decision = limiter.take(&[Charge::new(policy, &key)]).await;
    decision.map(|decision| decision.is_allowed()).map_err(|error| error.kind())
}

fn limiter(runtime: &Runtime, server: &Server, durability: Durability, deadline: Duration) -> PostgresLimiter {
    runtime.block_on(async {
        let builder = PostgresStore::builder().table(format!("limits_{durability}")).create_table(durability);
        let store = builder.max_lock_wait(deadline).connect(&server.url()).await.unwrap();
        StoreLimiterBuilder::new().deadline(deadline).build(store).unwrap()
    })
}

struct Bench<'a> {
    runtime: &'a Runtime,
    server: &'a Server,
    durability: Durability,
    limiter: PostgresLimiter,
}

impl<'a> Bench<'a> {
    fn new(runtime: &'a Runtime, server: &'a Server, durability: Durability) -> Self {
        let limiter = limiter(runtime, server, durability, Duration::from_secs(20));
        let kind = if durability == Durability::Unlogged { "UNLOGGED" } else { "" };
        let lean = format!(
            "CREATE {kind} TABLE lean_{durability} (key text COLLATE \"C\" PRIMARY KEY, version uuid NOT NULL, \
             expires timestamptz NOT NULL, value bytea NOT NULL) WITH (fillfactor = 50); \
             INSERT INTO lean_{durability} SELECT 'ratelimit-1-h0123456789abcdef0123456789abcdef-5-bench' || number, \
             gen_random_uuid(), now(), decode(repeat('00', 100), 'hex') FROM generate_series(0, {}) AS number",
            KEYS - 1
        );
        runtime.block_on(server.query(&lean));
        let bench = Self { runtime, server, durability, limiter };
        bench.rate(50, KEYS, if is_smoke() { 100 } else { 4 * KEYS }); // most of the rows are there then
        runtime.block_on(server.query("VACUUM ANALYZE"));
        bench
    }

    /// Returns the checks per second of this number of concurrent tasks.
    fn rate(&self, tasks: u64, keys: u64, count: u64) -> f64 {
        let left = Arc::new(AtomicU64::new(count));
        let began = Instant::now();
        self.runtime.block_on(async {
            let running = (0..tasks).map(|task| {
                let (left, limiter, policy) = (Arc::clone(&left), self.limiter.clone(), plenty());
                tokio::spawn(async move {
                    let mut numbers = Numbers(task + 1);
                    while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok() {
                        assert_eq!(check(&limiter, &policy, numbers.below(keys)).await, Ok(true));
                    }
                })
            });
            for task in running.collect::<Vec<_>>() {
                task.await.unwrap();
            }
        });
        count as f64 / began.elapsed().as_secs_f64()
    }

    /// Transactions per second of `pgbench`.
    fn pgbench(&self, clients: u64, keys: u64, count: u64) -> f64 {
        let script = format!(
            "\\set number random(0, {})\n\
             UPDATE lean_{} SET version = '{:032x}', value = '\\x{}', expires = clock_timestamp() + 90.0 * interval '1 second' \
             WHERE key = 'ratelimit-1-h0123456789abcdef0123456789abcdef-5-bench' || (:number)::text RETURNING clock_timestamp();\n",
            keys - 1,
            self.durability,
            7,
            "00".repeat(100)
        );
        let file = std::env::temp_dir().join(format!("tower-ratelimit-pgbench-{}", std::process::id()));
        std::fs::write(&file, script).unwrap();
        let (port, each) = (self.server.port().to_string(), (count / clients).max(1).to_string());
        let output = command("pgbench")
            .args(["--no-vacuum", "--protocol", "extended", "--jobs", "1", "--client", &clients.to_string()])
            .args(["--transactions", &each, "--file"])
            .arg(&file)
            .args(["--host", "127.0.0.1", "--port", &port, "--username", "postgres", "postgres"])
            .output()
            .unwrap();
        let _ = std::fs::remove_file(&file);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let rate = text.lines().find_map(|line| line.strip_prefix("tps = ")?.split(' ').next()?.parse().ok());
        rate.unwrap_or_else(|| panic!("{text}{}", String::from_utf8_lossy(&output.stderr)))
    }

    fn throughput(&self, tasks: u64, keys: u64, case: &str) {
        let (rounds, count) = if is_smoke() { (1, 100) } else { (5, 2_000 + 200 * tasks) };
        let combined = if keys == 1 { tasks.min(10) } else { 1 };
        let mut rates = vec![Vec::new(); 2];
        for _ in 0..rounds {
            rates[0].push(self.pgbench(tasks, keys, count));
            rates[1].push(self.rate(tasks, keys, count * combined));
        }
        let medians: Vec<f64> = rates.into_iter().map(median).collect();
        println!("\n{} table, {case}, {tasks} in flight", self.durability);
        for (name, rate) in ["pgbench, the leanest statement", "tower-ratelimit"].iter().zip(&medians) {
            println!("  {name:<44} {rate:>9.0} /s   {:>5.2}x", rate / medians[0]);
        }
    }
}

/// The processor time of the server for each check, beside that of Redis.
fn processor(runtime: &Runtime, server: &Server) {
    println!("\nthe server's processor time for each check of {FEW} keys");
    for durability in [Durability::Unlogged, Durability::Logged] {
        let limiter = limiter(runtime, server, durability, Duration::from_secs(20));
        for tasks in [1, 10] {
            let used = used(runtime, &limiter, tasks, || server.processor_time());
            println!("  PostgreSQL, {durability} table, {tasks} in flight {used:>20.1} µs");
        }
    }
    #[cfg(feature = "fred")]
    {
        let server = redis_server::Server::start();
        let builder = tower_ratelimit::RedisLimiter::builder().deadline(Duration::from_secs(20));
        let limiter = runtime.block_on(builder.connect(&server.url())).unwrap();
        for tasks in [1, 10] {
            let used = used(runtime, &limiter, tasks, || server.processor_time());
            println!("  Redis, {tasks} in flight {used:>37.1} µs");
        }
    }
}

/// Returns the microseconds of the server for each check.
fn used<L>(runtime: &Runtime, limiter: &L, tasks: u64, server: impl Fn() -> Duration) -> f64
where
    L: Limiter<Error: std::fmt::Debug> + Clone + Send + Sync + 'static,
{
    let count: u64 = if is_smoke() { 10 } else { 20_000 / tasks };
    let before = server();
    runtime.block_on(async {
        let running = (0..tasks).map(|task| {
            let (limiter, policy) = (limiter.clone(), plenty());
            tokio::spawn(async move {
                let mut numbers = Numbers(task + 1);
                for _ in 0..count {
                    let key = Key::of(numbers.below(FEW)).unwrap();
                    assert!(limiter.take(&[Charge::new(&policy, &key)]).await.unwrap().is_allowed());
                }
            })
        });
        for task in running.collect::<Vec<_>>() {
            task.await.unwrap();
        }
    });
    (server() - before).as_secs_f64() * 1e6 / (tasks * count) as f64
}

/// The checks of one key that fail, of limiters that compete for it.
fn contended(runtime: &Runtime, server: &Server) {
    let count: u64 = if is_smoke() { 10 } else { 500 };
    println!("\none hot key, {LIMITERS} limiters with connections of their own");
    for (deadline, tasks) in [(50, 1), (50, 6), (200, 6)] {
        let limiters: Vec<_> = (0..LIMITERS)
            .map(|_| limiter(runtime, server, Durability::Unlogged, Duration::from_millis(deadline)))
            .collect();
        let began = Instant::now();
        let mut kinds = std::collections::BTreeMap::<&str, u64>::new();
        runtime.block_on(async {
            let running = limiters.iter().flat_map(|limiter| (0..tasks).map(|_| limiter.clone())).map(|limiter| {
                let policy = plenty();
                tokio::spawn(async move {
                    let mut answers = Vec::new();
                    for _ in 0..count {
                        answers.push(check(&limiter, &policy, 0).await);
                    }
                    answers
                })
            });
            for task in running.collect::<Vec<_>>() {
                for answer in task.await.unwrap() {
                    *kinds.entry(answer.map_or_else(StoreErrorKind::as_str, |_| "decided")).or_default() += 1;
                }
            }
        });
        let (all, rate) = (LIMITERS * tasks * count, (LIMITERS * tasks * count) as f64 / began.elapsed().as_secs_f64());
        println!("  {tasks} in flight each, deadline of {deadline} ms: {rate:.0} /s");
        for (kind, number) in kinds {
            println!("    {kind:<42} {number:>9}   {:>6.2} %", 100.0 * number as f64 / all as f64);
        }
    }
}
