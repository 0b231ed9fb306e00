//! The load of one server, which all lanes of this server share.
//!
//! The requests of a lane may share a flight. A server of a cluster has a lane for each of its slots, and what these
//! lanes have in flight together is the server's load. So the law of load holds for the server, and not for each lane:
//! a lane without flights begins one only if the server's window has room. Otherwise the lane is listed, and the next
//! flight of the server that ends lets the listed lanes begin, in their turns.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::batch::{CallLimits, Calls, SHARE};
use super::caller_flight::CallerFlight;
use super::halving::StoreClock;
use super::load_window::LoadWindow;
use super::quickest::{QuickestCall, REMEMBERED};
use crate::limiter::remote::unanswered::{Shed, Unanswered};

/// The list in which a lane waits for room.
#[derive(Clone, Copy)]
pub(super) enum ListKind {
    Checks,
    Corrections,
}

/// The load of a server, and the limits of its flights.
pub(super) struct ServerLoad {
    pub(super) window: LoadWindow,
    pub(super) quickest: QuickestCall,
    /// The instant at which a call last ended, whether it was answered or failed.
    pub(super) ended_at: Option<Instant>,
    /// The server's clock according to the last answer that reported it. `None` if the server does not report its
    /// time.
    pub(super) clock: Option<StoreClock>,
    /// The number of flights, including those that have taken no request yet.
    pub(super) flights: usize,
    /// The number of flights that have taken no request yet. Each of them counts as one unit.
    pub(super) starting: u64,
    /// The number of units in flight, counted in the same way as in `window`.
    pub(super) units: u64,
    /// The number of waiting units that are sent before a new check, in all lanes.
    pub(super) waiting: usize,
    /// The number of flights that the server answered.
    pub(super) answered: u64,
    /// The lanes without flights whose checks wait until the window has room, and those with corrections only.
    listed: [VecDeque<u16>; 2],
    /// The number of turns that lanes with checks had since the last turn of a lane with corrections only.
    turns_since: usize,
    /// The flights that callers drive, each with its lane, and with the number of the request that began it.
    caller_flights: Vec<(u16, u64, Arc<CallerFlight>)>,
    /// The instant from which the next request is not ahead of its time, if requests are sent evenly.
    next_paced: Option<Instant>,
}

impl ServerLoad {
    pub(super) fn new() -> Self {
        Self {
            window: LoadWindow::new(),
            quickest: QuickestCall::default(),
            ended_at: None,
            clock: None,
            flights: 0,
            starting: 0,
            units: 0,
            waiting: 0,
            answered: 0,
            listed: [VecDeque::new(), VecDeque::new()],
            turns_since: SHARE,
            caller_flights: Vec::new(),
            next_paced: None,
        }
    }

    /// Returns how long calls take, and the quickest call of the last seconds. `None` if no call ended in the last
    /// seconds, because the time of earlier calls says nothing of the server now.
    pub(super) fn call_times(&mut self, now: Instant) -> Option<(Duration, Option<Duration>)> {
        let is_recent = self.ended_at.is_some_and(|at| now.saturating_duration_since(at) < REMEMBERED);
        let quickest = self.quickest.read(now);
        self.window.call().filter(|_| is_recent).map(|call| (call, quickest))
    }

    /// Returns whether the window has room for a flight of a lane that has none, besides `left` units. Such a lane
    /// always begins a flight if the server has none.
    pub(super) fn has_room_for_lane(&self, left: u64) -> bool {
        self.flights == 0 || self.window.has_room(self.units + self.starting + left, 1, 1)
    }

    /// Returns whether a lane waits for room.
    pub(super) fn has_listed(&self) -> bool {
        self.listed.iter().any(|list| !list.is_empty())
    }

    /// Adds a lane to the end of one of the lists.
    pub(super) fn list(&mut self, lane: u16, kind: ListKind) {
        self.listed[kind as usize].push_back(lane);
    }

