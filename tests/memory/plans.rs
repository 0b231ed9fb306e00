//! A key whose plan changes each second, over an hour.

use std::time::Duration;

use tower_ratelimit::{Key, MemoryLimiter, Policy, Rule, clock::ManualClock};

use crate::support::{every_algorithm, stride};

const MINUTE: Duration = Duration::from_secs(60);
const SECOND: Duration = Duration::from_secs(1);

/// Returns how many units pass in an hour under two plans in turn, if each second asks for this
/// many, one by one, until one is refused.
fn passed(plans: [&Policy; 2], asked: u64) -> u64 {
    let clock = ManualClock::new();
    let limiter = MemoryLimiter::builder().max_keys(100).clock(clock.clone()).build().expect("the setup is possible");
    let mut passed = 0;
    for second in 0..3_600 {
        let plan = plans[second % 2];
        passed += (0..asked).take_while(|_| limiter.take_one(plan, &Key::global(), 1).is_allowed()).count() as u64;
        clock.advance(SECOND);
    }
    passed
}

#[test]
fn plans_that_alternate_pass_what_lies_between_the_two() {
    for (small, large) in [(10, 20), (1, 20), (59, 61)] {
        let kinds = every_algorithm(small, MINUTE).into_iter().zip(every_algorithm(large, MINUTE));
        for (small, large) in kinds.step_by(stride()) {
            let rule = Rule::plans("plan", [small, large], |_| 0).expect("the plans are possible");
            let [small, large] = rule.policies() else { panic!("two plans") };
            for asked in [1, 30] {
                let [least, most] = [small, large].map(|plan| passed([plan; 2], asked));
                for order in [[small, large], [large, small]] {
                    let passed = passed(order, asked);
                    assert!(
                        (least.saturating_sub(1)..=most + 1).contains(&passed),
                        "{passed}, not {least} to {most}: {} and {}, {asked} asked",
                        small.quota(),
                        large.quota()
                    );
                }
            }
        }
    }
}

#[test]
fn plans_of_two_algorithms_pass_no_more_than_the_larger() {
    let (tens, twenties) = (every_algorithm(10, MINUTE), every_algorithm(20, MINUTE));
    let pairs = tens.iter().flat_map(|ten| twenties.iter().map(move |twenty| [*ten, *twenty]));
    for pair in pairs.step_by(stride()) {
        let rule = Rule::plans("plan", pair, |_| 0).expect("the plans are possible");
        let [small, large] = rule.policies() else { panic!("two plans") };
        let [ten, twenty] = [small, large].map(|plan| passed([plan; 2], 2));
        let passed = passed([small, large], 2);
        let (least, most) = (ten.min(twenty) / 2, ten.max(twenty) * 21 / 20);
        assert!(
            (least..=most).contains(&passed),
            "{passed}, not {least} to {most}: {} and {}",
            small.quota(),
            large.quota()
        );
    }
}
