//! Health, as balancers ask for it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::http::{get, post_json};
use crate::python::{self, Client};
use crate::server::{Server, rules};
use crate::support::proxy::Proxy;
use crate::support::redis_server;
use crate::wait::{wait_until, wait_until_ready};

fn clients() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/serve/clients")
}

/// Returns a Python with the packages that the scripts in `clients` need.
pub(crate) fn python() -> Command {
    let install = "python3 with venv is needed, and PyPI when this test runs for the first time; on Debian: \
                   apt-get install python3 python3-venv";
    let environment = python::environment("clients", &clients().join("requirements.txt"), &[], install);
    let mut python = Command::new(environment.join("bin/python"));
    python.env("no_proxy", "127.0.0.1");
    python
}

/// Returns a script of `clients`.
pub(crate) fn client(script: &str) -> Command {
    let mut client = python();
    client.arg(clients().join(script));
    client
}

#[test]
fn python_client_watches_the_health_until_the_end() {
    let mut redis = redis_server::Server::start();
    let mut server = Server::start(&rules(), &["--redis", &redis.url(), "--deadline", "20s", "--drain-delay", "1h"]);
    wait_until_ready(&server);
    // A slow Redis fails at the start, too. It is back before the server is ready, and the line is read by and by.
    let count = |event: &str| server.lines().iter().filter(|line| line["event"] == event).count();
    wait_until(|| count("store-back") == count("store-away"));
    let before = server.lines().len();
    let client = Client::start(client("health.py").arg(server.asked.to_string()));
    // A Redis that stands still for some seconds fails, too, so the client learns of more than one failure.
    let wait_for = |status: &str| while client.line() != status {};
    wait_for("SERVING");
    redis.kill();
    wait_for("NOT_SERVING");
    redis.restart();
    wait_for("SERVING");
    server.signal("TERM");
    wait_for("NOT_SERVING"); // balancers learn it before connections are refused
    server.signal("TERM");
    wait_for("UNAVAILABLE"); // the call ends with the server, and does not hold it
    assert_eq!(server.wait(), Some(0));
    let log: Vec<_> = server.lines()[before..].iter().map(|line| line["event"].as_str().unwrap().to_owned()).collect();
    let away = log.iter().position(|event| event == "store-away");
    let back = log.iter().rposition(|event| event == "store-back");
    assert!(away.is_some() && back > away, "{log:?}");
}

/// No request passes, so no balancer should send any.
#[test]
fn server_is_not_ready_while_its_store_answers_too_late() {
    let redis = redis_server::Server::start();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let proxy = runtime.block_on(async { Proxy::start(redis.port()) });
    // A process that had no time until the answer came takes it for one in time, so it comes long after the deadline. A
    // connection is made in three round trips, within five times the deadline. A round trip above 5 s is not measured.
    proxy.delay(Duration::from_millis(4_500));
    let mut server = Server::start(&rules(), &["--redis", &proxy.url(), "--deadline", "3s"]);
    let far = server.wait_for_line(|line| line["event"] == "store-far");
    assert!(far["message"].as_str().unwrap().ends_with("no check has an answer in time"), "{far}");
    wait_until(|| get(server.admin, "/ready", &[]).status == 503);
    let began = Instant::now();
    std::thread::scope(|scope| {
        for client in 0..8 {
            let (asked, body) = (server.asked, format!("{{\"client\": \"203.0.113.{client}\"}}"));
            scope.spawn(move || {
                while began.elapsed() < Duration::from_secs(8) {
                    let answer = post_json(asked, "/v1/check", &[], &body).json();
                    assert_eq!(answer["allowed"], false, "{answer}");
                    std::thread::sleep(Duration::from_millis(20));
                }
            });
        }
        while began.elapsed() < Duration::from_secs(8) {
            assert_eq!(get(server.admin, "/ready", &[]).status, 503, "{:?}", server.lines());
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    assert!(server.lines().iter().all(|line| line["event"] != "store-back"), "{:?}", server.lines());
    proxy.delay(Duration::ZERO);
    proxy.reset(); // a delay is that of a connection
    wait_until_ready(&server);
    server.wait_for_line(|line| line["event"] == "store-back");
}

#[test]
fn readiness_follows_the_store_only_if_requests_do() {
    let away = format!("redis://127.0.0.1:{}", redis_server::free_port());
    for (on_error, status, said) in [
        ("deny", 503, "the store does not decide (unavailable): the log says why\n"),
        ("allow", 200, "ready, but the store does not decide (unavailable): the log says why\n"),
        ("allow-always", 200, "ready, but the store does not decide (unavailable): the log says why\n"),
    ] {
        let server = Server::start(&rules(), &["--redis", &away, "--on-error", on_error, "--drain-delay", "1h"]);
        for address in [server.asked, server.admin] {
            let answer = get(address, "/ready", &[]);
            assert_eq!((answer.status, &*answer.body), (status, said), "{on_error}");
        }
        server.signal("TERM");
        wait_until(|| get(server.admin, "/ready", &[]).status == 503);
    }
}
