//! The law of load: the number of decisions rises with the load up to the number that the store can make within the
//! deadline, and stays there.
//!
//! Times are ten times as long as in production, because tokio's timers count milliseconds: a deadline of 500 ms stands
//! for the usual 50 ms.

use std::sync::Weak;
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::base::time::Timestamp;

const MS: Duration = Duration::from_millis(1);

const DEADLINE: Duration = Duration::from_millis(500);

/// A server with one queue, which limiters can share.
#[derive(Clone)]
struct Server(Arc<World>);

struct World {
    way: Way,
    began: Instant,
    /// When the server is free again.
    free: Mutex<Option<Instant>>,
    /// The last turn that read requests, and how many it read.
    read: Mutex<(Duration, u64)>,
    /// When it stands still.
    stall: Mutex<Option<(Instant, Instant)>>,
    /// The requests that it got.
    work: AtomicU64,
    corrections: AtomicU64,
}

/// The time that a call takes.
#[derive(Clone, Copy, Default)]
struct Way {
    trip: Duration,
    /// The server's time for each request.
    each: Duration,
    /// The server's time for each call, or that of the way to it, apart from the requests.
    call: Duration,
    /// The time between two turns of a connection, if neighbours have others.
    turn: Duration,
    /// The longest time between two turns, if it varies.
    longest_turn: Duration,
    /// If set, turns become twice as long, or short again, after about this time, and a call is answered when the
    /// next turn has ended, as Redis does it.
    changes: Duration,
    /// If set, such a turn reads no more requests of a connection, as Redis reads 16 KiB.
    reads: u64,
    /// The time from which on there are turns, or from which on a trip takes `later_trip` and each byte of a call
    /// `later_byte`, if these are set.
    later: Duration,
    later_trip: Duration,
    later_byte: Duration,
}

impl Way {
    /// Returns the time of a trip that begins after this time.
    fn trip_at(self, since: Duration) -> Duration {
        if self.later_trip.is_zero() || since < self.later { self.trip } else { self.later_trip }
    }

    /// Returns when a request that comes after this time has its turn, and is answered apart from its own work. A turn
    /// reads requests of a connection if `reads` says so.
    fn next_turn(self, since: Duration, mut reads: impl FnMut(Duration) -> bool) -> Duration {
        let longer = self.longest_turn.saturating_sub(self.turn).as_micros() as u64;
        if self.turn.is_zero() || since < self.later {
            return since;
        }
        let (mut turn, mut number) = (Duration::ZERO, 1_u64);
        let mut random = |below: u64| {
            number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (number >> 33) % below
        };
        if self.changes.is_zero() {
            while turn <= since {
                turn += self.turn + Duration::from_micros(random(longer + 1));
            }
            return turn;
        }
        let (mut change, mut length) = (Duration::ZERO, self.turn);
        loop {
            if turn >= change {
                change += self.changes / 2 + self.changes * random(1_000) as u32 / 1_000;
                length = if length == self.turn { 2 * self.turn } else { self.turn };
            }
            let is_read = turn > since && reads(turn);
            turn += length;
            if is_read {
                return turn;
            }
        }
    }
}

impl World {
    /// Reads requests of a call in a turn, after those of earlier calls, and returns whether all of them are read now.
    fn reads(&self, turn: Duration, left: &mut u64) -> bool {
        let mut read = self.read.lock().unwrap();
        if self.way.reads == 0 {
            return true;
        }
        if turn > read.0 {
            *read = (turn, 0);
        }
        let now = if turn < read.0 { 0 } else { (*left).min(self.way.reads - read.1) };
        read.1 += now;
        *left -= now;
        *left == 0
    }
}

/// A check, or a correction.
type Request = bool;

impl RemoteStore for Server {
    type Request = Request;
    type Answer = ();
    type Error = Failure;
    type Queue = Queue<Self>;

