//! A `MemoryLimiter`: its public methods, and its implementation of the trait `Limiter`.

use std::convert::Infallible;
use std::fmt;
use std::future::Ready;
use std::sync::Arc;

use crate::algorithm::Decider;
use crate::clock::Clock;
use crate::decision::{ChargeDecision, Decision, Receipt, Several};
use crate::key::Key;
use crate::limiter::{
    Charge, Effect, Limiter, LimiterHooks, Occupancy, Place, PlaceLines, PolicyRegistry, Refund, Reply,
    UnsupportedQuota, UnsupportedQuotaKind,
};
use crate::outcome::Observer;
use crate::policy::Policy;
use crate::quota::Quota;

use super::snapshot::Snapshot;
use super::states::States;

/// A limiter in this process's memory, for every algorithm and any mix of quotas.
///
/// Clones share one table. A set of charges is [atomic](crate::limiter::Atomicity::Atomic): an admitted set
/// is decided at one instant. On processors that order reads and writes more weakly than x86 does, its charges of
/// cost 0 may be decided a moment before the others. A refused set takes nothing, and may report states from
/// different instants of the call. Nothing runs in the background.
///
/// # Memory
///
/// Memory is bounded for any input. [`bytes`](Self::bytes) returns the bound. The limiter reserves memory up to this
/// bound, and only the touched part is resident.
///
/// * A limiter of capacity `n` has a table of at most `40·n` bytes (40 MB for a million keys). The table
///   begins with 32 to 64 kB and doubles when a key finds no room, so it takes about 20 to 60 bytes for each
///   active key. A key is active until ten seconds after its state expired. The table never shrinks. Buckets,
///   fixed windows and sliding windows of one bucket need no other memory, unless their numbers are unusually
///   large.
/// * Other states (sub-windows, logs, and large numbers) also need blocks of 128 bytes from an arena of
///   `320·n` bytes. A block holds six entries. The limiter makes the arena when the first quota that needs it
///   is used.
///
/// A single key may use its whole quota, as long as the arena has an
/// [entry](super::MemoryLimiterBuilder::min_entries) for each date that the quota needs.
/// [`supports`](Limiter::supports) returns an error for a quota that can never fit. When the arena is full,
/// logs and sub-windows lose precision: two neighbouring entries of a key become one entry with the later
/// date. A key with merged entries may be refused for longer than was reported, and a refund of a merged
/// entry may have no effect. A merge never makes the limit more permissive, and no key is forgotten for lack
/// of entries.
///
/// While the table grows, each call moves a few keys. The call that begins the growth takes about 20
/// microseconds longer. No key is forgotten or denied before the table has its full size.
///
/// An expired state is free space; no sweep is needed. When all slots that a new key may use hold live states,
/// [`OnFull`](super::OnFull) decides. A limiter with a capacity of a million keys that gets a million keys forgets
/// fewer than ten of them.
///
/// [Meters](crate::quota::Quota::meter) and the units of requests in flight are never evicted, so many such states
/// make the table grow sooner. States that are never evicted take at most about half of the slots, and a charge that
/// finds no room for another such state is denied. While there are at most `n` such states, more than 999 of 1,000
/// new ones find room. There is one exception: if states of 16,382 [quotas](crate::limiter::memory#changed-quotas)
/// are live, meters of further quotas are evicted like other keys.
///
/// The limiter does not store keys. The limiter stores 50-bit fingerprints, made with a random secret of the system,
/// so an attacker cannot choose a key that collides with another client's key.
#[derive(Clone)]
pub struct MemoryLimiter(pub(super) Arc<States>);

impl MemoryLimiter {
    /// Takes `cost` units from what `policy` allows `key`. This method is the shortest way to a single
    /// decision without a service.
    ///
    /// ```
    /// use tower_ratelimit::{Key, MemoryLimiter, Policy, Quota};
    ///
    /// let limiter = MemoryLimiter::new();
    /// let policy = Policy::from(Quota::per_minute(2));
    /// let key = Key::of("alice").unwrap();
    /// assert!(limiter.take_one(&policy, &key, 1).is_allowed());
    /// assert!(limiter.take_one(&policy, &key, 1).is_allowed());
    /// assert!(!limiter.take_one(&policy, &key, 1).is_allowed());
    /// ```
    #[inline(always)]
    #[must_use = "a denied cost was not taken"]
    pub fn take_one(&self, policy: &Policy, key: &Key, cost: u64) -> ChargeDecision {
        self.0.charge(Charge::new(policy, key).cost(cost))
    }

