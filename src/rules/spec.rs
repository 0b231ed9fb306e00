//! The content of a file of rules, as plain data. Each value that a later step may refuse is stored with its position.

use std::ops::Deref;

use http::{HeaderName, Method};
use ipnet::IpNet;

use super::problem::Position;
use super::times::Times;
use crate::middleware::rule::definition::MissingKey;
use crate::middleware::rule::{PacedBodies, PathPattern};
use crate::mode::Mode;
use crate::quota::Quota;

/// A value and its position in the file.
#[derive(Clone, Debug)]
pub(crate) struct At<T> {
    pub(crate) value: T,
    pub(crate) position: Position,
}

impl<T> Deref for At<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

/// A name and its position.
pub(crate) type Name = At<Box<str>>;

/// A file of rules.
#[derive(Clone, Debug, Default)]
pub(crate) struct FileSpec {
    pub(crate) rules: Vec<RuleSpec>,
    /// The position of the list of rules, if the list is empty.
    pub(crate) without_rules: Option<Position>,
    /// The templates that no rule uses.
    pub(crate) unused: Vec<Name>,
    pub(crate) access: AccessSpec,
    /// The limits of a file in Envoy's form. A file with a domain has neither rules nor access lists.
    pub(crate) domain: Option<DomainSpec>,
}

/// A domain of Envoy's rate limit service.
#[derive(Clone, Debug)]
pub(crate) struct DomainSpec {
    /// Not empty.
    pub(crate) name: Box<str>,
    pub(crate) descriptors: Vec<DescriptorSpec>,
}

/// An entry of descriptors, with the entries below it. No two entries below one parent have the
/// same key and value.
#[derive(Clone, Debug)]
pub(crate) struct DescriptorSpec {
    pub(crate) position: Position,
    /// Not empty.
    pub(crate) key: Box<str>,
    /// Not empty. A value with `*` is a pattern.
    pub(crate) value: Option<Box<str>>,
    /// True if all values of a pattern share one counter.
    pub(crate) shares: bool,
    pub(crate) limit: Option<LimitSpec>,
    pub(crate) descriptors: Vec<Self>,
}

/// The limit of descriptors that end with an entry of the file.
#[derive(Clone, Debug)]
pub(crate) struct LimitSpec {
    /// `None` if the limit is unlimited.
    pub(crate) quota: Option<At<Quota>>,
    pub(crate) mode: Mode,
    pub(crate) name: Option<Box<str>>,
    /// The names of the limits that do not count for a request if this limit does.
    pub(crate) replaces: Vec<Box<str>>,
}

/// Clients that are always allowed or denied. No network is listed twice.
#[derive(Clone, Debug, Default)]
pub(crate) struct AccessSpec {
    pub(crate) allow: Vec<At<IpNet>>,
    pub(crate) deny: Vec<At<IpNet>>,
}

/// A rule. All rules and policies of a file have different names.
#[derive(Clone, Debug)]
pub(crate) struct RuleSpec {
    pub(crate) position: Position,
    pub(crate) name: Name,
    /// The name that the rule had before.
    pub(crate) was: Option<Name>,
    /// Whether the rule is applied.
    pub(crate) is_enabled: bool,
    pub(crate) quota: QuotaSpec,
    /// The parts that make one key. There is at least one part.
    pub(crate) key: Vec<At<KeySpec>>,
    /// The conditions, which must all hold.
    pub(crate) matches: MatchSpec,
    pub(crate) cost: Option<At<CostSpec>>,
    pub(crate) mode: Mode,
    pub(crate) missing_key: MissingKey,
    /// A percentage from 1 to 100.
    pub(crate) warn_at: Option<u8>,
    /// The bodies that the rule paces, if it paces bodies instead of charging requests.
    pub(crate) pace: Option<PacedBodies>,
    /// The number of bytes at the beginning of each body that are not paced.
    pub(crate) pace_after: Option<u64>,
    /// A quota that is a block.
    pub(crate) block: Option<At<Quota>>,
    /// A second quota that is only observed, and refuses no request.
    pub(crate) candidate: Option<At<Quota>>,
}

impl RuleSpec {
    /// Returns the name of the policy of the rule's block.
    pub(crate) fn block_name(name: &str) -> String {
        format!("{name}-block")
    }

    /// Returns the name of the policy of the rule's candidate.
    pub(crate) fn candidate_name(name: &str) -> String {
        format!("{name}-candidate")
    }
}

#[derive(Clone, Debug)]
pub(crate) enum QuotaSpec {
    /// The quotas that a request must all meet. There is at least one quota, and no two quotas
    /// count in the same way.
    All(Vec<At<Quota>>),
    Plans(PlansSpec),
}

/// Quotas for plans: each request has one of the plans.
#[derive(Clone, Debug)]
pub(crate) struct PlansSpec {
    /// The part of a request that names its plan.
    pub(crate) by: At<KeySpec>,
    /// The names and quotas of the plans. There is at least one plan.
    pub(crate) quotas: Vec<(Name, At<Quota>)>,
    /// The index of the plan for requests that name no plan of the rule.
    pub(crate) otherwise: usize,
}

/// A part of a request that makes a key or a part of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum KeySpec {
    ClientIp,
    PeerIp,
    Path,
    Host,
    Method,
    Global,
    BearerToken,
    Header(HeaderName),
    Cookie(Box<str>),
    Query(Box<str>),
    /// The name of an extractor that the program registered.
    Registered(Box<str>),
}

/// The conditions of a rule. An empty field matches every request. For a field with values, a
/// request must match one of the values. For `header` and `query`, a request must match all
/// entries.
#[derive(Clone, Debug, Default)]
pub(crate) struct MatchSpec {
    pub(crate) method: Vec<Method>,
    pub(crate) path: Vec<PathPattern>,
    /// The hosts, in lower case and without ports.
    pub(crate) host: Vec<Wildcard>,
    pub(crate) header: Vec<(HeaderName, Wildcard)>,
    /// The percent-decoded names and values of query parameters.
    pub(crate) query: Vec<(Box<str>, Wildcard)>,
    pub(crate) client: Vec<IpNet>,
    pub(crate) user_agent: Vec<Wildcard>,
    /// The names of classifiers that the program registered.
    pub(crate) action: Vec<Name>,
    /// Times of the week, each with its text.
    pub(crate) time: Vec<(Box<str>, Times)>,
    /// The rule leaves out each request that meets all conditions of one of these entries. An entry has no `not` of
    /// its own.
    pub(crate) not: Vec<Self>,
}

/// A text in which each `*` matches any characters, or no character.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wildcard(pub(crate) Box<str>);

/// The units that a request takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CostSpec {
    /// At least 1.
    Units(u64),
    /// The number in a header, up to a bound of at least 1.
    Header { name: HeaderName, at_most: u64 },
    /// The number of bytes of the request's body. All quotas of the rule count bytes.
    ContentLength,
    /// Units or the number in a header, which are reserved until the cost is reported.
    Reserved(Box<Self>),
}

impl CostSpec {
    /// Returns the cost that is taken before the request is answered.
    pub(crate) fn taken_first(&self) -> &Self {
        match self {
            Self::Reserved(reserved) => reserved,
            cost => cost,
        }
    }
}
