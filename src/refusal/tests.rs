use std::pin::Pin;
use std::sync::LazyLock;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::request::Parts;
use http::{HeaderMap, Request, Response, StatusCode, Version};
use http_body::Body as _;
use proptest::prelude::*;
use prost::Message as _;
use serde_json::{Value, json};
use tonic_types::{QuotaFailure, RetryInfo, StatusExt as _};

use super::*;
use crate::base::head::Head;
use crate::base::wait::Wait;
use crate::decision::ChargeDecision;
use crate::headers::{Headers, Jitter, PolicyView, PreparedHeaders};
use crate::key::Key;
use crate::mode::Mode;
use crate::outcome::{Outcome, OutcomeKind, PolicyStatus};
use crate::policy::Policy;
use crate::quota::Quota;

static KEY: LazyLock<Key> = LazyLock::new(|| Key::of("client").unwrap());

fn hundred() -> Policy {
    Policy::new("default", Quota::per_minute(100)).unwrap()
}

fn outcome(kind: OutcomeKind, policies: Vec<(Policy, ChargeDecision)>) -> Outcome {
    let status = |(policy, decision): (Policy, ChargeDecision)| {
        let refuses = !decision.is_allowed();
        PolicyStatus { policy, cost: 1, mode: Mode::Enforce, refuses, near: false, taken: 0, decision }
    };
    Outcome::new(kind, policies.into_iter().map(status).collect())
}

/// The default policy refuses.
fn limited(wait: Wait) -> Outcome {
    outcome(OutcomeKind::Limited, vec![(hundred(), ChargeDecision::denied(100, 0, wait))])
}

/// Default refusals of a layer without policies.
fn unprepared() -> PreparedRefusals {
    PreparedRefusals::new(Refusals::default(), &[])
}

fn parts(content_type: &str) -> Parts {
    let request = Request::post("/").version(Version::HTTP_2).header(CONTENT_TYPE, content_type);
    request.body(()).unwrap().into_parts().0
}

/// The response as the layer sends it: the fields of the default [`Headers`] are added.
fn respond(refusals: &Refusals, content_type: &str, outcome: &Outcome) -> Response<Bytes> {
    let policies = [hundred()];
    let headers = PreparedHeaders::new(&Headers::default(), &policies, None);
    let parts = parts(content_type);
    let wait = headers.reported_wait(outcome, 0);
    let prepared = PreparedRefusals::new(refusals.clone(), &policies);
    let mut response = prepared.respond(&Head::from(&parts), outcome, wait).map(whole);
    let views: Vec<PolicyView<'_>> = outcome
        .policies()
        .iter()
        .enumerate()
        .map(|(index, status)| PolicyView {
            index,
            policy: status.policy(),
            key: Some(&KEY),
            decision: status.decision(),
            refuses: status.refuses(),
        })
        .collect();
    let status = response.status();
    if let Some(mut rendered) = headers.render(&views, Some(0)) {
        headers.add(&mut rendered, response.headers_mut(), status);
    }
    response
}

/// A body that is there at once.
fn whole(mut body: RefusalBody) -> Bytes {
    let mut bytes = Vec::new();
    while let Poll::Ready(Some(frame)) = Pin::new(&mut body).poll_frame(&mut Context::from_waker(Waker::noop())) {
        bytes.extend_from_slice(frame.unwrap().data_ref().unwrap());
    }
    bytes.into()
}

fn http(refusals: &Refusals, outcome: &Outcome) -> Response<Bytes> {
    respond(refusals, "application/json", outcome)
}

fn grpc(refusals: &Refusals, outcome: &Outcome) -> Response<Bytes> {
    respond(refusals, "application/grpc", outcome)
}

fn problem(response: &Response<Bytes>) -> Value {
    serde_json::from_slice(response.body()).unwrap()
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).map(|value| value.to_str().unwrap())
}

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

