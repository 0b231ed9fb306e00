//! Outages and misconfigurations of Redis, as a user sees them.

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use http::{Request, Response, StatusCode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::Instant;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_ratelimit::{
    MemoryLimiter, OnError, Quota, RateLimitLayer, RedisLimiter, key as extract,
    limiter::{Charge, FallbackLimiter, Limiter, Refund, StoreErrorKind, redis::RedisError},
    observe::{LimiterEvent, Observer},
};

use super::{LONG, builders, connect, connected, eventually, keys, passes, patient, policy, refusal, take};
use crate::support::proxy::Proxy;
use crate::support::redis_server::{Server, free_port};

#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Vec<LimiterEvent>>>);

impl Observer for Seen {
    fn on_limiter_event(&self, event: &LimiterEvent) {
        self.0.lock().unwrap().push(event.clone());
    }
}

/// Waits until checks succeed.
async fn eventually_passes(limiter: &RedisLimiter) {
    let policy = policy("again", Quota::per_hour(100_000));
    eventually("checks do not succeed again", async || take(limiter, &policy, "a", 1).await.is_ok()).await;
}

/// Whether the error says that there is no answer. A slow machine learns later why, and a busy one may say that it had
/// no time to read an answer.
fn is_unanswered(error: &RedisError) -> bool {
    matches!(error.kind(), StoreErrorKind::Unavailable | StoreErrorKind::Timeout | StoreErrorKind::Overloaded)
}

#[tokio::test]
async fn flushed_scripts_are_no_error() {
    let server = Server::start();
    let limiter = connect(&server).await;
    let policy = policy("flushed", Quota::per_hour(100));
    for _ in 0..5 {
        assert!(passes(&limiter, &policy, "a").await);
        redis::cmd("SCRIPT").arg("FLUSH").exec(&mut server.connection()).unwrap();
    }
    assert_eq!(take(&limiter, &policy, "a", 0).await.unwrap().charges()[0].remaining(), 95, "none was taken twice");
}

/// Otherwise the first check of a process would take two round trips, which may be more than its deadline. `connected`
/// makes a check itself.
#[tokio::test]
async fn first_check_finds_its_script() {
    let server = Server::start();
    let limiter = patient().connect(&server.url()).await.unwrap();
    let mut admin = server.connection();
    let mut commands = || -> String { redis::cmd("INFO").arg("commandstats").query(&mut admin).unwrap() };
    let texts = |commands: &str| {
        let calls = commands.lines().find_map(|line| line.strip_prefix("cmdstat_eval:calls=")?.split(',').next());
        calls.map_or(0, |calls| calls.parse::<u64>().unwrap())
    };
    // On a busy machine a second probe may send the text again.
    eventually("the server is probed", async || {
        let before = texts(&commands());
        tokio::time::sleep(Duration::from_millis(200)).await;
        before > 0 && texts(&commands()) == before
    })
    .await;
    redis::cmd("CONFIG").arg("RESETSTAT").exec(&mut server.connection()).unwrap();
    assert!(passes(&limiter, &policy("first", Quota::per_hour(100)), "a").await);
    let commands = commands();
    assert!(commands.contains("cmdstat_evalsha:") && !commands.contains("cmdstat_eval:"), "{commands}");
}

#[tokio::test]
async fn forgotten_scripts_are_an_event() {
    let (server, seen) = (Server::start(), Seen::default());
    let limiter = connected(patient().observer(seen.clone()), &server.url()).await;
    let policy = policy("forgotten", Quota::per_hour(100));
    let is_forgotten = |event: &&LimiterEvent| matches!(event, LimiterEvent::ScriptsForgotten { .. });
    let forgotten = || seen.0.lock().unwrap().iter().filter(is_forgotten).count();
    for _ in 0..3 {
        assert!(passes(&limiter, &policy, "a").await);
    }
    assert_eq!(forgotten(), 0, "a server that has not run them yet has forgotten none");
    let began = Instant::now();
    for _ in 0..3 {
        redis::cmd("SCRIPT").arg("FLUSH").exec(&mut server.connection()).unwrap();
        assert!(passes(&limiter, &policy, "a").await);
    }
    let most = 1 + usize::try_from(began.elapsed().as_secs() / 10).unwrap();
    assert!((1..=most).contains(&forgotten()), "{} events: once in ten seconds", forgotten());
}

#[tokio::test]
async fn probe_fails_while_redis_cannot_write() {
    for trouble in [["CONFIG", "SET", "maxmemory", "1"].as_slice(), &["REPLICAOF", "127.0.0.1", "1"]] {
        let server = Server::start();
        let limiter = connected(patient(), &server.url()).await;
        limiter.probe().await.unwrap();
        redis::cmd(trouble[0]).arg(&trouble[1..]).exec(&mut server.connection()).unwrap();
        eventually("the probe fails", async || limiter.probe().await.is_err()).await;
    }
}

#[tokio::test]
async fn late_server_is_no_error_and_is_found() {
    let mut server = Server::start();
    server.kill();
    let limiter = RedisLimiter::connect(&server.url()).await.unwrap();
    let policy = policy("late", Quota::per_hour(100));
    let error = take(&limiter, &policy, "a", 1).await.unwrap_err();
    assert!(is_unanswered(&error), "{error}");
    server.restart();
    eventually_passes(&limiter).await;
}

#[tokio::test]
async fn dead_server_costs_little_and_is_found_again() {
    for how in ["killed", "stopped"] {
        let mut server = Server::start();
        let seen = Seen::default();
        let limiter = RedisLimiter::builder().observer(seen.clone()).connect(&server.url()).await.unwrap();
        eventually_passes(&limiter).await;
        if how == "killed" {
            server.kill()
        } else {
            server.pause()
        };
        let policy = policy("dead", Quota::per_hour(100));
        let mut waited = 0;
        for _ in 0..500 {
            let began = Instant::now();
            let error = take(&limiter, &policy, "a", 1).await.unwrap_err();
            assert!(is_unanswered(&error), "{how}: {error}");
            // The others end at once, because the server is believed dead or answers too late.
            waited += usize::from(began.elapsed() >= Duration::from_millis(20));
        }
        // A machine that stops for a while makes a few of them slow.
        assert!(waited <= 50, "{how}: {waited} of 500 waited");
        if how == "killed" {
            server.restart()
        } else {
            server.resume()
        };
        eventually_passes(&limiter).await;
        assert!(!seen.0.lock().unwrap().is_empty(), "{how}: no event came");
    }
}

/// Returns the text of an error with its causes, as a log has it.
fn in_words(error: &RedisError) -> String {
    let first: &dyn std::error::Error = error;
    let causes = std::iter::successors(Some(first), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// The operator has to know whether the server is refused, unknown, cut off, silent or late. A client library's words may
/// follow, such as `channel closed`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn error_says_why_redis_does_not_answer() {
    for builder in 0..builders(RedisLimiter::builder).len() {
        let builder = || builders(RedisLimiter::builder).swap_remove(builder);
        let policy = policy("why", Quota::per_hour(1_000_000));
        let fails_by = async |limiter: &RedisLimiter, begin: &str, words: &str| {
            let mut said = String::new();
            let began = Instant::now();
            while !(said.starts_with(begin) && said.contains(words)) {
                assert!(began.elapsed() < LONG, "{begin} … {words}: the last error is {said}");
                if let Err(error) = take(limiter, &policy, "a", 1).await {
                    said = in_words(&error);
                }
                tokio::task::yield_now().await;
            }
        };

        let mut server = Server::start();
        let address = format!("Redis at 127.0.0.1:{}", server.port());
        let limiter = connected(builder(), &server.url()).await;
        server.pause();
        fails_by(&limiter, &format!("{address} is silent: "), "").await;
        server.resume();
        eventually_passes(&limiter).await;
        server.kill();
        fails_by(&limiter, &format!("{address} refuses connections; no check is sent until it answers: "), "efused")
            .await;

        // A label of a name has at most 63 bytes, so no name server is asked.
        let nowhere = format!("{}.test", "x".repeat(64));
        let limiter = builder().connect(&format!("redis://{nowhere}:1")).await.unwrap();
        fails_by(&limiter, &format!("the host name of Redis at {nowhere}:1 does not resolve"), "").await;

        let server = Server::start();
        let proxy = Proxy::start(server.port());
        let limiter = connected(builder().deadline(LONG), &proxy.url()).await;
        server.pause();
        // A check that is cut off before it was sent waits for the next connection.
        proxy.ends_at(":3:why");
        let said = in_words(&take(&limiter, &policy, "a", 1).await.unwrap_err());
        server.resume();
        assert!(said.starts_with("the connection to Redis at 127.0.0.1:") && said.contains(" was cut"), "{said}");

        let proxy = Proxy::start(server.port());
        proxy.delay(Duration::from_millis(100));
        let seen = Seen::default();
        let limiter = builder().observer(seen.clone()).connect(&proxy.url()).await.unwrap();
        fails_by(&limiter, "answers of the store come too late: ", ", and the deadline is 50ms").await;
        let is_late = |text: &String| text.starts_with("answers of Redis at") && text.contains("come too late");
        eventually("the event says so", async || {
            drop(take(&limiter, &policy, "a", 1).await);
            failures(&seen).iter().any(is_late)
        })
        .await;
    }
}

#[tokio::test]
async fn silent_port_costs_no_more_than_the_deadline() {
    let port = free_port();
    let _listener = std::net::TcpListener::bind(("127.0.0.1", port)).unwrap();
    let limiter = RedisLimiter::connect(&format!("redis://127.0.0.1:{port}")).await.unwrap();
    let (policy, mut costs) = (policy("silent", Quota::per_hour(100)), Vec::new());
    for _ in 0..20 {
        let began = Instant::now();
        assert!(take(&limiter, &policy, "a", 1).await.is_err());
        costs.push(began.elapsed());
    }
    // A machine that stops for a while makes a few of them slow.
    costs.sort_unstable();
    assert!(costs[10] < Duration::from_millis(500) && costs[19] < LONG, "{costs:?}");
}

#[tokio::test]
async fn connect_waits_half_a_second_whatever_the_deadline() {
    let listener = std::net::TcpListener::bind(("127.0.0.1", free_port())).unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    let began = Instant::now();
    RedisLimiter::builder().deadline(Duration::from_secs(60)).connect(&url).await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
}

#[tokio::test]
async fn wrong_password_is_reported_by_connect() {
    let server = Server::with(&["--requirepass", "right"]);
    let url = |password: &str| format!("redis://:{password}@127.0.0.1:{}", server.port());
    let refused = refusal(RedisLimiter::builder, &url("wrong")).await;
    assert_eq!(refused.kind(), StoreErrorKind::Misconfigured, "{refused}");
    let limiter = connected(patient(), &url("right")).await;
    assert!(passes(&limiter, &policy("auth", Quota::per_hour(1)), "a").await);
}

/// Starts a server that answers every command with this line. Returns its port.
async fn says(line: &'static str) -> u16 {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut asked = [0; 65_536];
                while let Ok(read) = client.read(&mut asked).await {
                    // A command begins with the number of its parts.
                    let commands = asked[..read].iter().filter(|byte| **byte == b'*').count();
                    let answer = format!("{line}\r\n").repeat(commands);
                    if read == 0 || client.write_all(answer.as_bytes()).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    port
}

#[tokio::test]
async fn connect_fails_only_for_what_does_not_pass_by_itself() {
    for (line, passes_by_itself) in [
        ("-LOADING Redis is loading the dataset in memory", true),
        ("-BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.", true),
        ("-MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", true),
        ("-ERR max number of clients reached", true),
        ("-ERR max number of clients + cluster connections reached", true),
        ("-OOM command not allowed when used memory > 'maxmemory'.", true),
        ("-CLUSTERDOWN The cluster is down", true),
        ("-ERR upstream connection refused", true),
        ("-NOAUTH Authentication required.", false),
        ("-WRONGPASS invalid username-password pair or user is disabled.", false),
        ("-NOPERM this user has no permissions to run the 'ping' command", false),
        ("-DENIED Redis is running in protected mode because protected mode is enabled", false),
        ("-ERR unknown command 'PING', with args beginning with:", false),
    ] {
        let url = format!("redis://127.0.0.1:{}", says(line).await);
        if passes_by_itself {
            let limiter = RedisLimiter::connect(&url).await.unwrap_or_else(|error| panic!("{line}: {error}"));
            let error = take(&limiter, &policy("p", Quota::per_hour(1)), "a", 1).await.unwrap_err();
            assert_ne!(error.kind(), StoreErrorKind::Misconfigured, "{line}: {error}");
        } else {
            let error = refusal(RedisLimiter::builder, &url).await;
            assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{line}: {error}");
        }
    }
}

/// Redis repeats the arguments of a command that it does not know, and those of a check are not UTF-8.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_without_scripts_is_reported_in_its_own_words() {
    let without = Server::with(&["--rename-command", "EVALSHA", "", "--rename-command", "EVAL", ""]);
    let sentinel = Server::sentinel(&[]);
    let server = Server::start();
    let is_told = |error: &RedisError| {
        let said = in_words(error);
        let has = |words: &str| said.contains(words);
        error.kind() == StoreErrorKind::Misconfigured && has("unknown command") && has("redis-sentinel://")
    };
    for builder in 0..builders(patient).len() {
        let builder = || builders(patient).swap_remove(builder);
        for server in [&without, &sentinel] {
            let error = refusal(builder, &server.url()).await;
            assert!(is_told(&error), "{:?}: {error}", error.kind());
        }

        let proxy = Proxy::start(server.port());
        let limiter = connected(builder(), &proxy.url()).await;
        proxy.lead_to(without.port());
        proxy.reset();
        let policy = policy("p", Quota::per_hour(1_000_000));
        let checked = async || take(&limiter, &policy, "a", 1).await;
        eventually("the reason is told", async || checked().await.is_err_and(|error| is_told(&error))).await;
        for _ in 0..20 {
            let error = checked().await.unwrap_err();
            assert!(is_told(&error), "{:?}: {error}", error.kind());
        }
        proxy.lead_to(server.port());
        proxy.reset();
        eventually_passes(&limiter).await;
    }
}

#[tokio::test]
async fn connect_waits_for_room_among_the_clients() {
    let server = Server::start();
    let mut admin = server.connection();
    redis::cmd("CONFIG").arg(&["SET", "maxclients", "1"]).exec(&mut admin).unwrap();
    let limiter = RedisLimiter::connect(&server.url()).await.expect("it passes by itself");
    let error = take(&limiter, &policy("p", Quota::per_hour(1)), "a", 1).await.unwrap_err();
    assert!(is_unanswered(&error), "{error}");
    redis::cmd("CONFIG").arg(&["SET", "maxclients", "100"]).exec(&mut admin).unwrap();
    eventually_passes(&limiter).await;
}

/// The texts of `LimiterEvent::StoreFailed`.
fn failures(seen: &Seen) -> Vec<String> {
    let seen = seen.0.lock().unwrap();
    let error = |event: &LimiterEvent| match event {
        LimiterEvent::StoreFailed { error, .. } => Some(error.clone()),
        _ => None,
    };
    seen.iter().filter_map(error).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failure_of_each_kind_is_an_event_once_a_minute() {
    use StoreErrorKind::{Foreign, Overloaded, Timeout, Unavailable};
    let server = Server::start();
    let mut admin = server.connection();
    // A unit returns after minutes, and its key stays until then.
    let policy = policy("p", Quota::per_hour(10));
    let (mut kinds, mut attempt) = (vec![Unavailable, Timeout, Overloaded, Foreign], 0);
    let began = Instant::now();
    while let Some(kind) = kinds.pop() {
        let (seen, prefix) = (Seen::default(), format!("{kind:?}-{attempt}"));
        attempt += 1;
        let builder = RedisLimiter::builder().observer(seen.clone()).max_in_flight(2);
        // A stopped server ends two checks with the deadline.
        let deadline = Duration::from_secs(if matches!(kind, Timeout | Overloaded) { 2 } else { 20 });
        let limiter = connected(builder.deadline(deadline).prefix(&*prefix), &server.url()).await;
        if take(&limiter, &policy, "a", 1).await.is_err() && began.elapsed() < LONG {
            kinds.push(kind); // a busy machine takes longer than the deadline
            continue;
        }
        match kind {
            Unavailable => redis::cmd("CONFIG").arg(&["SET", "maxmemory", "1"]).exec(&mut admin).unwrap(),
            Timeout | Overloaded => server.pause(),
            _ => {
                let stored = keys(&server).into_iter().find(|key| key.starts_with(prefix.as_bytes())).unwrap();
                redis::cmd("SET").arg(stored).arg("something else").exec(&mut admin).unwrap();
            }
        }
        // They begin in one step, before any of them can end.
        let check = || take(&limiter, &policy, "a", 1);
        let checks = tokio::join!(check(), check(), check());
        let errors = [checks.0, checks.1, checks.2].map(Result::unwrap_err);
        match kind {
            Unavailable => redis::cmd("CONFIG").arg(&["SET", "maxmemory", "0"]).exec(&mut admin).unwrap(),
            Timeout | Overloaded => server.resume(),
            _ => {}
        }
        let told = failures(&seen);
        let of_kind: Vec<&RedisError> = errors.iter().filter(|error| error.kind() == kind).collect();
        // The checks are told the whole time that they waited, and the event the time of the call.
        let is_told = |told: &String| match kind {
            Timeout => told.starts_with("no answer from Redis at"),
            _ => of_kind.iter().any(|error| *told == error.to_string()),
        };
        let told = told.iter().filter(|told| is_told(told)).count();
        if kind == Timeout && (of_kind.is_empty() || told == 0) && began.elapsed() < LONG {
            kinds.push(kind); // the process had no time to read an answer, and so knows nothing about the server
            continue;
        }
        assert!(!of_kind.is_empty() && told == 1, "{kind:?}: {errors:?}, {:?}", seen.0.lock().unwrap());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_away_from_the_start_is_down_without_a_check() {
    let (mut server, seen) = (Server::start(), Seen::default());
    server.kill();
    let _limiter = RedisLimiter::builder().observer(seen.clone()).connect(&server.url()).await.unwrap();
    let has = |is: fn(&LimiterEvent) -> bool| seen.0.lock().unwrap().iter().any(is);
    eventually("it is down", async || has(|event| matches!(event, LimiterEvent::StoreDown { .. }))).await;
    server.restart();
    eventually("it is up", async || has(|event| matches!(event, LimiterEvent::StoreUp { .. }))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_correction_is_an_event() {
    let (mut server, seen) = (Server::start(), Seen::default());
    let limiter = connected(patient().observer(seen.clone()), &server.url()).await;
    let (policy, other) = (policy("p", Quota::per_hour(100)), policy("other", Quota::per_hour(100)));
    let key = super::key("a");
    let mut refunds = Vec::new();
    for receipt in limiter.take(&[Charge::new(&policy, &key), Charge::new(&other, &key)]).await.unwrap().take_receipts()
    {
        refunds.push(Refund::new(policy.clone(), key.clone(), receipt.unwrap()));
    }
    server.kill();
    eventually("it is away", async || {
        let error = take(&limiter, &policy, "a", 1).await.unwrap_err();
        error.to_string().ends_with("no check is sent until it answers")
    })
    .await;
    // The middleware does not wait for these.
    drop(limiter.refund(refunds));
    drop(limiter.settle(&[policy.clone(), other].each_ref().map(|policy| Charge::new(policy, &key).cost(5))));
    let lost = || {
        let seen = seen.0.lock().unwrap();
        let lost = seen.iter().filter_map(|event| match event {
            LimiterEvent::CorrectionLost { charges, kind, .. } => Some((*charges, *kind)),
            _ => None,
        });
        // Corrections are sent side by side, so they are lost in any order.
        let mut lost: Vec<_> = lost.collect();
        lost.sort_by_key(|(charges, _)| *charges);
        lost
    };
    eventually("they are lost", async || lost().len() >= 3).await;
    assert_eq!(lost(), [1, 1, 2].map(|charges| (charges, StoreErrorKind::Unavailable)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recovery_from_failures_is_an_event() {
    let (server, seen) = (Server::start(), Seen::default());
    let limiter = connected(patient().observer(seen.clone()), &server.url()).await;
    let mut admin = server.connection();
    let policy = policy("p", Quota::per_hour(1_000_000));
    redis::cmd("CONFIG").arg(&["SET", "maxmemory", "1"]).exec(&mut admin).unwrap();
    take(&limiter, &policy, "a", 1).await.unwrap_err();
    redis::cmd("CONFIG").arg(&["SET", "maxmemory", "0"]).exec(&mut admin).unwrap();
    let recoveries = || seen.0.lock().unwrap().iter().filter(|event| **event == LimiterEvent::StoreRecovered).count();
    eventually("it is reported", async || {
        assert!(passes(&limiter, &policy, "a").await);
        recoveries() > 0
    })
    .await;
    for _ in 0..100 {
        assert!(passes(&limiter, &policy, "a").await);
    }
    assert_eq!((failures(&seen).len(), recoveries()), (1, 1));
}

#[tokio::test]
async fn meaningless_url_or_setup_is_refused() {
    for url in ["", "redis", "http://127.0.0.1", "redis://127.0.0.1:notaport", "memcached://127.0.0.1"] {
        let refused = RedisLimiter::connect(url).await.unwrap_err();
        assert_eq!(refused.kind(), StoreErrorKind::Misconfigured, "{url}: {refused}");
    }
    let server = Server::start();
    for builder in [
        RedisLimiter::builder().deadline(Duration::ZERO),
        RedisLimiter::builder().deadline(Duration::MAX),
        RedisLimiter::builder().max_in_flight(0),
        RedisLimiter::builder().max_denials(usize::MAX),
    ] {
        let refused = builder.connect(&server.url()).await.unwrap_err();
        assert_eq!(refused.kind(), StoreErrorKind::Misconfigured, "{refused}");
    }
}

async fn status<L: Limiter + Clone + 'static>(layer: &RateLimitLayer<L>) -> StatusCode {
    let inner =
        service_fn(|_: Request<Body>| async { Ok::<_, std::convert::Infallible>(Response::new(Body::empty())) });
    let mut service = layer.layer(inner);
    service.ready().await.unwrap().call(Request::new(Body::empty())).await.unwrap().status()
}

#[tokio::test]
async fn layer_does_as_configured_while_redis_is_away() {
    let mut server = Server::start();
    let limiter = connected(RedisLimiter::builder().deadline(Duration::from_secs(5)), &server.url()).await;
    let quota = Quota::per_hour(4);
    let closed = RateLimitLayer::new(limiter.clone(), quota, extract::global());
    let open = closed.clone().on_error(OnError::Allow);
    let second = FallbackLimiter::new(limiter, MemoryLimiter::new(), NonZeroU32::new(2).unwrap());
    let fallback = RateLimitLayer::new(second, quota, extract::global());
    for layer in [&closed, &open] {
        assert_eq!(status(layer).await, 200);
    }
    assert_eq!(status(&fallback).await, 200);
    server.kill();
    assert_eq!(status(&closed).await, 503);
    assert_eq!(status(&open).await, 200);
    let mut fallbacks = Vec::new();
    for _ in 0..3 {
        fallbacks.push(status(&fallback).await.as_u16());
    }
    assert_eq!(fallbacks, [200, 200, 429], "half of four");
    server.restart();
    eventually("it is not used again", async || status(&closed).await == 200).await;
}
