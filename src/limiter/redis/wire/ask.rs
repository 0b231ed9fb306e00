//! A request, as the stored keys that it is about.

use bytes::Bytes;
use smallvec::SmallVec;

use super::form::{self, Part, Partners};
use super::shape::Shape;
use crate::limiter::redis::keys::Stored;
use crate::limiter::{Charge, Effect, Refund, binds, outlives_refusal};
use crate::policy::{Policy, Siblings};
use crate::quota::Quota;

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Take,
    Peek,
    Refund,
    Reset,
}

/// Which lean script can do all of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Lean {
    /// That of its shape.
    Shape(Shape),
    /// That of lists.
    Trail,
}

/// One request, all of one slot or one server.
#[derive(Debug)]
pub(in crate::limiter::redis) struct Ask {
    pub(super) verb: Verb,
    pub(super) slot: u16,
    pub(super) lean: Option<Lean>,
    pub(super) units: SmallVec<[Unit; 1]>,
    /// For each charge the place of its answer, unless they are in order.
    pub(super) order: Option<SmallVec<[usize; 4]>>,
}

/// A stored key of a request.
#[derive(Clone, Debug)]
pub(super) struct Unit {
    pub(super) key: Bytes,
    pub(super) form: Bytes,
    /// What is asked of each of the states in the key's value; nothing of one that only stands beside the others.
    pub(super) items: SmallVec<[Option<Item>; 1]>,
    siblings: Option<Siblings>,
    /// Quotas of another rule of the same name.
    more: Vec<Quota>,
}

/// A (policy, key) of a request.
#[derive(Clone, Debug)]
pub(super) struct Item {
    pub(super) policy: Policy,
    pub(super) cost: u64,
    pub(super) effect: Effect,
    /// What it belongs to, if it is on refusal.
    pub(super) partners: Option<Box<Partners>>,
}

impl Item {
    /// Whether its denial denies the set.
    pub(super) fn binds(&self) -> bool {
        match (&self.partners, self.effect) {
            (Some(partners), _) => partners.binds,
            (None, effect) => effect == Effect::Enforce,
        }
    }

    /// What it takes of its quota that allows it, when that tells so much left: nothing if what it belongs to was not
    /// denied. Who is in debt is not told more than nothing.
    pub(super) fn taken(&self, denied: &[bool], remaining: u64) -> u64 {
        let is_hit = |partners: &Partners| partners.places.iter().any(|place| denied.get(*place) == Some(&true));
        let in_debt = self.effect == Effect::Force && remaining == 0;
        if self.partners.as_deref().is_none_or(is_hit) && !in_debt { self.cost } else { 0 }
    }

    /// Whether it is written although the set is refused, if its own quota does not deny it.
    pub(super) fn outlives_refusal(&self) -> bool {
        self.partners.as_ref().is_some_and(|partners| partners.outlives)
    }
}

impl Ask {
    /// Takes all of the charges or none.
    pub(in crate::limiter::redis) fn take<'a>(charges: impl Iterator<Item = (&'a Charge<'a>, &'a Stored)>) -> Self {
        Self::charge(Verb::Take, charges)
    }

    /// Answers as [`take`](Self::take) would, and takes nothing.
    pub(in crate::limiter::redis) fn peek<'a>(charges: impl Iterator<Item = (&'a Charge<'a>, &'a Stored)>) -> Self {
        Self::charge(Verb::Peek, charges)
    }

    fn charge<'a>(verb: Verb, charges: impl Iterator<Item = (&'a Charge<'a>, &'a Stored)>) -> Self {
        let mut slot = 0;
        let mut set: SmallVec<[Charge<'a>; 4]> = SmallVec::new();
        let mut units: SmallVec<[Unit; 1]> = SmallVec::new();
        // Where each charge is: the unit and the state.
        let mut places: SmallVec<[(usize, usize); 4]> = SmallVec::new();
        for (charge, stored) in charges {
            slot = stored.slot;
            let unit = units.iter().position(|unit| unit.key == stored.bytes).unwrap_or_else(|| {
                units.push(Unit::new(charge.policy, stored));
                units.len() - 1
            });
            places.push((unit, units[unit].add(charge)));
            set.push(*charge);
        }
        pair(&mut units, &places, &set);
        let lean = Lean::of(&units);
        units.iter_mut().for_each(|unit| unit.form = unit.written(verb));
        let order = order(&units, &places);
        Self { verb, slot, lean, units, order }
    }

    /// Gives back what each receipt still holds.
    pub(in crate::limiter::redis) fn refund(refunds: Vec<(Refund, Stored)>) -> Self {
        let slot = refunds.first().map_or(0, |(_, stored)| stored.slot);
        let units = refunds.into_iter().map(|(refund, stored)| {
            let form = form::refund(&refund.policy, &refund.receipt);
            Unit::bare(&refund.policy, &stored, form)
        });
        Self { verb: Verb::Refund, slot, lean: None, units: units.collect(), order: None }
    }

    /// Forgets a state.
    pub(in crate::limiter::redis) fn reset(policy: &Policy, stored: &Stored) -> Self {
        let unit = Unit::bare(policy, stored, form::reset(policy).unwrap_or_default());
        Self { verb: Verb::Reset, slot: stored.slot, lean: None, units: SmallVec::from_iter([unit]), order: None }
    }

    /// Its key, if it has one.
    pub(in crate::limiter::redis) fn only_key(&self) -> Option<&Bytes> {
        match self.units.as_slice() {
            [unit] => Some(&unit.key),
            _ => None,
        }
    }

    pub(in crate::limiter::redis) fn slot(&self) -> u16 {
        self.slot
    }

    /// What its first charge costs.
    #[cfg(test)]
    pub(in crate::limiter::redis) fn cost(&self) -> u64 {
        self.items().next().map_or(0, |item| item.cost)
    }

    /// The forms of all its keys.
    pub(super) fn form(&self) -> Bytes {
        match self.units.as_slice() {
            [unit] => unit.form.clone(),
            units => units.iter().flat_map(|unit| &unit.form).copied().collect::<Vec<u8>>().into(),
        }
    }

    /// What is asked, in the order of the answers.
    pub(super) fn items(&self) -> impl Iterator<Item = &Item> {
        self.units.iter().flat_map(|unit| &unit.items).flatten()
    }
}

