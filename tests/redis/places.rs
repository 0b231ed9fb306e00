//! Limits of requests in flight on Redis: what is held is counted once, comes back once, and outlives no process for
//! long.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use http::{Request, Response, StatusCode};
use tokio::time::{Instant, sleep};
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::limiter::redis::RedisLimiterBuilder;
use tower_ratelimit::limiter::{Charge, Effect, FallbackLimiter, Limiter, Place, Refund};
use tower_ratelimit::observe::{LimiterEvent, Observer};
use tower_ratelimit::{
    Key, MemoryLimiter, Policy, Quota, RateLimitLayer, RedisLimiter, Rule, Wait, key as extract, quota::Anchor,
};

use super::{LONG, connect, connected, eventually, keys, patient, policy};
use crate::support::proxy::{Fault, Proxy};
use crate::support::redis_cluster::Cluster;
use crate::support::redis_sentinel::Sentinel;
use crate::support::redis_server::Server;

/// The time after which places lapse. A process renews its places after a third of this time, so it keeps them even if it
/// stands still for the other two thirds on a busy machine.
const LAPSE: Duration = Duration::from_secs(9);

/// The time after which places lapse in the table of costs.
const TABLE_LAPSE: Duration = Duration::from_secs(30);

fn quick() -> RedisLimiterBuilder {
    patient().max_denials(0).places_lapse_after(LAPSE)
}

fn places(limit: u64) -> Policy {
    policy("places", Quota::concurrent(limit))
}

fn alice() -> Key {
    super::key("alice")
}

async fn hold(limiter: &RedisLimiter, policy: &Policy) -> Option<Place> {
    Place::take(limiter, policy, &alice(), 1).await.expect("Redis answers").ok()
}

/// Returns how many units are free, as Redis says.
async fn free(limiter: &RedisLimiter, policy: &Policy) -> u64 {
    let key = alice();
    let decision = limiter.peek(&[Charge::new(policy, &key).cost(0)]).await.expect("Redis answers");
    decision.charges()[0].remaining()
}

async fn eventually_free(limiter: &RedisLimiter, policy: &Policy, units: u64) {
    let (began, mut last) = (Instant::now(), u64::MAX);
    while last != units {
        assert!(began.elapsed() < LONG, "{last} are free, not {units}");
        sleep(Duration::from_millis(5)).await;
        last = limiter
            .peek(&[Charge::new(policy, &alice()).cost(0)])
            .await
            .map_or(last, |decision| decision.charges()[0].remaining());
    }
}

#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Vec<LimiterEvent>>>);

impl Observer for Seen {
    fn on_limiter_event(&self, event: &LimiterEvent) {
        self.0.lock().unwrap().push(event.clone());
    }
}

impl Seen {
    fn forgotten(&self) -> u64 {
        let units = |event: &LimiterEvent| match event {
            LimiterEvent::PlacesForgotten { units, .. } => *units,
            _ => 0,
        };
        self.0.lock().unwrap().iter().map(units).sum()
    }
}

#[tokio::test]
async fn places_are_shared_by_processes_and_return_when_dropped() {
    let server = Server::start();
    let (one, other) = (connected(quick(), &server.url()).await, connected(quick(), &server.url()).await);
    let policy = places(3);
    let mut held = vec![hold(&one, &policy).await, hold(&other, &policy).await, hold(&one, &policy).await];
    assert!(held.iter().all(Option::is_some));
    let denied = Place::take(&one, &policy, &alice(), 1).await.unwrap().unwrap_err();
    assert_eq!((denied.remaining(), denied.wait(), denied.reset_after()), (0, Wait::Unknown, None));
    assert!(hold(&other, &policy).await.is_none());
    held.pop();
    eventually_free(&other, &policy, 1).await;
    assert!(hold(&other, &policy).await.is_some(), "it was returned");
    drop(held);
    eventually_free(&one, &policy, 3).await;
    let left = keys(&server).into_iter().filter(|key| key.ends_with(b":places")).count();
    assert_eq!(left, 0, "a key of which nothing is held is removed");
}

