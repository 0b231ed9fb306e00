//! tower-ratelimit and its peers, side by side in one process: a table, the figures as JSON, and charts.
//!
//! ```sh
//! bash benches/peers/run.sh                                                         # everything, and the tables
//! cargo run --release --manifest-path benches/peers/Cargo.toml -- router check      # some families of cases
//! cargo run --release --manifest-path benches/peers/Cargo.toml -- --only '10k' --seconds 5
//! ```
//!
//! The contenders take turns, A B C A B C …, so that other work of the machine slows all of them alike. The report has
//! the median round, and the ratio to the contender that each case names as the one to beat. Lost cases are printed,
//! too.
//!
//! A contender is a file in `contenders/`, and a line in its `all`.

#![expect(clippy::disallowed_methods, reason = "a bench reads the clock")]

mod cases;
mod contender;
mod contenders;
mod counting;
mod race;
mod report;
mod requests;

use std::path::{Path, PathBuf};

use clap::{Parser, ValueEnum};

/// Compares tower-ratelimit with its peers.
#[derive(Parser)]
struct Arguments {
    /// Families of cases to run; all if none is named.
    #[arg(value_enum)]
    families: Vec<Family>,
    /// Only the cases whose names hold one of these words.
    #[arg(long)]
    only: Vec<String>,
    /// The duration of a case for each contender, in seconds.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Runs everything once, to see that it works; tells no figures worth reading.
    #[arg(long)]
    smoke: bool,
    /// Adds the ratios of this run to those of other runs, of which tables show medians. Also for some cases only.
    #[arg(long)]
    record: bool,
    /// Runs nothing. Draws the charts and writes the tables of README.md anew, from the JSON that is there.
    #[arg(long)]
    report: bool,
    /// A process that a case starts, and what it has to do.
    #[arg(long, hide = true, num_args = 1.., exclusive = true)]
    child: Vec<String>,
    /// The folder of the JSON, one folder in it for each profile, and of the charts. Files of other families stay.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/results"))]
    results: PathBuf,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Family {
    /// The cost that a layer adds to a request in an axum router: nanoseconds and allocations.
    Router,
    /// A whole axum server under load: requests per second, and the processor's time of each.
    Server,
    /// A check in memory: nanoseconds.
    Check,
    /// Instructions and cache misses of a check, counted by valgrind.
    Profile,
    /// A check and the memory in use, over the number of keys.
    Keys,
    /// The cost that a layer adds to a request to a service that does nothing: nanoseconds and allocations.
    Layer,
    /// The algorithms of tower-ratelimit: nanoseconds.
    Algorithms,
    /// The cost of each feature beside the plain request: nanoseconds.
    Features,
    /// One layer of three policies against three layers.
    Tiers,
    /// Bytes for each key.
    Memory,
    /// Measures how long checks take while ten million fresh keys come.
    Stream,
    /// Checks through Redis: per second, and the server's time and calls for each.
    Redis,
    /// Crates and seconds that a limiter adds to the build of an application.
    Adopt,
}

/// Runs the cases of a family.
type Cases = fn(&race::Plan) -> Vec<report::Case>;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments = Arguments::parse();
    if let [what, of @ ..] = arguments.child.as_slice() {
        child(what, of);
        return Ok(());
    }
    if arguments.report {
        let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md");
        return report::report(&arguments.results, &document);
    }
    let is_wanted = |family| arguments.families.is_empty() || arguments.families.contains(&family);
    let plan = race::Plan::new(arguments.seconds, arguments.smoke, arguments.only);
    let runs: [(Family, &str, Cases); 13] = [
        (Family::Router, "router", cases::layer::router),
        (Family::Server, "server", cases::server::run),
        (Family::Check, "check", cases::check::run),
        (Family::Profile, "profile", cases::profile::run),
        (Family::Keys, "keys", cases::keys::run),
        (Family::Layer, "layer", cases::layer::bare),
        (Family::Algorithms, "algorithms", cases::algorithms::run),
        (Family::Features, "features", cases::features::run),
        (Family::Tiers, "tiers", cases::tiers::run),
        (Family::Memory, "memory", cases::memory::run),
        (Family::Stream, "stream", cases::stream::run),
        (Family::Redis, "redis", cases::redis::run),
        (Family::Adopt, "adopt", cases::adopt::run),
    ];
    for (family, name, run) in runs {
        if !is_wanted(family) {
            continue;
        }
        let started = std::time::Instant::now();
        let cases = run(&plan);
        let seconds = started.elapsed().as_secs_f64();
        println!("\nThe cases of {name} took {seconds:.0} s.");
        if plan.is_smoke() {
            continue;
        }
        if arguments.record {
            report::record(&arguments.results, name, &cases)?;
        }
        if plan.is_whole() {
            report::write(&arguments.results, name, cases, seconds)?;
        }
    }
    Ok(())
}

/// Does what a case started this process for.
fn child(what: &str, of: &[String]) {
    match what {
        cases::server::CHILD => cases::server::child(of),
        cases::keys::CHILD => cases::keys::child(of),
        cases::profile::CHILD => cases::profile::child(of),
        cases::features::CHILD => cases::features::child(of),
        _ => panic!("nothing is named {what}"),
    }
}
