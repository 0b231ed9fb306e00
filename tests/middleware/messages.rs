//! Messages of a connection are decided by a layer as requests are, and can wait for units of any
//! quota.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures_core::Stream;
use futures_core::stream::FusedStream;
use http::request::Parts;
use tokio_stream::StreamExt;
use tonic::{Code, Status};
use tower_ratelimit::clock::{Timer, TokioTimer};
use tower_ratelimit::limiter::{BoxLimiter, Charge, Decision, Limiter, Refund, Reply};
use tower_ratelimit::middleware::{Admission, Messages, ModeSwitch, QuotaSwitch, Refused, message_units};
use tower_ratelimit::observe::{Observed, Observer, OutcomeKind, SetupWarningKind};
use tower_ratelimit::{Key, MemoryLimiter, Mode, OnError, Policy, Quota, RateLimitLayer, Rule, Wait, key};

use crate::support::waiting::{ManualTimer, Polled, World, at_once};
use crate::support::{Scripted, cases, memory};

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
    chat.timer(world.timer.clone()).max_message_wait(SECOND)
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
fn send<L: Limiter>(
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
    let boxed = boxed.timer(world.timer.clone()).max_message_wait(SECOND);
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

/// The limiter would admit it here, too, and nobody would wait for the units that it took.
#[test]
fn message_that_finds_its_line_full_is_refused() {
    let block = Quota::block(2, SECOND * 60, SECOND * 600).unwrap();
    let mut world = World::new();
    let chat = patient(&world, steady().block("mute", block).unwrap()).max_in_line(1);
    let (timer, refusals) = (world.timer.clone(), Arc::new(Mutex::new(Vec::new())));
    let mut late = chat.messages(&head("alice"));
    // It runs first at 200 milliseconds, when a unit has come.
    world.spawn({
        let (timer, refusals) = (timer.clone(), Arc::clone(&refusals));
        async move {
            timer.sleep_until(Duration::from_millis(200)).await;
            for _ in 0..3 {
                let refused = late.admit(1).await.unwrap_err();
                let violated = refused.outcome().violated().map(|status| status.policy().name().to_owned());
                refusals.lock().unwrap().push((refused.kind(), refused.outcome().wait(), violated.collect::<Vec<_>>()));
            }
            Vec::new()
        }
    });
    let socket = world.spawn(send(chat.messages(&head("alice")), &timer, 2));
    world.pass(190 * MS);
    assert_eq!(chat.waiting(), 1);
    world.pass(5_000 * MS);
    assert_eq!(world.done[socket], Some(vec![Some(0), None]), "the two refusals before it are strikes");
    let [first, second, third] = &refusals.lock().unwrap()[..] else { panic!("three messages are refused") };
    assert_eq!((first, second), (&(OutcomeKind::Limited, Wait::Unknown, vec!["messages".to_owned()]), first));
    assert_eq!(third.0, OutcomeKind::Limited);
    let muted = world.spawn(send(chat.messages(&head("alice")), &timer, 1));
    assert_eq!(world.done[muted], Some(vec![None]));
    // Without a block, the message that waits gets the unit that has come.
    let mut world = World::new();
    let chat = patient(&world, steady()).max_in_line(1);
    let (timer, mut late) = (world.timer.clone(), chat.messages(&head("alice")));
    let late = world.spawn({
        let timer = timer.clone();
        async move {
            timer.sleep_until(Duration::from_millis(200)).await;
            vec![late.admit(1).await.ok().map(|_| timer.now_us() / MS)]
        }
    });
    let socket = world.spawn(send(chat.messages(&head("alice")), &timer, 2));
    world.pass(5_000 * MS);
    assert_eq!((&world.done[socket], &world.done[late]), (&Some(vec![Some(0), Some(200)]), &Some(vec![None])));
}

/// A message may go from the line of one rule to that of another, and others come meanwhile.
#[test]
fn messages_that_wait_for_two_rules_keep_their_order() {
    for seed in 0..cases(64) {
        let mut random = u64::from(seed);
        let mut draw = |below: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as usize % below
        };
        let mut world: World<()> = World::new();
        let count = Rule::new("count", Quota::per_second(10).burst(2).unwrap()).unwrap();
        let bytes = Rule::new("bytes", Quota::per_second(1_000).burst(600).unwrap()).unwrap().cost(message_units);
        let chat = patient(&world, count).and(bytes, by_user()).max_message_wait(SECOND * 100);
        let (came, passed) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(Vec::new())));
        for socket in 0..12_u64 {
            let (timer, mut messages) = (world.timer.clone(), chat.messages(&head("alice")));
            let (came, passed) = (Arc::clone(&came), Arc::clone(&passed));
            let plan: Vec<_> = (0..4).map(|_| (draw(700) as u64, [10, 30, 90, 300, 600][draw(5)])).collect();
            world.spawn(async move {
                for (number, (pause, units)) in (0..).zip(plan) {
                    timer.sleep_until(timer.now() + Duration::from_millis(pause)).await;
                    came.lock().unwrap().push((socket, number));
                    messages.admit(units).await.unwrap().keep();
                    passed.lock().unwrap().push((socket, number));
                }
            });
        }
        world.pass(60_000 * MS);
        assert_eq!(*passed.lock().unwrap(), *came.lock().unwrap(), "seed {seed}");
        assert_eq!((passed.lock().unwrap().len(), chat.waiting()), (48, 0));
    }
}

