//! The requests that wait in line for units of concurrency limits.
//!
//! The lines belong to the limiter and not to a layer, because the units for which a request waits may be returned
//! by another layer of the limiter, by a handler, or by the drop of a [`Place`](super::Place). Layers with
//! different timers share the lines, so the lines have no timer. In the other lines of this crate, time decides
//! when a waiter may go, see `ask_lines.rs` and `departures.rs`. A line is for one policy's name and one key. A
//! line exists only while a request waits in it.
//!
//! Nothing is taken for a request that waits. When units of a key may have come free, the first request of the key's
//! line is woken, and asks the limiter again. Until the first request has left the line, the limiter denies every
//! charge of the key that has a later number. So the freed units stay free for the first request.
//!
//! # No lost wake
//!
//! A limiter without one lock for everything must lock the state *before* it reads whether requests wait. A
//! request that has joined a line asks again in a way that locks the state too. If two threads lock one state,
//! the second thread sees the changes of the first thread. So either the request sees the free units, or the thread
//! that freed them sees the request.
//!
//! A thread reads from a counter whether requests wait, and takes no lock for that. `Relaxed` suffices for the
//! counters, because the state's lock orders their reads and writes:
//!
//! 1. A request raises its counter when it joins its line. It asks the limiter after that, and this call locks the
//!    state even if the limiter denies the request.
//! 2. A thread that returns units locks the state, writes the units, unlocks the state, and then reads the counter.
//! 3. A lock is an `Acquire` and an unlock is a `Release`. If the request locks the state first, the thread therefore
//!    reads the raised counter. If the thread locks the state first, the request finds the units.
//!
//! If the request only loaded the state, neither of the two might see the other. `src/limiter/memory/loom_tests.rs` has
//! a model of the two threads.
//!
//! # Lines of many processes
//!
//! If a store counts the units of many processes, no request is woken when another process returns units. So the
//! first request of each line asks again after a while, see [`Polls`]. Each call names the time for which the request
//! has waited, see [`standing`](PlaceLines::standing), and the store serves the request that has waited
//! longest. If the last request of a line leaves without units, the process tells the store, so that the store
//! reserves nothing for that request.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

#[cfg(any(feature = "_redis", feature = "store"))]
use tokio::sync::mpsc;

use super::{Charge, PairHash};
use crate::base::random::mixed;
use crate::base::sync::{AtomicU64, Mutex, Ordering, lock};
use crate::base::time::Timestamp;
use crate::base::wait_list::{WaitList, remove_line};
use crate::base::wakers::Wakers;
use crate::clock::{Clock, Sleep, Timer};
use crate::key::Key;
use crate::policy::Policy;

/// The number of counters over which the requests in line are spread.
const COUNTERS: usize = if cfg!(any(ratelimit_loom, ratelimit_shuttle)) { 2 } else { 256 };

/// The requests that wait in line for units of [concurrency limits](crate::Quota::concurrent). A limiter that
/// lets requests [wait](crate::Quota::max_wait) for such units has a `PlaceLines`, and returns it from
/// [`LimiterHooks::place_lines`](super::LimiterHooks::place_lines). Clones share the lines.
///
/// The limiter keeps two promises:
///
/// * The limiter denies a charge that the lines [hold back](Self::holds_back), even if units are free.
/// * The limiter calls [`wake_first`](Self::wake_first) when units of a key may have come free: after a
///   refund, after a reset, and when it learns that units came free elsewhere. Unneeded calls are allowed.
///
/// The layers do the rest. A layer puts requests into the lines, asks the limiter again when a request is
/// woken, and removes requests that have waited too long or were dropped.
#[derive(Clone)]
pub struct PlaceLines(Arc<SharedLines>);

