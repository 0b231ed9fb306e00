//! The results of families in files: those of this run, and all that are there.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::build::{Done, PROFILES, profile, taken};
use super::case::Case;
use super::runs;

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

/// Adds the ratios of a run to those of others, of which tables show medians.
pub fn record(folder: &Path, family: &str, cases: &[Case]) -> Done {
    runs::record(folder, taken(), profile().ok_or("the program is in no folder")?, family, cases)
}

/// All figures that are there.
pub struct Everything {
    /// By profile and family.
    pub results: BTreeMap<(String, String), Results>,
    pub runs: Vec<runs::Run>,
}

impl Everything {
    pub fn read(folder: &Path) -> Result<Self, Box<dyn std::error::Error>> {
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

    pub fn family(&self, profile: &str, family: &str) -> Option<&Results> {
        self.results.get(&(profile.to_owned(), family.to_owned()))
    }

    pub fn case(&self, profile: &str, family: &str, name: &str) -> Option<&Case> {
        self.family(profile, family)?.cases.iter().find(|case| case.name == name)
    }
}
