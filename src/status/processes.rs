//! All processes of a fleet: the report of each process, and the sums over all reports.

use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::sums::Sums;
use super::text::{About, Count, HtmlText, hash};
use crate::base::json::Object;
use crate::base::time::{Timestamp, Utc};
use crate::clock::{CalendarClock, Clock};
use crate::error::WithSources;
use crate::fleet::{Fleet, FleetReports, ReportedFleet, push_number, push_word, read_text, words};
use crate::limiter::{REPORT_MAX, REPORTS_MAX};
use crate::outcome::OutcomeKind;
#[cfg(feature = "rules")]
use crate::rules::Rules;
use crate::rules_in_force::RulesInForce;
use crate::stats::{Stats, StatsSnapshot};

/// The words with which the lines of a report begin.
const PROCESS: &str = "process";
const SINCE: &str = "since";
const RESTORED: &str = "restored";
const POLICY: &str = "policy";

/// The maximum length of a process's name, in bytes.
const NAME_MAX: usize = 100;

/// The time after which a process that has not reported is silent. Processes report every five seconds.
const SILENT_AFTER: Duration = Duration::from_secs(12);

/// The maximum number of policies that the page shows.
const ROWS_MAX: usize = 50;

/// The words for a silent process.
const SILENT: &str = "<div class=\"bad\">silent: it ended, stands still, or cannot reach the store in time</div>";

/// The parts of a page that the report of its process needs.
#[derive(Default)]
pub(super) struct ReportSource {
    pub(super) name: OnceLock<String>,
    #[cfg(feature = "rules")]
    pub(super) rules: OnceLock<Rules>,
}

/// The report of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ProcessReport {
    name: Arc<str>,
    /// The time of the calendar at which the process reported.
    at: Timestamp,
    requests: u64,
    refused: u64,
    /// The hash of the rules in force, or 0 if there is no file of rules.
    rules: u64,
    /// When these rules came into force by the calendar of the process. `None` if the process has no rules, or if its
    /// version does not report the time.
    rules_since: Option<Timestamp>,
    /// The revision of the operators' settings, and in `settings` the hash of these settings.
    revision: u64,
    settings: u64,
    /// As `rules_since`, for the operators' settings.
    settings_since: Option<Timestamp>,
    /// When the process last wrote back settings that the store had lost.
    restored_at: Option<Timestamp>,
    policies: Vec<PolicyReport>,
    is_own: bool,
}

/// The numbers of requests of a policy in the last five minutes and in the last hour.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PolicyReport {
    name: Arc<str>,
    spans: [Sums; 2],
}

/// All processes that report.
pub(super) struct ProcessesView {
    processes: Vec<ProcessReport>,
    /// The number of reports that this version cannot read.
    unreadable: usize,
    /// The number of places in the store that have a report.
    places: usize,
    now: Timestamp,
}

impl ReportSource {
    /// Returns the name of this process.
    fn name(&self) -> String {
        self.name.get().cloned().unwrap_or_else(|| {
            let host = std::env::var("HOSTNAME").unwrap_or_else(|_| "process".to_owned());
            format!("{host} {}", std::process::id())
        })
    }

    /// Returns the rules that the page was given, or else those of a layer whose statistics the page shows.
    fn rules(&self, snapshot: &StatsSnapshot) -> Option<RulesInForce> {
        #[cfg(feature = "rules")]
        if let Some(rules) = self.rules.get() {
            return Some(rules.in_force());
        }
        snapshot.rules()
    }

