//! Requests that wait for their departures from leaky queues.
//!
//! A request waits before the service is called, and holds no service meanwhile. The layer drops the
//! service that was ready. When the request departs, the layer makes a clone of that service ready.

use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http::Request;

use super::delays::{Counted, Delays};
use crate::base::head::Head;
use crate::base::sync::contained;
use crate::base::time::micros_ceil;
use crate::base::wait::Wait;
use crate::decision::{ChargeDecision, Receipt};
use crate::event::LayerEvent;
use crate::limiter::{DepartureKey, DepartureTurns, Limiter, Refund};
use crate::middleware::compiled::Compiled;
use crate::middleware::decide::kind::{OutcomeCause, makes_wait};
use crate::middleware::ticket::{Charged, Ticket, effect_of};
use crate::policy::Policy;

impl Ticket {
    /// Returns a place in the waiting room if the request has to wait, and otherwise `None`. If the maximum number of
    /// requests wait already, refuses the request and returns `None`. The refused request's units are refunded, and
    /// the queue that made it wait is reported as over the limit until the request would have departed.
    #[inline]
    pub(crate) fn place_to_wait<L: Limiter>(&mut self, layer: &Compiled<L>) -> Option<Counted> {
        let delays = layer.delays.as_ref()?;
        if self.waits() { self.place_or_refusal(layer, delays) } else { None }
    }

    /// Returns whether the request has to wait, in a layer with a timer.
    #[inline]
    pub(crate) fn waits(&self) -> bool {
        self.kind.passed() && self.answered().iter().any(makes_wait)
    }

    #[cold]
    fn place_or_refusal<L: Limiter>(&mut self, layer: &Compiled<L>, delays: &Arc<Delays>) -> Option<Counted> {
        if !delays.can_sleep() {
            return None; // it passes at once
        }
        let counted = delays.count();
        if counted.is_none() {
            self.refuse_to_wait(layer, |ticket| {
                ticket.decline_slots(layer, delays);
                ticket.refund_and_report(layer);
            });
        }
        counted
    }

    /// Refunds the slots of a request that would have to wait but does not. The lines refund these slots in the order
    /// that the queues need.
    fn decline_slots<L: Limiter>(&mut self, layer: &Compiled<L>, delays: &Delays) {
        let now_us = delays.now_us();
        for at in 0..self.charges.len() {
            let Some(charged) = self.charges.get_mut(at).filter(|charged| makes_wait(charged)) else { continue };
            let (line_key, departs_us) = (line_key_of(layer, charged), departure(now_us, &charged.decision));
            let units = charged.decision.taken();
            let receipt = charged.decision.take_receipt();
            let refund = |slots| refund_slots(layer, charged, slots);
            delays.lines.decline(&line_key, departs_us, receipt, refund);
            self.update(layer, at, units, 0);
        }
    }

    /// Refuses a request that has to wait. `refund_and_report` reports the request's charges as not
    /// taken.
    pub(crate) fn refuse_to_wait<L>(&mut self, layer: &Compiled<L>, refund_and_report: impl FnOnce(&mut Self)) {
        let waiting = self.charges.iter().enumerate().filter(|(_, charged)| makes_wait(charged));
        let delays: Vec<(usize, Duration)> = waiting.map(|(at, charged)| (at, charged.decision.delay())).collect();
        refund_and_report(self);
        for (at, delay) in delays {
            let Some(charged) = self.charges.get_mut(at) else { continue };
            charged.effect = effect_of(charged.mode); // a request that would wait is not metered instead
            let (limit, remaining) = (charged.decision.limit(), charged.decision.remaining());
            let reset_us = charged.decision.reset_us;
            charged.decision = ChargeDecision::denied(limit, remaining, Wait::After(delay));
            charged.decision.reset_us = reset_us;
        }
        self.decide(layer, OutcomeCause::NoRoomToWait);
    }

    fn put_receipt(&mut self, at: usize, receipt: Receipt) {
        if let Some(charged) = self.charges.get_mut(at) {
            charged.decision.put_receipt(receipt);
        }
    }
}

/// Returns the key of the line in which a charge waits.
fn line_key_of<L: Limiter>(layer: &Compiled<L>, charged: &Charged) -> DepartureKey {
    let policy = charged.policy_in(layer).map_or(0, Policy::fingerprint);
    DepartureKey { policy, key: charged.key.clone(), cost: charged.cost }
}

/// Returns the instant of the timer at which a charge departs.
fn departure(now_us: u64, decision: &ChargeDecision) -> u64 {
    now_us.saturating_add(micros_ceil(decision.delay()))
}

/// Refunds the slots of a queue, in the given order.
fn refund_slots<L: Limiter>(layer: &Compiled<L>, charged: &Charged, slots: Vec<Receipt>) {
    let Some(policy) = charged.policy_of_refunds(layer) else { return };
    layer.refund(slots.into_iter().map(|slot| Refund::new(policy.clone(), charged.key.clone(), slot)).collect());
}

