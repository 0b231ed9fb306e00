//! The statistics at one time, as data.

use std::collections::HashMap;
use std::sync::Arc;

use super::cells::{KINDS, Totals};
use super::events::EventCounts;
use super::histogram::HistogramSnapshot;
use super::rates::RateBucket;
use super::recent::RecentRefusal;
use super::sketch::TopKey;
use super::state::PolicyState;
use crate::base::time::Timestamp;
use crate::mode::Mode;
use crate::outcome::OutcomeKind;
use crate::rules_in_force::RulesInForce;
use crate::setup_warning::SetupWarningKind;
use crate::store_load::StoreLoad;

/// The statistics at one time, made by [`Stats::snapshot`](super::Stats::snapshot).
///
/// The counters are read one after another while requests are served, so two counters may differ by the requests
/// between their readings.
#[derive(Clone, Debug)]
pub struct StatsSnapshot {
    pub(super) taken_at: Timestamp,
    pub(super) started_at: Timestamp,
    pub(super) outcomes: [u64; KINDS],
    pub(super) newest_outcomes: [u64; KINDS],
    pub(super) policies: Vec<PolicySnapshot>,
    pub(super) most_limited: Vec<TopKey>,
    pub(super) most_held: Vec<TopKey>,
    pub(super) recent_refusals: Option<Vec<RecentRefusal>>,
    pub(super) events: EventCounts,
    pub(super) store_load: Option<StoreLoad>,
    pub(super) rules: Option<RulesInForce>,
    pub(super) setup_warnings: Vec<(SetupWarningKind, u64)>,
}

impl StatsSnapshot {
    /// Returns the time at which the snapshot was made, on the clock of the statistics.
    #[must_use]
    pub fn taken_at(&self) -> Timestamp {
        self.taken_at
    }

    /// Returns when counting began.
    #[must_use]
    pub fn started_at(&self) -> Timestamp {
        self.started_at
    }

    /// Returns the number of requests with an outcome. Each layer counts each of its requests once.
    #[must_use]
    pub fn requests(&self, outcome: OutcomeKind) -> u64 {
        self.outcomes[outcome as usize]
    }

    /// Returns the number of requests with an outcome in the last ten to fifteen seconds.
    #[must_use]
    pub fn newest_requests(&self, outcome: OutcomeKind) -> u64 {
        self.newest_outcomes[outcome as usize]
    }

    /// Returns the policies that were observed, by name. If there are more than 200 policies, those that were observed
    /// later are counted together as `other`.
    #[must_use]
    pub fn policies(&self) -> &[PolicySnapshot] {
        &self.policies
    }

    /// Returns the keys that were refused most often recently, the most refused first: at most 512. Only refusals
    /// count. A key that stays just under its limit is not returned, but is among the keys that [use the most
    /// units](PolicySnapshot::most_used).
    #[must_use]
    pub fn most_limited(&self) -> &[TopKey] {
        &self.most_limited
    }

    /// Returns at most 1,024 keys whose requests now hold units of [concurrency limits](crate::Quota::concurrent), from
    /// the most units to the fewest. If more keys hold units, keys that took their first units while the list was full
    /// are missing. The [count](TopKey::count) of a key is the number of units that it holds in this process.
    #[must_use]
    pub fn most_held(&self) -> &[TopKey] {
        &self.most_held
    }

    /// Returns the last refusals, the latest first, if
    /// [`max_recent_refusals`](super::StatsBuilder::max_recent_refusals) is not 0.
    #[must_use]
    pub fn recent_refusals(&self) -> &[RecentRefusal] {
        self.recent_refusals.as_deref().unwrap_or_default()
    }

    /// Gives each key the name that another list has for it, so that a key is shown alike in all lists.
    pub(super) fn share_names(&mut self) {
        let used = self.policies.iter_mut().filter_map(|policy| policy.most_used.as_mut());
        let lists = used.chain([&mut self.most_limited, &mut self.most_held]);
        let (mut unnamed, mut known) = (Vec::new(), HashMap::new());
        for key in lists.flatten() {
            if key.known.is_none() {
                unnamed.push(key);
            } else {
                known.insert(key.fingerprint, key.known.clone());
            }
        }
        if unnamed.is_empty() {
            return;
        }
        let refusals = self.recent_refusals.iter().flatten().filter_map(RecentRefusal::known);
        known.extend(refusals.map(|(fingerprint, known)| (fingerprint, known.clone())));
        for key in unnamed {
            if let Some(known) = known.get(&key.fingerprint) {
                key.known.clone_from(known);
            }
        }
    }

    /// Returns whether refusals are kept.
    pub(crate) fn keeps_refusals(&self) -> bool {
        self.recent_refusals.is_some()
    }

    /// Returns the counts of events.
    #[must_use]
    pub fn events(&self) -> &EventCounts {
        &self.events
    }

    /// Returns how busy the stores of the observed limiters were when the snapshot was made. If there are several
    /// stores, their counts are added, and the times belong to the store that is nearest to its deadline. Returns
    /// `None` if no limiter has a store.
    #[must_use]
    pub fn store_load(&self) -> Option<&StoreLoad> {
        self.store_load.as_ref()
    }

    /// Returns which rules of a file are in force in the observed layers. If there are several files, returns the rules
    /// that came into force last. Returns `None` if no layer has rules of a file.
    #[must_use]
    pub fn rules(&self) -> Option<RulesInForce> {
        self.rules
    }