    async fn send_batch(&self, callers: Vec<Caller<Self>>, _until: Instant, _: Option<Timestamp>) -> CallResult {
        let Way { mut each, mut call, later, later_byte, .. } = self.0.way;
        if !later_byte.is_zero() && self.0.began.elapsed() >= later {
            (each, call) = (66 * later_byte, 194 * later_byte);
        }
        let trip = self.0.way.trip_at(self.0.began.elapsed());
        let mut at = Instant::now() + trip / 2;
        if let Some((_, end)) = self.0.stall.lock().unwrap().filter(|(begin, end)| (*begin..*end).contains(&at)) {
            at = end;
        }
        let count = callers.len() as u64;
        let mut left = count;
        let turn = self.0.way.next_turn(at.duration_since(self.0.began), |turn| self.0.reads(turn, &mut left));
        at = self.0.began + turn;
        let answered = {
            let mut free = self.0.free.lock().unwrap();
            let end = free.unwrap_or(at).max(at) + call + each * callers.len() as u32;
            *free = Some(end);
            end + trip / 2
        };
        self.0.work.fetch_add(count, Ordering::Relaxed);
        let corrections = callers.iter().filter(|caller| !caller.request).count();
        self.0.corrections.fetch_add(corrections as u64, Ordering::Relaxed);
        tokio::time::sleep_until(answered).await;
        let answers = vec![Ok(()); callers.len()];
        hand_out(callers, answers);
        let ran = (answered - trip / 2).duration_since(self.0.began);
        CallResult::Answered { rest: Duration::ZERO, clock: Some(Timestamp::from_micros(1 << 50).saturating_add(ran)) }
    }

    fn limits(&self) -> CallLimits {
        MOST
    }

    fn record_unsent(&self, _error: &Failure) {}
}

/// A caller whose charge is refunded if it has gone.
struct TestCaller(oneshot::Sender<Result<(), Failure>>, Weak<Flights<Server>>);

impl Receiver<(), Failure> for TestCaller {
    fn is_gone(&self) -> bool {
        self.0.is_closed()
    }

    fn answer(self: Box<Self>, answer: Result<(), Failure>) {
        if answer.is_ok() && self.0.is_closed() {
            let _ = self.1.upgrade().map(|flights| flights.send(0, false, |_| ()));
        }
        let _ = self.0.send(answer);
    }
}

/// The ends of checks: when each came, how long it took, and how it ended.
type Ends = Vec<(Duration, Duration, Option<Unanswered>)>;

impl Server {
    fn new(way: Way) -> Self {
        let (began, free, read, stall) = (Instant::now(), Mutex::default(), Mutex::default(), Mutex::default());
        let (work, corrections) = (AtomicU64::new(0), AtomicU64::new(0));
        Self(Arc::new(World { way, began, free, read, stall, work, corrections }))
    }

    fn limiter(&self) -> Arc<Flights<Self>> {
        self.limiter_of_lanes(1)
    }

    fn limiter_of_lanes(&self, lanes: u16) -> Arc<Flights<Self>> {
        Arc::new(Flights::new(self.clone(), (lanes, 1), 8_192, DEADLINE, Handle::current()))
    }
}

/// Offers a number of checks a second for some time, whatever becomes of them. Lanes get checks in turn.
async fn offer(flights: &Arc<Flights<Server>>, rate: u64, time: Duration) -> Ends {
    let lanes = flights.0.lanes.len() as u64;
    let (began, mut tasks) = (Instant::now(), Vec::new());
    for number in 0..rate * time.as_millis() as u64 / 1_000 {
        tokio::time::sleep_until(began + Duration::from_micros(number * 1_000_000 / rate)).await;
        let flights = Arc::clone(flights);
        tasks.push(tokio::spawn(async move {
            let came = Instant::now();
            let weak = Arc::downgrade(&flights);
            let lane = (number % lanes) as u16;
            let answer = flights.ask(lane, true, |sender| TestCaller(sender, weak)).await;
            let took = came.elapsed();
            let end = match answer.and_then(|answer| answer) {
                Ok(()) if took <= DEADLINE => None,
                Ok(()) => Some(Unanswered::TimedOut { deadline: DEADLINE, quickest: None }),
                Err(failure) => why::<()>(Err(failure)),
            };
            (came - began, took, end)
        }));
    }
    let mut ends = Vec::new();
    for task in tasks {
        ends.push(task.await.unwrap());
    }
    ends
}

