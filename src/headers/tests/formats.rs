//! The formats other than draft 11.

use super::*;
use crate::quota::Calendar;

#[test]
fn older_drafts_list_all_policies_and_report_the_binding_one() {
    let policies = || vec![policy("burst", Quota::per_minute(100)), policy("daily", Quota::per_day(1_000))];
    let statuses = || vec![(0, allowed(100, 99, secs(60))), (1, allowed(1_000, 5, secs(400)))];
    let headers =
        Case { format: Headers::draft_06(), policies: policies(), statuses: statuses(), ..Case::default() }.run();
    assert_lines(
        &headers,
        &[
            "ratelimit-limit: 1000",
            "ratelimit-policy: 100;w=60, 1000;w=86400",
            "ratelimit-remaining: 5",
            "ratelimit-reset: 400",
        ],
    );
    let statuses = vec![(0, denied(100, secs(2)).with_reset_after(secs(60))), (1, allowed(1_000, 0, secs(86)))];
    let headers = Case { format: Headers::draft_07(), policies: policies(), statuses, ..Case::default() }.run();
    assert_eq!(headers["ratelimit"], "limit=100, remaining=0, reset=2", "after a refusal, as Retry-After says");
    assert_eq!(headers["retry-after"], "2");
}

#[test]
fn github_headers_add_up() {
    let decision = ChargeDecision::allowed(60, 57).with_reset_after(Duration::from_millis(90_500));
    let headers = Case::one(Headers::github(), Quota::per_hour(60), decision);
    assert_lines(
        &headers,
        &[
            "x-ratelimit-limit: 60",
            "x-ratelimit-remaining: 57",
            "x-ratelimit-reset: 1705420891",
            "x-ratelimit-resource: default",
            "x-ratelimit-used: 3",
        ],
    );
    // Three units remain, which is less than the cost.
    let decision = ChargeDecision::denied(60, 3, Wait::After(secs(5))).with_reset_after(secs(57));
    let headers = Case::one(Headers::github(), Quota::per_hour(60), decision);
    assert_lines(
        &headers,
        &[
            "retry-after: 5",
            "x-ratelimit-limit: 60",
            "x-ratelimit-remaining: 0",
            "x-ratelimit-reset: 1705420857",
            "x-ratelimit-resource: default",
            "x-ratelimit-used: 60",
        ],
    );
}

/// The policy that binds has all of GitHub's headers, its own name among them.
#[test]
fn github_headers_are_of_one_policy() {
    let policies = || vec![policy("core", Quota::per_hour(5_000)), policy(" search ", Quota::per_minute(30))];
    let resource = |format, statuses| {
        let headers = Case { format, policies: policies(), statuses, ..Case::default() }.run();
        ["resource", "limit", "used"].map(|name| headers[format!("x-ratelimit-{name}")].to_str().unwrap().to_owned())
    };
    let statuses = || vec![(0, allowed(5_000, 4_987, secs(9))), (1, allowed(30, 29, secs(2)))];
    assert_eq!(resource(Headers::github(), statuses()), ["search", "30", "1"]);
    assert_eq!(resource(Headers::github(), statuses()[..1].to_vec()), ["core", "5000", "13"]);
    assert_eq!(resource(Headers::github().for_policy("core"), statuses()), ["core", "5000", "13"]);
    // A name of spaces cannot be a value.
    let policies = vec![policy("  ", Quota::per_hour(60))];
    let case =
        Case { format: Headers::github(), policies, statuses: vec![(0, allowed(60, 1, secs(9)))], ..Case::default() };
    assert!(!case.run().contains_key("x-ratelimit-resource"));
}

fn requests_and_tokens(units: [&str; 3]) -> Vec<Policy> {
    let quotas = [Quota::per_minute(60), Quota::per_minute(150_000), Quota::per_day(2_000_000)];
    let of = |(unit, quota): (&str, Quota)| policy(&quota.to_string(), quota).in_unit(unit).unwrap();
    units.into_iter().zip(quotas).map(of).collect()
}

