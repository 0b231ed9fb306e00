//! The pace of bodies, in Tokio's paused time: downloads and uploads are as fast as their quota says, together, and
//! what is not sent is returned.

use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::body::{Body, Bytes};
use http::{HeaderMap, Request, Response};
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use tokio::time::Instant;
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::clock::{Clock, ManualClock, Timestamp, TokioClock};
use tower_ratelimit::limiter::{Charge, Decision, Limiter, Refund, Reply};
use tower_ratelimit::middleware::{ModeSwitch, QuotaSwitch};
use tower_ratelimit::observe::Stats;
use tower_ratelimit::{Key, MemoryLimiter, Mode, OnError, Policy, Quota, RateLimitLayer, Rule, key};

const MB: u64 = 1_000_000;
const SECOND: Duration = Duration::from_secs(1);

fn limiter() -> MemoryLimiter {
    MemoryLimiter::builder().clock(TokioClock::new()).build().unwrap()
}

fn rule(quota: Quota) -> Rule {
    Rule::new("download", quota).unwrap().pace_responses()
}

fn layer(rule: Rule) -> RateLimitLayer {
    RateLimitLayer::new(limiter(), rule, key::header("x-user"))
}

fn request(user: &str) -> Request<Body> {
    Request::get("/").header("x-user", user).body(Body::empty()).unwrap()
}

/// Sends this body through a layer as a response.
async fn respond<L: Limiter>(layer: &RateLimitLayer<L>, user: &str, body: Body) -> Body {
    let body = Arc::new(std::sync::Mutex::new(Some(body)));
    let inner = service_fn(move |_: Request<Body>| {
        let body = body.lock().unwrap().take().unwrap();
        async { Ok::<_, Infallible>(Response::new(body)) }
    });
    layer.layer(inner).oneshot(request(user)).await.unwrap().into_body()
}

async fn download<L: Limiter>(layer: &RateLimitLayer<L>, user: &str, bytes: u64) -> Body {
    respond(layer, user, Body::new(Zeros(bytes))).await
}

/// This many bytes in large frames.
struct Zeros(u64);

impl http_body::Body for Zeros {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        static FRAME: [u8; 1_000_000] = [0; 1_000_000];
        let bytes = self.0.min(MB);
        self.0 -= bytes;
        let frame = Bytes::from_static(&FRAME[..usize::try_from(bytes).unwrap()]);
        Poll::Ready((bytes > 0).then_some(Ok(Frame::data(frame))))
    }
}

/// A body that panics after its last frame.
struct Panics(Zeros);

impl http_body::Body for Panics {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        assert!(self.0.0 > 0, "the body panics");
        Pin::new(&mut self.0).poll_frame(cx)
    }
}

/// Reads a body for a time. Returns how many bytes came.
async fn read_for(body: &mut Body, time: Duration) -> u64 {
    let bytes = AtomicU64::new(0);
    let reading = async {
        while let Some(frame) = body.frame().await {
            let frame = frame.unwrap();
            bytes.fetch_add(frame.data_ref().map_or(0, Bytes::len) as u64, Ordering::Relaxed);
        }
    };
    let _ = tokio::time::timeout(time, reading).await;
    bytes.load(Ordering::Relaxed)
}

/// Whether a number is within 1 % of another.
fn is_near(bytes: u64, expected: u64) -> bool {
    bytes.abs_diff(expected) * 100 <= expected
}

#[tokio::test(start_paused = true)]
async fn download_has_the_pace_of_any_algorithm() {
    let quotas = [
        Quota::per_second(MB),
        Quota::per_minute(60 * MB),
        Quota::per_second(MB).burst(100_000).unwrap(),
        Quota::gcra(MB, SECOND).unwrap().burst(MB).unwrap(),
        Quota::leaky_bucket(MB, SECOND).unwrap(),
        Quota::leaky_queue(MB, SECOND).unwrap(),
        Quota::fixed_window(MB, SECOND).unwrap(),
        Quota::sliding_window(MB, SECOND).unwrap(),
    ];
    for quota in quotas {
        let mut body = download(&layer(rule(quota)), "a", 20 * MB).await;
        let bytes = read_for(&mut body, 10 * SECOND).await;
        // A window that is as long as the pace leaves no room for what comes late.
        let is_window = quota.to_string().contains("window");
        assert!(is_near(bytes, 10 * MB) || is_window && bytes > 9_500_000 && bytes <= 10_050_000, "{quota}: {bytes}");
    }
}

#[tokio::test(start_paused = true)]
async fn pace_of_a_download_is_steady_from_its_first_byte() {
    let mut body = download(&layer(rule(Quota::per_second(MB))), "a", 20 * MB).await;
    for tenth in 0..50 {
        let bytes = read_for(&mut body, SECOND / 10).await;
        assert!((50_000..=150_000).contains(&bytes), "{bytes} bytes in the tenth of a second {tenth}");
    }
}

#[tokio::test(start_paused = true)]
async fn slow_and_fast_paces_are_kept_too() {
    for (rate, seconds) in [(100, 100), (10_000, 10), (100 * MB, 3), (2_000 * MB, 1)] {
        let expected = rate * seconds;
        let mut body = download(&layer(rule(Quota::per_second(rate))), "a", expected * 2).await;
        let bytes = read_for(&mut body, Duration::from_secs(seconds)).await;
        let first = rate.max(1_024) / 10;
        assert!(bytes.abs_diff(expected) <= first.max(expected / 100), "{rate} a second: {bytes}");
    }
}

