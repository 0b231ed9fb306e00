//! An unused feature costs nothing, and the library does not depend on what only the program needs.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Dependencies that only the features for files of rules need.
const OF_RULES: &[&str] = &["saphyr-parser", "strsim"];

/// Dependencies that only the program needs.
const OF_THE_PROGRAM: &[&str] = &["clap", "flate2", "serde_json"];

/// Returns the manifest without the features that `is_kept` refuses, and without the dependencies that only they need.
fn manifest(text: &str, is_kept: impl Fn(&str) -> bool) -> String {
    let mut table = "";
    let mut left_out = false;
    let mut kept = Vec::new();
    for line in text.lines() {
        if line.starts_with('[') {
            table = line;
            // Targets, examples and the other package need files and features that are left out.
            left_out = line == "[workspace]"
                || ["[[", "[dev-dependencies]", "[package.metadata", "[profile"].iter().any(|at| line.starts_with(at));
        }
        let name = line.split([' ', '=']).next().unwrap_or_default();
        let is_named = matches!(table, "[features]" | "[dependencies]") && !is_kept(name);
        if !left_out && !is_named {
            kept.push(line);
        }
    }
    kept.join("\n")
}

/// Returns the packages that a user of a package builds with these features, with their versions and features.
fn packages(folder: &Path, package: &str, features: &str) -> BTreeSet<String> {
    let tree = ["tree", "--edges", "normal,build", "--prefix", "none", "--format", "{p} {f}", "--package", package];
    let output = Command::new(env!("CARGO"))
        .args(tree)
        .args(["--features", features, "--manifest-path"])
        .arg(folder.join("Cargo.toml"))
        .output()
        .expect("cargo runs this test, so it can be run");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("cargo prints UTF-8");
    let lines = text.lines().map(|line| line.trim_end_matches(" (*)").to_owned());
    // The library itself is in another folder each time.
    lines.filter(|line| !line.starts_with("tower-ratelimit ")).collect()
}

fn has(packages: &BTreeSet<String>, name: &str) -> bool {
    packages.iter().any(|package| package.split(' ').next() == Some(name))
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn rules_change_no_dependency_of_others() {
    let text = fs::read_to_string(root().join("Cargo.toml")).expect("the manifest is text");
    let without = manifest(&text, |name| name != "rules" && !OF_RULES.contains(&name));
    assert!(!without.contains("saphyr") && without.contains("dep:fred"), "{without}");
    // A crate that never had this feature. Cargo leaves the packages that it lacks out of its lock, which has the
    // versions of this one.
    let folder = std::env::temp_dir().join(format!("tower-ratelimit-features-{}", std::process::id()));
    fs::create_dir_all(folder.join("src")).expect("a folder can be made");
    fs::write(folder.join("src/lib.rs"), "").expect("a file can be written");
    fs::write(folder.join("Cargo.toml"), without).expect("a file can be written");
    fs::copy(root().join("Cargo.lock"), folder.join("Cargo.lock")).expect("a file can be copied");
    for features in ["", "axum,tonic,tokio,serde,tracing", "fred"] {
        let packages_now = packages(root(), "tower-ratelimit", features);
        assert!(packages_now.len() > 15, "{packages_now:?}");
        assert_eq!(packages_now, packages(&folder, "tower-ratelimit", features), "with the features {features:?}");
        for name in OF_RULES {
            assert!(!has(&packages_now, name), "{name} is a dependency with the features {features:?}");
        }
    }
    let with_rules = packages(root(), "tower-ratelimit", "rules");
    assert!(OF_RULES.iter().all(|name| has(&with_rules, name)));
    fs::remove_dir_all(&folder).expect("a folder can be removed");
}

#[test]
fn library_does_not_depend_on_what_the_program_needs() {
    let of_the_library = packages(
        root(),
        "tower-ratelimit",
        "axum,tonic,tokio,fleet,tracing,metrics,retry,serde,status,rules,conformance",
    );
    let of_the_program = packages(root(), "tower-ratelimit-cli", "");
    for name in OF_THE_PROGRAM {
        assert!(!has(&of_the_library, name), "the library depends on {name}");
        assert!(has(&of_the_program, name), "the program does not depend on {name}");
    }
}
