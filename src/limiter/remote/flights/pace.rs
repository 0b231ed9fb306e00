//! The law of load: how many calls and requests a lane has in flight, and which requests are not sent.
//!
//! What is decided rises with what is offered up to what the store can carry within the deadline, and stays there:
//!
//! * A request is not sent if its answer would come too late. So the store does no work for answers that no caller
//!   waits for, which is what makes an overload collapse.
//! * The window bounds the requests in flight, or the calls if each has a connection of its own. It
//!   grows while requests wait for it and calls take less than seven tenths of the deadline, and
//!   shrinks when they take longer. Limiters that share a store get about the same window, because
//!   each adds the same small step.
//! * Calls are few while they are short, because one call of many requests costs less. They are many while they are
//!   long: a call that waits costs nothing.
//!
//! DESIGN.md says which other laws were tried.

use std::time::Duration;

/// The requests that may be in flight before any call has been measured.
const WINDOW: u64 = 512;

/// The least and the most requests that may be in flight.
const WINDOW_MIN: u64 = 2;
const WINDOW_MAX: u64 = 1 << 16;

/// A part of a window of one request. Windows and gains are counted in such parts.
const PART: u64 = 1 << 10;

/// The fewest and the most calls of a lane at a time, if they share a connection.
const CALLS_MIN: u64 = 2;
const CALLS_MAX: u64 = 64;

/// The further calls for each millisecond that a call takes beyond `CALL_SHORT`.
const CALLS_PER_MS: u64 = 6;
const CALL_SHORT: u64 = 500_000;

/// A flight has at most this part of the window, so that a store that is the limit has several to work on.
const FLIGHTS_MIN: u64 = 8;

/// What calls of a lane have taken, in nanoseconds, and what follows from that.
pub(super) struct Pace {
    /// The smoothed time of a call. It is 0 before the first one.
    call: u64,
    /// How far calls are from that, smoothed.
    spread: u64,
    /// The smoothed time of calls that were in flight alone. It is 0 before the first one.
    alone: u64,
    /// The most requests in flight, in parts.
    window: u64,
    /// The window when calls last became too long, in parts. Up to half of it the window grows quickly.
    proven: u64,
    course: Course,
    /// Requests waited for the window since the last call came back.
    is_limiting: bool,
}

/// The last change of a window.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Course {
    Grew,
    Shrank,
}

/// A flight, when it was sent.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sent {
    /// Its requests.
    pub(super) units: u64,
    /// All requests in flight, its own included.
    pub(super) in_flight: u64,
    /// All flights, itself included.
    pub(super) flights: usize,
}

impl Pace {
    pub(super) fn new() -> Self {
        let window = WINDOW * PART;
        Self { call: 0, spread: 0, alone: 0, window, proven: 0, course: Course::Grew, is_limiting: false }
    }

    /// Returns the smoothed time of a call. `None` before the first one.
    pub(super) fn call(&self) -> Option<Duration> {
        (self.call > 0).then(|| Duration::from_nanos(self.call))
    }

    /// Returns the smoothed time of a call if no other one is in flight, if that is known.
    pub(super) fn alone(&self) -> Option<Duration> {
        (self.alone > 0).then(|| Duration::from_nanos(self.alone))
    }

    /// Returns the time that a request needs for its answer if it is sent now. It is zero before the first call.
    ///
    /// It is less than the deadline, so a request that has just come may always be sent if the
    /// window has room. Without that, an estimate that is too long would be kept: the refused
    /// callers come again at once and keep the process busy, which then reads the few answers late.
    pub(super) fn needed(&self, deadline: Duration) -> Duration {
        match self.call {
            0 => Duration::ZERO,
            call => (Duration::from_nanos(call + self.spread) + deadline / 20).min(deadline / 8 * 7),
        }
    }

    /// Returns the most requests in flight.
    pub(super) fn window(&self) -> u64 {
        self.window / PART
    }

