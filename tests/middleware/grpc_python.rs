//! Google's gRPC client for Python understands a refusal.
//!
//! The test is never skipped. It needs `python3` with `venv`, and PyPI when it runs for the first
//! time.

#[path = "../../examples/tonic.rs"]
#[allow(dead_code, reason = "the example's service is served here, its main is not")]
mod example;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::process::Command;
use tonic::transport::Server;
use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, key};

const QUOTA: u32 = 3;
/// The client waits for a third of it, twice.
const PERIOD: Duration = Duration::from_secs(6);

const INSTALL: &str = "python3 with venv and pip is needed; on Debian: apt-get install python3 python3-venv";

async fn run(command: &mut Command, needed: &str) -> String {
    let output = command.output().await.unwrap_or_else(|error| panic!("{command:?}: {error}\n{needed}"));
    let [out, err] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    assert!(output.status.success(), "{command:?} failed\n{out}\n{err}\n{needed}");
    out
}

/// Returns a Python with the client's dependencies, in a virtual environment below `target` that is
/// created once.
async fn python(client: &Path) -> PathBuf {
    let environment = Path::new(env!("CARGO_TARGET_TMPDIR")).join("grpc_python");
    let python = environment.join("bin/python");
    let complete = environment.join("complete");
    if !complete.exists() {
        run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&environment), INSTALL).await;
        let requirements = client.join("requirements.txt");
        let mut pip = Command::new(&python);
        pip.args(["-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--requirement"]).arg(requirements);
        run(&mut pip, "PyPI must be reachable when this test runs for the first time").await;
        std::fs::write(&complete, "").expect("a directory that was just made can be written to");
    }
    python
}

/// Runs the client, and returns what it prints.
async fn client(arguments: [String; 3]) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/grpc_python");
    let mut command = Command::new(python(&folder).await);
    command.arg(folder.join("client.py")).args(arguments);
    run(command.env("no_proxy", "127.0.0.1").kill_on_drop(true), "").await
}

async fn serve() -> SocketAddr {
    let quota = Quota::new(u64::from(QUOTA), PERIOD).expect("the quota is in range");
    let limit = RateLimitLayer::new(MemoryLimiter::new(), quota, key::peer_ip());
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let address = listener.local_addr().expect("it is bound");
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    tokio::spawn(Server::builder().layer(limit).add_service(example::Greeter).serve_with_incoming(incoming));
    address
}

#[tokio::test(flavor = "multi_thread")]
async fn python_client_understands_a_refusal_and_its_pushback() {
    let address = serve().await;
    let said = client([address.to_string(), QUOTA.to_string(), PERIOD.as_millis().to_string()]).await;
    println!("{said}");
}
