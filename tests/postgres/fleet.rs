//! Operators' settings for all processes, kept in PostgreSQL.

use super::limiter;
use super::support::fleet::{Process, change_when_it_answers, check_changes, deny, until_all};
use super::support::postgres::Server;

#[tokio::test(flavor = "multi_thread")]
async fn change_reaches_twenty_processes() {
    let server = Server::start();
    let mut processes = Vec::new();
    for _ in 0..20 {
        processes.push(Process::beside(&limiter(&server.url()).await).await);
    }
    check_changes(&processes).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_set_is_put_back_into_an_emptied_table() {
    let server = Server::start();
    let processes = [Process::beside(&limiter(&server.url()).await).await];
    change_when_it_answers(&processes[0].fleet, [deny("192.0.2.1")]).await;
    server.query("TRUNCATE ratelimit").await;
    let late = [Process::beside(&limiter(&server.url()).await).await];
    until_all(&late, |process| process.denies("192.0.2.1")).await;
}
