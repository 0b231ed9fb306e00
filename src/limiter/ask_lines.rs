//! The callers that wait in line until a limiter admits them.
//!
//! A line is for one policy's name and one key. The first caller in a line asks the limiter. A caller that
//! the limiter denies asks again at the instant that the limiter named, and no other caller asks before that instant.
//! After an admission the next caller asks: at once if the decision left enough units, and otherwise when the next
//! unit comes back. So an admission takes one call to the limiter, or two if a charge from outside the line took
//! units meanwhile.
//!
//! If a store states a wait, the wait begins when the store decides, not when its answer arrives. The next call takes
//! time to reach the store, too. So the next caller asks one round trip before the wait ends. Otherwise the round
//! trips to a distant store would slow each line down.
//!
//! Several callers ask at the same time if the last decision left enough units for all of them. With one
//! caller at a time, a remote limiter would be asked only once per round trip. Before the first decision, the line
//! assumes that the whole capacity is left. So if a thousand callers arrive at once, only as many ask as the capacity
//! has units for.
//!
//! If a call fails, its caller gets the error, and two more callers ask at once. If both of their calls fail, four more
//! ask. So a thousand callers have their errors after ten failed round trips, and one lost connection does not cause a
//! thousand calls. If a call fails only because the limiter is overloaded, one more caller asks.
//!
//! # Changes meanwhile
//!
//! A reset, a refund elsewhere or a larger quota may let the first caller pass earlier than the limiter said.
//! The first caller asks at once if the line learns of the change. In any case the first caller asks again
//! after ten seconds, even if the limiter named a longer wait.
//!
//! # Callers that do not run
//!
//! The application may stop polling a caller's future. If the first caller does not ask in time, the next
//! caller asks instead. The late caller keeps its turn, and is the first again as soon as its future is
//! polled. So a future that is not polled delays the other callers only once.

use std::collections::HashMap;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use super::place_lines::LineStep;
use crate::base::number_map::NumberMap;
use crate::base::sync::{AtomicU64, Mutex, Ordering, contained, lock};
use crate::base::time::micros_ceil;
use crate::base::wait_list::{FOREMOST, WaitList, remove_line};
use crate::base::wakers::Wakers;
use crate::clock::{Alarm, Timer, time_of};
use crate::key::Key;
use crate::policy::Policy;

/// A caller has to ask within this time after the instant at which it may ask. After this time, the second caller may
/// ask; after twice this time, the third.
const PATIENCE_US: u64 = 50_000;

/// If the latest call to the limiter has no answer after this time, the next caller may ask.
const UNANSWERED_US: u64 = 1_000_000;

/// The longest time until the first caller asks the limiter again.
const RECHECK_US: u64 = 10_000_000;

/// If none of the foremost callers asks within this time, a caller behind them asks.
const LONG_PATIENCE_US: u64 = 10_000_000;

/// The lines of all keys. A key has a line only while a caller waits in it.
#[derive(Debug, Default)]
pub(crate) struct AskLines {
    /// The number of callers in all lines, including those that are asking.
    waiting: AtomicU64,
    table: Mutex<AskTable>,
}

#[derive(Debug, Default)]
struct AskTable {
    lines: HashMap<AskLineKey, AskLine>,
    turns: u64,
    /// The latest time that a caller's timer reported. The lines use this time for a timer that cannot sleep
    /// and so reports no time.
    now_us: u64,
}

/// The fingerprint of a policy's name, and the key that a line is for.
type AskLineKey = (u64, Key);

/// All instants are in microseconds of the callers' timer.
#[derive(Debug, Default)]
struct AskLine {
    /// The callers that wait, with their costs.
    waiters: WaitList<u64>,
    /// The costs of the callers that did not ask in time, keyed by turn.
    passed_over: NumberMap<u64>,
    /// The calls to the limiter that are under way, keyed by the turns of their callers.
    asking: NumberMap<Asking>,
    /// The instant at which the first caller may ask.
    due_us: u64,
    /// The units that the last decision left, minus the units for which callers are asking.
    spare: u64,
    /// The number of callers that may ask at once, because calls have failed.
    released: u64,
    /// The usual round trip of calls that the limiter does not answer at once, see [`AskLine::measure`].
    trip_us: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Asking {
    cost: u64,
    since_us: u64,
    /// Whether units came back after the call began. The denial of this call may have been decided without those
    /// units.
    is_outdated: bool,
    /// Whether the limiter did not answer at once.
    is_sent: bool,
}

impl AskLines {
    /// Returns `true` if no caller waits in any line.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) == 0
    }

