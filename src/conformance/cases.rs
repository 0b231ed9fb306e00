//! The cases of the suite, each of which tests one promise of the contract.

use std::fmt::{Debug, Display};
use std::future::{Future, poll_fn};
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use super::quotas::{CAPACITY, HOUR, MINUTE, block, meter, timed_quotas};
use super::report::Failure;
use super::subject::Subject;
use super::threads::together;
use crate::base::wait::Wait;
use crate::decision::{ChargeDecision, Decision, Receipt};
use crate::error::ConfigError;
use crate::key::Key;
use crate::limiter::{Atomicity, Charge, Effect, Limiter, Refund, Reply};
use crate::policy::Policy;
use crate::quota::{Algorithm, Quota};

/// The number of concurrent tasks.
const TASKS: usize = 4;

/// The number of keys that concurrent tasks charge.
const KEYS: usize = 32;

/// The number of futures that a case polls once and then holds. The number is large, because a limiter
/// may have several calls in flight.
const HELD: usize = 64;

/// The number of peeks after which a settlement must have arrived.
const PEEKS: usize = 10_000;

/// Declares the cases and the function that runs them. There is no other list of cases.
macro_rules! cases {
    ($(#[doc = $about:literal])+ fn $run:ident;
     $($(#[doc = $promise:literal])+ #[fix = $fix:literal] async fn $name:ident($bench:ident) $body:block)+) => {
        $(
            $(#[doc = $promise])+
            async fn $name<S: Subject>($bench: &LimiterBench<'_, S>) -> Result<(), String> $body
        )+

        $(#[doc = $about])+
        pub(super) async fn $run<S: Subject>(subject: &S, quota: Quota, failures: &mut Vec<Failure>) {
            $(
                let (limiter, policy) = (subject.limiter().await, Policy::from(quota));
                let bench = LimiterBench { subject, limiter, policy, key: key("a") };
                if let Err(found) = $name(&bench).await {
                    let (case, promise) = (stringify!($name), concat!($($promise),+));
                    failures.push(Failure { case, promise, fix: $fix, quota, found });
                }
            )+
        }
    };
}

/// The limiter of one case, and a policy and a key to charge.
struct LimiterBench<'a, S: Subject> {
    subject: &'a S,
    limiter: S::Limiter,
    policy: Policy,
    key: Key,
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

fn named(name: &str, quota: Result<Quota, ConfigError>) -> Result<Policy, String> {
    let quota = quota.map_err(|error| error.to_string())?;
    Policy::new(name, quota).map_err(|error| error.to_string())
}

fn key(name: &str) -> Key {
    Key::of(name).unwrap_or(Key::global())
}

fn numbered(number: usize) -> Key {
    key(&number.to_string())
}

impl<S: Subject> LimiterBench<'_, S> {
    /// Returns another policy with the quota of the case.
    fn other(&self, name: &str) -> Result<Policy, String> {
        named(name, Ok(*self.policy.quota()))
    }

    fn charge(&self, cost: u64) -> Charge<'_> {
        Charge::new(&self.policy, &self.key).cost(cost)
    }

    fn supports(&self, quota: Result<Quota, ConfigError>) -> bool {
        quota.is_ok_and(|quota| self.limiter.supports(&quota).is_ok())
    }

    async fn take(&self, charges: &[Charge<'_>]) -> Result<Decision, String> {
        answered("take", self.limiter.take(charges).await, charges)
    }

    async fn peek(&self, charges: &[Charge<'_>]) -> Result<Decision, String> {
        answered("peek", self.limiter.peek(charges).await, charges)
    }

    /// Takes one charge of `cost` under the policy and the key.
    async fn take_one(&self, cost: u64) -> Result<ChargeDecision, String> {
        only(self.take(&[self.charge(cost)]).await?)
    }

    /// Returns the remaining units of the policy for the key.
    async fn left(&self) -> Result<u64, String> {
        self.left_of(&self.policy, &self.key).await
    }

    async fn left_of(&self, policy: &Policy, key: &Key) -> Result<u64, String> {
        Ok(only(self.peek(&[Charge::new(policy, key).cost(0)]).await?)?.remaining())
    }

    async fn refund(&self, policy: &Policy, receipt: Receipt) -> Result<(), String> {
        let refunded = self.limiter.refund(vec![Refund::new(policy.clone(), self.key.clone(), receipt)]).await;
        refunded.map_err(|error| format!("refund failed: {error}"))
    }

    async fn reset(&self, policy: &Policy) -> Result<(), String> {
        self.limiter.reset(policy, &self.key).await.map_err(|error| format!("reset failed: {error}"))
    }
}

/// Checks that an answer has one element for each charge.
fn answered<E: Display>(verb: &str, answer: Result<Decision, E>, charges: &[Charge<'_>]) -> Result<Decision, String> {
    let decision = answer.map_err(|error| format!("{verb} failed: {error}"))?;
    let (found, expected) = (decision.charges().len(), charges.len());
    ensure(found == expected, &format!("{verb} answered {expected} charges with {found} answers"))?;
    Ok(decision)
}

/// Returns the answer for the only charge of a set. Checks that this enforced charge decides the set.
fn only(decision: Decision) -> Result<ChargeDecision, String> {
    let allowed = decision.is_allowed();
    let charge = decision.into_charges().next().ok_or("a charge has no answer")?;
    same("is_allowed of a set of one charge", allowed, charge.is_allowed())?;
    Ok(charge)
}

/// Takes one unit of each policy in one set, for several keys, in concurrent tasks. For each key, takes
/// more sets than the capacity allows. Half of the tasks charge the policies in reverse order. Returns
/// how many sets of each key passed.
async fn passed_concurrently<S: Subject>(bench: &LimiterBench<'_, S>, policies: &[Policy]) -> Result<Vec<u64>, String> {
    let passed = together(bench.subject, TASKS, |task| {
        let (limiter, mut policies) = (bench.limiter.clone(), policies.to_vec());
        if task % 2 == 1 {
            policies.reverse();
        }
        async move {
            let (mut passed, mut failure) = ([0_u64; KEYS], None);
            for (number, passed) in passed.iter_mut().enumerate() {
                let key = numbered(number);
                let set: Vec<_> = policies.iter().map(|policy| Charge::new(policy, &key)).collect();
                for _ in 0..CAPACITY - 1 {
                    match limiter.take(&set).await {
                        Ok(decision) => *passed += u64::from(decision.is_allowed()),
                        Err(error) => failure = Some(crate::error::WithSources(&error).to_string()),
                    }
                }
            }
            (passed, failure)
        }
    });
    let (passed, failures): (Vec<_>, Vec<_>) = passed.await?.into_iter().unzip();
    // A limiter that fails every take has a problem other than a wrong count, so the failure is returned.
    if let Some(failure) =
        failures.into_iter().flatten().next().filter(|_| passed.iter().flatten().all(|sum| *sum == 0))
    {
        return Err(format!("each concurrent take failed: {failure} (see Subject::spawn if takes need a runtime)"));
    }
    Ok((0..KEYS).map(|number| passed.iter().map(|passed| passed[number]).sum()).collect())
}

fn receipt(taken: Option<&mut ChargeDecision>) -> Result<Receipt, String> {
    taken.and_then(ChargeDecision::take_receipt).ok_or_else(|| "a charge was taken without a receipt".to_owned())
}

/// Returns the wait of a denied charge that can pass later.
fn wait_of(denied: &ChargeDecision) -> Result<Duration, String> {
    denied
        .wait()
        .duration()
        .ok_or_else(|| format!("the wait of a denied cost that can pass later is {:?}", denied.wait()))
}

fn reset_of(taken: &ChargeDecision) -> Result<Duration, String> {
    taken.reset_after().ok_or_else(|| "a taken charge has no reset_after".to_owned())
}

cases! {
    /// Runs the cases of a quota that the limiter supports.
    fn run;

    /// If no units are in use, exactly the capacity passes, unit by unit. Only a leaky queue delays
    /// requests that pass.
    #[fix = "see Limiter::take: allow a cost that fits into the remaining units, and count the units that are taken"]
    async fn capacity_passes_from_rest(bench) {
        for left in (0..CAPACITY).rev() {
            let taken = bench.take_one(1).await?;
            ensure(taken.is_allowed(), "a unit of the capacity was denied")?;
            same("limit of an allowed charge", taken.limit(), CAPACITY)?;
            same("remaining after a unit", taken.remaining(), left)?;
            same("wait of an allowed charge", taken.wait(), Wait::None)?;
            if bench.policy.quota().algorithm() != Algorithm::LeakyQueue {
                same("delay of an allowed charge", taken.delay(), Duration::ZERO)?;
            }
        }
        let denied = bench.take_one(1).await?;
        ensure(!denied.is_allowed(), "one unit more than the capacity passed")?;
        same("limit of a denied charge", denied.limit(), CAPACITY)?;
        same("remaining of a denied charge", denied.remaining(), 0)
    }

    /// A cost is taken whole or not at all.
    #[fix = "compare the whole cost with the remaining units before you write anything"]
    async fn cost_is_taken_whole_or_not_at_all(bench) {
        ensure(bench.take_one(CAPACITY - 1).await?.is_allowed(), "a cost that fits was denied")?;
        ensure(!bench.take_one(2).await?.is_allowed(), "a cost above the remaining units passed")?;
        same("remaining after a denied cost", bench.left().await?, 1)
    }

    /// A cost above the capacity never passes, and its wait is `Wait::Never`.
    #[fix = "deny a cost above Quota::capacity with ChargeDecision::denied(.., Wait::Never)"]
    async fn cost_above_the_capacity_never_passes(bench) {
        for cost in [CAPACITY + 1, u64::MAX] {
            let denied = bench.take_one(cost).await?;
            ensure(!denied.is_allowed(), "a cost above the capacity passed")?;
            same("wait of a cost above the capacity", denied.wait(), Wait::Never)?;
        }
        same("remaining after denied costs", bench.left().await?, CAPACITY)
    }

    /// A charge of cost 0 only peeks: it is allowed even if no units are left, and takes none.
    #[fix = "report the remaining units for a charge of cost 0, and write nothing"]
    async fn cost_0_looks(bench) {
        same("remaining of a key at rest", bench.take_one(0).await?.remaining(), CAPACITY)?;
        bench.take_one(CAPACITY).await?;
        let looked = bench.take_one(0).await?;
        ensure(looked.is_allowed(), "a charge of cost 0 was denied because no unit is left")?;
        same("remaining of a used-up key", looked.remaining(), 0)
    }

    /// The shortcut for one enforced charge, if the limiter has it, answers like a take and takes
    /// the same number of units.
    #[fix = "make try_take_one decide with the same function as take, or return None"]
    async fn shortcut_is_a_take(bench) {
        let quick = key("quick");
        for cost in [0, 2, 1, CAPACITY, 2, 1, u64::MAX] {
            let Some(quickly) = bench.limiter.try_take_one(&bench.policy, &quick, cost) else { return Ok(()) };
            let taken = bench.take_one(cost).await?;
            same("is_allowed of the shortcut", quickly.is_allowed(), taken.is_allowed())?;
            same("remaining of the shortcut", quickly.remaining(), taken.remaining())?;
            same("remaining after the shortcut", bench.left_of(&bench.policy, &quick).await?, bench.left().await?)?;
        }
        let Some(mut quickly) = bench.limiter.try_take_one(&bench.policy, &key("back"), 2) else { return Ok(()) };
        same("units of the shortcut's receipt", receipt(Some(&mut quickly))?.units(), 2)
    }

    /// If the limiter has a shortcut that refunds one receipt, the shortcut refunds the same number of units as the
    /// usual call.
    #[fix = "make try_refund_one refund with the same function as refund, or return the receipt"]
    async fn shortcut_is_a_refund(bench) {
        let mut taken = bench.take_one(2).await?;
        let receipt = receipt(Some(&mut taken))?;
        match bench.limiter.try_refund_one(&bench.policy, &bench.key, receipt) {
            Ok(()) => same("remaining after the shortcut", bench.left().await?, CAPACITY),
            Err(receipt) => same("units of the returned receipt", receipt.units(), 2),
        }
    }

    /// A peek answers like a take, and takes no units.
    #[fix = "make peek decide with the same function as take, and write nothing"]
    async fn peek_answers_as_a_take(bench) {
        for cost in [2, 2, 2, 1, 1] {
            let before = bench.left().await?;
            let peeked = only(bench.peek(&[bench.charge(cost)]).await?)?;
            same("remaining after a peek", bench.left().await?, before)?;
            let taken = bench.take_one(cost).await?;
            same("is_allowed of a peek", peeked.is_allowed(), taken.is_allowed())?;
            same("remaining in a peek", peeked.remaining(), taken.remaining())?;
        }
        Ok(())
    }

    /// A charge affects only its own key and policy.
    #[fix = "keep one state for each pair of a policy's name and a key"]
    async fn keys_and_policies_are_apart(bench) {
        bench.take_one(CAPACITY).await?;
        same("remaining of another key", bench.left_of(&bench.policy, &key("b")).await?, CAPACITY)?;
        same("remaining of another policy", bench.left_of(&bench.other("two")?, &bench.key).await?, CAPACITY)?;
        same("remaining of the charged key", bench.left().await?, 0)
    }

    /// Names and keys have states of their own, even if they look alike or make equal texts when joined.
    #[fix = "compare whole names and keys; a text that joins the two also needs their lengths, or a hash of both"]
    async fn names_and_keys_that_look_alike_are_apart(bench) {
        let mut pairs: Vec<(String, Key)> = vec![
            ("name".to_owned(), key("key")),
            ("Name".to_owned(), key("key")),
            ("name ".to_owned(), key("key")),
            ("name".to_owned(), key("Key")),
            ("name".to_owned(), key("key ")),
            ("seven".to_owned(), key("7")),
            ("seven".to_owned(), Key::of(7_u64).unwrap_or(Key::global())),
        ];
        pairs.extend(["a", "b"].map(|last| ("long".to_owned(), key(&("k".repeat(2_000) + last)))));
        pairs.extend(["a", "b"].map(|last| ("n".repeat(127) + last, key("key"))));
        for between in ["", ":", "/", "|", "-", "_", ".", " ", ",", ";", "#"] {
            pairs.push((format!("x{between}y"), key("z")));
            pairs.push(("x".to_owned(), key(&format!("y{between}z"))));
        }
        for (name, key) in &pairs {
            let policy = bench.other(name)?;
            let taken = bench.take(&[Charge::new(&policy, key)]).await?;
            ensure(taken.is_allowed(), &format!("the pair of {name:?} and {key:?} has units of another pair"))?;
            let left = bench.left_of(&policy, key).await?;
            same(&format!("remaining of the name {name:?} and the key {key:?}"), left, CAPACITY - 1)?;
        }
        Ok(())
    }

    /// Clones of a limiter share all states.
    #[fix = "keep the states behind an Arc, so that clones share them"]
    async fn clones_share_one_allowance(bench) {
        let clone = bench.limiter.clone();
        let reply = clone.take(&[bench.charge(CAPACITY)]).await;
        ensure(reply.is_ok_and(|decision| decision.is_allowed()), "a clone denied a charge that its original would \
                                                                   allow")?;
        same("remaining in the original", bench.left().await?, 0)
    }

    /// Several charges are all taken or none, and the answer reports what remains of each charge's
    /// quota afterwards.
    #[fix = "decide about every charge of a set before you write any of them"]
    async fn several_charges_are_all_taken_or_none(bench) {
        let (two, b) = (bench.other("two")?, key("b"));
        let on_two = Charge::new(&two, &b);
        bench.take(&[on_two.cost(CAPACITY - 1)]).await?;
        let peeked = bench.peek(&[bench.charge(2), on_two.cost(2)]).await?;
        ensure(!peeked.is_allowed(), "a peek says that a set passes although its second charge is denied")?;
        ensure(bench.peek(&[bench.charge(2), on_two]).await?.is_allowed(), "a peek says that a set that fits is denied")?;
        let denied = bench.take(&[bench.charge(2), on_two.cost(2)]).await?;
        ensure(!denied.is_allowed(), "a set passed although its second charge is denied")?;
        ensure(denied.charges()[0].is_allowed(), "a charge that fits is reported as denied")?;
        ensure(!denied.charges()[1].is_allowed(), "a charge that does not fit is reported as allowed")?;
        same("reported remaining of a charge that was not taken", denied.charges()[0].remaining(), CAPACITY)?;
        same("remaining after a refused set", bench.left().await?, CAPACITY)?;
        ensure(bench.take(&[bench.charge(2), on_two]).await?.is_allowed(), "a set that fits was denied")?;
        same("remaining of the first charge", bench.left().await?, CAPACITY - 2)?;
        same("remaining of the second charge", bench.left_of(&two, &b).await?, 0)?;
        ensure(bench.take(&[]).await?.is_allowed(), "a set without charges was denied")
    }

    /// A refund of strikes that closed a key removes only the block that they began. Other strikes of the key
    /// still count, and the next block is as long as if the removed block had never begun. A key that an
    /// operator closed stays closed.
    #[fix = "see Quota::block: keep the strikes that closed a key, and the state before them, until the block ends"]
    async fn refund_of_strikes_undoes_their_block(bench) {
        if !bench.supports(block()) {
            return Ok(());
        }
        let block = named("block", block())?;
        let strike = Charge::new(&block, &bench.key);
        let both = [bench.take(&[strike]).await?, bench.take(&[strike]).await?];
        let closed = bench.peek(&[strike.cost(0)]).await?;
        same("the block that the second strike begins", closed.charges()[0].wait(), Wait::After(HOUR))?;
        // Each refund removes one strike, although the block has begun.
        for (mut taken, left) in both.into_iter().zip([1, 2]) {
            bench.refund(&block, receipt(taken.charge_mut(0))?).await?;
            same("strikes left after a refund", bench.left_of(&block, &bench.key).await?, left)?;
        }
        let mut last = bench.take(&[strike]).await?;
        bench.take(&[strike]).await?;
        let closed = bench.peek(&[strike.cost(0)]).await?;
        same("the block that begins after refunds removed the first", closed.charges()[0].wait(), Wait::After(HOUR))?;
        bench.reset(&block).await?;
        bench.refund(&block, receipt(last.charge_mut(0))?).await?;
        let mut first = bench.take(&[strike]).await?;
        bench.take(&[strike.cost(2).effect(Effect::Force)]).await?;
        bench.refund(&block, receipt(first.charge_mut(0))?).await?;
        ensure(!bench.peek(&[strike]).await?.is_allowed(), "a refund opened a key that other strikes closed")?;
        bench.reset(&block).await?;
        let mut both = bench.take(&[strike.cost(2)]).await?;
        bench.take(&[strike.cost(2).effect(Effect::Force)]).await?;
        bench.refund(&block, receipt(both.charge_mut(0))?).await?;
        ensure(!bench.peek(&[strike]).await?.is_allowed(), "a refund opened a key that an operator had also closed")
    }

    /// Units beyond an observed policy are metered once, and only if the set passes.
    #[fix = "see Effect::OnRefusal and Quota::meter, or return an error for meters from Limiter::supports"]
    async fn meter_counts_units_beyond_a_quota(bench) {
        if !bench.supports(meter()) {
            return Ok(());
        }
        let (meter, other) = (named("meter", meter())?, bench.other("other")?);
        let set = |cost| {
            let metered = Charge::new(&meter, &bench.key).cost(cost).effect(Effect::OnRefusal { of: 1 });
            [bench.charge(cost).effect(Effect::Observe), metered]
        };
        let within = bench.take(&set(CAPACITY)).await?;
        ensure(within.is_allowed(), "units within the quota were denied")?;
        same("the meter's remaining while usage is within the quota", within.charges()[1].remaining(), 10)?;
        let mut beyond = bench.take(&set(4)).await?;
        ensure(beyond.is_allowed(), "units beyond an observed quota were denied")?;
        ensure(!beyond.charges()[0].is_allowed(), "units beyond a quota are reported as within it")?;
        let metered = || bench.left_of(&meter, &bench.key);
        same("the meter's remaining after 4 units", metered().await?, 6)?;
        let [plan, on_refusal] = set(4);
        let over = Charge::new(&other, &bench.key).cost(CAPACITY + 1);
        ensure(!bench.take(&[plan, on_refusal, over]).await?.is_allowed(), "a set with a denied charge was allowed")?;
        same("the meter's remaining after a refused set", metered().await?, 6)?;
        ensure(!bench.take(&set(7)).await?.is_allowed(), "a set passed although its meter has no room for it")?;
        same("the meter's remaining after that", metered().await?, 6)?;
        bench.refund(&meter, receipt(beyond.charge_mut(1))?).await?;
        same("the meter's remaining after a refund", metered().await?, 10)
    }

    /// Observed charges are taken if they fit, and never deny the set. Forced charges are taken even if too few units
    /// are left. A refused set takes neither observed nor forced charges.
    #[fix = "see Effect: only enforced charges deny a set, and forced charges go into debt"]
    async fn effects_do_what_they_say(bench) {
        let fits = bench.take(&[bench.charge(2).effect(Effect::Observe)]).await?;
        ensure(fits.is_allowed() && fits.charges()[0].is_allowed(), "an observed charge that fits was denied")?;
        same("remaining after an observed charge", bench.left().await?, CAPACITY - 2)?;
        let other = bench.other("other")?;
        let over = Charge::new(&other, &bench.key).cost(CAPACITY + 1);
        for effect in [Effect::Observe, Effect::Force] {
            let refused = bench.take(&[bench.charge(1).effect(effect), over]).await?;
            ensure(!refused.is_allowed(), "a set with a denied charge was allowed")?;
            same(&format!("remaining after {effect:?} in a refused set"), bench.left().await?, CAPACITY - 2)?;
        }
        let charge = bench.charge(CAPACITY + 1);
        let observed = bench.take(&[charge.effect(Effect::Observe)]).await?;
        ensure(observed.is_allowed(), "an observed charge denied the set")?;
        ensure(!observed.charges()[0].is_allowed(), "an observed charge that does not fit is reported as allowed")?;
        same("remaining after an observed denial", bench.left().await?, CAPACITY - 2)?;
        ensure(bench.take(&[charge.effect(Effect::Force)]).await?.is_allowed(), "a forced charge was denied")?;
        same("remaining after a forced charge above the capacity", bench.left().await?, 0)?;
        ensure(!bench.peek(&[bench.charge(1)]).await?.is_allowed(), "a forced charge took nothing")
    }

    /// A receipt refunds the units that its charge took, once.
    #[fix = "see Limiter::refund: give each taken charge a receipt, and subtract its units"]
    async fn refund_returns_what_was_taken(bench) {
        let mut taken = bench.take_one(3).await?;
        let receipt = receipt(Some(&mut taken))?;
        same("units of the receipt", receipt.units(), 3)?;
        ensure(taken.take_receipt().is_none(), "a charge has two receipts")?;
        bench.refund(&bench.policy, receipt).await?;
        same("remaining after the refund", bench.left().await?, CAPACITY)
    }

    /// A part of a receipt refunds only the units of this part.
    #[fix = "see Receipt::split: subtract the units of the receipt, and not the units of the charge"]
    async fn part_of_a_receipt_returns_a_part(bench) {
        let mut taken = bench.take_one(4).await?;
        bench.refund(&bench.policy, receipt(Some(&mut taken))?.split(1)).await?;
        same("remaining after the refund of 1 of 4 units", bench.left().await?, CAPACITY - 3)
    }

    /// All refunds of one call are made, each to its own policy and key.
    #[fix = "see Limiter::refund: make all refunds of a call"]
    async fn refunds_of_one_call_are_all_made(bench) {
        let (two, b) = (bench.other("two")?, key("b"));
        let all = [(&bench.policy, &bench.key, 1), (&two, &bench.key, 2), (&bench.policy, &b, 3), (&two, &b, 4)];
        let set: Vec<Charge<'_>> =
            all.iter().map(|(policy, key, cost)| Charge::new(policy, key).cost(*cost)).collect();
        let mut taken = bench.take(&set).await?;
        ensure(taken.is_allowed(), "a set that fits was denied")?;
        let mut refunds = Vec::new();
        for (at, (policy, key, _)) in all.into_iter().enumerate() {
            refunds.push(Refund::new(policy.clone(), key.clone(), receipt(taken.charge_mut(at))?));
        }
        bench.limiter.refund(refunds).await.map_err(|error| format!("refund failed: {error}"))?;
        for (at, (policy, key, _)) in all.into_iter().enumerate() {
            same(&format!("remaining after refund {} of 4", at + 1), bench.left_of(policy, key).await?, CAPACITY)?;
        }
        Ok(())
    }

    /// The receipt of a forced charge holds the units that the charge took, and not those that it asked
    /// for.
    #[fix = "make the receipt from the units that were added to the state"]
    async fn refund_of_a_forced_charge_returns_what_it_took(bench) {
        bench.take_one(CAPACITY).await?;
        let mut forced = bench.take(&[bench.charge(u64::MAX).effect(Effect::Force)]).await?;
        if let Some(receipt) = forced.charge_mut(0).and_then(ChargeDecision::take_receipt) {
            bench.refund(&bench.policy, receipt).await?;
        }
        same("remaining after the refund of a forced charge to a used-up quota", bench.left().await?, 0)
    }

    /// A settlement is taken even if too few units are left, and even if its reply is not awaited.
    #[fix = "see Limiter::settle: send the charges before settle returns"]
    async fn settlement_need_not_be_awaited(bench) {
        let forced = |cost| bench.charge(cost).effect(Effect::Force);
        let settled = bench.limiter.settle(&[forced(2)]).await;
        ensure(settled.is_ok_and(|decision| decision.is_allowed()), "a settlement was denied")?;
        if bench.policy.quota().algorithm() == Algorithm::Concurrency {
            return Ok(()); // without its reply the units could not be returned, so a limiter may return them at once
        }
        drop(bench.limiter.settle(&[forced(CAPACITY)]));
        // A remote limiter's charge may reach the store only after a few peeks.
        for _ in 0..PEEKS {
            if bench.left().await? == 0 {
                return Ok(());
            }
        }
        ensure(false, "a settlement that was not awaited took nothing")
    }

    /// A reset makes the whole quota of its policy and key available again, and affects no other policy
    /// or key.
    #[fix = "see Limiter::reset: forget the state of this policy's name and this key"]
    async fn reset_returns_the_whole_quota(bench) {
        let (two, b) = (bench.other("two")?, key("b"));
        bench.take_one(CAPACITY).await?;
        bench.take(&[Charge::new(&two, &bench.key).cost(2), Charge::new(&bench.policy, &b).cost(3)]).await?;
        bench.reset(&bench.policy).await?;
        same("remaining after the reset", bench.left().await?, CAPACITY)?;
        same("remaining of another policy after a reset", bench.left_of(&two, &bench.key).await?, CAPACITY - 2)?;
        same("remaining of another key after a reset", bench.left_of(&bench.policy, &b).await?, CAPACITY - 3)
    }

    /// If several threads take units concurrently, exactly the capacity passes.
    #[fix = "decide and write under one lock, or in one atomic step"]
    async fn concurrent_takes_are_counted_exactly(bench) {
        let passed = passed_concurrently(bench, std::slice::from_ref(&bench.policy)).await?;
        passed.into_iter().try_for_each(|passed| same("concurrent takes of one key that passed", passed, CAPACITY))
    }

    /// Concurrent sets are all-or-nothing, whatever the order of their charges.
    #[fix = "lock the states of each set in an order that all sets share, or refund the units that a refused set took"]
    async fn concurrent_sets_are_all_or_nothing(bench) {
        let policies = [bench.policy.clone(), bench.other("two")?];
        for (number, passed) in passed_concurrently(bench, &policies).await?.into_iter().enumerate() {
            ensure(passed <= CAPACITY, &format!("{passed} concurrent sets passed, of {CAPACITY}"))?;
            // A limiter whose sets are not atomic may refuse a set that would fit, and the refunds of refused sets may
            // still be under way.
            if bench.limiter.hooks().atomicity() == Atomicity::Atomic {
                same("concurrent sets that passed", passed, CAPACITY)?;
                for policy in &policies {
                    same("remaining after concurrent sets", bench.left_of(policy, &numbered(number)).await?, 0)?;
                }
            }
        }
        Ok(())
    }

    /// Concurrent takes never hold more units than the capacity, and concurrent refunds return all
    /// units.
    #[fix = "make a refund read and write the state under the same lock, or in the same atomic step, as a take"]
    async fn concurrent_refunds_return_what_was_taken(bench) {
        const ROUNDS: usize = 32;
        if bench.policy.quota().algorithm() == Algorithm::LeakyQueue {
            return Ok(()); // refunds only its tail
        }
        let held = Arc::new(AtomicU64::new(0));
        let most = together(bench.subject, TASKS, |_| {
            let (limiter, policy, key, held) =
                (bench.limiter.clone(), bench.policy.clone(), bench.key.clone(), Arc::clone(&held));
            async move {
                let mut most = 0;
                for _ in 0..ROUNDS {
                    let taken = limiter.take(&[Charge::new(&policy, &key).cost(2)]).await;
                    if let Some(receipt) = taken.ok().and_then(|mut taken| taken.charge_mut(0)?.take_receipt()) {
                        most = most.max(held.fetch_add(2, Ordering::AcqRel) + 2);
                        held.fetch_sub(2, Ordering::AcqRel);
                        let _ = limiter.refund(vec![Refund::new(policy.clone(), key.clone(), receipt)]).await;
                    }
                }
                most
            }
        });
        let most = most.await?.into_iter().max().unwrap_or(0);
        ensure((1..=CAPACITY).contains(&most), &format!("{most} units were held at once, of {CAPACITY} allowed"))?;
        same("remaining after all refunds", bench.left().await?, CAPACITY)
    }

    /// A dropped future takes at most its own charge.
    #[fix = "when a future is dropped, undo only the charge of this future"]
    async fn dropped_future_leaves_at_most_its_own_charge(bench) {
        drop(bench.limiter.take(&[bench.charge(2)]));
        let left = bench.left().await?;
        ensure(left >= CAPACITY - 2, &format!("{left} of {CAPACITY} units remain after a dropped charge of 2"))
    }

    /// A future that was polled once and then not again delays no other caller.
    #[fix = "send the charges from a task of the limiter, so that a caller's future only waits for the answer"]
    async fn held_future_delays_no_other_caller(bench) {
        let mut held = Vec::new();
        for number in 0..HELD {
            if let Reply::Later(future) = bench.limiter.take(&[Charge::new(&bench.policy, &numbered(number))]) {
                let mut future = Box::pin(future);
                if poll_fn(|context| Poll::Ready(future.as_mut().poll(context).is_pending())).await {
                    held.push(future);
                }
            }
        }
        bench.take_one(1).await?;
        let left = bench.left().await?;
        drop(held);
        same("remaining after a charge of 1", left, CAPACITY - 1)
    }

    /// Invalid sets do not panic or hang, and an empty key is a valid key.
    #[fix = "answer each charge, even if a set names the same (policy, key) twice"]
    async fn unusual_sets_are_answered(bench) {
        let (global, long) = (Key::global(), key(&"k".repeat(100_000)));
        let charge = |key| Charge::new(&bench.policy, key);
        ensure(bench.take(&[charge(&global)]).await?.is_allowed(), "the global key was denied")?;
        ensure(bench.take(&[charge(&long)]).await?.is_allowed(), "a long key was denied")?;
        bench.take(&[charge(&long), charge(&long)]).await.map(drop)
    }
}

cases! {
    /// Runs the cases of a quota that the limiter supports and whose units are freed with time.
    fn run_timed;

    /// A refusal is counted in the step that refuses. When the refusals reach the block's limit,
    /// they close the key, which opens at the announced time.
    #[fix = "see Effect::OnRefusal and Quota::block, or return an error for blocks from Limiter::supports"]
    async fn block_counts_refusals_and_closes_the_key(bench) {
        // Skips quotas of a calendar, because a window of a day would last longer than the block.
        if !bench.supports(block()) || bench.policy.quota().calendar_windows().is_some() {
            return Ok(());
        }
        let block = named("block", block())?;
        let strike = Charge::new(&block, &bench.key);
        let on_refusal = strike.effect(Effect::OnRefusal { of: 1 });
        let set = |cost| [bench.charge(cost), on_refusal];
        for cost in [1, CAPACITY - 1] {
            let passed = bench.take(&set(cost)).await?;
            let allowed = passed.is_allowed() && passed.charges()[1].is_allowed();
            ensure(allowed, "the block denied a set before any set was refused")?;
        }
        let other = bench.other("other")?;
        let over = Charge::new(&other, &bench.key).cost(CAPACITY + 1);
        let refused = bench.take(&[over, bench.charge(0), on_refusal]).await?;
        ensure(!refused.is_allowed(), "a set with a denied charge was allowed")?;
        same("remaining refusals after a refusal that does not count", bench.left_of(&block, &bench.key).await?, 2)?;
        let refused = bench.take(&set(1)).await?;
        ensure(!refused.is_allowed(), "a set with a denied charge was allowed")?;
        ensure(refused.charges()[1].is_allowed(), "the first refusal of two closed the key")?;
        same("refusals left", refused.charges()[1].remaining(), 1)?;
        let peeked = bench.peek(&set(1)).await?;
        ensure(!peeked.charges()[1].is_allowed(), "a peek does not say that the next refusal closes the key")?;
        ensure(bench.peek(&[strike.cost(0)]).await?.is_allowed(), "a peek closed the key")?;
        let closing = bench.take(&set(1)).await?;
        same("the block that the second refusal begins", closing.charges()[1].wait(), Wait::After(HOUR))?;
        bench.subject.advance(HOUR / 2).await;
        let closed = bench.take(&set(1)).await?;
        ensure(!closed.is_allowed(), "a set passed while its key was closed")?;
        ensure(closed.charges()[0].is_allowed(), "a charge that fits is reported as denied")?;
        same("the wait of a request after half of the block", closed.charges()[1].wait(), Wait::After(HOUR / 2))?;
        ensure(!bench.peek(&[strike.cost(0)]).await?.is_allowed(), "a charge of cost 0 does not see the block")?;
        same("remaining after a closed set", bench.left().await?, CAPACITY)?;
        bench.subject.advance(HOUR / 2).await;
        ensure(bench.take(&set(1)).await?.is_allowed(), "the key is closed for longer than was reported")?;
        bench.take(&[strike.cost(9).effect(Effect::Force)]).await?;
        let again = bench.peek(&[strike.cost(0)]).await?;
        same("the second block, which forced strikes begin", again.charges()[0].wait(), Wait::After(2 * HOUR))?;
        bench.reset(&block).await?;
        ensure(bench.take(&set(1)).await?.is_allowed(), "a reset did not open the key")
    }

    /// A denied cost passes after its wait, and no wait is too long.
    #[fix = "set the wait to the time after which the same cost fits, rounded up"]
    async fn denied_cost_passes_after_its_wait(bench) {
        bench.take_one(CAPACITY).await?;
        let wait = wait_of(&bench.take_one(2).await?)?;
        // The oldest part of a sliding window counts for up to two periods.
        let longest = 2 * bench.policy.quota().refill_time();
        ensure(wait <= longest, &format!("the wait is longer than the quota needs: {wait:?}"))?;
        bench.subject.advance(wait).await;
        let passed = bench.take_one(2).await?.is_allowed();
        ensure(passed, &format!("the cost was denied again after its wait, {wait:?}"))
    }

    /// In a long time, no more units pass than the quota allows, and not many fewer.
    #[fix = "see Quota::period: make units come back at the rate of the quota, independently of the reported waits"]
    async fn units_come_back_at_the_rate_of_the_quota(bench) {
        const REFILLS: u64 = 5;
        const STEPS: u32 = 8;
        let step = bench.policy.quota().refill_time() / STEPS;
        // The bounds are wide, because windows and steps may begin at any time, and because a sub-window that counts
        // in full lowers the rate.
        let (least, most) = (REFILLS * CAPACITY * 3 / 4, (REFILLS + 2) * CAPACITY);
        let mut passed = 0;
        for _ in 0..REFILLS * u64::from(STEPS) {
            while passed <= most && bench.take_one(1).await?.is_allowed() {
                passed += 1;
            }
            bench.subject.advance(step).await;
        }
        let found = format!("{passed} units passed in the time of {REFILLS} refills, instead of {least} to {most}");
        ensure((least..=most).contains(&passed), &found)
    }

    /// A leaky queue gives each request a departure after the departures of all earlier requests.
    #[fix = "see ChargeDecision::with_delay: report the time after which the earlier units in the queue have drained"]
    async fn queue_spaces_its_departures(bench) {
        if bench.policy.quota().algorithm() != Algorithm::LeakyQueue {
            return Ok(());
        }
        let interval = MINUTE / CAPACITY as u32;
        for (cost, ahead) in [(1, 0), (2, 1), (1, 3), (1, 4)] {
            let taken = bench.take_one(cost).await?;
            same("delay of a request", taken.delay(), interval * ahead)?;
            same("position of a request", taken.position(), u64::from(ahead))?;
        }
        bench.subject.advance(interval).await;
        same("delay of a request behind 4 units", bench.take_one(1).await?.delay(), interval * 4)
    }

    /// After `reset_after` has passed, the whole quota is available again.
    #[fix = "set reset_after to the time after which no unit of the state counts any more, rounded up"]
    async fn whole_quota_is_back_after_reset_after(bench) {
        let taken = bench.take_one(3).await?;
        let reset = reset_of(&taken)?;
        let longest = 2 * bench.policy.quota().refill_time();
        ensure(reset <= longest, &format!("reset_after is longer than the quota needs: {reset:?}"))?;
        bench.subject.advance(reset).await;
        same("remaining after reset_after", bench.left().await?, CAPACITY)
    }

    /// A leaky queue refunds only its last request, because requests behind an earlier request have been promised
    /// their departures. An earlier request may be refunded after all requests behind it have been refunded.
    #[fix = "see Limiter::refund: refund only the newest slot of a leaky queue"]
    async fn queue_refunds_only_its_tail(bench) {
        if bench.policy.quota().algorithm() != Algorithm::LeakyQueue {
            return Ok(());
        }
        let mut taken = [bench.take_one(2).await?, bench.take_one(2).await?];
        let [middle, tail] = &mut taken;
        bench.refund(&bench.policy, receipt(Some(middle))?).await?;
        same("remaining after a refund in the middle", bench.left().await?, CAPACITY - 4)?;
        bench.refund(&bench.policy, receipt(Some(tail))?).await?;
        let left = bench.left().await?;
        ensure(left == CAPACITY - 2 || left == CAPACITY, "the refund of a queue's newest slot was not made")
    }

    /// A refund of units that have expired returns nothing.
    #[fix = "write the instant or the window into each receipt, and compare it before you subtract units"]
    async fn late_refund_returns_nothing(bench) {
        let mut taken = bench.take_one(CAPACITY).await?;
        bench.subject.advance(reset_of(&taken)?).await;
        bench.take_one(2).await?;
        let before = bench.left().await?;
        bench.refund(&bench.policy, receipt(Some(&mut taken))?).await?;
        same("remaining after the late refund", bench.left().await?, before)
    }

    /// If a policy's quota changes, the units that were used stay used.
    #[fix = "find a state by the policy's name, and convert it if it was written under another quota"]
    async fn changed_quota_keeps_what_was_used(bench) {
        for changed in timed_quotas() {
            if !bench.supports(changed.clone()) {
                continue;
            }
            let name = changed.as_ref().map_or_else(ToString::to_string, |changed| format!("plan-{changed}"));
            let (old, new) = (bench.other(&name)?, named(&name, changed)?);
            bench.take(&[Charge::new(&old, &bench.key).cost(3)]).await?;
            let taken = bench.take(&[Charge::new(&new, &bench.key)]).await?;
            ensure(taken.is_allowed(), &format!("a remaining unit was denied after the change to {}", new.quota()))?;
            let what = format!("remaining, changed to {}", new.quota());
            same(&what, bench.left_of(&new, &bench.key).await?, CAPACITY - 4)?;
            same(&format!("{what} and back"), bench.left_of(&old, &bench.key).await?, CAPACITY - 4)?;
            bench.reset(&old).await?;
            same(&format!("{what}, after a reset"), bench.left_of(&new, &bench.key).await?, CAPACITY)?;
        }
        Ok(())
    }
}

cases! {
    /// Runs the cases of a limit of requests in flight, if the limiter supports it.
    fn run_held;

    /// Units are held until they are refunded, however long that takes, and a denied charge has no known wait.
    #[fix = "do not let held units expire: store their number without a time, and deny with Wait::Unknown"]
    async fn units_are_held_until_they_are_refunded(bench) {
        let mut taken = bench.take_one(CAPACITY).await?;
        let denied = bench.take_one(1).await?;
        same("wait of a denied charge", denied.wait(), Wait::Unknown)?;
        same("reset_after of a denied charge", denied.reset_after(), None)?;
        bench.subject.advance(HOUR).await;
        same("remaining after an hour", bench.left().await?, 0)?;
        bench.refund(&bench.policy, receipt(Some(&mut taken))?).await?;
        same("remaining after the refund", bench.left().await?, CAPACITY)
    }

    /// A changed limit counts the units that are held, and denies until enough of them were refunded.
    #[fix = "keep the units that are held under the policy's name, whatever the limit is"]
    async fn changed_limit_counts_what_is_held(bench) {
        let few = named("places", Ok(Quota::concurrent(2)))?;
        let many = bench.other("places")?;
        let take = async |policy: &Policy| bench.take(&[Charge::new(policy, &bench.key).cost(2)]).await;
        let mut taken = [take(&many).await?, take(&many).await?];
        ensure(!take(&few).await?.is_allowed(), "a unit beyond a lowered limit passed")?;
        let [first, second] = &mut taken;
        bench.refund(&many, receipt(first.charge_mut(0))?).await?;
        ensure(!take(&few).await?.is_allowed(), "a unit passed although the lowered limit was reached")?;
        same("remaining under the higher limit", bench.left_of(&many, &bench.key).await?, CAPACITY - 2)?;
        bench.refund(&few, receipt(second.charge_mut(0))?).await?;
        ensure(take(&few).await?.is_allowed(), "a unit was denied although all units were refunded")
    }

    /// A refund of units that were taken before a reset does not refund units that were taken after it.
    #[fix = "note in each receipt how often the key was reset, and compare this number before you subtract units"]
    async fn refund_of_before_a_reset_returns_nothing(bench) {
        let mut old = bench.take_one(CAPACITY).await?;
        bench.reset(&bench.policy).await?;
        ensure(bench.take_one(2).await?.is_allowed(), "a reset key was denied")?;
        bench.refund(&bench.policy, receipt(Some(&mut old))?).await?;
        same("remaining after the late refund", bench.left().await?, CAPACITY - 2)
    }

    /// A rate and a limit of requests in flight with the same name do not affect each other.
    #[fix = "keep held units and used units in separate states"]
    async fn rate_of_the_same_name_is_apart(bench) {
        let rate = Quota::per_hour(CAPACITY);
        if !bench.supports(Ok(rate)) {
            return Ok(());
        }
        let (rate, held) = (named("api", Ok(rate))?, bench.other("api")?);
        bench.take(&[Charge::new(&held, &bench.key).cost(3)]).await?;
        same("remaining of the rate", bench.left_of(&rate, &bench.key).await?, CAPACITY)?;
        bench.take(&[Charge::new(&rate, &bench.key).cost(2)]).await?;
        same("remaining of the limit of requests in flight", bench.left_of(&held, &bench.key).await?, CAPACITY - 3)
    }
}

cases! {
    /// Runs the cases of a quota that the limiter does not support.
    fn run_unsupported;

    /// A charge of a quota that the limiter does not support fails or is denied. The limiter never ignores
    /// such a charge.
    #[fix = "deny a charge of a quota that Limiter::supports rejects, or return an error for the charge"]
    async fn unsupported_quota_is_not_ignored(bench) {
        let charge = [bench.charge(CAPACITY + 1)];
        let allowed = bench.limiter.take(&charge).await.is_ok_and(|decision| decision.is_allowed());
        ensure(!allowed, "a cost above the capacity passed")
    }
}
