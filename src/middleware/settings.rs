//! The settings of a layer. Data.

use std::sync::Arc;
use std::time::Duration;

use super::charge::access::BoundList;
use super::decide::delay::WaitBounds;
use super::discard::DiscardBounds;
use super::rule::{BoundRule, TakenNames};
use super::source::{FindRules, RuleSource};
use crate::clock::Timer;
use crate::error::labelled;
use crate::headers::Headers;
use crate::mode::ModeSwitch;
use crate::outcome::Observer;
use crate::refusal::Refusals;

/// The settings of a layer.
#[derive(Clone, Default)]
pub(super) struct Settings {
    /// The rules of the layer. [`add_rule`](Self::add_rule) adds a rule.
    pub(super) rules: Vec<BoundRule>,
    /// The names that `rules` have taken.
    names: TakenNames,
    /// Whether quotas of `rules` follow switches.
    has_switches: bool,
    /// The source of the first rules and access lists.
    pub(super) source: Option<Sourced>,
    pub(super) headers: Headers,
    pub(super) refusals: Refusals,
    pub(super) on_error: OnError,
    pub(super) observer: Option<Arc<dyn Observer>>,
    pub(super) expose_outcome: bool,
    pub(super) exempt_preflight: bool,
    pub(super) refund_nested: bool,
    pub(super) access: Vec<BoundList>,
    pub(super) mode: Option<ModeSwitch>,
    pub(super) timer: Option<Arc<dyn Timer>>,
    pub(super) max_waiting: Option<usize>,
    pub(super) max_in_line: Option<usize>,
    /// How long a message of a connection may wait; zero if a message over its quota is refused at
    /// once.
    pub(super) max_message_wait: Duration,
    /// The bounds for reading a refused request's body, if they were set.
    pub(super) discard: Option<DiscardBounds>,
    /// Whether the layer has an overflow.
    pub(super) overflows: bool,
}

impl Settings {
    /// Makes the settings of a layer whose rules come from a source.
    #[cfg(feature = "rules")]
    pub(super) fn sourced(source: Arc<dyn RuleSource>) -> Self {
        let source = Some(Sourced { source, version: None, rules: 0, lists: 0, finder: None });
        let mut settings = Self { source, ..Self::default() };
        settings.follow_source();
        settings
    }

    /// Adds a rule after the present rules.
    pub(super) fn add_rule(&mut self, mut rule: BoundRule) {
        rule.place_behind(&mut self.names);
        self.has_switches |= rule.rule().switch.is_some();
        self.rules.push(rule);
    }

    pub(super) fn wait_bounds(&self) -> WaitBounds {
        let default = WaitBounds::default();
        WaitBounds {
            in_all: self.max_waiting.unwrap_or(default.in_all),
            in_line: self.max_in_line.unwrap_or(default.in_line),
        }
    }

    /// Whether the rules or their quotas can change while requests are served.
    pub(super) fn can_change(&self) -> bool {
        self.source.is_some() || self.has_switches
    }

    /// The rules that are not from the source.
    #[cfg(feature = "rules")]
    pub(super) fn own_rules(&self) -> &[BoundRule] {
        let (sourced, _) = self.of_source();
        debug_assert!(sourced <= self.rules.len(), "the rules of the source are among those of the layer");
        self.rules.get(sourced..).unwrap_or_default()
    }

    /// Returns how many of the first rules and of the first access lists are from the source.
    pub(super) fn of_source(&self) -> (usize, usize) {
        self.source.as_ref().map_or((0, 0), |sourced| (sourced.rules, sourced.lists))
    }

    /// Returns the finder of the source's rules, which are the layer's first rules, and their number.
    pub(super) fn finder(&self) -> Option<(&dyn FindRules, usize)> {
        let sourced = self.source.as_ref()?;
        Some((&**sourced.finder.as_ref()?, sourced.rules))
    }

    /// Replaces the rules and lists from the source with the source's present rules and lists. The program's own
    /// rules and lists come after the source's. Returns whether the source had a new version.
    pub(super) fn follow_source(&mut self) -> bool {
        let Some(sourced) = &mut self.source else { return false };
        let now = sourced.source.current();
        if sourced.version == Some(now.version) {
            return false;
        }
        let own_rules = self.rules.split_off(sourced.rules);
        let own_lists = self.access.split_off(sourced.lists);
        (self.rules, self.access) = (now.rules.clone(), now.lists.clone());
        (sourced.version, sourced.rules, sourced.lists) = (Some(now.version), now.rules.len(), now.lists.len());
        sourced.finder.clone_from(&now.finder);
        self.names = TakenNames::default();
        self.rules.iter().for_each(|rule| rule.add_names(&mut self.names));
        own_rules.into_iter().for_each(|rule| self.add_rule(rule));
        self.access.extend(own_lists);
        true
    }
}

/// A source of rules, and the numbers of the layer's rules and lists that come from this source.
#[derive(Clone)]
pub(super) struct Sourced {
    pub(super) source: Arc<dyn RuleSource>,
    version: Option<u64>,
    rules: usize,
    lists: usize,
    finder: Option<Arc<dyn FindRules>>,
}

labelled! {
    /// Says how a request is answered if the limiter fails to decide.
    ///
    /// Alternatively, another limiter can decide during the failure:
    /// [`FallbackLimiter`](crate::limiter::FallbackLimiter).
    #[derive(Default)]
    OnError,
    /// Returns the label for files.
    as_str {
        /// Refuses the request with `503 Service Unavailable`, or `UNAVAILABLE` over gRPC. This is the default, because
        /// a limit must not stop silently.
        #[default]
        Deny = "deny",
        /// The request passes, without rate-limit headers, if the limiter's store failed or answered too late. If
        /// there are more checks than can be answered in time, an
        /// [overload](crate::limiter::Limiter::is_overload), the request is refused as with `Deny`, because clients
        /// can cause an overload with many requests at once. So while a store is slow, many requests are refused.
        ///
        /// Clients that can make the store answer too late, by load or otherwise, can also cause requests to pass.
        Allow = "allow",
        /// The request passes, whatever the failure is. A client that sends enough requests at once is then not
        /// limited.
        AllowAlways = "allow-always",
    }
}
