//! The account of a key, which holds the units for all bodies of the key in this process.
//!
//! The account takes units from its limiter in batches. A batch lasts for a
//! [tick](BytePace::tick_us) at the quota's pace. The account asks for one batch after the other.
//! The instant from which it may ask for a batch is the batch's *slot*. Usually the previous batch
//! ends at this instant. So the burst of a quota does not become a burst of bytes, and the number
//! of calls does not grow with the number of bodies. If the account asks late, it asks for
//! proportionally more, so that neither the resolution of a timer nor the round trip to a store
//! slows the pace. The first batch is half as large as the later batches. So the bytes that were
//! sent are at most half a batch ahead of the pace or behind it.
//!
//! Bodies stand in line for pieces of a batch, in the order in which they came. This line is not
//! the line of requests. A request waits for exactly its cost, but a body takes any part of a batch
//! that all bodies share.
//!
//! No task runs for the account. Each waiting body has a timer for its expected turn. The body that
//! is polled first asks the limiter, or polls an answer that is under way. So a body that is not
//! polled delays no other body for longer than the time of a batch.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker, ready};
use std::time::Duration;

use crate::base::sync::{Mutex, contained, lock};
use crate::base::time::micros_ceil;
use crate::base::wait::Wait;
use crate::base::wait_list::WaitList;
use crate::base::wakers::Wakers;
use crate::clock::{Alarm, Timer, time_of};
use crate::error::BoxError;
use crate::limiter::Refund;

/// The shortest [tick](BytePace::tick_us).
const BATCH_US: u64 = 50_000;

/// The longest [tick](BytePace::tick_us). Half of this time is less than one percent of ten
/// seconds.
const TICK_US: u64 = 150_000;

/// A tick is the time that this many bytes take at the pace, but at least [`BATCH_US`] and at most
/// [`TICK_US`]. Smaller batches would take more processor time, because the work for a piece does not
/// depend on its size.
const TICK_BYTES: u64 = 32_768;

/// A batch has at least this many bytes, even if these take longer than a tick at a slow pace. It has fewer
/// if they would take longer than [`SLOW_US`].
const BATCH_BYTES: u64 = 1_024;

/// The longest time that a batch of [`BATCH_BYTES`] may take.
const SLOW_US: u64 = 1_000_000;

/// The smallest piece of a batch, in bytes, for which a body is woken, unless the batch is smaller.
const PIECE: u64 = 4_096;

/// If bodies wait but the account cannot ask, it later makes up for at most this time.
const LATE_US: u64 = 1_000_000;

/// If no body waits, the account later makes up for at most this time. So a reader may take this
/// long for a batch and still get the whole pace.
const IDLE_US: u64 = 200_000;

/// The time after which an account that was denied asks again at the latest, in case its key was
/// reset by another layer or process.
const RECHECK_US: u64 = 10_000_000;

/// The first pause after a limiter has failed. Each further pause is twice as long as the pause
/// before.
const PAUSE_US: u64 = 100_000;

/// The number of consecutive calls that may fail before the waiting bodies are ended. These calls
/// take about three seconds. Bodies that join later are ended if the next call fails as well.
const FAILURES_MAX: u32 = 5;

/// The source of an account's units, which is a limiter with a policy and a key.
pub(crate) trait PaceSource: Send + Sync {
    /// Returns the pace that is in force now.
    fn terms(&self) -> PaceTerms;

    /// Takes units, all or none.
    fn ask(&self, units: u64) -> PaceReply;

    /// Refunds units that were not used.
    fn refund(&self, refund: Refund);
}

/// The pace of bodies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PaceTerms {
    /// Bodies do not wait.
    Free,
    Paced(BytePace),
}

/// Units in a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BytePace {
    pub(crate) units: u64,
    pub(crate) period_us: u64,
    /// The maximum number of units to ask for at once.
    pub(crate) most: u64,
}

impl BytePace {
    /// Returns the time between two batches.
    fn tick_us(self) -> u64 {
        self.time_us(TICK_BYTES).clamp(BATCH_US, TICK_US)
    }

