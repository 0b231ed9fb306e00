//! The promises of quotas about their words, their ranges, and the fixes that errors name.

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::algorithm::properties::key::State;
use crate::algorithm::properties::quotas::{plain, quota, shapes};
use crate::base::sampling::config;
use crate::base::time::PERIOD_US_MAX;
use crate::error::{ConfigError, ConfigErrorKind};

const DAY: Duration = Duration::from_secs(86_400);
const MICROSECOND: Duration = Duration::from_micros(1);

/// Words that mean something somewhere, and some that mean nothing anywhere. The names of algorithms come to them.
const WORDS: [&str; 68] = [
    "100",
    "0",
    "1",
    "7",
    "18446744073709551615",
    "18446744073709551616",
    "999999999999999",
    "1_000",
    "_",
    "-1",
    "+5",
    "1.5",
    "1e9",
    "/",
    "per",
    "min",
    "s",
    "ms",
    "µs",
    "366d",
    "367 days",
    "10s",
    "0 s",
    "day",
    "fortnight",
    "burst",
    "queue",
    "delay",
    "after",
    "debt",
    "from",
    "the",
    "first",
    "request",
    "buckets",
    "oldest",
    "weighted",
    "counted",
    "counting",
    "denied",
    "in proportion",
    "fixed",
    "for",
    "times",
    "up",
    "to",
    "within",
    "at",
    "at once",
    "wait",
    "MB",
    "mb",
    "10MiB",
    "7 kB",
    "B",
    "TiB",
    "month",
    "100 GB per",
    "calendar",
    "calendar month",
    "calendar day",
    "calendar week",
    "from day 31",
    "from day 0",
    "from sunday",
    "in UTC",
    "in Europe/Berlin",
    "in nowhere",
];

/// Returns the algorithms whose units come back with time.
fn timed() -> Vec<Algorithm> {
    Algorithm::timed().collect()
}

fn words() -> Vec<&'static str> {
    WORDS.into_iter().chain(Algorithm::ALL.iter().map(|algorithm| algorithm.as_str())).collect()
}

/// Every message says what to do: a range, another name, or an example to follow.
fn names_the_fix(error: &ConfigError) -> bool {
    let message = error.to_string();
    let fixes = match error.kind() {
        ConfigErrorKind::Syntax => ["write it like", "use a name of", "feature `time-zones`"].as_slice(),
        ConfigErrorKind::NotAnOption => &["it belongs to"],
        ConfigErrorKind::Range => {
            &["at most", "such as", "use ", "1 ", "make it smaller", "choose a number of buckets", "lengthen the queue"]
        }
        kind => panic!("{kind:?} is the error of a rule, not of a quota"),
    };
    fixes.iter().any(|fix| message.contains(fix))
}

