//! The promises of this crate's server, and this crate's client that obeys them.

use std::cell::RefCell;
use std::convert::Infallible;
use std::rc::Rc;

use axum::body::Body;
use http::{Request, Response};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_ratelimit::client::{ObeyError, ObeyErrorKind, ObeyLayer};
use tower_ratelimit::clock::{ManualClock, Timestamp};
use tower_ratelimit::{Headers, RateLimitLayer, key};

use super::round_trip::{formats, requests_and_tokens, system_time};
use super::*;
use crate::support::waiting::{ManualTimer, World};
use crate::support::{every_algorithm, memory};

/// When a request was sent, its status, and how long the server asked to wait after it.
type Sent = (u64, u16, Option<Duration>);

/// Sends `count` requests, one after the other, and returns what happened. `change` may change a
/// response on its way; it gets the time at which the server got the request. The client's clock is off by `skew`
/// minutes.
fn alone(
    limit: &RateLimitLayer<tower_ratelimit::MemoryLimiter>,
    mut world: World<()>,
    count: usize,
    skew: i64,
    change: impl Fn(&mut Response<Body>, SystemTime) + Clone + 'static,
) -> Vec<Sent> {
    let wall = ManualClock::new();
    let served = service_fn(|_: Request<Body>| async { Ok::<_, Infallible>(Response::new(Body::empty())) });
    let server = limit.layer(served);
    let sent: Rc<RefCell<Vec<Sent>>> = Rc::default();
    let timer: ManualTimer = world.timer.clone();
    let remote = {
        let (sent, wall, timer) = (Rc::clone(&sent), wall.clone(), timer.clone());
        service_fn(move |request: Request<Body>| {
            let (server, sent, wall, timer) = (server.clone(), Rc::clone(&sent), wall.clone(), timer.clone());
            let change = change.clone();
            async move {
                let before = system_time();
                let since = before.duration_since(UNIX_EPOCH).unwrap().as_micros();
                wall.set(Timestamp::from_micros((since as i64 + skew * 60_000_000) as u64));
                let mut response = server.oneshot(request).await?;
                change(&mut response, before);
                // The advice that the client reads, with the client's clock.
                let now = UNIX_EPOCH + Duration::from_micros(tower_ratelimit::clock::Clock::now(&wall).as_micros());
                let advice = Advice::read(response.headers(), now);
                sent.borrow_mut().push((timer.now_us(), response.status().as_u16(), advice.wait().duration()));
                Ok::<_, Infallible>(response)
            }
        })
    };
    let mut client =
        ObeyLayer::new(timer).clock(wall).max_wait(Duration::from_secs(86_400)).jitter_seed(3).layer(remote);
    world.spawn(async move {
        for _ in 0..count {
            let request = Request::get("http://example.org/").body(Body::empty()).unwrap();
            client.ready().await.unwrap().call(request).await.unwrap();
        }
    });
    world.pass(3 * 86_400 * 1_000_000);
    drop(world);
    Rc::into_inner(sent).unwrap().into_inner()
}

/// Asserts that no two refusals follow each other, that no request is sent earlier than told, and that
/// none waits longer than told and 10 percent.
#[track_caller]
fn is_obedient(sent: &[Sent], count: usize, case: &str) {
    assert_eq!(sent.len(), count, "{case}");
    for pair in sent.windows(2) {
        let [(at, status, told), (next, next_status, _)] = pair else { unreachable!() };
        assert!(*status == 200 || *next_status == 200, "{case}: refused twice in a row: {sent:?}");
        let (waited, told) = (Duration::from_micros(next - at), told.unwrap_or_default());
        assert!(waited >= told, "{case}: {waited:?} instead of {told:?}");
        let most = if *status == 200 || !told.is_zero() { told } else { Duration::from_secs(1) };
        assert!(waited <= most + most / 10 + Duration::from_micros(1), "{case}: {waited:?} instead of {told:?}");
    }
}

#[test]
fn client_alone_is_never_refused_twice_in_a_row() {
    for (format, headers) in formats().into_iter().enumerate() {
        for quota in every_algorithm(7, Duration::from_secs(60)) {
            let world = World::new();
            let limit = RateLimitLayer::new(memory(&world.clock), quota, key::global()).headers(headers.clone());
            let sent = alone(&limit, world, 40, 0, |_, _| {});
            is_obedient(&sent, 40, &format!("{quota}, format {format}"));
        }
    }
}

