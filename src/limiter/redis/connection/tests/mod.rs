//! The store against servers that fail in every way they can.
//!
//! With `--nocapture` each fault prints a row: how many calls, how many failed, the worst and the
//! 99th percentile of their times, how long after the end of the fault the last of them failed, and
//! how much time the machine took from all of them.

mod cluster;
mod faults;
#[path = "../../../../../tests/support/redis_cluster.rs"]
mod redis_cluster;
mod sentinel;
mod setup;
pub(super) mod simulated;
mod traps;

#[path = "../../../../../tests/support/redis_sentinel.rs"]
mod redis_sentinel;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use super::*;
use crate::event::LimiterEvent;
use crate::event::StoreErrorKind;
use crate::limiter::redis::redis_server::{self, Server};
use crate::limiter::redis::script::Script;
use crate::outcome::Observer;

static INCREMENT: LazyLock<Script> = LazyLock::new(|| Script::new("return redis.call('INCRBY', KEYS[1], ARGV[1])"));

/// The time beyond the deadline that a call may take, besides what the machine takes; see [`Lost`].
const SLACK: Duration = Duration::from_millis(200);

/// The time beyond the deadline for the worst of many thousand calls.
const WORST_SLACK: Duration = Duration::from_secs(2);

/// A server that is back is used again within this time.
const RECOVERY: Duration = Duration::from_secs(3);

/// The time that anything else may take on a busy machine.
const LONG: Duration = Duration::from_secs(60);

/// The time of a call that waited for its server.
const LONG_WAIT: Duration = Duration::from_millis(40);

const MS: Duration = Duration::from_millis(1);

/// The error of a call whose caller has stopped waiting; see [`run`].
const NOBODY_WAITS: &str = "nobody waits any more";

fn increment(key: &str) -> Call {
    call(&INCREMENT, key)
}

fn call(script: &'static Script, key: &str) -> Call {
    Call { script, keys: vec![Bytes::copy_from_slice(key.as_bytes())], args: vec![Bytes::from_static(b"1")] }
}

fn slot(key: &str) -> u16 {
    slot_of(key.as_bytes())
}

/// Makes a call, and waits for its answer within the deadline, as checks do. The call goes on after that.
///
/// On a busy machine the caller may stop waiting just before the call fails. So a test of errors calls [`listen`], or
/// expects [`NOBODY_WAITS`] as well.
async fn run(store: &RedisConnections, key: &str) -> Result<RedisReply, RedisError> {
    let (store, key, until) = (store.clone(), key.to_owned(), store.until());
    let call = tokio::spawn(async move { listen(&store, &key, until).await });
    let late = || RedisError::new(StoreErrorKind::Timeout, NOBODY_WAITS);
    tokio::time::timeout_at(until + 5 * MS, call).await.map_or_else(|_| Err(late()), Result::unwrap)
}

/// Makes a call whose caller stops waiting then, and returns how it ends in the end.
async fn listen(store: &RedisConnections, key: &str, until: Instant) -> Result<RedisReply, RedisError> {
    store.reply(&increment(key), slot(key), until).await.map(Option::unwrap)
}

/// Settings of stores whose deadline is not tested: a busy machine keeps it.
fn patient() -> ConnectionSettings {
    ConnectionSettings { deadline: Duration::from_secs(20), ..ConnectionSettings::default() }
}

/// Waits until a call succeeds.
async fn succeeds(store: &RedisConnections, key: &str) {
    let began = Instant::now();
    while let Err(error) = run(store, key).await {
        assert!(began.elapsed() < LONG, "no call succeeds: {error}");
        sleep(5 * MS).await;
    }
}

/// Measures the time that the machine takes from the runtime: how much later than it should a task is woken, in all.
///
/// A busy machine, or one that stops for a while, takes that time from calls as well.
struct Lost {
    task: JoinHandle<()>,
    us: Arc<AtomicU64>,
}

impl Lost {
    fn measure() -> Self {
        let us = Arc::new(AtomicU64::new(0));
        let sum = Arc::clone(&us);
        let task = tokio::spawn(async move {
            loop {
                let began = Instant::now();
                sleep(MS).await;
                // The timer itself is late by up to two milliseconds.
                let late = began.elapsed().saturating_sub(5 * MS);
                sum.fetch_add(u64::try_from(late.as_micros()).unwrap(), Ordering::Relaxed);
            }
        });
        Self { task, us }
    }

