//! Mixed traffic for a long time: an axum server in a process of its own, over limiters in memory and on a Redis that
//! is killed and started again every minute. Its memory and its descriptors do not grow, every sum is right, and no
//! place stays taken.
//!
//! `SOAK_SECONDS` says how long the traffic lasts. Without it the soak is of some seconds, which finds what is broken
//! at once, but no growth. `GLIBC_TUNABLES=glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1` leaves out the freed
//! blocks that glibc keeps for each thread, and most of those that it keeps in its heaps. Both become more for hours.
//!
//! `SOAK_KEEPS` names a folder of a soak that has slices: each goes on with the data that the slice before left in its
//! Redis, and the slope of the memory is that of all slices.

mod clients;
mod figures;
mod kept;
mod shop;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tokio::time::Instant;

use crate::support::redis_server::{Server, processor_time};
use clients::{Addresses, Clients};
use figures::{Figures, descriptors, resident, slope};
use kept::Kept;

/// The folder with the file of rules, which makes this a process of the soak.
const FOLDER: &str = "RATELIMIT_SOAK_FOLDER";
const URL: &str = "RATELIMIT_SOAK_URL";

/// The most growth of the process: its slope in half an hour and more of all slices, and all of it in a shorter soak, in
/// which the tables and the pools of the allocator still fill.
const SLOPE_MB: f64 = 1.0;
const SLOPE_SECONDS: f64 = 1_800.0;
const GROWTH: f64 = 16e6;

/// The most that the descriptors grow while the same number of clients is connected.
const DESCRIPTORS: usize = 16;

/// The times of a soak.
struct Times {
    /// The whole of it.
    all: Duration,
    /// After this time the memory has to be flat.
    warm: Duration,
    /// From one kill of Redis to the next.
    round: Duration,
    /// How long Redis is away.
    away: Duration,
    /// From one change of the rules to the next. A change is taken when the file has stayed for a second.
    change: Duration,
    /// From one look at the process to the next.
    sample: Duration,
}

impl Times {
    fn new() -> Self {
        let seconds = std::env::var("SOAK_SECONDS").ok().and_then(|seconds| seconds.parse::<f64>().ok()).unwrap_or(6.0);
        let at_most = |most: f64, part: f64| Duration::from_secs_f64(most.min(seconds / part));
        Self {
            all: Duration::from_secs_f64(seconds),
            warm: at_most(1_800.0, 3.0),
            round: at_most(60.0, 3.0),
            away: at_most(3.0, 10.0),
            change: at_most(10.0, 3.0),
            sample: at_most(10.0, 30.0),
        }
    }
}

/// The process with the server. It ends with this, or with the parent.
struct Process {
    child: Child,
    folder: PathBuf,
}

