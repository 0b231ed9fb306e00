//! Plain hyper and Tower, without a framework: the server inserts the peer's address into each
//! request.
//!
//! ```sh
//! cargo run --example hyper
//! ```

use std::convert::Infallible;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use tower::{ServiceBuilder, service_fn};
use tower_ratelimit::key::{self, PeerAddr};
use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer};

async fn hello(_: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new(Full::from("hello\n")))
}

#[tokio::main]
async fn main() -> std::io::Result<()> {
    // The layer is made once, so all connections share its limiter.
    let limit = RateLimitLayer::new(MemoryLimiter::new(), Quota::per_minute(10), key::peer_ip());

    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    println!("for i in $(seq 11); do curl -si http://127.0.0.1:3000/ | grep -iE '^(HTTP|ratelimit|retry)'; done");
    loop {
        let (stream, peer) = listener.accept().await?;
        let service = ServiceBuilder::new()
            .map_request(move |mut request: Request<Incoming>| {
                request.extensions_mut().insert(PeerAddr::from(peer));
                request
            })
            .layer(limit.clone().wrap_body())
            .service(service_fn(hello));
        tokio::spawn(async move {
            let connection = Builder::new(TokioExecutor::new());
            // An error means that the client disconnected early; the server ignores it.
            let _ = connection.serve_connection(TokioIo::new(stream), TowerToHyperService::new(service)).await;
        });
    }
}
