//! A cluster whose slots move and whose masters fail.

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::redis_cluster::Cluster as Servers;
use super::*;

fn start() -> Servers {
    tokio::task::block_in_place(Servers::start)
}

/// A key of that master, which it has for itself.
fn key_of(master: usize, name: &str) -> String {
    let (first, last) = Servers::slots(master);
    let mut keys = (0..).map(|number| format!("{name}{number}"));
    keys.find(|key| (first..=last).contains(&slot(key))).unwrap()
}

fn count(answer: Result<RedisReply, RedisError>) -> i64 {
    let RedisReply::Integer(count) = answer.unwrap() else { panic!("a number") };
    count
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slots_and_masters_may_move_while_calls_come() {
    let servers = start();
    let heard = Heard::default();
    let store = connected(&servers.url(), heard.patient()).await;
    assert!(store.is_cluster());
    a_slot_moves(&servers, &store).await;
    keys_are_apart(&servers, &store).await;
    assert_eq!(*heard.0.lock().unwrap(), [], "a call that another server runs has not failed");
    servers_disagree(&servers).await;
    slot_without_a_server_is_found_again(&servers, &store).await;
    a_replica_takes_over(&servers, &connected(&servers.url(), ConnectionSettings::default()).await).await;
}

async fn a_slot_moves(servers: &Servers, store: &RedisConnections) {
    let key = key_of(0, "moving");
    let load = Load::start(store, 1, &[&key]);
    for step in 0..4 {
        tokio::task::block_in_place(|| match step {
            0 => {}
            1 => servers.begin_to_move(slot(&key), 0, 1),
            2 => servers.carry(&key, 0, 1),
            _ => servers.end_to_move(slot(&key), 0, 1),
        });
        sleep(300 * MS).await;
    }
    let report = load.end().await.check("cluster: a slot moves");
    assert_eq!(report.failed, 0);
    assert_eq!(count(run(store, &key).await), report.calls as i64 + 1, "each ran once");
}

/// While only one of a call's keys has moved, neither server can run it, and the call fails at
/// once.
async fn keys_are_apart(servers: &Servers, store: &RedisConnections) {
    static BOTH: LazyLock<Script> =
        LazyLock::new(|| Script::new("redis.call('INCR', KEYS[1]) return redis.call('INCR', KEYS[2])"));
    let tag = key_of(2, "apart");
    let keys = [format!("{{{tag}}}a"), format!("{{{tag}}}b")];
    let both = Call {
        script: &BOTH,
        keys: keys.iter().map(|key| Bytes::copy_from_slice(key.as_bytes())).collect(),
        args: Vec::new(),
    };
    let run = async || store.reply(&both, slot(&tag), store.until()).await.map(Option::unwrap);
    assert_eq!(count(run().await), 1);
    servers.begin_to_move(slot(&tag), 2, 1);
    servers.carry(&keys[0], 2, 1);
    for _ in 0..10 {
        let ran = store.run(&both, slot(&tag), store.until()).await;
        assert!(matches!(ran, Ok(None)), "{ran:?}");
    }
    assert!(!store.fails_at_once(slot(&tag)), "the server is there");
    servers.carry(&keys[1], 2, 1);
    assert_eq!(count(run().await), 2, "both are there");
    servers.end_to_move(slot(&tag), 2, 1);
    assert_eq!(count(run().await), 3);
}

/// The server that gave a slot away sends a call to the new one, which sends it back, far more
/// often than a call is sent on at once.
async fn servers_disagree(servers: &Servers) {
    let store = connected(&servers.url(), patient()).await;
    let key = key_of(1, "disputed");
    assert_eq!(count(run(&store, &key).await), 1);
    servers.begin_to_move(slot(&key), 1, 0);
    servers.carry(&key, 1, 0);
    servers.assign(1, slot(&key), 0);
    let (late, ()) = tokio::join!(run(&store, &key), async {
        sleep(400 * MS).await;
        servers.assign(0, slot(&key), 0);
        servers.assign(2, slot(&key), 0);
    });
    assert_eq!(count(late), 2, "it waits until they agree");
    assert!(!store.fails_at_once(slot(&key)));
}

async fn slot_without_a_server_is_found_again(servers: &Servers, store: &RedisConnections) {
    let (lost, other) = (key_of(0, "lost"), key_of(0, "kept"));
    let number = slot(&lost).to_string();
    tokio::task::block_in_place(|| {
        for at in 0..servers.servers.len() {
            servers.tell(at, &["DELSLOTS", &number]);
        }
    });
    let began = Instant::now();
    while !(store.fails_at_once(slot(&lost)) && run(store, &other).await.is_ok()) {
        let _ = run(store, &lost).await;
        assert!(began.elapsed() < LONG, "the map still names a server of the slot");
        sleep(5 * MS).await;
    }
    tokio::task::block_in_place(|| servers.tell(0, &["ADDSLOTS", &number]));
    eventually("its new owner is found without a call", || !store.fails_at_once(slot(&lost))).await;
    assert_eq!(count(run(store, &lost).await), 1);
}

async fn a_replica_takes_over(servers: &Servers, store: &RedisConnections) {
    let keys = [key_of(0, "a"), key_of(1, "b"), key_of(2, "c")];
    let mut load = Load::start(store, 3, &[&keys[0], &keys[1], &keys[2]]);
    sleep(200 * MS).await;
    tokio::task::block_in_place(|| {
        // The servers give up after five seconds.
        while !servers.is_master(Servers::MASTERS + 2) {
            servers.tell(Servers::MASTERS + 2, &["FAILOVER"]);
            for _ in 0..1_200 {
                if servers.is_master(Servers::MASTERS + 2) {
                    break;
                }
                std::thread::sleep(5 * MS);
            }
        }
    });
    load.fixed();
    sleep(1_000 * MS).await;
    let samples = load.end().await;
    samples.check("cluster: manual failover");
    others_are_served(&samples, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_fails_costs_only_its_own_slots() {
    let mut servers = start();
    let heard = Heard::default();
    let store = connected(&servers.url(), heard.settings()).await;
    let keys = [key_of(0, "a"), key_of(1, "b"), key_of(2, "c")];
    let keys = [&*keys[0], &*keys[1], &*keys[2]];

    let mut load = Load::start(&store, 3, &keys);
    sleep(200 * MS).await;
    servers.servers[1].pause();
    sleep(1_000 * MS).await;
    eventually("only one is away", || store.fails_at_once(slot(keys[1])) && !store.fails_at_once(slot(keys[0]))).await;
    servers.servers[1].resume();
    load.fixed();
    sleep(1_000 * MS).await;
    let samples = load.end().await;
    samples.check("cluster: a master stopped for 1 s");
    others_are_served(&samples, 1);

    tokio::task::block_in_place(|| servers.replace_soon());
    // It is the server that the URL names.
    taken_over("cluster: a master killed", &mut servers, &store, &keys, 0, Server::kill).await;
    servers.servers[0].restart();
    taken_over("cluster: a master stopped for long", &mut servers, &store, &keys, 1, |server| server.pause()).await;
    // It comes back as a replica, and says so.
    let mut load = Load::start(&store, 3, &keys);
    servers.servers[1].resume();
    load.fixed();
    sleep(1_500 * MS).await;
    load.end().await.check("cluster: the old master comes back");
    assert!(heard.downs() >= 3 && heard.misconfigured() == 0, "{:?}", heard.0.lock().unwrap());
}

/// A master fails for good; its replica is found as soon as the cluster has agreed on it.
async fn taken_over(
    name: &str,
    servers: &mut Servers,
    store: &RedisConnections,
    keys: &[&str],
    master: usize,
    fail: impl FnOnce(&mut Server),
) {
    let mut load = Load::start(store, 3, keys);
    sleep(200 * MS).await;
    tokio::task::block_in_place(|| {
        fail(&mut servers.servers[master]);
        let mut waited = Duration::ZERO;
        while !servers.is_master(Servers::MASTERS + master) {
            std::thread::sleep(10 * MS);
            waited += 10 * MS;
            assert!(waited < LONG, "the cluster does not choose another master");
        }
    });
    load.fixed();
    sleep(2_000 * MS).await;
    let samples = load.end().await;
    samples.check(name);
    let own = samples.of("  its own slots", |key| key == master);
    assert!(own.waited < 300, "{} calls waited for a dead master", own.waited);
    others_are_served(&samples, master);
}

/// The end of one master costs the others nothing: each has a connection, a breaker and a
/// deadline of its own.
///
/// On a busy machine, though, some of their calls get no processor before the deadline, and when a few of these follow
/// each other the master is believed dead until the next probe. So nothing is known if the machine takes as much as the
/// deadline.
fn others_are_served(samples: &Samples, master: usize) {
    let report = samples.of("  the other masters' slots", |key| key != master);
    if samples.lost >= samples.deadline {
        return;
    }
    for error in samples.samples.iter().filter(|sample| sample.key != master).filter_map(|it| it.answer.as_ref().err())
    {
        let said = error.to_string();
        let is_late = said == NOBODY_WAITS || said.ends_with("in time") || said.starts_with("no time was left");
        assert!(is_late, "{said}");
    }
    assert!(report.failed * 8 <= report.calls, "{} of {} failed", report.failed, report.calls);
}

/// Passes what comes to a port on to another one after some time.
async fn slow_way(to: u16) -> u16 {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let server = tokio::net::TcpStream::connect(("127.0.0.1", to)).await.unwrap();
            let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
                (client.into_split(), server.into_split());
            tokio::spawn(async move { tokio::io::copy(&mut from_server, &mut to_client).await });
            tokio::spawn(async move {
                let mut bytes = [0; 4_096];
                while let Ok(read @ 1..) = from_client.read(&mut bytes).await {
                    sleep(10 * MS).await;
                    to_server.write_all(&bytes[..read]).await.unwrap();
                }
            });
        }
    });
    port
}

/// The URL names a server that is not there, and this is known sooner than the map.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn seed_that_is_gone_has_the_map_fetched_no_more_often() {
    let server = Server::with(&["--cluster-enabled", "yes"]);
    let slots: Vec<String> = (0..16_384).map(|slot| slot.to_string()).collect();
    redis::cmd("CLUSTER").arg("ADDSLOTS").arg(&slots).exec(&mut server.connection()).unwrap();
    let port = slow_way(server.port()).await;
    let announce = ["SET", "cluster-announce-port", &port.to_string()];
    redis::cmd("CONFIG").arg(&announce).exec(&mut server.connection()).unwrap();
    let heard = Heard::default();
    let url = format!("redis-cluster://127.0.0.1:{port}?node=127.0.0.1:1");
    let _store = connected(&url, heard.patient()).await;
    sleep(2_000 * MS).await;
    let stats: String = redis::cmd("INFO").arg("commandstats").query(&mut server.connection()).unwrap();
    let fetched = stats.split("cmdstat_cluster|slots:calls=").nth(1).and_then(|calls| calls.split(',').next());
    let fetched: usize = fetched.unwrap().parse().unwrap();
    assert!(fetched <= 3 && heard.downs() <= 3, "{fetched} times, {} reports", heard.downs());
}
