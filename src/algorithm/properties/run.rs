//! One key's life under a schedule, on the code and on the oracle, and what must hold after each step.

use proptest::prelude::*;

use crate::algorithm::Used;
use crate::algorithm::carry::Fit;
use crate::algorithm::oracle::{Expected, Oracle, Own, are_in_one_window};
use crate::base::time::{CLOCK_US_MAX, INSTANT_US_MAX};
use crate::base::wait::Wait;
use crate::decision::{ChargeDecision, Receipt};
use crate::quota::{Algorithm, Anchor, Oldest, Quota};

use super::key::State;
use super::quotas::{any_algorithm, quota};

/// An action and its time after the step before: numbers whose meaning depends on the last answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    time: u8,
    pub(crate) what: u8,
    pub(crate) a: u64,
    pub(crate) b: u64,
}

impl Step {
    /// Returns the step's instant, which is after `now`. `retry_us` and `reset_us` were reported at `now`.
    pub(crate) fn instant(&self, quota: &Quota, now: u64, retry_us: u64, reset_us: u64) -> u64 {
        let spec = quota.spec();
        let period_us = spec.period_us;
        let grain_us = period_us / u64::from(spec.buckets);
        let interval_us = period_us / spec.limit.max(1);
        let edge = |grid: u64| grid - now % grid;
        let then = match self.time {
            0..=1 => now,
            2 => now + 1,
            3 => now + self.b % (interval_us + 1),
            4 => now + interval_us + self.b % 2,
            5..=6 => now + retry_us,
            7 => now + retry_us.saturating_sub(1),
            8 => now + reset_us,
            9 => now + reset_us.saturating_sub(1),
            10 => now + edge(grain_us),
            11 => now + edge(grain_us) - 1,
            12 => now + edge(period_us) + self.b % 2,
            13 => now + self.b % (grain_us + 1),
            14 => now + self.b % (2 * period_us + 1),
            15 if self.b % 3 == 0 => now + self.b % (1 << 48),
            16 if self.a % 3 == 0 => now.saturating_sub(self.b % (period_us / 4 + 2)),
            17 if self.a % 3 == 0 => now.saturating_sub(self.b % (5 * period_us)),
            17 if self.a % 3 == 1 => now.saturating_sub(self.b % (1 << 50)),
            _ => now,
        };
        then.min(CLOCK_US_MAX)
    }

    /// Returns the cost of the step. It depends on what remains of the capacity.
    pub(crate) fn cost(&self, capacity: u64, remaining: u64) -> u64 {
        match self.a % 12 {
            0..=3 => 1,
            4..=5 => 1 + self.b % 4,
            6 => capacity,
            7 => capacity + 1,
            8 if self.b % 4 == 0 => u64::MAX,
            8..=9 => remaining,
            10 => remaining.saturating_add(1),
            _ => self.b % (capacity + 2),
        }
    }

    pub(crate) fn only_forwards(self) -> Self {
        Self { time: self.time % 16, ..self }
    }

    pub(super) fn only_takes(self) -> Self {
        Self { what: if self.what < 3 { 0 } else { 31 }, ..self }
    }
}

pub(crate) fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = (0..18_u8, 0..32_u8, any::<u64>(), any::<u64>());
    prop::collection::vec(step.prop_map(|(time, what, a, b)| Step { time, what, a, b }), 1..=40)
}

/// An admitted charge or a refund, in time that has gone by forwards.
struct Event {
    forward_us: u64,
    ticks: u64,
    now: u64,
    admitted: u64,
    refunded: u64,
    /// The refund emptied the newest window, so that it is forgotten where the clock had been.
    forgot: bool,
}

struct Taken {
    receipt: Receipt,
    own: Own,
    left: u64,
}

pub(super) struct Run {
    quota: Quota,
    state: State,
    oracle: Oracle,
    now: u64,
    forward_us: u64,
    /// Edges of the grid of periods that time has crossed forwards.
    ticks: u64,
    stepped_back: bool,
    retry_us: u64,
    reset_us: u64,
    remaining: u64,
    taken: Vec<Taken>,
    events: Vec<Event>,
}

impl Run {
    pub(super) fn new(quota: Quota, now: u64) -> Self {
        Self {
            quota,
            state: State::new(&quota),
            oracle: Oracle::new(quota.spec()),
            now,
            forward_us: 0,
            ticks: 0,
            stepped_back: false,
            retry_us: 0,
            reset_us: 0,
            remaining: quota.capacity(),
            taken: Vec::new(),
            events: Vec::new(),
        }
    }

