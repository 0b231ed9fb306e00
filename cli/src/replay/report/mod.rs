//! The report, as data. Each of its forms prints the same numbers.

mod advice;
mod candidate;
mod chart;
mod data;
mod escape;
mod html;
mod json;
pub(crate) mod numbers;
mod text;
mod verdict;

use std::collections::HashMap;
use std::net::IpAddr;

pub(crate) use self::candidate::{CurveLimit, Paste};
pub(crate) use self::data::{
    CurveReport, FileRead, Hours, PERCENTILES, PolicyReport, Read, Report, Suggestion, WINDOW_NAMES, Worst,
};
use self::escape::Names;
pub(crate) use self::escape::Shown;
use self::numbers::{count, counted, share};
use super::agent::is_automated;
use super::curve::Curve;
use super::limits::{Notes, is_of_requests_in_flight};
use super::read::log::{LogFile, Reading};
use super::read::request::is_of_host;
use super::tally::{Addresses, Client, Hosts, Tally, WINDOWS, Who, network};

const WORST: usize = 10;

/// A report leaves out at most one line in this many. A limit that is chosen by fewer lines is chosen by chance.
const LEFT_OUT_MAX: u64 = 10;

/// Everything that was counted while the log was read.
pub(crate) struct Counted {
    pub(crate) format: String,
    pub(crate) reading: Reading,
    pub(crate) files: Vec<FileRead>,
    pub(crate) crowded: u64,
    pub(crate) is_coarse: bool,
    pub(crate) window_us: u64,
    pub(crate) requests: u64,
    pub(crate) first_us: u64,
    pub(crate) last_us: u64,
    pub(crate) without_address: u64,
    pub(crate) limited_before: u64,
    /// Requests whose `X-Forwarded-For` names another client than the one that counts.
    pub(crate) forwarded: u64,
    pub(crate) addresses: Addresses,
    pub(crate) hosts: Hosts,
    /// The kinds of outcomes and how often they were.
    pub(crate) outcomes: Vec<(&'static str, u64)>,
    pub(crate) notes: Notes,
    /// Curve states that were forgotten.
    pub(crate) curve_forgotten: u64,
    /// Policies that came when there were enough curves.
    pub(crate) without_curve: u64,
    /// Requests whose duration the log has.
    pub(crate) with_duration: u64,
    /// Requests that count from later than they began, because they took longer than the window.
    pub(crate) shortened: u64,
    pub(crate) max_clients: usize,
    pub(crate) tallies: Vec<Tally>,
}

/// Fails if two programs of a log logged the same requests.
pub(crate) fn check_logged_twice(files: &[LogFile], show_addresses: bool) -> Result<(), String> {
    let Some((file, sample)) = files.iter().find_map(|file| Some((file, file.logged_twice()?))) else { return Ok(()) };
    Err(format!(
        "{}: two programs logged the same requests, such as a proxy and the server behind it, so each would count twice. Leave the \
         lines of one of them out, such as by grep. One begins so: {}",
        file.name,
        Shown::sample(sample, show_addresses)
    ))
}

/// Fails if a limit counts by the client, and more than a tenth of the requests have none.
pub(crate) fn check_clients(all: &Counted, by_client: ByClient) -> Result<(), String> {
    let is_by_client = match by_client {
        ByClient::Yes => true,
        ByClient::No => false,
        ByClient::Perhaps => all.tallies.iter().any(|tally| {
            tally.requests == 0 || tally.clients.iter().any(|client| matches!(client.who, Who::Address(_)))
        }),
    };
    if !is_by_client || all.without_address * LEFT_OUT_MAX <= all.requests {
        return Ok(());
    }
    Err(format!(
        "{} of {} ({}) have no client's address where the format {} has it, so there is no report. Log the client's address, or name \
         the right format by --format, or the field by --field client=PATH; behind proxies log X-Forwarded-For and give \
         --trusted-proxies. A limit that counts by something else needs no address: --key path",
        count(all.without_address),
        counted(all.requests, "request"),
        share(all.without_address, all.requests),
        all.format
    ))
}

/// Whether limits count by the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ByClient {
    Yes,
    No,
    /// Some rule of a file may.
    Perhaps,
}

