//! The page for programs.

use std::time::Duration;

use super::view::{Row, Sums, View};
use crate::json::{Object, push_string};
use crate::mode::Mode;
use crate::outcome::OutcomeKind;
use crate::stats::{PolicySnapshot, RateBucket};

/// Writes the page as a JSON object.
pub(super) fn render(view: &View) -> String {
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
    object.list("most_limited", stats.most_limited(), |json, key| {
        let mut object = Object::begin(json);
        object.text("policy", key.policy());
        object.text("fingerprint", &key.fingerprint());
        object.text_or_null("name", key.name());
        object.plain("refusals", key.count());
        object.plain("error", key.error());
        object.end();
    });
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
        limiter.text_or_null("error", events.store_error());
        limiter.plain("local_answers", events.local_answers());
        limiter.plain("fallbacks", events.fallbacks());
        limiter.list("servers_down", events.servers_down(), push_string);
        limiter.plain("waiting", events.waiting());
        limiter.end();
    }
    if let Some(rules) = &view.rules {
        let mut object = Object::begin(object.field("rules"));
        object.plain("version", rules.version);
        object.text_or_null("error", rules.error.as_deref());
        object.end();
    }
    {
        let mut switches = Object::begin(object.field("switches"));
        view.switches.iter().for_each(|(name, mode)| switches.text(name, mode.as_str()));
        switches.end();
    }
    object.end();
    json
}

/// Writes what each layer explains, as a JSON list.
pub(super) fn explanations(view: &View) -> String {
    let mut json = String::from("[");
    for (at, (title, explanation)) in view.explained.iter().flat_map(|(_, all)| all).flatten().enumerate() {
        if at > 0 {
            json.push(',');
        }
        let mut object = Object::begin(&mut json);
        object.text("layer", title);
        object.plain("explanation", explanation.to_json());
        object.end();
    }
    json.push(']');
    json
}

fn policy(json: &mut String, row: &Row, view: &View) {
    let mut object = Object::begin(json);
    object.text("name", &row.name);
    object.list("layers", &row.layers, |json, layer| push_string(json, layer));
    object.list("quotas", &row.quotas, |json, quota| push_string(json, quota));
    object.text_or_null("mode", row.mode.map(Mode::as_str));
    object.micros("last_refused_us_ago", row.refused_ago(&view.stats));
    object.or_null("units", row.stats.as_ref().map(PolicySnapshot::units));
    for (name, buckets) in [("five_minutes", row.five_minutes()), ("hour", row.hour())] {
        span(object.field(name), buckets);
    }
    object.end();
}

/// Writes the sums of a span, and its buckets.
fn span(json: &mut String, buckets: &[RateBucket]) {
    let sums = Sums::of(buckets);
    let mut object = Object::begin(json);
    for (name, count) in
        [("allowed", sums.allowed), ("near", sums.near), ("over", sums.over), ("refused", sums.refused)]
    {
        object.plain(name, count);
    }
    object.micros("bucket_us", Some(buckets.first().map_or(Duration::ZERO, RateBucket::length)));
    object.list("buckets", buckets, |json, bucket| {
        let all = [bucket.allowed(), bucket.near(), bucket.over(), bucket.refused()].map(|count| count.to_string());
        json.push('[');
        json.push_str(&all.join(","));
        json.push(']');
    });
    object.end();
}
