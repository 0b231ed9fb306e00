//! No request fails while slots of a cluster move to another server.

use std::convert::Infallible;
use std::future::ready;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use http::{Request, Response, StatusCode};
use tokio::time::Instant;
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::{
    Key, Policy, Quota, RateLimitLayer, RedisLimiter, Rule,
    clock::ManualClock,
    key,
    limiter::{Charge, Limiter, StoreErrorKind},
    observe::{LimiterEvent, Observer, Outcome},
    quota::Anchor,
};

use super::{LONG, MINUTE, connected, eventually, patient, policy, rule};
use crate::support::redis_cluster::Cluster;

const MONTH: Duration = Duration::from_secs(30 * 24 * 60 * 60);

const TASKS: usize = 64;
const CALLERS: usize = 18;

/// The quotas of a caller that uses its quota up while slots move, and of one that never does.
const FEW: u64 = 40;
const MANY: u64 = 1 << 40;

/// The most entries that a log may have.
const LOGGED: u64 = 10_000;

/// Tasks that charge new policies together, how many before they go on to the next, and what each
/// policy admits.
const NEWCOMERS: usize = 4;
const TURN: Duration = Duration::from_millis(60);
const NEW: u64 = 7;

/// The number of callers in the scenario with blocks.
const BLOCKED: [&str; 5] = ["ann", "bob", "cid", "dan", "eve"];

/// The results of a caller's requests.
#[derive(Default)]
struct Count {
    admitted: AtomicU64,
    failed: AtomicU64,
    slowest_ms: AtomicU64,
}

/// Remembers why checks failed.
#[derive(Clone, Default)]
struct Reasons(Arc<Mutex<Vec<String>>>);

impl Observer for Reasons {
    fn on_limiter_event(&self, event: &LimiterEvent) {
        if let LimiterEvent::Failed { error, .. } = event {
            self.0.lock().unwrap().push(error.clone());
        }
    }
}

/// It begins with the first request, so that no window ends while the test runs.
fn window(limit: u64) -> Quota {
    Quota::fixed_window(limit, MONTH).and_then(|quota| quota.anchor(Anchor::FirstRequest)).unwrap()
}

fn log(limit: u64) -> Quota {
    Quota::sliding_log(limit, MONTH).unwrap()
}

/// The rules of a caller: with one quota, with two, and with two of which one is stored as a list.
fn rules(caller: usize) -> Vec<Rule> {
    let packed = |name, limit| Rule::all_of(name, [window(limit), Quota::token_bucket(MANY, MINUTE).unwrap()]).unwrap();
    let rule = |name, quota| rule(name, quota).cost(|_| 1);
    match caller % 6 {
        0 => vec![rule("few", window(FEW))],
        1 => vec![rule("many", window(MANY))],
        2 => vec![packed("few-packed", FEW)],
        3 => vec![packed("many-packed", MANY)],
        4 => vec![rule("few-logged", log(FEW)), rule("beside", window(MANY))],
        _ => vec![rule("many-beside", window(MANY)), rule("logged", log(LOGGED))],
    }
}

fn layers(limiter: &RedisLimiter, reasons: &Reasons) -> Vec<RateLimitLayer<RedisLimiter>> {
    let layer = |caller| {
        let mut rules = rules(caller).into_iter();
        let layer = RateLimitLayer::new(limiter.clone(), rules.next().unwrap(), key::header("x-user"));
        let layer = rules.fold(layer, |layer, rule| layer.and(rule, key::header("x-user")));
        layer.expose_outcome(true).observer(reasons.clone())
    };
    (0..CALLERS).map(layer).collect()
}

