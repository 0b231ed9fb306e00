//! Reads quotas, plans, blocks and costs.

use std::time::Duration;

use super::super::document::{Node, NodeValue, Type};
use super::super::problem::{Position, Quoted, RulesErrorKind};
use super::super::spec::{At, CostSpec, KeySpec, Name, PlansSpec, QuotaSpec};
use super::value::{Fields, ValueReader, meant_by_bare};
use crate::error::ConfigErrorKind;
use crate::quota::parse::read_length;
use crate::quota::{Algorithm, Quota};

/// The maximum number of quotas of a rule. A request must meet all of them.
pub(in crate::rules) const QUOTAS_MAX: usize = 32;

pub(in crate::rules) const QUOTA: &[&str] = &["unit", "requests_per_unit"];

pub(in crate::rules) const PLANS: &[&str] = &["by", "quotas", "otherwise"];

pub(in crate::rules) const COST: &[&str] = &["header", "at-most", "reserve"];

pub(in crate::rules) const RESERVE: &[&str] = &["header", "at-most"];

/// The word for a cost that is the number of bytes of a request's body.
pub(in crate::rules) const CONTENT_LENGTH: &str = "content-length";

pub(in crate::rules) const BLOCK: &[&str] = &["after", "for"];

/// The units of time in quotas, and their lengths in seconds.
pub(in crate::rules) const UNITS: &[(&str, u64)] = &[
    ("second", 1),
    ("minute", 60),
    ("hour", 3_600),
    ("day", 86_400),
    ("week", 7 * 86_400),
    ("month", 30 * 86_400),
    ("year", 365 * 86_400),
];

