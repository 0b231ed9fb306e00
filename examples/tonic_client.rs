//! A gRPC client that waits as its server says, and retries what was refused anyway. It calls the server
//! of the example `tonic`, which lets five calls per minute through. So the ten calls take a minute, and
//! none fails, even if another client uses the quota, too.
//!
//! ```sh
//! cargo run --example tonic &
//! cargo run --example tonic_client
//! ```

use std::error::Error;

use axum::body::Bytes;
use http::Request;
use http::uri::PathAndQuery;
use http_body_util::{BodyExt, Full};
use tonic::body::Body;
use tonic::client::Grpc;
use tonic::transport::Channel;
use tonic_prost::ProstCodec;
use tower::{ServiceBuilder, ServiceExt, service_fn};
use tower_ratelimit::client::{ObeyLayer, RetryAfter};
use tower_ratelimit::clock::TokioTimer;

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

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let channel = Channel::from_static("http://127.0.0.1:50051").connect().await?;
    let polite = ServiceBuilder::new()
        .retry(RetryAfter::new(TokioTimer::new()).any_method(true)) // every call is a POST
        .map_request(|request: Request<Full<Bytes>>| request.map(Body::new))
        .layer(ObeyLayer::new(TokioTimer::new()))
        .service(channel);
    // The body of a call may be a stream, which cannot be sent again. That of a unary call is one message.
    let unary = service_fn(move |request: Request<Body>| {
        let polite = polite.clone();
        async move {
            let (head, body) = request.into_parts();
            let message = Full::new(body.collect().await?.to_bytes());
            polite.oneshot(Request::from_parts(head, message)).await
        }
    });
    // A client of `tonic-build` takes it in the same way: `GreeterClient::new(unary)`.
    let mut client = Grpc::with_origin(unary, "http://127.0.0.1:50051".parse()?);
    for _ in 0..10 {
        client.ready().await?;
        let request = tonic::Request::new(GreetRequest { name: "Ann".to_owned() });
        let path = PathAndQuery::from_static("/greeter.Greeter/Greet");
        let codec: ProstCodec<GreetRequest, GreetReply> = ProstCodec::default();
        match client.unary(request, path, codec).await {
            Ok(reply) => println!("{}", reply.into_inner().greeting),
            Err(status) => println!("refused: {}; the next call waits", status.message()),
        }
    }
    Ok(())
}
