//! The content of the page, as data.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "fleet")]
use crate::base::time::Timestamp;
use crate::explanation::Explanation;
use crate::limiter::Occupancy;
use crate::mode::Mode;
use crate::rules_in_force::RulesInForce;
use crate::setup_warning::SetupWarning;
use crate::stats::{PolicySnapshot, RateBucket, RecentRefusal, StatsSnapshot};

use super::action::OperatorAction;
#[cfg(feature = "fleet")]
use super::processes::ProcessesView;
use super::request::ExplainForm;
#[cfg(feature = "fleet")]
use super::request::SettingForm;
#[cfg(feature = "fleet")]
use super::settings::FleetView;
use super::source::ErasedLayer;
use super::sums::Sums;
use super::target::{KeyStates, LayerKeys};

/// The maximum number of policies that are shown. Policies with the most requests over their limits come first.
const ROWS_MAX: usize = 200;

pub(super) struct PageView {
    pub(super) stats: StatsSnapshot,
    pub(super) rows: Vec<PolicyRow>,
    /// The number of policies that are not shown.
    pub(super) more: usize,
    pub(super) layers: Vec<LayerView>,
    pub(super) rules: Option<RulesView>,
    #[cfg(feature = "fleet")]
    pub(super) fleet: Option<FleetView>,
    /// All processes, if other processes report, or why their reports cannot be read.
    #[cfg(feature = "fleet")]
    pub(super) processes: Result<Option<ProcessesView>, Arc<str>>,
    /// The form with a change for all processes, if the change was not done.
    #[cfg(feature = "fleet")]
    pub(super) setting: Option<SettingForm>,
    /// The names of the extensions that a described request may have.
    pub(super) extensions: Vec<String>,
    pub(super) switches: Vec<(String, Mode)>,
    /// The described request or key, and its explanation.
    pub(super) explained: Option<(ExplainForm, Explained)>,
    /// The operator who looks at the page.
    pub(super) operator: Option<Box<str>>,
    /// The last actions of operators, the latest first, or `None` if the page has no operators.
    pub(super) done: Option<Vec<OperatorAction>>,
    /// The reason why an action was not done.
    pub(super) wrong: Option<String>,
    /// Why an action that was done may have no effect.
    pub(super) warning: Option<String>,
}

/// The explanation of each layer, or the error in the description.
pub(super) type Explained = Result<Vec<ExplainedLayer>, String>;

pub(super) struct ExplainedLayer {
    pub(super) title: String,
    /// The layer's explanation of the request, or `None` if a key is explained instead of a request.
    pub(super) explanation: Option<Explanation>,
    /// The states of the keys.
    pub(super) states: KeyStates,
    /// The token that an operator sends to act on the keys.
    pub(super) token: Option<String>,
    /// The program's own actions on the keys: the name of each action and its policy.
    pub(super) own: Vec<(String, String)>,
    /// The names of the policies under which operators can give the keys quotas of their own in all processes.
    pub(super) overridable: Vec<String>,
    /// The indices of the recent refusals of these keys under these policies.
    pub(super) recent: Vec<usize>,
}

impl ExplainedLayer {
    /// Returns whether the layer refuses the request, has a key without units left, or could not
    /// ask its limiter.
    pub(super) fn refuses(&self) -> bool {
        let passes = self.explanation.as_ref().is_none_or(Explanation::passes);
        !passes || self.states.failure.is_some() || self.states.states.iter().any(|state| !state.decision.is_allowed())
    }
}

pub(super) struct LayerView {
    pub(super) title: String,
    pub(super) occupancy: Option<Occupancy>,
    pub(super) warning: Option<SetupWarning>,
}

/// The rules of a file.
pub(super) struct RulesView {
    pub(super) in_force: RulesInForce,
    pub(super) error: Option<String>,
}

/// A policy.
pub(super) struct PolicyRow {
    pub(super) name: String,
    /// The titles of the layers that have a policy with this name. The statistics count policies with one name
    /// together. The list is empty if only the statistics have the policy.
    pub(super) layers: Vec<String>,
    /// The texts of the quotas. There are several quotas if they are plans.
    pub(super) quotas: Vec<String>,
    pub(super) mode: Option<Mode>,
    pub(super) stats: Option<PolicySnapshot>,
}

impl PolicyRow {
    /// Returns the buckets of the last five minutes.
    pub(super) fn five_minutes(&self) -> &[RateBucket] {
        self.stats.as_ref().map_or(&[], PolicySnapshot::five_minutes)
    }

    /// Returns the buckets of the last hour.
    pub(super) fn hour(&self) -> &[RateBucket] {
        self.stats.as_ref().map_or(&[], PolicySnapshot::hour)
    }