impl ValueReader<'_, '_, '_> {
    pub(super) fn quotas_or_plans(&mut self, fields: &Fields<'_, '_>) -> Option<Option<QuotaSpec>> {
        match (fields.get("quota"), fields.entry("plans")) {
            (Some(_), Some(plans)) => {
                let message = "a rule has either `quota` or `plans`: leave one of them out";
                self.refuse(RulesErrorKind::Field, plans.position, message)
            }
            (Some(node), None) => self.quotas(node).map(|quotas| Some(QuotaSpec::All(quotas))),
            (None, Some(plans)) => self.plans(&plans.node).map(|plans| Some(QuotaSpec::Plans(plans))),
            (None, None) => Some(None),
        }
    }

    fn quotas(&mut self, node: &Node<'_>) -> Option<Vec<At<Quota>>> {
        let NodeValue::List(items) = &node.value else { return Some(vec![self.quota(node, "`quota`")?]) };
        if items.is_empty() {
            return self.refuse(
                RulesErrorKind::Value,
                node.position,
                "`quota` is an empty list: give it at least one quota",
            );
        }
        if items.len() > QUOTAS_MAX {
            let message = format!("a rule has at most {QUOTAS_MAX} quotas, not {}", items.len());
            return self.refuse(RulesErrorKind::TooLarge, node.position, message);
        }
        let mut quotas: Vec<At<Quota>> = Vec::new();
        for item in items {
            let Some(quota) = self.quota(item, "a quota") else { continue };
            if let Some(other) = quotas.iter().find(|other| other.counts_alike(&quota)) {
                let message = format!(
                    "the quotas \"{}\" and \"{}\" count alike and would charge each request twice for one limit: keep \
                     only the quota that you mean",
                    other.value, quota.value
                );
                self.problems.add(RulesErrorKind::Value, item.position, message);
            } else {
                quotas.push(quota);
            }
        }
        self.check_units(&quotas)?;
        (quotas.len() == items.len()).then_some(quotas)
    }

    /// Refuses a mix of quotas that count bytes and quotas that count requests, because a request has one cost for all
    /// quotas of the rule.
    pub(super) fn check_units(&mut self, quotas: &[At<Quota>]) -> Option<()> {
        let Some((first, others)) = quotas.split_first() else { return Some(()) };
        let Some(other) = others.iter().find(|other| other.counts_bytes() != first.counts_bytes()) else {
            return Some(());
        };
        let (bytes, requests) = if first.counts_bytes() { (first, other) } else { (other, first) };
        let message = format!(
            "\"{}\" counts bytes and \"{}\" does not, and a request has one cost for both: write two rules",
            bytes.value, requests.value
        );
        self.refuse(RulesErrorKind::Value, other.position, message)
    }

    pub(super) fn quota(&mut self, node: &Node<'_>, what: &str) -> Option<At<Quota>> {
        match (&node.value, node.kind()) {
            (NodeValue::Scalar { text, .. }, Type::Text) => self.parsed(text, node.position),
            (NodeValue::Map(_), _) => {
                let fields = self.fields(node, "a quota", QUOTA)?;
                self.quota_of_unit(&fields)
            }
            _ => {
                let expected = "words such as `100 per minute`, or `{unit: minute, requests_per_unit: 100}`";
                self.wrong_type(node, what, expected)
            }
        }
    }

    fn parsed(&mut self, words: &str, position: Position) -> Option<At<Quota>> {
        match words.parse::<Quota>() {
            Ok(value) => Some(At { value, position }),
            Err(error) => self.refuse(RulesErrorKind::Value, position, error.to_string()),
        }
    }

    pub(super) fn quota_of_unit(&mut self, fields: &Fields<'_, '_>) -> Option<At<Quota>> {
        let unit = self.required(fields, "unit", ", such as `unit: minute`");
        let unit = unit.and_then(|node| self.choice(node, "unit", UNITS));
        let limit = self.required(fields, "requests_per_unit", ", such as `requests_per_unit: 100`");
        let limit =
            limit.and_then(|node| Some((self.number(node, "`requests_per_unit`", "a whole number")?, node.position)));
        let (seconds, (limit, position)) = (unit?, limit?);
        match Quota::new(limit, Duration::from_secs(seconds)) {
            Ok(value) => Some(At { value, position }),
            Err(error) => self.refuse(RulesErrorKind::Value, position, error.to_string()),
        }
    }

    pub(super) fn candidate(&mut self, node: &Node<'_>, _field: &str) -> Option<At<Quota>> {
        let quota = self.quota(node, "`candidate`")?;
        if quota.algorithm().is_rate() || quota.algorithm() == Algorithm::Concurrency {
            return Some(quota);
        }
        let message = format!("a candidate is a limit, not a {}: write it like `60 per minute`", quota.algorithm());
        self.refuse(RulesErrorKind::Value, node.position, message)
    }

    pub(super) fn block(&mut self, node: &Node<'_>) -> Option<At<Quota>> {
        match (&node.value, node.kind()) {
            (NodeValue::Scalar { text, .. }, Type::Text) => {
                let says_block = text.split([' ', ',']).any(|word| word.eq_ignore_ascii_case("block"));
                let words = if says_block { text.to_string() } else { format!("{text}, block") };
                match words.parse::<Quota>() {
                    Ok(value) => Some(At { value, position: node.position }),
                    Err(error) if error.kind() == ConfigErrorKind::Syntax => {
                        let message =
                            format!("{} is not a block: write it like `5 per 10 minutes, for 1 hour`", Quoted(text));
                        self.refuse(RulesErrorKind::Value, node.position, message)
                    }
                    Err(error) => self.refuse(RulesErrorKind::Value, node.position, error.to_string()),
                }
            }
            (NodeValue::Map(_), _) => {
                let fields = self.fields(node, "`block`", BLOCK)?;
                let after = self.required(&fields, "after", ", such as `after: 5 per 10 minutes`");
                let after = after.and_then(|node| self.strikes(node));
                let length = self.required(&fields, "for", ", such as `for: 1 hour`");
                let length = length.and_then(|node| self.length(node));
                let (strikes, length) = (after?, length?);
                match Quota::block(strikes.limit(), strikes.period(), length) {
                    Ok(value) => Some(At { value, position: node.position }),
                    Err(error) => self.refuse(RulesErrorKind::Value, node.position, error.to_string()),
                }
            }
            _ => {
                let expected =
                    "words such as `5 per 10 minutes, for 1 hour`, or `{after: 5 per 10 minutes, for: 1 hour}`";
                self.wrong_type(node, "`block`", expected)
            }
        }
    }

    /// Reads the number of refusals per time after which a key is blocked. The text has the form of
    /// a quota without options.
    fn strikes(&mut self, node: &Node<'_>) -> Option<Quota> {
        let text = self.text(node, "after")?;
        let quota = self.parsed(text, node.position)?.value;
        if Quota::new(quota.limit(), quota.period()).is_ok_and(|plain| plain == quota) {
            return Some(quota);
        }
        let message =
            format!("{} has more than a number of refusals and a time: write it like `5 per 10 minutes`", Quoted(text));
        self.refuse(RulesErrorKind::Value, node.position, message)
    }

    fn length(&mut self, node: &Node<'_>) -> Option<Duration> {
        let text = self.text(node, "for")?;
        read_length(text).or_else(|| {
            let message =
                format!("{} is not a time of up to 366 days: write it like `1 hour` or `30 min`", Quoted(text));
            self.refuse(RulesErrorKind::Value, node.position, message)
        })
    }

    fn plans(&mut self, node: &Node<'_>) -> Option<PlansSpec> {
        let fields = self.fields(node, "`plans`", PLANS)?;
        let by = self.required(&fields, "by", ", which says where a request names its plan");
        let by = by.and_then(|node| self.plan_name(node));
        let quotas = self.required(&fields, "quotas", ", such as `quotas: {free: 10/min, pro: 600/min}`");
        let otherwise = self.required(&fields, "otherwise", ", the plan of requests that name no other plan");
        let otherwise = otherwise.and_then(|node| Some((self.text(node, "otherwise")?, node.position)));
        let entries = match quotas.map(|node| (&node.value, node)) {
            None => return None,
            Some((NodeValue::Map(entries), _)) if !entries.is_empty() => entries,
            Some((_, node)) => {
                return self.wrong_type(node, "`quotas`", "a mapping of plans, such as `{free: 10/min}`");
            }
        };
        let read = entries.iter().enumerate().map(|(at, entry)| {
            if let Some(hint) = meant_by_bare(entries, at, &[]) {
                let message = format!("the plan {} has no quota{hint}", Quoted(&entry.name));
                return self.refuse(RulesErrorKind::Field, entry.position, message);
            }
            let name = At { value: Box::<str>::from(&*entry.name), position: entry.position };
            Some((name, self.quota(&entry.node, "the quota of a plan")?))
        });
        let read: Vec<Option<_>> = read.collect();
        let otherwise = otherwise.and_then(|(name, position)| {
            let found = entries.iter().position(|entry| entry.name == name);
            if found.is_none() {
                let plans = entries.iter().map(|entry| &*entry.name);
                let message = format!("`otherwise` names the plan {}, which has no quota", Quoted(name));
                self.problems.add_word(RulesErrorKind::Name, position, &message, name, plans, "");
            }
            found
        });
        let quotas: Vec<(Name, At<Quota>)> = read.into_iter().collect::<Option<_>>()?;
        self.check_units(&quotas.iter().map(|(_, quota)| quota.clone()).collect::<Vec<_>>())?;
        Some(PlansSpec { by: by?, quotas, otherwise: otherwise? })
    }

    /// Reads which part of a request names its plan.
    fn plan_name(&mut self, node: &Node<'_>) -> Option<At<KeySpec>> {
        let by = self.key_part(node, "`by`")?;
        if matches!(by.value, KeySpec::ClientIp | KeySpec::PeerIp | KeySpec::Global) {
            let message = "`by` must be text that can be a plan's name, such as `header x-plan`";
            return self.refuse(RulesErrorKind::Value, node.position, message);
        }
        Some(by)
    }

    pub(super) fn cost(&mut self, node: &Node<'_>) -> Option<At<CostSpec>> {
        let value = if let NodeValue::Map(_) = node.value {
            let fields = self.fields(node, "`cost`", COST)?;
            match fields.get("reserve") {
                Some(_) if fields.entries.len() > 1 => {
                    let message = "`reserve` cannot have other fields beside it: write the header into it, as in \
                                   `{reserve: {header: x-cost, at-most: 100}}`";
                    return self.refuse(RulesErrorKind::Field, node.position, message);
                }
                Some(reserve) => CostSpec::Reserved(Box::new(self.reserved(reserve)?)),
                None => self.cost_of_header(&fields)?,
            }
        } else if matches!(&node.value, NodeValue::Scalar { text, .. } if *text == CONTENT_LENGTH) {
            CostSpec::ContentLength
        } else {
            CostSpec::Units(self.units(node, "cost")?)
        };
        Some(At { value, position: node.position })
    }

    /// Reads the units that a request reserves until its cost is reported.
    fn reserved(&mut self, node: &Node<'_>) -> Option<CostSpec> {
        if let NodeValue::Map(_) = node.value {
            let fields = self.fields(node, "`reserve`", RESERVE)?;
            return self.cost_of_header(&fields);
        }
        self.units(node, "reserve").map(CostSpec::Units)
    }

    fn cost_of_header(&mut self, fields: &Fields<'_, '_>) -> Option<CostSpec> {
        let name = self.required(fields, "header", ", such as `header: x-cost`");
        let name = name.and_then(|node| {
            let text = self.text(node, "header")?;
            self.header_name(text, node.position)
        });
        let at_most = self.required(fields, "at-most", ", or a client could state any cost");
        let at_most = at_most.and_then(|node| self.units(node, "at-most"));
        Some(CostSpec::Header { name: name?, at_most: at_most? })
    }

    pub(super) fn units(&mut self, node: &Node<'_>, field: &str) -> Option<u64> {
        let what = format!("`{field}`");
        let expected = match field {
            "cost" => {
                "a number of units, bytes like `64 KiB`, `content-length`, `{header: x-cost, at-most: 100}`, or \
                 `{reserve: 100}`"
            }
            _ => "a number of units, or bytes like `64 KiB`",
        };
        let units = match (&node.value, node.kind()) {
            (NodeValue::Scalar { text, .. }, Type::Text) => match bytes_of(text) {
                Some(bytes) => bytes,
                None => return self.wrong_type(node, &what, expected),
            },
            _ => self.number(node, &what, expected)?,
        };
        if units == 0 && field == "pace-after" {
            let message = "`pace-after` of 0 changes nothing: leave it out";
            return self.refuse(RulesErrorKind::Value, node.position, message);
        }
        if units == 0 {
            let message =
                format!("`{field}` of 0 would take nothing from any quota: use at least 1, or leave the rule out");
            return self.refuse(RulesErrorKind::Value, node.position, message);
        }
        Some(units)
    }

    /// Refuses a cost that no request can pay, because it is above the capacity of a quota. Also refuses a cost in
    /// another unit than that of the quotas. The problem has the position of the cost if the rule itself states the
    /// cost, and otherwise the position of the quota.
    pub(super) fn check_cost(&mut self, cost: Option<&At<CostSpec>>, quota: &QuotaSpec, is_own: bool) {
        let quotas: Vec<&At<Quota>> = match quota {
            QuotaSpec::All(quotas) => quotas.iter().collect(),
            QuotaSpec::Plans(plans) => plans.quotas.iter().map(|(_, quota)| quota).collect(),
        };
        let in_bytes = quotas.first().filter(|quota| quota.counts_bytes());
        let Some(cost) = cost else {
            if let Some(quota) = in_bytes {
                let message = format!(
                    "\"{}\" counts bytes, and a request would cost one byte: write what it costs, such as \
                     `cost: {CONTENT_LENGTH}` for uploads",
                    quota.value
                );
                self.problems.add(RulesErrorKind::Field, quota.position, message);
            }
            return;
        };
        let position = |quota: &At<Quota>| if is_own { cost.position } else { quota.position };
        let most = match *cost.taken_first() {
            CostSpec::Units(most) | CostSpec::Header { at_most: most, .. } => most,
            CostSpec::ContentLength | CostSpec::Reserved(_) => {
                if let (None, Some(quota)) = (in_bytes, quotas.first()) {
                    let message = format!(
                        "`cost: {CONTENT_LENGTH}` counts bytes, and \"{}\" does not: write the quota in bytes, such as \
                         `100 MB per hour`",
                        quota.value
                    );
                    self.problems.add(RulesErrorKind::Value, position(quota), message);
                }
                return;
            }
        };
        let small = quotas.into_iter().filter(|quota| quota.limit() > 0).min_by_key(|quota| quota.capacity());
        let Some(small) = small.filter(|quota| quota.capacity() < most) else { return };
        let (capacity, position) = (small.capacity(), position(small));
        let small = &small.value;
        let message = match cost.taken_first() {
            CostSpec::Units(units) => format!(
                "no request could pass: each request costs {units}, and \"{small}\" lets at most {capacity} pass at \
                 once"
            ),
            CostSpec::Header { name, at_most } => format!(
                "a request whose header `{name}` says more than {capacity} could never pass, because \"{small}\" lets at \
                 most {capacity} pass at once: write an `at-most` of up to {capacity} instead of {at_most}"
            ),
            CostSpec::ContentLength | CostSpec::Reserved(_) => return,
        };
        let place = if is_own { String::new() } else { format!(" (its `cost` is in line {})", cost.position.line) };
        self.problems.add(RulesErrorKind::Value, position, message + &place);
    }
}

/// Reads a number of bytes, such as `64 KiB`.
fn bytes_of(text: &str) -> Option<u64> {
    let quota = format!("{text} per s").parse::<Quota>().ok()?;
    let is_plain = Quota::per_second(quota.limit()).in_bytes().is_ok_and(|plain| plain == quota);
    is_plain.then(|| quota.limit())
}
