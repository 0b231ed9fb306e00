//! Decisions: a limiter's answers to sets of charges.

use std::cmp::Reverse;
use std::fmt;
use std::time::Duration;

use smallvec::SmallVec;

use crate::base::time::micros_ceil;
use crate::base::wait::Wait;

/// How many low bits of a receipt's `part` hold the limiter's number. The higher bits hold notes of
/// limiters.
const PART_BITS: u32 = 56;
const PART: u64 = (1 << PART_BITS) - 1;

/// The value of `position` for a charge about which the limiter was not asked.
const UNASKED: u64 = u64::MAX;

/// The value of `retry_us` for a wait that never ends.
const NEVER: u64 = u64::MAX;

/// The value of `retry_us` for a wait whose length the limiter does not know.
const UNKNOWN: u64 = u64::MAX - 1;

/// The value of `reset_us` for a time that the limiter does not know.
const ABSENT: u64 = u64::MAX;

/// A limiter's answer to a set of charges. Either all charges of the set are taken or none.
///
/// The set is allowed if every enforced charge is allowed; see [`Effect`](crate::limiter::Effect).
pub struct Decision {
    allowed: bool,
    answers: Answers,
}

/// The largest number of charges whose answers need no allocation.
pub(crate) const INLINE: usize = 4;

/// The answers for several charges.
pub(crate) type Several = SmallVec<[ChargeDecision; INLINE]>;

/// The answers for the charges of a set. An answer for one charge has a separate variant, because
/// moving it copies less than moving answers for several charges.
#[expect(clippy::large_enum_variant, reason = "a box would need an allocation, and INLINE avoids allocations")]
enum Answers {
    One(ChargeDecision),
    Several(Several),
}

impl Decision {
    /// Makes the answer for one charge.
    #[inline]
    #[must_use]
    pub fn one(allowed: bool, charge: ChargeDecision) -> Self {
        Self { allowed, answers: Answers::One(charge) }
    }

    /// Makes the answer for several charges, in their order.
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

    /// Makes the answer from a list of charges.
    #[inline]
    pub(crate) fn of(allowed: bool, charges: Several) -> Self {
        Self { allowed, answers: Answers::Several(charges) }
    }

    /// Makes the answer with a function that writes the charges in place, because the charges are
    /// large. `make` returns whether the set is allowed.
    #[inline(always)]
    pub(crate) fn made(make: impl FnOnce(&mut Several) -> bool) -> Self {
        let mut decision = Self::of(false, Several::new());
        if let Answers::Several(charges) = &mut decision.answers {
            decision.allowed = make(charges);
        }
        decision
    }

    /// Returns whether the charges were taken: all of them or none.
    #[must_use]
    pub fn is_allowed(&self) -> bool {
        self.allowed
    }

    /// Returns the answer for each charge, in the order of the charges.
    #[must_use]
    pub fn charges(&self) -> &[ChargeDecision] {
        match &self.answers {
            Answers::One(charge) => std::slice::from_ref(charge),
            Answers::Several(charges) => charges,
        }
    }

    pub(crate) fn charges_mut(&mut self) -> &mut [ChargeDecision] {
        match &mut self.answers {
            Answers::One(charge) => std::slice::from_mut(charge),
            Answers::Several(charges) => charges,
        }
    }

    /// Takes the receipt of each charge out of the decision, in the order of the charges. Each receipt
    /// can be taken out once.
    #[must_use]
    pub fn take_receipts(&mut self) -> Vec<Option<Receipt>> {
        self.charges_mut().iter_mut().map(ChargeDecision::take_receipt).collect()
    }

    /// Takes the answers for the charges out of the decision.
    pub(crate) fn into_charges(self) -> impl Iterator<Item = ChargeDecision> {
        let (one, several) = match self.answers {
            Answers::One(charge) => (Some(charge), Several::new()),
            Answers::Several(charges) => (None, charges),
        };
        one.into_iter().chain(several)
    }

    /// Returns the answer for one charge, whose receipt the caller can take out.
    pub fn charge_mut(&mut self, index: usize) -> Option<&mut ChargeDecision> {
        self.charges_mut().get_mut(index)
    }
}

impl fmt::Debug for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Decision").field("allowed", &self.allowed).field("charges", &self.charges()).finish()
    }
}

