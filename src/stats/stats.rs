//! The observer that counts.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use http::HeaderName;

use super::cells::{KINDS, OutcomeCells, StripeIndex};
use super::events::EventCells;
use super::holders::Holders;
#[cfg(feature = "tracing")]
use super::log;
use super::names::{KeyNames, Reveal, short_fingerprint};
use super::newest::NewestCounts;
use super::policies::{Policies, PolicyCounts};
use super::prometheus;
use super::rates::SHORT_US;
use super::recent::{self, Recent};
#[cfg(feature = "metrics")]
use super::recorder;
use super::sketch::{HALVED_EACH_US, REFUSED_SETS, Sketch, USED_SETS};
use super::snapshot::{PolicySnapshot, StatsSnapshot};
#[cfg(feature = "tracing")]
use super::span;
use super::state::PolicyState;
use super::stores::Stores;
use crate::base::sync::{Mutex, MutexGuard, lock, try_lock};
use crate::base::time::Timestamp;
use crate::clock::{Clock, MonotonicClock};
use crate::event::{FleetEvent, LayerEvent, LimiterEvent, RulesEvent};
use crate::key::Key;
use crate::mode::Mode;
use crate::outcome::{Observed, Observer, OutcomeKind};
use crate::policy::Policy;
use crate::quota::Algorithm;
use crate::rules_in_force::{RulesInForce, RulesReader};
use crate::setup_warning::{SetupWarning, SetupWarningKind};
use crate::store_load::StoreLoadReader;

/// An [`Observer`] that counts what layers and limiters do, for metrics and status pages.
///
/// Set a `Stats` on each layer with [`observer`](crate::RateLimitLayer::observer). A layer passes its observer to its
/// limiter, so the `Stats` also counts the events of the limiter, of Redis, of a fallback and of files of rules. Clones
/// share their counts, and an event of a limiter counts once, even if several layers and builders have clones. A
/// request that passes through several layers is counted once for each layer.
///
/// ```
/// use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, key, observe::Stats};
///
/// let stats = Stats::new();
/// let limit =
///     RateLimitLayer::new(MemoryLimiter::new(), Quota::per_minute(100), key::peer_ip())
///         .observer(stats.clone());
///
/// // The answer to `GET /metrics`, with the content type `Stats::CONTENT_TYPE`:
/// let text = stats.to_prometheus();
/// assert!(text.contains("# TYPE ratelimit_requests_total counter\n"));
/// ```
///
/// * No count is lost. Counting adds to one of several copies of a counter, so threads seldom wait for each other.
/// * Counting a request allocates no memory, except for the first request of each policy.
/// * Counting takes about 0.1 µs, mostly for reading the clock. The first request in every five seconds takes some
///   microseconds more for each policy, to update the rates.
/// * Memory is bounded: about 7 KiB for each policy, at most 100 KiB for the keys that are refused most, and at most
///   100 KiB for the keys that hold units of concurrency limits. At most 200 policies are counted separately. Further
///   policies are counted together as `other`.
/// * Keys, paths and addresses are in no metric. Keys are stored only if the
///   [operators](crate::guide::observing#a-status-page) of a status page may act on the keys that the page lists.
///
/// [Setup warnings](SetupWarning) are counted, and are also reported as if the layer had no observer. If you
/// need another observer besides a `Stats`, write an observer that calls the methods of a `Stats`.
#[derive(Clone)]
pub struct Stats(Arc<Inner>);

struct Inner {
    clock: Arc<dyn Clock>,
    started_at: Timestamp,
    /// The time at which the current short bucket of the rates began.
    began_us: AtomicU64,
    outcome_cells: OutcomeCells,
    newest_outcomes: Mutex<NewestCounts<KINDS>>,
    policies: Policies,
    counts_use: bool,
    names: KeyNames,
    sketch: Sketch,
    holders: Holders,
    recent: Option<Recent>,
    events: EventCells,
    stores: Stores,
    rules: Mutex<Vec<RulesReader>>,
    setup_warnings: [AtomicU64; SetupWarningKind::ALL.len()],
    /// The number of halvings of the sketch that have been due since the epoch. The lock is held by the thread that
    /// begins the next bucket.
    halves: Mutex<u64>,
    prints_warnings: bool,
    #[cfg(feature = "tracing")]
    logs_refusals: bool,
    #[cfg(feature = "tracing")]
    fills_spans: bool,
    #[cfg(feature = "metrics")]
    recorded: Mutex<recorder::Recorded>,
}

/// The maximum number of files of rules that are remembered.
const RULES_MAX: usize = 32;

