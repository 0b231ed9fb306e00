//! `Stats` counts what layers and limiters do, and writes it as Prometheus reads it.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use axum::body::Body;
use http::{Request, Response};
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::clock::{Clock, ManualClock, Timestamp, TokioTimer};
use tower_ratelimit::limiter::{BoxLimiter, FallbackLimiter, Place};
use tower_ratelimit::middleware::InFlight;
use tower_ratelimit::observe::{
    LimiterEvent, Observed, Observer, OutcomeKind, PolicyState, SetupWarningKind, Stats, StatsSnapshot,
};
use tower_ratelimit::rules::{Descriptor, DescriptorRequest, Rules};
use tower_ratelimit::{
    Head, Key, MemoryLimiter, Mode, OnError, Policy, Quota, RateLimitLayer, Rule, key, limiter::Limiter,
};

use crate::support::shop::{MS, Shop, queue};
use crate::support::{Events, Scripted, memory};

/// Sends requests, each with a key, and waits for each response.
async fn send<L: Limiter>(layer: &RateLimitLayer<L>, keys: &[&str]) {
    let service = layer.layer(service_fn(async |_: Request<Body>| Ok::<_, Infallible>(Response::new(Body::empty()))));
    for key in keys {
        let request = Request::builder().header("key", *key).body(Body::empty()).unwrap();
        service.clone().oneshot(request).await.unwrap();
    }
}

fn failing() -> Scripted {
    let limiter = Scripted::new();
    limiter.fail(true);
    limiter
}

fn rule(name: &str, limit: u64) -> Rule {
    Rule::new(name, Quota::per_hour(limit)).unwrap()
}

fn layer(limit: u64, stats: &Stats) -> RateLimitLayer<MemoryLimiter> {
    RateLimitLayer::new(memory(&ManualClock::new()), rule("client", limit), key::header("key")).observer(stats.clone())
}

/// Returns the samples of a text as Prometheus reads it: the series with its labels, and the value.
///
/// # Panics
/// If the text is not in the format, names a series twice, or has a sample that does not belong to the metric above it.
fn samples(text: &str) -> BTreeMap<(String, BTreeMap<String, String>), f64> {
    let mut samples = BTreeMap::new();
    let (mut metrics, mut current) = (BTreeSet::new(), String::new());
    for line in text.strip_suffix('\n').expect("the last line ends").split('\n') {
        if let Some(help) = line.strip_prefix("# HELP ") {
            current = help.split(' ').next().unwrap().to_owned();
            assert!(metrics.insert(current.clone()), "{current} begins twice");
        } else if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').unwrap();
            assert!(name == current && ["counter", "gauge", "histogram"].contains(&kind), "{line}");
            assert_eq!(name.ends_with("_total"), kind == "counter", "{line}");
        } else {
            let end = line.find(['{', ' ']).expect(line);
            let (name, mut rest) = line.split_at(end);
            let suffix = name.strip_prefix(current.as_str()).expect(line);
            assert!(["", "_bucket", "_sum", "_count"].contains(&suffix), "{line}");
            let mut labels = BTreeMap::new();
            while let Some(pair) = rest.strip_prefix(['{', ',']) {
                let (label, value) = pair.split_once("=\"").expect(line);
                assert!(label.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{line}");
                let (mut text, mut letters) = (String::new(), value.char_indices());
                let end = loop {
                    match letters.next().expect(line) {
                        (at, '"') => break at + 1,
                        (_, '\\') => text.push(match letters.next().expect(line).1 {
                            'n' => '\n',
                            other => other,
                        }),
                        (_, other) => text.push(other),
                    }
                };
                assert!(labels.insert(label.to_owned(), text).is_none(), "{line}");
                rest = &value[end..];
            }
            rest = if labels.is_empty() { rest } else { rest.strip_prefix('}').expect(line) };
            let value = rest.strip_prefix(' ').expect(line).parse().expect(line);
            assert!(samples.insert((name.to_owned(), labels), value).is_none(), "{line} stands there twice");
        }
    }
    samples
}

fn value(text: &str, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
    let labels = labels.iter().map(|(label, value)| ((*label).to_owned(), (*value).to_owned())).collect();
    samples(text).get(&(name.to_owned(), labels)).copied()
}

fn of<'a>(snapshot: &'a StatsSnapshot, name: &str) -> &'a tower_ratelimit::observe::PolicySnapshot {
    snapshot.policies().iter().find(|policy| policy.name() == name).expect("the policy was seen")
}

