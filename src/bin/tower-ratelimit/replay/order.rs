//! The order of requests in time.
//!
//! Servers write a line when a response ends, and their workers write in turn, so lines are out of order. Stamps of
//! whole seconds do not say when within the second a request came.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use super::read::request::Request;

const SECOND: u64 = 1_000_000;
const DAY: u64 = 86_400 * SECOND;

/// A line that is this much later than all before it is believed if [`HELD`] such lines come in a row.
const JUMP: u64 = 8 * DAY;

/// The log begins at most this long before the middle of its first lines.
const START: u64 = 7 * DAY;

const HELD: usize = 10;

/// The most requests that wait for their turn, and the most bytes of their texts.
const WAITING_MAX: usize = 500_000;
const WAITING_BYTES_MAX: usize = 64 << 20;

/// The most requests of one second that are spread together, if the bytes of their texts fit, too. Later ones come at
/// the second's end.
const SPREAD_MAX: usize = 200_000;

/// A request and its instants.
#[derive(Debug)]
pub(crate) struct Timed {
    pub(crate) request: Request,
    /// If the requests of a second are spread evenly over it.
    pub(crate) spread_us: u64,
    /// If the requests of a second come at once.
    pub(crate) burst_us: u64,
}

/// Puts requests into order.
pub(crate) struct Order {
    window_us: u64,
    waiting: BinaryHeap<Reverse<Waiting>>,
    bytes: usize,
    /// The latest stamp.
    latest_us: u64,
    /// The arrival of the last request that left.
    left_us: u64,
    count: u64,
    held: Vec<Request>,
    second: Vec<Request>,
    second_bytes: usize,
    /// The latest instant that a request was given.
    spread_us: u64,
    pub(crate) odd: Odd,
}

/// The lines that were out of order.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Odd {
    /// Lines that came more than the window too late, and were left out.
    pub(crate) late: u64,
    /// Lines whose date is far ahead of the others, and were left out.
    pub(crate) ahead: u64,
    /// Requests that left early because too many waited.
    pub(crate) crowded: u64,
    /// Whether some stamps are whole seconds.
    pub(crate) is_coarse: bool,
}

struct Waiting {
    at_us: u64,
    count: u64,
    request: Request,
}

impl PartialEq for Waiting {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Waiting {}

impl PartialOrd for Waiting {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Waiting {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at_us, self.count).cmp(&(other.at_us, other.count))
    }
}

impl Order {
    /// `around_us` is a time in the middle of the first lines.
    pub(crate) fn new(window_us: u64, around_us: u64) -> Self {
        Self {
            window_us,
            waiting: BinaryHeap::new(),
            bytes: 0,
            latest_us: around_us.saturating_sub(START),
            left_us: 0,
            count: 0,
            held: Vec::new(),
            second: Vec::new(),
            second_bytes: 0,
            spread_us: 0,
            odd: Odd::default(),
        }
    }

    /// Takes the next request of the log, and gives those whose turn it is to `to`.
    pub(crate) fn take(&mut self, request: Request, to: &mut impl FnMut(Timed)) {
        if request.stamp_us > self.latest_us.saturating_add(JUMP) {
            self.held.push(request);
            if self.held.len() == HELD {
                for request in std::mem::take(&mut self.held) {
                    self.enter(request, to);
                }
            }
            return;
        }
        self.odd.ahead += self.held.len() as u64;
        self.held.clear();
        self.enter(request, to);
    }

    fn enter(&mut self, request: Request, to: &mut impl FnMut(Timed)) {
        self.latest_us = self.latest_us.max(request.stamp_us);
        let oldest = self.latest_us.saturating_sub(self.window_us);
        if request.stamp_us < oldest {
            self.odd.late += 1;
            return;
        }
        self.count += 1;
        self.bytes += size(&request);
        self.waiting.push(Reverse(Waiting { at_us: request.at_us, count: self.count, request }));
        loop {
            let is_crowded = self.waiting.len() > WAITING_MAX || self.bytes > WAITING_BYTES_MAX;
            // A request that took longer than the window leaves as soon as it is known.
            match self.waiting.peek() {
                Some(Reverse(first)) if first.at_us < oldest => {}
                Some(_) if is_crowded => self.odd.crowded += 1,
                _ => return,
            }
            self.leave(to);
        }
    }

