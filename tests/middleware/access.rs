//! Access lists are decided before anything is charged.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::net::IpAddr;

use axum::body::Body;
use http::{HeaderValue, Method, Request, Response, StatusCode, Version};
use http_body_util::BodyExt;
use tower::{Layer, ServiceBuilder, ServiceExt, service_fn};
use tower_ratelimit::key::{self, PeerAddr, Prefixes, TrustedProxies};
use tower_ratelimit::{
    MissingKey, Quota, RateLimitLayer, Rule,
    middleware::{Access, AccessList},
    observe::{Outcome, OutcomeKind},
};

use crate::support::Scripted;

fn answer(_: Request<Body>) -> Ready<Result<Response<Body>, Infallible>> {
    ready(Ok(Response::new(Body::default())))
}

fn from(address: &str) -> Request<Body> {
    let mut request = Request::new(Body::default());
    request.extensions_mut().insert(PeerAddr::from(address.parse::<IpAddr>().unwrap()));
    request
}

fn layer(limiter: &Scripted, list: &AccessList) -> RateLimitLayer<Scripted> {
    RateLimitLayer::new(limiter.clone(), Quota::per_hour(1), key::global())
        .access(list, key::peer_network(Prefixes::exact()))
}

async fn status(layer: &RateLimitLayer<Scripted>, request: Request<Body>) -> StatusCode {
    layer.layer(service_fn(answer)).oneshot(request).await.unwrap().status()
}

#[tokio::test]
async fn listed_client_is_not_charged() {
    let (limiter, list) = (Scripted::new(), AccessList::new());
    list.set_all(["10.0.0.0/8", "2001:db8:1::/48"], Access::Allow).unwrap();
    list.set_all(["203.0.113.0/24", "2001:db8:1:2::9"], Access::Deny).unwrap();
    let layer = layer(&limiter, &list);
    for _ in 0..3 {
        for allowed in ["10.1.2.3", "::ffff:10.1.2.3", "2001:db8:1:2::8"] {
            assert_eq!(status(&layer, from(allowed)).await, StatusCode::OK, "{allowed}");
        }
        for denied in ["203.0.113.9", "2001:db8:1:2::9"] {
            assert_eq!(status(&layer, from(denied)).await, StatusCode::FORBIDDEN, "{denied}");
        }
    }
    assert!(limiter.takes().is_empty());
    assert_eq!(status(&layer, from("8.8.8.8")).await, StatusCode::OK);
    assert_eq!(status(&layer, from("8.8.8.8")).await, StatusCode::TOO_MANY_REQUESTS);
    // A request without an address matches no list.
    assert_eq!(status(&layer, Request::new(Body::default())).await, StatusCode::TOO_MANY_REQUESTS);
}

