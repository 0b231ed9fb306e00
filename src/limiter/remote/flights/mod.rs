//! Takes the requests of a limiter to its store, at most as many as the store answers in time.
//!
//! A flight is one call of the store. Requests that come while flights are under way wait, and go together in the next
//! one. Which requests may fly together is the business of their [`Line`]: any of a Redis server ([`Queue`]), or those
//! that share no key with a flight under way ([`Groups`]). How many flights there are, and which requests are not sent
//! because they would be answered too late, follows from what calls take ([`pace`]).
//!
//! An idle lane sends at once, so a request waits for no timer. A flight is a task of the limiter's runtime, or driven
//! by its caller as long as no other request waits ([`ride`]): no request depends on another caller's future being
//! polled.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::MutexGuard;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::Instant;

use self::fly::{Boarding, Line, Then, Waiting, hand_over};
pub(crate) use self::fly::{Calls, Fly, Landing, Most, Receiver, Rider, hand_out};
#[cfg(feature = "store")]
pub(crate) use self::groups::{Groups, Keyed};
use self::pace::{Pace, Sent};
#[cfg(any(feature = "_redis", test))]
pub(crate) use self::queue::Queue;
use self::ride::{Driven, Ride};
use super::due::Due;
use super::permits::Permits;
use super::unanswered::{Shed, Unanswered};
use crate::store_load::StoreLoad;
use crate::sync::{Mutex, lock};

mod fly;
#[cfg(feature = "store")]
mod groups;
mod pace;
#[cfg(any(feature = "_redis", test))]
mod queue;
mod ride;

/// The time after the deadline at which a caller stops waiting. A call that was sent at once has
/// failed before, with an error that names the server.
const GRACE: Duration = Duration::from_millis(5);

/// The flights of a limiter.
pub(crate) struct Flights<F: Fly>(Arc<Lanes<F>>);

struct Lanes<F: Fly> {
    fly: F,
    lanes: Box<[Mutex<Lane<F>>]>,
    deadline: Duration,
    permits: Permits,
    /// The runtime whose tasks the flights are.
    runtime: Handle,
}

/// Requests that are not independent of each other: one server's, or those of one slot of a cluster.
struct Lane<F: Fly> {
    line: F::Line,
    pace: Pace,
    flights: usize,
    /// What is in flight, as the window counts it.
    units: u64,
    /// A flight has begun that has taken no request yet.
    boarding: bool,
    /// How many requests have come.
    came: u64,
    /// The number of flights that the store answered.
    answered: u64,
    /// How many requests the last flight took.
    boarded: usize,
    /// The flights that callers drive, each with the number of the request that began it.
    rides: Vec<(u64, Arc<Ride>)>,
}

/// The driver of a flight that a request begins.
#[derive(Clone, Copy)]
enum Driver {
    Caller,
    Task,
}

/// The state of a lane when a request came.
struct Arrival {
    number: u64,
    answered: u64,
    flight: Driven,
}

impl<F: Fly> Flights<F> {
    /// Makes this number of lanes with room for `most` requests. The flights are tasks of this runtime.
    pub(crate) fn new(fly: F, lanes: u16, most: usize, deadline: Duration, runtime: Handle) -> Self {
        let lanes = (0..lanes.max(1)).map(|_| Mutex::new(Lane::new())).collect();
        Self(Arc::new(Lanes { fly, lanes, deadline, permits: Permits::new(most), runtime }))
    }

    pub(crate) fn fly(&self) -> &F {
        &self.0.fly
    }

    /// Returns the runtime whose tasks the flights are.
    pub(crate) fn runtime(&self) -> &Handle {
        &self.0.runtime
    }

    /// Returns how many requests wait or are in flight.
    pub(crate) fn len(&self) -> usize {
        self.0.permits.taken()
    }

