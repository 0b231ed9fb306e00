//! Retries after the time that a server names.

use std::cell::RefCell;
use std::convert::Infallible;
use std::rc::Rc;

use http::{Method, Request, Response};
use tower::retry::{RetryLayer, budget::TpsBudget};
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::client::RetryAfter;

use super::*;
use crate::support::waiting::World;

/// A status and headers.
type Answer = (u16, &'static [(&'static str, &'static str)]);

/// Sends a request to a server that answers with these statuses and headers, the last one for ever.
/// Returns the status that the caller gets, and the milliseconds at which requests came.
fn send(
    method: &Method,
    answers: &'static [Answer],
    configure: impl FnOnce(RetryAfter) -> RetryAfter,
) -> (u16, Vec<u64>) {
    let mut world = World::new();
    let policy = configure(RetryAfter::new(world.timer.clone()).clock(world.clock.clone()).jitter_seed(5));
    let seen: Rc<RefCell<Vec<u64>>> = Rc::default();
    let server = {
        let (seen, timer) = (Rc::clone(&seen), world.timer.clone());
        service_fn(move |_: Request<()>| {
            let nth = seen.borrow().len().min(answers.len() - 1);
            seen.borrow_mut().push(timer.now_us() / 1_000);
            let (status, headers) = answers[nth];
            let response = headers
                .iter()
                .fold(Response::builder().status(status), |response, (name, value)| response.header(*name, *value));
            std::future::ready(Ok::<_, Infallible>(response.body(()).unwrap()))
        })
    };
    let client = RetryLayer::new(policy).layer(server);
    let request = Request::builder().method(method).uri("http://example.org/").body(()).unwrap();
    let task = world.spawn(client.oneshot(request));
    world.pass(1_000_000_000);
    let status = world.done[task].as_ref().expect("it is done").as_ref().unwrap().status();
    (status.as_u16(), seen.take())
}

#[track_caller]
fn waits(instants: &[u64], told: &[u64]) {
    assert_eq!(instants.len(), told.len() + 1, "{instants:?}");
    for (pair, told) in instants.windows(2).zip(told) {
        assert!((*told..=told + told / 10).contains(&(pair[1] - pair[0])), "{instants:?}");
    }
}

#[test]
fn retry_waits_as_the_server_says() {
    const REFUSED: Answer = (429, &[("retry-after", "30")]);
    const RESET: Answer = (429, &[("ratelimit", "\"d\";r=0;t=7")]);
    const PUSHBACK: Answer = (200, &[("grpc-status", "8"), ("grpc-retry-pushback-ms", "1500")]);
    const OK: Answer = (200, &[]);
    let (status, instants) = send(&Method::GET, &[REFUSED, RESET, PUSHBACK, OK], |policy| policy);
    assert_eq!(status, 200);
    waits(&instants, &[30_000, 7_000, 1_500]);
}

#[test]
fn retry_without_a_time_waits_ever_longer() {
    let (status, instants) = send(&Method::PUT, &[(503, &[])], |policy| policy.max_retries(8));
    assert_eq!(status, 503);
    waits(&instants, &[1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000]);
}

#[test]
fn retry_gives_up_at_once_if_the_wait_is_too_long() {
    let (status, instants) = send(&Method::GET, &[(429, &[("retry-after", "301")])], |policy| policy);
    assert_eq!((status, instants), (429, vec![0]));
    let (_, instants) =
        send(&Method::GET, &[(429, &[("retry-after", "5")])], |policy| policy.max_wait(Duration::from_secs(4)));
    assert_eq!(instants, [0]);
}

#[test]
fn retry_spares_other_responses_and_methods() {
    const OTHERS: [&[Answer]; 3] =
        [&[(200, &[("retry-after", "1")])], &[(404, &[("retry-after", "1")])], &[(500, &[("retry-after", "1")])]];
    for other in OTHERS {
        assert_eq!(send(&Method::GET, other, |policy| policy).1.len(), 1);
    }
    assert_eq!(send(&Method::POST, &[(429, &[])], |policy| policy).1.len(), 1);
    assert_eq!(send(&Method::POST, &[(429, &[])], |policy| policy.any_method(true)).1.len(), 4);
    const FORBIDDEN: Answer = (200, &[("grpc-status", "8"), ("grpc-retry-pushback-ms", "-1")]);
    assert_eq!(send(&Method::POST, &[FORBIDDEN], |policy| policy.any_method(true)).1.len(), 1);
}

#[test]
fn retry_ends_with_the_budget() {
    let two = || TpsBudget::new(Duration::from_secs(1), 2, 0.0);
    let (_, instants) = send(&Method::GET, &[(429, &[])], |policy| policy.budget(two()).max_retries(9));
    assert_eq!(instants.len(), 3);
}
