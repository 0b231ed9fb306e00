//! `tower-ratelimit convert`.

use crate::program::{Folder, Run};

const ENVOY: &[u8] = b"domain: edge
descriptors:
- {key: path, value: /search, descriptors: [{key: remote_address, rate_limit: {unit: minute, requests_per_unit: 6}}]}
- {key: tenant, rate_limit: {unit: day, requests_per_unit: 9}}
";

#[test]
fn converted_file_is_right() {
    let folder = Folder::new();
    let run = folder.run_with(&["convert", "-"], ENVOY);
    assert_eq!((run.code, run.err.as_str()), (Some(0), ""));
    assert!(run.out.contains("key: client-ip\n    match: {path: \"/search\"}\n"), "{}", run.out);
    folder.write("rules.yaml", &run.out);
    let checked = folder.run(&["check", "rules.yaml", "--key", "tenant", "--deny-warnings"]);
    assert_eq!(checked, Run { code: Some(0), out: String::new(), err: String::new() });
}

#[test]
fn problems_of_the_file_are_no_rules() {
    let folder = Folder::with_rules("domain: a\ndescriptors: [{keys: b}]");
    let run = folder.run(&["convert", "rules.yaml"]);
    assert_eq!((run.code, run.out.as_str()), (Some(1), ""));
    assert!(
        run.err.starts_with("rules.yaml:2:16: `keys` is not a field of a descriptor; did you mean `key`?"),
        "{}",
        run.err
    );
    let native = folder.run_with(&["convert", "-"], b"rules: []");
    assert_eq!(native.code, Some(1));
    assert!(native.err.contains("does not have Envoy's form"), "{}", native.err);
    assert_eq!(folder.run(&["convert", "none.yaml"]).code, Some(2));
}
