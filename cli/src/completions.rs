//! `tower-ratelimit completions`: the script by which a shell completes commands and options.

use clap::Command;
use clap_complete::Shell;

use crate::exit;
use crate::output::Output;

/// Print the script by which a shell completes commands and options
///
///   tower-ratelimit completions bash > tower-ratelimit.bash
#[derive(clap::Args)]
pub(crate) struct Options {
    /// The shell
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

pub(crate) fn run(options: &Options, mut program: Command, output: &mut Output) -> u8 {
    let mut script = Vec::new();
    clap_complete::generate(options.shell, &mut program, "tower-ratelimit", &mut script);
    output.script(&String::from_utf8_lossy(&script));
    exit::FINE
}
