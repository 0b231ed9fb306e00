//! A gRPC client that waits as its server says. It calls the server of the example `tonic`, which lets
//! five calls per minute through. So the ten calls take a minute, and none is refused.
//!
//! ```sh
//! cargo run --example tonic &
//! cargo run --example tonic_client
//! ```

use std::error::Error;

use http::uri::PathAndQuery;
use tonic::client::Grpc;
use tonic::transport::Channel;
use tonic_prost::ProstCodec;
use tower::Layer;
use tower_ratelimit::client::ObeyLayer;
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
    // A client of `tonic-build` takes the channel in the same way: `GreeterClient::new(polite)`.
    let polite = ObeyLayer::new(TokioTimer::new()).layer(channel);
    let mut client = Grpc::with_origin(polite, "http://127.0.0.1:50051".parse()?);
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
