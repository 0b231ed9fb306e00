//! A limiter's answer.

use std::fmt;
use std::time::Duration;

use smallvec::SmallVec;

/// Bits of a receipt's number; those above are notes.
const PART_BITS: u32 = 56;
const PART: u64 = (1 << PART_BITS) - 1;

/// In place of a position, of a charge that was not asked about.
const UNASKED: u64 = u64::MAX;

/// In place of a wait that never ends.
const NEVER: u64 = u64::MAX;

/// A limiter's answer to a set of charges: all are taken or none is.
///
/// The set is allowed when every enforced charge is; see [`Effect`](crate::Effect).
pub struct Decision {
    allowed: bool,
    answers: Answers,
}

/// The answers for so many charges need no memory of their own.
pub(crate) const INLINE: usize = 4;

/// The answers for several charges.
pub(crate) type Several = SmallVec<[ChargeDecision; INLINE]>;

/// The answer for one charge is apart from the others, so that it is not moved as if there were several.
#[expect(clippy::large_enum_variant, reason = "boxes are what the room for several is there to avoid")]
enum Answers {
    One(ChargeDecision),
    Several(Several),
}

impl Decision {
    /// The answer for one charge.
    #[inline]
    #[must_use]
    pub fn one(allowed: bool, charge: ChargeDecision) -> Self {
        Self { allowed, answers: Answers::One(charge) }
    }

    /// The answer for several charges, in their order.
    #[must_use]
    pub fn new(allowed: bool, charges: impl IntoIterator<Item = ChargeDecision>) -> Self {
        let mut charges: Several = charges.into_iter().collect();
        match charges.pop() {
            Some(charge) if charges.is_empty() => Self::one(allowed, charge),
            last => {
                charges.extend(last);
                Self::of(allowed, charges)
            }
        }
    }

    /// The answer for several charges that are in their place already.
    #[inline]
    pub(crate) fn of(allowed: bool, charges: Several) -> Self {
        Self { allowed, answers: Answers::Several(charges) }
    }

    /// The answers for several charges, written where they stay: they are large. It is told whether the set is allowed.
    #[inline(always)]
    pub(crate) fn made(make: impl FnOnce(&mut Several) -> bool) -> Self {
        let mut decision = Self::of(false, Several::new());
        if let Answers::Several(charges) = &mut decision.answers {
            decision.allowed = make(charges);
        }
        decision
    }

    /// Moves it out, and leaves one without charges.
    pub(crate) fn take(&mut self) -> Self {
        std::mem::replace(self, Self::of(self.allowed, Several::new()))
    }

    /// Whether the charge was taken, and the answer for it, if there is one charge and it was told as such.
    #[inline]
    #[expect(clippy::result_large_err, reason = "it is this value itself, and no error")]
    pub(crate) fn into_one(self) -> Result<(bool, ChargeDecision), Self> {
        match self.answers {
            Answers::One(charge) => Ok((self.allowed, charge)),
            answers => Err(Self { answers, ..self }),
        }
    }

    /// Whether the charges were taken: all of them, or none.
    #[must_use]
    pub fn is_allowed(&self) -> bool {
        self.allowed
    }

    /// The answer for each charge, in the order in which they were given.
    #[must_use]
    pub fn charges(&self) -> &[ChargeDecision] {
        match &self.answers {
            Answers::One(charge) => std::slice::from_ref(charge),
            Answers::Several(charges) => charges,
        }
    }

    fn charges_mut(&mut self) -> &mut [ChargeDecision] {
        match &mut self.answers {
            Answers::One(charge) => std::slice::from_mut(charge),
            Answers::Several(charges) => charges,
        }
    }

    /// The receipt of each charge that was taken, in their order. Each can be had once.
    #[must_use]
    pub fn take_receipts(&mut self) -> SmallVec<[Option<Receipt>; 2]> {
        self.charges_mut().iter_mut().map(ChargeDecision::take_receipt).collect()
    }

    /// The answers, taken out.
    #[cfg(feature = "redis")]
    pub(crate) fn into_charges(self) -> impl Iterator<Item = ChargeDecision> {
        let (one, several) = match self.answers {
            Answers::One(charge) => (Some(charge), Several::new()),
            Answers::Several(charges) => (None, charges),
        };
        one.into_iter().chain(several)
    }

    /// Mutable access to the answer for one charge, for taking its receipt.
    pub fn charge_mut(&mut self, index: usize) -> Option<&mut ChargeDecision> {
        self.charges_mut().get_mut(index)
    }
}

impl fmt::Debug for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Decision").field("allowed", &self.allowed).field("charges", &self.charges()).finish()
    }
}

