//! What goes with a rule's policies: a block after their refusals, or a meter of what goes beyond them.

use smallvec::SmallVec;

use super::charging::Shared;
use super::decided::{Charges, Manner, OwnedCharge};
use super::headers::View;
use super::rule::Rule;
use crate::decision::{self, ChargeDecision, Decision};
use crate::limiter::{Effect, Limiter, Refund};
use crate::mode::Mode;
use crate::outcome::OutcomeKind;
use crate::policy::{Policy, PolicyError};
use crate::quota::Algorithm;

/// A policy whose charge belongs to the others of its rule.
#[derive(Clone, Debug)]
pub(super) struct Companion {
    pub(super) policy: Policy,
    pub(super) meters: bool,
}

impl Rule {
    /// Closes a key that the rule refuses too often: `block` is a policy whose quota is a [block](crate::Quota::block), and
    /// each refusal by one of the rule's own policies is a strike, in the same step.
    ///
    /// The strike that closes the key, and every request until it is open again, is refused with the outcome
    /// [`Blocked`](OutcomeKind::Blocked), and told to come back when it opens; nothing is taken meanwhile. In header fields
    /// the block has no item of its own: the rule's policies say that nothing remains until then. Where the rule only looks
    /// or degrades, see [`Mode`], its block does the same.
    ///
    /// [`Blocks`](crate::Blocks) closes and opens keys by hand, with the same policy and limiter.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::{MemoryLimiter, Policy, Quota, RateLimitLayer, key};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let (minute, hour) = (Duration::from_secs(60), Duration::from_secs(3_600));
    /// let block = Policy::new("login-block", Quota::block(3, 10 * minute, hour)?)?;
    /// let login = Policy::new("login", Quota::per_minute(5))?.block(block)?;
    ///
    /// let layer = RateLimitLayer::new(MemoryLimiter::new(), login, key::peer_ip());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// If the quota is not a block, if the name is that of one of the rule's policies, if the rule has a block or a meter
    /// already (what passes beyond its quota is no refusal), or if it is of more than 255 [quotas](Policy::several).
    pub fn block(self, block: Policy) -> Result<Self, PolicyError> {
        self.accompanied(block, Algorithm::Block)
    }

    /// Lets pass what goes beyond the rule's quota, and counts it: `meter` is a policy whose quota is a
    /// [meter](crate::Quota::meter), and its limit is the most that may. A request's cost is taken from the quota, or, if
    /// that has not enough left, all of it is counted by the meter, in the same step; the outcome is
    /// [`Overage`](OutcomeKind::Overage). A request for which the meter has no room is refused as if there were none, and told
    /// when the quota will have room; one that costs more than the quota's capacity is told of no time, since it can only pass
    /// once somebody has settled the meter, or it was forgotten. What
    /// the rule [gives back](Rule::give_back_when) or [settles](Rule::settle_by_bill) is taken off the meter, or added to it,
    /// if it was counted there.
    ///
    /// [`Meters`](crate::Meters) reads and settles what was counted, with the same policy and limiter. In memory it is exact
    /// until the process ends, and in [snapshots](crate::MemoryLimiter::snapshot); to bill by it, count in Redis, with a
    /// retention longer than the time between two readings. Where the rule only looks or degrades, see [`Mode`], it meters
    /// nothing.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::{MemoryLimiter, Policy, Quota, RateLimitLayer, key};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let meter = Policy::new("api-over", Quota::meter(1_000_000, Duration::from_secs(92 * 86_400))?)?;
    /// let api = Policy::new("api", Quota::per_day(10_000))?.overage(meter)?;
    ///
    /// let layer = RateLimitLayer::new(MemoryLimiter::new(), api, key::header("x-api-key"));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// If the quota is not a meter, if the name is that of one of the rule's policies, if the rule has a block or a meter
    /// already, or if it is of [several quotas](Policy::several): what is within one of them and beyond another would be
    /// counted by both.
    pub fn overage(self, meter: Policy) -> Result<Self, PolicyError> {
        if self.policies.len() > 1 && self.choose.is_none() {
            return Err(PolicyError::together(
                meter.name(),
                "a rule of several quotas cannot meter what goes beyond them: what one of them takes another may be out \
                 of; put the others into a rule of their own",
            ));
        }
        self.accompanied(meter, Algorithm::Meter)
    }

