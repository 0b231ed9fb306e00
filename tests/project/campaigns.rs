//! The campaigns and the planted defects name tests that are there: cargo succeeds if no test has a name.

use std::fs;
use std::path::Path;

use super::test_files::files;

/// The tests of a target that a command runs: `lib` or the name of an integration test, and a part of their paths.
#[derive(Debug, PartialEq, Eq)]
struct Named<'a> {
    target: &'a str,
    part: Option<&'a str>,
}

/// Returns the tests that a command names.
fn named(command: &str) -> Vec<Named<'_>> {
    let words: Vec<&str> = command.split_whitespace().map(|word| word.trim_end_matches(['"', ')'])).collect();
    let part = |at: usize| words.get(at).copied().filter(|word| !word.starts_with(['-', '|', '&', '\\']));
    let mut all = Vec::new();
    for (at, word) in words.iter().enumerate() {
        match *word {
            "--lib" => all.push(Named { target: "lib", part: part(at + 1) }),
            "--test" => all.push(Named { target: words[at + 1], part: part(at + 2) }),
            _ => {}
        }
    }
    all
}

/// Returns the paths of a target's tests, by the files. A module within a file is left out.
fn paths(target: &str) -> Vec<String> {
    let mut found = Vec::new();
    let folders = match target {
        "lib" => ["src".to_owned()].to_vec(),
        _ => ["tests", "cli/tests"].map(|folder| format!("{folder}/{target}")).to_vec(),
    };
    for folder in folders {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        if root.join(&folder).is_dir() {
            files(&folder, &mut found);
        }
        if let Ok(text) = fs::read_to_string(root.join(format!("{folder}.rs"))) {
            found.push((format!("{folder}/main.rs"), text));
        }
    }
    let mut paths = Vec::new();
    for (name, text) in found {
        let folder = if target == "lib" { "src/" } else { &name[..=name.find(target).unwrap() + target.len()] };
        let module = name.strip_prefix(folder).unwrap().trim_end_matches(".rs");
        let module = module.trim_end_matches("mod").trim_end_matches("main").trim_end_matches('/').replace('/', "::");
        // A macro makes the tests of each algorithm.
        for after in ["#[test]", "#[tokio::test", "macro_rules! "].iter().flat_map(|start| text.split(start).skip(1)) {
            let name = after.split("fn ").nth(1).unwrap_or_default();
            let name: String = name.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            paths.push(format!("{module}::{name}"));
        }
    }
    paths
}

fn assert_there(place: &str, command: &str) -> usize {
    let all = named(command);
    for Named { target, part } in &all {
        let paths = paths(target);
        assert!(!paths.is_empty(), "{place}: there is no test target {target}");
        // A module of tests within a file is named by the path of the file and its own.
        let part = part.unwrap_or_default().trim_end_matches("tests");
        assert!(paths.iter().any(|path| path.contains(part)), "{place}: no test of {target} has {part} in its name");
    }
    all.len()
}

#[test]
fn campaigns_run_tests_that_are_there() {
    let script = include_str!("../campaigns.sh").replace("\\\n", " ");
    let of = |line: &&str| line.trim_start().starts_with("campaign ");
    let count: usize = script.lines().filter(of).map(|line| assert_there(line, line)).sum();
    assert!(count > 25, "{count} names were found");
    assert_eq!(named("a --lib x:: --test b -- --nocapture").len(), 2);
    assert_eq!(named("--test b c\"")[0], Named { target: "b", part: Some("c") });
}

/// A file that a feature leaves out has mutants as well, and no test fails with them.
#[test]
fn mutants_are_built_with_the_features_of_the_campaigns() {
    let line = |text: &str, start: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(start)).expect("the line is there");
        let names = line.split([',', '[', ']', '"', ' ']).filter(|name| !name.is_empty());
        names.map(str::to_owned).collect::<Vec<_>>()
    };
    let campaigns = line(include_str!("../campaigns.sh"), "features=");
    let mutants = line(include_str!("../campaigns/mutants.toml"), "features = ");
    assert!(campaigns.len() > 5, "{campaigns:?}");
    for feature in campaigns {
        assert!(mutants.contains(&feature), "mutants are built without {feature}");
    }
}

/// A filter that names no test is no error of cargo's.
#[test]
fn tests_under_miri_are_there() {
    let script = include_str!("../sanitize/run");
    let names: Vec<&str> = script.lines().filter_map(|line| line.strip_prefix("    ")).collect();
    let names: Vec<&str> = names.into_iter().filter(|name| name.contains("::") && !name.contains(' ')).collect();
    assert!(names.len() > 9, "{names:?}");
    for name in names {
        let target = if name.starts_with("places::") { "memory" } else { "lib" };
        let part = name.replace("tests::", "");
        assert!(paths(target).iter().any(|path| path.starts_with(&part)), "no test has the name {name}");
    }
}

/// A line that begins so names the tests that find the defect of a patch. Without it the simulation does.
const BY: &str = "Found by: ";

#[test]
fn planted_defects_are_found_by_tests_that_are_there() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/campaigns/defects");
    for patch in fs::read_dir(folder).expect("the folder is there") {
        let path = patch.expect("it can be read").path();
        let text = fs::read_to_string(&path).expect("a patch is text");
        if let Some(by) = text.lines().find_map(|line| line.strip_prefix(BY)) {
            assert_eq!(assert_there(&path.display().to_string(), by), 1, "{by}");
        }
    }
}

/// Returns the modules of the crate that code names.
fn modules_named(code: &str) -> Vec<&str> {
    let code = code.split("#[cfg(test)]\nmod ").next().unwrap_or(code);
    let mut found = Vec::new();
    for after in code.split("crate::").skip(1) {
        let names = after.strip_prefix('{').and_then(|list| list.split('}').next()).unwrap_or(after);
        let names = if after.starts_with('{') { names.split(',').collect() } else { vec![names] };
        let word = |name: &'_ str| name.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(name.len());
        found.extend(names.into_iter().map(str::trim_start).map(|name| &name[..word(name)]));
    }
    found
}

/// Fuzz targets compile modules of the program, and no check builds the targets. In the modules `crate` is the target.
#[test]
fn fuzz_targets_have_the_modules_that_the_program_names() {
    let (mut targets, mut program) = (Vec::new(), Vec::new());
    files("tests/fuzz/src", &mut targets);
    files("cli/src", &mut program);
    let (_, main) = program.iter().find(|(name, _)| name == "cli/src/main.rs").expect("the program has a main file");
    let is_module = |name: &str| main.contains(&format!("\nmod {name};"));
    let mut seen = 0;
    for (target, text) in &targets {
        for path in text.split("#[path = \"../../../").skip(1).filter_map(|after| after.split('"').next()) {
            let is_in_it = |name: &str| name.starts_with(path.trim_end_matches("mod.rs")) && !name.contains("tests");
            for (file, code) in program.iter().filter(|(name, _)| is_in_it(name)) {
                for module in modules_named(code).into_iter().filter(|name| is_module(name)) {
                    assert!(text.contains(&format!("\nmod {module};")), "{target} needs the module {module} of {file}");
                    seen += 1;
                }
            }
        }
    }
    assert!(seen > 5, "{seen} names of modules");
}