proptest! {
    #![proptest_config(config(10_000))]

    #[test]
    fn printed_quota_is_read_as_the_same_quota(
        shape in shapes(), algorithm in prop::sample::select(Algorithm::ALL), first in any::<bool>(), share in any::<bool>(),
    ) {
        let anchor = if first { Anchor::FirstRequest } else { Anchor::Epoch };
        let quota = quota(algorithm, anchor, &shape);
        let quota = quota.in_proportion().ok().filter(|_| share).unwrap_or(quota);
        let words = quota.to_string();
        for words in [words.clone(), words.to_uppercase(), words.replace(',', ""), words.replace(" per ", "/"), format!("  {words} ")] {
            let read: Quota = words.parse().unwrap_or_else(|error| panic!("{words}: {error}"));
            prop_assert_eq!(read, quota, "{}", words);
            prop_assert_eq!(read.fingerprint(), quota.fingerprint());
        }
        prop_assert_eq!(spec::Spec::from_words(quota.spec().to_words()), Some(*quota.spec()), "a state may name its quota itself");
    }

    #[cfg(feature = "serde")]
    #[test]
    fn quota_in_a_file_is_read_as_it_was_written(shape in shapes(), algorithm in prop::sample::select(Algorithm::ALL), first in any::<bool>()) {
        let anchor = if first { Anchor::FirstRequest } else { Anchor::Epoch };
        let quota = quota(algorithm, anchor, &shape);
        let written = serde_json::to_string(&quota).unwrap();
        prop_assert_eq!(&written, &format!("\"{quota}\""));
        prop_assert_eq!(serde_json::from_str::<Quota>(&written).unwrap(), quota);
    }

    #[test]
    fn printed_quota_of_bytes_is_read_as_the_same_quota(
        shape in shapes(), algorithm in prop::sample::select(Algorithm::ALL), limit in any::<bool>(),
    ) {
        let Ok(quota) = quota(algorithm, Anchor::Epoch, &shape).in_bytes() else { return Ok(()) };
        let quota = quota.burst(1 << 20).ok().filter(|_| limit).unwrap_or(quota);
        let words = quota.to_string();
        for words in [words.clone(), words.replace(',', ""), words.replace(" per ", "/"), words.replace(" MiB", "MiB")] {
            prop_assert_eq!(words.parse::<Quota>(), Ok(quota), "{}", words);
        }
        prop_assert!(quota.counts_bytes() && quota.counts_alike(&words.replace(" B", "").parse().unwrap_or(quota)));
    }

    #[test]
    fn options_may_stand_in_any_order(shape in shapes(), algorithm in prop::sample::select(timed()), seed in any::<u64>()) {
        let quota = quota(algorithm, Anchor::Epoch, &shape);
        let words = quota.to_string();
        // A calendar names no algorithm, and may have no options.
        let (rate, options) = words.split_once(", ").unwrap_or((&words, ""));
        let mut options: Vec<&str> = options.split(", ").collect();
        for index in (1..options.len()).rev() {
            options.swap(index, (seed >> index) as usize % (index + 1));
        }
        let words = format!("{rate} {}", options.join(" "));
        prop_assert_eq!(words.parse::<Quota>().expect("the order does not matter"), quota, "{}", words);
    }

    #[test]
    fn words_in_any_order_are_a_quota_or_an_error_that_helps(
        words in prop::collection::vec(prop::sample::select(words()), 0..12),
    ) {
        let start = if words.len() % 2 == 0 { "10 per " } else { "" };
        check(&format!("{start}{}", words.join(" ")));
    }

    #[test]
    fn any_text_is_a_quota_or_an_error_that_helps(text in any::<String>(), tail in any::<String>()) {
        check(&text);
        check(&format!("5/s {text}"));
        check(&format!("{text}/{tail}"));
    }
}

fn check(text: &str) {
    match text.parse::<Quota>() {
        Ok(quota) => assert_eq!(quota.to_string().parse(), Ok(quota), "{text}"),
        Err(error) => {
            assert!(names_the_fix(&error), "{text}: {error}");
            assert!(error.to_string().chars().count() < 400, "{error}");
        }
    }
}

/// The longest error: it lists the algorithms and the options, and suggests one.
#[test]
fn error_of_a_long_text_stays_short() {
    for word in ["counting", "slidin", "concurrency", "18446744073709551615"] {
        check(&format!("10 per 10s {word} request 10MiB 0 999999999999999 oldest 18446744073709551615"));
    }
}

#[test]
fn period_of_a_calendar_is_its_longest_window() {
    for (calendar, days) in [
        (Calendar::day(), 1),
        (Calendar::week(), 7),
        (Calendar::month(), 31),
        (Calendar::quarter(), 92),
        (Calendar::year(), 366),
    ] {
        assert_eq!(Quota::calendar(1, calendar).unwrap().period(), days * DAY, "{calendar}");
    }
}

