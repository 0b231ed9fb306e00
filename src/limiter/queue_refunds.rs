//! Refunds to leaky queues, in any order.
//!
//! A queue accepts the refund of a slot only while no later slot is taken. But requests leave in any order, and the
//! check of a later request may still be under way. So a refund that finds a later slot taken is kept. It is made
//! together with the refund of the next slot, which begins where the slot of the kept refund ends.
//!
//! Each queue has one refund under way at a time. While a refund is under way, further refunds of the queue wait, and
//! are then sent newest first. Refunds of adjacent slots are sent together, as the refund of one charge. If a store
//! answers refunds more slowly than requests leave, the oldest waiting refunds are given up. Otherwise clients could
//! make the waiting refunds use memory without bound.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::time::Duration;

use crate::algorithm::{Decider, Pair, PairDecider};
use crate::base::sync::{Mutex, MutexGuard, lock};
use crate::base::time::Timestamp;
use crate::decision::Receipt;
use crate::limiter::Refund;
use crate::quota::{Algorithm, Quota};

/// The maximum number of refunds of a limiter that are kept because a later slot is taken. Each kept refund takes
/// about 200 bytes.
const KEPT_MAX: usize = 4_096;

/// The maximum number of refunds of a queue that wait while another refund is under way. The oldest refunds are
/// given up, because their slots end first.
#[cfg(any(feature = "_redis", feature = "store"))]
const WAITING_MAX: usize = 256;

const LAST: Timestamp = Timestamp::from_micros(u64::MAX);

/// The refunds of the queues of a limiter. `Q` identifies a queue, whatever its current quota is. `C` is a caller
/// that waits for the result of a refund.
pub(super) struct QueueRefunds<Q, C>(Mutex<Queues<Q, C>>);

struct Queues<Q, C> {
    queues: HashMap<Q, LeakyQueue<C>>,
    /// The number of refunds that are kept because a later slot is taken.
    kept: usize,
    /// No slot of a kept refund ends before this instant.
    none_ends_before: Timestamp,
}

/// A queue that has a refund under way, or kept refunds.
struct LeakyQueue<C> {
    /// The refunds that wait or are kept, newest first.
    waiting: VecDeque<QueuedRefund<C>>,
    is_refunding: bool,
}

struct QueuedRefund<C> {
    refund: Refund,
    callers: Vec<C>,
    /// The end of the refund's slot, if the refund found a later slot taken.
    kept_until: Option<Timestamp>,
}

/// Returns whether refunds under a quota are made through [`QueueRefunds`].
pub(super) fn is_queue(quota: &Quota) -> bool {
    quota.algorithm() == Algorithm::LeakyQueue
}

impl<Q: Copy + Eq + Hash, C> QueueRefunds<Q, C> {
    pub(super) fn new() -> Self {
        Self(Mutex::new(Queues { queues: HashMap::new(), kept: 0, none_ends_before: LAST }))
    }

    /// Adds a refund. Returns `true` if the queue has no other refund under way. The caller then has to call
    /// [`next`](Self::next).
    pub(super) fn add(&self, queue: Q, refund: Refund, caller: C) -> bool {
        let mut queues = self.lock();
        let was_refunding = std::mem::replace(&mut queues.queues.entry(queue).or_default().is_refunding, true);
        queues.insert(queue, QueuedRefund { refund, callers: vec![caller], kept_until: None });
        !was_refunding
    }

    /// If too many refunds wait, gives up the oldest refund. Returns the callers that wait for the result of
    /// that refund.
    #[cfg(any(feature = "_redis", feature = "store"))]
    pub(super) fn give_up_oldest(&self, queue: Q) -> Vec<C> {
        let given_up = self.lock().queues.get_mut(&queue).and_then(LeakyQueue::take_one_too_many);
        given_up.map(|given_up| given_up.callers).unwrap_or_default()
    }

    /// Returns the next refund to make, and the callers that wait for its result. Call this method when no refund
    /// of this queue is under way.
    pub(super) fn next(&self, queue: Q) -> Option<(Refund, Vec<C>)> {
        let mut queues = self.lock();
        let own = queues.queues.get_mut(&queue)?;
        let next = own.waiting.iter().position(|waiting| waiting.kept_until.is_none());
        if let Some(QueuedRefund { refund, callers, .. }) = next.and_then(|next| own.waiting.remove(next)) {
            return Some((refund, callers));
        }
        own.is_refunding = false;
        queues.remove_if_over(queue);
        None
    }

