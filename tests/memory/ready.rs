//! `Ready` lets callers wait for any limiter, in order, and loses neither a unit nor a wake.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::Future;
use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tower_ratelimit::clock::{Clock, ManualClock, Timer, Timestamp, TokioClock, TokioTimer};
use tower_ratelimit::limiter::{
    BoxLimiter, Charge, ChargeDecision, Decision, FallbackLimiter, Limiter, LimiterHooks, NotReady, NotReadyKind,
    Ready, Refund, Reply, UnsupportedQuota,
};
use tower_ratelimit::{Key, MemoryLimiter, Policy, Quota, Wait};

use crate::support::waiting::{ManualTimer, Polled, World};
use crate::support::{Scripted, Trouble, memory};

const SECOND: Duration = Duration::from_secs(1);
const MS: u64 = 1_000;

fn key(name: &str) -> Key {
    Key::of(name).unwrap()
}

fn policy(quota: Quota) -> Policy {
    Policy::new("jobs", quota).unwrap()
}

/// Ten a second, one at a time.
fn steady() -> Policy {
    policy(Quota::per_second(10).burst(1).unwrap())
}

type Took = Result<u64, NotReadyKind>;

/// Returns the instant at which the caller was admitted, in milliseconds.
fn take<L: Limiter + Clone>(
    ready: &Ready<L>,
    timer: &ManualTimer,
    policy: &Policy,
    key: &Key,
    cost: u64,
) -> impl Future<Output = Took> + use<L> {
    let (ready, timer, policy, key) = (ready.clone(), timer.clone(), policy.clone(), key.clone());
    async move {
        let taken = ready.take_one(&policy, &key, cost).await;
        taken.map(|_| timer.now_us() / MS).map_err(|error| error.kind())
    }
}

fn kind<T>(taken: Result<T, NotReady>) -> Option<NotReadyKind> {
    taken.err().map(|error| error.kind())
}

/// A limiter whose store is a round trip away. It takes in the middle of that time. A call that is dropped after that
/// refunds.
#[derive(Clone)]
struct Far {
    limiter: MemoryLimiter,
    timer: ManualTimer,
    trip: Duration,
    calls: Arc<AtomicU64>,
}

impl Far {
    fn new(limiter: &MemoryLimiter, timer: &ManualTimer, trip: Duration) -> Self {
        Self { limiter: limiter.clone(), timer: timer.clone(), trip, calls: Arc::default() }
    }
}

/// Refunds what a call took, unless the caller gets the answer.
struct Undelivered(MemoryLimiter, Vec<(Policy, Key)>, Option<Decision>);

impl Drop for Undelivered {
    fn drop(&mut self) {
        let Some(mut decision) = self.2.take() else { return };
        for ((policy, key), receipt) in self.1.drain(..).zip(decision.take_receipts()) {
            receipt.into_iter().for_each(|receipt| self.0.refund_one(&policy, &key, receipt));
        }
    }
}

impl Limiter for Far {
    type Error = Infallible;
    type Future<T: Send + 'static> = Pin<Box<dyn Future<Output = Result<T, Infallible>> + Send>>;

    fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, Infallible, Self::Future<Decision>> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let (far, charges) = (
            self.clone(),
            charges.iter().map(|charge| (charge.policy.clone(), charge.key.clone(), charge.cost)).collect::<Vec<_>>(),
        );
        Reply::Later(Box::pin(async move {
            far.timer.sleep_until(far.timer.now() + far.trip / 2).await;
            let decision = {
                let charges: Vec<Charge<'_>> =
                    charges.iter().map(|(policy, key, cost)| Charge::new(policy, key).cost(*cost)).collect();
                far.limiter.take_now(&charges)
            };
            let charged = charges.into_iter().map(|(policy, key, _)| (policy, key)).collect();
            let mut undelivered = Undelivered(far.limiter.clone(), charged, Some(decision));
            far.timer.sleep_until(far.timer.now() + far.trip / 2).await;
            Ok(undelivered.2.take().expect("it was decided"))
        }))
    }

    fn peek(&self, charges: &[Charge<'_>]) -> Reply<Decision, Infallible, Self::Future<Decision>> {
        Reply::Now(Ok(self.limiter.peek_now(charges)))
    }

    fn refund(&self, refunds: Vec<Refund>) -> Reply<(), Infallible, Self::Future<()>> {
        self.limiter.refund_now(&refunds);
        Reply::Now(Ok(()))
    }

    fn reset(&self, policy: &Policy, key: &Key) -> Reply<(), Infallible, Self::Future<()>> {
        self.limiter.reset_now(policy, key);
        Reply::Now(Ok(()))
    }
}

/// A quota of each algorithm that gives ten units a second back.
fn every_rate() -> [Quota; 5] {
    [
        Quota::per_second(10),
        Quota::per_second(10).burst(1).unwrap(),
        Quota::fixed_window(10, SECOND).unwrap(),
        Quota::sliding_window(10, SECOND).unwrap(),
        Quota::leaky_queue(10, SECOND).unwrap().queue(100).unwrap(),
    ]
}

