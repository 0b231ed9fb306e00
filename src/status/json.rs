//! The page for programs.

use std::time::Duration;

use super::action::OperatorAction;
#[cfg(feature = "fleet")]
use super::settings::FleetRow;
use super::sums::Sums;
use super::target::{KeyState, is_block};
use super::text::hash;
use super::view::{PageView, PolicyRow};
use crate::base::json::{Object, push_string};
use crate::base::time::Utc;
use crate::decision::ChargeDecision;
use crate::explanation::Explanation;
use crate::mode::Mode;
use crate::outcome::{OutcomeKind, PolicyStatus};
use crate::stats::{PolicySnapshot, RateBucket, RecentRefusal, TopKey};
use crate::store_load::StoreLoad;

/// The maximum number of keys in the list of the keys that use the most units of a policy.
const USED_MAX: usize = 20;

/// The maximum number of keys in the list of the keys that hold the most units.
const HELD_MAX: usize = 100;

/// Writes the page as a JSON object.
pub(super) fn render(view: &PageView) -> String {
    let (stats, events) = (&view.stats, view.stats.events());
    let mut json = String::with_capacity(16_384);
    let mut object = Object::begin(&mut json);
    object.micros("counting_us", Some(stats.taken_at().saturating_since(stats.started_at())));
    {
        let mut requests = Object::begin(object.field("requests"));
        for kind in OutcomeKind::ALL {
            requests.plain(kind.as_str(), stats.requests(*kind));
        }
        requests.end();
    }
    object.list("policies", &view.rows, |json, row| policy(json, row, view));
    object.plain("more_policies", view.more);
    object.list("layers", &view.layers, |json, layer| {
        let mut object = Object::begin(json);
        object.text("name", &layer.title);
        object.or_null("keys", layer.occupancy.map(|occupancy| occupancy.keys()));
        object.or_null("capacity", layer.occupancy.map(|occupancy| occupancy.capacity()));
        object.text_or_null("setup_warning", layer.warning.as_ref().map(ToString::to_string).as_deref());
        object.end();
    });
    object.list("most_limited", stats.most_limited(), |json, key| top_key(json, key, "refusals"));
    object.list("most_held", stats.most_held().iter().take(HELD_MAX), |json, key| top_key(json, key, "units"));
    recent(&mut object, view, stats.recent_refusals());
    {
        let mut limiter = Object::begin(object.field("limiter"));
        limiter.plain("evicted", events.evicted());
        limiter.plain("evicted_throttled", events.evicted_throttled());
        limiter.plain("full", events.full());
        limiter.plain("checks", events.checks().count());
        limiter.micros("check_p50_us", events.checks().percentile(50));
        limiter.micros("check_p99_us", events.checks().percentile(99));
        {
            let mut errors = Object::begin(limiter.field("errors"));
            events.errors().for_each(|(kind, count)| errors.plain(kind.as_str(), count));
            errors.end();
        }
        {
            let mut lost = Object::begin(limiter.field("corrections_lost"));
            events.corrections_lost().for_each(|(kind, count)| lost.plain(kind.as_str(), count));
            lost.end();
        }
        limiter.plain("recoveries", events.recoveries());
        {
            let mut newest = Object::begin(limiter.field("newest"));
            newest.plain("decided", events.newest_decided());
            {
                let mut errors = Object::begin(newest.field("errors"));
                events.newest_errors().for_each(|(kind, count)| errors.plain(kind.as_str(), count));
                errors.end();
            }
            newest.plain("failed_open", stats.newest_requests(OutcomeKind::FailedOpen));
            newest.plain("failed_closed", stats.newest_requests(OutcomeKind::FailedClosed));
            newest.end();
        }
        limiter.text_or_null("error", events.store_error());
        limiter.list("store_errors", events.store_errors(), |json, (kind, error, at)| {
            let mut object = Object::begin(json);
            object.text("kind", kind.as_str());
            object.text("error", error);
            object.micros("reported_us_ago", Some(stats.taken_at().saturating_since(at)));
            object.end();
        });
        limiter.plain("scripts_forgotten", events.scripts_forgotten());
        limiter.plain("local_answers", events.local_answers());
        limiter.plain("fallbacks", events.fallbacks());
        limiter.list("servers_down", events.servers_down(), |json, (server, error)| {
            let mut object = Object::begin(json);
            object.text("server", server);
            object.text("error", error);
            object.end();
        });
        match stats.store_load() {
            Some(load) => store_load(limiter.field("store_load"), load),
            None => limiter.plain("store_load", "null"),
        }
        limiter.plain("waiting", events.waiting());
        limiter.end();
    }
    if let Some(rules) = &view.rules {
        let mut object = Object::begin(object.field("rules"));
        object.plain("version", rules.in_force.version);
        object.text("hash", &hash(rules.in_force.hash));
        object.text("loaded_at", &Utc(rules.in_force.loaded_at).to_string());
        object.text_or_null("error", rules.error.as_deref());
        object.end();
    }
    #[cfg(feature = "fleet")]
    if let Some(fleet) = &view.fleet {
        let mut object = Object::begin(object.field("fleet"));
        object.plain("revision", fleet.revision);
        object.text("hash", &hash(fleet.hash));
        object.text_or_null("since", (fleet.revision > 0).then(|| Utc(fleet.since).to_string()).as_deref());
        object.text_or_null("restored_at", view.settings_restored_at().map(|at| Utc(at).to_string()).as_deref());
        object.text_or_null("error", fleet.error.as_deref());
        object.list("entries", &fleet.entries, setting);
        object.list("actions", &fleet.actions, setting);
        object.end();
    }
    #[cfg(feature = "fleet")]
    match &view.processes {
        Ok(processes) => {
            processes.iter().for_each(|processes| processes.write_json(object.field("all_processes")));
        }
        Err(error) => object.text("all_processes_error", error),
    }
    {
        let mut switches = Object::begin(object.field("switches"));
        view.switches.iter().for_each(|(name, mode)| switches.text(name, mode.as_str()));
        switches.end();
    }
    object.text_or_null("operator", view.operator.as_deref());
    match &view.done {
        Some(actions) => object.list("actions", actions, |json, action| json.push_str(&action.to_json())),
        None => object.plain("actions", "null"),
    }
    object.end();
    json
}

