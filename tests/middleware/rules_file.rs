//! Rules from a file: what they limit, and how they are replaced while requests come.

use std::convert::Infallible;
use std::fs;
use std::future::{Ready, ready};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::extract::ConnectInfo;
use http::{Request, Response, StatusCode};
use tower::{Layer, ServiceExt};
use tower_ratelimit::clock::ManualClock;
use tower_ratelimit::fleet::{Fleet, FleetChange};
use tower_ratelimit::key::{TrustedProxies, original_uri};
use tower_ratelimit::limiter::{Charge, Decision, Limiter, Refund, Reply, UnsupportedQuota};
use tower_ratelimit::observe::{NotCharged, Observer, RulesEvent};
use tower_ratelimit::rules::{Rules, RulesErrorKind};
use tower_ratelimit::{Key, MemoryLimiter, Policy, Quota, RateLimitLayer, key};

use crate::support::memory;
use crate::support::waiting::{World, at_once};

fn answer(_: Request<Body>) -> Ready<Result<Response<Body>, Infallible>> {
    ready(Ok(Response::default()))
}

fn request(method: &str, path: &str, fields: &[(&str, &str)]) -> Request<Body> {
    let mut request = Request::builder().method(method).uri(path);
    for (name, value) in fields {
        request = request.header(*name, *value);
    }
    request.body(Body::empty()).unwrap()
}

fn from(address: &str, mut request: Request<Body>) -> Request<Body> {
    request.extensions_mut().insert(ConnectInfo(SocketAddr::new(address.parse().unwrap(), 4711)));
    request
}

async fn status(layer: &RateLimitLayer<MemoryLimiter>, request: Request<Body>) -> u16 {
    layer.layer(tower::service_fn(answer)).oneshot(request).await.unwrap().status().as_u16()
}

/// Sends a request from a peer.
async fn get(layer: &RateLimitLayer<MemoryLimiter>, path: &str) -> u16 {
    status(layer, from("192.0.2.1", request("GET", path, &[]))).await
}

fn layer(rules: &Rules) -> RateLimitLayer<MemoryLimiter> {
    rules.layer(memory(&ManualClock::new())).unwrap()
}

fn left(layer: &RateLimitLayer<MemoryLimiter>) -> Vec<(String, u64)> {
    let key = Key::of(std::net::IpAddr::from([192, 0, 2, 1])).unwrap();
    let all = at_once(layer.peek(&key)).unwrap();
    all.into_iter().map(|(policy, status)| (policy.name().to_owned(), status.remaining())).collect()
}

#[derive(Clone, Default)]
struct Events(Arc<Mutex<Vec<RulesEvent>>>);

impl Observer for Events {
    fn on_rules_event(&self, event: &RulesEvent) {
        self.0.lock().unwrap().push(event.clone());
    }
}

#[tokio::test]
async fn rules_that_match_all_count() {
    let rules = Rules::from_text(
        "rules:
           - {name: all, quota: 4 per minute, key: peer-ip}
           - {name: posts, quota: 2 per minute, key: peer-ip, match: {path: '/posts/{id}'}}
           - {name: api, quota: 3 per minute, key: peer-ip, match: {path: ['/posts/{*rest}', '/users']}}",
    );
    let layer = layer(&rules.unwrap());
    assert_eq!([get(&layer, "/posts/1").await, get(&layer, "/posts/2").await], [200, 200]);
    assert_eq!(get(&layer, "/posts/3").await, 429, "`posts` is used up");
    assert_eq!(left(&layer), [("all".into(), 2), ("posts".into(), 0), ("api".into(), 1)], "a refusal takes nothing");
    assert_eq!([get(&layer, "/users").await, get(&layer, "/users").await], [200, 429]);
    assert_eq!([get(&layer, "/").await, get(&layer, "/").await], [200, 429]);
}

#[tokio::test]
async fn encoded_slash_escapes_no_rule() {
    let rules = Rules::from_text(
        "rules:
           - {name: login, quota: 9 per minute, key: peer-ip, match: {path: /login}}
           - {name: file, quota: 9 per minute, key: peer-ip, match: {path: '/files/{name}'}}
           - {name: all, quota: 99 per minute, key: peer-ip, match: {not: {path: '/public/{*rest}'}}}",
    );
    for (path, [login, file, all]) in [
        ("/login", [1, 0, 1]),
        ("/%2Flogin", [1, 0, 1]),
        ("/%2f%2flogin", [1, 0, 1]),
        ("/a%2F..%2Flogin", [1, 0, 1]),
        ("/a/..%2flogin?x=/", [1, 0, 1]),
        // Servers differ: it is a file for some, and `/login` for others.
        ("/files/a%2F..%2F..%2Flogin", [1, 1, 1]),
        ("/files/a%2Fb", [0, 1, 1]),
        ("/files/a", [0, 1, 1]),
        ("/public/a", [0, 0, 0]),
        ("/public%2Fa", [0, 0, 1]),
        ("/login?next=%2Flogin", [1, 0, 1]),
        ("/?next=%2Flogin", [0, 0, 1]),
    ] {
        let layer = layer(rules.as_ref().unwrap());
        get(&layer, path).await;
        let expected = [("login".into(), 9 - login), ("file".into(), 9 - file), ("all".into(), 99 - all)];
        assert_eq!(left(&layer), expected, "{path}");
    }
}

#[tokio::test]
async fn each_condition_selects_requests() {
    let proxies = TrustedProxies::networks(["192.0.2.0/24"]).unwrap();
    for (condition, hit, miss) in [
        ("method: [POST, PUT]", request("PUT", "/", &[]), request("GET", "/", &[])),
        ("path: '/a/{id}'", request("GET", "/a/b", &[]), request("GET", "/a/b/c", &[])),
        (
            "host: '*.example.com'",
            request("GET", "/", &[("host", "API.example.com:80")]),
            request("GET", "/", &[("host", "example.com")]),
        ),
        (
            "header: {x-beta: '*', x-tier: gold}",
            request("GET", "/", &[("x-beta", "1"), ("x-tier", "gold")]),
            request("GET", "/", &[("x-beta", "1"), ("x-tier", "silver")]),
        ),
        (
            "header: {x-beta: '*'}", // some proxies send an empty header in place of an absent one
            request("GET", "/", &[("x-beta", ""), ("x-beta", "1")]),
            request("GET", "/", &[("x-beta", " ")]),
        ),
        (
            "query: {page: '1*', 'sort by': name}",
            request("GET", "/?%70age=%31&sort+by=name", &[]),
            request("GET", "/?page=2&sort+by=name", &[]),
        ),
        ("query: {page: '1'}", request("GET", "/?page=2&page=3", &[]), request("GET", "/?Page=1", &[])),
        (
            "user-agent: '*bot*'",
            request("GET", "/", &[("user-agent", "GoogleBot/2")]),
            request("GET", "/", &[("user-agent", "curl")]),
        ),
        (
            "client: [198.51.100.0/24]",
            request("GET", "/", &[("x-forwarded-for", "198.51.100.7")]),
            request("GET", "/", &[("x-forwarded-for", "203.0.113.7")]),
        ),
        ("action: write", request("POST", "/", &[]), request("GET", "/", &[])),
    ] {
        let rules = Rules::builder()
            .trusted_proxies(proxies.clone())
            .action("write", |parts| parts.method == "POST")
            .read_text(format!("rules: [{{name: a, quota: 0 per minute, key: global, match: {{{condition}}}}}]"));
        let layer = layer(&rules.unwrap_or_else(|error| panic!("{condition}: {error}")));
        assert_eq!(status(&layer, from("192.0.2.1", hit)).await, 429, "{condition}");
        assert_eq!(status(&layer, from("192.0.2.1", miss)).await, 200, "{condition}");
    }
}

