//! The order of requests in time.
//!
//! Servers write a line when a response ends, and their workers write in turn, so lines are out of order. Stamps of
//! whole seconds do not say when within the second a request came.
//!
//! A log may have several files. The next line is always read from the file that is furthest behind, so files that
//! follow each other are read one by one, and files of several servers together.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use super::read::log::{JUMP_US, ROW};
use super::read::request::Request;

const SECOND: u64 = 1_000_000;
/// The most requests that wait for their turn, and the most bytes of their texts.
const WAITING_MAX: usize = 500_000;
const WAITING_BYTES_MAX: usize = 128 << 20;

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
    pub(crate) files: Vec<FileOrder>,
    /// The files that are being read, and the first that is not read yet.
    open: Vec<usize>,
    unread: usize,
    waiting: BinaryHeap<Reverse<Waiting>>,
    bytes: usize,
    /// The arrival of the last request that left.
    left_us: u64,
    count: u64,
    second: Vec<Request>,
    second_bytes: usize,
    /// The latest instant that a request was given.
    spread_us: u64,
    /// Requests that left early because too many waited.
    pub(crate) crowded: u64,
    /// Requests that took longer than the window, and count from a second or more after they began.
    pub(crate) shortened: u64,
    /// Whether some stamps are whole seconds.
    pub(crate) is_coarse: bool,
}

/// How far a file has been read, and its lines that were left out.
#[derive(Debug)]
pub(crate) struct FileOrder {
    /// The latest stamp, or when the file begins.
    latest_us: u64,
    held: Vec<Request>,
    /// The requests that were put into order.
    pub(crate) requests: u64,
    /// The earliest and the latest stamp of them.
    pub(crate) span_us: Option<(u64, u64)>,
    /// Lines that came more than the window too late, and were left out.
    pub(crate) late: u64,
    /// Lines whose date is far ahead of the others, and were left out.
    pub(crate) ahead: u64,
}

struct Waiting {
    at_us: u64,
    file: usize,
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
        (self.at_us, self.file, self.count).cmp(&(other.at_us, other.file, other.count))
    }
}

impl Order {
    /// `first_us` are the times at which the log's files begin, in their order.
    pub(crate) fn new(window_us: u64, first_us: impl IntoIterator<Item = u64>) -> Self {
        let file =
            |latest_us: u64| FileOrder { latest_us, held: Vec::new(), requests: 0, span_us: None, late: 0, ahead: 0 };
        Self {
            window_us,
            files: first_us.into_iter().map(file).collect(),
            open: Vec::new(),
            unread: 0,
            waiting: BinaryHeap::new(),
            bytes: 0,
            left_us: 0,
            count: 0,
            second: Vec::new(),
            second_bytes: 0,
            spread_us: 0,
            crowded: 0,
            shortened: 0,
            is_coarse: false,
        }
    }

    /// Returns the file that is furthest behind, and the time up to which it has been read.
    fn furthest_behind(&self) -> Option<(u64, usize)> {
        let reached = |at: usize| self.files.get(at).map(|file| (file.latest_us, at));
        self.open.iter().copied().chain([self.unread]).filter_map(reached).min()
    }

    /// Returns the file that the next line is to be read from, or `None` if all are at their ends.
    pub(crate) fn next_file(&mut self) -> Option<usize> {
        let (_, file) = self.furthest_behind()?;
        if file == self.unread {
            self.open.push(file);
            self.unread += 1;
        }
        Some(file)
    }

    /// Takes the next request of a file, and gives those whose turn it is to `to`.
    pub(crate) fn take(&mut self, file: usize, request: Request, to: &mut impl FnMut(Timed)) {
        let Some(from) = self.files.get_mut(file) else { return };
        if request.stamp_us > from.latest_us.saturating_add(JUMP_US) {
            from.held.push(request);
            if from.held.len() == ROW {
                for request in std::mem::take(&mut from.held) {
                    self.enter(file, request, to);
                }
            }
            return;
        }
        from.ahead += from.held.len() as u64;
        from.held.clear();
        self.enter(file, request, to);
    }

