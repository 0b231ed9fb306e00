//! A stream of gRPC whose messages are limited: a user may send three at once, and one more each second. A message
//! beyond that ends the call with `RESOURCE_EXHAUSTED`, which says when to come again.
//!
//! ```sh
//! cargo run --example grpc_stream --features tonic
//! cargo test --example grpc_stream --features tonic
//! ```

use std::convert::Infallible;
use std::error::Error;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::{Request, Response};
use tokio_stream::{Stream, StreamExt};
use tonic::body::Body;
use tonic::server::{Grpc, NamedService};
use tonic::transport::Server;
use tonic::{Code, Status, Streaming};
use tonic_prost::ProstCodec;
use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, Rule, key};

#[derive(Clone, PartialEq, prost::Message)]
struct Line {
    #[prost(string, tag = "1")]
    text: String,
}

type Lines = Pin<Box<dyn Stream<Item = Result<Line, Status>> + Send>>;

/// Sends each line back, for as long as the user keeps to the limit.
#[derive(Clone)]
struct Echo {
    limit: RateLimitLayer<MemoryLimiter>,
}

impl Echo {
    fn new(limiter: MemoryLimiter) -> Result<Self, Box<dyn Error>> {
        let lines = Rule::new("lines", Quota::per_second(1).burst(3)?)?;
        // In production, the user that a token belongs to.
        Ok(Self { limit: RateLimitLayer::new(limiter, lines, key::header("x-user")) })
    }

    fn talk(&self, call: tonic::Request<Streaming<Line>>) -> tonic::Response<Lines> {
        let messages = self.limit.messages_of_call(&call);
        // An error of the connection is no message.
        let lines = messages.limit(call.into_inner(), |line| u64::from(line.is_ok()));
        let lines = lines.map(|line| line.map_err(Status::from).and_then(|received| received));
        tonic::Response::new(Box::pin(lines))
    }
}

impl NamedService for Echo {
    const NAME: &'static str = "echo.Echo";
}

/// The service that `tonic-build` would generate from a `.proto` file.
impl tower::Service<Request<Body>> for Echo {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let echo = self.clone();
        Box::pin(async move {
            Ok(match request.uri().path() {
                "/echo.Echo/Talk" => {
                    let talk = tower::service_fn(move |call| std::future::ready(Ok(echo.talk(call))));
                    Grpc::new(ProstCodec::default()).streaming(talk, request).await
                }
                _ => Status::new(Code::Unimplemented, "there is no such method").into_http(),
            })
        })
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    println!("127.0.0.1:50051 /echo.Echo/Talk");
    let echo = Echo::new(MemoryLimiter::new())?;
    Server::builder().add_service(echo).serve("127.0.0.1:50051".parse()?).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::uri::PathAndQuery;
    use tokio::net::TcpListener;
    use tokio_stream::wrappers::TcpListenerStream;
    use tonic::client::Grpc as Client;
    use tonic::transport::Endpoint;
    use tonic_types::StatusExt;
    use tower_ratelimit::clock::ManualClock;

    #[tokio::test]
    async fn call_ends_in_the_middle_of_its_stream() {
        let limiter = MemoryLimiter::builder().max_keys(1_000).clock(ManualClock::new()).build().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let echo = Echo::new(limiter).unwrap();
        tokio::spawn(Server::builder().add_service(echo).serve_with_incoming(TcpListenerStream::new(listener)));
        let mut client = Client::new(Endpoint::from_shared(url).unwrap().connect().await.unwrap());
        client.ready().await.unwrap();
        let lines = (0..5).map(|number| Line { text: format!("line {number}") });
        let mut call = tonic::Request::new(tokio_stream::iter(lines));
        call.metadata_mut().insert("x-user", "alice".parse().unwrap());
        let path = PathAndQuery::from_static("/echo.Echo/Talk");
        let codec = ProstCodec::<Line, Line>::default();
        let mut replies = client.streaming(call, path, codec).await.unwrap().into_inner();
        for number in 0..3 {
            let reply = replies.message().await.unwrap().unwrap();
            assert_eq!(reply.text, format!("line {number}"));
        }
        let status = replies.message().await.unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted);
        let retry = status.get_details_retry_info().and_then(|info| info.retry_delay);
        assert_eq!(retry, Some(std::time::Duration::from_secs(1)));
    }
}
