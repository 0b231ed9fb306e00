//! Block: counts a key's strikes, and closes the key for a time when the strikes reach the limit.
//!
//! # 1 Definition and laws
//!
//! Units taken are strikes. A key's strikes are counted in a window of one period that begins with the first strike.
//! The strike that reaches `limit` closes the key for the block's length. Then the count begins again. If a
//! block begins while earlier blocks are remembered, the new block's length is multiplied by the factor once
//! for each remembered block, up to the longest length. The key is free again at exactly `begin + length`.
//!
//! A block admits exactly `limit` units at once for a key at rest, and none for a closed key. In any interval a
//! block admits at most `limit · (2 + n)` units, where `n` is the interval divided by the shorter of period and
//! block length, rounded down. A request that a block denies changes nothing. If the quota counts denied requests, a
//! denied request begins the block again, with the length that a new block would have now. A forced charge takes the
//! remaining units, even if these are fewer than its cost. The decision on a forced charge says whether the key is
//! closed after the charge.
//!
//! A window begins only with its first strike, so the strikes of two windows, at most `limit − 1` each, can lie
//! within one period. A key may therefore stay open after up to `2·limit − 2` strikes within one period.
//!
//! # 2 Parameters
//!
//! The parameters are the limit of strikes (at most [`STRIKES_MAX`]), their period, a block's length, the factor, the
//! longest length, and the time for which a block is remembered after its end (0 if blocks do not grow). The block
//! with which an operator closes a key by hand has one more parameter: for how long the key is closed.
//!
//! # 3 State
//!
//! A [`Pair`]: the instant at which the state is forgotten, and a number with four parts (see [`pack`]). The
//! parts are the number of remembered blocks, a flag, the number of strikes, and a span.
//!
//! * Fewer strikes than the limit: the key is open, and these strikes count. The span is the time between the end
//!   of the window and the instant at which the blocks are forgotten. The flag is set if the blocks are forgotten
//!   after the window's end.
//! * At least as many strikes as the limit: these strikes closed the key. The state's instant is the block's
//!   end plus the time for which a block is remembered. The span is the time between the end of the block and
//!   the end of the window in which the strikes counted. The flag is set if the window ends after the block.
//!   The length of the block follows from the number of remembered blocks, because the quota itself began the
//!   block.
//! * No strikes: the key is closed, and only time or a reset opens it. The state's span is the length of the
//!   block. A key has this state if an operator closed it by hand for a time, if the conversion of another
//!   quota's state closed it, or if it was closed by more strikes than a state can count.
//!
//! If the clock steps back, a closed key waits longer by at most the length of its block.
//!
//! # 4 Refunds
//!
//! A receipt holds the end of the window in which its strikes counted, and the blocks that were remembered before
//! these strikes. A refund subtracts the receipt's strikes while their window lasts. After the window, a refund
//! subtracts the strikes only while the key is closed by a block that this window's strikes began. If fewer
//! strikes than the limit remain, the refund removes the block and opens the key. The remaining strikes count
//! until the end of their window. The blocks before the removed block are remembered as they were.
//!
//! So a refund removes only what its own strikes caused. A closed key can get further strikes: from operators, or
//! from denied requests if the quota counts these. While the window lasts, a further strike counts like the
//! strikes that closed the key. After the window, a further strike makes the block final: no refund removes it. A
//! block that has ended stays remembered.

use crate::base::time::PERIOD_US_MAX;
use crate::decision::ChargeDecision;
use crate::quota::spec::{Lasting, Spec};

use super::state::{Layout, Next, Pair, PairAlgorithm, TakeMode, Transition};
#[cfg(feature = "_redis")]
use super::state::{LuaNumbers, numbers};
use super::used::{Carried, Dated, Used};

/// The maximum number of strikes.
pub(crate) const STRIKES_MAX: u64 = (1 << STRIKE_BITS) - 1;

