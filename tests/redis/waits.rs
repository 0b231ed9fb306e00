//! Callers that wait for units of Redis while it is slow, held, cut and gone.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tower_ratelimit::limiter::{NotReadyKind, Ready};
use tower_ratelimit::{Key, Policy, Quota, RedisLimiter};

use super::connected;
use crate::support::proxy::Proxy;
use crate::support::redis_server::Server;

const MS: Duration = Duration::from_millis(1);

/// A number, and what became of the caller with it.
type Ended = (u64, Result<(), NotReadyKind>);

/// Starts this number of callers. The list has them in the order in which their waits ended.
fn start(ready: &Ready<RedisLimiter>, policy: &Policy, callers: u64) -> (JoinSet<()>, Arc<Mutex<Vec<Ended>>>) {
    let (mut waiting, ended) = (JoinSet::new(), Arc::<Mutex<Vec<Ended>>>::default());
    for number in 0..callers {
        let (ready, policy, ended) = (ready.clone(), policy.clone(), Arc::clone(&ended));
        waiting.spawn(async move {
            let taken = ready.take_one(&policy, &Key::global(), 1).await;
            ended.lock().unwrap().push((number, taken.map(drop).map_err(|error| error.kind())));
        });
    }
    (waiting, ended)
}

#[tokio::test]
async fn callers_are_admitted_in_order_while_redis_is_slow_and_held() {
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    let limiter = connected(RedisLimiter::builder().deadline(20_000 * MS), &proxy.url()).await;
    proxy.delay(5 * MS);
    let ready = Ready::new(limiter);
    let policy = Policy::new("jobs", Quota::per_second(400).burst(20).unwrap()).unwrap();
    let (waiting, ended) = start(&ready, &policy, 200);
    sleep(100 * MS).await;
    proxy.hold(true);
    sleep(200 * MS).await;
    proxy.hold(false);
    waiting.join_all().await;
    assert_eq!(*ended.lock().unwrap(), (0..200).map(|number| (number, Ok(()))).collect::<Vec<Ended>>());
    assert_eq!(ready.waiting(), 0);
}

#[tokio::test]
async fn waits_end_when_redis_is_gone_and_lines_go_on_later() {
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    let limiter = connected(RedisLimiter::builder().deadline(1_000 * MS), &proxy.url()).await;
    let ready = Ready::new(limiter);
    let policy = Policy::new("jobs", Quota::per_second(10)).unwrap();
    let (waiting, ended) = start(&ready, &policy, 500);
    let began = Instant::now();
    while ended.lock().unwrap().is_empty() {
        assert!(began.elapsed() < 20_000 * MS);
        sleep(5 * MS).await;
    }
    proxy.lead_to(1);
    proxy.reset();
    waiting.join_all().await;
    let ended = std::mem::take(&mut *ended.lock().unwrap());
    let (admitted, failed): (Vec<Ended>, Vec<Ended>) = ended.into_iter().partition(|(_, end)| end.is_ok());
    assert_eq!(admitted.len() + failed.len(), 500);
    assert!(!failed.is_empty(), "Redis was gone before all were admitted");
    assert!(failed.iter().all(|(_, end)| *end == Err(NotReadyKind::Limiter)), "{failed:?}");
    assert_eq!(ready.waiting(), 0);
    // Each caller that is admitted later stands in no line of before.
    proxy.lead_to(server.port());
    let began = Instant::now();
    while ready.take_one(&policy, &Key::global(), 1).await.is_err() {
        assert!(began.elapsed() < 20_000 * MS, "Redis is back");
        sleep(20 * MS).await;
    }
}