/// To send a piece costs the processor time, whatever its size is.
#[tokio::test(start_paused = true)]
async fn slow_pace_has_few_pieces_and_is_within_one_percent() {
    let mut body = download(&layer(rule(Quota::per_second(100_000))), "a", 20 * MB).await;
    let (began, mut bytes, mut pieces) = (Instant::now(), 0.0, 0);
    while began.elapsed() < 10 * SECOND {
        bytes += body.frame().await.unwrap().unwrap().data_ref().map_or(0, Bytes::len) as f64;
        pieces += 1;
        let ahead = bytes - 100_000.0 * began.elapsed().as_secs_f64();
        assert!(ahead.abs() <= 10_000.0, "{ahead} bytes ahead after {:?}", began.elapsed());
    }
    assert!(pieces <= 70, "{pieces} pieces in ten seconds");
}

#[tokio::test(start_paused = true)]
async fn downloads_of_a_user_share_one_pace_equally() {
    let layer = layer(rule(Quota::per_second(MB)));
    let other = download(&layer, "b", 20 * MB).await;
    let mut reading = tokio::task::JoinSet::new();
    for _ in 0..100 {
        let mut body = download(&layer, "a", MB).await;
        reading.spawn(async move { read_for(&mut body, 10 * SECOND).await });
    }
    let other = tokio::spawn(async move {
        let mut other = other;
        read_for(&mut other, 10 * SECOND).await
    });
    let each = reading.join_all().await;
    let all: u64 = each.iter().sum();
    assert!(is_near(all, 10 * MB), "{all}");
    // The first one is alone at first, and gets a whole batch.
    assert!(each.iter().all(|bytes| (99_000..=151_000).contains(bytes)), "{each:?}");
    assert!(is_near(other.await.unwrap(), 10 * MB), "another user has a pace of its own");
}

#[tokio::test(start_paused = true)]
async fn body_that_is_not_polled_delays_no_other() {
    let layer = layer(rule(Quota::per_second(MB)));
    let mut held = Vec::new();
    for _ in 0..20 {
        let mut body = download(&layer, "a", MB).await;
        let mut cx = Context::from_waker(Waker::noop());
        while Pin::new(&mut body).poll_frame(&mut cx).is_ready() {}
        held.push(body);
    }
    let mut body = download(&layer, "a", 20 * MB).await;
    let bytes = read_for(&mut body, 10 * SECOND).await;
    // Each held body keeps a piece at most.
    assert!((9_700_000..=10_100_000).contains(&bytes), "{bytes}");
    drop(held);
}

#[tokio::test(start_paused = true)]
async fn first_bytes_of_each_body_do_not_wait() {
    let layer = layer(rule(Quota::per_second(MB)).pace_after(5 * MB));
    for _ in 0..2 {
        let mut body = download(&layer, "a", 20 * MB).await;
        let bytes = read_for(&mut body, SECOND / 100).await;
        assert!((5 * MB..=5 * MB + 50_000).contains(&bytes), "{bytes}");
        let bytes = read_for(&mut body, 5 * SECOND).await;
        assert!(is_near(bytes, 5 * MB), "{bytes}");
    }
}

#[tokio::test(start_paused = true)]
async fn dropped_body_returns_what_it_did_not_send() {
    let limiter = limiter();
    let quota = Quota::per_hour(3_600 * MB);
    let policy = Policy::new("download", quota).unwrap();
    let layer = RateLimitLayer::new(limiter.clone(), rule(quota), key::header("x-user"));
    let left = || limiter.peek_one(&policy, &Key::of("a").unwrap(), 0).remaining();
    let mut body = download(&layer, "a", 20_000).await;
    let mut cx = Context::from_waker(Waker::noop());
    assert!(Pin::new(&mut body).poll_frame(&mut cx).is_ready());
    assert_eq!(left(), 3_600 * MB - 25_000, "the first batch is half of one");
    drop(body);
    assert_eq!(left(), 3_600 * MB - 20_000);
    // The application's body panics.
    let mut body = respond(&layer, "a", Body::new(Panics(Zeros(20_000)))).await;
    assert!(Pin::new(&mut body).poll_frame(&mut cx).is_ready());
    let polled = catch_unwind(AssertUnwindSafe(|| Pin::new(&mut body).poll_frame(&mut cx).is_ready()));
    assert!(polled.is_err());
    drop(body);
    assert_eq!(left(), 3_600 * MB - 40_000);
}

/// A process may have several runtimes, and one of them ends with its downloads.
#[test]
fn runtime_that_ends_leaves_the_pace_to_another() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let layer = RateLimitLayer::new(MemoryLimiter::new(), rule(Quota::per_second(MB)), key::header("x-user"));
    let ends = runtime();
    ends.block_on(async {
        for _ in 0..20 {
            let mut body = download(&layer, "a", 20 * MB).await;
            tokio::spawn(async move { read_for(&mut body, 60 * SECOND).await });
        }
        tokio::task::yield_now().await;
    });
    let other = std::thread::spawn(move || {
        runtime().block_on(async { read_for(&mut download(&layer, "a", MB / 5).await, 60 * SECOND).await })
    });
    drop(ends);
    assert_eq!(other.join().unwrap(), MB / 5);
}

/// A clock of Tokio's time that steps.
#[derive(Clone, Debug)]
struct Stepping(TokioClock, Arc<AtomicI64>);

