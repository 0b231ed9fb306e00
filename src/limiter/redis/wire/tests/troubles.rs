//! Values that are not as they should be.

use std::time::Duration;

use super::{
    Answered, Bench, CallTime, NO_WINDOW, NUMBER, RedisAnswer, WireOperation, WireRequest, answers, call, decoded,
    refused, script,
};
use crate::base::time::Timestamp;
use crate::event::StoreErrorKind;
use crate::key::Key;
use crate::limiter::Charge;
use crate::limiter::redis::keys::StoredKey;
use crate::policy::Policy;
use crate::quota::Quota;

const MINUTE: Duration = Duration::from_secs(60);
const DAY: Duration = Duration::from_secs(86_400);

const NOW: Timestamp = Timestamp::from_micros(1_790_000_000_123_456);

fn quotas() -> [Quota; 7] {
    [
        Quota::per_minute(5),
        // The key of a quota per second would end while the test runs. Steps and windows end with the minute or the day,
        // and a day seldom ends meanwhile.
        Quota::per_hour(7),
        Quota::step_bucket(5, DAY).unwrap(),
        Quota::fixed_window(5, DAY).unwrap(),
        Quota::sliding_window(5, MINUTE).unwrap(),
        Quota::sliding_log(5, MINUTE).unwrap(),
        Quota::sliding_window(1 << 40, MINUTE).and_then(|quota| quota.buckets(6)).unwrap(),
    ]
}

fn one(bench: &Bench, policy: &Policy, name: &str) -> (WireRequest, StoredKey) {
    let key = Key::of(name).unwrap();
    let stored = bench.space.key(policy, &key);
    (WireRequest::charge(WireOperation::Take, std::iter::once((&Charge::new(policy, &key), &stored))), stored)
}

/// At the server's own time, as a limiter does.
fn take(bench: &mut Bench, requests: &[&WireRequest]) -> Vec<Answered> {
    let reply = bench.run(&[call(requests, NUMBER, NO_WINDOW)]).remove(0);
    decoded(requests, &reply)
}

fn is_taken(answer: &Answered, remaining: u64) -> bool {
    matches!(answer, Ok(RedisAnswer::Decided(decision)) if decision.is_allowed() && decision.charges()[0].remaining() == remaining)
}

#[test]
fn a_foreign_value_fails_its_own_request_and_stays_as_it_was() {
    let mut bench = Bench::start();
    for quota in quotas() {
        let policy = Policy::new("p", quota).unwrap();
        let left = quota.capacity() - 1;
        let later_version = [&[0xb1_u8][..], b"\x05\x05\x05"].concat();
        let values: [&[&[u8]]; 7] = [
            &[b"SET", b"hello"],
            &[b"SET", b"17"],
            &[b"SET", b""],
            &[b"SET", &later_version],
            &[b"HSET", b"a", b"b"],
            &[b"RPUSH", b"a", b"b"],
            &[b"ZADD", b"1", b"b"],
        ];
        for (number, value) in values.iter().enumerate() {
            let (bad, stored) = one(&bench, &policy, &format!("bad{number}"));
            let mut command = redis::cmd(std::str::from_utf8(value[0]).unwrap());
            command.arg(&*stored.bytes);
            value[1..].iter().for_each(|part| {
                command.arg(part);
            });
            let _: redis::Value = command.query(&mut bench.connection).unwrap();
            let dump = |bench: &mut Bench| -> Vec<u8> {
                redis::cmd("DUMP").arg(&*stored.bytes).query(&mut bench.connection).unwrap()
            };
            let before = dump(&mut bench);
            let names = ["before", "after"].map(|name| format!("{name}{number}"));
            let [(first, _), (last, _)] = names.map(|name| one(&bench, &policy, &name));
            let alone = take(&mut bench, &[&bad]);
            assert!(matches!(&alone[..], [Err(error)] if error.kind() == StoreErrorKind::Foreign), "{alone:?}");
            let among = take(&mut bench, &[&first, &bad, &last]);
            let [first, failed, last] = &among[..] else { panic!("{among:?}") };
            let Err(error) = failed else { panic!("{failed:?}") };
            assert_eq!(error.kind(), StoreErrorKind::Foreign);
            let text = error.to_string();
            let shown = format!("`{}`", stored.bytes.escape_ascii());
            assert!(text.contains(&shown) && text.contains("\"p\"") && !text.contains("bad"), "{text}");
            assert!(is_taken(first, left) && is_taken(last, left), "{quota}: {among:?}");
            assert_eq!(dump(&mut bench), before);
            let _: () = redis::cmd("FLUSHALL").query(&mut bench.connection).unwrap();
        }
    }
}