    /// Keeps a refund that found a later slot taken, until the refund's slot is over.
    pub(super) fn keep(&self, queue: Q, refund: Refund, now: Timestamp) {
        let until = now.saturating_add(longest(refund.policy.quota()));
        let mut queues = self.lock();
        if queues.kept >= KEPT_MAX && queues.none_ends_before <= now {
            queues.forget_over(now);
        }
        if queues.kept < KEPT_MAX {
            queues.none_ends_before = queues.none_ends_before.min(until);
            queues.insert(queue, QueuedRefund { refund, callers: Vec::new(), kept_until: Some(until) });
        }
    }

    /// Forgets the kept refunds of a queue.
    pub(super) fn forget(&self, queue: Q) {
        let mut queues = self.lock();
        queues.retain_kept(queue, |_| false);
        queues.remove_if_over(queue);
    }

    fn lock(&self) -> MutexGuard<'_, Queues<Q, C>> {
        lock(&self.0)
    }
}

impl<Q: Copy + Eq + Hash, C> Queues<Q, C> {
    fn insert(&mut self, queue: Q, new: QueuedRefund<C>) {
        let queue = self.queues.entry(queue).or_default();
        self.kept += usize::from(new.kept_until.is_some());
        let at = queue.waiting.partition_point(|other| end(&other.refund) > end(&new.refund));
        queue.waiting.insert(at, new);
        self.kept -= queue.join(at) + at.checked_sub(1).map_or(0, |newer| queue.join(newer));
    }

    /// Forgets the kept refunds whose slots are over.
    fn forget_over(&mut self, now: Timestamp) {
        self.none_ends_before = LAST;
        let queues: Vec<Q> = self.queues.keys().copied().collect();
        for queue in queues {
            let mut first = LAST;
            self.retain_kept(queue, |until| {
                let is_over = until <= now;
                first = if is_over { first } else { first.min(until) };
                !is_over
            });
            self.none_ends_before = self.none_ends_before.min(first);
            self.remove_if_over(queue);
        }
    }

    fn retain_kept(&mut self, queue: Q, mut retain: impl FnMut(Timestamp) -> bool) {
        let Some(queue) = self.queues.get_mut(&queue) else { return };
        let before = queue.waiting.len();
        queue.waiting.retain(|waiting| waiting.kept_until.is_none_or(&mut retain));
        self.kept -= before - queue.waiting.len();
    }

    /// Removes a queue if it has no refund left: none is under way, none waits, and none is kept for a later try.
    fn remove_if_over(&mut self, queue: Q) {
        if self.queues.get(&queue).is_some_and(|queue| !queue.is_refunding && queue.waiting.is_empty()) {
            self.queues.remove(&queue);
        }
    }
}

impl<C> LeakyQueue<C> {
    /// Removes the oldest refund that waits, if too many wait.
    #[cfg(any(feature = "_redis", feature = "store"))]
    fn take_one_too_many(&mut self) -> Option<QueuedRefund<C>> {
        if self.waiting.len() <= WAITING_MAX {
            return None;
        }
        let waits = |waiting: &QueuedRefund<C>| waiting.kept_until.is_none();
        let is_one_too_many = self.waiting.iter().filter(|waiting| waits(waiting)).count() > WAITING_MAX;
        let oldest = self.waiting.iter().rposition(waits).filter(|_| is_one_too_many)?;
        self.waiting.remove(oldest)
    }

    /// Merges the refund at index `at` and the next older refund into one, if their slots are adjacent. Returns
    /// by how much the number of kept refunds falls.
    fn join(&mut self, at: usize) -> usize {
        let (Some(newer), Some(older)) = (self.waiting.get(at), self.waiting.get(at + 1)) else { return 0 };
        if !is_side_by_side(&newer.refund, &older.refund) {
            return 0;
        }
        let older = self.waiting.remove(at + 1);
        let (Some(mut older), Some(newer)) = (older, self.waiting.get_mut(at)) else {
            debug_assert!(false, "both refunds were in the queue just before");
            return 0;
        };
        let Refund { receipt, .. } = &newer.refund;
        let units = receipt.units().saturating_add(older.refund.receipt.units());
        newer.refund.receipt = Receipt::new(units, receipt.at_us(), receipt.part());
        // Uses the quota with the larger capacity, because it has room for all units in use.
        if older.refund.policy.quota().capacity() > newer.refund.policy.quota().capacity() {
            newer.refund.policy = older.refund.policy;
        }
        newer.callers.append(&mut older.callers);
        let kept = [newer.kept_until, older.kept_until];
        // The merged refund is tried at once, unless both refunds were kept for a later try.
        newer.kept_until = if let [Some(one), Some(other)] = kept { Some(one.max(other)) } else { None };
        kept.iter().flatten().count() - usize::from(newer.kept_until.is_some())
    }
}