    /// Writes the report of this process. Policies with the most requests in the last hour come first, as many as fit.
    pub(super) fn report(&self, stats: &Stats, fleet: &ReportedFleet) -> String {
        let settings = &fleet.in_force;
        let snapshot = stats.snapshot();
        let rules = self.rules(&snapshot);
        let count = |is_counted: fn(&OutcomeKind) -> bool| {
            let kinds = OutcomeKind::ALL.iter().filter(|kind| is_counted(kind));
            kinds.fold(0_u64, |sum, kind| sum.saturating_add(snapshot.requests(*kind)))
        };
        let mut text = PROCESS.to_owned();
        push_word(&mut text, crate::stats::cut(&self.name(), NAME_MAX));
        let numbers = [
            CalendarClock.now().as_micros(),
            count(|_| true),
            count(|kind| !kind.passed()),
            rules.map_or(0, |rules| rules.hash),
            settings.revision,
            settings.hash,
        ];
        numbers.into_iter().for_each(|number| push_number(&mut text, number));
        text.push('\n');
        text.push_str(SINCE);
        let since = [rules.map_or(0, |rules| rules.loaded_at.as_micros()), settings.since.as_micros()];
        since.into_iter().for_each(|at| push_number(&mut text, at));
        text.push('\n');
        if let Some(at) = settings.restored_at {
            text.push_str(RESTORED);
            push_number(&mut text, at.as_micros());
            text.push('\n');
        }
        let spans = snapshot
            .policies()
            .iter()
            .map(|policy| (policy.name(), [policy.five_minutes(), policy.hour()].map(Sums::of)));
        let mut spans: Vec<_> = spans.collect();
        spans.sort_by_key(|(_, [_, hour])| std::cmp::Reverse(hour.all()));
        let policies = spans.into_iter().map(|(name, spans)| {
            let mut line = POLICY.to_owned();
            push_word(&mut line, name);
            let numbers = spans.iter().flat_map(|sums| [sums.allowed, sums.near, sums.over, sums.refused]);
            numbers.for_each(|number| push_number(&mut line, number));
            line + "\n"
        });
        for line in fleet.lines_of_rules().chain(policies) {
            if text.len() + line.len() <= REPORT_MAX {
                text.push_str(&line);
            }
        }
        text
    }
}

impl ProcessReport {
    /// Reads a report. Lines that this version does not know are skipped.
    fn read(text: &str, is_own: bool) -> Option<Self> {
        if text.len() > REPORT_MAX {
            return None;
        }
        let mut lines = text.lines().filter_map(|line| line.split_once(' '));
        let (_, first) = lines.next().filter(|(kind, _)| *kind == PROCESS)?;
        let [name, numbers @ ..]: [&str; 7] = words(first)?;
        let [at, requests, refused, rules, revision, settings] = read_numbers(numbers)?;
        let policy = |line: &str| {
            let [name, numbers @ ..]: [&str; 9] = words(line)?;
            let [a, b, c, d, e, f, g, h] = read_numbers(numbers)?;
            let sums = |allowed, near, over, refused| Sums { allowed, near, over, refused };
            Some(PolicyReport { name: read_text(name)?, spans: [sums(a, b, c, d), sums(e, f, g, h)] })
        };
        let since = lines.clone().find(|(kind, _)| *kind == SINCE);
        let since: Option<[u64; 2]> = since.and_then(|(_, line)| read_numbers(words(line)?));
        let [rules_since, settings_since] =
            since.unwrap_or_default().map(|at| Some(Timestamp::from_micros(at)).filter(|_| at > 0));
        let restored = lines.clone().find(|(kind, _)| *kind == RESTORED);
        let restored_at = restored.and_then(|(_, at)| at.parse().ok()).map(Timestamp::from_micros);
        let policies = lines.filter(|(kind, _)| *kind == POLICY).filter_map(|(_, line)| policy(line)).collect();
        let (name, at) = (read_text(name)?, Timestamp::from_micros(at));
        Some(Self {
            name,
            at,
            requests,
            refused,
            rules,
            rules_since,
            revision,
            settings,
            settings_since,
            restored_at,
            policies,
            is_own,
        })
    }
}

fn read_numbers<const COUNT: usize>(words: [&str; COUNT]) -> Option<[u64; COUNT]> {
    let mut numbers = [0; COUNT];
    for (number, word) in numbers.iter_mut().zip(words) {
        *number = word.parse().ok()?;
    }
    Some(numbers)
}

