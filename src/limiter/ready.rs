//! Waiting until a limiter admits a charge, for callers that are not requests of a layer.

use std::error::Error;
use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use smallvec::SmallVec;

use super::ask_lines::{AskLines, AskTurn};
use super::departures::{DepartureKey, DepartureLines, DepartureTurns};
use super::effect::binds;
use super::line_turn::LineTurn;
use super::place_lines::{BoundedTurn, LineStep};
use super::{BoxFuture, Charge, Limiter, Place, Refund, Reply};
use crate::base::sync::contained;
use crate::base::time::{Humane, micros_ceil, micros_floor};
use crate::base::wait::Wait;
use crate::clock::{Timer, default_timer, time_of};
use crate::decision::{ChargeDecision, Decision, Receipt};
use crate::error::{Source, debug_as_text};
use crate::key::Key;
use crate::policy::Policy;

/// The longest wait by default.
const MAX_WAIT: Duration = Duration::from_secs(60);

/// The maximum number of callers that wait, by default.
const MAX_WAITING: usize = 1_000;

/// The first and the longest wait of a caller if the limiter does not know when a charge would pass.
const UNKNOWN_WAIT: Duration = Duration::from_millis(20);
const UNKNOWN_WAIT_MAX: Duration = Duration::from_millis(400);

/// Lets callers wait until a limiter admits them: jobs of a worker, messages of a socket, chunks of
/// a download, calls of a client.
///
/// ```
/// use tower_ratelimit::{Key, MemoryLimiter, Policy, Quota, limiter::Ready};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let clock = tower_ratelimit::clock::TokioClock::new();
/// # let limiter = MemoryLimiter::builder().clock(clock).build()?;
/// # let _ = stringify! {
/// let limiter = MemoryLimiter::new();
/// # };
/// let ready = Ready::new(limiter); // once; clones share the lines
/// let mails = Policy::new("mails", Quota::per_second(5).burst(1)?)?;
/// let tenant = Key::of("acme").ok_or("a tenant has a name")?;
/// # let began = tokio::time::Instant::now();
/// for _ in 0..3 {
///     ready.take_one(&mails, &tenant, 1).await?;
///     println!("now it is this mail's turn");
/// }
/// # assert_eq!(began.elapsed().as_millis(), 400);
/// # Ok(()) }
/// ```
///
/// * **Any limiter**, and any quota. A [leaky queue](crate::Quota::leaky_queue) names the departure
///   in one call. With other quotas the first caller in line asks again at the instant that the
///   limiter named.
/// * **In order.** Callers of one policy and key are admitted in the order in which they arrived. The order
///   holds among the callers of one `Ready` and its clones. If no caller waits, several callers may ask at the
///   same time. A store decides these in the order in which it gets their calls.
/// * **Bounded.** At most [`max_waiting`](Self::max_waiting) callers wait, and each caller waits for at most
///   [`max_wait`](Self::max_wait). A caller that would have to wait longer gets an error at once.
/// * **Dropped at any point**, a future refunds what it took, and the next caller moves up. A future that is
///   neither dropped nor polled delays the callers behind it once, by at most 50 milliseconds. If the first
///   eight futures in line are not polled, the delay is at most ten seconds.
/// * **A failing limiter** ends the waits of its callers with [`NotReadyKind::Limiter`].
///
/// Tokio's timer wakes a caller up to a millisecond late. So a quota that admits one unit at a time admits at
/// most about 1,000 units a second for a key. Give such a quota a larger burst, take several units at once,
/// or use a leaky queue. With a store, the callers of a key get the whole rate if the burst is no smaller than the
/// number of units that come back during two round trips.
///
/// The first caller in line asks again after ten seconds at the latest, in case the key was reset or the
/// quota was raised.
///
/// A quota that [counts denied](crate::Quota::count_denied) requests counts every call in which a caller asks the
/// limiter.
#[derive(Clone)]
pub struct Ready<L> {
    limiter: L,
    timer: Option<Arc<dyn Timer>>,
    lines: Arc<ReadyLines>,
    max_wait: Duration,
    max_waiting: usize,
}

