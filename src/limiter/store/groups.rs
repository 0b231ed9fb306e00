//! Collects the requests for keys that are being swapped.
//!
//! Requests that are joined by keys are a group, and a group has one flight at a time: requests that come meanwhile
//! wait, and go together in the next one. When a flight is back, the requests that wait are grouped anew. A request
//! whose keys are in no group begins one, so it waits for no timer. A flight is a task of the limiter's runtime, or
//! driven by its caller as long as no other request waits for it.
//!
//! A request can join groups whose flights are under way. When one of them is back, the requests that wait are grouped
//! anew in their order, and a group goes before a later request would join it to another flight. So no request waits
//! for flights with other keys that began after it came.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use smallvec::{SmallVec, smallvec};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::error::StoreError;
use super::working_copy::{Answer, Request};
use crate::limiter::remote::{Driven, Due, GRACE, Permit, Permits, Receiver, Ride, Then, Unanswered, hand_over};
use crate::sync::{Mutex, lock};

/// The most requests of one flight. Decided at about a microsecond each, they hold its task for a millisecond.
const BATCH: usize = 1_024;

/// The most keys of a flight, unless one request has more.
const KEYS: usize = 64;

/// The hashes of the keys of a flight.
type Keys = SmallVec<[u64; 4]>;

/// A request on its way.
pub(super) struct Waiting {
    pub(super) request: Request,
    pub(super) receiver: Box<dyn Receiver<Answer, StoreError>>,
    /// The number of requests that came before.
    number: u64,
    is_sent: Arc<AtomicBool>,
    _permit: Permit,
}

/// Takes requests to the store.
pub(super) trait Fly: Send + Sync + 'static {
    /// Answers the requests of one flight. Returns for how long the next flight with their keys is to wait.
    fn fly(&self, batch: Vec<Waiting>) -> impl Future<Output = Duration> + Send;

    /// Returns how many flights the store has answered.
    fn answered(&self) -> u64;
}

/// The groups of a limiter.
pub(super) struct Groups<F: Fly>(Arc<Shared<F>>);

struct Shared<F: Fly> {
    fly: F,
    groups: Mutex<Table>,
    came: AtomicU64,
    permits: Permits,
    deadline: Duration,
    runtime: Handle,
}

#[derive(Default)]
struct Table {
    /// The number of the group that a key is in, by the key's hash.
    of_keys: HashMap<u64, u64, foldhash::fast::RandomState>,
    groups: HashMap<u64, Group, foldhash::fast::RandomState>,
    next: u64,
}

/// Requests that are joined by keys. Each group has a flight.
#[derive(Default)]
struct Group {
    keys: Vec<u64>,
    waiting: VecDeque<Waiting>,
    /// The keys of each flight: more than one if groups became one while theirs were under way.
    flights: SmallVec<[Keys; 1]>,
    /// The flights that callers drive.
    rides: Vec<Arc<Ride>>,
}

/// The driver of a flight that a request begins.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Driver {
    Caller,
    Task,
}

impl<F: Fly> Groups<F> {
    /// Makes the groups of a limiter with room for `most` requests. Flights are tasks of this runtime.
    pub(super) fn new(fly: F, most: usize, deadline: Duration, runtime: Handle) -> Self {
        let permits = Permits::new(most);
        Self(Arc::new(Shared { fly, groups: Mutex::default(), came: AtomicU64::new(0), permits, deadline, runtime }))
    }

    pub(super) fn fly(&self) -> &F {
        &self.0.fly
    }

    /// Returns the runtime whose tasks the flights are.
    pub(super) fn runtime(&self) -> &Handle {
        &self.0.runtime
    }

    /// Returns how many keys have requests that wait or are in flight.
    #[cfg(test)]
    pub(super) fn keys(&self) -> usize {
        lock(&self.0.groups).of_keys.len()
    }

    /// Returns how many requests wait or are in flight.
    pub(super) fn len(&self) -> usize {
        self.0.permits.taken()
    }

