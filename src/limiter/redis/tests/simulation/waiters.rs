//! The callers of a simulation that wait by `Ready`, and the laws of their lines.
//!
//! Each process has one `Ready`. Its limiter notes what is asked for and what is refunded, so that the laws hold for
//! what a line does, whatever the server says:
//!
//! * No caller asks while one waits that came to its line before it.
//! * Somebody asks as soon as the last answer allows it. A line that has lost a wake asks later.
//! * Every wait ends in time.
//! * What the limiter gave is in the end what callers got. The rest was refunded.

use std::collections::BTreeMap;
use std::future::{IntoFuture, poll_fn};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{sleep, timeout};

use super::caller::{Caller, HANG};
use super::chance::Chance;
use super::network::{Network, State};
use super::plan::{Asked, Event, Plan, Then};
use super::subject::Subject;
use crate::algorithm::properties::quotas::plain;
use crate::decision::Decision;
use crate::key::Key;
use crate::limiter::{BoxFuture, Charge, Effect, Limiter, LimiterHooks, Ready, Refund, Reply, UnsupportedQuota};
use crate::policy::Policy;
use crate::quota::{Algorithm, Quota};

/// The longest time for which a caller waits.
const MAX_WAIT: Duration = Duration::from_secs(2);

/// The time after which the first caller asks again, however long the wait is that the limiter named.
const RECHECK: Duration = Duration::from_secs(10);

/// The first caller asks within this time after it may: Tokio's timer has ticks of a millisecond.
const LATE: Duration = Duration::from_millis(3);

/// The line of a process and a key.
type Line = (usize, Bytes);

/// The callers that wait, in all processes.
#[derive(Default)]
pub(super) struct Waiters {
    /// The number of the caller that is polled now.
    polled: Option<u64>,
    arrived: u64,
    /// Those in a line, in the order in which they came.
    callers: BTreeMap<u64, CallerInLine>,
    /// When the first caller of a line that does not ask has to ask.
    due: BTreeMap<Line, Duration>,
    /// What the limiter gave to a line, less what callers got and what was refunded.
    held: BTreeMap<Line, i128>,
}

struct CallerInLine {
    line: Line,
    cost: u64,
    asks: bool,
}

impl State {
    /// Returns the number of a caller that comes to a line.
    fn waiter_comes(&mut self, line: &Line, cost: u64) -> u64 {
        self.check_line(line);
        let now = self.now();
        let waiters = &mut self.waiters;
        if !waiters.callers.values().any(|other| other.line == *line) {
            waiters.due.insert(line.clone(), now);
        }
        waiters.arrived += 1;
        let number = waiters.arrived;
        waiters.callers.insert(number, CallerInLine { line: line.clone(), cost, asks: false });
        number
    }

    /// Records that a caller asks.
    fn waiter_asks(&mut self, number: u64) {
        let Some(line) = self.waiters.callers.get(&number).map(|caller| caller.line.clone()) else {
            return self.ledger.problem(format!("waiter {number} asks, and is in no line"));
        };
        self.check_line(&line);
        self.log(format_args!("process {}: waiter {number} asks", line.0));
        let before = self.waiters.callers.range(..number);
        let earlier = before.filter(|(_, other)| other.line == line && !other.asks).map(|(other, _)| *other).next();
        let now = self.now();
        if let Some(earlier) = earlier.filter(|_| !self.was_paused(line.0, now.saturating_sub(MAX_WAIT), now)) {
            self.ledger.problem(format!("waiter {number} asks, and {earlier} waits, which came before it"));
        }
        self.waiters.callers.entry(number).and_modify(|caller| caller.asks = true);
    }

    /// Records the answer to a caller. `None` is one that it did not get, or an error.
    fn waiter_hears(&mut self, number: u64, answer: Option<&Decision>) {
        let now = self.now();
        let Some(caller) = self.waiters.callers.get_mut(&number) else { return };
        caller.asks = false;
        let line = caller.line.clone();
        let told = answer.and_then(|answer| Some((answer.is_allowed(), answer.charges().first()?)));
        self.log(format_args!("process {}: waiter {number} hears {told:?}", line.0));
        let waiters = &mut self.waiters;
        let wait = match told {
            None => Duration::ZERO,
            Some((false, told)) => told.wait().duration().unwrap_or(RECHECK),
            Some((true, told)) => {
                waiters.callers.remove(&number);
                *waiters.held.entry(line.clone()).or_default() += i128::from(told.taken());
                // A caller that costs more than what is left asks at once.
                let next = if told.remaining() == 0 { told.effective_window() } else { None };
                next.unwrap_or_default()
            }
        };
        waiters.due.insert(line, now + wait.min(RECHECK));
    }

