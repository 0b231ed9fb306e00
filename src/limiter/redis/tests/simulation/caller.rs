//! The callers of a process: they take charges, wait, refund, give up, and note in the accounts what they were told.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::{sleep, timeout};

use super::ledger::{Claim, Seen};
use super::load::Outcome;
use super::network::Network;
use super::plan::Then;
use super::subject::Subject;
use crate::base::wait::Wait;
use crate::decision::{Decision, Receipt};
use crate::key::Key;
use crate::limiter::redis::connection::link::LONGEST_LISTENING;
use crate::limiter::{Charge, Effect, Refund};
use crate::policy::Policy;
use crate::quota::Algorithm;

/// The time beyond the deadline for which Redis may be silent, with deadlines as short as here.
const SILENCE: Duration = Duration::from_millis(200);

/// The time after its deadline within which a check ends.
const GRACE: Duration = Duration::from_millis(21);

/// A check that takes longer hangs.
pub(super) const HANG: Duration = Duration::from_secs(15);

/// A check and its caller.
pub(super) struct Caller<S> {
    pub(super) network: Network,
    pub(super) process: usize,
    pub(super) limiter: S,
    pub(super) deadline: Duration,
    pub(super) charges: Vec<(Policy, Key, u64, Effect)>,
}

/// A caller without an answer. Dropped, it is one that never gets it.
struct Asks<'a, S: Subject>(Option<&'a Caller<S>>);

impl<S: Subject> Drop for Asks<'_, S> {
    fn drop(&mut self) {
        self.0.into_iter().for_each(Caller::record_unknown);
    }
}

impl<S: Subject> Caller<S> {
    /// Forces the charges.
    pub(super) async fn settle(self) {
        self.network.goes_on(self.process).await;
        let sent = self.network.lock().now();
        let answer = self.answered(self.limiter.settle(&self.charges())).await;
        // It waits behind checks in flight. To Redis each call is listened to until the server was silent for too long, or
        // for so many times as long if the server answers later calls and not this one.
        // Over a store, each has its deadline, and checks with the same keys may have waited for those before it came,
        // and go first.
        let redis = (1 + LONGEST_LISTENING) * (self.deadline + SILENCE);
        let longest = if S::IS_SERVER_KNOWN { redis } else { 3 * self.deadline };
        drop(self.record(sent, longest, sent, answer));
    }

    /// Takes a place, and returns it after a while.
    pub(super) async fn hold(self, number: u64, time: Duration, patience_ms: Option<u64>) {
        self.network.goes_on(self.process).await;
        let (policy, key, cost, _) = &self.charges[0];
        let sent = self.network.lock().now();
        let held = S::hold(&self.limiter, policy, key, *cost);
        let patience = patience_ms.map_or(HANG, Duration::from_millis);
        let Ok(held) = timeout(patience, held).await else {
            let mut state = self.network.lock();
            state.log(format_args!("process {}: caller {number} of {cost} gives up", self.process));
            if patience_ms.is_none() {
                state.ledger.problem(format!("caller {number} waits for ever"));
            }
            return;
        };
        let place = {
            let mut state = self.network.lock();
            let now = state.now();
            // It is asked about before it waits and after, three times if the key is reset each time.
            let longest = policy.quota().wait_in_line() + 6 * (self.deadline + GRACE);
            if now - sent > longest && !state.was_paused(self.process, sent, now) {
                state.ledger.problem(format!("caller {number} waited for {:?}", now - sent));
            }
            let shown = match &held {
                Ok(Ok((_, is_of_fallback))) => {
                    format!("has a place{}", if *is_of_fallback { " of the fallback" } else { "" })
                }
                Ok(Err(denied)) => format!("has no place: {denied:?}"),
                Err(error) => format!("fails: {error}"),
            };
            state.log(format_args!("process {}: caller {number} of {cost} {shown}", self.process));
            let (stored, limit) = (self.limiter.stored(policy, key), policy.quota().limit());
            let asked = (number, self.process, *cost);
            match held {
                Ok(Ok((place, is_of_fallback))) => {
                    state.ledger.record_hold(asked, &stored, limit, sent..=now, is_of_fallback);
                    place
                }
                Ok(Err(denied)) if self.limiter.fell_back(policy, &denied) => {
                    return state.ledger.check_fallback_denial(asked, &stored, limit);
                }
                _ => return,
            }
        };
        sleep(time).await;
        self.network.goes_on(self.process).await;
        {
            let mut state = self.network.lock();
            state.log(format_args!("process {}: caller {number} leaves", self.process));
            state.ledger.record_release(number);
        }
        drop(place);
    }