    /// Returns whether a key has a line: callers that wait, or that are asking the limiter.
    #[inline]
    pub(crate) fn has_line(&self, policy: &Policy, key: &Key) -> bool {
        !self.is_empty() && lock(&self.table).lines.contains_key(&line_key(policy, key))
    }

    /// Returns whether a caller with a number below `number` waits for a key. A caller gets its number when
    /// it joins its first line.
    pub(crate) fn has_before(&self, policy: &Policy, key: &Key, number: u64) -> bool {
        if self.is_empty() {
            return false;
        }
        let table = lock(&self.table);
        let first = table.lines.get(&line_key(policy, key)).and_then(|line| line.waiters.first());
        first.is_some_and(|(first, _)| first < number)
    }

    /// Returns the number for a new caller.
    pub(crate) fn next_number(&self) -> u64 {
        lock(&self.table).next_number()
    }

    /// Returns the number of callers that wait for a key.
    pub(crate) fn waiting(&self, policy: &Policy, key: &Key) -> usize {
        if self.is_empty() {
            return 0;
        }
        let of_line = |line: &AskLine| line.waiters.len() + line.passed_over.len() + line.asking.len();
        lock(&self.table).lines.get(&line_key(policy, key)).map_or(0, of_line)
    }

    /// Lets the first caller of a key ask, because units have come back.
    pub(crate) fn let_first_ask(&self, policy: &Policy, key: &Key, timer: &dyn Timer) {
        if !self.is_empty() {
            let now_us = time_of(timer);
            self.change(&line_key(policy, key), now_us, |line, now_us, _| line.let_first_ask(now_us));
        }
    }

    /// Lets the first caller of each key ask, because the policy's mode or quota has changed. Takes time
    /// in proportion to the number of lines.
    pub(crate) fn let_each_first_ask(&self, policy: &Policy, timer: &dyn Timer) {
        if self.is_empty() {
            return;
        }
        let now_us = time_of(timer);
        let mut wakers = Wakers::default();
        let mut table = lock(&self.table);
        let now_us = table.time(now_us);
        for (_, line) in table.lines.iter_mut().filter(|((name, _), _)| *name == policy.name_fingerprint()) {
            line.let_first_ask(now_us);
            line.wake_foremost(&mut wakers);
        }
        drop(table);
        wakers.release();
    }

    /// Changes a line. `change` gets the time.
    fn change<T>(
        &self,
        key: &AskLineKey,
        now_us: Option<u64>,
        change: impl FnOnce(&mut AskLine, u64, &mut Wakers) -> T,
    ) -> Option<T> {
        let mut wakers = Wakers::default();
        let mut table = lock(&self.table);
        let now_us = table.time(now_us);
        let line = table.lines.get_mut(key)?;
        let changed = change(line, now_us, &mut wakers);
        line.wake_foremost(&mut wakers);
        if line.is_over() {
            remove_line(&mut table.lines, key);
        }
        drop(table);
        wakers.release();
        Some(changed)
    }
}

impl AskTable {
    fn time(&mut self, now_us: Option<u64>) -> u64 {
        self.now_us = self.now_us.max(now_us.unwrap_or(0));
        self.now_us
    }

    fn next_number(&mut self) -> u64 {
        self.turns += 1;
        self.turns
    }
}

fn line_key(policy: &Policy, key: &Key) -> AskLineKey {
    (policy.name_fingerprint(), key.clone())
}

impl AskLine {
    /// Lets the first caller ask. A caller that is already asking asks again at once if the limiter denies
    /// it.
    fn let_first_ask(&mut self, now_us: u64) {
        self.due_us = self.due_us.min(now_us);
        self.asking.values_mut().for_each(|asking| asking.is_outdated = true);
    }

