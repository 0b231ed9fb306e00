//! Four processes that hold places of one key. One of them is killed or stopped.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::{LONG, URL};
use crate::event::LimiterEvent;
use crate::key::Key;
use crate::limiter::redis::limiter::RedisLimiter;
use crate::limiter::redis::redis_server::Server;
use crate::limiter::redis::tests::connected;
use crate::limiter::tests::hold_in_line;
use crate::limiter::{Charge, Limiter, Place};
use crate::outcome::Observer;
use crate::policy::Policy;
use crate::quota::Quota;

/// The job of a process: `hold 2`, `work`, or `line 6 1000`, with the callers and their wait in milliseconds.
const ROLE: &str = "RATELIMIT_TEST_ROLE";

const LIMIT: u64 = 4;
const TASKS: usize = 6;

/// How long a process in line holds a place.
const HELD_FOR: Duration = Duration::from_millis(20);

/// The time after which places lapse. A process renews its places after a third of this time, so it keeps them even if it
/// stands still for the other two thirds on a busy machine.
const LAPSE: Duration = Duration::from_secs(9);

/// The time that a busy machine may take beyond that.
const SLACK: Duration = Duration::from_secs(10);

/// Counts a place of a process, and returns how many all have: what the limiter has to keep, without the limiter.
const COUNT: &str = "
redis.call('HINCRBY', KEYS[1], ARGV[1], ARGV[2])
local all = 0
for _, places in ipairs(redis.call('HVALS', KEYS[1])) do all = all + places end
return all";

/// Prints how many places were forgotten.
struct Printer;

impl Observer for Printer {
    fn on_limiter_event(&self, event: &LimiterEvent) {
        if let LimiterEvent::PlacesForgotten { units, .. } = event {
            say(&format!("forgotten {units}"));
        }
    }
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n{line}").unwrap();
    out.flush().unwrap();
}

fn policy() -> Policy {
    Policy::new("places", Quota::concurrent(LIMIT)).unwrap()
}

async fn limiter(url: &str) -> RedisLimiter {
    let builder = RedisLimiter::builder().deadline(LONG).max_denials(0).places_lapse_after(LAPSE);
    connected(builder.observer(Printer), url).await
}

/// Returns how many places are free.
async fn free(limiter: &RedisLimiter) -> u64 {
    let (policy, key) = (policy(), Key::global());
    limiter.peek(&[Charge::new(&policy, &key).cost(0)]).await.unwrap().charges()[0].remaining()
}

async fn eventually_free(limiter: &RedisLimiter, places: u64, within: Duration) {
    let began = Instant::now();
    loop {
        let free = free(limiter).await;
        if free == places {
            return;
        }
        assert!(began.elapsed() < within, "{free} places are free, not {places}");
        sleep(Duration::from_millis(10)).await;
    }
}

/// Runs as each of the processes, until its input ends. It does nothing in the parent.
#[test]
fn one_of_the_holders() {
    let (Ok(url), Ok(role)) = (std::env::var(URL), std::env::var(ROLE)) else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let (limiter, policy) = (limiter(&url).await, policy());
        let (mut held, stop) = (Vec::new(), Arc::new(AtomicBool::new(false)));
        let mut tasks = Vec::new();
        if let Some(places) = role.strip_prefix("hold ") {
            for _ in 0..places.parse().unwrap() {
                held.push(Place::take(&limiter, &policy, &Key::global(), 1).await.unwrap().unwrap());
            }
        } else if let Some(line) = role.strip_prefix("line ") {
            let (callers, wait_ms) = line.split_once(' ').unwrap();
            let wait = Duration::from_millis(wait_ms.parse().unwrap());
            for _ in 0..callers.parse().unwrap() {
                tasks.push(tokio::spawn(work_in_line(limiter.clone(), wait, Arc::clone(&stop))));
            }
        } else {
            let connection = redis::Client::open(url).unwrap().get_connection().unwrap();
            let connection = Arc::new(Mutex::new(connection));
            for _ in 0..TASKS {
                tasks.push(tokio::spawn(work(limiter.clone(), Arc::clone(&connection), Arc::clone(&stop))));
            }
        }
        say("ready");
        tokio::task::spawn_blocking(|| std::io::stdin().read_line(&mut String::new())).await.unwrap().unwrap();
        drop(held);
        stop.store(true, Ordering::Relaxed);
        for task in tasks {
            task.await.unwrap();
        }
        limiter.close();
        sleep(Duration::from_millis(100)).await;
        say("done");
    });
    std::process::exit(0);
}

