//! Makes the calls of a vector.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::future::Future;
use std::pin::{Pin, pin};
use std::time::Duration;

use serde_json::{Map, Value};
use tower_ratelimit::{
    Key, MemoryLimiter, Policy, Quota, Wait,
    clock::{ManualClock, Timestamp},
    limiter::{BoxLimiter, Charge, ChargeDecision, Decision, Effect, Limiter, LimiterError, Receipt, Refund, Reply},
    quota::Algorithm,
};

use crate::expectation::Answer;
use crate::mapping::{self, Params, Reset};

/// The instant of a vector's time 0. It is a multiple of every window in the file, so that what
/// begins at 0 there begins on the grid here.
const START: Timestamp = Timestamp::from_micros(1_800_000_000_000_000);

/// The place at which a replay failed; without a field, because the step cannot be made here.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) step: usize,
    pub(crate) field: Option<String>,
    reason: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}, {}: {}", self.step, self.field.as_deref().unwrap_or("not possible"), self.reason)
    }
}

/// Replays a vector in memory, up to the first step that fails.
pub(crate) fn replay(vector: &Value) -> Result<(), Failure> {
    let (limiter, clock) = limiter();
    replay_on(vector, Backend { limiter: BoxLimiter::new(limiter), clock, wait: no_wait })
}

/// Replays a vector on a limiter without any state, up to the first step that fails.
pub(crate) fn replay_on(vector: &Value, backend: Backend) -> Result<(), Failure> {
    let slack = Duration::from_millis(vector["tolerance_ms"].as_u64().expect("a tolerance is stated"));
    let mut run = Run::new(vector, backend);
    for (index, step) in vector["steps"].as_array().expect("a vector has steps").iter().enumerate() {
        let impossible = |reason| Failure { step: index, field: None, reason };
        let mut answer = run.step(step).map_err(impossible)?;
        for _ in 1..step["repeat"].as_u64().unwrap_or(1) {
            answer = run.step(step).map_err(impossible)?;
        }
        for (field, expected) in step["expect"].as_object().expect("a step expects something, or {}") {
            answer.is(field, expected, slack).map_err(|reason| Failure {
                step: index,
                field: Some(field.clone()),
                reason,
            })?;
        }
    }
    Ok(())
}

/// A limiter for a vector, at its time 0.
pub(crate) fn limiter() -> (MemoryLimiter, ManualClock) {
    let clock = ManualClock::at(START);
    let limiter = MemoryLimiter::builder().max_keys(64).clock(clock.clone()).build().expect("the setup is possible");
    (limiter, clock)
}

/// A limiter, at a vector's time 0.
pub(crate) struct Backend {
    pub(crate) limiter: BoxLimiter,
    pub(crate) clock: ManualClock,
    /// Waits for a later answer.
    pub(crate) wait: fn(Pending<'_>),
}

/// An answer that is under way.
pub(crate) type Pending<'a> = Pin<&'a mut dyn Future<Output = ()>>;

fn no_wait(_: Pending<'_>) {
    panic!("memory answers at once");
}

impl Backend {
    fn answer<T, F: Future<Output = Result<T, LimiterError>>>(&self, reply: Reply<T, LimiterError, F>) -> T {
        let mut answer = None;
        match reply {
            Reply::Now(now) => answer = Some(now),
            Reply::Later(later) => (self.wait)(pin!(async { answer = Some(later.await) })),
        }
        answer.expect("it was waited for").expect("the limiter answers")
    }

    fn take(&self, charges: &[Charge<'_>]) -> Decision {
        self.answer(self.limiter.take(charges))
    }

    fn peek(&self, charges: &[Charge<'_>]) -> Decision {
        self.answer(self.limiter.peek(charges))
    }
}

/// The charges of a reservation, under the name by which a later step cancels it.
type Taken = Vec<(Policy, Key, Option<Receipt>)>;

struct Run<'a> {
    id: &'a str,
    algorithm: &'a str,
    params: Params,
    /// All units that the vector forces, which is the debt that a bucket must allow.
    debt: u64,
    backend: Backend,
    /// The keys of earlier steps.
    created: HashSet<String>,
    taken: HashMap<String, Taken>,
    /// The charges of the latest take.
    last: Taken,
}

impl<'a> Run<'a> {
    fn new(vector: &'a Value, backend: Backend) -> Self {
        let forced = |step: &&Value| matches!(step["op"].as_str(), Some("force_take" | "reserve"));
        let steps = vector["steps"].as_array().into_iter().flatten();
        Self {
            id: vector["id"].as_str().expect("a vector has an id"),
            algorithm: vector["algorithm"].as_str().expect("a vector has an algorithm"),
            params: vector["params"].as_object().expect("a vector has parameters").clone(),
            debt: steps.filter(forced).filter_map(|step| step["cost"].as_u64()).sum(),
            backend,
            created: HashSet::new(),
            taken: HashMap::new(),
            last: Taken::new(),
        }
    }

