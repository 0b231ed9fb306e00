//! The constructors and options of quotas, which check every number.

use std::fmt;
use std::hash::{BuildHasher, Hash, Hasher};
use std::time::Duration;

use super::spec::{Algorithm, Anchor, Oldest, PLACES_MAX, Spec, UNITS_MAX};
use crate::algorithm::{Decider, PairDecider};
use crate::base::calendar::{Calendar, CalendarWindows};
use crate::base::time::{PERIOD_US_MAX, micros_exact, micros_floor};
use crate::base::zone::DAY_S;
use crate::error::ConfigError;
use crate::error::ConfigErrorKind::{NotAnOption, Range};

/// The largest limit of a sliding log. The memory of a log grows with its limit.
const LOG_LIMIT_MAX: u64 = 1_000_000;

const BUCKETS_MAX: u32 = 3_600;

const SECOND: u64 = 1_000_000;

/// Says how much is allowed: `limit` units per `period`, an algorithm and its options.
///
/// The short constructors, such as `per_minute`, make token buckets with continuous refill and a burst of `limit`:
///
/// ```
/// use tower_ratelimit::Quota;
/// # fn main() -> Result<(), tower_ratelimit::ConfigError> {
/// let quota = Quota::per_minute(100); // 100 at once after a pause, then one each 0.6 s
/// let strict = Quota::per_minute(100).burst(1)?; // never two within 0.6 s
/// let parsed: Quota = "100/min burst 20".parse()?;
/// assert_eq!(parsed.to_string(), "100 per minute, burst 20, token bucket");
/// # Ok(()) }
/// ```
///
/// # Exactness and ranges
///
/// All arithmetic is in integers. Times are whole microseconds. If the interval between two units has a
/// fraction of a microsecond, the fraction is kept exactly, as a numerator over the reduced limit. No
/// rate drifts.
///
/// * Limits, bursts and other numbers of units are `u64`, and go up to 999,999,999,999,999. A
///   sliding log has at most 1,000,000 units, a concurrency limit 999,999,999,999 units, and a
///   block 4,095 strikes.
/// * Periods are from one microsecond to 366 days long, in whole microseconds.
/// * A full bucket may take up to 2^48 µs (about 8.9 years) to drain.
///
/// Rates are possible from one unit per 366 days to billions of units per second, and byte quotas up to terabytes per
/// month. A quota outside of these ranges is an error when the quota is made, not when a request comes.
/// [`per_second`](Self::per_second), `per_minute`, `per_hour`, `per_day`, `per_calendar_day`,
/// `per_calendar_month`, [`concurrent`](Self::concurrent) and [`unlimited`](Self::unlimited) cannot fail: a limit above
/// the largest possible limit counts as the largest.
///
/// A quota with a limit of 0 lets no request pass.
#[derive(Clone, Copy)]
pub struct Quota {
    pub(super) spec: Spec,
    pub(super) decider: Decider,
    pub(super) fingerprint: u64,
}

/// # Limits
impl Quota {
    /// Makes a token bucket of `limit` per second with a burst of `limit`. Up to twice the limit passes in the first
    /// second: the burst, and what flows in meanwhile. See [hard
    /// caps](crate::guide::choosing_an_algorithm#common-questions).
    #[must_use]
    pub fn per_second(limit: u64) -> Self {
        Self::simple(limit, SECOND)
    }

    /// Makes a token bucket of `limit` per minute with a burst of `limit`. Up to twice the limit passes in the first
    /// minute, as with [`per_second`](Self::per_second).
    #[must_use]
    pub fn per_minute(limit: u64) -> Self {
        Self::simple(limit, 60 * SECOND)
    }

    /// Makes a token bucket of `limit` per hour with a burst of `limit`. Up to twice the limit passes in the first
    /// hour, as with [`per_second`](Self::per_second).
    #[must_use]
    pub fn per_hour(limit: u64) -> Self {
        Self::simple(limit, 3_600 * SECOND)
    }

    /// Makes a token bucket of `limit` per day of 24 hours with a burst of `limit`. Up to twice the limit passes in the
    /// first 24 hours. [`per_calendar_day`](Self::per_calendar_day) is a hard cap for each day.
    #[must_use]
    pub fn per_day(limit: u64) -> Self {
        Self::simple(limit, 86_400 * SECOND)
    }

