//! A setup warning of a layer without an observer is a warning of `tracing`. Changes of limiters and of rules are events
//! of `tracing`, with or without an observer. `Stats` logs refusals, by choice.
//!
//! A binary of its own, because the feature changes what every other test of setup warnings sees,
//! and because the subscriber is set for the whole process.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use http::{Request, Response};
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::clock::ManualClock;
use tower_ratelimit::limiter::Limiter;
#[cfg(feature = "store")]
use tower_ratelimit::limiter::store::{Change, Loaded, Store, StoreError, StoreLimiterBuilder, Swapped};
use tower_ratelimit::observe::{Observer, SetupWarning, Stats};
use tower_ratelimit::{Key, MemoryLimiter, Policy, Quota, RateLimitLayer, Rule, key};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// The events that the subscriber got: warnings, or all.
#[derive(Clone, Default)]
struct Events {
    written: Arc<Mutex<Vec<String>>>,
    all: bool,
}

struct Written(String);

impl Visit for Written {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0 += &format!("{field}={value:?};");
    }
}

impl Subscriber for Events {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "tower_ratelimit" && (self.all || *metadata.level() == Level::WARN)
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        let mut written = Written(format!("{} ", event.metadata().level()));
        event.record(&mut written);
        self.written.lock().unwrap().push(written.0);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

struct Silent;

impl Observer for Silent {
    fn on_setup_warning(&self, _: &SetupWarning) {}
}

/// A layer whose every request costs more than its quota ever allows.
fn never_passes(name: &str) -> RateLimitLayer<MemoryLimiter> {
    let rule = Rule::new(name, Quota::per_hour(9)).unwrap();
    RateLimitLayer::new(MemoryLimiter::new(), rule.cost(|_| 10), key::global())
}

async fn serve(layer: &RateLimitLayer<MemoryLimiter>, requests: u32) {
    let answer = service_fn(async |_: Request<String>| Ok::<_, Infallible>(Response::new(Body::empty())));
    for _ in 0..requests {
        layer.layer(answer).oneshot(Request::new(String::new())).await.unwrap();
    }
}

#[tokio::test]
async fn setup_warning_without_observer_goes_to_tracing() {
    let events = Events::default();
    tracing::subscriber::set_global_default(events.clone()).unwrap();
    serve(&never_passes("traced"), 40).await;
    serve(&never_passes("observed").observer(Silent), 40).await;
    let events = events.written.lock().unwrap();
    let of = |policy: &'static str| events.iter().filter(move |event| event.contains(policy)).collect::<Vec<_>>();
    assert_eq!(of("\"observed\"").len(), 0);
    let [event] = of("\"traced\"")[..] else { panic!("{events:?}") };
    assert!(
        event.contains("kind=\"never-passes\";") && event.contains("message=none of the first 32 requests"),
        "{event}"
    );
}

/// A program that sets no subscriber would lose the warning. The test runs itself as a child process, and reads its
/// stderr.
#[test]
fn setup_warning_without_a_subscriber_goes_to_stderr() {
    const CHILD: &str = "RATELIMIT_TRACING_CHILD";
    if std::env::var_os(CHILD).is_some() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(serve(&never_passes("unheard"), 40));
        return;
    }
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "setup_warning_without_a_subscriber_goes_to_stderr", "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let written = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{written}");
    assert_eq!(written.matches("tower-ratelimit: never-passes: ").count(), 1, "{written}");
}

async fn ask<L: Limiter>(layer: &RateLimitLayer<L>, keys: &[&str]) {
    let answer = service_fn(async |_: Request<String>| Ok::<_, Infallible>(Response::new(Body::empty())));
    for key in keys {
        let request = Request::builder().header("key", *key).body(String::new()).unwrap();
        layer.layer(answer).oneshot(request).await.unwrap();
    }
}

