//! Families of headers, as clients get them: several in one layer, and those of nested layers.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::response::IntoResponse;
use http::{Request, Response, StatusCode};
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};
use tower_ratelimit::{
    Headers, MemoryLimiter, Quota, RateLimitLayer, Rule,
    clock::ManualClock,
    key,
    middleware::{LegacyHeaders, When},
};

use crate::support::memory;

fn rule(name: &str, limit: u64) -> Rule {
    Rule::new(name, Quota::new(limit, Duration::from_secs(3_600)).unwrap()).unwrap()
}

fn layer(rule: Rule) -> RateLimitLayer<MemoryLimiter> {
    RateLimitLayer::new(memory(&ManualClock::new()), rule, key::global())
}

/// Returns headers for one policy, with its name at the end.
fn family(policy: &str) -> Headers {
    let names = LegacyHeaders::new().limit(format!("x-ratelimit-limit-{policy}"));
    let names = names.remaining(format!("x-ratelimit-remaining-{policy}")).used(format!("x-ratelimit-used-{policy}"));
    Headers::legacy(names).unwrap().for_policy(policy)
}

/// Sends a request. Returns the status, and the headers about limits as `name: value`.
async fn send<S, B>(service: S) -> (StatusCode, Vec<String>)
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible>,
{
    let (head, _) = service.oneshot(Request::new(Body::empty())).await.unwrap().into_parts();
    let is_own =
        |name: &http::HeaderName| !["content-type", "content-length", "cache-control"].contains(&name.as_str());
    let own = head.headers.iter().filter(|(name, _)| is_own(name));
    let mut lines: Vec<String> = own.map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect();
    lines.sort();
    (head.status, lines)
}

async fn handler(_: Request<Body>) -> Result<Response<Body>, Infallible> {
    Ok(Response::new(Body::empty()))
}

#[tokio::test]
async fn layer_names_the_headers_that_it_sends() {
    for headers in [Headers::default(), Headers::draft_06().and(family("a")), Headers::openai(), Headers::none()] {
        let layer = layer(rule("a", 1)).headers(headers);
        let names = layer.header_names();
        let service =
            layer.layer(service_fn(|_: Request<Body>| async { Ok::<_, Infallible>(Response::new(Body::empty())) }));
        for expected in [StatusCode::OK, StatusCode::TOO_MANY_REQUESTS] {
            let (status, sent) = send(service.clone()).await;
            assert_eq!(status, expected);
            let named = |line: &String| names.iter().any(|name| line.starts_with(&format!("{name}: ")));
            assert!(sent.iter().all(named), "{sent:?}, {names:?}");
        }
    }
}

#[tokio::test]
async fn families_of_one_layer_and_of_nested_layers_are_equal() {
    let expected = |requests: [&str; 3], tokens: [&str; 3]| {
        let lines = |name: &str, [limit, left, used]: [&str; 3]| {
            [("limit", limit), ("remaining", left), ("used", used)]
                .map(|(word, value)| format!("x-ratelimit-{word}-{name}: {value}"))
        };
        let mut lines = [lines("requests", requests), lines("tokens", tokens)].concat();
        lines.sort();
        lines
    };
    let (requests, tokens) = (|| rule("requests", 5), || rule("tokens", 100).cost(|_| 60));
    let one = layer(requests()).and(tokens(), key::global()).headers(family("requests").and(family("tokens")));
    let one = one.layer(service_fn(handler));
    assert_eq!(send(one.clone()).await, (StatusCode::OK, expected(["5", "4", "1"], ["100", "40", "60"])));
    // A refusal is charged to neither policy.
    let mut refused = expected(["5", "4", "1"], ["100", "0", "100"]);
    refused.insert(0, "retry-after: 720".to_owned());
    assert_eq!(send(one).await, (StatusCode::TOO_MANY_REQUESTS, refused));

    for (inner, outer) in [(requests(), tokens()), (tokens(), requests())] {
        let [inner, outer] = [inner, outer].map(|rule| {
            let name = rule.policies()[0].name().to_owned();
            layer(rule).headers(family(&name))
        });
        let nested = ServiceBuilder::new().layer(outer).layer(inner).service(service_fn(handler));
        assert_eq!(send(nested).await, (StatusCode::OK, expected(["5", "4", "1"], ["100", "40", "60"])));
    }
}

