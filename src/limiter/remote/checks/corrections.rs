//! Refunds and forced charges, which are sent at once, whether or not a caller waits for the answer.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::future::join_all;
use tokio::sync::oneshot;

use super::taking::{NotTaken, put_together, take_out, tries};
use super::{CheckReply, Checks, put_bids};
use crate::decision::Decision;
use crate::event::LimiterEvent;
use crate::limiter::queue_refunds::is_queue;
use crate::limiter::remote::backend::{Answer, Backend, Intent, RemoteError};
use crate::limiter::remote::set::{self, Set};
use crate::limiter::remote::tag::Tag;
use crate::limiter::remote::unanswered::Unanswered;
use crate::limiter::{Charge, Refund, Reply};

/// The result of a refund.
pub(super) type Refunded<B> = Result<(), <B as Backend>::Error>;

impl<B: Backend> Checks<B> {
    /// Sends refunds before `refund` returns.
    pub(crate) fn refund(self: &Arc<Self>, refunds: Vec<Refund>) -> CheckReply<(), B> {
        if let Some(error) = refunds.iter().find_map(|refund| self.backend.refuses_policy(&refund.policy)) {
            return Reply::Now(Err(error));
        }
        match all(refunds.into_iter().map(|refund| self.send_refund(refund))) {
            Ok(answers) => Reply::Later(Box::pin(async move { join_all(answers).await.into_iter().collect() })),
            Err(error) => Reply::Now(Err(error)),
        }
    }

