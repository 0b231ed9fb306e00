//! Finds rules whose quotas never refuse a request, because another rule applies to all of their requests and allows no
//! more. The search may miss such a rule, but each rule that it finds never refuses a request.

use std::collections::{HashMap, HashSet};

use super::pattern::Pattern;
use super::problem::Quoted;
use super::report::{Noticed, RulesWarningKind};
use super::spec::{At, CostSpec, KeySpec, MatchSpec, QuotaSpec, RuleSpec, Wildcard};
use super::times::Times;
use crate::middleware::rule::definition::MissingKey;
use crate::middleware::rule::{PathPattern, Segment};
use crate::mode::Mode;
use crate::quota::{Algorithm, Anchor, Quota};

/// The maximum number of comparisons of two rules, or of two values such as networks, in one file. After the maximum
/// number of comparisons, the search for warnings ends.
const STEPS_MAX: usize = 1_000_000;

/// Returns a warning for each rule that is found never to refuse a request.
pub(super) fn never_binding(rules: &[RuleSpec]) -> Vec<Noticed> {
    let beginnings = Beginnings::of(rules);
    let mut finder = Finder { steps: 0 };
    let mut found = Vec::new();
    for (at, rule) in rules.iter().enumerate().filter(|(_, rule)| is_plain(rule)) {
        if finder.has_ended() {
            break;
        }
        let contains = |(other, outer): &(usize, &RuleSpec)| {
            // If two rules refuse the same requests, only the later rule is reported, because one of the two is
            // needed.
            *other != at && finder.binds(outer, rule) && (*other < at || !finder.binds(rule, outer))
        };
        let mut candidates = beginnings.candidates(rule).filter_map(|other| Some((other, rules.get(other)?)));
        if let Some((_, outer)) = candidates.find(contains) {
            found.push(warning(rule, outer));
        }
    }
    found
}

/// Returns whether all requests that meet the inner conditions are sure to meet the outer conditions.
pub(super) fn covers(outer: &MatchSpec, inner: &MatchSpec) -> bool {
    Finder { steps: 0 }.covers(outer, inner)
}

fn warning(rule: &RuleSpec, outer: &RuleSpec) -> Noticed {
    let (name, line) = (Quoted(&outer.name), outer.name.position.line);
    let message = format!(
        "the quota of the rule {} never refuses a request, because the rule {name} in line {line} applies to the same \
         requests, too, and allows no more: to give these requests an allowance of their own, leave them out of {name} \
         by `not`",
        Quoted(&rule.name)
    );
    Noticed { kind: RulesWarningKind::NeverBinds, position: rule.name.position, message }
}

/// Returns whether the search looks at a rule: its quotas may refuse a request, and it has no block, no candidate
/// and no plans.
fn is_plain(rule: &RuleSpec) -> bool {
    may_refuse(rule) && rule.block.is_none() && rule.candidate.is_none() && matches!(rule.quota, QuotaSpec::All(_))
}

/// Returns whether a rule is enabled and enforced, and charges requests a cost that is known at
/// once.
fn may_refuse(rule: &RuleSpec) -> bool {
    let is_settled = rule.cost.as_ref().is_some_and(|cost| matches!(cost.value, CostSpec::Reserved(_)));
    // Excludes rules whose cost is reported later. Such a cost can bring a key into debt. The largest debt of each
    // quota then decides how long later requests are refused, even if the quota allows more than another.
    rule.is_enabled && rule.mode == Mode::Enforce && rule.pace.is_none() && !is_settled
}

/// The rules by the first segment of their paths, to find the rules that may contain another rule.
#[derive(Default)]
struct Beginnings<'r> {
    everywhere: Vec<usize>,
    any: Vec<usize>,
    literal: HashMap<&'r str, Vec<usize>>,
}

impl<'r> Beginnings<'r> {
    fn of(rules: &'r [RuleSpec]) -> Self {
        let mut all = Self::default();
        for (at, rule) in rules.iter().enumerate().filter(|(_, rule)| may_refuse(rule)) {
            let paths = &rule.matches.path;
            if paths.is_empty() {
                all.everywhere.push(at);
            }
            let beginnings: HashSet<Option<&str>> = paths.iter().map(beginning).collect();
            for beginning in beginnings {
                match beginning {
                    Some(literal) => all.literal.entry(literal).or_default().push(at),
                    None => all.any.push(at),
                }
            }
        }
        all
    }

