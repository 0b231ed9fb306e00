//! The status page: what it shows, and what it does for whom.

use std::net::IpAddr;
use std::time::Duration;

use axum::body::Body;
use http::{HeaderName, Request, Response, StatusCode};
use http_body_util::BodyExt;
use serde_json::Value;
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::clock::ManualClock;
use tower_ratelimit::limiter::{StoreErrorKind, StoreLoad, StoreLoadReader};
use tower_ratelimit::middleware::ModeSwitch;
use tower_ratelimit::observe::{LimiterEvent, Observer, Stats, StatsBuilder, StatusPage};
use tower_ratelimit::rules::Rules;
use tower_ratelimit::{Head, Key, MemoryLimiter, Mode, Quota, RateLimitLayer, Rule, key};

use crate::support::memory;

struct World {
    clock: ManualClock,
    stats: Stats,
    layer: RateLimitLayer<MemoryLimiter>,
    page: StatusPage,
    mode: ModeSwitch,
}

impl World {
    fn new() -> Self {
        Self::of(|stats| stats)
    }

    fn of(set_up: impl FnOnce(StatsBuilder) -> StatsBuilder) -> Self {
        let clock = ManualClock::new();
        // A layer's names are checked, and a key's are not.
        let reveal = |key: &Key| Some(format!("<b>\u{202e}{}", key.display()));
        let stats = set_up(Stats::builder().clock(clock.clone()).reveal(reveal)).build();
        let mode = ModeSwitch::new(Mode::Enforce);
        let client = Rule::new("client", Quota::per_minute(4)).unwrap().warn_at_percent(25).mode(&mode);
        let shadow = Rule::new("candidate", Quota::per_minute(2)).unwrap().mode(Mode::Shadow);
        let layer = RateLimitLayer::new(memory(&clock), client, key::peer_ip())
            .and(shadow, key::peer_ip())
            .observer(stats.clone());
        let page = StatusPage::new(stats.clone()).layer("api", &layer).switch("client", &mode);
        Self { clock, stats, layer, page, mode }
    }

    async fn send(&self, requests: usize) {
        let answer =
            |_: Request<Body>| std::future::ready(Ok::<_, std::convert::Infallible>(Response::new(Body::empty())));
        let service = self.layer.layer(service_fn(answer));
        for _ in 0..requests {
            let mut request = Request::get("/%3Ci%3E").header("x-request-id", "<id>").body(Body::empty()).unwrap();
            request.extensions_mut().insert(key::PeerAddr::from(IpAddr::from([192, 0, 2, 1])));
            service.clone().oneshot(request).await.unwrap();
        }
    }
}

async fn text(page: &StatusPage, request: Request<Body>) -> (StatusCode, String) {
    let response = page.clone().oneshot(request).await.unwrap();
    let (status, body) = (response.status(), response.into_body());
    (status, String::from_utf8(body.collect().await.unwrap().to_bytes().to_vec()).unwrap())
}

async fn json(page: &StatusPage) -> Value {
    let request = Request::get("/").header("accept", "application/json").body(Body::empty()).unwrap();
    serde_json::from_str(&text(page, request).await.1).unwrap()
}

fn form(fields: &'static str) -> http::request::Builder {
    let request = Request::post("/").header("content-type", "application/x-www-form-urlencoded");
    request.header("sec-fetch-site", "same-origin").header("x-form", fields)
}

async fn post(page: &StatusPage, fields: &'static str, accept: &str) -> (StatusCode, String) {
    text(page, form(fields).header("accept", accept).body(Body::from(fields)).unwrap()).await
}