struct SharedLines {
    /// The number of requests that wait in all lines.
    waiting: AtomicU64,
    /// The numbers of waiting requests, indexed by the hash of their line. If the counter of a key is 0, no request
    /// waits for the key, and a charge of the key takes no lock.
    counters: [AtomicU64; COUNTERS],
    hash: PairHash,
    lines: Mutex<Lines>,
    /// How often the first requests ask again without being woken. `None` if the first requests only wait to be
    /// woken.
    polls: Option<Polls>,
}

#[derive(Default)]
struct Lines {
    lines: HashMap<PlaceLineKey, WaitList<LineWaiter>>,
    arrivals: u64,
}

/// The name of a policy, as a number, and the key that a line is for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct PlaceLineKey {
    policy: u64,
    key: Key,
}

struct LineWaiter {
    /// The limit of the request's quota when the request joined the line.
    limit: u64,
    /// The longest wait that the request's quota allows.
    wait: Duration,
    /// True if units may have come free since the request last asked.
    is_called: bool,
    /// The instant at which the request joined, on the clock of [`Polls`].
    #[cfg_attr(
        not(any(feature = "_redis", feature = "store")),
        allow(dead_code, reason = "within one process, the limiter does not need the time that a request has waited")
    )]
    joined: Timestamp,
    /// The number of times that the request has asked again without being woken.
    polls: u32,
}

/// The polls of lines whose units can come free in other processes: the first request of each line asks again without
/// being woken. The pause before a poll is [`POLL_MIN`] at first and doubles each time, up to [`POLL_MAX`]. A request
/// with a short wait asks about [`POLLS_MIN`] times within its wait. If there are many lines, each line asks more
/// rarely, so that a process asks at most once in [`POLL_SPACING`].
#[cfg_attr(
    not(any(feature = "_redis", feature = "store")),
    allow(dead_code, reason = "within one process, the line wakes each request")
)]
struct Polls {
    clock: Arc<dyn Clock>,
    /// A number that differs between processes, so that their requests do not ask at the same instants.
    seed: u64,
    /// The channel that gets each line whose last request has left without units. If the channel is full, the
    /// store forgets the request after a while, because the request does not ask again.
    #[cfg(any(feature = "_redis", feature = "store"))]
    left: mpsc::Sender<LeftLine>,
}

/// A line in which no request waits any more.
#[cfg(any(feature = "_redis", feature = "store"))]
pub(crate) type LeftLine = (Policy, Key);

/// The shortest and the longest time after which the first request of a line asks again. A random part of up to a
/// quarter of the time is added.
const POLL_MIN: Duration = Duration::from_millis(20);
const POLL_MAX: Duration = Duration::from_millis(400);

/// The number of times that the first request of a line asks within its wait, if no random parts are added.
const POLLS_MIN: u32 = 8;

/// The time between two polls of a process, which therefore polls at most 200 times a second.
const POLL_SPACING: Duration = Duration::from_millis(5);

/// The number of calls in a row that may fail while a request waits in a line that polls. After one more failure the
/// request no longer waits.
pub(crate) const FAILED_POLLS_MAX: u32 = 5;

/// The position of a charge relative to the requests that wait for the units of its key.
#[cfg(any(feature = "_redis", feature = "store"))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Standing {
    /// No request of this process waits for the key.
    #[default]
    Newcomer,
    /// An earlier request of this process waits for the key.
    HeldBack,
    /// The request is the first of this process' line.
    First(FirstInLine),
    /// The last request of this process' line has left the line. Only a call that returns units names this
    /// position.
    Left,
}

/// The first request of a line.
#[cfg(any(feature = "_redis", feature = "store"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FirstInLine {
    /// The request's number. The number's lower bits distinguish the request from earlier first requests of
    /// the line.
    pub(crate) number: u32,
    /// The time for which the request has waited.
    pub(crate) waited: Duration,
    /// The time within which the request asks at least two more times.
    pub(crate) asks_within: Duration,
}

