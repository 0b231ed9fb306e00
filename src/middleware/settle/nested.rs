//! Nested layers: each layer keeps its charges, unless it is set to refund requests that an inner limit
//! refuses.
//!
//! A layer that refunds puts a [`NestedToken`] into the extensions of each request that it passes on. An inner layer
//! that refuses the request because of its rate spends the token. Only a refusal looks for a token, so layers that
//! do not refund cost a passing request nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use http::Extensions;
use smallvec::SmallVec;

use crate::outcome::OutcomeKind;

/// A token in a request's extensions, with a counter of each layer that refunds, the outermost first. A copy of the
/// request has a copy of the token.
pub(crate) struct NestedToken(SmallVec<[Arc<Copies>; 2]>);

/// Counts the copies of a request, without those that a limit within the layer has refused.
pub(crate) struct Copies(AtomicUsize);

impl NestedToken {
    /// Puts a layer's counter into a request's extensions.
    pub(crate) fn put(extensions: &mut Extensions) -> Arc<Copies> {
        let copies = Arc::new(Copies(AtomicUsize::new(1)));
        match extensions.get_mut::<Self>() {
            Some(Self(layers)) => layers.push(Arc::clone(&copies)),
            None => {
                extensions.insert(Self(SmallVec::from_iter([Arc::clone(&copies)])));
            }
        }
        copies
    }

    /// Spends the token of a refused request, if it carries a token and the reason for the refusal
    /// is a limit.
    pub(crate) fn spend(extensions: &mut Extensions, refusal: OutcomeKind) {
        if !refusal.is_refunded_outside() {
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
    /// Returns whether inner limits have refused every copy of the request. Once the result is true, it stays true,
    /// because no copy is left to clone.
    pub(crate) fn are_refused(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
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