    pub(super) async fn check(self, then: Then) {
        self.network.goes_on(self.process).await;
        let sent = self.network.lock().now();
        let charges = self.charges();
        let taken = self.limiter.take(&charges);
        let answer = async { taken.await };
        let answer = match then {
            Then::Cancel { after_ms } => match self.answered(timeout(Duration::from_millis(after_ms), answer)).await {
                Ok(answer) => answer,
                Err(_) => {
                    self.network.lock().log(format_args!("process {} gives {} up", self.process, self.costs()));
                    self.record_unknown();
                    return;
                }
            },
            Then::Keep | Then::Refund { .. } => self.answered(answer).await,
        };
        let refunds = self.record(sent, self.deadline, sent, answer);
        if let Then::Refund { after_ms } = then {
            sleep(Duration::from_millis(after_ms)).await;
            self.network.goes_on(self.process).await;
            if !refunds.is_empty() {
                let all = refunds.into_iter().map(|refund| self.record_refund(refund)).collect();
                let refunded = self.answered(self.limiter.refund(all)).await.is_ok();
                if !refunded || !S::ARE_LOST_REFUNDS_KNOWN {
                    self.record_unknown();
                }
                self.network.lock().log(format_args!("process {} refunded: {refunded}", self.process));
            }
        }
    }

    /// Takes the charges while nothing else happens. Returns the wait if they are denied.
    pub(super) async fn ask_in_quiet(&self) -> Option<Duration> {
        let sent = self.network.lock().now();
        let answer = self.limiter.take(&self.charges()).await;
        let wait = match &answer {
            Ok(decision) if self.fell_back(decision) => {
                let words = format!("process {} has not recovered: its fallback decides", self.process);
                self.network.lock().ledger.problem(words);
                None
            }
            Ok(decision) if decision.is_allowed() => None,
            Ok(decision) => match decision.charges()[0].wait() {
                Wait::After(wait) => Some(wait),
                _ => Some(Duration::MAX),
            },
            Err(error) => {
                let words = format!("process {} has not recovered: {error}", self.process);
                self.network.lock().ledger.problem(words);
                None
            }
        };
        self.record(sent, self.deadline, sent, answer);
        wait
    }

