//! Beginnings: URLs, passwords, rights, servers that come late.

use super::*;
use crate::error::WithSources;
use crate::limiter::tcp_proxy::Proxy;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_script_that_the_server_does_not_know_is_run_all_the_same() {
    let server = Server::start();
    let store = connected(&server.url(), patient()).await;
    for count in 1..=3 {
        assert_eq!(run(&store, "key").await, Ok(RedisReply::Integer(count)));
    }
    let () = redis::cmd("SCRIPT").arg("FLUSH").query(&mut server.connection()).unwrap();
    assert_eq!(run(&store, "key").await, Ok(RedisReply::Integer(4)));
    assert!(!store.fails_at_once(0) && !store.is_cluster());
}

/// Several scripts take turns on a server, such as those of checks and of a fleet.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_script_shows_that_the_server_forgot_it() {
    static OTHER: LazyLock<Script> = LazyLock::new(|| Script::new("return ARGV[1]"));
    static NAMELESS: LazyLock<Script> =
        LazyLock::new(|| Script { text: "return ARGV[1]", sha: "0".repeat(40).into(), bit: 0 });
    for forgets in ["SCRIPT FLUSH", "restart"] {
        for first in [&INCREMENT, &OTHER] {
            let (mut server, heard) = (Server::start(), Heard::default());
            let store = connected(&server.url(), heard.patient()).await;
            let forgotten = || heard.count(|event| matches!(event, LimiterEvent::ScriptsForgotten { .. }));
            let says_reconnected =
                |event: &LimiterEvent| matches!(event, LimiterEvent::ScriptsForgotten { reconnected: true, .. });
            for script in [&INCREMENT, &OTHER, &NAMELESS, &NAMELESS, &INCREMENT, &OTHER, &INCREMENT, &OTHER] {
                store.run(&call(script, "key"), 0, store.until()).await.unwrap();
            }
            assert_eq!(forgotten(), 0, "the server knows all that have a name");
            if forgets == "restart" {
                server.kill();
                server.restart();
                store.wait_until_ready(LONG).await.unwrap();
            } else {
                let () = redis::cmd("SCRIPT").arg("FLUSH").query(&mut server.connection()).unwrap();
            }
            while store.run(&call(first, "key"), 0, store.until()).await.is_err() {
                sleep(5 * MS).await;
            }
            assert_eq!(forgotten(), 1, "{forgets}");
            assert_eq!(heard.count(says_reconnected) == 1, forgets == "restart", "only a restart loses counts");
        }
    }
}

