//! A request's visit to the line of its key.

use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use http::Response;
use smallvec::SmallVec;

use super::error::ObeyError;
use super::heard::{Heard, unnamed_wait_us};
use super::line::{CannotJoin, Polled};
use super::settings::{ObeySettings, Share};
use super::table::{SharedLine, change};
use crate::base::sync::contained;
use crate::base::time::micros_ceil;
use crate::base::wait::Wait;
use crate::client::Advice;
use crate::decision::{Decision, Receipt};
use crate::key::Key;
use crate::limiter::{BoxLimiter, Charge, Limiter, LimiterError, Refund, Reply};
use crate::policy::Policy;

/// The stage of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Waits,
    /// The request may be sent, with this number.
    MayGo(u64),
    /// The service was called for the request with this number, at this instant in microseconds.
    OnItsWay(u64, u64),
    Over,
}

/// A request's visit to the line of its key, from its call to the head of its response. If the visit is
/// dropped, the request leaves the line. Units that the request took from the client's own quotas are
/// refunded unless the service was called.
pub(super) struct Visit {
    settings: Arc<ObeySettings>,
    line: SharedLine,
    key: Key,
    turn: u64,
    deadline_us: u64,
    stage: Stage,
    /// The charges of the request to the client's own quotas.
    shares: Vec<Share>,
    /// The number of own quotas that have taken their charges of the request.
    taken: usize,
    /// The receipts of the charges to the client's own quotas, each with the index of its quota.
    receipts: SmallVec<[(usize, Policy, Receipt); 1]>,
    /// The instant at which the request departs from the leaky queues among the client's own quotas.
    departs_us: u64,
    /// The instant from which the client's own quotas allow the request, according to their last answer.
    own_us: u64,
    /// How many times the client's own quotas denied the request without a known wait.
    unknown_waits: u32,
}

/// The answer of a limiter of the client's own quotas.
pub(super) type OwnDecision = Result<Decision, LimiterError>;

/// The future of an answer that is not given at once.
pub(super) type LaterAnswer = <BoxLimiter as Limiter>::Future<Decision>;

impl Visit {
    /// Joins the line of the key.
    pub(super) fn begin(
        settings: &Arc<ObeySettings>,
        key: Key,
        shares: Vec<Share>,
        now_us: u64,
    ) -> Result<Self, ObeyError> {
        let Some(line) = settings.line(&key, now_us) else {
            return Err(ObeyError::too_many_keys(&key, settings.max_keys));
        };
        let (max_wait_us, max_waiting) = (settings.max_wait_us(), settings.max_waiting);
        let joined = change(&line, |line, wakers| line.join(now_us, max_wait_us, max_waiting, wakers));
        let (turn, number) = joined.map_err(|no_place| match no_place {
            CannotJoin::TooLong(wait_us) => ObeyError::too_long(&key, wait_us, settings.max_wait),
            CannotJoin::TooMany(wait_us) => ObeyError::too_many_waiting(&key, wait_us, settings.max_waiting),
        })?;
        let stage = number.map_or(Stage::Waits, Stage::MayGo);
        let (settings, deadline_us) = (Arc::clone(settings), now_us.saturating_add(max_wait_us));
        Ok(Self {
            settings,
            line,
            key,
            turn,
            deadline_us,
            stage,
            shares,
            taken: 0,
            receipts: SmallVec::new(),
            departs_us: 0,
            own_us: 0,
            unknown_waits: 0,
        })
    }

    pub(super) fn settings(&self) -> &Arc<ObeySettings> {
        &self.settings
    }

    /// Returns whether the request waits in the line.
    pub(super) fn waits(&self) -> bool {
        self.stage == Stage::Waits
    }