#[tokio::test]
async fn refusals_are_debug_events_and_one_warning_in_ten_seconds() {
    let events = Events { all: true, ..Events::default() };
    let _guard = tracing::subscriber::set_default(events.clone());
    let clock = ManualClock::new();
    let stats = Stats::builder().clock(clock.clone()).log_refusals(true).build();
    let rule = Rule::new("client", Quota::per_hour(1)).unwrap();
    let limiter = MemoryLimiter::builder().clock(clock.clone()).build().unwrap();
    let layer = RateLimitLayer::new(limiter, rule, key::header("key")).observer(stats.clone());
    let taken = || std::mem::take(&mut *events.written.lock().unwrap());

    ask(&layer, &["secret-a", "secret-b", "secret-a", "secret-b", "secret-b"]).await;
    let refused = taken();
    assert_eq!(refused.len(), 3, "{refused:?}");
    for event in &refused {
        assert!(event.starts_with("DEBUG ") && !event.contains("secret"), "{event}");
        assert!(event.contains("policy=\"client\";outcome=\"limited\";retry_after_ms=3600000;key="), "{event}");
    }
    clock.advance(Duration::from_secs(9));
    ask(&layer, &["another"]).await;
    assert_eq!(taken(), [""; 0]);
    clock.advance(Duration::from_secs(1));
    ask(&layer, &["a third"]).await;
    // With the next outcome, whatever it is. One in 4,096 times both keys have the same bit.
    let summary = taken();
    let of = |keys| {
        format!("WARN message=client: 3 refused for at least {keys} keys;policy=\"client\";refused=3;keys={keys};")
    };
    assert!(summary == [of(2)] || summary == [of(1)], "{summary:?}");
    clock.advance(Duration::from_secs(10));
    drop(stats.snapshot());
    assert_eq!(taken(), [""; 0], "nothing was refused since");

    // A flood: 300 keys pass once and are refused nine times.
    let keys: Vec<String> = (0..3_000).map(|n| (n % 300).to_string()).collect();
    ask(&layer, &keys.iter().map(String::as_str).collect::<Vec<_>>()).await;
    clock.advance(Duration::from_secs(3_600));
    drop(stats.to_prometheus());
    let flood = taken();
    assert_eq!(flood.len(), 2_701);
    let summaries: Vec<&String> = flood.iter().filter(|event| !event.starts_with("DEBUG ")).collect();
    let [summary] = summaries[..] else { panic!("{summaries:?}") };
    let keys = summary.split("keys=").nth(1).and_then(|rest| rest.split(';').next()?.parse::<u32>().ok());
    assert!(summary.contains("refused=2700;") && keys.is_some_and(|keys| (250..=300).contains(&keys)), "{summary}");
}

#[test]
fn quotas_beyond_the_numbers_are_one_warning() {
    let events = Events { all: true, ..Events::default() };
    let _guard = tracing::subscriber::set_default(events.clone());
    let limiter = MemoryLimiter::builder().max_keys(50_000).clock(ManualClock::new()).build().unwrap();
    for n in 0..17_000 {
        let policy = Policy::new("plan", Quota::per_hour(100 + n)).unwrap();
        let _ = limiter.take_one(&policy, &Key::of(n).unwrap(), 1);
    }
    let written = events.written.lock().unwrap();
    let [event] = &written[..] else { panic!("{written:?}") };
    assert!(event.starts_with("WARN message=more quotas have live states"), "{event}");
}

#[cfg(feature = "store")]
mod store {
    use std::sync::atomic::{AtomicBool, Ordering};

    use tower_ratelimit::limiter::StoreErrorKind;
    use tower_ratelimit::limiter::store::{Change, Loaded, Store, StoreError, StoreLimiter, Swapped};

    use super::*;

    /// A store that can be switched off.
    #[derive(Clone, Default)]
    struct Switched(Arc<AtomicBool>);

    impl Switched {
        fn answer<T>(&self, answer: T) -> Result<T, StoreError> {
            let is_off = self.0.load(Ordering::Relaxed);
            if is_off { Err(StoreError::new(StoreErrorKind::Unavailable, "the plug is out")) } else { Ok(answer) }
        }
    }

    impl Store for Switched {
        async fn load(&self, keys: &[Arc<str>]) -> Result<Loaded, StoreError> {
            self.answer(Loaded::new(vec![None; keys.len()]))
        }
        async fn swap(&self, _: &[Change]) -> Result<Swapped, StoreError> {
            self.answer(Swapped::done())
        }
        fn name(&self) -> String {
            "the cellar".to_owned()
        }
    }

