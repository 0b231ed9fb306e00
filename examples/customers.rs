//! Quotas from a database: each customer has its own, one has no limit, and operators override single ones.
//!
//! A lookup has to wait, and a rule does not. So a small layer before the limit looks the customer up, and puts it into
//! the request's extensions, where [`Rule::quota_from`] reads it. Its cache is bounded and forgets after a while, so a
//! change in the database holds after [`FRESH`] at the latest.
//!
//! Run it with `cargo run --example customers`:
//!
//! ```sh
//! curl -si -H 'x-api-key: acme' http://127.0.0.1:3000/ | grep -i ratelimit               # 7,300 a minute
//! curl -si -H 'x-api-key: big' http://127.0.0.1:3000/ | grep -i ratelimit                # no limit, no header
//! curl -s -X PUT -d '3 per minute' http://127.0.0.1:3001/customers/acme/quota            # what the database says
//! curl -s -X POST -d '20000 per minute' http://127.0.0.1:3001/customers/acme/overrides   # for an hour
//! curl -s http://127.0.0.1:3001/customers/acme                                           # what it has used
//! ```

use std::collections::HashMap;
use std::error::Error;
use std::future::IntoFuture;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use tower_ratelimit::clock::{Clock, MonotonicClock, Timestamp};
use tower_ratelimit::limiter::{Charge, Limiter};
use tower_ratelimit::middleware::Overrides;
use tower_ratelimit::{Key, MemoryLimiter, Policy, Quota, RateLimitLayer, Rule, key};

/// How long a looked-up customer is used.
const FRESH: Duration = Duration::from_secs(30);

/// The most customers that are kept. Unknown keys take room, too, so that they do not reach the database each time.
const CACHED_MAX: usize = 10_000;

/// A customer, as the request carries it.
#[derive(Clone, Copy)]
struct Customer {
    quota: Quota,
}

/// Stands in for a database: the text of each customer's quota.
#[derive(Clone, Default)]
struct Database(Arc<Mutex<HashMap<String, String>>>);

impl Database {
    async fn find(&self, api_key: &str) -> Option<String> {
        tokio::task::yield_now().await; // the way to a real one and back
        self.0.lock().ok()?.get(api_key).cloned()
    }

    fn set(&self, customer: &str, quota: &str) {
        if let Ok(mut rows) = self.0.lock() {
            rows.insert(customer.to_owned(), quota.to_owned());
        }
    }
}

/// A customer, or none of this key, and until when that is used.
type Found = (Option<Customer>, Timestamp);

/// Looks customers up, and keeps them for a while.
#[derive(Clone)]
struct Customers {
    database: Database,
    clock: Arc<dyn Clock>,
    cache: Arc<Mutex<HashMap<String, Found>>>,
}

impl Customers {
    /// Returns the customer of an API key. No lock is held while the database is asked.
    async fn find(&self, api_key: &str) -> Option<Customer> {
        let now = self.clock.now();
        let kept = self.cache.lock().ok()?.get(api_key).copied();
        if let Some((customer, _)) = kept.filter(|(_, until)| now < *until) {
            return customer;
        }
        let row = self.database.find(api_key).await;
        // A text that is no quota must not give a customer no limit.
        let customer = row.map(|text| Customer { quota: text.parse().unwrap_or(Quota::per_minute(60)) });
        let mut cache = self.cache.lock().ok()?;
        if cache.len() >= CACHED_MAX {
            cache.retain(|_, (_, until)| now < *until);
        }
        if cache.len() < CACHED_MAX || cache.contains_key(api_key) {
            cache.insert(api_key.to_owned(), (customer, now.saturating_add(FRESH)));
        }
        customer
    }
}

/// Puts the customer into the request. A request without a customer goes no further.
async fn identify(State(customers): State<Customers>, mut request: Request, next: Next) -> Response {
    let api_key = request.headers().get("x-api-key").and_then(|value| value.to_str().ok());
    let customer = match api_key {
        Some(api_key) => customers.find(api_key).await,
        None => None,
    };
    let Some(customer) = customer else { return StatusCode::UNAUTHORIZED.into_response() };
    request.extensions_mut().insert(customer);
    next.run(request).await
}

/// The parts that the operators' pages need.
#[derive(Clone)]
struct Operators {
    customers: Customers,
    limiter: MemoryLimiter,
    overrides: Overrides<Quota>,
}

/// Changes what the database says.
async fn set_quota(State(operators): State<Operators>, Path(customer): Path<String>, text: String) -> StatusCode {
    if text.parse::<Quota>().is_err() {
        return StatusCode::BAD_REQUEST;
    }
    operators.customers.database.set(&customer, &text);
    StatusCode::NO_CONTENT
}

