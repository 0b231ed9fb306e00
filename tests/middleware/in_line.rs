//! Requests that wait in line for a concurrency limit get places in the order in which they came,
//! and hold nothing meanwhile.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use proptest::prelude::*;
use tower::util::BoxCloneService;
use tower::{BoxError, Layer, ServiceExt, service_fn};
use tower_ratelimit::{
    Head, Key, MemoryLimiter, Mode, Policy, Quota, RateLimitLayer, Rule, Wait,
    clock::TokioTimer,
    key,
    limiter::{
        BoxLimiter, Charge, ChargeDecision, Decision, FallbackLimiter, Limiter, LimiterHooks, Place, Refund, Reply,
        UnsupportedQuota,
    },
    middleware::{ModeSwitch, QuotaSwitch},
    observe::{OutcomeKind, SetupWarningKind},
    rules::Rules,
};

use crate::lines::{Log, Number};
use crate::support::waiting::World;
use crate::support::{config, hold_by, memory};

type Layered<L = MemoryLimiter> = RateLimitLayer<L>;
type Body = http_body_util::combinators::UnsyncBoxBody<Bytes, BoxError>;
type Answer = Response<Body>;

const SECOND: u64 = 1_000_000;
const REFUSED: u16 = 429;

fn quota(limit: u64) -> Quota {
    Quota::concurrent(limit).max_wait(Duration::from_secs(10)).unwrap()
}

fn exports(limit: u64) -> Rule {
    Rule::new("exports", quota(limit)).unwrap()
}

fn policy(limit: u64) -> Policy {
    Policy::new("exports", Quota::concurrent(limit)).unwrap()
}

fn done() -> Answer {
    Response::new(Full::new(Bytes::from_static(b"done")).map_err(BoxError::from).boxed_unsync())
}

async fn in_memory() -> (MemoryLimiter, ()) {
    (MemoryLimiter::builder().max_keys(1_000).build().unwrap(), ())
}