#[test]
fn client_obeys_a_server_with_requests_and_tokens() {
    for headers in [Headers::openai(), Headers::anthropic()] {
        // The requests are exhausted without a refusal. Or less is left of the tokens than a request costs.
        for (cost, count, refused) in [(1, 150, false), (40_000, 9, true)] {
            let world = World::new();
            let limit = requests_and_tokens(&world.clock, cost, headers.clone());
            let sent = alone(&limit, world, count, 0, |_, _| {});
            assert_eq!(sent.iter().any(|(_, status, _)| *status == 429), refused, "{cost}: {headers:?}");
            is_obedient(&sent, count, &format!("{cost}: {headers:?}"));
        }
    }
}

#[test]
fn clocks_that_differ_by_minutes_change_nothing_beside_a_date() {
    for skew in [-90, -7, 7, 90] {
        for (format, headers) in formats().into_iter().enumerate() {
            let world = World::new();
            let quota = tower_ratelimit::Quota::fixed_window(7, Duration::from_secs(60)).unwrap();
            let limit = RateLimitLayer::new(memory(&world.clock), quota, key::global()).headers(headers.clone());
            let dated = |response: &mut Response<Body>, now| {
                let date = httpdate::fmt_http_date(now).parse().unwrap();
                response.headers_mut().insert("date", date);
            };
            let sent = alone(&limit, world, 30, skew, dated);
            is_obedient(&sent, 30, &format!("{skew} minutes, format {format}"));
        }
    }
}

#[test]
fn lying_servers_bound_no_wait() {
    let lies: [(&str, &[(&str, &str)]); 6] = [
        ("a wait of 31 years", &[("retry-after", "999999999")]),
        ("a wait of 10^12 seconds", &[("retry-after", "1000000000000")]),
        ("a negative wait", &[("retry-after", "-5")]),
        ("a negative reset", &[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "-1")]),
        ("a reset that never comes", &[("ratelimit", "\"d\";r=0;t=999999999999999")]),
        ("a date long ago", &[("retry-after", "Fri, 01 Jan 1971 00:00:00 GMT")]),
    ];
    for (case, headers) in lies {
        let mut world = World::new();
        let layer = ObeyLayer::new(world.timer.clone()).jitter_seed(3);
        let served = service_fn(move |_: Request<()>| async move {
            let mut response = Response::builder().status(429);
            for (name, value) in headers {
                response = response.header(*name, *value);
            }
            Ok::<_, Infallible>(response.body(()).unwrap())
        });
        for _ in 0..3 {
            let client = layer.layer(served);
            world.spawn(client.oneshot(Request::get("http://example.org/").body(()).unwrap()));
        }
        world.pass(310 * 1_000_000);
        for done in &world.done {
            match done.as_ref().unwrap_or_else(|| panic!("{case}: a request waits too long")) {
                Ok(response) => assert_eq!(response.status(), 429),
                Err(error) => {
                    let error: &ObeyError = error.downcast_ref().unwrap();
                    assert_eq!(error.kind(), ObeyErrorKind::TooLong, "{case}");
                    assert!(error.wait().duration().unwrap() > Duration::from_secs(300), "{case}");
                }
            }
        }
        let refused = world.done.iter().flatten().filter(|done| done.is_err()).count();
        let is_long = ["a wait of 31 years", "a wait of 10^12 seconds"].contains(&case);
        assert_eq!(refused, if is_long { 2 } else { 0 }, "{case}");
    }
}

#[test]
fn ten_megabytes_of_headers_are_read() {
    let mut world = World::new();
    let layer = ObeyLayer::new(world.timer.clone()).jitter_seed(3);
    let served = service_fn(|_: Request<()>| async {
        let mut response = Response::builder().status(429);
        for nth in 0..10_000 {
            let value = format!("\"{}\";r={nth};t=5", "x".repeat(1_000));
            response = response.header("ratelimit", value);
        }
        Ok::<_, Infallible>(response.header("retry-after", "5").body(()).unwrap())
    });
    for _ in 0..2 {
        world.spawn(layer.layer(served).oneshot(Request::get("http://example.org/").body(()).unwrap()));
    }
    assert!(world.done[0].is_some() && world.done[1].is_none());
    world.pass(6_000_000);
    assert!(world.done[1].is_some());
}
