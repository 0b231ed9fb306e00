//! Events of limiters, layers, files of rules and fleets. Decisions are not events.

use std::path::PathBuf;
use std::time::Duration;

#[cfg(feature = "tracing")]
use crate::base::sync::contained;
use crate::base::time::Timestamp;
use crate::error::labelled;
use crate::policy::Policy;
use crate::setup_warning::print_warning;

labelled! {
    /// Why a store, such as Redis, did not decide.
    StoreErrorKind,
    /// Returns the label for metrics and logs.
    as_str {
        /// The store cannot serve now: it has no connection, is loading, failing over, read-only, or out of memory.
        /// This ends by itself.
        Unavailable = "unavailable",
        /// No answer came within the deadline. The charge may have been taken.
        Timeout = "timeout",
        /// The check could not be answered in time: too many checks already wait, earlier checks took the whole
        /// deadline, or the process was too busy to read the answer. Only in the last of these cases was the check
        /// sent. The cause can be this process, or a store that is slow or busy: the limiter cannot tell which.
        Overloaded = "overloaded",
        /// Other processes changed the key before each attempt of this process to change it. The charge
        /// was not taken.
        Contended = "contended",
        /// An operator has to fix the setup. A password is wrong, a right is missing, a URL is not valid, the
        /// server is too old, or the store cannot decide a set of charges.
        Misconfigured = "misconfigured",
        /// This version of the crate cannot read the stored value, or the reply does not come from the crate's
        /// scripts.
        Foreign = "foreign",
    }
}

