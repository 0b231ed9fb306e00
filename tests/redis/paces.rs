//! Two processes pace the downloads of one user. One of them is stopped, as a container's CPU quota does, and goes on.

use std::convert::Infallible;
use std::io::{BufRead, BufReader, Write};
use std::pin::Pin;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use http::{Request, Response};
use http_body::Frame;
use http_body_util::BodyExt;
use tokio::time::Instant;
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::{Quota, RateLimitLayer, key};

use super::{Server, connected, eventually, patient, rule};

/// In bytes a second. The burst is a quarter of it.
const PACE: u64 = 400_000;
const BURST: u64 = PACE / 4;

/// The variables with the server and with the units that the process may lease.
const URL: &str = "RATELIMIT_TEST_PACE_URL";
const LEASES: &str = "RATELIMIT_TEST_PACE_LEASES";

/// A body that does not end.
struct Endless;

impl http_body::Body for Endless {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(&[b'x'; 10_000])))))
    }
}

/// Runs as each of the processes, and prints how many bytes it has sent. It does nothing in the parent.
#[tokio::test]
async fn one_of_the_processes() {
    let (Ok(url), Ok(leases)) = (std::env::var(URL), std::env::var(LEASES)) else { return };
    let limiter = connected(patient().lease_units(leases.parse().unwrap()), &url).await;
    let pace = rule("download", Quota::per_second(PACE).burst(BURST).unwrap()).pace_responses();
    let inner = service_fn(|_: Request<Body>| async { Ok::<_, Infallible>(Response::new(Body::new(Endless))) });
    let service = RateLimitLayer::new(limiter, pace, key::global()).layer(inner);
    let mut body = service.oneshot(Request::new(Body::empty())).await.unwrap().into_body();
    println!("\nconnected");
    std::io::stdin().read_line(&mut String::new()).unwrap();
    let mut sent = 0;
    // It ends when the parent kills it, or reads no more.
    while let Some(frame) = body.frame().await {
        sent += frame.unwrap().data_ref().map_or(0, Bytes::len);
        if writeln!(std::io::stdout(), "sent {sent}").is_err() {
            return;
        }
    }
}

/// A process that sends a body. Dropping it kills it, even a stopped one.
struct Sender {
    child: Child,
    /// `u64::MAX` until it is connected.
    sent: Arc<AtomicU64>,
}

impl Sender {
    fn start(server: &Server, leases: u64) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "paces::one_of_the_processes", "--nocapture"])
            .env(URL, server.url())
            .env(LEASES, leases.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (lines, sent) = (BufReader::new(child.stdout.take().unwrap()).lines(), Arc::new(AtomicU64::new(u64::MAX)));
        let counted = Arc::clone(&sent);
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                match line.strip_prefix("sent ") {
                    Some(sent) => counted.store(sent.parse().unwrap(), Ordering::Relaxed),
                    None if line == "connected" => counted.store(0, Ordering::Relaxed),
                    None => {}
                }
            }
        });
        Self { child, sent }
    }

    fn go(&self) {
        let mut stdin = self.child.stdin.as_ref().unwrap();
        stdin.write_all(b"\n").unwrap();
    }

    fn signal(&self, signal: &str) {
        let status = Command::new("kill").args([signal, &self.child.id().to_string()]).status();
        assert!(status.unwrap().success());
    }

    fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    async fn sends(&self, more: u64, when: &str) {
        let before = self.sent();
        eventually(&format!("a process sends {when}"), async || self.sent() >= before + more).await;
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

async fn stop_one_of_two(leases: u64) {
    let server = Server::start();
    let [one, other] = [(); 2].map(|()| Sender::start(&server, leases));
    eventually("both connect", async || one.sent() == 0 && other.sent() == 0).await;
    let began = Instant::now();
    let within_the_quota = |when: &str| {
        let sent = one.sent() + other.sent();
        let most = BURST + (began.elapsed().as_micros() * u128::from(PACE) / 1_000_000) as u64;
        assert!(sent <= most, "with {leases} leased units, {when}: {sent} bytes of {most}");
    };
    [&one, &other].into_iter().for_each(Sender::go);
    tokio::join!(one.sends(PACE / 8, "beside another"), other.sends(PACE / 8, "beside another"));
    within_the_quota("while both run");
    other.signal("-STOP");
    let stopped = Instant::now();
    one.sends(PACE, "while the other one is stopped").await;
    println!("with {leases} leased units, one sent a second's bytes in {:?}", stopped.elapsed());
    within_the_quota("while one is stopped");
    other.signal("-CONT");
    tokio::join!(one.sends(PACE / 8, "after the other"), other.sends(PACE / 8, "after it was stopped"));
    within_the_quota("after one was stopped");
}

#[tokio::test]
async fn stopped_process_leaves_its_pace_to_the_other() {
    tokio::join!(stop_one_of_two(0), stop_one_of_two(BURST / 2));
}
