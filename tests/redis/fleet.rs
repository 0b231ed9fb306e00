//! Operators' settings for all processes, kept in Redis.

use super::support::fleet::{Process, check_changes, deny, until_all};
use super::*;

/// Connects several limiters, as that many processes do.
async fn processes(server: &Server, count: usize) -> Vec<Process> {
    let mut processes = Vec::new();
    for _ in 0..count {
        processes.push(Process::beside(&connect(server).await).await);
    }
    processes
}

#[tokio::test(flavor = "multi_thread")]
async fn change_reaches_twenty_processes() {
    let server = Server::start();
    check_changes(&processes(&server, 20).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_set_outlives_processes_and_an_emptied_server() {
    let server = Server::start();
    let first = processes(&server, 2).await;
    first[0].fleet.change("alice", "", [deny("192.0.2.1")]).await.unwrap();
    drop(first);
    let second = processes(&server, 2).await;
    until_all(&second, |process| process.denies("192.0.2.1")).await;
    redis::cmd("FLUSHALL").exec(&mut server.connection()).unwrap();
    second[1].fleet.change("bob", "", [deny("192.0.2.2")]).await.unwrap();
    until_all(&second, |process| process.denies("192.0.2.1") && process.denies("192.0.2.2")).await;
    assert_eq!(second[0].fleet.in_force().revision, 2);
}