    /// Takes `cost` units of a [concurrency limit](Quota::concurrent), and holds them until the [`Place`] is
    /// dropped. [`Ready::hold`](crate::limiter::Ready::hold) waits until the units are free. If the
    /// [receipt](crate::limiter::Receipt) of a charge is dropped instead of refunded, the units of the charge
    /// stay held.
    ///
    /// ```
    /// use tower_ratelimit::{Key, MemoryLimiter, Policy, Quota};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let (limiter, renders) =
    ///     (MemoryLimiter::new(), Policy::new("renders", Quota::concurrent(4))?);
    /// match limiter.hold(&renders, &Key::of("alice").unwrap(), 1) {
    ///     Ok(place) => {
    ///         // Render.
    ///         drop(place);
    ///     }
    ///     Err(denied) => println!("{} of {} are free", denied.remaining(), denied.limit()),
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Returns the decision if the units are not free.
    pub fn hold(&self, policy: &Policy, key: &Key, cost: u64) -> Result<Place, ChargeDecision> {
        let mut decision = self.take_one(policy, key, cost);
        if !decision.is_allowed() {
            return Err(decision);
        }
        let refund = |receipt| Refund::new(policy.clone(), key.clone(), receipt);
        Ok(Place::new(self.clone(), decision.take_receipt().map(refund)))
    }

    /// Returns what [`take_one`](Self::take_one) would return, and takes nothing.
    #[must_use]
    pub fn peek_one(&self, policy: &Policy, key: &Key, cost: u64) -> ChargeDecision {
        let mut decisions = Several::new();
        self.0.charge_all(&[Charge::new(policy, key).cost(cost)], &mut decisions, false);
        debug_assert!(decisions.len() == 1, "one charge has one decision");
        decisions.pop().unwrap_or(ChargeDecision::blank())
    }

    /// Takes all charges, or none of them.
    #[inline(always)]
    #[must_use = "denied charges were not taken"]
    pub fn take_now(&self, charges: &[Charge<'_>]) -> Decision {
        self.take_as(charges, |decision| decision)
    }

    /// Takes all charges, or none of them, and returns the result of `answer` for the decision. Each branch builds
    /// the whole answer. If the branches met before the answer was built, a decision about several charges
    /// would be copied, which is slow because the decision is large.
    #[inline(always)]
    fn take_as<T>(&self, charges: &[Charge<'_>], answer: impl FnOnce(Decision) -> T) -> T {
        match charges {
            [charge] if !matches!(charge.effect, Effect::OnRefusal { .. }) => {
                let decision = self.0.charge(*charge);
                answer(Decision::one(decision.is_allowed() || charge.effect != Effect::Enforce, decision))
            }
            charges => answer(Decision::made(|decisions| self.0.charge_set(charges, decisions))),
        }
    }

    /// Returns what [`take_now`](Self::take_now) would return, and takes nothing.
    #[must_use]
    pub fn peek_now(&self, charges: &[Charge<'_>]) -> Decision {
        Decision::made(|decisions| self.0.charge_all(charges, decisions, false))
    }

    /// Refunds what a receipt still holds of a charge to (policy, key), like [`Limiter::refund`].
    ///
    /// ```
    /// use tower_ratelimit::{Key, MemoryLimiter, Policy, Quota};
    ///
    /// let limiter = MemoryLimiter::new();
    /// let policy = Policy::from(Quota::per_minute(2));
    /// let key = Key::of("alice").unwrap();
    /// let mut decision = limiter.take_one(&policy, &key, 2);
    /// if let Some(receipt) = decision.take_receipt() {
    ///     limiter.refund_one(&policy, &key, receipt);
    /// }
    /// assert_eq!(limiter.peek_one(&policy, &key, 0).remaining(), 2);
    /// ```
    #[inline]
    #[expect(clippy::needless_pass_by_value, reason = "a receipt is refunded at most once")]
    pub fn refund_one(&self, policy: &Policy, key: &Key, receipt: Receipt) {
        self.0.refund(policy, key, &receipt);
    }

    /// Refunds what each receipt still holds, like [`Limiter::refund`].
    pub fn refund_now(&self, refunds: &[Refund]) {
        refunds.iter().for_each(|Refund { policy, key, receipt }| self.0.refund(policy, key, receipt));
    }

    /// Makes a refund as the script on Redis does, without keeping a refund that has no effect yet. Returns whether
    /// a later slot of the queue is taken.
    #[cfg(all(test, feature = "_redis"))]
    pub(crate) fn refund_once(&self, refund: &Refund) -> bool {
        self.0.refund_once(&refund.policy, &refund.key, &refund.receipt)
    }

    /// Forgets the state of a (policy, key) pair, so that its whole quota is available again.
    pub fn reset_now(&self, policy: &Policy, key: &Key) {
        self.0.reset(policy, key);
    }

    /// Copies all live states, to be [restored](super::MemoryLimiterBuilder::restore) later, so that a daily
    /// quota survives a deploy.
    ///
    /// Each state is copied at its own instant. The snapshot holds no keys. It holds the fingerprints of the
    /// keys, and the secret with which the fingerprints were made. Protect a snapshot like a log of clients.
    /// A snapshot takes about 24 bytes for each key.
    #[must_use]
    pub fn snapshot(&self) -> Vec<u8> {
        Snapshot::of(&self.0).write()
    }

    /// Returns the maximum number of bytes that the states can take. Only the touched part is resident.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.bytes()
    }
}

impl fmt::Debug for MemoryLimiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryLimiter")
            .field("capacity", &self.0.setup.capacity)
            .field("on_full", &self.0.setup.on_full)
            .finish_non_exhaustive()
    }
}

