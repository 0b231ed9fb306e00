//! A gRPC service with limits. Its messages are written by hand, so it needs no `.proto` file and
//! no build step.
//!
//! ```sh
//! cargo run --example tonic
//! ```
//!
//! Any gRPC client can call it, for example in Python, with `pip install grpcio`. Each message has
//! one text field:
//!
//! ```python
//! import grpc
//! channel = grpc.insecure_channel("127.0.0.1:50051")
//! greet = channel.unary_unary("/greeter.Greeter/Greet",
//!                             request_serializer=lambda name: b"\x0a" + bytes([len(name)]) + name,
//!                             response_deserializer=lambda reply: reply[2:])
//! for _ in range(6):
//!     print(greet(b"Ann"))       # the sixth raises RESOURCE_EXHAUSTED
//! ```

use std::convert::Infallible;
use std::error::Error;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::{Request, Response};
use tonic::body::Body;
use tonic::server::{Grpc, NamedService};
use tonic::transport::Server;
use tonic::{Code, Status};
use tonic_prost::ProstCodec;
use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, Rule, key};

#[derive(Clone, PartialEq, prost::Message)]
struct GreetRequest {
    #[prost(string, tag = "1")]
    name: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct GreetReply {
    #[prost(string, tag = "1")]
    greeting: String,
}

async fn greet(request: tonic::Request<GreetRequest>) -> Result<tonic::Response<GreetReply>, Status> {
    let greeting = format!("hello, {}", request.into_inner().name);
    Ok(tonic::Response::new(GreetReply { greeting }))
}

/// The service that `tonic-build` would generate from a `.proto` file.
#[derive(Clone)]
pub(crate) struct Greeter;

impl NamedService for Greeter {
    const NAME: &'static str = "greeter.Greeter";
}

impl tower::Service<Request<Body>> for Greeter {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        Box::pin(async move {
            Ok(match request.uri().path() {
                "/greeter.Greeter/Greet" => {
                    Grpc::new(ProstCodec::default()).unary(tower::service_fn(greet), request).await
                }
                _ => Status::new(Code::Unimplemented, "there is no such method").into_http(),
            })
        })
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // In gRPC the path names the method.
    let greet = Rule::new("greet", Quota::per_minute(5))?.when(|request| request.uri.path().ends_with("/Greet"));
    let limit =
        RateLimitLayer::new(MemoryLimiter::new(), Quota::per_second(100), key::global()).and(greet, key::peer_ip());

    println!("127.0.0.1:50051 /greeter.Greeter/Greet");
    Server::builder().layer(limit).add_service(Greeter).serve("127.0.0.1:50051".parse()?).await?;
    Ok(())
}
