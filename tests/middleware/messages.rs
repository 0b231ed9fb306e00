//! Messages of a connection are decided by a layer as requests are, and can wait for units of any
//! quota.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_core::Stream;
use http::request::Parts;
use tokio_stream::StreamExt;
use tonic::{Code, Status};
use tower_ratelimit::clock::Timer;
use tower_ratelimit::limiter::BoxLimiter;
use tower_ratelimit::middleware::{Messages, ModeSwitch, QuotaSwitch, Refused, message_units};
use tower_ratelimit::observe::{Observed, Observer, OutcomeKind, SetupWarningKind};
use tower_ratelimit::{Key, MemoryLimiter, Mode, OnError, Quota, RateLimitLayer, Rule, Wait, key};

use crate::support::waiting::{ManualTimer, World};
use crate::support::{Scripted, memory};

const MS: u64 = 1_000;
const SECOND: Duration = Duration::from_secs(1);

type Chat = RateLimitLayer<MemoryLimiter>;

fn head(user: &str) -> Parts {
    http::Request::get("/chat").header("x-user", user).body(()).unwrap().into_parts().0
}

fn by_user() -> impl Fn(&tower_ratelimit::Head<'_>) -> Option<Key> + Clone {
    key::header("x-user")
}

/// Five a second, one at a time.
fn steady() -> Rule {
    Rule::new("messages", Quota::per_second(5).burst(1).unwrap()).unwrap()
}

fn kind(decided: Result<impl Sized, Refused>) -> Option<OutcomeKind> {
    decided.err().map(|refused| refused.kind())
}

/// A layer in which a message waits for at most a second.
fn patient(world: &World<impl Sized>, rule: Rule) -> Chat {
    let chat = Chat::new(memory(&world.clock), rule, by_user());
    chat.delay(world.timer.clone()).max_message_wait(SECOND)
}

/// Counts the kinds of what it sees.
#[derive(Clone, Default)]
struct Kinds(Arc<Mutex<Vec<OutcomeKind>>>);

impl Observer for Kinds {
    fn on_outcome(&self, observed: &Observed<'_>) {
        self.0.lock().unwrap().push(observed.outcome().kind());
    }
}

#[tokio::test]
async fn sockets_of_a_user_share_what_the_user_may_send() {
    let chat = Chat::new(MemoryLimiter::new(), Rule::new("messages", Quota::per_hour(3)).unwrap(), by_user());
    let (mut phone, mut laptop) = (chat.messages(&head("alice")), chat.messages(&head("alice")));
    phone.admit(1).await.unwrap().keep();
    laptop.admit(1).await.unwrap().keep();
    phone.admit(1).await.unwrap().keep();
    let refused = laptop.admit(1).await.unwrap_err();
    assert!(matches!(refused.outcome().wait(), Wait::After(_)));
    assert!(chat.messages(&head("bob")).admit(1).await.is_ok());
}

#[tokio::test]
async fn message_is_charged_to_all_rules_or_to_none() {
    let count = Rule::new("messages", Quota::per_hour(10)).unwrap();
    let bytes = Rule::new("bytes", Quota::per_hour(100)).unwrap().cost(message_units);
    let chat = Chat::new(MemoryLimiter::new(), count, by_user()).and(bytes, by_user());
    let mut messages = chat.messages(&head("alice"));
    let left = |admission: &tower_ratelimit::middleware::Admission| {
        let of = |at: usize| admission.outcome().policies()[at].decision().remaining();
        (of(0), of(1))
    };
    assert_eq!(left(&messages.admit(60).await.unwrap()), (9, 40));
    let refused = messages.admit(41).await.unwrap_err();
    assert_eq!(refused.outcome().violated().map(|status| status.policy().name()).collect::<Vec<_>>(), ["bytes"]);
    let last = messages.admit(40).await.unwrap();
    assert_eq!(left(&last), (8, 0));
    last.refund();
    assert_eq!(left(&messages.admit(1).await.unwrap()), (8, 39));
}

