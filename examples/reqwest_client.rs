//! A client with `reqwest` that waits as its server says. It calls the server of the example
//! `quickstart`, or the URL that is its argument. After ten requests, `quickstart` lets one through every
//! six seconds.
//!
//! ```sh
//! cargo run --example quickstart &
//! cargo run --example reqwest_client
//! ```

use std::error::Error;

use http::{Request, Response};
use reqwest::{Body, redirect};
use tokio::time::Instant;
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::client::ObeyLayer;
use tower_ratelimit::clock::TokioTimer;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "http://127.0.0.1:3000/".to_owned());
    // A redirect that reqwest follows itself does not pass the layer, and may lead to another server.
    let client = reqwest::Client::builder().redirect(redirect::Policy::none()).build()?;
    // reqwest has a request of its own, which is made from one of the crate http.
    let client = service_fn(move |request: Request<Body>| {
        let client = client.clone();
        async move {
            let response = client.execute(request.try_into()?).await?;
            Ok::<_, reqwest::Error>(Response::<Body>::from(response))
        }
    });
    let polite = ObeyLayer::new(TokioTimer::new()).layer(client);

    let start = Instant::now();
    for _ in 0..12 {
        let request = Request::get(&url).body(Body::default())?;
        let response = reqwest::Response::from(polite.clone().oneshot(request).await?);
        let (status, after) = (response.status(), start.elapsed());
        println!("{after:>6.1?}: {status}, {} bytes", response.bytes().await?.len());
    }
    Ok(())
}
