//! The rules in force, which are read from a file, are replaced as a whole, and are followed by layers.

use std::path::Path;
use std::sync::{Arc, Weak};

use self::file::{Reading, read_file};
use self::in_force::{InForce, RulesOrigin, RulesText, all_supported, problems_of};
use self::state::{RefusedRules, RulesState, Wish};
use super::error::RulesError;
use super::names::Names;
use super::tree::Tree;
use crate::base::sync::{Mutex, MutexGuard, contained, lock};
#[cfg(feature = "fleet")]
use crate::error::WithSources;
use crate::event::RulesEvent;
#[cfg(feature = "fleet")]
use crate::fleet::{Fleet, FleetEntry, FleetKind, FleetRuleSettings, FollowFleet};
#[cfg(feature = "fleet")]
use crate::key::{Key, Prefixes};
use crate::limiter::UnsupportedQuota;
use crate::middleware::rule::Follow;
use crate::middleware::source::{RuleSource, SourcedRules};
#[cfg(feature = "fleet")]
use crate::policy::Policy;
use crate::quota::Quota;
use crate::rules_in_force::RulesInForce;

mod file;
mod in_force;
mod state;

/// The rules of a file, and the layers that follow them.
pub(super) struct RuleStore {
    names: Arc<Names>,
    path: Option<Arc<Path>>,
    /// The lock that is held while the file is read and numbered, so that a later reading has a
    /// higher number.
    reads: Mutex<()>,
    state: Mutex<RulesState>,
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
        let state = Mutex::new(RulesState::new(content, in_force));
        Ok(Self { names, path, reads: Mutex::default(), state })
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
                    let reported = if had_error { state.loaded(String::new()) } else { Vec::new() };
                    let layers = state.layers();
                    drop(state);
                    // A limiter may have panicked before its layer applied the rules, so each layer applies them
                    // again.
                    each(&layers, |layer| layer.follow());
                    reported.iter().for_each(|event| report(&layers, event));
                    return Ok(version);
                }
                state.draft(text, wish.reading().is_some())
            };
            let mut next = match draft.make(&self.names) {
                Ok(next) => next,
                Err(error) => return Err(RefusedRules { error, text: draft.text }.into()),
            };
            let others = draft.other_changes();
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
                    report(&layers, &RulesEvent::unused(&*pushed.by, pushed.revision, None));
                }
                return Ok(version);
            }
            let (changes, version) = (next.changes_since(&state.in_force, others), next.rules.version);
            state.end_error(wish, &draft.text);
            state.take(wish, &draft.text);
            if next.text.content == state.in_force.text.content {
                // Only the operators' settings for these rules are new.
                next.facts.loaded_at = state.in_force.facts.loaded_at;
            }
            state.in_force = next;
            let (reported, layers) = (state.loaded(changes), state.layers()); // also layers that have come since then
            drop(state);
            each(&layers, |layer| layer.follow());
            reported.iter().for_each(|event| report(&layers, event));
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
            report(&layers, &event);
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

    fn check_key(&self, name: &str, key: &Key) -> Result<(), String> {
        let rules = Arc::clone(&self.state().in_force.rules);
        let has_name = |policy: &Policy| policy.name() == name || policy.stored_name() == name;
        let mut rule = rules.rules.iter().filter(|bound| bound.policies().first().is_some_and(has_name));
        let is_by_address = rule.next().is_some_and(|bound| bound.is_by_peer() || bound.is_by_proxies());
        if rules.finder.is_some() || !is_by_address {
            return Ok(());
        }
        let wrong = match key.address() {
            Some(address) if Prefixes::default().group(address) == address => return Ok(()),
            Some(_) => {
                "counts the addresses of an IPv6 /64 together: write the address with 64 zero bits at its end, such as \
                 2001:db8:1:2::"
            }
            None if key.is_text() => {
                "counts by addresses, and this key is no address: write one without a port, and without the length of a \
                 network"
            }
            None => return Ok(()), // clients whose addresses are unknown have keys of their own
        };
        Err(format!("the rule `{name}` {wrong}"))
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

/// Reports an event to each layer's observer, and once to `tracing`.
fn report(layers: &[Arc<dyn Follow>], event: &RulesEvent) {
    event.log();
    each(layers, |layer| layer.report(event));
}

/// Calls the layers one by one. If the limiter or the observer of a layer panics, the other layers are still called.
fn each(layers: &[Arc<dyn Follow>], call: impl Fn(&dyn Follow)) {
    layers.iter().for_each(|layer| contained(|| call(&**layer)));
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
mod tests;
