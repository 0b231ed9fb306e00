//! A client that obeys what it reads is not refused again by this crate's own server.

use std::convert::Infallible;

use axum::body::Body;
use http::{Request, Response, Version};
use proptest::prelude::*;
use proptest::sample::Index;
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::clock::{Clock, ManualClock};
use tower_ratelimit::middleware::{IntoRule, Jitter, LegacyHeaders, ResetEncoding, ResetMeaning};
use tower_ratelimit::observe::Outcome;
use tower_ratelimit::{Headers, MemoryLimiter, Quota, RateLimitLayer, Rule, Wait, key};

use super::*;
use crate::support::{config, every_algorithm, memory};

type Layered = RateLimitLayer<MemoryLimiter>;

const MINUTE: Duration = Duration::from_secs(60);

const ENCODINGS: [ResetEncoding; 7] = [
    ResetEncoding::DeltaSeconds,
    ResetEncoding::DeltaSecondsDecimal { digits: 3 },
    ResetEncoding::EpochSeconds,
    ResetEncoding::EpochMillis,
    ResetEncoding::Rfc3339,
    ResetEncoding::ImfDate,
    ResetEncoding::GoDuration,
];

fn named(encoding: ResetEncoding, meaning: ResetMeaning) -> Headers {
    let names = LegacyHeaders::new()
        .limit("acme-ratelimit-limit")
        .remaining("acme-ratelimit-remaining")
        .used("acme-ratelimit-used")
        .reset("acme-ratelimit-reset", encoding, meaning)
        .policy_name("acme-ratelimit-bucket");
    Headers::legacy(names).unwrap()
}

pub(crate) fn formats() -> Vec<Headers> {
    let mut formats = vec![
        Headers::draft_11(),
        Headers::draft_11().partition_keys(|_, key| Some(key.as_bytes().to_vec())),
        Headers::draft_07(),
        Headers::draft_06(),
        Headers::github(),
        Headers::openai(),
        Headers::anthropic(),
    ];
    formats.extend(ENCODINGS.map(Headers::x_rate_limit));
    for meaning in [ResetMeaning::NextUnit, ResetMeaning::Window, ResetMeaning::Full] {
        formats.extend(ENCODINGS.map(|encoding| named(encoding, meaning)));
    }
    let both = Headers::draft_11().and(Headers::x_rate_limit(ResetEncoding::EpochSeconds));
    formats.push(both.jitter(Jitter::percent(10)));
    formats
}

#[expect(clippy::disallowed_methods, reason = "headers have the time of the system's clock")]
pub(crate) fn system_time() -> SystemTime {
    SystemTime::now()
}

/// Sends a request to a layer. Returns the status, the outcome if there is one, and the advice as
/// of a moment before the request.
async fn send(layer: &Layered, request: Request<Body>) -> (u16, Option<Outcome>, Advice) {
    let served = service_fn(|_: Request<Body>| async { Ok::<_, Infallible>(Response::new(Body::empty())) });
    let before = system_time();
    let response = layer.layer(served).oneshot(request).await.unwrap();
    let advice = Advice::read(response.headers(), before);
    (response.status().as_u16(), response.extensions().get::<Outcome>().cloned(), advice)
}

fn get() -> Request<Body> {
    Request::new(Body::empty())
}

fn call() -> Request<Body> {
    let request = Request::post("/shop.Cart/Add").version(Version::HTTP_2).header("content-type", "application/grpc");
    request.header("te", "trailers").body(Body::empty()).unwrap()
}

fn layer(clock: &ManualClock, rule: impl IntoRule, headers: Headers) -> Layered {
    RateLimitLayer::new(memory(clock), rule, key::global()).headers(headers).expose_outcome(true)
}

/// Sends requests until one is refused.
async fn until_refused(layer: &Layered, request: fn() -> Request<Body>) -> (Outcome, Advice) {
    for _ in 0..100 {
        let (_, outcome, advice) = send(layer, request()).await;
        if let Some(outcome) = outcome.filter(|outcome| !outcome.kind().passed()) {
            return (outcome, advice);
        }
    }
    panic!("no request was refused");
}

