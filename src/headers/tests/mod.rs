mod families;
mod formats;
mod merging;
mod properties;

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use http::header::RETRY_AFTER;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

use super::*;
use crate::base::time::Timestamp;
use crate::base::wait::Wait;
use crate::clock::{Clock, ManualClock};
use crate::decision::ChargeDecision;
use crate::key::Key;
use crate::policy::Policy;
use crate::quota::Quota;

/// The client of all requests.
static KEY: LazyLock<Key> = LazyLock::new(|| Key::of("client").unwrap());

/// 2024-01-16 16:00:00 UTC.
const NOW: u64 = 1_705_420_800_000_000;

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn policy(name: &str, quota: Quota) -> Policy {
    Policy::new(name, quota).unwrap()
}

fn hundred() -> Policy {
    policy("default", Quota::per_minute(100))
}

fn allowed(limit: u64, remaining: u64, window: Duration) -> ChargeDecision {
    ChargeDecision::allowed(limit, remaining).with_effective_window(window).with_reset_after(window)
}

fn denied(limit: u64, wait: Duration) -> ChargeDecision {
    ChargeDecision::denied(limit, 0, Wait::After(wait)).with_reset_after(wait)
}

fn val(value: &'static str) -> HeaderValue {
    HeaderValue::from_static(value)
}

/// Prepares headers with a clock that stands still.
fn prepared(format: &Headers, policies: &[Policy]) -> PreparedHeaders {
    let clock = Arc::new(ManualClock::at(Timestamp::from_micros(NOW)));
    let mut prepared = PreparedHeaders::new(format, policies, Some(Arc::clone(&clock) as Arc<dyn Clock>));
    prepared.clock = clock;
    prepared
}

/// Adds headers to a response. A refusal has a seed.
fn write(
    prepared: &PreparedHeaders,
    headers: &mut HeaderMap,
    views: &[PolicyView<'_>],
    status: StatusCode,
    refusal_seed: Option<u64>,
) {
    if let Some(mut rendered) = prepared.render(views, refusal_seed) {
        prepared.add(&mut rendered, headers, status);
    }
}

/// A response: the decisions of the policies that applied, each with the policy's index.
struct Case<'a> {
    format: Headers,
    policies: Vec<Policy>,
    statuses: Vec<(usize, ChargeDecision)>,
    status: u16,
    seed: u64,
    existing: &'a [(&'static str, &'a str)],
}

impl Default for Case<'_> {
    fn default() -> Self {
        Self {
            format: Headers::default(),
            policies: vec![hundred()],
            statuses: Vec::new(),
            status: 200,
            seed: 0,
            existing: &[],
        }
    }
}

impl Case<'_> {
    fn one(format: Headers, quota: Quota, decision: ChargeDecision) -> HeaderMap {
        let policies = vec![policy("default", quota)];
        Case { format, policies, statuses: vec![(0, decision)], ..Case::default() }.run()
    }

    fn run(self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in self.existing {
            headers.append(*name, HeaderValue::from_str(value).unwrap());
        }
        let views: Vec<PolicyView<'_>> = self
            .statuses
            .iter()
            .map(|(index, decision)| PolicyView {
                index: *index,
                policy: &self.policies[*index],
                key: Some(&KEY),
                decision,
                refuses: !decision.is_allowed(),
            })
            .collect();
        let refused = views.iter().any(|view| view.refuses);
        let status = if refused && self.status == 200 { 429 } else { self.status };
        let prepared = prepared(&self.format, &self.policies);
        let status = StatusCode::from_u16(status).unwrap();
        let seed = refused.then_some(self.seed);
        write(&prepared, &mut headers, &views, status, seed);
        // A refusal that was laid out has the headers that are written into a response.
        let (own, other) = (HeaderName::from_static("x-own"), HeaderValue::from_static("other"));
        let mut beside = HeaderMap::new();
        beside.insert(own.clone(), other);
        let filled = prepared
            .lay_out_refusal(beside.clone(), status)
            .filter(|_| refused)
            .and_then(|layout| prepared.fill(&layout, &views, self.seed));
        if self.existing.is_empty() {
            write(&prepared, &mut beside, &views, status, seed);
            assert!(filled.is_none_or(|filled| filled.iter().eq(beside.iter())));
            beside.remove(own);
            assert_eq!(headers, beside);
        }
        headers
    }
}