impl ProcessesView {
    /// Asks the store for the reports of all processes. Returns `None` if no other process reports.
    ///
    /// # Errors
    /// Returns why the reports cannot be read.
    pub(super) async fn of(fleet: &Fleet) -> Result<Option<Self>, Arc<str>> {
        if fleet.is_in_file() {
            return Ok(None);
        }
        if let Some(error) = fleet.in_force().error {
            return Err(error); // the page does not wait for a store that is away
        }
        let reports = fleet.reports().await.map_err(|error| WithSources(&error).to_string())?;
        let FleetReports { reports, places } = reports;
        let view = Self::new(&reports, places, CalendarClock.now());
        Ok((view.unreadable > 0 || view.processes.iter().any(|process| !process.is_own)).then_some(view))
    }

    /// Says why the reports of all processes cannot be read, and since when.
    pub(super) fn write_unread(html: &mut String, error: &str, read_at: Option<Timestamp>) -> fmt::Result {
        let since = read_at.map_or_else(|| "the start of this process".to_owned(), |at| Utc(at).to_string());
        write!(
            html,
            "<h2>All processes</h2><pre class=\"bad\"><b>The reports of the processes cannot be read since {since}.</b>\n\
             {}</pre>",
            HtmlText(error)
        )
    }

    fn new(reports: &[(Arc<str>, bool)], places: usize, now: Timestamp) -> Self {
        let processes = reports.iter().filter_map(|(text, is_own)| ProcessReport::read(text, *is_own));
        let mut processes: Vec<_> = processes.collect();
        processes.sort_by(|a, b| a.name.cmp(&b.name));
        Self { unreadable: reports.len() - processes.len(), processes, places, now }
    }

    /// Returns the sums of each policy. Policies with the most requests over their limits come
    /// first.
    fn policies(&self) -> Vec<(&str, [Sums; 2])> {
        let mut sums: BTreeMap<&str, [Sums; 2]> = BTreeMap::new();
        for policy in self.processes.iter().flat_map(|process| &process.policies) {
            let own = sums.entry(&policy.name).or_default();
            own.iter_mut().zip(policy.spans).for_each(|(sum, more)| *sum = sum.plus(more));
        }
        let mut sums: Vec<_> = sums.into_iter().collect();
        sums.sort_by_key(|(_, [_, hour])| std::cmp::Reverse(hour.over));
        sums
    }

    /// Returns when a process last wrote back settings that the store had lost.
    pub(super) fn restored_at(&self) -> Option<Timestamp> {
        self.processes.iter().filter_map(|process| process.restored_at).max()
    }

    /// Returns whether all places for reports are taken, so that other processes may have found no place.
    fn is_full(&self) -> bool {
        self.places >= REPORTS_MAX
    }

    /// Returns the time since the last report of a process, and whether the process is silent.
    fn since(&self, process: &ProcessReport) -> (Duration, bool) {
        let since = self.now.saturating_since(process.at);
        (since, since >= SILENT_AFTER)
    }

    fn sum(&self, of: fn(&ProcessReport) -> u64) -> u64 {
        self.processes.iter().fold(0, |sum, process| sum.saturating_add(of(process)))
    }

