//! Reads the settings that a file states once for many rules: `defaults`, and the templates that
//! rules `use`.

use std::collections::HashMap;

use super::super::document::{Node, NodeValue, Size, TEXTS_MAX};
use super::super::problem::{Position, Quoted, RulesErrorKind};
use super::super::spec::{At, CostSpec, KeySpec, MatchSpec, Name, QuotaSpec};
use super::value::{Fields, PATTERNS_MAX, ValueReader};
use crate::middleware::rule::PacedBodies;
use crate::middleware::rule::definition::MissingKey;
use crate::mode::Mode;
use crate::quota::Quota;

/// Lists the fields of a rule, of an entry of the short list, or of `defaults`. All three share the fields that are
/// written here. The first argument is put before the shared fields, and the second before `enabled`.
macro_rules! with_options {
    ([$($first:literal),*], [$($last:literal),*]) => {
        &[
            $($first,)*
            "key",
            "match",
            "cost",
            "mode",
            "missing-key",
            "warn-at",
            "pace",
            "pace-after",
            "block",
            "candidate",
            $($last,)*
            "enabled",
        ]
    };
}
pub(super) use with_options;

/// The fields that can be stated once for many rules: all fields of a rule except its names and its
/// template.
pub(in crate::rules) const SETTINGS: &[&str] = with_options!(["quota", "plans"], []);

/// The maximum number of values that all rules of a file inherit together. A value that several
/// rules inherit counts once for each rule.
const VALUES_MAX: usize = 500_000;

/// The two forms of a rule.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum RuleForm {
    Rule,
    /// An entry of the short list, whose action is its name.
    Entry,
}

/// The value of a field, or `None` if the field is absent. An error means that a problem was added.
type Setting<T> = Result<Option<T>, ()>;

/// The fields of a rule that a template or `defaults` can state.
#[derive(Clone)]
pub(super) struct RuleSettings {
    pub(super) quota: Setting<QuotaSpec>,
    pub(super) key: Setting<Vec<At<KeySpec>>>,
    pub(super) matches: Setting<MatchSpec>,
    pub(super) cost: Setting<At<CostSpec>>,
    pub(super) mode: Setting<Mode>,
    pub(super) missing_key: Setting<MissingKey>,
    pub(super) warn_at: Setting<u8>,
    pub(super) pace: Setting<PacedBodies>,
    pub(super) pace_after: Setting<u64>,
    pub(super) block: Setting<At<Quota>>,
    pub(super) candidate: Setting<At<Quota>>,
    pub(super) is_enabled: Setting<bool>,
}

impl RuleSettings {
    /// Makes settings whose fields are all absent, or are all errors.
    fn all(absent: Result<(), ()>) -> Self {
        fn of<T>(absent: Result<(), ()>) -> Setting<T> {
            absent.map(|()| None)
        }
        Self {
            quota: of(absent),
            key: of(absent),
            matches: of(absent),
            cost: of(absent),
            mode: of(absent),
            missing_key: of(absent),
            warn_at: of(absent),
            pace: of(absent),
            pace_after: of(absent),
            block: of(absent),
            candidate: of(absent),
            is_enabled: of(absent),
        }
    }

    /// Returns these settings, in which `others` fill in the absent fields.
    fn or(self, others: &Self) -> Self {
        fn or<T: Clone>(own: Setting<T>, other: &Setting<T>) -> Setting<T> {
            match own {
                Ok(None) => other.clone(),
                own => own,
            }
        }
        Self {
            quota: or(self.quota, &others.quota),
            key: or(self.key, &others.key),
            matches: or(self.matches, &others.matches),
            cost: or(self.cost, &others.cost),
            mode: or(self.mode, &others.mode),
            missing_key: or(self.missing_key, &others.missing_key),
            warn_at: or(self.warn_at, &others.warn_at),
            pace: or(self.pace, &others.pace),
            pace_after: or(self.pace_after, &others.pace_after),
            block: or(self.block, &others.block),
            candidate: or(self.candidate, &others.candidate),
            is_enabled: or(self.is_enabled, &others.is_enabled),
        }
    }
}

/// Settings that rules can inherit.
struct SettingsSource {
    settings: RuleSettings,
    size: Size,
    /// The number of patterns with `*` in these settings.
    patterns: usize,
}

/// A template of the file.
struct Template {
    position: Position,
    source: SettingsSource,
    is_used: bool,
}

/// The settings that a file states once for many rules.
#[derive(Default)]
pub(super) struct SharedSettings {
    defaults: Option<SettingsSource>,
    templates: HashMap<Box<str>, Template>,
    taken: InheritedSize,
}

/// The total size of the settings that rules have inherited so far.
#[derive(Default)]
struct InheritedSize {
    size: Size,
    is_too_large: bool,
}

impl SharedSettings {
    /// Returns whether a rule may inherit fields that it does not write itself.
    pub(super) fn helps(&self, fields: &Fields<'_, '_>) -> bool {
        self.defaults.is_some() || fields.get("use").is_some()
    }

    /// Returns the templates that no rule uses.
    pub(super) fn unused(self) -> Vec<Name> {
        let unused = self.templates.into_iter().filter(|(_, template)| !template.is_used);
        unused.map(|(name, template)| At { value: name, position: template.position }).collect()
    }
}