#[test]
fn callers_of_a_key_are_admitted_in_their_order() {
    for quota in every_rate() {
        for trip_ms in [0, 3] {
            let (mut world, policy, alice) = (World::new(), policy(quota), key("alice"));
            let far = Far::new(&memory(&world.clock), &world.timer, Duration::from_millis(trip_ms));
            let ready = Ready::new(far.clone()).timer(world.timer.clone());
            let timer = world.timer.clone();
            let callers: Vec<usize> = (0..60).map(|_| world.spawn(take(&ready, &timer, &policy, &alice, 1))).collect();
            world.pass(20_000 * MS);
            let admitted: Vec<u64> = callers.iter().map(|caller| world.done[*caller].unwrap().unwrap()).collect();
            assert!(admitted.is_sorted(), "{quota:?}: {admitted:?}");
            let last = *admitted.last().unwrap();
            assert!((4_900..=6_100).contains(&last), "{quota:?}, {trip_ms} ms away: the last after {last} ms");
            assert_eq!(ready.waiting(), 0);
        }
    }
}

#[test]
fn admission_takes_one_call_of_the_limiter() {
    for quota in every_rate() {
        let (mut world, policy, alice) = (World::new(), policy(quota), key("alice"));
        let far = Far::new(&memory(&world.clock), &world.timer, Duration::from_millis(2));
        let ready = Ready::new(far.clone()).timer(world.timer.clone());
        let timer = world.timer.clone();
        // The first ones find the quota unused, or are denied and begin the line.
        for _ in 0..11 {
            world.spawn(take(&ready, &timer, &policy, &alice, 1));
        }
        world.pass(10 * MS);
        let before = far.calls.load(Ordering::Relaxed);
        let callers: Vec<usize> = (0..40).map(|_| world.spawn(take(&ready, &timer, &policy, &alice, 1))).collect();
        world.pass(20_000 * MS);
        assert!(callers.iter().all(|caller| world.done[*caller].is_some()));
        let calls = far.calls.load(Ordering::Relaxed);
        let calls = calls - before;
        // The callers of the line are among them. A sliding window names when its first unit comes, and may get several.
        assert!((40..=55).contains(&calls), "{quota:?}: {calls} calls for 40 admissions");
    }
}

/// Each asks only when the one before it has the answer, if it does not know whether there is enough for both.
#[test]
fn callers_far_from_the_store_get_the_whole_rate() {
    let (mut world, alice) = (World::new(), key("alice"));
    let policy = policy(Quota::per_second(1_000).burst(100).unwrap());
    let far = Far::new(&memory(&world.clock), &world.timer, Duration::from_millis(20));
    let ready = Ready::new(far).timer(world.timer.clone());
    let timer = world.timer.clone();
    let callers: Vec<usize> = (0..1_000).map(|_| world.spawn(take(&ready, &timer, &policy, &alice, 1))).collect();
    world.pass(5_000 * MS);
    let admitted: Vec<u64> = callers.iter().map(|caller| world.done[*caller].unwrap().unwrap()).collect();
    let last = *admitted.iter().max().unwrap();
    assert!(last <= 1_500, "900 more than the burst, one each millisecond: {last} ms");
}

/// The wait that an answer names began when the limiter decided, and the next call takes time to arrive.
#[test]
fn round_trip_to_the_store_is_no_part_of_a_wait() {
    for trip_ms in [20, 90] {
        let (mut world, policy, alice) = (World::new(), steady(), key("alice"));
        let far = Far::new(&memory(&world.clock), &world.timer, Duration::from_millis(trip_ms));
        let ready = Ready::new(far.clone()).timer(world.timer.clone());
        let timer = world.timer.clone();
        let callers: Vec<usize> = (0..20).map(|_| world.spawn(take(&ready, &timer, &policy, &alice, 1))).collect();
        world.pass(10_000 * MS);
        let admitted: Vec<u64> = callers.iter().map(|caller| world.done[*caller].unwrap().unwrap()).collect();
        assert!(admitted.is_sorted(), "{admitted:?}");
        let last = *admitted.last().unwrap();
        // Each of the 20 asks once before there is a line.
        assert!(last <= 1_900 + 3 * trip_ms, "{trip_ms} ms away: {last} ms for 19 waits of 100 ms");
        let calls = far.calls.load(Ordering::Relaxed);
        assert!(calls <= 20 + 19 + 2, "{trip_ms} ms away: {calls} calls");
    }
}