#[tokio::test]
async fn places_cost_one_call_to_take_and_none_to_wait_for() {
    let server = Server::start();
    let limiter = connect(&server).await;
    let policy = places(100);
    let mut held = Vec::new();
    let before = super::calls(&server);
    for _ in 0..50 {
        held.push(hold(&limiter, &policy).await);
    }
    assert_eq!(super::calls(&server) - before, 50);
    drop(held);
    assert!(limiter.waiting() > 0, "nothing waits until they are returned");
    eventually_free(&limiter, &policy, 100).await;
    let before = super::calls(&server);
    for _ in 0..50 {
        drop(hold(&limiter, &policy).await.expect("the return was sent before the next take"));
    }
    let calls = super::calls(&server) - before;
    assert!(calls <= 100, "{calls} calls to take and return 50 places");
}

#[tokio::test]
async fn changed_limit_counts_what_is_held_on_redis() {
    let server = Server::start();
    let (one, other) = (connected(quick(), &server.url()).await, connected(quick(), &server.url()).await);
    let held = [hold(&one, &places(5)).await, hold(&one, &places(5)).await, hold(&other, &places(5)).await];
    assert!(hold(&other, &places(2)).await.is_none());
    assert!(hold(&other, &places(3)).await.is_none());
    assert!(hold(&other, &places(4)).await.is_some());
    drop(held);
}

#[tokio::test]
async fn places_and_rates_are_all_or_nothing_on_redis() {
    let server = Server::start();
    let limiter = connected(quick(), &server.url()).await;
    let month = Duration::from_secs(30 * 86_400);
    let rate = policy("rate", Quota::fixed_window(3, month).and_then(|it| it.anchor(Anchor::FirstRequest)).unwrap());
    let (places, key) = (places(2), alice());
    let set = [Charge::new(&places, &key), Charge::new(&rate, &key)];
    let mut first = limiter.take(&set).await.unwrap();
    let second = limiter.take(&set).await.unwrap();
    assert!(first.is_allowed() && second.is_allowed());
    let third = limiter.take(&set).await.unwrap();
    assert!(!third.is_allowed() && third.charges()[1].is_allowed());
    assert_eq!(third.charges()[1].remaining(), 1, "the rate was not charged");
    let receipt = first.charge_mut(0).unwrap().take_receipt().unwrap();
    limiter.refund(vec![Refund::new(places.clone(), key.clone(), receipt)]).await.unwrap();
    assert!(limiter.take(&set).await.unwrap().is_allowed());
    let fifth = limiter.take(&[set[1], set[0]]).await.unwrap();
    assert!(!fifth.is_allowed(), "the rate is used up");
    assert_eq!(free(&limiter, &places).await, 0);
    let observed = limiter.take(&[set[0].effect(Effect::Observe)]).await.unwrap();
    assert!(observed.is_allowed() && !observed.charges()[0].is_allowed() && observed.charges()[0].remaining() == 0);
    let mut forced = limiter.take(&[set[0].effect(Effect::Force)]).await.unwrap();
    assert!(forced.is_allowed() && forced.charge_mut(0).unwrap().take_receipt().is_some(), "it exceeds the limit");
}

#[tokio::test]
async fn reset_frees_places_and_late_returns_free_nothing() {
    let server = Server::start();
    let (one, other) = (connected(quick(), &server.url()).await, connected(quick(), &server.url()).await);
    let policy = places(2);
    let old = [hold(&one, &policy).await, hold(&other, &policy).await];
    one.reset(&policy, &alice()).await.unwrap();
    let new = [hold(&other, &policy).await, hold(&one, &policy).await];
    assert!(new.iter().all(Option::is_some), "all were free");
    drop(old);
    sleep(LAPSE / 2).await; // a renewal of either process
    assert_eq!(free(&one, &policy).await, 0, "places of before returned nothing, and no renewal counts them again");
    drop(new);
    eventually_free(&other, &policy, 2).await;
}