/// Fails if too many lines were left out, or all lines of a file.
pub(crate) fn check_left_out(all: &Counted, show_addresses: bool) -> Result<(), String> {
    let Reading { lines, unreadable, other, samples, .. } = &all.reading;
    let sample = samples.first().map(|line| Shown::sample(line, show_addresses).0).unwrap_or_default();
    let format = &all.format;
    if all.requests == 0 && sample.is_empty() {
        return Err(format!("none of {} is a request in the format {format}", counted(*lines, "line")));
    }
    if all.requests == 0 {
        return Err(format!("no line of {} could be read as {format}; the first is: {sample}", count(*lines)));
    }
    let empty = |file: &&FileRead| file.lines > 0 && file.unreadable + file.other == file.lines;
    if let Some(FileRead { name, lines, .. }) = all.files.iter().find(empty) {
        return Err(format!(
            "{name}: none of its {} could be read as {format}: leave the file out, or replay it by itself",
            counted(*lines, "line")
        ));
    }
    let sum = |of: fn(&FileRead) -> u64| all.files.iter().map(of).sum::<u64>();
    let (left_out, late, ahead) = (sum(FileRead::left_out), sum(|file| file.late), sum(|file| file.ahead));
    let own = lines - other;
    if left_out * LEFT_OUT_MAX <= own {
        return Ok(());
    }
    let mut error = format!(
        "{} of {} ({}) had to be left out, so there is no report",
        count(left_out),
        counted(own, "line"),
        share(left_out, own)
    );
    if late > 0 {
        let window = numbers::duration(all.window_us);
        error += &format!(
            "\n  {}: more than {window} out of order. Name all files of a rotated log, also those in .gz, and they are read in \
             the order of their times; `zcat access.log.*` puts the newest first. If the lines of a file are out of order, sort them, \
             or raise --window",
            counted(late, "line")
        );
    }
    if *unreadable > 0 {
        error += &format!(
            "\n  {}: not of the format {format}. Name the right one by --format, or leave them out yourself. The first \
             is: {sample}",
            counted(*unreadable, "line")
        );
    }
    if ahead > 0 {
        error +=
            &format!("\n  {}: dated more than 8 days after the lines before them. Remove them", counted(ahead, "line"));
    }
    if all.files.len() > 1 {
        let mut worst: Vec<&FileRead> = all.files.iter().filter(|file| file.left_out() > 0).collect();
        worst.sort_by_key(|file| std::cmp::Reverse(file.left_out()));
        for file in worst.iter().take(WORST) {
            error += &format!("\n  {}: {} of {}", file.name, count(file.left_out()), counted(file.lines, "line"));
        }
    }
    Err(error)
}

/// Fails if all quotas limit requests in flight, and the log does not say how long requests took.
pub(crate) fn check_durations(all: &Counted) -> Result<(), String> {
    if all.with_duration > 0 || !all.tallies.iter().all(|tally| is_of_requests_in_flight(&tally.policy)) {
        return Ok(());
    }
    Err(format!(
        "the log does not say how long requests took (format {}), so it cannot show how many were in flight: log the \
         duration, for example nginx's $request_time, and name the format by --format or the field by --field duration-s=PATH",
        all.format
    ))
}