    /// Makes one call.
    fn step(&mut self, step: &Value) -> Result<Answer, String> {
        let at = Duration::from_millis(step["t_ms"].as_u64().ok_or("a step has a time")?);
        let cost = step["cost"].as_u64().ok_or("a step has a cost")?;
        let mut params = self.params.clone();
        params.extend(step["params_override"].as_object().cloned().unwrap_or_default());
        let name = step["key"].as_str().unwrap_or_default();
        let limits = self.limits(&params)?;
        let mut call = Call { run: self, key: Key::of(name).ok_or("a key")?, limits, at, effect: Effect::Enforce };
        call.create(name, &params)?;
        call.run.backend.clock.set(START.saturating_add(at));
        let tokens_before = call.tokens();
        let mut answer = match step["op"].as_str().ok_or("a step has an op")? {
            "take" | "wait" => call.take(cost)?,
            // A peek answers as if the request had been charged.
            "peek" | "test" => call.peek(cost)?,
            "force_take" => call.force(cost)?,
            "take_all" => call.take_up_to(u64::MAX)?,
            "take_at_most" => call.take_up_to(cost)?,
            "reserve" => call.reserve(cost, params.get("max_wait_ms").and_then(Value::as_u64))?,
            "cancel" => {
                let taken = step["arg"].as_str().and_then(|id| call.run.taken.remove(id));
                call.refund(taken.ok_or("what is cancelled was reserved")?)?
            }
            "refund" => {
                let taken = std::mem::take(&mut call.run.last);
                if taken.iter().map(|(_, _, receipt)| receipt.as_ref().map_or(0, Receipt::units)).sum::<u64>() < cost {
                    return Err("more is given back than was taken".into());
                }
                call.refund(taken)?
            }
            "reset" => call.reset()?,
            // Tokens up to the capacity fill a bucket, and the rest is dropped.
            "add" if call.limits.iter().all(|policy| policy.quota().capacity() <= cost) => call.reset()?,
            "set_config" => {
                call.run.params.extend(step["arg"].as_object().cloned().ok_or("a configuration")?);
                return Ok(Answer::default());
            }
            other => return Err(format!("nothing here does `{other}`")),
        };
        answer.tokens_before = tokens_before;
        answer.tokens = call.tokens();
        if let Some(id) = step["id"].as_str() {
            let last = std::mem::take(&mut self.last);
            self.taken.insert(id.to_owned(), last);
        }
        Ok(answer)
    }

    /// The policies of a vector: one, or several that must all hold. A changed quota is another of
    /// the same name.
    fn limits(&self, params: &Params) -> Result<Vec<Policy>, String> {
        let of = |name: &str, params: &Params| -> Result<Policy, String> {
            let quota = mapping::quota(self.algorithm, params, self.debt)?;
            Policy::new(name, quota).map_err(|error| error.to_string())
        };
        let Some(several) = params.get("multi").and_then(Value::as_array) else {
            let block = mapping::block(params)?.map(|quota| Policy::new("its block", quota));
            let block = block.transpose().map_err(|error| error.to_string())?;
            return Ok(std::iter::once(of("the one", params)?).chain(block).collect());
        };
        several
            .iter()
            .enumerate()
            .map(|(index, limit)| {
                let limit = limit.as_object().ok_or("a limit has parameters")?;
                let unnamed = format!("limit {index}");
                of(limit.get("name").and_then(Value::as_str).unwrap_or(&unnamed), limit)
            })
            .collect()
    }
}

/// One call for one key.
struct Call<'r, 'a> {
    run: &'r mut Run<'a>,
    key: Key,
    limits: Vec<Policy>,
    at: Duration,
    effect: Effect,
}

impl Call<'_, '_> {
    /// A bucket that begins with fewer tokens than it holds: when its key is first met, the missing
    /// ones are forced out of it, at the instant at which it was created. A step bucket's ticks
    /// count from there.
    fn create(&mut self, name: &str, params: &Params) -> Result<(), String> {
        if !self.run.created.insert(name.to_owned()) {
            return Ok(());
        }
        let created = params.get("created_at_ms").and_then(Value::as_u64).map_or(self.at, Duration::from_millis);
        self.run.backend.clock.set(START.saturating_add(created));
        let nothing = Map::new();
        let several = params.get("multi").and_then(Value::as_array);
        for (index, policy) in self.limits.iter().enumerate() {
            let own = several.map_or(params, |several| several[index].as_object().unwrap_or(&nothing));
            let Some(initial) = own.get("initial").and_then(Value::as_u64) else { continue };
            let missing = policy.quota().capacity().checked_sub(initial).ok_or("more than it holds")?;
            let charge = Charge::new(policy, &self.key).cost(missing).effect(Effect::Force);
            if !self.run.backend.take(&[charge]).is_allowed() {
                return Err("a forced charge was denied".into());
            }
        }
        Ok(())
    }

    fn charges(&self, cost: u64) -> Vec<Charge<'_>> {
        let charge = |policy| Charge::new(policy, &self.key);
        self.limits
            .iter()
            .map(|policy| match policy.quota().algorithm() {
                Algorithm::Block => charge(policy).effect(Effect::OnRefusal { of: 1 }),
                _ => charge(policy).cost(cost).effect(self.effect),
            })
            .collect()
    }

