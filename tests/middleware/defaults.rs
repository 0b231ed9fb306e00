//! Each default of the layer is the choice that an attacker does not like.
//!
//! The documentation of `tower_ratelimit::middleware` has the table, under "Defaults". `ROWS` names
//! the test of each of its rows.

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::Body;
use http::{HeaderName, Request, Response, StatusCode, header};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_ratelimit::key::{self, PeerAddr, Prefixes, TrustedProxies};
use tower_ratelimit::{
    Headers, MemoryLimiter, Mode, Quota, RateLimitLayer, Rule,
    clock::TokioTimer,
    limiter::Limiter,
    middleware::{Access, AccessList, Usage},
    observe::Outcome,
};

use crate::support::Scripted;

/// The first cell of each row of the table, and the name of its test.
const ROWS: [(&str, &str); 17] = [
    ("a request over its quota", "request_over_its_quota_is_refused"),
    ("a request without a key", "request_without_a_key_is_refused"),
    ("the limiter fails", "request_is_refused_when_the_limiter_fails"),
    ("an inner layer refuses", "inner_refusal_stays_charged_to_the_outer_layer"),
    ("a request is aborted", "aborted_request_stays_charged"),
    ("the cost is settled later", "cost_above_a_reservation_of_zero_becomes_debt"),
    ("requests wait in queues and in line", "waiting_requests_are_at_most_a_thousand"),
    ("requests of one key wait in line", "requests_in_line_for_a_key_are_at_most_a_hundred"),
    ("a request is refused while its body is sent", "refused_upload_is_read_within_two_bounds"),
    ("a request says who it is from", "forwarding_headers_are_not_believed"),
    ("an IPv6 address", "ipv6_addresses_of_one_subscriber_share_a_key"),
    ("an access list, and an unknown address", "unknown_address_is_on_no_list"),
    ("a CORS preflight request", "preflight_request_is_charged"),
    ("a refusal, and a cache", "refusal_is_stored_by_no_cache"),
    (
        "a response in place of the usual one ([degraded](crate::Mode::Degrade), or from an overflow), and a cache",
        "response_in_place_of_another_is_stored_by_no_cache",
    ),
    ("a refusal, and gRPC", "request_that_is_no_call_gets_no_grpc_refusal"),
    ("the extensions of a response", "response_carries_no_outcome"),
];

#[test]
fn table_of_defaults_has_a_test_for_each_row() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/middleware/mod.rs");
    let docs = std::fs::read_to_string(path).expect("the source is there");
    let table = docs.split("//! # Defaults").nth(1).expect("the section is there");
    let rows: Vec<&str> = table
        .lines()
        .skip_while(|line| !line.starts_with("//! |---"))
        .skip(1)
        .map_while(|line| line.strip_prefix("//! | ")?.split(" | ").next())
        .collect();
    assert_eq!(rows, ROWS.map(|(row, _)| row));
    let tests = include_str!("defaults.rs");
    for (row, test) in ROWS {
        assert!(tests.contains(&format!("fn {test}()")), "{row} has no test");
    }
}

fn memory() -> MemoryLimiter {
    MemoryLimiter::builder().max_keys(1_000).build().unwrap()
}

fn one_per_hour(name: &str) -> Rule {
    Rule::new(name, Quota::per_hour(1)).unwrap()
}

fn from(peer: &str) -> Request<Body> {
    let peer: IpAddr = peer.parse().unwrap();
    let mut request = Request::new(Body::default());
    request.extensions_mut().insert(PeerAddr::from(SocketAddr::new(peer, 40_000)));
    request
}

fn with(mut request: Request<Body>, headers: &[(&'static str, &'static str)]) -> Request<Body> {
    for (name, value) in headers {
        request.headers_mut().append(HeaderName::from_static(name), value.parse().unwrap());
    }
    request
}

async fn served(_: Request<Body>) -> Result<Response<Body>, Infallible> {
    Ok(Response::new(Body::default()))
}

/// Returns the statuses of these requests, sent in turn.
async fn statuses<L: Limiter + Clone>(
    layer: &RateLimitLayer<L>,
    requests: impl IntoIterator<Item = Request<Body>>,
) -> Vec<u16> {
    let service = layer.layer(service_fn(served));
    let mut statuses = Vec::new();
    for request in requests {
        let response = service.clone().oneshot(request).await.expect("it answers");
        statuses.push(response.status().as_u16());
    }
    statuses
}

