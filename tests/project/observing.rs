//! The documentation lists the metrics and the alerts that exist. Their use is tested in `tests/observe/`.

use std::collections::BTreeSet;

use tower_ratelimit::observe::Stats;

const PAGE: &str = include_str!("../../src/guide/observing.md");
const TO_PROMETHEUS: &str = include_str!("../../src/stats/stats.rs");
const ALERTS: &str = include_str!("../../examples/observe/alerts.yaml");

#[test]
fn documentation_lists_every_metric_and_its_kind() {
    let text = Stats::new().to_prometheus();
    let rows = TO_PROMETHEUS.lines().filter_map(|line| line.trim().strip_prefix("/// | `ratelimit_"));
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

#[test]
fn guide_lists_every_alert() {
    let rows = PAGE.lines().filter_map(|line| line.strip_prefix("| `RateLimit")?.split('`').next());
    let listed: BTreeSet<String> = rows.map(|name| format!("RateLimit{name}")).collect();
    let alerts = ALERTS.lines().filter_map(|line| line.trim().strip_prefix("- alert: "));
    assert_eq!(listed, alerts.map(str::to_owned).collect());
}
