//! One case: its figures, as they are measured and as JSON.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::race::Raced;

/// The name of the note that has the spread of a row.
pub const SPREAD: &str = "spread %";

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

/// The better one of two figures.
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

    pub fn row(&self, contender: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.contender == contender)
    }

    /// Returns what one contender costs relative to another: below 1 if it is the better one.
    pub fn cost(&self, contender: &str, to: &str) -> Option<f64> {
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
pub fn figure(value: f64) -> String {
    if value.abs() < 100.0 && value.fract() != 0.0 { format!("{value:.1}") } else { format!("{value:.0}") }
}