impl<C> Default for LeakyQueue<C> {
    fn default() -> Self {
        Self { waiting: VecDeque::new(), is_refunding: false }
    }
}

/// Returns the longest time until a slot of the queue is over, rounded up.
fn longest(quota: &Quota) -> Duration {
    match quota.decider() {
        Decider::Pair(decider, _) => Duration::from_micros(decider.get().longest_us(0) + 1),
        Decider::EntryLog(_) | Decider::Places(_) => Duration::ZERO, // no queue
    }
}

/// Returns the end of a refund's slot as a pair that sorts in order of time.
fn end(refund: &Refund) -> (u64, u64) {
    (refund.receipt.at_us(), refund.receipt.part())
}

/// Returns whether the slot of a refund begins where the slot of an older refund ends. The quota of the queue may
/// have changed between the two refunds. Slots of the same interval fit together, however long the queue is.
fn is_side_by_side(newer: &Refund, older: &Refund) -> bool {
    let pair = |refund: &Refund| Pair { at: refund.receipt.at_us(), n: refund.receipt.part() };
    let (own, units, end) = (pair(newer), newer.receipt.units(), pair(older));
    has_one_interval(newer.policy.quota(), older.policy.quota())
        && match newer.policy.quota().decider() {
            Decider::Pair(PairDecider::Gcra(gcra), _) => gcra.begins_at(own, units, end),
            Decider::Pair(PairDecider::WideGcra(gcra), _) => gcra.begins_at(own, units, end),
            _ => false,
        }
}

