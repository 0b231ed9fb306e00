//! Reads a rule, and compares the names of all rules.

use std::collections::HashMap;

use super::super::document::Node;
use super::super::error::Problems;
use super::super::problem::{Position, Quoted, RulesErrorKind};
use super::super::spec::{At, KeySpec, MatchSpec, Name, QuotaSpec, RuleSpec};
use super::shared::{RuleForm, RuleSettings, SharedSettings, with_options};
use super::value::{Fields, ValueReader};
use crate::policy::Policy;
use crate::quota::Quota;
use crate::quota::error::NAME_MAX;

pub(in crate::rules) const RULE: &[&str] = with_options!(["name", "use", "quota", "plans"], ["was"]);

/// The fields of an entry of the short list.
pub(in crate::rules) const ENTRY: &[&str] = with_options!(["action", "unit", "requests_per_unit"], ["was"]);

impl ValueReader<'_, '_, '_> {
    pub(super) fn rule(
        &mut self,
        node: &Node<'_>,
        form: RuleForm,
        shared: &mut SharedSettings,
        taken: &mut UsedNames,
    ) -> Option<RuleSpec> {
        let (what, known, name) = match form {
            RuleForm::Rule => ("a rule", RULE, "name"),
            RuleForm::Entry => ("an entry of the list", ENTRY, "action"),
        };
        let fields = self.fields(node, what, known)?;
        let name = self.required(&fields, name, "").and_then(|node| self.name(node, name));
        let was = self.optional(&fields, "was", Self::name);
        let own = self.settings(&fields, form);
        let has_own_cost = !matches!(own.cost, Ok(None));
        let settings = self.with_shared(own, &fields, shared);
        let is_helped = form == RuleForm::Rule && shared.helps(&fields);
        let quota = settings.quota.ok().and_then(|quota| quota.or_else(|| self.missing_quota(&fields, is_helped)));
        let key = settings.key.ok().and_then(|key| match (key, form) {
            (Some(key), _) => Some(key),
            (None, RuleForm::Rule) => self.missing_key(&fields, is_helped),
            (None, RuleForm::Entry) => Some(vec![At { value: KeySpec::ClientIp, position: fields.position }]),
        });
        let matches = settings.matches.ok().and_then(|matches| match (matches, form) {
            (Some(matches), _) => Some(matches),
            (None, RuleForm::Rule) => Some(MatchSpec::default()),
            (None, RuleForm::Entry) => name.as_ref().and_then(|name| self.named_action(name)),
        });
        let RuleSettings {
            mut cost,
            mode,
            missing_key,
            mut warn_at,
            pace,
            pace_after,
            mut block,
            mut candidate,
            is_enabled,
            ..
        } = settings;
        if let Ok(Some(_)) = &pace {
            self.refuse_settings_of_requests(&fields);
            // Drops these fields, which have no effect on bodies. A template or `defaults` may have set them for
            // rules without a pace.
            (cost, warn_at, block, candidate) = (Ok(None), Ok(None), Ok(None), Ok(None));
        } else {
            self.refuse_field_without_pace(&fields, pace.is_ok());
        }

        if let Some(name) = &name {
            let block = matches!(block, Ok(Some(_)));
            let candidate = matches!(candidate, Ok(Some(_)));
            let quotas = if let Some(QuotaSpec::All(quotas)) = &quota { quotas.as_slice() } else { &[] };
            self.take_names(taken, name, quotas, block, candidate);
            if let Some(Some(was)) = &was {
                taken.renamed.push((name.clone(), was.clone()));
            }
        }
        if let (Some(quota), Ok(cost)) = (&quota, &cost) {
            match pace {
                Ok(Some(_)) => self.check_pace(quota),
                Ok(None) => self.check_cost(cost.as_ref(), quota, has_own_cost),
                Err(()) => {}
            }
            if let Ok(Some(candidate)) = &candidate {
                let first = match quota {
                    QuotaSpec::All(quotas) => quotas.first(),
                    QuotaSpec::Plans(plans) => plans.quotas.first().map(|(_, quota)| quota),
                };
                self.check_units(&first.into_iter().chain([candidate]).cloned().collect::<Vec<_>>())?;
            }
        }
        Some(RuleSpec {
            position: fields.position,
            name: name?,
            was: was?,
            is_enabled: is_enabled.ok()?.unwrap_or(true),
            quota: quota?,
            key: key?,
            matches: matches?,
            cost: cost.ok()?,
            mode: mode.ok()?.unwrap_or_default(),
            missing_key: missing_key.ok()?.unwrap_or_default(),
            warn_at: warn_at.ok()?,
            pace: pace.ok()?,
            pace_after: pace_after.ok()?,
            block: block.ok()?,
            candidate: candidate.ok()?,
        })
    }

    /// Refuses fields that a rule with a pace cannot have. Only fields that the rule itself writes
    /// are refused.
    fn refuse_settings_of_requests(&mut self, fields: &Fields<'_, '_>) {
        for field in ["cost", "warn-at", "block", "candidate"] {
            if let Some(node) = fields.get(field) {
                let message = format!(
                    "`{field}` applies to requests, and a rule with `pace` charges no requests: leave it out, or write \
                     a second rule for requests"
                );
                self.problems.add(RulesErrorKind::Field, node.position, message);
            }
        }
    }

    /// Refuses a quota that cannot be a pace.
    fn check_pace(&mut self, quota: &QuotaSpec) {
        let quotas: Vec<&At<Quota>> = match quota {
            QuotaSpec::All(quotas) => quotas.iter().collect(),
            QuotaSpec::Plans(plans) => plans.quotas.iter().map(|(_, quota)| quota).collect(),
        };
        if let Some(quota) = quotas.into_iter().find(|quota| !quota.algorithm().is_rate()) {
            let message =
                format!("`pace` needs a rate, such as `1 MB per second`, and \"{}\" is not a rate", quota.value);
            self.problems.add(RulesErrorKind::Value, quota.position, message);
        }
    }

    /// In a rule without a pace, refuses a field that needs a pace, if the rule itself writes the
    /// field.
    fn refuse_field_without_pace(&mut self, fields: &Fields<'_, '_>, is_absent: bool) {
        if let Some(node) = fields.get("pace-after").filter(|_| is_absent) {
            let message = "`pace-after` needs a `pace`, such as `pace: responses`";
            self.problems.add(RulesErrorKind::Field, node.position, message);
        }
    }

    fn missing_quota<T>(&mut self, fields: &Fields<'_, '_>, is_helped: bool) -> Option<T> {
        if fields.meant.iter().any(|field| ["quota", "plans"].contains(field)) {
            return None;
        }
        let message = match is_helped {
            true => {
                "neither the rule nor its template nor `defaults` has `quota` or `plans`: write one, such as `quota: 100 per minute`"
            }
            false => "a rule needs `quota` or `plans`, such as `quota: 100 per minute`",
        };
        self.refuse(RulesErrorKind::Field, fields.position, message)
    }

    fn missing_key<T>(&mut self, fields: &Fields<'_, '_>, is_helped: bool) -> Option<T> {
        if fields.meant.contains(&"key") {
            return None;
        }
        let message = match is_helped {
            true => "neither the rule nor its template nor `defaults` has a `key`: write one, such as `key: client-ip`",
            false => "a rule needs `key`, such as `key: client-ip`",
        };
        self.refuse(RulesErrorKind::Field, fields.position, message)
    }

    /// Collects the names of the rule and of its policies.
    fn take_names(&mut self, taken: &mut UsedNames, name: &Name, quotas: &[At<Quota>], block: bool, candidate: bool) {
        taken.names.push((name.value.to_string(), "", name.clone()));
        let mut linked = Vec::new();
        let mut is_too_long = false;
        if quotas.len() > 1 {
            match Policy::each(name, quotas.iter().map(|quota| quota.value)) {
                Ok(policies) => linked.extend(policies.iter().map(|policy| (policy.name().to_owned(), "a quota of "))),
                Err(_) => is_too_long = true,
            }
        }
        if block {
            linked.push((RuleSpec::block_name(name), "the block of "));
        }
        if candidate {
            linked.push((RuleSpec::candidate_name(name), "the candidate of "));
        }
        if is_too_long || linked.iter().any(|(linked, _)| linked.len() > NAME_MAX) {
            let message = format!(
                "the name is too long for a rule with several quotas, a block or a candidate: the policies' names \
                 begin with the rule's name and have at most {NAME_MAX} characters"
            );
            self.problems.add(RulesErrorKind::Value, name.position, message);
        }
        taken.names.extend(linked.into_iter().map(|(linked, role)| (linked, role, name.clone())));
    }

    fn name(&mut self, node: &Node<'_>, field: &str) -> Option<Name> {
        let name = self.text(node, field)?;
        match Policy::new(name, Quota::per_second(1)) {
            Ok(_) => Some(At { value: name.into(), position: node.position }),
            Err(error) => self.refuse(RulesErrorKind::Value, node.position, error.to_string()),
        }
    }

    pub(super) fn percentage(&mut self, node: &Node<'_>, _field: &str) -> Option<u8> {
        let percent = self.number(node, "`warn-at`", "a percentage from 1 to 100, without a sign")?;
        match u8::try_from(percent) {
            Ok(percent @ 1..=100) => Some(percent),
            _ => {
                let message = format!("`warn-at` must be a percentage from 1 to 100, not {percent}");
                self.refuse(RulesErrorKind::Value, node.position, message)
            }
        }
    }
}

