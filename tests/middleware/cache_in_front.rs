//! A shared cache in front of an application never answers one client with another client's
//! refusal.
//!
//! The test needs nginx and is never skipped.

use std::path::Path;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::routing::any;
use http::{Request, Response, StatusCode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, UnixStream};
use tower::service_fn;
use tower_ratelimit::middleware::RefusalBody;
use tower_ratelimit::{
    MemoryLimiter, Quota, RateLimitLayer, Refusals, Rule,
    clock::ManualClock,
    key,
    middleware::{Access, AccessList, Refusal},
};

use crate::support::Scripted;
use crate::support::nginx::Nginx;

const HOUR: Duration = Duration::from_secs(3_600);

// nginx ───────────────────────────────────────────────────────────────────────────────────────────────────────────────

/// A cache as it is often set up, and one that also stores answers to `POST`, looks at `HEAD` by
/// itself and hands on `TE`.
const FRONTS: [&str; 2] = ["usual", "careless"];

fn servers(directory: &Path, app: u16) -> String {
    let directory = directory.display();
    let server = |front, more| {
        format!(
            "server {{
                listen unix:{directory}/{front};
                location / {{
                    proxy_pass http://127.0.0.1:{app};
                    proxy_http_version 1.1;
                    proxy_cache {front};
                    proxy_cache_valid 200 10m;
                    proxy_cache_valid any 10m;
                    add_header x-cache $upstream_cache_status always;
                    {more}
                }}
            }}
            proxy_cache_path {front}-cache keys_zone={front}:1m;\n"
        )
    };
    let [usual, careless] = FRONTS;
    server(usual, "")
        + &server(
            careless,
            "proxy_set_header te $http_te; proxy_set_header connection \"te\";
             proxy_cache_methods GET HEAD POST; proxy_cache_convert_head off;",
        )
}

// The application ─────────────────────────────────────────────────────────────────────────────────────────────────────

/// Gives every client the same answer, so that the cache may store it.
async fn page(request: Request<Body>) -> String {
    text(request.uri().path())
}

fn text(path: &str) -> String {
    format!("the page {path}\n")
}

/// A response like a refusal, but without `Cache-Control`, so that a cache stores it.
async fn careless(request: Request<Body>) -> Response<String> {
    let mut response = Response::new(String::new());
    match request.headers().get("x-client") {
        Some(client) if client == "mallory" && request.headers().get("te").is_some_and(|te| te == "trailers") => {}
        Some(client) if client == "mallory" => *response.status_mut() = StatusCode::TOO_MANY_REQUESTS,
        _ => *response.body_mut() = text(request.uri().path()),
    }
    response
}

/// A responder whose responses ask caches to store them.
fn cacheable(refusal: &Refusal<'_>) -> Response<RefusalBody> {
    let mut response = refusal.default_response();
    response.headers_mut().insert("cache-control", "public, max-age=600".parse().unwrap());
    response
}

/// The paths that refuse the client `mallory` after this number of requests.
const WAYS: [(&str, usize); 9] = [
    ("limited", 1),
    ("two-policies", 1),
    ("blocked", 2),
    ("denied", 0),
    ("no-key", 0),
    ("failed", 0),
    ("overflow", 1),
    ("responder", 1),
    ("responder-for-all", 1),
];

async fn serve(failing: Scripted) -> u16 {
    let memory = || MemoryLimiter::builder().max_keys(1_000).clock(ManualClock::new()).build().unwrap();
    let named = |name: &str, quota| Rule::new(name, quota).unwrap();
    // Mallory uses up the quota at once.
    let cost = |rule: Rule| {
        rule.cost(|request| {
            request.headers.get("x-client").map_or(1, |client| if client == "mallory" { 1_000 } else { 1 })
        })
    };
    let rule = || cost(named("client", Quota::per_hour(1_000)));
    let client = || key::header("x-client");
    let limit = || RateLimitLayer::new(memory(), rule(), client());
    let list = AccessList::new();
    list.set_key("mallory", Access::Deny);
    let block = Quota::block(1, HOUR, HOUR).unwrap();
    let overflow =
        service_fn(|_: Request<Body>| async { Ok::<_, std::convert::Infallible>(Response::new(Body::from("later"))) });
    let several = Rule::all_of("client", [Quota::per_hour(1_000), Quota::per_day(1_000)]).unwrap();
    let app = Router::new()
        .route("/limited/{file}", any(page).layer(limit()))
        .route("/two-policies/{file}", any(page).layer(RateLimitLayer::new(memory(), cost(several), client())))
        .route(
            "/blocked/{file}",
            any(page).layer(RateLimitLayer::new(memory(), rule().block("block", block).unwrap(), client())),
        )
        .route("/denied/{file}", any(page).layer(limit().access(&list, client())))
        .route(
            "/no-key/{file}",
            any(page).layer(RateLimitLayer::new(memory(), Quota::per_hour(1_000), key::header("x-key"))),
        )
        .route(
            "/failed/{file}",
            any(page).layer(RateLimitLayer::new(failing, Quota::per_hour(1_000_000), key::global())),
        )
        .route("/overflow/{file}", any(page).layer(limit().overflow(overflow)))
        .route("/responder/{file}", any(page).layer(limit().refusals(Refusals::with(cacheable))))
        .route("/responder-for-all/{file}", any(page).layer(limit().refusals(Refusals::with_all(cacheable))))
        .route("/careless/{file}", any(careless));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async { axum::serve(listener, app).await });
    port
}

