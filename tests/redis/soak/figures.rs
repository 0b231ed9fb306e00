//! The figures of a soak: times in a histogram, the memory and the descriptors of a process, and what the server says.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::shop::{self, CLIENTS};

/// The steps of a histogram within each doubling.
const STEPS: u32 = 8;

/// Times in buckets of at most an eighth of their size, from a microsecond to an hour. It never grows.
pub(super) struct Times([AtomicU64; 256]);

impl Default for Times {
    fn default() -> Self {
        Self([const { AtomicU64::new(0) }; 256])
    }
}

impl Times {
    pub(super) fn add(&self, time: Duration) {
        let steps = f64::from(STEPS) * (time.as_secs_f64() * 1e6).max(1.0).log2();
        self.0[(steps as usize).min(255)].fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the time in microseconds that this part of all times is within.
    pub(super) fn within(&self, part: f64) -> f64 {
        let counts = self.0.each_ref().map(|count| count.load(Ordering::Relaxed));
        let until = part * counts.iter().sum::<u64>() as f64;
        let mut seen = 0;
        let place = counts.iter().position(|count| {
            seen += count;
            seen as f64 >= until
        });
        f64::exp2(place.map_or(0.0, |place| (place + 1) as f64 / f64::from(STEPS)))
    }
}

/// Returns the resident memory of a process in bytes, without the pages of files such as its code.
pub(super) fn resident(process: u32) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("the process runs, on Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("Linux says it");
    line.trim().trim_end_matches(" kB").trim().parse::<f64>().expect("it is a number") * 1_024.0
}

pub(super) fn descriptors(process: u32) -> usize {
    std::fs::read_dir(format!("/proc/{process}/fd")).expect("the process runs, on Linux").count()
}

/// Returns the slope that lines through the points of all slices have together, with the least squares. Each line has a
/// height of its own, because each slice has a process of its own.
pub(super) fn slope(slices: &[Vec<(f64, f64)>]) -> f64 {
    let (mut along, mut across) = (0.0, 0.0);
    for points in slices {
        let count = points.len() as f64;
        let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
        let (x, y) = (mean(|point| point.0), mean(|point| point.1));
        along += points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum::<f64>();
        across += points.iter().map(|point| (point.0 - x).powi(2)).sum::<f64>();
    }
    if across > 0.0 { along / across } else { 0.0 }
}

/// Figures by name, as the server says them.
#[derive(Debug, Default)]
pub(super) struct Figures(BTreeMap<String, u64>);

impl Figures {
    /// Reads lines with a name and a number.
    pub(super) fn read(text: &str) -> Self {
        let of = |line: &str| {
            let (name, number) = line.split_once(' ')?;
            Some((name.to_owned(), number.parse().ok()?))
        };
        Self(text.lines().filter_map(of).collect())
    }

    pub(super) fn set(&mut self, name: impl Into<String>, number: u64) {
        self.0.insert(name.into(), number);
    }

    pub(super) fn text(&self) -> String {
        self.0.iter().fold(String::new(), |mut text, (name, number)| {
            let _ = writeln!(text, "{name} {number}");
            text
        })
    }

    pub(super) fn of(&self, name: &str) -> u64 {
        *self.0.get(name).unwrap_or_else(|| panic!("the server says no {name}: {self:?}"))
    }

    /// Returns whether every limiter has answered what is used.
    pub(super) fn is_whole(&self) -> bool {
        self.of("unanswered") == 0
    }

    /// Returns a percentile of each door's times.
    pub(super) fn times(&self, percentile: &str) -> String {
        let of = |(name, micros): (&String, &u64)| {
            let door = name.strip_suffix(percentile)?.trim_end_matches('.');
            Some(format!("{door} {:.2} ms", *micros as f64 / 1e3))
        };
        self.0.iter().filter_map(of).collect::<Vec<_>>().join(", ")
    }

    /// Takes from what is used what was used before.
    pub(super) fn without(mut self, before: &Self) -> Self {
        for (name, number) in self.0.iter_mut().filter(|(name, _)| name.contains(".used.")) {
            *number = number.saturating_sub(before.of(name));
        }
        self
    }

    /// Fails if a sum is wrong. `seconds` is how long clients sent.
    pub(super) fn check(&self, seconds: f64) {
        for door in shop::COUNTED {
            let (mut all, mut unknown) = (0, self.of(&format!("{door}.unknown")));
            for client in 0..CLIENTS {
                let [allowed, used] = ["allowed", "used"].map(|what| self.of(&format!("{door}.{what}.{client}")));
                all += allowed;
                // An allowed request is charged, over each kill of Redis.
                assert!(used >= allowed, "{door} of {client}: {allowed} were allowed, and {used} are used");
                unknown = unknown.checked_sub(used - allowed).unwrap_or_else(|| match door {
                    // Processes lose what they have leased, and each limiter of a fallback counts by itself.
                    "leased" | "fallback" => 0,
                    _ => panic!("{door} of {client}: {used} are used, and {allowed} were allowed: {self:?}"),
                });
                if door != "rules" {
                    // Each key has a bucket in the Redis and may have one in the fallback.
                    let buckets = if door == "fallback" { 2.0 } else { 1.0 };
                    let most = buckets * (shop::BURST as f64 + shop::PER_SECOND as f64 * (seconds + 1.0));
                    assert!(allowed as f64 <= most, "{door} of {client}: {allowed} were allowed, of {most}");
                }
            }
            assert!(all > 0, "{door} is never passed");
        }
        for door in shop::HELD {
            let most = self.of(&format!("{door}.most"));
            assert!((1..=shop::PLACES).contains(&most), "{most} requests of a key ran at {door}");
        }
        assert_eq!(self.of("unexpected"), 0, "a request has an outcome that it cannot have");
        assert_eq!(self.of("memory.unknown"), 0, "a limiter in memory never fails");
    }
}