#[tokio::test]
async fn request_over_its_quota_is_refused() {
    let layer = RateLimitLayer::new(memory(), one_per_hour("client"), key::global());
    assert_eq!(statuses(&layer, [from("192.0.2.1"), from("192.0.2.2")]).await, [200, 429]);
}

#[tokio::test]
async fn request_without_a_key_is_refused() {
    let layer = RateLimitLayer::new(memory(), one_per_hour("client"), key::header("x-api-key"));
    assert_eq!(statuses(&layer, [from("192.0.2.1")]).await, [400]);
}

#[tokio::test]
async fn request_is_refused_when_the_limiter_fails() {
    let limiter = Scripted::new();
    limiter.fail(true);
    let layer = RateLimitLayer::new(limiter, one_per_hour("client"), key::global());
    assert_eq!(statuses(&layer, [from("192.0.2.1")]).await, [503]);
}

#[tokio::test]
async fn refusal_of_a_failed_limiter_says_when_to_come_back() {
    let limiter = Scripted::new();
    limiter.fail(true);
    let layer = RateLimitLayer::new(limiter, one_per_hour("client"), key::peer_ip());
    let wait = async |layer: &RateLimitLayer<Scripted>, address: &str| {
        let response = layer.layer(service_fn(served)).oneshot(from(address)).await.unwrap();
        assert_eq!(response.status(), 503);
        response.headers().get("retry-after").map(|wait| wait.to_str().unwrap().parse::<u64>().unwrap())
    };
    let mut waits = std::collections::BTreeSet::new();
    for n in 0..100 {
        let address = format!("192.0.2.{n}");
        let first = wait(&layer, &address).await.unwrap();
        assert_eq!(wait(&layer, &address).await, Some(first), "a retry gets the same wait");
        waits.insert(first);
    }
    assert!(waits.len() > 2 && waits.iter().all(|wait| (1..=5).contains(wait)), "{waits:?}");
    let silent = layer.clone().headers(Headers::none());
    assert_eq!(wait(&silent, "192.0.2.1").await, None);
}

#[tokio::test]
async fn inner_refusal_stays_charged_to_the_outer_layer() {
    let checks = Arc::new(AtomicUsize::new(0));
    let outer = RateLimitLayer::new(memory(), Rule::new("outer", Quota::per_hour(10)).unwrap(), key::peer_ip());
    let inner = RateLimitLayer::new(memory(), one_per_hour("inner"), key::global());
    let counted = Arc::clone(&checks);
    let within = inner.layer(service_fn(served));
    let check = service_fn(move |request: Request<Body>| {
        counted.fetch_add(1, Ordering::Relaxed);
        within.clone().oneshot(request)
    });
    let service = outer.layer(check);
    for _ in 0..100 {
        let _ = service.clone().oneshot(from("192.0.2.1")).await;
    }
    assert_eq!(checks.load(Ordering::Relaxed), 10, "the outer limit bounds what runs behind it");
}

#[tokio::test]
async fn aborted_request_stays_charged() {
    let rule = one_per_hour("client").settle_by_usage();
    let layer = RateLimitLayer::new(memory(), rule, key::global());
    let mut service =
        layer.layer(service_fn(|_: Request<Body>| std::future::pending::<Result<Response<Body>, Infallible>>()));
    let mut begun = Box::pin(service.ready().await.unwrap().call(from("192.0.2.1")));
    let polled = std::future::poll_fn(|cx| std::task::Poll::Ready(begun.as_mut().poll(cx).is_pending())).await;
    assert!(polled, "the handler has begun");
    drop(begun);
    assert_eq!(statuses(&layer, [from("192.0.2.1")]).await, [429]);
}

#[tokio::test]
async fn cost_above_a_reservation_of_zero_becomes_debt() {
    let rule = one_per_hour("client").cost(|_| 0).settle_by_usage();
    let layer = RateLimitLayer::new(memory(), rule, key::global());
    let service = layer.layer(service_fn(|request: Request<Body>| async move {
        request.extensions().get::<Usage>().expect("the rule is settled by it").set(5);
        Ok::<_, Infallible>(Response::new(Body::default()))
    }));
    let first = service.clone().oneshot(from("192.0.2.1")).await.unwrap();
    assert_eq!(first.status(), 200);
    drop(first);
    assert_eq!(service.oneshot(from("192.0.2.1")).await.unwrap().status(), 429, "it is in debt");
}