pub(crate) const SPAN_BITS: u32 = 45;
const STRIKE_BITS: u32 = 12;
/// The maximum number of blocks that a state counts as remembered. All further blocks are as long as the last block
/// that is counted.
const LEVEL_MAX: u64 = 63;
const _: () = assert!(PERIOD_US_MAX < 1 << SPAN_BITS && SPAN_BITS + STRIKE_BITS + 1 + 6 == u64::BITS);
const _: () = assert!(SPAN_BITS + 1 + 6 <= 53, "an `f64` represents a receipt's number exactly");
const _: () = assert!(1 << (LEVEL_MAX - 1) > PERIOD_US_MAX, "the blocks of the last two levels are equally long");

/// The parts of a state's number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockParts {
    pub(crate) span_us: u64,
    /// The strikes, the flag and the number of remembered blocks, in a number below 2^19.
    pub(crate) counts: u64,
}

/// Packs the parts of a state's number.
pub(crate) fn pack(parts: BlockParts) -> u64 {
    parts.counts << SPAN_BITS | parts.span_us
}

/// Unpacks the parts of a state's number.
pub(crate) fn unpack(n: u64) -> BlockParts {
    BlockParts { span_us: n & ((1 << SPAN_BITS) - 1), counts: n >> SPAN_BITS }
}

/// Decides by a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    limit: u64,
    period_us: u64,
    lasting: Lasting,
    count_denied: bool,
}

/// A state as it is now.
#[derive(Clone, Copy, Debug)]
struct BlockView {
    phase: BlockPhase,
    /// The number of remembered blocks.
    level: u64,
    /// The instant at which the remembered blocks are forgotten. This instant has no meaning while the
    /// key is closed.
    forget: u64,
    /// Whether instants of the state were moved back because the clock stepped back.
    moved: bool,
}

#[derive(Clone, Copy, Debug)]
enum BlockPhase {
    /// `by` has the strikes that closed the key. `None` if no refund opens the key.
    Closed {
        until: u64,
        length_us: u64,
        by: Option<CountedStrikes>,
    },
    Counting(CountedStrikes),
    Quiet,
}

/// The strikes in the window that ends at `end`.
#[derive(Clone, Copy, Debug)]
struct CountedStrikes {
    end: u64,
    count: u64,
}

impl Block {
    pub(crate) fn new(spec: &Spec) -> Self {
        let Spec { limit, period_us, lasting, count_denied, .. } = *spec;
        Self { limit, period_us, lasting, count_denied }
    }

    pub(crate) fn layout(&self) -> Layout {
        Layout::Pair
    }

    /// Converts the state of another block's quota into a state of this quota. Also returns whether the
    /// conversion moved an instant or closed the key. A closed key stays closed until the instant at which the
    /// other block ends.
    pub(super) fn adopt(&self, other: &Self, state: Pair, now: u64) -> (Option<Pair>, bool) {
        let mut view = other.view(Some(state), now);
        let mut moved = view.moved;
        let is_closed = matches!(view.phase, BlockPhase::Closed { .. }); // then the memory is still to begin
        if view.level > 0 && !is_closed && view.forget > now + self.lasting.memory_us {
            (view.forget, moved) = (now + self.lasting.memory_us, true);
        }
        if self.lasting.memory_us == 0 {
            view.level = 0;
        }
        if let BlockPhase::Counting(CountedStrikes { end, count }) = view.phase {
            moved |= end > now + self.period_us || count >= self.limit;
            view = self.struck(view, now, CountedStrikes { end: end.min(now + self.period_us), count });
        }
        (self.stored(view.kept_closed(), now), moved)
    }