/// Returns how many checks a second were decided, of the checks that came during `time` from `from` on.
fn decided(ends: &Ends, from: Duration, time: Duration) -> u64 {
    let count = ends.iter().filter(|(came, _, end)| *came >= from && *came < from + time && end.is_none()).count();
    count as u64 * 1_000 / time.as_millis() as u64
}

/// Returns the median time of the checks that were decided.
fn median(ends: &Ends) -> Duration {
    let mut took: Vec<_> = ends.iter().filter(|(.., end)| end.is_none()).map(|(_, took, _)| *took).collect();
    took.sort_unstable();
    took[took.len() / 2]
}

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn far_store_decides_all_that_is_offered() {
    for trip in [10, 50, 200] {
        for rate in [50, 400, 1_200, 3_000] {
            let server = Server::new(Way { trip: trip * MS, each: Duration::from_micros(30), ..Way::default() });
            let ends = offer(&server.limiter(), rate, 8 * SECOND).await;
            let decided = decided(&ends, 3 * SECOND, 5 * SECOND);
            assert!(decided * 100 >= rate * 97, "{trip} ms, {rate} offered, {decided} decided");
            let median = median(&ends);
            assert!(median <= trip * MS * 11 / 10 + 2 * MS, "{trip} ms, {rate} offered, median of {median:?}");
            assert!(server.0.work.load(Ordering::Relaxed) <= ends.len() as u64);
        }
    }
}

/// The store can decide 333 checks a second.
#[tokio::test(start_paused = true)]
async fn store_that_is_the_limit_decides_what_it_can() {
    for trip in [2, 100] {
        for rate in [300, 330, 400, 660, 1_000] {
            let server = Server::new(Way { trip: trip * MS, each: 3 * MS, ..Way::default() });
            let ends = offer(&server.limiter(), rate, 20 * SECOND).await;
            let (decided, possible) = (decided(&ends, 5 * SECOND, 15 * SECOND), rate.min(333));
            assert!(decided * 10 >= possible * 9, "{trip} ms, {rate} offered, {decided} decided");
            let (work, done) =
                (server.0.work.load(Ordering::Relaxed), ends.iter().filter(|end| end.2.is_none()).count());
            assert!(work * 10 <= done as u64 * 13, "{work} requests for {done} decided");
        }
    }
}

/// Each slot of a cluster's server is a lane. Nearly each check is then a call of its own.
#[tokio::test(start_paused = true)]
async fn slots_of_a_server_share_what_it_can_decide() {
    for (lanes, trip) in [(16, 2), (5_461, 2), (5_461, 100)] {
        for rate in [300, 400, 1_000, 2_000] {
            let server = Server::new(Way { trip: trip * MS, each: 3 * MS, ..Way::default() });
            let ends = offer(&server.limiter_of_lanes(lanes), rate, 20 * SECOND).await;
            let (decided, possible) = (decided(&ends, 5 * SECOND, 15 * SECOND), rate.min(333));
            println!("{lanes} lanes, {trip} ms, {rate} offered, {decided} decided");
            assert!(decided * 10 >= possible * 9, "{lanes} lanes, {trip} ms, {rate} offered, {decided} decided");
        }
    }
}

/// A stall makes all callers go, and each late answer is refunded, in as many slots.
#[tokio::test(start_paused = true)]
async fn corrections_in_many_slots_do_not_crowd_out_checks() {
    let server = Server::new(Way { trip: 2 * MS, each: MS, ..Way::default() });
    let limiter = server.limiter_of_lanes(5_461);
    let refunds = Arc::clone(&limiter);
    tokio::spawn(async move {
        tokio::time::sleep(10 * SECOND).await;
        for lane in 0..2_000 {
            let _ = refunds.send(lane, false, |_| ());
        }
    });
    let ends = offer(&limiter, 500, 20 * SECOND).await;
    let decided = decided(&ends, 10 * SECOND, 5 * SECOND);
    println!("{decided} decided, {} corrections", server.0.corrections.load(Ordering::Relaxed));
    assert!(decided >= 350, "{decided} decided of 500");
    assert!(server.0.corrections.load(Ordering::Relaxed) >= 2_000);
}