/// Gives a customer another quota for an hour, in this process.
async fn override_quota(
    State(operators): State<Operators>,
    Path(customer): Path<String>,
    text: String,
) -> Result<String, (StatusCode, String)> {
    let quota: Quota = text.parse().map_err(|error| (StatusCode::BAD_REQUEST, format!("{error}\n")))?;
    let made = operators.overrides.set(customer.as_str(), quota, Duration::from_secs(3_600));
    made.map(|_| format!("{customer}: {quota} for an hour\n"))
        .map_err(|error| (StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n")))
}

/// Says how a customer stands under the quota that it has now.
async fn status(State(operators): State<Operators>, Path(customer): Path<String>) -> Result<String, StatusCode> {
    let key = Key::of(customer.as_str()).ok_or(StatusCode::BAD_REQUEST)?;
    let usual = operators.customers.find(&customer).await.map(|customer| customer.quota);
    let quota = operators.overrides.get(&key).or(usual).ok_or(StatusCode::NOT_FOUND)?;
    let policy = Policy::new("customer", quota).map_err(|_| StatusCode::BAD_REQUEST)?;
    let decision = operators.limiter.peek(&[Charge::new(&policy, &key).cost(0)]).await;
    let decision = decision.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
    let status = decision.charges().first().ok_or(StatusCode::SERVICE_UNAVAILABLE)?;
    Ok(format!("{customer}: {quota}, {} used\n", status.limit().saturating_sub(status.remaining())))
}

/// Returns the application, and the pages for operators.
fn app(
    database: Database,
    limiter: MemoryLimiter,
    clock: impl Clock + Clone + 'static,
) -> Result<(Router, Router), Box<dyn Error>> {
    let customers = Customers { database, clock: Arc::new(clock.clone()), cache: Arc::default() };
    let overrides = Overrides::new().clock(clock);
    let quota = overrides
        .or(key::header("x-api-key"), |request| request.extensions.get::<Customer>().map(|customer| customer.quota));
    let limit = RateLimitLayer::new(limiter.clone(), Rule::quota_from("customer", quota)?, key::header("x-api-key"));
    let app = Router::new()
        .route("/", get(|| async { "hello\n" }))
        .layer(limit)
        // The layer that is added last sees a request first.
        .layer(from_fn_with_state(customers.clone(), identify));
    let operators = Router::new()
        .route("/customers/{customer}", get(status))
        .route("/customers/{customer}/quota", put(set_quota))
        .route("/customers/{customer}/overrides", post(override_quota))
        .with_state(Operators { customers, limiter, overrides });
    Ok((app, operators))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let database = Database::default();
    for (customer, quota) in [("small", "60 per minute"), ("acme", "7300 per minute"), ("big", "unlimited")] {
        database.set(customer, quota);
    }
    let (app, operators) = app(database, MemoryLimiter::new(), MonotonicClock::new())?;
    let [public, internal] = [3000, 3001].map(|port| tokio::net::TcpListener::bind(("127.0.0.1", port)));
    let (public, internal) = (public.await?, internal.await?);
    println!("the application: http://127.0.0.1:3000/  for operators: http://127.0.0.1:3001/customers/acme");
    tokio::try_join!(axum::serve(public, app).into_future(), axum::serve(internal, operators).into_future())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use tower::ServiceExt;
    use tower_ratelimit::clock::ManualClock;

    use super::*;

    async fn send(router: &Router, method: &str, path: &str, api_key: &str, body: &str) -> Response {
        let request = Request::builder().method(method).uri(path).header("x-api-key", api_key);
        router.clone().oneshot(request.body(Body::from(body.to_owned())).unwrap()).await.unwrap()
    }

    /// Sends a request of a customer. Returns `RateLimit-Policy`, or the status if the request does not pass.
    async fn ask(app: &Router, customer: &str) -> Result<String, u16> {
        let response = send(app, "GET", "/", customer, "").await;
        let policy = response.headers().get("ratelimit-policy");
        let policy = policy.map_or(String::new(), |value| value.to_str().unwrap().to_owned());
        if response.status() == StatusCode::OK { Ok(policy) } else { Err(response.status().as_u16()) }
    }

    #[tokio::test]
    async fn customer_has_the_quota_of_the_database_or_of_an_override() {
        let clock = ManualClock::new();
        let database = Database::default();
        database.set("acme", "5 per hour");
        database.set("big", "unlimited");
        database.set("broken", "5 per fortnight");
        let limiter = MemoryLimiter::builder().max_keys(1_000).clock(clock.clone()).build().unwrap();
        let (app, operators) = app(database.clone(), limiter, clock.clone()).unwrap();
        for _ in 0..5 {
            assert_eq!(ask(&app, "acme").await, Ok("\"customer\";q=5;w=3600".to_owned()));
            assert_eq!(ask(&app, "big").await, Ok(String::new()), "no header reports it");
        }
        assert_eq!((ask(&app, "acme").await, ask(&app, "nobody").await), (Err(429), Err(401)));
        assert_eq!(ask(&app, "broken").await, Ok("\"customer\";q=60;w=60".to_owned()));

        // The database's new answer holds when the cache has forgotten the earlier one.
        assert_eq!(send(&operators, "PUT", "/customers/acme/quota", "", "7300 per hour").await.status(), 204);
        database.set("nobody", "1 per hour");
        assert_eq!((ask(&app, "acme").await, ask(&app, "nobody").await), (Err(429), Err(401)));
        clock.advance(FRESH);
        assert_eq!(ask(&app, "acme").await, Ok("\"customer\";q=7300;w=3600".to_owned()));
        assert_eq!(ask(&app, "nobody").await, Ok("\"customer\";q=1;w=3600".to_owned()));

        // An override holds at once, and ends by itself.
        let raised = send(&operators, "POST", "/customers/nobody/overrides", "", "50 per hour").await;
        assert_eq!(raised.status(), 200);
        assert_eq!(ask(&app, "nobody").await, Ok("\"customer\";q=50;w=3600".to_owned()));
        let status = send(&operators, "GET", "/customers/nobody", "", "").await;
        let text = axum::body::to_bytes(status.into_body(), 1_000).await.unwrap();
        assert_eq!(text, "nobody: 50 per hour, token bucket, 2 used\n");
        clock.advance(Duration::from_secs(3_600));
        assert_eq!(ask(&app, "nobody").await, Ok("\"customer\";q=1;w=3600".to_owned()));
    }
}