    // Phases ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    fn view(&self, state: Option<Pair>, now: u64) -> BlockView {
        let quiet = BlockView { phase: BlockPhase::Quiet, level: 0, forget: 0, moved: false };
        let Some(state) = state.filter(|state| state.at > now) else { return quiet };
        let BlockParts { span_us, counts } = unpack(state.n);
        let (count, level) = (counts & STRIKES_MAX, counts >> (STRIKE_BITS + 1));
        let is_later = counts >> STRIKE_BITS & 1 == 1;
        if count == 0 || count >= self.limit {
            let end = state.at.saturating_sub(self.lasting.memory_us);
            let (length_us, by) = match count {
                0 => (span_us, None),
                _ => {
                    let end = if is_later { end + span_us } else { end.saturating_sub(span_us) };
                    (self.grown_us(level.saturating_sub(1)), Some(CountedStrikes { end, count }))
                }
            };
            let moved = end > now + length_us;
            let until = if moved { now + length_us } else { end };
            let phase = if until > now { BlockPhase::Closed { until, length_us, by } } else { BlockPhase::Quiet };
            return BlockView { phase, level, forget: until + self.lasting.memory_us, moved };
        }
        let other = state.at.saturating_sub(span_us);
        let (end, forget) = match (level, is_later) {
            (0, _) => (state.at, 0),
            (_, true) => (other, state.at),
            (_, false) => (state.at, other),
        };
        let (latest_end, latest_forget) = (now + self.period_us, now + self.lasting.memory_us);
        let moved = end > latest_end || forget > latest_forget;
        let (end, forget) = (end.min(latest_end), forget.min(latest_forget));
        let level = if forget > now { level } else { 0 };
        BlockView { phase: CountedStrikes { end, count }.phase(now), level, forget, moved }
    }

    /// Returns the view after `strikes` were counted: the key is closed if the strikes reach the limit.
    fn struck(&self, view: BlockView, now: u64, strikes: CountedStrikes) -> BlockView {
        if strikes.count < self.limit {
            return BlockView { phase: BlockPhase::Counting(strikes), ..view };
        }
        let level = if view.forget > now { view.level } else { 0 };
        let length_us = self.grown_us(level);
        let level = if self.lasting.memory_us > 0 { (level + 1).min(LEVEL_MAX) } else { 0 };
        BlockView { phase: BlockPhase::Closed { until: now + length_us, length_us, by: Some(strikes) }, level, ..view }
    }

    /// Returns the view. If an operator closes the key by hand, the block gets the length that the operator chose.
    fn closed_by_hand(&self, view: BlockView, now: u64) -> BlockView {
        match (view.phase, self.lasting.by_hand_us) {
            (BlockPhase::Closed { .. }, length_us) if length_us > 0 => {
                BlockView { phase: BlockPhase::Closed { until: now + length_us, length_us, by: None }, ..view }
            }
            _ => view,
        }
    }

    /// Returns the strikes plus `cost`. A `cost` above the limit counts as one more than the limit,
    /// because the limit already closes the key.
    fn more(&self, strikes: CountedStrikes, cost: u64) -> CountedStrikes {
        CountedStrikes { count: strikes.count + cost.min(self.limit + 1), ..strikes }
    }

    /// Returns the length of a block when `level` blocks are remembered.
    fn grown_us(&self, level: u64) -> u64 {
        let mut length_us = self.lasting.length_us;
        for _ in 0..level {
            length_us = (length_us * self.lasting.factor).min(self.lasting.longest_us); // below 2^45 · 1,000
            if self.lasting.factor == 1 || length_us == self.lasting.longest_us {
                break;
            }
        }
        length_us
    }

    fn store(&self, view: BlockView, now: u64) -> Next {
        self.stored(view, now).map_or(Next::Clear, Next::Set)
    }

    fn stored(&self, view: BlockView, now: u64) -> Option<Pair> {
        let remembered = view.level > 0 && view.forget > now;
        let (level, forget) = if remembered { (view.level, view.forget) } else { (0, 0) };
        let pair = |at, level: u64, later: bool, strikes, span_us| Pair {
            at,
            n: pack(BlockParts {
                span_us,
                counts: level << (STRIKE_BITS + 1) | u64::from(later) << STRIKE_BITS | strikes,
            }),
        };
        match view.phase {
            BlockPhase::Closed { until, length_us, by } => {
                let at = until + self.lasting.memory_us;
                let fits = |by: &CountedStrikes| by.count <= STRIKES_MAX && by.end.abs_diff(until) <= PERIOD_US_MAX;
                Some(match by.filter(fits) {
                    Some(by) => pair(at, view.level, by.end > until, by.count, by.end.abs_diff(until)),
                    None => pair(at, view.level, false, 0, length_us),
                })
            }
            BlockPhase::Counting(CountedStrikes { end, count }) if level == 0 => Some(pair(end, 0, false, count, 0)),
            BlockPhase::Counting(CountedStrikes { end, count }) if forget > end => {
                Some(pair(forget, level, true, count, forget - end))
            }
            BlockPhase::Counting(CountedStrikes { end, count }) => Some(pair(end, level, false, count, end - forget)),
            BlockPhase::Quiet if remembered => Some(pair(forget, level, false, 0, 0)),
            BlockPhase::Quiet => None,
        }
    }

    fn taken(&self, view: BlockView) -> u64 {
        match view.phase {
            BlockPhase::Closed { .. } => self.limit,
            BlockPhase::Counting(strikes) => strikes.count,
            BlockPhase::Quiet => 0,
        }
    }

    /// Returns the number of a receipt for strikes in the window that ends at `end`. The number says which
    /// blocks were remembered before these strikes.
    fn past(view: BlockView, now: u64, end: u64) -> u64 {
        if view.level == 0 || view.forget <= now {
            return 0;
        }
        let counts = view.level << 1 | u64::from(view.forget > end);
        pack(BlockParts { span_us: view.forget.abs_diff(end), counts })
    }

    /// Returns the view without the block that the strikes of the receipt `own` helped to begin. `left` has the
    /// strikes that remain.
    fn reopened(&self, now: u64, left: CountedStrikes, own: Pair) -> BlockView {
        let BlockParts { span_us, counts } = unpack(own.n);
        let forget = if counts & 1 == 1 { own.at + span_us } else { own.at.saturating_sub(span_us) };
        let left = CountedStrikes { end: left.end.min(now + self.period_us), ..left };
        let forget = forget.min(now + self.lasting.memory_us);
        BlockView { phase: left.phase(now), level: counts >> 1, forget, moved: false }
    }

    fn describe(&self, view: BlockView, now: u64, retry_us: Option<u64>) -> ChargeDecision {
        let left_us = match view.phase {
            BlockPhase::Closed { until: end, .. } | BlockPhase::Counting(CountedStrikes { end, .. }) => end - now,
            BlockPhase::Quiet => 0,
        };
        let window_us = match (retry_us, view.phase) {
            (Some(wait), _) if wait > 0 => wait,
            (_, BlockPhase::Quiet) => self.period_us,
            _ => left_us,
        };
        ChargeDecision::found(self.limit, self.limit - self.taken(view), left_us, window_us, retry_us)
    }
}

