//! States in this process's memory.
//!
//! [`MemoryLimiter`] is the limiter; [`MemoryLimiterBuilder`] sets one up.
//!
//! # Floods of fresh keys
//!
//! With [`OnFull::Evict`] a key that is out of allowance is never forgotten while a key that it competes with has some left. A
//! flood has to use its keys up. `tests/memory_floods.rs` measures how many used-up keys come before a key that is out of
//! allowance is forgotten, at a limiter of capacity `C`:
//!
//! | flood of used-up | which states it forgets | the first after | half after |
//! |---|---|---|---|
//! | states of one word: buckets, windows | states of one word | 2.4·C | 2.7·C |
//! | larger states: two words, sub-windows, logs of 1 and of 100 | larger states, but no closed block | 3.2·C | 4.0·C |
//! | closed blocks | larger states, and closed blocks | 3.1·C | 4.0·C |
//! | meters | nobody: where there is no room, the new meter is denied | never | never |
//!
//! Logs that need more entries than there are lose precision, not their units: see [`MemoryLimiter`].
//!
//! # Changed quotas
//!
//! A state names the quota it was written under, so that a changed quota keeps what was used. A limiter tells 16,383 quotas
//! apart that have live states. Beyond that each quota holds all the same, but a key whose quota changes starts afresh, and
//! the observer gets [`TooManyQuotas`](crate::LimiterEvent::TooManyQuotas). When three quarters of the numbers are in use,
//! the limiter looks for quotas that nobody used for ten seconds and that have no live state: about ten milliseconds for a
//! million keys, in the request that happens to find it due.

mod arena;
mod builder;
mod foreign;
mod give_back;
mod large;
#[cfg(all(test, ratelimit_loom))]
mod loom_tests;
mod many;
mod many_words;
mod news;
mod one_large;
mod one_word;
mod quick;
mod registry;
mod snapshot;
mod store;
mod words;
mod worth;

use std::convert::Infallible;
use std::fmt;
use std::future::Ready;
use std::sync::Arc;

use crate::algorithm::Rules;
use crate::decision::{ChargeDecision, Decision, Receipt};
use crate::key::Key;
use crate::limiter::{Charge, Effect, Limiter, Refund, Reply, Roster, UnsupportedQuota, UnsupportedQuotaKind};
use crate::policy::Policy;
use crate::quota::Quota;

use store::Store;

pub use builder::{MemoryLimiterBuilder, MemoryLimiterError, MemoryLimiterErrorKind, OnFull};

/// A limiter in this process's memory: every algorithm, any mix of quotas. A state of one word is locked for a few
/// instructions of each charge, and a denied charge only reads it.
///
/// Clones share one table. Sets of charges are [atomic](crate::Atomicity::Atomic). Nothing runs in the background.
///
/// # Memory
///
/// It is bounded, whatever comes in. A limiter of capacity `n` takes `40·n` bytes for states of one word (a million keys:
/// 40 MB), of which only what is touched is resident. Buckets, fixed windows and sliding windows of one bucket are one
/// word unless their numbers are unusually large; other states (exact pairs of such rates, sub-windows, logs) live in a
/// second table of `128·n` bytes and an arena of 18.3 bytes for each entry, which are made when the first such quota is
/// used. [`bytes`](Self::bytes) returns the sum.
///
/// One key may use its whole quota, as long as the arena has an [entry](MemoryLimiterBuilder::entries) for each date that it
/// needs; [`supports`](Limiter::supports) returns an error for a quota that can never fit. When the arena is full, logs and
/// sub-windows share it by losing precision: neighbouring entries of a key become one of the later date. Such a key may be
/// refused for longer than it was told, never for less time, and no key is forgotten or refused for want of entries.
///
/// A state that has expired is free space, without anybody having to remove it. When all slots that a new key may use are
/// live, [`OnFull`] says what happens, except to [meters](crate::Quota::meter), which are never evicted, and of which a new one
/// is denied where there is no room; of a million keys in a table of that capacity fewer than ten are forgotten.
///
/// Keys are not kept. A fingerprint of 50 bits is, made with a secret drawn from the system's randomness, so nobody can aim
/// at another's key.
#[derive(Clone)]
pub struct MemoryLimiter(Arc<Store>);