#[tokio::test]
async fn modes_observers_and_failures_are_those_of_the_layer() {
    let (seen, mode) = (Kinds::default(), ModeSwitch::new(Mode::Shadow));
    let rule = Rule::new("messages", Quota::per_hour(1)).unwrap().mode(&mode);
    let limiter = Scripted::new();
    let chat = RateLimitLayer::new(limiter.clone(), rule, by_user()).observer(seen.clone()).on_error(OnError::Allow);
    let mut messages = chat.messages(&head("alice"));
    for _ in 0..2 {
        messages.admit(1).await.unwrap().keep();
    }
    mode.set(Mode::Enforce);
    assert_eq!(kind(messages.admit(1).await), Some(OutcomeKind::Limited));
    limiter.fail(true);
    messages.admit(1).await.unwrap().keep();
    let kinds = [OutcomeKind::Allowed, OutcomeKind::ShadowLimited, OutcomeKind::Limited, OutcomeKind::FailedOpen];
    assert_eq!(*seen.0.lock().unwrap(), kinds);
}

/// Returns the instants at which the messages of a socket were admitted, in milliseconds.
fn send<L: tower_ratelimit::limiter::Limiter>(
    mut messages: Messages<L>,
    timer: &ManualTimer,
    count: usize,
) -> impl Future<Output = Vec<Option<u64>>> + use<L> {
    let timer = timer.clone();
    async move {
        let mut sent = Vec::new();
        for _ in 0..count {
            sent.push(messages.admit(1).await.ok().map(|_| timer.now_us() / MS));
        }
        sent
    }
}

#[test]
fn messages_of_a_key_wait_in_one_line() {
    let mut world = World::new();
    let chat = patient(&world, steady());
    let boxed = RateLimitLayer::new(BoxLimiter::new(memory(&world.clock)), steady(), by_user());
    let boxed = boxed.delay(world.timer.clone()).max_message_wait(SECOND);
    let timer = world.timer.clone();
    for _ in 0..3 {
        world.spawn(send(chat.messages(&head("alice")), &timer, 3));
    }
    let other = world.spawn(send(boxed.messages(&head("alice")), &timer, 3));
    world.pass(5_000 * MS);
    let sent = |socket: usize| world.done[socket].clone().unwrap().into_iter().flatten().collect::<Vec<u64>>();
    let mut all: Vec<u64> = (0..3).flat_map(sent).collect();
    all.sort_unstable();
    assert_eq!(all, [0, 200, 400, 600, 800, 1_000, 1_200, 1_400, 1_600]);
    // The first socket sent its second message before the others came.
    assert_eq!(sent(1), [400, 1_000, 1_400]);
    assert_eq!(sent(2), [600, 1_200, 1_600]);
    assert_eq!(sent(other), [0, 200, 400]);
}

/// The limiter would admit it, because the units of those that wait are not taken before their time.
#[test]
fn new_message_stands_behind_those_that_wait() {
    let bytes = || Rule::new("bytes", Quota::per_second(1_000)).unwrap().cost(message_units);
    let block = Quota::block(9, SECOND, SECOND).unwrap();
    for rules in [[steady(), bytes()], [steady().block("mute", block).unwrap(), bytes()]] {
        let mut world = World::new();
        let [count, bytes] = rules;
        let chat = patient(&world, count).and(bytes, by_user());
        let timer = world.timer.clone();
        let mut late = chat.messages(&head("alice"));
        // It runs first at 200 milliseconds, when a unit has come.
        let late = world.spawn({
            let timer = timer.clone();
            async move {
                timer.sleep_until(Duration::from_millis(200)).await;
                late.admit(1).await.ok();
                vec![Some(timer.now_us() / MS)]
            }
        });
        let socket = world.spawn(send(chat.messages(&head("alice")), &timer, 3));
        world.pass(5_000 * MS);
        assert_eq!(world.done[socket], Some(vec![Some(0), Some(200), Some(600)]));
        assert_eq!(world.done[late], Some(vec![Some(400)]));
    }
}