#[tokio::test]
async fn connect_reports_a_bad_url_without_its_password() {
    for url in [
        "",
        "localhost:6379",
        "http://:hunter2@localhost",
        "redis://",
        "redis://:hunter2@localhost:99999",
        "redis://:hunter2@localhost/eleven",
        "redis://:hunter2@localhost?timeout=5",
        "redis://:what?hunter2@localhost",
        "redis-sentinel://:hunter2@localhost",
        "redis-sentinel://:hunter2@localhost?sentinelservicename=main",
        "redis-cluster://:hunter2@localhost:1?node=a",
        "redis-cluster://:hunter2@localhost:1?nodes=a:2",
    ] {
        let error = RedisConnections::connect(url, ConnectionSettings::default())
            .err()
            .unwrap_or_else(|| panic!("{url} is accepted"));
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{url}: {error}");
        let text = WithSources(&error).to_string();
        assert!(!text.contains("hunter2"), "{text}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_password_is_reported_once_until_it_is_right() {
    let server = Server::with(&["--requirepass", "secret"]);
    let heard = Heard::default();
    let url = format!("redis://:wrong@127.0.0.1:{}", server.port());
    // An attempt to connect that a busy machine does not end in time says nothing of the password.
    let store = RedisConnections::connect(&url, heard.patient()).unwrap();
    eventually("it is told", || heard.misconfigured() > 0).await;
    let began = Instant::now();
    while !store.fails_at_once(0) {
        assert!(began.elapsed() < LONG, "there is no connection: nothing is to be asked of it");
        listen(&store, "key", store.until()).await.unwrap_err();
    }
    for _ in 0..20 {
        let error = listen(&store, "key", store.until()).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error}");
        assert!(error.to_string().contains("password"), "{error}");
    }
    sleep(500 * MS).await;
    assert_eq!(heard.misconfigured(), 1, "once a minute");
    let admin = redis::Client::open(format!("redis://:secret@127.0.0.1:{}", server.port())).unwrap();
    let () =
        redis::cmd("CONFIG").arg(&["SET", "requirepass", "wrong"]).query(&mut admin.get_connection().unwrap()).unwrap();
    eventually("the breaker closes", || !store.fails_at_once(0)).await;
    succeeds(&store, "key").await;
    eventually("its end is told, a moment after the breaker has closed", || heard.ups() == 1).await;
    assert_eq!(heard.downs(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_right_is_reported_and_opens_no_breaker() {
    let server = Server::start();
    let acl = |rights: &[&str]| {
        let () = redis::cmd("ACL").arg("SETUSER").arg("app").arg(rights).query(&mut server.connection()).unwrap();
    };
    acl(&["on", ">pass", "~*"]);
    let heard = Heard::default();
    let url = format!("redis://app:pass@127.0.0.1:{}", server.port());
    let began = Instant::now();
    let store = RedisConnections::connect(&url, heard.patient()).unwrap();
    let refused = store.wait_until_ready(LONG).await.unwrap_err();
    assert_eq!(refused.kind(), StoreErrorKind::Misconfigured, "{refused}");
    for rights in [&["+evalsha"][..], &["+eval"], &["+incrby"]] {
        for _ in 0..10 {
            let error = run(&store, "key").await.unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error}");
            assert!(error.to_string().contains("ACL SETUSER"), "{error}");
        }
        assert!(!store.fails_at_once(0));
        acl(rights);
    }
    assert_eq!(run(&store, "key").await, Ok(RedisReply::Integer(1)));
    // Each right is another reason, and another reason is told after five seconds.
    let most = 1 + usize::try_from(began.elapsed().as_secs() / 5).unwrap();
    assert!((1..=most).contains(&heard.misconfigured()), "told {} times", heard.misconfigured());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_comes_after_the_store_is_found() {
    let mut server = Server::start();
    server.kill();
    let store = RedisConnections::connect(&server.url(), ConnectionSettings::default()).unwrap();
    let mut load = Load::start(&store, 1, &["key"]);
    sleep(500 * MS).await;
    server.restart();
    load.fixed();
    sleep(1_500 * MS).await;
    load.end().await.check("refused at start, then up");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_port_that_accepts_and_never_answers_costs_little() {
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    proxy.hold(true);
    let store = RedisConnections::connect(&proxy.url(), ConnectionSettings::default()).unwrap();
    let mut load = Load::start(&store, 1, &["key"]);
    load.lost.measure_server(&server);
    sleep(1_500 * MS).await;
    proxy.hold(false);
    load.fixed();
    sleep(2_000 * MS).await;
    let report = load.end().await.check("accepts, never answers, then does");
    assert!(report.waited < 20, "{} calls waited for a server that was never there", report.waited);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_closed_store_answers_at_once_and_lets_go_of_the_server() {
    let server = Server::start();
    let store = connected(&server.url(), patient()).await;
    run(&store, "key").await.unwrap();
    let clients = || {
        let list: String = redis::cmd("CLIENT").arg("LIST").query(&mut server.connection()).unwrap();
        list.lines().count() - 1
    };
    assert_eq!(clients(), 1);
    store.close();
    assert_eq!(run(&store, "key").await.unwrap_err().kind(), StoreErrorKind::Unavailable);
    assert!(store.fails_at_once(0));
    eventually("no connection is left", || clients() == 0).await;

    let dropped = connected(&server.url(), patient()).await;
    assert_eq!(clients(), 1);
    drop(dropped);
    eventually("no connection is left of a dropped store", || clients() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_url_and_single_url_are_not_interchangeable() {
    let server = Server::start();
    let heard = Heard::default();
    let store =
        RedisConnections::connect(&format!("redis-cluster://127.0.0.1:{}", server.port()), heard.patient()).unwrap();
    assert!(store.fails_at_once(0), "nothing is known yet");
    eventually("it is told", || heard.misconfigured() > 0).await;
    let error = store.wait_until_ready(LONG).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error}");
    assert!(error.to_string().contains("redis://"), "{error}");
    assert_eq!(run(&store, "key").await.unwrap_err(), error);
}

/// A connection of the application's: lost for five calls, then it panics, then it answers.
#[cfg(feature = "redis-rs")]
#[derive(Clone, Default)]
struct Odd(Arc<AtomicUsize>);

#[cfg(feature = "redis-rs")]
impl redis::aio::ConnectionLike for Odd {
    fn req_packed_command<'a>(&'a mut self, _: &'a redis::Cmd) -> redis::RedisFuture<'a, redis::Value> {
        Box::pin(async {
            match self.0.fetch_add(1, Ordering::Relaxed) {
                0..5 => Err(std::io::Error::from(std::io::ErrorKind::BrokenPipe).into()),
                5 => std::panic::resume_unwind(Box::new("the application panics")),
                _ => Ok(redis::Value::Int(1)),
            }
        })
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        _: &'a redis::Pipeline,
        _: usize,
        _: usize,
    ) -> redis::RedisFuture<'a, Vec<redis::Value>> {
        Box::pin(async { Ok(Vec::new()) })
    }

    fn get_db(&self) -> i64 {
        0
    }
}

#[cfg(feature = "redis-rs")]
#[tokio::test(start_paused = true)]
async fn a_connection_that_panics_while_it_is_probed_is_probed_again() {
    let store = RedisConnections::over(Odd::default(), ConnectionSettings::default()).unwrap();
    for _ in 0..5 {
        assert_eq!(run(&store, "key").await.unwrap_err().kind(), StoreErrorKind::Unavailable);
    }
    assert!(store.fails_at_once(0), "it is believed dead");
    eventually("it is found to be back", || !store.fails_at_once(0)).await;
    assert_eq!(run(&store, "key").await, Ok(RedisReply::Integer(1)));
}
