//! Explanations of what a layer would do with a request, and why.

use std::fmt;
use std::time::Duration;

use ipnet::IpNet;

use crate::base::json::{Object, push_string};
use crate::base::time::Humane;
use crate::base::wait::Wait;
use crate::error::labelled;
use crate::key::Key;
use crate::mode::Mode;
use crate::outcome::{Outcome, PolicyStatus};
use crate::policy::Policy;

labelled! {
    /// The reason why a rule does not charge a request.
    NotCharged,
    /// Returns the label for JSON and logs.
    as_str {
        /// The rule of a [file](crate::guide::rules_in_a_file) does not apply to the request's path.
        Path = "path",
        /// The rule of a file does not apply to the request's method.
        Method = "method",
        /// The rule of a file does not apply to the request's host.
        Host = "host",
        /// The rule of a file requires a header that the request does not have.
        Header = "header",
        /// The rule of a file requires a query parameter that the request does not have.
        Query = "query",
        /// The rule of a file does not apply to the request's user agent.
        UserAgent = "user_agent",
        /// The rule of a file does not apply to the client's address.
        Client = "client",
        /// The rule of a file does not apply to the request's action.
        Action = "action",
        /// The rule of a file does not apply at the present time.
        Time = "time",
        /// The rule of a file excludes the request by its `not`.
        LeftOut = "left_out",
        /// The file disables the rule with `enabled`.
        Disabled = "disabled",
        /// The limit of a file in Envoy's format matches none of the request's descriptors.
        Descriptor = "descriptor",
        /// The condition of a rule in code, [`Rule::when`](crate::Rule::when), does not hold.
        Condition = "condition",
        /// The rule applies the quota that the request [brings](crate::Rule::quota_from), and the request
        /// brings none.
        NoQuota = "no_quota",
        /// The request has no key, and the rule [exempts](crate::MissingKey::Exempt) such requests.
        KeyExempt = "key_exempt",
        /// The request has no key. In the mode `enforce` the rule refuses requests without a key.
        KeyMissing = "key_missing",
        /// An earlier rule refuses the request, because the request has no key for that rule.
        NotAsked = "not_asked",
        /// An access list allows or denies the request, so no rule is asked.
        AccessList = "access_list",
        /// The request is a CORS preflight request, which the layer
        /// [exempts](crate::RateLimitLayer::exempt_preflight).
        Preflight = "preflight",
    }
}

/// Says what a layer would do with a request, and why.
/// [`RateLimitLayer::explain`](crate::RateLimitLayer::explain) returns it.
///
/// `Display` prints the explanation in plain words, and [`to_json`](Self::to_json) returns it for
/// programs.
///
/// An explanation contains the request's keys, which may be secrets or personal data.
/// [`mask_keys`](Self::mask_keys) replaces the keys.
#[derive(Clone, Debug)]
pub struct Explanation {
    outcome: Outcome,
    rules: Vec<RuleExplanation>,
    failure: Option<String>,
    line_wait: Option<Duration>,
    network: Option<IpNet>,
}

/// The explanation of one rule: whether and how it charges a request.
#[derive(Clone)]
pub struct RuleExplanation {
    pub(crate) policies: Box<[Policy]>,
    pub(crate) mode: Mode,
    pub(crate) not_charged: Option<NotCharged>,
    pub(crate) expected: Option<Box<str>>,
    pub(crate) key: Option<Key>,
    /// The text of the key, as the explanation shows it.
    pub(crate) key_text: Option<String>,
    pub(crate) cost: Option<u64>,
    pub(crate) settles: bool,
    pub(crate) paces: bool,
    pub(crate) statuses: Vec<PolicyStatus>,
}

impl Explanation {
    pub(crate) fn new(outcome: Outcome, rules: Vec<RuleExplanation>, failure: Option<String>) -> Self {
        Self { outcome, rules, failure, line_wait: None, network: None }
    }

    /// Adds the network whose entry in an access list decides, if it is a network.
    pub(crate) fn decided_by(self, network: Option<IpNet>) -> Self {
        Self { network, ..self }
    }

    /// Adds the longest time for which the request would wait in line, if it would wait.
    pub(crate) fn waiting_in_line(self, line_wait: Option<Duration>) -> Self {
        Self { line_wait, ..self }
    }