    fn leave(&mut self, to: &mut impl FnMut(Timed)) {
        let Some(Reverse(first)) = self.waiting.pop() else { return };
        self.bytes = self.bytes.saturating_sub(size(&first.request));
        let at_us = first.at_us.max(self.left_us);
        self.left_us = at_us;
        let request = Request { at_us, ..first.request };
        let is_same_second = self.second.first().is_some_and(|first| first.at_us / SECOND == at_us / SECOND);
        let is_full = self.second.len() >= SPREAD_MAX || self.second_bytes >= WAITING_BYTES_MAX;
        if !is_same_second || is_full {
            self.spread(to);
        }
        if request.is_coarse {
            self.odd.is_coarse = true;
            self.second_bytes += size(&request);
            self.second.push(request);
        } else {
            self.spread(to);
            self.spread_us = self.spread_us.max(at_us);
            to(Timed { spread_us: self.spread_us, burst_us: at_us, request });
        }
    }

    /// Lets the requests of a second leave.
    fn spread(&mut self, to: &mut impl FnMut(Timed)) {
        let count = self.second.len() as u64;
        self.second_bytes = 0;
        for (index, request) in self.second.drain(..).enumerate() {
            let second = request.at_us / SECOND * SECOND;
            let spread_us = self.spread_us.max(second + index as u64 * SECOND / count);
            self.spread_us = spread_us;
            to(Timed { spread_us, burst_us: second, request });
        }
    }

    /// Lets all requests leave, at the log's end.
    pub(crate) fn finish(&mut self, to: &mut impl FnMut(Timed)) {
        self.odd.ahead += self.held.len() as u64;
        self.held.clear();
        while !self.waiting.is_empty() {
            self.leave(to);
        }
        self.spread(to);
    }
}

fn size(request: &Request) -> usize {
    request.texts.as_ref().map_or(0, |texts| texts.size())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(stamp_us: u64, took_us: u64, is_coarse: bool) -> Request {
        Request { at_us: stamp_us - took_us, stamp_us, is_coarse, client: None, status: 200, agent: 0, texts: None }
    }

    /// Returns the instants, spread and as bursts.
    fn ordered(requests: impl IntoIterator<Item = Request>) -> (Vec<(u64, u64)>, Odd) {
        let mut times = Vec::new();
        let mut order = Order::new(60 * SECOND, 100 * DAY);
        let mut to = |timed: Timed| times.push((timed.spread_us - 100 * DAY, timed.burst_us - 100 * DAY));
        for request in requests {
            order.take(request, &mut to);
        }
        order.finish(&mut to);
        (times, order.odd)
    }

    #[test]
    fn lines_are_ordered_by_their_arrival() {
        let at = |seconds: u64, took: u64| request(100 * DAY + seconds * SECOND, took * SECOND, false);
        let (times, odd) = ordered([at(50, 0), at(10, 5), at(109, 0), at(70, 0), at(49, 0), at(48, 0)]);
        let seconds: Vec<u64> = times.iter().map(|(spread, _)| spread / SECOND).collect();
        assert_eq!(seconds, [5, 49, 50, 70, 109], "the window is a minute, so 48 is too late");
        assert_eq!((odd.late, odd.ahead), (1, 0));
    }

    #[test]
    fn long_request_is_no_late_line() {
        let at = |seconds: u64, took: u64| request(100 * DAY + seconds * SECOND, took * SECOND, false);
        let (times, odd) = ordered([at(1_000, 0), at(2_000, 0), at(2_010, 1_500)]);
        let seconds: Vec<u64> = times.iter().map(|(spread, _)| spread / SECOND).collect();
        assert_eq!(seconds, [1_000, 1_000, 2_000], "it arrived before those that left already");
        assert_eq!(odd.late, 0);
    }

    #[test]
    fn whole_seconds_are_spread_evenly() {
        let coarse = |second: u64| request(100 * DAY + second * SECOND, 0, true);
        let (times, odd) = ordered([coarse(1), coarse(2), coarse(1), coarse(1), coarse(1)]);
        let expected = [1_000_000, 1_250_000, 1_500_000, 1_750_000].map(|us| (us, SECOND));
        assert_eq!(times[..4], expected);
        assert_eq!(times[4..], [(2 * SECOND, 2 * SECOND)]);
        assert!(odd.is_coarse);
    }

    #[test]
    fn absurd_date_does_not_move_the_time() {
        let at = |us: u64| request(us, 0, false);
        let lines = (0..20).map(|second| at(100 * DAY + second * SECOND));
        let odd_ones = [at(5_680_281_599 * SECOND), at(0)];
        let (times, odd) = ordered(odd_ones.into_iter().chain(lines).chain([at(900 * DAY), at(100 * DAY)]));
        assert_eq!(times.len(), 21);
        assert_eq!((odd.ahead, odd.late), (2, 1));
    }

    #[test]
    fn gap_in_the_log_is_passed() {
        let (times, odd) = ordered(
            [100, 200]
                .into_iter()
                .flat_map(|day| (0..20).map(move |second| request(day * DAY + second * SECOND, 0, false))),
        );
        assert_eq!((times.len(), odd.ahead, odd.late), (40, 0, 0));
    }
}
