//! Following quota switches and rules files: when a quota or a rule changes, the layer's configuration is compiled
//! again and replaced as a whole.

use std::sync::{Arc, Weak};

use super::compiled::{Compiled, Live};
use super::rule::{BoundRule, Follow};
#[cfg(feature = "rules")]
use crate::event::RulesEvent;
use crate::limiter::{Limiter, UnsupportedQuota, supports_in_layer};
use crate::policy::Policy;
use crate::quota::Quota;
use crate::sync::{AtomicU64, Mutex, Ordering, lock};

/// Returns the shared slot of the layer's newest configuration. Returns `None` if nothing can change it.
pub(super) fn follow<L: Limiter>(compiled: &Arc<Compiled<L>>) -> Option<Arc<Live<L>>> {
    if !compiled.settings.can_change() {
        return None;
    }
    let (current, version) = (Mutex::new(Arc::clone(compiled)), AtomicU64::new(compiled.version));
    let live = Arc::new(Live { current, version });
    let _ = compiled.live.set(Arc::downgrade(&live));
    let follower: Weak<dyn Follow> = Arc::downgrade(&(Arc::clone(&live) as Arc<dyn Follow>));
    for switch in compiled.settings.rules.iter().filter_map(|bound| bound.rule().switch.as_ref()) {
        switch.enter(Weak::clone(&follower));
    }
    if let Some(sourced) = &compiled.settings.source {
        sourced.source.enter(follower);
    }
    // Rules and quotas may have changed since the settings were made.
    live.follow();
    Some(live)
}

impl<L> Live<L> {
    /// Replaces a configuration that is not the current one.
    #[inline]
    pub(super) fn catch_up(&self, compiled: &mut Arc<Compiled<L>>) {
        // Acquire, with the Release in `follow`: what is read under the lock is then at least as new.
        if self.version.load(Ordering::Acquire) != compiled.version {
            *compiled = self.current();
        }
    }
}

impl<L: Limiter> Follow for Live<L> {
    fn supports(&self, quota: &Quota) -> Result<(), UnsupportedQuota> {
        supports_in_layer(&*self.current().limiter, quota)
    }

    #[cfg(feature = "rules")]
    fn own_names(&self) -> Vec<String> {
        self.current().settings.own_rules().iter().flat_map(BoundRule::names).map(str::to_owned).collect()
    }

    #[cfg(feature = "rules")]
    fn report(&self, event: &RulesEvent) {
        if let Some(observer) = &self.current().settings.observer {
            observer.on_rules_event(event);
        }
    }

    fn follow(&self) {
        loop {
            let before = self.current();
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
            // Not under the lock: this calls the limiter, which is the application's code.
            let next = Arc::new(before.successor(settings, has_new_rules));
            {
                let mut current = lock(&self.current);
                if !Arc::ptr_eq(&current, &before) {
                    continue; // another thread replaced it first
                }
                self.version.store(next.version, Ordering::Release);
                *current = Arc::clone(&next);
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