    /// Asks the limiter for the request's charges to the next of the client's own quotas. Returns
    /// `None` if all own quotas have taken their charges.
    pub(super) fn ask(&self) -> Option<Reply<Decision, LimiterError, LaterAnswer>> {
        let share = self.shares.get(self.taken)?;
        debug_assert!(share.own < self.settings.own.len(), "each share belongs to one of the client's own quotas");
        let own = self.settings.own.get(share.own)?;
        let charges = share.policies.iter().map(|policy| Charge::new(policy, &self.key).cost(share.cost));
        Some(own.limiter.take(&charges.collect::<SmallVec<[Charge<'_>; 2]>>()))
    }

    /// Processes the limiter's answer for one own quota. Returns `false` if the quota denied the charge. After a
    /// denial, the units that the request took from other quotas are refunded, and the request waits in the line
    /// again.
    pub(super) fn answered(&mut self, answer: OwnDecision, now_us: u64) -> Result<bool, ObeyError> {
        let at = self.taken;
        debug_assert!(at < self.shares.len(), "each answer belongs to a share that the request asked for");
        let Some(share) = self.shares.get(at) else { return Ok(true) };
        let name = share.policies.first().map_or("", Policy::name);
        let mut decision = answer.map_err(|error| ObeyError::own_quota(name, error))?;
        let is_allowed = decision.is_allowed();
        let (mut wait, mut is_unknown) = (Duration::ZERO, false);
        for (policy, charge) in share.policies.iter().zip(decision.charges_mut()) {
            if is_allowed {
                wait = wait.max(charge.delay());
                self.receipts.extend(charge.take_receipt().map(|receipt| (share.own, policy.clone(), receipt)));
            } else if !charge.is_allowed() {
                let charge_wait = match charge.wait() {
                    Wait::None => Duration::ZERO,
                    Wait::Unknown => Duration::from_micros(unnamed_wait_us(self.unknown_waits)),
                    Wait::After(charge_wait) => charge_wait,
                    Wait::Never => return Err(ObeyError::never(policy, share.cost)),
                };
                is_unknown |= charge.wait() == Wait::Unknown;
                wait = wait.max(charge_wait);
            }
        }
        self.unknown_waits = self.unknown_waits.saturating_add(u32::from(is_unknown));
        let until_us = now_us.checked_add(micros_ceil(wait));
        match until_us {
            // Waits at least 1 µs, because a wait of zero would make this a busy loop.
            Some(until_us) if !is_allowed => {
                self.refund();
                (self.taken, self.departs_us) = (0, 0);
                self.wait_until(until_us.max(now_us.saturating_add(1)));
                Ok(false)
            }
            // A timer that cannot sleep reports `Duration::MAX` as its time.
            _ => {
                self.taken += 1;
                self.departs_us = self.departs_us.max(until_us.unwrap_or(0));
                Ok(true)
            }
        }
    }

    /// Makes the request wait in the line until its departure from the leaky queues among the client's own quotas.
    /// Returns `false` if the request need not wait.
    pub(super) fn waits_for_departure(&mut self, now_us: u64) -> bool {
        let departs_us = std::mem::take(&mut self.departs_us);
        if departs_us > now_us {
            self.wait_until(departs_us);
        }
        departs_us > now_us
    }

    /// Refunds the units that the request took from the client's own quotas, the last first.
    fn refund(&mut self) {
        while let Some(last) = self.receipts.last().map(|(own, ..)| *own) {
            let first = self.receipts.iter().position(|(own, ..)| *own == last).unwrap_or(0);
            let refunds = self.receipts.drain(first..);
            let refunds = refunds.map(|(_, policy, receipt)| Refund::new(policy, self.key.clone(), receipt)).collect();
            // A limiter sends the refund before `refund` returns, so the reply can be dropped.
            contained(|| drop(self.settings.own.get(last).map(|own| own.limiter.refund(refunds))));
        }
    }

    /// Polls a request that waits in the line. Returns the instant until which the request sleeps, or
    /// `None` if the request may leave the line.
    pub(super) fn poll(&mut self, now_us: u64, waker: &Waker) -> Result<Option<u64>, ObeyError> {
        let waker = waker.clone();
        let turn = self.turn;
        let polled = change(&self.line, |line, wakers| line.poll(turn, now_us, waker, wakers));
        match polled {
            Polled::Sent(number) => {
                self.stage = Stage::MayGo(number);
                Ok(None)
            }
            Polled::Sleeps(until_us) => Ok(Some(until_us)),
            Polled::TooLong(wait_us) => {
                self.stage = Stage::Over;
                let wait_us = wait_us.max(self.own_us.saturating_sub(now_us));
                Err(ObeyError::too_long(&self.key, wait_us, self.settings.max_wait))
            }
        }
    }

    /// Puts the request back into the line, because the client's own quotas do not admit it before
    /// `own_us`.
    fn wait_until(&mut self, own_us: u64) {
        debug_assert!(matches!(self.stage, Stage::MayGo(_)), "only a request in stage `MayGo` asks the quotas");
        let Stage::MayGo(number) = self.stage else { return };
        let (turn, deadline_us) = (self.turn, self.deadline_us);
        (self.stage, self.own_us) = (Stage::Waits, own_us);
        change(&self.line, |line, wakers| line.put_back(turn, number, own_us, deadline_us, wakers));
    }

    /// Records that the request is sent. If a pause has begun since the request left the line, puts the
    /// request back into the line and returns `false`. The request goes back into the line even if the
    /// pause is already over. If requests did not go back, all requests that wait for the service would
    /// be sent at once after the pause.
    pub(super) fn go(&mut self, now_us: u64) -> bool {
        debug_assert!(matches!(self.stage, Stage::MayGo(_)), "a request is sent only once, from the stage `MayGo`");
        let Stage::MayGo(number) = self.stage else { return self.stage != Stage::Waits };
        let (turn, deadline_us) = (self.turn, self.deadline_us);
        let goes = change(&self.line, |line, wakers| {
            let goes = line.is_news(number);
            if goes {
                line.has_asked(turn, now_us, wakers);
            } else {
                line.put_back(turn, number, 0, deadline_us, wakers);
            }
            goes
        });
        self.stage = if goes { Stage::OnItsWay(number, now_us) } else { Stage::Waits };
        if goes {
            self.receipts.clear(); // used up
        }
        goes
    }

    /// Passes the head of the response to the line.
    pub(super) fn hear<R>(mut self, response: &Response<R>) {
        debug_assert!(
            matches!(self.stage, Stage::OnItsWay(..)),
            "a response is noted only for a request that was sent"
        );
        let Stage::OnItsWay(number, sent_us) = self.stage else { return };
        let settings = Arc::clone(&self.settings);
        let (now_us, wall) = (settings.now_us(), settings.clock.now().into());
        let advice = Advice::read(response.headers(), wall);
        let mut heard = Heard::new(response.status(), response.headers(), &advice);
        heard.spacing_us = if settings.paces { heard.spacing_us.min(settings.max_wait_us()) } else { 0 };
        heard.took_us = now_us.saturating_sub(sent_us);
        self.stage = Stage::Over;
        let lengthen = |wait_us| settings.jitter.lengthen(wait_us);
        change(&self.line, |line, wakers| line.hear(number, now_us, &heard, lengthen, wakers));
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        let turn = self.turn;
        match self.stage {
            Stage::Waits => change(&self.line, |line, wakers| line.leave(turn, wakers)),
            Stage::MayGo(number) => change(&self.line, |line, wakers| line.withdraw(turn, number, wakers)),
            Stage::OnItsWay(number, _) => change(&self.line, |line, wakers| line.lose(number, wakers)),
            Stage::Over => {}
        }
        self.refund();
    }
}
