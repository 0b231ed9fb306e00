//! Layers around each other: when one refuses a request, those around it give back what they took.
//!
//! A layer cannot tell by the response: middleware in between may have built another one, and a service may answer with
//! what some other service of its own was refused. So a request carries a [`Passage`] in its extensions, which inner layers
//! find there. Extensions ask for memory. Therefore a layer only puts a passage in once it has noticed that services of
//! this crate are called within its own, which it does at the first request that reaches one.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use http::{Extensions, Request, Response};
use smallvec::SmallVec;
use tower_service::Service;

use super::charging::Shared;
use super::decided::{Answer, Answered, Decided, OwnedCharge};
use super::watch::Charged;
use crate::decision::{self, ChargeDecision, Receipt};
use crate::limiter::{Limiter, Refund};
use crate::outcome::{Outcome, OutcomeKind};

/// Whether any layer of this process is around another. Until then no request has to be looked at.
static USED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// How often services of this crate were called on this thread.
    static CALLS: Cell<u32> = const { Cell::new(0) };
}

/// Counts a call, for layers around this one.
#[inline]
pub(super) fn count_call() {
    CALLS.set(CALLS.get().wrapping_add(1));
}

/// Whether requests may carry a passage.
#[inline]
pub(super) fn is_used() -> bool {
    USED.load(Ordering::Relaxed)
}

/// A request's way through the service within one layer.
#[derive(Clone)]
pub(super) struct Passage(Arc<Attempts>);

/// What the next layers within did with the request: several times if it was tried again, or sent twice.
struct Attempts {
    /// The passage through the next layer around this one, which counts this one as one that passed, unless all its
    /// attempts were refused.
    around: Option<Passage>,
    /// How many attempts passed; and `ASKED`.
    passed: AtomicU32,
    /// What the layer charged, while it is new.
    charged: Option<Box<Charged>>,
}

/// A layer within has been asked.
const ASKED: u32 = 1 << 31;

impl Passage {
    /// That of the next layer around this one, if there is one.
    #[inline]
    pub(super) fn around(extensions: &Extensions) -> Option<Self> {
        if is_used() { extensions.get::<Self>().cloned() } else { None }
    }

    fn within(around: Option<Self>, charged: Option<Box<Charged>>) -> Self {
        Self(Arc::new(Attempts { around, passed: AtomicU32::new(0), charged }))
    }

    /// What the layers around were seen to charge, from this one out.
    pub(super) fn charged(&self) -> impl Iterator<Item = &Charged> {
        std::iter::successors(Some(self), |within| within.0.around.as_ref()).filter_map(|own| own.0.charged.as_deref())
    }

    /// A layer within refuses the request, or has not yet decided that it passes.
    pub(super) fn refuse(&self) {
        if self.0.passed.fetch_or(ASKED, Ordering::AcqRel) == 0 {
            if let Some(around) = &self.0.around {
                around.lose();
            }
        }
    }

    /// A layer within lets the request pass.
    pub(super) fn pass(&self) {
        let one_more = |passed: u32| Some((passed | ASKED).wrapping_add(1));
        let before = self.0.passed.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more);
        if before == Ok(ASKED) {
            if let Some(around) = &self.0.around {
                around.pass();
            }
        }
    }

    /// What a layer within let pass was refused further in.
    fn lose(&self) {
        if self.0.passed.fetch_sub(1, Ordering::AcqRel) == ASKED | 1 {
            if let Some(around) = &self.0.around {
                around.lose();
            }
        }
    }

    /// Whether layers within were asked, and none let the request through.
    pub(super) fn is_refused(&self) -> bool {
        self.0.passed.load(Ordering::Acquire) == ASKED
    }
}

/// Notices that services of this crate were called since it was made.
pub(super) struct Noticing<'a> {
    has_inner: &'a AtomicBool,
    calls_before: u32,
}

impl Noticing<'_> {
    #[inline]
    pub(super) fn end(self) {
        if CALLS.get() != self.calls_before {
            notice(self.has_inner);
        }
    }
}

#[cold]
fn notice(has_inner: &AtomicBool) {
    if !has_inner.swap(true, Ordering::Relaxed) {
        USED.store(true, Ordering::Relaxed);
    }
}

impl<L> Shared<L> {
    #[inline]
    pub(super) fn noticing(&self) -> Noticing<'_> {
        Noticing { has_inner: &self.has_inner, calls_before: CALLS.get() }
    }
}

impl<L: Limiter> Shared<L> {
    /// Calls the service with a request that passes, and returns its passage, if there are layers within this one.
    #[inline]
    pub(super) fn pass<S, B>(
        self: &Arc<Self>,
        service: &mut S,
        mut request: Request<B>,
        decided: &mut Decided,
    ) -> (S::Future, Option<Passage>)
    where
        S: Service<Request<B>>,
    {
        if let Some(outcome) = self.tell(decided) {
            // What a layer around this one degraded is not served in full because this one has nothing against it.
            let degraded = request.extensions().get().is_some_and(|around: &Outcome| around.kind().is_told());
            if decided.is_told() || !degraded {
                request.extensions_mut().insert(outcome);
            }
        }
        if self.afters.is_some() {
            self.open(&mut request, decided);
        }
        if is_used() {
            return self.pass_on(service, request, decided);
        }
        let noticing = self.noticing();
        let response = service.call(request);
        noticing.end();
        (response, None)
    }

