//! A report as data, from which the forms are written.

use super::advice::{Advice, Suggested};
use super::candidate::CurveLimit;
use super::escape::Shown;
use super::numbers::{count, instant};
use crate::replay::order::FileOrder;
use crate::replay::read::log::LogFile;
use crate::replay::tally::WINDOWS;

/// The names of [`WINDOWS`].
pub(crate) const WINDOW_NAMES: [&str; WINDOWS.len()] = ["1 s", "1 min", "1 h", "1 day"];

/// The shares of clients whose peak use is reported, in tenths of a percent.
pub(crate) const PERCENTILES: [(u64, &str); 6] =
    [(500, "p50"), (900, "p90"), (950, "p95"), (990, "p99"), (999, "p99.9"), (1_000, "max")];

pub(crate) struct Report {
    /// The conclusions, in a few sentences.
    pub(crate) verdict: Vec<String>,
    pub(crate) read: Read,
    /// Warnings, which the reader should see first.
    pub(crate) warnings: Vec<String>,
    pub(crate) policies: Vec<PolicyReport>,
}

pub(crate) struct Read {
    pub(crate) format: String,
    pub(crate) files: Vec<FileRead>,
    pub(crate) lines: u64,
    pub(crate) requests: u64,
    pub(crate) unreadable: u64,
    pub(crate) other: u64,
    pub(crate) too_long: u64,
    pub(crate) samples: Vec<Shown>,
    pub(crate) late: u64,
    pub(crate) ahead: u64,
    pub(crate) crowded: u64,
    pub(crate) is_coarse: bool,
    pub(crate) first_us: u64,
    pub(crate) last_us: u64,
    pub(crate) addresses: u64,
    /// Whether there were more addresses than were counted.
    pub(crate) has_more_addresses: bool,
    pub(crate) without_address: u64,
    /// Requests that the log says were answered with 429.
    pub(crate) limited_before: u64,
    pub(crate) outcomes: Vec<(&'static str, u64)>,
}

/// The lines of a file that were read, and those that were left out.
#[derive(Clone)]
pub(crate) struct FileRead {
    pub(crate) name: Shown,
    pub(crate) lines: u64,
    pub(crate) requests: u64,
    pub(crate) unreadable: u64,
    /// Lines that are not requests, or those of others.
    pub(crate) other: u64,
    pub(crate) late: u64,
    pub(crate) ahead: u64,
    /// The first and the last time of its requests.
    pub(crate) span_us: Option<(u64, u64)>,
}

impl FileRead {
    pub(crate) fn new(file: &LogFile, order: &FileOrder) -> Self {
        Self {
            name: file.name.clone(),
            lines: file.reading.lines,
            requests: order.requests,
            unreadable: file.reading.unreadable,
            other: file.reading.other,
            late: order.late,
            ahead: order.ahead,
            span_us: order.span_us,
        }
    }

