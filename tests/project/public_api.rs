//! Public types can be stored, sent to other threads, printed and named.

use std::error::Error;
use std::fmt::Debug;
use std::hash::Hash;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tower::{Layer, Service, ServiceBuilder};
use tower_ratelimit::client::{Advice, Obey, ObeyError, ObeyErrorKind, ObeyFuture, ObeyLayer, PolicyAdvice};
use tower_ratelimit::fleet::FleetError;
use tower_ratelimit::key::{self, PeerAddr, Prefixes, TrustedProxies};
use tower_ratelimit::limiter::memory::{MemoryLimiterBuilder, OnFull};
use tower_ratelimit::middleware::{OverflowTo, ResponseFuture, WrapBody, WrapBodyLayer, WrappedBody};
use tower_ratelimit::{
    ConfigError, ConfigErrorKind, Headers, Key, MemoryLimiter, MissingKey, Mode, OnError, Policy, Quota,
    RateLimitLayer, Refusals, Rule, Wait,
    clock::{Clock, ManualClock, MonotonicClock, Timestamp},
    limiter::{
        Atomicity, BoxLimiter, Charge, ChargeDecision, Decision, Effect, Limiter, LimiterError, NotReady, Receipt,
        Refund, Reply, ReplyFuture, StoreErrorKind, UnsupportedQuota, UnsupportedQuotaKind,
    },
    middleware::{
        Access, AccessList, Admission, GrpcCode, Jitter, LegacyHeaders, ModeSwitch, Overrides, Protocol, QuotaSwitch,
        RateLimit, Refusal, Refused, ResetEncoding, ResetMeaning, When,
    },
    observe::{
        EventCounts, Explanation, HistogramSnapshot, LayerEvent, LimiterEvent, NotCharged, Observer, Outcome,
        OutcomeKind, PolicySnapshot, PolicyState, PolicyStatus, RateBucket, RecentRefusal, RuleExplanation, RulesEvent,
        SetupWarning, SetupWarningKind, Stats, StatsBuilder, StatsSnapshot, StatusPage, TopKey,
    },
    quota::{Algorithm, Anchor, Oldest},
};

fn shared<T: Send + Sync + Unpin + Debug>() {}
fn kept<T: Send + Sync + Unpin + Debug + 'static>() {}
fn cloned<T: Clone + Send + Sync + Unpin + Debug + 'static>() {}
fn value<T: Copy + Eq + Hash + Send + Sync + Unpin + Debug + 'static>() {}
fn error<T: Error + Send + Sync + Unpin + 'static>() {}

type Inner = axum::Router;

#[test]
fn public_types_can_be_kept_sent_and_shown() {
    cloned::<RateLimitLayer<MemoryLimiter>>();
    cloned::<RateLimitLayer<BoxLimiter>>();
    cloned::<RateLimit<Inner, MemoryLimiter>>();
    cloned::<RateLimitLayer<MemoryLimiter, OverflowTo<Inner>>>();
    cloned::<WrapBodyLayer<RateLimitLayer<MemoryLimiter>>>();
    cloned::<RateLimit<WrapBody<Inner>, MemoryLimiter>>();
    cloned::<RateLimit<Inner, MemoryLimiter, OverflowTo<Inner>>>();
    cloned::<ObeyLayer>();
    cloned::<Obey<Inner>>();
    value::<ObeyErrorKind>();
    kept::<Admission>();
    cloned::<ModeSwitch>();
    cloned::<QuotaSwitch>();
    cloned::<MemoryLimiter>();
    cloned::<BoxLimiter>();
    cloned::<Key>();
    cloned::<Policy>();
    cloned::<Rule>();
    cloned::<Headers>();
    cloned::<LegacyHeaders>();
    cloned::<Refusals>();
    cloned::<TrustedProxies>();
    cloned::<Outcome>();
    cloned::<tower_ratelimit::rules::Descriptor>();
    cloned::<tower_ratelimit::rules::DescriptorRequest>();
    cloned::<tower_ratelimit::rules::DescriptorLimits<MemoryLimiter>>();
    cloned::<tower_ratelimit::rules::DescriptorAnswer>();
    cloned::<tower_ratelimit::rules::DescriptorStatus>();
    cloned::<PolicyStatus>();
    cloned::<Explanation>();
    cloned::<RuleExplanation>();
    cloned::<ChargeDecision>();
    cloned::<Stats>();
    cloned::<StatusPage>();
    kept::<StatsBuilder>();
    cloned::<StatsSnapshot>();
    cloned::<PolicySnapshot>();
    cloned::<EventCounts>();
    cloned::<HistogramSnapshot>();
    cloned::<Advice>();
    cloned::<PolicyAdvice>();
    cloned::<RateBucket>();
    cloned::<TopKey>();
    cloned::<RecentRefusal>();
    cloned::<LayerEvent>();
    cloned::<LimiterEvent>();
    cloned::<RulesEvent>();
    cloned::<MonotonicClock>();
    cloned::<ManualClock>();
    cloned::<tower_ratelimit::clock::TokioClock>();
    kept::<MemoryLimiterBuilder>();
    kept::<Decision>();
    kept::<Receipt>();
    kept::<Refund>();
    kept::<Reply<Decision, LimiterError, std::future::Ready<Result<Decision, LimiterError>>>>();
    kept::<ReplyFuture<Decision, LimiterError, std::future::Ready<Result<Decision, LimiterError>>>>();
    shared::<Charge<'_>>();
    shared::<Refusal<'_>>();
}