#[test]
fn callers_that_come_at_once_do_not_all_ask_at_once() {
    let (mut world, alice) = (World::new(), key("alice"));
    let policy = policy(Quota::per_second(200).burst(20).unwrap());
    let far = Far::new(&memory(&world.clock), &world.timer, Duration::from_millis(30));
    let ready = Ready::new(far.clone()).timer(world.timer.clone());
    let timer = world.timer.clone();
    let callers: Vec<usize> = (0..1_000).map(|_| world.spawn(take(&ready, &timer, &policy, &alice, 1))).collect();
    assert_eq!(far.calls.load(Ordering::Relaxed), 20, "the capacity");
    assert_eq!(ready.waiting(), 980);
    world.pass(10_000 * MS);
    let admitted: Vec<u64> = callers.iter().map(|caller| world.done[*caller].unwrap().unwrap()).collect();
    assert!(admitted.is_sorted(), "{admitted:?}");
    assert!(*admitted.last().unwrap() <= 5_400, "{admitted:?}");
    let calls = far.calls.load(Ordering::Relaxed);
    assert!(calls <= 1_100, "{calls} calls for 1,000 admissions");
}

/// A line is for callers that wait, and nobody waits as long as there are units for all.
/// One that costs less does not lose patience while the first one waits for an answer under way.
#[test]
fn cheap_caller_does_not_ask_before_a_dear_one() {
    let (mut world, alice) = (World::new(), key("alice"));
    let policy = policy(Quota::per_second(4));
    let ready = Ready::new(Far::new(&memory(&world.clock), &world.timer, Duration::from_millis(200)));
    let (ready, timer) = (ready.timer(world.timer.clone()), world.timer.clone());
    let callers = [2, 3, 1, 1].map(|cost| world.spawn(take(&ready, &timer, &policy, &alice, cost)));
    world.pass(5_000 * MS);
    let admitted = callers.map(|caller| world.done[caller].unwrap().unwrap());
    assert!(admitted.is_sorted() && admitted[1] < admitted[2], "{admitted:?}");
}

#[test]
fn callers_that_ask_side_by_side_are_not_counted_as_waiting() {
    let (mut world, alice) = (World::new(), key("alice"));
    let policy = policy(Quota::per_second(1_000));
    let far = Far::new(&memory(&world.clock), &world.timer, Duration::from_millis(100));
    let ready = Ready::new(far.clone()).timer(world.timer.clone()).max_waiting(0);
    let timer = world.timer.clone();
    let callers: Vec<usize> = (0..500).map(|_| world.spawn(take(&ready, &timer, &policy, &alice, 1))).collect();
    world.pass(100 * MS);
    assert!(callers.iter().all(|caller| world.done[*caller] == Some(Ok(100))));
}

#[test]
fn caller_that_is_not_polled_delays_the_others_once() {
    let (mut world, policy, alice) = (World::new(), steady(), key("alice"));
    let ready = Ready::new(memory(&world.clock)).timer(world.timer.clone());
    let timer = world.timer.clone();
    let callers: Vec<usize> = (0..6).map(|_| world.spawn(take(&ready, &timer, &policy, &alice, 1))).collect();
    world.stick(callers[1]);
    world.stick(callers[2]);
    world.pass(1_000 * MS);
    let admitted = |world: &World<Took>, caller: usize| world.done[callers[caller]].map(Result::unwrap);
    assert_eq!(admitted(&world, 0), Some(0));
    assert_eq!([3, 4, 5].map(|caller| admitted(&world, caller)), [Some(200), Some(300), Some(400)]);
    world.cancel(callers[1]);
    world.cancel(callers[2]);
    assert_eq!(ready.waiting(), 0);
}

#[test]
fn callers_are_admitted_in_order_although_the_clock_steps() {
    for step_us in [-7_200_000_000, -1_000_000, 1_000_000, 7_200_000_000] {
        let (mut world, policy, alice) = (World::new(), steady(), key("alice"));
        world.pass(10_000_000 * MS);
        let ready = Ready::new(memory(&world.clock)).timer(world.timer.clone());
        let timer = world.timer.clone();
        let callers: Vec<usize> = (0..30).map(|_| world.spawn(take(&ready, &timer, &policy, &alice, 1))).collect();
        world.pass(1_050 * MS);
        let now_us = world.clock.now().as_micros();
        world.clock.set(Timestamp::from_micros(now_us.saturating_add_signed(step_us)));
        world.pass(30_000 * MS);
        let admitted: Vec<u64> = callers.iter().map(|caller| world.done[*caller].unwrap().unwrap()).collect();
        assert!(admitted.is_sorted(), "{step_us}: {admitted:?}");
        let last = *admitted.last().unwrap() - admitted[0];
        assert!((1_900..=14_000).contains(&last), "{step_us}: the last after {last} ms");
    }
}

