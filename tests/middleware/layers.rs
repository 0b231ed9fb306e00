//! A layer and its limiter: the policies that it charges, administration of keys, unnamed quotas,
//! and unsupported quotas.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use http::{HeaderValue, Request, StatusCode};
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::{
    Head, Key, MemoryLimiter, MissingKey, Mode, OnError, Policy, Quota, RateLimitLayer, Rule,
    clock::ManualClock,
    key,
    limiter::{
        BoxLimiter, Charge, ChargeDecision, Decision, FallbackLimiter, Limiter, Refund, Reply, UnsupportedQuota,
        UnsupportedQuotaKind,
    },
    observe::{LimiterEvent, Observer, SetupWarning, SetupWarningKind},
};

use crate::support::{Broken, Scripted, Trouble, memory};
#[cfg(feature = "_redis")]
use crate::support::{redis_limiter, redis_server::Server};

type Response = http::Response<Body>;

const HOUR: Duration = Duration::from_secs(3_600);

fn answer(_: Request<Body>) -> Ready<Result<Response, Infallible>> {
    ready(Ok(Response::new(Body::default())))
}

async fn send<L: Limiter>(layer: &RateLimitLayer<L>, fields: &[(&'static str, &'static str)]) -> StatusCode {
    let mut request = Request::new(Body::default());
    for (name, value) in fields {
        request.headers_mut().insert(*name, HeaderValue::from_static(value));
    }
    layer.layer(service_fn(answer)).oneshot(request).await.unwrap().status()
}

fn rule(name: &str, quota: Quota) -> Rule {
    Rule::new(name, quota).unwrap()
}

// Administration of keys.

/// Returns a layer with every kind of rule, two of which have the same name.
fn every_kind_of_rule(limiter: BoxLimiter) -> RateLimitLayer<BoxLimiter> {
    let api = || rule("api", Quota::per_hour(100));
    let block = || Policy::new("block", Quota::block(1, HOUR, HOUR).unwrap()).unwrap();
    let over = Policy::new("over", Quota::meter(100, HOUR).unwrap()).unwrap();
    let several = Rule::all_of("several", [Quota::per_minute(60), Quota::per_hour(600)]).unwrap();
    let plans = Rule::plans("api", [Quota::per_hour(7), Quota::per_hour(8)], |_| 1).unwrap();
    let refused = Rule::new("refused", Quota::per_hour(0)).unwrap();
    RateLimitLayer::new(limiter, api(), key::global())
        .and(api().block(block().name(), *block().quota()).unwrap(), key::global())
        .and(refused.clone().overage(over.name(), *over.quota()).unwrap(), key::global())
        .and(several.clone(), key::global())
        .and(several, key::global())
        .and(plans, key::global())
        .and(Quota::per_hour(9), key::global())
        .and(Quota::per_hour(9), key::global())
        .and(rule("api", Quota::sliding_log(20, HOUR).unwrap()), key::global())
        .and(
            refused
                .block(block().name(), *block().quota())
                .unwrap()
                .when(|request| request.headers.contains_key("strike")),
            key::global(),
        )
}

const NAMES: [&str; 16] = [
    "api",
    "api-2",
    "refused",
    "several-60-per-minute",
    "several-600-per-hour",
    "several-60-per-minute-2",
    "several-600-per-hour-2",
    "api-3",
    "api-3",
    "9-per-hour",
    "9-per-hour-2",
    "api-4",
    "refused-2",
    "block",
    "over",
    "block-2",
];

async fn statuses(layer: &RateLimitLayer<BoxLimiter>, key: &Key) -> Vec<(String, u64, bool)> {
    let all = layer.peek(key).await.unwrap();
    assert!(all.iter().map(|(policy, _)| policy).eq(layer.policies().iter()));
    let told = |(policy, found): (Policy, ChargeDecision)| {
        (policy.name().to_owned(), found.limit() - found.remaining(), found.is_allowed())
    };
    all.into_iter().map(told).collect()
}

