//! `tower-ratelimit diff`: what changes for whom if a file of rules replaces another one.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tower_ratelimit::rules::{RuleChange, compare};

use crate::output::Output;
use crate::{exit, files};

/// Compare two files of rules: what changes, and for which rule
///
/// A change is `added`, `removed`, `looser`, `stricter`, `changed`, or `afresh`: then each client begins with a full
/// allowance, because the rule has another name or another key. Files that say the same in other words are equal.
/// Envoy's form is compared, too.
///
///   tower-ratelimit diff old.yaml new.yaml
///
///   git show main:rules.yaml | tower-ratelimit diff - rules.yaml
///
/// The exit code is 0 if nothing changes, 1 if something does, and 2 if a file has a problem or cannot be read.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// The file that is in force; `-` is the standard input
    #[arg(value_name = "OLD")]
    old: PathBuf,
    /// The file that replaces it; `-` is the standard input
    #[arg(value_name = "NEW")]
    new: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(options: &Options, output: &mut Output) -> Result<u8, String> {
    let Options { old, new, .. } = options;
    if old.as_os_str() == "-" && new.as_os_str() == "-" {
        return Err("error: only one of the files can be the standard input".to_owned());
    }
    let (before, after) = (files::read(old)?, files::read(new)?);
    let mut is_wrong = false;
    for (file, text) in [(old, &before), (new, &after)] {
        is_wrong |= !is_right(file, text, output)?;
    }
    if is_wrong {
        return Ok(exit::TROUBLE);
    }
    let changes = compare(before, after).map_err(|error| format!("error: {error}"))?;
    if options.json {
        output.json(json!({ "changes": changes.iter().map(change).collect::<Vec<_>>() }));
    } else {
        changes.iter().for_each(|change| output.line(line(change)));
    }
    Ok(if changes.is_empty() { exit::FINE } else { exit::PROBLEMS })
}

/// Prints the problems of a file. Returns whether there are none.
fn is_right(file: &Path, text: &[u8], output: &mut Output) -> Result<bool, String> {
    let problems = files::builder()?.check(text).err();
    if let Some(error) = &problems {
        output.problems(&files::name(file), error);
    }
    Ok(problems.is_none())
}

/// Returns the line of a change.
pub(crate) fn line(change: &RuleChange) -> String {
    format!("{:<8}  {}: {}", change.kind().as_str(), change.rule().unwrap_or("access"), change.message())
}

fn change(change: &RuleChange) -> Value {
    json!({ "kind": change.kind().as_str(), "rule": change.rule(), "message": change.message() })
}