/// Each of these methods adds a problem if it returns an error.
impl ValueReader<'_, '_, '_> {
    /// Reads `defaults` and `templates`.
    pub(super) fn shared(&mut self, fields: &Fields<'_, '_>) -> SharedSettings {
        let mut shared = SharedSettings::default();
        if let Some(node) = fields.get("defaults") {
            shared.defaults = Some(self.source(node, "`defaults`"));
        }
        let Some(node) = fields.get("templates") else { return shared };
        let NodeValue::Map(entries) = &node.value else {
            let expected = "a mapping of templates, such as `{partner: {key: header x-partner}}`";
            self.wrong_type::<()>(node, "`templates`", expected);
            return shared;
        };
        for entry in entries {
            let source = self.source(&entry.node, "a template");
            let template = Template { position: entry.position, source, is_used: false };
            shared.templates.insert((*entry.name).into(), template);
        }
        shared
    }

    fn source(&mut self, node: &Node<'_>, what: &'static str) -> SettingsSource {
        let before = self.patterns;
        let settings = match self.fields(node, what, SETTINGS) {
            Some(fields) if fields.entries.is_empty() => {
                self.problems.add(RulesErrorKind::Value, node.position, format!("{what} has no field: leave it out"));
                RuleSettings::all(Err(()))
            }
            Some(fields) => self.settings(&fields, RuleForm::Rule),
            None => RuleSettings::all(Err(())),
        };
        SettingsSource { settings, size: node.size, patterns: self.patterns - before }
    }

    /// Reads the fields of a mapping that a template or `defaults` could state, too.
    pub(super) fn settings(&mut self, fields: &Fields<'_, '_>, form: RuleForm) -> RuleSettings {
        RuleSettings {
            quota: match form {
                RuleForm::Rule => self.quotas_or_plans(fields),
                RuleForm::Entry => self.quota_of_unit(fields).map(|quota| Some(QuotaSpec::All(vec![quota]))),
            }
            .ok_or(()),
            key: self.setting(fields, "key", |reader, node, _| reader.key(node)),
            matches: self.setting(fields, "match", |reader, node, _| reader.matches(node)),
            cost: self.setting(fields, "cost", |reader, node, _| reader.cost(node)),
            mode: self.setting(fields, "mode", |reader, node, what| reader.choice(node, what, Mode::WORDS)),
            missing_key: self
                .setting(fields, "missing-key", |reader, node, what| reader.choice(node, what, MissingKey::WORDS)),
            warn_at: self.setting(fields, "warn-at", Self::percentage),
            pace: self.setting(fields, "pace", |reader, node, what| reader.choice(node, what, PacedBodies::WORDS)),
            pace_after: self.setting(fields, "pace-after", Self::units),
            block: self.setting(fields, "block", |reader, node, _| reader.block(node)),
            candidate: self.setting(fields, "candidate", Self::candidate),
            is_enabled: self.setting(fields, "enabled", Self::truth),
        }
    }

    fn setting<T>(
        &mut self,
        fields: &Fields<'_, '_>,
        field: &'static str,
        read: impl FnOnce(&mut Self, &Node<'_>, &'static str) -> Option<T>,
    ) -> Setting<T> {
        self.optional(fields, field, read).ok_or(())
    }

    /// Fills in the absent settings of a rule from its template, and then from `defaults`.
    pub(super) fn with_shared(
        &mut self,
        own: RuleSettings,
        fields: &Fields<'_, '_>,
        shared: &mut SharedSettings,
    ) -> RuleSettings {
        let SharedSettings { defaults, templates, taken } = shared;
        let settings = match fields.get("use") {
            Some(node) => match self.template(node, templates) {
                Some(template) => {
                    template.is_used = true;
                    self.taken_over(own, &template.source, fields.position, taken)
                }
                None => own.or(&RuleSettings::all(Err(()))),
            },
            None => own,
        };
        match defaults {
            Some(source) => self.taken_over(settings, source, fields.position, taken),
            None => settings,
        }
    }

    /// Finds the template that `use` names.
    fn template<'t>(
        &mut self,
        node: &Node<'_>,
        templates: &'t mut HashMap<Box<str>, Template>,
    ) -> Option<&'t mut Template> {
        let name = self.short_text(node, "`use`")?;
        if !templates.contains_key(name) {
            let message = format!("no template is named {}", Quoted(name));
            let otherwise = ": write it in `templates`, as in `templates: {partner: {key: header x-partner}}`";
            let known = templates.keys().map(|name| &**name);
            self.problems.add_word(RulesErrorKind::Name, node.position, &message, name, known, otherwise);
        }
        templates.get_mut(name)
    }

    /// Fills in the absent settings of the rule at this position from a source, within the bounds of the file.
    fn taken_over(
        &mut self,
        own: RuleSettings,
        source: &SettingsSource,
        position: Position,
        taken: &mut InheritedSize,
    ) -> RuleSettings {
        taken.size = taken.size.and(source.size);
        if taken.size.nodes > VALUES_MAX || taken.size.texts > TEXTS_MAX {
            if !std::mem::replace(&mut taken.is_too_large, true) {
                let message = format!(
                    "the rules inherit more than {VALUES_MAX} values or {TEXTS_MAX} bytes of text from templates and \
                     `defaults`, counted for each rule: share less, or make fewer rules"
                );
                self.problems.add(RulesErrorKind::TooLarge, position, message);
            }
            return own.or(&RuleSettings::all(Err(())));
        }
        if matches!(own.matches, Ok(None)) {
            let before = self.patterns;
            self.patterns += source.patterns;
            if before <= PATTERNS_MAX && self.patterns > PATTERNS_MAX {
                self.too_many_patterns(position);
            }
        }
        own.or(&source.settings)
    }
}
