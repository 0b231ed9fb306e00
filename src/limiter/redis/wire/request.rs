//! A request about the states of some keys, and its encoded form.

use bytes::Bytes;

use super::charge::{Partners, WireCharge};
use super::encode::{self, WindowPlaces};
#[cfg(test)]
use crate::algorithm::TakeMode;
use crate::limiter::redis::keys::StoredKey;
use crate::limiter::remote::{CHARGES_MAX, Claim, Return};
use crate::limiter::{Charge, Effect, Refund, binds, outlives_refusal};
use crate::policy::Policy;

/// The action of a request. The numbers stand in programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(in crate::limiter::redis) enum WireOperation {
    /// Takes all charges or none.
    Take = 1,
    /// Gives the answer that `Take` would give, and takes nothing.
    Peek = 2,
    Refund = 3,
    Reset = 4,
    /// Sets the held units of all processes to 0.
    ResetPlaces = 5,
}

/// The position of the first form in a run.
const FORMS_AT: usize = 9;

const _: () = assert!(CHARGES_MAX <= u16::MAX as usize, "a run stores the number of its keys in 16 bits");

/// A request whose keys are all in one slot, or on one server.
#[derive(Clone, Debug)]
pub(in crate::limiter::redis) struct WireRequest {
    pub(super) operation: WireOperation,
    pub(super) slot: u16,
    /// The charges. They are not stored inline, because a request is moved from its caller to its flight by several
    /// copies (`benches/redis.rs`, "clients, 1 in flight").
    pub(super) charges: Vec<WireCharge>,
    /// A run for this request alone.
    pub(super) run: Bytes,
    /// The positions of the calendar's windows in the run.
    pub(super) windows: WindowPlaces,
}

impl WireRequest {
    /// Does what [`claiming`](Self::claiming) does, for charges of units that are not held.
    #[cfg(test)]
    pub(in crate::limiter::redis) fn charge<'a>(
        operation: WireOperation,
        charges: impl Iterator<Item = (&'a Charge<'a>, &'a StoredKey)>,
    ) -> Self {
        Self::claiming(operation, charges.map(|(charge, stored)| (charge, stored, Claim::default())))
    }

