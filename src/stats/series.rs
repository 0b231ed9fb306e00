//! The metrics: their names, labels and values, for text and for recorders.

use std::time::Duration;

use super::histogram::HistogramSnapshot;
use super::snapshot::{PolicySnapshot, StatsSnapshot};
use crate::base::time::Timestamp;
use crate::outcome::OutcomeKind;
use crate::rules_in_force::RulesInForce;
use crate::store_load::StoreLoad;

/// Receives the metrics. A text and a recorder implement this trait.
pub(super) trait Sink {
    /// Begins a metric. The series that follow belong to this metric.
    fn begin(&mut self, name: &'static str, kind: MetricKind, help: &'static str);

    /// Takes a series of a counter or a gauge.
    fn sample(&mut self, labels: &[(&'static str, &str)], value: u64);

    /// Takes the only series of a gauge in seconds.
    fn seconds(&mut self, time: Duration);

    /// Takes a series of a histogram.
    fn histogram(&mut self, policy: Option<&str>, histogram: &HistogramSnapshot);
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum MetricKind {
    Counter,
    Gauge,
    Histogram,
}

/// The name of a metric, its help text, and the function that reads its value.
type Metric<F> = (&'static str, &'static str, F);

type OfRules = fn(RulesInForce) -> u64;
type OfFleet = fn((u64, u64, Timestamp)) -> u64;

type OfStore<T> = fn(&StoreLoad) -> T;

/// Passes every series of every metric to `to`.
pub(super) fn write_all(to: &mut impl Sink, stats: &StatsSnapshot) {
    let (policies, events) = (stats.policies(), stats.events());

    // Counts of zero are written, too, because an alert sees the first increase only after a zero.
    to.begin("ratelimit_requests_total", MetricKind::Counter, "Requests by outcome. Each layer counts a request once.");
    for kind in OutcomeKind::ALL {
        to.sample(&[("outcome", kind.as_str())], stats.requests(*kind));
    }

    to.begin(
        "ratelimit_policy_requests_total",
        MetricKind::Counter,
        "Requests that a policy decided, by the policy's mode, and by state: within, near or over its quota.",
    );
    for policy in policies {
        for (mode, state, count) in policy.states() {
            to.sample(&[("policy", policy.name()), ("mode", mode), ("state", state.as_str())], count);
        }
    }

    to.begin("ratelimit_policy_refused_total", MetricKind::Counter, "Requests that a policy refused.");
    for policy in policies {
        let block = if policy.is_block() { "true" } else { "false" };
        to.sample(&[("policy", policy.name()), ("block", block)], policy.refused());
    }

    to.begin(
        "ratelimit_policy_units_total",
        MetricKind::Counter,
        "Units that passing requests took, before refunds and settlements.",
    );
    each(to, policies, PolicySnapshot::units);

    to.begin(
        "ratelimit_wait_seconds",
        MetricKind::Histogram,
        "How long requests waited because of a policy: for its leaky queue, or in line for its places.",
    );
    for policy in policies.iter().filter(|policy| policy.has_waits()) {
        to.histogram(Some(policy.name()), policy.waited());
    }

    to.begin(
        "ratelimit_waiting",
        MetricKind::Gauge,
        "Requests that wait because of a policy: in its leaky queue, or in line for its places.",
    );
    for policy in policies.iter().filter(|policy| policy.has_waits()) {
        to.sample(&[("policy", policy.name())], policy.waiting());
    }

    let paces = || policies.iter().filter(|policy| policy.has_paces());
    to.begin("ratelimit_paced_bodies", MetricKind::Gauge, "Bodies that a policy paces now.");
    paces().for_each(|policy| to.sample(&[("policy", policy.name())], policy.pacing()));
    to.begin(
        "ratelimit_paced_bytes_total",
        MetricKind::Counter,
        "Bytes of the bodies that a policy paced, counted when a body ends.",
    );
    paces().for_each(|policy| to.sample(&[("policy", policy.name())], policy.paced_bytes()));

    let places = || policies.iter().filter(|policy| policy.has_places());
    to.begin("ratelimit_places_held", MetricKind::Gauge, "Units of a concurrency limit that requests in flight hold.");
    places().for_each(|policy| to.sample(&[("policy", policy.name())], policy.held()));

    to.begin(
        "ratelimit_place_held_seconds",
        MetricKind::Histogram,
        "How long requests held units of a concurrency limit.",
    );
    places().for_each(|policy| to.histogram(Some(policy.name()), policy.held_for()));

    to.begin("ratelimit_limiter_duration_seconds", MetricKind::Histogram, "Duration of checks that a store decided.");
    to.histogram(None, events.checks());

    to.begin("ratelimit_limiter_errors_total", MetricKind::Counter, "Checks that a store did not decide.");
    for (kind, count) in events.errors() {
        to.sample(&[("error_type", kind.as_str())], count);
    }

    to.begin(
        "ratelimit_limiter_corrections_lost_total",
        MetricKind::Counter,
        "Charges whose refund or settlement did not reach the store.",
    );
    for (kind, count) in events.corrections_lost() {
        to.sample(&[("error_type", kind.as_str())], count);
    }

    let counts = [
        (
            "ratelimit_limiter_recoveries_total",
            "Times that checks of a store succeeded again after an error.",
            events.recoveries(),
        ),
        (
            "ratelimit_limiter_fallbacks_total",
            "Requests that a second limiter was asked to decide because the first failed.",
            events.fallbacks(),
        ),
        ("ratelimit_limiter_local_answers_total", "Checks answered without the store.", events.local_answers()),
        (
            "ratelimit_limiter_places_forgotten_total",
            "Units of concurrency limits that the store had forgotten while this process held them.",
            events.places_forgotten(),
        ),
        (
            "ratelimit_limiter_scripts_forgotten_total",
            "Times that a Redis server no longer had the limiter's scripts: it was restarted or replaced, or its \
             scripts were flushed.",
            events.scripts_forgotten(),
        ),
    ];
    for (name, help, count) in counts {
        to.begin(name, MetricKind::Counter, help);
        to.sample(&[], count);
    }

    to.begin("ratelimit_limiter_servers_down", MetricKind::Gauge, "Servers that do not answer, or only at times.");
    to.sample(&[], events.servers_down().count() as u64);

    store_load(to, stats.store_load());

    to.begin("ratelimit_keys_evicted_total", MetricKind::Counter, "Keys forgotten in memory to make room.");
    to.sample(&[("throttled", "false")], events.evicted() - events.evicted_throttled());
    to.sample(&[("throttled", "true")], events.evicted_throttled());

    to.begin("ratelimit_keys_full_total", MetricKind::Counter, "New keys denied in memory because there was no room.");
    to.sample(&[], events.full());

    to.begin(
        "ratelimit_too_many_quotas_total",
        MetricKind::Counter,
        "Times that a limiter in memory reported more quotas than it can distinguish.",
    );
    to.sample(&[], events.too_many_quotas());

    to.begin(
        "ratelimit_rules_loads_total",
        MetricKind::Counter,
        "Files of rules that were put in force or refused, by layer.",
    );
    to.sample(&[("result", "loaded")], events.rules_loaded());
    to.sample(&[("result", "refused")], events.rules_refused());

    to.begin("ratelimit_rules_refused", MetricKind::Gauge, "1 while the rules that were read last are refused.");
    to.sample(&[], u64::from(events.rules_error().is_some()));

    let rules: [Metric<OfRules>; 3] = [
        ("ratelimit_rules_version", "Times that the rules were replaced in this process.", |rules| rules.version),
        ("ratelimit_rules_hash", "Hash of the rules in force, equal in processes with the same rules.", |rules| {
            rules.hash
        }),
        ("ratelimit_rules_loaded_timestamp_seconds", "When the rules in force were loaded.", |rules| {
            rules.loaded_at.as_micros() / 1_000_000
        }),
    ];
    for (name, help, value) in rules {
        to.begin(name, MetricKind::Gauge, help);
        stats.rules().into_iter().for_each(|rules| to.sample(&[], value(rules)));
    }

    let fleet = events.fleet();
    let gauges: [Metric<OfFleet>; 3] = [
        ("ratelimit_fleet_revision", "Changes that operators made for all processes.", |(revision, ..)| revision),
        (
            "ratelimit_fleet_hash",
            "Hash of the operators' settings, equal in processes with the same settings.",
            |(_, hash, _)| hash,
        ),
        (
            "ratelimit_fleet_since_timestamp_seconds",
            "When the operators' settings came into force in this process.",
            |(.., since)| since.as_micros() / 1_000_000,
        ),
    ];
    for (name, help, value) in gauges {
        to.begin(name, MetricKind::Gauge, help);
        fleet.in_force.into_iter().for_each(|in_force| to.sample(&[], value(in_force)));
    }
    to.begin("ratelimit_fleet_unreadable", MetricKind::Gauge, "1 while the operators' settings cannot be read.");
    fleet.in_force.into_iter().for_each(|_| to.sample(&[], u64::from(fleet.is_unreadable)));
    to.begin(
        "ratelimit_fleet_restored_total",
        MetricKind::Counter,
        "Times that the store had lost the operators' settings, and this process wrote them back.",
    );
    fleet.in_force.into_iter().for_each(|_| to.sample(&[], fleet.restored));

    to.begin(
        "ratelimit_setup_warnings_total",
        MetricKind::Counter,
        "Likely misconfigurations that layers detected, by kind.",
    );
    for (kind, count) in stats.setup_warnings() {
        to.sample(&[("kind", kind.as_str())], count);
    }
}

/// Writes how busy the store is, if there is a store. The checks that were shed are errors of the kind `overloaded`.
fn store_load(to: &mut impl Sink, load: Option<&StoreLoad>) {
    let counts: [Metric<OfStore<usize>>; 2] = [
        ("ratelimit_limiter_waiting", "Checks and corrections that wait for an answer of the store.", |load| {
            load.waiting
        }),
        ("ratelimit_limiter_calls_in_flight", "Calls to the store that have no answer yet.", |load| {
            load.calls_in_flight
        }),
    ];
    for (name, help, count) in counts {
        to.begin(name, MetricKind::Gauge, help);
        load.into_iter().for_each(|load| to.sample(&[], count(load) as u64));
    }
    let times: [Metric<OfStore<Option<Duration>>>; 4] = [
        ("ratelimit_limiter_oldest_wait_seconds", "Age of the oldest check that is not sent yet.", |load| {
            Some(load.oldest_wait)
        }),
        ("ratelimit_limiter_call_seconds", "Smoothed duration of a call to the store.", |load| load.call_time),
        (
            "ratelimit_limiter_quickest_call_seconds",
            "Duration of the quickest call to the store in the last five to ten seconds.",
            |load| load.quickest_call,
        ),
        ("ratelimit_limiter_deadline_seconds", "Time after which a check without an answer fails.", |load| {
            load.deadline
        }),
    ];
    for (name, help, time) in times {
        to.begin(name, MetricKind::Gauge, help);
        load.and_then(time).into_iter().for_each(|time| to.seconds(time));
    }
    to.begin(
        "ratelimit_limiter_connections_total",
        MetricKind::Counter,
        "Connections that were made to servers of Redis.",
    );
    load.into_iter().for_each(|load| to.sample(&[], load.connections));
}

fn each(to: &mut impl Sink, policies: &[PolicySnapshot], count: impl Fn(&PolicySnapshot) -> u64) {
    policies.iter().for_each(|policy| to.sample(&[("policy", policy.name())], count(policy)))
}
