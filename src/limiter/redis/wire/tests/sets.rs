//! Sets of charges against the limiter in memory, and calls of many requests against one call for
//! each.

use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::{Answered, Bench, CallTime, NUMBER, RedisAnswer, WireOperation, WireRequest, call, decoded};
use crate::MemoryLimiter;
use crate::algorithm::properties::quotas::{quota, shapes};
use crate::clock::{Clock, ManualClock};
use crate::decision::Receipt;
use crate::key::Key;
use crate::limiter::redis::keys::{CallerKeys, KeySpace, StoredKey};
use crate::limiter::{Charge, Effect, Limiter, Refund, Reply};
use crate::policy::Policy;
use crate::quota::{Algorithm, Anchor};

const EFFECTS: [Effect; 8] = [
    Effect::Enforce,
    Effect::Enforce,
    Effect::Enforce,
    Effect::Observe,
    Effect::Force,
    Effect::OnRefusal { of: 1 },
    Effect::OnRefusal { of: 2 },
    Effect::OnRefusal { of: 3 },
];

/// A request: its operation, how much later than the one before it comes, and its charges: a policy, a
/// key, a cost and an effect.
type Step = (u8, u64, Vec<(u8, u8, u64, u8)>);

fn policies() -> impl Strategy<Value = Vec<Policy>> {
    prop::collection::vec((shapes(), prop::sample::select(Algorithm::timed().collect::<Vec<_>>()), any::<bool>()), 4)
        .prop_map(|shapes| {
            let named = shapes.iter().enumerate().map(|(at, (shape, algorithm, first))| {
                let anchor = if *first { Anchor::FirstRequest } else { Anchor::Epoch };
                Policy::new(format!("p{at}"), quota(*algorithm, anchor, shape)).unwrap()
            });
            named.collect()
        })
}

/// A rule's quotas.
fn siblings() -> impl Strategy<Value = Vec<Policy>> {
    let limits = prop::sample::select(Algorithm::rates());
    prop::collection::vec((shapes(), limits, any::<bool>()), 2..5).prop_filter_map("they differ", |shapes| {
        let quotas = shapes.iter().map(|(shape, algorithm, first)| {
            let anchor = if *first { Anchor::FirstRequest } else { Anchor::Epoch };
            quota(*algorithm, anchor, shape)
        });
        Policy::each("client", quotas).ok()
    })
}

/// Policies of their own, and those of one rule.
fn mixed_policies() -> impl Strategy<Value = Vec<Policy>> {
    (policies(), siblings()).prop_map(|(mut alone, siblings)| {
        // Four in all, so that each is charged often.
        alone.truncate(4_usize.saturating_sub(siblings.len()));
        alone.extend(siblings);
        alone.truncate(4);
        alone
    })
}

/// A rule before and after one of its quotas changed.
fn changed_rules() -> impl Strategy<Value = Vec<Policy>> {
    siblings().prop_filter_map("three, at least", |policies| {
        let quotas: Vec<_> = policies.iter().map(|policy| *policy.quota()).collect();
        let [first, common, last] = quotas.get(..3)? else { return None };
        let rules = [[("one", *first), ("two", *common)], [("two", *common), ("one", *last)]];
        let rules = rules.map(|quotas| Policy::each("client", quotas).unwrap());
        Some(rules.concat())
    })
}

fn requests() -> impl Strategy<Value = Vec<Step>> {
    let charge = (0..4_u8, 0..2_u8, prop_oneof![Just(1), 0..4_u64, Just(1_000_000), Just(u64::MAX)], 0..8_u8);
    let charges = prop::collection::vec(charge, 1..5);
    prop::collection::vec((0..12_u8, prop_oneof![Just(0), 0..20_u64, 0..100_000_000_u64], charges), 1..40)
}

