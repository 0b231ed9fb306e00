//! Connections that are cut, forgotten, or lead to another server than before.

use std::net::Ipv4Addr;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::{Instant, interval, sleep};
use tower_ratelimit::limiter::{Limiter, StoreErrorKind, redis::RedisLimiterBuilder};
use tower_ratelimit::observe::LimiterEvent;
use tower_ratelimit::{Policy, Quota, RedisLimiter};

use super::{LONG, builders, connected, eventually, passes, patient, policy, take};
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
    begun: AtomicUsize,
    ended: AtomicUsize,
    failed: AtomicUsize,
    /// The greatest number of checks that were under way at a time.
    most: AtomicUsize,
    /// The time for which this process did not run or the server did not answer, in microseconds.
    lost_us: AtomicUsize,
}

impl Counts {
    fn in_flight(&self) -> usize {
        let ended = self.ended.load(Ordering::Relaxed);
        self.begun.load(Ordering::Relaxed) - ended
    }

    /// Counts the time for which this process did not run. The timer itself is late by up to two milliseconds.
    fn lose(&self, late: Duration) {
        if late > 2 * MS {
            self.lost_us.fetch_add(usize::try_from(late.as_micros()).unwrap(), Ordering::Relaxed);
        }
    }
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
                own.lose(last.elapsed().saturating_sub(tick));
                last = Instant::now();
                own.begun.fetch_add(per_tick, Ordering::Relaxed);
                own.most.fetch_max(own.in_flight(), Ordering::Relaxed);
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

    /// Counts as well how long a server answers nothing: it may be the server's process that a busy machine lets wait.
    fn measure_server(&self, server: &Server) {
        let (counts, client) = (Arc::downgrade(&self.counts), redis::Client::open(server.url()).unwrap());
        let mut connection = server.connection();
        std::thread::spawn(move || {
            while let Some(counts) = counts.upgrade() {
                let began = Instant::now();
                // A test may cut this connection, too.
                while redis::cmd("PING").exec(&mut connection).is_err() {
                    let Ok(again) = client.get_connection() else { return };
                    connection = again;
                }
                counts.lose(began.elapsed());
                drop(counts);
                std::thread::sleep(MS);
            }
        });
    }

    fn failed(&self) -> usize {
        self.counts.failed.load(Ordering::Relaxed)
    }

    /// Cuts all connections. Returns how many checks were under way at most meanwhile.
    fn cut(&self, admin: &mut redis::Connection) -> usize {
        self.counts.most.store(0, Ordering::Relaxed);
        let before = self.counts.in_flight();
        redis::cmd("CLIENT").arg(&["KILL", "TYPE", "normal", "SKIPME", "yes"]).exec(admin).unwrap();
        // On a busy machine many checks may begin and fail before this thread goes on.
        let meanwhile = self.counts.most.load(Ordering::Relaxed);
        before.max(meanwhile).max(self.counts.in_flight())
    }

    /// Returns how many checks ended, how many failed, and for how many milliseconds the process or server stood still.
    async fn end(self) -> (usize, usize, usize) {
        self.stop.store(true, Ordering::Relaxed);
        self.task.await.unwrap();
        let of = |count: &AtomicUsize| count.load(Ordering::Relaxed);
        (of(&self.counts.ended), of(&self.counts.failed), of(&self.counts.lost_us).div_ceil(1_000))
    }
}

fn downs(seen: &Events) -> usize {
    seen.lock().iter().filter(|event| matches!(event, LimiterEvent::StoreDown { .. })).count()
}

/// A connection's server stops being a master.
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
        eventually("a check is decided", async || take(&limiter, &policy, "a", 1).await.is_ok()).await;
        let load = Load::start(&limiter, &policy, 1, 5 * MS);
        load.measure_server(&new);
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
    for builder in builders(RedisLimiter::builder) {
        five_cuts(builder).await;
    }
}

