//! A gateway for language models: customers have plans, with requests and tokens per minute, tokens per day, and a
//! number of requests at once, where the next one waits. All are decided together. A request reserves the most that it
//! may cost, and its stream is charged by what it used, even if the client disconnects.
//!
//! It has the APIs of OpenAI and Anthropic, with the headers that their clients read. The vendor is a stand-in that the
//! example starts.
//!
//! ```sh
//! cargo run --example llm_gateway
//! curl -siN http://127.0.0.1:3000/v1/chat/completions -H 'authorization: Bearer sk-free' \
//!     -d '{"model": "m", "max_tokens": 30, "stream": true, "messages": [{"role": "user", "content": "Hello"}]}'
//! curl -siN http://127.0.0.1:3000/v1/messages -H 'x-api-key: sk-pro' -m 1 \
//!     -d '{"model": "m", "max_tokens": 900, "stream": true, "messages": [{"role": "user", "content": "Hello"}]}'
//! curl -s http://127.0.0.1:3000/v1/budget -H 'x-api-key: sk-pro'
//! ```

#[cfg(test)]
mod tests;
mod upstream;
mod usage;

use std::error::Error;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::{Extension, Json, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri, header, response};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{BoxError, Router};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Map, Value, json};
use tokio::net::TcpListener;
use tokio_stream::StreamExt;
use tower_ratelimit::clock::TokioTimer;
use tower_ratelimit::middleware::{OnAborted, Refusal};
use tower_ratelimit::{ConfigError, Head, Headers, Key, MemoryLimiter, Quota, RateLimitLayer, Refusals, Rule};

use usage::Tokens;

/// The longest request, and the longest answer that is no stream, in bytes.
const REQUEST_MAX: usize = 1 << 20;
const ANSWER_MAX: usize = 8 << 20;

/// The tokens that are reserved for the answer to a request that does not bound it.
const ANSWER_TOKENS: u64 = 1_000;

/// How long a request waits while all places of its customer are taken.
const WAIT: Duration = Duration::from_secs(10);

/// The most requests that wait. Each one is in memory, with up to [`REQUEST_MAX`] bytes.
const WAITING_MAX: usize = 200;

const PLANS: [&str; 2] = ["free", "pro"];

/// The customers, which a real gateway has in a database: see the example `customers`.
const CUSTOMERS: [Customer; 2] =
    [Customer { name: "acme", api_key: "sk-free", plan: 0 }, Customer { name: "globex", api_key: "sk-pro", plan: 1 }];

#[derive(Clone, Copy)]
struct Customer {
    name: &'static str,
    api_key: &'static str,
    /// Its place in [`PLANS`].
    plan: usize,
}

/// The most tokens that a request may cost: its prompt and its answer.
#[derive(Clone, Copy)]
struct Estimate(u64);

type Limit = RateLimitLayer<MemoryLimiter>;

/// Builds the limit. Each rule has a quota for each plan.
fn limit(limiter: MemoryLimiter) -> Result<Limit, ConfigError> {
    let plan = |request: &Head<'_>| request.extensions.get().map_or(0, |customer: &Customer| customer.plan);
    let customer = |request: &Head<'_>| request.extensions.get().map(|customer: &Customer| customer.name);

    // A request that the vendor did not answer costs nothing.
    let requests =
        Rule::plans("requests", [Quota::per_minute(20), Quota::per_minute(600)], plan)?.refund_when(is_vendors_fault);
    // If the client disconnects, the request is charged the cost that `forward` has stated by then.
    let in_tokens = |rule: Rule| {
        let rule = rule.unit("tokens")?.cost(|request| request.extensions.get().map_or(0, |Estimate(most)| *most));
        let rule = rule.settle_by_usage().on_aborted(OnAborted::Refund);
        Ok::<_, ConfigError>(rule.refund_when(|response| !response.status.is_success()))
    };
    let minute = Rule::plans("tokens", [Quota::per_minute(20_000), Quota::per_minute(500_000)], plan)?;
    let day = Duration::from_secs(86_400);
    let days = [Quota::fixed_window(200_000, day)?, Quota::fixed_window(20_000_000, day)?];
    let at_once = [Quota::concurrent(4).max_wait(WAIT)?, Quota::concurrent(16).max_wait(WAIT)?];

    Ok(RateLimitLayer::new(limiter, requests, customer)
        .and(in_tokens(minute)?, customer)
        .and(in_tokens(Rule::plans("tokens-day", days, plan)?)?, customer)
        .and(Rule::plans("at-once", at_once, plan)?, customer)
        .timer(TokioTimer::new())
        .max_waiting(WAITING_MAX))
}