    /// Waits for the answer to a request, no longer than the deadline.
    pub(super) async fn ask<T, R: Receiver<Answer, StoreError> + 'static>(
        &self,
        request: Request,
        receiver: impl FnOnce(oneshot::Sender<T>) -> R,
    ) -> Result<T, StoreError> {
        if Handle::try_current().is_err() {
            return Err(Unanswered::NoRuntime.into());
        }
        let permit = self.0.permits.check()?;
        let (sender, answer) = oneshot::channel();
        let (is_sent, answered) = (Arc::new(AtomicBool::new(false)), self.0.fly.answered());
        let driven = self.0.push(request, Box::new(receiver(sender)), permit, &is_sent, Driver::Caller);
        let due = Due::after(self.0.deadline + GRACE);
        match driven.wait(answer, due).await {
            Some(Ok(answer)) => Ok(answer),
            Some(Err(_)) => Err(Unanswered::RuntimeEnded.into()),
            None if due.is_late() => Err(Unanswered::TooBusy(self.0.deadline).into()),
            // The store answered others while the request waited for its turn.
            None if !is_sent.load(Ordering::Relaxed) && self.0.fly.answered() != answered => {
                Err(Unanswered::NotSent(self.0.deadline).into())
            }
            None => Err(Unanswered::TimedOut(self.0.deadline).into()),
        }
    }

    /// Sends a request, and has its answer handed to a function.
    pub(super) fn send(
        &self,
        request: Request,
        then: impl FnOnce(Result<Answer, StoreError>) + Send + 'static,
    ) -> Result<(), StoreError> {
        let permit = self.0.permits.correction()?;
        self.0.push(request, Box::new(Then::new(then)), permit, &Arc::default(), Driver::Task);
        Ok(())
    }
}

impl<F: Fly> Shared<F> {
    fn push(
        self: &Arc<Self>,
        request: Request,
        receiver: Box<dyn Receiver<Answer, StoreError>>,
        permit: Permit,
        is_sent: &Arc<AtomicBool>,
        driver: Driver,
    ) -> Driven {
        let number = self.came.fetch_add(1, Ordering::Relaxed);
        let waiting = Waiting { request, receiver, number, is_sent: Arc::clone(is_sent), _permit: permit };
        let mut table = lock(&self.groups);
        let number = table.join(waiting);
        let boarded = match table.groups.get_mut(&number) {
            Some(group) if group.flights.is_empty() => Ok(group.board()),
            Some(group) => Err(std::mem::take(&mut group.rides)), // it waits for these
            None => Err(Vec::new()),
        };
        let (batch, keys) = match boarded {
            Ok(boarded) => boarded,
            Err(rides) => {
                drop(table);
                rides.iter().for_each(|ride| ride.make_task());
                return Driven::by_task();
            }
        };
        let flight = Flight::new(Arc::clone(self), keys);
        if driver == Driver::Task {
            drop(table);
            self.runtime.spawn(flight.fly(batch));
            return Driven::by_task();
        }
        let ride = Ride::new(flight.fly(batch), self.runtime.clone());
        if let Some(group) = table.groups.get_mut(&number) {
            group.rides.push(Arc::clone(&ride));
        }
        Driven::by_caller(ride)
    }

    /// Answers the requests of one flight. A store that panics fails these only. Returns for how long the next flight
    /// with their keys is to wait.
    async fn fly(&self, batch: Vec<Waiting>) -> Duration {
        AssertUnwindSafe(self.fly.fly(batch)).catch_unwind().await.unwrap_or_default()
    }
}

impl Table {
    /// Adds a request to the group of its keys. Groups that it joins become one. Returns the number of the group.
    fn join(&mut self, waiting: Waiting) -> u64 {
        let mut joined: SmallVec<[u64; 4]> = SmallVec::new();
        for charge in &waiting.request.charges {
            if let Some(number) = self.of_keys.get(&charge.hash).filter(|number| !joined.contains(number)) {
                joined.push(*number);
            }
        }
        let size = |number: &u64| self.groups.get(number).map_or(0, |group| group.keys.len());
        let number = joined.iter().copied().max_by_key(size).unwrap_or_else(|| self.number());
        let mut own = self.groups.remove(&number).unwrap_or_default();
        for other in joined.into_iter().filter(|other| *other != number) {
            let Some(mut other) = self.groups.remove(&other) else { continue };
            self.of_keys.extend(other.keys.iter().map(|key| (*key, number)));
            own.keys.append(&mut other.keys);
            own.flights.append(&mut other.flights);
            own.rides.append(&mut other.rides);
            own.waiting.append(&mut other.waiting);
            own.waiting.make_contiguous().sort_by_key(|waiting| waiting.number);
        }
        for charge in &waiting.request.charges {
            if self.of_keys.insert(charge.hash, number).is_none() {
                own.keys.push(charge.hash);
            }
        }
        own.waiting.push_back(waiting);
        self.groups.insert(number, own);
        number
    }

