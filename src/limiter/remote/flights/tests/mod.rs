//! Flights that are held back.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Mutex;
use std::task::Poll;

use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use super::*;

mod law;

/// Why a check failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    Unanswered(Unanswered),
    /// The store said so.
    Away,
}

impl From<Unanswered> for Failure {
    fn from(why: Unanswered) -> Self {
        Self::Unanswered(why)
    }
}

/// Polls a future once. Returns whether it waits.
async fn waits(mut future: Pin<&mut impl Future>) -> bool {
    poll_fn(|context| Poll::Ready(future.as_mut().poll(context).is_pending())).await
}

const DEADLINE: Duration = Duration::from_millis(50);

const BATCH: usize = 64;

const MOST: CallLimits = CallLimits { units: BATCH, calls: Calls::Pipelined };

const ANSWERED: CallResult = CallResult::Answered { rest: Duration::ZERO, clock: None };

/// Doubles what it carries, when it is let. Clones are the same.
#[derive(Clone)]
struct Held {
    carried: Arc<Mutex<Vec<Vec<u32>>>>,
    lets: Arc<Semaphore>,
    fails: Arc<Mutex<bool>>,
}

impl RemoteStore for Held {
    type Request = u32;
    type Answer = u32;
    type Error = Failure;
    type Queue = Queue<Self>;

    async fn send_batch(&self, callers: Vec<Caller<Self>>, _until: Instant, _: Option<Timestamp>) -> CallResult {
        let asks: Vec<_> = callers.iter().map(|caller| caller.request).collect();
        self.carried.lock().unwrap().push(asks.clone());
        self.lets.acquire().await.unwrap().forget();
        let fails = *self.fails.lock().unwrap();
        hand_out(callers, asks.iter().map(|ask| if fails { Err(Failure::Away) } else { Ok(ask * 2) }));
        if fails { CallResult::Failed } else { ANSWERED }
    }

    fn server_of(&self, lane: u16) -> u16 {
        u16::from(lane > 0 && lane % 1_000 == 1)
    }

    fn limits(&self) -> CallLimits {
        MOST
    }

    fn record_unsent(&self, _error: &Failure) {}
}

fn queue(most: usize, lets: usize) -> (Held, Arc<Flights<Held>>) {
    let held = Held { carried: Arc::default(), lets: Arc::new(Semaphore::new(lets)), fails: Arc::default() };
    (held.clone(), Arc::new(Flights::new(held, (1, 1), most, DEADLINE, Handle::current())))
}

impl Flights<Held> {
    async fn double(&self, ask: u32) -> Result<u32, Failure> {
        self.ask(0, ask, |sender: oneshot::Sender<Result<u32, Failure>>| sender).await?
    }
}

impl Held {
    fn carried(&self) -> Vec<Vec<u32>> {
        self.carried.lock().unwrap().clone()
    }
}

/// Asks in a task of its own, and returns when the task has come as far as it can.
async fn start(queue: &Arc<Flights<Held>>, ask: u32) -> JoinHandle<Result<u32, Failure>> {
    let queue = queue.clone();
    let task = tokio::spawn(async move { queue.double(ask).await });
    settle().await;
    task
}

async fn settle() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

fn why<T>(answer: Result<T, Failure>) -> Option<Unanswered> {
    match answer.err()? {
        Failure::Unanswered(why) => Some(why),
        Failure::Away => None,
    }
}

#[tokio::test(start_paused = true)]
async fn a_lone_check_goes_at_once_and_alone() {
    let (held, queue) = queue(10, 10);
    for ask in 1..=3 {
        assert_eq!(queue.double(ask).await, Ok(ask * 2));
    }
    assert_eq!(held.carried(), [[1], [2], [3]]);
    assert_eq!(queue.len(), 0);
    assert!(queue.0.lock(0).1.take_caller_flights(None).is_empty(), "their flights are forgotten");
}

#[tokio::test(start_paused = true)]
async fn waiting_requests_go_together_and_in_order() {
    let (held, queue) = queue(1_000, 0);
    let mut tasks = Vec::new();
    for ask in 0..100 {
        tasks.push(start(&queue, ask).await);
    }
    assert_eq!(held.carried(), [[0], [1], [2], [3]], "four in flight, the rest waits");
    held.lets.add_permits(100);
    for (ask, task) in (0..).zip(tasks) {
        assert_eq!(task.await.unwrap(), Ok(ask * 2));
    }
    let carried = held.carried();
    assert_eq!(carried.iter().map(Vec::len).collect::<Vec<_>>(), [1, 1, 1, 1, 64, 32]);
    assert_eq!(carried.concat(), (0..100).collect::<Vec<_>>());
    settle().await;
    assert_eq!(queue.len(), 0);
    assert_eq!(queue.double(7).await, Ok(14), "and then the next goes at once again");
}