impl Clock for Stepping {
    fn now(&self) -> Timestamp {
        let step_us = self.1.load(Ordering::Relaxed);
        Timestamp::from_micros(self.0.now().as_micros().saturating_add_signed(step_us))
    }
}

#[tokio::test(start_paused = true)]
async fn pace_is_kept_although_the_clock_steps() {
    const HOUR_US: i64 = 3_600_000_000;
    for step_us in [-HOUR_US, -1_000_000, -1, 1_000_000, HOUR_US] {
        let step = Arc::new(AtomicI64::new(2 * HOUR_US));
        let clock = Stepping(TokioClock::new(), Arc::clone(&step));
        let limiter = MemoryLimiter::builder().clock(clock).build().unwrap();
        let layer = RateLimitLayer::new(limiter, rule(Quota::per_second(MB)), key::header("x-user"));
        let mut body = download(&layer, "a", 50 * MB).await;
        assert!(is_near(read_for(&mut body, 5 * SECOND).await, 5 * MB));
        step.fetch_add(step_us, Ordering::Relaxed);
        let bytes = read_for(&mut body, 10 * SECOND).await;
        // After a step back the bucket may be empty, and fills again within a second.
        assert!((8_800_000..=10_100_000).contains(&bytes), "{step_us}: {bytes}");
    }
}

/// A body with this text, trailers, and what it says about itself.
struct Stream(Vec<Frame<Bytes>>, SizeHint);

impl http_body::Body for Stream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let next = (!self.0.is_empty()).then(|| self.0.remove(0));
        Poll::Ready(next.map(Ok))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        let left: usize = self.0.iter().filter_map(Frame::data_ref).map(Bytes::len).sum();
        let mut hint = self.1;
        hint.set_lower(left as u64);
        hint
    }
}

#[tokio::test(start_paused = true)]
async fn observer_and_statistics_see_paced_bodies() {
    let stats = Stats::new();
    let layer = layer(rule(Quota::per_second(MB)).pace_after(100_000)).observer(stats.clone());
    let seen = || {
        let policies = stats.snapshot().policies().to_vec();
        policies.iter().map(|policy| (policy.pacing(), policy.paced_bytes())).collect::<Vec<_>>()
    };
    assert_eq!(seen(), []);
    let (mut whole, mut dropped) = (download(&layer, "a", MB).await, download(&layer, "b", MB).await);
    assert_eq!(seen(), [(2, 0)]);
    assert_eq!(read_for(&mut whole, 5 * SECOND).await, MB);
    let part = read_for(&mut dropped, SECOND / 2).await;
    drop((whole, dropped));
    assert_eq!(seen(), [(0, MB + part)]);
    assert!(stats.to_prometheus().contains("ratelimit_paced_bytes_total{policy=\"download\"}"));
}

#[tokio::test(start_paused = true)]
async fn trailers_hints_and_the_end_of_a_paced_body_pass() {
    let layer = layer(rule(Quota::per_second(100)));
    let trailers = HeaderMap::from_iter([(http::header::ETAG, "x".parse().unwrap())]);
    let frames = vec![
        Frame::data(Bytes::from_static(&[b'a'; 150])),
        Frame::data(Bytes::new()),
        Frame::data(Bytes::from_static(b"b")),
        Frame::trailers(trailers.clone()),
    ];
    let mut hint = SizeHint::new();
    hint.set_upper(1_000);
    let mut body = respond(&layer, "a", Body::new(Stream(frames, hint))).await;
    let mut text = Vec::new();
    let mut last = None;
    while let Some(frame) = body.frame().await {
        assert!(last.is_none(), "trailers are last");
        match frame.unwrap().into_data() {
            Ok(data) => text.extend_from_slice(&data),
            Err(frame) => last = frame.into_trailers().ok(),
        }
        assert_eq!(body.size_hint().lower(), 151 - text.len() as u64);
    }
    assert_eq!((text.len(), last), (151, Some(trailers)));
    assert!(body.is_end_stream());

    let body = respond(&layer, "a", Body::from("abc")).await;
    assert_eq!((body.size_hint().exact(), body.is_end_stream()), (Some(3), false));
    let body = respond(&layer, "a", Body::empty()).await;
    assert_eq!((body.size_hint().exact(), body.is_end_stream()), (Some(0), true));
}

#[tokio::test(start_paused = true)]
async fn all_rules_that_apply_pace_a_body() {
    let shared = Rule::new("all", Quota::per_second(3 * MB)).unwrap().pace_responses();
    let layer = layer(rule(Quota::per_second(2 * MB))).and(shared, key::global());
    let mut reading = tokio::task::JoinSet::new();
    let mut alone = download(&layer, "a", 100 * MB).await;
    assert!(is_near(read_for(&mut alone, 5 * SECOND).await, 10 * MB));
    drop(alone);
    for user in ["a", "b"] {
        let mut body = download(&layer, user, 100 * MB).await;
        reading.spawn(async move { read_for(&mut body, 10 * SECOND).await });
    }
    let all: u64 = reading.join_all().await.iter().sum();
    assert!(is_near(all, 30 * MB), "{all}");
}