#[tokio::test]
async fn page_shows_what_policies_did() {
    let world = World::new();
    world.send(6).await;
    world.clock.advance(std::time::Duration::from_secs(30));
    let shown = json(&world.page).await;
    let [candidate, client] = shown["policies"].as_array().unwrap().as_slice() else { panic!("{shown}") };
    // The one with more requests over its limit comes first.
    assert_eq!(
        (&candidate["name"], &candidate["mode"], &candidate["layers"][0]),
        (&"candidate".into(), &"shadow".into(), &"api".into())
    );
    assert_eq!(client["quotas"], serde_json::json!(["4 per minute, token bucket"]));
    let sums = |policy: &Value, span: &str| {
        ["allowed", "near", "over", "refused"].map(|field| policy[span][field].as_u64().unwrap())
    };
    for span in ["five_minutes", "hour"] {
        assert_eq!(sums(client, span), [4, 2, 2, 2], "{span}");
        // A request that is refused takes nothing from it.
        assert_eq!(sums(candidate, span)[2..], [4, 0], "{span}");
    }
    assert_eq!(client["last_refused_us_ago"], 30_000_000);
    assert_eq!((&shown["requests"]["limited"], &shown["requests"]["shadow_limited"]), (&2.into(), &2.into()));
    assert_eq!((&shown["layers"][0]["keys"], &shown["layers"][0]["name"]), (&2.into(), &"api".into()));
    assert_eq!(shown["most_limited"][0]["refusals"], 2);

    let (status, html) = text(&world.page, Request::get("/?refresh").body(Body::empty()).unwrap()).await;
    assert_eq!(status, StatusCode::OK);
    for part in
        ["4 per minute, token bucket", "33.3 %", ">0 %<", "30 s ago", "class=\"mode\">shadow", "http-equiv=\"refresh\""]
    {
        assert!(html.contains(part), "{part}");
    }
    assert!(html.contains("&lt;b&gt;\u{fffd}") && !html.contains("<b>\u{202e}"), "a key is no markup");
    assert!(!html.contains("<script"));
}

#[tokio::test]
async fn keys_that_use_most_are_shown_if_they_are_counted() {
    let world = World::new();
    world.send(3).await;
    assert!(json(&world.page).await["policies"][0]["most_used"].is_null());
    let world = World::of(|stats| stats.count_use(true));
    world.send(3).await;
    let shown = json(&world.page).await;
    let client = shown["policies"].as_array().unwrap().iter().find(|policy| policy["name"] == "client").unwrap();
    let used = &client["most_used"][0];
    assert_eq!((&used["units"], &used["name"]), (&3.into(), &"<b>\u{202e}192.0.2.1".into()));
    let (_, html) = text(&world.page, Request::get("/").body(Body::empty()).unwrap()).await;
    let (_, most_used) = html.split_once("<h2>Used most lately, before settlements</h2>").unwrap();
    assert!(most_used.contains("about 3<") && most_used.contains("192.0.2.1"), "{most_used}");
}

#[tokio::test]
async fn places_are_shown_while_they_are_held() {
    let world = World::new();
    let exports = Rule::new("exports", Quota::concurrent(3)).unwrap();
    let layer = RateLimitLayer::new(memory(&world.clock), exports, key::peer_ip()).observer(world.stats.clone());
    let page = world.page.clone().layer("exports", &layer);
    let answer =
        |_: Request<Body>| std::future::ready(Ok::<_, std::convert::Infallible>(Response::new(Body::from("slow"))));
    let mut held = Vec::new();
    for _ in 0..4 {
        let mut request = Request::new(Body::empty());
        request.extensions_mut().insert(key::PeerAddr::from(IpAddr::from([192, 0, 2, 1])));
        held.push(layer.layer(service_fn(answer)).oneshot(request).await.unwrap());
    }
    world.clock.advance(std::time::Duration::from_secs(20));
    held.remove(0);
    let shown = json(&page).await;
    let row = |name| shown["policies"].as_array().unwrap().iter().find(|policy| policy["name"] == name).unwrap();
    let (row, client) = (row("exports"), &row("client")["held"]);
    assert_eq!(
        (&row["held"], &row["held_p50_us"], &row["held_p99_us"]),
        (&2.into(), &30_000_000.into(), &30_000_000.into())
    );
    let most = &shown["most_held"][0];
    assert_eq!((&most["policy"], &most["units"], client), (&"exports".into(), &2.into(), &Value::Null));
    let (_, html) = text(&page, Request::get("/").body(Body::empty()).unwrap()).await;
    assert!(html.contains("<b>2</b><span>places held by requests in flight"), "{html}");
    assert!(html.contains("2 held now, by all keys · 99 % for up to 30s"), "{html}");
    let (_, most_held) = html.split_once("<h2>Hold most, now</h2>").unwrap();
    assert!(most_held.contains("data-of=\"places\">2</td>") && most_held.contains("&lt;b&gt;"), "{most_held}");
    held.clear();
    let (_, html) = text(&page, Request::get("/").body(Body::empty()).unwrap()).await;
    assert!(html.contains("0 held now") && !html.contains("Hold most, now"), "{html}");
}