#[test]
fn constructor_takes_both_ends_of_its_range() {
    for algorithm in timed() {
        let build = |limit, period| plain(algorithm, limit, period, period);
        let (least, most) = match algorithm {
            Algorithm::LeakyQueue => (0, UNITS_MAX - 1), // a queue holds one more: the one that is due
            Algorithm::SlidingLog => (0, 1_000_000),
            Algorithm::Block => (1, 4_095),
            _ => (0, UNITS_MAX),
        };
        for period in [MICROSECOND, 366 * DAY] {
            for limit in [least, 1, most] {
                let quota = build(limit, period).unwrap();
                assert_eq!((quota.algorithm(), quota.limit(), quota.period()), (algorithm, limit, period));
            }
        }
        for period in [Duration::ZERO, Duration::from_nanos(1_001), 366 * DAY + MICROSECOND, Duration::MAX] {
            let error = build(1, period).unwrap_err();
            assert!(error.kind() == ConfigErrorKind::Range && names_the_fix(&error), "{error}");
        }
        for limit in [most + 1, u64::MAX] {
            let error = build(limit, DAY).unwrap_err();
            assert!(error.kind() == ConfigErrorKind::Range && names_the_fix(&error), "{error}");
        }
    }
    for limit in [0, 1, u64::from(u32::MAX) + 1, UNITS_MAX, UNITS_MAX + 1, u64::MAX] {
        let simple =
            [Quota::per_second(limit), Quota::per_minute(limit), Quota::per_hour(limit), Quota::per_day(limit)];
        for quota in simple {
            assert_eq!(quota.capacity(), limit.min(UNITS_MAX), "{quota}");
            assert_eq!(Quota::new(quota.limit(), quota.period()), Ok(quota), "in the range of all quotas");
        }
    }
}

#[test]
fn bucket_drains_within_2_to_the_48_microseconds() {
    for quota in ["1 per µs", "1 per µs step bucket", "1 per µs leaky bucket", "1 per µs gcra"] {
        let quota: Quota = quota.parse().unwrap();
        assert_eq!(quota.burst(1 << 48).unwrap().refill_time(), Duration::from_micros(1 << 48));
        for slow in [quota.burst((1 << 48) + 1), quota.max_debt((1 << 48) + 1)].map(Result::unwrap_err) {
            assert!(slow.kind() == ConfigErrorKind::Range && names_the_fix(&slow), "{slow}");
        }
    }
}

#[test]
fn quota_text_error_is_short_and_printable() {
    let long = "x".repeat(100_000);
    let number = "9".repeat(100_000);
    for text in [
        &long,
        &format!("5 per {long}"),
        &format!("{number}/s"),
        &format!("5/s burst {number}"),
        &format!("5/s {long}"),
        &format!("5 {long}"),
        &format!("5/s {long} gcra"),
        "5\u{1b}[2J/s",
        "5/\u{202e}s",
    ] {
        let message = text.parse::<Quota>().unwrap_err().to_string();
        assert!(message.chars().count() < 600, "{} characters", message.chars().count());
        assert!(!message.contains(|c: char| c.is_control() || c == '\u{202e}'), "{message:?}");
    }
}