/// Returns all headers in the order of their names, one line each.
fn lines(headers: &HeaderMap) -> Vec<String> {
    let mut lines: Vec<String> =
        headers.iter().map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect();
    lines.sort();
    lines
}

#[track_caller]
fn assert_lines(headers: &HeaderMap, expected: &[&str]) {
    assert_eq!(lines(headers), expected);
}

#[test]
fn passed_request_gets_what_remains_in_its_effective_window() {
    let headers =
        Case::one(Headers::draft_11(), Quota::per_minute(100), allowed(100, 99, Duration::from_millis(59_400)));
    assert_lines(&headers, &["ratelimit-policy: \"default\";q=100;w=60", "ratelimit: \"default\";r=99;t=60"]);

    let headers = Case::one(Headers::draft_11(), Quota::per_minute(100), allowed(100, 50, secs(30)));
    assert_eq!(headers["ratelimit"], "\"default\";r=50;t=30");
    let headers = Case::one(Headers::draft_11(), Quota::per_minute(100), allowed(100, 0, Duration::from_millis(600)));
    assert_eq!(headers["ratelimit"], "\"default\";r=0;t=1;tower-ms=600");
}

#[test]
fn window_below_a_second_is_reported_in_milliseconds_too() {
    let (second, tenth) = (secs(1), Duration::from_millis(100));
    let [ten, five] = [10, 5].map(|burst| Quota::per_second(50).burst(burst).unwrap());
    let strict = Quota::gcra(50, second).unwrap();
    for (quota, remaining, millis, expected) in [
        // Nothing remains, for a time that is rounded up by a twentieth or more.
        (Quota::per_second(50), 0, 20, "r=0;t=1;tower-ms=20"),
        (Quota::per_second(50), 10, 200, "r=10;t=1"),
        (*hundred().quota(), 0, 600, "r=0;t=1;tower-ms=600"),
        (*hundred().quota(), 0, 1_000, "r=0;t=1"),
        (Quota::sliding_log(50, second).unwrap(), 0, 1_050, "r=0;t=2;tower-ms=1050"),
        (Quota::per_hour(1), 0, 20_500, "r=0;t=21"),
        (Quota::per_second(50).burst(25).unwrap(), 0, 20, "r=0;t=1;tower-ms=20"),
        // The capacity refills within less than half a second.
        (ten, 9, 180, "r=50;t=1;tower-r=9;tower-ms=180"),
        (five, 0, 20, "r=49;t=1;tower-r=0;tower-ms=20"),
        (strict, 0, 20, "r=49;t=1;tower-r=0;tower-ms=20"),
        (Quota::gcra(3, second).unwrap(), 0, 334, "r=2;t=1;tower-r=0;tower-ms=334"),
        (Quota::fixed_window(5, tenth).unwrap(), 2, 40, "r=50;t=1;tower-r=2;tower-ms=40"),
    ] {
        let decision = allowed(quota.capacity(), remaining, Duration::from_millis(millis));
        let headers = Case::one(Headers::draft_11(), quota, decision);
        assert_eq!(headers["ratelimit"], format!("\"default\";{expected}"), "{quota}");
    }
    // A refusal has `Retry-After`, which a client obeys first. Its whole second keeps many clients of one key apart.
    let refused = denied(1, Duration::from_millis(20));
    let headers = Case::one(Headers::draft_11(), Quota::gcra(50, second).unwrap(), refused);
    assert_lines(
        &headers,
        &["ratelimit-policy: \"default\";q=50;w=1", "ratelimit: \"default\";r=0;t=1", "retry-after: 1"],
    );
}