#[test]
fn message_passes_when_its_quota_is_raised_or_its_key_is_reset() {
    for (change, passes_at) in [("switch", 5_000), ("layer", 5_000), ("limiter", 10_000)] {
        let mut world = World::new();
        let (quota, limiter) = (QuotaSwitch::new(Quota::per_minute(1)), memory(&world.clock));
        let chat = Chat::new(limiter.clone(), Rule::switched("messages", &quota).unwrap(), by_user())
            .delay(world.timer.clone())
            .max_message_wait(100 * SECOND);
        let timer = world.timer.clone();
        let sockets = [(); 2].map(|()| world.spawn(send(chat.messages(&head("alice")), &timer, 1)));
        world.pass(5_000 * MS);
        let alice = Key::of("alice").unwrap();
        match change {
            "switch" => drop(quota.set(Quota::per_second(10)).unwrap()),
            "limiter" => limiter.reset_now(&chat.policies()[0], &alice),
            _ => {
                let chat = chat.clone();
                world.spawn(async move {
                    chat.reset(&alice).await.unwrap();
                    Vec::new()
                });
            }
        }
        world.pass(0); // the tasks that were woken run
        world.pass(20_000 * MS);
        assert_eq!(
            sockets.map(|socket| world.done[socket].clone()),
            [0, passes_at].map(|at| Some(vec![Some(at)])),
            "{change}"
        );
        assert_eq!(chat.waiting(), 0);
    }
}

#[test]
fn message_that_would_wait_too_long_is_refused_at_once() {
    let mut world = World::new();
    let chat = patient(&world, steady()).max_message_wait(Duration::from_millis(100));
    let timer = world.timer.clone();
    let socket = world.spawn(send(chat.messages(&head("alice")), &timer, 3));
    assert_eq!(world.done[socket], Some(vec![Some(0), None, None]));
    // Without a timer no message waits.
    let chat = Chat::new(memory(&world.clock), steady(), by_user()).max_message_wait(SECOND);
    assert_eq!(chat.check().unwrap_err().kind(), SetupWarningKind::NoTimer);
    let socket = world.spawn(send(chat.messages(&head("alice")), &timer, 2));
    assert_eq!(world.done[socket], Some(vec![Some(0), None]));
    assert!(patient(&world, steady()).check().is_ok());
}

/// A mute after abuse: a message that waits is no abuse.
#[test]
fn block_counts_only_messages_that_are_refused() {
    let mut world = World::new();
    let mute = Quota::block(2, SECOND * 60, SECOND * 600).unwrap();
    let chat = patient(&world, steady().block("mute", mute).unwrap());
    let timer = world.timer.clone();
    let patient = world.spawn(send(chat.messages(&head("alice")), &timer, 5));
    world.pass(5_000 * MS);
    let sent = world.done[patient].clone().unwrap();
    assert_eq!(sent.into_iter().flatten().collect::<Vec<u64>>(), [0, 200, 400, 600, 800]);
    // It sends so many at once that two of them would wait for too long.
    let hasty: Vec<usize> = (0..8).map(|_| world.spawn(send(chat.messages(&head("bob")), &timer, 1))).collect();
    world.pass(5_000 * MS);
    let sent = hasty.iter().filter(|socket| world.done[**socket] != Some(vec![None])).count();
    assert_eq!(sent, 6, "within the second");
    let muted = world.spawn(send(chat.messages(&head("bob")), &timer, 1));
    world.pass(5_000 * MS);
    assert_eq!(world.done[muted], Some(vec![None]), "it is closed for ten minutes");
}

#[test]
fn socket_that_closes_lets_the_next_message_go() {
    let mut world = World::new();
    let chat = patient(&world, steady()).max_message_wait(SECOND * 60);
    let timer = world.timer.clone();
    let open = || chat.messages(&head("alice"));
    let sockets: Vec<usize> = (0..4).map(|_| world.spawn(send(open(), &timer, 1))).collect();
    world.pass(100 * MS);
    world.cancel(sockets[1]);
    world.pass(100 * MS);
    assert_eq!(world.done[sockets[2]], Some(vec![Some(200)]));
    world.stick(sockets[3]); // it is not polled
    let last = world.spawn(send(open(), &timer, 1));
    world.pass(1_000 * MS);
    assert_eq!(world.done[last], Some(vec![Some(450)]), "it passes over the socket that does not ask");
    world.cancel(sockets[3]);
    assert_eq!(chat.waiting(), 0);
}