#[tokio::test(start_paused = true)]
async fn flight_beside_others_carries_its_share_of_the_requests() {
    let (held, queue) = queue(1_000, 0);
    let mut tasks = Vec::new();
    for ask in 0..16 {
        tasks.push(start(&queue, ask).await);
    }
    held.lets.add_permits(4);
    settle().await;
    let sizes = || held.carried().iter().map(Vec::len).collect::<Vec<_>>();
    assert_eq!(sizes(), [1, 1, 1, 1, 12], "twelve are in flight, and three more flights are allowed");
    for ask in 16..20 {
        assert_eq!(sizes().len(), 5);
        tasks.push(start(&queue, ask).await);
    }
    assert_eq!(sizes(), [1, 1, 1, 1, 12, 4], "a quarter of all");
    held.lets.add_permits(2);
    for (ask, task) in (0..).zip(tasks) {
        assert_eq!(task.await.unwrap(), Ok(ask * 2));
    }
}

#[tokio::test(start_paused = true)]
async fn lane_keeps_little_memory_of_a_burst() {
    let (held, queue) = queue(1_000, 0);
    for _ in 0..1_000 {
        queue.send(0, 1, drop).unwrap();
    }
    let capacity = || queue.in_queue(Queue::capacity);
    assert!(capacity() >= 900);
    held.lets.add_permits(1_000);
    settle().await;
    assert_eq!(queue.len(), 0);
    assert!(capacity() <= 2 * queue::SPARE, "{}", capacity());
}

#[tokio::test(start_paused = true)]
async fn check_without_a_caller_is_not_sent() {
    let (held, queue) = queue(10, 0);
    let mut tasks = Vec::new();
    for ask in 0..7 {
        tasks.push(start(&queue, ask).await);
    }
    tasks.remove(5).abort();
    settle().await;
    held.lets.add_permits(10);
    settle().await;
    assert_eq!(held.carried().concat(), [0, 1, 2, 3, 4, 6]);
    assert_eq!(queue.len(), 0, "its place is free again");
}

/// A queue takes back the slot of the last one first.
#[tokio::test(start_paused = true)]
async fn checks_dropped_in_flight_are_answered_last_one_first() {
    struct Noted(u32, Arc<Mutex<Vec<u32>>>, oneshot::Sender<()>);
    impl Receiver<u32, Failure> for Noted {
        fn is_gone(&self) -> bool {
            self.2.is_closed()
        }

        fn answer(self: Box<Self>, _: Result<u32, Failure>) {
            self.1.lock().unwrap().push(self.0);
        }
    }
    let (held, queue) = queue(10, 0);
    let answered: Arc<Mutex<Vec<u32>>> = Arc::default();
    let checks = [1, 2, 3, 4, 5].map(|ask| {
        let (queue, answered) = (queue.clone(), Arc::clone(&answered));
        tokio::spawn(async move { queue.ask(0, ask, |sender| Noted(ask, answered, sender)).await })
    });
    settle().await;
    assert_eq!(held.carried(), [vec![1], vec![2, 3, 4, 5]], "the first goes at once, the others together");
    [1, 2, 4].iter().for_each(|dropped| checks[*dropped].abort());
    settle().await;
    held.lets.add_permits(2);
    settle().await;
    assert_eq!(*answered.lock().unwrap(), [1, 4, 5, 3, 2]);
}

#[tokio::test(start_paused = true)]
async fn held_futures_delay_no_other_check() {
    let (held, queue) = queue(10, 0);
    let mut futures: Vec<_> = (0..4).map(|ask| Box::pin(queue.double(ask))).collect();
    for future in &mut futures {
        assert!(waits(future.as_mut()).await);
    }
    settle().await;
    held.lets.add_permits(10);
    assert_eq!(queue.double(7).await, Ok(14));
    assert_eq!(queue.len(), 0, "their answers are there");
    for (ask, future) in (0..).zip(futures) {
        assert_eq!(future.await, Ok(ask * 2));
    }
}

/// Makes the window of the first server so small, and lets its calls be short.
fn shrink(flights: &Flights<Held>, window: u64) {
    let (_lane, mut server) = flights.0.lock(0);
    let late = Sent { units: window, in_flight: window, flights: 2, phase: None };
    server.window.record(2 * DEADLINE, late, DEADLINE);
    for _ in 0..20 {
        server.window.record(DEADLINE / 50, Sent { units: 1, in_flight: 0, flights: 2, phase: None }, DEADLINE);
    }
}

/// The window has room for two calls, which are driven by futures that are not polled.
#[tokio::test(start_paused = true)]
async fn held_futures_delay_no_check_of_another_lane() {
    let (held, _) = queue(10, 10);
    let flights = Flights::new(held, (3, 1), 10, DEADLINE, Handle::current());
    for _ in 0..2 {
        shrink(&flights, 1);
        assert_eq!(flights.0.lock(0).1.window.units(), 2);
        let ask = |lane| flights.ask(lane, 5, |sender: oneshot::Sender<Result<u32, Failure>>| sender);
        let _first = (ask(0), ask(1));
        assert_eq!(ask(2).await, Ok(Ok(10)));
    }
}

