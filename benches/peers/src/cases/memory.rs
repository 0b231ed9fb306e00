//! The memory that a tracked key takes.

use super::{addresses, texts};
use crate::contender::{Check, Setup};
use crate::contenders;
use crate::counting;
use crate::race::Plan;
use crate::report::{Better, Case};

const AGAINST: &str = "governor";

pub fn run(plan: &Plan) -> Vec<Case> {
    let setup = Setup { keys: plan.scaled(1_000_000), denied: true };
    let mut cases = Vec::new();
    let (addresses, texts) = (addresses(setup.keys), texts(setup.keys));
    let name = |kind| format!("bytes for each of 1M keys, {kind}");
    let contenders = || contenders::all().into_iter();
    if plan.is_wanted(&name("address")) {
        cases.push(case(
            name("address"),
            &addresses,
            contenders().map(|c| (c.name(), bytes(|| c.by_address(&setup), &addresses))),
        ));
    }
    if plan.is_wanted(&name("text")) {
        cases.push(case(name("text"), &texts, contenders().map(|c| (c.name(), bytes(|| c.by_text(&setup), &texts)))));
    }
    cases
}

fn case<K>(name: String, keys: &[K], taken: impl Iterator<Item = (&'static str, Option<i64>)>) -> Case {
    let taken = taken.filter_map(|(name, bytes)| Some((name, bytes? as f64 / keys.len() as f64)));
    let (names, bytes): (Vec<_>, Vec<_>) = taken.unzip();
    Case::new(name, "bytes", Better::Lower, AGAINST, names, &bytes).told()
}

/// Returns the memory of the limiter and all its keys.
fn bytes<K>(make: impl Fn() -> Option<Check<K>>, keys: &[K]) -> Option<i64> {
    let all: Vec<u32> = (0..keys.len() as u32).collect();
    let mut kept = None;
    let taken = counting::count(|| {
        kept = make();
        if let Some(check) = &kept {
            check.pass(keys, &all);
        }
    });
    kept.map(|_| taken.bytes)
}