#[test]
fn quota_text_error_says_how_to_fix_it() {
    use ConfigErrorKind::{NotAnOption, Range, Syntax};
    for (text, kind, fix) in [
        ("", Syntax, "a limit is missing"),
        ("5", Syntax, "`per` is missing"),
        ("5 bananas per minute", Syntax, "`bananas` stands where `per` should be"),
        ("5 requests requests per minute", Syntax, "`requests` stands where `per` should be"),
        ("5 kB requests per minute", Syntax, "`requests` stands where `per` should be"),
        ("5r/s", Syntax, "nginx's `5r/s` is `5/s, gcra`"),
        ("1k/min", Syntax, "write the number out, such as 1000"),
        ("3 at once wait 10", Syntax, "a unit of time is missing after `10`, such as `10 s`"),
        ("5 per 10", Syntax, "a unit of time is missing after `10`"),
        ("5 per minuet", Syntax, "did you mean `minute`?"),
        ("5 per calender month", Syntax, "did you mean `calendar`?"),
        ("5 per calendar month Europe/Berlin", Syntax, "as in `month from day 15 in Europe/Berlin`"),
        ("5 per calendar month in Europe/Nowhere", Syntax, "`Europe/Nowhere` is not a known time zone"),
        // Words of others for periods, and of calendars for windows that are none.
        ("5 per mo", Syntax, "(did you mean `calendar month`?)"),
        ("5/mon", Syntax, "(did you mean `calendar month`?)"),
        ("5/yr", Syntax, "(did you mean `calendar year`?)"),
        ("5/qtr", Syntax, "(did you mean `calendar quarter`?)"),
        ("5/quarter", Syntax, "(did you mean `calendar quarter`?)"),
        ("5/monthly", Syntax, "(did you mean `calendar month`?)"),
        ("5/P1M", Syntax, "(did you mean `calendar month`?)"),
        ("5/1mo", Syntax, "(did you mean `calendar month`?)"),
        ("5 per 1.month", Syntax, "or `calendar month`"),
        ("5 per 3 calendar months", Syntax, "or `calendar month`"),
        ("5 per billing month", Syntax, "or `calendar month`"),
        ("5/M", Syntax, "write `min`, or `calendar month`"),
        ("5/1M", Syntax, "write `min`, or `calendar month`"),
        ("5 per 2 M", Syntax, "write `min`, or `calendar month`"),
        ("5 monthly", Syntax, "as in `per minute` or `per calendar month`"),
        ("5 every month", Syntax, "as in `per minute` or `per calendar month`"),
        ("5 calendar month", Syntax, "as in `per minute` or `per calendar month`"),
        ("5 per calendar months", Syntax, "did you mean `month`?"),
        ("5 per month in Europe/Berlin", Syntax, "`per calendar month from day 15 in Europe/Berlin`"),
        ("5 per month from day 15", Syntax, "`per calendar month from day 15 in Europe/Berlin`"),
        ("5 per month from the 15th", Syntax, "`per calendar month from day 15 in Europe/Berlin`"),
        ("5/week, fixed window, from sunday", Syntax, "`per calendar month from day 15 in Europe/Berlin`"),
        ("5 per month on the 1st", Syntax, "`per calendar month from day 15 in Europe/Berlin`"),
        ("5 per month (calendar)", Syntax, "`per calendar month from day 15 in Europe/Berlin`"),
        ("5/s sliding windw", Syntax, "did you mean `sliding window`?"),
        ("5/s brust 7", Syntax, "nor an option of a token bucket (burst, debt, in proportion), or is given twice (did"),
        (
            "5/s sliding log, oldest droped",
            Syntax,
            "an option of a sliding log (debt, counting denied, in proportion), or",
        ),
        (
            "3 at once weit 3 s",
            Syntax,
            "an option of a concurrency limit (wait), or is given twice (did you mean `wait`?)",
        ),
        ("1,000/min", Syntax, "a number has no commas: write `1000`"),
        ("1,000,000 requests per day", Syntax, "a number has no commas: write `1000000`"),
        ("1,00/min", Syntax, "`00` stands where `per` should be"),
        ("1 000/min", Syntax, "`000` stands where `per` should be"),
        ("2 concurrent", Syntax, "to limit the requests in flight, write `2 at once`"),
        ("2 concurrent requests", Syntax, "write `2 at once`"),
        ("2 requests in flight", Syntax, "write `2 at once`"),
        ("2 at a time", Syntax, "write `2 at once`"),
        ("an hour", Syntax, "`an` is not a whole number"),
        ("10 a", Syntax, "a period is missing"),
        ("5 per", Syntax, "a period is missing"),
        ("5 per fortnight", Syntax, "year, month (30 days), week, d, h, min, s, ms, µs, or `calendar month`"),
        ("+5/s", Syntax, "whole number"),
        ("5/s token bucket sliding log", Syntax, "two algorithms"),
        ("5/s burst", Syntax, "the number after `burst` is missing"),
        ("5/s fixed-window", Syntax, "did you mean `fixed window`?"),
        ("5/s from now", Syntax, "nor an option of a token bucket"),
        ("5/s oldest", Syntax, "`oldest` is neither"),
        ("5/s burst 0", Range, "1 for strict spacing"),
        ("5/0s", Range, "at least one"),
        ("5/367d", Range, "366 days"),
        ("1/d burst 5000", Range, "make it smaller"),
        ("1/d debt 5000", Range, "make it smaller"),
        ("5/s burst 3 fixed window", NotAnOption, "token bucket"),
        ("5/s queue 3", NotAnOption, "leaky queue"),
        ("5/s counting denied", NotAnOption, "sliding log"),
        ("5/s buckets", Syntax, "the number before `buckets` is missing"),
        ("5/s burst 2 burst 3", Syntax, "is given twice"),
        ("10/s block for 1h times 2 until 1d", Syntax, "`until` stands where `up to` should be"),
        ("5/s 7 buckets sliding window", Range, "such as 5"),
        ("5/s 0 buckets sliding window", Range, "1 to 3600"),
        ("5/s leaky queue queue 2 delay after 3", Range, "lengthen the queue"),
        ("1000000000000000/s", Range, "larger unit"),
        ("1000001/s sliding log", Range, "60 buckets"),
        ("3 at", Syntax, "`at` stands where `per` should be"),
        ("3 at once burst 2", NotAnOption, "token bucket"),
        ("3 at once token bucket", Syntax, "`token` is not an option of a concurrency limit"),
        ("3 at once per minute", Syntax, "`per` is not an option of a concurrency limit"),
        ("3 at once wait", Syntax, "a period is missing"),
        ("3 at once wait 3 s wait 3 s", Syntax, "is given twice"),
        ("3 at once wait 400 d", Range, "366 days"),
        ("1000000000000 at once", Range, "at most 999999999999"),
        ("5/s concurrency limit", Syntax, "`concurrency` is neither an algorithm (token bucket, "),
        ("5/s wait 3 s", NotAnOption, "leaky queue"),
        ("10 mb/s", Syntax, "`mb` is not a unit of bytes (case matters): B, kB, MB, "),
        ("10Mb/s", Syntax, "`Mb` is not a unit of bytes"),
        ("10 bytes per s", Syntax, "`bytes` is not a unit of bytes"),
        ("1.5 GB/h", Syntax, "`1.5` is not a whole number that fits: use a smaller unit"),
        ("-1 GB/h", Syntax, "`-1` is not a whole number"),
        ("10 MB/s burst 5", Syntax, "write a unit after `burst 5`, such as `burst 5 kB`"),
        ("10/s burst 5 MB", Syntax, "`burst` counts MB, so the limit needs a unit of bytes"),
        ("99999999 TiB per second", Range, "99999999 TiB is too large: at most 999999999999999 bytes"),
        ("1000 TB/s", Range, "count in a larger unit"),
        ("910 TiB per second", Range, "at most 999999999999999"),
        ("5 B/s block for 1h", NotAnOption, "it belongs to token bucket"),
        ("2 MB/s sliding log", Range, "60 buckets"),
        ("5 per 13 months", Range, "366 days"),
    ] {
        let error = text.parse::<Quota>().expect_err(text);
        assert_eq!(error.kind(), kind, "{text}: {error}");
        assert!(error.to_string().contains(fix), "{text}: {error}");
    }
}

