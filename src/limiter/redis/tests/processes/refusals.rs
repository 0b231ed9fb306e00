//! Eight processes that are refused together: what is counted because of it is exact, and outlives
//! them.

use std::io::Write;
use std::time::Duration;

use super::{CHECKS, LONG, PROCESSES, TASKS, URL, start};
use crate::limiter::redis::limiter::RedisLimiter;
use crate::limiter::redis::redis_server::Server;
use crate::limiter::redis::tests::connected;
use crate::limiter::{Blocks, Charge, Effect, Limiter, Meters};
use crate::quota::{Anchor, Quota};
use crate::{key::Key, policy::Policy};

const DAY: Duration = Duration::from_secs(86_400);
const PASS: u64 = 100;
const STRIKES: u64 = 50;

/// The variable that a process of this test has.
const REFUSED: &str = "RATELIMIT_TEST_REFUSED";

fn policy(name: &str, quota: Quota) -> Policy {
    Policy::new(name, quota).unwrap()
}

/// It begins with the first request, so that it does not end while the test runs.
fn window() -> Quota {
    Quota::fixed_window(PASS, DAY).and_then(|quota| quota.anchor(Anchor::FirstRequest)).unwrap()
}

fn policies() -> [Policy; 4] {
    let block = Quota::block(STRIKES, DAY, DAY).and_then(|block| block.growing(2, 7 * DAY, 30 * DAY));
    [
        policy("tries", window()),
        policy("block", block.unwrap()),
        policy("plan", window()),
        policy("over", Quota::meter(1_000_000, 90 * DAY).unwrap()),
    ]
}

/// Runs as each of the processes. It does nothing in the parent.
#[test]
fn one_of_the_processes() {
    let (Ok(url), Ok(_)) = (std::env::var(URL), std::env::var(REFUSED)) else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let [passed, refused, closed, asked] = runtime.block_on(async {
        // Leases and the memory of denials are on: where refusals are counted they must stay out of
        // the way.
        let builder = RedisLimiter::builder().deadline(LONG).lease_units(50);
        let limiter = connected(builder, &url).await;
        let tasks = (0..TASKS).map(|task| {
            let limiter = limiter.clone();
            tokio::spawn(async move {
                let [tries, block, plan, over] = policies();
                let key = Key::of("one").unwrap();
                let mut counts = [0; 4];
                for check in 0..CHECKS {
                    let on_refusal = Effect::OnRefusal { of: 1 };
                    let login = [Charge::new(&tries, &key), Charge::new(&block, &key).effect(on_refusal)];
                    let decision = limiter.take(&login).await.unwrap();
                    counts[match (decision.is_allowed(), decision.charges()[1].is_allowed()) {
                        (true, _) => 0,
                        (false, true) => 1,
                        (false, false) => 2,
                    }] += 1;
                    let cost = 1 + (task + check) % 3;
                    let plan = Charge::new(&plan, &key).cost(cost).effect(Effect::Observe);
                    let api = [plan, Charge::new(&over, &key).cost(cost).effect(on_refusal)];
                    assert!(limiter.take(&api).await.unwrap().is_allowed());
                    counts[3] += cost;
                }
                counts
            })
        });
        let mut sum = [0; 4];
        for task in tasks.collect::<Vec<_>>() {
            let counts = task.await.unwrap();
            sum.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        }
        sum
    });
    writeln!(std::io::stdout().lock(), "counts {passed} {refused} {closed} {asked}").unwrap();
}

#[test]
fn eight_processes_count_strikes_and_meters_exactly() {
    let server = Server::start();
    let printed = start(
        "limiter::redis::tests::processes::refusals::one_of_the_processes",
        &[(URL, server.url()), (REFUSED, String::from("1"))],
    );
    let mut sum = [0; 4];
    for line in printed.iter().flat_map(|text| text.lines()).filter_map(|line| line.split_once("counts ")) {
        let counts = line.1.split(' ').map(|count| count.parse::<u64>().unwrap());
        sum.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
    }
    let [passed, refused, closed, asked] = sum;
    assert_eq!((passed, refused), (PASS, STRIKES - 1), "the last of the strikes closes it");
    assert_eq!(closed, PROCESSES as u64 * TASKS * CHECKS - PASS - (STRIKES - 1));

    // A process that starts after they have ended finds their states.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let limiter = connected(RedisLimiter::builder().deadline(LONG), &server.url()).await;
        let [_, block, plan, over] = policies();
        let key = Key::of("one").unwrap();
        let blocks = Blocks::new(limiter.clone(), block).unwrap();
        let left = blocks.blocked_for(&key).await.unwrap().unwrap();
        assert!(left > DAY - Duration::from_secs(600) && left <= DAY, "{left:?}");
        let meters = Meters::new(limiter.clone(), over).unwrap();
        let metered = meters.usage(&key).await.unwrap();
        let peeked = limiter.peek(&[Charge::new(&plan, &key).cost(0)]).await.unwrap();
        assert_eq!(PASS - peeked.charges()[0].remaining() + metered, asked);

        meters.settle(&key, metered - 7).await.unwrap();
        assert_eq!(meters.usage(&key).await.unwrap(), 7);
        assert_eq!(blocks.block_for(&key, 3 * DAY).await.unwrap(), Some(3 * DAY));
        blocks.unblock(&key).await.unwrap();
        assert_eq!(blocks.blocked_for(&key).await.unwrap(), None);
    });
    let mut connection = server.connection();
    let keys: Vec<String> = redis::cmd("KEYS").arg("*over*").query(&mut connection).unwrap();
    let ttl: u64 = redis::cmd("PTTL").arg(&keys[0]).query(&mut connection).unwrap();
    assert!(ttl > 89 * 86_400_000, "kept for its retention: {ttl} ms");
}
