//! Actions that take nothing write nothing, except those in a table: the limiter's snapshot stays
//! equal byte for byte.

#[path = "../support/idle.rs"]
mod table;

use tower_ratelimit::{
    Key, MemoryLimiter, Policy, Quota,
    clock::{ManualClock, Timestamp},
    limiter::{Charge, Effect, Receipt, Refund},
    quota::{Algorithm, Anchor, Oldest},
};

use crate::support::memory;
use table::Action::*;
use table::{ACTIONS, Write, counts_refusals, expected, kinds, plans};

#[test]
fn idle_action_leaves_a_state_of_any_quota_as_it_is() {
    let proportional = || plans(3).into_iter().filter_map(|plan| plan.in_proportion().ok());
    for from in plans(5) {
        for to in std::iter::once(from).chain(plans(3)).chain(proportional()) {
            let clock = ManualClock::new();
            let limiter = MemoryLimiter::builder().max_keys(1_000).clock(clock).build().unwrap();
            let key = Key::of("alice").unwrap();
            let [before, after] = [from, to].map(|quota| Policy::new("p", quota).unwrap());
            let other = Policy::new("other", Quota::per_minute(1_000)).unwrap();
            assert!(limiter.take_one(&before, &key, from.capacity().min(5)).is_allowed());
            assert!(limiter.take_one(&other, &key, 1).is_allowed());
            let kept = limiter.snapshot();
            let one = |cost, effect| [Charge::new(&after, &key).cost(cost).effect(effect)];
            let two = |cost| [Charge::new(&other, &key).cost(0), Charge::new(&after, &key).cost(cost)];
            let idle: [(&str, &dyn Fn()); 9] = [
                ("a peek", &|| drop(limiter.peek_one(&after, &key, 1))),
                ("a peek of a set", &|| drop(limiter.peek_now(&two(99)))),
                ("a look", &|| drop(limiter.take_one(&after, &key, 0))),
                ("a look in a set", &|| drop(limiter.take_now(&two(0)))),
                ("a denied take", &|| drop(limiter.take_one(&after, &key, 99))),
                ("a denied set", &|| {
                    drop(limiter.take_now(&[Charge::new(&other, &key), Charge::new(&after, &key).cost(99)]));
                }),
                ("an observed denial", &|| drop(limiter.take_now(&one(99, Effect::Observe)))),
                ("a forced look", &|| drop(limiter.take_now(&one(0, Effect::Force)))),
                ("a refund of nothing", &|| {
                    limiter.refund_now(&[Refund::new(after.clone(), key.clone(), Receipt::new(3, 1, 0))]);
                }),
            ];
            for (what, idle) in idle {
                idle();
                assert!(limiter.snapshot() == kept, "{what} of {to} wrote a state of {from}");
            }
        }
    }
}

/// An observed charge that is denied leaves its state as it is, also if another charge of its set
/// is taken.
#[test]
fn observed_denial_beside_a_take_leaves_its_state_as_it_is() {
    for from in plans(5) {
        for to in plans(3) {
            let limiter = MemoryLimiter::builder().max_keys(1_000).clock(ManualClock::new()).build().unwrap();
            let key = Key::of("alice").unwrap();
            let [before, after] = [from, to].map(|quota| Policy::new("p", quota).unwrap());
            let other = Policy::new("other", Quota::per_minute(1_000)).unwrap();
            assert!(limiter.take_one(&before, &key, from.capacity().min(5)).is_allowed());
            let left = limiter.peek_one(&before, &key, 0);
            let observed = Charge::new(&after, &key).cost(99).effect(Effect::Observe);
            assert!(limiter.take_now(&[Charge::new(&other, &key), observed]).is_allowed());
            assert_eq!(limiter.peek_one(&before, &key, 0), left, "{to} wrote a state of {from}");
        }
    }
}

#[test]
fn idle_action_writes_only_what_is_listed() {
    let now = Timestamp::from_micros(1_790_000_000_000_000);
    let earlier = Timestamp::from_micros(now.as_micros() - 1_000_000_000);
    let [full, free] = ["full", "free"].map(|name| Policy::new(name, Quota::per_minute(5)).unwrap());
    let key = Key::of("alice").unwrap();
    let mut wrong = Vec::new();
    for quota in kinds() {
        for action in ACTIONS {
            let (clock, policy) = (ManualClock::at(now), Policy::new("p", quota).unwrap());
            let limiter = memory(&clock);
            let [own, full, free] = [&policy, &full, &free].map(|policy| Charge::new(policy, &key));
            assert!(limiter.take_now(&[own.cost(quota.capacity() - 1), full.cost(5)]).is_allowed());
            // The free quota's state is reset after each set, so that only other writes show.
            let snapshot = || {
                limiter.reset_now(free.policy, &key);
                limiter.snapshot()
            };
            let (before, full_before) = (snapshot(), limiter.peek_now(&[full]));
            let take = |charges: &[Charge<'_>]| drop(limiter.take_now(charges));
            let peek = |charges: &[Charge<'_>]| drop(limiter.peek_now(charges));
            let refund = |units, at| {
                limiter.refund_now(&[Refund::new(policy.clone(), key.clone(), Receipt::new(units, at, 0))]);
            };
            let (observed, on_refusal) = (own.cost(2).effect(Effect::Observe), own.effect(Effect::OnRefusal { of: 1 }));
            match action {
                OnRefusalOfAllowed | OnRefusalOfObserved | OnRefusalOfRefused if !counts_refusals(&quota) => continue,
                Peek => peek(&[own]),
                PeekOfTooMuch => peek(&[own.cost(2)]),
                PeekOfSet => peek(&[free, own]),
                Look => take(&[own.cost(0)]),
                ForcedLook => take(&[own.cost(0).effect(Effect::Force)]),
                LookInTakenSet => take(&[free, own.cost(0)]),
                ObservedDenial => take(&[observed]),
                ObservedDenialInTakenSet => take(&[free, observed]),
                TakeInRefusedSet => take(&[own, full]),
                LateRefund => refund(3, 1),
                RefundOfNoUnits => refund(0, now.as_micros()),
                DeniedTake => take(&[own.cost(2)]),
                OnRefusalOfAllowed => take(&[free, on_refusal]),
                OnRefusalOfObserved => take(&[full.effect(Effect::Observe), on_refusal]),
                OnRefusalOfRefused => take(&[full, on_refusal]),
                LookAfterClockSteppedBack | DeniedTakeAfterClockSteppedBack => {
                    clock.set(earlier);
                    take(&[own.cost(if action == LookAfterClockSteppedBack { 0 } else { 2 })]);
                    clock.set(now);
                }
            }
            let expected = expected(&quota, action);
            if (snapshot() != before) != (expected != Write::Nothing) {
                wrong.push(format!("{action:?} of {quota}: {expected:?}"));
            }
            assert_eq!(
                limiter.peek_now(&[full]).charges(),
                full_before.charges(),
                "{action:?} of {quota} wrote another policy's state"
            );
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
