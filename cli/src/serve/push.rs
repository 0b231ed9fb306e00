//! `tower-ratelimit push` and `tower-ratelimit rollback`: rules in all processes that share a store.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{sleep, timeout};
use tower_ratelimit::fleet::{Fleet, FleetChange, FleetEntry, FleetError, FleetErrorKind, FleetKind, FleetProcesses};
use tower_ratelimit::limiter::BoxLimiter;
use tower_ratelimit::observe::Observer;
use tower_ratelimit::rules::compare;

use super::failure::{Failure, text_with_causes, with_causes};
use super::limits::{self, rules_name};
use super::store::StoreOptions;
use crate::output::Output;
use crate::{check, diff, exit, files};

/// The time in which the store has to answer.
const WITHIN: Duration = Duration::from_secs(10);

/// The pause after a reading that failed.
const PAUSE: Duration = Duration::from_millis(50);

/// The deadline of the store's limiter. It decides about no request, so the store may be far away.
const DEADLINE: Duration = Duration::from_secs(2);

/// The person or program that acts, and the reason.
#[derive(clap::Args)]
struct Author {
    /// Your name, which is kept with the change as unverified, because each client of the store can state any name
    #[arg(long, value_name = "NAME", env = "USER", default_value = "unknown")]
    by: String,
    /// The reason, which is kept with the change
    #[arg(long, value_name = "TEXT", default_value = "")]
    why: String,
}

/// The longest name of an author in characters.
const NAME_MAX: usize = 100;

impl Author {
    /// Returns the name as it is kept. The name is not verified. The names of operators who send their tokens are.
    fn kept_name(&self) -> String {
        let name: String = self.by.chars().take(NAME_MAX).collect();
        format!("{name} (unverified)")
    }
}

/// Put a file of rules in force in all processes that share a store
///
/// The rules are checked first, as `serve` checks its own. Each server whose rules have this name takes them within two
/// seconds, in place of those of its own file, and again after a restart. A server that cannot use them, because of its
/// version or an option, logs why and keeps the rules that it has. After a restart these are the rules of its own file.
/// Rules with names that a program registers are only for such programs, which check them.
///
/// Servers report the names of their rules to the store every five seconds, and the program says how many servers take
/// the rules. If none has this name, nothing is pushed, because the name, the store or the prefix may be wrong. With
/// --first the rules are pushed for servers that start later.
///
/// The program prints the warnings and notes of `check`. If these rules replace others that were pushed, it also prints
/// what changes, as `diff` does.
///
/// Rules that another operator pushed meanwhile are replaced, too, and the program names the operator. With --seen the
/// program refuses to replace them.
///
/// The exit code is 0 if the rules are in the store, 1 if the file has a problem, and 2 if nothing was pushed, or if
/// that is unknown: the message says which.
#[derive(clap::Args)]
pub(crate) struct PushOptions {
    /// The file of rules; `-` is the standard input
    #[arg(value_name = "RULES")]
    file: PathBuf,
    /// The name of the rules. By default the file's name without its ending, as `serve` names its rules
    #[arg(long)]
    name: Option<String>,
    /// Refuse if the rules were changed after this revision
    #[arg(long, value_name = "REVISION")]
    seen: Option<u64>,
    /// Push the rules even if no server reports rules of this name, because such servers start later. Programs without
    /// a status page never report
    #[arg(long)]
    first: bool,
    #[command(flatten)]
    author: Author,
    #[command(flatten)]
    store: StoreOptions,
}

/// Put the rules from before the last push in force again
///
/// Without an earlier push these are the rules of each server's own file. One step is kept. After a rollback, or after
/// an operator ended pushed rules, a rollback is refused until rules are pushed again. To get other rules, push them.
///
/// The exit code is 0 if the rules are in force again, and 2 if nothing was changed, or if that is unknown: the message
/// says which. Nothing is changed if no server that runs now has this name, unless rules were pushed under it.
#[derive(clap::Args)]
pub(crate) struct RollbackOptions {
    /// The name of the rules, such as `rules` for those of rules.yaml
    #[arg(value_name = "NAME")]
    name: String,
    /// Refuse if the rules were changed after this revision
    #[arg(long, value_name = "REVISION")]
    seen: Option<u64>,
    #[command(flatten)]
    author: Author,
    #[command(flatten)]
    store: StoreOptions,
}

