//! The log: a line for each change that operators should know of, and none for single requests.

use std::fmt::{Display, Write as _};
use std::io::Write as _;
use std::sync::Mutex;
use std::time::SystemTime;

use clap::ValueEnum;
use serde_json::{Map, Value};
use tower_ratelimit::clock::Timestamp;
use tower_ratelimit::fleet::{Fleet, FleetEntry, FleetKind};
use tower_ratelimit::limiter::StoreLoadReader;
use tower_ratelimit::observe::{
    FleetEvent, LayerEvent, LimiterEvent, Observed, Observer, RulesEvent, RulesReader, SetupWarning, Stats,
};
use tower_ratelimit::{Key, Policy};

/// The events of all lines, and when they are written, for the help text.
pub(crate) const EVENTS: &str = "\
Events of the log:
  listen, admin          an address accepts connections
  trust                  --trust has a network that probably contains others than proxies
  setup                  a likely misconfiguration
  store-away             the store has not decided for 2 seconds, whether requests come or not: alert on this one
  store-back             the store decides again
  store-failed           checks of requests fail at the store, at most once a minute for each kind of error
  store-recovered        checks of requests succeed again, and none has failed for 5 seconds
  store-down, store-up   a server of the store does not answer, or answers again
  store-left             a server of the store is not in use any more
  store-far              at the first connection, a round trip to the store takes more than half of --deadline
  scripts-forgotten      Redis was restarted or replaced, and may have lost counts, or its scripts were flushed
  master-changed         sentinels name another master of Redis, and the server uses it
  too-many-quotas        a limiter in memory has no number left for a quota
  rules-loaded           other rules are in force
  rules-refused          a file of rules has a problem, and the rules stay as they were
  rules-unused           a changed file of rules is not used, because pushed rules are in force
  rules-unknown          rules were pushed under a name that no file of this server has
  operators-loaded       other operators may act
  operators-refused      the file of operators has a problem, and the operators stay as they were
  operator               an operator has changed something, or has tried to
  fleet-in-force         other settings for all processes are in force
  fleet-unreadable       the settings for all processes cannot be read
  fleet-readable         they can be read again
  fleet-restored         the store had lost them, as after FLUSHALL, and this server has written them back
  drain                  the server is about to end, or ends before all requests are answered
  end                    the server has ended
At most once in 10 seconds each:
  untrusted              somebody whom --trust does not name has connected
  proxy                  a proxy's request lacks a header, or has it twice
  large-head             a request has more than 100 headers or 64 KiB of them, and nginx makes a 503 of the 431
  unauthorized           an operator's name or token is wrong
  crowded                all connections at --admin are in use, and the address with the most loses its oldest
  listen-full            --max-connections are open
  accept                 a connection could not be accepted";

/// The form of the lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// For people
    Text,
    /// An object of JSON in each line
    Json,
}

/// How serious a line is.
#[derive(Clone, Copy)]
pub(crate) enum Level {
    Info,
    Warn,
}

/// Writes lines to the standard error.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Log(pub(crate) LogFormat);

impl Log {
    pub(crate) fn info(self, event: &str, message: impl Display) {
        self.write(Level::Info, event, message, &[]);
    }

    pub(crate) fn warn(self, event: &str, message: impl Display) {
        self.write(Level::Warn, event, message, &[]);
    }

    /// Writes one line. What others wrote (names of keys, errors of a store) is in it as text that cannot end the line.
    #[allow(clippy::disallowed_methods, reason = "a log has the time of the machine")]
    pub(crate) fn write(self, level: Level, event: &str, message: impl Display, fields: &[(&str, &str)]) {
        let time = humantime::format_rfc3339_millis(SystemTime::now());
        let level = match level {
            Level::Info => "info",
            Level::Warn => "warn",
        };
        let mut line = match self.0 {
            LogFormat::Json => {
                let texts = [("time", time.to_string()), ("level", level.to_owned()), ("event", event.to_owned())];
                let mut object: Map<String, Value> =
                    texts.into_iter().map(|(name, text)| (name.to_owned(), text.into())).collect();
                object.insert("message".to_owned(), message.to_string().into());
                object.extend(fields.iter().map(|(name, text)| ((*name).to_owned(), (*text).into())));
                Value::from(object).to_string()
            }
            LogFormat::Text => {
                let mut line = format!("{time} {level} {event}: {}", one_line(&message.to_string()));
                for (name, text) in fields {
                    let _ = write!(line, " {name}={}", one_line(text)); // writing into a text never fails
                }
                line
            }
        };
        line.push('\n');
        let _ = std::io::stderr().write_all(line.as_bytes()); // there is nobody to report it to
    }
}

