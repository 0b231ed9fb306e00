//! Families of headers: each reports its own policies.

use super::*;

/// Returns headers for one policy or unit, whose names end with `word`.
pub(super) fn family(word: &str) -> Headers {
    let name = |value: &str| format!("x-ratelimit-{value}-{word}");
    let names = LegacyHeaders::new().limit(name("limit")).remaining(name("remaining"));
    let reset = (ResetEncoding::DeltaSeconds, ResetMeaning::Full);
    Headers::legacy(names.reset(name("reset"), reset.0, reset.1)).unwrap()
}

fn in_unit(name: &str, quota: Quota, unit: &str) -> Policy {
    policy(name, quota).in_unit(unit).unwrap()
}

fn minute_and_day() -> Vec<Policy> {
    vec![policy("minute", Quota::per_minute(100)), policy("day", Quota::per_day(1_000))]
}

fn by_policy() -> Headers {
    family("minute").for_policy("minute").and(family("day").for_policy("day"))
}

#[test]
fn family_reports_the_policy_that_it_is_for() {
    let statuses = vec![(0, allowed(100, 99, secs(1))), (1, allowed(1_000, 7, secs(90)))];
    let case = |statuses| Case { format: by_policy(), policies: minute_and_day(), statuses, ..Case::default() }.run();
    assert_lines(
        &case(statuses),
        &[
            "x-ratelimit-limit-day: 1000",
            "x-ratelimit-limit-minute: 100",
            "x-ratelimit-remaining-day: 7",
            "x-ratelimit-remaining-minute: 99",
            "x-ratelimit-reset-day: 90",
            "x-ratelimit-reset-minute: 1",
        ],
    );
    // One policy refuses. `Retry-After` is that of all, and the other policy is reported as it is.
    let headers = case(vec![(0, denied(100, secs(5))), (1, allowed(1_000, 7, secs(90)))]);
    assert_eq!(headers["x-ratelimit-remaining-minute"], "0");
    assert_eq!(headers["x-ratelimit-remaining-day"], "7");
    assert_eq!(headers["retry-after"], "5");
    // A policy that did not apply to the request has no headers.
    for applied in [0, 1] {
        for decision in [allowed(100, 3, secs(5)), denied(100, secs(5))] {
            let headers = case(vec![(applied, decision)]);
            assert_eq!(headers.contains_key("x-ratelimit-limit-minute"), applied == 0);
            assert_eq!(headers.contains_key("x-ratelimit-limit-day"), applied == 1);
        }
    }
}

#[test]
fn family_of_a_unit_reports_the_policy_that_binds() {
    let policies = vec![
        policy("requests", Quota::per_minute(100)),
        in_unit("minute", Quota::per_minute(1_000), "tokens"),
        in_unit("day", Quota::per_day(9_000), "tokens"),
    ];
    let format = || family("requests").for_unit("requests").and(family("tokens").for_unit("tokens"));
    let case = |minute, day| {
        let statuses = vec![(0, allowed(100, 1, secs(60))), (1, minute), (2, day)];
        Case { format: format(), policies: policies.clone(), statuses, ..Case::default() }.run()
    };
    let headers = case(allowed(1_000, 500, secs(30)), allowed(9_000, 400, secs(900)));
    assert_eq!(headers["x-ratelimit-limit-requests"], "100");
    assert_eq!(
        (&headers["x-ratelimit-limit-tokens"], &headers["x-ratelimit-remaining-tokens"]),
        (&val("9000"), &val("400"))
    );
    let headers = case(denied(1_000, secs(7)), allowed(9_000, 400, secs(900)));
    assert_eq!(
        (&headers["x-ratelimit-limit-tokens"], &headers["x-ratelimit-remaining-tokens"]),
        (&val("1000"), &val("0"))
    );
    // A name and a unit: both hold.
    let headers = Case {
        format: family("x").for_policy("day").for_unit("tokens"),
        policies: policies.clone(),
        statuses: vec![(1, allowed(1_000, 1, secs(30))), (2, allowed(9_000, 400, secs(900)))],
        ..Case::default()
    };
    assert_eq!(headers.run()["x-ratelimit-limit-x"], "9000");
}