    fn accompanied(self, policy: Policy, algorithm: Algorithm) -> Result<Self, PolicyError> {
        if policy.quota().algorithm() != algorithm {
            return Err(PolicyError::together(
                policy.name(),
                &format!("\"{}\" is no {algorithm}: take Quota::{algorithm}", policy.quota()),
            ));
        }
        if self.policies.iter().any(|own| own.name() == policy.name()) {
            return Err(PolicyError::together(policy.name(), "the rule's own policy has this name: choose another"));
        }
        if self.companion.is_some() {
            return Err(PolicyError::together(
                policy.name(),
                "a rule has one block or one meter: what passes beyond its quota is no refusal; use two rules",
            ));
        }
        if self.choose.is_none() && self.policies.len() > usize::from(u8::MAX) {
            return Err(PolicyError::together(
                policy.name(),
                &format!(
                    "the rule has {} quotas, and a block counts the refusals of no more than {}: give the others a rule \
                     and a block of their own",
                    self.policies.len(),
                    u8::MAX
                ),
            ));
        }
        Ok(Self { companion: Some(Companion { policy, meters: algorithm == Algorithm::Meter }), ..self })
    }
}

impl Policy {
    /// A rule that closes a key which it refuses too often; see [`Rule::block`].
    ///
    /// # Errors
    /// As those of [`Rule::block`].
    pub fn block(self, block: Self) -> Result<Rule, PolicyError> {
        Rule::new(self).block(block)
    }

    /// A rule that meters what goes beyond its quota; see [`Rule::overage`].
    ///
    /// # Errors
    /// As those of [`Rule::overage`].
    pub fn overage(self, meter: Self) -> Result<Rule, PolicyError> {
        Rule::new(self).overage(meter)
    }
}

/// A layer's companions: for each rule the place of its one among the layer's policies.
pub(super) struct Companions(Box<[Option<(usize, bool)>]>);

impl Companions {
    /// Adds the policies of companions behind those of the rules.
    pub(super) fn of<'a>(rules: impl Iterator<Item = &'a Rule>, policies: &mut Vec<Policy>) -> Self {
        let places = rules.map(|rule| {
            let companion = rule.companion.as_ref()?;
            policies.push(companion.policy.clone());
            Some((policies.len() - 1, companion.meters))
        });
        Self(places.collect())
    }

    pub(super) fn are_there(&self) -> bool {
        self.0.iter().any(Option::is_some)
    }

    /// Adds the charge of a rule's companion to those of the rule, which begin at `first`.
    #[inline]
    pub(super) fn join(&self, rule: usize, charges: &mut SmallVec<[OwnedCharge; decision::INLINE]>, first: usize) {
        if let Some((policy, meters)) = self.0.get(rule).copied().flatten() {
            join(policy, meters, charges, first);
        }
    }
}

#[inline(never)]
fn join(policy: usize, meters: bool, charges: &mut SmallVec<[OwnedCharge; decision::INLINE]>, first: usize) {
    let Some(last) = charges.last() else { return };
    let (key, cost, mode) = (last.key.clone(), last.cost, last.mode());
    let of = u8::try_from(charges.len() - first).unwrap_or(u8::MAX); // a rule with a companion has no more
    if meters {
        if mode != Mode::Enforce {
            return;
        }
        let observed = Manner::new(mode, Effect::Observe);
        charges.iter_mut().skip(first).for_each(|charge| charge.manner = observed);
    }
    let cost = if meters { cost } else { 1 };
    charges.push(OwnedCharge { policy, key, cost, manner: Manner::new(mode, Effect::OnRefusal { of }) });
}

/// How a charge stands besides its own decision, for those who are told of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stance<'a> {
    pub(super) refuses: bool,
    /// The decision to be told of its policy: its block's, if that is closed.
    pub(super) told: &'a ChargeDecision,
}

/// How the charge at a place stands.
pub(super) fn stance<'a>(charges: &[OwnedCharge], decisions: &'a [ChargeDecision], at: usize) -> Option<Stance<'a>> {
    let (charge, decision) = (charges.get(at)?, decisions.get(at)?);
    let denied = !decision.is_allowed();
    let enforced = charge.mode() == Mode::Enforce;
    let Some((companion, meters)) = companion_of(charges, at) else {
        return Some(Stance { refuses: enforced && denied, told: decision });
    };
    let joined = decisions.get(companion)?;
    let full_or_closed = enforced && !joined.is_allowed();
    Some(match (meters, full_or_closed) {
        // Its own quota says when it will pass again.
        (true, _) => Stance { refuses: denied && full_or_closed, told: decision },
        (false, true) => {
            Stance { refuses: true, told: if joined.retry_us() > decision.retry_us() { joined } else { decision } }
        }
        (false, false) => Stance { refuses: enforced && denied, told: decision },
    })
}