#[test]
fn settings_and_names_are_values() {
    cloned::<Quota>();
    value::<Algorithm>();
    value::<Anchor>();
    value::<Oldest>();
    value::<Timestamp>();
    value::<Effect>();
    value::<StoreErrorKind>();
    value::<Atomicity>();
    value::<UnsupportedQuotaKind>();
    value::<OnFull>();
    value::<ConfigErrorKind>();
    value::<MissingKey>();
    value::<Mode>();
    value::<Wait>();
    value::<OnError>();
    value::<OutcomeKind>();
    value::<NotCharged>();
    value::<PolicyState>();
    value::<When>();
    value::<ResetEncoding>();
    value::<ResetMeaning>();
    value::<GrpcCode>();
    value::<Protocol>();
    value::<Prefixes>();
    value::<PeerAddr>();
    cloned::<Jitter>();
}

#[test]
fn errors_cross_threads() {
    error::<LimiterError>();
    error::<UnsupportedQuota>();
    error::<ObeyError>();
    error::<NotReady>();
    error::<Refused>();
    error::<SetupWarning>();
    error::<ConfigError>();
    error::<FleetError>();
    #[cfg(feature = "conformance")]
    {
        use tower_ratelimit::conformance::Failures;
        error::<Failures>();
    }
    #[cfg(all(feature = "conformance", feature = "store"))]
    {
        use tower_ratelimit::conformance::StoreFailures;
        error::<StoreFailures>();
    }
    #[cfg(feature = "_redis")]
    {
        use tower_ratelimit::limiter::redis::RedisError;
        error::<RedisError>();
    }
    #[cfg(feature = "store")]
    {
        use tower_ratelimit::limiter::store::StoreError;
        error::<StoreError>();
    }
    #[cfg(feature = "rules")]
    {
        use tower_ratelimit::rules::RulesError;
        error::<RulesError>();
        cloned::<tower_ratelimit::rules::UnregisteredName>();
        value::<tower_ratelimit::rules::NameKind>();
    }
}

#[test]
fn errors_name_their_kind_and_take_one_line() {
    use ConfigErrorKind::{Combination, Full, Missing, Name, NotAnOption, Range, Snapshot, Syntax};
    fn is(result: Result<impl Debug, ConfigError>, expected: ConfigErrorKind) {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), expected, "{error}");
        assert_eq!(error.to_string().lines().count(), 1, "{error}");
        // So prints a program whose `main` returns the error.
        assert!(format!("{error:?}").ends_with(&format!("Error({expected:?}): {error}")), "{error:?}");
    }
    let quota = Quota::per_minute(5);
    is("100 per nothing".parse::<Quota>(), Syntax);
    is(MemoryLimiter::builder().max_keys(0).build(), Range);
    is(Policy::new("", quota), Name);
    is(Rule::all_of("a", [] as [Quota; 0]), Missing);
    is(Rule::all_of("a", [quota, quota]), Combination);
    let meter = Quota::meter(5, Duration::from_secs(60)).unwrap();
    let named = |quota| Rule::new("a", quota);
    is(quota.burst(0).and_then(named), Range);
    is(named(quota).and_then(|rule| rule.unit("")), Name);
    is(Rule::plans_in_proportion("a", [meter], |_| 0), Combination);
    let switch = QuotaSwitch::new(quota);
    is(switch.set(meter), Combination);
    is(Prefixes::default().ipv4(0), Range);
    is(Prefixes::default().ipv6(0), Range);
    is(TrustedProxies::count(0), Range);
    is(TrustedProxies::networks(["x"]), Syntax);
    let one = TrustedProxies::count(1).unwrap();
    is(one.single_header("x y"), Name);
    is(AccessList::new().set("x", Access::Deny), Syntax);
    let names = |name: &str| Headers::legacy(LegacyHeaders::new().limit(name).remaining("x-left"));
    is(names("x y"), Name);
    is(names("date"), Name);
    is(names("x-left"), Name);
    is("Shadow".parse::<Mode>(), Syntax);
    let five = Quota::fixed_window(5, Duration::from_secs(60)).unwrap();
    is(five.burst(3), NotAnOption);
    is(MemoryLimiter::builder().restore(b"no snapshot").build(), Snapshot);
    let plans = Overrides::<u32>::new().max_entries(1);
    plans.set("bob", 3, None).unwrap();
    is(plans.set("ann", 3, None), Full);
    is(plans.set(None::<Key>, 3, None), Missing);
    is(TrustedProxies::networks([] as [&str; 0]), Missing);
    is(TrustedProxies::count(2).unwrap().single_header("x-real-ip"), Combination);
}