#[tokio::test]
async fn recent_refusals_are_shown_and_beside_an_explanation() {
    let world = World::new();
    world.send(6).await;
    assert!(json(&world.page).await["recent_refusals"].is_null(), "they are not kept");
    let (_, html) = text(&world.page, Request::get("/").body(Body::empty()).unwrap()).await;
    assert!(!html.contains("Refused recently"));

    let world = World::of(|stats| {
        stats.max_recent_refusals(1_000).keep_paths(true).request_id(HeaderName::from_static("x-request-id"))
    });
    let (_, html) = text(&world.page, Request::get("/").body(Body::empty()).unwrap()).await;
    assert!(html.contains("No request was refused."), "{html}");
    world.send(6).await;
    world.clock.advance(std::time::Duration::from_secs(30));
    let shown = json(&world.page).await;
    let [refusal, _] = shown["recent_refusals"].as_array().unwrap().as_slice() else { panic!("{shown}") };
    let expected = serde_json::json!({
        "at": "2025-01-01T00:00:00Z", "us_ago": 30_000_000, "outcome": "limited", "policy": "client",
        "quota": "4 per minute, token bucket", "fingerprint": shown["most_limited"][0]["fingerprint"],
        "name": "<b>\u{202e}192.0.2.1", "cost": 1, "limit": 4, "remaining": 0, "wait": "after", "wait_us": 15_000_000,
        "request": "GET /%3Ci%3E", "request_id": "<id>", "network": null
    });
    assert_eq!(*refusal, expected);

    let (_, html) = text(&world.page, Request::get("/").body(Body::empty()).unwrap()).await;
    for part in ["30 s ago", "2025-01-01T00:00:00Z", "0 of 4", "15s", "GET /%3Ci%3E", "&lt;id&gt;"] {
        assert!(html.contains(part), "{part}: {html}");
    }
    assert!(!html.contains("<id>"), "an id is no markup");

    let explained = async |fields, accept| post(&world.page, fields, accept).await.1;
    let own: Value =
        serde_json::from_str(&explained("action=explain&client=192.0.2.1", "application/json").await).unwrap();
    assert_eq!(own[0]["recent_refusals"].as_array().unwrap().len(), 2);
    assert!(
        explained("action=explain&client=192.0.2.1", "text/html").await.contains("2 recent refusals under these keys")
    );
    let other: Value =
        serde_json::from_str(&explained("action=explain&client=192.0.2.2", "application/json").await).unwrap();
    assert_eq!(other[0]["recent_refusals"], serde_json::json!([]));
    assert!(!explained("action=explain&client=192.0.2.2", "text/html").await.contains("under these keys"));
}

#[tokio::test]
async fn answers_are_not_stored_nor_framed() {
    let world = World::new();
    for request in [
        Request::get("/").body(Body::empty()).unwrap(),
        Request::head("/").body(Body::empty()).unwrap(),
        Request::delete("/").body(Body::empty()).unwrap(),
        form("").body(Body::empty()).unwrap(),
    ] {
        let response = world.page.clone().oneshot(request).await.unwrap();
        let headers = response.headers();
        assert_eq!(
            (&headers["cache-control"], &headers["x-content-type-options"]),
            (&"no-store".parse().unwrap(), &"nosniff".parse().unwrap())
        );
        let csp = headers["content-security-policy"].to_str().unwrap();
        assert!(csp.contains("default-src 'none'") && csp.contains("frame-ancestors 'none'"), "{csp}");
    }
}

#[tokio::test]
async fn request_is_explained_and_takes_nothing() {
    let world = World::new();
    world.send(4).await;
    let fields = "action=explain&method=GET&uri=%2Fposts&client=192.0.2.1&headers=x-a%3A+%3Ci%3E";
    let (status, text) = post(&world.page, fields, "application/json").await;
    let explained: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((status, &explained[0]["layer"]), (StatusCode::OK, &"api".into()));
    assert_eq!(explained[0]["explanation"]["passes"], false);
    let (_, html) = post(&world.page, fields, "text/html").await;
    assert!(html.contains("client: charges 1 to 192.0.2.1") || html.contains("refused"), "{html}");
    assert!(html.contains("x-a: &lt;i&gt;"), "the form keeps what was asked");
    let (_, other) = post(&world.page, "action=explain&client=192.0.2.2", "application/json").await;
    assert_eq!(serde_json::from_str::<Value>(&other).unwrap()[0]["explanation"]["passes"], true);
    assert_eq!(world.stats.snapshot().policies().iter().map(|policy| policy.units()).sum::<u64>(), 6);
}