#[tokio::test]
async fn forwarding_headers_are_not_believed() {
    let layer = RateLimitLayer::new(memory(), one_per_hour("client"), key::peer_ip());
    let forwarded = [
        with(from("192.0.2.1"), &[]),
        with(from("192.0.2.1"), &[("x-forwarded-for", "203.0.113.1")]),
        with(from("192.0.2.1"), &[("forwarded", "for=203.0.113.2")]),
        with(from("192.0.2.1"), &[("x-real-ip", "203.0.113.3")]),
        with(from("192.0.2.1"), &[("cf-connecting-ip", "203.0.113.4")]),
    ];
    assert_eq!(statuses(&layer, forwarded).await, [200, 429, 429, 429, 429]);
}

#[tokio::test]
async fn ipv6_addresses_of_one_subscriber_share_a_key() {
    let layer = RateLimitLayer::new(memory(), one_per_hour("client"), key::peer_ip());
    let subscribers = [from("2001:db8::1"), from("2001:db8::ffff:1"), from("2001:db8:0:1::1")];
    assert_eq!(statuses(&layer, subscribers).await, [200, 429, 200]);
}

#[tokio::test]
async fn unknown_address_is_on_no_list() {
    let list = AccessList::new();
    list.set("10.0.0.0/8", Access::Allow).unwrap();
    let proxies = || TrustedProxies::count(1).unwrap();
    let layer = RateLimitLayer::new(memory(), one_per_hour("client"), key::client_ip(proxies()))
        .access(&list, key::client_network(proxies(), Prefixes::exact()));
    for name in ["x-forwarded-for", "forwarded"] {
        for value in ["for=\"", "\"", ",,", "for=unknown", "not an address", ""] {
            let request = || with(from("10.0.0.1"), &[(name, value)]);
            let got = statuses(&layer, [request(), request(), request()]).await;
            assert!(got.iter().skip(1).all(|status| *status != 200), "{name}: {value:?}: {got:?}");
        }
    }
}

#[tokio::test]
async fn preflight_request_is_charged() {
    let layer = RateLimitLayer::new(memory(), one_per_hour("client"), key::peer_ip());
    let request = || {
        let mut request =
            with(from("192.0.2.1"), &[("origin", "https://example.com"), ("access-control-request-method", "GET")]);
        *request.method_mut() = http::Method::OPTIONS;
        request
    };
    assert_eq!(statuses(&layer, [request(), request()]).await, [200, 429]);
}

#[tokio::test]
async fn refusal_is_stored_by_no_cache() {
    let layer = RateLimitLayer::new(memory(), one_per_hour("client"), key::peer_ip());
    let service = layer.layer(service_fn(served));
    let _ = service.clone().oneshot(from("192.0.2.1")).await;
    let refused = service.oneshot(from("192.0.2.1")).await.unwrap();
    assert_eq!(refused.headers()[header::CACHE_CONTROL], "no-store");
}

#[tokio::test]
async fn response_in_place_of_another_is_stored_by_no_cache() {
    let policy = one_per_hour("client");
    let degrading = RateLimitLayer::new(memory(), policy.clone().mode(Mode::Degrade), key::peer_ip());
    let overflowing = RateLimitLayer::new(memory(), policy, key::peer_ip()).overflow(service_fn(served));
    for request in 0..2 {
        let answers = [
            degrading.layer(service_fn(served)).oneshot(from("192.0.2.1")).await.unwrap(),
            overflowing.layer(service_fn(served)).oneshot(from("192.0.2.1")).await.unwrap(),
        ];
        for answer in answers {
            let told = answer.headers().get(header::CACHE_CONTROL).map(|value| value.as_bytes());
            assert_eq!((answer.status(), told), (StatusCode::OK, (request > 0).then_some(&b"no-store"[..])));
        }
    }
}

