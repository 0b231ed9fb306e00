//! What takes nothing writes nothing: the limiter's snapshot stays as it is, byte for byte.

use std::time::Duration;

use tower_ratelimit::{
    Anchor, Charge, Effect, Key, ManualClock, MemoryLimiter, Oldest, Policy, Quota, Receipt, Refund,
};

const MINUTE: Duration = Duration::from_secs(60);

/// A plan of each kind and of each layout.
fn plans(limit: u64) -> Vec<Quota> {
    let window = Quota::sliding_window(limit, MINUTE).unwrap();
    vec![
        Quota::token_bucket(limit, MINUTE).unwrap(),
        // Its states do not fit a word.
        Quota::token_bucket(limit * 4_001, Duration::from_micros(240_060_000_001))
            .and_then(|plan| plan.burst(limit))
            .unwrap(),
        // A bucket that drains sooner than another plan's units come back takes them over when it denies.
        Quota::gcra(limit, MINUTE).and_then(|plan| plan.max_debt(20)).unwrap(),
        Quota::leaky_bucket(limit, MINUTE).unwrap(),
        Quota::leaky_queue(limit, MINUTE).unwrap(),
        Quota::step_bucket(limit, MINUTE).unwrap(),
        Quota::step_bucket(limit, MINUTE).and_then(|plan| plan.anchor(Anchor::FirstRequest)).unwrap(),
        Quota::fixed_window(limit, MINUTE).unwrap(),
        Quota::fixed_window(limit, MINUTE).and_then(|plan| plan.anchor(Anchor::FirstRequest)).unwrap(),
        window,
        window.oldest(Oldest::Counted).unwrap(),
        window.buckets(6).unwrap(),
        Quota::sliding_log(limit, MINUTE).unwrap(),
        Quota::block(limit, MINUTE, MINUTE).unwrap(),
        Quota::meter(limit, MINUTE).unwrap(),
    ]
}

/// By law these write all the same: quotas that count denied requests, blocks and meters that refusals are charged to, and a
/// denied charge to a state that lies further ahead than the quota can put it.
#[test]
fn charges_that_take_nothing_leave_the_snapshot_as_it_is() {
    let proportional = || plans(3).into_iter().filter_map(|plan| plan.in_proportion().ok());
    for from in plans(5) {
        for to in std::iter::once(from).chain(plans(3)).chain(proportional()) {
            let clock = ManualClock::new();
            let limiter = MemoryLimiter::builder().capacity(1_000).clock(clock).build().unwrap();
            let key = Key::of("alice").unwrap();
            let [before, after] = [from, to].map(|quota| Policy::new("p", quota).unwrap());
            let other = Policy::new("other", Quota::per_minute(1_000)).unwrap();
            assert!(limiter.take_one(&before, &key, from.capacity().min(5)).is_allowed());
            assert!(limiter.take_one(&other, &key, 1).is_allowed());
            let kept = limiter.snapshot();
            let one = |cost, effect| [Charge::new(&after, &key).cost(cost).effect(effect)];
            let two = |cost| [Charge::new(&other, &key).cost(0), Charge::new(&after, &key).cost(cost)];
            let idle: [(&str, &dyn Fn()); 9] = [
                ("a peek", &|| drop(limiter.peek_one(&after, &key, 1))),
                ("a peek of a set", &|| drop(limiter.peek_now(&two(99)))),
                ("a look", &|| drop(limiter.take_one(&after, &key, 0))),
                ("a look in a set", &|| drop(limiter.take_now(&two(0)))),
                ("a denied take", &|| drop(limiter.take_one(&after, &key, 99))),
                ("a denied set", &|| {
                    drop(limiter.take_now(&[Charge::new(&other, &key), Charge::new(&after, &key).cost(99)]));
                }),
                ("an observed denial", &|| drop(limiter.take_now(&one(99, Effect::Observe)))),
                ("a forced look", &|| drop(limiter.take_now(&one(0, Effect::Force)))),
                ("a refund of nothing", &|| {
                    limiter.refund_now(&[Refund::new(after.clone(), key.clone(), Receipt::new(3, 1, 0))]);
                }),
            ];
            for (what, idle) in idle {
                idle();
                assert!(limiter.snapshot() == kept, "{what} of {to} wrote a state of {from}");
            }
        }
    }
}

/// A charge that is observed and denied leaves its state as it is, also where another charge of its set is taken.
#[test]
fn observed_denials_beside_a_take_leave_their_state_as_it_is() {
    for from in plans(5) {
        for to in plans(3) {
            let limiter = MemoryLimiter::builder().capacity(1_000).clock(ManualClock::new()).build().unwrap();
            let key = Key::of("alice").unwrap();
            let [before, after] = [from, to].map(|quota| Policy::new("p", quota).unwrap());
            let other = Policy::new("other", Quota::per_minute(1_000)).unwrap();
            assert!(limiter.take_one(&before, &key, from.capacity().min(5)).is_allowed());
            let left = limiter.peek_one(&before, &key, 0);
            let observed = Charge::new(&after, &key).cost(99).effect(Effect::Observe);
            assert!(limiter.take_now(&[Charge::new(&other, &key), observed]).is_allowed());
            assert_eq!(limiter.peek_one(&before, &key, 0), left, "{to} wrote a state of {from}");
        }
    }
}