    /// Records that a caller does not wait any more.
    fn waiter_ends(&mut self, number: u64) {
        let Some(line) = self.waiters.callers.get(&number).map(|caller| caller.line.clone()) else { return };
        self.check_line(&line);
        self.log(format_args!("process {}: waiter {number} leaves its line", line.0));
        let now = self.now();
        // It may have been the first one, and have left because it would have to wait too long.
        if self.waiters.callers.remove(&number).is_some_and(|caller| caller.asks) {
            self.waiters.due.insert(line, now);
        }
    }

    /// Checks that the first caller of a line does not ask too late, before anything happens in it.
    fn check_line(&mut self, line: &Line) {
        let now = self.now();
        let waiters = &mut self.waiters;
        let mut own = waiters.callers.iter().filter(|(_, caller)| caller.line == *line).peekable();
        let Some((first, _)) = own.peek() else { return };
        let first = **first;
        if own.any(|(_, caller)| caller.asks) {
            return;
        }
        let Some(due) = waiters.due.get_mut(line).filter(|due| now > **due + LATE) else { return };
        let due = std::mem::replace(due, Duration::MAX - LATE);
        if !self.was_paused(line.0, due, now) {
            self.ledger.problem(format!("waiter {first} does not ask at {now:?}, and could at {due:?}"));
        }
    }

    /// Records units that callers got or gave back, or that were refunded for them.
    fn waiters_give(&mut self, line: Line, units: i128) {
        *self.waiters.held.entry(line).or_default() -= units;
    }

    /// Checks what has to hold when no caller waits any more.
    pub(super) fn check_waiters(&mut self) {
        if let Some((number, caller)) = self.waiters.callers.first_key_value() {
            let words = format!("waiter {number} for {} is still in line", caller.cost);
            self.ledger.problem(words);
        }
        for ((process, key), units) in std::mem::take(&mut self.waiters.held) {
            if units != 0 {
                let what = if units > 0 { "kept" } else { "refunded too often" };
                let words = format!("process {process}: {units} units of {} are {what}", key.escape_ascii());
                self.ledger.problem(words);
            }
        }
    }
}

/// The limiter of a process, for its `Ready`. It notes what is asked for.
#[derive(Clone)]
pub(super) struct Noted<S> {
    limiter: S,
    process: usize,
    network: Network,
}

impl<S: Subject> Noted<S> {
    pub(super) fn ready(limiter: S, process: usize, network: &Network) -> Ready<Self> {
        Ready::new(Self { limiter, process, network: network.clone() }).max_wait(MAX_WAIT)
    }

    fn line(&self, policy: &Policy, key: &Key) -> Line {
        (self.process, self.limiter.stored(policy, key))
    }
}

/// A caller that asks. Dropped, it is one that never gets an answer.
struct AsksInLine(Network, Option<u64>);

impl Drop for AsksInLine {
    fn drop(&mut self) {
        if let Some(number) = self.1 {
            self.0.lock().waiter_hears(number, None);
        }
    }
}

impl<S: Subject> Limiter for Noted<S> {
    type Error = S::Error;
    type Future<T: Send + 'static> = BoxFuture<'static, Result<T, S::Error>>;

    fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, S::Error, Self::Future<Decision>> {
        let number = self.network.lock().waiters.polled;
        if let Some(number) = number {
            self.network.lock().waiter_asks(number);
        }
        let mut asks = AsksInLine(self.network.clone(), number);
        let answer = self.limiter.take(charges).into_future();
        Reply::Later(Box::pin(async move {
            let answer = answer.await;
            if let Some(number) = asks.1.take() {
                asks.0.lock().waiter_hears(number, answer.as_ref().ok());
            }
            answer
        }))
    }