#[derive(Default)]
struct ReadyLines {
    asks: Arc<AskLines>,
    departures: DepartureLines,
    waiting: AtomicUsize,
}

impl<L: Limiter> Ready<L> {
    /// Makes empty lines in front of a limiter. Clones share the lines.
    ///
    /// With the feature `tokio`, callers wait on a `TokioTimer`. Without that feature, set a
    /// [timer](Self::timer).
    #[must_use]
    pub fn new(limiter: L) -> Self {
        let (timer, lines) = (default_timer(), Arc::default());
        Self { limiter, timer, lines, max_wait: MAX_WAIT, max_waiting: MAX_WAITING }
    }

    /// Sets the timer with which callers wait. Set the timer before you clone this value, because this method gives
    /// the value new lines.
    #[must_use]
    pub fn timer(self, timer: impl Timer + 'static) -> Self {
        Self { timer: Some(Arc::new(timer)), lines: Arc::default(), ..self }
    }

    /// Sets the longest time for which a caller waits. The default is 60 seconds. Each clone may have a
    /// different limit. For jobs that must not be lost, pass [`Duration::MAX`], and [`usize::MAX`] to
    /// [`max_waiting`](Self::max_waiting).
    ///
    /// If a concurrency limit has a [`max_wait`](crate::Quota::max_wait), a caller waits for its units at
    /// most that long.
    #[must_use]
    pub fn max_wait(self, max: Duration) -> Self {
        Self { max_wait: max, ..self }
    }

    /// Sets the maximum number of callers that wait at a time, over all keys. The default is 1,000. Clones
    /// share the count, but each clone may have a different maximum.
    #[must_use]
    pub fn max_waiting(self, max: usize) -> Self {
        Self { max_waiting: max, ..self }
    }

    /// Returns the limiter.
    #[must_use]
    pub fn limiter(&self) -> &L {
        &self.limiter
    }