/// Escapes the characters with which a text could pretend to be another line, or move a terminal's cursor.
fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() { line.extend(c.escape_default()) } else { line.push(c) }
    }
    line
}

/// Counts everything, and logs what changes.
pub(crate) struct Watcher {
    pub(crate) stats: Stats,
    pub(crate) log: Log,
}

impl Observer for Watcher {
    fn on_outcome(&self, observed: &Observed<'_>) {
        self.stats.on_outcome(observed);
    }

    fn on_layer_event(&self, event: &LayerEvent) {
        self.stats.on_layer_event(event);
    }

    fn on_place_taken(&self, policy: &Policy, key: &Key, units: u64) -> Timestamp {
        self.stats.on_place_taken(policy, key, units)
    }

    fn on_place_returned(&self, policy: &Policy, key: &Key, units: u64, taken_at: Timestamp) {
        self.stats.on_place_returned(policy, key, units, taken_at);
    }

    fn on_store(&self, load: &StoreLoadReader) {
        self.stats.on_store(load);
    }

    fn on_rules(&self, rules: &RulesReader) {
        self.stats.on_rules(rules);
    }

    fn on_limiter_event(&self, event: &LimiterEvent) {
        self.stats.on_limiter_event(event);
        let log = self.log;
        match event {
            LimiterEvent::StoreDown { server, error, .. } => {
                log.write(Level::Warn, "store-down", error, &[("server", server)]);
            }
            LimiterEvent::StoreUp { server, .. } => {
                log.write(Level::Info, "store-up", "the server answers again", &[("server", server)]);
            }
            LimiterEvent::StoreLeft { server, .. } => {
                log.write(Level::Info, "store-left", "the server is not waited for any more", &[("server", server)]);
            }
            LimiterEvent::StoreFar { server, round_trip, deadline, .. } => {
                let message = if round_trip < deadline {
                    format!("a round trip takes {round_trip:.0?} of the {deadline:?} that a check has")
                } else {
                    format!(
                        "a round trip takes {round_trip:.0?}, and a check has {deadline:?}: no check has an answer in time"
                    )
                };
                log.write(Level::Warn, "store-far", message, &[("server", server)]);
            }
            LimiterEvent::ScriptsForgotten { server, reconnected, .. } => {
                let message = if *reconnected {
                    "the server was restarted, or is another one than before: counts may be lost, and without persistence \
                     all are"
                } else {
                    "most likely the server's scripts were flushed, which loses no count; behind a proxy it may be another \
                     server than before"
                };
                log.write(Level::Warn, "scripts-forgotten", message, &[("server", server)]);
            }
            LimiterEvent::MasterChanged { server, master, .. } => {
                let message =
                    format!("the master is now {master}: charges that the former one had not replicated are lost");
                log.write(Level::Warn, "master-changed", message, &[("server", server), ("master", master)]);
            }
            LimiterEvent::StoreFailed { kind, error, .. } => {
                log.write(Level::Warn, "store-failed", error, &[("kind", kind.as_str())]);
            }
            LimiterEvent::StoreRecovered => log.info("store-recovered", "checks succeed again"),
            LimiterEvent::TooManyQuotas => {
                log.warn("too-many-quotas", "the limiter in memory has no number left for a quota");
            }
            _ => {}
        }
    }

    fn on_rules_event(&self, event: &RulesEvent) {
        self.stats.on_rules_event(event);
        match event {
            RulesEvent::Loaded { version, file, rules, changes, .. } => {
                let version = version.to_string();
                let (mut message, file) = match file {
                    Some(file) => (format!("{rules} rules are in force"), Some(file.display().to_string())),
                    None => (format!("{rules} rules, which operators have pushed, are in force"), None),
                };
                if !changes.is_empty() {
                    message += &format!(": {changes}");
                }
                let file = file.as_deref().map(|file| ("file", file));
                let fields: Vec<_> = file.into_iter().chain([("version", &*version)]).collect();
                self.log.write(Level::Info, "rules-loaded", message, &fields);
            }
            RulesEvent::Refused { error, .. } => {
                self.log.warn("rules-refused", format_args!("the rules stay as they were: {error}"));
            }
            RulesEvent::Unused { by, revision, error, .. } => {
                let mut message = format!(
                    "the changed file is not used, because the rules that {by} pushed in revision {revision} are in \
                     force"
                );
                if let Some(error) = error {
                    message += &format!("; the file has problems: {error}");
                }
                self.log.write(Level::Warn, "rules-unused", message, &[("revision", &revision.to_string())]);
            }
            _ => {}
        }
    }