impl PlaceLines {
    /// Makes lines in which no request waits.
    #[must_use]
    pub fn new() -> Self {
        // The seeds need not be secret. If a client finds keys with equal hashes, the only cost is that charges of
        // these keys lock the lines.
        Self::with(PairHash::new([0; 2]), None)
    }

    /// Makes lines for a limiter that knows the hash of each charge.
    pub(crate) fn hashed_by(hash: PairHash) -> Self {
        Self::with(hash, None)
    }

    /// Makes lines whose first requests ask again without being woken, because units also come free in other
    /// processes. `seed` should differ between processes. `left` gets each line whose last request has left
    /// without units.
    #[cfg(any(feature = "_redis", feature = "store"))]
    pub(crate) fn polling(clock: Arc<dyn Clock>, seed: u64, left: mpsc::Sender<LeftLine>) -> Self {
        Self::with(PairHash::new([seed; 2]), Some(Polls { clock, seed, left }))
    }

    fn with(hash: PairHash, polls: Option<Polls>) -> Self {
        let counters = std::array::from_fn(|_| AtomicU64::new(0));
        let lines = Mutex::new(Lines::default());
        Self(Arc::new(SharedLines { waiting: AtomicU64::new(0), counters, hash, lines, polls }))
    }

    /// Returns the counter of the requests that wait for a key, by the first bits of the key's hash. Other keys may
    /// share the counter.
    #[inline(always)]
    fn counter(&self, hash: u64) -> &AtomicU64 {
        &self.0.counters[(hash >> 56) as usize % COUNTERS]
    }

    fn counter_of(&self, line: &PlaceLineKey) -> &AtomicU64 {
        self.counter(self.0.hash.of(line.policy, &line.key))
    }

    /// Returns `true` if no request waits for a key with this hash. Only the first eight bits of the hash are compared.
    /// The limiter has the hash of each charge, so a request that waits makes charges of other keys hardly slower
    /// (`benches/instructions`).
    #[inline(always)]
    pub(crate) fn has_no_line(&self, hash: u64) -> bool {
        // `Relaxed` suffices, because the state's lock orders this load (see the module's documentation).
        self.counter(hash).load(Ordering::Relaxed) == 0
    }

    /// Returns `true` if no request waits for a key.
    #[inline]
    fn has_no_line_of(&self, policy: &Policy, key: &Key) -> bool {
        self.is_empty() || self.has_no_line(self.0.hash.of(policy.name_fingerprint(), key))
    }

