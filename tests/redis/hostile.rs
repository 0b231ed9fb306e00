//! A proxy cuts, loses, adds and garbles answers of Redis at moments that a seed chooses.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tower_ratelimit::{Quota, RedisLimiter, limiter::StoreErrorKind, quota::Anchor};

use super::{LONG, MINUTE, connected, eventually, patient, policy, take};
use crate::support::proxy::{Fault, Proxy};
use crate::support::redis_server::Server;

/// A check whose answer is lost takes this long. A busy machine keeps it most of the time.
const DEADLINE: Duration = Duration::from_millis(200);

/// The time beyond the deadline that nine of ten checks may take on a busy machine.
const SLACK: Duration = Duration::from_secs(1);

const LIMIT: u64 = 20_000;

/// A random number generator with a seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: usize) -> usize {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut number = self.0;
        number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((number ^ (number >> 31)) % bound as u64) as usize
    }

    fn fault(&mut self) -> Fault {
        let whole: [&[u8]; 5] = [b"+OK\r\n", b":1\r\n", b"$-1\r\n", b"-ERR no\r\n", b"*1\r\n:1\r\n"];
        match self.below(9) {
            0 => Fault::Before(whole[self.below(5)].to_vec()),
            1 => Fault::After(whole[self.below(5)].to_vec()),
            2 => Fault::After((0..1 + self.below(40)).map(|_| b"\r\n+-:$*0123456789x"[self.below(18)]).collect()),
            3 | 4 => Fault::Garble(self.below(4_096), 1 << self.below(8)),
            5 => Fault::Lose,
            6 => Fault::Cut(self.below(4_096)),
            7 => Fault::Reset,
            _ => Fault::HalfClose,
        }
    }
}

/// Tasks that check one key until they are stopped.
struct Load {
    stop: Arc<AtomicBool>,
    admitted: Arc<AtomicU64>,
    tasks: Vec<tokio::task::JoinHandle<Vec<Duration>>>,
}

impl Load {
    fn start(limiter: &RedisLimiter, tasks: usize) -> Self {
        let (stop, admitted) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let tasks = (0..tasks).map(|task| {
            let (limiter, stop, admitted) = (limiter.clone(), Arc::clone(&stop), Arc::clone(&admitted));
            tokio::spawn(async move {
                let (all, own) = (policy("all", lasting()), policy("own", Quota::per_second(1_000_000)));
                let mut times = Vec::new();
                // Of fewer than ten times, a single slow one would be more than a tenth.
                while !stop.load(Ordering::Relaxed) || times.len() < 20 {
                    // Checks of several kinds share calls.
                    let began = Instant::now();
                    if let Ok(decision) = take(&limiter, &all, "all", 1).await {
                        admitted.fetch_add(u64::from(decision.is_allowed()), Ordering::Relaxed);
                    }
                    let _ = take(&limiter, &own, &task.to_string(), 1).await;
                    times.push(began.elapsed());
                    sleep(Duration::from_millis(1)).await;
                }
                times
            })
        });
        let tasks = tasks.collect();
        Self { stop, admitted, tasks }
    }

    /// Returns the units of the shared key that were admitted.
    async fn end(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        let mut times = Vec::new();
        for task in self.tasks {
            times.extend(task.await.expect("no check panics"));
        }
        times.sort_unstable();
        let (most, slowest) = (times[times.len() * 9 / 10], times[times.len() - 1]);
        assert!(most < 2 * DEADLINE + SLACK && slowest < LONG, "two checks took {most:?}, and at most {slowest:?}");
        self.admitted.load(Ordering::Relaxed)
    }
}

/// It begins with the first request, so that it does not end while the test runs.
fn lasting() -> Quota {
    Quota::fixed_window(LIMIT, 30 * 24 * 60 * MINUTE).and_then(|quota| quota.anchor(Anchor::FirstRequest)).unwrap()
}