    /// Makes a token bucket of `limit` per `period` with a burst of `limit`.
    ///
    /// # Errors
    /// Returns an error if the limit or the period is out of [range](Self#exactness-and-ranges).
    pub fn new(limit: u64, period: Duration) -> Result<Self, ConfigError> {
        Self::token_bucket(limit, period)
    }

    /// Makes a token bucket of one unit per `interval` with a burst of 1, so that two units pass at
    /// least `interval` apart.
    ///
    /// # Errors
    /// Returns an error if the interval is out of [range](Self#exactness-and-ranges).
    pub fn one_every(interval: Duration) -> Result<Self, ConfigError> {
        Self::token_bucket(1, interval)
    }

    /// Makes a token bucket with continuous refill: `limit` tokens flow in each `period`. The
    /// bucket holds [`burst`](Self::burst) tokens, by default `limit`.
    ///
    /// # Errors
    /// Returns an error if the limit or the period is out of [range](Self#exactness-and-ranges).
    pub fn token_bucket(limit: u64, period: Duration) -> Result<Self, ConfigError> {
        Self::build(limit, period, Algorithm::TokenBucket)
    }

    /// Makes a token bucket that gets `tokens` at each tick, one tick every `step`. The bucket
    /// holds [`burst`](Self::burst) tokens, by default `tokens`. Ticks are at whole multiples of
    /// `step` since the epoch, unless [`anchor`](Self::anchor) says otherwise.
    ///
    /// # Errors
    /// Returns an error if the tokens or the step are out of [range](Self#exactness-and-ranges).
    pub fn step_bucket(tokens: u64, step: Duration) -> Result<Self, ConfigError> {
        Self::build(tokens, step, Algorithm::StepBucket)
    }

    /// Makes a quota of the generic cell rate algorithm: one unit every `period / limit`, with a
    /// tolerance of [`burst`](Self::burst) units. The default burst of 1 spaces units strictly.
    ///
    /// # Errors
    /// Returns an error if the limit or the period is out of [range](Self#exactness-and-ranges).
    pub fn gcra(limit: u64, period: Duration) -> Result<Self, ConfigError> {
        Self::build(limit, period, Algorithm::Gcra)
    }

    /// Makes a leaky bucket that rejects: it leaks `limit` units per `period`, holds
    /// [`burst`](Self::burst) units (by default `limit`), and rejects requests that would overflow
    /// it.
    ///
    /// # Errors
    /// Returns an error if the limit or the period is out of [range](Self#exactness-and-ranges).
    pub fn leaky_bucket(limit: u64, period: Duration) -> Result<Self, ConfigError> {
        Self::build(limit, period, Algorithm::LeakyBucket)
    }

    /// Makes a leaky bucket whose requests wait: one unit departs every `period / limit`, in the
    /// order of the requests. Each admitted request gets its own departure time.
    /// [`queue`](Self::queue) units may wait, by default `limit`.
    ///
    /// A request of several units departs at one instant. The next request departs later by the
    /// time of all these units. For example, at one unit per 100 ms, requests that cost 2, 2 and 1
    /// depart after 0, 200 and 400 ms.
    ///
    /// A limiter decides at once and does not wait. A layer with a timer makes the request wait
    /// ([`RateLimitLayer::timer`](crate::RateLimitLayer::timer)). Without a layer, the caller of the limiter has to
    /// sleep for the decision's [`delay`](crate::limiter::ChargeDecision::delay).
    ///
    /// # Errors
    /// Returns an error if the limit or the period is out of [range](Self#exactness-and-ranges).
    pub fn leaky_queue(limit: u64, period: Duration) -> Result<Self, ConfigError> {
        Self::build(limit, period, Algorithm::LeakyQueue)
    }

    /// Makes a counter that starts afresh each `period`, at whole multiples of `period` since the
    /// epoch, unless [`anchor`](Self::anchor) says otherwise.
    ///
    /// A period has a fixed length. Windows of one day begin at midnight UTC, and windows of 30 days are not months.
    /// For months and for the days of other time zones, use [`calendar`](Self::calendar).
    ///
    /// # Errors
    /// Returns an error if the limit or the period is out of [range](Self#exactness-and-ranges).
    pub fn fixed_window(limit: u64, period: Duration) -> Result<Self, ConfigError> {
        Self::build(limit, period, Algorithm::FixedWindow)
    }

