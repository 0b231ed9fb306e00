//! The law of load: how many calls and requests a lane has in flight, and which requests are not sent.
//!
//! The number of decisions rises with the load up to the number that the store can make within the deadline, and
//! stays there:
//!
//! * A request is not sent if its answer would come too late. So the store does no work for answers that no caller
//!   waits for. Work for such answers makes throughput collapse under an overload.
//! * The window bounds the requests in flight, or the calls in flight if each call has its own connection.
//!   The window grows while requests wait for it and calls take less than seven tenths of the deadline, and
//!   shrinks when calls take longer. Limiters that share a store get about the same window, because each
//!   limiter adds the same small step.
//! * Long calls are no reason to send less if other clients cause them. [`halving`](super::halving) finds out whether
//!   other clients or limiters are the cause. While other clients are the cause, requests are sent evenly.
//! * A lane has few calls in flight while calls are short, because one call with many requests costs less than many
//!   small calls. A lane has many calls in flight while calls are long, because a call that waits costs nothing. But
//!   it has few if calls are long because the lane's requests [wait for each other](super::own_wait).
//!
//! DESIGN.md says which other laws were tried.

use std::time::Duration;

use super::halving::{Halving, HalvingPhase};
use super::own_wait::OwnWait;

/// The number of requests that may be in flight before any call has been measured.
const WINDOW: u64 = 512;

/// The bounds of the window.
const WINDOW_MIN: u64 = 2;
const WINDOW_MAX: u64 = 1 << 16;

/// The number of parts that a window of one request has. Windows and gains are counted in such parts.
const PART: u64 = 1 << 10;

/// The least and the largest number of calls that a lane has in flight, if its calls share a connection. With two
/// calls at a time, 16 callers got half the checks that they got when each caller sent a call of its own, because
/// the store and the process waited for each other.
pub(super) const CALLS_MIN: u64 = 4;
const CALLS_MAX: u64 = 64;

/// The number of further calls for each millisecond that a call takes beyond `CALL_SHORT`. A process that
/// lacks processor time reads answers a millisecond late, and more calls would cost the process more processor time.
const CALLS_PER_MS: u64 = 6;
const CALL_SHORT: u64 = 2_000_000;

/// A window has room for at least this number of flights, or for one more than the allowed calls if these are fewer.
/// So a store that is the bottleneck has several flights to work on.
const FLIGHTS_MIN: u64 = 8;

/// A call is quick if it takes less than this many twentieths of the deadline.
const QUICK: u64 = 7;

/// Fewer late requests in a row than this do not show that a window is too large. All requests of a small window may
/// just have missed a turn of the store.
const LATE_MIN: u64 = 16;

/// The times of a lane's calls in nanoseconds, and the bounds that follow from them.
pub(super) struct LoadWindow {
    /// The smoothed time of a call, or 0 before the first call.
    call: u64,
    /// The smoothed deviation of calls from that smoothed time.
    spread: u64,
    /// The maximum number of calls at a time, if they share a connection.
    calls: u64,
    own_wait: OwnWait,
    /// The time of a call while no other call is in flight, or 0 before the first such call.
    alone: u64,
    /// The time of the quickest call of late, or 0 before the first call.
    quickest: u64,
    halving: Halving,
    /// True if this limiter's window is halved now.
    is_halved: bool,
    /// True if other clients cause most of a call's time, as the last finding says.
    long_by_others: bool,
    /// True if requests are sent evenly.
    is_paced: bool,
    /// The number of requests that were answered late, one after the other. Counted since a call was last answered
    /// within the deadline, or since the window last shrank.
    late_in_a_row: u64,
    /// The smoothed number of requests in flight when a call is sent, in parts.
    in_flight: u64,
    /// The maximum number of requests in flight, in parts.
    window: u64,
    /// The window at the instant when calls last became too long, in parts. The window grows quickly up to half of
    /// this value. It is 0 before calls were too long, so a new window does not grow quickly. It is `u64::MAX` from the
    /// finding that other clients make calls long until calls next become too long.
    too_large: u64,
    course: Course,
    /// True if requests have waited for the window since the last call came back.
    is_limiting: bool,
}

/// The last change of a window.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Course {
    Grew,
    Shrank,
}

/// The load of a flight, and of the flights beside it, at the instant when the flight was sent.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sent {
    /// The number of the flight's requests.
    pub(super) units: u64,
    /// The number of all requests in flight, including those of this flight.
    pub(super) in_flight: u64,
    /// The number of all flights, including this flight.
    pub(super) flights: usize,
    /// The phase of the store's clock. `None` if the store does not report its time.
    pub(super) phase: Option<HalvingPhase>,
}

impl LoadWindow {
    pub(super) fn new() -> Self {
        let window = WINDOW * PART;
        Self {
            call: 0,
            spread: 0,
            calls: CALLS_MIN,
            own_wait: OwnWait::default(),
            alone: 0,
            quickest: 0,
            halving: Halving::default(),
            is_halved: false,
            long_by_others: false,
            is_paced: false,
            late_in_a_row: 0,
            in_flight: 0,
            window,
            too_large: 0,
            course: Course::Grew,
            is_limiting: false,
        }
    }