crate::lines::promises_of_lines!(in_memory, #[tokio::test(start_paused = true)]);

/// Requests that hold their places until the test drops their responses.
struct Office {
    world: World<Answer>,
    limiter: MemoryLimiter,
    started: Arc<Mutex<Vec<usize>>>,
    log: Log,
}

impl Office {
    fn new() -> Self {
        let world = World::new();
        let limiter = memory(&world.clock);
        Self { world, limiter, started: Arc::default(), log: Log::default() }
    }

    fn layer(&self, rule: Rule) -> Layered {
        let layer = RateLimitLayer::new(self.limiter.clone(), rule, key::global());
        layer.timer(self.world.timer.clone()).observer(self.log.clone())
    }

    /// Sends a request, and returns its number.
    fn send<L: Limiter>(&mut self, layer: &Layered<L>) -> usize {
        let (started, number) = (Arc::clone(&self.started), self.world.done.len());
        let service = service_fn(move |request: Request<String>| {
            started.lock().unwrap().push(request.extensions().get::<Number>().unwrap().0);
            std::future::ready(Ok::<_, BoxError>(done()))
        });
        let request = Request::builder().extension(Number(number)).body(String::new()).unwrap();
        let service = layer.clone().layer(service);
        self.world.spawn(async move { service.oneshot(request).await.unwrap() })
    }

    fn send_many<const N: usize>(&mut self, layer: &Layered) -> [usize; N] {
        [(); N].map(|()| self.send(layer))
    }

    /// Ends a request that has its response.
    fn finish(&mut self, request: usize) {
        drop(self.world.done[request].take().expect("it has its response"));
        self.world.pass(0);
    }

    /// Returns the status of a request that has its response.
    fn status(&self, request: usize) -> Option<u16> {
        self.world.done[request].as_ref().map(|response| response.status().as_u16())
    }

    fn started(&self) -> Vec<usize> {
        self.started.lock().unwrap().clone()
    }

    fn kinds(&self) -> Vec<OutcomeKind> {
        self.log.0.lock().unwrap().clone()
    }

    fn free(&self, limit: u64) -> u64 {
        self.limiter.peek_one(&policy(limit), &Key::global(), 0).remaining()
    }

    fn waiting(&self) -> usize {
        self.limiter.hooks().place_lines().unwrap().waiting(&policy(1), &Key::global())
    }
}

#[test]
fn request_that_has_waited_for_the_longest_time_is_refused() {
    let mut office = Office::new();
    let layer = office.layer(exports(1));
    let [held, first] = office.send_many(&layer);
    office.world.pass(4 * SECOND);
    let second = office.send(&layer);
    office.world.pass(6 * SECOND - 1);
    assert_eq!((office.status(first), office.status(second)), (None, None));
    office.world.pass(1);
    assert_eq!((office.status(first), office.status(second)), (Some(REFUSED), None));
    let refusal = office.world.done[first].as_ref().unwrap();
    assert_eq!(refusal.headers().get("retry-after"), None, "nobody knows when a place comes free");
    office.finish(held);
    assert_eq!(office.started(), [held, second]);
    assert_eq!(office.kinds()[1..], [OutcomeKind::Limited, OutcomeKind::Delayed]);
}

struct Counter(AtomicUsize);

impl Wake for Counter {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

type Waiting = Pin<Box<dyn Future<Output = Result<Place, ChargeDecision>> + Send>>;

/// Requests of a limiter without HTTP, each with a waker that counts.
fn line(office: &Office, limit: u64, count: usize) -> Vec<(Waiting, Arc<Counter>)> {
    let policy = Policy::new("exports", quota(limit)).unwrap();
    let mut all = Vec::new();
    for _ in 0..count {
        let timer = office.world.timer.clone();
        let (limiter, policy) = (office.limiter.clone(), policy.clone());
        let hold = async move { hold_by(&limiter, &policy, &Key::global(), 1, timer).await.unwrap() };
        let mut waiting: Waiting = Box::pin(hold);
        let counter = Arc::new(Counter(AtomicUsize::new(0)));
        assert!(poll(&mut waiting, &counter).is_none());
        all.push((waiting, counter));
    }
    all
}

fn poll(waiting: &mut Waiting, counter: &Arc<Counter>) -> Option<Result<Place, ChargeDecision>> {
    match waiting.as_mut().poll(&mut Context::from_waker(&Waker::from(Arc::clone(counter)))) {
        Poll::Ready(answer) => Some(answer),
        Poll::Pending => None,
    }
}

#[test]
fn place_that_comes_free_wakes_one_request() {
    let office = Office::new();
    let held = [(); 2].map(|()| office.limiter.hold(&policy(2), &Key::global(), 1).unwrap());
    let mut line = line(&office, 2, 5);
    let woken = |line: &[(Waiting, Arc<Counter>)]| -> Vec<usize> {
        line.iter().map(|(_, counter)| counter.0.load(Ordering::Relaxed)).collect()
    };
    let [one, two] = held;
    drop(one);
    assert_eq!(woken(&line), [1, 0, 0, 0, 0]);
    drop(two);
    assert_eq!(woken(&line), [1, 0, 0, 0, 0], "it is awake");
    let (waiting, counter) = &mut line[0];
    let first = poll(waiting, counter).expect("it is its turn").expect("two are free");
    assert_eq!(woken(&line), [1, 1, 0, 0, 0], "one more is free");
    let (waiting, counter) = &mut line[1];
    let second = poll(waiting, counter).expect("it is its turn").expect("one is free");
    assert_eq!(woken(&line), [1, 1, 0, 0, 0], "none is free");
    drop((first, second));
    assert_eq!(woken(&line), [1, 1, 1, 0, 0]);
}

/// A task that waits too. When its waker is woken or dropped, it is dropped, and leaves its line.
struct Chained(Mutex<Option<Waiting>>);

impl Wake for Chained {
    fn wake(self: Arc<Self>) {
        drop(self.0.lock().unwrap().take());
    }
}

impl Drop for Chained {
    fn drop(&mut self) {
        drop(self.0.get_mut().unwrap().take());
    }
}

#[test]
fn waker_may_drop_another_request_of_the_line() {
    let office = Office::new();
    let held = office.limiter.hold(&policy(1), &Key::global(), 1).unwrap();
    let mut line: Vec<Waiting> = line(&office, 1, 4).into_iter().map(|(waiting, _)| waiting).collect();
    let last = line.pop();
    let chained = Waker::from(Arc::new(Chained(Mutex::new(last))));
    for waiting in &mut line {
        assert!(waiting.as_mut().poll(&mut Context::from_waker(&chained)).is_pending());
    }
    drop(held);
    assert_eq!(office.waiting(), 3, "the waker dropped one");
    drop((chained, line));
    assert_eq!((office.waiting(), office.free(1)), (0, 1));
}

#[test]
fn request_in_shadow_waits_for_nothing() {
    let mut office = Office::new();
    let layer = office.layer(exports(1).mode(Mode::Shadow));
    let [first, second] = office.send_many(&layer);
    assert_eq!(office.started(), [first, second]);
}

/// Shadow is how an operator stops harm. All that wait pass at once, not only the first, and no place is taken.
#[test]
fn requests_in_line_pass_when_their_rule_goes_to_shadow() {
    for mode in [Mode::Shadow, Mode::Degrade] {
        for of_layer in [false, true] {
            let mut office = Office::new();
            let switch = ModeSwitch::default();
            let layer = match of_layer {
                true => office.layer(exports(1)).mode(&switch),
                false => office.layer(exports(1).mode(&switch)),
            };
            let [held, second, third] = office.send_many(&layer);
            assert_eq!((office.started(), office.waiting()), (vec![held], 2));
            switch.set(mode);
            office.world.pass(0);
            assert_eq!((office.started(), office.waiting()), (vec![held, second, third], 0), "{mode:?}");
            let kind = if mode == Mode::Shadow { OutcomeKind::ShadowLimited } else { OutcomeKind::Degraded };
            assert_eq!(office.kinds()[1..], [kind, kind]);
            office.finish(held);
            assert_eq!(office.free(1), 1);
            // Back again, the next ones wait.
            switch.set(Mode::Enforce);
            let [_, waits] = office.send_many(&layer);
            assert_eq!((office.status(waits), office.waiting()), (None, 1));
        }
    }
}

#[test]
fn request_in_line_meets_the_quota_that_is_in_force() {
    let mut office = Office::new();
    let hour = QuotaSwitch::new(Quota::fixed_window(2, Duration::from_secs(3_600)).unwrap());
    let layer = office.layer(exports(1)).and(Rule::switched("hour", &hour).unwrap(), key::global());
    let [held, waits, last] = office.send_many(&layer);
    hour.set(Quota::per_hour(1)).unwrap();
    office.finish(held);
    assert_eq!((office.status(waits), office.status(last)), (Some(REFUSED), Some(REFUSED)));
    assert_eq!((office.free(1), office.waiting()), (1, 0));
}

/// Another rule that enforces still refuses them.
#[test]
fn requests_in_line_wait_while_another_rule_enforces() {
    let mut office = Office::new();
    let switch = ModeSwitch::default();
    let others = Rule::new("others", Quota::concurrent(1).max_wait(Duration::from_secs(10)).unwrap()).unwrap();
    let layer = office.layer(exports(1).mode(&switch)).and(others, key::global());
    let [held, waits] = office.send_many(&layer);
    switch.set(Mode::Shadow);
    office.world.pass(0);
    assert_eq!(office.status(waits), None);
    office.finish(held);
    assert_eq!(office.status(waits), Some(200));
}

#[test]
fn requests_in_line_pass_when_a_file_puts_their_rule_in_shadow() {
    let mut office = Office::new();
    let text =
        |mode| format!("rules: [{{name: exports, quota: '1 at once, wait 10 seconds', key: global, mode: {mode}}}]");
    let rules = Rules::from_text(text("enforce")).unwrap();
    let layer = rules.layer(office.limiter.clone()).unwrap().timer(office.world.timer.clone());
    let [_, waits, last] = office.send_many(&layer);
    assert_eq!(office.status(waits), None);
    rules.replace(text("shadow")).unwrap();
    office.world.pass(0);
    assert_eq!((office.status(waits), office.status(last)), (Some(200), Some(200)));
}

#[test]
fn request_waits_for_no_limit_without_a_wait() {
    let mut office = Office::new();
    let jobs = Rule::new("jobs", Quota::concurrent(1)).unwrap();
    let layer = office.layer(exports(2)).and(jobs, key::global());
    let [held, refused] = office.send_many(&layer);
    assert_eq!((office.status(held), office.status(refused)), (Some(200), Some(REFUSED)));
    assert!(office.log.1.lock().unwrap().is_empty(), "it was in no line");
}

#[test]
fn request_goes_to_the_overflow_after_its_wait() {
    let mut office = Office::new();
    let overflow = service_fn(|_: Request<String>| std::future::ready(Ok::<_, BoxError>(done())));
    let layer = office.layer(exports(1));
    let held = office.send(&layer);
    let service = layer.clone().overflow(overflow).layer(overflow);
    let waiting = office.world.spawn(async move { service.oneshot(Request::new(String::new())).await.unwrap() });
    office.world.pass(10 * SECOND - 1);
    assert_eq!(office.status(waiting), None);
    office.world.pass(1);
    assert_eq!(office.kinds(), [OutcomeKind::Allowed, OutcomeKind::Overflowed]);
    office.finish(held);
    assert_eq!((office.status(waiting), office.free(1)), (Some(200), 1), "the overflow holds no place");
}

#[test]
fn rules_of_a_file_let_requests_wait_in_line() {
    let mut office = Office::new();
    let text = "rules: [{name: exports, quota: '1 at once, wait 10 seconds', key: global}]";
    let rules = Rules::from_text(text).unwrap();
    let layer = rules.layer(office.limiter.clone()).unwrap().timer(office.world.timer.clone());
    assert!(layer.check().is_ok());
    let [held, waiting] = office.send_many(&layer);
    assert_eq!((office.status(waiting), layer.policies()[0].quota()), (None, &quota(1)));
    office.finish(held);
    assert_eq!(office.status(waiting), Some(200));
}

#[test]
fn request_waits_as_the_quota_that_it_brings_says() {
    let mut office = Office::new();
    let hour = Duration::from_secs(3_600);
    for is_counted in [false, true] {
        let rule = Rule::quota_from("exports", |_| Some(quota(1))).unwrap();
        let rule = if is_counted { rule.block("strikes", Quota::block(9, hour, hour).unwrap()).unwrap() } else { rule };
        let layer = RateLimitLayer::new(office.limiter.clone(), rule, key::global()).timer(office.world.timer.clone());
        let [held, waiting, refused] = office.send_many(&layer);
        office.world.pass(SECOND);
        office.finish(held);
        office.world.pass(10 * SECOND);
        assert_eq!((office.status(waiting), office.status(refused)), (Some(200), Some(REFUSED)));
        office.finish(waiting);
        assert_eq!(office.free(1), 1);
    }
}

/// A layer whose requests bring the quota that stands in `limit` when they come.
fn own_quotas(office: &Office, limit: &Arc<AtomicUsize>) -> Layered {
    let limit = Arc::clone(limit);
    let own = move |_: &Head<'_>| quota(limit.load(Ordering::Relaxed).try_into().unwrap());
    let rule = Rule::quota_from("exports", own).unwrap();
    RateLimitLayer::new(office.limiter.clone(), rule, key::global()).timer(office.world.timer.clone())
}

#[test]
fn own_larger_quota_is_first_when_the_one_before_it_leaves() {
    let (mut office, limit) = (Office::new(), Arc::new(AtomicUsize::new(1)));
    let layer = own_quotas(&office, &limit);
    let [held, small] = office.send_many(&layer);
    limit.store(2, Ordering::Relaxed);
    office.world.pass(SECOND);
    let [large, last] = office.send_many(&layer);
    office.world.pass(9 * SECOND);
    assert_eq!([small, large, last].map(|at| office.status(at)), [Some(REFUSED), Some(200), None]);
    // A smaller quota waits until less than its own is held.
    limit.store(1, Ordering::Relaxed);
    let reduced = office.send(&layer);
    office.finish(large);
    assert_eq!([last, reduced].map(|at| office.status(at)), [Some(200), None]);
    office.finish(last);
    assert_eq!((office.status(reduced), office.waiting()), (None, 1), "one is held still");
    office.finish(held);
    assert_eq!(office.status(reduced), Some(200));
}

#[test]
fn explanation_says_that_a_request_would_wait_in_line() {
    let mut office = Office::new();
    let layer = office.layer(exports(1));
    let (head, ()) = Request::new(()).into_parts();
    let explain = |layer: &Layered| {
        let mut explained = Box::pin(layer.explain(&head));
        match explained.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(explanation) => explanation,
            Poll::Pending => panic!("memory answers at once"),
        }
    };
    assert_eq!((explain(&layer).passes(), explain(&layer).wait_in_line()), (true, None));
    let held = office.send(&layer);
    let waits = explain(&layer);
    assert_eq!((waits.passes(), waits.wait_in_line()), (false, Some(Duration::from_secs(10))));
    assert!(
        waits.to_string().starts_with("waits in line for up to 10s, or is refused: limited; it is not known"),
        "{waits}"
    );
    assert!(waits.to_json().contains("\"line_wait_us\":10000000"), "{}", waits.to_json());
    assert_eq!((explain(&layer.clone().max_waiting(0)).wait_in_line(), office.waiting()), (None, 0));
    assert_eq!(explain(&layer.clone().max_in_line(0)).wait_in_line(), None);
    office.finish(held);
}

#[test]
fn place_without_http_is_waited_for() {
    let office = Office::new();
    let policy = Policy::new("exports", quota(2)).unwrap();
    let mut world = World::new();
    let hold = |cost| {
        let (limiter, policy, timer) = (office.limiter.clone(), policy.clone(), world.timer.clone());
        async move { hold_by(&limiter, &policy, &Key::global(), cost, timer).await.unwrap() }
    };
    let holds = [hold(2), hold(1), hold(2), hold(3), hold(0)];
    let [two, one, late, never, nothing] = holds.map(|hold| world.spawn(hold));
    assert!(world.done[two].as_ref().is_some_and(Result::is_ok) && world.is_pending(one));
    assert_eq!(world.done[never].as_ref().unwrap().as_ref().unwrap_err().wait(), Wait::Never);
    assert!(world.done[nothing].as_ref().is_some_and(Result::is_ok), "a cost of 0 looks");
    world.done[two] = None;
    world.pass(0);
    assert!(world.done[one].as_ref().is_some_and(Result::is_ok) && world.is_pending(late));
    world.pass(10 * SECOND);
    assert_eq!(world.done[late].as_ref().unwrap().as_ref().unwrap_err().remaining(), 1);
    world.done.clear();
    assert_eq!(office.free(2), 2);
}

#[test]
fn wait_that_no_request_can_have_is_a_misconfiguration() {
    let mut office = Office::new();
    let bare = RateLimitLayer::new(office.limiter.clone(), exports(1), key::global());
    assert_eq!(bare.check().unwrap_err().kind(), SetupWarningKind::NoTimer);
    let [held, refused] = [office.send(&bare), office.send(&bare)];
    assert_eq!((office.status(held), office.status(refused)), (Some(200), Some(REFUSED)), "it is refused at once");
    let idle = office.layer(Rule::from(policy(1)));
    assert_eq!(idle.check().unwrap_err().kind(), SetupWarningKind::NoQueue);
    let meter = Quota::meter(5, Duration::from_secs(60)).unwrap();
    let metered = office.layer(exports(1).overage("over", meter).unwrap());
    assert_eq!(metered.check().unwrap_err().kind(), SetupWarningKind::NoEffect);
    let [first, second] = office.send_many(&metered);
    assert_eq!((office.status(first), office.status(second)), (Some(200), Some(200)), "it is metered");
    let one = std::num::NonZeroU32::MIN;
    let limiter = FallbackLimiter::new(office.limiter.clone(), office.limiter.clone(), one);
    let timer = office.world.timer.clone();
    let unsupported = RateLimitLayer::new(limiter, exports(1), key::global()).timer(timer);
    let warning = unsupported.check().unwrap_err();
    assert_eq!(warning.kind(), SetupWarningKind::UnsupportedQuota);
    assert!(warning.to_string().contains("no request can wait in line"), "{warning}");
    assert!(Office::new().layer(exports(1)).check().is_ok());
}

/// A limiter that answers at the second poll.
#[derive(Clone)]
struct Later(MemoryLimiter);

type Answered<T> = Pin<Box<dyn Future<Output = Result<T, Infallible>> + Send>>;

fn later<T: Send + 'static>(answer: impl FnOnce() -> T + Send + 'static) -> Reply<T, Infallible, Answered<T>> {
    Reply::Later(Box::pin(async move {
        tokio::task::yield_now().await;
        Ok(answer())
    }))
}

