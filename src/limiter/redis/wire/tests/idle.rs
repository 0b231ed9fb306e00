//! Actions that take nothing write nothing, but for the listed exceptions: the value and its end
//! stay as they are.

#[path = "../../../../../tests/support/idle.rs"]
mod table;

use super::{Bench, RedisAnswer, WireOperation, WireRequest};
use crate::base::time::Timestamp;
use crate::decision::Receipt;
use crate::key::Key;
use crate::limiter::redis::keys::{CallerKeys, KeySpace, StoredKey};
use crate::limiter::{Charge, Effect, Refund};
use crate::policy::Policy;
use crate::quota::{Algorithm, Anchor, Oldest, Quota};
use table::Action::*;
use table::{ACTIONS, Write, counts_refusals, expected, kinds, plans};

/// No state ends as late as this, so the thread that wrote it has ended it earlier.
const LATE_MS: i64 = 40_000_000;

fn value(bench: &mut Bench, stored: &StoredKey, what: &str) -> Vec<u8> {
    let left: i64 = redis::cmd("PTTL").arg(&*stored.bytes).query(&mut bench.connection).unwrap();
    assert!(left > LATE_MS / 2, "{what} wrote: it ends in {left} ms");
    redis::cmd("DUMP").arg(&*stored.bytes).query(&mut bench.connection).unwrap()
}

