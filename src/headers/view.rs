//! The status of a policy, borrowed from the request's charges.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

use smallvec::SmallVec;

use crate::base::wait::Wait;
use crate::decision::ChargeDecision;
use crate::key::Key;
use crate::policy::Policy;

/// The borrowed form of a [`PolicyStatus`](crate::outcome::PolicyStatus), with the request's key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PolicyView<'a> {
    /// The policy's index in the layer.
    pub(crate) index: usize,
    pub(crate) policy: &'a Policy,
    /// The request's key. `None` if no header reads the key.
    pub(crate) key: Option<&'a Key>,
    pub(crate) decision: &'a ChargeDecision,
    /// Whether this policy refused the request.
    pub(crate) refuses: bool,
}

impl PolicyView<'_> {
    /// Returns the remaining units that are reported to clients. The number is 0 after a refusal,
    /// because the units that are left are not enough for the request.
    pub(super) fn remaining(&self) -> u64 {
        if self.refuses { 0 } else { self.decision.remaining() }
    }

    /// See [`ChargeDecision::binding_rank`].
    fn rank(&self) -> (bool, Reverse<Wait>, u64) {
        self.decision.binding_rank(self.refuses)
    }

    /// Returns the wait after a refusal. Returns `None` if the wait is not known, or if the request can
    /// never pass.
    pub(super) fn wait_us(&self) -> Option<u64> {
        self.decision.known_wait_us()
    }
}

/// Returns the policy that binds, as [`Outcome::binding`](crate::outcome::Outcome::binding) does.
pub(super) fn binding<'a>(views: &'a [PolicyView<'a>]) -> Option<&'a PolicyView<'a>> {
    views.iter().min_by_key(|view| view.rank())
}

/// Keeps one view of each policy: the view that binds. A request's descriptors can charge a policy under several
/// keys, but a list has one item for each policy.
pub(crate) fn keep_one_of_each<'a>(views: &mut SmallVec<[PolicyView<'a>; 4]>) {
    let mut indices: HashMap<u64, usize> = HashMap::new();
    let mut kept: SmallVec<[PolicyView<'a>; 4]> = SmallVec::new();
    for view in views.drain(..) {
        match indices.entry(view.policy.name_fingerprint()) {
            Entry::Vacant(vacant) => {
                vacant.insert(kept.len());
                kept.push(view);
            }
            Entry::Occupied(seen) => {
                if let Some(other) = kept.get_mut(*seen.get()).filter(|other| view.rank() < other.rank()) {
                    *other = view;
                }
            }
        }
    }
    *views = kept;
}

/// Returns the longest wait of the policies that refused. Returns `None` if no policy refused, if no
/// wait is known, or if the request can never pass.
pub(super) fn longest_wait_us(views: &[PolicyView<'_>]) -> Option<u64> {
    let refusing = || views.iter().filter(|view| view.refuses);
    if refusing().any(|view| view.decision.wait() == Wait::Never) {
        return None;
    }
    refusing().filter_map(PolicyView::wait_us).max()
}

/// Returns whether at most `percent` percent of the capacity remain.
pub(crate) fn is_near(decision: &ChargeDecision, percent: u8) -> bool {
    u128::from(decision.remaining()) * 100 <= u128::from(decision.limit()) * u128::from(percent)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::base::sampling::config;
    use crate::mode::Mode;
    use crate::outcome::{Outcome, OutcomeKind, PolicyStatus};
    use crate::quota::Quota;

    /// A decision out of so few that ties are frequent.
    fn decision() -> impl Strategy<Value = ChargeDecision> {
        prop_oneof![
            (0..3_u64).prop_map(|remaining| ChargeDecision::allowed(5, remaining)),
            (0..4_u64).prop_map(|wait| ChargeDecision::denied(
                5,
                1,
                match wait {
                    0 => Wait::Never,
                    3 => Wait::Unknown,
                    wait => Wait::After(Duration::from_micros(wait)),
                }
            )),
        ]
    }

    proptest! {
        #![proptest_config(config(2_000))]

        #[test]
        fn headers_lists_and_outcomes_agree_on_what_binds(decisions in prop::collection::vec(decision(), 1..6)) {
            let policy = Policy::new("p", Quota::per_minute(5)).unwrap();
            let views = decisions.iter().enumerate().map(|(index, decision)| PolicyView {
                index,
                policy: &policy,
                key: None,
                decision,
                refuses: !decision.is_allowed(),
            });
            let mut views: SmallVec<[PolicyView<'_>; 4]> = views.collect();
            let status = |view: &PolicyView<'_>| PolicyStatus {
                policy: policy.clone(),
                cost: view.index as u64,
                mode: Mode::Enforce,
                refuses: view.refuses,
                near: false,
                taken: 0,
                decision: view.decision.clone(),
            };
            let outcome = Outcome::new(OutcomeKind::Limited, views.iter().map(status).collect());
            let bound = outcome.binding().map(|status| status.cost as usize);
            prop_assert_eq!(binding(&views).map(|view| view.index), bound);
            // Descriptors charge one policy under several keys.
            keep_one_of_each(&mut views);
            prop_assert_eq!(views.iter().map(|view| view.index).collect::<Vec<_>>(), Vec::from_iter(bound));
        }
    }

    #[test]
    fn first_of_equal_policies_binds() {
        let policies = ["first", "second"].map(|name| Policy::new(name, Quota::per_minute(5)).unwrap());
        let denied = || ChargeDecision::denied(5, 0, Wait::After(Duration::from_secs(1)));
        for decisions in [[denied(), denied()], [(); 2].map(|()| ChargeDecision::allowed(5, 3))] {
            let views: Vec<PolicyView<'_>> = (0..2)
                .map(|index| PolicyView {
                    index,
                    policy: &policies[index],
                    key: None,
                    decision: &decisions[index],
                    refuses: !decisions[index].is_allowed(),
                })
                .collect();
            assert_eq!(binding(&views).map(|view| view.policy.name()), Some("first"));
        }
    }
}