pub(crate) fn push(options: &PushOptions, output: &mut Output) -> Result<u8, String> {
    let text = files::read(&options.file)?;
    let names = match files::builder()?.check(&text) {
        Ok(report) => {
            check::print_warnings(output, &files::name(&options.file), report.warnings());
            report.unregistered().to_vec()
        }
        Err(error) => {
            output.problems(&files::name(&options.file), &error);
            return Ok(exit::PROBLEMS);
        }
    };
    let text = String::from_utf8(text).map_err(|_| "error: the file is not UTF-8".to_owned())?;
    let name = options.name.clone().or_else(|| rules_name(&options.file)).filter(|name| name != "-");
    let name = name.ok_or_else(|| "error: name the rules by --name".to_owned())?;
    let (by, why) = (options.author.kept_name(), &options.author.why);
    run(
        &options.store,
        async |fleet, limiter| {
            let unless = if names.is_empty() {
                limits::check(&options.file, &text, limiter)?;
                ""
            } else {
                ". `serve` cannot use them, because they have names that only programs register"
            };
            let advice = ["Use --name with a name", ", or use --first if its servers start later"];
            let (users, when) = users(&fleet, &name, options.first, advice).await?;
            let of_name = |entry: &FleetEntry| entry.target.name() == name;
            let is_same = |entry: &FleetEntry| entry.target.kind() == FleetKind::Rules && *entry.value == *text;
            let same = fleet.entries().into_iter().find(|entry| of_name(entry) && is_same(entry));
            let mut change = FleetChange::rules(&*name, text.clone());
            if let Some(seen) = options.seen {
                change = change.seen(seen);
            }
            let revision = fleet.change(&by, why, [change]).await.map_err(with_causes)?;
            let before = fleet.entries().into_iter().find(|entry| entry.target.is_former_rules(&name));
            let (instead, changes) = match (same, before) {
                (Some(same), _) => (
                    format!("which are those that {} put in force in revision {}", same.by, same.revision),
                    String::new(),
                ),
                (None, Some(before)) => (
                    format!("instead of those that {} put in force in revision {}", before.by, before.revision),
                    changes_of(&before.value, &text),
                ),
                (None, None) => {
                    let page = "\nThe store does not have these files, so nothing is compared here: the status page of \
                                each server says what changes.";
                    ("instead of those of their own files".to_owned(), page.to_owned())
                }
            };
            Ok(format!("revision {revision}: {users} these rules {when}, {instead}{unless}{changes}"))
        },
        output,
    )
}

pub(crate) fn rollback(options: &RollbackOptions, output: &mut Output) -> Result<u8, String> {
    let (by, why, name) = (options.author.kept_name(), &options.author.why, &options.name);
    run(
        &options.store,
        async |fleet, _| {
            // After a bad push no server may run.
            let is_of_rules = |kind| matches!(kind, FleetKind::Rules | FleetKind::FormerRules | FleetKind::UndoneRules);
            let is_pushed = |entry: &FleetEntry| entry.target.name() == name && is_of_rules(entry.target.kind());
            let is_known = fleet.entries().iter().any(is_pushed);
            let (users, when) = users(&fleet, name, is_known, ["Use a name", ""]).await?;
            let done = fleet.rollback(&by, why, name, options.seen).await.map_err(with_causes)?;
            let restored = match done.restored {
                Some(entry) => format!("the rules that {} put in force in revision {}", entry.by, entry.revision),
                None => "the rules of their own files".to_owned(),
            };
            let revision = done.revision;
            Ok(format!("revision {revision}: {users} {restored} {when}"))
        },
        output,
    )
}

/// The longest text that is compared, in bytes. The time grows with the square of the number of renamed rules.
const COMPARED_MAX: usize = 64 << 10;