    /// Returns the smoothed time of a call. `None` before the first call.
    pub(super) fn call(&self) -> Option<Duration> {
        (self.call > 0).then(|| Duration::from_nanos(self.call))
    }

    /// Returns the time of a quick call while no other call is in flight, if that time is known.
    pub(super) fn alone(&self) -> Option<Duration> {
        (self.alone > 0).then(|| Duration::from_nanos(self.alone))
    }

    /// Returns the time that a request needs for its answer if it is sent now. The time is zero before the first
    /// call.
    ///
    /// If a lone call takes about the same time as other calls, limiters are not the cause of long calls, and a
    /// late answer costs other clients nothing. In this case the result is the time of a quick call, which is two
    /// spreads below the smoothed time, and at most half of the deadline. A request that is sent right after an answer
    /// waits for two whole turns of the store, but a request that is sent at another time may be answered in time.
    ///
    /// Otherwise the result is the time of a slow call, which is a spread above the smoothed time, with a margin of a
    /// twentieth of the deadline. The result is at most seven eighths of the deadline, so a new request may always be
    /// sent if the window has room. With a larger result, an estimate that is too long would never become shorter:
    /// refused callers would retry at once and keep the process so busy that it reads the few answers late.
    pub(super) fn needed(&self, deadline: Duration) -> Duration {
        match self.call {
            0 => Duration::ZERO,
            call if self.long_by_others || call <= self.beyond_alone(nanos(deadline)) => {
                Duration::from_nanos(call.saturating_sub(2 * self.spread)).min(deadline / 2)
            }
            call => (Duration::from_nanos(call + self.spread) + deadline / 20).min(deadline / 8 * 7),
        }
    }

    /// Returns the size of the window, in requests. While windows are halved, this is half of the window.
    pub(super) fn units(&self) -> u64 {
        let window = self.window / PART;
        if self.is_halved { (window / 2).max(1) } else { window }
    }

    /// Returns the maximum number of requests in flight: a window. If requests are sent evenly, it is two windows: a
    /// store that works in turns may answer after nearly two turns, and a request must not have to wait for an answer,
    /// because it would then be sent at the beginning of a turn. So windows are not halved here, as the requests of the
    /// phase before are still in flight.
    fn most_in_flight(&self) -> u64 {
        if self.is_paced() { 2 * self.window / PART } else { self.units() }
    }

    /// Returns whether calls are so long that their cause matters. `deadline` is in nanoseconds.
    fn is_long(&self, deadline: u64) -> bool {
        self.call > deadline / 2
    }

    /// Enters a phase of the store's clock.
    pub(super) fn enter(&mut self, phase: Option<HalvingPhase>, deadline: Duration) {
        self.is_halved = phase.is_some_and(|phase| phase.is_halved) && self.is_long(nanos(deadline));
    }

    /// Returns the maximum number of calls at a time, if they share a connection.
    pub(super) fn calls(&self) -> u64 {
        self.calls
    }

    /// Returns the maximum number of requests of the next flight, if `in_flight` are under way. The result is at
    /// least one.
    pub(super) fn room(&self, in_flight: u64, most: u64) -> u64 {
        let left = self.most_in_flight().saturating_sub(in_flight);
        most.min(left).min(self.flight_max()).max(1)
    }

    /// Returns whether the window has room for a whole flight: for all waiting requests, or for the maximum of one
    /// flight. So flights do not become small while many requests wait.
    pub(super) fn has_room(&self, in_flight: u64, waiting: u64, most: u64) -> bool {
        let left = self.most_in_flight().saturating_sub(in_flight);
        left >= waiting.min(most).min(self.flight_max()).max(1)
    }

    /// Returns the part of the window that one flight may use. The window has room for one flight more than the allowed
    /// calls. Without it, corrections would fill the window, and each check would wait for the end of a whole flight.
    fn flight_max(&self) -> u64 {
        self.units() / (self.calls + 1).min(FLIGHTS_MIN)
    }

    /// Returns whether requests are sent evenly, because other clients make calls long.
    ///
    /// A store that works in turns answers a call when the next turn has ended. So a request that is sent soon after
    /// an answer waits for two turns. If all that may be sent were sent then, nearly all answers could be late.
    pub(super) fn is_paced(&self) -> bool {
        self.is_paced
    }

    /// Records that requests wait for the window.
    pub(super) fn record_limit(&mut self) {
        self.is_limiting = true;
    }

    /// Records the time of the quickest call of late.
    pub(super) fn record_quickest(&mut self, quickest: Duration) {
        self.quickest = nanos(quickest);
    }

