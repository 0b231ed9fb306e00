//! `Stats` keeps the last refusals, for those who answer users.

use std::convert::Infallible;
use std::net::IpAddr;
use std::time::Duration;

use axum::body::Body;
use http::{HeaderName, Request, Response, StatusCode};
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::clock::ManualClock;
use tower_ratelimit::limiter::Limiter;
use tower_ratelimit::middleware::{Access, AccessList};
use tower_ratelimit::observe::{OutcomeKind, RecentRefusal, Stats};
use tower_ratelimit::{Key, Mode, Quota, RateLimitLayer, Rule, Wait, key};

use crate::support::{Scripted, memory};

async fn send<L: Limiter>(layer: &RateLimitLayer<L>, path: &str, key: &str, id: &str) {
    let service = layer.layer(service_fn(async |_: Request<Body>| Ok::<_, Infallible>(Response::new(Body::empty()))));
    let request = Request::post(path).header("key", key).header("x-request-id", id).body(Body::empty()).unwrap();
    service.oneshot(request).await.unwrap();
}

fn shown(key: &Key) -> Option<String> {
    key.display().to_string().strip_prefix("shown-").map(str::to_owned)
}

#[tokio::test]
async fn refusal_is_kept_with_who_when_and_which_rule() {
    let clock = ManualClock::new();
    let stats = Stats::builder().clock(clock.clone()).reveal(shown).max_recent_refusals(100).keep_paths(true);
    let stats = stats.request_id(HeaderName::from_static("x-request-id")).build();
    let client = Rule::new("client", Quota::per_minute(3)).unwrap().cost(|_| 2);
    let day = Rule::new("day", Quota::fixed_window(3, Duration::from_secs(86_400)).unwrap()).unwrap().cost(|_| 2);
    let layer = RateLimitLayer::new(memory(&clock), client, key::header("key")).observer(stats.clone());
    let layer = layer.and(day, key::header("key"));
    send(&layer, "/", "shown-a", "1").await;
    clock.advance(Duration::from_secs(4));
    send(&layer, "/posts?secret=1", "shown-a", "2").await;
    clock.advance(Duration::from_secs(1));
    send(&layer, "/", "hidden", "3").await;
    send(&layer, "/", "hidden", "").await;

    let snapshot = stats.snapshot();
    let [hidden, first] = snapshot.recent_refusals() else { panic!("{snapshot:?}") };
    assert_eq!((first.name(), first.request(), first.request_id()), (Some("a"), Some("POST /posts"), Some("2")));
    assert_eq!((hidden.name(), hidden.request_id()), (None, None));
    assert_eq!(snapshot.taken_at().saturating_since(first.at()), Duration::from_secs(1));
    let status = first.status().unwrap();
    let decision = status.decision();
    assert_eq!((status.policy().name(), status.cost(), decision.remaining(), decision.limit()), ("day", 2, 1, 3));
    assert_eq!((first.outcome(), decision.wait()), (OutcomeKind::Limited, Wait::After(Duration::from_secs(86_396))));
    let fingerprints = snapshot.most_limited().iter().map(|key| key.fingerprint()).collect::<Vec<_>>();
    for refusal in [hidden, first] {
        assert!(fingerprints.contains(&refusal.fingerprint().unwrap()), "{refusal:?}");
        assert!(!format!("{refusal:?}").contains("hidden"));
    }
}

#[tokio::test]
async fn key_has_its_name_in_all_lists() {
    let clock = ManualClock::new();
    let stats = Stats::builder().clock(clock.clone()).reveal(shown).max_recent_refusals(100).count_use(true).build();
    let layer = RateLimitLayer::new(memory(&clock), Quota::per_hour(1), key::header("key")).observer(stats.clone());
    for (key, name) in [("shown-a", Some("a")), ("hidden", None)] {
        send(&layer, "/", key, "").await;
        send(&layer, "/", key, "").await;
        let snapshot = stats.snapshot();
        let refusal = &snapshot.recent_refusals()[0];
        let lists = [snapshot.most_limited(), snapshot.policies()[0].most_used()];
        for list in lists {
            let listed = list.iter().find(|key| Some(key.fingerprint()) == refusal.fingerprint()).unwrap();
            assert_eq!((listed.name(), refusal.name()), (name, name));
        }
        clock.advance(Duration::from_millis(1));
    }
}

#[tokio::test]
async fn refusals_are_not_kept_unless_asked_for() {
    let stats = Stats::builder().keep_paths(true).request_id(HeaderName::from_static("x-request-id")).build();
    let layer = RateLimitLayer::new(memory(&ManualClock::new()), Quota::per_hour(1), key::header("key"));
    let layer = layer.observer(stats.clone());
    send(&layer, "/", "a", "1").await;
    send(&layer, "/", "a", "2").await;
    assert_eq!(stats.snapshot().requests(OutcomeKind::Limited), 1);
    assert!(stats.snapshot().recent_refusals().is_empty());
}