    fn is_over(&self) -> bool {
        self.waiters.is_empty() && self.passed_over.is_empty() && self.asking.is_empty()
    }

    /// Returns the instant until which a caller sleeps, or `None` if it asks now.
    fn poll(&mut self, turn: u64, now_us: u64, until_us: u64, waker: Waker, wakers: &mut Wakers) -> Option<u64> {
        if let Some(cost) = self.passed_over.remove(turn) {
            self.waiters.add(turn, cost);
        }
        let cost = self.waiters.get_mut(turn).map_or(0, |cost| *cost);
        if self.waiters.position(turn).is_none() && self.free_us(cost).saturating_add(LONG_PATIENCE_US) <= now_us {
            (0..FOREMOST).for_each(|_| self.pass_first_over(wakers));
            self.due_us = now_us;
        }
        let may_ask_us = match self.waiters.position(turn) {
            Some(position) => {
                let until = self.waiters.foremost().take(position + 1);
                self.may_ask_us(position, until.copied().max().unwrap_or(cost))
            }
            None => self.free_us(cost).max(now_us).saturating_add(LONG_PATIENCE_US),
        };
        if may_ask_us > now_us {
            let until_us = may_ask_us.min(until_us);
            self.waiters.sleep(turn, until_us, waker, wakers);
            return Some(until_us);
        }
        while self.waiters.first().is_some_and(|(first, _)| first < turn) {
            self.pass_first_over(wakers);
        }
        self.waiters.remove(turn, wakers);
        self.note_asking(turn, cost, now_us);
        self.due_us = now_us;
        wakers.to_drop.push(waker);
        None
    }

    fn note_asking(&mut self, turn: u64, cost: u64, now_us: u64) {
        self.asking.insert(turn, Asking { cost, since_us: now_us, is_outdated: false, is_sent: false });
        self.spare = self.spare.saturating_sub(cost);
        self.released = self.released.saturating_sub(1);
    }

    /// Notes that a caller's call begins now, and that the limiter does not answer it at once. If a caller sends two
    /// calls, one after the other, the second call is measured.
    fn note_sent(&mut self, turn: u64, now_us: u64) {
        if let Some(asking) = self.asking.get_mut(turn) {
            (asking.is_sent, asking.since_us) = (true, now_us);
        }
    }

    fn pass_first_over(&mut self, wakers: &mut Wakers) {
        // `pop_first` wakes the caller, which is back in its position in the line as soon as it polls.
        if let Some((turn, cost)) = self.waiters.pop_first(wakers) {
            self.passed_over.insert(turn, cost);
        }
    }

    /// Returns the instant at which a caller may ask. `position` is the number of callers before this caller, and
    /// `largest` is the largest cost among those callers and this caller. The caller waits [`PATIENCE_US`] for each
    /// caller before it, from the instant at which all of them may ask.
    fn may_ask_us(&self, position: usize, largest: u64) -> u64 {
        let patience_us = PATIENCE_US.saturating_mul(u64::try_from(position).unwrap_or(u64::MAX));
        self.free_us(largest).saturating_add(patience_us)
    }

    /// Returns the instant at which a first caller with this cost may ask.
    fn free_us(&self, cost: u64) -> u64 {
        let latest = self.asking.values().map(|asking| asking.since_us).max();
        let latest = latest.filter(|_| cost > self.spare && self.released == 0);
        self.due_us.max(latest.map_or(0, |since_us| since_us.saturating_add(UNANSWERED_US)))
    }

    fn wake_foremost(&mut self, wakers: &mut Wakers) {
        let (mut waiters, mut largest) = (std::mem::take(&mut self.waiters), 0);
        let may_ask_us = |position, cost: &u64| {
            largest = largest.max(*cost);
            Some(self.may_ask_us(position, largest))
        };
        waiters.wake_foremost(may_ask_us, wakers);
        self.waiters = waiters;
    }

