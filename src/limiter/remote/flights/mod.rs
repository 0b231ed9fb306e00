//! Sends the requests of a limiter to its store, but no more than the store can answer in time.
//!
//! A flight is one call of the store. Requests that arrive while flights are under way wait, and then share the next
//! flight. The lane's [`LaneQueue`] says which requests may share a flight. In a [`Queue`], any requests to a
//! Redis server may share a flight. In [`Groups`], a flight takes only requests that have no key in common with
//! a flight under way. The durations of calls determine how many flights there are, and which requests are not
//! sent because their answers would come too late ([`load_window`]). All lanes of a server share its load
//! ([`server_load`]).
//!
//! An idle lane sends at once, so a request waits for no timer. A flight is a task of the limiter's runtime. As long
//! as no other request waits, the caller of a request may drive its flight instead ([`caller_flight`]). So no
//! request depends on another caller's future being polled.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::Instant;

use self::batch::{AnswerFn, Batch, LaneQueue, QueuedRequest};
pub(crate) use self::batch::{CallLimits, CallResult, Caller, Calls, Receiver, RemoteStore, hand_out};
use self::caller_flight::{CallerFlight, FlightHandle};
#[cfg(feature = "store")]
pub(crate) use self::groups::{Groups, Keyed};
use self::halving::StoreClock;
use self::load_window::{CALLS_MIN, Sent};
#[cfg(any(feature = "_redis", test))]
pub(crate) use self::queue::Queue;
pub(crate) use self::quickest::REMEMBERED;
use self::server_load::{ListKind, ServerLoad};
use super::deadline::Deadline;
use super::permits::Permits;
use super::unanswered::Unanswered;
use crate::base::sync::{Mutex, MutexGuard, lock};
use crate::base::time::Timestamp;
use crate::store_load::StoreLoad;

mod batch;
mod caller_flight;
#[cfg(feature = "store")]
mod groups;
mod halving;
mod load_window;
mod own_wait;
#[cfg(any(feature = "_redis", test))]
mod queue;
mod quickest;
mod server_load;

/// The time for which a caller still waits after the deadline. By then, a call that was sent at
/// once has failed with an error that names the server.
const GRACE: Duration = Duration::from_millis(5);

/// The flights of a limiter.
pub(crate) struct Flights<F: RemoteStore>(Arc<Lanes<F>>);

struct Lanes<F: RemoteStore> {
    store: F,
    lanes: Box<[Mutex<Lane<F>>]>,
    /// The load of each server. A lane is locked before the load of its server.
    servers: Box<[Mutex<ServerLoad>]>,
    deadline: Duration,
    permits: Permits,
    /// The number of requests that failed because of an overload.
    shed: AtomicU64,
    /// The runtime that runs the flights as tasks.
    runtime: Handle,
}

/// The requests of one server, or of one slot of a cluster. These requests share flights.
struct Lane<F: RemoteStore> {
    queue: F::Queue,
    /// The index of the lane's server. A lane that is in use keeps the server that it had before.
    server: usize,
    flights: usize,
    /// The number of units in flight.
    units: u64,
    /// The waiting units that are counted in the server's load.
    counted: usize,
    /// The server at which the lane is listed because of its checks, and that because of its corrections.
    listed_at: [Option<usize>; 2],
    /// True if a flight has begun but has taken no request yet.
    is_starting: bool,
    /// The number of requests that were added so far.
    came: u64,
    /// The number of requests that the last flight took.
    last_batch_size: usize,
}

/// Says what drives a flight that a request begins.
#[derive(Clone, Copy)]
enum Driver {
    Caller,
    Task,
}

/// A request that was added to a lane, with the number of flights that the store had answered by
/// then.
struct Queued {
    number: u64,
    answered: u64,
    flight: FlightHandle,
}