    /// Returns the load of the store: the time of a call is that of the slowest lane. Nothing is counted as shed.
    pub(crate) fn load(&self) -> StoreLoad {
        let mut load = StoreLoad { waiting: self.len(), deadline: Some(self.0.deadline), ..StoreLoad::default() };
        let now = Instant::now();
        for lane in &self.0.lanes {
            let lane = lock(lane);
            let oldest = lane.line.oldest().map(|since| now.saturating_duration_since(since));
            load.oldest_wait = load.oldest_wait.max(oldest.unwrap_or_default());
            load.calls_in_flight += lane.flights;
            load.call_time = load.call_time.max(lane.pace.call());
        }
        load
    }

    /// Returns what the line of the first lane says about itself.
    #[cfg(test)]
    pub(crate) fn in_line<T>(&self, read: impl FnOnce(&F::Line) -> T) -> T {
        read(&self.0.lock(0).line)
    }

    /// Waits for the answer to a request, no longer than the deadline. `receiver` makes the receiver
    /// of the answer, which passes something on to this future.
    pub(crate) async fn ask<T, R: Receiver<F::Answer, F::Error> + 'static>(
        &self,
        lane: u16,
        request: F::Request,
        receiver: impl FnOnce(oneshot::Sender<T>) -> R,
    ) -> Result<T, F::Error> {
        Ok(self.answered(lane, request, receiver).await?)
    }

    async fn answered<T, R: Receiver<F::Answer, F::Error> + 'static>(
        &self,
        lane: u16,
        request: F::Request,
        receiver: impl FnOnce(oneshot::Sender<T>) -> R,
    ) -> Result<T, Unanswered> {
        if Handle::try_current().is_err() {
            return Err(Unanswered::NoRuntime);
        }
        let permit = self.0.permits.check()?;
        let since = Instant::now();
        let until = since + self.0.deadline;
        let (sender, answer) = oneshot::channel();
        let receiver = Box::new(receiver(sender));
        let waiting = Waiting { request, receiver, number: 0, since, until: Some(until), permit };
        let arrival = self.0.push(lane, waiting, Driver::Caller)?;
        let due = Due::at(until + GRACE);
        match arrival.flight.wait(answer, due).await {
            Some(Ok(answer)) => Ok(answer),
            Some(Err(_)) => Err(Unanswered::RuntimeEnded),
            None => Err(self.0.timed_out(lane, &arrival, due)),
        }
    }

    /// Sends a request, and has its answer handed to a function.
    pub(crate) fn send(
        &self,
        lane: u16,
        request: F::Request,
        then: impl FnOnce(Result<F::Answer, F::Error>) + Send + 'static,
    ) -> Result<(), F::Error> {
        let permit = self.0.permits.correction()?;
        let receiver = Box::new(Then::new(then));
        let waiting = Waiting { request, receiver, number: 0, since: Instant::now(), until: None, permit };
        self.0.push(lane, waiting, Driver::Task)?;
        Ok(())
    }
}

