//! Rows of units that are held, against a model of them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use super::{Answered, Bench, RedisAnswer, WireOperation, WireRequest};
use crate::base::random::mixed;
use crate::base::sampling::config;
use crate::base::time::Timestamp;
use crate::base::wait::Wait;
use crate::event::StoreErrorKind;
use crate::key::Key;
use crate::limiter::redis::keys::StoredKey;
use crate::limiter::remote::{Claim, CurrentRow, HeldKey, Return};
use crate::limiter::{Charge, Effect, FirstInLine, Standing};
use crate::policy::Policy;
use crate::quota::Quota;

pub(super) const BEGIN: u64 = 1_790_000_000_000_000;
pub(super) const LAPSE_US: u64 = 30_000_000;

/// How long a request that waits in line is known without asking again.
pub(super) const STAYS_US: u64 = 1_000_000;

fn policy(limit: u64) -> Policy {
    Policy::new("places", Quota::concurrent(limit)).unwrap()
}

pub(super) fn claim(holder: u64, epoch: u64, base: u64) -> Claim {
    Claim { holder, epoch, base, lapse_us: LAPSE_US, ..Claim::default() }
}

/// Says that a request is the first in line of its holder, and for how many microseconds it has waited.
pub(super) fn first(holder: u64, number: u32, waited: u64) -> Claim {
    let waited = Duration::from_micros(waited);
    let first = FirstInLine { number, waited, asks_within: Duration::from_micros(STAYS_US) };
    Claim { standing: Standing::First(first), ..claim(holder, 1, 0) }
}

/// A server, and a key.
pub(super) struct Rows {
    pub(super) bench: Bench,
    key: Key,
    pub(super) stored: StoredKey,
    pub(super) now: u64,
}

impl Rows {
    /// The server of the simulation gets the same calls.
    fn start(name: &str) -> Self {
        Self::on(Bench::start_beside_simulation(), name)
    }

    /// The test also writes to the server directly.
    pub(super) fn alone(name: &str) -> Self {
        Self::on(Bench::start(), name)
    }

    fn on(bench: Bench, name: &str) -> Self {
        let key = Key::of(name).unwrap();
        let stored = bench.space.key(&policy(1), &key);
        Self { bench, key, stored, now: BEGIN }
    }

    fn ask(&mut self, request: &WireRequest) -> Answered {
        self.bench.ask(&[(Timestamp::from_micros(self.now), request)]).remove(0)
    }

    pub(super) fn charge(
        &mut self,
        operation: WireOperation,
        limit: u64,
        cost: u64,
        effect: Effect,
        claim: Claim,
    ) -> Answered {
        let policy = policy(limit);
        let charge = Charge::new(&policy, &self.key).cost(cost).effect(effect);
        let request = WireRequest::claiming(operation, std::iter::once((&charge, &self.stored, claim)));
        self.ask(&request)
    }

    fn take(&mut self, limit: u64, claim: Claim) -> Answered {
        self.charge(WireOperation::Take, limit, 1, Effect::Enforce, claim)
    }

    pub(super) fn return_units(&mut self, units: u64, claim: Claim) -> Answered {
        let StoredKey { bytes, slot } = self.stored.clone();
        self.ask(&WireRequest::return_units(&Return { key: HeldKey { bytes, slot, policy: policy(1) }, units, claim }))
    }

    pub(super) fn reset(&mut self) -> Answered {
        self.ask(&WireRequest::reset(&policy(1), &self.stored.clone()))
    }

    /// Returns how many units are held.
    fn held(&mut self) -> u64 {
        // As one that no request in line holds back.
        let answer = self.charge(WireOperation::Peek, 1_000_000, 0, Effect::Enforce, first(0, 0, 1 << 40));
        let Ok(RedisAnswer::Decided(decision)) = answer else { panic!("a peek is decided: {answer:?}") };
        1_000_000 - decision.charges()[0].remaining()
    }
}

fn is_allowed(answer: &Answered) -> bool {
    matches!(answer, Ok(RedisAnswer::Decided(decision)) if decision.is_allowed())
}

