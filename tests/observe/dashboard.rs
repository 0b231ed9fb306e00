//! Every query of the dashboard, on a service whose requests are counted beside it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use axum::Router;
use serde_json::Value;
use tower_ratelimit::clock::{ManualClock, Timestamp, TokioTimer};
use tower_ratelimit::limiter::{StoreErrorKind, memory::OnFull};
use tower_ratelimit::observe::{LimiterEvent, Observer, Stats};
use tower_ratelimit::rules::Rules;
use tower_ratelimit::{Key, MemoryLimiter, Mode, Policy, Quota, RateLimitLayer, Rule, key};

use crate::prometheus::{Prometheus, Sample, of_totals};
use crate::redis_limiter::{connected, patient};
use crate::redis_server::Server;
use crate::{behind, metrics, send, serve, slow_store};

const DASHBOARD: &str = include_str!("../../examples/observe/grafana.json");

/// Returns the title, the name of the query and the query of each target of each panel.
fn targets() -> Vec<(String, String, String)> {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().unwrap().iter().map(move |one| (panel, one)));
    targets.map(|(panel, one)| (text(&panel["title"]), text(&one["refId"]), text(&one["expr"]))).collect()
}

fn filled_in(query: &str) -> String {
    query.replace("$job", "shop").replace("$policy", ".*").replace("$__rate_interval", "10m")
}

/// Returns the values by the values of their labels, for those that are not zero.
fn table(samples: &[Sample]) -> BTreeMap<String, f64> {
    let name = |labels: &BTreeMap<String, String>| labels.values().cloned().collect::<Vec<_>>().join(" ");
    samples.iter().filter(|(_, value)| *value != 0.0).map(|(labels, value)| (name(labels), *value)).collect()
}

fn memory(clock: &ManualClock) -> MemoryLimiter {
    MemoryLimiter::builder().max_keys(1_000).clock(clock.clone()).build().unwrap()
}

fn rule(name: &str, limit: u64) -> Rule {
    Rule::new(name, Quota::per_hour(limit)).unwrap()
}

/// 100 requests, of which `rare` refuses 2: 2 %, although it decides the outcome of few requests. `trial` is over its
/// quota for 90, and is in shadow mode.
fn three_policies(clock: &ManualClock, stats: &Stats) -> Router {
    let layer = RateLimitLayer::new(memory(clock), rule("client", 100).warn_at_percent(10), key::global())
        .and(rule("rare", 98), key::global())
        .and(rule("trial", 10).mode(Mode::Shadow), key::global());
    behind("/three", layer.observer(stats.clone()))
}

/// A queue that lets a request pass each 10 ms.
fn queue(clock: &ManualClock, stats: &Stats) -> Router {
    let queue = Rule::new("queue", Quota::leaky_queue(100, Duration::from_secs(1)).unwrap()).unwrap();
    let layer = RateLimitLayer::new(memory(clock), queue, key::global()).timer(TokioTimer::new());
    behind("/queue", layer.observer(stats.clone()))
}

/// A limiter that has room for few keys, and turns others away.
fn crowded(clock: &ManualClock, stats: &Stats) -> Router {
    let limiter = MemoryLimiter::builder().max_keys(1).on_full(OnFull::Deny).clock(clock.clone()).build().unwrap();
    let layer = RateLimitLayer::new(limiter, rule("crowded", 9), key::header("key"));
    behind("/crowded", layer.observer(stats.clone()))
}

/// A layer whose requests have no key, and whose timer no quota uses.
fn keyless(clock: &ManualClock, stats: &Stats) -> Router {
    let layer = RateLimitLayer::new(memory(clock), rule("keyless", 1_000), key::header("absent"));
    behind("/keyless", layer.timer(TokioTimer::new()).observer(stats.clone()))
}

/// Returns the rules of a file, and a layer that follows them.
fn ruled(clock: &ManualClock, stats: &Stats) -> (Rules, Router) {
    let rules = Rules::from_text(rules_of(1_000)).unwrap();
    let layer = rules.layer(memory(clock)).unwrap().observer(stats.clone());
    (rules, behind("/rules", layer))
}

fn rules_of(limit: u64) -> String {
    format!("rules: [{{name: ruled, quota: {limit} per hour, key: global}}]")
}