/// A limiter's answer for one charge: what its quota allows, and what is left of it.
///
/// `remaining` is rounded down, every wait is rounded up to a microsecond.
#[derive(Debug, PartialEq, Eq)]
pub struct ChargeDecision {
    limit: u64,
    remaining: u64,
    reset_us: u64,
    /// 0 if allowed, `NEVER` if no wait helps.
    retry_us: u64,
    window_us: u64,
    delay_us: u64,
    position: u64,
    receipt: RawReceipt,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct RawReceipt {
    units: u64,
    at_us: u64,
    part: u64,
}

impl ChargeDecision {
    /// A charge that its quota allows: of a capacity of `limit`, `remaining` could still pass after it.
    #[must_use]
    pub fn allowed(limit: u64, remaining: u64) -> Self {
        Self { retry_us: 0, limit, remaining, ..Self::blank() }
    }

    /// A charge that its quota denies, until `retry_after` has passed; `None` if no wait helps.
    #[must_use]
    pub fn denied(limit: u64, remaining: u64, retry_after: Option<Duration>) -> Self {
        let retry_us = retry_after.map_or(NEVER, |wait| crate::time::micros_ceil(wait).clamp(1, NEVER - 1));
        Self { retry_us, limit, remaining, window_us: if retry_us == NEVER { 0 } else { retry_us }, ..Self::blank() }
    }

    /// A charge that was not asked about, since another of its set is known to be denied: it is not in the way, and
    /// nothing else is known of it.
    #[must_use]
    pub fn unasked(limit: u64) -> Self {
        Self { retry_us: 0, limit, position: UNASKED, ..Self::blank() }
    }

    /// Sets the time until the whole quota is back.
    #[must_use]
    pub fn with_reset_after(mut self, reset_after: Duration) -> Self {
        self.reset_us = crate::time::micros_ceil(reset_after);
        self
    }

    /// Sets the [effective window](Self::effective_window).
    #[must_use]
    pub fn with_effective_window(mut self, window: Duration) -> Self {
        self.window_us = crate::time::micros_ceil(window);
        self
    }

    /// Sets how long the request is to wait for its departure, and behind how many.
    #[must_use]
    pub fn with_delay(mut self, delay: Duration, position: u64) -> Self {
        self.delay_us = crate::time::micros_ceil(delay);
        self.position = position.min(UNASKED - 1);
        self
    }

    /// Puts the receipt in, for the one who asked to take out.
    #[must_use]
    pub fn with_receipt(mut self, receipt: &Receipt) -> Self {
        self.receipt = receipt.0;
        self
    }

    /// Whether this charge's own quota allows it. One that is only observed may be denied in a decision that is allowed.
    #[must_use]
    pub fn is_allowed(&self) -> bool {
        self.retry_us == 0
    }

    /// Whether the quota was asked at all: see [`unasked`](Self::unasked). If it was not, only the limit is known.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.position != UNASKED
    }

