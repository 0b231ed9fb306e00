//! Requests that wait for their departure keep order and spacing. A request that leaves frees its
//! place.

use std::convert::Infallible;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use http::{Request, Response, StatusCode};
use proptest::prelude::*;
use tower::limit::GlobalConcurrencyLimitLayer;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_ratelimit::clock::Sleep;
use tower_ratelimit::{
    Key, MemoryLimiter, Mode, Policy, Quota, RateLimitLayer, Rule,
    clock::Timer,
    key,
    limiter::{BoxLimiter, Charge, Decision, Limiter, Refund, Reply},
    observe::{LayerEvent, Observed, Observer, Outcome, OutcomeKind},
};

use crate::support::shop::{Body, Departures, MS, Number, Shop, queue, through};
use crate::support::{Scripted, config};

#[test]
fn requests_depart_in_order_and_one_interval_apart() {
    let mut shop = Shop::new(queue(3));
    let layer = shop.layer();
    for _ in 0..5 {
        shop.send(&layer);
    }
    assert_eq!(layer.waiting(), 3);
    assert_eq!(shop.world.done[4], Some(StatusCode::TOO_MANY_REQUESTS));
    shop.world.pass(100 * MS);
    assert_eq!(shop.departed(), [(0, 0), (1, 10 * MS), (2, 20 * MS), (3, 30 * MS)]);
    assert_eq!(layer.waiting(), 0);
}

#[test]
fn first_requests_pass_at_once_and_the_next_are_spaced() {
    let mut shop = Shop::new(queue(4).delay_after(2).unwrap());
    let layer = shop.layer();
    for _ in 0..5 {
        shop.send(&layer);
    }
    shop.world.pass(100 * MS);
    assert_eq!(shop.departed(), [(0, 0), (1, 0), (2, 0), (3, 10 * MS), (4, 20 * MS)]);
}

#[test]
fn waiting_requests_move_up_when_one_leaves() {
    let mut shop = Shop::new(queue(4));
    let layer = shop.layer();
    for _ in 0..5 {
        shop.send(&layer);
    }
    shop.world.pass(5 * MS);
    shop.world.cancel(2);
    let after = shop.send(&layer);
    assert_eq!(shop.world.done[after], None, "there is room again");
    shop.world.pass(100 * MS);
    assert_eq!(shop.departed(), [(0, 0), (1, 10 * MS), (3, 20 * MS), (4, 30 * MS), (after, 40 * MS)]);
}

#[test]
fn place_before_another_process_stays_empty() {
    let mut shop = Shop::new(queue(4));
    let [here, there] = [shop.layer(), shop.layer()];
    let [_, first, second, other] = [&here, &here, &here, &there].map(|layer| shop.send(layer));
    shop.world.cancel(first);
    shop.world.pass(100 * MS);
    assert_eq!(shop.departed(), [(0, 0), (second, 10 * MS), (other, 30 * MS)], "and not at 20 ms, as was free");
}

#[test]
fn stalled_task_keeps_no_other_request_waiting() {
    let mut shop = Shop::new(queue(4));
    let layer = shop.layer();
    let [_, stuck, second, third] = [(); 4].map(|()| shop.send(&layer));
    shop.world.stick(stuck);
    shop.world.pass(100 * MS);
    assert_eq!(shop.departed(), [(0, 0), (second, 20 * MS), (third, 30 * MS)]);
    assert_eq!(layer.waiting(), 1, "it still waits, to be run");
    shop.world.cancel(stuck);
    assert_eq!(layer.waiting(), 0);
}