#[test]
fn refusal_is_429_with_a_problem_and_a_wait() {
    let response = http(&Refusals::default(), &limited(Wait::After(secs(5))));
    assert_eq!(response.status(), 429);
    let headers = response.headers();
    assert_eq!(text(headers, "content-type"), Some("application/problem+json"));
    assert_eq!(text(headers, "cache-control"), Some("no-store"));
    assert_eq!(text(headers, "retry-after"), Some("5"));
    assert_eq!(text(headers, "ratelimit"), Some("\"default\";r=0;t=5"));
    assert_eq!(
        std::str::from_utf8(response.body()).unwrap(),
        "{\"type\":\"https://iana.org/assignments/http-problem-types#quota-exceeded\",\"title\":\"Request cannot be \
         satisfied as assigned quota has been exceeded\",\"status\":429,\"violated-policies\":[\"default\"]}"
    );
}

#[test]
fn refusal_says_if_no_wait_helps() {
    let too_costly = "This request costs more than its limit, so no wait helps.";
    let response = http(&Refusals::default(), &limited(Wait::Never));
    assert_eq!(text(response.headers(), "retry-after"), None);
    assert_eq!(problem(&response)["detail"], too_costly);
    assert_eq!(problem(&response)["violated-policies"], json!(["default"]));
    let response = http(&Refusals::text(), &limited(Wait::Never));
    assert!(response.body().ends_with(format!(": {too_costly}\n").as_bytes()), "{:?}", response.body());
    let response = grpc(&Refusals::default(), &limited(Wait::Never));
    assert_eq!(text(response.headers(), "grpc-message"), Some(too_costly));
    assert_eq!(problem(&http(&Refusals::default(), &limited(Wait::After(secs(5))))).get("detail"), None);
}

#[test]
fn only_the_policies_that_refused_are_named() {
    let named = |name, decision| (Policy::new(name, Quota::per_hour(5)).unwrap(), decision);
    let denied = || ChargeDecision::denied(5, 0, Wait::After(secs(1)));
    let policies = vec![named("a", denied()), named("b", ChargeDecision::allowed(5, 1)), named("c", denied())];
    let several = outcome(OutcomeKind::Limited, policies);
    assert_eq!(problem(&http(&Refusals::default(), &several))["violated-policies"], json!(["a", "c"]));
    let body = http(&Refusals::text(), &several).into_body();
    assert_eq!(body, "Request cannot be satisfied as assigned quota has been exceeded: a, c\n");
    // A policy of the same name with another quota than the prepared one is the client's business no less.
    let chosen = (Policy::new("default", Quota::per_hour(7)).unwrap(), denied());
    let response = http(&Refusals::default(), &outcome(OutcomeKind::Limited, vec![chosen]));
    assert_eq!(problem(&response)["violated-policies"], json!(["default"]));
}

/// Descriptors charge it for each of them.
#[test]
fn policy_that_refuses_under_several_keys_is_named_once() {
    let denied = || (hundred(), ChargeDecision::denied(100, 0, Wait::After(secs(1))));
    let other = (Policy::new("other", Quota::per_hour(5)).unwrap(), ChargeDecision::denied(5, 0, Wait::After(secs(2))));
    for (policies, names) in
        [(vec![denied(), denied()], &["default"][..]), (vec![denied(), other, denied()], &["default", "other"])]
    {
        let refused = outcome(OutcomeKind::Limited, policies);
        assert_eq!(problem(&http(&Refusals::default(), &refused))["violated-policies"], json!(names));
        let status = tonic::Status::from_header_map(grpc(&Refusals::default(), &refused).headers()).unwrap();
        assert_eq!(status.get_error_details().quota_failure().unwrap().violations.len(), names.len());
    }
}