fn has_one_interval(one: &Quota, other: &Quota) -> bool {
    let product = |one: &Quota, other: &Quota| u128::from(one.spec().limit) * u128::from(other.spec().period_us);
    product(one, other) == product(other, one)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::Key;
    use crate::limiter::Charge;
    use crate::policy::Policy;
    use crate::{MemoryLimiter, clock::ManualClock};

    /// A queue in memory, and refunds to it.
    struct Bench {
        limiter: MemoryLimiter,
        policy: Policy,
        refunds: QueueRefunds<u8, usize>,
    }

    impl Bench {
        fn take(&self, cost: u64) -> Receipt {
            let mut decision = self.limiter.take_now(&[Charge::new(&self.policy, &Key::global()).cost(cost)]);
            decision.charge_mut(0).unwrap().take_receipt().unwrap()
        }

        fn refund(&self, receipt: Receipt) -> Refund {
            Refund::new(self.policy.clone(), Key::global(), receipt)
        }

        /// Adds a refund. Returns whether it is the first.
        fn add(&self, receipt: Receipt) -> bool {
            self.refunds.add(1, self.refund(receipt), 0)
        }

        /// Returns the units of the next refund and its number of callers.
        fn next(&self) -> Option<(u64, usize)> {
            self.refunds.next(1).map(|(refund, callers)| (refund.receipt.units(), callers.len()))
        }

        /// Returns the numbers of queues and of refunds that are kept.
        fn sizes(&self) -> (usize, usize) {
            let queues = self.refunds.lock();
            (queues.queues.len(), queues.kept)
        }

        fn keep(&self, receipt: Receipt, now: u64) {
            self.refunds.keep(1, self.refund(receipt), Timestamp::from_micros(now));
        }
    }

    /// Queues whose interval is and is not a whole number of microseconds.
    fn queues() -> [Bench; 2] {
        [1_000, 7].map(|limit| {
            let limiter = MemoryLimiter::builder().max_keys(10).clock(ManualClock::new()).build().unwrap();
            let quota = Quota::leaky_queue(limit, Duration::from_secs(1)).unwrap().queue(50).unwrap();
            Bench { limiter, policy: Policy::new("queue", quota).unwrap(), refunds: QueueRefunds::new() }
        })
    }

    #[test]
    fn slots_side_by_side_are_refunded_together_in_any_order() {
        for queue in queues() {
            for order in [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [4, 1, 3, 0, 2]] {
                let mut slots = [1, 2, 1, 3, 1].map(|cost| Some(queue.take(cost)));
                let added = order.map(|at| queue.add(slots[at].take().unwrap()));
                assert_eq!(added, [true, false, false, false, false]);
                let (refund, callers) = queue.refunds.next(1).unwrap();
                assert_eq!((refund.receipt.units(), callers.len()), (8, 5));
                queue.limiter.refund_now(&[refund]);
                assert_eq!(queue.limiter.peek_one(&queue.policy, &Key::global(), 0).remaining(), 51);
                // A refund that comes meanwhile waits until the end of the one under way.
                assert!(!queue.add(Receipt::new(1, 1, 0)));
                assert!(queue.next().is_some() && queue.next().is_none());
                assert_eq!(queue.sizes(), (0, 0));
            }
        }
    }

    #[test]
    fn slots_with_another_between_them_are_refunded_apart() {
        for queue in queues() {
            let mut slots = [1, 1, 1, 1, 1].map(|cost| Some(queue.take(cost)));
            slots[2] = None; // of another process
            let added: Vec<bool> = slots.into_iter().flatten().map(|slot| queue.add(slot)).collect();
            assert_eq!(added, [true, false, false, false]);
            assert_eq!([queue.next(), queue.next(), queue.next()], [Some((2, 2)), Some((2, 2)), None]);
        }
    }

    #[test]
    fn kept_refund_goes_with_the_slot_behind_it() {
        for queue in queues() {
            let [first, second, third, fourth] = [1, 1, 1, 1].map(|cost| queue.take(cost));
            queue.add(first);
            let (refund, _) = queue.refunds.next(1).unwrap();
            queue.add(fourth);
            queue.keep(refund.receipt, 0);
            assert_eq!([queue.next(), queue.next()], [Some((1, 1)), None], "the kept one is not tried alone");
            assert_eq!(queue.sizes(), (1, 1));
            assert!(queue.add(second));
            let (refund, callers) = queue.refunds.next(1).unwrap();
            assert_eq!((refund.receipt.units(), callers.len()), (2, 1));
            queue.keep(refund.receipt, 0);
            assert_eq!((queue.next(), queue.sizes()), (None, (1, 1)), "they are one");
            assert!(queue.add(third));
            assert_eq!([queue.next(), queue.next()], [Some((3, 1)), None]);
            assert_eq!(queue.sizes(), (0, 0));
        }
    }

    #[cfg(any(feature = "_redis", feature = "store"))]
    #[test]
    fn refunds_that_wait_are_bounded_and_the_oldest_are_given_up() {
        for queue in queues() {
            let longest = longest(queue.policy.quota()).as_micros() as u64;
            let slot = |at: u64| Receipt::new(1, 3 * at * longest, 0); // none side by side
            queue.add(slot(1));
            assert!(queue.next().is_some(), "one is under way");
            queue.keep(slot(2), 0);
            let given_up = (3..10_000).map(|at| {
                queue.add(slot(at));
                queue.refunds.give_up_oldest(1).len()
            });
            assert_eq!(given_up.sum::<usize>(), 9_997 - WAITING_MAX);
            let (newest, _) = queue.refunds.next(1).unwrap();
            assert_eq!(newest.receipt.at_us(), slot(9_999).at_us());
            assert_eq!(queue.refunds.lock().queues[&1].waiting.len(), WAITING_MAX, "with the one that is kept");
        }
    }

    #[test]
    fn kept_refunds_are_bounded_and_forgotten_when_they_are_over() {
        for queue in queues() {
            let longest = longest(queue.policy.quota()).as_micros() as u64;
            let kept = |at| queue.keep(Receipt::new(1, 3 * at * longest, 0), at); // none side by side
            (1..=KEPT_MAX as u64 + 10).for_each(kept);
            assert_eq!(queue.sizes(), (1, KEPT_MAX));
            kept(longest + 100);
            assert_eq!(queue.sizes(), (1, KEPT_MAX - 100 + 1), "a hundred were over");
            assert_eq!(queue.refunds.lock().queues[&1].waiting.len(), KEPT_MAX - 100 + 1);
            queue.refunds.forget(1);
            assert_eq!(queue.sizes(), (0, 0));
        }
    }
}