    /// Removes and returns the lane whose turn it is, if the window has room for it. One of `SHARE` turns is that of a
    /// lane with corrections only. If no checks wait, such a lane leaves room for a check.
    pub(super) fn next_listed(&mut self) -> Option<(u16, ListKind)> {
        let [checks, corrections] = &self.listed;
        let kind = match (checks.is_empty(), corrections.is_empty()) {
            (false, false) if self.turns_since >= SHARE - 1 => ListKind::Corrections,
            (false, _) => ListKind::Checks,
            _ => ListKind::Corrections,
        };
        let left = u64::from(checks.is_empty());
        if !self.has_room_for_lane(left) {
            return None;
        }
        let lane = self.listed[kind as usize].pop_front()?;
        self.turns_since = match kind {
            ListKind::Checks => self.turns_since.saturating_add(1),
            ListKind::Corrections => 0,
        };
        Some((lane, kind))
    }

    /// Removes and returns all listed lanes.
    pub(super) fn take_listed(&mut self) -> Vec<u16> {
        self.listed.iter_mut().flat_map(std::mem::take).collect()
    }

    /// Returns whether the window has room for a whole flight of these waiting units, besides `left` units.
    pub(super) fn has_room(&self, waiting: u64, left: u64, most: CallLimits) -> bool {
        let used = self.units + self.starting + left;
        match most.calls {
            Calls::Pipelined => self.window.has_room(used, waiting, most.units as u64),
            Calls::Separate(_) => self.window.has_room(used, 1, 1),
        }
    }