#[test]
fn list_for_a_policy_has_no_other_item() {
    let statuses = || vec![(0, allowed(100, 99, secs(1))), (1, allowed(1_000, 7, secs(90)))];
    let headers = |format| Case { format, policies: minute_and_day(), statuses: statuses(), ..Case::default() }.run();
    assert_lines(
        &headers(Headers::draft_11().for_policy("day")),
        &["ratelimit-policy: \"day\";q=1000;w=86400", "ratelimit: \"day\";r=7;t=90"],
    );
    let three = [minute_and_day(), vec![in_unit("tokens", Quota::per_hour(5), "tokens")]].concat();
    let statuses = vec![(0, allowed(100, 99, secs(1))), (1, allowed(1_000, 7, secs(90))), (2, allowed(5, 4, secs(1)))];
    let format = Headers::draft_07().for_unit("requests");
    let headers = Case { format, policies: three, statuses, ..Case::default() }.run();
    assert_lines(
        &headers,
        &["ratelimit-policy: 100;w=60, 1000;w=86400", "ratelimit: limit=1000, remaining=7, reset=90"],
    );
}

#[test]
fn family_is_sent_near_the_exhaustion_of_its_own_policy() {
    let near = |word: &str| family(word).for_policy(word).send(When::NearExhaustion { percent: 10 });
    let statuses = vec![(0, allowed(100, 50, secs(1))), (1, allowed(1_000, 7, secs(90)))];
    let format = near("minute").and(near("day"));
    let headers = Case { format, policies: minute_and_day(), statuses, ..Case::default() }.run();
    assert_eq!(headers.len(), 3);
    assert_eq!(headers["x-ratelimit-remaining-day"], "7");
}

/// Two families cannot have one name: clients would take the numbers for those of one quota.
#[test]
fn family_with_a_name_of_an_earlier_one_is_not_mixed_with_it() {
    let format = Headers::x_rate_limit(ResetEncoding::DeltaSeconds)
        .for_policy("minute")
        .and(Headers::github().for_policy("day"))
        .and(Headers::draft_06().for_policy("day"));
    assert!(format.unsent(&minute_and_day()).unwrap().contains("\"x-ratelimit-limit\""));
    let statuses = vec![(0, allowed(100, 99, secs(1))), (1, allowed(1_000, 7, secs(90)))];
    let headers = Case { format, policies: minute_and_day(), statuses, ..Case::default() }.run();
    assert_lines(
        &headers,
        &[
            "ratelimit-limit: 1000",
            "ratelimit-policy: 1000;w=86400",
            "ratelimit-remaining: 7",
            "ratelimit-reset: 90",
            "x-ratelimit-limit: 100",
            "x-ratelimit-remaining: 99",
            "x-ratelimit-reset: 1",
        ],
    );
}

#[test]
fn headers_that_are_never_sent_are_found() {
    let found = |format: Headers| format.unsent(&minute_and_day());
    for sent in [
        Headers::draft_11(),
        by_policy(),
        // Layers with different policies may use equal headers.
        by_policy().and(family("month").for_policy("month")),
        family("day").for_policy("day"),
        Headers::draft_11().and(Headers::draft_06()).and(family("day").for_policy("day")),
        Headers::draft_11().and(Headers::draft_06().for_policy("day")),
        family("minute").for_policy("mniute").send(When::Never),
        Headers::none().for_policy("month"),
    ] {
        assert_eq!(found(sent.clone()), None, "{sent:?}");
    }
    for (unsent, text) in [
        (family("minute").for_policy("mniute"), "the name \"mniute\""),
        (family("day").for_policy("day").and(family("minute").for_policy("mniute")), "policy \"minute\""),
        (Headers::draft_11().and(family("tokens").for_unit("tokens")), "the unit \"tokens\""),
        (family("x").for_unit("requests").for_policy("x"), "the unit \"requests\" and the name \"x\""),
        (Headers::draft_11().for_policy("day").and(Headers::draft_11().for_policy("minute")), "\"ratelimit-policy\""),
    ] {
        let found = found(unsent).unwrap();
        assert!(found.contains(text), "{found}");
    }
    assert_eq!(by_policy().unsent(&[]), None, "a file of rules may have none yet");
    let in_flight = Policy::new("at-once", Quota::concurrent(4)).unwrap();
    assert_eq!(Headers::anthropic().unsent(&[in_flight]), None, "no vendor reports requests in flight");
}

