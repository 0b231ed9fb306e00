//! poem: ten requests a minute for each address, by a middleware function.
//!
//! ```sh
//! cargo run --manifest-path examples/frameworks/Cargo.toml --bin poem
//! ```

use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use poem::listener::TcpListener;
use poem::{Endpoint, EndpointExt, Request, Response, Route, Server, get, handler};
use tower_ratelimit::key::{self, PeerAddr};
use tower_ratelimit::middleware::{Refused, WrappedBody};
use tower_ratelimit::{Head, MemoryLimiter, Quota, RateLimitLayer, Rule};

type Limit = RateLimitLayer<MemoryLimiter>;
type Error = Box<dyn std::error::Error + Send + Sync>;

/// Asks the layer about each request. Both have the types of `http` 1, so nothing is copied.
async fn limited(limit: Limit, next: impl Endpoint, mut request: Request) -> poem::Result<Response> {
    if let Some(peer) = request.remote_addr().as_socket_addr().copied() {
        request.extensions_mut().insert(PeerAddr::from(peer));
    }
    let (method, uri, headers) = (request.method(), request.uri(), request.headers());
    let head = Head::new(method, uri, request.version(), headers, request.extensions());
    let admission = match limit.admit(head).await {
        Ok(admission) => admission,
        Err(refused) => return Ok(answer(refused).await),
    };
    let mut response = next.get_response(request).await;
    // Rules may charge by the status and the headers of the response.
    let mut told = http::Response::new(WrappedBody::<Empty<Bytes>>::default());
    *told.status_mut() = response.status();
    std::mem::swap(told.headers_mut(), response.headers_mut());
    *response.headers_mut() = admission.finish(told).into_parts().0.headers;
    Ok(response)
}

/// Makes the layer's refusal a response of poem.
async fn answer(refused: Refused) -> Response {
    let (head, body) = refused.into_http().into_parts();
    let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let mut response = Response::builder().status(head.status).body(body);
    *response.headers_mut() = head.headers;
    response
}

fn app(limiter: MemoryLimiter) -> Result<impl Endpoint, Error> {
    #[handler]
    fn hello() -> &'static str {
        "hello\n"
    }
    let api = Rule::new("api", Quota::per_minute(10))?;
    let limit = Limit::new(limiter, api, key::peer_ip());
    let app = Route::new().at("/", get(hello));
    Ok(app.around(move |next, request| limited(limit.clone(), next, request)).map_to_response())
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    println!("for i in $(seq 11); do curl -si http://127.0.0.1:3000/ | grep -iE '^(HTTP|ratelimit|retry)'; done");
    Ok(Server::new(TcpListener::bind("127.0.0.1:3000")).run(app(MemoryLimiter::new())?).await?)
}

#[cfg(test)]
mod tests {
    use poem::listener::{Acceptor, Listener};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;
    use tower_ratelimit::clock::ManualClock;

    use super::*;

    /// Time stands still, so no unit comes back.
    fn limiter() -> MemoryLimiter {
        MemoryLimiter::builder().max_keys(1_000).clock(ManualClock::new()).build().unwrap()
    }

    #[tokio::test]
    async fn layer_admits_ten_for_an_address() {
        let acceptor = TcpListener::bind("127.0.0.1:0").into_acceptor().await.unwrap();
        let server = *acceptor.local_addr()[0].as_socket_addr().unwrap();
        tokio::spawn(Server::new_with_acceptor(acceptor).run(app(limiter()).unwrap()));
        let get = async || {
            let mut stream = TcpStream::connect(server).await.unwrap();
            stream.write_all(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await.unwrap();
            let mut response = String::new();
            stream.read_to_string(&mut response).await.unwrap();
            response
        };
        for left in (0..10).rev() {
            let response = get().await;
            assert!(response.starts_with("HTTP/1.1 200 OK"), "{response}");
            assert!(response.contains(&format!("\nratelimit: \"api\";r={left};")), "{response}");
        }
        let refused = get().await;
        assert!(refused.starts_with("HTTP/1.1 429 Too Many Requests"), "{refused}");
        assert!(refused.contains("\nretry-after: 6\r\n") && refused.contains("violated-policies"), "{refused}");
    }
}
