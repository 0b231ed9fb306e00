//! Units that are taken by hand and held, at once or after a wait in line.

use std::future::poll_fn;
use std::sync::Arc;

use super::{BoundedTurn, Charge, FAILED_POLLS_MAX, Limiter, LineStep, Place, PlaceLines, Refund};
use crate::base::wait::Wait;
use crate::clock::Timer;
use crate::decision::ChargeDecision;
use crate::key::Key;
use crate::policy::Policy;

/// The units that are held, or the decision that denied them.
type HeldOrDenied<T, L> = Result<Result<T, ChargeDecision>, <L as Limiter>::Error>;

/// Takes a charge's units, and holds them. Returns the place and the units that are left.
pub(crate) async fn hold<L: Limiter + Clone>(limiter: &L, charge: Charge<'_>) -> HeldOrDenied<(Place, u64), L> {
    let decision = limiter.take(&[charge]).await?.into_charges().next();
    debug_assert!(decision.is_some(), "one charge has one decision");
    let mut decision = decision.unwrap_or(ChargeDecision::blank());
    if !decision.is_allowed() {
        return Ok(Err(decision));
    }
    let refund = |receipt| Refund::new(charge.policy.clone(), charge.key.clone(), receipt);
    Ok(Ok((Place::new(limiter.clone(), decision.take_receipt().map(refund)), decision.remaining())))
}

/// Takes units and holds them. Waits in this limiter's lines for as long as the quota says if they are not free.
pub(crate) async fn hold_in_line<L, T>(
    limiter: &L,
    lines: &PlaceLines,
    (policy, key, cost): (&Policy, &Key, u64),
    timer: T,
) -> HeldOrDenied<Place, L>
where
    L: Limiter + Clone,
    T: Timer + 'static,
{
    let wait = policy.quota().wait_in_line();
    let may_wait = |denied: &ChargeDecision| !wait.is_zero() && denied.wait() == Wait::Unknown;
    let charge = Charge::new(policy, key).cost(cost);
    match hold(limiter, charge).await? {
        Err(denied) if may_wait(&denied) => {}
        held => return Ok(held.map(|(place, _)| place)),
    }
    let until = timer.now().saturating_add(wait);
    let mut turn = BoundedTurn::join(lines, (policy, key), None, Arc::new(timer), until);
    let mut failures = 0;
    loop {
        let next = poll_fn(|cx| turn.poll(cx)).await;
        let held = hold(limiter, charge.arrived(turn.number())).await;
        if held.is_err() && failures < FAILED_POLLS_MAX && next == LineStep::Asks {
            failures += 1;
            continue;
        }
        failures = 0;
        match held? {
            Ok((place, remaining)) => {
                turn.leave_admitted(remaining > 0, Some(policy.quota().limit()));
                return Ok(Ok(place));
            }
            Err(denied) if next == LineStep::GivesUp || !may_wait(&denied) => return Ok(Err(denied)),
            Err(_) => {}
        }
    }
}