    /// Records how long a call took, and changes the window.
    pub(super) fn record(&mut self, took: Duration, sent: Sent, deadline: Duration) {
        let deadline = nanos(deadline).max(1);
        let was_halved = sent.phase.is_some_and(|phase| phase.is_halved) && self.is_long(deadline);
        // A very long call counts as two deadlines in the averages, so that they forget it after a few calls. A lone
        // call counts with its whole time, because a distant store may take longer.
        let whole_time = nanos(took).clamp(1, 16 * deadline);
        let took = whole_time.min(2 * deadline);
        // Calls are quicker while windows are halved. The next calls may have whole windows again, so a call with a
        // halved window says nothing about their durations. It counts only if it is very quick, because the store was
        // slow for a moment, or if it is too long and limiters are the cause.
        let is_left_out = was_halved && self.call / 4 <= took && {
            self.long_by_others || took <= self.target(deadline).max(self.call)
        };
        self.in_flight = match self.in_flight {
            0 => sent.in_flight * PART,
            smoothed => moved(smoothed, sent.in_flight * PART, 8),
        };
        if self.call == 0 {
            (self.call, self.spread) = (took, took / 4);
        } else if !is_left_out {
            self.spread = moved(self.spread, took.abs_diff(self.call), 8);
            // A call that takes less than half of the average moves the average faster, so that a store that was slow
            // for a moment is used again at once.
            self.call = moved(self.call, took, if took < self.call / 2 { 2 } else { 8 }).max(1);
        }
        // The allowed number of calls grows by at most one for each call that is answered. A burst on an idle lane
        // therefore begins with a few calls, whose durations are measured first. While requests wait for each other,
        // the number shrinks below the calls that are in flight.
        let beyond = self.call.saturating_sub(CALL_SHORT);
        let wanted = CALLS_MIN + beyond.saturating_mul(CALLS_PER_MS) / 1_000_000;
        self.own_wait.record(sent.in_flight, sent.flights, took);
        // The time of a lone call is known late if a way became narrow, but some calls are quick then.
        let alone = self.alone.min(if self.quickest > 0 { self.quickest } else { u64::MAX });
        let calls = match self.own_wait.is_half() && self.call >= 2 * alone {
            true => self.calls.min(sent.flights as u64).saturating_sub(1),
            false => self.calls + 1,
        };
        self.calls = calls.clamp(CALLS_MIN, wanted.min(CALLS_MAX));
        let is_long = self.is_long(deadline);
        let timely = if whole_time < deadline { sent.units } else { 0 };
        self.record_alone(whole_time, sent, deadline, timely);
        self.is_paced = self.long_by_others && is_long;
        if is_left_out {
            return;
        }
        // The window limits the load also if half of the window is in flight. If other clients make calls long, a
        // fourth is enough, because the window may be so large that it is not full even when it is halved.
        let part = if self.is_paced { 4 } else { 2 };
        let is_limiting = std::mem::take(&mut self.is_limiting) || sent.in_flight * part >= self.units();
        let target = self.target(deadline);
        // `gain` is the change of the window for each request of the call: 0.3 · (target − took) / took of a
        // request. The window shrinks by at most a quarter of a request, and grows by at most half a request. With
        // larger steps the window would swing, because the effect of a step shows only a call later.
        let gain = (target as i128 - i128::from(took)) * i128::from(PART) * 3 / (10 * i128::from(took));
        let gain = gain.clamp(-(PART as i128) / 4, PART as i128 / 2) as i64; // far below the limits of `i64`
        self.late_in_a_row = if !self.is_paced || whole_time < deadline { 0 } else { self.late_in_a_row + sent.units };
        let are_all_late = self.late_in_a_row > sent.in_flight.max(self.in_flight / PART).max(LATE_MIN);
        let grows_quickly = self.window < self.too_large / 2;
        // Beside the turns of other clients, some calls are quick. If none is, the store is far away, or the requests
        // of this limiter wait for each other. Then the window has its target, as if nobody else made calls long.
        let is_never_quick = self.quickest > deadline / 20 * QUICK && self.quickest >= self.alone;
        let has_no_target = self.is_paced && !is_never_quick;
        let gain = match has_no_target {
            // As many as are in flight were late one after the other, so they wait for each other. The window loses a
            // quarter of the requests in flight.
            true if are_all_late => -(PART as i64) / 4 * sent.in_flight as i64 / sent.units.max(1) as i64,
            // The window has no target, so it grows by a fixed part of a request.
            true if grows_quickly => PART as i64 / 2,
            true => PART as i64 / 16,
            false if gain >= 0 && grows_quickly => PART as i64,
            false => gain,
        };
        if gain < 0 {
            // A single long call says little, because calls may wait for a turn of the store.
            if !has_no_target && self.call < target.min(self.beyond_alone(deadline)) {
                return;
            }
            self.late_in_a_row = 0;
            if self.course == Course::Grew {
                (self.too_large, self.course) = (self.window, Course::Shrank);
            }
            // A window that is not used says nothing about the load that the store can carry.
            self.window = self.window.min(sent.in_flight * PART);
        } else if !is_limiting {
            return;
        } else {
            self.course = Course::Grew;
        }
        // In addition, each limiter's window grows by half a request for each window of requests that were answered.
        let step = PART * PART / 2 * sent.units / self.window.max(PART);
        let window = self.window.saturating_add_signed(gain.saturating_mul(sent.units as i64)).saturating_add(step);
        self.window = window.clamp(WINDOW_MIN * PART, WINDOW_MAX * PART);
    }