    /// Returns the number of units that this pace allows in the given time. The result is at least
    /// 1, and at most the maximum for one call.
    fn batch(self, time_us: u64) -> u64 {
        let of = |time_us: u64| {
            let units = u128::from(self.units) * u128::from(time_us) / u128::from(self.period_us.max(1));
            u64::try_from(units).unwrap_or(u64::MAX)
        };
        of(time_us).max(BATCH_BYTES.min(of(SLOW_US))).min(self.most).max(1)
    }

    /// Returns the time for which these units last at this pace.
    fn time_us(self, units: u64) -> u64 {
        let time_us = (u128::from(units) * u128::from(self.period_us)).div_ceil(u128::from(self.units.max(1)));
        u64::try_from(time_us).unwrap_or(u64::MAX)
    }
}

/// The part of a pace that this process asks for, in units of 1/1,024. If several processes share a
/// pace and each asked for the whole pace, half of their calls would be denied, and the process
/// that asks a moment earlier would get everything. So a process asks for less after a denial, and
/// for a little more after each success. TCP connections reach equal parts by the same method.
#[derive(Clone, Copy)]
struct PaceShare(u64);

impl PaceShare {
    const WHOLE: u64 = 1_024;
    const LEAST: u64 = Self::WHOLE / 16;
    const STEP: u64 = Self::WHOLE / 64;

    fn grow(&mut self) {
        self.0 = (self.0 + Self::STEP).min(Self::WHOLE);
    }

    fn shrink(&mut self) {
        self.0 = (self.0 * 7 / 8).max(Self::LEAST);
    }

    fn of(self, pace: BytePace) -> BytePace {
        if self.0 == Self::WHOLE {
            return pace;
        }
        let (units, period_us) = (pace.units.saturating_mul(self.0), pace.period_us.saturating_mul(Self::WHOLE));
        BytePace { units, period_us, ..pace }
    }
}

impl Default for PaceShare {
    fn default() -> Self {
        Self(Self::WHOLE)
    }
}

/// A source's answer, now or later.
pub(crate) enum PaceReply {
    Now(PaceAnswer),
    Later(LaterPaceAnswer),
}

type LaterPaceAnswer = Pin<Box<dyn Future<Output = PaceAnswer> + Send>>;

/// The answer of a source.
#[derive(Debug)]
pub(crate) enum PaceAnswer {
    /// The units were taken, and may be used after the delay.
    Taken { refund: Option<Refund>, delay: Duration },
    /// The units were not taken, because fewer units remain.
    Denied { wait: Wait, remaining: u64 },
    /// The limiter failed, and bodies go on without it.
    FailedOpen,
    /// The limiter failed, and bodies wait for it.
    FailedClosed,
}

/// The account of a key.
pub(crate) struct Account {
    source: Box<dyn PaceSource>,
    timer: Arc<dyn Timer>,
    state: Mutex<AccountState>,
    /// Wakes the bodies that may poll an answer under way.
    waker: Waker,
}

#[derive(Default)]
struct AccountState {
    phase: AccountPhase,
    /// Units that were taken and not sent, oldest first.
    batches: VecDeque<UnitBatch>,
    /// The bodies that have units, stand in line, or will end in an error.
    bodies: HashMap<u64, BodyUnits>,
    /// The units that are assigned to bodies.
    assigned: u64,
    /// The line of the bodies that wait, in the order of their turns.
    line: WaitList<BodyInLine>,
    turns: u64,
    numbers: u64,
    /// The instant from which on the account may ask for the next batch.
    slot_us: u64,
    /// True if the limiter's last answer was a denial.
    is_denied: bool,
    /// True if a mode, a quota or the key's state has changed since the account last asked.
    is_outdated: bool,
    /// True if the next batch is the first after a time without waiting bodies.
    begins: bool,
    /// The units of the last batch, and the time for which it lasts.
    batch: (u64, u64),
    /// The part of the pace that this process asks for, see [`PaceShare`].
    share: PaceShare,
    /// The units of the next batch, if the last denial said that only this many remain.
    rest: Option<u64>,
    has_asked_for_rest: bool,
    failures: u32,
}