#[test]
fn problem_has_the_set_type_and_the_real_status() {
    let limited = limited(Wait::After(secs(5)));
    let about = |refusals: Refusals| {
        let response = http(&refusals, &limited);
        let problem = problem(&response);
        assert_eq!(problem["status"], response.status().as_u16());
        let member = |name: &str| problem[name].as_str().unwrap().to_owned();
        (response.status().as_u16(), member("type"), member("title"))
    };
    let expected = |status, kind: &str, title: &str| (status, kind.to_owned(), title.to_owned());
    let types = "https://iana.org/assignments/http-problem-types#";
    let (quota, capacity) = (format!("{types}quota-exceeded"), format!("{types}temporary-reduced-capacity"));
    let quota_title = "Request cannot be satisfied as assigned quota has been exceeded";
    let capacity_title = "Request cannot be satisfied due to temporary server capacity constraints";
    let base = Refusals::problem_json;
    assert_eq!(about(base()), expected(429, &quota, quota_title));
    assert_eq!(about(base().status(StatusCode::FORBIDDEN)), expected(403, &quota, quota_title));
    let overloaded = base().status(StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(about(overloaded.clone()), expected(503, &capacity, capacity_title));
    assert_eq!(about(overloaded.problem_type("about:blank")), expected(503, "about:blank", "Service Unavailable"));
    assert_eq!(about(base().problem_type("about:blank")), expected(429, "about:blank", "Too Many Requests"));
    assert_eq!(about(Refusals::json().problem_type("urn:x").title("Halt")), expected(429, "urn:x", "Halt"));
    assert_eq!(http(&Refusals::json(), &limited).headers()[CONTENT_TYPE], "application/json");
    assert_eq!(http(&Refusals::text().title("Halt"), &limited).body(), "Halt: default\n");
}

#[test]
fn a_missing_key_is_no_429() {
    let missing = outcome(OutcomeKind::KeyMissing, Vec::new());
    let response = http(&Refusals::default().status(StatusCode::FORBIDDEN), &missing);
    assert_eq!(response.status(), 400);
    let problem = problem(&response);
    assert_eq!((&problem["type"], &problem["title"]), (&json!("about:blank"), &json!("Bad Request")));
    assert_eq!(problem["status"], 400);
    let detail = problem["detail"].as_str().unwrap();
    assert!(detail.contains("such as an API key"), "{detail}");
    assert!(problem.get("violated-policies").is_none());
    assert!(!response.headers().contains_key("retry-after"));

    let response = grpc(&Refusals::default(), &missing);
    assert_eq!(text(response.headers(), "grpc-status"), Some("3"));
    let status = tonic::Status::from_header_map(response.headers()).unwrap();
    assert_eq!(status.message(), detail);
    assert!(!response.headers().contains_key("grpc-retry-pushback-ms"));
}

#[test]
fn a_failed_limiter_is_a_503_and_never_a_429() {
    // Even if a policy stood before it failed.
    let policies = vec![(hundred(), ChargeDecision::denied(100, 0, Wait::Never))];
    let failed = outcome(OutcomeKind::FailedClosed, policies);
    for refusals in [Refusals::problem_json(), Refusals::json(), Refusals::text()] {
        let response = http(&refusals.status(StatusCode::TOO_MANY_REQUESTS), &failed);
        assert_eq!(response.status(), 503);
        assert!(std::str::from_utf8(response.body()).unwrap().contains("Service Unavailable"));
    }
    let response = grpc(&Refusals::default(), &failed);
    assert_eq!(text(response.headers(), "grpc-status"), Some("14"));
    let pushback: u64 = text(response.headers(), "grpc-retry-pushback-ms").unwrap().parse().unwrap();
    assert!((1_000..=5_000).contains(&pushback), "-1 would forbid to come back: {pushback}");
    assert!(!response.headers().contains_key("grpc-status-details-bin"));
}

#[test]
fn grpc_refusal_has_details_that_tonic_reads() {
    let response = grpc(&Refusals::default(), &limited(Wait::After(Duration::from_millis(600))));
    assert_eq!(response.status(), 200);
    assert!(response.body().is_empty());
    let headers = response.headers();
    assert_eq!(text(headers, "content-type"), Some("application/grpc"));
    assert_eq!(text(headers, "grpc-status"), Some("8"));
    assert_eq!(text(headers, "grpc-message"), Some("rate limit exceeded"));
    assert_eq!(headers.get_all("grpc-retry-pushback-ms").iter().collect::<Vec<_>>(), ["600"]);
    assert_eq!(text(headers, "retry-after"), Some("1"));
    assert_eq!(text(headers, "ratelimit"), Some("\"default\";r=0;t=1"));

    let status = tonic::Status::from_header_map(headers).unwrap();
    assert_eq!((status.code(), status.message()), (tonic::Code::ResourceExhausted, "rate limit exceeded"));
    assert_eq!(status.metadata().get("ratelimit").unwrap(), "\"default\";r=0;t=1");
    let details = status.get_error_details();
    assert_eq!(details.retry_info().unwrap().retry_delay, Some(Duration::from_millis(600)));
    let violation = &details.quota_failure().unwrap().violations[0];
    assert_eq!(violation.subject, "policy:default");
    assert_eq!(violation.description, "100 requests per 60 s exceeded");
}

#[test]
fn grpc_refusal_for_an_unknown_time_names_no_time() {
    let response = grpc(&Refusals::default(), &limited(Wait::Unknown));
    let headers = response.headers();
    assert!(!headers.contains_key("grpc-retry-pushback-ms") && !headers.contains_key("retry-after"));
    let details = tonic::Status::from_header_map(headers).unwrap().get_error_details();
    assert!(details.retry_info().is_none() && details.quota_failure().is_some());
}

#[test]
fn grpc_refusal_for_good_forbids_retries() {
    let response = grpc(&Refusals::default(), &limited(Wait::Never));
    let headers = response.headers();
    assert_eq!(headers.get_all("grpc-retry-pushback-ms").iter().collect::<Vec<_>>(), ["-1"]);
    assert!(!headers.contains_key("retry-after"));
    let details = tonic::Status::from_header_map(headers).unwrap().get_error_details();
    assert!(details.retry_info().is_none() && details.quota_failure().is_some());
}

#[test]
fn grpc_status_can_be_changed() {
    let limited = limited(Wait::After(secs(5)));
    let bare = Refusals::text().grpc_status(GrpcCode::Unavailable).grpc_details(false).grpc_pushback(false);
    let response = grpc(&bare, &limited);
    assert_eq!(text(response.headers(), "grpc-status"), Some("14"));
    for absent in ["grpc-status-details-bin", "grpc-retry-pushback-ms"] {
        assert!(!response.headers().contains_key(absent));
    }
    assert_eq!(grpc(&Refusals::default().grpc(false), &limited).status(), 429);
}

#[test]
fn a_web_client_gets_its_own_content_type_and_no_body() {
    for (asked, answered) in [
        ("application/grpc-web+proto", "application/grpc-web+proto"),
        ("application/grpc-web-text", "application/grpc-web-text+proto"),
    ] {
        let response = respond(&Refusals::default(), asked, &limited(Wait::After(secs(5))));
        assert_eq!((response.status().as_u16(), response.body().len()), (200, 0));
        assert_eq!(text(response.headers(), "content-type"), Some(answered));
        assert_eq!(text(response.headers(), "grpc-status"), Some("8"));
    }
}

#[test]
fn responder_answers_grpc_only_if_it_is_set_to() {
    let respond = |refusal: &Refusal<'_>| {
        let wait = refusal.retry_after_seconds();
        let body = format!("{:?} {:?} {wait:?}", refusal.protocol(), refusal.outcome().kind());
        let mut response = Response::new(body);
        *response.status_mut() = StatusCode::IM_A_TEAPOT;
        response
    };
    let limited = limited(Wait::After(Duration::from_millis(4_001)));
    let response = http(&Refusals::with(respond), &limited);
    assert_eq!(response.status(), 418);
    assert_eq!(response.body(), "Http Limited Some(5)");
    assert_eq!(text(response.headers(), "cache-control"), Some("no-store"));
    assert_eq!(text(response.headers(), "retry-after"), Some("5"), "what the body says");
    assert_eq!(text(grpc(&Refusals::with(respond), &limited).headers(), "grpc-status"), Some("8"));
    assert_eq!(grpc(&Refusals::with_all(respond), &limited).body(), "Grpc Limited Some(5)");
    assert_eq!(http(&Refusals::with_all(respond), &limited).body(), "Http Limited Some(5)");
}