    /// Returns `true` if no request waits in any line. This method is faster than [`holds_back`](Self::holds_back),
    /// but a limiter must hold the lock of the key's state during the call.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        // `Relaxed` suffices, because the state's lock orders this load (see the module's documentation).
        self.0.waiting.load(Ordering::Relaxed) == 0
    }

    /// Returns whether a request that came before a charge's request waits for the charge's policy and key. If so,
    /// the limiter denies the charge, with an [unknown](crate::Wait::Unknown) wait and no units left. Only a charge
    /// with cost 0 or a [forced](super::Effect::Force) charge is decided as usual.
    #[must_use]
    pub fn holds_back(&self, charge: &Charge<'_>) -> bool {
        if self.has_no_line_of(charge.policy, charge.key) {
            return false;
        }
        let line = PlaceLineKey::of(charge.policy, charge.key);
        let lines = lock(&self.0.lines);
        let first = lines.lines.get(&line).and_then(WaitList::first);
        first.is_some_and(|(first, _)| first < charge.arrival.number())
    }

    /// Returns the position of a charge, for a store that counts the units of many processes.
    #[cfg(any(feature = "_redis", feature = "store"))]
    pub(crate) fn standing(&self, charge: &Charge<'_>) -> Standing {
        let Some(polls) = self.0.polls.as_ref().filter(|_| !self.is_empty()) else { return Standing::Newcomer };
        let line = PlaceLineKey::of(charge.policy, charge.key);
        let lines = lock(&self.0.lines);
        match lines.lines.get(&line).and_then(WaitList::first) {
            Some((first, _)) if first < charge.arrival.number() => Standing::HeldBack,
            Some((first, waiter)) if first == charge.arrival.number() => Standing::First(FirstInLine {
                number: first as u32, // the lower bits
                waited: polls.clock.now().saturating_since(waiter.joined),
                asks_within: 2 * longest_poll(lines.lines.len()),
            }),
            _ => Standing::Newcomer,
        }
    }

    /// Wakes the first request that waits for units of a key, because units may have come free. Call this method
    /// without holding a lock, because a waker is the application's code.
    #[inline]
    pub fn wake_first(&self, policy: &Policy, key: &Key) {
        if !self.has_no_line_of(policy, key) {
            self.wake_first_of(policy, key);
        }
    }

    /// Does what [`wake_first`](Self::wake_first) does, after the caller has read that a request may wait for the key.
    #[cold]
    pub(crate) fn wake_first_of(&self, policy: &Policy, key: &Key) {
        let mut wakers = Wakers::default();
        let line = PlaceLineKey::of(policy, key);
        if let Some(line) = lock(&self.0.lines).lines.get_mut(&line) {
            let_first_ask(line, &mut wakers);
        }
        wakers.release();
    }

    /// Wakes the first request of each line of a policy, because the policy's quota was raised. The call takes time
    /// in proportion to the number of lines.
    pub(crate) fn wake_all(&self, policy: &Policy) {
        if self.is_empty() {
            return;
        }
        let mut wakers = Wakers::default();
        let mut lines = lock(&self.0.lines);
        let all = lines.lines.iter_mut().filter(|(line, _)| line.policy == policy.name_fingerprint());
        all.for_each(|(_, line)| let_first_ask(line, &mut wakers));
        drop(lines);
        wakers.release();
    }

    /// Returns the number of requests that wait for units of a key.
    #[must_use]
    pub fn waiting(&self, policy: &Policy, key: &Key) -> usize {
        lock(&self.0.lines).lines.get(&PlaceLineKey::of(policy, key)).map_or(0, WaitList::len)
    }

    /// Puts a request into the line for units of a key. The request stands behind earlier requests. `arrival` is
    /// the number that the request got when it joined its first line.
    pub(crate) fn join(&self, policy: &Policy, key: &Key, arrival: Option<u64>) -> PlaceTurn {
        let line = PlaceLineKey::of(policy, key);
        let mut lines = lock(&self.0.lines);
        lines.arrivals += 1;
        let number = arrival.unwrap_or(lines.arrivals);
        // The request asks once more as soon as it is the first in line, because units may have come free before it
        // joined.
        let joined = self.0.polls.as_ref().map(|polls| polls.clock.now()).unwrap_or_default();
        let (limit, wait) = (policy.quota().limit(), policy.quota().wait_in_line());
        // Through `Ready`, a caller may wait for a quota that has no `max_wait`.
        let wait = if wait.is_zero() { Duration::MAX } else { wait };
        let waiter = LineWaiter { limit, wait, is_called: true, joined, polls: 0 };
        lines.lines.entry(line.clone()).or_default().add(number, waiter);
        self.0.waiting.fetch_add(1, Ordering::Relaxed);
        self.counter_of(&line).fetch_add(1, Ordering::Relaxed);
        drop(lines);
        #[cfg(any(feature = "_redis", feature = "store"))]
        let policy = self.0.polls.is_some().then(|| policy.clone());
        PlaceTurn {
            lines: self.clone(),
            line,
            #[cfg(any(feature = "_redis", feature = "store"))]
            policy,
            number,
            admitted: None,
        }
    }
}

impl Default for PlaceLines {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for PlaceLines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PlaceLines").field("waiting", &self.0.waiting.load(Ordering::Relaxed)).finish()
    }
}

impl PlaceLineKey {
    fn of(policy: &Policy, key: &Key) -> Self {
        Self { policy: policy.name_fingerprint(), key: key.clone() }
    }
}