/// The charges of a request, each of another state.
fn charges<'a>(policies: &'a [Policy], keys: &'a [Key], wanted: &[(u8, u8, u64, u8)]) -> Vec<Charge<'a>> {
    let mut charges: Vec<Charge<'a>> = Vec::new();
    for (policy, key, cost, effect) in wanted {
        let (policy, key) = (&policies[usize::from(*policy)], &keys[usize::from(*key)]);
        let is_same = |charge: &Charge<'_>| charge.policy.stored_name() == policy.stored_name() && charge.key == key;
        if !charges.iter().any(is_same) {
            let on_refusal = !policy.quota().algorithm().is_rate();
            let effect = match EFFECTS[usize::from(*effect)] {
                Effect::OnRefusal { .. } if !on_refusal => Effect::Enforce,
                effect => effect,
            };
            charges.push(Charge::new(policy, key).cost(*cost).effect(effect));
        }
    }
    charges
}

fn ask(space: &KeySpace, how: u8, charges: &[Charge<'_>], refunds: &mut Vec<Refund>) -> Vec<WireRequest> {
    let stored: Vec<StoredKey> = charges.iter().map(|charge| space.key(charge.policy, charge.key)).collect();
    let refund = |one: Refund| {
        let stored = space.key(&one.policy, &one.key);
        WireRequest::refund(&one, &stored)
    };
    match how {
        0 => vec![WireRequest::reset(charges[0].policy, &stored[0])],
        1 => refunds.drain(..).map(refund).collect(),
        2..=3 => vec![WireRequest::charge(WireOperation::Peek, charges.iter().zip(&stored))],
        _ => vec![WireRequest::charge(WireOperation::Take, charges.iter().zip(&stored))],
    }
}

fn keys() -> [Key; 2] {
    [Key::of("one").unwrap(), Key::of("two").unwrap()]
}

fn now<T, E: std::fmt::Debug, F>(reply: Reply<T, E, F>) -> T {
    match reply {
        Reply::Now(answer) => answer.unwrap(),
        Reply::Later(_) => panic!("memory answers at once"),
    }
}

fn run<T>(cases: u32, strategy: impl Strategy<Value = T>, mut test: impl FnMut(&mut Bench, KeySpace, T))
where
    T: std::fmt::Debug,
{
    let bench = std::cell::RefCell::new((Bench::start_beside_simulation(), 0));
    let test = std::cell::RefCell::new(&mut test);
    proptest::test_runner::TestRunner::new(crate::base::sampling::config(cases))
        .run(&strategy, |value| {
            let (bench, number) = &mut *bench.borrow_mut();
            *number += 1;
            let space = KeySpace::new(&format!("t{number}"), CallerKeys::Hashed([0; 16]), None).unwrap();
            let mut test = test.borrow_mut();
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| test(bench, space, value)))
                .map_err(|panic| TestCaseError::fail(panic.downcast_ref::<String>().cloned().unwrap_or_default()))
        })
        .unwrap();
    let (bench, _) = &mut *bench.borrow_mut();
    assert!(bench.check_ttls() > 0);
}

/// Returns the answer with its receipts as text.
fn told(answer: &mut Answered) -> String {
    if let Ok(RedisAnswer::Decided(decision)) = answer {
        let receipts = decision.take_receipts();
        return format!("{decision:?} {receipts:?}");
    }
    format!("{answer:?}")
}

#[test]
fn sets_are_decided_as_in_memory() {
    play_sets(policies());
}

#[test]
fn sets_with_quotas_of_one_rule_are_decided_as_in_memory() {
    play_sets(mixed_policies());
}

#[test]
fn a_rule_that_changes_keeps_what_is_used_of_each_quota() {
    play_sets(changed_rules());
}