    /// Makes a counter that starts afresh with each window of the [calendar](Calendar): each day, week, month, quarter
    /// or year. The quota is a [fixed window](Self::fixed_window) with the edges of the calendar, and has the options
    /// of a fixed window except [`anchor`](Self::anchor).
    ///
    /// The [`period`](Self::period) of the quota is the length of the longest window in UTC, such as 31 days.
    ///
    /// ```
    /// use tower_ratelimit::Quota;
    /// use tower_ratelimit::quota::Calendar;
    /// # fn main() -> Result<(), tower_ratelimit::ConfigError> {
    /// let plan = Quota::calendar(10_000, Calendar::month().from_day(15)?)?;
    /// assert_eq!("10000 per calendar month from day 15".parse(), Ok(plan));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Returns an error if the limit is out of [range](Self#exactness-and-ranges).
    pub fn calendar(limit: u64, calendar: Calendar) -> Result<Self, ConfigError> {
        Self::checked(Self::calendar_spec(limit, calendar))
    }

    /// Makes a counter of `limit` units for each day of the calendar in UTC: a daily budget that starts afresh at
    /// midnight. See [`calendar`](Self::calendar) for the days of another time zone.
    ///
    /// ```
    /// use tower_ratelimit::Quota;
    ///
    /// assert_eq!(Quota::per_calendar_day(1_000).to_string(), "1000 per calendar day");
    /// ```
    #[must_use]
    pub fn per_calendar_day(limit: u64) -> Self {
        Self::from_spec(Self::calendar_spec(limit.min(UNITS_MAX), Calendar::day()))
    }

    /// Makes a counter of `limit` units for each month of the calendar in UTC. See
    /// [`calendar`](Self::calendar) for days in a time zone, and for months from the day of a
    /// subscription.
    ///
    /// ```
    /// use tower_ratelimit::Quota;
    ///
    /// assert_eq!(Quota::per_calendar_month(10_000).to_string(), "10000 per calendar month");
    /// ```
    #[must_use]
    pub fn per_calendar_month(limit: u64) -> Self {
        Self::from_spec(Self::calendar_spec(limit.min(UNITS_MAX), Calendar::month()))
    }

    fn calendar_spec(limit: u64, calendar: Calendar) -> Spec {
        Spec { calendar: Some(calendar), ..Spec::new(limit, calendar.longest_us(), Algorithm::FixedWindow) }
    }

    /// Makes a window that slides with time, counted in sub-windows. [`buckets`](Self::buckets)
    /// sets the number of sub-windows; the default of 1 is the classic estimate from two counters.
    /// [`oldest`](Self::oldest) says how the oldest sub-window counts.
    ///
    /// At one instant at most `limit` units pass. In a period up to twice the limit can pass: with a limit of 100, 100
    /// units at the end of one window, and nearly 100 more before the end of the next. With [`Oldest::Counted`], or
    /// with a [`sliding_log`](Self::sliding_log), no trailing period has more than `limit` units. If only the number
    /// of buckets is raised, a period can still have more than `limit` units, but the shorter time
    /// `period·(1 − 1/buckets)` cannot.
    ///
    /// # Errors
    /// Returns an error if the limit or the period is out of [range](Self#exactness-and-ranges).
    pub fn sliding_window(limit: u64, period: Duration) -> Result<Self, ConfigError> {
        Self::build(limit, period, Algorithm::SlidingWindow)
    }

    /// Makes an exact log, in which no trailing `period` ever has more than `limit` units. The
    /// state of a key that has used all units needs memory for each unit of the limit. The limit is
    /// at most 1,000,000.
    ///
    /// # Errors
    /// Returns an error if the limit or the period is out of [range](Self#exactness-and-ranges), or
    /// the limit is above 1,000,000.
    pub fn sliding_log(limit: u64, period: Duration) -> Result<Self, ConfigError> {
        Self::build(limit, period, Algorithm::SlidingLog)
    }