    /// Notes the end of a file.
    pub(crate) fn end(&mut self, file: usize) {
        self.open.retain(|open| *open != file);
        let Some(from) = self.files.get_mut(file) else { return };
        from.ahead += from.held.len() as u64;
        from.held = Vec::new();
    }

    fn enter(&mut self, file: usize, request: Request, to: &mut impl FnMut(Timed)) {
        let Some(from) = self.files.get_mut(file) else { return };
        from.latest_us = from.latest_us.max(request.stamp_us);
        if request.stamp_us < from.latest_us.saturating_sub(self.window_us) {
            from.late += 1;
            return;
        }
        from.requests += 1;
        let (first, last) = from.span_us.unwrap_or((request.stamp_us, request.stamp_us));
        from.span_us = Some((first.min(request.stamp_us), last.max(request.stamp_us)));
        let reached = self.furthest_behind().map_or(0, |(reached, _)| reached);
        let oldest = reached.saturating_sub(self.window_us);
        self.count += 1;
        self.bytes += size(&request);
        self.waiting.push(Reverse(Waiting { at_us: request.at_us, file, count: self.count, request }));
        loop {
            let is_crowded = self.waiting.len() > WAITING_MAX || self.bytes > WAITING_BYTES_MAX;
            // A request that took longer than the window leaves as soon as it is known.
            match self.waiting.peek() {
                Some(Reverse(first)) if first.at_us < oldest => {}
                Some(_) if is_crowded => self.crowded += 1,
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
        // It ends when it ended, though it counts from later than it began.
        let later_us = at_us - first.request.at_us;
        let duration_us = first.request.duration_us.map(|duration_us| duration_us.saturating_sub(later_us));
        self.shortened += u64::from(later_us >= SECOND && duration_us.is_some());
        let request = Request { at_us, duration_us, ..first.request };
        let is_same_second = self.second.first().is_some_and(|first| first.at_us / SECOND == at_us / SECOND);
        let is_full = self.second.len() >= SPREAD_MAX || self.second_bytes >= WAITING_BYTES_MAX;
        if !is_same_second || is_full {
            self.spread(to);
        }
        if request.is_coarse {
            self.is_coarse = true;
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

    const DAY: u64 = 86_400 * SECOND;

    fn request(stamp_us: u64, took_us: u64, is_coarse: bool) -> Request {
        Request {
            at_us: stamp_us - took_us,
            stamp_us,
            duration_us: None,
            is_coarse,
            client: None,
            host: None,
            is_forwarded: false,
            status: 200,
            agent: 0,
            texts: None,
        }
    }

    /// Returns the instants, spread and as bursts, and the numbers of lines that were late and ahead.
    fn ordered(requests: impl IntoIterator<Item = Request>) -> (Vec<(u64, u64)>, [u64; 2]) {
        let mut requests = requests.into_iter();
        let mut times = Vec::new();
        let mut order = Order::new(60 * SECOND, [100 * DAY]);
        let mut to = |timed: Timed| times.push((timed.spread_us - 100 * DAY, timed.burst_us - 100 * DAY));
        while let Some(file) = order.next_file() {
            match requests.next() {
                Some(request) => order.take(file, request, &mut to),
                None => order.end(file),
            }
        }
        order.finish(&mut to);
        let file = &order.files[0];
        assert_eq!(file.requests, times.len() as u64);
        (times, [file.late, file.ahead])
    }

    fn at(seconds: u64, took: u64) -> Request {
        request(100 * DAY + seconds * SECOND, took * SECOND, false)
    }

    fn seconds(times: &[(u64, u64)]) -> Vec<u64> {
        times.iter().map(|(spread, _)| spread / SECOND).collect()
    }

    #[test]
    fn lines_are_ordered_by_their_arrival() {
        let (times, odd) = ordered([at(50, 0), at(10, 5), at(109, 0), at(70, 0), at(49, 0), at(48, 0)]);
        assert_eq!(seconds(&times), [5, 49, 50, 70, 109], "the window is a minute, so 48 is too late");
        assert_eq!(odd, [1, 0]);
    }

    #[test]
    fn long_request_is_no_late_line() {
        let (times, odd) = ordered([at(1_000, 0), at(2_000, 0), at(2_010, 1_500)]);
        assert_eq!(seconds(&times), [1_000, 1_000, 2_000], "it arrived before those that left already");
        assert_eq!(odd, [0, 0]);
    }

    #[test]
    fn whole_seconds_are_spread_evenly() {
        let coarse = |second: u64| request(100 * DAY + second * SECOND, 0, true);
        let (times, _) = ordered([coarse(1), coarse(2), coarse(1), coarse(1), coarse(1)]);
        let expected = [1_000_000, 1_250_000, 1_500_000, 1_750_000].map(|us| (us, SECOND));
        assert_eq!(times[..4], expected);
        assert_eq!(times[4..], [(2 * SECOND, 2 * SECOND)]);
    }

    #[test]
    fn absurd_date_does_not_move_the_time() {
        let at = |us: u64| request(us, 0, false);
        let lines = (0..20).map(|second| at(100 * DAY + second * SECOND));
        let odd_ones = [at(5_680_281_599 * SECOND), at(0)];
        let (times, odd) = ordered(odd_ones.into_iter().chain(lines).chain([at(900 * DAY), at(100 * DAY)]));
        assert_eq!((times.len(), odd), (21, [1, 2]));
    }

    #[test]
    fn gap_in_the_log_is_passed() {
        let (times, odd) = ordered(
            [100, 200]
                .into_iter()
                .flat_map(|day| (0..20).map(move |second| request(day * DAY + second * SECOND, 0, false))),
        );
        assert_eq!((times.len(), odd), (40, [0, 0]));
    }

    /// Returns the instants of files, and the order in which their lines are read.
    fn merged(files: &[&[Request]]) -> (Vec<u64>, Vec<usize>) {
        let (mut times, mut read) = (Vec::new(), Vec::new());
        let mut order = Order::new(60 * SECOND, files.iter().map(|lines| lines[0].stamp_us));
        let mut to = |timed: Timed| times.push((timed.spread_us - 100 * DAY) / SECOND);
        let mut rest: Vec<_> = files.iter().map(|lines| lines.iter()).collect();
        while let Some(file) = order.next_file() {
            match rest[file].next() {
                Some(request) => {
                    read.push(file);
                    order.take(file, request.clone(), &mut to);
                }
                None => order.end(file),
            }
        }
        order.finish(&mut to);
        assert!(order.files.iter().all(|file| (file.late, file.ahead) == (0, 0)));
        (times, read)
    }

    #[test]
    fn files_that_follow_each_other_are_read_one_by_one() {
        let (days, read) = merged(&[&[at(0, 0), at(900, 0)], &[at(1_000, 0), at(990, 0)], &[at(86_400 * 40, 0)]]);
        assert_eq!(days, [0, 900, 990, 1_000, 86_400 * 40]);
        assert_eq!(read, [0, 0, 1, 1, 2]);
    }

    #[test]
    fn files_of_several_servers_are_merged_by_time() {
        // The lines of one file are hours apart, and those of the other are not.
        let dense: Vec<Request> = (0..500).map(|n| at(3_600 + n * 60, 0)).collect();
        let sparse = [at(3_000, 0), at(3_900, 0), at(30_000, 0), at(50_000, 0)];
        let (times, _) = merged(&[&sparse, &dense]);
        assert_eq!(times.len(), 504);
        assert!(times.is_sorted());
    }
}
