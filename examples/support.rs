//! The questions and actions of operators and support: why a request is refused, and how to unblock, reset, raise and
//! exempt. The guide's page "A user says" uses it.
//!
//! ```sh
//! cargo run --example support
//! ```

use std::error::Error;
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderName, StatusCode};
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use axum::routing::{get, post};
use tower_ratelimit::key::{self, Prefixes, TrustedProxies};
use tower_ratelimit::middleware::{Access, AccessList, Overrides};
use tower_ratelimit::observe::{Stats, StatusPage};
use tower_ratelimit::{Head, MemoryLimiter, MissingKey, Quota, RateLimitLayer, Rule};

/// The user of a login, which puts it into the requests for operators.
#[derive(Clone)]
struct Staff {
    name: String,
    may_act: bool,
}

/// Stands for your login: the header names the user, and a request without it is one of `local`. Only `guest` may not
/// act.
async fn login(mut request: Request, next: Next) -> Response {
    let name = request.headers().get("x-staff").and_then(|name| name.to_str().ok()).unwrap_or("local").to_owned();
    let may_act = name != "guest";
    request.extensions_mut().insert(Staff { name, may_act });
    next.run(request).await
}

/// Exempts an address or a network from all limits of this process.
async fn exempt(State(list): State<AccessList>, Path(network): Path<String>) -> Result<String, (StatusCode, String)> {
    let exempt = list.set(&network, Access::Allow);
    exempt.map(|_| format!("{network} is exempt\n")).map_err(|error| (StatusCode::BAD_REQUEST, format!("{error}\n")))
}

