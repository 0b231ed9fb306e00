//! A quota as data, which algorithms read.

use crate::base::calendar::{Calendar, CalendarUnit};
use crate::base::time::DRAIN_US_MAX;
use crate::base::zone::Zone;
use crate::error::labelled;

/// The largest number of units in a quota: the largest integer of a structured header.
pub(crate) const UNITS_MAX: u64 = 999_999_999_999_999;

/// The largest number of units that requests in flight may hold.
pub(crate) const PLACES_MAX: u64 = 999_999_999_999;

/// The number of words of a packed [`Spec`].
pub(crate) const SPEC_WORDS: usize = 8;

/// The numbers of a quota. The other data of a quota is computed from these numbers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Spec {
    pub(crate) limit: u64,
    /// The period in microseconds; 0 if units are freed when requests end, and not with time.
    pub(crate) period_us: u64,
    /// The maximum number of units that can pass at one instant.
    pub(crate) burst: u64,
    /// The maximum debt in units that forced charges may cause.
    pub(crate) debt: u64,
    /// Whether the debt was set. If the debt was not set, the debt of a rate limit is as large as its burst.
    pub(crate) debt_is_chosen: bool,
    pub(crate) algorithm: Algorithm,
    /// True if the quota counts and never refuses. A quota that never refuses is a fixed window, whose count ends at
    /// its limit.
    pub(crate) unlimited: bool,
    /// True if a unit is a byte. The unit changes only the text and the headers of the quota, not the decisions.
    pub(crate) in_bytes: bool,
    pub(crate) anchor: Anchor,
    /// The calendar whose windows a fixed window has, if any. The period is then the length of the longest window in
    /// UTC.
    pub(crate) calendar: Option<Calendar>,
    pub(crate) delay_after: u64,
    /// How long a request may wait in line for units of a concurrency limit, in microseconds; 0 if the request is
    /// refused at once.
    pub(crate) line_wait_us: u64,
    pub(crate) buckets: u32,
    pub(crate) oldest: Oldest,
    pub(crate) count_denied: bool,
    /// True if a changed quota keeps the used share instead of the used amount.
    pub(crate) proportional: bool,
    pub(crate) lasting: Lasting,
}

/// The lengths of blocks. For algorithms other than blocks all times are zero and the factor is 1.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Lasting {
    pub(crate) length_us: u64,
    /// The factor by which a further block is longer than the previous block.
    pub(crate) factor: u64,
    /// The length of the longest block, in microseconds.
    pub(crate) longest_us: u64,
    /// The time after the end of a block, in microseconds, within which the next block counts as a further block.
    pub(crate) memory_us: u64,
    /// How long a key is closed by hand, in microseconds; 0 if strikes close the key.
    pub(crate) by_hand_us: u64,
}

labelled! {
    /// The algorithms. The guide says [which algorithm to choose](crate::guide::choosing_an_algorithm).
    Algorithm,
    /// Returns the algorithm's name as it is printed and read.
    as_str {
        /// Tokens flow in continuously, up to the burst.
        TokenBucket = "token bucket",
        /// Tokens are added in steps, as by a refill process with a timer.
        StepBucket = "step bucket",
        /// The generic cell rate algorithm. A burst of 1 spaces units strictly.
        Gcra = "gcra",
        /// A leaky bucket that rejects requests that would overflow it.
        LeakyBucket = "leaky bucket",
        /// A leaky bucket whose requests wait for their departure.
        LeakyQueue = "leaky queue",
        /// A counter that starts afresh each period.
        FixedWindow = "fixed window",
        /// Counters of the current and of past sub-windows, which slide with time.
        SlidingWindow = "sliding window",
        /// A log of every admitted request of one period.
        SlidingLog = "sliding log",
        /// A number of strikes. A key that has used all strikes is closed for the length of the
        /// block.
        Block = "block",
        /// A counter for metering, which starts afresh only when it is reset, or when nothing was counted
        /// for its retention time.
        Meter = "meter",
        /// A number of units that requests hold while they are in flight.
        Concurrency = "concurrency limit",
    }
}

/// The points in time at which windows or steps begin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Anchor {
    /// At whole multiples of the period since the Unix epoch, so a day begins at midnight UTC.
    #[default]
    Epoch,
    /// At the key's first request.
    FirstRequest,
}

