//! The examples and rules of draft-ietf-httpapi-ratelimit-headers, RFC 9110 and gRPC.

use super::*;

#[test]
fn draft_11_lists_are_joined_by_name() {
    means(
        r#"RateLimit-Policy: "burst";q=100;w=60,"daily";q=1000;w=86400
           RateLimit: "burst";r=8;t=1, "daily";r=498;t=69076"#,
        &["burst: 8/100 per 60s, reset 1s", "daily: 498/1000 per 86400s, reset 69076s"],
        None,
    );
    means(r#"RateLimit: "default";r=50;t=30"#, &["default: 50/?, reset 30s"], None);
    means(r#"RateLimit: "default";r=999;pk=:dHJpYWwxMjEzMjM=:"#, &["default: 999/?, of trial121323"], None);
    means(r#"RateLimit: "default";r=0;t=5"#, &["default: 0/?, reset 5s"], Some(5.0));
    means(
        r#"RateLimit-Policy: "peruser";q=65535;qu="content-bytes";w=10;pk=:sdfjLJUOUH==:"#,
        &["peruser: ?/65535 per 10s, unit content-bytes, of \\xb1\\xd7\\xe3,\\x95\\x0eP"],
        None,
    );
}

/// This crate's servers say more than whole seconds can.
#[test]
fn precise_parameters_are_read_beside_those_of_the_draft() {
    let reads = |item: &str, expected: &str, wait| means(&format!("RateLimit: {item}"), &[expected], wait);
    reads(r#""p";r=49;t=1;tower-r=0;tower-ms=20"#, "p: 0/?, reset 20ms", Some(0.02));
    reads(r#""p";r=50;t=1;tower-r=9;tower-ms=180"#, "p: 9/?, reset 180ms", None);
    reads(r#""p";r=0;t=2;tower-ms=1050"#, "p: 0/?, reset 1.05s", Some(1.05));
    // A proxy made the draft's parameters stricter.
    reads(r#""p";r=3;t=1;tower-r=9;tower-ms=180"#, "p: 3/?, reset 180ms", None);
    reads(r#""p";r=0;t=5;tower-ms=20"#, "p: 0/?, reset 5s", Some(5.0));
    // Values of another type are those of another server's parameters.
    reads(r#""p";r=0;t=5;tower-ms="soon";tower-r"#, "p: 0/?, reset 5s", Some(5.0));
}

#[test]
fn retry_after_takes_precedence_over_resets() {
    means("Retry-After: 5\nRateLimit: \"daily\";r=0;t=9000", &["daily: 0/?, reset 9000s"], Some(5.0));
    means("Retry-After: 0\nRateLimit: \"daily\";r=0;t=9000", &["daily: 0/?, reset 9000s"], Some(9000.0));
    means("Retry-After: 7\nRetry-After: 5", &[], Some(7.0));
    // A proxy joins lines with commas.
    for (joined, wait) in [
        ("1, 2", Some(2.0)),
        ("2,1", Some(2.0)),
        ("5, soon", Some(5.0)),
        (", 3,", Some(3.0)),
        ("soon, later", None),
        ("-1, ,", None),
        ("10, Tue, 16 Jan 2024 16:00:30 GMT", Some(30.0)),
        ("Tue, 16 Jan 2024 16:00:30 GMT, 40", Some(40.0)),
        ("Tue, 16 Jan 2024 16:00:30 GMT, Tue, 16 Jan 2024 16:00:20 GMT", Some(30.0)),
    ] {
        means(&format!("Retry-After: {joined}"), &[], wait);
    }
}

#[test]
fn retry_after_date_is_measured_against_the_servers_date() {
    means("Retry-After: Tue, 16 Jan 2024 16:00:30 GMT", &[], Some(30.0));
    means("Date: Tue, 16 Jan 2024 15:00:00 GMT\nRetry-After: Tue, 16 Jan 2024 15:00:10 GMT", &[], Some(10.0));
    means("Date: Tue, 16 Jan 2024 17:00:00 GMT\nRetry-After: Tue, 16 Jan 2024 17:00:10 GMT", &[], Some(10.0));
    means("Date: nonsense\nRetry-After: Tue, 16 Jan 2024 16:00:30 GMT", &[], Some(30.0));
}

/// The fields of the draft, and the parameters that are not its own.
#[test]
fn well_formed_lists_are_read() {
    for (value, policies) in [
        (r#""burst";q=100;w=60,"daily";q=1000;w=86400"#, &["burst: ?/100 per 60s", "daily: ?/1000 per 86400s"][..]),
        (r#""sliding";q=100;w=60;burst=1000"#, &["sliding: ?/100 per 60s"]),
        (r#""inflight";q=8;qu="concurrent-requests""#, &["inflight: ?/8, unit concurrent-requests"]),
        (r#""name with \"q\" and \\";q=1;w=1"#, &[r#"name with "q" and \: ?/1 per 1s"#]),
        (r#""default"; q=100; w=60; pk=:ZDIwZjM2YWY2NDBi:"#, &["default: ?/100 per 60s, of d20f36af640b"]),
        (r#""default";q=100;w=60;q=50"#, &["default: ?/50 per 60s"]),
        (r#""zero";q=0;w=60"#, &["zero: ?/0 per 60s"]),
        (r#""max";q=999999999999999;w=999999999999999"#, &["max: ?/999999999999999"]),
        (r#""burst";q=10;w=1;acme-cost=2.5;acme=?1;acme2=token;acme3=-1"#, &["burst: ?/10 per 1s"]),
    ] {
        means(&format!("RateLimit-Policy: {value}"), policies, None);
    }
    for (value, policies, wait) in [
        (r#""default";r=50;t=30"#, &["default: 50/?, reset 30s"][..], None),
        ("\"a\";r=1;t=1\t,\t\"b\";r=2;t=2", &["a: 1/?, reset 1s", "b: 2/?, reset 2s"], None),
        (r#""default";r=5;t=0"#, &["default: 5/?, reset 0ns"], None),
        (r#""default";r=0;t=0"#, &["default: 0/?, reset 0ns"], None),
        (r#""default";r=012;t=5"#, &["default: 12/?, reset 5s"], None),
        (r#""default";r=0"#, &["default: 0/?"], None),
        (r#""default";r=0;t=5;pk=:dHJpYWw:"#, &["default: 0/?, reset 5s, of trial"], Some(5.0)),
        ("\"a\";r=0;t=1\nRateLimit: \"b\";r=0;t=2", &["a: 0/?, reset 1s", "b: 0/?, reset 2s"], Some(2.0)),
    ] {
        means(&format!("RateLimit: {value}"), policies, wait);
    }
}

/// The drafts say that a malformed field is ignored as a whole.
#[test]
fn malformed_lists_are_ignored_as_a_whole() {
    for value in [
        "default;q=100;w=60",
        r#""fixed window";"api";q=500;w=300"#,
        r#""default";q=100;w=0"#,
        r#""default";w=60"#,
        r#""default";q=-1;w=60"#,
        r#""default";q=100;w=1.5"#,
        r#""default";q="100";w=60"#,
        r#""default";q=100;w=60;pk="user-12345""#,
        r#""default";q=100;w=60;pk=:_-Ah:"#,
        r#""default";q=100;w=60;qu=requests"#,
        r#""default";q=100;w=60,"#,
        "",
        "\"d\u{e9}faut\";q=100;w=60",
        r#""default" ;q=100;w=60"#,
        r#""default";Q=100;w=60"#,
        "'default';q=100;w=60",
        r#"("a" "b");q=1;w=1"#,
        r#""big";q=1000000000000000;w=60"#,
        r#""good";q=1;w=1, bad"#,
    ] {
        means(&format!("RateLimit-Policy: {value}"), &[], None);
    }
    for value in [
        r#""default";t=1"#,
        r#""default";r;t=5"#,
        r#""default";r=-1;t=5"#,
        r#""default";r=5;t=2.5"#,
        r#""default";a=50;w=30"#,
        r#""good";r=0;t=5, "bad""#,
    ] {
        means(&format!("RateLimit: {value}"), &[], None);
    }
}

#[test]
fn lists_are_joined_by_partition() {
    means(
        r#"RateLimit-Policy: "a";q=1;w=1;pk=:eA==:, "a";q=2;w=2;pk=:eQ==:
           RateLimit: "a";r=0;t=3;pk=:eQ==:"#,
        &["a: 0/2 per 2s, reset 3s, of y", "a: ?/1 per 1s, of x"],
        Some(3.0),
    );
    means(
        r#"RateLimit-Policy: "a";q=2;w=2
           RateLimit: "a";r=0;t=3;pk=:eQ==:, "a";r=1;t=4;pk=:eA==:"#,
        &["a: 0/2 per 2s, reset 3s, of y", "a: 1/2 per 2s, reset 4s, of x"],
        Some(3.0),
    );
}

#[test]
fn draft_07_is_read() {
    means(
        "RateLimit: limit=100, remaining=50, reset=5\nRateLimit-Policy: 100;w=60",
        &["50/100 per 60s, reset 5s"],
        None,
    );
    means("RateLimit: remaining=0,limit=100,reset=5", &["0/100, reset 5s"], Some(5.0));
    means(
        "RateLimit: limit=10, remaining=1, reset=7\nRateLimit-Policy: 10;w=1, 50;w=60, 1000;w=3600, 5000;w=86400",
        &["1/10 per 1s, reset 7s", "?/1000 per 3600s", "?/50 per 60s", "?/5000 per 86400s"],
        None,
    );
}

#[test]
fn drafts_00_to_06_are_read() {
    means("RateLimit-Limit: 10\nRateLimit-Remaining: 0\nRateLimit-Reset: 50", &["0/10, reset 50s"], Some(50.0));
    means(
        "RateLimit-Limit: 100, 100;w=60\nRateLimit-Remaining: 99\nRateLimit-Reset: 50",
        &["99/100 per 60s, reset 50s"],
        None,
    );
    means(
        "RateLimit-Limit: 10, 10;w=1;burst=1000, 1000;w=3600\nRateLimit-Remaining: 0\nRateLimit-Reset: 1",
        &["0/10 per 1s, reset 1s", "?/1000 per 3600s"],
        Some(1.0),
    );
    means(
        "RateLimit-Limit: 100\nRateLimit-Policy: 100;w=60;comment=\"fixed window\"\nRateLimit-Remaining: 3",
        &["3/100 per 60s"],
        None,
    );
}

#[test]
fn grpc_waits_are_read() {
    let five = "CAgSE3JhdGUgbGltaXQgZXhjZWVkZWQaMAoodHlwZS5nb29nbGVhcGlzLmNvbS9nb29nbGUucnBjLlJldHJ5SW5mbxIECgIIBQ";
    let half =
        "CAgSE3JhdGUgbGltaXQgZXhjZWVkZWQaNgoodHlwZS5nb29nbGVhcGlzLmNvbS9nb29nbGUucnBjLlJldHJ5SW5mbxIKCggIARCAyrXuAQ";
    let zero = "CAgaLgoodHlwZS5nb29nbGVhcGlzLmNvbS9nb29nbGUucnBjLlJldHJ5SW5mbxICCgA";
    for (details, wait) in [(five, Some(5.0)), (half, Some(1.5)), (zero, None), ("", None), ("!", None), ("CAg", None)]
    {
        means(&format!("grpc-status-details-bin: {details}"), &[], wait);
    }
    means(&format!("grpc-status-details-bin: {five}=="), &[], Some(5.0));
    for (pushback, wait, forbids) in [
        ("600", Some(0.6), false),
        ("0", None, false),
        ("-1", None, true),
        ("2147483648", None, true),
        ("soon", None, true),
        ("600\ngrpc-retry-pushback-ms: 600", Some(0.6), true),
    ] {
        let advice = read(&format!("grpc-retry-pushback-ms: {pushback}"));
        assert_eq!((advice.wait().duration(), advice.forbids_retry()), (wait.map(seconds), forbids), "{pushback}");
    }
    let all = format!("grpc-retry-pushback-ms: 600\ngrpc-status-details-bin: {half}\nretry-after: 1");
    means(&all, &[], Some(1.5));
}

#[test]
fn quotas_are_joined_within_one_family_of_names() {
    means(
        "X-RateLimit-Limit: 100\nX-RateLimit-Remaining: 3\nRateLimit-Policy: 100;w=60\nRateLimit-Limit: 100",
        &["3/100", "?/100 per 60s"],
        None,
    );
}

#[test]
fn reset_after_is_preferred_because_it_needs_no_clock() {
    for lines in [
        "X-RateLimit-Reset: 1705420900\nX-RateLimit-Reset-After: 1.5",
        "X-RateLimit-Reset-After: 1.5\nX-RateLimit-Reset: 1705420900",
    ] {
        means(&format!("X-RateLimit-Remaining: 0\n{lines}"), &["0/?, reset 1.5s"], Some(1.5));
    }
}
