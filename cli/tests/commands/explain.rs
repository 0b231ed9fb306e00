//! `tower-ratelimit explain`.

use serde_json::Value;

use crate::program::Folder;

const RULES: &str = "access: {allow: 10.0.0.0/8, deny: 203.0.113.7}
rules:
  - {name: client, quota: '100 per minute, burst 20', key: client-ip, match: {path: '/v1/{*rest}'}}
  - {name: customer, plans: {by: header x-plan, quotas: {free: 10/min, pro: 600/min}, otherwise: free}, key: tenant}
  - {name: buy, quota: [5/min, 20/h], key: [client-ip, path], match: {action: buy}, cost: 2, candidate: 1/min}
  - {name: api, quota: 3/s, key: host, match: {host: '*.example.com', method: [POST, PUT], header: {x-beta: '*'}}}
";

fn explain(arguments: &[&str]) -> String {
    let folder = Folder::with_rules(RULES);
    let run = folder.run(&[&["explain", "rules.yaml"], arguments].concat());
    assert_eq!((run.code, run.err.as_str()), (Some(0), ""), "{run:?}");
    run.out
}

#[test]
fn names_that_were_not_given_are_noted() {
    assert_eq!(
        explain(&["--path", "/v1/x?y", "--client", "2001:db8::7:8"]),
        "note: line 4: only the program knows the key `tenant`; it is <tenant> here, as there is no --key tenant=VALUE
note: line 5: only the program knows which requests are `buy`; this one is not, as there is no --action buy
passes: allowed
client: charges 1 to 2001:db8::
  100 per minute, burst 20, token bucket: 19 of 20 left, all in 600ms
customer: charges 1 to <tenant>
  10 per minute, debt up to 590, token bucket: 9 of 10 left, all in 6s
buy-5-per-minute, buy-20-per-hour: does not apply: the action is not buy
buy-candidate (shadow): does not apply: the action is not buy
api: does not apply: the method is not POST or PUT
"
    );
}

#[test]
fn whole_request_can_be_described() {
    let request = ["--method", "POST", "--host", "a.example.com:80", "--header", "x-beta: 1", "--header", "X-Plan:pro"];
    let names = ["--client", "192.0.2.1", "--key", "tenant=a, b=", "--action", "buy"];
    assert_eq!(
        explain(&[&request[..], &names].concat()),
        "passes: shadow_limited
client: does not apply: the path is not /v1/{*rest}
customer: charges 1 to \"a, b=\"
  600 per minute, token bucket: 599 of 600 left, all in 100ms
buy-5-per-minute, buy-20-per-hour: charges 2 to 192.0.2.1, /
  buy-5-per-minute: 5 per minute, token bucket: 3 of 5 left, all in 24s
  buy-20-per-hour: 20 per hour, token bucket: 18 of 20 left, all in 6m
buy-candidate (shadow): charges 2 to 192.0.2.1, /
  1 per minute, token bucket: 1 of 1 left, and a cost of 2 never fits
api: charges 1 to a.example.com
  3 per second, token bucket: 2 of 3 left, all in 334ms
"
    );
}

#[test]
fn what_a_rule_leaves_out_is_explained() {
    let folder = Folder::with_rules(
        "rules:
  - name: client
    quota: 5/s
    key: client-ip
    match:
      path: '/v1/{*rest}'
      not: [{client: [10.0.0.0/8, 192.0.2.0/24]}, {method: GET, path: [/v1/health, /v1/ready], header: {x-a: '1*'}}]
",
    );
    let explain = |request: &[&str]| {
        let run = folder.run(&[&["explain", "rules.yaml"], request].concat());
        run.out.lines().nth(1).unwrap_or_default().to_owned()
    };
    for (request, expected) in [
        (
            &["--path=/v1/a", "--client=10.1.2.3"][..],
            "does not apply: it leaves out the client 10.0.0.0/8 or 192.0.2.0/24",
        ),
        (
            &["--path=/v1/ready", "--client=203.0.113.7", "--header=x-a: 12"],
            "does not apply: it leaves out the method GET and the header x-a: 1* and the path /v1/health or /v1/ready",
        ),
        (&["--path=/v1/ready", "--client=203.0.113.7"], "charges 1 to 203.0.113.7"),
        (&["--path=/v3", "--client=10.1.2.3"], "does not apply: the path is not /v1/{*rest}"),
    ] {
        assert_eq!(explain(request), format!("client: {expected}"), "{request:?}");
    }
}

