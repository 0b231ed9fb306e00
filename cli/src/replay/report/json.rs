//! The report as JSON.

use serde_json::{Value, json};

use super::super::curve::Point;
use super::numbers::instant;
use super::text::NOTES;
use super::{CurveLimit, CurveReport, FileRead, PERCENTILES, PolicyReport, Report, WINDOW_NAMES};

impl Report {
    /// Returns the report. Instants are microseconds since the epoch, and texts are made harmless as in the other
    /// forms.
    pub(crate) fn json(&self) -> Value {
        let read = &self.read;
        json!({
            "verdict": self.verdict,
            "read": {
                "format": read.format,
                "files": read.files.iter().map(file).collect::<Vec<_>>(),
                "lines": read.lines,
                "requests": read.requests,
                "unreadable": read.unreadable,
                "no_requests": read.other,
                "too_long": read.too_long,
                "unreadable_samples": read.samples.iter().map(|sample| &sample.0).collect::<Vec<_>>(),
                "late": read.late,
                "dated_ahead": read.ahead,
                "not_ordered": read.crowded,
                "whole_seconds": read.is_coarse,
                "first_us": read.first_us,
                "last_us": read.last_us,
                "first": instant(read.first_us),
                "last": instant(read.last_us),
                "addresses": read.addresses,
                "more_addresses": read.has_more_addresses,
                "without_address": read.without_address,
                "answered_429": read.limited_before,
                "outcomes": read.outcomes.iter().map(|(kind, number)| ((*kind).to_owned(), json!(number))).collect::<Value>(),
            },
            "warnings": self.warnings,
            "notes": NOTES,
            "policies": self.policies.iter().map(policy).collect::<Vec<_>>(),
        })
    }
}

fn file(file: &FileRead) -> Value {
    json!({
        "name": file.name.0,
        "lines": file.lines,
        "requests": file.requests,
        "unreadable": file.unreadable,
        "no_requests": file.other,
        "late": file.late,
        "dated_ahead": file.ahead,
        "first_us": file.span_us.map(|(first, _)| first),
        "last_us": file.span_us.map(|(_, last)| last),
    })
}

fn policy(policy: &PolicyReport) -> Value {
    let peaks = WINDOW_NAMES.iter().zip(&policy.peaks).map(|(window, row)| ((*window).to_owned(), percentiles(row)));
    let worst = policy.worst.iter().map(|worst| {
        json!({
            "client": worst.who.0,
            "requests": worst.requests,
            "refused": worst.refused,
            "longest_run": worst.longest_run,
            "answered": worst.answered,
            "answered_2xx_3xx": worst.answered_well,
            "user_agents": worst.agents,
            "addresses_in_network": worst.neighbours,
            "paths": worst.paths.iter().map(|(path, refused)| json!({"path": path.0, "refused": refused})).collect::<Vec<_>>(),
            "refused_at_other_paths": worst.elsewhere,
            "user_agent": worst.agent.as_ref().map(|agent| &agent.0),
            "automated": worst.is_automated,
            "first_refused_us": worst.refused_us.0,
            "last_refused_us": worst.refused_us.1,
        })
    });
    let parts = policy.hours.parts.iter();
    let parts =
        parts.map(|(start, requests, refused)| json!({"start_us": start, "requests": requests, "refused": refused}));
    json!({
        "name": policy.name.0,
        "quota": policy.quota,
        "mode": policy.mode,
        "requests": policy.requests,
        "refused": policy.refused,
        "clients": policy.clients,
        "touched": policy.touched,
        "requests_of_touched": policy.of_touched,
        "refused_as_burst": policy.as_burst.map(|(refused, _)| refused),
        "touched_as_burst": policy.as_burst.map(|(_, touched)| touched),
        "requests_of_clients_not_followed": policy.unfollowed,
        "longest_run": policy.longest_run,
        "likely_false": policy.likely_false.map(|(clients, refused)| json!({"clients": clients, "refused": refused})),
        "automated": policy.automated,
        "peaks": peaks.collect::<Value>(),
        "in_flight": policy.in_flight.map(|row| percentiles(&row)),
        "worst": worst.collect::<Vec<_>>(),
        "timeline": {"length_us": policy.hours.length_us, "parts": parts.collect::<Vec<_>>()},
        "curve": policy.curve.as_ref().map(curve),
        "curve_in_flight": policy.curve_in_flight.as_ref().map(curve),
    })
}

fn percentiles(row: &[u32; PERCENTILES.len()]) -> Value {
    PERCENTILES.iter().zip(row).map(|((_, name), peak)| ((*name).to_owned(), json!(peak))).collect()
}

fn curve(curve: &CurveReport) -> Value {
    let point = |point: &Point| {
        let Point { requests, refused, clients, touched } = point;
        json!({"requests": requests, "refused": refused, "clients": clients, "touched": touched})
    };
    let limit = |limit: &CurveLimit| {
        json!({
            "limit": limit.limit,
            "quota": limit.quota,
            "all": point(&limit.all),
            "first_half": point(&limit.first),
            "second_half": point(&limit.second),
            "most_refused": limit.worst,
        })
    };
    let advice = curve.advice.iter().map(|advice| {
        let quota = advice.limit.and_then(|at| curve.limits.get(at)).map(|limit| &limit.quota);
        json!({"target": advice.target, "quota": quota, "words": advice.words})
    });
    json!({
        "limits": curve.limits.iter().map(limit).collect::<Vec<_>>(),
        "knee": curve.knee.and_then(|at| curve.limits.get(at)).map(|limit| limit.limit),
        "suggestions": advice.collect::<Vec<_>>(),
        "rule": curve.rule.as_ref().map(|rule| &rule.text),
    })
}
