//! The program as a server, over TCP: any body to each interface for applications and operators, any message of Envoy's
//! protocol, and any head of a request. Each has an answer, and none is that the server failed.
#![no_main]

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::sync::{LazyLock, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::{Args, Command, FromArgMatches};
use http::Request;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use libfuzzer_sys::fuzz_target;
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::time::timeout;

#[allow(dead_code, reason = "other commands use the rest")]
#[path = "../../../cli/src/check.rs"]
mod check;
#[allow(dead_code, reason = "other commands use the rest")]
#[path = "../../../cli/src/diff.rs"]
mod diff;
#[allow(dead_code, reason = "other commands use the rest")]
#[path = "../../../cli/src/exit.rs"]
mod exit;
#[allow(dead_code, reason = "other commands use the rest")]
#[path = "../../../cli/src/files.rs"]
mod files;
#[allow(dead_code, reason = "other commands use the rest")]
#[path = "../../../cli/src/output.rs"]
mod output;
#[allow(dead_code, unused_imports, unreachable_pub, reason = "the program uses the rest")]
#[path = "../../../cli/src/serve/mod.rs"]
mod serve;

/// A file of rules for requests.
const RULES: &str = "rules:
  - {name: r, quota: 9 per second, key: client-ip}
  - {name: p, quota: 2 per second sliding log, key: path}
";
/// A file in Envoy's form, for descriptors.
const ENVOY: &str = "domain: d\ndescriptors:\n  - {key: a, rate_limit: {unit: minute, requests_per_unit: 2}}\n";

const ENVOY_METHOD: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

const TOKEN: &str = "0123456789abcdef";

/// The longest time for an answer on a busy machine.
const LONG: Duration = Duration::from_secs(20);

/// The paths for applications, and from the third one on those for operators.
const PATHS: [&str; 6] = ["/v1/check", "/v1/report", "/v1/explain", "/v1/reset", "/v1/settings", "/v1/rollback"];

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime is possible")
});

/// A server: its addresses for those who ask, and for operators.
struct Serving([SocketAddr; 2]);

static NATIVE: LazyLock<Serving> = LazyLock::new(|| Serving::start("native", RULES));
static OF_ENVOY: LazyLock<Serving> = LazyLock::new(|| Serving::start("envoy", ENVOY));

impl Serving {
    /// Starts the program's server in a thread.
    fn start(name: &str, rules: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("fuzz-serve-{}-{name}", std::process::id()));
        fs::create_dir_all(&folder).expect("there is room");
        let write = |name: &str, text: &str| {
            let file = folder.join(name);
            fs::write(&file, text).expect("there is room");
            file.to_str().expect("it is text").to_owned()
        };
        let addresses = [(); 2].map(|()| {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("there is a port");
            listener.local_addr().expect("it has one")
        });
        let arguments = [
            "serve",
            &write("rules.yaml", rules),
            "--operators",
            &write("operators", &format!("fuzz {TOKEN}")),
            "--fleet",
            &format!("{}", Path::join(&folder, "fleet").display()),
            "--listen",
            &addresses[0].to_string(),
            "--admin",
            &addresses[1].to_string(),
        ];
        let matches = serve::Options::augment_args(Command::new("serve")).get_matches_from(arguments);
        let options = serve::Options::from_arg_matches(&matches).expect("the options are possible");
        std::thread::spawn(move || {
            let mut output = output::Output::default();
            let code = serve::run(&options, &mut output).expect("it serves");
            output.write(code); // if the rules have problems
        });
        let began = Instant::now();
        while addresses.iter().any(|address| std::net::TcpStream::connect(address).is_err()) {
            assert!(began.elapsed() < LONG, "the server does not begin");
            std::thread::sleep(Duration::from_millis(5));
        }
        Self(addresses)
    }
}

type Body = Full<Bytes>;

/// Connections that stay open.
static HTTP1: Mutex<Vec<(SocketAddr, http1::SendRequest<Body>)>> = Mutex::new(Vec::new());
static HTTP2: Mutex<Option<http2::SendRequest<Body>>> = Mutex::new(None);

/// Opens a connection on which no write waits for the receipt of the last one, which takes the server 40 ms.
async fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).await.expect("the server listens");
    stream.set_nodelay(true).expect("it is a connection");
    stream
}