#[test]
fn ones_own_responder_can_start_from_the_default() {
    let refusals = Refusals::with_all(|refusal| {
        let mut response = refusal.default_response();
        response.headers_mut().insert("x-own", "1".parse().unwrap());
        response.headers_mut().insert(CACHE_CONTROL, "private".parse().unwrap());
        response
    });
    let refusals = refusals.status(StatusCode::SERVICE_UNAVAILABLE).grpc_status(GrpcCode::Unavailable);
    let response = http(&refusals, &limited(Wait::After(secs(5))));
    assert_eq!((response.status().as_u16(), text(response.headers(), "x-own")), (503, Some("1")));
    assert_eq!(text(response.headers(), "cache-control"), Some("no-store"), "no cache may store it");
    let response = grpc(&refusals, &limited(Wait::After(secs(5))));
    assert_eq!((text(response.headers(), "grpc-status"), text(response.headers(), "x-own")), (Some("14"), Some("1")));
}

#[test]
fn debugging_a_refusal_shows_no_headers_of_the_request() {
    let request = Request::builder().header("authorization", "Bearer secret").body(()).unwrap();
    let (parts, ()) = request.into_parts();
    let outcome = limited(Wait::Never);
    assert!(!format!("{:?}", unprepared().refusal(&Head::from(&parts), &outcome, Wait::None)).contains("secret"));
}

