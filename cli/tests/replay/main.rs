//! `tower-ratelimit replay`, seen from its user.

mod forms;
mod log;

mod rotated;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::Value;

/// A folder that is removed in the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0); // two tests may use one name
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("replay-{}-{number}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&path); // of an earlier run that was killed
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        let path = self.0.join(name);
        fs::write(&path, content).unwrap();
        path.to_str().unwrap().to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn run_with(args: &[&str], input: &[u8]) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_tower-ratelimit"))
        .arg("replay")
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let _ = program.stdin.take().unwrap().write_all(input); // the program may end before it has read all
    program.wait_with_output().unwrap()
}

/// Returns what the program prints.
fn run(args: &[&str]) -> String {
    let output = run_with(args, b"");
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&run(&[args, &["--json"]].concat())).unwrap()
}

/// Returns the error of a command that fails.
fn error(args: &[&str], input: &[u8]) -> String {
    let output = run_with(args, input);
    assert_eq!(output.status.code(), Some(2), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stdout.is_empty());
    String::from_utf8(output.stderr).unwrap()
}

fn here(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/replay").join(file)
}

#[test]
fn figures_are_those_of_an_independent_computation() {
    let folder = Folder::new("figures");
    let file = folder.file("access.log", log::shop());
    for (numbers, algorithm, quota) in [
        (["30", "30", "60"], "token", "30 per minute"),
        (["20", "5", "60"], "token", "20 per minute, burst 5"),
        (["20", "20", "60"], "fixed", "20 per minute, fixed window"),
        (["20", "20", "60"], "sliding_log", "20 per minute, sliding log"),
    ] {
        let mut python = Command::new("python3");
        python.arg(here("recompute.py")).arg(&file).args(numbers).arg(algorithm);
        let python = python.output().expect("python3 computes the figures");
        assert!(python.status.success(), "{}", String::from_utf8_lossy(&python.stderr));
        let expected: Value = serde_json::from_slice(&python.stdout).unwrap();
        let report = json(&["--key", "client", "--quota", quota, &file]);
        let policy = &report["policies"][0];
        for name in ["requests", "unreadable", "late"] {
            assert_eq!(report["read"][name], expected[name], "{quota}: {name}");
        }
        for name in [
            "requests",
            "clients",
            "refused",
            "touched",
            "refused_as_burst",
            "touched_as_burst",
            "longest_run",
            "requests_of_touched",
            "peaks",
        ] {
            assert_eq!(policy[name], expected[name], "{quota}: {name}");
        }
        let worst: Vec<&Value> = policy["worst"].as_array().unwrap().iter().map(|worst| &worst["refused"]).collect();
        assert_eq!(worst, expected["worst"].as_array().unwrap().iter().collect::<Vec<_>>(), "{quota}");
        let limits = policy["curve"]["limits"].as_array().unwrap();
        let mut compared = 0;
        for limit in limits {
            let Some(expected) = expected["curve"].get(limit["limit"].to_string()) else { continue };
            for name in ["refused", "touched"] {
                assert_eq!(limit["all"][name], expected[name], "{quota}: {name} at {}", limit["limit"]);
            }
            compared += 1;
        }
        assert_eq!(compared, 12, "{quota}");
        assert!(policy["refused"].as_u64() > Some(20), "{quota}: the log tests the quota");
    }
}

#[test]
fn structure_of_the_log_is_found() {
    let folder = Folder::new("structure");
    let file = folder.file("access.log", log::shop());
    let report = json(&["--quota", "30 per minute", &file]);
    let read = &report["read"];
    assert_eq!(read["format"], "COMBINED");
    assert_eq!(read["requests"], log::REQUESTS);
    assert_eq!(read["late"], log::LATE);
    assert_eq!(read["unreadable"], log::UNREADABLE);
    assert_eq!(read["lines"], log::REQUESTS + log::LATE + log::UNREADABLE);
    assert_eq!(read["answered_429"], log::LIMITED);
    assert_eq!(read["first_us"], log::epoch(0) * 1_000_000);
    assert_eq!(read["unreadable_samples"].as_array().unwrap().len(), 3);
    let policy = &report["policies"][0];
    // The crawler stays at the rate of the quota, and the burst of 60 is over it by 29: a token comes back within its 3
    // s.
    assert_eq!((&policy["refused"], &policy["touched"]), (&Value::from(29), &Value::from(1)));
    assert_eq!(policy["worst"][0]["client"], "203.0.113.0/24");
    let parts = policy["timeline"]["parts"].as_array().unwrap();
    let of_part = |name: &str| parts.iter().map(|part| part[name].as_u64().unwrap()).collect::<Vec<_>>();
    assert_eq!(of_part("refused"), [0, 29, 0]);
    assert_eq!(of_part("requests").iter().sum::<u64>(), log::REQUESTS);
}

#[test]
fn text_report_is_the_golden_one() {
    let folder = Folder::new("golden");
    let file = folder.file("access.log", log::shop());
    let text = run(&["--key", "client", "--quota", "25 per minute", &file]);
    let golden = here("golden.txt");
    if std::env::var_os("REWRITE_GOLDEN").is_some() {
        fs::write(&golden, &text).unwrap();
    }
    let expected = fs::read_to_string(&golden).unwrap();
    assert_eq!(text, expected, "to accept it: REWRITE_GOLDEN=1 cargo test --test replay");
}