#[test]
fn call_of_an_earlier_epoch_is_refused() {
    let mut rows = Rows::start("earlier");
    assert!(is_allowed(&rows.take(3, claim(7, 1, 0))));
    // Its next call was sent, and its answer did not come. So an epoch begins.
    assert!(is_allowed(&rows.take(3, claim(7, 2, 1))));
    assert_eq!(rows.held(), 2);
    for late in [rows.take(3, claim(7, 1, 0)), rows.return_units(1, claim(7, 1, 0))] {
        assert!(matches!(late, Ok(RedisAnswer::Refused(0, CurrentRow { resets: 0, epoch: 2 }))), "{late:?}");
    }
    assert_eq!(rows.held(), 2);
    assert!(is_allowed(&rows.take(3, claim(8, 1, 0))), "another process has epochs of its own");
    assert_eq!(rows.held(), 3);
}

#[test]
fn first_call_of_an_epoch_sets_the_row_to_its_base() {
    let mut rows = Rows::start("base");
    assert!(is_allowed(&rows.take(9, claim(7, 1, 0))));
    rows.return_units(0, claim(7, 2, 5)).unwrap();
    assert_eq!(rows.held(), 5);
    rows.return_units(2, claim(7, 2, 5)).unwrap();
    assert_eq!(rows.held(), 3, "the second call of an epoch counts from the row");
    assert!(!is_allowed(&rows.take(4, claim(7, 3, 4))));
    assert_eq!(rows.held(), 4, "a refused call reports what is held anyway");
    let missing = rows.return_units(0, claim(8, 1, 2));
    assert!(matches!(missing, Ok(RedisAnswer::Missing)), "{missing:?}");
    assert_eq!(rows.held(), 6, "it is taken by force");
}

#[test]
fn row_without_units_stays_if_its_absence_says_otherwise() {
    let mut rows = Rows::start("empty");
    rows.return_units(0, claim(7, 2, 1)).unwrap();
    rows.return_units(1, claim(7, 2, 1)).unwrap();
    rows.return_units(0, claim(7, 2, 1)).unwrap();
    assert_eq!(rows.held(), 0, "the base counts once");
    rows.return_units(0, Claim { keeps_row: true, ..claim(7, 3, 0) }).unwrap();
    assert!(matches!(rows.take(1, claim(7, 1, 0)), Ok(RedisAnswer::Refused(..))));
    rows.return_units(0, claim(7, 4, 0)).unwrap();
    let exists: bool = redis::cmd("EXISTS").arg(&*rows.stored.bytes).query(&mut rows.bench.connection).unwrap();
    assert!(!exists);
}

#[test]
fn rows_lapse_one_by_one_and_a_reset_is_counted_in_each() {
    let mut rows = Rows::start("lapse");
    for holder in 1..=3 {
        assert!(is_allowed(&rows.take(3, claim(holder, 1, 0))));
        rows.now += LAPSE_US / 3;
    }
    assert_eq!(rows.held(), 2, "the first has lapsed");
    assert!(is_allowed(&rows.take(3, claim(9, 1, 0))));
    rows.reset().unwrap();
    assert_eq!(rows.held(), 0);
    let late = rows.return_units(0, claim(2, 2, 1));
    assert!(matches!(late, Ok(RedisAnswer::Refused(0, CurrentRow { resets: 1, epoch: 1 }))), "{late:?}");
    assert!(is_allowed(&rows.take(3, Claim { resets: 1, ..claim(2, 2, 0) })));
    rows.now += 2 * LAPSE_US;
    assert_eq!(rows.held(), 0);
    // The server's clock steps back by a year, and nothing is held for a year because of that.
    assert!(is_allowed(&rows.take(3, claim(9, 2, 0))));
    rows.now -= 365 * 86_400_000_000;
    assert!(is_allowed(&rows.take(3, claim(8, 2, 0))));
    rows.now += 86_400_000_001;
    assert_eq!(rows.held(), 0);
}