/// A stream of numbers that are received at once.
fn received(numbers: impl IntoIterator<Item = u64, IntoIter: Unpin>) -> impl Stream<Item = u64> + Unpin {
    tokio_stream::iter(numbers)
}

#[tokio::test]
async fn stream_ends_with_the_first_refusal() {
    let chat = Chat::new(MemoryLimiter::new(), Rule::new("messages", Quota::per_hour(2)).unwrap(), by_user());
    let mut stream = chat.messages(&head("alice")).limit(received([1, 0, 2, 3, 4]), |number| *number);
    for expected in [1, 0, 2] {
        assert_eq!(stream.next().await.unwrap().unwrap(), expected, "0 units are not asked about");
    }
    assert_eq!(kind(stream.next().await.unwrap()), Some(OutcomeKind::Limited));
    assert!(stream.next().await.is_none());
}

#[tokio::test]
async fn refused_messages_are_dropped_and_counted() {
    let chat = Chat::new(MemoryLimiter::new(), Rule::new("messages", Quota::per_hour(2)).unwrap(), by_user());
    let stream = chat.messages(&head("alice")).limit(received(1..=1_000), |_| 1);
    let mut stream = stream.drop_refused(true);
    let mut passed = Vec::new();
    while let Some(number) = stream.next().await {
        passed.push(number.unwrap());
    }
    assert_eq!((passed, stream.dropped()), (vec![1, 2], 998));
}

/// A stream that always has a message.
struct Endless;

impl Stream for Endless {
    type Item = u64;

    fn poll_next(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<u64>> {
        Poll::Ready(Some(1))
    }
}

#[test]
fn flood_of_dropped_messages_keeps_no_task_from_running() {
    let chat = Chat::new(MemoryLimiter::new(), Rule::new("messages", Quota::per_hour(1)).unwrap(), by_user());
    let mut stream = chat.messages(&head("alice")).limit(Endless, |_| 1).drop_refused(true);
    let cx = &mut Context::from_waker(Waker::noop());
    assert!(matches!(Pin::new(&mut stream).poll_next(cx), Poll::Ready(Some(Ok(1)))));
    for polls in 1..4 {
        assert!(Pin::new(&mut stream).poll_next(cx).is_pending());
        assert_eq!(stream.dropped(), 64 * polls);
    }
}

#[test]
fn stream_reads_nothing_while_a_message_waits() {
    let mut world = World::new();
    let chat = patient(&world, steady());
    let read = Arc::new(Mutex::new(0));
    let counted = Arc::clone(&read);
    let messages = received(0..10).map(move |number| {
        *counted.lock().unwrap() += 1;
        number
    });
    let mut stream = chat.messages(&head("alice")).limit(messages, |_| 1);
    let consumer = world.spawn(async move {
        let mut passed = 0;
        while let Some(Ok(_)) = stream.next().await {
            passed += 1;
        }
        passed
    });
    assert_eq!(*read.lock().unwrap(), 2, "one passed, one waits");
    world.pass(1_000 * MS);
    assert_eq!(*read.lock().unwrap(), 7);
    world.pass(5_000 * MS);
    assert_eq!(world.done[consumer], Some(10));
}

#[tokio::test]
async fn refusal_ends_a_call_of_grpc_with_its_status() {
    let chat = Chat::new(MemoryLimiter::new(), Rule::new("messages", Quota::per_hour(1)).unwrap(), key::global());
    let call = tonic::Request::new(());
    let mut messages = chat.messages_of_call(&call);
    messages.admit(1).await.unwrap().keep();
    let status = Status::from(messages.admit(1).await.unwrap_err());
    assert_eq!(status.code(), Code::ResourceExhausted);
    let details = tonic_types::StatusExt::get_details_retry_info(&status).expect("it says when to retry");
    assert!(details.retry_delay.is_some_and(|delay| delay > SECOND));
    let stream = chat.messages_of_call(&call).limit(tokio_stream::iter([Ok::<_, Infallible>(())]), |_| 1);
    let ended: Vec<_> = stream.collect().await;
    assert!(matches!(&ended[..], [Err(refused)] if refused.kind() == OutcomeKind::Limited));
}
