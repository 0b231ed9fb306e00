//! How much is allowed: a limit per period, an algorithm, and its options.

mod block;
mod error;
mod kept;
#[cfg(feature = "serde")]
mod serde;
mod share;
#[cfg(test)]
mod tests;
mod words;

use std::fmt;
use std::hash::{BuildHasher, Hash, Hasher};
use std::time::Duration;

use crate::algorithm::Rules;
use crate::time::{DRAIN_US_MAX, PERIOD_US_MAX, micros_exact, micros_floor};

pub use error::{QuotaError, QuotaErrorKind};

/// The most units any number of a quota may have: the largest integer of a structured header field.
pub(crate) const UNITS_MAX: u64 = 999_999_999_999_999;

/// The largest limit of a log, unless a large one is asked for: its memory grows with the limit.
const LOG_LIMIT_MAX: u64 = 10_000;
const LARGE_LOG_LIMIT_MAX: u64 = 1_000_000;

const BUCKETS_MAX: u32 = 3_600;

const SECOND: u64 = 1_000_000;

/// How much: `limit` units per `period`, an algorithm, and its options.
///
/// The short constructors are token buckets with continuous refill and a burst of the limit:
///
/// ```
/// use tower_ratelimit::Quota;
/// # fn main() -> Result<(), tower_ratelimit::QuotaError> {
/// let quota = Quota::per_minute(100);                      // 100 at once from rest, then one each 0.6 s
/// let strict = Quota::per_minute(100).burst(1)?;           // never two within 0.6 s
/// let parsed: Quota = "100/min burst 20".parse()?;
/// assert_eq!(parsed.to_string(), "100 per minute, burst 20, token bucket");
/// # Ok(()) }
/// ```
///
/// # Exactness and ranges
///
/// All arithmetic is in integers: whole microseconds and, where the interval between two units is not whole, an exact
/// numerator over the reduced limit. No rate drifts. Limits, bursts and other units go up to 999,999,999,999,999, periods
/// from one microsecond to 366 days in whole microseconds, and a full bucket may take up to 2^48 µs (about 8.9 years) to
/// drain; so any rate from one per 366 days to billions per second and byte quotas of terabytes a month are inside.
/// What is outside is refused here, when it is written, and not when a request comes.
///
/// A limit of 0 is a quota too: it lets nothing pass.
#[derive(Clone, Copy)]
pub struct Quota {
    spec: Spec,
    rules: Rules,
    fingerprint: u64,
    /// No debt was chosen: it is as much as the capacity, whatever that will be.
    debt_follows: bool,
}

/// What the user wrote; everything else is derived from it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Spec {
    pub(crate) limit: u64,
    pub(crate) period_us: u64,
    /// Most units at one instant from rest.
    pub(crate) burst: u64,
    /// How far below zero forced charges may go, in units.
    pub(crate) debt: u64,
    pub(crate) algorithm: Algorithm,
    pub(crate) anchor: Anchor,
    pub(crate) delay_after: u64,
    pub(crate) buckets: u32,
    pub(crate) oldest: Oldest,
    pub(crate) count_denied: bool,
    /// Of what was used under another quota the share is kept, and not the amount.
    pub(crate) proportional: bool,
    pub(crate) lasting: Lasting,
}

/// How long blocks last; all zero, and the factor 1, of other algorithms.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Lasting {
    pub(crate) length_us: u64,
    /// Each further block is so many times as long,
    pub(crate) factor: u64,
    /// but no longer than this,
    pub(crate) longest_us: u64,
    /// if it begins within this time after the end of the last.
    pub(crate) memory_us: u64,
}

/// The algorithms of the field. See [`algorithm`](crate::algorithm) for which one to choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// Tokens flow in continuously, up to the burst.
    TokenBucket,
    /// Tokens come in steps, as a refill process with a timer would add them.
    StepBucket,
    /// The generic cell rate algorithm; burst 1 is strict spacing.
    Gcra,
    /// A leaky bucket that rejects what would overflow.
    LeakyBucket,
    /// A leaky bucket whose requests wait for their departure.
    LeakyQueue,
    /// A counter that starts afresh each period.
    FixedWindow,
    /// Counters of the current and of past sub-windows.
    SlidingWindow,
    /// Every admitted request, remembered for one period.
    SlidingLog,
    /// Units that, once used up, close the key for a longer time: strikes and a block.
    Block,
    /// A counter that never starts afresh by itself: for metering.
    Meter,
}