#[test]
fn refusal_layout_has_the_headers_of_a_written_refusal() {
    let policies = [hundred(), policy("day", Quota::per_day(1_000))];
    let decisions = [denied(100, secs(5)), allowed(1_000, 7, secs(60))];
    let mut own = HeaderMap::new();
    own.insert("content-type", HeaderValue::from_static("text/plain"));
    let all = [
        Headers::draft_11(),
        Headers::draft_07().retry_after(false),
        Headers::draft_06().send(When::OnRefusal),
        Headers::github().and(Headers::draft_11()).send(When::NearExhaustion { percent: 1 }),
        Headers::openai(),
        Headers::none(),
    ];
    for format in all {
        let prepared = PreparedHeaders::new(&format, &policies, None);
        let layout = prepared.lay_out_refusal(own.clone(), StatusCode::TOO_MANY_REQUESTS).unwrap();
        for applying in [&[0][..], &[0, 1]] {
            let view = |at: &usize| PolicyView {
                index: *at,
                policy: &policies[*at],
                key: Some(&KEY),
                decision: &decisions[*at],
                refuses: *at == 0,
            };
            let views: Vec<PolicyView<'_>> = applying.iter().map(view).collect();
            let mut written = own.clone();
            write(&prepared, &mut written, &views, StatusCode::TOO_MANY_REQUESTS, Some(0));
            let filled = prepared.fill(&layout, &views, 0).unwrap();
            assert!(filled.iter().eq(written.iter()), "{filled:?} {written:?}");
        }
        assert!(prepared.lay_out_refusal(own.clone(), StatusCode::SEE_OTHER).is_none(), "redirects get fewer headers");
    }
}

#[test]
fn window_of_draft_11_is_not_the_time_until_the_reset() {
    let decision = ChargeDecision::allowed(100, 99)
        .with_effective_window(Duration::from_millis(59_400))
        .with_reset_after(Duration::from_millis(600));
    let headers = Case::one(Headers::draft_11(), Quota::per_minute(100), decision);
    assert_eq!(headers["ratelimit"], "\"default\";r=99;t=60");
}

#[test]
fn refused_request_gets_its_wait_and_zero_remaining() {
    // 7 of 10 units are used, and the request costs 5. The wait is the time until 5 are free.
    let decision = ChargeDecision::denied(10, 3, Wait::After(secs(2))).with_reset_after(secs(7));
    let headers = Case::one(Headers::draft_11(), Quota::new(10, secs(10)).unwrap(), decision);
    assert_lines(
        &headers,
        &["ratelimit-policy: \"default\";q=10;w=10", "ratelimit: \"default\";r=0;t=2", "retry-after: 2"],
    );
}

#[test]
fn retry_after_is_rounded_up_at_least_one_and_capped() {
    for (wait, expected) in [
        (Duration::ZERO, "1"),
        (Duration::from_nanos(1), "1"),
        (Duration::from_millis(500), "1"),
        (Duration::from_secs(1), "1"),
        (Duration::new(1, 1), "2"),
        (Duration::from_millis(59_200), "60"),
        (secs(720), "720"),
        (secs(40 * 86_400), "86400"),
        (Duration::MAX, "86400"),
    ] {
        let headers = Case::one(Headers::draft_11(), Quota::per_minute(100), denied(100, wait));
        assert_eq!(headers["retry-after"], expected, "{wait:?}");
        assert_eq!(headers["ratelimit"], format!("\"default\";r=0;t={expected}"), "{wait:?}");
    }
    let format = Headers::draft_11().max_reported_wait(secs(30));
    assert_eq!(Case::one(format, Quota::per_minute(100), denied(100, secs(31)))["retry-after"], "30");
}

#[test]
fn window_is_capped_only_if_nothing_remains() {
    let limit = |remaining| {
        let format = Headers::draft_11().max_reported_wait(secs(30));
        Case::one(format, Quota::per_hour(5), allowed(5, remaining, secs(720)))["ratelimit"].clone()
    };
    assert_eq!(limit(0), "\"default\";r=0;t=30");
    assert_eq!(limit(1), "\"default\";r=1;t=720", "1 in 30 s would be a higher rate");
}

#[test]
fn refusal_that_no_wait_helps_reports_no_wait() {
    let decision = ChargeDecision::denied(100, 100, Wait::Never);
    let headers = Case::one(Headers::draft_11(), Quota::per_minute(100), decision);
    assert_lines(&headers, &["ratelimit-policy: \"default\";q=100;w=60", "ratelimit: \"default\";r=0"]);
    for meaning in [ResetMeaning::Full, ResetMeaning::NextUnit, ResetMeaning::Window] {
        let names = LegacyHeaders::new().remaining("left").reset("reset", ResetEncoding::DeltaSeconds, meaning);
        let decision = ChargeDecision::denied(100, 100, Wait::Never);
        let headers = Case::one(Headers::legacy(names).unwrap(), Quota::per_minute(100), decision);
        assert_lines(&headers, &["left: 0"]);
    }
}