/// The phase of an account.
#[derive(Default)]
enum AccountPhase {
    /// The account may ask at its slot.
    #[default]
    Idle,
    /// A body asks the source, or polls its answer, without holding the lock. `is_woken` becomes
    /// `true` if the answer comes meanwhile.
    Busy { is_woken: bool },
    /// The source's answer to `question` is under way.
    Asked { answer: LaterPaceAnswer, question: PaceQuestion },
    /// A batch was taken, and may be used from this instant on.
    Departs { at_us: u64, batch: UnitBatch },
}

/// A question to a source.
#[derive(Clone, Copy)]
struct PaceQuestion {
    units: u64,
    pace: BytePace,
    /// The pace of all processes together.
    whole: BytePace,
    at_us: u64,
    /// The time between the end of the batch and the next slot. It is half a tick if the batch is the first
    /// one, and otherwise zero.
    gap_us: u64,
}

struct UnitBatch {
    /// The refund of the taken units. `None` if the limiter failed and the units were not charged.
    refund: Option<Refund>,
    left: u64,
}

/// The units of a body.
#[derive(Default)]
struct BodyUnits {
    units: u64,
    turn: Option<u64>,
    /// The reason why the body will end in an error.
    failed: Option<Unpaced>,
}

/// A body in line.
struct BodyInLine {
    body: u64,
    want: u64,
}

/// The reason why a body waited in vain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unpaced {
    LimiterFailed,
    QuotaClosed,
}

impl From<Unpaced> for BoxError {
    fn from(unpaced: Unpaced) -> Self {
        Self::from(match unpaced {
            Unpaced::LimiterFailed => "a body waited in vain for its pace: the limiter has failed",
            Unpaced::QuotaClosed => "a body waited in vain for its pace: the quota lets no byte pass",
        })
    }
}

impl Account {
    pub(crate) fn new(source: Box<dyn PaceSource>, timer: Arc<dyn Timer>) -> Arc<Self> {
        Arc::new_cyclic(|account| Self {
            source,
            timer,
            state: Mutex::new(AccountState::default()),
            waker: Arc::new(AccountWaker(Weak::clone(account))).into(),
        })
    }

    /// Makes the turnstile of one more body.
    pub(crate) fn enter(self: &Arc<Self>) -> Turnstile {
        let body = self.with(|state, _| {
            state.numbers += 1;
            state.numbers
        });
        Turnstile { account: Arc::clone(self), body, alarm: Alarm::default() }
    }

    /// Makes the account ask at once if it was denied, because the denial may be out of date. If a call under way is
    /// denied, that denial counts as out of date, too.
    pub(super) fn let_ask(&self) {
        let Some(now_us) = time_of(&*self.timer) else { return };
        self.with(|state, wakers| {
            state.is_outdated = true;
            if state.is_denied {
                state.slot_us = state.slot_us.min(now_us);
                state.wake_foremost(now_us, 0, wakers);
            }
        });
    }

    /// Returns how many bytes a body may send now, at most `want`, or when the body has to poll
    /// again.
    fn poll(&self, body: u64, want: u64, not_before_us: u64, waker: &Waker) -> UnitPoll {
        // No body waits if the timer cannot sleep.
        let Some(now_us) = time_of(&*self.timer) else { return UnitPoll::Ready(want) };
        // If the body has slept, the time is now at least the end of the sleep, even if the timer's clock is
        // wrong and shows less. With the time that the clock shows, the body could poll forever.
        let now_us = now_us.max(not_before_us);
        let mut has_polled = false;
        loop {
            let waker = waker.clone(); // before the lock, because that is the executor's code
            let step = self.with(|state, wakers| state.step(body, want, waker, now_us, has_polled, wakers));
            match step {
                AccountStep::Done(polled) => return polled,
                AccountStep::Ask { late_us, is_first, share, rest } => {
                    let asked = self.unlocked(|| {
                        let PaceTerms::Paced(whole) = self.source.terms() else { return None };
                        let pace = share.of(whole);
                        let gap_us = if is_first { pace.tick_us() / 2 } else { 0 };
                        let time_us = (pace.tick_us() - gap_us).saturating_add(late_us);
                        let units = rest.unwrap_or_else(|| pace.batch(time_us));
                        Some((self.source.ask(units), PaceQuestion { units, pace, whole, at_us: now_us, gap_us }))
                    });
                    match asked {
                        None => {
                            self.with(AccountState::release_line);
                            return UnitPoll::Ready(want);
                        }
                        Some((PaceReply::Now(answer), question)) => {
                            self.with(|state, wakers| state.apply(answer, question, now_us, body, wakers));
                        }
                        Some((PaceReply::Later(answer), question)) => self.poll_answer(answer, question, now_us, body),
                    }
                    has_polled = true;
                }
                AccountStep::PollAnswer { answer, question } => {
                    self.poll_answer(answer, question, now_us, body);
                    has_polled = true;
                }
            }
        }
    }