#[test]
fn request_beyond_the_longest_wait_is_refused_and_not_charged() {
    let mut shop = Shop::new(queue(100).max_wait(Duration::from_millis(25)).unwrap());
    let layer = shop.layer();
    let sent = [(); 5].map(|()| shop.send(&layer));
    let refused = Some(StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(sent.map(|sent| shop.world.done[sent] == refused), [false, false, false, true, true]);
    assert_eq!(shop.remaining(), 0);
    shop.world.pass(100 * MS);
    assert_eq!(shop.departed(), [(0, 0), (1, 10 * MS), (2, 20 * MS)]);
    assert_eq!(shop.remaining(), 3);
}

#[test]
fn costly_request_does_not_take_a_place_that_is_too_short() {
    let mut shop = Shop::new(queue(9));
    let layer = RateLimitLayer::new(
        shop.limiter.clone(),
        Rule::from(shop.policy.clone()).cost(|request| *request.extensions.get().unwrap()),
        key::global(),
    )
    .timer(shop.world.timer.clone());
    let sent = [1, 1, 3, 1, 1].map(|cost| shop.send_costing(&layer, cost));
    shop.world.cancel(sent[1]);
    shop.world.pass(100 * MS);
    // A cost of 3 departs at 20 ms and occupies the queue until 50 ms. The next cost of 1 gets the
    // place at 10 ms.
    let expected = [(0, 0), (sent[3], 10 * MS), (sent[2], 20 * MS), (sent[4], 50 * MS)];
    assert_eq!(shop.departed(), expected);
}

#[test]
fn several_queues_use_the_latest_departure_and_refund_all() {
    let mut shop = Shop::new(queue(9));
    let slow = Rule::new("slow", Quota::leaky_queue(20, Duration::from_secs(1)).unwrap()).unwrap();
    let meter = Rule::new("meter", Quota::per_minute(9)).unwrap();
    let layer = shop.layer().and(slow.clone(), key::global()).and(meter.clone(), key::global());
    let sent = [(); 3].map(|()| shop.send(&layer));
    shop.world.cancel(sent[2]);
    let left = |policy| shop.limiter.peek_one(policy, &Key::global(), 0).remaining();
    assert_eq!((shop.remaining(), left(&slow.policies()[0]), left(&meter.policies()[0])), (8, 19, 7));
    shop.world.pass(200 * MS);
    assert_eq!(shop.departed(), [(0, 0), (1, 50 * MS)]);
}

#[test]
fn refusal_by_another_policy_does_not_wait_in_the_queue() {
    let mut shop = Shop::new(queue(5));
    let window = Rule::new("window", Quota::fixed_window(2, Duration::from_secs(60)).unwrap()).unwrap();
    let queue = Rule::from(shop.policy.clone());
    for window_first in [false, true] {
        let (first, second) = if window_first { (&window, &queue) } else { (&queue, &window) };
        let layer = RateLimitLayer::new(shop.limiter.clone(), first.clone(), key::global())
            .and(second.clone(), key::global())
            .timer(shop.world.timer.clone());
        let (first, second) = (shop.send(&layer), shop.send(&layer));
        let refused = shop.send(&layer);
        assert_eq!(shop.world.done[refused], Some(StatusCode::TOO_MANY_REQUESTS));
        shop.world.pass(60_000 * MS);
        assert_eq!([shop.world.done[first], shop.world.done[second]], [Some(StatusCode::OK); 2]);
    }
    assert_eq!(shop.departed().len(), 4);
}

/// A timer whose waits end although its time stands still.
#[derive(Debug)]
struct Hasty;

impl Timer for Hasty {
    fn now(&self) -> Duration {
        Duration::ZERO
    }

    fn sleep_until(&self, _: Duration) -> Sleep {
        Box::pin(std::future::ready(()))
    }
}

#[test]
fn timer_that_fires_early_causes_no_endless_polling() {
    let mut shop = Shop::new(queue(5));
    let layer = RateLimitLayer::new(shop.limiter.clone(), Rule::from(shop.policy.clone()), key::global()).timer(Hasty);
    for _ in 0..3 {
        let sent = shop.send(&layer);
        assert_eq!(shop.world.done[sent], Some(StatusCode::OK));
    }
    assert_eq!(layer.waiting(), 0);
}

#[test]
fn request_that_costs_nothing_does_not_wait() {
    let mut shop = Shop::new(queue(5));
    let rule = Rule::from(shop.policy.clone()).cost(|request| *request.extensions.get().unwrap());
    let layer = RateLimitLayer::new(shop.limiter.clone(), rule, key::global()).timer(shop.world.timer.clone());
    for cost in [1, 1, 0, 1, 0] {
        shop.send_costing(&layer, cost);
    }
    assert_eq!(shop.departed(), [(0, 0), (2, 0), (4, 0)]);
    shop.world.pass(100 * MS);
    assert_eq!(shop.departed()[3..], [(1, 10 * MS), (3, 20 * MS)]);
}

#[test]
fn queue_that_is_not_enforced_delays_no_request() {
    for mode in [Mode::Shadow, Mode::Degrade] {
        let mut shop = Shop::new(queue(3));
        let layer =
            RateLimitLayer::new(shop.limiter.clone(), Rule::from(shop.policy.clone()).mode(mode), key::global());
        let layer = layer.timer(shop.world.timer.clone());
        for _ in 0..6 {
            shop.send(&layer);
        }
        assert_eq!(shop.departed().len(), 6);
    }
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<(OutcomeKind, Duration, u64)>>>);

impl Observer for Log {
    fn on_outcome(&self, observed: &Observed<'_>) {
        let outcome = observed.outcome();
        let position = outcome.policies()[0].decision().position();
        self.0.lock().unwrap().push((outcome.kind(), outcome.delay(), position));
    }
}

#[test]
fn outcome_reports_the_wait_and_the_position_in_the_queue() {
    let mut shop = Shop::new(queue(2));
    let log = Log::default();
    let layer = shop.layer().observer(log.clone());
    for _ in 0..4 {
        shop.send(&layer);
    }
    let told = || std::mem::take(&mut *log.0.lock().unwrap());
    let refused = (OutcomeKind::Limited, Duration::ZERO, 0);
    assert_eq!(told(), [(OutcomeKind::Allowed, Duration::ZERO, 0), refused]);
    shop.world.pass(100 * MS);
    let delayed = |place: u64| (OutcomeKind::Delayed, Duration::from_millis(10 * place), place);
    assert_eq!(told(), [delayed(1), delayed(2)]);
}

#[test]
fn waiters_that_leave_are_reported() {
    let mut shop = Shop::new(queue(3));
    let log = Log::default();
    let layer = shop.layer().observer(log.clone());
    for _ in 0..3 {
        shop.send(&layer);
    }
    shop.world.cancel(1);
    shop.world.pass(100 * MS);
    let kinds: Vec<OutcomeKind> = log.0.lock().unwrap().iter().map(|(kind, _, _)| *kind).collect();
    assert_eq!(kinds, [OutcomeKind::Allowed, OutcomeKind::Abandoned, OutcomeKind::Delayed]);
}

struct PanicsAboutTheAbandoned;

impl Observer for PanicsAboutTheAbandoned {
    fn on_outcome(&self, observed: &Observed<'_>) {
        assert_ne!(observed.outcome().kind(), OutcomeKind::Abandoned);
    }
}

#[test]
fn waiter_that_leaves_frees_its_place_if_an_observer_panics() {
    let mut shop = Shop::new(queue(3));
    let layer = shop.layer().observer(PanicsAboutTheAbandoned);
    let [_, leaves, next] = [(); 3].map(|()| shop.send(&layer));
    let remaining = shop.remaining();
    shop.world.cancel(leaves);
    assert_eq!((layer.waiting(), shop.remaining()), (1, remaining + 1));
    shop.world.pass(100 * MS);
    assert_eq!(shop.departed(), [(0, 0), (next, 10 * MS)]);
}

struct AlwaysPanics;

impl Observer for AlwaysPanics {
    fn on_outcome(&self, observed: &Observed<'_>) {
        assert!(observed.outcome().kind() == OutcomeKind::Allowed, "a wait ends");
    }

    fn on_layer_event(&self, event: &LayerEvent) {
        assert!(matches!(event, LayerEvent::WaitBegan { .. }), "a wait ends");
    }
}

/// A second panic that leaves a destructor would end the process.
#[test]
fn observer_that_panics_twice_about_a_waiter_ends_no_process() {
    let mut shop = Shop::new(queue(3));
    let layer = shop.layer().observer(AlwaysPanics);
    let [_, waits] = [(); 2].map(|()| shop.send(&layer));
    let asks = layer.clone();
    let admitted = shop.world.spawn(async move {
        let (head, ()) = Request::new(()).into_parts();
        asks.admit(&head).await.map_or_else(|_| StatusCode::TOO_MANY_REQUESTS, |_| StatusCode::OK)
    });
    let remaining = shop.remaining();
    for task in [waits, admitted] {
        assert!(catch_unwind(AssertUnwindSafe(|| shop.world.pass(10 * MS))).is_err());
        shop.world.stick(task);
    }
    assert_eq!(layer.waiting(), 0);
    assert!(shop.remaining() > remaining, "they were not served");
}

#[test]
fn refusal_where_too_many_wait_says_when_to_come_back() {
    let minute = Duration::from_secs(60);
    let block = Policy::new("block", Quota::block(1, minute, minute).unwrap()).unwrap();
    let meter = Policy::new("meter", Quota::meter(5, minute).unwrap()).unwrap();
    for companion in [None, Some(&block), Some(&meter)] {
        let mut shop = Shop::new(queue(3));
        let rule = Rule::from(shop.policy.clone());
        let rule = match companion {
            Some(policy) if policy.name() == "block" => rule.block(policy.name(), *policy.quota()).unwrap(),
            Some(policy) => rule.overage(policy.name(), *policy.quota()).unwrap(),
            None => rule,
        };
        let layer = RateLimitLayer::new(shop.limiter.clone(), rule, key::global())
            .timer(shop.world.timer.clone())
            .max_waiting(0);
        let service = layer.layer(service_fn(|_: Request<Body>| {
            std::future::ready(Ok::<_, Infallible>(Response::new(Body::default())))
        }));
        for expected in [StatusCode::OK, StatusCode::TOO_MANY_REQUESTS, StatusCode::TOO_MANY_REQUESTS] {
            let service = service.clone();
            let sent = shop.world.spawn(async move {
                let response = service.oneshot(Request::new(Body::default())).await.unwrap();
                if response.status() != StatusCode::OK {
                    let outcome: &Outcome = response.extensions().get().unwrap();
                    assert_eq!(outcome.kind(), OutcomeKind::Limited);
                    assert_eq!(outcome.violated().count(), 1);
                    assert_eq!(response.headers()["retry-after"], "1");
                }
                response.status()
            });
            assert_eq!(shop.world.done[sent], Some(expected), "{companion:?}");
        }
        if let Some(companion) = companion {
            let unused = companion.quota().capacity();
            assert_eq!(shop.limiter.peek_one(companion, &Key::global(), 0).remaining(), unused, "{companion:?}");
        }
    }
}

/// Sends clients with different keys. Each one's second request would have to wait.
#[test]
fn waiting_requests_are_bounded_over_all_keys() {
    for (most, later) in [(3, false), (3, true), (0, false)] {
        let mut shop = Shop::new(queue(9));
        let log = Log::default();
        let clients = |request: &tower_ratelimit::Head<'_>| Key::of(*request.extensions.get::<u64>().unwrap());
        let rule = Rule::from(shop.policy.clone());
        let other = Rule::new("other", Quota::per_minute(100)).unwrap();
        let limiter =
            if later { BoxLimiter::new(Far(shop.limiter.clone())) } else { BoxLimiter::new(shop.limiter.clone()) };
        let layer = RateLimitLayer::new(limiter, rule, clients)
            .and(other.clone(), key::global())
            .timer(shop.world.timer.clone())
            .max_waiting(most)
            .observer(log.clone());
        let send = |shop: &mut Shop, client: u64| {
            let mut request = Request::new(Body::default());
            request.extensions_mut().insert(client);
            let service = layer.layer(service_fn(|_: Request<Body>| {
                std::future::ready(Ok::<_, Infallible>(Response::new(Body::default())))
            }));
            shop.world.spawn(async move {
                let response = service.oneshot(request).await.unwrap();
                let wait = response.headers().get("retry-after").cloned();
                assert_eq!(wait.is_some(), response.status() == StatusCode::TOO_MANY_REQUESTS);
                response.status()
            })
        };
        let first: Vec<usize> = (0..9).map(|client| send(&mut shop, client)).collect();
        let second: Vec<usize> = (0..9).map(|client| send(&mut shop, client)).collect();
        assert!(first.iter().all(|sent| shop.world.done[*sent] == Some(StatusCode::OK)), "nobody has to wait");
        let refused = second.iter().filter(|sent| shop.world.done[**sent] == Some(StatusCode::TOO_MANY_REQUESTS));
        assert_eq!((refused.count(), layer.waiting()), (9 - most, most));
        // The refused request was charged to no policy.
        let used =
            |policy: &Policy, key: &Key| policy.quota().capacity() - shop.limiter.peek_one(policy, key, 0).remaining();
        assert_eq!(used(&other.policies()[0], &Key::global()), 9 + most as u64);
        let queued: u64 = (0..9_u64).map(|client| used(&shop.policy, &Key::of(client).unwrap())).sum();
        assert_eq!(queued, 9 + most as u64);
        let limited = log.0.lock().unwrap().iter().filter(|(kind, _, _)| *kind == OutcomeKind::Limited).count();
        assert_eq!(limited, 9 - most);
        // A departure makes room for another request.
        shop.world.pass(10 * MS);
        assert_eq!(layer.waiting(), 0);
        let again: Vec<usize> = (20..22).map(|_| send(&mut shop, 20)).collect();
        assert_eq!(shop.world.done[again[1]], (most == 0).then_some(StatusCode::TOO_MANY_REQUESTS));
    }
}

#[test]
fn waiting_requests_are_bounded_by_default() {
    let mut shop = Shop::new(Quota::leaky_queue(10, Duration::from_secs(1)).unwrap().queue(2_000).unwrap());
    let layer = shop.layer();
    for _ in 0..1_200 {
        shop.send(&layer);
    }
    assert_eq!(layer.waiting(), 1_000);
    let refused = shop.world.done.iter().filter(|done| **done == Some(StatusCode::TOO_MANY_REQUESTS)).count();
    assert_eq!(refused, 199);
    assert_eq!(shop.remaining(), 2_001 - 1_001);
}

#[tokio::test(start_paused = true)]
async fn waiting_request_holds_no_permit_of_the_service() {
    let clock = TokioClock::new();
    let limiter = MemoryLimiter::builder().max_keys(1_000).clock(clock).build().unwrap();
    let layer = RateLimitLayer::new(limiter, queue(9), key::global()).timer(tower_ratelimit::clock::TokioTimer::new());
    let inner = GlobalConcurrencyLimitLayer::new(1)
        .layer(service_fn(|_: Request<Body>| std::future::ready(Ok::<_, Infallible>(Response::new(Body::default())))));
    let mut other = inner.clone();
    let mut service = layer.layer(inner);
    let mut send = async || service.ready().await.unwrap().call(Request::new(Body::default()));
    assert_eq!(send().await.await.unwrap().status(), StatusCode::OK);
    let waits = send().await;
    let mut waits = std::pin::pin!(waits);
    let mut cx = Context::from_waker(Waker::noop());
    assert!(waits.as_mut().poll(&mut cx).is_pending());
    let permit = other.ready().await.unwrap();
    assert!(matches!(permit.poll_ready(&mut cx), Poll::Ready(Ok(()))), "the only permit is there for others");
    tokio::time::advance(Duration::from_millis(11)).await;
    assert!(waits.as_mut().poll(&mut cx).is_pending(), "its time has come, but the permit is another's");
    drop(other);
    assert_eq!(waits.await.unwrap().status(), StatusCode::OK);
}

/// Does something on a thread without a runtime. There Tokio's timer cannot sleep, and shows the end of time.
fn outside<T: Send>(act: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| scope.spawn(act).join().unwrap())
}

