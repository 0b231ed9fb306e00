//! The report: each case on the screen at once, its figures as JSON after the run. Charts and tables are made from the
//! JSON.

mod chart;
mod curve;
mod document;
mod runs;
mod tables;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use serde::{Deserialize, Serialize};

use crate::race::Raced;

pub type Done = Result<(), Box<dyn std::error::Error>>;

/// The profiles of Cargo.toml, and what tables call them. The first one is what users have first.
const PROFILES: [(&str, &str); 2] = [("release", "Cargo's release profile"), ("thin", "thin LTO")];

/// The name of the note that has the spread of a row.
const SPREAD: &str = "spread %";

/// The results of a family in one run.
#[derive(Serialize, Deserialize)]
pub struct Results {
    /// When, where and with which compiler they were measured.
    pub taken: String,
    /// The seconds that the run took.
    #[serde(default)]
    pub seconds: f64,
    pub cases: Vec<Case>,
}

/// One case: a figure for each contender.
#[derive(Clone, Serialize, Deserialize)]
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

#[derive(Clone, Serialize, Deserialize)]
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
    pub fn steadiness(&mut self, raced: &Raced) {
        self.note(SPREAD, raced.spreads().into_iter());
        self.remark(raced.noise.remark());
    }

    pub fn remark(&mut self, remark: String) {
        self.remarks.push(remark);
    }

    /// Prints it.
    pub fn told(self) -> Self {
        println!("\n{} [{}, {} is better; ratios to {}]", self.name, self.unit, self.better.word(), self.against);
        for row in &self.rows {
            let ratio = row.ratio.map_or(String::new(), |ratio| format!("{ratio:.3}x"));
            print!("  {:<35} {:>10} {ratio:>9}", row.contender, figure(row.value));
            row.notes.iter().for_each(|(what, value)| print!("   {what} {}", figure(*value)));
            println!();
        }
        self.remarks.iter().for_each(|remark| println!("  ({remark})"));
        self
    }

    fn row(&self, contender: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.contender == contender)
    }

    /// Returns what one contender costs relative to another: below 1 if it is the better one.
    fn cost(&self, contender: &str, to: &str) -> Option<f64> {
        let (own, other) = (self.row(contender)?.value, self.row(to)?.value);
        Some(match self.better {
            Better::Lower => own / other,
            Better::Higher => other / own,
        })
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

/// Returns the profile that this program was built with. Cargo names the folder of its output after it.
fn profile() -> Option<String> {
    let program = std::env::current_exe().ok()?;
    Some(program.parent()?.file_name()?.to_str()?.to_owned())
}

/// Writes the figures of a family.
pub fn write(folder: &Path, family: &str, cases: Vec<Case>, seconds: f64) -> Done {
    let folder = folder.join(profile().ok_or("the program is in no folder")?);
    std::fs::create_dir_all(&folder)?;
    let json = folder.join(format!("{family}.json"));
    std::fs::write(
        &json,
        serde_json::to_string_pretty(&Results { taken: taken(), seconds: seconds.round(), cases })? + "\n",
    )?;
    println!("Written: {}", json.display());
    Ok(())
}

/// Says when, where and with which compiler this runs.
fn taken() -> String {
    let output = |program: &str, arguments: &[&str]| {
        let output = Command::new(program).args(arguments).current_dir(env!("CARGO_MANIFEST_DIR")).output().ok()?;
        Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let unknown = || "?".to_owned();
    let processors = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model =
        processors.lines().find_map(|line| Some(line.strip_prefix("model name")?.split_once(": ")?.1.to_owned()));
    let compiler = output("rustc", &["--version"]).and_then(|told| Some(told.split(' ').nth(1)?.to_owned()));
    format!(
        "{}, {} with {} processors, rustc {}, commit {}",
        output("date", &["+%F"]).unwrap_or_else(unknown),
        model.unwrap_or_else(unknown),
        std::thread::available_parallelism().map_or(0, usize::from),
        compiler.unwrap_or_else(unknown),
        output("git", &["describe", "--always", "--dirty"]).unwrap_or_else(unknown),
    )
}

/// Adds the ratios of a run to those of others, of which tables show medians.
pub fn record(folder: &Path, family: &str, cases: &[Case]) -> Done {
    runs::record(folder, taken(), profile().ok_or("the program is in no folder")?, family, cases)
}

/// All figures that are there.
struct Everything {
    /// By profile and family.
    results: BTreeMap<(String, String), Results>,
    runs: Vec<runs::Run>,
}

impl Everything {
    fn read(folder: &Path) -> Result<Self, Box<dyn std::error::Error>> {
        let mut all = BTreeMap::new();
        for (profile, _) in PROFILES {
            let folder = folder.join(profile);
            if !folder.exists() {
                continue;
            }
            for entry in std::fs::read_dir(folder)? {
                let json = entry?.path();
                if let Some(family) = json.file_stem().and_then(|stem| stem.to_str()) {
                    let results = serde_json::from_str(&std::fs::read_to_string(&json)?)?;
                    all.insert((profile.to_owned(), family.to_owned()), results);
                }
            }
        }
        Ok(Self { results: all, runs: runs::read(folder)? })
    }

    fn family(&self, profile: &str, family: &str) -> Option<&Results> {
        self.results.get(&(profile.to_owned(), family.to_owned()))
    }

    fn case(&self, profile: &str, family: &str, name: &str) -> Option<&Case> {
        self.family(profile, family)?.cases.iter().find(|case| case.name == name)
    }
}

/// Draws all charts and writes all tables anew, from the figures that are there. Charts show the first profile.
pub fn report(folder: &Path, document: &Path) -> Done {
    let all = Everything::read(folder)?;
    let (profile, _) = PROFILES[0];
    for ((of, family), results) in &all.results {
        let file = folder.join(format!("{family}.svg"));
        if of != profile {
            continue;
        } else if family == "keys" {
            curve::draw(&file, &results.cases)?;
        } else {
            chart::draw(&file, &results.cases)?;
        }
    }
    chart::draw(&folder.join("summary.svg"), &tables::summary(&all))?;
    document::rewrite(document, &|table| tables::table(&all, table))
}