    /// Iterates over the kinds of [setup warnings](crate::observe::SetupWarning) that were reported, each with the
    /// number of reports.
    pub fn setup_warnings(&self) -> impl Iterator<Item = (SetupWarningKind, u64)> {
        self.setup_warnings.iter().copied()
    }
}

/// The statistics of one policy.
#[derive(Clone, Debug)]
pub struct PolicySnapshot {
    pub(super) name: Arc<str>,
    pub(super) totals: Totals,
    pub(super) waited: HistogramSnapshot,
    pub(super) is_block: bool,
    pub(super) held: u64,
    pub(super) held_for: HistogramSnapshot,
    /// The number of waiting requests, or `None` if no request ever waited because of the policy.
    pub(super) waiting: Option<u64>,
    /// The number of paced bodies, or `None` if the policy never paced a body.
    pub(super) pacing: Option<u64>,
    pub(super) paced_bytes: u64,
    pub(super) last_refused_at: Option<Timestamp>,
    pub(super) five_minutes: Vec<RateBucket>,
    pub(super) hour: Vec<RateBucket>,
    pub(super) most_used: Option<Vec<TopKey>>,
}

impl PolicySnapshot {
    /// Returns the name of the policy, or `other`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the number of requests that found the policy in a state while its rule was in a mode.
    #[must_use]
    pub fn decided(&self, mode: Mode, state: PolicyState) -> u64 {
        self.totals.states[mode as usize][state as usize]
    }

    /// Iterates over the modes and states in which requests found the policy, each with the number of requests.
    pub(super) fn states(&self) -> impl Iterator<Item = (&'static str, PolicyState, u64)> {
        let modes =
            Mode::ALL.iter().zip(self.totals.states).filter(|(_, states)| states.iter().any(|count| *count > 0));
        modes.flat_map(|(mode, states)| {
            PolicyState::ALL.iter().zip(states).map(|(state, count)| (mode.as_str(), *state, count))
        })
    }

    /// Returns the number of requests that the policy refused, including requests that went to an overflow. Several
    /// policies may have refused one request.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.totals.refused
    }

    /// Returns whether the policy is a [block](crate::Quota::block): a block refuses keys for a time after strikes, so
    /// many refusals are normal.
    #[must_use]
    pub fn is_block(&self) -> bool {
        self.is_block
    }

    /// Returns the number of units that were taken when requests passed. Later refunds and settlements do not change
    /// the number of taken units.
    #[must_use]
    pub fn units(&self) -> u64 {
        self.totals.units
    }

    /// Returns how long requests waited because of this policy: for their departure from its leaky queue, or in line
    /// for units of its concurrency limit. The histogram has a duration for each wait that has ended in any way.
    #[must_use]
    pub fn waited(&self) -> &HistogramSnapshot {
        &self.waited
    }

    /// Returns the number of units of the policy's [concurrency limit](crate::Quota::concurrent) that requests in
    /// flight hold now, in the layers that these statistics observe. Places that are held [without a
    /// layer](crate::MemoryLimiter::hold) are not counted. A reset does not lower the number, because a request is
    /// counted until it ends.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.held
    }

    /// Returns how long requests held units of the policy's concurrency limit. The histogram has one duration for each
    /// request that has returned its units.
    #[must_use]
    pub fn held_for(&self) -> &HistogramSnapshot {
        &self.held_for
    }

    /// Returns the number of requests that now wait because of this policy: for their departure from its leaky queue,
    /// or in line for units of its concurrency limit.
    #[must_use]
    pub fn waiting(&self) -> u64 {
        self.waiting.unwrap_or(0)
    }

    /// Returns the number of bodies of requests and responses that this policy [paces](crate::Rule::pace_responses)
    /// now.
    #[must_use]
    pub fn pacing(&self) -> u64 {
        self.pacing.unwrap_or(0)
    }

    /// Returns the number of bytes of the bodies that this policy paced and that have ended.
    #[must_use]
    pub fn paced_bytes(&self) -> u64 {
        self.paced_bytes
    }

    /// Returns whether this policy paces or paced a body.
    pub(super) fn has_paces(&self) -> bool {
        self.pacing.is_some()
    }

    /// Returns whether a request waits or waited because of this policy.
    pub(super) fn has_waits(&self) -> bool {
        self.waiting.is_some()
    }

    /// Returns whether requests hold or held units of a concurrency limit.
    pub(crate) fn has_places(&self) -> bool {
        self.held > 0 || self.held_for.count() > 0
    }

    /// Returns the time at which the policy last refused a request, or `None` if it never did.
    #[must_use]
    pub fn last_refused_at(&self) -> Option<Timestamp> {
        self.last_refused_at
    }

    /// Returns the last five minutes in buckets of 5 s, the oldest first. The last bucket has not ended yet.
    #[must_use]
    pub fn five_minutes(&self) -> &[RateBucket] {
        &self.five_minutes
    }

    /// Returns the last hour in buckets of 60 s, the oldest first. The last bucket has not ended yet.
    #[must_use]
    pub fn hour(&self) -> &[RateBucket] {
        &self.hour
    }

    /// Returns the keys whose passed requests used the most units recently: at most 128, the key with the most units
    /// first. Units that were refunded or settled later are not subtracted. The list is empty unless
    /// [`count_use`](super::StatsBuilder::count_use) is on.
    #[must_use]
    pub fn most_used(&self) -> &[TopKey] {
        self.most_used.as_deref().unwrap_or_default()
    }

    /// Returns whether used units are counted for each key.
    pub(crate) fn counts_use(&self) -> bool {
        self.most_used.is_some()
    }
}
