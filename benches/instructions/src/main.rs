//! Instructions of one check and of one request: unlike times, the same on a busy machine as on a quiet one.
//!
//! `cargo run --profile bench --package instructions` counts them with callgrind and compares them with
//! `baseline.txt`. More than 3 % above it is a failure; `-- --update` writes the file anew.
//!
//! Each case is counted in a process of its own, without what it takes to set up. A compiler of another version makes
//! other code: then the counts are shown beside the baseline, and nothing fails.

use std::convert::Infallible;
use std::fmt::Write as _;
use std::future::{self, Future, pending, ready};
use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::pin::pin;
use std::process::{Command, ExitCode};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::body::Body;
use axum::extract::ConnectInfo;
use http::{Request, Response};
use tower::limit::ConcurrencyLimit;
use tower::{Layer, Service};
use tower_ratelimit::{
    ConfigError, Headers, Key, MemoryLimiter, Policy, Quota, RateLimitLayer, Rule,
    clock::{ManualClock, Sleep, Timer},
    key,
    limiter::{BoxLimiter, Charge, Ready},
    observe::Stats,
    quota::Calendar,
};

const BASELINE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/baseline.txt");

/// Keys that take turns.
const KEYS: u32 = 10_000;

/// A snapshot of no states. It has the secret of the fingerprints, so each run puts the keys into the same slots.
const EMPTY: [&[u8]; 4] = [b"trl-snap\x01", b"one seed", b"2nd seed", &[0; 16]];

/// So far a count may lie from its baseline, in hundredths of it.
const TOLERANCE: u64 = 3;

/// One check, and the same by `Ready`, which may take [`READY_MOST`] hundredths of it.
const ONE_CHECK: &str = "check, token bucket";
const BY_READY: &str = "check, by Ready, no caller waits";
const READY_MOST: u64 = 130;

/// The service that does nothing; what it takes is not the layer's.
const BARE: &str = "the request alone";

type Run = Box<dyn FnMut(u64)>;