/// Takes places for a moment each.
async fn work(limiter: RedisLimiter, connection: Arc<Mutex<redis::Connection>>, stop: Arc<AtomicBool>) {
    let name = std::process::id().to_string();
    let count = |by: i64| {
        let mut eval = redis::cmd("EVAL");
        eval.arg(COUNT).arg(1).arg("counted").arg(&name).arg(by);
        eval.query::<u64>(&mut connection.lock().unwrap()).unwrap()
    };
    let mut taken = 0;
    while !stop.load(Ordering::Relaxed) {
        let Ok(place) = Place::take(&limiter, &policy(), &Key::global(), 1).await.unwrap() else {
            sleep(Duration::from_millis(1)).await;
            continue;
        };
        let all = count(1);
        if all > LIMIT {
            say(&format!("above {all}"));
        }
        sleep(Duration::from_millis(taken % 5)).await;
        count(-1);
        drop(place);
        taken += 1;
    }
    if taken > 0 {
        say("took");
    }
}

/// Waits in line for places, and holds each for a moment. Comes again at once after a refusal.
///
/// Prints a line after the first answer, which comes within the wait.
async fn work_in_line(limiter: RedisLimiter, wait: Duration, stop: Arc<AtomicBool>) {
    let policy = Policy::new("places", Quota::concurrent(LIMIT).max_wait(wait).unwrap()).unwrap();
    let (mut taken, mut refused) = (0, 0);
    while !stop.load(Ordering::Relaxed) {
        match hold_in_line(&limiter, &policy, &Key::global(), 1).await.unwrap() {
            Ok(place) => {
                sleep(HELD_FOR).await;
                drop(place);
                taken += 1;
            }
            Err(_) => refused += 1,
        }
        if taken + refused == 1 {
            say("answered");
        }
    }
    say(&format!("taken {taken}"));
    say(&format!("refused {refused}"));
}

/// One of the processes. It is killed when it is dropped.
struct Process {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Process {
    fn start(server: &Server, role: &str) -> Self {
        let name = "limiter::redis::tests::processes::places::one_of_the_holders";
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([name, "--exact", "--nocapture", "--test-threads=1"])
            .envs([(URL, server.url()), (ROLE, role.to_owned())])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        let mut process = Self { child, input, output };
        process.wait_for("ready");
        process
    }

    /// Reads lines until one begins so. Returns all that were read.
    fn wait_for(&mut self, begins: &str) -> Vec<String> {
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the process ended: {lines:?}");
            let is_last = line.starts_with(begins);
            lines.push(line);
            if is_last {
                return lines;
            }
        }
    }

    fn signal(&self, signal: &str) {
        assert!(Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap().success());
    }