/// Whether the charge at a place refuses its request.
pub(super) fn refuses(charges: &[OwnedCharge], decisions: &[ChargeDecision], at: usize) -> bool {
    let Some(charge) = charges.get(at) else { return false };
    match charge.effect() {
        // What a full meter refuses, its partner does.
        Effect::OnRefusal { .. } => {
            let metered =
                at.checked_sub(1).and_then(|before| companion_of(charges, before)).is_some_and(|found| found.1);
            let denied = decisions.get(at).is_some_and(|decision| !decision.is_allowed());
            charge.mode() == Mode::Enforce && denied && !metered
        }
        // A block refuses for itself.
        Effect::Enforce => decisions.get(at).is_some_and(|decision| !decision.is_allowed()),
        _ => stance(charges, decisions, at).is_some_and(|stance| stance.refuses),
    }
}

/// Where the charge is that belongs to the one at this place, and whether it meters.
fn companion_of(charges: &[OwnedCharge], at: usize) -> Option<(usize, bool)> {
    let (place, of) = charges.iter().enumerate().skip(at + 1).find_map(|(place, charge)| match charge.effect() {
        Effect::OnRefusal { of } => Some((place, usize::from(of))),
        _ => None,
    })?;
    // What is metered is only observed, in a rule that enforces.
    let meters = charges.get(at)?.effect() == Effect::Observe && charges.get(at)?.mode() == Mode::Enforce;
    (place - of <= at).then_some((place, meters))
}

impl<L> Shared<L> {
    /// Those that go with others have no field of their own.
    pub(super) fn view_with_companion<'a>(
        &'a self,
        charges: &'a [OwnedCharge],
        decisions: &'a [ChargeDecision],
        at: usize,
        refused: bool,
    ) -> Option<View<'a>> {
        let charge = charges.get(at).filter(|charge| !matches!(charge.effect(), Effect::OnRefusal { .. }))?;
        let stance = stance(charges, decisions, at)?;
        let view = self.view(charge, stance.told, refused)?;
        Some(View { refuses: refused && stance.refuses, ..view })
    }

    /// What becomes of a request that is taken, or refused, where rules have blocks or meters.
    #[cold]
    pub(super) fn kind_with_companions(
        &self,
        kind: OutcomeKind,
        charges: &Charges,
        decision: &Decision,
    ) -> OutcomeKind {
        let charges = charges.as_slice();
        let denied = |at: usize| decision.charges().get(at).is_some_and(|answer| !answer.is_allowed());
        let any = |is_it: &dyn Fn(&OwnedCharge) -> bool| {
            charges.iter().enumerate().any(|(at, charge)| charge.mode() == Mode::Enforce && is_it(charge) && denied(at))
        };
        let closed = |charge: &OwnedCharge| {
            let algorithm = self.policy(charge.policy).map(|policy| policy.quota().algorithm());
            matches!(charge.effect(), Effect::OnRefusal { .. }) && algorithm == Some(Algorithm::Block)
        };
        match kind {
            OutcomeKind::Limited if any(&closed) => OutcomeKind::Blocked,
            OutcomeKind::Allowed | OutcomeKind::Delayed | OutcomeKind::ShadowLimited
                if any(&|charge| charge.effect() == Effect::Observe) =>
            {
                OutcomeKind::Overage
            }
            kind => kind,
        }
    }
}

impl<L: Limiter> Shared<L> {
    /// A block that only looks lets pass, and what passes is charged. If it were enforced, nothing would be taken while it is
    /// closed; so that the rule goes on to decide as it would then, its charges are given back, and told so.
    #[cold]
    pub(super) fn take_nothing_while_closed(&self, charges: &Charges, decision: &mut Decision) {
        if !decision.is_allowed() {
            return;
        }
        let charges = charges.as_slice();
        let (mut refunds, mut given_back) = (Vec::new(), SmallVec::<[(usize, u64); decision::INLINE]>::new());
        for (at, block) in charges.iter().enumerate().filter(|(_, charge)| charge.mode() != Mode::Enforce) {
            let Effect::OnRefusal { of } = block.effect() else { continue };
            if decision.charges().get(at).is_none_or(ChargeDecision::is_allowed) {
                continue;
            }
            for partner in at.saturating_sub(usize::from(of))..at {
                let (Some(charge), Some(found)) = (charges.get(partner), decision.charge_mut(partner)) else {
                    continue;
                };
                if let (Some(policy), Some(receipt)) = (self.policy_now(charge.policy), found.take_receipt()) {
                    given_back.push((partner, receipt.units()));
                    refunds.push(Refund::new(policy, charge.key.clone(), receipt));
                }
            }
        }
        if refunds.is_empty() {
            return;
        }
        self.refund_all(refunds);
        for (at, units) in given_back {
            if let (Some(charge), Some(found)) = (charges.get(at), decision.charge_mut(at)) {
                *found = self.stands(charge, found, units);
            }
        }
    }
}