#[tokio::test]
async fn described_client_is_the_client_behind_any_proxies() {
    let networks = key::TrustedProxies::networks(["10.0.0.0/8"]).unwrap();
    for proxies in [networks, key::TrustedProxies::count(1).unwrap()] {
        let layer = RateLimitLayer::new(memory(&ManualClock::new()), Quota::per_hour(5), key::client_ip(proxies));
        let page = StatusPage::new(Stats::new()).layer("api", &layer);
        for (fields, client) in [
            ("action=explain&client=192.0.2.1", "192.0.2.1"),
            ("action=explain&client=10.0.0.9", "10.0.0.9"),
            ("action=explain&client=10.0.0.9&headers=x-forwarded-for%3A+192.0.2.7", "192.0.2.7"),
        ] {
            let (_, shown) = post(&page, fields, "application/json").await;
            let shown: Value = serde_json::from_str(&shown).unwrap();
            assert_eq!(shown[0]["explanation"]["rules"][0]["key"], client, "{fields}: {shown}");
        }
    }
}

#[tokio::test]
async fn wrong_description_is_shown_with_what_is_wrong() {
    let world = World::new();
    let fields = "action=explain&method=PUT&uri=posts%3Cb%3E&client=192.0.2.1";
    let (status, html) = post(&world.page, fields, "text/html").await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert!(html.contains("`posts&lt;b&gt;` is not a path or a URI: write it like `/posts?page=2`"), "{html}");
    assert!(html.contains("value=\"PUT\"") && html.contains("value=\"posts&lt;b&gt;\""), "the form keeps its fields");
    for accept in ["application/json", "*/*"] {
        let wrong = post(&world.page, fields, accept).await;
        assert_eq!(
            wrong,
            (StatusCode::BAD_REQUEST, "`posts<b>` is not a path or a URI: write it like `/posts?page=2`".into())
        );
    }
}

/// A user that authentication puts into requests.
#[derive(Clone)]
struct User {
    id: u64,
    pays: bool,
}

#[tokio::test]
async fn extension_that_is_stated_is_explained() {
    let world = World::new();
    let plan = |request: &Head<'_>| request.extensions.get::<User>().map_or(0, |user| usize::from(user.pays));
    let by_user = Rule::plans("user", [Quota::per_minute(1), Quota::per_minute(7)], plan).unwrap();
    let layer = RateLimitLayer::new(memory(&world.clock), by_user, key::extension(|user: &User| user.id));
    let read = |text: &str| Some(User { id: text.trim_end_matches('+').parse().ok()?, pays: text.ends_with('+') });
    let page = StatusPage::new(world.stats.clone()).layer("api", &layer).extension("user", |_| Some(0_u8));
    let page = page.extension("user", read);
    let explain = async |fields| {
        let (status, text) = post(&page, fields, "application/json").await;
        assert_eq!(status, StatusCode::OK, "{text}");
        serde_json::from_str::<Value>(&text).unwrap()[0]["explanation"].clone()
    };
    let explained = explain("action=explain&extension.user=42%2B").await;
    let (rule, passes) = (&explained["rules"][0], &explained["passes"]);
    assert_eq!((&rule["key"], &rule["statuses"][0]["limit"], passes), (&"42".into(), &7.into(), &true.into()));
    assert_eq!(explain("action=explain&extension.user=").await["rules"][0]["not_charged"], "key_missing");

    let wrong = post(&page, "action=explain&extension.user=bob", "*/*").await;
    assert_eq!(wrong, (StatusCode::BAD_REQUEST, "`bob` stands for no user".to_owned()));
    let (_, html) = post(&page, "action=explain&extension.user=%3Cb%3E", "text/html").await;
    let field = "<label>user<input name=\"extension.user\" value=\"&lt;b&gt;\"></label>";
    assert_eq!(html.matches(field).count(), 1, "{html}");
}