#[test]
fn request_that_has_waited_for_longest_is_served_first() {
    let mut rows = Rows::start("line");
    let pass = |rows: &mut Rows, micros: u64| rows.now += micros;
    assert!(is_allowed(&rows.take(1, claim(7, 1, 0))));
    assert!(!is_allowed(&rows.take(1, first(8, 1, 0))));
    pass(&mut rows, 100);
    assert!(!is_allowed(&rows.take(1, first(9, 1, 0))));
    rows.return_units(1, claim(7, 1, 0)).unwrap();
    assert_eq!(rows.held(), 0);

    // Only the first one gets it: no newcomer of any holder, and none that has waited for less.
    for later in [claim(7, 1, 0), claim(8, 1, 0), claim(9, 1, 0), first(9, 1, 100)] {
        let answer = rows.take(1, later);
        let Ok(RedisAnswer::Decided(decision)) = &answer else { panic!("{answer:?}") };
        let status = &decision.charges()[0];
        assert_eq!((status.is_allowed(), status.remaining(), status.wait()), (false, 0, Wait::Unknown), "{later:?}");
    }
    let held_back = Claim { standing: Standing::HeldBack, ..claim(8, 1, 0) };
    assert!(!is_allowed(&rows.take(1, held_back)));
    assert!(is_allowed(&rows.charge(WireOperation::Take, 1, 0, Effect::Enforce, claim(7, 1, 0))), "a cost of 0 looks");
    pass(&mut rows, 100);
    assert!(is_allowed(&rows.take(1, first(8, 1, 100))), "its first word counts, whatever it says later");
    assert_eq!(rows.held(), 1);

    // The second one is the first now. Its holder's next request begins anew.
    rows.return_units(1, claim(8, 1, 0)).unwrap();
    assert!(!is_allowed(&rows.take(1, first(8, 2, 50))));
    assert!(is_allowed(&rows.take(1, first(9, 1, 200))));
    assert!(
        is_allowed(&rows.charge(WireOperation::Take, 1, 1, Effect::Force, claim(7, 1, 0))),
        "a forced charge waits for none"
    );
    rows.return_units(1, claim(9, 1, 0)).unwrap();
    rows.return_units(1, claim(7, 1, 0)).unwrap();

    // One that asks no more is forgotten.
    assert!(!is_allowed(&rows.take(1, claim(9, 1, 0))));
    pass(&mut rows, STAYS_US);
    assert!(is_allowed(&rows.take(1, claim(9, 1, 0))));
}

#[test]
fn units_are_kept_only_for_requests_that_came_before() {
    let mut rows = Rows::start("kept");
    let ask =
        |rows: &mut Rows, cost, claim| is_allowed(&rows.charge(WireOperation::Take, 5, cost, Effect::Enforce, claim));
    assert!(ask(&mut rows, 3, claim(7, 1, 0)));
    assert!(!ask(&mut rows, 3, first(8, 1, 100)));
    // Two are free, and the first in line needs three.
    assert!(!ask(&mut rows, 1, first(9, 1, 50)));
    rows.return_units(3, claim(7, 1, 0)).unwrap();
    assert!(!ask(&mut rows, 3, claim(7, 1, 0)));
    assert!(!ask(&mut rows, 2, claim(7, 1, 0)), "one is kept for the second in line");
    assert!(ask(&mut rows, 1, claim(7, 1, 0)));
    assert!(ask(&mut rows, 1, first(9, 1, 50)) && ask(&mut rows, 3, first(8, 1, 100)));
}

#[test]
fn peek_takes_no_turn_in_line() {
    let mut rows = Rows::start("peek in line");
    assert!(is_allowed(&rows.take(1, claim(7, 1, 0))));
    assert!(!is_allowed(&rows.charge(WireOperation::Peek, 1, 1, Effect::Enforce, first(8, 1, 0))));
    rows.return_units(1, claim(7, 1, 0)).unwrap();
    assert!(is_allowed(&rows.take(1, claim(7, 1, 0))), "nobody waits");
    assert!(!is_allowed(&rows.take(1, first(8, 1, 0))));
    rows.return_units(1, claim(7, 1, 0)).unwrap();
    assert!(!is_allowed(&rows.charge(WireOperation::Peek, 1, 1, Effect::Enforce, claim(9, 1, 0))));
    assert!(is_allowed(&rows.charge(WireOperation::Peek, 1, 1, Effect::Enforce, first(8, 1, 0))));
    assert!(is_allowed(&rows.take(1, first(8, 1, 0))));
}

