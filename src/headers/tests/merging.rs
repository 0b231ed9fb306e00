//! Merging with headers that the response already has.

use super::*;

#[track_caller]
fn assert_merged(format: Headers, existing: &[(&'static str, &str)], decision: ChargeDecision, expected: &[&str]) {
    let headers = Case { format, statuses: vec![(0, decision)], existing, ..Case::default() }.run();
    assert_lines(&headers, expected);
}

#[test]
fn merged_lists_take_each_policy_from_one_source() {
    let merged = |existing: &[(&'static str, &str)], expected: &[&str]| {
        assert_merged(Headers::draft_11(), existing, allowed(100, 50, secs(30)), expected);
    };
    // another policy
    merged(
        &[("ratelimit", "\"inner\";r=3;t=9"), ("ratelimit-policy", "\"inner\";q=5;w=10")],
        &[
            "ratelimit-policy: \"inner\";q=5;w=10, \"default\";q=100;w=60",
            "ratelimit: \"inner\";r=3;t=9, \"default\";r=50;t=30",
        ],
    );
    // the same policy with unknown parameters, where either source is stricter
    let ours = "ratelimit-policy: \"default\";q=100;w=60";
    merged(
        &[("ratelimit", "\"default\";r=49;t=9;acme=1.5"), ("ratelimit-policy", "\"default\";q=100;w=60;burst=7")],
        &["ratelimit-policy: \"default\";q=100;w=60;burst=7", "ratelimit: \"default\";r=49;t=9;acme=1.5"],
    );
    merged(
        &[("ratelimit", "\"default\";r=51;t=90"), ("ratelimit-policy", "\"default\";q=100;w=59")],
        &[ours, "ratelimit: \"default\";r=50;t=30"],
    );
    merged(&[("ratelimit", "\"default\";r=50;t=31")], &["ratelimit: \"default\";r=50;t=31"]);
    merged(
        &[("ratelimit", "\"default\";r=49"), ("ratelimit-policy", "\"a\";q=1")],
        &["ratelimit-policy: \"a\";q=1", "ratelimit: \"default\";r=49"],
    );
    merged(&[("ratelimit", "\"default\";r=50")], &[ours, "ratelimit: \"default\";r=50;t=30"]);
    merged(&[("ratelimit-policy", "\"default\";q=99;w=60")], &[ours, "ratelimit: \"default\";r=50;t=30"]);
    merged(
        &[("ratelimit-policy", "\"a\";q=1;acme=@-1, \"default\";q=9;w=6, \"default\";q=8;w=6")],
        &["ratelimit-policy: \"a\";q=1;acme=@-1, \"default\";q=100;w=60", "ratelimit: \"default\";r=50;t=30"],
    );
    // of a parameter that occurs twice, the last value counts
    merged(
        &[("ratelimit", "\"a\";r;t=x;r=1;t=2"), ("ratelimit-policy", "\"a\";q=1.5;w=0;qu=1;q=5;w=10;qu=\"u\"")],
        &[
            "ratelimit-policy: \"a\";q=1.5;w=0;qu=1;q=5;w=10;qu=\"u\", \"default\";q=100;w=60",
            "ratelimit: \"a\";r;t=x;r=1;t=2, \"default\";r=50;t=30",
        ],
    );
    // several lines become one, spaces as in RFC 9651
    merged(
        &[("ratelimit", "\"a\";r=1"), ("ratelimit", "\"b\"; r=2;t=2\t,\t\"c\";r=3;pk=:dHJpYWwxMjEzMjM=:")],
        &[ours, "ratelimit: \"a\";r=1, \"b\"; r=2;t=2, \"c\";r=3;pk=:dHJpYWwxMjEzMjM=:, \"default\";r=50;t=30"],
    );
}

#[test]
fn unreadable_list_is_replaced() {
    for foreign in [
        "default;r=1;t=1",
        "\"fixed window\";\"api\";r=500",
        "\"default\";r=-1",
        "\"default\";t=1",
        "\"default\";r;t=5",
        "\"default\";r=1;t=2.5",
        "\"default\";r=1;r",
        "\"default\";r=1;t=2;t=?1",
        "\"default\";r=1;pk=1",
        "\"default\";r=1,",
        "\"default\" ;r=1",
        "\"default\";R=1",
        "'default';r=1",
        "(\"a\" \"b\");r=1",
        "\"big\";r=1000000000000000",
        "limit=100, remaining=50, reset=5",
        "\"default\";a=50;w=30",
        "\"open;r=1",
        "\"x\";r=1;pk=:_-Ah:",
        "\"x\";r=1 \"y\";r=2",
        "\"x\";r=1;d=@",
        "\"x\";r=1;d=@1.5",
    ] {
        let existing = [("ratelimit", "\"a\";r=1"), ("ratelimit", foreign)];
        let case = Case { statuses: vec![(0, allowed(100, 50, secs(30)))], existing: &existing, ..Case::default() };
        let headers = case.run();
        let values: Vec<_> = headers.get_all("ratelimit").iter().collect();
        assert_eq!(values, ["\"default\";r=50;t=30"], "{foreign}");
    }
}

#[test]
fn list_of_policies_that_breaks_the_draft_is_replaced() {
    for foreign in [
        "100;w=60",
        "\"default\";q=100;w=0",
        "\"default\";w=60",
        "\"default\";q=100;w=1.5",
        "\"default\";q=\"100\";w=60",
        "\"default\";q=100;w=60;w",
        "\"default\";q=100;qu=tokens",
        "\"default\";q=100;w=60,",
    ] {
        let existing = [("ratelimit-policy", foreign)];
        let case = Case { statuses: vec![(0, allowed(100, 50, secs(30)))], existing: &existing, ..Case::default() };
        let headers = case.run();
        let values: Vec<_> = headers.get_all("ratelimit-policy").iter().collect();
        assert_eq!(values, ["\"default\";q=100;w=60"], "{foreign}");
    }
}

#[test]
fn single_values_are_all_ours_or_all_theirs() {
    let github = |existing: &[(&'static str, &str)], expected: &[&str]| {
        assert_merged(Headers::github(), existing, allowed(100, 50, secs(30)), expected);
    };
    let ours = [
        "x-ratelimit-limit: 100",
        "x-ratelimit-remaining: 50",
        "x-ratelimit-reset: 1705420830",
        "x-ratelimit-resource: default",
        "x-ratelimit-used: 50",
    ];
    github(&[("x-ratelimit-limit", "60"), ("x-ratelimit-remaining", "51"), ("x-ratelimit-reset", "7")], &ours);
    github(
        &[("x-ratelimit-limit", "60"), ("x-ratelimit-remaining", "50")],
        &["x-ratelimit-limit: 60", "x-ratelimit-remaining: 50"],
    );
    github(&[("x-ratelimit-remaining", "49.5")], &["x-ratelimit-remaining: 49.5"]);
    // without a readable `remaining`, and with a header of the same family
    github(&[("x-ratelimit-remaining", "many")], &ours);
    github(&[("x-ratelimit-remaining", "1"), ("x-ratelimit-remaining", "2")], &ours);
    github(&[("x-ratelimit-limit", "9999")], &ours);
    github(&[("x-ratelimit-remaining", "51"), ("x-ratelimit-resource", "core")], &ours);
    github(
        &[("x-ratelimit-remaining", "49"), ("x-ratelimit-resource", "core")],
        &["x-ratelimit-remaining: 49", "x-ratelimit-resource: core"],
    );
    // two formats with names in common
    let both = || Headers::x_rate_limit(ResetEncoding::EpochSeconds).and(Headers::github());
    for (theirs, expected) in [("51", &ours[..]), ("50", &["x-ratelimit-remaining: 50", "x-ratelimit-used: 7"])] {
        let existing = [("x-ratelimit-remaining", theirs), ("x-ratelimit-used", "7")];
        assert_merged(both(), &existing, allowed(100, 50, secs(30)), expected);
    }
    // one of which is not due
    let apart = Headers::x_rate_limit(ResetEncoding::EpochSeconds).and(Headers::github().send(When::OnRefusal));
    let existing = [("x-ratelimit-remaining", "51"), ("x-ratelimit-used", "7"), ("x-ratelimit-resource", "core")];
    assert_merged(apart, &existing, allowed(100, 50, secs(30)), &ours[..3]);
    // one of which does not report what remains
    let after = LegacyHeaders::new().reset("x-ratelimit-reset-after", ResetEncoding::DeltaSeconds, ResetMeaning::Full);
    let after = || Headers::legacy(after.clone()).unwrap();
    for apart in [Headers::github().and(after()), after().and(Headers::github())] {
        let existing = [("x-ratelimit-remaining", "50"), ("x-ratelimit-limit", "60")];
        let theirs = ["x-ratelimit-limit: 60", "x-ratelimit-remaining: 50"];
        assert_merged(apart.clone(), &existing, allowed(100, 50, secs(30)), &theirs);
        let existing = [("x-ratelimit-remaining", "51"), ("x-ratelimit-limit", "60")];
        let mut all = Vec::from(ours);
        all.insert(2, "x-ratelimit-reset-after: 30");
        assert_merged(apart, &existing, allowed(100, 50, secs(30)), &all);
    }
    let draft_07 = |theirs, expected: &str| {
        let expected = ["ratelimit-policy: 100;w=60", expected];
        assert_merged(Headers::draft_07(), &[("ratelimit", theirs)], allowed(100, 50, secs(30)), &expected);
    };
    draft_07("limit=60, remaining=49, reset=5", "ratelimit: limit=60, remaining=49, reset=5");
    draft_07("limit=60,remaining=51,reset=5", "ratelimit: limit=100, remaining=50, reset=30");
    draft_07("\"a\";r=1", "ratelimit: limit=100, remaining=50, reset=30");
}

#[test]
fn nameless_policies_are_listed_once() {
    for (theirs, expected) in [
        ("10;w=1", "ratelimit-policy: 10;w=1, 100;w=60"),
        ("10;w=1, 100;w=60", "ratelimit-policy: 10;w=1, 100;w=60"),
        ("100;w=60;burst=5", "ratelimit-policy: 100;w=60;burst=5, 100;w=60"),
    ] {
        let decision = allowed(100, 50, secs(30));
        let expected = [expected, "ratelimit: limit=100, remaining=50, reset=30"];
        assert_merged(Headers::draft_07(), &[("ratelimit-policy", theirs)], decision, &expected);
    }
}

#[test]
fn quota_of_a_request_is_listed_once() {
    let of_requests = Policy::of_requests("default").unwrap();
    let (own, decision) = (of_requests.with_quota(Quota::per_minute(100)), allowed(100, 50, secs(30)));
    let view = PolicyView { index: 0, policy: &own, key: Some(&KEY), decision: &decision, refuses: false };
    let dictionary = "ratelimit: limit=100, remaining=50, reset=30";
    let limits = "ratelimit: \"default\";r=50;t=30";
    for (format, theirs, expected) in [
        (Headers::draft_07(), "100;w=60", ["ratelimit-policy: 100;w=60", dictionary]),
        (Headers::draft_07(), "10;w=1", ["ratelimit-policy: 10;w=1, 100;w=60", dictionary]),
        (Headers::draft_11(), "\"default\";q=9;w=60", ["ratelimit-policy: \"default\";q=100;w=60", limits]),
    ] {
        let mut headers = HeaderMap::new();
        headers.insert("ratelimit-policy", val(theirs));
        let prepared = prepared(&format, std::slice::from_ref(&of_requests));
        write(&prepared, &mut headers, &[view], StatusCode::OK, None);
        assert_lines(&headers, &expected);
    }
}

#[test]
fn longer_retry_after_stays() {
    let format = || Headers::none().retry_after(true);
    for (theirs, expected) in [
        ("4", "5"),
        ("6", "6"),
        ("Tue, 16 Jan 2024 16:00:04 GMT", "5"),
        ("Tue, 16 Jan 2024 16:00:06 GMT", "Tue, 16 Jan 2024 16:00:06 GMT"),
        ("Sun, 06 Nov 1994 08:49:37 GMT", "5"),
        ("soon", "5"),
        ("2.0", "5"),
        ("", "5"),
        ("99999999999999999999", "5"),
    ] {
        let expected = format!("retry-after: {expected}");
        assert_merged(format(), &[("retry-after", theirs)], denied(100, secs(5)), &[&expected]);
    }
    let existing = [("retry-after", "7"), ("retry-after", "soon"), ("retry-after", "9")];
    assert_merged(format(), &existing, denied(100, secs(5)), &["retry-after: 9"]);
    let existing = [("retry-after", "9")];
    assert_merged(format(), &existing, allowed(100, 5, secs(5)), &["retry-after: 9"]);
}

/// A client that reads the milliseconds first does not come back before `Retry-After`.
#[test]
fn longer_wait_stays_in_milliseconds() {
    for (theirs, seconds, millis) in [
        (&[][..], "5", "4200"),
        (&[("retry-after", "4")], "5", "4200"),
        (&[("retry-after", "6")], "6", "6000"),
        (&[("retry-after", "Tue, 16 Jan 2024 16:00:06 GMT")], "Tue, 16 Jan 2024 16:00:06 GMT", "6000"),
        (&[("retry-after-ms", "4100")], "5", "4200"),
        (&[("retry-after-ms", "9000")], "5", "9000"),
        (&[("retry-after-ms", "7000"), ("retry-after-ms", "soon"), ("retry-after", "6")], "6", "7000"),
        (&[("retry-after", "999999999999999"), ("retry-after-ms", "-1")], "999999999999999", "999999999999999"),
    ] {
        let expected = [format!("retry-after-ms: {millis}"), format!("retry-after: {seconds}")];
        let decision = denied(100, Duration::from_millis(4_200));
        let headers = Headers::openai().send(When::Never);
        assert_merged(headers, theirs, decision, &expected.each_ref().map(String::as_str));
    }
}

#[test]
fn headers_of_two_layers_equal_those_of_one_layer() {
    let (inner, outer) = (policy("per-user", Quota::per_minute(10)), policy("global", Quota::per_second(1_000)));
    let format = Headers::draft_11().and(Headers::x_rate_limit(ResetEncoding::DeltaSeconds));
    let decisions = [denied(10, secs(6)), allowed(1_000, 999, secs(1))];
    let mut stacked = HeaderMap::new();
    for (policy, decision) in [(&inner, &decisions[0]), (&outer, &decisions[1])] {
        let view = PolicyView { index: 0, policy, key: Some(&KEY), decision, refuses: !decision.is_allowed() };
        let prepared = prepared(&format, std::slice::from_ref(policy));
        let status = StatusCode::TOO_MANY_REQUESTS;
        write(&prepared, &mut stacked, &[view], status, view.refuses.then_some(0));
    }
    let statuses = decisions.into_iter().enumerate().collect();
    let together = Case { format, policies: vec![inner, outer], statuses, ..Case::default() }.run();
    assert_eq!(lines(&stacked), lines(&together));
}