    /// Returns the longest time for which the request would wait in line for units of a [concurrency
    /// limit](crate::Quota::concurrent). It is unknown whether units are freed in this time. For a request
    /// that would wait, [`passes`](Self::passes) is `false`, and the outcome is that of a request that waits
    /// without success. Returns `None` if the request would not wait in line.
    #[must_use]
    pub fn wait_in_line(&self) -> Option<Duration> {
        self.line_wait
    }

    /// Returns the network, such as `203.0.113.0/24`, if an access list allows or denies the request by its entry for
    /// this network.
    #[must_use]
    pub fn network(&self) -> Option<String> {
        self.network.map(|network| network.to_string())
    }

    /// Returns whether the request would reach a service: the inner service or the
    /// [overflow](crate::RateLimitLayer::overflow).
    #[must_use]
    pub fn passes(&self) -> bool {
        self.outcome.kind().passed()
    }

    /// Returns the outcome that the request would have, with the status of each policy as the outcome would report
    /// it.
    ///
    /// * The remaining units of a policy that allows the request are the units *after* the request. No
    ///   units are [taken](PolicyStatus::taken).
    /// * In a layer with an overflow, a request over a quota is
    ///   [`Overflowed`](crate::observe::OutcomeKind::Overflowed). The explanation does not ask whether the overflow is
    ///   ready. If the overflow is not ready, the real request is refused.
    /// * A request that would have to wait for its departure is
    ///   [`Delayed`](crate::observe::OutcomeKind::Delayed), and [`Outcome::delay`] returns the length
    ///   of the wait.
    #[must_use]
    pub fn outcome(&self) -> &Outcome {
        &self.outcome
    }

    /// Returns what each rule of the layer does with the request, in the order of the rules. If a rule of a file
    /// in Envoy's format charges several keys, the list contains the rule once for each key.
    #[must_use]
    pub fn rules(&self) -> &[RuleExplanation] {
        &self.rules
    }

    /// Returns the limiter's error if the limiter could not answer.
    #[must_use]
    pub fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// Replaces the text of each key with the text that `mask` returns for it, for logs and pages on which keys
    /// must not appear.
    ///
    /// ```
    /// use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, key};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let layer = RateLimitLayer::new(
    ///     MemoryLimiter::new(),
    ///     Quota::per_minute(5),
    ///     key::header("x-api-key"),
    /// );
    /// let (request, ()) = http::Request::get("/")
    ///     .header("x-api-key", "secret-7")
    ///     .body(())
    ///     .unwrap()
    ///     .into_parts();
    /// let masked = layer
    ///     .explain(&request)
    ///     .await
    ///     .mask_keys(|key| format!("{}…", key.get(..2).unwrap_or_default()));
    /// assert_eq!(masked.rules()[0].key_text(), Some("se…"));
    /// # }
    /// ```
    #[must_use]
    pub fn mask_keys(mut self, mask: impl Fn(&str) -> String) -> Self {
        for text in self.rules.iter_mut().filter_map(|rule| rule.key_text.as_mut()) {
            *text = mask(text);
        }
        self
    }