/// Returns the application, and the pages for operators.
fn app(limiter: MemoryLimiter) -> Result<(Router, Router), Box<dyn Error>> {
    let (minute, hour) = (Duration::from_secs(60), Duration::from_secs(3_600));
    // Five refusals within ten minutes close an address for an hour.
    let block = Quota::block(5, 10 * minute, hour)?;
    let client = Rule::new("client", Quota::per_minute(30))?.block("client-block", block)?;
    let plans = Overrides::new();
    let chosen = plans.or(key::header("x-api-key"), |_| 0); // everyone has the smaller plan
    let customer = Rule::plans("customer", [Quota::per_minute(10), Quota::per_minute(600)], chosen)?;
    let customer = customer.missing_key(MissingKey::Exempt);

    // The page shows the last refusals with the ids of their requests, and the keys that use most. Keys are
    // fingerprints.
    let stats = Stats::builder()
        .max_recent_refusals(1_000)
        .request_id(HeaderName::from_static("x-request-id"))
        .count_use(true)
        .build();
    let exempt_list = AccessList::new();
    let proxies = TrustedProxies::networks(["127.0.0.0/8"])?; // so that curl can play a proxy
    let layer = RateLimitLayer::new(limiter, client, key::client_ip(proxies.clone()))
        .and(customer, key::header("x-api-key"))
        .access(&exempt_list, key::client_network(proxies, Prefixes::exact()))
        .observer(stats.clone());

    // Operators unblock, reset and raise on the page. Each action is printed, as your audit log would have it.
    let who = |request: &Head<'_>| {
        request.extensions.get::<Staff>().filter(|staff| staff.may_act).map(|staff| staff.name.clone())
    };
    let page = StatusPage::new(stats.clone())
        .layer("public", &layer)
        .operators(who, |action| println!("{action}"))
        // The larger plan, for an hour.
        .action("customer", "raise", move |key| plans.set(key.clone(), 1, hour).map(drop));
    let metrics = move || async move { ([("content-type", Stats::CONTENT_TYPE)], stats.to_prometheus()) };
    let operators = Router::new()
        .route("/clients/{network}/exempt", post(exempt))
        .with_state(exempt_list)
        .route("/metrics", get(metrics))
        .route_service("/limits", page)
        .layer(from_fn(login));
    Ok((Router::new().route("/", get(|| async { "hello\n" })).layer(layer), operators))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let (app, operators) = app(MemoryLimiter::new())?;
    let [public, internal] = [3000, 3001].map(|port| tokio::net::TcpListener::bind(("127.0.0.1", port)));
    let (public, internal) = (public.await?, internal.await?);
    println!("the application: http://127.0.0.1:3000/  for operators: http://127.0.0.1:3001/limits");
    let app = app.into_make_service_with_connect_info::<std::net::SocketAddr>();
    tokio::try_join!(axum::serve(public, app).into_future(), axum::serve(internal, operators).into_future())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::extract::ConnectInfo;
    use axum::http::Request;
    use tower::ServiceExt;
    use tower_ratelimit::clock::ManualClock;

    use super::*;

    struct Service(Router, Router);

    impl Service {
        /// Sends a request of a client, with its API key if it has one. Returns the seconds to wait if it is refused.
        async fn get(&self, client: &str, api_key: &str) -> Result<(), u32> {
            let peer = std::net::SocketAddr::from(([127, 0, 0, 1], 1));
            let request = Request::get("/").header("x-forwarded-for", client).header("x-api-key", api_key);
            let request = request.extension(ConnectInfo(peer)).body(Body::empty()).unwrap();
            let response = self.0.clone().oneshot(request).await.unwrap();
            match response.headers().get("retry-after") {
                None => Ok(()),
                Some(seconds) => Err(seconds.to_str().unwrap().parse().unwrap()),
            }
        }

        async fn post(&self, path: &str) {
            let request = Request::post(path).body(Body::empty()).unwrap();
            assert_eq!(self.1.clone().oneshot(request).await.unwrap().status(), 200, "{path}");
        }

        /// Sends a form to the status page. Returns the JSON of the answer.
        async fn form(&self, fields: String) -> serde_json::Value {
            let request = Request::post("/limits").header("content-type", "application/x-www-form-urlencoded");
            let request = request.header("accept", "application/json").body(Body::from(fields)).unwrap();
            let response = self.1.clone().oneshot(request).await.unwrap();
            assert_eq!(response.status(), 200);
            serde_json::from_slice(&axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap()).unwrap()
        }

        /// Acts on the status page on the keys of a request with this header.
        async fn act(&self, action: &str, header: &str) {
            let fields = format!("action=explain&client=127.0.0.1&headers={header}");
            let explained = self.form(fields).await;
            let token = explained[0]["token"].as_str().unwrap();
            self.form(format!("action={action}&token={token}")).await;
        }

        /// Sends requests until one is refused. Returns how many passed.
        async fn passed(&self, client: &str, api_key: &str) -> u32 {
            let mut passed = 0;
            while passed < 100 && self.get(client, api_key).await.is_ok() {
                passed += 1;
            }
            passed
        }
    }

    #[tokio::test]
    async fn each_action_helps_the_client_that_it_names() {
        let limiter = MemoryLimiter::builder().max_keys(1_000).clock(ManualClock::new()).build().unwrap();
        let (app, operators) = app(limiter).unwrap();
        let service = Service(app, operators);
        let (client, other) = ("192.0.2.7", "192.0.2.8");
        assert_eq!(service.passed(client, "").await, 30);
        for _ in 0..3 {
            assert_eq!(service.get(client, "").await, Err(2));
        }
        assert_eq!(service.get(client, "").await, Err(3_600), "the fifth refusal closes it");
        service.act("unblock", "x-forwarded-for:192.0.2.7").await;
        assert_eq!(service.get(client, "").await, Err(2), "what was used stays used");
        service.act("reset", "x-forwarded-for:192.0.2.7").await;
        assert_eq!(service.passed(client, "").await, 30);
        service.post("/clients/192.0.2.0%2F29/exempt").await; // the network 192.0.2.0/29
        assert_eq!(service.passed(client, "").await, 100);

        assert_eq!(service.passed(other, "acme").await, 10);
        service.act("own.raise", "x-api-key:acme").await;
        assert_eq!(service.passed(other, "acme").await, 20, "the address has 20 of 30 left");
    }
}
