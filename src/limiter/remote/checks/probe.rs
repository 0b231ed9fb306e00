//! Asks whether the store decides, for readiness probes.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::{CheckReply, Checks};
use crate::base::random;
use crate::base::sync::lock;
use crate::base::time::Timestamp;
use crate::event::StoreErrorKind;
use crate::key::Key;
use crate::limiter::remote::backend::{Backend, RemoteError};
use crate::limiter::remote::flights::REMEMBERED;
use crate::limiter::remote::unanswered::Unanswered;
use crate::limiter::{Charge, Reply};
use crate::policy::Policy;
use crate::quota::Quota;

/// The time within which the store is asked at most once.
const ASKED_EACH: Duration = Duration::from_secs(1);

/// The maximum number of keys that are tried to find a server that is not believed dead.
const TRIES: u64 = 64;

impl<B: Backend> Checks<B> {
    /// Asks whether the store decides, unless it was asked within the last second. All probes of a second get the same
    /// answer, so an answer is never older than a second.
    ///
    /// The check takes a unit, because a store that is full or read-only still answers checks that take nothing. No
    /// other check uses the key of this unit, and the store forgets the key within a second or so.
    pub(crate) fn probe(self: &Arc<Self>) -> CheckReply<(), B> {
        let now = self.denials.now();
        let mut probed = lock(&self.probed);
        let is_recent = |at: Timestamp| at <= now && now < at.saturating_add(ASKED_EACH);
        let recent = probed.asked.as_ref().filter(|(at, _)| is_recent(*at)).map(|(_, answer)| answer.clone());
        let mut answer = recent.unwrap_or_else(|| {
            let (sender, answer) = watch::channel(None);
            probed.asked = Some((now, answer.clone()));
            // A task, so that the others get an answer even if the caller that asked first has gone.
            let checks = Arc::clone(self);
            self.backend.runtime().spawn(async move { sender.send(Some(checks.ask_probe(now).await)) });
            answer
        });
        drop(probed);
        if let Some(answer) = &*answer.borrow() {
            return Reply::Now(answer.clone());
        }
        Reply::Later(Box::pin(async move {
            let answer = answer.wait_for(Option::is_some).await.map(|answer| answer.clone());
            answer.ok().flatten().unwrap_or_else(|| Err(Unanswered::RuntimeEnded.into()))
        }))
    }

    async fn ask_probe(self: &Arc<Self>, now: Timestamp) -> Result<(), B::Error> {
        let Ok(policy) = Policy::new("probe", Quota::per_second(1)) else {
            debug_assert!(false, "the name and the quota are valid");
            return Ok(());
        };
        // Tries several keys, because in a cluster the keys are on different servers, and a process is useful as long
        // as it reaches one of the servers.
        let mut failed = None;
        let mut reached = None;
        for n in 0..TRIES {
            let Some(key) = Key::of(random::mixed(now.as_micros().wrapping_add(n))) else { continue };
            let lane = self.backend.lane(&self.backend.stored(&policy, &key));
            failed = self.backend.error_at_once(lane);
            if failed.is_none() {
                reached = Some((key, lane));
                break;
            }
        }
        if let Some(error) = failed {
            return self.record_probe(Err(error));
        }
        let Some((key, lane)) = reached else {
            debug_assert!(false, "a number is short enough for a key");
            return Ok(());
        };
        match self.take(&[Charge::new(&policy, &key)]).await {
            Err(error) if error.kind() == StoreErrorKind::Overloaded => self.probe_by_calls(lane),
            answer => self.record_probe(answer.map(drop)),
        }
    }

    /// Returns the answer to a probe for which this process had no time. The overload of this process is no reason to
    /// fail: a process that stopped serving would move its load to the other processes. But the probe fails if the
    /// store answered no call of the last seconds within the deadline. After a failed probe, only calls that were made
    /// since then show that the store answers in time.
    fn probe_by_calls(&self, lane: u16) -> Result<(), B::Error> {
        let now = self.denials.now();
        let calls = self.backend.answers_in_time(lane);
        if let Some(late @ Err(_)) = calls {
            return self.record_probe(late);
        }
        let mut probed = lock(&self.probed);
        let is_recent = |at: Timestamp| at <= now && now < at.saturating_add(REMEMBERED);
        if calls.is_some() && !probed.failed_at.is_some_and(is_recent) {
            probed.answer = Some(Ok(()));
        }
        probed.answer.clone().unwrap_or(Ok(()))
    }

    fn record_probe(&self, answer: Result<(), B::Error>) -> Result<(), B::Error> {
        let now = self.denials.now();
        let mut probed = lock(&self.probed);
        probed.failed_at = if answer.is_err() { Some(now) } else { None };
        probed.answer = Some(answer.clone());
        answer
    }
}
