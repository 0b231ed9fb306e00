//! The ticket of a request: its charges, from the decision to the end of its response.
//!
//! A request has one [`Ticket`]. The ticket owns the charges with the limiter's answers and receipts. Units that were
//! taken are kept, refunded or settled only through the ticket.
//!
//! The ticket of a usual request lives only on the stack of `RateLimit::call`, because no charge is settled after the
//! response. Only a request that waits, or whose charges are open until the response has come, holds its ticket for
//! longer.

use std::cmp::Ordering;
use std::sync::Arc;

use smallvec::SmallVec;

use super::compiled::Compiled;
use super::plan::PlaceHolders;
use crate::decision::{ChargeDecision, INLINE, Receipt};
use crate::key::Key;
use crate::limiter::{AnyPlaces, Charge, Effect, HeldCharge, HeldPlaces, Limiter, Refund};
use crate::mode::Mode;
use crate::outcome::OutcomeKind;
use crate::policy::Policy;
use crate::quota::Algorithm;

/// One policy's charge for a request, and the limiter's answer to it.
pub(super) struct Charged {
    /// The policy's index in the layer.
    pub(super) policy: usize,
    /// The policy that is used instead of the policy at the index: the policy of the request's own quota, or of the
    /// quota that replaced the rule's quota while the request waited in line.
    pub(super) own: Option<Policy>,
    pub(super) key: Key,
    pub(super) cost: u64,
    /// The mode of the policy's rule when the request arrived.
    pub(super) mode: Mode,
    pub(super) effect: Effect,
    /// The limiter's decision, or [`ChargeDecision::unasked`] before the limiter has answered.
    pub(super) decision: ChargeDecision,
}

impl Charged {
    #[inline]
    pub(super) fn new(policy: usize, key: Key, cost: u64, mode: Mode) -> Self {
        Self { policy, own: None, key, cost, mode, effect: effect_of(mode), decision: ChargeDecision::unasked(0) }
    }

    /// Returns the policy that the request is charged to.
    #[inline]
    pub(super) fn policy_in<'a, L>(&'a self, layer: &'a Compiled<L>) -> Option<&'a Policy> {
        self.own.as_ref().or_else(|| layer.policy(self.policy))
    }

    /// Returns the policy under which the charge is settled.
    fn policy_now<L>(&self, layer: &Compiled<L>) -> Option<Policy> {
        Some(layer.policy_now(self.policy_in(layer)?))
    }

    /// Returns the policy under which the charge is refunded.
    pub(super) fn policy_of_refunds<L>(&self, layer: &Compiled<L>) -> Option<Policy> {
        Some(layer.policy_of_refunds(self.policy_in(layer)?))
    }

    /// Returns the policy under which a request in line asks the limiter again.
    pub(super) fn policy_in_line<L>(&self, layer: &Compiled<L>) -> Option<Policy> {
        self.own.clone().or_else(|| layer.policy_in_line(self.policy))
    }

    #[inline]
    pub(super) fn charge<'a>(&'a self, policy: &'a Policy) -> Charge<'a> {
        Charge::new(policy, &self.key).cost(self.cost).effect(self.effect)
    }

    /// Returns whether the charge is denied and the mode of its rule is `Enforce`.
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
    let is_block = |policy: &Policy| policy.quota().algorithm() == Algorithm::Block;
    matches!(charged.effect, Effect::OnRefusal { .. }) && charged.policy_in(layer).is_some_and(is_block)
}

/// The charges of one request, in the order of the layer's policies. The charge of a linked policy comes last in its
/// rule. No two charges have the same policy and key, because the policies of a layer differ by name.
pub(super) type Charges = SmallVec<[Charged; INLINE]>;

/// The charges of a request, and the facts about them. The ticket is plain data: if it is dropped, charges stay taken,
/// except units of concurrency limits.
pub(super) struct Ticket {
    pub(super) kind: OutcomeKind,
    pub(super) charges: Charges,
    /// Whether the limiter has answered. Without an answer, the charges have no decisions, and no units were taken.
    pub(super) is_answered: bool,
    /// True if the limiter is first asked in line, because the request may wait there: see
    /// [`has_to_be_tried`](Self::has_to_be_tried).
    pub(super) is_left_to_line: bool,
    /// The mode of a rule that applies but could not charge the request, because it found no key,
    /// or its source found too many charges. `None` if there is no such rule. A rule in this mode
    /// does not enforce.
    pub(super) keyless: Option<Mode>,
    /// True if the request is refused because the server does not provide its peer's address.
    pub(super) lacks_peer: bool,
    /// The units of concurrency limits that the request holds. The units are returned when the value is dropped.
    pub(super) places: Option<Arc<dyn AnyPlaces>>,
    /// The policies that pace the bodies of the request and its response.
    pub(super) paced: PacedBodiesBy,
}