/// Writes a setting for all processes, or a change of such a setting.
#[cfg(feature = "fleet")]
fn setting(json: &mut String, row: &FleetRow) {
    let mut object = Object::begin(json);
    object.text("entry", &row.entry);
    object.text("kind", row.kind.as_str());
    object.text("name", &row.name);
    object.text("subject", &row.subject);
    object.text_or_null("value", row.value.as_deref());
    object.text_or_null("until", row.until.map(|until| Utc(until).to_string()).as_deref());
    object.text("at", &Utc(row.at).to_string());
    object.text("by", &row.by);
    object.text("why", &row.why);
    object.or_null("names_no_rule", row.names_no_rule);
    #[cfg(feature = "rules")]
    if let Some(changes) = &row.changes {
        changes.write_json(&mut object);
    }
    object.end();
}

/// Writes the field with recent refusals. The field is `null` if refusals are not stored.
fn recent<'a>(object: &mut Object<'_>, view: &PageView, refusals: impl IntoIterator<Item = &'a RecentRefusal>) {
    if !view.stats.keeps_refusals() {
        return object.plain("recent_refusals", "null");
    }
    object.list("recent_refusals", refusals, |json, refusal| {
        let mut object = Object::begin(json);
        object.text("at", &Utc(refusal.at()).to_string());
        object.micros("us_ago", Some(view.stats.taken_at().saturating_since(refusal.at())));
        object.text("outcome", refusal.outcome().as_str());
        let status = refusal.status();
        object.text_or_null("policy", status.map(|status| status.policy().name()));
        object.text_or_null("quota", status.map(|status| status.policy().quota().to_string()).as_deref());
        object.text_or_null("fingerprint", refusal.fingerprint().as_deref());
        object.text_or_null("name", refusal.name());
        object.or_null("cost", status.map(PolicyStatus::cost));
        let decision = status.map(PolicyStatus::decision);
        object.or_null("limit", decision.map(ChargeDecision::limit));
        object.or_null("remaining", decision.map(ChargeDecision::remaining));
        object.text_or_null("wait", decision.map(|decision| decision.wait().as_str()));
        object.micros("wait_us", decision.and_then(|decision| decision.wait().duration()));
        object.text_or_null("request", refusal.request());
        object.text_or_null("request_id", refusal.request_id());
        object.text_or_null("network", refusal.network().as_deref());
        object.end();
    });
}

/// Writes the explanation of each layer, as a JSON list.
pub(super) fn explanations(view: &PageView) -> String {
    let mut json = String::from("[");
    for (at, layer) in view.explained.iter().flat_map(|(_, all)| all).flatten().enumerate() {
        if at > 0 {
            json.push(',');
        }
        let mut object = Object::begin(&mut json);
        object.text("layer", &layer.title);
        object.or_null("explanation", layer.explanation.as_ref().map(Explanation::to_json));
        object.list("states", &layer.states.states, state);
        object.text_or_null("failure", layer.states.failure.as_deref());
        object.text_or_null("token", layer.token.as_deref());
        object.list("own", &layer.own, |json, (name, _)| push_string(json, name));
        let refusals = view.stats.recent_refusals();
        let refusals = layer.recent.iter().filter_map(|at| refusals.get(*at));
        recent(&mut object, view, refusals);
        object.end();
    }
    json.push(']');
    json
}