#[tokio::test(start_paused = true)]
async fn flight_takes_what_the_window_has_room_for() {
    let (held, queue) = queue(10, 0);
    let room = queue.0.lock(0).1.window.units() - 2;
    queue.0.lock(0).1.units += room;
    let _asks = [1, 2, 3].map(|ask| queue.ask(0, ask, |sender: oneshot::Sender<Result<u32, Failure>>| sender));
    settle().await;
    assert_eq!(held.carried(), [[1, 2]]);
}

#[tokio::test(start_paused = true)]
async fn window_grows_if_it_makes_flights_small() {
    // A flight of this store has at most 64 checks.
    for (window, checks, flights, grows) in [(100, 10, 1, false), (100, 30, 2, true), (512, 80, 2, false)] {
        let (held, queue) = queue(1_000, 100);
        if window < queue.0.lock(0).1.window.units() {
            shrink(&queue, window);
        }
        let before = queue.0.lock(0).1.window.units();
        let asks = (0..checks).map(|ask| queue.ask(0, ask, |sender: oneshot::Sender<Result<u32, Failure>>| sender));
        let asks: Vec<_> = asks.collect();
        for ask in asks {
            assert!(matches!(ask.await, Ok(Ok(_))));
        }
        assert_eq!(held.carried().len(), flights);
        let after = queue.0.lock(0).1.window.units();
        assert_eq!(after > before, grows, "{before} and {after} with {checks} checks");
    }
}

/// Its call shows how long calls take now.
#[tokio::test(start_paused = true)]
async fn late_check_of_an_idle_store_is_sent() {
    let (_held, queue) = queue(10, 10);
    let late = Sent { units: 1, in_flight: 1, flights: 2, phase: None };
    queue.0.lock(0).1.window.record(DEADLINE, late, DEADLINE);
    let answer = queue.ask(0, 5, |sender: oneshot::Sender<Result<u32, Failure>>| sender);
    tokio::time::advance(DEADLINE / 2).await;
    assert_eq!(answer.await, Ok(Ok(10)));
}

#[tokio::test(start_paused = true)]
async fn lane_in_use_stays_with_its_server() {
    /// The servers of two lanes change.
    struct Moving(Arc<AtomicU64>);

    impl RemoteStore for Moving {
        type Request = u32;
        type Answer = u32;
        type Error = Failure;
        type Queue = Queue<Self>;

        async fn send_batch(&self, callers: Vec<Caller<Self>>, _: Instant, _: Option<Timestamp>) -> CallResult {
            tokio::time::sleep(DEADLINE / 2).await;
            hand_out(callers, std::iter::repeat_with(|| Ok(1)));
            ANSWERED
        }

        fn server_of(&self, _lane: u16) -> u16 {
            self.0.load(Ordering::Relaxed) as u16
        }

        fn limits(&self) -> CallLimits {
            MOST
        }

        fn record_unsent(&self, _error: &Failure) {}
    }

    let at = Arc::new(AtomicU64::new(0));
    let flights = Flights::new(Moving(Arc::clone(&at)), (1, 2), 10, DEADLINE, Handle::current());
    flights.send(0, 1, drop).unwrap();
    settle().await;
    at.store(1, Ordering::Relaxed);
    assert_eq!(flights.0.lock(0).0.server, 0, "a call is under way");
    tokio::time::sleep(DEADLINE).await;
    assert_eq!(flights.0.lock(0).0.server, 1);
}

/// Waits in vain for an answer.
struct Silent;

impl RemoteStore for Silent {
    type Request = u32;
    type Answer = u32;
    type Error = Failure;
    type Queue = Queue<Self>;

    async fn send_batch(&self, callers: Vec<Caller<Self>>, until: Instant, _: Option<Timestamp>) -> CallResult {
        tokio::time::sleep_until(until).await;
        callers.into_iter().for_each(|caller| caller.answer(Err(Failure::Away)));
        CallResult::Failed
    }

    fn limits(&self) -> CallLimits {
        MOST
    }

    fn record_unsent(&self, _error: &Failure) {}
}