/// Returns a request's status, and the policies that it was charged to.
async fn send(layer: &RateLimitLayer<RedisLimiter>, user: &str) -> (StatusCode, Vec<Policy>) {
    let service = layer.layer(service_fn(|_: Request<Body>| ready(Ok::<_, Infallible>(Response::new(Body::empty())))));
    let request = Request::builder().header("x-user", user).body(Body::empty()).unwrap();
    let response = service.oneshot(request).await.unwrap();
    let outcome = response.extensions().get::<Outcome>().expect("it was asked for");
    let policies = outcome.policies().iter().map(|status| status.policy().clone()).collect();
    (response.status(), policies)
}

fn key_of(user: &str) -> Key {
    Key::of(http::HeaderValue::from_str(user).unwrap()).unwrap()
}

/// Returns the used units of a policy.
async fn used(limiter: &RedisLimiter, policy: &Policy, key: &Key) -> u64 {
    let decision = limiter.peek(&[Charge::new(policy, key).cost(0)]).await.unwrap();
    let charge = &decision.charges()[0];
    charge.limit() - charge.remaining()
}

/// Waits until the charges of refused requests are refunded.
async fn settle(limiter: &RedisLimiter) {
    eventually("not everything is answered", async || limiter.waiting() == 0).await;
}

/// Returns the master of a user's keys and their slot, found with a request.
async fn place(cluster: &Cluster, limiter: &RedisLimiter, user: &str) -> (usize, u16) {
    let (policy, key) = (policy("any", window(MANY)), key_of(user));
    limiter.take(&[Charge::new(&policy, &key)]).await.unwrap();
    for master in 0..Cluster::MASTERS {
        let mut connection = cluster.servers[master].connection();
        let stored: Vec<String> = redis::cmd("KEYS").arg("probe:*").query(&mut connection).unwrap();
        if let Some(stored) = stored.first() {
            let slot = redis::cmd("CLUSTER").arg("KEYSLOT").arg(stored).query(&mut connection).unwrap();
            limiter.reset(&policy, &key).await.unwrap(); // so that the next one's is the only one
            return (master, slot);
        }
    }
    panic!("nobody has the key of {user}");
}

async fn probe(cluster: &Cluster) -> RedisLimiter {
    connected(patient().prefix("probe"), &cluster.url()).await
}

/// Returns callers of the first master, each in its own slot, and one caller more.
async fn users(cluster: &Cluster) -> (Vec<String>, Vec<u16>) {
    let limiter = probe(cluster).await;
    let (mut users, mut slots) = (Vec::new(), Vec::new());
    for user in (100..300).map(|number| format!("user{number}")) {
        let (master, slot) = place(cluster, &limiter, &user).await;
        if master == 0 && users.len() <= CALLERS && !slots.contains(&slot) {
            users.push(user);
            slots.push(slot);
        }
    }
    assert_eq!(users.len(), CALLERS + 1);
    (users, slots)
}

/// All the slots, with their keys, every other one first: those of a caller with two are apart for
/// a while.
fn carry(cluster: &Cluster, slots: &[u16], from: usize, to: usize) {
    let pause = Duration::from_millis(150);
    slots.iter().for_each(|slot| cluster.begin_to_move(*slot, from, to));
    std::thread::sleep(pause);
    let keys: Vec<String> = slots.iter().flat_map(|slot| cluster.keys(*slot, from)).collect();
    let moved = keys.iter().filter(|key| key.starts_with("moves:")).count();
    assert!(moved >= slots.len() + CALLERS / 3, "each caller has its stored keys: {moved} moved");
    for half in 0..2 {
        keys.iter().skip(half).step_by(2).for_each(|key| cluster.carry(key, from, to));
        std::thread::sleep(pause * 2);
    }
    slots.iter().for_each(|slot| cluster.end_to_move(*slot, from, to));
    std::thread::sleep(pause);
}