#[tokio::test(start_paused = true)]
async fn second_quota_of_a_rule_limits_and_does_not_slow() {
    let quotas = [Quota::per_second(MB), Quota::new(5 * MB, 100 * SECOND).unwrap()];
    let rule = Rule::all_of("download", quotas).unwrap().pace_responses();
    let mut body = download(&layer(rule), "a", 100 * MB).await;
    let bytes = read_for(&mut body, 4 * SECOND).await;
    assert!((4 * MB..=4_100_000).contains(&bytes), "{bytes}");
    let after = read_for(&mut body, 16 * SECOND).await;
    assert!((1_500_000..2 * MB).contains(&after), "{after}: a megabyte was left, and each second brings 50,000 bytes");
}

#[tokio::test(start_paused = true)]
async fn mode_holds_for_downloads_under_way() {
    let mode = ModeSwitch::new(Mode::Enforce);
    let layer = layer(rule(Quota::per_second(MB)).mode(mode.clone()));
    let mut body = download(&layer, "a", 100 * MB).await;
    assert!(is_near(read_for(&mut body, SECOND * 5).await, 5 * MB));
    mode.set(Mode::Shadow);
    let begun = Instant::now();
    assert!(read_for(&mut body, SECOND * 50).await > 94 * MB);
    assert!(begun.elapsed() < SECOND);
}

#[tokio::test(start_paused = true)]
async fn quota_holds_for_downloads_under_way() {
    let switch = QuotaSwitch::new(Quota::per_second(MB));
    let layer = layer(Rule::switched("download", &switch).unwrap().pace_responses());
    let mut body = download(&layer, "a", 100 * MB).await;
    for rate in [1, 3, 1] {
        switch.set(Quota::per_second(rate * MB)).unwrap();
        read_for(&mut body, SECOND).await;
        let bytes = read_for(&mut body, SECOND * 5).await;
        assert!(is_near(bytes, rate * 5 * MB), "{rate} MB a second: {bytes}");
    }
}

/// A clock that begins this long after a whole second.
#[derive(Clone, Copy, Debug)]
struct ClockAfterASecond(Instant, Duration);

impl Clock for ClockAfterASecond {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(1_800_000_000_000_000).saturating_add(self.0.elapsed() + self.1)
    }
}

