//! How a layer handles its requests, which is decided once, when its configuration is compiled.

use super::rule::BoundRule;
use super::settings::Settings;
use crate::policy::Policy;

/// How the requests of a layer are charged. Every plan except the general plan is a shortcut: a request gets the
/// same answer as with the general plan, in fewer instructions (`benches/instructions`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ChargePlan {
    /// The layer has one rule with one policy, to which each request of the rule is charged. Most layers have
    /// this plan.
    OnePolicy,
    /// The layer has one rule, and each request of the rule is charged to the quota that it brings.
    OwnQuota,
    /// A request is charged to several policies, and only headers report a request that passes.
    SeveralPolicies,
    /// The layer has any other settings, so its requests skip no step.
    General,
}

impl ChargePlan {
    /// Returns the plan of a layer with these settings and policies. `are_supported` is true if its limiter
    /// supports all quotas.
    pub(super) fn of(settings: &Settings, policies: &[Policy], are_supported: bool, needs: Needs) -> Self {
        let rules = || settings.rules.iter().map(BoundRule::rule);
        // With these settings some requests are decided without the limiter, or without some of the rules. If a file
        // in Envoy's form has the rules, only the general plan matches the request's descriptors with the file's
        // limits.
        let has_exceptions = !settings.access.is_empty()
            || settings.exempt_preflight
            || settings.finder().is_some()
            || rules().any(|rule| !rule.paths.is_empty() || rule.pace.is_some())
            || !are_supported;
        // With these settings a denied request may pass, or an allowed request may wait.
        let has_choices =
            settings.mode.is_some() || rules().any(|rule| rule.mode.is_some()) || settings.timer.is_some();
        if has_exceptions || has_choices {
            return Self::General;
        }
        let brings_quotas = rules().any(|rule| rule.quota_from.is_some());
        match policies {
            [_] if brings_quotas => Self::OwnQuota,
            // No header reports a policy without a limit.
            _ if brings_quotas || policies.iter().any(|policy| policy.quota().is_unlimited()) => Self::General,
            [_] => Self::OnePolicy,
            // The observer, the ticket and a linked policy need stored charges.
            _ if needs > Needs::Nothing || rules().any(|rule| rule.linked.is_some()) => Self::General,
            _ => Self::SeveralPolicies,
        }
    }
}

/// The data that a layer stores for each passing request, in addition to the numbers of its headers. Each variant
/// includes the variants before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Needs {
    Nothing,
    /// The observer sees the outcome before the service is called.
    Report,
    /// The charges may hold units of a concurrency limit.
    Charges,
    /// The response carries the outcome, or an inner layer's refusal refunds the charges.
    Ticket,
    /// A rule settles its charges after the response.
    Settlement,
    /// A handler states the cost with a [`Usage`](crate::middleware::Usage).
    Usage,
}

/// The requests of a layer that may hold units of a concurrency limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum PlaceHolders {
    None,
    /// The requests that bring the quota of a concurrency limit.
    WithOwnQuota,
    /// Any request may hold units, because a policy of the layer is a concurrency limit.
    All,
}
