//! Connections that are cut, forgotten, or lead to another server than before.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::{Instant, interval, sleep};
use tower_ratelimit::{Policy, Quota, RedisLimiter, limiter::StoreErrorKind, observe::LimiterEvent};

use super::{LONG, connected, eventually, passes, patient, policy, take};
use crate::support::Events;
use crate::support::proxy::Proxy;
use crate::support::redis_server::Server;

const MS: Duration = Duration::from_millis(1);

fn tell(server: &Server, command: &[&str]) {
    redis::cmd(command[0]).arg(&command[1..]).exec(&mut server.connection()).unwrap();
}

/// Checks that come whether or not those before have been answered.
struct Load {
    counts: Arc<Counts>,
    stop: Arc<AtomicBool>,
    task: tokio::task::JoinHandle<()>,
}

#[derive(Default)]
struct Counts {
    ended: AtomicUsize,
    failed: AtomicUsize,
    /// The time that the machine took from this process, in milliseconds.
    lost_ms: AtomicUsize,
}

impl Load {
    /// Starts this number of checks each millisecond, or one each so many milliseconds.
    fn start(limiter: &RedisLimiter, policy: &Policy, per_tick: usize, tick: Duration) -> Self {
        let (counts, stop) = (Arc::new(Counts::default()), Arc::new(AtomicBool::new(false)));
        let (own, stopped, limiter, policy) = (Arc::clone(&counts), Arc::clone(&stop), limiter.clone(), policy.clone());
        let task = tokio::spawn(async move {
            let mut ticks = interval(tick);
            let mut checks = tokio::task::JoinSet::new();
            let mut last = Instant::now();
            while !stopped.load(Ordering::Relaxed) {
                ticks.tick().await;
                let late = last.elapsed().saturating_sub(tick + 10 * MS);
                own.lost_ms.fetch_add(usize::try_from(late.as_millis()).unwrap(), Ordering::Relaxed);
                last = Instant::now();
                for _ in 0..per_tick {
                    let (counts, limiter, policy) = (Arc::clone(&own), limiter.clone(), policy.clone());
                    checks.spawn(async move {
                        let failed = take(&limiter, &policy, "a", 1).await.is_err();
                        counts.failed.fetch_add(usize::from(failed), Ordering::Relaxed);
                        counts.ended.fetch_add(1, Ordering::Relaxed);
                    });
                }
                while checks.try_join_next().is_some() {}
            }
            checks.join_all().await;
        });
        Self { counts, stop, task }
    }

    fn failed(&self) -> usize {
        self.counts.failed.load(Ordering::Relaxed)
    }

    /// Returns how many checks ended, how many failed, and the milliseconds that the machine took.
    async fn end(self) -> (usize, usize, usize) {
        self.stop.store(true, Ordering::Relaxed);
        self.task.await.unwrap();
        let of = |count: &AtomicUsize| count.load(Ordering::Relaxed);
        (of(&self.counts.ended), of(&self.counts.failed), of(&self.counts.lost_ms))
    }
}

fn downs(seen: &Events) -> usize {
    seen.lock().iter().filter(|event| matches!(event, LimiterEvent::StoreDown { .. })).count()
}