    /// Returns the indices of the rules that may contain `rule`.
    fn candidates(&self, rule: &RuleSpec) -> impl Iterator<Item = usize> {
        let first = rule.matches.path.first();
        let none: &[usize] = &[];
        let any = if first.is_some() { self.any.as_slice() } else { none };
        let literal = first.and_then(beginning).and_then(|literal| self.literal.get(literal));
        [self.everywhere.as_slice(), any, literal.map_or(none, Vec::as_slice)].into_iter().flatten().copied()
    }
}

/// Returns the first segment of a path pattern, if it is a literal text.
fn beginning(path: &PathPattern) -> Option<&str> {
    match path.segments.first() {
        Some(Segment::Literal(text)) => Some(text),
        _ => None,
    }
}

/// Compares rules, up to the maximum number of comparisons.
struct Finder {
    steps: usize,
}

impl Finder {
    fn has_ended(&self) -> bool {
        self.steps > STEPS_MAX
    }

    /// Returns whether the outer rule refuses each request that the quotas of the inner rule refuse.
    fn binds(&mut self, outer: &RuleSpec, inner: &RuleSpec) -> bool {
        self.steps += 1;
        if self.has_ended() {
            return false;
        }
        let (QuotaSpec::All(limits), QuotaSpec::All(quotas)) = (&outer.quota, &inner.quota) else { return false };
        is_cost_within(inner.cost.as_ref(), outer.cost.as_ref())
            && is_key_finer(inner, outer)
            && self.each_in_any(quotas, limits, |quota, limit| allows_as_much(quota, limit))
            && self.covers(&outer.matches, &inner.matches)
    }

    /// Returns whether all requests that meet the inner conditions meet the outer conditions.
    fn covers(&mut self, outer: &MatchSpec, inner: &MatchSpec) -> bool {
        let wildcard = |outer: &Wildcard, inner: &Wildcard| is_pattern_within(&inner.0, &outer.0);
        self.any_value(&outer.method, &inner.method, |outer, inner| outer == inner)
            && self.any_value(&outer.path, &inner.path, |outer, inner| is_path_within(inner, outer))
            && self.any_value(&outer.host, &inner.host, wildcard)
            && self.any_value(&outer.client, &inner.client, |outer, inner| outer.contains(inner))
            && self.any_value(&outer.user_agent, &inner.user_agent, |outer, inner| {
                is_pattern_within(&inner.0.to_ascii_lowercase(), &outer.0.to_ascii_lowercase())
            })
            && self.any_value(&outer.action, &inner.action, |outer, inner| outer.value == inner.value)
            && self.each_in_any(&outer.header, &inner.header, |(name, outer), (same, inner)| {
                name == same && wildcard(outer, inner)
            })
            && self.each_in_any(&outer.query, &inner.query, |(name, outer), (same, inner)| {
                name == same && wildcard(outer, inner)
            })
            && (outer.time.is_empty() || !inner.time.is_empty() && times(outer).covers(&times(inner)))
            // The inner rule must leave out all requests that the outer rule leaves out.
            && outer.not.iter().all(|left_out| inner.not.iter().any(|not| self.covers(not, left_out)))
    }

    /// Compares the alternative values of a field. A request must match one of the values. A field without values
    /// matches all requests.
    fn any_value<T>(&mut self, outer: &[T], inner: &[T], is_within: impl Fn(&T, &T) -> bool) -> bool {
        let contains = |inner: &T, outer: &T| is_within(outer, inner);
        outer.is_empty() || !inner.is_empty() && self.each_in_any(inner, outer, contains)
    }

    /// Returns whether each value of `each` has at least one value of `others` for which `is_it`
    /// returns true.
    fn each_in_any<T>(&mut self, each: &[T], others: &[T], is_it: impl Fn(&T, &T) -> bool) -> bool {
        each.iter().all(|one| {
            others.iter().any(|other| {
                self.steps += 1;
                !self.has_ended() && is_it(one, other)
            })
        })
    }
}

fn times(of: &MatchSpec) -> Times {
    Times::any_of(of.time.iter().map(|(_, times)| times))
}