/// An attacker tries to appear as the proxy, whose network is allowed, or to hide a denied address.
#[tokio::test]
async fn header_that_cannot_be_read_is_no_way_around_a_list() {
    let by_count = || TrustedProxies::count(1).unwrap();
    let by_network = || TrustedProxies::networks(["10.0.0.0/8"]).unwrap();
    let forged: [(TrustedProxies, &'static str, &[&'static str]); 8] = [
        (by_count().forwarded(), "forwarded", &["for=\""]),
        (by_network().forwarded(), "forwarded", &["for=\""]),
        (by_network().forwarded(), "forwarded", &["for=unknown"]),
        (by_count().single_header("x-real-ip").unwrap(), "x-real-ip", &["6.6.6.6", "203.0.113.9"]),
        (by_network().single_header("x-real-ip").unwrap(), "x-real-ip", &["6.6.6.6, 203.0.113.9"]),
        (by_network().single_header("x-real-ip").unwrap(), "x-real-ip", &[""]),
        (by_count(), "x-forwarded-for", &["203.0.113.9, \u{e9}"]),
        (by_network(), "x-forwarded-for", &["unknown, 10.0.0.6"]),
    ];
    for (proxies, name, lines) in forged {
        let (limiter, list) = (Scripted::new(), AccessList::new());
        list.set("10.0.0.0/8", Access::Allow).unwrap();
        let by_client = key::client_network(proxies.clone(), Prefixes::exact());
        let layer =
            RateLimitLayer::new(limiter.clone(), Quota::per_hour(1), key::client_ip(proxies)).access(&list, by_client);
        let request = || {
            let mut request = from("10.0.0.5");
            for line in lines {
                request.headers_mut().append(name, HeaderValue::from_bytes(line.as_bytes()).unwrap());
            }
            request
        };
        // All clients with such a header share one limit.
        assert_eq!(status(&layer, request()).await, StatusCode::OK, "{name}: {lines:?}");
        assert_eq!(status(&layer, request()).await, StatusCode::TOO_MANY_REQUESTS, "{name}: {lines:?}");
        // A request without the header has its own limit.
        assert_eq!(status(&layer, from("10.0.0.5")).await, StatusCode::OK, "{name}");
        assert_eq!(status(&layer, from("10.0.0.5")).await, StatusCode::TOO_MANY_REQUESTS, "{name}");
        // The client may be on the list of denied ones.
        list.set("198.51.100.0/24", Access::Deny).unwrap();
        assert_eq!(status(&layer, request()).await, StatusCode::FORBIDDEN, "{name}: {lines:?}");
        assert_eq!(status(&layer, from("10.0.0.5")).await, StatusCode::TOO_MANY_REQUESTS, "{name}");
        list.remove("198.51.100.0/24").unwrap();
        assert_eq!(status(&layer, request()).await, StatusCode::TOO_MANY_REQUESTS, "{name}: {lines:?}");
    }
}