impl CountedStrikes {
    fn phase(self, now: u64) -> BlockPhase {
        if self.end > now && self.count > 0 { BlockPhase::Counting(self) } else { BlockPhase::Quiet }
    }
}

impl BlockView {
    /// Returns the view with a block that no refund opens.
    fn kept_closed(mut self) -> Self {
        if let BlockPhase::Closed { by, .. } = &mut self.phase {
            *by = None;
        }
        self
    }
}

impl PairAlgorithm for Block {
    #[inline(never)]
    fn decide(&self, state: Option<Pair>, now: u64, cost: u64, force: bool) -> Transition {
        let view = self.view(state, now);
        let kept = if view.moved && cost > 0 { self.store(view, now) } else { Next::Keep };
        let fits_never = cost > self.limit && !force;
        let strikes = match view.phase {
            BlockPhase::Closed { until, length_us, by } => {
                let is_renewed = self.count_denied && cost > 0;
                let anew_us = match self.lasting.by_hand_us {
                    _ if !is_renewed => 0,
                    0 => self.grown_us(view.level.saturating_sub(1)),
                    by_hand_us => by_hand_us,
                };
                let longer = now + anew_us > until;
                let (until, length_us) = if longer { (now + anew_us, anew_us) } else { (until, length_us) };
                // A forced strike on a closed key counts: an operator who blocks a closed key wants the key to stay
                // closed, even if the strikes that closed it are refunded later.
                let counts = is_renewed || force && cost > 0 && by.is_some();
                let by = by.filter(|by| by.end > now && self.lasting.by_hand_us == 0);
                let by = by.map(|by| self.more(by, cost)); // written only if it counts
                let seen = BlockView { phase: BlockPhase::Closed { until, length_us, by }, ..view };
                let retry_us = (!fits_never).then_some(until - now);
                let next = if counts { self.store(seen, now) } else { kept };
                return Transition { decision: self.describe(seen, now, retry_us), next };
            }
            BlockPhase::Counting(strikes) => strikes,
            BlockPhase::Quiet => CountedStrikes { end: now + self.period_us, count: 0 },
        };
        if cost == 0 {
            return Transition { decision: self.describe(view, now, Some(0)), next: kept };
        }
        let room = self.limit - strikes.count;
        let denied = cost > room && !force;
        if denied && !self.count_denied {
            let retry_us = (!fits_never).then_some(strikes.end - now);
            return Transition { decision: self.describe(view, now, retry_us), next: kept };
        }
        let units = cost.min(room);
        let after = self.closed_by_hand(self.struck(view, now, self.more(strikes, cost)), now);
        let closed_us = match after.phase {
            BlockPhase::Closed { until, .. } if denied || force => until - now,
            _ => 0,
        };
        let decision = self.describe(after, now, (!fits_never).then_some(closed_us));
        let decision =
            if denied { decision } else { decision.receipted(units, strikes.end, Self::past(view, now, strikes.end)) };
        Transition { decision, next: self.store(after, now) }
    }