/// A process may have several runtimes, and one of them ends with the tasks that wait.
#[test]
fn runtime_that_ends_leaves_the_line_to_another() {
    let runtime = |start_paused| {
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(start_paused).build().unwrap()
    };
    let policy = policy(Quota::per_second(100).burst(1).unwrap());
    let limiter = MemoryLimiter::builder().max_keys(100).clock(TokioClock::new()).build().unwrap();
    let ready = Ready::new(limiter).timer(TokioTimer::new());
    // Its time stands still, so that only the first task is admitted, however long the others take to start.
    let ends = runtime(true);
    ends.block_on(async {
        for _ in 0..20 {
            let (ready, policy) = (ready.clone(), policy.clone());
            tokio::spawn(async move { ready.take_one(&policy, &Key::global(), 1).await });
        }
        tokio::task::yield_now().await;
    });
    assert_eq!(ready.waiting(), 19);
    let (other, others) = (runtime(false), ready.clone());
    let waiting = std::thread::spawn(move || {
        other.block_on(async {
            for _ in 0..3 {
                others.take_one(&policy, &Key::global(), 1).await.unwrap();
            }
        });
    });
    drop(ends);
    waiting.join().unwrap();
    assert_eq!(ready.waiting(), 0);
}

#[test]
fn many_callers_that_are_not_polled_stop_no_line() {
    let (mut world, policy, alice) = (World::new(), steady(), key("alice"));
    let ready = Ready::new(memory(&world.clock)).timer(world.timer.clone());
    let timer = world.timer.clone();
    let callers: Vec<usize> = (0..30).map(|_| world.spawn(take(&ready, &timer, &policy, &alice, 1))).collect();
    (1..20).for_each(|caller| world.stick(callers[caller]));
    world.pass(40_000 * MS);
    let admitted: Vec<u64> = (20..30).map(|caller| world.done[callers[caller]].unwrap().unwrap()).collect();
    assert!(admitted.is_sorted(), "{admitted:?}");
    assert!(admitted[9] - admitted[0] <= 1_000, "{admitted:?}");
}

#[test]
fn every_wait_ends() {
    let (mut world, alice) = (World::new(), key("alice"));
    let ready = Ready::new(memory(&world.clock)).timer(world.timer.clone()).max_wait(SECOND);
    let (timer, policy) = (world.timer.clone(), policy(Quota::per_second(2).burst(1).unwrap()));
    let callers: Vec<usize> = (0..5).map(|_| world.spawn(take(&ready, &timer, &policy, &alice, 1))).collect();
    let dear = world.spawn(take(&ready, &timer, &policy, &alice, 2));
    world.pass(3_000 * MS);
    let ended: Vec<Took> = callers.iter().map(|caller| world.done[*caller].unwrap()).collect();
    let too_long = Err(NotReadyKind::TooLong);
    assert_eq!(ended, [Ok(0), Ok(500), Ok(1_000), too_long, too_long]);
    assert_eq!(world.done[dear], Some(too_long), "it stands behind the others");
    let alone = world.spawn(take(&ready, &timer, &policy, &key("bob"), 2));
    assert_eq!(world.done[alone], Some(Err(NotReadyKind::Never)), "it costs more than the capacity");
    let hourly = Policy::new("hourly", Quota::per_hour(1)).unwrap();
    world.spawn(take(&ready, &timer, &hourly, &alice, 1));
    let told = world.spawn(take(&ready, &timer, &hourly, &alice, 1));
    assert_eq!(world.done[told], Some(too_long), "it is told at once");
}

#[test]
fn number_of_callers_that_wait_is_bounded() {
    let (mut world, policy, alice) = (World::new(), steady(), key("alice"));
    let ready = Ready::new(memory(&world.clock)).timer(world.timer.clone()).max_waiting(3);
    let timer = world.timer.clone();
    let queue = Policy::new("queue", Quota::leaky_queue(10, SECOND).unwrap().queue(100).unwrap()).unwrap();
    for policy in [&policy, &queue] {
        let callers: Vec<usize> = (0..5).map(|_| world.spawn(take(&ready, &timer, policy, &alice, 1))).collect();
        assert_eq!(ready.waiting(), 3);
        assert_eq!(world.done[callers[4]], Some(Err(NotReadyKind::TooManyWaiting)));
        world.pass(1_000 * MS);
        let last = world.done[callers[3]].unwrap().unwrap();
        assert_eq!(last % 1_000, 300, "the caller that was turned away left no gap");
    }
}