/// Returns whether the inner cost of each request is at most its outer cost.
pub(super) fn is_cost_within(inner: Option<&At<CostSpec>>, outer: Option<&At<CostSpec>>) -> bool {
    let cost = |spec: Option<&At<CostSpec>>| spec.map_or(CostSpec::Units(1), |spec| spec.value.clone());
    is_within(&cost(inner), &cost(outer))
}

fn is_within(inner: &CostSpec, outer: &CostSpec) -> bool {
    use CostSpec::{ContentLength, Header, Reserved, Units};
    match (inner, outer) {
        (Units(inner), Units(outer)) => inner <= outer,
        (Units(inner), Header { .. }) => *inner == 1,
        (Header { name, at_most }, Header { name: same, at_most: most }) => name == same && at_most <= most,
        (ContentLength, ContentLength) => true,
        (Reserved(inner), Reserved(outer)) => is_within(inner, outer),
        _ => false,
    }
}

/// Returns whether requests that share a key in the inner rule also share a key in the outer rule.
fn is_key_finer(inner: &RuleSpec, outer: &RuleSpec) -> bool {
    let can_be_absent = |part: &&At<KeySpec>| !matches!(part.value, KeySpec::Path | KeySpec::Method | KeySpec::Global);
    let is_in = |part: &At<KeySpec>, rule: &RuleSpec| rule.key.iter().any(|other| other.value == part.value);
    let is_global = |part: &At<KeySpec>| part.value == KeySpec::Global;
    // If requests without a key share one allowance of the inner rule, they may still have different keys in the
    // outer rule.
    let share_alike = inner.missing_key != MissingKey::Shared
        || outer.key.iter().all(is_global)
        || outer.missing_key == MissingKey::Shared
            && inner.key.iter().filter(can_be_absent).all(|part| is_in(part, outer))
            && outer.key.iter().all(|part| can_be_absent(&part) || is_global(part));
    share_alike && outer.key.iter().all(|part| is_global(part) || is_in(part, inner))
}

/// Returns whether a quota allows every sequence of requests that the limit allows.
fn allows_as_much(quota: &Quota, limit: &Quota) -> bool {
    let (inner, outer) = (quota.spec(), limit.spec());
    let counts = |algorithm: Algorithm| algorithm.is_rate() && algorithm != Algorithm::LeakyQueue;
    let is_known = counts(inner.algorithm) || inner.algorithm == Algorithm::Concurrency;
    let is_alike = inner.algorithm == outer.algorithm
        && inner.period_us == outer.period_us
        && inner.calendar == outer.calendar
        && (inner.buckets, inner.oldest) == (outer.buckets, outer.oldest);
    // Compares only windows that are counted from the epoch, because windows that begin with a key's first request
    // begin at different times.
    let is_fixed = [inner, outer].iter().all(|spec| spec.anchor == Anchor::Epoch && !spec.count_denied);
    is_known && is_alike && is_fixed && inner.limit >= outer.limit && inner.burst >= outer.burst
}

/// Returns whether all paths that match the first pattern match the second.
fn is_path_within(inner: &PathPattern, outer: &PathPattern) -> bool {
    let mut rest = inner.segments.as_slice();
    for segment in &outer.segments {
        let Some((first, after)) = rest.split_first() else { return false };
        let is_empty = matches!(first, Segment::Literal(text) if text.is_empty());
        match (segment, first) {
            (Segment::Rest, _) => return !is_empty || !after.is_empty(),
            (Segment::Any, Segment::Any) => {}
            (Segment::Any, Segment::Literal(_)) if !is_empty => {}
            (Segment::Literal(outer), Segment::Literal(inner)) if outer == inner => {}
            _ => return false,
        }
        rest = after;
    }
    rest.is_empty()
}

/// Returns whether all texts that match the first pattern match the second. A `*` of the first pattern can only be
/// matched by a `*` of the second pattern, because no other part of the second pattern matches a `*`.
fn is_pattern_within(inner: &str, outer: &str) -> bool {
    if outer.contains('*') { Pattern::new(outer).matches(inner) } else { inner == outer }
}

#[cfg(all(test, not(ratelimit_loom)))]
mod tests {
    use proptest::prelude::*;