#[test]
fn holder_that_leaves_the_line_is_forgotten_at_once() {
    let mut rows = Rows::start("leaves");
    assert!(is_allowed(&rows.take(2, claim(7, 1, 0))));
    for holder in [8, 9] {
        assert!(!is_allowed(&rows.charge(WireOperation::Take, 2, 2, Effect::Enforce, first(holder, 1, 100))));
    }
    let left = |holder| Claim { standing: Standing::Left, ..claim(holder, 1, 0) };
    rows.return_units(0, left(8)).unwrap();
    assert!(!is_allowed(&rows.take(2, claim(6, 1, 0))), "one is free, but the other holder waits");
    rows.return_units(0, left(7)).unwrap();
    assert_eq!(rows.held(), 1, "what it holds stays");
    rows.return_units(0, left(9)).unwrap();
    assert!(is_allowed(&rows.take(2, claim(6, 1, 0))));
    rows.return_units(1, claim(6, 1, 0)).unwrap();
    rows.return_units(1, claim(7, 1, 0)).unwrap();
    assert!(is_allowed(&rows.take(1, claim(6, 1, 0))));
    assert!(!is_allowed(&rows.take(1, first(8, 2, 0))));
    rows.now += LAPSE_US - 1;
    rows.return_units(1, claim(6, 1, 0)).unwrap();
    rows.return_units(0, left(8)).unwrap();
    let exists: bool = redis::cmd("EXISTS").arg(&*rows.stored.bytes).query(&mut rows.bench.connection).unwrap();
    assert!(!exists, "nothing is held, and nobody waits");
}

/// The first request in line of each holder: since when it waits, its number, when its entry lapses, and its cost.
type ModelLine = BTreeMap<u64, (u64, u32, u64, u64)>;

/// Requests of four holders that wait, ask again, leave and come anew, against the plain definition.
#[test]
fn line_is_what_the_calls_say() {
    let rows = RefCell::new(Rows::alone("line model"));
    let step = (0..11_u8, 1..5_u64, 0..3_u32, 0..2_000_u64, 1..3_u64, 0..400_000_u64);
    proptest!(config(400), |(steps in prop::collection::vec(step, 1..80))| queue(&mut rows.borrow_mut(), steps)?);
}

fn queue(rows: &mut Rows, steps: Vec<(u8, u64, u32, u64, u64, u64)>) -> Result<(), TestCaseError> {
    redis::cmd("FLUSHALL").exec(&mut rows.bench.connection).unwrap();
    rows.now = BEGIN;
    let (mut line, mut held): (ModelLine, BTreeMap<u64, u64>) = Default::default();
    for (what, holder, number, waited, cost, passes) in steps {
        rows.now += if what < 3 { passes } else { passes % 100 };
        let now = rows.now;
        line.retain(|_, (_, _, until, _)| *until > now);
        let claim = match what {
            9 => {
                let has = held.remove(&holder).unwrap_or(0);
                rows.return_units(has, claim(holder, 1, 0)).map_err(|error| TestCaseError::fail(error.to_string()))?;
                continue;
            }
            10 => {
                let left = Claim { standing: Standing::Left, ..claim(holder, 1, 0) };
                rows.return_units(0, left).map_err(|error| TestCaseError::fail(error.to_string()))?;
                line.remove(&holder);
                prop_assert_eq!(rows.held(), held.values().sum::<u64>());
                continue;
            }
            8 => Claim { standing: Standing::HeldBack, ..claim(holder, 1, 0) },
            7 => claim(holder, 1, 0),
            _ => first(holder, number, waited),
        };
        let own = line.get(&holder).copied();
        let since = match claim.standing {
            Standing::First(_) => own.filter(|own| own.1 == number).map_or(now - waited, |own| own.0),
            _ => now + 1, // later than all that wait
        };
        let before = line.iter().filter(|(other, (first, ..))| **other != holder && *first < since);
        let kept: u64 = before.map(|(_, (.., cost))| cost).sum();
        let passes = what != 8 && held.values().sum::<u64>() + kept + cost <= 3;
        let operation = if what == 0 { WireOperation::Peek } else { WireOperation::Take };
        let answer = rows.charge(operation, 3, cost, Effect::Enforce, claim);
        prop_assert_eq!(is_allowed(&answer), passes, "{:?} {:?} {:?}", claim, line, answer);
        if operation == WireOperation::Peek {
            continue;
        }
        if passes {
            *held.entry(holder).or_default() += cost;
        }
        if matches!(claim.standing, Standing::First(_)) {
            line.remove(&holder);
            if !passes {
                line.insert(holder, (since, number, now + STAYS_US, cost));
            }
        }
        prop_assert_eq!(rows.held(), held.values().sum::<u64>());
    }
    rows.bench.check_ttls();
    Ok(())
}