#[test]
fn limiter_that_fails_ends_the_waits_of_all() {
    for limiter in [Scripted::new(), Scripted::new().later()] {
        let (mut world, alice) = (World::new(), key("alice"));
        let ready = Ready::new(limiter.clone()).timer(world.timer.clone()).max_wait(SECOND * 3_600);
        let (timer, policy) = (world.timer.clone(), policy(Quota::per_second(1)));
        let callers: Vec<usize> = (0..20).map(|_| world.spawn(take(&ready, &timer, &policy, &alice, 1))).collect();
        limiter.fail(true);
        world.pass(100_000 * MS);
        let failed = callers.iter().filter(|caller| world.done[**caller] == Some(Err(NotReadyKind::Limiter))).count();
        assert_eq!(failed, 19, "all but the first, which was admitted");
        let late = world.spawn(take(&ready, &timer, &policy, &alice, 1));
        world.pass(MS);
        assert_eq!(world.done[late], Some(Err(NotReadyKind::Limiter)));
        assert_eq!(ready.waiting(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn error_says_what_was_wrong() {
    let limiter = Scripted::new();
    let ready = Ready::new(limiter.clone()).max_wait(SECOND);
    let policy = policy(Quota::per_second(1));
    limiter.fail(true);
    let error = ready.take_one(&policy, &Key::global(), 1).await.unwrap_err();
    assert_eq!(
        format!("{error:?}"),
        "NotReady(Limiter): the limiter failed to decide about \"jobs\": the store is away: the cable is cut"
    );
    let ready = Ready::new(MemoryLimiter::new());
    let error = ready.take_one(&policy, &Key::global(), 2).await.unwrap_err();
    assert_eq!(error.to_string(), "\"jobs\" never admits the caller: the cost is 2, and the capacity is 1");
    assert_eq!(error.wait(), Wait::Never);
}

#[test]
fn caller_outside_of_a_runtime_is_told_that_it_cannot_wait() {
    let ready = Ready::new(memory(&ManualClock::new())); // no unit comes back while the test runs
    let policies = [steady(), Policy::new("queue", Quota::leaky_queue(10, SECOND).unwrap().queue(9).unwrap()).unwrap()];
    let global = Key::global();
    for policy in policies {
        let mut last = None;
        for _ in 0..3 {
            let mut taken = std::pin::pin!(ready.take_one(&policy, &global, 1));
            let cx = &mut std::task::Context::from_waker(std::task::Waker::noop());
            let std::task::Poll::Ready(taken) = taken.as_mut().poll(cx) else { panic!("it cannot wait") };
            last = Some(kind(taken));
        }
        assert_eq!(last, Some(Some(NotReadyKind::NoTimer)));
    }
}

/// Drops or polls a caller that is first in line by a thread of no runtime, where no timer knows the time. The callers
/// behind it are admitted when they would be without that.
#[tokio::test(start_paused = true)]
async fn caller_that_leaves_outside_of_a_runtime_moves_nobody() {
    type Caller = Pin<Box<dyn Future<Output = Result<ChargeDecision, NotReady>> + Send>>;
    let ends: [fn(Caller); 2] = [drop, |mut caller| {
        let cx = &mut std::task::Context::from_waker(std::task::Waker::noop());
        assert!(caller.as_mut().poll(cx).is_ready(), "nothing can wait");
    }];
    let queue = policy(Quota::leaky_queue(10, SECOND).unwrap().queue(100).unwrap());
    for (policy, end) in [(steady(), ends[0]), (steady(), ends[1]), (queue, ends[0])] {
        let limiter = MemoryLimiter::builder().max_keys(1_000).clock(TokioClock::new()).build().unwrap();
        let ready = Ready::new(limiter).timer(TokioTimer::new());
        ready.take_one(&policy, &Key::global(), 1).await.unwrap();
        let caller = || -> Caller {
            let (ready, policy) = (ready.clone(), policy.clone());
            Box::pin(async move { ready.take_one(&policy, &Key::global(), 1).await })
        };
        let mut callers = [(); 5].map(|()| caller());
        for caller in &mut callers {
            let polled = std::future::poll_fn(|cx| std::task::Poll::Ready(caller.as_mut().poll(cx).is_pending()));
            assert!(polled.await, "one passes at once");
        }
        let began = tokio::time::Instant::now();
        let [first, others @ ..] = callers;
        std::thread::spawn(move || end(first)).join().unwrap();
        for (number, caller) in (1..).zip(others) {
            caller.await.unwrap();
            let after = began.elapsed().as_millis();
            assert!(after.abs_diff(number * 100) <= 5, "{policy:?}: the caller {number} after {after} ms");
        }
        assert_eq!(ready.waiting(), 0);
    }
}

#[test]
fn queue_that_is_full_lets_callers_wait_for_room() {
    let (mut world, alice) = (World::new(), key("alice"));
    let ready = Ready::new(memory(&world.clock)).timer(world.timer.clone());
    let (timer, queue) = (world.timer.clone(), policy(Quota::leaky_queue(10, SECOND).unwrap().queue(2).unwrap()));
    let callers: Vec<usize> = (0..8).map(|_| world.spawn(take(&ready, &timer, &queue, &alice, 1))).collect();
    world.pass(2_000 * MS);
    let admitted: Vec<u64> = callers.iter().map(|caller| world.done[*caller].unwrap().unwrap()).collect();
    assert_eq!(admitted, [0, 100, 200, 300, 400, 500, 600, 700]);
}

#[test]
fn caller_that_leaves_returns_what_it_held() {
    for quota in every_rate() {
        let (mut world, alice, policy) = (World::new(), key("alice"), policy(quota));
        let limiter = memory(&world.clock);
        let far = Far::new(&limiter, &world.timer, Duration::from_millis(10));
        let ready = Ready::new(far).timer(world.timer.clone());
        let timer = world.timer.clone();
        let before: Vec<usize> = (0..12).map(|_| world.spawn(take(&ready, &timer, &policy, &alice, 1))).collect();
        let leaving: Vec<usize> = (0..30).map(|_| world.spawn(take(&ready, &timer, &policy, &alice, 1))).collect();
        let last = world.spawn(take(&ready, &timer, &policy, &alice, 1));
        for caller in leaving {
            world.pass(7 * MS);
            world.cancel(caller);
        }
        world.pass(10_000 * MS);
        assert!(before.iter().all(|caller| world.done[*caller].is_some_and(|taken| taken.is_ok())));
        let last = world.done[last].unwrap().unwrap();
        assert!(last <= 2_300, "{quota:?}: it stands where those that left stood: {last}");
        assert_eq!((ready.waiting(), limiter.peek_one(&policy, &alice, 0).remaining()), (0, policy.quota().capacity()));
    }
}

#[test]
fn set_of_charges_is_admitted_when_all_are() {
    let (mut world, alice) = (World::new(), key("alice"));
    let limiter = memory(&world.clock);
    let ready = Ready::new(limiter.clone()).timer(world.timer.clone());
    let (fast, slow) = (steady(), Policy::new("slow", Quota::per_second(2).burst(1).unwrap()).unwrap());
    for _ in 0..3 {
        let (ready, alice, fast, slow) = (ready.clone(), alice.clone(), fast.clone(), slow.clone());
        let timer = world.timer.clone();
        world.spawn(async move {
            let global = Key::global();
            let charges = [Charge::new(&fast, &alice), Charge::new(&slow, &global)];
            ready.take(&charges).await.map(|_| timer.now_us() / MS).map_err(|error| error.kind())
        });
    }
    world.pass(2_000 * MS);
    assert_eq!(world.done, [Some(Ok(0)), Some(Ok(500)), Some(Ok(1_000))]);
}

#[test]
fn refund_lets_the_first_in_line_ask_at_once() {
    let (mut world, alice) = (World::new(), key("alice"));
    let ready = Ready::new(memory(&world.clock)).timer(world.timer.clone()).max_wait(SECOND * 7_200);
    let (timer, policy) = (world.timer.clone(), policy(Quota::fixed_window(1, SECOND * 3_600).unwrap()));
    let receipt = ready.limiter().take_one(&policy, &alice, 1).take_receipt().unwrap();
    let caller = world.spawn(take(&ready, &timer, &policy, &alice, 1));
    world.pass(5_000 * MS);
    assert!(world.is_pending(caller));
    ready.refund(&policy, &alice, receipt);
    world.pass(0);
    assert_eq!(world.done[caller], Some(Ok(5_000)));
}

/// Holds a place for a time, and returns when it got it.
fn hold<L: Limiter + Clone>(
    ready: &Ready<L>,
    timer: &ManualTimer,
    policy: &Policy,
    hold_ms: u64,
) -> impl Future<Output = Took> + use<L> {
    let (ready, timer, policy) = (ready.clone(), timer.clone(), policy.clone());
    async move {
        let place = ready.hold(&policy, &Key::global(), 1).await.map_err(|error| error.kind())?;
        let began = timer.now();
        timer.sleep_until(began + Duration::from_millis(hold_ms)).await;
        drop(place);
        Ok(began.as_millis() as u64)
    }
}

#[test]
fn places_of_any_limiter_are_held_after_a_wait() {
    let concurrent = Policy::new("places", Quota::concurrent(1)).unwrap();
    let mut world = World::new();
    let ready = Ready::new(memory(&world.clock)).timer(world.timer.clone());
    let boxed = Ready::new(BoxLimiter::new(memory(&world.clock))).timer(world.timer.clone());
    let one = NonZeroU32::new(1).unwrap();
    let fallback = FallbackLimiter::new(memory(&world.clock), memory(&world.clock), one);
    let fallback = Ready::new(fallback).timer(world.timer.clone());
    let timer = world.timer.clone();
    for _ in 0..3 {
        world.spawn(hold(&ready, &timer, &concurrent, 100));
        world.spawn(hold(&boxed, &timer, &concurrent, 100));
        world.spawn(hold(&fallback, &timer, &concurrent, 100));
    }
    world.pass(5_000 * MS);
    for (number, held) in world.done.iter().enumerate() {
        let (caller, held) = (number as u64 / 3, held.unwrap().unwrap());
        match number % 3 {
            2 => assert!((caller * 100..=caller * 500).contains(&held), "it asks again after a while: {held}"),
            _ => assert_eq!(held, caller * 100, "it is woken"),
        }
    }
    // For as long as the quota says.
    let brief = Policy::new("brief", Quota::concurrent(1).max_wait(Duration::from_millis(50)).unwrap()).unwrap();
    let [_, late] = [(); 2].map(|()| world.spawn(hold(&ready, &timer, &brief, 100)));
    world.pass(200 * MS);
    assert_eq!(world.done[late], Some(Err(NotReadyKind::TooLong)));
}

/// A limiter in memory that fails as long as it is told to.
#[derive(Clone)]
struct Failing {
    limiter: MemoryLimiter,
    fails: Arc<AtomicBool>,
}

impl Limiter for Failing {
    type Error = Trouble;
    type Future<T: Send + 'static> = std::future::Ready<Result<T, Trouble>>;

    fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, Trouble, Self::Future<Decision>> {
        Reply::Now(if self.fails.load(Ordering::Relaxed) { Err(Trouble) } else { Ok(self.limiter.take_now(charges)) })
    }

    fn peek(&self, charges: &[Charge<'_>]) -> Reply<Decision, Trouble, Self::Future<Decision>> {
        Reply::Now(Ok(self.limiter.peek_now(charges)))
    }

    fn refund(&self, refunds: Vec<Refund>) -> Reply<(), Trouble, Self::Future<()>> {
        self.limiter.refund_now(&refunds);
        Reply::Now(Ok(()))
    }

    fn reset(&self, policy: &Policy, key: &Key) -> Reply<(), Trouble, Self::Future<()>> {
        self.limiter.reset_now(policy, key);
        Reply::Now(Ok(()))
    }

    fn supports(&self, quota: &Quota) -> Result<(), UnsupportedQuota> {
        self.limiter.supports(quota)
    }

    fn hooks(&self) -> &dyn LimiterHooks {
        self.limiter.hooks()
    }
}

/// Nothing would wake the caller again: the limiter returned the units, and its line is not polled.
#[test]
fn failure_ends_a_wait_for_units_that_nobody_polls_for() {
    let (mut world, concurrent) = (World::new(), Policy::new("places", Quota::concurrent(1)).unwrap());
    let limiter = Failing { limiter: memory(&world.clock), fails: Arc::default() };
    let ready = Ready::new(limiter.clone()).timer(world.timer.clone());
    let timer = world.timer.clone();
    let holder = world.spawn(hold(&ready, &timer, &concurrent, 100));
    world.pass(MS);
    let late = world.spawn(hold(&ready, &timer, &concurrent, 100));
    world.pass(50 * MS);
    limiter.fails.store(true, Ordering::Relaxed);
    world.pass(100 * MS);
    assert!(world.done[holder].is_some_and(|held| held.is_ok()));
    assert_eq!(world.done[late], Some(Err(NotReadyKind::Limiter)));
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_callers_of_a_key_are_served_in_order() {
    let limiter = MemoryLimiter::builder().max_keys(1_000).clock(TokioClock::new()).build().unwrap();
    let ready = Ready::new(limiter).timer(TokioTimer::new()).max_waiting(10_000);
    let policy = policy(Quota::per_second(1_000));
    let order = Arc::new(Mutex::new(Vec::new()));
    let began = tokio::time::Instant::now();
    let callers: Vec<_> = (0..10_000)
        .map(|number| {
            let (ready, policy, order) = (ready.clone(), policy.clone(), Arc::clone(&order));
            tokio::spawn(async move {
                ready.take_one(&policy, &Key::global(), 1).await.unwrap();
                order.lock().unwrap().push(number);
            })
        })
        .collect();
    for caller in callers {
        caller.await.unwrap();
    }
    assert!(order.lock().unwrap().is_sorted());
    assert!((8_990..=9_100).contains(&began.elapsed().as_millis()), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn workers_of_a_tenant_share_its_rate_evenly() {
    let limiter = MemoryLimiter::builder().max_keys(1_000).clock(TokioClock::new()).build().unwrap();
    let ready = Ready::new(limiter).timer(TokioTimer::new());
    let policy = steady();
    let until = tokio::time::Instant::now() + Duration::from_millis(2_250);
    let workers: Vec<_> = (0..3)
        .map(|_| {
            let (ready, policy) = (ready.clone(), policy.clone());
            tokio::spawn(async move {
                let mut jobs = 0;
                while tokio::time::timeout_at(until, ready.take_one(&policy, &Key::global(), 1)).await.is_ok() {
                    jobs += 1;
                    tokio::time::sleep(Duration::from_millis(1)).await; // the job
                }
                jobs
            })
        })
        .collect();
    let mut jobs = Vec::new();
    for worker in workers {
        jobs.push(worker.await.unwrap());
    }
    jobs.sort_unstable();
    assert_eq!(jobs, [7, 8, 8]);
}

/// A caller's story in a random one: when it came, its key, and what came of it.
#[test]
fn random_callers_lose_no_unit_and_no_wake() {
    let mut random = 1_u64;
    let mut draw = |below: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % below
    };
    for round in 0..150 {
        let quota = every_rate()[draw(5) as usize];
        let (mut world, policy) = (World::new(), policy(quota));
        let limiter = memory(&world.clock);
        let far = Far::new(&limiter, &world.timer, Duration::from_millis(draw(3) * 4));
        let ready = Ready::new(far).timer(world.timer.clone()).max_wait(SECOND * 3_600);
        let timer = world.timer.clone();
        let mut live: BTreeMap<usize, (Key, u64)> = BTreeMap::new();
        let is_steady = quota.capacity() == 1;
        for _ in 0..60 {
            match draw(8) {
                0..=3 => {
                    let own = key(["alice", "bob"][draw(2) as usize]);
                    let cost = if is_steady { 1 } else { 1 + draw(3) };
                    live.insert(world.spawn(take(&ready, &timer, &policy, &own, cost)), (own, cost));
                }
                4 => {
                    let caller = live.keys().nth(draw(live.len().max(1) as u64) as usize).copied();
                    if let Some(caller) = caller.filter(|caller| world.is_pending(*caller)) {
                        world.cancel(caller);
                        live.remove(&caller);
                    }
                }
                _ => world.pass(draw(120) * MS),
            }
        }
        let before = world.timer.now_us();
        world.pass(60_000 * MS);
        for (caller, (own, cost)) in &live {
            let taken = world.done[*caller];
            assert!(matches!(taken, Some(Ok(_))), "round {round}, {quota:?}: {own:?} for {cost}: {taken:?}");
        }
        // At most 60 callers of 3 units and two keys, at ten units a second.
        let last = live.keys().map(|caller| world.done[*caller].unwrap().unwrap()).max().unwrap_or(0);
        assert!(last * MS <= before + 20_000 * MS, "round {round}, {quota:?}: {last}");
        for own in ["alice", "bob"] {
            assert_eq!(limiter.peek_one(&policy, &key(own), 0).remaining(), policy.quota().capacity(), "round {round}");
        }
        assert_eq!(ready.waiting(), 0);
    }
}

#[tokio::test]
async fn decision_that_is_had_at_once_is_the_limiters_own() {
    let limiter = MemoryLimiter::new();
    let ready = Ready::new(limiter.clone());
    let policy = policy(Quota::per_hour(10));
    let decision: ChargeDecision = ready.take_one(&policy, &Key::global(), 3).await.unwrap();
    assert_eq!((decision.is_allowed(), decision.remaining()), (true, 7));
    let nothing = ready.take(&[]).await.unwrap();
    assert!(nothing.is_allowed() && nothing.charges().is_empty());
}

/// At once for a limiter in memory; with a store a round trip away, time passes between polls.
#[test]
fn caller_dropped_after_any_poll_leaves_nothing() {
    let queue = || Policy::new("queue", Quota::leaky_queue(10, SECOND).unwrap().queue(100).unwrap()).unwrap();
    let hour = || Policy::new("hour", Quota::per_hour(10)).unwrap();
    for (polls, panics, trip_ms) in
        (0..8).flat_map(|polls| [(polls, false, 0), (polls, true, 0), (polls, false, 4), (polls, true, 4)])
    {
        let (mut world, alice) = (World::new(), key("alice"));
        let limiter = memory(&world.clock);
        let far = Far::new(&limiter, &world.timer, Duration::from_millis(trip_ms));
        let ready = Ready::new(far).timer(world.timer.clone());
        let policies = [queue(), hour()];
        let take = || {
            let (ready, policies, alice, timer) = (ready.clone(), policies.clone(), alice.clone(), world.timer.clone());
            async move {
                let [queue, hour] = &policies;
                let taken = ready.take(&[Charge::new(queue, &alice), Charge::new(hour, &alice)]).await;
                taken.map(|_| timer.now_us() / MS).map_err(|error| error.kind())
            }
        };
        let (first, dropped, last) = (take(), take(), take());
        let first = world.spawn(first);
        let dropped =
            world.spawn(async move { Polled::new(dropped, polls, panics).await.unwrap_or(Err(NotReadyKind::TooLong)) });
        let last = world.spawn(last);
        world.pass(1_000 * MS);
        assert_eq!(world.done[dropped], Some(Err(NotReadyKind::TooLong)), "it is dropped before its departure");
        let admitted = [first, last].map(|caller| world.done[caller].unwrap().unwrap());
        assert_eq!(admitted, [trip_ms, trip_ms + 100], "after {polls} polls, {trip_ms} ms away");
        let left = policies.iter().map(|policy| limiter.peek_one(policy, &alice, 0).remaining()).collect::<Vec<_>>();
        assert_eq!((left[1], ready.waiting()), (8, 0), "after {polls} polls, {trip_ms} ms away");
    }
}