/// The slots of a far server have as many calls as checks come.
#[tokio::test(start_paused = true)]
async fn slots_of_a_far_server_decide_all_that_is_offered() {
    for rate in [50, 1_200, 3_000] {
        let server = Server::new(Way { trip: 200 * MS, each: Duration::from_micros(30), ..Way::default() });
        let ends = offer(&server.limiter_of_lanes(5_461), rate, 8 * SECOND).await;
        let decided = decided(&ends, 3 * SECOND, 5 * SECOND);
        assert!(decided * 100 >= rate * 97, "{rate} offered, {decided} decided");
    }
}

/// A round trip alone takes 0.4 or 0.6 of the deadline, and the store can decide 333 checks a second. If the round trip
/// were taken for the work of other clients, some of these loads would decide a tenth.
#[tokio::test(start_paused = true)]
async fn far_store_that_is_the_limit_decides_a_third_at_least() {
    for trip in [200, 300] {
        for rate in [300, 330, 400, 660, 1_000] {
            let server = Server::new(Way { trip: trip * MS, each: 3 * MS, ..Way::default() });
            let ends = offer(&server.limiter(), rate, 20 * SECOND).await;
            let decided = decided(&ends, 5 * SECOND, 15 * SECOND);
            let least = if rate < 333 { rate * 9 / 10 } else { 333 / 3 };
            assert!(decided >= least, "{trip} ms, {rate} offered, {decided} decided");
        }
    }
}

/// Other clients keep the server busy, except for a moment every 330 ms.
#[tokio::test(start_paused = true)]
async fn store_that_is_busy_with_neighbours_decides_all() {
    for rate in [50, 200, 400, 1_200] {
        let way = Way { trip: MS, each: Duration::from_micros(30), turn: 330 * MS, ..Way::default() };
        let ends = offer(&Server::new(way).limiter(), rate, 12 * SECOND).await;
        let decided = decided(&ends, 4 * SECOND, 8 * SECOND);
        assert!(decided * 100 >= rate * 95, "{rate} offered, {decided} decided");
    }
}

/// A lone call takes nearly the whole deadline, if it just missed its turn.
#[tokio::test(start_paused = true)]
async fn turns_near_the_deadline_are_used() {
    for rate in [20, 50, 100, 200, 400] {
        let way = Way { trip: MS, each: Duration::from_micros(30), turn: 460 * MS, ..Way::default() };
        let ends = offer(&Server::new(way).limiter(), rate, 20 * SECOND).await;
        let decided = decided(&ends, 5 * SECOND, 15 * SECOND);
        assert!(decided * 100 >= rate * 80, "{rate} offered, {decided} decided");
    }
}

/// Calls take up to 880 ms, so not all checks can be decided. With the quickest lone call in the place of halving, two
/// checks a second were decided.
#[tokio::test(start_paused = true)]
async fn turns_that_vary_around_the_deadline_are_used() {
    for rate in [100, 400, 1_200] {
        let way =
            Way { trip: MS, each: Duration::from_micros(30), turn: 240 * MS, longest_turn: 640 * MS, ..Way::default() };
        let possible = (0..4_000).map(|number| (100 * SECOND / 4_000) * number);
        let possible = possible.filter(|came| way.next_turn(*came, |_| true) - *came + MS <= DEADLINE).count() as u64;
        let ends = offer(&Server::new(way).limiter(), rate, 100 * SECOND).await;
        let decided = decided(&ends, 30 * SECOND, 70 * SECOND);
        assert!(
            decided * 4_000 * 100 >= rate * possible * 85,
            "{rate} offered, {decided} decided, {possible} of 4,000 possible"
        );
    }
}