/// Quotas of each kind, of ten a second or of one a minute.
fn every_kind(limit: u64, period: Duration) -> [Quota; 6] {
    [
        Quota::token_bucket(limit, period).unwrap(),
        Quota::gcra(limit, period).unwrap(),
        Quota::leaky_bucket(limit, period).unwrap(),
        Quota::fixed_window(limit, period).unwrap(),
        Quota::sliding_window(limit, period).unwrap(),
        Quota::sliding_log(limit, period).unwrap(),
    ]
}

#[test]
fn waiting_message_asks_for_the_quota_in_force() {
    let (slow, fast) = (every_kind(1, SECOND * 60), every_kind(10, SECOND));
    for (before, after) in slow.iter().flat_map(|slow| fast.iter().map(move |fast| (*slow, *fast))) {
        let mut world = World::new();
        let quota = QuotaSwitch::new(before);
        let rule = Rule::switched("messages", &quota).unwrap();
        let chat = patient(&world, rule).max_message_wait(SECOND * 100);
        let timer = world.timer.clone();
        let sockets = [(); 3].map(|()| world.spawn(send(chat.messages(&head("alice")), &timer, 1)));
        world.pass(5_000 * MS);
        quota.set(after).unwrap();
        world.pass(0); // the tasks that were woken run
        world.pass(1_000 * MS);
        for socket in &sockets[1..] {
            let at = world.done[*socket].clone().and_then(|sent| sent[0]);
            assert!(at.is_some_and(|at| (5_000..=5_200).contains(&at)), "from {before} to {after}: at {at:?}");
        }
        // The smaller one holds for those that wait, too.
        let mut world = World::new();
        let quota = QuotaSwitch::new(after);
        let chat = patient(&world, Rule::switched("messages", &quota).unwrap()).max_message_wait(SECOND);
        let timer = world.timer.clone();
        let sockets = [(); 12].map(|()| world.spawn(send(chat.messages(&head("alice")), &timer, 1)));
        world.pass(50 * MS);
        quota.set(before).unwrap();
        world.pass(0);
        world.pass(2_000 * MS);
        let late: Vec<u64> = sockets.iter().filter_map(|socket| world.done[*socket].clone()?[0]).collect();
        let late: Vec<u64> = late.into_iter().filter(|at| *at > 50).collect();
        // What was used comes back as under the quota of before. Then the smaller one admits one message.
        assert!(late.len() <= 1, "from {after} to {before}: {late:?}");
        assert_eq!(chat.waiting(), 0);
    }
}

