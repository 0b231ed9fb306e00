//! Checks through a Redis of our own: per second, and the server's time and calls for each.

use std::net::{Ipv4Addr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::contenders::redis::{Remote, all};
use crate::race::{Plan, median};
use crate::report::{Better, Case};

const AGAINST: &str = "a textbook script";
const KEYS: u64 = 10_000;

pub fn run(plan: &Plan) -> Vec<Case> {
    let mut cases = Vec::new();
    let server = Server::start();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    for (denied, keys, what) in
        [(false, KEYS, "10k keys"), (false, 1, "one hot key"), (true, 1, "one key that is denied")]
    {
        for tasks in [1, 50, 200] {
            let name = format!("{what}, {tasks} in flight");
            if plan.is_wanted(&name) {
                cases.push(runtime.block_on(case(plan, name, &server, denied, keys, tasks)));
            }
        }
    }
    cases
}

async fn case(plan: &Plan, name: String, server: &Server, denied: bool, keys: u64, tasks: usize) -> Case {
    let mut names = Vec::new();
    let mut limiters = Vec::new();
    for contender in all() {
        if let Some(limiter) = contender.connect(&server.url(), denied).await {
            names.push(contender.name());
            limiters.push(limiter);
        }
    }
    // The scripts are known, the keys are there, and the first request of a key that is denied is gone.
    for limiter in &limiters {
        load(limiter, keys, tasks, Duration::from_millis(20)).await;
    }
    let mut rates = vec![Vec::new(); limiters.len()];
    let mut costs = vec![(0, Spent::default()); limiters.len()];
    for _ in 0..plan.rounds() {
        for (at, limiter) in limiters.iter().enumerate() {
            let before = server.spent().await;
            let started = Instant::now();
            let checks = load(limiter, keys, tasks, plan.round()).await;
            rates[at].push(checks as f64 / started.elapsed().as_secs_f64());
            let after = server.spent().await;
            let (all, spent) = &mut costs[at];
            *all += checks;
            spent.calls += after.calls - before.calls;
            spent.us += after.us - before.us;
        }
    }
    let medians: Vec<f64> = rates.into_iter().map(median).collect();
    let mut case = Case::new(name, "checks/s", Better::Higher, AGAINST, names, &medians);
    let each = |of: fn(&Spent) -> f64| costs.iter().map(move |(checks, spent)| of(spent) / *checks as f64);
    case.note("µs of the server for a check", each(|spent| spent.us).map(|us| (us * 100.0).round() / 100.0));
    case.note("calls for a check", each(|spent| spent.calls as f64).map(|calls| (calls * 1e4).round() / 1e4));
    case.told()
}

/// Checks keys from so many tasks for so long, at least once each, and returns how many there were.
async fn load(limiter: &Arc<dyn Remote>, keys: u64, tasks: usize, time: Duration) -> u64 {
    let deadline = Instant::now() + time;
    let done = Arc::new(AtomicU64::new(0));
    let task = |number: usize| {
        let (limiter, done) = (Arc::clone(limiter), Arc::clone(&done));
        let mut numbers = SmallRng::seed_from_u64(number as u64);
        tokio::spawn(async move {
            loop {
                limiter.check(numbers.random_range(0..keys)).await;
                done.fetch_add(1, Ordering::Relaxed);
                if Instant::now() >= deadline {
                    break;
                }
                // One that answers at once is to leave room for what others wait for.
                tokio::task::consume_budget().await;
            }
        })
    };
    for task in (0..tasks).map(task).collect::<Vec<_>>() {
        task.await.expect("no check panics");
    }
    done.load(Ordering::Relaxed)
}

/// The server's time that scripts and commands took.
#[derive(Clone, Copy, Default)]
struct Spent {
    calls: u64,
    us: f64,
}

/// A server without persistence, on a free port, until it is dropped.
struct Server {
    child: Child,
    port: u16,
}

impl Server {
    fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let port = listener.local_addr().expect("it is bound").port();
        drop(listener);
        let program = std::env::var("REDIS_SERVER").unwrap_or_else(|_| "redis-server".to_owned());
        let child = Command::new(&program)
            .args(["--port", &port.to_string(), "--save", "", "--appendonly", "no", "--bind", "127.0.0.1"])
            .stdout(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("{program}: {error}; on Debian: apt-get install redis-server"));
        let server = Self { child, port };
        let client = redis::Client::open(server.url()).expect("a good URL");
        let patience = Instant::now() + Duration::from_secs(10);
        while client.get_connection().is_err() {
            assert!(Instant::now() < patience, "the server starts");
            std::thread::sleep(Duration::from_millis(20));
        }
        server
    }

    fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Returns the time of commands that came over the network. A script's own commands are in the script's time.
    async fn spent(&self) -> Spent {
        let client = redis::Client::open(self.url()).expect("a good URL");
        let mut connection = client.get_multiplexed_async_connection().await.expect("the server is there");
        let told: String =
            redis::cmd("INFO").arg("commandstats").query_async(&mut connection).await.expect("it answers");
        let scripts = |line: &&str| ["cmdstat_eval:", "cmdstat_evalsha:"].iter().any(|name| line.starts_with(name));
        let mut spent = Spent::default();
        for line in told.lines().filter(scripts) {
            let field = |name: &str| {
                let (_, rest) = line.split_once(name)?;
                rest.split(',').next()?.parse::<f64>().ok()
            };
            spent.calls += field("calls=").unwrap_or(0.0) as u64;
            spent.us += field("usec=").unwrap_or(0.0);
        }
        spent
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
