//! Random schedules of rules that are replaced while requests are decided. `tests/campaigns.sh` has the command that
//! runs them.

use std::convert::Infallible;

use axum::body::Body;
use http::{Request, Response};
use shuttle::future::block_on;
use shuttle::thread;
use tower_layer::Layer;
use tower_service::Service;

use super::Rules;
use crate::MemoryLimiter;
use crate::base::sampling::explore;
use crate::clock::ManualClock;

#[derive(Clone)]
struct Answers;

impl Service<Request<String>> for Answers {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), Infallible>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<String>) -> Self::Future {
        std::future::ready(Ok(Response::new(Body::empty())))
    }
}

fn text(quota: u64, name: &str) -> String {
    format!("rules: [{{name: {name}, quota: {quota}/h, key: global}}]")
}

/// Each layer, and each clone of it, ends with the rules that are in force at last, and a name admits no more than its
/// largest quota.
#[test]
fn layers_end_with_the_last_rules_whoever_replaces_them() {
    explore(1_000, || {
        let rules = Rules::from_text(text(3, "first")).expect("the rules are valid");
        let clock = ManualClock::new();
        let limiter = MemoryLimiter::builder().max_keys(8).min_entries(1).clock(clock).build();
        let limiter = limiter.expect("the setup is possible");
        let layer = rules.layer(limiter.clone()).expect("the limiter supports them");
        let replaces = [(5, "first"), (2, "first"), (9, "second")].map(|(quota, name)| {
            let rules = rules.clone();
            thread::spawn(move || assert!(rules.replace(text(quota, name)).is_ok()))
        });
        let sends = (0..2).map(|_| {
            let mut service = layer.layer(Answers);
            thread::spawn(move || {
                let passed = (0..4).filter(|_| {
                    let response = block_on(service.call(Request::new(String::new()))).expect("nothing fails");
                    response.status().is_success()
                });
                passed.count()
            })
        });
        let sends: Vec<_> = sends.collect();
        replaces.into_iter().for_each(|thread| thread.join().expect("the thread ends"));
        let passed: usize = sends.into_iter().map(|thread| thread.join().expect("the thread ends")).sum();
        assert!(passed <= 5 + 9, "{passed} passed");
        assert_eq!(rules.version(), 3);
        let in_force = rules.layer(limiter.clone()).expect("the limiter supports them").policies();
        assert_eq!(layer.policies(), in_force);
        let clone = layer.clone();
        assert_eq!(clone.policies(), in_force);
    });
}