    use super::super::tests::spec;
    use super::*;
    use crate::algorithm::properties::key::State;
    use crate::algorithm::properties::quotas::{quota, shapes};
    use crate::base::sampling::config;

    /// Returns a text for each rule that is found never to refuse: its name, and the name of the
    /// rule that contains it.
    fn found(rules: &str) -> Vec<String> {
        let file = spec(&format!("rules:\n{rules}")).unwrap_or_else(|error| panic!("{rules}\n{error}"));
        let found = never_binding(&file.rules).into_iter();
        found.map(|noticed| noticed.message.split('`').filter(|name| name.len() == 1).take(2).collect()).collect()
    }

    /// Returns whether a rule with the fields `outer` is found to contain a rule with the fields
    /// `inner`.
    fn contains(outer: &str, inner: &str) -> bool {
        let fields = |name: &str, fields: &str| {
            let quota = if fields.contains("quota:") { "" } else { "quota: 5/s, " };
            let key = if fields.starts_with("key:") || fields.contains(" key:") { "" } else { "key: tenant, " };
            format!("  - {{name: {name}, {quota}{key}{fields}}}\n")
        };
        let found = found(&(fields("a", outer) + &fields("b", inner)));
        found.contains(&"ba".to_owned())
    }

    #[test]
    fn rule_that_another_one_contains_is_found() {
        for (outer, inner) in [
            ("", "match: {path: /a}"),
            ("match: {path: '/v1/{*rest}'}", "match: {path: [/v1/a, '/v1/{id}/b']}, quota: 6/s"),
            ("match: {path: '/{v}/a'}", "match: {path: /v1/a}"),
            ("match: {path: '/{v}/{id}'}", "match: {path: '/{v}/a'}"),
            ("match: {method: [GET, PUT]}", "match: {method: PUT, host: a.b}"),
            ("match: {host: '*.b'}", "match: {host: [a.b, '*.c.b']}"),
            ("match: {header: {x: '*'}}", "match: {header: {x: a, y: b}}"),
            ("match: {query: {x: 'a*'}}", "match: {query: {x: ab}}"),
            ("match: {client: 10.0.0.0/8}", "match: {client: [10.1.0.0/16, 10.2.3.4]}"),
            ("match: {user-agent: '*bot*'}", "match: {user-agent: GoogleBOT}"),
            ("match: {action: [create_post, create_account]}", "match: {action: create_post}"),
            ("match: {time: 'mon-fri UTC'}", "match: {time: 'tue 08:00-09:00 +01:00'}"),
            ("match: {not: {path: '/a/{b}'}}", "match: {not: {path: '/a/{*b}'}, method: GET}"),
            ("quota: [5/s, 10/min]", "quota: [6/s, '20/min']"),
            ("quota: 5/s", "quota: 5/s, key: [tenant, path, host]"),
            ("key: global", "key: tenant, quota: 9/s, missing-key: shared"),
            ("missing-key: shared", "missing-key: shared, key: [tenant, path]"),
            ("cost: 2", "cost: 1"),
            ("cost: {header: x, at-most: 5}", "cost: {header: x, at-most: 4}"),
            ("quota: 9 kB/s, cost: content-length", "quota: 9 kB/s, cost: content-length, match: {path: /a}"),
            ("quota: 0/s", "match: {path: /a}"),
            ("quota: 3 at once", "quota: 4 at once, match: {method: GET}"),
        ] {
            assert!(contains(outer, inner), "{outer} | {inner}");
        }
    }

