//! The oracle of the laws: each algorithm written from its definition, as plainly and slowly as it can be.
//!
//! It shares no code with `decide`. Everything in use is an exact integer of `units × scale`, where the scale of a
//! fluid is the period, so that `limit` parts drain in each microsecond and nothing is ever rounded. Waits are not
//! computed but searched for: the first microsecond at which the definition says yes.

mod closing;
mod edges;

use crate::quota::spec::{Algorithm, Anchor, Oldest, Spec};

use super::block::{BlockParts, STRIKES_MAX, unpack};
use super::properties::key::State;
use super::{PairAlgorithm, PairDecider};

use closing::Closing;

/// The answer to a charge by the definition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Expected {
    pub(crate) allowed: bool,
    pub(crate) remaining: u64,
    pub(crate) reset_us: u64,
    /// 0 if allowed, nothing if no wait helps.
    pub(crate) retry_us: Option<u64>,
    pub(super) window_us: u64,
    pub(super) delay_us: u64,
    pub(super) position: u64,
    /// Whole units that were taken.
    pub(crate) taken: u64,
}

/// The trace of a taken charge, for its refund.
#[derive(Clone, Debug)]
pub(crate) struct Own(Model);

/// The memory of one key.
#[derive(Clone, Debug)]
enum Model {
    /// A fluid that drains: its level at an instant, in units × period. Below zero, it has been empty for a while.
    Fluid(Option<(i128, u64)>),
    /// Tokens missing at an instant, and an instant of a tick.
    Steps(Option<(i128, u64, u64)>),
    /// A window's end, and the units in it.
    Window(Option<(u64, u64)>),
    /// The instant until which a count is kept, and the count.
    Meter(Option<(u64, u64)>),
    /// Strikes and blocks.
    Closing(Closing),
    /// Units by the start of their sub-window, or by their instant.
    Dated(Vec<(u64, u64)>),
}

#[derive(Clone, Debug)]
pub(crate) struct Oracle {
    spec: Spec,
    model: Model,
}

impl Oracle {
    pub(crate) fn new(spec: &Spec) -> Self {
        let model = match spec.algorithm {
            Algorithm::StepBucket => Model::Steps(None),
            Algorithm::FixedWindow => Model::Window(None),
            Algorithm::Block => Model::Closing(Closing::default()),
            Algorithm::Meter => Model::Meter(None),
            Algorithm::Concurrency => panic!("a concurrency limit has no clock: its laws are in algorithm/places.rs"),
            Algorithm::SlidingWindow | Algorithm::SlidingLog => Model::Dated(Vec::new()),
            Algorithm::TokenBucket | Algorithm::Gcra | Algorithm::LeakyBucket | Algorithm::LeakyQueue => {
                Model::Fluid(None)
            }
        };
        Self { spec: *spec, model }
    }

    /// Takes the charge, if it is allowed.
    pub(crate) fn decide(&mut self, now: u64, cost: u64, force: bool) -> (Expected, Own) {
        let scale = self.scale();
        let wanted = i128::from(cost) * scale;
        self.meet_clock(now);
        let before = self.used(now);
        let mut allowed = force || cost == 0 || before + wanted <= self.capacity();
        let mut taken = 0;
        if let Model::Closing(closing) = &mut self.model {
            (allowed, taken) = closing.decide(&self.spec, now, cost, force);
        } else if allowed {
            let parts = wanted.min((self.ceiling() - before).max(0));
            taken = (parts / scale) as u64;
            if parts > 0 {
                self.add(now, parts);
            }
        } else if self.spec.count_denied {
            self.count_denial(now, cost);
        }
        let never = !allowed && cost > self.spec.burst && !force;
        let retry_us = match (allowed, never) {
            (true, _) => Some(0),
            (_, true) => None,
            _ if force => Some(self.wait(now, |later| later.0 < later.1)), // closed: until it opens
            _ => Some(self.wait(now, |later| later.0 + wanted <= later.1 && later.0 < later.1)),
        };
        // A request passes at once if its last unit is among those that do.
        let at_once = (i128::from(self.spec.delay_after) - (i128::from(cost) - 1).max(0)).max(0) * scale;
        let delayed = (before - at_once).max(0);
        let queued = allowed && self.spec.algorithm == Algorithm::LeakyQueue && self.spec.limit > 0;
        let expected = Expected {
            allowed,
            remaining: self.remaining(now),
            reset_us: self.wait(now, |later| later.0 == 0),
            retry_us,
            window_us: self.window(now, retry_us),
            delay_us: if queued { ceil(delayed, i128::from(self.spec.limit)) } else { 0 },
            position: if queued { ceil(delayed, scale) } else { 0 },
            taken,
        };
        (expected, Own(self.model.clone()))
    }