    /// Limits the units that requests of a key may hold at once, such as three exports at a time. A request holds its
    /// cost from its admission to the end of its response. Units are not freed with time, so the limiter does not know
    /// how long a refused request would have to [wait](crate::Wait::Unknown).
    ///
    /// A limit above 999,999,999,999 counts as 999,999,999,999. With a limit of 0 every request is refused.
    ///
    /// ```
    /// use tower_ratelimit::{Key, MemoryLimiter, Policy, Quota, Wait};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let (limiter, exports) =
    ///     (MemoryLimiter::new(), Policy::new("exports", Quota::concurrent(2))?);
    /// let alice = Key::of("alice").unwrap();
    ///
    /// let first = limiter.hold(&exports, &alice, 1).expect("none is taken");
    /// let second = limiter.hold(&exports, &alice, 1).expect("one is taken");
    /// assert_eq!(limiter.hold(&exports, &alice, 1).unwrap_err().wait(), Wait::Unknown);
    /// drop(first);
    /// assert!(limiter.hold(&exports, &alice, 1).is_ok());
    /// # drop(second);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn concurrent(limit: u64) -> Self {
        Self::from_spec(Spec::new(limit.min(PLACES_MAX), 0, Algorithm::Concurrency))
    }

    /// Makes a quota that counts and never refuses, for customers that have no limit. The quota counts the units of the
    /// current minute of UTC. The usage of a key in that minute is the limit minus the remaining units that a peek, an
    /// explanation or a status reports. Statistics count the requests and units as under any other quota. The count
    /// ends at 999,999,999,999.
    ///
    /// * Its text is `unlimited`. It has no options.
    /// * No header reports the quota, because clients have no limit to obey. If all quotas of a
    ///   request are unlimited, its response has no headers of the layer.
    /// * If a key changes to an unlimited quota, the units that it used under its former quota count for one to two
    ///   minutes more. If a key changes from an unlimited quota to another quota, the units of the current minute
    ///   stay used. If the key has used more units than the new quota can remember, its requests are refused until
    ///   these units no longer count.
    /// * To bill the usage, add a [meter](Self::meter) to the rule by
    ///   [`Rule::overage`](crate::Rule::overage), or read the statistics.
    ///
    /// ```
    /// use tower_ratelimit::{Key, MemoryLimiter, Policy, Quota};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let (limiter, customer) =
    ///     (MemoryLimiter::new(), Policy::new("customer", Quota::unlimited())?);
    /// let acme = Key::of("acme").unwrap();
    /// assert!(limiter.take_one(&customer, &acme, u64::MAX).is_allowed());
    /// assert_eq!("unlimited".parse(), Ok(Quota::unlimited()));
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn unlimited() -> Self {
        let spec = Spec::new(PLACES_MAX, 60 * SECOND, Algorithm::FixedWindow);
        // The quota has no debt, so that its state is one word.
        Self::from_spec(Spec { unlimited: true, debt: 0, debt_is_chosen: true, ..spec })
    }
}

/// # Options
impl Quota {
    /// Sets how many units can pass at one instant after a pause: the bucket's capacity. The burst
    /// is not added to the limit.
    ///
    /// # Errors
    /// Returns an error if the algorithm is not a bucket, the burst is 0 or too large, or the full
    /// bucket drains too slowly.
    pub fn burst(self, burst: u64) -> Result<Self, ConfigError> {
        use Algorithm::{Gcra, LeakyBucket, StepBucket, TokenBucket};
        if burst == 0 && self.spec.limit != 0 {
            return Err(ConfigError::new(
                Range,
                "a burst of 0 would let nothing pass: use a burst of 1 for strict spacing, or a limit of 0 to close \
                 the quota",
            ));
        }
        self.with("burst", &[TokenBucket, StepBucket, Gcra, LeakyBucket], |spec| spec.burst = burst)
    }

    /// Sets how many units may wait in a leaky queue, in addition to the unit that is due. Units
    /// beyond that are denied.
    ///
    /// # Errors
    /// Returns an error if the algorithm is not a leaky queue, or the queue is too long.
    pub fn queue(self, length: u64) -> Result<Self, ConfigError> {
        self.with("queue", &[Algorithm::LeakyQueue], |spec| spec.burst = length.saturating_add(1))
    }