    /// Returns the number of callers that wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.lines.waiting.load(Ordering::Relaxed)
    }

    /// Takes `cost` units from what `policy` allows `key`, and waits until they are admitted.
    ///
    /// # Errors
    /// Returns an error if the wait would be too long, too many callers wait, the cost is above the capacity,
    /// or the limiter fails. In these cases nothing is taken.
    #[inline]
    pub async fn take_one(&self, policy: &Policy, key: &Key, cost: u64) -> Result<ChargeDecision, NotReady> {
        let answered = match self.lines.asks.has_line(policy, key) {
            false => self.limiter.try_take_one(policy, key, cost),
            true => None,
        };
        match answered {
            Some(decision) if decision.is_allowed() && !decision.has_delay() => Ok(decision),
            answered => self.wait_one(policy, key, cost, answered).await,
        }
    }

    /// Takes one charge, like [`wait`](Self::wait). The future is boxed, so that the future of a caller that
    /// does not wait is small.
    #[cold]
    #[inline(never)]
    fn wait_one<'a>(
        &'a self,
        policy: &'a Policy,
        key: &'a Key,
        cost: u64,
        answered: Option<ChargeDecision>,
    ) -> BoxFuture<'a, Result<ChargeDecision, NotReady>> {
        Box::pin(async move {
            let answer = answered.map(|decision| Decision::one(decision.is_allowed(), decision));
            let decision = self.wait(&[Charge::new(policy, key).cost(cost)], answer).await?.into_charges().next();
            debug_assert!(decision.is_some(), "one charge has one decision");
            Ok(decision.unwrap_or(ChargeDecision::blank()))
        })
    }

    /// Takes all charges, and waits until they are admitted together. The caller stands in the line
    /// of the first charge.
    ///
    /// # Errors
    /// Returns an error in the same cases as [`take_one`](Self::take_one).
    pub async fn take(&self, charges: &[Charge<'_>]) -> Result<Decision, NotReady> {
        Box::pin(self.wait(charges, None)).await
    }

    /// Takes `cost` units of a [concurrency limit](crate::Quota::concurrent), waits until they are
    /// free, and holds them until the [`Place`] is dropped.
    ///
    /// With a limiter that has [lines](crate::limiter::LimiterHooks::place_lines) for such units, the caller waits in
    /// the same line as the requests of layers. With other limiters the caller asks again after 20 milliseconds, and
    /// then more and more rarely, up to every 400 milliseconds.
    ///
    /// ```
    /// use tower_ratelimit::{Key, MemoryLimiter, Policy, Quota, limiter::Ready};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let ready = Ready::new(MemoryLimiter::new());
    /// let renders = Policy::new("renders", Quota::concurrent(4))?;
    /// let place = ready.hold(&renders, &Key::of("alice").unwrap(), 1).await?;
    /// // Render.
    /// drop(place);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Returns an error in the same cases as [`take_one`](Self::take_one). In a line of the limiter, the wait ends if
    /// the first or the last call fails, or if six calls in a row fail.
    pub async fn hold(&self, policy: &Policy, key: &Key, cost: u64) -> Result<Place, NotReady>
    where
        L: Clone,
    {
        let mut decision = self.take_one(policy, key, cost).await?;
        let refund = |receipt| Refund::new(policy.clone(), key.clone(), receipt);
        Ok(Place::new(self.limiter.clone(), decision.take_receipt().map(refund)))
    }

    /// Refunds what a receipt still holds of a charge to (policy, key), and lets the first caller in line ask
    /// at once. A refund by the limiter's own method does not wake that caller.
    pub fn refund(&self, policy: &Policy, key: &Key, receipt: Receipt) {
        if let Err(receipt) = self.limiter.try_refund_one(policy, key, receipt) {
            // A limiter sends the refund before `refund` returns, so the reply can be dropped.
            drop(self.limiter.refund(vec![Refund::new(policy.clone(), key.clone(), receipt)]));
        }
        if let Some(timer) = &self.timer {
            self.lines.asks.let_first_ask(policy, key, &**timer);
        }
    }

    /// Takes the charges as soon as they are admitted. `answer` is the limiter's answer, if the caller has
    /// asked it already.
    async fn wait(&self, charges: &[Charge<'_>], mut answer: Option<Decision>) -> Result<Decision, NotReady> {
        let Some(first) = charges.first() else {
            return self.limiter.take(charges).await.map_err(|error| NotReady::limiter("", error));
        };
        let mut caller = ReadyCaller {
            ready: self,
            first,
            turn: None,
            counted: None,
            denied: None,
            until: None,
            unknown_waits: 0,
            failures: 0,
        };
        if answer.is_none() && self.lines.asks.has_line(first.policy, first.key) {
            caller.join(Wait::None)?;
        }
        loop {
            let step = match &caller.turn {
                Some(_) if answer.is_none() => poll_fn(|cx| caller.poll_turn(cx)).await?,
                _ => LineStep::Asks,
            };
            if step == LineStep::GivesUp && !caller.asks_at_last() {
                return Err(caller.too_long(Wait::Unknown));
            }
            let answered = match answer.take() {
                Some(decision) => Ok(decision),
                None => caller.ask(charges).await,
            };
            match answered {
                Ok(decision) if decision.is_allowed() => {
                    let held = HeldDecision {
                        ready: self,
                        charges,
                        decision: Some(decision),
                        turns: DepartureTurns::default(),
                    };
                    held.decision.iter().for_each(|decision| caller.leave_admitted(decision));
                    return held.depart(caller).await;
                }
                Ok(decision) => caller.note_denied(charges, &decision, step)?,
                Err(error) => caller.note_failed(error, step)?,
            }
        }
    }

    fn refund_all(&self, charge: &Charge<'_>, receipts: impl IntoIterator<Item = Receipt>) {
        let refund = |receipt| Refund::new(charge.policy.clone(), charge.key.clone(), receipt);
        let refunds: Vec<Refund> = receipts.into_iter().map(refund).collect();
        if !refunds.is_empty() {
            contained(|| drop(self.limiter.refund(refunds)));
        }
    }
}

impl<L> fmt::Debug for Ready<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ready")
            .field("waiting", &self.lines.waiting.load(Ordering::Relaxed))
            .field("max_wait", &self.max_wait)
            .field("max_waiting", &self.max_waiting)
            .finish_non_exhaustive()
    }
}

/// Counts one caller as waiting, until this value is dropped.
struct CountedCaller(Arc<ReadyLines>);

