//! tower-ratelimit and its peers, side by side in one process: a table, the figures as JSON, and charts.
//!
//! ```sh
//! cargo run --release --manifest-path benches/peers/Cargo.toml            # all cases
//! cargo run --release --manifest-path benches/peers/Cargo.toml -- check   # one family of cases
//! cargo run --release --manifest-path benches/peers/Cargo.toml -- --only '10k' --seconds 2
//! ```
//!
//! The contenders take turns, A B C A B C …, so that other work of the machine slows all of them alike. The report has
//! the median round, and the ratio to the contender that each case names as the one to beat. Lost cases are printed, too.
//!
//! A contender is a file in `contenders/`, and a line in its `all`.

#![expect(clippy::disallowed_methods, reason = "a bench reads the clock")]

mod cases;
mod contender;
mod contenders;
mod race;
mod report;
mod requests;

use std::path::PathBuf;

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
    /// Runs nothing, and draws the charts anew from the JSON that is there.
    #[arg(long)]
    draw: bool,
    /// The folder of the JSON and the charts. Files there from runs of other families stay.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/results"))]
    results: PathBuf,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Family {
    /// A check in memory: nanoseconds.
    Check,
    /// The algorithms of tower-ratelimit: nanoseconds.
    Algorithms,
    /// The cost that a layer adds to a request: nanoseconds and allocations.
    Layer,
    /// The cost of each feature beside the plain request: nanoseconds.
    Features,
    /// One layer of three policies against three layers.
    Tiers,
    /// Bytes for each key.
    Memory,
    /// Measures how long checks take while ten million fresh keys come.
    Stream,
    /// A whole axum server under load: requests per second.
    Server,
    /// Checks through Redis: per second, and the server's time and calls for each.
    Redis,
}

/// Runs the cases of a family.
type Cases = fn(&race::Plan) -> Vec<report::Case>;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments = Arguments::parse();
    if arguments.draw {
        return report::draw(&arguments.results);
    }
    let is_wanted = |family| arguments.families.is_empty() || arguments.families.contains(&family);
    let plan = race::Plan::new(arguments.seconds, arguments.smoke, arguments.only);
    let runs: [(Family, &str, Cases); 9] = [
        (Family::Check, "check", cases::check::run),
        (Family::Algorithms, "algorithms", cases::algorithms::run),
        (Family::Layer, "layer", cases::layer::run),
        (Family::Features, "features", cases::features::run),
        (Family::Tiers, "tiers", cases::tiers::run),
        (Family::Memory, "memory", cases::memory::run),
        (Family::Stream, "stream", cases::stream::run),
        (Family::Server, "server", cases::server::run),
        (Family::Redis, "redis", cases::redis::run),
    ];
    for (family, name, run) in runs {
        if !is_wanted(family) {
            continue;
        }
        let cases = run(&plan);
        if !plan.is_smoke() && plan.is_whole() {
            report::write(&arguments.results, name, &cases)?;
        }
    }
    Ok(())
}
