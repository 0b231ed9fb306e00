//! Threads that use the same keys at once see answers that some order of their calls explains. That order agrees with
//! real time: a call that ended before another began comes first. Each recorded history is searched for such an order.
//!
//! A refused set takes nothing, and one refusing charge is enough to refuse it. So it reads each of its states at an
//! instant of its own. A set that is admitted decides about all of its charges at one instant.
//!
//! The clock stands still. Then every algorithm is a counter, so the specification is a few lines that share nothing
//! with the limiter.

#![expect(clippy::disallowed_methods, reason = "the crate's clocks count microseconds, and a call takes less")]

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tower_ratelimit::{
    ConfigError, Key, MemoryLimiter, Policy, Quota,
    clock::ManualClock,
    limiter::{Charge, Effect, Receipt, Refund},
    quota::{Algorithm, Oldest},
};

use crate::support::{cases, of_each_algorithm_but};

const HOUR: Duration = Duration::from_secs(3_600);
const LIMIT: u64 = 4;
const THREADS: usize = 3;
const CALLS: usize = 4;
/// Each of two policies has two keys.
const COUNTERS: usize = 4;

/// The answer to one charge of a call.
#[derive(Clone, Copy, Debug)]
struct Seen {
    counter: usize,
    cost: u64,
    effect: Effect,
    is_allowed: bool,
    remaining: u64,
}

#[derive(Clone, Debug)]
enum Call {
    /// The charges of a set that was admitted.
    Take(Vec<Seen>),
    /// A charge of a set that was refused.
    Read(Seen),
    Refund {
        counter: usize,
        units: u64,
    },
}

/// A call, and the instants between which it had its effect.
#[derive(Clone, Debug)]
struct Recorded {
    began: Instant,
    ended: Instant,
    call: Call,
}

/// The units that are used of each counter.
type Used = [u64; COUNTERS];

/// Returns what is used after a call. Returns `None` if the call cannot have had its answer at that moment.
fn used_after(call: &Call, mut used: Used) -> Option<Used> {
    let is_answer = |seen: &Seen, used: u64, then: u64| {
        seen.is_allowed == (used + seen.cost <= LIMIT) && seen.remaining == LIMIT - then
    };
    match call {
        Call::Refund { counter, units } => used[*counter] = used[*counter].checked_sub(*units)?,
        Call::Read(seen) => is_answer(seen, used[seen.counter], used[seen.counter]).then_some(())?,
        Call::Take(charges) => {
            for seen in charges {
                let then = used[seen.counter] + if seen.is_allowed { seen.cost } else { 0 };
                is_answer(seen, used[seen.counter], then).then_some(())?;
                used[seen.counter] = then;
            }
        }
    }
    Some(used)
}

/// Returns whether an order of the calls explains all answers.
fn is_explained(history: &[Recorded]) -> bool {
    /// `failed` has the sets of calls, with what they used, from which no order goes on.
    fn search(history: &[Recorded], done: u32, used: Used, failed: &mut HashSet<(u32, Used)>) -> bool {
        let open = || history.iter().enumerate().filter(|(at, _)| done & (1 << at) == 0);
        // A call comes next only if none that is open had ended when it began.
        let Some(first_end) = open().map(|(_, other)| other.ended).min() else { return true };
        if failed.contains(&(done, used)) {
            return false;
        }
        let is_found = open().filter(|(_, next)| next.began <= first_end).any(|(at, next)| {
            used_after(&next.call, used).is_some_and(|used| search(history, done | 1 << at, used, failed))
        });
        if !is_found {
            failed.insert((done, used));
        }
        is_found
    }
    search(history, 0, [0; COUNTERS], &mut HashSet::new())
}

/// Pseudorandom numbers that each thread makes for itself.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % bound
    }
}

/// Lets threads begin together. They spin, because a lock would wake them one after another.
#[derive(Default)]
struct Gate(AtomicUsize);

impl Gate {
    fn pass(&self) {
        let round = self.0.fetch_add(1, Ordering::SeqCst) / THREADS;
        while self.0.load(Ordering::SeqCst) < (round + 1) * THREADS {
            std::thread::yield_now();
        }
    }
}

/// One thread's calls of one history. Receipts that it does not refund are returned.
fn record(
    limiter: &MemoryLimiter,
    (policies, keys): (&[Policy; 2], &[Key; 2]),
    random: &mut Random,
) -> (Vec<Recorded>, Vec<(usize, Receipt)>) {
    let (mut calls, mut held) = (Vec::with_capacity(CALLS), Vec::<(usize, Receipt)>::new());
    let refund =
        |counter: usize, receipt| Refund::new(policies[counter / 2].clone(), keys[counter % 2].clone(), receipt);
    for _ in 0..CALLS {
        if random.below(4) == 0 {
            if let Some((counter, receipt)) = held.pop() {
                let units = receipt.units();
                let refunds = [refund(counter, receipt)];
                let began = Instant::now();
                limiter.refund_now(&refunds);
                calls.push(Recorded { began, ended: Instant::now(), call: Call::Refund { counter, units } });
                continue;
            }
        }
        let first = random.below(COUNTERS as u64) as usize;
        let mut counters = vec![first];
        if random.below(2) == 0 {
            counters.push((first + 1 + random.below(COUNTERS as u64 - 1) as usize) % COUNTERS);
        }
        let planned: Vec<(usize, u64, Effect)> = counters
            .into_iter()
            .map(|counter| {
                (counter, random.below(4), if random.below(5) == 0 { Effect::Observe } else { Effect::Enforce })
            })
            .collect();
        let set: Vec<Charge<'_>> = planned
            .iter()
            .map(|(counter, cost, effect)| {
                Charge::new(&policies[counter / 2], &keys[counter % 2]).cost(*cost).effect(*effect)
            })
            .collect();
        let began = Instant::now();
        let mut decision = limiter.take_now(&set);
        let ended = Instant::now();
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
        if decision.is_allowed() {
            calls.push(Recorded { began, ended, call: Call::Take(seen) });
        } else {
            calls.extend(seen.into_iter().map(|seen| Recorded { began, ended, call: Call::Read(seen) }));
        }
    }
    (calls, held)
}

