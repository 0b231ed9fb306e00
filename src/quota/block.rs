//! Quotas that close, and quotas that only count.

use std::time::Duration;

use super::{Algorithm, Lasting, Quota, QuotaError, QuotaErrorKind};
use crate::algorithm::block::STRIKES_MAX;
use crate::time::{PERIOD_US_MAX, micros_exact};

/// The largest factor by which blocks grow.
const FACTOR_MAX: u32 = 1_000;

impl Quota {
    /// A block: when `strikes` units were taken within `period`, counted from the first of them, the key is closed for
    /// the time `lasting`. What is denied meanwhile does not prolong it, unless [`count_denied`](Self::count_denied) is
    /// asked for.
    ///
    /// Alone it is a limit whose end is dearer than its window: after the last of five tries nothing for an hour. As the
    /// [`OnRefusal`](crate::Effect::OnRefusal) charge of another policy its units are refusals.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::Quota;
    /// # fn main() -> Result<(), tower_ratelimit::QuotaError> {
    /// let (minute, hour) = (Duration::from_secs(60), Duration::from_secs(3_600));
    /// let block = Quota::block(5, 10 * minute, hour)?.growing(2, 24 * hour, 7 * 24 * hour)?;
    /// assert_eq!(block.to_string(), "5 per 10 minutes, for 1 hour, times 2 up to 1 day within 7 days, block");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// If there are no strikes or more than 4,095, or a time is out of [range](Self#exactness-and-ranges).
    pub fn block(strikes: u64, period: Duration, lasting: Duration) -> Result<Self, QuotaError> {
        if strikes == 0 || strikes > STRIKES_MAX {
            return Err(QuotaError::new(
                QuotaErrorKind::Units,
                format!("a block after {strikes} strikes is not possible: 1 to {STRIKES_MAX}"),
            ));
        }
        Self::build(strikes, period, Algorithm::Block)?.lasting(lasting)
    }

    /// How long a block lasts, before it [grows](Self::growing).
    ///
    /// # Errors
    /// If the algorithm is not a block, or the time is out of [range](Self#exactness-and-ranges) or above the longest.
    pub fn lasting(self, lasting: Duration) -> Result<Self, QuotaError> {
        self.only("lasting", &[Algorithm::Block])?;
        let length_us = span("a block of", lasting)?;
        let grows = self.spec().lasting.memory_us > 0;
        if grows && length_us > self.spec().lasting.longest_us {
            return Err(above_longest(lasting, Duration::from_micros(self.spec().lasting.longest_us)));
        }
        self.with(|spec| {
            spec.lasting.length_us = length_us;
            if !grows {
                spec.lasting.longest_us = length_us;
            }
        })
    }

    /// Makes each further block `factor` times as long as the one before, but no longer than `longest`, if it begins within
    /// `memory` after the end of the last one; then the count begins anew. A key is remembered for so long.
    ///
    /// # Errors
    /// If the algorithm is not a block, the factor is 0 or above 1,000, a time is out of
    /// [range](Self#exactness-and-ranges), or the longest block is shorter than the first.
    pub fn growing(self, factor: u32, longest: Duration, memory: Duration) -> Result<Self, QuotaError> {
        self.only("growing", &[Algorithm::Block])?;
        if factor == 0 || factor > FACTOR_MAX {
            return Err(QuotaError::new(
                QuotaErrorKind::Units,
                format!("blocks cannot grow by the factor {factor}: 1 to {FACTOR_MAX}, where 1 is as long each time"),
            ));
        }
        let (longest_us, memory_us) = (span("a longest block of", longest)?, span("a memory of", memory)?);
        let length_us = self.spec().lasting.length_us;
        if longest_us < length_us {
            return Err(above_longest(Duration::from_micros(length_us), longest));
        }
        self.with(|spec| spec.lasting = Lasting { length_us, factor: u64::from(factor), longest_us, memory_us })
    }

    /// A meter: counts units until it is reset, or until nothing was counted for the time `retention`. At `limit` units it
    /// is full, and denies more.
    ///
    /// It is for metering what goes beyond another policy, as the [`OnRefusal`](crate::Effect::OnRefusal) charge of it:
    /// its limit is the most that may. In memory its states are never evicted: where there is no room for another, it is
    /// denied.
    ///
    /// # Errors
    /// If the limit or the retention is out of [range](Self#exactness-and-ranges).
    pub fn meter(limit: u64, retention: Duration) -> Result<Self, QuotaError> {
        Self::build(limit, retention, Algorithm::Meter)
    }
}

impl Quota {
    /// The quota of which only that is told which its states depend on: how long a block is, and whether it begins anew,
    /// a block's state says itself.
    pub(crate) fn of_states(self) -> Self {
        let mut spec = *self.spec();
        if spec.algorithm == Algorithm::Block {
            spec.lasting = Lasting { memory_us: spec.lasting.memory_us, length_us: 1, factor: 1, longest_us: 1 };
            spec.count_denied = false;
        }
        Self::from_spec(spec)
    }

    /// The block of a key that is closed by hand for a time, rounded up so that there are few different ones: each is
    /// another quota to a limiter.
    pub(crate) fn closing_for(self, lasting: Duration) -> Self {
        const SECOND_US: u64 = 1_000_000;
        let us = crate::time::micros_ceil(lasting).clamp(1, PERIOD_US_MAX);
        let units = [SECOND_US, 60 * SECOND_US, 3_600 * SECOND_US];
        let rounded = units.into_iter().map(|unit| (us.div_ceil(unit), unit)).find(|(count, _)| *count <= 1_000);
        let (count, unit) = rounded.unwrap_or((us.div_ceil(86_400 * SECOND_US), 86_400 * SECOND_US));
        let length_us = (count * unit).min(PERIOD_US_MAX);
        let mut spec = *self.spec();
        spec.lasting = Lasting { length_us, factor: 1, longest_us: length_us, memory_us: spec.lasting.memory_us };
        spec.count_denied = true;
        Self::from_spec(spec)
    }
}

fn span(what: &str, span: Duration) -> Result<u64, QuotaError> {
    micros_exact(span).filter(|us| (1..=PERIOD_US_MAX).contains(us)).ok_or_else(|| {
        QuotaError::new(
            QuotaErrorKind::Period,
            format!(
                "{what} {span:?} is not possible: it must be whole microseconds, at least one and at most 366 days"
            ),
        )
    })
}

fn above_longest(length: Duration, longest: Duration) -> QuotaError {
    QuotaError::new(
        QuotaErrorKind::Period,
        format!(
            "a block of {length:?} cannot grow up to {longest:?}, which is shorter: give a longest such as {length:?}"
        ),
    )
}
