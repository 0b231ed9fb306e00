//! Files of the library use each other downward only. No two files use each other, directly or
//! through other files, and no file uses a file of a higher layer.
//!
//! `IMPORTS=FILE cargo test --test project imports` writes the picture into a file.

mod graph;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

use graph::Graph;

/// A layer's name, and the beginnings of the paths of its files. The longest beginning decides.
type Layer = (&'static str, &'static [&'static str]);

/// The layers, the highest first.
const LAYERS: &[Layer] = &[
    ("the crate's root, the guide, and the suite for limiters", &["lib.rs", "observe.rs", "guide/", "conformance/"]),
    ("the status page", &["status/"]),
    ("rules in a file", &["rules/"]),
    ("the operators' settings for all processes", &["fleet/"]),
    ("clients", &["client/"]),
    (
        "middleware: the layer",
        &[
            "middleware/mod.rs",
            "middleware/layer.rs",
            "middleware/admit.rs",
            "middleware/messages.rs",
            "middleware/explain.rs",
        ],
    ),
    ("middleware: the way of a request", &["middleware/service.rs", "middleware/future.rs", "middleware/follow.rs"]),
    ("middleware: the steps of that way", &["middleware/"]),
    ("middleware: what a request holds", &["middleware/ticket.rs"]),
    ("middleware: the compiled configuration", &["middleware/compiled.rs"]),
    (
        "middleware: data, and what is compiled from it",
        &[
            "middleware/body.rs",
            "middleware/charge/access.rs",
            "middleware/decide/delay/delays.rs",
            "middleware/decide/delay/mod.rs",
            "middleware/diagnostics.rs",
            "middleware/discard.rs",
            "middleware/latest.rs",
            "middleware/pace/account.rs",
            "middleware/pace/accounts.rs",
            "middleware/pace/mod.rs",
            "middleware/plan.rs",
            "middleware/rule/",
            "middleware/settings.rs",
            "middleware/source.rs",
            "middleware/settle/nested.rs",
            "middleware/settle/usage.rs",
            "middleware/unsettled.rs",
        ],
    ),
    ("refusals", &["refusal/"]),
    ("headers", &["headers/"]),
    ("limiters: in memory, on Redis, over a store", &["limiter/memory/", "limiter/redis/", "limiter/store/"]),
    ("limiters: what those with a remote store share", &["limiter/remote/"]),
    ("limiters: the trait, and what all share", &["limiter/"]),
    (
        "what limiters and the middleware speak of",
        &[
            "clock",
            "event.rs",
            "explanation.rs",
            "key",
            "mode.rs",
            "outcome.rs",
            "policy",
            "rules_in_force.rs",
            "setup_warning.rs",
            "store_load.rs",
            "stats/",
        ],
    ),
    ("quotas", &["quota/"]),
    ("algorithms", &["algorithm/"]),
    ("what a quota says", &["quota/spec.rs"]),
    ("decisions and errors", &["decision.rs", "error.rs"]),
    ("what every room may use", &["base/"]),
];

/// The index of a file's layer.
fn layer_of(file: &str) -> usize {
    let length =
        |layer: &Layer| layer.1.iter().filter(|start| file.starts_with(**start)).map(|start| start.len()).max();
    let best = (0..LAYERS.len()).filter(|at| length(&LAYERS[*at]).is_some()).max_by_key(|at| length(&LAYERS[*at]));
    best.unwrap_or_else(|| panic!("src/{file} belongs to no layer: give it one in LAYERS"))
}

fn points_up(arrow: &(String, String)) -> bool {
    layer_of(&arrow.1) < layer_of(&arrow.0)
}

/// Reads the library's source.
pub(crate) fn read() -> Graph {
    Graph::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), "lib.rs")
}

/// For each file the files that it reaches by arrows.
fn reachable<'a>(arrows: impl Iterator<Item = &'a (String, String)>) -> BTreeMap<&'a str, BTreeSet<&'a str>> {
    let mut direct: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (from, to) in arrows {
        direct.entry(from).or_default().push(to);
    }
    let from = |file: &'a str| {
        let mut reached = BTreeSet::new();
        let mut next = vec![file];
        while let Some(file) = next.pop() {
            next.extend(direct.get(file).into_iter().flatten().copied().filter(|to| reached.insert(*to)));
        }
        (file, reached)
    };
    direct.keys().copied().map(from).collect()
}