#[test]
fn waiting_message_is_answered_by_the_quota_in_force() {
    let limit = Arc::new(AtomicU64::new(1));
    let mut world = World::new();
    let quota = {
        let limit = Arc::clone(&limit);
        move |_: &tower_ratelimit::Head<'_>| Quota::fixed_window(limit.load(Ordering::Relaxed), SECOND * 60).unwrap()
    };
    let rule = Rule::quota_from("messages", quota).unwrap();
    let chat = patient(&world, rule).max_message_wait(SECOND * 100);
    let timer = world.timer.clone();
    world.spawn(send(chat.messages(&head("alice")), &timer, 1));
    let (limits, mut messages) = (Arc::new(Mutex::new(Vec::new())), chat.messages(&head("alice")));
    world.spawn({
        let limits = Arc::clone(&limits);
        async move {
            let admission = messages.admit(1).await.unwrap();
            let limit = admission.outcome().policies()[0].policy().quota().limit();
            limits.lock().unwrap().push((timer.now_us() / MS, limit));
            admission.keep();
            Vec::new()
        }
    });
    limit.store(7, Ordering::Relaxed);
    world.pass(20_000 * MS);
    // No one says that requests bring another quota now: the first in line asks again after ten seconds.
    assert_eq!(*limits.lock().unwrap(), [(10_000, 7)]);
}

/// A layer of one message a minute, whose quota and mode can be switched, and its messages wait.
struct Switched<L: Limiter> {
    chat: RateLimitLayer<L>,
    quota: QuotaSwitch,
    mode: ModeSwitch,
    /// The message that took the unit.
    first: Arc<Mutex<Option<Admission>>>,
}

impl<L: Limiter> Clone for Switched<L> {
    fn clone(&self) -> Self {
        let (chat, first) = (self.chat.clone(), Arc::clone(&self.first));
        Self { chat, quota: self.quota.clone(), mode: self.mode.clone(), first }
    }
}

impl<L: Limiter> Switched<L> {
    fn new(limiter: L, world: &World<impl Sized>) -> Self {
        let (quota, mode) = (QuotaSwitch::new(Quota::per_minute(1)), ModeSwitch::new(Mode::Enforce));
        let rule = Rule::switched("messages", &quota).unwrap().mode(&mode);
        let chat = RateLimitLayer::new(limiter, rule, by_user()).timer(world.timer.clone());
        let chat = chat.max_message_wait(100 * SECOND);
        let first = at_once(chat.messages(&head("alice")).admit(1)).unwrap();
        Self { chat, quota, mode, first: Arc::new(Mutex::new(Some(first))) }
    }

    /// Lets the next message pass at once, in one of [`CHANGES`].
    fn change(&self, change: &str) {
        match change {
            "quota" => drop(self.quota.set(Quota::per_second(10)).unwrap()),
            "mode" => drop(self.mode.set(Mode::Shadow)),
            "refund" => self.first.lock().unwrap().take().unwrap().refund(),
            _ => {
                let alice = Key::of("alice").unwrap();
                assert!(at_once(self.chat.reset(&alice)).is_ok());
            }
        }
    }
}

const CHANGES: [&str; 4] = ["quota", "mode", "refund", "reset"];

#[test]
fn waiting_message_passes_when_a_change_lets_it() {
    for change in CHANGES {
        let mut world = World::new();
        let switched = Switched::new(memory(&world.clock), &world);
        let (timer, chat) = (world.timer.clone(), &switched.chat);
        let sockets = [(); 2].map(|()| world.spawn(send(chat.messages(&head("alice")), &timer, 1)));
        world.pass(5_000 * MS);
        switched.change(change);
        world.pass(0); // the tasks that were woken run
        assert_eq!(world.done[sockets[0]], Some(vec![Some(5_000)]), "{change}");
        world.pass(100_000 * MS);
        assert_eq!(chat.waiting(), 0, "{change}");
    }
    // The layer does not learn that its limiter was reset.
    let mut world = World::new();
    let limiter = memory(&world.clock);
    let chat = Switched::new(limiter.clone(), &world).chat;
    let timer = world.timer.clone();
    let socket = world.spawn(send(chat.messages(&head("alice")), &timer, 1));
    world.pass(5_000 * MS);
    limiter.reset_now(&chat.policies()[0], &Key::of("alice").unwrap());
    world.pass(20_000 * MS);
    assert_eq!(world.done[socket], Some(vec![Some(10_000)]));
}

