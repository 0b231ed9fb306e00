//! A crawler that sends two requests per second to each host at most, and fewer if the host says so.
//!
//! ```sh
//! cargo run --example polite_crawler -- http://127.0.0.1:3000/a http://127.0.0.1:3000/b
//! ```

use std::time::Duration;

use axum::body::Body;
use http::Request;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tower::{ServiceBuilder, ServiceExt};
use tower_ratelimit::client::{ObeyError, ObeyLayer};
use tower_ratelimit::clock::TokioTimer;
use tower_ratelimit::{MemoryLimiter, Quota, Rule};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let own = Rule::new("crawler", Quota::per_second(2).burst(1)?)?;
    let polite =
        ObeyLayer::new(TokioTimer::new()).own_quota(MemoryLimiter::new(), own)?.max_wait(Duration::from_secs(60));
    let client = Client::builder(TokioExecutor::new()).build_http::<Body>();
    let client = ServiceBuilder::new().layer(polite).service(client);

    let pages = std::env::args().skip(1).map(|url| {
        let client = client.clone();
        tokio::spawn(async move {
            let request = Request::get(&url).body(Body::empty())?;
            match client.oneshot(request).await {
                Ok(response) => println!("{url}: {}", response.status()),
                Err(error) => match error.downcast_ref::<ObeyError>() {
                    Some(unsent) => println!("{url}: later, {unsent}"),
                    None => println!("{url}: {error}"),
                },
            }
            Ok::<_, http::Error>(())
        })
    });
    for page in pages.collect::<Vec<_>>() {
        page.await??;
    }
    Ok(())
}
