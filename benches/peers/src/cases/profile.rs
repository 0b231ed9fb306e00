//! The instructions of a check, and the cache lines that it misses: why one limiter takes longer than another. Valgrind
//! counts them, so the figures are the same on a busy machine.
//!
//! Its caches have fixed sizes, so a miss is one of a processor with 32 kB of first and 1 MB of last cache.

use std::process::Command;

use super::{Order, addresses, places, texts};
use crate::contender::{Check, Contender, Setup};
use crate::contenders;
use crate::race::Plan;
use crate::report::{Better, Case};

/// Checks keys in a process of its own: `CONTENDER KIND KEYS ANSWER COUNT`.
pub const CHILD: &str = "check";

const AGAINST: &str = "governor";
/// The contenders that are compared. A peer that is slower everywhere needs no explanation.
const CONTENDERS: [&str; 7] = [
    contenders::NAME,
    contenders::ALIKE,
    AGAINST,
    "governor with foldhash",
    "pingora-limits (estimates)",
    "ratelimit (no keys)",
    "leaky-bucket (no keys)",
];
/// With more keys the growth of a table, which differs from run to run, is more than the checks.
const CASES: [(&str, &str, usize, &str); 5] = [
    ("allowed, 10k addresses", "address", 10_000, "allowed"),
    ("allowed, one address", "address", 1, "allowed"),
    ("denied, 10k addresses", "address", 10_000, "denied"),
    ("denied, one address", "address", 1, "denied"),
    ("denied, one text", "text", 1, "denied"),
];
const CACHES: [&str; 4] = ["--cache-sim=yes", "--I1=32768,8,64", "--D1=32768,8,64", "--LL=1048576,16,64"];

/// The counts of one check.
#[derive(Clone, Copy, Default)]
struct Counts {
    instructions: f64,
    first_misses: f64,
    last_misses: f64,
}

pub fn run(plan: &Plan) -> Vec<Case> {
    let wanted = CASES.into_iter().filter(|(name, ..)| plan.is_wanted(name));
    wanted.map(|(name, kind, keys, answer)| case(plan, name, kind, plan.scaled(keys), answer)).collect()
}

fn case(plan: &Plan, name: &str, kind: &str, keys: usize, answer: &str) -> Case {
    let setup = Setup { keys, denied: answer == "denied" };
    let takes_part = |contender: &dyn Contender| {
        let takes_keys = match kind {
            "text" => contender.by_text(&setup).is_some(),
            _ => contender.by_address(&setup).is_some(),
        };
        takes_keys && CONTENDERS.contains(&contender.name())
    };
    let names = contenders::all().into_iter().filter(|contender| takes_part(contender.as_ref()));
    let names: Vec<&'static str> = names.map(|contender| contender.name()).collect();
    // Twice, so that what it takes to set up falls out.
    let more = if plan.is_smoke() { 100 } else { 200_000 };
    let count = |name: &&str| {
        let of = |checks: u64| counted(&[name, kind, &keys.to_string(), answer, &checks.to_string()]);
        let [few, many] = [more, 2 * more].map(of);
        let each = |of: fn(&Counts) -> f64| (of(&many) - of(&few)) / more as f64;
        Counts {
            instructions: each(|counts| counts.instructions),
            first_misses: each(|counts| counts.first_misses),
            last_misses: each(|counts| counts.last_misses),
        }
    };
    let counts: Vec<Counts> = names.iter().map(count).collect();
    let instructions: Vec<f64> = counts.iter().map(|counts| counts.instructions.round()).collect();
    let mut case = Case::new(name.to_owned(), "instructions", Better::Lower, AGAINST, names, &instructions);
    case.note("misses of the first cache", counts.iter().map(|counts| counts.first_misses));
    case.note("misses of the last cache", counts.iter().map(|counts| counts.last_misses));
    case.told()
}

/// Counts what a process of its own does in all.
fn counted(arguments: &[&str]) -> Counts {
    let program = std::env::current_exe().expect("this program has a file");
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=cachegrind", "--cachegrind-out-file=/dev/null"]).args(CACHES);
    let output = valgrind.arg(program).args(["--child", CHILD]).args(arguments).output();
    let output = output.expect("valgrind starts: install it, on Debian with apt-get install valgrind");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?} failed: {text}");
    // "==1== D1  misses:   1,234  ( 1,000 rd + 234 wr)": the first number.
    let number = |name: &str| {
        let line = text.lines().find(|line| line.split_whitespace().collect::<Vec<_>>().join(" ").contains(name));
        let line = line.unwrap_or_else(|| panic!("valgrind tells no {name}: {text}"));
        let number = line.split(':').nth(1).and_then(|rest| rest.split_whitespace().next()).unwrap_or_default();
        number.replace(',', "").parse::<f64>().unwrap_or_else(|_| panic!("{line} has no number"))
    };
    Counts { instructions: number("I refs"), first_misses: number("D1 misses"), last_misses: number("LLd misses") }
}

/// The process of its own.
pub fn child(arguments: &[String]) {
    let [name, kind, keys, answer, count] = arguments else { panic!("a contender, a kind, keys, an answer, a count") };
    let [keys, count] = [keys, count].map(|number| number.parse::<usize>().expect("a number"));
    let setup = Setup { keys, denied: answer == "denied" };
    let contender = contenders::named(name);
    match kind.as_str() {
        "text" => pass(&contender.by_text(&setup).expect("it takes texts"), &texts(keys), count),
        _ => pass(&contender.by_address(&setup).expect("it takes addresses"), &addresses(keys), count),
    }
}

/// Checks all keys, and then `count` of them in a random order.
fn pass<K>(check: &Check<K>, keys: &[K], count: usize) {
    let all: Vec<u32> = (0..keys.len() as u32).collect();
    check.pass(keys, &all);
    check.pass(keys, &all);
    let order = places(Order::Uniform, keys.len(), 1);
    let order: Vec<u32> = order.into_iter().cycle().take(count).collect();
    check.pass(keys, &order);
}
