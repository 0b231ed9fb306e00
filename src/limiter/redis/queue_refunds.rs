//! Refunds to leaky queues, newest first.
//!
//! A queue accepts the refund of a slot only while no later slot is taken, and calls to Redis may overtake each other.
//! So each queue has one refund under way at a time. The refunds that come meanwhile wait, and go newest first. Those
//! whose slots lie side by side go together, as the refund of one charge.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use crate::algorithm::{Pair, PairRules, Rules};
use crate::decision::Receipt;
use crate::limiter::Refund;
use crate::quota::{Algorithm, Quota};

use super::error::RedisError;
use super::tag::Tag;

/// The result of a refund.
pub(super) type Refunded = Result<(), RedisError>;

/// The queues that have a refund under way, with the refunds that wait behind it, newest first.
#[derive(Default)]
pub(super) struct QueueRefunds(Mutex<HashMap<Tag, VecDeque<Waiting>>>);

struct Waiting {
    refund: Refund,
    caller: oneshot::Sender<Refunded>,
}

/// A refund to be sent, and the callers that wait for its result.
pub(super) struct Due {
    pub(super) refund: Refund,
    callers: Vec<oneshot::Sender<Refunded>>,
}

impl Due {
    /// Hands the result to the callers. A caller may have gone.
    pub(super) fn report(callers: Vec<oneshot::Sender<Refunded>>, result: &Refunded) {
        callers.into_iter().for_each(|caller| drop(caller.send(result.clone())));
    }

    pub(super) fn into_parts(self) -> (Refund, Vec<oneshot::Sender<Refunded>>) {
        (self.refund, self.callers)
    }
}

/// Returns whether refunds of a quota have to keep their order.
pub(super) fn keep_order(quota: &Quota) -> bool {
    quota.algorithm() == Algorithm::LeakyQueue
}

impl QueueRefunds {
    /// Adds a refund. Returns whether the queue had none under way, so that [`next`](Self::next) is to be called, and
    /// the receiver of the result.
    pub(super) fn add(&self, tag: Tag, refund: Refund) -> (bool, oneshot::Receiver<Refunded>) {
        let (caller, result) = oneshot::channel();
        let slot = end(&refund);
        let added = Waiting { refund, caller };
        let is_first = match self.lock().entry(tag) {
            Entry::Occupied(mut entry) => {
                let waiting = entry.get_mut();
                waiting.insert(waiting.partition_point(|other| end(&other.refund) > slot), added);
                false
            }
            Entry::Vacant(entry) => {
                entry.insert(VecDeque::from([added]));
                true
            }
        };
        (is_first, result)
    }