/// Sets up [`Stats`].
#[must_use]
#[derive(Default)]
pub struct StatsBuilder {
    clock: Option<Arc<dyn Clock>>,
    reveal: Option<Box<Reveal>>,
    recent: recent::RecentSettings,
    counts_use: bool,
    hides_warnings: bool,
    #[cfg(feature = "tracing")]
    logs_refusals: bool,
    #[cfg(feature = "tracing")]
    fills_spans: bool,
}

impl StatsBuilder {
    /// Sets the clock. The default is the [monotonic](MonotonicClock) clock. The clock is read once for each outcome,
    /// and when a place is taken or returned. The clock determines the times in snapshots, the
    /// [rates](PolicySnapshot::five_minutes), the fading of old refusals, and how long places are
    /// [held](PolicySnapshot::held_for).
    pub fn clock(mut self, clock: impl Clock + 'static) -> Self {
        self.clock = Some(Arc::new(clock));
        self
    }

    /// Sets a closure that names the listed keys, such as the most refused keys in [`StatsSnapshot::most_limited`]. By
    /// default a key has only a [fingerprint](super::TopKey::fingerprint), which cannot be turned into a key. A [status
    /// page](crate::guide::observing#a-status-page) can unblock and reset a key by its fingerprint.
    ///
    /// **A key may be a secret or personal data**, such as a token or an address. Return a part of the key that
    /// operators may see, such as an address without its last byte, or `None`. The closure is called for a key that was
    /// refused at least twice, for a key of which several requests hold units of a [concurrency
    /// limit](crate::Quota::concurrent), and for each of the [recent refusals](Self::max_recent_refusals). A key with a
    /// name in one list of a snapshot has this name in all lists of the snapshot. The closure is called while a request
    /// is served. At most 128 bytes of a name are stored.
    ///
    /// ```
    /// use std::net::IpAddr;
    /// use tower_ratelimit::observe::Stats;
    ///
    /// // Shows 198.51.100.7 as 198.51.100.*, and no other key.
    /// let stats = Stats::builder().reveal(|key| match key.address()? {
    ///     IpAddr::V4(address) => Some(format!(
    ///         "{}.{}.{}.*",
    ///         address.octets()[0],
    ///         address.octets()[1],
    ///         address.octets()[2]
    ///     )),
    ///     IpAddr::V6(_) => None,
    /// });
    /// # let _ = stats.build();
    /// ```
    pub fn reveal(mut self, reveal: impl Fn(&Key) -> Option<String> + Send + Sync + 'static) -> Self {
        self.reveal = Some(Box::new(reveal));
        self
    }

    /// Sets whether the used units of keys are counted, for [`PolicySnapshot::most_used`]. The counts also show a key
    /// that stays just under its limit. When a key has used units for the second time, it gets the name that
    /// [`reveal`](Self::reveal) returns.
    ///
    /// By default used units are not counted, because counting them adds about 350 instructions to each request that
    /// passes, beside the 950 instructions of a layer with statistics (`benches/instructions`). Counting used units
    /// also needs about 15 KiB of memory for each policy.
    pub fn count_use(mut self, count_use: bool) -> Self {
        self.counts_use = count_use;
        self
    }

    /// Sets how many of the last refusals are stored, for [`StatsSnapshot::recent_refusals`] and the [status
    /// page](crate::guide::observing#a-status-page). A stored refusal has its time, the policy, the remaining units,
    /// the wait, and the name of the key from [`reveal`](Self::reveal), or otherwise the key's
    /// [fingerprint](super::TopKey::fingerprint). With the stored refusals you can find out later why a user was
    /// refused. The default is 0, which stores no refusals.
    ///
    /// * At most 10,000 refusals are stored. The number is rounded up to a multiple of 16.
    /// * Each entry needs about 300 bytes, which are allocated at the start, and at most 512 bytes more for texts.
    /// * A key has 16 entries, which it shares with some other keys. Therefore a client that is refused all the time
    ///   displaces only the refusals of the keys that share its entries. At most the last 16 refusals of a client are
    ///   stored.
    /// * A refusal takes about 0.1 µs longer, plus the time of `reveal`. It never waits. A request that passes takes no
    ///   lock.
    /// * A request that went to an [overflow](crate::RateLimitLayer::overflow) counts as refused.
    ///
    /// Each process of a service stores only its own refusals.
    ///
    /// ```
    /// use http::HeaderName;
    /// use tower_ratelimit::observe::Stats;
    ///
    /// let stats = Stats::builder()
    ///     .max_recent_refusals(1_000)
    ///     .request_id(HeaderName::from_static("x-request-id"))
    ///     .build();
    /// assert!(stats.snapshot().recent_refusals().is_empty());
    /// ```
    pub fn max_recent_refusals(mut self, max_recent_refusals: usize) -> Self {
        self.recent.max = max_recent_refusals;
        self
    }

