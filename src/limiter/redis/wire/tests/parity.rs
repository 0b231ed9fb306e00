//! Schedules of one key each, played to a script and to the algorithm itself: all answers must be
//! equal.

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::{Answered, Bench, RedisAnswer, WireOperation, WireRequest};
use crate::algorithm::properties::beginnings;
use crate::algorithm::properties::for_each_algorithm;
use crate::algorithm::properties::key::{Planned, State};
use crate::algorithm::properties::plans::proportional_plans;
use crate::algorithm::properties::quotas::{any_algorithm, quota, shapes};
use crate::algorithm::properties::run::{Step, steps};
use crate::base::time::Timestamp;
use crate::decision::{ChargeDecision, Decision, Receipt};
use crate::key::Key;
use crate::limiter::redis::keys::StoredKey;
use crate::limiter::redis::wire::encode::{StateKind, head};
use crate::limiter::{Charge, Effect, Refund};
use crate::policy::Policy;
use crate::quota::{Algorithm, Anchor, Quota};

/// Steps of each algorithm, unless `RATELIMIT_PARITY_STEPS` asks for more.
const STEPS: usize = 10_000;

/// Keys that live side by side, so that a step of each goes in one pipeline.
const KEYS: usize = 250;

/// One key's life, in the algorithm itself.
struct Life {
    quota: Quota,
    /// The quota of before, which may come back.
    former: Quota,
    /// The anchor and the numbers that the quota was made from, unless it is the first one.
    shape: Option<(Anchor, [u64; 6])>,
    planned: Planned,
    now: u64,
    retry_us: u64,
    reset_us: u64,
    remaining: u64,
    receipts: Vec<(u64, u64, u64)>,
    key: Key,
    steps: std::vec::IntoIter<Step>,
    told: Vec<String>,
}

/// The expected answer.
#[derive(Debug)]
enum Expected {
    Decision(ChargeDecision),
    Refunded { is_behind: bool },
}

type Asked = (Timestamp, WireRequest, Expected);

impl Life {
    fn new(quota: Quota, now: u64, number: usize, steps: Vec<Step>) -> Self {
        Self {
            quota,
            former: quota,
            shape: None,
            planned: Planned::new(&quota),
            now,
            retry_us: 0,
            reset_us: 0,
            remaining: quota.capacity(),
            receipts: Vec::new(),
            key: Key::of(number).unwrap(),
            steps: steps.into_iter(),
            told: Vec::new(),
        }
    }

    /// A script knows a quota by what gives its states their meaning.
    fn meet(&mut self) {
        let head = |quota: &Quota| head(StateKind::of(quota), quota.spec());
        if head(&self.planned.written) == head(&self.quota) {
            self.planned.state = match (State::new(&self.quota), self.planned.state.clone()) {
                (State::Pair(decider, _), State::Pair(_, state)) => State::Pair(decider, state),
                (State::EntryLog(decider, _), State::EntryLog(_, log)) => State::EntryLog(decider, log),
                (_, state) => state,
            };
            self.planned.written = self.quota;
        }
    }

    fn next(&mut self, space: &super::KeySpace) -> Option<Asked> {
        let step = self.steps.next()?;
        self.now = step.instant(&self.quota, self.now, self.retry_us, self.reset_us);
        let policy = Policy::new("p", self.quota).unwrap();
        let stored = space.key(&policy, &self.key);
        let asked = match step.what {
            0..=2 => self.charge(&policy, &stored, 0, Effect::Enforce, false),
            3..=5 => self.charge(&policy, &stored, self.cost(&step), Effect::Force, false),
            6..=9 if !self.receipts.is_empty() => self.refund(&policy, &stored, &step),
            10 => self.charge(&policy, &stored, self.cost(&step), Effect::Enforce, true),
            11 if step.a % 2 == 0 => {
                self.change_quota(&step);
                return self.next(space);
            }
            12 => self.charge(&policy, &stored, self.cost(&step), Effect::Observe, false),
            _ => self.charge(&policy, &stored, self.cost(&step), Effect::Enforce, false),
        };
        let (ask, expected) = asked;
        self.told.push(format!("{} {:?}: {step:?} -> {expected:?} {:?}", self.now, self.quota, self.planned));
        Some((Timestamp::from_micros(self.now), ask, expected))
    }