    /// Refunds `units` of the charge that was taken as `own`.
    pub(crate) fn refund(&mut self, now: u64, units: u64, own: &Own, start: u64) {
        // Unless it is where a clock that stepped back has put it.
        let is_last = self.used(now) <= self.ceiling() && self.empty_at(&self.model) == self.empty_at(&own.0);
        let met = self.clone();
        if matches!(self.model, Model::Fluid(_) | Model::Steps(_)) {
            self.meet_clock(now); // windows and logs need no adjustment to a clock that stepped back: their states have times of their own
        }
        let wanted = i128::from(units) * self.scale();
        let before = self.used(now);
        let own_left = Self { spec: self.spec, model: own.0.clone() }.used(now).min(self.ceiling());
        let life_us = self.life_us();
        let is_queue = self.spec.algorithm == Algorithm::LeakyQueue;
        let nothing = wanted.min(own_left).min(before) == 0 || is_queue && !is_last;
        if nothing && matches!(self.model, Model::Fluid(_) | Model::Steps(_)) || units == 0 {
            *self = met; // what gives nothing back writes nothing
            return;
        }
        match &mut self.model {
            Model::Fluid(level) => {
                let left = before - wanted.min(own_left).min(before);
                *level = (left > 0).then_some((left, now));
            }
            Model::Steps(level) => {
                let left = before - wanted.min(own_left).min(before);
                *level = level.map(|(_, _, tick)| (left, now, tick)).filter(|_| left > 0);
            }
            Model::Window(window) => {
                if let (Some((end, count)), Model::Window(Some((own_end, _)))) = (&mut *window, &own.0) {
                    if end == own_end && *end > now {
                        *count = count.saturating_sub(units);
                    }
                }
                *window = window.filter(|(_, count)| *count > 0);
            }
            Model::Meter(meter) => {
                let latest = now + self.spec.period_us;
                if let Some((end, count)) = meter.as_mut().filter(|(end, _)| start > now && *end > now) {
                    (*end, *count) = ((*end).min(latest), count.saturating_sub(units));
                }
                *meter = meter.filter(|(_, count)| *count > 0);
            }
            Model::Closing(closing) => {
                if let Model::Closing(own) = &own.0 {
                    closing.refund(&self.spec, now, units, start, own);
                }
            }
            Model::Dated(entries) => {
                if now < start + life_us {
                    entries.iter_mut().filter(|entry| entry.0 == start).for_each(|e| e.1 = e.1.saturating_sub(units));
                    entries.retain(|entry| entry.1 > 0);
                }
            }
        }
    }

    /// When a fluid has drained, in parts of `1/limit` µs.
    fn empty_at(&self, model: &Model) -> Option<i128> {
        let Model::Fluid(level) = model else { return None };
        level.map(|(level, since)| i128::from(since) * i128::from(self.spec.limit) + level)
    }

    /// Returns the usage as a fraction.
    pub(super) fn fraction_used(&mut self, now: u64) -> (i128, i128) {
        let mut met = self.clone();
        met.meet_clock(now);
        (met.used(now), met.scale())
    }