/// Something that happened to a limiter or its store.
///
/// Later versions may add events, and fields to events. So match with `..`:
///
/// ```
/// use tower_ratelimit::observe::{LimiterEvent, Observer};
///
/// struct Log;
///
/// impl Observer for Log {
///     fn on_limiter_event(&self, event: &LimiterEvent) {
///         match event {
///             LimiterEvent::StoreDown { server, error, .. } => {
///                 eprintln!("{server} is down: {error}")
///             }
///             LimiterEvent::StoreFailed { kind, error, .. } => eprintln!("{kind}: {error}"),
///             _ => {}
///         }
///     }
/// }
/// ```
///
/// With the feature `tracing`, the limiters of this crate also write some events to the target `tower_ratelimit`, with
/// or without an observer. [`StoreDown`](Self::StoreDown), [`StoreFar`](Self::StoreFar),
/// [`StoreFailed`](Self::StoreFailed), [`ScriptsForgotten`](Self::ScriptsForgotten),
/// [`MasterChanged`](Self::MasterChanged) and [`TooManyQuotas`](Self::TooManyQuotas) have the level `WARN`.
/// [`StoreUp`](Self::StoreUp), [`StoreLeft`](Self::StoreLeft) and [`StoreRecovered`](Self::StoreRecovered) have the
/// level `INFO`. [`StillFailing`](Self::StillFailing), and events that occur for each check, request or key, are not
/// written. Without the feature, no event is written.
///
/// Each event is made by the function with its name. Use these functions in limiters of your own, and in tests of
/// observers.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LimiterEvent {
    /// The limiter forgot a key with a live state, to make room for another key or because a restored snapshot has
    /// more keys than fit.
    #[non_exhaustive]
    Evicted {
        /// Whether the key's allowance was used up. If so, the client has a fresh allowance now.
        throttled: bool,
    },
    /// A new key was denied because the table is full.
    Full,
    /// More than 16,382 quotas have live states, and a limiter has numbers for at most 16,382 quotas.
    /// The limiter also enforces further quotas, and keeps the usage of their keys. The states of
    /// further quotas take more memory and time, and are not in snapshots. If the table is full, these
    /// states can be evicted, even those of [meters](crate::Quota::meter), which otherwise are never
    /// evicted. Reported at most every ten seconds.
    TooManyQuotas,
    /// The first of two limiters could not decide a request, and the second was asked.
    #[non_exhaustive]
    FellBack {
        /// The error of the first limiter, with its causes.
        error: String,
    },
    /// The limiter could not answer. A fallback reports this event if its first limiter fails at a call that
    /// does not decide a request.
    #[non_exhaustive]
    Failed {
        /// The error of the limiter, with its causes.
        error: String,
    },
    /// The limiter answered a check without its store, because it remembers a denial of the key or holds leased
    /// units.
    AnsweredLocally,
    /// A check that a store, such as Redis, decides has ended. Reported for each check. Observers are called while
    /// the check's request is polled, so that the current span is the request's span.
    #[non_exhaustive]
    StoreChecked {
        /// The duration of the check, including the wait before it was sent. Zero if the check was not sent
        /// because its server is believed dead.
        duration: Duration,
        /// `None` if the store decided.
        error: Option<StoreErrorKind>,
    },
    /// A server stopped answering. Until the server answers again, checks that need it fail at once. The event is
    /// reported again if the reason changes, for example if connections to the server are now refused.
    #[non_exhaustive]
    StoreDown {
        /// The server's host and port.
        server: String,
        /// The last error, with its causes.
        error: String,
    },
    /// A server answers again. If the server had gone down within ten seconds of its previous return, the event is
    /// reported only after the server has answered for one second.
    #[non_exhaustive]
    StoreUp {
        /// The server's host and port.
        server: String,
    },
    /// The limiter no longer waits for a server that did not answer, because the server has left the cluster or the
    /// limiter was dropped.
    #[non_exhaustive]
    StoreLeft {
        /// The server's host and port.
        server: String,
    },
    /// A server answers, but a round trip to it takes more than half of a check's deadline. Checks fail as soon as
    /// round trips take longer than the deadline. Reported once for each server, after the first connection to it.
    #[non_exhaustive]
    StoreFar {
        /// The server's host and port.
        server: String,
        /// The shortest of several measured round trips.
        round_trip: Duration,
        /// The deadline of a check.
        deadline: Duration,
    },
    /// A Redis server no longer has scripts of the limiter, although it ran them before. No check fails because of
    /// missing scripts, but counts may be lost. Reported at most once in ten seconds for each server.
    ///
    /// * If the connection was made anew, the server was most likely restarted, or another server has taken its place.
    ///   A server that was restarted without persistence has lost all counts, so each key has its whole quota again.
    /// * Otherwise the scripts were most likely flushed by `SCRIPT FLUSH`, which loses no count. But behind a proxy,
    ///   another server may have taken the server's place.
    #[non_exhaustive]
    ScriptsForgotten {
        /// The server's host and port.
        server: String,
        /// Whether the connection was made anew since the server last ran the missing script.
        reconnected: bool,
    },
    /// Sentinels named another server as master than at the last connection, and the limiter has connected to that
    /// server. Charges that the former master had not replicated are lost, so keys may take these units again.
    #[non_exhaustive]
    MasterChanged {
        /// The master's name and a sentinel, as in the other events of this server.
        server: String,
        /// The host and port of the new master.
        master: String,
    },
    /// Checks fail at the store. Reported once a minute for each kind of error and each reason, and for another reason
    /// of the same kind at the earliest five seconds later. Reported again after
    /// [`StoreRecovered`](Self::StoreRecovered), and when an observer is added.
    #[non_exhaustive]
    StoreFailed {
        /// The kind of the error. If the kind is [`Misconfigured`](StoreErrorKind::Misconfigured), an operator has
        /// to fix the setup before the store can be used.
        kind: StoreErrorKind,
        /// The error, with its causes, and how to fix it.
        error: String,
    },
    /// Checks still fail at the store, for a reason that [`StoreFailed`](Self::StoreFailed) has named in the last
    /// minute. The text is that of the newest error, for pages that show it. Reported at most once in five seconds for
    /// each kind of error.
    #[non_exhaustive]
    StillFailing {
        /// The kind of the error.
        kind: StoreErrorKind,
        /// The error, with its causes, and how to fix it.
        error: String,
    },
    /// Checks succeed again after [`StoreFailed`](Self::StoreFailed): a check has succeeded, and no check that was sent
    /// has failed for five seconds.
    StoreRecovered,
    /// A correction after the response did not reach the store. The correction was a refund, or an additional
    /// charge for a request that cost more units than it had been charged. Reported for each lost call.
    #[non_exhaustive]
    CorrectionLost {
        /// The number of charges that the call should have corrected.
        charges: usize,
        /// The kind of the error.
        kind: StoreErrorKind,
    },
    /// The store had forgotten units of a [concurrency limit](crate::Quota::concurrent) that this process holds, and
    /// this process has stored the units again. The store had lost its data, or this process could not renew the
    /// units in time. Other processes may have taken the units meanwhile, so more than the limit may be held.
    /// Reported for each key.
    #[non_exhaustive]
    PlacesForgotten {
        /// The number of forgotten units.
        units: u64,
    },
}

