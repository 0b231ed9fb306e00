//! Plans by the month: 10,000 calls a month from the day of the subscription, where the customer lives, and never more
//! than ten a second. A page says what is left, and when it renews.
//!
//! ```sh
//! cargo run --example subscriptions --features fred,postgres,time-zones                           # in memory
//! cargo run --example subscriptions --features fred,postgres,time-zones -- redis://127.0.0.1:6379
//! cargo run --example subscriptions --features fred,postgres,time-zones -- postgres://postgres@127.0.0.1:5432/postgres
//! curl -si -H 'x-api-key: berlin' http://127.0.0.1:3000/ | grep -i ratelimit
//! curl -s -H 'x-api-key: berlin' http://127.0.0.1:3000/usage
//! ```

use std::collections::HashMap;
use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tower_ratelimit::clock::{Clock, SystemClock};
use tower_ratelimit::limiter::store::StoreLimiterBuilder;
use tower_ratelimit::limiter::store::postgres::{Durability, PostgresStore};
use tower_ratelimit::limiter::{Charge, Limiter};
use tower_ratelimit::quota::Calendar;
use tower_ratelimit::{ConfigError, Key, MemoryLimiter, Policy, Quota, RateLimitLayer, RedisLimiter, Rule, key};

/// A customer, as a request carries it.
#[derive(Clone)]
struct Customer {
    name: &'static str,
    monthly: Quota,
}

impl Customer {
    /// Reads what the database says: the day of the month on which the customer subscribed, and its time zone.
    fn new(name: &'static str, day: u8, zone: &str) -> Result<Self, ConfigError> {
        let calendar = Calendar::month().from_day(day)?.zone(zone)?;
        Ok(Self { name, monthly: Quota::calendar(10_000, calendar)? })
    }
}

/// Stands in for a database with a cache; see the example `customers`.
type Customers = Arc<HashMap<&'static str, Customer>>;

fn customers() -> Result<Customers, ConfigError> {
    let customers = [("berlin", 31, "Europe/Berlin"), ("cairo", 15, "Africa/Cairo"), ("samoa", 1, "Pacific/Apia")];
    customers
        .into_iter()
        .map(|(name, day, zone)| Ok((name, Customer::new(name, day, zone)?)))
        .collect::<Result<_, _>>()
        .map(Arc::new)
}

/// Puts the customer into its requests. An unknown one is refused, and costs no limit.
async fn identify(State(customers): State<Customers>, mut request: Request, next: Next) -> Response {
    let api_key = request.headers().get("x-api-key").and_then(|key| key.to_str().ok());
    let Some(customer) = api_key.and_then(|key| customers.get(key)) else {
        return StatusCode::UNAUTHORIZED.into_response();
    };
    let customer = customer.clone();
    request.extensions_mut().insert(customer);
    next.run(request).await
}

/// Says what a customer has left, and when it renews. It asks for no unit.
async fn usage<L: Limiter>(limiter: L, clock: impl Clock, customer: Customer) -> Result<String, StatusCode> {
    let policy = Policy::new("monthly", customer.monthly).map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    let key = Key::of(customer.name).ok_or(StatusCode::INTERNAL_SERVER_ERROR)?;
    let decision = limiter.peek(&[Charge::new(&policy, &key).cost(0)]).await;
    let decision = decision.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
    let monthly = decision.charges().first().ok_or(StatusCode::SERVICE_UNAVAILABLE)?;
    // The limiter knows it also after the customer's day has moved. Its time may differ from the clock's by a little.
    let window = monthly.effective_window().ok_or(StatusCode::SERVICE_UNAVAILABLE)?;
    let renews = SystemTime::from(clock.now().saturating_add(window + Duration::from_millis(500)));
    let (left, renews) = (monthly.remaining(), humantime::format_rfc3339_seconds(renews));
    Ok(format!("{}: {left} of {} left, renews at {renews}\n", customer.monthly, customer.monthly.capacity()))
}