async fn a_layers_keys_are_seen_and_reset(limiter: BoxLimiter) {
    let (layer, key) = (every_kind_of_rule(limiter), Key::global());
    let policies = layer.policies();
    let names: Vec<&str> = policies.iter().map(Policy::name).collect();
    assert_eq!(names, NAMES);
    let fresh = statuses(&layer, &key).await;
    assert!(fresh.iter().all(|(_, used, allowed)| *used == 0 && *allowed), "{fresh:?}");

    assert_eq!(send(&layer, &[]).await, StatusCode::OK);
    assert_eq!(send(&layer, &[("strike", "")]).await, StatusCode::TOO_MANY_REQUESTS);
    let used = statuses(&layer, &key).await;
    assert_eq!(used, statuses(&layer, &key).await, "looking takes nothing");
    for (name, used, allowed) in &used {
        match name.as_str() {
            // A quota of 0, whose meter counts every request.
            "refused" | "refused-2" | "block" => assert_eq!((*used, *allowed), (0, true), "{name}"),
            "block-2" => assert!(!allowed, "{name}"),
            _ => assert_eq!((*used, *allowed), (1, true), "{name}"),
        }
    }
    layer.reset(&Key::of("another").unwrap()).await.unwrap();
    assert_eq!(statuses(&layer, &key).await, used);
    layer.reset(&key).await.unwrap();
    assert_eq!(statuses(&layer, &key).await, fresh);
}

#[tokio::test]
async fn layer_reads_and_resets_the_keys_of_all_its_policies() {
    a_layers_keys_are_seen_and_reset(BoxLimiter::new(memory(&ManualClock::new()))).await;
}

#[cfg(feature = "_redis")]
#[tokio::test]
async fn layer_reads_and_resets_its_keys_on_redis() {
    let server = Server::start();
    let clock = ManualClock::at(tower_ratelimit::clock::Timestamp::from_micros(1_800_000_000_000_000));
    let limiter = redis_limiter::connected(redis_limiter::patient().clock(clock), &server.url()).await;
    a_layers_keys_are_seen_and_reset(BoxLimiter::new(limiter)).await;
}

#[tokio::test]
async fn layer_resets_its_keys_from_any_task() {
    let overflow = service_fn(answer);
    let layer = RateLimitLayer::new(memory(&ManualClock::new()), Quota::per_hour(1), key::global()).overflow(overflow);
    let reset = tokio::spawn(async move { layer.reset(&Key::global()).await });
    reset.await.unwrap().unwrap();
}

// Unnamed quotas.

fn by(field: &'static str) -> impl Fn(&Head<'_>) -> Option<HeaderValue> + Send + Sync + 'static {
    move |request| request.headers.get(field).cloned()
}

fn misuse<L: Limiter>(layer: &RateLimitLayer<L>) -> Option<SetupWarningKind> {
    layer.check().err().map(|misuse| misuse.kind())
}

