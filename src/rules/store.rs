//! The rules in force, which are read from a file, are replaced as a whole, and are followed by layers.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::{Arc, Weak};

#[cfg(feature = "tokio")]
use super::bind::operate;
use super::bind::{Bound, RulesHistory, bind};
use super::document::{BYTES_MAX, end_of};
use super::error::{Problems, RulesError};
use super::names::Names;
use super::problem::{Position, Quoted, RulesErrorKind};
use super::read::{read, read_and_look};
use super::report::{NameKind, RulesReport};
use super::spec::FileSpec;
use super::tree::Tree;
use super::warn::warnings;
use crate::base::sync::{Mutex, MutexGuard, contained, lock};
use crate::clock::{CalendarClock, Clock};
use crate::error::WithSources;
use crate::event::RulesEvent;
#[cfg(feature = "tokio")]
use crate::fleet::{Fleet, FleetEntry, FleetKind, FleetRuleSettings, FollowFleet};
use crate::limiter::UnsupportedQuota;
use crate::middleware::rule::Follow;
use crate::middleware::source::{FindRules, RuleSource, SourcedRules};
use crate::quota::Quota;
use crate::rules_in_force::RulesInForce;

/// The maximum number of changes of rules that are logged.
const CHANGES_MAX: usize = 10;

/// The rules of a file, and the layers that follow them.
pub(super) struct RuleStore {
    names: Arc<Names>,
    path: Option<Arc<Path>>,
    /// The lock that is held while the file is read and numbered, so that a later reading has a
    /// higher number.
    reads: Mutex<()>,
    state: Mutex<RulesState>,
}

struct RulesState {
    /// The result of the last reading of the file, even if the rules that were read are not in
    /// force.
    read: Reading,
    /// The program's own rules or those of its file. These rules are in force unless operators put other
    /// rules in force.
    #[cfg(feature = "tokio")]
    own: RulesText,
    /// The settings of operators for the rules.
    #[cfg(feature = "tokio")]
    settings: FleetRuleSettings,
    /// The fleet whose operators may put other rules in force.
    #[cfg(feature = "tokio")]
    fleet: Option<Fleet>,
    /// The number of the last reading of the file.
    reading: u64,
    error: Option<RulesError>,
    in_force: InForce,
    /// True if the last file that was put in force ends with `...`.
    is_marked: bool,
    layers: Vec<Weak<dyn Follow>>,
}

/// A text of rules, with its origin.
#[derive(Clone)]
struct RulesText {
    content: Arc<[u8]>,
    /// The file that has the text, if the text is from a file.
    file: Option<Arc<Path>>,
    /// The entry that has the text, if an operator pushed it.
    #[cfg(feature = "tokio")]
    pushed: Option<Arc<FleetEntry>>,
}

/// The content of a file, or the error if it could not be read.
pub(super) type Reading = Result<Arc<[u8]>, RulesError>;

/// The rules in force, and the text that has them.
struct InForce {
    text: RulesText,
    /// The number of rules in the text.
    count: usize,
    rules: Arc<SourcedRules>,
    facts: RulesInForce,
    tree: Option<Arc<Tree>>,
    quotas: Arc<[(Quota, Position)]>,
    /// The names of the policies and of their states, each with the position of its rule.
    names: Vec<(Box<str>, Position)>,
    history: RulesHistory,
    /// The settings of operators when the rules were made.
    #[cfg(feature = "tokio")]
    settings: FleetRuleSettings,
}

/// The data from which the next rules are made, in addition to their text.
#[derive(Default)]
struct RulesOrigin {
    version: u64,
    history: RulesHistory,
    #[cfg(feature = "tokio")]
    settings: FleetRuleSettings,
}

impl RuleStore {
    /// Reads the first rules from a file.
    pub(super) fn of_file(names: Names, path: &Path) -> Result<Self, RulesError> {
        let path: Arc<Path> = path.into();
        let content = read_file(&path).map_err(|error| error.in_file(Some(&path)))?;
        Self::new(names, Some(path), content)
    }