impl Drop for CountedCaller {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A caller that is not admitted yet.
struct ReadyCaller<'a, L> {
    ready: &'a Ready<L>,
    first: &'a Charge<'a>,
    /// The caller's turn in the line of its first charge.
    turn: Option<LineTurn>,
    counted: Option<CountedCaller>,
    /// The last decision about the charge that denied the caller.
    denied: Option<ChargeDecision>,
    /// The caller's deadline on the timer, if the caller waits.
    until: Option<Duration>,
    /// The number of times that the limiter denied the caller without naming a wait.
    unknown_waits: u32,
    /// The number of calls in a row that have failed.
    failures: u32,
}

impl<L: Limiter> ReadyCaller<'_, L> {
    async fn ask(&mut self, charges: &[Charge<'_>]) -> Result<Decision, L::Error> {
        let reply = match &self.turn {
            Some(LineTurn::Places(turn)) => {
                let number = turn.number();
                let arrived: SmallVec<[Charge<'_>; 4]> = charges.iter().map(|charge| charge.arrived(number)).collect();
                self.ready.limiter.take(&arrived)
            }
            _ => self.ready.limiter.take(charges),
        };
        if matches!(reply, Reply::Later(_)) {
            match &self.turn {
                Some(turn) => turn.note_sent(),
                None => self.begin_turn(),
            }
        }
        reply.await
    }

    /// Puts a caller whose call is under way into its line. A caller for units of a concurrency limit joins a line
    /// only after a denial.
    fn begin_turn(&mut self) {
        if self.first.policy.limits_in_flight() {
            return;
        }
        if let Some((timer, until)) = self.deadline() {
            let Charge { policy, key, cost, .. } = *self.first;
            let turn = AskTurn::ask(&self.ready.lines.asks, &timer, (policy, key, cost), latest_us(until));
            self.turn = Some(LineTurn::Asks(turn));
        }
    }

    /// Polls the caller's turn. A caller that has to wait is counted as waiting.
    fn poll_turn(&mut self, cx: &mut Context<'_>) -> Poll<Result<LineStep, NotReady>> {
        let Some(turn) = &mut self.turn else { return Poll::Ready(Ok(LineStep::Asks)) };
        match turn.poll(cx) {
            Poll::Ready(step) => Poll::Ready(Ok(step)),
            Poll::Pending if self.counted.is_some() => Poll::Pending,
            Poll::Pending => self.count(Duration::ZERO).map_or_else(|error| Poll::Ready(Err(error)), |_| Poll::Pending),
        }
    }

    /// Returns the timer, if it can sleep, and the instant until which the caller may wait.
    fn deadline(&mut self) -> Option<(Arc<dyn Timer>, Duration)> {
        let ready = self.ready;
        let timer = ready.timer.as_ref().filter(|timer| time_of(&***timer).is_some())?;
        let until = *self.until.get_or_insert_with(|| timer.now().saturating_add(ready.max_wait));
        Some((Arc::clone(timer), until))
    }

    /// Counts the caller as waiting. `delay` is the least time for which the caller has to wait. Returns the
    /// timer and the deadline.
    fn count(&mut self, delay: Duration) -> Result<(Arc<dyn Timer>, Duration), NotReady> {
        let (ready, policy) = (self.ready, self.first.policy);
        let (timer, until) = self.deadline().ok_or_else(|| NotReady::no_timer(policy))?;
        if timer.now().saturating_add(delay) > until {
            return Err(self.too_long(Wait::After(delay)));
        }
        if self.counted.is_none() {
            let (lines, max) = (&ready.lines, ready.max_waiting);
            let one_more = |waiting: usize| (waiting < max).then_some(waiting + 1);
            let counted = lines.waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more);
            counted.map_err(|_| NotReady::too_many(policy, max, delay))?;
            self.counted = Some(CountedCaller(Arc::clone(lines)));
        }
        Ok((timer, until))
    }

    /// Joins a line. If the limiter denied the caller, `wait` is the wait that it named: [`Wait::Unknown`] for units
    /// of a concurrency limit.
    fn join(&mut self, wait: Wait) -> Result<(), NotReady> {
        let (ready, Charge { policy, key, cost, .. }) = (self.ready, *self.first);
        let lines = ready.limiter.hooks().place_lines().filter(|_| policy.limits_in_flight() && wait == Wait::Unknown);
        if let Some(lines) = lines {
            let (timer, until) = self.count(Duration::ZERO)?;
            let now = timer.now();
            let own = Some(policy.quota().wait_in_line()).filter(|own| !own.is_zero());
            let until = own.map_or(until, |own| until.min(now.saturating_add(own)));
            let turn = BoundedTurn::join(lines, (policy, key), None, timer, until);
            self.turn = Some(LineTurn::Places(turn));
            return Ok(());
        }
        let (timer, until) = match wait {
            // The limiter has not yet denied this caller, so possibly this caller need not wait.
            Wait::None => self.deadline().ok_or_else(|| NotReady::no_timer(policy))?,
            Wait::After(_) | Wait::Unknown | Wait::Never => self.count(wait.duration().unwrap_or_default())?,
        };
        let turn = AskTurn::join(&ready.lines.asks, &timer, (policy, key, cost), latest_us(until), None);
        self.turn = Some(LineTurn::Asks(turn));
        Ok(())
    }

    /// Returns whether a caller whose longest wait is over asks the limiter once more. Units of a concurrency limit
    /// may have come free for that caller.
    fn asks_at_last(&self) -> bool {
        matches!(self.turn, Some(LineTurn::Places(_)))
    }

    fn note_denied(&mut self, charges: &[Charge<'_>], decision: &Decision, step: LineStep) -> Result<(), NotReady> {
        self.failures = 0;
        let denied = decision.charges().iter().enumerate().filter(|(at, own)| !own.is_allowed() && binds(charges, *at));
        let longest = denied.max_by_key(|(_, own)| own.wait());
        let wait = longest.map_or(Wait::Unknown, |(_, own)| own.wait());
        self.denied = longest.map(|(_, own)| own.clone()); // a clone has no receipt
        if wait == Wait::Never {
            let charge = longest.and_then(|(at, _)| charges.get(at)).unwrap_or(self.first);
            return Err(self.with_decision(NotReady::never(charge)));
        }
        if step == LineStep::GivesUp {
            return Err(self.too_long(wait));
        }
        match self.turn.take() {
            Some(LineTurn::Asks(turn)) => {
                let wait = wait.duration().unwrap_or_else(|| self.unknown_wait());
                if wait > turn.left() {
                    return Err(self.too_long(Wait::After(wait)));
                }
                turn.note_denied(wait);
                self.turn = Some(LineTurn::Asks(turn));
            }
            Some(turn @ LineTurn::Places(_)) if wait == Wait::Unknown => self.turn = Some(turn),
            // A caller without a turn joins a line. A caller in a line for places gets a known wait only if another
            // charge of its set is denied. The caller then changes to a line in which it asks again after that wait.
            Some(LineTurn::Places(_)) | None => self.join(wait)?,
        }
        Ok(())
    }

    /// Returns the time after which the caller asks again, for a limiter that does not know when the charge
    /// would pass.
    fn unknown_wait(&mut self) -> Duration {
        let wait = UNKNOWN_WAIT.saturating_mul(1 << self.unknown_waits.min(8)).min(UNKNOWN_WAIT_MAX);
        self.unknown_waits = self.unknown_waits.saturating_add(1);
        wait
    }

    /// Notes that the limiter failed. A caller in a line that polls its limiter stays there, unless
    /// too many calls in a row have failed.
    fn note_failed(&mut self, error: L::Error, step: LineStep) -> Result<(), NotReady> {
        self.failures += 1;
        match self.turn.take() {
            Some(turn) if step == LineStep::Asks && turn.outlasts(self.failures) => {
                self.turn = Some(turn);
                return Ok(());
            }
            Some(LineTurn::Asks(turn)) if !self.ready.limiter.is_overload(&error) => turn.leave_failed(),
            _ => {}
        }
        Err(NotReady::limiter(self.first.policy.name(), error))
    }

    /// Leaves the line, because the limiter admitted the caller.
    fn leave_admitted(&mut self, decision: &Decision) {
        if let Some(turn) = self.turn.take() {
            turn.leave_admitted(decision.charges().iter(), Some(self.first.policy.quota().limit()));
        }
    }

    fn too_long(&self, wait: Wait) -> NotReady {
        self.with_decision(NotReady::too_long(self.first.policy, wait, self.ready.max_wait))
    }

    fn with_decision(&self, error: NotReady) -> NotReady {
        NotReady { denied: self.denied.clone().map(Box::new), ..error }
    }
}

/// Returns a deadline in microseconds, which is below `u64::MAX`.
fn latest_us(until: Duration) -> u64 {
    micros_floor(until).min(u64::MAX - 1)
}

/// The decision that admitted a caller, until the caller departs. If this value is dropped before the departure, the
/// units are refunded, and the callers behind move up.
struct HeldDecision<'a, L: Limiter> {
    ready: &'a Ready<L>,
    charges: &'a [Charge<'a>],
    decision: Option<Decision>,
    turns: DepartureTurns,
}

