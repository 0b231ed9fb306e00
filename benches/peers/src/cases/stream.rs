//! Ten million fresh keys, one after the other, as an attacker with invented addresses sends them. The case measures
//! the time of the checks and the memory at the end. A bounded limiter has room for a million keys. The others sweep
//! nothing away, since nothing has expired.

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

use crate::contender::{Check, Setup};
use crate::contenders;
use crate::counting;
use crate::race::Plan;
use crate::report::{Better, Case};

const AGAINST: &str = "governor";

/// One that would take longer is stopped, and what it managed is told.
const PATIENCE: Duration = Duration::from_secs(60);

pub fn run(plan: &Plan) -> Vec<Case> {
    let (keys, bound) = (plan.scaled(10_000_000) as u32, plan.scaled(1_000_000));
    let setup = Setup { keys: bound, denied: true };
    let name = |kind| format!("ten million fresh keys, {kind}");
    let address = |number: u32| IpAddr::V4(Ipv4Addr::from(number));
    let text = |number: u32| format!("customer-{number:015}");
    let contenders = || contenders::all().into_iter();
    let mut cases = Vec::new();
    if plan.is_wanted(&name("address")) {
        cases.push(case(
            name("address"),
            contenders().map(|c| (c.name(), stream(|| c.by_address(&setup), address, keys))),
        ));
    }
    if plan.is_wanted(&name("text")) {
        cases.push(case(name("text"), contenders().map(|c| (c.name(), stream(|| c.by_text(&setup), text, keys)))));
    }
    cases
}

/// The result of one of them.
struct Streamed {
    times: Histogram<u64>,
    bytes: i64,
}

fn stream<K>(make: impl Fn() -> Option<Check<K>>, key: impl Fn(u32) -> K, keys: u32) -> Option<Streamed> {
    let mut times = Histogram::<u64>::new(3).expect("three digits are possible");
    let mut kept = None;
    let taken = counting::count(|| {
        kept = make();
        let Some(check) = &kept else { return };
        let started = Instant::now();
        for number in 0..keys {
            let key = [key(number)];
            let asked = Instant::now();
            check.pass(&key, &[0]);
            let answered = Instant::now();
            // It grows as it has to.
            times.record((answered - asked).as_nanos() as u64).expect("the time is told in 64 bits");
            if answered - started > PATIENCE {
                break;
            }
        }
    });
    kept.map(|_| Streamed { times, bytes: taken.bytes })
}

fn case(name: String, streamed: impl Iterator<Item = (&'static str, Option<Streamed>)>) -> Case {
    let (names, streamed): (Vec<_>, Vec<_>) = streamed.filter_map(|(name, one)| Some((name, one?))).unzip();
    let at = |quantile: f64| move |one: &Streamed| one.times.value_at_quantile(quantile) as f64;
    let medians: Vec<f64> = streamed.iter().map(at(0.5)).collect();
    let mut case = Case::new(name, "ns (median)", Better::Lower, AGAINST, names, &medians);
    case.note("p99", streamed.iter().map(at(0.99)));
    case.note("p99.99", streamed.iter().map(at(0.9999)));
    case.note("worst", streamed.iter().map(|one| one.times.max() as f64));
    case.note("MB at the end", streamed.iter().map(|one| (one.bytes as f64 / 1e6).round()));
    case.note("million keys", streamed.iter().map(|one| one.times.len() as f64 / 1e6));
    case.remark("reading the clock for each check is included".to_owned());
    case.told()
}
