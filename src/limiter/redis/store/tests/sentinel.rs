//! A master that sentinels replace.

use super::redis_sentinel::Sentinel;
use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_master_that_sentinels_name_is_used() {
    let mut servers = tokio::task::block_in_place(Sentinel::start);
    let store = connected(&servers.url(), Settings::default()).await;
    let mut load = Load::start(&store, 1, &["key"]);
    sleep(200 * MS).await;
    tokio::task::block_in_place(|| {
        servers.servers[0].kill();
        servers.wait_for_replacement();
    });
    load.fixed();
    sleep(2_000 * MS).await;
    load.end().await.check("sentinel: the master killed");
    assert!(counted(&servers.servers[1], "key") > 0, "the calls went to the other one");
}
