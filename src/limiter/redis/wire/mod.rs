//! What goes over the wire: requests in one script call, and the answers out of its reply.
//!
//! Where a state is a few numbers, the script decides and writes, and answers with the time and the state that it found; what is told of
//! it is computed here, by the same rules from the same state. Of a trail, whose entries stay in Redis, it answers everything.

mod form;
mod reply;
mod scripts;
#[cfg(test)]
mod tests;

use bytes::Bytes;
use smallvec::SmallVec;

use super::error::{RedisError, RedisErrorKind};
use super::keys::Stored;
use super::value::Call;
use crate::decision::Decision;
use crate::limiter::{Charge, Effect, Refund};
use crate::policy::Policy;
use crate::time::Timestamp;

use form::{Kind, Verb};

pub(super) use reply::answers;

/// One request, all of one slot or one server.
#[derive(Debug)]
pub(super) struct Ask {
    verb: Verb,
    slot: u16,
    /// The one kind whose lean script can do all of it.
    lean: Option<Kind>,
    items: SmallVec<[Item; 1]>,
}

/// A (policy, key) of a request.
#[derive(Debug)]
struct Item {
    policy: Policy,
    key: Bytes,
    cost: u64,
    effect: Effect,
    form: Bytes,
}

/// What came of a request.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "nearly every answer is a decision")]
pub(super) enum Answer {
    Decided(Decision),
    Done,
    /// A value was written under another quota: nothing was done. Asked again with `full` it is converted.
    Again,
    Failed(RedisError),
}

impl Ask {
    /// Takes all of the charges or none.
    pub(super) fn take<'a>(charges: impl Iterator<Item = (&'a Charge<'a>, &'a Stored)>) -> Self {
        Self::charge(Verb::Take, charges)
    }

    /// Answers as [`take`](Self::take) would, and takes nothing.
    pub(super) fn peek<'a>(charges: impl Iterator<Item = (&'a Charge<'a>, &'a Stored)>) -> Self {
        Self::charge(Verb::Peek, charges)
    }

    fn charge<'a>(verb: Verb, charges: impl Iterator<Item = (&'a Charge<'a>, &'a Stored)>) -> Self {
        let (mut slot, mut lean) = (0, None);
        let items: SmallVec<[Item; 1]> = charges
            .enumerate()
            .map(|(at, (charge, stored))| {
                let quota = charge.policy.quota();
                let kind = Some(Kind::of(quota)).filter(|_| form::is_lean(quota));
                lean = if at == 0 || lean == kind { kind } else { None };
                slot = stored.slot;
                Item {
                    policy: charge.policy.clone(),
                    key: stored.bytes.clone(),
                    cost: charge.cost,
                    effect: charge.effect,
                    form: form::form(quota, verb, charge.cost, charge.effect, None),
                }
            })
            .collect();
        Self { verb, slot, lean, items }
    }

    /// Gives back what each receipt still holds.
    pub(super) fn refund(refunds: Vec<(Refund, Stored)>) -> Self {
        let slot = refunds.first().map_or(0, |(_, stored)| stored.slot);
        let items = refunds.into_iter().map(|(refund, stored)| {
            let effect = Effect::Enforce;
            let form = form::form(refund.policy.quota(), Verb::Refund, 0, effect, Some(&refund.receipt));
            Item { policy: refund.policy, key: stored.bytes, cost: 0, effect, form }
        });
        Self { verb: Verb::Refund, slot, lean: None, items: items.collect() }
    }

    /// Forgets a state.
    pub(super) fn reset(policy: &Policy, stored: &Stored) -> Self {
        let item = Item {
            policy: policy.clone(),
            key: stored.bytes.clone(),
            cost: 0,
            effect: Effect::Enforce,
            form: Bytes::new(),
        };
        Self { verb: Verb::Reset, slot: stored.slot, lean: None, items: SmallVec::from_iter([item]) }
    }

    pub(super) fn slot(&self) -> u16 {
        self.slot
    }

    /// What its first charge costs.
    #[cfg(test)]
    pub(super) fn cost(&self) -> u64 {
        self.items.first().map_or(0, |item| item.cost)
    }
}

