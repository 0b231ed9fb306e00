//! Plays the customers and the vendor over TCP, by HTTP/1 and HTTP/2.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use http_body_util::BodyExt;
use hyper::body::Incoming;
use tower_ratelimit::clock::ManualClock;

use super::*;

const FREE: &str = "sk-free";
const PRO: &str = "sk-pro";

const CHAT: &str = "/v1/chat/completions";
const MESSAGES: &str = "/v1/messages";

/// Longer than anything takes, also on a busy machine.
const LONG: Duration = Duration::from_secs(60);

/// A gateway whose limiter's time stands still, its vendor, and a client.
struct World {
    limit: Limit,
    client: Client<HttpConnector, Body>,
    address: String,
    generated: Arc<AtomicU64>,
}

async fn listen(app: Router) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(axum::serve(listener, app).into_future());
    address
}

impl World {
    async fn new(is_h2: bool) -> Self {
        let generated = Arc::<AtomicU64>::default();
        let model = upstream::Model { pace: Duration::from_millis(2), generated: Arc::clone(&generated) };
        let clock = ManualClock::new();
        let limit = limit(MemoryLimiter::builder().max_keys(100).clock(clock.clone()).build().unwrap()).unwrap();
        let mut gateway = Gateway::new(&limit, listen(model.app()).await);
        gateway.openai.check().unwrap();
        gateway.anthropic.check().unwrap();
        // The dates of its headers.
        gateway.anthropic = gateway.anthropic.headers(Headers::anthropic().clock(clock));
        let limit = gateway.openai.clone();
        let client = Client::builder(TokioExecutor::new()).http2_only(is_h2).build(HttpConnector::new());
        Self { limit, client, address: listen(gateway.app()).await, generated }
    }

    async fn call(&self, path: &str, api_key: &str, body: impl Into<Body>) -> response::Response<Incoming> {
        let request = Request::post(format!("{}{path}", self.address));
        let request = match path {
            CHAT => request.header("authorization", format!("Bearer {api_key}")),
            _ => request.header("x-api-key", api_key),
        };
        let sent = self.client.request(request.body(body.into()).unwrap());
        tokio::time::timeout(LONG, sent).await.expect("the gateway answers").unwrap()
    }

    /// Asks for a stream of this number of tokens.
    async fn stream(&self, path: &str, api_key: &str, tokens: u64) -> response::Response<Incoming> {
        self.call(path, api_key, json!({"max_tokens": tokens, "stream": true}).to_string()).await
    }

    async fn budget(&self, api_key: &str) -> Value {
        let request = Request::get(format!("{}/v1/budget", self.address)).header("x-api-key", api_key);
        let response = self.client.request(request.body(Body::empty()).unwrap()).await.unwrap();
        serde_json::from_slice(&response.into_body().collect().await.unwrap().to_bytes()).unwrap()
    }

    /// Waits until no request of the customer is in flight. Returns the requests, and the tokens of the minute and of
    /// the day, that it has used.
    async fn used(&self, api_key: &str) -> (u64, u64, u64) {
        let used = |budget: &Value, policy: &str| {
            let number = |field: &str| budget[policy][field].as_u64().unwrap();
            number("limit") - number("remaining")
        };
        let settled = async {
            loop {
                let budget = self.budget(api_key).await;
                if used(&budget, "at-once") == 0 {
                    return (used(&budget, "requests"), used(&budget, "tokens"), used(&budget, "tokens-day"));
                }
            }
        };
        tokio::time::timeout(LONG, settled).await.expect("each request ends")
    }
}

async fn text(response: response::Response<Incoming>) -> String {
    String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
}

/// Reads this number of pieces of a body, and returns their tokens.
async fn read(body: &mut Incoming, pieces: usize) -> u64 {
    let mut text = String::new();
    for _ in 0..pieces {
        let frame = body.frame().await.unwrap().unwrap();
        text.push_str(std::str::from_utf8(&frame.into_data().unwrap()).unwrap());
    }
    text.matches("\"word\"").count() as u64
}

#[tokio::test]
async fn answer_is_charged_as_its_model_states() {
    for is_h2 in [false, true] {
        let world = World::new(is_h2).await;
        for (at, path) in (1..).zip([CHAT, MESSAGES]) {
            let response = world.stream(path, PRO, 30).await;
            assert_eq!(response.status(), 200);
            assert_eq!(text(response).await.matches("\"word\"").count(), 30);
            let whole = world.call(path, PRO, json!({"max_tokens": 30}).to_string()).await;
            assert!(text(whole).await.contains(&"word".repeat(30)));
            let tokens = at * 2 * (upstream::PROMPT + 30);
            assert_eq!(world.used(PRO).await, (at * 2, tokens, tokens), "{path}");
        }
        assert_eq!(world.used(FREE).await, (0, 0, 0));
    }
}

