//! Splits a request whose keys are on two servers into a request for each key, and joins their answers.

use super::RedisAnswer;
use super::charge::WireCharge;
use super::request::{WireOperation, WireRequest};
use crate::decision::{ChargeDecision, Decision, Several};
use crate::limiter::redis::error::RedisError;

/// The answers to the charges of a request so far.
pub(in crate::limiter::redis) struct SplitAnswers<'a> {
    whole: &'a WireRequest,
    decisions: Vec<Option<ChargeDecision>>,
    failed: Option<RedisError>,
}

impl<'a> SplitAnswers<'a> {
    pub(in crate::limiter::redis) fn new(whole: &'a WireRequest) -> Self {
        Self { whole, decisions: whole.charges.iter().map(|_| None).collect(), failed: None }
    }

    /// Returns the next request and its index, unless all requests are answered or a request has failed.
    ///
    /// A strike cannot be refunded. So the charges that may still refuse the request come first. If one of them
    /// refuses the request, a strike is not taken, unless the strike's quota counts refused requests.
    pub(in crate::limiter::redis) fn next(&self) -> Option<(usize, WireRequest)> {
        let open = || (0..self.decisions.len()).filter(|at| self.decisions[*at].is_none());
        let partners = |at: usize| self.whole.charges[at].partners.as_ref();
        let may_refuse = |at: &usize| {
            let known = |place: usize| self.decisions[place].is_some();
            partners(*at).is_some_and(|partners| partners.binds && partners.places.clone().all(known))
        };
        let first = open().find(|at| partners(*at).is_none()).or_else(|| open().find(may_refuse));
        let at = first.or_else(|| open().next()).filter(|_| self.failed.is_none())?;
        let mut charge = self.whole.charges[at].clone();
        let refused = self.whole.charges.iter().enumerate().any(|(at, charge)| charge.binds() && self.denied(at));
        let mut operation = self.whole.operation;
        if let Some(partners) = &mut charge.partners {
            partners.refused = partners.places.clone().any(|place| self.denied(place));
            partners.places = 0..0;
            if refused && !partners.outlives {
                operation = WireOperation::Peek;
            }
        }
        Some((at, WireRequest::of(operation, self.whole.slot, vec![charge])))
    }

    /// Returns whether the charge is known to be denied.
    fn denied(&self, at: usize) -> bool {
        self.decisions[at].as_ref().is_some_and(|decision| !decision.is_allowed())
    }

    pub(in crate::limiter::redis) fn answer(&mut self, at: usize, answer: Result<RedisAnswer, RedisError>) {
        match answer {
            Ok(RedisAnswer::Decided(decision)) => {
                debug_assert!(decision.charges().len() == 1, "a request of one key has one decision");
                self.decisions[at] = decision.into_charges().next();
                if self.decisions[at].is_none() {
                    self.failed = Some(super::nonsense()); // or it would be asked again for ever
                }
            }
            Ok(_) => self.failed = Some(super::nonsense()),
            Err(error) => self.failed = Some(error),
        }
    }

    /// Returns the answer to the whole request. If the request is refused or has failed, the caller has to
    /// refund the request's receipts.
    pub(in crate::limiter::redis) fn together(mut self) -> RedisAnswer {
        let binds = |(at, charge): (usize, &WireCharge)| {
            charge.binds() && !self.decisions[at].as_ref().is_some_and(ChargeDecision::is_allowed)
        };
        let allowed = self.failed.is_none() && !self.whole.charges.iter().enumerate().any(binds);
        let denied: Vec<bool> = (0..self.decisions.len()).map(|at| self.denied(at)).collect();
        let mut decisions = Several::new();
        for (charge, decision) in self.whole.charges.iter().zip(&mut self.decisions) {
            let mut decision = decision.take().unwrap_or_else(ChargeDecision::blank);
            if !allowed && charge.outlives_refusal() {
                decision.untaken(); // it stays
            } else if !allowed && decision.is_allowed() {
                let taken = charge.taken(&decision, |place| denied[place]);
                decision.stand(taken);
            }
            decisions.push(decision);
        }
        RedisAnswer::Split(Decision::new(allowed, decisions), self.failed)
    }
}
