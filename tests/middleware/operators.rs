//! Operators act on the status page: on which keys, who may, and what is reported.

use std::convert::Infallible;
use std::future::{Future, pending};
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};
use std::time::Duration;

use axum::body::Body;
use http::{Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use serde_json::Value;
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::clock::ManualClock;
use tower_ratelimit::limiter::{Charge, Decision, Limiter, Refund, Reply};
use tower_ratelimit::middleware::{ModeSwitch, Overrides};
use tower_ratelimit::observe::{ActionKind, OperatorAction, Stats, StatusPage};
use tower_ratelimit::rules::Rules;
use tower_ratelimit::{Head, Key, MemoryLimiter, Mode, Policy, Quota, RateLimitLayer, Rule, key};

use crate::support::{Trouble, memory};

/// The key of the client that is refused. The page must not show it.
const SECRET: &str = "secret-of-alice";

/// The sum of its resets.
#[derive(Clone, Copy)]
enum Resets {
    Fail = 1,
    Hang,
}

/// A limiter in memory behind a connection that can break.
#[derive(Clone)]
struct Remote(MemoryLimiter, Arc<AtomicU8>);

impl Remote {
    fn set(&self, resets: Resets) {
        self.1.store(resets as u8, Ordering::Relaxed);
    }

    fn answer<T>(&self, answer: T) -> Result<T, Trouble> {
        if self.1.load(Ordering::Relaxed) == Resets::Fail as u8 { Err(Trouble) } else { Ok(answer) }
    }
}

fn now<T>(reply: Reply<T, Infallible, std::future::Ready<Result<T, Infallible>>>) -> T {
    match reply {
        Reply::Now(Ok(answer)) => answer,
        _ => unreachable!("a limiter in memory answers now"),
    }
}

impl Limiter for Remote {
    type Error = Trouble;
    type Future<T: Send + 'static> = Pin<Box<dyn Future<Output = Result<T, Trouble>> + Send>>;

    fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, Trouble, Self::Future<Decision>> {
        Reply::Now(self.answer(now(self.0.take(charges))))
    }

    fn peek(&self, charges: &[Charge<'_>]) -> Reply<Decision, Trouble, Self::Future<Decision>> {
        Reply::Now(self.answer(now(self.0.peek(charges))))
    }

    fn refund(&self, refunds: Vec<Refund>) -> Reply<(), Trouble, Self::Future<()>> {
        now(self.0.refund(refunds));
        Reply::Now(Ok(()))
    }

    fn reset(&self, policy: &Policy, key: &Key) -> Reply<(), Trouble, Self::Future<()>> {
        if self.1.load(Ordering::Relaxed) == Resets::Hang as u8 {
            return Reply::Later(Box::pin(pending()));
        }
        let answer = self.answer(());
        if answer.is_ok() {
            now(self.0.reset(policy, key));
        }
        Reply::Now(answer)
    }
}

struct World {
    clock: ManualClock,
    limiter: Remote,
    layer: RateLimitLayer<Remote>,
    page: StatusPage,
    mode: ModeSwitch,
    audit: Arc<Mutex<Vec<OperatorAction>>>,
}

/// Names the operator as a login in front of the page would.
fn who(request: &Head<'_>) -> Option<String> {
    request.headers.get("operator").map(|name| String::from_utf8_lossy(name.as_bytes()).into_owned())
}

impl World {
    fn new() -> Self {
        let clock = ManualClock::new();
        let stats = Stats::builder().clock(clock.clone()).max_recent_refusals(100).count_use(true).build();
        let limiter = Remote(memory(&clock), Arc::default());
        let minute = Duration::from_secs(60);
        let mode = ModeSwitch::new(Mode::Enforce);
        let client = Rule::new("client", Quota::per_minute(4)).unwrap();
        let client = client.block("client-block", Quota::block(2, minute, 60 * minute).unwrap()).unwrap();
        let day = Rule::new("day", Quota::fixed_window(10, 1_440 * minute).unwrap()).unwrap();
        let day = day.overage("day-over", Quota::meter(1_000, 31 * 1_440 * minute).unwrap()).unwrap();
        let layer = RateLimitLayer::new(limiter.clone(), client.mode(&mode), key::header("x-api-key"))
            .and(day, key::peer_ip())
            .observer(stats.clone());
        let audit: Arc<Mutex<Vec<OperatorAction>>> = Arc::default();
        let audited = Arc::clone(&audit);
        let page = StatusPage::new(stats)
            .layer("api", &layer)
            .switch("client", &mode)
            .operators(who, move |action| audited.lock().unwrap().push(action.clone()));
        Self { clock, limiter, layer, page, mode, audit }
    }

    /// Sends requests of the client. Returns how many passed.
    async fn send(&self, requests: usize) -> usize {
        let answer = |_: Request<Body>| std::future::ready(Ok::<_, Infallible>(Response::new(Body::empty())));
        let service = self.layer.layer(service_fn(answer));
        let mut passed = 0;
        for _ in 0..requests {
            let mut request = Request::get("/").header("x-api-key", SECRET).body(Body::empty()).unwrap();
            request.extensions_mut().insert(key::PeerAddr::from(IpAddr::from([192, 0, 2, 1])));
            let response = service.clone().oneshot(request).await.unwrap();
            passed += usize::from(response.status() == StatusCode::OK);
        }
        passed
    }

    /// Returns the fingerprint that the page shows for the key that was refused most.
    async fn fingerprint(&self) -> String {
        let request = Request::get("/").header("accept", "application/json").body(Body::empty()).unwrap();
        let shown: Value = serde_json::from_str(&text(&self.page, request).await.1).unwrap();
        shown["most_limited"][0]["fingerprint"].as_str().unwrap().to_owned()
    }

    /// Explains the key with this fingerprint for an operator. Returns the token to act on it.
    async fn token(&self, operator: &str, fingerprint: &str) -> String {
        let (status, explained) = self.post(operator, &format!("action=explain&fingerprint={fingerprint}")).await;
        assert_eq!(status, StatusCode::OK, "{explained}");
        explained[0]["token"].as_str().unwrap().to_owned()
    }

    async fn post(&self, operator: &str, fields: &str) -> (StatusCode, Value) {
        let (status, text) = text(&self.page, form(operator, fields)).await;
        (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
    }

    fn audited(&self) -> Vec<String> {
        self.audit.lock().unwrap().drain(..).map(|action| action.to_string()).collect()
    }
}

fn form(operator: &str, fields: &str) -> Request<Body> {
    let request = Request::post("/").header("content-type", "application/x-www-form-urlencoded");
    let request = if operator.is_empty() { request } else { request.header("operator", operator) };
    request.header("accept", "application/json").body(Body::from(fields.to_owned())).unwrap()
}

async fn text(page: &StatusPage, request: Request<Body>) -> (StatusCode, String) {
    let response = page.clone().oneshot(request).await.unwrap();
    let (status, body) = (response.status(), response.into_body());
    (status, String::from_utf8(body.collect().await.unwrap().to_bytes().to_vec()).unwrap())
}

#[tokio::test]
async fn key_is_reset_by_its_fingerprint() {
    let world = World::new();
    assert_eq!(world.send(6).await, 4);
    let fingerprint = world.fingerprint().await;
    let (_, explained) = world.post("alice", &format!("action=explain&fingerprint={fingerprint}")).await;
    let [client, block] = explained[0]["states"].as_array().unwrap().as_slice() else { panic!("{explained}") };
    let expected = serde_json::json!({
        "policy": "client", "quota": "4 per minute, token bucket", "fingerprint": fingerprint, "name": null,
        "blocked": null, "used": 4, "limit": 4, "remaining": 0, "reset_after_us": 60_000_000, "wait": "after",
        "wait_us": 15_000_000
    });
    assert_eq!(*client, expected);
    assert_eq!((&block["policy"], &block["blocked"]), (&"client-block".into(), &true.into()));
    assert_eq!(block["wait_us"], 3_600_000_000_u64);
    assert_eq!(explained[0]["recent_refusals"].as_array().unwrap().len(), 2);

    let token = explained[0]["token"].as_str().unwrap();
    let (status, done) = world.post("alice", &format!("action=reset&token={token}")).await;
    assert_eq!((status, done["actions"].as_array().unwrap().len()), (StatusCode::OK, 2));
    assert_eq!(world.send(6).await, 4);
    let at = "2025-01-01T00:00:00Z alice: reset";
    assert_eq!(
        world.audited(),
        [
            format!("{at} client of api for key {fingerprint}: done"),
            format!("{at} client-block of api for key {fingerprint}: done")
        ]
    );
}

#[tokio::test]
async fn block_is_opened_and_what_is_used_stays_used() {
    let world = World::new();
    world.send(6).await;
    let fingerprint = world.fingerprint().await;
    let token = world.token("alice", &fingerprint).await;
    world.post("alice", &format!("action=unblock&token={token}")).await;
    assert_eq!(world.send(1).await, 0);
    world.clock.advance(Duration::from_secs(15));
    assert_eq!(world.send(1).await, 1, "it is not blocked");
    let action = world.audit.lock().unwrap()[0].clone();
    assert_eq!(
        (action.kind(), action.layer(), action.policy()),
        (ActionKind::Unblock, Some("api"), Some("client-block"))
    );
    assert_eq!((action.fingerprint(), action.error()), (Some(fingerprint.as_str()), None));
}

#[tokio::test]
async fn described_request_is_reset_under_the_policies_that_are_named() {
    let world = World::new();
    assert_eq!(world.send(6).await, 4);
    let fields = format!("action=explain&client=192.0.2.1&headers=x-api-key%3A{SECRET}");
    let explained = world.post("alice", &fields).await.1;
    let states = explained[0]["states"].as_array().unwrap();
    let names: Vec<&str> = states.iter().map(|state| state["policy"].as_str().unwrap()).collect();
    assert_eq!(names, ["client", "client-block", "day", "day-over"]);
    let token = explained[0]["token"].as_str().unwrap();
    for (fields, wrong) in [
        ("policy=other", "no policy `other` was explained: take `client`, `client-block`, `day`"),
        ("policy=day-over", "no policy `day-over` was explained: take `client`, `client-block`, `day`"),
    ] {
        let refused = world.post("alice", &format!("action=reset&token={token}&{fields}")).await;
        assert_eq!(refused, (StatusCode::BAD_REQUEST, wrong.into()));
    }
    let no_block = world.post("alice", &format!("action=unblock&token={token}&policy=client")).await;
    assert_eq!(no_block.0, StatusCode::BAD_REQUEST);
    let fields = format!("action=reset&token={token}&policy=client&policy=client-block");
    assert_eq!(world.post("alice", &fields).await.0, StatusCode::OK, "what was wrong used no token up");
    assert_eq!(world.send(6).await, 4);
    let explained = world.post("alice", "action=explain&client=192.0.2.1&headers=x-api-key%3Aother").await.1;
    assert_eq!(explained[0]["states"][2]["remaining"], 2, "the day was not reset");
}

#[tokio::test]
async fn meters_are_kept() {
    let world = World::new();
    let stats = Stats::builder().count_use(true).build();
    let meter = Quota::meter(1_000, Duration::from_secs(86_400)).unwrap();
    let rule = Rule::new("day", Quota::per_hour(2)).unwrap().overage("over", meter).unwrap();
    let layer = RateLimitLayer::new(world.limiter.clone(), rule, key::header("x-api-key")).observer(stats.clone());
    let page = StatusPage::new(stats).layer("paid", &layer).operators(who, |_| {});
    let world = World { layer, page, ..world };
    assert_eq!(world.send(5).await, 5);
    let fields = format!("action=explain&headers=x-api-key%3A{SECRET}");
    let token = world.post("alice", &fields).await.1[0]["token"].as_str().unwrap().to_owned();
    let done = world.post("alice", &format!("action=reset&token={token}")).await.1;
    assert_eq!((&done["actions"][0]["policy"], &done["actions"][1]), (&"day".into(), &Value::Null));
    let states = &world.post("alice", &fields).await.1[0]["states"];
    assert_eq!(
        (&states[0]["remaining"], &states[1]["policy"], &states[1]["remaining"]),
        (&2.into(), &"over".into(), &997.into())
    );
}

#[tokio::test]
async fn only_operators_act() {
    let world = World::new();
    world.send(6).await;
    let fingerprint = world.fingerprint().await;
    let explained = world.post("", &format!("action=explain&fingerprint={fingerprint}")).await.1;
    assert_eq!((&explained[0]["token"], &explained[0]["states"][0]["remaining"]), (&Value::Null, &0.into()));
    let token = world.token("alice", &fingerprint).await;
    for operator in ["", " "] {
        for fields in [format!("action=reset&token={token}"), "action=switch&name=client&mode=shadow".to_owned()] {
            let (status, message) = world.post(operator, &fields).await;
            assert_eq!(status, StatusCode::FORBIDDEN);
            assert!(message.as_str().unwrap().starts_with("you may not act here"), "{message}");
        }
    }
    assert_eq!(world.post("bob", &format!("action=reset&token={token}")).await.0, StatusCode::CONFLICT);
    assert!(world.audited().is_empty());
    assert_eq!((world.mode.get(), world.send(1).await), (Mode::Enforce, 0));
    let request = |operator: &str| Request::get("/").header("operator", operator).body(Body::empty()).unwrap();
    assert!(text(&world.page, request("")).await.1.matches("value=\"shadow\"").next().is_none());
    assert!(text(&world.page, request("alice")).await.1.matches("value=\"shadow\"").next().is_some());
}

#[tokio::test]
async fn column_of_requests_is_there_only_if_requests_are_kept() {
    for keeps in [false, true] {
        let world = World::new();
        let stats = Stats::builder().max_recent_refusals(100).keep_paths(keeps).build();
        let layer = world.layer.clone().observer(stats.clone());
        let world = World { page: StatusPage::new(stats).layer("api", &layer), layer, ..world };
        world.send(6).await;
        let html = text(&world.page, Request::get("/").body(Body::empty()).unwrap()).await.1;
        assert!(html.contains("<th>refused by</th>"), "a request was refused");
        assert_eq!(["<th>request</th>", "<td class=\"request\">"].map(|part| html.contains(part)), [keeps; 2]);
    }
}

#[tokio::test]
async fn page_without_operators_changes_nothing_and_keeps_no_key() {
    let world = World::new();
    let stats = Stats::builder().max_recent_refusals(100).build();
    let layer = world.layer.clone().observer(stats.clone());
    let page = StatusPage::new(stats.clone()).layer("api", &layer).switch("client", &world.mode);
    let world = World { layer, page, ..world };
    world.send(6).await;
    let fingerprint = world.fingerprint().await;
    let explained = world.post("alice", &format!("action=explain&fingerprint={fingerprint}")).await;
    assert_eq!(explained.0, StatusCode::NOT_FOUND);
    for fields in ["action=reset&token=0", "action=unblock", "action=switch&name=client&mode=shadow"] {
        let (status, message) = world.post("alice", fields).await;
        assert_eq!(status, StatusCode::FORBIDDEN);
        assert!(message.as_str().unwrap().contains("`StatusPage::operators`"), "{message}");
    }
    let explained = world.post("alice", "action=explain&client=192.0.2.1&headers=x-api-key%3Aa").await.1;
    assert_eq!(explained[0]["token"], Value::Null);
    assert_eq!(world.mode.get(), Mode::Enforce);
}

#[tokio::test]
async fn token_holds_once_and_for_five_minutes() {
    let world = World::new();
    world.send(6).await;
    let fingerprint = world.fingerprint().await;
    let token = world.token("alice", &fingerprint).await;
    let reset = async |token: &str| world.post("alice", &format!("action=reset&token={token}")).await.0;
    let mut changed = token.clone();
    changed.replace_range(31.., if token.ends_with('0') { "1" } else { "0" });
    assert_eq!(reset(&changed).await, StatusCode::CONFLICT);
    assert_eq!(reset(&token).await, StatusCode::OK);
    assert_eq!(reset(&token).await, StatusCode::CONFLICT);
    let (first, second) = (world.token("alice", &fingerprint).await, world.token("bob", &fingerprint).await);
    world.clock.advance(Duration::from_secs(299));
    assert_eq!(reset(&first).await, StatusCode::OK);
    world.clock.advance(Duration::from_secs(1));
    assert_eq!(world.post("bob", &format!("action=reset&token={second}")).await.0, StatusCode::CONFLICT);
}

#[tokio::test]
async fn two_operators_act_at_once_and_both_are_reported() {
    let world = World::new();
    world.send(6).await;
    let fingerprint = world.fingerprint().await;
    let (alice, bob) = (world.token("alice", &fingerprint).await, world.token("bob", &fingerprint).await);
    let (alice, bob) = (format!("action=reset&token={alice}"), format!("action=unblock&token={bob}"));
    let (alice, bob) = tokio::join!(world.post("alice", &alice), world.post("bob", &bob));
    assert_eq!((alice.0, bob.0), (StatusCode::OK, StatusCode::OK));
    assert_eq!(world.audited().len(), 3);
    assert_eq!(world.send(6).await, 4);
    let request = Request::get("/").header("accept", "application/json").body(Body::empty()).unwrap();
    let shown: Value = serde_json::from_str(&text(&world.page, request).await.1).unwrap();
    let who: Vec<&str> =
        shown["actions"].as_array().unwrap().iter().map(|action| action["operator"].as_str().unwrap()).collect();
    assert_eq!(who, ["bob", "alice", "alice"], "the latest first");
}

#[tokio::test]
async fn other_sites_and_other_methods_do_not_act() {
    let world = World::new();
    world.send(6).await;
    let token = world.token("alice", &world.fingerprint().await).await;
    let fields = format!("action=reset&token={token}");
    for (name, value) in
        [("sec-fetch-site", "cross-site"), ("sec-fetch-site", "same-site"), ("origin", "https://evil.example")]
    {
        let mut request = form("alice", &fields);
        request.headers_mut().insert(name, value.parse().unwrap());
        let response = world.page.clone().oneshot(request).await.unwrap();
        assert_eq!(response.status(), StatusCode::FORBIDDEN, "{name}: {value}");
        assert!(!response.headers().contains_key("access-control-allow-origin"));
        assert_eq!(response.headers()["cache-control"], "no-store");
    }
    for method in [Method::GET, Method::HEAD, Method::PUT, Method::DELETE, Method::OPTIONS, Method::PATCH] {
        let mut request = form("alice", &fields);
        *request.method_mut() = method;
        *request.uri_mut() = format!("/?{fields}").parse().unwrap();
        let response = world.page.clone().oneshot(request).await.unwrap();
        assert!(!response.headers().contains_key("access-control-allow-origin"));
    }
    let mut json = form("alice", &fields);
    json.headers_mut().insert("content-type", "text/plain".parse().unwrap());
    assert_eq!(text(&world.page, json).await.0, StatusCode::UNSUPPORTED_MEDIA_TYPE);
    assert!(world.audited().is_empty());
    assert_eq!(world.send(1).await, 0);
    assert_eq!(world.post("alice", &fields).await.0, StatusCode::OK);
}

#[tokio::test]
async fn site_that_points_its_name_here_does_not_act() {
    let world = World::new();
    let listed = world.page.clone().hosts(["limits.example"]);
    let sent = async |page: &StatusPage, host: &str| {
        let mut request = form("alice", "action=switch&name=client&mode=shadow");
        request.headers_mut().insert("host", host.parse().unwrap());
        request.headers_mut().insert("sec-fetch-site", "same-origin".parse().unwrap());
        text(page, request).await
    };
    for page in [&world.page, &listed] {
        let (status, answer) = sent(page, "attacker.example:3001").await;
        assert!([403, 421].contains(&status.as_u16()), "{status} {answer}");
        assert_eq!(world.mode.get(), Mode::Enforce);
    }
    let (status, answer) = sent(&world.page, "limits.example").await;
    assert_eq!((status, answer.contains("`StatusPage::hosts`")), (StatusCode::FORBIDDEN, true), "{answer}");
    // A person sees why the page offers nothing.
    let request = Request::get("/").header("host", "limits.example").header("sec-fetch-site", "none");
    let request = request.header("operator", "alice").header("accept", "text/html").body(Body::empty()).unwrap();
    let (status, page) = text(&world.page, request).await;
    assert!(status == StatusCode::OK && page.contains("`StatusPage::hosts`") && !page.contains("you act as"), "{page}");
    for (page, host) in [(&world.page, "127.0.0.1:3001"), (&world.page, "localhost"), (&listed, "limits.example:8443")]
    {
        world.mode.set(Mode::Enforce);
        let (status, answer) = sent(page, host).await;
        assert!(status.is_success() || status.is_redirection(), "{host}: {status} {answer}");
        assert_eq!(world.mode.get(), Mode::Shadow, "{host}");
    }
    let reads = Request::get("/").header("host", "attacker.example").body(Body::empty()).unwrap();
    assert_eq!(text(&listed, reads).await.0, StatusCode::MISDIRECTED_REQUEST);
}

#[tokio::test]
async fn action_that_fails_says_so() {
    let world = World::new();
    world.send(6).await;
    let fingerprint = world.fingerprint().await;
    let token = world.token("alice", &fingerprint).await;
    world.limiter.set(Resets::Fail);
    let (status, done) = world.post("alice", &format!("action=reset&token={token}")).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(done["actions"][0]["error"], "the store is away: the cable is cut");
    assert!(world.audited()[0].ends_with("failed: the store is away: the cable is cut"));
    let explained = world.post("alice", &format!("action=explain&fingerprint={fingerprint}")).await.1;
    assert_eq!(explained[0]["failure"], "the store is away: the cable is cut");

    // A browser sees it on the page.
    let token = explained[0]["token"].as_str().unwrap();
    let mut request = form("alice", &format!("action=reset&token={token}"));
    request.headers_mut().insert("accept", "text/html".parse().unwrap());
    let (status, html) = text(&world.page, request).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(html.contains("Not done.") && html.contains("the cable is cut"), "{html}");
}

#[tokio::test]
async fn action_that_is_cut_off_is_reported() {
    let world = World::new();
    world.send(6).await;
    let token = world.token("alice", &world.fingerprint().await).await;
    world.limiter.set(Resets::Hang);
    let fields = format!("action=reset&token={token}");
    let mut answer = Box::pin(world.post("alice", &fields));
    let polled = answer.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(polled.is_pending());
    assert!(world.audited().is_empty());
    drop(answer);
    let [line] = world.audited().try_into().unwrap();
    assert!(
        line.ends_with("failed: the action was cut off, and may have taken effect: look at the page again"),
        "{line}"
    );
}

#[tokio::test]
async fn audit_that_panics_hides_nothing() {
    let world = World::new();
    let stats = Stats::new();
    let layer = world.layer.clone().observer(stats.clone());
    let page = StatusPage::new(stats).layer("api", &layer).operators(who, |_| panic!("the disk is full"));
    let world = World { layer, page, ..world };
    world.send(6).await;
    let token = world.token("alice", &world.fingerprint().await).await;
    let (status, done) = world.post("alice", &format!("action=reset&token={token}")).await;
    assert_eq!((status, &done["actions"][0]["error"]), (StatusCode::OK, &Value::Null));
    assert_eq!(world.send(6).await, 4);
}

#[tokio::test]
async fn input_of_any_form_is_refused_or_shown_as_text() {
    let world = World::new();
    world.send(6).await;
    let fingerprint = world.fingerprint().await;
    let operator = format!("al\u{eb}x<b>{}", "x".repeat(500));
    let (_, explained) = world.post(&operator, &format!("action=explain&fingerprint={fingerprint}")).await;
    let token = explained[0]["token"].as_str().unwrap();
    for token in ["", "+", "-1", "%00", "%ff%fe", "\u{1f511}", &"f".repeat(5_000), &format!("{token}0")] {
        let refused = world.post(&operator, &format!("action=reset&token={token}")).await.0;
        assert_eq!(refused, StatusCode::CONFLICT, "{token}");
    }
    for fingerprint in ["0", "zzzzzzzz", "%F0%9F%94%91", "%3Cb%3E%1B%5B2J", &"0".repeat(9_000)] {
        let (status, message) = world.post(&operator, &format!("action=explain&fingerprint={fingerprint}")).await;
        assert_eq!(status, StatusCode::NOT_FOUND);
        assert!(!message.as_str().unwrap().contains(char::is_control));
    }
    let large = "a".repeat(1 << 20);
    assert_eq!(world.post(&operator, &large).await.0, StatusCode::PAYLOAD_TOO_LARGE);
    assert_eq!(world.post(&operator, &format!("action=reset&token={token}")).await.0, StatusCode::OK);
    assert_eq!(world.audit.lock().unwrap()[0].operator().len(), 128);
    let html = text(&world.page, Request::get("/").body(Body::empty()).unwrap()).await.1;
    assert!(html.contains("x&lt;b&gt;xx") && !html.contains("<b>xx"));
}

#[tokio::test]
async fn key_that_left_the_lists_is_not_found() {
    let world = World::new();
    world.send(6).await;
    let fingerprint = world.fingerprint().await;
    let stats = Stats::builder().clock(world.clock.clone()).build();
    let layer = world.layer.clone().observer(stats.clone());
    let page = StatusPage::new(stats).layer("api", &layer).operators(who, |_| {});
    let later = World { layer, page, ..world };
    let explained = later.post("alice", &format!("action=explain&fingerprint={fingerprint}")).await;
    assert_eq!(explained.0, StatusCode::NOT_FOUND, "of another process, or before a restart");
    later.send(9).await;
    let own = later.fingerprint().await;
    later.clock.advance(Duration::from_secs(3_600));
    let (status, message) = later.post("alice", &format!("action=explain&fingerprint={own}")).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert!(message.as_str().unwrap().ends_with("explain a request of the customer"), "{message}");
}

#[tokio::test]
async fn page_shows_no_key() {
    let world = World::new();
    world.send(6).await;
    let fingerprint = world.fingerprint().await;
    let token = world.token("alice", &fingerprint).await;
    let mut explain = form("alice", &format!("action=explain&fingerprint={fingerprint}"));
    let mut shown =
        vec![text(&world.page, form("alice", &format!("action=explain&fingerprint={fingerprint}"))).await.1];
    explain.headers_mut().insert("accept", "text/html".parse().unwrap());
    shown.push(text(&world.page, explain).await.1);
    shown.push(text(&world.page, form("alice", &format!("action=reset&token={token}"))).await.1);
    shown.push(text(&world.page, Request::get("/").body(Body::empty()).unwrap()).await.1);
    shown.extend(world.audited());
    for text in shown {
        assert!(text.contains(&fingerprint) && !text.contains("secret"), "{text}");
    }
}

#[tokio::test]
async fn plan_of_a_key_is_reset_once() {
    let world = World::new();
    let stats = Stats::builder().max_recent_refusals(16).clock(world.clock.clone()).build();
    let plans = Rule::plans("plan", [Quota::per_minute(2), Quota::per_minute(9)], |_| 0).unwrap();
    let layer = RateLimitLayer::new(world.limiter.clone(), plans, key::header("x-api-key")).observer(stats.clone());
    let page = StatusPage::new(stats).layer("plans", &layer).operators(who, |_| {});
    let world = World { layer, page, ..world };
    assert_eq!(world.send(4).await, 2);
    let fingerprint = world.fingerprint().await;
    let token = world.token("alice", &fingerprint).await;
    let done = world.post("alice", &format!("action=reset&token={token}")).await.1;
    assert_eq!(done["actions"].as_array().unwrap().len(), 1);
    assert_eq!(world.send(4).await, 2);
}

#[tokio::test]
async fn plan_of_a_file_is_shown_with_its_name() {
    let world = World::new();
    let stats = Stats::builder().max_recent_refusals(16).clock(world.clock.clone()).build();
    let plans = "{by: header x-plan, quotas: {free: 2 per minute, <gold>: 9 per minute}, otherwise: free}";
    let rules = Rules::from_text(format!("rules: [{{name: plan, key: header x-api-key, plans: {plans}}}]")).unwrap();
    let layer = rules.layer(world.limiter.clone()).unwrap().observer(stats.clone());
    let page = StatusPage::new(stats).layer("plans", &layer).operators(who, |_| {});
    let world = World { layer, page, ..world };
    assert_eq!(world.send(4).await, 2);
    let mut explain = form("alice", &format!("action=explain&fingerprint={}", world.fingerprint().await));
    explain.headers_mut().insert("accept", "text/html".parse().unwrap());
    let html = text(&world.page, explain).await.1;
    for shown in ["free: 2 per minute, debt up to 7, token bucket", "&lt;gold&gt;: 9 per minute, token bucket"] {
        assert!(html.contains(&format!("<div class=\"quota\">{shown}</div>")), "{html}");
    }
}

#[derive(Debug)]
struct Full;

impl std::fmt::Display for Full {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the table is full")
    }
}

impl std::error::Error for Full {}

#[tokio::test]
async fn own_action_is_taken_on_keys_of_its_policy() {
    let world = World::new();
    let raised: Arc<Mutex<Vec<Key>>> = Arc::default();
    let of_raise = Arc::clone(&raised);
    let raise = move |key: &Key| {
        of_raise.lock().unwrap().push(key.clone());
        Ok::<(), Infallible>(())
    };
    let page = world.page.clone().action("client", "raise <b>", raise).action("day", "exempt", |_| Err(Full));
    let world = World { page, ..world };
    world.send(6).await;
    let fingerprint = world.fingerprint().await;
    let explain = async |operator| world.post(operator, &format!("action=explain&fingerprint={fingerprint}")).await.1;
    let explained = explain("alice").await;
    assert_eq!(explained[0]["own"], serde_json::json!(["raise <b>"]), "the key has no day");
    assert_eq!(explain("").await[0]["own"], serde_json::json!([]));
    let token = explained[0]["token"].as_str().unwrap();
    for (action, status) in [
        ("own.other", StatusCode::BAD_REQUEST),
        ("own.", StatusCode::BAD_REQUEST),
        ("own.exempt", StatusCode::BAD_REQUEST),
        ("raise", StatusCode::BAD_REQUEST),
        ("own.raise+%3Cb%3E", StatusCode::OK),
    ] {
        let answer = world.post("alice", &format!("action={action}&token={token}")).await;
        assert_eq!(answer.0, status, "{answer:?}");
    }
    assert_eq!(*raised.lock().unwrap(), [Key::of(SECRET).unwrap()]);
    let at = "2025-01-01T00:00:00Z alice";
    assert_eq!(world.audited(), [format!("{at}: raise <b> client of api for key {fingerprint}: done")]);

    let explained = world.post("alice", "action=explain&client=192.0.2.1&headers=x-api-key%3Aa").await.1;
    let token = explained[0]["token"].as_str().unwrap();
    let (status, done) = world.post("alice", &format!("action=own.exempt&token={token}")).await;
    assert_eq!((status, &done["actions"][0]["error"]), (StatusCode::SERVICE_UNAVAILABLE, &"the table is full".into()));
    assert_eq!(done["actions"][0]["action"], "own.exempt");
    let mut browser = form("alice", &format!("action=explain&fingerprint={fingerprint}"));
    browser.headers_mut().insert("accept", "text/html".parse().unwrap());
    let html = text(&world.page, browser).await.1;
    assert!(html.contains("value=\"own.raise &lt;b&gt;\">raise &lt;b&gt;</button>"), "{html}");
}

#[tokio::test]
async fn key_with_a_quota_of_its_own_is_raised_and_reset() {
    let world = World::new();
    let stats = Stats::builder().max_recent_refusals(16).clock(world.clock.clone()).build();
    let overrides = Overrides::new().clock(world.clock.clone());
    let quota = overrides.or(key::header("x-api-key"), |_| Quota::per_minute(2));
    let rule = Rule::quota_from("customer", quota).unwrap();
    let layer = RateLimitLayer::new(world.limiter.clone(), rule, key::header("x-api-key")).observer(stats.clone());
    let (raised, hour) = (Quota::per_minute(6), Duration::from_secs(3_600));
    let page = StatusPage::new(stats).layer("api", &layer).operators(who, |_| {});
    let page = page.action("customer", "raise", move |key| overrides.set(key.clone(), raised, hour).map(drop));
    let world = World { layer, page, ..world };
    assert_eq!(world.send(4).await, 2);
    let fingerprint = world.fingerprint().await;
    let explained = world.post("alice", &format!("action=explain&fingerprint={fingerprint}")).await.1;
    assert_eq!(explained[0]["states"][0]["used"], 2);
    let act = async |action: &str| {
        let token = world.token("alice", &fingerprint).await;
        assert_eq!(world.post("alice", &format!("action={action}&token={token}")).await.0, StatusCode::OK);
    };
    act("own.raise").await;
    assert_eq!(world.send(9).await, 4, "two of six were used");
    act("reset").await;
    assert_eq!(world.send(9).await, 6);
    world.clock.advance(hour);
    assert_eq!(world.send(9).await, 2, "the raise has ended");
}