/// The limiter knows neither when the request would pass, nor when the quota is full.
#[test]
fn refusal_for_an_unknown_time_reports_no_time() {
    let unknown = || ChargeDecision::denied(3, 0, Wait::Unknown);
    let quota = || Quota::per_minute(3);
    let one = |format| Case::one(format, quota(), unknown());
    assert_lines(&one(Headers::draft_11()), &["ratelimit-policy: \"default\";q=3;w=60", "ratelimit: \"default\";r=0"]);
    assert_lines(&one(Headers::draft_07()), &["ratelimit-policy: 3;w=60", "ratelimit: limit=3, remaining=0"]);
    assert_lines(
        &one(Headers::draft_06()),
        &["ratelimit-limit: 3", "ratelimit-policy: 3;w=60", "ratelimit-remaining: 0"],
    );
    for meaning in [ResetMeaning::Full, ResetMeaning::NextUnit, ResetMeaning::Window] {
        let names = LegacyHeaders::new().remaining("left").reset("reset", ResetEncoding::DeltaSeconds, meaning);
        assert_lines(&one(Headers::legacy(names).unwrap()), &["left: 0"]);
    }
    // The wait of the other policy is known.
    let policies = vec![policy("flight", quota()), hundred()];
    let headers = Case { policies, statuses: vec![(0, unknown()), (1, denied(100, secs(7)))], ..Case::default() }.run();
    assert_eq!(
        (&headers["retry-after"], &headers["ratelimit"]),
        (&"7".parse().unwrap(), &"\"flight\";r=0, \"default\";r=0;t=7".parse().unwrap())
    );
}

#[test]
fn retry_after_is_the_longest_wait_unless_no_wait_helps() {
    let policies = || vec![policy("burst", Quota::per_second(10)), policy("daily", Quota::per_day(1_000)), hundred()];
    let statuses = |last| vec![(0, denied(10, secs(1))), (1, allowed(1_000, 3, secs(90_000))), (2, last)];
    let case = Case { policies: policies(), statuses: statuses(denied(100, secs(7))), ..Case::default() };
    let headers = case.run();
    assert_eq!(headers["retry-after"], "7", "the wait of a policy that did not refuse does not count");
    assert_eq!(headers["ratelimit"], "\"burst\";r=0;t=1, \"daily\";r=3;t=90000, \"default\";r=0;t=7");

    let never = ChargeDecision::denied(100, 100, Wait::Never);
    let headers = Case { policies: policies(), statuses: statuses(never), ..Case::default() }.run();
    assert!(!headers.contains_key("retry-after"));
    assert_eq!(headers["ratelimit"], "\"burst\";r=0;t=1, \"daily\";r=3;t=90000, \"default\";r=0");
}

#[test]
fn headers_list_only_policies_that_applied() {
    let policies = vec![policy("burst", Quota::per_minute(100)), policy("daily", Quota::per_day(1_000))];
    let statuses = vec![(1, allowed(1_000, 998, secs(86_300)))];
    let headers = Case { policies: policies.clone(), statuses, ..Case::default() }.run();
    assert_lines(&headers, &["ratelimit-policy: \"daily\";q=1000;w=86400", "ratelimit: \"daily\";r=998;t=86300"]);

    let statuses = vec![(0, allowed(100, 8, secs(1))), (1, allowed(1_000, 998, secs(69_076)))];
    let headers = Case { policies: policies.clone(), statuses, ..Case::default() }.run();
    assert_eq!(headers["ratelimit-policy"], "\"burst\";q=100;w=60, \"daily\";q=1000;w=86400");
    assert_eq!(headers["ratelimit"], "\"burst\";r=8;t=1, \"daily\";r=998;t=69076");

    assert!(Case { policies, ..Case::default() }.run().is_empty(), "no policy applied");
}

#[test]
fn integers_have_at_most_fifteen_digits() {
    let decision = ChargeDecision::allowed(u64::MAX, u64::MAX).with_effective_window(Duration::MAX);
    for format in [Headers::draft_11(), Headers::draft_07(), Headers::draft_06(), Headers::github()] {
        let headers = Case::one(format, Quota::per_minute(100), decision.clone());
        for (name, value) in &headers {
            let longest = value.as_bytes().split(|byte| !byte.is_ascii_digit()).map(<[u8]>::len).max();
            assert!(longest <= Some(15), "{name}: {value:?}");
        }
    }
}