#[test]
fn time_of_the_request_is_explained() {
    let folder = Folder::with_rules(
        "rules:
  - {name: office, quota: 5/s, key: global, match: {time: mon-fri 08:00-18:00 +01:00}}
  - {name: night, quota: 5/s, key: global, match: {not: {time: ['06:00-22:00 UTC', sun UTC], method: GET}}}
",
    );
    let explain = |at: &str| {
        let run = folder.run(&["explain", "rules.yaml", "--client=192.0.2.1", "--at", at]);
        run.out.lines().filter(|line| !line.starts_with(' ')).skip(1).collect::<Vec<_>>().join("\n")
    };
    assert_eq!(
        explain("2026-11-25T07:00:00Z"),
        "office: charges 1 to (all requests)
night: does not apply: it leaves out the method GET and the time 06:00-22:00 UTC or sun UTC, which ends in 15h"
    );
    assert_eq!(
        explain("2026-11-27T23:30:00+01:00"),
        "office: does not apply: the time is not mon-fri 08:00-18:00 +01:00, which begins in 2days 8h 30m
night: charges 1 to (all requests)"
    );
    let run = folder.run(&["explain", "rules.yaml", "--at", "noon"]);
    assert_eq!(run.code, Some(2));
    assert!(run.err.contains("write it like `2026-11-25T09:00:00+01:00`"), "{run:?}");
}

#[test]
fn windows_at_the_time_of_the_request_are_explained() {
    let folder = Folder::with_rules(
        "rules:
  - {name: plan, quota: 100 per calendar month from day 31, key: global}
  - {name: day, quota: 5 per calendar day in Europe/Berlin, key: global}
  - {name: year, quota: 1000 per calendar year, key: global}
",
    );
    let run = folder.run(&["explain", "rules.yaml", "--client=192.0.2.1", "--at=2026-03-29T01:30:00+02:00"]);
    let quotas = run.out.lines().filter(|line| line.starts_with("  ")).collect::<Vec<_>>();
    // The clocks go forward in that night.
    assert_eq!(
        quotas,
        [
            "  100 per calendar month from day 31: 99 of 100 left, all in 2days 30m",
            "  5 per calendar day in Europe/Berlin: 4 of 5 left, all in 22h 30m",
            "  1000 per calendar year: 999 of 1000 left, all in 278days 30m",
        ],
        "{run:?}"
    );
}

#[test]
fn disabled_rule_is_explained() {
    let folder = Folder::with_rules(
        "rules:
  - {name: a, quota: 5/s, key: global}
  - {name: b, quota: 5/s, key: client-ip, match: {path: /b}, enabled: false}
",
    );
    for path in ["/", "/b"] {
        let run = folder.run(&["explain", "rules.yaml", "--client=192.0.2.1", "--path", path]);
        assert!(run.out.ends_with("\nb: does not apply: `enabled` is false\n"), "{path}: {}", run.out);
    }
}

#[test]
fn request_without_an_address_is_noted() {
    let text = explain(&["--path=/v1/x", "--key", "tenant=7"]);
    assert!(text.contains("note: the request has no client's address, as there is no --client IP\n"), "{text}");
    assert!(text.contains("\nrefused: key_missing\nclient: refuses the request: it has no key\n"), "{text}");
}