#[test]
fn wide_sets_and_rules_of_many_quotas_are_decided() {
    let mut bench = Bench::start();
    for count in [2, 9, 300] {
        for quota in &quotas()[1..5] {
            let policies: Vec<Policy> = (0..count).map(|at| Policy::new(format!("p{at}"), *quota).unwrap()).collect();
            let more: Vec<Quota> = (0..count).map(|more| Quota::sliding_window(5 + more, MINUTE).unwrap()).collect();
            for policies in [policies, Policy::each("client", more).unwrap()] {
                let key = Key::of("wide").unwrap();
                let stored: Vec<StoredKey> = policies.iter().map(|policy| bench.space.key(policy, &key)).collect();
                let charges: Vec<Charge<'_>> = policies.iter().map(|policy| Charge::new(policy, &key)).collect();
                let ask = WireRequest::charge(WireOperation::Take, charges.iter().zip(&stored));
                let answers = take(&mut bench, &[&ask]);
                let [Ok(RedisAnswer::Decided(decision))] = &answers[..] else { panic!("{answers:?}") };
                assert!(decision.is_allowed() && decision.charges().len() == policies.len(), "{decision:?}");
                for (policy, charge) in policies.iter().zip(decision.charges()) {
                    assert_eq!(charge.remaining(), policy.quota().capacity() - 1);
                }
                let _: () = redis::cmd("FLUSHALL").query(&mut bench.connection).unwrap();
            }
        }
    }
}

#[test]
fn a_garbled_value_of_ours_is_overwritten() {
    let mut bench = Bench::start();
    for quota in quotas() {
        let policy = Policy::new("p", quota).unwrap();
        let (ask, stored) = one(&bench, &policy, "x");
        assert!(is_taken(&take(&mut bench, &[&ask])[0], quota.capacity() - 1));
        let is_list = matches!(quota.decider(), crate::algorithm::Decider::EntryLog(_));
        let get: Vec<u8> = match is_list {
            true => redis::cmd("LINDEX").arg(&*stored.bytes).arg(0).query(&mut bench.connection).unwrap(),
            false => redis::cmd("GET").arg(&*stored.bytes).query(&mut bench.connection).unwrap(),
        };
        let mut garbled: Vec<Vec<u8>> =
            vec![get[..1].to_vec(), get[..get.len() - 1].to_vec(), [&get[..], b"x"].concat()];
        for state in [f64::NAN, f64::INFINITY, -1.0, 1e300, 0.5] {
            let from = if is_list {
                get.len()
            } else {
                get.iter().rposition(|_| true).map_or(0, |end| end + 1 - state_size(&quota))
            };
            let mut value = get[..from].to_vec();
            while value.len() < from + state_size(&quota) {
                value.extend(state.to_le_bytes());
            }
            garbled.push(value);
        }
        for value in garbled {
            let _: () = redis::cmd("DEL").arg(&*stored.bytes).query(&mut bench.connection).unwrap();
            if is_list {
                let (head, entry) = value.split_at(value.len().min(get.len()));
                let _: () =
                    redis::cmd("RPUSH").arg(&*stored.bytes).arg(head).arg(entry).query(&mut bench.connection).unwrap();
            } else {
                let _: () = redis::cmd("SET").arg(&*stored.bytes).arg(&value).query(&mut bench.connection).unwrap();
            }
            // A state far ahead reads as a clock that stepped back.
            let first = take(&mut bench, &[&ask]);
            assert!(matches!(&first[..], [Ok(RedisAnswer::Decided(_))]), "{quota} {value:?}: {first:?}");
            let second = take(&mut bench, &[&ask]);
            assert!(matches!(&second[..], [Ok(RedisAnswer::Decided(_))]), "{quota} {value:?}: {second:?}");
            assert_eq!(bench.check_ttls(), 1);
        }
        let _: () = redis::cmd("FLUSHALL").query(&mut bench.connection).unwrap();
    }
}