/// Notes that the first request of a line has to ask again, and wakes it.
fn let_first_ask(line: &mut WaitList<LineWaiter>, wakers: &mut Wakers) {
    if let Some(first) = line.first_mut() {
        first.is_called = true;
        line.wake_first(wakers);
    }
}

/// Returns how long the first request of a line waits before it asks again without being woken. `number` is the
/// number of polls since the request was last woken. `wait` is the longest wait that the request's quota allows.
/// `lines` is the number of lines of this process. The caller adds a random part.
fn poll_after(number: u32, wait: Duration, lines: usize) -> Duration {
    let spaced = POLL_SPACING.saturating_mul(u32::try_from(lines).unwrap_or(u32::MAX));
    POLL_MIN.saturating_mul(1 << number.min(8)).min(POLL_MAX).min(wait / POLLS_MIN).max(spaced)
}

/// Returns the longest time between two polls of the first request of a line.
#[cfg(any(feature = "_redis", feature = "store"))]
fn longest_poll(lines: usize) -> Duration {
    let longest = poll_after(u32::MAX, Duration::MAX, lines);
    longest + longest / 4
}

/// A request's turn in a line. When the turn is dropped, the request leaves the line, and the next request is
/// woken.
pub(crate) struct PlaceTurn {
    lines: PlaceLines,
    line: PlaceLineKey,
    /// The policy of the line, if the process has to tell the store that the request left.
    #[cfg(any(feature = "_redis", feature = "store"))]
    policy: Option<Policy>,
    number: u64,
    /// `Some` if the request leaves with units: the value decides whether the next request is woken. A request
    /// that leaves without units always wakes the next request.
    admitted: Option<Admitted>,
}

/// The state that a request found when it got its units.
#[derive(Clone, Copy)]
struct Admitted {
    has_more: bool,
    own_limit: Option<u64>,
}