#[tokio::test]
async fn value_that_comes_twice_is_no_way_around_a_rule_or_a_list() {
    let (limiter, list) = (Scripted::new(), AccessList::new());
    let rule = Rule::new("key", Quota::per_hour(2)).unwrap().missing_key(MissingKey::Exempt);
    let layer = RateLimitLayer::new(limiter, rule, key::header("x-api-key")).access(&list, key::header("x-api-key"));
    let twice = |values: [&'static str; 2]| {
        let mut request = from("192.0.2.1");
        for value in values {
            request.headers_mut().append("x-api-key", HeaderValue::from_static(value));
        }
        request
    };
    assert_eq!(status(&layer, twice(["a", "b"])).await, StatusCode::OK);
    assert_eq!(status(&layer, twice(["c", "d"])).await, StatusCode::OK);
    assert_eq!(status(&layer, twice(["a", "a"])).await, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(status(&layer, from("192.0.2.1")).await, StatusCode::OK);
    list.set_key("a", Access::Allow);
    assert_eq!(status(&layer, twice(["a", "b"])).await, StatusCode::TOO_MANY_REQUESTS);
    list.set_key("leaked", Access::Deny);
    assert_eq!(status(&layer, twice(["leaked", "b"])).await, StatusCode::FORBIDDEN);
    assert!(list.remove_key("leaked"));
    assert_eq!(status(&layer, twice(["leaked", "b"])).await, StatusCode::TOO_MANY_REQUESTS);
}

#[tokio::test]
async fn list_can_be_changed_while_services_run() {
    let (limiter, list) = (Scripted::new(), AccessList::new());
    let service = layer(&limiter, &list).layer(service_fn(answer));
    let status = async |address| service.clone().oneshot(from(address)).await.unwrap().status();
    assert_eq!(status("192.0.2.1").await, StatusCode::OK);
    list.set("192.0.2.0/24", Access::Deny).unwrap();
    assert_eq!(status("192.0.2.1").await, StatusCode::FORBIDDEN);
    list.set("192.0.2.1", Access::Limit).unwrap();
    assert_eq!(status("192.0.2.1").await, StatusCode::TOO_MANY_REQUESTS);
    list.set("192.0.2.0/24", Access::Allow).unwrap();
    list.remove("192.0.2.1").unwrap();
    assert_eq!(status("192.0.2.1").await, StatusCode::OK);
}

#[tokio::test]
async fn first_list_with_an_entry_decides() {
    let (limiter, keys, addresses) = (Scripted::new(), AccessList::new(), AccessList::new());
    keys.set_key("partner", Access::Allow);
    keys.set_key("leaked", Access::Deny);
    addresses.set("192.0.2.0/24", Access::Deny).unwrap();
    let layer = RateLimitLayer::new(limiter, Quota::per_hour(9), key::global())
        .access(&keys, key::header("x-api-key"))
        .access(&addresses, key::peer_network(Prefixes::exact()));
    for (name, address, expected) in [
        ("partner", "192.0.2.1", StatusCode::OK),
        ("leaked", "8.8.8.8", StatusCode::FORBIDDEN),
        ("another", "192.0.2.1", StatusCode::FORBIDDEN),
        ("another", "8.8.8.8", StatusCode::OK),
    ] {
        let mut request = from(address);
        request.headers_mut().insert("x-api-key", HeaderValue::from_static(name));
        assert_eq!(status(&layer, request).await, expected, "{name} from {address}");
    }
}

#[tokio::test]
async fn denial_is_a_403_or_its_grpc_equal() {
    let (limiter, list) = (Scripted::new(), AccessList::new());
    list.set("0.0.0.0/0", Access::Deny).unwrap();
    let service = layer(&limiter, &list).layer(service_fn(answer));
    let response = service.clone().oneshot(from("8.8.8.8")).await.unwrap();
    let outcome: &Outcome = response.extensions().get().unwrap();
    assert_eq!(
        (outcome.kind(), outcome.kind().as_str(), outcome.kind().passed()),
        (OutcomeKind::Denied, "denied", false)
    );
    for name in ["retry-after", "ratelimit", "ratelimit-policy"] {
        assert!(!response.headers().contains_key(name), "{name}");
    }
    let body = response.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(
        std::str::from_utf8(&body).unwrap(),
        r#"{"type":"about:blank","title":"Forbidden","status":403,"detail":"This client may not use this service."}"#
    );
    let mut request = from("8.8.8.8");
    (*request.method_mut(), *request.version_mut()) = (Method::POST, Version::HTTP_2);
    request.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    let response = service.oneshot(request).await.unwrap();
    assert_eq!(
        (response.status(), &response.headers()["grpc-status"]),
        (StatusCode::OK, &HeaderValue::from_static("7"))
    );
    assert!(!response.headers().contains_key("grpc-retry-pushback-ms"));
}

#[tokio::test]
async fn outer_layer_keeps_what_an_inner_list_denies() {
    for refunds in [false, true] {
        let (outer, list) = (Scripted::new(), AccessList::new());
        list.set("192.0.2.0/24", Access::Deny).unwrap();
        let policy = Rule::new("outer", Quota::per_hour(9)).unwrap();
        let stack = ServiceBuilder::new()
            .layer(RateLimitLayer::new(outer.clone(), policy, key::global()).refund_nested(refunds))
            .layer(layer(&Scripted::new(), &list))
            .service(service_fn(answer));
        for used in 1..4 {
            assert_eq!(stack.clone().oneshot(from("192.0.2.1")).await.unwrap().status(), StatusCode::FORBIDDEN);
            assert_eq!(outer.used(), used);
        }
    }
}

#[test]
fn list_finds_the_most_specific_of_100_000_networks() {
    let list = AccessList::new();
    let mut state = 1_u64;
    let mut random = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 32) as u32
    };
    let address = |bits: u32| IpAddr::from(bits.to_be_bytes());
    let mut networks: Vec<(u32, u32, Access)> = Vec::new();
    for number in 0..100_000_u32 {
        let (length, access) = (8 + random() % 25, if number % 2 == 0 { Access::Allow } else { Access::Deny });
        let first = random() & (u32::MAX << (32 - length));
        list.set(format!("{}/{length}", address(first)), access).unwrap();
        networks.push((first, length, access));
    }
    // The later of two equal entries counts.
    let naive = |bits: u32| {
        let matching = networks.iter().filter(|(first, length, _)| bits & (u32::MAX << (32 - length)) == *first);
        matching.fold(None, |best: Option<(u32, Access)>, (_, length, access)| match best {
            Some((most, _)) if most > *length => best,
            _ => Some((*length, *access)),
        })
    };
    for _ in 0..300 {
        let bits = random();
        assert_eq!(list.of_address(address(bits)), naive(bits).map(|(_, access)| access), "{}", address(bits));
    }
}
