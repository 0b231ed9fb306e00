//! Quotas, rules and services that several tests use.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::time::Duration;

use axum::body::Body;
use http::{HeaderValue, Request, Response};
use tower_ratelimit::observe::Outcome;
use tower_ratelimit::quota::Algorithm;
use tower_ratelimit::{Quota, Rule};

use super::of_each_algorithm_but;

/// Returns a quota of every algorithm that restores its units, with this limit.
pub(crate) fn every_algorithm(limit: u64, period: Duration) -> Vec<Quota> {
    let window = Quota::sliding_window(limit, period).unwrap();
    let quotas = vec![
        Quota::token_bucket(limit, period).unwrap(),
        Quota::step_bucket(limit, period).unwrap(),
        Quota::gcra(limit, period).unwrap().burst(limit).unwrap(),
        Quota::leaky_bucket(limit, period).unwrap(),
        Quota::leaky_queue(limit, period).unwrap(),
        Quota::fixed_window(limit, period).unwrap(),
        window,
        window.buckets(24).unwrap(),
        Quota::sliding_log(limit, period).unwrap(),
    ];
    of_each_algorithm_but(&[Algorithm::Block, Algorithm::Meter], quotas)
}

/// Returns a rule that refuses only requests whose header `dear` names its policy.
pub(crate) fn refuses_dear(name: &'static str, quota: Quota) -> Rule {
    Rule::new(name, quota).unwrap().cost(move |parts| {
        let dear = parts.headers.get("dear").is_some_and(|dear| dear == name);
        if dear { 1 << 40 } else { 1 }
    })
}

/// Answers with a header that names the outcome of the request.
#[expect(clippy::needless_pass_by_value, reason = "a service takes its request")]
pub(crate) fn name_outcome<B>(request: Request<B>) -> Ready<Result<Response<Body>, Infallible>> {
    let mut response = Response::new(Body::empty());
    if let Some(outcome) = request.extensions().get::<Outcome>() {
        response.headers_mut().insert("seen", HeaderValue::from_static(outcome.kind().as_str()));
    }
    ready(Ok(response))
}