impl PlaceTurn {
    /// Is ready when the request is the first of its line and has to ask the limiter.
    pub(crate) fn poll(&self, cx: &mut Context<'_>) -> Poll<()> {
        let (mut wakers, waker) = (Wakers::default(), cx.waker().clone());
        let mut lines = lock(&self.lines.0.lines);
        let line = lines.lines.get_mut(&self.line);
        debug_assert!(line.as_ref().is_some_and(|line| line.has(self.number)), "a turn is in its line");
        let Some(line) = line.filter(|line| line.has(self.number)) else { return Poll::Ready(()) };
        let is_first = line.first().is_some_and(|(first, _)| first == self.number);
        let called = line.first_mut().filter(|first| is_first && first.is_called);
        let is_called = called.is_some();
        if let Some(first) = called {
            (first.is_called, first.polls) = (false, 0);
            wakers.to_drop.push(waker);
        } else {
            // Sets no timer, because `BoundedTurn` watches the deadline, and the line wakes its first request.
            line.sleep(self.number, u64::MAX, waker, &mut wakers);
        }
        drop(lines);
        wakers.release();
        if is_called { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Returns the time after which the request asks again without being woken. Returns `None` unless the request is
    /// the first of its line and the lines poll.
    fn poll_after(&self) -> Option<Duration> {
        let polls = self.lines.0.polls.as_ref()?;
        let mut lines = lock(&self.lines.0.lines);
        let all = lines.lines.len();
        let line = lines.lines.get_mut(&self.line)?;
        line.first().filter(|(first, _)| *first == self.number)?;
        let waiter = line.first_mut()?;
        let wait = poll_after(waiter.polls, waiter.wait, all);
        waiter.polls = waiter.polls.saturating_add(1);
        let random = mixed(polls.seed ^ self.number.rotate_left(32) ^ u64::from(waiter.polls)) >> 56; // below 256
        Some(wait + wait * (random as u32) / 1024)
    }

    /// Leaves the line with units. If the lines poll, the next request is always woken. Otherwise the next request is
    /// woken only if the quota has more units (`has_more`), or if units came free since the request asked. So each
    /// freed place wakes one request. `own_limit` is the limit of the request's quota, if the requests of the line
    /// may have different quotas. In that case the next request is also woken if its own quota has a larger
    /// limit.
    pub(crate) fn leave_admitted(mut self, has_more: bool, own_limit: Option<u64>) {
        self.admitted = Some(Admitted { has_more, own_limit });
    }
}

impl Drop for PlaceTurn {
    fn drop(&mut self) {
        let mut wakers = Wakers::default();
        let mut lines = lock(&self.lines.0.lines);
        let Some(line) = lines.lines.get_mut(&self.line) else { return };
        let was_first = line.first().is_some_and(|(first, _)| first == self.number);
        let left = line.remove(self.number, &mut wakers);
        let is_over = line.is_empty();
        let leaves_more = |next: &LineWaiter| {
            let is_larger = |own: u64| next.limit > own;
            self.admitted.is_none_or(|own| own.has_more || own.own_limit.is_some_and(is_larger))
        };
        let has_more =
            left.as_ref().is_some_and(|left| left.is_called) || line.first().is_some_and(|(_, next)| leaves_more(next));
        // Only the first request in line asks the store repeatedly, so the next request now has to ask. The store
        // keeps this process's position in the line.
        let is_polled = self.lines.0.polls.is_some();
        if was_first && (has_more || is_polled) {
            let_first_ask(line, &mut wakers);
        }
        if is_over {
            remove_line(&mut lines.lines, &self.line);
        }
        self.lines.0.waiting.fetch_sub(u64::from(left.is_some()), Ordering::Relaxed);
        self.lines.counter_of(&self.line).fetch_sub(u64::from(left.is_some()), Ordering::Relaxed);
        drop(lines);
        #[cfg(any(feature = "_redis", feature = "store"))]
        if let (Some(polls), Some(policy)) = (&self.lines.0.polls, self.policy.take()) {
            if is_over && self.admitted.is_none() {
                let _ = polls.left.try_send((policy, self.line.key.clone()));
            }
        }
        wakers.release();
    }
}

/// A turn in a line for a bounded time.
pub(crate) struct BoundedTurn {
    turn: PlaceTurn,
    timer: Arc<dyn Timer>,
    until: Duration,
    sleep: Option<Sleep>,
    /// The timer that ends when the request asks again without being woken.
    poll: Option<Sleep>,
}

/// The next step of a request that waits in line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LineStep {
    /// The request asks the limiter again.
    Asks,
    /// The request gives up, because it has waited for as long as it may.
    GivesUp,
}

impl BoundedTurn {
    /// Puts a request into the line for units of a key, until a deadline. `arrival` is as in [`PlaceLines::join`].
    pub(crate) fn join(
        lines: &PlaceLines,
        (policy, key): (&Policy, &Key),
        arrival: Option<u64>,
        timer: Arc<dyn Timer>,
        until: Duration,
    ) -> Self {
        Self { turn: lines.join(policy, key, arrival), timer, until, sleep: None, poll: None }
    }

    /// Returns the request's number in line.
    pub(crate) fn number(&self) -> u64 {
        self.turn.number
    }

    /// Returns whether a request of these lines polls when it is the first in line.
    pub(crate) fn is_polled(&self) -> bool {
        self.turn.lines.0.polls.is_some()
    }