#[tokio::test]
async fn not_leaves_requests_out_of_a_rule() {
    let proxies = TrustedProxies::networks(["192.0.2.0/24"]).unwrap();
    let by = |client: &str| request("GET", "/", &[("x-forwarded-for", client)]);
    for (not, out, others) in [
        ("{method: [GET, HEAD]}", request("HEAD", "/", &[]), vec![request("POST", "/", &[])]),
        (
            "{path: ['/a/{id}', '/b/{*rest}']}",
            request("GET", "/b/c/d%20e", &[]),
            ["/a", "/a/b/c", "/b/../a", "/b/c/%2E%2e;x/d", "/b/%2fetc", "/b/..%5cetc", "/b/c\\d", "/b/."]
                .map(|path| request("GET", path, &[]))
                .into(),
        ),
        (
            "{host: '*.internal'}",
            request("GET", "/", &[("host", "A.internal:80")]),
            vec![
                request("GET", "/", &[]),
                request("GET", "/", &[("host", "a.internal"), ("host", "b.example")]),
                request("GET", "/", &[("host", "a.internal:x")]),
                request("GET", "http://b.example/", &[("host", "a.internal")]),
            ],
        ),
        (
            "{header: {x-internal: '1*'}}",
            request("GET", "/", &[("x-internal", "1"), ("x-internal", "12")]),
            vec![
                request("GET", "/", &[]),
                request("GET", "/", &[("x-internal", "1"), ("x-internal", "0")]),
                request("GET", "/", &[("x-internal", &"1".repeat(1_001))]),
            ],
        ),
        (
            "{header: {x-internal: '*'}}",
            request("GET", "/", &[("x-internal", "1")]),
            vec![
                request("GET", "/", &[("x-internal", "")]),
                request("GET", "/", &[("x-internal", ""), ("x-internal", "1")]),
            ],
        ),
        (
            "{query: {dry-run: 'true'}}",
            request("GET", "/?a&dry-run=true", &[]),
            [
                "/",
                "/?dry-run=false",
                "/?dry-run=true&dry-run=true",
                "/?dry-run=true&dry-run[]=false",
                "/?dry-run=true%",
            ]
            .map(|path| request("GET", path, &[]))
            .into(),
        ),
        (
            "{user-agent: '*probe*'}",
            request("GET", "/", &[("user-agent", "Probe/2")]),
            vec![request("GET", "/", &[("user-agent", "curl")])],
        ),
        ("{client: 10.0.0.0/8}", by("10.1.2.3"), vec![by("11.1.2.3"), by("unreadable!"), by("10.1.2.3, x")]),
        ("{action: write}", request("POST", "/", &[]), vec![request("GET", "/", &[])]),
        (
            "{method: GET, path: /a}",
            request("GET", "/a", &[]),
            vec![request("GET", "/b", &[]), request("PUT", "/a", &[])],
        ),
        ("[{method: GET}, {path: /a}]", request("PUT", "/a", &[]), vec![request("PUT", "/b", &[])]),
    ] {
        let rules = Rules::builder()
            .trusted_proxies(proxies.clone())
            .action("write", |parts| parts.method == "POST")
            .read_text(format!("rules: [{{name: a, quota: 0 per minute, key: global, match: {{not: {not}}}}}]"));
        let layer = layer(&rules.unwrap_or_else(|error| panic!("{not}: {error}")));
        assert_eq!(status(&layer, from("192.0.2.1", out)).await, 200, "{not}");
        for other in others {
            let about = format!("{not} {other:?}");
            assert_eq!(status(&layer, from("192.0.2.1", other)).await, 429, "{about}");
        }
    }
}

#[tokio::test]
async fn request_without_a_path_is_not_left_out() {
    let text = "rules: [{name: a, quota: 0 per minute, key: global, match: {not: {path: ['/', '/{*rest}']}}}]";
    let layer = layer(&Rules::from_text(text).unwrap());
    assert_eq!(status(&layer, request("OPTIONS", "*", &[])).await, 429);
    assert_eq!(status(&layer, request("GET", "/a", &[])).await, 200);
}

#[tokio::test]
async fn setup_warning_has_the_words_of_the_file() {
    for (text, words) in [
        (
            "rules: [{name: a, quota: 5 per minute, key: peer-ip}]",
            ["a rule counts by `key: peer-ip`", "write `key: client-ip`"],
        ),
        (
            "rules: [{name: a, quota: 5 per minute, key: global}]\naccess: {deny: [192.0.2.0/24]}",
            ["`allow` and `deny` of the rules look up the address of the peer", "name the trusted proxies"],
        ),
    ] {
        let layer = layer(&Rules::from_text(text).unwrap());
        let forwarded = request("GET", "/", &[("x-forwarded-for", "203.0.113.7")]);
        assert_eq!(status(&layer, from("198.51.100.1", forwarded)).await, 200);
        let warning = layer.check().unwrap_err().to_string();
        assert!(words.iter().all(|words| warning.contains(words)) && !warning.contains("key::"), "{warning}");
    }
}

#[tokio::test]
async fn client_that_hides_its_address_escapes_no_rule() {
    let proxies = TrustedProxies::networks(["192.0.2.0/24"]).unwrap();
    let text = "rules: [{name: a, quota: 0 per minute, key: global, match: {client: [10.0.0.0/8]}}]";
    let layer = layer(&Rules::builder().trusted_proxies(proxies).read_text(text).unwrap());
    let hidden = request("GET", "/", &[("x-forwarded-for", "unreadable!")]);
    assert_eq!(status(&layer, from("192.0.2.1", hidden)).await, 429);
}

#[tokio::test]
async fn host_escapes_no_rule_by_its_spelling() {
    let text =
        "rules: [{name: a, quota: 0 per minute, key: global, match: {host: [api.example.com, '[2001:db8::1]']}}]";
    let layer = layer(&Rules::from_text(text).unwrap());
    let of = |host: &[u8]| {
        let mut request = request("GET", "/", &[]);
        request.headers_mut().append("host", http::HeaderValue::from_bytes(host).unwrap());
        request
    };
    for host in [
        &b"API.example.com"[..],
        b"api.example.com.",
        b"api.example.com:",
        b"api.example.com.:80",
        b"api.example.com:x",
        b"api.example.com:80:80",
        b"user@api.example.com",
        b"api%2eexample.com",
        b"api.example.com, b",
        b"\xffapi.example.com",
        b"[2001:DB8::1]:443",
        b"[2001:db8::1]x",
        b"",
    ] {
        assert_eq!(status(&layer, of(host)).await, 429, "{}", String::from_utf8_lossy(host));
    }
    let twice = request("GET", "/", &[("host", "b.example.com"), ("host", "api.example.com")]);
    assert_eq!(status(&layer, twice).await, 429);
    for uri in ["http://API.example.com.:80", "http://user@api.example.com/"] {
        assert_eq!(status(&layer, request("GET", uri, &[("host", "b.example.com")])).await, 429, "{uri}");
    }
    for host in ["b.example.com", "xn--e1afmkfd.example_com:80", "[2001:db8::2]:443", "192.0.2.1"] {
        assert_eq!(status(&layer, of(host.as_bytes())).await, 200, "{host}");
    }
}

