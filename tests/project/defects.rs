//! The planted defects of `tests/campaigns/defects/` still fit the code.

use std::fs;
use std::path::Path;

/// Returns the lines that a hunk of a patch expects in its file, for each hunk with the name of the file.
fn expected(patch: &str) -> Vec<(String, Vec<&str>)> {
    let mut hunks: Vec<(String, Vec<&str>)> = Vec::new();
    let mut file = "";
    for line in patch.lines() {
        if let Some(name) = line.strip_prefix("--- a/") {
            file = name;
        } else if line.starts_with("@@") {
            hunks.push((file.to_owned(), Vec::new()));
        } else if let Some((_, lines)) = hunks.last_mut() {
            if line.is_empty() {
                lines.push(line);
            } else if let Some(kept) = line.strip_prefix([' ', '-']) {
                lines.push(kept);
            }
        }
    }
    hunks
}

#[test]
fn planted_defects_fit_the_code() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut misfits = Vec::new();
    let mut hunks = 0;
    for patch in fs::read_dir(root.join("tests/campaigns/defects")).expect("the folder is there") {
        let path = patch.expect("it can be read").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        for (file, lines) in expected(&fs::read_to_string(&path).expect("a patch is text")) {
            let text = fs::read_to_string(root.join(&file)).unwrap_or_default();
            let all: Vec<&str> = text.lines().collect();
            hunks += 1;
            if all.windows(lines.len()).filter(|window| *window == lines).count() != 1 {
                misfits.push(format!("{name}: the lines around the change are not in {file}, or not once"));
            }
        }
    }
    assert!(hunks >= 13, "{hunks} changes were found");
    assert!(misfits.is_empty(), "{misfits:#?}");
}