    /// Updates the time of a lone call with the time of this call.
    fn record_alone(&mut self, took: u64, sent: Sent, deadline: u64, timely: u64) {
        let is_long = self.is_long(deadline);
        if let Some(phase) = sent.phase.filter(|_| is_long) {
            if let Some(finding) = self.halving.record(phase, took, sent.in_flight, timely) {
                self.alone = moved(self.alone, finding.alone, 2).max(1);
                // A store may work in turns, and answer all calls of a turn at the turn's end. A call with a small
                // window is sent right after an answer, at the beginning of a turn, but a call with a whole window is
                // sent at any time. Therefore a phase sometimes measures only half of the delay that other processes
                // cause. So a third of the time confirms that others are the cause, and half of the time is needed to
                // find it.
                let part = if self.long_by_others { 3 } else { 2 };
                // Two requests and one request, each sent right after an answer, have no times to compare. But if the
                // one request takes that long, no smaller window would bring answers in time.
                let is_least = self.window < 2 * WINDOW_MIN * PART && finding.halved > deadline / 10 * 6;
                let is_found = is_least || self.alone >= finding.whole / part;
                // A window twice as large decided no more: the requests of this limiter wait for each other, whatever
                // else makes calls long. The window is halved, and requests are still sent evenly. By the usual law
                // the window would become so small that each call is sent right after an answer.
                let is_too_large = self.long_by_others && !is_found && finding.timely <= finding.timely_halved;
                if is_too_large {
                    self.too_large = self.window;
                    self.window = (self.window / 2).max(WINDOW_MIN * PART);
                }
                if is_found && !self.long_by_others {
                    // A window that was found too large before was compared with a target. This does not count now.
                    self.too_large = u64::MAX;
                }
                self.long_by_others = is_found || is_too_large;
            }
        }
        let is_measured = sent.phase.is_some() && is_long && self.alone > 0;
        if sent.flights <= 1 && !is_measured {
            // A slow call may have waited for the calls of other processes. If slow calls counted in full, processes
            // that together fill a store would mistake their waits for the duration of a lone call.
            self.alone = if self.alone == 0 { took } else { took.min(moved(self.alone, took, 32)).max(1) };
        }
    }

    /// Records that a call was not answered before its callers had gone. Such a call counts as longer than the
    /// deadline.
    pub(super) fn record_silence(&mut self, sent: Sent, deadline: Duration) {
        self.record(deadline + deadline / 4, sent, deadline);
    }

    /// Records that a call failed after this time. A failure within half of the deadline shortens the estimate a
    /// little, and lets the window grow, at most to its initial value. Without this change, the values of a slow moment
    /// would stay while the store answers with errors, and would keep checks from being sent.
    pub(super) fn record_failure(&mut self, took: Duration, sent: Sent, deadline: Duration) {
        if took > deadline / 2 {
            return;
        }
        self.call = self.call.min(moved(self.call, nanos(took).max(1), 8));
        let window = self.window.saturating_add((PART / 2).saturating_mul(sent.units));
        self.window = self.window.max(window.min(WINDOW * PART));
    }

    /// Returns how long a call may take before the window shrinks: seven tenths of the deadline. If a lone call takes
    /// more than four tenths of the deadline, the result is longer. It is then the mean of the lone call's time and the
    /// deadline, or a little more than the lone call's time if that is longer ([`beyond_alone`](Self::beyond_alone)).
    fn target(&self, deadline: u64) -> u64 {
        let mean = if self.alone < deadline { (self.alone + deadline) / 2 } else { 0 };
        (deadline / 10 * 7).max(mean).max(self.beyond_alone(deadline))
    }

    /// Returns a little more than the duration of a lone call: 1.15 of it. A call that takes longer than the result was
    /// slowed by other calls in flight. The result is zero if the duration of a lone call is not known. The result is
    /// also zero if a lone call takes more than nine eighths of the deadline, because nearly all answers are then late,
    /// and only a few calls are worth sending.
    fn beyond_alone(&self, deadline: u64) -> u64 {
        if self.alone < deadline / 8 * 9 { self.alone + self.alone / 20 * 3 } else { 0 }
    }
}

/// Moves a smoothed number towards another number by 1/`parts` of the difference, and returns the new number.
fn moved(from: u64, to: u64, parts: u64) -> u64 {
    if to >= from { from + (to - from) / parts } else { from - (from - to) / parts }
}