    /// Bounds how long a request waits: in a leaky queue, or in line for units of a [concurrency
    /// limit](Self::concurrent).
    ///
    /// * The length of a leaky queue becomes the number of units that depart in that time, rounded down, plus the units
    ///   that [pass at once](Self::delay_after). So call `delay_after` first. A shorter queue keeps its length. A
    ///   request that would have to wait longer is denied.
    /// * A request over a concurrency limit waits in line until units are free, in the order in which the requests of
    ///   its key came. The request is refused after it has waited for the given time. The time is at most 366 days,
    ///   and is rounded down to whole microseconds. With the default of zero, the request is refused at once.
    ///   Requests wait only in a layer with a [timer](crate::RateLimitLayer::timer). On Redis each process has its
    ///   own line.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::Quota;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let exports = Quota::concurrent(3).max_wait(Duration::from_secs(10))?;
    /// assert_eq!(exports.to_string(), "3 at once, wait 10 seconds");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Returns an error if the algorithm is neither a leaky queue nor a concurrency limit, or if a
    /// request could wait in line for more than 366 days.
    pub fn max_wait(self, wait: Duration) -> Result<Self, ConfigError> {
        if self.spec.algorithm == Algorithm::Concurrency {
            let wait_us = micros_floor(wait);
            if wait_us > PERIOD_US_MAX {
                return Err(ConfigError::new(Range, format!("a wait of {wait:?} is too long: at most 366 days")));
            }
            return Self::checked(Spec { line_wait_us: wait_us, ..self.spec });
        }
        let period_us = u128::from(self.spec.period_us.max(1));
        let spaced = u128::from(micros_floor(wait)) * u128::from(self.spec.limit) / period_us;
        let length = u64::try_from(spaced).unwrap_or(u64::MAX).saturating_add(self.spec.delay_after);
        let algorithms = [Algorithm::LeakyQueue, Algorithm::Concurrency];
        self.with("max_wait", &algorithms, |spec| spec.burst = spec.burst.min(length.saturating_add(1)))
    }

    /// Sets how many units of a leaky queue pass at once, like nginx's `delay=`. Beyond the unit
    /// that is due, the first `n` units are not delayed, the next units are spaced, and units
    /// beyond the queue are denied.
    ///
    /// A request of several units passes at once only if all its units do. Therefore in any
    /// interval the number of units that depart beyond the rate is at most `n + 1`, or the cost of
    /// one request if that is more.
    ///
    /// # Errors
    /// Returns an error if the algorithm is not a leaky queue, or `n` is more than the queue's
    /// length.
    pub fn delay_after(self, n: u64) -> Result<Self, ConfigError> {
        self.with("delay_after", &[Algorithm::LeakyQueue], |spec| spec.delay_after = n)
    }

    /// Sets where windows or steps begin.
    ///
    /// # Errors
    /// Returns an error if the algorithm is neither a fixed window nor a step bucket, or if the windows are those of
    /// the [calendar](Self::calendar).
    pub fn anchor(self, anchor: Anchor) -> Result<Self, ConfigError> {
        if self.spec.calendar.is_some() {
            let message = "`anchor` has no meaning for a quota of the calendar, which says where windows begin: \
                           `anchor` belongs to windows of one length";
            return Err(ConfigError::new(NotAnOption, message));
        }
        self.with("anchor", &[Algorithm::FixedWindow, Algorithm::StepBucket], |spec| spec.anchor = anchor)
    }

    /// Sets the number of sub-windows of a sliding window: 1 is the classic estimate from two
    /// counters, 60 is close to a log.
    ///
    /// # Errors
    /// Returns an error if the algorithm is not a sliding window, if `buckets` is 0 or above 3,600,
    /// or if the period does not divide into `buckets` sub-windows of whole microseconds.
    pub fn buckets(self, buckets: u32) -> Result<Self, ConfigError> {
        if buckets == 0 || buckets > BUCKETS_MAX {
            return Err(ConfigError::new(
                Range,
                format!("a sliding window has 1 to {BUCKETS_MAX} buckets, not {buckets}"),
            ));
        }
        let period_us = self.spec.period_us;
        let divides = |n: &u32| period_us % u64::from(*n) == 0;
        if !divides(&buckets) {
            return Err(ConfigError::new(
                Range,
                format!(
                    "{period_us} µs do not divide into {buckets} buckets of whole microseconds: choose a number of \
                     buckets that divides the period, such as {}",
                    (1..=buckets).rev().find(divides).unwrap_or(1),
                ),
            ));
        }
        self.with("buckets", &[Algorithm::SlidingWindow], |spec| spec.buckets = buckets)
    }

    /// Sets how a sliding window counts its oldest sub-window, which the period covers only in
    /// part.
    ///
    /// # Errors
    /// Returns an error if the algorithm is not a sliding window.
    pub fn oldest(self, oldest: Oldest) -> Result<Self, ConfigError> {
        self.with("oldest", &[Algorithm::SlidingWindow], |spec| spec.oldest = oldest)
    }