    fn on_fleet_event(&self, event: &FleetEvent) {
        self.stats.on_fleet_event(event);
        match event {
            FleetEvent::InForce { revision: 0, .. } => {
                let message = "no setting of an operator is in force in this server";
                self.log.write(Level::Info, "fleet-in-force", message, &[("revision", "0")]);
            }
            FleetEvent::InForce { revision, .. } => {
                let message = format!("revision {revision} of the operators' settings is in force");
                self.log.write(Level::Info, "fleet-in-force", message, &[("revision", &revision.to_string())]);
            }
            FleetEvent::Unreadable { revision, error, .. } => {
                let message = match revision {
                    Some(_) => "the operators' settings cannot be read, and stay as they were",
                    None => "the operators' settings cannot be read, and this server has none yet",
                };
                self.log.write(Level::Warn, "fleet-unreadable", message, &[("error", error)]);
            }
            FleetEvent::Restored { revision, .. } => {
                let message = "the store had lost the operators' settings, and this server has written them back: if \
                               the store was emptied, the counts are lost, too";
                self.log.write(Level::Warn, "fleet-restored", message, &[("revision", &revision.to_string())]);
            }
            FleetEvent::Readable { .. } => self.log.info("fleet-readable", "the operators' settings can be read again"),
            _ => {}
        }
    }

    fn on_setup_warning(&self, setup_warning: &SetupWarning) {
        self.stats.on_setup_warning(setup_warning);
        let kind = setup_warning.kind();
        self.log.write(Level::Warn, "setup", setup_warning, &[("kind", kind.as_str())]);
    }
}

/// Logs rules that operators pushed under a name that this server does not have. It keeps the fleet, which a server
/// has until its end.
pub(crate) struct PushedNames {
    fleet: Fleet,
    /// The names of this server's rules.
    own: Vec<String>,
    /// The names and revisions that were logged.
    logged: Mutex<Vec<(String, u64)>>,
    log: Log,
}

impl PushedNames {
    pub(crate) fn new(fleet: Fleet, own: Vec<String>, log: Log) -> Self {
        Self { fleet, own, logged: Mutex::default(), log }
    }
}

impl Observer for PushedNames {
    fn on_outcome(&self, _: &Observed<'_>) {}

    fn on_fleet_event(&self, event: &FleetEvent) {
        let FleetEvent::InForce { .. } = event else { return };
        let is_foreign = |entry: &FleetEntry| {
            entry.target.kind() == FleetKind::Rules && self.own.iter().all(|own| own != entry.target.name())
        };
        let foreign: Vec<FleetEntry> = self.fleet.entries().into_iter().filter(is_foreign).collect();
        let present = foreign.iter().map(|entry| (entry.target.name().to_owned(), entry.revision)).collect();
        let before = match self.logged.lock() {
            Ok(mut logged) => std::mem::replace(&mut *logged, present),
            Err(_) => return, // a thread panicked while it logged
        };
        for FleetEntry { target, by, revision, .. } in &foreign {
            let name = target.name();
            if before.iter().any(|(known, at)| known == name && at == revision) {
                continue;
            }
            let own: Vec<String> = self.own.iter().map(|own| format!("`{own}`")).collect();
            let message = format!(
                "{by} pushed rules in revision {revision} under the name `{name}`, which has no effect here: the rules \
                 of this server are named {}",
                own.join(", ")
            );
            let fields = [("name", name), ("revision", &*revision.to_string())];
            self.log.write(Level::Warn, "rules-unknown", message, &fields);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_of_the_source_are_in_the_help_text() {
        let serve = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/serve");
        let files = std::fs::read_dir(serve).unwrap().map(|file| file.unwrap().path());
        let text: String =
            files.filter(|file| file.is_file()).map(|file| std::fs::read_to_string(file).unwrap()).collect();
        let mut count = 0;
        let is_name = |event: &&str| event.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-');
        for call in ["log_sometimes(", "log.warn(", "log.info(", "Level::Info,", "Level::Warn,"] {
            let quoted = text.split(call).skip(1).filter_map(|rest| rest.trim_start().strip_prefix('"'));
            for event in quoted.filter_map(|rest| rest.split('"').next()).filter(is_name) {
                assert!(EVENTS.split([' ', ',', '\n']).any(|word| word == event), "{event} is not in the help text");
                count += 1;
            }
        }
        assert!(count > 20, "{count}");
    }

    #[test]
    fn text_of_others_stays_on_its_line() {
        assert_eq!(one_line("a\nb\u{1b}[2J\u{7f}é"), "a\\nb\\u{1b}[2J\\u{7f}é");
    }
}