#[test]
fn rules_of_a_file_see_what_the_log_has() {
    let folder = Folder::new("rules");
    let rules = folder.file(
        "rules.yaml",
        r#"
rules:
  - {name: login, quota: 5 per minute, key: client-ip, match: {method: POST, path: /login}}
  - {name: bots, quota: 2 per hour, key: client-ip, match: {user-agent: "*bot*"}, mode: shadow}
  - {name: tenant, quota: 3 per hour, key: tenant, match: {host: shop.example}}
  - {name: plain, quota: 1 per hour, key: header referer, match: {path: "/page/{id}"}, missing-key: exempt}
  - {name: unused, quota: 1 per hour, key: path, match: {method: DELETE}}
access: {allow: [192.0.2.200]}
"#,
    );
    let format =
        r#"$remote_addr $remote_user $host [$time_iso8601] "$request" $status "$http_referer" "$http_user_agent""#;
    let mut log = String::new();
    let mut write = |client: &str, user: &str, host: &str, request: &str, referer: &str, agent: &str| {
        let second = log.lines().count() % 60;
        log.push_str(&format!(
            "{client} {user} {host} [2024-03-01T10:00:{second:02}Z] \"{request} HTTP/1.1\" 200 \"{referer}\" \"{agent}\"\n"
        ));
    };
    for _ in 0..8 {
        write("192.0.2.1", "-", "a.example", "POST /login", "-", "curl");
        write("192.0.2.200", "-", "a.example", "POST /login", "-", "curl");
        write("192.0.2.2", "-", "a.example", "GET /", "-", "a bot");
        write("192.0.2.3", "ann", "shop.example", "GET /", "-", "curl");
        write("192.0.2.4", "-", "a.example", "GET /page/7?q=1", "https://e.org/", "curl");
    }
    let log = folder.file("access.log", log);
    let args = ["--rules", &rules, "--name", "tenant=user", "--format", format, &log];
    let report = json(&args);
    let policies = report["policies"].as_array().unwrap();
    let refused: Vec<(&str, u64, u64)> = policies
        .iter()
        .map(|policy| {
            let number = |name: &str| policy[name].as_u64().unwrap();
            (policy["name"].as_str().unwrap(), number("requests"), number("refused"))
        })
        .collect();
    // A token of `login` comes back every 12 s, and its requests come every 5 s.
    assert_eq!(refused, [("login", 8, 1), ("bots", 8, 6), ("tenant", 8, 5), ("plain", 8, 7), ("unused", 0, 0)]);
    assert_eq!(policies[1]["mode"], "shadow");
    let outcomes = &report["read"]["outcomes"];
    assert_eq!((&outcomes["limited"], &outcomes["shadow_limited"]), (&Value::from(13), &Value::from(6)));
    assert_eq!(outcomes["exempt"], 8);
    // A user and a referer may be personal data; a client is shown by its network.
    assert!(policies[2]["worst"][0]["client"].as_str().unwrap().starts_with("key "));
    // Another client of the network was refused, too.
    assert_eq!(policies[1]["worst"][0]["client"], "192.0.2.0/24 #2");
    let whole = json(&[&args[..], &["--show-addresses"]].concat());
    assert!(whole["policies"][2]["worst"][0]["client"].as_str().unwrap().contains("ann"));
    assert_eq!(whole["policies"][1]["worst"][0]["client"], "192.0.2.2");
    let advice = report["policies"][0]["curve"]["rule"].as_str().unwrap();
    assert!(advice.contains("candidate: 5 per minute"), "{advice}");
}

#[test]
fn trusted_proxies_report_the_clients() {
    let folder = Folder::new("proxies");
    let mut log = String::new();
    for n in 0..100 {
        let client = n % 10;
        log.push_str(&format!(
            "10.0.0.1 - - [17/May/2015:10:05:{:02} +0000] \"GET / HTTP/1.1\" 200 1 \"-\" \"curl\" \"6.6.6.6, 192.0.2.{client}\"\n",
            n / 2
        ));
    }
    let log = folder.file("access.log", log);
    let report = json(&["--quota", "5 per minute", &log]);
    assert_eq!(report["read"]["addresses"], 1);
    let warnings = report["warnings"].to_string();
    assert!(warnings.contains("10.0.0.0/24, sent 100%") && warnings.contains("--trusted-proxies"), "{warnings}");
    let report = json(&["--quota", "5 per minute", "--trusted-proxies", "1", &log]);
    assert_eq!((&report["read"]["addresses"], &report["warnings"]), (&Value::from(10), &Value::Array(Vec::new())));
    assert_eq!(report["policies"][0]["clients"], 10);
    assert!(report["policies"][0]["curve"]["rule"].as_str().unwrap().contains("key: client-ip"));
}

/// Texts that a client may send to attack the reader of the report.
const HOSTILE: [&str; 8] = [
    "/<script>alert(1)</script>",
    "/</script><img/src=x/onerror=alert(1)>",
    "/\\\"onmouseover=alert(1)",
    "/'><b>",
    "/&lt;script&gt;%3Cscript%3E",
    "/\u{1b}[2J\u{1b}]0;owned\u{7}\u{9b}31m\u{202e}",
    "/%s%n{}{0}$(id)`id`",
    "/\\x1b[2J\\x00\\u001b",
];

