//! Charges that are settled after the response: by its outcome, or by what the request cost in the end.
//!
//! What was taken is taken before the service is called. From then on a [`Late`] owns the receipts, and whatever becomes of
//! the request, its end is settled once: by the response's head, at the end of its body, or when it is dropped.

use std::cmp::Ordering;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use http::response::Parts;
use http::{Extensions, Method, Request, Response, StatusCode, header};
use smallvec::SmallVec;

use super::after::{After, OnAborted};
use super::bill::{Bill, Item};
use super::body::Body;
use super::charging::Shared;
use super::decided::{Answer, Answered, Decided, OwnedCharge};
use super::nested::Copies;
use super::rule::Rule;
use crate::decision::{ChargeDecision, Receipt};
use crate::key::Key;
use crate::limiter::{Charge, Effect, Limiter, Refund, Reply};
use crate::outcome::LimiterEvent;

/// What the policies of a layer do after the response, in their order.
pub(super) type Afters = Box<[PolicyAfter]>;

pub(super) struct PolicyAfter {
    /// The number of its rule.
    rule: usize,
    after: After,
}

/// Those of the rules, if any rule does anything. The companions come behind, as they do among the layer's policies: a
/// meter counts what its rule charges, and a block what the rule has refused, which nothing takes back.
pub(super) fn afters<'a>(rules: impl Iterator<Item = &'a Rule> + Clone) -> Option<Afters> {
    if rules.clone().all(|rule| rule.after.is_nothing()) {
        return None;
    }
    let numbered = rules.enumerate();
    let own = numbered.clone().flat_map(|(number, rule)| {
        rule.policies.iter().map(move |_| PolicyAfter { rule: number, after: rule.after.clone() })
    });
    let companions = numbered.filter_map(|(number, rule)| {
        let meters = rule.companion.as_ref()?.meters;
        let after = if meters { rule.after.clone() } else { After::default() };
        Some(PolicyAfter { rule: number, after })
    });
    Some(own.chain(companions).collect())
}

/// The answer to several charges. Those that are settled later are here too, so that an answer to one is no larger for it.
pub(super) enum Record {
    Known(Answered),
    /// Some of it is settled after the response.
    Late(Late),
}

impl Record {
    pub(super) fn answered(&self) -> &Answered {
        match self {
            Self::Known(answered) => answered,
            Self::Late(late) => late.answered(),
        }
    }

    /// What is to be given back as it is.
    pub(super) fn dismiss(&mut self) -> &mut Answered {
        match self {
            Self::Known(answered) => answered,
            Self::Late(late) => late.dismiss(),
        }
    }
}

/// A request's charges of which some are not settled. They are when this is dropped.
pub(super) struct Late {
    layer: Arc<dyn Settling>,
    answered: Answered,
    open: SmallVec<[Open; 1]>,
    response: Progress,
}

/// How much of a response there was. A request whose response is not whole was aborted.
#[derive(Default)]
struct Progress {
    method: Method,
    /// Bytes of the body that were handed on.
    sent: u64,
    /// Its bytes in all, as far as the head says so.
    length: Option<u64>,
    is_whole: bool,
}

/// The charges of one rule, which are not settled.
struct Open {
    /// Their places among the charges.
    charges: Range<usize>,
    /// One of the rule's policies.
    policy: usize,
    /// What the request cost in the end, if that is asked.
    item: Option<Arc<Item>>,
}

/// A layer, whatever its limiter.
pub(super) trait Settling: Send + Sync {
    fn after(&self, policy: usize) -> Option<&After>;

    /// Refunds all that was taken.
    fn give_back(&self, decided: Decided);

    /// Gives back units of a charge.
    fn refund(&self, policy: usize, key: &Key, receipt: Receipt);

    /// Takes units, whatever is left.
    fn force(&self, policy: usize, key: &Key, units: u64);

    /// How a policy stands, if the limiter knows at once.
    fn look(&self, policy: usize, key: &Key) -> Option<ChargeDecision>;
}

impl<L: Limiter> Settling for Shared<L> {
    fn give_back(&self, decided: Decided) {
        Self::give_back(self, decided);
    }