fn app<L>(limiter: L, clock: impl Clock + Clone + 'static) -> Result<Router, Box<dyn Error>>
where
    L: Limiter + Clone,
{
    // The quota of a request without a customer. There is none: `identify` refuses it.
    let none = Quota::per_calendar_month(1);
    let monthly = Rule::quota_from("monthly", move |request| {
        request.extensions.get::<Customer>().map_or(none, |customer| customer.monthly)
    })?;
    let burst = Rule::new("burst", Quota::per_second(10))?;
    let limit =
        RateLimitLayer::new(limiter.clone(), monthly, key::header("x-api-key")).and(burst, key::header("x-api-key"));
    let usage = get(move |customer: axum::Extension<Customer>| usage(limiter.clone(), clock.clone(), customer.0));
    Ok(Router::new()
        .route("/", get(|| async { "hello\n" }))
        .layer(limit)
        // Added after the limit, so it is not limited.
        .route("/usage", usage)
        .layer(from_fn_with_state(customers()?, identify)))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let clock = SystemClock::new();
    let app = match std::env::args().nth(1) {
        None => app(MemoryLimiter::new(), clock)?,
        Some(url) if url.starts_with("postgres") => {
            // A month is long: what was used has to outlast a crash of the server.
            let store = PostgresStore::builder().create_table(Durability::Logged).connect(&url).await?;
            app(StoreLimiterBuilder::new().build(store)?, clock)?
        }
        Some(url) => app(RedisLimiter::builder().connect(&url).await?, clock)?,
    };
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 3000)).await?;
    println!("http://127.0.0.1:3000/  http://127.0.0.1:3000/usage  with the header x-api-key: berlin, cairo or samoa");
    axum::serve(listener, app).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use axum::body::{Body, to_bytes};
    use tower::ServiceExt;
    use tower_ratelimit::clock::{ManualClock, Timestamp};

    use super::*;

    struct Service(Router);

    impl Service {
        async fn send(&self, path: &str, customer: &str) -> Response {
            let request = Request::get(path).header("x-api-key", customer).body(Body::empty()).unwrap();
            self.0.clone().oneshot(request).await.unwrap()
        }

        async fn policies(&self, customer: &str) -> String {
            self.send("/", customer).await.headers()["ratelimit-policy"].to_str().unwrap().to_owned()
        }

        async fn get(&self, path: &str, customer: &str) -> (u16, String) {
            let response = self.send(path, customer).await;
            let status = response.status().as_u16();
            (status, String::from_utf8(to_bytes(response.into_body(), 1_000).await.unwrap().to_vec()).unwrap())
        }

        async fn usage(&self, customer: &str) -> String {
            self.get("/usage", customer).await.1
        }
    }

    #[tokio::test]
    async fn month_renews_where_the_customer_lives() {
        // Ten seconds before February 28 begins in Berlin, which is the last day of the month.
        let clock = ManualClock::at(Timestamp::from_micros(1_740_697_190_000_000));
        let limiter = MemoryLimiter::builder().max_keys(1_000).clock(clock.clone()).build().unwrap();
        let service = Service(app(limiter, clock.clone()).unwrap());
        let text = |left: u32, at: &str| {
            format!("10000 per calendar month from day 31 in Europe/Berlin: {left} of 10000 left, renews at {at}\n")
        };
        assert_eq!(service.usage("berlin").await, text(10_000, "2025-02-27T23:00:00Z"));
        for _ in 0..10 {
            assert_eq!(service.get("/", "berlin").await.0, 200);
        }
        assert_eq!(service.get("/", "berlin").await.0, 429, "ten in a second");
        assert_eq!(service.usage("berlin").await, text(9_990, "2025-02-27T23:00:00Z"));
        clock.advance(Duration::from_secs(10));
        // Its length is told by the limiter's clock. An hour is left out.
        assert_eq!(service.policies("berlin").await, "\"monthly\";q=10000;w=2674800, \"burst\";q=10;w=1");
        assert_eq!(service.usage("berlin").await, text(9_999, "2025-03-30T22:00:00Z"), "summer time begins");
        assert!(service.usage("cairo").await.ends_with("renews at 2025-03-14T22:00:00Z\n"));
        assert_eq!(service.get("/", "nobody").await.0, 401);
    }

    /// The day moves to the 15th. What was used before the old edge stays used until the first new one behind it.
    #[tokio::test]
    async fn page_says_when_a_moved_day_renews() {
        let clock = ManualClock::at(Timestamp::from_micros(1_740_700_800_000_000)); // 2025-02-28
        let limiter = MemoryLimiter::builder().max_keys(1_000).clock(clock.clone()).build().unwrap();
        let of = |day| Customer::new("berlin", day, "Europe/Berlin").unwrap();
        let policy = Policy::new("monthly", of(31).monthly).unwrap();
        assert!(limiter.take_one(&policy, &Key::of("berlin").unwrap(), 7).is_allowed());
        let text = usage(limiter, clock, of(15)).await.unwrap();
        assert!(text.ends_with("9993 of 10000 left, renews at 2025-04-14T22:00:00Z\n"), "{text}");
    }
}