#[test]
fn every_query_of_the_dashboard_counts_to_the_unit() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let _in_runtime = runtime.enter();
    let (redis, stats, clock) = (Server::start(), Stats::new(), ManualClock::new());
    let limiter = runtime.block_on(connected(patient(), &redis.url()));
    let layer = RateLimitLayer::new(limiter, rule("redis", 1_000), key::global()).observer(stats.clone());
    let (rules, ruled) = ruled(&clock, &stats);
    let app = Router::new()
        .merge(three_policies(&clock, &stats))
        .merge(queue(&clock, &stats))
        .merge(crowded(&clock, &stats))
        .merge(keyless(&clock, &stats))
        .merge(ruled)
        .merge(behind("/redis", layer))
        .merge(metrics("/metrics", &stats));
    let port = serve(&runtime, app);
    let prometheus = Prometheus::start(&[("shop".to_owned(), port, "/metrics".to_owned())]);

    stats.on_store(&slow_store());
    let exports = Policy::new("exports", Quota::concurrent(3)).unwrap();
    // Twice, with a scrape between: Prometheus sees no rate in a counter that was never smaller.
    let half = |first: bool| {
        let statuses = send(port, "/three", 0..50);
        assert_eq!(statuses.iter().filter(|status| **status == 429).count(), if first { 0 } else { 2 });
        assert!(send(port, "/redis", 0..10).iter().all(|status| *status == 200));
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| assert_eq!(send(port, "/queue", [0]), [200]));
            }
        });
        clock.advance(Duration::from_secs(1)); // the queue is empty again, and less than a unit of the others is back
        // Until Redis produces them.
        stats.on_limiter_event(&LimiterEvent::correction_lost(3, StoreErrorKind::Unavailable));
        stats.on_limiter_event(&LimiterEvent::store_checked(Duration::ZERO, Some(StoreErrorKind::Timeout)));
        stats.on_limiter_event(&LimiterEvent::evicted(true));
        stats.on_limiter_event(&LimiterEvent::TooManyQuotas);
        // One of two requests ends after some 20 seconds.
        let [_, taken_at] = [(); 2].map(|()| stats.on_place_taken(&exports, &Key::global(), 1));
        let taken_at = Timestamp::from_micros(taken_at.as_micros() - 20_000_000);
        stats.on_place_returned(&exports, &Key::global(), 1, taken_at);
        assert_eq!(send(port, "/keyless", 0..3), [400; 3]);
        assert_eq!(send(port, "/rules", 0..4), [200; 4]);
        rules.replace(rules_of(if first { 2_000 } else { 3_000 })).unwrap();
        assert!(rules.replace("nonsense").is_err());
        let full = send(port, "/crowded", 0..200).iter().filter(|status| **status == 429).count();
        prometheus.scrape();
        full as f64
    };
    let full = half(true) + half(false);
    assert!(full > 0.0);

    let row = |name: &str, value: f64| (name.to_owned(), value);
    let expected = BTreeMap::from([
        (("Refused share by policy", "A"), vec![row("rare", 0.02), row("crowded", full / 400.0)]),
        (
            ("Requests by outcome", "A"),
            vec![
                row("allowed", 10.0 + 20.0 + 2.0 + 400.0 + 8.0 - full),
                row("delayed", 2.0),
                row("shadow_limited", 88.0),
                row("limited", 2.0 + full),
                row("key_missing", 6.0),
            ],
        ),
        // Requests 90 to 98 leave 10 to 2 of `client`, and find 2 when `rare` refuses.
        (("Near the limit", "A"), vec![row("client", 11.0)]),
        (("Over a quota that is not enforced", "A"), vec![row("shadow trial", 90.0)]),
        (("Waits", "C"), vec![]),
        (("How busy the store is", "A"), vec![row("", 0.026)]),
        (("How busy the store is", "B"), vec![row("", 0.003)]),
        (("How busy the store is", "C"), vec![row("", 0.05)]),
        (("How busy the store is", "D"), vec![row("", 0.002)]),
        (("Checks that wait for the store", "A"), vec![row("", 70.0)]),
        (("Checks that wait for the store", "B"), vec![row("", 2.0)]),
        (("Checks that wait for the store", "C"), vec![]),
        (("Checks of Redis", "C"), vec![row("timeout", 2.0)]),
        (("When the limiter fails", "A"), vec![]),
        (("When the limiter fails", "B"), vec![]),
        (("When the limiter fails", "C"), vec![]),
        (("When the limiter fails", "D"), vec![row("", 6.0)]),
        (("Memory", "A"), vec![row("true", 2.0)]),
        (("Memory", "B"), vec![row("", full)]),
        (("Rules of files", "A"), vec![row("", 1.0)]),
        (("Rules of files", "B"), vec![row("loaded", 2.0), row("refused", 2.0)]),
        (("Versions of quotas", "A"), vec![row("", 2.0)]),
        (("Versions of quotas", "B"), vec![row("", 2.0)]),
        (("Setup warnings", "A"), vec![row("no-queue", 1.0)]),
        (("Requests without a key", "A"), vec![row("", 6.0)]),
        (("Places held", "A"), vec![row("exports", 2.0)]),
        (("How long places are held", "A"), vec![row("", 20.0)]),
        (("How long places are held", "B"), vec![row("", 29.8)]),
    ]);
    let mut seen = BTreeSet::new();
    for (title, name, query) in targets() {
        let samples = prometheus.query(&filled_in(&query));
        assert!(!samples.is_empty(), "{title} {name} has no data: {query}");
        let totals = table(&prometheus.query(&filled_in(&of_totals(&query))));
        // The time of checks of Redis is what it is, and so is that of requests in a queue.
        if ["Checks of Redis", "Waits"].contains(&title.as_str()) && name != "C" {
            assert!(totals[""] > 0.0 && totals[""] < 10.0, "{title} {name}: {totals:?}");
            continue;
        }
        let expected = expected.get(&(title.as_str(), name.as_str())).expect("each query has an expectation");
        let is_near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-9;
        let expected: BTreeMap<String, f64> = expected.iter().cloned().collect();
        assert!(totals.keys().eq(expected.keys()), "{title} {name}: {totals:?}, not {expected:?}");
        assert!(totals.values().zip(expected.values()).all(is_near), "{title} {name}: {totals:?}, not {expected:?}");
        let rates = table(&samples);
        assert!(rates.keys().eq(expected.keys()), "{title} {name}: {rates:?}, not {expected:?}");
        seen.insert((title, name));
    }
    assert_eq!(seen.len(), expected.len(), "each expectation has a query");
    assert_eq!(prometheus.value("sum(ratelimit_limiter_duration_seconds_count)"), 20.0);
    assert_eq!(prometheus.value("sum(ratelimit_wait_seconds_count)"), 2.0);
    assert!(prometheus.value("sum(ratelimit_wait_seconds_sum)") >= 0.02, "each waits for 10 ms");
    assert_eq!(prometheus.value("sum(ratelimit_policy_units_total{policy=\"client\"})"), 98.0);
    // What `limited` says by outcome cannot be divided by policy, because the series has no such label.
    assert!(prometheus.query("ratelimit_requests_total{policy!=\"\"}").is_empty());
}