impl LimiterEvent {
    /// Makes [`Evicted`](Self::Evicted).
    #[must_use]
    pub fn evicted(throttled: bool) -> Self {
        Self::Evicted { throttled }
    }

    /// Makes [`FellBack`](Self::FellBack).
    #[must_use]
    pub fn fell_back(error: impl Into<String>) -> Self {
        Self::FellBack { error: error.into() }
    }

    /// Makes [`Failed`](Self::Failed).
    #[must_use]
    pub fn failed(error: impl Into<String>) -> Self {
        Self::Failed { error: error.into() }
    }

    /// Makes [`StoreChecked`](Self::StoreChecked).
    #[must_use]
    pub fn store_checked(duration: Duration, error: Option<StoreErrorKind>) -> Self {
        Self::StoreChecked { duration, error }
    }

    /// Makes [`StoreDown`](Self::StoreDown).
    #[must_use]
    pub fn store_down(server: impl Into<String>, error: impl Into<String>) -> Self {
        Self::StoreDown { server: server.into(), error: error.into() }
    }

    /// Makes [`StoreUp`](Self::StoreUp).
    #[must_use]
    pub fn store_up(server: impl Into<String>) -> Self {
        Self::StoreUp { server: server.into() }
    }

    /// Makes [`StoreLeft`](Self::StoreLeft).
    #[must_use]
    pub fn store_left(server: impl Into<String>) -> Self {
        Self::StoreLeft { server: server.into() }
    }

    /// Makes [`StoreFar`](Self::StoreFar).
    #[must_use]
    pub fn store_far(server: impl Into<String>, round_trip: Duration, deadline: Duration) -> Self {
        Self::StoreFar { server: server.into(), round_trip, deadline }
    }

    /// Makes [`ScriptsForgotten`](Self::ScriptsForgotten).
    #[must_use]
    pub fn scripts_forgotten(server: impl Into<String>, reconnected: bool) -> Self {
        Self::ScriptsForgotten { server: server.into(), reconnected }
    }

    /// Makes [`MasterChanged`](Self::MasterChanged).
    #[must_use]
    pub fn master_changed(server: impl Into<String>, master: impl Into<String>) -> Self {
        Self::MasterChanged { server: server.into(), master: master.into() }
    }

    /// Makes [`StoreFailed`](Self::StoreFailed).
    #[must_use]
    pub fn store_failed(kind: StoreErrorKind, error: impl Into<String>) -> Self {
        Self::StoreFailed { kind, error: error.into() }
    }

    /// Makes [`StillFailing`](Self::StillFailing).
    #[must_use]
    pub fn still_failing(kind: StoreErrorKind, error: impl Into<String>) -> Self {
        Self::StillFailing { kind, error: error.into() }
    }

    /// Makes [`PlacesForgotten`](Self::PlacesForgotten).
    #[must_use]
    pub fn places_forgotten(units: u64) -> Self {
        Self::PlacesForgotten { units }
    }

    /// Makes [`CorrectionLost`](Self::CorrectionLost).
    #[must_use]
    pub fn correction_lost(charges: usize, kind: StoreErrorKind) -> Self {
        Self::CorrectionLost { charges, kind }
    }