/// A case's name, and what sets it up.
type Case = (&'static str, fn() -> Run);

fn address(n: u64) -> IpAddr {
    IpAddr::V4(Ipv4Addr::from(0x0a00_0000 + (n % u64::from(KEYS)) as u32)) // below 2^32
}

fn limiter() -> MemoryLimiter {
    let builder = MemoryLimiter::builder().max_keys(20_000).clock(ManualClock::new());
    builder.restore(EMPTY.concat()).build().expect("the setup is possible")
}

/// So much that nothing runs dry here.
fn plenty() -> Quota {
    Quota::per_hour(1_000_000)
}

fn check(quota: Quota) -> Run {
    let (limiter, policy) = (limiter(), Policy::from(quota));
    let mut next = 0;
    Box::new(move |n| {
        for _ in 0..n {
            next += 1;
            let key = Key::of(address(next)).unwrap_or(Key::global());
            let decision = limiter.take_one(&policy, &key, 1);
            black_box(&decision);
        }
    })
}

/// Takes a unit by `Ready` while no caller waits.
fn check_by_ready() -> Run {
    let (ready, policy) = (Ready::new(limiter()), Policy::from(plenty()));
    let mut next = 0;
    Box::new(move |n| {
        let mut context = Context::from_waker(Waker::noop());
        for _ in 0..n {
            next += 1;
            let key = Key::of(address(next)).unwrap_or(Key::global());
            let taken = pin!(ready.take_one(&policy, &key, 1)).poll(&mut context);
            drop(black_box(taken));
        }
    })
}

/// A timer that wakes nobody.
#[derive(Debug)]
struct Stopped;

impl Timer for Stopped {
    fn now(&self) -> Duration {
        Duration::ZERO
    }

    fn sleep_until(&self, _: Duration) -> Sleep {
        Box::pin(pending())
    }
}

/// Takes places and returns them, while a caller waits for a place of a key that is not among those. The caller's place
/// and its wait use no function that another case uses, because the compiler inlines a function into its only caller.
fn take_beside_a_waiter() -> Run {
    let (limiter, policy, key) = (limiter(), Policy::from(Quota::concurrent(3)), Key::global());
    let held = limiter.take_one(&policy, &key, 3);
    let (ready, own) = (Ready::new(BoxLimiter::new(limiter.clone())).timer(Stopped), policy.clone());
    let mut waiter = Box::pin(async move { ready.take_one(&own, &key, 1).await });
    assert!(waiter.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending(), "no place is free");
    let mut run = take_and_return_of(limiter, policy, false);
    Box::new(move |n| {
        let _stay = (&held, &waiter);
        run(n);
    })
}

fn calendar(calendar: Result<Calendar, ConfigError>) -> Quota {
    Quota::calendar(1_000_000, calendar.expect("it is a calendar")).expect("possible")
}

/// Takes a place and returns it.
fn take_and_return(is_held: bool) -> Run {
    take_and_return_of(limiter(), Policy::from(Quota::concurrent(3)), is_held)
}

fn take_and_return_of(limiter: MemoryLimiter, policy: Policy, is_held: bool) -> Run {
    let mut next = 0;
    Box::new(move |n| {
        for _ in 0..n {
            next += 1;
            let key = Key::of(address(next)).unwrap_or(Key::global());
            if is_held {
                drop(black_box(limiter.hold(&policy, &key, 1)));
                continue;
            }
            let mut decision = limiter.take_one(&policy, &key, 1);
            let receipt = black_box(&mut decision).take_receipt().expect("it took one");
            limiter.refund_one(&policy, &key, receipt);
        }
    })
}

/// A set of so many policies, each with the same key.
fn check_set(policies: usize) -> Run {
    let limiter = limiter();
    let named = |name: &&str| Policy::new(*name, plenty()).expect("it is a name");
    let policies: Vec<Policy> = ["a", "b", "c"][..policies].iter().map(named).collect();
    let mut next = 0;
    Box::new(move |n| {
        for _ in 0..n {
            next += 1;
            let key = Key::of(address(next)).unwrap_or(Key::global());
            let charge = |policy| Charge::new(policy, &key);
            let decision = match policies.as_slice() {
                [a, b] => limiter.take_now(&[charge(a), charge(b)]),
                [a, b, c] => limiter.take_now(&[charge(a), charge(b), charge(c)]),
                _ => unreachable!("sets of two and of three"),
            };
            black_box(&decision);
        }
    })
}

#[derive(Clone)]
struct Bare;

impl Service<Request<Body>> for Bare {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = future::Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        ready(Ok(Response::new(Body::empty())))
    }
}

fn drive<S: Service<Request<Body>> + 'static>(mut service: S) -> Run {
    let mut next = 0;
    Box::new(move |n| {
        let mut context = Context::from_waker(Waker::noop());
        for _ in 0..n {
            next += 1;
            let mut request = Request::new(Body::empty());
            request.extensions_mut().insert(ConnectInfo(SocketAddr::new(address(next), 4711)));
            let _ = service.poll_ready(&mut context);
            match pin!(service.call(request)).poll(&mut context) {
                Poll::Ready(Ok(response)) => drop(black_box(response)),
                _ => unreachable!("the service answers at once"),
            }
        }
    })
}

fn layer(quota: Quota, headers: Headers) -> RateLimitLayer<MemoryLimiter> {
    RateLimitLayer::new(limiter(), quota, key::peer_ip()).headers(headers)
}

/// A layer whose quota each request brings.
fn own_quota(headers: Headers) -> RateLimitLayer<MemoryLimiter> {
    let quota = plenty();
    let rule = Rule::quota_from("customer", move |_| quota).expect("it is a name");
    RateLimitLayer::new(limiter(), rule, key::peer_ip()).headers(headers)
}

fn stats() -> Stats {
    Stats::builder().clock(ManualClock::new()).build()
}

fn three_policies(headers: Headers) -> RateLimitLayer<MemoryLimiter> {
    layer(plenty(), headers)
        .and(Quota::per_minute(900_000), key::peer_ip())
        .and(Quota::per_day(8_000_000), key::peer_ip())
}