    /// Polls an answer that is under way.
    fn poll_answer(&self, mut answer: LaterPaceAnswer, question: PaceQuestion, now_us: u64, body: u64) {
        match self.unlocked(|| answer.as_mut().poll(&mut Context::from_waker(&self.waker))) {
            Poll::Ready(answer) => self.with(|state, wakers| state.apply(answer, question, now_us, body, wakers)),
            Poll::Pending => self.with(|state, wakers| {
                let is_woken = matches!(state.phase, AccountPhase::Busy { is_woken: true });
                state.phase = AccountPhase::Asked { answer, question };
                if is_woken {
                    state.wake_foremost(0, 0, wakers);
                }
            }),
        }
    }

    /// Runs the application's code without the lock. If that code panics, another body may go on.
    fn unlocked<R>(&self, run: impl FnOnce() -> R) -> R {
        let mut busy = BusyAccount(Some(self));
        let done = run();
        busy.0 = None;
        done
    }

    /// Changes the state, and wakes bodies after the lock is released.
    fn with<R>(&self, change: impl FnOnce(&mut AccountState, &mut Wakers) -> R) -> R {
        let mut wakers = Wakers::default();
        let changed = change(&mut lock(&self.state), &mut wakers);
        wakers.release();
        changed
    }
}

impl Drop for Account {
    /// Refunds the units that were taken but not sent. The limiter itself refunds the units of an answer under
    /// way.
    fn drop(&mut self) {
        let AccountState { batches, phase, .. } = std::mem::take(&mut *lock(&self.state));
        let mut left: Vec<UnitBatch> = batches.into();
        contained(|| {
            if let AccountPhase::Departs { batch, .. } = phase {
                left.push(batch);
            }
        });
        // Refunds the newest batch first, because a leaky queue refunds only its last slot.
        for UnitBatch { refund, left } in left.into_iter().rev() {
            if let Some(Refund { policy, key, receipt }) = refund.filter(|_| left > 0) {
                contained(|| self.source.refund(Refund::new(policy, key, receipt.split(left))));
            }
        }
    }
}

/// One body's access to an account. When this value is dropped, the units of the body go to the
/// other bodies.
pub(crate) struct Turnstile {
    account: Arc<Account>,
    body: u64,
    alarm: Alarm,
}

impl Turnstile {
    /// Returns how many bytes the body may send, at most `want`. These bytes belong to the body
    /// until it [sends](Self::spend) them.
    pub(crate) fn poll(&mut self, want: u64, cx: &mut Context<'_>) -> Poll<Result<u64, Unpaced>> {
        let mut not_before_us = 0;
        loop {
            let until_us = match self.account.poll(self.body, want, not_before_us, cx.waker()) {
                UnitPoll::Ready(units) => {
                    self.alarm.stop();
                    return Poll::Ready(Ok(units));
                }
                UnitPoll::Failed(failed) => return Poll::Ready(Err(failed)),
                UnitPoll::Until(until_us) => until_us,
            };
            ready!(self.alarm.poll(&*self.account.timer, until_us, cx));
            not_before_us = until_us;
        }
    }

    /// Records that the body sends this many of the bytes that it may send.
    pub(crate) fn spend(&self, units: u64) {
        self.account.with(|state, _| state.spend(self.body, units));
    }
}

impl Drop for Turnstile {
    fn drop(&mut self) {
        self.account.with(|state, wakers| state.leave(self.body, wakers));
    }
}