/// The vectors of express-rate-limit's and throttled's header tests, and of the draft's examples.
#[test]
fn headers_match_the_vectors_of_peers_and_of_the_draft() {
    let window = |limit, seconds| Quota::fixed_window(limit, secs(seconds)).unwrap();
    let four_of_five = || allowed(5, 4, secs(60));

    // express-rate-limit, legacy and draft 7
    let headers = Case::one(Headers::x_rate_limit(ResetEncoding::EpochSeconds), window(5, 60), four_of_five());
    assert_lines(&headers, &["x-ratelimit-limit: 5", "x-ratelimit-remaining: 4", "x-ratelimit-reset: 1705420860"]);
    let headers = Case::one(Headers::draft_07(), window(5, 60), four_of_five());
    assert_lines(&headers, &["ratelimit-policy: 5;w=60", "ratelimit: limit=5, remaining=4, reset=60"]);
    // … draft 8, whose `pk` is optional and not sent, and whose spaces are not canonical
    let policies = vec![policy("keep-kalm", window(5, 7_200))];
    let headers = Case { policies, statuses: vec![(0, allowed(5, 4, secs(7_200)))], ..Case::default() }.run();
    assert_lines(&headers, &["ratelimit-policy: \"keep-kalm\";q=5;w=7200", "ratelimit: \"keep-kalm\";r=4;t=7200"]);
    // … Retry-After once the limit is reached, absent before, and absent without headers
    let refused = || denied(1, secs(60));
    assert_eq!(Case::one(Headers::draft_06(), window(1, 60), refused())["retry-after"], "60");
    assert!(!Case::one(Headers::draft_06(), window(1, 60), allowed(1, 0, secs(60))).contains_key("retry-after"));
    assert!(Case::one(Headers::none(), window(1, 60), refused()).is_empty());
    // throttled: Retry-After alone
    let only_retry_after = Headers::draft_11().send(When::Never);
    assert_lines(&Case::one(only_retry_after, window(1, 60), refused()), &["retry-after: 60"]);
    // the draft's two policies, and its flagship example
    let policies = vec![policy("burst", Quota::per_minute(100)), policy("daily", Quota::per_day(1_000))];
    let statuses = vec![(0, allowed(100, 99, secs(60))), (1, allowed(1_000, 999, secs(86_400)))];
    let headers = Case { policies, statuses, ..Case::default() }.run();
    assert_eq!(headers["ratelimit-policy"], "\"burst\";q=100;w=60, \"daily\";q=1000;w=86400");
    let headers = Case::one(Headers::draft_11(), Quota::per_minute(100), allowed(100, 50, secs(30)));
    assert_eq!(headers["ratelimit"], "\"default\";r=50;t=30");
}

#[test]
fn headers_are_sent_under_their_condition() {
    let sent = |when, remaining| {
        let format = Headers::draft_11().send(when);
        let headers = Case::one(format, Quota::per_minute(100), allowed(100, remaining, secs(1)));
        headers.contains_key("ratelimit")
    };
    assert!(sent(When::Always, 100));
    assert!(!sent(When::Never, 0));
    assert!(!sent(When::OnRefusal, 0));
    assert!(sent(When::NearExhaustion { percent: 20 }, 20));
    assert!(!sent(When::NearExhaustion { percent: 20 }, 21));
    for when in [When::OnRefusal, When::NearExhaustion { percent: 0 }] {
        let headers = Case::one(Headers::draft_11().send(when), Quota::per_minute(100), denied(100, secs(1)));
        assert!(headers.contains_key("ratelimit"), "{when:?}");
    }
    let both = Headers::draft_11().send(When::OnRefusal).and(Headers::github());
    let headers = Case::one(both, Quota::per_minute(100), allowed(100, 1, secs(1)));
    assert!(
        !headers.contains_key("ratelimit") && headers.contains_key("x-ratelimit-used"),
        "each under its own condition"
    );
}

#[test]
fn redirects_get_no_header_but_retry_after() {
    for status in [301, 302, 304, 307] {
        let case = Case { status, statuses: vec![(0, allowed(100, 0, secs(1)))], ..Case::default() };
        assert!(case.run().is_empty());
    }
    let case = Case { status: 307, statuses: vec![(0, denied(100, secs(5)))], ..Case::default() };
    assert_lines(&case.run(), &["retry-after: 5"]);
}

