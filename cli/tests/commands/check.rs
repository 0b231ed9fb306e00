//! `tower-ratelimit check`.

use serde_json::{Value, json};

use crate::program::{Folder, Run};

const RIGHT: &str = "rules:
  - {name: client, quota: 100 per minute, key: client-ip, match: {path: '/v1/{*rest}', action: buy}}
  - {name: customer, plans: {by: plan, quotas: {free: 10/min}, otherwise: free}, key: [tenant, path]}
access: {deny: 192.0.2.0/24}
";

const WRONG: &str = "rules:
  - name: a
    quote: 100/min
    key: client-ip
  - {name: b, quota: 5/s, key: peer-ip, block: 5 per 10 minutes}
";

const PROBLEMS: &str = "3:5: `quote` is not a field of a rule; did you mean `quota`?
    quote: 100/min
    ^
";

#[test]
fn right_file_prints_nothing() {
    let folder = Folder::with_rules(RIGHT);
    let listed = ["check", "rules.yaml", "--key", "tenant", "--key=plan", "--action", "buy"];
    assert_eq!(folder.run(&listed), Run { code: Some(0), out: String::new(), err: String::new() });
    let denied = [&listed[..], &["--deny-warnings"]].concat();
    assert_eq!(folder.run(&denied).code, Some(0));
    assert_eq!(folder.run_with(&["check", "-"], b"rules: []").code, Some(0));
    let none = folder.run_with(&["check", "-", "--deny-warnings"], b"rules: []");
    let note = "<stdin>:1:8: note: the file has no rules, so it limits no request\n";
    assert!(none.code == Some(0) && none.out.starts_with(note), "{none:?}");
}

#[test]
fn problems_are_printed_with_their_places() {
    let folder = Folder::with_rules(WRONG);
    folder.write("right.yaml", "rules: [{name: a, quota: 5 per hour, key: peer-ip}]");
    let run = folder.run(&["check", "right.yaml", "rules.yaml"]);
    assert_eq!((run.code, run.err.as_str()), (Some(1), ""));
    assert!(run.out.starts_with(&format!("rules.yaml:{PROBLEMS}rules.yaml:5:48: ")), "{}", run.out);
    let run = folder.run_with(&["check", "-"], b"rules: {}");
    assert_eq!(run.out, "<stdin>:1:8: `rules` must be a list of rules, not an empty mapping\nrules: {}\n       ^\n");
    assert_eq!(run.code, Some(1));
}

#[test]
fn problems_beyond_a_hundred_are_counted() {
    let folder = Folder::with_rules(&format!("rules:\n{}", "- {}\n".repeat(50)));
    let run = folder.run(&["check", "rules.yaml"]);
    assert!(run.out.ends_with("rules.yaml: and 50 more\n"), "{}", run.out);
}

/// The program cannot know what the application registers.
#[test]
fn names_that_are_not_listed_are_warnings() {
    let folder = Folder::with_rules(RIGHT);
    let run = folder.run(&["check", "rules.yaml", "--key", "tenant", "--key", "plan", "--key", "other"]);
    assert_eq!((run.code, run.err.as_str()), (Some(0), ""));
    let expected = "warning: no file uses what --key other names
rules.yaml:2:96: warning: no action is named `buy`; register it in the program
  - {name: client, quota: 100 per minute, key: client-ip, match: {path: '/v1/{*rest}', action: buy}}
                                                                                               ^
rules.yaml: if the program registers `buy`, add --action buy
";
    assert_eq!(run.out, expected);
    let denied = folder.run(&["check", "rules.yaml", "--deny-warnings"]);
    assert_eq!(denied.code, Some(1));
    let unused =
        ["check", "rules.yaml", "--deny-warnings", "--key=tenant", "--key=plan", "--action=buy", "--action=sell"];
    assert_eq!(folder.run(&unused).out, "warning: no file uses what --action sell names\n");
    assert_eq!(folder.run(&unused).code, Some(1));
}