    /// Returns a number for a new group.
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Ends a flight with these keys. Returns the requests of its group that waited, and whether other flights of the
    /// group are under way. These are groups of their own from now on.
    fn end(&mut self, keys: &[u64]) -> (VecDeque<Waiting>, bool) {
        let number = keys.first().and_then(|key| self.of_keys.get(key)).copied();
        let Some(group) = number.and_then(|number| self.groups.remove(&number)) else { return Default::default() };
        for key in &group.keys {
            self.of_keys.remove(key);
        }
        debug_assert!(group.flights.len() < 2 || group.rides.is_empty(), "a request that joined them made them tasks");
        let has_others = group.flights.len() > 1;
        // A key is in one flight at a time.
        for flight in group.flights.into_iter().filter(|flight| flight.first() != keys.first()) {
            let number = self.number();
            self.of_keys.extend(flight.iter().map(|key| (*key, number)));
            self.groups.insert(number, Group { keys: flight.to_vec(), flights: smallvec![flight], ..Group::default() });
        }
        (group.waiting, has_others)
    }

    /// Begins a flight of each group without one that the request would join to one with a flight.
    fn board_before(&mut self, request: &Request) -> Vec<(Vec<Waiting>, Keys)> {
        let numbers = request.charges.iter().filter_map(|charge| self.of_keys.get(&charge.hash)).copied();
        let numbers: Vec<u64> = numbers.collect();
        let has_flight = |number: &u64| self.groups.get(number).is_some_and(|group| !group.flights.is_empty());
        if numbers.iter().any(has_flight) { self.board(numbers) } else { Vec::new() }
    }

    /// Begins a flight of each of these groups that has none.
    fn board(&mut self, mut numbers: Vec<u64>) -> Vec<(Vec<Waiting>, Keys)> {
        numbers.sort_unstable();
        numbers.dedup();
        let mut boarded = Vec::new();
        for number in numbers {
            // A group that another one joined is not there any more.
            if let Some(group) = self.groups.get_mut(&number).filter(|group| group.flights.is_empty()) {
                boarded.push(group.board());
            }
        }
        boarded
    }
}

impl Group {
    /// Begins a flight. Returns the requests that it takes, and their keys.
    fn board(&mut self) -> (Vec<Waiting>, Keys) {
        let (mut batch, mut keys) = (Vec::new(), Keys::new());
        while let Some(next) = self.waiting.pop_front() {
            let before = keys.len();
            for charge in &next.request.charges {
                if !keys.contains(&charge.hash) {
                    keys.push(charge.hash);
                }
            }
            if !batch.is_empty() && (keys.len() > KEYS.max(before) || batch.len() == BATCH) {
                keys.truncate(before);
                self.waiting.push_front(next);
                break;
            }
            next.is_sent.store(true, Ordering::Relaxed);
            batch.push(next);
        }
        self.flights.push(keys.clone());
        (batch, keys)
    }
}

/// A flight, which is counted in the group of its keys.
struct Flight<F: Fly> {
    shared: Arc<Shared<F>>,
    keys: Keys,
    has_landed: bool,
}

impl<F: Fly> Flight<F> {
    fn new(shared: Arc<Shared<F>>, keys: Keys) -> Self {
        Self { shared, keys, has_landed: false }
    }

    /// Takes requests to the store until none waits for them, or the next ones are to wait.
    async fn fly(mut self, batch: Vec<Waiting>) {
        let shared = Arc::clone(&self.shared);
        let mut next = Some(batch);
        while let Some(batch) = next {
            let rest = shared.fly(batch).await;
            if !rest.is_zero() {
                // A task waits: a caller that drives the flight has its answer.
                shared.runtime.spawn(self.rest(rest));
                return;
            }
            next = self.land();
        }
    }

    /// Waits, and goes on.
    async fn rest(mut self, mut rest: Duration) {
        let shared = Arc::clone(&self.shared);
        loop {
            if !rest.is_zero() {
                Due::after(rest).wait().await;
            }
            let Some(batch) = self.land() else { return };
            rest = shared.fly(batch).await;
        }
    }

    /// Ends the flight, and begins those for which requests wait. Returns the batch of the first, which this one goes
    /// on with.
    fn land(&mut self) -> Option<Vec<Waiting>> {
        let (mut gone, mut numbers, mut boarded) = (Vec::new(), Vec::new(), Vec::new());
        {
            let mut table = lock(&self.shared.groups);
            let (waited, has_others) = table.end(&self.keys);
            for waiting in waited {
                if waiting.receiver.is_gone() {
                    gone.push(waiting);
                    continue;
                }
                if has_others {
                    boarded.append(&mut table.board_before(&waiting.request));
                }
                numbers.push(table.join(waiting));
            }
            boarded.append(&mut table.board(numbers));
        }
        drop(gone); // not under the lock: a receiver that is dropped may send a refund
        self.has_landed = true;
        let mut boarded = boarded.into_iter();
        let own = boarded.next();
        for (batch, keys) in boarded {
            let flight = Self::new(Arc::clone(&self.shared), keys);
            self.shared.runtime.spawn(flight.fly(batch));
        }
        own.map(|(batch, keys)| {
            (self.keys, self.has_landed) = (keys, false);
            batch
        })
    }
}