impl<L: Limiter> HeldDecision<'_, L> {
    /// Waits for the departure from each queue.
    async fn depart(mut self, mut caller: ReadyCaller<'_, L>) -> Result<Decision, NotReady> {
        let delays = self.decision.iter().flat_map(|decision| decision.charges().iter().map(ChargeDecision::delay));
        let longest = delays.max().unwrap_or_default();
        if !longest.is_zero() {
            let timer = match caller.count(longest) {
                Ok((timer, _)) => timer,
                Err(error) => {
                    self.decline();
                    return Err(error);
                }
            };
            self.join(time_of(&*timer).unwrap_or(0));
            poll_fn(|cx| self.poll(&*timer, cx)).await;
        }
        let decision = self.decision.take();
        debug_assert!(decision.is_some(), "the decision is held until the caller is admitted");
        Ok(decision.unwrap_or_else(|| Decision::new(false, [])))
    }

    /// Joins the line of each queue.
    fn join(&mut self, now_us: u64) {
        let (ready, charges) = (self.ready, self.charges);
        let decisions = self.decision.iter_mut().flat_map(|decision| decision.charges_mut());
        for (at, (own, charge)) in decisions.zip(charges).enumerate().filter(|(_, (own, _))| own.has_delay()) {
            let departs_us = now_us.saturating_add(micros_ceil(own.delay()));
            self.turns.join(&ready.lines.departures, at, departure_key(charge), departs_us, own.take_receipt());
        }
    }

    /// Is ready when all departures have come.
    fn poll(&mut self, timer: &dyn Timer, cx: &mut Context<'_>) -> Poll<()> {
        let (lines, decision) = (&self.ready.lines.departures, &mut self.decision);
        let depart = |at, receipt| {
            if let Some(own) = decision.as_mut().and_then(|decision| decision.charge_mut(at)) {
                own.put_receipt(receipt);
            }
        };
        self.turns.poll(lines, timer, depart, cx)
    }

    /// Refunds what a caller took from queues, if the caller does not wait for the departures. The lines make these
    /// refunds in the order that the queues need.
    fn decline(&mut self) {
        let (ready, charges) = (self.ready, self.charges);
        let now_us = ready.timer.as_ref().and_then(|timer| time_of(&**timer)).unwrap_or(0);
        for (own, charge) in self.decision.iter_mut().flat_map(|decision| decision.charges_mut()).zip(charges) {
            if own.has_delay() {
                let departs_us = now_us.saturating_add(micros_ceil(own.delay()));
                let refund = |receipts| ready.refund_all(charge, receipts);
                ready.lines.departures.decline(&departure_key(charge), departs_us, own.take_receipt(), refund);
            }
        }
    }
}