    /// Is ready when the request is the first of its line and units may have come free, or when it gives up.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<LineStep> {
        // Checks the deadline first. Otherwise the request could wait beyond its deadline if too few units come free
        // again and again, or if forced charges take the units.
        if self.timer.now() >= self.until {
            return Poll::Ready(LineStep::GivesUp);
        }
        if self.turn.poll(cx).is_ready() {
            self.poll = None;
            return Poll::Ready(LineStep::Asks);
        }
        let sleep = self.sleep.get_or_insert_with(|| self.timer.sleep_until(self.until));
        if sleep.as_mut().poll(cx).is_ready() {
            return Poll::Ready(LineStep::GivesUp);
        }
        if self.poll.is_none() {
            let after = self.turn.poll_after();
            self.poll = after.map(|after| self.timer.sleep_until(self.timer.now().saturating_add(after)));
        }
        if self.poll.as_mut().is_some_and(|poll| poll.as_mut().poll(cx).is_ready()) {
            self.poll = None;
            return Poll::Ready(LineStep::Asks);
        }
        Poll::Pending
    }

    /// Leaves the line like [`PlaceTurn::leave_admitted`].
    pub(crate) fn leave_admitted(self, has_more: bool, own_limit: Option<u64>) {
        self.turn.leave_admitted(has_more, own_limit);
    }
}

#[cfg(all(test, feature = "_redis", feature = "tokio"))]
mod tests {
    use super::*;
    use crate::clock::{ManualClock, TokioTimer};
    use crate::quota::Quota;

    const SECOND: Duration = Duration::from_secs(1);

    fn line() -> (Policy, Key) {
        let quota = Quota::concurrent(1).max_wait(10 * SECOND).unwrap();
        (Policy::new("places", quota).unwrap(), Key::global())
    }

    #[test]
    fn polls_of_a_process_are_at_most_200_a_second() {
        let waits = |wait| (0..7).map(|number| poll_after(number, wait, 1).as_millis()).collect::<Vec<u128>>();
        assert_eq!(waits(SECOND * 60), [20, 40, 80, 160, 320, 400, 400]);
        assert_eq!(waits(SECOND), [20, 40, 80, 125, 125, 125, 125]);
        assert_eq!(waits(SECOND / 20), [6; 7]);
        assert_eq!(waits(SECOND / 100), [5; 7]);
        assert_eq!(longest_poll(1), Duration::from_millis(500));
        for lines in [1, 4, 5, 100, 100_000] {
            let polls = lines as f64 / poll_after(0, SECOND / 100, lines).as_secs_f64();
            assert!(polls <= 200.0, "{lines} lines: {polls} polls a second");
            assert!(poll_after(9, SECOND * 60, lines) <= longest_poll(lines));
        }
    }

    #[test]
    fn standing_says_who_came_first_and_for_how_long_it_waits() {
        let (clock, (policy, key)) = (ManualClock::new(), line());
        let lines = PlaceLines::polling(Arc::new(clock.clone()), 1, mpsc::channel(1).0);
        let charge = Charge::new(&policy, &key);
        assert_eq!(lines.standing(&charge), Standing::Newcomer);
        let first = lines.join(&policy, &key, None);
        clock.advance(3 * SECOND);
        let second = lines.join(&policy, &key, None);
        clock.advance(SECOND);
        let standing = |turn: &PlaceTurn| lines.standing(&charge.arrived(turn.number));
        let in_line = |number, waited| Standing::First(FirstInLine { number, waited, asks_within: SECOND });
        assert_eq!(standing(&first), in_line(1, 4 * SECOND));
        assert_eq!((standing(&second), lines.standing(&charge)), (Standing::HeldBack, Standing::HeldBack));
        let other = Key::of("other").unwrap();
        assert_eq!(lines.standing(&Charge::new(&policy, &other)), Standing::Newcomer);
        drop(first);
        assert_eq!(standing(&second), in_line(2, SECOND));
    }