#[tokio::test]
async fn keys_are_ready_made_or_registered_and_combine() {
    let rules = Rules::builder().key("tenant", |parts| parts.extensions.get::<u64>().copied()).read_text(
        "rules:
           - {name: tenant, quota: 1 per minute, key: [tenant, method]}
           - {name: token, quota: 9 per minute, key: header x-api-key, missing-key: exempt}
           - {name: user, quota: 1 per minute, key: query user, missing-key: exempt}",
    );
    let layer = layer(&rules.unwrap());
    let of = |tenant: u64, method| {
        let mut request = request(method, "/", &[]);
        request.extensions_mut().insert(tenant);
        request
    };
    assert_eq!(status(&layer, of(1, "GET")).await, 200);
    assert_eq!(status(&layer, of(1, "GET")).await, 429);
    assert_eq!(status(&layer, of(1, "PUT")).await, 200);
    assert_eq!(status(&layer, of(2, "GET")).await, 200);
    assert_eq!(status(&layer, request("GET", "/", &[])).await, 400, "a part of the key is missing");
    let as_user = |tenant: u64, path| {
        let mut request = request("GET", path, &[]);
        request.extensions_mut().insert(tenant);
        request
    };
    for (tenant, path, expected) in
        [(3, "/?user=a", 200), (4, "/?%75ser=%61", 429), (5, "/?user=b&user=c", 200), (6, "/?user=d&user=e", 429)]
    {
        assert_eq!(status(&layer, as_user(tenant, path)).await, expected, "{path}");
    }
}

#[tokio::test]
async fn plan_is_named_by_a_part_of_the_request() {
    let rules = Rules::from_text(
        "rules:
           - name: customer
             key: header x-customer
             plans: {by: header x-plan, quotas: {free: 1 per minute, pro: 3 per minute}, otherwise: free}",
    );
    let layer = layer(&rules.unwrap());
    for (plan, passing) in [("free", 1), ("pro", 3), ("unknown", 1)] {
        for nth in 0..=passing {
            let fields = [("x-customer", plan), ("x-plan", plan)];
            let expected = if nth < passing { 200 } else { 429 };
            assert_eq!(status(&layer, request("GET", "/", &fields)).await, expected, "{plan} {nth}");
        }
    }
}

#[tokio::test]
async fn short_list_needs_a_match_or_an_action() {
    let rules = Rules::builder()
        .action("create_post", |parts| parts.method == "POST" && original_uri(parts).path() == "/posts")
        .read_text(
            "- {action: create_account, unit: day, requests_per_unit: 5, key: peer-ip, match: {path: /accounts}}
- {action: create_post, unit: hour, requests_per_unit: 5, key: peer-ip}",
        );
    let layer = layer(&rules.unwrap());
    for (method, path) in [("GET", "/accounts"), ("POST", "/posts")] {
        for nth in 0..6 {
            let expected = if nth < 5 { 200 } else { 429 };
            assert_eq!(status(&layer, from("192.0.2.1", request(method, path, &[]))).await, expected, "{path} {nth}");
        }
    }
    assert_eq!(get(&layer, "/posts").await, 200, "to read is another action");
}

#[tokio::test]
async fn candidate_is_observed_beside_and_never_binds() {
    let rules =
        Rules::from_text("rules: [{name: a, quota: 3 per minute, candidate: 1 per minute, key: peer-ip}]").unwrap();
    let layer = layer(&rules);
    for expected in [200, 200, 200, 429] {
        assert_eq!(get(&layer, "/").await, expected);
    }
    assert_eq!(left(&layer), [("a".into(), 0), ("a-candidate".into(), 0)]);
}

#[tokio::test]
async fn upload_costs_the_bytes_of_its_body() {
    let rules = Rules::from_text(
        "rules: [{name: upload, quota: 1 MB per hour, key: peer-ip, cost: content-length, match: {method: PUT}}]",
    );
    let layer = layer(&rules.unwrap()).headers(tower_ratelimit::Headers::draft_11());
    let upload = |fields: &[(&str, &str)]| status(&layer, from("192.0.2.1", request("PUT", "/", fields)));
    assert_eq!(upload(&[("content-length", "600000")]).await, 200);
    assert_eq!(upload(&[("content-length", "600000")]).await, 429, "400,000 bytes are left");
    assert_eq!(upload(&[("transfer-encoding", "chunked")]).await, 429, "nobody knows how long it is");
    assert_eq!(left(&layer), [("upload".into(), 400_000)]);
    let response = layer.layer(tower::service_fn(answer)).oneshot(from("192.0.2.1", request("PUT", "/", &[])));
    let headers = response.await.unwrap();
    assert_eq!(headers.headers()["ratelimit-policy"], "\"upload\";q=1000000;qu=\"content-bytes\";w=3600");
}

#[tokio::test]
async fn reserved_cost_is_settled_by_the_reported_one() {
    let rules = Rules::from_text(
        "rules:
           - {name: tokens, quota: 100 per minute, key: peer-ip, cost: {reserve: {header: x-max, at-most: 50}}}
           - {name: requests, quota: 9 per minute, key: peer-ip}",
    );
    let layer = layer(&rules.unwrap());
    let (mut head, ()) = request("GET", "/", &[("x-max", "40")]).map(drop).into_parts();
    head.extensions.insert(ConnectInfo(SocketAddr::from(([192, 0, 2, 1], 4711))));
    let admission = layer.admit(&head).await.unwrap();
    assert_eq!(left(&layer), [("tokens".into(), 60), ("requests".into(), 8)], "it is reserved");
    admission.settle(7);
    assert_eq!(left(&layer), [("tokens".into(), 93), ("requests".into(), 8)]);
    layer.admit(&head).await.unwrap().settle(120);
    assert_eq!(left(&layer), [("tokens".into(), 0), ("requests".into(), 7)]);
    assert!(layer.admit(&head).await.is_err(), "the rest is owed");
}

#[tokio::test]
async fn listed_clients_are_exempt_or_refused() {
    let rules = Rules::from_text(
        "rules: [{name: a, quota: 0 per minute, key: peer-ip}]
access: {allow: [192.0.2.0/24], deny: [192.0.2.66, 203.0.113.7]}",
    );
    let layer = layer(&rules.unwrap());
    for (address, expected) in [("192.0.2.1", 200), ("192.0.2.66", 403), ("203.0.113.7", 403), ("203.0.113.8", 429)] {
        assert_eq!(status(&layer, from(address, request("GET", "/", &[]))).await, expected, "{address}");
    }
}

#[tokio::test]
async fn disabled_rule_is_not_applied_and_keeps_what_was_used() {
    let of = |is_enabled: bool| {
        format!(
            "rules:
           - {{name: a, quota: 2 per minute, key: peer-ip, candidate: 1 per minute, enabled: {is_enabled}}}
           - {{name: b, quota: 0 per minute, key: peer-ip, match: {{path: /b}}, enabled: false}}"
        )
    };
    let rules = Rules::from_text(of(true)).unwrap();
    let layer = layer(&rules);
    assert_eq!([get(&layer, "/").await, get(&layer, "/b").await, get(&layer, "/").await], [200, 200, 429]);
    rules.replace(of(false)).unwrap();
    for path in ["/", "/b", "/"] {
        assert_eq!(get(&layer, path).await, 200);
    }
    let explained = layer.explain(&from("192.0.2.1", request("GET", "/", &[])).into_parts().0).await;
    let reasons: Vec<_> = explained.rules().iter().map(|rule| rule.not_charged()).collect();
    assert_eq!(reasons, [Some(NotCharged::Disabled); 3]);
    rules.replace(of(true)).unwrap();
    assert_eq!(get(&layer, "/").await, 429, "what was used stays used");
}