    /// Sets the header whose first value, cut to 128 bytes, is stored as the request's id with each
    /// of the [recent refusals](Self::max_recent_refusals). By default no id is stored.
    ///
    /// A client can send any text in the header, so a proxy or an outer layer should set the header.
    pub fn request_id(mut self, header: HeaderName) -> Self {
        self.recent.request_id = Some(header);
        self
    }

    /// Sets whether the request's method and path, together cut to 256 bytes, are stored with each of the [recent
    /// refusals](Self::max_recent_refusals). The query is never stored. By default this is off, because **a path may
    /// contain secrets or personal data**, such as the token of a link that resets a password.
    pub fn keep_paths(mut self, keep_paths: bool) -> Self {
        self.recent.paths = keep_paths;
        self
    }

    /// Sets whether the statistics also print [setup warnings](crate::observe::SetupWarning) and the errors of refused
    /// rules, as a layer without an observer prints them. By default they do. With `false` they only count. Use `false`
    /// in an observer of your own that reports them.
    pub fn print_warnings(mut self, print_warnings: bool) -> Self {
        self.hides_warnings = !print_warnings;
        self
    }

    /// Sets whether refusals are written as events of `tracing`, with the target `tower_ratelimit`. By default this is
    /// off.
    ///
    /// * A refused request is an event at the level `DEBUG`, with the fields `policy`, `outcome`, `retry_after_ms` and
    ///   `key`. The field `key` has the key's [fingerprint](super::TopKey::fingerprint).
    /// * The refusals of a policy in ten seconds are one event at the level `WARN`:
    ///   `client: 1284 refused for at least 37 keys`, with the fields `policy`, `refused` and `keys`. At most 4,096
    ///   keys are distinguished. No background task writes the summary. The summary is written at the first outcome,
    ///   [snapshot](Stats::snapshot) or scrape after the ten seconds.
    #[cfg(feature = "tracing")]
    #[cfg_attr(docsrs, doc(cfg(feature = "tracing")))]
    pub fn log_refusals(mut self, log_refusals: bool) -> Self {
        self.logs_refusals = log_refusals;
        self
    }

    /// Sets whether the outcome of a request is recorded in the current span of `tracing`. The fields of the following
    /// table are filled if the span declares them. By default `false`.
    ///
    /// | field | value |
    /// |---|---|
    /// | `ratelimit.outcome` | the label of the [outcome](crate::observe::OutcomeKind) |
    /// | `ratelimit.policy` | the policy that [binds](crate::observe::Outcome::binding) |
    /// | `ratelimit.wait_ms` | how long the request waited for a leaky queue, or in line |
    /// | `ratelimit.store_ms` | how long the check of Redis or another store took |
    ///
    /// A span declares the fields as empty: `info_span!("request", ratelimit.outcome = Empty, …)`. If a request passes
    /// several layers, a field has the value that was recorded last. Even a span without these fields is looked up for
    /// each request.
    #[cfg(feature = "tracing")]
    #[cfg_attr(docsrs, doc(cfg(feature = "tracing")))]
    pub fn fill_spans(mut self, fill_spans: bool) -> Self {
        self.fills_spans = fill_spans;
        self
    }

    /// Makes statistics that begin at zero.
    #[must_use]
    pub fn build(self) -> Stats {
        let clock = self.clock.unwrap_or_else(|| Arc::new(MonotonicClock::new()));
        let started_at = clock.now();
        let now_us = started_at.as_micros();
        Stats(Arc::new(Inner {
            started_at,
            began_us: AtomicU64::new(now_us - now_us % SHORT_US),
            outcome_cells: OutcomeCells::default(),
            newest_outcomes: Mutex::new(NewestCounts::new(now_us / SHORT_US)),
            policies: Policies::new(now_us / SHORT_US, self.counts_use.then_some(USED_SETS)),
            counts_use: self.counts_use,
            names: KeyNames::new(self.reveal),
            sketch: Sketch::new(REFUSED_SETS),
            holders: Holders::default(),
            recent: Recent::new(self.recent),
            events: EventCells::new(now_us / SHORT_US),
            stores: Stores::default(),
            rules: Mutex::default(),
            setup_warnings: Default::default(),
            halves: Mutex::new(now_us / HALVED_EACH_US),
            prints_warnings: !self.hides_warnings,
            #[cfg(feature = "tracing")]
            logs_refusals: self.logs_refusals,
            #[cfg(feature = "tracing")]
            fills_spans: self.fills_spans,
            #[cfg(feature = "metrics")]
            recorded: Mutex::default(),
            clock,
        }))
    }
}

impl Stats {
    /// The content type of [`to_prometheus`](Self::to_prometheus).
    pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