    /// Returns the explanation as a JSON object. Later versions may add fields.
    ///
    /// | field | value |
    /// |---|---|
    /// | `passes` | whether the request would reach a service |
    /// | `outcome` | the label of the [outcome's kind](crate::observe::OutcomeKind::as_str) |
    /// | `wait` | whether the same request would pass later: `none` if it passes now, `after` the wait, `unknown`, `never` |
    /// | `wait_us` | the microseconds of a wait that is `after`, or `null` |
    /// | `delay_us` | the microseconds that the request would wait for its departure |
    /// | `line_wait_us` | the microseconds for which the request would wait in line at most, or `null` |
    /// | `failure` | the limiter's error, or `null` |
    /// | `network` | the [network](Self::network) whose entry in an access list decides, or `null` |
    /// | `rules` | an object for each rule, in the order of the rules |
    ///
    /// A rule:
    ///
    /// | field | value |
    /// |---|---|
    /// | `policies` | the names of the rule's policies |
    /// | `mode` | `enforce`, `degrade` or `shadow` |
    /// | `charged` | whether the rule would be charged, if the request passes |
    /// | `not_charged` | the [reason](NotCharged) if it would not be, otherwise `null` |
    /// | `expected` | the words of the condition that the request does not meet, or `null` |
    /// | `key` | the [key](RuleExplanation::key_text), or `null` |
    /// | `cost` | the units, or `null` |
    /// | `settles` | whether the response may change the cost |
    /// | `paces` | whether the rule paces bodies, and charges no request |
    /// | `statuses` | an object for each policy that was asked: the rule's own, then its block or meter |
    ///
    /// A status: `policy`, `quota`, `unit`, `cost`, `allowed`, `refuses`, `near`, `limit`, `used`, `remaining`,
    /// `reset_after_us`, `wait`, `wait_us` and `delay_us`, as in [`PolicyStatus`] and its decision. If the limiter
    /// did not ask the quota because another quota is known to refuse the request, all but `policy`, `quota`, `unit`,
    /// `cost` and `limit` are `null`. `limit` and `remaining` are `null` for an
    /// [unlimited](crate::Quota::unlimited) quota. `reset_after_us` is also `null` if the limiter does not know
    /// this time.
    #[must_use]
    pub fn to_json(&self) -> String {
        let mut json = String::new();
        let mut object = Object::begin(&mut json);
        object.plain("passes", self.passes());
        object.text("outcome", self.outcome.kind().as_str());
        object.text("wait", self.outcome.wait().as_str());
        object.micros("wait_us", self.outcome.wait().duration());
        object.micros("delay_us", Some(self.outcome.delay()));
        object.micros("line_wait_us", self.wait_in_line());
        object.text_or_null("failure", self.failure());
        object.text_or_null("network", self.network().as_deref());
        object.list("rules", &self.rules, |json, rule| rule.write_json(json));
        object.end();
        json
    }
}

impl RuleExplanation {
    /// Returns the rule's own policies. A rule with several quotas or plans has several policies.
    #[must_use]
    pub fn policies(&self) -> &[Policy] {
        &self.policies
    }

    /// Returns the mode in which the rule applies: the milder of the rule's own mode and the layer's
    /// mode.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Returns why the rule does not charge the request. `None` means that the rule charges the request, unless
    /// the request is refused.
    #[must_use]
    pub fn not_charged(&self) -> Option<NotCharged> {
        self.not_charged
    }

    /// Returns the words of the condition that the request does not meet, such as `POST or PUT`. If the rule's `not`
    /// [excludes the request](NotCharged::LeftOut), returns the words of the `not`, such as `the method POST`.
    /// Returns `None` for a condition by [`Rule::when`](crate::Rule::when), because a closure has no words. Long words
    /// are shortened.
    #[must_use]
    pub fn expected(&self) -> Option<&str> {
        self.expected.as_deref()
    }

    /// Returns the key that the rule charges.
    #[must_use]
    pub fn key(&self) -> Option<&Key> {
        self.key.as_ref()
    }

    /// Returns the key as text: [`Key::display`], or the text with which [`Explanation::mask_keys`]
    /// replaced it.
    #[must_use]
    pub fn key_text(&self) -> Option<&str> {
        self.key_text.as_deref()
    }

    /// Returns the units that the request costs. Returns `None` if the rule does not charge the request, or if another
    /// rule refuses the request because the request has no key for that rule.
    #[must_use]
    pub fn cost(&self) -> Option<u64> {
        self.cost
    }

    /// Returns whether the response may change or refund the [cost](Self::cost). A cost that the response
    /// may change is only a reservation.
    #[must_use]
    pub fn settles(&self) -> bool {
        self.settles
    }

    /// Returns whether the rule [paces](crate::Rule::pace_responses) bodies. A rule that paces bodies has no
    /// [cost](Self::cost), and the layer does not ask the limiter before the first byte of the body.
    #[must_use]
    pub fn paces(&self) -> bool {
        self.paces
    }

    /// Returns the status of each policy about which the limiter was asked: first the rule's own policies, then its
    /// block or meter. If the rule has plans, the limiter is asked only about the request's plan.
    #[must_use]
    pub fn statuses(&self) -> &[PolicyStatus] {
        &self.statuses
    }

    /// Iterates over the names of the policies. All plans of a rule have one name.
    fn names(&self) -> impl Iterator<Item = &str> {
        let is_new = |at: usize, name: &str| self.policies.iter().take(at).all(|before| before.name() != name);
        let names = self.policies.iter().map(Policy::name).enumerate();
        names.filter(move |(at, name)| is_new(*at, name)).map(|(_, name)| name)
    }