    fn after(&self, policy: usize) -> Option<&After> {
        Some(&self.afters.as_deref()?.get(policy)?.after)
    }

    fn refund(&self, policy: usize, key: &Key, receipt: Receipt) {
        if let Some(policy) = self.policy_now(policy) {
            self.refund_all(vec![Refund::new(policy, key.clone(), receipt)]);
        }
    }

    fn force(&self, policy: usize, key: &Key, units: u64) {
        let Some(policy) = self.policy_now(policy) else { return };
        let charge = Charge::new(&policy, key).cost(units).effect(Effect::Force);
        if let Reply::Now(Err(error)) = self.limiter.settle(&[charge]) {
            self.tell_failure(&error);
        }
    }

    fn look(&self, policy: usize, key: &Key) -> Option<ChargeDecision> {
        match self.limiter.peek(&[Charge::new(&self.policy_now(policy)?, key).cost(0)]) {
            Reply::Now(Ok(decision)) => decision.charges().first().cloned(),
            _ => None,
        }
    }
}

impl<L: Limiter> Shared<L> {
    pub(super) fn refund_all(&self, refunds: Vec<Refund>) {
        if let Reply::Now(Err(error)) = self.limiter.refund(refunds) {
            self.tell_failure(&error);
        }
    }

    /// How a charge stands of which so many units were given back, and before that stood as told here: as a limiter says
    /// that answers at once, and else reckoned.
    pub(super) fn stands(&self, charge: &OwnedCharge, told: &ChargeDecision, units: u64) -> ChargeDecision {
        self.look(charge.policy, &charge.key).unwrap_or_else(|| told.with_cost_changed(units, 0))
    }

    #[cold]
    pub(super) fn tell_failure(&self, error: &dyn fmt::Display) {
        if let Some(observer) = &self.settings.observer {
            observer.on_event(&LimiterEvent::Failed { error: error.to_string() });
        }
    }

    /// Before the service is called: what is to be settled is taken over. Where bills are expected each request that passes
    /// has one, also if nothing was charged, so that a handler that asks for it need not know.
    #[inline(never)]
    pub(super) fn open<B>(self: &Arc<Self>, request: &mut Request<B>, decided: &mut Decided) {
        let method = request.method().clone();
        self.take_over(request.extensions_mut(), method, decided);
        let expects = self.afters.iter().flatten().any(|PolicyAfter { after, .. }| after.by_bill);
        if expects && request.extensions().get::<Bill>().is_none() {
            request.extensions_mut().insert(Bill::new());
        }
    }

    /// Takes over what is to be settled. Its bill goes into the extensions of the request, which is of this method.
    pub(super) fn take_over(self: &Arc<Self>, extensions: &mut Extensions, method: Method, decided: &mut Decided) {
        let record = match std::mem::replace(&mut decided.answer, Answer::Nothing) {
            Answer::One { charge, decision } => Record::Known(Answered::of_one(charge, decision)),
            Answer::Several(record) => *record,
            other => {
                decided.answer = other;
                return;
            }
        };
        let answered = match record {
            Record::Known(answered) => answered,
            late @ Record::Late(_) => {
                decided.answer = Answer::Several(Box::new(late));
                return;
            }
        };
        // A request that passes although the limiter failed has taken nothing.
        let open = if answered.decision.is_some() { self.unsettled(&answered) } else { SmallVec::new() };
        if open.is_empty() {
            decided.answer = Answer::Several(Box::new(Record::Known(answered)));
            return;
        }
        let mut bill = Bill::new();
        for Open { policy, item, .. } in &open {
            if let (Some(item), true) = (item, self.after(*policy).is_some_and(|after| after.by_bill)) {
                bill.push(Arc::clone(item));
            }
        }
        if !bill.is_empty() {
            // The layers around this one are still to be told, too.
            if let Some(around) = extensions.get() {
                bill.append(around);
            }
            extensions.insert(bill);
        }
        let layer: Arc<dyn Settling> = Arc::<Self>::clone(self);
        let response = Progress { method, ..Progress::default() };
        let late = Late { layer, answered, open, response };
        decided.answer = Answer::Several(Box::new(Record::Late(late)));
    }

