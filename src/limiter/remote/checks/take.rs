//! Takes charges, looks at them, and resets keys.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;

use super::corrections::done;
use super::taking::{
    AskOptions, NotTaken, PendingTake, TakeResult, UnsettledTake, put_decisions, put_together, take_out, tries,
};
use super::{CheckReply, Checks, LaneRequest, LaneRequests, put_bids};
use crate::decision::Decision;
use crate::key::Key;
use crate::limiter::remote::backend::{Backend, Intent};
use crate::limiter::remote::tag::Tag;
use crate::limiter::{Charge, Effect, Reply};
use crate::policy::Policy;

impl<B: Backend> Checks<B> {
    /// Takes all charges or none.
    pub(crate) fn take(self: &Arc<Self>, charges: &[Charge<'_>]) -> CheckReply<Decision, B> {
        if let Some(error) = self.refuses(charges) {
            return Reply::Now(Err(error));
        }
        // A set with a charge on refusal always goes to the store as a whole, because the charge on refusal counts the
        // refusals of its set.
        let is_paired = charges.iter().any(|charge| matches!(charge.effect, Effect::OnRefusal { .. }));
        if let Some(refusal) = (!is_paired).then(|| self.denials.refusal(charges)).flatten() {
            self.report_answered_locally();
            return Reply::Now(Ok(refusal));
        }
        let mut owed = UnsettledTake { checks: Arc::clone(self), set: self.set(charges) };
        for (charge, pending) in charges.iter().zip(&mut owed.set) {
            if let Some(leases) = self.leases.as_ref().filter(|_| !is_paired) {
                let (granted, wanted) = leases.take(charge);
                pending.decision = granted;
                if let Some(wanted) = wanted {
                    self.lease(leases, wanted);
                }
            }
            if pending.decision.is_none() {
                pending.watch = self.denials.watch(charge);
            }
        }
        let mut bids = Vec::new();
        let mut parts = self.parts(
            Intent::Take,
            charges,
            |at| owed.set[at].decision.is_none(),
            |at, key| self.bid(key, &charges[at], at, &mut bids),
        );
        put_bids(&mut owed.set, bids);
        if parts.is_empty() {
            self.report_answered_locally();
            return Reply::Now(Ok(owed.decide()));
        }
        if let Some(error) = parts.iter().find_map(|part| self.backend.error_at_once(part.lane)) {
            self.report_checked(Duration::ZERO, Some(&error));
            return Reply::Now(Err(error));
        }
        let repeats = !is_paired && !charges.iter().any(|charge| charge.policy.quota().counts_denied());
        // A set of several lanes has a future of its own, because the larger future would not fit the small blocks that
        // an allocator hands out quickly (`benches/redis.rs`, "clients, 1 in flight").
        match parts.pop() {
            Some(only) if parts.is_empty() => Reply::Later(Box::pin(Arc::clone(self).taken(only, owed, repeats))),
            last => {
                parts.extend(last);
                Reply::Later(Box::pin(Arc::clone(self).taken_in_lanes(parts, owed, repeats)))
            }
        }
    }

    async fn taken(
        self: Arc<Self>,
        only: LaneRequest<B::Request>,
        mut owed: UnsettledTake<B>,
        repeats: bool,
    ) -> Result<Decision, B::Error> {
        let terms = AskOptions { sent: self.denials.now(), repeats, is_alone: true };
        let part = owed.part(&only.indices);
        let taken = self.take_part(only.request, part, terms).await;
        self.decide_taken([taken], owed, terms)
    }

    async fn taken_in_lanes(
        self: Arc<Self>,
        parts: LaneRequests<B>,
        mut owed: UnsettledTake<B>,
        repeats: bool,
    ) -> Result<Decision, B::Error> {
        let terms = AskOptions { sent: self.denials.now(), repeats, is_alone: false };
        let taken = parts.into_iter().map(|part| {
            let owed = owed.part(&part.indices);
            self.take_part(part.request, owed, terms)
        });
        let taken = join_all(taken).await;
        self.decide_taken(taken, owed, terms)
    }

    /// Puts the answers to a set's requests together.
    fn decide_taken(
        &self,
        answers: impl IntoIterator<Item = Result<TakeResult<B>, NotTaken<B::Error>>>,
        mut owed: UnsettledTake<B>,
        terms: AskOptions,
    ) -> Result<Decision, B::Error> {
        let (mut is_repeated, mut failed) = (false, None);
        for answer in answers {
            let taken = answer.and_then(|taken| {
                let TakeResult { owed: mut part, is_repeated: repeated, result } = taken;
                is_repeated |= repeated;
                owed.set.append(&mut part.set);
                result
            });
            failed = failed.or(taken.err().map(NotTaken::into_error));
        }
        if terms.is_alone && is_repeated {
            self.report_answered_locally();
        } else if self.backend.events().is_observed() {
            self.report_checked(self.denials.now().saturating_since(terms.sent), failed.as_ref());
        }
        if let Some(error) = failed {
            return Err(error);
        }
        owed.set.sort_unstable_by_key(|pending| pending.at);
        Ok(owed.decide())
    }

    /// Takes charges of one lane. The charges are sent once more for each key that was reset after this process took
    /// units of it.
    async fn take_part(
        self: &Arc<Self>,
        mut request: B::Request,
        mut owed: UnsettledTake<B>,
        terms: AskOptions,
    ) -> Result<TakeResult<B>, NotTaken<B::Error>> {
        for _ in 1..tries(&owed.set) {
            let taken = self.ask_for(request, |sender| PendingTake { sender, owed, terms }).await?;
            if !matches!(taken.result, Err(NotTaken::Refused)) {
                return Ok(taken);
            }
            owed = taken.owed;
            request = self.request_again(&mut owed.set)?;
        }
        Ok(self.ask_for(request, |sender| PendingTake { sender, owed, terms }).await?)
    }

    /// Returns the decision that [`take`](Self::take) would return, and takes nothing.
    pub(crate) fn peek(self: &Arc<Self>, charges: &[Charge<'_>]) -> CheckReply<Decision, B> {
        if let Some(error) = self.refuses(charges) {
            return Reply::Now(Err(error));
        }
        let checks = Arc::clone(self);
        let mut set = self.set(charges);
        let parts = self.parts(Intent::Peek, charges, |_| true, |at, _| self.look(&charges[at]));
        let parts: Vec<_> = parts.into_iter().map(|part| (part.request, take_out(&mut set, &part.indices))).collect();
        Reply::Later(Box::pin(async move {
            let peeked = parts.into_iter().map(async |(request, mut set)| {
                put_decisions(&mut set, checks.ask(request).await)?;
                Ok(set)
            });
            put_together(join_all(peeked).await)
        }))
    }

    /// Forgets the state of a key.
    pub(crate) fn reset(self: &Arc<Self>, policy: &Policy, key: &Key) -> CheckReply<(), B> {
        if let Some(error) = self.backend.refuses_policy(policy) {
            return Reply::Now(Err(error));
        }
        let checks = Arc::clone(self);
        let queue = self.tags.named(policy, key);
        let request = self.backend.reset(policy, key);
        let (policy, key) = (policy.clone(), key.clone());
        Reply::Later(Box::pin(async move {
            if let Some(leases) = &checks.leases {
                leases.forget(&policy, &key);
            }
            let ends = EndReset { checks, policy, key, queue };
            let answer = ends.checks.ask(request).await;
            drop(ends);
            done(answer)
        }))
    }
}

/// Forgets what this process knows of a key that is being reset. This happens when the answer to the reset has
/// arrived, or when the caller has gone.
struct EndReset<B: Backend> {
    checks: Arc<Checks<B>>,
    policy: Policy,
    key: Key,
    queue: Tag,
}

impl<B: Backend> Drop for EndReset<B> {
    fn drop(&mut self) {
        self.checks.denials.forget(&self.policy, &self.key);
        self.checks.queue_refunds.forget(self.queue);
        self.checks.lines.wake_first(&self.policy, &self.key);
    }
}