    /// Counts a charge on refusal as a strike in two cases: the key is open and one of the charges to which it
    /// belongs was refused, or the key is closed and the quota counts denied requests. In all other cases, the
    /// charge takes nothing.
    fn decide_how(&self, state: Option<Pair>, now: u64, cost: u64, how: TakeMode) -> Transition {
        let TakeMode::OnRefusal { refused } = how else {
            let (cost, force) = how.plainly(cost);
            return self.decide(state, now, cost, force);
        };
        let closed = matches!(self.view(state, now).phase, BlockPhase::Closed { .. });
        let counts = if closed { self.count_denied } else { refused };
        self.decide(state, now, if counts { cost } else { 0 }, counts)
    }

    /// Refunds strikes of the window that ends at `own.at`, while this window lasts, or while the key is closed by
    /// a block that strikes of this window began.
    fn refund(&self, state: Pair, now: u64, units: u64, own: Pair) -> Next {
        let view = self.view(Some(state), now);
        let (BlockPhase::Counting(strikes) | BlockPhase::Closed { by: Some(strikes), .. }) = view.phase else {
            return Next::Keep;
        };
        if strikes.end != own.at || units == 0 {
            return Next::Keep;
        }
        let left = CountedStrikes { count: strikes.count.saturating_sub(units), ..strikes };
        let after = match view.phase {
            BlockPhase::Closed { until, length_us, .. } if left.count >= self.limit => {
                BlockView { phase: BlockPhase::Closed { until, length_us, by: Some(left) }, ..view }
            }
            BlockPhase::Closed { .. } => self.reopened(now, left, own),
            _ => BlockView { phase: left.phase(now), ..view },
        };
        self.store(after, now)
    }

    #[cfg(feature = "_redis")]
    fn numbers(&self, cost: u64, force: bool) -> LuaNumbers {
        let count_denied = u64::from(self.count_denied);
        numbers(&[
            cost.min(self.limit + 1),
            u64::from(force),
            self.limit,
            self.period_us,
            self.lasting.length_us,
            self.lasting.factor,
            self.lasting.longest_us,
            self.lasting.memory_us,
            count_denied,
            self.lasting.by_hand_us,
        ])
    }

    fn carried(&self, state: Pair, now: u64, _sliced: bool) -> Carried {
        let view = self.view(Some(state), now);
        let units = self.taken(view);
        let dated = match view.phase {
            BlockPhase::Closed { until, .. } => Some(Dated::new(None, until, units)),
            BlockPhase::Counting(CountedStrikes { end, .. }) => {
                Some(Dated::new(Some(end.saturating_sub(self.period_us)), end, units))
            }
            BlockPhase::Quiet => None,
        };
        Carried::new(Used::units(units), dated)
    }

    fn take_over(&self, carried: &Carried, now: u64) -> Option<Pair> {
        let count = carried.used.units_ceil().min(self.limit);
        let rest = BlockView { phase: BlockPhase::Quiet, level: 0, forget: 0, moved: false };
        let end = carried.until(now, self.period_us);
        let struck = if count == 0 { rest } else { self.struck(rest, now, CountedStrikes { end, count }) };
        self.stored(struck.kept_closed(), now)
    }

