//! Tests have short names, and do not sleep to let time pass, as CONTRIBUTING says.

use std::fs;
use std::path::{Path, PathBuf};

/// Files and folders with tests that sleep, and the reason. A path that ends with `/` is a folder.
const SLEEPERS: &[(&str, &str)] = &[
    ("cli/tests/serve/", "the program and proxies start and end as processes"),
    ("examples/frameworks/", "the server of another framework starts on threads of its own"),
    ("examples/rules_by_url.rs", "a source asks a server over TCP by and by"),
    ("src/clock/tokio.rs", "tokio's time is paused"),
    ("src/fleet/tests/", "tokio's time is paused"),
    ("src/limiter/redis/connection/tests/", "faults of real servers last for a while under load"),
    ("src/limiter/redis/tests/mod.rs", "the servers are processes, whose changes are waited for"),
    ("src/limiter/redis/tests/simulation/", "tokio's time is paused"),
    ("src/limiter/redis/tests/processes/mod.rs", "processes run side by side, and leases end by the server's time"),
    ("src/limiter/redis/tests/processes/places.rs", "places lapse by the server's time"),
    ("src/limiter/remote/flights/", "tokio's time is paused"),
    ("src/limiter/store/postgres/tests/", "a real server opens connections by and by"),
    ("src/limiter/store/tests/", "tokio's time is paused, or a store in memory answers after a millisecond"),
    ("tests/fuzz/src/serve.rs", "a server over TCP starts by and by"),
    ("tests/memory/conformance.rs", "a limiter with a race needs time between its two steps"),
    ("tests/memory/random_clocks.rs", "threads run while another one holds a reading of the clock"),
    ("tests/memory/ready.rs", "timers are the test's own, or tokio's time is paused"),
    ("tests/memory/stepped_clock.rs", "the usual clock looks at a calendar that steps"),
    ("tests/memory/stopped_clock.rs", "processes are stopped and continued in real time"),
    ("tests/middleware/delay.rs", "tokio's time is paused"),
    ("tests/middleware/departed.rs", "a server over TCP notices closed connections by and by"),
    ("tests/middleware/h2_resets.rs", "a server over TCP notices resets by and by"),
    ("tests/middleware/in_line.rs", "tokio's time is paused"),
    ("tests/middleware/messages_campaign.rs", "a server over TCP notices closed connections by and by"),
    ("tests/middleware/pace.rs", "tokio's time is paused"),
    ("tests/middleware/queue_leaving.rs", "a server over TCP notices closed connections by and by"),
    ("tests/middleware/rules_file.rs", "a watched file is polled in real time"),
    ("tests/middleware/settling_served.rs", "a server over TCP settles by and by"),
    ("tests/middleware/switch.rs", "threads that send requests run between two changes of a quota"),
    ("tests/newest/smoke.rs", "a server starts by and by"),
    ("tests/observe/prometheus.rs", "Prometheus starts as a process"),
    ("tests/postgres/", "a real server decides by its own time, and notices faults by and by"),
    ("tests/redis/", "a real server decides by its own time, and notices faults by and by"),
    ("tests/support/calendar_edge.rs", "real servers go over the edge of a month"),
    ("tests/support/fleet.rs", "other processes read by and by"),
    ("tests/support/in_flight.rs", "clients over TCP stay for a moment"),
    ("tests/support/lines.rs", "what must not happen has a moment on a real server; in memory tokio's time is paused"),
    ("tests/support/nginx.rs", "nginx starts as a process"),
    ("tests/support/proxy.rs", "a proxy delays what a real server sends"),
    ("tests/support/stepped_clock.rs", "a real server has stepped, and is asked by and by"),
    ("tests/support/redis", "servers start and stop as processes"),
];

/// Returns the files below a folder of the repository.
pub(super) fn files(folder: &str, found: &mut Vec<(String, String)>) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut entries: Vec<PathBuf> =
        fs::read_dir(root.join(folder)).expect("the folder is there").map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
        if path.is_dir() {
            files(&name, found);
        } else if name.ends_with(".rs") {
            found.push((name, fs::read_to_string(&path).expect("source is text")));
        }
    }
}

/// Returns the code of all tests, by file. Tests within a file of the library are its last part.
fn tests() -> Vec<(String, String)> {
    let mut found = Vec::new();
    for folder in ["src", "cli/src", "cli/tests", "examples", "tests"] {
        files(folder, &mut found);
    }
    for (name, text) in &mut found {
        let is_test_file = name.starts_with("tests/") || name.contains("/tests/") || name.ends_with("/tests.rs");
        if !is_test_file {
            let start =
                text.find("#[cfg(test)]\nmod ").or_else(|| text.find("#[cfg(all(test, not(ratelimit_loom)))]\nmod "));
            text.drain(..start.unwrap_or(text.len()));
        }
    }
    found.retain(|(name, text)| !text.is_empty() && name != "tests/project/test_files.rs");
    found
}

#[test]
fn tests_sleep_only_for_a_listed_reason() {
    let sleeps =
        |text: &str| text.lines().any(|line| line.split("//").next().is_some_and(|code| code.contains("sleep(")));
    let sleepers: Vec<String> = tests().into_iter().filter(|(_, text)| sleeps(text)).map(|(name, _)| name).collect();
    let is_of = |name: &str, listed: &str| name.starts_with(listed);
    for name in &sleepers {
        let is_listed = SLEEPERS.iter().any(|(listed, _)| is_of(name, listed));
        assert!(is_listed, "{name} sleeps: take ManualClock or tokio's paused time, or list it with the reason");
    }
    for (listed, reason) in SLEEPERS {
        assert!(sleepers.iter().any(|name| is_of(name, listed)), "{listed} does not sleep any more, because {reason}");
    }
}

#[test]
fn tests_have_names_of_at_most_60_characters() {
    let mut count = 0;
    for (file, text) in tests() {
        let starts = ["#[test]", "#[tokio::test"].iter().flat_map(|start| text.match_indices(start));
        for (start, _) in starts {
            let after = text[start..].split("fn ").nth(1).expect("an attribute has a function");
            let name: String = after.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            assert!(name.len() <= 60, "{file}: {name} has {} characters", name.len());
            count += 1;
        }
    }
    assert!(count > 1_000, "{count} tests were found");
}