impl<F: RemoteStore> Flights<F> {
    /// Makes `lanes` lanes of at most `servers` servers. At most `most` checks wait or are in flight in all lanes
    /// together. `runtime` runs the flights as tasks.
    pub(crate) fn new(
        store: F,
        (lanes, servers): (u16, u16),
        most: usize,
        deadline: Duration,
        runtime: Handle,
    ) -> Self {
        let lanes = (0..lanes.max(1)).map(|_| Mutex::new(Lane::new())).collect();
        let servers = (0..servers.max(1)).map(|_| Mutex::new(ServerLoad::new())).collect();
        let (permits, shed) = (Permits::new(most), AtomicU64::new(0));
        Self(Arc::new(Lanes { store, lanes, servers, deadline, permits, shed, runtime }))
    }

    pub(crate) fn store(&self) -> &F {
        &self.0.store
    }

    /// Returns the runtime that runs the flights as tasks.
    pub(crate) fn runtime(&self) -> &Handle {
        &self.0.runtime
    }

    /// Returns how many requests wait or are in flight.
    pub(crate) fn len(&self) -> usize {
        self.0.permits.taken()
    }

    /// Returns the load of the store, with the call times of the slowest server. The number of connections is 0.
    pub(crate) fn load(&self) -> StoreLoad {
        let mut load = StoreLoad {
            waiting: self.len(),
            deadline: Some(self.0.deadline),
            shed: self.0.shed.load(Ordering::Relaxed),
            ..StoreLoad::default()
        };
        let now = Instant::now();
        for lane in &self.0.lanes {
            let oldest = lock(lane).queue.oldest().map(|since| now.saturating_duration_since(since));
            load.oldest_wait = load.oldest_wait.max(oldest.unwrap_or_default());
        }
        for server in &self.0.servers {
            let mut server = lock(server);
            load.calls_in_flight += server.flights;
            if let Some((call, quickest)) = server.call_times(now).filter(|(call, _)| load.call_time < Some(*call)) {
                (load.call_time, load.quickest_call) = (Some(call), quickest);
            }
        }
        load
    }

    /// Returns whether a call to a lane's server was answered within the deadline in the last seconds, at most
    /// [`REMEMBERED`]. `None` if no call was answered.
    pub(crate) fn answers_in_time(&self, lane: u16) -> Option<Result<(), Unanswered>> {
        let (deadline, quickest) = (self.0.deadline, self.0.lock(lane).1.quickest.read(Instant::now()));
        let is_late = |call: Duration| call >= deadline;
        quickest.map(|call| if is_late(call) { Err(Unanswered::TimedOut { deadline, quickest }) } else { Ok(()) })
    }

    /// Returns what `read` reads from the queue of the first lane.
    #[cfg(test)]
    pub(crate) fn in_queue<T>(&self, read: impl FnOnce(&F::Queue) -> T) -> T {
        read(&self.0.lock(0).0.queue)
    }

