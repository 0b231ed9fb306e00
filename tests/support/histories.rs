//! Histories of callers that use the same keys at once, and the search for an order of their calls that explains all
//! answers. That order agrees with real time: a call that ended before another began comes first.
//!
//! No unit comes back with time while a history is recorded. Then every algorithm is a counter, so the specification is
//! a few lines that share nothing with the limiters.

#![allow(dead_code, reason = "each test binary uses its part")]
#![expect(clippy::disallowed_methods, reason = "the crate's clocks count microseconds, and a call may take less")]

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Barrier;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tower_ratelimit::limiter::{Charge, Effect, Limiter, Receipt, Refund};
use tower_ratelimit::quota::Anchor;
use tower_ratelimit::{Key, Policy, Quota};

/// Longer than the calls of a caller may take by their deadlines.
const LONG: Duration = Duration::from_secs(300);

pub(crate) const LIMIT: u64 = 4;
pub(crate) const CALLERS: usize = 3;
const CALLS: usize = 4;
/// Each of two policies has two keys.
const COUNTERS: usize = 4;

/// The answer to one charge of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) counter: usize,
    pub(crate) cost: u64,
    pub(crate) effect: Effect,
    pub(crate) is_allowed: bool,
    pub(crate) remaining: u64,
}

#[derive(Clone, Debug)]
pub(crate) enum Call {
    /// Charges of a set that was admitted, at one instant.
    Take(Vec<Seen>),
    /// Charges that took nothing, at one instant.
    Read(Vec<Seen>),
    Refund {
        counter: usize,
        units: u64,
        /// Its key may have been reset since the units were taken: then none of them come back, or fewer. A bucket becomes
        /// no fuller than the charge left it.
        may_be_void: bool,
    },
    Reset {
        counter: usize,
    },
}

impl Call {
    fn counters(&self) -> Vec<usize> {
        match self {
            Self::Take(charges) | Self::Read(charges) => charges.iter().map(|seen| seen.counter).collect(),
            Self::Refund { counter, .. } | Self::Reset { counter } => vec![*counter],
        }
    }
}

/// A call, and the instants between which it had its effect.
#[derive(Clone, Debug)]
pub(crate) struct Recorded {
    pub(crate) began: Instant,
    pub(crate) ended: Instant,
    pub(crate) call: Call,
}

impl Recorded {
    /// Returns whether the two calls use the same counter at the same time.
    fn meets(&self, other: &Self) -> bool {
        let is_shared = self.call.counters().iter().any(|counter| other.call.counters().contains(counter));
        is_shared && self.began < other.ended && other.began < self.ended
    }
}

/// The units that are used of each counter.
type Used = [u64; COUNTERS];

/// Returns what may be used after a call: nothing if the call cannot have had its answer at that moment.
fn used_after(call: &Call, mut used: Used) -> Vec<Used> {
    let is_answer = |seen: &Seen, used: u64, then: u64| {
        seen.is_allowed == (used + seen.cost <= LIMIT) && seen.remaining == LIMIT - then
    };
    match call {
        Call::Refund { counter, units, may_be_void } => {
            let least = if *may_be_void { 0 } else { *units };
            let refunded = |units: u64| {
                let mut used = used;
                used[*counter] = used[*counter].checked_sub(units)?;
                Some(used)
            };
            return (least..=*units).filter_map(refunded).collect();
        }
        Call::Reset { counter } => used[*counter] = 0,
        Call::Read(charges) => {
            if !charges.iter().all(|seen| is_answer(seen, used[seen.counter], used[seen.counter])) {
                return Vec::new();
            }
        }
        Call::Take(charges) => {
            for seen in charges {
                let then = used[seen.counter] + if seen.is_allowed { seen.cost } else { 0 };
                if !is_answer(seen, used[seen.counter], then) {
                    return Vec::new();
                }
                used[seen.counter] = then;
            }
        }
    }
    vec![used]
}

/// Returns whether an order of the calls explains all answers.
pub(crate) fn is_explained(history: &[Recorded]) -> bool {
    /// `failed` has the sets of calls, with what they used, from which no order goes on.
    fn search(history: &[Recorded], done: u64, used: Used, failed: &mut HashSet<(u64, Used)>) -> bool {
        let open = || history.iter().enumerate().filter(|(at, _)| done & (1 << at) == 0);
        // A call comes next only if none that is open had ended when it began.
        let Some(first_end) = open().map(|(_, other)| other.ended).min() else { return true };
        if failed.contains(&(done, used)) {
            return false;
        }
        let is_found = open().filter(|(_, next)| next.began <= first_end).any(|(at, next)| {
            let after = used_after(&next.call, used);
            after.into_iter().any(|used| search(history, done | 1 << at, used, failed))
        });
        if !is_found {
            failed.insert((done, used));
        }
        is_found
    }
    assert!(history.len() <= 64, "a history has few calls");
    search(history, 0, [0; COUNTERS], &mut HashSet::new())
}

