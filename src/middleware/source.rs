//! The source of a layer's rules, if they can change as a whole while requests are served.

#[cfg(feature = "rules")]
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use super::charge::access::BoundList;
use super::rule::{BoundRule, Follow};
use crate::base::head::Head;
use crate::key::Key;
#[cfg(feature = "rules")]
use crate::mode::{Mode, ModeSwitch};
use crate::rules_in_force::RulesInForce;

/// One version of the rules of a source.
pub(crate) struct SourcedRules {
    /// Another number for each version.
    pub(crate) version: u64,
    pub(crate) rules: Vec<BoundRule>,
    pub(crate) lists: Vec<BoundList>,
    /// The finder of the rules that apply to a request, and of their keys. The finder replaces the rules' own
    /// conditions and extractors.
    pub(crate) finder: Option<Arc<dyn FindRules>>,
}

#[cfg(feature = "rules")]
impl SourcedRules {
    /// Returns the quotas and the mode of each rule as text, by the names of the policies.
    pub(crate) fn words(&self) -> BTreeMap<String, String> {
        let mut words = BTreeMap::<String, String>::new();
        for bound in &self.rules {
            let mode = bound.rule().mode.as_ref().map_or(Mode::Enforce, ModeSwitch::get);
            let linked = bound.rule().linked.iter().map(|linked| &linked.policy);
            for policy in bound.policies().iter().chain(linked) {
                let text = words.entry(policy.name().to_owned()).or_default();
                let and = if text.is_empty() { "" } else { " and " };
                text.push_str(&format!("{and}{}", policy.quota_words()));
                if mode != Mode::Enforce {
                    text.push_str(&format!(" ({mode})"));
                }
            }
        }
        words
    }
}

/// The maximum number of charges that one request makes to the rules found by a [`FindRules`]. A limiter's time grows
/// with the square of the number of charges, and a client may choose that number.
pub(crate) const FOUND_MAX: usize = 1_000;

/// Finds the rules that apply to a request among many rules.
pub(crate) trait FindRules: Send + Sync {
    /// Calls `found` with the index, the key and the cost of each rule that applies. Each of the rules has one policy,
    /// and no linked policy. A rule may be found several times.
    fn find(&self, head: &Head<'_>, found: &mut dyn FnMut(usize, Key, u64));
}

/// A source of rules. In a layer, the rules of the source come before the rules that the program
/// adds.
pub(crate) trait RuleSource: Send + Sync {
    fn current(&self) -> Arc<SourcedRules>;

    /// Returns which rules are in force.
    fn in_force(&self) -> RulesInForce;

    /// Registers a layer. After the rules have changed, the source calls the layer's
    /// [`Follow::follow`].
    fn enter(&self, layer: Weak<dyn Follow>);
}