    pub(super) fn step(&mut self, step: &Step) {
        self.pass_time(step);
        match step.what {
            0..=2 => self.charge(0, false, step),
            3..=5 => self.charge(self.cost(step), true, step),
            6..=10 => self.refund(step),
            11 if step.a % 4 == 0 => self.change_quota(step),
            _ => self.charge(self.cost(step), false, step),
        }
        let (used, (parts, scale)) = (self.state.used(self.now), self.oracle.fraction_used(self.now));
        assert_eq!(scale % used.of as i128, 0);
        assert_eq!(
            used.parts as i128 * (scale / used.of as i128),
            parts,
            "in use, of {scale} parts, in {:?} of {:?}",
            self.state.words(),
            self.quota
        );
    }

    // Steps ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    fn pass_time(&mut self, step: &Step) {
        let period_us = self.quota.spec().period_us;
        let then = step.instant(&self.quota, self.now, self.retry_us, self.reset_us);
        self.forward_us += then.saturating_sub(self.now);
        self.ticks += (then / period_us).saturating_sub(self.now / period_us);
        self.stepped_back |= then < self.now;
        self.now = then;
    }

    fn cost(&self, step: &Step) -> u64 {
        step.cost(self.quota.capacity(), self.remaining)
    }

    fn charge(&mut self, cost: u64, force: bool, step: &Step) {
        let before = self.state.clone();
        let (mut decision, wrote) = self.state.decide(self.now, cost, force);
        let mut looked = self.oracle.clone();
        let oracle = if cost == 0 { &mut looked } else { &mut self.oracle };
        let (expected, own) = oracle.decide(self.now, cost, force);
        let receipt = decision.take_receipt();
        let units = receipt.as_ref().map_or(0, Receipt::units);
        assert_eq!(told(&decision, units), expected, "cost {cost}, force {force}, at {} of {:?}", self.now, self.quota);

        // A look writes nothing, so a state that is ahead of a clock that stepped back stays ahead.
        let is_stale = cost == 0 && self.stepped_back;
        if !is_stale {
            self.state.check_layout(&self.quota, self.now);
        }
        assert!(self.state.latest().unwrap_or(0) <= INSTANT_US_MAX, "{:?}", self.state);
        if let Some(throttled) = self.state.is_throttled(self.now) {
            assert_eq!(throttled, !self.state.admits(self.now, 1), "{:?} of {:?}", self.state, self.quota);
        }
        // A forced strike is reported like a peek after it, although it was taken.
        let denied = !decision.is_allowed() && !force;
        if cost == 0 || denied && !self.stepped_back && !self.quota.counts_denied() {
            assert!(!wrote && self.state.words() == before.words(), "a denied request changes nothing");
        }
        if !force && (2..=8).contains(&cost) && (!denied || !self.quota.counts_denied()) {
            self.check_cost_is_additive(&before, cost, !denied);
        }
        if !self.stepped_back && before.is_over(self.now) {
            let fresh = State::new(&self.quota);
            for cost in [0, 1, cost, self.quota.capacity()] {
                assert_eq!(fresh.look(self.now, cost), before.look(self.now, cost), "an expired state is no state");
            }
        }
        if let Some(wait) = decision.wait().duration().filter(|_| denied && !is_stale) {
            self.check_promise(cost, wait.as_micros() as u64, step);
        }
        self.retry_us = expected.retry_us.unwrap_or(0);
        (self.reset_us, self.remaining) = (expected.reset_us, expected.remaining);
        if let Some(receipt) = receipt {
            self.taken.push(Taken { left: receipt.units(), receipt, own });
        }
        if !force && units > 0 {
            self.record(units, 0, false);
        }
    }

    fn refund(&mut self, step: &Step) {
        if self.taken.is_empty() {
            return;
        }
        let index = step.a as usize % self.taken.len();
        let taken = &mut self.taken[index];
        let units = if step.b % 2 == 0 { taken.left } else { step.b / 2 % (taken.left + 1) };
        let start = taken.receipt.at_us();
        taken.left -= units;
        let before = self.state.latest();
        self.state.refund(self.now, &taken.receipt, units);
        self.oracle.refund(self.now, units, &taken.own, start);
        if taken.left == 0 {
            self.taken.swap_remove(index);
        }
        self.record(0, units, self.state.latest() < before);
    }

    fn change_quota(&mut self, step: &Step) {
        self.check_safety();
        let b = step.b;
        let anchor = if b % 2 == 0 { Anchor::Epoch } else { Anchor::FirstRequest };
        let shape = [b % 34, b >> 5, b >> 9, b >> 13, b >> 17, b >> 21];
        let next = quota(any_algorithm(step.a / 4), anchor, &shape);
        if (self.quota.algorithm(), next.algorithm()) == (Algorithm::Block, Algorithm::Block) {
            return; // of which more is kept than what is in use
        }
        let mut before = self.state.used(self.now);
        let (from, to) = (self.quota.capacity().max(1), next.capacity());
        // The products of this test would not fit for larger ones.
        let share = step.b >> 25 & 1 == 1 && from.max(to) < 1 << 16;
        let next = next.in_proportion().ok().filter(|_| share).unwrap_or(next);
        let old = (self.state.clone(), self.quota);
        let (state, fit) = old.0.taken_over(&old.1, &next, self.now);
        self.state = state;
        self.quota = next;
        self.state.check_layout(&next, self.now);
        let after = self.state.used(self.now);
        if next.spec().proportional {
            let (parts, of) = self.oracle.fraction_used(self.now);
            before = Used { parts: parts as u128 * u128::from(to), of: of as u128 * u128::from(from) };
        }
        let most = Used { parts: u128::from(Oracle::new(next.spec()).most()), of: 1 };
        let is_dated = |quota: &Quota| matches!(quota.algorithm(), Algorithm::SlidingWindow | Algorithm::SlidingLog);
        // Counts the units anew, by when they were taken, unless the share in use is kept.
        let counts_anew = is_dated(&old.1) && is_dated(&next) && !next.spec().proportional;
        assert!(at_least(after, before) || at_least(after, most), "{before:?} became {after:?}: a free burst");
        // A block has room for its strikes, whatever was in use under a quota.
        let forgets = fit == Fit::Over || next.algorithm() == Algorithm::Block;
        assert!(forgets || at_least(after, before), "{before:?} became {after:?}: some are forgotten");
        let one_more = Used { parts: before.parts + before.of, of: before.of };
        assert!(counts_anew || !at_least(after, one_more), "{before:?} became {after:?}: by a unit or more");

        self.oracle = Oracle::of(next.spec(), self.now, &self.state);
        for stale in std::mem::take(&mut self.taken) {
            self.state.clone().refund(self.now, &stale.receipt, stale.left); // means nothing here, and does no harm
        }
        self.events.clear();
        (self.retry_us, self.reset_us, self.remaining) = (0, 0, next.capacity());
    }

    fn record(&mut self, admitted: u64, refunded: u64, forgot: bool) {
        let (forward_us, ticks, now) = (self.forward_us, self.ticks, self.now);
        self.events.push(Event { forward_us, ticks, now, admitted, refunded, forgot });
    }

    // Laws ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Denied with a wait: denied until then, admitted then.
    fn check_promise(&self, cost: u64, wait: u64, step: &Step) {
        assert!(self.state.admits(self.now + wait, cost), "admitted {wait} µs after {} of {:?}", self.now, self.quota);
        for earlier in [wait - 1, step.b % wait, step.a % wait, 0] {
            assert!(
                !self.state.admits(self.now + earlier, cost),
                "denied {earlier} µs after {}, told {wait}",
                self.now
            );
        }
    }

    fn check_cost_is_additive(&self, before: &State, cost: u64, allowed: bool) {
        let mut singly = before.clone();
        let all = (0..cost).all(|_| singly.decide(self.now, 1, false).0.is_allowed());
        assert_eq!(all, allowed, "cost {cost} is {cost} times cost 1");
        if allowed {
            assert_eq!(singly.words(), self.state.words(), "cost {cost} leaves what {cost} times cost 1 leaves");
        }
    }

    /// No interval admits more than the algorithm's bound and the refunds in it.
    pub(super) fn check_safety(&self) {
        let spec = self.quota.spec();
        let (limit, burst, period_us) = (u128::from(spec.limit), u128::from(spec.burst), u128::from(spec.period_us));
        for (first, from) in self.events.iter().enumerate() {
            let (mut admitted, mut refunded) = (0, 0);
            for to in &self.events[first..] {
                admitted += u128::from(to.admitted);
                refunded += u128::from(to.refunded);
                if to.forgot && self.stepped_back {
                    refunded += limit;
                }
                let length_us = u128::from(to.forward_us - from.forward_us);
                let same_window = !self.stepped_back && are_in_one_window(spec, from.now, to.now);
                let is_within = length_us < spec.calendar.map_or(period_us, |calendar| calendar.shortest_us(1).into());
                let bound = match spec.algorithm {
                    // admitted ≤ burst + rate × length, in units × period
                    Algorithm::TokenBucket | Algorithm::Gcra | Algorithm::LeakyBucket | Algorithm::LeakyQueue => {
                        assert!(
                            (admitted - refunded.min(admitted)) * period_us <= burst * period_us + limit * length_us,
                            "{admitted} less {refunded} in {length_us} µs of {:?}",
                            self.quota
                        );
                        continue;
                    }
                    Algorithm::StepBucket if spec.anchor == Anchor::Epoch => {
                        burst + limit * u128::from(to.ticks - from.ticks)
                    }
                    Algorithm::StepBucket => burst + limit * (length_us / period_us + 1),
                    Algorithm::FixedWindow if spec.anchor == Anchor::Epoch && same_window => limit,
                    Algorithm::FixedWindow if is_within => 2 * limit,
                    Algorithm::SlidingWindow if spec.oldest == Oldest::Counted && is_within => limit,
                    Algorithm::SlidingWindow
                        if length_us * u128::from(spec.buckets) < period_us * u128::from(spec.buckets - 1) =>
                    {
                        limit
                    }
                    Algorithm::SlidingWindow if is_within => 2 * limit,
                    Algorithm::SlidingLog | Algorithm::Meter if is_within => limit,
                    Algorithm::FixedWindow | Algorithm::SlidingWindow | Algorithm::SlidingLog | Algorithm::Meter => {
                        continue;
                    }
                    Algorithm::Concurrency => continue, // it has no clock, and no schedule
                    // After a block has been closed for at least its length, it counts from zero.
                    Algorithm::Block => limit * (2 + length_us / period_us.min(u128::from(spec.lasting.length_us))),
                };
                assert!(
                    admitted <= bound + refunded,
                    "{admitted} > {bound} + {refunded} in {length_us} µs of {:?}",
                    self.quota
                );
            }
        }
    }
}

