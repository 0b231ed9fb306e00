//! Requests that wait for their departure from a leaky queue.
//!
//! A request waits before the service is called, and holds nothing meanwhile: the service that was ready is let go, and a
//! clone of it is made ready when the time has come.

mod line;
mod timer;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use http::Request;
use smallvec::SmallVec;

use super::charging::Shared;
use super::decided::{Decided, Manner};
use super::modes::makes_wait;
use crate::decision::{ChargeDecision, Receipt};
use crate::limiter::Limiter;
use crate::mode::Mode;
use crate::outcome::OutcomeKind;
use crate::time::{micros_ceil, micros_floor};

use line::{Lines, Place, Ticket};
#[cfg(feature = "tokio")]
pub use timer::TokioTimer;
pub use timer::{Sleep, Timer};

/// How requests of a layer wait.
pub(super) struct Delays {
    timer: Arc<dyn Timer>,
    lines: Lines,
    waiting: AtomicUsize,
    /// No more wait at a time.
    most: usize,
}

/// As many requests of a layer wait at a time, unless it sets another number.
pub(super) const MOST_WAITING: usize = 1_000;

/// A request that waits for its departures: several if several of its policies are queues.
pub(super) struct Delayed<S, B> {
    pub(super) service: S,
    pub(super) request: Option<Request<B>>,
    pub(super) decided: Decided,
    /// With the place of its charge.
    tickets: SmallVec<[(usize, Ticket); 1]>,
    /// What is waited for, in microseconds of the timer.
    sleep: Option<(u64, Sleep)>,
    counted: Option<Counted>,
}

/// Counts as one that waits.
pub(super) struct Counted(Arc<Delays>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Delays {
    pub(super) fn new(timer: Arc<dyn Timer>, most: usize) -> Self {
        Self { timer, lines: Lines::new(), waiting: AtomicUsize::new(0), most }
    }

    /// Counts one more that waits, unless there are as many as may.
    fn count(self: &Arc<Self>) -> Option<Counted> {
        let one_more = |waiting: usize| (waiting < self.most).then_some(waiting + 1);
        let counted = self.waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more);
        counted.is_ok().then(|| Counted(Arc::clone(self)))
    }

    /// How many requests wait.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    fn now_us(&self) -> u64 {
        micros_floor(self.timer.now())
    }
}

impl<L> Shared<L> {
    /// Whether a request has to wait. Only an enforced queue makes it, and only one that is taken: of one that another
    /// policy refuses, a queue that has room says a delay too.
    #[inline]
    fn has_to_wait(&self, decided: &Decided) -> bool {
        self.delays.is_some() && decided.passes() && decided.is_delayed()
    }
}

impl Decided {
    fn put_receipt(&mut self, at: usize, receipt: Option<Receipt>) {
        if let (Some((_, decision)), Some(receipt)) = (self.answer_mut(at), receipt) {
            decision.put_receipt(&receipt);
        }
    }

    fn is_delayed(&self) -> bool {
        let (charges, decisions) = self.answers();
        let mut answers = charges.iter().zip(decisions);
        answers.any(|(charge, decision)| makes_wait(charge, decision))
    }
}

impl<L: Limiter> Shared<L> {
    /// Returns a place to wait in if the request has to wait. If as many wait as may, there is none, and the request is
    /// refused: what it took is refunded, and the queue is told as over its limit until the request would have departed.
    #[inline]
    pub(super) fn place_to_wait(&self, decided: &mut Decided) -> Option<Counted> {
        if self.has_to_wait(decided) { self.place_or_refuse(decided) } else { None }
    }

    #[cold]
    fn place_or_refuse(&self, decided: &mut Decided) -> Option<Counted> {
        let counted = self.delays.as_ref()?.count();
        if counted.is_none() {
            let mut delays = SmallVec::<[(usize, Duration); 1]>::new();
            for at in 0..decided.answers().0.len() {
                if let Some((charge, decision)) = decided.answer_mut(at) {
                    delays.extend(makes_wait(charge, decision).then(|| (at, decision.delay())));
                }
            }
            self.take_back(decided);
            for (at, delay) in delays {
                if let Some((charge, decision)) = decided.answer_mut(at) {
                    charge.manner = Manner::of(Mode::Enforce); // what waits is not metered instead
                    *decision = ChargeDecision::denied(decision.limit(), decision.remaining(), Some(delay))
                        .with_reset_after(decision.reset_after());
                }
            }
            decided.kind = OutcomeKind::Limited;
        }
        counted
    }

    /// Puts a request into the lines that it has to wait in.
    #[inline(never)]
    pub(super) fn delay<S, B>(
        &self,
        service: S,
        request: Request<B>,
        mut decided: Decided,
        counted: Counted,
    ) -> Box<Delayed<S, B>> {
        let mut tickets = SmallVec::new();
        let Counted(delays) = &counted;
        let now_us = delays.now_us();
        for at in 0..decided.answers().0.len() {
            let Some((charge, decision)) = decided.answer_mut(at) else { continue };
            if makes_wait(charge, decision) {
                let departs_us = now_us.saturating_add(micros_ceil(decision.delay()));
                let place = Place { policy: charge.policy, key: charge.key.clone(), cost: charge.cost };
                let receipt = decision.take_receipt();
                tickets.push((at, delays.lines.join(place, departs_us, receipt)));
            }
        }
        Box::new(Delayed { service, request: Some(request), decided, tickets, sleep: None, counted: Some(counted) })
    }

    /// Takes back what a request that does not depart had taken: its place in the lines, and its charges.
    #[cold]
    pub(super) fn leave<S, B>(&self, delayed: &mut Delayed<S, B>) {
        delayed.decided.kind = OutcomeKind::Abandoned;
        if let Some(request) = delayed.request.take() {
            self.tell(&request.into_parts().0, &delayed.decided);
        }
        delayed.leave_lines();
        self.give_back(std::mem::replace(&mut delayed.decided, Decided::nothing()));
    }
}

impl<S, B> Delayed<S, B> {
    /// Ready when all its departures have come.
    pub(super) fn poll_departure(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(Counted(delays)) = &self.counted else { return Poll::Ready(()) };
        let mut now_us = delays.now_us();
        loop {
            let mut latest_us = None;
            let decided = &mut self.decided;
            self.tickets.retain(|(at, ticket)| match delays.lines.poll(ticket, now_us, cx.waker()) {
                Some(until_us) => {
                    latest_us = latest_us.max(Some(until_us));
                    true
                }
                None => {
                    decided.put_receipt(*at, Lines::receipt(ticket));
                    false
                }
            });
            let Some(until_us) = latest_us else { break };
            if self.sleep.as_ref().is_none_or(|(set_us, _)| *set_us != until_us) {
                self.sleep = Some((until_us, delays.timer.sleep_until(Duration::from_micros(until_us))));
            }
            let Some((_, sleep)) = &mut self.sleep else { break };
            std::task::ready!(sleep.as_mut().poll(cx));
            self.sleep = None;
            // Whatever the timer's clock says: nobody is to poll for ever.
            now_us = delays.now_us().max(until_us);
        }
        self.counted = None;
        Poll::Ready(())
    }

    fn leave_lines(&mut self) {
        let Some(Counted(delays)) = &self.counted else { return };
        let now_us = delays.now_us();
        for (at, ticket) in self.tickets.drain(..) {
            self.decided.put_receipt(at, delays.lines.leave(&ticket, now_us));
        }
        self.counted = None;
    }
}

impl fmt::Debug for Delays {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Delays").field("waiting", &self.waiting()).finish_non_exhaustive()
    }
}