async fn five_cuts(builder: RedisLimiterBuilder) {
    let (server, seen) = (Server::start(), Events::default());
    let limiter = connected(builder.deadline(500 * MS).observer(seen.clone()), &server.url()).await;
    let policy = policy("p", Quota::per_hour(1_000_000));
    let load = Load::start(&limiter, &policy, 2, MS);
    load.measure_server(&server);
    sleep(200 * MS).await;
    // A busy machine has more checks on their way.
    let mut on_their_way = 0;
    for _ in 0..5 {
        let mut admin = server.connection();
        on_their_way += load.cut(&mut admin);
        sleep(200 * MS).await;
        // A server that cuts three greetings in a row is believed dead.
        eventually("a check is decided", async || take(&limiter, &policy, "a", 1).await.is_ok()).await;
    }
    let (ended, failed, lost) = load.end().await;
    println!("five cuts: {ended} checks, {failed} failed, {on_their_way} were on their way, {lost} ms lost");
    assert!(failed <= 10 + on_their_way + 2 * lost, "{failed} of {ended} failed, {on_their_way} were on their way");
    // A server is believed dead after a second without an answer.
    assert!(downs(&seen) == 0 || lost > 500, "the server was there all the time");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn most_checks_pass_though_connections_are_cut_all_the_time() {
    for builder in builders(RedisLimiter::builder) {
        cuts_all_the_time(builder).await;
    }
}

async fn cuts_all_the_time(builder: RedisLimiterBuilder) {
    let server = Server::start();
    let limiter = connected(builder.deadline(500 * MS), &server.url()).await;
    let policy = policy("p", Quota::per_hour(1_000_000));
    let load = Load::start(&limiter, &policy, 2, MS);
    load.measure_server(&server);
    let mut admin = server.connection();
    // On a busy machine a call takes most of 20 ms, so most checks are on a connection when it is cut.
    let mut on_their_way = 0;
    for _ in 0..100 {
        on_their_way += load.cut(&mut admin);
        sleep(20 * MS).await;
        // On a busy machine a greeting may take 20 ms. A server that cuts three greetings in a row is believed dead.
        eventually("a check is decided", async || take(&limiter, &policy, "a", 1).await.is_ok()).await;
    }
    let (ended, failed, lost) = load.end().await;
    println!("cut each 20 ms: {ended} checks, {failed} failed, {on_their_way} were on their way, {lost} ms lost");
    let others = failed.saturating_sub(on_their_way + 2 * lost);
    assert!(others * 2 < ended, "{failed} of {ended} failed, {on_their_way} were on their way");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forgotten_connection_is_replaced_before_the_next_check() {
    let (server, seen) = (Server::start(), Events::default());
    let proxy = Proxy::start(server.port());
    let limiter = connected(patient().deadline(2_000 * MS).observer(seen.clone()), &proxy.url()).await;
    let policy = policy("p", Quota::per_hour(100));
    // A busy machine may take longer than the deadline.
    eventually("a check is decided", async || take(&limiter, &policy, "a", 1).await.is_ok()).await;
    seen.lock().clear();
    let made = limiter.store_load().connections;
    proxy.forget();
    let forgotten = Instant::now();
    eventually("another connection is made", async || limiter.store_load().connections > made).await;
    assert!(forgotten.elapsed() < LONG / 2, "{:?}", forgotten.elapsed());
    let waits = |event: &LimiterEvent| matches!(event, LimiterEvent::StoreFailed { kind: StoreErrorKind::Timeout, .. });
    let waited = seen.lock().iter().filter(|event| waits(event)).count();
    assert_eq!((downs(&seen), waited), (0, 0), "no check found out that it was dead");
    eventually("it can be used", async || take(&limiter, &policy, "a", 1).await.is_ok()).await;
}

/// Starts a server whose answers come later than the limiter's deadline, and waits until the limiter has reported that. By
/// then the limiter has measured the round trip, by calls of the script that have more time.
async fn far_server() -> (Server, Proxy, Events, RedisLimiter) {
    let (server, seen) = (Server::start(), Events::default());
    let proxy = Proxy::start(server.port());
    proxy.delay(100 * MS);
    let builder = RedisLimiter::builder().deadline(50 * MS).observer(seen.clone());
    let limiter = builder.connect(&proxy.url()).await.unwrap();
    let is_far = |event: &LimiterEvent| matches!(event, LimiterEvent::StoreFar { .. });
    eventually("the server is reported as far", async || seen.lock().iter().any(is_far)).await;
    (server, proxy, seen, limiter)
}

/// When a check hears that the server does not know the script, no time is left to send the text.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forgotten_script_is_learned_though_all_answers_are_late() {
    let (server, _proxy, seen, limiter) = far_server().await;
    let policy = policy("p", Quota::per_hour(1_000_000));
    let mut admin = server.connection();
    let mut texts = || {
        let stats: String = redis::cmd("INFO").arg("commandstats").query(&mut admin).unwrap();
        let calls = stats.lines().find_map(|line| line.strip_prefix("cmdstat_eval:calls=")?.split_once(','));
        calls.map_or(0, |(calls, _)| calls.parse::<u64>().unwrap())
    };
    eventually("the server learns the script, and not because it is taken for dead", async || {
        let (down, began) = (downs(&seen), Instant::now());
        tell(&server, &["CONFIG", "RESETSTAT"]);
        while began.elapsed() < 2_500 * MS {
            tell(&server, &["SCRIPT", "FLUSH"]);
            drop(take(&limiter, &policy, "a", 1).await);
        }
        // A server that is taken for dead on a busy machine is probed four times a second.
        let (texts, most) = (texts(), 4 + 4 * began.elapsed().as_secs());
        assert!(texts <= most, "{texts} texts in {:?}: not one for each check", began.elapsed());
        texts > 0 && downs(&seen) == down
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn process_that_starts_while_redis_is_slow_serves_later() {
    let (_server, proxy, _seen, limiter) = far_server().await;
    let policy = policy("p", Quota::per_hour(1_000));
    // A machine that stops meanwhile takes the server for dead, and the error says so. Or it finds the answer when it
    // goes on.
    eventually("the error names the deadline", async || {
        take(&limiter, &policy, "a", 1).await.is_err_and(|error| error.to_string().contains("50ms"))
    })
    .await;
    proxy.delay(Duration::ZERO);
    proxy.reset(); // a delay is that of a connection
    eventually("checks are decided", async || take(&limiter, &policy, "a", 1).await.is_ok()).await;
}

/// A process that lacks processor time reads no answer in time, so its probe shows nothing about the server.
#[tokio::test]
async fn far_redis_does_not_become_ready_to_a_busy_process() {
    let (_server, proxy, _seen, limiter) = far_server().await;
    eventually("the probe fails", async || limiter.probe().await.is_err()).await;
    for _ in 0..3 {
        sleep(1_000 * MS).await; // a probe is sent once a second
        let probed = limiter.clone();
        let probe = tokio::spawn(async move { probed.probe().await });
        tokio::task::yield_now().await;
        std::thread::sleep(90 * MS);
        probe.await.unwrap().expect_err("no answer comes within the deadline");
    }
    proxy.delay(Duration::ZERO);
    proxy.reset(); // a delay is that of a connection
    eventually("the probe succeeds", async || limiter.probe().await.is_ok()).await;
}

/// Both are silent for too long. Paused writes answer new connections, and no scripts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_that_stands_still_is_told_from_one_that_is_silent() {
    let (server, seen) = (Server::start(), Events::default());
    let proxy = Proxy::start(server.port());
    // A new connection may take five times as long, also on a busy machine.
    let builder = RedisLimiter::builder().deadline(1_000 * MS).observer(seen.clone());
    let limiter = connected(builder, &proxy.url()).await;
    let policy = policy("p", Quota::per_hour(1_000_000));
    let is_down = |event: &LimiterEvent, words: &str| match event {
        LimiterEvent::StoreDown { error, .. } => error.contains(words),
        _ => false,
    };
    let says = async |words: &str| {
        drop(take(&limiter, &policy, "a", 1).await);
        seen.lock().iter().any(|event| is_down(event, words))
    };
    tell(&server, &["CLIENT", "PAUSE", "100000", "WRITE"]);
    eventually("it stands still", async || says("answers no script within").await).await;
    assert!(!says("to a new connection within").await);
    proxy.hold(true);
    eventually("it is silent", async || says("to a new connection within").await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn far_redis_is_an_event() {
    let (server, seen) = (Server::start(), Events::default());
    let proxy = Proxy::start(server.port());
    proxy.delay(100 * MS);
    let _limiter = connected(RedisLimiter::builder().deadline(190 * MS).observer(seen.clone()), &proxy.url()).await;
    let is_far = |event: &LimiterEvent| match event {
        LimiterEvent::StoreFar { round_trip, deadline, .. } => *round_trip >= 95 * MS && *deadline == 190 * MS,
        _ => false,
    };
    eventually("it is reported", async || seen.lock().iter().any(is_far)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_half_a_second_away_is_reached_within_the_deadline() {
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    proxy.delay(500 * MS);
    let limiter = connected(patient(), &proxy.url()).await;
    assert!(passes(&limiter, &policy("p", Quota::per_hour(1)), "a").await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn proxy_that_refuses_hello_is_no_obstacle() {
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    proxy.does_not_know("HELLO");
    let limiter = connected(patient(), &proxy.url()).await;
    let policy = policy("p", Quota::per_hour(1_000));
    for _ in 0..3 {
        assert!(passes(&limiter, &policy, "a").await);
        proxy.reset();
        eventually("the cut is noticed", async || take(&limiter, &policy, "a", 1).await.is_ok()).await;
    }
}

/// A process sees names as its file of hosts has them, so this test runs in a process that has one of its own.
#[test]
fn name_that_leads_to_another_address_is_followed() {
    const HOSTS: &str = "RATELIMIT_TEST_HOSTS";
    if let Ok(hosts) = std::env::var(HOSTS) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        return runtime.block_on(follow_the_name(&hosts));
    }
    let hosts = std::env::temp_dir().join(format!("ratelimit-hosts-{}", std::process::id()));
    std::fs::write(&hosts, "").unwrap();
    let in_its_own_namespace = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", script]).arg(std::env::current_exe().unwrap()).env(HOSTS, &hosts);
        command
    };
    let mount = format!("mount --bind \"${HOSTS}\" /etc/hosts");
    if !in_its_own_namespace(&mount).output().is_ok_and(|output| output.status.success()) {
        println!("not run: it needs Linux, and root");
        return;
    }
    let test = "connections::name_that_leads_to_another_address_is_followed";
    let output = in_its_own_namespace(&format!("{mount} && exec \"$0\" --exact {test} --nocapture")).output().unwrap();
    let _ = std::fs::remove_file(&hosts);
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

async fn follow_the_name(hosts: &str) {
    let [old, new] = [Server::start(), Server::start()];
    let other = Ipv4Addr::new(127, 0, 0, 2);
    let _proxy = Proxy::start_at((other, old.port()), new.port());
    std::fs::write(hosts, "127.0.0.1 moved.test\n").unwrap();
    let limiter = connected(patient(), &format!("redis://moved.test:{}", old.port())).await;
    let policy = policy("p", Quota::per_hour(100));
    assert!(passes(&limiter, &policy, "a").await);
    tell(&old, &["REPLICAOF", "127.0.0.1", "1"]);
    assert!(take(&limiter, &policy, "a", 1).await.is_err());
    std::fs::write(hosts, format!("{other} moved.test\n")).unwrap();
    let moved = Instant::now();
    eventually("the name is followed", async || take(&limiter, &policy, "a", 1).await.is_ok()).await;
    println!("followed after {:?}", moved.elapsed());
    assert!(!super::keys(&new).is_empty());
}
