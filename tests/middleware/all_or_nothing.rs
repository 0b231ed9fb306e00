//! A refused request leaves every state as it was, for any rules, algorithms and costs. The charges
//! of each policy are those of the requests that passed. In memory and on Redis.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use http::{Request, Response, StatusCode};
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{TestCaseError, TestRunner};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_ratelimit::{
    ConfigError, Headers, Key, MemoryLimiter, Policy, Quota, RateLimitLayer, Rule,
    clock::{ManualClock, Timestamp},
    key,
    limiter::{Charge, ChargeDecision, Limiter},
    observe::Outcome,
};

use crate::support::{config, memory, of_each_algorithm_but};

const HOUR: Duration = Duration::from_secs(3_600);

/// Returns a quota of every algorithm with this capacity.
fn quotas(units: u64) -> Vec<Quota> {
    let each = || -> Result<Vec<Quota>, ConfigError> {
        Ok(vec![
            Quota::token_bucket(units, HOUR)?,
            Quota::token_bucket(7, HOUR)?.burst(units)?,
            Quota::step_bucket(units, HOUR)?,
            Quota::gcra(units, HOUR)?.burst(units)?,
            Quota::leaky_bucket(units, HOUR)?,
            Quota::leaky_queue(units, HOUR)?.queue(units)?,
            Quota::fixed_window(units, HOUR)?,
            Quota::sliding_window(units, HOUR)?,
            Quota::sliding_window(units, HOUR)?.buckets(4)?,
            Quota::sliding_log(units, HOUR)?,
            Quota::block(units, HOUR, 2 * HOUR)?,
            Quota::meter(units, HOUR)?,
        ])
    };
    of_each_algorithm_but(&[], each().expect("the quotas are possible"))
}

/// One to four policies, of any algorithms.
fn policies(units: impl Strategy<Value = u64>) -> impl Strategy<Value = Vec<Policy>> {
    prop::collection::vec((any::<Index>(), units), 1..=4).prop_map(|shapes| {
        let policy = |(at, (algorithm, units)): (usize, (Index, u64))| {
            let quota = *algorithm.get(&quotas(units));
            Policy::new(format!("p{at}"), quota).expect("the name is possible")
        };
        shapes.into_iter().enumerate().map(policy).collect()
    })
}

/// The time since the previous request, and its cost for each policy.
type Wanted = (u64, [u64; 4]);

fn requests() -> impl Strategy<Value = Vec<Wanted>> {
    let cost = || prop_oneof![4 => Just(1), 1 => Just(0), 2 => 2..5_u64, 1 => 10..14_u64];
    let later = prop_oneof![3 => Just(0), 2 => 0..600_000_000_u64, 1 => 0..20_000_000_000_u64];
    prop::collection::vec((later, [cost(), cost(), cost(), cost()]), 1..40)
}

/// Returns a layer with these policies. Each charges the cost that the request carries.
fn layer<L: Limiter + Clone>(limiter: &L, policies: &[Policy]) -> RateLimitLayer<L> {
    let rule = |at: usize| {
        Rule::from(policies[at].clone())
            .cost(move |request| request.extensions.get::<[u64; 4]>().map_or(1, |costs| costs[at]))
    };
    let first = RateLimitLayer::new(limiter.clone(), rule(0), key::global()).expose_outcome(true);
    (1..policies.len()).fold(first, |layer, at| layer.and(rule(at), key::global()))
}

async fn send<L: Limiter + Clone>(layer: &RateLimitLayer<L>, costs: [u64; 4]) -> (StatusCode, Outcome) {
    let service = service_fn(|_| async { Ok::<_, Infallible>(Response::new(axum::body::Body::empty())) });
    let mut request = Request::new(String::new());
    request.extensions_mut().insert(costs);
    let response = layer.layer(service).oneshot(request).await.expect("nothing fails");
    (response.status(), response.extensions().get::<Outcome>().expect("it is exposed").clone())
}