#[test]
fn limit_may_say_that_it_counts_requests() {
    for (words, same) in [
        ("100 requests per minute", "100/min"),
        ("10 a minute", "10/min"),
        ("100 requests an hour", "100/h"),
        ("1 request per 10 s, burst 3", "1 per 10 s burst 3"),
        ("5 req/s", "5/s"),
        ("3 requests at once", "3 at once"),
    ] {
        assert_eq!(words.parse::<Quota>(), same.parse(), "{words}");
    }
}

#[test]
fn units_of_bytes_and_long_times_are_read_exactly() {
    for (words, limit, printed) in [
        ("10 MiB per hour", 10 << 20, "10 MiB per hour, token bucket"),
        ("10MB/h burst 20MB", 10_000_000, "10 MB per hour, burst 20 MB, token bucket"),
        ("1 GB per month", 1_000_000_000, "1 GB per 30 days, token bucket"),
        ("1 kB per week", 1_000, "1 kB per 7 days, token bucket"),
        ("1024 kB per year", 1_024_000, "1000 KiB per 365 days, token bucket"),
        ("1_500_001 B/s", 1_500_001, "1500001 B per second, token bucket"),
        ("0 TiB/s", 0, "0 B per second, token bucket"),
        ("909 TiB PER DAY", 909 << 40, "909 TiB per day, token bucket"),
        ("5 MB at once", 5_000_000, "5 MB at once"),
        ("1 MB/s leaky queue queue 5 MB", 1_000_000, "1 MB per second, queue 5 MB, leaky queue"),
        ("1 KiB/s debt up to 3 B", 1_024, "1 KiB per second, debt up to 3 B, token bucket"),
    ] {
        let quota: Quota = words.parse().unwrap_or_else(|error| panic!("{words}: {error}"));
        assert_eq!((quota.limit(), quota.to_string().as_str(), quota.counts_bytes()), (limit, printed, true));
        assert_eq!(quota.to_string().parse(), Ok(quota));
    }
    assert_eq!("5 per month".parse(), Quota::new(5, 30 * DAY));
}

