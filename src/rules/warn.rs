//! Finds probable mistakes in valid rules.

use ipnet::IpNet;

use super::contained::never_binding;
use super::problem::{Position, Quoted};
use super::report::{Noticed, RulesWarningKind};
use super::spec::{AccessSpec, At, DescriptorSpec, DomainSpec, FileSpec, LimitSpec, Name, QuotaSpec, RuleSpec};
use crate::mode::Mode;
use crate::quota::Quota;

/// Returns the warnings of a file.
pub(super) fn warnings(file: &FileSpec) -> Vec<Noticed> {
    let disabled = file.rules.iter().filter(|rule| !rule.is_enabled).map(disabled_rule);
    let unused = file.unused.iter().map(unused_template);
    let empty = file.without_rules.map(no_rules);
    let closed = file.rules.iter().flat_map(closed_rule);
    let months = file.rules.iter().flat_map(periods_like_months);
    let listed = whole_families(&file.access);
    let observing = observing_rules(&file.rules);
    let limits = file.domain.iter().flat_map(limits_of_domain);
    disabled
        .chain(empty)
        .chain(closed)
        .chain(months)
        .chain(listed)
        .chain(observing)
        .chain(limits)
        .chain(unused)
        .chain(never_binding(&file.rules))
        .collect()
}

/// Returns a warning if `allow` has all IPv4 or all IPv6 addresses. Returns a note if `deny` has all of them, because
/// smaller networks in `allow` may be exceptions.
fn whole_families(access: &AccessSpec) -> Vec<Noticed> {
    let mut found = Vec::new();
    for (family, bits) in [("IPv4", 32), ("IPv6", 128)] {
        if let Some(largest) = covering(&access.allow, bits) {
            let message = format!(
                "`allow` has every {family} address, so no rule limits these clients: list only networks that you trust"
            );
            found.push(Noticed { kind: RulesWarningKind::ExemptsAll, position: largest.position, message });
        }
        if let Some(largest) = covering(&access.deny, bits) {
            let message = format!(
                "`deny` has every {family} address, so each of these clients is refused with 403, except those in a network of \
                 `allow`"
            );
            found.push(Noticed { kind: RulesWarningKind::RefusesAll, position: largest.position, message });
        }
    }
    found
}

/// Returns the largest network of one family, if the family's networks together contain every address of the family.
/// `bits` is the length of the family's addresses: 32 for IPv4, 128 for IPv6.
fn covering(networks: &[At<IpNet>], bits: u8) -> Option<&At<IpNet>> {
    let own = || networks.iter().filter(|network| network.max_prefix_len() == bits);
    // Each element has the first and the last address of a network, as numbers of 128 bits.
    let mut ranges: Vec<(u128, u128)> = own()
        .map(|network| {
            let first = match network.network() {
                std::net::IpAddr::V4(address) => u128::from(address.to_bits()) << 96,
                std::net::IpAddr::V6(address) => address.to_bits(),
            };
            (first, first | u128::MAX.checked_shr(network.prefix_len().into()).unwrap_or(0))
        })
        .collect();
    ranges.sort_unstable();
    let mut next = Some(0);
    for (first, last) in ranges {
        // `next` is `None` if there is no address after the covered ones.
        let Some(end) = next.filter(|next| first <= *next) else { break };
        next = last.max(end.saturating_sub(1)).checked_add(1);
    }
    if next.is_some() { None } else { own().min_by_key(|network| network.prefix_len()) }
}

/// Returns a note if no rule refuses a request, because all rules are in shadow mode.
fn observing_rules(rules: &[RuleSpec]) -> Option<Noticed> {
    let mut applied = rules.iter().filter(|rule| rule.is_enabled);
    let first = applied.next()?;
    let all = first.mode == Mode::Shadow && applied.all(|rule| rule.mode == Mode::Shadow);
    all.then(|| observing(first.name.position))
}

