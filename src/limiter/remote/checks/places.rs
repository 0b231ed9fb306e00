//! Units of requests in flight: takes them, returns them, and renews the rows of this process.
//!
//! The arithmetic is in [`holdings`](crate::limiter::remote::holdings). This file makes the calls.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use futures_util::future::join_all;
use tokio::sync::{mpsc, oneshot};

use super::Checks;
use super::corrections::{Refunded, done};
use super::taking::{NotTaken, put_decisions};
use crate::algorithm::places::HELD_MAX;
use crate::decision::Receipt;
use crate::event::LimiterEvent;
use crate::limiter::remote::backend::{Answer, Backend, ROW_MISSING};
use crate::limiter::remote::holdings::{Bid, Claim, HeldKey, RecordedTake, Return, Returned};
use crate::limiter::remote::set::Set;
use crate::limiter::{Charge, Effect, LeftLine, Refund};

/// The maximum number of rows that are renewed at a time, so that a check waits for at most one call of
/// renewals.
const RENEWALS: usize = 64;

/// The number of times that renewals are checked within the time after which places lapse.
const LOOKS: u32 = 30;

impl<B: Backend> Checks<B> {
    /// Begins to take units that are held.
    pub(super) fn bid(&self, key: HeldKey, charge: &Charge<'_>, at: usize, bids: &mut Vec<(usize, Box<Bid>)>) -> Claim {
        let is_possible = charge.effect == Effect::Force || charge.cost <= charge.policy.quota().capacity();
        let units = if is_possible { charge.cost.min(HELD_MAX) } else { 0 };
        let (claim, bid) = self.holdings.bid(key, units, self.connection_changes());
        bids.push((at, Box::new(bid)));
        Claim { standing: self.lines.standing(charge), ..claim }
    }

    /// Returns the claim for a charge that only looks at held units.
    pub(super) fn look(&self, charge: &Charge<'_>) -> Claim {
        Claim { holder: self.holdings.holder(), standing: self.lines.standing(charge), ..Claim::default() }
    }

    /// Puts the answer to a request into its charges. Returns whether the store decided the charges in one
    /// step.
    ///
    /// # Errors
    /// Returns the reason why there is no answer. In that case the set has the receipts of the charges that were
    /// taken nevertheless.
    pub(super) fn put_answer(
        self: &Arc<Self>,
        set: &mut Set,
        answer: Result<Answer<B::Error>, B::Error>,
    ) -> Result<bool, NotTaken<B::Error>> {
        if let Ok(Answer::Refused(place, row)) = answer {
            for (at, pending) in set.iter_mut().enumerate() {
                if let Some(bid) = pending.bid.take() {
                    self.record_landed(if at == place { bid.refused(row) } else { bid.land(0, false) });
                }
            }
            return Err(NotTaken::Refused);
        }
        let answered = put_decisions(set, answer);
        for pending in set.iter_mut() {
            let (Some(bid), Some(decision)) = (pending.bid.take(), &mut pending.decision) else { continue };
            let taken = decision.taken();
            // Without an answer, it is unknown whether the other charges of the set were taken.
            if answered.is_ok() || taken > 0 {
                let is_missing = decision.receipt().at_us() == ROW_MISSING;
                let landed = bid.land(taken, is_missing);
                decision.put_receipt(Receipt::new(taken, landed.run, 0));
                self.record_landed(landed);
            }
        }
        Ok(answered?)
    }

    fn record_landed(self: &Arc<Self>, landed: RecordedTake) {
        if let Some(surplus) = landed.surplus {
            drop(self.send_return(&surplus, |_| ())); // a loss is recorded
        }
        self.report_forgotten(landed.forgotten);
    }

    /// Returns the units of a receipt to the store, and passes the result to `sender`.
    pub(super) fn return_place(
        self: &Arc<Self>,
        refund: &Refund,
        sender: oneshot::Sender<Refunded<B>>,
    ) -> Result<(), B::Error> {
        self.denials.forget(&refund.policy, &refund.key);
        let stored = self.backend.stored(&refund.policy, &refund.key);
        let (run, units) = (refund.receipt.at_us(), refund.receipt.units());
        let key = self.backend.held_key(&refund.policy, &stored);
        let waits = (!self.lines.is_empty()).then(|| (self.lines.clone(), refund.policy.clone(), refund.key.clone()));
        let returned = move |result| {
            if let Some((lines, policy, key)) = waits {
                lines.wake_first(&policy, &key);
            }
            drop(sender.send(result)); // the caller may have gone
        };
        match key.and_then(|key| self.holdings.return_units(key, run, units, self.connection_changes())) {
            Some(back) => self.send_return(&back, returned),
            None => {
                returned(Ok(())); // it was reset
                Ok(())
            }
        }
    }