impl Report {
    pub(crate) fn new(all: &Counted, show_addresses: bool, paste: &Paste) -> Self {
        let neighbours = Neighbours::new(&all.addresses);
        let read = Read {
            format: all.format.clone(),
            files: all.files.clone(),
            lines: all.reading.lines,
            requests: all.requests,
            unreadable: all.reading.unreadable,
            other: all.reading.other,
            too_long: all.reading.too_long,
            samples: all.reading.samples.iter().map(|line| Shown::sample(line, show_addresses)).collect(),
            late: all.files.iter().map(|file| file.late).sum(),
            ahead: all.files.iter().map(|file| file.ahead).sum(),
            crowded: all.crowded,
            is_coarse: all.is_coarse,
            first_us: all.first_us,
            last_us: all.last_us,
            addresses: all.addresses.counts.len() as u64,
            has_more_addresses: all.addresses.others > 0,
            without_address: all.without_address,
            limited_before: all.limited_before,
            outcomes: all.outcomes.clone(),
        };
        let span_us = all.last_us.saturating_sub(all.first_us);
        let policies = all.tallies.iter();
        let worst: Vec<Vec<&Client>> = policies.clone().map(worst).collect();
        let names = &Names::new(&all.hosts, show_addresses, worst.iter().flatten().map(|client| &client.who));
        let policies = policies
            .zip(&worst)
            .map(|(tally, worst)| {
                let has_agents = tally.has_agents();
                let worst = worst.iter().map(|client| worst_client(client, has_agents, names, &neighbours)).collect();
                policy(tally, worst, span_us, all, paste)
            })
            .collect::<Vec<_>>();
        let warnings = warnings(all, &read, names);
        Self { verdict: verdict::verdict(&policies), read, warnings, policies }
    }
}

fn warnings(all: &Counted, read: &Read, names: &Names<'_>) -> Vec<String> {
    let mut warnings = Vec::new();
    let top = all.addresses.counts.iter().max_by_key(|(address, count)| (**count, **address));
    if let Some((address, requests)) = top.filter(|(_, requests)| u64::from(**requests) * 2 > read.requests) {
        warnings.push(format!(
            "One address, {}, sent {} of all requests. If it is a proxy or a load balancer, the log has its address instead of \
             the clients': log the client's address, or use --trusted-proxies.",
            names.address(*address).0,
            share(u64::from(*requests), read.requests)
        ));
    }
    if all.forwarded * 2 > read.requests {
        warnings.push(format!(
            "{} of {} came through a proxy, by their X-Forwarded-For, and the proxy's address counts as the client. If the proxies are \
             yours, use --trusted-proxies.",
            count(all.forwarded),
            counted(read.requests, "request")
        ));
    }
    if read.unreadable > 0 {
        warnings.push(format!(
            "{} of {} ({}) could not be read as {}{}.",
            count(read.unreadable),
            counted(read.lines, "line"),
            share(read.unreadable, read.lines),
            read.format,
            if read.too_long > 0 { format!("; longer than 64 KiB: {}", count(read.too_long)) } else { String::new() }
        ));
    }
    if read.late > 0 {
        warnings.push(format!(
            "Left out: {} more than {} out of order. Sort the log, or raise --window.",
            counted(read.late, "line"),
            numbers::duration(all.window_us)
        ));
    }
    if read.ahead > 0 {
        warnings
            .push(format!("Left out: {} dated more than 8 days after the lines before.", counted(read.ahead, "line")));
    }
    if read.crowded > 0 {
        warnings.push(format!(
            "Put into order over less than the whole window, because too many fell into it: {}.",
            counted(read.crowded, "request")
        ));
    }
    if all.shortened > 0 {
        warnings.push(format!(
            "Counted as in flight from later than they began, because they took longer than {}: {}. Raise --window.",
            numbers::duration(all.window_us),
            counted(all.shortened, "request")
        ));
    }
    if all.with_duration > 0 && all.with_duration < read.requests {
        warnings.push(format!(
            "Without a duration, so that they count as ended at once: {}.",
            counted(read.requests - all.with_duration, "request")
        ));
    }
    if all.with_duration == 0 && all.tallies.iter().any(|tally| is_of_requests_in_flight(&tally.policy)) {
        warnings.push(
            "The log does not say how long requests took, so its limits of requests in flight refuse nothing here. Log the \
             duration, for example nginx's $request_time."
                .to_owned(),
        );
    }
    if all.notes.not_held > 0 {
        warnings.push(format!(
            "Counted as ended at once, because too many were in flight: {}.",
            counted(all.notes.not_held, "request")
        ));
    }
    if read.limited_before > 0 {
        warnings.push(format!(
            "The log was limited already: it has {} answered with 429. Without that limit their clients might have sent more.",
            counted(read.limited_before, "request")
        ));
    }
    if read.without_address > 0 {
        warnings.push(format!(
            "Without a client's address that can be read: {}.",
            counted(read.without_address, "request")
        ));
    }
    if all.hosts.requests > 0 {
        warnings.push(format!(
            "The log has the client's name in place of its address in {}. Each name counts as one client here, and matches no \
             network of a rule; your service sees addresses.",
            counted(all.hosts.requests, "request")
        ));
    }
    let keyless = read.outcomes.iter().find(|(kind, _)| *kind == "key_missing").map_or(0, |(_, requests)| *requests);
    if keyless > 0 {
        warnings.push(format!(
            "Refused with 400, because there is no key for a rule: {}. The log may lack what the key is made of.",
            counted(keyless, "request")
        ));
    }
    let unfollowed: u64 = all.tallies.iter().map(|tally| tally.unfollowed).sum();
    if unfollowed > 0 {
        warnings.push(format!(
            "Followed one by one: the first {} (--max-clients). Only in the totals of requests and refusals: {} of others.",
            counted(all.max_clients as u64, "client"),
            counted(unfollowed, "request")
        ));
    }
    if read.has_more_addresses {
        warnings.push(format!("The log has more addresses than the {} that were all.", count(read.addresses)));
    }
    let forgotten = all.notes.forgotten;
    if forgotten > 0 {
        warnings.push(format!(
            "The limiter had too many clients, and forgot {} at their limits. Raise --max-clients.",
            counted(forgotten, "client")
        ));
    }
    if all.curve_forgotten > 0 {
        warnings.push(format!(
            "The curves' limiter forgot {} at their limits, so the curves show too few refusals.",
            counted(all.curve_forgotten, "client")
        ));
    }
    if all.without_curve > 0 {
        warnings.push(format!("Further policies, without curves and suggestions: {}.", count(all.without_curve)));
    }
    warnings.extend(all.notes.warnings.iter().map(|warning| Shown::text(warning).0));
    warnings
}