/// The example of OpenAI's documentation.
#[test]
fn openai_headers_have_a_family_for_each_unit() {
    let policies = || requests_and_tokens(["requests", "tokens", "tokens"]);
    let statuses = |binding| {
        vec![(0, allowed(60, 59, secs(1))), (1, binding), (2, allowed(2_000_000, 1_999_999, Duration::from_millis(12)))]
    };
    let case = |statuses| Case { format: Headers::openai(), policies: policies(), statuses, ..Case::default() }.run();
    assert_lines(
        &case(statuses(allowed(150_000, 149_984, secs(360)))),
        &[
            "x-ratelimit-limit-requests: 60",
            "x-ratelimit-limit-tokens: 150000",
            "x-ratelimit-remaining-requests: 59",
            "x-ratelimit-remaining-tokens: 149984",
            "x-ratelimit-reset-requests: 1s",
            "x-ratelimit-reset-tokens: 6m0s",
        ],
    );
    let wait = Wait::After(Duration::from_micros(1_369_001));
    let refused = ChargeDecision::denied(150_000, 3, wait).with_reset_after(secs(360));
    let headers = case(statuses(refused));
    assert_eq!((headers.len(), &headers["retry-after"], &headers["retry-after-ms"]), (8, &val("2"), &val("1370")));
    assert_eq!(headers["x-ratelimit-remaining-tokens"], "0");
    // The day binds, and its unit has no other policy here.
    let headers = case(statuses(allowed(150_000, 149_984, secs(360)))[2..].to_vec());
    assert_lines(
        &headers,
        &[
            "x-ratelimit-limit-tokens: 2000000",
            "x-ratelimit-remaining-tokens: 1999999",
            "x-ratelimit-reset-tokens: 12ms",
        ],
    );
}

#[test]
fn anthropic_headers_have_a_family_for_each_unit() {
    let case = |units, statuses| {
        Case { format: Headers::anthropic(), policies: requests_and_tokens(units), statuses, ..Case::default() }.run()
    };
    let statuses = || vec![(0, allowed(60, 59, secs(1))), (1, allowed(150_000, 4, secs(17))), (2, denied(7, secs(90)))];
    assert_lines(
        &case(["requests", "input-tokens", "output-tokens"], statuses()),
        &[
            "anthropic-ratelimit-input-tokens-limit: 150000",
            "anthropic-ratelimit-input-tokens-remaining: 4",
            "anthropic-ratelimit-input-tokens-reset: 2024-01-16T16:00:17Z",
            "anthropic-ratelimit-output-tokens-limit: 7",
            "anthropic-ratelimit-output-tokens-remaining: 0",
            "anthropic-ratelimit-output-tokens-reset: 2024-01-16T16:01:30Z",
            "anthropic-ratelimit-requests-limit: 60",
            "anthropic-ratelimit-requests-remaining: 59",
            "anthropic-ratelimit-requests-reset: 2024-01-16T16:00:01Z",
            "retry-after: 90",
        ],
    );
    // A policy of another unit has no headers.
    assert_lines(
        &case(["bytes", "tokens", "bytes"], statuses()[..2].to_vec()),
        &[
            "anthropic-ratelimit-tokens-limit: 150000",
            "anthropic-ratelimit-tokens-remaining: 4",
            "anthropic-ratelimit-tokens-reset: 2024-01-16T16:00:17Z",
        ],
    );
}

#[test]
fn openai_milliseconds_follow_retry_after() {
    let names = |headers: Headers| headers.names().iter().filter(|name| name.as_str().starts_with("retry")).count();
    assert_eq!(names(Headers::openai()), 2);
    assert_eq!(names(Headers::openai().retry_after(false)), 0);
    assert_eq!(names(Headers::none().and(Headers::openai())), 2);
    assert_eq!(names(Headers::anthropic().and(Headers::github())), 1);
    assert_eq!(names(Headers::github().and(Headers::openai().retry_after(false))), 1);
    let refused = |format: Headers, status| {
        let case = Case { format, status, statuses: vec![(0, denied(100, secs(90_000)))], ..Case::default() };
        let headers = case.run();
        headers.get("retry-after-ms").map(|value| value.to_str().unwrap().to_owned())
    };
    assert_eq!(refused(Headers::openai(), 429).as_deref(), Some("86400000"));
    assert_eq!(
        refused(Headers::openai().max_reported_wait(secs(30)), 307).as_deref(),
        Some("30000"),
        "also beside a redirect"
    );
    assert_eq!(refused(Headers::openai().send(When::Never), 429).as_deref(), Some("86400000"));
    assert_eq!(refused(Headers::openai().retry_after(false), 429), None);
    assert_eq!(refused(Headers::anthropic(), 429), None);
    let passed = Case { format: Headers::openai(), statuses: vec![(0, allowed(100, 0, secs(9)))], ..Case::default() };
    assert!(!passed.run().contains_key("retry-after-ms"));
}

