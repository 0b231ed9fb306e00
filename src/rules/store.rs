//! The rules in force, which are read from a file, are replaced as a whole, and are followed by layers.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::{Arc, Weak};

#[cfg(feature = "fleet")]
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
#[cfg(feature = "fleet")]
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
    /// The number of the last reading of the file.
    reading: u64,
    /// The number of changes of this state. Rules that were made before the last change are made again.
    changes: u64,
    in_force: InForce,
    /// True if the program's last valid file ends with `...`.
    is_marked: bool,
    /// The rules of the program or its file, which are in force unless operators put other rules in force.
    #[cfg(feature = "fleet")]
    own: RulesText,
    /// The latest rules that came from the program or from its file, if these rules were refused.
    refused: Option<RefusedRules>,
    /// The rules that an operator pushed. They are in force unless they were refused.
    #[cfg(feature = "fleet")]
    pushed: Option<Arc<FleetEntry>>,
    /// The last rules that an operator pushed and that were refused.
    #[cfg(feature = "fleet")]
    refused_pushed: Option<RefusedRules>,
    /// The settings of operators for the rules.
    #[cfg(feature = "fleet")]
    settings: FleetRuleSettings,
    /// The fleet whose operators may put other rules in force.
    #[cfg(feature = "fleet")]
    fleet: Option<Fleet>,
    layers: Vec<Weak<dyn Follow>>,
}

/// The rules that a caller wants in force. Their text is chosen under the state's lock, so that it is the latest one.
enum Wish {
    /// New rules of the program, and the number of the reading of their file. If an operator pushed the rules in force,
    /// the new rules are only kept for later.
    New(RulesText, Option<u64>),
    /// The rules that an operator pushed, or the program's own rules if no operator pushed any.
    #[cfg(feature = "fleet")]
    OfOperators,
    /// The program's own rules.
    #[cfg(feature = "fleet")]
    Own,
    /// The rules in force, made again with the present settings of operators.
    #[cfg(feature = "fleet")]
    Present,
}

/// Rules that were not put in force, and why.
struct RefusedRules {
    text: RulesText,
    error: RulesError,
}

/// The data from which rules are made and checked.
struct Draft {
    text: RulesText,
    origin: RulesOrigin,
    /// The domain of the rules in force.
    domain: Option<Box<str>>,
    layers: Vec<Arc<dyn Follow>>,
    /// True if the text has to end with `...`.
    is_marked: bool,
    /// The number of changes of the state before this draft was made.
    changes: u64,
}

/// A text of rules, with its origin.
#[derive(Clone)]
struct RulesText {
    content: Arc<[u8]>,
    /// The file that has the text, if the text is from a file.
    file: Option<Arc<Path>>,
    /// The entry that has the text, if an operator pushed it.
    #[cfg(feature = "fleet")]
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
    #[cfg(feature = "fleet")]
    settings: FleetRuleSettings,
}

