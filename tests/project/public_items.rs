//! The list of public items, which changes only on purpose.
//!
//! rustdoc's pages are read, because its JSON is not stable yet.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const LIST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/project/public_items.txt");
/// As in tests/all.sh, whose documentation step has built all that is needed in the same folder.
const FEATURES: &str = "axum,tonic,tokio,fleet,metrics,fred-rustls-ring,redis-rs-rustls-ring,postgres,retry,serde,status,rules,conformance,tracing";
const RUSTDOCFLAGS: &str = "-D warnings";
const UPDATE: &str = "REWRITE_GOLDEN=1 cargo test --features $F --test project public_items";

/// Returns the folder of the crate's pages.
fn documented() -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("checks");
    let mut cargo = Command::new(env!("CARGO"));
    // Cargo tells a test about its package. Build scripts such as ring's would take these variables for a change, and
    // all that needs them would be built again.
    let of_this_package =
        |name: &OsStr| name.to_string_lossy().starts_with("CARGO_PKG_") || name == "CARGO_MANIFEST_DIR";
    for (name, _) in std::env::vars_os().filter(|(name, _)| of_this_package(name)) {
        cargo.env_remove(name);
    }
    let output = cargo
        .env("RUSTDOCFLAGS", RUSTDOCFLAGS)
        .args(["doc", "--no-deps", "--lib", "--locked", "--quiet", "--features", FEATURES, "--manifest-path"])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
        .arg("--target-dir")
        .arg(&target)
        .output()
        .expect("cargo runs this test, so it can be run");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    target.join("doc/tower_ratelimit")
}

/// Returns what stands between each `start` and the next `end`.
fn between<'a>(text: &'a str, start: &'a str, end: char) -> impl Iterator<Item = &'a str> {
    text.split(start).skip(1).filter_map(move |rest| rest.split(end).next())
}

/// Returns a line for each public item: its kind and path, and for types and traits their own methods, variants and
/// fields. Methods of implemented traits are left out.
fn items() -> BTreeSet<String> {
    let pages = documented();
    let read = |page: &str| fs::read_to_string(pages.join(page)).expect("rustdoc wrote the page");
    let mut items = BTreeSet::new();
    for page in between(&read("all.html"), "<li><a href=\"", '"') {
        let (folder, file) =
            page.rsplit_once('/').map_or((String::new(), page), |(f, n)| (f.replace('/', "::") + "::", n));
        let Some((kind, name)) = file.trim_end_matches(".html").split_once('.') else { continue };
        let item = format!("{folder}{name}");
        items.insert(format!("{item} ({kind})"));
        let text = read(page);
        let own = text.split("id=\"trait-implementations\"").next().unwrap_or_default();
        let own = own.split("id=\"foreign-impls\"").next().unwrap_or_default();
        for part in ["method", "tymethod", "variant", "structfield", "associatedtype", "associatedconstant"] {
            let start = format!(" id=\"{part}.");
            let names = between(own, &start, '"').filter(|name| !name.ends_with(".fields"));
            items.extend(names.map(|name| format!("{item}::{name} ({part})")));
        }
    }
    items
}

#[test]
fn public_items_are_those_of_the_list() {
    let items = items();
    assert!(items.contains("Rule::block (method)") && items.contains("Mode::Shadow (variant)"), "the pages are read");
    if std::env::var_os("REWRITE_GOLDEN").is_some() {
        let lines: String = items.iter().map(|item| format!("{item}\n")).collect();
        fs::write(LIST, lines).expect("the list can be written");
        return;
    }
    let list = fs::read_to_string(LIST).unwrap_or_default();
    let listed: BTreeSet<String> = list.lines().map(str::to_owned).collect();
    let lines = |sign: char, a: &BTreeSet<String>, b: &BTreeSet<String>| -> String {
        a.difference(b).map(|item| format!("{sign} {item}\n")).collect()
    };
    let changes = lines('-', &listed, &items) + &lines('+', &items, &listed);
    assert!(changes.is_empty(), "public items changed; if that is meant: {UPDATE}\n{changes}");
}