#[tokio::test]
async fn rule_applies_at_its_times_and_keeps_what_was_used() {
    let of = |hours: &str| {
        format!(
            "rules:
           - {{name: day, quota: '2 per day, fixed window', key: peer-ip, match: {{time: 'wed {hours} UTC'}}}}
           - {{name: night, quota: 0 per minute, key: peer-ip, match: {{path: /n, not: {{time: 'wed {hours} UTC'}}}}}}"
        )
    };
    let clock = ManualClock::new(); // Wednesday, 00:00
    let hours = |hours: u64| clock.advance(Duration::from_secs(hours * 3_600));
    let rules = Rules::builder().clock(clock.clone()).read_text(of("08:00-18:00")).unwrap();
    let layer = layer(&rules);
    assert_eq!([get(&layer, "/").await, get(&layer, "/n").await], [200, 429]);
    assert_eq!(left(&layer)[0], ("day".into(), 2), "nothing is charged at night");
    hours(8);
    assert_eq!([get(&layer, "/").await, get(&layer, "/n").await, get(&layer, "/").await], [200, 200, 429]);
    hours(10);
    assert_eq!(get(&layer, "/").await, 200);
    rules.replace(of("08:00-20:00")).unwrap();
    assert_eq!(get(&layer, "/").await, 429, "what was used stays used");
    let explained = layer.explain(&from("192.0.2.1", request("GET", "/n", &[])).into_parts().0).await;
    assert_eq!(explained.rules()[1].not_charged(), Some(NotCharged::LeftOut));
    assert_eq!(explained.rules()[1].expected(), Some("the time wed 08:00-20:00 UTC, which ends in 2h"));
    hours(2);
    let explained = layer.explain(&from("192.0.2.1", request("GET", "/", &[])).into_parts().0).await;
    assert_eq!(explained.rules()[0].not_charged(), Some(NotCharged::Time));
    assert_eq!(explained.rules()[0].expected(), Some("wed 08:00-20:00 UTC, which begins in 6days 12h"));
}

/// Networks of a rule hold the same addresses as those of access lists.
#[tokio::test]
async fn network_holds_an_address_in_each_of_its_forms() {
    let text =
        "rules: [{name: a, quota: 0 per minute, key: global, match: {not: {client: [192.0.2.0/24, '2001:db8::/32']}}}]";
    let proxies = TrustedProxies::networks(["203.0.113.0/24", "64:ff9b::203.0.113.0/120"]).unwrap();
    let behind = layer(&Rules::builder().trusted_proxies(proxies).read_text(text).unwrap());
    let direct = layer(&Rules::from_text(text).unwrap());
    for (client, expected) in [
        ("192.0.2.7", 200),
        ("::ffff:192.0.2.7", 200),
        ("64:ff9b::192.0.2.7", 200),
        ("2001:db8::7", 200),
        ("198.51.100.7", 429),
        ("64:ff9b::198.51.100.7", 429),
        ("64:ff9b:1::192.0.2.7", 429),
        ("::192.0.2.7", 429),
        ("2001:db9::7", 429),
    ] {
        assert_eq!(status(&direct, from(client, request("GET", "/", &[]))).await, expected, "{client}");
        let forwarded = from("203.0.113.1", request("GET", "/", &[("x-forwarded-for", client)]));
        assert_eq!(status(&behind, forwarded).await, expected, "{client} behind a proxy");
    }
    let forged = from("198.51.100.7", request("GET", "/", &[("x-forwarded-for", "192.0.2.7")]));
    assert_eq!(status(&behind, forged).await, 429, "the peer is no proxy");
}

#[test]
fn disabled_rule_is_read_and_checked() {
    for wrong in ["quota: 5 per", "quota: 5/s, was: a", "quota: 5/s, match: {path: a}"] {
        let text = format!("rules: [{{name: a, key: peer-ip, enabled: false, {wrong}}}]");
        assert!(Rules::from_text(text).is_err(), "{wrong}");
    }
    let twice = "rules: [{name: a, key: peer-ip, quota: 5/s, enabled: false}, {name: a, key: peer-ip, quota: 5/s}]";
    assert!(Rules::from_text(twice).unwrap_err().to_string().contains("two rules are named `a`"));
}

