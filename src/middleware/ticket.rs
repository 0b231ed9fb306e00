//! The ticket of a request: its charges, from the decision to the end of its response.
//!
//! A request has one [`Ticket`]. It owns the charges with the limiter's answers and receipts. What was taken is kept,
//! refunded or settled through it, and nothing else.

use std::cmp::Ordering;
use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use smallvec::SmallVec;

use super::compiled::Compiled;
use super::rule::OnAborted;
use super::settle::pending::{OpenTicket, Pending};
use crate::decision::{ChargeDecision, Receipt};
use crate::key::Key;
use crate::limiter::{Charge, Effect, Limiter, Refund};
use crate::mode::Mode;
use crate::outcome::OutcomeKind;
use crate::policy::Policy;
use crate::quota::Algorithm;

/// One policy's charge for a request, and the limiter's answer to it.
pub(super) struct Charged {
    /// The policy's place among the layer's.
    pub(super) policy: usize,
    pub(super) key: Key,
    pub(super) cost: u64,
    /// The mode of the policy's rule when the request came.
    pub(super) mode: Mode,
    pub(super) effect: Effect,
    /// `unasked` until the limiter has answered.
    pub(super) decision: ChargeDecision,
}

impl Charged {
    #[inline]
    pub(super) fn new(policy: usize, key: Key, cost: u64, mode: Mode) -> Self {
        Self { policy, key, cost, mode, effect: effect_of(mode), decision: ChargeDecision::unasked(0) }
    }

    #[inline]
    pub(super) fn charge<'a>(&'a self, policy: &'a Policy) -> Charge<'a> {
        Charge::new(policy, &self.key).cost(self.cost).effect(self.effect)
    }

    /// Whether the policy's rule enforces, and its quota denies the charge.
    pub(super) fn is_refused(&self) -> bool {
        self.mode == Mode::Enforce && !self.decision.is_allowed()
    }
}

/// Returns the effect of a charge whose rule has no linked policy.
#[inline]
pub(super) fn effect_of(mode: Mode) -> Effect {
    match mode {
        Mode::Enforce => Effect::Enforce,
        Mode::Degrade | Mode::Shadow => Effect::Observe,
    }
}

/// Returns whether a charge is a strike of a block.
pub(super) fn is_strike<L>(layer: &Compiled<L>, charged: &Charged) -> bool {
    let algorithm = layer.policy(charged.policy).map(|policy| policy.quota().algorithm());
    matches!(charged.effect, Effect::OnRefusal { .. }) && algorithm == Some(Algorithm::Block)
}

/// The charges of one request, in the order of the layer's policies; a linked policy's comes last in its rule. No two are
/// for the same policy and key, since the policies of a layer differ by name.
pub(super) type Charges = SmallVec<[Charged; 1]>;

/// The charges of a request, and what is known about them.
///
/// If it is dropped before the response's head has come, what it took stays taken: the service may have done the work.
/// Two settings say otherwise. A layer that refunds nested refusals refunds what a limit within has refused, and a rule
/// that settles does what its [`OnAborted`](super::OnAborted) says.
pub(super) struct Ticket<L: Limiter> {
    pub(super) layer: Arc<Compiled<L>>,
    pub(super) kind: OutcomeKind,
    pub(super) charges: Charges,
    /// Whether the limiter has answered. Without an answer nothing is known of the charges, and nothing was taken.
    pub(super) is_answered: bool,
    /// The mode of a rule that found no key, if none of these rules enforces.
    pub(super) keyless: Mode,
    /// The parts that stay open until the response has come. Boxed, because most requests have none.
    pub(super) pending: Option<Box<Pending>>,
}

impl<L: Limiter> Ticket<L> {
    /// Creates the ticket of a request that no rule has charged yet.
    #[inline]
    pub(super) fn new(layer: Arc<Compiled<L>>) -> Self {
        Self {
            layer,
            kind: OutcomeKind::Exempt,
            charges: Charges::new(),
            is_answered: false,
            keyless: Mode::Enforce,
            pending: None,
        }
    }

    /// Returns the charges that the limiter has answered: all or none.
    pub(super) fn answered(&self) -> &[Charged] {
        if self.is_answered { &self.charges } else { &[] }
    }

    /// Takes the receipts of all charges, with the place of each. What was taken can be refunded once. Strikes stay: a
    /// request that is refunded was refused all the same.
    pub(super) fn take_receipts(&mut self) -> SmallVec<[(usize, Receipt); 2]> {
        if let Some(pending) = &mut self.pending {
            pending.close();
        }
        let layer = &*self.layer;
        let charges = self.charges.iter_mut().enumerate().filter(|(_, charged)| !is_strike(layer, charged));
        charges.filter_map(|(at, charged)| Some((at, charged.decision.take_receipt()?))).collect()
    }

