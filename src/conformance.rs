//! The suite that every [`Limiter`] has to pass: run it against your own.
//!
//! It checks the contract of [`Limiter`] and the laws of the [algorithms](crate::algorithm), through the public interface
//! only. This module may grow stricter in any release: it is outside the promise of semantic versioning.
//!
//! ```
//! use std::time::Duration;
//! use tower_ratelimit::conformance::{self, Subject};
//! use tower_ratelimit::{ManualClock, MemoryLimiter};
//!
//! struct Mine(ManualClock);
//!
//! impl Subject for Mine {
//!     type Limiter = MemoryLimiter;
//!
//!     async fn limiter(&self) -> MemoryLimiter {
//!         MemoryLimiter::builder().capacity(1_000).clock(self.0.clone()).build().unwrap()
//!     }
//!
//!     async fn advance(&self, by: Duration) {
//!         self.0.advance(by);
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! conformance::check(&Mine(ManualClock::new())).await.unwrap();
//! # }
//! ```

use std::fmt;
use std::future::{Future, IntoFuture, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use crate::limiter::{Atomicity, Charge, Effect, Limiter, Refund};
use crate::{Algorithm, Anchor, Decision, Key, Oldest, Policy, Quota, QuotaError};

const MINUTE: Duration = Duration::from_secs(60);

/// Every quota of the suite lets so many units pass at once.
const CAPACITY: u64 = 5;

/// A limiter to be checked, and the time that it lives in.
#[expect(async_fn_in_trait, reason = "the suite awaits where it is called, and needs no Send")]
pub trait Subject {
    /// The limiter.
    type Limiter: Limiter + Clone;

    /// A limiter without any state: a new one, or one with a prefix of its own.
    async fn limiter(&self) -> Self::Limiter;

    /// Lets time pass for all limiters of this subject: moves the clock that they were given, or waits.
    async fn advance(&self, by: Duration);
}

/// What the suite found wrong.
#[derive(Debug)]
pub struct Failures(Vec<String>);

impl Failures {
    /// One sentence for each promise that was not kept.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }
}

impl fmt::Display for Failures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} promises of a limiter were not kept:", self.0.len())?;
        self.0.iter().try_for_each(|failure| writeln!(f, "  {failure}"))
    }
}

impl std::error::Error for Failures {}

