//! Actions that take nothing write nothing, but for the listed exceptions: the value and its end
//! stay as they are.

use std::time::Duration;

use super::{Answer, Bench, Request, Verb};
use crate::algorithm::properties::plans::plans;
use crate::decision::Receipt;
use crate::key::Key;
use crate::limiter::redis::keys::Stored;
use crate::limiter::{Charge, Effect, Refund};
use crate::policy::Policy;
use crate::quota::{Algorithm, Anchor, Oldest, Quota};
use crate::time::Timestamp;

/// No state ends as late as this, so the thread that wrote it has ended it earlier.
const LATE_MS: i64 = 40_000_000;

fn value(bench: &mut Bench, stored: &Stored, what: &str) -> Vec<u8> {
    let left: i64 = redis::cmd("PTTL").arg(&*stored.bytes).query(&mut bench.connection).unwrap();
    assert!(left > LATE_MS / 2, "{what} wrote: it ends in {left} ms");
    redis::cmd("DUMP").arg(&*stored.bytes).query(&mut bench.connection).unwrap()
}

#[test]
fn charges_that_take_nothing_leave_the_value_as_it_is() {
    let mut bench = Bench::start();
    let mut number = 0;
    let now = Timestamp::from_micros(1_790_000_000_000_000);
    for from in plans(5) {
        let same = [from];
        let proportional = plans(3).into_iter().filter_map(|plan| plan.in_proportion().ok());
        for to in same.into_iter().chain(plans(3)).chain(proportional) {
            number += 1;
            let key = Key::of(number).unwrap();
            let [before, after] = [from, to].map(|quota| Policy::new("p", quota).unwrap());
            let stored = bench.space.key(&before, &key);
            let ask = |policy, cost, effect, peek| {
                let charge = Charge::new(policy, &key).cost(cost).effect(effect);
                let charges = std::iter::once((&charge, &stored));
                if peek { Request::charge(Verb::Peek, charges) } else { Request::charge(Verb::Take, charges) }
            };
            let first = ask(&before, from.capacity().min(5), Effect::Enforce, false);
            bench.ask(&[(now, &first, false)]);
            let _: () = redis::cmd("PEXPIRE").arg(&*stored.bytes).arg(LATE_MS).query(&mut bench.connection).unwrap();
            let kept = value(&mut bench, &stored, "");
            let refund = Refund::new(after.clone(), key.clone(), Receipt::new(3, 1, 0));
            for (what, idle) in [
                ("a peek", ask(&after, 1, Effect::Enforce, true)),
                ("a peek of too much", ask(&after, 99, Effect::Enforce, true)),
                ("a look", ask(&after, 0, Effect::Enforce, false)),
                ("a forced look", ask(&after, 0, Effect::Force, false)),
                ("a denied take", ask(&after, 99, Effect::Enforce, false)),
                ("an observed denial", ask(&after, 99, Effect::Observe, false)),
                ("a refund of nothing", Request::refund(refund, &bench.space.key(&after, &key))),
            ] {
                for general in [false, true] {
                    let answer = bench.ask(&[(now, &idle, general)]).remove(0);
                    assert!(matches!(answer, Ok(Answer::Decided(_) | Answer::Done)), "{answer:?}");
                    let what = format!("{what} of {to}, under {from},");
                    assert!(value(&mut bench, &stored, &what) == kept, "{what} wrote");
                }
            }
        }
    }
}

/// An action that takes nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Action {
    Peek,
    PeekOfTooMuch,
    Look,
    ForcedLook,
    LookAfterClockSteppedBack,
    ObservedDenial,
    TakeInRefusedSet,
    LateRefund,
    RefundOfNoUnits,
    DeniedTake,
    DeniedTakeAfterClockSteppedBack,
    OnRefusalOfAllowed,
    OnRefusalOfRefused,
}

use Action::*;

const ACTIONS: [Action; 13] = [
    Peek,
    PeekOfTooMuch,
    Look,
    ForcedLook,
    LookAfterClockSteppedBack,
    ObservedDenial,
    TakeInRefusedSet,
    LateRefund,
    RefundOfNoUnits,
    DeniedTake,
    DeniedTakeAfterClockSteppedBack,
    OnRefusalOfAllowed,
    OnRefusalOfRefused,
];

/// The effect of an action that takes nothing on the stored value.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Write {
    Nothing,
    Because(&'static str),
}

const DENIED: Write = Write::Because("the quota counts denied requests");
const AHEAD: Write = Write::Because("the state lies further ahead than its quota can put it, and would stay there");
const REFUSAL: Write = Write::Because("a refusal is what the quota counts");

/// Which of the actions write a state of this quota. An exception that is not listed here is a bug.
fn expected(quota: &Quota, action: Action) -> Write {
    let counts_refusals = matches!(quota.algorithm(), Algorithm::Block | Algorithm::Meter);
    match action {
        DeniedTake | DeniedTakeAfterClockSteppedBack | ObservedDenial if quota.counts_denied() => DENIED,
        DeniedTakeAfterClockSteppedBack => AHEAD,
        OnRefusalOfRefused if counts_refusals => REFUSAL,
        _ => Write::Nothing,
    }
}

