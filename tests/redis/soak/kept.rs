//! What a slice of a soak keeps for the next one: the data of its Redis, what its limiters said was used, and the memory
//! of its process.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use super::figures::{Figures, slope};
use super::shop::CLIENTS;

/// The doors whose units are all in Redis, of which nothing comes back. A lease that is not used is returned.
const ON_REDIS: [&str; 2] = ["redis", "grpc"];

/// The samples of the memory of a slice: seconds since it began, and bytes.
pub(super) type Samples = Vec<(f64, f64)>;

/// The folder of a soak that has slices. `None` if it has none.
pub(super) struct Kept(Option<PathBuf>);

impl Kept {
    /// Finds the folder that `SOAK_KEEPS` names.
    pub(super) fn find() -> Self {
        Self::of(std::env::var_os("SOAK_KEEPS").map(PathBuf::from))
    }

    fn of(folder: Option<PathBuf>) -> Self {
        let folder = folder.map(|folder| {
            fs::create_dir_all(folder.join("redis")).expect("there is room");
            folder.canonicalize().expect("it is there")
        });
        Self(folder)
    }

    fn read(&self, name: &str) -> String {
        self.0.as_ref().and_then(|folder| fs::read_to_string(folder.join(name)).ok()).unwrap_or_default()
    }

    /// Returns the options of Redis with which it has the data of the slice before.
    pub(super) fn options(&self) -> Vec<String> {
        let of = |folder: &Path| ["--dir", folder.join("redis").to_str().expect("it is text")].map(str::to_owned);
        self.0.as_deref().map_or_else(Vec::new, |folder| of(folder).to_vec())
    }

    /// Fails unless what is used in the beginning is what was used in the end of the slice before.
    pub(super) fn check(&self, beginning: &Figures) {
        let text = self.read("used");
        if text.is_empty() {
            return;
        }
        let end = Figures::read(&text);
        // A slice that is ended before its time leaves units of which nothing is known here.
        self.0.iter().for_each(|folder| fs::remove_file(folder.join("used")).expect("it is there"));
        for name in used() {
            assert_eq!(beginning.of(&name), end.of(&name), "{name} is not what it was in the end of the slice before");
        }
    }

    /// Keeps the figures and the samples of this slice. Returns the samples of all slices.
    pub(super) fn keep(&self, end: &Figures, samples: Samples) -> Vec<Samples> {
        let (mut all, mut text) = (read_samples(&self.read("memory")), Figures::default());
        all.push(samples);
        if let Some(folder) = &self.0 {
            used().into_iter().for_each(|name| text.set(name.clone(), end.of(&name)));
            fs::write(folder.join("used"), text.text()).expect("there is room");
            fs::write(folder.join("memory"), write_samples(&all)).expect("there is room");
        }
        all
    }
}

/// Returns the names of the figures that one slice has of another.
fn used() -> Vec<String> {
    let of = |door: &&str| (0..CLIENTS).map(|client| format!("{door}.used.{client}")).collect::<Vec<_>>();
    ON_REDIS.iter().flat_map(of).collect()
}

fn write_samples(slices: &[Samples]) -> String {
    let mut text = String::new();
    for samples in slices {
        let _ = writeln!(text, "slice");
        for (seconds, bytes) in samples {
            let _ = writeln!(text, "{seconds:.1} {bytes:.0}");
        }
    }
    text
}

fn read_samples(text: &str) -> Vec<Samples> {
    let number = |word: &str| word.parse().expect("it is a number");
    let sample = |line: &str| line.split_once(' ').map(|(seconds, bytes)| (number(seconds), number(bytes)));
    text.split("slice\n").skip(1).map(|slice| slice.lines().filter_map(sample).collect()).collect()
}

#[test]
fn slices_of_a_soak_add_up() {
    let folder = std::env::temp_dir().join(format!("tower-ratelimit-kept-{}", std::process::id()));
    let of_used = |number: u64| {
        let mut figures = Figures::default();
        used().into_iter().for_each(|name| figures.set(name, number));
        figures
    };
    let (first, second) = (vec![(0.0, 5e6), (10.0, 7e6)], vec![(0.0, 90e6), (10.0, 92e6)]);
    let kept = || Kept::of(Some(folder.clone()));
    kept().check(&of_used(0));
    assert_eq!(kept().keep(&of_used(3), first.clone()), std::slice::from_ref(&first));
    kept().check(&of_used(3));
    let all = kept().keep(&of_used(4), second.clone());
    assert_eq!(all, [first, second]);
    assert!((slope(&all) - 2e5).abs() < 1.0, "what lies between two slices is no growth: {}", slope(&all));
    assert!(std::panic::catch_unwind(|| kept().check(&of_used(3))).is_err(), "units were lost");
    fs::remove_dir_all(folder).unwrap();
    assert!(Kept::of(None).options().is_empty());
}