#[test]
fn descriptors_are_given_for_envoys_form() {
    let text = "{domain: edge, descriptors: [
        {key: path, value: '/search*', descriptors: [{key: tenant, rate_limit: {unit: second, requests_per_unit: 5}}]},
        {key: address, rate_limit: {unit: minute, requests_per_unit: 100}}]}";
    let folder = Folder::with_rules(text);
    let explain = |arguments: &[&str]| folder.run(&[&["explain", "rules.yaml"], arguments].concat()).out;
    let given = ["--descriptor", "path=/search/a,tenant=7", "--descriptor", "address=::1", "--descriptor=address=::2"];
    let explained = explain(&given);
    let lines: Vec<&str> = explained.lines().filter(|line| !line.starts_with("  ")).collect();
    let expected = [
        "passes: allowed",
        "edge:path=/search*,tenant: charges 1 to /search/a, \"7\"",
        "edge:address: charges 1 to \"::1\"",
    ];
    assert_eq!(lines[..3], expected, "{explained}");
    assert_eq!(lines[3..], ["edge:address: charges 1 to \"::2\""], "{explained}");
    assert!(explain(&[]).starts_with("note: the request has no descriptor, as there is no --descriptor KEY=VALUE\n"));
    let native =
        Folder::with_rules(RULES).run(&[&["explain", "rules.yaml", "--client=192.0.2.1"], &given[..]].concat());
    assert!(
        native.out.contains("note: no rule uses --descriptor, as the file does not have Envoy's form\n"),
        "{native:?}"
    );
}

#[test]
fn access_list_decides() {
    let text = explain(&["--client", "203.0.113.7", "--key=tenant=7"]);
    let said =
        "\nrefused: denied; an access list denies 203.0.113.7/32\nclient: is not asked: an access list decides\n";
    assert!(text.contains(said), "{text}");
    let text = explain(&["--client", "10.1.2.3", "--key=tenant=7"]);
    assert!(text.contains("\npasses: exempt; an access list allows 10.0.0.0/8\n"), "{text}");
}

#[test]
fn json_has_the_explanation_and_the_notes() {
    let json: Value = serde_json::from_str(&explain(&["--json", "--client=192.0.2.1", "--key=unused=1"])).unwrap();
    let notes = json["notes"].as_array().unwrap();
    assert_eq!(notes.len(), 3, "{notes:?}");
    assert_eq!(notes[0], "no rule uses what --key unused names");
    let explanation = &json["explanation"];
    assert_eq!(explanation["passes"], true);
    assert_eq!(explanation["rules"][1]["key"], "<tenant>");
    assert_eq!(explanation["rules"][1]["statuses"][0]["remaining"], 9);
    assert_eq!(explanation["rules"][2]["not_charged"], "action");
}

#[test]
fn file_with_problems_is_not_explained() {
    let folder = Folder::with_rules("rules: [{name: a, quota: 5/s, key: client-ip, cost: 0}]");
    let run = folder.run(&["explain", "rules.yaml"]);
    assert_eq!((run.code, run.out.as_str()), (Some(1), ""));
    assert!(run.err.starts_with("rules.yaml:1:53: "), "{}", run.err);
    assert_eq!(folder.run(&["explain", "gone.yaml"]).code, Some(2));
}

#[test]
fn option_that_is_wrong_is_refused() {
    let folder = Folder::with_rules(RULES);
    for (option, value, expected) in [
        ("--path", "v1", "slash"),
        ("--path", "http://a/b", "slash"),
        ("--path", "/a b", "invalid"),
        ("--method", "G T", "--method"),
        ("--header", "x-plan", "write it like"),
        ("--header", "x plan: 1", "is not the name of a header"),
        ("--header", "x: a\nb", "control characters"),
        ("--host", "a\u{7f}", "control characters"),
        ("--client", "192.0.2", "--client"),
        ("--key", "tenant", "write it like"),
        ("--descriptor", "path=a,tenant", "write it like"),
        ("--key", "client-ip=1", "no key can be registered"),
    ] {
        let run = folder.run(&["explain", "rules.yaml", option, value]);
        assert_eq!((run.code, run.out.as_str()), (Some(2), ""), "{option} {value}");
        assert!(run.err.starts_with("error: ") && run.err.contains(expected), "{option} {value}: {}", run.err);
    }
}

/// Every quota of a file has room in the limiter that explains it.
#[test]
fn largest_log_is_explained() {
    let folder = Folder::with_rules("rules: [{name: a, quota: '1000000 per day, sliding log', key: global}]");
    let run = folder.run(&["explain", "rules.yaml"]);
    assert_eq!(run.code, Some(0), "{run:?}");
    assert!(run.out.contains("999999 of 1000000 left"), "{}", run.out);
}
