//! Makes rules from a text, and asks the layers whether they can use the rules.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::sync::Arc;

#[cfg(feature = "fleet")]
use super::super::bind::operate;
use super::super::bind::{Bound, RulesHistory, bind};
use super::super::compare::{RuleChange, compare};
use super::super::error::{Problems, RulesError};
use super::super::names::Names;
use super::super::problem::{Position, Quoted, RulesErrorKind};
use super::super::read::read;
use super::super::tree::Tree;
use super::file::{has_end_mark, incomplete};
use crate::clock::{CalendarClock, Clock};
use crate::event::RulesEvent;
#[cfg(feature = "fleet")]
use crate::fleet::{FleetEntry, FleetRuleSettings};
use crate::limiter::UnsupportedQuota;
use crate::middleware::rule::Follow;
use crate::middleware::source::{FindRules, SourcedRules};
use crate::quota::Quota;
use crate::rules_in_force::RulesInForce;

/// The maximum number of changes of rules that are logged.
const CHANGES_MAX: usize = 10;

/// The maximum length of the text of a change other than of quotas and modes, in characters.
const CHANGE_MAX: usize = 300;

/// The length of the longest text that is compared, in bytes. The time grows with the square of the number of renamed
/// rules.
const COMPARED_MAX: usize = 64 << 10;

/// A text of rules, with its origin.
#[derive(Clone)]
pub(super) struct RulesText {
    pub(super) content: Arc<[u8]>,
    /// The file that has the text, if the text is from a file.
    pub(super) file: Option<Arc<Path>>,
    /// The entry that has the text, if an operator pushed it.
    #[cfg(feature = "fleet")]
    pub(super) pushed: Option<Arc<FleetEntry>>,
}

/// The rules in force, and the text that has them.
pub(super) struct InForce {
    pub(super) text: RulesText,
    /// The number of rules in the text.
    count: usize,
    pub(super) rules: Arc<SourcedRules>,
    pub(super) facts: RulesInForce,
    pub(super) tree: Option<Arc<Tree>>,
    pub(super) quotas: Arc<[(Quota, Position)]>,
    /// The names of the policies and of their states, each with the position of its rule.
    names: Vec<(Box<str>, Position)>,
    pub(super) history: RulesHistory,
    /// The settings of operators when the rules were made.
    #[cfg(feature = "fleet")]
    pub(super) settings: FleetRuleSettings,
}

/// The data from which rules are made, in addition to their text.
#[derive(Clone, Default)]
pub(super) struct RulesOrigin {
    pub(super) version: u64,
    pub(super) history: RulesHistory,
    #[cfg(feature = "fleet")]
    pub(super) settings: FleetRuleSettings,
}

/// The data from which rules are made and checked.
pub(super) struct Draft {
    pub(super) text: RulesText,
    pub(super) origin: RulesOrigin,
    /// The text of the rules in force, and their domain.
    pub(super) before: RulesText,
    pub(super) domain: Option<Box<str>>,
    pub(super) layers: Vec<Arc<dyn Follow>>,
    /// True if the text has to end with `...`.
    pub(super) is_marked: bool,
    /// The number of changes of the state before this draft was made.
    pub(super) changes: u64,
}

impl RulesText {
    /// Makes a text of the program's own rules, which no operator pushed.
    pub(super) fn own(content: &Arc<[u8]>, file: Option<&Arc<Path>>) -> Self {
        Self {
            content: Arc::clone(content),
            file: file.map(Arc::clone),
            #[cfg(feature = "fleet")]
            pushed: None,
        }
    }

    /// Makes the text of an entry.
    #[cfg(feature = "fleet")]
    pub(super) fn pushed(entry: &Arc<FleetEntry>) -> Self {
        Self { content: Arc::clone(&entry.value).into(), file: None, pushed: Some(Arc::clone(entry)) }
    }

    /// Adds the origin of the text to an error.
    pub(super) fn located(&self, error: RulesError) -> RulesError {
        let error = error.in_file(self.file.as_ref());
        #[cfg(feature = "fleet")]
        if let Some(FleetEntry { by, revision, .. }) = self.pushed.as_deref() {
            return error.in_pushed(by, *revision);
        }
        error
    }
}