#[tokio::test]
async fn family_of_a_handler_is_kept_beside_the_layers() {
    let handler = service_fn(|_: Request<Body>| async {
        let response =
            Response::builder().header("x-ratelimit-limit-images", "7").header("x-ratelimit-used-requests", "9");
        Ok::<_, Infallible>(response.body(Body::empty()).unwrap())
    });
    let (_, lines) = send(layer(rule("requests", 5)).headers(family("requests")).layer(handler)).await;
    let expected = ["limit-images: 7", "limit-requests: 5", "remaining-requests: 4", "used-requests: 1"];
    assert_eq!(lines, expected.map(|line| format!("x-ratelimit-{line}")));
}

/// A service with requests per hour around a handler that asks for tokens itself.
fn handler_that_asks(
    outer: Rule,
    inner: Rule,
) -> impl Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone {
    let inner = layer(inner).headers(Headers::openai());
    let handler = service_fn(move |request: Request<Body>| {
        let (inner, (head, _)) = (inner.clone(), request.into_parts());
        async move {
            Ok::<_, Infallible>(match inner.admit(&head).await {
                Ok(admission) => (admission.headers(), "text").into_response(),
                Err(refused) => refused.into_http().map(Body::new),
            })
        }
    });
    let outer = layer(outer).headers(Headers::openai());
    outer.layer(handler)
}

#[tokio::test]
async fn headers_of_an_admission_are_merged_with_the_layers() {
    let tokens = |limit| rule("tokens", limit).unit("tokens").unwrap().cost(|_| 60);
    let openai = |name: &str, [limit, left, reset]: [&str; 3]| {
        [("limit", limit), ("remaining", left), ("reset", reset)]
            .map(|(word, value)| format!("x-ratelimit-{word}-{name}: {value}"))
    };
    let sorted = |parts: &[&[String]]| {
        let mut lines = parts.concat();
        lines.sort();
        lines
    };
    let service = handler_that_asks(rule("requests", 5), tokens(100));
    let of_tokens = openai("tokens", ["100", "40", "36m0s"]);
    let expected = sorted(&[&openai("requests", ["5", "4", "12m0s"]), &of_tokens]);
    assert_eq!(send(service.clone()).await, (StatusCode::OK, expected));
    // The handler refuses, and the layer has charged the request.
    let of_tokens = openai("tokens", ["100", "0", "36m0s"]);
    let waits = ["retry-after: 720".to_owned(), "retry-after-ms: 720000".to_owned()];
    let expected = sorted(&[&openai("requests", ["5", "3", "24m0s"]), &of_tokens, &waits]);
    assert_eq!(send(service).await, (StatusCode::TOO_MANY_REQUESTS, expected));
    // One family of both: that of the tighter one.
    for (outer, inner) in [(300, 100), (100, 300)] {
        let service = handler_that_asks(tokens(outer), tokens(inner));
        assert_eq!(send(service).await, (StatusCode::OK, openai("tokens", ["100", "40", "36m0s"]).to_vec()));
    }
}

#[tokio::test]
async fn refusal_of_one_layer_takes_the_headers_of_another() {
    let requests = layer(rule("requests", 5)).headers(Headers::openai());
    let tokens = layer(rule("tokens", 0).unit("tokens").unwrap()).headers(Headers::openai());
    let (head, ()) = Request::new(()).into_parts();
    let admission = requests.admit(&head).await.unwrap();
    let mut response = tokens.admit(&head).await.unwrap_err().into_http();
    admission.add_headers(response.headers_mut());
    assert_eq!(response.headers()["x-ratelimit-remaining-requests"], "4");
    assert_eq!(response.headers()["x-ratelimit-remaining-tokens"], "0");
}

#[tokio::test]
async fn family_of_another_policy_is_not_sent() {
    for headers in [family("tokens"), family("tokens").send(When::OnRefusal)] {
        let service = layer(rule("requests", 1)).headers(headers).layer(service_fn(handler));
        assert_eq!(send(service.clone()).await, (StatusCode::OK, vec![]));
        let refused = vec!["retry-after: 3600".to_owned()];
        assert_eq!(send(service).await, (StatusCode::TOO_MANY_REQUESTS, refused));
    }
}

#[tokio::test]
async fn policy_that_does_not_apply_has_no_family() {
    let tokens = rule("tokens", 100).when(|request| request.headers.contains_key("tokens"));
    let service = layer(rule("requests", 5)).and(tokens, key::global());
    let service = service.headers(family("requests").and(family("tokens"))).layer(service_fn(handler));
    for used in 1..=5 {
        let left = 5 - used;
        let expected =
            ["limit-requests: 5".to_owned(), format!("remaining-requests: {left}"), format!("used-requests: {used}")];
        assert_eq!(send(service.clone()).await.1, expected.map(|line| format!("x-ratelimit-{line}")));
    }
}