/// How far back a form is looked for among those of the call.
const FORMS_SEARCHED: usize = 8;

/// Where forms begin in the arguments, counted from 1.
const FORMS_FROM: usize = 3;

/// In place of a form: the keys of this run are to be forgotten.
const RESET: u16 = u16::MAX;

/// One script call for all requests, in their order, at one instant: the server's time, unless told another.
///
/// Of its arguments the first lists the requests: pairs of 16-bit numbers. `(form, n)`: n requests of one key each, all of
/// that form. `(0, n)`: a request of n keys, whose forms follow, 16 bits each. A single charge needs no list: its form is
/// the first argument.
pub(super) fn call(asks: &[&Ask], clock: Option<Timestamp>, full: bool) -> Call {
    let lean = asks.first().and_then(|ask| ask.lean).filter(|kind| asks.iter().all(|ask| ask.lean == Some(*kind)));
    let script = match lean {
        Some(kind) if !full => scripts::lean(kind),
        _ => scripts::full(),
    };
    let keys = asks.iter().flat_map(|ask| &ask.items).map(|item| item.key.clone()).collect();
    let clock = clock.map(|now| Bytes::from(now.as_micros().to_string()));
    if let [Ask { verb: Verb::Take | Verb::Peek, items, .. }] = asks {
        if let [item] = items.as_slice() {
            let args = std::iter::once(item.form.clone()).chain(clock).collect();
            return Call { script, keys, args };
        }
    }
    let mut args = vec![Bytes::new(), clock.unwrap_or_default()];
    let mut list = List::default();
    for ask in asks {
        let mut form = |item: &Item| {
            let known = (FORMS_FROM - 1..args.len()).rev().take(FORMS_SEARCHED).find(|at| args[*at] == item.form);
            let at = known.unwrap_or_else(|| {
                args.push(item.form.clone());
                args.len() - 1
            });
            u16::try_from(at + 1).unwrap_or(u16::MAX - 1) // a call holds far fewer
        };
        match (ask.verb, ask.items.as_slice()) {
            (Verb::Reset, items) => items.iter().for_each(|_| list.run(RESET)),
            (Verb::Refund, items) => items.iter().for_each(|item| list.run(form(item))),
            (Verb::Take | Verb::Peek, [item]) => list.run(form(item)),
            (Verb::Take | Verb::Peek, items) => list.set(items.iter().map(form)),
        }
    }
    if args.len() < FORMS_FROM {
        args.push(Bytes::new()); // so that the first is known to be a list
    }
    args[0] = list.bytes.into();
    Call { script, keys, args }
}

/// The list of a call's requests.
#[derive(Default)]
struct List {
    bytes: Vec<u8>,
    /// Where the last run begins, which more requests may join.
    last: Option<usize>,
}

impl List {
    fn run(&mut self, form: u16) {
        if let Some([one, two, three, four]) = self.last.and_then(|last| self.bytes.get_mut(last..last + 4)) {
            let count = u16::from_le_bytes([*three, *four]);
            if u16::from_le_bytes([*one, *two]) == form && count < u16::MAX {
                [*three, *four] = (count + 1).to_le_bytes();
                return;
            }
        }
        self.last = Some(self.bytes.len());
        self.bytes.extend([form, 1].map(u16::to_le_bytes).as_flattened());
    }

    fn set(&mut self, forms: impl ExactSizeIterator<Item = u16>) {
        self.last = None;
        let count = u16::try_from(forms.len()).unwrap_or(u16::MAX);
        self.bytes.extend([0, count].map(u16::to_le_bytes).as_flattened());
        forms.for_each(|form| self.bytes.extend(form.to_le_bytes()));
    }
}

/// A reply that no script of ours gives.
pub(super) fn nonsense() -> RedisError {
    RedisError::new(
        RedisErrorKind::Foreign,
        "the script's reply is not understood: is there something between this process and Redis that changes replies?",
    )
}
