//! `tower-ratelimit schema`: the JSON Schema of files of rules.

use tower_ratelimit::rules::SCHEMA;

use crate::exit;
use crate::output::Output;

/// Print the JSON Schema of files of rules, for editors
///
/// An editor uses it if a file of rules begins with `# yaml-language-server: $schema=PATH`.
///
///   tower-ratelimit schema > rules.schema.json
#[derive(clap::Args)]
pub(crate) struct Options {}

pub(crate) fn run(output: &mut Output) -> u8 {
    output.line(SCHEMA.trim_end());
    exit::FINE
}