/// A limiter's answer for one charge: whether the quota allows the charge, and what remains of the
/// quota.
///
/// `remaining` is rounded down, and every wait is rounded up to a microsecond.
#[derive(Debug, PartialEq, Eq)]
pub struct ChargeDecision {
    limit: u64,
    remaining: u64,
    /// The time until the whole quota is available, in microseconds. `ABSENT` if this time is not
    /// known.
    pub(crate) reset_us: u64,
    /// The wait until the same cost would be admitted, in microseconds. 0 if the charge is allowed,
    /// `UNKNOWN` if the wait is not known, `NEVER` if no wait helps.
    pub(crate) retry_us: u64,
    /// The effective window in microseconds. 0 if the window is not known.
    pub(crate) window_us: u64,
    delay_us: u64,
    position: u64,
    /// The receipt has no units if the charge took nothing.
    receipt: Receipt,
}

impl ChargeDecision {
    /// Makes the answer of a quota that allows the charge. `remaining` units of a capacity of `limit`
    /// are left after the charge.
    #[must_use]
    pub fn allowed(limit: u64, remaining: u64) -> Self {
        Self { retry_us: 0, limit, remaining, ..Self::blank() }
    }

    /// Makes the answer of a quota that denies the charge. `wait` says when the same cost would be
    /// admitted: [`Wait::Never`] if the cost is above the capacity, and [`Wait::Unknown`] if the
    /// limiter cannot know. [`Wait::None`] counts as unknown.
    ///
    /// `remaining` units of a capacity of `limit` are left.
    #[must_use]
    pub fn denied(limit: u64, remaining: u64, wait: Wait) -> Self {
        let (retry_us, window_us) = match wait {
            Wait::None | Wait::Unknown => (UNKNOWN, 0),
            Wait::After(wait) => {
                let wait_us = micros_ceil(wait).clamp(1, UNKNOWN - 1);
                (wait_us, wait_us)
            }
            Wait::Never => (NEVER, 0),
        };
        Self { retry_us, limit, remaining, window_us, ..Self::blank() }
    }

    /// Makes the answer for a charge about which the limiter was not asked, because another charge of
    /// its set is known to be denied. The charge counts as allowed, and only its limit is known.
    #[must_use]
    pub fn unasked(limit: u64) -> Self {
        Self { retry_us: 0, limit, position: UNASKED, ..Self::blank() }
    }

    /// Sets the time until the whole quota is available. If this method is not called, the time is
    /// unknown.
    #[must_use]
    pub fn with_reset_after(mut self, reset_after: Duration) -> Self {
        self.reset_us = micros_ceil(reset_after).min(ABSENT - 1);
        self
    }

    /// Sets the [effective window](Self::effective_window). A window of zero counts as no window. If no
    /// window is set and the charge is denied with a known wait, this wait is the window.
    #[must_use]
    pub fn with_effective_window(mut self, window: Duration) -> Self {
        self.window_us = micros_ceil(window);
        self
    }

    /// Sets how long the request has to wait for its departure, and how many units depart before it.
    #[must_use]
    pub fn with_delay(mut self, delay: Duration, position: u64) -> Self {
        self.delay_us = micros_ceil(delay);
        self.position = position.min(UNASKED - 1);
        self
    }

    /// Adds the receipt of the charge, which the caller can take out.
    #[must_use]
    pub fn with_receipt(self, receipt: Receipt) -> Self {
        Self { receipt, ..self }
    }

    /// Returns whether the charge's own quota allows the charge. A decision may be allowed although an
    /// observed charge in it is denied.
    #[must_use]
    pub fn is_allowed(&self) -> bool {
        self.retry_us == 0
    }