/// Declares the cases, and the list of them that is run: there is no other.
macro_rules! cases {
    ($($(#[doc = $promise:literal])+ async fn $name:ident($bench:ident) $body:block)+) => {
        $(
            $(#[doc = $promise])+
            async fn $name<S: Subject>($bench: &Bench<'_, S>) -> Result<(), String> $body
        )+

        /// Runs every case with a quota of every algorithm.
        ///
        /// # Errors
        /// The promises that were not kept, each with the quota it was tried with.
        pub async fn check<S: Subject>(subject: &S) -> Result<(), Failures> {
            let mut failures = Vec::new();
            let quotas = quotas().map_err(|error| Failures(vec![error.to_string()]))?;
            for quota in quotas {
                $(
                    let bench = Bench { subject, limiter: subject.limiter().await, quota };
                    if let Err(failure) = $name(&bench).await {
                        failures.push(format!("{}, with {quota}: {failure}", stringify!($name)));
                    }
                )+
            }
            if failures.is_empty() { Ok(()) } else { Err(Failures(failures)) }
        }
    };
}

/// One case's limiter and quota.
struct Bench<'a, S: Subject> {
    subject: &'a S,
    limiter: S::Limiter,
    quota: Quota,
}

/// One quota of each algorithm, all of the same capacity.
fn quotas() -> Result<Vec<Quota>, QuotaError> {
    Ok(vec![
        Quota::token_bucket(CAPACITY, MINUTE)?,
        Quota::token_bucket(99_999, Duration::from_secs(1_000_000))?.burst(CAPACITY)?,
        Quota::gcra(CAPACITY, MINUTE)?.burst(CAPACITY)?,
        Quota::leaky_bucket(CAPACITY, MINUTE)?,
        Quota::leaky_queue(CAPACITY, MINUTE)?.queue(CAPACITY - 1)?,
        Quota::step_bucket(CAPACITY, MINUTE)?.anchor(Anchor::FirstRequest)?,
        Quota::fixed_window(CAPACITY, MINUTE)?.anchor(Anchor::FirstRequest)?,
        Quota::sliding_window(CAPACITY, MINUTE)?,
        Quota::sliding_window(CAPACITY, MINUTE)?.buckets(6)?.oldest(Oldest::Counted)?,
        Quota::sliding_window(CAPACITY, MINUTE)?.buckets(60)?.oldest(Oldest::Dropped)?,
        Quota::sliding_log(CAPACITY, MINUTE)?,
        Quota::meter(CAPACITY, MINUTE)?,
    ])
}

fn ensure(kept: bool, promise: &str) -> Result<(), String> {
    if kept { Ok(()) } else { Err(promise.to_owned()) }
}

impl<S: Subject> Bench<'_, S> {
    fn policy(&self, name: &str) -> Result<Policy, String> {
        Policy::new(name, self.quota).map_err(|error| error.to_string())
    }

    async fn take(&self, charges: &[Charge<'_>]) -> Result<Decision, String> {
        self.limiter.take(charges).await.map_err(|error| format!("take failed: {error}"))
    }

    async fn peek(&self, charges: &[Charge<'_>]) -> Result<Decision, String> {
        self.limiter.peek(charges).await.map_err(|error| format!("peek failed: {error}"))
    }

    async fn remaining(&self, policy: &Policy, key: &Key) -> Result<u64, String> {
        let decision = self.peek(&[Charge::new(policy, key).cost(0)]).await?;
        decision.charges().first().map(crate::ChargeDecision::remaining).ok_or_else(|| "no answer".to_owned())
    }
}

fn key(name: &str) -> Key {
    Key::of(name).unwrap_or(Key::global())
}

cases! {
    /// From rest exactly the capacity passes, one by one.
    async fn the_capacity_passes_from_rest(bench) {
        let (policy, key) = (bench.policy("rest")?, key("a"));
        for left in (0..CAPACITY).rev() {
            let decision = bench.take(&[Charge::new(&policy, &key)]).await?;
            ensure(decision.is_allowed(), "a unit of the capacity was denied")?;
            ensure(decision.charges().len() == 1, "one charge has one answer")?;
            ensure(decision.charges()[0].remaining() == left, "remaining counts down")?;
            ensure(decision.charges()[0].retry_after().is_none(), "what is allowed has no wait")?;
        }
        let denied = bench.take(&[Charge::new(&policy, &key)]).await?;
        ensure(!denied.is_allowed() && !denied.charges()[0].is_allowed(), "one more than the capacity passed")?;
        ensure(denied.charges()[0].retry_after().is_some(), "a denied cost that can pass later has a wait")
    }

    /// A cost is taken at once or not at all.
    async fn a_cost_is_taken_whole_or_not_at_all(bench) {
        let (policy, key) = (bench.policy("whole")?, key("a"));
        ensure(bench.take(&[Charge::new(&policy, &key).cost(CAPACITY - 1)]).await?.is_allowed(), "a cost within it passes")?;
        ensure(!bench.take(&[Charge::new(&policy, &key).cost(2)]).await?.is_allowed(), "a cost above what is left passed")?;
        ensure(bench.remaining(&policy, &key).await? == 1, "a denied cost took something")
    }

    /// A cost above the capacity is denied for good, and has no wait.
    async fn a_cost_above_the_capacity_never_passes(bench) {
        let (policy, key) = (bench.policy("never")?, key("a"));
        for cost in [CAPACITY + 1, u64::MAX] {
            let denied = bench.take(&[Charge::new(&policy, &key).cost(cost)]).await?;
            ensure(!denied.is_allowed(), "a cost above the capacity passed")?;
            ensure(denied.charges()[0].is_never(), "it has no wait that helps")?;
        }
        ensure(bench.remaining(&policy, &key).await? == CAPACITY, "a denied cost took something")
    }

    /// Cost 0 looks: it is allowed even when nothing is left, and takes nothing.
    async fn cost_0_looks(bench) {
        let (policy, key) = (bench.policy("look")?, key("a"));
        let zero = Charge::new(&policy, &key).cost(0);
        ensure(bench.take(&[zero]).await?.charges()[0].remaining() == CAPACITY, "a look at a key at rest sees the capacity")?;
        let _ = bench.take(&[Charge::new(&policy, &key).cost(CAPACITY)]).await?;
        let looked = bench.take(&[zero]).await?;
        ensure(looked.is_allowed() && looked.charges()[0].remaining() == 0, "a look is allowed when nothing is left")
    }

    /// The shortcut for one enforced charge, if there is one, answers as a take and takes as much.
    async fn a_shortcut_is_a_take(bench) {
        let (policy, quick, slow) = (bench.policy("shortcut")?, key("quick"), key("slow"));
        for cost in [0, 2, 1, CAPACITY, 2, 1, u64::MAX] {
            let Some(quickly) = bench.limiter.take_at_once(&policy, &quick, cost) else { return Ok(()) };
            let taken = bench.take(&[Charge::new(&policy, &slow).cost(cost)]).await?;
            ensure(quickly.is_allowed() == taken.is_allowed(), "a shortcut and a take decide alike")?;
            ensure(quickly.remaining() == taken.charges()[0].remaining(), "and see as much remaining")?;
            let left = [bench.remaining(&policy, &quick).await?, bench.remaining(&policy, &slow).await?];
            ensure(left[0] == left[1], "and leave as much")?;
        }
        let Some(mut quickly) = bench.limiter.take_at_once(&policy, &key("back"), 2) else { return Ok(()) };
        ensure(quickly.take_receipt().is_some_and(|receipt| receipt.units() == 2), "and give a receipt for it")
    }

    /// A peek answers as a take would, and takes nothing.
    async fn a_peek_answers_as_a_take(bench) {
        let (policy, key) = (bench.policy("peek")?, key("a"));
        for cost in [2, 2, 2, 1, 1] {
            let charge = [Charge::new(&policy, &key).cost(cost)];
            let (peeked, taken) = (bench.peek(&charge).await?, bench.take(&charge).await?);
            ensure(peeked.is_allowed() == taken.is_allowed(), "a peek and a take decide alike")?;
            ensure(peeked.charges()[0].remaining() == taken.charges()[0].remaining(), "and see as much remaining")?;
        }
        Ok(())
    }

    /// After its wait a denied cost passes; the waits are not late.
    async fn a_denied_cost_passes_after_its_wait(bench) {
        let (policy, key) = (bench.policy("wait")?, key("a"));
        let _ = bench.take(&[Charge::new(&policy, &key).cost(CAPACITY)]).await?;
        let denied = bench.take(&[Charge::new(&policy, &key).cost(2)]).await?;
        let wait = denied.charges()[0].retry_after().ok_or("a denied cost has a wait")?;
        ensure(wait <= 2 * MINUTE * 20, "the wait is no longer than two periods")?;
        bench.subject.advance(wait).await;
        ensure(bench.take(&[Charge::new(&policy, &key).cost(2)]).await?.is_allowed(), "it passes when its wait is over")
    }

    /// When `reset_after` has passed, the whole quota is back.
    async fn the_whole_quota_is_back_after_reset_after(bench) {
        let (policy, key) = (bench.policy("back")?, key("a"));
        let taken = bench.take(&[Charge::new(&policy, &key).cost(3)]).await?;
        bench.subject.advance(taken.charges()[0].reset_after()).await;
        ensure(bench.remaining(&policy, &key).await? == CAPACITY, "the whole quota is back")
    }

    /// Keys and policies do not touch each other.
    async fn keys_and_policies_are_apart(bench) {
        let (one, two) = (bench.policy("one")?, bench.policy("two")?);
        let _ = bench.take(&[Charge::new(&one, &key("a")).cost(CAPACITY)]).await?;
        ensure(bench.remaining(&one, &key("b")).await? == CAPACITY, "another key has its own allowance")?;
        ensure(bench.remaining(&two, &key("a")).await? == CAPACITY, "another policy has its own allowance")?;
        ensure(bench.remaining(&one, &key("a")).await? == 0, "the charged key was charged")
    }

    /// A clone is the same limiter.
    async fn clones_share_one_allowance(bench) {
        let (policy, key) = (bench.policy("clone")?, key("a"));
        let clone = bench.limiter.clone();
        let reply = clone.take(&[Charge::new(&policy, &key).cost(CAPACITY)]).await;
        ensure(reply.is_ok_and(|decision| decision.is_allowed()), "the clone takes")?;
        ensure(bench.remaining(&policy, &key).await? == 0, "the original sees what its clone took")
    }

    /// Several charges are all taken or none is, and each is told as it then stands.
    async fn several_charges_are_all_taken_or_none(bench) {
        let (one, two) = (bench.policy("one")?, bench.policy("two")?);
        let (a, b) = (key("a"), key("b"));
        let _ = bench.take(&[Charge::new(&two, &b).cost(CAPACITY - 1)]).await?;
        let denied = bench.take(&[Charge::new(&one, &a).cost(2), Charge::new(&two, &b).cost(2)]).await?;
        ensure(!denied.is_allowed(), "a set passed whose second charge does not")?;
        ensure(denied.charges().len() == 2, "each charge has its answer")?;
        ensure(denied.charges()[0].is_allowed() && !denied.charges()[1].is_allowed(), "and it is its own")?;
        ensure(denied.charges()[0].remaining() == CAPACITY, "what was not taken is told as if it had been")?;
        ensure(bench.remaining(&one, &a).await? == CAPACITY, "a refused set took something")?;
        ensure(bench.take(&[Charge::new(&one, &a).cost(2), Charge::new(&two, &b)]).await?.is_allowed(), "the set fits")?;
        ensure(bench.remaining(&one, &a).await? == CAPACITY - 2, "the first was taken")?;
        ensure(bench.remaining(&two, &b).await? == 0, "and the second")?;
        ensure(bench.take(&[]).await?.is_allowed(), "no charge at all is allowed")
    }

    /// So many refusals close the key, each counted in the step that refuses, and what is closed opens when it was told.
    async fn refusals_are_counted_and_close_the_key(bench) {
        let (tries, key) = (bench.policy("tries")?, key("a"));
        let block = Quota::block(2, 60 * MINUTE, 60 * MINUTE).and_then(|block| block.growing(2, 120 * MINUTE, MINUTE));
        let block = Policy::new("block", block.map_err(|error| error.to_string())?).map_err(|error| error.to_string())?;
        let on_refusal = Charge::new(&block, &key).effect(Effect::OnRefusal { of: 1 });
        let set = [Charge::new(&tries, &key), on_refusal];
        let Ok(first) = bench.limiter.take(&set).await else {
            return Ok(()); // it says that it cannot
        };
        ensure(first.is_allowed() && first.charges()[1].is_allowed(), "nothing was refused yet")?;
        ensure(bench.take(&[Charge::new(&tries, &key).cost(CAPACITY - 1), on_refusal]).await?.is_allowed(), "nor now")?;
        let refused = bench.take(&set).await?;
        ensure(!refused.is_allowed(), "a set with a denied charge is denied")?;
        ensure(refused.charges()[1].is_allowed() && refused.charges()[1].remaining() == 1, "one refusal is counted")?;
        let peeked = bench.peek(&set).await?;
        ensure(!peeked.charges()[1].is_allowed(), "a peek says that the next refusal would close it")?;
        ensure(bench.peek(&[Charge::new(&block, &key).cost(0)]).await?.is_allowed(), "and closes nothing")?;
        let closing = bench.take(&set).await?;
        ensure(closing.charges()[1].retry_after() == Some(60 * MINUTE), "the second refusal says for how long it closes")?;
        bench.subject.advance(30 * MINUTE).await;
        let closed = bench.take(&set).await?;
        ensure(!closed.is_allowed() && closed.charges()[0].is_allowed(), "it is closed whatever else is allowed")?;
        ensure(closed.charges()[1].retry_after() == Some(30 * MINUTE), "and more tries do not prolong it")?;
        ensure(!bench.peek(&[Charge::new(&block, &key).cost(0)]).await?.is_allowed(), "a look sees that it is closed")?;
        ensure(bench.remaining(&tries, &key).await? == CAPACITY, "a closed set takes nothing")?;
        bench.subject.advance(30 * MINUTE).await;
        ensure(bench.take(&set).await?.is_allowed(), "it opens when it said")?;
        let _ = bench.take(&[Charge::new(&block, &key).cost(9).effect(Effect::Force)]).await?;
        let again = bench.peek(&[Charge::new(&block, &key).cost(0)]).await?;
        ensure(again.charges()[0].retry_after() == Some(120 * MINUTE), "forced strikes close it too, and blocks grow")?;
        bench.limiter.reset(&block, &key).await.map_err(|error| format!("reset failed: {error}"))?;
        ensure(bench.take(&set).await?.is_allowed(), "a reset opens it")
    }

    /// What goes beyond an observed policy is metered once, and only if the set passes.
    async fn what_goes_beyond_is_metered(bench) {
        let (plan, other, key) = (bench.policy("plan")?, bench.policy("other")?, key("a"));
        let meter = Quota::meter(10, 60 * MINUTE).map_err(|error| error.to_string())?;
        let meter = Policy::new("meter", meter).map_err(|error| error.to_string())?;
        let set = |cost| {
            let plan = Charge::new(&plan, &key).cost(cost).effect(Effect::Observe);
            [plan, Charge::new(&meter, &key).cost(cost).effect(Effect::OnRefusal { of: 1 })]
        };
        let Ok(within) = bench.limiter.take(&set(CAPACITY)).await else {
            return Ok(()); // it says that it cannot
        };
        ensure(within.is_allowed() && within.charges()[1].remaining() == 10, "what is within is not metered")?;
        let mut beyond = bench.take(&set(4)).await?;
        ensure(beyond.is_allowed() && !beyond.charges()[0].is_allowed(), "what goes beyond passes")?;
        ensure(bench.remaining(&meter, &key).await? == 6, "and is metered")?;
        let [plan, metered] = set(4);
        let over = Charge::new(&other, &key).cost(CAPACITY + 1);
        ensure(!bench.take(&[plan, metered, over]).await?.is_allowed(), "another policy refuses")?;
        ensure(bench.remaining(&meter, &key).await? == 6, "what is refused is not metered")?;
        ensure(!bench.take(&set(7)).await?.is_allowed(), "a meter that would be full refuses")?;
        ensure(bench.remaining(&meter, &key).await? == 6, "and counts nothing")?;
        let receipt = beyond.take_receipts().pop().flatten().ok_or("what was metered has a receipt")?;
        let refunded = bench.limiter.refund(vec![Refund::new(meter.clone(), key.clone(), receipt)]).await;
        refunded.map_err(|error| format!("refund failed: {error}"))?;
        ensure(bench.remaining(&meter, &key).await? == 10, "and goes back")
    }

    /// Observed charges never deny the set; forced ones are taken whatever is left.
    async fn effects_do_what_they_say(bench) {
        let (policy, key) = (bench.policy("effects")?, key("a"));
        let charge = Charge::new(&policy, &key).cost(CAPACITY + 1);
        let observed = bench.take(&[charge.effect(Effect::Observe)]).await?;
        ensure(observed.is_allowed() && !observed.charges()[0].is_allowed(), "an observed denial is reported only")?;
        ensure(bench.remaining(&policy, &key).await? == CAPACITY, "and takes nothing")?;
        ensure(bench.take(&[charge.effect(Effect::Force)]).await?.is_allowed(), "a forced charge is taken")?;
        ensure(!bench.peek(&[Charge::new(&policy, &key)]).await?.is_allowed(), "into debt")
    }

    /// A receipt gives back what it took, once.
    async fn a_refund_gives_back_what_was_taken(bench) {
        let (policy, key) = (bench.policy("refund")?, key("a"));
        let mut taken = bench.take(&[Charge::new(&policy, &key).cost(3)]).await?;
        let receipt = taken.take_receipts().pop().flatten().ok_or("what was taken has a receipt")?;
        ensure(receipt.units() == 3, "the receipt says how much")?;
        ensure(taken.take_receipts().pop().flatten().is_none(), "there is one receipt")?;
        let refunded = bench.limiter.refund(vec![Refund::new(policy.clone(), key.clone(), receipt)]).await;
        refunded.map_err(|error| format!("refund failed: {error}"))?;
        ensure(bench.remaining(&policy, &key).await? == CAPACITY, "all of it is back")
    }

    /// A leaky queue gives back only its tail: those behind were told when they depart.
    async fn a_queue_gives_back_only_its_tail(bench) {
        if bench.quota.algorithm() != Algorithm::LeakyQueue {
            return Ok(());
        }
        let (policy, key) = (bench.policy("tail")?, key("a"));
        let mut receipts = Vec::new();
        for _ in 0..2 {
            let mut taken = bench.take(&[Charge::new(&policy, &key).cost(2)]).await?;
            receipts.push(taken.take_receipts().pop().flatten().ok_or("what was taken has a receipt")?);
        }
        let promises = [
            (CAPACITY - 4, "what others are queued behind was given back"),
            (CAPACITY - 2, "the tail was not given back"),
        ];
        for (receipt, (left, promise)) in receipts.into_iter().zip(promises) {
            let refunded = bench.limiter.refund(vec![Refund::new(policy.clone(), key.clone(), receipt)]).await;
            refunded.map_err(|error| format!("refund failed: {error}"))?;
            ensure(bench.remaining(&policy, &key).await? == left, promise)?;
        }
        Ok(())
    }

    /// A refund of what is long over gives nothing.
    async fn a_late_refund_gives_nothing(bench) {
        let (policy, key) = (bench.policy("late")?, key("a"));
        let mut taken = bench.take(&[Charge::new(&policy, &key).cost(CAPACITY)]).await?;
        let receipt = taken.take_receipts().pop().flatten().ok_or("what was taken has a receipt")?;
        bench.subject.advance(taken.charges()[0].reset_after()).await;
        let _ = bench.take(&[Charge::new(&policy, &key).cost(2)]).await?;
        let before = bench.remaining(&policy, &key).await?;
        let refunded = bench.limiter.refund(vec![Refund::new(policy.clone(), key.clone(), receipt)]).await;
        refunded.map_err(|error| format!("refund failed: {error}"))?;
        ensure(bench.remaining(&policy, &key).await? == before, "units that were back already are not given twice")
    }

    /// What is settled is taken whatever is left, also if nobody waits for the answer.
    async fn a_settlement_need_not_be_waited_for(bench) {
        let (policy, key) = (bench.policy("settle")?, key("a"));
        let charge = Charge::new(&policy, &key).effect(Effect::Force);
        let settled = bench.limiter.settle(&[charge.cost(2)]).await;
        ensure(settled.is_ok_and(|decision| decision.is_allowed()), "a settlement is never denied")?;
        drop(bench.limiter.settle(&[charge.cost(CAPACITY)]));
        ensure(!bench.peek(&[Charge::new(&policy, &key)]).await?.is_allowed(), "it was taken, into debt")
    }

    /// A reset gives the whole quota back.
    async fn a_reset_forgets(bench) {
        let (policy, key) = (bench.policy("reset")?, key("a"));
        let _ = bench.take(&[Charge::new(&policy, &key).cost(CAPACITY)]).await?;
        bench.limiter.reset(&policy, &key).await.map_err(|error| format!("reset failed: {error}"))?;
        ensure(bench.remaining(&policy, &key).await? == CAPACITY, "the whole quota is back")
    }

    /// A changed quota of the same policy keeps what was used.
    async fn a_changed_quota_keeps_what_was_used(bench) {
        let key = key("a");
        for other in quotas().unwrap_or_default() {
            let name = format!("plan-{other}");
            let (old, new) = (bench.policy(&name)?, Policy::new(name, other).map_err(|error| error.to_string())?);
            let _ = bench.take(&[Charge::new(&old, &key).cost(3)]).await?;
            ensure(bench.take(&[Charge::new(&new, &key)]).await?.is_allowed(), "what was left can be taken")?;
            ensure(bench.remaining(&new, &key).await? == CAPACITY - 4, &format!("the used amount is kept, to {other}"))?;
            ensure(bench.remaining(&old, &key).await? == CAPACITY - 4, "and back: switching gives nothing")?;
        }
        Ok(())
    }

    /// Of concurrent takes exactly as many pass as fit.
    async fn concurrent_takes_are_counted_exactly(bench) {
        let (policy, key) = (bench.policy("concurrent")?, key("a"));
        let takes = (0..50).map(|_| bench.limiter.take(&[Charge::new(&policy, &key)]).into_future()).collect();
        let passed = all(takes).await.into_iter().filter(|reply| reply.as_ref().is_ok_and(Decision::is_allowed)).count();
        ensure(passed as u64 == CAPACITY, &format!("{passed} of 50 passed at once"))
    }

    /// A future that is dropped leaves at most its own charge.
    async fn a_dropped_future_leaves_at_most_its_own_charge(bench) {
        let (policy, key) = (bench.policy("dropped")?, key("a"));
        drop(bench.limiter.take(&[Charge::new(&policy, &key).cost(2)]));
        ensure(bench.remaining(&policy, &key).await? >= CAPACITY - 2, "it left more than its own charge")
    }

    /// Sets that are wrong do not panic or hang, and empty keys are keys.
    async fn unusual_sets_are_answered(bench) {
        let policy = bench.policy("unusual")?;
        let long = key(&"k".repeat(100_000));
        ensure(bench.take(&[Charge::new(&policy, &Key::global())]).await?.is_allowed(), "the shared key is a key")?;
        ensure(bench.take(&[Charge::new(&policy, &long)]).await?.is_allowed(), "a long key is a key")?;
        let twice = [Charge::new(&policy, &long), Charge::new(&policy, &long)];
        ensure(bench.take(&twice).await?.charges().len() == 2, "a set that should have been summed has an answer")?;
        ensure(matches!(bench.limiter.atomicity(), Atomicity::Atomic | Atomicity::Compensated), "a level is named")
    }
}

/// Polls all futures until each is ready.
async fn all<F: Future>(futures: Vec<F>) -> Vec<F::Output> {
    let mut futures: Vec<_> = futures.into_iter().map(|future| (Box::pin(future), None)).collect();
    let mut all = pin!(poll_fn(move |context| {
        for (future, output) in &mut futures {
            if output.is_none() {
                if let Poll::Ready(ready) = future.as_mut().poll(context) {
                    *output = Some(ready);
                }
            }
        }
        if futures.iter().all(|(_, output)| output.is_some()) {
            Poll::Ready(futures.iter_mut().filter_map(|(_, output)| output.take()).collect())
        } else {
            Poll::Pending
        }
    }));
    all.as_mut().await
}