    /// Returns the reason if a check that comes now is not sent: the waiting requests would make its answer too late,
    /// or it is ahead of the pace. `waiting` is the number of units of its lane that are sent before it.
    pub(super) fn refuses(
        &mut self,
        waiting: usize,
        now: Instant,
        deadline: Duration,
        most: CallLimits,
    ) -> Option<Unanswered> {
        if self.flights == 0 {
            return None; // an idle server always gets a request
        }
        let fits = !self.window.is_paced() || self.fits_pace(now, deadline);
        let shed = self.shed(waiting, deadline, most);
        if fits && shed.wait().saturating_add(self.window.needed(deadline)) <= deadline {
            return None;
        }
        self.window.record_limit();
        Some(self.too_far(now, deadline).unwrap_or(Unanswered::Shed(shed)))
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

    /// Returns the reason why checks of a lane are not sent. `waiting` is the number of units of the lane that are sent
    /// before a new check.
    pub(super) fn reason(&mut self, waiting: usize, now: Instant, deadline: Duration, most: CallLimits) -> Unanswered {
        self.too_far(now, deadline).unwrap_or(Unanswered::Shed(self.shed(waiting, deadline, most)))
    }

    /// Returns the requests before a new check, and how many may be in flight: those of its lane, or those of all lanes
    /// if these make it wait longer.
    fn shed(&self, waiting: usize, deadline: Duration, most: CallLimits) -> Shed {
        let call = self.window.call().unwrap_or_default();
        let shed = |waiting, carries: u64| {
            let carries = u32::try_from(carries).unwrap_or(u32::MAX).max(1);
            Shed { waiting, carries, call, deadline }
        };
        let of_lane = shed(waiting, self.carries(most));
        match most.calls {
            // Each lane has calls of its own.
            Calls::Pipelined if self.waiting > waiting => {
                let of_all = shed(self.waiting, self.window.units());
                if of_all.wait() > of_lane.wait() { of_all } else { of_lane }
            }
            _ => of_lane,
        }
    }

    /// Returns the reason why checks are not sent if even a lone call takes longer than the deadline.
    pub(super) fn too_far(&mut self, now: Instant, deadline: Duration) -> Option<Unanswered> {
        let call = self.window.alone().filter(|alone| *alone >= deadline)?;
        Some(Unanswered::TooFar { call, deadline, quickest: self.quickest.read(now) })
    }

    /// Returns how many units of a lane can be in flight.
    fn carries(&self, most: CallLimits) -> u64 {
        let (window, units) = (self.window.units(), most.units as u64);
        match most.calls {
            Calls::Pipelined => window.min(self.calls(most) * units),
            Calls::Separate(_) => window.min(self.calls(most)).saturating_mul(units),
        }
    }

    /// Returns the maximum number of calls of a lane at a time.
    pub(super) fn calls(&self, most: CallLimits) -> u64 {
        match most.calls {
            Calls::Pipelined => self.window.calls(),
            Calls::Separate(calls) => calls.max(1) as u64,
        }
    }

    /// Notes the flight that the caller of a lane's request drives.
    pub(super) fn add_caller_flight(&mut self, lane: u16, request: u64, flight: Arc<CallerFlight>) {
        self.caller_flights.push((lane, request, flight));
    }

    /// Removes and returns the flight that a lane's request began and that its caller drives.
    pub(super) fn take_caller_flight(&mut self, lane: u16, request: u64) -> Option<Arc<CallerFlight>> {
        let at = self.caller_flights.iter().position(|(of, number, _)| (*of, *number) == (lane, request))?;
        Some(self.caller_flights.swap_remove(at).2)
    }

    /// Removes and returns the flights that callers drive, of one lane or of all.
    pub(super) fn take_caller_flights(&mut self, lane: Option<u16>) -> Vec<Arc<CallerFlight>> {
        let is_taken = |of: u16| lane.is_none_or(|lane| of == lane);
        let (taken, left): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.caller_flights).into_iter().partition(|(of, ..)| is_taken(*of));
        self.caller_flights = left;
        taken.into_iter().map(|(.., flight)| flight).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::load_window::Sent;
    use super::*;

    const DEADLINE: Duration = Duration::from_millis(50);

    const MOST: CallLimits = CallLimits { units: 64, calls: Calls::Pipelined };

    /// Returns the load of a server whose calls take 20 ms, and whose window has 512 requests. One flight is under way.
    fn load() -> ServerLoad {
        let mut load = ServerLoad::new();
        let sent = Sent { units: 1, in_flight: 1, flights: 2, phase: None };
        load.window.record(Duration::from_millis(20), sent, DEADLINE);
        load.flights = 1;
        load
    }

    #[test]
    fn one_of_four_turns_is_that_of_corrections() {
        let mut load = load();
        for lane in 0..8 {
            load.list(lane, ListKind::Checks);
            load.list(100 + lane, ListKind::Corrections);
        }
        let turns: Vec<_> = std::iter::from_fn(|| load.next_listed().map(|(lane, _)| lane)).collect();
        assert_eq!(turns, [100, 0, 1, 2, 101, 3, 4, 5, 102, 6, 7, 103, 104, 105, 106, 107]);
    }

    #[test]
    fn corrections_leave_room_for_a_check() {
        let mut load = load();
        (load.units, load.starting) = (510, 1);
        assert!(load.has_room(1, 0, MOST) && load.has_room_for_lane(0));
        assert!(!load.has_room(1, 1, MOST) && !load.has_room_for_lane(1));
        load.list(7, ListKind::Corrections);
        assert!(load.next_listed().is_none());
        load.list(8, ListKind::Checks);
        assert_eq!(load.next_listed().map(|(lane, _)| lane), Some(7), "it has its turn beside a check");
    }

    /// The requests of a lane share its flights, of which five are under way at a time. Those of all lanes share the
    /// window.
    #[test]
    fn check_waits_for_its_lane_or_for_all_lanes() {
        let mut load = load();
        for (waiting, all, shed) in [(0, 0, (0, 320)), (600, 800, (600, 320)), (100, 1_000, (1_000, 512))] {
            load.waiting = all;
            let Unanswered::Shed(found) = load.reason(waiting, Instant::now(), DEADLINE, MOST) else { panic!("shed") };
            assert_eq!((found.waiting, found.carries), shed);
        }
        assert!(load.refuses(100, Instant::now(), DEADLINE, MOST).is_some());
        load.waiting = 100;
        assert!(load.refuses(100, Instant::now(), DEADLINE, MOST).is_none());
    }
}