/// The data from which rules are made, in addition to their text.
#[derive(Clone, Default)]
struct RulesOrigin {
    version: u64,
    history: RulesHistory,
    #[cfg(feature = "fleet")]
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
            read: Ok(content),
            reading: 0,
            changes: 0,
            in_force,
            is_marked,
            #[cfg(feature = "fleet")]
            own: text,
            refused: None,
            #[cfg(feature = "fleet")]
            pushed: None,
            #[cfg(feature = "fleet")]
            refused_pushed: None,
            #[cfg(feature = "fleet")]
            settings: FleetRuleSettings::default(),
            #[cfg(feature = "fleet")]
            fleet: None,
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
            state.changes += 1;
            (read, state.reading)
        };
        let text = |content| RulesText::own(content, self.path.as_ref());
        Some(match read {
            Ok(content) => self.put_in_force(&Wish::New(text(&content), Some(reading))),
            Err(error) => self.refuse(RefusedRules { text: text(&Arc::default()), error }, Some(reading)),
        })
    }

    /// Puts the rules of a text in force.
    pub(super) fn replace(&self, content: &Arc<[u8]>) -> Result<u64, RulesError> {
        self.put_in_force(&Wish::New(RulesText::own(content, None), None))
    }

    /// Puts rules in force, or refuses them. Returns the version of the rules in force.
    fn put_in_force(&self, wish: &Wish) -> Result<u64, RulesError> {
        self.try_to_put(wish).or_else(|refused| self.refuse(*refused, wish.reading()))
    }

    /// Puts rules in force. Of the rules that were read from the file, only those of the last reading are put in
    /// force. No lock is held while limiters and observers are called, because they are the application's code and may
    /// change the rules. If anything changed meanwhile, the method therefore starts again.
    fn try_to_put(&self, wish: &Wish) -> Result<u64, Box<RefusedRules>> {
        loop {
            let draft = {
                let mut state = self.state();
                if state.is_outdated(wish.reading()) {
                    return Ok(state.in_force.rules.version);
                }
                let text = state.text_of(wish);
                if state.in_force.text.content == text.content && state.has_settings() && !state.keeps(wish) {
                    let (version, had_error) = (state.in_force.rules.version, state.end_error(wish, &text));
                    state.take(wish, &text);
                    state.in_force.text = text;
                    let reported = if had_error { state.loaded() } else { Vec::new() };
                    let layers = state.layers();
                    drop(state);
                    // A limiter may have panicked before its layer applied the rules, so each layer applies them
                    // again.
                    each(&layers, |layer| layer.follow());
                    reported.iter().for_each(|event| report(&layers, event, ""));
                    return Ok(version);
                }
                state.draft(text, wish.reading().is_some())
            };
            let next = match draft.make(&self.names) {
                Ok(next) => next,
                Err(error) => return Err(RefusedRules { error, text: draft.text }.into()),
            };
            let mut state = self.state();
            if state.changes != draft.changes {
                continue;
            }
            #[cfg(feature = "fleet")]
            if let Some(pushed) = state.in_force.text.pushed.clone().filter(|_| state.keeps(wish)) {
                let had_error = state.end_error(wish, &draft.text);
                let is_changed = had_error || state.own.content != draft.text.content;
                state.take(wish, &draft.text);
                let (version, layers) = (state.in_force.rules.version, state.layers());
                drop(state);
                if is_changed {
                    report(&layers, &RulesEvent::unused(&*pushed.by, pushed.revision, None), "");
                }
                return Ok(version);
            }
            let (changes, version) = (next.changes_since(&state.in_force), next.rules.version);
            state.end_error(wish, &draft.text);
            state.take(wish, &draft.text);
            state.in_force = next;
            let (reported, layers) = (state.loaded(), state.layers()); // also layers that have come since then
            drop(state);
            each(&layers, |layer| layer.follow());
            reported.iter().for_each(|event| report(&layers, event, &changes));
            return Ok(version);
        }
    }

    /// Notes and reports that rules were refused. Of the rules that were read from the file, only those of the last
    /// reading are noted and reported. Returns the error of the rules in any case.
    fn refuse(&self, refused: RefusedRules, reading: Option<u64>) -> Result<u64, RulesError> {
        let error = refused.error.clone();
        let (layers, event) = {
            let mut state = self.state();
            let event = if state.is_outdated(reading) { None } else { state.refuse(refused) };
            (state.layers(), event)
        };
        if let Some(event) = event {
            report(&layers, &event, "");
        }
        Err(error)
    }

    /// Returns an error if a quota in force is not supported. If an operator pushed the rules in force, the program's
    /// own rules come into force instead, so that pushed rules cannot keep a program from starting.
    pub(super) fn check(&self, supports: &dyn Fn(&Quota) -> Result<(), UnsupportedQuota>) -> Result<(), RulesError> {
        let (text, quotas) = {
            let InForce { text, quotas, .. } = &self.state().in_force;
            (text.clone(), Arc::clone(quotas))
        };
        let mut problems = problems_of(&text.content);
        all_supported(&quotas, supports, &mut problems);
        let checked = problems.into_result(Some(())).map_err(|error| text.located(error));
        #[cfg(feature = "fleet")]
        if let (Err(error), Some(_)) = (&checked, &text.pushed) {
            let error = error.clone();
            self.put_in_force(&Wish::Own)?;
            let _ = self.refuse(RefusedRules { text, error }, None); // the state and the log have it
            return self.check(supports);
        }
        checked
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
        state.changes += 1;
    }

    pub(super) fn version(&self) -> u64 {
        self.state().in_force.rules.version
    }

    /// Returns which rules are in force.
    pub(super) fn facts(&self) -> RulesInForce {
        self.state().in_force.facts
    }

    pub(super) fn error(&self) -> Option<RulesError> {
        self.state().refused().next().map(|refused| refused.error.clone())
    }

    fn state(&self) -> MutexGuard<'_, RulesState> {
        lock(&self.state)
    }
}

