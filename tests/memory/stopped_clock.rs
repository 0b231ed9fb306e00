//! The laws hold in a process that is stopped and continued while its threads decide, as a
//! container's CPU quota does.
//!
//! A thread that was stopped between reading the clock and reading the state has a reading that is
//! older than the state.
//!
//! The test starts itself as a child process for each algorithm. Eight threads of the child take
//! units of one key on real time and print each receipt. The parent stops and continues the
//! children, and checks the receipts.
//!
//! The moment of an admission cannot be seen from outside, because the thread may be stopped before
//! the call or after it. A receipt is exact: it holds the instant that the decision charged, in the
//! limiter's own time. For a bucket that is the instant at which the unit has drained, for a log
//! the instant of the request, for a window the window. The parent checks that the instants keep
//! the quota's distance, and that each lies between the call and the return of its own decision.
//!
//! `STOPPED_CLOCK_SECONDS=60` runs it for a minute.
#![cfg(unix)]

use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use tower_ratelimit::{
    ConfigError, Key, MemoryLimiter, Policy, Quota,
    clock::{Clock, MonotonicClock},
    quota::Oldest,
};

use crate::support::of_each_algorithm_but;

const THREADS: usize = 8;
const MILLISECOND: Duration = Duration::from_millis(1);
const MS_US: u64 = 1_000;

const CASE: &str = "STOPPED_CLOCK_CASE";
const SECONDS: &str = "STOPPED_CLOCK_SECONDS";

/// The law for the receipts of a quota.
#[derive(Clone, Copy)]
struct Law {
    /// This many units may have one instant.
    units: usize,
    /// The next unit is at least this much later.
    distance_us: u64,
    /// An instant lies at least this long after the call, and at most this long after the return.
    earliest_us: u64,
    latest_us: u64,
}

fn cases() -> Vec<(Quota, Law)> {
    let law = |units, distance_us, earliest_us, latest_us| Law { units, distance_us, earliest_us, latest_us };
    let each = || -> Result<Vec<(Quota, Law)>, ConfigError> {
        Ok(vec![
            // Units drain a millisecond apart. The last unit of a burst drains when the whole burst
            // has.
            (Quota::gcra(1, MILLISECOND)?, law(1, MS_US, MS_US, MS_US)),
            (Quota::leaky_bucket(1, MILLISECOND)?, law(1, MS_US, MS_US, MS_US)),
            (Quota::token_bucket(1, MILLISECOND)?.burst(5)?, law(1, MS_US, MS_US, 5 * MS_US)),
            (Quota::leaky_queue(1, MILLISECOND)?.queue(3)?, law(1, MS_US, MS_US, 4 * MS_US)),
            // A state of two words: 99,999 per minute are one per 600 µs and a fraction, rounded
            // down here.
            (Quota::gcra(99_999, Duration::from_secs(60))?, law(1, 600, 600, 601)),
            // The receipt holds the tick at which the bucket is full, the window's end, or the
            // window's start.
            (Quota::step_bucket(1, MILLISECOND)?, law(1, MS_US, 0, MS_US)),
            (Quota::fixed_window(1, MILLISECOND)?, law(1, MS_US, 0, MS_US)),
            (Quota::sliding_window(1, MILLISECOND)?, law(1, MS_US, 0, 0)),
            (Quota::sliding_window(3, 4 * MILLISECOND)?.buckets(4)?.oldest(Oldest::Counted)?, law(3, 5 * MS_US, 0, 0)),
            (Quota::sliding_log(1, MILLISECOND)?, law(1, MS_US, 0, 0)),
            (Quota::sliding_log(20, 20 * MILLISECOND)?, law(20, 20 * MS_US, 0, 0)),
            // The receipt holds the end of the strikes' window or of the retention, one period
            // after the charge.
            (Quota::block(1, MILLISECOND, MILLISECOND)?, law(1, MS_US, MS_US, MS_US)),
            (Quota::meter(1, MILLISECOND)?, law(1, MS_US, MS_US, MS_US)),
        ])
    };
    let cases = each().expect("the quotas are possible");
    of_each_algorithm_but(&[], cases.iter().map(|(quota, _)| *quota).collect());
    cases
}