#[test]
fn quota_of_bytes_reads_the_states_of_the_same_number() {
    let (bytes, number) = (Quota::per_hour(1_000).in_bytes().unwrap(), Quota::per_hour(1_000));
    assert_ne!(bytes, number);
    assert_eq!(bytes.of_states().fingerprint(), number.of_states().fingerprint());
    let share = bytes.share(std::num::NonZeroU32::new(10).unwrap());
    assert_eq!(share, Quota::per_hour(100).in_bytes().unwrap());
}

#[test]
fn concurrency_limit_is_read_from_its_words() {
    let waits = |wait| Quota::concurrent(3).max_wait(wait).unwrap();
    for (words, quota, printed) in [
        ("3 at once", Quota::concurrent(3), "3 at once"),
        ("1_000 AT ONCE", Quota::concurrent(1_000), "1000 at once"),
        ("0 at once", Quota::concurrent(0), "0 at once"),
        ("3 at once wait 10s", waits(Duration::from_secs(10)), "3 at once, wait 10 seconds"),
        ("3 at once, wait 90_000 ms", waits(Duration::from_secs(90)), "3 at once, wait 90 seconds"),
        ("3 at once, wait 1 minute", waits(Duration::from_secs(60)), "3 at once, wait 1 minute"),
    ] {
        assert_eq!(words.parse(), Ok(quota), "{words}");
        assert_eq!(quota.to_string(), printed);
    }
    assert_eq!(Quota::concurrent(u64::MAX), Quota::concurrent(999_999_999_999), "a larger limit counts as the largest");
    let queue = Quota::leaky_queue(5, Duration::from_secs(1)).and_then(|queue| queue.max_wait(Duration::from_secs(3)));
    assert_eq!("5 per second, leaky queue, wait 3 s".parse(), queue);
}

#[test]
fn concurrency_limits_count_in_one_state_whatever_the_limit_is() {
    let [few, many] = [3, 100].map(Quota::concurrent);
    assert_eq!(few.of_states().fingerprint(), many.of_states().fingerprint());
    assert_ne!(few.of_states().fingerprint(), Quota::per_minute(3).of_states().fingerprint());
    assert!(!few.counts_alike(&many));
    let waits = few.max_wait(Duration::from_secs(10)).unwrap();
    assert!(few.counts_alike(&waits) && few != waits, "a wait changes when a request passes, and not what it takes");
    assert_eq!((waits.wait_in_line(), few.wait_in_line()), (Duration::from_secs(10), Duration::ZERO));
    assert_eq!(waits.max_wait(Duration::ZERO).unwrap(), few);
    let share = |parts| many.share(std::num::NonZeroU32::new(parts).unwrap());
    assert_eq!([share(1), share(3), share(1_000)], [100, 33, 1].map(Quota::concurrent));
    assert_eq!((few.period(), few.refill_time(), few.capacity()), (Duration::ZERO, Duration::ZERO, 3));
    for refused in [few.burst(2), few.max_debt(2), few.in_proportion(), few.count_denied(), few.buckets(2)] {
        assert!(refused.is_err_and(|error| error.kind() == ConfigErrorKind::NotAnOption));
    }
}