/// Where windows and steps begin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Anchor {
    /// At whole multiples of the period since the Unix epoch: a day begins at midnight UTC.
    #[default]
    Epoch,
    /// At the key's first request.
    FirstRequest,
}

/// What the oldest sub-window counts for, which the sliding period covers only in part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Oldest {
    /// In proportion to the part that is still covered, rounded down.
    #[default]
    Weighted,
    /// Not at all.
    Dropped,
    /// In full: never above the limit in any trailing period, hence no more in the long run than the limit for each
    /// period and one sub-window, which with one bucket is half the rate.
    Counted,
}

impl Quota {
    /// `limit` per second: a token bucket, burst `limit`.
    #[must_use]
    pub fn per_second(limit: u32) -> Self {
        Self::simple(limit, SECOND)
    }

    /// `limit` per minute: a token bucket, burst `limit`.
    #[must_use]
    pub fn per_minute(limit: u32) -> Self {
        Self::simple(limit, 60 * SECOND)
    }

    /// `limit` per hour: a token bucket, burst `limit`.
    #[must_use]
    pub fn per_hour(limit: u32) -> Self {
        Self::simple(limit, 3_600 * SECOND)
    }

    /// `limit` per day of 24 hours: a token bucket, burst `limit`.
    #[must_use]
    pub fn per_day(limit: u32) -> Self {
        Self::simple(limit, 86_400 * SECOND)
    }

    /// `limit` per `period`: a token bucket, burst `limit`.
    ///
    /// # Errors
    /// If the limit or the period is out of [range](Self#exactness-and-ranges).
    pub fn new(limit: u64, period: Duration) -> Result<Self, QuotaError> {
        Self::token_bucket(limit, period)
    }

    /// One every `interval`, never two closer: a token bucket, burst 1.
    ///
    /// # Errors
    /// If the interval is out of [range](Self#exactness-and-ranges).
    pub fn one_every(interval: Duration) -> Result<Self, QuotaError> {
        Self::token_bucket(1, interval)
    }

    /// A token bucket with continuous refill: `limit` tokens flow in each `period`; it holds [`burst`](Self::burst).
    ///
    /// # Errors
    /// If the limit or the period is out of [range](Self#exactness-and-ranges).
    pub fn token_bucket(limit: u64, period: Duration) -> Result<Self, QuotaError> {
        Self::build(limit, period, Algorithm::TokenBucket)
    }

    /// A token bucket that gets `tokens` at each tick, one tick every `step`; it holds [`burst`](Self::burst), by
    /// default `tokens`. Ticks are at whole multiples of `step` since the epoch unless [anchored](Self::anchor) otherwise.
    ///
    /// # Errors
    /// If the tokens or the step are out of [range](Self#exactness-and-ranges).
    pub fn step_bucket(tokens: u64, step: Duration) -> Result<Self, QuotaError> {
        Self::build(tokens, step, Algorithm::StepBucket)
    }

    /// The generic cell rate algorithm: one unit every `period / limit`, with a tolerance of [`burst`](Self::burst), by
    /// default 1, which is strict spacing.
    ///
    /// # Errors
    /// If the limit or the period is out of [range](Self#exactness-and-ranges).
    pub fn gcra(limit: u64, period: Duration) -> Result<Self, QuotaError> {
        Self::build(limit, period, Algorithm::Gcra)
    }

    /// A leaky bucket as a meter: it leaks `limit` units per `period`, holds [`burst`](Self::burst) (by default `limit`)
    /// and rejects what would overflow.
    ///
    /// # Errors
    /// If the limit or the period is out of [range](Self#exactness-and-ranges).
    pub fn leaky_bucket(limit: u64, period: Duration) -> Result<Self, QuotaError> {
        Self::build(limit, period, Algorithm::LeakyBucket)
    }