    async fn ask(layer: &RateLimitLayer<StoreLimiter<Switched>>) {
        let answer = service_fn(async |_: Request<String>| Ok::<_, Infallible>(Response::new(Body::empty())));
        layer.layer(answer).oneshot(Request::new(String::new())).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn outage_of_a_store_is_a_line_for_each_change() {
        const EXPECTED: [&str; 4] = [
            "WARN message=checks fail at the store: the plug is out;event=\"store-failed\";kind=\"unavailable\";",
            "WARN message=the cellar does not answer: the plug is out;event=\"store-down\";server=\"the cellar\";",
            "INFO message=the cellar answers again;event=\"store-up\";server=\"the cellar\";",
            "INFO message=checks succeed again;event=\"store-recovered\";",
        ];
        let events = Events { all: true, ..Events::default() };
        let _guard = tracing::subscriber::set_default(events.clone());
        for observers in 0..3 {
            let store = Switched::default();
            let limiter = StoreLimiter::new(store.clone()).unwrap();
            let rule = Rule::new("client", Quota::per_hour(9_999)).unwrap();
            let layer = RateLimitLayer::new(limiter, rule, key::global());
            let layers = match observers {
                0 => vec![layer],
                1 => vec![layer.observer(Stats::new())],
                _ => vec![layer.clone().observer(Stats::new()), layer.observer(Stats::new())],
            };
            for off in [false, true, false] {
                store.0.store(off, Ordering::Relaxed);
                for layer in layers.iter().cycle().take(100) {
                    ask(layer).await;
                    tokio::time::advance(Duration::from_millis(200)).await;
                }
            }
            let mut written = std::mem::take(&mut *events.written.lock().unwrap());
            written.sort_by_key(|event| EXPECTED.iter().position(|expected| event == expected));
            assert_eq!(written, EXPECTED, "{observers} observers");
        }
    }
}

#[cfg(feature = "rules")]
#[test]
fn refused_rules_are_a_warning_whatever_observes_them() {
    use tower_ratelimit::rules::Rules;

    let text = |quota: &str| format!("rules: [{{name: all, quota: {quota}, key: global}}]");
    let events = Events { all: true, ..Events::default() };
    let _guard = tracing::subscriber::set_default(events.clone());
    let rules = Rules::from_text(text("5 per hour")).unwrap();
    let layers = [rules.layer(MemoryLimiter::new()).unwrap(), rules.layer(MemoryLimiter::new()).unwrap()];
    let answer = service_fn(async |_: Request<String>| Ok::<_, Infallible>(Response::new(Body::empty())));
    let _services = layers.map(|layer| layer.observer(Stats::new()).layer(answer));
    rules.replace(text("many")).unwrap_err();
    rules.replace(text("6 per hour")).unwrap();
    let others =
        "rules: [{name: b, quota: 1/s, key: global}, {name: all, quota: 6 per hour, mode: shadow, key: global}]";
    rules.replace(others).unwrap();
    rules.replace(format!("# A comment.\n{others}")).unwrap();
    let applied = "rules: [{name: b, quota: 1/s, key: path}, {name: all, quota: 6 per hour, mode: shadow, key: global, \
                   match: {path: /logins}}]\naccess: {deny: [192.0.2.0/24]}";
    rules.replace(applied).unwrap();
    rules.replace(format!("{applied}\n{}", "# A long comment.\n".repeat(5_000))).unwrap();
    rules.replace("rules: []").unwrap();
    let written = events.written.lock().unwrap();
    let [refused, loaded, then @ ..] = &written[..] else { panic!("{written:?}") };
    assert!(refused.starts_with("WARN message=the rules stay as they were: 1:"), "{refused}");
    assert!(refused.ends_with("event=\"rules-refused\";"), "{refused}");
    let (words, now) = ("all: 5 per hour, token bucket -> 6 per hour, token bucket", "of the rules is in force");
    let fields = format!("event=\"rules-loaded\";version=1;rules=1;changes=\"{words}\";");
    assert_eq!(*loaded, format!("INFO message=version 1 {now}: {words};{fields}"));
    let changes = [
        "all: 6 per hour, token bucket -> 6 per hour, token bucket (shadow); b is new",
        "no rule and no access list changed",
        "b: `key` was global, is path; all: it applies to fewer requests: `path`; `deny`, new: 192.0.2.0/24",
        "only quotas and modes were compared, because the rules are too long",
        "all is gone; b is gone",
    ];
    for (event, changes) in then.iter().zip(changes) {
        assert!(event.contains(&format!("{now}: {changes};")), "{event}");
    }
    assert_eq!(then.len(), changes.len());
}

/// Keeps the fields that are recorded in its only span, which a thread is in from the beginning.
#[derive(Clone, Default)]
struct OneSpan(Arc<Mutex<Vec<String>>>, Arc<std::sync::OnceLock<&'static Metadata<'static>>>);

impl Subscriber for OneSpan {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_span()
    }
    fn new_span(&self, span: &Attributes<'_>) -> Id {
        self.1.get_or_init(|| span.metadata());
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, record: &Record<'_>) {
        let mut written = Written(String::new());
        record.record(&mut written);
        self.0.lock().unwrap().push(written.0);
    }
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
    fn current_span(&self) -> tracing_core::span::Current {
        match self.1.get() {
            Some(metadata) => tracing_core::span::Current::new(Id::from_u64(1), metadata),
            None => tracing_core::span::Current::none(),
        }
    }
}