    /// Makes a request that takes all of the charges or none, or that only asks whether they would be taken. Each
    /// charge comes with the claim of this process on held units.
    pub(in crate::limiter::redis) fn claiming<'a>(
        operation: WireOperation,
        charges: impl Iterator<Item = (&'a Charge<'a>, &'a StoredKey, Claim)>,
    ) -> Self {
        let mut slot = 0;
        let mut keyed: Vec<WireCharge> = Vec::with_capacity(charges.size_hint().0);
        for (charge, stored, claim) in charges {
            slot = stored.slot;
            keyed.push(WireCharge::new(charge, stored, claim));
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
        Self::of(operation, slot, keyed)
    }

    /// Makes a request for these charges.
    pub(super) fn of(operation: WireOperation, slot: u16, charges: Vec<WireCharge>) -> Self {
        let (run, windows) = run(operation, charges.len(), |forms| {
            charges.iter().filter_map(|charge| encode::charge(forms, charge)).collect()
        });
        Self { operation, slot, charges, run, windows }
    }

    /// Makes a request that refunds the units that a receipt still holds.
    pub(in crate::limiter::redis) fn refund(refund: &Refund, stored: &StoredKey) -> Self {
        let quota = refund.policy.quota();
        let (run, windows) =
            run(WireOperation::Refund, 1, |form| encode::refund(form, quota, &refund.receipt).into_iter().collect());
        let charges = vec![WireCharge::idle(refund.policy.clone(), stored)];
        Self { operation: WireOperation::Refund, slot: stored.slot, charges, run, windows }
    }

    /// Makes a request that returns held units, or that renews the row of this process.
    pub(in crate::limiter::redis) fn return_units(back: &Return) -> Self {
        let Return { key, units, claim } = back;
        let (run, windows) = run(WireOperation::Refund, 1, |form| {
            encode::return_units(form, key.policy.quota(), *units, claim).into_iter().collect()
        });
        let stored = StoredKey { bytes: key.bytes.clone(), slot: key.slot };
        let charges = vec![WireCharge::idle(key.policy.clone(), &stored)];
        Self { operation: WireOperation::Refund, slot: key.slot, charges, run, windows }
    }

    /// Makes a request that forgets a state.
    pub(in crate::limiter::redis) fn reset(policy: &Policy, stored: &StoredKey) -> Self {
        let charges = vec![WireCharge::idle(policy.clone(), stored)];
        let operation = if policy.limits_in_flight() { WireOperation::ResetPlaces } else { WireOperation::Reset };
        // The script reads the first form of a program before it looks at the operation, so a reset has one, too.
        let (run, windows) = run(operation, 1, |form| encode::charge(form, &charges[0]).into_iter().collect());
        Self { operation, slot: stored.slot, charges, run, windows }
    }

    pub(in crate::limiter::redis) fn slot(&self) -> u16 {
        self.slot
    }

    /// Returns the number of the request's keys.
    pub(in crate::limiter::redis) fn keys(&self) -> usize {
        self.charges.len()
    }

    #[cfg(test)]
    pub(in crate::limiter::redis) fn operation(&self) -> WireOperation {
        self.operation
    }

    /// Returns the stored key, the policy, the cost and the effect of each charge.
    #[cfg(test)]
    pub(in crate::limiter::redis) fn charges(&self) -> impl Iterator<Item = (&Bytes, &Policy, u64, Effect)> {
        self.charges.iter().map(|charge| (&charge.key, &charge.policy, charge.cost, charge.effect))
    }

    /// Returns how a charge is taken. `denied` returns whether the charge at an index was denied.
    #[cfg(test)]
    pub(in crate::limiter::redis) fn how(&self, at: usize, denied: impl FnMut(usize) -> bool) -> TakeMode {
        self.charges[at].how(denied)
    }

    /// Returns whether the denial of a charge denies the request.
    #[cfg(test)]
    pub(in crate::limiter::redis) fn binds(&self, at: usize) -> bool {
        self.charges[at].binds()
    }

    /// Returns whether a charge is written although the request is denied. `denied` says whether the charge's
    /// own quota denies the charge. The partners of a strike may be in other requests, if the set was split.
    #[cfg(test)]
    pub(in crate::limiter::redis) fn outlives_refusal(&self, at: usize, denied: bool) -> bool {
        let charge = &self.charges[at];
        charge.outlives_refusal() || denied && charge.effect == Effect::Enforce
    }

    /// Returns the instant and the number in the receipt that the request refunds.
    #[cfg(test)]
    pub(in crate::limiter::redis) fn refunded(&self) -> Option<(u64, u64)> {
        let (rest, number) = self.run.split_last_chunk::<8>()?;
        let (_, at) = rest.split_last_chunk::<8>()?;
        Some((f64::from_le_bytes(*at) as u64, f64::from_le_bytes(*number) as u64))
    }

    /// Returns the units that the request refunds, for a quota with small numbers.
    #[cfg(test)]
    pub(in crate::limiter::redis) fn refunded_units(&self, quota: &crate::quota::Quota) -> u64 {
        use crate::algorithm::{Decider, PairDecider};
        let held = self.run.last_chunk::<32>().expect("a refund's form ends with the numbers of the receipt");
        let number = |at: usize| f64::from_le_bytes(held[at..at + 8].try_into().expect("it has eight bytes"));
        if !matches!(quota.decider(), Decider::Pair(PairDecider::Gcra(_) | PairDecider::WideGcra(_), _)) {
            return number(0) as u64;
        }
        // Reads the units as a span of time: whole microseconds, and the numerator of the fraction of a microsecond
        // that remains. In a refund to a queue, −1 minus the numerator stands in its place, so that it is negative.
        let spec = quota.spec();
        let (mut divisor, mut rest) = (spec.limit, spec.period_us);
        while rest > 0 {
            (divisor, rest) = (rest, divisor % rest);
        }
        let numerator = if number(8) < 0.0 { -1.0 - number(8) } else { number(8) };
        let us = number(0) + numerator / (spec.limit / divisor) as f64;
        (us * spec.limit as f64 / spec.period_us as f64).round() as u64
    }

    /// Returns the cost of the request's first charge.
    #[cfg(test)]
    pub(in crate::limiter::redis) fn cost(&self) -> u64 {
        self.charges.first().map_or(0, |charge| charge.cost)
    }
}

/// Returns the run of one request with this number of keys, and the positions of the run's windows.
fn run(
    operation: WireOperation,
    keys: usize,
    write_forms: impl FnOnce(&mut Vec<u8>) -> WindowPlaces,
) -> (Bytes, WindowPlaces) {
    let mut run = Vec::with_capacity(FORMS_AT + 136 * keys);
    run.push(operation as u8);
    run.extend([1, keys as u16].map(u16::to_le_bytes).as_flattened()); // at most `CHARGES_MAX`
    run.extend([0; 4]);
    let windows = write_forms(&mut run);
    let length = (run.len() - FORMS_AT) as u32; // below `CHARGES_MAX` times some hundred bytes
    run[FORMS_AT - 4..FORMS_AT].copy_from_slice(&length.to_le_bytes());
    (run.into(), windows)
}
