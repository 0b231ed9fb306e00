//! Quotas for the laws: toys, where being off by one shows, and the ends of the range.

use std::time::Duration;

use proptest::prelude::*;

use crate::error::ConfigError;
use crate::quota::spec::PLACES_MAX;
use crate::quota::{Algorithm, Anchor, Calendar, Oldest, Quota, Weekday};

const DAY_US: u64 = 86_400_000_000;

/// Limits and periods in microseconds.
const RATES: [(u64, u64); 20] = [
    (1, 30 * DAY_US),
    (1, 366 * DAY_US),
    (10_000_000, 1_000_000),
    (4_294_967_295, 1_000_000),
    (99_999, 1_000_000),
    (7, 1_000_000),
    (3, 7),
    (3, 7 * DAY_US),
    (10_000_000_000_000, 30 * DAY_US),
    (999_999_999_999_999, 366 * DAY_US),
    (999_999_999_999_989, 1),
    (999_999_999_999_999, 1_000_000),
    (0, 1_000_000),
    (100, 60_000_000),
    (1, 1),
    (1_000, 1_000),
    (10_000, 86_400),
    (60, 3_600_000_000),
    (65_536, 65_536),
    (1 << 31, 1 << 40),
];

/// Shapes of quotas: about a third are toys.
pub(crate) fn shapes() -> impl Strategy<Value = [u64; 6]> {
    (0..34_u64, any::<[u64; 5]>()).prop_map(|(rate, [a, b, c, d, e])| [rate, a, b, c, d, e])
}

/// Returns an algorithm whose units come back with time by a number, whatever it is.
pub(crate) fn any_algorithm(number: u64) -> Algorithm {
    let timed: Vec<Algorithm> = Algorithm::timed().collect();
    timed[(number % timed.len() as u64) as usize]
}

/// Returns a quota without options. A block lasts for `lasts`.
pub(crate) fn plain(algorithm: Algorithm, limit: u64, period: Duration, lasts: Duration) -> Result<Quota, ConfigError> {
    match algorithm {
        Algorithm::TokenBucket => Quota::token_bucket(limit, period),
        Algorithm::Gcra => Quota::gcra(limit, period),
        Algorithm::LeakyBucket => Quota::leaky_bucket(limit, period),
        Algorithm::LeakyQueue => Quota::leaky_queue(limit, period),
        Algorithm::StepBucket => Quota::step_bucket(limit, period),
        Algorithm::FixedWindow => Quota::fixed_window(limit, period),
        Algorithm::SlidingWindow => Quota::sliding_window(limit, period),
        Algorithm::SlidingLog => Quota::sliding_log(limit, period),
        Algorithm::Block => Quota::block(limit, period, lasts),
        Algorithm::Meter => Quota::meter(limit, period),
        Algorithm::Concurrency => Ok(Quota::concurrent(limit)),
    }
}

/// A quota out of a few numbers: small ones make toys, so that a failing case shrinks to one.
pub(crate) fn quota(algorithm: Algorithm, anchor: Anchor, shape: &[u64; 6]) -> Quota {
    let [rate, limit, period, burst, debt, options] = *shape;
    let (limit, period_us) = match rate {
        0..=11 => (1 + limit % 5, 1 + period % 20),
        12..=13 => (1 + limit % 1_000_000, 1 + period % 1_000_000_000),
        _ => RATES[(rate % 20) as usize],
    };
    let limit = match algorithm {
        Algorithm::SlidingLog => limit.min(1_000_000),
        Algorithm::LeakyQueue => limit.min(999_999_999_999_998), // and the one that is due
        Algorithm::Concurrency => limit.min(PLACES_MAX),
        Algorithm::Block => limit.clamp(1, 4_095),
        _ => limit,
    };
    let period = Duration::from_micros(period_us);
    if algorithm == Algorithm::Concurrency {
        return Quota::concurrent(limit);
    }
    let plain = match algorithm {
        // Two of five windows of the epoch are those of a calendar.
        Algorithm::FixedWindow if anchor == Anchor::Epoch && burst % 5 < 2 => Quota::calendar(limit, calendar(burst)),
        _ => plain(algorithm, limit, period, time(burst, period_us)),
    };
    let mut quota = plain.expect("every rate is in range");
    let amount = |number: u64| match number % 6 {
        0 => 1,
        1 => 2,
        2 => 2 * limit + 1,
        3 => (number / 6) % 7,
        4 => (number / 6) % (limit + 3),
        _ => limit,
    };
    // An option that this algorithm does not have, or that is out of range, is left out.
    let mut with = |change: &dyn Fn(Quota) -> Result<Quota, ConfigError>| quota = change(quota).unwrap_or(quota);
    if anchor == Anchor::FirstRequest {
        with(&|quota| quota.anchor(anchor));
    }
    if burst % 3 > 0 {
        with(&|quota| quota.burst(amount(burst / 3)));
        with(&|quota| quota.queue(amount(burst / 3)));
    }
    if debt % 3 > 0 {
        with(&|quota| quota.max_debt(if debt % 3 == 1 { 0 } else { amount(debt / 3) }));
    }
    with(&|quota| quota.delay_after(amount(options)));
    with(&|quota| quota.buckets([1, 2, 3, 5, 12, 60][(options % 6) as usize]));
    with(&|quota| quota.oldest([Oldest::Weighted, Oldest::Dropped, Oldest::Counted][(options / 6 % 3) as usize]));
    if debt % 3 > 0 {
        with(&|quota| {
            let longest = quota.spec().lasting.length_us.saturating_mul(1 + debt / 3 % 9).min(366 * DAY_US);
            let factor = [1, 2, 3, 1_000][(debt / 27 % 4) as usize];
            quota.growing(factor, Duration::from_micros(longest), time(options / 54, period_us))
        });
    }
    if options / 18 % 3 == 1 {
        with(&|quota| quota.count_denied());
    }
    quota
}

/// The zones of [`calendar`]: far from UTC, of half hours, with midnights that are left out or happen twice, and days
/// that are left out.
#[cfg(feature = "time-zones")]
const ZONES: [&str; 8] = [
    "Europe/Berlin",
    "America/St_Johns",
    "America/Sao_Paulo",
    "Africa/Cairo",
    "Asia/Kathmandu",
    "Australia/Lord_Howe",
    "Pacific/Apia",
    "America/Havana",
];

/// Returns a calendar by a number, whatever it is.
pub(crate) fn calendar(number: u64) -> Calendar {
    let number = number / 5;
    let first = (number / 8 % 31) as u8;
    let calendar = match number % 8 {
        0 => Calendar::day(),
        1 => Calendar::week(),
        2 => Calendar::week().from_weekday(Weekday::ALL[usize::from(first % 7)]).unwrap(),
        3 => Calendar::month(),
        4 => Calendar::month().from_day(29 + first % 3).unwrap(),
        5 => Calendar::month().from_day(1 + first).unwrap(),
        6 => Calendar::quarter(),
        _ => Calendar::year(),
    };
    #[cfg(feature = "time-zones")]
    if let Some(zone) = ZONES.get((number / 248 % 12) as usize) {
        return calendar.zone(zone).unwrap();
    }
    calendar
}

/// A time beside a period: of the same order, or the longest.
fn time(number: u64, period_us: u64) -> Duration {
    let us = match number % 5 {
        0 => 1,
        1 => 1 + number / 5 % 40,
        2 => 366 * DAY_US,
        3 => period_us.saturating_mul(1 + number / 5 % 7),
        _ => 1 + number / 5 % period_us.saturating_mul(3),
    };
    Duration::from_micros(us.min(366 * DAY_US))
}