    #[test]
    fn line_that_its_last_request_left_without_units_is_told() {
        let (policy, key) = line();
        let (sender, mut left) = mpsc::channel(1);
        let lines = PlaceLines::polling(Arc::new(ManualClock::new()), 1, sender);
        let [first, second] = [(); 2].map(|()| lines.join(&policy, &key, None));
        drop(second);
        assert!(left.try_recv().is_err(), "one waits still");
        drop(first);
        assert!(left.try_recv().is_ok_and(|(_, left)| left == key));
        lines.join(&policy, &key, None).leave_admitted(false, None);
        assert!(left.try_recv().is_err(), "the store knows of those that it admitted");
        (0..3).for_each(|_| drop(lines.join(&policy, &key, None))); // more than there is room for
        assert!(left.try_recv().is_ok() && left.try_recv().is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn first_in_line_asks_by_itself_ever_more_rarely() {
        let (policy, key) = line();
        let timer = TokioTimer::new();
        let lines = PlaceLines::polling(Arc::new(ManualClock::new()), 1, mpsc::channel(1).0);
        let join = |wait: Duration| {
            BoundedTurn::join(&lines, (&policy, &key), None, Arc::new(timer), timer.now().saturating_add(wait))
        };
        let (mut first, mut second) = (join(3 * SECOND), join(SECOND));
        assert_eq!(std::future::poll_fn(|cx| first.poll(cx)).await, LineStep::Asks, "once at the beginning");
        let mut waits = Vec::new();
        loop {
            let before = timer.now();
            if std::future::poll_fn(|cx| first.poll(cx)).await == LineStep::GivesUp {
                break;
            }
            waits.push((timer.now() - before).as_millis());
            if waits.len() == 3 {
                lines.wake_first(&policy, &key);
                let woken = std::future::poll_fn(|cx| first.poll(cx)).await;
                assert_eq!((woken, timer.now() - before), (LineStep::Asks, Duration::from_millis(waits[2] as u64)));
            }
        }
        // Each with up to a quarter, and a millisecond of the timer.
        let nominal = [20, 40, 80, 20, 40, 80, 160, 320, 400, 400, 400];
        assert!(waits.len() >= nominal.len(), "{waits:?}");
        for (wait, nominal) in waits.iter().zip(nominal) {
            assert!((nominal..=nominal * 5 / 4 + 1).contains(wait), "{waits:?}");
        }
        assert_eq!(std::future::poll_fn(|cx| second.poll(cx)).await, LineStep::GivesUp, "only the first one asks");
    }

    #[tokio::test(start_paused = true)]
    async fn next_in_line_asks_although_nothing_is_known_to_be_free() {
        let (policy, key) = line();
        let timer = TokioTimer::new();
        let lines = PlaceLines::polling(Arc::new(ManualClock::new()), 1, mpsc::channel(1).0);
        let join = || {
            let until = timer.now().saturating_add(10 * SECOND);
            BoundedTurn::join(&lines, (&policy, &key), None, Arc::new(timer), until)
        };
        let (mut first, mut second) = (join(), join());
        assert_eq!(std::future::poll_fn(|cx| first.poll(cx)).await, LineStep::Asks);
        let second = tokio::spawn(async move { std::future::poll_fn(|cx| second.poll(cx)).await });
        tokio::task::yield_now().await;
        first.leave_admitted(false, Some(1));
        let began = timer.now();
        assert_eq!(second.await.unwrap(), LineStep::Asks, "another process may return units");
        assert_eq!(timer.now(), began);
    }

    #[tokio::test(start_paused = true)]
    async fn request_that_is_woken_again_and_again_gives_up_in_time() {
        let (policy, key) = line();
        let (lines, timer) = (PlaceLines::new(), TokioTimer::new());
        let until = timer.now().saturating_add(SECOND);
        let mut turn = BoundedTurn::join(&lines, (&policy, &key), None, Arc::new(timer), until);
        for _ in 0..10 {
            assert_eq!(std::future::poll_fn(|cx| turn.poll(cx)).await, LineStep::Asks);
            lines.wake_first(&policy, &key); // while it asks
            tokio::time::advance(SECOND / 10).await;
        }
        assert_eq!(std::future::poll_fn(|cx| turn.poll(cx)).await, LineStep::GivesUp);
    }
}
