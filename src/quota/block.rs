//! The quotas for blocks, which close keys, and for meters, which only count.

use std::time::Duration;

use super::builder::{Quota, micros};
use super::spec::{Algorithm, Lasting};
use crate::algorithm::block::STRIKES_MAX;
use crate::base::time::PERIOD_US_MAX;
use crate::error::{ConfigError, ConfigErrorKind};

/// The largest factor by which a block may be longer than the previous block.
const FACTOR_MAX: u32 = 1_000;

/// # Blocks and meters
impl Quota {
    /// Makes a block: when `strikes` units were taken within `period`, counted from the first of
    /// them, the key is closed for the time `lasting`. Denied requests do not prolong the block,
    /// unless [`count_denied`](Self::count_denied) is set.
    ///
    /// As the only quota of a rule, a block is a limit such as "five attempts, then none for an
    /// hour". As the [block of a rule](crate::Rule::block), a block counts the rule's refusals.
    ///
    /// While a block lasts, a refund of the units that began the block ends the block. For example,
    /// with [`charge_when`](crate::Rule::charge_when) successful logins never close a key; see the
    /// [guide](crate::guide::blocks_and_meters#blocks).
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::Quota;
    /// # fn main() -> Result<(), tower_ratelimit::ConfigError> {
    /// let (minute, hour) = (Duration::from_secs(60), Duration::from_secs(3_600));
    /// let block = Quota::block(5, 10 * minute, hour)?.growing(2, 24 * hour, 7 * 24 * hour)?;
    /// assert_eq!(
    ///     block.to_string(),
    ///     "5 per 10 minutes, for 1 hour, times 2 up to 1 day within 7 days, block"
    /// );
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Returns an error if there are no strikes or more than 4,095, or a time is out of
    /// [range](Self#exactness-and-ranges).
    pub fn block(strikes: u64, period: Duration, lasting: Duration) -> Result<Self, ConfigError> {
        if strikes == 0 || strikes > STRIKES_MAX {
            return Err(ConfigError::new(
                ConfigErrorKind::Range,
                format!("a block after {strikes} strikes is not possible: use 1 to {STRIKES_MAX}"),
            ));
        }
        Self::build(strikes, period, Algorithm::Block)?.lasting(lasting)
    }

    /// Sets how long the first block lasts, before it [grows](Self::growing).
    ///
    /// # Errors
    /// Returns an error if the algorithm is not a block, or the time is out of
    /// [range](Self#exactness-and-ranges) or above the length of the longest block.
    pub fn lasting(self, lasting: Duration) -> Result<Self, ConfigError> {
        let (length_us, longest_us) = (micros("a block of", lasting)?, self.spec().lasting.longest_us);
        let grows = self.spec().lasting.memory_us > 0;
        if grows && length_us > longest_us {
            return Err(above_longest(length_us, longest_us));
        }
        self.with("lasting", &[Algorithm::Block], |spec| {
            spec.lasting.length_us = length_us;
            if !grows {
                spec.lasting.longest_us = length_us;
            }
        })
    }

    /// Makes each further block `factor` times as long as the previous one, but no longer than
    /// `longest`. A block counts as a further block if it begins within `memory` after the end of
    /// the previous block. A key is remembered for the time `memory`.
    ///
    /// # Errors
    /// Returns an error if the algorithm is not a block, the factor is 0 or above 1,000, a time is
    /// out of [range](Self#exactness-and-ranges), or the longest block is shorter than the first.
    pub fn growing(self, factor: u32, longest: Duration, memory: Duration) -> Result<Self, ConfigError> {
        if factor == 0 || factor > FACTOR_MAX {
            return Err(ConfigError::new(
                ConfigErrorKind::Range,
                format!(
                    "blocks cannot grow by the factor {factor}: use 1 to {FACTOR_MAX}, where 1 means blocks of equal \
                     length"
                ),
            ));
        }
        let (longest_us, memory_us) = (micros("a longest block of", longest)?, micros("a memory of", memory)?);
        let length_us = self.spec().lasting.length_us;
        if longest_us < length_us {
            return Err(above_longest(length_us, longest_us));
        }
        let lasting = Lasting { length_us, factor: u64::from(factor), longest_us, memory_us, by_hand_us: 0 };
        self.with("growing", &[Algorithm::Block], |spec| spec.lasting = lasting)
    }

    /// Makes a meter, which counts units until it is reset, or until nothing was counted for the
    /// time `retention`. A meter that has counted `limit` units is full and denies further units.
    ///
    /// A [rule](crate::Rule::overage) uses a meter to count the units beyond its quota. In memory
    /// the states of meters are never evicted, unless the limiter has [too many
    /// quotas](crate::observe::LimiterEvent::TooManyQuotas). If there is no room for a new state of
    /// a meter, the charge is denied.
    ///
    /// # Errors
    /// Returns an error if the limit or the retention is out of [range](Self#exactness-and-ranges).
    pub fn meter(limit: u64, retention: Duration) -> Result<Self, ConfigError> {
        Self::build(limit, retention, Algorithm::Meter)
    }
}

impl Quota {
    /// Returns the quota with only those options that its states depend on.
    pub(crate) fn of_states(self) -> Self {
        // The state of held units does not depend on the limit.
        if self.algorithm() == Algorithm::Concurrency {
            Self::concurrent(1)
        } else {
            Self::from_spec(self.spec().of_states())
        }
    }

    /// Returns the quota that closes a key by hand for a time. The time is rounded up, so that a
    /// limiter gets few different quotas.
    pub(crate) fn closing_for(self, lasting: Duration) -> Self {
        const SECOND_US: u64 = 1_000_000;
        let us = crate::base::time::micros_ceil(lasting).clamp(1, PERIOD_US_MAX);
        let units = [SECOND_US, 60 * SECOND_US, 3_600 * SECOND_US];
        let rounded = units.into_iter().map(|unit| (us.div_ceil(unit), unit)).find(|(count, _)| *count <= 1_000);
        let (count, unit) = rounded.unwrap_or((us.div_ceil(86_400 * SECOND_US), 86_400 * SECOND_US));
        let mut spec = *self.spec();
        spec.lasting.by_hand_us = (count * unit).min(PERIOD_US_MAX);
        spec.count_denied = true;
        Self::from_spec(spec)
    }
}

fn above_longest(length_us: u64, longest_us: u64) -> ConfigError {
    let [length, longest] = [length_us, longest_us].map(Duration::from_micros);
    ConfigError::new(
        ConfigErrorKind::Range,
        format!(
            "a block of {length:?} cannot grow up to {longest:?}, which is shorter: make the longest block at least \
             {length:?}"
        ),
    )
}