#[tokio::test]
async fn unnamed_quota_in_two_layers_is_reported() {
    let limiter = memory(&ManualClock::new());
    let log = Log::default();
    let login = RateLimitLayer::new(limiter.clone(), Quota::per_minute(2), by("user"));
    let _service = login.layer(());
    assert_eq!(misuse(&login), None);
    let signup = RateLimitLayer::new(limiter.clone(), Quota::per_minute(2), by("team")).observer(log.clone());
    // The mistake: user 7 uses up the quota of team 7.
    for _ in 0..2 {
        assert_eq!(send(&login, &[("user", "7")]).await, StatusCode::OK);
    }
    assert_eq!(send(&signup, &[("team", "7")]).await, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(log.setup_warning(), [SetupWarningKind::UnnamedQuota], "when the second layer is made");
    assert_eq!(
        (misuse(&login), misuse(&signup)),
        (Some(SetupWarningKind::UnnamedQuota), Some(SetupWarningKind::UnnamedQuota))
    );
    let text = signup.check().unwrap_err().to_string();
    assert!(text.starts_with("unnamed-quota: ") && text.contains("Rule::new"), "{text}");
    assert!(text.contains("\"2 per minute, token bucket\" (\"2-per-minute\" in headers"), "{text}");

    // A handler that calls `admit` also uses the layer.
    let log = Log::default();
    let asked = RateLimitLayer::new(limiter.clone(), Quota::per_minute(2), by("team")).observer(log.clone());
    let (head, ()) = Request::builder().header("team", "8").body(()).unwrap().into_parts();
    asked.admit(&head).await.unwrap().keep();
    assert_eq!(log.setup_warning(), [SetupWarningKind::UnnamedQuota]);

    // Each of these has a name, another quota, or another limiter.
    let named = |name| RateLimitLayer::new(limiter.clone(), rule(name, Quota::per_minute(2)), by("user"));
    let layers = [
        named("login"),
        named("signup"),
        RateLimitLayer::new(limiter.clone(), Quota::per_minute(3), by("user")),
        RateLimitLayer::new(memory(&ManualClock::new()), Quota::per_minute(2), by("user")),
    ];
    for layer in &layers {
        let _service = layer.layer(());
        assert_eq!(misuse(layer), None);
    }
}

#[test]
fn unnamed_quota_that_a_layer_numbered_is_still_unnamed() {
    let limiter = memory(&ManualClock::new());
    let twice = || {
        RateLimitLayer::new(limiter.clone(), rule("2-per-minute", Quota::per_minute(2)), by("user"))
            .and(Quota::per_minute(2), by("team"))
    };
    let [one, two] = [twice(), twice()];
    assert_eq!(one.policies()[1].name(), "2-per-minute-2");
    assert_eq!((misuse(&one), misuse(&two)), (None, Some(SetupWarningKind::UnnamedQuota)));
}

#[test]
fn unnamed_quota_is_shared_by_clones_and_by_later_layers() {
    let limiter = memory(&ManualClock::new());
    let layer = RateLimitLayer::new(limiter.clone(), Quota::per_minute(2), by("user"));
    let clones = [layer.clone(), layer.clone().on_error(OnError::Allow)];
    let _services = clones.clone().map(|layer| layer.layer(()));
    assert!(clones.iter().all(|layer| misuse(layer).is_none()));
    let policy = Rule::from(Quota::per_hour(2));
    let both = [(); 2].map(|()| RateLimitLayer::new(limiter.clone(), policy.clone(), by("user")));
    assert_eq!([misuse(&both[0]), misuse(&both[1])], [None; 2]);
    // Rebuilt after the old layers were dropped.
    drop((layer, clones, _services));
    let rebuilt = RateLimitLayer::new(limiter, Quota::per_minute(2), by("user"));
    let _service = rebuilt.layer(());
    assert_eq!(misuse(&rebuilt), None);
}

// Unsupported quotas.

/// The events that an observer got.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<(Vec<SetupWarningKind>, Vec<LimiterEvent>)>>);

impl Observer for Log {
    fn on_setup_warning(&self, misuse: &SetupWarning) {
        self.0.lock().unwrap().0.push(misuse.kind());
    }

    fn on_limiter_event(&self, event: &LimiterEvent) {
        self.0.lock().unwrap().1.push(event.clone());
    }
}

impl Log {
    fn setup_warning(&self) -> Vec<SetupWarningKind> {
        self.0.lock().unwrap().0.clone()
    }

    fn events(&self) -> Vec<LimiterEvent> {
        self.0.lock().unwrap().1.clone()
    }
}

/// Supports limits below 1,000, and fails for others without a reason.
#[derive(Clone)]
struct Small(MemoryLimiter);

impl Small {
    fn take(&self, charges: &[Charge<'_>]) -> Decision {
        let too_large = charges.iter().any(|charge| charge.policy.quota().limit() >= 1_000);
        assert!(!too_large, "a layer asks only about what the limiter supports");
        self.0.take_now(charges)
    }
}

impl Limiter for Small {
    type Error = Infallible;
    type Future<T: Send + 'static> = Ready<Result<T, Infallible>>;

    fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, Infallible, Self::Future<Decision>> {
        Reply::Now(Ok(Self::take(self, charges)))
    }

    fn try_take_one(&self, policy: &Policy, key: &Key, cost: u64) -> Option<ChargeDecision> {
        Self::take(self, &[Charge::new(policy, key).cost(cost)]).charges().first().cloned()
    }

    fn peek(&self, charges: &[Charge<'_>]) -> Reply<Decision, Infallible, Self::Future<Decision>> {
        Reply::Now(Ok(self.0.peek_now(charges)))
    }

    fn refund(&self, refunds: Vec<Refund>) -> Reply<(), Infallible, Self::Future<()>> {
        self.0.refund_now(&refunds);
        Reply::Now(Ok(()))
    }

    fn reset(&self, policy: &Policy, key: &Key) -> Reply<(), Infallible, Self::Future<()>> {
        self.0.reset_now(policy, key);
        Reply::Now(Ok(()))
    }

    fn supports(&self, quota: &Quota) -> Result<(), UnsupportedQuota> {
        if quota.limit() < 1_000 {
            return Ok(());
        }
        Err(UnsupportedQuota::new(UnsupportedQuotaKind::TooLarge, quota, "its limit must be below 1,000"))
    }
}

fn small(rule: Rule) -> RateLimitLayer<Small> {
    RateLimitLayer::new(Small(memory(&ManualClock::new())), rule, key::global())
}

fn large() -> Rule {
    rule("large", Quota::per_hour(1_000))
}

#[tokio::test]
async fn unsupported_quota_is_reported_and_fails_each_request() {
    let fits = || rule("fits", Quota::per_hour(999));
    assert_eq!(misuse(&small(fits())), None);
    assert_eq!(send(&small(fits()), &[]).await, StatusCode::OK);

    let log = Log::default();
    let layer = small(large()).observer(log.clone());
    let text = layer.check().unwrap_err().to_string();
    assert!(text.starts_with("unsupported-quota: the policy \"large\": "), "{text}");
    assert!(text.contains("its limit must be below 1,000"), "{text}");
    assert_eq!(send(&layer, &[]).await, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(log.setup_warning(), [SetupWarningKind::UnsupportedQuota]);
    let events = log.events();
    assert!(matches!(events.as_slice(), [LimiterEvent::Failed { error, .. }] if error.contains("1,000")), "{events:?}");

    // Without an observer, beside others, and as a block.
    assert_eq!(send(&small(large()), &[]).await, StatusCode::SERVICE_UNAVAILABLE);
    let beside = small(fits()).and(large(), key::global());
    assert_eq!(send(&beside, &[]).await, StatusCode::SERVICE_UNAVAILABLE);
    let blocking = small(fits().block("block", Quota::block(1_000, HOUR, HOUR).unwrap()).unwrap());
    assert_eq!(misuse(&blocking), Some(SetupWarningKind::UnsupportedQuota));
    assert_eq!(send(&blocking, &[]).await, StatusCode::SERVICE_UNAVAILABLE);
    let (head, ()) = Request::new(()).into_parts();
    let refused = small(large()).admit(&head).await.unwrap_err();
    assert_eq!(refused.into_http().status(), StatusCode::SERVICE_UNAVAILABLE);
    // As the layer is configured for failures, and as rules that refuse nothing do.
    assert_eq!(send(&small(large()).on_error(OnError::Allow), &[]).await, StatusCode::OK);
    assert_eq!(send(&small(large().mode(Mode::Shadow)), &[]).await, StatusCode::OK);
}

// Failures.

#[tokio::test]
async fn overloaded_limiter_fails_open_only_if_asked_to() {
    let scripted = Scripted::new();
    let second = FallbackLimiter::new(Broken(true, 0), scripted.clone(), NonZeroU32::MIN);
    let limiters = || [BoxLimiter::new(scripted.clone()), BoxLimiter::new(Arc::new(scripted.clone()))];
    let statuses = async |on_error| {
        let mut statuses = Vec::new();
        for limiter in limiters() {
            let layer = RateLimitLayer::new(limiter, Quota::per_hour(1_000), key::global()).on_error(on_error);
            statuses.push(send(&layer, &[]).await.as_u16());
        }
        statuses
    };
    scripted.fail(true);
    assert_eq!(statuses(OnError::Deny).await, [503; 2]);
    assert_eq!(statuses(OnError::Allow).await, [200; 2]);
    scripted.overload();
    assert_eq!(statuses(OnError::Deny).await, [503; 2]);
    assert_eq!(statuses(OnError::Allow).await, [503; 2]);
    assert_eq!(statuses(OnError::AllowAlways).await, [200; 2]);
    let shadow =
        RateLimitLayer::new(scripted.clone(), Rule::from(Quota::per_hour(1)).mode(Mode::Shadow), key::global());
    assert_eq!(send(&shadow.on_error(OnError::Allow), &[]).await, 200, "it refuses nothing");
    assert!(second.is_overload(&Trouble), "the error is the second limiter's");
}

#[tokio::test]
async fn unsupported_quota_fails_only_requests_it_applies_to() {
    let sometimes = small(large().when(|request| request.headers.contains_key("large")));
    assert_eq!(send(&sometimes, &[]).await, StatusCode::OK);
    assert_eq!(send(&sometimes, &[("large", "")]).await, StatusCode::SERVICE_UNAVAILABLE);
    let quotas = [Quota::per_hour(10), Quota::per_hour(1_000)];
    let plans = Rule::plans("plan", quotas, |request| usize::from(request.headers.contains_key("large"))).unwrap();
    let plans = small(plans);
    assert_eq!(misuse(&plans), Some(SetupWarningKind::UnsupportedQuota));
    assert_eq!(send(&plans, &[]).await, StatusCode::OK);
    assert_eq!(send(&plans, &[("large", "")]).await, StatusCode::SERVICE_UNAVAILABLE);
}

// After the requests that a layer watches.

/// Responses, with what a client learns from each: the status, `RateLimit` and `RateLimit-Policy`.
async fn responses(layer: &RateLimitLayer<MemoryLimiter>, count: usize) -> Vec<String> {
    let mut all = Vec::new();
    for _ in 0..count {
        let request = Request::new(Body::default());
        let response = layer.layer(service_fn(answer)).oneshot(request).await.unwrap();
        let header = |name: &str| response.headers().get(name).map_or("", |value| value.to_str().unwrap()).to_owned();
        all.push(format!("{} {} {}", response.status(), header("ratelimit"), header("ratelimit-policy")));
    }
    all
}

fn no_key(_: &Head<'_>) -> Option<Key> {
    None
}

/// A layer watches its first requests. After them, the usual request has a shorter path.
#[tokio::test]
async fn layer_answers_alike_after_the_requests_that_it_watches() {
    type Build<'a> = &'a dyn Fn(MemoryLimiter, Rule) -> RateLimitLayer<MemoryLimiter>;
    let of_all = |limiter, api| RateLimitLayer::new(limiter, api, key::global());
    let other = || rule("other", Quota::fixed_window(7, HOUR).unwrap());
    let without = |api: Rule, limiter, [first, second]: [MissingKey; 2]| {
        RateLimitLayer::new(limiter, api.missing_key(first), no_key).and(other().missing_key(second), no_key)
    };
    let kinds: [(&str, Build<'_>); 9] = [
        ("one policy", &of_all),
        ("one policy, observed by the service", &|limiter, api| of_all(limiter, api).expose_outcome(true)),
        ("two policies of one key", &|limiter, api| of_all(limiter, api).and(other(), key::global())),
        ("two policies of two keys", &|limiter, api| of_all(limiter, api).and(other(), |_| "other")),
        ("two policies, one costs more", &|limiter, api| of_all(limiter, api).and(other().cost(|_| 2), key::global())),
        ("two policies, no key", &|limiter, api| without(api, limiter, [MissingKey::Exempt, MissingKey::Reject])),
        ("two policies, no key, both exempt", &|limiter, api| without(api, limiter, [MissingKey::Exempt; 2])),
        ("degraded", &|limiter, api| of_all(limiter, api).mode(Mode::Degrade)),
        ("shadow", &|limiter, api| of_all(limiter, api).mode(Mode::Shadow)),
    ];
    for (name, layer) in kinds {
        let quota = Quota::fixed_window(5, HOUR).unwrap();
        let layer = layer(memory(&ManualClock::new()), rule("api", quota));
        let first = responses(&layer, 8).await;
        responses(&layer, 11_000).await;
        for key in [Key::global(), Key::of("other").unwrap()] {
            layer.reset(&key).await.unwrap();
        }
        assert_eq!(responses(&layer, 8).await, first, "{name}");
    }
}