/// Returns quotas of each algorithm that the specification has, in each of its layouts.
fn quotas() -> Vec<Quota> {
    let each = || -> Result<Vec<Quota>, ConfigError> {
        Ok(vec![
            Quota::token_bucket(LIMIT, HOUR)?,
            Quota::token_bucket(99_999_999, HOUR)?.burst(LIMIT)?,
            Quota::gcra(LIMIT, HOUR)?.burst(LIMIT)?,
            Quota::leaky_bucket(LIMIT, HOUR)?,
            Quota::step_bucket(LIMIT, HOUR)?,
            Quota::fixed_window(LIMIT, HOUR)?,
            Quota::sliding_window(LIMIT, HOUR)?,
            Quota::sliding_window(LIMIT, HOUR)?.buckets(6)?.oldest(Oldest::Counted)?,
            Quota::sliding_log(LIMIT, HOUR)?,
            Quota::concurrent(LIMIT),
        ])
    };
    // A refund to a leaky queue depends on who queued since. Blocks and meters are no counters that refuse.
    of_each_algorithm_but(
        &[Algorithm::LeakyQueue, Algorithm::Block, Algorithm::Meter],
        each().expect("they are possible"),
    )
}

#[test]
fn answers_to_concurrent_calls_are_those_of_some_order() {
    let mut seed = 0_u64;
    for first in quotas() {
        for second in quotas() {
            // It has room for all, so it forgets nothing, and its table grows meanwhile.
            let limiter = MemoryLimiter::builder().clock(ManualClock::new()).build().expect("the setup is possible");
            let policies = [first, second].map(|quota| Policy::new(quota.to_string(), quota));
            let [Ok(a), Ok(b)] = policies else { panic!("the names are possible") };
            let policies = [a.clone(), if first == second { Policy::new("other", second).expect("a name") } else { b }];
            let histories: Vec<u64> = (0..u64::from(cases(100))).collect();
            let gate = Gate::default();
            seed += 1;
            let recorded: Vec<Vec<Vec<Recorded>>> = std::thread::scope(|scope| {
                let threads: Vec<_> = (1..=THREADS as u64)
                    .map(|thread| {
                        let (limiter, policies, histories, gate) = (&limiter, &policies, &histories, &gate);
                        scope.spawn(move || {
                            let mut random = Random(((seed << 8) | thread).wrapping_mul(0x9e37_79b9_7f4a_7c15));
                            let each = histories.iter().map(|history| {
                                let keys = [2 * history, 2 * history + 1].map(|n| Key::of(n).expect("a number"));
                                gate.pass();
                                let (calls, held) = record(limiter, (policies, &keys), &mut random);
                                gate.pass();
                                drop(held);
                                calls
                            });
                            each.collect()
                        })
                    })
                    .collect();
                threads.into_iter().map(|thread| thread.join().expect("a thread does not panic")).collect()
            });
            for history in histories {
                let calls: Vec<Recorded> =
                    recorded.iter().flat_map(|thread| thread[history as usize].iter().cloned()).collect();
                assert!(is_explained(&calls), "{first} and {second}: no order explains these answers: {calls:#?}");
            }
        }
    }
}

/// The search rejects a history in which one of two charges was lost, and one that contradicts real time.
#[test]
fn search_rejects_answers_that_no_order_explains() {
    let start = Instant::now();
    let at = |ms: u64| start + Duration::from_millis(ms);
    let take = |began, ended, cost, remaining| {
        let seen = Seen { counter: 0, cost, effect: Effect::Enforce, is_allowed: true, remaining };
        Recorded { began: at(began), ended: at(ended), call: Call::Take(vec![seen]) }
    };
    assert!(is_explained(&[take(0, 5, 1, 2), take(1, 6, 1, 3)]), "each may be the first");
    assert!(!is_explained(&[take(0, 5, 1, 3), take(1, 6, 1, 3)]), "one charge is lost");
    assert!(!is_explained(&[take(0, 1, 1, 2), take(2, 3, 1, 3)]), "the second was answered before the first");
    assert!(!is_explained(&[take(0, 5, 3, 1), take(1, 6, 3, 1)]), "together they are above the limit");
}