/// A debt equal to the capacity was taken for the default, and a later burst replaced it.
#[test]
fn a_debt_that_was_chosen_stays_whatever_the_burst_becomes() {
    let chosen = Quota::per_second(5).max_debt(5).and_then(|quota| quota.burst(10)).unwrap();
    assert_eq!((chosen.spec().burst, chosen.spec().debt), (10, 5));
    let default = Quota::per_second(5).burst(10).unwrap();
    assert_eq!(default.spec().debt, 10, "by default as much as the capacity");
    assert_eq!("5/s debt 5 burst 10".parse(), Ok(chosen));
    assert_eq!("5/s burst 10 debt 5".parse(), Ok(chosen));
    assert_eq!("5/s, debt up to 5, burst 10".parse(), Ok(chosen));
    assert_eq!(chosen.to_string(), "5 per second, burst 10, debt up to 5, token bucket");
}

#[test]
fn a_quota_holds_what_another_may_have_used() {
    let small = Quota::per_minute(10);
    assert_eq!(small.holding(20), small, "it owes as much as its capacity by default");
    assert_eq!(small.holding(21), small.max_debt(11).unwrap());
    let owing = small.max_debt(500).unwrap();
    assert_eq!(owing.holding(100), owing);
    // One per day: 3,257 days' worth, since nothing takes longer than 8.9 years to come back.
    let slow = Quota::per_day(1).holding(1_000_000);
    assert_eq!(slow, Quota::per_day(1).max_debt(3_257).unwrap());
    assert!(Quota::per_day(1).max_debt(3_258).is_err());
    let closed = Quota::per_day(0);
    assert_eq!(closed.holding(100), closed);
}

#[cfg(feature = "serde")]
#[test]
fn quota_in_a_file_names_what_is_wrong_and_the_fix() {
    let error = |file: &str| serde_json::from_str::<Quota>(file).unwrap_err().to_string();
    let words = error("\"100 per fortnight\"");
    assert!(words.starts_with("`100 per fortnight` is not a quota: `fortnight` is not a unit of time"), "{words}");
    assert!(words.contains("write it like") && words.ends_with("at line 1 column 19"), "{words}");
    for file in ["100", "{\"limit\": 100}", "null"] {
        assert!(
            error(file).contains("expected a quota in words, such as \"100 per minute, burst 20\""),
            "{}",
            error(file)
        );
    }
}

/// Numbers at the ends of every range, and beyond.
const BOUNDS: [u64; 14] =
    [0, 1, 2, 80, 3_600, 4_095, 4_096, 10_000, 1_000_000, 1_000_001, UNITS_MAX - 1, UNITS_MAX, UNITS_MAX + 1, u64::MAX];

/// Times at the ends of every range, and beyond.
const TIMES: [Duration; 9] = [
    Duration::ZERO,
    Duration::from_nanos(1),
    MICROSECOND,
    Duration::from_micros(7),
    DAY,
    Duration::from_micros(PERIOD_US_MAX - 1),
    Duration::from_micros(PERIOD_US_MAX),
    Duration::from_micros(PERIOD_US_MAX + 1),
    Duration::MAX,
];

/// An option, with a number and two times.
type Choice = fn(Quota, u64, Duration, Duration) -> Result<Quota, ConfigError>;

