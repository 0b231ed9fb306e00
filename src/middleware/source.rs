//! The source of a layer's rules, if they can change as a whole while requests are served.

use std::sync::{Arc, Weak};

use super::charge::access::BoundList;
use super::rule::{BoundRule, Follow};
use crate::head::Head;
use crate::key::Key;

/// One version of the rules of a source.
pub(crate) struct SourcedRules {
    /// Another number for each version.
    pub(crate) version: u64,
    pub(crate) rules: Vec<BoundRule>,
    pub(crate) lists: Vec<BoundList>,
    /// Finds the rules of a request and their keys, instead of the rules' own conditions and extractors.
    pub(crate) finder: Option<Arc<dyn FindRules>>,
}

/// The most charges of a request with rules that are found. A limiter's time grows with their square, and a client may
/// choose how many it has.
pub(crate) const FOUND_MAX: usize = 1_000;

/// Finds the rules that apply to a request among many.
pub(crate) trait FindRules: Send + Sync {
    /// Calls `found` with the place of each rule that applies, the key and the cost. Each rule has one policy, and no
    /// linked one. A rule may be found several times.
    fn find(&self, head: &Head<'_>, found: &mut dyn FnMut(usize, Key, u64));
}

/// A source of rules. A layer takes its rules before those that the program adds.
pub(crate) trait RuleSource: Send + Sync {
    fn current(&self) -> Arc<SourcedRules>;

    /// Makes the source know a layer, which follows when the rules change.
    fn enter(&self, layer: Weak<dyn Follow>);
}