/// The wait in the headers is that of responders and of gRPC, too.
#[test]
fn the_cap_and_the_jitter_hold_in_every_protocol() {
    let headers = PreparedHeaders::new(&Headers::default().max_reported_wait(secs(30)), &[], None);
    assert_eq!(headers.reported_wait(&limited(Wait::After(secs(31))), 0), Wait::After(secs(30)));
    assert_eq!(headers.reported_wait(&limited(Wait::Never), 0), Wait::Never);
    let headers = PreparedHeaders::new(&Headers::default().jitter(Jitter::percent(50)), &[], None);
    for seed in 0..20 {
        let told = headers.reported_wait(&limited(Wait::After(secs(100))), seed);
        assert!(told >= Wait::After(secs(100)) && told <= Wait::After(secs(150)), "{told:?}");
        let outcome = limited(Wait::After(secs(100)));
        let status = &outcome.policies()[0];
        let view = PolicyView {
            index: 0,
            policy: status.policy(),
            key: Some(&KEY),
            decision: status.decision(),
            refuses: true,
        };
        let mut map = HeaderMap::new();
        let mut rendered = headers.render(&[view], Some(seed)).unwrap();
        headers.add(&mut rendered, &mut map, StatusCode::TOO_MANY_REQUESTS);
        let parts = parts("");
        let prepared = unprepared();
        let head = Head::from(&parts);
        let refusal = prepared.refusal(&head, &outcome, told);
        assert_eq!(text(&map, "retry-after").unwrap().parse().ok(), refusal.retry_after_seconds());
    }
}

// Bytes of the details.

fn details(outcome: &Outcome, wait: Wait) -> String {
    let parts = parts("application/grpc");
    let response = unprepared().respond(&Head::from(&parts), outcome, wait);
    text(response.headers(), "grpc-status-details-bin").unwrap().to_owned()
}

#[test]
fn the_details_are_these_bytes() {
    let nobody = outcome(OutcomeKind::Limited, Vec::new());
    assert_eq!(
        details(&nobody, Wait::After(secs(5))),
        "CAgSE3JhdGUgbGltaXQgZXhjZWVkZWQaMAoodHlwZS5nb29nbGVhcGlzLmNvbS9nb29nbGUucnBjLlJldHJ5SW5mbxIECgIIBQ"
    );
    assert_eq!(
        details(&nobody, Wait::After(Duration::from_millis(1_500))),
        "CAgSE3JhdGUgbGltaXQgZXhjZWVkZWQaNgoodHlwZS5nb29nbGVhcGlzLmNvbS9nb29nbGUucnBjLlJldHJ5SW5mbxIKCggIARCAyrXuAQ"
    );
    assert_eq!(
        details(&limited(Wait::After(secs(5))), Wait::After(secs(5))),
        "CAgSE3JhdGUgbGltaXQgZXhjZWVkZWQaMAoodHlwZS5nb29nbGVhcGlzLmNvbS9nb29nbGUucnBjLlJldHJ5SW5mbxIECgIIBRphCit0eXBlLm\
         dvb2dsZWFwaXMuY29tL2dvb2dsZS5ycGMuUXVvdGFGYWlsdXJlEjIKMAoOcG9saWN5OmRlZmF1bHQSHjEwMCByZXF1ZXN0cyBwZXIgNjAgcyBle\
         GNlZWRlZA"
    );
}

