//! The queue of a lane in which requests with a key in common share a flight.
//!
//! Requests that are linked by common keys form a group, and a key is in only one flight at a time. Requests
//! with a key of a flight under way wait, and share the next flight. When a flight has ended, the waiting
//! requests are grouped anew. Groups that share no key can share a flight.
//!
//! A request can make one group of several, even while their flights are under way. Before a request would join a
//! group that is ready to fly to a group in flight, the ready group is closed. So no request waits for a flight
//! that began after the request arrived and has none of its keys.

use std::collections::{HashMap, VecDeque};

use smallvec::{SmallVec, smallvec};
use tokio::time::Instant;

use super::batch::{Batch, LaneQueue, QueuedRequest, RemoteStore};

/// The maximum number of requests of one group. At about a microsecond for each request, such a group occupies
/// its flight for a millisecond.
const BATCH: usize = 1_024;

/// The maximum number of keys of a group, unless one request has more keys.
const KEYS: usize = 64;

/// The hashes of the keys of a flying group.
type Keys = SmallVec<[u64; 4]>;

/// A request that names its keys.
pub(crate) trait Keyed {
    /// Returns the hashes of the keys.
    fn keys(&self) -> impl Iterator<Item = u64>;
}

/// The waiting requests, in the groups of their keys.
pub(crate) struct Groups<F: RemoteStore> {
    /// The number of each key's group, by the key's hash.
    of_keys: HashMap<u64, u64, foldhash::fast::RandomState>,
    groups: HashMap<u64, KeyGroup<F>, foldhash::fast::RandomState>,
    /// The numbers of the groups that may fly, in order. Some numbers may belong to groups that have become part
    /// of other groups.
    ready: VecDeque<u64>,
    /// The number of groups that may fly.
    count: usize,
    /// The closed groups by their numbers. No further request joins a closed group.
    closed: HashMap<u64, (Keys, Vec<QueuedRequest<F>>), foldhash::fast::RandomState>,
    next: u64,
}

/// Requests that are linked by common keys.
struct KeyGroup<F: RemoteStore> {
    keys: Vec<u64>,
    waiting: VecDeque<QueuedRequest<F>>,
    /// The keys of each flight. A group has several flights if groups were joined while their flights were
    /// under way.
    flights: SmallVec<[Keys; 1]>,
    /// True if the group's number is in the queue of groups that may fly.
    is_ready: bool,
}

impl<F: RemoteStore> Default for KeyGroup<F> {
    fn default() -> Self {
        Self { keys: Vec::new(), waiting: VecDeque::new(), flights: SmallVec::new(), is_ready: false }
    }
}

impl<F: RemoteStore> Default for Groups<F> {
    fn default() -> Self {
        Self {
            of_keys: HashMap::default(),
            groups: HashMap::default(),
            ready: VecDeque::new(),
            count: 0,
            closed: HashMap::default(),
            next: 0,
        }
    }
}

impl<F: RemoteStore<Queue = Self>> LaneQueue<F> for Groups<F>
where
    F::Request: Keyed,
{
    type Held = SmallVec<[Keys; 1]>;

    fn push(&mut self, waiting: QueuedRequest<F>) {
        self.close_before(&waiting);
        self.join(waiting);
    }

    fn ready(&self) -> usize {
        self.count
    }

    fn before_a_check(&self) -> usize {
        self.count
    }

    /// A unit is a group, because the cost of a call for the store depends on the call's keys.
    fn take_batch(&mut self, room: usize, batch: &mut Batch<F>) -> Option<(Self::Held, usize)> {
        let mut held = Self::Held::new();
        while held.len() < room {
            let Some(number) = self.ready.pop_front() else { break };
            let Some((keys, waiting)) = self.closed.remove(&number).or_else(|| self.close(number)) else { continue };
            self.count -= 1;
            let (before, number_of) = (batch.callers.len(), waiting.len());
            for (at, waiting) in waiting.into_iter().enumerate() {
                batch.add(waiting, at + 1 == number_of && self.count == 0);
            }
            if batch.callers.len() > before {
                held.push(keys);
            } else {
                self.end(&keys, &mut batch.gone);
            }
        }
        let units = held.len();
        (units > 0).then_some((held, units))
    }

    fn release(&mut self, held: Self::Held, gone: &mut Vec<QueuedRequest<F>>) {
        held.iter().for_each(|keys| self.end(keys, gone));
    }

    fn take_all(&mut self) -> Vec<QueuedRequest<F>> {
        let mut all = Vec::new();
        for (_, (_, waiting)) in self.closed.drain() {
            all.extend(waiting);
        }
        for (_, mut group) in self.groups.drain() {
            all.extend(group.waiting.drain(..));
        }
        all.sort_unstable_by_key(|waiting| waiting.number);
        *self = Self { next: self.next, ..Self::default() };
        all
    }

    fn has(&self, number: u64) -> bool {
        self.waiting().any(|waiting| waiting.number == number)
    }

    fn has_checks(&self) -> bool {
        self.waiting().any(|waiting| waiting.until.is_some())
    }

    fn oldest(&self) -> Option<Instant> {
        self.waiting().filter(|waiting| waiting.until.is_some()).map(|waiting| waiting.since).min()
    }

    fn shrink(&mut self) {
        if self.groups.is_empty() && self.of_keys.capacity() > 2 * KEYS {
            *self = Self { next: self.next, ..Self::default() };
        }
    }
}