impl<F: Fly> Drop for Flight<F> {
    /// Fails the requests that wait for the flight if it did not land: the runtime has ended.
    fn drop(&mut self) {
        if self.has_landed {
            return;
        }
        let (left, _) = lock(&self.shared.groups).end(&self.keys);
        for next in left {
            hand_over(next.receiver, Err(Unanswered::RuntimeEnded.into()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::super::working_copy::{KeyedCharge, Verb};
    use super::*;
    use crate::algorithm::Pair;
    use crate::limiter::Effect;
    use crate::limiter::remote::Claim;
    use crate::policy::Policy;
    use crate::quota::Quota;

    const MS: Duration = Duration::from_millis(1);

    const LONG: Duration = Duration::from_secs(20);

    /// The time of a round trip, and that of one with a key from `SLOW` on.
    const TRIP: Duration = Duration::from_millis(12);
    const SLOW_TRIP: Duration = Duration::from_millis(100);
    const SLOW: u64 = 1_000;

    /// A flight with this key panics.
    const PANICS: u64 = 999;

    /// A store that checks what it gets.
    #[derive(Clone, Default)]
    struct World(Arc<Seen>);

    #[derive(Default)]
    struct Seen {
        /// Whether trips take a random time, are followed by a rest, and end by a panic.
        is_random: bool,
        count: AtomicU64,
        /// The keys that are in flight.
        flying: Mutex<HashSet<u64>>,
        /// The number of the last request of each key.
        last: Mutex<HashMap<u64, u64>>,
        /// Rules that a flight broke. A flight may panic, so an assertion in it would tell nobody.
        broken: Mutex<Vec<&'static str>>,
    }

    impl World {
        fn expects(&self, holds: bool, rule: &'static str) {
            if !holds {
                lock(&self.0.broken).push(rule);
            }
        }

        fn random(&self) -> u64 {
            crate::random::mixed(self.0.count.fetch_add(1, Ordering::Relaxed))
        }
    }

    /// The keys of a flight, until it ends in any way.
    struct Flies<'a>(&'a Seen, HashSet<u64>);

    impl Drop for Flies<'_> {
        fn drop(&mut self) {
            lock(&self.0.flying).retain(|hash| !self.1.contains(hash));
        }
    }

    impl Fly for World {
        async fn fly(&self, batch: Vec<Waiting>) -> Duration {
            let mut keys = HashSet::new();
            for waiting in &batch {
                for KeyedCharge { hash, .. } in &waiting.request.charges {
                    keys.insert(*hash);
                    let before = lock(&self.0.last).insert(*hash, waiting.number);
                    self.expects(before.is_none_or(|before| before <= waiting.number), "requests of a key go in order");
                }
            }
            self.expects(!batch.is_empty(), "a flight has requests");
            self.expects(keys.len() <= KEYS && batch.len() <= BATCH, "a flight is bounded");
            self.expects(lock(&self.0.flying).is_disjoint(&keys), "a key is in one flight");
            lock(&self.0.flying).extend(&keys);
            let trip = if keys.iter().any(|key| *key >= SLOW) { SLOW_TRIP } else { TRIP };
            let panics = keys.contains(&PANICS);
            let _flies = Flies(&self.0, keys);
            let random = if self.0.is_random { self.random() } else { 0 };
            tokio::time::sleep(if self.0.is_random { MS * (random % 30) as u32 } else { trip }).await;
            assert!(!panics && (!self.0.is_random || random >> 8 & 63 != 0), "a store that panics");
            batch.into_iter().for_each(|waiting| waiting.receiver.answer(Ok(Answer::Done)));
            if self.0.is_random && random >> 16 & 3 == 0 { 5 * MS } else { Duration::ZERO }
        }

        fn answered(&self) -> u64 {
            0
        }
    }

    fn request(hashes: &[u64]) -> Request {
        let policy = Policy::new("policy", Quota::per_minute(1)).unwrap();
        let charge = |hash: &u64| KeyedCharge {
            key: hash.to_string().into(),
            hash: *hash,
            policy: policy.clone(),
            cost: 1,
            effect: Effect::Enforce,
            own: Pair { at: 0, n: 0 },
            claim: Claim::default(),
        };
        Request::of(Verb::Take, hashes.iter().map(charge))
    }

    type Called = tokio::task::JoinHandle<Duration>;

    /// Asks for these keys. The result is the time until the answer.
    fn asks(groups: &Arc<Groups<World>>, hashes: &[u64]) -> Called {
        let (groups, request) = (Arc::clone(groups), request(hashes));
        tokio::spawn(async move {
            let began = tokio::time::Instant::now();
            let answer = groups.ask(request, |sender: oneshot::Sender<_>| sender).await;
            assert!(matches!(answer, Ok(Ok(Answer::Done))));
            began.elapsed()
        })
    }

    /// A request before it waits for a slow flight, and one after it would join it to another one.
    #[tokio::test(start_paused = true)]
    async fn request_waits_for_no_flight_that_a_later_request_waits_for() {
        let groups = Arc::new(Groups::new(World::default(), 1_000, LONG, Handle::current()));
        let mut calls = Vec::new();
        for keys in [&[1, 2][..], &[SLOW], &[2, SLOW], &[1], &[SLOW + 1], &[1, SLOW + 1]] {
            calls.push(asks(&groups, keys));
            tokio::time::sleep(MS).await;
        }
        let waited = calls.swap_remove(3).await.unwrap();
        assert_eq!(waited, TRIP - 3 * MS + TRIP);
        for call in calls {
            assert!(call.await.unwrap() <= 2 * SLOW_TRIP);
        }
        assert_eq!(*lock(&groups.fly().0.broken), [""; 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn panic_fails_the_requests_of_its_flight_only() {
        let groups = Arc::new(Groups::new(World::default(), 1_000, LONG, Handle::current()));
        for _ in 0..3 {
            let panics = asks(&groups, &[1, PANICS]);
            tokio::time::sleep(MS).await;
            let others = [asks(&groups, &[1]), asks(&groups, &[1, 2])];
            assert!(panics.await.is_err());
            for other in others {
                assert_eq!(other.await.unwrap(), TRIP - MS + TRIP);
            }
        }
        assert_eq!((groups.len(), groups.keys()), (0, 0));
        assert_eq!(*lock(&groups.fly().0.broken), [""; 0]);
    }

    /// Callers come and go, flights last and rest for random times, and some panic.
    #[tokio::test(start_paused = true)]
    async fn each_request_is_answered_and_no_key_is_in_two_flights() {
        let world = World(Arc::new(Seen { is_random: true, ..Seen::default() }));
        let groups = Arc::new(Groups::new(world.clone(), 10_000, LONG, Handle::current()));
        let (mut asked, mut sent) = (Vec::new(), 0);
        let answered = Arc::new(AtomicU64::new(0));
        for _ in 0..20_000 {
            let random = world.random();
            let keys = 1 + random % 3;
            let hashes: Vec<u64> = (0..keys).map(|at| (random >> (8 * at + 8) & 255) % (8 + 100 * at)).collect();
            if random >> 40 & 3 == 0 {
                let answered = Arc::clone(&answered);
                groups.send(request(&hashes), move |_| _ = answered.fetch_add(1, Ordering::Relaxed)).unwrap();
                sent += 1;
            } else {
                let groups = Arc::clone(&groups);
                asked.push(tokio::spawn(async move {
                    groups
                        .ask(request(&hashes), |sender: oneshot::Sender<_>| sender)
                        .await
                        .is_ok_and(|answer| answer.is_ok())
                }));
            }
            if random >> 44 & 3 == 0 && asked.len() > 10 {
                asked.swap_remove(asked.len() - 1 - (random >> 48) as usize % 10).abort();
            }
            tokio::time::sleep(MS * (random >> 56 & 3) as u32).await;
        }
        let (mut done, all) = (0, asked.len());
        for call in asked {
            done += usize::from(call.await.unwrap_or_default());
        }
        assert!(done > all * 2 / 3, "{done} of {all}");
        while groups.len() > 0 {
            tokio::time::sleep(MS).await;
        }
        tokio::time::sleep(6 * MS).await; // longer than a flight rests
        assert_eq!(answered.load(Ordering::Relaxed), sent);
        assert!(groups.keys() == 0 && lock(&groups.0.groups).groups.is_empty());
        assert_eq!(*lock(&groups.fly().0.broken), [""; 0]);
    }
}