/// Returns a time in nanoseconds. A time that does not fit counts as 146 years.
fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX / 4)
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::super::halving::StoreClock;
    use super::*;
    use crate::base::time::Timestamp;

    const MS: Duration = Duration::from_millis(1);

    const DEADLINE: Duration = Duration::from_millis(50);

    /// Plays calls of this time over a window that is full.
    fn full(window: &mut LoadWindow, calls: usize, took: Duration) {
        for _ in 0..calls {
            let in_flight = window.units();
            let units = window.room(0, 64);
            window.record_limit();
            window.record(took, Sent { units, in_flight, flights: 8, phase: None }, DEADLINE);
        }
    }

    #[test]
    fn calls_are_few_while_short_and_many_while_long() {
        for (took, calls) in [(MS / 10, 4), (MS, 4), (3 * MS, 10), (5 * MS, 22), (40 * MS, 64)] {
            let mut window = LoadWindow::new();
            assert_eq!((window.calls(), window.needed(DEADLINE)), (4, Duration::ZERO));
            full(&mut window, 100, took);
            assert_eq!(window.calls(), calls, "{took:?}");
        }
    }

    /// Each call is sent while all allowed calls are under way.
    #[test]
    fn calls_become_few_while_all_of_them_are_under_way() {
        let mut window = LoadWindow::new();
        full(&mut window, 100, 40 * MS);
        window.alone = nanos(MS);
        assert_eq!(window.calls(), 64);
        for number in 0..200 {
            let (flights, more) = (window.calls() as usize, number % 8);
            let took = (10 + 3 * more as u32) * MS;
            window.record(took, Sent { units: 1, in_flight: 8 * more, flights, phase: None }, DEADLINE);
        }
        assert_eq!(window.calls(), CALLS_MIN);
    }

    #[test]
    fn window_grows_while_it_is_full_and_calls_come_in_time() {
        let mut window = LoadWindow::new();
        let before = window.units();
        window.record(MS, Sent { units: 1, in_flight: 1, flights: 1, phase: None }, DEADLINE);
        assert_eq!(window.units(), before, "nothing waited for it");
        full(&mut window, 50, 20 * MS);
        let grown = window.units();
        assert!(grown > 2 * before, "{grown}");
        full(&mut window, 400, 45 * MS);
        assert!(window.units() < grown / 2, "{}", window.units());
        full(&mut window, 10_000, 60 * MS);
        assert!((WINDOW_MIN..8).contains(&window.units()), "{}", window.units());
        full(&mut window, 100_000, MS);
        assert_eq!(window.units(), WINDOW_MAX);
    }

    #[test]
    fn window_that_was_not_used_shrinks_to_what_was_in_flight() {
        let mut window = LoadWindow::new();
        window.record(60 * MS, Sent { units: 3, in_flight: 3, flights: 2, phase: None }, DEADLINE);
        assert!(window.units() <= 3, "{}", window.units());
    }

    #[test]
    fn quick_failures_end_the_estimate_of_a_slow_moment() {
        let mut window = LoadWindow::new();
        let sent = Sent { units: 8, in_flight: 8, flights: 1, phase: None };
        window.record_failure(MS, sent, DEADLINE);
        assert_eq!((window.call(), window.units()), (None, WINDOW), "nothing was measured");
        full(&mut window, 1_000, 60 * MS);
        let (slow, units) = (window.call(), window.units());
        assert!(units < WINDOW / 8, "{units}");
        window.record_failure(40 * MS, sent, DEADLINE);
        assert_eq!((window.call(), window.units()), (slow, units));
        (0..200).for_each(|_| window.record_failure(MS, sent, DEADLINE));
        assert!(window.call() < Some(2 * MS), "{:?}", window.call());
        assert_eq!(window.units(), WINDOW);
    }

    /// Other processes fill the store, so a lone call is slow most of the time.
    #[test]
    fn wait_that_others_cause_is_not_the_distance() {
        let mut window = LoadWindow::new();
        window.record(5 * MS, Sent { units: 1, in_flight: 1, flights: 1, phase: None }, DEADLINE);
        let before = window.units();
        for _ in 0..30 {
            let in_flight = window.units();
            window.record_limit();
            window.record(45 * MS, Sent { units: window.room(0, 64), in_flight, flights: 1, phase: None }, DEADLINE);
        }
        assert!(window.units() < before / 10 * 9, "{}", window.units());
    }

    /// Plays ten seconds of calls over a window that is full. A call takes `base`, and `each` for each request in
    /// flight.
    fn play(base: Duration, each: Duration) -> LoadWindow {
        let (mut window, began) = (LoadWindow::new(), Instant::now());
        let clock = StoreClock::new(Timestamp::from_micros(1 << 50), began, began);
        let mut now = began;
        while now < began + 10_000 * MS {
            let phase = Some(clock.phase(now, DEADLINE));
            window.enter(phase, DEADLINE);
            let in_flight = window.units();
            let took = base + each * u32::try_from(in_flight).unwrap();
            window.record_limit();
            window.record(took, Sent { units: window.room(0, 64), in_flight, flights: 8, phase }, DEADLINE);
            now += took / 8;
        }
        window
    }

    #[test]
    fn calls_that_others_make_long_do_not_shrink_the_window() {
        let free = play(48 * MS, Duration::ZERO).units();
        assert!(free > 4 * WINDOW, "{free}");
        let full = play(Duration::ZERO, MS).window.div_ceil(PART);
        assert!((25..45).contains(&full), "{full} requests of a millisecond");
    }

    /// Calls as a trace of Redis beside neighbours has them: of two requests in flight, most wait for two turns, and of
    /// lone requests, half do.
    #[test]
    fn calls_that_are_long_at_the_least_window_are_long_by_others() {
        let (mut window, began) = (LoadWindow::new(), Instant::now());
        let clock = StoreClock::new(Timestamp::from_micros(1 << 50), began, began);
        (window.call, window.alone, window.window) = (55_000_000, 8_000_000, WINDOW_MIN * PART);
        let mut now = began;
        for number in 0.. {
            let phase = clock.phase(now, DEADLINE);
            let (took, most) = if phase.is_halved { ([58, 20][number % 2], 1) } else { (52, 2) };
            for in_flight in 1..=most {
                let sent = Sent { units: 1, in_flight, flights: in_flight as usize, phase: Some(phase) };
                window.record(took * MS, sent, DEADLINE);
            }
            now += took * MS;
            if now > began + 2_300 * MS {
                break;
            }
        }
        assert!(window.long_by_others && window.is_paced());
    }

    /// Others make calls long. A few late answers may come from longer turns of others.
    #[test]
    fn window_shrinks_when_as_many_as_are_in_flight_are_late() {
        let mut window = play(30 * MS, Duration::ZERO);
        window.enter(None, DEADLINE);
        let before = window.units();
        let mut late = |answers: u64| {
            for _ in 0..answers / 8 {
                window.record_limit();
                let sent = Sent { units: 8, in_flight: before, flights: 8, phase: None };
                window.record(70 * MS, sent, DEADLINE);
            }
            window.units()
        };
        let grown = late(before);
        assert!(grown >= before, "{grown} of {before}");
        let shrunk = late(64);
        assert!(shrunk < grown / 10 * 9, "{shrunk} of {grown}");
    }

    #[test]
    fn late_answers_count_only_while_requests_are_sent_evenly() {
        let mut window = play(55 * MS, Duration::ZERO);
        window.enter(None, DEADLINE);
        let late = |window: &mut LoadWindow, flights| {
            let in_flight = window.units();
            for _ in 0..flights {
                window.record_limit();
                window.record(55 * MS, Sent { units: 8, in_flight, flights: 8, phase: None }, DEADLINE);
            }
            window.units()
        };
        window.long_by_others = false;
        let before = late(&mut window, 100);
        window.long_by_others = true;
        let after = late(&mut window, 1);
        assert!(window.is_paced() && after >= before, "{after} of {before}");
    }

    #[test]
    fn needed_time_is_that_of_a_quick_call_if_others_are_the_cause() {
        let mut window = LoadWindow::new();
        window.record(28 * MS, Sent { units: 1, in_flight: 1, flights: 2, phase: None }, DEADLINE);
        assert_eq!(window.spread, nanos(7 * MS));
        assert_eq!(window.needed(DEADLINE), 28 * MS + 7 * MS + DEADLINE / 20);
        window.long_by_others = true;
        assert_eq!(window.needed(DEADLINE), 28 * MS - 2 * 7 * MS);
    }

    /// Plays a pair of phases and the beginning of the next one, which has the finding of the pair. `whole` and
    /// `halved` are the milliseconds of each call, the requests in flight, and how many of them are answered in time.
    fn find(window: &mut LoadWindow, pair: u32, whole: (u64, u64, u64), halved: (u64, u64, u64)) {
        let began = Instant::now();
        let clock = StoreClock::new(Timestamp::from_micros(1 << 50), began, began);
        for (number, (took, in_flight, timely)) in
            [whole, whole, whole, halved, halved, halved, whole].into_iter().enumerate()
        {
            // A phase lasts for 524 ms, of which 50 ms are left out.
            let phase = Some(clock.phase(began + (1_049 * pair + 525 * (number as u32 / 3) + 100) * MS, DEADLINE));
            let sent = Sent { units: 1, in_flight, flights: in_flight as usize, phase };
            window.record_alone(nanos(MS) * took, sent, nanos(DEADLINE), timely);
        }
    }

    /// Returns a window of this size whose calls are long. A lone call takes 8 ms.
    fn long(window: u64) -> LoadWindow {
        LoadWindow { call: nanos(40 * MS), alone: nanos(8 * MS), window: window * PART, ..LoadWindow::new() }
    }

    #[test]
    fn only_long_calls_have_halved_windows() {
        let now = Instant::now();
        let clock = StoreClock::new(Timestamp::from_micros(1 << 50), now, now);
        let (whole, halved) = (clock.phase(now, DEADLINE), clock.phase(now + 600 * MS, DEADLINE));
        for (call, phase, units) in [(20, halved, 101), (25, halved, 101), (26, halved, 50), (26, whole, 101)] {
            let mut window = LoadWindow { call: nanos(call * MS), window: 101 * PART, ..LoadWindow::new() };
            window.enter(Some(phase), DEADLINE);
            assert_eq!(window.units(), units, "{call} ms, {phase:?}");
            window.enter(None, DEADLINE);
            assert_eq!(window.units(), 101);
        }
    }

    #[test]
    fn target_is_longer_if_a_lone_call_is_long() {
        let us = |time: u64| time * 1_000;
        for (alone, beyond, target) in [
            (0, 0, 35_000),
            (10_000, 11_500, 35_000),
            (30_000, 34_500, 40_000),
            (44_000, 50_600, 50_600),
            (51_000, 58_650, 58_650),
            (57_000, 0, 35_000),
        ] {
            let window = LoadWindow { alone: us(alone), ..LoadWindow::new() };
            let found = (window.beyond_alone(nanos(DEADLINE)), window.target(nanos(DEADLINE)));
            assert_eq!(found, (us(beyond), us(target)), "{alone} us");
        }
    }

    #[test]
    fn call_without_an_answer_takes_longer_than_the_deadline() {
        let mut window = LoadWindow::new();
        window.record_silence(Sent { units: 1, in_flight: 1, flights: 2, phase: None }, DEADLINE);
        assert_eq!(window.call(), Some(DEADLINE * 5 / 4));
    }

    /// If other clients make calls long, a fourth is enough.
    #[test]
    fn window_grows_if_half_of_it_is_in_flight() {
        for (is_paced, in_flight, grows) in [(false, 50, true), (false, 49, false), (true, 25, true), (true, 24, false)]
        {
            let mut window = LoadWindow { long_by_others: is_paced, ..long(100) };
            window.record(30 * MS, Sent { units: 8, in_flight, flights: 2, phase: None }, DEADLINE);
            assert_eq!(window.is_paced(), is_paced);
            assert_eq!(window.window > 100 * PART, grows, "{in_flight} in flight");
        }
    }

    /// Calls take just as long as their target.
    #[test]
    fn each_window_of_answers_adds_half_a_request() {
        let mut window = long(100);
        for _ in 0..10 {
            window.record(35 * MS, Sent { units: 10, in_flight: 100, flights: 10, phase: None }, DEADLINE);
        }
        assert!((PART * 49 / 100..=PART / 2).contains(&(window.window - 100 * PART)), "{}", window.window - 100 * PART);
    }

    /// The window has no target then, and grows by half a request as long as it is small.
    #[test]
    fn window_grows_slowly_while_others_make_calls_long() {
        for (too_large, grown) in [(0, 1), (4_000, 8)] {
            let mut window = LoadWindow { long_by_others: true, too_large: too_large * PART, ..long(1_000) };
            window.record(45 * MS, Sent { units: 16, in_flight: 1_000, flights: 8, phase: None }, DEADLINE);
            let more = window.window - 1_000 * PART;
            assert!((grown * PART..grown * PART + PART / 50).contains(&more), "{more} parts");
        }
    }

    /// Then the store is far away, or the requests of this limiter wait for each other.
    #[test]
    fn window_has_its_target_if_no_call_is_quick() {
        for (quickest, alone, has_target) in [(17, 8, false), (18, 8, true), (18, 18, true), (18, 19, false)] {
            let mut window = LoadWindow { long_by_others: true, alone: nanos(alone * MS), ..long(100) };
            window.record_quickest(quickest * MS);
            window.record(49 * MS, Sent { units: 8, in_flight: 100, flights: 8, phase: None }, DEADLINE);
            assert!(window.is_paced());
            assert_eq!(window.window < 100 * PART, has_target, "{quickest} ms, alone {alone} ms");
        }
    }

    /// A moment with few requests in flight does not make a few late answers count as all.
    #[test]
    fn late_answers_are_compared_with_the_usual_load() {
        let late = |usual| {
            let mut window = LoadWindow { long_by_others: true, ..long(100) };
            let mut record = |took, in_flight| {
                let sent = Sent { units: 8, in_flight, flights: 8, phase: None };
                window.record(took * MS, sent, DEADLINE);
                window.late_in_a_row
            };
            record(45, usual);
            [record(70, 8), record(70, 1), record(70, 2)]
        };
        assert_eq!(late(64), [8, 16, 24]);
        assert_eq!(late(1), [8, 16, 0], "the window shrank");
    }

    #[test]
    fn usual_load_is_that_of_the_last_calls() {
        let mut window = long(1_000);
        for in_flight in std::iter::once(1).chain([64; 60]) {
            window.record(30 * MS, Sent { units: 1, in_flight, flights: 8, phase: None }, DEADLINE);
        }
        assert!((60..=64).contains(&(window.in_flight / PART)), "{}", window.in_flight);
    }

    /// So a store that was slow for a moment is used again at once.
    #[test]
    fn quick_calls_move_the_average_faster() {
        for (took, average) in [(19_000, 29_500), (20_000, 37_500), (48_000, 41_000)] {
            let (mut window, us) = (long(8), Duration::from_micros);
            window.record(us(took), Sent { units: 1, in_flight: 1, flights: 2, phase: None }, DEADLINE);
            assert_eq!(window.call(), Some(us(average)), "{took} us");
        }
    }

    #[test]
    fn each_request_lets_the_window_grow_by_half_of_one() {
        let sent = Sent { units: 16, in_flight: 100, flights: 8, phase: None };
        let (mut answered, mut failed) = (long(100), long(100));
        answered.record(MS, sent, DEADLINE);
        assert_eq!(answered.window, 108 * PART + PART * PART / 2 * 16 / (100 * PART));
        failed.record_failure(MS, sent, DEADLINE);
        assert_eq!(failed.window, 108 * PART);
    }

    /// If a way became narrow, a quick call shows it, and no lone call does.
    #[test]
    fn calls_stay_many_if_a_lone_call_is_as_long() {
        for (alone, quickest, calls) in
            [(15, 0, CALLS_MAX), (15, 15, CALLS_MAX), (15, 5, CALLS_MIN), (5, 15, CALLS_MIN)]
        {
            let mut window = LoadWindow { calls: CALLS_MAX, ..long(10_000) };
            window.record_quickest(quickest * MS);
            for number in 0..200 {
                window.alone = nanos(alone * MS);
                let (flights, more) = (window.calls() as usize, number % 8);
                let took = (10 + 3 * more as u32) * MS;
                window.record(took, Sent { units: 1, in_flight: 8 * more, flights, phase: None }, DEADLINE);
            }
            assert_eq!(window.calls(), calls, "alone {alone} ms, quickest {quickest} ms");
        }
    }

    /// Calls become half as long when half as many requests are in flight.
    #[test]
    fn long_calls_are_not_by_others_if_halving_shortens_them() {
        let mut window = long(8);
        find(&mut window, 0, (100, 8, 0), (52, 4, 0));
        assert!(!window.long_by_others);
        assert_eq!(window.window, 8 * PART);
    }

    /// No smaller window would bring the answers in time.
    #[test]
    fn long_calls_at_the_least_window_are_by_others() {
        for (halved, long_by_others) in [(28, false), (32, true)] {
            let mut window = long(WINDOW_MIN);
            find(&mut window, 0, (100, 2, 0), (halved, 1, 0));
            assert_eq!(window.long_by_others, long_by_others, "{halved} ms");
        }
    }

    #[test]
    fn window_is_halved_if_a_whole_one_decides_no_more() {
        let mut window = LoadWindow { long_by_others: true, ..long(3) };
        find(&mut window, 0, (100, 8, 0), (28, 4, 0));
        assert_eq!(window.window, WINDOW_MIN * PART, "but not below the least one");
        for (timely, timely_halved, is_too_large) in [(0, 0, true), (3, 4, true), (4, 4, true), (4, 3, false)] {
            let mut window = LoadWindow { long_by_others: true, ..long(8) };
            find(&mut window, 0, (100, 8, timely), (52, 4, timely_halved));
            assert_eq!(window.long_by_others, is_too_large, "{timely} and {timely_halved} in time");
            let (window, too_large) = (window.window / PART, window.too_large / PART);
            assert_eq!((window, too_large), if is_too_large { (4, 8) } else { (8, 0) });
        }
    }

    /// A window that was found too large later was not compared with a target.
    #[test]
    fn first_finding_of_others_forgets_what_was_too_large() {
        let mut window = LoadWindow { too_large: 20 * PART, ..long(8) };
        find(&mut window, 0, (52, 8, 4), (50, 4, 4));
        assert!(window.long_by_others);
        assert_eq!(window.too_large, u64::MAX);
        window.too_large = 20 * PART;
        find(&mut window, 2, (52, 8, 4), (50, 4, 4));
        assert!(window.long_by_others);
        assert_eq!(window.too_large, 20 * PART);
    }

    #[test]
    fn lone_calls_count_unless_halving_measures_them() {
        let now = Instant::now();
        let phase = Some(StoreClock::new(Timestamp::from_micros(0), now, now).phase(now, DEADLINE));
        for (call, phase, took, alone) in [
            (20, phase, 5, 5_000_000),
            (40, None, 5, 5_000_000),
            (40, phase, 5, 8_000_000),
            // A slow one counts for a 32nd of its time.
            (20, phase, 40, 9_000_000),
        ] {
            let mut window = LoadWindow { call: nanos(call * MS), ..long(8) };
            let sent = Sent { units: 1, in_flight: 1, flights: 1, phase };
            window.record_alone(nanos(took * MS), sent, nanos(DEADLINE), 1);
            assert_eq!(window.alone, alone, "{call} ms on average, {took} ms alone");
        }
    }

    #[test]
    fn first_lone_call_is_the_time_alone() {
        let now = Instant::now();
        let phase = StoreClock::new(Timestamp::from_micros(0), now, now).phase(now, DEADLINE);
        for took in [MS, 40 * MS] {
            for phase in [None, Some(phase)] {
                let mut window = LoadWindow::new();
                window.record(took, Sent { units: 1, in_flight: 1, flights: 1, phase }, DEADLINE);
                assert_eq!(window.alone(), Some(took), "{phase:?}");
            }
        }
    }

    /// Its round trip alone takes more than seven tenths of the deadline.
    #[test]
    fn far_store_has_a_window_as_well() {
        let mut window = LoadWindow::new();
        window.record(44 * MS, Sent { units: 1, in_flight: 1, flights: 1, phase: None }, DEADLINE);
        let before = window.units();
        full(&mut window, 100, 44 * MS);
        assert!(window.units() > before, "{}", window.units());
    }

    #[test]
    fn extreme_calls_overflow_nothing() {
        assert_eq!(nanos(Duration::MAX), u64::MAX / 4);
        for took in [Duration::ZERO, Duration::MAX] {
            for deadline in [MS, 60_000 * MS] {
                let mut window = LoadWindow::new();
                for number in 0..1_000 {
                    let sent = Sent { units: number, in_flight: number, flights: number as usize, phase: None };
                    window.record(if number % 3 == 0 { took } else { MS }, sent, deadline);
                    assert!((WINDOW_MIN..=WINDOW_MAX).contains(&window.units()));
                    assert!(window.needed(deadline) <= 5 * deadline);
                }
            }
        }
    }
}