impl<F: Fly> Lanes<F> {
    fn lock(&self, number: u16) -> MutexGuard<'_, Lane<F>> {
        let index = usize::from(number) % self.lanes.len();
        lock(&self.lanes[index])
    }

    /// Adds a request, and begins a flight if one may begin.
    ///
    /// # Errors
    /// Returns why the request is not sent: its answer would come too late.
    fn push(self: &Arc<Self>, number: u16, mut waiting: Waiting<F>, driver: Driver) -> Result<Arrival, Unanswered> {
        let most = self.fly.most();
        let mut lane = self.lock(number);
        if waiting.until.is_some() {
            if let Some(why) = lane.refuses(self.deadline, most) {
                drop(lane);
                return Err(why); // without the lock: the receiver may be the application's code
            }
        }
        let mut arrival = Arrival { number: lane.came, answered: lane.answered, flight: Driven::by_task() };
        waiting.number = lane.came;
        lane.came += 1;
        lane.line.push(waiting);
        if !lane.begins_flight(most) {
            // It waits for these flights.
            let rides = std::mem::take(&mut lane.rides);
            drop(lane);
            rides.iter().for_each(|(_, ride)| ride.make_task());
            return Ok(arrival);
        }
        match driver {
            Driver::Caller if lane.is_quiet() => {
                let ride = Ride::new(fly(self.flight(number, Some(arrival.number))), self.runtime.clone());
                lane.rides.push((arrival.number, Arc::clone(&ride)));
                arrival.flight = Driven::by_caller(ride);
            }
            _ => {
                drop(lane);
                self.begin(number);
            }
        }
        Ok(arrival)
    }

    /// Begins a flight. The lane must not be locked: if the runtime has ended, the flight ends here.
    fn begin(self: &Arc<Self>, number: u16) {
        self.runtime.spawn(fly(self.flight(number, None)));
    }

    fn flight(self: &Arc<Self>, number: u16, ride: Option<u64>) -> Flight<F> {
        Flight { lanes: Arc::clone(self), number, ride, state: State::Boarding }
    }

    /// Lets requests board a flight. Returns them, and when the last caller stops waiting. Requests whose callers have
    /// gone, those whose answer is known by now, and those that would be answered too late are left out.
    fn board(self: &Arc<Self>, flight: &mut Flight<F>) -> Option<(Vec<Rider<F>>, Instant)> {
        let now = Instant::now();
        let most = self.fly.most();
        let mut lane = self.lock(flight.number);
        lane.boarding = false;
        let is_idle = lane.flights == 1;
        let mut boarding = Boarding::new(now, lane.pace.needed(self.deadline), is_idle);
        let room = match most.calls {
            Calls::Pipelined => lane.pace.room(lane.units, most.units as u64) as usize, // no more than `most.units`
            Calls::Separate(_) => most.units.max(1),
        };
        let before = lane.line.before_a_check();
        let boarded = lane.line.board(room, &mut boarding);
        lane.boarded = boarding.riders.len();
        if let Some((held, units)) = boarded {
            let units = most.counted(units);
            lane.units += units;
            let sent = Sent { units, in_flight: lane.units, flights: lane.flights };
            flight.state = State::Flying { held, sent, at: now };
        }
        if lane.line.ready() > 0 && room < most.units.max(1) {
            lane.pace.record_limit();
        }
        let why = (!boarding.late.is_empty()).then(|| lane.shed(self.deadline, most, before));
        let begins = lane.begins_flight(most);
        drop(lane);
        if begins {
            self.begin(flight.number);
        }
        let Boarding { riders, until, has_corrections, gone, known, late, .. } = boarding;
        drop(gone);
        for (waiting, answer) in known {
            hand_over(waiting.receiver, Ok(answer));
        }
        if let Some(why) = why {
            self.fly.record_unsent(&why.into());
            late.into_iter().for_each(|waiting| hand_over(waiting.receiver, Err(why.into())));
        }
        let from_now = has_corrections.then(|| now + self.deadline);
        let until = until.max(from_now)?;
        (!riders.is_empty()).then_some((riders, until))
    }

    /// Returns why there is no answer although the time is over. If the store answered others while
    /// the request waited, or this process was too busy to notice the time, it is no fault of the
    /// store.
    fn timed_out(&self, number: u16, arrival: &Arrival, due: Due) -> Unanswered {
        if due.is_late() {
            return Unanswered::TooBusy(self.deadline);
        }
        let lane = self.lock(number);
        if lane.answered != arrival.answered && lane.line.has(arrival.number) {
            Unanswered::NotSent(self.deadline)
        } else {
            Unanswered::TimedOut(self.deadline)
        }
    }
}

impl<F: Fly> Lane<F> {
    fn new() -> Self {
        Self {
            line: F::Line::default(),
            pace: Pace::new(),
            flights: 0,
            units: 0,
            boarding: false,
            came: 0,
            answered: 0,
            boarded: 0,
            rides: Vec::new(),
        }
    }