    /// Reads rules from a text.
    pub(super) fn of_text(names: Names, text: Vec<u8>) -> Result<Self, RulesError> {
        Self::new(names, None, text.into())
    }

    fn new(names: Names, path: Option<Arc<Path>>, content: Arc<[u8]>) -> Result<Self, RulesError> {
        let names = Arc::new(names);
        let text = RulesText::own(&content, path.as_ref());
        let in_force = InForce::new(&names, &text, RulesOrigin::default()).map_err(|error| text.located(error))?;
        let is_marked = has_end_mark(&content);
        let state = RulesState {
            #[cfg(feature = "tokio")]
            own: text,
            #[cfg(feature = "tokio")]
            settings: FleetRuleSettings::default(),
            #[cfg(feature = "tokio")]
            fleet: None,
            read: Ok(content),
            reading: 0,
            error: None,
            in_force,
            is_marked,
            layers: Vec::new(),
        };
        Ok(Self { names, path, reads: Mutex::default(), state: Mutex::new(state) })
    }

    /// Reads the file.
    pub(super) fn read(&self) -> Reading {
        match &self.path {
            Some(path) => read_file(path).map_err(|error| error.in_file(Some(path))),
            None => Err(RulesError::of_file("the rules are not from a file: replace them by Rules::replace")),
        }
    }

    /// Returns whether the last reading of the file had the same result as `reading`.
    pub(super) fn has_read(&self, reading: &Reading) -> bool {
        self.state().read == *reading
    }

    /// Notes that the rules of the last reading were not put in force, so that the next reading counts as a change.
    pub(super) fn forget_reading(&self) {
        self.state().read = Err(RulesError::of_file("the rules were read, but a limiter panicked when it got them"));
    }

    /// Reads the file. If `is_wanted` returns true for the content, puts the rules in force, and
    /// otherwise returns `None`.
    pub(super) fn reload(&self, is_wanted: impl Fn(&Reading) -> bool) -> Option<Result<u64, RulesError>> {
        let (read, reading) = {
            let _alone = lock(&self.reads);
            let read = self.read();
            if !is_wanted(&read) {
                return None;
            }
            let mut state = self.state();
            state.read.clone_from(&read);
            state.reading += 1;
            (read, state.reading)
        };
        Some(match read {
            Ok(content) => self.put_own_in_force(&content, Some(reading)),
            #[cfg(feature = "tokio")]
            Err(error) if self.pushed_in_force().is_some() => self.refuse_own(error, Some(reading)),
            Err(error) => self.refuse(error, Some(reading)),
        })
    }

    /// Puts the rules of a text in force.
    pub(super) fn replace(&self, content: &Arc<[u8]>) -> Result<u64, RulesError> {
        self.put_own_in_force(content, None)
    }

    /// Puts the program's own rules in force. If operators have put other rules in force, the program's own rules are
    /// only kept for later.
    fn put_own_in_force(&self, content: &Arc<[u8]>, reading: Option<u64>) -> Result<u64, RulesError> {
        let own = RulesText::own(content, self.path.as_ref().filter(|_| reading.is_some()));
        #[cfg(feature = "tokio")]
        if let Some(pushed) = self.pushed_in_force() {
            return match self.check_next(&own) {
                Ok(()) => Ok(self.keep_own(own, &pushed)),
                Err(error) => self.refuse_own(own.located(error), reading),
            };
        }
        let version = self.put_in_force(&own, reading)?;
        #[cfg(feature = "tokio")]
        {
            self.state().own = own;
        }
        Ok(version)
    }