/// Every option.
const OPTIONS: [Choice; 13] = [
    |quota, n, _, _| quota.burst(n),
    |quota, n, _, _| quota.queue(n),
    |quota, n, _, _| quota.delay_after(n),
    |quota, n, _, _| quota.max_debt(n),
    |quota, _, time, _| quota.max_wait(time),
    |quota, n, _, _| quota.buckets(u32::try_from(n).unwrap_or(u32::MAX)),
    |quota, _, _, _| quota.oldest(Oldest::Counted),
    |quota, _, _, _| quota.anchor(Anchor::FirstRequest),
    |quota, _, _, _| quota.count_denied(),
    |quota, _, _, _| quota.in_proportion(),
    |quota, _, time, _| quota.lasting(time),
    |quota, n, time, other| quota.growing(u32::try_from(n).unwrap_or(u32::MAX), time, other),
    |quota, n, _, _| Ok(quota.holding(n.min(UNITS_MAX))),
];

proptest! {
    #![proptest_config(config(20_000))]

    /// Each quota that can be written, and each share of it, is one that could have been written,
    /// and decides.
    #[test]
    fn quotas_at_their_bounds_and_their_shares_stay_in_range(
        algorithm in prop::sample::select(timed()),
        limit in prop::sample::select(&BOUNDS[..]),
        period in prop::sample::select(&TIMES[..]),
        options in prop::collection::vec(
            (
                prop::sample::select(&OPTIONS[..]),
                prop::sample::select(&BOUNDS[..]),
                prop::sample::select(&TIMES[..]),
                prop::sample::select(&TIMES[..]),
            ),
            0..5,
        ),
        parts in prop::sample::select(&[1_u32, 2, 3, 7, 1_000, u32::MAX][..]),
    ) {
        let Ok(mut quota) = plain(algorithm, limit, period, period) else { return Ok(()) };
        for (option, n, time, other) in options {
            quota = option(quota, n, time, other).unwrap_or(quota);
        }
        let share = quota.share(std::num::NonZeroU32::new(parts).unwrap());
        prop_assert!(share.limit() <= quota.limit() && share.capacity() <= quota.capacity());
        for quota in [quota, share] {
            prop_assert!(Quota::checked(*quota.spec()).is_ok(), "{quota}");
            prop_assert!(quota.spec().delay_after <= quota.capacity());
            prop_assert_eq!(quota.to_string().parse::<Quota>(), Ok(quota));
            for (now, cost) in [(0, 1), (crate::base::time::CLOCK_US_MAX, u64::MAX)] {
                let mut key = State::new(&quota);
                for force in [false, true] {
                    let decision = key.decide(now, cost, force).0;
                    prop_assert!(decision.remaining() <= quota.capacity());
                }
            }
        }
    }
}

/// Ticks bring their tokens all at once, so a debt of a share comes back in whole ticks.
#[test]
fn step_bucket_of_a_year_can_be_shared() {
    let bucket = Quota::step_bucket(10, 366 * DAY).and_then(|bucket| bucket.burst(80)).unwrap();
    let share = bucket.share(std::num::NonZeroU32::new(3).unwrap());
    assert_eq!((share.limit(), share.capacity()), (3, 24), "eight ticks of three");
}

#[test]
fn unlimited_quotas_have_a_text_and_no_options() {
    let unlimited = Quota::unlimited();
    assert_eq!(unlimited.to_string(), "unlimited");
    for text in ["unlimited", " Unlimited "] {
        assert_eq!(text.parse(), Ok(unlimited), "{text}");
    }
    assert!(
        unlimited.is_unlimited()
            && !Quota::fixed_window(999_999_999_999, Duration::from_secs(60)).unwrap().is_unlimited()
    );
    assert_eq!(unlimited.share(std::num::NonZeroU32::new(7).unwrap()), unlimited);
    assert_eq!(spec::Spec::from_words(unlimited.spec().to_words()), Some(*unlimited.spec()));
    for refused in [unlimited.max_debt(2), unlimited.in_proportion(), unlimited.count_denied(), unlimited.in_bytes()] {
        assert!(refused.is_err_and(|error| error.kind() == ConfigErrorKind::NotAnOption));
    }
    assert!("unlimited burst 3".parse::<Quota>().is_err());
}
