//! Servers that share their limits in PostgreSQL, and in a Redis whose master is replaced.

use std::ops::RangeInclusive;
use std::time::Instant;

use serde_json::{Value, json};

use crate::http::{get, post_json};
use crate::server::{Folder, Server};
use crate::support::postgres;
use crate::support::redis_sentinel::Sentinel;
use crate::wait::{LONG, wait_until, wait_until_ready};

const RULES: &str = "rules: [{name: client, quota: 3 per day, key: client-ip}]\n";
const OPERATOR: (&str, &str) = ("Authorization", "Bearer 0123456789abcdef");

fn serve(store: &[&str]) -> Server {
    let folder = Folder::new();
    folder.write("operators", "alice 0123456789abcdef\n");
    Server::start_in(folder, RULES, &[&["--operators", "operators", "--deadline", "20s"], store].concat())
}

fn check(server: &Server, client: &str) -> Value {
    post_json(server.asked, "/v1/check", &[], &json!({ "client": client }).to_string()).json()
}

/// Asks about a client until the store has decided. Returns the answer, and how often the store stood still for so long
/// that a try failed.
fn decided(server: &Server, client: &str) -> (Value, usize) {
    let began = Instant::now();
    for failed in 0.. {
        let answer = check(server, client);
        if answer["outcome"] != "failed_closed" {
            return (answer, failed);
        }
        assert!(began.elapsed() < LONG, "{answer}");
    }
    unreachable!()
}

/// Returns how often a client passes until it is refused, asking each server in turn. A try that failed may have been
/// charged, so this is the least and the most. Without a limit it would pass ten times.
fn allowed(servers: &[Server; 2], client: &str) -> RangeInclusive<usize> {
    let (mut passed, mut failed) = (0, 0);
    for server in servers.iter().cycle().take(10) {
        let (answer, failures) = decided(server, client);
        failed += failures;
        if answer["allowed"] == false {
            break;
        }
        passed += 1;
    }
    passed..=passed + failed
}

fn block(server: &Server, client: &str) -> u16 {
    let block = json!({"kind": "network", "name": "rules", "subject": client, "value": "deny", "why": "x"});
    post_json(server.admin, "/v1/settings", &[OPERATOR], &block.to_string()).status
}

#[test]
fn servers_share_limits_and_settings_in_postgres() {
    let mut database = postgres::Server::start();
    let url = database.url();
    let servers = [0, 1].map(|_| serve(&["--postgres", &url, "--prefix", "shop"]));
    servers.iter().for_each(wait_until_ready);
    assert!(allowed(&servers, "203.0.113.9").contains(&3));
    assert_eq!(block(&servers[0], "203.0.113.10"), 200);
    wait_until(|| check(&servers[1], "203.0.113.10")["status"] == 403);
    // Another application in the same database.
    let other = serve(&["--postgres", &url, "--prefix", "other"]);
    wait_until_ready(&other);
    assert_eq!(decided(&other, "203.0.113.9").0["allowed"], true);
    // While the database is away nothing passes, and what operators have set stays in force.
    database.stop();
    let away = check(&servers[0], "203.0.113.11");
    assert_eq!((&away["allowed"], &away["outcome"]), (&json!(false), &json!("failed_closed")), "{away}");
    assert_eq!(check(&servers[0], "203.0.113.10")["status"], 403);
    wait_until(|| get(servers[0].admin, "/ready", &[]).status == 503);
    // A server that starts meanwhile goes on as soon as it can.
    let late = serve(&["--postgres", &url, "--prefix", "shop"]);
    assert_eq!(get(late.admin, "/ready", &[]).status, 503);
    database.restart();
    servers.iter().chain([&late]).for_each(wait_until_ready);
    wait_until(|| check(&late, "203.0.113.10")["status"] == 403);
    assert_eq!(decided(&late, "203.0.113.9").0["allowed"], false, "what was used stays used");
}

#[test]
fn servers_follow_the_master_that_sentinels_name() {
    let mut sentinel = Sentinel::start();
    let url = sentinel.url();
    let servers = [0, 1].map(|_| serve(&["--redis", &url]));
    servers.iter().for_each(wait_until_ready);
    assert!(allowed(&servers, "203.0.113.9").contains(&3));
    assert_eq!(block(&servers[0], "203.0.113.10"), 200);
    wait_until(|| check(&servers[1], "203.0.113.10")["status"] == 403);
    sentinel.replace_master();
    servers.iter().for_each(wait_until_ready);
    // Server 0 has never refused this client, so the new master refuses it.
    wait_until(|| check(&servers[0], "203.0.113.9")["outcome"] == "limited");
    // Server 1 remembers its refusal, and is still ready until it reads the settings again.
    wait_until(|| check(&servers[1], "203.0.113.11")["outcome"] == "allowed");
    assert_eq!(check(&servers[1], "203.0.113.10")["status"], 403);
    assert_eq!(block(&servers[1], "203.0.113.12"), 200);
    wait_until(|| check(&servers[0], "203.0.113.12")["status"] == 403);
}