#[tokio::test]
async fn requests_are_counted_by_outcome_and_policy() {
    let stats = Stats::new();
    let layer = RateLimitLayer::new(
        memory(&ManualClock::new()),
        rule("client", 3).warn_at_percent(34).cost(|_| 1),
        key::header("key"),
    )
    .and(rule("trial", 1).mode(Mode::Shadow).cost(|_| 1), key::header("key"))
    .observer(stats.clone());
    send(&layer, &["a", "a", "a", "a", "a"]).await;

    let snapshot = stats.snapshot();
    let client = of(&snapshot, "client");
    assert_eq!((client.refused(), client.units()), (2, 3));
    let decided = |state| client.decided(Mode::Enforce, state);
    assert_eq!([PolicyState::Within, PolicyState::Near, PolicyState::Over].map(decided), [1, 2, 2]);
    let trial = of(&snapshot, "trial");
    assert_eq!((trial.decided(Mode::Shadow, PolicyState::Over), trial.refused(), trial.units()), (4, 0, 1));
    use OutcomeKind::{Allowed, Limited, ShadowLimited};
    assert_eq!([Allowed, ShadowLimited, Limited].map(|kind| snapshot.requests(kind)), [1, 2, 2]);

    let text = stats.to_prometheus();
    let requests = |outcome| value(&text, "ratelimit_requests_total", &[("outcome", outcome)]);
    let outcomes = ["allowed", "shadow_limited", "limited", "blocked"].map(requests);
    assert_eq!(outcomes, [1.0, 2.0, 2.0, 0.0].map(Some), "an alert sees the first one of each");
    let refused = |policy| value(&text, "ratelimit_policy_refused_total", &[("policy", policy), ("block", "false")]);
    assert_eq!((refused("client"), refused("trial")), (Some(2.0), Some(0.0)));
    let over = [("policy", "trial"), ("mode", "shadow"), ("state", "over")];
    assert_eq!(value(&text, "ratelimit_policy_requests_total", &over), Some(4.0));
    assert_eq!(value(&text, "ratelimit_policy_units_total", &[("policy", "client")]), Some(3.0));
}

/// An observer that wants every outcome, and counts by `Stats`.
struct Slowly(Stats);

impl Observer for Slowly {
    fn on_outcome(&self, observed: &Observed<'_>) {
        self.0.on_outcome(observed);
    }
}

#[tokio::test]
async fn usual_requests_are_counted_as_their_outcomes_say() {
    let [quick, slow] = [(); 2].map(|()| Stats::new());
    let layer = || {
        let rule = rule("client", 10).warn_at_percent(50).cost(|request| request.uri.path().len() as u64);
        RateLimitLayer::new(memory(&ManualClock::new()), rule, key::header("key"))
    };
    // The layer looks closely at its first requests.
    let keys: Vec<String> = (0..2_000).map(|n| (n % 150).to_string()).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    send(&layer().observer(quick.clone()), &keys).await;
    send(&layer().observer(Slowly(slow.clone())), &keys).await;
    assert_eq!(quick.to_prometheus(), slow.to_prometheus());
    let snapshot = quick.snapshot();
    let client = of(&snapshot, "client");
    assert_eq!(snapshot.requests(OutcomeKind::Allowed), 1_500);
    assert_eq!((client.decided(Mode::Enforce, PolicyState::Near), client.units()), (900, 1_500));
}

#[tokio::test]
async fn requests_that_no_policy_decided_are_counted() {
    let stats = Stats::new();
    let policy = rule("client", 9);
    let broken = RateLimitLayer::new(failing(), policy.clone(), key::header("key")).observer(stats.clone());
    send(&broken, &["a", "a"]).await;
    send(&broken.on_error(OnError::Allow), &["a"]).await;
    let exempt = RateLimitLayer::new(MemoryLimiter::new(), policy.when(|_| false), key::header("key"));
    send(&exempt.observer(stats.clone()), &["a"]).await;
    let snapshot = stats.snapshot();
    assert!(snapshot.policies().is_empty());
    assert_eq!(snapshot.requests(OutcomeKind::FailedClosed), 2);
    let text = stats.to_prometheus();
    let requests = |outcome| value(&text, "ratelimit_requests_total", &[("outcome", outcome)]);
    assert_eq!(
        (requests("failed_closed"), requests("failed_open"), requests("exempt")),
        (Some(2.0), Some(1.0), Some(1.0))
    );
}

#[test]
fn counts_of_64_threads_are_exact_through_a_layer() {
    let stats = Stats::new();
    let layer = layer(1_000, &stats);
    std::thread::scope(|scope| {
        for _ in 0..64 {
            scope.spawn(|| {
                let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
                runtime.block_on(send(&layer, &["a"; 50]));
            });
        }
    });
    let snapshot = stats.snapshot();
    let client = of(&snapshot, "client");
    assert_eq!(snapshot.requests(OutcomeKind::Allowed), 1_000);
    assert_eq!(snapshot.requests(OutcomeKind::Limited), 64 * 50 - 1_000);
    assert_eq!((client.units(), client.refused()), (1_000, 64 * 50 - 1_000));
}

#[tokio::test]
async fn refusals_of_a_block_are_told_apart() {
    let hour = Duration::from_secs(3_600);
    let stats = Stats::new();
    let login = rule("login", 1).block("login-block", Quota::block(1, hour, hour).unwrap()).unwrap();
    let layer = RateLimitLayer::new(memory(&ManualClock::new()), login, key::header("key")).observer(stats.clone());
    send(&layer, &["a"; 4]).await;
    let text = stats.to_prometheus();
    let refused = |policy, block| {
        value(&text, "ratelimit_policy_refused_total", &[("policy", policy), ("block", block)]).unwrap()
    };
    assert!(refused("login-block", "true") > 0.0 && refused("login", "false") > 0.0, "{text}");
    assert!(of(&stats.snapshot(), "login-block").is_block());
}

