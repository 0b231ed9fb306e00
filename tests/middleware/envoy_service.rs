//! Google's gRPC client for Python asks the example's server as Envoy would.

#[path = "../../examples/envoy.rs"]
#[allow(dead_code, reason = "the example's service is served here, its main is not")]
mod example;

use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::TcpListener;
use tonic::transport::Server;
use tower_ratelimit::clock::ManualClock;
use tower_ratelimit::limiter::Limiter;
use tower_ratelimit::rules::Rules;

use crate::grpc_python;
use crate::support::Scripted;
use crate::support::memory;

const BASIC: &str = "
domain: basic
descriptors:
- {key: key1, rate_limit: {name: named, unit: second, requests_per_unit: 50}}
- {key: open, rate_limit: {unlimited: true}}
";

const ANOTHER: &str = "
domain: another
descriptors:
- {key: key2, rate_limit: {unit: minute, requests_per_unit: 20}}
- {key: key3, rate_limit: {unit: hour, requests_per_unit: 10}}
- {key: file, value: f/*, share_threshold: true, rate_limit: {unit: minute, requests_per_unit: 2}}
";

const HOSTILE: &str = "
domain: hostile
descriptors:
- {key: x, rate_limit: {unit: minute, requests_per_unit: 9}}
- {key: y, descriptors: [{key: z, rate_limit: {unit: minute, requests_per_unit: 9}}]}
- {key: k_v, value: w, rate_limit: {unit: minute, requests_per_unit: 6}}
- {key: k, value: v_w, rate_limit: {unit: minute, requests_per_unit: 7}}
- {key: k, value: v, descriptors: [{key: w, value: x, rate_limit: {unit: minute, requests_per_unit: 8}}]}
";

async fn serve<L: Limiter + Clone>(rules: &[Rules], limiter: &L) -> SocketAddr {
    let limits = rules.iter().map(|rules| rules.descriptor_limits(limiter.clone()).expect("the files have the form"));
    let service = example::RateLimitService::new(limits.collect::<Vec<_>>());
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let address = listener.local_addr().expect("it is bound");
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    tokio::spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
    address
}

#[tokio::test(flavor = "multi_thread")]
async fn python_client_is_answered_as_by_envoys_service() {
    let file = std::env::temp_dir().join(format!("tower-ratelimit-{}-envoy.yaml", std::process::id()));
    std::fs::write(&file, ANOTHER).expect("a temporary file can be written");
    let another = Rules::builder().reload_every(Duration::ZERO).read_file(&file).expect("the file is right");
    let of_text = |text: &str| Rules::from_text(text).expect("the text is right");
    let rules = [of_text(BASIC), another, of_text(HOSTILE)];
    let address = serve(&rules, &memory(&ManualClock::new())).await;
    let away = Scripted::new();
    away.fail(true);
    let failing = serve(&rules, &away).await;
    let said =
        grpc_python::client("envoy.py", [address.to_string(), failing.to_string(), file.display().to_string()]).await;
    std::fs::remove_file(&file).expect("it was written");
    println!("{said}");
}