#[tokio::test(start_paused = true)]
async fn call_that_fails_at_the_deadline_was_too_long() {
    let flights = Flights::new(Silent, (1, 1), 10, DEADLINE, Handle::current());
    let ask = || flights.ask(0, 1, |sender: oneshot::Sender<Result<u32, Failure>>| sender);
    assert_eq!(ask().await, Ok(Err(Failure::Away)));
    assert_eq!(flights.0.lock(0).1.window.call(), Some(DEADLINE * 5 / 4));
    // A correction has no deadline, and its call has one.
    let ((tell, told), began) = (oneshot::channel(), Instant::now());
    flights.send(0, 1, |answer| tell.send(answer).unwrap()).unwrap();
    assert_eq!(told.await.unwrap(), Err(Failure::Away));
    assert!((DEADLINE..=DEADLINE + GRACE).contains(&began.elapsed()), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn call_that_fails_at_once_was_not_long() {
    let (held, queue) = queue(10, 10);
    *held.fails.lock().unwrap() = true;
    assert_eq!(queue.double(1).await, Err(Failure::Away));
    assert_eq!(queue.0.lock(0).1.window.call(), None);
}

fn tasks() -> usize {
    Handle::current().metrics().num_alive_tasks()
}

/// The runtime wakes the caller before it runs the other flight.
#[tokio::test(start_paused = true)]
async fn answered_check_and_later_ones_do_not_wait_for_each_other() {
    let (held, queue) = queue(10, 0);
    let mut first = Box::pin(queue.double(1));
    assert!(waits(first.as_mut()).await);
    let mut second = Box::pin(queue.double(2));
    assert!(waits(second.as_mut()).await);
    held.lets.add_permits(1);
    assert!(!waits(first.as_mut()).await, "its answer is there");
    held.lets.add_permits(1);
    assert_eq!(second.await, Ok(4), "the first is not polled any more");
}

#[tokio::test(start_paused = true)]
async fn lone_check_needs_no_task_until_another_waits() {
    let (held, queue) = queue(10, 1);
    assert_eq!(queue.double(0).await, Ok(0));
    let mut lone = Box::pin(queue.double(1));
    for _ in 0..2 {
        assert!(waits(lone.as_mut()).await);
        assert_eq!((tasks(), held.carried().len()), (0, 2));
    }
    let mut next = Box::pin(queue.double(2));
    let mut last = Box::pin(queue.double(3));
    assert!(waits(next.as_mut()).await);
    assert_eq!(tasks(), 1, "the other flight");
    settle().await;
    assert!(waits(last.as_mut()).await);
    assert_eq!(tasks(), 2, "a check waits for both");
    held.lets.add_permits(3);
    assert_eq!((lone.await, next.await, last.await), (Ok(2), Ok(4), Ok(6)));
}

#[tokio::test(start_paused = true)]
async fn lone_check_whose_caller_goes_is_carried_to_its_end() {
    let (held, queue) = queue(10, 0);
    let mut lone = Box::pin(queue.double(1));
    assert!(waits(lone.as_mut()).await);
    drop(lone);
    assert_eq!((tasks(), queue.len()), (1, 1));
    held.lets.add_permits(1);
    settle().await;
    assert_eq!((tasks(), queue.len()), (0, 0));
}

/// Its caller is woken to wait for the answer instead.
#[tokio::test(start_paused = true)]
async fn caller_of_a_flight_that_became_a_task_gets_its_answer() {
    let (held, queue) = queue(10, 0);
    let lone = start(&queue, 1).await;
    let others = [start(&queue, 2).await, start(&queue, 3).await];
    held.lets.add_permits(3);
    assert_eq!(lone.await.unwrap(), Ok(2));
    for (ask, other) in (2..).zip(others) {
        assert_eq!(other.await.unwrap(), Ok(ask * 2));
    }
}

/// Sends more requests than it can have calls, while a caller polls its first call.
struct Busy(std::sync::OnceLock<std::sync::Weak<Flights<Self>>>);

impl RemoteStore for Busy {
    type Request = u32;
    type Answer = u32;
    type Error = Failure;
    type Queue = Queue<Self>;

    async fn send_batch(&self, callers: Vec<Caller<Self>>, _until: Instant, _: Option<Timestamp>) -> CallResult {
        if let Some(flights) = self.0.get().and_then(std::sync::Weak::upgrade).filter(|_| callers[0].request == 1) {
            (2..10).for_each(|request| flights.send(0, request, drop).unwrap());
        }
        tokio::task::yield_now().await;
        let asks: Vec<_> = callers.iter().map(|caller| caller.request).collect();
        hand_out(callers, asks.iter().map(|ask| Ok(ask * 2)));
        ANSWERED
    }

    fn limits(&self) -> CallLimits {
        MOST
    }

    fn record_unsent(&self, _error: &Failure) {}
}

#[tokio::test(start_paused = true)]
async fn flight_that_becomes_a_task_while_polled_goes_on() {
    let flights = Arc::new(Flights::new(Busy(std::sync::OnceLock::new()), (1, 1), 100, DEADLINE, Handle::current()));
    flights.store().0.set(Arc::downgrade(&flights)).unwrap();
    let answer = flights.ask(0, 1, |sender: oneshot::Sender<Result<u32, Failure>>| sender).await;
    assert_eq!(answer, Ok(Ok(2)));
    settle().await;
    assert_eq!(flights.len(), 0);
}

#[tokio::test(start_paused = true)]
async fn panic_in_a_lone_flight_fails_its_check_only() {
    struct Panics;
    impl RemoteStore for Panics {
        type Request = ();
        type Answer = ();
        type Error = Failure;
        type Queue = Queue<Self>;

        async fn send_batch(&self, _riders: Vec<Caller<Self>>, _until: Instant, _: Option<Timestamp>) -> CallResult {
            std::panic::resume_unwind(Box::new("an observer panics"))
        }

        fn limits(&self) -> CallLimits {
            MOST
        }

        fn record_unsent(&self, _error: &Failure) {}
    }
    let queue = Flights::new(Panics, (1, 1), 10, DEADLINE, Handle::current());
    for _ in 0..3 {
        let answer = queue.ask(0, (), |sender: oneshot::Sender<Result<(), Failure>>| sender).await;
        assert_eq!(why(answer), Some(Unanswered::RuntimeEnded));
    }
    assert_eq!(queue.len(), 0);
}

#[tokio::test(start_paused = true)]
async fn waker_that_panics_keeps_no_answer_from_others() {
    let (held, queue) = queue(10, 0);
    let waker = crate::base::sync::panicking_waker();
    let mut odd = [1, 2, 3].map(|ask| Box::pin(queue.double(ask)));
    for odd in &mut odd {
        assert!(odd.as_mut().poll(&mut std::task::Context::from_waker(&waker)).is_pending());
    }
    let next = start(&queue, 4).await;
    held.lets.add_permits(10);
    assert_eq!(next.await.unwrap(), Ok(8));
    assert_eq!(held.carried(), [vec![1], vec![2, 3], vec![4]]);
    settle().await;
    assert_eq!(queue.len(), 0);
}

#[tokio::test(start_paused = true)]
async fn waiting_has_the_deadline_too() {
    let (held, queue) = queue(10, 0);
    for ask in 0..CALLS_MIN {
        start(&queue, ask as u32).await;
    }
    let began = tokio::time::Instant::now();
    assert_eq!(why(queue.double(9).await), Some(Unanswered::TimedOut { deadline: DEADLINE, quickest: None }));
    assert!(began.elapsed() < DEADLINE * 2, "{:?}", began.elapsed());
    held.lets.add_permits(10);
    settle().await;
    assert_eq!(held.carried().concat(), [0, 1, 2, 3], "and is not sent later");
}

/// A store that answers, and more checks than it can answer in time.
#[tokio::test(start_paused = true)]
async fn check_behind_answered_ones_is_an_overload() {
    let (held, queue) = queue(1_000, 0);
    let mut tasks = Vec::new();
    for ask in 0..200 {
        tasks.push(start(&queue, ask).await);
    }
    held.lets.add_permits(1);
    let mut ends = Vec::new();
    for task in tasks {
        ends.push(why(task.await.unwrap()));
    }
    assert_eq!(held.carried().iter().map(Vec::len).collect::<Vec<_>>(), [1, 1, 1, 1, BATCH]);
    let sent = 4 + BATCH;
    assert_eq!(ends[0], None);
    let is_late = |end: &Option<Unanswered>| matches!(end, Some(Unanswered::TimedOut { .. }));
    assert!(ends[1..sent].iter().all(is_late), "{ends:?}");
    assert!(ends[sent..].iter().all(|end| *end == Some(Unanswered::NotSent(DEADLINE))), "{ends:?}");
}

#[tokio::test(start_paused = true)]
async fn time_that_ends_unnoticed_is_an_overload() {
    let (_held, queue) = queue(10, 0);
    let check = start(&queue, 1).await;
    // The process does nothing for a while.
    tokio::time::advance(DEADLINE * 2).await;
    assert_eq!(why(check.await.unwrap()), Some(Unanswered::TooBusy(DEADLINE)));
}

/// Its call shows how long calls take now.
#[tokio::test(start_paused = true)]
async fn late_check_is_sent_if_it_is_the_last_of_an_idle_lane() {
    let (_held, queue) = queue(10, 0);
    let now = Instant::now();
    let check = |left: u64| QueuedRequest::<Held> {
        request: 1,
        receiver: Box::new(AnswerFn::new(drop)),
        number: 0,
        since: now,
        until: Some(now + Duration::from_millis(left)),
        permit: queue.0.permits.check().unwrap(),
    };
    for (is_idle, left, is_last, is_sent) in [
        (true, 10, true, true),
        (true, 10, false, false),
        (false, 10, true, false),
        (true, 0, true, false),
        (false, 20, false, true),
    ] {
        let mut batch = Batch::new(now, Duration::from_millis(20), is_idle);
        batch.add(check(left), is_last);
        assert_eq!((batch.callers.len(), batch.late.len()), if is_sent { (1, 0) } else { (0, 1) }, "{left} ms left");
    }
}

#[tokio::test(start_paused = true)]
async fn check_whose_answer_is_known_by_now_is_not_sent() {
    struct Known(oneshot::Sender<Result<u32, Failure>>);
    impl Receiver<u32, Failure> for Known {
        fn known(&mut self) -> Option<u32> {
            Some(0)
        }

        fn answer(self: Box<Self>, answer: Result<u32, Failure>) {
            self.0.send(answer).unwrap();
        }
    }
    let (held, queue) = queue(10, 0);
    let in_flight = [start(&queue, 1).await, start(&queue, 2).await];
    let known = queue.ask(0, 3, Known);
    let mut known = std::pin::pin!(known);
    assert!(waits(known.as_mut()).await);
    held.lets.add_permits(2);
    assert_eq!(known.await.unwrap(), Ok(0));
    assert_eq!(held.carried(), [[1], [2]]);
    for task in in_flight {
        assert!(task.await.unwrap().is_ok());
    }
}

#[test]
fn check_outside_of_a_runtime_is_an_error_and_no_panic() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (_held, queue) = runtime.block_on(async { queue(10, 10) });
    let mut future = Box::pin(queue.double(1));
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    let std::task::Poll::Ready(Err(error)) = future.as_mut().poll(&mut context) else { panic!("an error, at once") };
    assert_eq!(error, Failure::Unanswered(Unanswered::NoRuntime));
}

#[test]
fn checks_fail_at_once_when_the_runtime_has_ended() {
    // On a busy machine, the checks would reach their deadlines before the runtime ends.
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    let (own, other) = (runtime(), runtime());
    let (_held, queue) = own.block_on(async { queue(10, 0) });
    let waiting = other.block_on(async {
        [1, 2, 3].map(|ask| {
            tokio::spawn({
                let queue = queue.clone();
                async move { queue.double(ask).await }
            })
        })
    });
    other.block_on(settle());
    own.block_on(settle());
    drop(own);
    other.block_on(async {
        for task in waiting {
            assert_eq!(why(task.await.unwrap()), Some(Unanswered::RuntimeEnded));
        }
        assert_eq!(why(queue.double(4).await), Some(Unanswered::RuntimeEnded));
        let (tell, told) = oneshot::channel();
        queue.send(0, 5, |answer| tell.send(answer).unwrap()).unwrap();
        assert_eq!(why(told.await.unwrap()), Some(Unanswered::RuntimeEnded));
    });
    assert_eq!(queue.len(), 0);
}

#[tokio::test(start_paused = true)]
async fn one_more_than_there_are_places_is_refused_at_once() {
    let (held, queue) = queue(5, 0);
    for _ in 0..64 {
        assert_eq!(why(queue.send(0, 8, drop)), None);
    }
    assert_eq!(why(queue.send(0, 9, drop)), Some(Unanswered::TooMany(64)));
    let mut tasks = Vec::new();
    for ask in 0..5 {
        tasks.push(start(&queue, ask).await);
    }
    assert_eq!(why(queue.double(9).await), Some(Unanswered::TooMany(5)), "refunds take no places of checks");
    held.lets.add_permits(10);
    for task in tasks {
        assert!(task.await.unwrap().is_ok());
    }
    settle().await;
    assert_eq!(queue.double(9).await, Ok(18));
}

#[tokio::test(start_paused = true)]
async fn failure_reaches_all_of_its_call_and_no_other() {
    let (held, queue) = queue(10, 0);
    let mut tasks = Vec::new();
    for ask in 0..6 {
        tasks.push(start(&queue, ask).await);
    }
    held.lets.add_permits(4);
    settle().await;
    *held.fails.lock().unwrap() = true;
    held.lets.add_permits(1);
    settle().await;
    *held.fails.lock().unwrap() = false;
    held.lets.add_permits(1);
    let mut failed = Vec::new();
    for task in tasks {
        failed.push(task.await.unwrap() == Err(Failure::Away));
    }
    assert_eq!(failed, [false, false, false, false, true, true]);
    assert!(queue.double(1).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn small_batches_take_one_correction_for_three_checks() {
    let (_held, queue) = queue(1_000, 0);
    let mut tasks = Vec::new();
    for ask in 0..4 {
        tasks.push(start(&queue, ask).await);
    }
    for correction in [100, 101] {
        queue.send(0, correction, drop).unwrap();
    }
    for ask in 4..20 {
        tasks.push(start(&queue, ask).await);
    }
    for carried in [[100, 4], [5, 6], [101, 7], [8, 9]] {
        let mut batch = Batch::new(Instant::now(), Duration::ZERO, false);
        queue.0.lock(0).0.queue.take_batch(2, &mut batch);
        assert_eq!(batch.callers.iter().map(|caller| caller.request).collect::<Vec<_>>(), carried);
    }
}

#[tokio::test(start_paused = true)]
async fn corrections_before_a_check_are_a_third_of_the_checks() {
    let (_held, queue) = queue(1_000, 0);
    let mut tasks = Vec::new();
    for ask in 0..16 {
        tasks.push(start(&queue, ask).await);
    }
    for (corrections, before) in [(0, 12), (3, 15), (5, 17), (50, 17)] {
        while queue.in_queue(|queue| queue.ready()) < 12 + corrections {
            queue.send(0, 100, drop).unwrap();
        }
        assert_eq!(queue.in_queue(|queue| queue.before_a_check()), before, "{corrections} corrections");
    }
}

#[tokio::test(start_paused = true)]
async fn load_has_the_longest_wait() {
    let (_held, queue) = queue(10, 0);
    let mut tasks = Vec::new();
    for (ask, wait) in (0..7).zip([0, 0, 0, 0, 10, 20, 30].map(Duration::from_millis)) {
        tasks.push(start(&queue, ask).await);
        // Four are in flight, and do not wait.
        tokio::time::advance(Duration::from_millis(10)).await;
        assert_eq!(queue.load().oldest_wait, wait);
    }
}

#[tokio::test(start_paused = true)]
async fn load_counts_the_calls_of_all_servers() {
    let (held, _) = queue(10, 0);
    let flights = Flights::new(held, (2, 2), 10, DEADLINE, Handle::current());
    for (lane, calls) in [(0, 1), (1, 2), (1, 3)] {
        flights.send(lane, 1, drop).unwrap();
        settle().await;
        assert_eq!(flights.load().calls_in_flight, calls);
    }
}

#[tokio::test(start_paused = true)]
async fn load_has_the_call_times_of_the_slowest_server() {
    for times in [[10, 20], [20, 10]] {
        let (held, _) = queue(10, 0);
        let flights = Flights::new(held, (2, 2), 10, DEADLINE, Handle::current());
        let times_of = |load: StoreLoad| (load.call_time, load.quickest_call);
        assert_eq!(times_of(flights.load()), (None, None));
        for (lane, took) in times.map(Duration::from_millis).into_iter().enumerate() {
            let sent = Sent { units: 1, in_flight: 1, flights: 1, phase: None };
            let (_lane, mut server) = flights.0.lock(lane as u16);
            server.window.record(took, sent, DEADLINE);
            server.quickest.record(took, Instant::now());
            server.ended_at = Some(Instant::now());
        }
        let slowest = Some(Duration::from_millis(20));
        assert_eq!(times_of(flights.load()), (slowest, slowest));
        tokio::time::advance(REMEMBERED).await;
        assert_eq!(times_of(flights.load()), (None, None), "no call has ended lately");
    }
}

/// Only the lanes 1 and 1,001 are of another server.
#[tokio::test(start_paused = true)]
async fn lanes_of_a_server_share_its_window() {
    let (held, _) = queue(10, 0);
    let flights = Arc::new(Flights::new(held.clone(), (2_000, 2), 10_000, DEADLINE, Handle::current()));
    let ask = |lane| {
        let flights = Arc::clone(&flights);
        tokio::spawn(async move { flights.ask(lane, u32::from(lane), |sender| sender).await?.map(drop) })
    };
    let window = flights.0.lock(0).1.window.units();
    let mut asked: Vec<_> = (2..700).map(ask).collect();
    settle().await;
    assert_eq!(held.carried().len() as u64, window);
    assert_eq!(flights.0.lock(0).1.waiting as u64, asked.len() as u64 - window);
    for (lane, carried) in [(1, 1), (700, 1), (1_001, 2)] {
        asked.push(ask(lane));
        settle().await;
        assert_eq!(held.carried().len() as u64, window + carried, "lane {lane}");
    }
    // Lanes that wait have their turns in order, and a lane that comes then is behind them.
    held.lets.add_permits(3);
    settle().await;
    let next = window as u32 + 2;
    assert_eq!(held.carried()[window as usize + 2..][..3], [[next], [next + 1], [next + 2]]);
    held.lets.add_permits(asked.len());
    for check in asked {
        assert_eq!(check.await.unwrap(), Ok(()));
    }
    let (lane, server) = flights.0.lock(0);
    assert_eq!((server.flights, server.units, server.waiting, server.starting), (0, 0, 0, 0));
    assert!(!server.has_listed() && lane.flights == 0);
}

#[tokio::test(start_paused = true)]
async fn sent_request_goes_without_a_waiting_caller() {
    let (held, queue) = queue(10, 10);
    let (tell, told) = oneshot::channel();
    queue.send(0, 5, |answer| tell.send(answer).unwrap()).unwrap();
    settle().await;
    assert_eq!(held.carried(), [[5]]);
    assert_eq!(told.await.unwrap(), Ok(10));
    assert_eq!(queue.len(), 0);
}

/// As when the runtime ends, or the application's clock panics.
#[test]
fn sent_request_is_answered_when_its_flight_ends() {
    let own = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (answers, seen) = std::sync::mpsc::channel();
    let (held, queue) = own.block_on(async {
        let (held, queue) = queue(10, 0);
        for ask in 1..=5 {
            let answers = answers.clone();
            queue.send(0, ask, move |answer| answers.send(why(answer)).unwrap()).unwrap();
            settle().await;
        }
        (held, queue)
    });
    assert_eq!(held.carried(), [[1], [2], [3], [4]], "four in flight, one waits");
    drop(own);
    assert_eq!(seen.try_iter().collect::<Vec<_>>(), [Some(Unanswered::RuntimeEnded); 5]);
    assert_eq!(queue.len(), 0);
}

/// Most lanes have a flight. The others wait for room in the window of their server.
#[test]
fn requests_of_listed_lanes_are_answered_when_flights_end() {
    for are_sent in [true, false] {
        let own = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (answers, seen) = std::sync::mpsc::channel();
        let (held, flights) = own.block_on(async {
            let (held, _) = queue(10, 0);
            let flights = Flights::new(held.clone(), (600, 1), 1_000, DEADLINE, Handle::current());
            for lane in 0..600 {
                let answers = answers.clone();
                flights.send(lane, 1, move |answer| answers.send(why(answer)).unwrap()).unwrap();
            }
            if are_sent {
                settle().await;
            }
            (held, flights)
        });
        assert_eq!(held.carried().len(), if are_sent { 511 } else { 0 }, "there is room for a check");
        drop(own);
        assert_eq!(seen.try_iter().collect::<Vec<_>>(), [Some(Unanswered::RuntimeEnded); 600]);
        assert_eq!(flights.len(), 0);
        let (lane, server) = flights.0.lock(0);
        assert_eq!((lane.flights, lane.units, lane.counted, lane.is_starting), (0, 0, 0, false));
        assert_eq!((server.flights, server.units, server.waiting, server.starting), (0, 0, 0, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_stays_of_dropped_flights() {
    let (held, queue) = queue(10, 10);
    let clone = queue.clone();
    drop(queue);
    settle().await;
    assert!(Arc::strong_count(&held.carried) > 1);
    drop(clone);
    settle().await;
    assert_eq!(Arc::strong_count(&held.carried), 1, "nothing holds the carrier any more");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn ten_thousand_at_once_are_each_answered_once_and_their_own() {
    let (held, queue) = queue(20_000, 1_000_000);
    let tasks: Vec<_> = (0..10_000)
        .map(|ask| {
            let queue = queue.clone();
            tokio::spawn(async move { queue.double(ask).await })
        })
        .collect();
    for (ask, task) in (0..).zip(tasks) {
        let answer = task.await.unwrap();
        // A slow machine may let some of them wait for too long, or notice it too late; no answer is another's.
        assert!(why(answer).is_some() || answer == Ok(ask * 2), "{ask}: {answer:?}");
    }
    let mut carried = held.carried().concat();
    carried.sort_unstable();
    let before = carried.len();
    carried.dedup();
    assert_eq!(carried.len(), before, "none was carried twice");
}

/// An answer reports the server's time. Later calls to this server get that time plus the time since the answer.
#[tokio::test(start_paused = true)]
async fn next_call_knows_the_time_of_the_store() {
    const TOLD: Timestamp = Timestamp::from_micros(1_900_000_000_000_000);

    /// Tells its time in its first answer only.
    #[derive(Default)]
    struct Tells(Mutex<Vec<Option<Timestamp>>>);
    impl RemoteStore for Tells {
        type Request = ();
        type Answer = ();
        type Error = Failure;
        type Queue = Queue<Self>;

        async fn send_batch(&self, callers: Vec<Caller<Self>>, _: Instant, time: Option<Timestamp>) -> CallResult {
            let clock = self.0.lock().unwrap().is_empty().then_some(TOLD);
            self.0.lock().unwrap().push(time);
            hand_out(callers, std::iter::repeat(Ok(())));
            CallResult::Answered { rest: Duration::ZERO, clock }
        }

        fn server_of(&self, lane: u16) -> u16 {
            lane
        }

        fn limits(&self) -> CallLimits {
            MOST
        }

        fn record_unsent(&self, _error: &Failure) {}
    }
    let flights = Flights::new(Tells::default(), (2, 2), 10, DEADLINE, Handle::current());
    let ask = |lane| flights.ask(lane, (), |sender: oneshot::Sender<Result<(), Failure>>| sender);
    ask(0).await.unwrap().unwrap();
    for lane in [0, 0, 1] {
        tokio::time::advance(DEADLINE).await;
        ask(lane).await.unwrap().unwrap();
    }
    let later = |by: u32| Some(TOLD.saturating_add(by * DEADLINE));
    assert_eq!(*flights.store().0.lock().unwrap(), [None, later(1), later(2), None], "each server has its own");
}