impl Limiter for MemoryLimiter {
    type Error = Infallible;
    type Future<T: Send + 'static> = Ready<Result<T, Infallible>>;

    #[inline(always)]
    fn take(&self, charges: &[Charge<'_>]) -> Reply<Decision, Infallible, Ready<Result<Decision, Infallible>>> {
        self.take_as(charges, |decision| Reply::Now(Ok(decision)))
    }

    #[inline(always)]
    fn try_take_one(&self, policy: &Policy, key: &Key, cost: u64) -> Option<ChargeDecision> {
        Some(self.take_one(policy, key, cost))
    }

    #[inline]
    fn try_refund_one(&self, policy: &Policy, key: &Key, receipt: Receipt) -> Result<(), Receipt> {
        self.refund_one(policy, key, receipt);
        Ok(())
    }

    fn supports(&self, quota: &Quota) -> Result<(), UnsupportedQuota> {
        let Decider::EntryLog(rules) = quota.decider() else { return Ok(()) };
        let (needed, held) = (rules.entries_max(), self.0.entries_max());
        if usize::try_from(needed).is_ok_and(|needed| needed <= held) {
            return Ok(());
        }
        let reason = format!(
            "one key may need {needed} dated entries, and the limiter holds {held}: build it with \
             MemoryLimiter::builder().min_entries({needed}), or use a token bucket or a sliding window of fewer buckets"
        );
        Err(UnsupportedQuota::new(UnsupportedQuotaKind::TooLarge, quota, reason))
    }

    fn peek(&self, charges: &[Charge<'_>]) -> Reply<Decision, Infallible, Ready<Result<Decision, Infallible>>> {
        Reply::Now(Ok(self.peek_now(charges)))
    }

    fn refund(&self, refunds: Vec<Refund>) -> Reply<(), Infallible, Ready<Result<(), Infallible>>> {
        self.refund_now(&refunds);
        Reply::Now(Ok(()))
    }

    fn reset(&self, policy: &Policy, key: &Key) -> Reply<(), Infallible, Ready<Result<(), Infallible>>> {
        self.reset_now(policy, key);
        Reply::Now(Ok(()))
    }

    fn hooks(&self) -> &dyn LimiterHooks {
        self
    }
}

impl LimiterHooks for MemoryLimiter {
    fn observe(&self, observer: &Arc<dyn Observer>) {
        self.0.setup.observers.add(observer);
    }

    fn occupancy(&self) -> Option<Occupancy> {
        Some(Occupancy { keys: self.0.keys(), capacity: self.0.table.len() })
    }

    fn policy_registry(&self) -> Option<&PolicyRegistry> {
        Some(&self.0.policy_registry)
    }

    fn place_lines(&self) -> Option<&PlaceLines> {
        Some(&self.0.place_lines)
    }

    fn clock(&self) -> Option<Arc<dyn Clock>> {
        Some(self.0.clock.share())
    }
}
