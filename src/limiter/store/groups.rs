//! Collects the requests for keys that are being swapped.
//!
//! Requests that are joined by keys are a group, and a group has one flight at a time: requests that come meanwhile
//! wait, and go together in the next one. When a flight is back, the requests that wait are grouped anew. A request
//! whose keys are in no group begins one, so it waits for no timer. A flight is a task of the limiter's runtime, or
//! driven by its caller as long as no other request waits for it.
//!
//! A request can join groups whose flights are under way. When one of them is back, the first requests that wait go if
//! none of their keys is in another flight. So no request waits for flights with other keys that began after it came.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use smallvec::{SmallVec, smallvec};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::error::StoreError;
use super::working_copy::{Answer, Request};
use crate::limiter::remote::{Driven, Due, GRACE, Permit, Permits, Receiver, Ride, Then, Unanswered};
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

    /// Returns whether the request has a key of a group with a flight.
    fn is_in_flight(&self, request: &Request) -> bool {
        let numbers = request.charges.iter().filter_map(|charge| self.of_keys.get(&charge.hash));
        numbers.filter_map(|number| self.groups.get(number)).any(|group| !group.flights.is_empty())
    }

    /// Begins a flight of each of these groups that has none, and empties the list.
    fn board(&mut self, numbers: &mut Vec<u64>) -> Vec<(Vec<Waiting>, Keys)> {
        numbers.sort_unstable();
        numbers.dedup();
        let mut boarded = Vec::new();
        for number in numbers.drain(..) {
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
            let rest = shared.fly.fly(batch).await;
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
            rest = shared.fly.fly(batch).await;
        }
    }

    /// Ends the flight, and begins those for which requests wait. Returns the batch of the first, which this one goes
    /// on with.
    fn land(&mut self) -> Option<Vec<Waiting>> {
        let (mut gone, mut numbers, mut boarded) = (Vec::new(), Vec::new(), Vec::new());
        {
            let mut table = lock(&self.shared.groups);
            let (waited, mut may_be_held_up) = table.end(&self.keys);
            for waiting in waited {
                if waiting.receiver.is_gone() {
                    gone.push(waiting);
                    continue;
                }
                if may_be_held_up && table.is_in_flight(&waiting.request) {
                    // Those before it go, before it joins them to another flight.
                    boarded = table.board(&mut numbers);
                    may_be_held_up = false;
                }
                numbers.push(table.join(waiting));
            }
            boarded.append(&mut table.board(&mut numbers));
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
    /// Fails the requests that wait for the flight if it did not land: the runtime has ended, or code of the
    /// application panicked.
    fn drop(&mut self) {
        if self.has_landed {
            return;
        }
        let (left, _) = lock(&self.shared.groups).end(&self.keys);
        for next in left {
            next.receiver.answer(Err(Unanswered::RuntimeEnded.into()));
        }
    }
}