    /// Starts with a state of the code, whose instants are its own.
    pub(super) fn of(spec: &Spec, now: u64, state: &State) -> Self {
        let mut oracle = Self::new(spec);
        let scale = oracle.scale();
        let used = state.used(now);
        oracle.model = match (oracle.model, state) {
            (model, State::Pair(_, None)) => model,
            (Model::Fluid(_), State::Pair(..)) => {
                assert_eq!(scale % used.of as i128, 0, "what is in use is kept exactly");
                Model::Fluid(Some((used.parts as i128 * (scale / used.of as i128), now)))
            }
            (Model::Steps(_), State::Pair(_, Some(full))) => Model::Steps(Some((used.parts as i128, now, full.at))),
            (Model::Window(_), State::Pair(_, Some(window))) => Model::Window(Some((window.at, window.n))),
            (Model::Meter(_), State::Pair(_, Some(meter))) => Model::Meter(Some((meter.at, meter.n))),
            (Model::Closing(_), State::Pair(_, Some(block))) => {
                let BlockParts { span_us, counts } = unpack(block.n);
                Model::Closing(match counts & STRIKES_MAX {
                    0 => Closing::closed(spec, block.at - spec.lasting.memory_us, span_us, block.at),
                    strikes => Closing::counting(block.at, strikes), // a quota that takes over remembers no blocks
                })
            }
            (Model::Dated(_), State::Pair(PairDecider::TwoCounterWindow(counters), Some(pair))) => {
                let dated = counters.carried(*pair, now, false).dated;
                Model::Dated(dated.iter().map(|dated| (dated.start.unwrap_or(0), dated.whole)).collect())
            }
            (Model::Dated(_), State::EntryLog(_, log)) => Model::Dated(log.0.clone()),
            (model, state) => panic!("{state:?} is no state like {model:?}"),
        };
        oracle
    }

    /// The capacity and the allowed debt, in units.
    pub(super) fn most(&self) -> u64 {
        self.spec.burst + self.spec.debt
    }

    // Definitions ─────────────────────────────────────────────────────────────────────────────────────────────────────

    fn scale(&self) -> i128 {
        if matches!(self.model, Model::Fluid(_)) { i128::from(self.spec.period_us) } else { 1 }
    }

    fn capacity(&self) -> i128 {
        i128::from(self.spec.burst) * self.scale()
    }

    fn ceiling(&self) -> i128 {
        i128::from(self.most()) * self.scale()
    }

    fn grain_us(&self) -> u64 {
        let is_log = self.spec.algorithm == Algorithm::SlidingLog;
        if is_log { 1 } else { self.spec.period_us / u64::from(self.spec.buckets) }
    }

    fn start_of(&self, now: u64) -> u64 {
        now / self.grain_us() * self.grain_us()
    }

    fn life_us(&self) -> u64 {
        let drops = self.spec.algorithm == Algorithm::SlidingLog || self.spec.oldest == Oldest::Dropped;
        self.spec.period_us + if drops { 0 } else { self.grain_us() }
    }

    /// Returns the usage at an instant, if nothing comes before it.
    fn used(&self, at: u64) -> i128 {
        match &self.model {
            Model::Fluid(None) | Model::Steps(None) | Model::Window(None) | Model::Meter(None) => 0,
            Model::Fluid(Some((level, since))) => {
                (level - (i128::from(at) - i128::from(*since)) * i128::from(self.spec.limit)).max(0)
            }
            Model::Steps(Some((missing, since, tick))) => {
                let ticks = self.ticks(at, *tick) - self.ticks(*since, *tick);
                (missing - ticks * i128::from(self.spec.limit)).max(0)
            }
            Model::Closing(closing) => closing.used(&self.spec, at).into(),
            Model::Window(Some((end, count))) | Model::Meter(Some((end, count))) => {
                i128::from(if at < *end { *count } else { 0 })
            }
            Model::Dated(entries) => {
                let newest = entries.iter().map(|entry| entry.0).max().unwrap_or(0);
                let at = at.max(newest); // a clock behind what was counted stands still
                entries.iter().map(|(start, units)| self.counts(*start, *units, at)).sum()
            }
        }
    }

    fn ticks(&self, at: u64, tick: u64) -> i128 {
        (i128::from(at) - i128::from(tick)).div_euclid(i128::from(self.spec.period_us))
    }

    /// Returns the units that an entry counts for at an instant.
    fn counts(&self, start: u64, units: u64, at: u64) -> i128 {
        let (edge, grain) = (start + self.spec.period_us, self.grain_us());
        let oldest = if self.spec.algorithm == Algorithm::SlidingLog { Oldest::Dropped } else { self.spec.oldest };
        match oldest {
            _ if at < edge => i128::from(units),
            _ if at >= edge + grain => 0,
            Oldest::Dropped => 0,
            Oldest::Counted => i128::from(units),
            Oldest::Weighted => i128::from(units) * i128::from(edge + grain - at) / i128::from(grain),
        }
    }