impl MemoryLimiter {
    /// A limiter for a million keys.
    #[must_use]
    pub fn new() -> Self {
        MemoryLimiterBuilder::build_default()
    }

    /// Sets up a limiter.
    pub fn builder() -> MemoryLimiterBuilder {
        MemoryLimiterBuilder::new()
    }

    /// Takes `cost` units from what `policy` allows `key`: the shortest way to a single decision, for use without a
    /// service.
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
    #[inline]
    #[must_use = "a denied cost was not taken"]
    pub fn take_one(&self, policy: &Policy, key: &Key, cost: u64) -> ChargeDecision {
        self.0.charge(policy, key, cost, false)
    }

    /// Answers as [`take_one`](Self::take_one) would, and takes nothing.
    #[must_use]
    pub fn peek_one(&self, policy: &Policy, key: &Key, cost: u64) -> ChargeDecision {
        self.0.peek(&Charge::new(policy, key).cost(cost))
    }

    /// Takes all charges or none.
    #[inline(always)]
    #[must_use = "denied charges were not taken"]
    pub fn take_now(&self, charges: &[Charge<'_>]) -> Decision {
        match charges {
            [charge] if !matches!(charge.effect, Effect::OnRefusal { .. }) => {
                let decision = self.0.charge(charge.policy, charge.key, charge.cost, charge.effect == Effect::Force);
                Decision::one(decision.is_allowed() || charge.effect != Effect::Enforce, decision)
            }
            charges => Decision::made(|decisions| self.0.charge_all(charges, decisions)),
        }
    }

    /// Answers as [`take_now`](Self::take_now) would, and takes nothing.
    #[must_use]
    pub fn peek_now(&self, charges: &[Charge<'_>]) -> Decision {
        self.0.peek_all(charges)
    }

    /// Gives back what each receipt still holds.
    pub fn refund_now(&self, refunds: &[Refund]) {
        refunds.iter().for_each(|refund| self.0.refund(refund));
    }

    /// Forgets the state of a (policy, key): its whole quota is back.
    pub fn reset_now(&self, policy: &Policy, key: &Key) {
        self.0.reset(policy, key);
    }

    /// All live states, to be [restored](MemoryLimiterBuilder::restore) later, so that a daily quota survives a deploy.
    ///
    /// Each state is as it was at one instant, not all at the same. The snapshot holds fingerprints and the secret that they
    /// were made with, no keys; keep it as you would keep a log of clients. It takes about 24 bytes for each key.
    #[must_use]
    pub fn snapshot(&self) -> Vec<u8> {
        snapshot::Snapshot::of(&self.0).write()
    }

    /// Bytes that the tables take at most, of which only what was touched is resident.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.words.bytes() + self.0.large.get().map_or(0, large::Large::bytes)
    }
}

impl Default for MemoryLimiter {
    fn default() -> Self {
        Self::new()
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
        Reply::Now(Ok(self.take_now(charges)))
    }

    #[inline(always)]
    fn take_at_once(&self, policy: &Policy, key: &Key, cost: u64) -> Option<ChargeDecision> {
        Some(self.take_one(policy, key, cost))
    }

    fn supports(&self, quota: &Quota) -> Result<(), UnsupportedQuota> {
        let Rules::Trail(rules) = quota.rules() else { return Ok(()) };
        let (needed, held) = (rules.entries_max(), self.0.setup.entries);
        if usize::try_from(needed).is_ok_and(|needed| needed <= held) {
            return Ok(());
        }
        let reason = format!(
            "one key may need {needed} dated entries, and the limiter holds {held}: build it with \
             MemoryLimiter::builder().entries({needed}), or use a token bucket or a sliding window of fewer buckets"
        );
        Err(UnsupportedQuota::new(UnsupportedQuotaKind::TooLarge, quota, reason))
    }

    #[inline(always)]
    fn take_quietly(&self, charges: &[Charge<'_>], receipts: &mut [Receipt]) -> bool {
        self.0.charge_quietly(charges, receipts)
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

    fn roster(&self) -> Option<&Roster> {
        Some(&self.0.roster)
    }
}