/// When a fixed window ends, relative to the change, decides how long its account takes to find the new pace.
#[tokio::test(start_paused = true)]
async fn switched_pace_is_one_for_all_bodies_of_a_key() {
    let slow = [Quota::per_second(MB), Quota::sliding_window(MB, SECOND).unwrap()];
    let fast = [Quota::per_second(2 * MB), Quota::fixed_window(2 * MB, SECOND).unwrap()];
    let changes = slow.iter().flat_map(|slow| fast.iter().map(move |fast| (*slow, *fast)));
    let phases = (0..8).map(|eighth| SECOND * eighth / 8);
    for (phase, (before, after)) in phases.flat_map(|phase| changes.clone().map(move |change| (phase, change))) {
        let switch = QuotaSwitch::new(before);
        let limiter = MemoryLimiter::builder().clock(ClockAfterASecond(Instant::now(), phase)).build().unwrap();
        let rule = Rule::switched("download", &switch).unwrap().pace_responses();
        let layer = RateLimitLayer::new(limiter, rule, key::header("x-user"));
        let read = Arc::new(AtomicU64::new(0));
        let begin = || async {
            let (mut body, read) = (download(&layer, "a", 100 * MB).await, Arc::clone(&read));
            tokio::spawn(async move {
                while let Some(Ok(frame)) = body.frame().await {
                    read.fetch_add(frame.data_ref().map_or(0, Bytes::len) as u64, Ordering::Relaxed);
                }
            });
        };
        begin().await;
        tokio::time::sleep(SECOND).await;
        for (quota, rate) in [(after, 2 * MB), (before, MB)] {
            switch.set(quota).unwrap();
            begin().await;
            for second in 0..7 {
                read.store(0, Ordering::Relaxed);
                tokio::time::sleep(SECOND).await;
                let bytes = read.load(Ordering::Relaxed);
                // At most the batch that was under way is of the pace before.
                assert!(bytes <= rate + rate / 8, "{bytes} of {quota} in second {second} at {phase:?}");
                // The units that were taken from the larger quota still count under the smaller one. After a denial
                // an account asks for smaller batches for some seconds.
                assert!(second < 5 || bytes >= rate * 9 / 10, "{bytes} of {quota} in second {second} at {phase:?}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn body_follows_its_quota_although_its_service_is_gone() {
    let switch = QuotaSwitch::new(Quota::per_second(MB));
    let layer = layer(Rule::switched("download", &switch).unwrap().pace_responses());
    let mut body = download(&layer, "a", 100 * MB).await;
    read_for(&mut body, SECOND).await;
    drop(layer);
    switch.set(Quota::per_second(3 * MB)).unwrap();
    read_for(&mut body, SECOND).await;
    assert!(is_near(read_for(&mut body, SECOND * 5).await, 15 * MB));
}

#[tokio::test(start_paused = true)]
async fn body_that_waits_goes_on_after_a_change() {
    let quota = Quota::fixed_window(MB, 3_600 * SECOND).unwrap();
    for (change, within) in [("switch", 1), ("mode", 1), ("mode after a switch", 1), ("layer", 1), ("limiter", 11)] {
        let (switch, mode, limiter) = (QuotaSwitch::new(quota), ModeSwitch::new(Mode::Enforce), limiter());
        let rule = Rule::switched("download", &switch).unwrap().mode(&mode).pace_responses();
        let layer = RateLimitLayer::new(limiter.clone(), rule, key::header("x-user"));
        let alice = Key::of("a").unwrap();
        assert!(limiter.take_one(&layer.policies()[0], &alice, MB).is_allowed());
        let mut body = download(&layer, "a", 10_000).await;
        assert_eq!(read_for(&mut body, 60 * SECOND).await, 0);
        match change {
            "switch" => drop(switch.set(Quota::per_second(MB)).unwrap()),
            "mode" => drop(mode.set(Mode::Shadow)),
            "mode after a switch" => {
                switch.set(Quota::fixed_window(MB / 2, 3_600 * SECOND).unwrap()).unwrap();
                assert_eq!(read_for(&mut body, SECOND).await, 0);
                mode.set(Mode::Shadow);
            }
            "layer" => layer.reset(&alice).await.unwrap(),
            _ => limiter.reset_now(&layer.policies()[0], &alice),
        }
        assert!(read_for(&mut body, within * SECOND).await > 0, "{change}");
    }
}

#[tokio::test(start_paused = true)]
async fn body_whose_rule_is_removed_is_free() {
    let file = |pace: &str| format!("rules: [{{name: d, quota: 1000000 per second, key: header x-user{pace}}}]");
    let rules = tower_ratelimit::rules::Rules::from_text(file(", pace: responses")).unwrap();
    let layer = rules.layer(limiter()).unwrap();
    let mut body = download(&layer, "a", 100 * MB).await;
    assert!(is_near(read_for(&mut body, 5 * SECOND).await, 5 * MB));
    rules.replace(file("")).unwrap();
    assert!(read_for(&mut body, SECOND).await > 94 * MB);
}

#[tokio::test(start_paused = true)]
async fn closed_quota_ends_a_body_in_an_error() {
    let mut body = download(&layer(rule(Quota::per_second(0))), "a", 100).await;
    let error = body.frame().await.unwrap().unwrap_err();
    assert!(error.to_string().contains("in vain"), "{error}");
    assert!(body.frame().await.is_none() && body.is_end_stream());
}

#[tokio::test(start_paused = true)]
async fn unlimited_quota_paces_nothing() {
    let mut body = download(&layer(rule(Quota::unlimited())), "a", 50 * MB).await;
    let begun = Instant::now();
    assert_eq!(read_for(&mut body, SECOND).await, 50 * MB);
    assert_eq!(begun.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn paced_request_is_charged_nothing_and_needs_a_key() {
    let layer = layer(rule(Quota::per_second(10))).headers(tower_ratelimit::Headers::draft_11());
    for _ in 0..100 {
        let response = layer.layer(service_fn(ok)).oneshot(request("a")).await.unwrap();
        assert!(response.status() == 200 && !response.headers().contains_key("ratelimit"));
    }
    let keyless = Request::get("/").body(Body::empty()).unwrap();
    assert_eq!(layer.layer(service_fn(ok)).oneshot(keyless).await.unwrap().status(), 400);
}

async fn ok(_: Request<Body>) -> Result<Response<Body>, Infallible> {
    Ok(Response::new(Body::from("x")))
}

#[tokio::test(start_paused = true)]
async fn upload_is_read_at_its_pace_together_with_downloads() {
    let upload = Rule::new("bytes", Quota::per_second(MB)).unwrap().pace_requests();
    let both = upload.clone().pace_responses();
    for (rule, seconds) in [(upload, 3), (both, 5)] {
        let layer = RateLimitLayer::new(limiter(), rule, key::global());
        let inner = service_fn(|request: Request<Body>| async {
            let bytes = request.into_body().collect().await.unwrap().to_bytes();
            Ok::<_, Infallible>(Response::new(Body::from(bytes.slice(..2_000_000))))
        });
        let begun = Instant::now();
        let request = Request::new(Body::from(vec![b'x'; 3_000_000]));
        let response = layer.layer(inner).oneshot(request).await.unwrap();
        assert_eq!(response.into_body().collect().await.unwrap().to_bytes().len(), 2_000_000);
        let taken = begun.elapsed();
        let expected = Duration::from_secs(seconds);
        assert!(taken.abs_diff(expected) <= Duration::from_millis(110), "{taken:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn request_body_of_an_unknown_type_is_reported() {
    let upload = Rule::new("bytes", Quota::per_second(MB)).unwrap().pace_requests();
    let layer = RateLimitLayer::new(limiter(), upload, key::global());
    let inner = service_fn(|request: Request<String>| async {
        Ok::<_, Infallible>(Response::new(Body::from(request.into_body())))
    });
    layer.layer(inner).oneshot(Request::new("text".to_owned())).await.unwrap();
    let warning = layer.check().unwrap_err().to_string();
    assert!(warning.contains("pace_requests") && warning.contains("String"), "{warning}");
}

/// A limiter as far away as a store, which counts its calls and can fail.
#[derive(Clone)]
struct Far {
    limiter: MemoryLimiter,
    round_trip: Duration,
    calls: Arc<AtomicU64>,
    is_down: Arc<AtomicBool>,
}

#[derive(Debug)]
struct Down;

impl std::fmt::Display for Down {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the store is down")
    }
}

impl std::error::Error for Down {}

type Later<T> = Pin<Box<dyn std::future::Future<Output = Result<T, Down>> + Send>>;

impl Far {
    fn new(round_trip: Duration) -> Self {
        Self { limiter: limiter(), round_trip, calls: Arc::default(), is_down: Arc::default() }
    }

    fn later<T: Send + 'static>(&self, answer: T) -> Reply<T, Down, Later<T>> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let (round_trip, is_down) = (self.round_trip, self.is_down.load(Ordering::Relaxed));
        Reply::Later(Box::pin(async move {
            tokio::time::sleep(round_trip).await;
            if is_down { Err(Down) } else { Ok(answer) }
        }))
    }
}

impl Limiter for Far {
    type Error = Down;
    type Future<T: Send + 'static> = Later<T>;

    fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, Down, Later<Decision>> {
        self.later(self.limiter.take_now(charges))
    }

    fn peek(&self, charges: &[Charge<'_>]) -> Reply<Decision, Down, Later<Decision>> {
        self.later(self.limiter.peek_now(charges))
    }

    fn refund(&self, refunds: Vec<Refund>) -> Reply<(), Down, Later<()>> {
        let _ = self.limiter.refund(refunds);
        self.later(())
    }

    fn reset(&self, policy: &Policy, key: &Key) -> Reply<(), Down, Later<()>> {
        let _ = self.limiter.reset(policy, key);
        self.later(())
    }
}

fn far_layer(limiter: &Far, quota: Quota) -> RateLimitLayer<Far> {
    RateLimitLayer::new(limiter.clone(), rule(quota), key::header("x-user"))
}

#[tokio::test(start_paused = true)]
async fn change_during_a_call_lets_a_body_go_on() {
    let (used, closed) = (Quota::fixed_window(MB, 3_600 * SECOND).unwrap(), Quota::per_second(0));
    for (quota, change) in [(used, "switch"), (used, "mode"), (closed, "switch"), (closed, "mode")] {
        let (switch, mode, limiter) = (QuotaSwitch::new(quota), ModeSwitch::new(Mode::Enforce), Far::new(SECOND));
        let rule = Rule::switched("download", &switch).unwrap().mode(&mode).pace_responses();
        let layer = RateLimitLayer::new(limiter.clone(), rule, key::header("x-user"));
        let taken = limiter.limiter.take_one(&layer.policies()[0], &Key::of("a").unwrap(), MB);
        assert_eq!(taken.is_allowed(), quota == used);
        let mut body = download(&layer, "a", 10_000).await;
        assert_eq!(read_for(&mut body, SECOND / 2).await, 0);
        assert_eq!(limiter.calls.load(Ordering::Relaxed), 1, "the call is under way");
        match change {
            "switch" => drop(switch.set(Quota::per_second(MB)).unwrap()),
            _ => drop(mode.set(Mode::Shadow)),
        }
        assert!(read_for(&mut body, 3 * SECOND).await > 0, "{change} from {quota}");
    }
}

#[tokio::test(start_paused = true)]
async fn far_store_gets_few_calls_and_does_not_slow_the_pace() {
    for (downloads, round_trip) in [(1, 1), (1, 30), (100, 5), (3, 90)] {
        let limiter = Far::new(Duration::from_millis(round_trip));
        let layer = far_layer(&limiter, Quota::per_second(MB));
        let mut reading = tokio::task::JoinSet::new();
        for _ in 0..downloads {
            let mut body = download(&layer, "a", 20 * MB).await;
            reading.spawn(async move { read_for(&mut body, 10 * SECOND).await });
        }
        let all: u64 = reading.join_all().await.iter().sum();
        let calls = limiter.calls.load(Ordering::Relaxed);
        assert!(is_near(all, 10 * MB), "{downloads} downloads, {round_trip} ms: {all}");
        assert!(calls <= 205, "{downloads} downloads, {round_trip} ms: {calls} calls");
    }
}

#[tokio::test(start_paused = true)]
async fn processes_share_a_pace_fairly_and_with_few_calls() {
    for quota in [Quota::per_second(MB), Quota::leaky_queue(MB, SECOND).unwrap()] {
        let limiter = Far::new(Duration::from_millis(2));
        let mut reading = tokio::task::JoinSet::new();
        for downloads in [1, 1, 10] {
            let layer = far_layer(&limiter, quota);
            for _ in 0..downloads {
                let mut body = download(&layer, "a", 50 * MB).await;
                reading.spawn(async move { (downloads, read_for(&mut body, 20 * SECOND).await) });
            }
        }
        let each = reading.join_all().await;
        let all: u64 = each.iter().map(|(_, bytes)| bytes).sum();
        let calls = limiter.calls.load(Ordering::Relaxed);
        assert!(calls <= 3_000, "{quota}: {calls} calls of three processes in 20 seconds");
        // The burst of a bucket is shared at first.
        assert!((19_700_000..=21_100_000).contains(&all), "{quota}: {all}");
        let alone: Vec<u64> = each.iter().filter(|(downloads, _)| *downloads == 1).map(|(_, bytes)| *bytes).collect();
        let together = all - alone.iter().sum::<u64>();
        for process in [alone[0], alone[1], together] {
            assert!((all / 6..=all / 2).contains(&process), "{quota}: {alone:?} and {together}, {calls} calls");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn download_waits_for_a_store_that_fails_and_then_ends() {
    let limiter = Far::new(Duration::from_millis(2));
    let mut body = download(&far_layer(&limiter, Quota::per_second(MB)), "a", 50 * MB).await;
    assert!(is_near(read_for(&mut body, 5 * SECOND).await, 5 * MB));
    limiter.is_down.store(true, Ordering::Relaxed);
    assert!(read_for(&mut body, SECOND).await <= 60_000);
    limiter.is_down.store(false, Ordering::Relaxed);
    read_for(&mut body, SECOND).await;
    assert!(is_near(read_for(&mut body, 5 * SECOND).await, 5 * MB), "it goes on");
    limiter.is_down.store(true, Ordering::Relaxed);
    let begun = Instant::now();
    let error = loop {
        match body.frame().await {
            Some(Ok(_)) => {}
            Some(Err(error)) => break error,
            None => panic!("the download has ended as if it were whole"),
        }
    };
    assert!(error.to_string().contains("in vain") && begun.elapsed() < 5 * SECOND, "{error}");
}

#[tokio::test(start_paused = true)]
async fn allowed_failure_leaves_the_pace_to_each_process() {
    let limiter = Far::new(Duration::from_millis(2));
    limiter.is_down.store(true, Ordering::Relaxed);
    let layer = far_layer(&limiter, Quota::per_second(MB)).on_error(OnError::Allow);
    let mut body = download(&layer, "a", 50 * MB).await;
    let bytes = read_for(&mut body, 10 * SECOND).await;
    assert!(is_near(bytes, 10 * MB), "{bytes}");
}

#[tokio::test(start_paused = true)]
async fn held_body_does_not_keep_the_answer_of_a_store() {
    let limiter = Far::new(Duration::from_millis(5));
    let layer = far_layer(&limiter, Quota::per_second(MB));
    let mut held = Vec::new();
    for _ in 0..10 {
        let mut body = download(&layer, "a", MB).await;
        let mut cx = Context::from_waker(Waker::noop());
        assert!(Pin::new(&mut body).poll_frame(&mut cx).is_pending());
        held.push(body);
    }
    let mut body = download(&layer, "a", 20 * MB).await;
    let bytes = read_for(&mut body, 10 * SECOND).await;
    assert!((9_500_000..=10_100_000).contains(&bytes), "{bytes}");
    drop(held);
}

#[tokio::test(start_paused = true)]
async fn bodies_that_come_and_go_leave_no_unit_behind() {
    // Its clock stands still, so what was taken stays taken.
    let limiter = MemoryLimiter::builder().clock(ManualClock::new()).build().unwrap();
    let quota = Quota::per_hour(3_600 * MB);
    let policy = Policy::new("download", quota).unwrap();
    let layer = RateLimitLayer::new(limiter.clone(), rule(quota), key::header("x-user"));
    let mut sent = 0;
    let mut bodies = std::collections::VecDeque::new();
    for round in 0..200_u64 {
        bodies.push_back(download(&layer, "a", 100_000).await);
        if let Some(body) = bodies.front_mut().filter(|_| round % 3 > 0) {
            sent += read_for(body, Duration::from_millis(round % 7)).await;
        }
        if bodies.len() > 5 {
            bodies.remove(usize::try_from(round % 5).unwrap());
        }
    }
    drop(bodies);
    let left = limiter.peek_one(&policy, &Key::of("a").unwrap(), 0).remaining();
    assert_eq!((sent > MB / 3, 3_600 * MB - left), (true, sent));
}

#[test]
fn pace_that_cannot_be_kept_is_reported() {
    let refused = |rule: Rule| layer(rule).check().unwrap_err();
    let named = |quota: Quota| Rule::new("download", quota).unwrap();
    for (rule, kind, word) in [
        (rule(Quota::gcra(MB, SECOND).unwrap()), "slow-pace", "burst"),
        (rule(Quota::concurrent(3)), "unsupported-quota", "not a rate"),
        (rule(Quota::per_second(MB)).cost(|_| 2), "no-effect", "cost"),
        (rule(Quota::per_second(MB)).warn_at_percent(10), "no-effect", "warn_at_percent"),
        (named(Quota::per_second(MB)).pace_after(1), "no-effect", "pace_after"),
    ] {
        let warning = refused(rule);
        assert_eq!(warning.kind().as_str(), kind, "{warning}");
        assert!(warning.to_string().contains(word), "{warning}");
    }
    let queue = rule(Quota::leaky_queue(MB, SECOND).unwrap());
    assert_eq!(layer(queue).check(), Ok(()), "it needs no delay()");
}

#[tokio::test(start_paused = true)]
async fn explanation_names_the_pace_of_a_request() {
    let layer = layer(rule(Quota::per_second(MB)));
    let (head, _) = request("alice").into_parts();
    let explanation = layer.explain(&head).await;
    assert!(explanation.passes() && explanation.rules()[0].paces());
    let text = explanation.to_string();
    assert!(text.contains("download: paces the bodies of alice\n  1000000 per second"), "{text}");
}

#[cfg(feature = "rules")]
#[tokio::test(start_paused = true)]
async fn rule_of_a_file_paces_bodies() {
    let file = "rules: [{name: d, quota: 1 MB per second, key: header x-user, pace: responses, pace-after: 500 kB}]";
    let rules = tower_ratelimit::rules::Rules::from_text(file).unwrap();
    let layer = rules.layer(limiter()).unwrap();
    let mut body = download(&layer, "a", 20 * MB).await;
    let bytes = read_for(&mut body, 5 * SECOND).await;
    assert!((5_500_000..=5_600_000).contains(&bytes), "{bytes}");
    assert_eq!(layer.check(), Ok(()));
}

#[tokio::test(start_paused = true)]
async fn http2_stream_that_is_not_read_leaves_the_pace_to_others() {
    let limiter = limiter();
    let layer = RateLimitLayer::new(limiter.clone(), rule(Quota::per_second(MB)), key::header("x-user"));
    let service = layer.layer(service_fn(|_: Request<Incoming>| async {
        Ok::<_, Infallible>(Response::new(Body::new(Zeros(50 * MB))))
    }));
    let (client, server) = tokio::io::duplex(1 << 16);
    let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        .serve_connection(TokioIo::new(server), TowerToHyperService::new(service));
    tokio::spawn(server);
    let connection = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(client));
    let (mut send, connection) = connection.await.unwrap();
    tokio::spawn(connection);
    let get = || Request::get("http://a/").header("x-user", "a").body(Empty::<Bytes>::new()).unwrap();
    let stopped = send.send_request(get()).await.unwrap();
    // Until it has filled the window of its stream.
    tokio::time::sleep(5 * SECOND).await;
    let policy = Policy::new("download", Quota::per_second(MB)).unwrap();
    let left = limiter.peek_one(&policy, &Key::of("a").unwrap(), 0).remaining();
    assert_eq!(left, MB, "a reader that stops takes nothing");
    let mut body = Body::new(send.send_request(get()).await.unwrap().into_body());
    let bytes = read_for(&mut body, 10 * SECOND).await;
    assert!(is_near(bytes, 10 * MB), "{bytes}");
    drop(stopped);
}

/// A connection of HTTP/1 to a server whose handler answers with the status and the bytes that the path says.
async fn http1(layer: RateLimitLayer) -> hyper::client::conn::http1::SendRequest<Empty<Bytes>> {
    let service = layer.layer(service_fn(|request: Request<Incoming>| async move {
        let (status, bytes) = request.uri().path().trim_start_matches('/').split_once('/').unwrap();
        let body = match bytes.parse() {
            Ok(bytes) => Body::new(http_body_util::Full::new(Bytes::from(vec![b'x'; bytes]))),
            Err(_) => Body::empty(),
        };
        Ok::<_, Infallible>(Response::builder().status(status).body(body).unwrap())
    }));
    let (client, server) = tokio::io::duplex(1 << 16);
    let server = hyper::server::conn::http1::Builder::new()
        .serve_connection(TokioIo::new(server), TowerToHyperService::new(service));
    tokio::spawn(server);
    let (send, connection) = hyper::client::conn::http1::handshake(TokioIo::new(client)).await.unwrap();
    tokio::spawn(connection);
    send
}

#[tokio::test(start_paused = true)]
async fn paced_responses_keep_their_length_and_empty_ones_go_at_once() {
    let mut send = http1(layer(rule(Quota::per_second(1_000)))).await;
    let mut ask = async |method: &str, path: &str| {
        let request = Request::builder().method(method).uri(path).header("x-user", "a").header("host", "a");
        let began = Instant::now();
        let response = send.send_request(request.body(Empty::new()).unwrap()).await.unwrap();
        let length = response.headers().get("content-length").map(|length| length.to_str().unwrap().to_owned());
        let bytes = response.into_body().collect().await.unwrap().to_bytes().len();
        (length, bytes, began.elapsed())
    };
    let (length, bytes, took) = ask("GET", "/200/5000").await;
    assert_eq!((length.as_deref(), bytes), (Some("5000"), 5_000));
    assert!((4_000..=5_100).contains(&took.as_millis()), "{took:?}");
    // None of them has a byte to wait for, although the key's pace is used up.
    for (method, path, expected) in [
        ("HEAD", "/200/5000", Some("5000")),
        ("GET", "/204/none", None),
        ("GET", "/304/none", None),
        ("GET", "/200/none", Some("0")),
    ] {
        let (length, bytes, took) = ask(method, path).await;
        assert_eq!((length.as_deref(), bytes, took), (expected, 0, Duration::ZERO), "{method} {path}");
    }
}

#[tokio::test(start_paused = true)]
async fn http2_streams_that_are_reset_leave_nothing() {
    let (limiter, stats) = (limiter(), Stats::new());
    let layer = RateLimitLayer::new(limiter.clone(), rule(Quota::per_second(MB)), key::header("x-user"));
    let service = layer.observer(stats.clone()).layer(service_fn(|_: Request<Incoming>| async {
        Ok::<_, Infallible>(Response::new(Body::new(Zeros(50 * MB))))
    }));
    let (client, server) = tokio::io::duplex(1 << 16);
    let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        .serve_connection(TokioIo::new(server), TowerToHyperService::new(service));
    tokio::spawn(server);
    let connection = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(client));
    let (send, connection) = connection.await.unwrap();
    tokio::spawn(connection);
    let get = || {
        let request = Request::get("http://a/").header("x-user", "a").body(Empty::<Bytes>::new()).unwrap();
        let mut send = send.clone();
        async move { Body::new(send.send_request(request).await.unwrap().into_body()) }
    };
    for after_ms in [0, 1, 49, 50, 51, 120, 700] {
        let mut streams = tokio::task::JoinSet::new();
        for stream in 0..20 {
            let get = get();
            streams.spawn(async move {
                let mut body = get.await;
                read_for(&mut body, Duration::from_millis(after_ms * (stream % 3))).await // then it is reset
            });
        }
        streams.join_all().await;
        tokio::time::sleep(SECOND / 10).await;
        assert_eq!(stats.snapshot().policies()[0].pacing(), 0, "after {after_ms} ms");
    }
    let mut body = get().await;
    let bytes = read_for(&mut body, 10 * SECOND).await;
    assert!(is_near(bytes, 10 * MB), "{bytes}");
}