/// Allows other bodies to ask if the application's code has panicked.
struct BusyAccount<'a>(Option<&'a Account>);

impl Drop for BusyAccount<'_> {
    fn drop(&mut self) {
        if let Some(account) = self.0 {
            account.with(|state, wakers| {
                state.phase = AccountPhase::Idle;
                state.wake_foremost(0, 0, wakers);
            });
        }
    }
}

/// Wakes the foremost bodies when an answer has come.
struct AccountWaker(Weak<Account>);

impl Wake for AccountWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let Some(account) = self.0.upgrade() else { return };
        account.with(|state, wakers| match &mut state.phase {
            AccountPhase::Busy { is_woken } => *is_woken = true,
            _ => state.wake_foremost(0, 0, wakers),
        });
    }
}

/// The answer to a body's poll.
enum UnitPoll {
    /// This many bytes may be sent.
    Ready(u64),
    /// The body waits until this instant, or until it is woken.
    Until(u64),
    Failed(Unpaced),
}

/// The next step of a body.
enum AccountStep {
    Done(UnitPoll),
    /// The body asks the limiter for a batch, or for `rest` units if the last denial said that only
    /// these remain. `late_us` is the time since the batch's slot, at most `LATE_US`.
    Ask {
        late_us: u64,
        is_first: bool,
        share: PaceShare,
        rest: Option<u64>,
    },
    PollAnswer {
        answer: LaterPaceAnswer,
        question: PaceQuestion,
    },
}

impl AccountState {
    /// Returns the units that belong to no body.
    fn free(&self) -> u64 {
        self.batches.iter().map(|batch| batch.left).sum::<u64>().saturating_sub(self.assigned)
    }

    /// Decides the next step of a body. If `has_polled` is true, the body does not poll an answer
    /// again.
    fn step(
        &mut self,
        body: u64,
        want: u64,
        waker: Waker,
        now_us: u64,
        has_polled: bool,
        wakers: &mut Wakers,
    ) -> AccountStep {
        self.depart(now_us, body, wakers);
        let is_alone = self.line.is_empty();
        let free = self.free();
        let held = self.bodies.entry(body).or_default();
        if let Some(failed) = held.failed.take() {
            wakers.to_drop.push(waker);
            return AccountStep::Done(UnitPoll::Failed(failed));
        }
        if held.units == 0 && held.turn.is_none() {
            if is_alone && free > 0 {
                held.units = want.min(free);
                self.assigned += held.units;
            } else {
                // No unit is free while other bodies are in line, so the body joins the line.
                self.join(body, want, now_us);
            }
        }
        let held = self.bodies.entry(body).or_default();
        let Some(turn) = held.turn else {
            wakers.to_drop.push(waker);
            return AccountStep::Done(UnitPoll::Ready(held.units.min(want)));
        };
        if let Some(waiting) = self.line.get_mut(turn) {
            waiting.want = want;
        }
        // The line keeps the waker, so that the first event that concerns the body wakes it, even while the body asks
        // the limiter.
        self.line.sleep(turn, u64::MAX, waker, wakers);
        match std::mem::take(&mut self.phase) {
            AccountPhase::Idle if now_us >= self.slot_us => {
                self.phase = AccountPhase::Busy { is_woken: false };
                let late_us = (now_us - self.slot_us).min(LATE_US);
                let is_first = std::mem::take(&mut self.begins);
                self.is_outdated = false;
                return AccountStep::Ask { late_us, is_first, share: self.share, rest: self.rest.take() };
            }
            AccountPhase::Asked { answer, question } if !has_polled => {
                self.phase = AccountPhase::Busy { is_woken: false };
                return AccountStep::PollAnswer { answer, question };
            }
            phase => self.phase = phase,
        }
        let until_us = self.expected_us(turn, now_us);
        self.line.arm(turn, until_us);
        AccountStep::Done(UnitPoll::Until(until_us))
    }

    /// Hands out a batch whose departure has come.
    fn depart(&mut self, now_us: u64, asker: u64, wakers: &mut Wakers) {
        match std::mem::take(&mut self.phase) {
            AccountPhase::Departs { at_us, batch } if now_us >= at_us => {
                self.batches.push_back(batch);
                self.distribute(asker, wakers);
            }
            phase => self.phase = phase,
        }
    }