    fn peeked(&self, cost: u64) -> Decision {
        self.run.backend.peek(&self.charges(cost))
    }

    fn peek(&self, cost: u64) -> Result<Answer, String> {
        self.answer(&self.peeked(cost), cost)
    }

    fn take(&mut self, cost: u64) -> Result<Answer, String> {
        let mut decision = self.run.backend.take(&self.charges(cost));
        let receipts = decision.take_receipts();
        let taken = self.limits.iter().zip(receipts);
        self.run.last = taken.map(|(policy, receipt)| (policy.clone(), self.key.clone(), receipt)).collect();
        self.answer(&decision, cost)
    }

    fn force(&mut self, cost: u64) -> Result<Answer, String> {
        self.effect = Effect::Force;
        let answer = self.take(cost);
        self.effect = Effect::Enforce;
        answer
    }

    /// Takes up to `most` of what is left. If nothing is left, answers for one unit.
    fn take_up_to(&mut self, most: u64) -> Result<Answer, String> {
        match most.min(self.peek(0)?.remaining) {
            0 => self.peek(1),
            units => self.take(units),
        }
    }

    /// Charged now, to act later: a denied cost's wait is the time until its tokens will be there,
    /// so it is forced and told to wait that long, if that is not longer than the caller would.
    fn reserve(&mut self, cost: u64, longest_ms: Option<u64>) -> Result<Answer, String> {
        let seen = self.peek(cost)?;
        let longest = longest_ms.map_or(Duration::MAX, Duration::from_millis);
        let Some(wait) = seen.retry_after.filter(|wait| *wait <= longest) else {
            return Ok(seen);
        };
        let answer = self.force(cost)?;
        Ok(Answer { allowed: true, wait, act_at: self.at + wait, ..answer })
    }

    fn refund(&self, taken: Taken) -> Result<Answer, String> {
        let refunds: Vec<Refund> =
            taken.into_iter().filter_map(|(policy, key, receipt)| Some(Refund::new(policy, key, receipt?))).collect();
        self.run.backend.answer(self.run.backend.limiter.refund(refunds));
        self.peek(0)
    }

    fn reset(&self) -> Result<Answer, String> {
        let backend = &self.run.backend;
        self.limits.iter().for_each(|policy| backend.answer(backend.limiter.reset(policy, &self.key)));
        self.peek(0)
    }

    /// The tokens of the one bucket; whole if some are left, and from the time until it is full if
    /// it is in debt.
    fn tokens(&self) -> Option<i64> {
        let [policy] = &self.limits[..] else { return None };
        let decision = self.peeked(0);
        let decision = decision.charges().first()?;
        match i64::try_from(decision.remaining()).ok()? {
            0 => mapping::tokens(policy.quota(), decision.reset_after()?).ok(),
            remaining => Some(remaining),
        }
    }

    fn answer(&self, decision: &Decision, cost: u64) -> Result<Answer, String> {
        let charges = decision.charges();
        let first = charges.first().ok_or("an answer for each charge")?;
        // A cost of 0 is always allowed; what its sources tell of a wait is that of one unit.
        let one = self.peeked(1);
        let waiting = if cost == 0 { one.charges() } else { charges };
        let named = || self.limits.iter().map(|policy| policy.name().to_owned()).zip(charges);
        let wait = charges.iter().map(ChargeDecision::delay).max().unwrap_or_default();
        Ok(Answer {
            allowed: decision.is_allowed(),
            limit: first.limit(),
            remaining: charges.iter().map(ChargeDecision::remaining).min().unwrap_or(0),
            remaining_by_limit: named().map(|(name, charge)| (name, charge.remaining())).collect(),
            denied_by: named().filter(|(_, charge)| !charge.is_allowed()).map(|(name, _)| name).collect(),
            retry_after: longest_wait(waiting),
            reset: self.reset_told(first, one.charges()),
            taken: if decision.is_allowed() { cost } else { 0 },
            wait,
            act_at: self.at + wait,
            position: first.position(),
            tokens_before: None,
            tokens: None,
        })
    }

    fn reset_told(&self, first: &ChargeDecision, one: &[ChargeDecision]) -> Duration {
        let reset_after = first.reset_after().expect("both limiters know it");
        let told = |quota: &Quota| match mapping::reset(quota, self.run.id) {
            Reset::WholeQuota => reset_after,
            Reset::NextUnit => longest_wait(one).unwrap_or(Duration::MAX),
            Reset::FromRemaining => {
                let missing = u32::try_from(quota.capacity() - first.remaining()).unwrap_or(u32::MAX);
                let told = quota.period() * missing;
                let early = told.saturating_sub(reset_after);
                assert!(reset_after <= told && early < quota.period(), "a part of a unit at most is between them");
                told
            }
        };
        self.limits.first().map_or(Duration::ZERO, |policy| told(policy.quota()))
    }
}

/// Returns `None` if no wait helps.
fn longest_wait(charges: &[ChargeDecision]) -> Option<Duration> {
    match charges.iter().map(ChargeDecision::wait).max()? {
        Wait::Never => None,
        wait => Some(wait.duration().unwrap_or_default()),
    }
}
