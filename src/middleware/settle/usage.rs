//! The cost of a request, as its handlers state it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use smallvec::SmallVec;

use crate::policy::Policy;

/// The value of a cost that was not stated yet.
const UNSTATED: u64 = u64::MAX;

/// The value of a cost that was settled. This value never changes again.
const SETTLED: u64 = u64::MAX - 1;

/// The maximum number of units that can be stated.
const MOST: u64 = u64::MAX - 2;

/// A handle with which a handler states the cost of its request. If a layer has a rule that is [settled by
/// usage](crate::Rule::settle_by_usage), each request that passes the layer has the handle in its extensions.
///
/// Clone the handle freely, for example into the stream that makes the response's body. The last statement counts. The
/// cost is settled when the response's body has ended or was dropped; later statements have no effect. A response
/// without a body has ended when its head is sent.
///
/// The handle has no effect if no rule that is settled by usage charged the request, or if the limiter failed. A
/// request that goes to the [overflow](crate::RateLimitLayer::overflow) has no handle.
///
/// If several rules are settled by usage, even in several layers, one handle states the cost for all of them.
/// [`of`](Self::of) returns the handle of one rule.
#[derive(Clone)]
pub struct Usage(SmallVec<[Arc<Item>; 1]>);

/// The cost of a request under one rule.
struct Item {
    /// The policies of the rule that the request was charged to.
    policies: SmallVec<[Policy; 1]>,
    reserved: u64,
    stated: AtomicU64,
}

impl Usage {
    /// Makes the handle of a rule that has charged the request to `policy`.
    pub(crate) fn new(policy: &Policy, reserved: u64) -> Self {
        let policies = SmallVec::from_iter([policy.clone()]);
        Self(SmallVec::from_iter([Arc::new(Item { policies, reserved, stated: AtomicU64::new(UNSTATED) })]))
    }

    pub(crate) fn none() -> Self {
        Self(SmallVec::new())
    }

    /// Adds a policy of the rule. Has no effect on a handle that was cloned before.
    pub(crate) fn charge(&mut self, policy: &Policy) {
        for item in self.0.iter_mut().filter_map(Arc::get_mut) {
            item.policies.push(policy.clone());
        }
    }

    pub(crate) fn append(&mut self, other: &Self) {
        self.0.extend(other.0.iter().cloned());
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// States the whole cost of the request, in units. A cost of 0 refunds all units. Returns `false` if the cost was
    /// settled before.
    pub fn set(&self, units: u64) -> bool {
        self.state(|_| units)
    }

    /// Adds units to the stated cost. The first units that are stated replace the reservation and are not added to the
    /// reservation. Returns `false` if the cost was settled before.
    pub fn add(&self, units: u64) -> bool {
        self.state(|said| said.unwrap_or(0).saturating_add(units))
    }

    /// Returns the cost that was stated so far. If the handle is for several rules, returns the
    /// largest of their costs.
    #[must_use]
    pub fn stated(&self) -> Option<u64> {
        said(self.0.iter().map(|item| item.stated.load(Ordering::Acquire)))
    }

    /// Returns the units that were reserved before the service was called. If the handle is for several rules, returns
    /// the largest of their reservations.
    #[must_use]
    pub fn reserved(&self) -> u64 {
        self.0.iter().map(|item| item.reserved).max().unwrap_or(0)
    }

    /// Returns a handle that states the cost only for the rule with a policy of this name.
    #[must_use]
    pub fn of(&self, policy: &str) -> Option<Self> {
        let items: SmallVec<[Arc<Item>; 1]> =
            self.0.iter().filter(|item| item.policies.iter().any(|own| own.name() == policy)).cloned().collect();
        (!items.is_empty()).then_some(Self(items))
    }

    /// Returns the stated cost, and ignores all later statements.
    pub(crate) fn close(&self) -> Option<u64> {
        said(self.0.iter().map(|item| item.stated.swap(SETTLED, Ordering::AcqRel)))
    }

    fn state(&self, units: impl Fn(Option<u64>) -> u64) -> bool {
        let state = |said| match said {
            SETTLED => None,
            UNSTATED => Some(units(None).min(MOST)),
            said => Some(units(Some(said)).min(MOST)),
        };
        // Settles every rule, even if an earlier rule was already settled.
        self.0.iter().fold(false, |in_time, item| {
            item.stated.fetch_update(Ordering::AcqRel, Ordering::Acquire, state).is_ok() | in_time
        })
    }
}

impl fmt::Debug for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Usage")
            .field("reserved", &self.reserved())
            .field("stated", &self.stated())
            .finish_non_exhaustive()
    }
}

fn said(values: impl Iterator<Item = u64>) -> Option<u64> {
    values.filter(|value| *value <= MOST).max()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quota::Quota;

    fn usage(names: &[&str]) -> (Usage, Vec<Usage>) {
        let of =
            |(name, reserved): (&&str, u64)| Usage::new(&Policy::new(*name, Quota::per_second(1)).unwrap(), reserved);
        let each: Vec<Usage> = names.iter().zip(7..).map(of).collect();
        let mut all = Usage::none();
        each.iter().for_each(|one| all.append(one));
        (all, each)
    }

    #[test]
    fn last_statement_before_the_end_counts() {
        let (handle, items) = usage(&["tokens"]);
        assert_eq!((handle.stated(), handle.reserved()), (None, 7));
        assert!(handle.set(5) && handle.set(3));
        assert!(handle.clone().add(2));
        assert_eq!(handle.stated(), Some(5));
        assert_eq!(items[0].close(), Some(5));
        assert!(!handle.set(9) && !handle.add(9));
        assert_eq!((handle.stated(), items[0].close()), (None, None));
    }

    #[test]
    fn first_added_units_replace_the_reservation() {
        let (handle, _) = usage(&["tokens"]);
        handle.add(2);
        assert_eq!(handle.stated(), Some(2));
        handle.add(u64::MAX);
        assert_eq!(handle.stated(), Some(MOST));
        assert!(handle.set(u64::MAX));
        assert_eq!(handle.stated(), Some(MOST));
    }

    #[test]
    fn handle_of_one_rule_is_found_by_policy_name() {
        let (handle, items) = usage(&["tokens", "bytes"]);
        handle.of("bytes").unwrap().set(4);
        assert!(handle.of("rows").is_none());
        items[0].close();
        assert!(handle.set(6), "one is still open");
        assert_eq!((items[0].close(), items[1].close()), (None, Some(6)));
    }
}
