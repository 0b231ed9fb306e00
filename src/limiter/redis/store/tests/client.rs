//! Clients that the user has made.

use fred::types::Builder;
use fred::types::config::{Config, ReconnectPolicy};

use super::*;

fn kill_connections(server: &Server) {
    let () =
        redis::cmd("CLIENT").arg(&["KILL", "TYPE", "normal", "SKIPME", "yes"]).query(&mut server.connection()).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_freds_defaults_a_reset_ends_it_and_calls_still_end_in_time() {
    let server = Server::start();
    let client = Client::new(Config::from_url(&server.url()).unwrap(), None, None, None);
    client.init().await.unwrap();
    let heard = Heard::default();
    let store = Store::of_client(client.clone(), heard.settings()).unwrap();
    assert_eq!(run(&store, "key").await, Ok(Value::Integer(1)));
    kill_connections(&server);
    sleep(100 * MS).await;
    for _ in 0..8 {
        let error = tokio::time::timeout(Settings::default().deadline + WORST_SLACK, run(&store, "key"))
            .await
            .unwrap()
            .unwrap_err();
        assert!(matches!(error.kind(), RedisErrorKind::Unavailable | RedisErrorKind::Timeout), "{error}");
    }
    assert!(store.is_open(0));
    assert_eq!(heard.downs(), 1);
    client.init().await.unwrap();
    eventually("what the user mends is found", || !store.is_open(0)).await;
    assert_eq!(run(&store, "key").await, Ok(Value::Integer(2)));
    store.close();
    assert_eq!(client.ping::<String>(None).await.unwrap(), "PONG", "the user's client is not closed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_is_used_in_turn_and_runs_no_script_twice() {
    let mut server = Server::start();
    let mut builder = Builder::from_config(Config::from_url(&server.url()).unwrap());
    builder.set_policy(ReconnectPolicy::new_constant(0, 50));
    let pool = builder.build_pool(3).unwrap();
    pool.init().await.unwrap();
    let store = Store::of_pool(&pool, Settings::default()).unwrap();
    let mut load = Load::start(&store, 2, &["key"]);
    sleep(200 * MS).await;
    kill_connections(&server);
    sleep(300 * MS).await;
    server.kill();
    sleep(300 * MS).await;
    server.restart();
    load.mended();
    sleep(1_500 * MS).await;
    let report = load.end().await.check("a pool of the user's: kill -9");
    assert!(counted(&server, "key") <= report.calls);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_users_connection_that_is_garbled_begins_anew_too() {
    let server = Server::start();
    let mut builder = Builder::from_config(Config::from_url(&server.url()).unwrap());
    builder.set_policy(ReconnectPolicy::new_constant(0, 20));
    let client = builder.build().unwrap();
    client.init().await.unwrap();
    let store = Store::of_client(client, Settings::default()).unwrap();
    let connection = || {
        let list: String = redis::cmd("CLIENT").arg("LIST").query(&mut server.connection()).unwrap();
        let of_fred = list.lines().find(|line| !line.contains("cmd=client"));
        of_fred.and_then(|line| line.split(' ').next().map(str::to_owned))
    };
    run(&store, "key").await.unwrap();
    let before = connection();
    assert!(before.is_some());
    store.garbled(0);
    eventually("it has another one", || connection().is_some_and(|now| Some(now) != before)).await;
    let began = Instant::now();
    while run(&store, "key").await.is_err() {
        assert!(began.elapsed() < RECOVERY);
        sleep(5 * MS).await;
    }
}