    /// A leaky bucket as a queue: units leave it one every `period / limit`, first come first served, and each
    /// admitted request gets its own departure. [`queue`](Self::queue) says how many units may wait, by default `limit`.
    ///
    /// A request of several units departs once, and leaves the spacing of all its units behind it: at one unit per 100 ms,
    /// requests that cost 2, 2 and 1 depart after 0, 200 and 400 ms.
    ///
    /// Requests do wait where the layer has a timer for it: [`RateLimitLayer::delay`](crate::RateLimitLayer::delay).
    ///
    /// # Errors
    /// If the limit or the period is out of [range](Self#exactness-and-ranges).
    pub fn leaky_queue(limit: u64, period: Duration) -> Result<Self, QuotaError> {
        Self::build(limit, period, Algorithm::LeakyQueue)
    }

    /// A counter that starts afresh each `period`, at whole multiples of it since the epoch unless
    /// [anchored](Self::anchor) otherwise. Deciding takes constant time.
    ///
    /// A period has a fixed length: windows of one day begin at midnight UTC, and windows of 30 days are not months. There
    /// are no windows of the calendar, such as months, or days of another time zone.
    ///
    /// # Errors
    /// If the limit or the period is out of [range](Self#exactness-and-ranges).
    pub fn fixed_window(limit: u64, period: Duration) -> Result<Self, QuotaError> {
        Self::build(limit, period, Algorithm::FixedWindow)
    }

    /// Counters of sub-windows that slide with time; see [`buckets`](Self::buckets) (by default 1: the classic estimate
    /// from two counters) and [`oldest`](Self::oldest).
    ///
    /// # Errors
    /// If the limit or the period is out of [range](Self#exactness-and-ranges).
    pub fn sliding_window(limit: u64, period: Duration) -> Result<Self, QuotaError> {
        Self::build(limit, period, Algorithm::SlidingWindow)
    }

    /// An exact log: never more than `limit` units in any trailing `period`. Memory grows with the limit, so it is at
    /// most 10,000; [`large_sliding_log`](Self::large_sliding_log) allows more.
    ///
    /// # Errors
    /// If the limit or the period is out of [range](Self#exactness-and-ranges), or the limit is above 10,000.
    pub fn sliding_log(limit: u64, period: Duration) -> Result<Self, QuotaError> {
        if limit > LOG_LIMIT_MAX {
            return Err(QuotaError::new(
                QuotaErrorKind::Units,
                format!(
                    "a log of {limit} units remembers up to {limit} requests for each key, and more than \
                     {LOG_LIMIT_MAX} must be asked for: use Quota::large_sliding_log, or a sliding window of 60 buckets, \
                     whose memory does not grow with the limit"
                ),
            ));
        }
        Self::build(limit, period, Algorithm::SlidingLog)
    }

    /// An exact log with a limit up to 1,000,000.
    ///
    /// # Errors
    /// If the limit or the period is out of [range](Self#exactness-and-ranges), or the limit is above 1,000,000.
    pub fn large_sliding_log(limit: u64, period: Duration) -> Result<Self, QuotaError> {
        if limit > LARGE_LOG_LIMIT_MAX {
            return Err(QuotaError::new(
                QuotaErrorKind::Units,
                format!(
                    "a log of {limit} units is above the most that is kept for one key ({LARGE_LOG_LIMIT_MAX}): use a \
                     sliding window of 60 buckets, whose memory does not grow with the limit"
                ),
            ));
        }
        Self::build(limit, period, Algorithm::SlidingLog)
    }

    /// How many units can pass at one instant from rest: the bucket's capacity, not something on top of it.
    ///
    /// # Errors
    /// If the algorithm is not a bucket, the burst is 0 or too large, or the full bucket drains too slowly.
    pub fn burst(self, burst: u64) -> Result<Self, QuotaError> {
        use Algorithm::{Gcra, LeakyBucket, StepBucket, TokenBucket};
        self.only("burst", &[TokenBucket, StepBucket, Gcra, LeakyBucket])?;
        if burst == 0 && self.spec.limit != 0 {
            return Err(QuotaError::new(
                QuotaErrorKind::Units,
                "a burst of 0 would let nothing pass: 1 is strict spacing, and a limit of 0 closes the quota",
            ));
        }
        let debt = if self.debt_follows { burst } else { self.spec.debt };
        self.with(|spec| {
            spec.burst = burst;
            spec.debt = debt;
        })
    }