    /// Writes the event to `tracing`. Events that occur for each check, request or key are not written.
    pub(crate) fn log(&self) {
        #[cfg(feature = "tracing")]
        contained(|| match self {
            Self::StoreDown { server, error } => {
                tracing::warn!(target: "tower_ratelimit", event = "store-down", server, "{server} does not answer: {error}");
            }
            Self::StoreUp { server } => {
                tracing::info!(target: "tower_ratelimit", event = "store-up", server, "{server} answers again");
            }
            Self::StoreLeft { server } => tracing::info!(
                target: "tower_ratelimit",
                event = "store-left",
                server,
                "{server} did not answer, and the limiter no longer waits for it"
            ),
            Self::StoreFar { server, round_trip, deadline } => tracing::warn!(
                target: "tower_ratelimit",
                event = "store-far",
                server,
                "a round trip to {server} takes {round_trip:.0?}, and the deadline of a check is {deadline:?}: use a \
                 nearer server, or a longer deadline"
            ),
            Self::ScriptsForgotten { server, reconnected: true } => tracing::warn!(
                target: "tower_ratelimit",
                event = "scripts-forgotten",
                server,
                reconnected = true,
                "{server} does not know the limiter's scripts any more, since a new connection was made: it was \
                 restarted, or it is another server than before; counts may be lost, and without persistence all are: \
                 each key then has its whole quota again"
            ),
            Self::ScriptsForgotten { server, reconnected: false } => tracing::warn!(
                target: "tower_ratelimit",
                event = "scripts-forgotten",
                server,
                reconnected = false,
                "{server} does not know the limiter's scripts any more, and the connection is the same: most likely its \
                 scripts were flushed, which loses no count; behind a proxy it may be another server than before"
            ),
            Self::MasterChanged { server, master } => tracing::warn!(
                target: "tower_ratelimit",
                event = "master-changed",
                server,
                master,
                "{server} is now {master}: charges that the former master had not replicated are lost"
            ),
            Self::StoreFailed { kind, error } => tracing::warn!(
                target: "tower_ratelimit",
                event = "store-failed",
                kind = kind.as_str(),
                "checks fail at the store: {error}"
            ),
            Self::StoreRecovered => {
                tracing::info!(target: "tower_ratelimit", event = "store-recovered", "checks succeed again");
            }
            Self::TooManyQuotas => tracing::warn!(
                target: "tower_ratelimit",
                event = "too-many-quotas",
                "more quotas have live states than the limiter has numbers for (16,382): states of further quotas \
                 take more memory and time, are not in snapshots, and may be forgotten when the table is full"
            ),
            Self::StillFailing { .. }
            | Self::Evicted { .. }
            | Self::Full
            | Self::FellBack { .. }
            | Self::Failed { .. }
            | Self::AnsweredLocally
            | Self::StoreChecked { .. }
            | Self::CorrectionLost { .. }
            | Self::PlacesForgotten { .. } => {}
        });
    }
}

/// Something that happened in a layer, other than the outcomes of requests.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LayerEvent {
    /// A request begins to wait for its departure from a leaky queue, or in line for units of a concurrency limit.
    #[non_exhaustive]
    WaitBegan {
        /// The policy that makes the request wait. If several queues make the request wait, this is the
        /// policy with the longest wait.
        policy: Policy,
    },
    /// A request no longer waits for the policy: the request departs, was refused, was dropped, or joins the line of
    /// another policy.
    #[non_exhaustive]
    WaitEnded {
        /// The policy of the [`WaitBegan`](LayerEvent::WaitBegan) to which this event belongs.
        policy: Policy,
        /// How long the request waited, according to the layer's timer.
        waited: Duration,
    },
    /// The body of a request or a response gets a [pace](crate::Rule::pace_responses). A body that several rules pace
    /// is reported once for each rule.
    #[non_exhaustive]
    PaceBegan {
        /// The policy whose quota is the pace.
        policy: Policy,
    },
    /// A body with a pace has ended: all bytes passed, the body failed, or the body was dropped.
    #[non_exhaustive]
    PaceEnded {
        /// The policy of the [`PaceBegan`](LayerEvent::PaceBegan) to which this event belongs.
        policy: Policy,
        /// How many bytes of the body passed.
        bytes: u64,
        /// How long the body took, according to the layer's timer.
        lasted: Duration,
    },
}

impl LayerEvent {
    /// Makes [`WaitBegan`](Self::WaitBegan).
    #[must_use]
    pub fn wait_began(policy: Policy) -> Self {
        Self::WaitBegan { policy }
    }

