//! The program `tower-ratelimit`: tools for rules and for choosing them.
//!
//! Each command is a module with its `Options` and a function `run`, which returns the exit code, or why the command
//! could not do what it should. To add a command, add a variant to `Command` and an arm to `main`.

mod check;
mod completions;
mod convert;
mod diff;
mod exit;
mod explain;
mod files;
mod output;
mod replay;
mod schema;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use output::Output;

/// Tools for rate limits by the crate tower-ratelimit.
#[derive(Parser)]
#[command(name = "tower-ratelimit", version, arg_required_else_help = true, disable_help_subcommand = true)]
struct Program {
    #[command(subcommand)]
    command: Command,
}

/// The commands. The first line of each one's options is its text in the help.
#[derive(Subcommand)]
enum Command {
    Check(check::Options),
    Explain(Box<explain::Options>),
    Convert(convert::Options),
    Diff(diff::Options),
    Replay(Box<replay::Options>),
    Schema(schema::Options),
    Completions(completions::Options),
}

fn main() -> ExitCode {
    let program = match Program::try_parse() {
        Ok(program) => program,
        Err(error) => {
            let _ = error.print(); // the reader may have gone
            return u8::try_from(error.exit_code()).unwrap_or(exit::TROUBLE).into();
        }
    };
    let mut output = Output::default();
    let code = match program.command {
        Command::Check(options) => check::run(&options, &mut output),
        Command::Explain(options) => explain::run(&options, &mut output),
        Command::Convert(options) => convert::run(&options, &mut output),
        Command::Diff(options) => diff::run(&options, &mut output),
        Command::Replay(options) => replay::run(&options, &mut output),
        Command::Schema(schema::Options {}) => Ok(schema::run(&mut output)),
        Command::Completions(options) => Ok(completions::run(&options, Program::command(), &mut output)),
    };
    let code = code.unwrap_or_else(|trouble| {
        output.trouble(trouble);
        exit::TROUBLE
    });
    output.write(code).into()
}