#[tokio::test]
async fn path_and_id_are_not_kept_unless_asked_for() {
    let stats = Stats::builder().max_recent_refusals(1).build();
    let layer = RateLimitLayer::new(memory(&ManualClock::new()), Quota::per_hour(1), key::header("key"));
    let layer = layer.observer(stats.clone());
    send(&layer, "/", "a", "1").await;
    send(&layer, "/", "a", "2").await;
    let snapshot = stats.snapshot();
    let [refusal] = snapshot.recent_refusals() else { panic!("{snapshot:?}") };
    assert_eq!((refusal.name(), refusal.request(), refusal.request_id()), (None, None, None));
}

#[tokio::test]
async fn refusal_names_the_network_that_is_denied() {
    let clock = ManualClock::new();
    let stats = Stats::builder().clock(clock.clone()).max_recent_refusals(100).build();
    let (networks, keys) = (AccessList::new(), AccessList::new());
    for network in ["203.0.113.0/24", "203.0.113.7", "64:ff9b::/96"] {
        networks.set(network, Access::Deny).unwrap();
    }
    keys.set_key("denied", Access::Deny);
    let client = |head: &tower_ratelimit::Head<'_>| head.headers.get("key")?.to_str().ok()?.parse::<IpAddr>().ok();
    let layer = RateLimitLayer::new(memory(&clock), Quota::per_hour(9), key::header("key"))
        .access(&networks, client)
        .access(&keys, key::header("key"))
        .observer(stats.clone());
    for (key, network) in [
        ("203.0.113.9", Some("203.0.113.0/24")),
        ("203.0.113.7", Some("203.0.113.7/32")),
        ("64:ff9b::203.0.113.9", Some("203.0.113.0/24")),
        ("64:ff9b::198.51.100.1", Some("64:ff9b::/96")),
        ("denied", None),
    ] {
        clock.advance(Duration::from_secs(1));
        send(&layer, "/", key, "").await;
        let snapshot = stats.snapshot();
        let last = &snapshot.recent_refusals()[0];
        assert_eq!((last.outcome(), last.network().as_deref()), (OutcomeKind::Denied, network), "{key}");
    }
}

#[tokio::test]
async fn refusals_without_a_policy_are_kept_by_outcome() {
    let clock = ManualClock::new();
    let stats = Stats::builder().clock(clock.clone()).max_recent_refusals(100).build();
    let (list, limiter) = (AccessList::new(), Scripted::new());
    list.set_key("denied", Access::Deny);
    let shadow = Rule::new("trial", Quota::per_hour(1)).unwrap().mode(Mode::Shadow);
    let layer = RateLimitLayer::new(limiter.clone(), Quota::per_hour(9), key::header("key"))
        .and(shadow, key::header("key"))
        .access(&list, key::header("key"))
        .observer(stats.clone());
    for key in ["a", "a", "denied", ""] {
        clock.advance(Duration::from_secs(1));
        send(&layer, "/", key, "").await; // the second one is over the limit of the trial
    }
    clock.advance(Duration::from_secs(1));
    limiter.fail(true);
    send(&layer, "/", "a", "").await;
    let snapshot = stats.snapshot();
    let outcomes: Vec<OutcomeKind> = snapshot.recent_refusals().iter().map(RecentRefusal::outcome).collect();
    assert_eq!(outcomes, [OutcomeKind::FailedClosed, OutcomeKind::KeyMissing, OutcomeKind::Denied]);
    assert!(snapshot.recent_refusals().iter().all(|refusal| refusal.status().is_none()));
}

#[tokio::test]
async fn request_that_went_to_the_overflow_is_kept() {
    let stats = Stats::builder().max_recent_refusals(100).build();
    let later = service_fn(async |_: Request<Body>| {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::ACCEPTED;
        Ok::<_, Infallible>(response)
    });
    let layer = RateLimitLayer::new(memory(&ManualClock::new()), Quota::per_hour(1), key::global());
    let layer = layer.observer(stats.clone()).overflow(later);
    let service = layer.layer(service_fn(async |_: Request<Body>| Ok::<_, Infallible>(Response::new(Body::empty()))));
    for _ in 0..2 {
        service.clone().oneshot(Request::new(Body::empty())).await.unwrap();
    }
    let snapshot = stats.snapshot();
    let [refusal] = snapshot.recent_refusals() else { panic!("{snapshot:?}") };
    assert_eq!(refusal.outcome(), OutcomeKind::Overflowed);
    assert!(refusal.status().is_some());
}