#[tokio::test]
async fn client_that_leaves_pays_what_was_generated() {
    for is_h2 in [false, true] {
        for path in [CHAT, MESSAGES] {
            let world = World::new(is_h2).await;
            let mut body = world.stream(path, FREE, 10_000).await.into_body();
            let read = read(&mut body, 6).await;
            assert!(read > 0);
            drop(body);
            let (requests, minute, day) = world.used(FREE).await;
            // OpenAI would have said at the end what the prompt costs: so its estimate stays.
            let prompt = match path {
                CHAT => usage::estimate(json!({"max_tokens": 10_000, "stream": true}).to_string().len()),
                _ => upstream::PROMPT,
            };
            let generated = world.generated.load(Ordering::SeqCst);
            assert_eq!((requests, minute), (1, day));
            assert!(
                (prompt + read..=prompt + generated).contains(&minute),
                "{read} read, {generated} generated: {minute}"
            );
            assert!(generated < 5_000, "the vendor stops, too");
        }
    }
}

#[tokio::test]
async fn client_that_leaves_before_an_answer_pays_the_reservation() {
    for is_h2 in [false, true] {
        for path in [CHAT, MESSAGES] {
            let world = World::new(is_h2).await;
            let body = json!({"max_tokens": 10_000}).to_string();
            let most = 10_000 + usage::estimate(body.len());
            let runs = async { while world.budget(FREE).await["at-once"]["remaining"] == 4 {} };
            tokio::select! {
                _ = world.call(path, FREE, body) => panic!("it takes 20 s"),
                () = runs => {}
            }
            assert_eq!(world.used(FREE).await, (1, most, most));
        }
    }
}

#[tokio::test]
async fn failed_vendor_costs_nothing() {
    for is_h2 in [false, true] {
        let world = World::new(is_h2).await;
        for (path, status) in [(CHAT, 500), (MESSAGES, 503)] {
            let response = world.call(path, FREE, json!({"model": "fails"}).to_string()).await;
            assert_eq!(response.status(), status);
            assert!(text(response).await.contains("the model"), "the vendor's error is passed on");
            assert_eq!(world.used(FREE).await, (0, 0, 0));
        }
    }
}

#[tokio::test]
async fn vendor_that_is_away_costs_nothing() {
    let limit = limit(MemoryLimiter::new()).unwrap();
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let world = World::new(false).await;
    let address = listen(Gateway::new(&limit, format!("http://{closed}")).app()).await;
    let world = World { address, ..world };
    assert_eq!(world.call(CHAT, FREE, "{}").await.status(), 502);
    assert_eq!(world.used(FREE).await, (0, 0, 0));
}

#[tokio::test]
async fn stream_that_breaks_costs_what_was_generated() {
    for is_h2 in [false, true] {
        let world = World::new(is_h2).await;
        let body = json!({"model": "breaks", "stream": true, "max_tokens": 100}).to_string();
        let response = world.call(MESSAGES, FREE, body).await;
        assert_eq!(response.status(), 200);
        assert!(response.into_body().collect().await.is_err(), "the client sees that it is not whole");
        let tokens = upstream::PROMPT + upstream::BREAKS_AFTER;
        assert_eq!(world.used(FREE).await, (1, tokens, tokens));
    }
}

#[tokio::test]
async fn fifth_request_waits_until_one_ends() {
    for is_h2 in [false, true] {
        let world = World::new(is_h2).await;
        let mut running = Vec::new();
        for path in [CHAT, MESSAGES, CHAT, MESSAGES] {
            running.push(world.stream(path, FREE, 3_000).await);
        }
        assert_eq!(world.budget(FREE).await["at-once"]["remaining"], 0);
        let mut fifth = pin!(world.stream(CHAT, FREE, 1));
        let waits = async {
            while world.limit.waiting() == 0 {
                assert_eq!(world.budget(PRO).await["at-once"]["remaining"], 16);
            }
        };
        tokio::select! {
            _ = &mut fifth => panic!("four are running"),
            () = waits => {}
        }
        drop(running.pop());
        assert_eq!(fifth.await.status(), 200);
        assert_eq!(world.limit.waiting(), 0);
        drop(running);
        assert_eq!(world.used(FREE).await.0, 5);
    }
}