async fn post(address: SocketAddr, path: &str, body: &[u8]) {
    let known = {
        let mut open = HTTP1.lock().expect("no thread panics");
        let at = open.iter().position(|(of, sender)| *of == address && sender.is_ready());
        at.map(|at| open.swap_remove(at).1)
    };
    // The server may close a connection that was open for long, just when it is used again.
    if let Some(sender) = known {
        if post_over(address, sender, path, body).await.is_ok() {
            return;
        }
    }
    let stream = connect(address).await;
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.expect("it speaks HTTP/1");
    tokio::spawn(connection);
    post_over(address, sender, path, body).await.expect("there is an answer");
}

async fn post_over(
    address: SocketAddr,
    mut sender: http1::SendRequest<Body>,
    path: &str,
    body: &[u8],
) -> hyper::Result<()> {
    let request = Request::post(path).header("host", "localhost").header("content-type", "application/json");
    let request = request.header("authorization", format!("Bearer {TOKEN}"));
    let request = request.body(Full::new(Bytes::copy_from_slice(body))).expect("it is a request");
    let response = sender.send_request(request).await?;
    assert!(response.status().as_u16() < 500, "{} to {path}", response.status());
    let text = response.into_body().collect().await?.to_bytes();
    assert!(!text.is_empty(), "an answer says something");
    HTTP1.lock().expect("no thread panics").push((address, sender));
    Ok(())
}

async fn call(address: SocketAddr, message: &[u8]) {
    let known = HTTP2.lock().expect("no thread panics").take().filter(http2::SendRequest::is_ready);
    if let Some(sender) = known {
        if call_over(sender, message).await.is_ok() {
            return;
        }
    }
    let stream = connect(address).await;
    let handshake = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await;
    let (sender, connection) = handshake.expect("it speaks HTTP/2");
    tokio::spawn(connection);
    call_over(sender, message).await.expect("there is an answer");
}

async fn call_over(mut sender: http2::SendRequest<Body>, message: &[u8]) -> hyper::Result<()> {
    let length = u32::try_from(message.len()).expect("it is short").to_be_bytes();
    let body = Bytes::from([&[0], &length[..], message].concat());
    let request = Request::post(format!("http://localhost{ENVOY_METHOD}"));
    let request = request.header("content-type", "application/grpc").header("te", "trailers");
    let response = sender.send_request(request.body(Full::new(body)).expect("it is a request")).await?;
    assert_eq!(response.status(), 200);
    let at_once = response.headers().get("grpc-status").cloned();
    let whole = response.into_body().collect().await?;
    let status = at_once.or_else(|| whole.trailers()?.get("grpc-status").cloned()).expect("a call has a status");
    // 2, 13 and 15 mean that the server failed.
    assert!(!["2", "13", "15"].iter().any(|failed| status == *failed), "{status:?}");
    *HTTP2.lock().expect("no thread panics") = Some(sender);
    Ok(())
}

/// Sends a head as it stands over a connection of its own, after the beginning of a proxy's question. The server may
/// close it, or answer that the head is none.
async fn ask(address: SocketAddr, head: &[u8]) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut stream = connect(address).await;
    let _ = stream.write_all(b"GET /auth/nginx HTTP/1.1\r\nhost: a\r\nconnection: close\r\n").await;
    let _ = stream.write_all(head).await;
    let _ = stream.write_all(b"\r\n\r\n").await;
    let _ = stream.shutdown().await;
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    assert!(!answer.starts_with(b"HTTP/1.1 500"), "{}", answer.escape_ascii());
}

// The first byte is the interface.
fuzz_target!(|bytes: &[u8]| {
    let Some((which, rest)) = bytes.split_first() else { return };
    let which = usize::from(*which) % 9;
    let answered = async {
        match (which, PATHS.get(which)) {
            (0 | 1, Some(path)) => post(NATIVE.0[0], path, rest).await,
            (_, Some(path)) => post(NATIVE.0[1], path, rest).await,
            (6, None) => ask(NATIVE.0[0], rest).await,
            (_, None) => call(OF_ENVOY.0[0], rest).await,
        }
    };
    LazyLock::force(&NATIVE);
    LazyLock::force(&OF_ENVOY);
    let answered = RUNTIME.block_on(async { timeout(LONG, answered).await });
    assert!(answered.is_ok(), "the server does not answer");
});
