//! One check in memory.

use std::time::Instant;

use crate::contender::{Check, Contender, Setup};
use crate::contenders;
use crate::race::{Plan, Raced, Run};
use crate::report::{Better, Case};

use super::{Order, addresses, places, texts};

/// The contender to beat.
const AGAINST: &str = "governor";

const SIZES: [(usize, &str); 3] = [(10_000, "10k"), (1_000_000, "1M"), (1, "one")];

/// The checks of one case: their answer, threads and order of keys.
#[derive(Clone, Copy)]
struct Asked {
    what: &'static str,
    denied: bool,
    threads: u64,
    order: Order,
}

const ASKED: [Asked; 4] = [
    Asked { what: "allowed", denied: false, threads: 1, order: Order::Uniform },
    Asked { what: "denied", denied: true, threads: 1, order: Order::Uniform },
    Asked { what: "allowed, two threads", denied: false, threads: 2, order: Order::Uniform },
    Asked { what: "allowed, Zipf", denied: false, threads: 1, order: Order::Zipf },
];

pub fn run(plan: &Plan) -> Vec<Case> {
    let mut cases = Vec::new();
    for asked in ASKED {
        for (keys, size) in SIZES {
            if asked.order == Order::Zipf && keys != 1_000_000 {
                continue;
            }
            let setup = Setup { keys: plan.scaled(keys), denied: asked.denied };
            let name = |kind: &str| format!("{}, {size} {kind}", asked.what);
            let (address, text) =
                if keys == 1 { (name("address"), name("text")) } else { (name("addresses"), name("texts")) };
            if plan.is_wanted(&address) {
                let keys = addresses(setup.keys);
                cases.push(case(plan, address, asked, &keys, |contender| contender.by_address(&setup)));
            }
            if plan.is_wanted(&text) {
                let keys = texts(setup.keys);
                cases.push(case(plan, text, asked, &keys, |contender| contender.by_text(&setup)));
            }
        }
    }
    cases
}

fn case<K: Sync>(
    plan: &Plan,
    name: String,
    asked: Asked,
    keys: &[K],
    make: impl Fn(&dyn Contender) -> Option<Check<K>>,
) -> Case {
    let made =
        contenders::all().into_iter().filter_map(|contender| Some((contender.name(), make(contender.as_ref())?)));
    let (names, checks): (Vec<_>, Vec<_>) = made.unzip();
    names.iter().zip(&checks).for_each(|(name, check)| fill(name, check, keys, asked.denied));
    let raced = race(plan, &checks, keys, asked.order, asked.threads);
    let mut case = Case::new(name, "ns", Better::Lower, AGAINST, names, &raced.medians());
    case.steadiness(&raced);
    case.told()
}

/// Makes sure that a limiter has every key, and that it allows or denies as its setup says.
pub fn fill<K>(name: &str, check: &Check<K>, keys: &[K], denied: bool) {
    let all: Vec<u32> = (0..keys.len() as u32).collect();
    // One contender has a burst of at least two.
    check.pass(keys, &all);
    check.pass(keys, &all);
    let passed = check.pass(keys, &all);
    let expected = if denied { 0 } else { keys.len() };
    let is_estimate = name.contains("estimate");
    assert!(is_estimate || passed == expected, "{name} allowed {passed} of {}", keys.len());
}

/// Races limiters that have all these keys.
pub fn race<K: Sync>(plan: &Plan, checks: &[Check<K>], keys: &[K], order: Order, threads: u64) -> Raced {
    let orders: Vec<Vec<u32>> = (1..=threads).map(|thread| places(order, keys.len(), thread)).collect();
    let run = |check| -> Run<'_> {
        let orders = &orders;
        let mut done = 0;
        Box::new(move |count| {
            let started = Instant::now();
            let [own, others @ ..] = orders.as_slice() else { return started.elapsed() };
            std::thread::scope(|scope| {
                others.iter().for_each(|order| {
                    scope.spawn(|| many(check, keys, order, done, count));
                });
                many(check, keys, own, done, count);
            });
            done += count;
            started.elapsed()
        })
    };
    plan.race(&mut checks.iter().map(run).collect::<Vec<_>>())
}

/// Does `count` checks after the `done` ones of the rounds before, and begins anew when the order is at its end. If each
/// round began there, a round of a million keys would meet the same part of them.
fn many<K>(check: &Check<K>, keys: &[K], order: &[u32], done: u64, count: u64) {
    let (mut at, mut left) = (done as usize % order.len(), count as usize);
    while left > 0 {
        let next = &order[at..];
        let next = &next[..left.min(next.len())];
        check.pass(keys, next);
        left -= next.len();
        at = (at + next.len()) % order.len();
    }
}