/// Each of the keys was reset, and an answer names one of them.
#[tokio::test]
async fn keys_that_were_reset_together_are_free_on_redis() {
    let server = Server::start();
    let (one, other) = (connected(quick(), &server.url()).await, connected(quick(), &server.url()).await);
    let policies: Vec<Policy> = (0..4).map(|at| policy(&format!("places-{at}"), Quota::concurrent(1))).collect();
    let key = alice();
    for count in [2, 4] {
        let charges: Vec<Charge<'_>> = policies[..count].iter().map(|policy| Charge::new(policy, &key)).collect();
        for resets in [&other, &one] {
            assert!(one.take(&charges).await.unwrap().is_allowed(), "{count}");
            assert!(!one.take(&charges).await.unwrap().is_allowed(), "{count}");
            for policy in &policies {
                resets.reset(policy, &key).await.unwrap();
            }
        }
    }
}

/// A refusal tells this process of the resets so far. While the check is on its way again, there are more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_of_a_key_that_is_reset_each_time_takes_nothing() {
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    let near = connected(quick(), &server.url()).await;
    proxy.delay(Duration::from_millis(200));
    let far = connected(quick(), &proxy.url()).await;
    let policy = places(2);
    let _old = hold(&far, &policy).await.expect("it is free");
    let (resetting, of) = (near.clone(), policy.clone());
    let resets = tokio::spawn(async move {
        loop {
            resetting.reset(&of, &alice()).await.expect("Redis answers");
        }
    });
    // A machine that stops the resets for a while lets a check pass.
    eventually("a check fails", async || match Place::take(&far, &policy, &alice(), 1).await {
        Ok(_) => false,
        Err(error) => {
            assert!(error.to_string().contains("was reset"), "{error}");
            true
        }
    })
    .await;
    resets.abort();
    let _ = resets.await;
    eventually_free(&near, &policy, 2).await;
}

#[tokio::test]
async fn reset_is_not_undone_by_a_renewal() {
    let server = Server::start();
    let (one, other) = (connected(quick(), &server.url()).await, connected(quick(), &server.url()).await);
    let policy = places(2);
    let _old = [hold(&one, &policy).await, hold(&one, &policy).await];
    other.reset(&policy, &alice()).await.unwrap();
    let began = Instant::now();
    while began.elapsed() < LAPSE * 4 / 3 {
        assert_eq!(free(&other, &policy).await, 2);
        sleep(Duration::from_millis(20)).await;
    }
}

/// A stream holds its place. `PLACES_TABLE=1` takes three times the time after which places lapse.
#[tokio::test]
async fn places_that_are_held_do_not_lapse_and_every_key_ends() {
    let server = Server::start();
    let limiter = connected(quick(), &server.url()).await;
    let policy = places(2);
    let layer = RateLimitLayer::new(limiter.clone(), Rule::from(policy.clone()), extract::header("user"));
    let streams = service_fn(async |_: Request<String>| Ok::<_, Infallible>(Response::new(Body::from("it goes on"))));
    let request = Request::builder().header("user", "alice").body(String::new()).unwrap();
    let stream = layer.layer(streams).oneshot(request).await.unwrap();
    assert_eq!(stream.status(), StatusCode::OK);
    let mut connection = server.connection();
    let began = Instant::now();
    while began.elapsed() < if std::env::var("PLACES_TABLE").is_ok() { 3 * LAPSE } else { 2 * LAPSE } {
        assert_eq!(free(&limiter, &policy).await, 1);
        for key in keys(&server) {
            let left_ms: i64 = redis::cmd("PTTL").arg(&key).query(&mut connection).unwrap();
            assert!(left_ms > 0 || left_ms == -2, "{} ends in {left_ms} ms", String::from_utf8_lossy(&key));
        }
        sleep(Duration::from_millis(20)).await;
    }
    drop(stream);
    eventually_free(&limiter, &policy, 2).await;
}

