//! The limits of a domain of Envoy's rate limit service, and the search for the limit that a descriptor matches.
//!
//! The limits are read as envoyproxy/ratelimit reads them (its README, "Descriptor list definition"). At each level, an
//! entry of the file with the exact value comes first, then the first pattern that the value matches, then an entry
//! with the key and no value. A limit counts only if the descriptor ends at the limit's level.

use std::collections::{HashMap, HashSet};

use percent_encoding::{AsciiSet, CONTROLS, PercentEncode, utf8_percent_encode};
use smallvec::SmallVec;

use super::pattern::Pattern;
use super::spec::DescriptorSpec;
use crate::base::head::Head;
use crate::key::{IntoKey, Key};
use crate::middleware::rule::Read;
use crate::middleware::source::FindRules;
use crate::mode::Mode;
use crate::policy::{Policy, shortened};
use crate::quota::Quota;
use crate::quota::error::NAME_MAX;

/// A charge in Envoy's form: a cost, and a list of keys and values that names the allowance. The order of the list
/// matters.
///
/// ```
/// use tower_ratelimit::rules::Descriptor;
/// let upload =
///     Descriptor::new([("path", "/upload"), ("remote_address", "192.0.2.1")]).hits(5);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a descriptor is charged only after it is returned or passed to a request"]
pub struct Descriptor {
    pub(super) entries: Vec<(String, String)>,
    pub(super) hits: u64,
}

impl Descriptor {
    /// Makes a descriptor of keys and values, which costs 1.
    pub fn new<K: Into<String>, V: Into<String>>(entries: impl IntoIterator<Item = (K, V)>) -> Self {
        Self { entries: entries.into_iter().map(|(key, value)| (key.into(), value.into())).collect(), hits: 1 }
    }

    /// Sets the cost in units. A cost of 0 only looks: a [`DescriptorLimits`](super::DescriptorLimits) says whether
    /// units remain, and a layer lets the request pass.
    pub fn hits(self, hits: u64) -> Self {
        Self { hits, ..self }
    }
}

/// A closure that returns the descriptors of a request.
pub(super) type Describe = Read<Vec<Descriptor>>;

/// The limits of a domain.
pub(super) struct Tree {
    pub(super) domain: Box<str>,
    pub(super) root: TreeLevel,
    /// Makes the descriptors of an HTTP request.
    pub(super) describe: Option<Describe>,
}

/// The entries that may come next in a descriptor.
#[derive(Default)]
pub(super) struct TreeLevel(HashMap<Box<str>, Values>);

/// The branches below one key, by value.
#[derive(Default)]
struct Values {
    exact: HashMap<Box<str>, Branch>,
    /// The patterns in the order of the file.
    patterns: Vec<(Pattern, Branch)>,
    other: Option<Branch>,
}

/// An entry of the file.
pub(super) struct Branch {
    /// True if each value that matches the entry has its own counter.
    is_apart: bool,
    limit: Option<Limit>,
    next: TreeLevel,
}

/// A limit of the file.
pub(super) struct Limit {
    pub(super) quota: Option<LimitQuota>,
    pub(super) name: Option<Box<str>>,
    pub(super) replaces: Vec<Box<str>>,
}

/// The rule and the policy of a limit that is not unlimited.
pub(super) struct LimitQuota {
    /// The index of the limit's rule among the rules of the file.
    pub(super) rule: usize,
    pub(super) policy: Policy,
    pub(super) mode: Mode,
}

impl TreeLevel {
    /// Adds an entry of the file. The caller must not add two entries with the same key and value.
    pub(super) fn add(&mut self, spec: &DescriptorSpec, limit: Option<Limit>, next: Self) {
        let values = self.0.entry(spec.key.clone()).or_default();
        let is_pattern = spec.value.as_ref().is_some_and(|value| value.contains('*'));
        let is_apart = (spec.value.is_none() || is_pattern) && !spec.shares;
        let branch = Branch { is_apart, limit, next };
        match &spec.value {
            None => values.other = Some(branch),
            Some(value) if is_pattern => values.patterns.push((Pattern::new(value), branch)),
            Some(value) => drop(values.exact.insert(value.clone(), branch)),
        }
    }