/// The names of a file's rules and policies.
#[derive(Default)]
pub(super) struct UsedNames {
    /// Each name, the kind of thing with this name (empty for the rule itself), and the name of the
    /// rule.
    pub(super) names: Vec<(String, &'static str, Name)>,
    /// Rules that had another name.
    pub(super) renamed: Vec<(Name, Name)>,
}

impl UsedNames {
    /// Reports names that are used twice.
    pub(super) fn compare(&self, problems: &mut Problems<'_>) {
        let mut first: HashMap<&str, (&'static str, &Name)> = HashMap::new();
        let mut rules: HashMap<&str, Position> = HashMap::new();
        for (name, role, rule) in &self.names {
            if role.is_empty() {
                rules.entry(name).or_insert(rule.position);
            }
            let Some((other_role, other)) = first.insert(name, (role, rule)) else { continue };
            first.insert(name, (other_role, other));
            let line = other.position.line;
            let message = if role.is_empty() && other_role.is_empty() {
                format!(
                    "two rules are named {}; the first is in line {line}: give one of them another name",
                    Quoted(name)
                )
            } else {
                format!(
                    "{role}this rule has the name {}, which {other_role}the rule in line {line} has: rename this rule",
                    Quoted(name)
                )
            };
            problems.add(RulesErrorKind::Name, rule.position, message);
        }
        let mut former: HashMap<&str, usize> = HashMap::new();
        for (name, was) in &self.renamed {
            let message = if name.value == was.value {
                "`was` is the rule's own name: leave it out".to_owned()
            } else if let Some(position) = rules.get(&*was.value) {
                format!("`was` names the rule in line {}, which keeps its own usage: leave `was` out", position.line)
            } else if let Some(line) = former.insert(&was.value, was.position.line) {
                format!("line {line} has the same `was`, {}: leave one of the two out", Quoted(was))
            } else {
                continue;
            };
            problems.add(RulesErrorKind::Name, was.position, message);
        }
    }
}