#[tokio::test(start_paused = true)]
async fn request_outside_of_the_runtime_lets_no_other_depart() {
    let limiter = MemoryLimiter::builder().max_keys(1_000).clock(TokioClock::new()).build().unwrap();
    let layer = RateLimitLayer::new(limiter, queue(9), key::global()).timer(tower_ratelimit::clock::TokioTimer::new());
    let mut service = layer
        .layer(service_fn(|_: Request<Body>| std::future::ready(Ok::<_, Infallible>(Response::new(Body::default())))));
    let mut send = || Box::pin(service.call(Request::new(Body::default())));
    let mut waits = |request: &mut Pin<Box<_>>| {
        Future::poll(Pin::as_mut(request), &mut Context::from_waker(Waker::noop())).is_pending()
    };
    assert!(!waits(&mut send()));
    let mut waiting = [(); 4].map(|()| send());
    assert!(waiting.iter_mut().all(&mut waits));
    let [mut first, second, mut third, mut last] = waiting;
    outside(move || drop(second));
    assert!(waits(&mut first) && waits(&mut third) && waits(&mut last), "one has left there");
    assert!(!outside(|| waits(&mut send())), "it passes at once");
    assert!(waits(&mut first) && waits(&mut third) && waits(&mut last));
    assert!(outside(|| waits(&mut third)), "it is polled there");
    assert!(waits(&mut first) && waits(&mut last));
}