impl<L: Limiter> Drop for HeldDecision<'_, L> {
    fn drop(&mut self) {
        let Some(mut decision) = self.decision.take() else { return };
        let ready = self.ready;
        if let Some(timer) = &ready.timer {
            self.turns.leave(&ready.lines.departures, &**timer, |at, receipts| {
                if let Some(charge) = self.charges.get(at) {
                    ready.refund_all(charge, receipts);
                }
            });
        }
        for (own, charge) in decision.charges_mut().iter_mut().zip(self.charges) {
            ready.refund_all(charge, own.take_receipt());
            if let Some(timer) = &ready.timer {
                contained(|| ready.lines.asks.let_first_ask(charge.policy, charge.key, &**timer));
            }
        }
    }
}

fn departure_key(charge: &Charge<'_>) -> DepartureKey {
    DepartureKey { policy: charge.policy.fingerprint(), key: charge.key.clone(), cost: charge.cost }
}

/// The error of a caller that was not admitted. Nothing is taken for that caller.
pub struct NotReady {
    kind: NotReadyKind,
    wait: Wait,
    message: Box<str>,
    /// The decision is boxed, so that results stay small.
    denied: Option<Box<ChargeDecision>>,
    source: Option<Source>,
}

/// The kind of a [`NotReady`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NotReadyKind {
    /// The caller would have to wait for longer than [`max_wait`](Ready::max_wait), or has waited
    /// for that long.
    TooLong,
    /// [`max_waiting`](Ready::max_waiting) callers wait already.
    TooManyWaiting,
    /// The limiter never admits the charge, because it costs more than the capacity.
    Never,
    /// The limiter failed. The limiter's error is the source.
    Limiter,
    /// There is no timer that can sleep: set a [timer](Ready::timer), or call within a Tokio runtime.
    NoTimer,
}

