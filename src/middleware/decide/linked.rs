//! Rules with a linked policy: a block after refusals, or a meter for units beyond the quota.
//!
//! The charge of a linked policy comes after the charges of its rule, and the limiter takes it only if one of
//! the rule's charges is refused.

use smallvec::SmallVec;

use crate::decision::ChargeDecision;
use crate::limiter::{Effect, Limiter};
use crate::middleware::compiled::Compiled;
use crate::middleware::rule::LinkedRole;
use crate::middleware::ticket::{Charged, Charges, Ticket};
use crate::mode::Mode;

/// Adds the charge of a rule's linked policy after the rule's own charges, which begin at `first`.
#[cold]
pub(crate) fn link((policy, role): (usize, LinkedRole), charges: &mut Charges, first: usize) {
    debug_assert!(first < charges.len(), "a rule charges its own policies before the linked one");
    let Some(last) = charges.last() else { return };
    let (key, mode) = (last.key.clone(), last.mode);
    let cost = match role {
        LinkedRole::Block => 1,
        // The meter counts only if the rule is in enforce mode. In other modes, usage beyond the quota passes anyway.
        LinkedRole::Meter if mode != Mode::Enforce => return,
        LinkedRole::Meter => last.cost,
    };
    if role == LinkedRole::Meter {
        charges.iter_mut().skip(first).for_each(|charged| charged.effect = Effect::Observe);
    }
    debug_assert!(charges.len() - first <= usize::from(u8::MAX), "a rule with a linked policy has at most 255 charges");
    let of = u8::try_from(charges.len() - first).unwrap_or(u8::MAX);
    charges.push(Charged { effect: Effect::OnRefusal { of }, ..Charged::new(policy, key, cost, mode) });
}

/// Returns the charge that is linked to the charge at `at`, and the role of its policy.
fn linked_to(charges: &[Charged], at: usize) -> Option<(&Charged, LinkedRole)> {
    let charged = charges.get(at)?;
    // A linked charge comes at most 255 places after each charge of its rule, because `of` is a `u8`. The search ends
    // there, so that a long set is not searched as a whole for each charge.
    let near = charges.iter().enumerate().skip(at + 1).take(usize::from(u8::MAX));
    let (place, of) = { near }.find_map(|(place, charged)| match charged.effect {
        Effect::OnRefusal { of } => Some((place, usize::from(of))),
        _ => None,
    })?;
    // In enforce mode, only a rule with a meter gives its own charges the effect `Observe`.
    let meters = charged.effect == Effect::Observe && charged.mode == Mode::Enforce;
    let role = if meters { LinkedRole::Meter } else { LinkedRole::Block };
    (place - of <= at).then_some((charges.get(place)?, role))
}

/// Returns whether the charge at `at` refuses its request, and the decision that clients get for its policy.
/// If the rule's block is closed for longer than the policy's own wait, clients get the block's decision.
/// Returns `None` for the charge of a linked policy.
pub(crate) fn status(charges: &[Charged], at: usize) -> Option<(bool, &ChargeDecision)> {
    let charged = charges.get(at).filter(|charged| !matches!(charged.effect, Effect::OnRefusal { .. }))?;
    let own = &charged.decision;
    Some(match linked_to(charges, at) {
        None => (charged.is_refused(), own),
        Some((meter, LinkedRole::Meter)) => (charged.is_refused() && meter.is_refused(), own),
        Some((block, LinkedRole::Block)) if block.is_refused() => {
            (true, if block.decision.wait() > own.wait() { &block.decision } else { own })
        }
        Some((_, LinkedRole::Block)) => (charged.is_refused(), own),
    })
}

/// Returns whether the policy of the charge at `at` refuses its request.
pub(crate) fn refuses(charges: &[Charged], at: usize) -> bool {
    let Some(charged) = charges.get(at) else { return false };
    match charged.effect {
        // If a meter is full, the rule's own quota refuses the request.
        Effect::OnRefusal { .. } => {
            let before = at.checked_sub(1).and_then(|before| linked_to(charges, before));
            charged.is_refused() && before.is_none_or(|(_, role)| role == LinkedRole::Block)
        }
        // If a block is closed, the block itself refuses the request.
        Effect::Enforce => charged.is_refused(),
        _ => status(charges, at).is_some_and(|(refuses, _)| refuses),
    }
}

impl Ticket {
    /// Returns the indices of the charges of rules whose block is closed but does not enforce.
    pub(crate) fn closed(&self) -> Vec<usize> {
        let mut closed: Vec<usize> = Vec::new();
        for (at, block) in self.charges.iter().enumerate() {
            if let Effect::OnRefusal { of } = block.effect {
                if block.mode != Mode::Enforce && !block.decision.is_allowed() {
                    closed.extend(at.saturating_sub(usize::from(of))..at);
                }
            }
        }
        closed
    }

    /// Refunds the charges of rules whose block is closed but does not enforce, and reports them as refunded.
    /// While a block that enforces is closed, nothing is taken either. So the rule's next decisions do not depend
    /// on whether the block enforces.
    #[cold]
    pub(crate) fn take_nothing_while_closed<L: Limiter>(&mut self, layer: &Compiled<L>) {
        let closed = self.closed();
        let mut receipts: SmallVec<[_; 2]> = SmallVec::new();
        let mut taken: Vec<(usize, u64)> = Vec::new();
        for at in closed.iter().copied() {
            if let Some(receipt) = self.charges.get_mut(at).and_then(|charged| charged.decision.take_receipt()) {
                taken.push((at, receipt.units()));
                receipts.push((at, receipt));
            }
        }
        self.refund_receipts(layer, receipts);
        if let Some(places) = &self.places {
            taken.extend(closed.iter().map(|at| (*at, places.units(*at))).filter(|(_, units)| *units > 0));
            places.release(&|at| closed.contains(&at), &|| false);
        }
        for (at, units) in taken {
            self.update(layer, at, units, 0);
        }
    }
}