    /// Puts a caller that the limiter denied back into its position in the line.
    fn note_denied(&mut self, turn: u64, now_us: u64, wait_us: u64) {
        let Some(asking) = self.asking.remove(turn) else { return };
        self.waiters.add(turn, asking.cost);
        (self.spare, self.released) = (0, 0);
        // An answer at once may be a remembered denial. The limiter repeats it until the wait is over, so an earlier
        // call would be denied again.
        let trip_us = if asking.is_sent { self.measure(asking, now_us) } else { 0 };
        let left_us = wait_us.saturating_sub(trip_us);
        // The wait is zero only after an outdated answer. If it could be zero after any other answer, this would be a
        // busy loop.
        let wait_us = if asking.is_outdated { 0 } else { left_us.clamp(1, RECHECK_US) };
        self.due_us = now_us.saturating_add(wait_us);
    }

    /// Removes a caller that was admitted. `remaining` units are left, and the next unit comes back after `next_us`
    /// microseconds.
    fn note_admitted(&mut self, turn: u64, now_us: u64, remaining: u64, next_us: u64) {
        let asking = self.asking.remove(turn);
        let trip_us = match asking.filter(|asking| asking.is_sent) {
            Some(asking) => self.measure(asking, now_us),
            None => self.trip_us.unwrap_or(0),
        };
        let under_way = self.asking.values().fold(0, |sum: u64, asking| sum.saturating_add(asking.cost));
        (self.spare, self.released) = (remaining.saturating_sub(under_way), 0);
        let is_enough = self.waiters.first().is_none_or(|(_, cost)| *cost <= self.spare);
        self.due_us =
            now_us.saturating_add(if is_enough { 0 } else { next_us.saturating_sub(trip_us).min(RECHECK_US) });
    }

    /// Measures the round trip of a call that the limiter did not answer at once. Returns the usual round trip.
    /// The next call has to be sent this long before the wait ends.
    ///
    /// A call that asks too early costs a whole round trip. So the usual round trip falls to a shorter one at once, and
    /// rises to a longer one slowly. Calls that failed are not measured. Answers at once, such as remembered denials,
    /// are not measured either.
    fn measure(&mut self, asking: Asking, now_us: u64) -> u64 {
        let took_us = now_us.saturating_sub(asking.since_us);
        let usual_us = self.trip_us.map_or(took_us, |usual_us| usual_us + took_us.saturating_sub(usual_us) / 8);
        let trip_us = took_us.min(usual_us);
        self.trip_us = Some(trip_us);
        trip_us
    }

    /// Removes a caller whose call failed. Two other callers may ask.
    fn note_failed(&mut self, turn: u64, now_us: u64) {
        self.asking.remove(turn);
        (self.released, self.due_us) = (self.released.saturating_add(2), now_us);
    }

    /// Removes a caller that no longer waits.
    fn leave(&mut self, turn: u64, now_us: u64, wakers: &mut Wakers) {
        self.passed_over.remove(turn);
        if self.asking.remove(turn).is_some() {
            self.due_us = now_us;
        }
        let was_first = self.waiters.first().is_some_and(|(first, _)| first == turn);
        let Some(cost) = self.waiters.remove(turn, wakers) else { return };
        if was_first {
            // The limiter's wait was for a larger cost, and a smaller cost may pass earlier.
            let is_smaller = self.waiters.first().is_some_and(|(_, next)| *next < cost);
            self.due_us = if is_smaller { now_us } else { self.due_us.max(now_us) };
        }
    }
}

/// A caller's turn in a line, for a bounded time. The caller leaves the line when its turn is dropped.
pub(crate) struct AskTurn {
    lines: Arc<AskLines>,
    timer: Arc<dyn Timer>,
    key: AskLineKey,
    number: u64,
    until_us: u64,
    alarm: Alarm,
}

impl AskTurn {
    /// Joins the line of a key, and stays in it until `until_us` at the latest. A caller from another line keeps the
    /// `number` that it had there, and stays behind the callers with lower numbers.
    ///
    /// If the line is empty, the caller asks at once, even if the limiter has just denied it, because units that came
    /// back since the denial have woken nobody.
    pub(crate) fn join(
        lines: &Arc<AskLines>,
        timer: &Arc<dyn Timer>,
        (policy, key, cost): (&Policy, &Key, u64),
        until_us: u64,
        number: Option<u64>,
    ) -> Self {
        Self::enter(lines, timer, (policy, key), (until_us, number), |line, number, now_us| {
            if line.is_over() {
                line.due_us = now_us;
            }
            line.waiters.add(number, cost);
        })
    }