/// A request that waits for its departures. A request has several departures if several of its
/// policies are queues.
///
/// If the request is dropped before it departs, it leaves its lines, its charges are refunded, and the observer sees
/// the outcome [`Abandoned`](crate::outcome::OutcomeKind::Abandoned).
pub(crate) struct Delayed<S, B, L: Limiter> {
    pub(crate) service: S,
    pub(crate) layer: Arc<Compiled<L>>,
    /// The request and its ticket, until the request departs.
    held: Option<(Request<B>, Ticket)>,
    turns: DepartureTurns,
    counted: Option<Counted>,
    /// The wait that was reported to the observer.
    reported: Option<ReportedWait>,
}

/// A wait that was reported to the observer.
pub(super) struct ReportedWait {
    policy: Policy,
    /// The instant of the layer's timer at which the wait began.
    began: Duration,
}

/// Reports that a request begins to wait for a policy.
pub(super) fn report_began<L>(layer: &Compiled<L>, policy: Option<&Policy>) -> Option<ReportedWait> {
    let (observer, policy) = (layer.settings.observer.as_ref()?, policy?);
    observer.on_layer_event(&LayerEvent::wait_began(policy.clone()));
    Some(ReportedWait { policy: policy.clone(), began: layer.delays.as_ref()?.now() })
}

/// Reports that a request does not wait for a policy any more, if its wait was reported.
pub(super) fn report_ended<L>(layer: &Compiled<L>, wait: Option<ReportedWait>) {
    if let (Some(observer), Some(delays), Some(wait)) = (&layer.settings.observer, &layer.delays, wait) {
        let waited = delays.now().saturating_sub(wait.began);
        observer.on_layer_event(&LayerEvent::wait_ended(wait.policy, waited));
    }
}

impl<S, B, L: Limiter> Delayed<S, B, L> {
    /// Puts a request into the lines in which it has to wait.
    #[inline(never)]
    pub(crate) fn new(
        service: S,
        layer: &Arc<Compiled<L>>,
        request: Request<B>,
        mut ticket: Ticket,
        counted: Counted,
    ) -> Box<Self> {
        let waiting = ticket.charges.iter().filter(|charged| makes_wait(charged));
        let longest = waiting.max_by_key(|charged| charged.decision.delay());
        let waits_for = longest.and_then(|charged| charged.policy_in(layer));
        // Calls the observer before anything is held, because the observer is the application's code and may panic.
        let reported = report_began(layer, waits_for);
        let mut turns = DepartureTurns::default();
        let Counted(delays) = &counted;
        let now_us = delays.now_us();
        for (at, charged) in ticket.charges.iter_mut().enumerate().filter(|(_, charged)| makes_wait(charged)) {
            let (line_key, departs_us) = (line_key_of(layer, charged), departure(now_us, &charged.decision));
            turns.join(&delays.lines, at, line_key, departs_us, charged.decision.take_receipt());
        }
        let (layer, held) = (Arc::clone(layer), Some((request, ticket)));
        Box::new(Self { service, layer, held, turns, counted: Some(counted), reported })
    }

    /// Holds a request that does not wait any more, until its service is ready.
    pub(crate) fn admitted(service: S, layer: &Arc<Compiled<L>>, request: Request<B>, ticket: Ticket) -> Box<Self> {
        let (layer, held) = (Arc::clone(layer), Some((request, ticket)));
        Box::new(Self { service, layer, held, turns: DepartureTurns::default(), counted: None, reported: None })
    }

    /// Returns `Ready` when all departures have come.
    pub(crate) fn poll_departure(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let (Some(Counted(delays)), Some((_, held))) = (&self.counted, &mut self.held) else { return Poll::Ready(()) };
        ready!(self.turns.poll(&delays.lines, &*delays.timer, |at, receipt| held.put_receipt(at, receipt), cx));
        self.counted = None;
        report_ended(&self.layer, self.reported.take());
        Poll::Ready(())
    }

    /// Takes the request out after its departure, with its ticket. Returns `None` if it was taken out
    /// before.
    pub(crate) fn depart(&mut self) -> Option<(Request<B>, Ticket)> {
        self.held.take()
    }
}

impl<S, B, L: Limiter> Drop for Delayed<S, B, L> {
    fn drop(&mut self) {
        let Some((request, mut ticket)) = self.held.take() else { return };
        // The timer, wakers, the limiter and the observer are the application's code and may panic.
        if let Some(Counted(delays)) = &self.counted {
            self.turns.leave(&delays.lines, &*delays.timer, |at, slots| {
                if let Some(charged) = ticket.charges.get(at) {
                    refund_slots(&self.layer, charged, slots);
                }
            });
        }
        self.counted = None;
        ticket.decide(&self.layer, OutcomeCause::Dropped);
        let outcome = ticket.outcome(&self.layer);
        contained(|| ticket.refund(&self.layer));
        contained(|| report_ended(&self.layer, self.reported.take()));
        contained(|| ticket.observe(&self.layer, &Head::from(&request), &outcome));
    }
}
