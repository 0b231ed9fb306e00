//! Alerts see each failure of Redis, whatever a layer makes of it.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;

use axum::Router;
use tower_ratelimit::limiter::{BoxLimiter, FallbackLimiter, StoreErrorKind};
use tower_ratelimit::observe::{LayerEvent, LimiterEvent, Observer, Stats};
use tower_ratelimit::rules::Rules;
use tower_ratelimit::{Key, MemoryLimiter, OnError, Policy, Quota, RateLimitLayer, Rule, key};

use crate::prometheus::Prometheus;
use crate::redis_limiter::{connected, patient};
use crate::redis_server::{Server, free_port};
use crate::{behind, metrics, send, serve, slow_store};

/// An observer that looks on at the limiter.
struct Log;

impl Observer for Log {}

/// The answers of a layer to a failure.
const ANSWERS: [&str; 3] = ["deny", "allow", "fallback"];

fn memory() -> MemoryLimiter {
    MemoryLimiter::builder().max_keys(1_000).build().unwrap()
}

/// A layer on Redis. The limiter has an observer of its own, which takes nothing away from that of the layer.
async fn layer((server, url): (&str, &str), answer: &str, stats: &Stats) -> RateLimitLayer<BoxLimiter> {
    let builder = patient().observer(Log);
    let redis = if server == "healthy" { connected(builder, url).await } else { builder.connect(url).await.unwrap() };
    let limiter = match answer {
        "fallback" => BoxLimiter::new(FallbackLimiter::new(redis, memory(), NonZeroU32::MIN)),
        _ => BoxLimiter::new(redis),
    };
    let on_error = if answer == "allow" { OnError::Allow } else { OnError::Deny };
    let policy = Rule::new("client", Quota::per_hour(1_000)).unwrap();
    RateLimitLayer::new(limiter, policy, key::header("key")).on_error(on_error).observer(stats.clone())
}

