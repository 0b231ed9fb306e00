//! A client that obeys: when its requests leave, and which do not.

use std::cell::{Cell, RefCell};
use std::future::{Future, ready};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Request, Response};
use proptest::prelude::*;
use tower::{Layer, Service};
use tower_ratelimit::client::{ObeyError, ObeyErrorKind, ObeyLayer};
use tower_ratelimit::limiter::{Charge, Decision, Limiter, Receipt, Refund, Reply};
use tower_ratelimit::{ConfigErrorKind, Key, MemoryLimiter, MissingKey, Mode, Policy, Quota, Rule};

use crate::support::waiting::World;
use crate::support::{config, memory};

const SECOND: u64 = 1_000_000;

type BoxError = Box<dyn std::error::Error + Send + Sync>;
type Answered = Result<u16, BoxError>;

/// The server's answer to each request: its duration, status and headers.
type Script = dyn Fn(usize) -> (u64, u16, Vec<(&'static str, String)>);

/// A server that records when requests arrive, and what they are called.
struct Server {
    timer: crate::support::waiting::ManualTimer,
    script: Rc<Script>,
    /// Instants in milliseconds, and paths.
    seen: Rc<RefCell<Vec<(u64, String)>>>,
    /// The permits that are held by services that were made ready.
    permits: Rc<RefCell<i64>>,
    /// The instant from which on it gets ready, in microseconds.
    ready_from_us: Rc<Cell<u64>>,
    until_ready: Option<Pin<Box<dyn Future<Output = ()>>>>,
    is_ready: bool,
}

impl Clone for Server {
    fn clone(&self) -> Self {
        let (timer, script, seen) = (self.timer.clone(), Rc::clone(&self.script), Rc::clone(&self.seen));
        let (permits, ready_from_us) = (Rc::clone(&self.permits), Rc::clone(&self.ready_from_us));
        Self { timer, script, seen, permits, ready_from_us, until_ready: None, is_ready: false }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.is_ready {
            *self.permits.borrow_mut() -= 1;
        }
    }
}

impl Service<Request<()>> for Server {
    type Response = Response<()>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<()>, BoxError>>>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        if !self.is_ready {
            let from_us = self.ready_from_us.get();
            if self.timer.now_us() < from_us {
                let timer = &self.timer;
                let sleep_until = |us| tower_ratelimit::clock::Timer::sleep_until(timer, Duration::from_micros(us));
                let until_ready = self.until_ready.get_or_insert_with(|| Box::pin(sleep_until(from_us)));
                std::task::ready!(until_ready.as_mut().poll(cx));
            }
            self.until_ready = None;
            self.is_ready = true;
            *self.permits.borrow_mut() += 1;
        }
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<()>) -> Self::Future {
        assert!(std::mem::take(&mut self.is_ready), "a service is called when it is ready");
        *self.permits.borrow_mut() -= 1;
        let nth = self.seen.borrow().len();
        let now_us = self.timer.now_us();
        self.seen.borrow_mut().push((now_us / 1_000, request.uri().path().to_owned()));
        let (takes_us, status, headers) = (self.script)(nth);
        let mut response = Response::builder().status(status);
        for (name, value) in headers {
            response = response.header(name, value);
        }
        let response = response.body(()).unwrap();
        if takes_us == 0 {
            return Box::pin(ready(Ok(response)));
        }
        let sleep = tower_ratelimit::clock::Timer::sleep_until(
            &self.timer,
            Duration::from_micros(now_us.saturating_add(takes_us)),
        );
        Box::pin(async move {
            sleep.await;
            Ok(response)
        })
    }
}

/// A world with a server and clients that obey.
struct Scene {
    world: World<Answered>,
    layer: ObeyLayer,
    server: Server,
}

impl Scene {
    fn new(
        configure: impl FnOnce(ObeyLayer) -> ObeyLayer,
        script: impl Fn(usize) -> (u64, u16, Vec<(&'static str, String)>) + 'static,
    ) -> Self {
        let world = World::new();
        let layer = configure(ObeyLayer::new(world.timer.clone()).clock(world.clock.clone()).jitter_seed(7));
        let server = Server {
            timer: world.timer.clone(),
            script: Rc::new(script),
            seen: Rc::default(),
            permits: Rc::default(),
            ready_from_us: Rc::default(),
            until_ready: None,
            is_ready: false,
        };
        Self { world, layer, server }
    }

    /// Sends a request from a clone of the client.
    fn send(&mut self, path: &str) -> usize {
        self.send_to(&format!("http://example.org{path}"))
    }

    fn send_to(&mut self, uri: &str) -> usize {
        let mut client = self.layer.layer(self.server.clone());
        let request = Request::builder().uri(uri).body(()).unwrap();
        self.world.spawn(async move {
            std::future::poll_fn(|cx| client.poll_ready(cx)).await?;
            Ok(client.call(request).await?.status().as_u16())
        })
    }

    fn seen(&self) -> Vec<(u64, String)> {
        self.server.seen.borrow().clone()
    }

    fn instants(&self) -> Vec<u64> {
        self.seen().into_iter().map(|(at, _)| at).collect()
    }

    fn status(&self, task: usize) -> Option<u16> {
        self.world.done[task].as_ref().and_then(|done| done.as_ref().ok()).copied()
    }

    #[track_caller]
    fn error(&self, task: usize) -> &ObeyError {
        let error = self.world.done[task].as_ref().expect("it is done").as_ref().expect_err("it is an error");
        error.downcast_ref().expect("it is an error of the layer")
    }
}

fn told(status: u16, headers: &[(&'static str, &str)]) -> (u64, u16, Vec<(&'static str, String)>) {
    (0, status, headers.iter().map(|(name, value)| (*name, (*value).to_owned())).collect())
}

/// Asserts that a wait was as long as the server said, or up to 10 % longer.
#[track_caller]
fn about(waited_ms: u64, told_ms: u64) {
    assert!((told_ms..=told_ms + told_ms / 10 + 1).contains(&waited_ms), "{waited_ms} ms for {told_ms} ms");
}

#[test]
fn pause_holds_for_all_clones_and_leaves_in_order() {
    let mut scene =
        Scene::new(|layer| layer, |nth| if nth == 0 { told(429, &[("retry-after", "30")]) } else { told(200, &[]) });
    scene.send("/0");
    let waiting: Vec<usize> = (1..=20).map(|nth| scene.send(&format!("/{nth}"))).collect();
    scene.world.pass(29 * SECOND);
    assert_eq!(scene.seen().len(), 1);
    scene.world.pass(5 * SECOND);
    let seen = scene.seen();
    let paths: Vec<String> = (0..=20).map(|nth| format!("/{nth}")).collect();
    assert_eq!(seen.iter().map(|(_, path)| path.clone()).collect::<Vec<_>>(), paths);
    about(seen[1].0, 30_000);
    assert!(waiting.iter().all(|task| scene.status(*task) == Some(200)));
}

#[test]
fn pause_that_the_caller_sets_holds_as_one_of_a_response() {
    let mut scene = Scene::new(|layer| layer, |_| (SECOND, 200, vec![]));
    let key = Key::of("http://example.org:80").unwrap();
    scene.layer.pause(&key, Duration::from_secs(20));
    scene.send("/");
    scene.send_to("http://other.org/");
    assert_eq!(scene.instants(), [0]);
    scene.world.pass(30 * SECOND);
    about(scene.instants()[1], 20_000);
    // A longer one than `max_wait` lets those fail that wait.
    scene.layer.pause(&key, Duration::from_secs(20));
    let waiting = scene.send("/");
    scene.layer.pause(&key, Duration::MAX);
    scene.world.pass(0);
    assert_eq!(scene.error(waiting).kind(), ObeyErrorKind::TooLong);
}

#[test]
fn exhausted_quota_pauses_until_its_reset() {
    for (status, headers) in [
        (200, vec![("ratelimit", r#""d";r=0;t=20"#), ("ratelimit-policy", r#""d";q=5;w=60"#)]),
        (200, vec![("x-ratelimit-limit", "5"), ("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "20")]),
        (503, vec![("retry-after", "20")]),
        (403, vec![("retry-after", "20")]),
        (200, vec![("grpc-status", "8"), ("grpc-retry-pushback-ms", "20000")]),
    ] {
        let case = format!("{status} {headers:?}");
        let mut scene =
            Scene::new(|layer| layer, move |nth| if nth == 0 { told(status, &headers) } else { told(200, &[]) });
        scene.send("/");
        scene.send("/");
        scene.world.pass(60 * SECOND);
        assert_eq!(scene.seen().len(), 2, "{case}");
        about(scene.seen()[1].0, 20_000);
    }
}

#[test]
fn retry_after_of_other_responses_pauses_nothing() {
    for status in [200, 202, 301] {
        let mut scene = Scene::new(|layer| layer, move |_| told(status, &[("retry-after", "20")]));
        scene.send("/");
        scene.send("/");
        assert_eq!(scene.seen().len(), 2, "{status}");
    }
}

#[test]
fn refusal_without_a_time_pauses_ever_longer() {
    let mut scene = Scene::new(|layer| layer, |nth| told(if nth == 9 { 200 } else { 429 }, &[]));
    for _ in 0..12 {
        scene.send("/");
    }
    scene.world.pass(600 * SECOND);
    // One at a time: each is a probe.
    let instants = scene.instants();
    let waits = instants.windows(2).map(|pair| pair[1] - pair[0]);
    for (waited, told) in waits.zip([1, 2, 4, 8, 16, 32, 60, 60, 60, 0, 1]) {
        about(waited, told * 1_000);
    }
}

#[test]
fn refusals_of_one_round_trip_count_once() {
    let mut scene = Scene::new(|layer| layer, |nth| if nth < 10 { (SECOND, 429, vec![]) } else { told(200, &[]) });
    for _ in 0..10 {
        scene.send("/");
    }
    scene.world.pass(SECOND);
    scene.send("/");
    scene.world.pass(5 * SECOND);
    about(scene.instants()[10] - 1_000, 1_000);
}

#[test]
fn pause_beyond_the_longest_wait_fails_at_once() {
    let mut scene = Scene::new(
        |layer| layer,
        |nth| {
            if nth == 0 {
                (SECOND, 429, vec![("retry-after", "301".to_owned())])
            } else {
                told(429, &[("retry-after", "2")])
            }
        },
    );
    let first = scene.send("/");
    scene.world.pass(SECOND);
    assert_eq!(scene.status(first), Some(429), "the response is handed on");
    let second = scene.send("/");
    let error = scene.error(second);
    assert_eq!(error.kind(), ObeyErrorKind::TooLong);
    about(error.wait().duration().unwrap().as_millis() as u64, 301_000);
    let text = error.to_string();
    assert!(
        text.starts_with("the request to http://example.org:80 was not sent: the request would have to wait for"),
        "{text}"
    );
    assert!(text.contains(" at least 5m ") && text.ends_with(" more, and `max_wait` is 5m"), "{text}");
    assert!(!scene.layer.pause_of(&Key::of("http://example.org:80").unwrap()).is_zero());
    // When the rest of the pause is short enough, requests wait.
    scene.world.pass(60 * SECOND);
    scene.send("/");
    scene.world.pass(300 * SECOND);
    assert_eq!(scene.seen().len(), 2);
}

#[test]
fn waiting_requests_fail_as_soon_as_a_pause_is_too_long() {
    let mut scene = Scene::new(
        |layer| layer.max_wait(Duration::from_secs(10)),
        |nth| match nth {
            0 => told(429, &[("retry-after", "5")]),
            _ => (SECOND, 429, vec![("retry-after", "3600".to_owned())]),
        },
    );
    scene.send("/");
    let waiting: Vec<usize> = (0..100).map(|_| scene.send("/")).collect();
    scene.world.pass(7 * SECOND);
    assert_eq!(scene.status(waiting[0]), Some(429));
    for task in &waiting[1..] {
        assert_eq!(scene.error(*task).kind(), ObeyErrorKind::TooLong);
        about(scene.error(*task).wait().duration().unwrap().as_secs(), 3_600);
    }
    // A year is the longest time that is believed, and the operator can put an end to it.
    scene.layer.forget(&Key::of("http://example.org:80").unwrap());
    scene.send("/");
    assert_eq!(scene.seen().len(), 3);
}

#[test]
fn waiting_requests_are_bounded() {
    let mut scene = Scene::new(|layer| layer.max_waiting(3), |_| told(429, &[("retry-after", "5")]));
    let tasks: Vec<usize> = (0..6).map(|_| scene.send("/")).collect();
    let kinds = [4, 5]
        .map(|task: usize| (scene.error(tasks[task]).kind(), scene.error(tasks[task]).wait().duration().is_some()));
    assert_eq!(kinds, [(ObeyErrorKind::TooManyWaiting, true); 2]);
    // A dropped request makes room.
    scene.world.cancel(tasks[2]);
    let next = scene.send("/");
    assert!(scene.world.is_pending(next));
}

#[test]
fn request_that_waits_holds_no_permit() {
    let mut scene = Scene::new(|layer| layer.max_waiting(3), |_| told(429, &[("retry-after", "5")]));
    (0..10).for_each(|_| {
        scene.send("/");
    });
    assert_eq!(*scene.server.permits.borrow(), 0);
    scene.world.pass(60 * SECOND);
    assert_eq!(*scene.server.permits.borrow(), 0);
}

#[test]
fn dropped_requests_leave_the_line() {
    let mut scene = Scene::new(
        |layer| layer,
        |nth| if nth == 0 { told(429, &[("retry-after", "5")]) } else { (SECOND, 200, vec![]) },
    );
    scene.send("/0");
    let tasks: Vec<usize> = (1..=9).map(|nth| scene.send(&format!("/{nth}"))).collect();
    for task in [0, 1, 4] {
        scene.world.cancel(tasks[task]);
    }
    // The probe is dropped on its way: the next one probes.
    scene.world.pass(5_600_000);
    assert_eq!(scene.seen().last().unwrap().1, "/3");
    scene.world.cancel(tasks[2]);
    assert_eq!(scene.seen().last().unwrap().1, "/4");
    scene.world.pass(10 * SECOND);
    let paths: Vec<String> = scene.seen().into_iter().map(|(_, path)| path).collect();
    assert_eq!(paths, ["/0", "/3", "/4", "/6", "/7", "/8", "/9"]);
}

#[test]
fn probe_opens_the_line_step_by_step() {
    let mut scene = Scene::new(
        |layer| layer,
        |nth| {
            if nth == 0 { told(429, &[("retry-after", "5")]) } else { (SECOND, 200, vec![]) }
        },
    );
    for _ in 0..32 {
        scene.send("/");
    }
    scene.world.pass(30 * SECOND);
    let instants = scene.instants();
    let start = instants[1];
    let rounds: Vec<u64> = instants[1..].iter().map(|at| (at - start) / 1_000).collect();
    let of_round = |round: u64| rounds.iter().filter(|at| **at == round).count();
    assert_eq!([0, 1, 2, 3, 4].map(of_round), [1, 2, 4, 8, 16]);
}

#[test]
fn remaining_units_bound_the_requests_sent() {
    let mut scene = Scene::new(
        |layer| layer,
        |nth| match nth {
            0 => told(429, &[("retry-after", "5")]),
            1 => (SECOND, 200, vec![("x-ratelimit-remaining", "7".to_owned())]),
            _ => (SECOND, 200, vec![]),
        },
    );
    for _ in 0..20 {
        scene.send("/");
    }
    scene.world.pass(5_600_000);
    assert_eq!(scene.seen().len(), 2);
    scene.world.pass(SECOND - 1);
    assert_eq!(scene.seen().len(), 2 + 7);
}

#[test]
fn hanging_probe_stops_the_others_for_ten_seconds() {
    let mut scene = Scene::new(
        |layer| layer,
        |nth| match nth {
            0 => told(429, &[("retry-after", "5")]),
            1 => (u64::MAX, 200, vec![]),
            _ => told(200, &[]),
        },
    );
    for _ in 0..5 {
        scene.send("/");
    }
    scene.world.pass(30 * SECOND);
    let instants = scene.instants();
    assert_eq!(instants.len(), 5);
    assert_eq!(instants[2] - instants[1], 10_000);
}

#[test]
fn requests_that_hang_since_before_a_pause_stop_no_other() {
    let mut scene = Scene::new(
        |layer| layer,
        |nth| match nth {
            0..20 => (u64::MAX, 200, vec![]),
            20 => told(429, &[("retry-after", "1")]),
            _ => told(200, &[]),
        },
    );
    for _ in 0..51 {
        scene.send("/");
    }
    assert_eq!(scene.seen().len(), 21);
    scene.world.pass(1_101_000);
    assert_eq!(scene.seen().len(), 51);
}

#[test]
fn end_of_a_request_from_before_a_pause_sends_no_second_probe() {
    let mut scene = Scene::new(
        |layer| layer,
        |nth| match nth {
            0..5 => (6 * SECOND, 200, vec![]),
            5 => told(429, &[("retry-after", "5")]),
            _ => (3 * SECOND, 200, vec![]),
        },
    );
    let tasks: Vec<usize> = (0..16).map(|_| scene.send("/")).collect();
    scene.world.pass(5_600_000);
    assert_eq!(scene.seen().len(), 7);
    scene.world.cancel(tasks[0]);
    assert_eq!(scene.seen().len(), 7);
    scene.world.pass(SECOND);
    assert!(tasks[1..5].iter().all(|task| scene.status(*task) == Some(200)));
    assert_eq!(scene.seen().len(), 7);
}

#[test]
fn requests_that_wait_during_a_pause_probe_after_it() {
    let mut scene = Scene::new(
        |layer| layer,
        |nth| match nth {
            0 => (8 * SECOND, 429, vec![("retry-after", "3".to_owned())]),
            1 => told(429, &[("retry-after", "5")]),
            2 => (SECOND, 200, vec![("x-ratelimit-remaining", "19".to_owned())]),
            _ => (SECOND, 200, vec![]),
        },
    );
    for _ in 0..21 {
        scene.send("/");
    }
    scene.world.pass(5_600_000);
    assert_eq!(scene.seen().len(), 3);
    // All others may go at 6.5 seconds. The pause from 8 to 11.3 seconds is over when they can.
    scene.server.ready_from_us.set(20 * SECOND);
    scene.world.pass(20 * SECOND);
    let instants = scene.instants();
    let of_second = |second: u64| instants.iter().filter(|at| **at / 1_000 == second).count();
    assert_eq!([20, 21, 22, 23, 24].map(of_second), [1, 2, 4, 8, 3]);
}

#[test]
fn task_that_does_not_run_delays_the_others_for_ten_seconds() {
    let mut scene =
        Scene::new(|layer| layer, |nth| if nth == 0 { told(429, &[("retry-after", "5")]) } else { told(200, &[]) });
    scene.send("/");
    let stuck = scene.send("/stuck");
    scene.world.stick(stuck);
    let other = scene.send("/other");
    scene.world.pass(5_600_000);
    assert_eq!(scene.seen().len(), 1);
    scene.world.pass(10 * SECOND);
    assert_eq!(scene.status(other), Some(200));
}

#[test]
fn many_tasks_that_do_not_run_let_the_others_pass_in_time() {
    let mut scene =
        Scene::new(|layer| layer, |nth| if nth == 0 { told(429, &[("retry-after", "5")]) } else { told(200, &[]) });
    scene.send("/");
    for _ in 0..10 {
        let stuck = scene.send("/stuck");
        scene.world.stick(stuck);
    }
    let other = scene.send("/other");
    scene.world.pass(5_600_000 + 10 * 20 * SECOND);
    assert_eq!(scene.status(other), Some(200));
}

#[test]
fn origins_do_not_wait_for_each_other() {
    let mut scene = Scene::new(
        |layer| layer.key(|parts: &tower_ratelimit::Head<'_>| Key::of(parts.uri.path())),
        |_| told(429, &[("retry-after", "5")]),
    );
    scene.send("/a");
    scene.send("/a");
    scene.send("/b");
    assert_eq!(scene.seen().len(), 2);
}

#[test]
fn requests_without_an_origin_wait_together() {
    // As the clients of `tonic-build` send them.
    let mut scene = Scene::new(|layer| layer, |_| told(429, &[("retry-after", "5")]));
    scene.send_to("/greeter.Greeter/Greet");
    scene.send_to("/greeter.Greeter/Greet");
    assert_eq!(scene.seen().len(), 1);
    about(scene.layer.pause_of(&Key::global()).as_millis() as u64, 5_000);
    scene.layer.pause(&Key::global(), Duration::from_secs(600));
    let unsent = scene.send_to("/greeter.Greeter/Greet");
    let text = scene.error(unsent).to_string();
    assert!(text.starts_with("the request was not sent: the request would have to wait for"), "{text}");
}

#[test]
fn own_quota_spaces_requests_in_order() {
    for quota in [
        Quota::per_second(1),
        Quota::sliding_log(1, Duration::from_secs(1)).unwrap(),
        Quota::leaky_queue(100, Duration::from_secs(100)).unwrap(),
    ] {
        let mut scene = Scene::new(|layer| layer, |_| told(200, &[]));
        let policy = Rule::new("own", quota).unwrap();
        scene.layer = scene.layer.clone().own_quota(memory(&scene.world.clock), policy).unwrap();
        let tasks: Vec<usize> = (0..10).map(|nth| scene.send(&format!("/{nth}"))).collect();
        scene.world.pass(20 * SECOND);
        let expected: Vec<(u64, String)> = (0..10).map(|nth| (nth * 1_000, format!("/{nth}"))).collect();
        assert_eq!(scene.seen(), expected, "{quota}");
        assert!(tasks.iter().all(|task| scene.status(*task) == Some(200)));
    }
}

fn own(name: &str, quota: Quota) -> Rule {
    Rule::new(name, quota).unwrap()
}

/// A scene whose server always answers, with these own quotas over one limiter.
fn scene_with(quotas: Vec<Rule>) -> (Scene, MemoryLimiter) {
    let mut scene = Scene::new(|layer| layer, |_| told(200, &[]));
    let limiter = memory(&scene.world.clock);
    for quota in quotas {
        scene.layer = scene.layer.clone().own_quota(limiter.clone(), quota).unwrap();
    }
    (scene, limiter)
}

/// The documentation warns clients of servers that count strictly.
#[test]
fn own_token_bucket_sends_its_burst_and_its_refill_in_a_second() {
    let strict = Quota::sliding_log(50, Duration::from_secs(1)).unwrap();
    for (quota, first_second) in
        [(Quota::per_second(50), 99), (Quota::per_second(50).burst(1).unwrap(), 50), (strict, 50)]
    {
        let (mut scene, _) = scene_with(vec![own("vendor", quota)]);
        for _ in 0..200 {
            scene.send("/");
        }
        scene.world.pass(2 * SECOND);
        let sent = scene.instants().into_iter().filter(|at| *at < 1_000).count();
        assert_eq!(sent, first_second, "{quota}");
    }
}

#[test]
fn own_quotas_add_up() {
    let (burst, day) = (Quota::per_second(2), Quota::fixed_window(5, Duration::from_secs(86_400)).unwrap());
    let two_calls = vec![Rule::from(burst), Rule::from(day)];
    let named_alike = vec![own("api", burst), own("api", day)];
    for quotas in [two_calls, named_alike, vec![Rule::all_of("api", [burst, day]).unwrap()]] {
        let (mut scene, _) = scene_with(quotas);
        for _ in 0..20 {
            scene.send("/");
        }
        assert_eq!(scene.instants(), [0, 0]);
        scene.world.pass(100 * SECOND);
        assert_eq!(scene.instants(), [0, 0, 500, 1_000, 1_500], "and no more on this day");
    }
}

#[test]
fn own_quota_that_denies_returns_what_others_gave() {
    let (hour, slow) = (own("hour", Quota::per_hour(100)), own("slow", Quota::per_second(1)));
    for together in [false, true] {
        let both = Rule::all_of("a", [Quota::per_hour(100), Quota::per_second(1)]).unwrap();
        let (mut scene, limiter) =
            if together { scene_with(vec![both.clone()]) } else { scene_with(vec![hour.clone(), slow.clone()]) };
        scene.send("/");
        let waiting = [scene.send("/"), scene.send("/")];
        assert_eq!(scene.seen().len(), 1);
        let hourly = if together { &both } else { &hour };
        let key = Key::of("http://example.org:80").unwrap();
        let used = |limiter: &MemoryLimiter| 100 - limiter.peek_one(&hourly.policies()[0], &key, 0).remaining();
        assert_eq!(used(&limiter), 1, "requests that wait hold nothing");
        waiting.into_iter().for_each(|task| scene.world.cancel(task));
        assert_eq!(used(&limiter), 1);
    }
}

#[test]
fn own_quotas_over_several_limiters_are_returned_to_their_own() {
    let rules =
        [own("hour", Quota::per_hour(100)), own("minute", Quota::per_minute(100)), own("slow", Quota::per_second(1))];
    let mut scene = Scene::new(|layer| layer, |_| told(200, &[]));
    let limiters = rules.each_ref().map(|_| memory(&scene.world.clock));
    for (limiter, rule) in limiters.iter().zip(&rules) {
        scene.layer = scene.layer.clone().own_quota(limiter.clone(), rule.clone()).unwrap();
    }
    let (sent, waits) = (scene.send("/"), scene.send("/"));
    assert_eq!((scene.status(sent), scene.status(waits)), (Some(200), None));
    let key = Key::of("http://example.org:80").unwrap();
    for (limiter, rule) in limiters.iter().zip(&rules) {
        let policy = &rule.policies()[0];
        let used = policy.quota().limit() - limiter.peek_one(policy, &key, 0).remaining();
        assert_eq!(used, 1, "the request that waits holds nothing of {}", policy.name());
    }
}

#[test]
fn own_quota_of_several_queues_waits_for_the_last() {
    let queue = |limit| Quota::leaky_queue(limit, Duration::from_secs(10)).unwrap();
    let (mut scene, _) =
        scene_with(vec![Rule::from(queue(10)), Rule::from(queue(5)), Rule::from(Quota::per_second(100))]);
    for _ in 0..4 {
        scene.send("/");
    }
    scene.world.pass(60 * SECOND);
    assert_eq!(scene.instants(), [0, 2_000, 4_000, 6_000]);
}

#[test]
fn own_quota_has_conditions_costs_and_plans() {
    let pages = |parts: &tower_ratelimit::Head<'_>| parts.uri.query().map_or(1, |pages| pages.parse().unwrap());
    let search = own("search", Quota::per_second(10)).when(|parts| parts.uri.path() == "/search").cost(pages);
    let plan =
        Rule::plans("plan", [Quota::per_second(1_000), Quota::per_second(0)], |parts: &tower_ratelimit::Head<'_>| {
            usize::from(parts.uri.path() == "/closed")
        });
    let (mut scene, _) = scene_with(vec![search, plan.unwrap()]);
    for path in ["/search?9", "/search?6", "/other", "/search?1"] {
        scene.send(path);
    }
    let never = scene.send("/search?11");
    scene.world.pass(60 * SECOND);
    let seen: Vec<(u64, String)> = scene.seen();
    let told = |at: u64, path: &str| (at, path.to_owned());
    // 6 units are there after half a second, and the line stays in order.
    assert_eq!(seen, [told(0, "/search"), told(500, "/search"), told(500, "/other"), told(600, "/search")]);
    let closed = scene.send("/closed");
    assert_eq!([never, closed].map(|task| scene.error(task).kind()), [ObeyErrorKind::Never; 2]);
    let text = scene.error(never).to_string();
    assert!(
        text.ends_with("it costs 11 units of the client's own quota \"search\", which never has more than 10"),
        "{text}"
    );
}

#[test]
fn own_quota_refuses_what_only_servers_have() {
    let limiter = || memory(&tower_ratelimit::clock::ManualClock::new());
    let meter = Policy::new("over", Quota::meter(5, Duration::from_secs(1)).unwrap()).unwrap();
    let rule = || own("own", Quota::per_second(1));
    let from_requests = || Rule::quota_from("own", |_| Quota::per_second(1)).unwrap();
    for (rule, option) in [
        (rule().mode(Mode::Shadow), "a mode"),
        (rule().overage(meter.name(), *meter.quota()).unwrap(), "a block or a meter"),
        (rule().charge_when(|_| true), "a settlement"),
        (rule().settle_by_usage(), "a settlement"),
        (rule().warn_at_percent(9), "a warning"),
        (rule().missing_key(MissingKey::Shared), "missing keys"),
        (Rule::from(from_requests().policies()[0].clone()), "from each request"),
        (from_requests(), "from each request"),
    ] {
        let error = ObeyLayer::new(World::<()>::new().timer).own_quota(limiter(), rule).unwrap_err();
        assert_eq!(error.kind(), ConfigErrorKind::NotAnOption);
        assert!(error.to_string().contains(option) && error.to_string().contains("\"own\""), "{error}");
    }
}

#[test]
fn adapting_recovers_if_only_refusals_say_nothing() {
    // A proxy refuses, and says nothing. The server behind it says what is left.
    let mut scene = Scene::new(
        |layer| layer.adapt(true),
        |nth| {
            if nth < 5 { told(429, &[]) } else { told(200, &[("x-ratelimit-remaining", "1000")]) }
        },
    );
    for _ in 0..60 {
        scene.send("/");
    }
    scene.world.pass(200 * SECOND);
    assert_eq!(scene.seen().len(), 60);
}

#[test]
fn adapting_client_goes_on_at_half_of_its_rate() {
    let gap_ms = |adapts: bool| {
        let script = |nth| if nth == 10 { told(429, &[("retry-after", "1")]) } else { told(200, &[]) };
        let mut scene = Scene::new(|layer| layer.adapt(adapts), script);
        for _ in 0..14 {
            scene.send("/");
        }
        scene.world.pass(100 * SECOND);
        let seen = scene.seen();
        assert_eq!(seen.len(), 14);
        seen[13].0 - seen[12].0
    };
    assert_eq!(gap_ms(false), 0, "it only pauses");
    assert!(gap_ms(true) >= 100, "ten succeeded in a second: {} ms", gap_ms(true));
}

#[test]
fn own_quota_is_refunded_if_a_request_is_not_sent() {
    let quota = Quota::leaky_queue(10, Duration::from_secs(100)).unwrap();
    let mut scene = Scene::new(|layer| layer, |_| told(200, &[]));
    let policy = Rule::new("own", quota).unwrap();
    scene.layer = scene.layer.clone().own_quota(memory(&scene.world.clock), policy).unwrap();
    scene.send("/0");
    let waiting = scene.send("/1");
    scene.world.pass(SECOND);
    scene.world.cancel(waiting);
    scene.send("/2");
    scene.world.pass(60 * SECOND);
    assert_eq!(scene.seen(), [(0, "/0".to_owned()), (10_000, "/2".to_owned())]);
}

/// A request that costs much would have to wait for long. Those behind it cost little.
#[test]
fn request_that_leaves_takes_its_own_wait_along() {
    let pages = |parts: &tower_ratelimit::Head<'_>| parts.uri.query().map_or(1, |pages| pages.parse().unwrap());
    let (mut scene, _) = scene_with(vec![own("pages", Quota::per_minute(60)).cost(pages)]);
    scene.send("/all?60");
    let dear = scene.send("/dear?60");
    let cheap = scene.send("/cheap");
    scene.world.pass(SECOND / 2);
    scene.world.cancel(dear);
    scene.world.pass(SECOND / 2);
    let told = |at: u64, path: &str| (at, path.to_owned());
    assert_eq!(scene.seen(), [told(0, "/all"), told(1_000, "/cheap")]);
    assert_eq!(scene.status(cheap), Some(200));
}

#[test]
fn request_that_would_wait_too_long_stops_no_other() {
    let pages = |parts: &tower_ratelimit::Head<'_>| parts.uri.query().map_or(1, |pages| pages.parse().unwrap());
    let (mut scene, _) = scene_with(vec![own("pages", Quota::per_hour(60)).cost(pages)]);
    scene.send("/all?60");
    let waits = scene.send("/cheap");
    let dear = scene.send("/dear?60");
    scene.world.pass(60 * SECOND);
    // By then a unit is there, and the next 60 would take longer than a request may wait.
    assert_eq!((scene.status(waits), scene.error(dear).kind()), (Some(200), ObeyErrorKind::TooLong));
    let wait = scene.error(dear).wait().duration().unwrap();
    assert_eq!(wait, Duration::from_secs(3_600), "as its quota said");
    let later = scene.send("/later");
    scene.world.pass(60 * SECOND);
    assert_eq!(scene.status(later), Some(200));
}

#[test]
fn request_that_is_not_sent_takes_no_place_of_the_pace() {
    let told =
        |_| told(200, &[("x-ratelimit-limit", "100"), ("x-ratelimit-remaining", "10"), ("x-ratelimit-reset", "100")]);
    let mut scene = Scene::new(|layer| layer.pace(true), told);
    let tasks: Vec<usize> = (0..4).map(|nth| scene.send(&format!("/{nth}"))).collect();
    assert_eq!(scene.instants(), [0, 0]);
    // The next one may go after ten seconds, and then waits for the service.
    scene.server.ready_from_us.set(15 * SECOND);
    scene.world.pass(12 * SECOND);
    scene.world.cancel(tasks[2]);
    scene.world.pass(4 * SECOND);
    assert_eq!(scene.seen().last().unwrap(), &(15_000, "/3".to_owned()));
}

#[test]
fn pause_outside_of_the_runtime_ends_no_other() {
    let minute = Duration::from_secs(60);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let inside = runtime.enter();
    let layer = ObeyLayer::new(tower_ratelimit::clock::TokioTimer::new()).max_keys(1);
    let [first, second] = ["first", "second"].map(|key| Key::of(key).unwrap());
    layer.pause(&first, minute);
    drop(inside);
    layer.pause(&second, minute);
    assert_eq!([&first, &second].map(|key| layer.pause_of(key)), [Duration::ZERO; 2]);
    let _inside = runtime.enter();
    assert!(layer.pause_of(&first) > minute / 2);
    assert_eq!(layer.pause_of(&second), Duration::ZERO);
}

/// There the timer cannot sleep, and shows the end of time.
#[test]
fn request_polled_outside_of_the_runtime_lets_no_other_go() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let inside = runtime.enter();
    let layer = ObeyLayer::new(tower_ratelimit::clock::TokioTimer::new());
    let mut service = layer.layer(tower::service_fn(|_: Request<()>| ready(Ok::<_, BoxError>(Response::new(())))));
    layer.pause(&Key::global(), Duration::from_secs(60));
    let mut waiting = [(); 3].map(|()| Box::pin(service.call(Request::new(()))));
    let mut cx = Context::from_waker(std::task::Waker::noop());
    let [first, second, third] = &mut waiting;
    assert!(first.as_mut().poll(&mut cx).is_pending() && third.as_mut().poll(&mut cx).is_pending());
    drop(inside);
    assert!(second.as_mut().poll(&mut cx).is_ready(), "nothing waits there");
    let _inside = runtime.enter();
    assert!(first.as_mut().poll(&mut cx).is_pending() && third.as_mut().poll(&mut cx).is_pending());
}

/// A limiter whose refunds panic.
#[derive(Clone)]
struct NoRefunds(MemoryLimiter);

impl Limiter for NoRefunds {
    type Error = <MemoryLimiter as Limiter>::Error;
    type Future<T: Send + 'static> = <MemoryLimiter as Limiter>::Future<T>;

    fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, Self::Error, Self::Future<Decision>> {
        self.0.take(charges)
    }

    fn peek(&self, charges: &[Charge<'_>]) -> Reply<Decision, Self::Error, Self::Future<Decision>> {
        self.0.peek(charges)
    }

    fn refund(&self, _: Vec<Refund>) -> Reply<(), Self::Error, Self::Future<()>> {
        panic!("it refunds nothing")
    }

    fn reset(&self, policy: &Policy, key: &Key) -> Reply<(), Self::Error, Self::Future<()>> {
        self.0.reset(policy, key)
    }
}

/// A second panic that leaves a destructor would end the process.
#[test]
fn limiter_that_panics_while_a_task_does_ends_no_process() {
    let mut scene = Scene::new(|layer| layer, |_| told(200, &[]));
    let policy = Rule::new("own", Quota::leaky_queue(10, Duration::from_secs(100)).unwrap()).unwrap();
    scene.layer = scene.layer.clone().own_quota(NoRefunds(memory(&scene.world.clock)), policy).unwrap();
    scene.send("/0");
    let mut client = scene.layer.layer(scene.server.clone());
    let request = Request::builder().uri("http://example.org/1").body(()).unwrap();
    let task = async move {
        let mut waiting = std::pin::pin!(client.call(request));
        std::future::poll_fn(|cx| Poll::Ready(waiting.as_mut().poll(cx).is_pending())).await;
        panic!("the task ends")
    };
    assert!(catch_unwind(AssertUnwindSafe(|| scene.world.spawn(task))).is_err());
    assert_eq!(scene.seen(), [(0, "/0".to_owned())]);
}

#[test]
fn own_quota_that_lets_nothing_pass_is_an_error() {
    let mut scene = Scene::new(|layer| layer, |_| told(200, &[]));
    let policy = Rule::new("own", Quota::per_second(0)).unwrap();
    scene.layer = scene.layer.clone().own_quota(memory(&scene.world.clock), policy).unwrap();
    let task = scene.send("/");
    assert_eq!(scene.error(task).kind(), ObeyErrorKind::Never);
}

#[test]
fn own_quota_that_denies_for_an_unknown_time_is_asked_ever_less() {
    let mut scene = Scene::new(|layer| layer, |_| told(200, &[]));
    let limiter = crate::support::Scripted::new().without_waits();
    let rule = own("own", Quota::per_second(1));
    scene.layer = scene.layer.clone().own_quota(limiter.clone(), rule.clone()).unwrap();
    scene.send("/first");
    scene.send("/second");
    scene.world.pass(8 * SECOND);
    assert_eq!((scene.seen().len(), limiter.takes().len()), (1, 5), "the second asks after 0, 1, 3 and 7 seconds");
    let key = Key::of("http://example.org:80").unwrap();
    let refund = Refund::new(rule.policies()[0].clone(), key, Receipt::new(1, 0, 0));
    assert!(matches!(limiter.refund(vec![refund]), Reply::Now(Ok(()))));
    scene.world.pass(8 * SECOND);
    assert_eq!(scene.instants(), [0, 15_000]);
}

#[test]
fn failure_of_the_own_quota_says_why() {
    let mut scene = Scene::new(|layer| layer, |_| told(200, &[]));
    let own = Rule::new("own", Quota::per_second(1)).unwrap();
    let limiter = crate::support::Scripted::new();
    limiter.fail(true);
    scene.layer = scene.layer.clone().own_quota(limiter, own).unwrap();
    let task = scene.send("/");
    assert_eq!(scene.error(task).kind(), ObeyErrorKind::OwnQuota);
    let (text, source) = (scene.error(task).to_string(), std::error::Error::source(scene.error(task)).unwrap());
    assert!(text.ends_with("failed") && !text.contains(&source.to_string()), "a chain shows the cause once: {text}");
}

#[test]
fn pacing_spreads_what_remains() {
    // 10 of 100 remain for 20 s.
    let script = |nth: usize| {
        let left = 10_usize.saturating_sub(nth);
        let reset = 20 - 2 * nth.min(10);
        told(
            200,
            &[
                ("x-ratelimit-limit", "100"),
                ("x-ratelimit-remaining", &left.to_string()),
                ("x-ratelimit-reset", &reset.to_string()),
            ],
        )
    };
    let mut scene = Scene::new(|layer| layer.pace(true), script);
    for _ in 0..10 {
        scene.send("/");
    }
    scene.world.pass(60 * SECOND);
    let instants = scene.instants();
    let waits: Vec<u64> = instants.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(waits[1..].iter().all(|wait| *wait == 2_000), "{waits:?}");
}

#[test]
fn pacing_ends_when_more_is_left() {
    let left = |left: &'static str| {
        told(200, &[("x-ratelimit-limit", "100"), ("x-ratelimit-remaining", left), ("x-ratelimit-reset", "60")])
    };
    let mut scene = Scene::new(|layer| layer.pace(true), move |nth| left(if nth == 0 { "1" } else { "99" }));
    for _ in 0..3 {
        scene.send("/");
    }
    assert_eq!(scene.instants(), [0; 3]);
}

#[test]
fn pacing_waits_no_longer_than_a_request_may() {
    let headers = [("x-ratelimit-limit", "100"), ("x-ratelimit-remaining", "4"), ("x-ratelimit-reset", "3600")];
    let mut scene =
        Scene::new(|layer| layer.pace(true).max_wait(Duration::from_secs(100)), move |_| told(200, &headers));
    for _ in 0..3 {
        scene.send("/");
    }
    scene.world.pass(100 * SECOND);
    assert_eq!(scene.instants(), [0, 0, 100_000]);
}

#[test]
fn paused_keys_are_kept_and_idle_keys_are_forgotten() {
    let mut scene = Scene::new(
        |layer| layer.max_keys(4).key(|parts: &tower_ratelimit::Head<'_>| Key::of(parts.uri.path())),
        |nth| match nth {
            0 | 1 => told(429, &[("retry-after", "100")]),
            2 => told(429, &[("retry-after", "999999999")]),
            _ => told(200, &[]),
        },
    );
    let pause = |scene: &Scene, path: &str| scene.layer.pause_of(&Key::of(path).unwrap());
    for path in ["/paused", "/paused-too", "/absurd"] {
        scene.send(path);
    }
    assert!(pause(&scene, "/absurd") > Duration::from_secs(366 * 86_400 - 1));
    for nth in 0..100 {
        scene.send(&format!("/{nth}"));
    }
    assert_eq!(scene.seen().len(), 103);
    assert!(!pause(&scene, "/paused").is_zero() && !pause(&scene, "/paused-too").is_zero());
    assert!(!pause(&scene, "/absurd").is_zero(), "idle keys go before it");
}

#[test]
fn no_more_pauses_are_forgotten_than_are_needed() {
    let mut scene = Scene::new(
        |layer| layer.max_keys(16).key(|parts: &tower_ratelimit::Head<'_>| Key::of(parts.uri.path())),
        |nth| if nth == 0 { told(200, &[]) } else { told(429, &[("retry-after", "3600")]) },
    );
    let paused = |scene: &Scene| {
        let pauses = (0..18).map(|nth| scene.layer.pause_of(&Key::of(format!("/{nth}").as_str()).unwrap()));
        pauses.filter(|pause| !pause.is_zero()).count()
    };
    for nth in 0..16 {
        scene.send(&format!("/{nth}"));
    }
    assert_eq!(paused(&scene), 15);
    // The key without a pause goes first. Then a key goes whose pause is longer than `max_wait`.
    scene.send("/16");
    assert_eq!(paused(&scene), 16);
    scene.send("/17");
    assert_eq!((paused(&scene), scene.seen().len()), (16, 18));
}

#[test]
fn table_of_paused_keys_refuses_others() {
    let mut scene = Scene::new(
        |layer| layer.max_keys(2).key(|parts: &tower_ratelimit::Head<'_>| Key::of(parts.uri.path())),
        |nth| told(429, &[("retry-after", if nth == 1 { "999999999" } else { "100" })]),
    );
    scene.send("/a");
    scene.send("/absurd");
    // The absurd pause is forgotten, because it could fill the table for a year.
    scene.send("/b");
    assert_eq!(scene.seen().len(), 3);
    let refused = scene.send("/c");
    let error = scene.error(refused);
    assert_eq!(error.kind(), ObeyErrorKind::TooManyKeys);
    assert!(error.to_string().contains("2 other keys"), "{error}");
    scene.world.pass(120 * SECOND);
    scene.send("/c");
    assert_eq!(scene.seen().len(), 4);
}

/// A response: how long it takes in milliseconds, and what it says.
fn responses() -> impl Strategy<Value = Vec<(u64, usize)>> {
    proptest::collection::vec((0..3_000_u64, 0..8_usize), 1..12)
}

/// Returns a response of a kind, and the milliseconds for which it asks all to wait.
fn response(kind: usize) -> (u16, Vec<(&'static str, String)>, u64) {
    let said = |name, value: &str| vec![(name, value.to_owned())];
    match kind {
        0 => (429, said("retry-after", "3"), 3_000),
        1 => (503, said("retry-after", "40"), 40_000),
        2 => (429, Vec::new(), 1_000),
        3 => (200, said("ratelimit", "\"d\";r=0;t=9"), 9_000),
        4 => (200, said("ratelimit", "\"d\";r=3;t=9"), 0),
        5 => (200, said("x-ratelimit-remaining", "1"), 0),
        _ => (200, Vec::new(), 0),
    }
}

proptest! {
    #![proptest_config(config(96))]

    #[test]
    fn every_request_ends_and_none_is_sent_early(
        // After a pause in milliseconds: a request, or one that is dropped.
        steps in proptest::collection::vec((0..4_000_u64, proptest::option::weighted(0.2, 0..40_usize)), 1..60),
        answers in responses(),
        has_own in proptest::bool::ANY,
        paces in proptest::bool::ANY,
        adapts in proptest::bool::ANY,
    ) {
        let known = answers.clone();
        let mut scene = Scene::new(
            |layer| layer.pace(paces).adapt(adapts),
            move |nth| {
                let (takes_ms, kind) = answers[nth % answers.len()];
                let (status, headers, _) = response(kind);
                (takes_ms * 1_000, status, headers)
            },
        );
        if has_own {
            let own = Rule::new("own", Quota::per_second(2)).unwrap();
            scene.layer = scene.layer.clone().own_quota(memory(&scene.world.clock), own).unwrap();
        }
        let (mut tasks, mut dropped) = (Vec::new(), false);
        for (pause_ms, drops) in steps {
            scene.world.pass(pause_ms * 1_000);
            match drops.and_then(|nth| tasks.get(nth).copied()) {
                Some(task) if scene.world.is_pending(task) => {
                    scene.world.cancel(task);
                    dropped = true;
                }
                _ => tasks.push(scene.send("/")),
            }
        }
        // The longest wait, and then the longest response.
        scene.world.pass(304 * SECOND);
        for task in tasks {
            prop_assert!(!scene.world.is_pending(task));
        }
        if !dropped {
            let instants = scene.instants();
            for (nth, sent) in instants.iter().enumerate() {
                let (takes_ms, kind) = known[nth % known.len()];
                let (from, to) = (sent + takes_ms, sent + takes_ms + response(kind).2);
                let early = instants.iter().any(|at| *at > from && *at < to);
                // A refusal that names no time adds nothing to a pause that began after it was sent.
                prop_assert!(!early || kind == 2, "{instants:?}: early after {nth}");
            }
        }
    }
}
