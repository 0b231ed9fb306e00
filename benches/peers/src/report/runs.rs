//! Runs that were repeated: the ratios of each, and medians of those that belong together.

use std::io::ErrorKind;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::build::{Done, PROFILES};
use super::case::Case;
use super::cells::{NONE, lines, ratio};
use super::headline::peer_in_the_first_table;
use crate::contenders::{ALIKE, NAME};
use crate::race::median;

/// The file, in the folder of the results.
const FILE: &str = "runs.json";

/// One run of a family.
#[derive(Serialize, Deserialize)]
pub struct Run {
    /// When, where and with which compiler it was measured.
    taken: String,
    profile: String,
    family: String,
    cases: Vec<Ratios>,
}

/// This crate's cost relative to a peer.
#[derive(Serialize, Deserialize)]
struct Ratios {
    case: String,
    as_it_comes: f64,
    like_for_like: f64,
}

/// Adds a run to those of before.
pub fn record(folder: &Path, taken: String, profile: String, family: &str, cases: &[Case]) -> Done {
    let mut runs = read(folder)?;
    let ratios = |case: &Case| {
        let peer = peer_in_the_first_table(family, &case.name).unwrap_or(&case.against);
        let cost = |own: &str| Some((case.cost(own, peer)? * 1e3).round() / 1e3);
        Some(Ratios { case: case.name.clone(), as_it_comes: cost(NAME)?, like_for_like: cost(ALIKE)? })
    };
    let cases = cases.iter().filter_map(ratios).collect();
    runs.push(Run { taken, profile, family: family.to_owned(), cases });
    std::fs::write(folder.join(FILE), serde_json::to_string_pretty(&runs)? + "\n")?;
    Ok(())
}

/// Returns all runs, the oldest first.
pub fn read(folder: &Path) -> Result<Vec<Run>, Box<dyn std::error::Error>> {
    match std::fs::read_to_string(folder.join(FILE)) {
        Ok(runs) => Ok(serde_json::from_str(&runs)?),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error.into()),
    }
}

/// A table for each day and commit, the newest first: medians of this family's ratios, with the lowest and the highest.
pub fn table(runs: &[Run], family: &str) -> String {
    let runs: Vec<&Run> = runs.iter().filter(|run| run.family == family).collect();
    let mut all: Vec<&str> = Vec::new();
    for run in runs.iter().rev() {
        if !all.contains(&run.together()) {
            all.push(run.together());
        }
    }
    let of =
        |together: &&str| group(&runs.iter().copied().filter(|run| run.together() == *together).collect::<Vec<_>>());
    all.iter().map(of).collect::<Vec<_>>().join("\n")
}

/// The name of the processor in a line that says where something was measured.
pub fn machine(taken: &str) -> String {
    let machine = taken.split(", ").nth(1).unwrap_or_default();
    let name = machine.split_once(" with ").map_or(machine, |(name, _)| name);
    name.replace("(R)", "").trim_end_matches(" Processor").to_owned()
}

/// The machines on which runs were repeated, in the order in which they were used first.
pub fn machines(runs: &[Run]) -> Vec<String> {
    let mut all = Vec::new();
    for run in runs {
        if !all.contains(&run.machine()) {
            all.push(run.machine());
        }
    }
    all
}

/// The median ratio of a case among the newest runs of a machine that belong together, as it comes and like for like:
/// `None` if they do not have the case.
pub fn newest(runs: &[Run], machine: &str, family: &str, profile: &str, case: &str) -> Option<[f64; 2]> {
    let is_newest = |run: &&Run| run.family == family && run.machine() == machine;
    let together = runs.iter().rev().find(is_newest)?.together();
    let is_of = |run: &&Run| run.family == family && run.profile == profile && run.together() == together;
    let found: Vec<&Ratios> =
        runs.iter().filter(is_of).flat_map(|run| &run.cases).filter(|ratios| ratios.case == case).collect();
    let of = |of: fn(&Ratios) -> f64| median(found.iter().map(|ratios| of(ratios)).collect());
    (!found.is_empty()).then(|| [of(|ratios| ratios.as_it_comes), of(|ratios| ratios.like_for_like)])
}

/// The table of the runs of one day and commit.
fn group(runs: &[&Run]) -> String {
    let Some(first) = runs.first() else { return String::new() };
    let names: Vec<&str> = first.cases.iter().map(|ratios| ratios.case.as_str()).collect();
    let of_profile = |(profile, told): (&str, &str)| {
        let runs: Vec<&Run> = runs.iter().copied().filter(|run| run.profile == profile).collect();
        let count = if runs.len() == 1 { "1 run".to_owned() } else { format!("{} runs", runs.len()) };
        let row = |own: &str, of: fn(&Ratios) -> f64| {
            let cell = |name: &&str| {
                let ratios = runs.iter().flat_map(|run| &run.cases).filter(|ratios| ratios.case == *name).map(of);
                with_bounds(ratios.collect())
            };
            std::iter::once(format!("{own}{told}, {count}")).chain(names.iter().map(cell)).collect()
        };
        [row("as it comes", |ratios| ratios.as_it_comes), row("like for like", |ratios| ratios.like_for_like)]
    };
    let profiles = [(PROFILES[0].0, ""), (PROFILES[1].0, ", thin LTO")];
    let was_run = |(profile, _): &(&str, &str)| runs.iter().any(|run| run.profile == *profile);
    let rows = profiles.into_iter().filter(was_run).map(of_profile);
    let head = std::iter::once(String::new()).chain(names.iter().map(|name| (*name).to_owned())).collect::<Vec<_>>();
    format!("{}:\n\n{}", first.together(), lines(&head, rows.into_iter().flatten()))
}

/// The median, with the lowest and the highest.
fn with_bounds(mut values: Vec<f64>) -> String {
    values.sort_by(f64::total_cmp);
    match values[..] {
        [lowest, .., highest] => format!("{} ({lowest:.2} to {highest:.2})", ratio(Some(median(values)), 1.0)),
        [only] => ratio(Some(only), 1.0),
        [] => NONE.to_owned(),
    }
}

impl Run {
    fn machine(&self) -> String {
        machine(&self.taken)
    }

    /// Runs of which this is the same belong together. A run writes files, so the next one sees changes in its folder.
    fn together(&self) -> &str {
        self.taken.trim_end_matches("-dirty")
    }
}