#[tokio::test]
async fn hostile_names_and_keys_do_not_break_the_text() {
    let stats = Stats::builder()
        .reveal(|key| Some(format!("{}\n}}\"\\<script>ü", String::from_utf8_lossy(key.as_bytes()))))
        .build();
    let name = "a\"b\\c{}=,\\n #<script>'";
    let layer =
        RateLimitLayer::new(memory(&ManualClock::new()), rule(name, 1), key::header("key")).observer(stats.clone());
    let keys = ["\"", "\\", "} 1", "ratelimit_requests_total", "a\tb", "ü", "<b>"];
    send(&layer, &keys.repeat(5)).await;
    let text = stats.to_prometheus();
    assert_eq!(value(&text, "ratelimit_policy_refused_total", &[("policy", name), ("block", "false")]), Some(28.0));
    assert!(!text.contains("script>ü"), "revealed names are in no metric");
    let snapshot = stats.snapshot();
    assert_eq!(snapshot.most_limited().len(), keys.len());
    assert!(snapshot.most_limited().iter().all(|key| key.name().is_some_and(|name| name.contains("script>ü"))));
}

#[tokio::test]
async fn policies_beyond_the_bound_are_one_series() {
    let stats = Stats::new();
    for n in 0..300 {
        let layer = RateLimitLayer::new(memory(&ManualClock::new()), rule(&format!("p{n}"), 1), key::global());
        send(&layer.observer(stats.clone()), &["a"]).await;
    }
    let snapshot = stats.snapshot();
    assert_eq!(snapshot.policies().len(), 201);
    assert_eq!(of(&snapshot, "other").decided(Mode::Enforce, PolicyState::Within), 100);
    assert_eq!(snapshot.requests(OutcomeKind::Allowed), 300);
    let of_policies = |name: &str| name == "ratelimit_policy_requests_total";
    let series = samples(&stats.to_prometheus()).keys().filter(|(name, _)| of_policies(name)).count();
    assert_eq!(series, 201 * 3);
}

#[tokio::test]
async fn rates_are_those_of_their_time() {
    let clock = ManualClock::new();
    let stats = Stats::builder().clock(clock.clone()).build();
    let layer = layer(3, &stats);
    send(&layer, &["a"; 5]).await;
    clock.advance(Duration::from_secs(61));
    send(&layer, &["a", "b"]).await;
    let snapshot = stats.snapshot();
    let client = of(&snapshot, "client");
    assert_eq!((client.five_minutes().len(), client.hour().len()), (60, 60));
    let seen = |buckets: &[tower_ratelimit::observe::RateBucket]| -> Vec<(u64, u64)> {
        let counts = buckets.iter().map(|bucket| (bucket.allowed(), bucket.refused()));
        counts.filter(|counts| *counts != (0, 0)).collect()
    };
    assert_eq!(seen(client.five_minutes()), [(3, 2), (1, 1)]);
    assert_eq!(seen(&client.five_minutes()[47..48]), [(3, 2)]);
    assert_eq!(seen(&client.hour()[58..]), [(3, 2), (1, 1)]);
    assert_eq!(client.last_refused_at(), Some(snapshot.taken_at()));
    clock.advance(Duration::from_secs(3_600));
    let later = stats.snapshot();
    assert!(seen(of(&later, "client").five_minutes()).is_empty() && seen(of(&later, "client").hour()).is_empty());
    assert_eq!(of(&later, "client").refused(), 3);
}

#[tokio::test]
async fn keys_that_are_refused_most_come_first() {
    let clock = ManualClock::new();
    let stats = Stats::builder().clock(clock.clone()).build();
    let layer = layer(1, &stats);
    send(&layer, &["loud"; 11]).await;
    send(&layer, &["quiet"; 3]).await;
    send(&layer, &["allowed"]).await;
    let counts = |stats: &Stats| -> Vec<(String, u64, u64)> {
        let most = stats.snapshot();
        most.most_limited().iter().map(|key| (key.policy().to_owned(), key.count(), key.error())).collect()
    };
    assert_eq!(counts(&stats), [("client".to_owned(), 10, 0), ("client".to_owned(), 2, 0)]);
    assert!(stats.snapshot().most_limited().iter().all(|key| key.name().is_none() && key.fingerprint().len() == 8));
    clock.advance(Duration::from_secs(300));
    assert_eq!(counts(&stats), [("client".to_owned(), 5, 0), ("client".to_owned(), 1, 0)]);
    clock.advance(Duration::from_secs(1_000_000));
    assert!(counts(&stats).is_empty());
}

/// A thread that reads the clock and then loses the processor counts at an instant that is over.
#[tokio::test]
async fn counts_of_keys_fade_once_though_a_thread_is_late() {
    let clock = ManualClock::new();
    let stats = Stats::builder().clock(clock.clone()).build();
    send(&layer(1, &stats), &["loud"; 101]).await;
    let began = clock.now();
    for ms in [300_000, 299_990, 300_010, 299_999, 301_000] {
        clock.set(began.saturating_add(Duration::from_millis(ms)));
        assert_eq!(stats.snapshot().most_limited()[0].count(), 50, "{ms} ms");
    }
}