    /// How many may wait in a leaky bucket as a queue, besides the one that is due; beyond it they are denied.
    ///
    /// # Errors
    /// If the algorithm is not a leaky queue, or the queue is too long.
    pub fn queue(self, length: u64) -> Result<Self, QuotaError> {
        self.only("queue", &[Algorithm::LeakyQueue])?;
        let burst = length.saturating_add(1);
        if length < self.spec.delay_after {
            return Err(too_short_for_delay(length, self.spec.delay_after));
        }
        let debt = if self.debt_follows { burst } else { self.spec.debt };
        self.with(|spec| {
            spec.burst = burst;
            spec.debt = debt;
        })
    }

    /// Shortens a leaky queue so that nobody waits for longer than this: whoever would have to is denied, and takes nothing.
    /// The queue then has as many places as depart in that time, rounded down, besides those that
    /// [pass at once](Self::delay_after); set that first. A queue that is short enough stays as it is.
    ///
    /// # Errors
    /// If the algorithm is not a leaky queue.
    pub fn max_wait(self, wait: Duration) -> Result<Self, QuotaError> {
        self.only("max_wait", &[Algorithm::LeakyQueue])?;
        let spaced = u128::from(micros_floor(wait)) * u128::from(self.spec.limit) / u128::from(self.spec.period_us);
        let length = u64::try_from(spaced).unwrap_or(u64::MAX).saturating_add(self.spec.delay_after);
        if length >= self.spec.burst.saturating_sub(1) { Ok(self) } else { self.queue(length) }
    }

    /// How many of a leaky queue's places pass at once, as nginx's `delay=`: of the units beyond the one that is due
    /// the first `n` are not delayed, the next are spaced, and beyond the queue they are denied. A request of several units
    /// passes at once only if all of them do. So the departures in any interval have at most `n + 1` units more than the
    /// rate gives, or the cost of one request if that is more.
    ///
    /// # Errors
    /// If the algorithm is not a leaky queue, or `n` is more than its length.
    pub fn delay_after(self, n: u64) -> Result<Self, QuotaError> {
        self.only("delay_after", &[Algorithm::LeakyQueue])?;
        let length = self.spec.burst.saturating_sub(1);
        if n > length {
            return Err(too_short_for_delay(length, n));
        }
        self.with(|spec| spec.delay_after = n)
    }

    /// Where windows or steps begin.
    ///
    /// # Errors
    /// If the algorithm is neither a fixed window nor a step bucket.
    pub fn anchor(self, anchor: Anchor) -> Result<Self, QuotaError> {
        self.only("anchor", &[Algorithm::FixedWindow, Algorithm::StepBucket])?;
        self.with(|spec| spec.anchor = anchor)
    }

    /// How many sub-windows a sliding window has: 1 is the classic estimate from two counters, 60 is close to a log.
    ///
    /// # Errors
    /// If the algorithm is not a sliding window, or the period does not divide into so many sub-windows of whole
    /// microseconds, or there are none or more than 3,600.
    pub fn buckets(self, buckets: u32) -> Result<Self, QuotaError> {
        self.only("buckets", &[Algorithm::SlidingWindow])?;
        if buckets == 0 || buckets > BUCKETS_MAX {
            return Err(QuotaError::new(
                QuotaErrorKind::Units,
                format!("a sliding window has 1 to {BUCKETS_MAX} buckets, not {buckets}"),
            ));
        }
        if self.spec.period_us % u64::from(buckets) != 0 {
            return Err(QuotaError::new(
                QuotaErrorKind::Period,
                format!(
                    "{} µs do not divide into {buckets} buckets of whole microseconds: choose a number of buckets that \
                     divides the period, such as {}",
                    self.spec.period_us,
                    (1..=buckets).rev().find(|n| self.spec.period_us % u64::from(*n) == 0).unwrap_or(1),
                ),
            ));
        }
        self.with(|spec| spec.buckets = buckets)
    }

    /// What a sliding window's oldest, partly covered sub-window counts for.
    ///
    /// # Errors
    /// If the algorithm is not a sliding window.
    pub fn oldest(self, oldest: Oldest) -> Result<Self, QuotaError> {
        self.only("oldest", &[Algorithm::SlidingWindow])?;
        self.with(|spec| spec.oldest = oldest)
    }