/// The policies that pace the bodies of a request. The list is boxed, and a function that is not inlined drops it. Most
/// requests have no paced bodies, and each instruction for dropping a list would slow them down
/// (`benches/instructions`).
#[derive(Default)]
pub(super) struct PacedBodiesBy(Option<Box<PacedList>>);

#[derive(Default)]
struct PacedList(Vec<PacedBy>);

impl PacedBodiesBy {
    pub(super) fn add(&mut self, by: impl Iterator<Item = PacedBy>) {
        self.0.get_or_insert_default().0.extend(by);
    }

    /// Returns the policies, or `None` if no rule paces bodies of the request.
    #[inline]
    pub(super) fn get(&self) -> Option<&[PacedBy]> {
        self.0.as_ref().map(|by| by.0.as_slice())
    }
}

impl Drop for PacedBodiesBy {
    #[inline]
    fn drop(&mut self) {
        #[cold]
        #[inline(never)]
        fn drop_some(by: Box<PacedList>) {
            drop(by);
        }
        if let Some(by) = self.0.take() {
            drop_some(by);
        }
    }
}

/// A policy that paces bodies, and the key whose pace it is.
#[derive(Clone)]
pub(super) struct PacedBy {
    /// The policy's index in the layer.
    pub(super) policy: usize,
    /// The policy of the request's own quota, which is used instead of the policy at the index.
    pub(super) own: Option<Policy>,
    pub(super) key: Key,
}

impl PacedBy {
    pub(super) fn policy_in<'a, L>(&'a self, layer: &'a Compiled<L>) -> Option<&'a Policy> {
        self.own.as_ref().or_else(|| layer.policy(self.policy))
    }
}

impl Ticket {
    /// Creates the ticket of a request that no rule has charged yet.
    #[inline]
    pub(super) fn new() -> Self {
        Self {
            kind: OutcomeKind::Exempt,
            charges: Charges::new(),
            is_answered: false,
            is_left_to_line: false,
            keyless: None,
            lacks_peer: false,
            places: None,
            paced: PacedBodiesBy::default(),
        }
    }

    /// Moves the ticket out, and leaves a ticket without charges.
    pub(super) fn take(&mut self) -> Self {
        std::mem::replace(self, Self::new())
    }

    /// Returns the charges that the limiter has decided: all charges, or none before the limiter's answer.
    pub(super) fn answered(&self) -> &[Charged] {
        if self.is_answered { &self.charges } else { &[] }
    }

    /// Moves the taken units of concurrency limits into a holder, which refunds them when it is
    /// dropped.
    #[inline(never)]
    pub(super) fn hold_places<L: Limiter>(&mut self, layer: &Compiled<L>) {
        let mut held = SmallVec::new();
        for (at, charged) in self.charges.iter_mut().enumerate() {
            let Some(policy) = charged.policy_in(layer).filter(|policy| policy.limits_in_flight()) else { continue };
            let policy = policy.clone();
            if let Some(receipt) = charged.decision.take_receipt() {
                held.push(HeldCharge::new(at, Refund::new(policy, charged.key.clone(), receipt)));
            }
        }
        self.places = (!held.is_empty())
            .then(|| HeldPlaces::of(Arc::clone(&layer.limiter), held, layer.settings.observer.as_ref()));
    }

    /// Returns whether the request is charged to a concurrency limit, even if the limiter has not answered.
    fn is_of_places<L>(&self, layer: &Compiled<L>) -> bool {
        self.charges.iter().any(|charged| charged.policy_in(layer).is_some_and(Policy::limits_in_flight))
    }

    /// Returns whether the request may hold units of a concurrency limit, or whether its handlers may expect that it
    /// holds such units.
    pub(super) fn may_hold<L>(&self, layer: &Compiled<L>) -> bool {
        match layer.holders {
            PlaceHolders::None => false,
            PlaceHolders::WithOwnQuota => self.is_of_places(layer),
            PlaceHolders::All => true,
        }
    }

