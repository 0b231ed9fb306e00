//! `tower-ratelimit replay`: access logs through rules or a quota, by the real limiter, on the log's time.
//!
//! * `read` makes requests of lines.
//! * `order` puts them into order.
//! * `limits` asks the layer about each of them.
//! * `tally` counts what it decided, and `curve` what other limits would have.
//! * `report` prints that.

mod agent;
mod args;
mod curve;
mod limits;
mod order;
mod read;
mod report;
mod tally;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tower_ratelimit::observe::{LimiterEvent, Observer};

pub(crate) use self::args::Options;
use self::args::{KeyWord, Through};
use self::curve::{Curve, CurveLimiter};
use self::limits::{Head, Limits};
use self::order::{Order, Timed};
pub(crate) use self::read::date;
use self::read::format::Format;
use self::read::log::Log;
use self::read::request::{Keep, is_of_host};
use self::report::{ByClient, Counted, FileRead, Paste, Report};
use self::tally::{Addresses, Hosts, Tally};
use crate::exit;
use crate::output::Output;

/// The longest log. The words of a limiter's states hold instants of 12 years.
const REACH_US: u64 = 11 * 366 * 86_400_000_000;

const WEEK_US: u64 = 7 * 86_400_000_000;

/// The most policies that get a curve.
const CURVES_MAX: usize = 32;

pub(crate) fn run(options: &Options, output: &mut Output) -> Result<u8, String> {
    if let Some(file) = options.html.as_ref().filter(|file| is_read(file, options)) {
        return Err(format!("error: {}: --html would overwrite this file, which is read", file.display()));
    }
    let page = options.html.as_deref().map(Page::open).transpose()?;
    let report = match replay(options) {
        Ok(report) => report,
        Err(trouble) => {
            if let Some(page) = page {
                page.leave();
            }
            return Err(format!("error: {trouble}"));
        }
    };
    if let Some(page) = page {
        page.write(&report.html())?;
    }
    if options.json {
        output.json(format_args!("{:#}", report.json()));
    } else {
        output.line(report.to_string().trim_end());
    }
    Ok(exit::FINE)
}

/// The file of the report in HTML. It is opened before the log is read, which may take long.
struct Page<'o> {
    path: &'o Path,
    file: File,
    is_new: bool,
}

impl<'o> Page<'o> {
    fn open(path: &'o Path) -> Result<Self, String> {
        let is_new = !path.exists();
        // An older report stays until there is a new one.
        let file = File::options().write(true).create(true).truncate(false).open(path);
        let file = file.map_err(|error| format!("error: {}: {error}", path.display()))?;
        Ok(Self { path, file, is_new })
    }

    fn write(mut self, html: &str) -> Result<(), String> {
        // A pipe, and anything else that is not a regular file, has no length.
        let is_regular = self.file.metadata().is_ok_and(|data| data.is_file());
        let emptied = if is_regular { self.file.set_len(0) } else { Ok(()) };
        let written = emptied.and_then(|()| self.file.write_all(html.as_bytes()));
        written.map_err(|error| format!("error: {}: {error}", self.path.display()))
    }

    /// Removes the file if it was made for a report that there is not.
    fn leave(self) {
        if self.is_new {
            let _ = std::fs::remove_file(self.path); // the trouble with the log is what is reported
        }
    }
}

fn is_read(file: &Path, options: &Options) -> bool {
    let whole = |path: &Path| path.canonicalize().ok();
    let file = whole(file);
    file.is_some() && options.logs.iter().chain(&options.rules).any(|read| whole(read) == file)
}

/// Counts limited keys that the limiter of the curves had to forget.
#[derive(Clone, Default)]
struct Forgotten(Arc<AtomicU64>);