    /// Also counts denied requests, so that a client that keeps retrying stays denied.
    ///
    /// Denied requests fill a fixed window, or the current sub-window of a sliding window, up to
    /// the limit. A log keeps the newest units, at most `limit` of them. A block starts again with
    /// each denied request.
    ///
    /// # Errors
    /// Returns an error if the algorithm is not a window, a log or a block.
    pub fn count_denied(self) -> Result<Self, ConfigError> {
        use Algorithm::{Block, FixedWindow, SlidingLog, SlidingWindow};
        self.with("count_denied", &[FixedWindow, SlidingWindow, SlidingLog, Block], |spec| spec.count_denied = true)
    }

    /// Sets the largest debt in units: how far below zero forced charges, such as settlements, may
    /// bring a key. Debt beyond that is forgotten. The default is the capacity. The largest debt
    /// also bounds how long a key can be denied after a clock has stepped back.
    ///
    /// # Errors
    /// Returns an error if the debt is too large or drains too slowly, or if the quota is a block, a
    /// meter or a concurrency limit, which have no debt.
    pub fn max_debt(self, units: u64) -> Result<Self, ConfigError> {
        self.with("max_debt", &Algorithm::rates(), |spec| (spec.debt, spec.debt_is_chosen) = (units, true))
    }

    /// Keeps the used share instead of the used amount when a key's state was written under another
    /// quota of this policy name: 60 of 100 becomes 600 of 1,000. See
    /// [`Rule::plans_in_proportion`].
    ///
    /// The share is relative to the capacity and includes debt. The share is rounded up, by less
    /// than a unit. In a window or a log, the share counts as used at the instant of the
    /// conversion.
    ///
    /// [`Rule::plans_in_proportion`]: crate::Rule::plans_in_proportion
    ///
    /// # Errors
    /// Returns an error for a block, a meter and a concurrency limit, because a share of strikes, of units to
    /// be settled, or of requests in flight has no meaning.
    pub fn in_proportion(self) -> Result<Self, ConfigError> {
        self.with("in_proportion", &Algorithm::rates(), |spec| spec.proportional = true)
    }

    /// Counts bytes instead of requests: clients read `content-bytes` as the unit of the quota, and the quota's text
    /// has units of bytes. A text such as `10 MiB per hour` makes such a quota.
    ///
    /// The rule has to set how many bytes a request costs, with [`Rule::cost`] or
    /// [`Rule::settle_by_body`].
    ///
    /// ```
    /// use tower_ratelimit::Quota;
    /// # fn main() -> Result<(), tower_ratelimit::ConfigError> {
    /// let quota = Quota::per_hour(10 << 20).in_bytes()?;
    /// assert_eq!(quota.to_string(), "10 MiB per hour, token bucket");
    /// assert_eq!("10 MiB/h".parse(), Ok(quota));
    /// # Ok(()) }
    /// ```
    ///
    /// [`Rule::cost`]: crate::Rule::cost
    /// [`Rule::settle_by_body`]: crate::Rule::settle_by_body
    ///
    /// # Errors
    /// Returns an error if the quota is a block, whose units are strikes.
    pub fn in_bytes(self) -> Result<Self, ConfigError> {
        let counting: Vec<Algorithm> =
            Algorithm::ALL.iter().copied().filter(|algorithm| *algorithm != Algorithm::Block).collect();
        self.with("in_bytes", &counting, |spec| spec.in_bytes = true)
    }
}

