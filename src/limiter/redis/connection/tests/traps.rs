//! Behaviour of clients that the store has to prevent.

use super::*;
use crate::limiter::tcp_proxy::Proxy;

fn link(store: &RedisConnections) -> &Link {
    let Reach::One(server) = &store.0.reach else { panic!("a store of one server") };
    &server.link
}

/// Ends the connection, as the limiter does if a server is silent.
fn restart(store: &RedisConnections) {
    link(store).health.restart_connection(&RedisError::new(StoreErrorKind::Timeout, "the server is silent"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_server_gathers_no_calls() {
    let server = Server::start();
    let heard = Heard::default();
    let store = connected(&server.url(), heard.settings()).await;
    server.pause();
    let mut load = Load::start(&store, 20, &["key"]);
    sleep(2_000 * MS).await;
    eventually("enough calls come", || load.sent() > 20_000).await;
    eventually("calls fail at once", || store.fails_at_once(0)).await;
    server.resume();
    load.fixed();
    sleep(1_000 * MS).await;
    let report = load.end().await.check("SIGSTOP for 2 s at 20,000 a second");
    assert!(report.waited * 4 < report.calls, "{} calls reached fred and waited there", report.waited);
    // fred takes nothing off for calls that were in its queue when the connection was begun anew.
    let left = link(&store).transport.queued();
    assert!(left * 4 < report.calls, "{left} calls wait or were left");
    eventually("the end of the pause is reported", || heard.is_up()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_whose_task_has_ended_is_begun_anew() {
    let server = Server::start();
    let store = connected(&server.url(), ConnectionSettings::default()).await;
    for end in ["quit", "abort"] {
        let mut load = Load::start(&store, 1, &["key"]);
        sleep(100 * MS).await;
        match end {
            "quit" => link(&store).transport.quit().await,
            _ => restart(&store),
        }
        load.fixed();
        sleep(1_500 * MS).await;
        load.end().await.check(&format!("the connection's task ends: {end}"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_is_dropped_leaves_nothing_behind() {
    let server = Server::start();
    let store = connected(&server.url(), ConnectionSettings { failures: u32::MAX, ..patient() }).await;
    run(&store, "key").await.unwrap();
    server.pause();
    for _ in 0..1_000 {
        let _ = tokio::time::timeout(Duration::ZERO, run(&store, "key")).await;
    }
    server.resume();
    store.wait_until_ready(LONG).await.unwrap();
    let RedisReply::Integer(count) = run(&store, "key").await.unwrap() else { panic!("a number") };
    assert!(count <= 1_002, "{count} of 1,002");
    eventually("nothing waits", || link(&store).transport.queued() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_with_no_time_left_is_not_sent() {
    let server = Server::start();
    // The client takes a timeout of zero for no timeout.
    let store = connected(&server.url(), ConnectionSettings::default()).await;
    let failure = link(&store).run_script(&increment("key"), Instant::now(), SlotState::Owned).await.unwrap_err();
    assert_eq!(failure.error.kind(), StoreErrorKind::Timeout);
    assert_eq!(counted(&server, "key"), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn script_error_is_reported_and_opens_no_breaker() {
    static NONSENSE: LazyLock<Script> = LazyLock::new(|| Script::new("this is no script"));
    static BROKEN: LazyLock<Script> = LazyLock::new(|| Script::new("return KEYS[1] + nil"));
    static ANSWERS: LazyLock<Script> = LazyLock::new(|| Script::new("return 'two'"));
    let server = Server::start();
    let store = connected(&server.url(), patient()).await;
    let () = redis::cmd("RPUSH").arg(&["list", "1"]).query(&mut server.connection()).unwrap();
    for _ in 0..10 {
        assert_eq!(run(&store, "list").await.unwrap_err().kind(), StoreErrorKind::Foreign);
        assert_eq!(
            store.run(&call(&BROKEN, "key"), 0, store.until()).await.unwrap_err().kind(),
            StoreErrorKind::Foreign
        );
        assert_eq!(
            store.run(&call(&NONSENSE, "key"), 0, store.until()).await.unwrap_err().kind(),
            StoreErrorKind::Misconfigured
        );
    }
    assert!(!store.fails_at_once(0));
    let answer = store.run(&call(&ANSWERS, "key"), 0, store.until()).await;
    assert_eq!(answer, Ok(Some(Bytes::from_static(b"two"))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_in_vain_for_a_connection_opens_the_breaker() {
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    let store = connected(&proxy.url(), ConnectionSettings::default()).await;
    proxy.hold(true);
    let (began, silence) = (Instant::now(), ConnectionSettings::default().silence());
    restart(&store);
    eventually("the connection ends", || !link(&store).health.is_connected()).await;
    while !store.fails_at_once(0) {
        let failure = link(&store).health.wait_for_connection(Instant::now() + 20 * MS).await.unwrap_err();
        assert_ne!(failure.error.kind(), StoreErrorKind::Misconfigured);
        assert!(began.elapsed() < LONG);
    }
    assert!(began.elapsed() >= silence, "one that is being made says nothing about the server");
    let began = Instant::now();
    assert!(
        link(&store).health.wait_for_connection(Instant::now() + LONG).await.is_err(),
        "nothing is waited for then"
    );
    assert!(began.elapsed() < LONG / 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_observer_that_panics_does_not_keep_a_server_away() {
    struct Panics;
    impl Observer for Panics {
        fn on_limiter_event(&self, _: &LimiterEvent) {
            panic!("an observer that panics");
        }
    }
    let mut server = Server::start();
    let settings = ConnectionSettings { observers: vec![Arc::new(Panics)], ..ConnectionSettings::default() };
    let store = connected(&server.url(), settings).await;
    server.kill();
    while !store.fails_at_once(0) {
        run(&store, "key").await.unwrap_err();
    }
    server.restart();
    eventually("it is used again", || !store.fails_at_once(0)).await;
    succeeds(&store, "key").await;
}

/// One thread makes the calls and measures for how long it did not run.
#[tokio::test]
async fn a_shorter_deadline_is_kept_as_well() {
    let server = Server::start();
    let settings = ConnectionSettings { deadline: 10 * MS, failures: u32::MAX, ..ConnectionSettings::default() };
    let store = connected(&server.url(), settings).await;
    succeeds(&store, "key").await;
    server.pause();
    let lost = Lost::measure();
    let mut times = Vec::new();
    for _ in 0..10 {
        let began = Instant::now();
        run(&store, "key").await.unwrap_err();
        times.push(began.elapsed());
    }
    times.sort_unstable();
    let lost = lost.time();
    assert!(times[5] < 40 * MS + lost && times[9] < 10 * MS + SLACK + lost, "{times:?}, the machine took {lost:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_setting_is_too_short_or_too_long() {
    let mut server = Server::start();
    for time in [Duration::ZERO, Duration::MAX] {
        let store = connected(
            &server.url(),
            ConnectionSettings { deadline: time, failures: 0, ..ConnectionSettings::default() },
        )
        .await;
        // With the least of times, a busy machine may be too slow at first.
        succeeds(&store, "key").await;
        server.kill();
        while !store.fails_at_once(0) {
            let _ = tokio::time::timeout(SLACK, run(&store, "key")).await;
        }
        server.restart();
        eventually("it is used again", || !store.fails_at_once(0)).await;
    }
}

/// fred counts the calls in its queue, and flushes some commands only when it counts none. Calls that are in the queue
/// when a connection is begun anew stay counted for ever.
#[tokio::test]
async fn a_connection_that_is_begun_anew_sends_a_lone_call_at_once() {
    let server = Server::start();
    let store = connected(&server.url(), ConnectionSettings { failures: u32::MAX, ..patient() }).await;
    let mut calls: Vec<_> = (0..10).map(|_| Box::pin(listen(&store, "key", store.until()))).collect();
    std::future::poll_fn(|context| {
        // They wait in fred's queue when its task ends.
        for call in &mut calls {
            assert!(call.as_mut().poll(context).is_pending());
        }
        restart(&store);
        std::task::Poll::Ready(())
    })
    .await;
    for call in calls {
        assert!(call.await.is_err());
    }
    succeeds(&store, "key").await;
    for _ in 0..5 {
        run(&store, "key").await.unwrap();
    }
}

/// A process that has no time reads no answer. That says nothing about the server.
#[tokio::test]
async fn busy_process_counts_nothing_against_the_server() {
    let server = Server::start();
    let settings = ConnectionSettings { deadline: 100 * MS, ..ConnectionSettings::default() };
    let silence = settings.silence();
    let store = connected(&server.url(), settings).await;
    succeeds(&store, "key").await;
    server.pause();
    let until = store.until();
    let busy = async {
        // This thread runs the client library as well, which only then writes the command.
        loop {
            tokio::task::yield_now().await;
            if link(&store).transport.queued() == 0 {
                break;
            }
        }
        let began = Instant::now();
        while began.elapsed() < silence + 200 * MS {
            std::hint::spin_loop();
        }
        // The answer is there before the process looks: the server has answered another connection since.
        server.resume();
        counted(&server, "key");
    };
    let (answer, ()) = tokio::join!(listen(&store, "key", until), busy);
    assert!(matches!(answer, Ok(RedisReply::Integer(_))), "{answer:?}");
    assert!(!store.fails_at_once(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_answer_is_an_answer() {
    let server = Server::start();
    let store = connected(&server.url(), patient()).await;
    assert_eq!(run(&store, "key").await, Ok(RedisReply::Integer(1)), "the server knows the script");
    server.pause();
    let until = Instant::now() + 1_000 * MS;
    let mut call = std::pin::pin!(listen(&store, "key", until));
    // The timers of a millisecond fire before those of later ones, so the call has noticed that `until` has passed.
    let early = tokio::time::timeout_at(until + 5 * MS, call.as_mut()).await;
    assert!(early.is_err(), "the server is stopped: {early:?}");
    server.resume();
    assert_eq!(call.await, Ok(RedisReply::Integer(2)), "it came late");
    assert!(!store.fails_at_once(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_server_is_believed_dead_well_within_a_second() {
    let server = Server::start();
    let heard = Heard::default();
    let store = connected(&server.url(), heard.settings()).await;
    succeeds(&store, "key").await;
    server.pause();
    let (began, lost) = (Instant::now(), Lost::measure());
    let error = listen(&store, "key", store.until()).await.unwrap_err();
    let took = began.elapsed();
    assert_eq!(error.kind(), StoreErrorKind::Timeout, "{error}");
    assert!(store.fails_at_once(0) && heard.downs() == 1, "one call is enough");
    let silence = ConnectionSettings::default().silence();
    assert!(took >= silence && took < silence + SLACK + lost.time(), "{took:?}");
    server.resume();
    succeeds(&store, "key").await;
}

/// The limiter ends the connection to a silent server, and the client library only knows that the connection has ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_of_a_silent_server_does_not_say_it_was_cut() {
    let server = Server::start();
    let heard = Heard::default();
    let store = connected(&server.url(), heard.settings()).await;
    succeeds(&store, "key").await;
    server.pause();
    let first = listen(&store, "key", store.until());
    let later = async {
        sleep(ConnectionSettings::default().silence() / 2).await;
        listen(&store, "key", store.until()).await
    };
    let (first, later) = tokio::join!(first, later);
    for error in [first.unwrap_err(), later.unwrap_err()] {
        assert!(error.to_string().contains(" is silent: "), "{error}");
    }
    let events = format!("{:?}", heard.0.lock().unwrap());
    assert!(events.contains(" is silent: ") && !events.contains("was cut"), "{events}");
    server.resume();
    succeeds(&store, "key").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_that_comes_and_goes_makes_few_events() {
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    let heard = Heard::default();
    let store = connected(&proxy.url(), heard.settings()).await;
    let mut load = Load::start(&store, 2, &["key"]);
    let began = Instant::now();
    for _ in 0..8 {
        proxy.hold(true);
        sleep(350 * MS).await;
        proxy.hold(false);
        sleep(100 * MS).await;
    }
    load.fixed();
    // The first two outages, and then one for each second.
    let most = 4 + 2 * usize::try_from(began.elapsed().as_secs()).unwrap();
    let events = heard.downs() + heard.ups();
    assert!(heard.downs() > 0 && events <= most, "{events} events in {:?}", began.elapsed());
    load.end().await;
    eventually("it is reported as up", || heard.is_up()).await;
}

/// The error of a check says why there is no connection. Events use the same words.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_have_the_words_of_the_checks_errors() {
    let mut server = Server::start();
    let heard = Heard::default();
    // No attempt to connect opens the breaker. The last of these checks does, so its error is that of the event.
    let store = connected(&server.url(), ConnectionSettings { failures: u32::MAX, ..heard.settings() }).await;
    server.kill();
    // On a busy machine, a check over the ended connection may only hear that it is late.
    eventually("the connection ends", || !link(&store).health.is_connected()).await;
    let is_refused = || link(&store).health.lost().error.to_string().contains(" refuses connections");
    eventually("an attempt to connect is refused", is_refused).await;
    let mut errors = Vec::new();
    while !store.fails_at_once(0) {
        let error = listen(&store, "key", store.until()).await.unwrap_err();
        errors.push(crate::error::WithSources(&error).to_string());
    }
    let away = listen(&store, "key", store.until()).await.unwrap_err();
    let cause = std::error::Error::source(&away).map(ToString::to_string);
    let said = format!("Redis at 127.0.0.1:{} refuses connections; no check is sent until it answers", server.port());
    assert!(away.to_string() == said && cause.is_some(), "one level each: {away}, {cause:?}");
    let events = heard.0.lock().unwrap();
    let failed = events.iter().find_map(|event| match event {
        LimiterEvent::StoreFailed { error, .. } => Some(error),
        _ => None,
    });
    let down = events.iter().find_map(|event| match event {
        LimiterEvent::StoreDown { error, .. } => Some(error),
        _ => None,
    });
    assert_eq!((failed, down), (errors.first(), errors.last()));
    assert!(errors.iter().all(|error| !error.contains("Canceled")), "{errors:?}");
    // The last call failed because there was no connection, and why there was none was found out by a connection
    // attempt.
    let is_reason = |error: &String| error.contains(" refuses connections: ");
    assert!(errors.last().is_some_and(is_reason), "{errors:?}");
}
