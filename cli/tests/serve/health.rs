//! Health, as balancers ask for it.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::http::get;
use crate::python::{self, Client};
use crate::server::{Server, rules};
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
    let before = server.lines().len(); // a slow Redis fails at the start, too
    let client = Client::start(client("health.py").arg(server.asked.to_string()));
    assert_eq!(client.line(), "SERVING");
    redis.kill();
    assert_eq!(client.line(), "NOT_SERVING");
    redis.restart();
    assert_eq!(client.line(), "SERVING");
    server.signal("TERM");
    assert_eq!(client.line(), "NOT_SERVING", "balancers learn it before connections are refused");
    server.signal("TERM");
    assert_eq!(client.line(), "UNAVAILABLE", "the call ends with the server, and does not hold it");
    assert_eq!(server.wait(), Some(0));
    let log: Vec<_> = server.lines()[before..].iter().map(|line| line["event"].as_str().unwrap().to_owned()).collect();
    for event in ["store-away", "store-back"] {
        assert_eq!(log.iter().filter(|known| *known == event).count(), 1, "{log:?}");
    }
}

#[test]
fn readiness_follows_the_store_only_if_requests_do() {
    let away = format!("redis://127.0.0.1:{}", redis_server::free_port());
    for (on_error, status, said) in [
        ("deny", 503, "the store does not decide: the log says why\n"),
        ("allow", 200, "ready, but the store does not decide: the log says why\n"),
        ("allow-always", 200, "ready, but the store does not decide: the log says why\n"),
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