    /// Puts the rules of a text or a file in force, unless the file was read again after the reading with this
    /// number. No lock is held while limiters and observers are called, because they are the application's code and
    /// may call this method. So other rules may come into force before these rules do. Then the method starts again.
    fn put_in_force(&self, text: &RulesText, reading: Option<u64>) -> Result<u64, RulesError> {
        let content = &text.content;
        loop {
            let (origin, domain, layers, is_marked) = {
                let mut state = self.state();
                if state.in_force.text.content == *content && state.has_settings() {
                    #[cfg(feature = "tokio")]
                    state.in_force.text.pushed.clone_from(&text.pushed);
                    let had_error = state.error.take().is_some();
                    let (version, layers, loaded) =
                        (state.in_force.rules.version, state.layers(), state.in_force.event());
                    drop(state);
                    // A limiter may have panicked before its layer applied the rules, so each layer applies them
                    // again.
                    each(&layers, |layer| layer.follow());
                    if had_error {
                        // The observer got the error, so it now gets the event that rules are in force
                        // without an error.
                        report(&layers, &loaded);
                    }
                    return Ok(version);
                }
                let is_marked = state.is_marked && reading.is_some();
                (state.origin(), state.in_force.domain(), state.layers(), is_marked)
            };
            let before = origin.version - 1;
            let next = if is_marked && !has_end_mark(content) { Err(incomplete(content)) } else { Ok(()) }
                .and_then(|()| InForce::new(&self.names, text, origin))
                .and_then(|next| next.accepted_by(&layers, domain.as_deref()).map(|()| next));
            let next = match next {
                Ok(next) => next,
                Err(error) => return self.refuse(text.located(error), reading),
            };
            let loaded = next.event();
            let mut changes = String::new();
            let layers = {
                let mut state = self.state();
                if state.is_outdated(reading) {
                    return Ok(state.in_force.rules.version);
                }
                if state.in_force.rules.version != before {
                    continue;
                }
                changes.push_str(&next.changes_since(&state.in_force));
                (state.in_force, state.error) = (next, None);
                if reading.is_some() {
                    state.is_marked = has_end_mark(content);
                }
                state.layers() // also rules that have come since then
            };
            each(&layers, |layer| layer.follow());
            loaded.log(&changes);
            each(&layers, |layer| layer.report(&loaded));
            return Ok(before + 1);
        }
    }

    /// Keeps the present rules in force, and reports the error, unless the file was read again
    /// after this reading.
    fn refuse(&self, error: RulesError, reading: Option<u64>) -> Result<u64, RulesError> {
        self.note_error(&error, reading, RulesEvent::refused);
        Err(error)
    }

    /// Notes an error, and reports it by an event with its text, unless the file was read again
    /// after this reading.
    fn note_error(&self, error: &RulesError, reading: Option<u64>, event: impl FnOnce(String) -> RulesEvent) {
        let layers = {
            let mut state = self.state();
            if state.is_outdated(reading) {
                return;
            }
            state.error = Some(error.clone());
            state.layers()
        };
        report(&layers, &event(WithSources(error).to_string()));
    }

    /// Returns an error if a quota in force is not supported. If an operator pushed the rules in force, the program's
    /// own rules come into force instead, so that pushed rules cannot keep a program from starting.
    pub(super) fn check(&self, supports: impl Fn(&Quota) -> Result<(), UnsupportedQuota>) -> Result<(), RulesError> {
        let checked = self.check_in_force(&supports);
        #[cfg(feature = "tokio")]
        if let Some(error) = checked.as_ref().err().filter(|error| error.is_of_pushed()) {
            let own = self.state().own.clone();
            self.put_in_force(&own, None)?;
            let _ = self.refuse(error.clone(), None); // the state and the log have it
            return self.check_in_force(&supports);
        }
        checked
    }

    fn check_in_force(&self, supports: impl Fn(&Quota) -> Result<(), UnsupportedQuota>) -> Result<(), RulesError> {
        let (text, quotas) = {
            let InForce { text, quotas, .. } = &self.state().in_force;
            (text.clone(), Arc::clone(quotas))
        };
        let mut problems = problems_of(&text.content);
        all_supported(&quotas, supports, &mut problems);
        problems.into_result(Some(())).map_err(|error| text.located(error))
    }