#[test]
fn value_that_holds_no_rows_is_foreign() {
    let mut rows = Rows::alone("foreign");
    for value in ["x", "\u{aa}", "\u{aa}0123456789"] {
        redis::cmd("SET").arg(&*rows.stored.bytes).arg(value).exec(&mut rows.bench.connection).unwrap();
        let error = rows.take(3, claim(1, 1, 0)).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Foreign, "{error}");
    }
    redis::cmd("DEL").arg(&*rows.stored.bytes).exec(&mut rows.bench.connection).unwrap();
    redis::cmd("RPUSH").arg(&*rows.stored.bytes).arg("x").exec(&mut rows.bench.connection).unwrap();
    let error = rows.take(3, claim(1, 1, 0)).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Foreign, "{error}");
}

/// A row of the model: resets, epoch, units, and when it lapses.
type ModelRow = (u32, u64, u64, u64);

/// Calls of four holders, in any order of their epochs, against the plain definition.
#[test]
fn rows_are_what_the_calls_say() {
    let rows = RefCell::new(Rows::alone("model"));
    let step = (0..8_u8, 1..5_u64, 0..4_u64, 0..4_u64, 0..3_u64, 0..12_000_000_u64);
    proptest!(config(400), |(steps in prop::collection::vec(step, 1..80))| play(&mut rows.borrow_mut(), steps)?);
}

fn play(rows: &mut Rows, steps: Vec<(u8, u64, u64, u64, u64, u64)>) -> Result<(), TestCaseError> {
    redis::cmd("FLUSHALL").exec(&mut rows.bench.connection).unwrap();
    rows.now = BEGIN;
    let mut model: BTreeMap<u64, ModelRow> = BTreeMap::new();
    for (what, holder, epoch, base, cost, passes) in steps {
        rows.now += passes;
        let now = rows.now;
        model.retain(|_, row| row.3 > now);
        let resets = u32::from(base == 3);
        let claim = Claim { resets, keeps_row: base == 0, ..claim(holder, epoch, base) };
        let held: u64 = model.values().map(|row| row.2).sum();
        prop_assert_eq!(rows.held(), held);
        if what == 7 {
            rows.reset().unwrap();
            model.values_mut().for_each(|row| (row.0, row.2) = (row.0 + 1, 0));
            continue;
        }
        let row = model.get(&holder).copied();
        let stale = row.filter(|row| (row.0, row.1) > (resets, epoch));
        let before = row.filter(|row| (row.0, row.1) == (resets, epoch)).map_or(base, |row| row.2);
        let others = held - row.map_or(0, |row| row.2);
        let force = what == 6;
        let (answer, is_written, after) = if what < 3 {
            (rows.return_units(cost, claim), true, before.saturating_sub(cost))
        } else {
            let effect = if force { Effect::Force } else { Effect::Enforce };
            let fits = force || cost <= 5_u64.saturating_sub(others + before);
            let is_moved = row.map_or(base > 0 || claim.keeps_row, |row| (row.0, row.1) != (resets, epoch));
            let answer = rows.charge(WireOperation::Take, 5, cost, effect, claim);
            if stale.is_none() {
                prop_assert_eq!(is_allowed(&answer), fits, "{:?}", answer);
            }
            let after = if fits { before + cost } else { before };
            (answer, is_moved || after != before, after)
        };
        match stale {
            Some((resets, epoch, ..)) => {
                let refused = matches!(answer, Ok(RedisAnswer::Refused(0, row)) if row == CurrentRow { resets, epoch });
                prop_assert!(refused, "{:?}", answer);
            }
            None if !is_written => {}
            None => {
                answer.map_err(|error| TestCaseError::fail(error.to_string()))?;
                // A row is only made if it says something.
                if row.is_some() || after > 0 || claim.keeps_row || base > 0 {
                    model.insert(holder, (resets, epoch, after, now + LAPSE_US));
                }
            }
        }
    }
    rows.bench.check_ttls();
    Ok(())
}

