//! Limiters on a Redis whose calendar steps, in a process whose calendar steps with it.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tower_ratelimit::limiter::{Charge, Limiter};
use tower_ratelimit::quota::Calendar;
use tower_ratelimit::{Key, Policy, Quota, RedisLimiter};

use crate::support::redis_limiter::{LONG, connected};
use crate::support::redis_server::Server;
use crate::support::stepped_clock::SteppedClock;

/// 2031-01-31 23:59:00 UTC. February follows.
const BEFORE_FEBRUARY_S: i64 = 1_927_670_340;

const DAY_S: u64 = 86_400;

struct Plan {
    limiter: RedisLimiter,
    policy: Policy,
    key: Key,
}

impl Plan {
    fn new(limiter: &RedisLimiter, name: &str, calendar: Calendar) -> Self {
        let quota = Quota::calendar(5, calendar).expect("it is possible");
        let policy = Policy::new(name, quota).expect("it is a name");
        Self { limiter: limiter.clone(), policy, key: Key::global() }
    }

    /// Takes a unit if it can. Returns whether it did, and the seconds until the window ends.
    async fn take(&self) -> (bool, u64) {
        let decision = self.limiter.take(&[Charge::new(&self.policy, &self.key)]).await.expect("Redis is there");
        let reset = decision.charges()[0].reset_after();
        (decision.is_allowed(), reset.map_or(0, |reset| reset.as_secs()))
    }

    /// Takes what is left, and returns it.
    async fn drain(&self) -> usize {
        let mut taken = 0;
        for _ in 0..8 {
            taken += usize::from(self.take().await.0);
        }
        taken
    }

    /// Waits until Redis has another window. A denial is remembered for a second at most.
    async fn expect(&self, what: &str, is_it: impl Fn((bool, u64)) -> bool) {
        let began = Instant::now();
        loop {
            let found = self.take().await;
            if is_it(found) {
                return;
            }
            assert!(began.elapsed() < LONG, "{what} is not there: {found:?}");
            sleep(Duration::from_millis(5)).await;
        }
    }
}

#[tokio::test]
async fn calendar_of_redis_that_steps_is_followed() {
    let Some(clock) = SteppedClock::of_test("stepped_clock::calendar_of_redis_that_steps_is_followed") else { return };
    clock.set(BEFORE_FEBRUARY_S);
    let server = Server::start();
    let limiter = connected(RedisLimiter::builder().deadline(Duration::from_secs(20)), &server.url()).await;
    let monthly = Plan::new(&limiter, "monthly", Calendar::month());
    assert_eq!(monthly.drain().await, 5);
    assert!(monthly.take().await.1 <= 60, "it is the last minute of January");

    clock.step(120);
    monthly.expect("February", |(is_taken, reset_s)| is_taken && reset_s > 27 * DAY_S).await;
    assert_eq!(monthly.drain().await, 4, "one of five was taken");

    // Back to January: what was used in February stays used, and January is not given again.
    clock.step(-120);
    for _ in 0..8 {
        let (is_taken, reset_s) = monthly.take().await;
        assert!(!is_taken && reset_s <= 29 * DAY_S, "{reset_s}");
    }

    // The machine is suspended at 20:00, and wakes at 4:00 on the next day.
    clock.set(BEFORE_FEBRUARY_S + 60 + 20 * 3_600);
    let daily = Plan::new(&limiter, "daily", Calendar::day());
    assert_eq!(daily.drain().await, 5);
    assert!(daily.take().await.1 <= 4 * 3_600, "it is the evening");
    clock.step(8 * 3_600);
    daily.expect("the next day", |(is_taken, reset_s)| is_taken && reset_s > 19 * 3_600).await;
    assert_eq!(daily.drain().await, 4, "one of five was taken");

    // A process that begins while Redis' calendar is wrong by years, and is then corrected.
    clock.set(5);
    let late = Plan::new(&limiter, "late", Calendar::month());
    assert_eq!(late.drain().await, 5);
    assert!(late.take().await.1 > 30 * DAY_S, "it is January 1970");
    clock.set(BEFORE_FEBRUARY_S);
    late.expect("the correction", |(is_taken, reset_s)| is_taken && reset_s <= 60).await;
    assert_eq!(late.drain().await, 4, "one of five was taken");
}