#[tokio::test]
async fn mode_is_switched_by_operators_only() {
    let world = World::new();
    let fields = "action=switch&name=client&mode=shadow";
    // A page without operators switches nothing.
    assert_eq!(post(&world.page, fields, "*/*").await.0, StatusCode::FORBIDDEN);
    let page = world.page.clone().operators(|_| Some("alice".to_owned()), |_| {});
    let foreign = form(fields).header("origin", "https://evil.example").body(Body::from(fields)).unwrap();
    let mut cross_site = form(fields).body(Body::from(fields)).unwrap();
    cross_site.headers_mut().insert("sec-fetch-site", "cross-site".parse().unwrap());
    assert_eq!(text(&page, cross_site).await.0, StatusCode::FORBIDDEN);
    assert_eq!(world.mode.get(), Mode::Enforce);
    let (mut own, html) = (foreign, "text/html".parse().unwrap()); // the browser says that it is of the same origin
    own.headers_mut().insert("accept", html);
    let response = page.clone().oneshot(own).await.unwrap();
    assert_eq!((response.status(), &response.headers()["location"]), (StatusCode::SEE_OTHER, &"?".parse().unwrap()));
    assert_eq!(world.mode.get(), Mode::Shadow);
    let (status, done) = post(&page, "action=switch&name=client&mode=enforce", "application/json").await;
    let done: Value = serde_json::from_str(&done).unwrap();
    assert_eq!((status, &done["actions"][0]["mode"]), (StatusCode::OK, &"enforce".into()));
    assert_eq!(json(&page).await["switches"]["client"], "enforce");
    let unknown = post(&page, "action=switch&name=%3Cb%3E&mode=shadow", "*/*").await;
    assert_eq!(unknown, (StatusCode::BAD_REQUEST, "there is no switch `<b>`".to_owned()));
}