#[tokio::test]
async fn replaced_rules_keep_what_was_used() {
    let of = |rules: &str| format!("rules:\n{rules}");
    let rules = Rules::from_text(of(" - {name: a, quota: 10 per minute, key: peer-ip}
 - {name: b, quota: 10 per minute, key: peer-ip}
 - {name: several, quota: [10 per minute, 100 per hour], key: peer-ip}"))
    .unwrap();
    let layer = layer(&rules);
    let before = layer.layer(tower::service_fn(answer));
    for _ in 0..4 {
        assert_eq!(get(&layer, "/").await, 200);
    }
    let used: Vec<u64> = left(&layer).into_iter().map(|(_, left)| left).collect();
    assert_eq!(used, [6, 6, 6, 96]);

    // One quota is raised, one rule is renamed, one of several quotas is lowered, and a rule comes first.
    let next = of(" - {name: new, quota: 7 per minute, key: peer-ip}
 - {name: c, was: b, quota: 10 per minute, key: peer-ip}
 - {name: a, quota: 20 per minute, key: peer-ip}
 - {name: several, quota: [5 per minute, 100 per hour], key: peer-ip}");
    assert_eq!(rules.replace(next.clone()).unwrap(), 1);
    assert_eq!(rules.replace(next).unwrap(), 1, "the same rules are no new version");
    assert_eq!(
        left(&layer),
        [
            ("new".into(), 7),
            ("c".into(), 6),
            ("a".into(), 16),
            ("several-5-per-minute".into(), 1),
            ("several-100-per-hour".into(), 96)
        ]
    );
    let response = before.oneshot(from("192.0.2.1", request("GET", "/", &[]))).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK, "a service that was made before follows");
    assert_eq!(layer.check(), Ok(()), "an earlier version is no contradiction");
    assert_eq!(get(&layer, "/").await, 429, "5 per minute are used up");

    // Lowered and raised again: what was used under the larger quota is not forgotten in between.
    rules.replace(of(" - {name: a, quota: 2 per minute, key: peer-ip}")).unwrap();
    assert_eq!(get(&layer, "/").await, 429);
    rules.replace(of(" - {name: a, quota: 20 per minute, key: peer-ip}")).unwrap();
    assert_eq!(left(&layer), [("a".into(), 15)]);
}

#[test]
fn refund_of_an_earlier_version_keeps_what_was_used_since() {
    let one = "{name: a, quota: 10 per minute, key: peer-ip}";
    for next in [
        "{name: a, quota: 1000 per minute, key: peer-ip}",
        "{name: b, was: a, quota: 1000 per minute, key: peer-ip}",
        "{name: a, quota: [1000 per minute, 5000 per day], key: peer-ip}",
    ] {
        let rules = Rules::from_text(format!("rules: [{one}]")).unwrap();
        let layer = layer(&rules);
        let head = from("192.0.2.1", request("GET", "/", &[])).into_parts().0;
        let admission = at_once(layer.admit(&head)).unwrap();
        rules.replace(format!("rules: [{next}]")).unwrap();
        for _ in 0..500 {
            assert!(at_once(layer.admit(&head)).is_ok());
        }
        admission.refund();
        assert_eq!(left(&layer)[0].1, 500, "{next}");
    }
}

/// The rule grows, is renamed, becomes another algorithm's, or goes.
#[test]
fn waiting_requests_depart_as_promised_when_their_rule_changes() {
    let old = "{name: queue, quota: '10 per s, queue 10, leaky queue', key: global}";
    for new in [
        "{name: queue, quota: '10 per s, queue 50, leaky queue', key: global}",
        "{name: other, was: queue, quota: '10 per s, queue 50, leaky queue', key: global}",
        "{name: queue, quota: '1 per minute, queue 50, leaky queue', key: global}",
        "{name: queue, quota: 50 per minute, key: global}",
        "{name: unrelated, quota: 50 per minute, key: global}",
    ] {
        let mut world: World<u16> = World::new();
        let rules = Rules::from_text(format!("rules: [{old}]")).unwrap();
        let layer = rules.layer(memory(&world.clock)).unwrap().timer(world.timer.clone());
        let departed: Arc<Mutex<Vec<u64>>> = Arc::default();
        let send = |world: &mut World<u16>| {
            let (departed, timer) = (Arc::clone(&departed), world.timer.clone());
            let service = layer.layer(tower::service_fn(move |request: Request<Body>| {
                departed.lock().unwrap().push(timer.now_us() / 1_000);
                answer(request)
            }));
            world.spawn(async move { service.oneshot(request("GET", "/", &[])).await.unwrap().status().as_u16() })
        };
        for _ in 0..6 {
            send(&mut world);
        }
        rules.replace(format!("rules: [{new}]")).unwrap();
        assert_eq!(layer.waiting(), 5, "{new}");
        // One in the middle leaves, so those behind it move up.
        world.cancel(2);
        world.pass(1_000_000);
        assert_eq!(*departed.lock().unwrap(), [0, 100, 200, 300, 400], "{new}");
        assert_eq!(layer.waiting(), 0);
    }
}

/// Another rule comes before it, or goes, and the rule is renamed meanwhile.
#[test]
fn raised_limit_reaches_requests_in_line_wherever_it_stands() {
    let other = "{name: other, quota: 50 per minute, key: global}";
    let old = "{name: import, quota: '1 at once, wait 10 s', key: global}";
    let raised = "{name: import, quota: '2 at once, wait 10 s', key: global}";
    let renamed = "{name: export, was: import, quota: '2 at once, wait 10 s', key: global}";
    for (before, after) in [
        (old.to_owned(), raised.to_owned()),
        (old.to_owned(), format!("{other}, {raised}")),
        (format!("{other}, {old}"), raised.to_owned()),
        (old.to_owned(), format!("{other}, {renamed}")),
    ] {
        let mut world: World<Response<Body>> = World::new();
        let rules = Rules::from_text(format!("rules: [{before}]")).unwrap();
        let layer = rules.layer(memory(&world.clock)).unwrap().timer(world.timer.clone());
        let send = |world: &mut World<Response<Body>>| {
            let held = |_: Request<Body>| ready(Ok::<_, Infallible>(Response::new(Body::from("held"))));
            let service = layer.layer(tower::service_fn(held));
            world.spawn(async move { service.oneshot(request("GET", "/", &[])).await.unwrap().map(Body::new) })
        };
        // The first response is held in `done`.
        let (first, second) = (send(&mut world), send(&mut world));
        assert!(!world.is_pending(first) && world.is_pending(second), "{before}");
        rules.replace(format!("rules: [{after}]")).unwrap();
        world.pass(0);
        assert!(!world.is_pending(second), "{before} -> {after}");
        assert_eq!(world.done[second].as_ref().unwrap().status(), 200);
    }
}

#[test]
fn waiting_requests_of_different_rules_never_change_places() {
    let mut world: World<u16> = World::new();
    let slow = "{name: slow, quota: '1 per minute, queue 10, leaky queue', key: global, match: {path: /slow}}";
    let fast = "{name: fast, quota: '10 per s, queue 10, leaky queue', key: global, match: {path: /fast}}";
    let rules = Rules::from_text(format!("rules: [{slow}]")).unwrap();
    let layer = rules.layer(memory(&world.clock)).unwrap().timer(world.timer.clone());
    let departed: Arc<Mutex<Vec<(&str, u64)>>> = Arc::default();
    let send = |world: &mut World<u16>, path: &'static str| {
        let (departed, timer) = (Arc::clone(&departed), world.timer.clone());
        let service = layer.layer(tower::service_fn(move |request: Request<Body>| {
            departed.lock().unwrap().push((path, timer.now_us() / 1_000));
            answer(request)
        }));
        world.spawn(async move { service.oneshot(request("GET", path, &[])).await.unwrap().status().as_u16() })
    };
    for _ in 0..2 {
        send(&mut world, "/slow");
    }
    rules.replace(format!("rules: [{fast}, {slow}]")).unwrap();
    for _ in 0..2 {
        send(&mut world, "/fast");
    }
    world.pass(120_000_000);
    assert_eq!(*departed.lock().unwrap(), [("/slow", 0), ("/fast", 0), ("/fast", 100), ("/slow", 60_000)]);
}

#[tokio::test]
async fn rules_of_the_program_stay_behind_those_of_the_file() {
    let rules = Rules::from_text("rules: [{name: a, quota: 9 per minute, key: peer-ip}]").unwrap();
    let layer = layer(&rules).and(tower_ratelimit::Rule::new("own", Quota::per_minute(2)).unwrap(), key::peer_ip());
    assert_eq!(get(&layer, "/").await, 200);
    rules.replace("rules: [{name: b, quota: 9 per hour, key: peer-ip}]").unwrap();
    assert_eq!(left(&layer), [("b".into(), 9), ("own".into(), 1)]);
    rules.replace("rules: []").unwrap();
    assert_eq!([get(&layer, "/").await, get(&layer, "/").await], [200, 429]);
}

#[tokio::test]
async fn rule_that_counts_as_one_of_the_program_is_refused() {
    let rules = Rules::from_text("rules: [{name: a, quota: 9 per minute, key: peer-ip}]").unwrap();
    let own = |name| tower_ratelimit::Rule::new(name, Quota::per_minute(2)).unwrap();
    let layer = layer(&rules).and(own("own"), key::peer_ip());
    assert_eq!(get(&layer, "/").await, 200);
    for rule in [
        "{name: own, quota: 5/h",
        "{name: b, was: own, quota: 5/h",
        "{name: o, quota: 5/h, block: {after: 5/h, for: 1 h}, was: own",
    ] {
        let error = rules.replace(format!("rules:\n  - {rule}, key: peer-ip}}")).unwrap_err();
        assert_eq!((error.problems().len(), error.problems()[0].line(), error.kind()), (1, 2, RulesErrorKind::Name));
        assert!(error.to_string().contains("stores its usage as `own`, too: rename this rule"), "{error}");
    }
    assert_eq!(left(&layer), [("a".into(), 8), ("own".into(), 1)], "nothing changed");
    // The first file cannot know the rules that the program adds, so they give way.
    let renamed = Rules::from_text("rules: [{name: b, was: own, quota: 9 per minute, key: peer-ip}]").unwrap();
    let layer = renamed.layer(memory(&ManualClock::new())).unwrap().and(own("own"), key::peer_ip());
    assert_eq!([get(&layer, "/").await, get(&layer, "/").await, get(&layer, "/").await], [200, 200, 429]);
    assert_eq!(left(&layer), [("b".into(), 7), ("own-2".into(), 0)]);
}

#[tokio::test]
async fn rule_that_is_renamed_again_names_its_first_name() {
    let rule = |names: &str| format!("rules:\n  - {{{names}, quota: 3 per minute, key: peer-ip}}");
    let rules = Rules::from_text(rule("name: a")).unwrap();
    let layer = layer(&rules);
    assert_eq!(get(&layer, "/").await, 200);
    rules.replace(rule("name: b, was: a")).unwrap();
    let error = rules.replace(rule("name: c, was: b")).unwrap_err();
    assert!(error.to_string().contains("is stored under the rule's first name, `a`: write `was: a`"), "{error}");
    assert_eq!(left(&layer), [("b".into(), 2)]);
    rules.replace(rule("name: c, was: a")).unwrap();
    assert_eq!(left(&layer), [("c".into(), 2)]);
}

#[tokio::test]
async fn bad_rules_change_nothing_and_are_reported() {
    let rules = Rules::from_text("rules: [{name: a, quota: 2 per minute, key: peer-ip}]").unwrap();
    let events = Events::default();
    let layer = layer(&rules).observer(events.clone());
    assert_eq!(get(&layer, "/").await, 200);
    for bad in
        ["rules: [{name: a, quota: 5 per year and a half, key: peer-ip}]", "rules: [", "\u{1}", "rules: [{name: a}]"]
    {
        let error = rules.replace(bad).unwrap_err();
        assert_eq!(rules.error(), Some(error.clone()), "{bad}");
        assert!(events.0.lock().unwrap().drain(..).eq([RulesEvent::refused(error.to_string())]), "{bad}");
    }
    assert_eq!((rules.version(), left(&layer)), (0, vec![("a".into(), 1)]));
    rules.replace("rules: [{name: a, quota: 3 per minute, key: peer-ip}]").unwrap();
    assert_eq!((rules.version(), rules.error()), (1, None));
    let words = "a: 2 per minute, token bucket -> 3 per minute, token bucket";
    assert_eq!(*events.0.lock().unwrap(), [RulesEvent::loaded(1, None, 1, words)]);
    // The version that is in force again is reported as well, because the error is over.
    rules.replace("rules: [").unwrap_err();
    rules.replace("rules: [{name: a, quota: 3 per minute, key: peer-ip}]").unwrap();
    assert_eq!((rules.error(), events.0.lock().unwrap().last()), (None, Some(&RulesEvent::loaded(1, None, 1, ""))));
}

#[test]
fn observer_may_replace_the_rules_that_it_hears_of() {
    struct Replaces(Rules);
    impl Observer for Replaces {
        fn on_rules_event(&self, _: &RulesEvent) {
            if self.0.version() < 3 {
                let _ = self.0.replace(of_limit(self.0.version() + 10));
            }
        }
    }
    let rules = Rules::from_text(of_limit(1)).unwrap();
    let layer = layer(&rules).observer(Replaces(rules.clone()));
    rules.replace(of_limit(2)).unwrap();
    assert_eq!((rules.version(), layer.policies()[0].quota().limit()), (3, 12));
}

#[test]
fn observer_that_panics_hides_no_rules_from_other_layers() {
    struct Panics;
    impl Observer for Panics {
        fn on_rules_event(&self, _: &RulesEvent) {
            std::panic::resume_unwind(Box::new("the observer panics"));
        }
    }
    let rules = Rules::from_text(of_limit(1)).unwrap();
    let events = Events::default();
    let layers = [layer(&rules).observer(Panics), layer(&rules).observer(events.clone())];
    assert_eq!(rules.replace(of_limit(2)).unwrap(), 1);
    let error = rules.replace("rules: [").unwrap_err();
    assert_eq!(layers.map(|layer| layer.policies()[0].quota().limit()), [2, 2]);
    let loaded = RulesEvent::loaded(1, None, 1, "a: 1 per minute, token bucket -> 2 per minute, token bucket");
    assert_eq!(*events.0.lock().unwrap(), [loaded, RulesEvent::refused(error.to_string())]);
}

#[test]
fn problems_are_named_with_their_places() {
    let error = Rules::from_text(
        "rules:
  - {name: a, quota: 5 per minute, key: client-ip}
  - {name: b, quota: 5 per minute, key: tenat}
  - {name: c, quota: 5 per minute, key: global, match: {action: write}}",
    )
    .unwrap_err();
    let builder = || Rules::builder().key("tenant", |_| 1);
    assert_eq!(error.kind(), RulesErrorKind::Name);
    let lines: Vec<usize> = error.problems().iter().map(|problem| problem.line()).collect();
    assert_eq!(lines, [3, 4]);
    let error = builder().read_text("rules: [{name: b, quota: 5 per minute, key: tenat}]").unwrap_err();
    assert_eq!(error.problems()[0].suggestion(), Some("tenant"));
    let error = Rules::from_text("rules: [{name: a, quota: 5 per minute, key: client-ip}]").unwrap_err();
    assert!(error.to_string().contains("RulesBuilder::trusted_proxies"), "{error}");
    let error = Rules::builder().key("path", |_| 1).read_text("rules: []").unwrap_err();
    assert!(error.to_string().contains("no key can be registered as `path`"), "{error}");
    let error = Rules::from_file("/nowhere/rules.yaml").unwrap_err();
    assert_eq!(error.kind(), RulesErrorKind::File);
    assert!(error.to_string().contains("/nowhere/rules.yaml"), "{error}");
}

#[test]
fn quota_that_the_limiter_cannot_hold_is_refused_with_its_line() {
    let log = |limit: u32| format!("rules:\n  - name: a\n    quota: {limit} per hour, sliding log\n    key: peer-ip\n");
    let small = || MemoryLimiter::builder().max_keys(10).build().unwrap();
    let rules = Rules::from_text(log(1_000_000)).unwrap();
    let error = rules.layer(small()).unwrap_err();
    assert_eq!((error.problems()[0].line(), error.kind()), (3, RulesErrorKind::Value), "{error}");
    let rules = Rules::from_text(log(10)).unwrap();
    let layer = rules.layer(small()).unwrap();
    assert_eq!(rules.replace(log(1_000_000)).unwrap_err().problems()[0].line(), 3);
    assert_eq!(layer.policies()[0].quota().limit(), 10);
}

/// A folder that is removed when the test ends.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("tower-ratelimit-{}-{name}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn of_limit(limit: u64) -> String {
    format!("rules: [{{name: a, quota: {limit} per minute, key: peer-ip}}]")
}

