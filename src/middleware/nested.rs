//! Nested layers: each keeps what it took, unless it was told to refund what a limit within refuses.
//!
//! A layer that refunds puts a [`NestedToken`] into the extensions of each request that it lets pass. A layer within that
//! refuses the request for its rate spends the token. Only a refusal looks for a token, so a request that passes pays
//! nothing for layers that do not refund.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use http::{Extensions, Request};
use smallvec::SmallVec;
use tower_service::Service;

use super::charging::Shared;
use super::decided::{Answer, Answered, Decided, OwnedCharge};
use crate::decision::{self, ChargeDecision, Receipt};
use crate::limiter::{Limiter, Refund};
use crate::outcome::{Outcome, OutcomeKind};

/// The token of the layers that refund, in a request's extensions: the counters of each, the outermost first. A copy of the
/// request has a copy of the token.
pub(super) struct NestedToken(SmallVec<[Arc<Copies>; 2]>);

/// Counts the copies of a request that no limit within a layer has refused.
pub(super) struct Copies(AtomicUsize);

impl NestedToken {
    /// Puts a layer's counter into a request's extensions.
    fn put(extensions: &mut Extensions) -> Arc<Copies> {
        let copies = Arc::new(Copies(AtomicUsize::new(1)));
        match extensions.get_mut::<Self>() {
            Some(Self(layers)) => layers.push(Arc::clone(&copies)),
            None => {
                extensions.insert(Self(SmallVec::from_iter([Arc::clone(&copies)])));
            }
        }
        copies
    }