impl Draft {
    /// Makes the rules. Returns an error if they cannot be used.
    pub(super) fn make(&self, names: &Arc<Names>) -> Result<InForce, RulesError> {
        let Self { text, domain, layers, .. } = self;
        let made = if self.is_marked && !has_end_mark(&text.content) {
            Err(incomplete(&text.content))
        } else {
            InForce::new(names, text, self.origin.clone())
        };
        let made = made.and_then(|made| made.accepted_by(layers, domain.as_deref()).map(|()| made));
        made.map_err(|error| text.located(error))
    }

    /// Returns what the text changes, other than quotas and modes. Returns `None` if this is not known, because a text
    /// is too long or cannot be compared.
    pub(super) fn other_changes(&self) -> Option<Vec<String>> {
        let (before, now) = (&self.before.content, &self.text.content);
        if before == now {
            return Some(Vec::new());
        }
        let is_short = before.len().max(now.len()) <= COMPARED_MAX;
        let changes = is_short.then(|| compare(before, now).ok()).flatten()?;
        let others = changes.iter().filter(|change| !change.is_of_quota_or_mode());
        let text = |change: &RuleChange| match change.rule() {
            Some(rule) => format!("{rule}: {}", change.message()),
            None => change.message().to_owned(),
        };
        Some(others.map(text).map(shortened).collect())
    }
}

impl InForce {
    pub(super) fn new(names: &Arc<Names>, text: &RulesText, origin: RulesOrigin) -> Result<Self, RulesError> {
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
    pub(super) fn event(&self, changes: String) -> RulesEvent {
        let file = self.text.file.as_ref().map(|file| file.to_path_buf());
        RulesEvent::loaded(self.rules.version, file, self.count, changes)
    }

    /// Describes the differences from other rules as text, at most 10 differences and the number of the further
    /// differences. `others` are the differences of the texts other than quotas and modes, if they are known.
    pub(super) fn changes_since(&self, before: &Self, others: Option<Vec<String>>) -> String {
        let (old, new) = (before.rules.words(), self.rules.words());
        let is_in = |name: &str, words: &BTreeMap<String, String>| words.contains_key(name);
        let added = new.keys().filter(|name| !is_in(name, &old)).map(|name| format!("{name} is new"));
        let gone = old.keys().filter(|name| !is_in(name, &new)).map(|name| format!("{name} is gone"));
        let changed = new.iter().filter_map(|(name, now)| {
            let then = old.get(name).filter(|then| *then != now)?;
            Some(format!("{name}: {then} -> {now}"))
        });
        let is_compared = others.is_some();
        let all = changed.chain(added).chain(gone).chain(others.unwrap_or_default());
        let mut all: Vec<String> = all.collect();
        #[cfg(feature = "fleet")]
        match (before.settings.clients.is_some(), self.settings.clients.is_some()) {
            (false, true) => all.push("operators allow or deny clients".to_owned()),
            (true, false) => all.push("operators allow and deny no clients any more".to_owned()),
            _ => {}
        }
        if !is_compared {
            all.push("only quotas and modes were compared, because the rules are too long".to_owned());
        }
        if let Some(more) = all.len().checked_sub(CHANGES_MAX).filter(|more| *more > 0) {
            return format!("{}; and {more} more", all.get(..CHANGES_MAX).unwrap_or_default().join("; "));
        }
        if all.is_empty() { "no rule and no access list changed".to_owned() } else { all.join("; ") }
    }

    /// Returns the domain of a file in Envoy's form.
    pub(super) fn domain(&self) -> Option<Box<str>> {
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

/// Cuts the text of a change that is too long for a line of a log, such as a change of many networks.
fn shortened(change: String) -> String {
    match change.char_indices().nth(CHANGE_MAX) {
        Some((end, _)) => format!("{} …", change.get(..end).unwrap_or_default()),
        None => change,
    }
}

pub(super) fn problems_of(content: &[u8]) -> Problems<'_> {
    Problems::new(std::str::from_utf8(content).unwrap_or_default())
}

pub(super) fn all_supported(
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