    /// The capacity: the most units that can pass at one instant.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Units that could still pass now, rounded down.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        self.remaining
    }

    /// The time until the whole quota is back, if nothing else comes.
    #[must_use]
    pub fn reset_after(&self) -> Duration {
        Duration::from_micros(self.reset_us)
    }

    /// If denied, the time after which the same cost would be admitted, if nobody else came. Nothing if it was allowed,
    /// and nothing if no wait helps; [`is_never`](Self::is_never) tells these apart.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self.retry_us {
            0 | NEVER => None,
            wait => Some(Duration::from_micros(wait)),
        }
    }

    /// Denied, and no wait helps: the cost is above the capacity.
    #[must_use]
    pub fn is_never(&self) -> bool {
        self.retry_us == NEVER
    }

    /// Within this time no more than [`remaining`](Self::remaining) may be used: the `t` of the `RateLimit` header since
    /// draft 11. Not the time until the quota is back: after one of 100 per minute it is 59.4 s.
    #[must_use]
    pub fn effective_window(&self) -> Duration {
        Duration::from_micros(self.window_us)
    }

    /// How long the admitted request is to wait for its departure from a leaky queue; zero for every other algorithm.
    #[must_use]
    pub fn delay(&self) -> Duration {
        Duration::from_micros(self.delay_us)
    }

    /// How many units wait ahead of this request in a leaky queue.
    #[must_use]
    pub fn position(&self) -> u64 {
        if self.is_known() { self.position } else { 0 }
    }

    /// Takes the receipt out: enough to give back what this charge took, once. Nothing if it took nothing.
    #[inline]
    #[must_use]
    pub fn take_receipt(&mut self) -> Option<Receipt> {
        let receipt = std::mem::take(&mut self.receipt);
        (receipt.units > 0).then_some(Receipt(receipt))
    }

    pub(crate) fn put_receipt(&mut self, receipt: &Receipt) {
        self.receipt = receipt.0;
    }

    /// In the place of a decision: denies for good.
    pub(crate) const fn blank() -> Self {
        Self {
            limit: 0,
            remaining: 0,
            reset_us: 0,
            retry_us: NEVER,
            window_us: 0,
            delay_us: 0,
            position: 0,
            receipt: RawReceipt { units: 0, at_us: 0, part: 0 },
        }
    }

    /// What an algorithm found, all in microseconds; `retry_us` is 0 if allowed and `None` if no wait helps.
    #[inline]
    pub(crate) fn found(limit: u64, remaining: u64, reset_us: u64, window_us: u64, retry_us: Option<u64>) -> Self {
        let retry_us = retry_us.unwrap_or(NEVER);
        Self { limit, remaining, reset_us, retry_us, window_us, ..Self::blank() }
    }

    #[inline]
    pub(crate) fn set_delay(&mut self, delay_us: u64, position: u64) {
        (self.delay_us, self.position) = (delay_us, position);
    }

    #[inline]
    pub(crate) fn receipted(mut self, units: u64, at_us: u64, part: u64) -> Self {
        self.receipt = RawReceipt { units, at_us, part };
        self
    }

    /// Nothing was taken after all: another charge of the set was denied.
    #[inline]
    pub(crate) fn untaken(&mut self) {
        self.receipt = RawReceipt::default();
    }

    /// The same, told so much later.
    #[cfg(feature = "redis")]
    pub(crate) fn later(&self, passed_us: u64) -> Self {
        let left = |us: u64, least: u64| if us == NEVER { NEVER } else { us.saturating_sub(passed_us).max(least) };
        Self {
            reset_us: left(self.reset_us, 0),
            retry_us: left(self.retry_us, u64::from(self.retry_us > 0)),
            window_us: left(self.window_us, u64::from(self.window_us > 0)),
            ..self.clone()
        }
    }

    /// The same, with more left: what a process holds of it.
    #[cfg(feature = "redis")]
    pub(crate) fn with_more_remaining(&self, more: u64) -> Self {
        Self { remaining: self.remaining.saturating_add(more).min(self.limit), ..self.clone() }
    }

    /// How it stands without so many units that are or would be taken, whose receipt stays here: what is left exactly, and no
    /// wait shorter than it is.
    #[cfg(feature = "redis")]
    pub(crate) fn stand(&mut self, taken: u64) {
        *self = Self { receipt: self.receipt, ..self.with_cost_changed(taken, 0) };
    }

    /// The same, where the cost was `actual` instead of `charged`.
    pub(crate) fn with_cost_changed(&self, charged: u64, actual: u64) -> Self {
        let remaining = self.remaining.saturating_add(charged).saturating_sub(actual).min(self.limit);
        Self { remaining, ..self.clone() }
    }

    pub(crate) fn retry_us(&self) -> u64 {
        self.retry_us
    }

    pub(crate) fn reset_us(&self) -> u64 {
        self.reset_us
    }

    pub(crate) fn window_us(&self) -> u64 {
        self.window_us
    }
}

impl Clone for ChargeDecision {
    /// The clone carries no receipt: what was taken can be given back once.
    fn clone(&self) -> Self {
        Self { receipt: RawReceipt::default(), ..*self }
    }
}

/// What a charge took, in the store's time: enough to give it back exactly, and once, since it cannot be cloned.
///
/// Its meaning is the limiter's own: a bucket's receipt holds the instant at which the charge's own units have drained,
/// a window's the window, a log's the instant.
#[derive(Debug, PartialEq, Eq)]
pub struct Receipt(RawReceipt);

impl Receipt {
    /// Of nothing.
    pub(crate) const NOTHING: Self = Self(RawReceipt { units: 0, at_us: 0, part: 0 });

    /// A receipt for `units`, with an instant and a number whose meaning is the limiter's own. Of the number 56 bits are
    /// kept: in the upper ones a [`FallbackLimiter`](crate::FallbackLimiter) notes which of its limiters it came from.
    #[must_use]
    pub fn new(units: u64, at_us: u64, part: u64) -> Self {
        Self(RawReceipt { units, at_us, part: part & PART })
    }

    /// Notes one of two, above what was noted before.
    pub(crate) fn noted(self, second: bool) -> Self {
        let notes = (self.0.part & !PART) << 1 | u64::from(second) << PART_BITS;
        Self(RawReceipt { part: self.0.part & PART | notes, ..self.0 })
    }

    /// Takes the latest note off.
    pub(crate) fn unnoted(self) -> (Self, bool) {
        let notes = self.0.part >> PART_BITS;
        let part = self.0.part & PART | notes >> 1 << PART_BITS;
        (Self(RawReceipt { part, ..self.0 }), notes & 1 == 1)
    }

    /// How many units were taken.
    #[must_use]
    pub fn units(&self) -> u64 {
        self.0.units
    }

    /// The instant, in microseconds.
    #[must_use]
    pub fn at_us(&self) -> u64 {
        self.0.at_us
    }

    /// The number that goes with the instant.
    #[must_use]
    pub fn part(&self) -> u64 {
        self.0.part & PART
    }

    /// The same receipt for fewer units, for giving back a part; the rest is kept.
    #[must_use]
    pub fn split(self, units: u64) -> Self {
        Self(RawReceipt { units: self.0.units.min(units), ..self.0 })
    }
}