    /// Puts a body at the end of the line.
    fn join(&mut self, body: u64, want: u64, now_us: u64) {
        let is_first = self.line.is_empty() && matches!(self.phase, AccountPhase::Idle);
        // An account that was idle for longer than `IDLE_US` does not catch up on the idle time.
        if is_first && (self.batch == (0, 0) || now_us.saturating_sub(self.slot_us) > IDLE_US) {
            self.slot_us = self.slot_us.max(now_us);
            self.begins = true;
        }
        self.turns += 1;
        self.bodies.entry(body).or_default().turn = Some(self.turns);
        self.line.add(self.turns, BodyInLine { body, want });
    }

    /// Returns the instant at which a body in line expects its piece.
    fn expected_us(&self, turn: u64, now_us: u64) -> u64 {
        let (units, time_us) = self.batch;
        let begins_us = match &self.phase {
            AccountPhase::Idle => self.slot_us,
            AccountPhase::Departs { at_us, .. } => *at_us,
            // The answer wakes one body. If that body is not polled, another body polls the answer after `time_us` or
            // `BATCH_US`, whichever is longer.
            AccountPhase::Busy { .. } | AccountPhase::Asked { .. } => now_us.saturating_add(time_us.max(BATCH_US)),
        };
        let first = self.line.first().map_or(turn, |(first, _)| first);
        let batches = turn.saturating_sub(first) / (units / PIECE).max(1);
        begins_us.saturating_add(batches.saturating_mul(time_us)).max(now_us.saturating_add(1))
    }

    /// Applies an answer to the state.
    fn apply(&mut self, answer: PaceAnswer, question: PaceQuestion, now_us: u64, asker: u64, wakers: &mut Wakers) {
        let PaceQuestion { units, pace, whole, at_us, gap_us } = question;
        self.phase = AccountPhase::Idle;
        let is_given = matches!(answer, PaceAnswer::Taken { .. } | PaceAnswer::FailedOpen);
        self.begins = gap_us > 0 && !is_given;
        self.is_denied = matches!(answer, PaceAnswer::Denied { .. });
        match answer {
            PaceAnswer::Taken { refund, delay } => {
                let batch = UnitBatch { refund, left: units };
                let departs_us = now_us.saturating_add(micros_ceil(delay));
                // Asks for the batches of a queue before their departures, because the queue would otherwise be empty
                // for a moment, and that time would be lost.
                let latest_us = if delay.is_zero() { LATE_US } else { pace.tick_us() };
                let from_us = self.slot_us.max(departs_us.saturating_sub(latest_us));
                self.take_batch(from_us.saturating_add(gap_us), units, pace);
                self.share.grow();
                if delay.is_zero() {
                    self.batches.push_back(batch);
                } else {
                    self.phase = AccountPhase::Departs { at_us: departs_us, batch };
                }
            }
            PaceAnswer::FailedOpen => {
                self.batches.push_back(UnitBatch { refund: None, left: units });
                let from_us = self.slot_us.max(at_us.saturating_sub(LATE_US));
                self.take_batch(from_us.saturating_add(gap_us), units, pace);
            }
            PaceAnswer::Denied { .. } if self.is_outdated => self.slot_us = now_us,
            PaceAnswer::Denied { wait: Wait::Never, .. } => self.end_line(Unpaced::QuotaClosed, wakers),
            PaceAnswer::Denied { remaining, .. } if self.takes_the_rest(units, remaining) => {
                (self.rest, self.slot_us) = (Some(remaining), now_us);
            }
            PaceAnswer::Denied { wait, .. } => {
                (self.failures, self.has_asked_for_rest) = (0, false);
                // Asks for a smaller batch. Its units come back sooner, so another process does not always ask
                // before this process.
                self.share.shrink();
                let less = self.share.of(whole);
                let less = less.batch(less.tick_us()).min(units);
                let sooner_us = whole.time_us(units - less);
                let wait_us = wait.duration().map_or(BATCH_US, micros_ceil).min(RECHECK_US);
                self.slot_us = now_us.saturating_add(wait_us.saturating_sub(sooner_us).max(1));
            }
            PaceAnswer::FailedClosed => {
                self.slot_us = now_us.saturating_add(PAUSE_US << self.failures.min(FAILURES_MAX));
                self.failures += 1;
                if self.failures > FAILURES_MAX {
                    self.end_line(Unpaced::LimiterFailed, wakers);
                }
            }
        }
        self.distribute(asker, wakers);
    }

