//! How the charges of a set act on each other: which denial denies the set, and which charges are taken although
//! the set is denied.

use crate::algorithm::TakeMode;
use crate::policy::Policy;
use crate::quota::Algorithm;

/// The effect of a charge on the decision about its set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Effect {
    /// If this charge is denied, the whole set is denied.
    #[default]
    Enforce,
    /// The charge is decided and reported. The charge is taken if its own quota and the set allow it. Such a charge
    /// never denies the set.
    Observe,
    /// If the set is allowed, the charge is taken even if too few units are left. The missing units become debt (see
    /// [`Quota::max_debt`](crate::Quota::max_debt)).
    Force,
    /// The charge is taken only if a preceding charge is denied. Blocks and meters use this effect.
    ///
    /// The charge belongs to the `of` charges right before it in the set, its *partners*, which are for the
    /// same key.
    ///
    /// * If the quota of a partner denies the set, this charge is taken even if too few units are left. Only a full
    ///   [meter](crate::Quota::meter) then denies this charge. If no partner is denied, this charge only looks,
    ///   like a charge with cost 0, which only a closed block denies.
    /// * A [block](crate::Quota::block) or a full meter that denies this charge denies the set. A
    ///   block whose partners are all observed or forced is itself only observed.
    /// * If a partner is enforced, this charge is taken although the set is denied, because this charge
    ///   counts denials. The charge then has no receipt.
    ///
    /// For quotas other than blocks and meters, `RedisLimiter` returns an error, and
    /// `MemoryLimiter` and `StoreLimiter` take the charge as [forced](Self::Force).
    OnRefusal {
        /// The number of partners. If fewer than `of` charges precede this charge, all preceding charges are
        /// partners. If `of` is 0, this charge only looks.
        of: u8,
    },
}

/// Returns whether a denial of the charge at index `at` denies its set.
pub(crate) fn binds(charges: &[impl Effective], at: usize) -> bool {
    debug_assert!(at < charges.len(), "the set has a charge with this index");
    let Some(charge) = charges.get(at) else { return false };
    match charge.effect() {
        Effect::Enforce => true,
        Effect::Observe | Effect::Force => false,
        Effect::OnRefusal { of } => {
            let partners = partners(charges, at, of);
            charge.policy().quota().algorithm() == Algorithm::Meter
                || partners.is_empty()
                || partners.iter().any(|partner| partner.effect() == Effect::Enforce)
        }
    }
}

/// Returns whether the charge at index `at` is written although its set is denied. `denied` says whether the charge
/// itself was denied.
pub(crate) fn outlives_refusal(charges: &[impl Effective], at: usize, denied: bool) -> bool {
    debug_assert!(at < charges.len(), "the set has a charge with this index");
    let Some(charge) = charges.get(at) else { return false };
    match charge.effect() {
        Effect::Enforce => denied,
        Effect::Observe | Effect::Force => false,
        Effect::OnRefusal { of } => partners(charges, at, of).iter().any(|partner| partner.effect() == Effect::Enforce),
    }
}

/// Returns whether the charge at index `at` of a denied set is reported with the unchanged state of its quota. This
/// is so if the quota allows the charge, and nothing is written.
pub(crate) fn stands(charges: &[impl Effective], at: usize, denied: bool) -> bool {
    !denied && !outlives_refusal(charges, at, denied)
}

/// Returns how the charge at index `at` is taken. `denied` returns whether an earlier charge was
/// denied.
pub(crate) fn how(charges: &[impl Effective], at: usize, denied: impl Fn(usize) -> bool) -> TakeMode {
    debug_assert!(at < charges.len(), "the set has a charge with this index");
    match charges.get(at).map_or(Effect::Observe, Effective::effect) {
        Effect::Enforce | Effect::Observe => TakeMode::IfAllowed,
        Effect::Force => TakeMode::Force,
        Effect::OnRefusal { of } => {
            let first = at.saturating_sub(usize::from(of));
            TakeMode::OnRefusal { refused: (first..at).any(denied) }
        }
    }
}

fn partners<C>(charges: &[C], at: usize, of: u8) -> &[C] {
    charges.get(at.saturating_sub(usize::from(of))..at).unwrap_or_default()
}

/// A charge of a set, borrowed or owned.
pub(crate) trait Effective {
    fn policy(&self) -> &Policy;
    fn effect(&self) -> Effect;
}