    /// Returns whether the limiter was asked about the charge. If the limiter was not asked, only the
    /// limit is known; see [`unasked`](Self::unasked).
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.position != UNASKED
    }

    /// Returns the capacity: the maximum number of units that can pass at one instant.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Returns the number of units that could still pass now, rounded down.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        self.remaining
    }

    /// Returns the time until the whole quota is available, if nothing else is charged. Returns `None`
    /// if the limiter does not know this time.
    #[must_use]
    pub fn reset_after(&self) -> Option<Duration> {
        self.known_reset_us().map(Duration::from_micros)
    }

    /// Returns [`reset_after`](Self::reset_after) in microseconds.
    #[inline]
    pub(crate) fn known_reset_us(&self) -> Option<u64> {
        (self.reset_us != ABSENT).then_some(self.reset_us)
    }

    /// Returns the wait after which the same cost would be admitted, if nothing else is charged.
    #[must_use]
    pub fn wait(&self) -> Wait {
        match self.retry_us {
            0 => Wait::None,
            UNKNOWN => Wait::Unknown,
            NEVER => Wait::Never,
            wait => Wait::After(Duration::from_micros(wait)),
        }
    }

    /// Returns the rank of a policy among the policies of a request. The policy with the lowest rank binds. If
    /// several policies share the lowest rank, the first of them binds. Policies that refuse have the lowest ranks,
    /// ordered from the longest wait to the shortest. All other policies follow, ordered from the fewest remaining
    /// units to the most.
    pub(crate) fn binding_rank(&self, refuses: bool) -> (bool, Reverse<Wait>, u64) {
        if refuses { (false, Reverse(self.wait()), 0) } else { (true, Reverse(Wait::None), self.remaining) }
    }

    /// Returns the wait of a denied charge in microseconds. Returns `None` if the wait is not known, or
    /// if the charge can never pass.
    pub(crate) fn known_wait_us(&self) -> Option<u64> {
        (self.retry_us < UNKNOWN).then_some(self.retry_us)
    }

    /// Returns the time within which at most [`remaining`](Self::remaining) may be used: the `t` of the
    /// `RateLimit` header since draft 11. The effective window is not the time until the quota is full
    /// again. For example, after one request against a quota of 100 per minute, the effective window is
    /// 59.4 s. For a fixed window, the effective window is the time until the window ends, even if no
    /// units were used in it. Returns `None` if the limiter does not know this time.
    #[must_use]
    pub fn effective_window(&self) -> Option<Duration> {
        (self.window_us != 0).then(|| Duration::from_micros(self.window_us))
    }

    /// Returns how long the admitted request has to wait for its departure from a leaky queue. Zero
    /// for other algorithms.
    #[must_use]
    pub fn delay(&self) -> Duration {
        Duration::from_micros(self.delay_us)
    }

    /// Returns whether the [delay](Self::delay) is not zero, without the division that makes a `Duration`.
    pub(crate) fn has_delay(&self) -> bool {
        self.delay_us > 0
    }

    /// Returns how many units wait ahead of this request in a leaky queue.
    #[must_use]
    pub fn position(&self) -> u64 {
        if self.is_known() { self.position } else { 0 }
    }

    /// Takes the receipt out of the answer. With the receipt, the charge can be refunded once. Returns
    /// `None` if the charge took no units.
    #[inline]
    #[must_use]
    pub fn take_receipt(&mut self) -> Option<Receipt> {
        Some(std::mem::replace(&mut self.receipt, Receipt::NONE)).filter(|receipt| receipt.units > 0)
    }

    /// Returns the number of units that the receipt holds.
    pub(crate) fn taken(&self) -> u64 {
        self.receipt.units
    }

    /// Returns the receipt, which may hold no units.
    #[cfg(any(feature = "_redis", feature = "store"))]
    pub(crate) fn receipt(&self) -> &Receipt {
        &self.receipt
    }

    /// Moves the answer and its receipt out, and leaves an answer without a receipt.
    #[inline]
    pub(crate) fn take(&mut self) -> Self {
        Self { receipt: std::mem::replace(&mut self.receipt, Receipt::NONE), ..*self }
    }

    /// Makes the wait of a denied charge unknown.
    pub(crate) fn forget_wait(&mut self) {
        debug_assert!(self.retry_us > 0, "an allowed charge has no wait");
        (self.retry_us, self.window_us) = (UNKNOWN, 0);
    }

    pub(crate) fn put_receipt(&mut self, receipt: Receipt) {
        self.receipt = receipt;
    }

    /// Makes a placeholder, which denies the charge forever.
    pub(crate) const fn blank() -> Self {
        Self {
            limit: 0,
            remaining: 0,
            reset_us: ABSENT,
            retry_us: NEVER,
            window_us: 0,
            delay_us: 0,
            position: 0,
            receipt: Receipt::NONE,
        }
    }

    /// Makes the answer of an algorithm. Times are in microseconds. `retry_us` is 0 if the charge is
    /// allowed, and `None` if it can never pass.
    #[inline]
    pub(crate) fn found(limit: u64, remaining: u64, reset_us: u64, window_us: u64, retry_us: Option<u64>) -> Self {
        let retry_us = retry_us.unwrap_or(NEVER);
        Self { limit, remaining, reset_us, retry_us, window_us, ..Self::blank() }
    }

    #[inline]
    pub(crate) fn delayed(mut self, delay_us: u64, position: u64) -> Self {
        (self.delay_us, self.position) = (delay_us, position);
        self
    }

    #[inline]
    pub(crate) fn receipted(mut self, units: u64, at_us: u64, part: u64) -> Self {
        self.receipt = Receipt { units, at_us, part };
        self
    }

    /// Copies the answer of a called function word by word. If an answer may come either from a call or from inlined
    /// code, this copy makes the compiler build the answer in registers. Without this copy, the compiler would copy
    /// words that were just written, which stalls on store forwarding.
    #[inline(always)]
    pub(crate) fn in_words(self) -> Self {
        let Self { limit, remaining, reset_us, retry_us, window_us, delay_us, position, receipt } = self;
        let Receipt { units, at_us, part } = receipt;
        let receipt = Receipt { units, at_us, part };
        Self { limit, remaining, reset_us, retry_us, window_us, delay_us, position, receipt }
    }

    /// Removes the receipt, because another charge of the set was denied and nothing was taken.
    #[inline]
    pub(crate) fn untaken(&mut self) {
        self.receipt = Receipt::NONE;
    }

    /// Returns the answer with its times shortened by `passed_us`, the time that has passed since the
    /// decision.
    #[cfg(any(feature = "_redis", feature = "store"))]
    pub(crate) fn later(&self, passed_us: u64) -> Self {
        // Leaves a time unchanged if it is unknown or absent.
        let left = |us: u64, least: u64| if us >= UNKNOWN { us } else { us.saturating_sub(passed_us).max(least) };
        Self {
            reset_us: left(self.reset_us, 0),
            retry_us: left(self.retry_us, u64::from(self.retry_us > 0)),
            window_us: left(self.window_us, u64::from(self.window_us > 0)),
            ..self.clone()
        }
    }

    /// Returns the answer with a wait that never ends.
    #[cfg(any(feature = "_redis", feature = "store"))]
    pub(crate) fn for_good(self) -> Self {
        Self { retry_us: NEVER, ..self }
    }

    /// Returns the answer with `more` remaining units, which this process holds by a lease.
    #[cfg(any(feature = "_redis", feature = "store"))]
    pub(crate) fn with_more_remaining(&self, more: u64) -> Self {
        Self { remaining: self.remaining.saturating_add(more).min(self.limit), ..self.clone() }
    }

    /// Changes the answer as if the charge had taken no units: adds the `taken` units to the remaining
    /// units. Keeps the receipt. The new `remaining` is exact, and no wait is too short.
    #[cfg(any(feature = "_redis", feature = "store"))]
    pub(crate) fn stand(&mut self, taken: u64) {
        self.remaining = self.with_cost_changed(taken, 0).remaining;
    }

    /// Returns the answer for a cost of `actual` instead of `charged`. If the whole quota is available with this cost,
    /// the reset is zero. If a part of the quota stays used, only the limiter knows when the whole quota is available,
    /// and the reset stays unchanged.
    pub(crate) fn with_cost_changed(&self, charged: u64, actual: u64) -> Self {
        let remaining = self.remaining.saturating_add(charged).saturating_sub(actual).min(self.limit);
        let is_whole = remaining == self.limit && self.reset_after().is_some();
        Self { remaining, reset_us: if is_whole { 0 } else { self.reset_us }, ..self.clone() }
    }
}