#[test]
fn legacy_headers_have_their_names_and_encodings() {
    let format = || {
        let headers = LegacyHeaders::new()
            .limit("X-App-Limit")
            .reset("x-app-next", ResetEncoding::DeltaSeconds, ResetMeaning::NextUnit)
            .reset("x-app-window", ResetEncoding::GoDuration, ResetMeaning::Window)
            .reset("x-app-full", ResetEncoding::Rfc3339, ResetMeaning::Full)
            .policy_name("x-app-bucket");
        Headers::legacy(headers).unwrap()
    };
    let decision = ChargeDecision::allowed(100, 50).with_effective_window(secs(30)).with_reset_after(secs(29));
    assert_lines(
        &Case::one(format(), Quota::per_minute(100), decision),
        &[
            "x-app-bucket: default",
            "x-app-full: 2024-01-16T16:00:29Z",
            "x-app-limit: 100",
            "x-app-next: 0",
            "x-app-window: 30s",
        ],
    );
    let decision = ChargeDecision::denied(100, 0, Wait::After(Duration::from_millis(600))).with_reset_after(secs(60));
    assert_lines(
        &Case::one(format(), Quota::per_minute(100), decision),
        &[
            "retry-after: 1",
            "x-app-bucket: default",
            "x-app-full: 2024-01-16T16:01:00Z",
            "x-app-limit: 100",
            "x-app-next: 1",
            "x-app-window: 600ms",
        ],
    );
    let headers = Case::one(format(), Quota::per_minute(100), ChargeDecision::denied(100, 9, Wait::Never));
    assert!(!headers.contains_key("x-app-next") && !headers.contains_key("x-app-window"), "no wait helps");
}

#[test]
fn legacy_headers_reject_unusable_names_with_the_reason() {
    for (headers, reason) in [
        (LegacyHeaders::new().limit("x app limit"), "not a valid header name"),
        (LegacyHeaders::new().limit(""), "not a valid header name"),
        (LegacyHeaders::new().limit("Content-Length"), "gives this name another meaning"),
        (LegacyHeaders::new().used("grpc-used"), "gives this name another meaning"),
        (LegacyHeaders::new().used("Retry-After-Ms"), "gives this name another meaning"),
        (LegacyHeaders::new().limit("x-a").used("X-A"), "give each header a name of its own"),
    ] {
        let error = Headers::legacy(headers).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
}

/// The window of a month is the month that is open: January is longer than February.
#[test]
fn window_of_a_calendar_is_the_one_that_is_open() {
    const DAY: u64 = 86_400;
    let left = 15 * DAY + 8 * 3_600; // to the first of February, from `NOW`
    let case = |quota, window| {
        let policies = vec![policy("default", quota), policy("minute", Quota::per_minute(9))];
        let statuses = vec![(0, allowed(100, 99, secs(window))), (1, allowed(9, 8, secs(1)))];
        Case { format: Headers::draft_11(), policies, statuses, ..Case::default() }.run()
    };
    let month = |first| Quota::calendar(100, Calendar::month().from_day(first).unwrap()).unwrap();
    for (quota, left, length) in [
        (month(1), left, 31 * DAY),
        (month(16), 30 * DAY + 8 * 3_600, 31 * DAY),
        (month(31), 14 * DAY + 8 * 3_600, 31 * DAY),
        // The limiter's clock is in February already.
        (month(1), left + 29 * DAY, 29 * DAY),
        (Quota::calendar(100, Calendar::day()).unwrap(), 8 * 3_600, DAY),
        (Quota::calendar(100, Calendar::year()).unwrap(), 350 * DAY, 366 * DAY),
    ] {
        let lines = [
            &*format!("ratelimit-policy: \"default\";q=100;w={length}, \"minute\";q=9;w=60"),
            &*format!("ratelimit: \"default\";r=99;t={left}, \"minute\";r=8;t=1"),
        ];
        assert_lines(&case(quota, left), &lines);
    }
}
