//! A charge of a request, and its relation to the other charges.

use std::ops::Range;

use bytes::Bytes;

use crate::algorithm::TakeMode;
use crate::decision::ChargeDecision;
use crate::limiter::redis::keys::StoredKey;
use crate::limiter::remote::Claim;
use crate::limiter::{Charge, Effect, Effective};
use crate::policy::Policy;

/// A charge, a refund or a reset of a state, and the stored key of that state.
#[derive(Clone, Debug)]
pub(super) struct WireCharge {
    pub(super) key: Bytes,
    pub(super) policy: Policy,
    pub(super) cost: u64,
    pub(super) effect: Effect,
    /// The charges that this charge belongs to, if this charge is taken on refusal.
    pub(super) partners: Option<Partners>,
    /// The claim of this process, if the charge takes units that are held.
    pub(super) claim: Claim,
}

/// The charges that a charge on refusal belongs to.
#[derive(Clone, Debug)]
pub(super) struct Partners {
    /// The indices of the partners in the request.
    pub(super) places: Range<usize>,
    /// True if an earlier answer has refused one of the partners.
    pub(super) refused: bool,
    /// True if a denial of the charge denies the request.
    pub(super) binds: bool,
    /// True if the charge is written although the request is denied.
    pub(super) outlives: bool,
}

impl Effective for WireCharge {
    fn policy(&self) -> &Policy {
        &self.policy
    }

    fn effect(&self) -> Effect {
        self.effect
    }
}

impl WireCharge {
    pub(super) fn new(charge: &Charge<'_>, stored: &StoredKey, claim: Claim) -> Self {
        let Charge { policy, cost, effect, .. } = *charge;
        Self { key: stored.bytes.clone(), policy: policy.clone(), cost, effect, partners: None, claim }
    }

    pub(super) fn idle(policy: Policy, stored: &StoredKey) -> Self {
        let (key, claim) = (stored.bytes.clone(), Claim::default());
        Self { key, policy, cost: 0, effect: Effect::Enforce, partners: None, claim }
    }

    /// Returns whether a denial of the charge denies the request.
    pub(super) fn binds(&self) -> bool {
        self.partners.as_ref().map_or(self.effect == Effect::Enforce, |partners| partners.binds)
    }

    /// Returns whether the charge is written although the request is denied. The charge's own quota must not deny the
    /// charge.
    pub(super) fn outlives_refusal(&self) -> bool {
        self.partners.as_ref().is_some_and(|partners| partners.outlives)
    }

    /// Returns how the charge is taken. `denied` says whether the charge at an index was denied.
    pub(super) fn how(&self, denied: impl FnMut(usize) -> bool) -> TakeMode {
        match (&self.partners, self.effect) {
            (Some(partners), _) => {
                TakeMode::OnRefusal { refused: partners.refused || partners.places.clone().any(denied) }
            }
            (None, Effect::Force) => TakeMode::Force,
            _ => TakeMode::IfAllowed,
        }
    }

    /// Returns the units that this allowed charge took, where `denied` has the same meaning as in
    /// [`how`](Self::how). A forced charge in debt counts as 0, because no unit was left before the charge.
    pub(super) fn taken(&self, decision: &ChargeDecision, denied: impl FnMut(usize) -> bool) -> u64 {
        match self.how(denied) {
            TakeMode::OnRefusal { refused: false } => 0,
            TakeMode::Force if decision.remaining() == 0 => 0,
            _ => self.cost,
        }
    }
}