    /// Returns the limits in force, if the file has Envoy's form.
    pub(super) fn tree(&self) -> Option<Arc<Tree>> {
        self.state().in_force.tree.clone()
    }

    /// Returns whether the program has set which descriptors a request has.
    pub(super) fn describes(&self) -> bool {
        self.names.describe.is_some()
    }

    /// Adds a follower. It follows changes of the rules, and says whether it supports a quota.
    pub(super) fn follow(&self, follower: Weak<dyn Follow>) {
        let mut state = self.state();
        state.layers.retain(|layer| layer.strong_count() > 0);
        state.layers.push(follower);
    }

    pub(super) fn version(&self) -> u64 {
        self.state().in_force.rules.version
    }

    /// Returns which rules are in force.
    pub(super) fn facts(&self) -> RulesInForce {
        self.state().in_force.facts
    }

    pub(super) fn error(&self) -> Option<RulesError> {
        self.state().error.clone()
    }

    fn state(&self) -> MutexGuard<'_, RulesState> {
        lock(&self.state)
    }
}

#[cfg(feature = "tokio")]
impl FollowFleet for RuleStore {
    fn follow_fleet(&self, pushed: Option<&Arc<FleetEntry>>, settings: FleetRuleSettings) {
        let (text, error) = {
            let mut state = self.state();
            let is_alike = state.in_force.settings.is_alike(&settings);
            state.settings = settings;
            let error = state.error.clone().filter(RulesError::is_of_pushed);
            let text = match pushed {
                Some(entry) => {
                    RulesText { content: entry.value.as_bytes().into(), file: None, pushed: Some(Arc::clone(entry)) }
                }
                None if state.in_force.text.pushed.is_some() => state.own.clone(),
                None if is_alike && error.is_none() => return,
                None => state.in_force.text.clone(),
            };
            (text, error)
        };
        let is_next = pushed.is_some() && self.state().in_force.text.content != text.content;
        let refused = if is_next { self.check_next(&text).map_err(|error| text.located(error)).err() } else { None };
        let Some(refused) = refused else {
            let _ = self.put_in_force(&text, None); // observers and the status page get the error
            return;
        };
        // The pushed rules are refused. The operators' other settings still apply to the rules that
        // stay in force.
        let is_known = error.as_ref() == Some(&refused);
        let present = {
            let state = self.state();
            (!state.has_settings()).then(|| state.in_force.text.clone())
        };
        if let Some(present) = &present {
            let _ = self.put_in_force(present, None);
        }
        if !is_known || present.is_some() {
            let _ = self.refuse(refused, None);
        }
    }

    fn rule_names(&self, kind: FleetKind) -> Vec<Box<str>> {
        let rules = Arc::clone(&self.state().in_force.rules);
        let rules = rules
            .rules
            .iter()
            .filter(|bound| rules.finder.is_none() && (kind != FleetKind::Override || bound.can_override_quota()));
        rules.filter_map(|bound| Some(bound.names().next()?.into())).collect()
    }

    fn check_access(&self, kind: FleetKind) -> Result<(), &'static str> {
        let layers = self.state().layers();
        match kind {
            FleetKind::Key => {
                Err("rules of a file know clients by their addresses: set a `network`, or limit the key by \
                                   a rule")
            }
            FleetKind::Network if !layers.iter().all(|layer| layer.checks_access()) => {
                Err("descriptors name no client: give the descriptor of this client `requests_per_unit: 0` in the \
                     file, or block the network in Envoy")
            }
            _ => Ok(()),
        }
    }

    fn check_text(&self, text: &str) -> Result<(), String> {
        let checked = self.check_next(&RulesText::own(&Arc::from(text.as_bytes()), None));
        checked.map_err(|error| WithSources(&error).to_string())
    }
}