#[test]
fn the_details_name_the_quotas_unit() {
    let bytes = hundred().in_unit("content-bytes").unwrap();
    let limited = outcome(OutcomeKind::Limited, vec![(bytes, ChargeDecision::denied(100, 0, Wait::Never))]);
    let status = tonic::Status::from_header_map(grpc(&Refusals::default(), &limited).headers()).unwrap();
    let failure = status.get_error_details().quota_failure().unwrap().clone();
    assert_eq!(failure.violations[0].description, "100 content-bytes per 60 s exceeded");
}

#[test]
fn the_details_of_many_policies_stay_below_what_clients_take() {
    let name = |n: usize| format!("{n:03}{}", "x".repeat(125));
    let status =
        |n| (Policy::new(name(n), Quota::per_day(100)).unwrap(), ChargeDecision::denied(100, 0, Wait::After(secs(1))));
    let many = outcome(OutcomeKind::Limited, (0..200).map(status).collect());
    assert!(details(&many, Wait::After(secs(1))).len() < 6_000);
}

fn any_name() -> impl Strategy<Value = String> {
    let awkward = prop_oneof![Just(b'"'), Just(b'\\'), Just(b'%'), Just(b'<'), 0x20_u8..0x7f];
    proptest::collection::vec(awkward, 1..20).prop_map(|bytes| bytes.into_iter().map(char::from).collect())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_problem_parses_whatever_the_policies_are_called(
        names in proptest::collection::btree_set(any_name(), 0..4),
        kind in "\\PC{0,8}|[\\x00-\\x7f]{0,8}",
    ) {
        let status = |name: &String| {
            (Policy::new(name.clone(), Quota::per_day(100)).unwrap(), ChargeDecision::denied(100, 0, Wait::Never))
        };
        let outcome = outcome(OutcomeKind::Limited, names.iter().map(status).collect());
        let response = http(&Refusals::problem_json().problem_type(kind.clone()).title(kind.clone()), &outcome);
        let problem = problem(&response);
        prop_assert_eq!(&problem["violated-policies"], &json!(names));
        prop_assert_eq!(&problem["type"], &json!(kind));
        prop_assert_eq!(&problem["title"], &json!(kind));
    }

    #[test]
    fn details_decode_to_what_was_meant(
        rules in proptest::collection::btree_map(any_name(), 1_u64..1_000_000, 0..20),
        seconds in 0_u64..1 << 40,
        nanos in 0_u32..1_000_000_000,
    ) {
        let wait = Duration::new(seconds, nanos);
        let status = |(name, limit): &(String, u64)| {
            (Policy::new(name.clone(), Quota::per_second(*limit)).unwrap(), ChargeDecision::denied(1, 0, Wait::After(wait)))
        };
        let rules = Vec::from_iter(rules);
        let outcome = outcome(OutcomeKind::Limited, rules.iter().map(status).collect());
        let bytes = STANDARD_NO_PAD.decode(details(&outcome, Wait::After(wait))).unwrap();
        let status = tonic_types::pb::Status::decode(bytes.as_slice()).unwrap();
        prop_assert_eq!((status.code, status.message.as_str()), (8, "rate limit exceeded"));
        let find = |name: &str| status.details.iter().find(|any| any.type_url == format!("type.googleapis.com/google.rpc.{name}"));
        let retry: RetryInfo = tonic_types::pb::RetryInfo::decode(find("RetryInfo").unwrap().value.as_slice()).unwrap().into();
        prop_assert_eq!(retry.retry_delay, Some(wait));
        let violations = match find("QuotaFailure") {
            Some(any) => QuotaFailure::from(tonic_types::pb::QuotaFailure::decode(any.value.as_slice()).unwrap()).violations,
            None => Vec::new(),
        };
        prop_assert_eq!(violations.len(), rules.len().min(16));
        for (violation, (name, limit)) in violations.iter().zip(&rules) {
            prop_assert_eq!(&violation.subject, &format!("policy:{name}"));
            prop_assert_eq!(&violation.description, &format!("{limit} requests per 1 s exceeded"));
        }
    }
}