    /// Sends a request at once, and waits for the answer, at most until [`GRACE`] after the deadline. `receiver` gets
    /// the sender of the future's result, and makes the receiver of the answer.
    ///
    /// This is no `async fn`, because futures would then copy the request and its receiver several times.
    pub(crate) fn ask<T: Send, R: Receiver<F::Answer, F::Error> + 'static>(
        &self,
        lane: u16,
        request: F::Request,
        receiver: impl FnOnce(oneshot::Sender<T>) -> R,
    ) -> impl Future<Output = Result<T, F::Error>> + Send {
        let (sender, answer) = oneshot::channel();
        let until = Instant::now() + self.0.deadline;
        let queued = self.add(lane, request, until, || receiver(sender));
        async move {
            let (queued, deadline) = (queued.map_err(|why| self.0.fails(why))?, Deadline::at(until + GRACE));
            match queued.flight.wait(answer, deadline).await {
                Some(Ok(answer)) => Ok(answer),
                Some(Err(_)) => Err(Unanswered::RuntimeEnded.into()),
                None => Err(self.0.fails(self.0.timed_out(lane, &queued, deadline))),
            }
        }
    }

    /// Adds a check with this deadline.
    fn add<R: Receiver<F::Answer, F::Error> + 'static>(
        &self,
        lane: u16,
        request: F::Request,
        until: Instant,
        receiver: impl FnOnce() -> R,
    ) -> Result<Queued, Unanswered> {
        if Handle::try_current().is_err() {
            return Err(Unanswered::NoRuntime);
        }
        let permit = self.0.permits.check()?;
        let (since, receiver) = (until - self.0.deadline, Box::new(receiver()));
        let waiting = QueuedRequest { request, receiver, number: 0, since, until: Some(until), permit };
        self.0.push(lane, waiting, Driver::Caller)
    }

    /// Sends a request, and hands its answer to `then`.
    pub(crate) fn send(
        &self,
        lane: u16,
        request: F::Request,
        then: impl FnOnce(Result<F::Answer, F::Error>) + Send + 'static,
    ) -> Result<(), F::Error> {
        let permit = self.0.permits.correction().map_err(|why| self.0.fails(why))?;
        let receiver = Box::new(AnswerFn::new(then));
        let waiting = QueuedRequest { request, receiver, number: 0, since: Instant::now(), until: None, permit };
        self.0.push(lane, waiting, Driver::Task).map_err(|why| self.0.fails(why))?;
        Ok(())
    }
}

impl<F: RemoteStore> Lanes<F> {
    /// Locks a lane and the load of its server.
    fn lock(&self, number: u16) -> (MutexGuard<'_, Lane<F>>, MutexGuard<'_, ServerLoad>) {
        // Before the lane is locked, because the store may have a lock of its own.
        let at = if self.servers.len() == 1 { 0 } else { usize::from(self.store.server_of(number)) };
        let mut lane = lock(&self.lanes[usize::from(number) % self.lanes.len()]);
        if lane.flights == 0 && lane.queue.ready() == 0 {
            lane.server = at % self.servers.len();
        }
        let server = lock(&self.servers[lane.server]);
        (lane, server)
    }

    /// Returns the error of a request that fails for this reason. Counts an overload.
    fn fails(&self, why: Unanswered) -> F::Error {
        if why.is_overload() {
            self.shed.fetch_add(1, Ordering::Relaxed);
        }
        why.into()
    }

    /// Adds a request, and begins a flight if the lane may begin one.
    ///
    /// # Errors
    /// Returns an error if the request is not sent, because its answer would come too late.
    fn push(
        self: &Arc<Self>,
        number: u16,
        mut waiting: QueuedRequest<F>,
        driver: Driver,
    ) -> Result<Queued, Unanswered> {
        let most = self.store.limits();
        let (mut lane, mut server) = self.lock(number);
        if waiting.until.is_some() {
            if let Some(why) = server.refuses(lane.queue.before_a_check(), waiting.since, self.deadline, most) {
                drop((lane, server));
                return Err(why); // without the locks: the receiver may be the application's code
            }
        }
        let mut queued = Queued { number: lane.came, answered: server.answered, flight: FlightHandle::by_task() };
        waiting.number = lane.came;
        lane.came += 1;
        lane.queue.push(waiting);
        if !lane.begins_flight(number, &mut server, most) {
            // It waits for the flights of its lane. If there are none, it waits for those of its server.
            let flights = server.take_caller_flights((lane.flights > 0).then_some(number));
            drop((lane, server));
            flights.iter().for_each(|flight| flight.make_task());
            return Ok(queued);
        }
        match driver {
            Driver::Caller if lane.is_quiet() && !server.has_listed() => {
                let flight =
                    CallerFlight::new(run_flight(self.flight(number, Some(queued.number))), self.runtime.clone());
                server.add_caller_flight(number, queued.number, Arc::clone(&flight));
                queued.flight = FlightHandle::by_caller(flight);
            }
            _ => {
                drop((lane, server));
                self.begin(number);
            }
        }
        Ok(queued)
    }