    #[test]
    fn rule_that_may_not_be_contained_is_not_found() {
        for (outer, inner) in [
            ("", "quota: 4/s"),
            ("quota: 5/s", "quota: 300/min"),
            ("quota: 10/s burst 2", "quota: 10/s burst 1"),
            (
                "quota: '5/s, fixed window, from the first request'",
                "quota: '5/s, fixed window, from the first request'",
            ),
            ("quota: '5/s, leaky queue'", "quota: '5/s, leaky queue'"),
            ("quota: '5/s, sliding log, counting denied'", "quota: '5/s, sliding log, counting denied'"),
            ("match: {path: /a}", ""),
            ("match: {path: '/a/{*rest}'}", "match: {path: /a}"),
            ("match: {path: '/a/{*rest}'}", "match: {path: /a/}"),
            ("match: {path: '/a/{b}'}", "match: {path: /a/}"),
            ("match: {path: '/a/{b}'}", "match: {path: '/a/{*b}'}"),
            ("match: {path: '/a/{b}'}", "match: {path: [/a/b, /b]}"),
            ("match: {method: GET}", "match: {method: HEAD}"),
            ("match: {host: 'a*'}", "match: {host: '*a'}"),
            ("match: {host: 'a*b'}", "match: {host: 'a*'}"),
            ("match: {header: {x: '*', y: '*'}}", "match: {header: {x: '*'}}"),
            ("match: {client: 10.1.0.0/16}", "match: {client: 10.0.0.0/8}"),
            ("match: {time: 'mon UTC'}", "match: {time: 'tue UTC'}"),
            ("match: {not: {path: /a}}", ""),
            ("match: {not: {path: /a}}", "match: {not: {path: /a, method: GET}}"),
            ("key: [tenant, path]", "key: tenant"),
            ("key: host", "key: tenant"),
            ("key: path", "key: [tenant, path], missing-key: shared"),
            ("missing-key: exempt", "missing-key: shared"),
            ("cost: 1", "cost: 2"),
            ("cost: 5", "cost: {header: x, at-most: 4}"),
            ("cost: {reserve: 2}", "cost: {reserve: 1}"),
            ("", "cost: {reserve: 1}"),
            ("mode: shadow", ""),
            ("enabled: false", ""),
            ("", "mode: degrade"),
            ("", "enabled: false"),
            ("", "candidate: 3/s"),
            ("", "block: 5 per 10 minutes for 1 h"),
        ] {
            assert!(!contains(outer, inner), "{outer} | {inner}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn comparing_ten_thousand_rules_ends() {
        let rule = |at: usize| format!("  - {{name: r{at}, quota: 5/s, key: path, match: {{header: {{x: v{at}}}}}}}\n");
        let file = spec(&format!("rules:\n{}", (0..10_000).map(rule).collect::<String>())).unwrap();
        let began = super::super::tests::running_time();
        assert!(never_binding(&file.rules).is_empty());
        let took = super::super::tests::running_time() - began;
        println!("{} ms", took / 1_000_000);
        assert!(took < 20_000_000_000, "{took} ns");
    }

    #[test]
    fn of_rules_that_are_alike_the_later_one_is_found() {
        let rule = |name: &str| format!("  - {{name: {name}, quota: 5/s, key: tenant}}\n");
        assert_eq!(found(&(rule("a") + &rule("b") + &rule("c"))), ["ba", "ca"]);
    }

    proptest! {
        // A quarter of the pairs is rejected, such as pairs with leaky queues, which cannot be
        // compared.
        #![proptest_config(ProptestConfig { max_global_rejects: 1_000_000, ..config(5_000) })]

        #[test]
        fn quota_that_allows_as_much_refuses_nothing_more(
            shape in shapes(),
            algorithm in prop::sample::select(Algorithm::rates()),
            more in (0_u64..5, 0_u64..5),
            steps in prop::collection::vec((0_u64..30_000_000, 1_u64..4, any::<bool>()), 1..60),
        ) {
            let limit = quota(algorithm, Anchor::Epoch, &shape);
            let words = format!("{} per {} us, {algorithm}", limit.limit() + more.0, limit.spec().period_us);
            let larger = words.parse::<Quota>();
            let larger = larger.map(|larger| larger.burst(limit.capacity() + more.1).unwrap_or(larger));
            let larger = larger.and_then(|larger| larger.buckets(limit.spec().buckets).or(Ok(larger)));
            let Some(larger) = larger.and_then(|larger| larger.oldest(limit.spec().oldest).or(Ok(larger))).ok() else {
                return Ok(());
            };
            prop_assume!(allows_as_much(&larger, &limit));
            let (mut outer, mut inner) = (State::new(&limit), State::new(&larger));
            let mut now = 1_735_689_600_000_000;
            for (step, cost, is_narrow) in steps {
                now += step % (limit.spec().period_us.saturating_mul(2)).max(2);
                if outer.decide(now, cost, false).0.is_allowed() && is_narrow {
                    prop_assert!(inner.decide(now, cost, false).0.is_allowed(), "{} in {}", larger, limit);
                }
            }
        }
    }
}
