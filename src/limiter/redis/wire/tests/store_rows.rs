//! The rows that a limiter over a store keeps of a concurrency limit, and those of the script.

use std::cell::RefCell;

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::places::{BEGIN, LAPSE_US, Rows, STAYS_US, claim, first};
use super::{Answered, RedisAnswer, WireOperation};
use crate::algorithm::TakeMode;
use crate::algorithm::places::Places;
use crate::base::sampling::config;
use crate::decision::ChargeDecision;
use crate::limiter::remote::{self, Claim, CurrentRow};
use crate::limiter::{Effect, Standing};
use crate::quota::Quota;

/// Reads the rows out of the stored value.
fn stored(rows: &mut Rows) -> remote::KeyRows {
    let value: Option<Vec<u8>> = redis::cmd("GET").arg(&*rows.stored.bytes).query(&mut rows.bench.connection).unwrap();
    let mut read = remote::KeyRows::default();
    for row in value.as_deref().and_then(|value| value.get(25..)).unwrap_or_default().chunks_exact(36) {
        let number = |at: usize| f64::from_le_bytes(row[8 * at..][..8].try_into().unwrap());
        let (holder, lapses) = (number(0), number(3) as u64);
        let last = u32::from_le_bytes(row[32..].try_into().unwrap());
        if holder < 0.0 {
            let (since, cost) = (number(1) as u64, number(2) as u64);
            read.line.push(remote::HolderInLine { holder: -holder as u64, number: last, since, cost, lapses });
        } else {
            let row = CurrentRow { resets: last, epoch: number(1) as u64 };
            read.held.push(remote::HeldRow { holder: holder as u64, row, units: number(2) as u64, lapses });
        }
    }
    read
}

/// The rows of a limiter over a store and those of the script, after each of the same calls.
#[test]
fn store_keeps_the_rows_that_the_script_keeps() {
    let rows = RefCell::new(Rows::alone("store"));
    let step = (0..24_u8, 1..5_u64, 0..4_u64, 0..3_u64, 0..6_u64, 0..u64::MAX);
    proptest!(config(400), |(steps in prop::collection::vec(step, 1..60))| {
        play_beside_store(&mut rows.borrow_mut(), steps)?;
    });
}

#[test]
fn reset_after_the_clock_stepped_back_leaves_the_same_rows() {
    let steps = vec![(9, 1, 0, 0, 0, 1 << 61), (0, 4, 0, 2, 5, 10_820_745_017_190_759_872)];
    play_beside_store(&mut Rows::alone("store"), steps).unwrap();
}

fn play_beside_store(rows: &mut Rows, steps: Vec<(u8, u64, u64, u64, u64, u64)>) -> Result<(), TestCaseError> {
    redis::cmd("FLUSHALL").exec(&mut rows.bench.connection).unwrap();
    rows.now = BEGIN;
    let mut twin = remote::KeyRows::default();
    for (what, holder, epoch, base, cost, chance) in steps {
        rows.now = match chance >> 40 & 15 {
            0 => rows.now + LAPSE_US,
            1 => rows.now + STAYS_US,
            2 if chance >> 44 & 15 == 0 => rows.now - 2 * 86_400_000_000, // the clock steps back
            _ => rows.now + (chance >> 50) % 100_000,
        };
        let now = rows.now;
        let standing = match chance & 7 {
            0 => Standing::HeldBack,
            1..=3 => first(holder, (chance >> 3 & 1) as u32, (chance >> 4) % 200_000).standing,
            4 => Standing::Left,
            _ => Standing::Newcomer,
        };
        let (resets, keeps_row) = ((chance >> 60 & 1) as u32, chance >> 61 & 1 == 1);
        let claim = Claim { resets, keeps_row, standing, ..claim(holder, epoch, if base == 2 { 2 } else { 0 }) };
        let fail =
            |answer: &Answered| TestCaseError::fail(format!("{answer:?} to {claim:?}, {cost} at {now}: {twin:?}"));
        match what {
            0 => {
                let answer = rows.reset();
                prop_assert!(matches!(answer, Ok(RedisAnswer::Done)), "{answer:?}");
                twin = twin.reset(now);
            }
            1..=6 => {
                let answer = rows.return_units(cost, claim);
                match (&answer, twin.refuses(&claim, now)) {
                    (Ok(RedisAnswer::Refused(0, found)), Some(row)) => prop_assert_eq!(*found, row),
                    (Ok(found @ (RedisAnswer::Done | RedisAnswer::Missing)), None) => {
                        let (next, is_missing) = twin.return_units(&claim, cost, now);
                        prop_assert_eq!(matches!(found, RedisAnswer::Missing), is_missing, "{:?}", claim);
                        twin = next;
                    }
                    _ => return Err(fail(&answer)),
                }
            }
            _ => {
                let claim =
                    if standing == Standing::Left { Claim { standing: Standing::Newcomer, ..claim } } else { claim };
                let operation = if what < 9 { WireOperation::Peek } else { WireOperation::Take };
                let (effect, how) = match what {
                    9..=11 => (Effect::Force, TakeMode::Force),
                    _ => (Effect::Enforce, TakeMode::IfAllowed),
                };
                let limit = 1 + chance % 5;
                let answer = rows.charge(operation, limit, cost, effect, claim);
                let refusal = twin.refuses(&claim, now).filter(|_| operation == WireOperation::Take);
                let decision = match (&answer, refusal) {
                    (Ok(RedisAnswer::Refused(0, found)), Some(row)) => {
                        prop_assert_eq!(*found, row);
                        continue;
                    }
                    (Ok(RedisAnswer::Decided(decision)), None) => &decision.charges()[0],
                    _ => return Err(fail(&answer)),
                };
                let places = Places::new(Quota::concurrent(limit).spec());
                let charged = twin.charge(places, &claim, (cost, how), operation == WireOperation::Peek, now);
                let told = |decision: &ChargeDecision| (decision.is_allowed(), decision.remaining(), decision.wait());
                prop_assert_eq!(told(decision), told(&charged.decision), "{:?} {} {:?}", claim, cost, twin);
                let taken = if operation == WireOperation::Take { charged.decision.receipt().units() } else { 0 };
                let receipt = (taken, charged.decision.receipt().at_us());
                prop_assert_eq!((decision.receipt().units(), decision.receipt().at_us()), receipt, "{:?}", claim);
                if operation == WireOperation::Take {
                    let next = if decision.is_allowed() { charged.if_taken } else { charged.otherwise };
                    twin = next.unwrap_or(twin);
                }
            }
        }
        prop_assert_eq!(&stored(rows), &twin, "after {} of {:?} at {}", what, claim, now);
    }
    Ok(())
}