/// It would be counted for a key that no program registers.
#[test]
fn name_that_is_probably_misspelt_is_a_problem() {
    let folder = Folder::with_rules("rules: [{name: a, quota: 5/s, key: client_ip}]");
    let run = folder.run(&["check", "rules.yaml"]);
    assert_eq!(run.code, Some(1));
    let problem = "rules.yaml:1:36: no key is named `client_ip`; did you mean `client-ip`?\n";
    assert!(run.out.starts_with(problem), "{}", run.out);
    assert!(run.out.ends_with("\nrules.yaml: if the program registers `client_ip`, add --key client_ip\n"));
    assert_eq!(folder.run(&["check", "rules.yaml", "--key", "client_ip"]).code, Some(0));
    folder.write("rules.yaml", RIGHT);
    let run = folder.run(&["check", "rules.yaml", "--key", "tenannt", "--key", "plan", "--action", "buy"]);
    assert!(run.code == Some(1) && run.out.contains("; did you mean `tenannt`?"), "{}", run.out);
    let json = folder.run(&["check", "--json", "rules.yaml", "--key", "tenannt"]);
    let found: Value = serde_json::from_str(&json.out).unwrap();
    assert_eq!(found["files"][0]["problems"][0]["suggestion"], "tenannt");
}

/// One run shows everything.
#[test]
fn warnings_are_shown_beside_problems() {
    let folder = Folder::with_rules(
        "rules:
  - {name: a, quota: 5/s, key: tenant}
  - {name: b, quota: 5/s, key: peer-ip, was: a}
",
    );
    let early = "rules:\n  - {name: a, quota: 5/s, key: tenant}\n  - {name: b, quote: 5/s, key: peer-ip}\n";
    folder.write("early.yaml", early);
    let run = folder.run(&["check", "rules.yaml", "early.yaml"]);
    assert_eq!(run.code, Some(1));
    for line in [
        "rules.yaml:3:46: `was` names the rule in line 2",
        "rules.yaml:2:32: warning: no key is named `tenant`",
        "early.yaml:3:15: `quote` is not a field of a rule",
        "early.yaml:2:32: warning: no key is named `tenant`",
    ] {
        assert!(run.out.contains(line), "{line}: {}", run.out);
    }
}

/// It is meant, so it does not fail a deployment.
#[test]
fn rules_that_never_refuse_and_unused_templates_are_warnings() {
    let folder = Folder::with_rules(
        "templates: {t: {key: client-ip}}
rules:
  - {name: api, quota: 100/min, key: client-ip, match: {path: '/v1/{*rest}'}}
  - {name: search, quota: 500/min, key: client-ip, match: {path: /v1/search}}
  - {name: login, quota: 5/min, key: client-ip, match: {path: /v1/login}}
",
    );
    let run = folder.run(&["check", "rules.yaml"]);
    let lines: Vec<&str> = run.out.lines().filter(|line| line.contains("warning: ")).collect();
    assert_eq!(run.code, Some(0));
    assert_eq!(
        lines,
        [
            "rules.yaml:1:13: warning: no rule uses the template `t`: write `use` in a rule, or leave the template out",
            "rules.yaml:4:12: warning: the quota of the rule `search` never refuses a request, because the rule `api` \
             in line 3 applies to the same requests, too, and allows no more: to give these requests an allowance of \
             their own, leave them out of `api` by `not`",
        ]
    );
    assert_eq!(folder.run(&["check", "rules.yaml", "--deny-warnings"]).code, Some(1));
}

#[test]
fn disabled_rules_are_noted() {
    let folder = Folder::with_rules(
        "rules:
  - {name: a, quota: 5/s, key: peer-ip}
  - {name: b, quota: 5/s, key: peer-ip, match: {path: /b}, enabled: false}
",
    );
    let run = folder.run(&["check", "rules.yaml", "--deny-warnings"]);
    let expected = "rules.yaml:3:12: note: the rule `b` is not applied, because `enabled` is false
  - {name: b, quota: 5/s, key: peer-ip, match: {path: /b}, enabled: false}
           ^
";
    assert_eq!((run.code, run.out.as_str()), (Some(0), expected));
    let json: Value = serde_json::from_str(&folder.run(&["check", "rules.yaml", "--json"]).out).unwrap();
    assert_eq!((&json["files"][0]["warnings"], &json["files"][0]["notes"][0]["line"]), (&json!([]), &json!(3)));
}