    /// Begins a flight. The lane must not be locked: if the runtime has ended, the flight is dropped
    /// here, which locks the lane.
    fn begin(self: &Arc<Self>, number: u16) {
        self.runtime.spawn(run_flight(self.flight(number, None)));
    }

    /// Begins flights of the lanes that are listed at a server, as long as its window has room.
    fn begin_listed(self: &Arc<Self>, at: usize) {
        let most = self.store.limits();
        // A lane that is taken from a list begins a flight, or has nothing to send, or finds that the room is gone. So
        // this ends.
        while let Some((number, kind)) = { lock(&self.servers[at]).next_listed() } {
            let (mut lane, mut server) = self.lock(number);
            if lane.listed_at[kind as usize] == Some(at) {
                lane.listed_at[kind as usize] = None;
            }
            // It is the lane's turn, so corrections leave no room.
            let begins = lane.begins_flight_beside(0, number, &mut server, most);
            // A caller may have begun to drive a flight since the lane was taken from the list.
            let flights = if begins { Vec::new() } else { server.take_caller_flights(None) };
            drop((lane, server));
            flights.iter().for_each(|flight| flight.make_task());
            if begins {
                self.begin(number);
            }
        }
    }

    fn flight(self: &Arc<Self>, number: u16, begun_by: Option<u64>) -> Flight<F> {
        Flight { lanes: Arc::clone(self), number, begun_by, state: FlightState::Starting }
    }

    /// Takes the next batch of requests out of the lane's queue. Leaves out a request if its caller has gone, its
    /// answer is known by now, or its answer would come too late.
    fn next_batch(self: &Arc<Self>, flight: &mut Flight<F>) -> Option<NextBatch<F>> {
        let now = Instant::now();
        let most = self.store.limits();
        let (mut lane, mut server) = self.lock(flight.number);
        lane.is_starting = false;
        server.starting -= 1;
        flight.state = FlightState::TakesRequests;
        let is_idle = server.flights == 1;
        let phase = server.clock.map(|clock| clock.phase(now, self.deadline));
        let store_time = server.clock.map(|clock| clock.at_arrival(now));
        server.window.enter(phase, self.deadline);
        let mut batch = Batch::new(now, server.window.needed(self.deadline), is_idle);
        let room = match most.calls {
            // No more than `most.units`.
            Calls::Pipelined => server.window.room(server.units + server.starting, most.units as u64) as usize,
            Calls::Separate(_) => most.units.max(1),
        };
        let waiting = lane.queue.before_a_check();
        let taken = lane.queue.take_batch(room, &mut batch);
        lane.last_batch_size = batch.callers.len();
        if let Some((held, units)) = taken {
            let units = most.counted(units);
            lane.units += units;
            server.units += units;
            let sent = Sent { units, in_flight: server.units, flights: server.flights, phase };
            flight.state = FlightState::InFlight { held, sent, at: now };
        }
        if lane.queue.ready() > 0 && room < most.units.max(1) {
            server.window.record_limit();
        }
        let why = (!batch.late.is_empty()).then(|| server.reason(waiting, now, self.deadline, most));
        let begins = lane.begins_flight(flight.number, &mut server, most);
        drop((lane, server));
        if begins {
            self.begin(flight.number);
        }
        let Batch { callers, until, has_corrections, gone, known, late, .. } = batch;
        drop(gone);
        known.into_iter().for_each(|(waiting, answer)| waiting.answer(Ok(answer)));
        if let Some(why) = why {
            self.store.record_unsent(&why.into());
            late.into_iter().for_each(|waiting| waiting.answer(Err(self.fails(why))));
        }
        let from_now = has_corrections.then(|| now + self.deadline);
        let until = until.max(from_now)?;
        (!callers.is_empty()).then_some(NextBatch { callers, until, store_time })
    }

