//! A check and the memory in use, over the number of keys that are active.
//!
//! The capacity is the default one, a million keys, up to a million keys; for ten million it is ten million.

use std::process::Command;

use super::{Order, addresses, check};
use crate::contender::{Check, Setup};
use crate::contenders;
use crate::race::Plan;
use crate::report::{Better, Case};

/// Reads the memory in use of a process of its own: `NAME KEYS`.
pub const CHILD: &str = "resident";

const AGAINST: &str = "governor";
const SIZES: [(usize, &str); 6] =
    [(100, "100"), (1_000, "1k"), (10_000, "10k"), (100_000, "100k"), (1_000_000, "1M"), (10_000_000, "10M")];

pub fn run(plan: &Plan) -> Vec<Case> {
    SIZES.iter().filter_map(|(keys, size)| case(plan, format!("{size} addresses"), plan.scaled(*keys))).collect()
}

fn case(plan: &Plan, name: String, count: usize) -> Option<Case> {
    if !plan.is_wanted(&name) {
        return None;
    }
    let (keys, setup) = (addresses(count), Setup { keys: count, denied: false });
    let wanted = [contenders::NAME, AGAINST];
    let made = contenders::all().into_iter().filter(|contender| wanted.contains(&contender.name()));
    let made = made.filter_map(|contender| Some((contender.name(), contender.by_address(&setup)?)));
    let (names, checks): (Vec<_>, Vec<_>) = made.unzip();
    names.iter().zip(&checks).for_each(|(name, check)| check::fill(name, check, &keys, false));
    let raced = check::race(plan, &checks, &keys, Order::Uniform, 1);
    let resident: Vec<f64> = names.iter().map(|name| resident_of(name, count)).collect();
    let mut case = Case::new(name, "ns", Better::Lower, AGAINST, names, &raced.medians());
    case.note("resident kB", resident.into_iter());
    case.steadiness(&raced);
    Some(case.told())
}

/// Returns the kilobytes that become resident in a fresh process when it makes a limiter and checks all keys.
fn resident_of(name: &str, keys: usize) -> f64 {
    let program = std::env::current_exe().expect("this program has a file");
    let told = Command::new(program).args(["--child", CHILD, name, &keys.to_string()]).output().expect("it starts");
    String::from_utf8_lossy(&told.stdout).trim().parse().expect("it prints a number")
}

/// The process of its own.
pub fn child(arguments: &[String]) {
    let [name, keys] = arguments else { panic!("a name and a number") };
    let keys = addresses(keys.parse().expect("a number"));
    let order = super::places(Order::Uniform, keys.len(), 1);
    let all: Vec<u32> = (0..keys.len() as u32).collect();
    let contender = contenders::named(name);
    let before = resident();
    let check: Option<Check<_>> = contender.by_address(&Setup { keys: keys.len(), denied: false });
    let check = check.expect("it takes addresses");
    check.pass(&keys, &all);
    check.pass(&keys, &order);
    println!("{}", resident() - before);
}

/// Returns the kilobytes of this process that are resident.
fn resident() -> i64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux tells it");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("it is told");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}