/// # Reading a quota
impl Quota {
    /// Returns the limit: the units per period, or the units that requests may hold at once.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.spec.limit
    }

    /// Returns the period of the limit, or zero for a [concurrency limit](Self::concurrent), which has no period. For a
    /// quota of the [calendar](Self::calendar), returns the length of the longest window in UTC.
    #[must_use]
    pub fn period(&self) -> Duration {
        Duration::from_micros(self.spec.period_us)
    }

    /// Returns the maximum number of units that can pass at one instant: a bucket's burst, a window's or a log's limit.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.spec.burst
    }

    /// Returns whether the quota counts [bytes](Self::in_bytes).
    #[must_use]
    pub fn counts_bytes(&self) -> bool {
        self.spec.in_bytes
    }

    /// Returns the windows of a quota of the [calendar](Self::calendar); `None` for other quotas.
    #[must_use]
    pub fn calendar_windows(&self) -> Option<Calendar> {
        self.spec.calendar
    }

    /// Returns the windows of a quota of the calendar. These windows cache the window that was looked up
    /// last.
    pub(crate) fn known_windows(&self) -> Option<&'static CalendarWindows> {
        match self.decider {
            Decider::Pair(PairDecider::FixedWindow(window), _) => window.calendar(),
            _ => None,
        }
    }

    /// Returns whether the quota has fixed windows that begin at multiples of the period since 1970.
    pub(crate) fn has_windows_of_epoch(&self) -> bool {
        let Spec { algorithm, anchor, calendar, unlimited, .. } = self.spec;
        algorithm == Algorithm::FixedWindow && anchor == Anchor::Epoch && calendar.is_none() && !unlimited
    }

    /// Returns whether the quota's windows end at a date, so that the quota needs a clock that follows the calendar.
    /// Windows of a calendar and windows of whole days since 1970 end at a date.
    pub(crate) fn has_windows_of_dates(&self) -> bool {
        let is_of_days = self.spec.period_us % (DAY_S as u64 * 1_000_000) == 0;
        self.spec.calendar.is_some() || self.has_windows_of_epoch() && is_of_days
    }

    /// Returns the algorithm.
    #[must_use]
    pub fn algorithm(&self) -> Algorithm {
        self.spec.algorithm
    }

    /// Returns whether denied requests change this quota's state.
    #[must_use]
    pub fn counts_denied(&self) -> bool {
        self.spec.count_denied
    }

    /// Returns the time in which the whole capacity refills, rounded up to a microsecond; zero for a
    /// [concurrency limit](Self::concurrent), which does not refill with time.
    #[must_use]
    pub fn refill_time(&self) -> Duration {
        Duration::from_micros(self.spec.refill_us())
    }

    /// Returns how long a request may wait in line for units of a [concurrency limit](Self::concurrent). Returns zero
    /// for other quotas, and if the request is refused at once.
    #[must_use]
    pub fn wait_in_line(&self) -> Duration {
        Duration::from_micros(self.spec.line_wait_us)
    }

    /// Returns whether the quota counts and [never refuses](Self::unlimited).
    #[must_use]
    pub fn is_unlimited(&self) -> bool {
        self.spec.unlimited
    }
}

impl Quota {
    /// Returns the number of used units for which another quota of the same policy needs room: the capacity of this
    /// quota, or 0 if this quota is unlimited.
    pub(crate) fn capacity_to_hold(&self) -> u64 {
        if self.is_unlimited() { 0 } else { self.capacity() }
    }

    pub(crate) fn decider(&self) -> &Decider {
        &self.decider
    }

    /// Returns whether two quotas count in the same way, so that their states look alike. The
    /// algorithms may still have different names, and treat requests that wait or are denied in
    /// different ways.
    pub(crate) fn counts_alike(&self, other: &Self) -> bool {
        let counted = |Self { spec, .. }: &Self| {
            let is_one_instant = spec.algorithm.is_bucket() && spec.algorithm != Algorithm::StepBucket;
            let algorithm = if is_one_instant { Algorithm::TokenBucket } else { spec.algorithm };
            Spec {
                algorithm,
                in_bytes: false,
                delay_after: 0,
                line_wait_us: 0,
                count_denied: false,
                proportional: false,
                debt_is_chosen: false,
                ..*spec
            }
        };
        counted(self) == counted(other)
    }

    /// Returns whether a receipt of the other quota has the same meaning under this quota. The receipt of a bucket
    /// has the instant at which the units have drained. The receipt of a window or a log has the window in which the
    /// units were counted. The receipt of a leaky queue has the request's last departure, which depends on the
    /// queue's rate.
    pub(crate) fn reads_receipts_of(&self, other: &Self) -> bool {
        let is_bucket =
            |Self { spec, .. }: &Self| spec.algorithm.is_bucket() && spec.algorithm != Algorithm::LeakyQueue;
        let dates = |Self { spec, .. }: &Self| {
            let rate = if spec.algorithm == Algorithm::LeakyQueue { spec.limit } else { 0 };
            (spec.algorithm, spec.period_us, spec.anchor, spec.calendar, spec.buckets, rate)
        };
        is_bucket(self) && is_bucket(other) || dates(self) == dates(other)
    }

    pub(crate) fn spec(&self) -> &Spec {
        &self.spec
    }

    /// Returns a number that is equal for equal quotas. The number is valid in this process only,
    /// and is not stored.
    pub(crate) fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    fn simple(limit: u64, period_us: u64) -> Self {
        // A limit up to the largest one is never out of range: a full bucket drains in one period,
        // and the interval of a unit may be a fraction of a microsecond.
        Self::from_spec(Spec::new(limit.min(UNITS_MAX), period_us, Algorithm::TokenBucket))
    }

