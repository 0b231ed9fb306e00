//! Makes changes of the operators' settings in the store.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use super::change::FleetChange;
use super::document::{FleetAuthor, FleetDocument};
use super::error::{FleetError, FleetErrorKind};
use super::state::{FleetShared, KnownFleet, PAUSE, aside};
use crate::base::random;
use crate::base::sync::lock;
use crate::limiter::VersionedText;

/// The maximum number of times that a change is tried if other processes change something at each
/// try.
const TRIES: usize = 50;

/// The longest time of all tries of a change together.
const CHANGE: Duration = Duration::from_secs(10);

/// The advice for an operator if it is unknown whether a change was made.
const LOOK_FIRST: &str = "look at the settings before you make it again";

/// Makes changes on a document.
pub(super) trait MakeChanges:
    Fn(&FleetDocument) -> Result<Arc<[FleetChange]>, FleetError> + Send + Sync + 'static
{
}

impl<F: Fn(&FleetDocument) -> Result<Arc<[FleetChange]>, FleetError> + Send + Sync + 'static> MakeChanges for F {}

impl FleetShared {
    /// Makes changes within [`CHANGE`]. Returns the revision that they made.
    pub(super) async fn make(
        self: &Arc<Self>,
        by: &str,
        why: &str,
        changes: impl MakeChanges,
    ) -> Result<u64, FleetError> {
        let mut tries = ChangeTries::default();
        let made = timeout(CHANGE, self.try_to_make(by, why, Arc::new(changes), &mut tries)).await;
        made.unwrap_or_else(|_| Err(tries.into_error()))
    }

    async fn try_to_make(
        self: &Arc<Self>,
        by: &str,
        why: &str,
        changes: Arc<impl MakeChanges>,
        tries: &mut ChangeTries,
    ) -> Result<u64, FleetError> {
        loop {
            if let Err(error) = self.read().await {
                if error.kind() == FleetErrorKind::Foreign && tries.unanswered.is_empty() {
                    return Err(error);
                }
                tries.failed(error).await;
                continue;
            }
            let KnownFleet { document, version, .. } = lock(&self.state).known.clone();
            if let Some(revision) = tries.unanswered.iter().find_map(|swap| document.made(swap.tag)) {
                tries.made = Some(revision);
                self.wait_until_in_force(revision).await;
                return Ok(revision);
            }
            if tries.unanswered.iter().any(|swap| document.has_displaced(swap.revision)) {
                let message = format!(
                    "it is unknown whether the change was made, because others made many changes since: {LOOK_FIRST}"
                );
                return Err(FleetError::new(FleetErrorKind::Unavailable, message));
            }
            let long = || (u128::from(random::secret()) << 64) | u128::from(random::secret());
            let (own, secret) = (long(), long());
            let tag = own as u64; // a part of it
            let (changes, by, why, at) = (Arc::clone(&changes), by.to_owned(), why.to_owned(), self.clock.now());
            let changed = aside(move || {
                document.changed(&changes(&document)?, FleetAuthor { by: &by, why: &why, at, tag, secret })
            });
            let (next, text) = changed.await??;
            let (revision, text) = (next.revision, VersionedText::new(own, text));
            // Without an answer, the change may have been made, or may still be made. The next try expects the same
            // version, so at most one of the two tries succeeds.
            tries.unanswered.push(SentSwap { tag, revision });
            match self.call(self.text.swap(version, &text)).await {
                Ok(true) => {
                    tries.made = Some(revision);
                    self.put_in_force(KnownFleet::new(next, &text)).await?;
                    self.wait_until_in_force(revision).await;
                    return Ok(revision);
                }
                Ok(false) => {
                    tries.unanswered.pop();
                    tries.conflicts += 1;
                    if tries.conflicts == TRIES {
                        let message =
                            "nothing was changed, because other processes changed the settings during each try";
                        return Err(FleetError::new(FleetErrorKind::Unavailable, message));
                    }
                }
                Err(error) => {
                    if error.is_certain() {
                        tries.unanswered.pop();
                        if tries.unanswered.is_empty() {
                            return Err(error);
                        }
                    }
                    tries.failed(error).await;
                }
            }
        }
    }
}

/// The tries of a change so far.
#[derive(Default)]
struct ChangeTries {
    /// The swaps that were not answered.
    unanswered: Vec<SentSwap>,
    /// The revision that the change made.
    made: Option<u64>,
    /// The number of swaps that were refused because another process had changed something.
    conflicts: usize,
    /// The last failure.
    failure: Option<FleetError>,
}

/// A swap that was sent to the store.
struct SentSwap {
    /// The tag of its actions.
    tag: u64,
    /// The revision that it makes.
    revision: u64,
}

impl ChangeTries {
    /// Notes a failure, and pauses before the next try.
    async fn failed(&mut self, error: FleetError) {
        self.failure = Some(error);
        tokio::time::sleep(PAUSE).await;
    }

    /// Returns the error of a change whose time is over.
    fn into_error(self) -> FleetError {
        if let Some(revision) = self.made {
            let message = format!(
                "revision {revision} was made, but is not in force in this process yet: do not make the change again. \
                 Each process takes the revision within seconds after the store answers it"
            );
            return FleetError::new(FleetErrorKind::Unavailable, message);
        }
        let message = if self.unanswered.is_empty() {
            format!("nothing was changed within {CHANGE:?}")
        } else {
            format!("after {CHANGE:?} it is still unknown whether the change was made: {LOOK_FIRST}")
        };
        let error = FleetError::new(FleetErrorKind::Unavailable, message);
        match self.failure {
            Some(failure) => error.caused_by(failure),
            None => error,
        }
    }
}
