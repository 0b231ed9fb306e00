//! The formats other than draft 11.

use super::*;

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
        &["x-ratelimit-limit: 60", "x-ratelimit-remaining: 57", "x-ratelimit-reset: 1705420891", "x-ratelimit-used: 3"],
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
            "x-ratelimit-used: 60",
        ],
    );
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
        (LegacyHeaders::new().limit("Content-Length"), "gives it another meaning"),
        (LegacyHeaders::new().used("grpc-used"), "gives it another meaning"),
        (LegacyHeaders::new().limit("x-a").used("X-A"), "give each its own"),
    ] {
        let error = Headers::legacy(headers).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
}