/// Takes units for this many seconds, and until there are enough. Prints for each its instant, its call and its return.
fn decide(case: usize, seconds: u64) {
    let (quota, _) = cases().swap_remove(case);
    let policy = Policy::from(quota);
    let key = Key::of("k").expect("it is short");
    let clock = MonotonicClock::new();
    let limiter = MemoryLimiter::builder().max_keys(1_000).clock(clock.clone()).build().expect("the setup is possible");
    let (stop, taken) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let run = || {
            let mut admitted = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                let called = clock.now().as_micros();
                let mut decision = limiter.take_one(&policy, &key, 1);
                let returned = clock.now().as_micros();
                if let Some(receipt) = decision.take_receipt().filter(|_| decision.is_allowed()) {
                    admitted.push((receipt.at_us(), called, returned));
                    taken.fetch_add(1, Ordering::Relaxed);
                }
            }
            admitted
        };
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(run)).collect();
        thread::sleep(Duration::from_secs(seconds));
        while taken.load(Ordering::Relaxed) <= 5 * seconds {
            thread::sleep(MILLISECOND); // a busy machine has not run the threads for long
        }
        stop.store(true, Ordering::Relaxed);
        let mut out = std::io::stdout().lock();
        for thread in threads {
            for (at, called, returned) in thread.join().expect("no thread panics") {
                writeln!(out, "admitted {at} {called} {returned}").expect("the parent reads");
            }
        }
    });
}

/// Stops and continues processes in turn until `ended`, and leaves them running.
fn stop_and_continue(ids: &[String], ended: &AtomicBool) {
    let signal = |name: &str| {
        // A child may have ended already.
        let _ = Command::new("kill").arg(name).args(ids).stderr(Stdio::null()).status();
    };
    let mut turn = 0_u64;
    while !ended.load(Ordering::Relaxed) {
        turn += 1;
        signal("-STOP");
        thread::sleep(Duration::from_millis(5 + turn * 7 % 76));
        signal("-CONT");
        thread::sleep(Duration::from_millis(1 + turn * 5 % 23));
    }
}

fn start(case: usize, seconds: u64) -> Child {
    let this = std::env::current_exe().expect("the test knows its own file");
    Command::new(this)
        .args(["--exact", "stopped_clock::stopped_process_keeps_every_law", "--nocapture"])
        .env(CASE, case.to_string())
        .env(SECONDS, seconds.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the test starts itself")
}

fn check(quota: Quota, law: Law, out: &str) -> usize {
    let mut admitted: Vec<[u64; 3]> = out
        .lines()
        .filter_map(|line| {
            line.split_once("admitted ")?.1.split(' ').map(|n| n.parse().ok()).collect::<Option<Vec<_>>>()
        })
        .filter_map(|numbers| numbers.try_into().ok())
        .collect();
    admitted.sort_unstable();
    for [at, called, returned] in &admitted {
        // A receipt's instant is in whole microseconds, without its fraction.
        assert!(called + law.earliest_us <= at + 1 || law.earliest_us == 0, "{quota}: {at} is of before {called}");
        assert!(*at <= returned + law.latest_us, "{quota}: {at} is of after {returned}");
    }
    let close: Vec<_> =
        admitted.windows(law.units + 1).filter(|pair| pair[law.units][0] - pair[0][0] < law.distance_us).collect();
    assert!(close.is_empty(), "{quota}: {} of {} too close, as {:?}", close.len(), admitted.len(), close[0]);
    admitted.len()
}

#[test]
fn stopped_process_keeps_every_law() {
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let seconds = number(SECONDS).unwrap_or(3);
    if let Some(case) = number(CASE) {
        return decide(case as usize, seconds);
    }
    let cases = cases();
    let children: Vec<Child> = (0..cases.len()).map(|case| start(case, seconds)).collect();
    let ids: Vec<String> = children.iter().map(|child| child.id().to_string()).collect();
    let ended = AtomicBool::new(false);
    let outputs: Vec<_> = thread::scope(|scope| {
        scope.spawn(|| stop_and_continue(&ids, &ended));
        let readers: Vec<_> =
            children.into_iter().map(|child| scope.spawn(|| child.wait_with_output().expect("it ends"))).collect();
        let outputs = readers.into_iter().map(|reader| reader.join().expect("a reader does not panic")).collect();
        ended.store(true, Ordering::Relaxed);
        outputs
    });
    for ((quota, law), output) in cases.into_iter().zip::<Vec<std::process::Output>>(outputs) {
        assert!(output.status.success(), "{quota}: {}", output.status);
        let admitted = check(quota, law, &String::from_utf8_lossy(&output.stdout));
        println!("{quota}: {admitted} admitted");
        assert!(admitted as u64 > 5 * seconds, "{quota}: only {admitted} were admitted");
    }
}