/// The weight of the oldest sub-window, which the sliding period covers only in part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Oldest {
    /// The oldest sub-window counts in proportion to the part that the period still covers, rounded down.
    #[default]
    Weighted,
    /// The oldest sub-window does not count.
    Dropped,
    /// The oldest sub-window counts in full, so that no trailing period is above the limit. Counting the sub-window in
    /// full lowers the rate: in the long run, the units of the limit pass once in the time of a period plus one
    /// sub-window. With one bucket, the rate is halved.
    Counted,
}

impl Algorithm {
    /// Returns whether the algorithm limits the rate of requests. The units of a block are refusals, and the units of a
    /// meter are settled later. Units of a concurrency limit are freed when requests end.
    pub(crate) fn is_rate(self) -> bool {
        match self {
            Self::TokenBucket | Self::StepBucket | Self::Gcra | Self::LeakyBucket | Self::LeakyQueue => true,
            Self::FixedWindow | Self::SlidingWindow | Self::SlidingLog => true,
            Self::Block | Self::Meter | Self::Concurrency => false,
        }
    }

    /// Returns all algorithms that limit [rates](Self::is_rate).
    pub(crate) fn rates() -> Vec<Self> {
        Self::ALL.iter().copied().filter(|algorithm| algorithm.is_rate()).collect()
    }

    /// Returns all algorithms whose units are freed with time.
    pub(crate) fn timed() -> impl Iterator<Item = Self> {
        Self::ALL.iter().copied().filter(|algorithm| *algorithm != Self::Concurrency)
    }

    /// Returns whether the algorithm is a bucket, which frees used units gradually.
    pub(super) fn is_bucket(self) -> bool {
        match self {
            Self::TokenBucket | Self::StepBucket | Self::Gcra | Self::LeakyBucket | Self::LeakyQueue => true,
            Self::FixedWindow | Self::SlidingWindow | Self::SlidingLog => false,
            Self::Block | Self::Meter | Self::Concurrency => false,
        }
    }
}

impl Spec {
    pub(super) fn new(limit: u64, period_us: u64, algorithm: Algorithm) -> Self {
        let burst = match algorithm {
            _ if limit == 0 => 0,
            Algorithm::Gcra => 1,
            Algorithm::LeakyQueue => limit.saturating_add(1),
            _ => limit,
        };
        let mut spec = Self {
            limit,
            period_us,
            burst,
            debt: 0,
            debt_is_chosen: false,
            algorithm,
            unlimited: false,
            in_bytes: false,
            anchor: Anchor::Epoch,
            calendar: None,
            delay_after: 0,
            line_wait_us: 0,
            buckets: 1,
            oldest: Oldest::Weighted,
            count_denied: false,
            proportional: false,
            lasting: Lasting { length_us: 0, factor: 1, longest_us: 0, memory_us: 0, by_hand_us: 0 },
        };
        spec.settle();
        spec
    }

    /// Sets the burst and the debt in those cases in which they follow from the other numbers.
    pub(super) fn settle(&mut self) {
        if self.limit == 0 {
            (self.burst, self.debt_is_chosen) = (0, false); // closed: no capacity and no debt
        }
        if !self.debt_is_chosen {
            self.debt = if self.algorithm.is_rate() { self.burst } else { 0 };
        }
    }

    /// Returns the numbers of the quota with only those options that its states depend on.
    pub(crate) fn of_states(&self) -> Self {
        let mut spec = Self { in_bytes: false, ..*self };
        if spec.algorithm == Algorithm::Block {
            (spec.lasting.by_hand_us, spec.count_denied) = (0, false);
        }
        spec
    }

    /// Packs the numbers, for states that contain their quota. A block has no debt and no queue, and its burst is its
    /// limit. Other algorithms have no lengths of blocks.
    pub(crate) fn to_words(self) -> [u64; SPEC_WORDS] {
        let algorithm = Algorithm::ALL.iter().position(|other| *other == self.algorithm).unwrap_or(0) as u64; // below 2^8
        let choices = [
            self.anchor == Anchor::FirstRequest,
            self.oldest == Oldest::Dropped,
            self.oldest == Oldest::Counted,
            self.debt_is_chosen,
            self.count_denied,
            self.proportional,
            self.in_bytes,
            self.unlimited,
        ];
        let choices = choices.iter().enumerate().map(|(at, is_set)| u64::from(*is_set) << at).sum::<u64>();
        let first = u64::from(self.buckets) << 32 | choices << 8 | algorithm;
        let Lasting { length_us, factor, longest_us, memory_us, by_hand_us } = self.lasting;
        match self.algorithm {
            Algorithm::Block => {
                [first, self.limit, self.period_us, length_us, factor, longest_us, memory_us, by_hand_us]
            }
            _ => {
                let calendar = calendar_to_word(self.calendar);
                [
                    first,
                    self.limit,
                    self.period_us,
                    self.burst,
                    self.debt,
                    self.delay_after,
                    self.line_wait_us,
                    calendar,
                ]
            }
        }
    }