#[test]
fn rules_that_refuse_every_request_are_noted() {
    let folder = Folder::with_rules(
        "rules:
  - {name: a, quota: 0/s, key: peer-ip, match: {path: /a}}
  - {name: b, quota: 0/s, key: peer-ip, match: {path: /b}, mode: shadow}
  - {name: c, plans: {by: header x-plan, quotas: {free: 0/s, pro: 5/s, test: 0/s}, otherwise: free}, key: peer-ip}
",
    );
    let run = folder.run(&["check", "rules.yaml", "--deny-warnings"]);
    let expected =
        "rules.yaml:2:22: note: the quota of the rule `a` is 0, so each request that it applies to is refused; \
                    `enabled: false` switches a rule off
  - {name: a, quota: 0/s, key: peer-ip, match: {path: /a}}
                     ^
rules.yaml:4:57: note: the plan `free` of the rule `c` is 0, so each request of this plan and each request that names \
                    no plan of the rule are refused
  - {name: c, plans: {by: header x-plan, quotas: {free: 0/s, pro: 5/s, test: 0/s}, otherwise: free}, key: peer-ip}
                                                        ^
rules.yaml:4:78: note: the plan `test` of the rule `c` is 0, so each request of this plan is refused
  - {name: c, plans: {by: header x-plan, quotas: {free: 0/s, pro: 5/s, test: 0/s}, otherwise: free}, key: peer-ip}
                                                                             ^
";
    assert_eq!((run.code, run.out.as_str()), (Some(0), expected));
}

#[test]
fn warnings_beyond_a_hundred_are_counted() {
    let rule = |n: usize| format!("  - {{name: r{n}, quota: 5/s, key: =unknown={n}}}\n");
    let folder = Folder::with_rules(&format!("rules:\n{}", (0..150).map(rule).collect::<String>()));
    let run = folder.run(&["check", "rules.yaml"]);
    assert_eq!((run.code, run.out.matches("warning: ").count()), (Some(0), 101));
    assert!(run.out.contains("\nrules.yaml: warning: and 50 more\n"), "{}", run.out);
}

#[test]
fn ready_made_name_cannot_be_listed() {
    let folder = Folder::with_rules(RIGHT);
    for name in ["client-ip", "header", "two words", ""] {
        let run = folder.run(&["check", "rules.yaml", "--key", name]);
        assert_eq!((run.code, run.out.as_str()), (Some(2), ""));
        assert!(run.err.starts_with("error: no key can be registered as `"), "{}", run.err);
    }
}

#[test]
fn file_that_cannot_be_read_is_trouble_and_others_are_checked() {
    let folder = Folder::with_rules(WRONG);
    let run = folder.run(&["check", "gone.yaml", "rules.yaml"]);
    assert_eq!(run.code, Some(2));
    assert!(run.err.starts_with("error: gone.yaml cannot be read: "), "{}", run.err);
    assert!(run.out.starts_with("rules.yaml:3:5: "), "{}", run.out);
}

#[test]
fn json_has_the_same() {
    let folder = Folder::with_rules(WRONG);
    folder.write("names.yaml", RIGHT);
    let run = folder.run(&["check", "--json", "rules.yaml", "names.yaml", "gone.yaml"]);
    assert_eq!((run.code, run.out.lines().count()), (Some(2), 1));
    let found: Value = serde_json::from_str(&run.out).unwrap();
    assert_eq!(
        found["files"][0]["problems"][0],
        json!({
            "line": 3,
            "column": 5,
            "message": "`quote` is not a field of a rule; did you mean `quota`?",
            "suggestion": "quota",
            "excerpt": "    quote: 100/min",
        })
    );
    assert_eq!(found["files"][1]["problems"], json!([]));
    let warnings = found["files"][1]["warnings"].as_array().unwrap();
    let lines: Vec<&Value> = warnings.iter().map(|warning| &warning["line"]).collect();
    assert_eq!(lines, [2, 3, 3], "{warnings:?}");
    assert!(found["files"][2]["trouble"].as_str().unwrap().contains("gone.yaml"));
}

#[test]
fn help_and_version_are_printed() {
    let folder = Folder::new();
    let version = folder.run(&["--version"]);
    assert_eq!(version.out, concat!("tower-ratelimit ", env!("CARGO_PKG_VERSION"), "\n"));
    for arguments in [&["--help"][..], &["check", "--help"], &["explain", "-h"]] {
        let help = folder.run(arguments);
        assert_eq!((help.code, help.err.as_str()), (Some(0), ""), "{arguments:?}");
        assert!(help.out.contains("Usage: tower-ratelimit"), "{}", help.out);
    }
    for (wrong, expected) in [
        (&[][..], "Usage: tower-ratelimit <COMMAND>"),
        (&["chek"], "similar subcommands exist: 'schema', 'check'"),
        (&["check"], "<FILE>..."),
        (&["check", "--jsn", "-"], "a similar argument exists: '--json'"),
    ] {
        let run = folder.run(wrong);
        assert_eq!((run.code, run.out.as_str()), (Some(2), ""), "{wrong:?}");
        assert!(run.err.contains(expected), "{}", run.err);
    }
}