    /// Writes the processes and the sums over them as HTML.
    pub(super) fn write_html(&self, html: &mut String) -> fmt::Result {
        let count = self.processes.len();
        if self.is_full() {
            write!(
                html,
                "<h2>{count} processes</h2><p class=\"bad\">The store keeps no more than {REPORTS_MAX} reports. {}</p>",
                if self.processes.iter().any(|process| process.is_own) {
                    "If more processes run, the sums do not count the others."
                } else {
                    "More processes run: the sums do not count this process, and maybe others."
                }
            )?;
        } else {
            write!(html, "<h2>All {count} processes</h2>")?;
        }
        if self.unreadable > 0 {
            let (count, plural) = (self.unreadable, if self.unreadable == 1 { "" } else { "s" });
            write!(
                html,
                "<p class=\"bad\">This version cannot read {count} report{plural}, which the sums do not count.</p>"
            )?;
        }
        write!(
            html,
            "<table><thead><tr><th>process</th><th class=\"num\">requests</th>\
             <th class=\"num\">refused</th><th>rules</th><th>settings</th><th>reported</th></tr></thead><tbody>"
        )?;
        for process in &self.processes {
            let (since, is_silent) = self.since(process);
            write!(
                html,
                "<tr><td><span class=\"name\">{}</span>{}</td><td class=\"num\" data-of=\"requests\">{}</td>\
                 <td class=\"num\" data-of=\"refused\">{}</td><td data-of=\"rules\">{}{}</td>\
                 <td data-of=\"settings\">revision {}<div class=\"quota\">{}</div>{}{}</td>\
                 <td data-of=\"reported\">{} ago{}</td></tr>",
                HtmlText(&process.name),
                if process.is_own { "<div class=\"quota\">this one</div>" } else { "" },
                Count(process.requests),
                Count(process.refused),
                if process.rules == 0 { "–".to_owned() } else { hash(process.rules) },
                since_html(process.rules, process.rules_since),
                process.revision,
                hash(process.settings),
                since_html(process.revision, process.settings_since),
                restored_html(process.restored_at),
                About(since),
                if is_silent { SILENT } else { "" }
            )?;
        }
        write!(
            html,
            "<tr><td><b>all {count}</b></td><td class=\"num\" data-of=\"requests\"><b>{}</b></td>\
             <td class=\"num\" data-of=\"refused\"><b>{}</b></td><td></td><td></td><td></td></tr></tbody></table>",
            Count(self.sum(|process| process.requests)),
            Count(self.sum(|process| process.refused))
        )?;
        let policies = self.policies();
        if policies.is_empty() {
            return Ok(());
        }
        html.push_str("<table><thead><tr><th>policy, in all processes</th>");
        for of in ["five minutes", "over", "refused", "an hour", "over", "refused"] {
            write!(html, "<th class=\"num\">{of}</th>")?;
        }
        html.push_str("</tr></thead><tbody>");
        for (name, spans) in policies.iter().take(ROWS_MAX) {
            write!(html, "<tr><td class=\"name\">{}</td>", HtmlText(name))?;
            for (span, sums) in ["in five minutes", "in an hour"].iter().zip(spans) {
                for (of, count) in [("requests", sums.all()), ("over", sums.over), ("refused", sums.refused)] {
                    write!(html, "<td class=\"num\" data-of=\"{of} {span}\">{}</td>", Count(count))?;
                }
            }
            html.push_str("</tr>");
        }
        html.push_str("</tbody></table>");
        match policies.len().saturating_sub(ROWS_MAX) {
            0 => Ok(()),
            more => write!(html, "<p class=\"soft\">and {more} more in the JSON of this page</p>"),
        }
    }

    /// Writes the processes and the sums over them as a JSON object.
    pub(super) fn write_json(&self, json: &mut String) {
        let mut object = Object::begin(json);
        object.plain("may_miss_processes", self.is_full() || self.unreadable > 0);
        object.plain("unreadable_reports", self.unreadable);
        object.plain("requests", self.sum(|process| process.requests));
        object.plain("refused", self.sum(|process| process.refused));
        let policies = self.policies();
        object.list("policies", &policies, |json, (name, spans)| policy(json, name, spans));
        object.list("processes", &self.processes, |json, process| {
            let mut object = Object::begin(json);
            object.text("name", &process.name);
            object.plain("is_this_one", process.is_own);
            let (since, is_silent) = self.since(process);
            object.micros("reported_us_ago", Some(since));
            object.plain("is_silent", is_silent);
            object.plain("requests", process.requests);
            object.plain("refused", process.refused);
            object.text_or_null("rules", Some(hash(process.rules)).filter(|_| process.rules > 0).as_deref());
            push_time(&mut object, "rules_since", process.rules_since);
            object.plain("revision", process.revision);
            object.text("settings", &hash(process.settings));
            push_time(&mut object, "settings_since", process.settings_since);
            push_time(&mut object, "restored_at", process.restored_at);
            object.list("policies", &process.policies, |json, of| policy(json, &of.name, &of.spans));
            object.end();
        });
        object.end();
    }
}