impl Process {
    fn start(url: &str) -> (Self, Addresses) {
        let folder = std::env::temp_dir().join(format!("tower-ratelimit-soak-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        write_rules(&folder, 0);
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["soak::server_of_the_soak", "--exact", "--nocapture", "--test-threads=1"])
            .env(FOLDER, &folder)
            .env(URL, url)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let process = Self { child, folder };
        let line = lines.map_while(Result::ok).find_map(|line| Some(line.split_once("serves at ")?.1.to_owned()));
        let line = line.expect("the server says its addresses");
        let (http1, http2) = line.split_once(' ').expect("there are two");
        let addresses = Addresses { http1: http1.parse().unwrap(), http2: http2.parse().unwrap() };
        (process, addresses)
    }

    fn id(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Writes the next version of the rules: the quota and the other rules change, and one version of six is broken.
fn write_rules(folder: &Path, version: u32) {
    let mut text = match version % 6 {
        5 => "rules: [{name: rules-total, quota: 5 per".to_owned(),
        number => format!(
            "rules:\n  - {{name: rules-total, quota: '{} per 30 days, fixed window, from the first request', key: \
             client}}\n",
            shop::MANY + u64::from(number)
        ),
    };
    for other in 0..version % 3 {
        text += &format!("  - {{name: rules-other-{other}, quota: '{} per second', key: client}}\n", 5 + version % 7);
    }
    fs::write(folder.join("rules.new"), text).unwrap();
    fs::rename(folder.join("rules.new"), folder.join("rules.yaml")).unwrap();
}

/// Runs as the process with the server. It does nothing in the parent.
#[test]
fn server_of_the_soak() {
    let (Ok(folder), Ok(url)) = (std::env::var(FOLDER), std::env::var(URL)) else { return };
    // The parent holds the other end. It is closed when the parent ends, however that happens.
    std::thread::spawn(|| {
        let _ = std::io::stdin().read(&mut [0]);
        std::process::exit(1);
    });
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(shop::serve(Path::new(&folder), &url));
}

/// The looks at the process while the clients send.
#[derive(Default)]
struct Looks {
    /// The seconds since the beginning, and the bytes of resident memory, after the process has warmed up.
    memory: Vec<(f64, f64)>,
    /// The descriptors while all clients were connected, before and after that.
    descriptors: [usize; 2],
    kills: u32,
}

/// Sends the traffic, and looks at the process and kills Redis meanwhile. Prints a line each minute.
fn watch(times: &Times, process: &Process, redis: &mut Server, clients: &Clients) -> Looks {
    // On a busy machine no look before the first kill may see all clients connected.
    clients.wait_until_answered();
    let began = Instant::now();
    let mut looks = Looks { descriptors: [descriptors(process.id()), 0], ..Looks::default() };
    let (mut next_kill, mut restart) = (times.round, None);
    let (mut next_look, mut next_line) = (times.sample, Duration::from_secs(60));
    let (mut next_rules, mut version) = (times.change, 0);
    while began.elapsed() < times.all {
        std::thread::sleep(Duration::from_millis(50));
        let now = began.elapsed();
        if now >= next_kill {
            redis.kill();
            looks.kills += 1;
            restart = Some(now + times.away);
            next_kill += times.round;
        }
        if restart.is_some_and(|at| now >= at) {
            redis.restart();
            restart = None;
        }
        if now >= next_rules {
            next_rules += times.change;
            version += 1;
            write_rules(&process.folder, version);
        }
        if now < next_look {
            continue;
        }
        next_look += times.sample;
        let memory = resident(process.id());
        let is_warm = now >= times.warm;
        if is_warm {
            looks.memory.push((now.as_secs_f64(), memory));
        }
        let most = &mut looks.descriptors[usize::from(is_warm)];
        *most = descriptors(process.id()).max(*most);
        if now >= next_line {
            next_line += Duration::from_secs(60);
            println!(
                "{:>4} min: {:.1} MB, {} descriptors, {:.1} s of processor time, {} requests, killed {} times, p99 {}",
                now.as_secs() / 60,
                memory / 1e6,
                descriptors(process.id()),
                processor_time(process.id()).as_secs_f64(),
                clients.sent().all(),
                looks.kills,
                clients.figures().map_or_else(|| "unknown".to_owned(), |figures| figures.times("p99")),
            );
        }
    }
    redis.restart();
    looks
}

#[test]
fn soak_grows_nothing_and_counts_exactly() {
    let times = Times::new();
    // Redis writes each change to its disk before it confirms it, so a kill loses no confirmed charge.
    let kept = Kept::find();
    let mut options =
        vec!["--appendonly".to_owned(), "yes".to_owned(), "--appendfsync".to_owned(), "always".to_owned()];
    options.extend(kept.options());
    let mut redis = Server::with(&options.iter().map(String::as_str).collect::<Vec<_>>());
    let (process, addresses) = Process::start(&redis.url());
    let idle = descriptors(process.id());
    let began = Instant::now();
    let mut clients = Clients::start(addresses);
    kept.check(&clients.before);
    let looks = watch(&times, &process, &mut redis, &clients);
    clients.stop();
    let sent = clients.sent();
    let took = began.elapsed().as_secs_f64();

    let mut figures = None::<Figures>;
    let settled = Instant::now();
    let has_settled = |figures: &Figures| figures.of("taken") == 0 && descriptors(process.id()) <= idle + DESCRIPTORS;
    while settled.elapsed() < shop::LAPSE * 3 && !figures.as_ref().is_some_and(has_settled) {
        std::thread::sleep(Duration::from_millis(100));
        figures = clients.figures().filter(Figures::is_whole);
    }
    let figures = figures.expect("the server says its figures when Redis is back");
    let settled = settled.elapsed();
    let [first, last] = [looks.memory.first(), looks.memory.last()].map(|look| *look.expect("it was looked at"));
    // A few minutes have no slope.
    let slices = kept.keep(&figures, looks.memory);
    let figures = figures.without(&clients.before);
    let watched: f64 = slices.iter().filter_map(|slice| Some(slice.last()?.0 - slice.first()?.0)).sum();
    let slope = Some(slope(&slices) * 3_600.0 / 1e6).filter(|_| watched >= SLOPE_SECONDS);
    let left = descriptors(process.id());
    let used = processor_time(process.id()).as_secs_f64();
    println!(
        "{took:.0} s of traffic, {} kills of Redis: {} requests ({}); {} refused, {} failed, {} abandoned; memory {:.1} to \
         {:.1} MB after {:.0} s{}; descriptors {:?} and {idle} to {left} without clients; {} versions \
         of the rules; p50 {}; p99 {}; {} places taken after {settled:.1?}; {:.1} % of a processor",
        looks.kills,
        sent.all(),
        sent,
        figures.of("limited"),
        figures.of("failed_closed"),
        figures.of("abandoned"),
        first.1 / 1e6,
        last.1 / 1e6,
        first.0,
        slope.map_or_else(String::new, |slope| {
            format!(", {slope:.2} MB/h over {watched:.0} s of {} slices", slices.len())
        }),
        looks.descriptors,
        figures.of("reloads"),
        figures.times("p50"),
        figures.times("p99"),
        figures.of("taken"),
        100.0 * used / took,
    );

    figures.check(took);
    // A short soak on a busy machine may end before the file has been the same for a second.
    assert!(figures.of("reloads") > 1 || took < 60.0, "the rules are never reloaded");
    sent.check();
    assert_eq!(figures.of("taken"), 0, "places are taken");
    let without_expiry = super::keys(&redis).into_iter().find(|key| {
        let left: i64 = redis::cmd("PTTL").arg(key).query(&mut redis.connection()).unwrap();
        left == -1
    });
    assert_eq!(without_expiry, None, "a key has no expiry");
    match slope {
        Some(slope) => assert!(slope <= SLOPE_MB, "the memory grows by {slope:.2} MB in an hour"),
        None => assert!(last.1 - first.1 < GROWTH, "the memory grows from {} to {} bytes", first.1, last.1),
    }
    let [before, after] = looks.descriptors;
    assert!(after <= before + DESCRIPTORS && left <= idle + DESCRIPTORS, "descriptors are left open");
}
