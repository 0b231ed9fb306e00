//! The program `tower-ratelimit`: a server that limits requests by a file of rules, and tools for such files.
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
#[cfg(feature = "serve")]
mod serve;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use output::Output;

/// Rate limits by files of rules: a server for any proxy, and tools
#[derive(Parser)]
#[command(name = "tower-ratelimit", version, arg_required_else_help = true, disable_help_subcommand = true)]
struct Program {
    #[command(subcommand)]
    command: Command,
}

/// The commands. The first line of each one's options is its text in the help.
#[derive(Subcommand)]
enum Command {
    #[cfg(feature = "serve")]
    Serve(Box<serve::Options>),
    #[cfg(feature = "serve")]
    Push(serve::PushOptions),
    #[cfg(feature = "serve")]
    Rollback(serve::RollbackOptions),
    Check(check::Options),
    Explain(Box<explain::Options>),
    Convert(convert::Options),
    Diff(diff::Options),
    Replay(Box<replay::Options>),
    Schema(schema::Options),
    Completions(completions::Options),
}

fn main() -> ExitCode {
    let mut output = Output::default();
    let command = match command() {
        Ok(command) => command,
        Err(trouble) => {
            output.trouble(trouble);
            return output.write(exit::TROUBLE).into();
        }
    };
    let program = command.try_get_matches().and_then(|matches| Program::from_arg_matches(&matches));
    let program = match program {
        Ok(program) => program,
        Err(error) => {
            let _ = error.print(); // the reader may have gone
            return u8::try_from(error.exit_code()).unwrap_or(exit::TROUBLE).into();
        }
    };
    let code = match program.command {
        #[cfg(feature = "serve")]
        Command::Serve(options) => serve::run(&options, &mut output),
        #[cfg(feature = "serve")]
        Command::Push(options) => serve::push(&options, &mut output),
        #[cfg(feature = "serve")]
        Command::Rollback(options) => serve::rollback(&options, &mut output),
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

/// Returns the commands. The settings of a file that the arguments name are defaults of `serve`.
#[cfg(feature = "serve")]
fn command() -> Result<clap::Command, String> {
    let arguments: Vec<String> = std::env::args_os().map(|argument| argument.to_string_lossy().into_owned()).collect();
    let mut error = None;
    let mut command = Program::command();
    if arguments.get(1).is_some_and(|name| name == "serve") {
        command = command.mut_subcommand("serve", |serve| {
            serve::with_settings(serve.clone(), &arguments).unwrap_or_else(|trouble| {
                error = Some(trouble);
                serve
            })
        });
    }
    error.map_or(Ok(command), Err)
}

/// Returns the commands.
#[cfg(not(feature = "serve"))]
#[allow(clippy::unnecessary_wraps, reason = "with `serve` it can fail")]
fn command() -> Result<clap::Command, String> {
    Ok(Program::command())
}