    /// Puts a caller whose call to the limiter is under way into the line of a key. If the key has no line, a line
    /// begins with this caller.
    pub(crate) fn ask(
        lines: &Arc<AskLines>,
        timer: &Arc<dyn Timer>,
        (policy, key, cost): (&Policy, &Key, u64),
        until_us: u64,
    ) -> Self {
        Self::enter(lines, timer, (policy, key), (until_us, None), |line, number, now_us| {
            if line.is_over() {
                (line.due_us, line.spare) = (now_us, policy.quota().capacity());
            }
            line.note_asking(number, cost, now_us);
            line.note_sent(number, now_us);
        })
    }

    /// Gives a caller the turn with its number, or a new turn if the caller has no number. `enter` gets the line, the
    /// number and the time.
    fn enter(
        lines: &Arc<AskLines>,
        timer: &Arc<dyn Timer>,
        (policy, key): (&Policy, &Key),
        (until_us, number): (u64, Option<u64>),
        enter: impl FnOnce(&mut AskLine, u64, u64),
    ) -> Self {
        let (key, now_us) = (line_key(policy, key), time_of(&**timer));
        let mut table = lock(&lines.table);
        let now_us = table.time(now_us);
        let number = number.unwrap_or_else(|| table.next_number());
        enter(table.lines.entry(key.clone()).or_default(), number, now_us);
        lines.waiting.fetch_add(1, Ordering::Relaxed);
        drop(table);
        Self { lines: Arc::clone(lines), timer: Arc::clone(timer), key, number, until_us, alarm: Alarm::default() }
    }

    /// Is ready when the caller has to ask the limiter, or when it gives up. A caller that has asked reports
    /// the answer with [`note_denied`](Self::note_denied), [`leave_admitted`](Self::leave_admitted) or
    /// [`leave_failed`](Self::leave_failed).
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<LineStep> {
        let Some(mut now_us) = time_of(&*self.timer) else { return Poll::Ready(LineStep::GivesUp) };
        loop {
            if now_us > self.until_us {
                return Poll::Ready(LineStep::GivesUp);
            }
            let (number, until_us, waker) = (self.number, self.until_us, cx.waker().clone());
            let poll = |line: &mut AskLine, _, wakers: &mut Wakers| line.poll(number, now_us, until_us, waker, wakers);
            let polled = self.lines.change(&self.key, Some(now_us), poll);
            debug_assert!(polled.is_some(), "a line lasts as long as a caller has a turn in it");
            let Some(until_us) = polled.flatten() else { return Poll::Ready(LineStep::Asks) };
            if now_us >= self.until_us {
                return Poll::Ready(LineStep::GivesUp);
            }
            now_us = ready!(self.alarm.poll(&*self.timer, until_us, cx));
        }
    }

    /// Returns the caller's number in line.
    #[cfg(all(test, ratelimit_shuttle))]
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Returns for how long the caller may still wait.
    pub(crate) fn left(&self) -> Duration {
        Duration::from_micros(self.until_us.saturating_sub(time_of(&*self.timer).unwrap_or(self.until_us)))
    }

    /// Notes that the limiter did not answer the caller at once.
    pub(crate) fn note_sent(&self) {
        self.change(|line, now_us, _| line.note_sent(self.number, now_us));
    }

    /// Notes that the limiter denied the caller, which asks again after this wait.
    pub(crate) fn note_denied(&self, wait: Duration) {
        self.change(|line, now_us, _| line.note_denied(self.number, now_us, micros_ceil(wait)));
    }

    /// Leaves the line, because the limiter admitted the caller. `remaining` units are left, and the next unit comes
    /// back after `next`.
    pub(crate) fn leave_admitted(self, remaining: u64, next: Duration) {
        self.change(|line, now_us, _| line.note_admitted(self.number, now_us, remaining, micros_ceil(next)));
    }

    /// Leaves the line because the limiter failed.
    pub(crate) fn leave_failed(self) {
        self.change(|line, now_us, _| line.note_failed(self.number, now_us));
    }