    fn peek(&self, charges: &[Charge<'_>]) -> Reply<Decision, S::Error, Self::Future<Decision>> {
        Reply::Later(Box::pin(self.limiter.peek(charges).into_future()))
    }

    fn refund(&self, refunds: Vec<Refund>) -> Reply<(), S::Error, Self::Future<()>> {
        for refund in &refunds {
            let (line, units) = (self.line(&refund.policy, &refund.key), refund.receipt.units());
            self.network.lock().waiters_give(line, units.into());
        }
        Reply::Later(Box::pin(self.limiter.refund(refunds).into_future()))
    }

    fn reset(&self, policy: &Policy, key: &Key) -> Reply<(), S::Error, Self::Future<()>> {
        Reply::Later(Box::pin(self.limiter.reset(policy, key).into_future()))
    }

    fn supports(&self, quota: &Quota) -> Result<(), UnsupportedQuota> {
        self.limiter.supports(quota)
    }

    fn hooks(&self) -> &dyn LimiterHooks {
        self.limiter.hooks()
    }

    fn is_overload(&self, error: &S::Error) -> bool {
        self.limiter.is_overload(error)
    }
}

/// A caller in a line, until it does not wait any more.
struct Waits(Network, u64);

impl Drop for Waits {
    fn drop(&mut self) {
        self.0.lock().waiter_ends(self.1);
    }
}

impl<S: Subject> Caller<S> {
    /// Waits until the limiter admits the caller's only charge.
    pub(super) async fn wait(self, ready: Ready<Noted<S>>, then: Then) {
        self.network.goes_on(self.process).await;
        let (policy, key, cost, _) = &self.charges[0];
        let line = (self.process, self.limiter.stored(policy, key));
        let (sent, number) = {
            let mut state = self.network.lock();
            (state.now(), state.waiter_comes(&line, *cost))
        };
        let patience = match then {
            Then::Cancel { after_ms } => Duration::from_millis(after_ms),
            Then::Keep | Then::Refund { .. } => HANG,
        };
        let taken = {
            let _waits = Waits(self.network.clone(), number);
            let mut taking = pin!(ready.take_one(policy, key, *cost));
            let taking = poll_fn(|cx| self.poll_as(number, taking.as_mut(), cx));
            self.answered(timeout(patience, taking)).await
        };
        let Ok(taken) = taken else {
            self.record_unknown();
            let mut state = self.network.lock();
            state.log(format_args!("process {}: waiter {number} gives up", self.process));
            if matches!(then, Then::Keep | Then::Refund { .. }) {
                state.ledger.problem(format!("waiter {number} waits for ever"));
            }
            return;
        };
        let answer = taken.map(|decision| {
            self.network.lock().waiters_give(line.clone(), decision.taken().into());
            Decision::one(true, decision)
        });
        // A caller that moves up in a queue departs in a slot that was another's.
        let since = if policy.quota().algorithm() == Algorithm::LeakyQueue { Duration::ZERO } else { sent };
        let receipts = self.record(sent, MAX_WAIT + self.deadline, since, answer);
        let Then::Refund { after_ms } = then else { return };
        sleep(Duration::from_millis(after_ms)).await;
        self.network.goes_on(self.process).await;
        for receipt in receipts {
            let Refund { policy, key, receipt } = self.record_refund(receipt);
            self.network.lock().waiters_give(line.clone(), -i128::from(receipt.units()));
            ready.refund(&policy, &key, receipt);
        }
        // Whether it fails is not known.
        self.record_unknown();
    }

    /// Polls a caller. What its limiter is asked for meanwhile is asked for by it.
    fn poll_as<F: Future>(&self, number: u64, taking: Pin<&mut F>, cx: &mut Context<'_>) -> Poll<F::Output> {
        self.network.lock().waiters.polled = Some(number);
        let polled = taking.poll(cx);
        self.network.lock().waiters.polled = None;
        polled
    }
}

impl Plan {
    /// Returns the story of callers that wait, on Redis.
    pub(super) fn of_waiters(seed: u64) -> Self {
        let mut chance = Chance::new(seed);
        let mut plan = Self::empty(&mut chance);
        plan.add_waiters(&mut chance);
        if chance.permille(800) {
            plan.add_faults(&mut chance);
        }
        plan.finished()
    }

    /// Returns the story of callers that wait, over a store that compares and swaps.
    #[cfg(feature = "store")]
    pub(super) fn of_waiters_over_a_store(seed: u64) -> Self {
        let mut plan = Self::of_waiters(seed);
        plan.deadline *= 4; // each conflict is a round trip more
        plan.events.retain(|(_, event)| !matches!(event, Event::Replicate | Event::FailOver));
        plan
    }

    /// Adds callers that wait, and some that do not and take what others wait for.
    fn add_waiters(&mut self, chance: &mut Chance) {
        let (limit, period) =
            (chance.within(1..=12), Duration::from_micros(*chance.of(&[100_000, 333_333, 1_000_000])));
        let quota =
            plain(*chance.of(&Algorithm::rates()), limit, period, Duration::ZERO).expect("the quota is possible");
        let quota = if chance.permille(300) { quota.burst(chance.within(1..=3)).unwrap_or(quota) } else { quota };
        self.add_rule(0, vec![quota]);
        let (mut at, impatient, rivals) = (0, chance.below(400), *chance.of(&[0, 0, 100, 400]));
        for _ in 0..chance.within(20..=80) {
            // Some come together.
            at += if chance.permille(500) { 0 } else { chance.below(60) };
            let (process, key) = (self.any_process(chance), self.any_key(chance));
            let cost = (*chance.of(&[1, 1, 1, 2, 3])).min(quota.capacity());
            let then = match chance.below(1_000) {
                dice if dice < impatient => Then::Cancel { after_ms: chance.below(500) },
                dice if dice < impatient + 100 => Then::Refund { after_ms: chance.below(200) },
                _ => Then::Keep,
            };
            let event = if chance.permille(rivals) {
                let charges = vec![Asked { rule: 0, cost, effect: Effect::Enforce }];
                Event::Take { process, key, charges, then: Then::Keep }
            } else {
                Event::Wait { process, key, cost, then }
            };
            self.events.push((at, event));
        }
    }
}
