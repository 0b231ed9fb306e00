//! The verdict: what the report comes to, in a few sentences.

use super::numbers::{count, counted, share};
use super::{PolicyReport, Suggestion};

/// The most policies with a verdict of their own.
const POLICIES: usize = 6;

/// Returns the verdict: one text for each policy that refused most, and one for the others.
pub(crate) fn verdict(policies: &[PolicyReport]) -> Vec<String> {
    if let [policy] = policies {
        return vec![of_policy(policy, &format!("With {}", short(&policy.quota)))];
    }
    let mut refusing: Vec<&PolicyReport> = policies.iter().filter(|policy| policy.refused > 0).collect();
    refusing.sort_by_key(|policy| std::cmp::Reverse((policy.touched, policy.refused)));
    let own = refusing.iter().take(POLICIES);
    let mut verdict: Vec<String> =
        own.map(|policy| of_policy(policy, &format!("{}: with {}", policy.name, short(&policy.quota)))).collect();
    let further = refusing.len().saturating_sub(POLICIES) as u64;
    let unused = policies.iter().filter(|policy| policy.requests == 0).count() as u64;
    let silent = (policies.len() - refusing.len()) as u64 - unused;
    for (number, what) in [
        (further, "would have refused clients, too"),
        (silent, "would have refused none"),
        (unused, "applied to no request"),
    ] {
        if number > 0 {
            let other = if verdict.is_empty() { "" } else { "other " };
            let policies = if number == 1 { "policy" } else { "policies" };
            verdict.push(format!("{} {other}{policies} {what}.", count(number)));
        }
    }
    verdict
}

fn of_policy(policy: &PolicyReport, with: &str) -> String {
    if policy.requests == 0 {
        return "The limit applied to no request.".to_owned();
    }
    let of = if policy.unfollowed > 0 { "of the first" } else { "of" };
    let clients = format!("{of} {}", counted(policy.clients, "client"));
    let mut words = match policy.touched {
        0 => format!("{with}, none {clients} would have been refused."),
        touched => format!(
            "{with}, {} {clients} ({}) would have been refused, and {} of {} ({}).",
            count(touched),
            share(touched, policy.clients),
            count(policy.refused),
            counted(policy.requests, "request"),
            share(policy.refused, policy.requests),
        ),
    };
    if let Some(automated) = policy.automated.filter(|_| policy.touched > 0) {
        words += &match (automated, policy.touched) {
            (1, 1) => " That client looks like a crawler or a script.".to_owned(),
            (0, 1) => " That client does not look like a crawler or a script.".to_owned(),
            (0, _) => " None of these clients looks like a crawler or a script.".to_owned(),
            (1, _) => " 1 of these clients looks like a crawler or a script.".to_owned(),
            (some, all) if some == all => format!(" All {} clients look like crawlers or scripts.", count(all)),
            (some, _) => format!(" {} of these clients look like crawlers or scripts.", count(some)),
        };
    }
    if let Some((clients, refused)) = policy.likely_false.filter(|(_, refused)| *refused > 0) {
        let are = if refused == 1 { "is" } else { "are" };
        words += &format!(" {} of {} {are} likely wrong.", counted(refused, "refusal"), counted(clients, "client"));
    }
    if let Some(curve) = &policy.curve {
        words += &match curve.suggestion() {
            Suggestion::Keep => " The suggestion is this limit.".to_owned(),
            Suggestion::Limit(limit) => {
                let touched = match limit.all.touched {
                    0 => "refuses no client".to_owned(),
                    touched => format!("refuses {}", counted(touched, "client")),
                };
                format!(" The suggestion is {}, which {touched}.", short(&limit.quota))
            }
            Suggestion::None => {
                " There is no suggestion, because each limit tried refuses too many clients.".to_owned()
            }
        };
    }
    words
}

/// Returns a quota without the algorithm that a quota has unless it names another.
fn short(quota: &str) -> &str {
    quota.strip_suffix(", token bucket").unwrap_or(quota)
}
