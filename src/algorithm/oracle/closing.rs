//! Strikes and blocks, from their definition: when what happened, and nothing put together.

use crate::base::time::PERIOD_US_MAX;
use crate::quota::spec::Spec;

/// The memory of a key that may be closed. Instants that are over stay, for a clock that steps back.
#[derive(Clone, Debug, Default)]
pub(super) struct Closing {
    /// The end of the closure, and its whole length.
    block: Option<(u64, u64)>,
    /// The instant until which the strikes count, and their number.
    window: Option<(u64, u64)>,
    /// The number of blocks so far, and the instant until which they are remembered after the last.
    past: Option<(u64, u64)>,
    /// The past just before the latest strike.
    past_before: Option<(u64, u64)>,
    /// The window, and the strikes in it, that began the block.
    closed_by: Option<(u64, u64)>,
}

impl Closing {
    /// Makes a block that ends at `until` and lasts for `length_us` in all.
    pub(super) fn closed(spec: &Spec, until: u64, length_us: u64, forgotten: u64) -> Self {
        let past = (spec.lasting.memory_us > 0).then_some((1, forgotten));
        Self { block: Some((until, length_us)), past: past.or(Some((1, until))), ..Self::default() }
    }

    /// Makes a state of `strikes` that count until `end`.
    pub(super) fn counting(end: u64, strikes: u64) -> Self {
        Self { window: Some((end, strikes)), ..Self::default() }
    }

    /// Whether it is allowed, and the units taken.
    pub(super) fn decide(&mut self, spec: &Spec, now: u64, cost: u64, force: bool) -> (bool, u64) {
        if self.is_closed(now) {
            if spec.count_denied && cost > 0 {
                let anew = length(spec, self.past.map_or(0, |(blocks, _)| blocks - 1));
                self.block = self.block.filter(|(until, _)| now + anew <= *until).or(Some((now + anew, anew)));
                let until = self.block.map_or(0, |(until, _)| until);
                self.past = self.past.map(|(blocks, _)| (blocks, until + spec.lasting.memory_us));
            }
            if (spec.count_denied || force) && cost > 0 {
                // It is a strike in the window, if that has not ended.
                let cost = cost.min(spec.limit + 1);
                self.closed_by = self.closed_by.filter(|(end, _)| now < *end).map(|(end, all)| (end, all + cost));
                self.closed_by = self.closed_by.filter(|(_, all)| *all < 4_096);
            }
            return (false, 0);
        }
        let room = spec.limit - self.strikes(now);
        let fits = cost <= room;
        if cost == 0 {
            return (true, 0);
        }
        if fits || force || spec.count_denied {
            self.strike(spec, now, cost.min(spec.limit + 1));
        }
        match (force, fits) {
            (true, _) => (!self.is_closed(now), cost.min(room)),
            (_, true) => (true, cost),
            (_, false) => (false, 0),
        }
    }

    pub(super) fn strike(&mut self, spec: &Spec, now: u64, units: u64) {
        let strikes = self.strikes(now) + units;
        let end = self.window.filter(|(end, _)| now < *end).map_or(now + spec.period_us, |(end, _)| end);
        self.forget(now);
        (self.block, self.window) = (None, Some((end, strikes)));
        (self.past_before, self.closed_by) = (self.past, None);
        if strikes >= spec.limit {
            let blocks = self.past.map_or(0, |(blocks, _)| blocks);
            let length = length(spec, blocks);
            self.block = Some((now + length, length));
            (self.window, self.closed_by) = (None, self.window.filter(|(_, all)| *all < 4_096));
            self.past = Some(((blocks + 1).min(63), now + length + spec.lasting.memory_us));
        }
    }

    /// Refunds strikes in the window that ends at `window_end`. `own` is the memory of the key when they were counted.
    pub(super) fn refund(&mut self, spec: &Spec, now: u64, units: u64, window_end: u64, own: &Self) {
        let mut met = self.clone();
        met.meet_clock(spec, now);
        let is_closed = met.is_closed(now);
        let (mut end, strikes) = match if is_closed { self.closed_by } else { met.window } {
            Some((end, strikes)) if end == window_end && (is_closed || now < end) => (end, strikes),
            _ => return,
        };
        *self = met;
        let left = strikes.saturating_sub(units);
        if is_closed && left >= spec.limit {
            self.closed_by = self.closed_by.map(|(end, _)| (end, left));
            return;
        }
        if is_closed {
            (self.block, self.closed_by) = (None, None);
            self.past = own.past_before.map(|(blocks, until)| (blocks, until.min(now + spec.lasting.memory_us)));
            end = end.min(now + spec.period_us);
        }
        self.window = Some((end, left)).filter(|_| left > 0);
        self.forget(now);
    }

    pub(super) fn used(&self, spec: &Spec, at: u64) -> u64 {
        if self.is_closed(at) { spec.limit } else { self.strikes(at) }
    }

    /// Shortens what would last longer from `now` than it did when it began.
    pub(super) fn meet_clock(&mut self, spec: &Spec, now: u64) {
        let before = (self.block, self.window, self.past);
        let (period_us, memory_us) = (spec.period_us, spec.lasting.memory_us);
        match self.block {
            Some((until, length)) if until > now + length => {
                self.block = Some((now + length, length));
                self.past = self.past.map(|(blocks, _)| (blocks, now + length + memory_us));
                // A key remembers what closed it only if the window ends within the longest period of the block's end.
                self.closed_by = self.closed_by.filter(|(end, _)| end.abs_diff(now + length) <= PERIOD_US_MAX);
            }
            Some(_) => {}
            None => {
                self.window = self.window.map(|(end, strikes)| (end.min(now + period_us), strikes));
                self.past = self.past.map(|(blocks, until)| (blocks, until.min(now + memory_us)));
            }
        }
        if before != (self.block, self.window, self.past) {
            self.forget(now); // it is written, and so is what else is over
        }
    }

    /// Until it opens, until its strikes are forgotten, or how long these are to count.
    pub(super) fn left_us(&self, spec: &Spec, now: u64) -> u64 {
        match (self.block, self.window) {
            (Some((until, _)), _) if now < until => until - now,
            (_, Some((end, _))) if now < end => end - now,
            _ => spec.period_us,
        }
    }

    fn is_closed(&self, now: u64) -> bool {
        self.block.is_some_and(|(until, _)| now < until)
    }

    fn strikes(&self, now: u64) -> u64 {
        self.window.filter(|(end, _)| now < *end).map_or(0, |(_, strikes)| strikes)
    }

    fn forget(&mut self, now: u64) {
        self.window = self.window.filter(|(end, _)| now < *end);
        self.past = self.past.filter(|(_, until)| now < *until);
    }
}

/// Returns the length of a block that follows this number of others.
fn length(spec: &Spec, blocks: u64) -> u64 {
    let lasting = spec.lasting;
    let grown = u128::from(lasting.factor).checked_pow(blocks as u32).unwrap_or(u128::MAX);
    u128::from(lasting.length_us).saturating_mul(grown).min(u128::from(lasting.longest_us)) as u64
}