/// A store that is always empty.
#[cfg(feature = "store")]
struct Agrees;

#[cfg(feature = "store")]
impl Store for Agrees {
    async fn load(&self, keys: &[Arc<str>]) -> Result<Loaded, StoreError> {
        Ok(Loaded::new(vec![None; keys.len()]))
    }

    async fn swap(&self, _: &[Change]) -> Result<Swapped, StoreError> {
        Ok(Swapped::done())
    }
}

#[tokio::test(start_paused = true)]
async fn span_gets_outcome_policy_wait_and_time_of_the_store() {
    use tower_ratelimit::clock::{TokioClock, TokioTimer};
    use tower_ratelimit::observe::LimiterEvent;
    use tracing::field::Empty;
    let spans = OneSpan::default();
    let _guard = tracing::subscriber::set_default(spans.clone());
    let span = tracing::info_span!(
        "request",
        ratelimit.outcome = Empty,
        ratelimit.policy = Empty,
        ratelimit.wait_ms = Empty,
        ratelimit.store_ms = Empty
    );
    let _in_span = span.enter();
    let stats = Stats::builder().fill_spans(true).build();
    let queue = Rule::new("queue", Quota::leaky_queue(10, Duration::from_secs(1)).unwrap()).unwrap();
    let limiter = MemoryLimiter::builder().clock(TokioClock::new()).build().unwrap();
    let layer = RateLimitLayer::new(limiter, queue, key::global()).timer(TokioTimer::new()).observer(stats.clone());
    let taken = || std::mem::take(&mut *spans.0.lock().unwrap());
    ask(&layer, &["a"]).await;
    assert_eq!(taken(), ["ratelimit.outcome=\"allowed\";", "ratelimit.policy=\"queue\";"]);
    ask(&layer, &["a"]).await;
    let recorded = taken();
    let expected = ["ratelimit.outcome=\"delayed\";", "ratelimit.policy=\"queue\";", "ratelimit.wait_ms=100.0;"];
    assert!(expected.iter().all(|field| recorded.iter().any(|own| own == field)), "{recorded:?}");
    stats.on_limiter_event(&LimiterEvent::store_checked(Duration::from_micros(1_500), None));
    assert_eq!(taken(), ["ratelimit.store_ms=1.5;"]);
    #[cfg(feature = "store")]
    {
        let limiter = StoreLimiterBuilder::new().build(Agrees).unwrap();
        let layer = RateLimitLayer::new(limiter, Quota::per_hour(5), key::global()).observer(stats.clone());
        ask(&layer, &["a"]).await;
        let recorded = taken();
        assert!(recorded.iter().any(|field| field.starts_with("ratelimit.store_ms=")), "{recorded:?}");
    }
    let silent = Stats::new();
    silent.on_limiter_event(&LimiterEvent::store_checked(Duration::from_micros(1_500), None));
    assert_eq!(taken(), [""; 0]);
}