fn is_vendors_fault(response: &response::Parts) -> bool {
    response.status.is_server_error() || response.status == StatusCode::TOO_MANY_REQUESTS
}

#[derive(Clone, Copy, PartialEq)]
enum Vendor {
    OpenAi,
    Anthropic,
}

#[derive(Clone)]
struct Gateway {
    /// One limit, with the headers and refusals of each vendor. Both count the same.
    openai: Limit,
    anthropic: Limit,
    /// The scheme and the address of the vendor, such as `http://127.0.0.1:8000`.
    upstream: String,
    client: Client<HttpConnector, Body>,
}

impl Gateway {
    fn new(limit: &Limit, upstream: String) -> Self {
        let openai = refusals(|message| json!({"error": {"message": message, "code": "rate_limit_exceeded"}}));
        let anthropic =
            refusals(|message| json!({"type": "error", "error": {"type": "rate_limit_error", "message": message}}));
        Self {
            openai: limit.clone().headers(Headers::openai()).refusals(openai),
            anthropic: limit.clone().headers(Headers::anthropic()).refusals(anthropic),
            upstream,
            client: Client::builder(TokioExecutor::new()).build(HttpConnector::new()),
        }
    }

    fn app(self) -> Router {
        Router::new()
            .route("/v1/chat/completions", post(openai))
            .route("/v1/messages", post(anthropic))
            .route("/v1/budget", get(budget))
            .layer(from_fn(identify))
            .with_state(self)
    }

    /// Reads the request once, reserves its cost, and sends it to the vendor.
    async fn forward(&self, vendor: Vendor, request: Request) -> Result<Response, Response> {
        let (mut head, body) = request.into_parts();
        let body = to_bytes(body, REQUEST_MAX).await;
        let body = body.map_err(|_| StatusCode::PAYLOAD_TOO_LARGE.into_response())?;
        let asked = serde_json::from_slice::<Map<String, Value>>(&body);
        let mut asked = asked.map_err(|_| StatusCode::BAD_REQUEST.into_response())?;

        let bound = ["max_completion_tokens", "max_tokens"].into_iter().find_map(|name| asked.get(name)?.as_u64());
        let mut tokens = Tokens::new(usage::estimate(body.len()));
        let most = tokens.total().saturating_add(bound.unwrap_or(ANSWER_TOKENS));
        head.extensions.insert(Estimate(most));
        let wants_stream = asked.get("stream") == Some(&Value::Bool(true));
        if vendor == Vendor::OpenAi && wants_stream {
            // Without this OpenAI's streams do not say what they cost.
            asked.insert("stream_options".to_owned(), json!({"include_usage": true}));
        }

        let limit = if vendor == Vendor::OpenAi { &self.openai } else { &self.anthropic };
        let admission = limit.admit(&head).await.map_err(IntoResponse::into_response)?;
        let usage = admission.usage().cloned();
        let state_cost = move |tokens: u64| usage.as_ref().is_some_and(|usage| usage.set(tokens));
        // The vendor charges from here on, even if the client disconnects: a stream what it has sent, and an answer
        // that comes as a whole perhaps all of it.
        state_cost(if wants_stream { tokens.total() } else { most });

        let asked = Value::Object(asked).to_string();
        let Ok(answer) = self.send(&head.uri, asked).await else {
            return Ok(admission.finish(StatusCode::BAD_GATEWAY.into_response()));
        };
        let (head, body) = answer.into_parts();
        let kind = head.headers.get(header::CONTENT_TYPE);
        let is_stream = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
        let body = if is_stream {
            Body::from_stream(body.into_data_stream().map(move |piece| {
                if let Ok(piece) = &piece {
                    tokens.read_piece(piece);
                    state_cost(tokens.total());
                }
                piece
            }))
        } else {
            let Ok(whole) = to_bytes(body, ANSWER_MAX).await else {
                return Ok(admission.finish(StatusCode::BAD_GATEWAY.into_response()));
            };
            if let Ok(answer) = serde_json::from_slice(&whole) {
                tokens.read(&answer);
                state_cost(tokens.total());
            }
            Body::from(whole)
        };
        let mut response = Response::new(body);
        *response.status_mut() = head.status;
        // Only these: the vendor's other headers report the gateway's own account.
        for name in [header::CONTENT_TYPE, header::RETRY_AFTER] {
            response.headers_mut().extend(head.headers.get(&name).map(|value| (name, value.clone())));
        }
        // From here on the body holds the place, and its end settles the cost.
        Ok(admission.finish(response))
    }

