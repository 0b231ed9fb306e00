//! Sends the requests of a limiter to its store, but no more than the store can answer in time.
//!
//! A flight is one call of the store. Requests that arrive while flights are under way wait, and then share the next
//! flight. The lane's [`LaneQueue`] says which requests may share a flight. In a [`Queue`], any requests to a
//! Redis server may share a flight. In [`Groups`], a flight takes only requests that have no key in common with
//! a flight under way. The durations of calls determine how many flights there are, and which requests are not
//! sent because their answers would come too late ([`load_window`]).
//!
//! An idle lane sends at once, so a request waits for no timer. A flight is a task of the limiter's runtime. As long
//! as no other request waits, the caller of a request may drive its flight instead ([`caller_flight`]). So no
//! request depends on another caller's future being polled.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::Instant;

use self::batch::{AnswerFn, Batch, LaneQueue, QueuedRequest, hand_over};
pub(crate) use self::batch::{CallLimits, CallResult, Caller, Calls, Receiver, RemoteStore, hand_out};
use self::caller_flight::{CallerFlight, FlightHandle};
#[cfg(feature = "store")]
pub(crate) use self::groups::{Groups, Keyed};
use self::halving::StoreClock;
use self::load_window::{CALLS_MIN, LoadWindow, Sent};
#[cfg(any(feature = "_redis", test))]
pub(crate) use self::queue::Queue;
use self::quickest::QuickestCall;
pub(crate) use self::quickest::REMEMBERED;
use super::deadline::Deadline;
use super::permits::Permits;
use super::unanswered::{Shed, Unanswered};
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

/// The time for which a caller still waits after the deadline. By then, a call that was sent at
/// once has failed with an error that names the server.
const GRACE: Duration = Duration::from_millis(5);

/// The flights of a limiter.
pub(crate) struct Flights<F: RemoteStore>(Arc<Lanes<F>>);

struct Lanes<F: RemoteStore> {
    store: F,
    lanes: Box<[Mutex<Lane<F>>]>,
    deadline: Duration,
    permits: Permits,
    /// The runtime that runs the flights as tasks.
    runtime: Handle,
}