/// Every case by its name.
fn cases() -> Vec<Case> {
    const HOUR: Duration = Duration::from_secs(3_600);
    vec![
        (ONE_CHECK, || check(plenty())),
        ("check, token bucket, interval not whole", || check(Quota::per_hour(7_000_000))),
        ("check, token bucket, state of two words", || check(Quota::per_hour(7_000_003))),
        ("check, fixed window", || check(Quota::fixed_window(1_000_000, HOUR).expect("possible"))),
        // The clock stands at the first instant of a month, when its window is longest.
        ("check, calendar month", || check(Quota::per_calendar_month(1_000_000))),
        ("check, calendar month from day 31", || check(calendar(Calendar::month().from_day(31)))),
        ("check, calendar day in a zone", || check(calendar(Calendar::day().zone("Europe/Berlin")))),
        ("check, sliding window", || check(Quota::sliding_window(1_000_000, HOUR).expect("possible"))),
        ("check, denied", || check(Quota::per_hour(1))),
        ("check, place, taken and returned", || take_and_return(false)),
        ("check, place, held and dropped", || take_and_return(true)),
        ("check, place, a caller waits for another key", take_beside_a_waiter),
        ("check of two policies", || check_set(2)),
        ("check of three policies", || check_set(3)),
        (BY_READY, check_by_ready),
        (BARE, || drive(Bare)),
        ("layer, allowed, no header fields", || drive(layer(plenty(), Headers::none()).layer(Bare))),
        ("layer, allowed, header fields", || drive(layer(plenty(), Headers::default()).layer(Bare))),
        ("layer, allowed, no header fields, own quota", || drive(own_quota(Headers::none()).layer(Bare))),
        ("layer, allowed, header fields, own quota", || drive(own_quota(Headers::default()).layer(Bare))),
        ("layer, refused, header fields", || drive(layer(Quota::per_hour(1), Headers::default()).layer(Bare))),
        ("layer, allowed, no header fields, statistics", || {
            drive(layer(plenty(), Headers::none()).observer(stats()).layer(Bare))
        }),
        ("layer, allowed, no header fields, use by key", || {
            let stats = Stats::builder().clock(ManualClock::new()).count_use(true).build();
            drive(layer(plenty(), Headers::none()).observer(stats).layer(Bare))
        }),
        ("layer, refused, header fields, statistics", || {
            drive(layer(Quota::per_hour(1), Headers::default()).observer(stats()).layer(Bare))
        }),
        ("layer, refused, header fields, last refusals", || {
            let stats = Stats::builder().clock(ManualClock::new()).max_recent_refusals(1_000).build();
            drive(layer(Quota::per_hour(1), Headers::default()).observer(stats).layer(Bare))
        }),
        ("layer of three policies, no header fields", || drive(three_policies(Headers::none()).layer(Bare))),
        ("layer of three policies, header fields", || drive(three_policies(Headers::default()).layer(Bare))),
        ("layers, three of one policy, no header fields", || {
            let layer = || layer(plenty(), Headers::none());
            drive(layer().layer(layer().layer(layer().layer(Bare))))
        }),
        ("layer of a concurrency limit, no header fields", || {
            drive(layer(Quota::concurrent(3), Headers::none()).layer(Bare))
        }),
        ("layer, Tower's ConcurrencyLimit", || drive(ConcurrencyLimit::new(Bare, 3))),
        ("layer around a layer, header fields", || {
            let inner = Rule::new("inner", plenty()).expect("it is a name");
            let inner = RateLimitLayer::new(limiter(), inner, key::peer_ip());
            drive(layer(plenty(), Headers::default()).layer(inner.layer(Bare)))
        }),
    ]
}

/// The argument that follows this one.
fn argument(name: &str) -> Option<String> {
    std::env::args().skip_while(|argument| argument != name).nth(1)
}

fn is_given(name: &str) -> bool {
    std::env::args().any(|argument| argument == name)
}

/// Runs a case as often as there are keys. Callgrind counts what happens in here, so it stays a function.
#[inline(never)]
fn measured_runs(run: &mut Run) {
    run(u64::from(KEYS));
}