/// Returns the status of each policy.
async fn statuses<L: Limiter>(limiter: &L, policies: &[Policy]) -> Vec<ChargeDecision> {
    let mut statuses = Vec::new();
    for policy in policies {
        let looked = limiter.peek(&[Charge::new(policy, &Key::global()).cost(0)]).await;
        statuses.push(looked.expect("the limiter answers").charges()[0].clone());
    }
    statuses
}

/// Sends requests one after the other. `states` returns the limiter's states as bytes.
async fn play<L: Limiter + Clone>(
    limiter: &L,
    clock: &ManualClock,
    policies: &[Policy],
    requests: &[Wanted],
    states: impl Fn() -> Vec<Vec<u8>>,
) -> Result<(), TestCaseError> {
    let layer = layer(limiter, policies);
    for (later, costs) in requests {
        clock.advance(Duration::from_micros(*later));
        let (before, kept) = (statuses(limiter, policies).await, states());
        let (status, outcome) = send(&layer, *costs).await;
        let after = statuses(limiter, policies).await;
        if status == StatusCode::OK {
            for ((before, after), cost) in before.iter().zip(&after).zip(costs) {
                prop_assert_eq!(before.remaining() - cost, after.remaining(), "{:?} of {:?}", costs, policies);
            }
            continue;
        }
        prop_assert_eq!(status, StatusCode::TOO_MANY_REQUESTS);
        prop_assert_eq!(&after, &before, "{:?} of {:?} was refused", costs, policies);
        prop_assert_eq!(states(), kept, "{:?} of {:?} was refused", costs, policies);
        let told: Vec<u64> = outcome.policies().iter().map(|status| status.decision().remaining()).collect();
        let stands: Vec<u64> = before.iter().map(ChargeDecision::remaining).collect();
        prop_assert_eq!(told, stands, "{:?} of {:?} was refused", costs, policies);
    }
    Ok(())
}

