//! The rules of the alerts are valid, and fire exactly when their tests say.

use std::process::Command;

use crate::prometheus::missing;

fn promtool(arguments: &[&str]) {
    let program = std::env::var("PROMTOOL").unwrap_or_else(|_| "promtool".to_owned());
    let output = Command::new(&program).args(arguments).current_dir(env!("CARGO_MANIFEST_DIR")).output();
    let output = output.unwrap_or_else(|error| panic!("{}", missing(&program, &error)));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{arguments:?}\n{}{}", text(&output.stdout), text(&output.stderr));
}

#[test]
fn rules_and_configuration_are_valid() {
    promtool(&["check", "rules", "examples/observe/alerts.yaml"]);
    promtool(&["check", "config", "examples/observe/prometheus.yaml"]);
}

#[test]
fn alerts_fire_exactly_when_they_should() {
    promtool(&["test", "rules", "examples/observe/alerts_test.yaml"]);
    let (rules, tests) =
        (include_str!("../../examples/observe/alerts.yaml"), include_str!("../../examples/observe/alerts_test.yaml"));
    let names: Vec<&str> = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert_eq!(names.len(), 15);
    for name in names {
        assert!(tests.contains(&format!("alertname: {name}\n        exp_alerts:")), "no test fires {name}");
        assert!(tests.contains(&format!("alertname: {name}}}\n")), "no test expects {name} to be silent");
    }
}

/// Returns a text with one space in the place of each gap.
fn joined(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn queries_of_the_guide_are_those_that_are_tested() {
    let guide = include_str!("../../src/guide/observing.md");
    let tested =
        [include_str!("../../examples/observe/alerts.yaml"), include_str!("../../examples/observe/alerts_test.yaml")];
    let tested = joined(&tested.concat());
    let blocks = guide.split("```text\n").skip(1).filter_map(|rest| rest.split("```").next());
    let queries: Vec<&str> = blocks.filter(|block| block.contains("ratelimit_")).collect();
    assert_eq!(queries.len(), 3);
    for query in queries {
        assert!(tested.contains(&joined(query)), "no test has the query {query}");
    }
}