    fn could_be(&self, state: Pair) -> bool {
        unpack(state.n).span_us <= PERIOD_US_MAX
    }

    /// Returns whether the state's instant is further ahead than the instant of any block can be. A block that was
    /// made by hand may be longer than the quota's own blocks. A block that was made by hand is clamped to its own
    /// length.
    fn is_clamped(&self, state: Pair, now: u64) -> bool {
        state.at.saturating_sub(now) > PERIOD_US_MAX + self.lasting.memory_us
    }

    /// Any quota's units are strikes.
    fn most(&self) -> u64 {
        u64::MAX
    }

    fn longest_us(&self, _now: u64) -> u64 {
        u64::MAX
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::quota::Quota;

    const SECOND: u64 = 1_000_000;
    const NOW: u64 = 1_000_000 * SECOND;

    /// A block of ten minutes after three strikes.
    fn block(period_s: u64, memory_s: u64) -> Block {
        let [period, lasting, memory] = [period_s, 600, memory_s].map(Duration::from_secs);
        let quota = Quota::block(3, period, lasting);
        let grown = |quota: Quota| if memory_s > 0 { quota.growing(2, 100 * lasting, memory) } else { Ok(quota) };
        Block::new(quota.and_then(grown).expect("a valid quota").spec())
    }

    /// Two strikes until half a minute from now, and one block that is remembered for 1,000 s.
    fn counting() -> BlockView {
        let strikes = CountedStrikes { end: NOW + 30 * SECOND, count: 2 };
        BlockView { phase: BlockPhase::Counting(strikes), level: 1, forget: NOW + 1_000 * SECOND, moved: false }
    }

    #[test]
    fn block_moves_what_it_adopts_only_if_it_reaches_less_far() {
        let from = block(60, 2_000);
        let state = from.stored(counting(), NOW).expect("a state");
        for (period_s, memory_s, end_s, forget_s, moved) in [
            (60, 2_000, 30, 1_000, false),
            (60, 5_000, 30, 1_000, false),
            (60, 1_000, 30, 1_000, false),
            (60, 999, 30, 999, true),
            (30, 2_000, 30, 1_000, false),
            (29, 2_000, 29, 1_000, true),
        ] {
            let to = block(period_s, memory_s);
            let strikes = CountedStrikes { end: NOW + end_s * SECOND, count: 2 };
            let view =
                BlockView { phase: BlockPhase::Counting(strikes), forget: NOW + forget_s * SECOND, ..counting() };
            assert_eq!(to.adopt(&from, state, NOW), (to.stored(view, NOW), moved), "{period_s} s, {memory_s} s");
        }
        let (forgetful, forgotten) = (block(60, 0), BlockView { level: 0, ..counting() });
        assert_eq!(forgetful.adopt(&from, state, NOW), (forgetful.stored(forgotten, NOW), true));
    }

    /// A denied request writes what was moved. Then the other quota would not know its own block any more.
    #[test]
    fn closed_key_is_not_moved_by_a_block_that_remembers_less() {
        let (from, to) = (block(60, 2_000), block(60, 0));
        let closed = from.struck(counting(), NOW, CountedStrikes { end: NOW + 30 * SECOND, count: 3 });
        let state = from.stored(closed, NOW).expect("a state");
        let (adopted, moved) = to.adopt(&from, state, NOW);
        assert!(!moved);
        let BlockPhase::Closed { until, .. } = to.view(adopted, NOW).phase else {
            panic!("the key is open: {adopted:?}")
        };
        assert_eq!(until, NOW + 1_200 * SECOND, "the second block is twice as long");
    }

    #[test]
    fn block_without_memory_is_no_earlier_block_to_another_quota() {
        let (from, to) = (block(60, 0), block(60, 2_000));
        let quiet = BlockView { phase: BlockPhase::Quiet, level: 0, forget: 0, moved: false };
        let closed = from.struck(quiet, NOW, CountedStrikes { end: NOW + 30 * SECOND, count: 3 });
        let (adopted, _) = to.adopt(&from, from.stored(closed, NOW).expect("a state"), NOW);
        assert_eq!(to.view(adopted, NOW).level, 0);
    }
}