/// Pseudorandom numbers that each caller makes for itself.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn of(seed: u64, caller: u64) -> Self {
        Self(((seed << 8) | (caller + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % bound
    }
}

/// Which charges of a set are decided at instants of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Apart {
    /// None. Each set is decided at one instant.
    None,
    /// The charges of a refused set. A set is refused as soon as one charge is.
    Refused,
    /// These, and charges of cost 0 for keys without a state. Another set may write such a state at the same time.
    RefusedOrMissing,
}

/// What the callers of a history do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Script<'a> {
    pub(crate) policies: &'a [Policy; 2],
    pub(crate) keys: &'a [Key; 2],
    pub(crate) apart: Apart,
    /// Keys are reset as well.
    pub(crate) has_resets: bool,
}

impl Script<'_> {
    fn refund(&self, counter: usize, receipt: Receipt) -> Refund {
        Refund::new(self.policies[counter / 2].clone(), self.keys[counter % 2].clone(), receipt)
    }

    /// Makes one caller's calls of a history, and records them. Returns the receipts that it has left as well: they are
    /// dropped when the history is over.
    pub(crate) async fn record<L: Limiter>(
        &self,
        limiter: &L,
        random: &mut Random,
    ) -> (Vec<Recorded>, Vec<(usize, Receipt)>) {
        let mut calls = Vec::with_capacity(2 * CALLS);
        let mut held: Vec<(usize, Receipt)> = Vec::new();
        for _ in 0..CALLS {
            match random.below(if self.has_resets { 5 } else { 4 }) {
                0 => {
                    let Some((counter, receipt)) = held.pop() else { continue };
                    let call = Call::Refund { counter, units: receipt.units(), may_be_void: self.has_resets };
                    let refunds = vec![self.refund(counter, receipt)];
                    let began = Instant::now();
                    limiter.refund(refunds).await.unwrap_or_else(|error| panic!("a refund fails: {error}"));
                    calls.push(Recorded { began, ended: Instant::now(), call });
                }
                4 => {
                    let counter = random.below(COUNTERS as u64) as usize;
                    let began = Instant::now();
                    let reset = limiter.reset(&self.policies[counter / 2], &self.keys[counter % 2]).await;
                    reset.unwrap_or_else(|error| panic!("a reset fails: {error}"));
                    calls.push(Recorded { began, ended: Instant::now(), call: Call::Reset { counter } });
                }
                _ => self.take(limiter, random, &mut calls, &mut held).await,
            }
        }
        (calls, held)
    }

    async fn take<L: Limiter>(
        &self,
        limiter: &L,
        random: &mut Random,
        calls: &mut Vec<Recorded>,
        held: &mut Vec<(usize, Receipt)>,
    ) {
        let first = random.below(COUNTERS as u64) as usize;
        let mut counters = vec![first];
        if random.below(2) == 0 {
            counters.push((first + 1 + random.below(COUNTERS as u64 - 1) as usize) % COUNTERS);
        }
        let planned = counters.into_iter().map(|counter| {
            (counter, random.below(4), if random.below(5) == 0 { Effect::Observe } else { Effect::Enforce })
        });
        let planned: Vec<(usize, u64, Effect)> = planned.collect();
        let set = planned.iter().map(|(counter, cost, effect)| {
            Charge::new(&self.policies[counter / 2], &self.keys[counter % 2]).cost(*cost).effect(*effect)
        });
        let set: Vec<Charge<'_>> = set.collect();
        let began = Instant::now();
        let decision = limiter.take(&set).await;
        let ended = Instant::now();
        let mut decision = match decision {
            Ok(decision) => decision,
            // A key was reset each time that the check was sent. It took nothing, and has read nothing.
            Err(error) if self.has_resets && error.to_string().contains("was reset") => return,
            Err(error) => panic!("a check fails: {error}"),
        };
        for (receipt, (counter, ..)) in decision.take_receipts().into_iter().zip(&planned) {
            held.extend(receipt.map(|receipt| (*counter, receipt)));
        }
        let seen = decision.charges().iter().zip(planned).map(|(charge, (counter, cost, effect))| Seen {
            counter,
            cost,
            effect,
            is_allowed: charge.is_allowed(),
            remaining: charge.remaining(),
        });
        let seen: Vec<Seen> = seen.collect();
        let refuses = |seen: &Seen| seen.effect == Effect::Enforce && !seen.is_allowed;
        assert_eq!(decision.is_allowed(), !seen.iter().any(refuses), "{seen:?}");
        let record = |call| Recorded { began, ended, call };
        let is_allowed = decision.is_allowed();
        let is_apart = |seen: &Seen| match self.apart {
            Apart::None => false,
            Apart::Refused => !is_allowed,
            Apart::RefusedOrMissing => !is_allowed || seen.cost == 0 && seen.remaining == LIMIT,
        };
        let (apart, together): (Vec<_>, Vec<_>) = seen.into_iter().partition(is_apart);
        calls.extend(apart.into_iter().map(|seen| record(Call::Read(vec![seen]))));
        if !together.is_empty() {
            calls.push(record(if is_allowed { Call::Take(together) } else { Call::Read(together) }));
        }
    }
}

