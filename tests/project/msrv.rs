//! The dependencies build with the declared Rust version.
//!
//! clippy's `incompatible_msrv`, and a compiler of that version, check the crate's own code: see
//! `tests/all.sh`.

use std::collections::{HashMap, HashSet};
use std::process::Command;

use serde_json::Value;

fn metadata() -> Value {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--all-features", "--locked", "--manifest-path"])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
        .output()
        .expect("cargo runs this test, so it can be run");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("cargo's metadata is JSON")
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// `1.85` and `1.85.0` are the same version.
fn version(text: &str) -> [u64; 3] {
    let mut numbers = text.split('.').map(|number| number.parse().expect("a Rust version is of numbers"));
    [(); 3].map(|()| numbers.next().unwrap_or(0))
}

/// Returns whether users build this dependency, because it is not for tests.
fn is_built(dependency: &Value) -> bool {
    list(&dependency["dep_kinds"]).any(|kind| kind["kind"] != "dev")
}

#[test]
fn dependencies_build_with_the_declared_rust_version() {
    let metadata = metadata();
    let packages: HashMap<&str, &Value> =
        list(&metadata["packages"]).filter_map(|package| Some((package["id"].as_str()?, package))).collect();
    let nodes: HashMap<&str, &Value> =
        list(&metadata["resolve"]["nodes"]).filter_map(|node| Some((node["id"].as_str()?, node))).collect();
    let root = metadata["resolve"]["root"].as_str().expect("the crate is no virtual workspace");
    let declared = version(packages[root]["rust_version"].as_str().expect("the crate declares its Rust version"));

    let mut seen = HashSet::from([root]);
    let mut to_see = vec![root];
    let mut undeclared = Vec::new();
    let mut too_new = Vec::new();
    while let Some(id) = to_see.pop() {
        let package = packages[id];
        let name = format!("{} {}", package["name"], package["version"]).replace('"', "");
        match package["rust_version"].as_str() {
            None => undeclared.push(name),
            Some(needed) if version(needed) > declared => too_new.push(format!("{name} needs {needed}")),
            Some(_) => {}
        }
        for dependency in list(&nodes[id]["deps"]).filter(|dependency| is_built(dependency)) {
            let id = dependency["pkg"].as_str().expect("a dependency has an id");
            if seen.insert(id) {
                to_see.push(id);
            }
        }
    }

    undeclared.sort();
    println!("{} packages, of which these declare no Rust version: {}", seen.len(), undeclared.join(", "));
    assert!(seen.len() > 10, "the dependencies were not found: {seen:?}");
    assert!(too_new.is_empty(), "{too_new:#?}");
}