    /// The upper bounds of the buckets of all histograms, in seconds.
    pub const BUCKET_SECONDS: [f64; 15] =
        [0.000_1, 0.000_3, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1_000.0];

    /// Makes statistics that begin at zero.
    #[must_use]
    pub fn new() -> Self {
        Self::builder().build()
    }

    /// Begins the setup of statistics.
    pub fn builder() -> StatsBuilder {
        StatsBuilder::default()
    }

    /// Returns the statistics. A snapshot takes some microseconds for each policy and for the most refused keys, and
    /// less than a microsecond for each recent refusal.
    #[must_use]
    pub fn snapshot(&self) -> StatsSnapshot {
        let mut counts = self.counts(); // first, because it lets old counts fade
        for policy in counts.policies.iter_mut().filter(|_| self.0.counts_use) {
            let entry = self.0.policies.find(&policy.name, || 0);
            policy.most_used = entry.used.as_ref().map(Sketch::read);
        }
        let (most_limited, most_held) = (self.0.sketch.read(), self.0.holders.read());
        let recent_refusals = self.0.recent.as_ref().map(Recent::read);
        let mut snapshot = StatsSnapshot { most_limited, most_held, recent_refusals, ..counts };
        snapshot.share_names();
        snapshot
    }

    /// Returns the statistics without keys and refusals.
    fn counts(&self) -> StatsSnapshot {
        let inner = &*self.0;
        let taken_at = inner.clock.now();
        inner.begin_bucket(taken_at.as_micros(), lock(&inner.halves));
        let policies = inner.policies.iter().map(|entry| {
            let rates = lock(&entry.rates);
            let refused_us = entry.last_refused_us.load(Ordering::Relaxed);
            PolicySnapshot {
                name: Arc::clone(&entry.name),
                totals: entry.cells.totals(),
                waited: entry.waited.snapshot(),
                is_block: entry.is_block.load(Ordering::Relaxed),
                held: entry.held.load(Ordering::Relaxed),
                held_for: entry.held_for.snapshot(),
                waiting: entry.waiting(),
                pacing: entry.pacing(),
                paced_bytes: entry.paced_bytes.load(Ordering::Relaxed),
                last_refused_at: (refused_us > 0).then(|| Timestamp::from_micros(refused_us)),
                five_minutes: rates.short(),
                hour: rates.long(),
                most_used: None,
            }
        });
        let is_seen = |policy: &PolicySnapshot| {
            policy.has_places()
                || policy.has_waits()
                || policy.has_paces()
                || policy.totals.states.as_flattened().iter().any(|count| *count > 0)
        };
        let mut policies: Vec<PolicySnapshot> = policies.filter(is_seen).collect();
        policies.sort_by(|a, b| a.name.cmp(&b.name));
        let warnings = SetupWarningKind::ALL.iter().zip(&inner.setup_warnings);
        let warnings = warnings.map(|(kind, count)| (*kind, count.load(Ordering::Relaxed)));
        StatsSnapshot {
            taken_at,
            started_at: inner.started_at,
            outcomes: inner.outcomes(),
            newest_outcomes: lock(&inner.newest_outcomes).sums(),
            policies,
            most_limited: Vec::new(),
            most_held: Vec::new(),
            recent_refusals: None,
            events: inner.events.snapshot(),
            store_load: inner.stores.load(),
            rules: inner.rules_in_force(),
            setup_warnings: warnings.filter(|(_, count)| *count > 0).collect(),
        }
    }

    /// Returns the fingerprint of a key, in this process.
    pub(crate) fn fingerprint(&self, key: &Key) -> u64 {
        self.0.names.fingerprint(key)
    }

    /// Returns the data about a key that may be shown: its fingerprint, and the name that the application gives it.
    pub(crate) fn shown(&self, key: &Key) -> (String, Option<Box<str>>) {
        (short_fingerprint(self.fingerprint(key)), self.0.names.name(key))
    }

    /// Returns a key as the status page shows it, for logs: its
    /// [fingerprint](crate::observe::TopKey::fingerprint) in this process, and in parentheses the name that
    /// [`reveal`](crate::observe::StatsBuilder::reveal) gives to the key, if it gives a name.
    #[must_use]
    pub fn shown_key(&self, key: &Key) -> String {
        let (fingerprint, name) = self.shown(key);
        name.map_or(fingerprint.clone(), |name| format!("{fingerprint} ({name})"))
    }

    /// Stores each key that is listed after this call, so that an operator can act on it.
    pub(crate) fn keep_keys(&self) {
        self.0.names.keep_keys();
    }

    /// Returns the time on the clock of the statistics.
    pub(crate) fn now(&self) -> Timestamp {
        self.0.clock.now()
    }