impl Clone for ChargeDecision {
    /// The clone has no receipt, because a charge can be refunded only once. So the clone is not equal to an answer
    /// that has a receipt.
    fn clone(&self) -> Self {
        Self { receipt: Receipt::NONE, ..*self }
    }
}

/// Records what a charge took, so that the charge can be refunded exactly. A receipt cannot be cloned,
/// so a charge is refunded at most once.
///
/// Each limiter defines what the numbers in its receipts mean. In this crate, a bucket's receipt holds
/// the instant at which the charge's own units have drained. A window's receipt holds the window, and a
/// log's receipt the instant of the charge. A block's receipt holds the window and the blocks before
/// it.
#[derive(Debug, PartialEq, Eq)]
pub struct Receipt {
    units: u64,
    at_us: u64,
    part: u64,
}

impl Receipt {
    const NONE: Self = Self { units: 0, at_us: 0, part: 0 };

    /// Makes a receipt for `units`, with an instant and a number whose meanings the limiter
    /// defines. 56 bits of the number are kept. A
    /// [`FallbackLimiter`](crate::limiter::FallbackLimiter) uses the other bits to note which of
    /// its limiters made the receipt.
    #[must_use]
    pub fn new(units: u64, at_us: u64, part: u64) -> Self {
        Self { units, at_us, part: part & PART }
    }