    /// Returns whether the account asks at once for the units that remain after a denial. The
    /// account does so at most once for each batch.
    fn takes_the_rest(&mut self, denied: u64, remaining: u64) -> bool {
        let is_worth_it = remaining < denied && remaining >= denied.div_ceil(2);
        is_worth_it && !std::mem::replace(&mut self.has_asked_for_rest, true)
    }

    fn take_batch(&mut self, from_us: u64, units: u64, pace: BytePace) {
        let time_us = pace.time_us(units);
        (self.failures, self.has_asked_for_rest) = (0, false);
        (self.batch, self.slot_us) = ((units, time_us), from_us.saturating_add(time_us));
    }

    /// Assigns free units to the bodies in line, in order, and wakes these bodies, except the body
    /// that is being polled.
    fn distribute(&mut self, polled: u64, wakers: &mut Wakers) {
        let mut free = self.free();
        let share = (free / (self.line.len() as u64).max(1)).max(PIECE); // no wider than 64 bits
        while free > 0 {
            let Some((turn, BodyInLine { body, want })) = self.line.first() else { break };
            let (body, want) = (*body, *want);
            if body == polled {
                self.line.remove(turn, wakers);
            } else {
                self.line.pop_first(wakers);
            }
            let units = want.min(share).min(free);
            let held = self.bodies.entry(body).or_default();
            (held.units, held.turn) = (units, None);
            self.assigned += units;
            free -= units;
        }
        let next_us = match &self.phase {
            AccountPhase::Idle => self.slot_us,
            AccountPhase::Departs { at_us, .. } => *at_us,
            AccountPhase::Busy { .. } | AccountPhase::Asked { .. } => return,
        };
        self.wake_foremost(next_us, polled, wakers);
    }

    /// Wakes the foremost bodies in line whose timers are later than this instant, except the body
    /// that is being polled.
    fn wake_foremost(&mut self, until_us: u64, polled: u64, wakers: &mut Wakers) {
        self.line.wake_foremost(|_, waiting| (waiting.body != polled).then_some(until_us), wakers);
    }

    /// Wakes all bodies in line, which do not have to wait any more.
    fn release_line(&mut self, wakers: &mut Wakers) {
        self.phase = AccountPhase::Idle;
        while let Some((_, waiting)) = self.line.pop_first(wakers) {
            self.bodies.remove(&waiting.body);
        }
    }

    /// Ends the bodies in line with an error.
    fn end_line(&mut self, reason: Unpaced, wakers: &mut Wakers) {
        while let Some((_, waiting)) = self.line.pop_first(wakers) {
            let held = self.bodies.entry(waiting.body).or_default();
            (held.turn, held.failed) = (None, Some(reason));
        }
    }

    fn spend(&mut self, body: u64, units: u64) {
        let Some(held) = self.bodies.get_mut(&body) else { return };
        let mut left = units.min(held.units);
        held.units -= left;
        self.assigned = self.assigned.saturating_sub(left);
        if held.units == 0 {
            self.bodies.remove(&body);
        }
        while let Some(batch) = self.batches.front_mut().filter(|_| left > 0) {
            let part = left.min(batch.left);
            (batch.left, left) = (batch.left - part, left - part);
            if batch.left == 0 {
                self.batches.pop_front();
            }
        }
    }

    fn leave(&mut self, body: u64, wakers: &mut Wakers) {
        let Some(held) = self.bodies.remove(&body) else { return };
        self.assigned = self.assigned.saturating_sub(held.units);
        held.turn.and_then(|turn| self.line.remove(turn, wakers));
        self.distribute(0, wakers);
    }
}