    /// Returns the entry of the file that a descriptor's entry matches.
    fn branch(&self, key: &str, value: &str) -> Option<&Branch> {
        let values = self.0.get(key)?;
        let exact = values.exact.get(value);
        let matching = || values.patterns.iter().find(|(pattern, _)| pattern.matches(value)).map(|(_, branch)| branch);
        exact.or_else(matching).or(values.other.as_ref())
    }

    /// Returns the limit that a descriptor matches, and the key of its allowance. The time grows with the number of
    /// entries. The time for an entry grows with the number of patterns of its key, and with the length of its value.
    fn limit(&self, entries: &[(String, String)]) -> Option<(&Limit, Key)> {
        let (last, parents) = entries.split_last()?;
        let mut level = self;
        let mut key: Option<Key> = None;
        let mut add = |branch: &Branch, value: &str| {
            if branch.is_apart {
                key = match key.take() {
                    Some(key) => (key, value).into_key(),
                    None => Key::of(value),
                };
            }
        };
        for (name, value) in parents {
            let branch = level.branch(name, value)?;
            add(branch, value);
            level = &branch.next;
        }
        let branch = level.branch(&last.0, &last.1)?;
        add(branch, &last.1);
        Some((branch.limit.as_ref()?, key.unwrap_or_else(Key::global)))
    }
}

/// For each descriptor of a request, the limit that it matches. `None` if the descriptor matches no limit, or if
/// another limit replaces its limit.
pub(super) type Matched<'t> = SmallVec<[Option<(&'t Limit, Key)>; 4]>;

impl Tree {
    /// Returns the limit of each descriptor.
    pub(super) fn limits<'t, 'd>(&'t self, descriptors: impl Iterator<Item = Option<&'d Descriptor>>) -> Matched<'t> {
        let mut matched: Matched<'t> = descriptors.map(|descriptor| self.root.limit(&descriptor?.entries)).collect();
        let replaced: HashSet<&str> =
            matched.iter().flatten().flat_map(|(limit, _)| limit.replaces.iter().map(|name| &**name)).collect();
        if !replaced.is_empty() {
            for slot in &mut matched {
                // An unlimited entry has no limit that could be replaced.
                let limit = slot.as_ref().map(|(limit, _)| limit).filter(|limit| limit.quota.is_some());
                let name = limit.and_then(|limit| limit.name.as_deref());
                if name.is_some_and(|name| replaced.contains(name)) {
                    *slot = None;
                }
            }
        }
        matched
    }
}

impl FindRules for Tree {
    fn find(&self, head: &Head<'_>, found: &mut dyn FnMut(usize, Key, u64)) {
        let descriptors = self.describe.as_ref().map(|describe| describe(head)).unwrap_or_default();
        let limits = self.limits(descriptors.iter().map(Some));
        for (matched, descriptor) in limits.into_iter().zip(&descriptors) {
            if let Some((Limit { quota: Some(quota), .. }, key)) = matched {
                found(quota.rule, key, descriptor.hits);
            }
        }
    }
}

/// The characters that are encoded in the parts of a policy's name: separators, and characters that a header would
/// escape.
const ENCODED: &AsciiSet = &CONTROLS.add(b'%').add(b'=').add(b',').add(b':').add(b' ').add(b'"').add(b'\\');

/// Returns a key or a value as a part of a policy's name.
pub(super) fn encoded(text: &str) -> PercentEncode<'_> {
    utf8_percent_encode(text, ENCODED)
}

/// Returns the name of the policy for the limit at the end of `path`: `edge:path=/upload,remote_address`. Different
/// paths have different names. A long name ends with a hash, and only names with a hash could be equal by chance.
pub(super) fn policy_name(domain: &str, path: &[&DescriptorSpec]) -> String {
    let parts: Vec<String> = path
        .iter()
        .map(|spec| match &spec.value {
            Some(value) => format!("{}={}", encoded(&spec.key), encoded(value)),
            None => encoded(&spec.key).to_string(),
        })
        .collect();
    shortened(format!("{}:{}", encoded(domain), parts.join(",")), NAME_MAX)
}

/// Returns the policy for quotas that callers supply for descriptors of a domain.
pub(super) fn override_policy(domain: &str, quota: Quota) -> Option<Policy> {
    // No limit of a file has this name, because no key of a file is empty.
    Policy::new(shortened(format!("{}::override", encoded(domain)), NAME_MAX), quota).ok()
}
