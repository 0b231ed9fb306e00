//! Requests that leave a leaky queue at the same moment on several threads free all of its slots.

use std::convert::Infallible;
use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::Barrier;
use std::task::{Context, Waker};
use std::time::Duration;

use http::{Request, Response, StatusCode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tower::{Layer, service_fn};
use tower_ratelimit::{
    Key, MemoryLimiter, Policy, Quota, RateLimitLayer, Rule,
    clock::{ManualClock, TokioTimer},
    key,
    middleware::QuotaSwitch,
};

#[cfg(feature = "rules")]
use tower_ratelimit::rules::Rules;

use crate::support::memory;
use crate::support::shop::{Body, queue};
use crate::support::waiting::ManualTimer;

const THREADS: usize = 8;
const ROUNDS: usize = 200;

type Sent = Pin<Box<dyn Future<Output = StatusCode> + Send>>;

struct Queue {
    clock: ManualClock,
    limiter: MemoryLimiter,
    policy: Policy,
    layer: RateLimitLayer<MemoryLimiter>,
}

impl Queue {
    fn new(quota: Quota) -> Self {
        let clock = ManualClock::new();
        let (limiter, policy) = (memory(&clock), Policy::new("queue", quota).unwrap());
        let layer = RateLimitLayer::new(limiter.clone(), Rule::from(policy.clone()), key::global());
        let layer = layer.timer(ManualTimer::default());
        Self { clock, limiter, policy, layer }
    }

    /// Sends a request. Its task runs once.
    fn send(&self) -> Sent {
        let mut sent = self.send_unpolled();
        let _ = sent.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        sent
    }

    /// Sends a request, whose future is not polled.
    fn send_unpolled(&self) -> Sent {
        let mut service =
            self.layer.layer(service_fn(|_: Request<Body>| ready(Ok::<_, Infallible>(Response::new(Body::default())))));
        let response = tower::Service::call(&mut service, Request::new(Body::default()));
        Box::pin(async move { response.await.unwrap().status() })
    }

    fn remaining(&self) -> u64 {
        self.limiter.peek_one(&self.policy, &Key::global(), 0).remaining()
    }
}

/// Runs what each thread has to do, at the same moment.
fn at_once(work: Vec<Box<dyn FnOnce() + Send + '_>>) {
    let barrier = Barrier::new(work.len());
    std::thread::scope(|scope| {
        for work in work {
            scope.spawn(|| {
                barrier.wait();
                work();
            });
        }
    });
}

/// Returns what several threads do that drop these.
fn drops<'a>(sent: Vec<Sent>) -> Vec<Box<dyn FnOnce() + Send + 'a>> {
    let mut shares: Vec<Vec<Sent>> = (0..THREADS).map(|_| Vec::new()).collect();
    sent.into_iter().enumerate().for_each(|(at, sent)| shares[at % THREADS].push(sent));
    shares.into_iter().map(|share| Box::new(move || drop(share)) as Box<dyn FnOnce() + Send + 'a>).collect()
}

#[test]
fn waiters_that_leave_on_several_threads_free_all_slots() {
    let queue = Queue::new(queue(199));
    for round in 0..ROUNDS {
        drop(queue.send()); // it departs at once
        let alone = queue.remaining();
        let sent = (0..199).map(|at| if at % 7 == 0 { queue.send_unpolled() } else { queue.send() }).collect();
        assert_eq!((queue.layer.waiting(), queue.remaining()), (199, 0));
        at_once(drops(sent));
        assert_eq!((queue.layer.waiting(), queue.remaining()), (0, alone), "in round {round}");
        queue.clock.advance(Duration::from_millis(10));
    }
}

/// A request that was admitted, and is not in its line yet, has a later slot.
#[test]
fn waiters_that_leave_while_others_come_free_all_slots() {
    let queue = Queue::new(queue(199));
    for round in 0..ROUNDS {
        drop(queue.send());
        let alone = queue.remaining();
        let mut work = drops((0..80).map(|_| queue.send()).collect());
        work.extend((0..THREADS).map(|_| {
            let queue = &queue;
            Box::new(move || (0..10).for_each(|_| drop(queue.send()))) as Box<dyn FnOnce() + Send + '_>
        }));
        at_once(work);
        assert_eq!((queue.layer.waiting(), queue.remaining()), (0, alone), "in round {round}");
        queue.clock.advance(Duration::from_millis(10));
    }
}

/// A request that finds no place to wait in has taken a slot for a moment.
#[test]
fn waiters_that_leave_beside_refused_requests_free_all_slots() {
    let mut queue = Queue::new(queue(199));
    queue.layer = queue.layer.max_waiting(50);
    for round in 0..ROUNDS {
        drop(queue.send());
        let alone = queue.remaining();
        let waiting = (0..50).map(|_| queue.send()).collect();
        let refused: Vec<Sent> = (0..9).map(|_| queue.send()).collect();
        assert_eq!((queue.layer.waiting(), queue.remaining()), (50, alone - 50), "the others took nothing");
        drop(refused);
        at_once(drops(waiting));
        assert_eq!((queue.layer.waiting(), queue.remaining()), (0, alone), "in round {round}");
        queue.clock.advance(Duration::from_millis(10));
    }
}

/// Waiters of the old and of the new quota leave together.
#[test]
fn waiters_that_leave_after_a_quota_switch_free_all_slots() {
    for round in 0..ROUNDS / 4 {
        let switch = QuotaSwitch::new(queue(199));
        let mut queue_now = Queue::new(queue(299));
        queue_now.layer =
            RateLimitLayer::new(queue_now.limiter.clone(), Rule::switched("queue", &switch).unwrap(), key::global())
                .timer(ManualTimer::default());
        drop(queue_now.send());
        let mut waiting: Vec<Sent> = (0..100).map(|_| queue_now.send()).collect();
        switch.set(queue(299)).unwrap();
        waiting.extend((0..100).map(|_| queue_now.send()));
        // The new ones are behind the old ones, so they leave first.
        let new = waiting.split_off(100);
        assert_eq!((queue_now.layer.waiting(), queue_now.remaining()), (200, 99));
        at_once(drops(new));
        assert_eq!((queue_now.layer.waiting(), queue_now.remaining()), (100, 199), "in round {round}");
        at_once(drops(waiting));
        assert_eq!((queue_now.layer.waiting(), queue_now.remaining()), (0, 299), "in round {round}");
    }
}

/// The rules of a file are replaced while requests wait, and waiters of both versions leave at once, in any order.
#[cfg(feature = "rules")]
#[test]
fn waiters_that_leave_after_a_reload_free_all_slots() {
    for round in 0..ROUNDS / 4 {
        let mut queue_now = Queue::new(queue(299));
        let interval = "10 ms";
        let text = |name: &str, length: u64| {
            format!("rules: [{{name: {name}, quota: '1 per {interval}, queue {length}, leaky queue', key: global}}]")
        };
        let rules = Rules::from_text(text("queue", 199)).unwrap();
        queue_now.layer = rules.layer(queue_now.limiter.clone()).unwrap().timer(ManualTimer::default());
        let left = |queue: &Queue| {
            let key = Key::global();
            let mut peeked = Box::pin(queue.layer.peek(&key));
            match peeked.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                std::task::Poll::Ready(left) => left.unwrap()[0].1.remaining(),
                std::task::Poll::Pending => panic!("memory answers at once"),
            }
        };
        drop(queue_now.send());
        let mut waiting: Vec<Sent> = (0..100).map(|_| queue_now.send()).collect();
        rules.replace(text(if round % 2 == 0 { "queue" } else { "other, was: queue" }, 299)).unwrap();
        waiting.extend((0..100).map(|_| queue_now.send()));
        assert_eq!((queue_now.layer.waiting(), left(&queue_now)), (200, 99));
        if round % 3 == 0 {
            waiting.reverse();
        }
        let staying = waiting.split_off(150);
        at_once(drops(waiting));
        assert_eq!(queue_now.layer.waiting(), 50);
        at_once(drops(staying));
        assert_eq!((queue_now.layer.waiting(), left(&queue_now)), (0, 299), "in round {round}");
    }
}

#[test]
fn waiters_that_leave_after_a_reset_refund_nothing() {
    let queue = Queue::new(queue(199));
    for round in 0..ROUNDS / 4 {
        let old: Vec<Sent> = (0..100).map(|_| queue.send()).collect();
        queue.limiter.reset_now(&queue.policy, &Key::global());
        let new: Vec<Sent> = (0..10).map(|_| queue.send()).collect();
        at_once(drops(old.into_iter().chain(new).collect()));
        assert_eq!(queue.layer.waiting(), 0);
        // The slots of the two queues are one line, so not all of them go back. None goes back twice.
        assert!((190..200).contains(&queue.remaining()), "{} left in round {round}", queue.remaining());
        queue.limiter.reset_now(&queue.policy, &Key::global());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 8)]
async fn clients_that_hang_up_keep_no_other_client_waiting() {
    const CLIENTS: usize = 200;
    let quota = Quota::leaky_queue(1, Duration::from_secs(60)).unwrap().queue(CLIENTS as u64).unwrap();
    let limiter = MemoryLimiter::builder().max_keys(1_000).build().unwrap();
    let policy = Rule::new("queue", quota).unwrap();
    let layer = RateLimitLayer::new(limiter.clone(), policy.clone(), key::global()).timer(TokioTimer::new());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let app = axum::Router::new().route("/", axum::routing::get(|| async { "served" })).layer(layer.clone());
    let server = tokio::spawn(async move { axum::serve(listener, app).await });
    let send = async || {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nhost: shop\r\n\r\n").await.unwrap();
        stream
    };
    let mut first = [0; 12];
    send().await.read_exact(&mut first).await.unwrap();
    assert_eq!(&first, b"HTTP/1.1 200");

    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        clients.push(send().await);
    }
    until("all clients wait", || layer.waiting() == CLIENTS).await;
    drop(clients);
    until("no client waits", || layer.waiting() == 0).await;
    // The next request waits for the only one that was served.
    let next = || limiter.peek_one(&policy.policies()[0], &Key::global(), 1).delay();
    until("all slots are free", || next() <= Duration::from_secs(60)).await;
    server.abort();
}

async fn until(what: &str, mut is: impl FnMut() -> bool) {
    let is = async {
        while !is() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), is).await.unwrap_or_else(|_| panic!("{what}"));
}
