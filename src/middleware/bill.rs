//! What a request cost, as its handlers tell.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use smallvec::SmallVec;

use crate::policy::Policy;

/// Nobody has said what the request cost.
const UNSAID: u64 = u64::MAX;

/// The cost is settled; nothing changes any more.
const SETTLED: u64 = u64::MAX - 1;

/// The most units that can be said.
const MOST: u64 = u64::MAX - 2;

/// Where a handler says what its request cost, in the extensions of a request under a rule that is
/// [settled by it](crate::Rule::settle_by_bill).
///
/// It can be cloned, and kept by whatever streams the response's body. What was said last, counts; it is settled when the
/// response's body has ended or was dropped, and what is said after that comes too late.
///
/// A request that passes without being charged, since no such rule applied to it or the limiter failed, has a bill that
/// nobody settles: what is said comes to nothing. A request has no bill if the layer is not
/// [enabled](crate::RateLimitLayer::enabled), or if it goes to the [overflow](crate::RateLimitLayer::overflow).
///
/// If several rules are settled by bills, also those of several layers, the request has one bill for all of them, and
/// [`of`](Self::of) is the bill of one.
#[derive(Clone)]
pub struct Bill(SmallVec<[Arc<Item>; 1]>);

/// What one rule takes for a request.
pub(super) struct Item {
    /// Those of the rule that were charged.
    policies: SmallVec<[Policy; 1]>,
    reserved: u64,
    said: AtomicU64,
}

impl Bill {
    pub(super) fn new() -> Self {
        Self(SmallVec::new())
    }

    pub(super) fn push(&mut self, item: Arc<Item>) {
        self.0.push(item);
    }

    pub(super) fn append(&mut self, other: &Self) {
        self.0.extend(other.0.iter().cloned());
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Says what the request cost in all, in units; 0 gives everything back. Returns whether that came in time.
    pub fn set(&self, units: u64) -> bool {
        self.say(|_| units)
    }

    /// Adds to what was said. The first units said are not added to the reservation, they replace it. Returns whether that
    /// came in time.
    pub fn add(&self, units: u64) -> bool {
        self.say(|said| said.unwrap_or(0).saturating_add(units))
    }

    /// What was said so far: the most, if there are several rules.
    #[must_use]
    pub fn said(&self) -> Option<u64> {
        self.0.iter().filter_map(|item| item.said()).max()
    }

    /// What was reserved before the service was called: the most, if there are several rules.
    #[must_use]
    pub fn reserved(&self) -> u64 {
        self.0.iter().map(|item| item.reserved).max().unwrap_or(0)
    }

    /// The bill of the rule that has a policy of this name alone.
    #[must_use]
    pub fn of(&self, policy: &str) -> Option<Self> {
        let items: SmallVec<[Arc<Item>; 1]> = self.0.iter().filter(|item| item.has(policy)).cloned().collect();
        (!items.is_empty()).then_some(Self(items))
    }

    fn say(&self, units: impl Fn(Option<u64>) -> u64) -> bool {
        // Each, also after one that was too late.
        self.0.iter().fold(false, |in_time, item| item.say(&units) | in_time)
    }
}

impl fmt::Debug for Bill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bill").field("reserved", &self.reserved()).field("said", &self.said()).finish_non_exhaustive()
    }
}

impl Item {
    pub(super) fn new(policy: &Policy, reserved: u64) -> Self {
        Self { policies: SmallVec::from_iter([policy.clone()]), reserved, said: AtomicU64::new(UNSAID) }
    }

    pub(super) fn charge(&mut self, policy: &Policy) {
        self.policies.push(policy.clone());
    }

    fn has(&self, name: &str) -> bool {
        self.policies.iter().any(|policy| policy.name() == name)
    }

    fn said(&self) -> Option<u64> {
        Some(self.said.load(Ordering::Acquire)).filter(|said| *said <= MOST)
    }

    pub(super) fn reserved(&self) -> u64 {
        self.reserved
    }

    fn say(&self, units: impl Fn(Option<u64>) -> u64) -> bool {
        let say = |said| match said {
            SETTLED => None,
            UNSAID => Some(units(None).min(MOST)),
            said => Some(units(Some(said)).min(MOST)),
        };
        self.said.fetch_update(Ordering::AcqRel, Ordering::Acquire, say).is_ok()
    }

    pub(super) fn set(&self, units: u64) {
        self.say(|_| units);
    }

    pub(super) fn add(&self, units: u64) {
        self.say(|said| said.unwrap_or(0).saturating_add(units));
    }

    /// What was said; from now on nothing can be.
    pub(super) fn close(&self) -> Option<u64> {
        Some(self.said.swap(SETTLED, Ordering::AcqRel)).filter(|said| *said <= MOST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quota::Quota;

    fn bill(names: &[&str]) -> (Bill, Vec<Arc<Item>>) {
        let items: Vec<Arc<Item>> = names
            .iter()
            .zip(7..)
            .map(|(name, reserved)| Arc::new(Item::new(&Policy::new(*name, Quota::per_second(1)).unwrap(), reserved)))
            .collect();
        (Bill(items.iter().cloned().collect()), items)
    }

    #[test]
    fn what_was_said_last_counts_and_what_comes_after_the_end_does_not() {
        let (bill, items) = bill(&["tokens"]);
        assert_eq!((bill.said(), bill.reserved()), (None, 7));
        assert!(bill.set(5) && bill.set(3));
        assert!(bill.clone().add(2));
        assert_eq!(bill.said(), Some(5));
        assert_eq!(items[0].close(), Some(5));
        assert!(!bill.set(9) && !bill.add(9));
        assert_eq!((bill.said(), items[0].close()), (None, None));
    }

    #[test]
    fn the_first_units_that_are_added_replace_the_reservation() {
        let (bill, _) = bill(&["tokens"]);
        bill.add(2);
        assert_eq!(bill.said(), Some(2));
        bill.add(u64::MAX);
        assert_eq!(bill.said(), Some(MOST));
        assert!(bill.set(u64::MAX));
        assert_eq!(bill.said(), Some(MOST));
    }

    #[test]
    fn one_rules_bill_is_found_by_the_name_of_its_policy() {
        let (bill, items) = bill(&["tokens", "bytes"]);
        bill.of("bytes").unwrap().set(4);
        assert!(bill.of("rows").is_none());
        items[0].close();
        assert!(bill.set(6), "one is still open");
        assert_eq!((items[0].close(), items[1].close()), (None, Some(6)));
    }
}
