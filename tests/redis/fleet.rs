//! Operators' settings for all processes, kept in Redis.

use tokio::task::block_in_place;
use tower_ratelimit::fleet::FleetErrorKind;
use tower_ratelimit::limiter::VersionedText;

use super::support::fleet::{Process, change_when_it_answers, check_changes, deny, until_all};
use super::support::proxy::Proxy;
use super::support::redis_cluster::Cluster;
use super::support::redis_sentinel::Sentinel;
use super::*;

/// Connects several limiters, as that many processes do.
async fn processes(server: &Server, count: usize) -> Vec<Process> {
    processes_at(&server.url(), count).await
}

async fn processes_at(url: &str, count: usize) -> Vec<Process> {
    let mut processes = Vec::new();
    for _ in 0..count {
        // Not patient: a server that says nothing is to be noticed.
        let builder = RedisLimiter::builder().deadline(Duration::from_millis(200));
        processes.push(Process::beside(&connected(builder, url).await).await);
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
    change_when_it_answers(&first[0].fleet, [deny("192.0.2.1")]).await;
    drop(first);
    let second = processes(&server, 2).await;
    until_all(&second, |process| process.denies("192.0.2.1")).await;
    redis::cmd("FLUSHALL").exec(&mut server.connection()).unwrap();
    change_when_it_answers(&second[1].fleet, [deny("192.0.2.2")]).await;
    until_all(&second, |process| process.denies("192.0.2.1") && process.denies("192.0.2.2")).await;
    // The tables follow a moment before the revision counts as in force.
    until_all(&second, |process| process.fleet.in_force().revision >= 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nonsense_in_the_store_changes_no_setting() {
    let server = Server::start();
    let before = super::keys(&server);
    let old = processes(&server, 2).await;
    change_when_it_answers(&old[0].fleet, [deny("192.0.2.1")]).await;
    until_all(&old, |process| process.denies("192.0.2.1")).await;
    let is_text = |key: &Vec<u8>| !before.contains(key) && key.ends_with(b"fleet}");
    let key = String::from_utf8(super::keys(&server).into_iter().find(is_text).unwrap()).unwrap();
    let version = "v".repeat(16);
    let long = "a".repeat(2_000_000);
    for nonsense in [
        vec!["SET", &*key, "a text"],
        vec!["RPUSH", &*key, "a"],
        vec!["RPUSH", &*key, &*long, &*long],
        vec!["RPUSH", &*key, &*version, "tower-ratelimit-fleet 2 9\nmode a - shadow - 9\n"],
        vec!["RPUSH", &*key, &*version, "tower-ratelimit-fleet 1 nine\n"],
        vec!["HSET", &*key, "a", "b"],
    ] {
        let mut connection = server.connection();
        // In one step, because a process writes back what is lost.
        redis::pipe().atomic().del(&key).cmd(nonsense[0]).arg(&nonsense[1..]).exec(&mut connection).unwrap();
        until_all(&old, |process| process.fleet.in_force().error.is_some()).await;
        assert!(old.iter().all(|process| process.denies("192.0.2.1")));
        redis::cmd("DEL").arg(&key).exec(&mut connection).unwrap();
        until_all(&old, |process| process.fleet.in_force().error.is_none()).await;
        assert!(old.iter().all(|process| process.denies("192.0.2.1")));
    }
    // The old processes have written the lost settings back, so a new process reads them.
    until_all(&processes(&server, 1).await, |process| process.denies("192.0.2.1")).await;
}

/// The server evicts keys to make room, and processes that have read the text do not read it again.
#[tokio::test(flavor = "multi_thread")]
async fn evicted_settings_are_there_for_a_new_process() {
    let server = Server::start();
    let old = processes(&server, 1).await;
    let before = super::keys(&server);
    change_when_it_answers(&old[0].fleet, [deny("192.0.2.1")]).await;
    for evicted in super::keys(&server).into_iter().filter(|key| !before.contains(key)) {
        redis::cmd("DEL").arg(&evicted).exec(&mut server.connection()).unwrap();
        // The old process puts it back within a second, and the new one reads it.
        until_all(&processes(&server, 1).await, |process| process.denies("192.0.2.1")).await;
    }
}

/// A replica takes over from a master that is killed. Processes know the settings, whether or not it has them.
async fn check_failover(url: &str, kill_and_replace: impl FnOnce()) {
    let processes = processes_at(url, 5).await;
    change_when_it_answers(&processes[0].fleet, [deny("192.0.2.1")]).await;
    until_all(&processes, |process| process.denies("192.0.2.1")).await;
    let killed = Instant::now();
    block_in_place(kill_and_replace);
    let replaced = killed.elapsed();
    change_when_it_answers(&processes[1].fleet, [deny("192.0.2.2")]).await;
    let changed = killed.elapsed();
    until_all(&processes, |process| process.denies("192.0.2.1") && process.denies("192.0.2.2")).await;
    println!("replaced after {replaced:?}, changed after {changed:?}, in force after {:?}", killed.elapsed());
    let late = processes_at(url, 1).await;
    until_all(&late, |process| process.denies("192.0.2.1") && process.denies("192.0.2.2")).await;
    until_all(&late, |process| process.fleet.in_force().hash == processes[0].fleet.in_force().hash).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_outlive_a_master_that_sentinels_replace() {
    let mut servers = block_in_place(Sentinel::start);
    let url = servers.url();
    check_failover(&url, || servers.replace_master()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_outlive_a_master_of_a_cluster() {
    let mut cluster = block_in_place(Cluster::start);
    let slot: u16 =
        redis::cmd("CLUSTER").arg(&["KEYSLOT", "{fleet}"]).query(&mut cluster.servers[0].connection()).unwrap();
    let master = (0..Cluster::MASTERS).find(|at| (Cluster::slots(*at).0..=Cluster::slots(*at).1).contains(&slot));
    let master = master.expect("each slot has a master");
    let url = cluster.url();
    check_failover(&url, || {
        cluster.replace_soon();
        cluster.servers[master].kill();
        let began = Instant::now();
        while !cluster.is_master(Cluster::MASTERS + master) {
            assert!(began.elapsed() < LONG, "the replica does not take over");
            std::thread::sleep(Duration::from_millis(20));
        }
    })
    .await;
}

/// A process is cut off in three ways while operators go on. It says so, and has the latest settings soon after.
#[tokio::test(flavor = "multi_thread")]
async fn process_that_was_cut_off_catches_up() {
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    let there = &processes(&server, 1).await[0];
    let away = processes_at(&proxy.url(), 1).await;
    for (number, how) in ["held", "forgotten", "led to nowhere"].into_iter().enumerate() {
        let (before, address) = (away[0].fleet.in_force().revision, format!("192.0.2.{number}"));
        match how {
            "held" => proxy.hold(true),
            "forgotten" => {
                proxy.hold(true);
                proxy.forget();
            }
            _ => {
                proxy.lead_to(support::redis_server::free_port());
                proxy.reset();
            }
        }
        eventually("it notices", async || away[0].fleet.in_force().error.is_some()).await;
        change_when_it_answers(&there.fleet, [deny(&address)]).await;
        let error = away[0].fleet.change("bob", "", [deny("198.51.100.1")]).await.unwrap_err();
        assert_eq!(error.kind(), FleetErrorKind::Unavailable, "{how}: {error}");
        assert!(away[0].fleet.in_force().revision == before && !away[0].denies(&address), "{how}");
        proxy.lead_to(server.port());
        proxy.hold(false);
        let took = until_all(&away, |process| process.denies(&address)).await;
        println!("{how}: in force {took:?} after the end");
        // The tables follow a moment before the revision counts as in force.
        until_all(&away, |process| {
            let in_force = process.fleet.in_force();
            in_force.revision > before && in_force.hash == there.fleet.in_force().hash
        })
        .await;
    }
    assert!(!there.denies("198.51.100.1"));
}

/// A report stays in its place until its time is over, and another process cannot take the place before.
#[tokio::test(flavor = "multi_thread")]
async fn reports_of_processes_have_places_of_their_own() {
    let server = Server::start();
    let limiter = connect(&server).await;
    let text = limiter.hooks().shared_text().unwrap();
    let report = |process: u128, text: &str| VersionedText::new(process, text);
    // The first calls take two round trips each. A busy machine may take longer than their time.
    let put = async |place: usize, report: &VersionedText, lasting: Duration| {
        let began = Instant::now();
        loop {
            match text.put_report(place, report, lasting).await {
                Ok(is_put) => return is_put,
                Err(error) => assert!(began.elapsed() < LONG, "{error}"),
            }
        }
    };
    let reports = async || {
        let began = Instant::now();
        loop {
            match text.reports().await {
                Ok(reports) => return reports,
                Err(error) => assert!(began.elapsed() < LONG, "{error}"),
            }
        }
    };
    let long = [report(1, &"a:1:".repeat(2_000)), report(2, "")];
    assert!(put(0, &long[0], LONG).await && put(63, &long[1], LONG).await);
    assert!(!put(0, &report(3, "c"), LONG).await && !put(64, &report(3, "c"), LONG).await);
    assert_eq!(reports().await, long);
    assert!(put(0, &report(1, "b"), LONG).await);
    assert_eq!(reports().await[0], report(1, "b"));
    assert!(put(0, &report(1, "b"), Duration::from_millis(100)).await);
    eventually("the report ends", async || reports().await.len() == 1).await;
    assert!(put(0, &report(3, "c"), LONG).await);
    // Another application has places: they are taken, and their reports are empty.
    let first = super::keys(&server).into_iter().find(|key| key.ends_with(b":0")).unwrap();
    let first = String::from_utf8(first).unwrap();
    let place = |n: usize| format!("{}{n}", first.strip_suffix('0').unwrap());
    let mut connection = server.connection();
    redis::cmd("RPUSH").arg(place(1)).arg("a").exec(&mut connection).unwrap();
    redis::cmd("SET").arg(place(2)).arg("a".repeat(1_000_000)).exec(&mut connection).unwrap();
    redis::cmd("SET").arg(place(3)).arg(&b"a process's name\xff"[..]).exec(&mut connection).unwrap();
    for place in 1..4 {
        assert!(!put(place, &report(4, "d"), LONG).await, "{place}");
    }
    let empty = VersionedText::default();
    let [e1, e2, e3] = [0; 3].map(|_| empty.clone());
    assert_eq!(reports().await, [report(3, "c"), e1, e2, e3, report(2, "")]);
}