impl<F: RemoteStore<Queue = Self>> Groups<F>
where
    F::Request: Keyed,
{
    /// Returns how many keys have requests that wait or are in flight.
    #[cfg(test)]
    pub(crate) fn keys(&self) -> usize {
        self.of_keys.len()
    }

    fn waiting(&self) -> impl Iterator<Item = &QueuedRequest<F>> {
        let closed = self.closed.values().flat_map(|(_, waiting)| waiting);
        closed.chain(self.groups.values().flat_map(|group| &group.waiting))
    }

    /// Adds a request to the group of its keys. If the request joins several groups, these groups become one.
    fn join(&mut self, waiting: QueuedRequest<F>) {
        let mut joined: SmallVec<[u64; 4]> = SmallVec::new();
        for key in waiting.request.keys() {
            if let Some(number) = self.of_keys.get(&key).filter(|number| !joined.contains(number)) {
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
            own.waiting.append(&mut other.waiting);
            own.waiting.make_contiguous().sort_by_key(|waiting| waiting.number);
            self.count -= usize::from(other.is_ready);
        }
        for key in waiting.request.keys() {
            if self.of_keys.insert(key, number).is_none() {
                own.keys.push(key);
            }
        }
        own.waiting.push_back(waiting);
        let may_fly = own.flights.is_empty();
        match (may_fly, own.is_ready) {
            (true, false) => {
                self.ready.push_back(number);
                self.count += 1;
            }
            (false, true) => self.count -= 1, // its number is passed over
            _ => {}
        }
        own.is_ready = may_fly;
        self.groups.insert(number, own);
    }

    /// Returns a number for a new group.
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Ends the flight of a group with these keys, and regroups the requests that waited for this flight. The other
    /// flights of the group then belong to groups of their own.
    fn end(&mut self, keys: &[u64], gone: &mut Vec<QueuedRequest<F>>) {
        let number = keys.first().and_then(|key| self.of_keys.get(key)).copied();
        let Some(group) = number.and_then(|number| self.groups.remove(&number)) else { return };
        debug_assert!(!group.is_ready, "a group with a flight is not ready");
        for key in &group.keys {
            self.of_keys.remove(key);
        }
        for flight in group.flights.into_iter().filter(|flight| flight.first() != keys.first()) {
            let number = self.number();
            self.of_keys.extend(flight.iter().map(|key| (*key, number)));
            self.groups
                .insert(number, KeyGroup { keys: flight.to_vec(), flights: smallvec![flight], ..KeyGroup::default() });
        }
        for waiting in group.waiting {
            if waiting.receiver.is_gone() {
                gone.push(waiting);
            } else {
                self.push(waiting);
            }
        }
    }

    /// Closes each group that may fly, if the request would merge it with a group that has a flight.
    fn close_before(&mut self, waiting: &QueuedRequest<F>) {
        let numbers: SmallVec<[u64; 4]> =
            waiting.request.keys().filter_map(|key| self.of_keys.get(&key)).copied().collect();
        let is_ready = |number: &u64| self.groups.get(number).is_some_and(|group| group.is_ready);
        if numbers.iter().all(is_ready) {
            return;
        }
        for number in numbers {
            if self.groups.get(&number).is_some_and(|group| group.is_ready) {
                if let Some(closed) = self.close(number) {
                    self.closed.insert(number, closed);
                }
            }
        }
    }

    /// Takes requests out of a group that may fly, up to the maximum of one flight. Returns `None` if the group
    /// has become part of another group.
    fn close(&mut self, number: u64) -> Option<(Keys, Vec<QueuedRequest<F>>)> {
        let group = self.groups.get_mut(&number).filter(|group| group.is_ready)?;
        let (mut batch, mut keys) = (Vec::new(), Keys::new());
        while let Some(next) = group.waiting.pop_front() {
            let before = keys.len();
            for key in next.request.keys() {
                if !keys.contains(&key) {
                    keys.push(key);
                }
            }
            if !batch.is_empty() && (keys.len() > KEYS.max(before) || batch.len() == BATCH) {
                keys.truncate(before);
                group.waiting.push_front(next);
                break;
            }
            batch.push(next);
        }
        group.is_ready = false;
        group.flights.push(keys.clone());
        Some((keys, batch))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    use tokio::runtime::Handle;
    use tokio::sync::oneshot;

    use super::super::Flights;
    use super::super::batch::{AnswerFn, CallLimits, CallResult, Caller, Calls};
    use super::*;
    use crate::base::sync::{Mutex, lock};
    use crate::base::time::Timestamp;
    use crate::limiter::remote::Unanswered;

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
        /// The groups of a flight: 1 if it is 0.
        groups: usize,
        /// The flights at a time.
        calls: Option<usize>,
        /// The rest after each flight, unless trips take a random time.
        rest: Duration,
        /// The requests of each flight.
        flights: Mutex<Vec<usize>>,
        /// Whether trips take a random time, are followed by a rest, and end by a panic.
        is_random: bool,
        count: AtomicU64,
        came: AtomicU64,
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
            crate::base::random::mixed(self.0.count.fetch_add(1, Ordering::Relaxed))
        }
    }

    /// The keys of a flight, until it ends in any way.
    struct Flies<'a>(&'a Seen, HashSet<u64>);

    impl Drop for Flies<'_> {
        fn drop(&mut self) {
            lock(&self.0.flying).retain(|hash| !self.1.contains(hash));
        }
    }

    /// Its number, and its keys.
    struct Request(u64, Vec<u64>);

    impl Keyed for Request {
        fn keys(&self) -> impl Iterator<Item = u64> {
            self.1.iter().copied()
        }
    }

    impl RemoteStore for World {
        type Request = Request;
        type Answer = ();
        type Error = Unanswered;
        type Queue = Groups<Self>;

        async fn send_batch(&self, batch: Vec<Caller<Self>>, _until: Instant, _: Option<Timestamp>) -> CallResult {
            let mut keys = HashSet::new();
            for Caller { request: Request(number, own), .. } in &batch {
                for key in own {
                    keys.insert(*key);
                    let before = lock(&self.0.last).insert(*key, *number);
                    self.expects(before.is_none_or(|before| before <= *number), "requests of a key go in order");
                }
            }
            let groups = self.0.groups.max(1);
            self.expects(!batch.is_empty(), "a flight has requests");
            self.expects(keys.len() <= groups * KEYS && batch.len() <= groups * BATCH, "a flight is bounded");
            lock(&self.0.flights).push(batch.len());
            self.expects(lock(&self.0.flying).is_disjoint(&keys), "a key is in one flight");
            lock(&self.0.flying).extend(&keys);
            let trip = if keys.iter().any(|key| *key >= SLOW) { SLOW_TRIP } else { TRIP };
            let panics = keys.contains(&PANICS);
            let _flies = Flies(&self.0, keys);
            let random = if self.0.is_random { self.random() } else { 0 };
            tokio::time::sleep(if self.0.is_random { MS * (random % 30) as u32 } else { trip }).await;
            assert!(!panics && (!self.0.is_random || random >> 8 & 63 != 0), "a store that panics");
            batch.into_iter().for_each(|caller| caller.answer(Ok(())));
            let rests = self.0.is_random && random >> 16 & 3 == 0;
            CallResult::Answered { rest: if rests { 5 * MS } else { self.0.rest }, clock: None }
        }

        fn limits(&self) -> CallLimits {
            CallLimits { units: self.0.groups.max(1), calls: Calls::Separate(self.0.calls.unwrap_or(usize::MAX)) }
        }

        fn record_unsent(&self, _error: &Unanswered) {}
    }

    fn request(world: &World, keys: &[u64]) -> Request {
        Request(world.0.came.fetch_add(1, Ordering::Relaxed), keys.to_vec())
    }

    type Called = tokio::task::JoinHandle<Duration>;

    /// Asks for these keys. The result is the time until the answer.
    fn asks(groups: &Arc<Flights<World>>, hashes: &[u64]) -> Called {
        let (groups, keys) = (Arc::clone(groups), hashes.to_vec());
        tokio::spawn(async move {
            let request = request(groups.store(), &keys);
            let began = tokio::time::Instant::now();
            let answer = groups.ask(0, request, |sender: oneshot::Sender<_>| sender).await;
            assert!(matches!(answer, Ok(Ok(()))));
            began.elapsed()
        })
    }

    /// A request before it waits for a slow flight, and one after it would join it to another one.
    #[tokio::test(start_paused = true)]
    async fn request_waits_for_no_flight_that_a_later_request_waits_for() {
        let groups = Arc::new(Flights::new(World::default(), (1, 1), 1_000, LONG, Handle::current()));
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
        assert_eq!(*lock(&groups.store().0.broken), [""; 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn panic_fails_the_requests_of_its_flight_only() {
        let groups = Arc::new(Flights::new(World::default(), (1, 1), 1_000, LONG, Handle::current()));
        for _ in 0..3 {
            let panics = asks(&groups, &[1, PANICS]);
            tokio::time::sleep(MS).await;
            let others = [asks(&groups, &[1]), asks(&groups, &[1, 2])];
            assert!(panics.await.is_err());
            for other in others {
                assert_eq!(other.await.unwrap(), TRIP - MS + TRIP);
            }
        }
        assert_eq!((groups.len(), groups.in_queue(Groups::keys)), (0, 0));
        assert_eq!(*lock(&groups.store().0.broken), [""; 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn groups_without_a_common_key_ride_in_one_flight() {
        let world = World(Arc::new(Seen { groups: 3, calls: Some(1), ..Seen::default() }));
        let groups = Arc::new(Flights::new(world.clone(), (1, 1), 1_000, LONG, Handle::current()));
        let keys = [&[1][..], &[2], &[1, 3], &[4], &[2, 5], &[6], &[1]];
        let mut calls: Vec<_> = keys.iter().map(|keys| asks(&groups, keys)).collect();
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
        for call in calls.drain(..) {
            assert!(call.await.unwrap() <= 3 * TRIP);
        }
        // The first flight has three groups of one key. The other requests of these keys wait for it.
        let flights = lock(&world.0.flights).clone();
        assert!(flights.len() <= 3 && flights.iter().sum::<usize>() == keys.len(), "{flights:?}");
        assert_eq!(*lock(&world.0.broken), [""; 0]);
    }

    /// All of them have a key in common.
    #[tokio::test(start_paused = true)]
    async fn flight_of_a_group_has_a_bounded_number_of_keys() {
        let groups = Arc::new(Flights::new(World::default(), (1, 1), 1_000, LONG, Handle::current()));
        let calls: Vec<_> = (0..101).map(|number| asks(&groups, &[1, 10 + number])).collect();
        for call in calls {
            call.await.unwrap();
        }
        assert_eq!(lock(&groups.store().0.flights).iter().sum::<usize>(), 101);
        assert_eq!(*lock(&groups.store().0.broken), [""; 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn flight_waits_for_the_rest_of_its_keys_only() {
        let world = World(Arc::new(Seen { rest: 5 * MS, ..Seen::default() }));
        let groups = Arc::new(Flights::new(world, (1, 1), 1_000, LONG, Handle::current()));
        assert_eq!(asks(&groups, &[1, 2]).await.unwrap(), TRIP);
        let next = [&[3][..], &[2]].map(|keys| asks(&groups, keys));
        for (call, rest) in next.into_iter().zip([Duration::ZERO, 5 * MS]) {
            assert_eq!(call.await.unwrap(), rest + TRIP);
        }
    }

    /// The last check of an idle lane is sent even if it is late.
    #[tokio::test(start_paused = true)]
    async fn queue_knows_the_requests_of_its_groups() {
        let flights = Flights::new(World::default(), (1, 1), 1_000, LONG, Handle::current());
        let (now, mut groups) = (Instant::now(), Groups::<World>::default());
        let request = |number, keys: &[u64], until| QueuedRequest {
            request: Request(number, keys.to_vec()),
            receiver: Box::new(AnswerFn::new(drop)),
            number,
            since: now,
            until,
            permit: flights.0.permits.check().unwrap(),
        };
        let seen = |groups: &Groups<World>| (groups.ready(), groups.before_a_check(), groups.has_checks());
        let has = |groups: &Groups<World>| [0, 1, 2, 3].map(|number| groups.has(number));
        groups.push(request(0, &[1], None));
        assert_eq!((seen(&groups), groups.oldest()), ((1, 1, false), None));
        groups.push(request(1, &[2], Some(now + 10 * MS)));
        groups.push(request(2, &[1, 3], Some(now + 10 * MS)));
        assert_eq!((seen(&groups), groups.oldest()), ((2, 2, true), Some(now)));
        assert_eq!(has(&groups), [true, true, true, false]);
        for (late, left) in [(1, [false, true, false, false]), (0, [false; 4])] {
            let mut batch = Batch::new(now, 20 * MS, true);
            let taken = groups.take_batch(1, &mut batch).map(|(_, units)| units);
            assert_eq!((taken, batch.callers.len(), batch.late.len()), (Some(1), 1, late));
            assert_eq!(has(&groups), left);
        }
        // A group whose requests are all late counts as nothing that can be sent.
        groups.push(request(4, &[9], Some(now + 10 * MS)));
        let (keys, mut batch) = (groups.keys(), Batch::new(now, 20 * MS, false));
        assert!(groups.take_batch(1, &mut batch).is_none());
        assert_eq!((batch.callers.len(), batch.late.len(), groups.keys()), (0, 1, keys - 1));
    }

    #[tokio::test(start_paused = true)]
    async fn memory_of_a_burst_is_freed_when_no_group_is_left() {
        let flights = Flights::new(World::default(), (1, 1), 1_000, LONG, Handle::current());
        let mut groups = Groups::<World>::default();
        for number in 0..200 {
            let permit = flights.0.permits.check().unwrap();
            let (request, receiver) = (Request(number, vec![number]), Box::new(AnswerFn::new(drop)));
            groups.push(QueuedRequest { request, receiver, number, since: Instant::now(), until: None, permit });
        }
        groups.shrink();
        assert_eq!((groups.ready(), groups.keys()), (200, 200));
        let all: Vec<_> = groups.take_all().iter().map(|waiting| waiting.number).collect();
        assert_eq!((groups.ready(), groups.keys(), all), (0, 0, (0..200).collect()));
        groups.of_keys.reserve(1_000);
        groups.shrink();
        assert!(groups.of_keys.capacity() <= 2 * KEYS, "{}", groups.of_keys.capacity());
    }

    /// Callers come and go, flights last and rest for random times, and some panic.
    #[tokio::test(start_paused = true)]
    async fn each_request_is_answered_and_no_key_is_in_two_flights() {
        for (groups, calls) in [(1, None), (1, Some(3)), (4, Some(2))] {
            each_is_answered(World(Arc::new(Seen { groups, calls, is_random: true, ..Seen::default() }))).await;
        }
    }

    async fn each_is_answered(world: World) {
        let groups = Arc::new(Flights::new(world.clone(), (1, 1), 10_000, LONG, Handle::current()));
        let (mut asked, mut sent) = (Vec::new(), 0);
        let answered = Arc::new(AtomicU64::new(0));
        for _ in 0..8_000 {
            let random = world.random();
            let keys = 1 + random % 3;
            let hashes: Vec<u64> = (0..keys).map(|at| (random >> (8 * at + 8) & 255) % (8 + 100 * at)).collect();
            if random >> 40 & 3 == 0 {
                let answered = Arc::clone(&answered);
                groups
                    .send(0, request(&world, &hashes), move |_| _ = answered.fetch_add(1, Ordering::Relaxed))
                    .unwrap();
                sent += 1;
            } else {
                let groups = Arc::clone(&groups);
                asked.push(tokio::spawn(async move {
                    let request = request(groups.store(), &hashes); // it is numbered when it comes
                    groups.ask(0, request, |sender: oneshot::Sender<_>| sender).await.is_ok_and(|answer| answer.is_ok())
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
        assert!(done > all / 2, "{done} of {all}");
        while groups.len() > 0 {
            tokio::time::sleep(MS).await;
        }
        tokio::time::sleep(6 * MS).await; // longer than a flight rests
        assert_eq!(answered.load(Ordering::Relaxed), sent);
        assert_eq!(
            groups.in_queue(|line| (line.keys(), line.groups.len(), line.ready(), line.closed.len())),
            (0, 0, 0, 0)
        );
        assert_eq!(*lock(&groups.store().0.broken), [""; 0]);
    }
}