    /// Measures as well how long the server answers nothing: it may be the server's process that a busy machine lets
    /// wait. Shorter times than half of what counts as a long wait are left out.
    fn measure_server(&self, server: &Server) {
        let (us, mut connection) = (Arc::downgrade(&self.us), server.connection());
        std::thread::spawn(move || {
            while let Some(us) = us.upgrade() {
                let began = Instant::now();
                if redis::cmd("PING").exec(&mut connection).is_err() {
                    return;
                }
                let took = began.elapsed();
                if took >= LONG_WAIT / 2 {
                    us.fetch_add(u64::try_from(took.as_micros()).unwrap(), Ordering::Relaxed);
                }
                drop(us);
                std::thread::sleep(MS);
            }
        });
    }

    fn time(&self) -> Duration {
        Duration::from_micros(self.us.load(Ordering::Relaxed))
    }
}

impl Drop for Lost {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Remembers its events.
#[derive(Clone, Default)]
struct Heard(Arc<Mutex<Vec<LimiterEvent>>>);

impl Observer for Heard {
    fn on_limiter_event(&self, event: &LimiterEvent) {
        self.0.lock().unwrap().push(event.clone());
    }
}

impl Heard {
    fn settings(&self) -> ConnectionSettings {
        ConnectionSettings { observers: vec![Arc::new(self.clone())], ..ConnectionSettings::default() }
    }

    fn patient(&self) -> ConnectionSettings {
        ConnectionSettings { observers: vec![Arc::new(self.clone())], ..patient() }
    }

    fn count(&self, is: impl Fn(&LimiterEvent) -> bool) -> usize {
        self.0.lock().unwrap().iter().filter(|event| is(event)).count()
    }

    fn downs(&self) -> usize {
        self.count(|event| matches!(event, LimiterEvent::StoreDown { .. }))
    }

    fn ups(&self) -> usize {
        self.count(|event| matches!(event, LimiterEvent::StoreUp { .. }))
    }

    /// Returns whether the last report about servers is that one is up. While a server is down, each new reason is a
    /// report as well.
    fn is_up(&self) -> bool {
        let events = self.0.lock().unwrap();
        let last = events.iter().rev().find_map(|event| match event {
            LimiterEvent::StoreUp { .. } => Some(true),
            LimiterEvent::StoreDown { .. } => Some(false),
            _ => None,
        });
        last == Some(true)
    }

    fn misconfigured(&self) -> usize {
        self.count(|event| matches!(event, LimiterEvent::StoreFailed { kind: StoreErrorKind::Misconfigured, .. }))
    }
}

async fn connected(url: &str, settings: ConnectionSettings) -> RedisConnections {
    let store = RedisConnections::connect(url, settings).unwrap();
    store.wait_until_ready(LONG).await.unwrap();
    store
}

/// Waits for what comes in the background.
async fn eventually(what: &str, mut is: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is() {
        assert!(began.elapsed() < LONG, "{what}");
        sleep(5 * MS).await;
    }
}

/// Calls that come whether or not those before have been answered.
struct Load {
    stop: Arc<AtomicBool>,
    task: JoinHandle<Vec<Sample>>,
    began: Instant,
    fixed: Option<Instant>,
    per_ms: usize,
    store: RedisConnections,
    key: String,
    sent: Arc<AtomicUsize>,
    lost: Lost,
}

struct Sample {
    key: usize,
    began: Instant,
    took: Duration,
    answer: Result<(), RedisError>,
}

async fn sample(store: &RedisConnections, key: usize, name: &str) -> Sample {
    let began = Instant::now();
    let answer = run(store, name).await.map(drop);
    Sample { key, began, took: began.elapsed(), answer }
}

/// The results of the calls to some of the keys.
struct Report {
    calls: usize,
    failed: usize,
    /// The calls that took long, without those that came while the machine stopped.
    waited: usize,
    worst: Duration,
    p99: Duration,
    recovery: Duration,
}

impl Load {
    /// Starts `per_ms` calls each millisecond, to these keys in turn.
    fn start(store: &RedisConnections, per_ms: usize, keys: &[&str]) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (sent, lost) = (Arc::new(AtomicUsize::new(0)), Lost::measure());
        let (own, key, counter) = (store.clone(), (*keys[0]).to_owned(), Arc::clone(&sent));
        let (store, stopped) = (store.clone(), Arc::clone(&stop));
        let keys: Vec<String> = keys.iter().map(ToString::to_string).collect();
        let task = tokio::spawn(async move {
            let mut calls = Vec::new();
            let mut ticks = tokio::time::interval(MS);
            while !stopped.load(Ordering::Relaxed) {
                ticks.tick().await;
                for _ in 0..per_ms {
                    let key = calls.len() % keys.len();
                    let (store, name) = (store.clone(), keys[key].clone());
                    calls.push(tokio::spawn(async move { sample(&store, key, &name).await }));
                }
                counter.store(calls.len(), Ordering::Relaxed);
            }
            let mut samples = Vec::with_capacity(calls.len());
            for call in calls {
                samples.push(call.await.unwrap());
            }
            samples
        });
        Self { stop, task, began: Instant::now(), fixed: None, per_ms, store: own, key, sent, lost }
    }