#[test]
fn hostile_lines_never_become_markup_or_terminal_commands() {
    let folder = Folder::new("hostile");
    let mut log = String::new();
    for path in HOSTILE {
        for _ in 0..10 {
            log.push_str(&format!(
                "192.0.2.1 - {path} [17/May/2015:10:05:03 +0000] \"GET {path} HTTP/1.1\" 200 1 \"{path}\" \"{path}\"\n"
            ));
        }
        log.push_str(&format!("{path} <script>alert(2)</script>\n"));
    }
    let log = folder.file("access.log", log);
    let html = folder.file("report.html", "");
    for key in ["path", "user", "header referer", "header user-agent"] {
        for show in [&[][..], &["--show-addresses"]] {
            let args = [&["--key", key, "--quota", "1 per hour", "--html", &html, "--format", "combined", &log], show]
                .concat();
            let text = run(&args);
            let odd = text.chars().find(|c| c.is_control() && *c != '\n' || *c == '\u{202e}');
            assert_eq!(odd, None, "{key}");
            assert!(text.contains("Refused most"), "{key}: the hostile texts are in the report");
            json(&args);
            let page = fs::read_to_string(&html).unwrap();
            assert_eq!(page.matches("<script").count(), 1, "{key}: only the report's own");
            assert_eq!(page.matches("</script").count(), 1);
            for markup in ["<img", "<b>", "\"onmouseover", "alert(1)\">"] {
                assert!(!page.contains(markup), "{key}: {markup}");
            }
            assert!(!page.chars().any(|c| c.is_control() && c != '\n' || c == '\u{202e}'), "{key}");
            assert!(page.contains("default-src 'none'"));
            for link in ["http:", "https:", "src=", "href=", "url(", "@import"] {
                assert!(!page.replace("src=x", "").contains(link), "{key}: the page loads {link}");
            }
        }
    }
}

#[test]
fn standard_input_is_read_as_a_file() {
    let folder = Folder::new("stdin");
    let log = log::shop();
    let file = folder.file("access.log", &log);
    let output = run_with(&["--quota", "30 per minute", "-"], log.as_bytes());
    assert_eq!(String::from_utf8(output.stdout).unwrap(), run(&["--quota", "30 per minute", &file]));
}

/// The log may take long to read.
#[test]
fn page_that_cannot_be_written_ends_the_program_at_once() {
    let mut program = Command::new(env!("CARGO_BIN_EXE_tower-ratelimit"))
        .args(["replay", "--quota", "5/s", "--html", "/no/such/folder/report.html", "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let log = program.stdin.take(); // it stays open, and nothing comes
    let output = program.wait_with_output().unwrap();
    drop(log);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("/no/such/folder"));
}

#[test]
fn page_of_a_log_without_a_report_is_not_touched() {
    let folder = Folder::new("untouched");
    let (older, new) = (folder.file("older.html", "older"), folder.0.join("new.html"));
    for page in [&*older, new.to_str().unwrap()] {
        error(&["--quota", "5/s", "--html", page, "-"], b"what is this?\n");
    }
    assert_eq!(fs::read_to_string(&older).unwrap(), "older");
    assert!(!new.exists());
    let log = folder.file("access.log", log::shop());
    fs::write(&older, "older and much longer".repeat(100_000)).unwrap();
    run(&["--quota", "5/s", "--html", &older, &log]);
    let page = fs::read_to_string(&older).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.trim_end().ends_with("</html>"), "{}", &page[..100]);
}