/// Tokio's paused time, as a limiter's clock.
#[derive(Debug)]
struct TokioClock(tokio::time::Instant);

impl TokioClock {
    fn new() -> Self {
        Self(tokio::time::Instant::now())
    }
}

impl tower_ratelimit::clock::Clock for TokioClock {
    fn now(&self) -> tower_ratelimit::clock::Timestamp {
        tower_ratelimit::clock::Timestamp::from_micros(self.0.elapsed().as_micros() as u64)
    }
}

#[tokio::test(start_paused = true)]
async fn thousand_requests_depart_spaced_while_half_of_them_leave() {
    let limiter = MemoryLimiter::builder().max_keys(1_000).clock(TokioClock::new()).build().unwrap();
    let layer =
        RateLimitLayer::new(limiter, queue(1_000), key::global()).timer(tower_ratelimit::clock::TokioTimer::new());
    let departures = Departures::default();
    let begin = tokio::time::Instant::now();
    let mut tasks = Vec::new();
    for number in 0..1_000 {
        let departures = Arc::clone(&departures);
        let service = layer.layer(service_fn(move |_: Request<Body>| {
            departures.lock().unwrap().push((number, begin.elapsed().as_micros() as u64));
            std::future::ready(Ok::<_, Infallible>(Response::new(Body::default())))
        }));
        tasks.push(tokio::spawn(service.oneshot(Request::new(Body::default()))));
        tokio::task::yield_now().await;
    }
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!(layer.waiting(), 999);
    tasks.iter().skip(1).step_by(2).for_each(|task| task.abort());
    for task in tasks.into_iter().step_by(2) {
        assert_eq!(task.await.unwrap().unwrap().status(), StatusCode::OK);
    }
    let departures = departures.lock().unwrap();
    let numbers: Vec<usize> = departures.iter().map(|(number, _)| *number).collect();
    assert_eq!(numbers, (0..1_000).step_by(2).collect::<Vec<_>>());
    for (place, (_, at_us)) in departures.iter().enumerate() {
        let due_us = place as u64 * 10 * MS;
        assert!((due_us..=due_us + MS).contains(at_us), "the {place}th at {at_us}: within a tick of the timer");
    }
}