fn observing(position: Position) -> Noticed {
    let message = "every limit of the file is in shadow mode, so no limit refuses a request".to_owned();
    Noticed { kind: RulesWarningKind::ObservesOnly, position, message }
}

/// Returns the notes about a file in Envoy's form: a note if there is no limit, a note for each limit of 0, and a note
/// if all limits are in shadow mode.
fn limits_of_domain(domain: &DomainSpec) -> Vec<Noticed> {
    fn collect<'s>(specs: &'s [DescriptorSpec], limits: &mut Vec<(&'s DescriptorSpec, &'s LimitSpec)>) {
        for spec in specs {
            limits.extend(spec.limit.iter().map(|limit| (spec, limit)));
            collect(&spec.descriptors, limits);
        }
    }
    let mut limits = Vec::new();
    collect(&domain.descriptors, &mut limits);
    if limits.is_empty() {
        let position = domain.descriptors.first().map_or(Position::START, |first| first.position);
        let message = "no descriptor of the file has a `rate_limit`, so it limits no request".to_owned();
        return vec![Noticed { kind: RulesWarningKind::NoRules, position, message }];
    }
    let limited = || limits.iter().filter_map(|(spec, limit)| Some((spec, limit.mode, limit.quota.as_ref()?)));
    let closed = limited().filter(|(_, mode, quota)| *mode == Mode::Enforce && quota.limit() == 0);
    let mut found: Vec<Noticed> = closed
        .map(|(spec, _, quota)| {
            let message =
                format!("the limit of the key {} is 0, so each request with this key is refused", Quoted(&spec.key));
            Noticed { kind: RulesWarningKind::RefusesAll, position: quota.position, message }
        })
        .collect();
    let first = limited().next().filter(|_| limited().all(|(_, mode, _)| mode == Mode::Shadow));
    found.extend(first.map(|(spec, ..)| observing(spec.position)));
    found
}

fn unused_template(name: &Name) -> Noticed {
    let name_text = Quoted(name);
    let message = format!("no rule uses the template {name_text}: write `use` in a rule, or leave the template out");
    Noticed { kind: RulesWarningKind::UnusedTemplate, position: name.position, message }
}

fn disabled_rule(rule: &RuleSpec) -> Noticed {
    let message = format!("the rule {} is not applied, because `enabled` is false", Quoted(&rule.name));
    Noticed { kind: RulesWarningKind::Disabled, position: rule.name.position, message }
}

fn no_rules(position: Position) -> Noticed {
    let message = "the file has no rules, so it limits no request".to_owned();
    Noticed { kind: RulesWarningKind::NoRules, position, message }
}

/// Returns a note if a quota of the rule is 0, or a note for each of its plans that is 0.
fn closed_rule(rule: &RuleSpec) -> Vec<Noticed> {
    if !rule.is_enabled || rule.mode != Mode::Enforce {
        return Vec::new();
    }
    let name = Quoted(&rule.name);
    let noticed =
        |quota: &At<Quota>, message| Noticed { kind: RulesWarningKind::RefusesAll, position: quota.position, message };
    match &rule.quota {
        QuotaSpec::All(quotas) => {
            let closed = quotas.iter().find(|quota| quota.limit() == 0).map(|quota| {
                let message = format!(
                    "the quota of the rule {name} is 0, so each request that it applies to is refused; `enabled: false` \
                     switches a rule off"
                );
                noticed(quota, message)
            });
            closed.into_iter().collect()
        }
        QuotaSpec::Plans(plans) => {
            let closed = plans.quotas.iter().enumerate().filter(|(_, (_, quota))| quota.limit() == 0);
            let noticed = closed.map(|(index, (plan, quota))| {
                let others =
                    if index == plans.otherwise { " and each request that names no plan of the rule" } else { "" };
                let verb = if index == plans.otherwise { "are" } else { "is" };
                let message = format!(
                    "the plan {} of the rule {name} is 0, so each request of this plan{others} {verb} refused",
                    Quoted(plan)
                );
                noticed(quota, message)
            });
            noticed.collect()
        }
    }
}