    /// The rules that do something after the response, with what they have charged.
    fn unsettled(&self, answered: &Answered) -> SmallVec<[Open; 1]> {
        let mut open: SmallVec<[Open; 1]> = SmallVec::new();
        let mut last = None;
        for (at, charge) in answered.charges.as_slice().iter().enumerate() {
            let Some(policy) = self.policy(charge.policy) else { continue };
            let Some(PolicyAfter { rule, after }) = self.afters.as_deref().and_then(|all| all.get(charge.policy))
            else {
                continue;
            };
            if after.is_nothing() {
                continue;
            }
            // The charges of a rule are beside each other, its meter's the last.
            if let Some(same) = open.last_mut().filter(|_| last == Some(rule)) {
                same.charges.end = at + 1;
                if let Some(item) = same.item.as_mut().and_then(Arc::get_mut) {
                    item.charge(policy);
                }
                continue;
            }
            last = Some(rule);
            let item = after.is_settled().then(|| Arc::new(Item::new(policy, charge.cost)));
            open.push(Open { charges: at..at + 1, policy: charge.policy, item });
        }
        open
    }

    /// The response to a request whose charges are settled now or later.
    #[inline(never)]
    pub(super) fn finish_late<B: http_body::Body>(
        &self,
        response: Response<B>,
        decided: &mut Decided,
        copies: Option<&Copies>,
    ) -> Response<Body<B>> {
        let refused_within = copies.filter(|copies| copies.are_refused());
        let (parts, body) = response.into_parts();
        if let (Answer::Several(record), None) = (&mut decided.answer, refused_within) {
            if let Record::Late(late) = &mut **record {
                late.see(&parts);
            }
        }
        let mut response = Response::from_parts(parts, ());
        if let Some(copies) = refused_within {
            self.refund_refused(decided, copies);
        }
        self.finish(&mut response, decided);
        if let Answer::Several(record) = std::mem::replace(&mut decided.answer, Answer::Nothing) {
            match *record {
                Record::Late(mut late) if !late.open.is_empty() => {
                    late.expect(body.is_end_stream(), body.size_hint().exact());
                    return response.map(|()| Body::settling(body, Box::new(late)));
                }
                Record::Known(_) | Record::Late(_) => {}
            }
        }
        response.map(|()| Body::inner(body))
    }
}

impl Late {
    pub(super) fn answered(&self) -> &Answered {
        &self.answered
    }

    /// Lets go of everything: what was charged is given back as it is.
    pub(super) fn dismiss(&mut self) -> &mut Answered {
        for open in self.open.drain(..) {
            open.close();
        }
        &mut self.answered
    }

    /// A frame of the body is handed on, with this many bytes; `is_last` if the body says so.
    pub(super) fn count(&mut self, bytes: usize, is_last: bool) {
        let bytes = bytes as u64; // no wider than 64 bits
        for open in &self.open {
            if let (Some(item), true) = (&open.item, self.layer.after(open.policy).is_some_and(|after| after.by_body)) {
                item.add(bytes);
            }
        }
        self.response.sent = self.response.sent.saturating_add(bytes);
        // A server drops a body of known length as soon as it has all of it, and does not ask for its end.
        self.response.is_whole |= is_last || self.response.length.is_some_and(|length| self.response.sent >= length);
    }

    /// The body has ended.
    pub(super) fn complete(&mut self) {
        self.response.is_whole = true;
        self.end();
    }

    /// Settles what is not settled, now that nothing more comes of the response.
    pub(super) fn end(&mut self) {
        for open in std::mem::take(&mut self.open) {
            let on_aborted = self.layer.after(open.policy).map(|after| after.on_aborted).unwrap_or_default();
            let units = match (open.close(), on_aborted) {
                (said, _) if self.response.is_whole => said,
                (said, OnAborted::Keep) => said.filter(|said| *said > open.reserved()),
                (said, OnAborted::Refund) => Some(said.unwrap_or(0)),
            };
            if let Some(units) = units {
                self.settle(&open, units, false);
            }
        }
    }