/// Returns the lines which say what changes if other rules replace those in force.
fn changes_of(before: &str, now: &str) -> String {
    if before.len().max(now.len()) > COMPARED_MAX {
        return "\nA text is too long to be compared here: use `tower-ratelimit diff`.".to_owned();
    }
    match compare(before, now) {
        Ok(changes) if changes.is_empty() => "\nThe rules mean the same.".to_owned(),
        Ok(changes) => changes.iter().map(|change| format!("\n{}", diff::line(change))).collect(),
        Err(error) => format!("\nNot compared, because this version cannot read the rules from before: {error}"),
    }
}

/// Reads which processes there are. A store that is far or busy gets several tries.
async fn processes(fleet: &Fleet) -> Result<FleetProcesses, FleetError> {
    let tries = async {
        loop {
            match fleet.processes().await {
                Err(error) if error.kind() == FleetErrorKind::Unavailable => sleep(PAUSE).await,
                answer => return answer,
            }
        }
    };
    match timeout(WITHIN, tries).await {
        Ok(answer) => answer,
        Err(_) => fleet.processes().await, // for its error
    }
}

/// Says how many processes take the rules of a name, and when. `may_start_later` says that they need not run now.
///
/// # Errors
/// Returns an error, with the advice, if the processes that use these rules have to run now, and none does.
async fn users(
    fleet: &Fleet,
    name: &str,
    may_start_later: bool,
    [use_name, or_first]: [&str; 2],
) -> Result<(String, &'static str), Failure> {
    let unread = |error| Failure::setup(format_args!("nothing was changed: {}", text_with_causes(&error)));
    let FleetProcesses { count, rules, may_miss_processes, .. } = processes(fleet).await.map_err(unread)?;
    let named = format!("whose rules are named `{name}`");
    let (soon, least) = ("within two seconds", if may_miss_processes { "at least " } else { "" });
    match rules.get(name) {
        Some(1) => Ok((format!("{least}1 process {named} takes"), soon)),
        Some(users) => Ok((format!("{least}{users} processes {named} take"), soon)),
        None if may_miss_processes => {
            let who = format!("no process {named} reports to this store, which has no room for the reports of all");
            Ok((format!("{who}: any take"), soon))
        }
        None if may_start_later => {
            Ok((format!("no process {named} reports to this store now: such processes take"), "when they start"))
        }
        None if count == 0 => Err(Failure::setup(format_args!(
            "nothing was changed: no process reports to this store. Check the store and --prefix{or_first}"
        ))),
        None => {
            let known: Vec<String> = rules.keys().map(|name| format!("`{name}`")).collect();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            Err(Failure::setup(format_args!(
                "nothing was changed: of the {count} processes that report to this store, none has rules named \
                 `{name}`. {use_name} that they have: {known}{or_first}"
            )))
        }
    }
}

/// Observes nothing: errors are returned.
struct Nothing;

impl Observer for Nothing {}

/// Does something with the fleet and the limiter of a store, and prints what it returns.
fn run(
    store: &StoreOptions,
    act: impl AsyncFnOnce(Fleet, BoxLimiter) -> Result<String, Failure>,
    output: &mut Output,
) -> Result<u8, String> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| format!("error: no thread could be started: {error}"))?;
    let done = runtime.block_on(async {
        let Some(limiter) = store.connect(DEADLINE, &Arc::new(Nothing)).await? else {
            return Err(Failure::setup("name the store that the processes share, by --redis or --postgres"));
        };
        let fleet = Fleet::beside(&limiter).await.map_err(with_causes)?;
        let unread = |error| Failure::setup(format_args!("nothing was changed: {}", text_with_causes(&error)));
        fleet.wait_until_read(WITHIN).await.map_err(unread)?;
        act(fleet, limiter).await
    });
    match done {
        Ok(said) => {
            output.line(said);
            Ok(exit::FINE)
        }
        Err(Failure::Rules(file, error)) => {
            output.problems(&file, &error);
            Ok(exit::PROBLEMS)
        }
        Err(Failure::Setup(message)) => Err(message),
    }
}