#[tokio::test]
async fn draft_11_is_read_as_written() {
    let clock = ManualClock::new();
    let policy = Rule::new(r#"a "b" \c"#, Quota::per_minute(100)).unwrap().unit("tokens").unwrap();
    let headers = Headers::draft_11().partition_keys(|_, _| Some(b"acme".to_vec()));
    let (_, _, advice) = send(&layer(&clock, policy, headers), get()).await;
    assert_eq!(in_short(&advice), [r#"a "b" \c: 99/100 per 60s, reset 60s, unit tokens, of acme"#]);
    assert_eq!(advice.wait(), Wait::None);
}

/// Requests per minute and tokens per day.
pub(crate) fn requests_and_tokens(clock: &ManualClock, cost: u64, headers: Headers) -> Layered {
    let requests = Rule::new("requests", Quota::per_minute(60)).unwrap();
    let tokens = Rule::new("tokens", Quota::per_day(150_000)).unwrap().unit("tokens").unwrap().cost(move |_| cost);
    layer(clock, requests, headers).and(tokens, key::global())
}

#[tokio::test]
async fn presets_of_vendors_are_read_as_written() {
    for (headers, name) in [(Headers::openai(), "tokens"), (Headers::anthropic(), "input-tokens")] {
        let clock = ManualClock::new();
        let headers = headers.clock(clock.clone());
        let requests = Rule::new("minute", Quota::per_minute(60)).unwrap();
        let tokens = Rule::new("day", Quota::per_day(172_800)).unwrap().unit(name).unwrap().cost(|_| 100_000);
        let layer = layer(&clock, requests, headers).and(tokens, key::global());
        let served = layer.layer(service_fn(|_| async { Ok::<_, Infallible>(Response::new(Body::empty())) }));
        let now = || UNIX_EPOCH + Duration::from_micros(clock.now().as_micros());
        let response = served.clone().oneshot(get()).await.unwrap();
        let advice = Advice::read(response.headers(), now());
        let tokens = format!("{name}: 72800/172800, reset 50000s, unit tokens");
        let mut read = in_short(&advice);
        read.sort();
        let mut expected = [tokens, "requests: 59/60, reset 1s, unit requests".to_owned()];
        expected.sort();
        assert_eq!(read, expected);
        assert_eq!((advice.wait(), advice.retry_after()), (Wait::None, None));
        // The tokens refuse, and the requests are not exhausted.
        let response = served.oneshot(get()).await.unwrap();
        let advice = Advice::read(response.headers(), now());
        assert_eq!(advice.wait(), Wait::After(Duration::from_secs(13_600)));
        let exhausted: Vec<_> = advice.policies().iter().filter(|policy| policy.is_exhausted()).collect();
        assert_eq!(exhausted.iter().map(|policy| policy.name()).collect::<Vec<_>>(), [Some(name)]);
    }
}

/// `Retry-After` is in whole seconds, and OpenAI's clients obey the milliseconds.
#[tokio::test]
async fn wait_in_milliseconds_is_exact() {
    let clock = ManualClock::new();
    let layer = layer(&clock, Quota::new(1, Duration::from_millis(1_234)).unwrap(), Headers::openai());
    let (outcome, advice) = until_refused(&layer, get).await;
    assert_eq!(outcome.wait().duration(), Some(Duration::from_millis(1_234)));
    assert_eq!(advice.retry_after(), Some(Duration::from_millis(1_234)));
    for (headers, expected) in [
        ("retry-after: 2\nretry-after-ms: 1000.5", 1_000.5),
        ("retry-after: 1\nretry-after-ms: 12", 12.0),
        ("retry-after: 2\nretry-after-ms: 12", 2_000.0),
        ("retry-after: 2\nretry-after-ms: 2001", 2_001.0),
        ("retry-after: 5, 2\nretry-after-ms: 1999", 5_000.0),
        ("retry-after: 2\nretry-after-ms: 12\nx-ms-retry-after-ms: 1999", 1_999.0),
        ("retry-after: 2\nretry-after-ms: soon", 2_000.0),
        ("retry-after: 2\nretry-after-ms: 1500\nx-ratelimit-retry-after: 3", 3_000.0),
    ] {
        assert_eq!(read(headers).retry_after(), Some(seconds(expected / 1_000.0)), "{headers}");
    }
}

#[tokio::test]
async fn every_format_reports_what_the_policy_has_left() {
    for headers in formats() {
        let layer = layer(&ManualClock::new(), Quota::per_minute(100), headers.clone());
        let (_, _, advice) = send(&layer, get()).await;
        assert!(!advice.policies().is_empty(), "{headers:?}");
        for policy in advice.policies() {
            assert_eq!((policy.limit(), policy.remaining()), (Some(100), Some(99)), "{headers:?}");
            assert!(policy.until_reset().is_some(), "{headers:?}");
        }
        assert_eq!((advice.wait(), advice.retry_after()), (Wait::None, None), "{headers:?}");
    }
}

#[tokio::test]
async fn client_that_waits_as_the_server_says_is_served() {
    for headers in formats() {
        for send_retry_after in [true, false] {
            let headers = headers.clone().retry_after(send_retry_after);
            for quota in every_algorithm(3, MINUTE) {
                let clock = ManualClock::new();
                let layer = layer(&clock, quota, headers.clone());
                let (outcome, advice) = until_refused(&layer, get).await;
                let wait = advice.wait().duration().unwrap_or_else(|| panic!("{quota}: {headers:?}"));
                assert!(wait >= outcome.wait().duration().unwrap(), "{quota}: {wait:?}, {headers:?}");
                clock.advance(wait);
                assert_eq!(send(&layer, get()).await.0, 200, "{quota}: {wait:?}, {headers:?}");
            }
        }
    }
}

#[tokio::test]
async fn grpc_client_that_waits_as_the_server_says_is_served() {
    for quota in every_algorithm(3, MINUTE) {
        let clock = ManualClock::new();
        let layer = layer(&clock, quota, Headers::none());
        let (outcome, advice) = until_refused(&layer, call).await;
        let promised = outcome.wait().duration().unwrap();
        let wait = advice.wait().duration().unwrap();
        assert!(wait >= promised && wait < promised + Duration::from_millis(1), "{quota}: {wait:?}");
        assert!(!advice.forbids_retry());
        clock.advance(wait);
        assert!(send(&layer, call()).await.1.unwrap().kind().passed(), "{quota}");
    }
}

#[tokio::test]
async fn cost_that_never_passes_forbids_a_retry_over_grpc() {
    let rule = Rule::new("few", Quota::per_minute(3)).unwrap().cost(|_| 4);
    for request in [call, get] {
        let layer = layer(&ManualClock::new(), rule.clone(), Headers::draft_11());
        let (outcome, advice) = until_refused(&layer, request).await;
        assert_eq!(outcome.wait(), Wait::Never);
        assert_eq!((advice.wait(), advice.retry_after()), (Wait::Unknown, None), "nothing is left, for no stated time");
        assert_eq!(advice.forbids_retry(), request().version() == Version::HTTP_2);
    }
}

proptest! {
    #![proptest_config(config(200))]

    /// Two policies, requests at any times, any format: whenever the client reads a wait and obeys
    /// it, the next request passes. Without a wait it sends at once.
    #[test]
    fn wait_is_never_shorter_than_promised(
        format in 0..formats().len(),
        quotas in [(1_u64..6, 1_u64..4_000), (1_u64..20, 40_u64..400_000)],
        algorithms in [any::<Index>(), any::<Index>()],
        pauses in proptest::collection::vec(0_u64..5_000, 1..30),
        is_grpc in any::<bool>(),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let quota = |at: usize| {
                // One of the algorithms divides its period by 24.
                let (limit, period) = quotas[at];
                *algorithms[at].get(&every_algorithm(limit, Duration::from_millis(24 * period)))
            };
            let clock = ManualClock::new();
            let policy = |name: &str, quota| Rule::new(name, quota).unwrap();
            let layer = RateLimitLayer::new(memory(&clock), policy("a", quota(0)), key::global())
                .and(policy("b", quota(1)), key::global())
                .headers(formats()[format].clone())
                .expose_outcome(true);
            let request = if is_grpc { call } else { get };
            for pause in pauses {
                clock.advance(Duration::from_millis(pause));
                let (_, outcome, advice) = send(&layer, request()).await;
                let outcome = outcome.unwrap();
                let Some(promised) = outcome.wait().duration() else { continue };
                let wait = advice.wait().duration();
                prop_assert!(wait.is_some_and(|wait| wait >= promised.min(Duration::from_secs(86_400))), "{wait:?} for {promised:?}");
                clock.advance(wait.unwrap_or_default());
                if promised <= Duration::from_secs(86_400) {
                    prop_assert!(send(&layer, request()).await.1.unwrap().kind().passed());
                }
            }
            Ok(())
        })?;
    }
}
