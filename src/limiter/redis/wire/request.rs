//! A request about the states of some keys, and its encoded form.

use bytes::Bytes;
use smallvec::SmallVec;

use super::charge::{KeyedCharge, Partners};
use super::encode;
use crate::algorithm::Rules;
use crate::limiter::redis::keys::Stored;
use crate::limiter::{Charge, Effect, Refund, binds, outlives_refusal};
use crate::policy::Policy;

/// What a request does. The numbers stand in programs, where 0 is a [`Take`](Self::Take) of charges
/// that depend on no other: of one, or of several that are no lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(in crate::limiter::redis) enum Verb {
    /// Takes all charges or none.
    Take = 1,
    /// Answers as `Take` would, and takes nothing.
    Peek = 2,
    Refund = 3,
    Reset = 4,
}

/// A request whose keys are all in one slot, or on one server.
#[derive(Debug)]
pub(in crate::limiter::redis) struct Request {
    pub(super) verb: Verb,
    pub(super) slot: u16,
    pub(super) charges: SmallVec<[KeyedCharge; 1]>,
    /// A run of this request alone.
    pub(super) run: Bytes,
}

impl Request {
    /// Takes all of the charges or none, or looks whether it would.
    pub(in crate::limiter::redis) fn charge<'a>(
        verb: Verb,
        charges: impl Iterator<Item = (&'a Charge<'a>, &'a Stored)>,
    ) -> Self {
        let mut slot = 0;
        let mut keyed: SmallVec<[KeyedCharge; 1]> = SmallVec::new();
        for (charge, stored) in charges {
            slot = stored.slot;
            keyed.push(KeyedCharge::new(charge, stored));
        }
        for at in 0..keyed.len() {
            let Effect::OnRefusal { of } = keyed[at].effect else { continue };
            keyed[at].partners = Some(Partners {
                places: at.saturating_sub(usize::from(of))..at,
                refused: false,
                binds: binds(&keyed, at),
                outlives: outlives_refusal(&keyed, at, true),
            });
        }
        Self::of(verb, slot, keyed)
    }

    /// Charges these.
    pub(super) fn of(verb: Verb, slot: u16, charges: SmallVec<[KeyedCharge; 1]>) -> Self {
        let is_list = |charge: &KeyedCharge| matches!(charge.policy.quota().rules(), Rules::EntryLog(_));
        let is_usual = verb == Verb::Take
            && charges.iter().all(|charge| charge.partners.is_none() && (charges.len() == 1 || !is_list(charge)));
        let mut run = begin(verb, charges.len(), is_usual);
        charges.iter().for_each(|charge| encode::charge(&mut run, charge));
        Self { verb, slot, charges, run: run.into() }
    }

    /// Refunds the units that a receipt still holds.
    pub(in crate::limiter::redis) fn refund(refund: Refund, stored: &Stored) -> Self {
        let mut run = begin(Verb::Refund, 1, false);
        encode::refund(&mut run, refund.policy.quota(), &refund.receipt);
        let charges = SmallVec::from_iter([KeyedCharge::idle(refund.policy, stored)]);
        Self { verb: Verb::Refund, slot: stored.slot, charges, run: run.into() }
    }

    /// Forgets a state.
    pub(in crate::limiter::redis) fn reset(policy: &Policy, stored: &Stored) -> Self {
        let charges = SmallVec::from_iter([KeyedCharge::idle(policy.clone(), stored)]);
        Self { verb: Verb::Reset, slot: stored.slot, charges, run: begin(Verb::Reset, 1, false).into() }
    }

    pub(in crate::limiter::redis) fn slot(&self) -> u16 {
        self.slot
    }

    /// How many keys it has.
    pub(in crate::limiter::redis) fn keys(&self) -> usize {
        self.charges.len()
    }

    /// The cost of its first charge.
    #[cfg(test)]
    pub(in crate::limiter::redis) fn cost(&self) -> u64 {
        self.charges.first().map_or(0, |charge| charge.cost)
    }
}

/// Begins the run of one request for this number of keys.
fn begin(verb: Verb, keys: usize, usual: bool) -> Vec<u8> {
    let mut run = Vec::with_capacity(5 + 136 * keys);
    run.push(if usual { 0 } else { verb as u8 });
    run.extend([1, keys as u16].map(u16::to_le_bytes).as_flattened()); // at most `CHARGES_MAX`
    run
}
