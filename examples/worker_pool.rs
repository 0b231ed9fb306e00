//! Workers that share one API key, in several processes: their quota is in Redis, at
//! `redis://127.0.0.1:6379`. Start it in two terminals: each gets about half of the quota.
//!
//! ```sh
//! cargo run --example worker_pool --features fred -- http://127.0.0.1:3000/
//! ```

use http::Request;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tower::retry::RetryLayer;
use tower::{BoxError, Layer, ServiceExt};
use tower_ratelimit::client::{ObeyLayer, RetryAfter};
use tower_ratelimit::clock::TokioTimer;
use tower_ratelimit::{Key, Quota, RedisLimiter, Rule};

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let url = std::env::args().nth(1).ok_or("the first argument is the URL to call")?;
    let redis = RedisLimiter::connect("redis://127.0.0.1:6379").await?;
    // The vendor allows the API key so much. All requests have one key, whichever path they take.
    let own = Rule::new("vendor", Quota::per_minute(50).burst(5)?)?;
    let obey = ObeyLayer::new(TokioTimer::new()).key(|_| Key::global()).own_quota(redis, own)?;
    let client = obey.layer(Client::builder(TokioExecutor::new()).build_http::<http_body_util::Empty<bytes::Bytes>>());
    let client = RetryLayer::new(RetryAfter::new(TokioTimer::new())).layer(client);

    let workers = (0..8).map(|worker| {
        let (client, url) = (client.clone(), url.clone());
        tokio::spawn(async move {
            for job in 0..10 {
                let request = Request::get(&url).body(Default::default())?;
                let response = client.clone().oneshot(request).await?;
                println!("worker {worker}, job {job}: {}", response.status());
            }
            Ok::<_, BoxError>(())
        })
    });
    for worker in workers.collect::<Vec<_>>() {
        worker.await??;
    }
    Ok(())
}
