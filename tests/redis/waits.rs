//! Callers and messages that wait for units of Redis while it is slow, held, cut and gone.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::sleep;
use tower_ratelimit::clock::TokioTimer;
use tower_ratelimit::limiter::Ready;
use tower_ratelimit::{Key, Policy, Quota, RateLimitLayer, RedisLimiter, key};

use super::{connected, eventually, rule};
use crate::support::proxy::Proxy;
use crate::support::redis_server::Server;

const MS: Duration = Duration::from_millis(1);

/// A number, and what became of the caller with it.
type Ended = (u64, Result<(), String>);

/// Starts this number of callers. The list has them in the order in which their waits ended.
fn start<F>(callers: u64, wait: impl Fn() -> F) -> (JoinSet<()>, Arc<Mutex<Vec<Ended>>>)
where
    F: Future<Output = Result<(), String>> + Send + 'static,
{
    let (mut waiting, ended) = (JoinSet::new(), Arc::<Mutex<Vec<Ended>>>::default());
    for number in 0..callers {
        let (waits, ended) = (wait(), Arc::clone(&ended));
        waiting.spawn(async move {
            let end = waits.await;
            ended.lock().unwrap().push((number, end));
        });
    }
    (waiting, ended)
}

/// Takes a unit of `policy` by `Ready`. The error is the kind of the caller's.
fn take(ready: &Ready<RedisLimiter>, policy: &Policy) -> impl Future<Output = Result<(), String>> + Send + use<> {
    let (ready, policy) = (ready.clone(), policy.clone());
    async move {
        let taken = ready.take_one(&policy, &Key::global(), 1).await;
        taken.map(drop).map_err(|error| format!("{:?}", error.kind()))
    }
}

/// Sends a message. The error is the kind of its outcome.
fn send(chat: &RateLimitLayer<RedisLimiter>) -> impl Future<Output = Result<(), String>> + Send + use<> {
    let (head, ()) = http::Request::new(()).into_parts();
    let mut messages = chat.messages(&head);
    async move {
        let admitted = messages.admit(1).await;
        admitted.map(|admission| admission.keep()).map_err(|refused| format!("{:?}", refused.kind()))
    }
}

#[tokio::test]
async fn callers_are_admitted_in_order_while_redis_is_slow_and_held() {
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    let limiter = connected(RedisLimiter::builder().deadline(20_000 * MS), &proxy.url()).await;
    proxy.delay(5 * MS);
    let ready = Ready::new(limiter);
    let policy = Policy::new("jobs", Quota::per_second(400).burst(20).unwrap()).unwrap();
    let (waiting, ended) = start(200, || take(&ready, &policy));
    sleep(100 * MS).await;
    proxy.hold(true);
    sleep(200 * MS).await;
    proxy.hold(false);
    waiting.join_all().await;
    assert_eq!(*ended.lock().unwrap(), (0..200).map(|number| (number, Ok(()))).collect::<Vec<Ended>>());
    assert_eq!(ready.waiting(), 0);
}

/// Takes Redis away when the first of a thousand waits has ended, and returns when all have ended.
async fn end_without_redis<F>(proxy: &Proxy, wait: impl Fn() -> F, failure: &str)
where
    F: Future<Output = Result<(), String>> + Send + 'static,
{
    let (waiting, ended) = start(1_000, wait);
    eventually("the first wait ends", async || !ended.lock().unwrap().is_empty()).await;
    proxy.lead_to(1);
    proxy.reset();
    waiting.join_all().await;
    let ended = std::mem::take(&mut *ended.lock().unwrap());
    let (admitted, failed): (Vec<Ended>, Vec<Ended>) = ended.into_iter().partition(|(_, end)| end.is_ok());
    assert_eq!(admitted.len() + failed.len(), 1_000);
    assert!(!failed.is_empty(), "Redis was gone before all were admitted");
    assert!(failed.iter().all(|(_, end)| *end == Err(failure.to_owned())), "{failed:?}");
}

#[tokio::test]
async fn waits_end_when_redis_is_gone_and_lines_go_on_later() {
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    let limiter = connected(RedisLimiter::builder().deadline(1_000 * MS), &proxy.url()).await;
    let ready = Ready::new(limiter);
    let policy = Policy::new("jobs", Quota::per_second(10)).unwrap();
    end_without_redis(&proxy, || take(&ready, &policy), "Limiter").await;
    assert_eq!(ready.waiting(), 0);
    // Each caller that is admitted later stands in no line of before.
    proxy.lead_to(server.port());
    eventually("Redis is back", async || take(&ready, &policy).await.is_ok()).await;
}

#[tokio::test]
async fn messages_end_when_redis_is_gone_and_go_on_later() {
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    let limiter = connected(RedisLimiter::builder().deadline(1_000 * MS), &proxy.url()).await;
    let chat = RateLimitLayer::new(limiter, rule("messages", Quota::per_second(10)), key::global());
    let chat = chat.timer(TokioTimer::new()).max_message_wait(60_000 * MS).max_in_line(1_000);
    end_without_redis(&proxy, || send(&chat), "FailedClosed").await;
    assert_eq!(chat.waiting(), 0);
    proxy.lead_to(server.port());
    eventually("Redis is back", async || send(&chat).await.is_ok()).await;
}