/// Returns the clients that a policy refused most.
fn worst(tally: &Tally) -> Vec<&Client> {
    let mut worst: Vec<&Client> = tally.clients.iter().filter(|client| client.over > 0).collect();
    worst.sort_by_key(|client| std::cmp::Reverse((client.over, client.requests)));
    worst.truncate(WORST);
    worst
}

fn worst_client(client: &Client, has_agents: bool, names: &Names<'_>, neighbours: &Neighbours) -> Worst {
    let refusals = client.refusals.as_deref();
    let paths = refusals.map(|refusals| refusals.paths.as_slice()).unwrap_or_default();
    let agent = refusals.map_or("", |refusals| &refusals.agent);
    Worst {
        who: names.who(&client.who),
        requests: client.requests.into(),
        refused: client.over.into(),
        longest_run: client.longest_run.into(),
        answered: client.answered.into(),
        answered_well: client.answered_well.into(),
        agents: client.agents(),
        neighbours: match &client.who {
            Who::Address(address) if !is_of_host(*address) => Some(neighbours.of(*address)),
            _ => None,
        },
        refused_us: refusals.map_or((0, 0), |refusals| (refusals.first_us, refusals.last_us)),
        paths: shown_paths(paths, names),
        elsewhere: refusals.map_or(0, |refusals| refusals.elsewhere.into()),
        agent: has_agents.then(|| names.sample(agent)),
        is_automated: has_agents && is_automated(agent),
    }
}

