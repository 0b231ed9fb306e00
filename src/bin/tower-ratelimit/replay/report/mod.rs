//! The report, as data. Each of its forms prints the same numbers.

mod advice;
mod chart;
mod escape;
mod html;
mod json;
pub(crate) mod numbers;
mod text;

use std::collections::HashMap;
use std::net::IpAddr;

use self::advice::Advice;
pub(crate) use self::escape::Shown;
use super::curve::Point;
use super::limits::Notes;
use super::order::Odd;
use super::read::log::Reading;
use super::tally::{Addresses, Client, Tally, WINDOWS, network};

/// The names of [`WINDOWS`].
pub(crate) const WINDOW_NAMES: [&str; WINDOWS.len()] = ["1 s", "1 min", "1 h", "1 day"];

/// The shares of clients whose peak use is reported, in tenths of a percent.
pub(crate) const PERCENTILES: [(u64, &str); 6] =
    [(500, "p50"), (900, "p90"), (950, "p95"), (990, "p99"), (999, "p99.9"), (1_000, "max")];

const WORST: usize = 10;

/// A limiter's time ends 12 years after the limiter was built.
const LIMITER_REACH_US: u64 = 11 * 366 * 86_400_000_000;

/// Everything that was counted while the log was read.
pub(crate) struct Counted {
    pub(crate) format: String,
    pub(crate) reading: Reading,
    pub(crate) odd: Odd,
    pub(crate) window_us: u64,
    pub(crate) requests: u64,
    pub(crate) first_us: u64,
    pub(crate) last_us: u64,
    pub(crate) without_address: u64,
    pub(crate) limited_before: u64,
    pub(crate) addresses: Addresses,
    /// The kinds of outcomes and how often they were.
    pub(crate) outcomes: Vec<(&'static str, u64)>,
    pub(crate) notes: Notes,
    /// Curve states that were forgotten.
    pub(crate) curve_forgotten: u64,
    /// Policies that came when there were enough curves.
    pub(crate) without_curve: u64,
    pub(crate) max_clients: usize,
    pub(crate) tallies: Vec<Tally>,
}

pub(crate) struct Report {
    pub(crate) read: Read,
    /// Warnings, which the reader should see first.
    pub(crate) warnings: Vec<String>,
    pub(crate) policies: Vec<PolicyReport>,
}

pub(crate) struct Read {
    pub(crate) format: String,
    pub(crate) lines: u64,
    pub(crate) requests: u64,
    pub(crate) unreadable: u64,
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

pub(crate) struct PolicyReport {
    pub(crate) name: Shown,
    pub(crate) quota: String,
    pub(crate) limit: u64,
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
    pub(crate) hours: Hours,
    pub(crate) worst: Vec<Worst>,
    /// For each window and each percentile, the peak use of a client.
    pub(crate) peaks: [[u32; PERCENTILES.len()]; WINDOWS.len()],
    pub(crate) curve: Option<CurveReport>,
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
}

pub(crate) struct CurveReport {
    pub(crate) limits: Vec<CurveLimit>,
    /// The index of the limit from which on more limit helps little.
    pub(crate) knee: Option<usize>,
    pub(crate) advice: Vec<Advice>,
    /// The rule of the advice that is taken, ready to paste.
    pub(crate) rule: Option<String>,
}

pub(crate) struct CurveLimit {
    pub(crate) limit: u64,
    pub(crate) quota: String,
    pub(crate) all: Point,
    pub(crate) first: Point,
    pub(crate) second: Point,
    /// The refusals of each of the clients that are refused most, at most ten.
    pub(crate) worst: Vec<u64>,
}

/// The form of a suggestion: a rule of its own, or a line of a rule.
pub(crate) enum Paste {
    /// The words of the rule's `key`.
    Rule(String),
    Candidate,
}

impl Report {
    pub(crate) fn new(counted: &Counted, show_addresses: bool, paste: &Paste) -> Self {
        let neighbours = Neighbours::new(&counted.addresses);
        let read = Read {
            format: counted.format.clone(),
            lines: counted.reading.lines,
            requests: counted.requests,
            unreadable: counted.reading.unreadable,
            too_long: counted.reading.too_long,
            samples: counted.reading.samples.iter().map(|line| Shown::sample(line, show_addresses)).collect(),
            late: counted.odd.late,
            ahead: counted.odd.ahead,
            crowded: counted.odd.crowded,
            is_coarse: counted.odd.is_coarse,
            first_us: counted.first_us,
            last_us: counted.last_us,
            addresses: counted.addresses.counts.len() as u64,
            has_more_addresses: counted.addresses.others > 0,
            without_address: counted.without_address,
            limited_before: counted.limited_before,
            outcomes: counted.outcomes.clone(),
        };
        let span_us = counted.last_us.saturating_sub(counted.first_us);
        let policies = counted.tallies.iter();
        let policies = policies
            .map(|tally| policy(tally, span_us, counted.odd.is_coarse, show_addresses, &neighbours, paste))
            .collect();
        let warnings = warnings(counted, &read, show_addresses);
        Self { read, warnings, policies }
    }
}

fn warnings(counted: &Counted, read: &Read, show_addresses: bool) -> Vec<String> {
    use self::numbers::{count, share};
    let mut warnings = Vec::new();
    let top = counted.addresses.counts.iter().max_by_key(|(address, count)| (**count, **address));
    if let Some((address, requests)) = top.filter(|(_, requests)| u64::from(**requests) * 2 > read.requests) {
        warnings.push(format!(
            "One address, {}, sent {} of all requests. If it is a proxy or a load balancer, the log has its address instead of \
             the clients': log the client's address, or use --trusted-proxies.",
            Shown::address(*address, show_addresses).0,
            share(u64::from(*requests), read.requests)
        ));
    }
    if read.unreadable > 0 {
        warnings.push(format!(
            "{} of {} lines ({}) could not be read as {}{}.",
            count(read.unreadable),
            count(read.lines),
            share(read.unreadable, read.lines),
            read.format,
            if read.too_long > 0 {
                format!("; {} of them are longer than 64 KiB", count(read.too_long))
            } else {
                String::new()
            }
        ));
    }
    if read.late > 0 {
        warnings.push(format!(
            "{} lines came more than {} after later ones and were left out. Sort the log, give the files in the order of their \
             time, or raise --window.",
            count(read.late),
            numbers::duration(counted.window_us)
        ));
    }
    if read.ahead > 0 {
        warnings.push(format!(
            "{} lines are dated more than 8 days after the others and were left out.",
            count(read.ahead)
        ));
    }
    if read.crowded > 0 {
        warnings.push(format!(
            "{} requests were not put in order over the whole window, because too many fell into it.",
            count(read.crowded)
        ));
    }
    if read.limited_before > 0 {
        warnings.push(format!(
            "{} requests were answered with 429, so the log was limited already. Without that limit their clients might have \
             sent more.",
            count(read.limited_before)
        ));
    }
    if read.without_address > 0 {
        warnings.push(format!("{} requests have no client's address that could be read.", count(read.without_address)));
    }
    let keyless = read.outcomes.iter().find(|(kind, _)| *kind == "key_missing").map_or(0, |(_, requests)| *requests);
    if keyless > 0 {
        warnings.push(format!(
            "{} requests have no key for a rule, which refuses them with 400. The log may lack what the key is made of.",
            count(keyless)
        ));
    }
    let unfollowed: u64 = counted.tallies.iter().map(|tally| tally.unfollowed).sum();
    if unfollowed > 0 {
        warnings.push(format!(
            "The first {} clients were followed one by one (--max-clients). {} requests of others are only in the totals of \
             requests and refusals.",
            count(counted.max_clients as u64),
            count(unfollowed)
        ));
    }
    if read.has_more_addresses {
        warnings.push(format!("The log has more addresses than the {} that were counted.", count(read.addresses)));
    }
    let forgotten = counted.notes.forgotten;
    if forgotten > 0 {
        warnings.push(format!(
            "The limiter forgot {} clients that were at their limits, because it had too many to keep. Raise --max-clients.",
            count(forgotten)
        ));
    }
    if counted.curve_forgotten > 0 {
        warnings.push(format!(
            "The curves' limiter forgot {} clients that were at their limits, so the curves show too few refusals.",
            count(counted.curve_forgotten)
        ));
    }
    if counted.without_curve > 0 {
        warnings.push(format!("{} further policies have no curve and no suggestions.", count(counted.without_curve)));
    }
    if read.last_us.saturating_sub(read.first_us) > LIMITER_REACH_US {
        warnings.push(
            "The log is longer than 11 years, and the limiter's time reaches no further. Split the log.".to_owned(),
        );
    }
    warnings.extend(counted.notes.warnings.iter().map(|warning| Shown::text(warning).0));
    warnings
}

fn policy(
    tally: &Tally,
    span_us: u64,
    is_coarse: bool,
    show_addresses: bool,
    neighbours: &Neighbours,
    paste: &Paste,
) -> PolicyReport {
    let clients = &tally.clients;
    let touched = || clients.iter().filter(|client| client.over > 0);
    let mut worst: Vec<&Client> = touched().collect();
    worst.sort_by_key(|client| std::cmp::Reverse((client.over, client.requests)));
    let worst = worst.into_iter().take(WORST).map(|client| Worst {
        who: Shown::who(&client.who, show_addresses),
        requests: client.requests.into(),
        refused: client.over.into(),
        longest_run: client.longest_run.into(),
        answered: client.answered.into(),
        answered_well: client.answered_well.into(),
        agents: client.agents(),
        neighbours: match &client.who {
            super::tally::Who::Address(address) => Some(neighbours.of(*address)),
            _ => None,
        },
    });
    let has_status = clients.iter().any(|client| client.answered > 0);
    let windows = span_us / u64::try_from(tally.quota().period().as_micros()).unwrap_or(u64::MAX).max(1) + 1;
    let likely_false = has_status.then(|| {
        let is_likely = |client: &&Client| {
            let answered = u64::from(client.answered);
            answered > 0
                && u64::from(client.answered_well) * 100 >= answered * 95
                && u64::from(client.windows_over) * 100 <= windows
        };
        let (mut count, mut refused) = (0, 0);
        for client in touched().filter(is_likely) {
            (count, refused) = (count + 1, refused + u64::from(client.over));
        }
        (count, refused)
    });
    let mut peaks = [[0; PERCENTILES.len()]; WINDOWS.len()];
    for (window, row) in peaks.iter_mut().enumerate() {
        let mut sorted: Vec<u32> = clients.iter().map(|client| client.peak(window)).collect();
        sorted.sort_unstable();
        for (cell, (permille, _)) in row.iter_mut().zip(PERCENTILES) {
            *cell = nearest_rank(&sorted, permille);
        }
    }
    PolicyReport {
        name: Shown::text(tally.policy.name()),
        quota: tally.quota().to_string(),
        limit: tally.quota().limit(),
        mode: tally.mode.as_str(),
        requests: tally.requests,
        refused: tally.over,
        clients: clients.len() as u64,
        touched: touched().count() as u64,
        of_touched: touched().map(|client| u64::from(client.requests)).sum(),
        as_burst: is_coarse
            .then(|| (tally.over_as_burst, clients.iter().filter(|client| client.is_over_as_burst).count() as u64)),
        unfollowed: tally.unfollowed,
        longest_run: clients.iter().map(|client| client.longest_run.into()).max().unwrap_or(0),
        likely_false,
        hours: Hours {
            length_us: tally.hours.length_us,
            parts: tally
                .hours
                .parts
                .iter()
                .map(|(part, (all, over))| (part * tally.hours.length_us, *all, *over))
                .collect(),
        },
        worst: worst.collect(),
        peaks,
        curve: curve(tally, paste),
    }
}

fn curve(tally: &Tally, paste: &Paste) -> Option<CurveReport> {
    let curve = tally.curve.as_ref()?;
    let limits: Vec<CurveLimit> = curve
        .limits
        .iter()
        .zip(curve.points())
        .enumerate()
        .map(|(at, (limit, [first, second, all]))| CurveLimit {
            limit: limit.quota.limit(),
            quota: limit.quota.to_string(),
            all,
            first,
            second,
            worst: curve.worst(at, WORST),
        })
        .collect();
    let advice = advice::advise(&limits);
    let rule = advice::rule(&advice, &limits, tally.policy.name(), paste);
    Some(CurveReport { knee: advice::knee(&limits), advice, rule, limits })
}

/// Returns the least value that this many thousandths of the values do not exceed.
fn nearest_rank(sorted: &[u32], permille: u64) -> u32 {
    let rank = (sorted.len() as u64 * permille).div_ceil(1_000).max(1);
    usize::try_from(rank - 1).ok().and_then(|at| sorted.get(at)).copied().unwrap_or(0)
}

/// The number of the log's addresses in each network.
struct Neighbours(HashMap<(IpAddr, u8), u64>);

impl Neighbours {
    fn new(addresses: &Addresses) -> Self {
        let mut counts = HashMap::new();
        for address in addresses.counts.keys() {
            *counts.entry(network(*address)).or_default() += 1;
        }
        Self(counts)
    }

    fn of(&self, address: IpAddr) -> u64 {
        self.0.get(&network(address)).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentile_is_the_nearest_rank() {
        let sorted: Vec<u32> = (1..=1_000).collect();
        assert_eq!(PERCENTILES.map(|(permille, _)| nearest_rank(&sorted, permille)), [500, 900, 950, 990, 999, 1_000]);
        assert_eq!(PERCENTILES.map(|(permille, _)| nearest_rank(&[3, 7], permille)), [3, 7, 7, 7, 7, 7]);
        assert_eq!(nearest_rank(&[], 500), 0);
    }
}
