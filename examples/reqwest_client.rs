//! A client with `reqwest` that waits as its server says, and retries what was refused anyway. It calls
//! the server of the package `quickstart`, or the URL that is its argument. After ten requests,
//! `quickstart` lets one through every six seconds.
//!
//! Twelve requests go out at once. Those that the server refuses are retried after the time that it
//! names. Meanwhile the layer inside holds back every other request to this server.
//!
//! ```sh
//! cargo run --package quickstart &
//! cargo run --example reqwest_client
//! ```

use std::error::Error;

use axum::body::Bytes;
use http::{Request, Response};
use reqwest::{Body, redirect};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tower::{BoxError, ServiceBuilder, ServiceExt, service_fn};
use tower_ratelimit::client::{ObeyLayer, RetryAfter};
use tower_ratelimit::clock::TokioTimer;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "http://127.0.0.1:3000/".to_owned());
    // A redirect that reqwest follows itself does not pass the layer, and may lead to another server.
    let client = reqwest::Client::builder().redirect(redirect::Policy::none()).build()?;
    // reqwest has a request of its own, which is made from one of the crate http. Its body can be sent again
    // if it is bytes.
    let client = service_fn(move |request: Request<Bytes>| {
        let client = client.clone();
        async move {
            let response = client.execute(request.try_into()?).await?;
            Ok::<_, reqwest::Error>(Response::<Body>::from(response))
        }
    });
    let polite = ServiceBuilder::new()
        .retry(RetryAfter::new(TokioTimer::new()))
        .layer(ObeyLayer::new(TokioTimer::new()))
        .service(client);

    let start = Instant::now();
    let mut requests = JoinSet::new();
    for _ in 0..12 {
        let request = Request::get(&url).body(Bytes::new())?;
        let polite = polite.clone();
        requests.spawn(async move { Ok::<_, BoxError>(reqwest::Response::from(polite.oneshot(request).await?)) });
    }
    while let Some(response) = requests.join_next().await {
        let response = response??;
        let (status, after) = (response.status(), start.elapsed());
        println!("{after:>6.1?}: {status}, {} bytes", response.bytes().await?.len());
    }
    Ok(())
}
