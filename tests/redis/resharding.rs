//! Slots move while requests come.

use std::convert::Infallible;
use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use http::{Request, Response, StatusCode};
use http_body_util::Empty;
use tokio::time::Instant;
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::{Outcome, Policy, Quota, RateLimitLayer, RedisLimiter, Rule, key};

use super::redis_cluster::Cluster;
use super::{MINUTE, policy};

const MONTH: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// So long that a busy machine does not need it.
const DEADLINE: Duration = Duration::from_secs(2);

/// Beyond the deadline, for the same machine.
const SLACK: Duration = Duration::from_secs(1);

const TASKS: usize = 64;
const CALLERS: usize = 16;

/// Of a caller that has used it up before all slots have moved, and of one that never does.
const FEW: u64 = 40;
const MANY: u64 = 1 << 40;

type Body = Empty<bytes::Bytes>;
type Layers = [RateLimitLayer<RedisLimiter>; 4];

/// What became of a caller's requests.
#[derive(Default)]
struct Count {
    admitted: AtomicU64,
    failed: AtomicU64,
    slowest_ms: AtomicU64,
}

/// Few and many, of a quota of its own and of two in one stored value.
fn layers(limiter: &RedisLimiter) -> Layers {
    let window = |limit| Quota::fixed_window(limit, MONTH).unwrap();
    let packed =
        |name, limit| Policy::several(name, [window(limit), Quota::token_bucket(MANY, MINUTE).unwrap()]).unwrap();
    let rules: [Rule; 4] = [
        policy("few", window(FEW)).cost(|_| 1),
        policy("many", window(MANY)).cost(|_| 1),
        packed("few-packed", FEW),
        packed("many-packed", MANY),
    ];
    rules.map(|rule| RateLimitLayer::new(limiter.clone(), rule, key::header("x-user")).expose_outcome(true))
}

fn limit(caller: usize) -> u64 {
    if caller % 2 == 0 { FEW } else { MANY }
}

/// A request's status, and how much of the caller's first quota is used.
async fn send(layers: &Layers, users: &[String], caller: usize) -> (StatusCode, Option<u64>) {
    let service =
        layers[caller % 4].layer(service_fn(|_: Request<Body>| ready(Ok::<_, Infallible>(Response::new(Body::new())))));
    let request = Request::builder().header("x-user", &users[caller]).body(Body::new()).unwrap();
    let response = service.oneshot(request).await.unwrap();
    let outcome = response.extensions().get::<Outcome>().expect("it was asked for");
    let used = outcome.standings().first().map(|standing| limit(caller) - standing.decision().remaining());
    (response.status(), used)
}

/// Callers of the first master, each in a slot of its own, found by a request of each.
async fn users(cluster: &Cluster) -> (Vec<String>, Vec<u16>) {
    let limiter = RedisLimiter::builder().prefix("probe").deadline(DEADLINE).connect(&cluster.url()).await.unwrap();
    let (layers, all) = (layers(&limiter), (100..200).map(|number| format!("user{number}")).collect::<Vec<_>>());
    let mut connection = cluster.servers[0].connection();
    let (mut users, mut slots) = (Vec::new(), Vec::new());
    for at in 0..all.len() {
        send(&layers, &all[at..], 0).await;
        let stored: Vec<String> =
            redis::cmd("KEYS").arg(format!("probe:*{}*", all[at])).query(&mut connection).unwrap();
        let Some(stored) = stored.first() else { continue };
        let slot: u16 = redis::cmd("CLUSTER").arg("KEYSLOT").arg(stored).query(&mut connection).unwrap();
        if users.len() < CALLERS && !slots.contains(&slot) {
            users.push(all[at].clone());
            slots.push(slot);
        }
    }
    assert_eq!(users.len(), CALLERS);
    (users, slots)
}