fn is_in_a_cycle(arrow: &(String, String), reachable: &BTreeMap<&str, BTreeSet<&str>>) -> bool {
    reachable.get(arrow.1.as_str()).is_some_and(|reached| reached.contains(arrow.0.as_str()))
}

#[test]
fn imports_point_down_and_form_no_cycle() {
    let graph = read();
    let reachable = reachable(graph.arrows.keys());
    let mut wrong = String::new();
    for arrow in graph.arrows.keys() {
        let complaint = match () {
            () if points_up(arrow) => "points up",
            () if is_in_a_cycle(arrow, &reachable) => "is in a cycle",
            () => continue,
        };
        let (from, to) = arrow;
        writeln!(wrong, "{from} -> {to} {complaint}: {}", graph.arrows[arrow]).expect("a text grows");
    }
    assert!(wrong.is_empty(), "some arrows between files of src are wrong:\n{wrong}");
}

/// The packages beside the library: their files use each other in one direction, too.
#[test]
fn imports_of_program_and_benches_form_no_cycle() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut wrong = Vec::new();
    for source in ["cli/src", "benches/instructions/src", "benches/peers/src"] {
        let graph = Graph::read(&root.join(source), "main.rs");
        let reachable = reachable(graph.arrows.keys());
        for arrow in graph.arrows.keys().filter(|arrow| is_in_a_cycle(arrow, &reachable)) {
            wrong.push(format!("{source}: {} -> {}: {}", arrow.0, arrow.1, graph.arrows[arrow]));
        }
    }
    assert!(wrong.is_empty(), "some arrows are in a cycle:\n{}", wrong.join("\n"));
}

#[test]
fn picture_of_imports_is_drawn() {
    let graph = read();
    assert!(graph.files.len() > 90 && graph.arrows.len() > 300, "the source was not found");
    let mut picture = String::new();
    for (at, (name, _)) in LAYERS.iter().enumerate() {
        writeln!(picture, "=== {name}\n").expect("a text grows");
        for file in graph.files.iter().filter(|file| layer_of(file) == at) {
            writeln!(picture, "{file}").expect("a text grows");
            for arrow in graph.arrows.keys().filter(|arrow| arrow.0 == *file) {
                writeln!(picture, "    -> {}: {}", arrow.1, graph.arrows[arrow]).expect("a text grows");
            }
        }
        picture.push('\n');
    }
    if let Some(file) = std::env::var_os("IMPORTS") {
        std::fs::write(file, &picture).expect("the file can be written");
    }
}

#[test]
fn graph_of_a_small_crate_is_read_right() {
    let folder = std::env::temp_dir().join(format!("imports-{}", std::process::id()));
    std::fs::create_dir_all(folder.join("a")).expect("a folder can be made");
    for (file, text) in [
        ("lib.rs", "mod a; pub use a::{Shown, inner::*}; #[cfg(test)] mod tests { use super::*; }"),
        (
            "a/mod.rs",
            "mod inner; mod other; pub use inner::Shown; pub use other::g; fn h() { g(); inner::made() } const TEXT: &str = \"crate::nothing::here\"; // b::C",
        ),
        (
            "a/inner.rs",
            "pub struct Shown<'a>(&'a str); make!(made); fn f() { super::other::g(); #[cfg(test)] crate::a::TEXT; }",
        ),
        ("a/other.rs", "use crate::{Shown as S, a::TEXT}; pub fn g() -> char { '\\'' }"),
    ] {
        std::fs::write(folder.join(file), text).expect("a file can be written");
    }
    let graph = Graph::read(&folder, "lib.rs");
    std::fs::remove_dir_all(&folder).expect("a folder can be removed");
    let arrows: Vec<String> = graph.arrows.iter().map(|((from, to), path)| format!("{from} {to} {path}")).collect();
    let expected = [
        "a/inner.rs a/other.rs super::other::g",
        "a/mod.rs a/inner.rs inner::made",
        "a/mod.rs a/other.rs g",
        "a/other.rs a/inner.rs crate::Shown",
        "a/other.rs a/mod.rs crate::a::TEXT",
    ];
    assert_eq!(arrows, expected);
    assert!(is_in_a_cycle(&("a/inner.rs".to_owned(), "a/other.rs".to_owned()), &reachable(graph.arrows.keys())));
}
