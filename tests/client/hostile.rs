//! Headers of broken and hostile servers: nothing panics, memory is bounded, and nonsense is
//! unknown.

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use tower_ratelimit::Wait;

use super::*;

const YEAR: Duration = Duration::from_secs(366 * 86_400);

/// Asserts what holds for any headers.
#[track_caller]
fn is_sane(headers: &HeaderMap) {
    let advice = Advice::read(headers, now());
    assert!(advice.policies().len() <= 16);
    assert!(advice.wait().duration().is_none_or(|wait| !wait.is_zero() && wait <= YEAR));
    assert!(advice.retry_after().is_none_or(|wait| wait <= YEAR));
    for policy in advice.policies() {
        assert!(policy.name().is_none_or(|name| (1..=256).contains(&name.len())));
        assert!(policy.unit().is_none_or(|unit| (1..=256).contains(&unit.len())));
        assert!(policy.partition().is_none_or(|key| (1..=256).contains(&key.len())));
        assert!(policy.window().is_none_or(|window| !window.is_zero() && window <= YEAR));
        assert!(policy.until_reset().is_none_or(|reset| reset <= YEAR));
    }
    let _ = (format!("{advice:?}"), advice.forbids_retry());
}

#[test]
fn nonsense_is_unknown() {
    for value in ["-1", "NaN", "inf", "1e9", "0x5", "5 requests", "ten", "", "\u{e9}", ";", ",", "="] {
        let lines = format!("X-RateLimit-Limit: {value}\nX-RateLimit-Remaining: {value}\nX-RateLimit-Reset: {value}");
        means(&lines, &[], None);
        means(&format!("Retry-After: {value}"), &[], None);
        means(&format!("Retry-After-Ms: {value}"), &[], None);
        means(&format!("RateLimit: {value}"), &[], None);
        means(&format!("RateLimit-Policy: {value}"), &[], None);
    }
}

#[test]
fn waits_are_capped_at_a_year() {
    for value in ["999999999", "2147483647", "9999999999", "999999999999d", "Fri, 31 Dec 9999 23:59:59 GMT"] {
        assert_eq!(read(&format!("Retry-After: {value}")).wait(), Wait::After(YEAR), "{value}");
        let exhausted = format!("X-RateLimit-Remaining: 0\nX-RateLimit-Reset: {value}");
        means(&exhausted, &["0/?"], None);
    }
    means("RateLimit: \"a\";r=0;t=999999999999999", &["a: 0/?"], None);
    means("Retry-After-Ms: 999999999999999", &[], Some(YEAR.as_secs_f64()));
    // The year 2001 in seconds and in milliseconds, and a number that is no date.
    for value in ["1000000000", "1000000000000", "99999999999999999999"] {
        means(&format!("Retry-After: {value}"), &[], Some(YEAR.as_secs_f64()));
        means(&format!("X-RateLimit-Remaining: 0\nX-RateLimit-Reset: {value}"), &["0/?"], None);
    }
    means("Retry-After: Fri, 01 Jan 1971 00:00:00 GMT", &[], None);
    means("Retry-After-Ms: 99999999999999999999", &[], Some(YEAR.as_secs_f64()));
}

#[test]
fn header_that_comes_twice_counts_with_its_stricter_value() {
    means(
        "X-RateLimit-Limit: 10\nX-RateLimit-Limit: 5\nX-RateLimit-Remaining: 0\nX-RateLimit-Remaining: 9
         X-RateLimit-Reset: 3\nX-RateLimit-Reset: nonsense\nX-RateLimit-Reset: 7",
        &["0/5, reset 7s"],
        Some(7.0),
    );
    let shopify = "X-Shopify-Shop-Api-Call-Limit";
    means(&format!("{shopify}: 40/40\n{shopify}: 1/40\n{shopify}: nonsense"), &["0/40, unit requests"], None);
    means(&format!("{shopify}: 1/80\n{shopify}: 2/40"), &["38/40, unit requests"], None);
}

#[test]
fn response_from_a_cache_describes_no_policies() {
    let lines = "RateLimit: \"a\";r=0;t=5\nX-RateLimit-Remaining: 0\nX-RateLimit-Reset: 5\nRetry-After: 3";
    means(&format!("{lines}\nAge: 0"), &["0/?, reset 5s", "a: 0/?, reset 5s"], Some(3.0));
    means(&format!("{lines}\nAge: 1"), &[], Some(3.0));
}