    /// Returns why a check that comes now is not sent: with those before it, its answer would come too late.
    fn refuses(&mut self, deadline: Duration, most: Most) -> Option<Unanswered> {
        if self.flights == 0 {
            return None; // an idle lane always sends
        }
        let waiting = self.line.before_a_check();
        let call = self.pace.call().unwrap_or_default();
        let before = call.saturating_mul(u32::try_from(waiting).unwrap_or(u32::MAX)) / self.carries(most);
        if before.saturating_add(self.pace.needed(deadline)) <= deadline {
            return None;
        }
        self.pace.record_limit();
        Some(self.shed(deadline, most, waiting))
    }

    /// Returns why checks are not sent.
    fn shed(&self, deadline: Duration, most: Most, waiting: usize) -> Unanswered {
        let call = self.pace.call().unwrap_or_default();
        match self.pace.alone() {
            Some(alone) if alone >= deadline => Unanswered::TooFar { call: alone, deadline },
            _ => Unanswered::Shed(Shed { waiting, carries: self.carries(most), call, deadline }),
        }
    }

    /// Returns how many units can be in flight, at least one.
    fn carries(&self, most: Most) -> u32 {
        let (window, units) = (self.pace.window(), most.units as u64);
        let carries = match most.calls {
            Calls::Pipelined => window.min(self.calls(most) * units),
            Calls::Separate(_) => window.min(self.calls(most)).saturating_mul(units),
        };
        u32::try_from(carries).unwrap_or(u32::MAX).max(1)
    }

    /// Returns the most calls at a time.
    fn calls(&self, most: Most) -> u64 {
        match most.calls {
            Calls::Pipelined => self.pace.calls(),
            Calls::Separate(calls) => calls.max(1) as u64,
        }
    }

    /// Returns whether the caller has to begin a flight, which is then counted.
    fn begins_flight(&mut self, most: Most) -> bool {
        let begins = !self.boarding && self.may_begin(most);
        if begins {
            self.flights += 1;
            self.boarding = true;
        }
        begins
    }

    fn may_begin(&mut self, most: Most) -> bool {
        let (waiting, flights) = (self.line.ready() as u64, self.flights as u64);
        if waiting == 0 || flights == 0 {
            return waiting > 0;
        }
        let calls = self.calls(most);
        if flights >= calls {
            return false;
        }
        let has_room = match most.calls {
            Calls::Pipelined => self.pace.has_room(self.units, waiting, most.units as u64),
            Calls::Separate(_) => self.pace.has_room(self.units, 1, 1),
        };
        if !has_room {
            self.pace.record_limit();
            return false;
        }
        // The second half of the flights have to be larger than those before, or requests that come one by one would
        // take all of them, and the next ones wait for a whole call.
        let is_second_half = most.calls == Calls::Pipelined && flights >= (calls / 2).max(2);
        !is_second_half || waiting >= (3 * self.units / flights).min(most.units as u64)
    }

    /// Whether requests come one by one. If they come together, a flight that begins a moment later takes them
    /// together.
    fn is_quiet(&self) -> bool {
        self.flights == 1 && self.boarded <= 1
    }

    /// Counts a flight no longer. A lane keeps little memory of a burst: a cluster has thousands of them.
    fn end(&mut self, ride: Option<u64>) -> Option<Arc<Ride>> {
        self.flights -= 1;
        if self.flights == 0 {
            self.line.shrink();
        }
        ride.and_then(|number| self.take_ride(number))
    }

    /// Takes out a flight that its caller drives, by the number of the request that began it.
    fn take_ride(&mut self, number: u64) -> Option<Arc<Ride>> {
        let at = self.rides.iter().position(|(other, _)| *other == number)?;
        Some(self.rides.swap_remove(at).1)
    }
}

/// A flight, which is counted in its lane.
struct Flight<F: Fly> {
    lanes: Arc<Lanes<F>>,
    number: u16,
    /// The number of the request that began it, if its caller drives it.
    ride: Option<u64>,
    state: State<F>,
}

enum State<F: Fly> {
    /// It has taken no request yet.
    Boarding,
    Flying {
        held: <F::Line as Line<F>>::Held,
        sent: Sent,
        at: Instant,
    },
    Landed,
}

