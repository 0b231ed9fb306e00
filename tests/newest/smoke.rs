//! One refusal over axum, with the states in memory and in Redis through each client.

use std::error::Error;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, StatusCode};
use axum::{Router, routing::get};
use tower::ServiceExt;
use tower_ratelimit::limiter::Limiter;
use tower_ratelimit::limiter::redis::RedisClient;
use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, RedisLimiter, key};

type Done = Result<(), Box<dyn Error>>;

async fn second_is_refused<L: Limiter + Clone>(limiter: L) -> Done {
    let limit = RateLimitLayer::new(limiter, Quota::per_hour(1), key::header("x-api-key"));
    let app = Router::new().route("/", get(|| async { "hello" })).layer(limit);
    let request = || Request::get("/").header("x-api-key", "a").body(Body::empty());
    assert_eq!(app.clone().oneshot(request()?).await?.status(), StatusCode::OK);
    let refused = app.oneshot(request()?).await?;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(refused.headers().contains_key("retry-after"));
    Ok(())
}

/// A server that ends with the test.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn over_redis(client: RedisClient) -> Done {
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let program = std::env::var("REDIS_SERVER").unwrap_or_else(|_| "redis-server".to_owned());
    let arguments = ["--port", &port.to_string(), "--save", "", "--bind", "127.0.0.1"];
    let _server = Server(Command::new(program).args(arguments).stdout(Stdio::null()).spawn()?);
    let mut tries = 0;
    let limiter = loop {
        let builder = RedisLimiter::builder().client(client).deadline(Duration::from_secs(5));
        match builder.connect(&format!("redis://127.0.0.1:{port}")).await {
            Ok(limiter) => break limiter,
            Err(error) if tries == 100 => return Err(error.into()),
            Err(_) => tries += 1,
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    second_is_refused(limiter).await
}

#[tokio::test]
async fn memory_refuses_the_second() -> Done {
    second_is_refused(MemoryLimiter::new()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn fred_refuses_the_second() -> Done {
    over_redis(RedisClient::Fred).await
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_rs_refuses_the_second() -> Done {
    over_redis(RedisClient::RedisRs).await
}