/// Prints what rows cost the server. `PLACES_TABLE=1` asks for it.
#[test]
fn cost_of_rows_is_measured() {
    let rounds = if std::env::var("PLACES_TABLE").is_ok() { 20_000 } else { 10 };
    let mut rows = Rows::alone("cost");
    // The time of the server's processor, which is the same on a busy machine.
    let used = |rows: &mut Rows| {
        let info: String = redis::cmd("INFO").arg("cpu").query(&mut rows.bench.connection).unwrap();
        let of = |line: &str| line.split_once(':').unwrap().1.trim().parse::<f64>().unwrap();
        let lines = info.lines().filter(|line| line.starts_with("used_cpu_user:") || line.starts_with("used_cpu_sys:"));
        lines.map(of).sum::<f64>() * 1e6
    };
    let spent = |rows: &mut Rows, requests: &[WireRequest]| {
        let asks: Vec<_> =
            requests.iter().map(|request| super::call(&[request], super::NUMBER, super::NO_WINDOW)).collect();
        rows.bench.run(&asks[..10.min(asks.len())]); // loads the script
        let before = used(rows);
        rows.bench.run(&asks);
        (used(rows) - before) / requests.len() as f64
    };
    let bucket = Policy::new("bucket", Quota::per_second(1_000_000)).unwrap();
    let key = Key::global();
    let stored = rows.bench.space.key(&bucket, &key);
    let checks: Vec<WireRequest> = (0..rounds)
        .map(|_| WireRequest::charge(WireOperation::Take, std::iter::once((&Charge::new(&bucket, &key), &stored))))
        .collect();
    println!("token bucket: {:.1} us a check", spent(&mut rows, &checks));
    let name = |holder: u64| mixed(holder) >> 11; // as processes choose theirs
    let mut holders = 0;
    for processes in [1, 4, 50, 200, 256] {
        while holders < processes {
            holders += 1;
            let StoredKey { bytes, slot } = rows.stored.clone();
            let key = HeldKey { bytes, slot, policy: policy(1) };
            let row = WireRequest::return_units(&Return { key, units: 0, claim: claim(name(holders), 1, 1) });
            // At the server's time, as those below.
            rows.bench.run(&[super::call(&[&row], super::NUMBER, super::NO_WINDOW)]);
        }
        let policy = policy(10_000);
        let (mut takes, mut returns) = (Vec::new(), Vec::new());
        for round in 0..rounds {
            let claim = claim(name(1 + round % processes), 1, 1);
            let charge = Charge::new(&policy, &rows.key);
            takes.push(WireRequest::claiming(WireOperation::Take, std::iter::once((&charge, &rows.stored, claim))));
            let StoredKey { bytes, slot } = rows.stored.clone();
            let key = HeldKey { bytes, slot, policy: policy.clone() };
            returns.push(WireRequest::return_units(&Return { key, units: 1, claim }));
        }
        let (take, back) = (spent(&mut rows, &takes), spent(&mut rows, &returns));
        let bytes: u64 = redis::cmd("STRLEN").arg(&*rows.stored.bytes).query(&mut rows.bench.connection).unwrap();
        println!("{processes} processes: {bytes} bytes, {take:.1} us to take, {back:.1} us to return");
    }
}