#[tokio::test]
async fn keys_that_use_most_come_first_though_none_is_refused() {
    let (clock, reveal) = (ManualClock::new(), |key: &Key| Some(key.display().to_string()));
    let stats = Stats::builder().clock(clock.clone()).reveal(reveal).count_use(true).build();
    let cost = |request: &Head<'_>| if request.headers["key"] == "dear" { 50 } else { 1 };
    let bytes = rule("bytes", 1_000_000).cost(cost);
    let layer = RateLimitLayer::new(memory(&clock), bytes, key::header("key"))
        .and(rule("client", 3), key::header("key"))
        .observer(stats.clone());
    for (requests, key) in [(3, "often"), (2, "dear"), (1, "once")] {
        send(&layer, &vec![key; requests]).await;
    }
    send(&layer, &["often"]).await; // refused, so it uses nothing
    let used = |stats: &Stats, policy: &str| -> Vec<(Option<String>, u64)> {
        let snapshot = stats.snapshot();
        let most_used = of(&snapshot, policy).most_used().iter();
        most_used.map(|key| (key.name().map(str::to_owned), key.count())).collect()
    };
    let of_name = |name: &str, count| (Some(name.to_owned()), count);
    assert_eq!(used(&stats, "bytes"), [of_name("dear", 100), of_name("often", 3), (None, 1)]);
    assert_eq!(used(&stats, "client"), [of_name("often", 3), of_name("dear", 2), (None, 1)]);
    clock.advance(Duration::from_secs(300));
    let mut faded = used(&stats, "client");
    faded.sort(); // equal counts have no order
    assert_eq!(faded, [of_name("dear", 1), of_name("often", 1)], "old use fades");
}

#[tokio::test]
async fn use_is_counted_for_usual_requests_if_asked_for() {
    for count_use in [false, true] {
        let stats = Stats::builder().count_use(count_use).build();
        send(&layer(9, &stats), &["a", "a", "b"]).await;
        let snapshot = stats.snapshot();
        let counts: Vec<u64> = of(&snapshot, "client").most_used().iter().map(|key| key.count()).collect();
        assert_eq!(counts, if count_use { vec![2, 1] } else { Vec::new() });
        assert_eq!(snapshot.requests(OutcomeKind::Allowed), 3);
    }
}