/// Neighbours' scripts run in one turn, or half of them in the next one. A call that is sent right after an answer waits for
/// two whole turns, and is always late while turns are long. Then a window of few calls, sent one after the other, decides
/// nothing.
#[tokio::test(start_paused = true)]
async fn turns_that_become_longer_and_shorter_are_used() {
    for (rate, changes, percent) in [(500, 2, 70), (500, 10, 85), (1_000, 30, 80)] {
        let way = Way {
            trip: MS,
            each: Duration::from_micros(30),
            turn: 170 * MS,
            changes: changes * SECOND,
            ..Way::default()
        };
        let possible = (0..3_000).map(|number| 40 * SECOND + 20 * MS * number);
        let possible = possible.filter(|came| way.next_turn(*came, |_| true) - *came + MS <= DEADLINE).count() as u64;
        let ends = offer(&Server::new(way).limiter(), rate, 100 * SECOND).await;
        let decided = decided(&ends, 40 * SECOND, 60 * SECOND);
        println!("{rate} offered, {changes} s: {decided} decided, {possible} of 3,000");
        assert!(
            decided * 3_000 * 100 >= rate * possible * percent,
            "{rate} offered, {decided} decided, {possible} of 3,000 possible"
        );
    }
}

/// A turn reads so many requests of a connection, and the next requests wait. A request that is sent soon after a turn
/// is late if turns are long. So if all requests are sent then, or if requests wait for each other, nothing is decided.
/// A small change of the pace changes much of what one load decides, so the mean of four loads counts.
#[tokio::test(start_paused = true)]
async fn turns_that_read_few_requests_are_used() {
    // 1,765, 1,250 and 294 requests a second are read. All, all and 47 % of them can be answered in time.
    let cases = [
        (170, 300, [2_000, 2_400, 3_000, 3_600], 450),
        (240, 300, [1_400, 1_600, 2_400, 3_600], 300),
        (340, 100, [400, 500, 1_000, 2_000], 20),
    ];
    for (turn, reads, rates, least) in cases {
        let mut all = 0;
        for rate in rates {
            let way = Way {
                trip: MS,
                each: Duration::from_micros(30),
                turn: turn * MS / 2,
                changes: 500 * SECOND, // so each turn takes twice that
                reads,
                ..Way::default()
            };
            let ends = offer(&Server::new(way).limiter(), rate, 80 * SECOND).await;
            let decided = decided(&ends, 40 * SECOND, 40 * SECOND);
            println!("turns of {turn} ms, {rate} offered: {decided} decided");
            all += decided;
        }
        assert!(all / 4 >= least, "turns of {turn} ms: {} decided on average", all / 4);
    }
}

/// A request that is sent right after an answer waits for two whole turns, and is late. If so few are in flight that each
/// is sent then, a phase has two calls, and the times of one request and of two say nothing.
#[tokio::test(start_paused = true)]
async fn turns_of_which_two_are_too_long_are_used() {
    for rate in [30, 100, 300] {
        let way = Way {
            trip: MS,
            each: Duration::from_micros(30),
            turn: 150 * MS,
            changes: 5_000 * SECOND, // so each turn takes twice that
            ..Way::default()
        };
        let ends = offer(&Server::new(way).limiter(), rate, 80 * SECOND).await;
        let decided = decided(&ends, 40 * SECOND, 40 * SECOND);
        println!("{rate} offered, {decided} decided");
        // Two thirds can be answered in time.
        assert!(decided * 100 >= rate * 40, "{rate} offered, {decided} decided");
    }
}

/// Calls were short before. Under load no call is alone, so no call shows how long a lone call takes now.
#[tokio::test(start_paused = true)]
async fn neighbours_that_come_under_load_cost_no_checks() {
    for turn in [260, 300, 340] {
        for rate in [200, 1_200] {
            let way =
                Way { trip: MS, each: Duration::from_micros(30), turn: turn * MS, later: 4 * SECOND, ..Way::default() };
            let ends = offer(&Server::new(way).limiter(), rate, 20 * SECOND).await;
            let decided = decided(&ends, 8 * SECOND, 12 * SECOND);
            println!("turns of {turn} ms, {rate} offered, {decided} decided");
            assert!(decided * 100 >= rate * 95, "turns of {turn} ms, {rate} offered, {decided} decided");
        }
    }
}

/// New connections lead to another server, for instance.
#[tokio::test(start_paused = true)]
async fn store_that_moves_away_under_load_decides_all() {
    for later_trip in [100, 200, 300] {
        for rate in [200, 1_200] {
            let way = Way {
                trip: MS,
                each: Duration::from_micros(30),
                later: 4 * SECOND,
                later_trip: later_trip * MS,
                ..Way::default()
            };
            let ends = offer(&Server::new(way).limiter(), rate, 20 * SECOND).await;
            let decided = decided(&ends, 8 * SECOND, 12 * SECOND);
            println!("{later_trip} ms, {rate} offered, {decided} decided");
            assert!(decided * 100 >= rate * 97, "{later_trip} ms, {rate} offered, {decided} decided");
        }
    }
}