    /// Spends the token of a request that is refused, if it carries one and the refusal is a limit's.
    pub(super) fn spend(extensions: &mut Extensions, refusal: OutcomeKind) {
        if !matches!(refusal, OutcomeKind::Limited | OutcomeKind::Blocked) {
            return;
        }
        if let Some(Self(layers)) = extensions.remove() {
            for copies in layers {
                copies.0.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }
}

impl Clone for NestedToken {
    fn clone(&self) -> Self {
        for copies in &self.0 {
            copies.0.fetch_add(1, Ordering::AcqRel);
        }
        Self(self.0.clone())
    }
}

impl Copies {
    /// Whether limits within have refused every copy. Then there is none left to be copied, so it stays so.
    pub(super) fn are_refused(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }
}

impl<L: Limiter> Shared<L> {
    /// Calls the service with a request that passes. Returns the copies of the request if the layer refunds what limits
    /// within refuse.
    #[inline]
    pub(super) fn pass<S, B>(
        self: &Arc<Self>,
        service: &mut S,
        mut request: Request<B>,
        decided: &mut Decided,
    ) -> (S::Future, Option<Arc<Copies>>)
    where
        S: Service<Request<B>>,
    {
        if self.has_to_tell(decided) {
            request = self.tell_of(request, decided);
        }
        if self.afters.is_some() {
            self.open(&mut request, decided);
        }
        if self.watch.looks() {
            self.look_for_double_charge(request.extensions_mut(), decided);
        }
        let copies = self.settings.refund_nested.then(|| NestedToken::put(request.extensions_mut()));
        (service.call(request), copies)
    }

    /// Tells of a request that passes, and lets it carry its outcome if it is to.
    #[inline(never)]
    fn tell_of<B>(&self, request: Request<B>, decided: &Decided) -> Request<B> {
        let (mut parts, body) = request.into_parts();
        if let Some(outcome) = self.tell(&parts, decided) {
            // What an outer layer degraded is not served in full because this one has nothing against it.
            let degraded = parts.extensions.get().is_some_and(|outer: &Outcome| outer.kind().is_told());
            if decided.is_told() || !degraded {
                parts.extensions.insert(outcome);
            }
        }
        Request::from_parts(parts, body)
    }

    /// Refunds what a request took if limits within refused it.
    #[inline(never)]
    pub(super) fn refund_refused(&self, decided: &mut Decided, copies: &Copies) {
        if copies.are_refused() {
            self.take_back(decided);
        }
    }

    /// Refunds what a request took, and finds out how the policies stand then: from a limiter that answers at once, else by
    /// what was refunded.
    #[cold]
    pub(super) fn take_back(&self, decided: &mut Decided) {
        let (mut refunds, mut taken) = (Vec::new(), SmallVec::<[u64; decision::INLINE]>::new());
        each_answer(decided, |charge, decision| {
            let receipt = decision.take_receipt();
            taken.push(receipt.as_ref().map_or(0, Receipt::units));
            if let (Some(receipt), Some(policy)) = (receipt, self.policy_now(charge.policy)) {
                refunds.push(Refund::new(policy, charge.key.clone(), receipt));
            }
        });
        if refunds.is_empty() {
            return;
        }
        self.refund_all(refunds);
        let mut taken = taken.into_iter();
        each_answer(decided, |charge, decision| {
            let Some(units) = taken.next().filter(|units| *units > 0) else { return };
            *decision = self.stands(charge, decision, units);
        });
    }
}

/// What was charged, and answered; nothing of it is settled any more.
fn each_answer(decided: &mut Decided, mut tell: impl FnMut(&OwnedCharge, &mut ChargeDecision)) {
    match &mut decided.answer {
        Answer::Nothing | Answer::Owed(_) => {}
        Answer::One { charge, decision } => tell(charge, decision),
        Answer::Several(record) => {
            let Answered { charges, decision: Some(decision) } = record.dismiss() else { return };
            for (at, charge) in charges.as_slice().iter().enumerate() {
                if let Some(decision) = decision.charge_mut(at) {
                    tell(charge, decision);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A request's extensions within two layers that refund, and what these count.
    fn two() -> (Extensions, [Arc<Copies>; 2]) {
        let mut extensions = Extensions::new();
        let outer = NestedToken::put(&mut extensions);
        let inner = NestedToken::put(&mut extensions);
        (extensions, [outer, inner])
    }

    fn refuse(extensions: &mut Extensions) {
        NestedToken::spend(extensions, OutcomeKind::Limited);
    }

    fn refused(copies: &[Arc<Copies>; 2]) -> [bool; 2] {
        [copies[0].are_refused(), copies[1].are_refused()]
    }

    #[test]
    fn token_that_no_limit_spent_refunds_nothing() {
        let (extensions, copies) = two();
        assert_eq!(refused(&copies), [false; 2]);
        drop(extensions);
        assert_eq!(refused(&copies), [false; 2]);
    }

    #[test]
    fn refusal_reaches_every_layer_that_refunds() {
        let (mut extensions, copies) = two();
        refuse(&mut extensions);
        assert_eq!(refused(&copies), [true; 2]);
        refuse(&mut extensions);
        assert_eq!(refused(&copies), [true; 2], "a request is refused once");
    }

    #[test]
    fn only_refusals_by_a_limit_spend_a_token() {
        for kind in [OutcomeKind::KeyMissing, OutcomeKind::Denied, OutcomeKind::FailedClosed, OutcomeKind::Overflowed] {
            let (mut extensions, copies) = two();
            NestedToken::spend(&mut extensions, kind);
            assert_eq!(refused(&copies), [false; 2], "{kind:?}");
        }
        for kind in [OutcomeKind::Limited, OutcomeKind::Blocked] {
            let (mut extensions, copies) = two();
            NestedToken::spend(&mut extensions, kind);
            assert_eq!(refused(&copies), [true; 2], "{kind:?}");
        }
    }

    #[test]
    fn every_copy_of_a_request_has_to_be_refused() {
        let (mut first, copies) = two();
        let mut second = first.clone();
        refuse(&mut first);
        assert_eq!(refused(&copies), [false; 2]);
        let mut third = second.clone();
        refuse(&mut second);
        assert_eq!(refused(&copies), [false; 2]);
        refuse(&mut third);
        assert_eq!(refused(&copies), [true; 2]);
    }

    /// A service may send a request through its layers again and again.
    #[test]
    fn token_of_very_many_layers_is_dropped_without_recursion() {
        let mut extensions = Extensions::new();
        let mut outermost = None;
        for _ in 0..300_000 {
            let copies = NestedToken::put(&mut extensions);
            outermost.get_or_insert(copies);
        }
        refuse(&mut extensions);
        assert!(outermost.is_some_and(|copies| copies.are_refused()));
    }

    #[test]
    fn copies_between_two_layers_are_counted_by_the_outer_one() {
        let mut first = Extensions::new();
        let outer = NestedToken::put(&mut first);
        let mut second = first.clone();
        let inner = [NestedToken::put(&mut first), NestedToken::put(&mut second)];
        refuse(&mut first);
        assert_eq!(refused(&inner), [true, false]);
        assert!(!outer.are_refused());
        refuse(&mut second);
        assert!(outer.are_refused());
    }
}