#[tokio::test]
async fn layer_hands_its_observer_to_its_limiter() {
    let stats = Stats::new();
    let limiter = MemoryLimiter::builder().max_keys(1).clock(ManualClock::new()).build().unwrap();
    let boxed = BoxLimiter::new(limiter);
    let layer = RateLimitLayer::new(boxed, rule("client", 1), key::header("key")).observer(stats.clone());
    let keys: Vec<String> = (0..1_000).map(|n| n.to_string()).collect();
    send(&layer, &keys.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let events = stats.snapshot();
    assert!(events.events().evicted() > 900, "{events:?}");
    assert_eq!(events.events().evicted(), events.events().evicted_throttled());
}

#[tokio::test]
async fn limiter_reports_each_event_to_every_observer_once() {
    let ([shared, own], [of_memory, of_fallback]) =
        ([(); 2].map(|()| Stats::new()), [(); 2].map(|()| Events::default()));
    let second = MemoryLimiter::builder().max_keys(1).observer(of_memory.clone()).observer(shared.clone());
    let limiter = FallbackLimiter::new(failing(), second.build().unwrap(), NonZeroU32::MIN);
    let limiter = limiter.observer(of_fallback.clone()).observer(shared.clone());
    let layers = [&shared, &shared, &own].map(|stats| {
        RateLimitLayer::new(limiter.clone(), rule("client", 1), key::header("key")).observer(stats.clone())
    });
    // Each layer makes a service, and so hands its observer on.
    send_through(&layers, &[]).await;
    let keys: Vec<String> = (0..100).map(|n| n.to_string()).collect();
    send_through(&layers, &keys.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let count = |stats: &Stats| {
        let snapshot = stats.snapshot();
        (snapshot.events().fallbacks(), snapshot.events().evicted())
    };
    let evicted = of_memory.lock().len() as u64;
    assert!(evicted > 0);
    assert_eq!(count(&shared), (300, evicted));
    assert_eq!(count(&own), (300, evicted));
    assert_eq!(of_fallback.lock().len(), 300);
}

/// Sends requests through each of several layers.
async fn send_through<L: Limiter>(layers: &[RateLimitLayer<L>], keys: &[&str]) {
    for layer in layers {
        send(layer, keys).await;
    }
}

#[tokio::test]
async fn layers_that_share_statistics_each_count_a_request() {
    let stats = Stats::new();
    let layer =
        |name| RateLimitLayer::new(memory(&ManualClock::new()), rule(name, 1), key::global()).observer(stats.clone());
    let answer = service_fn(async |_: Request<Body>| Ok::<_, Infallible>(Response::new(Body::empty())));
    let service = layer("outer").layer(layer("inner").layer(answer));
    service.oneshot(Request::new(Body::empty())).await.unwrap();
    let snapshot = stats.snapshot();
    assert_eq!(snapshot.requests(OutcomeKind::Allowed), 2);
    let decided = |name| of(&snapshot, name).decided(Mode::Enforce, PolicyState::Within);
    assert_eq!((decided("outer"), decided("inner")), (1, 1));
}

/// Polls a future once, and drops it before it is ready.
fn begin(future: impl Future) {
    let mut future = std::pin::pin!(future);
    assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
}

#[tokio::test]
async fn request_dropped_while_the_limiter_decides_is_abandoned() {
    let stats = Stats::new();
    let layer = RateLimitLayer::new(Scripted::new().later(), rule("client", 9), key::global());
    let layer = layer.observer(stats.clone());
    let service = layer.layer(service_fn(async |_: Request<Body>| Ok::<_, Infallible>(Response::new(Body::empty()))));
    begin(service.clone().oneshot(Request::new(Body::empty())));
    let (head, ()) = Request::new(()).into_parts();
    begin(layer.admit(&head));
    let file = "{domain: edge, descriptors: [{key: user, rate_limit: {unit: minute, requests_per_unit: 2}}]}";
    let limiter = Scripted::new().later();
    let limits = Rules::from_text(file).unwrap().descriptor_limits(limiter.clone()).unwrap().observer(stats.clone());
    let request = DescriptorRequest::new("edge").charge(Descriptor::new([("user", "a")]));
    begin(limits.decide(&request));
    let count = |kinds: [OutcomeKind; 3]| kinds.map(|kind| stats.snapshot().requests(kind));
    use OutcomeKind::{Abandoned, Allowed, FailedClosed};
    assert_eq!(count([Abandoned, Allowed, FailedClosed]), [3, 0, 0]);
    // A request that is decided has one outcome, too.
    service.oneshot(Request::new(Body::empty())).await.unwrap();
    limits.decide(&request).await.unwrap();
    assert!(layer.admit(&head).await.is_ok());
    limiter.fail(true);
    limits.decide(&request).await.unwrap_err();
    assert_eq!(count([Abandoned, Allowed, FailedClosed]), [3, 3, 1]);
}

#[tokio::test]
async fn fallback_is_counted_and_hands_the_observer_on() {
    let stats = Stats::new();
    let second = MemoryLimiter::builder().max_keys(1).build().unwrap();
    let limiter = FallbackLimiter::new(failing(), second, NonZeroU32::MIN);
    let layer = RateLimitLayer::new(limiter, rule("client", 1), key::header("key")).observer(stats.clone());
    let keys: Vec<String> = (0..100).map(|n| n.to_string()).collect();
    send(&layer, &keys.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let snapshot = stats.snapshot();
    assert_eq!(snapshot.events().fallbacks(), 100);
    assert!(snapshot.events().evicted() > 0);
}

#[tokio::test]
async fn failed_correction_of_the_first_is_no_fallback() {
    let (stats, first, events) = (Stats::new(), Scripted::new(), Events::default());
    let limiter = FallbackLimiter::new(first.clone(), memory(&ManualClock::new()), NonZeroU32::MIN);
    let limiter = limiter.observer(events.clone());
    let rule = rule("client", 1).refund_when(|_| true);
    let layer = RateLimitLayer::new(limiter, rule, key::global()).observer(stats.clone());
    let service = layer.layer(service_fn(async |_: Request<Body>| {
        first.fail(true);
        Ok::<_, Infallible>(Response::new(Body::empty()))
    }));
    service.oneshot(Request::new(Body::empty())).await.unwrap();
    let failed = LimiterEvent::failed("the store is away: the cable is cut");
    assert_eq!(*events.lock(), vec![failed; 2], "of the refund, and of the look at what is left");
    assert_eq!(stats.snapshot().events().fallbacks(), 0, "the first limiter decided the only request");
}

#[tokio::test]
async fn key_that_is_refused_most_is_that_which_was_refused() {
    let stats = Stats::builder().reveal(|key| Some(key.display().to_string())).build();
    let rules = Rules::builder()
        .descriptors(|request| {
            let users = request.headers.get_all("key").iter();
            users.map(|user| Descriptor::new([("user", user.to_str().unwrap())])).collect::<Vec<_>>()
        })
        .read_text("{domain: edge, descriptors: [{key: user, rate_limit: {unit: minute, requests_per_unit: 2}}]}");
    let layer = rules.unwrap().layer(memory(&ManualClock::new())).unwrap().observer(stats.clone());
    send(&layer, &["loud"; 2]).await;
    for _ in 0..3 {
        let request = Request::builder().header("key", "quiet").header("key", "loud").body(Body::empty()).unwrap();
        let service = service_fn(async |_: Request<Body>| Ok::<_, Infallible>(Response::new(Body::empty())));
        layer.layer(service).oneshot(request).await.unwrap();
    }
    let snapshot = stats.snapshot();
    let most: Vec<_> = snapshot.most_limited().iter().map(|key| (key.name(), key.count())).collect();
    assert_eq!(most, [(Some("loud"), 3)]);
}

#[tokio::test]
async fn requests_of_a_layer_without_a_timer_do_not_wait() {
    let stats = Stats::new();
    let shadow = rule("shadow", 0).mode(Mode::Shadow);
    let layer = RateLimitLayer::new(memory(&ManualClock::new()), Rule::new("queue", queue(3)).unwrap(), key::global())
        .and(shadow, key::global())
        .observer(stats.clone());
    send(&layer, &[""; 3]).await;
    let snapshot = stats.snapshot();
    assert_eq!(snapshot.requests(OutcomeKind::ShadowLimited), 3);
    assert_eq!(of(&snapshot, "queue").waited().count(), 0, "the layer has no timer");
}

/// Returns how many requests wait in all, and because of each policy.
fn waiting(stats: &Stats) -> (u64, Vec<(String, u64)>) {
    let snapshot = stats.snapshot();
    let policies = snapshot.policies().iter().map(|policy| (policy.name().to_owned(), policy.waiting()));
    (snapshot.events().waiting(), policies.collect())
}

#[test]
fn waiting_requests_are_counted_until_they_depart_or_leave() {
    let stats = Stats::new();
    let mut shop = Shop::new(queue(3));
    let layer = shop.layer().observer(stats.clone());
    let sent = [(); 4].map(|()| shop.send(&layer));
    assert_eq!(waiting(&stats), (3, vec![("queue".to_owned(), 3)]));
    shop.world.cancel(sent[3]);
    assert_eq!(waiting(&stats), (2, vec![("queue".to_owned(), 2)]));
    shop.world.pass(100 * MS);
    let snapshot = stats.snapshot();
    assert_eq!(waiting(&stats), (0, vec![("queue".to_owned(), 0)]));
    assert_eq!(value(&stats.to_prometheus(), "ratelimit_waiting", &[("policy", "queue")]), Some(0.0));
    let [queue] = snapshot.policies() else { panic!("{snapshot:?}") };
    assert_eq!((snapshot.requests(OutcomeKind::Delayed), snapshot.requests(OutcomeKind::Abandoned)), (2, 1));
    // 10, 20 and 0 ms: that of the request that left counts too.
    assert_eq!((queue.waited().count(), queue.waited().sum()), (3, Duration::from_millis(30)));
    assert_eq!(queue.units(), 3, "the units of a request that left are refunded");
}

#[tokio::test(start_paused = true)]
async fn requests_in_line_are_counted_for_the_rule_of_their_line() {
    let stats = Stats::new();
    let named = |name: &str| {
        let quota = Quota::concurrent(1).max_wait(Duration::from_secs(10)).unwrap();
        Rule::new(name, quota).unwrap()
    };
    let limiter = MemoryLimiter::builder().max_keys(1_000).build().unwrap();
    let layer = |rule| RateLimitLayer::new(limiter.clone(), rule, key::global()).timer(TokioTimer::new());
    let (user, tenant) = (hold(&layer(named("user")), "").await, hold(&layer(named("tenant")), "").await);
    let both = layer(named("user")).and(named("tenant"), key::global()).observer(stats.clone());
    let sent = tokio::spawn(async move { hold(&both, "").await });
    let line = |user, tenant| vec![("tenant".to_owned(), tenant), ("user".to_owned(), user)];
    tokio::time::advance(Duration::from_millis(1)).await;
    assert_eq!(waiting(&stats), (1, vec![("user".to_owned(), 1)]));
    drop(user);
    tokio::time::advance(Duration::from_millis(1)).await;
    assert_eq!(waiting(&stats), (1, line(0, 1)), "it went to the line of the other");
    let gauge = |policy| value(&stats.to_prometheus(), "ratelimit_waiting", &[("policy", policy)]);
    assert_eq!((gauge("user"), gauge("tenant")), (Some(0.0), Some(1.0)));
    drop(tenant);
    drop(sent.await.unwrap());
    assert_eq!(waiting(&stats), (0, line(0, 0)));
}

/// Sends a request of a user, and returns its response, which holds what the request took.
async fn hold(layer: &RateLimitLayer<MemoryLimiter>, user: &str) -> Response<Body> {
    let answer =
        async |_: Request<Body>| Ok::<_, Infallible>(Response::new(Body::from("not over while it is not read")));
    let request = Request::builder().header("key", user).body(Body::empty()).unwrap();
    layer.layer(service_fn(answer)).oneshot(request).await.unwrap()
}

#[tokio::test]
async fn places_are_counted_while_they_are_held_and_timed_after() {
    let clock = ManualClock::new();
    let stats = Stats::builder().clock(clock.clone()).reveal(|key| Some(key.display().to_string())).build();
    let exports = Rule::new("exports", Quota::concurrent(4)).unwrap().cost(|_| 2);
    let layer = RateLimitLayer::new(memory(&clock), exports, key::header("key"))
        .and(rule("client", 100), key::header("key"))
        .observer(stats.clone());
    let (ada, again, bob) = (hold(&layer, "ada").await, hold(&layer, "ada").await, hold(&layer, "bob").await);
    assert_eq!(hold(&layer, "ada").await.status(), 429, "what is refused holds nothing");
    let held = |stats: &Stats| {
        let snapshot = stats.snapshot();
        let keys = snapshot.most_held().iter().map(|key| (key.name().unwrap_or("-").to_owned(), key.count()));
        (of(&snapshot, "exports").held(), of(&snapshot, "exports").held_for().count(), keys.collect::<Vec<_>>())
    };
    assert_eq!(held(&stats), (6, 0, vec![("ada".to_owned(), 4), ("-".to_owned(), 2)]));
    clock.advance(Duration::from_secs(20));
    drop(ada);
    clock.advance(Duration::from_secs(60));
    drop((again, bob));
    assert_eq!(held(&stats), (0, 3, vec![]));
    let snapshot = stats.snapshot();
    let (exports, client) = (of(&snapshot, "exports"), of(&snapshot, "client"));
    assert_eq!(exports.held_for().sum(), Duration::from_secs(20 + 80 + 80));
    assert_eq!(exports.held_for().percentile(50), Some(Duration::from_secs(100)));
    assert_eq!((client.held(), client.held_for().count()), (0, 0), "a rate holds nothing");

    let text = stats.to_prometheus();
    let places = |name: &str, labels: &[(&str, &str)]| value(&text, name, &[&[("policy", "exports")], labels].concat());
    assert_eq!(places("ratelimit_places_held", &[]), Some(0.0));
    assert_eq!(places("ratelimit_place_held_seconds_bucket", &[("le", "30")]), Some(1.0));
    assert_eq!(places("ratelimit_place_held_seconds_count", &[]), Some(3.0));
    assert_eq!(value(&text, "ratelimit_places_held", &[("policy", "client")]), None);
}

#[tokio::test]
async fn place_that_a_handler_keeps_is_counted_until_it_ends() {
    let (clock, limiter) = (ManualClock::new(), memory(&ManualClock::new()));
    let stats = Stats::builder().clock(clock.clone()).build();
    let layer = RateLimitLayer::new(limiter, Rule::new("jobs", Quota::concurrent(1)).unwrap(), key::header("key"));
    let layer = layer.observer(stats.clone());
    let work = async |request: Request<Body>| {
        let place = request.extensions().get::<InFlight>().unwrap().hold().unwrap();
        let mut response = Response::new(Body::empty());
        response.extensions_mut().insert(Arc::new(place));
        Ok::<_, Infallible>(response)
    };
    let request = Request::builder().header("key", "ada").body(Body::empty()).unwrap();
    let (mut head, body) = layer.layer(service_fn(work)).oneshot(request).await.unwrap().into_parts();
    let place = head.extensions.remove::<Arc<Place>>().unwrap();
    drop(body);
    // A reset lets another request in, and what runs is still counted.
    layer.reset(&Key::of("ada").unwrap()).await.unwrap();
    let other = hold(&layer, "ada").await;
    assert_eq!((other.status().as_u16(), of(&stats.snapshot(), "jobs").held()), (200, 2));
    clock.advance(Duration::from_secs(7));
    drop((place, other));
    let snapshot = stats.snapshot();
    assert_eq!((of(&snapshot, "jobs").held(), of(&snapshot, "jobs").held_for().sum()), (0, Duration::from_secs(14)));
}

/// Counts, and panics when something is taken, returned, or both.
struct PanicsAtPlaces {
    stats: Stats,
    at: [bool; 2],
}

impl Observer for PanicsAtPlaces {
    fn on_place_taken(&self, policy: &Policy, key: &Key, units: u64) -> Timestamp {
        let taken_at = self.stats.on_place_taken(policy, key, units);
        if self.at[0] {
            std::panic::resume_unwind(Box::new("the observer panics"));
        }
        taken_at
    }

    fn on_place_returned(&self, policy: &Policy, key: &Key, units: u64, taken_at: Timestamp) {
        self.stats.on_place_returned(policy, key, units, taken_at);
        if self.at[1] {
            std::panic::resume_unwind(Box::new("the observer panics"));
        }
    }
}

#[tokio::test]
async fn observer_that_panics_about_a_place_keeps_none() {
    for at in [[true, false], [false, true], [true, true]] {
        let (stats, limiter) = (Stats::new(), memory(&ManualClock::new()));
        let rule = Rule::new("exports", Quota::concurrent(1)).unwrap();
        let layer = RateLimitLayer::new(limiter.clone(), rule, key::header("key"));
        let layer = layer.observer(PanicsAtPlaces { stats, at });
        let sent = tokio::spawn(async move { drop(hold(&layer, "ada").await) }).await;
        assert_eq!(sent.is_err(), at[0], "{at:?}");
        let policy = Policy::new("exports", Quota::concurrent(1)).unwrap();
        assert_eq!(limiter.peek_one(&policy, &Key::of("ada").unwrap(), 0).remaining(), 1, "{at:?}");
    }
}

#[tokio::test]
async fn rules_of_a_file_are_counted() {
    let stats = Stats::new();
    let text = |quota| format!("version: 1\nrules:\n  - name: client\n    key: peer-ip\n    quota: {quota}\n");
    let rules = Rules::from_text(text("9/min")).unwrap();
    let layer = rules.layer(memory(&ManualClock::new())).unwrap().observer(stats.clone());
    send(&layer, &["a"]).await;
    let repaired = text("8/min");
    rules.replace(repaired.as_str()).unwrap();
    assert!(rules.replace(text("nonsense")).is_err());
    let snapshot = stats.snapshot();
    let events = snapshot.events();
    assert_eq!((events.rules_loaded(), events.rules_refused()), (1, 1));
    assert_eq!(snapshot.rules(), Some(rules.in_force()));
    assert_eq!(rules.in_force().version, 1);
    assert!(events.rules_error().is_some_and(|error| error.contains("nonsense")), "{events:?}");
    let text = stats.to_prometheus();
    assert_eq!(value(&text, "ratelimit_rules_loads_total", &[("result", "refused")]), Some(1.0));
    assert_eq!(value(&text, "ratelimit_rules_refused", &[]), Some(1.0));
    rules.replace(repaired.as_str()).unwrap();
    assert_eq!(value(&stats.to_prometheus(), "ratelimit_rules_refused", &[]), Some(0.0));
}

#[tokio::test]
async fn setup_warnings_are_counted() {
    let stats = Stats::new();
    let layer = RateLimitLayer::new(MemoryLimiter::new(), Quota::per_second(1), key::peer_ip());
    send(&layer.observer(stats.clone()), &["a"]).await;
    let warnings: Vec<_> = stats.snapshot().setup_warnings().collect();
    assert_eq!(warnings, [(SetupWarningKind::PeerUnknown, 1)]);
    let text = stats.to_prometheus();
    assert_eq!(value(&text, "ratelimit_setup_warnings_total", &[("kind", "peer-unknown")]), Some(1.0));
}

#[test]
fn key_of_an_address_shows_it_to_reveal() {
    let address = std::net::IpAddr::from([192, 0, 2, 7]);
    assert_eq!(Key::of(address).unwrap().address(), Some(address));
    assert_eq!(Key::of((address, "a")).unwrap().address(), None);
}

/// The series as the crate `metrics` gets them.
#[cfg(feature = "metrics")]
mod recorder {
    use std::sync::{Arc, Mutex};

    use metrics::{
        Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, SharedString, Unit,
    };

    use super::*;

    type Series = (String, BTreeMap<String, String>);

    #[derive(Clone, Default)]
    struct Recorder {
        values: Arc<Mutex<BTreeMap<Series, Vec<f64>>>>,
        /// How often each series was registered.
        registered: Arc<Mutex<BTreeMap<Series, u32>>>,
        /// The unit of each metric.
        units: Arc<Mutex<BTreeMap<String, Option<Unit>>>>,
        records: Option<Stats>,
    }

    impl Recorder {
        fn describe(&self, name: &KeyName, unit: Option<Unit>) {
            let known = self.units.lock().unwrap().insert(name.as_str().to_owned(), unit);
            assert!(known.is_none(), "{} is described twice", name.as_str());
        }
    }

    struct Handle(Recorder, Series);

    impl Handle {
        fn of(recorder: &Recorder, key: &Key) -> Arc<Self> {
            let labels = key.labels().map(|label| (label.key().to_owned(), label.value().to_owned())).collect();
            let series = (key.name().to_owned(), labels);
            *recorder.registered.lock().unwrap().entry(series.clone()).or_default() += 1;
            Arc::new(Self(recorder.clone(), series))
        }

        fn push(&self, value: f64) {
            self.0.values.lock().unwrap().entry(self.1.clone()).or_default().push(value);
        }
    }

    impl CounterFn for Handle {
        fn increment(&self, _: u64) {
            unreachable!("counters are set")
        }
        fn absolute(&self, value: u64) {
            self.push(value as f64);
        }
    }

    impl GaugeFn for Handle {
        fn increment(&self, _: f64) {
            unreachable!("gauges are set")
        }
        fn decrement(&self, _: f64) {
            unreachable!("gauges are set")
        }
        fn set(&self, value: f64) {
            self.push(value);
        }
    }

    impl HistogramFn for Handle {
        fn record(&self, value: f64) {
            self.push(value);
        }
    }

    impl metrics::Recorder for Recorder {
        fn describe_counter(&self, name: KeyName, unit: Option<Unit>, _: SharedString) {
            self.describe(&name, unit);
        }
        fn describe_gauge(&self, name: KeyName, unit: Option<Unit>, _: SharedString) {
            self.describe(&name, unit);
        }
        fn describe_histogram(&self, name: KeyName, unit: Option<Unit>, _: SharedString) {
            self.describe(&name, unit);
        }
        fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
            Counter::from_arc(Handle::of(self, key))
        }
        fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
            self.records.iter().for_each(Stats::record_metrics);
            Gauge::from_arc(Handle::of(self, key))
        }
        fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
            Histogram::from_arc(Handle::of(self, key))
        }
    }

    #[test]
    fn recorder_gets_the_series_of_the_text() {
        let (stats, recorder) = (Stats::new(), Recorder::default());
        let mut shop = Shop::new(queue(3));
        let layer = shop.layer().observer(stats.clone());
        for _ in 0..6 {
            shop.send(&layer);
        }
        shop.world.pass(100 * MS);
        metrics::with_local_recorder(&recorder, || {
            stats.record_metrics();
            stats.record_metrics();
        });
        let recorded = recorder.values.lock().unwrap().clone();
        let histogram = |name: &str| ["_bucket", "_sum", "_count"].iter().any(|suffix| name.ends_with(suffix));
        let text: BTreeMap<Series, f64> =
            samples(&stats.to_prometheus()).into_iter().filter(|((name, _), _)| !histogram(name)).collect();
        for (series, value) in &text {
            assert_eq!(recorded.get(series), Some(&vec![*value; 2]), "{series:?}");
        }
        let delays: Vec<_> = recorded.iter().filter(|(series, _)| !text.contains_key(*series)).collect();
        let [((name, labels), delays)] = delays[..] else { panic!("{delays:?}") };
        assert_eq!((name.as_str(), labels.len()), ("ratelimit_wait_seconds", 1));
        // 10, 20 and 30 ms as the bounds of their buckets, and once only.
        assert_eq!(*delays, [0.01, 0.03, 0.03]);
    }

    #[test]
    fn recorder_registers_each_series_once_and_knows_its_unit() {
        let (stats, first, second) = (Stats::new(), Recorder::default(), Recorder::default());
        stats.record_metrics(); // before a recorder is installed
        for recorder in [&first, &second] {
            metrics::with_local_recorder(recorder, || (0..3).for_each(|_| stats.record_metrics()));
            let registered = recorder.registered.lock().unwrap();
            assert!(registered.len() > 20 && registered.values().all(|times| *times == 1), "{registered:?}");
            let units = recorder.units.lock().unwrap();
            let unit = |name: &str| units[name].unwrap();
            assert_eq!(
                [unit("ratelimit_wait_seconds"), unit("ratelimit_requests_total")],
                [Unit::Seconds, Unit::Count]
            );
            assert!(units.values().all(Option::is_some));
        }
    }

    #[test]
    fn recorder_that_records_does_not_hang() {
        let stats = Stats::new();
        let recorder = Recorder { records: Some(stats.clone()), ..Recorder::default() };
        metrics::with_local_recorder(&recorder, || stats.record_metrics());
        assert!(recorder.values.lock().unwrap().values().all(|values| values.len() == 1));
    }
}