#[test]
fn header_of_two_formats_has_the_value_of_the_first() {
    let format = Headers::draft_11().and(Headers::draft_07()).and(Headers::draft_06());
    let headers = Case::one(format.clone(), Quota::per_minute(100), allowed(100, 50, secs(30)));
    assert_lines(
        &headers,
        &[
            "ratelimit-limit: 100",
            "ratelimit-policy: \"default\";q=100;w=60",
            "ratelimit-remaining: 50",
            "ratelimit-reset: 30",
            "ratelimit: \"default\";r=50;t=30",
        ],
    );
    let names = format.names();
    assert_eq!(names.len(), 10);
    assert!(headers.keys().all(|name| names.contains(name)) && names.contains(&RETRY_AFTER));
    let grpc = ["grpc-status", "grpc-message", "grpc-status-details-bin", "grpc-retry-pushback-ms"];
    assert_eq!(Headers::none().names(), grpc);
    assert_eq!(Headers::draft_11().retry_after(false).names()[..2], ["ratelimit-policy", "ratelimit"]);
    assert!(Headers::none().and(Headers::draft_11()).names().contains(&RETRY_AFTER));
}

#[test]
fn combined_formats_take_the_shorter_cap_and_the_first_jitter() {
    let refused = |format| Case::one(format, Quota::per_minute(100), denied(100, secs(1_000)))["retry-after"].clone();
    let (short, long) =
        (|| Headers::draft_11().max_reported_wait(secs(30)), || Headers::draft_06().max_reported_wait(secs(60)));
    assert_eq!(refused(short().and(long())), "30");
    assert_eq!(refused(long().and(short())), "30");
    let (none, double) = (|| Jitter::percent(0), || Headers::github().jitter(Jitter::percent(200)));
    assert_eq!(refused(Headers::draft_11().jitter(none()).and(double())), "1000");
    assert_ne!(refused(Headers::draft_11().and(double())), "1000");
}

#[test]
fn reset_is_never_before_the_wait() {
    let decision = ChargeDecision::denied(100, 0, Wait::After(secs(90))).with_reset_after(secs(60));
    let format = Headers::x_rate_limit(ResetEncoding::DeltaSeconds);
    assert_eq!(Case::one(format, Quota::per_minute(100), decision)["x-ratelimit-reset"], "90");
}

#[test]
fn jitter_moves_all_waits_of_a_refusal_equally() {
    let format = || Headers::draft_11().and(Headers::draft_06()).jitter(Jitter::percent(10));
    let mut seen = std::collections::BTreeSet::new();
    for seed in 0..50 {
        let statuses = vec![(0, denied(100, secs(1_000)))];
        let headers = Case { format: format(), statuses, seed, ..Case::default() }.run();
        let reported = headers["retry-after"].to_str().unwrap().to_owned();
        let wait: u64 = reported.parse().unwrap();
        assert!((1_000..=1_100).contains(&wait), "{wait}");
        assert_eq!(headers["ratelimit"], format!("\"default\";r=0;t={reported}"));
        assert_eq!(headers["ratelimit-reset"], reported);
        seen.insert(wait);

        let statuses = vec![(0, allowed(100, 50, secs(1_000)))];
        let headers = Case { format: format(), statuses, seed, ..Case::default() }.run();
        assert_eq!(headers["ratelimit"], "\"default\";r=50;t=1000");
        assert_eq!(headers["ratelimit-reset"], "1000");
    }
    assert!(seen.len() > 20);
}

#[test]
fn wall_clock_is_read_only_for_dates() {
    #[derive(Debug)]
    struct Unread;
    impl Clock for Unread {
        fn now(&self) -> Timestamp {
            unreachable!()
        }
    }
    let policies = [hundred()];
    let decision = allowed(100, 50, secs(30));
    let views = [PolicyView { index: 0, policy: &policies[0], key: Some(&KEY), decision: &decision, refuses: false }];
    let format = Headers::draft_11().and(Headers::x_rate_limit(ResetEncoding::DeltaSeconds));
    let prepared = PreparedHeaders::new(&format.clock(Unread), &policies, None);
    write(&prepared, &mut HeaderMap::new(), &views, StatusCode::OK, None);
}