    /// Returns the reason why there is no answer in time. The store is not at fault if it answered
    /// other requests while this request waited, or if this process was too busy to notice the
    /// time. A store that takes longer than the deadline for a lone call is at fault.
    fn timed_out(&self, number: u16, queued: &Queued, until: Deadline) -> Unanswered {
        let deadline = self.deadline;
        if until.is_late() {
            return Unanswered::TooBusy(deadline);
        }
        let (lane, mut server) = self.lock(number);
        if server.answered == queued.answered || !lane.queue.has(queued.number) {
            return Unanswered::TimedOut { deadline, quickest: server.quickest.read(Instant::now()) };
        }
        server.too_far(Instant::now(), deadline).unwrap_or(Unanswered::NotSent(deadline))
    }
}

impl<F: RemoteStore> Lane<F> {
    fn new() -> Self {
        Self {
            queue: F::Queue::default(),
            server: 0,
            flights: 0,
            units: 0,
            counted: 0,
            listed_at: [None; 2],
            is_starting: false,
            came: 0,
            last_batch_size: 0,
        }
    }

    /// Returns whether the caller has to begin a flight. If so, counts the flight. If not, and the lane has no flight
    /// that would take the waiting requests, lists the lane. `number` is the lane's.
    fn begins_flight(&mut self, number: u16, server: &mut ServerLoad, most: CallLimits) -> bool {
        // Corrections leave room for a check, which would have to wait for the end of a flight otherwise.
        self.begins_flight_beside(u64::from(!self.queue.has_checks()), number, server, most)
    }

    /// Does the same, with room for `left` units that stays free.
    fn begins_flight_beside(&mut self, left: u64, number: u16, server: &mut ServerLoad, most: CallLimits) -> bool {
        let begins = !self.is_starting && self.may_begin(left, server, most);
        if begins {
            self.flights += 1;
            self.is_starting = true;
            server.flights += 1;
            server.starting += 1;
        }
        self.list(number, server);
        begins
    }

    /// Lists the lane if its requests wait and it has no flight. Counts its waiting requests in the server's load.
    fn list(&mut self, number: u16, server: &mut ServerLoad) {
        if self.flights == 0 && self.queue.ready() > 0 {
            let kind = if self.queue.has_checks() { ListKind::Checks } else { ListKind::Corrections };
            if self.listed_at[kind as usize] != Some(self.server) {
                self.listed_at[kind as usize] = Some(self.server);
                server.list(number, kind);
            }
        }
        self.count_waiting(server);
    }

    /// Counts the waiting requests that delay a check of another lane. Corrections without checks leave room for it.
    fn count_waiting(&mut self, server: &mut ServerLoad) {
        let waiting = if self.queue.has_checks() { self.queue.before_a_check() } else { 0 };
        server.waiting = server.waiting - self.counted + waiting;
        self.counted = waiting;
    }

    /// Takes out all requests.
    fn take_all(&mut self, server: &mut ServerLoad) -> Vec<QueuedRequest<F>> {
        let all = self.queue.take_all();
        self.count_waiting(server);
        all
    }

    /// Returns whether the lane may begin a flight that leaves room for `left` units.
    fn may_begin(&mut self, left: u64, server: &mut ServerLoad, most: CallLimits) -> bool {
        let (waiting, flights) = (self.queue.ready() as u64, self.flights as u64);
        if waiting == 0 {
            return false;
        }
        if flights == 0 {
            let has_room = server.has_room_for_lane(left);
            if !has_room {
                server.window.record_limit();
            }
            return has_room;
        }
        let calls = server.calls(most);
        if flights >= calls {
            return false;
        }
        if !server.has_room(waiting, left, most) {
            server.window.record_limit();
            return false;
        }
        if server.window.is_paced() {
            // Each flight carries at least a sixteenth of the requests in flight. So a request is sent soon after it
            // came, and the allowed flights are not used up before the store's turn ends.
            return waiting >= self.units / 16;
        }
        if most.calls != Calls::Pipelined {
            return true;
        }
        let least = if flights >= (calls / 2).max(CALLS_MIN) {
            // Half of the allowed flights are under way, so the next flight must be full, or carry at least three times
            // the average number of requests of these flights. Without this rule, single requests would use up all
            // flights, and the next requests would wait for a whole call.
            3 * self.units / flights
        } else if calls == CALLS_MIN {
            // Calls are short, and a flight carries its share of all requests. Without this rule, the callers of an
            // answered flight would begin flights one by one, and most requests would share one flight. The store and
            // this process would then wait for each other.
            (self.units + waiting).div_ceil(calls)
        } else {
            1
        };
        waiting >= least.min(most.units as u64)
    }