    /// Returns the units that the request took for a charge, and that were not refunded.
    pub(super) fn taken(&self, at: usize) -> u64 {
        let held = self.places.as_ref().map_or(0, |places| places.units(at));
        self.charges.get(at).map_or(0, |charged| charged.decision.taken()) + held
    }

    /// Takes the receipts of all charges except strikes, with the index of each charge, so that each receipt is
    /// refunded at most once. Strikes stay, because they count refusals, and a refund does not undo a refusal.
    fn take_receipts<L>(&mut self, layer: &Compiled<L>) -> SmallVec<[(usize, Receipt); 2]> {
        let charges = self.charges.iter_mut().enumerate().filter(|(_, charged)| !is_strike(layer, charged));
        charges.filter_map(|(at, charged)| Some((at, charged.decision.take_receipt()?))).collect()
    }

    /// Refunds what the request took. Does not update what the response reports, unlike
    /// [`refund_and_report`](Self::refund_and_report).
    #[cold]
    pub(super) fn refund<L: Limiter>(&mut self, layer: &Compiled<L>) {
        self.places = None;
        let receipts = self.take_receipts(layer);
        self.refund_receipts(layer, receipts);
    }

    /// Refunds what the request took, and updates what its response reports.
    #[cold]
    pub(super) fn refund_and_report<L: Limiter>(&mut self, layer: &Compiled<L>) {
        let taken = (0..self.charges.len()).map(|at| (at, self.taken(at)));
        let units: Vec<(usize, u64)> = taken.filter(|(_, units)| *units > 0).collect();
        self.refund(layer);
        for (at, units) in units {
            self.update(layer, at, units, 0);
        }
    }

    /// Refunds receipts of the charges with these indices.
    pub(super) fn refund_receipts<L: Limiter>(
        &self,
        layer: &Compiled<L>,
        receipts: impl IntoIterator<Item = (usize, Receipt)>,
    ) {
        let refund = |(at, receipt): (usize, Receipt)| {
            let charged = self.charges.get(at)?;
            Some(Refund::new(charged.policy_of_refunds(layer)?, charged.key.clone(), receipt))
        };
        let refunds: Vec<Refund> = receipts.into_iter().filter_map(refund).collect();
        if !refunds.is_empty() {
            layer.refund(refunds);
        }
    }

    /// Settles a charge that cost `units`. Refunds the units that were taken beyond `units`, or takes the missing
    /// units, even into debt. `is_reported` is true if the response still reports the charge.
    pub(super) fn settle<L: Limiter>(&mut self, layer: &Compiled<L>, at: usize, units: u64, is_reported: bool) {
        debug_assert!(at < self.charges.len(), "the ticket has a charge with this index");
        let Some(charged) = self.charges.get_mut(at) else { return };
        // A charge without a receipt took nothing: its rule let the denied request pass, or the request was charged
        // to the rule's meter instead.
        let Some(receipt) = charged.decision.take_receipt() else { return };
        let taken = receipt.units();
        match units.cmp(&taken) {
            Ordering::Less => self.refund_receipts(layer, [(at, receipt.split(taken - units))]),
            Ordering::Greater => {
                if let Some(policy) = charged.policy_now(layer) {
                    layer.force(&policy, &charged.key, units - taken);
                }
            }
            Ordering::Equal => return,
        }
        if is_reported {
            self.update(layer, at, taken, units);
        }
    }

    /// Updates the decision of a charge whose cost changed from `from` to `to` units. If the limiter answers at once,
    /// it is asked for the decision; otherwise the decision is computed.
    pub(super) fn update<L: Limiter>(&mut self, layer: &Compiled<L>, at: usize, from: u64, to: u64) {
        debug_assert!(at < self.charges.len(), "the ticket has a charge with this index");
        let Some(charged) = self.charges.get_mut(at) else { return };
        // A request is answered under the quota that it was charged under. If a larger quota has replaced that quota,
        // the limiter is not asked about the larger quota.
        let policy = charged.policy_now(layer).filter(|now| charged.policy_in(layer) == Some(now));
        let now = policy.and_then(|policy| layer.peek_now(&policy, &charged.key));
        charged.decision = now.unwrap_or_else(|| charged.decision.with_cost_changed(from, to));
    }
}
