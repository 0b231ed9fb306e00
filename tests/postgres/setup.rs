//! `connect` names the fault of a server that cannot be used, and creates the table on request.

use std::time::Duration;

use tokio::time::Instant;
use tower_ratelimit::limiter::StoreErrorKind;
use tower_ratelimit::limiter::store::StoreError;
use tower_ratelimit::limiter::store::postgres::{Durability, PostgresStore};

use super::support::postgres::Server;
use super::support::redis_server::free_port;
use super::{LONG, connected, creating, daily, left, patient, store, take};

/// Returns the error of a connect that must fail as a misconfiguration. A busy server may not say so in the time that
/// `connect` waits, so it is tried again.
async fn misconfigured(url: &str) -> StoreError {
    let began = Instant::now();
    loop {
        let refused = PostgresStore::connect(url).await.err();
        if let Some(error) = refused.as_ref().filter(|error| error.kind() == StoreErrorKind::Misconfigured) {
            return error.clone();
        }
        assert!(began.elapsed() < LONG, "it cannot be used: {refused:?}");
    }
}

#[tokio::test]
async fn missing_table_is_an_error_with_its_sql() {
    let server = Server::start();
    let text = misconfigured(&server.url()).await.to_string();
    let sql = text.split_once("CREATE TABLE ").expect("it has the statement").1;
    assert!(!text.contains('\n'), "{text}");
    server.query(&format!("CREATE TABLE {sql}")).await;
    let store = connected(PostgresStore::builder(), &server.url()).await;
    let limiter = patient().build(store).unwrap();
    assert!(take(&limiter, &daily(1), "a").await.unwrap().is_allowed());
    // A table that is dropped later is the same error of each check.
    server.query("DROP TABLE ratelimit").await;
    let error = take(&limiter, &daily(1), "b").await.unwrap_err();
    assert!(error.kind() == StoreErrorKind::Misconfigured && error.to_string().contains("CREATE TABLE"), "{error}");
}

#[tokio::test]
async fn table_is_created_once_by_many_and_has_one_index() {
    let server = Server::start();
    let url = server.url();
    let stores = (0..8).map(|_| {
        let url = url.clone();
        tokio::spawn(async move { connected(creating(Durability::Unlogged).table("limits"), &url).await })
    });
    for store in stores.collect::<Vec<_>>() {
        store.await.unwrap();
    }
    let made = server.query(
        "SELECT relpersistence::text || array_to_string(reloptions, ',') FROM pg_class WHERE relname = 'limits'",
    );
    assert_eq!(made.await, ["ufillfactor=50"]);
    assert_eq!(server.query("SELECT indexname FROM pg_indexes WHERE tablename = 'limits'").await, ["limits_pkey"]);
}

#[tokio::test]
async fn what_a_person_has_to_fix_is_told_by_connect() {
    let server = Server::start();
    let url = server.url();
    for wrong in ["", "postgres", "redis://localhost", "postgres://u@127.0.0.1:99999/d"] {
        misconfigured(wrong).await;
    }
    let error = misconfigured(&url.replace("/postgres", "/nowhere")).await;
    assert!(error.to_string().contains("check user, password and database"), "{error}");
    misconfigured(&url.replace("postgres@", "nobody@")).await;
    misconfigured(&format!("{url}?sslmode=require")).await;
    // A table of another form, a missing right, and a server that does not take writes.
    server.query("CREATE TABLE ratelimit (key text PRIMARY KEY, value bytea)").await;
    let error = misconfigured(&url).await;
    assert!(error.to_string().contains("another form"), "{error}");
    server.query("DROP TABLE ratelimit; CREATE ROLE app LOGIN").await;
    connected(creating(Durability::Logged), &url).await;
    for right in ["SELECT", "INSERT", "UPDATE", "DELETE"] {
        let error = misconfigured(&url.replace("postgres@", "app@")).await;
        assert!(error.to_string().contains("grant"), "{error}");
        server.query(&format!("GRANT {right} ON ratelimit TO app")).await;
    }
    connected(PostgresStore::builder(), &url.replace("postgres@", "app@")).await;
    server.query("ALTER ROLE app SET default_transaction_read_only = on").await;
    let error = misconfigured(&url.replace("postgres@", "app@")).await;
    assert!(error.to_string().contains("read-only"), "{error}");
}

#[tokio::test]
async fn settings_out_of_range_are_errors_before_anything_is_sent() {
    let url = "postgres://u@127.0.0.1:1/d";
    let builder = PostgresStore::builder;
    for builder in [
        builder().table("Two Words"),
        builder().max_connections(0),
        builder().max_connections(65),
        builder().max_lock_wait(Duration::ZERO),
        builder().max_lock_wait(Duration::from_secs(61)),
    ] {
        let error = builder.clone().create_table(Durability::Logged).connect(url).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{builder:?}: {error}");
    }
}

#[tokio::test]
async fn standby_is_refused_and_of_several_hosts_the_primary_is_taken() {
    let server = Server::start();
    let primary = store(&server.url()).await;
    let standby = server.standby();
    let error = misconfigured(&standby.url()).await;
    assert!(error.to_string().contains("read-only"), "{error}");
    let hosts = format!("127.0.0.1:{},127.0.0.1:{}", standby.port(), server.port());
    let both = connected(PostgresStore::builder(), &format!("postgres://postgres@{hosts}/postgres")).await;
    let (one, other) = (patient().build(primary).unwrap(), patient().build(both).unwrap());
    take(&one, &daily(5), "a").await.unwrap();
    take(&other, &daily(5), "a").await.unwrap();
    assert_eq!(left(&one, &daily(5), "a").await, 3);
}

#[tokio::test]
async fn server_that_is_away_at_first_is_used_once_it_is_there() {
    let port = free_port();
    let url = format!("postgres://postgres@127.0.0.1:{port}/postgres");
    let store = PostgresStore::connect(&url).await.expect("a server that is away is no misconfiguration");
    let limiter = patient().build(store).unwrap();
    let error = take(&limiter, &daily(1), "a").await.unwrap_err();
    let refuses = format!("PostgreSQL at 127.0.0.1:{port} refuses connections");
    assert_eq!((error.kind(), error.to_string()), (StoreErrorKind::Unavailable, refuses.clone()));
    let error = creating(Durability::Logged).connect(&url).await.unwrap_err();
    assert_eq!((error.kind(), error.to_string()), (StoreErrorKind::Unavailable, refuses), "no table can be created");
}