impl Limiter for Later {
    type Error = Infallible;
    type Future<T: Send + 'static> = Answered<T>;

    fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, Infallible, Answered<Decision>> {
        let decision = self.0.take_now(charges);
        later(|| decision)
    }

    fn peek(&self, charges: &[Charge<'_>]) -> Reply<Decision, Infallible, Answered<Decision>> {
        let decision = self.0.peek_now(charges);
        later(|| decision)
    }

    fn refund(&self, refunds: Vec<Refund>) -> Reply<(), Infallible, Answered<()>> {
        self.0.refund_now(&refunds);
        later(|| ())
    }

    fn reset(&self, policy: &Policy, key: &Key) -> Reply<(), Infallible, Answered<()>> {
        self.0.reset_now(policy, key);
        later(|| ())
    }

    fn supports(&self, quota: &Quota) -> Result<(), UnsupportedQuota> {
        self.0.supports(quota)
    }

    fn hooks(&self) -> &dyn LimiterHooks {
        self.0.hooks()
    }
}

#[test]
fn limiter_that_answers_later_has_the_same_lines() {
    let mut office = Office::new();
    let limiter = BoxLimiter::new(Later(office.limiter.clone()));
    let layer = RateLimitLayer::new(limiter, exports(1), key::global()).timer(office.world.timer.clone());
    let sent = [(); 4].map(|()| office.send(&layer));
    assert_eq!((office.started(), office.waiting()), (vec![sent[0]], 3));
    office.world.cancel(sent[1]);
    office.finish(sent[0]);
    office.finish(sent[2]);
    office.world.pass(0);
    assert_eq!(office.started(), [sent[0], sent[2], sent[3]]);
    let gives_up = office.send(&layer);
    office.world.pass(10 * SECOND);
    assert_eq!(office.status(gives_up), Some(REFUSED));
    office.finish(sent[3]);
    assert_eq!(office.free(1), 1);
}

/// With Tokio's own timer and tasks.
#[tokio::test(start_paused = true)]
async fn ten_thousand_requests_of_a_key_keep_their_order() {
    const REQUESTS: usize = 10_000;
    let limiter = MemoryLimiter::builder().max_keys(100).build().unwrap();
    let started: Arc<Mutex<Vec<usize>>> = Arc::default();
    let rule = Rule::new("exports", Quota::concurrent(3).max_wait(Duration::from_secs(3_600)).unwrap()).unwrap();
    let layer = RateLimitLayer::new(limiter.clone(), rule, key::global())
        .timer(TokioTimer::new())
        .max_waiting(REQUESTS)
        .max_in_line(REQUESTS);
    let log = Arc::clone(&started);
    let handler = service_fn(move |request: Request<String>| {
        log.lock().unwrap().push(request.extensions().get::<Number>().unwrap().0);
        async {
            tokio::time::sleep(Duration::from_millis(10)).await;
            Ok::<_, BoxError>(done())
        }
    });
    let service = BoxCloneService::new(layer.clone().layer(handler));
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..REQUESTS {
        let request = Request::builder().extension(Number(number)).body(String::new()).unwrap();
        let service = service.clone();
        tasks.spawn(async move { service.oneshot(request).await.map(|response| response.status()) });
        tokio::task::yield_now().await;
    }
    assert_eq!(layer.waiting(), REQUESTS - 3);
    let began = tokio::time::Instant::now();
    while let Some(done) = tasks.join_next().await {
        assert_eq!(done.unwrap().unwrap(), StatusCode::OK);
    }
    assert!(began.elapsed() <= Duration::from_secs(40), "{:?} for 3,334 rounds of 10 ms", began.elapsed());
    assert_eq!(*started.lock().unwrap(), (0..REQUESTS).collect::<Vec<_>>());
    assert_eq!((layer.waiting(), limiter.peek_one(&policy(3), &Key::global(), 0).remaining()), (0, 3));
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Send { cost: u64, waits: bool },
    Finish(usize),
    Leave(usize),
    Pass(u64),
    Limit(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => (1..=2_u64, prop::bool::weighted(0.8)).prop_map(|(cost, waits)| Step::Send { cost, waits }),
        4 => (0..8_usize).prop_map(Step::Finish),
        1 => (0..8_usize).prop_map(Step::Leave),
        2 => (0..7 * SECOND).prop_map(Step::Pass),
        1 => (0..=4_u64).prop_map(Step::Limit),
    ]
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Waits { until_us: u64 },
    Runs,
    Refused,
    Gone,
}

/// The definition: requests in the order in which they came, each with its cost and what became of it.
struct Oracle {
    limit: u64,
    requests: Vec<(u64, State)>,
}

impl Oracle {
    fn held(&self) -> u64 {
        self.requests.iter().filter(|(_, state)| *state == State::Runs).map(|(cost, _)| cost).sum()
    }