/// Returns a line of HTML about the time since which a version is in force. The line is empty if there is no version,
/// which is 0 then.
fn since_html(version: u64, since: Option<Timestamp>) -> String {
    match since {
        _ if version == 0 => String::new(),
        Some(since) => format!("<div class=\"quota\">since {}</div>", Utc(since)),
        None => "<div class=\"quota\">since an unknown time</div>".to_owned(),
    }
}

/// Returns a line of HTML about the time at which a process wrote back lost settings. The line is empty if the process
/// never did.
fn restored_html(at: Option<Timestamp>) -> String {
    at.map_or_else(String::new, |at| {
        format!("<div class=\"bad\">wrote them back at {}, because the store had lost them</div>", Utc(at))
    })
}

fn push_time(object: &mut Object<'_>, name: &str, at: Option<Timestamp>) {
    object.text_or_null(name, at.map(|at| Utc(at).to_string()).as_deref());
}

fn policy(json: &mut String, name: &str, spans: &[Sums; 2]) {
    let mut object = Object::begin(json);
    object.text("name", name);
    for (span, sums) in ["five_minutes", "hour"].iter().zip(spans) {
        let mut object = Object::begin(object.field(span));
        sums.fields().into_iter().for_each(|(name, count)| object.plain(name, count));
        object.end();
    }
    object.end();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::FleetInForce;
    use crate::key::Key;
    use crate::outcome::Observer;
    use crate::policy::Policy;
    use crate::quota::Quota;

    fn settings(revision: u64, hash: u64, since: u64) -> FleetInForce {
        let since = Timestamp::from_micros(since);
        FleetInForce { revision, hash, since, read_at: None, restored_at: None, error: None }
    }

    #[test]
    fn report_is_read_as_it_was_written() {
        let (source, stats) = (ReportSource::default(), Stats::builder().count_use(true).build());
        source.name.set("web 3 %\n<b>".to_owned()).unwrap();
        let policy = Policy::new("a b", Quota::per_hour(5)).unwrap();
        (0..3).for_each(|n| assert!(stats.on_allowed(&policy, &Key::of(n).unwrap(), 1, false)));
        let text = source.report(&stats, &ReportedFleet::of(settings(7, 0xabc, 1_500_000), &["rules", "a b"]));
        let read = ProcessReport::read(&text, false).unwrap();
        assert_eq!((&*read.name, read.revision, read.settings), ("web 3 %\n<b>", 7, 0xabc));
        assert_eq!((read.rules_since, read.settings_since), (None, Some(Timestamp::from_micros(1_500_000))));
        for other in ["", "process", "process a 1 2", "other a 1 2 3 4 5 6", "process a 1 2 3 4 5 x"] {
            assert_eq!(ProcessReport::read(other, false), None, "{other}");
        }
        // A later version may add lines.
        let later = format!("{text}future a b\npolicy a 1 2 3 4 5 6 7 8\npolicy short 1\n");
        let later = ProcessReport::read(&later, true).unwrap();
        assert_eq!(later.policies.len(), read.policies.len() + 1);
    }

    #[cfg(feature = "rules")]
    #[test]
    fn report_says_since_when_rules_and_settings_are_in_force() {
        let source = ReportSource::default();
        let rules = Rules::from_text("rules: [{name: a, quota: 5/s, key: peer-ip}]").unwrap();
        let in_force = rules.in_force();
        source.rules.set(rules).unwrap();
        let text = source.report(&Stats::new(), &ReportedFleet::of(settings(7, 0xabc, 1_500_000), &[]));
        let read = ProcessReport::read(&text, false).unwrap();
        assert_eq!((read.rules, read.rules_since), (in_force.hash, Some(in_force.loaded_at)));
        assert_eq!(read.settings_since, Some(Timestamp::from_micros(1_500_000)));
        // Older versions read a first line of just these words, and skip the lines that they do not know.
        let first: [&str; 8] = words(text.lines().next().unwrap()).unwrap();
        assert_eq!((first[0], first[6], first[7]), (PROCESS, "7", "2748"));
    }

    #[test]
    fn page_says_since_when_each_process_has_its_versions() {
        let since = "since 1970-01-01T00:00:0";
        for (text, in_json, in_html) in [
            (
                "process a 1 1 0 5 7 1\nsince 2000000 3000000\n",
                [Some("1970-01-01T00:00:02Z"), Some("1970-01-01T00:00:03Z")],
                vec![format!("{since}2Z"), format!("{since}3Z")],
            ),
            // An older version reports no times.
            ("process a 1 1 0 5 7 1\n", [None, None], vec!["since an unknown time".to_owned(); 2]),
            ("process a 1 1 0 5 7 1\nsince 1\n", [None, None], vec!["since an unknown time".to_owned(); 2]),
            // A process without rules, for which operators have set nothing.
            ("process a 1 1 0 0 0 1\nsince 0 0\n", [None, None], Vec::new()),
        ] {
            let view = ProcessesView::new(&[(text.into(), false)], 1, Timestamp::from_micros(1));
            let (mut json, mut html) = (String::new(), String::new());
            view.write_json(&mut json);
            view.write_html(&mut html).unwrap();
            let shown: serde_json::Value = serde_json::from_str(&json).unwrap();
            let process = &shown["processes"][0];
            assert_eq!(["rules_since", "settings_since"].map(|of| process[of].as_str()), in_json, "{json}");
            let lines = html.split("<div class=\"quota\">").filter_map(|line| line.split_once("</div>"));
            let lines: Vec<&str> = lines.map(|(line, _)| line).filter(|line| line.starts_with("since")).collect();
            assert_eq!(lines, in_html, "{html}");
        }
    }

    #[test]
    fn page_says_which_process_restored_lost_settings() {
        let lost =
            FleetInForce { restored_at: Some(Timestamp::from_micros(5_000_000)), ..settings(7, 0xabc, 3_000_000) };
        let reports = [lost, settings(7, 0xabc, 3_000_000)].map(|in_force| {
            let text = ReportSource::default().report(&Stats::new(), &ReportedFleet::of(in_force, &[]));
            (Arc::from(text), false)
        });
        let view = ProcessesView::new(&reports, 2, Timestamp::from_micros(1));
        let (mut json, mut html) = (String::new(), String::new());
        view.write_json(&mut json);
        view.write_html(&mut html).unwrap();
        assert_eq!(view.restored_at(), Some(Timestamp::from_micros(5_000_000)));
        assert_eq!(html.matches("wrote them back at 1970-01-01T00:00:05Z").count(), 1, "{html}");
        let shown: serde_json::Value = serde_json::from_str(&json).unwrap();
        let mut at = [0, 1].map(|process| shown["processes"][process]["restored_at"].as_str());
        at.sort_unstable();
        assert_eq!(at, [None, Some("1970-01-01T00:00:05Z")], "{json}");
    }

    #[test]
    fn report_of_many_policies_is_bounded() {
        let stats = Stats::new();
        for n in 0..1_000 {
            let policy = Policy::new(format!("{n}-{}", "a".repeat(60)), Quota::per_hour(5)).unwrap();
            stats.on_allowed(&policy, &Key::of(n).unwrap(), 1, false);
        }
        let fleet = ReportedFleet::of(settings(0, 0, 0), &["rules"]);
        let text = ReportSource::default().report(&stats, &fleet);
        assert!(text.len() <= REPORT_MAX && text.lines().any(|line| line == "rules rules"), "{text}");
    }

    #[test]
    fn sums_are_those_of_all_processes() {
        let report = |text: &str, is_own| ProcessReport::read(text, is_own).unwrap();
        let processes = vec![
            report("process a 1000000 10 2 0 1 1\npolicy p 1 0 2 2 10 0 20 20\n", true),
            report(
                "process b 1000000 18446744073709551615 3 5 1 1\npolicy p 3 0 4 4 30 0 40 40\npolicy q 1 1 0 0 1 1 0 0\n",
                false,
            ),
        ];
        let at = |us| ProcessesView {
            processes: processes.clone(),
            unreadable: 0,
            places: 2,
            now: Timestamp::from_micros(us),
        };
        let view = at(4_000_000);
        let mut json = String::new();
        view.write_json(&mut json);
        for part in [
            "\"requests\":18446744073709551615,\"refused\":5",
            "{\"name\":\"p\",\"five_minutes\":{\"allowed\":4,\"near\":0,\"over\":6,\"refused\":6},\
             \"hour\":{\"allowed\":40,\"near\":0,\"over\":60,\"refused\":60}}",
            "\"name\":\"b\",\"is_this_one\":false,\"reported_us_ago\":3000000,\"is_silent\":false",
        ] {
            assert!(json.contains(part), "{part}: {json}");
        }
        let mut html = String::new();
        view.write_html(&mut html).unwrap();
        assert!(html.contains("All 2 processes") && html.contains("this one") && html.contains("3 s ago"), "{html}");
        for (us, is_silent) in [(12_999_999, false), (13_000_000, true)] {
            let (mut json, mut html) = (String::new(), String::new());
            at(us).write_json(&mut json);
            at(us).write_html(&mut html).unwrap();
            assert_eq!((html.contains(SILENT), json.contains("\"is_silent\":true")), (is_silent, is_silent), "{us}");
        }
    }

    /// An empty report is what another application has in a place. A later version may have another form.
    #[test]
    fn report_that_cannot_be_read_is_counted() {
        let long = format!("process a 1 1 0 0 1 1\n{}", "a".repeat(REPORT_MAX));
        for unreadable in ["", "process2 a", &long] {
            let reports =
                [("process a 1 5 0 0 1 1\n", true), (unreadable, false)].map(|(text, own)| (text.into(), own));
            let view = ProcessesView::new(&reports, 2, Timestamp::from_micros(1));
            let (mut json, mut html) = (String::new(), String::new());
            view.write_json(&mut json);
            view.write_html(&mut html).unwrap();
            let said = "\"may_miss_processes\":true,\"unreadable_reports\":1,\"requests\":5";
            assert!(json.contains(said), "{json}");
            assert!(html.contains("cannot read 1 report, which the sums do not count"), "{html}");
        }
    }

    #[test]
    fn sums_of_many_processes_say_that_they_may_miss_some() {
        for (count, may_miss) in [(REPORTS_MAX - 1, false), (REPORTS_MAX, true)] {
            for own in [0, count] {
                let report = |n| ProcessReport::read(&format!("process p{n} 1 1 0 0 1 1\n"), n == own).unwrap();
                let (processes, now) = ((0..count).map(report).collect(), Timestamp::from_micros(1));
                let view = ProcessesView { processes, unreadable: 0, places: count, now };
                let (mut json, mut html) = (String::new(), String::new());
                view.write_json(&mut json);
                view.write_html(&mut html).unwrap();
                assert!(json.contains(&format!("\"may_miss_processes\":{may_miss},")), "{json}");
                assert_eq!((html.contains("the sums do not count"), html.contains("All ")), (may_miss, !may_miss));
                assert_eq!(html.contains("do not count this process"), may_miss && own == count, "{html}");
                assert!(html.contains(&format!("all {count}</b>")), "{html}");
            }
        }
    }
}
