//! Counters with a bound, at the bound. `wire/mod.rs` lists them.

use std::time::Duration;

use super::{Bench, NO_WINDOW, NUMBER, RedisAnswer, WireOperation, WireRequest, call};
use crate::base::time::Timestamp;
use crate::decision::Receipt;
use crate::key::Key;
use crate::limiter::redis::keys::StoredKey;
use crate::limiter::remote::CHARGES_MAX;
use crate::limiter::{Charge, Refund};
use crate::policy::Policy;
use crate::quota::Quota;

const NOW: Timestamp = Timestamp::from_micros(1_790_000_000_000_000);

#[test]
fn requests_of_the_most_charges_are_decided() {
    let mut bench = Bench::start();
    for quota in [Quota::per_minute(5), Quota::sliding_log(5, Duration::from_secs(60)).unwrap()] {
        let key = Key::of("many").unwrap();
        let policies: Vec<Policy> = (0..CHARGES_MAX).map(|at| Policy::new(format!("p{at}"), quota).unwrap()).collect();
        let stored: Vec<StoredKey> = policies.iter().map(|policy| bench.space.key(policy, &key)).collect();
        let charges: Vec<Charge<'_>> = policies.iter().map(|policy| Charge::new(policy, &key)).collect();
        let request = WireRequest::charge(WireOperation::Take, charges.iter().zip(&stored));
        let answer = bench.ask(&[(NOW, &request)]).remove(0);
        let Ok(RedisAnswer::Decided(decision)) = answer else { panic!("{answer:?}") };
        assert!(decision.is_allowed() && decision.charges().len() == CHARGES_MAX);
        let _: () = redis::cmd("FLUSHALL").query(&mut bench.connection).unwrap();
    }
}

#[test]
fn runs_of_more_than_65535_requests_become_two() {
    let (policy, key) = (Policy::from(Quota::per_minute(5)), Key::of("x").unwrap());
    let stored = StoredKey { bytes: "x".into(), slot: 0 };
    let request = WireRequest::charge(WireOperation::Take, [(&Charge::new(&policy, &key), &stored)].into_iter());
    for (count, runs) in [(1, 1), (65_535, 1), (65_536, 2), (65_537, 2)] {
        let program = &call(&vec![&request; count], NUMBER, NO_WINDOW).args[0][8..];
        assert_eq!(program.len(), runs * request.run.len(), "{count} requests");
        let counts = program.chunks(request.run.len()).map(|run| usize::from(u16::from_le_bytes([run[1], run[2]])));
        assert_eq!(counts.sum::<usize>(), count);
    }
}

#[test]
fn refunds_above_2_to_the_53_are_cut_there() {
    let policy = Policy::new("p", Quota::fixed_window(5, Duration::from_secs(60)).unwrap()).unwrap();
    let stored = StoredKey { bytes: "x".into(), slot: 0 };
    let run = |units| {
        let receipt = Receipt::new(units, u64::MAX, 0);
        WireRequest::refund(&Refund::new(policy.clone(), Key::of("x").unwrap(), receipt), &stored).run
    };
    assert_eq!(run(u64::MAX), run(1 << 53));
    assert_ne!(run(1 << 53), run((1 << 53) - 1));
}

#[test]
fn forms_of_the_largest_quotas_are_understood() {
    const MOST: u64 = 999_999_999_999_999;
    let mut bench = Bench::start();
    let (year, second) = (Duration::from_secs(366 * 86_400), Duration::from_secs(1));
    let quotas = [year, second].into_iter().flat_map(|period| {
        [
            Quota::token_bucket(MOST, period).and_then(|quota| quota.burst(MOST)),
            Quota::token_bucket(MOST - 1, period).and_then(|quota| quota.burst(MOST)),
            Quota::leaky_queue(MOST, period),
            Quota::step_bucket(MOST, period).and_then(|quota| quota.burst(MOST)),
            Quota::fixed_window(MOST, period),
            Quota::sliding_window(MOST, period),
            Quota::sliding_window(MOST, period).and_then(|quota| quota.buckets(60)),
            Quota::meter(MOST, period),
        ]
    });
    let quotas: Vec<Quota> = quotas.filter_map(Result::ok).collect();
    assert!(quotas.len() >= 12, "too few quotas are possible: {}", quotas.len());
    for (number, quota) in quotas.into_iter().enumerate() {
        let quota = quota.max_debt(MOST).unwrap_or(quota);
        let (policy, key) = (Policy::new("p", quota).unwrap(), Key::of(number).unwrap());
        let stored = bench.space.key(&policy, &key);
        let request = WireRequest::charge(WireOperation::Take, [(&Charge::new(&policy, &key), &stored)].into_iter());
        let answer = bench.ask(&[(NOW, &request)]).remove(0);
        assert!(matches!(&answer, Ok(RedisAnswer::Decided(decision)) if decision.is_allowed()), "{quota}: {answer:?}");
    }
}