#[test]
fn family_without_a_policy_costs_nothing() {
    let format = Headers::none().and(family("tokens").for_unit("tokens"));
    assert!(PreparedHeaders::new(&format, &minute_and_day(), None).is_silent_if_passed);
    // Refusals are laid out as without it.
    let prepared = PreparedHeaders::new(&format.and(Headers::draft_11()), &minute_and_day(), None);
    let layout = prepared.lay_out_refusal(HeaderMap::new(), StatusCode::TOO_MANY_REQUESTS).unwrap();
    let policies = minute_and_day();
    let decision = denied(100, secs(5));
    let view = PolicyView { index: 0, policy: &policies[0], key: None, decision: &decision, refuses: true };
    assert_eq!(prepared.fill(&layout, &[view], 0).unwrap().len(), 3);
}

/// Writes the headers of two nested layers with a policy each.
fn nested(inner: (&Headers, ChargeDecision), outer: (&Headers, ChargeDecision)) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for ((format, decision), policy) in [inner, outer].into_iter().zip(minute_and_day()) {
        let view = PolicyView { index: 0, policy: &policy, key: Some(&KEY), decision: &decision, refuses: false };
        write(&prepared(format, std::slice::from_ref(&policy)), &mut headers, &[view], StatusCode::OK, None);
    }
    headers
}

#[test]
fn families_of_nested_layers_stand_side_by_side() {
    let plain = Headers::x_rate_limit(ResetEncoding::DeltaSeconds);
    for (inner, outer) in [
        (family("minute"), family("day")),
        (family("minute"), plain.clone()),
        (plain.clone(), family("day")),
        (plain, Headers::legacy(LegacyHeaders::new().remaining("x-rate-limit-remaining")).unwrap()),
    ] {
        for [of_inner, of_outer] in [[5, 50], [50, 5]] {
            let headers =
                nested((&inner, allowed(100, of_inner, secs(1))), (&outer, allowed(1_000, of_outer, secs(1))));
            let names = |format: &Headers| format.clone().retry_after(false).names();
            let mut all = [names(&inner), names(&outer)].concat();
            all.retain(|name| !name.as_str().starts_with("grpc-"));
            assert_eq!(headers.len(), all.len());
            assert!(all.iter().all(|name| headers.contains_key(name)), "{headers:?}");
        }
    }
}

#[test]
fn family_in_two_layers_is_that_of_the_stricter_one() {
    let both = || family("requests").and(family("tokens"));
    let inner = [("x-ratelimit-limit-requests", "10"), ("x-ratelimit-remaining-requests", "3")];
    let tokens =
        [("x-ratelimit-limit-tokens", "10"), ("x-ratelimit-remaining-tokens", "70"), ("x-ratelimit-used-tokens", "9")];
    let existing = [&inner[..], &tokens].concat();
    let case = Case {
        format: both(),
        statuses: vec![(0, allowed(100, 50, secs(30)))],
        existing: &existing,
        ..Case::default()
    };
    assert_lines(
        &case.run(),
        &[
            "x-ratelimit-limit-requests: 10",
            "x-ratelimit-limit-tokens: 100",
            "x-ratelimit-remaining-requests: 3",
            "x-ratelimit-remaining-tokens: 50",
            "x-ratelimit-reset-tokens: 30",
        ],
    );
}
