//! Waiting requests keep their promised departure while the limiter's clock or the mode changes.

use http::StatusCode;
use proptest::prelude::*;
use tower_ratelimit::{
    Mode, RateLimitLayer, Rule,
    clock::{Clock, Timestamp},
    key,
    middleware::ModeSwitch,
};

use crate::support::config;
use crate::support::shop::{MS, Shop, queue};

const INTERVAL_US: u64 = 10 * MS;

/// The places of the queue, and the request that departs at once.
const LENGTH: u64 = 5;
const CAPACITY: u64 = LENGTH + 1;

/// The limiter's clock steps, and the timer of waiting requests does not.
fn step_clock(shop: &Shop, by_us: i64) {
    let now_us = shop.world.clock.now().as_micros();
    shop.world.clock.set(Timestamp::from_micros(now_us.saturating_add_signed(by_us)));
}

const HOUR_US: i64 = 3_600_000_000;

#[test]
fn waiting_request_departs_as_promised_when_the_clock_steps() {
    for by_us in [-HOUR_US, -15_000, 15_000, HOUR_US] {
        let mut shop = Shop::new(queue(LENGTH));
        step_clock(&shop, 2 * HOUR_US);
        let layer = shop.layer();
        for _ in 0..4 {
            shop.send(&layer);
        }
        shop.world.pass(5 * MS);
        step_clock(&shop, by_us);
        shop.world.pass(95 * MS);
        let expected: Vec<_> = (0..4).map(|place| (place, place as u64 * INTERVAL_US)).collect();
        assert_eq!(shop.departed(), expected, "stepped by {by_us} µs");
    }
}

#[test]
fn clock_step_forward_counts_as_time_that_passed() {
    // The last waiting request departs at 20 ms, so the next one would depart at 30 ms.
    let at_once = [(0, 0), (3, 5 * MS), (1, 10 * MS), (2, 20 * MS)];
    // It gets the last place of the line.
    let in_line = [(0, 0), (1, 10 * MS), (2, 15 * MS), (3, 20 * MS)];
    for (by_us, expected) in [(HOUR_US, at_once), (15_000, in_line)] {
        let mut shop = Shop::new(queue(LENGTH));
        let layer = shop.layer();
        for _ in 0..3 {
            shop.send(&layer);
        }
        shop.world.pass(5 * MS);
        step_clock(&shop, by_us);
        shop.send(&layer);
        shop.world.pass(100 * MS);
        assert_eq!(shop.departed(), expected, "stepped by {by_us} µs");
    }
}

