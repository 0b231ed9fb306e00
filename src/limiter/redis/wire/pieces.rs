//! A request of several keys, taken apart: one request for each, and one answer out of theirs.

use smallvec::{SmallVec, smallvec};

use super::ask::{Ask, Item, Lean, Unit, Verb};
use super::form::Partners;
use super::reply::ordered;
use super::{Answer, nonsense};
use crate::decision::{ChargeDecision, Decision, Several};
use crate::limiter::redis::error::RedisError;

/// What has become of the keys of a request so far.
pub(in crate::limiter::redis) struct Pieces<'a> {
    whole: &'a Ask,
    /// For each key the answers to its charges, once they are there.
    told: Vec<Option<Several>>,
    failed: Option<RedisError>,
}

impl<'a> Pieces<'a> {
    pub(in crate::limiter::redis) fn of(whole: &'a Ask) -> Self {
        Self { whole, told: whole.units.iter().map(|_| None).collect(), failed: None }
    }

    /// The requests that depend on no other, each with its place.
    pub(in crate::limiter::redis) fn first(&self) -> Vec<(usize, Ask)> {
        let lone = |(_, unit): &(usize, &Unit)| partners(unit).next().is_none();
        let units = self.whole.units.iter().enumerate().filter(lone);
        units.map(|(at, unit)| (at, self.piece(unit.clone(), self.whole.verb))).collect()
    }

    /// After those the next that depends on what became of others, unless one has failed. A strike cannot be given back: so
    /// whoever may still refuse the set comes before that, and in a set that is refused it is only looked at.
    pub(in crate::limiter::redis) fn next(&self) -> Option<(usize, Ask)> {
        let untold = || (0..self.told.len()).filter(|at| self.told[*at].is_none());
        let known: Vec<Option<&ChargeDecision>> = self.known().collect();
        let is_known = |place: &usize| known.get(*place).is_some_and(Option::is_some);
        let may_refuse = |at: &usize| {
            let mut partners = self::partners(&self.whole.units[*at]);
            partners.all(|partners| partners.binds && partners.places.iter().all(is_known))
        };
        let at = untold().find(may_refuse).or_else(|| untold().next()).filter(|_| self.failed.is_none())?;
        let mut unit = self.whole.units.get(at)?.clone();
        let denied = |decision: Option<&ChargeDecision>| decision.is_some_and(|decision| !decision.is_allowed());
        let refused = self.whole.items().zip(&known).any(|(item, decision)| item.binds() && denied(*decision));
        let mut verb = self.whole.verb;
        for partners in unit.items.iter_mut().flatten().filter_map(|item| item.partners.as_deref_mut()) {
            partners.refused = partners.places.iter().any(|place| known.get(*place).copied().is_some_and(denied));
            partners.places.clear();
            if refused && !partners.outlives {
                verb = Verb::Peek;
            }
        }
        unit.form = unit.written(verb);
        Some((at, self.piece(unit, verb)))
    }

    pub(in crate::limiter::redis) fn answer(&mut self, at: usize, answer: Answer) {
        let told = match answer {
            Answer::Decided(decision) => Ok(decision.into_charges().collect()),
            Answer::Done => Ok(Several::new()),
            Answer::Failed(error) => Err(error),
            Answer::Pieced(..) | Answer::Elsewhere | Answer::Again | Answer::Refused(_) => Err(nonsense()),
        };
        match (told, self.told.get_mut(at)) {
            (Ok(told), Some(place)) => *place = Some(told),
            (Ok(_), None) => {}
            (Err(error), _) => self.failed = self.failed.take().or(Some(error)),
        }
    }

    /// The answer to the whole. Whoever asked gives back what one that is refused, or has failed, holds receipts of.
    pub(in crate::limiter::redis) fn together(self) -> Answer {
        if matches!(self.whole.verb, Verb::Refund | Verb::Reset) {
            return self.failed.map_or(Answer::Done, Answer::Failed);
        }
        let counts = |(item, decision): (&Item, Option<&ChargeDecision>)| {
            !item.binds() || decision.is_some_and(ChargeDecision::is_allowed)
        };
        let allowed = self.failed.is_none() && self.whole.items().zip(self.known()).all(counts);
        let denied: Vec<bool> = self.known().map(|known| known.is_none_or(|decision| !decision.is_allowed())).collect();
        let mut charges = Several::new();
        for (unit, told) in self.whole.units.iter().zip(self.told) {
            let told = told.unwrap_or_default();
            let items = || unit.items.iter().flatten();
            // A key that refused by itself has told how it stands.
            let passed = items().zip(&told).all(|(item, decision)| !item.binds() || decision.is_allowed());
            let mut told = told.into_iter();
            for item in items() {
                let mut decision = told.next().unwrap_or_else(ChargeDecision::blank);
                if !allowed && item.outlives_refusal() {
                    decision.untaken(); // it stays
                } else if !allowed && passed && decision.is_allowed() {
                    decision.stand(item.taken(&denied, decision.remaining()));
                }
                charges.push(decision);
            }
        }
        Answer::Pieced(Decision::new(allowed, ordered(charges, self.whole.order.as_deref())), self.failed)
    }

    /// What is known of each charge, in the order of the answers.
    fn known(&self) -> impl Iterator<Item = Option<&ChargeDecision>> {
        self.whole.units.iter().zip(&self.told).flat_map(|(unit, told)| {
            let told = told.as_ref();
            (0..unit.items.iter().flatten().count()).map(move |at| told.and_then(|told| told.get(at)))
        })
    }

    fn piece(&self, unit: Unit, verb: Verb) -> Ask {
        let units: SmallVec<[Unit; 1]> = smallvec![unit];
        let charges = matches!(verb, Verb::Take | Verb::Peek);
        Ask { verb, slot: self.whole.slot, lean: if charges { Lean::of(&units) } else { None }, units, order: None }
    }
}

fn partners(unit: &Unit) -> impl Iterator<Item = &Partners> {
    unit.items.iter().flatten().filter_map(|item| item.partners.as_deref())
}