    /// Returns the time since the policy last refused a request, if it ever did.
    pub(super) fn refused_ago(&self, stats: &StatsSnapshot) -> Option<Duration> {
        Some(stats.taken_at().saturating_since(self.stats.as_ref()?.last_refused_at()?))
    }
}

impl PageView {
    /// Returns whether operators can deny a network in all processes.
    pub(super) fn can_deny_networks(&self) -> bool {
        #[cfg(feature = "fleet")]
        return self.fleet.as_ref().is_some_and(FleetView::can_deny_networks);
        #[cfg(not(feature = "fleet"))]
        false
    }

    /// Returns when a process last wrote back settings that the store had lost, as far as this process knows.
    #[cfg(feature = "fleet")]
    pub(super) fn settings_restored_at(&self) -> Option<Timestamp> {
        let own = self.fleet.as_ref().and_then(|fleet| fleet.restored_at);
        own.max(self.processes.iter().flatten().find_map(ProcessesView::restored_at))
    }

    pub(super) fn new(stats: StatsSnapshot, sources: &[(String, Arc<dyn ErasedLayer>)]) -> Self {
        let mut rows: Vec<PolicyRow> = Vec::new();
        let mut places: HashMap<String, usize> = HashMap::new();
        for (title, source) in sources {
            for (policies, mode) in source.rules() {
                for policy in policies {
                    let quota = policy.quota_words();
                    // The plans of a rule share a name, and policies of several layers may share a name, too.
                    let at = *places.entry(policy.name().to_owned()).or_insert_with(|| {
                        let (name, stats) = (policy.name().to_owned(), None);
                        rows.push(PolicyRow { name, layers: Vec::new(), quotas: Vec::new(), mode: Some(mode), stats });
                        rows.len() - 1
                    });
                    let Some(row) = rows.get_mut(at) else { continue };
                    if !row.layers.contains(title) {
                        row.layers.push(title.clone());
                    }
                    if !row.quotas.contains(&quota) {
                        row.quotas.push(quota);
                    }
                }
            }
        }
        let mut seen: HashMap<&str, &PolicySnapshot> =
            stats.policies().iter().map(|policy| (policy.name(), policy)).collect();
        let mut shown = HashSet::new();
        for row in &mut rows {
            if let Some(policy) = seen.get(row.name.as_str()) {
                row.stats = Some((*policy).clone());
                shown.insert(row.name.clone());
            }
        }
        seen.retain(|name, _| !shown.contains(*name));
        // The policies that remain in `seen` have no row. Some belong to former rules, or to layers that the page does
        // not know. One may be `other`: under this name the statistics count all policies for which they have no
        // separate counts.
        let mut unknown: Vec<&PolicySnapshot> = seen.into_values().collect();
        unknown.sort_by(|a, b| a.name().cmp(b.name()));
        rows.extend(unknown.into_iter().map(|policy| PolicyRow {
            name: policy.name().to_owned(),
            layers: Vec::new(),
            quotas: Vec::new(),
            mode: None,
            stats: Some(policy.clone()),
        }));
        rows.sort_by_cached_key(|row| std::cmp::Reverse(Sums::of(row.hour()).over));
        let more = rows.len().saturating_sub(ROWS_MAX);
        rows.truncate(ROWS_MAX);
        let layers = sources.iter().map(|(title, source)| LayerView {
            title: title.clone(),
            occupancy: source.occupancy(stats.taken_at()),
            warning: source.warning(),
        });
        let layers = layers.collect();
        Self {
            stats,
            rows,
            more,
            layers,
            rules: None,
            #[cfg(feature = "fleet")]
            fleet: None,
            #[cfg(feature = "fleet")]
            processes: Ok(None),
            #[cfg(feature = "fleet")]
            setting: None,
            extensions: Vec::new(),
            switches: Vec::new(),
            explained: None,
            operator: None,
            done: None,
            wrong: None,
            warning: None,
        }
    }

    /// Finds the recent refusals of these keys under these policies.
    pub(super) fn find_recent(&self, target: &LayerKeys) -> Vec<usize> {
        let is_explained = |refusal: &RecentRefusal| {
            let name = refusal.status().map(|status| status.policy().name());
            let is_it = |name: &str| {
                target.held.iter().any(|held| refusal.is_of(held.fingerprint) && held.policy.name() == name)
            };
            name.is_some_and(is_it)
        };
        let recent = self.stats.recent_refusals().iter().enumerate();
        recent.filter(|(_, refusal)| is_explained(refusal)).map(|(at, _)| at).collect()
    }
}
