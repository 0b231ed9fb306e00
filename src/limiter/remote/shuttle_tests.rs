//! Random schedules of threads that share leases and remembered denials beside a store.
//! `tests/campaigns.sh` has the command that runs them.

use std::sync::Arc;
use std::time::Duration;

use shuttle::thread;

use super::denial_cache::DenialCache;
use super::leases::{HELD, Leases};
use super::tag::Tags;
use crate::base::sampling::explore;
use crate::base::sync::{Mutex, lock};
use crate::base::wait::Wait;
use crate::clock::ManualClock;
use crate::decision::{ChargeDecision, Receipt};
use crate::key::Key;
use crate::limiter::Charge;
use crate::policy::Policy;
use crate::quota::Quota;

fn policy() -> Policy {
    Policy::new("test", Quota::per_minute(1_000)).expect("it is a name")
}

/// A call that was sent before a refund may be answered after it. Its denial is not repeated then, even if another key
/// of the same slot is refunded, too.
#[test]
fn denial_of_before_a_refund_is_not_repeated_after_it() {
    explore(1_000, || {
        let (clock, key) = (ManualClock::new(), Key::global());
        let denials = Arc::new(DenialCache::new(1, Tags::default(), Arc::new(clock.clone())));
        let denies = || {
            let (denials, clock, key) = (Arc::clone(&denials), clock.clone(), key.clone());
            thread::spawn(move || {
                let (policy, sent) = (policy(), denials.now());
                let watch = denials.watch(&Charge::new(&policy, &key)).expect("its denials are remembered");
                thread::yield_now();
                clock.advance(Duration::from_millis(1));
                denials.note(watch, sent, &ChargeDecision::denied(10, 0, Wait::After(Duration::from_secs(9))));
            })
        };
        let asks = || {
            let (denials, key) = (Arc::clone(&denials), key.clone());
            thread::spawn(move || {
                let policy = policy();
                let refusal = denials.refusal(&[Charge::new(&policy, &key)]);
                assert!(refusal.is_none_or(|refusal| !refusal.is_allowed()));
            })
        };
        let refunds = |key: Key| {
            let denials = Arc::clone(&denials);
            thread::spawn(move || denials.forget(&policy(), &key))
        };
        let other = Key::of("other").expect("it is a key");
        let threads = [denies(), asks(), denies(), refunds(other), asks(), refunds(key.clone())];
        threads.into_iter().for_each(|thread| thread.join().expect("the thread ends"));
        assert!(denials.refusal(&[Charge::new(&policy(), &key)]).is_none(), "something was refunded");
    });
}

/// Units are handed out, refunded, or in the store: none is lost, and none is there twice.
#[test]
fn leased_units_are_used_once_or_refunded() {
    const UNITS: u64 = 400;
    explore(1_000, || {
        let (clock, tags, key) = (ManualClock::new(), Tags::default(), Key::global());
        let leases = Arc::new(Leases::new(30, tags.clone(), Arc::new(clock.clone())));
        let store = Arc::new(Mutex::new(UNITS));
        let back = |store: &Mutex<u64>, units: u64| *lock(store) += units;
        let takes = (0..3).map(|_| {
            let (leases, store, key, tags) = (Arc::clone(&leases), Arc::clone(&store), key.clone(), tags.clone());
            thread::spawn(move || {
                let (policy, mut used) = (policy(), 0);
                for _ in 0..6 {
                    let charge = Charge::new(&policy, &key).cost(4);
                    let (granted, wanted) = leases.take(&charge);
                    if granted.is_none() {
                        let mut left = lock(&store);
                        *left -= 4;
                        let told = ChargeDecision::allowed(UNITS, *left);
                        drop(left);
                        leases.record_remaining(tags.charge(&charge), &told);
                    }
                    used += 4;
                    let Some(wanted) = wanted else { continue };
                    *lock(&store) -= wanted.units;
                    thread::yield_now();
                    let answer = ChargeDecision::allowed(UNITS, 300).with_receipt(Receipt::new(wanted.units, 1, 0));
                    let refund = leases.record_answer(&wanted, Some(answer));
                    back(&store, refund.map_or(0, |refund| refund.receipt.units()));
                }
                used
            })
        });
        let ends = {
            let (leases, store, clock) = (Arc::clone(&leases), Arc::clone(&store), clock.clone());
            thread::spawn(move || {
                for _ in 0..2 {
                    clock.advance(HELD);
                    let over = leases.end_expired();
                    back(&store, over.iter().map(|refund| refund.receipt.units()).sum());
                }
            })
        };
        let takes: Vec<_> = takes.collect();
        let used: u64 = takes.into_iter().map(|thread| thread.join().expect("the thread ends")).sum();
        ends.join().expect("the thread ends");
        clock.advance(HELD);
        back(&store, leases.end_expired().iter().map(|refund| refund.receipt.units()).sum());
        assert_eq!((*lock(&store) + used, leases.held()), (UNITS, 0));
    });
}