    /// Returns the metrics in the text format of Prometheus, version 0.0.4. The guide
    /// [has alerts and queries](crate::guide::observing).
    ///
    /// | metric | kind | labels | what it counts |
    /// |---|---|---|---|
    /// | `ratelimit_requests_total` | counter | `outcome` | requests, by [outcome](crate::observe::OutcomeKind). Each layer counts a request that it gets, once |
    /// | `ratelimit_policy_requests_total` | counter | `policy`, `mode`, `state` | requests that a policy decided, by the mode of its rule (`enforce`, `degrade`, `shadow`); `state` is `within`, `near` (see [`warn_at_percent`](crate::Rule::warn_at_percent)) or `over`. Each policy counts the request by its own decision: if only another policy refused the request, this policy counts it as `within` |
    /// | `ratelimit_policy_refused_total` | counter | `policy`, `block` | requests that a policy refused; `block="true"` if it is a [block](crate::Quota::block), which is there to refuse; also those that went to an overflow. Several policies may refuse one request |
    /// | `ratelimit_policy_units_total` | counter | `policy` | units that passing requests took when they were admitted, before refunds and settlements |
    /// | `ratelimit_wait_seconds` | histogram | `policy` | how long requests waited because of this policy: for their departure from its leaky queue, or in line for its places; each wait, however it ended |
    /// | `ratelimit_waiting` | gauge | `policy` | requests that wait because of this policy: in its leaky queue, or in line for its places |
    /// | `ratelimit_paced_bodies` | gauge | `policy` | bodies of requests and responses that a rule [paces](crate::Rule::pace_responses) |
    /// | `ratelimit_paced_bytes_total` | counter | `policy` | bytes of the bodies that a rule paced, counted when each body ends |
    /// | `ratelimit_places_held` | gauge | `policy` | units of a [concurrency limit](crate::Quota::concurrent) that requests in flight hold, without those that are held by hand |
    /// | `ratelimit_place_held_seconds` | histogram | `policy` | how long requests held units of a concurrency limit |
    /// | `ratelimit_limiter_duration_seconds` | histogram | | duration of checks that Redis or another store decided; checks in memory are not timed |
    /// | `ratelimit_limiter_errors_total` | counter | `error_type` | checks that Redis or another store did not decide, by [kind](crate::limiter::StoreErrorKind): `unavailable`, `timeout`, `overloaded`, `contended`, `misconfigured`, `foreign` |
    /// | `ratelimit_limiter_recoveries_total` | counter | | times that checks of Redis or another store succeeded again after an error. It changes once no check has failed for five seconds and one succeeds. It grows steadily if the store fails again and again |
    /// | `ratelimit_limiter_corrections_lost_total` | counter | `error_type` | charges that stay too high or too low, because their refund or settlement after the response did not reach Redis or another store |
    /// | `ratelimit_limiter_fallbacks_total` | counter | | requests that a fallback's second limiter was asked to decide |
    /// | `ratelimit_limiter_local_answers_total` | counter | | checks answered without Redis or another store, by a remembered denial or leased units |
    /// | `ratelimit_limiter_places_forgotten_total` | counter | | units of [concurrency limits](crate::Quota::concurrent) that Redis or another store had forgotten while this process held them, see [`PlacesForgotten`](crate::observe::LimiterEvent::PlacesForgotten). More than the limit may have been held |
    /// | `ratelimit_limiter_servers_down` | gauge | | servers of Redis, PostgreSQL or another store that do not answer, or not steadily |
    /// | `ratelimit_limiter_waiting` | gauge | | checks and corrections that wait for an answer of the store, sent or not |
    /// | `ratelimit_limiter_oldest_wait_seconds` | gauge | | age of the oldest check that is not sent yet |
    /// | `ratelimit_limiter_calls_in_flight` | gauge | | calls to the store without an answer; a call can carry many checks |
    /// | `ratelimit_limiter_call_seconds` | gauge | | smoothed duration of a call, if a call has ended in the last ten seconds |
    /// | `ratelimit_limiter_quickest_call_seconds` | gauge | | duration of the quickest call of the last five to ten seconds. Near to the smoothed one if the store is far, and much shorter if it is busy |
    /// | `ratelimit_limiter_connections_total` | counter | | connections that were made to servers of Redis. It grows while they are cut |
    /// | `ratelimit_limiter_scripts_forgotten_total` | counter | | times that a Redis server no longer had the scripts of the limiter, see [`ScriptsForgotten`](crate::observe::LimiterEvent::ScriptsForgotten). It may have lost its data |
    /// | `ratelimit_limiter_deadline_seconds` | gauge | | time after which a check without an answer fails |
    /// | `ratelimit_keys_evicted_total` | counter | `throttled` | live keys that a limiter in memory forgot to make room; `throttled="true"` if the key had no allowance left |
    /// | `ratelimit_keys_full_total` | counter | | new keys that were denied because there was no room |
    /// | `ratelimit_too_many_quotas_total` | counter | | how often a limiter in memory reported more quotas than it can distinguish, see [`TooManyQuotas`](crate::observe::LimiterEvent::TooManyQuotas) |
    /// | `ratelimit_rules_loads_total` | counter | `result` | files of rules that were `loaded` or `refused`, once for each layer that has them |
    /// | `ratelimit_rules_refused` | gauge | | 1 while the rules that were read last are refused, and the former ones are in force |
    /// | `ratelimit_rules_version` | gauge | | how often the rules were replaced in this process |
    /// | `ratelimit_rules_hash` | gauge | | hash of the rules in force. Processes with the same rules have the same, see [the guide](crate::guide::observing#the-same-rules-in-all-processes) |
    /// | `ratelimit_rules_loaded_timestamp_seconds` | gauge | | when the rules in force were loaded |
    /// | `ratelimit_fleet_revision` | gauge | | number of changes that operators made for [all processes](crate::fleet), as far as this one has them |
    /// | `ratelimit_fleet_hash` | gauge | | hash of the operators' settings, the same in all processes that have the same |
    /// | `ratelimit_fleet_since_timestamp_seconds` | gauge | | when that revision came into force in this process |
    /// | `ratelimit_fleet_unreadable` | gauge | | 1 while the operators' settings cannot be read |
    /// | `ratelimit_fleet_restored_total` | counter | | how often the store had lost the operators' settings, and this process wrote them back. The sum over all processes counts each loss once. The store may also have lost the counts of requests |
    /// | `ratelimit_setup_warnings_total` | counter | `kind` | [setup warnings](crate::observe::SetupWarning) |
    #[must_use]
    pub fn to_prometheus(&self) -> String {
        prometheus::text(&self.counts())
    }
}