/// Sends requests from 64 tasks at once. The charges of each policy must be those that passed.
async fn storm<L: Limiter + Clone>(limiter: &L, policies: &[Policy], requests: &[Wanted]) -> Result<(), TestCaseError> {
    let before = statuses(limiter, policies).await;
    let passed: Arc<[AtomicU64; 4]> = Arc::default();
    let layer = layer(limiter, policies);
    let tasks = (0..64).map(|task| {
        let (layer, passed, requests) = (layer.clone(), Arc::clone(&passed), requests.to_vec());
        tokio::spawn(async move {
            for at in 0..requests.len() {
                let (_, costs) = requests[(at + task) % requests.len()];
                if send(&layer, costs).await.0 == StatusCode::OK {
                    passed.iter().zip(costs).for_each(|(passed, cost)| {
                        passed.fetch_add(cost, Ordering::Relaxed);
                    });
                }
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.expect("no task panics");
    }
    let after = statuses(limiter, policies).await;
    for ((before, after), passed) in before.iter().zip(&after).zip(passed.iter()) {
        let charged = before.remaining() - after.remaining();
        prop_assert_eq!(charged, passed.load(Ordering::Relaxed), "of {:?}", policies);
    }
    Ok(())
}

fn run<T: std::fmt::Debug>(
    cases: u32,
    strategy: impl Strategy<Value = T>,
    test: impl Fn(&tokio::runtime::Runtime, T) -> Result<(), TestCaseError>,
) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    TestRunner::new(config(cases)).run(&strategy, |value| test(&runtime, value)).unwrap();
}

fn clock() -> ManualClock {
    ManualClock::at(Timestamp::from_micros(1_790_000_000_123_456))
}

#[test]
fn refusal_leaves_each_state_in_memory_as_it_was() {
    run(400, (policies(1..12_u64), requests()), |runtime, (policies, requests)| {
        let clock = clock();
        let limiter = memory(&clock);
        runtime.block_on(play(&limiter, &clock, &policies, &requests, || vec![limiter.snapshot()]))
    });
}

#[test]
fn charges_of_64_tasks_in_memory_are_what_passed() {
    run(60, (policies(1..400_u64), requests()), |runtime, (policies, requests)| {
        runtime.block_on(storm(&memory(&clock()), &policies, &requests))
    });
}

/// Returns the status of a request. Every third request is dropped before it is polled.
async fn begin(layer: &RateLimitLayer<MemoryLimiter>, number: usize, costs: [u64; 4]) -> Option<StatusCode> {
    let service = service_fn(|_| async { Ok::<_, Infallible>(Response::new(axum::body::Body::empty())) });
    let mut request = Request::new(String::new());
    request.extensions_mut().insert(costs);
    let response = layer.layer(service).call(request);
    if number % 3 == 2 {
        return None;
    }
    Some(response.await.expect("nothing fails").status())
}

#[test]
fn quiet_layer_charges_what_a_reporting_layer_charges() {
    run(250, (policies(1..12_u64), requests()), |runtime, (policies, requests)| {
        let clock = clock();
        let (told, untold) = (memory(&clock), memory(&clock));
        let tells = layer(&told, &policies);
        let quiet = layer(&untold, &policies).expose_outcome(false).headers(Headers::none());
        runtime.block_on(async {
            for (at, (later, costs)) in requests.iter().enumerate() {
                clock.advance(Duration::from_micros(*later));
                let expected = begin(&tells, at, *costs).await;
                prop_assert_eq!(begin(&quiet, at, *costs).await, expected, "{:?} of {:?}", costs, policies);
                let stands = statuses(&told, &policies).await;
                prop_assert_eq!(statuses(&untold, &policies).await, stands, "{:?} of {:?}", costs, policies);
            }
            Ok(())
        })
    });
}

#[cfg(feature = "_redis")]
mod on_redis {
    use tower_ratelimit::RedisLimiter;

    use super::*;
    use crate::support::redis_limiter::{connected, patient};
    use crate::support::redis_server::Server;

    async fn connect(server: &Server, clock: &ManualClock, number: u64) -> RedisLimiter {
        let builder = patient().prefix(format!("case-{number}")).clock(clock.clone()).max_denials(0);
        connected(builder, &server.url()).await
    }

    /// Returns all keys under a prefix, and their values.
    fn stored(connection: &mut redis::Connection, prefix: &str) -> Vec<Vec<u8>> {
        let mut keys: Vec<Vec<u8>> = redis::cmd("KEYS").arg(format!("{prefix}*")).query(connection).unwrap();
        keys.sort();
        let values: Vec<Vec<u8>> =
            keys.iter().map(|key| redis::cmd("DUMP").arg(key).query(connection).unwrap()).collect();
        keys.extend(values);
        keys
    }

    #[test]
    fn refusal_leaves_each_state_on_redis_as_it_was() {
        let server = Server::start();
        let connection = std::cell::RefCell::new(server.connection());
        let number = AtomicU64::new(0);
        run(60, (policies(1..12_u64), requests()), |runtime, (policies, requests)| {
            let (clock, number) = (clock(), number.fetch_add(1, Ordering::Relaxed));
            let limiter = runtime.block_on(connect(&server, &clock, number));
            let states = || stored(&mut connection.borrow_mut(), &format!("case-{number}"));
            runtime.block_on(play(&limiter, &clock, &policies, &requests, states))
        });
    }

    #[test]
    fn charges_of_64_tasks_on_redis_are_what_passed() {
        let server = Server::start();
        let number = AtomicU64::new(0);
        run(12, (policies(1..400_u64), requests()), |runtime, (policies, requests)| {
            let number = number.fetch_add(1, Ordering::Relaxed);
            let limiter = runtime.block_on(connect(&server, &clock(), number));
            runtime.block_on(storm(&limiter, &policies, &requests))
        });
    }
}