/// The place of the answer to the charge of this unit and state.
fn answer_of(units: &[Unit], (unit, state): (usize, usize)) -> usize {
    let asked = |unit: &Unit| unit.items.iter().flatten().count();
    units[..unit].iter().map(asked).sum::<usize>() + units[unit].items[..state].iter().flatten().count()
}

/// Tells charges on refusal what they belong to.
fn pair(units: &mut [Unit], places: &[(usize, usize)], set: &[Charge<'_>]) {
    for (at, charge) in set.iter().enumerate() {
        let Effect::OnRefusal { of } = charge.effect else { continue };
        let first = at.saturating_sub(usize::from(of));
        let partners = Partners {
            refused: false,
            places: places[first..at].iter().map(|place| answer_of(units, *place)).collect(),
            binds: binds(set, at),
            outlives: outlives_refusal(set, at, true),
        };
        let (unit, state) = places[at];
        if let Some(Some(item)) = units[unit].items.get_mut(state) {
            item.partners = Some(Box::new(partners));
        }
    }
}

/// For each charge the place of its answer; nothing if they are in order.
fn order(units: &[Unit], places: &[(usize, usize)]) -> Option<SmallVec<[usize; 4]>> {
    if places.iter().enumerate().all(|(at, (unit, state))| (*unit, *state) == (at, 0)) {
        return None; // each has a key of its own
    }
    let order: SmallVec<[usize; 4]> = places.iter().map(|place| answer_of(units, *place)).collect();
    order.iter().enumerate().any(|(at, place)| at != *place).then_some(order)
}

/// Those of a rule's quotas whose states are in one value.
fn packed_quotas(siblings: &Siblings) -> impl Iterator<Item = &Quota> {
    siblings.quotas().iter().filter(|quota| form::can_be_packed(quota))
}

impl Unit {
    fn new(policy: &Policy, stored: &Stored) -> Self {
        let siblings = form::packed(policy).cloned();
        let states = siblings.as_ref().map_or(1, |siblings| packed_quotas(siblings).count());
        Self {
            key: stored.bytes.clone(),
            form: Bytes::new(),
            items: (0..states).map(|_| None).collect(),
            siblings,
            more: Vec::new(),
        }
    }

    /// What is not charged.
    fn bare(policy: &Policy, stored: &Stored, form: Bytes) -> Self {
        let item = Item { policy: policy.clone(), cost: 0, effect: Effect::Enforce, partners: None };
        Self {
            key: stored.bytes.clone(),
            form,
            items: SmallVec::from_iter([Some(item)]),
            siblings: None,
            more: Vec::new(),
        }
    }

    /// Asks for a charge; which of the states it is of is returned. Charges of one (policy, key) are one.
    fn add(&mut self, charge: &Charge<'_>) -> usize {
        let quota = charge.policy.quota();
        let state = match &self.siblings {
            None => 0,
            Some(siblings) => {
                let known = packed_quotas(siblings).chain(&self.more).position(|own| own == quota);
                known.unwrap_or_else(|| {
                    self.more.push(*quota);
                    self.items.push(None);
                    self.items.len() - 1
                })
            }
        };
        match &mut self.items[state] {
            Some(item) => item.cost = item.cost.saturating_add(charge.cost),
            item => {
                let Charge { policy, cost, effect, .. } = *charge;
                *item = Some(Item { policy: policy.clone(), cost, effect, partners: None });
            }
        }
        state
    }

    /// The quota of each state, and what is asked of it.
    pub(super) fn states(&self) -> impl Iterator<Item = (&Quota, Option<&Item>)> {
        self.items.iter().enumerate().filter_map(|(state, item)| {
            let quota = match item {
                Some(item) => item.policy.quota(),
                None => packed_quotas(self.siblings.as_ref()?).chain(&self.more).nth(state)?,
            };
            Some((quota, item.as_ref()))
        })
    }

    pub(super) fn written(&self, verb: Verb) -> Bytes {
        let parts: SmallVec<[Part<'_>; 1]> = self
            .states()
            .map(|(quota, item)| match item {
                Some(Item { cost, effect, partners, .. }) => Part {
                    quota,
                    cost: *cost,
                    effect: *effect,
                    partners: partners.as_deref(),
                    looks: verb == Verb::Peek,
                },
                None => Part { quota, cost: 0, effect: Effect::Enforce, partners: None, looks: true },
            })
            .collect();
        form::form(&parts, self.siblings.is_some())
    }
}

impl Lean {
    pub(super) fn of(units: &[Unit]) -> Option<Self> {
        let mut states = units.iter().flat_map(Unit::states);
        let is_trail = |(quota, _): (&Quota, _)| form::Kind::of(quota).is_trail();
        if !units.iter().flat_map(Unit::states).all(|(quota, _)| form::is_lean(quota)) {
            return None;
        }
        if states.all(is_trail) {
            return Some(Self::Trail);
        }
        Shape::of(units.iter().map(|unit| unit.states().map(|(quota, _)| form::Kind::of(quota)))).map(Self::Shape)
    }
}