fn request(space: &KeySpace, operation: WireOperation, charges: &[Charge<'_>]) -> WireRequest {
    let stored: Vec<StoredKey> = charges.iter().map(|charge| space.key(charge.policy, charge.key)).collect();
    WireRequest::charge(operation, charges.iter().zip(&stored))
}

#[test]
fn charges_that_take_nothing_leave_the_value_as_it_is() {
    let mut bench = Bench::start();
    let space = KeySpace::new("idle", CallerKeys::Hashed([0; 16]), None).unwrap();
    let mut number = 0;
    let now = Timestamp::from_micros(1_790_000_000_000_000);
    for from in plans(5) {
        let same = [from];
        let proportional = plans(3).into_iter().filter_map(|plan| plan.in_proportion().ok());
        for to in same.into_iter().chain(plans(3)).chain(proportional) {
            number += 1;
            let key = Key::of(number).unwrap();
            let [before, after] = [from, to].map(|quota| Policy::new("p", quota).unwrap());
            let stored = space.key(&before, &key);
            let ask = |policy, cost, effect, operation| {
                request(&space, operation, &[Charge::new(policy, &key).cost(cost).effect(effect)])
            };
            let first = ask(&before, from.capacity().min(5), Effect::Enforce, WireOperation::Take);
            bench.ask(&[(now, &first)]);
            let _: () = redis::cmd("PEXPIRE").arg(&*stored.bytes).arg(LATE_MS).query(&mut bench.connection).unwrap();
            let kept = value(&mut bench, &stored, "");
            let refund = Refund::new(after.clone(), key.clone(), Receipt::new(3, 1, 0));
            for (what, idle) in [
                ("a peek", ask(&after, 1, Effect::Enforce, WireOperation::Peek)),
                ("a peek of too much", ask(&after, 99, Effect::Enforce, WireOperation::Peek)),
                ("a look", ask(&after, 0, Effect::Enforce, WireOperation::Take)),
                ("a forced look", ask(&after, 0, Effect::Force, WireOperation::Take)),
                ("a denied take", ask(&after, 99, Effect::Enforce, WireOperation::Take)),
                ("an observed denial", ask(&after, 99, Effect::Observe, WireOperation::Take)),
                ("a refund of nothing", WireRequest::refund(&refund, &space.key(&after, &key))),
            ] {
                let answer = bench.ask(&[(now, &idle)]).remove(0);
                assert!(matches!(answer, Ok(RedisAnswer::Decided(_) | RedisAnswer::Done)), "{answer:?}");
                let what = format!("{what} of {to}, under {from},");
                assert!(value(&mut bench, &stored, &what) == kept, "{what} wrote");
            }
        }
    }
}

/// Each kind of state, and each action that takes nothing: what the table says is what the server
/// has afterwards.
#[test]
fn actions_that_take_nothing_write_only_what_is_listed() {
    let mut bench = Bench::start();
    let space = KeySpace::new("idle", CallerKeys::Hashed([0; 16]), None).unwrap();
    let now = Timestamp::from_micros(1_790_000_000_000_000);
    let earlier = Timestamp::from_micros(now.as_micros() - 1_000_000_000);
    let [full, free] = ["full", "free"].map(|name| Policy::new(name, Quota::per_minute(5)).unwrap());
    let (mut number, mut wrong) = (0_u64, Vec::new());
    for quota in kinds() {
        for action in ACTIONS {
            if matches!(action, OnRefusalOfAllowed | OnRefusalOfObserved | OnRefusalOfRefused)
                && !counts_refusals(&quota)
            {
                continue; // the limiter answers such a charge with an error
            }
            number += 1;
            let (policy, key) = (Policy::new("p", quota).unwrap(), Key::of(number).unwrap());
            let stored = space.key(&policy, &key);
            let own = Charge::new(&policy, &key);
            let [full, free] = [&full, &free].map(|policy| Charge::new(policy, &key));
            let first = request(&space, WireOperation::Take, &[own.cost(quota.capacity() - 1), full.cost(5)]);
            bench.ask(&[(now, &first)]);
            let _: () = redis::cmd("PEXPIRE").arg(&*stored.bytes).arg(LATE_MS).query(&mut bench.connection).unwrap();
            let dump = |bench: &mut Bench| -> Vec<u8> {
                redis::cmd("DUMP").arg(&*stored.bytes).query(&mut bench.connection).unwrap()
            };
            let before = dump(&mut bench);
            assert!(!before.is_empty());
            let refund = |units, at| {
                let refund = Refund::new(policy.clone(), key.clone(), Receipt::new(units, at, 0));
                WireRequest::refund(&refund, &stored)
            };
            let (observed, on_refusal) = (own.cost(2).effect(Effect::Observe), own.effect(Effect::OnRefusal { of: 1 }));
            let take = |charges: &[Charge<'_>]| request(&space, WireOperation::Take, charges);
            let peek = |charges: &[Charge<'_>]| request(&space, WireOperation::Peek, charges);
            let (at, ask) = match action {
                Peek => (now, peek(&[own])),
                PeekOfTooMuch => (now, peek(&[own.cost(2)])),
                PeekOfSet => (now, peek(&[free, own])),
                Look => (now, take(&[own.cost(0)])),
                ForcedLook => (now, take(&[own.cost(0).effect(Effect::Force)])),
                LookInTakenSet => (now, take(&[free, own.cost(0)])),
                LookAfterClockSteppedBack => (earlier, take(&[own.cost(0)])),
                ObservedDenial => (now, take(&[observed])),
                ObservedDenialInTakenSet => (now, take(&[free, observed])),
                TakeInRefusedSet => (now, take(&[own, full])),
                LateRefund => (now, refund(3, 1)),
                RefundOfNoUnits => (now, refund(0, now.as_micros())),
                DeniedTake => (now, take(&[own.cost(2)])),
                DeniedTakeAfterClockSteppedBack => (earlier, take(&[own.cost(2)])),
                OnRefusalOfAllowed => (now, take(&[free, on_refusal])),
                OnRefusalOfObserved => (now, take(&[full.effect(Effect::Observe), on_refusal])),
                OnRefusalOfRefused => (now, take(&[full, on_refusal])),
            };
            let answer = bench.ask(&[(at, &ask)]).remove(0);
            assert!(matches!(answer, Ok(RedisAnswer::Decided(_) | RedisAnswer::Done)), "{answer:?}");
            let left: i64 = redis::cmd("PTTL").arg(&*stored.bytes).query(&mut bench.connection).unwrap();
            let wrote = dump(&mut bench) != before || left < LATE_MS / 2;
            let expected = expected(&quota, action);
            if wrote != (expected != Write::Nothing) {
                wrong.push(format!("{action:?} of {quota}: {expected:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