#[cfg(feature = "metrics")]
#[cfg_attr(docsrs, doc(cfg(feature = "metrics")))]
impl Stats {
    /// Passes the counts to the recorder of the crate `metrics`, with the names that
    /// [`to_prometheus`](Self::to_prometheus) uses. Call this method before each scrape, or at an interval. The call
    /// does not slow requests down.
    ///
    /// The recorder gets totals of counters and gauges. The recorder gets the durations since the last call, each as
    /// the upper bound of its [bucket](super::HistogramSnapshot::buckets), and durations above 1,000 s as 1,000 s.
    /// Therefore use one `Stats` for one recorder, and configure the recorder with the bounds of
    /// [`BUCKET_SECONDS`](Self::BUCKET_SECONDS). Default bounds are often made for milliseconds, and put nearly all
    /// durations into one bucket. A call during another call has no effect.
    ///
    /// All metrics are described with their units. Each series is registered once, when it is first recorded.
    pub fn record_metrics(&self) {
        // Does not wait for the lock, because the recorder is the application's code and may call this method.
        let Some(mut recorded) = try_lock(&self.0.recorded) else { return };
        recorder::record(&self.counts(), &mut recorded);
    }
}

impl Inner {
    /// Adds the counts to the bucket that has ended, and begins the next bucket. Also halves the counts of keys, and
    /// writes summaries, if it is time for this.
    #[cold]
    fn begin_bucket(&self, now_us: u64, mut halves: MutexGuard<'_, u64>) {
        let before_us = self.began_us.load(Ordering::Relaxed);
        let (before, now) = (before_us / SHORT_US, now_us / SHORT_US);
        // A thread that read the clock earlier than another thread must not begin the previous
        // bucket again.
        let period = if now.saturating_add(1) == before { before } else { now };
        self.began_us.store(period * SHORT_US, Ordering::Relaxed);
        for entry in self.policies.iter() {
            lock(&entry.rates).bring_up(period, &entry.cells.totals());
        }
        self.events.begin_bucket(period);
        lock(&self.newest_outcomes).bring_up(period, self.outcomes());
        let passed = period * SHORT_US / HALVED_EACH_US;
        if passed > *halves {
            let used = self.policies.iter().filter_map(|entry| entry.used.as_ref());
            used.chain([&self.sketch]).for_each(|sketch| sketch.halve(passed - *halves));
        }
        *halves = passed;
        drop(halves);
        #[cfg(feature = "tracing")]
        if self.logs_refusals && period * SHORT_US / log::SUMMARY_US != before_us / log::SUMMARY_US {
            // Writes the summaries without the lock, because the subscriber is the application's code.
            self.policies.iter().filter_map(|entry| entry.log.take(&entry.name)).for_each(|summary| summary.write());
        }
    }