#[test]
fn alerts_see_every_failure_of_redis() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let _in_runtime = runtime.enter();
    let dead = format!("redis://127.0.0.1:{}", free_port());
    let primary = Server::start();
    let healthy = Server::start();
    let full = Server::with(&["--maxmemory", "1"]);
    let replica = Server::with(&["--replicaof", "127.0.0.1", &primary.port().to_string()]);
    let servers = [("healthy", healthy.url()), ("dead", dead), ("full", full.url()), ("replica", replica.url())];

    let (mut app, mut jobs) = (Router::new(), Vec::new());
    for (server, url) in &servers {
        for answer in ANSWERS {
            let (job, stats) = (format!("{server}-{answer}"), Stats::new());
            let layer = runtime.block_on(layer((server, url), answer, &stats));
            app = app.merge(behind(&format!("/{job}"), layer)).merge(metrics(&format!("/{job}/metrics"), &stats));
            jobs.push(job);
        }
    }
    // One that refuses a quarter of its requests, one whose requests have no key, one whose rules are refused, one that
    // loses corrections, and one that forgets keys, whose place is never returned, and for which a request waits.
    // And one whose store takes more than half of the deadline, one whose processes have one file of rules, and one
    // whose processes have two.
    let [refuses, keyless, rules, loses, forgets, slow] = [(); 6].map(|()| Stats::new());
    slow.on_store(&slow_store());
    let policy = Rule::new("client", Quota::per_hour(60)).unwrap();
    let layer = RateLimitLayer::new(memory(), policy, key::global()).observer(refuses.clone());
    let file = Rules::from_text("version: 1\nrules:\n  - {name: client, key: global, quota: 9/s}\n").unwrap();
    let ruled = file.layer(memory()).unwrap().observer(rules.clone());
    app = app.merge(behind("/refuses", layer)).merge(behind("/rules", ruled));
    let layer = RateLimitLayer::new(memory(), Quota::per_hour(1_000), key::header("absent"));
    app = app.merge(behind("/keyless", layer.observer(keyless.clone())));
    let others = [
        ("refuses", &refuses),
        ("keyless", &keyless),
        ("rules", &rules),
        ("loses", &loses),
        ("forgets", &forgets),
        ("slow", &slow),
    ];
    for (job, stats) in others {
        app = app.merge(metrics(&format!("/{job}/metrics"), stats));
        jobs.push(job.to_owned());
    }
    for (job, limit) in [("same/a", 5), ("same/b", 5), ("differs/a", 5), ("differs/b", 6)] {
        let stats = Stats::new();
        let text = format!("rules:\n  - {{name: client, key: global, quota: {limit}/s}}\n");
        let layer = Rules::from_text(text).unwrap().layer(memory()).unwrap().observer(stats.clone());
        app = app.merge(behind(&format!("/{job}"), layer)).merge(metrics(&format!("/{job}/metrics"), &stats));
        jobs.push(job.to_owned());
    }
    let exports = Policy::new("exports", Quota::concurrent(2)).unwrap();
    // It is never returned.
    forgets.on_place_taken(&exports, &Key::global(), 1);
    forgets.on_layer_event(&LayerEvent::wait_began(exports));
    let port = serve(&runtime, app);
    let targets: Vec<_> = jobs.iter().map(|job| (job.clone(), port, format!("/{job}/metrics"))).collect();
    let prometheus = Prometheus::start(&targets);

    // Prometheus sees no rate in a counter that was never smaller.
    for _ in 0..2 {
        for (server, _) in &servers {
            for answer in ANSWERS {
                let passes = *server == "healthy" || answer != "deny";
                let statuses = send(port, &format!("/{server}-{answer}"), 0..10);
                assert_eq!(statuses, [if passes { 200 } else { 503 }; 10], "{server} {answer}");
            }
        }
        send(port, "/refuses", 0..40);
        send(port, "/keyless", 0..1);
        send(port, "/rules", 0..1);
        prometheus.scrape();
    }
    assert!(file.replace("nonsense").is_err());
    loses.on_limiter_event(&LimiterEvent::correction_lost(1, StoreErrorKind::Timeout));
    loses.on_limiter_event(&LimiterEvent::places_forgotten(1));
    loses.on_limiter_event(&LimiterEvent::scripts_forgotten("cache:6379", true));
    forgets.on_limiter_event(&LimiterEvent::evicted(true));
    prometheus.scrape();

    let count = |job: &str, metric: &str| prometheus.value(&format!("sum({metric}{{job=\"{job}\"}})"));
    for (server, _) in &servers {
        let fails = *server != "healthy";
        for answer in ANSWERS {
            let job = format!("{server}-{answer}");
            let outcome =
                |kind: &str| prometheus.value(&format!("ratelimit_requests_total{{job=\"{job}\",outcome=\"{kind}\"}}"));
            let expected = match (fails, answer) {
                (true, "deny") => [0.0, 0.0, 20.0],
                (true, "allow") => [0.0, 20.0, 0.0],
                _ => [20.0, 0.0, 0.0],
            };
            assert_eq!(["allowed", "failed_open", "failed_closed"].map(outcome), expected, "{job}");
            let failed = if fails { 20.0 } else { 0.0 };
            assert_eq!(count(&job, "ratelimit_limiter_errors_total"), failed, "{job}");
            let fell_back = if answer == "fallback" { failed } else { 0.0 };
            assert_eq!(count(&job, "ratelimit_limiter_fallbacks_total"), fell_back, "{job}");
            let down = if *server == "dead" { 1.0 } else { 0.0 };
            assert_eq!(count(&job, "ratelimit_limiter_servers_down"), down, "{job}");
        }
    }

    let fires = |rule: &str| -> BTreeSet<String> {
        let rules = prometheus.rules();
        let rule = rules.iter().find(|one| one.name == rule).expect("the rule was read");
        prometheus.query(&rule.query).into_iter().map(|(labels, _)| labels["job"].clone()).collect()
    };
    let of = |jobs: &[&str]| jobs.iter().map(|job| (*job).to_owned()).collect::<BTreeSet<String>>();
    let expected = BTreeMap::from([
        ("RateLimitRefusesMany", of(&["refuses"])),
        ("RateLimitFailsOpen", of(&["dead-allow", "full-allow", "replica-allow"])),
        ("RateLimitFailsClosed", of(&["dead-deny", "full-deny", "replica-deny"])),
        ("RateLimitFallsBack", of(&["dead-fallback", "full-fallback", "replica-fallback"])),
        ("RateLimitServerDown", of(&["dead-allow", "dead-deny", "dead-fallback"])),
        ("RateLimitStoreSlow", of(&["slow"])),
        ("RateLimitCorrectionsLost", of(&["loses"])),
        ("RateLimitScriptsForgotten", of(&["loses"])),
        ("RateLimitPlacesForgotten", of(&["loses"])),
        ("RateLimitPlacesStuck", of(&["forgets"])),
        ("RateLimitAlwaysInLine", of(&["forgets"])),
        ("RateLimitRulesRefused", of(&["rules"])),
        ("RateLimitRulesDiffer", of(&["differs"])),
        ("RateLimitKeyMissing", of(&["keyless"])),
        ("RateLimitForgetsKeys", of(&["forgets"])),
    ]);
    assert_eq!(prometheus.rules().len(), expected.len(), "each rule has an expectation");
    for (rule, jobs) in &expected {
        assert_eq!(fires(rule), *jobs, "{rule}");
    }
}