    /// Returns what is to be refunded next, when no refund of this queue is under way.
    pub(super) fn next(&self, tag: Tag) -> Option<Due> {
        let mut queues = self.lock();
        let waiting = queues.get_mut(&tag)?;
        let Some(Waiting { mut refund, caller }) = waiting.pop_front() else {
            queues.remove(&tag);
            return None;
        };
        let mut callers = vec![caller];
        // The beginning of the slots that are refunded together.
        let mut oldest_units = refund.receipt.units();
        let mut oldest = Pair { at: refund.receipt.at_us(), n: refund.receipt.part() };
        while let Some(earlier) = waiting.front().map(|waiting| &waiting.refund).filter(|earlier| {
            let end = Pair { at: earlier.receipt.at_us(), n: earlier.receipt.part() };
            earlier.policy == refund.policy && is_side_by_side(refund.policy.quota(), oldest, oldest_units, end)
        }) {
            let together = refund.receipt.units().saturating_add(earlier.receipt.units());
            oldest_units = earlier.receipt.units();
            oldest = Pair { at: earlier.receipt.at_us(), n: earlier.receipt.part() };
            refund.receipt = Receipt::new(together, refund.receipt.at_us(), refund.receipt.part());
            callers.extend(waiting.pop_front().map(|waiting| waiting.caller));
        }
        Some(Due { refund, callers })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Tag, VecDeque<Waiting>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the end of the slot of a refund, as numbers that have its order.
fn end(refund: &Refund) -> (u64, u64) {
    (refund.receipt.at_us(), refund.receipt.part())
}

/// Returns whether the slot of `units` that ends at `own` begins where another one ends.
fn is_side_by_side(quota: &Quota, own: Pair, units: u64, end: Pair) -> bool {
    match quota.rules() {
        Rules::Pair(PairRules::Gcra(gcra), _) => gcra.begins_at(own, units, end),
        Rules::Pair(PairRules::WideGcra(gcra), _) => gcra.begins_at(own, units, end),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::Key;
    use crate::limiter::Charge;
    use crate::limiter::redis::tag::Tags;
    use crate::policy::Policy;
    use crate::{MemoryLimiter, clock::ManualClock};
    use std::time::Duration;

    /// Returns the receipts of a queue's first slots, the last one first.
    fn slots(limiter: &MemoryLimiter, policy: &Policy, costs: &[u64]) -> Vec<Receipt> {
        let take = |cost: &u64| {
            let mut decision = limiter.take_now(&[Charge::new(policy, &Key::global()).cost(*cost)]);
            decision.charge_mut(0).unwrap().take_receipt().unwrap()
        };
        let mut slots: Vec<Receipt> = costs.iter().map(take).collect();
        slots.reverse();
        slots
    }

    /// Queues whose interval is and is not a whole number of microseconds.
    fn queues() -> [Policy; 2] {
        [1_000, 7].map(|limit| {
            let quota = Quota::leaky_queue(limit, Duration::from_secs(1)).unwrap().queue(50).unwrap();
            Policy::new("queue", quota).unwrap()
        })
    }

    #[test]
    fn slots_side_by_side_are_refunded_together() {
        for policy in queues() {
            let limiter = MemoryLimiter::builder().capacity(10).clock(ManualClock::new()).build().unwrap();
            let (refunds, tag) = (QueueRefunds::default(), Tags::default().of(&policy, &Key::global()));
            let slots = slots(&limiter, &policy, &[1, 2, 1, 3, 1]);
            let refund = |receipt| Refund::new(policy.clone(), Key::global(), receipt);
            let added: Vec<bool> = slots.into_iter().map(|slot| refunds.add(tag, refund(slot)).0).collect();
            assert_eq!(added, [true, false, false, false, false]);
            let due = refunds.next(tag).unwrap();
            assert_eq!((due.refund.receipt.units(), due.callers.len()), (8, 5));
            limiter.refund_now(&[due.refund]);
            assert_eq!(limiter.peek_one(&policy, &Key::global(), 0).remaining(), 51, "{}", policy.quota());
            // A refund that comes meanwhile waits until the end of the one under way.
            assert!(!refunds.add(tag, refund(Receipt::new(1, 1, 0))).0);
            assert!(refunds.next(tag).is_some());
            assert!(refunds.next(tag).is_none());
            assert!(refunds.add(tag, refund(Receipt::new(1, 1, 0))).0);
        }
    }

    /// As when their callers leave in any order.
    #[test]
    fn newest_slot_is_refunded_first() {
        for policy in queues() {
            let limiter = MemoryLimiter::builder().capacity(10).clock(ManualClock::new()).build().unwrap();
            let (refunds, tag) = (QueueRefunds::default(), Tags::default().of(&policy, &Key::global()));
            let mut slots = slots(&limiter, &policy, &[1, 1, 1, 1, 1]);
            slots.swap(1, 3);
            slots.swap(2, 4);
            let refund = |receipt| Refund::new(policy.clone(), Key::global(), receipt);
            slots.into_iter().for_each(|slot| drop(refunds.add(tag, refund(slot))));
            let due = refunds.next(tag).unwrap();
            assert_eq!((due.refund.receipt.units(), due.callers.len()), (5, 5));
            limiter.refund_now(&[due.refund]);
            assert_eq!(limiter.peek_one(&policy, &Key::global(), 0).remaining(), 51, "{}", policy.quota());
        }
    }

    #[test]
    fn slots_with_another_between_them_are_refunded_apart() {
        for policy in queues() {
            let limiter = MemoryLimiter::builder().capacity(10).clock(ManualClock::new()).build().unwrap();
            let (refunds, tag) = (QueueRefunds::default(), Tags::default().of(&policy, &Key::global()));
            let mut slots = slots(&limiter, &policy, &[1, 1, 1, 1, 1]);
            slots.remove(2); // of another process
            let refund = |receipt| Refund::new(policy.clone(), Key::global(), receipt);
            slots.into_iter().for_each(|slot| drop(refunds.add(tag, refund(slot))));
            let units: Vec<u64> =
                std::iter::from_fn(|| refunds.next(tag)).map(|due| due.refund.receipt.units()).collect();
            assert_eq!(units, [2, 2]);
        }
    }
}
