//! Asks whether the store decides, for readiness probes.

use std::sync::Arc;
use std::time::Duration;

use super::{CheckReply, Checks};
use crate::base::random;
use crate::base::sync::lock;
use crate::event::StoreErrorKind;
use crate::key::Key;
use crate::limiter::remote::backend::{Backend, RemoteError};
use crate::limiter::{Charge, Reply};
use crate::policy::Policy;
use crate::quota::Quota;

/// The time within which the store is asked at most once.
const ASKED_EACH: Duration = Duration::from_secs(1);

/// The maximum number of keys that are tried to find a server that is not believed dead.
const TRIES: u64 = 64;

impl<B: Backend> Checks<B> {
    /// Asks whether the store decides, unless it was asked within the last second.
    ///
    /// The check takes a unit, because a store that is full or read-only still answers checks that take nothing. No
    /// other check uses the key of this unit, and the store forgets the key within a second or so.
    pub(crate) fn probe(self: &Arc<Self>) -> CheckReply<(), B> {
        let now = self.denials.now();
        {
            let mut probed = lock(&self.probed);
            let is_recent = probed.asked_at.is_some_and(|at| at <= now && now < at.saturating_add(ASKED_EACH));
            if let Some(answer) = probed.answer.as_ref().filter(|_| is_recent) {
                return Reply::Now(answer.clone());
            }
            probed.asked_at = Some(now);
        }
        let Ok(policy) = Policy::new("probe", Quota::per_second(1)) else {
            debug_assert!(false, "the name and the quota are valid");
            return Reply::Now(Ok(()));
        };
        // Tries several keys, because in a cluster the keys are on different servers, and a process is useful as long
        // as it reaches one of the servers.
        let mut failed = None;
        let mut reached = None;
        for n in 0..TRIES {
            let Some(key) = Key::of(random::mixed(now.as_micros().wrapping_add(n))) else { continue };
            failed = self.backend.error_at_once(self.backend.lane(&self.backend.stored(&policy, &key)));
            if failed.is_none() {
                reached = Some(key);
                break;
            }
        }
        if let Some(error) = failed {
            lock(&self.probed).answer = Some(Err(error.clone()));
            return Reply::Now(Err(error));
        }
        let Some(key) = reached else {
            debug_assert!(false, "a number is short enough for a key");
            return Reply::Now(Ok(()));
        };
        let (checks, taken) = (Arc::clone(self), self.take(&[Charge::new(&policy, &key)]));
        Reply::Later(Box::pin(async move {
            let answer = match taken.await {
                // Ignores an overload: this process asks for too much, and the store may still answer. A process that
                // stopped serving because of its own overload would move its load to the other processes.
                Err(error) if error.kind() == StoreErrorKind::Overloaded => Ok(()),
                answer => answer.map(drop),
            };
            lock(&checks.probed).answer = Some(answer.clone());
            answer
        }))
    }
}