/// A function, and the number of denials after which it runs.
type Meddle = (u32, Box<dyn FnOnce() + Send>);

/// A limiter that runs a function after a denial, before its caller gets the answer.
#[derive(Clone)]
struct Meddled {
    limiter: MemoryLimiter,
    is_later: bool,
    meddle: Arc<Mutex<Option<Meddle>>>,
}

impl Limiter for Meddled {
    type Error = Infallible;
    type Future<T: Send + 'static> = std::future::Ready<Result<T, Infallible>>;

    fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, Infallible, Self::Future<Decision>> {
        let decision = self.limiter.take_now(charges);
        let mut meddle = self.meddle.lock().unwrap();
        if let Some((denials, _)) = meddle.as_mut().filter(|_| !decision.is_allowed()) {
            *denials = denials.saturating_sub(1);
        }
        let due = meddle.take_if(|(denials, _)| *denials == 0);
        drop(meddle);
        due.into_iter().for_each(|(_, meddle)| meddle());
        match self.is_later {
            true => Reply::Later(std::future::ready(Ok(decision))),
            false => Reply::Now(Ok(decision)),
        }
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

/// No message waits yet, so the change wakes none.
#[test]
fn change_just_before_a_message_joins_its_line_is_seen() {
    for (change, is_later) in CHANGES.iter().flat_map(|change| [(change, false), (change, true)]) {
        let mut world = World::new();
        let limiter = Meddled { limiter: memory(&world.clock), is_later, meddle: Arc::default() };
        let switched = Switched::new(limiter.clone(), &world);
        let (timer, chat) = (world.timer.clone(), switched.chat.clone());
        *limiter.meddle.lock().unwrap() = Some((1, Box::new(move || switched.change(change))));
        let socket = world.spawn(send(chat.messages(&head("alice")), &timer, 1));
        assert_eq!(world.done[socket], Some(vec![Some(0)]), "{change}, later: {is_later}");
        assert_eq!(chat.waiting(), 0);
    }
}

/// A limiter over a store that gets each call after the time that is next in the list.
#[derive(Clone)]
struct Uneven(MemoryLimiter, ManualTimer, Arc<Mutex<Vec<u64>>>);

impl Limiter for Uneven {
    type Error = Infallible;
    type Future<T: Send + 'static> = Pin<Box<dyn Future<Output = Result<T, Infallible>> + Send>>;

    fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, Infallible, Self::Future<Decision>> {
        let (Self(limiter, timer, trips), charge) = (self.clone(), &charges[0]);
        let (policy, key, cost) = (charge.policy.clone(), charge.key.clone(), charge.cost);
        let gets_it = timer.now() + Duration::from_millis(trips.lock().unwrap().pop().unwrap_or(0));
        Reply::Later(Box::pin(async move {
            timer.sleep_until(gets_it).await;
            Ok(limiter.take_now(&[Charge::new(&policy, &key).cost(cost)]))
        }))
    }

    fn peek(&self, charges: &[Charge<'_>]) -> Reply<Decision, Infallible, Self::Future<Decision>> {
        Reply::Now(Ok(self.0.peek_now(charges)))
    }

    fn refund(&self, refunds: Vec<Refund>) -> Reply<(), Infallible, Self::Future<()>> {
        self.0.refund_now(&refunds);
        Reply::Now(Ok(()))
    }

    fn reset(&self, policy: &Policy, key: &Key) -> Reply<(), Infallible, Self::Future<()>> {
        self.0.reset_now(policy, key);
        Reply::Now(Ok(()))
    }
}

#[test]
fn far_store_decides_messages_in_the_order_of_their_calls() {
    let mut world = World::new();
    let trips = Arc::new(Mutex::new(vec![5, 20]));
    let limiter = Uneven(memory(&world.clock), world.timer.clone(), trips);
    let chat = RateLimitLayer::new(limiter, steady(), by_user()).timer(world.timer.clone()).max_message_wait(SECOND);
    let timer = world.timer.clone();
    let [first, second, third] = [(); 3].map(|()| world.spawn(send(chat.messages(&head("alice")), &timer, 1)));
    world.pass(1_000 * MS);
    let passed = [third, second, first].map(|socket| world.done[socket].clone().unwrap()[0]);
    assert_eq!(passed, [Some(0), Some(200), Some(400)]);
}

/// A message that has its turn in the line of one rule may have to go to the line of another.
#[test]
fn change_just_before_a_message_changes_lines_is_seen() {
    let mut world = World::new();
    let limiter = Meddled { limiter: memory(&world.clock), is_later: false, meddle: Arc::default() };
    let switched = Switched::new(limiter.clone(), &world);
    let chat = switched.chat.clone().and(Rule::new("others", Quota::per_minute(1)).unwrap(), by_user());
    let (alice, others) = (Key::of("alice").unwrap(), chat.policies()[1].clone());
    assert!(limiter.limiter.take_one(&others, &alice, 1).is_allowed());
    let timer = world.timer.clone();
    let socket = world.spawn(send(chat.messages(&head("alice")), &timer, 1));
    world.pass(5_000 * MS);
    *limiter.meddle.lock().unwrap() = Some((1, {
        let chat = chat.clone();
        Box::new(move || at_once(chat.reset(&alice)).unwrap())
    }));
    switched.change("quota");
    world.pass(0);
    assert_eq!(world.done[socket], Some(vec![Some(5_000)]));
    assert_eq!(chat.waiting(), 0);
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

/// A stream that must not be polled after its end.
struct Ends(u64);

impl Stream for Ends {
    type Item = u64;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<u64>> {
        self.0 = self.0.checked_sub(1).expect("it is not polled after its end");
        Poll::Ready(Some(self.0).filter(|left| *left > 0))
    }
}

#[tokio::test]
async fn stream_stays_at_its_end() {
    let chat = Chat::new(MemoryLimiter::new(), Rule::new("messages", Quota::per_hour(9)).unwrap(), by_user());
    let mut stream = chat.messages(&head("alice")).limit(Ends(3), |_| 1);
    assert!(stream.next().await.unwrap().is_ok() && stream.next().await.unwrap().is_ok());
    for _ in 0..3 {
        assert!(stream.next().await.is_none() && stream.is_terminated());
    }
}

#[test]
fn message_of_any_cost_is_decided_at_once_or_waits() {
    let mut world = World::new();
    let bytes = Rule::new("bytes", Quota::per_second(100).burst(100).unwrap()).unwrap().cost(message_units);
    let chat = patient(&world, bytes);
    let (timer, mut messages) = (world.timer.clone(), chat.messages(&head("alice")));
    let decided = world.spawn(async move {
        let mut decided = Vec::new();
        for units in [0, 100, 101, u64::MAX, 0, 1, 100] {
            let at = timer.now_us() / MS;
            match messages.admit(units).await {
                Ok(_) => decided.push((units, timer.now_us() / MS - at, Wait::None)),
                Err(refused) => decided.push((units, timer.now_us() / MS - at, refused.outcome().wait())),
            }
        }
        decided
    });
    world.pass(10_000 * MS);
    let expected = [
        (0, 0, Wait::None),
        (100, 0, Wait::None),
        (101, 0, Wait::Never),
        (u64::MAX, 0, Wait::Never),
        (0, 0, Wait::None),
        (1, 10, Wait::None),
        (100, 1_000, Wait::None),
    ];
    assert_eq!(world.done[decided].clone().unwrap(), expected);
    assert_eq!(chat.waiting(), 0);
}

#[test]
fn waiting_messages_are_decided_by_any_quota_that_is_set() {
    const MOST: u64 = 999_999_999_999_999;
    let all = [Quota::unlimited(), Quota::per_second(MOST), Quota::fixed_window(MOST, SECOND).unwrap()];
    let none = [Quota::per_second(0), Quota::fixed_window(0, SECOND).unwrap()];
    for (quota, passes) in all.map(|quota| (quota, true)).into_iter().chain(none.map(|quota| (quota, false))) {
        let mut world = World::new();
        let switch = QuotaSwitch::new(Quota::per_minute(1));
        let chat = patient(&world, Rule::switched("messages", &switch).unwrap()).max_message_wait(SECOND * 600);
        let timer = world.timer.clone();
        let sockets = [(); 5].map(|()| world.spawn(send(chat.messages(&head("alice")), &timer, 1)));
        world.pass(MS);
        switch.set(quota).unwrap();
        world.pass(0);
        world.pass(1_000 * MS);
        let passed = sockets[1..].iter().map(|socket| world.done[*socket].as_ref().map(|sent| sent[0].is_some()));
        assert_eq!(passed.collect::<Vec<_>>(), [Some(passes); 4], "{quota}");
        assert_eq!(chat.waiting(), 0);
    }
}

#[test]
fn message_dropped_after_any_poll_leaves_nothing() {
    for (polls, panics) in (0..6).flat_map(|polls| [(polls, false), (polls, true)]) {
        let mut world = World::new();
        let limiter = memory(&world.clock);
        let queue = Rule::new("queue", Quota::leaky_queue(10, SECOND).unwrap().queue(5).unwrap()).unwrap();
        let count = Rule::new("count", Quota::per_hour(10)).unwrap();
        let chat = Chat::new(limiter.clone(), queue, by_user()).and(count, by_user());
        let chat = chat.timer(world.timer.clone()).max_message_wait(SECOND);
        let (mut first, mut second) = (chat.messages(&head("alice")), chat.messages(&head("alice")));
        world.spawn(async move { first.admit(1).await.is_ok() });
        let admitted = Polled::new(async move { second.admit(1).await.is_ok() }, polls, panics);
        let dropped = world.spawn(async move { admitted.await.is_some() });
        assert_eq!(world.done[dropped], Some(false), "it waits for its departure");
        let alice = Key::of("alice").unwrap();
        let policies = chat.policies();
        let left: Vec<u64> = policies.iter().map(|own| limiter.peek_one(own, &alice, 0).remaining()).collect();
        assert_eq!((left, chat.waiting()), (vec![5, 9], 0), "after {polls} polls");
    }
}

/// It waits in line, or asks, when it is dropped.
#[test]
fn message_dropped_in_line_lets_the_next_one_go() {
    for (polls, panics) in (0..6).flat_map(|polls| [(polls, false), (polls, true)]) {
        let mut world = World::new();
        let chat = patient(&world, steady());
        let (timer, mut second) = (world.timer.clone(), chat.messages(&head("alice")));
        world.spawn(send(chat.messages(&head("alice")), &timer, 1));
        let dropped = Polled::new(async move { second.admit(1).await.is_ok() }, polls, panics);
        let dropped = world.spawn(async move { dropped.await.into_iter().map(|_| None).collect() });
        let last = world.spawn(send(chat.messages(&head("alice")), &timer, 1));
        world.pass(1_000 * MS);
        assert_eq!(world.done[dropped], Some(vec![]), "it waits for a unit");
        assert_eq!(world.done[last], Some(vec![Some(200)]), "after {polls} polls");
        assert_eq!(chat.waiting(), 0);
    }
}

/// A process may have several runtimes, and one of them ends with the sockets that wait.
#[test]
fn runtime_that_ends_leaves_the_messages_of_another() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let rule = Rule::new("messages", Quota::per_second(5).burst(1).unwrap()).unwrap();
    let chat = Chat::new(MemoryLimiter::new(), rule, by_user()).timer(TokioTimer::new()).max_message_wait(SECOND * 60);
    let ends = runtime();
    ends.block_on(async {
        for _ in 0..20 {
            let mut messages = chat.messages(&head("alice"));
            tokio::spawn(async move { messages.admit(1).await.is_ok() });
        }
        tokio::task::yield_now().await;
    });
    // A machine that stops for a moment lets more than one pass.
    assert!((1..20).contains(&chat.waiting()), "{} wait", chat.waiting());
    let (other, mut messages) = (runtime(), chat.messages(&head("alice")));
    let waiting = std::thread::spawn(move || {
        other.block_on(async {
            for _ in 0..3 {
                messages.admit(1).await.unwrap().keep();
            }
        });
    });
    drop(ends);
    waiting.join().unwrap();
    assert_eq!(chat.waiting(), 0);
}