/// A way lets 10 kB a second pass. A call has 194 bytes and 66 for each request, so calls of one request carry 38
/// requests a second. A client whose calls have one request of 118 bytes would carry 84.
#[tokio::test(start_paused = true)]
async fn way_that_lets_few_bytes_pass_carries_large_calls() {
    let bytes = |bytes| Duration::from_micros(100) * bytes;
    let way = Way { trip: MS, each: bytes(66), call: bytes(194), ..Way::default() };
    for (rate, least) in [(35, 34), (60, 56), (80, 62), (160, 76), (250, 76)] {
        let ends = offer(&Server::new(way).limiter(), rate, 30 * SECOND).await;
        let decided = decided(&ends, 5 * SECOND, 25 * SECOND);
        assert!(decided >= least, "{rate} offered, {decided} decided");
    }
}

/// A far store whose way becomes narrow: by then no lone call has been measured there.
#[tokio::test(start_paused = true)]
async fn way_that_becomes_narrow_carries_large_calls() {
    for trip in [100, 250] {
        let (later, later_byte) = (4 * SECOND, Duration::from_micros(100));
        let each = Duration::from_micros(30);
        let way = Way { trip: trip * MS, each, later, later_trip: MS, later_byte, ..Way::default() };
        let limiter = Server::new(way).limiter();
        let sends = tokio::spawn({
            let limiter = Arc::clone(&limiter);
            async move {
                loop {
                    let _ = limiter.send(0, false, |_| ());
                    tokio::time::sleep(100 * MS).await;
                }
            }
        });
        let ends = offer(&limiter, 300, 60 * SECOND).await;
        sends.abort();
        let decided = [10, 20, 30, 40, 50].map(|from| decided(&ends, from * SECOND, 10 * SECOND));
        println!("{trip} ms, {decided:?} decided");
        assert!(decided.iter().all(|decided| *decided >= 60), "{trip} ms, {decided:?} decided");
    }
}

/// The limiters ask a server for three times the 333 checks a second that it can decide, and each limiter has only a
/// few checks in flight.
#[tokio::test(start_paused = true)]
async fn twenty_limiters_do_not_take_their_own_load_for_neighbours() {
    let server = Server::new(Way { trip: MS, each: 3 * MS, ..Way::default() });
    let limiters: Vec<_> = (0..20).map(|_| server.limiter()).collect();
    let offers = limiters.iter().map(|limiter| offer(limiter, 50, 60 * SECOND));
    let ends = futures_util::future::join_all(offers).await;
    let all: u64 = ends.iter().map(|ends| decided(ends, 20 * SECOND, 40 * SECOND)).sum();
    assert!(all >= 300, "{all} decided");
}

#[tokio::test(start_paused = true)]
async fn check_that_would_be_late_is_refused_at_once() {
    let server = Server::new(Way { trip: 2 * MS, each: 3 * MS, ..Way::default() });
    let ends = offer(&server.limiter(), 1_000, 15 * SECOND).await;
    let refused: Vec<_> = ends.iter().filter(|(came, _, end)| *came > 5 * SECOND && end.is_some()).collect();
    let at_once = refused.iter().filter(|(_, took, end)| *took <= MS && matches!(end, Some(Unanswered::Shed(_))));
    let at_once = at_once.count();
    assert!(at_once * 10 >= refused.len() * 8, "{at_once} of {} at once", refused.len());
    let late = refused.iter().filter(|(.., end)| !matches!(end, Some(Unanswered::Shed(_)))).count();
    assert!(late * 20 <= refused.len(), "{late} of {} late", refused.len());
}