fn state_size(quota: &Quota) -> usize {
    match crate::limiter::redis::wire::encode::StateKind::of(quota) {
        crate::limiter::redis::wire::encode::StateKind::Whole => 8,
        crate::limiter::redis::wire::encode::StateKind::Wide => 24,
        _ => 16,
    }
}

#[test]
fn replies_that_make_no_sense_are_errors() {
    let bench = Bench::start();
    let policy = Policy::from(Quota::per_minute(5));
    let (ask, _) = one(&bench, &policy, "x");
    let head = [NUMBER.to_le_bytes(), 1e15_f64.to_le_bytes()].concat();
    let good = [&head[..], &[1], &1e15_f64.to_le_bytes()].concat();
    assert!(answers(&[&ask], NUMBER, &good, &refused).is_ok());
    assert!(answers(&[&ask], NUMBER + 1, &good, &refused).is_err(), "the reply to another call");
    let lengths = (0..good.len()).map(|length| good[..length].to_vec()).chain([[&good[..], b"x"].concat()]);
    let failed = [&head[..], &[4, 255, 255, b'x']].concat();
    for bytes in lengths.chain([failed, [&head[..], &[6][..]].concat(), [&head[..], &[5][..]].concat()]) {
        assert!(answers(&[&ask], NUMBER, &bytes, &refused).is_err(), "{bytes:?}");
    }
}

/// Found by the fuzzer: the limit was 5, and 9,007,199,254,740,992 units remained.
#[test]
fn decision_that_a_server_tells_stays_within_its_quota() {
    let bench = Bench::start();
    let policy = Policy::from(Quota::sliding_log(5, MINUTE).unwrap());
    let (ask, _) = one(&bench, &policy, "x");
    let head = [NUMBER.to_le_bytes(), 1e15_f64.to_le_bytes()].concat();
    let told = [f64::INFINITY, 1e18, 1e18, 0.0, 1e18, 1e15].map(f64::to_le_bytes).concat();
    let answer = decoded(&[&ask], &[&head[..], &[2, 1], &told].concat()).remove(0);
    let Ok(RedisAnswer::Decided(mut decision)) = answer else { panic!("{answer:?}") };
    assert_eq!(decision.charges()[0].remaining(), 5);
    assert_eq!(decision.charge_mut(0).unwrap().receipt().units(), 1, "as many as were asked for");
}

#[test]
fn scripts_know_the_latest_instant_of_the_clock() {
    assert!(script::requests().text.contains(&crate::base::time::CLOCK_US_MAX.to_string()));
}

/// Checks of one key that are alike share a run behind the reset.
#[test]
fn a_reset_fails_no_check_that_comes_behind_it_in_its_call() {
    let mut bench = Bench::start_beside_simulation();
    for quota in quotas().into_iter().chain([Quota::concurrent(5)]) {
        let policy = Policy::new("p", quota).unwrap();
        for checks in [1, 2, 3, 4, 255, 256, 300] {
            let (take, stored) = one(&bench, &policy, &checks.to_string());
            let reset = WireRequest::reset(&policy, &stored);
            let mut requests = vec![&reset];
            requests.resize(1 + checks, &take);
            let reply = bench.run(&[call(&requests, NUMBER, CallTime::Given(NOW))]).remove(0);
            let answers = decoded(&requests, &reply);
            assert!(matches!(answers[0], Ok(RedisAnswer::Done)), "{quota}, {checks} checks: {:?}", answers[0]);
            assert!(is_taken(&answers[1], quota.capacity() - 1), "{quota}, {checks} checks: {:?}", answers[1]);
        }
    }
}
