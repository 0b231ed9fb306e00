//! The time that a layer adds to a request: in an axum router as `axum::serve` runs it, and around a service that does
//! nothing.

use axum::Router;
use axum::routing::get;
use tower::layer::util::Identity;

use crate::contender::{Contender, LayerSetup};
use crate::contenders;
use crate::counting;
use crate::race::{Plan, Run};
use crate::report::{Better, Case};
use crate::requests::{Bare, drive, drive_app};

const AGAINST: &str = "tower_governor";

/// The setups of a layer that are measured, in the order in which tables show them.
const SETUPS: [(&str, bool, bool); 4] = [
    ("allowed, no headers", false, false),
    ("allowed, headers", false, true),
    ("refused, headers", true, true),
    ("refused, no headers", true, false),
];

/// In an axum router: the case that users have first.
pub fn router(plan: &Plan) -> Vec<Case> {
    let mut cases = Vec::new();
    for (keys, size) in [(10_000, "10k addresses"), (1, "one address"), (1_000_000, "1M addresses")] {
        // The other sizes show the wait for memory, which all setups have alike.
        let setups = if keys == 10_000 { &SETUPS[..] } else { &SETUPS[..2] };
        let app = |contender: &dyn Contender, setup: &LayerSetup| Some(drive_app(contender.app(app(), setup)?, setup));
        let without = |plain: &LayerSetup| {
            vec![drive_app(self::app(), plain), drive_app(self::app().layer(Identity::new()), plain)]
        };
        cases.extend(setups.iter().filter_map(|setup| case(plan, size, keys, *setup, &without, &app)));
    }
    cases
}

/// Around a service that does nothing.
pub fn bare(plan: &Plan) -> Vec<Case> {
    let none = |plain: &LayerSetup| vec![drive::<axum::body::Body, _, _>(Bare, plain)];
    let bare = |contender: &dyn Contender, setup: &LayerSetup| contender.bare(setup);
    SETUPS.iter().filter_map(|setup| case(plan, "10k addresses", 10_000, *setup, &none, &bare)).collect()
}

fn app() -> Router {
    Router::new().route("/", get(|| async { "hello" }))
}

/// `without` has the service without a layer, and, if that costs something, in a layer that does nothing.
fn case(
    plan: &Plan,
    size: &str,
    keys: usize,
    (what, denied, headers): (&str, bool, bool),
    without: &dyn Fn(&LayerSetup) -> Vec<Run<'static>>,
    with: &dyn Fn(&dyn Contender, &LayerSetup) -> Option<Run<'static>>,
) -> Option<Case> {
    let name = format!("{what}, {size}");
    if !plan.is_wanted(&name) {
        return None;
    }
    // Some contenders can only be made in a runtime.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let _in_runtime = runtime.enter();
    let setup = LayerSetup { keys: plan.scaled(keys), denied, headers };
    let mut names = Vec::new();
    // Nothing refuses requests that no layer limits.
    let mut runs = without(&LayerSetup { denied: false, ..setup });
    let first = runs.len();
    for contender in contenders::all() {
        if let Some(run) = with(contender.as_ref(), &setup) {
            names.push(contender.name());
            runs.push(run);
        }
    }
    // Every address is there.
    for run in &mut runs {
        run(2 * setup.keys as u64);
    }
    let allocations: Vec<f64> = runs.iter_mut().map(allocations).collect();
    let raced = plan.race(&mut runs);
    let alone = raced.medians()[0];
    let added = raced.beyond_first();
    let floor = added.medians()[..first - 1].first().copied();
    let added = added.from(first - 1);
    let mut case = Case::new(name, "ns added", Better::Lower, AGAINST, names, &added.medians());
    case.note("allocations added", allocations[first..].iter().map(|count| count - allocations[0]));
    case.steadiness(&added);
    case.remark(format!("without a layer {alone:.0} ns and {:.0} allocations", allocations[0]));
    if let Some(floor) = floor {
        let count = allocations[1] - allocations[0];
        case.remark(format!("a layer that does nothing adds {floor:.0} ns and {count:.0} allocations"));
    }
    Some(case.told())
}

/// Returns the allocations of one request, once warm. Those for making the request are among them.
fn allocations(run: &mut Run<'_>) -> f64 {
    run(1_000);
    let measured = counting::count(|| {
        run(1_000);
    });
    (measured.count as f64 / 1_000.0).round()
}