    fn first(&self) -> Option<usize> {
        self.requests.iter().position(|(_, state)| matches!(state, State::Waits { .. }))
    }

    fn send(&mut self, now_us: u64, cost: u64, waits: bool) {
        let state = match cost {
            cost if cost > self.limit => State::Refused,
            cost if self.first().is_none() && self.held() + cost <= self.limit => State::Runs,
            _ if waits => State::Waits { until_us: now_us + 10 * SECOND },
            _ => State::Refused,
        };
        self.requests.push((cost, state));
    }

    /// Serves the line from its front, until nothing is free.
    fn serve(&mut self) {
        while let Some(first) = self.first() {
            let cost = self.requests[first].0;
            self.requests[first].1 = match cost {
                cost if cost > self.limit => State::Refused,
                cost if self.held() + cost <= self.limit => State::Runs,
                _ => return,
            };
            if self.requests[first].1 == State::Runs && self.held() >= self.limit {
                return;
            }
        }
    }

    /// Takes a request out of the line.
    fn leave(&mut self, at: usize, state: State) {
        let was_first = self.first() == Some(at);
        self.requests[at].1 = state;
        if was_first {
            self.serve();
        }
    }

    fn pass(&mut self, to_us: u64) {
        let next = |oracle: &Self| {
            let untils = oracle.requests.iter().enumerate().filter_map(|(at, (_, state))| match state {
                State::Waits { until_us } => Some((*until_us, at)),
                _ => None,
            });
            untils.min().filter(|(until_us, _)| *until_us <= to_us)
        };
        while let Some((_, at)) = next(self) {
            self.leave(at, State::Refused);
        }
    }
}

proptest! {
    #![proptest_config(config(400))]

    #[test]
    fn line_does_what_its_definition_says(steps in prop::collection::vec(step(), 1..60)) {
        let mut office = Office::new();
        let mut oracle = Oracle { limit: 2, requests: Vec::new() };
        let (patient, hasty) = (QuotaSwitch::new(quota(2)), QuotaSwitch::new(Quota::concurrent(2)));
        let layers: Vec<[Layered; 2]> = (1..=2).map(|cost| {
            [&hasty, &patient].map(|switch| office.layer(Rule::switched("exports", switch).unwrap().cost(move |_| cost)))
        }).collect();
        for step in steps {
            let of = |state: fn(&State) -> bool, nth: usize, oracle: &Oracle| {
                let all: Vec<usize> = (0..oracle.requests.len()).filter(|at| state(&oracle.requests[*at].1)).collect();
                (!all.is_empty()).then(|| all[nth % all.len()])
            };
            match step {
                Step::Send { cost, waits } => {
                    oracle.send(office.world.timer.now_us(), cost, waits);
                    office.send(&layers[usize::from(cost == 2)][usize::from(waits)]);
                }
                Step::Finish(nth) => if let Some(at) = of(|state| *state == State::Runs, nth, &oracle) {
                    oracle.requests[at].1 = State::Gone;
                    oracle.serve();
                    office.finish(at);
                },
                Step::Leave(nth) => if let Some(at) = of(|state| matches!(state, State::Waits { .. }), nth, &oracle) {
                    oracle.leave(at, State::Gone);
                    office.world.cancel(at);
                },
                Step::Pass(us) => {
                    oracle.pass(office.world.timer.now_us() + us);
                    office.world.pass(us);
                }
                Step::Limit(limit) => {
                    // The first in line is asked again if the limit is another one.
                    if std::mem::replace(&mut oracle.limit, limit) != limit {
                        oracle.serve();
                    }
                    hasty.set(Quota::concurrent(limit)).unwrap();
                    patient.set(quota(limit)).unwrap();
                    office.world.pass(0);
                }
            }
            let found: Vec<State> = (0..oracle.requests.len()).map(|at| match (office.status(at), oracle.requests[at].1) {
                (None, State::Waits { until_us }) if office.world.is_pending(at) => State::Waits { until_us },
                (Some(200), _) => State::Runs,
                (Some(REFUSED), _) => State::Refused,
                _ => State::Gone,
            }).collect();
            let expected: Vec<State> = oracle.requests.iter().map(|(_, state)| *state).collect();
            prop_assert_eq!(found, expected, "after {:?}", step);
            let waiting = oracle.requests.iter().filter(|(_, state)| matches!(state, State::Waits { .. })).count();
            prop_assert_eq!(office.waiting(), waiting);
        }
        drop(office.world);
        prop_assert_eq!(office.limiter.peek_one(&policy(9), &Key::global(), 0).remaining(), 9, "all came back");
        prop_assert!(office.limiter.hooks().place_lines().unwrap().is_empty());
    }
}