    /// What the server will ask of the body: nothing if it has ended already, or no more than `length`.
    fn expect(&mut self, has_ended: bool, length: Option<u64>) {
        let Progress { length: told, is_whole, .. } = &mut self.response;
        *told = told.or(length);
        *is_whole |= has_ended || *told == Some(0);
    }

    /// The response's head has come: what depends on nothing else is settled.
    fn see(&mut self, response: &Parts) {
        let length = response.headers.get(header::CONTENT_LENGTH);
        self.response.length = length.and_then(|length| length.to_str().ok()?.parse().ok());
        self.response.is_whole = is_bodiless(&self.response.method, response.status);
        let mut at = 0;
        while let Some(open) = self.open.get(at) {
            let units = match self.verdict(open, response) {
                Verdict::Open => {
                    at += 1;
                    continue;
                }
                Verdict::Free => Some(0),
                Verdict::Said(units) => units,
            };
            let open = self.open.remove(at);
            let said = open.close();
            if let Some(units) = units.or(said) {
                self.settle(&open, units, true);
            }
        }
    }

    fn verdict(&self, open: &Open, response: &Parts) -> Verdict {
        let Some(after) = self.layer.after(open.policy) else { return Verdict::Said(None) };
        if after.keeps.as_ref().is_some_and(|keeps| !keeps(response)) {
            return Verdict::Free;
        }
        let units = after.by_response.as_ref().and_then(|actual| actual(response));
        if !after.is_open() {
            return Verdict::Said(units);
        }
        if let Some(item) = &open.item {
            if let Some(units) = units {
                item.set(units);
            }
            if after.by_body && !switches_protocols(&self.response.method, response.status) {
                item.add(0); // from now on it is counted
            }
        }
        Verdict::Open
    }

    /// Gives back what was taken beyond `units`, or takes what is missing. If it is told in header fields, they say how the
    /// policies stand now, or at least what was given back or taken.
    fn settle(&mut self, open: &Open, units: u64, told: bool) {
        let Answered { charges, decision: Some(decision) } = &mut self.answered else { return };
        for at in open.charges.clone() {
            let (Some(charge), Some(found)) = (charges.as_slice().get(at), decision.charge_mut(at)) else { continue };
            // What took nothing is only watched, or, of a quota and its meter, the other one is charged.
            let Some(receipt) = found.take_receipt() else { continue };
            let taken = receipt.units();
            match units.cmp(&taken) {
                Ordering::Less => self.layer.refund(charge.policy, &charge.key, receipt.split(taken - units)),
                Ordering::Greater => self.layer.force(charge.policy, &charge.key, units - taken),
                Ordering::Equal => continue,
            }
            if told {
                let reckoned = || found.with_cost_changed(taken, units);
                *found = self.layer.look(charge.policy, &charge.key).unwrap_or_else(reckoned);
            }
        }
    }
}

/// Whether the connection goes over to another protocol after this response (RFC 9110, sections 9.3.6 and 15.2.2).
fn switches_protocols(method: &Method, status: StatusCode) -> bool {
    status == StatusCode::SWITCHING_PROTOCOLS || (method == Method::CONNECT && status.is_success())
}

/// Whether a server sends nothing after this response's head, whatever its body is (RFC 9110, section 6.4.1).
fn is_bodiless(method: &Method, status: StatusCode) -> bool {
    method == Method::HEAD
        || matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED)
        || switches_protocols(method, status)
}

/// What a response's head says about a rule's charges.
enum Verdict {
    /// They stay open.
    Open,
    /// They are given back.
    Free,
    /// They are settled by so many units, or by what a bill says.
    Said(Option<u64>),
}

impl Open {
    /// What was said; nothing can be from now on.
    fn close(&self) -> Option<u64> {
        self.item.as_ref().and_then(|item| item.close())
    }

    fn reserved(&self) -> u64 {
        self.item.as_ref().map_or(0, |item| item.reserved())
    }
}

impl Drop for Late {
    fn drop(&mut self) {
        self.end();
    }
}

impl fmt::Debug for Late {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Late").field("open", &self.open.len()).finish_non_exhaustive()
    }
}