    /// Returns whether requests come one by one, so that a caller drives the flight. If requests come in groups, a
    /// task begins the flight a moment later, and takes a whole group.
    fn is_quiet(&self) -> bool {
        self.flights == 1 && self.last_batch_size <= 1
    }

    /// Removes a flight from the counts. After the lane's last flight, this frees memory that only a burst needed,
    /// because a cluster has thousands of lanes.
    fn end_flight(&mut self, server: &mut ServerLoad) {
        self.flights -= 1;
        server.flights -= 1;
        if self.flights == 0 {
            self.queue.shrink();
        }
    }
}

/// The requests of a flight.
struct NextBatch<F: RemoteStore> {
    callers: Vec<Caller<F>>,
    /// The instant at which the last of the callers stops waiting.
    until: Instant,
    /// The time that the store's clock shows when the requests arrive.
    store_time: Option<Timestamp>,
}

/// A flight, which is counted in its lane.
struct Flight<F: RemoteStore> {
    lanes: Arc<Lanes<F>>,
    number: u16,
    /// The number of the request that began this flight, if the request's caller drives the flight.
    begun_by: Option<u64>,
    state: FlightState<F>,
}

enum FlightState<F: RemoteStore> {
    /// The flight has taken no request yet.
    Starting,
    /// The flight takes requests, or has found none.
    TakesRequests,
    InFlight {
        held: <F::Queue as LaneQueue<F>>::Held,
        sent: Sent,
        at: Instant,
    },
    Ended,
}

impl<F: RemoteStore> Flight<F> {
    /// Ends the flight, unless it goes on with requests that wait. Returns whether it has ended. A flight that goes on
    /// becomes a task: its caller already has an answer, and no waiting request may depend on that caller.
    fn finish(&mut self, result: CallResult, until: Instant) -> bool {
        let now = Instant::now();
        let (mut gone, mut resting) = (Vec::new(), None);
        let most = self.lanes.store.limits();
        let (mut lane, mut server) = self.lanes.lock(self.number);
        if let FlightState::InFlight { held, sent, at } = std::mem::replace(&mut self.state, FlightState::Ended) {
            lane.units -= sent.units;
            server.units -= sent.units;
            server.ended_at = Some(now);
            let deadline = self.lanes.deadline;
            match result {
                CallResult::Answered { clock, .. } => {
                    server.answered += 1;
                    server.clock = clock.map(|stated| StoreClock::new(stated, at, now)).or(server.clock);
                    let took = now.saturating_duration_since(at);
                    server.quickest.record(took, now);
                    let quickest = server.quickest.read(now).unwrap_or(took);
                    server.window.record_quickest(quickest);
                    server.window.record(took, sent, deadline);
                }
                CallResult::Failed if now >= until => server.window.record_silence(sent, deadline),
                CallResult::Failed => {
                    server.window.record_failure(now.saturating_duration_since(at), sent, deadline);
                }
            }
            match result {
                CallResult::Answered { rest, .. } if !rest.is_zero() => resting = Some((held, rest)),
                _ => lane.queue.release(held, &mut gone),
            }
        }
        lane.end_flight(&mut server);
        let flight = self.begun_by.take().and_then(|request| server.take_caller_flight(self.number, request));
        // If other lanes are listed, this lane waits behind them.
        let others = server.has_listed();
        let goes_on = !others && lane.begins_flight(self.number, &mut server, most);
        let listed_at = others.then(|| {
            lane.list(self.number, &mut server);
            lane.server
        });
        drop((lane, server));
        drop(gone);
        if let Some(server) = listed_at {
            self.lanes.begin_listed(server);
        }
        if let Some((held, rest)) = resting {
            let resting = Resting { lanes: Arc::clone(&self.lanes), number: self.number, held: Some(held) };
            self.lanes.runtime.spawn(async move {
                Deadline::after(rest).wait().await;
                drop(resting);
            });
        }
        if let Some(flight) = flight.filter(|_| goes_on) {
            flight.make_task();
        }
        if goes_on {
            self.state = FlightState::Starting;
        }
        !goes_on
    }
}