    fn cost(&self, step: &Step) -> u64 {
        step.cost(self.quota.capacity(), self.remaining)
    }

    fn charge(
        &mut self,
        policy: &Policy,
        stored: &StoredKey,
        cost: u64,
        effect: Effect,
        peek: bool,
    ) -> (WireRequest, Expected) {
        let charge = Charge::new(policy, &self.key).cost(cost).effect(effect);
        let charges = std::iter::once((&charge, stored));
        let ask = if peek {
            WireRequest::charge(WireOperation::Peek, charges)
        } else {
            WireRequest::charge(WireOperation::Take, charges)
        };
        self.meet();
        let mut planned = self.planned.clone();
        let (mut decision, _) = planned.decide(&self.quota, self.now, cost, effect == Effect::Force);
        if peek {
            decision.untaken();
        } else {
            self.planned = planned;
        }
        if let Some(receipt) = decision.take_receipt() {
            self.receipts.push((receipt.units(), receipt.at_us(), receipt.part()));
            decision.put_receipt(receipt);
        }
        self.retry_us = decision.wait().duration().map_or(0, |wait| wait.as_micros() as u64);
        (self.reset_us, self.remaining) = (decision.reset_us, decision.remaining());
        (ask, Expected::Decision(decision))
    }

    fn refund(&mut self, policy: &Policy, stored: &StoredKey, step: &Step) -> (WireRequest, Expected) {
        let index = step.a as usize % self.receipts.len();
        let left = self.receipts[index].0;
        let units = if step.b % 2 == 0 { left } else { step.b / 2 % (left + 1) };
        self.refund_of(policy, stored, index, units)
    }

    fn refund_of(&mut self, policy: &Policy, stored: &StoredKey, index: usize, units: u64) -> (WireRequest, Expected) {
        let (left, at, part) = self.receipts[index];
        self.receipts[index].0 -= units;
        if units == left {
            self.receipts.swap_remove(index);
        }
        self.meet();
        let is_behind = self.planned.refund(&self.quota, self.now, &Receipt::new(units, at, part), units);
        let refund = Refund::new(policy.clone(), self.key.clone(), Receipt::new(units, at, part));
        (WireRequest::refund(&refund, stored), Expected::Refunded { is_behind })
    }

    fn change_quota(&mut self, step: &Step) {
        let b = step.b;
        let former = std::mem::replace(&mut self.former, self.quota);
        match (b >> 29 & 3, self.shape) {
            (0, _) => self.quota = former,
            // Both quotas have one algorithm and may be able to use one state, but their limits differ.
            (1, Some((anchor, [_, _, rest @ ..]))) => {
                let [period, burst, debt, options] = rest;
                let shape = [b % 12, b >> 5, period, burst, debt, options];
                self.quota = quota(self.quota.algorithm(), anchor, &shape);
            }
            _ => {
                let anchor = if b % 2 == 0 { Anchor::Epoch } else { Anchor::FirstRequest };
                let shape = [b % 34, b >> 5, b >> 9, b >> 13, b >> 17, b >> 21];
                self.shape = Some((anchor, shape));
                self.quota = quota(any_algorithm(step.a / 4), anchor, &shape);
            }
        }
        if b >> 25 & 1 == 1 {
            self.quota = self.quota.in_proportion().unwrap_or(self.quota);
        }
        if b >> 26 & 7 == 0 {
            self.quota = Quota::unlimited();
        }
        (self.retry_us, self.reset_us, self.remaining) = (0, 0, self.quota.capacity());
    }
}

impl Bench {
    /// Sends a request, and compares the answer with the expected one.
    fn compare(&mut self, life: &Life, (request, expected): (WireRequest, Expected)) {
        let mut answer = self.ask(&[(Timestamp::from_micros(life.now), &request)]).remove(0);
        assert!(is_expected(&mut answer, &expected), "{answer:?}, not {expected:?}, of {} at {}", life.quota, life.now);
    }
}