fn play_sets(policies: impl Strategy<Value = Vec<Policy>>) {
    run(400, (policies, requests()), |bench, space, (policies, requests)| {
        let clock = ManualClock::at(crate::base::time::Timestamp::from_micros(1_790_000_000_123_456));
        let memory = MemoryLimiter::builder().max_keys(1_000).clock(clock.clone()).build().unwrap();
        let keys = keys();
        let mut held: Vec<(Refund, Refund)> = Vec::new();
        for (how, later, wanted) in requests {
            clock.advance(Duration::from_micros(later));
            let charges = charges(&policies, &keys, &wanted);
            let (mut refunds, mut is_behind) = (Vec::new(), Vec::new());
            let expected = match how {
                0 => {
                    now(memory.reset(charges[0].policy, charges[0].key));
                    "Ok(Done)".to_owned()
                }
                1 if held.is_empty() => continue,
                1 => {
                    let (mine, theirs): (_, Vec<Refund>) = std::mem::take(&mut held).into_iter().unzip();
                    refunds = mine;
                    is_behind = theirs.iter().map(|refund| memory.refund_once(refund)).collect();
                    "Ok(".to_owned()
                }
                2..=3 => {
                    let mut decision = now(memory.peek(&charges));
                    let _ = decision.take_receipts();
                    told(&mut Ok(RedisAnswer::Decided(decision)))
                }
                _ => {
                    let mut decision = now(memory.take(&charges));
                    for (charge, receipt) in charges.iter().zip(decision.take_receipts()) {
                        if let Some(receipt) = receipt {
                            let copy = Receipt::new(receipt.units(), receipt.at_us(), receipt.part());
                            let one = |receipt| Refund::new(charge.policy.clone(), charge.key.clone(), receipt);
                            // An entry without units is kept in memory, and says when the state
                            // ends.
                            if !matches!(charge.policy.quota().decider(), crate::algorithm::Decider::EntryLog(_)) {
                                held.push((one(copy), one(receipt)));
                            }
                        }
                    }
                    format!("{decision:?} ")
                }
            };
            let requests = ask(&space, how, &charges, &mut refunds);
            let asked: Vec<_> = requests.iter().map(|request| (clock.now(), request)).collect();
            for (at, mut answer) in bench.ask(&asked).into_iter().enumerate() {
                let answer = told(&mut answer);
                assert!(answer.starts_with(&expected), "{expected}\n{answer}\n{charges:?}");
                let found = answer == "Ok(Behind)";
                assert_eq!(found, is_behind.get(at).is_some_and(|is_behind| *is_behind), "{charges:?}");
            }
        }
    });
}

#[test]
fn requests_of_one_call_are_answered_as_in_calls_of_their_own() {
    let mut number = 0;
    run(
        400,
        (prop_oneof![policies(), mixed_policies()], requests(), any::<bool>()),
        |bench, space, (policies, requests, alike)| {
            let keys = keys();
            // Nothing is flushed: what the last case alone has left may be nothing.
            number += 1;
            let alone = KeySpace::new(&format!("alone{number}"), CallerKeys::Hashed([0; 16]), None).unwrap();
            let at = crate::base::time::Timestamp::from_micros(1_790_000_000_123_456);
            let mut held = Vec::new();
            let make = |space: &KeySpace, held: &mut Vec<Refund>| -> Vec<WireRequest> {
                let asks = requests.iter().flat_map(|(how, _, wanted)| {
                    // Requests that are alike go in one run.
                    let policies = if alike { &vec![policies[0].clone(); 4] } else { &policies };
                    let mut charges = charges(policies, &keys, wanted);
                    charges.truncate(if alike { 1 + usize::from(how % 2) } else { 4 });
                    let how = if alike && *how < 2 { 4 } else { *how };
                    let mut refunds = if how == 1 { std::mem::take(held) } else { Vec::new() };
                    ask(space, how, &charges, &mut refunds)
                });
                asks.collect()
            };
            let (together, alone) = (make(&space, &mut held), make(&alone, &mut held));
            let expected: Vec<String> = alone.iter().map(|ask| told(&mut bench.ask(&[(at, ask)]).remove(0))).collect();
            let requests: Vec<&WireRequest> = together.iter().collect();
            let reply = bench.run(&[call(&requests, NUMBER, CallTime::Given(at))]).remove(0);
            let answers: Vec<String> = decoded(&requests, &reply).iter_mut().map(told).collect();
            assert_eq!(answers, expected);
        },
    );
}