    fn write_json(&self, json: &mut String) {
        let mut object = Object::begin(json);
        object.list("policies", self.names(), push_string);
        object.text("mode", self.mode.as_str());
        object.plain("charged", self.not_charged.is_none());
        object.text_or_null("not_charged", self.not_charged.map(NotCharged::as_str));
        object.text_or_null("expected", self.expected());
        object.text_or_null("key", self.key_text());
        object.or_null("cost", self.cost);
        object.plain("settles", self.settles);
        object.plain("paces", self.paces);
        object.list("statuses", &self.statuses, |json, status| {
            let decision = status.decision();
            let known = decision.is_known();
            let mut object = Object::begin(json);
            object.text("policy", status.policy().name());
            object.text("quota", &status.policy().quota().to_string());
            object.text("unit", status.policy().unit());
            object.plain("cost", status.cost());
            let is_limited = !status.policy().quota().is_unlimited();
            object.or_null("limit", is_limited.then(|| decision.limit()));
            object.or_null("used", known.then(|| decision.limit().saturating_sub(decision.remaining())));
            object.or_null("allowed", known.then(|| decision.is_allowed()));
            object.or_null("refuses", known.then(|| status.refuses()));
            object.or_null("near", known.then(|| status.is_near()));
            object.or_null("remaining", (known && is_limited).then(|| decision.remaining()));
            object.micros("reset_after_us", decision.reset_after().filter(|_| known));
            object.text_or_null("wait", known.then(|| decision.wait().as_str()));
            object.micros("wait_us", decision.wait().duration());
            object.micros("delay_us", known.then(|| decision.delay()));
            object.end();
        });
        object.end();
    }
}

impl fmt::Debug for RuleExplanation {
    /// Leaves out the key, because it may be a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RuleExplanation")
            .field("policies", &self.policies)
            .field("mode", &self.mode)
            .field("not_charged", &self.not_charged)
            .field("cost", &self.cost)
            .field("statuses", &self.statuses)
            .finish_non_exhaustive()
    }
}

/// Prints the outcome in the first line, then each rule with its policies.
///
/// ```text
/// refused: limited; the same request would pass in 600ms
/// client: charges 1 to 192.0.2.1
///   100 per minute, token bucket: 0 of 100 left, all in 1m, over its limit for 600ms: refuses
/// create-post: does not apply: the method is not POST
/// ```
impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let outcome = &self.outcome;
        match self.line_wait {
            Some(wait) => write!(f, "waits in line for up to {}, or is refused", Humane(wait))?,
            None => f.write_str(if self.passes() { "passes" } else { "refused" })?,
        }
        write!(f, ": {}", outcome.kind())?;
        if !outcome.delay().is_zero() {
            write!(f, "; it departs from a queue in {}", Humane(outcome.delay()))?;
        }
        match outcome.wait() {
            Wait::None => {}
            Wait::Unknown => f.write_str("; it is not known when the same request would pass")?,
            Wait::After(wait) => write!(f, "; the same request would pass in {}", Humane(wait))?,
            Wait::Never => f.write_str("; no wait helps")?,
        }
        if let Some(network) = self.network {
            write!(f, "; an access list {} {network}", if self.passes() { "allows" } else { "denies" })?;
        }
        if let Some(failure) = &self.failure {
            write!(f, "; the limiter failed: {failure}")?;
        }
        self.rules.iter().try_for_each(|rule| write!(f, "\n{rule}"))
    }
}

impl fmt::Display for RuleExplanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, name) in self.names().enumerate() {
            write!(f, "{}{name}", if at > 0 { ", " } else { "" })?;
        }
        if self.mode != Mode::Enforce {
            write!(f, " ({})", self.mode)?;
        }
        f.write_str(": ")?;
        match (self.not_charged, self.expected()) {
            (None, _) => self.fmt_charges(f),
            (Some(reason), Some(expected)) => {
                let is_not = match reason {
                    NotCharged::Path => "the path is not",
                    NotCharged::Method => "the method is not",
                    NotCharged::Host => "the host is not",
                    NotCharged::Header => "the request does not have the header",
                    NotCharged::Query => "the request does not have the parameter",
                    NotCharged::UserAgent => "the user agent is not",
                    NotCharged::Client => "the client is not in",
                    NotCharged::Time => "the time is not",
                    NotCharged::LeftOut => "it leaves out",
                    _ => "the action is not",
                };
                write!(f, "does not apply: {is_not} {expected}")
            }
            (Some(reason), None) => f.write_str(match reason {
                NotCharged::NoQuota => "does not apply: the request brings no quota",
                NotCharged::KeyExempt => "does not apply: the request has no key",
                NotCharged::KeyMissing if self.mode == Mode::Enforce => "refuses the request: it has no key",
                NotCharged::KeyMissing => "charges nothing: the request has no key",
                NotCharged::NotAsked => "is not asked: an earlier rule refuses the request",
                NotCharged::AccessList => "is not asked: an access list decides",
                NotCharged::Preflight => "is not asked: preflight requests are exempt",
                NotCharged::Disabled => "does not apply: `enabled` is false",
                NotCharged::Descriptor => "does not apply: no descriptor of the request matches it",
                _ => "does not apply: its condition does not hold",
            }),
        }
    }
}