/// Returns a note for each quota of the rule whose period has 30 or 365 days, unless it is a quota of the calendar.
/// The user probably meant months or years of the calendar. Also returns a note for each quota with windows of a week
/// that are counted from 1970, because they begin on Thursdays.
fn periods_like_months(rule: &RuleSpec) -> Vec<Noticed> {
    let quotas: Vec<&At<Quota>> = match &rule.quota {
        QuotaSpec::All(quotas) => quotas.iter().chain(&rule.candidate).collect(),
        QuotaSpec::Plans(plans) => plans.quotas.iter().map(|(_, quota)| quota).chain(&rule.candidate).collect(),
    };
    let noticed = |quota: &At<Quota>| {
        let is_counted = quota.has_windows_of_epoch();
        let (days, unit) = match quota.period().as_secs() {
            _ if quota.calendar_windows().is_some() || quota.is_unlimited() => return None,
            WEEK_S if is_counted => (7, "week"),
            MONTH_S => (30, "month"),
            YEAR_S => (365, "year"),
            _ => return None,
        };
        let what = if is_counted { "windows" } else { "a period" };
        let since = if is_counted { ", counted from 1970" } else { "" };
        let message = format!(
            "the quota \"{}\" of the rule {} has {what} of {days} days{since}: windows of `per calendar {unit}` begin with \
             each {unit}",
            quota.value,
            Quoted(&rule.name)
        );
        Some(Noticed { kind: RulesWarningKind::NotCalendar, position: quota.position, message })
    };
    quotas.into_iter().filter_map(noticed).collect()
}

const WEEK_S: u64 = 7 * 86_400;
const MONTH_S: u64 = 30 * 86_400;
const YEAR_S: u64 = 365 * 86_400;

#[cfg(test)]
mod tests {
    use super::super::Rules;
    use crate::quota::Algorithm;

    /// Returns the kinds of the warnings of a file, each with its line.
    fn warnings(text: &str) -> Vec<(&'static str, usize)> {
        let report = Rules::builder().check(text).expect(text);
        report.warnings().iter().map(|warning| (warning.kind().as_str(), warning.problem().line())).collect()
    }

    #[test]
    fn access_list_of_everybody_is_noticed() {
        let access = |allow: &str, deny: &str| {
            let rules = "rules: [{name: a, quota: 5 per hour, key: peer-ip}]";
            warnings(&format!("{rules}\naccess:\n  allow: [{allow}]\n  deny: [{deny}]\n"))
        };
        let all = [("exempts-all", 3), ("exempts-all", 3)];
        assert_eq!(access("0.0.0.0/0, '::/0'", ""), all);
        assert_eq!(access("10.0.0.0/8, 128.0.0.0/1, 0.0.0.0/1, '8000::/1', '::/1'", ""), all);
        assert_eq!(access("128.0.0.0/2, 192.0.0.0/2, 0.0.0.0/1", "192.0.2.0/24"), [("exempts-all", 3)]);
        assert_eq!(access("192.0.2.1", "0.0.0.0/0, '::/0'"), [("refuses-all", 4), ("refuses-all", 4)]);
        for allow in [
            "",
            "10.0.0.0/8, 192.168.0.0/16",
            "0.0.0.0/1, 128.0.0.0/2",
            "'::/1', 'c000::/2'",
            "0.0.0.0/32, 255.255.255.255/32",
        ] {
            assert_eq!(access(allow, ""), [], "{allow}");
        }
    }