#[cfg(feature = "fleet")]
impl FollowFleet for RuleStore {
    fn follow_fleet(&self, pushed: Option<&Arc<FleetEntry>>, settings: FleetRuleSettings) {
        {
            let mut state = self.state();
            let was_pushed = state.pushed.is_some() || state.in_force.text.pushed.is_some();
            state.pushed = pushed.map(Arc::clone);
            state.settings = settings;
            if pushed.is_none() && !was_pushed && state.has_settings() {
                return;
            }
            state.changes += 1;
        }
        if let Err(refused) = self.try_to_put(&Wish::OfOperators) {
            // The other settings apply to the rules that stay in force.
            let _ = self.put_in_force(&Wish::Present); // observers and the status page get the error
            let _ = self.refuse(*refused, None);
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

    #[cfg(feature = "status")]
    fn has_rule(&self, name: &str) -> bool {
        let rules = Arc::clone(&self.state().in_force.rules);
        let mut first = rules.rules.iter().filter_map(|bound| bound.policies().first());
        rules.finder.is_none() && first.any(|policy| policy.name() == name || policy.stored_name() == name)
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

    #[cfg(feature = "status")]
    fn own_text(&self) -> Arc<[u8]> {
        Arc::clone(&self.state().own.content)
    }

    fn check_text(&self, text: &str) -> Result<(), String> {
        let draft = self.state().draft(RulesText::own(&Arc::from(text.as_bytes()), None), false);
        draft.make(&self.names).map(drop).map_err(|error| WithSources(&error).to_string())
    }
}

#[cfg(feature = "fleet")]
impl RuleStore {
    /// Keeps a fleet alive, so that the rules keep following it.
    pub(super) fn keep(&self, fleet: Fleet) {
        self.state().fleet = Some(fleet);
    }
}

impl Wish {
    /// Returns the number of the reading that the rules are from, if a file was read for them.
    fn reading(&self) -> Option<u64> {
        match self {
            Self::New(_, reading) => *reading,
            #[cfg(feature = "fleet")]
            _ => None,
        }
    }
}

impl RulesText {
    /// Makes a text of the program's own rules, which no operator pushed.
    fn own(content: &Arc<[u8]>, file: Option<&Arc<Path>>) -> Self {
        Self {
            content: Arc::clone(content),
            file: file.map(Arc::clone),
            #[cfg(feature = "fleet")]
            pushed: None,
        }
    }

    /// Makes the text of an entry.
    #[cfg(feature = "fleet")]
    fn pushed(entry: &Arc<FleetEntry>) -> Self {
        Self { content: Arc::clone(&entry.value).into(), file: None, pushed: Some(Arc::clone(entry)) }
    }

    /// Adds the origin of the text to an error.
    fn located(&self, error: RulesError) -> RulesError {
        let error = error.in_file(self.file.as_ref());
        #[cfg(feature = "fleet")]
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

    /// Returns the text that a caller wants in force.
    fn text_of(&self, wish: &Wish) -> RulesText {
        match wish {
            Wish::New(text, _) => text.clone(),
            #[cfg(feature = "fleet")]
            Wish::OfOperators => self.pushed.as_ref().map_or_else(|| self.own.clone(), RulesText::pushed),
            #[cfg(feature = "fleet")]
            Wish::Own => self.own.clone(),
            #[cfg(feature = "fleet")]
            Wish::Present => self.in_force.text.clone(),
        }
    }

    /// Returns whether rules are only kept for later, because an operator pushed the rules in force.
    #[cfg_attr(not(feature = "fleet"), expect(unused_variables, reason = "operators push nothing"))]
    fn keeps(&self, wish: &Wish) -> bool {
        #[cfg(feature = "fleet")]
        return matches!(wish, Wish::New(..)) && self.in_force.text.pushed.is_some();
        #[cfg(not(feature = "fleet"))]
        false
    }

    /// Collects the data from which the rules of a text are made.
    fn draft(&self, text: RulesText, is_of_file: bool) -> Draft {
        let origin = RulesOrigin {
            version: self.in_force.rules.version + 1,
            history: self.in_force.history.clone(),
            #[cfg(feature = "fleet")]
            settings: self.settings.clone(),
        };
        let (domain, layers, changes) = (self.in_force.domain(), self.layers(), self.changes);
        Draft { text, origin, domain, layers, is_marked: self.is_marked && is_of_file, changes }
    }

    /// Takes over a text that is valid. If the text is new, it is the program's own text from now on.
    fn take(&mut self, wish: &Wish, text: &RulesText) {
        self.changes += 1;
        if wish.reading().is_some() {
            self.is_marked = has_end_mark(&text.content);
        }
        #[cfg(feature = "fleet")]
        if matches!(wish, Wish::New(..)) {
            self.own.clone_from(text);
        }
    }

    /// Removes the errors that no longer apply, because this text is valid. Returns whether there were any.
    fn end_error(&mut self, wish: &Wish, text: &RulesText) -> bool {
        let is_new = matches!(wish, Wish::New(..));
        let is_ended = |refused: &mut RefusedRules| is_new || refused.text.content == text.content;
        let own = self.refused.take_if(is_ended);
        #[cfg(feature = "fleet")]
        let own = own.or(if matches!(wish, Wish::OfOperators) { self.refused_pushed.take() } else { None });
        own.is_some()
    }

    /// Returns the rules that were refused: the program's latest rules, and those that an operator pushed.
    fn refused(&self) -> impl Iterator<Item = &RefusedRules> {
        let refused = self.refused.iter();
        #[cfg(feature = "fleet")]
        let refused = refused.chain(self.refused_pushed.iter().filter(|pushed| pushed.text.pushed == self.pushed));
        refused
    }

    /// Notes that rules were refused. Returns the event, or `None` if it was reported before.
    fn refuse(&mut self, refused: RefusedRules) -> Option<RulesEvent> {
        let event = self.refused_event(&refused);
        #[cfg(feature = "fleet")]
        if refused.text.pushed.is_some() {
            let is_known = self.refused_pushed.as_ref().is_some_and(|known| known.error == refused.error);
            if refused.text.pushed == self.pushed {
                self.refused_pushed = Some(refused);
            }
            return Some(event).filter(|_| !is_known);
        }
        self.refused = Some(refused);
        Some(event)
    }

    /// Returns the event which says that rules were refused.
    fn refused_event(&self, refused: &RefusedRules) -> RulesEvent {
        let error = WithSources(&refused.error).to_string();
        #[cfg(feature = "fleet")]
        if let (None, Some(pushed)) = (&refused.text.pushed, &self.in_force.text.pushed) {
            return RulesEvent::unused(&*pushed.by, pushed.revision, Some(error));
        }
        RulesEvent::refused(error)
    }

    /// Returns the events which say that the rules are in force, and that other rules are still refused.
    fn loaded(&self) -> Vec<RulesEvent> {
        let refused = self.refused().map(|refused| self.refused_event(refused));
        std::iter::once(self.in_force.event()).chain(refused).collect()
    }

    /// Returns whether the rules in force were made with the present settings of operators.
    fn has_settings(&self) -> bool {
        #[cfg(feature = "fleet")]
        return self.in_force.settings.is_alike(&self.settings);
        #[cfg(not(feature = "fleet"))]
        true
    }

    fn layers(&self) -> Vec<Arc<dyn Follow>> {
        self.layers.iter().filter_map(Weak::upgrade).collect()
    }
}

impl Draft {
    /// Makes the rules. Returns an error if they cannot be used.
    fn make(&self, names: &Arc<Names>) -> Result<InForce, RulesError> {
        let Self { text, domain, layers, .. } = self;
        let made = if self.is_marked && !has_end_mark(&text.content) {
            Err(incomplete(&text.content))
        } else {
            InForce::new(names, text, self.origin.clone())
        };
        let made = made.and_then(|made| made.accepted_by(layers, domain.as_deref()).map(|()| made));
        made.map_err(|error| text.located(error))
    }
}

impl InForce {
    fn new(names: &Arc<Names>, text: &RulesText, origin: RulesOrigin) -> Result<Self, RulesError> {
        let content = &text.content;
        let RulesOrigin { version, history, .. } = origin;
        #[cfg_attr(not(feature = "fleet"), allow(unused_mut, reason = "operators set nothing"))]
        let mut bound =
            names.known(true, |known| read(content, known, |file, problems| bind(&file, names, history, problems)))?;
        #[cfg(feature = "fleet")]
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
            #[cfg(feature = "fleet")]
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
                let message =
                    format!("a rule in the program's code stores its usage as `{name}`, too: rename this rule");
                problems.add(RulesErrorKind::Name, *position, message);
            }
        }
        problems.into_result(Some(()))
    }
}

/// Reports an event to each layer's observer, and once to `tracing`. The event in `tracing` also has the changes of the
/// rules in words.
fn report(layers: &[Arc<dyn Follow>], event: &RulesEvent, changes: &str) {
    event.log(changes);
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

#[cfg(all(test, feature = "fleet"))]
mod tests {
    use super::*;
    use crate::base::time::Timestamp;
    use crate::fleet::FleetChange;
    use crate::limiter::UnsupportedQuotaKind;
    use crate::mode::Mode;

    type Interrupt = Box<dyn FnOnce() + Send>;

    /// A layer that does something while it is asked what it supports, once.
    #[derive(Default)]
    struct Asked {
        interrupt: Mutex<Option<Interrupt>>,
        /// The limit that the layer does not support.
        unsupported: u64,
        events: Mutex<Vec<RulesEvent>>,
    }

    impl Follow for Asked {
        fn supports(&self, quota: &Quota) -> Result<(), UnsupportedQuota> {
            let interrupt = lock(&self.interrupt).take();
            interrupt.into_iter().for_each(|interrupt| interrupt());
            if quota.limit() == self.unsupported {
                Err(UnsupportedQuota::new(UnsupportedQuotaKind::TooLarge, quota, "it is large"))
            } else {
                Ok(())
            }
        }

        fn own_names(&self) -> Vec<String> {
            Vec::new()
        }

        fn checks_access(&self) -> bool {
            true
        }

        fn report(&self, event: &RulesEvent) {
            lock(&self.events).push(event.clone());
        }

        fn follow(&self) {}
    }

    fn text(limit: u64) -> Arc<[u8]> {
        format!("rules: [{{name: a, quota: {limit} per hour, key: peer-ip}}]").into_bytes().into()
    }

    fn pushed(limit: u64, revision: u64) -> Arc<FleetEntry> {
        let text = String::from_utf8(text(limit).to_vec()).unwrap();
        let target = FleetChange::rules("rules", &*text).target().clone();
        let (at, by, why) = (Timestamp::from_micros(0), "alice".into(), "".into());
        Arc::new(FleetEntry { target, value: text.into(), until: None, revision, at, by, why })
    }

    fn push(store: &RuleStore, entry: Option<&Arc<FleetEntry>>) {
        store.follow_fleet(entry, FleetRuleSettings::default());
    }

    fn shadow() -> FleetRuleSettings {
        FleetRuleSettings { modes: [("a".into(), Mode::Shadow)].into(), ..FleetRuleSettings::default() }
    }

    /// Makes rules with a limit of 1, and their layer.
    fn store() -> (Arc<RuleStore>, Arc<Asked>) {
        let store = Arc::new(RuleStore::of_text(Names::default(), text(1).to_vec()).unwrap());
        (Arc::clone(&store), layer(&store, 0))
    }

    fn layer(store: &RuleStore, unsupported: u64) -> Arc<Asked> {
        let layer = Arc::new(Asked { unsupported, ..Asked::default() });
        let follower: Weak<dyn Follow> = Arc::downgrade(&(Arc::clone(&layer) as Arc<dyn Follow>));
        store.follow(follower);
        layer
    }

    /// Does something with the rules while the layer is asked about the next ones.
    fn interrupt(store: &Arc<RuleStore>, layer: &Asked, run: impl FnOnce(&RuleStore) + Send + 'static) {
        let store = Arc::clone(store);
        *lock(&layer.interrupt) = Some(Box::new(move || run(&store)));
    }

    fn limit(store: &RuleStore) -> u64 {
        store.state().in_force.quotas[0].0.limit()
    }

    #[test]
    fn push_during_a_replacement_holds() {
        // The second pushed text is that of the rules in force.
        for limit_pushed in [3, 1] {
            let (store, layer) = store();
            interrupt(&store, &layer, move |store| push(store, Some(&pushed(limit_pushed, 1))));
            store.replace(&text(2)).unwrap();
            assert_eq!(limit(&store), limit_pushed);
            push(&store, None);
            assert_eq!(limit(&store), 2, "the replacement was kept");
        }
    }

    #[test]
    fn replacement_during_an_operators_change_holds() {
        let (store, layer) = store();
        interrupt(&store, &layer, |store| drop(store.replace(&text(2))));
        store.follow_fleet(None, shadow());
        assert_eq!((limit(&store), store.state().has_settings()), (2, true));
        push(&store, Some(&pushed(3, 1)));
        interrupt(&store, &layer, |store| drop(store.replace(&text(4))));
        push(&store, None);
        assert_eq!(limit(&store), 4, "the end of a push restores the latest rules of the program");
    }

    #[test]
    fn rules_are_checked_for_a_layer_that_comes_meanwhile() {
        let (store, first) = store();
        let second: Arc<Mutex<Option<Arc<Asked>>>> = Arc::default();
        let made = Arc::clone(&second);
        interrupt(&store, &first, move |store| *lock(&made) = Some(layer(store, 2)));
        assert!(store.replace(&text(2)).is_err());
        assert_eq!(limit(&store), 1);
    }

    #[test]
    fn error_of_own_rules_outlives_what_operators_change() {
        let (store, layer) = store();
        let error = store.replace(&Arc::from(*b"rules: [")).unwrap_err();
        let refused = RulesEvent::refused(error.to_string());
        let unused = RulesEvent::unused("alice", 1, Some(error.to_string()));
        let entry = pushed(3, 1);
        for (entry, settings, last) in [
            (None, FleetRuleSettings::default(), &refused),
            (None, shadow(), &refused),
            (Some(&entry), shadow(), &unused),
            (Some(&entry), FleetRuleSettings::default(), &unused),
            (None, FleetRuleSettings::default(), &refused),
        ] {
            store.follow_fleet(entry, settings);
            assert_eq!(store.error().as_ref(), Some(&error));
            assert_eq!(lock(&layer.events).last(), Some(last));
        }
        store.replace(&text(1)).unwrap();
        assert_eq!((store.error(), lock(&layer.events).last()), (None, Some(&RulesEvent::loaded(4, None, 1))));
    }

    #[test]
    fn error_of_pushed_rules_outlives_own_rules() {
        let (store, _first) = store();
        let layer = layer(&store, 13);
        push(&store, Some(&pushed(13, 1)));
        let error = store.error().unwrap();
        assert!(error.to_string().starts_with("alice pushed these rules in revision 1: 1:"), "{error}");
        store.replace(&text(2)).unwrap();
        assert_eq!((limit(&store), store.error().as_ref()), (2, Some(&error)));
        assert_eq!(lock(&layer.events).last(), Some(&RulesEvent::refused(error.to_string())));
        push(&store, None);
        assert_eq!((store.error(), lock(&layer.events).last()), (None, Some(&RulesEvent::loaded(1, None, 1))));
    }

    #[test]
    fn equal_rules_have_the_origin_of_the_last_ones() {
        let path = std::env::temp_dir().join(format!("tower-ratelimit-origin-{}", std::process::id()));
        std::fs::write(&path, text(1)).unwrap();
        let store = RuleStore::of_file(Names::default(), &path).unwrap();
        let origin = || {
            let state = store.state();
            (state.in_force.text.file.is_some(), state.in_force.text.pushed.is_some())
        };
        assert_eq!(origin(), (true, false));
        store.replace(&text(1)).unwrap();
        assert_eq!(origin(), (false, false));
        push(&store, Some(&pushed(1, 1)));
        assert_eq!(origin(), (false, true));
        store.reload(|_| true).unwrap().unwrap();
        assert_eq!(origin(), (false, true));
        push(&store, None);
        assert_eq!(origin(), (true, false));
        assert_eq!(store.version(), 0);
        std::fs::remove_file(path).unwrap();
    }
}