/// All the callers' slots, with their keys, half of the keys at a time.
fn carry(cluster: &Cluster, slots: &[u16], from: usize, to: usize) {
    let pause = Duration::from_millis(150);
    slots.iter().for_each(|slot| cluster.begin_to_move(*slot, from, to));
    std::thread::sleep(pause);
    let mut carried = 0;
    for half in slots.chunks(slots.len().div_ceil(2)) {
        for slot in half {
            let keys: Vec<String> = redis::cmd("CLUSTER")
                .arg("GETKEYSINSLOT")
                .arg(slot)
                .arg(100)
                .query(&mut cluster.servers[from].connection())
                .unwrap();
            let moved = keys.iter().filter(|key| key.starts_with("moves:"));
            carried += moved.clone().count();
            keys.iter().for_each(|key| cluster.carry(key, from, to));
        }
        std::thread::sleep(pause);
    }
    assert_eq!(carried, slots.len(), "each caller has one stored key");
    slots.iter().for_each(|slot| cluster.end_to_move(*slot, from, to));
    std::thread::sleep(pause);
}

/// A key that moves takes its state along, and is served by one server or the other at any time: so not one unit more is
/// admitted than the quota has, and as no request fails, not one less.
pub(super) async fn nothing_is_lost_while_slots_move(cluster: &Cluster) {
    let builder = RedisLimiter::builder().prefix("moves").deadline(DEADLINE).denials(0);
    let layers = Arc::new(layers(&builder.connect(&cluster.url()).await.expect("the cluster is there")));
    let (users, slots) = users(cluster).await;
    let users: Arc<[String]> = users.into();
    let counts: Arc<Vec<Count>> = Arc::new((0..CALLERS).map(|_| Count::default()).collect());
    let stop = Arc::new(AtomicBool::new(false));
    let tasks: Vec<_> = (0..TASKS)
        .map(|task| {
            let (layers, users, counts) = (Arc::clone(&layers), Arc::clone(&users), Arc::clone(&counts));
            let (stop, caller) = (Arc::clone(&stop), task % CALLERS);
            tokio::spawn(async move {
                let count = &counts[caller];
                while !stop.load(Ordering::Relaxed) {
                    let began = Instant::now();
                    let (status, _) = send(&layers, &users, caller).await;
                    let took_ms = u64::try_from(began.elapsed().as_millis()).unwrap();
                    count.slowest_ms.fetch_max(took_ms, Ordering::Relaxed);
                    match status {
                        StatusCode::OK => count.admitted.fetch_add(1, Ordering::Relaxed),
                        StatusCode::TOO_MANY_REQUESTS => 0,
                        StatusCode::SERVICE_UNAVAILABLE => count.failed.fetch_add(1, Ordering::Relaxed),
                        other => panic!("{other}"),
                    };
                    tokio::time::sleep(Duration::from_millis(40)).await;
                }
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(100)).await;
    tokio::task::block_in_place(|| {
        carry(cluster, &slots, 0, 1);
        carry(cluster, &slots, 1, 2);
        carry(cluster, &slots, 2, 0);
    });
    stop.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await.unwrap();
    }
    for (caller, count) in counts.iter().enumerate() {
        let [admitted, failed, slowest_ms] =
            [&count.admitted, &count.failed, &count.slowest_ms].map(|number| number.load(Ordering::Relaxed));
        println!("caller {caller}: {admitted} admitted, {failed} failed, the slowest took {slowest_ms} ms");
        assert_eq!(failed, 0, "requests of caller {caller}");
        assert!(
            Duration::from_millis(slowest_ms) < DEADLINE + SLACK,
            "a request of caller {caller} took {slowest_ms} ms"
        );
        let (status, used) = send(&layers, &users, caller).await;
        assert_eq!(used, Some(admitted + u64::from(status == StatusCode::OK)), "of caller {caller}");
        assert!(if limit(caller) == FEW { admitted == FEW } else { admitted > FEW }, "{admitted} of caller {caller}");
    }
}