#[tokio::test(start_paused = true)]
async fn store_that_stood_still_is_used_again_within_a_second() {
    for trip in [10, 200] {
        let server = Server::new(Way { trip: trip * MS, each: Duration::from_micros(30), ..Way::default() });
        let begin = Instant::now() + 5 * SECOND;
        *server.0.stall.lock().unwrap() = Some((begin, begin + 10 * SECOND));
        let ends = offer(&server.limiter(), 400, 32 * SECOND).await;
        let decided = decided(&ends, 25 * SECOND, 5 * SECOND); // ten seconds stand for one
        assert!(decided >= 390, "{trip} ms: {decided} decided");
    }
}

#[tokio::test(start_paused = true)]
async fn corrections_do_not_crowd_out_checks() {
    let server = Server::new(Way { trip: 2 * MS, each: 3 * MS, ..Way::default() });
    let limiter = server.limiter();
    let sends = tokio::spawn({
        let limiter = Arc::clone(&limiter);
        async move {
            for _ in 0..15_000 {
                let _ = limiter.send(0, false, |_| ());
                tokio::time::sleep(MS).await;
            }
        }
    });
    let ends = offer(&limiter, 200, 15 * SECOND).await;
    sends.abort();
    let (decided, corrections) =
        (decided(&ends, 5 * SECOND, 10 * SECOND), server.0.corrections.load(Ordering::Relaxed));
    assert!(decided >= 180, "{decided} decided");
    assert!(corrections >= 1_000, "{corrections} corrections");
}

/// Twenty limiters share a server, so each has only a few requests in flight. One of them gets 500 refunds at once, as
/// many as follow from a service that fails.
#[tokio::test(start_paused = true)]
async fn corrections_do_not_crowd_out_checks_of_a_small_window() {
    let server = Server::new(Way { trip: MS, each: 3 * MS, ..Way::default() });
    let limiters: Vec<_> = (0..20).map(|_| server.limiter()).collect();
    let one = Arc::clone(&limiters[0]);
    tokio::spawn(async move {
        tokio::time::sleep(30 * SECOND).await;
        for _ in 0..500 {
            let _ = one.send(0, false, |_| ());
        }
    });
    let offers = limiters.iter().map(|limiter| offer(limiter, 50, 60 * SECOND));
    let ends = futures_util::future::join_all(offers).await;
    let (before, after) = (decided(&ends[0], 20 * SECOND, 10 * SECOND), decided(&ends[0], 30 * SECOND, 30 * SECOND));
    println!("{before} decided before, {after} after");
    assert!(after * 2 >= before, "{before} decided before, {after} after");
    assert!(server.0.corrections.load(Ordering::Relaxed) >= 100);
}

#[tokio::test(start_paused = true)]
async fn store_beyond_the_deadline_is_too_far_and_not_overloaded() {
    for trip in [600, 800] {
        let server = Server::new(Way { trip: trip * MS, ..Way::default() });
        let ends = offer(&server.limiter(), 100, 200 * SECOND).await;
        assert!(ends.iter().all(|(.., end)| end.is_some()));
        let overloaded = ends.iter().filter(|(.., end)| matches!(end, Some(Unanswered::Shed(_)))).count();
        let sent = server.0.work.load(Ordering::Relaxed);
        println!("{trip} ms: {overloaded} overloaded, {sent} sent");
        assert!(overloaded <= 1_000, "{trip} ms: {overloaded} overloaded");
        assert!(sent <= 6_000, "{trip} ms: {sent} requests for answers that nobody waits for");
    }
}

#[tokio::test(start_paused = true)]
async fn limiters_that_share_a_store_share_what_it_carries() {
    for number in [2, 8] {
        let server = Server::new(Way { trip: 10 * MS, each: 3 * MS, ..Way::default() });
        let limiters: Vec<_> = (0..number).map(|_| server.limiter()).collect();
        let offers = limiters.iter().map(|limiter| offer(limiter, 900 / number, 40 * SECOND));
        let ends = futures_util::future::join_all(offers).await;
        let each: Vec<_> = ends.iter().map(|ends| decided(ends, 10 * SECOND, 30 * SECOND)).collect();
        let all: u64 = each.iter().sum();
        assert!(all >= 270, "{each:?}");
        let fair = all / number;
        assert!(each.iter().all(|own| *own * 4 >= fair && *own <= fair * 4), "{each:?}");
    }
}