// Clients ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

/// A request's method and headers.
type Shape = (&'static str, Vec<(&'static str, &'static str)>);

#[derive(Debug)]
struct Answer {
    status: u16,
    cache: String,
    body: String,
}

async fn send(socket: &Path, client: &str, path: &str, (method, fields): &Shape) -> Answer {
    let mut text = format!("{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\nx-client: {client}\r\n");
    if client != "mallory" {
        text += &format!("x-key: {client}\r\n");
    }
    fields.iter().for_each(|(name, value)| text += &format!("{name}: {value}\r\n"));
    text += "\r\n";
    let mut stream = UnixStream::connect(socket).await.unwrap();
    stream.write_all(text.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    let answer = String::from_utf8(answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer to {text:?}: {answer:?}"));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap();
    let cache = head.lines().find_map(|line| line.strip_prefix("x-cache: ")).unwrap_or_default();
    Answer { status, cache: cache.to_owned(), body: body.to_owned() }
}

/// Returns requests that a client may send so that a cache stores its refusal.
fn hostile() -> Vec<Shape> {
    let mut shapes = Vec::new();
    for method in ["GET", "HEAD", "POST", "OPTIONS", "PUT", "GRPC"] {
        for content_type in ["application/grpc", "application/grpc-web", "application/grpc-web-text+proto", "text/html"]
        {
            for te in [None, Some("trailers")] {
                let mut fields = vec![("content-type", content_type), ("content-length", "0")];
                fields.extend(te.map(|te| ("te", te)));
                shapes.push((method, fields));
            }
        }
    }
    for field in [
        ("range", "bytes=0-0"),
        ("if-none-match", "*"),
        ("if-modified-since", "Fri, 01 Jan 2100 00:00:00 GMT"),
        ("cache-control", "max-stale, only-if-cached"),
        ("accept", "application/grpc-web-text"),
    ] {
        shapes.push(("GET", vec![field]));
        shapes.push(("HEAD", vec![field]));
        shapes.push(("GET", vec![field, ("content-type", "application/grpc"), ("te", "trailers")]));
    }
    shapes
}

/// Returns the responses to other clients.
fn harmless() -> [Shape; 4] {
    [
        ("GET", vec![]),
        ("HEAD", vec![]),
        ("GET", vec![("range", "bytes=0-2")]),
        ("GET", vec![("if-none-match", "\"other\"")]),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn cache_gives_no_client_the_refusal_of_another() {
    let failing = Scripted::new();
    let app = serve(failing.clone()).await;
    let nginx = Nginx::start("cache", &FRONTS, |directory| servers(directory, app)).await;
    for front in FRONTS {
        let socket = nginx.socket(front);
        for (way, passing) in WAYS {
            for number in 0..passing {
                send(&socket, "mallory", &format!("/{way}/{front}-first-{number}"), &("GET", vec![])).await;
            }
            for (number, shape) in hostile().iter().enumerate() {
                let path = format!("/{way}/{front}-{number}.js");
                failing.fail(way == "failed");
                let refused = send(&socket, "mallory", &path, shape).await;
                failing.fail(false);
                let what = format!("{front}: {path} after {shape:?}");
                assert_ne!(refused.body, text(&path), "{what}: {refused:?}");
                let may_pass = way == "overflow" || shape.0 == "POST";
                assert!(refused.status >= 400 || may_pass, "{what}: {refused:?}");
                assert!(matches!(refused.cache.as_str(), "MISS" | ""), "{what}: {refused:?}");

                let stored = send(&socket, "alice", &path, &harmless()[0]).await;
                assert_eq!((stored.status, stored.body), (200, text(&path)), "{what}");
                assert_eq!(stored.cache, "MISS", "{what}: the refusal was stored");
                let next = &harmless()[number % 4];
                let next = send(&socket, "bob", &path, next).await;
                assert!(matches!(next.status, 200 | 206), "{what}: {next:?}");
                assert_eq!(next.cache, "HIT", "{what}: the cache works");
            }
        }
        // Without `Cache-Control` the cache does store it, so this test would fail.
        for te in ["", "trailers"] {
            let path = format!("/careless/{front}-{te}");
            send(&socket, "mallory", &path, &("GET", vec![("te", te)])).await;
            let next = send(&socket, "alice", &path, &("GET", vec![])).await;
            let poisoned = next.cache == "HIT" && next.body.is_empty();
            assert!(poisoned, "{front} {te:?}: {next:?}");
        }
    }
}