/// Prints what the renewals cost the server. `PLACES_TABLE=1` takes 10,000 places, for half a minute each.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_places_are_renewed_at_little_cost() {
    let is_long = std::env::var("PLACES_TABLE").is_ok();
    let (number, lapse) = if is_long { (10_000, TABLE_LAPSE) } else { (300, LAPSE) };
    for keys in [number, 1] {
        renew(keys, number / keys, lapse).await;
    }
}

/// Holds so many places of each key for longer than they last without a renewal.
async fn renew(number: u64, each: u64, lapse: Duration) {
    let server = Server::start();
    let limiter = connected(patient().max_denials(0).places_lapse_after(lapse), &server.url()).await;
    let policy = places(each + 1);
    let keys: Vec<Key> = (0..number).map(|key| Key::of(key).unwrap()).collect();
    let mut held = Vec::new();
    for key in &keys {
        for _ in 0..each {
            held.push(Place::take(&limiter, &policy, key, 1).await.unwrap().unwrap());
        }
    }
    let mut connection = server.connection();
    let mut used = || {
        let info: String = redis::cmd("INFO").arg("cpu").query(&mut connection).unwrap();
        let times = info.lines().filter(|line| line.starts_with("used_cpu_user:") || line.starts_with("used_cpu_sys:"));
        times.map(|line| line.split_once(':').unwrap().1.trim().parse::<f64>().unwrap()).sum::<f64>()
    };
    let (before, began) = (used(), Instant::now());
    sleep(lapse + lapse / 3).await;
    let share = (used() - before) / began.elapsed().as_secs_f64();
    println!("{number} keys with {each} places, of {lapse:?}: {:.2} % of the server's time", 100.0 * share);
    assert!(share <= 0.02 || lapse < TABLE_LAPSE, "{share}");
    for key in &keys {
        let decision = limiter.peek(&[Charge::new(&policy, key).cost(0)]).await.unwrap();
        assert_eq!(decision.charges()[0].remaining(), 1, "{key:?} lapsed");
    }
    drop(held);
}

#[tokio::test]
async fn places_of_a_closed_limiter_are_free_at_once() {
    let server = Server::start();
    let builder = || patient().places_lapse_after(Duration::from_secs(3_600));
    let (one, other) = (connected(builder(), &server.url()).await, connected(builder(), &server.url()).await);
    let policy = places(2);
    let _held = [hold(&one, &policy).await, hold(&one, &policy).await];
    assert_eq!(free(&other, &policy).await, 0);
    one.close();
    one.clone().close(); // as two parts of a program do that end
    eventually_free(&other, &policy, 2).await;
    assert!(Place::take(&one, &policy, &alice(), 1).await.is_err());
}

#[tokio::test]
async fn callers_that_go_away_hold_no_place() {
    let server = Server::start();
    let limiter = connected(quick(), &server.url()).await;
    let policy = places(3);
    for round in 0..200_u64 {
        let taking = tokio::time::timeout(Duration::from_micros(20 * (round % 10)), hold(&limiter, &policy));
        drop(taking.await);
    }
    eventually_free(&limiter, &policy, 3).await;
}