/// Writes the remaining units of a key under a policy.
fn state(json: &mut String, state: &KeyState) {
    let (policy, decision) = (&state.policy, &state.decision);
    let mut object = Object::begin(json);
    object.text("policy", policy.name());
    object.text("quota", &policy.quota_words());
    object.text("fingerprint", &state.shown.fingerprint);
    object.text_or_null("name", state.shown.name.as_deref());
    object.or_null("blocked", is_block(policy).then(|| !decision.is_allowed()));
    let is_limited = !policy.quota().is_unlimited();
    object.or_null("limit", is_limited.then(|| decision.limit()));
    object.plain("used", decision.limit().saturating_sub(decision.remaining()));
    object.or_null("remaining", is_limited.then(|| decision.remaining()));
    object.micros("reset_after_us", decision.reset_after());
    object.text("wait", decision.wait().as_str());
    object.micros("wait_us", decision.wait().duration());
    object.end();
}

/// Writes the actions of an operator, as a JSON object.
pub(super) fn actions(actions: &[OperatorAction]) -> String {
    let mut json = String::new();
    let mut object = Object::begin(&mut json);
    object.list("actions", actions, |json, action| json.push_str(&action.to_json()));
    object.end();
    json
}

fn policy(json: &mut String, row: &PolicyRow, view: &PageView) {
    let mut object = Object::begin(json);
    object.text("name", &row.name);
    object.list("layers", &row.layers, |json, layer| push_string(json, layer));
    object.list("quotas", &row.quotas, |json, quota| push_string(json, quota));
    object.text_or_null("mode", row.mode.map(Mode::as_str));
    object.micros("last_refused_us_ago", row.refused_ago(&view.stats));
    object.or_null("units", row.stats.as_ref().map(PolicySnapshot::units));
    let places = row.stats.as_ref().filter(|stats| stats.has_places());
    object.or_null("held", places.map(PolicySnapshot::held));
    object.micros("held_p50_us", places.and_then(|stats| stats.held_for().percentile(50)));
    object.micros("held_p99_us", places.and_then(|stats| stats.held_for().percentile(99)));
    match row.stats.as_ref().filter(|stats| stats.counts_use()) {
        Some(stats) => {
            let most_used = stats.most_used().iter().take(USED_MAX);
            object.list("most_used", most_used, |json, key| top_key(json, key, "units"));
        }
        None => object.plain("most_used", "null"),
    }
    for (name, buckets) in [("five_minutes", row.five_minutes()), ("hour", row.hour())] {
        span(object.field(name), buckets);
    }
    object.end();
}

/// Writes how busy the store is.
fn store_load(json: &mut String, load: &StoreLoad) {
    let mut object = Object::begin(json);
    object.plain("waiting", load.waiting);
    object.micros("oldest_wait_us", Some(load.oldest_wait));
    object.plain("calls_in_flight", load.calls_in_flight);
    object.micros("call_us", load.call_time);
    object.micros("quickest_call_us", load.quickest_call);
    object.micros("deadline_us", load.deadline);
    object.plain("shed", load.shed);
    object.plain("connections", load.connections);
    object.end();
}

/// Writes a key from a list of top keys. `count` is the name of the field for the key's count.
fn top_key(json: &mut String, key: &TopKey, count: &str) {
    let mut object = Object::begin(json);
    object.text("policy", key.policy());
    object.text("fingerprint", &key.fingerprint());
    object.text_or_null("name", key.name());
    object.plain(count, key.count());
    object.plain("error", key.error());
    object.end();
}

/// Writes the sums of a span of time, and the buckets of the span.
fn span(json: &mut String, buckets: &[RateBucket]) {
    let sums = Sums::of(buckets);
    let mut object = Object::begin(json);
    sums.fields().into_iter().for_each(|(name, count)| object.plain(name, count));
    object.micros("bucket_us", Some(buckets.first().map_or(Duration::ZERO, RateBucket::length)));
    object.list("buckets", buckets, |json, bucket| {
        let all = [bucket.allowed(), bucket.near(), bucket.over(), bucket.refused()].map(|count| count.to_string());
        json.push('[');
        json.push_str(&all.join(","));
        json.push(']');
    });
    object.end();
}