    /// Denied requests count as well, so that whoever keeps hammering stays denied. They fill a fixed window, or a sliding
    /// window's current sub-window, up to the limit and not beyond; of a log the newest `limit` units are kept. A block
    /// begins anew with each.
    ///
    /// # Errors
    /// If the algorithm is not a window, a log or a block.
    pub fn count_denied(self) -> Result<Self, QuotaError> {
        use Algorithm::{Block, FixedWindow, SlidingLog, SlidingWindow};
        self.only("count_denied", &[FixedWindow, SlidingWindow, SlidingLog, Block])?;
        self.with(|spec| spec.count_denied = true)
    }

    /// How far below zero forced charges (debt, settling) may go, in units; what is beyond is not remembered.
    /// By default as much as the capacity. It also bounds what a clock that steps back can cost a key.
    ///
    /// # Errors
    /// If the debt is too large or drains too slowly, or of a block or a meter, which owe nothing.
    pub fn max_debt(self, units: u64) -> Result<Self, QuotaError> {
        use Algorithm::{
            FixedWindow, Gcra, LeakyBucket, LeakyQueue, SlidingLog, SlidingWindow, StepBucket, TokenBucket,
        };
        self.only(
            "max_debt",
            &[TokenBucket, StepBucket, Gcra, LeakyBucket, LeakyQueue, FixedWindow, SlidingWindow, SlidingLog],
        )?;
        self.with(|spec| spec.debt = units).map(|quota| Self { debt_follows: false, ..quota })
    }

    /// The limit: units per period.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.spec.limit
    }

    /// The period that the limit is stated over.
    #[must_use]
    pub fn period(&self) -> Duration {
        Duration::from_micros(self.spec.period_us)
    }

    /// The most units that can pass at one instant from rest: a bucket's burst, a window's or a log's limit.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.spec.burst
    }

    /// The algorithm.
    #[must_use]
    pub fn algorithm(&self) -> Algorithm {
        self.spec.algorithm
    }

    /// Whether denied requests change this quota's state.
    #[must_use]
    pub fn counts_denied(&self) -> bool {
        self.spec.count_denied
    }

    /// The time in which the whole capacity comes back, rounded up to a microsecond.
    #[must_use]
    pub fn refill_time(&self) -> Duration {
        Duration::from_micros(match self.spec.algorithm {
            Algorithm::FixedWindow | Algorithm::SlidingWindow | Algorithm::SlidingLog | Algorithm::Meter => {
                self.spec.period_us
            }
            Algorithm::Block => self.spec.lasting.longest_us.max(self.spec.period_us),
            _ => drain_us(&self.spec, self.spec.burst).unwrap_or(DRAIN_US_MAX),
        })
    }

    pub(crate) fn rules(&self) -> &Rules {
        &self.rules
    }

    /// Whether it counts as the other does: they may differ in what they are called, and in what is done with a request that
    /// waits or is denied. The state of one cannot be told from that of the other.
    pub(crate) fn counts_alike(&self, other: &Self) -> bool {
        use Algorithm::{Gcra, LeakyBucket, LeakyQueue, TokenBucket};
        let counted = |Self { spec, .. }: &Self| {
            let algorithm = match spec.algorithm {
                TokenBucket | Gcra | LeakyBucket | LeakyQueue => TokenBucket,
                other => other,
            };
            Spec { algorithm, delay_after: 0, count_denied: false, proportional: false, ..*spec }
        };
        counted(self) == counted(other)
    }

    pub(crate) fn spec(&self) -> &Spec {
        &self.spec
    }

    /// Equal for equal quotas, and within one process only: it is not stored anywhere.
    pub(crate) fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    fn simple(limit: u32, period_us: u64) -> Self {
        // In range for every u32: the longest drain is one period, the shortest interval a fraction of a microsecond.
        Self::from_spec(Spec::new(u64::from(limit), period_us, Algorithm::TokenBucket))
    }

    fn build(limit: u64, period: Duration, algorithm: Algorithm) -> Result<Self, QuotaError> {
        let Some(period_us) = micros_exact(period).filter(|us| (1..=PERIOD_US_MAX).contains(us)) else {
            return Err(QuotaError::new(
                QuotaErrorKind::Period,
                format!(
                    "a period of {period:?} is not possible: it must be whole microseconds, at least one and at most 366 \
                     days; scale limit and period together to say the same rate"
                ),
            ));
        };
        Self::checked(Spec::new(limit, period_us, algorithm))
    }

    fn with(self, change: impl FnOnce(&mut Spec)) -> Result<Self, QuotaError> {
        let mut spec = self.spec;
        change(&mut spec);
        if spec.limit == 0 {
            (spec.burst, spec.debt) = (0, 0); // closed: there is nothing to hold and nothing to owe
        }
        Self::checked(spec).map(|quota| Self { debt_follows: self.debt_follows, ..quota })
    }

    fn checked(spec: Spec) -> Result<Self, QuotaError> {
        for (name, units) in [("limit", spec.limit), ("burst", spec.burst), ("debt", spec.debt)] {
            if units > UNITS_MAX {
                return Err(QuotaError::new(
                    QuotaErrorKind::Units,
                    format!("a {name} of {units} is too large: at most {UNITS_MAX}; count in a larger unit"),
                ));
            }
        }
        for (name, units) in [("burst", spec.burst), ("debt", spec.debt)] {
            if drain_us(&spec, units).is_none() {
                return Err(QuotaError::new(
                    QuotaErrorKind::TooSlow,
                    format!(
                        "a {name} of {units} at {} per {} µs takes longer than 8.9 years to come back: make it smaller or \
                         the rate higher",
                        spec.limit, spec.period_us
                    ),
                ));
            }
        }
        Ok(Self::from_spec(spec))
    }

    fn from_spec(spec: Spec) -> Self {
        let fingerprint = foldhash::quality::FixedState::default().hash_one(spec);
        Self { spec, rules: Rules::new(&spec), fingerprint, debt_follows: true }
    }

    fn only(&self, option: &str, algorithms: &[Algorithm]) -> Result<(), QuotaError> {
        if algorithms.contains(&self.spec.algorithm) {
            return Ok(());
        }
        let names: Vec<&str> = algorithms.iter().map(|algorithm| algorithm.words()).collect();
        Err(QuotaError::new(
            QuotaErrorKind::NotAnOption,
            format!(
                "`{option}` has no meaning for a {}: it belongs to {}",
                self.spec.algorithm.words(),
                names.join(", ")
            ),
        ))
    }
}

