//! The report: a table at once, and the figures as JSON with a chart at the end.

mod chart;

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::race::Noise;

/// One case: a figure for each contender.
#[derive(Serialize, Deserialize)]
pub struct Case {
    pub name: String,
    pub unit: String,
    pub better: Better,
    /// The contender that ratios are to.
    pub against: String,
    pub rows: Vec<Row>,
    pub remarks: Vec<String>,
}

/// Which of two figures is the better one.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    Lower,
    Higher,
}

#[derive(Serialize, Deserialize)]
pub struct Row {
    pub contender: String,
    pub value: f64,
    /// To the contender that the case is against, if that takes part.
    pub ratio: Option<f64>,
    /// Other figures of it.
    pub notes: BTreeMap<String, f64>,
}

impl Case {
    pub fn new(
        name: String,
        unit: &'static str,
        better: Better,
        against: &'static str,
        names: Vec<&'static str>,
        values: &[f64],
    ) -> Self {
        let base = names.iter().zip(values).find(|(name, _)| **name == against).map(|(_, value)| *value);
        let row = |(name, value): (&&str, &f64)| Row {
            contender: (*name).to_owned(),
            value: *value,
            ratio: base.map(|base| value / base),
            notes: BTreeMap::new(),
        };
        let rows: Vec<Row> = names.iter().zip(values).map(row).collect();
        Self { name, unit: unit.to_owned(), better, against: against.to_owned(), rows, remarks: Vec::new() }
    }

    /// Another figure of each contender.
    pub fn note(&mut self, what: &'static str, values: impl Iterator<Item = f64>) {
        for (row, value) in self.rows.iter_mut().zip(values) {
            row.notes.insert(what.to_owned(), value);
        }
    }

    /// The spread of each contender's rounds, and the noise of the machine.
    pub fn steadiness(&mut self, spreads: &[f64], noise: &Noise) {
        self.note("spread %", spreads.iter().copied());
        self.remark(noise.remark());
    }

    pub fn remark(&mut self, remark: String) {
        self.remarks.push(remark);
    }

    /// Prints it.
    pub fn told(self) -> Self {
        println!("\n{} [{}, {} is better; ratios to {}]", self.name, self.unit, self.better.word(), self.against);
        for row in &self.rows {
            let ratio = row.ratio.map_or(String::new(), |ratio| format!("{ratio:.3}x"));
            print!("  {:<30} {:>10} {ratio:>9}", row.contender, figure(row.value));
            row.notes.iter().for_each(|(what, value)| print!("   {what} {}", figure(*value)));
            println!();
        }
        self.remarks.iter().for_each(|remark| println!("  ({remark})"));
        self
    }
}

impl Better {
    fn word(self) -> &'static str {
        match self {
            Self::Lower => "lower",
            Self::Higher => "higher",
        }
    }
}

/// With as many digits as mean something.
fn figure(value: f64) -> String {
    if value.abs() < 100.0 && value.fract() != 0.0 { format!("{value:.1}") } else { format!("{value:.0}") }
}

/// The figures that a newcomer asks for first.
const SUMMARY: [(&str, &str); 9] = [
    ("layer", "allowed, 10k, with header fields, around an axum router"),
    ("layer", "allowed, 10k, without header fields, around an axum router"),
    ("layer", "refused, 10k, with header fields, around an axum router"),
    ("server", "everything allowed, with header fields, one server thread"),
    ("server", "everything refused, with header fields, one server thread"),
    ("check", "allowed, 10k address"),
    ("check", "allowed, 1M text"),
    ("check", "denied, 10k address"),
    ("redis", "10k keys, 200 in flight"),
];

/// Writes a family's figures and chart, and the summary of all families anew.
pub fn write(folder: &Path, family: &str, cases: &[Case]) -> Result<(), Box<dyn std::error::Error>> {
    std::fs::create_dir_all(folder)?;
    let json = folder.join(format!("{family}.json"));
    std::fs::write(&json, serde_json::to_string_pretty(cases)? + "\n")?;
    let chart = folder.join(format!("{family}.svg"));
    chart::draw(&chart, cases)?;
    println!("\nWritten: {} and {}", json.display(), chart.display());
    summarize(folder)
}

/// Draws all charts anew, from the figures that are there.
pub fn draw(folder: &Path) -> Result<(), Box<dyn std::error::Error>> {
    for entry in std::fs::read_dir(folder)? {
        let json = entry?.path();
        if json.extension().is_some_and(|extension| extension == "json") {
            chart::draw(&json.with_extension("svg"), &read(&json)?)?;
        }
    }
    summarize(folder)
}

fn read(json: &Path) -> Result<Vec<Case>, Box<dyn std::error::Error>> {
    Ok(serde_json::from_str(&std::fs::read_to_string(json)?)?)
}

/// Draws the cases of the summary, as far as their families have been run.
fn summarize(folder: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let mut cases = Vec::new();
    for (family, name) in SUMMARY {
        let json = folder.join(format!("{family}.json"));
        if !json.exists() {
            continue;
        }
        let mut wanted = read(&json)?.into_iter().filter(|case| case.name == name);
        cases.extend(wanted.next().map(|case| Case { name: format!("{family}: {name}"), ..case }));
    }
    chart::draw(&folder.join("summary.svg"), &cases)
}
