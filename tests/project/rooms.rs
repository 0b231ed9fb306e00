//! ARCHITECTURE names every file of the folders that it lists, so that a newcomer finds each one.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

const ARCHITECTURE: &str = include_str!("../../ARCHITECTURE.md");

/// The folders whose files are listed, with all that are within.
const ROOMS: [&str; 4] = ["src/middleware/", "src/limiter/", "src/headers/", "src/refusal/"];

/// Returns the files that the section "The files" lists: below a folder's line, each in an indented line of its own.
fn listed() -> BTreeSet<String> {
    let section = ARCHITECTURE.split("\n## The files\n").nth(1).expect("the section is there");
    let block = section.split("```").nth(1).expect("the section has a block").trim_start_matches("text\n");
    let mut folder = "";
    let mut files = BTreeSet::new();
    for line in block.lines() {
        match line.strip_prefix("  ") {
            None => folder = line,
            Some(rest) => {
                let (file, about) = rest.split_once("  ").expect("a file, and what it is for");
                assert!(!about.trim().is_empty(), "{folder}{file} is listed without what it is for");
                assert!(files.insert(format!("{folder}{file}")), "{folder}{file} is listed twice");
            }
        }
    }
    files
}

/// Adds the files below a folder, without tests.
fn add_files(folder: &str, files: &mut BTreeSet<String>) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for entry in fs::read_dir(root.join(folder)).expect("the folder is there") {
        let entry = entry.expect("the folder can be read");
        let name = entry.file_name().into_string().expect("names are text");
        let is_test = ["tests", "tests.rs", "loom_tests.rs", "shuttle_tests.rs"].contains(&name.as_str());
        match entry.file_type().expect("the file is there").is_dir() {
            _ if is_test => {}
            true => add_files(&format!("{folder}{name}/"), files),
            false => drop(files.insert(format!("{folder}{name}"))),
        }
    }
}

#[test]
fn architecture_names_every_file_of_the_rooms() {
    let listed = listed();
    let mut files = BTreeSet::new();
    ROOMS.iter().for_each(|room| add_files(room, &mut files));
    let gone: Vec<&String> = listed.difference(&files).collect();
    let unnamed: Vec<&String> =
        files.difference(&listed).filter(|file| Path::new(file).file_name() != Some("mod.rs".as_ref())).collect();
    assert!(gone.is_empty(), "ARCHITECTURE.md lists files that do not exist: {gone:?}");
    assert!(unnamed.is_empty(), "ARCHITECTURE.md does not list these files, under \"The files\": {unnamed:?}");
}

/// Adds each module `NAME.rs` below a folder that has files in `NAME/` beside it.
fn add_split_modules(folder: &Path, found: &mut Vec<String>) {
    for entry in fs::read_dir(folder).expect("the folder is there") {
        let path = entry.expect("the folder can be read").path();
        if path.is_dir() {
            add_split_modules(&path, found);
        } else if path.extension() == Some("rs".as_ref()) && path.with_extension("").is_dir() {
            found.push(path.display().to_string());
        }
    }
}

#[test]
fn module_with_files_is_a_folder_with_a_mod_file() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    for folder in ["src", "cli/src", "tests", "benches/instructions/src", "benches/peers/src"] {
        add_split_modules(&root.join(folder), &mut found);
    }
    assert!(found.is_empty(), "move these into their folders, as mod.rs: {found:?}");
}
