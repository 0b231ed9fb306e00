//! The strikes of requests that have no response yet. A refusal must not promise a wait that depends on unsettled
//! strikes.
//!
//! A block counts a strike when a request comes. The strike is refunded if the response does not count as a strike.
//! While requests are under way, their strikes may close a key that their responses open again. The limiter cannot
//! distinguish the strikes of requests under way from final strikes, so the layer counts its own requests with
//! strikes that are not final.

use std::collections::HashMap;

use super::rule::Settlement;
use crate::base::sync::{Mutex, lock};
use crate::key::Key;
use crate::policy::Policy;
use crate::quota::Algorithm;

/// The number of requests of each policy and key whose strikes are not settled.
#[derive(Default)]
pub(super) struct Unsettled(Mutex<HashMap<Strikes, usize>>);

/// The fingerprint of a policy's name, and a key.
pub(super) type Strikes = (u64, Key);

impl Unsettled {
    /// Returns whether the response may refund the strikes of a policy.
    pub(super) fn concerns(policy: &Policy, settlement: &Settlement) -> bool {
        policy.quota().algorithm() == Algorithm::Block && !settlement.is_none()
    }

    pub(super) fn add(&self, strikes: Strikes) {
        *lock(&self.0).entry(strikes).or_default() += 1;
    }

    pub(super) fn remove(&self, strikes: &Strikes) {
        let mut all = lock(&self.0);
        match all.get_mut(strikes) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(all.remove(strikes)),
        }
        if all.is_empty() && all.capacity() > 64 {
            all.shrink_to_fit();
        }
    }

    pub(super) fn has(&self, strikes: &Strikes) -> bool {
        lock(&self.0).contains_key(strikes)
    }
}