    /// Corrects the key for a clock that stepped back.
    fn meet_clock(&mut self, now: u64) {
        let (used, most, ceiling, period_us) = (self.used(now), self.most(), self.ceiling(), self.spec.period_us);
        let (first, start) = (self.spec.anchor == Anchor::FirstRequest, self.start_of(now));
        let grain_us = self.grain_us();
        let calendar = self.spec.calendar;
        match &mut self.model {
            Model::Fluid(level) if used > ceiling => *level = Some((ceiling, now)),
            Model::Fluid(_) => {}
            Model::Steps(level) if used > ceiling => *level = Some((ceiling, now, if first { now } else { 0 })),
            Model::Steps(_) => {}
            Model::Window(Some((end, _))) if calendar.is_some() => {
                let [start, first, second] = calendar.map_or([0; 3], |calendar| edges::around(calendar, now));
                if i128::from(*end) > second {
                    *end = (if i128::from(now) == start { first } else { second }) as u64;
                }
            }
            Model::Window(Some((end, _))) if *end > now + 2 * period_us => {
                // The first edge that is a whole period away.
                *end = if first { now + period_us } else { (now + period_us).div_ceil(period_us) * period_us };
            }
            Model::Window(_) => {}
            Model::Meter(Some((end, _))) => *end = (*end).min(now + period_us),
            Model::Meter(None) => {}
            Model::Closing(closing) => closing.meet_clock(&self.spec, now),
            Model::Dated(entries) if entries.iter().any(|entry| entry.0 > start + period_us) => {
                // The first sub-window that begins no earlier than now.
                let then = now.div_ceil(grain_us) * grain_us;
                let (mut left, later): (Vec<_>, Vec<_>) =
                    entries.iter().copied().partition(|entry: &(u64, u64)| entry.0 < then);
                left.push((then, later.iter().map(|entry| entry.1).sum::<u64>().min(most)));
                *entries = left;
            }
            Model::Dated(_) => {}
        }
    }

    fn add(&mut self, now: u64, parts: i128) {
        let used = self.used(now);
        let (anchor, period_us, calendar) = (self.spec.anchor, self.spec.period_us, self.spec.calendar);
        let (start, life_us) = (self.start_of(now), self.life_us());
        match &mut self.model {
            Model::Fluid(level) => *level = Some((used + parts, now)),
            Model::Steps(level) => {
                let tick = match (anchor, &level) {
                    (Anchor::Epoch, _) => 0,
                    (Anchor::FirstRequest, Some((_, _, tick))) if used > 0 => *tick,
                    (Anchor::FirstRequest, _) => now,
                };
                *level = Some((used + parts, now, tick));
            }
            Model::Window(window) => {
                let end = match (anchor, &window) {
                    (_, Some((end, _))) if now < *end => *end,
                    _ if calendar.is_some() => calendar.map_or(0, |calendar| edges::around(calendar, now)[1] as u64),
                    (Anchor::Epoch, _) => (now / period_us + 1) * period_us,
                    (Anchor::FirstRequest, _) => now + period_us,
                };
                *window = Some((end, (used + parts) as u64));
            }
            Model::Meter(meter) => *meter = Some((now + period_us, (used + parts) as u64)),
            Model::Closing(closing) => closing.strike(&self.spec, now, parts as u64),
            Model::Dated(entries) => {
                let newest = entries.iter().map(|entry| entry.0).max().unwrap_or(0);
                let start = start.max(newest);
                entries.retain(|entry| entry.0 + life_us > now.max(newest));
                match entries.iter_mut().find(|entry| entry.0 == start) {
                    Some(entry) => entry.1 += parts as u64,
                    None => entries.push((start, parts as u64)),
                }
            }
        }
    }

    /// A denied charge that counts: a window is filled to its limit; of a log the newest units are kept.
    fn count_denial(&mut self, now: u64, cost: u64) {
        let (used, limit) = (self.used(now) as u64, self.spec.limit);
        match self.spec.algorithm {
            Algorithm::FixedWindow => {
                let units = cost.min(limit.saturating_sub(used));
                if units > 0 {
                    self.add(now, i128::from(units));
                }
            }
            Algorithm::SlidingWindow => {
                let Model::Dated(entries) = &self.model else { return };
                let newest = entries.iter().map(|entry| entry.0).max().unwrap_or(0);
                let start = self.start_of(now).max(newest);
                let there = entries.iter().find(|entry| entry.0 == start).map_or(0, |entry| entry.1);
                let units = cost.min(limit.saturating_sub(there));
                if units > 0 {
                    self.add(now, i128::from(units));
                }
            }
            Algorithm::SlidingLog => {
                let units = cost.min(limit);
                if units > 0 {
                    self.add(now, i128::from(units));
                }
                let keep = limit.max(used);
                let Model::Dated(entries) = &mut self.model else { return };
                entries.sort_unstable();
                let total: u64 = entries.iter().map(|entry| entry.1).sum();
                let mut over = total.saturating_sub(keep);
                for entry in entries.iter_mut() {
                    let trimmed = entry.1.min(over);
                    entry.1 -= trimmed;
                    over -= trimmed;
                }
                entries.retain(|entry| entry.1 > 0);
            }
            other => panic!("there is no definition of how a {other} counts denied requests"),
        }
    }

