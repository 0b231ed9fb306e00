//! One check in memory.

use crate::contender::{Check, Setup};
use crate::contenders;
use crate::race::{Plan, Raced, Run};
use crate::report::{Better, Case};

use super::{Order, addresses, places, texts};

/// The contender to beat.
const AGAINST: &str = "governor";

pub fn run(plan: &Plan) -> Vec<Case> {
    let mut cases = Vec::new();
    let sizes = [(1, "hot"), (10_000, "10k"), (1_000_000, "1M")];
    for threads in [1, 2] {
        for (order, how) in [(Order::Uniform, ""), (Order::Zipf, " Zipf")] {
            for (denied, what) in [(false, "allowed"), (true, "denied")] {
                // The few keys that are most often asked for tell what Zipf tells of denied ones.
                if order == Order::Zipf && (denied || threads == 2) {
                    continue;
                }
                for (keys, size) in sizes {
                    if order == Order::Zipf && keys == 1 {
                        continue;
                    }
                    let threads_told = if threads == 2 { ", two threads" } else { "" };
                    let setup = Setup { keys: plan.scaled(keys), denied };
                    let name = |kind: &str| format!("{what}, {size} {kind}{how}{threads_told}");
                    let by_address = || contenders::all().into_iter().map(|c| (c.name(), c.by_address(&setup)));
                    let by_text = || contenders::all().into_iter().map(|c| (c.name(), c.by_text(&setup)));
                    cases.extend(case(
                        plan,
                        name("address"),
                        &setup,
                        threads,
                        order,
                        &addresses(setup.keys),
                        by_address(),
                    ));
                    cases.extend(case(plan, name("text"), &setup, threads, order, &texts(setup.keys), by_text()));
                }
            }
        }
    }
    // The growth of the time with the number of keys, beside the hot key and the sizes above. Other peers would take
    // long to fill.
    for (keys, size) in [(100_000, "100k"), (10_000_000, "10M")] {
        let setup = Setup { keys: plan.scaled(keys), denied: false };
        let is_meant = |name: &str| name.starts_with(contenders::NAME) || name.starts_with(AGAINST);
        let meant = contenders::all().into_iter().filter(|contender| is_meant(contender.name()));
        let name = format!("allowed, {size} address");
        let keys = addresses(setup.keys);
        cases.extend(case(
            plan,
            name,
            &setup,
            1,
            Order::Uniform,
            &keys,
            meant.map(|contender| (contender.name(), contender.by_address(&setup))),
        ));
    }
    cases
}

fn case<K: Sync>(
    plan: &Plan,
    name: String,
    setup: &Setup,
    threads: u64,
    order: Order,
    keys: &[K],
    contenders: impl Iterator<Item = (&'static str, Option<Check<K>>)>,
) -> Option<Case> {
    if !plan.is_wanted(&name) {
        return None;
    }
    let orders: Vec<Vec<u32>> = (1..=threads).map(|thread| places(order, keys.len(), thread)).collect();
    let all: Vec<u32> = (0..keys.len() as u32).collect();
    let mut names = Vec::new();
    let mut runs: Vec<Run<'_>> = Vec::new();
    for (name, check) in contenders {
        let Some(check) = check else { continue };
        // Every key is there; and each limiter does what it was made for. One can only be told two in a burst.
        check.pass(keys, &all);
        check.pass(keys, &all);
        let passed = check.pass(keys, &all);
        let expected = if setup.denied { 0 } else { keys.len() };
        let is_estimate = name.contains("estimate");
        assert!(is_estimate || passed == expected, "{name} allowed {passed} of {}", keys.len());
        names.push(name);
        let orders = &orders;
        runs.push(Box::new(move |count| {
            let [own, others @ ..] = orders.as_slice() else { return };
            std::thread::scope(|scope| {
                others.iter().for_each(|order| {
                    scope.spawn(|| many(&check, keys, order, count));
                });
                many(&check, keys, own, count);
            });
        }));
    }
    let Raced { times, spreads, noise } = plan.race(&mut runs);
    let mut case = Case::new(name, "ns", Better::Lower, AGAINST, names, &times);
    case.steadiness(&spreads, &noise);
    Some(case.told())
}

/// So many checks, beginning anew when the order is at its end.
fn many<K>(check: &Check<K>, keys: &[K], order: &[u32], count: u64) {
    let mut left = count as usize;
    while left > 0 {
        let now = left.min(order.len());
        check.pass(keys, &order[..now]);
        left -= now;
    }
}