/// The requests of one server, or of one slot of a cluster. These requests share flights, and the
/// limits of flights.
struct Lane<F: RemoteStore> {
    queue: F::Queue,
    window: LoadWindow,
    quickest: QuickestCall,
    /// The store's clock according to the last answer that reported it. `None` if the store does not report its
    /// time.
    clock: Option<StoreClock>,
    flights: usize,
    /// The number of units in flight, counted in the same way as in `window`.
    units: u64,
    /// The instant from which the next request is not ahead of its time, if requests are sent evenly.
    next_paced: Option<Instant>,
    /// True if a flight has begun but has taken no request yet.
    is_starting: bool,
    /// The number of requests that were added so far.
    came: u64,
    /// The number of flights that the store answered.
    answered: u64,
    /// The number of requests that the last flight took.
    last_batch_size: usize,
    /// The flights that callers drive, each with the number of the request that began it.
    caller_flights: Vec<(u64, Arc<CallerFlight>)>,
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
    /// Makes `lanes` lanes. At most `most` checks wait or are in flight in all lanes together. `runtime` runs
    /// the flights as tasks.
    pub(crate) fn new(store: F, lanes: u16, most: usize, deadline: Duration, runtime: Handle) -> Self {
        let lanes = (0..lanes.max(1)).map(|_| Mutex::new(Lane::new())).collect();
        Self(Arc::new(Lanes { store, lanes, deadline, permits: Permits::new(most), runtime }))
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

    /// Returns the load of the store, with the call time of the slowest lane. The number of shed requests is 0,
    /// because the checks count these.
    pub(crate) fn load(&self) -> StoreLoad {
        let mut load = StoreLoad { waiting: self.len(), deadline: Some(self.0.deadline), ..StoreLoad::default() };
        let now = Instant::now();
        for lane in &self.0.lanes {
            let mut lane = lock(lane);
            let oldest = lane.queue.oldest().map(|since| now.saturating_duration_since(since));
            load.oldest_wait = load.oldest_wait.max(oldest.unwrap_or_default());
            load.calls_in_flight += lane.flights;
            load.call_time = load.call_time.max(lane.window.call());
            load.quickest_call = load.quickest_call.max(lane.quickest.read(now));
        }
        load
    }

    /// Returns whether a call of a lane was answered within the deadline in the last seconds, at most [`REMEMBERED`].
    /// `None` if no call was answered.
    pub(crate) fn answers_in_time(&self, lane: u16) -> Option<Result<(), Unanswered>> {
        let (deadline, quickest) = (self.0.deadline, self.0.lock(lane).quickest.read(Instant::now()));
        let is_late = |call: Duration| call >= deadline;
        quickest.map(|call| if is_late(call) { Err(Unanswered::TimedOut { deadline, quickest }) } else { Ok(()) })
    }

    /// Returns what `read` reads from the queue of the first lane.
    #[cfg(test)]
    pub(crate) fn in_queue<T>(&self, read: impl FnOnce(&F::Queue) -> T) -> T {
        read(&self.0.lock(0).queue)
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
            let (queued, deadline) = (queued?, Deadline::at(until + GRACE));
            match queued.flight.wait(answer, deadline).await {
                Some(Ok(answer)) => Ok(answer),
                Some(Err(_)) => Err(Unanswered::RuntimeEnded.into()),
                None => Err(self.0.timed_out(lane, &queued, deadline).into()),
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
        let permit = self.0.permits.correction()?;
        let receiver = Box::new(AnswerFn::new(then));
        let waiting = QueuedRequest { request, receiver, number: 0, since: Instant::now(), until: None, permit };
        self.0.push(lane, waiting, Driver::Task)?;
        Ok(())
    }
}

impl<F: RemoteStore> Lanes<F> {
    fn lock(&self, number: u16) -> MutexGuard<'_, Lane<F>> {
        let index = usize::from(number) % self.lanes.len();
        lock(&self.lanes[index])
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
        let mut lane = self.lock(number);
        if waiting.until.is_some() {
            if let Some(why) = lane.refuses(waiting.since, self.deadline, most) {
                drop(lane);
                return Err(why); // without the lock: the receiver may be the application's code
            }
        }
        let mut queued = Queued { number: lane.came, answered: lane.answered, flight: FlightHandle::by_task() };
        waiting.number = lane.came;
        lane.came += 1;
        lane.queue.push(waiting);
        if !lane.begins_flight(most) {
            // It waits for these flights.
            let flights = std::mem::take(&mut lane.caller_flights);
            drop(lane);
            flights.iter().for_each(|(_, flight)| flight.make_task());
            return Ok(queued);
        }
        match driver {
            Driver::Caller if lane.is_quiet() => {
                let flight =
                    CallerFlight::new(run_flight(self.flight(number, Some(queued.number))), self.runtime.clone());
                lane.caller_flights.push((queued.number, Arc::clone(&flight)));
                queued.flight = FlightHandle::by_caller(flight);
            }
            _ => {
                drop(lane);
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

    fn flight(self: &Arc<Self>, number: u16, begun_by: Option<u64>) -> Flight<F> {
        Flight { lanes: Arc::clone(self), number, begun_by, state: FlightState::Starting }
    }

    /// Takes the next batch of requests out of the lane's queue. Leaves out a request if its caller has gone, its
    /// answer is known by now, or its answer would come too late.
    fn next_batch(self: &Arc<Self>, flight: &mut Flight<F>) -> Option<NextBatch<F>> {
        let now = Instant::now();
        let most = self.store.limits();
        let mut lane = self.lock(flight.number);
        lane.is_starting = false;
        let is_idle = lane.flights == 1;
        let phase = lane.clock.map(|clock| clock.phase(now, self.deadline));
        let store_time = lane.clock.map(|clock| clock.at_arrival(now));
        lane.window.enter(phase, self.deadline);
        let mut batch = Batch::new(now, lane.window.needed(self.deadline), is_idle);
        let room = match most.calls {
            Calls::Pipelined => lane.window.room(lane.units, most.units as u64) as usize, // no more than `most.units`
            Calls::Separate(_) => most.units.max(1),
        };
        let waiting = lane.queue.before_a_check();
        let taken = lane.queue.take_batch(room, &mut batch);
        lane.last_batch_size = batch.callers.len();
        if let Some((held, units)) = taken {
            let units = most.counted(units);
            lane.units += units;
            let sent = Sent { units, in_flight: lane.units, flights: lane.flights, phase };
            flight.state = FlightState::InFlight { held, sent, at: now };
        }
        if lane.queue.ready() > 0 && room < most.units.max(1) {
            lane.window.record_limit();
        }
        let why = (!batch.late.is_empty()).then(|| lane.shed(now, self.deadline, most, waiting));
        let begins = lane.begins_flight(most);
        drop(lane);
        if begins {
            self.begin(flight.number);
        }
        let Batch { callers, until, has_corrections, gone, known, late, .. } = batch;
        drop(gone);
        for (waiting, answer) in known {
            hand_over(waiting.receiver, Ok(answer));
        }
        if let Some(why) = why {
            self.store.record_unsent(&why.into());
            late.into_iter().for_each(|waiting| hand_over(waiting.receiver, Err(why.into())));
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
        let mut lane = self.lock(number);
        if lane.answered == queued.answered || !lane.queue.has(queued.number) {
            return Unanswered::TimedOut { deadline, quickest: lane.quickest.read(Instant::now()) };
        }
        lane.too_far(Instant::now(), deadline).unwrap_or(Unanswered::NotSent(deadline))
    }
}

impl<F: RemoteStore> Lane<F> {
    fn new() -> Self {
        Self {
            queue: F::Queue::default(),
            window: LoadWindow::new(),
            quickest: QuickestCall::default(),
            clock: None,
            flights: 0,
            units: 0,
            next_paced: None,
            is_starting: false,
            came: 0,
            answered: 0,
            last_batch_size: 0,
            caller_flights: Vec::new(),
        }
    }

    /// Returns the reason if a check that comes now is not sent, because the waiting requests would make its answer
    /// too late, or because it is ahead of the pace.
    fn refuses(&mut self, now: Instant, deadline: Duration, most: CallLimits) -> Option<Unanswered> {
        if self.flights == 0 {
            return None; // an idle lane always sends
        }
        let waiting = self.queue.before_a_check();
        let call = self.window.call().unwrap_or_default();
        let wait = call.saturating_mul(u32::try_from(waiting).unwrap_or(u32::MAX)) / self.carries(most);
        let fits = !self.window.is_paced() || self.fits_pace(now, deadline);
        if fits && wait.saturating_add(self.window.needed(deadline)) <= deadline {
            return None;
        }
        self.window.record_limit();
        Some(self.shed(now, deadline, most, waiting))
    }

    /// Returns whether a request fits the pace: requests are sent evenly, as many as the window has in the time of a
    /// deadline, and none is ahead of its time by more than an eighth of that. Counts the request if it fits.
    ///
    /// The pace does not follow the time of a call. That time is known too late, and requests that wait for each other
    /// would be sent ever more slowly without being fewer.
    fn fits_pace(&mut self, now: Instant, deadline: Duration) -> bool {
        let next = self.next_paced.map_or(now, |next| next.max(now));
        if next.saturating_duration_since(now) > deadline / 8 {
            return false;
        }
        let units = u32::try_from(self.window.units()).unwrap_or(u32::MAX).max(1);
        self.next_paced = Some(next + deadline / units);
        true
    }

    /// Returns the reason why checks are not sent.
    fn shed(&mut self, now: Instant, deadline: Duration, most: CallLimits, waiting: usize) -> Unanswered {
        let call = self.window.call().unwrap_or_default();
        let shed = Unanswered::Shed(Shed { waiting, carries: self.carries(most), call, deadline });
        self.too_far(now, deadline).unwrap_or(shed)
    }

    /// Returns the reason why checks are not sent if even a lone call takes longer than the deadline.
    fn too_far(&mut self, now: Instant, deadline: Duration) -> Option<Unanswered> {
        let call = self.window.alone().filter(|alone| *alone >= deadline)?;
        Some(Unanswered::TooFar { call, deadline, quickest: self.quickest.read(now) })
    }

    /// Returns how many units can be in flight, at least one.
    fn carries(&self, most: CallLimits) -> u32 {
        let (window, units) = (self.window.units(), most.units as u64);
        let carries = match most.calls {
            Calls::Pipelined => window.min(self.calls(most) * units),
            Calls::Separate(_) => window.min(self.calls(most)).saturating_mul(units),
        };
        u32::try_from(carries).unwrap_or(u32::MAX).max(1)
    }

    /// Returns the maximum number of calls at a time.
    fn calls(&self, most: CallLimits) -> u64 {
        match most.calls {
            Calls::Pipelined => self.window.calls(),
            Calls::Separate(calls) => calls.max(1) as u64,
        }
    }

    /// Returns whether the caller has to begin a flight. If so, counts the flight.
    fn begins_flight(&mut self, most: CallLimits) -> bool {
        let begins = !self.is_starting && self.may_begin(most);
        if begins {
            self.flights += 1;
            self.is_starting = true;
        }
        begins
    }

    fn may_begin(&mut self, most: CallLimits) -> bool {
        let (waiting, flights) = (self.queue.ready() as u64, self.flights as u64);
        if waiting == 0 || flights == 0 {
            return waiting > 0;
        }
        let calls = self.calls(most);
        if flights >= calls {
            return false;
        }
        let has_room = match most.calls {
            Calls::Pipelined => self.window.has_room(self.units, waiting, most.units as u64),
            Calls::Separate(_) => self.window.has_room(self.units, 1, 1),
        };
        if !has_room {
            self.window.record_limit();
            return false;
        }
        if self.window.is_paced() {
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

    /// Removes a flight from the count. After the lane's last flight, this frees memory that only a burst needed,
    /// because a cluster has thousands of lanes.
    fn end(&mut self, begun_by: Option<u64>) -> Option<Arc<CallerFlight>> {
        self.flights -= 1;
        if self.flights == 0 {
            self.queue.shrink();
        }
        begun_by.and_then(|number| self.take_caller_flight(number))
    }

    /// Removes and returns the flight that request `number` began and that its caller drives.
    fn take_caller_flight(&mut self, number: u64) -> Option<Arc<CallerFlight>> {
        let at = self.caller_flights.iter().position(|(other, _)| *other == number)?;
        Some(self.caller_flights.swap_remove(at).1)
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
        let mut lane = self.lanes.lock(self.number);
        if let FlightState::InFlight { held, sent, at } = std::mem::replace(&mut self.state, FlightState::Ended) {
            lane.units -= sent.units;
            let deadline = self.lanes.deadline;
            match result {
                CallResult::Answered { clock, .. } => {
                    lane.clock = clock.map(|stated| StoreClock::new(stated, at, now)).or(lane.clock);
                    let took = now.saturating_duration_since(at);
                    lane.quickest.record(took, now);
                    let quickest = lane.quickest.read(now).unwrap_or(took);
                    lane.window.record_quickest(quickest);
                    lane.window.record(took, sent, deadline);
                }
                CallResult::Failed if now >= until => lane.window.record_silence(sent, deadline),
                CallResult::Failed => {
                    lane.window.record_failure(now.saturating_duration_since(at), sent, deadline);
                }
            }
            match result {
                CallResult::Answered { rest, .. } if !rest.is_zero() => resting = Some((held, rest)),
                _ => lane.queue.release(held, &mut gone),
            }
            if matches!(result, CallResult::Answered { .. }) {
                lane.answered += 1;
            }
        }
        let flight = lane.end(self.begun_by.take());
        let goes_on = lane.begins_flight(most);
        drop(lane);
        drop(gone);
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
        let (mut gone, mut left) = (Vec::new(), Vec::new());
        {
            let mut lane = self.lanes.lock(self.number);
            lane.end(self.begun_by);
            match state {
                FlightState::InFlight { held, sent, .. } => {
                    lane.units -= sent.units;
                    lane.queue.release(held, &mut gone);
                }
                FlightState::Starting | FlightState::Ended => lane.is_starting = false,
            }
            if lane.flights == 0 {
                left = lane.queue.take_all();
            }
        }
        drop(gone);
        left.into_iter().for_each(|waiting| hand_over(waiting.receiver, Err(Unanswered::RuntimeEnded.into())));
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
        let mut lane = self.lanes.lock(self.number);
        lane.queue.release(held, &mut gone);
        let begins = lane.begins_flight(most);
        drop(lane);
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