fn is_expected(answer: &mut Answered, expected: &Expected) -> bool {
    match (answer, expected) {
        (Ok(RedisAnswer::Decided(decision)), Expected::Decision(expected)) => is_same(decision, expected),
        (Ok(RedisAnswer::Done), Expected::Refunded { is_behind }) => !is_behind,
        (Ok(RedisAnswer::Behind), Expected::Refunded { is_behind }) => *is_behind,
        _ => false,
    }
}

/// The expected one has its receipt, if it took something, or none.
fn is_same(decision: &mut Decision, expected: &ChargeDecision) -> bool {
    if let Some(charge) = decision.charge_mut(0) {
        if let Some(receipt) = charge.take_receipt() {
            charge.put_receipt(receipt);
        }
    }
    decision.charges() == std::slice::from_ref(expected)
}

fn play(algorithm: Algorithm, anchor: Anchor) {
    let steps_wanted = match std::env::var("RATELIMIT_PARITY_STEPS") {
        Ok(steps) => steps.parse().unwrap(),
        Err(_) => STEPS,
    };
    let mut bench = Bench::start_beside_simulation();
    let seed = std::env::var("RATELIMIT_PARITY_SEED").map_or(1, |seed| seed.parse::<u8>().unwrap());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[seed; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let (mut played, mut number, mut behind) = (0, 0, 0);
    let mut fresh = |number: usize| {
        let schedule = (shapes(), beginnings(), steps(), steps());
        let (shape, begin, mut first, second) = schedule.new_tree(&mut runner).unwrap().current();
        first.extend(second);
        Life::new(quota(algorithm, anchor, &shape), begin, number, first)
    };
    while played < steps_wanted {
        let mut lives: Vec<Life> = (number..number + KEYS).map(&mut fresh).collect();
        number += KEYS;
        loop {
            let mut asked: Vec<(usize, Asked)> = Vec::new();
            for (at, life) in lives.iter_mut().enumerate() {
                if let Some(next) = life.next(&bench.space) {
                    asked.push((at, next));
                }
            }
            if asked.is_empty() {
                break;
            }
            played += asked.len();
            let asks: Vec<_> = asked.iter().map(|(_, (now, ask, _))| (*now, ask)).collect();
            for ((at, (_, _, expected)), mut answer) in asked.iter().zip(bench.ask(&asks)) {
                let same = is_expected(&mut answer, expected);
                behind += usize::from(matches!(expected, Expected::Refunded { is_behind: true }));
                assert!(same, "{answer:?} in step {played}, key {number}, after\n{}", lives[*at].told.join("\n"));
            }
        }
    }
    let kept = bench.check_ttls();
    println!("{played} steps on {number} keys, {kept} kept, {behind} refunds behind a later slot");
    assert!(behind > 0 || algorithm != Algorithm::LeakyQueue);
}

macro_rules! parity {
    ($($name:ident: $algorithm:ident, $anchor:ident;)*) => {$(
        #[test]
        fn $name() {
            play(Algorithm::$algorithm, Anchor::$anchor);
        }
    )*};
}

for_each_algorithm!(parity);

/// Any number of entries may end at once, or have to end before there is room.
#[test]
fn bursts_of_a_sliding_log_are_reported_as_in_memory() {
    const SECOND: u64 = 1_000_000;
    let mut bench = Bench::start();
    let quota = Quota::sliding_log(80, std::time::Duration::from_secs(1)).unwrap();
    let policy = Policy::new("p", quota).unwrap();
    for (number, burst) in [1, 2, 3, 5, 6, 7, 20, 29, 30, 31, 60].into_iter().enumerate() {
        let mut life = Life::new(quota, 1_000 * SECOND, number, Vec::new());
        let stored = bench.space.key(&policy, &life.key);
        let one_by_one = std::iter::repeat_n((1, 1), burst as usize);
        let later =
            [(SECOND / 2, 1), (0, 80), (0, 79 - burst / 2), (SECOND / 2 - burst / 2, 1), (burst, 1), (SECOND, 1)];
        for (passes, cost) in one_by_one.chain(later) {
            life.now += passes;
            let asked = life.charge(&policy, &stored, cost, Effect::Enforce, false);
            bench.compare(&life, asked);
        }
    }
}

/// Refunds of strikes that closed a key, each followed by a look: with and without earlier blocks, in any order, after
/// a clock that stepped back, and with more strikes than it takes to close.
#[test]
fn refunds_that_undo_a_block_are_reported_as_in_memory() {
    const SECOND: u64 = 1_000_000;
    let seconds = std::time::Duration::from_secs;
    let plain = Quota::block(3, seconds(60), seconds(900)).unwrap();
    let growing = Quota::block(3, seconds(60), seconds(20)).unwrap().growing(3, seconds(90), seconds(600)).unwrap();
    let quotas = [plain, growing, plain.count_denied().unwrap(), growing.count_denied().unwrap()];
    let mut bench = Bench::start();
    let (mut number, mut opened) = (0, 0);
    for quota in quotas {
        for order in 0..27 {
            // How many blocks came before, how many strikes are forced upon it, and seconds until the refunds: below
            // three the clock steps back.
            let cases = [(0, 0, 4), (1, 0, 4), (2, 0, 10), (2, 0, 62), (1, 1, 4), (2, 2, 0), (1, 0, 33)];
            for (earlier, forced, pause) in cases {
                let mut life = Life::new(quota, 1_000_000 * SECOND, number, Vec::new());
                number += 1;
                let policy = Policy::new("p", quota).unwrap();
                let stored = bench.space.key(&policy, &life.key);
                let mut ask = |life: &Life, asked| bench.compare(life, asked);
                for _ in 0..earlier {
                    let closing = life.charge(&policy, &stored, 3, Effect::Enforce, false);
                    ask(&life, closing);
                    life.now += life.reset_us + SECOND;
                }
                life.receipts.clear();
                for _ in 0..3 {
                    life.now += SECOND;
                    let strike = life.charge(&policy, &stored, 1, Effect::Enforce, false);
                    ask(&life, strike);
                }
                let denied = life.charge(&policy, &stored, 1, Effect::Enforce, false);
                ask(&life, denied);
                if forced > 0 {
                    let denied = life.charge(&policy, &stored, forced, Effect::Force, false);
                    ask(&life, denied);
                }
                life.now = life.now - 3 * SECOND + pause * SECOND;
                let closed = life.retry_us > 0;
                for place in [order % 3, order / 3 % 3, order / 9] {
                    if let Some((left, ..)) = life.receipts.get(place).copied() {
                        let refund = life.refund_of(&policy, &stored, place, left);
                        ask(&life, refund);
                    }
                    let look = life.charge(&policy, &stored, 0, Effect::Enforce, false);
                    ask(&life, look);
                }
                opened += usize::from(closed && life.retry_us == 0);
                let strike = life.charge(&policy, &stored, 3, Effect::Force, false);
                ask(&life, strike);
            }
        }
    }
    bench.check_ttls();
    assert!(opened > number / 4, "{opened} of {number} keys were opened by refunds");
}

/// Plans of any two kinds in turn: their windows have one grid, unlike those of random quotas.
#[test]
fn proportional_plans_are_reported_as_in_memory() {
    let mut bench = Bench::start();
    let [fours, nines] = [4, 9].map(proportional_plans);
    let pairs = nines.into_iter().flat_map(|nine| fours.iter().map(move |four| [nine, *four]));
    let mut lives: Vec<(Life, [Quota; 2])> = pairs
        .enumerate()
        .map(|(number, plans)| (Life::new(plans[0], 1_790_000_000_000_000, number, Vec::new()), plans))
        .collect();
    for step in 0..40 {
        let expected: Vec<_> = lives
            .iter_mut()
            .map(|(life, plans)| {
                life.quota = plans[step % 2];
                life.now += [0, 7_000_001, 0, 17_000_000, 1][step % 5];
                let policy = Policy::new("p", life.quota).unwrap();
                let stored = bench.space.key(&policy, &life.key);
                let cost = [3, 1, 2, 1][step / 2 % 4];
                (life.now, life.charge(&policy, &stored, cost, Effect::Enforce, false))
            })
            .collect();
        let asks: Vec<_> = expected.iter().map(|(now, (ask, _))| (Timestamp::from_micros(*now), ask)).collect();
        for (((_, (_, expected)), answer), (_, plans)) in expected.iter().zip(bench.ask(&asks)).zip(&lives) {
            let (Ok(RedisAnswer::Decided(mut decision)), Expected::Decision(expected)) = (answer, expected) else {
                panic!("it was decided")
            };
            assert!(is_same(&mut decision, expected), "{decision:?}, not {expected:?}, in step {step} of {plans:?}");
        }
    }
}

/// Quotas that take turns at a key, where scripts and algorithms differed once.
#[test]
fn quotas_that_take_turns_are_reported_as_in_memory() {
    let (us, year) = (std::time::Duration::from_micros, std::time::Duration::from_secs(366 * 86_400));
    // Entries of the first are entries of the second as well, and more of them than the first could keep.
    let small = Quota::sliding_log(2, us(300)).unwrap().max_debt(1).unwrap().count_denied().unwrap();
    let large = Quota::sliding_log(10, us(300)).unwrap();
    let logs = [(small, 2, 0), (large, 1, 60), (large, 7, 48), (small, 7, 44), (small, 1, 10)];
    // Nothing of the first counts under the second, whose states end sooner.
    let none = Quota::token_bucket(0, us(1)).unwrap().in_proportion().unwrap();
    let block = Quota::block(1, us(12), us(1)).unwrap();
    let nothing = [(Quota::meter(1_000, year).unwrap(), 1_000, 0), (none, 1, 1), (block, 1, 1)];
    let mut bench = Bench::start();
    for (number, (story, effects)) in
        [(&logs[..], [Effect::Enforce; 5]), (&nothing[..], [Effect::Force; 5])].into_iter().enumerate()
    {
        let mut life = Life::new(story[0].0, 1_790_000_000_000_000, number, Vec::new());
        for (&(quota, cost, passes), effect) in story.iter().zip(effects) {
            (life.quota, life.now) = (quota, life.now + passes);
            let policy = Policy::new("p", quota).unwrap();
            let stored = bench.space.key(&policy, &life.key);
            let asked = life.charge(&policy, &stored, cost, effect, false);
            bench.compare(&life, asked);
        }
    }
}

/// The state of a queue may end in the same microsecond as a charge of another quota: that is not its newest charge.
#[test]
fn queue_keeps_what_another_quota_took_as_in_memory() {
    let us = std::time::Duration::from_micros;
    let gcra = Quota::gcra(10_000, us(86_400)).unwrap();
    let queue = Quota::leaky_queue(3, us(7)).unwrap().delay_after(1).unwrap().in_proportion().unwrap();
    let mut bench = Bench::start();
    let mut life = Life::new(gcra, 43_893, 1, Vec::new());
    let mut ask = |life: &mut Life, asked: &dyn Fn(&mut Life, &Policy, &StoredKey) -> (WireRequest, Expected)| {
        let policy = Policy::new("p", life.quota).unwrap();
        let stored = bench.space.key(&policy, &life.key);
        let asked = asked(life, &policy, &stored);
        bench.compare(life, asked);
    };
    ask(&mut life, &|life, policy, stored| life.charge(policy, stored, 2, Effect::Force, false));
    (life.quota, life.now) = (queue, 43_907);
    ask(&mut life, &|life, policy, stored| life.refund_of(policy, stored, 0, 1));
    ask(&mut life, &|life, policy, stored| life.charge(policy, stored, 0, Effect::Enforce, true));
}

/// Several slots of a fast queue are over in one microsecond.
#[test]
fn queue_faster_than_a_microsecond_keeps_refunds_as_in_memory() {
    let us = std::time::Duration::from_micros;
    for (limit, period) in [(7, 1), (7, 3), (1, 1)] {
        let mut bench = Bench::start();
        for passes in [0, 1] {
            let queue = Quota::leaky_queue(limit, us(period)).unwrap().queue(50).unwrap();
            let mut life = Life::new(queue, 43_893, passes, Vec::new());
            let policy = Policy::new("p", queue).unwrap();
            let stored = bench.space.key(&policy, &life.key);
            for _ in 0..9 {
                let asked = life.charge(&policy, &stored, 1, Effect::Enforce, false);
                bench.compare(&life, asked);
            }
            life.now += passes as u64;
            while !life.receipts.is_empty() {
                let asked = life.refund_of(&policy, &stored, 0, 1);
                bench.compare(&life, asked);
            }
        }
    }
}