    /// Returns the requests by outcome.
    fn outcomes(&self) -> [u64; KINDS] {
        let mut outcomes = self.outcome_cells.totals();
        let usual = self.policies.iter().map(|entry| entry.cells.totals().usual).sum::<u64>();
        outcomes[OutcomeKind::Allowed as usize] += usual;
        outcomes
    }

    /// Adds the rules of a file. Rules that were dropped are removed first.
    fn add_rules(&self, rules: &RulesReader) {
        let mut known = lock(&self.rules);
        known.retain(|known| known.read().is_some() && !known.is_of_same(rules));
        if known.len() < RULES_MAX {
            known.push(rules.clone());
        }
    }

    /// Returns the rules that came into force last, if there are rules of several files.
    fn rules_in_force(&self) -> Option<RulesInForce> {
        let known = lock(&self.rules).clone();
        known.iter().filter_map(RulesReader::read).max_by_key(|rules| rules.loaded_at)
    }

    /// Returns the time in microseconds. Also begins the next bucket if it is due, unless another thread is doing that.
    #[inline]
    fn now_us(&self) -> u64 {
        let now_us = self.clock.now().as_micros();
        // If the clock stepped back, a new bucket begins as well, because the difference wraps.
        if now_us.wrapping_sub(self.began_us.load(Ordering::Relaxed)) >= SHORT_US {
            if let Some(halves) = try_lock(&self.halves) {
                self.begin_bucket(now_us, halves);
            }
        }
        now_us
    }

    /// Counts an allowed request of one policy.
    fn count_allowed(&self, policy: &Policy, key: &Key, taken: u64, is_near: bool) {
        let (now_us, stripe) = (self.now_us(), StripeIndex::of_thread());
        let entry = self.policies.find(policy.name(), || now_us / SHORT_US);
        self.count_use(entry, key, taken);
        let cells = &entry.cells;
        if taken == 1 {
            return cells.count_usual(stripe, is_near);
        }
        self.outcome_cells.count(stripe, OutcomeKind::Allowed);
        cells.count_state(stripe, Mode::Enforce, if is_near { PolicyState::Near } else { PolicyState::Within });
        cells.count_units(stripe, taken);
    }

    /// Counts the units that a key used under a policy, if [`count_use`](StatsBuilder::count_use) is on.
    #[inline]
    fn count_use(&self, entry: &PolicyCounts, key: &Key, taken: u64) {
        if let Some(used) = entry.used.as_ref().filter(|_| taken > 0) {
            used.count(&self.names, &entry.name, self.names.fingerprint(key), key, taken);
        }
    }

    /// Counts units of a concurrency limit that a request takes. Returns the time.
    fn count_taken(&self, policy: &Policy, key: &Key, units: u64) -> Timestamp {
        let now_us = self.now_us();
        let entry = self.policies.find(policy.name(), || now_us / SHORT_US);
        entry.held.fetch_add(units, Ordering::Relaxed);
        self.holders.take(&self.names, &entry.name, self.names.fingerprint(key), key, units);
        Timestamp::from_micros(now_us)
    }