    /// Returns a receipt for `units`, with this receipt's instant and number. The units may be of other charges with
    /// this instant and number. A limiter refunds at most the units that are in use.
    #[cfg(feature = "rules")]
    pub(crate) fn of_units(self, units: u64) -> Self {
        Self { units, ..self }
    }

    /// Adds a note of one bit. Earlier notes move up by one bit.
    pub(crate) fn noted(self, second: bool) -> Self {
        let notes = (self.part & !PART) << 1 | u64::from(second) << PART_BITS;
        Self { part: self.part & PART | notes, ..self }
    }

    /// Removes the latest note and returns it.
    pub(crate) fn unnoted(self) -> (Self, bool) {
        let notes = self.part >> PART_BITS;
        let part = self.part & PART | notes >> 1 << PART_BITS;
        (Self { part, ..self }, notes & 1 == 1)
    }

    /// Returns the units that were taken.
    #[must_use]
    pub fn units(&self) -> u64 {
        self.units
    }

    /// Returns the instant, in microseconds.
    #[must_use]
    pub fn at_us(&self) -> u64 {
        self.at_us
    }

    /// Returns the number that the limiter stored with the instant.
    #[must_use]
    pub fn part(&self) -> u64 {
        self.part & PART
    }

    /// Returns a receipt for at most `units` of this receipt's units, to refund a part of the charge.
    /// The other units stay charged.
    #[must_use]
    pub fn split(self, units: u64) -> Self {
        Self { units: self.units.min(units), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every request moves a decision.
    #[test]
    fn decision_has_ten_words() {
        assert_eq!(size_of::<ChargeDecision>(), 10 * size_of::<u64>());
    }

    #[test]
    fn denied_charge_has_the_wait_that_its_limiter_gave() {
        let after = |wait| Wait::After(wait);
        for (given, reported) in [
            (Wait::Never, Wait::Never),
            (Wait::Unknown, Wait::Unknown),
            (Wait::None, Wait::Unknown),
            (after(Duration::ZERO), after(Duration::from_micros(1))),
            (after(Duration::from_nanos(1_001)), after(Duration::from_micros(2))),
            (after(Duration::MAX), after(Duration::from_micros(u64::MAX - 2))),
        ] {
            let denied = ChargeDecision::denied(5, 1, given);
            assert_eq!((denied.is_allowed(), denied.wait()), (false, reported), "{given:?}");
            assert_eq!(denied.effective_window(), reported.duration(), "{given:?}");
        }
        assert_eq!(ChargeDecision::allowed(5, 1).wait(), Wait::None);
    }

    #[test]
    fn whole_quota_is_available_once_all_is_refunded() {
        let taken = ChargeDecision::found(5, 2, 7_000_000, 10_000_000, Some(0));
        for (actual, remaining, reset) in [(0, 5, 0), (1, 4, 7), (3, 2, 7), (9, 0, 7)] {
            let changed = taken.with_cost_changed(3, actual);
            assert_eq!(changed.remaining(), remaining);
            assert_eq!(changed.reset_after(), Some(Duration::from_secs(reset)), "{actual}");
        }
        assert_eq!(ChargeDecision::allowed(5, 2).with_cost_changed(3, 0).reset_after(), None);
    }

    #[test]
    fn times_that_a_limiter_does_not_set_are_absent() {
        let bare = ChargeDecision::allowed(5, 1);
        assert_eq!((bare.reset_after(), bare.effective_window()), (None, None));
        let longest = bare.with_reset_after(Duration::MAX).with_effective_window(Duration::from_secs(2));
        assert!(longest.reset_after().is_some(), "a time that is too long is not absent");
        assert_eq!(longest.effective_window(), Some(Duration::from_secs(2)));
    }

    #[cfg(any(feature = "_redis", feature = "store"))]
    #[test]
    fn unknown_and_absent_times_do_not_pass() {
        for wait in [Wait::Unknown, Wait::Never] {
            let later = ChargeDecision::denied(5, 1, wait).later(1_000);
            assert_eq!((later.wait(), later.reset_after(), later.effective_window()), (wait, None, None));
        }
        let later = ChargeDecision::denied(5, 1, Wait::After(Duration::from_micros(5))).later(3);
        assert_eq!(later.wait(), Wait::After(Duration::from_micros(2)));
    }
}
