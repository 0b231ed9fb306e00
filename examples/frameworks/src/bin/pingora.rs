//! pingora: a proxy that admits ten requests a minute for each address, and passes them to an upstream.
//!
//! ```sh
//! python3 -m http.server 8000 &
//! cargo run --manifest-path examples/frameworks/Cargo.toml --bin pingora
//! ```

use async_trait::async_trait;
use bytes::Bytes;
use http::{Extensions, HeaderMap};
use http_body_util::{BodyExt, Empty};
use pingora_core::server::Server;
use pingora_core::upstreams::peer::HttpPeer;
use pingora_http::ResponseHeader;
use pingora_proxy::{ProxyHttp, Session, http_proxy_service};
use tower_ratelimit::key::{self, PeerAddr};
use tower_ratelimit::middleware::{Admission, Refused, WrappedBody};
use tower_ratelimit::{Head, MemoryLimiter, Quota, RateLimitLayer, Rule};

struct Limited {
    limit: RateLimitLayer<MemoryLimiter>,
    upstream: String,
}

#[async_trait]
impl ProxyHttp for Limited {
    /// The units that the request took.
    type CTX = Option<Admission>;

    fn new_ctx(&self) -> Self::CTX {
        None
    }

    /// Asks the layer about each request. Both have the types of `http` 1, so nothing is copied.
    async fn request_filter(&self, session: &mut Session, admission: &mut Self::CTX) -> pingora_core::Result<bool> {
        let mut extensions = Extensions::new();
        if let Some(peer) = session.client_addr().and_then(|address| address.as_inet()) {
            extensions.insert(PeerAddr::from(*peer));
        }
        let request = session.req_header();
        let head = Head::new(&request.method, &request.uri, request.version, &request.headers, &extensions);
        match self.limit.admit(head).await {
            Ok(admitted) => {
                *admission = Some(admitted);
                Ok(false)
            }
            Err(refused) => {
                refuse(session, refused).await?;
                Ok(true)
            }
        }
    }

    async fn upstream_peer(&self, _: &mut Session, _: &mut Self::CTX) -> pingora_core::Result<Box<HttpPeer>> {
        Ok(Box::new(HttpPeer::new(&self.upstream, false, String::new())))
    }

    async fn response_filter(
        &self,
        _: &mut Session,
        response: &mut ResponseHeader,
        admission: &mut Self::CTX,
    ) -> pingora_core::Result<()> {
        let Some(admission) = admission.take() else { return Ok(()) };
        // Rules may charge by the status and the headers of the response.
        let mut told = http::Response::new(WrappedBody::<Empty<Bytes>>::default());
        *told.status_mut() = response.status;
        *told.headers_mut() = response.headers.clone();
        replace_headers(response, admission.finish(told).headers())
    }
}

fn replace_headers(response: &mut ResponseHeader, headers: &HeaderMap) -> pingora_core::Result<()> {
    for name in headers.keys() {
        response.remove_header(name);
    }
    for (name, value) in headers {
        response.append_header(name.clone(), value.clone())?;
    }
    Ok(())
}

async fn refuse(session: &mut Session, refused: Refused) -> pingora_core::Result<()> {
    let (head, body) = refused.into_http().into_parts();
    let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let mut response = ResponseHeader::build(head.status, Some(head.headers.len()))?;
    replace_headers(&mut response, &head.headers)?;
    response.insert_header(http::header::CONTENT_LENGTH, body.len())?;
    session.write_response_header(Box::new(response), false).await?;
    session.write_response_body(Some(body), true).await
}

fn proxy(limiter: MemoryLimiter, upstream: String) -> Result<Limited, Box<dyn std::error::Error>> {
    let api = Rule::new("api", Quota::per_minute(10))?;
    Ok(Limited { limit: RateLimitLayer::new(limiter, api, key::peer_ip()), upstream })
}

/// Serves the proxy at `address`, until the process ends.
fn serve(address: &str, proxy: Limited) -> pingora_core::Result<()> {
    let mut server = Server::new(None)?;
    server.bootstrap();
    let mut service = http_proxy_service(&server.configuration, proxy);
    service.add_tcp(address);
    server.add_service(service);
    server.run_forever()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("for i in $(seq 11); do curl -si http://127.0.0.1:3000/ | grep -iE '^(HTTP|ratelimit|retry)'; done");
    Ok(serve("127.0.0.1:3000", proxy(MemoryLimiter::new(), "127.0.0.1:8000".to_owned())?)?)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{SocketAddr, TcpListener, TcpStream};
    use std::thread;
    use std::time::Duration;

    use tower_ratelimit::clock::ManualClock;

    use super::*;

    /// Time stands still, so no unit comes back.
    fn limiter() -> MemoryLimiter {
        MemoryLimiter::builder().max_keys(1_000).clock(ManualClock::new()).build().unwrap()
    }

    /// Serves an upstream that answers every request.
    fn upstream() -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                assert_ne!(stream.read(&mut [0; 4_096]).unwrap(), 0);
                stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\nconnection: close\r\nset-cookie: a=1\r\nset-cookie: b=2\r\n\r\nhello\n").unwrap();
            }
        });
        address
    }

    fn get(server: SocketAddr) -> String {
        let connected = || TcpStream::connect(server).inspect_err(|_| thread::sleep(Duration::from_millis(20))).ok();
        let mut stream = (0..500).find_map(|_| connected()).expect("the proxy listens within ten seconds");
        stream.write_all(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        response.to_lowercase()
    }

    #[test]
    fn layer_admits_ten_for_an_address() {
        let proxy = proxy(limiter(), upstream().to_string()).unwrap();
        let server = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).unwrap();
        thread::spawn(move || serve(&server.to_string(), proxy));
        for left in (0..10).rev() {
            let response = get(server);
            assert!(response.starts_with("http/1.1 200 ok"), "{response}");
            assert!(response.contains(&format!("\nratelimit: \"api\";r={left};")), "{response}");
            assert!(response.contains("set-cookie: a=1\r\n") && response.contains("set-cookie: b=2\r\n"), "{response}");
            assert!(response.ends_with("hello\n"), "{response}");
        }
        let refused = get(server);
        assert!(refused.starts_with("http/1.1 429 too many requests"), "{refused}");
        assert!(refused.contains("\nretry-after: 6\r\n") && refused.contains("violated-policies"), "{refused}");
    }
}
