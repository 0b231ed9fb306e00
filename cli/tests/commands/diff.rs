//! `tower-ratelimit diff`.

use serde_json::{Value, json};

use crate::program::{Folder, Run};

const OLD: &str = "rules:
  - {name: client, quota: 100 per minute, key: client-ip}
  - {name: login, quota: 5 per minute, key: tenant, match: {path: /login}}
  - {name: old, quota: 7 per hour, key: path}
access: {deny: 192.0.2.0/24}
";

const NEW: &str = "
access: {deny: [192.0.2.0/24]}
rules:
  - {name: client, quota: 50 per minute, key: client-ip}
  - {name: sign-in, quota: 5 per minute, key: tenant, match: {path: /login}}
";

const CHANGES: &str = "stricter  client: `quota` was `100 per minute, token bucket`, is `50 per minute, token bucket`
afresh    sign-in: its name was `login`: each client begins with a full allowance; write `was: login` to keep what was used
removed   old: `7 per hour, token bucket`, key path, enforce
";

#[test]
fn changes_are_printed_with_their_rules() {
    let folder = Folder::with_rules(OLD);
    folder.write("new.yaml", NEW);
    let run = folder.run(&["diff", "rules.yaml", "new.yaml"]);
    assert_eq!(run, Run { code: Some(1), out: CHANGES.to_owned(), err: String::new() });
    assert_eq!(folder.run_with(&["diff", "-", "new.yaml"], OLD.as_bytes()), run);
    let same = folder.run(&["diff", "rules.yaml", "rules.yaml"]);
    assert_eq!(same, Run { code: Some(0), out: String::new(), err: String::new() });
    let run = folder.run(&["diff", "--json", "rules.yaml", "new.yaml"]);
    let changes: Value = serde_json::from_str(&run.out).unwrap();
    assert_eq!(changes["changes"].as_array().unwrap().len(), 3);
    let removed = json!({"kind": "removed", "rule": "old", "message": "`7 per hour, token bucket`, key path, enforce"});
    assert_eq!((&changes["changes"][2], run.code), (&removed, Some(1)));
}

#[test]
fn file_with_a_problem_is_not_compared() {
    let folder = Folder::with_rules("rules: [{nam: a}]");
    folder.write("new.yaml", NEW);
    for files in [["rules.yaml", "new.yaml"], ["new.yaml", "rules.yaml"]] {
        let run = folder.run(&["diff", files[0], files[1]]);
        assert_eq!((run.code, run.out.as_str()), (Some(2), ""));
        assert!(run.err.starts_with("rules.yaml:1:9: "), "{}", run.err);
    }
    assert_eq!(folder.run(&["diff", "new.yaml", "none.yaml"]).code, Some(2));
    assert!(folder.run(&["diff", "-", "-"]).err.contains("standard input"));
}
