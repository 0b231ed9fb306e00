//! A file of rules that changes under load, in one process and in four that share a server: what passes is exact, and
//! nothing grows.
//!
//! Each process runs this binary anew, so that nothing else changes the memory that the system reports. Ten changes
//! take about thirteen seconds; `RATELIMIT_CAMPAIGN=10` makes it a hundred.

use std::convert::Infallible;
use std::fs;
use std::future::ready;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::body::Body;
use http::{Request, Response};
use tokio::time::Instant;
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::limiter::Limiter;
use tower_ratelimit::{MemoryLimiter, RateLimitLayer, rules::Rules};

use crate::support::{cases, redis_server::Server, resident};

/// The folder of the file, which makes this a process of the test.
const FOLDER: &str = "RATELIMIT_RELOAD_FOLDER";
/// The server. Without it the process has a limiter in memory.
const URL: &str = "RATELIMIT_RELOAD_URL";

const TASKS: usize = 64;
/// The time between two requests of a task. So not all is used up while the file changes.
const PAUSE: Duration = Duration::from_millis(800);
/// The time for which the other versions stay, which no process takes.
const PASSES: Duration = Duration::from_millis(300);
/// The time for which every second version stays, so that processes take it. They look each tenth of a second, then
/// wait for a second, and take what has not changed: here the second look, since the first is at the version before.
const STAYS: Duration = Duration::from_millis(2_300);
/// The most bytes that a process may grow while the file changes. A version of the rules takes some kilobytes.
const GROWTH: u64 = 1 << 20;

/// The last version, which has the whole quota of `/b`.
const LAST: u32 = 4;

/// The number of changes.
fn changes() -> u32 {
    cases(10)
}

/// The units of the quotas, of which the processes use up some while the file changes.
#[derive(Clone, Copy)]
struct Units {
    of_a: u64,
    /// Most versions have half of it.
    of_b: u64,
}

impl Units {
    fn of(processes: usize) -> Self {
        let each = u64::from(changes()) * processes as u64;
        Self { of_a: 160 * each, of_b: 120 * each }
    }
}

/// Returns a file's text. The rules are renamed, others come and go, and the quota of `/b` changes, each time among the
/// versions that stay as well.
fn text(version: u32, Units { of_a, of_b }: Units) -> String {
    let turn = version / 2 % 4;
    let of_b = if turn == 2 { of_b } else { of_b / 2 };
    let name = if turn % 2 == 0 { "name: a" } else { "name: renamed, was: a" };
    let mut text = format!(
        "rules:\n  - {{{name}, quota: '{of_a} per 30 days, fixed window, from the first request', key: global, match: {{path: /a}}}}\n  \
         - {{name: b, quota: '{of_b} per 30 days, fixed window, from the first request', key: global, match: {{path: /b}}}}\n"
    );
    for other in 0..(turn + version) % 4 {
        text += &format!("  - {{name: other-{other}, quota: 1000000 per day, key: global}}\n");
    }
    text
}

/// Changes the file: writes it in place or by renaming, breaks it, or removes it for a while.
fn change(file: &Path, version: u32, units: Units) {
    let text = text(version, units);
    match version % 5 {
        0 => fs::remove_file(file).unwrap(),
        1 => fs::write(file, "rules: [{name: a, quota: 5 per").unwrap(),
        2 => fs::write(file, text).unwrap(),
        _ => {
            fs::write(file.with_extension("new"), text).unwrap();
            fs::rename(file.with_extension("new"), file).unwrap();
        }
    }
}

/// The counts of a process.
#[derive(Debug, Default)]
struct Counts {
    a: AtomicU64,
    b: AtomicU64,
    refused: AtomicU64,
    /// Any other answer.
    failed: AtomicU64,
}

impl Counts {
    fn all(&self) -> u64 {
        [&self.a, &self.b, &self.refused, &self.failed].map(|count| count.load(Ordering::Relaxed)).iter().sum()
    }

