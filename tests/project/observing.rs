//! The guide, the dashboard and the alerts name the metrics that exist.

use std::collections::BTreeSet;

use serde_json::Value;
use tower_ratelimit::observe::Stats;

const PAGE: &str = include_str!("../../src/guide/observing.md");
const DASHBOARD: &str = include_str!("../../examples/observe/grafana.json");
const ALERTS: &str = include_str!("../../examples/observe/alerts.yaml");

/// Returns the names of all metrics, those of a histogram as queries have them.
fn metrics() -> BTreeSet<String> {
    let text = Stats::new().prometheus();
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    let suffixes = |kind| if kind == "histogram" { &["_bucket", "_sum", "_count"][..] } else { &[""] };
    types.flat_map(|(name, kind)| suffixes(kind).iter().map(move |suffix| format!("{name}{suffix}"))).collect()
}

/// Returns the metrics that a query names.
fn named(query: &str) -> BTreeSet<String> {
    let words = query.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
    words.filter(|word| word.starts_with("ratelimit_")).map(str::to_owned).collect()
}

/// Collects every query of a dashboard.
fn queries<'a>(value: &'a Value, into: &mut Vec<&'a str>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                match value {
                    Value::String(query) if ["expr", "query"].contains(&name.as_str()) => into.push(query),
                    value => queries(value, into),
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| queries(value, into)),
        _ => {}
    }
}

#[test]
fn dashboard_names_metrics_that_exist() {
    let dashboard: Value = serde_json::from_str(DASHBOARD).expect("the dashboard is JSON");
    let panels = dashboard["panels"].as_array().expect("it has panels");
    assert_eq!(panels.len(), 8);
    for panel in panels {
        let mut all = Vec::new();
        queries(panel, &mut all);
        assert!(!all.is_empty() && all.iter().all(|query| !named(query).is_empty()), "{}", panel["title"]);
    }
    let mut all = Vec::new();
    queries(&dashboard, &mut all);
    let used: BTreeSet<String> = all.iter().flat_map(|query| named(query)).collect();
    assert!(used.is_subset(&metrics()), "{:?}", used.difference(&metrics()));
}

#[test]
fn alerts_name_metrics_that_exist() {
    assert_eq!(ALERTS.matches("- alert: ").count(), 4);
    let used = named(ALERTS);
    assert!(used.len() >= 3 && used.is_subset(&metrics()), "{:?}", used.difference(&metrics()));
}

#[test]
fn guide_lists_every_metric_and_its_kind() {
    let text = Stats::new().prometheus();
    let rows = PAGE.lines().filter_map(|line| line.strip_prefix("| `ratelimit_"));
    let listed: BTreeSet<(String, String)> = rows
        .map(|row| {
            let mut cells = row.split(" | ");
            let name = cells.next().unwrap_or_default().trim_end_matches('`');
            (format!("ratelimit_{name}"), cells.next().unwrap_or_default().to_owned())
        })
        .collect();
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    let written: BTreeSet<(String, String)> = types.map(|(name, kind)| (name.to_owned(), kind.to_owned())).collect();
    assert_eq!(listed, written);
}