impl<F: Fly> Flight<F> {
    /// Ends the flight, unless it goes on with requests that wait. Returns whether it has ended. A flight that goes on
    /// is a task: its caller has the answer, and no request waits for the caller.
    fn lands(&mut self, landing: Landing, until: Instant) -> bool {
        let now = Instant::now();
        let (mut gone, mut resting) = (Vec::new(), None);
        let most = self.lanes.fly.most();
        let mut lane = self.lanes.lock(self.number);
        if let State::Flying { held, sent, at } = std::mem::replace(&mut self.state, State::Landed) {
            lane.units -= sent.units;
            let deadline = self.lanes.deadline;
            match landing {
                Landing::Answered { .. } => lane.pace.record(now.saturating_duration_since(at), sent, deadline),
                Landing::Failed if now >= until => lane.pace.record_silence(sent, deadline),
                Landing::Failed => {}
            }
            match landing {
                Landing::Answered { rest } if !rest.is_zero() => resting = Some((held, rest)),
                _ => lane.line.land(held, &mut gone),
            }
            if matches!(landing, Landing::Answered { .. }) {
                lane.answered += 1;
            }
        }
        let ride = lane.end(self.ride.take());
        let goes_on = lane.begins_flight(most);
        drop(lane);
        drop(gone);
        if let Some((held, rest)) = resting {
            let resting = Resting { lanes: Arc::clone(&self.lanes), number: self.number, held: Some(held) };
            self.lanes.runtime.spawn(async move {
                Due::after(rest).wait().await;
                drop(resting);
            });
        }
        if let Some(ride) = ride.filter(|_| goes_on) {
            ride.make_task();
        }
        if goes_on {
            self.state = State::Boarding;
        }
        !goes_on
    }
}

impl<F: Fly> Drop for Flight<F> {
    /// Fails the requests that wait for the last flight if it did not land: the runtime has ended.
    fn drop(&mut self) {
        let state = std::mem::replace(&mut self.state, State::Landed);
        if matches!(state, State::Landed) {
            return;
        }
        let (mut gone, mut left) = (Vec::new(), Vec::new());
        {
            let mut lane = self.lanes.lock(self.number);
            lane.end(self.ride);
            match state {
                State::Flying { held, sent, .. } => {
                    lane.units -= sent.units;
                    lane.line.land(held, &mut gone);
                }
                State::Boarding | State::Landed => lane.boarding = false,
            }
            if lane.flights == 0 {
                left = lane.line.take_all();
            }
        }
        drop(gone);
        left.into_iter().for_each(|waiting| hand_over(waiting.receiver, Err(Unanswered::RuntimeEnded.into())));
    }
}

/// What a flight held, until the next flight may have it.
struct Resting<F: Fly> {
    lanes: Arc<Lanes<F>>,
    number: u16,
    held: Option<<F::Line as Line<F>>::Held>,
}

impl<F: Fly> Drop for Resting<F> {
    fn drop(&mut self) {
        let Some(held) = self.held.take() else { return };
        let mut gone = Vec::new();
        let most = self.lanes.fly.most();
        let mut lane = self.lanes.lock(self.number);
        lane.line.land(held, &mut gone);
        let begins = lane.begins_flight(most);
        drop(lane);
        drop(gone); // a receiver that is dropped may send a refund
        if begins {
            self.lanes.begin(self.number);
        }
    }
}

/// Sends a lane's requests until none may fly.
async fn fly<F: Fly>(mut flight: Flight<F>) {
    let lanes = Arc::clone(&flight.lanes);
    loop {
        let mut landed = (Landing::Failed, Instant::now());
        if let Some((riders, until)) = lanes.board(&mut flight) {
            // A store that panics fails these requests only.
            let landing = AssertUnwindSafe(lanes.fly.fly(riders, until)).catch_unwind().await;
            landed = (landing.unwrap_or(Landing::Failed), until);
        }
        if flight.lands(landed.0, landed.1) {
            return;
        }
    }
}

#[cfg(test)]
mod tests;