/// Waits until the rules have this limit.
fn wait_for(layer: &RateLimitLayer<MemoryLimiter>, limit: u64) {
    for _ in 0..6_000 {
        if layer.policies()[0].quota().limit() == limit {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("the rules have no limit of {limit}, but of {}", layer.policies()[0].quota().limit());
}

#[test]
fn changed_file_is_taken_however_it_is_changed() {
    let folder = Folder::new("changed");
    let file = folder.path("rules.yaml");
    fs::write(&file, of_limit(1)).unwrap();
    let rules = Rules::builder().reload_every(Duration::ZERO).read_file(&file).unwrap();
    let layer = layer(&rules);
    fs::write(&file, of_limit(2)).unwrap();
    wait_for(&layer, 2);
    // An editor writes beside the file, and renames.
    fs::write(folder.path("new"), of_limit(3)).unwrap();
    fs::rename(folder.path("new"), &file).unwrap();
    wait_for(&layer, 3);
    // A file that is broken or gone for a while changes nothing.
    fs::write(&file, "rules: [").unwrap();
    wait_for_error(&rules, Some(RulesErrorKind::Syntax));
    fs::remove_file(&file).unwrap();
    wait_for_error(&rules, Some(RulesErrorKind::File));
    assert_eq!(layer.policies()[0].quota().limit(), 3);
    fs::write(&file, of_limit(3)).unwrap();
    wait_for_error(&rules, None);
    assert_eq!(rules.version(), 2, "it has what is in force");
    fs::write(&file, of_limit(4)).unwrap();
    wait_for(&layer, 4);
}

/// Returns a file of two rules, and its first half, which is a file of one rule.
fn halves(limit: u64) -> (String, String) {
    let half = format!("rules:\n- {{name: a, quota: {limit} per minute, key: peer-ip}}\n");
    let whole = format!("{half}- {{name: b, quota: 5 per minute, key: peer-ip}}\n");
    (half, whole)
}

/// Returns how often rules came into force.
fn loaded(events: &Events) -> usize {
    events.0.lock().unwrap().iter().filter(|event| matches!(event, RulesEvent::Loaded { .. })).count()
}

#[test]
fn half_written_file_waits_while_its_writer_pauses() {
    let folder = Folder::new("halves");
    let file = folder.path("rules.yaml");
    fs::write(&file, "rules: []").unwrap();
    let rules = Rules::builder().reload_every(Duration::ZERO).read_file(&file).unwrap();
    let events = Events::default();
    let layer = layer(&rules).observer(events.clone());
    for limit in 2..100 {
        let (half, whole) = halves(limit);
        let before = loaded(&events);
        let began = tokio::time::Instant::now();
        fs::write(&file, half).unwrap();
        std::thread::sleep(Duration::from_millis(400)); // the writer pauses
        fs::write(&file, whole).unwrap();
        // The whole machine may have paused instead.
        let was_short = began.elapsed() < Duration::from_millis(900);
        let is_whole = || layer.policies().len() == 2 && layer.policies()[0].quota().limit() == limit;
        // A version is reported after the layers have it.
        let is_reported = || loaded(&events) as u64 == rules.version();
        let is_done = || is_whole() && is_reported();
        (0..6_000).take_while(|_| !is_done()).for_each(|_| std::thread::sleep(Duration::from_millis(10)));
        assert!(is_done(), "{:?} {:?}", rules.error(), events.0.lock().unwrap());
        if was_short {
            assert_eq!(loaded(&events), before + 1, "{:?}", events.0.lock().unwrap());
            return;
        }
    }
    panic!("the machine pauses all the time");
}

#[test]
fn file_that_lost_its_end_mark_is_incomplete() {
    let folder = Folder::new("mark");
    let file = folder.path("rules.yaml");
    fs::write(&file, of_limit(1)).unwrap();
    let rules = Rules::from_file(&file).unwrap();
    let layer = layer(&rules);
    let limit = || layer.policies()[0].quota().limit();
    fs::write(&file, format!("{}\n...\n", of_limit(2))).unwrap();
    rules.reload().unwrap();
    for cut in ["\n", "\n.", "\n..", "\n# ..."] {
        fs::write(&file, of_limit(3) + cut).unwrap();
        let error = rules.reload().unwrap_err();
        assert_eq!((error.kind(), limit()), (RulesErrorKind::Syntax, 2), "{cut:?}");
        assert!(error.to_string().contains("its last line is not `...`"), "{error}");
    }
    // A text is not written by and by, and the file keeps its mark.
    rules.replace(of_limit(4)).unwrap();
    assert!(rules.reload().is_err());
    assert_eq!(limit(), 4);
    fs::write(&file, format!("{}\r\n...\r\n\r\n", of_limit(5))).unwrap();
    rules.reload().unwrap();
    assert_eq!(limit(), 5);
}

#[cfg(unix)]
#[test]
fn what_is_no_file_is_refused_and_stops_no_reload() {
    let folder = Folder::new("pipe");
    let (file, pipe) = (folder.path("rules.yaml"), folder.path("pipe"));
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for other in [&pipe, &folder.0, &PathBuf::from("/dev/zero")] {
        let error = Rules::from_file(other).unwrap_err();
        assert_eq!(error.to_string(), format!("{}: it is not a file", other.display()));
        assert_eq!(error.file(), Some(other.as_path()));
    }
    let gone = folder.path("gone");
    let error = Rules::from_file(&gone).unwrap_err();
    let source = std::error::Error::source(&error).unwrap().downcast_ref::<std::io::Error>().unwrap();
    assert_eq!(error.to_string(), format!("{}: the file cannot be read: {source}", gone.display()));
    assert!(source.to_string().starts_with("No such file"), "{source}");
    assert_eq!(source.kind(), std::io::ErrorKind::NotFound);
    fs::File::create(folder.path("huge")).unwrap().set_len(1 << 40).unwrap();
    assert_eq!(Rules::from_file(folder.path("huge")).unwrap_err().kind(), RulesErrorKind::TooLarge);

    fs::write(&file, of_limit(1)).unwrap();
    let rules = Rules::builder().reload_every(Duration::ZERO).read_file(&file).unwrap();
    let layer = layer(&rules);
    fs::rename(&pipe, &file).unwrap();
    wait_for_error(&rules, Some(RulesErrorKind::File));
    fs::write(folder.path("new"), of_limit(2)).unwrap();
    fs::rename(folder.path("new"), &file).unwrap();
    wait_for(&layer, 2);
}

#[test]
fn events_and_errors_name_the_file() {
    let folder = Folder::new("named");
    let file = folder.path("rules.yaml");
    fs::write(&file, "rules: [{name: a}]").unwrap();
    let name = file.display().to_string();
    let error = Rules::from_file(&file).unwrap_err();
    assert!(error.to_string().starts_with(&format!("{name}:1:9: ")), "{error}");
    assert!(error.to_string().contains(&format!("\n{name}:1:9: a rule needs `key`")), "{error}");
    fs::write(&file, of_limit(1)).unwrap();
    let rules = Rules::from_file(&file).unwrap();
    let events = Events::default();
    let _layer = layer(&rules).observer(events.clone());
    fs::write(&file, "rules: []").unwrap();
    rules.reload().unwrap();
    fs::write(&file, "rules: {}").unwrap();
    let error = rules.reload().unwrap_err();
    assert_eq!(error.file(), Some(file.as_path()));
    let refused = RulesEvent::refused(error.to_string());
    assert!(error.to_string().starts_with(&format!("{name}:1:8: ")), "{error}");
    let loaded = RulesEvent::loaded(1, Some(name.into()), 0, "a is gone");
    assert_eq!(*events.0.lock().unwrap(), [loaded, refused]);
    assert_eq!(rules.replace("rules: {}").unwrap_err().file(), None);
}

pub(crate) type Interrupt = Box<dyn FnOnce() + Send>;

/// A limiter that does something while it is asked what it supports, once.
#[derive(Clone)]
pub(crate) struct Interrupted {
    pub(crate) limiter: MemoryLimiter,
    pub(crate) interrupt: Arc<Mutex<Option<Interrupt>>>,
}

impl Limiter for Interrupted {
    type Error = Infallible;
    type Future<T: Send + 'static> = Ready<Result<T, Infallible>>;

    fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, Infallible, Self::Future<Decision>> {
        self.limiter.take(charges)
    }

    fn peek(&self, charges: &[Charge<'_>]) -> Reply<Decision, Infallible, Self::Future<Decision>> {
        self.limiter.peek(charges)
    }

    fn refund(&self, refunds: Vec<Refund>) -> Reply<(), Infallible, Self::Future<()>> {
        self.limiter.refund(refunds)
    }

    fn reset(&self, policy: &Policy, key: &Key) -> Reply<(), Infallible, Self::Future<()>> {
        self.limiter.reset(policy, key)
    }

    fn supports(&self, quota: &Quota) -> Result<(), UnsupportedQuota> {
        let interrupt = self.interrupt.lock().unwrap().take();
        interrupt.into_iter().for_each(|interrupt| interrupt());
        self.limiter.supports(quota)
    }
}

#[test]
fn later_reading_of_the_file_holds_whichever_ends_first() {
    for (later, in_force) in [(of_limit(3), 3), ("rules: [".to_owned(), 1)] {
        let folder = Folder::new(&format!("later-{in_force}"));
        let file = folder.path("rules.yaml");
        fs::write(&file, of_limit(1)).unwrap();
        let rules = Rules::from_file(&file).unwrap();
        let interrupt = Arc::default();
        let limiter = Interrupted { limiter: memory(&ManualClock::new()), interrupt: Arc::clone(&interrupt) };
        let layer = rules.layer(limiter).unwrap();
        fs::write(&file, of_limit(2)).unwrap();
        // While these rules are compared with what the limiter supports, the file is written and read again.
        let (again, to, text) = (rules.clone(), file.clone(), later.clone());
        *interrupt.lock().unwrap() = Some(Box::new(move || {
            fs::write(&to, text).unwrap();
            let _ = again.reload();
        }));
        let _ = rules.reload();
        assert_eq!(layer.policies()[0].quota().limit(), in_force, "{later}");
        assert_eq!(rules.error().is_some(), later == "rules: [", "{later}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn push_while_a_layer_is_made_is_checked() {
    let folder = Folder::new("pushed");
    let fleet = Fleet::in_file(folder.path("settings")).await.unwrap();
    let rules = Rules::builder().fleet(&fleet, "rules").read_text(of_limit(1)).unwrap();
    let interrupt: Arc<Mutex<Option<Interrupt>>> = Arc::default();
    // The limiter has no room for this log.
    let pushed = "rules: [{name: a, quota: '1000000 per hour, sliding log', key: peer-ip}]";
    let (changed, runtime) = (fleet.clone(), tokio::runtime::Handle::current());
    *interrupt.lock().unwrap() = Some(Box::new(move || {
        let push = move || runtime.block_on(changed.change("bob", "", [FleetChange::rules("rules", pushed)]));
        std::thread::spawn(push).join().unwrap().unwrap();
    }));
    let memory = MemoryLimiter::builder().max_keys(100).build().unwrap();
    let layer = rules.layer(Interrupted { limiter: memory, interrupt }).unwrap();
    assert_eq!(layer.policies()[0].quota().limit(), 1);
    assert!(rules.error().unwrap().to_string().starts_with("bob pushed these rules in revision 1: 1:"));
}

#[test]
fn file_is_taken_although_a_limiter_panics_about_it_once() {
    let folder = Folder::new("panics");
    let file = folder.path("rules.yaml");
    fs::write(&file, of_limit(1)).unwrap();
    let rules = Rules::builder().reload_every(Duration::ZERO).read_file(&file).unwrap();
    let interrupt = Arc::default();
    let limiter = Interrupted { limiter: memory(&ManualClock::new()), interrupt: Arc::clone(&interrupt) };
    let layer = rules.layer(limiter).unwrap();
    *interrupt.lock().unwrap() = Some(Box::new(|| std::panic::resume_unwind(Box::new("the limiter panics"))));
    fs::write(&file, of_limit(2)).unwrap();
    let is_taken = || layer.policies()[0].quota().limit() == 2;
    (0..6_000).take_while(|_| !is_taken()).for_each(|_| std::thread::sleep(Duration::from_millis(10)));
    assert!(is_taken() && interrupt.lock().unwrap().is_none());
}

/// Waits until the rules have an error of this kind, or none.
fn wait_for_error(rules: &Rules, kind: Option<RulesErrorKind>) {
    for _ in 0..6_000 {
        if rules.error().map(|error| error.kind()) == kind {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("the error is {:?}, not {kind:?}", rules.error());
}

#[test]
fn replaced_rules_stay_until_their_file_changes() {
    let folder = Folder::new("replaced");
    let (file, other) = (folder.path("rules.yaml"), folder.path("other.yaml"));
    fs::write(&file, of_limit(1)).unwrap();
    fs::write(&other, of_limit(1)).unwrap();
    let watched = |path| Rules::builder().reload_every(Duration::ZERO).read_file(path).unwrap();
    let (rules, witness) = (watched(&file), watched(&other));
    let (layer, seen) = (layer(&rules), layer(&witness));
    rules.replace(of_limit(9)).unwrap();
    for limit in 2..4 {
        fs::write(&other, of_limit(limit)).unwrap();
        wait_for(&seen, limit); // the other thread had time as well
    }
    assert_eq!(layer.policies()[0].quota().limit(), 9);
    fs::write(&file, of_limit(2)).unwrap();
    wait_for(&layer, 2);
    rules.replace(of_limit(9)).unwrap();
    rules.reload().unwrap();
    assert_eq!(layer.policies()[0].quota().limit(), 2, "reloading reads the file whether it has changed or not");
}

#[cfg(unix)]
#[test]
fn file_behind_links_that_are_replaced_is_taken() {
    use std::os::unix::fs::symlink;
    // As Kubernetes mounts a ConfigMap: rules.yaml -> ..data/rules.yaml, and ..data -> ..1.
    let folder = Folder::new("links");
    for number in [1, 2] {
        fs::create_dir(folder.path(&format!("..{number}"))).unwrap();
        fs::write(folder.path(&format!("..{number}/rules.yaml")), of_limit(number)).unwrap();
    }
    symlink("..1", folder.path("..data")).unwrap();
    symlink("..data/rules.yaml", folder.path("rules.yaml")).unwrap();
    let rules = Rules::builder().reload_every(Duration::ZERO).read_file(folder.path("rules.yaml")).unwrap();
    let layer = layer(&rules);
    symlink("..2", folder.path("..data.new")).unwrap();
    fs::rename(folder.path("..data.new"), folder.path("..data")).unwrap();
    wait_for(&layer, 2);
}

#[test]
fn requests_are_counted_exactly_while_rules_are_replaced() {
    const LIMIT: u64 = 20_000;
    let text = |version: u64| {
        // Other rules come and go, and the order changes; the quota of `a` changes its burst only in words.
        let others: String = (0..version % 5)
            .map(|other| format!(" - {{name: o{other}, quota: 100000 per hour, key: global}}\n"))
            .collect();
        format!("rules:\n{others} - {{name: a, quota: {LIMIT} per hour, key: global}}\n")
    };
    let rules = Rules::from_text(text(0)).unwrap();
    let layer = layer(&rules);
    let (passed, done) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for nth in 0..LIMIT / 2 {
                    // The other thread may get the processor late.
                    while nth == LIMIT / 4 && rules.version() <= 2 {
                        std::thread::yield_now();
                    }
                    let response = layer.layer(tower::service_fn(answer)).oneshot(request("GET", "/", &[]));
                    passed.fetch_add(u64::from(at_once(response).unwrap().status().is_success()), Ordering::Relaxed);
                }
                done.store(true, Ordering::Relaxed);
            });
        }
        scope.spawn(|| {
            for version in 1.. {
                rules.replace(text(version)).unwrap();
                if done.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
    });
    assert_eq!(passed.load(Ordering::Relaxed), LIMIT);
    assert!(rules.version() > 2, "{}", rules.version());
}

#[test]
fn ten_thousand_rules_ask_only_those_that_match() {
    let asked = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&asked);
    let mut text = "rules:\n".to_owned();
    for number in 0..10_000 {
        text += &format!(
            " - {{name: r{number}, quota: 5 per minute, key: counted, match: {{path: '/p{}/{{id}}'}}}}\n",
            number / 3
        );
    }
    let builder = Rules::builder().key("counted", move |_| {
        counter.fetch_add(1, Ordering::Relaxed);
        1
    });
    let layer = layer(&builder.read_text(text).unwrap());
    let service = layer.layer(tower::service_fn(answer));
    for (path, expected) in [("/p7/x", 3), ("/p3332/x", 3), ("/p7", 0), ("/x", 0)] {
        let before = asked.load(Ordering::Relaxed);
        let response = at_once(service.clone().oneshot(request("GET", path, &[]))).unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(asked.load(Ordering::Relaxed) - before, expected, "{path}");
    }
}