/// Plays takes that only go forwards, gives one of them back, and compares with a life in which it was not taken.
pub(super) fn lone_refund(quota: &Quota, begin: u64, steps: &[Step], chosen: prop::sample::Index) {
    let chosen = chosen.index(steps.len());
    let back_at = chosen + (steps[chosen].a >> 32) as usize % (steps.len() - chosen);
    let mut run = Run::new(*quota, begin);
    let mut without = State::new(quota);
    let mut receipt = None;
    for (index, step) in steps.iter().enumerate() {
        run.pass_time(&step.only_forwards());
        let cost = run.cost(step);
        let (mut decision, _) = run.state.decide(run.now, cost, false);
        run.remaining = decision.remaining();
        run.retry_us = decision.wait().duration().map_or(0, |wait| wait.as_micros() as u64);
        if index == chosen {
            receipt = decision.take_receipt();
        } else if decision.is_allowed() {
            assert!(without.decide(run.now, cost, false).0.is_allowed(), "there is more room without it");
        }
        if index == back_at {
            if let Some(receipt) = receipt.take() {
                run.state.refund(run.now, &receipt, receipt.units());
            }
            let (with, without) = (run.state.used(run.now), without.used(run.now));
            assert!(
                at_least(with, without),
                "in use {with:?} after the refund, {without:?} without the take, of {quota:?}"
            );
            return;
        }
    }
}

/// Compares whole units, then the fraction of one: the products of all would not fit.
pub(super) fn at_least(a: Used, b: Used) -> bool {
    (a.parts / a.of, a.parts % a.of * b.of) >= (b.parts / b.of, b.parts % b.of * a.of)
}

fn told(decision: &ChargeDecision, taken: u64) -> Expected {
    Expected {
        allowed: decision.is_allowed(),
        remaining: decision.remaining(),
        reset_us: decision.reset_us,
        retry_us: if decision.wait() == Wait::Never { None } else { Some(decision.retry_us) },
        window_us: decision.window_us,
        delay_us: decision.delay().as_micros() as u64,
        position: decision.position(),
        taken,
    }
}