    /// Counts units of a concurrency limit that a request returns.
    fn count_returned(&self, policy: &Policy, key: &Key, units: u64, taken_at: Timestamp) {
        let now_us = self.now_us();
        let entry = self.policies.find(policy.name(), || now_us / SHORT_US);
        // If the clock stepped back, the units count as held for no time.
        entry.held_for.record(Timestamp::from_micros(now_us).saturating_since(taken_at));
        // An application may forward the event of a return, but not the earlier event in which the units were taken.
        let _ = entry.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |held| Some(held.saturating_sub(units)));
        self.holders.put_back(&entry.name, self.names.fingerprint(key), units);
    }

    /// Counts the beginning and the end of a request's wait, and of a paced body.
    fn count_layer_event(&self, event: &LayerEvent) {
        self.events.count_of_layer(event);
        let entry = |policy: &Policy| self.policies.find(policy.name(), || self.now_us() / SHORT_US);
        match event {
            LayerEvent::WaitBegan { policy } => entry(policy).waits_begun.fetch_add(1, Ordering::Relaxed),
            LayerEvent::WaitEnded { policy, waited } => {
                let entry = entry(policy);
                entry.waited.record(*waited);
                entry.waits_ended.fetch_add(1, Ordering::Relaxed)
            }
            LayerEvent::PaceBegan { policy } => entry(policy).paces_begun.fetch_add(1, Ordering::Relaxed),
            LayerEvent::PaceEnded { policy, bytes, .. } => {
                let entry = entry(policy);
                entry.paced_bytes.fetch_add(*bytes, Ordering::Relaxed);
                entry.paces_ended.fetch_add(1, Ordering::Relaxed)
            }
        };
    }

    fn count(&self, observed: &Observed<'_>) {
        let now_us = self.now_us();
        let (outcome, stripe) = (observed.outcome(), StripeIndex::of_thread());
        #[cfg(feature = "tracing")]
        let binding = outcome.binding().map(std::ptr::from_ref);
        for (at, status) in outcome.policies().iter().enumerate() {
            if !status.decision().is_known() {
                continue;
            }
            let entry = self.policies.find(status.policy().name(), || now_us / SHORT_US);
            let state = match () {
                () if status.is_exceeded() => PolicyState::Over,
                () if status.is_near() => PolicyState::Near,
                () => PolicyState::Within,
            };
            entry.cells.count_state(stripe, status.mode(), state);
            if status.policy().quota().algorithm() == Algorithm::Block && !entry.is_block.load(Ordering::Relaxed) {
                entry.is_block.store(true, Ordering::Relaxed);
            }
            if status.refuses() {
                entry.cells.count_refused(stripe);
                entry.last_refused_us.store(now_us, Ordering::Relaxed);
                if let Some(key) = observed.key_of_status(at) {
                    let fingerprint = self.names.fingerprint(key);
                    self.sketch.count(&self.names, &entry.name, fingerprint, key, 1);
                    #[cfg(feature = "tracing")]
                    if self.logs_refusals {
                        entry.log.note(fingerprint);
                        if binding == Some(std::ptr::from_ref(status)) {
                            log::write(outcome, fingerprint);
                        }
                    }
                }
            }
            if outcome.kind().passed() {
                entry.cells.count_units(stripe, status.taken());
                if let (Some(used), Some(key), taken @ 1..) = (&entry.used, observed.key_of_status(at), status.taken())
                {
                    used.count(&self.names, &entry.name, self.names.fingerprint(key), key, taken);
                }
            }
        }
        self.outcome_cells.count(stripe, outcome.kind());
        if let Some(recent) = &self.recent {
            recent.note(&self.names, Timestamp::from_micros(now_us), observed);
        }
    }
}

impl Observer for Stats {
    fn on_outcome(&self, observed: &Observed<'_>) {
        #[cfg(feature = "tracing")]
        if self.0.fills_spans {
            span::record_outcome(observed.outcome());
        }
        self.0.count(observed);
    }

    fn on_allowed(&self, policy: &Policy, key: &Key, taken: u64, is_near: bool) -> bool {
        #[cfg(feature = "tracing")]
        if self.0.fills_spans {
            span::record_allowed(policy);
        }
        self.0.count_allowed(policy, key, taken, is_near);
        true
    }

    fn on_place_taken(&self, policy: &Policy, key: &Key, units: u64) -> Timestamp {
        self.0.count_taken(policy, key, units)
    }

    fn on_place_returned(&self, policy: &Policy, key: &Key, units: u64, taken_at: Timestamp) {
        self.0.count_returned(policy, key, units, taken_at);
    }

    fn on_setup_warning(&self, setup_warning: &SetupWarning) {
        self.0.setup_warnings[setup_warning.kind() as usize].fetch_add(1, Ordering::Relaxed);
        if self.0.prints_warnings {
            setup_warning.report();
        }
    }

    fn on_layer_event(&self, event: &LayerEvent) {
        #[cfg(feature = "tracing")]
        if self.0.fills_spans {
            span::record_wait(event);
        }
        self.0.count_layer_event(event);
    }

    fn on_limiter_event(&self, event: &LimiterEvent) {
        #[cfg(feature = "tracing")]
        if self.0.fills_spans {
            span::record_check(event);
        }
        if matches!(event, LimiterEvent::StoreChecked { .. }) {
            self.0.now_us(); // the check counts for the bucket of this time
        }
        self.0.events.count_of_limiter(event, || self.0.clock.now());
    }

    fn on_store(&self, load: &StoreLoadReader) {
        self.0.stores.add(load);
    }

    fn on_rules(&self, rules: &RulesReader) {
        self.0.add_rules(rules);
    }

    fn on_rules_event(&self, event: &RulesEvent) {
        self.0.events.count_of_rules(event);
        if self.0.prints_warnings {
            event.report();
        }
    }

    fn on_fleet_event(&self, event: &FleetEvent) {
        self.0.events.note_fleet(event);
    }

    /// Clones are one observer.
    fn identity(&self) -> usize {
        std::ptr::from_ref(&*self.0).addr()
    }
}

impl Default for Stats {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stats").field("started_at", &self.0.started_at).finish_non_exhaustive()
    }
}

impl fmt::Debug for StatsBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StatsBuilder").field("reveals", &self.reveal.is_some()).finish_non_exhaustive()
    }
}