/// A limiter in memory that answers later, like a remote one.
#[derive(Clone)]
struct Far(MemoryLimiter);

type Answer<T> = Pin<Box<dyn Future<Output = Result<T, Infallible>> + Send>>;

impl Limiter for Far {
    type Error = Infallible;
    type Future<T: Send + 'static> = Answer<T>;

    fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, Infallible, Answer<Decision>> {
        let (memory, charges) = (self.0.clone(), charges.iter().map(|c| (c.policy.clone(), c.key.clone(), c.cost)));
        let charges: Vec<_> = charges.collect();
        Reply::Later(Box::pin(async move {
            tokio::task::yield_now().await;
            let charges: Vec<_> = charges.iter().map(|(p, k, cost)| Charge::new(p, k).cost(*cost)).collect();
            memory.take(&charges).await
        }))
    }

    fn peek(&self, charges: &[Charge<'_>]) -> Reply<Decision, Infallible, Answer<Decision>> {
        let Reply::Now(answer) = self.0.peek(charges) else { unreachable!("memory answers at once") };
        Reply::Now(answer)
    }

    fn refund(&self, refunds: Vec<Refund>) -> Reply<(), Infallible, Answer<()>> {
        self.0.refund_now(&refunds);
        Reply::Now(Ok(()))
    }

    fn reset(&self, _: &Policy, _: &Key) -> Reply<(), Infallible, Answer<()>> {
        Reply::Now(Ok(()))
    }
}

#[test]
fn departure_from_an_asynchronous_limiter_is_waited_for() {
    let mut shop = Shop::new(queue(3));
    let layer = RateLimitLayer::new(Far(shop.limiter.clone()), Rule::from(shop.policy.clone()), key::global());
    let layer = layer.timer(shop.world.timer.clone());
    for number in 0..5 {
        let mut request = Request::new(Body::default());
        request.extensions_mut().insert(Number(number));
        let timer = shop.world.timer.clone();
        shop.world.spawn(through(&layer, Arc::clone(&shop.departures), timer, request));
    }
    shop.world.cancel(2);
    shop.world.pass(100 * MS);
    assert_eq!(shop.departed(), [(0, 0), (1, 10 * MS), (3, 20 * MS)]);
    assert_eq!(shop.world.done[4], Some(StatusCode::TOO_MANY_REQUESTS));
    assert_eq!(shop.remaining(), 4);
}

#[test]
fn outer_layers_keep_a_request_that_leaves_while_it_waits() {
    let mut shop = Shop::new(queue(3));
    let outer_limiter = Scripted::new();
    let outer = RateLimitLayer::new(outer_limiter.clone(), Quota::per_minute(99), key::global()).refund_nested(true);
    let inner = shop.layer();
    let service =
        service_fn(|_: Request<Body>| std::future::ready(Ok::<_, Infallible>(Response::new(Body::default()))));
    let service = outer.layer(inner.layer(service));
    let mut send = || {
        let service = service.clone();
        shop.world.spawn(async move { service.oneshot(Request::new(Body::default())).await.unwrap().status() })
    };
    let [_, _, leaves, stays] = [send(), send(), send(), send()];
    assert_eq!(outer_limiter.used(), 4);
    shop.world.cancel(leaves);
    assert_eq!(outer_limiter.used(), 4, "no limit refused it");
    shop.world.pass(100 * MS);
    assert_eq!((shop.world.done[stays], outer_limiter.used()), (Some(StatusCode::OK), 4));
}

#[test]
fn delayed_request_refused_further_in_refunds_its_place() {
    let mut shop = Shop::new(queue(3));
    let outer = shop.layer().refund_nested(true);
    let inner = RateLimitLayer::new(MemoryLimiter::new(), Quota::per_hour(2), key::global());
    let service =
        service_fn(|_: Request<Body>| std::future::ready(Ok::<_, Infallible>(Response::new(Body::default()))));
    let service = outer.layer(inner.layer(service));
    let mut send = || {
        let service = service.clone();
        shop.world.spawn(async move { service.oneshot(Request::new(Body::default())).await.unwrap().status() })
    };
    let [_, passes, refused] = [send(), send(), send()];
    shop.world.pass(20 * MS);
    let refusal = Some(StatusCode::TOO_MANY_REQUESTS);
    assert_eq!([shop.world.done[passes], shop.world.done[refused]], [Some(StatusCode::OK), refusal]);
    assert_eq!(shop.remaining(), 4, "the next may depart at once");
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Send { layer: usize },
    Leave { which: prop::sample::Index },
    Stick { which: prop::sample::Index },
    Pass { us: u64 },
}

fn steps(layers: usize, sticking: bool) -> impl Strategy<Value = Vec<Step>> {
    let stick = if sticking { 1 } else { 0 };
    let step = prop_oneof![
        6 => (0..layers).prop_map(|layer| Step::Send { layer }),
        2 => any::<prop::sample::Index>().prop_map(|which| Step::Leave { which }),
        stick => any::<prop::sample::Index>().prop_map(|which| Step::Stick { which }),
        4 => (0..35 * MS).prop_map(|us| Step::Pass { us }),
    ];
    proptest::collection::vec(step, 1..120)
}

/// A simple model of a queue: the waiting requests in order, and the departure times.
struct Paper {
    interval_us: u64,
    places: u64,
    tail_us: u64,
    waiting: Vec<usize>,
    times_us: Vec<u64>,
    departed: Vec<(usize, u64)>,
}

impl Paper {
    fn pass_to(&mut self, now_us: u64) {
        while self.times_us.first().is_some_and(|time| *time <= now_us) {
            self.departed.push((self.waiting.remove(0), self.times_us.remove(0)));
        }
    }