fn header<'a>(response: &'a response::Response<Incoming>, name: &str) -> Option<&'a str> {
    response.headers().get(name).map(|value| value.to_str().unwrap())
}

#[tokio::test]
async fn clients_read_the_headers_of_their_vendor() {
    let world = World::new(false).await;
    let body = json!({"max_tokens": 400, "stream": true}).to_string();
    let most = 400 + usage::estimate(body.len());
    let first = world.call(CHAT, FREE, body.clone()).await;
    // The headers are sent before the cost is known, so they report the reservation.
    for (name, value) in [
        ("x-ratelimit-limit-requests", "20".to_owned()),
        ("x-ratelimit-remaining-requests", "19".to_owned()),
        ("x-ratelimit-reset-requests", "3s".to_owned()),
        ("x-ratelimit-limit-tokens", "20000".to_owned()),
        ("x-ratelimit-remaining-tokens", (20_000 - most).to_string()),
        // 20,000 a minute: 3 ms for each.
        ("x-ratelimit-reset-tokens", format!("{}.{:03}s", most * 3 / 1_000, most * 3 % 1_000).replace("0s", "s")),
    ] {
        assert_eq!(header(&first, name), Some(value.as_str()), "{name}");
    }
    let of_anthropic = |name: &&str| header(&first, name).is_some();
    assert!(!["anthropic-ratelimit-tokens-limit", "retry-after", "ratelimit"].iter().any(of_anthropic));
    drop(first);
    let tokens = world.used(FREE).await.1;

    let second = world.call(MESSAGES, FREE, body).await;
    for (name, value) in [
        ("anthropic-ratelimit-requests-limit", "20".to_owned()),
        ("anthropic-ratelimit-requests-remaining", "18".to_owned()),
        ("anthropic-ratelimit-requests-reset", "2025-01-01T00:00:06Z".to_owned()),
        ("anthropic-ratelimit-tokens-limit", "20000".to_owned()),
        ("anthropic-ratelimit-tokens-remaining", (20_000 - tokens - most).to_string()),
    ] {
        assert_eq!(header(&second, name), Some(value.as_str()), "{name}");
    }
    assert_eq!(header(&second, "x-ratelimit-limit-requests"), None);
}

#[tokio::test]
async fn refusals_have_the_form_of_their_vendor() {
    let world = World::new(true).await;
    for _ in 0..20 {
        assert_eq!(world.call(CHAT, FREE, "{\"max_tokens\": 1}").await.status(), 200);
    }
    let openai = world.call(CHAT, FREE, "{}").await;
    assert_eq!((openai.status(), header(&openai, "retry-after")), (StatusCode::TOO_MANY_REQUESTS, Some("3")));
    assert_eq!(header(&openai, "retry-after-ms"), Some("3000"));
    assert_eq!(header(&openai, "x-ratelimit-remaining-requests"), Some("0"));
    assert_eq!(
        serde_json::from_str::<Value>(&text(openai).await).unwrap(),
        json!({"error": {"message": "rate limit reached: requests", "code": "rate_limit_exceeded"}})
    );
    let anthropic = world.call(MESSAGES, FREE, "{}").await;
    assert_eq!((anthropic.status(), header(&anthropic, "retry-after")), (StatusCode::TOO_MANY_REQUESTS, Some("3")));
    assert_eq!(header(&anthropic, "retry-after-ms"), None);
    assert_eq!(
        serde_json::from_str::<Value>(&text(anthropic).await).unwrap(),
        json!({"type": "error", "error": {"type": "rate_limit_error", "message": "rate limit reached: requests"}})
    );
    let tokens = 20 * (upstream::PROMPT + 1);
    assert_eq!(world.used(FREE).await, (20, tokens, tokens), "what one limit refuses costs nothing of the others");
}

#[tokio::test]
async fn request_that_cannot_be_read_costs_nothing() {
    let world = World::new(false).await;
    assert_eq!(world.call(CHAT, "sk-stolen", "{}").await.status(), 401);
    assert_eq!(world.call(CHAT, FREE, "[]").await.status(), 400);
    assert_eq!(world.call(CHAT, FREE, vec![b' '; REQUEST_MAX + 1]).await.status(), 413);
    // More than a minute has is refused for good: no wait is named.
    let response = world.stream(CHAT, FREE, 20_001).await;
    assert_eq!((response.status(), header(&response, "retry-after")), (StatusCode::TOO_MANY_REQUESTS, None));
    assert_eq!(world.used(FREE).await, (0, 0, 0));
}