#[tokio::test]
async fn lost_data_is_asserted_anew_with_an_event() {
    let server = Server::start();
    let seen = Seen::default();
    let limiter = connected(quick().observer(seen.clone()), &server.url()).await;
    let policy = places(3);
    let held = [hold(&limiter, &policy).await, hold(&limiter, &policy).await];
    redis::cmd("FLUSHALL").exec(&mut server.connection()).unwrap();
    eventually("it is an event", async || seen.forgotten() == 2).await;
    eventually_free(&limiter, &policy, 1).await;
    drop(held);
    eventually_free(&limiter, &policy, 3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restarted_redis_knows_again_what_is_held() {
    const HELD: u64 = 2_000;
    let mut server = Server::start();
    let builder = RedisLimiter::builder().max_denials(0).places_lapse_after(LAPSE);
    let limiter = connected(builder, &server.url()).await;
    let policy = places(HELD + 1);
    let (mut held, began) = (Vec::new(), Instant::now());
    while (held.len() as u64) < HELD {
        // A busy machine may take longer than the deadline. Then the next call corrects what is held.
        // Until then, places of calls that had no answer may leave no room.
        match Place::take(&limiter, &policy, &alice(), 1).await {
            Ok(Ok(place)) => held.push(place),
            Ok(Err(_)) | Err(_) => assert!(began.elapsed() < LONG, "{} are held, and there is no room", held.len()),
        }
    }
    eventually_free(&limiter, &policy, 1).await;
    tokio::task::block_in_place(|| server.restart());
    eventually_free(&limiter, &policy, 1).await;
    redis::cmd("FLUSHALL").exec(&mut server.connection()).unwrap();
    eventually_free(&limiter, &policy, 1).await;
    held.truncate(HELD as usize / 2);
    server.kill();
    held.truncate(HELD as usize / 4);
    tokio::task::block_in_place(|| server.restart());
    eventually_free(&limiter, &policy, 1 + HELD * 3 / 4).await;
    server.kill();
    drop(held);
    tokio::task::block_in_place(|| server.restart());
    eventually_free(&limiter, &policy, 1 + HELD).await;
    sleep(LAPSE / 2).await;
    let judge = connected(quick(), &server.url()).await;
    assert_eq!(free(&judge, &policy).await, 1 + HELD);
}

/// Returns the number in a variable of a campaign, or what is usual.
fn number(variable: &str, usual: u64) -> u64 {
    std::env::var(variable).map_or(usual, |number| number.parse().expect("it is a number"))
}

/// `PLACES_FAILOVERS=2000` makes it that many, and `PLACES_HELD=2000` holds that many places meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replica_that_takes_over_knows_what_is_held() {
    let (rounds, places_held) = (number("PLACES_FAILOVERS", 1), number("PLACES_HELD", 2));
    for _ in 0..rounds {
        let mut servers = tokio::task::block_in_place(Sentinel::start);
        // Longer than an answer, and than the failover, take on a busy machine.
        let builder = RedisLimiter::builder().max_denials(0).deadline(LONG / 12).places_lapse_after(LONG);
        let limiter = connected(builder, &servers.url()).await;
        let policy = places(places_held + 1);
        let mut held = Vec::new();
        for _ in 0..places_held {
            held.push(hold(&limiter, &policy).await.expect("there is room"));
        }
        tokio::task::block_in_place(|| servers.replace_master());
        eventually_free(&limiter, &policy, 1).await;
        let last = hold(&limiter, &policy).await;
        assert!(last.is_some() && free(&limiter, &policy).await == 0);
        drop((held, last));
        eventually_free(&limiter, &policy, places_held + 1).await;
    }
    println!("{rounds} failovers with {places_held} places held");
}

#[tokio::test]
async fn response_holds_its_place_on_redis_until_its_body_ends() {
    let server = Server::start();
    let limiter = connected(quick(), &server.url()).await;
    let layer = RateLimitLayer::new(limiter.clone(), Quota::concurrent(1), extract::global());
    let answer = service_fn(async |_: Request<String>| Ok::<_, Infallible>(Response::new(Body::from("a"))));
    let service = layer.layer(answer);
    let ask = async || service.clone().oneshot(Request::new(String::new())).await.unwrap();
    let first = ask().await;
    assert_eq!((first.status(), ask().await.status()), (StatusCode::OK, StatusCode::TOO_MANY_REQUESTS));
    drop(first);
    assert_eq!(ask().await.status(), StatusCode::OK, "the return was sent before the next request came");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_and_repeated_answers_lose_no_place() {
    let server = Server::start();
    let proxy = Proxy::start(server.port());
    let builder = RedisLimiter::builder().max_denials(0).deadline(Duration::from_millis(200));
    let limiter = connected(builder.places_lapse_after(LAPSE), &proxy.url()).await;
    let judge = connected(quick(), &server.url()).await;
    let policy = places(8);
    for round in 0..12 {
        let mut held = Vec::new();
        for step in 0..6 {
            if step % 3 == round % 3 {
                let faults = [Fault::Lose, Fault::Repeat, Fault::Reset, Fault::Cut(7)];
                proxy.fault(faults[round % 4].clone());
            }
            if let Ok(Ok(place)) = Place::take(&limiter, &policy, &alice(), 1).await {
                held.push(place);
            }
            if step == 4 {
                held.pop();
            }
        }
        proxy.behave();
        eventually_free(&judge, &policy, 8 - held.len() as u64).await;
        drop(held);
        eventually_free(&judge, &policy, 8).await;
    }
}

#[tokio::test]
async fn fallback_returns_places_where_they_were_taken() {
    let mut server = Server::start();
    let redis = connected(RedisLimiter::builder().places_lapse_after(LAPSE), &server.url()).await;
    let memory = MemoryLimiter::new();
    let limiter = FallbackLimiter::new(redis.clone(), memory.clone(), 4.try_into().unwrap());
    let (policy, key) = (places(3), alice());
    let charge = [Charge::new(&policy, &key)];
    let take = async || {
        let mut decision = limiter.take(&charge).await.unwrap();
        let receipt = decision.charge_mut(0).unwrap().take_receipt();
        receipt.map(|receipt| vec![Refund::new(policy.clone(), key.clone(), receipt)])
    };
    let share = policy.quota().share(4.try_into().unwrap());
    let share = Policy::new("places", share).unwrap();
    let mut on_redis = Vec::new();
    // A busy machine may take longer than the deadline. Until the next call corrects what Redis holds, places of calls
    // that had no answer may leave no room.
    eventually("Redis does not count it", async || {
        let Some(taken) = take().await else { return false };
        if memory.peek_one(&share, &key, 0).remaining() == 1 {
            on_redis = taken;
            return true;
        }
        limiter.refund(taken).await.unwrap();
        false
    })
    .await;
    server.kill();
    let mut in_memory = None;
    eventually("the fallback does not decide", async || {
        in_memory = take().await;
        in_memory.is_some()
    })
    .await;
    assert!(take().await.is_none(), "its share is at least 1, and that is held");
    server.restart();
    let judge = connected(quick(), &server.url()).await;
    eventually_free(&judge, &policy, 2).await;
    limiter.refund(in_memory.unwrap()).await.unwrap();
    assert_eq!(memory.peek_one(&share, &key, 0).remaining(), 1);
    assert_eq!(free(&judge, &policy).await, 2, "what memory held returns nothing to Redis");
    let _ = limiter.refund(on_redis).await; // a busy machine may take longer than the deadline, and returns them later
    eventually_free(&judge, &policy, 3).await;
}

#[tokio::test]
async fn denial_is_remembered_for_a_moment_and_forgotten_by_a_return() {
    let server = Server::start();
    let limiter = connected(patient().places_lapse_after(LAPSE), &server.url()).await;
    let policy = places(1);
    let place = hold(&limiter, &policy).await;
    let before = super::calls(&server);
    let began = Instant::now();
    while began.elapsed() < Duration::from_millis(200) {
        assert!(hold(&limiter, &policy).await.is_none());
        tokio::task::yield_now().await;
    }
    let calls = super::calls(&server) - before;
    assert!(calls <= 40, "{calls} calls in 0.2 s");
    drop(place);
    assert!(hold(&limiter, &policy).await.is_some(), "the return was sent before, and the denial is forgotten");
}

#[tokio::test]
async fn more_holders_than_rows_are_denied() {
    let server = Server::start();
    let policy = places(1_000);
    let mut held = Vec::new();
    for _ in 0..256 {
        let limiter = connected(patient(), &server.url()).await;
        held.push(hold(&limiter, &policy).await.expect("there is room for its row"));
    }
    let one_more = connected(patient(), &server.url()).await;
    let denied = Place::take(&one_more, &policy, &alice(), 1).await.unwrap().unwrap_err();
    assert_eq!((denied.remaining(), denied.wait()), (1_000 - 256, Wait::Unknown));
    held.pop();
    eventually("its row is not there", async || hold(&one_more, &policy).await.is_some()).await;
}

#[tokio::test]
async fn places_in_several_slots_are_compensated() {
    let cluster = Cluster::start();
    let limiter = connected(quick(), &cluster.url()).await;
    let (each, all) = (policy("each", Quota::concurrent(2)), policy("all", Quota::concurrent(3)));
    let global = Key::global();
    let mut receipts = Vec::new();
    for caller in 0..20_u64 {
        let key = Key::of(caller).unwrap();
        let mut decision = limiter.take(&[Charge::new(&each, &key), Charge::new(&all, &global)]).await.unwrap();
        assert_eq!(decision.is_allowed(), caller < 3);
        for (at, (policy, key)) in [(&each, &key), (&all, &global)].into_iter().enumerate() {
            let receipt = decision.charge_mut(at).unwrap().take_receipt();
            receipts.extend(receipt.map(|receipt| Refund::new(policy.clone(), key.clone(), receipt)));
        }
    }
    assert_eq!(receipts.len(), 6);
    for caller in 3..20_u64 {
        let key = Key::of(caller).unwrap();
        eventually("what was taken in the other slot is not returned", async || {
            limiter.peek(&[Charge::new(&each, &key).cost(0)]).await.unwrap().charges()[0].remaining() == 2
        })
        .await;
    }
    limiter.refund(receipts).await.unwrap();
    let all = limiter.peek(&[Charge::new(&all, &global).cost(0)]).await.unwrap();
    assert_eq!(all.charges()[0].remaining(), 3);
}

/// Every step of a random schedule is answered as in memory.
#[tokio::test]
async fn places_on_redis_are_decided_as_in_memory() {
    let server = Server::start();
    let limiter = connected(quick(), &server.url()).await;
    let memory = MemoryLimiter::new();
    let names: Vec<Key> = ["a", "b"].map(super::key).to_vec();
    let mut seed = 7_u64;
    let mut below = |bound: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % bound
    };
    let mut receipts: Vec<[Option<Refund>; 2]> = Vec::new();
    for step in 0..3_000 {
        let policy = places([3, 3, 3, 5, 1, 0][below(6) as usize]);
        let key = &names[below(2) as usize];
        match below(10) {
            0 if step % 7 == 0 => {
                limiter.reset(&policy, key).await.unwrap();
                memory.reset_now(&policy, key);
            }
            1..=4 if !receipts.is_empty() => {
                let at = below(receipts.len() as u64) as usize;
                let [on_redis, in_memory] = receipts.swap_remove(at);
                limiter.refund(on_redis.into_iter().collect()).await.unwrap();
                memory.refund_now(&in_memory.into_iter().collect::<Vec<_>>());
            }
            what => {
                let effect = [Effect::Enforce, Effect::Enforce, Effect::Observe, Effect::Force][below(4) as usize];
                let charge = [Charge::new(&policy, key).cost([1, 1, 2, 0, 9][below(5) as usize]).effect(effect)];
                let (mut found, mut expected) = if what == 5 {
                    (limiter.peek(&charge).await.unwrap(), memory.peek_now(&charge))
                } else {
                    (limiter.take(&charge).await.unwrap(), memory.take_now(&charge))
                };
                assert_eq!(found.is_allowed(), expected.is_allowed(), "step {step}: {charge:?}");
                let took = [&mut found, &mut expected].map(|decision| {
                    let charge = decision.charge_mut(0).unwrap();
                    let receipt = charge.take_receipt();
                    let told = (charge.is_allowed(), charge.limit(), charge.remaining(), charge.wait());
                    (told, receipt)
                });
                let [(told, on_redis), (expected, in_memory)] = took;
                assert_eq!(told, expected, "step {step}: {charge:?}");
                let units = |receipt: &Option<tower_ratelimit::limiter::Receipt>| receipt.as_ref().map(|it| it.units());
                assert_eq!(units(&on_redis), units(&in_memory), "step {step}: {charge:?}");
                let refund = |receipt| Refund::new(policy.clone(), key.clone(), receipt);
                if on_redis.is_some() {
                    receipts.push([on_redis.map(refund), in_memory.map(refund)]);
                }
            }
        }
    }
}
