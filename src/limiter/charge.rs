//! Charges, which a limiter takes, and refunds.

use super::effect::{Effect, Effective};
use crate::decision::Receipt;
use crate::key::Key;
use crate::policy::Policy;

/// The number of a request that waits in line, below 2^48. The number fits beside the effect, so that a charge has
/// four words. Each further word would slow every check (`benches/instructions`).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival([u16; 3]);

impl Arrival {
    /// The number of a request that waits in no line. This number is later than the number of any request in a line.
    const NEWCOMER: Self = Self([u16::MAX; 3]);

    fn of(number: u64) -> Self {
        debug_assert!(number < (1 << 48) - 1, "fewer than 2^48 - 1 requests get a number");
        Self([0, 16, 32].map(|shift| (number >> shift) as u16)) // the lower 48 bits
    }

    pub(super) fn number(self) -> u64 {
        let [low, middle, high] = self.0.map(u64::from);
        low | middle << 16 | high << 32
    }
}

const _: () = assert!(size_of::<Charge<'_>>() <= 4 * size_of::<u64>());

/// A cost to take from the allowance that a policy gives a key.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Charge<'a> {
    /// The policy.
    pub policy: &'a Policy,
    /// The key.
    pub key: &'a Key,
    /// The units to take. With cost 0, the limiter only looks at the state.
    pub cost: u64,
    /// The effect that a denial of this charge has on the set.
    pub effect: Effect,
    /// The request's number among the requests that wait in line, see `place_lines.rs`.
    pub(super) arrival: Arrival,
}

impl<'a> Charge<'a> {
    /// Makes an enforced charge of one unit.
    #[must_use]
    pub fn new(policy: &'a Policy, key: &'a Key) -> Self {
        Self { policy, key, cost: 1, effect: Effect::Enforce, arrival: Arrival::NEWCOMER }
    }

    /// Sets the cost in units.
    #[must_use]
    pub fn cost(mut self, cost: u64) -> Self {
        self.cost = cost;
        self
    }

    /// Sets the effect.
    #[must_use]
    pub fn effect(mut self, effect: Effect) -> Self {
        self.effect = effect;
        self
    }

    /// Sets the number that the request got when it joined its line. Requests with later numbers do not hold
    /// this request back.
    #[must_use]
    pub(crate) fn arrived(mut self, number: u64) -> Self {
        self.arrival = Arrival::of(number);
        self
    }
}

impl Effective for Charge<'_> {
    fn policy(&self) -> &Policy {
        self.policy
    }

    fn effect(&self) -> Effect {
        self.effect
    }
}

/// A receipt to refund, with the policy and the key that were charged.
#[derive(Debug)]
#[non_exhaustive]
pub struct Refund {
    /// The policy that was charged.
    pub policy: Policy,
    /// The key that was charged.
    pub key: Key,
    /// The receipt of that charge.
    pub receipt: Receipt,
}

impl Refund {
    /// Makes a refund of the units that the receipt of a charge to (policy, key) still holds.
    #[must_use]
    pub fn new(policy: Policy, key: Key, receipt: Receipt) -> Self {
        Self { policy, key, receipt }
    }
}
