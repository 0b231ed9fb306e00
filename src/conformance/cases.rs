//! The cases of the suite, each of which tests one promise of the contract.

use std::fmt::Debug;
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::report::Failure;
use super::threads::together;
use super::{CAPACITY, HOUR, MINUTE, Subject, block, meter, quotas};
use crate::decision::{ChargeDecision, Decision, Receipt};
use crate::key::Key;
use crate::limiter::{Atomicity, Charge, Effect, Limiter, Refund};
use crate::policy::Policy;
use crate::quota::{Algorithm, Quota, QuotaError};

/// The number of concurrent tasks.
const TASKS: usize = 4;

/// The number of peeks until a settlement that was sent must have arrived.
const PEEKS: usize = 10_000;

/// Declares the cases and the function that runs them. There is no other list of cases.
macro_rules! cases {
    ($(#[doc = $about:literal])+ fn $run:ident;
     $($(#[doc = $promise:literal])+ #[fix = $fix:literal] async fn $name:ident($bench:ident) $body:block)+) => {
        $(
            $(#[doc = $promise])+
            async fn $name<S: Subject>($bench: &Bench<'_, S>) -> Result<(), String> $body
        )+

        $(#[doc = $about])+
        pub(super) async fn $run<S: Subject>(subject: &S, quota: Quota, failures: &mut Vec<Failure>) {
            $(
                let bench = Bench { subject, limiter: subject.limiter().await, quota };
                if let Err(found) = $name(&bench).await {
                    let (case, promise) = (stringify!($name), concat!($($promise),+));
                    failures.push(Failure { case, promise, fix: $fix, quota, found });
                }
            )+
        }
    };
}

/// The limiter and the quota of one case.
struct Bench<'a, S: Subject> {
    subject: &'a S,
    limiter: S::Limiter,
    quota: Quota,
}

/// Fails a case if a condition does not hold.
#[track_caller]
fn ensure(kept: bool, found: &str) -> Result<(), String> {
    if kept { Ok(()) } else { Err(format!("{found} ({})", Location::caller())) }
}

/// Fails a case if two values differ.
#[track_caller]
fn same<T: PartialEq + Debug + Copy>(what: &str, found: T, expected: T) -> Result<(), String> {
    ensure(found == expected, &format!("{what}: expected {expected:?}, found {found:?}"))
}

fn named(name: &str, quota: Result<Quota, QuotaError>) -> Result<Policy, String> {
    let quota = quota.map_err(|error| error.to_string())?;
    Policy::new(name, quota).map_err(|error| error.to_string())
}

fn key(name: &str) -> Key {
    Key::of(name).unwrap_or(Key::global())
}

impl<S: Subject> Bench<'_, S> {
    fn policy(&self, name: &str) -> Result<Policy, String> {
        named(name, Ok(self.quota))
    }

    fn supports(&self, quota: Result<Quota, QuotaError>) -> bool {
        quota.is_ok_and(|quota| self.limiter.supports(&quota).is_ok())
    }

    async fn take(&self, charges: &[Charge<'_>]) -> Result<Decision, String> {
        answered("take", self.limiter.take(charges).await, charges)
    }

    async fn peek(&self, charges: &[Charge<'_>]) -> Result<Decision, String> {
        answered("peek", self.limiter.peek(charges).await, charges)
    }

    async fn refund(&self, policy: &Policy, key: &Key, receipt: Receipt) -> Result<(), String> {
        let refunded = self.limiter.refund(vec![Refund::new(policy.clone(), key.clone(), receipt)]).await;
        refunded.map_err(|error| format!("refund failed: {error}"))
    }

    async fn reset(&self, policy: &Policy, key: &Key) -> Result<(), String> {
        self.limiter.reset(policy, key).await.map_err(|error| format!("reset failed: {error}"))
    }

    async fn remaining(&self, policy: &Policy, key: &Key) -> Result<u64, String> {
        let decision = self.peek(&[Charge::new(policy, key).cost(0)]).await?;
        Ok(decision.charges().first().map_or(0, ChargeDecision::remaining))
    }
}

/// Checks that an answer has one part for each charge.
fn answered<E: std::fmt::Display>(
    verb: &str,
    answer: Result<Decision, E>,
    charges: &[Charge<'_>],
) -> Result<Decision, String> {
    let decision = answer.map_err(|error| format!("{verb} failed: {error}"))?;
    let (found, expected) = (decision.charges().len(), charges.len());
    if found == expected {
        Ok(decision)
    } else {
        Err(format!("{verb} answered {expected} charges with {found} answers"))
    }
}

fn last_receipt(decision: &mut Decision) -> Result<Receipt, String> {
    decision.take_receipts().pop().flatten().ok_or_else(|| "a charge was taken without a receipt".to_owned())
}

cases! {
    /// Runs the cases of a quota that the limiter supports.
    fn run;

    /// From rest exactly the capacity passes, one by one.
    #[fix = "see Limiter::take: allow while the cost fits into what is left, and count what was taken"]
    async fn capacity_passes_from_rest(bench) {
        let (policy, key) = (bench.policy("rest")?, key("a"));
        for left in (0..CAPACITY).rev() {
            let decision = bench.take(&[Charge::new(&policy, &key)]).await?;
            ensure(decision.is_allowed(), "a unit of the capacity was denied")?;
            same("remaining after a unit", decision.charges()[0].remaining(), left)?;
            same("retry_after of an allowed charge", decision.charges()[0].retry_after(), None)?;
        }
        let denied = bench.take(&[Charge::new(&policy, &key)]).await?;
        ensure(!denied.is_allowed() && !denied.charges()[0].is_allowed(), "one unit more than the capacity passed")?;
        ensure(denied.charges()[0].retry_after().is_some(), "a denied cost that can pass later has no retry_after")
    }

    /// A cost is taken whole or not at all.
    #[fix = "compare the whole cost with what is left, before anything is written"]
    async fn cost_is_taken_whole_or_not_at_all(bench) {
        let (policy, key) = (bench.policy("whole")?, key("a"));
        ensure(bench.take(&[Charge::new(&policy, &key).cost(CAPACITY - 1)]).await?.is_allowed(), "a cost that fits was denied")?;
        ensure(!bench.take(&[Charge::new(&policy, &key).cost(2)]).await?.is_allowed(), "a cost above what is left passed")?;
        same("remaining after a denied cost", bench.remaining(&policy, &key).await?, 1)
    }

    /// A cost above the capacity is denied for good, and has no wait.
    #[fix = "deny a cost above Quota::capacity with ChargeDecision::denied(.., None)"]
    async fn cost_above_the_capacity_never_passes(bench) {
        let (policy, key) = (bench.policy("never")?, key("a"));
        for cost in [CAPACITY + 1, u64::MAX] {
            let denied = bench.take(&[Charge::new(&policy, &key).cost(cost)]).await?;
            ensure(!denied.is_allowed(), "a cost above the capacity passed")?;
            ensure(denied.charges()[0].is_never(), "a cost above the capacity has a retry_after")?;
        }
        same("remaining after denied costs", bench.remaining(&policy, &key).await?, CAPACITY)
    }

    /// Cost 0 looks: it is allowed even when nothing is left, and takes nothing.
    #[fix = "answer cost 0 with what is left, and write nothing"]
    async fn cost_0_looks(bench) {
        let (policy, key) = (bench.policy("look")?, key("a"));
        let zero = Charge::new(&policy, &key).cost(0);
        same("remaining of a key at rest", bench.take(&[zero]).await?.charges()[0].remaining(), CAPACITY)?;
        let _ = bench.take(&[Charge::new(&policy, &key).cost(CAPACITY)]).await?;
        let looked = bench.take(&[zero]).await?;
        ensure(looked.is_allowed(), "a look was denied because nothing is left")?;
        same("remaining of a used-up key", looked.charges()[0].remaining(), 0)
    }

    /// The shortcut for one enforced charge, if there is one, answers as a take and takes as much.
    #[fix = "let try_take_one decide by the same function as take, or return None"]
    async fn shortcut_is_a_take(bench) {
        let (policy, quick, slow) = (bench.policy("shortcut")?, key("quick"), key("slow"));
        for cost in [0, 2, 1, CAPACITY, 2, 1, u64::MAX] {
            let Some(quickly) = bench.limiter.try_take_one(&policy, &quick, cost) else { return Ok(()) };
            let taken = bench.take(&[Charge::new(&policy, &slow).cost(cost)]).await?;
            same("is_allowed of the shortcut", quickly.is_allowed(), taken.is_allowed())?;
            same("remaining of the shortcut", quickly.remaining(), taken.charges()[0].remaining())?;
            let left = [bench.remaining(&policy, &quick).await?, bench.remaining(&policy, &slow).await?];
            same("remaining after the shortcut", left[0], left[1])?;
        }
        let Some(mut quickly) = bench.limiter.try_take_one(&policy, &key("back"), 2) else { return Ok(()) };
        same("units of the shortcut's receipt", quickly.take_receipt().map(|receipt| receipt.units()), Some(2))
    }

    /// A peek answers as a take would, and takes nothing.
    #[fix = "let peek decide by the same function as take, and write nothing"]
    async fn peek_answers_as_a_take(bench) {
        let (policy, key) = (bench.policy("peek")?, key("a"));
        for cost in [2, 2, 2, 1, 1] {
            let charge = [Charge::new(&policy, &key).cost(cost)];
            let before = bench.remaining(&policy, &key).await?;
            let peeked = bench.peek(&charge).await?;
            same("remaining after a peek", bench.remaining(&policy, &key).await?, before)?;
            let taken = bench.take(&charge).await?;
            same("is_allowed of a peek", peeked.is_allowed(), taken.is_allowed())?;
            same("remaining in a peek", peeked.charges()[0].remaining(), taken.charges()[0].remaining())?;
        }
        Ok(())
    }

    /// After its wait a denied cost passes; the waits are not late.
    #[fix = "let retry_after be the time until the same cost fits, rounded up"]
    async fn denied_cost_passes_after_its_wait(bench) {
        let (policy, key) = (bench.policy("wait")?, key("a"));
        let _ = bench.take(&[Charge::new(&policy, &key).cost(CAPACITY)]).await?;
        let denied = bench.take(&[Charge::new(&policy, &key).cost(2)]).await?;
        let wait = denied.charges()[0].retry_after().ok_or("a denied cost that can pass later has no retry_after")?;
        ensure(wait <= 2 * MINUTE * 20, &format!("retry_after is longer than the quota needs: {wait:?}"))?;
        bench.subject.advance(wait).await;
        let passed = bench.take(&[Charge::new(&policy, &key).cost(2)]).await?.is_allowed();
        ensure(passed, &format!("the cost was denied again after its retry_after, {wait:?}"))
    }

    /// When `reset_after` has passed, the whole quota is back.
    #[fix = "let reset_after be the time until nothing of the state counts any more, rounded up"]
    async fn whole_quota_is_back_after_reset_after(bench) {
        let (policy, key) = (bench.policy("back")?, key("a"));
        let taken = bench.take(&[Charge::new(&policy, &key).cost(3)]).await?;
        bench.subject.advance(taken.charges()[0].reset_after()).await;
        same("remaining after reset_after", bench.remaining(&policy, &key).await?, CAPACITY)
    }

    /// Keys and policies do not touch each other.
    #[fix = "keep one state for each pair of a policy's name and a key"]
    async fn keys_and_policies_are_apart(bench) {
        let (one, two) = (bench.policy("one")?, bench.policy("two")?);
        let _ = bench.take(&[Charge::new(&one, &key("a")).cost(CAPACITY)]).await?;
        same("remaining of another key", bench.remaining(&one, &key("b")).await?, CAPACITY)?;
        same("remaining of another policy", bench.remaining(&two, &key("a")).await?, CAPACITY)?;
        same("remaining of the charged key", bench.remaining(&one, &key("a")).await?, 0)
    }

    /// A clone is the same limiter.
    #[fix = "keep the states behind an Arc, so that clones share them"]
    async fn clones_share_one_allowance(bench) {
        let (policy, key) = (bench.policy("clone")?, key("a"));
        let clone = bench.limiter.clone();
        let reply = clone.take(&[Charge::new(&policy, &key).cost(CAPACITY)]).await;
        ensure(reply.is_ok_and(|decision| decision.is_allowed()), "a clone denied what its original would allow")?;
        same("remaining in the original", bench.remaining(&policy, &key).await?, 0)
    }

    /// Several charges are all taken or none is, and each is told as it then stands.
    #[fix = "decide about every charge before any of them is written"]
    async fn several_charges_are_all_taken_or_none(bench) {
        let (one, two) = (bench.policy("one")?, bench.policy("two")?);
        let (a, b) = (key("a"), key("b"));
        let _ = bench.take(&[Charge::new(&two, &b).cost(CAPACITY - 1)]).await?;
        let denied = bench.take(&[Charge::new(&one, &a).cost(2), Charge::new(&two, &b).cost(2)]).await?;
        ensure(!denied.is_allowed(), "a set passed although its second charge is denied")?;
        ensure(denied.charges()[0].is_allowed(), "a charge that fits is told as denied")?;
        ensure(!denied.charges()[1].is_allowed(), "a charge that does not fit is told as allowed")?;
        same("remaining told of a charge that was not taken", denied.charges()[0].remaining(), CAPACITY)?;
        same("remaining after a refused set", bench.remaining(&one, &a).await?, CAPACITY)?;
        let fits = bench.take(&[Charge::new(&one, &a).cost(2), Charge::new(&two, &b)]).await?;
        ensure(fits.is_allowed(), "a set that fits was denied")?;
        same("remaining of the first charge", bench.remaining(&one, &a).await?, CAPACITY - 2)?;
        same("remaining of the second charge", bench.remaining(&two, &b).await?, 0)?;
        ensure(bench.take(&[]).await?.is_allowed(), "a set without charges was denied")
    }

    /// Refusals are counted and close the key, each in the step that refuses, and a closed key
    /// opens when it was told.
    #[fix = "see Effect::OnRefusal and Quota::block, or let Limiter::supports return an error for blocks"]
    async fn block_counts_refusals_and_closes_the_key(bench) {
        if !bench.supports(block()) {
            return Ok(());
        }
        let (tries, block, key) = (bench.policy("tries")?, named("block", block())?, key("a"));
        let on_refusal = Charge::new(&block, &key).effect(Effect::OnRefusal { of: 1 });
        let set = [Charge::new(&tries, &key), on_refusal];
        let first = bench.take(&set).await?;
        ensure(first.is_allowed() && first.charges()[1].is_allowed(), "the block denied before anything was refused")?;
        let rest = [Charge::new(&tries, &key).cost(CAPACITY - 1), on_refusal];
        ensure(bench.take(&rest).await?.is_allowed(), "the block denied before anything was refused")?;
        let refused = bench.take(&set).await?;
        ensure(!refused.is_allowed(), "a set with a denied charge was allowed")?;
        ensure(refused.charges()[1].is_allowed(), "the first refusal of two closed the key")?;
        same("refusals left", refused.charges()[1].remaining(), 1)?;
        ensure(!bench.peek(&set).await?.charges()[1].is_allowed(), "a peek does not say that the next refusal closes the key")?;
        ensure(bench.peek(&[Charge::new(&block, &key).cost(0)]).await?.is_allowed(), "a peek closed the key")?;
        let closing = bench.take(&set).await?;
        same("the block that the second refusal begins", closing.charges()[1].retry_after(), Some(HOUR))?;
        bench.subject.advance(HOUR / 2).await;
        let closed = bench.take(&set).await?;
        ensure(!closed.is_allowed(), "a set passed while its key was closed")?;
        ensure(closed.charges()[0].is_allowed(), "a charge that fits is told as denied")?;
        same("the block after half of it, and one more try", closed.charges()[1].retry_after(), Some(HOUR / 2))?;
        ensure(!bench.peek(&[Charge::new(&block, &key).cost(0)]).await?.is_allowed(), "a look does not see the block")?;
        same("remaining after a closed set", bench.remaining(&tries, &key).await?, CAPACITY)?;
        bench.subject.advance(HOUR / 2).await;
        ensure(bench.take(&set).await?.is_allowed(), "the key is closed for longer than was told")?;
        let _ = bench.take(&[Charge::new(&block, &key).cost(9).effect(Effect::Force)]).await?;
        let again = bench.peek(&[Charge::new(&block, &key).cost(0)]).await?;
        same("the block by forced strikes, the second", again.charges()[0].retry_after(), Some(2 * HOUR))?;
        bench.reset(&block, &key).await?;
        ensure(bench.take(&set).await?.is_allowed(), "a reset did not open the key")
    }

    /// Units beyond an observed policy are metered once, and only if the set passes.
    #[fix = "see Effect::OnRefusal and Quota::meter, or let Limiter::supports return an error for meters"]
    async fn meter_counts_units_beyond_a_quota(bench) {
        if !bench.supports(meter()) {
            return Ok(());
        }
        let (plan, other, key) = (bench.policy("plan")?, bench.policy("other")?, key("a"));
        let meter = named("meter", meter())?;
        let set = |cost| {
            let plan = Charge::new(&plan, &key).cost(cost).effect(Effect::Observe);
            [plan, Charge::new(&meter, &key).cost(cost).effect(Effect::OnRefusal { of: 1 })]
        };
        let within = bench.take(&set(CAPACITY)).await?;
        ensure(within.is_allowed(), "units within the quota were denied")?;
        same("the meter's remaining, nothing beyond the quota", within.charges()[1].remaining(), 10)?;
        let mut beyond = bench.take(&set(4)).await?;
        ensure(beyond.is_allowed(), "units beyond an observed quota were denied")?;
        ensure(!beyond.charges()[0].is_allowed(), "units beyond a quota are told as within it")?;
        same("the meter's remaining after 4 units", bench.remaining(&meter, &key).await?, 6)?;
        let [plan, metered] = set(4);
        let over = Charge::new(&other, &key).cost(CAPACITY + 1);
        ensure(!bench.take(&[plan, metered, over]).await?.is_allowed(), "a set with a denied charge was allowed")?;
        same("the meter's remaining after a refused set", bench.remaining(&meter, &key).await?, 6)?;
        ensure(!bench.take(&set(7)).await?.is_allowed(), "a set passed that its meter has no room for")?;
        same("the meter's remaining after that", bench.remaining(&meter, &key).await?, 6)?;
        let receipt = last_receipt(&mut beyond)?;
        bench.refund(&meter, &key, receipt).await?;
        same("the meter's remaining after a refund", bench.remaining(&meter, &key).await?, 10)
    }

    /// Observed charges never deny the set; forced ones are taken whatever is left.
    #[fix = "see Effect: only enforced charges deny a set, and forced ones go into debt"]
    async fn effects_do_what_they_say(bench) {
        let (policy, key) = (bench.policy("effects")?, key("a"));
        let charge = Charge::new(&policy, &key).cost(CAPACITY + 1);
        let observed = bench.take(&[charge.effect(Effect::Observe)]).await?;
        ensure(observed.is_allowed(), "an observed charge denied the set")?;
        ensure(!observed.charges()[0].is_allowed(), "an observed charge that does not fit is told as allowed")?;
        same("remaining after an observed denial", bench.remaining(&policy, &key).await?, CAPACITY)?;
        ensure(bench.take(&[charge.effect(Effect::Force)]).await?.is_allowed(), "a forced charge was denied")?;
        same("remaining after a forced charge above the capacity", bench.remaining(&policy, &key).await?, 0)?;
        ensure(!bench.peek(&[Charge::new(&policy, &key)]).await?.is_allowed(), "a forced charge took nothing")
    }

    /// A receipt returns what its charge took, once.
    #[fix = "see Limiter::refund: give each taken charge a receipt, and subtract its units"]
    async fn refund_returns_what_was_taken(bench) {
        let (policy, key) = (bench.policy("refund")?, key("a"));
        let mut taken = bench.take(&[Charge::new(&policy, &key).cost(3)]).await?;
        let receipt = last_receipt(&mut taken)?;
        same("units of the receipt", receipt.units(), 3)?;
        ensure(taken.take_receipts().pop().flatten().is_none(), "a charge has two receipts")?;
        bench.refund(&policy, &key, receipt).await?;
        same("remaining after the refund", bench.remaining(&policy, &key).await?, CAPACITY)
    }

    /// A leaky queue returns only its tail: requests behind it have been told when they depart.
    #[fix = "see Limiter::refund: refund a leaky queue only what nothing is queued behind"]
    async fn queue_refunds_only_its_tail(bench) {
        if bench.quota.algorithm() != Algorithm::LeakyQueue {
            return Ok(());
        }
        let (policy, key) = (bench.policy("tail")?, key("a"));
        let mut receipts = Vec::new();
        for _ in 0..2 {
            let mut taken = bench.take(&[Charge::new(&policy, &key).cost(2)]).await?;
            receipts.push(last_receipt(&mut taken)?);
        }
        let refunds = [("remaining after a refund in the middle", CAPACITY - 4), ("remaining after the tail's", CAPACITY - 2)];
        for (receipt, (what, left)) in receipts.into_iter().zip(refunds) {
            bench.refund(&policy, &key, receipt).await?;
            same(what, bench.remaining(&policy, &key).await?, left)?;
        }
        Ok(())
    }

    /// A refund of units that have expired returns nothing.
    #[fix = "let a receipt name the instant or the window that it belongs to, and compare it before subtracting"]
    async fn late_refund_returns_nothing(bench) {
        let (policy, key) = (bench.policy("late")?, key("a"));
        let mut taken = bench.take(&[Charge::new(&policy, &key).cost(CAPACITY)]).await?;
        let receipt = last_receipt(&mut taken)?;
        bench.subject.advance(taken.charges()[0].reset_after()).await;
        let _ = bench.take(&[Charge::new(&policy, &key).cost(2)]).await?;
        let before = bench.remaining(&policy, &key).await?;
        bench.refund(&policy, &key, receipt).await?;
        same("remaining after the late refund", bench.remaining(&policy, &key).await?, before)
    }

    /// A settlement is taken whatever is left, also if its reply is not awaited.
    #[fix = "see Limiter::settle: send the charges off before it returns"]
    async fn settlement_need_not_be_awaited(bench) {
        let (policy, key) = (bench.policy("settle")?, key("a"));
        let charge = Charge::new(&policy, &key).effect(Effect::Force);
        let settled = bench.limiter.settle(&[charge.cost(2)]).await;
        ensure(settled.is_ok_and(|decision| decision.is_allowed()), "a settlement was denied")?;
        drop(bench.limiter.settle(&[charge.cost(CAPACITY)]));
        // What a remote limiter has sent may arrive after a few peeks.
        for _ in 0..PEEKS {
            if !bench.peek(&[Charge::new(&policy, &key)]).await?.is_allowed() {
                return Ok(());
            }
        }
        ensure(false, "a settlement that was not awaited took nothing")
    }

    /// A reset returns the whole quota.
    #[fix = "see Limiter::reset: forget the state"]
    async fn reset_returns_the_whole_quota(bench) {
        let (policy, key) = (bench.policy("reset")?, key("a"));
        let _ = bench.take(&[Charge::new(&policy, &key).cost(CAPACITY)]).await?;
        bench.reset(&policy, &key).await?;
        same("remaining after the reset", bench.remaining(&policy, &key).await?, CAPACITY)
    }

    /// A changed quota of the same policy keeps what was used.
    #[fix = "find a state by the policy's name, and convert it if it was written under another quota"]
    async fn changed_quota_keeps_what_was_used(bench) {
        let key = key("a");
        for other in quotas() {
            if !bench.supports(other.clone()) {
                continue;
            }
            let name = other.as_ref().map_or_else(ToString::to_string, |other| format!("plan-{other}"));
            let (old, new) = (bench.policy(&name)?, named(&name, other)?);
            let _ = bench.take(&[Charge::new(&old, &key).cost(3)]).await?;
            let taken = bench.take(&[Charge::new(&new, &key)]).await?;
            ensure(taken.is_allowed(), &format!("a unit was denied that was left, changed to {}", new.quota()))?;
            let what = format!("remaining, changed to {}", new.quota());
            same(&what, bench.remaining(&new, &key).await?, CAPACITY - 4)?;
            same(&format!("{what} and back"), bench.remaining(&old, &key).await?, CAPACITY - 4)?;
        }
        Ok(())
    }

    /// As many concurrent takes pass as fit, on several threads.
    #[fix = "decide and write under one lock, or in one atomic step"]
    async fn concurrent_takes_are_counted_exactly(bench) {
        const KEYS: u64 = 32;
        let policy = bench.policy("concurrent")?;
        let passed = together(bench.subject, TASKS, |_| {
            let (limiter, policy) = (bench.limiter.clone(), policy.clone());
            async move {
                let mut passed = [0_u64; KEYS as usize];
                for (number, passed) in passed.iter_mut().enumerate() {
                    let key = key(&number.to_string());
                    for _ in 0..CAPACITY - 1 {
                        let answer = limiter.take(&[Charge::new(&policy, &key)]).await;
                        *passed += u64::from(answer.is_ok_and(|decision| decision.is_allowed()));
                    }
                }
                passed
            }
        });
        let passed = passed.await?;
        for number in 0..KEYS as usize {
            let total: u64 = passed.iter().map(|passed| passed[number]).sum();
            same("concurrent takes of one key that passed", total, CAPACITY)?;
        }
        Ok(())
    }

    /// Concurrent sets are all taken or none is, in whatever order they name their keys.
    #[fix = "lock the states of a set in one order, or refund what a refused set took"]
    async fn concurrent_sets_are_all_or_nothing(bench) {
        const KEYS: usize = 16;
        let (one, two) = (bench.policy("one")?, bench.policy("two")?);
        let passed = together(bench.subject, TASKS, |task| {
            let (limiter, one, two) = (bench.limiter.clone(), one.clone(), two.clone());
            async move {
                let mut passed = [0_u64; KEYS];
                for (number, passed) in passed.iter_mut().enumerate() {
                    let key = key(&number.to_string());
                    for _ in 0..CAPACITY - 1 {
                        let mut set = [Charge::new(&one, &key), Charge::new(&two, &key)];
                        if task % 2 == 1 {
                            set.reverse();
                        }
                        *passed += u64::from(limiter.take(&set).await.is_ok_and(|decision| decision.is_allowed()));
                    }
                }
                passed
            }
        });
        let passed = passed.await?;
        for number in 0..KEYS {
            let total: u64 = passed.iter().map(|passed| passed[number]).sum();
            ensure(total <= CAPACITY, &format!("{total} concurrent sets passed, of {CAPACITY}"))?;
            // Compensated sets may be refused early, and their refunds may still be under way.
            if bench.limiter.atomicity() == Atomicity::Atomic {
                same("concurrent sets that passed", total, CAPACITY)?;
                for policy in [&one, &two] {
                    let left = bench.remaining(policy, &key(&number.to_string())).await?;
                    same("remaining after concurrent sets", left, 0)?;
                }
            }
        }
        Ok(())
    }

    /// Concurrent takes and refunds never hold more than the capacity, and return all of it.
    #[fix = "let a refund read and write the state under the same lock, or in the same atomic step, as a take"]
    async fn concurrent_refunds_return_what_was_taken(bench) {
        const ROUNDS: usize = 32;
        if bench.quota.algorithm() == Algorithm::LeakyQueue {
            return Ok(()); // refunds only its tail
        }
        let (policy, held) = (bench.policy("returned")?, Arc::new(AtomicU64::new(0)));
        let most = together(bench.subject, TASKS, |_| {
            let (limiter, policy, held) = (bench.limiter.clone(), policy.clone(), Arc::clone(&held));
            async move {
                let (key, mut most) = (key("a"), 0);
                for _ in 0..ROUNDS {
                    let taken = limiter.take(&[Charge::new(&policy, &key).cost(2)]).await;
                    let receipt = taken.ok().and_then(|mut taken| taken.take_receipts().pop().flatten());
                    if let Some(receipt) = receipt {
                        most = most.max(held.fetch_add(2, Ordering::AcqRel) + 2);
                        held.fetch_sub(2, Ordering::AcqRel);
                        let _ = limiter.refund(vec![Refund::new(policy.clone(), key.clone(), receipt)]).await;
                    }
                }
                most
            }
        });
        let most = most.await?.into_iter().max().unwrap_or(0);
        ensure((1..=CAPACITY).contains(&most), &format!("{most} units were held at once, of {CAPACITY}"))?;
        same("remaining after all refunds", bench.remaining(&policy, &key("a")).await?, CAPACITY)
    }

    /// A future that is dropped leaves at most its own charge.
    #[fix = "undo nothing but the charge itself when a future is dropped"]
    async fn dropped_future_leaves_at_most_its_own_charge(bench) {
        let (policy, key) = (bench.policy("dropped")?, key("a"));
        drop(bench.limiter.take(&[Charge::new(&policy, &key).cost(2)]));
        let left = bench.remaining(&policy, &key).await?;
        ensure(left >= CAPACITY - 2, &format!("a dropped charge of 2 left {left} of {CAPACITY}"))
    }

    /// Sets that are wrong do not panic or hang, and empty keys are keys.
    #[fix = "answer each charge, also of a set that names one (policy, key) twice"]
    async fn unusual_sets_are_answered(bench) {
        let policy = bench.policy("unusual")?;
        let long = key(&"k".repeat(100_000));
        ensure(bench.take(&[Charge::new(&policy, &Key::global())]).await?.is_allowed(), "the global key was denied")?;
        ensure(bench.take(&[Charge::new(&policy, &long)]).await?.is_allowed(), "a long key was denied")?;
        bench.take(&[Charge::new(&policy, &long), Charge::new(&policy, &long)]).await.map(drop)
    }
}

cases! {
    /// Runs the cases of a quota that the limiter does not support.
    fn run_unsupported;

    /// A quota that the limiter does not support is not ignored.
    #[fix = "return an error for a charge of a quota that Limiter::supports rejects, or deny it"]
    async fn unsupported_quota_is_not_ignored(bench) {
        let (policy, key) = (bench.policy("unsupported")?, key("a"));
        let charge = [Charge::new(&policy, &key).cost(CAPACITY + 1)];
        let allowed = bench.limiter.take(&charge).await.is_ok_and(|decision| decision.is_allowed());
        ensure(!allowed, "a cost above the capacity passed")
    }
}