#[test]
fn trouble_is_reported_with_a_way_out() {
    let folder = Folder::new("trouble");
    let log = folder.file("access.log", log::shop());
    let binary = folder
        .file("binary.log", (0..100_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect::<Vec<_>>());
    let bad_rules = folder.file("rules.yaml", "rules: [{name: a, quota: 5 per minut, key: peer-ip}]");
    let quota = ["--quota", "5 per minute"];
    for (args, input, expected) in [
        (&["/no/such/file"][..], &b""[..], "/no/such/file"),
        (&[folder.0.to_str().unwrap()], b"", "folder"),
        (&["-"], b"BZh91AY", "bzcat"),
        (&["-"], b"\x28\xb5\x2f\xfd\0", "zstdcat"),
        (&["-"], b"\xfd7zXZ\0", "xzcat"),
        (&["-"], b"\xff\xfe1\x009\x002\x00", "UTF-16"),
        (&["-"], b"", "empty"),
        (&["-"], b"what is this?\n", "--format"),
        (&[&binary], b"", "--format"),
        (&["--format", "combined", "-"], b"what is this?\n", "no line of 1 could be read as COMBINED"),
        (&["--format", "combinde", &log], b"", "COMBINED"),
        (&["--format", "$remote_addr", &log], b"", "time"),
        (&["--html", "/no/such/folder/report.html", &log], b"", "/no/such/folder"),
        (&["--html", &log, &log], b"", "overwrite"),
    ] {
        let error = error(&[&quota[..], args].concat(), input);
        assert!(error.contains(expected), "{args:?}: {error}");
    }
    let right = folder.file("right.yaml", "rules: []");
    assert!(error(&["--rules", &right, "--html", &right, &log], b"").contains("overwrite"));
    let error = error(&["--rules", &bad_rules, &log], b"");
    assert!(error.contains("1:") && error.contains("5 per minut"), "{error}");
}

#[test]
fn lines_of_any_kind_are_counted_and_passed_over() {
    let folder = Folder::new("odd");
    let good = "192.0.2.1 - - [17/May/2015:10:05:03 +0000] \"GET / HTTP/1.1\" 200 1 \"-\" \"curl\"\n";
    let mut log = good.repeat(200).into_bytes();
    log.extend_from_slice(&[b'a'; 3 << 20]);
    log.extend_from_slice(b"\n\0\0\n\xff\xfe\xfd\n\"\\\n[[[[\n{\"a\":\n");
    for date in ["99/May/2015:10:05:03 +0000", "17/May/2149:10:05:03 +0000", "01/Jan/1970:00:00:00 +0000", "now"] {
        log.extend_from_slice(good.replace("17/May/2015:10:05:03 +0000", date).as_bytes());
    }
    log.extend_from_slice(good.trim_end().as_bytes());
    let report = json(&["--quota", "500 per minute", &folder.file("access.log", log)]);
    let read = &report["read"];
    assert_eq!(read["requests"], 201);
    assert_eq!((&read["unreadable"], &read["too_long"]), (&Value::from(8), &Value::from(1)));
    assert_eq!((&read["late"], &read["dated_ahead"]), (&Value::from(1), &Value::from(1)));
    let warnings = report["warnings"].to_string();
    for one in ["Left out: 1 line more than", "Left out: 1 line dated", "longer than 64 KiB: 1."] {
        assert!(warnings.contains(one), "{warnings}");
    }
    assert_eq!(report["policies"][0]["refused"], 0);
}

#[test]
fn names_of_hosts_are_clients() {
    let folder = Folder::new("hosts");
    let mut log = String::new();
    for n in 0..60 {
        let client = ["p-192-0-2-1.pool.isp.example", "P-192-0-2-2.pool.isp.example", "192.0.2.3"][n % 3];
        log.push_str(&format!(
            "{client} - - [17/May/2015:10:05:{n:02} +0000] \"GET / HTTP/1.1\" 200 1 \"-\" \"curl\"\n"
        ));
    }
    let log = folder.file("access.log", log);
    let clients = |report: &Value| {
        let worst = report["policies"][0]["worst"].as_array().unwrap();
        worst.iter().map(|worst| (worst["client"].to_string(), worst["refused"].as_u64().unwrap())).collect::<Vec<_>>()
    };
    let report = json(&["--quota", "10 per hour", &log]);
    assert_eq!((&report["read"]["without_address"], &report["read"]["addresses"]), (&Value::from(0), &Value::from(3)));
    let mut masked = clients(&report);
    masked.sort();
    let expected = [("\"*.isp.example #1\"", 10), ("\"*.isp.example #2\"", 10), ("\"192.0.2.0/24\"", 10)];
    assert_eq!(masked, expected.map(|(client, refused)| (client.to_owned(), refused)));
    assert!(report["warnings"].to_string().contains("name in place of its address in 40 requests"), "{report}");
    let whole = clients(&json(&["--quota", "10 per hour", "--show-addresses", &log]));
    assert!(whole.iter().any(|(client, _)| client == "\"p-192-0-2-2.pool.isp.example\""), "{whole:?}");
}

#[test]
fn slider_begins_at_the_quota() {
    let folder = Folder::new("slider");
    let (log, html) = (folder.file("access.log", log::shop()), folder.file("report.html", ""));
    let report = json(&["--quota", "25 per minute", "--html", &html, &log]);
    let limits = report["policies"][0]["curve"]["limits"].as_array().unwrap();
    let own = limits.iter().position(|limit| limit["limit"] == 25).unwrap();
    // The curve and the report ask different limiters.
    assert_eq!(limits[own]["all"]["refused"], report["policies"][0]["refused"]);
    assert!(fs::read_to_string(&html).unwrap().contains(&format!("value=\"{own}\"")));
}

#[test]
fn clients_beyond_the_bound_are_counted_in_the_totals() {
    let folder = Folder::new("bound");
    let mut log = String::new();
    for n in 0..3_000 {
        log.push_str(&format!(
            "10.{}.{}.1 - - [17/May/2015:10:{:02}:{:02} +0000] \"GET / HTTP/1.1\" 200 1\n",
            n % 50,
            n % 20,
            n / 60,
            n % 60
        ));
    }
    let report = json(&["--quota", "1 per hour", "--max-clients", "40", &folder.file("access.log", log)]);
    let policy = &report["policies"][0];
    assert_eq!((&policy["requests"], &policy["clients"]), (&Value::from(3_000), &Value::from(40)));
    assert_eq!(policy["requests_of_clients_not_followed"], 1_800);
    assert_eq!(policy["refused"], 2_900);
    assert!(report["warnings"].to_string().contains("--max-clients"));
    assert_eq!(report["read"]["more_addresses"], true);
}

#[test]
fn verdict_says_what_the_report_comes_to() {
    let folder = Folder::new("verdict");
    let file = folder.file("access.log", log::shop());
    let verdict = |quota: &str| json(&["--quota", quota, &file])["verdict"][0].as_str().unwrap().to_owned();
    assert_eq!(
        verdict("25 per minute"),
        "With 25 per minute, 2 of 129 clients (1.6%) would have been refused, and 910 of 13,460 requests (6.8%). None of these \
         clients looks like a crawler or a script. The suggestion is 70 per minute, which refuses no client."
    );
    assert_eq!(
        verdict("70 per minute"),
        "With 70 per minute, none of 129 clients would have been refused. The suggestion is this limit."
    );
    let html = folder.file("report.html", "");
    let text = run(&["--quota", "25 per minute", "--html", &html, &file]);
    assert!(text.starts_with("Verdict\n  With 25 per minute, 2 of 129"), "{text}");
    let page = fs::read_to_string(&html).unwrap();
    let (verdict, numbers) = (page.find("With 25 per minute, 2 of 129"), page.find("class=\"tiles\""));
    assert!(verdict.is_some() && verdict < numbers, "the verdict comes first");
    assert!(page.contains("at most 0.1% of the clients (the rule below)"));
}

#[test]
fn verdict_of_rules_begins_with_those_that_refuse() {
    let folder = Folder::new("verdicts");
    let rules = folder.file(
        "rules.yaml",
        r#"
rules:
  - {name: wide, quota: 1000 per minute, key: client-ip}
  - {name: narrow, quota: 25 per minute, key: client-ip}
  - {name: unused, quota: 1 per hour, key: path, match: {method: DELETE}}
"#,
    );
    let file = folder.file("access.log", log::shop());
    let report = json(&["--rules", &rules, &file]);
    let verdict: Vec<&str> = report["verdict"].as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect();
    assert!(verdict[0].starts_with("narrow: with 25 per minute, 2 of 129 clients"), "{verdict:?}");
    assert_eq!(verdict[1..], ["1 other policy would have refused none.", "1 other policy applied to no request."]);
}

#[test]
fn refused_client_is_shown_with_what_it_did() {
    let folder = Folder::new("deeds");
    let mut log = String::new();
    let mut write = |client: &str, path: &str, agent: &str| {
        let second = log.lines().count();
        log.push_str(&format!(
            "{client} - - [17/May/2015:10:{:02}:{:02} +0000] \"GET {path} HTTP/1.1\" 200 1 \"-\" \"{agent}\"\n",
            second / 60,
            second % 60
        ));
    };
    let long = format!("/{}", "b".repeat(400));
    for n in 0..20 {
        write("192.0.2.1", "/login?password=secret", "curl/8.5.0");
        write("192.0.2.2", &format!("/{n}"), "Mozilla/5.0");
        write("192.0.2.3", &long, "-");
        write("192.0.2.4", "/from/198.51.100.77", "Mozilla/5.0 (198.51.100.77)");
        write("192.0.2.5", &format!("/v2/reset/k3qxTb9{n}"), "Tokens Chrome/130.0.0.0");
    }
    let log = folder.file("access.log", log);
    let report = json(&["--quota", "5 per hour", &log]);
    let policy = &report["policies"][0];
    assert_eq!(policy["automated"], 2, "curl, and the one without a user agent");
    let worst = policy["worst"].as_array().unwrap();
    let of = |agent: &str| worst.iter().find(|worst| worst["user_agent"].as_str().unwrap().starts_with(agent)).unwrap();
    let curl = of("curl/8.5.0");
    assert_eq!(curl["paths"], serde_json::json!([{"path": "/login", "refused": 15}]));
    assert_eq!(curl["automated"], true);
    let refused_at = [25, 95].map(|second| Value::from(log::epoch(second) * 1_000_000));
    assert_eq!([&curl["first_refused_us"], &curl["last_refused_us"]], [&refused_at[0], &refused_at[1]]);
    assert!(!report.to_string().contains("secret"), "a query is not shown");
    assert!(!report.to_string().contains("198.51.100.77"), "addresses are masked");
    assert!(!report.to_string().contains("k3qxTb9"), "a token is not shown");
    assert_eq!(of("Tokens")["user_agent"], "Tokens Chrome/130.0.0.0", "a version is no address");
    assert_eq!(
        of("Tokens")["paths"],
        serde_json::json!([{"path": "/v2/reset/*", "refused": 3}]),
        "they are shown alike"
    );
    let several = worst.iter().find(|worst| worst["refused_at_other_paths"] == 12).unwrap();
    assert_eq!(several["paths"].as_array().unwrap().len(), 3);
    let silent = worst.iter().find(|worst| worst["user_agent"] == "").unwrap();
    assert!(silent["paths"][0]["path"].as_str().unwrap().chars().count() < 100, "{silent}");
    let text = run(&["--quota", "5 per hour", "--show-addresses", &log]);
    assert!(text.contains("      /login (15)\n      curl/8.5.0\n      2015-05-17 10:00:25 to 10:01:35\n"), "{text}");
    assert!(text.contains("/from/198.51.100.77 (15)") && text.contains("no user agent"), "{text}");
}

/// A path is a client if it is the key.
#[test]
fn tokens_in_paths_are_masked_if_paths_are_keys() {
    let folder = Folder::new("path-keys");
    let mut log = String::new();
    for n in 0..40 {
        let path = ["/invite/k3qxTb9w", "/invite/h7Zw20pa", "/login"][n % 3];
        log.push_str(&format!(
            "192.0.2.1 - - [17/May/2015:10:05:{n:02} +0000] \"GET {path}?a=b HTTP/1.1\" 200 1 \"-\" \"curl\"\n"
        ));
    }
    let log = folder.file("access.log", log);
    let clients = |show: &[&str]| {
        let report = json(&[&["--quota", "1 per minute", "--key", "path", &log], show].concat());
        let worst = report["policies"][0]["worst"].as_array().unwrap().clone();
        let mut clients: Vec<String> = worst.iter().map(|one| one["client"].as_str().unwrap().to_owned()).collect();
        clients.sort();
        clients
    };
    assert_eq!(clients(&[]), ["/invite/* #1", "/invite/* #2", "/login"]);
    assert_eq!(clients(&["--show-addresses"]), ["/invite/h7Zw20pa", "/invite/k3qxTb9w", "/login"]);
}

/// One line of nonsense must not make the log as old as that.
#[test]
fn absurd_duration_is_none() {
    let folder = Folder::new("absurd-duration");
    let requests: Vec<(&str, f64, f64)> = (0..60).map(|n| ("192.0.2.1", f64::from(n), 0.5)).collect();
    let log = timed(&requests).replacen(" 0.5", " 99999999999.5", 1);
    let report = json(&["--quota", "10 per minute", "--format", TIMED, &folder.file("access.log", log)]);
    assert_eq!(report["read"]["requests"], 60);
    let warnings = report["warnings"].to_string();
    assert!(warnings.contains("Without a duration, so that they count as ended at once: 1 request."), "{warnings}");
}

#[test]
fn w3c_logs_are_read_by_their_directives() {
    let folder = Folder::new("w3c");
    let header = "#Software: Microsoft Internet Information Services 10.0\n#Version: 1.0\n#Date: 2024-03-01 10:00:00\n";
    let mut log =
        format!("{header}#Fields: date time c-ip cs-method cs-uri-stem cs(User-Agent) sc-status time-taken\r\n");
    for second in 0..20 {
        log.push_str(&format!("2024-03-01 10:00:{second:02} 192.0.2.1 GET /a+b curl/8.5.0+(x) 200 15\r\n"));
    }
    // The server was told to write other fields, and started again.
    log.push_str(&format!("{header}#Fields: date time cs(Cookie) sc-status c-ip cs-uri-stem\r\n"));
    for second in 20..60 {
        log.push_str(&format!("2024-03-01 10:00:{second:02} a=b+c 200 192.0.2.{} /c\r\n", 1 + second % 2));
    }
    let first = folder.file("u_ex240301.log", log);
    // Two logs of hours without requests begin alike.
    let names = "#Fields: date time c-ip\n";
    let (empty, other) = (folder.file("u_ex240302.log", names), folder.file("u_ex240303.log", names));
    let report = json(&["--quota", "10 per hour", &empty, &first, &other]);
    let read = &report["read"];
    assert_eq!((&read["format"], &read["lines"], &read["unreadable"]), (&"W3C".into(), &60.into(), &0.into()));
    let policy = &report["policies"][0];
    assert_eq!((&policy["clients"], &policy["refused"]), (&2.into(), &40.into()));
    let worst = policy["worst"][0].as_object().unwrap();
    assert_eq!(worst["paths"], serde_json::json!([{"path": "/a b", "refused": 10}, {"path": "/c", "refused": 20}]));
    assert_eq!(worst["user_agent"], "curl/8.5.0 (x)");
    let cookies = json(&["--key", "header cookie", "--quota", "10 per hour", "--show-addresses", &first]);
    let worst = &cookies["policies"][0]["worst"][0];
    assert_eq!(worst["refused"], 30, "{worst}");
    assert!(worst["client"].as_str().unwrap().contains("a=b c"), "{worst}");
    assert!(error(&["--quota", "10 per hour", &empty, &other], b"").contains("empty"));
}

#[test]
fn cloudfront_and_squid_logs_are_read() {
    let folder = Folder::new("columns");
    let mut cloudfront =
        "#Version: 1.0\n#Fields: date time x-edge-location sc-bytes c-ip cs-method cs(Host) cs-uri-stem \
                          sc-status cs(Referer) cs(User-Agent) x-host-header time-taken\n"
            .to_owned();
    let mut squid = String::new();
    for n in 0..30 {
        cloudfront.push_str(&format!(
            "2024-03-01\t10:00:{n:02}\tLAX1\t9\t192.0.2.{}\tGET\td1.cloudfront.net\t/a%20b\t200\t-\tcurl/8%20(x)\te.org\t0.5\n",
            n % 3
        ));
        squid.push_str(&format!(
            "170928720{}.{:03} {:>6} 192.0.2.{} TCP_MISS/200 4321 GET http://e.org/a?b - HIER_DIRECT/198.51.100.7 text/html\n",
            n / 10,
            n % 10,
            n,
            n % 3
        ));
    }
    for (format, content, path) in [("CLOUDFRONT", cloudfront, "/a%20b"), ("SQUID", squid, "/a")] {
        let file = folder.file("access.log", content);
        let report = json(&["--quota", "5 per hour", "--show-addresses", &file]);
        assert_eq!(report["read"]["format"], format);
        assert_eq!((&report["read"]["requests"], &report["read"]["unreadable"]), (&30.into(), &0.into()));
        let policy = &report["policies"][0];
        assert_eq!((&policy["clients"], &policy["refused"]), (&3.into(), &15.into()), "{format}");
        assert_eq!(policy["worst"][0]["paths"][0], serde_json::json!({"path": path, "refused": 5}));
        let hosts = json(&["--quota", "5 per hour", "--key", "host", &file]);
        assert_eq!(hosts["policies"][0]["worst"][0]["client"], "e.org", "{format}");
    }
}

/// Lines of `$remote_addr $msec "$request" $status $request_time`, from clients, beginnings and durations in seconds.
fn timed(requests: &[(&str, f64, f64)]) -> String {
    let mut lines: Vec<(f64, String)> = Vec::new();
    for (client, at, took) in requests {
        let end = 1_431_856_800.0 + at + took;
        lines.push((end, format!("{client} {end:.3} \"GET /export HTTP/1.1\" 200 {took:.3}\n")));
    }
    lines.sort_by(|a, b| a.0.total_cmp(&b.0));
    lines.into_iter().map(|(_, line)| line).collect()
}

const TIMED: &str = r#"$remote_addr $msec "$request" $status $request_time"#;

/// One client has three exports of ten seconds at once, and another when the first has ended. Others wait for each.
fn exports() -> String {
    let mut requests =
        vec![("192.0.2.1", 0.0, 10.0), ("192.0.2.1", 1.0, 10.0), ("192.0.2.1", 2.0, 10.0), ("192.0.2.1", 10.5, 1.0)];
    for second in 0..20 {
        requests.push(("198.51.100.1", f64::from(second) * 2.0, 1.5));
        requests.push(("203.0.113.1", f64::from(second) * 2.0, 1.5));
    }
    timed(&requests)
}

#[test]
fn requests_in_flight_are_shown_and_limited() {
    let folder = Folder::new("in-flight");
    let file = folder.file("access.log", exports());
    let report = json(&["--quota", "2 at once", "--format", TIMED, &file]);
    let policy = &report["policies"][0];
    assert_eq!((&policy["refused"], &policy["touched"], &policy["clients"]), (&1.into(), &1.into(), &3.into()));
    assert_eq!((&policy["in_flight"]["p50"], &policy["in_flight"]["max"]), (&1.into(), &3.into()));
    let limits = policy["curve"]["limits"].as_array().unwrap();
    let refused: Vec<(&Value, &Value)> =
        limits.iter().take(4).map(|limit| (&limit["quota"], &limit["all"]["refused"])).collect();
    let quotas: [Value; 4] = ["1 at once", "2 at once", "3 at once", "5 at once"].map(Value::from);
    assert_eq!(refused, quotas.iter().zip(&[2, 1, 0, 0].map(Value::from)).collect::<Vec<_>>());
    assert!(policy["curve"]["rule"].as_str().unwrap().contains("quota: 3 at once\n"), "{policy}");
    assert!(policy["curve_in_flight"].is_null());
    let text = run(&["--quota", "2 at once", "--format", TIMED, &file]);
    assert!(text.contains("    at once          1         3         3"), "{text}");
    assert!(text.contains("The suggestion is 3 at once"), "{text}");
}

#[test]
fn rate_has_a_limit_of_requests_in_flight_beside_it() {
    let folder = Folder::new("beside");
    let file = folder.file("access.log", exports());
    let html = folder.0.join("report.html");
    let args = ["--quota", "100 per minute", "--format", TIMED, "--html", html.to_str().unwrap(), &file];
    let policy = &json(&args)["policies"][0];
    let beside = &policy["curve_in_flight"];
    assert_eq!(beside["limits"][1]["all"]["refused"], 1, "{beside}");
    let rule = beside["rule"].as_str().unwrap();
    assert!(rule.contains("name: client-at-once\n    quota: 3 at once\n    key: peer-ip"), "{rule}");
    assert_eq!(policy["curve"]["limits"][0]["quota"], "1 per minute, token bucket");
    let html = fs::read_to_string(html).unwrap();
    assert!(html.contains("<h3>Limits of requests in flight</h3>") && html.contains("at once</th>"), "no table");

    let rules = "rules:\n  - name: api\n    quota: [100 per minute, 2 at once]\n    key: peer-ip\n";
    let rules = folder.file("rules.yaml", rules);
    let report = json(&["--rules", &rules, "--format", TIMED, &file]);
    let refused: Vec<&Value> = report["policies"].as_array().unwrap().iter().map(|policy| &policy["refused"]).collect();
    assert_eq!(refused, [&Value::from(0), &Value::from(1)], "all or none");
    let beside = report["policies"][0]["curve_in_flight"]["rule"].as_str().unwrap();
    assert!(beside.starts_with("# beside the rule of the policy api"), "{beside}");

    let rules = folder.file("costly.yaml", "rules: [{name: api, quota: 100 per minute, key: peer-ip, cost: 5}]");
    let policy = &json(&["--rules", &rules, "--format", TIMED, &file])["policies"][0];
    assert_eq!(policy["curve_in_flight"]["limits"][1]["all"]["refused"], 1, "requests are counted, not what they cost");
    assert_eq!(policy["in_flight"]["max"], 3);
}

#[test]
fn log_without_durations_limits_no_requests_in_flight() {
    let folder = Folder::new("durations");
    let file = folder.file("access.log", log::shop());
    let error = error(&["--quota", "2 at once", &file], b"");
    assert!(error.contains("$request_time") && error.contains("--field duration-s"), "{error}");
    let rules = "rules:\n  - name: api\n    quota: [100 per minute, 2 at once]\n    key: peer-ip\n";
    let report = json(&["--rules", &folder.file("rules.yaml", rules), &file]);
    let warnings = report["warnings"].to_string();
    assert!(warnings.contains("does not say how long requests took"), "{warnings}");
    assert!(report["policies"][0]["in_flight"].is_null());
}

/// The window is shorter than a request, so its beginning is not known in time. Its end is.
#[test]
fn request_longer_than_the_window_is_reported() {
    let folder = Folder::new("longer");
    let requests = [("192.0.2.1", 0.0, 300.0), ("198.51.100.1", 100.0, 1.0), ("198.51.100.1", 250.0, 1.0)];
    let file = folder.file("access.log", timed(&requests));
    let report = json(&["--quota", "2 at once", "--format", TIMED, &file]);
    assert!(report["warnings"].to_string().contains("took longer than 1 min: 1 request"), "{}", report["warnings"]);
    let report = json(&["--quota", "2 at once", "--format", TIMED, "--window", "10m", &file]);
    assert!(!report["warnings"].to_string().contains("took longer"), "{}", report["warnings"]);
}

#[test]
fn cost_is_the_content_length_that_the_log_has() {
    let folder = Folder::new("content-length");
    let rules = "rules:\n  - name: uploads\n    quota: 1 kB per hour, fixed window\n    key: peer-ip\n    cost: content-length\n";
    let rules = folder.file("rules.yaml", rules);
    let line = |length| format!("192.0.2.1 1431856800.000 \"POST /a HTTP/1.1\" 200 {length}\n");
    let file = folder.file("access.log", [line("600"), line("300"), line("200")].concat());
    let format = r#"$remote_addr $msec "$request" $status $http_content_length"#;
    let policy = &json(&["--rules", &rules, "--format", format, &file])["policies"][0];
    assert_eq!((&policy["requests"], &policy["refused"]), (&3.into(), &1.into()));
    let limits = policy["curve"]["limits"].as_array().unwrap();
    let of = |limit: u64| limits.iter().find(|one| one["limit"] == limit).unwrap();
    assert_eq!((&of(1_000)["quota"], &of(1_000)["all"]["refused"]), (&"1 kB per hour, fixed window".into(), &1.into()));
    assert_eq!((&of(500)["all"]["refused"], &of(1_500)["all"]["refused"]), (&1.into(), &0.into()));
}

#[test]
fn rules_for_times_of_the_week_apply_at_the_logs_time() {
    let folder = Folder::new("times");
    let rules = "rules:
  - {name: sunday, quota: 5 per minute, key: peer-ip, match: {time: sun UTC}}
  - {name: rest, quota: 5 per minute, key: peer-ip, match: {not: {time: sun UTC}}}
";
    let line =
        |day, second| format!("192.0.2.1 - - [{day}/May/2015:10:05:{second:02} +0000] \"GET / HTTP/1.1\" 200 1\n");
    // The 17th was a Sunday.
    let log: String = (0..8).map(|second| line(17, second)).chain((0..3).map(|second| line(18, second))).collect();
    let report = json(&["--rules", &folder.file("rules.yaml", rules), &folder.file("access.log", log)]);
    let requests =
        report["policies"].as_array().unwrap().iter().map(|policy| (&policy["requests"], &policy["refused"]));
    let expected = [(8, 3), (3, 0)].map(|(requests, refused): (u64, u64)| (requests.into(), refused.into()));
    assert!(requests.eq(expected.iter().map(|(requests, refused): &(Value, Value)| (requests, refused))), "{report}");
}

#[test]
fn windows_of_the_calendar_are_those_of_the_log() {
    let folder = Folder::new("calendar");
    let day = |day: u32, hours: f64| f64::from(day) * 86_400.0 + hours * 3_600.0;
    let log = |requests: &[(&str, f64)]| {
        let requests: Vec<_> = requests.iter().map(|(client, at)| (*client, *at, 0.0)).collect();
        folder.file("access.log", timed(&requests))
    };
    let policy = |quota: &str, log: &str| json(&["--quota", quota, "--format", TIMED, log])["policies"][0].clone();

    // Four requests on each day from May 17 to August 15: 60, 120, 124 and 60 in a month.
    let months: Vec<_> =
        (0..91).flat_map(|at| [0.0, 1.0, 2.0, 3.0].map(|hours| ("192.0.2.1", day(at, hours)))).collect();
    let report = policy("100 per calendar month", &log(&months));
    assert_eq!(report["refused"], 20 + 24, "{report}");
    // From June 15 on, and from July 15 on, there are 30 and 31 days. Before and after there are 29 and 32.
    let report = policy("110 per calendar month from day 15", &log(&months));
    assert_eq!(report["refused"], 6 + 10 + 14, "{report}");

    // One day of Berlin in which there are many requests, on both sides of midnight UTC, and 119 ordinary days.
    let mut days: Vec<_> = (0..120).map(|at| ("192.0.2.1", day(at, 2.0))).collect();
    days.extend((0..12).map(|at| ("192.0.2.1", day(0, 13.4 + f64::from(at) / 10.0))));
    let report = policy("3 per calendar day in Europe/Berlin", &log(&days));
    assert_eq!((&report["refused"], &report["likely_false"]["clients"]), (&10.into(), &1.into()), "{report}");
}