/// A quota for each kind of state, with five units in a minute.
fn kinds() -> Vec<Quota> {
    let (limit, minute) = (5, Duration::from_secs(60));
    let first = |quota: Quota| quota.anchor(Anchor::FirstRequest).unwrap();
    let denied = |quota: Quota| quota.count_denied().unwrap();
    let window = Quota::sliding_window(limit, minute).unwrap();
    let (fixed, log) = (Quota::fixed_window(limit, minute).unwrap(), Quota::sliding_log(limit, minute).unwrap());
    let block = Quota::block(limit, minute, minute).unwrap();
    let step = Quota::step_bucket(limit, minute).unwrap();
    vec![
        Quota::token_bucket(limit, minute).unwrap(),
        Quota::token_bucket(7, minute).and_then(|quota| quota.burst(limit)).unwrap(),
        Quota::leaky_queue(limit, minute).unwrap(),
        step,
        first(step),
        fixed,
        first(fixed),
        denied(fixed),
        denied(first(fixed)),
        window,
        denied(window),
        window.oldest(Oldest::Counted).unwrap(),
        window.buckets(6).unwrap(),
        denied(window.buckets(6).unwrap()),
        log,
        denied(log),
        block,
        denied(block),
        Quota::meter(limit, minute).unwrap(),
    ]
}

/// Each kind of state, and each action that takes nothing: what the table says is what the server
/// has afterwards.
#[test]
fn actions_that_take_nothing_write_only_what_is_listed() {
    let mut bench = Bench::start();
    let now = Timestamp::from_micros(1_790_000_000_000_000);
    let earlier = Timestamp::from_micros(now.as_micros() - 1_000_000_000);
    let window = Quota::fixed_window(5, Duration::from_secs(60)).unwrap();
    let [full, free] = ["full", "free"].map(|name| Policy::new(name, window).unwrap());
    let (mut number, mut wrong) = (0_u64, Vec::new());
    for quota in kinds() {
        for (action, general) in ACTIONS.into_iter().flat_map(|action| [(action, false), (action, true)]) {
            let counts_refusals = matches!(quota.algorithm(), Algorithm::Block | Algorithm::Meter);
            if matches!(action, OnRefusalOfAllowed | OnRefusalOfRefused) && !counts_refusals {
                continue; // the limiter answers such a charge with an error
            }
            number += 1;
            let (policy, key) = (Policy::new("p", quota).unwrap(), Key::of(number).unwrap());
            let stored = [&policy, &full, &free].map(|policy| bench.space.key(policy, &key));
            let own = Charge::new(&policy, &key);
            let other = |policy| Charge::new(policy, &key);
            let one = |charge: Charge<'_>| Request::charge(Verb::Take, [(&charge, &stored[0])].into_iter());
            let first = Request::charge(
                Verb::Take,
                [(&own.cost(quota.capacity() - 1), &stored[0]), (&other(&full).cost(5), &stored[1])].into_iter(),
            );
            bench.ask(&[(now, &first, false)]);
            let _: () = redis::cmd("PEXPIRE").arg(&*stored[0].bytes).arg(LATE_MS).query(&mut bench.connection).unwrap();
            let dump = |bench: &mut Bench| -> Vec<u8> {
                redis::cmd("DUMP").arg(&*stored[0].bytes).query(&mut bench.connection).unwrap()
            };
            let before = dump(&mut bench);
            assert!(!before.is_empty());
            let refund = |units, at| {
                let refund = Refund::new(policy.clone(), key.clone(), Receipt::new(units, at, 0));
                Request::refund(refund, &stored[0])
            };
            let on_refusal = own.cost(1).effect(Effect::OnRefusal { of: 1 });
            let after = |partner, at: usize| {
                Request::charge(Verb::Take, [(&other(partner), &stored[at]), (&on_refusal, &stored[0])].into_iter())
            };
            let (at, ask) = match action {
                Peek => (now, Request::charge(Verb::Peek, [(&own, &stored[0])].into_iter())),
                PeekOfTooMuch => (now, Request::charge(Verb::Peek, [(&own.cost(99), &stored[0])].into_iter())),
                Look => (now, one(own.cost(0))),
                ForcedLook => (now, one(own.cost(0).effect(Effect::Force))),
                LookAfterClockSteppedBack => (earlier, one(own.cost(0))),
                ObservedDenial => (now, one(own.cost(2).effect(Effect::Observe))),
                TakeInRefusedSet => {
                    (now, Request::charge(Verb::Take, [(&own, &stored[0]), (&other(&full), &stored[1])].into_iter()))
                }
                LateRefund => (now, refund(3, 1)),
                RefundOfNoUnits => (now, refund(0, now.as_micros())),
                DeniedTake => (now, one(own.cost(2))),
                DeniedTakeAfterClockSteppedBack => (earlier, one(own.cost(2))),
                OnRefusalOfAllowed => (now, after(&free, 2)),
                OnRefusalOfRefused => (now, after(&full, 1)),
            };
            let answer = bench.ask(&[(at, &ask, general)]).remove(0);
            assert!(matches!(answer, Ok(Answer::Decided(_) | Answer::Done)), "{answer:?}");
            let left: i64 = redis::cmd("PTTL").arg(&*stored[0].bytes).query(&mut bench.connection).unwrap();
            let wrote = dump(&mut bench) != before || left < LATE_MS / 2;
            let expected = expected(&quota, action);
            if wrote != (expected != Write::Nothing) {
                wrong.push(format!("{action:?} of {quota}: {expected:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