#[cfg(feature = "tokio")]
impl RuleStore {
    /// Keeps a fleet alive, so that the rules keep following it.
    pub(super) fn keep(&self, fleet: Fleet) {
        self.state().fleet = Some(fleet);
    }

    /// Returns an error if the rules of a text could not be put in force now.
    fn check_next(&self, text: &RulesText) -> Result<(), RulesError> {
        let (origin, domain, layers) = {
            let state = self.state();
            (state.origin(), state.in_force.domain(), state.layers())
        };
        let next = InForce::new(&self.names, text, origin)?;
        next.accepted_by(&layers, domain.as_deref())
    }

    /// Returns the entry of the rules in force, if an operator pushed them.
    fn pushed_in_force(&self) -> Option<Arc<FleetEntry>> {
        self.state().in_force.text.pushed.clone()
    }

    /// Keeps the program's own rules for later, while rules that an operator pushed are in force.
    fn keep_own(&self, own: RulesText, pushed: &FleetEntry) -> u64 {
        let (version, layers) = {
            let mut state = self.state();
            let had_error = state.error.take_if(|error| !error.is_of_pushed()).is_some();
            let is_changed = state.own.content != own.content || had_error;
            state.own = own;
            (state.in_force.rules.version, if is_changed { Some(state.layers()) } else { None })
        };
        if let Some(layers) = layers {
            report(&layers, &RulesEvent::unused(&*pushed.by, pushed.revision, None));
        }
        version
    }

    /// Refuses new rules of the program while pushed rules are in force. Keeps the program's former rules
    /// for later, and reports the error, unless the file was read again after this reading.
    fn refuse_own(&self, error: RulesError, reading: Option<u64>) -> Result<u64, RulesError> {
        let Some(pushed) = self.pushed_in_force() else { return self.refuse(error, reading) };
        self.note_error(&error, reading, |text| RulesEvent::unused(&*pushed.by, pushed.revision, Some(text)));
        Err(error)
    }
}

impl RulesText {
    /// Makes a text of the program's own rules, which no operator pushed.
    fn own(content: &Arc<[u8]>, file: Option<&Arc<Path>>) -> Self {
        Self {
            content: Arc::clone(content),
            file: file.map(Arc::clone),
            #[cfg(feature = "tokio")]
            pushed: None,
        }
    }

    /// Adds the origin of the text to an error.
    fn located(&self, error: RulesError) -> RulesError {
        let error = error.in_file(self.file.as_ref());
        #[cfg(feature = "tokio")]
        if let Some(FleetEntry { by, revision, .. }) = self.pushed.as_deref() {
            return error.in_pushed(by, *revision);
        }
        error
    }
}

impl RulesState {
    /// Returns whether the file was read again after the reading with this number.
    fn is_outdated(&self, reading: Option<u64>) -> bool {
        reading.is_some_and(|reading| reading != self.reading)
    }

    fn origin(&self) -> RulesOrigin {
        RulesOrigin {
            version: self.in_force.rules.version + 1,
            history: self.in_force.history.clone(),
            #[cfg(feature = "tokio")]
            settings: self.settings.clone(),
        }
    }

    /// Returns whether the rules in force were made with the present settings of operators.
    fn has_settings(&self) -> bool {
        #[cfg(feature = "tokio")]
        return self.in_force.settings.is_alike(&self.settings);
        #[cfg(not(feature = "tokio"))]
        true
    }

    fn layers(&self) -> Vec<Arc<dyn Follow>> {
        self.layers.iter().filter_map(Weak::upgrade).collect()
    }
}