    // Answers
    // ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    fn remaining(&self, now: u64) -> u64 {
        ((self.capacity() - self.used(now)).max(0) / self.scale()) as u64
    }

    /// The first wait after which (in use, capacity) are as asked; this only ever turns from no to yes.
    fn wait(&self, now: u64, so: impl Fn((i128, i128)) -> bool) -> u64 {
        let yes = |wait: u64| so((self.used(now + wait), self.capacity()));
        if yes(0) {
            return 0;
        }
        let (mut no, mut long) = (0, 1);
        while !yes(long) {
            assert!(long < 1 << 52, "it comes back some day");
            (no, long) = (long, 2 * long);
        }
        while long - no > 1 {
            let middle = no.midpoint(long);
            if yes(middle) {
                long = middle;
            } else {
                no = middle;
            }
        }
        long
    }

    fn window(&self, now: u64, retry_us: Option<u64>) -> u64 {
        let (spec, used) = (&self.spec, self.used(now));
        if let Model::Window(window) = &self.model {
            return match (window, spec.anchor) {
                (Some((end, _)), _) if now < *end => end - now,
                _ if spec.calendar.is_some() => {
                    spec.calendar.map_or(0, |calendar| edges::around(calendar, now)[1] as u64 - now)
                }
                (_, Anchor::Epoch) => spec.period_us - now % spec.period_us,
                (_, Anchor::FirstRequest) => spec.period_us,
            };
        }
        if let Model::Meter(meter) = &self.model {
            return meter.filter(|(end, _)| now < *end).map_or(spec.period_us, |(end, _)| end - now);
        }
        if let Model::Closing(closing) = &self.model {
            return retry_us.filter(|wait| *wait > 0).unwrap_or(closing.left_us(spec, now));
        }
        match retry_us {
            Some(wait) if wait > 0 => return wait,
            _ if spec.limit == 0 => return 0,
            _ if self.remaining(now) == 0 => return self.wait(now, |later| later.0 + self.scale() <= later.1),
            _ => {}
        }
        match &self.model {
            Model::Fluid(_) => ceil(self.capacity() - used, i128::from(spec.limit)),
            Model::Steps(level) => {
                let tick = match (level, spec.anchor) {
                    (_, Anchor::Epoch) => 0,
                    (Some((_, _, tick)), _) if used > 0 => *tick,
                    _ => now,
                };
                spec.period_us - (i128::from(now) - i128::from(tick)).rem_euclid(i128::from(spec.period_us)) as u64
            }
            Model::Window(_) | Model::Meter(_) | Model::Closing(_) => 0,
            Model::Dated(entries) if spec.algorithm == Algorithm::SlidingLog => {
                let at = now.max(entries.iter().map(|entry| entry.0).max().unwrap_or(0));
                let counting = entries.iter().filter(|(start, units)| self.counts(*start, *units, at) > 0);
                counting.map(|entry| entry.0 + spec.period_us - now).min().unwrap_or(spec.period_us)
            }
            Model::Dated(entries) => {
                let newest = entries.iter().map(|entry| entry.0).max().unwrap_or(0);
                self.start_of(now).max(newest) + self.grain_us() - now
            }
        }
    }
}

/// Returns whether two instants are in one window of a quota whose windows begin at the epoch or with a calendar.
pub(crate) fn are_in_one_window(spec: &Spec, one: u64, other: u64) -> bool {
    match spec.calendar {
        Some(calendar) => edges::around(calendar, one) == edges::around(calendar, other),
        None => one / spec.period_us == other / spec.period_us,
    }
}

fn ceil(parts: i128, by: i128) -> u64 {
    ((parts + by - 1) / by) as u64
}