    #[test]
    fn periods_of_thirty_days_are_noticed() {
        let quota = |text: &str| warnings(&format!("rules:\n- name: a\n  key: peer-ip\n  quota: {text}\n"));
        for algorithm in Algorithm::rates() {
            for period in ["month", "30 d", "720 hours", "year", "365 days"] {
                let text = format!("5 per {period}, {algorithm}");
                assert_eq!(quota(&text), [("not-calendar", 4)], "{text}");
            }
        }
        assert_eq!(quota("{unit: month, requests_per_unit: 5}"), [("not-calendar", 4)]);
        assert_eq!(quota("[5 per second, '5000 per 30 d, fixed window', '9000 per year']").len(), 2);
        assert_eq!(quota("5 per week, fixed window"), [("not-calendar", 4)], "it begins on Thursdays");
        let of_plans = "[5 per second, '5000 per 30 d']\n  candidate: 6000 per month";
        assert_eq!(quota(of_plans), [("not-calendar", 4), ("not-calendar", 5)]);
        let plans = "rules:\n- name: a\n  key: peer-ip\n  plans: {by: header x, quotas: {gold: 5 per month}, otherwise: gold}\n";
        assert_eq!(warnings(plans), [("not-calendar", 4)]);
        for text in
            ["5 per calendar month", "5 per 31 d", "5 per day, fixed window", "5 per week", "unlimited", "3 at once"]
        {
            assert_eq!(quota(text), [], "{text}");
        }
    }

    #[test]
    fn file_without_rules_is_noticed() {
        for text in ["rules: []", "[]", "rules: []\naccess: {deny: 192.0.2.1}"] {
            assert_eq!(warnings(text), [("no-rules", 1)], "{text}");
        }
        assert_eq!(warnings("access: {deny: 192.0.2.1}\nrules: []"), [("no-rules", 2)]);
        for text in ["domain: d", "domain: d\ndescriptors: []"] {
            assert_eq!(warnings(text), [("no-rules", 1)], "{text}");
        }
        assert_eq!(warnings("domain: d\ndescriptors:\n- {key: a, descriptors: [{key: b}]}"), [("no-rules", 3)]);
        assert_eq!(warnings("domain: d\ndescriptors:\n- {key: a, rate_limit: {unlimited: true}}"), []);
        // A list whose rules could not be read is not empty.
        let error = Rules::builder().check("rules: [{name: a}]").unwrap_err();
        assert!(error.warnings().is_empty(), "{error}");
    }

    #[test]
    fn file_that_only_observes_is_noticed() {
        let rules = |modes: [&str; 2]| {
            let rule = |name: &str, rest: &str| {
                format!("  - {{name: {name}, quota: 5 per hour, key: peer-ip, match: {{path: /{name}}}, {rest}}}\n")
            };
            warnings(&format!("rules:\n{}{}", rule("a", modes[0]), rule("b", modes[1])))
        };
        assert_eq!(rules(["mode: shadow", "mode: shadow"]), [("observes-only", 2)]);
        assert_eq!(rules(["mode: shadow", "enabled: false"]), [("observes-only", 2), ("disabled", 3)]);
        assert_eq!(rules(["mode: shadow", "mode: enforce"]), []);
        assert_eq!(rules(["mode: shadow", "mode: degrade"]), []);
        let domain = |first: &str, second: &str| {
            warnings(&format!(
                "domain: d\ndescriptors:\n- {{key: a, {first}, descriptors: [{{key: b, {second}}}]}}\n- {{key: c, rate_limit: {{unlimited: true}}}}"
            ))
        };
        let limit =
            |requests: u32, more: &str| format!("rate_limit: {{unit: hour, requests_per_unit: {requests}}}, {more}");
        assert_eq!(domain(&limit(5, "shadow_mode: true"), &limit(0, "shadow_mode: true")), [("observes-only", 3)]);
        assert_eq!(domain(&limit(5, "shadow_mode: true"), &limit(5, "shadow_mode: false")), []);
        assert_eq!(domain(&limit(5, "value: x"), &limit(0, "value: y")), [("refuses-all", 3)]);
    }
}