#[tokio::test]
async fn form_of_any_size_is_refused_or_read() {
    let world = World::new();
    let large = form("").body(Body::from(vec![b'a'; 1 << 20])).unwrap();
    assert_eq!(text(&world.page, large).await.0, StatusCode::PAYLOAD_TOO_LARGE);
    let broken = Body::new(http_body_util::StreamBody::new(tokio_stream::iter([Err::<
        http_body::Frame<bytes::Bytes>,
        _,
    >(std::io::Error::other("gone"))])));
    assert_eq!(text(&world.page, form("").body(broken).unwrap()).await.0, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn rules_of_a_file_are_shown_with_their_version_and_error() {
    let world = World::new();
    let rules = Rules::from_text("rules: [{name: a, quota: 5/s, key: peer-ip}]").unwrap();
    let layer = rules.layer(memory(&world.clock)).unwrap();
    let page = StatusPage::new(world.stats.clone()).layer("file", &layer).rules(&rules);
    rules.replace("rules: [{name: b, quota: 5/s, key: peer-ip}]").unwrap();
    rules.replace("rules: [{name: <b>}]").unwrap_err();
    let shown = json(&page).await;
    assert_eq!((&shown["rules"]["version"], &shown["policies"][0]["name"]), (&1.into(), &"b".into()));
    assert!(shown["rules"]["error"].as_str().unwrap().starts_with("1:"), "{shown}");
    let hash = format!("{:012x}", rules.in_force().hash);
    assert_eq!(shown["rules"]["hash"], hash.as_str());
    assert!(shown["rules"]["loaded_at"].as_str().unwrap().ends_with('Z'), "{shown}");
    let (_, html) = text(&page, Request::get("/").body(Body::empty()).unwrap()).await;
    assert!(html.contains(&format!("<b>{hash}</b><span>rules in force since ")), "{html}");
    assert!(html.contains("Rules were refused, and others are in force.") && html.contains("&lt;b&gt;"), "{html}");
}

#[tokio::test]
async fn rules_of_an_observed_layer_are_shown_without_being_named() {
    let world = World::new();
    let rules = Rules::from_text("rules: [{name: a, quota: 5/s, key: peer-ip}]").unwrap();
    let layer = rules.layer(memory(&world.clock)).unwrap().observer(world.stats.clone());
    let page = StatusPage::new(world.stats.clone()).layer("file", &layer);
    let _service = layer.layer(());
    let hash = format!("{:012x}", rules.in_force().hash);
    let shown = json(&page).await;
    assert_eq!((&shown["rules"]["hash"], &shown["rules"]["error"]), (&hash.as_str().into(), &Value::Null));
    rules.replace("rules: [{name: <b>}]").unwrap_err();
    let shown = json(&page).await;
    assert_eq!(shown["rules"]["hash"], hash.as_str());
    assert!(shown["rules"]["error"].as_str().unwrap().starts_with("1:"), "{shown}");
    let (_, html) = text(&page, Request::get("/").body(Body::empty()).unwrap()).await;
    assert!(html.contains("Rules were refused, and others are in force.") && html.contains("&lt;b&gt;"), "{html}");
    rules.replace("rules: [{name: b, quota: 5/s, key: peer-ip}]").unwrap();
    assert!(json(&page).await["rules"]["error"].is_null());
}

#[tokio::test]
async fn error_of_checks_is_shown_until_they_recover() {
    let world = World::new();
    world.stats.on_limiter_event(&LimiterEvent::store_failed(StoreErrorKind::Unavailable, "a <read only> replica"));
    let page = async || text(&world.page, Request::get("/").body(Body::empty()).unwrap()).await.1;
    let html = page().await;
    assert!(html.contains("a &lt;read only&gt; replica"), "{html}");
    assert_eq!(json(&world.page).await["limiter"]["error"], "a <read only> replica");
    world.stats.on_limiter_event(&LimiterEvent::StoreRecovered);
    assert!(!page().await.contains("replica"));
    assert!(json(&world.page).await["limiter"]["error"].is_null());
}

#[tokio::test]
async fn errors_are_shown_by_how_many_checks_failed_so_lately() {
    let world = World::new();
    let fail = |kind, text: &str, checks| {
        world.stats.on_limiter_event(&LimiterEvent::store_failed(kind, text));
        for _ in 0..checks {
            world.stats.on_limiter_event(&LimiterEvent::store_checked(Duration::ZERO, Some(kind)));
        }
    };
    fail(StoreErrorKind::Overloaded, "a <moment> at the beginning", 2);
    fail(StoreErrorKind::Misconfigured, "a missing right", 30);
    fail(StoreErrorKind::Timeout, "the last one", 5);
    world.stats.on_limiter_event(&LimiterEvent::store_checked(Duration::ZERO, None));
    let page = async || text(&world.page, Request::get("/").body(Body::empty()).unwrap()).await.1;
    world.clock.advance(Duration::from_secs(5));
    let html = page().await;
    let shown = "<b>37 of 38 checks of the store failed in the last 15 s.</b>\n\
                 <b>30 misconfigured</b>, noted 5 s ago: a missing right\n\
                 <b>5 timeout</b>, noted 5 s ago: the last one\n\
                 <b>2 overloaded</b>, noted 5 s ago: a &lt;moment&gt; at the beginning</pre>";
    assert!(html.contains(shown), "{html}");
    let limiter = &json(&world.page).await["limiter"];
    assert_eq!(limiter["error"], "a missing right");
    assert_eq!((&limiter["newest"]["decided"], &limiter["newest"]["errors"]["timeout"]), (&1.into(), &5.into()));
    let first = serde_json::json!({"kind": "misconfigured", "error": "a missing right", "reported_us_ago": 5_000_000});
    assert_eq!(limiter["store_errors"][0], first);

    world.clock.advance(Duration::from_secs(15));
    fail(StoreErrorKind::Timeout, "later", 1);
    let html = page().await;
    assert!(html.contains("<b>1 of 1 checks of the store failed in the last 15 s.</b>"), "{html}");
    assert!(html.contains("<b>1 timeout</b>") && !html.contains("a missing right"), "{html}");
    world.clock.advance(Duration::from_secs(15));
    let html = page().await;
    assert!(html.contains("failed a moment ago.") && html.contains("a missing right"), "{html}");

    fail(StoreErrorKind::Timeout, "before it ended", 3);
    world.stats.on_limiter_event(&LimiterEvent::StoreRecovered);
    let html = page().await;
    let shown = "<b>3 of 3 checks of the store failed in the last 15 s. They succeed again.</b>\n\
                 <b>3 timeout</b>, noted 0 s ago: before it ended</pre>";
    assert!(html.contains(shown), "{html}");
    assert!(json(&world.page).await["limiter"]["error"].is_null());
    world.clock.advance(Duration::from_secs(20));
    assert!(!page().await.contains("checks of the store failed"));

    // The server goes down between two checks. The next checks fail at once, without an error of their own.
    world.stats.on_limiter_event(&LimiterEvent::store_down("cache:6379", "refused"));
    world.stats.on_limiter_event(&LimiterEvent::store_checked(Duration::ZERO, Some(StoreErrorKind::Timeout)));
    let html = page().await;
    assert!(html.contains("1 of 1 checks of the store failed in the last 15 s.</b>"), "{html}");
    assert!(html.contains("refused") && !html.contains("before it ended"), "{html}");
}

#[tokio::test]
async fn error_of_checks_is_renewed_while_they_fail() {
    let world = World::new();
    let page = async || text(&world.page, Request::get("/").body(Body::empty()).unwrap()).await.1;
    world.stats.on_limiter_event(&LimiterEvent::store_failed(StoreErrorKind::Overloaded, "a call takes 2ms"));
    world.clock.advance(Duration::from_secs(5));
    world.stats.on_limiter_event(&LimiterEvent::still_failing(StoreErrorKind::Overloaded, "a call takes 46ms"));
    let html = page().await;
    assert!(html.contains("a call takes 46ms") && !html.contains("a call takes 2ms"), "{html}");
}

#[tokio::test]
async fn restart_of_a_server_is_shown_with_its_time() {
    let world = World::new();
    world.stats.on_limiter_event(&LimiterEvent::scripts_forgotten("cache:6379", true));
    world.clock.advance(Duration::from_secs(90));
    let html = text(&world.page, Request::get("/").body(Body::empty()).unwrap()).await.1;
    assert!(html.contains("the last time 90 s ago: counts may be lost"), "{html}");
}

#[tokio::test]
async fn server_that_was_never_reached_is_shown_with_its_error() {
    let world = World::new();
    world.stats.on_limiter_event(&LimiterEvent::store_down("cache:6379", "connection <refused>"));
    let page = async || text(&world.page, Request::get("/").body(Body::empty()).unwrap()).await.1;
    let html = page().await;
    assert!(html.contains("<b>cache:6379</b> does not answer, or not steadily.\nconnection &lt;refused&gt;"), "{html}");
    assert!(!html.contains("of the store failed"), "{html}");
    let limiter = &json(&world.page).await["limiter"];
    assert_eq!(limiter["error"], "cache:6379 does not answer: connection <refused>");
    let down = serde_json::json!([{"server": "cache:6379", "error": "connection <refused>"}]);
    assert_eq!(limiter["servers_down"], down);
    // Checks that fail at once, because the server is down, have no error of their own.
    let failed = LimiterEvent::store_checked(Duration::ZERO, Some(StoreErrorKind::Unavailable));
    for _ in 0..45 {
        world.stats.on_limiter_event(&failed);
    }
    world.clock.advance(Duration::from_secs(5));
    let html = page().await;
    let shown = "<b>45 of 45 checks of the store failed in the last 15 s.</b>\n<b>45 unavailable</b></pre>";
    assert!(html.contains(shown), "{html}");
    world.stats.on_limiter_event(&LimiterEvent::store_up("cache:6379"));
    assert!(!page().await.contains("refused&gt;"));
    assert!(json(&world.page).await["limiter"]["error"].is_null());
}

/// Makes the reader of a store's load with this smoothed time of a call.
fn busy(call: Duration) -> StoreLoadReader {
    StoreLoadReader::new(move || {
        let mut load = StoreLoad::default();
        (load.waiting, load.calls_in_flight, load.shed) = (70, 2, 5);
        load.oldest_wait = Duration::from_millis(3);
        (load.call_time, load.deadline) = (Some(call), Some(Duration::from_millis(50)));
        (load.quickest_call, load.connections) = (Some(Duration::from_millis(2)), 7);
        Some(load)
    })
}

#[tokio::test]
async fn store_that_is_slow_is_shown_as_a_problem() {
    for (call_ms, class) in [(12, "tile"), (26, "tile bad")] {
        let world = World::new();
        world.stats.on_store(&busy(Duration::from_millis(call_ms)));
        let (_, html) = text(&world.page, Request::get("/").body(Body::empty()).unwrap()).await;
        let tile = format!(
            "<div class=\"{class}\"><b>{call_ms}.0 ms</b><span>for a call to the store, on average, of 50.0 ms until the deadline"
        );
        assert!(html.contains(&tile), "{html}");
        assert!(html.contains("until the deadline; the quickest lately took 2.00 ms</span>"), "{html}");
        assert!(html.contains("<b>7</b><span>connections made to servers of Redis so far</span>"), "{html}");
        let load = serde_json::json!({
            "waiting": 70, "oldest_wait_us": 3_000, "calls_in_flight": 2, "call_us": call_ms * 1_000,
            "quickest_call_us": 2_000, "deadline_us": 50_000, "shed": 5, "connections": 7,
        });
        assert_eq!(json(&world.page).await["limiter"]["store_load"], load);
    }
    assert!(json(&World::new().page).await["limiter"]["store_load"].is_null());
}

#[tokio::test]
async fn policy_of_several_layers_is_one_row() {
    let world = World::new();
    let other = Rule::new("client", Quota::per_hour(7)).unwrap();
    let other = RateLimitLayer::new(memory(&world.clock), other, key::peer_ip()).observer(world.stats.clone());
    let page = world.page.clone().layer("admin", &other);
    world.send(1).await;
    let shown = json(&page).await;
    let rows: Vec<&Value> =
        shown["policies"].as_array().unwrap().iter().filter(|row| row["name"] == "client").collect();
    let [row] = rows.as_slice() else { panic!("{shown}") };
    assert_eq!(row["layers"], serde_json::json!(["api", "admin"]));
    assert_eq!(row["quotas"], serde_json::json!(["4 per minute, token bucket", "7 per hour, token bucket"]));
    assert_eq!(row["hour"]["allowed"], 1);
}

#[tokio::test]
async fn page_of_fifty_layers_begins_with_the_policies() {
    let world = World::new();
    world.send(6).await;
    let mut page = StatusPage::new(world.stats.clone());
    for n in 0..49 {
        let own = Rule::new(format!("policy-{n}"), Quota::per_hour(7)).unwrap();
        let shared = Rule::new("client", Quota::per_minute(4)).unwrap();
        let layer = RateLimitLayer::new(memory(&world.clock), own, key::peer_ip()).and(shared, key::peer_ip());
        page = page.layer(format!("layer-{n}"), &layer);
    }
    let page = page.layer("api", &world.layer);
    let (_, html) = text(&page, Request::get("/").body(Body::empty()).unwrap()).await;
    let (tiles, below) = html.split_once("<h2>Policies</h2>").unwrap();
    assert!(
        tiles.contains("keys of api in memory, in ")
            && tiles.contains(" places, about 2.5 for each of max_keys")
            && tiles.contains("the fullest of 50 layers"),
        "{tiles}"
    );
    assert_eq!(tiles.matches("class=\"tile\"").count(), 3);
    assert!(below.contains("layer-0, layer-1, layer-2, layer-3 and 46 more"), "{below}");
    let (busy, idle) = below.split_once("<summary>49 policies without a request in the last hour</summary>").unwrap();
    assert!(busy.contains(">candidate<") && !busy.contains(">policy-0<") && idle.contains(">policy-0<"));
    let (_, list) = below.split_once("<summary>Keys in memory, of 50 layers</summary>").unwrap();
    assert!((0..49).all(|n| list.contains(&format!("<td class=\"name\">layer-{n}</td>"))));

    let (_, html) = post(&page, "action=explain&client=192.0.2.1", "text/html").await;
    let (refuse, pass) = html.split_once("<summary>49 layers that do not refuse it</summary>").unwrap();
    assert!(refuse.contains("<b>api</b> refused") && !refuse.contains("<b>layer-0</b>"), "{refuse}");
    assert!(pass.contains("<b>layer-0</b> passes"));
}

#[tokio::test]
async fn keys_of_a_large_limiter_are_counted_once_a_second() {
    let clock = ManualClock::new();
    let stats = Stats::builder().clock(clock.clone()).build();
    let limiter = MemoryLimiter::builder().max_keys(200_000).clock(clock.clone()).build().unwrap();
    let rule = Rule::new("client", Quota::per_hour(4)).unwrap();
    let layer = RateLimitLayer::new(limiter, rule, key::header("key")).observer(stats.clone());
    let page = StatusPage::new(stats).layer("api", &layer);
    let keys = async || json(&page).await["layers"][0]["keys"].as_u64().unwrap();
    let answer = |_: Request<Body>| std::future::ready(Ok::<_, std::convert::Infallible>(Response::new(Body::empty())));
    for (key, waits_ms, shown) in [("a", 0, 1), ("b", 999, 1), ("c", 1, 3)] {
        let request = Request::get("/").header("key", key).body(Body::empty()).unwrap();
        layer.layer(service_fn(answer)).oneshot(request).await.unwrap();
        clock.advance(Duration::from_millis(waits_ms));
        assert_eq!(keys().await, shown, "{key}");
    }
}

#[tokio::test]
async fn page_of_ten_thousand_rules_is_bounded() {
    let world = World::new();
    let rule = |n| format!("  - {{name: rule-{n}, quota: 5/s, key: peer-ip, match: {{path: /{n}}}}}\n");
    let rules = Rules::from_text((0..10_000).fold("rules:\n".to_owned(), |text, n| text + &rule(n))).unwrap();
    let layer = rules.layer(memory(&world.clock)).unwrap();
    let page = StatusPage::new(world.stats.clone()).layer("file", &layer);
    let shown = json(&page).await;
    assert_eq!((shown["policies"].as_array().unwrap().len(), &shown["more_policies"]), (200, &9_800.into()));
}