/// Returns two policies with these quotas, and names that differ.
pub(crate) fn policies(first: Quota, second: Quota) -> [Policy; 2] {
    [("first", first), ("second", second)].map(|(name, quota)| Policy::new(name, quota).expect("it is a name"))
}

/// Fails if no order of the calls explains the answers. Each caller has a list of its calls.
pub(crate) fn check_history(callers: &[Vec<Recorded>], about: &str) {
    let calls = callers.concat();
    assert!(is_explained(&calls), "{about}: no order explains these answers: {calls:#?}");
}

/// Returns whether two callers used the same counter at the same time.
pub(crate) fn has_meeting(callers: &[Vec<Recorded>]) -> bool {
    let meets = |call: &Recorded, others: &[Vec<Recorded>]| others.iter().flatten().any(|other| call.meets(other));
    callers.iter().enumerate().any(|(at, calls)| calls.iter().any(|call| meets(call, &callers[at + 1..])))
}

/// Waits for the end of a caller's step.
async fn within<T>(who: &str, what: &str, step: impl Future<Output = T>) -> T {
    timeout(LONG, step).await.unwrap_or_else(|_| panic!("{who} waits for ever for {what}"))
}

/// A month, in which no unit of a quota comes back while a test runs.
const MONTH: Duration = Duration::from_secs(30 * 86_400);

/// Returns quotas of which nothing comes back while a test runs by real clocks.
fn lasting() -> Vec<Quota> {
    let window = Quota::fixed_window(LIMIT, MONTH).and_then(|quota| quota.anchor(Anchor::FirstRequest));
    let all = [window, Quota::token_bucket(LIMIT, MONTH), Quota::sliding_log(LIMIT, MONTH)];
    let all = all.into_iter().map(|quota| quota.expect("it is possible"));
    all.chain([Quota::concurrent(LIMIT)]).collect()
}

/// Plays this many histories of callers for each two quotas, each caller with a limiter of its own over one store, as
/// processes have. Checks each.
pub(crate) async fn check_limiters<L: Limiter + Clone + 'static>(limiters: [L; CALLERS], apart: Apart, histories: u64) {
    let (mut seed, gate) = (0, Arc::new(Barrier::new(CALLERS)));
    for first in lasting() {
        for second in lasting() {
            seed += 1;
            let policies = policies(first, second);
            // If a caller panics, this set ends the others, which wait for it.
            let mut tasks = JoinSet::new();
            for (limiter, caller) in limiters.iter().zip(0..) {
                let (limiter, policies, gate) = (limiter.clone(), policies.clone(), Arc::clone(&gate));
                tasks.spawn(async move {
                    let (mut random, mut recorded) = (Random::of(seed, caller), Vec::new());
                    for history in 0..histories {
                        let keys = [0, 1].map(|key| Key::of((seed * histories + history) * 2 + key).expect("a number"));
                        let (policies, keys, has_resets) = (&policies, &keys, history % 4 == 3);
                        let script = Script { policies, keys, apart, has_resets };
                        let who = format!("caller {caller} of history {history}");
                        within(&who, "the others to begin", gate.wait()).await;
                        let (calls, held) = within(&who, "answers", script.record(&limiter, &mut random)).await;
                        within(&who, "the others to end", gate.wait()).await;
                        // Places would be renewed for ever.
                        let held = held.into_iter().map(|(counter, receipt)| script.refund(counter, receipt)).collect();
                        let refunded = within(&who, "refunds", limiter.refund(held).into_future()).await;
                        refunded.unwrap_or_else(|error| panic!("a refund fails: {error}"));
                        recorded.push(calls);
                    }
                    recorded
                });
            }
            let mut callers = Vec::new();
            while let Some(recorded) = tasks.join_next().await {
                callers.push(recorded.expect("a caller does not panic"));
            }
            for history in 0..histories as usize {
                let calls: Vec<_> = callers.iter().map(|caller| caller[history].clone()).collect();
                check_history(&calls, &format!("{first} and {second}"));
            }
        }
    }
}