    /// The same where layers are around each other.
    #[inline(never)]
    fn pass_on<S, B>(
        &self,
        service: &mut S,
        mut request: Request<B>,
        decided: &mut Decided,
    ) -> (S::Future, Option<Passage>)
    where
        S: Service<Request<B>>,
    {
        let mut unsettled = Unsettled { shared: self, decided, passage: None };
        // One that took nothing has nothing to give back, and layers around it deal with those within it directly.
        if unsettled.decided.kind() != OutcomeKind::Exempt {
            let around = Passage::around(request.extensions());
            if let Some(around) = &around {
                around.pass();
                self.compare(around, unsettled.decided);
            }
            if self.has_inner.load(Ordering::Relaxed) {
                let own = Passage::within(around, self.charged(unsettled.decided));
                request.extensions_mut().insert(own.clone());
                unsettled.passage = Some(own);
            }
        }
        let noticing = self.noticing();
        let response = service.call(request);
        noticing.end();
        (response, unsettled.passage.take())
    }

    /// At the end of a request that passed, and whose response nobody sees: gives back what it took if a layer within
    /// refused it.
    #[inline]
    pub(super) fn settle(&self, decided: &mut Decided, passage: &mut Option<Passage>) {
        if passage.take().is_some_and(|passage| passage.is_refused()) {
            self.give_back(std::mem::replace(decided, Decided::nothing()));
        }
    }

    /// The same with the response, before it is told in its header fields how the policies stand. It may tell itself of a
    /// layer within that was not noticed before: one in another task.
    #[inline]
    pub(super) fn settle_with<B>(&self, decided: &mut Decided, passage: &mut Option<Passage>, response: &Response<B>) {
        if passage.is_some() {
            self.settle_passage(decided, passage);
        } else if let Some(outcome) = response.extensions().get() {
            self.settle_unnoticed(decided, outcome);
        }
    }

    #[inline(never)]
    fn settle_passage(&self, decided: &mut Decided, passage: &mut Option<Passage>) {
        if passage.take().is_some_and(|passage| passage.is_refused()) {
            self.take_back(decided);
        }
    }

    #[inline(never)]
    fn settle_unnoticed(&self, decided: &mut Decided, outcome: &Outcome) {
        if decided.kind() != OutcomeKind::Exempt && !outcome.kind().passed() {
            notice(&self.has_inner);
            self.take_back(decided);
        }
    }

    /// Gives back what a request took, and finds out how the policies stand then: from a limiter that answers at once, and
    /// else by what was given back.
    #[cold]
    fn take_back(&self, decided: &mut Decided) {
        if let Answer::Owed(_) = &decided.answer {
            return self.give_back(std::mem::replace(decided, Decided::nothing())); // nothing is told
        }
        let (mut refunds, mut taken) = (Vec::new(), SmallVec::<[u64; decision::INLINE]>::new());
        each_answer(decided, |charge, decision| {
            let receipt = decision.take_receipt();
            taken.push(receipt.as_ref().map_or(0, Receipt::units));
            if let (Some(receipt), Some(policy)) = (receipt, self.policy(charge.policy)) {
                refunds.push(Refund::new(policy.clone(), charge.key.clone(), receipt));
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

/// A request whose future is not made yet: a service may panic when it is called, after a layer within has refused.
struct Unsettled<'a, L: Limiter> {
    shared: &'a Shared<L>,
    decided: &'a mut Decided,
    passage: Option<Passage>,
}

impl<L: Limiter> Drop for Unsettled<'_, L> {
    fn drop(&mut self) {
        self.shared.settle(self.decided, &mut self.passage);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Passages through three layers, the outermost first.
    fn three() -> [Passage; 3] {
        let outer = Passage::within(None, None);
        let middle = Passage::within(Some(outer.clone()), None);
        outer.pass();
        let inner = Passage::within(Some(middle.clone()), None);
        middle.pass();
        [outer, middle, inner]
    }

    fn refused(passages: &[Passage; 3]) -> [bool; 3] {
        [0, 1, 2].map(|at| passages[at].is_refused())
    }

    #[test]
    fn a_passage_that_nobody_asked_about_is_not_refused() {
        assert_eq!(refused(&three()), [false; 3]);
    }

    #[test]
    fn a_refusal_is_known_to_every_layer_around() {
        let passages = three();
        passages[2].refuse();
        assert_eq!(refused(&passages), [true; 3]);
    }

    #[test]
    fn layers_within_the_one_that_refuses_are_not_concerned() {
        let passages = three();
        passages[0].refuse(); // a second attempt, while the first goes on
        assert_eq!(refused(&passages), [false; 3]);
        passages[2].refuse();
        assert_eq!(refused(&passages), [true; 3]);
    }

    #[test]
    fn an_attempt_that_passes_makes_up_for_those_refused() {
        let passages = three();
        passages[2].refuse();
        passages[2].pass();
        assert_eq!(refused(&passages), [false; 3]);
        passages[2].refuse();
        assert_eq!(refused(&passages), [false; 3]);
    }

    #[test]
    fn of_two_attempts_both_have_to_be_refused() {
        let [outer, middle, inner] = three();
        let second = Passage::within(Some(middle.clone()), None);
        middle.pass();
        inner.refuse();
        assert_eq!(refused(&[outer.clone(), middle.clone(), inner.clone()]), [false, false, true]);
        second.refuse();
        assert_eq!(refused(&[outer, middle, second]), [true; 3]);
    }
}