impl<F: RemoteStore> Drop for Flight<F> {
    /// Fails the waiting requests if the lane's last flight is dropped before its end. The runtime has then ended,
    /// so nothing else answers these requests.
    fn drop(&mut self) {
        let state = std::mem::replace(&mut self.state, FlightState::Ended);
        if matches!(state, FlightState::Ended) {
            return;
        }
        let (mut gone, mut left, mut listed) = (Vec::new(), Vec::new(), Vec::new());
        {
            let (mut lane, mut server) = self.lanes.lock(self.number);
            lane.end_flight(&mut server);
            self.begun_by.map(|request| server.take_caller_flight(self.number, request));
            match state {
                FlightState::InFlight { held, sent, .. } => {
                    lane.units -= sent.units;
                    server.units -= sent.units;
                    lane.queue.release(held, &mut gone);
                }
                FlightState::Starting => {
                    lane.is_starting = false;
                    server.starting -= 1;
                }
                FlightState::TakesRequests | FlightState::Ended => {}
            }
            if lane.flights == 0 {
                left = lane.take_all(&mut server);
            }
            if server.flights == 0 {
                listed = server.take_listed();
            }
        }
        for number in listed {
            let (mut lane, mut server) = self.lanes.lock(number);
            lane.listed_at = [None; 2];
            if lane.flights == 0 {
                left.extend(lane.take_all(&mut server));
            }
        }
        drop(gone);
        left.into_iter().for_each(|waiting| waiting.answer(Err(Unanswered::RuntimeEnded.into())));
    }
}

/// Keeps the keys of an ended flight out of the next flights until its pause is over.
struct Resting<F: RemoteStore> {
    lanes: Arc<Lanes<F>>,
    number: u16,
    held: Option<<F::Queue as LaneQueue<F>>::Held>,
}

impl<F: RemoteStore> Drop for Resting<F> {
    fn drop(&mut self) {
        let Some(held) = self.held.take() else { return };
        let mut gone = Vec::new();
        let most = self.lanes.store.limits();
        let (mut lane, mut server) = self.lanes.lock(self.number);
        lane.queue.release(held, &mut gone);
        let begins = lane.begins_flight(self.number, &mut server, most);
        drop((lane, server));
        drop(gone); // a receiver that is dropped may send a refund
        if begins {
            self.lanes.begin(self.number);
        }
    }
}

/// Sends a lane's requests, batch after batch, as long as the flight goes on.
async fn run_flight<F: RemoteStore>(mut flight: Flight<F>) {
    let lanes = Arc::clone(&flight.lanes);
    loop {
        let (mut result, mut deadline) = (CallResult::Failed, Instant::now());
        if let Some(NextBatch { callers, until, store_time }) = lanes.next_batch(&mut flight) {
            deadline = until;
            // If the store panics, only the requests of this batch fail.
            let sent = AssertUnwindSafe(lanes.store.send_batch(callers, until, store_time)).catch_unwind().await;
            result = sent.unwrap_or(CallResult::Failed);
        }
        if flight.finish(result, deadline) {
            return;
        }
    }
}

#[cfg(test)]
mod tests;