impl InForce {
    fn new(names: &Arc<Names>, text: &RulesText, origin: RulesOrigin) -> Result<Self, RulesError> {
        let content = &text.content;
        let RulesOrigin { version, history, .. } = origin;
        #[cfg_attr(not(feature = "tokio"), allow(unused_mut, reason = "operators set nothing"))]
        let mut bound =
            names.known(true, |known| read(content, known, |file, problems| bind(&file, names, history, problems)))?;
        #[cfg(feature = "tokio")]
        operate(&mut bound, &origin.settings, names);
        let Bound { rules, count, lists, tree, quotas, names, history } = bound;
        let finder = tree.clone().map(|tree| tree as Arc<dyn FindRules>);
        let rules = Arc::new(SourcedRules { version, rules, lists, finder });
        let facts = RulesInForce::of_text(version, content, CalendarClock.now());
        Ok(Self {
            text: text.clone(),
            count,
            rules,
            facts,
            tree,
            quotas: quotas.into(),
            names,
            history,
            #[cfg(feature = "tokio")]
            settings: origin.settings,
        })
    }

    /// Returns the event which says that the rules are in force.
    fn event(&self) -> RulesEvent {
        let file = self.text.file.as_ref().map(|file| file.to_path_buf());
        RulesEvent::loaded(self.rules.version, file, self.count)
    }

    /// Describes the differences in the quotas and modes of rules as text, at most 10 differences and the number of
    /// the further differences.
    fn changes_since(&self, before: &Self) -> String {
        let (old, new) = (before.rules.words(), self.rules.words());
        let is_in = |name: &str, words: &BTreeMap<String, String>| words.contains_key(name);
        let added = new.keys().filter(|name| !is_in(name, &old)).map(|name| format!("{name} is new"));
        let gone = old.keys().filter(|name| !is_in(name, &new)).map(|name| format!("{name} is gone"));
        let changed = new.iter().filter_map(|(name, now)| {
            let then = old.get(name).filter(|then| *then != now)?;
            Some(format!("{name}: {then} -> {now}"))
        });
        let all: Vec<String> = changed.chain(added).chain(gone).collect();
        let Some(more) = all.len().checked_sub(CHANGES_MAX).filter(|more| *more > 0) else {
            return if all.is_empty() { "no quota and no mode changed".to_owned() } else { all.join("; ") };
        };
        format!("{}; and {more} more", all.get(..CHANGES_MAX).unwrap_or_default().join("; "))
    }

    /// Returns the domain of a file in Envoy's form.
    fn domain(&self) -> Option<Box<str>> {
        self.tree.as_ref().map(|tree| tree.domain.clone())
    }

    /// Returns an error if a layer cannot use the rules. `domain` is the domain of the present rules.
    fn accepted_by(&self, layers: &[Arc<dyn Follow>], domain: Option<&str>) -> Result<(), RulesError> {
        let mut problems = problems_of(&self.text.content);
        // A layer that was made for another form or domain would let all requests pass.
        match (domain, self.domain()) {
            (Some(before), Some(now)) if *before != *now => {
                let message = format!(
                    "the domain changes from {} to {}: that needs a restart of the program",
                    Quoted(before),
                    Quoted(&now)
                );
                problems.add(RulesErrorKind::Value, Position::START, message);
            }
            (Some(_), None) | (None, Some(_)) => {
                let message = "the file changes between Envoy's form and the form with `rules`: that needs a restart \
                               of the program";
                problems.add(RulesErrorKind::Value, Position::START, message);
            }
            _ => {}
        }
        let supports = |quota: &Quota| layers.iter().try_for_each(|layer| layer.supports(quota));
        all_supported(&self.quotas, supports, &mut problems);
        let mut own: HashSet<String> = layers.iter().flat_map(|layer| layer.own_names()).collect();
        for (name, position) in &self.names {
            if own.remove(&**name) {
                let message = format!("the program has a rule of its own that counts as `{name}`: rename this rule");
                problems.add(RulesErrorKind::Name, *position, message);
            }
        }
        problems.into_result(Some(()))
    }
}

