//! Follows quota switches and rules files: when a quota or a rule changes, the layer's configuration is compiled
//! again and replaced as a whole.

use std::sync::{Arc, Weak};

use super::compiled::Compiled;
use super::latest::Latest;
use super::rule::{BoundRule, Follow};
#[cfg(feature = "rules")]
use crate::event::RulesEvent;
use crate::limiter::{Limiter, UnsupportedQuota, supports_in_layer};
use crate::policy::Policy;
use crate::quota::Quota;

/// Returns the holder of the layer's latest configuration. Returns `None` if nothing can change the
/// configuration.
pub(super) fn follow<L: Limiter>(compiled: &Arc<Compiled<L>>) -> Option<Arc<Latest<Compiled<L>>>> {
    if !compiled.settings.can_change() {
        return None;
    }
    let latest = Arc::new(Latest::new(Arc::clone(compiled)));
    let _ = compiled.latest.set(Arc::downgrade(&latest));
    let follower: Weak<dyn Follow> = Arc::downgrade(&(Arc::clone(&latest) as Arc<dyn Follow>));
    for switch in compiled.settings.rules.iter().filter_map(|bound| bound.rule().switch.as_ref()) {
        switch.enter(Weak::clone(&follower));
    }
    if let Some(sourced) = &compiled.settings.source {
        sourced.source.enter(follower);
    }
    // Rules and quotas may have changed since the settings were made.
    latest.follow();
    Some(latest)
}

impl<L: Limiter> Follow for Latest<Compiled<L>> {
    fn supports(&self, quota: &Quota) -> Result<(), UnsupportedQuota> {
        supports_in_layer(&*self.get().limiter, quota)
    }

    #[cfg(feature = "rules")]
    fn own_names(&self) -> Vec<String> {
        self.get().settings.own_rules().iter().flat_map(BoundRule::names).map(str::to_owned).collect()
    }

    #[cfg(all(feature = "rules", feature = "fleet"))]
    fn checks_access(&self) -> bool {
        true
    }

    #[cfg(feature = "rules")]
    fn report(&self, event: &RulesEvent) {
        match &self.get().settings.observer {
            Some(observer) => observer.on_rules_event(event),
            None => event.report(),
        }
    }

    fn follow(&self) {
        loop {
            let before = self.get();
            let mut settings = before.settings.clone();
            let has_new_rules = settings.follow_source();
            for bound in &mut settings.rules {
                bound.rule_mut().follow_switch();
            }
            let policies =
                |rules: &[BoundRule]| -> Vec<Policy> { rules.iter().flat_map(BoundRule::policies).cloned().collect() };
            if !has_new_rules && policies(&settings.rules) == policies(&before.settings.rules) {
                return;
            }
            // Makes the successor without the lock, because making it calls the limiter, which is the application's
            // code.
            let next = Arc::new(before.successor(settings, has_new_rules));
            if !self.replace(&before, &next) {
                continue;
            }
            let was_entered = before.entered.get().is_some();
            drop(before); // it leaves the registry, unless requests are still decided under it
            next.wake_lines();
            if was_entered {
                next.look_at_setup(); // the last, because the observer is the application's code and may panic
            }
            return;
        }
    }
}
