//! The cost that a layer adds to a request: around a service that does nothing, and around an axum application.

use axum::Router;
use axum::routing::get;

use crate::contender::LayerSetup;
use crate::contenders;
use crate::race::{Plan, Raced, Run};
use crate::report::{Better, Case};
use crate::requests::{Bare, drive, drive_app};

const AGAINST: &str = "tower_governor";

pub fn run(plan: &Plan) -> Vec<Case> {
    // Some want a runtime to be made in.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let _in_runtime = runtime.enter();
    let mut cases = Vec::new();
    for (over, is_app) in [("a bare service", false), ("an axum router", true)] {
        for headers in [true, false] {
            for denied in [false, true] {
                for (keys, size) in [(1, "hot"), (10_000, "10k")] {
                    let setup = LayerSetup { keys: plan.scaled(keys), denied, headers };
                    let what = if denied { "refused" } else { "allowed" };
                    let fields = if headers { "with" } else { "without" };
                    let name = format!("{what}, {size}, {fields} header fields, around {over}");
                    if plan.is_wanted(&name) {
                        cases.push(case(plan, name, &setup, is_app));
                    }
                }
            }
        }
    }
    // The growth of the cost with the number of keys, in the form that users have.
    for (keys, size) in [(100_000, "100k"), (1_000_000, "1M"), (10_000_000, "10M")] {
        let setup = LayerSetup { keys: plan.scaled(keys), denied: false, headers: false };
        let name = format!("allowed, {size}, without header fields, around an axum router");
        if plan.is_wanted(&name) {
            cases.push(case(plan, name, &setup, true));
        }
    }
    cases
}

fn app() -> Router {
    Router::new().route("/", get(|| async {}))
}

fn case(plan: &Plan, name: String, setup: &LayerSetup, is_app: bool) -> Case {
    let mut names = vec!["no layer"];
    // Nothing refuses what goes to it.
    let plain = LayerSetup { denied: false, ..*setup };
    let mut runs: Vec<Run<'_>> =
        vec![if is_app { drive_app(app(), &plain) } else { drive::<axum::body::Body, _, _>(Bare, &plain) }];
    for contender in contenders::all() {
        let run =
            if is_app { contender.app(app(), setup).map(|app| drive_app(app, setup)) } else { contender.bare(setup) };
        if let Some(run) = run {
            names.push(contender.name());
            runs.push(run);
        }
    }
    // Every address is there, or, of very many, nineteen in twenty.
    let warm = (20 * setup.keys as u64).min(3 * 10_000_000);
    runs.iter_mut().for_each(|run| run(warm));
    let allocations: Vec<f64> = runs.iter_mut().map(allocations).collect();
    let Raced { times, spreads, noise } = plan.race(&mut runs);
    let added: Vec<f64> = times[1..].iter().map(|time| time - times[0]).collect();
    let mut case = Case::new(name, "ns added", Better::Lower, AGAINST, names[1..].to_vec(), &added);
    case.note("allocations added", allocations[1..].iter().map(|count| count - allocations[0]));
    case.steadiness(&spreads[1..], &noise);
    case.remark(format!("without a layer {:.0} ns and {:.0} allocations", times[0], allocations[0]));
    case.told()
}

/// Returns the allocations of one request, once warm.
fn allocations(run: &mut Run<'_>) -> f64 {
    run(1_000);
    (allocation_counter::measure(|| run(1_000)).count_total as f64 / 1_000.0).round()
}