    async fn send(&self, uri: &Uri, body: String) -> Result<Response, BoxError> {
        // The customer's key stays here. A real gateway adds its own.
        let request = Request::post(format!("{}{}", self.upstream, uri.path()));
        let request = request.header(header::CONTENT_TYPE, "application/json").body(Body::from(body))?;
        Ok(self.client.request(request).await?.map(Body::new))
    }
}

async fn openai(State(gateway): State<Gateway>, request: Request) -> Result<Response, Response> {
    gateway.forward(Vendor::OpenAi, request).await
}

async fn anthropic(State(gateway): State<Gateway>, request: Request) -> Result<Response, Response> {
    gateway.forward(Vendor::Anthropic, request).await
}

/// Refuses with a vendor's form of an error.
fn refusals(error: impl Fn(String) -> Value + Send + Sync + 'static) -> Refusals {
    let respond = move |refusal: &Refusal<'_>| {
        let reached: Vec<&str> = refusal.outcome().violated().map(|status| status.policy().name()).collect();
        let error = error(format!("rate limit reached: {}", reached.join(", ")));
        let mut response = refusal.default_response().map(|_| error.to_string());
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        response
    };
    Refusals::with(respond).grpc(false)
}

/// Finds the customer by its API key, in the header of either vendor.
async fn identify(headers: HeaderMap, mut request: Request, next: Next) -> Result<Response, StatusCode> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let api_key = text("authorization").and_then(|value| value.strip_prefix("Bearer ")).or_else(|| text("x-api-key"));
    let customer = CUSTOMERS.iter().find(|customer| Some(customer.api_key) == api_key);
    request.extensions_mut().insert(*customer.ok_or(StatusCode::UNAUTHORIZED)?);
    Ok(next.run(request).await)
}

/// Says what is left of each limit.
async fn budget(
    State(gateway): State<Gateway>,
    Extension(customer): Extension<Customer>,
) -> Result<Json<Value>, StatusCode> {
    let key = Key::of(customer.name).ok_or(StatusCode::INTERNAL_SERVER_ERROR)?;
    let all = gateway.openai.peek(&key).await.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
    let mut budget = json!({"customer": customer.name, "plan": PLANS[customer.plan]});
    // Each rule has an entry for each plan.
    for (policy, status) in all.into_iter().skip(customer.plan).step_by(PLANS.len()) {
        let full_in = status.reset_after().map(|time| time.as_secs_f64().ceil());
        budget[policy.name()] =
            json!({"limit": status.limit(), "remaining": status.remaining(), "full_in_seconds": full_in});
    }
    Ok(Json(budget))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let vendor = TcpListener::bind("127.0.0.1:0").await?;
    let upstream = format!("http://{}", vendor.local_addr()?);
    let model = upstream::Model { pace: Duration::from_millis(30), generated: Default::default() };
    tokio::spawn(axum::serve(vendor, model.app()).into_future());

    let gateway = Gateway::new(&limit(MemoryLimiter::new())?, upstream);
    gateway.openai.check()?;
    gateway.anthropic.check()?;
    let listener = TcpListener::bind("127.0.0.1:3000").await?;
    println!("curl -siN http://127.0.0.1:3000/v1/chat/completions -H 'authorization: Bearer sk-free' \\");
    println!("    -d '{{\"max_tokens\": 30, \"stream\": true, \"messages\": []}}'");
    println!("curl -s http://127.0.0.1:3000/v1/budget -H 'x-api-key: sk-free'");
    axum::serve(listener, gateway.app()).await?;
    Ok(())
}
