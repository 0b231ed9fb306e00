//! `tower-ratelimit convert`: rules in the native form, out of a file of Envoy's rate limit service.

use std::path::PathBuf;

use tower_ratelimit::rules::convert_envoy;

use crate::output::Output;
use crate::{exit, files};

/// Write rules in the native form, out of a file in the form of Envoy's rate limit service
///
/// The rules are printed. Their comments say where the two forms differ, and what the program has to register.
///
/// The exit code is 0 if the file was converted, 1 if it has a problem, and 2 if it cannot be read.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// The file in Envoy's form; `-` is the standard input
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

pub(crate) fn run(options: &Options, output: &mut Output) -> Result<u8, String> {
    let text = files::read(&options.file)?;
    match convert_envoy(text) {
        Ok(rules) => {
            output.line(rules.trim_end());
            Ok(exit::FINE)
        }
        Err(error) => {
            output.problems(&files::name(&options.file), &error);
            Ok(exit::PROBLEMS)
        }
    }
}