impl NotReady {
    /// Returns the kind of the error.
    #[must_use]
    pub fn kind(&self) -> NotReadyKind {
        self.kind
    }

    /// Returns the wait that the limiter named in its last answer, if that answer named a wait.
    #[must_use]
    pub fn wait(&self) -> Wait {
        self.wait
    }

    /// Returns the limiter's last decision about the charge that denied the caller. Returns `None` if the
    /// caller did not ask the limiter, or the limiter failed.
    #[must_use]
    pub fn decision(&self) -> Option<&ChargeDecision> {
        self.denied.as_deref()
    }

    fn new(kind: NotReadyKind, wait: Wait, message: String) -> Self {
        Self { kind, wait, message: message.into(), denied: None, source: None }
    }

    fn too_long(policy: &Policy, wait: Wait, max: Duration) -> Self {
        let (name, max) = (policy.name(), Humane(max));
        let message = match wait {
            Wait::After(wait) => {
                format!("{name:?} would admit the caller only in {}, and `max_wait` is {max}", Humane(wait))
            }
            _ => format!("{name:?} did not admit the caller in time, and `max_wait` is {max}"),
        };
        Self::new(NotReadyKind::TooLong, wait, message)
    }

    fn too_many(policy: &Policy, max: usize, wait: Duration) -> Self {
        let message = format!(
            "the caller cannot wait for {:?}: {max} callers wait already, the most that `max_waiting` allows",
            policy.name()
        );
        let wait = if wait.is_zero() { Wait::Unknown } else { Wait::After(wait) };
        Self::new(NotReadyKind::TooManyWaiting, wait, message)
    }

    fn never(charge: &Charge<'_>) -> Self {
        let message = format!(
            "{:?} never admits the caller: the cost is {}, and the capacity is {}",
            charge.policy.name(),
            charge.cost,
            charge.policy.quota().capacity()
        );
        Self::new(NotReadyKind::Never, Wait::Never, message)
    }

    fn no_timer(policy: &Policy) -> Self {
        let message = format!(
            "the caller would have to wait for {:?}, and there is no timer that can sleep: set a timer with \
             `Ready::timer`, or call within a Tokio runtime",
            policy.name()
        );
        Self::new(NotReadyKind::NoTimer, Wait::Unknown, message)
    }

    fn limiter(policy: &str, error: impl Error + Send + Sync + 'static) -> Self {
        let message = format!("the limiter failed to decide about {policy:?}");
        let source = Some(Source::new(error));
        Self { source, ..Self::new(NotReadyKind::Limiter, Wait::Unknown, message) }
    }
}

debug_as_text!(NotReady);

impl fmt::Display for NotReady {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for NotReady {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_ref().map(Source::get)
    }
}