#[test]
fn kinds_print_their_labels() {
    assert_eq!(format!("{} {:>6}", Mode::Enforce, Mode::Shadow), "enforce shadow");
    assert_eq!(format!("[{:<8}]", PolicyState::Near), "[near    ]");
    assert_eq!(format!("{} {}", OutcomeKind::FailedOpen, NotCharged::UserAgent), "failed_open user_agent");
    assert_eq!(format!("{} {}", StoreErrorKind::Timeout, SetupWarningKind::NoTimer), "timeout no-timer");
    assert_eq!(Algorithm::TokenBucket.to_string(), Algorithm::TokenBucket.as_str());
}

/// Fails for a new error without a kind, and for one that [`errors_cross_threads`] lacks.
#[test]
fn public_errors_have_a_kind() {
    fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { sources(&path, found) } else { found.push(path) }
        }
    }
    fn assert_is_checked(name: &str) {
        let line = format!("error::<{name}>();");
        assert!(include_str!("public_api.rs").contains(&line), "errors_cross_threads lacks {line}");
    }
    let (mut files, mut errors) = (Vec::new(), 0);
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut files);
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let made = text.split("\nkind_and_message! {").skip(1).filter_map(|made| made.split_once("\n}"));
        for name in made.filter_map(|(made, _)| made.lines().next_back()?.trim().split_once(", ")) {
            errors += 1;
            assert_is_checked(name.0);
        }
        let named = text.lines().filter_map(|line| line.strip_prefix("impl ")?.split_once("Error for "));
        let named = named.filter(|(path, _)| path.is_empty() || path.ends_with("::"));
        for name in named.filter_map(|(_, name)| name.strip_suffix(" {}").or_else(|| name.strip_suffix(" {"))) {
            errors += 1;
            // A boxed limiter's error has the kind of its own error.
            let is_without = name == "LimiterError";
            let has_kind = is_without || text.contains("pub fn kind(&self) -> ");
            assert!(has_kind, "{name} in {} has no kind()", file.display());
            assert_is_checked(name);
        }
    }
    assert!(errors >= 8, "{errors} errors found");
}

#[test]
fn traits_that_users_implement_can_be_boxed() {
    kept::<Box<dyn Clock>>();
    fn observers(_: Option<Box<dyn Observer>>) {}
    observers(None);
}

/// The layer's future and body are `Send` and `Sync` if those of the inner service are.
#[test]
fn futures_and_bodies_can_move_between_threads() {
    fn sent<T: Send>() {}
    sent::<ResponseFuture<Inner, MemoryLimiter, axum::body::Body>>();
    sent::<ResponseFuture<Inner, MemoryLimiter, axum::body::Body, OverflowTo<Inner>>>();
    sent::<WrappedBody<axum::body::Body>>();
    sent::<ObeyFuture<Inner, axum::body::Body>>();
}

struct Application<L> {
    layer: RateLimitLayer<L>,
    service: RateLimit<Inner, L>,
}

fn layer<L: Limiter + Clone>(limiter: L) -> RateLimitLayer<L> {
    RateLimitLayer::new(limiter, Quota::per_second(5), key::header("x-api-key"))
}

/// Returns a service whose type hides the layer.
fn erased(
    layer: &RateLimitLayer<MemoryLimiter>,
) -> impl Service<http::Request<axum::body::Body>, Error = std::convert::Infallible> + Clone + Send + Sync + 'static + use<>
{
    ServiceBuilder::new().layer(layer.clone()).service(Inner::new())
}

#[test]
fn layer_and_service_types_can_be_named() {
    let layer = layer(MemoryLimiter::new());
    let service = layer.layer(Inner::new());
    let application = Application { layer, service };
    let _ = (erased(&application.layer), application.service.clone());
}

#[test]
fn layer_and_service_have_a_limiter_in_memory_by_default() {
    let layer: RateLimitLayer = layer(MemoryLimiter::new());
    let _: RateLimit<Inner> = layer.layer(Inner::new());
}