impl RuleExplanation {
    fn fmt_charges(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = self.key_text().unwrap_or_default();
        if self.paces {
            write!(f, "paces the bodies of {key}")?;
            return self.policies.iter().try_for_each(|policy| write!(f, "\n  {}", policy.quota_words()));
        }
        match self.cost {
            Some(cost) if self.settles => write!(f, "charges {cost} to {key}, until the response says otherwise")?,
            Some(cost) => write!(f, "charges {cost} to {key}")?,
            None => write!(f, "applies to {key}")?,
        }
        for status in &self.statuses {
            let (policy, decision) = (status.policy(), status.decision());
            write!(f, "\n  ")?;
            // Prints no name for plans or for a rule's only policy.
            if self.names().nth(1).is_some() || self.names().all(|name| name != policy.name()) {
                write!(f, "{}: ", policy.name())?;
            }
            write!(f, "{}: ", policy.quota())?;
            if !decision.is_known() {
                f.write_str("not asked, because another quota is over its limit")?;
                continue;
            }
            let (remaining, limit) = (decision.remaining(), decision.limit());
            if policy.quota().is_unlimited() {
                write!(f, "{} used in this minute", limit.saturating_sub(remaining))?;
                continue;
            }
            write!(f, "{remaining} of {limit} left")?;
            if let Some(reset_after) = decision.reset_after().filter(|reset_after| !reset_after.is_zero()) {
                write!(f, ", all in {}", Humane(reset_after))?;
            }
            match decision.wait() {
                Wait::None => {}
                Wait::Unknown => f.write_str(", over its limit")?,
                Wait::After(wait) => write!(f, ", over its limit for {}", Humane(wait))?,
                Wait::Never => write!(f, ", and a cost of {} never fits", status.cost())?,
            }
            if !decision.delay().is_zero() {
                write!(f, ", departs in {}", Humane(decision.delay()))?;
            }
            if status.refuses() {
                f.write_str(": refuses")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decision::ChargeDecision;
    use crate::outcome::OutcomeKind;
    use crate::quota::Quota;

    #[test]
    fn unknown_times_are_explained_as_unknown() {
        let policy = Policy::new("export", Quota::per_minute(3)).unwrap();
        let decision = ChargeDecision::denied(3, 0, Wait::Unknown);
        let status = PolicyStatus {
            policy: policy.clone(),
            cost: 1,
            mode: Mode::Enforce,
            refuses: true,
            near: false,
            taken: 0,
            decision,
        };
        let outcome = Outcome::new(OutcomeKind::Limited, [status.clone()].into_iter().collect());
        let rule = RuleExplanation {
            policies: Box::new([policy]),
            mode: Mode::Enforce,
            not_charged: None,
            expected: None,
            key: None,
            key_text: Some("alice".to_owned()),
            cost: Some(1),
            settles: false,
            paces: false,
            statuses: vec![status],
        };
        let explanation = Explanation::new(outcome, vec![rule], None);
        assert_eq!(
            explanation.to_string(),
            "refused: limited; it is not known when the same request would pass\n\
             export: charges 1 to alice\n  \
             3 per minute, token bucket: 0 of 3 left, over its limit: refuses"
        );
        let json: serde_json::Value = serde_json::from_str(&explanation.to_json()).unwrap();
        let status = &json["rules"][0]["statuses"][0];
        for (object, field, expected) in [
            (&json, "wait", "\"unknown\""),
            (&json, "wait_us", "null"),
            (status, "wait", "\"unknown\""),
            (status, "wait_us", "null"),
            (status, "reset_after_us", "null"),
        ] {
            assert_eq!(object[field].to_string(), expected, "{field}");
        }
    }
}