#[test]
fn at_most_sixteen_policies_are_kept() {
    let items: Vec<String> = (0..1_000).map(|n| format!("\"p{n}\";r=0;t={n}")).collect();
    let policies: Vec<String> = (0..1_000).map(|n| format!("\"q{n}\";q=1;w=1")).collect();
    let mut lines = format!("RateLimit: {}\nRateLimit-Policy: {}\n", items.join(","), policies.join(","));
    lines.extend((0..1_000).map(|n| format!("x-ratelimit-remaining-g{n}: 0\nz{n}-ratelimit: 100;w=60, \"a\";r=1\n")));
    let headers = headers(&lines);
    is_sane(&headers);
    assert_eq!(Advice::read(&headers, now()).policies().len(), 16);
}

#[test]
fn megabytes_of_headers_are_read_in_bounded_memory() {
    let long = "a".repeat(1 << 20);
    let mut headers = HeaderMap::new();
    for (name, value) in [
        ("ratelimit", format!("\"{long}\";r=0;t=5")),
        ("ratelimit", "\"a\";r=0;t=5,".repeat(100_000) + "\"b\";r=0;t=6"),
        ("ratelimit-policy", format!("\"b\";q=1;pk=:{long}:")),
        ("ratelimit-policy", format!("\"b\";q=1;qu=\"{long}\"")),
        ("x-ratelimit-bucket", long.clone()),
        ("x-ratelimit-remaining", "0".into()),
        ("x-ratelimit-limit", "5;w=60,".repeat(100_000) + "5"),
        ("x-ratelimit-reset", "1m".repeat(1 << 19)),
        ("retry-after", "9".repeat(1 << 20)),
        ("grpc-status-details-bin", "CgA".repeat(1 << 18)),
        ("grpc-retry-pushback-ms", "9".repeat(1 << 20)),
    ] {
        headers.append(HeaderName::from_static(name), HeaderValue::try_from(value).unwrap());
    }
    let measured = allocation_counter::measure(|| {
        let advice = Advice::read(&headers, now());
        assert!(advice.policies().len() <= 16);
    });
    assert!(measured.bytes_max < 64 << 10, "{measured:?}");
    is_sane(&headers);
}

#[test]
fn response_without_advice_costs_no_allocation() {
    let headers = headers("content-type: text/plain\ndate: Tue, 16 Jan 2024 16:00:00 GMT\nx-request-id: 5\nage: 0");
    let measured = allocation_counter::measure(|| assert_eq!(Advice::read(&headers, now()), Advice::default()));
    assert_eq!(measured.count_total, 0);
}

/// Mutates the corpus of vendors by bytes, and reads it.
#[test]
fn mutated_headers_do_not_panic() {
    let values: Vec<(HeaderName, Vec<u8>)> = vendors::all()
        .chain(["grpc-status-details-bin: CAgSE3JhdGUgbGltaXQgZXhjZWVkZWQaMAoodHlwZS5nb29nbGVhcGlzLmNvbS9nb29nbGUucnBjLlJldHJ5SW5mbxIECgIIBQ\ngrpc-retry-pushback-ms: 600"])
        .flat_map(|lines| headers(lines).into_iter().filter_map(|(name, value)| Some((name?, value.as_bytes().to_vec()))).collect::<Vec<_>>())
        .collect();
    let byte = prop_oneof![any::<u8>(), prop::sample::select(b"0123456789.;:,=\"\\-+TZ hmsdq \t\xff".to_vec()),];
    let edit = (any::<prop::sample::Index>(), any::<prop::sample::Index>(), byte, 0_u8..4);
    let edits = prop::collection::vec((any::<prop::sample::Index>(), edit), 1..8);
    let config = Config { failure_persistence: None, cases: crate::support::cases(5_000), ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let result = runner.run(&edits, |edits| {
        let mut headers = HeaderMap::new();
        for (which, (at, other, byte, kind)) in edits {
            let (name, mut value) = which.get(&values).clone();
            let place = at.index(value.len() + 1);
            match kind {
                0 => value.insert(place, byte),
                1 => value.truncate(place),
                2 => value.splice(place..place, other.get(&values).1.clone()).for_each(drop),
                _ => {
                    if let Some(known) = value.get_mut(place) {
                        *known = byte;
                    }
                }
            }
            // Servers can send no other bytes.
            if let Ok(value) = HeaderValue::from_bytes(&value) {
                headers.append(if kind == 3 { other.get(&values).0.clone() } else { name }, value);
            }
        }
        is_sane(&headers);
        Ok(())
    });
    result.unwrap();
}
