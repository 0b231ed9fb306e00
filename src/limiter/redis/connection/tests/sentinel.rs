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
        let store =
            connected(&format!("{servers}?sentinelServiceName=tested{login}"), ConnectionSettings::default()).await;
        assert_eq!(run(&store, "key").await, Ok(RedisReply::Integer(1)));
    }
}