    /// Makes [`WaitEnded`](Self::WaitEnded).
    #[must_use]
    pub fn wait_ended(policy: Policy, waited: Duration) -> Self {
        Self::WaitEnded { policy, waited }
    }

    /// Makes [`PaceBegan`](Self::PaceBegan).
    #[must_use]
    pub fn pace_began(policy: Policy) -> Self {
        Self::PaceBegan { policy }
    }

    /// Makes [`PaceEnded`](Self::PaceEnded).
    #[must_use]
    pub fn pace_ended(policy: Policy, bytes: u64, lasted: Duration) -> Self {
        Self::PaceEnded { policy, bytes, lasted }
    }
}

/// Something that happened to the [rules](crate#features) of a file.
///
/// With the feature `tracing`, the events of rules are also written to the target `tower_ratelimit`, with or without an
/// observer. [`Loaded`](Self::Loaded) has the level `INFO`, and the other events have the level `WARN`. Each event is
/// written once, even if several layers use the rules. Without the feature, or without a subscriber, each layer prints
/// rules that were refused on stderr, as it prints a [setup warning](crate::observe::SetupWarning).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RulesEvent {
    /// A new version of the rules is in force.
    #[non_exhaustive]
    Loaded {
        /// The number of times that the rules were replaced.
        version: u64,
        /// The path of the file. `None` if the rules were read from a text instead of a file.
        file: Option<PathBuf>,
        /// The number of rules, or of limits if the file has Envoy's format.
        rules: usize,
        /// The rules that are new or gone, and the settings that changed, in words: at most 10, and the number of the
        /// others. Empty if only an error ended.
        changes: String,
    },
    /// A file of rules has problems, and the rules stay as they were.
    #[non_exhaustive]
    Refused {
        /// All problems, with the path of the file and the lines of the problems.
        error: String,
    },
    /// The program's own rules have changed, but are not used, because rules that an operator pushed are in
    /// force. The program's own rules come into force when the pushed rules end.
    #[non_exhaustive]
    Unused {
        /// The operator who pushed the rules in force.
        by: String,
        /// The revision of the operators' settings in which these rules were pushed.
        revision: u64,
        /// All problems of the changed rules, if they have any. In that case, the rules that the program had before
        /// this change come into force when the pushed rules end.
        error: Option<String>,
    },
}

impl RulesEvent {
    /// Makes [`Loaded`](Self::Loaded).
    #[must_use]
    pub fn loaded(version: u64, file: Option<PathBuf>, rules: usize, changes: impl Into<String>) -> Self {
        Self::Loaded { version, file, rules, changes: changes.into() }
    }

    /// Makes [`Refused`](Self::Refused).
    #[must_use]
    pub fn refused(error: impl Into<String>) -> Self {
        Self::Refused { error: error.into() }
    }

    /// Makes [`Unused`](Self::Unused).
    #[must_use]
    pub fn unused(by: impl Into<String>, revision: u64, error: Option<String>) -> Self {
        Self::Unused { by: by.into(), revision, error }
    }

    /// Reports refused rules without an observer, as a setup warning is reported.
    pub(crate) fn report(&self) {
        let refused = match self {
            Self::Refused { error } => format!("rules-refused: the rules stay as they were: {error}"),
            Self::Unused { by, error: Some(error), .. } => {
                format!("rules-unused: rules that {by} pushed are in force; the changed rules have problems: {error}")
            }
            Self::Loaded { .. } | Self::Unused { error: None, .. } => return,
        };
        #[cfg(feature = "tracing")]
        if tracing::dispatcher::has_been_set() {
            return; // `log` has written it
        }
        print_warning(&refused);
    }