    /// Returns units to the store, or renews a row, at once. The answer is recorded, and then passed to `then`.
    fn send_return(
        self: &Arc<Self>,
        back: &Return,
        then: impl FnOnce(Refunded<B>) + Send + 'static,
    ) -> Result<(), B::Error> {
        let request = self.backend.return_units(back);
        let (checks, key) = (Arc::clone(self), back.key.clone());
        let answered = move |answer: Result<Answer<B::Error>, B::Error>| {
            let returned = match &answer {
                Ok(Answer::Missing) => Returned::Missing,
                Ok(Answer::Refused(_, row)) => Returned::Refused(*row),
                Ok(_) => Returned::Done,
                Err(_) => Returned::Lost,
            };
            checks.report_forgotten(checks.holdings.record_return(&key, returned));
            then(done(answer));
        };
        // The next call for the key corrects a lost return, so a lost return is not reported as a lost correction.
        self.send(request, answered).inspect_err(|_| _ = self.holdings.record_return(&back.key, Returned::Lost))
    }

    /// Reports to the observer that the store had forgotten this number of units, which this process holds.
    fn report_forgotten(&self, units: u64) {
        if units > 0 {
            self.backend.events().report(|| LimiterEvent::places_forgotten(units));
        }
    }

    /// Sends these returns, at most [`RENEWALS`] at a time, and waits for the answers.
    async fn return_and_wait(self: &Arc<Self>, all: Vec<Return>) {
        let mut all = all.into_iter().peekable();
        while all.peek().is_some() {
            let answers = all.by_ref().take(RENEWALS).filter_map(|back| {
                let (sender, answer) = oneshot::channel();
                self.send_return(&back, |result| drop(sender.send(result))).ok()?;
                Some(answer)
            });
            join_all(answers.collect::<Vec<_>>()).await;
        }
    }

    /// Returns all units that this process holds, and then ends the connections. Later checks fail.
    pub(crate) fn close(self: &Arc<Self>) {
        if self.is_closed.swap(true, Ordering::Relaxed) {
            return; // the units may be under way, and need the connections
        }
        let held = self.holdings.return_all();
        if held.is_empty() {
            return self.backend.close();
        }
        let checks = Arc::clone(self);
        self.backend.runtime().spawn(async move {
            checks.return_and_wait(held).await;
            checks.backend.close();
        });
    }

    /// Starts the tasks that refund the remaining units of leases, renew the rows of this process, and report
    /// abandoned lines, until the limiter is dropped.
    pub(super) fn start_upkeep(self: &Arc<Self>, left: mpsc::Receiver<LeftLine>) {
        if self.has_leases() {
            self.backend.runtime().spawn(Self::refund_leases(Arc::downgrade(self)));
        }
        self.backend.runtime().spawn(Self::renew_places(Arc::downgrade(self)));
        self.backend.runtime().spawn(Self::leave_lines(Arc::downgrade(self), left));
    }

    /// Tells the store of each line that this process has left, so that the store keeps no units for the
    /// line.
    async fn leave_lines(limiter: Weak<Self>, mut left: mpsc::Receiver<LeftLine>) {
        let mut lines = Vec::new();
        while left.recv_many(&mut lines, RENEWALS).await > 0 {
            let Some(checks) = limiter.upgrade() else { return };
            let all = lines.drain(..).filter_map(|line| checks.leave_line(&line)).collect();
            checks.return_and_wait(all).await;
        }
    }

    /// Returns the call which says that this process has left a line, unless another request waits there by now.
    fn leave_line(&self, (policy, key): &LeftLine) -> Option<Return> {
        let stored = self.backend.stored(policy, key);
        let held = self.backend.held_key(policy, &stored)?;
        let is_said = !self.is_closed.load(Ordering::Relaxed)
            && self.lines.waiting(policy, key) == 0
            && self.backend.error_at_once(held.slot).is_none();
        is_said.then(|| self.holdings.leave_line(held, self.connection_changes()))
    }

    async fn renew_places(limiter: Weak<Self>) {
        let Some(lapse) = limiter.upgrade().map(|checks| checks.holdings.lapse()) else { return };
        let mut ticks = tokio::time::interval(lapse / LOOKS);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let Some(checks) = limiter.upgrade() else { return };
            checks.renew().await;
        }
    }

    /// Renews and corrects the rows of this process that are due.
    async fn renew(self: &Arc<Self>) {
        let mut due = self.holdings.due(self.connection_changes()).into_iter().peekable();
        while due.peek().is_some() && !self.is_closed.load(Ordering::Relaxed) {
            let some = due.by_ref().take(RENEWALS).filter(|key| self.backend.error_at_once(key.slot).is_none());
            let some = some.filter_map(|key| self.holdings.renew(key, self.connection_changes()));
            self.return_and_wait(some.collect()).await;
        }
    }

    fn connection_changes(&self) -> u64 {
        self.backend.events().connection_changes()
    }
}