/// Charges two new policies for a while, and then the next two, and counts what each two admitted.
async fn charge_new_ones(limiter: RedisLimiter, key: Key, counts: Arc<Mutex<Vec<u64>>>, stop: Arc<AtomicBool>) {
    let began = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        let turn = usize::try_from(began.elapsed().as_millis() / TURN.as_millis()).unwrap();
        let [one, other] = new_ones(turn);
        let taken = limiter.take(&[Charge::new(&one, &key), Charge::new(&other, &key)]).await;
        let admitted = taken.expect("a check of new keys").is_allowed();
        {
            let mut counts = counts.lock().unwrap();
            let turns = counts.len().max(turn + 1);
            counts.resize(turns, 0);
            counts[turn] += u64::from(admitted);
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn new_ones(turn: usize) -> [Policy; 2] {
    let [one, other] = [format!("new-{turn}"), format!("new-log-{turn}")];
    [Policy::new(one, window(NEW)).unwrap(), Policy::new(other, log(LOGGED)).unwrap()]
}

/// A key that moves takes its state along, and is served by one server or the other at any time,
/// whatever becomes of the caller's other keys: so not one unit more is admitted than the quota
/// has, and as no request fails, not one less.
async fn nothing_is_lost(cluster: &Cluster) {
    let limiter = connected(patient().prefix("moves").max_denials(0), &cluster.url()).await;
    let reasons = Reasons::default();
    let layers = Arc::new(layers(&limiter, &reasons));
    let (users, slots) = users(cluster).await;
    let users: Arc<[String]> = users.into();
    let counts: Arc<Vec<Count>> = Arc::new((0..CALLERS).map(|_| Count::default()).collect());
    let (stop, new) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
    let mut tasks: Vec<_> = (0..TASKS)
        .map(|task| {
            let (layers, users, counts) = (Arc::clone(&layers), Arc::clone(&users), Arc::clone(&counts));
            let (stop, caller) = (Arc::clone(&stop), task % CALLERS);
            tokio::spawn(async move {
                let count = &counts[caller];
                while !stop.load(Ordering::Relaxed) {
                    let began = Instant::now();
                    let (status, _) = send(&layers[caller], &users[caller]).await;
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
    let newcomer = key_of(&users[CALLERS]);
    tasks.extend((0..NEWCOMERS).map(|_| {
        let (new, stop) = (Arc::clone(&new), Arc::clone(&stop));
        tokio::spawn(charge_new_ones(limiter.clone(), newcomer.clone(), new, stop))
    }));
    let admitted = |caller: usize| counts[caller].admitted.load(Ordering::Relaxed);
    eventually("each caller has its stored keys", async || {
        (0..CALLERS).all(|caller| admitted(caller) > 0) && !new.lock().unwrap().is_empty()
    })
    .await;
    tokio::task::block_in_place(|| {
        carry(cluster, &slots, 0, 1);
        carry(cluster, &slots, 1, 2);
        carry(cluster, &slots, 2, 0);
    });
    eventually("each caller has had its quota", async || {
        (0..CALLERS).all(|caller| admitted(caller) >= if caller % 2 == 0 { FEW } else { FEW + 1 })
    })
    .await;
    stop.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await.unwrap();
    }
    settle(&limiter).await;
    for (caller, count) in counts.iter().enumerate() {
        let [admitted, failed, slowest_ms] =
            [&count.admitted, &count.failed, &count.slowest_ms].map(|number| number.load(Ordering::Relaxed));
        println!("caller {caller}: {admitted} admitted, {failed} failed, the slowest took {slowest_ms} ms");
        assert_eq!(failed, 0, "requests of caller {caller}: {:?}", reasons.0.lock().unwrap());
        assert!(Duration::from_millis(slowest_ms) < LONG, "a request of caller {caller} took {slowest_ms} ms");
        let (status, policies) = send(&layers[caller], &users[caller]).await;
        settle(&limiter).await;
        for policy in policies.into_iter().filter(|policy| policy.quota().period() == MONTH) {
            let used = used(&limiter, &policy, &key_of(&users[caller])).await;
            assert_eq!(used, admitted + u64::from(status == StatusCode::OK), "of {} of caller {caller}", policy.name());
        }
        assert!(if caller % 2 == 0 { admitted == FEW } else { admitted > FEW }, "{admitted} of caller {caller}");
    }
    let new = new.lock().unwrap().clone();
    println!("of new policies {new:?} were admitted");
    for (turn, admitted) in new.into_iter().enumerate() {
        for policy in new_ones(turn) {
            assert_eq!(used(&limiter, &policy, &newcomer).await, admitted, "of {}", policy.name());
        }
        assert!(admitted <= NEW, "{admitted} of {NEW} in turn {turn}");
    }
}

/// If each key is new, it is on the server to which the slot goes. Then no first request of a caller can
/// be decided in one step. It is decided all the same as on a single server.
async fn sets_with_refusal_charges_are_decided_key_by_key(cluster: &Cluster) {
    let limiter = probe(cluster).await;
    let mut moves = Vec::new();
    for user in BLOCKED {
        let (from, slot) = place(cluster, &limiter, user).await;
        let to = (from + 1) % Cluster::MASTERS;
        cluster.begin_to_move(slot, from, to);
        moves.push((slot, from, to));
    }
    let clock = ManualClock::new();
    let connect = || async { connected(patient().prefix("halfway").clock(clock.clone()), &cluster.url()).await };
    let limiters = [connect().await, connect().await];
    super::companions::refusals_close_a_key(limiters.clone(), &clock).await;
    super::companions::excess_is_metered(limiters, &clock).await;
    for (slot, from, to) in moves {
        cluster.keys(slot, from).iter().for_each(|key| cluster.carry(key, from, to));
        cluster.end_to_move(slot, from, to);
    }
}

/// A server that gives a slot away cannot write a key again that it has deleted. So a list
/// is changed without that; and where a text would have to become a list, nothing is done.
async fn a_quota_may_change_meanwhile(cluster: &Cluster) {
    let limiter = connected(patient().prefix("changes"), &cluster.url()).await;
    let (from, slot) = place(cluster, &probe(cluster).await, "flo").await;
    let key = key_of("flo");
    let buckets = Quota::sliding_window(LOGGED, MONTH).and_then(|window| window.buckets(30)).unwrap();
    let changes = [("log", log(LOGGED), log(FEW)), ("buckets", log(FEW), buckets), ("text", window(FEW), log(FEW))];
    let changes = changes.map(|(name, before, after)| (policy(name, before), policy(name, after)));
    for (before, _) in &changes {
        assert!(limiter.take(&[Charge::new(before, &key).cost(3)]).await.unwrap().is_allowed());
    }
    let to = (from + 1) % Cluster::MASTERS;
    cluster.begin_to_move(slot, from, to);
    let [one, two, text] = &changes;
    for (_, after) in [one, two] {
        assert!(limiter.take(&[Charge::new(after, &key)]).await.unwrap().is_allowed());
        assert_eq!(used(&limiter, after, &key).await, 4, "of {}", after.quota());
    }
    let refused = limiter.take(&[Charge::new(&text.1, &key)]).await.unwrap_err();
    assert_eq!(refused.kind(), StoreErrorKind::Unavailable, "{refused}");
    cluster.keys(slot, from).iter().for_each(|key| cluster.carry(key, from, to));
    assert!(limiter.take(&[Charge::new(&text.1, &key)]).await.is_ok_and(|decision| decision.is_allowed()));
    cluster.end_to_move(slot, from, to);
    for (_, after) in &changes {
        assert_eq!(used(&limiter, after, &key).await, 4, "of {}", after.quota());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_never_fail_while_slots_move() {
    let cluster = tokio::task::block_in_place(Cluster::start);
    nothing_is_lost(&cluster).await;
    sets_with_refusal_charges_are_decided_key_by_key(&cluster).await;
    a_quota_may_change_meanwhile(&cluster).await;
}