/// Returns the instructions of one run of a case, by a process of this bench.
fn measure(case: &str) -> Result<u64, String> {
    let bench = std::env::current_exe().map_err(|error| error.to_string())?;
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null", "--toggle-collect=*measured_runs*"])
        .arg(bench)
        .args(["--case", case])
        .output()
        .map_err(|error| format!("valgrind: {error}. Install it, on Debian with: apt-get install valgrind"))?;
    let told = String::from_utf8_lossy(&output.stderr);
    let collected = told.lines().find_map(|line| line.split("Collected :").nth(1)?.trim().parse().ok());
    match collected {
        Some(collected @ 1..) if output.status.success() => Ok(collected / u64::from(KEYS)),
        _ => Err(format!("{case}: valgrind failed: {told}")),
    }
}

/// Returns the compiler's version: another compiler makes other code, which is no news.
fn compiler() -> Result<String, String> {
    let output = Command::new("rustc").arg("-vV").output().map_err(|error| format!("rustc: {error}"))?;
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    let of = |name: &str| told.lines().find_map(|line| line.strip_prefix(name)).map(str::trim).unwrap_or("unknown");
    Ok(format!("rustc {} for {}", of("release:"), of("host:")))
}

/// The baseline's compiler, and the count of each case.
fn baseline() -> (String, Vec<(String, u64)>) {
    let text = std::fs::read_to_string(BASELINE).unwrap_or_default();
    let mut lines = text.lines().filter(|line| !line.starts_with('#'));
    let compiler = lines.next().unwrap_or_default().to_owned();
    let count = |line: &str| {
        let (case, count) = line.rsplit_once("  ")?;
        Some((case.trim_end().to_owned(), count.trim().parse().ok()?))
    };
    (compiler, lines.filter_map(count).collect())
}

fn compare(cases: &[Case]) -> Result<ExitCode, String> {
    let compiler = compiler()?;
    let (known_compiler, known) = baseline();
    let update = is_given("--update");
    let mut file = format!(
        "# Instructions of one operation of {KEYS} keys that take turns; of a layer, those that it adds to {BARE}.\n\
         # Written by: cargo run --profile bench --package instructions -- --update\n{compiler}\n"
    );
    let (mut above, mut below, mut bare, mut one) = (0, 0, 0, 0);
    println!("{:<44} {:>8} {:>8}", compiler, "baseline", "now");
    for (case, _) in cases {
        let mut now = measure(case)?;
        if *case == BARE {
            bare = now;
        } else if case.starts_with("layer") {
            now = now.saturating_sub(bare);
        } else if *case == ONE_CHECK {
            one = now;
        } else if *case == BY_READY && now * 100 > one * READY_MOST {
            println!("{case} takes more than {READY_MOST} % of a check.");
            above += 1;
        }
        let _ = writeln!(file, "{case:<44}  {now:>6}"); // a string takes all
        let Some((_, before)) = known.iter().find(|(name, _)| name == case) else {
            println!("{case:<44} {:>8} {now:>8}   new", "-");
            above += 1;
            continue;
        };
        let mark = if now * 100 > before * (100 + TOLERANCE) {
            above += 1;
            "   MORE"
        } else if now * 100 < before * (100 - TOLERANCE) {
            below += 1;
            "   less"
        } else {
            ""
        };
        println!("{case:<44} {before:>8} {now:>8}{mark}");
    }
    if update {
        std::fs::write(BASELINE, file).map_err(|error| format!("{BASELINE}: {error}"))?;
        println!("{} is written.", Path::new(BASELINE).display());
        return Ok(ExitCode::SUCCESS);
    }
    if compiler != known_compiler {
        println!("The baseline is of {known_compiler}: this shows, and fails nothing.");
        return Ok(ExitCode::SUCCESS);
    }
    if below > 0 {
        println!("{below} of them take less than {TOLERANCE} % below their baseline: keep that with `-- --update`.");
    }
    if above > 0 {
        println!("{above} of them take more than {TOLERANCE} % above their baseline, or have none.");
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

fn main() -> Result<ExitCode, String> {
    let cases = cases();
    if let Some(case) = argument("--case") {
        let (_, make) = cases.iter().find(|(name, _)| *name == case).ok_or("there is no such case")?;
        let mut run = make();
        // Before it is counted every key is there, and the table has grown.
        run(4 * u64::from(KEYS));
        measured_runs(&mut run);
        return Ok(ExitCode::SUCCESS);
    }
    compare(&cases)
}