/// Returns paths as they are shown, each with its refusals. Paths that are shown alike are one.
fn shown_paths(paths: &[(Box<str>, u32)], names: &Names<'_>) -> Vec<(Shown, u64)> {
    let mut shown: Vec<(Shown, u64)> = Vec::new();
    for (path, refused) in paths {
        let (path, refused) = (names.path(path), u64::from(*refused));
        match shown.iter_mut().find(|(other, _)| other.0 == path.0) {
            Some((_, sum)) => *sum += refused,
            None => shown.push((path, refused)),
        }
    }
    shown
}

fn policy(tally: &Tally, worst: Vec<Worst>, span_us: u64, all: &Counted, paste: &Paste) -> PolicyReport {
    let clients = &tally.clients;
    let touched = || clients.iter().filter(|client| client.over > 0);
    let has_status = clients.iter().any(|client| client.answered > 0);
    let windows = span_us / tally.period_us() + 1;
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
    let is_client = |client: &&Client| !matches!(client.who, Who::Text(_) | Who::All);
    let looks_automated =
        |client: &&Client| client.refusals.as_ref().is_some_and(|refusals| is_automated(&refusals.agent));
    let automated = (tally.has_agents() && touched().any(|client| is_client(&client)))
        .then(|| touched().filter(is_client).filter(looks_automated).count() as u64);
    let mut peaks = [[0; PERCENTILES.len()]; WINDOWS.len()];
    for (window, row) in peaks.iter_mut().enumerate() {
        let mut sorted: Vec<u32> = clients.iter().map(|client| client.peak(window)).collect();
        sorted.sort_unstable();
        *row = percentiles(&sorted);
    }
    let in_flight = tally.in_flight.as_ref().filter(|_| all.with_duration > 0);
    let (own, beside) = match is_of_requests_in_flight(&tally.policy) {
        true => (in_flight, None),
        false => (tally.curve.as_ref(), in_flight),
    };
    PolicyReport {
        name: Shown::text(tally.policy.name()),
        quota: tally.quota().to_string(),
        mode: tally.mode.as_str(),
        requests: tally.requests,
        refused: tally.over,
        clients: clients.len() as u64,
        touched: touched().count() as u64,
        of_touched: touched().map(|client| u64::from(client.requests)).sum(),
        as_burst: all
            .is_coarse
            .then(|| (tally.over_as_burst, clients.iter().filter(|client| client.is_over_as_burst).count() as u64)),
        unfollowed: tally.unfollowed,
        longest_run: clients.iter().map(|client| client.longest_run.into()).max().unwrap_or(0),
        likely_false,
        automated,
        hours: Hours {
            length_us: tally.hours.length_us,
            parts: tally
                .hours
                .parts
                .iter()
                .map(|(part, (all, over))| (part * tally.hours.length_us, *all, *over))
                .collect(),
        },
        worst,
        peaks,
        in_flight: in_flight.map(|curve| {
            let mut sorted = curve.peaks();
            sorted.sort_unstable();
            percentiles(&sorted)
        }),
        curve: own.map(|own| curve(own, tally, tally.policy.name(), paste)),
        curve_in_flight: beside.map(|beside| {
            // A rule of its own: a rate and a limit of requests in flight may both hold.
            let name = format!("{}-at-once", tally.policy.name());
            curve(beside, tally, &name, &paste.beside(tally.policy.name()))
        }),
    }
}

fn percentiles(sorted: &[u32]) -> [u32; PERCENTILES.len()] {
    PERCENTILES.map(|(permille, _)| nearest_rank(sorted, permille))
}

fn curve(curve: &Curve, tally: &Tally, name: &str, paste: &Paste) -> CurveReport {
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
    let rule = advice::rule(&advice, &limits, name, paste);
    let own_limit = if name == tally.policy.name() { tally.quota().limit() } else { 0 };
    CurveReport { own_limit, knee: advice::knee(&limits), advice, rule, limits }
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
