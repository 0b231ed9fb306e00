//! The client libraries, and connections that the application has.
#![cfg(feature = "redis-rs")]

use redis::aio::MultiplexedConnection;
use redis::cluster::ClusterClient;
use redis::{AsyncConnectionConfig, ProtocolVersion};
use tower_ratelimit::{Quota, limiter::StoreErrorKind};

use super::{LONG, connected, passes, patient, policy, take};
use crate::support::redis_cluster::Cluster;
use crate::support::redis_server::Server;

/// Returns a line for each connection to the server, except the one that asks.
fn connections(server: &Server) -> Vec<String> {
    let list: String = redis::cmd("CLIENT").arg("LIST").query(&mut server.connection()).unwrap();
    list.lines().filter(|line| !line.contains("cmd=client")).map(str::to_owned).collect()
}

/// Opens a connection as an application does, but without the library's timeouts, which a busy machine does not keep.
pub(super) async fn open(url: &str) -> MultiplexedConnection {
    let config = AsyncConnectionConfig::new().set_response_timeout(None).set_connection_timeout(None);
    let client = redis::Client::open(url).unwrap();
    client.get_multiplexed_async_connection_with_config(&config).await.unwrap()
}

#[tokio::test]
async fn connection_of_the_application_shares_the_limits() {
    let server = Server::start();
    let connection = open(&server.url()).await;
    let over = patient().over(connection.clone()).await.unwrap();
    let policy = policy("test", Quota::per_hour(2));
    assert!(passes(&over, &policy, "a").await);
    assert_eq!(connections(&server).len(), 1, "no other connection was opened");
    let other = connected(patient(), &server.url()).await;
    assert!(passes(&other, &policy, "a").await);
    assert!(!passes(&over, &policy, "a").await && !passes(&other, &policy, "a").await);
    // It is the application's to close.
    over.close();
    drop(over);
    let mut connection = connection;
    redis::cmd("PING").exec_async(&mut connection).await.unwrap();
}

#[tokio::test]
async fn lost_connection_of_the_application_is_no_answer() {
    let mut server = Server::start();
    let over = patient().over(open(&server.url()).await).await.unwrap();
    let policy = policy("test", Quota::per_hour(5));
    assert!(passes(&over, &policy, "a").await);
    server.kill();
    let error = take(&over, &policy, "a", 1).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("the application's connection"), "{error}");
}

#[tokio::test]
async fn connection_to_a_cluster_is_refused() {
    let server = Server::with(&["--cluster-enabled", "yes"]);
    for protocol in ["", "?protocol=resp3"] {
        let connection = open(&format!("{}{protocol}", server.url())).await;
        let error = patient().over(connection).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error}");
        assert!(error.to_string().contains("redis-cluster://"), "{error}");
    }
}

/// The crate's own connection to a whole cluster.
#[tokio::test]
async fn connection_to_a_whole_cluster_is_refused() {
    let cluster = Cluster::start();
    let urls: Vec<String> = cluster.servers.iter().map(Server::url).collect();
    for protocol in [ProtocolVersion::RESP2, ProtocolVersion::RESP3] {
        let builder = ClusterClient::builder(urls.clone()).use_protocol(protocol);
        let client = builder.connection_timeout(LONG).response_timeout(LONG).build().unwrap();
        let connection = client.get_async_connection().await.unwrap();
        let error = patient().over(connection).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error}");
        assert!(error.to_string().contains("redis-cluster://"), "{error}");
    }
}

#[tokio::test]
async fn connection_of_the_application_is_its_to_log_in() {
    let server = Server::with(&["--requirepass", "secret"]);
    let mut connection = open(&server.url().replace("redis://", "redis://:secret@")).await;
    let over = patient().over(connection.clone()).await.unwrap();
    let policy = policy("test", Quota::per_hour(5));
    assert!(passes(&over, &policy, "a").await);
    redis::cmd("RESET").exec_async(&mut connection).await.unwrap();
    let error = take(&over, &policy, "a", 1).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error}");
    assert!(error.to_string().contains("NOAUTH"), "{error}");
    redis::cmd("AUTH").arg("secret").exec_async(&mut connection).await.unwrap();
    assert!(passes(&over, &policy, "a").await);
}

#[cfg(feature = "fred")]
#[tokio::test]
async fn builder_chooses_the_client() {
    use tower_ratelimit::limiter::redis::RedisClient;

    let server = Server::start();
    for (client, protocol) in [(RedisClient::Fred, " resp=2"), (RedisClient::RedisRs, " resp=3")] {
        let limiter = connected(patient().client(client), &server.url()).await;
        // Redis before 7.0 does not say the protocol.
        let lines = connections(&server);
        assert!(lines.iter().any(|line| line.contains(protocol) || !line.contains(" resp=")), "{lines:?}");
        drop(limiter);
    }
    assert_eq!(RedisClient::default(), RedisClient::Fred);
}