impl Observer for Forgotten {
    fn on_limiter_event(&self, event: &LimiterEvent) {
        if matches!(event, LimiterEvent::Evicted { throttled: true, .. }) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Reads the log and asks the limits.
fn replay(options: &Options) -> Result<Report, String> {
    let format = match &options.format {
        Some(format) => Some(Format::named(format, &options.fields)?),
        None if options.fields.is_empty() => None,
        None => Some(Format::named("JSON", &options.fields)?),
    };
    let mut log = Log::open(&options.logs, format)?;
    let mut replay = Replay::new(options, &log)?;
    let window_us = u64::try_from(options.window.as_micros()).unwrap_or(u64::MAX);
    let mut order = Order::new(window_us, log.files.iter().map(|file| file.first_us.unwrap_or(log.first_us())));
    let progress = io::stderr().is_terminal();
    let mut lines: u64 = 0;
    while let Some(file) = order.next_file() {
        match log.next(file, replay.keep)? {
            Some(request) => {
                replay.head.note_headers(log.format.headers());
                order.take(file, request, &mut |timed| replay.take(&timed));
            }
            None => order.end(file),
        }
        replay.check_span()?;
        lines += 1;
        if progress && lines % (1 << 17) == 0 {
            let part = log.part_read().map_or(String::new(), |percent| format!(", {percent}% of the bytes"));
            eprint!("\r{} requests{part} ", report::numbers::count(lines));
        }
    }
    order.finish(&mut |timed| replay.take(&timed));
    replay.check_span()?;
    if progress {
        eprint!("\r\x1b[K");
    }
    let files = log.files.iter().zip(&order.files).map(|(file, order)| FileRead::new(file, order)).collect();
    let counted = Counted {
        format: log.format.name.clone(),
        reading: log.reading(),
        files,
        crowded: order.crowded,
        shortened: order.shortened,
        is_coarse: order.is_coarse,
        window_us,
        notes: replay.spread.notes(),
        outcomes: replay.outcomes.into_iter().collect(),
        curve_forgotten: replay.forgotten.0.load(Ordering::Relaxed),
        ..replay.counted
    };
    report::check_left_out(&counted, options.show_addresses)?;
    report::check_logged_twice(&log.files, options.show_addresses)?;
    report::check_clients(
        &counted,
        match options.through()? {
            Through::Quota { key: KeyWord::Client, .. } => ByClient::Yes,
            Through::Quota { .. } => ByClient::No,
            Through::Rules { .. } => ByClient::Perhaps,
        },
    )?;
    report::check_durations(&counted)?;
    Ok(Report::new(&counted, options.show_addresses, &paste(&options.through()?, options.trusted_proxies.is_some())))
}

/// Returns how a suggestion is written.
fn paste(through: &Through<'_>, has_proxies: bool) -> Paste {
    let Through::Quota { key, .. } = through else { return Paste::Candidate };
    Paste::Rule(match key {
        KeyWord::Client if has_proxies => "client-ip".to_owned(),
        KeyWord::Client => "peer-ip".to_owned(),
        // The program registers this one.
        KeyWord::User => "user".to_owned(),
        KeyWord::Path => "path".to_owned(),
        KeyWord::Host => "host".to_owned(),
        KeyWord::Method => "method".to_owned(),
        KeyWord::Global => "global".to_owned(),
        KeyWord::Header(name) => format!("header {name}"),
    })
}

/// Asks the limits about each request, and counts.
struct Replay {
    keep: Keep,
    max_clients: usize,
    /// Whether the client is that of a header.
    has_proxies: bool,
    head: Head,
    /// The layer that sees the requests of a second spread over it, and the one that sees them at once.
    spread: Limits,
    burst: Limits,
    curves: CurveLimiter,
    curves_left: usize,
    forgotten: Forgotten,
    /// The clients that may still be followed.
    clients_left: usize,
    outcomes: BTreeMap<&'static str, u64>,
    counted: Counted,
    /// For each policy that applied to the current request, its place and the client's number.
    current: Vec<(usize, Option<usize>)>,
}

impl Replay {
    fn new(options: &Options, log: &Log) -> Result<Self, String> {
        let (through, proxies, max_clients) =
            (options.through()?, options.trusted_proxies.as_ref(), options.max_clients());
        // The first requests may have begun long before their lines were written.
        let start_us = log.first_us().saturating_sub(WEEK_US);
        let keep = limits::texts_to_keep(&through, proxies);
        let limits = || Limits::new(&through, proxies, max_clients, start_us);
        let (spread, burst) = (limits()?, limits()?);
        let forgotten = Forgotten::default();
        let tallies = spread.policies().iter().map(|policy| Tally::new(policy.clone(), None)).collect();
        Ok(Self {
            keep,
            max_clients,
            has_proxies: proxies.is_some(),
            head: Head::new(keep, proxies),
            spread,
            burst,
            curves: CurveLimiter::new(start_us, forgotten.clone())?,
            curves_left: CURVES_MAX,
            forgotten,
            clients_left: max_clients,
            outcomes: BTreeMap::new(),
            counted: Counted {
                format: String::new(),
                reading: read::log::Reading::default(),
                files: Vec::new(),
                crowded: 0,
                is_coarse: false,
                window_us: 0,
                requests: 0,
                first_us: u64::MAX,
                last_us: 0,
                without_address: 0,
                limited_before: 0,
                forwarded: 0,
                addresses: Addresses::default(),
                hosts: Hosts::default(),
                outcomes: Vec::new(),
                notes: limits::Notes::default(),
                curve_forgotten: 0,
                without_curve: 0,
                with_duration: 0,
                shortened: 0,
                max_clients,
                tallies,
            },
            current: Vec::new(),
        })
    }

    /// Fails if the log is longer than the limiter's time.
    fn check_span(&self) -> Result<(), String> {
        let Counted { first_us, last_us, .. } = self.counted;
        if last_us.saturating_sub(first_us) <= REACH_US {
            return Ok(());
        }
        let (first, last) = (report::numbers::instant(first_us), report::numbers::instant(last_us));
        Err(format!(
            "the log is from {first} to {last}, and a limiter's time ends after 11 years: replay each year by itself, or \
             remove the lines with wrong dates"
        ))
    }

    fn take(&mut self, timed: &Timed) {
        let Timed { request, spread_us, burst_us } = timed;
        self.head.set(request);
        let counted = &mut self.counted;
        counted.requests += 1;
        counted.first_us = counted.first_us.min(*spread_us);
        counted.last_us = counted.last_us.max(*spread_us);
        counted.limited_before += u64::from(request.status == 429);
        counted.forwarded += u64::from(request.is_forwarded && !self.has_proxies);
        match self.head.client() {
            Some(client) => {
                counted.addresses.count(client, self.max_clients);
                if let Some(host) = request.host.as_ref().filter(|_| is_of_host(client)) {
                    counted.hosts.count(client, host, self.max_clients);
                }
            }
            None => counted.without_address += 1,
        }
        self.current.clear();
        let mut needs_burst = request.is_coarse;
        let duration_us = request.duration_us.unwrap_or(0);
        counted.with_duration += u64::from(request.duration_us.is_some());
        self.spread.decide(&self.head.parts, *spread_us, duration_us, |decided| {
            let kind = decided.kind.map_or("undecided", |kind| kind.as_str());
            *self.outcomes.entry(kind).or_default() += 1;
            for decision in &decided.policies {
                let Some(tally) = counted.tallies.get_mut(decision.policy) else { continue };
                if tally.requests == 0 {
                    match self.curves_left.checked_sub(1) {
                        None => counted.without_curve += 1,
                        Some(left) => {
                            self.curves_left = left;
                            tally.curve = Curve::new(&tally.policy, self.curves.clone());
                            tally.in_flight = Some(Curve::of_requests_in_flight(&tally.policy));
                        }
                    }
                }
                let before = tally.clients.len();
                let client = tally.count(decision, request, &self.head, *spread_us, self.clients_left > 0);
                self.clients_left -= tally.clients.len() - before;
                // Most requests have one policy, and then the limiter alone repeats what the layer would.
                let is_only = needs_burst && decided.policies.len() == 1;
                if let Some(is_over) = is_only.then(|| self.burst.repeat(decision, *burst_us)).flatten() {
                    needs_burst = false;
                    tally.count_burst(is_over, client);
                }
                self.current.push((decision.policy, client));
            }
        });
        if !needs_burst {
            return;
        }
        self.burst.decide(&self.head.parts, *burst_us, duration_us, |decided| {
            for decision in &decided.policies {
                let Some((_, client)) = self.current.iter().find(|(policy, _)| *policy == decision.policy) else {
                    continue;
                };
                if let Some(tally) = counted.tallies.get_mut(decision.policy) {
                    tally.count_burst(decision.is_over, *client);
                }
            }
        });
    }
}