    pub(super) fn charges(&self) -> Vec<Charge<'_>> {
        let charges = self.charges.iter();
        charges.map(|(policy, key, cost, effect)| Charge::new(policy, key).cost(*cost).effect(*effect)).collect()
    }

    /// Waits for an answer. If the process is killed meanwhile, it is not known what became of the charges.
    pub(super) async fn answered<T>(&self, answer: impl IntoFuture<Output = T>) -> T {
        let mut asks = Asks(Some(self));
        let answer = answer.await;
        asks.0 = None;
        answer
    }

    /// Whether another limiter made the decision, in place of the one that failed.
    pub(super) fn fell_back(&self, decision: &Decision) -> bool {
        self.charges.iter().zip(decision.charges()).any(|((policy, ..), told)| self.limiter.fell_back(policy, told))
    }

    /// Records that it is not known what became of the charges.
    pub(super) fn record_unknown(&self) {
        for (policy, key, cost, _) in &self.charges {
            let stored = self.limiter.stored(policy, key);
            self.network.lock().ledger.record_unknown(self.process, &stored, *cost);
        }
    }

    /// Returns the words for the charges in the trace.
    fn costs(&self) -> String {
        let charge = |(policy, key, cost, _): &(Policy, Key, u64, Effect)| {
            format!("{cost} of {} for {}", policy.name(), key.as_bytes().escape_ascii())
        };
        self.charges.iter().map(charge).collect::<Vec<_>>().join(", ")
    }

    /// Records what the caller was told. Returns what it can refund. The server took nothing for it before the instant
    /// `since`.
    pub(super) fn record<E: std::fmt::Display>(
        &self,
        sent: Duration,
        deadline: Duration,
        since: Duration,
        answer: Result<Decision, E>,
    ) -> Vec<(usize, Receipt)> {
        let mut state = self.network.lock();
        let (ended, process) = (state.now(), self.process);
        if ended - sent > deadline + GRACE && !state.was_paused(process, sent, ended) {
            let took = ended - sent;
            state.ledger.problem(format!("a check took {took:?}, and its deadline is {deadline:?}"));
        }
        let error = answer.as_ref().err().map(ToString::to_string);
        state.outcomes.push(Outcome { sent, error });
        let mut decision = match answer {
            Ok(decision) => decision,
            Err(error) => {
                state.log(format_args!("process {process} takes {} since {sent:?}: {error}", self.costs()));
                drop(state);
                self.record_unknown();
                return Vec::new();
            }
        };
        state.log(format_args!(
            "process {process} takes {} since {sent:?}: {} {:?}",
            self.costs(),
            decision.is_allowed(),
            decision.charges()
        ));
        let receipts = decision.take_receipts();
        if self.fell_back(&decision) {
            for (((policy, key, ..), told), receipt) in self.charges.iter().zip(decision.charges()).zip(&receipts) {
                let (stored, units) = (self.limiter.stored(policy, key), receipt.as_ref().map_or(0, Receipt::units));
                let share = (told.limit(), policy.quota().limit());
                state.ledger.record_fallback(process, &stored, units, share);
            }
            drop(state);
            self.record_unknown(); // the server may have taken them before
            return receipts.into_iter().enumerate().filter_map(|(at, receipt)| Some((at, receipt?))).collect();
        }
        let shown: Vec<_> = receipts
            .iter()
            .map(|receipt| receipt.as_ref().map(|receipt| (receipt.units(), receipt.at_us(), receipt.part())))
            .collect();
        let charges: Vec<(Bytes, u64)> =
            self.charges.iter().map(|(policy, key, cost, _)| (self.limiter.stored(policy, key), *cost)).collect();
        state.ledger.check(&mut Seen { process, sent: since, ended, charges: &charges, decision: &decision }, &shown);
        receipts.into_iter().enumerate().filter_map(|(at, receipt)| Some((at, receipt?))).collect()
    }

    pub(super) fn record_refund(&self, (at, receipt): (usize, Receipt)) -> Refund {
        let (policy, key, ..) = &self.charges[at];
        let stored = self.limiter.stored(policy, key);
        let mut state = self.network.lock();
        let now = state.now();
        let (process, units, own) = (self.process, receipt.units(), (receipt.at_us(), receipt.part()));
        let (receipt, is_of_fallback) = receipt.unnoted();
        if is_of_fallback {
            state.ledger.record_fallback_refund(process, &stored, Some(units));
        } else {
            // A refund to a queue waits for the one before it. Denials hold until it is sent.
            if policy.quota().algorithm() != Algorithm::LeakyQueue {
                state.ledger.record_freed(process, &stored, now);
            }
            state.ledger.record_refund(Claim { process, key: stored, units, receipt: own });
        }
        Refund::new(policy.clone(), key.clone(), receipt.noted(is_of_fallback))
    }
}