    /// Refunds what the request took. Its response does not report it: see [`take_back`](Self::take_back).
    #[cold]
    pub(super) fn refund(&mut self) {
        let receipts = self.take_receipts();
        self.refund_receipts(receipts);
    }

    /// Refunds what the request took, and updates what its response reports.
    #[cold]
    pub(super) fn take_back(&mut self) {
        let receipts = self.take_receipts();
        let units: SmallVec<[(usize, u64); 2]> = receipts.iter().map(|(at, receipt)| (*at, receipt.units())).collect();
        self.refund_receipts(receipts);
        for (at, units) in units {
            self.update(at, units, 0);
        }
    }

    /// Refunds receipts of the charges at these places.
    pub(super) fn refund_receipts(&self, receipts: impl IntoIterator<Item = (usize, Receipt)>) {
        let refund = |(at, receipt): (usize, Receipt)| {
            let charged = self.charges.get(at)?;
            Some(Refund::new(self.layer.policy_now(charged.policy)?, charged.key.clone(), receipt))
        };
        let refunds: Vec<Refund> = receipts.into_iter().filter_map(refund).collect();
        if !refunds.is_empty() {
            self.layer.refund(refunds);
        }
    }

    /// Settles charges of one rule: each cost `units`. Refunds what was taken beyond that, or takes what is missing, into
    /// debt. `is_reported` if the response still reports the charges.
    pub(super) fn settle(&mut self, charges: Range<usize>, units: u64, is_reported: bool) {
        for at in charges {
            let Some(charged) = self.charges.get_mut(at) else { continue };
            // A charge without a receipt took nothing: it only observes, or the request was charged to its meter instead.
            let Some(receipt) = charged.decision.take_receipt() else { continue };
            let taken = receipt.units();
            match units.cmp(&taken) {
                Ordering::Less => self.refund_receipts([(at, receipt.split(taken - units))]),
                Ordering::Greater => self.layer.force(charged.policy, &charged.key, units - taken),
                Ordering::Equal => continue,
            }
            if is_reported {
                self.update(at, taken, units);
            }
        }
    }

    /// Ends what is open, because no more of the response will come.
    fn end(&mut self) {
        let Some(pending) = &mut self.pending else { return };
        if pending.copies.take().is_some_and(|copies| copies.are_refused()) {
            self.refund();
        }
        // One by one: if the application's code panics for one rule, `drop` goes on with the others.
        while let Some(pending) = &mut self.pending {
            let Some(open) = pending.open.pop() else { break };
            let on_aborted = self.layer.settlement(open.policy).map(|found| found.on_aborted).unwrap_or_default();
            let units = match (open.close(), on_aborted) {
                (stated, _) if pending.response.is_whole => stated,
                (stated, OnAborted::Keep) => stated.filter(|stated| *stated > open.reserved()),
                (stated, OnAborted::Refund) => Some(stated.unwrap_or(0)),
            };
            if let Some(units) = units {
                self.settle(open.charges, units, false);
            }
        }
        self.pending = None;
    }

    /// Updates the decision of a charge whose cost changed from `from` to `to` units: by the limiter if it answers at
    /// once, else by calculation.
    pub(super) fn update(&mut self, at: usize, from: u64, to: u64) {
        let Some(charged) = self.charges.get_mut(at) else { return };
        let now = self.layer.peek_now(charged.policy, &charged.key);
        charged.decision = now.unwrap_or_else(|| charged.decision.with_cost_changed(from, to));
    }
}

impl<L: Limiter> Drop for Ticket<L> {
    fn drop(&mut self) {
        // The application's observer may panic about one rule; the others are settled all the same.
        while self.pending.is_some() {
            let _ = catch_unwind(AssertUnwindSafe(|| self.end()));
        }
    }
}

impl<L: Limiter> OpenTicket for Ticket<L> {
    fn count(&mut self, bytes: u64, is_last: bool) {
        let Some(pending) = &mut self.pending else { return };
        for open in &pending.open {
            if self.layer.settlement(open.policy).is_some_and(|settlement| settlement.by_body) {
                open.add(bytes);
            }
        }
        pending.response.count(bytes, is_last);
    }

    fn complete(&mut self) {
        if let Some(pending) = &mut self.pending {
            pending.response.is_whole = true;
        }
        Self::end(self);
    }

    fn end(&mut self) {
        Self::end(self);
    }

    fn refund(&mut self) {
        Self::refund(self);
    }
}

impl<L: Limiter> fmt::Debug for Ticket<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket").field("kind", &self.kind).field("charges", &self.charges.len()).finish_non_exhaustive()
    }
}