    /// From now on calls should succeed.
    fn fixed(&mut self) {
        self.fixed = Some(Instant::now());
    }

    /// Returns the number of calls.
    fn sent(&self) -> usize {
        self.sent.load(Ordering::Relaxed)
    }

    /// Ends the calls, the last of which succeeds.
    async fn end(self) -> Samples {
        self.stop.store(true, Ordering::Relaxed);
        let mut samples = self.task.await.unwrap();
        // A machine that cannot do all of them at a time may do none in time.
        let began = Instant::now();
        loop {
            let last = sample(&self.store, 0, &self.key).await;
            let error = last.answer.as_ref().err().cloned();
            samples.push(last);
            let Some(error) = error else { break };
            assert!(began.elapsed() < LONG, "no call succeeds: {error}");
            sleep(5 * MS).await;
        }
        let (per_ms, deadline, lost) = (self.per_ms, self.store.0.deadline, self.lost.time());
        Samples { samples, fixed: self.fixed.unwrap_or(self.began), per_ms, deadline, lost }
    }
}

struct Samples {
    samples: Vec<Sample>,
    fixed: Instant,
    per_ms: usize,
    deadline: Duration,
    /// The time for which this process or the server stood still.
    lost: Duration,
}

impl Samples {
    /// Prints and returns a row about the calls to the keys with these numbers.
    fn of(&self, name: &str, keys: impl Fn(usize) -> bool) -> Report {
        let some: Vec<_> = self.samples.iter().filter(|sample| keys(sample.key)).collect();
        let mut times: Vec<_> = some.iter().map(|sample| sample.took).collect();
        times.sort_unstable();
        let failed: Vec<_> = some.iter().filter(|sample| sample.answer.is_err()).collect();
        let last = failed.iter().map(|sample| sample.began + sample.took).max();
        let mut kinds: Vec<(StoreErrorKind, usize)> = Vec::new();
        for kind in failed.iter().filter_map(|sample| Some(sample.answer.as_ref().err()?.kind())) {
            match kinds.iter_mut().find(|(known, _)| *known == kind) {
                Some((_, count)) => *count += 1,
                None => kinds.push((kind, 1)),
            }
        }
        let waited = times.iter().filter(|took| **took >= LONG_WAIT).count();
        let report = Report {
            calls: times.len(),
            failed: failed.len(),
            // The calls of that time come together after it, and those before it take longer.
            waited: waited.saturating_sub(2 * self.per_ms * usize::try_from(self.lost.as_millis()).unwrap()),
            worst: times.last().copied().unwrap_or_default(),
            p99: times.get(times.len() * 99 / 100).copied().unwrap_or_default(),
            recovery: last.map_or(Duration::ZERO, |last| last.saturating_duration_since(self.fixed)),
        };
        let ms = |time: Duration| time.as_secs_f64() * 1_000.0;
        println!(
            "{name:34} {:6} calls {:6} failed {:5} took 40 ms or more; worst {:6.1} ms, p99 {:6.2} ms; recovery {:5.0} ms; the machine took {:5.0} ms {kinds:?}",
            report.calls,
            report.failed,
            waited,
            ms(report.worst),
            ms(report.p99),
            ms(report.recovery),
            ms(self.lost),
        );
        report
    }

    /// Checks that each call ended in time, and that the server was used again soon, but for the time that the machine
    /// took.
    fn check(&self, name: &str) -> Report {
        let report = self.of(name, |_| true);
        let (deadline, lost) = (self.deadline, self.lost);
        assert!(report.worst <= deadline + WORST_SLACK + lost, "{name}: a call took {:?}", report.worst);
        assert!(report.p99 <= deadline + SLACK + lost, "{name}: one in a hundred calls took {:?}", report.p99);
        assert!(report.recovery <= RECOVERY + 2 * lost, "{name}: it took {:?} to recover", report.recovery);
        report
    }
}

/// Returns the count of the script on the server.
fn counted(server: &Server, key: &str) -> usize {
    redis::cmd("GET").arg(key).query::<Option<usize>>(&mut server.connection()).unwrap().unwrap_or(0)
}
