//! A master that sentinels replace.

use super::redis_sentinel::Sentinel;
use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_master_that_sentinels_name_is_used() {
    let mut servers = tokio::task::block_in_place(Sentinel::start);
    let store = connected(&servers.url(), ConnectionSettings::default()).await;
    let mut load = Load::start(&store, 1, &["key"]);
    sleep(200 * MS).await;
    tokio::task::block_in_place(|| servers.replace_master());
    load.fixed();
    sleep(2_000 * MS).await;
    load.end().await.check("sentinel: the master killed");
    assert!(counted(&servers.servers[1], "key") > 0, "the calls went to the other one");
}

/// Returns the settings for each client library.
fn clients(settings: &ConnectionSettings) -> Vec<ConnectionSettings> {
    use crate::limiter::redis::client::RedisClient;
    let clients = [
        #[cfg(feature = "fred")]
        RedisClient::Fred,
        #[cfg(feature = "redis-rs")]
        RedisClient::RedisRs,
    ];
    clients.into_iter().map(|client| ConnectionSettings { client, ..settings.clone() }).collect()
}

#[tokio::test]
async fn wrong_url_of_sentinels_is_refused_with_the_right_form() {
    for settings in clients(&ConnectionSettings::default()) {
        for url in
            ["redis-sentinel://a:1,b:2,c:3", "redis-sentinel://a:1,b:2?sentinelServiceName=x", "redis-sentinel://a"]
        {
            let error = RedisConnections::connect(url, settings.clone()).err().expect("the URL is wrong");
            let said = error.to_string();
            assert!(said.contains("://a:26379?node=b:26379&node=c:26379&sentinelServiceName=NAME"), "{url}: {said}");
        }
    }
    let url = "redis-sentinel://127.0.0.1:1?node=127.0.0.1:2&node=127.0.0.1:3&sentinelServiceName=NAME";
    for settings in clients(&ConnectionSettings::default()) {
        RedisConnections::connect(url, settings).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_master_is_named_in_an_event() {
    let mut servers = tokio::task::block_in_place(Sentinel::start);
    let heard = Heard::default();
    let mut stores = Vec::new();
    for settings in clients(&heard.settings()) {
        stores.push(connected(&servers.url(), settings).await);
    }
    assert_eq!(heard.count(|event| matches!(event, LimiterEvent::MasterChanged { .. })), 0, "it is the first one");
    tokio::task::block_in_place(|| servers.replace_master());
    let new = format!("127.0.0.1:{}", servers.servers[1].port());
    let is_named = |event: &LimiterEvent| match event {
        LimiterEvent::MasterChanged { server, master } => {
            assert!(server.starts_with("master tested of sentinel 127.0.0.1:"), "{server}");
            *master == new
        }
        _ => false,
    };
    eventually("the new master is named", || heard.count(is_named) == stores.len()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_tell_sentinels_from_their_master() {
    let (mut master, mut sentinel) = tokio::task::block_in_place(|| {
        let master = Server::start();
        let watched = format!("sentinel monitor tested 127.0.0.1 {} 1", master.port());
        let patience = "sentinel down-after-milliseconds tested 600000".to_owned();
        (master, Server::sentinel(&[watched, patience]))
    });
    let url = |name: &str| format!("redis-sentinel://127.0.0.1:{}?sentinelServiceName={name}", sentinel.port());
    let (known, unknown) = (url("tested"), url("another"));
    let fails_by = async |store: &RedisConnections, words: &[&str]| {
        let (began, mut said) = (Instant::now(), String::new());
        while !words.iter().all(|words| said.contains(words)) {
            assert!(began.elapsed() < LONG, "{words:?}: the last error is {said}");
            if let Err(error) = run(store, "key").await {
                said = crate::error::WithSources(&error).to_string();
            }
            sleep(5 * MS).await;
        }
    };
    let mut stores = Vec::new();
    for settings in clients(&ConnectionSettings::default()) {
        let store = RedisConnections::connect(&unknown, settings.clone()).unwrap();
        fails_by(&store, &["know no master of the name `another`", "sentinelServiceName"]).await;
        stores.push(connected(&known, settings).await);
    }
    tokio::task::block_in_place(|| master.kill());
    let address = format!("127.0.0.1:{}", master.port());
    for store in &stores {
        let words = ["Redis at ", "master tested of sentinel 127.0.0.1:", &address, " refuses connections"];
        fails_by(store, &words).await;
    }
    tokio::task::block_in_place(|| sentinel.kill());
    for store in &stores {
        fails_by(store, &["sentinel", ", so the address of master `tested` is not known"]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_get_their_own_password_and_not_the_servers() {
    for (of_sentinel, login) in [("", ""), ("requirepass guard", "&sentinelPassword=guard")] {
        let (_master, sentinel) = tokio::task::block_in_place(|| {
            let master = Server::with(&["--requirepass", "secret"]);
            let watched = format!("sentinel monitor tested 127.0.0.1 {} 1", master.port());
            let sentinel =
                Server::sentinel(&[watched, "sentinel auth-pass tested secret".to_owned(), of_sentinel.to_owned()]);
            (master, sentinel)
        });
        let servers = format!("redis-sentinel://:secret@127.0.0.1:{}", sentinel.port());
        let store = connected(&format!("{servers}?sentinelServiceName=tested{login}"), patient()).await;
        assert_eq!(run(&store, "key").await, Ok(RedisReply::Integer(1)));
    }
}