/// What a server says that was a master when the connection was made.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn master_that_changes_behind_one_address_is_followed() {
    for (says, demote) in [
        ("READONLY", &[["REPLICAOF", "127.0.0.1", "1"].as_slice()][..]),
        ("NOREPLICAS", &[&["CONFIG", "SET", "min-replicas-to-write", "1"]]),
        ("MASTERDOWN", &[&["CONFIG", "SET", "replica-serve-stale-data", "no"], &["REPLICAOF", "127.0.0.1", "1"]]),
    ] {
        let [old, new] = [Server::start(), Server::start()];
        let proxy = Proxy::start(old.port());
        let limiter = connected(RedisLimiter::builder().deadline(500 * MS), &proxy.url()).await;
        let policy = policy("p", Quota::per_hour(1_000_000));
        assert!(passes(&limiter, &policy, "a").await);
        let load = Load::start(&limiter, &policy, 1, 5 * MS);
        demote.iter().for_each(|command| tell(&old, command));
        eventually("the old master refuses checks", async || load.failed() > 0).await;
        sleep(700 * MS).await;
        proxy.lead_to(new.port());
        let reachable = Instant::now();
        // A name or a proxy leads to the new master. Nothing cuts the connections to the old one.
        sleep(2_000 * MS).await;
        let (failed, came) = (load.failed(), proxy.came());
        sleep(500 * MS).await;
        let (ended, all, lost) = load.end().await;
        let late = all - failed;
        println!("{says}: {ended} checks, {all} failed, {late} later than 2 s, {came} connections, {lost} ms lost");
        assert!(late == 0 || lost > 100, "{says}: {late} checks failed later than 2 s, {:?}", reachable.elapsed());
        assert!(came <= 12, "{says}: {came} connections in three seconds");
        eventually("checks reach the new master", async || {
            take(&limiter, &policy, "a", 1).await.is_ok() && !super::keys(&new).is_empty()
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cut_connection_costs_the_checks_that_were_on_it() {
    let (server, seen) = (Server::start(), Events::default());
    let limiter = connected(RedisLimiter::builder().deadline(500 * MS).observer(seen.clone()), &server.url()).await;
    let policy = policy("p", Quota::per_hour(1_000_000));
    let load = Load::start(&limiter, &policy, 2, MS);
    sleep(200 * MS).await;
    for _ in 0..5 {
        tell(&server, &["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
        sleep(200 * MS).await;
    }
    let (ended, failed, lost) = load.end().await;
    println!("five cuts: {ended} checks, {failed} failed, {lost} ms lost");
    // Checks gather while the machine stops, and go together.
    assert!(failed <= 10 + 2 * lost, "{failed} of {ended} failed, {lost} ms lost");
    assert_eq!(downs(&seen), 0, "{:?}", seen.lock());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn most_checks_pass_though_connections_are_cut_all_the_time() {
    let (server, seen) = (Server::start(), Events::default());
    let limiter = connected(RedisLimiter::builder().deadline(500 * MS).observer(seen.clone()), &server.url()).await;
    let policy = policy("p", Quota::per_hour(1_000_000));
    let load = Load::start(&limiter, &policy, 2, MS);
    let mut admin = server.connection();
    for _ in 0..100 {
        redis::cmd("CLIENT").arg(&["KILL", "TYPE", "normal", "SKIPME", "yes"]).exec(&mut admin).unwrap();
        sleep(20 * MS).await;
    }
    let (ended, failed, lost) = load.end().await;
    println!("cut each 20 ms: {ended} checks, {failed} failed, {lost} ms lost");
    assert!(failed * 2 < ended, "{failed} of {ended} failed");
    assert_eq!(downs(&seen), 0, "{:?}", seen.lock());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forgotten_connection_is_replaced_before_the_next_check() {
    let (server, seen) = (Server::start(), Events::default());
    let proxy = Proxy::start(server.port());
    let limiter = connected(patient().deadline(500 * MS).observer(seen.clone()), &proxy.url()).await;
    let policy = policy("p", Quota::per_hour(100));
    assert!(passes(&limiter, &policy, "a").await);
    let came = proxy.came();
    proxy.forget();
    let forgotten = Instant::now();
    eventually("another connection is made", async || proxy.came() > came).await;
    assert!(forgotten.elapsed() < LONG / 2, "{:?}", forgotten.elapsed());
    eventually("it can be used", async || take(&limiter, &policy, "a", 1).await.is_ok()).await;
    let waits = |event: &LimiterEvent| matches!(event, LimiterEvent::StoreFailed { kind: StoreErrorKind::Timeout, .. });
    assert_eq!((downs(&seen), seen.lock().iter().filter(|event| waits(event)).count()), (0, 0), "{:?}", seen.lock());
}