    pub(crate) fn left_out(&self) -> u64 {
        self.unreadable + self.late + self.ahead
    }
}

pub(crate) struct PolicyReport {
    pub(crate) name: Shown,
    pub(crate) quota: String,
    pub(crate) mode: &'static str,
    pub(crate) requests: u64,
    pub(crate) refused: u64,
    pub(crate) clients: u64,
    pub(crate) touched: u64,
    /// All requests of the clients that were refused at least once.
    pub(crate) of_touched: u64,
    /// Requests refused and clients touched if the requests of a second come at once. `None` if the log has finer
    /// stamps.
    pub(crate) as_burst: Option<(u64, u64)>,
    /// Requests of clients that were not followed.
    pub(crate) unfollowed: u64,
    pub(crate) longest_run: u64,
    /// Clients that are likely no abusers, and their refused requests. `None` if the log has no status.
    pub(crate) likely_false: Option<(u64, u64)>,
    /// Refused clients whose user agent is missing, or names a crawler or a script. `None` if the log has no user
    /// agents, or if the policy's key is not a client.
    pub(crate) automated: Option<u64>,
    pub(crate) hours: Hours,
    pub(crate) worst: Vec<Worst>,
    /// For each window and each percentile, the peak use of a client.
    pub(crate) peaks: [[u32; PERCENTILES.len()]; WINDOWS.len()],
    /// For each percentile, the most units that a client had in flight. `None` if the log has no durations.
    pub(crate) in_flight: Option<[u32; PERCENTILES.len()]>,
    /// Other limits, of the kind of the policy's own.
    pub(crate) curve: Option<CurveReport>,
    /// Limits of requests in flight, beside those of a rate.
    pub(crate) curve_in_flight: Option<CurveReport>,
}

/// Requests and refusals over time, in parts of equal length.
pub(crate) struct Hours {
    pub(crate) length_us: u64,
    /// When a part begins, its requests, and those refused. Parts without requests are left out.
    pub(crate) parts: Vec<(u64, u64, u64)>,
}

pub(crate) struct Worst {
    pub(crate) who: Shown,
    pub(crate) requests: u64,
    pub(crate) refused: u64,
    pub(crate) longest_run: u64,
    pub(crate) answered: u64,
    pub(crate) answered_well: u64,
    /// About how many user agents it sent.
    pub(crate) agents: u32,
    /// Addresses of its /24 or /48 in the log.
    pub(crate) neighbours: Option<u64>,
    /// When it was refused first and last.
    pub(crate) refused_us: (u64, u64),
    /// The first paths at which it was refused, and how often.
    pub(crate) paths: Vec<(Shown, u64)>,
    /// Its refusals at other paths.
    pub(crate) elsewhere: u64,
    /// The user agent of its first refused request. `None` if the log has no user agents.
    pub(crate) agent: Option<Shown>,
    pub(crate) is_automated: bool,
}

impl Worst {
    /// Returns what it was refused for, in lines: the paths, the user agent, and when.
    pub(crate) fn deeds(&self) -> Vec<String> {
        let mut paths: Vec<String> =
            self.paths.iter().map(|(path, refused)| format!("{path} ({})", count(*refused))).collect();
        if self.elsewhere > 0 {
            paths.push(format!("other paths ({})", count(self.elsewhere)));
        }
        let agent = self.agent.as_ref().map(|agent| match &*agent.0 {
            "" => "no user agent".to_owned(),
            agent => agent.to_owned(),
        });
        let (first, last) = self.refused_us;
        let (first, last) = (instant(first), instant(last));
        let same_day = last.get(..10).filter(|day| first.starts_with(day)).and_then(|_| last.get(11..));
        let times = if first == last { first } else { format!("{first} to {}", same_day.unwrap_or(&last)) };
        [paths.join(", ")].into_iter().chain(agent).chain([times]).filter(|line| !line.is_empty()).collect()
    }
}

pub(crate) struct CurveReport {
    /// The limit of the policy's own quota.
    pub(super) own_limit: u64,
    pub(crate) limits: Vec<CurveLimit>,
    /// The index of the limit from which on more limit helps little.
    pub(crate) knee: Option<usize>,
    pub(crate) advice: Vec<Advice>,
    /// The rule of the advice that is taken, ready to paste.
    pub(crate) rule: Option<Suggested>,
}

/// The limit that a report suggests.
pub(crate) enum Suggestion<'c> {
    /// The one that was replayed.
    Keep,
    Limit(&'c CurveLimit),
    None,
}

impl CurveReport {
    pub(crate) fn suggestion(&self) -> Suggestion<'_> {
        match self.rule.as_ref().and_then(|rule| self.limits.get(rule.limit)) {
            Some(limit) if limit.limit == self.own_limit => Suggestion::Keep,
            Some(limit) => Suggestion::Limit(limit),
            None => Suggestion::None,
        }
    }
}