    /// Unpacks what [`to_words`](Self::to_words) packed.
    pub(crate) fn from_words(words: [u64; SPEC_WORDS]) -> Option<Self> {
        let [first, limit, period_us, a, b, c, d, e] = words;
        let algorithm = *Algorithm::ALL.get((first & 0xff) as usize)?;
        let chooses = |at: u64| first >> (8 + at) & 1 == 1;
        let oldest = match (chooses(1), chooses(2)) {
            (false, false) => Oldest::Weighted,
            (true, _) => Oldest::Dropped,
            (false, true) => Oldest::Counted,
        };
        let nothing = Lasting { length_us: 0, factor: 1, longest_us: 0, memory_us: 0, by_hand_us: 0 };
        let (burst, debt, delay_after, line_wait_us, calendar, lasting) = match algorithm {
            Algorithm::Block => {
                (limit, 0, 0, 0, None, Lasting { length_us: a, factor: b, longest_us: c, memory_us: d, by_hand_us: e })
            }
            _ => (a, b, c, d, if e == 0 { None } else { Some(calendar_from_word(e)?) }, nothing),
        };
        Some(Self {
            limit,
            period_us,
            burst,
            debt,
            debt_is_chosen: chooses(3),
            algorithm,
            anchor: if chooses(0) { Anchor::FirstRequest } else { Anchor::Epoch },
            calendar,
            delay_after,
            line_wait_us,
            buckets: u32::try_from(first >> 32).ok()?,
            oldest,
            count_denied: chooses(4),
            proportional: chooses(5),
            in_bytes: chooses(6),
            unlimited: chooses(7),
            lasting,
        })
    }

    /// Returns the time in microseconds in which the whole capacity refills, rounded up.
    pub(crate) fn refill_us(&self) -> u64 {
        let refill = match self.algorithm {
            Algorithm::Block => return self.lasting.longest_us.max(self.lasting.by_hand_us).max(self.period_us),
            algorithm if !algorithm.is_bucket() => return self.period_us,
            _ if self.limit == 0 => 0,
            Algorithm::StepBucket => u128::from(self.burst.div_ceil(self.limit)) * u128::from(self.period_us),
            _ => (u128::from(self.burst) * u128::from(self.period_us)).div_ceil(u128::from(self.limit)),
        };
        u64::try_from(refill).unwrap_or(u64::MAX)
    }

    /// Returns the largest burst or debt that refills within the longest possible time.
    pub(super) fn units_max(&self) -> u64 {
        let (limit, period_us) = (u128::from(self.limit), u128::from(self.period_us));
        let most = match self.algorithm {
            algorithm if !algorithm.is_bucket() || limit == 0 => u128::MAX,
            Algorithm::StepBucket => u128::from(DRAIN_US_MAX) / period_us * limit, // whole ticks
            _ => u128::from(DRAIN_US_MAX) * limit / period_us,
        };
        u64::try_from(most).unwrap_or(u64::MAX)
    }
}

/// Packs a calendar into a number that is not 0, or returns 0 without a calendar. The number is valid in this process
/// only.
fn calendar_to_word(calendar: Option<Calendar>) -> u64 {
    let Some(Calendar { unit, first, zone }) = calendar else { return 0 };
    let unit = CalendarUnit::ALL.iter().position(|other| *other == unit).unwrap_or(0) as u64 + 1; // below 2^8
    u64::from(zone.number()) << 16 | u64::from(first) << 8 | unit
}

/// Unpacks what [`calendar_to_word`] packed.
fn calendar_from_word(word: u64) -> Option<Calendar> {
    let [unit, first, ..] = word.to_le_bytes();
    let unit = *CalendarUnit::ALL.get(usize::from(unit).checked_sub(1)?)?;
    Some(Calendar { unit, first, zone: Zone::of_number(u16::try_from(word >> 16).ok()?)? })
}