    /// Returns the most calls at a time, if they share a connection.
    pub(super) fn calls(&self) -> u64 {
        let beyond = self.call.saturating_sub(CALL_SHORT);
        (CALLS_MIN + beyond.saturating_mul(CALLS_PER_MS) / 1_000_000).min(CALLS_MAX)
    }

    /// Returns the most requests of the next flight, if this many are in flight. At least one may fly.
    pub(super) fn room(&self, in_flight: u64, most: u64) -> u64 {
        let left = self.window().saturating_sub(in_flight);
        most.min(left).min(self.window() / FLIGHTS_MIN).max(1)
    }

    /// Returns whether the window has room for as many requests as a flight should have: for all that wait, or for as
    /// many as one flight may have. So flights do not become small while many requests wait.
    pub(super) fn has_room(&self, in_flight: u64, waiting: u64, most: u64) -> bool {
        let left = self.window().saturating_sub(in_flight);
        left >= waiting.min(most).min(self.window() / FLIGHTS_MIN).max(1)
    }

    /// Records that requests wait for the window.
    pub(super) fn record_limit(&mut self) {
        self.is_limiting = true;
    }

    /// Records how long a call took, and changes the window.
    pub(super) fn record(&mut self, took: Duration, sent: Sent, deadline: Duration) {
        let deadline = nanos(deadline).max(1);
        let took = nanos(took).clamp(1, 2 * deadline);
        if self.call == 0 {
            (self.call, self.spread) = (took, took / 4);
        } else {
            self.spread = moved(self.spread, took.abs_diff(self.call), 8);
            // Good news is believed sooner: a store that was slow for a moment is used again at once.
            self.call = moved(self.call, took, if took < self.call / 2 { 2 } else { 8 }).max(1);
        }
        if sent.flights <= 1 {
            self.alone = if self.alone == 0 { took } else { moved(self.alone, took, 4).max(1) };
        }
        let is_limiting = std::mem::take(&mut self.is_limiting) || sent.in_flight * 2 >= self.window();
        let target = self.target(deadline);
        // In parts for each request, at most a quarter down and a half up: three tenths of how far
        // the call is from the target. With more, the window would swing, because its effect is
        // seen a call later.
        let gain = (target as i128 - i128::from(took)) * i128::from(PART) * 3 / (10 * i128::from(took));
        let gain = gain.clamp(-(PART as i128) / 4, PART as i128 / 2) as i64; // far below the limits of `i64`
        if gain < 0 {
            if self.course == Course::Grew {
                (self.proven, self.course) = (self.window, Course::Shrank);
            }
            // A window that is not used says nothing about what the store carries.
            self.window = self.window.min(sent.in_flight * PART);
        } else if !is_limiting {
            return;
        } else {
            self.course = Course::Grew;
        }
        let gain = if gain >= 0 && self.window < self.proven / 2 { PART as i64 } else { gain };
        let step = PART * PART / 2 * sent.units / self.window.max(PART);
        let window = self.window.saturating_add_signed(gain.saturating_mul(sent.units as i64)).saturating_add(step);
        self.window = window.clamp(WINDOW_MIN * PART, WINDOW_MAX * PART);
    }

    /// Records that a call was not answered before its callers had gone. It counts as longer than the deadline.
    pub(super) fn record_silence(&mut self, sent: Sent, deadline: Duration) {
        self.record(deadline + deadline / 4, sent, deadline);
    }

    /// Returns how long a call may take: seven tenths of the deadline. If a call takes longer than
    /// that even alone, it is half of what is left.
    fn target(&self, deadline: u64) -> u64 {
        let usual = deadline / 10 * 7;
        if self.alone < deadline { usual.max((self.alone + deadline) / 2) } else { usual }
    }
}

/// Returns a smoothed number that moves towards another one by one part of this many.
fn moved(from: u64, to: u64, parts: u64) -> u64 {
    if to >= from { from + (to - from) / parts } else { from - (from - to) / parts }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX / 4)
}