#[test]
fn clock_step_back_closes_the_queue_for_one_drain_at_most() {
    let mut shop = Shop::new(queue(LENGTH));
    step_clock(&shop, 2 * HOUR_US);
    let layer = shop.layer();
    shop.send(&layer);
    step_clock(&shop, -HOUR_US);
    let owed_us = 2 * CAPACITY * INTERVAL_US; // by default as much as the capacity, besides it
    let mut refused_us = 0;
    loop {
        let sent = shop.send(&layer);
        if shop.world.done[sent] != Some(StatusCode::TOO_MANY_REQUESTS) {
            break;
        }
        shop.world.pass(INTERVAL_US);
        refused_us += INTERVAL_US;
        assert!(refused_us <= owed_us, "still refused after {refused_us} µs");
    }
    // It is admitted as the last request of a full queue.
    assert_eq!(refused_us, owed_us - LENGTH * INTERVAL_US);
    shop.world.pass(LENGTH * INTERVAL_US);
    assert_eq!(shop.departed().last().unwrap().1, owed_us);
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Send,
    Leave(prop::sample::Index),
    Pass(u64),
    Clock(i64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let far = prop_oneof![3 => -100_000..100_000_i64, 1 => -HOUR_US..HOUR_US];
    let step = prop_oneof![
        8 => Just(Step::Send),
        1 => any::<prop::sample::Index>().prop_map(Step::Leave),
        4 => (0..35 * MS).prop_map(Step::Pass),
        1 => far.prop_map(Step::Clock),
    ];
    prop::collection::vec(step, 1..120)
}

proptest! {
    #![proptest_config(config(150))]

    /// Departures between two steps forward are spaced. An interval may have one departure more per
    /// step forward, and no more if the clock only stepped back.
    #[test]
    fn clock_steps_stall_no_request_and_keep_the_spacing(steps in steps()) {
        let mut shop = Shop::new(queue(LENGTH));
        step_clock(&shop, 2 * HOUR_US);
        let layer = shop.layer();
        let (mut sent_us, mut left, mut forward) = (Vec::new(), Vec::new(), 0);
        for step in steps {
            match step {
                Step::Send => {
                    sent_us.push(shop.world.timer.now_us());
                    shop.send(&layer);
                }
                Step::Leave(which) if !sent_us.is_empty() => {
                    let which = which.index(sent_us.len());
                    left.push(which);
                    shop.world.cancel(which);
                }
                Step::Leave(_) => {}
                Step::Pass(us) => shop.world.pass(us),
                Step::Clock(by_us) => {
                    step_clock(&shop, by_us);
                    forward += usize::from(by_us > 0);
                }
            }
        }
        shop.world.pass(LENGTH * INTERVAL_US);
        prop_assert_eq!(layer.waiting(), 0, "nobody waits for longer than the queue is long");
        let departed = shop.departed();
        for (number, at_us) in &departed {
            prop_assert!(at_us - sent_us[*number] <= LENGTH * INTERVAL_US, "{number} of {departed:?}");
        }
        for window in departed.windows(forward + 2) {
            let span_us = window.last().unwrap().1 - window[0].1;
            prop_assert!(span_us >= INTERVAL_US, "{forward} steps forward: {departed:?}");
        }
        for number in 0..sent_us.len() {
            prop_assert!(left.contains(&number) || shop.world.done[number].is_some(), "{number} stalls");
        }
        // Whatever the clock did, one full drain later the queue is as if unused.
        shop.send(&layer);
        shop.world.pass(2 * CAPACITY * INTERVAL_US);
        let (now_us, last) = (shop.world.timer.now_us(), shop.send(&layer));
        prop_assert_eq!(shop.departed().last().copied(), Some((last, now_us)));
    }
}

#[test]
fn mode_switch_applies_to_requests_that_come_afterwards() {
    let mut shop = Shop::new(queue(9));
    let mode = ModeSwitch::default();
    let rule = Rule::from(shop.policy.clone()).mode(mode.clone());
    let layer = RateLimitLayer::new(shop.limiter.clone(), rule, key::global()).timer(shop.world.timer.clone());
    for _ in 0..4 {
        shop.send(&layer);
    }
    shop.world.pass(5 * MS);
    // A request that does not wait still takes a place: the queue decides alike in every mode.
    mode.set(Mode::Shadow);
    let shadow = shop.send(&layer);
    mode.set(Mode::Degrade);
    let degraded = shop.send(&layer);
    assert_eq!((layer.waiting(), shop.remaining()), (3, 4));
    mode.set(Mode::Enforce);
    let last = shop.send(&layer);
    assert_eq!(layer.waiting(), 4);
    mode.set(Mode::Shadow);
    shop.world.pass(100 * MS);
    let at_once = [(0, 0), (shadow, 5 * MS), (degraded, 5 * MS)];
    let waited = [(1, 10 * MS), (2, 20 * MS), (3, 30 * MS), (last, 60 * MS)];
    assert_eq!(shop.departed(), [&at_once[..], &waited].concat());
}

#[test]
fn request_that_leaves_after_a_mode_switch_frees_its_place() {
    let mut shop = Shop::new(queue(9));
    let mode = ModeSwitch::default();
    let layer = shop.layer().mode(mode.clone());
    for _ in 0..4 {
        shop.send(&layer);
    }
    mode.set(Mode::Shadow);
    shop.world.cancel(2);
    assert_eq!(shop.remaining(), 7, "the last place is free again");
    shop.world.pass(100 * MS);
    assert_eq!(shop.departed(), [(0, 0), (1, 10 * MS), (3, 20 * MS)]);
}
