//! The report: each case on the screen at once, its figures as JSON after the run. Charts and tables are made from the
//! JSON.

mod build;
mod case;
mod cells;
mod chart;
mod curve;
mod document;
mod headline;
mod results;
mod runs;
mod tables;

use std::path::Path;

use build::{Done, PROFILES};
use results::Everything;

pub use case::{Better, Case};
pub use results::{record, write};

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