fn too_short_for_delay(length: u64, delay_after: u64) -> QuotaError {
    QuotaError::new(
        QuotaErrorKind::Units,
        format!("{delay_after} requests cannot pass undelayed through a queue of {length}: lengthen the queue first"),
    )
}

/// The time in which `units` drain, rounded up; nothing if it is longer than allowed.
fn drain_us(spec: &Spec, units: u64) -> Option<u64> {
    if spec.limit == 0 {
        return Some(0);
    }
    let drain = match spec.algorithm {
        Algorithm::FixedWindow
        | Algorithm::SlidingWindow
        | Algorithm::SlidingLog
        | Algorithm::Block
        | Algorithm::Meter => 0,
        Algorithm::StepBucket => u128::from(units.div_ceil(spec.limit)) * u128::from(spec.period_us),
        _ => (u128::from(units) * u128::from(spec.period_us)).div_ceil(u128::from(spec.limit)),
    };
    u64::try_from(drain).ok().filter(|drain| *drain <= DRAIN_US_MAX)
}

impl Spec {
    fn new(limit: u64, period_us: u64, algorithm: Algorithm) -> Self {
        let burst = match algorithm {
            _ if limit == 0 => 0,
            Algorithm::Gcra => 1,
            Algorithm::LeakyQueue => limit.saturating_add(1),
            _ => limit,
        };
        Self {
            limit,
            period_us,
            burst,
            debt: if matches!(algorithm, Algorithm::Block | Algorithm::Meter) { 0 } else { burst },
            algorithm,
            anchor: Anchor::Epoch,
            delay_after: 0,
            buckets: 1,
            oldest: Oldest::Weighted,
            count_denied: false,
            proportional: false,
            lasting: Lasting { length_us: 0, factor: 1, longest_us: 0, memory_us: 0 },
        }
    }
}

impl PartialEq for Quota {
    fn eq(&self, other: &Self) -> bool {
        self.spec == other.spec
    }
}

impl Eq for Quota {}

impl Hash for Quota {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.spec.hash(state);
    }
}

impl fmt::Debug for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Quota({self})")
    }
}