#[tokio::test]
async fn request_that_is_no_call_gets_no_grpc_refusal() {
    let layer = RateLimitLayer::new(memory(), one_per_hour("client"), key::peer_ip());
    let get = || with(from("192.0.2.1"), &[("content-type", "application/grpc"), ("te", "trailers")]);
    assert_eq!(statuses(&layer, [get(), get()]).await, [200, 429]);
}

#[tokio::test(start_paused = true)]
async fn waiting_requests_are_at_most_a_thousand() {
    let queue = Quota::leaky_queue(1, Duration::from_secs(60)).unwrap().queue(5).unwrap();
    let layer = RateLimitLayer::new(memory(), Rule::new("queue", queue).unwrap(), key::peer_ip());
    let layer = layer.timer(TokioTimer::new());
    let service = layer.layer(service_fn(served));
    let mut waiting = Vec::new();
    // Each client has its own queue, in which a second request waits.
    for client in 0..1_001_u32 {
        let address = std::net::Ipv4Addr::from(client).to_string();
        let response = service.clone().oneshot(from(&address)).await.expect("it answers");
        assert_eq!(response.status(), StatusCode::OK);
        let mut second = Box::pin(service.clone().oneshot(from(&address)));
        match at_once(&mut second).await {
            None => waiting.push(second),
            Some(response) => assert_eq!((client, response.status().as_u16()), (1_000, 429)),
        }
    }
    assert_eq!((waiting.len(), layer.waiting()), (1_000, 1_000));
}

#[tokio::test(start_paused = true)]
async fn requests_in_line_for_a_key_are_at_most_a_hundred() {
    let quota = Quota::concurrent(1).max_wait(Duration::from_secs(60)).unwrap();
    let layer = RateLimitLayer::new(memory(), Rule::new("exports", quota).unwrap(), key::peer_ip());
    let layer = layer.timer(TokioTimer::new());
    let service = layer.layer(service_fn(async |_: Request<Body>| {
        std::future::pending::<()>().await;
        Ok::<_, Infallible>(Response::new(Body::default()))
    }));
    let mut begun = Vec::new();
    for client in ["192.0.2.1", "192.0.2.2"] {
        for request in 0..102 {
            let mut answer = Box::pin(service.clone().oneshot(from(client)));
            match at_once(&mut answer).await {
                None => begun.push(answer),
                Some(response) => assert_eq!((request, response.status().as_u16()), (101, 429)),
            }
        }
    }
    assert_eq!((begun.len(), layer.waiting()), (202, 200));
}

#[tokio::test(start_paused = true)]
async fn refused_upload_is_read_within_two_bounds() {
    let layer = RateLimitLayer::new(memory(), Quota::per_hour(1), key::header("x-never"));
    let read = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&read);
    let endless = tokio_stream::iter(std::iter::repeat_with(move || {
        count.fetch_add(1, Ordering::Relaxed);
        Ok::<_, Infallible>(vec![0; 4_096])
    }));
    let silent = tokio_stream::pending::<Result<Vec<u8>, Infallible>>();
    let began = tokio::time::Instant::now();
    assert_eq!(statuses(&layer, [Request::new(Body::from_stream(endless))]).await, [400]);
    assert_eq!((read.load(Ordering::Relaxed), began.elapsed()), ((2 << 20) / 4_096, Duration::ZERO));
    assert_eq!(statuses(&layer, [Request::new(Body::from_stream(silent))]).await, [400]);
    let took = began.elapsed();
    assert!(took >= Duration::from_secs(2) && took < Duration::from_millis(2_010), "{took:?}");
}

/// Returns the response if it is ready at once.
async fn at_once<T>(response: &mut (impl Future<Output = Result<T, Infallible>> + Unpin)) -> Option<T> {
    let polled = std::future::poll_fn(|cx| std::task::Poll::Ready(std::pin::Pin::new(&mut *response).poll(cx)));
    match polled.await {
        std::task::Poll::Ready(Ok(response)) => Some(response),
        std::task::Poll::Pending => None,
    }
}

#[tokio::test]
async fn response_carries_no_outcome() {
    let layer = RateLimitLayer::new(memory(), one_per_hour("client"), key::peer_ip());
    let response = layer.layer(service_fn(served)).oneshot(from("192.0.2.1")).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    assert!(response.extensions().get::<Outcome>().is_none());
}
