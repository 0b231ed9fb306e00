//! `tower-ratelimit push` and `tower-ratelimit rollback`: rules in all processes that share a store.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tower_ratelimit::fleet::{Fleet, FleetChange, FleetError};
use tower_ratelimit::observe::Observer;

use super::failure::{Failure, text_with_causes};
use super::store::StoreOptions;
use crate::output::Output;
use crate::{exit, files};

/// The time in which the store has to answer.
const WITHIN: Duration = Duration::from_secs(10);

/// The person or program that acts, and the reason.
#[derive(clap::Args)]
struct Author {
    /// Your name, which is kept with the change
    #[arg(long, value_name = "NAME", env = "USER", default_value = "unknown")]
    by: String,
    /// The reason, which is kept with the change
    #[arg(long, value_name = "TEXT", default_value = "")]
    why: String,
}

/// Put a file of rules in force in all processes that share a store
///
/// The rules are checked first. Each process takes them within two seconds, in place of those of its own file, and keeps
/// them over a restart. A process that cannot use them keeps the former ones, and logs why. Names that a program
/// registers are checked there.
///
/// The exit code is 0 if the rules are in the store, 1 if the file has a problem, and 2 if the store did not take them.
#[derive(clap::Args)]
pub(crate) struct PushOptions {
    /// The file of rules; `-` is the standard input
    #[arg(value_name = "RULES")]
    file: PathBuf,
    /// The name of the rules. By default the file's name without its ending, as `serve` names its rules
    #[arg(long)]
    name: Option<String>,
    #[command(flatten)]
    author: Author,
    #[command(flatten)]
    store: StoreOptions,
}

/// Put the rules in force again that were so before the last push
///
/// Without an earlier push these are the rules of each process's own file. A second rollback undoes the first.
#[derive(clap::Args)]
pub(crate) struct RollbackOptions {
    /// The name of the rules, such as `rules` for those of rules.yaml
    #[arg(value_name = "NAME")]
    name: String,
    #[command(flatten)]
    author: Author,
    #[command(flatten)]
    store: StoreOptions,
}

pub(crate) fn push(options: &PushOptions, output: &mut Output) -> Result<u8, String> {
    let text = files::read(&options.file)?;
    if let Err(error) = files::builder()?.check(&text) {
        output.problems(&files::name(&options.file), &error);
        return Ok(exit::PROBLEMS);
    }
    let text = String::from_utf8(text).map_err(|_| "error: the file is not UTF-8".to_owned())?;
    let stem = || options.file.file_stem().map(|stem| stem.to_string_lossy().into_owned());
    let name = options.name.clone().or_else(stem).filter(|name| name != "-");
    let name = name.ok_or_else(|| "error: name the rules by --name".to_owned())?;
    let Author { by, why } = &options.author;
    run(
        &options.store,
        async |fleet| {
            let revision = fleet.change(by, why, [FleetChange::rules(&*name, text)]).await?;
            Ok(format!("revision {revision}: these are the rules `{name}` of all processes, within two seconds"))
        },
        output,
    )
}

pub(crate) fn rollback(options: &RollbackOptions, output: &mut Output) -> Result<u8, String> {
    let (Author { by, why }, name) = (&options.author, &options.name);
    run(
        &options.store,
        async |fleet| {
            let revision = fleet.rollback(by, why, name).await?;
            Ok(format!(
                "revision {revision}: the former rules `{name}` are in force in all processes, within two seconds"
            ))
        },
        output,
    )
}

/// Observes nothing: errors are returned.
struct Nothing;

impl Observer for Nothing {}

/// Does something with the fleet of a store, and prints what it returns.
fn run(
    store: &StoreOptions,
    act: impl AsyncFnOnce(Fleet) -> Result<String, FleetError>,
    output: &mut Output,
) -> Result<u8, String> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| format!("error: no thread could be started: {error}"))?;
    let failed = |error: FleetError| format!("error: {}", text_with_causes(&error));
    let said = runtime.block_on(async {
        let limiter = store.connect(&Arc::new(Nothing)).await.map_err(|failure| match failure {
            Failure::Setup(message) => message,
            Failure::Rules(file, error) => format!("error: {file}: {error}"),
        })?;
        let Some(limiter) = limiter else {
            return Err("error: name the store that the processes share, by --redis or --postgres".to_owned());
        };
        let fleet = Fleet::beside(&limiter).await.map_err(failed)?;
        fleet.wait_until_read(WITHIN).await.map_err(failed)?;
        act(fleet).await.map_err(failed)
    })?;
    output.line(said);
    Ok(exit::FINE)
}