/// Waits until every check succeeds again, and fails after a bounded time.
async fn is_back(limiter: &RedisLimiter) {
    let (policy, began) = (policy("back", Quota::per_second(1_000_000)), Instant::now());
    let mut in_a_row = 0;
    while in_a_row < 50 {
        match take(limiter, &policy, "a", 1).await {
            Ok(_) => in_a_row += 1,
            Err(error) => {
                assert!(began.elapsed() < LONG, "{error}");
                in_a_row = 0;
                sleep(Duration::from_millis(5)).await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbling_proxy_harms_no_limit() {
    let mut server = Server::start();
    let proxy = Proxy::start(server.port());
    let limiter = connected(RedisLimiter::builder().max_denials(0).deadline(DEADLINE), &proxy.url()).await;
    for seed in 0..6 {
        let (mut dice, load) = (Dice(seed), Load::start(&limiter, 8));
        let mut garbled = 0;
        for _ in 0..40 {
            let fault = dice.fault();
            garbled += u64::from(matches!(fault, Fault::Garble(..)));
            proxy.fault(fault);
            sleep(Duration::from_millis(dice.below(20) as u64)).await;
        }
        if seed % 2 == 1 {
            tokio::task::block_in_place(|| server.restart());
        }
        proxy.behave();
        is_back(&limiter).await;
        let admitted = load.end().await;
        // An answer with a changed bit may say anything. It holds at most 64 checks.
        assert!(admitted <= LIMIT + 64 * garbled, "seed {seed}: {admitted} of {LIMIT}");
        eventually("checks or connections stay", async || limiter.waiting() == 0 && proxy.open() <= 1).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn surplus_answer_fails_few_checks() {
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    let limiter = connected(patient(), &proxy.url()).await;
    let policy = policy("p", Quota::per_second(1_000_000));
    for round in 0..5 {
        is_back(&limiter).await;
        proxy.fault(Fault::Before(b"+OK\r\n".to_vec()));
        let mut kinds = Vec::new();
        for _ in 0..400 {
            if let Err(error) = take(&limiter, &policy, "a", 1).await {
                kinds.push(error.kind());
            }
        }
        assert!(kinds.contains(&StoreErrorKind::Foreign), "round {round}: the fault was there: {kinds:?}");
        let foreign = kinds.iter().filter(|kind| **kind == StoreErrorKind::Foreign).count();
        assert!(foreign <= 2, "round {round}: {foreign} answers of others");
        sleep(Duration::from_millis(200)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeated_answer_is_not_taken_for_that_of_another_check() {
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    let limiter = connected(RedisLimiter::builder().max_denials(0).deadline(DEADLINE), &proxy.url()).await;
    let [open, closed] = [("open", 1_000_000), ("closed", 1)].map(|(name, limit)| policy(name, Quota::per_hour(limit)));
    is_back(&limiter).await;
    // A check that takes the only unit may fail on a busy machine, and so may the next one.
    eventually("nothing is left", async || take(&limiter, &closed, "a", 1).await.is_ok_and(|it| !it.is_allowed()))
        .await;
    for round in 0..100 {
        is_back(&limiter).await;
        proxy.fault(Fault::Repeat);
        for _ in 0..3 {
            // Two calls of the same form under way.
            let answers = tokio::join!(take(&limiter, &open, "a", 1), take(&limiter, &closed, "a", 1));
            for (answer, is_open) in [(answers.0, true), (answers.1, false)] {
                assert!(answer.is_err() || answer.is_ok_and(|it| it.is_allowed() == is_open), "round {round}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_answer_fails_checks_for_a_bounded_time() {
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    let limiter = connected(RedisLimiter::builder().max_denials(0).deadline(DEADLINE), &proxy.url()).await;
    for tasks in [1, 40] {
        let load = Load::start(&limiter, tasks);
        sleep(Duration::from_millis(100)).await;
        proxy.fault(Fault::Lose);
        while proxy.faults() > 0 {
            sleep(Duration::from_millis(1)).await;
        }
        is_back(&limiter).await;
        load.end().await;
    }
}