    /// Writes the event to `tracing`.
    #[cfg(feature = "rules")]
    pub(crate) fn log(&self) {
        #[cfg(feature = "tracing")]
        contained(|| match self {
            Self::Loaded { version, file, rules, changes } => tracing::info!(
                target: "tower_ratelimit",
                event = "rules-loaded",
                version,
                file = file.as_deref().map(tracing::field::debug),
                rules,
                changes,
                "version {version} of the rules is in force{}{changes}", if changes.is_empty() { "" } else { ": " }
            ),
            Self::Refused { error } => {
                tracing::warn!(target: "tower_ratelimit", event = "rules-refused", "the rules stay as they were: {error}");
            }
            Self::Unused { by, revision, error } => tracing::warn!(
                target: "tower_ratelimit",
                event = "rules-unused",
                revision,
                "the changed rules are not used, because the rules that {by} pushed in revision {revision} are in \
                 force{}{}",
                if error.is_some() { "; the changed rules have problems: " } else { "" },
                error.as_deref().unwrap_or_default()
            ),
        });
    }
}

/// Something that happened to the operators' settings for all processes.
///
/// With the feature `tracing`, each event is also written to the target `tower_ratelimit`, with or without an
/// observer. [`Unreadable`](Self::Unreadable) and [`Restored`](Self::Restored) have the level `WARN`, and the other
/// events have the level `INFO`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FleetEvent {
    /// A revision is in force in this process.
    #[non_exhaustive]
    InForce {
        /// The number of the revision: how often any process has changed the settings.
        revision: u64,
        /// A 48-bit hash of the settings' text. The hash is equal in all processes with the same text.
        hash: u64,
        /// The calendar time at which the revision came into force in this process.
        since: Timestamp,
    },
    /// The store does not answer, or this version of the crate cannot read the stored text. The settings
    /// that are in force stay.
    #[non_exhaustive]
    Unreadable {
        /// The revision that stays in force. `None` if the store has not answered yet, so that no setting is in force.
        revision: Option<u64>,
        /// The error, with its causes.
        error: String,
    },
    /// The store answers again.
    #[non_exhaustive]
    Readable {
        /// The revision that is in force.
        revision: u64,
    },
    /// The store had lost the latest settings, and this process has written them back. A store that was emptied, or
    /// replaced by an older copy, has also lost the counts of requests.
    #[non_exhaustive]
    Restored {
        /// The revision that was written back.
        revision: u64,
    },
}

impl FleetEvent {
    /// Makes [`InForce`](Self::InForce).
    #[must_use]
    pub fn in_force(revision: u64, hash: u64, since: Timestamp) -> Self {
        Self::InForce { revision, hash, since }
    }

    /// Makes [`Unreadable`](Self::Unreadable).
    #[must_use]
    pub fn unreadable(revision: Option<u64>, error: impl Into<String>) -> Self {
        Self::Unreadable { revision, error: error.into() }
    }

    /// Makes [`Readable`](Self::Readable).
    #[must_use]
    pub fn readable(revision: u64) -> Self {
        Self::Readable { revision }
    }

    /// Makes [`Restored`](Self::Restored).
    #[must_use]
    pub fn restored(revision: u64) -> Self {
        Self::Restored { revision }
    }

    /// Writes the event to `tracing`.
    #[cfg(feature = "fleet")]
    pub(crate) fn log(&self) {
        #[cfg(feature = "tracing")]
        contained(|| match self {
            Self::InForce { revision, .. } => tracing::info!(
                target: "tower_ratelimit",
                event = "fleet-in-force",
                revision,
                "revision {revision} of the operators' settings is in force"
            ),
            Self::Unreadable { revision: Some(revision), error } => tracing::warn!(
                target: "tower_ratelimit",
                event = "fleet-unreadable",
                revision,
                "the operators' settings cannot be read, and stay as they were: {error}"
            ),
            Self::Unreadable { revision: None, error } => tracing::warn!(
                target: "tower_ratelimit",
                event = "fleet-unreadable",
                "the operators' settings cannot be read, and none is in force yet: {error}"
            ),
            Self::Readable { revision } => tracing::info!(
                target: "tower_ratelimit",
                event = "fleet-readable",
                revision,
                "the operators' settings can be read again"
            ),
            Self::Restored { revision } => tracing::warn!(
                target: "tower_ratelimit",
                event = "fleet-restored",
                revision,
                "the store had lost revision {revision} of the operators' settings, which was written back: if the \
                 store was emptied, the counts of requests are lost, too"
            ),
        });
    }
}