    fn change(&self, change: impl FnOnce(&mut AskLine, u64, &mut Wakers)) {
        self.lines.change(&self.key, time_of(&*self.timer), change);
    }
}

impl Drop for AskTurn {
    fn drop(&mut self) {
        let mut now_us = None;
        contained(|| now_us = time_of(&*self.timer)); // the timer is the application's code
        self.lines.change(&self.key, now_us, |line, now_us, wakers| line.leave(self.number, now_us, wakers));
        self.lines.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::StoppedTimer;
    use crate::quota::Quota;

    /// The limiter decides before the units come back, and the answer arrives after that.
    #[test]
    fn units_that_come_back_during_a_call_are_asked_for() {
        let (lines, timer): (Arc<AskLines>, Arc<dyn Timer>) = (Arc::default(), Arc::new(StoppedTimer));
        let policy = Policy::new("jobs", Quota::per_second(1)).unwrap();
        let (key, hour) = (Key::global(), Duration::from_secs(3_600));
        let due_us = || lock(&lines.table).lines.values().next().map(|line| line.due_us);
        let mut turn = AskTurn::ask(&lines, &timer, (&policy, &key, 1), u64::MAX);
        type Change = fn(&AskLines, &Policy, &Key);
        let changes: [(Change, u64); 3] = [
            (|lines, policy, key| lines.let_first_ask(policy, key, &StoppedTimer), 0),
            (|lines, policy, _| lines.let_each_first_ask(policy, &StoppedTimer), 0),
            (|_, _, _| (), RECHECK_US),
        ];
        for (change, wanted_us) in changes {
            change(&lines, &policy, &key);
            turn.note_denied(hour);
            assert_eq!(due_us(), Some(wanted_us));
            lines.let_first_ask(&policy, &key, &StoppedTimer);
            assert!(turn.poll(&mut Context::from_waker(Waker::noop())).is_ready(), "it asks again");
        }
    }

    #[test]
    fn answer_at_once_is_no_round_trip() {
        let mut line = AskLine::default();
        line.note_asking(1, 1, 0);
        line.note_sent(1, 0);
        line.note_denied(1, 100_000, 1_000_000);
        assert_eq!(line.due_us, 1_000_000, "a call that is sent then arrives when the wait is over");
        line.note_asking(2, 1, 200_000);
        line.note_denied(2, 200_000, 900_000);
        assert_eq!(line.due_us, 1_100_000, "until then the limiter remembers the denial");
        line.note_asking(3, 1, 1_100_000);
        line.note_sent(3, 1_100_000);
        line.note_denied(3, 1_200_000, 1_000_000);
        assert_eq!(line.due_us, 2_100_000, "the round trip is known as before");
        line.note_asking(4, 1, 2_100_000);
        line.note_admitted(4, 2_100_000, 0, 1_000_000);
        assert_eq!(line.due_us, 3_000_000, "a lease admitted the caller, and the next call takes a round trip");
    }

    #[test]
    fn failed_call_lets_two_more_callers_ask() {
        let (lines, timer): (_, Arc<dyn Timer>) = (Arc::default(), Arc::new(StoppedTimer));
        let policy = Policy::new("jobs", Quota::per_second(1)).unwrap();
        let caller = (&policy, &Key::global(), 1);
        let mut asking = vec![AskTurn::ask(&lines, &timer, caller, u64::MAX)];
        let join = || AskTurn::join(&lines, &timer, caller, u64::MAX, None);
        let mut waiting: Vec<AskTurn> = (0..30).map(|_| join()).collect();
        let mut numbers = Vec::new();
        for failing in [1, 2, 4, 8] {
            let asks = |turn: &mut AskTurn| turn.poll(&mut Context::from_waker(Waker::noop())).is_ready();
            assert_eq!(waiting.iter_mut().position(asks), None);
            assert_eq!(asking.len(), failing);
            asking.drain(..).for_each(AskTurn::leave_failed);
            while waiting.first_mut().is_some_and(asks) {
                asking.push(waiting.remove(0));
                numbers.extend(asking.last().map(|turn| turn.number));
            }
        }
        assert!(numbers.is_sorted() && numbers.len() == 2 + 4 + 8 + 16, "{numbers:?}");
    }
}