/// Reports an event to each layer's observer, and to `tracing` once.
fn report(layers: &[Arc<dyn Follow>], event: &RulesEvent) {
    event.log("");
    each(layers, |layer| layer.report(event));
}

/// Calls the layers one by one. If the limiter or the observer of a layer panics, the other layers are still called.
fn each(layers: &[Arc<dyn Follow>], call: impl Fn(&dyn Follow)) {
    layers.iter().for_each(|layer| contained(|| call(&**layer)));
}

fn problems_of(content: &[u8]) -> Problems<'_> {
    Problems::new(std::str::from_utf8(content).unwrap_or_default())
}

fn all_supported(
    quotas: &[(Quota, Position)],
    supports: impl Fn(&Quota) -> Result<(), UnsupportedQuota>,
    problems: &mut Problems<'_>,
) {
    for (quota, position) in quotas {
        if let Err(error) = supports(quota) {
            problems.add(RulesErrorKind::Value, *position, error.to_string());
        }
    }
}

/// Checks a text as a store would read it, except that unregistered names are not problems. Returns the unregistered
/// names, and warnings.
pub(super) fn check(names: &Names, content: &[u8]) -> Result<RulesReport, RulesError> {
    let (mut unregistered, mut warned) = (Vec::new(), Vec::new());
    let checked = names.known(false, |known| {
        let look = |file: &FileSpec, problems: &Problems<'_>| warned = problems.located(warnings(file));
        read_and_look(content, known, look, |file, problems| {
            unregistered = problems.take_names();
            let mut names = names.clone();
            for name in &unregistered {
                match name.kind() {
                    NameKind::Key => names.key(name.name().to_owned(), crate::key::global()),
                    NameKind::Action => names.action(name.name().to_owned(), |_| false),
                }
            }
            bind(&file, &Arc::new(names), RulesHistory::default(), problems);
        })
    });
    match checked {
        Ok(()) => Ok(RulesReport { unregistered: unregistered.into(), warnings: warned.into() }),
        Err(error) => Err(error.with_unregistered(unregistered).with_warnings(warned)),
    }
}

/// Returns whether the last line is `...`, which ends a YAML document.
fn has_end_mark(content: &[u8]) -> bool {
    content
        .trim_ascii_end()
        .strip_suffix(b"...")
        .is_some_and(|before| matches!(before.last(), None | Some(b'\n' | b'\r')))
}

/// Returns the error for a file without its end mark `...`.
fn incomplete(content: &[u8]) -> RulesError {
    let text = std::str::from_utf8(content).unwrap_or_default();
    let mut problems = Problems::new(text);
    let message = "the file was not written in full: its last line is not `...` any more; to leave `...` out, \
                   restart the program";
    problems.add(RulesErrorKind::Syntax, end_of(text.trim_end()), message);
    problems.into_error()
}

/// Reads a file up to one byte more than a file of rules may have, so that a larger file fails the check of its size.
fn read_file(path: &Path) -> Reading {
    let unreadable = |error: std::io::Error| RulesError::unreadable(path, error);
    // Checks first whether this is a file, because opening a pipe would wait for the pipe's writer.
    let is_file = std::fs::metadata(path).map_err(unreadable)?.is_file();
    if !is_file {
        return Err(RulesError::of_file(format!("{}: it is not a file", path.display())));
    }
    let mut content = Vec::new();
    let file = File::open(path).map_err(unreadable)?;
    file.take(BYTES_MAX as u64 + 1).read_to_end(&mut content).map_err(unreadable)?;
    Ok(content.into())
}

impl RuleSource for RuleStore {
    fn current(&self) -> Arc<SourcedRules> {
        Arc::clone(&self.state().in_force.rules)
    }

    fn in_force(&self) -> RulesInForce {
        self.facts()
    }

    fn enter(&self, layer: Weak<dyn Follow>) {
        self.follow(layer);
    }
}