    pub(super) fn build(limit: u64, period: Duration, algorithm: Algorithm) -> Result<Self, ConfigError> {
        Self::checked(Spec::new(limit, micros("a period of", period)?, algorithm))
    }

    /// Sets an option, or returns an error if the quota's algorithm is not one of `algorithms`.
    pub(super) fn with<T>(
        self,
        option: &str,
        algorithms: &[Algorithm],
        change: impl FnOnce(&mut Spec) -> T,
    ) -> Result<Self, ConfigError> {
        self.check_option(option, algorithms)?;
        let mut spec = self.spec;
        change(&mut spec);
        Self::checked(spec)
    }

    /// Returns an error if an option has no meaning for this quota.
    fn check_option(self, option: &str, algorithms: &[Algorithm]) -> Result<(), ConfigError> {
        if self.is_unlimited() {
            return Err(ConfigError::new(
                NotAnOption,
                format!("`{option}` has no meaning for an unlimited quota: leave it out"),
            ));
        }
        let own = self.spec.algorithm;
        if !algorithms.contains(&own) {
            let names = algorithms.iter().map(|algorithm| algorithm.as_str()).collect::<Vec<_>>();
            return Err(ConfigError::new(
                NotAnOption,
                format!("`{option}` has no meaning for a {own}: it belongs to {}", names.join(", ")),
            ));
        }
        Ok(())
    }

    pub(super) fn checked(mut spec: Spec) -> Result<Self, ConfigError> {
        spec.settle();
        for (name, units) in [("limit", spec.limit), ("burst", spec.burst), ("debt", spec.debt)] {
            if units > UNITS_MAX {
                return Err(ConfigError::new(
                    Range,
                    format!("a {name} of {units} is too large: at most {UNITS_MAX}; count in a larger unit"),
                ));
            }
            if units > spec.units_max() {
                return Err(ConfigError::new(
                    Range,
                    format!(
                        "a {name} of {units} at {} per {} µs takes longer than 8.9 years to come back: make it smaller or \
                         the rate higher",
                        spec.limit, spec.period_us
                    ),
                ));
            }
        }
        if spec.algorithm == Algorithm::Concurrency && spec.limit > PLACES_MAX {
            let message = format!("{} at once is too much: at most {PLACES_MAX}; count in a larger unit", spec.limit);
            return Err(ConfigError::new(Range, message));
        }
        if spec.algorithm == Algorithm::SlidingLog && spec.limit > LOG_LIMIT_MAX {
            return Err(ConfigError::new(
                Range,
                format!(
                    "a log of {0} units would remember up to {0} requests for each key, and at most {LOG_LIMIT_MAX} are \
                     possible: use a sliding window of 60 buckets, whose memory does not grow with the limit",
                    spec.limit
                ),
            ));
        }
        if spec.delay_after > spec.burst.saturating_sub(1) {
            return Err(ConfigError::new(
                Range,
                format!(
                    "{} requests cannot pass undelayed through a queue of {}: lengthen the queue first",
                    spec.delay_after,
                    spec.burst.saturating_sub(1)
                ),
            ));
        }
        Ok(Self::from_spec(spec))
    }

    pub(crate) fn from_spec(spec: Spec) -> Self {
        let fingerprint = foldhash::quality::FixedState::default().hash_one(spec);
        Self { spec, decider: Decider::new(&spec), fingerprint }
    }

    /// Returns the quota with enough debt that its states can hold the usage of a quota with this
    /// capacity. The debt is at most the number of units that refill in 8.9 years.
    pub(crate) fn holding(self, capacity: u64) -> Self {
        self.owing(capacity.saturating_sub(self.capacity()))
    }

    /// Returns the quota with at least this debt, which is cut to the number of units that refill in 8.9 years.
    pub(crate) fn owing(self, debt: u64) -> Self {
        let debt = debt.min(self.spec.units_max()).min(UNITS_MAX);
        if debt <= self.spec.debt { self } else { self.max_debt(debt).unwrap_or(self) }
    }
}

/// Returns a time of a quota in microseconds, or an error if the time is out of range.
pub(super) fn micros(what: &str, span: Duration) -> Result<u64, ConfigError> {
    micros_exact(span).filter(|us| (1..=PERIOD_US_MAX).contains(us)).ok_or_else(|| {
        ConfigError::new(
            Range,
            format!(
                "{what} {span:?} is not possible: it must be whole microseconds, at least one and at most 366 days"
            ),
        )
    })
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