    /// Sends a request. Returns whether it passed.
    async fn request<L: Limiter>(&self, layer: &RateLimitLayer<L>, path: &'static str) -> bool {
        let answer = |_: Request<Body>| ready(Ok::<_, Infallible>(Response::new(Body::empty())));
        let service = layer.layer(service_fn(answer));
        let response = service.oneshot(Request::get(path).body(Body::empty()).unwrap()).await.unwrap();
        let counter = match (response.status().as_u16(), path) {
            (200, "/a") => &self.a,
            (200, _) => &self.b,
            (429, _) => &self.refused,
            _ => &self.failed,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        response.status().is_success()
    }
}

/// Sends requests until the file `done` is there, and then as many as use up what is left.
async fn serve<L: Limiter + Clone>(rules: Rules, limiter: L, folder: PathBuf) {
    let layer = rules.layer(limiter).unwrap();
    let counts = Arc::new(Counts::default());
    let tasks: Vec<_> = (0..TASKS)
        .map(|_| {
            let (layer, counts, done) = (layer.clone(), Arc::clone(&counts), folder.join("done"));
            tokio::spawn(async move {
                while !done.exists() {
                    counts.request(&layer, "/a").await;
                    counts.request(&layer, "/b").await;
                    tokio::time::sleep(PAUSE).await;
                }
            })
        })
        .collect();
    // All tasks have made their first requests, so what they need is there.
    while counts.all() < 4 * TASKS as u64 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let before = resident();
    fs::write(folder.join(format!("ready-{}", std::process::id())), "").unwrap();
    // The parent goes on once each process has seen enough changes.
    let seen = folder.join(format!("seen-{}", std::process::id()));
    while !folder.join("done").exists() {
        if rules.version() >= u64::from(changes()) / 5 && !seen.exists() {
            fs::write(&seen, "").unwrap();
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    for task in tasks {
        task.await.unwrap();
    }
    let grown = resident().zip(before).map_or(0, |(after, before)| after.saturating_sub(before));
    let versions = rules.version();
    rules.reload().unwrap();
    let rest: Vec<_> = (0..TASKS)
        .map(|_| {
            let (layer, counts) = (layer.clone(), Arc::clone(&counts));
            tokio::spawn(async move {
                // A window of 30 days refuses what comes after a refusal as well.
                while counts.request(&layer, "/a").await {}
                while counts.request(&layer, "/b").await {}
            })
        })
        .collect();
    for task in rest {
        task.await.unwrap();
    }
    let counted = [&counts.a, &counts.b, &counts.refused, &counts.failed].map(|count| count.load(Ordering::Relaxed));
    let [a, b, refused, failed] = counted;
    println!("counted {a} {b} {refused} {failed} {versions} {grown}");
}

/// Runs as each of the processes. It does nothing in the parent.
#[tokio::test]
async fn one_of_the_processes() {
    let Some(folder) = std::env::var_os(FOLDER).map(PathBuf::from) else { return };
    let rules = Rules::builder().reload_every(Duration::ZERO).read_file(folder.join("rules.yaml")).unwrap();
    match std::env::var(URL) {
        Ok(url) => serve(rules, super::connected(super::patient(), &url).await, folder).await,
        Err(_) => serve(rules, MemoryLimiter::new(), folder).await,
    }
}

/// Changes the file while processes serve. Checks what they counted.
fn reload_under_load(name: &str, url: Option<&str>, processes: usize) {
    let folder = std::env::temp_dir().join(format!("tower-ratelimit-{}-{name}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let file = folder.join("rules.yaml");
    let units = Units::of(processes);
    fs::write(&file, text(0, units)).unwrap();
    let running: Vec<_> = (0..processes)
        .map(|_| {
            Command::new(std::env::current_exe().unwrap())
                .args(["reload::one_of_the_processes", "--exact", "--nocapture", "--test-threads=1"])
                .env(FOLDER, &folder)
                .envs(url.map(|url| (URL, url)))
                .stdout(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    let all_have = |what: &str| {
        let names = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.to_string_lossy().starts_with(what)).count() == processes
    };
    let began = Instant::now();
    while !all_have("ready-") {
        assert!(began.elapsed() < super::LONG, "the processes do not start");
        std::thread::sleep(Duration::from_millis(10));
    }
    let (changes, mut version) = (changes(), 0);
    // On a slow machine a process may see several changes as one, so there may be more of them.
    while version < changes || !all_have("seen-") {
        assert!(began.elapsed() < super::LONG * changes, "too few of {version} changes are seen");
        version += 1;
        change(&file, version, units);
        std::thread::sleep(if version % 2 == 0 { STAYS } else { PASSES });
    }
    fs::write(&file, text(LAST, units)).unwrap();
    fs::write(folder.join("done"), "").unwrap();
    let mut sums = [0; 4];
    for process in running {
        let output = process.wait_with_output().unwrap();
        let printed = String::from_utf8(output.stdout).unwrap();
        let line =
            printed.lines().find_map(|line| line.split_once("counted ")).unwrap_or_else(|| panic!("{printed}")).1;
        println!("{name}, {version} changes: {line} (passed /a, /b, refused, failed, versions, bytes grown)");
        let [a, b, refused, failed, versions, grown] =
            *line.split(' ').map(|it| it.parse::<u64>().unwrap()).collect::<Vec<_>>()
        else {
            panic!("{line}")
        };
        sums = [sums[0] + a, sums[1] + b, sums[2] + refused, sums[3] + failed];
        // Two of five changes are no rules.
        assert!(versions >= u64::from(changes) / 5, "{versions} of {changes} changes were seen");
        assert!(grown <= GROWTH, "it grew by {grown} bytes");
    }
    fs::remove_dir_all(&folder).unwrap();
    assert_eq!((sums[0], sums[1], sums[3]), (units.of_a, units.of_b, 0), "passed /a, passed /b, failed");
    assert!(sums[2] > 0);
}

#[test]
fn requests_are_counted_in_memory_while_the_file_changes() {
    reload_under_load("reload-memory", None, 1);
}

#[test]
fn four_processes_count_exactly_while_the_file_changes() {
    let server = Server::start();
    reload_under_load("reload-redis", Some(&server.url()), 4);
    // Three of the file's policies may have states of their own, besides `a` and `b`.
    assert!(super::keys(&server).len() <= 5, "{:?}", super::keys(&server));
}