    /// Ends it in order. Returns what it printed.
    fn end(mut self) -> Vec<String> {
        drop(self.input.take());
        self.wait_for("done")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn run<T>(test: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap().block_on(test)
}

#[test]
fn killed_process_loses_its_places_and_none_exceed_the_limit() {
    let server = Server::start();
    run(async {
        let judge = limiter(&server.url()).await;
        let workers: Vec<Process> = (0..3).map(|_| Process::start(&server, "work")).collect();
        let mut connection = server.connection();
        // Longer than the time between two renewals.
        let rounds: u32 = std::env::var("RATELIMIT_CAMPAIGN").map_or(1, |rounds| rounds.parse().unwrap());
        sleep(LAPSE / 2 * rounds).await;
        let printed: Vec<String> = workers.into_iter().flat_map(Process::end).collect();
        let above: Vec<_> = printed.iter().filter(|line| line.starts_with("above")).collect();
        assert!(above.is_empty(), "{above:?} of {LIMIT}");
        let took = printed.iter().filter(|line| line.starts_with("took")).count();
        assert!(took >= 2, "the processes took few places: {printed:?}");
        eventually_free(&judge, LIMIT, SLACK).await;

        let mut victim = Process::start(&server, "hold 3");
        let others = if rounds > 1 { 3 } else { 1 };
        let workers: Vec<Process> = (0..others).map(|_| Process::start(&server, "work")).collect();
        assert!(free(&judge).await <= 1);
        victim.child.kill().unwrap();
        let killed = Instant::now();
        let at_most_one = async || {
            while killed.elapsed() < LAPSE / 2 {
                let free = free(&judge).await;
                assert!(free <= 1 || killed.elapsed() > LAPSE / 2, "{free} are free before they lapsed");
                sleep(Duration::from_millis(20)).await;
            }
        };
        at_most_one().await;
        let printed: Vec<String> = workers.into_iter().flat_map(Process::end).collect();
        assert!(!printed.iter().any(|line| line.starts_with("above")), "{printed:?}");
        let ended = Instant::now(); // the key stays until the places that were taken last lapse
        // Nobody asks for the key, and it goes.
        let is_there = |connection: &mut redis::Connection| {
            let keys: Vec<Vec<u8>> = redis::cmd("KEYS").arg("*:places").query(connection).unwrap();
            !keys.is_empty()
        };
        while is_there(&mut connection) {
            assert!(ended.elapsed() < LAPSE + SLACK, "the killed process still holds places");
            sleep(Duration::from_millis(20)).await;
        }
        assert_eq!(free(&judge).await, LIMIT);
        drop(victim);
    });
}

/// Returns the number in a variable of a campaign, or what is usual.
fn number(variable: &str, usual: u64) -> u64 {
    std::env::var(variable).map_or(usual, |number| number.parse().unwrap())
}

/// Four processes wait in line for places of one key. `PLACES_IN_LINE_SECONDS=60` asks for a minute, and for 0.8 of an
/// equal share for each. `PLACES_IN_LINE_WAIT_MS=50 PLACES_IN_LINE_CALLERS=2` measures how many callers of short
/// patience are refused.
#[test]
fn processes_that_wait_in_line_share_a_key() {
    let server = Server::start();
    let (seconds, callers) = (number("PLACES_IN_LINE_SECONDS", 2), number("PLACES_IN_LINE_CALLERS", TASKS as u64));
    let long_ms = LONG.as_millis() as u64;
    let wait_ms = number("PLACES_IN_LINE_WAIT_MS", long_ms);
    run(async {
        let role = format!("line {callers} {wait_ms}");
        let mut workers: Vec<Process> = (0..4).map(|_| Process::start(&server, &role)).collect();
        let calls = || -> u64 {
            let info: String = redis::cmd("INFO").arg("commandstats").query(&mut server.connection()).unwrap();
            let line = info.lines().find(|line| line.starts_with("cmdstat_evalsha:")).unwrap();
            line.split(['=', ',']).nth(1).unwrap().parse().unwrap()
        };
        let (before, began) = (calls(), Instant::now());
        sleep(Duration::from_secs(seconds)).await;
        let calls = (calls() - before) / seconds;
        // A busy machine may stop one of them for all of a short test.
        workers.iter_mut().for_each(|worker| drop(worker.wait_for("answered")));
        let took = began.elapsed().as_secs_f64();
        workers.iter_mut().for_each(|worker| drop(worker.input.take())); // they end together
        let printed: Vec<Vec<String>> = workers.into_iter().map(Process::end).collect();
        let of = |words: &str| -> Vec<u64> {
            let number = |line: &String| line.trim().strip_prefix(words).map_or(0, |number| number.parse().unwrap());
            printed.iter().map(|lines| lines.iter().map(number).sum()).collect()
        };
        let (taken, refused) = (of("taken "), of("refused ").iter().sum::<u64>());
        let all: u64 = taken.iter().sum();
        let used = all as f64 * HELD_FOR.as_secs_f64() / (took * LIMIT as f64);
        println!(
            "{taken:?} places, {:.0} % of the time of all; {refused} of {} refused; {calls} calls a second",
            100.0 * used,
            all + refused
        );
        if wait_ms < long_ms {
            return;
        }
        assert_eq!(refused, 0);
        // A busy machine may stop one of them for most of a short test.
        let has_its_share = |taken: u64| if seconds < 30 { taken > 0 } else { 4 * 10 * taken >= 8 * all };
        assert!(taken.iter().all(|taken| has_its_share(*taken)), "a process starves: {taken:?}");
    });
}

#[test]
fn stopped_process_asserts_its_places_with_an_event() {
    let server = Server::start();
    run(async {
        let judge = limiter(&server.url()).await;
        let mut stopped = Process::start(&server, "hold 3");
        assert_eq!(free(&judge).await, LIMIT - 3);
        stopped.signal("-STOP");
        eventually_free(&judge, LIMIT, LAPSE + SLACK).await;
        let held = Place::take(&judge, &policy(), &Key::global(), LIMIT).await.unwrap().unwrap();
        sleep(LAPSE * 4 / 3).await; // without a renewal, the places of this process would lapse
        assert_eq!(free(&judge).await, 0);
        stopped.signal("-CONT");
        let printed = stopped.wait_for("forgotten");
        assert!(printed.iter().any(|line| line.trim() == "forgotten 3"), "{printed:?}");
        drop(held);
        // Both were held, and what the stopped process still holds counts.
        eventually_free(&judge, LIMIT - 3, SLACK).await;
        stopped.end();
        eventually_free(&judge, LIMIT, SLACK).await;
    });
}