    /// Sends forced charges before `settle` returns. Forced charges do not use the units of leases.
    pub(crate) fn settle(self: &Arc<Self>, charges: &[Charge<'_>]) -> CheckReply<Decision, B> {
        if let Some(error) = self.refuses(charges) {
            return Reply::Now(Err(error));
        }
        let (mut set, mut bids) = (self.set(charges), Vec::new());
        let bid = |at: usize, key| self.bid(key, &charges[at], at, &mut bids);
        let parts = self.parts(Intent::Take, charges, |_| true, bid);
        put_bids(&mut set, bids);
        let sent = parts.into_iter().map(|part| self.settle_part(part.request, take_out(&mut set, &part.indices)));
        match all(sent) {
            Ok(answers) => Reply::Later(Box::pin(async move { put_together(join_all(answers).await) })),
            Err(error) => Reply::Now(Err(error)),
        }
    }

    /// Sends forced charges of one lane. The caller may wait for the answers.
    fn settle_part(
        self: &Arc<Self>,
        request: B::Request,
        set: Set,
    ) -> Result<impl Future<Output = Result<Set, B::Error>> + use<B>, B::Error> {
        let (sender, answer) = oneshot::channel();
        let tries = tries(&set);
        self.send_forced(request, set, (sender, tries))?;
        Ok(async { answer.await.unwrap_or_else(|_| Err(Unanswered::RuntimeEnded.into())) })
    }

    /// Sends forced charges of one lane. If a key of these charges was reset after this process took units of it,
    /// the charges are sent again, at most `tries` times in all.
    fn send_forced(
        self: &Arc<Self>,
        request: B::Request,
        mut set: Set,
        (sender, tries): (oneshot::Sender<Result<Set, B::Error>>, usize),
    ) -> Result<(), B::Error> {
        set.iter_mut().filter_map(|pending| pending.bid.as_mut()).for_each(|bid| bid.record_sending());
        let checks = Arc::clone(self);
        self.correct(request, move |answer| {
            let mut answered = checks.put_answer(&mut set, answer);
            if matches!(answered, Err(NotTaken::Refused)) && tries > 1 {
                match checks.request_again(&mut set) {
                    // Reports the error here, because the caller only learns that there was no answer.
                    Ok(request) => return drop(checks.send_forced(request, set, (sender, tries - 1))),
                    Err(error) => answered = Err(NotTaken::Failed(error)),
                }
            }
            let answered = answered.map_err(NotTaken::into_error);
            if let Err(Ok(mut set)) = sender.send(answered.map(|_| set)) {
                // The caller has gone, so this task returns the held units, which nobody else can return.
                set.retain(|pending| pending.policy().limits_in_flight());
                checks.send_refunds(set::undo(&mut set));
            }
        })
    }

    /// Sends the refunds of a refused or failed set. If a refund cannot be sent, its units come back with time, as
    /// used units do.
    pub(super) fn send_refunds(self: &Arc<Self>, refunds: Vec<Refund>) {
        for refund in refunds {
            drop(self.send_refund(refund));
        }
    }

    /// Sends a refund at once, or after the earlier refunds of the same queue. The caller may wait for the result.
    fn send_refund(self: &Arc<Self>, refund: Refund) -> Result<impl Future<Output = Refunded<B>> + use<B>, B::Error> {
        let (sender, result) = oneshot::channel();
        if refund.policy.limits_in_flight() {
            self.return_place(&refund, sender)?;
        } else if is_queue(refund.policy.quota()) {
            let tag = self.tags.named(&refund.policy, &refund.key);
            if self.queue_refunds.add(tag, refund, sender) {
                self.send_next_refund(tag)?;
            } else {
                let given_up = self.queue_refunds.give_up_oldest(tag).len();
                if given_up > 0 {
                    self.report_lost(given_up, &Unanswered::RefundNotSent.into());
                }
            }
        } else {
            let request = self.refund_request(&refund);
            self.correct(request, |answer| drop(sender.send(done(answer))))?; // the caller may have gone
        }
        Ok(async move { result.await.unwrap_or_else(|_| Err(Unanswered::RefundNotSent.into())) })
    }

    /// Sends the next refund of a queue. When that refund is answered, the refund after it is sent.
    fn send_next_refund(self: &Arc<Self>, tag: Tag) -> Refunded<B> {
        let mut result = Ok(());
        while let Some((refund, callers)) = self.queue_refunds.next(tag) {
            let checks = Arc::downgrade(self);
            // Either this loop or the callback of the answer sends the next refund: the one that gets here later.
            // If the runtime has ended, `correct` itself calls the callback, so the loop gets here later. If the
            // callback sent the next refund even then, this function would recurse once for each refund.
            let is_later = Arc::new(AtomicBool::new(false));
            let answer_is_later = Arc::clone(&is_later);
            let sent = self.correct(self.refund_request(&refund), move |answer| {
                let checks = checks.upgrade();
                if let (Ok(Answer::Behind), Some(checks)) = (&answer, &checks) {
                    checks.queue_refunds.keep(tag, refund, checks.denials.now());
                }
                let refunded = done(answer);
                callers.into_iter().for_each(|caller| drop(caller.send(refunded.clone()))); // it may have gone
                if let Some(checks) = checks.filter(|_| answer_is_later.swap(true, Ordering::AcqRel)) {
                    let _ = checks.send_next_refund(tag); // the errors are reported
                }
            });
            match sent {
                Ok(()) if !is_later.swap(true, Ordering::AcqRel) => return result,
                Ok(()) => {}
                Err(error) => result = result.and(Err(error)),
            }
        }
        result
    }

    fn refund_request(&self, refund: &Refund) -> B::Request {
        self.denials.forget(&refund.policy, &refund.key);
        self.backend.refund(refund)
    }

    /// Sends a refund or a forced charge at once, and passes its answer to a function. If the correction is
    /// lost, the observers get an event, whether or not a caller waits.
    fn correct(
        self: &Arc<Self>,
        request: B::Request,
        then: impl FnOnce(Result<Answer<B::Error>, B::Error>) + Send + 'static,
    ) -> Result<(), B::Error> {
        let (checks, charges) = (Arc::clone(self), B::keys(&request));
        let sent = self.send(request, move |answer| {
            match &answer {
                Ok(Answer::Split(_, Some(error))) | Err(error) => checks.report_lost(charges, error),
                Ok(_) => {}
            }
            then(answer);
        });
        sent.inspect_err(|error| self.report_lost(charges, error))
    }

    /// Reports to the observer that a correction of this number of charges is lost.
    fn report_lost(&self, charges: usize, error: &B::Error) {
        let kind = error.kind();
        self.backend.events().report(|| LimiterEvent::correction_lost(charges, kind));
    }
}

/// Sends all of these corrections, even if one of them cannot be sent.
fn all<T, E>(sent: impl Iterator<Item = Result<T, E>>) -> Result<Vec<T>, E> {
    let sent: Vec<_> = sent.collect();
    sent.into_iter().collect()
}

/// Returns whether a refund or a reset was done.
pub(super) fn done<E: From<Unanswered>>(answer: Result<Answer<E>, E>) -> Result<(), E> {
    match answer? {
        Answer::Done | Answer::Behind | Answer::Missing | Answer::Refused(..) => Ok(()),
        Answer::Decided(_) | Answer::Repeated(_) | Answer::Split(..) | Answer::Elsewhere | Answer::Outside(_) => {
            Err(Unanswered::Misunderstood.into())
        }
    }
}