    fn send(&mut self, number: usize, now_us: u64) {
        let begins_us = self.tail_us.max(now_us);
        if begins_us - now_us + self.interval_us > self.places * self.interval_us {
            return;
        }
        self.tail_us = begins_us + self.interval_us;
        self.waiting.push(number);
        self.times_us.push(begins_us);
        self.pass_to(now_us);
    }

    fn leave(&mut self, number: usize) {
        if let Some(place) = self.waiting.iter().position(|waiting| *waiting == number) {
            self.waiting.remove(place);
            self.times_us.pop();
            self.tail_us -= self.interval_us;
        }
    }
}

proptest! {
    #![proptest_config(config(150))]

    #[test]
    fn requests_that_come_and_leave_depart_as_the_model_says(steps in steps(1, false)) {
        let mut shop = Shop::new(queue(5));
        let layer = shop.layer();
        let mut paper = Paper {
            interval_us: 10 * MS, places: 6, tail_us: 0, waiting: vec![], times_us: vec![], departed: vec![],
        };
        for step in steps.into_iter().chain([Step::Pass { us: 1_000 * MS }]) {
            let now_us = shop.world.timer.now_us();
            match step {
                Step::Send { .. } => {
                    let number = shop.send(&layer);
                    paper.send(number, now_us);
                }
                Step::Leave { which } | Step::Stick { which } => {
                    if !shop.world.done.is_empty() {
                        let which = which.index(shop.world.done.len());
                        shop.world.cancel(which);
                        paper.leave(which);
                    }
                }
                Step::Pass { us } => {
                    shop.world.pass(us);
                    paper.pass_to(now_us + us);
                }
            }
            prop_assert_eq!(&shop.departed(), &paper.departed);
            prop_assert_eq!(layer.waiting(), paper.waiting.len());
            let in_use_us = paper.tail_us.saturating_sub(shop.world.timer.now_us());
            prop_assert_eq!(shop.remaining(), 6 - in_use_us.div_ceil(10 * MS), "in use as on paper");
        }
        prop_assert_eq!(layer.waiting(), 0);
    }

    /// Each layer stands for a process. They share only the limiter.
    #[test]
    fn several_processes_keep_the_spacing_beside_stuck_tasks(steps in steps(3, true)) {
        let mut shop = Shop::new(queue(5));
        let layers = [shop.layer(), shop.layer(), shop.layer()];
        let (mut told, mut stuck) = (Vec::new(), Vec::new());
        for step in steps.into_iter().chain([Step::Pass { us: 1_000 * MS }]) {
            match step {
                Step::Send { layer } => {
                    let delay = shop.limiter.peek_one(&shop.policy, &Key::global(), 1).delay();
                    told.push(shop.world.timer.now_us() + delay.as_micros() as u64);
                    shop.send(&layers[layer]);
                }
                Step::Leave { which } if !told.is_empty() => shop.world.cancel(which.index(told.len())),
                Step::Stick { which } if !told.is_empty() => {
                    stuck.push(which.index(told.len()));
                    shop.world.stick(which.index(told.len()));
                }
                Step::Pass { us } => shop.world.pass(us),
                _ => {}
            }
        }
        let departed = shop.departed();
        for pair in departed.windows(2) {
            prop_assert!(pair[1].1 - pair[0].1 >= 10 * MS, "{:?}", departed);
        }
        for (number, at_us) in &departed {
            prop_assert!(*at_us <= told[*number], "{number} at {at_us}, told {}", told[*number]);
        }
        for number in 0..told.len() {
            let is_stuck = stuck.contains(&number);
            prop_assert!(is_stuck || !shop.world.is_pending(number), "{number} waits for ever");
        }
    }
}
