//! Tables in a document: each stands between two comments, the first of which names it.

use std::path::Path;

use super::build::Done;

const FIRST: &str = "<!-- table: ";
const LAST: &str = "<!-- end of table -->";

/// Writes the tables of a document anew.
pub fn rewrite(document: &Path, table: &dyn Fn(&str) -> Option<String>) -> Done {
    let told = |what: &str| format!("{}: {what}", document.display());
    let text = std::fs::read_to_string(document).map_err(|error| told(&error.to_string()))?;
    let (mut rest, mut written) = (text.as_str(), String::new());
    while let Some((before, after)) = rest.split_once(FIRST) {
        let (name, after) = after.split_once(" -->\n").ok_or_else(|| told("a comment has no end"))?;
        let (_, after) = after.split_once(LAST).ok_or_else(|| told(&format!("the table {name} has no end")))?;
        let table = table(name).ok_or_else(|| told(&format!("no table is named {name}")))?;
        written += &format!("{before}{FIRST}{name} -->\n{}\n\n{LAST}", table.trim_end());
        rest = after;
    }
    std::fs::write(document, written + rest)?;
    println!("Written: {}", document.display());
    Ok(())
}
