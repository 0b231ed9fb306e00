//! Envoy's rate limit service, version 3.
//!
//! A file in Envoy's form is answered as envoyproxy/ratelimit answers, except for:
//!
//! * A request that is over a limit is charged to none of the others, as with
//!   `STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT=true`.
//! * A descriptor with `hits_addend` 0 is over the limit if nothing remains.
//! * Each answer has the headers that report the limits, for Envoy to add. envoyproxy/ratelimit sends them only with
//!   `LIMIT_RESPONSE_HEADERS_ENABLED`, and names them otherwise.
//! * Errors are `INVALID_ARGUMENT` and `UNAVAILABLE`. Envoy lets a request pass after `UNKNOWN`, whatever
//!   `failure_mode_deny` says.
//!
//! `native` answers by rules about requests.

mod messages;
mod native;
mod status;

use std::time::Duration;

use tower_ratelimit::Quota;
use tower_ratelimit::rules::{Descriptor, DescriptorRequest};

use super::grpc::{Code, Status};
use super::limits::{Domain, Form};
use super::server::Server;

use status::{UNITS, code, descriptor_status, headers};

pub(crate) use messages::{RateLimitRequest, RateLimitResponse};

/// The path of the service's only method.
pub(crate) const METHOD: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// More descriptors than Envoy sends for a request.
const DESCRIPTORS_MAX: usize = 100;

/// Decides about a request.
pub(crate) async fn answer(
    server: &Server,
    request: RateLimitRequest,
    peer: std::net::IpAddr,
) -> Result<RateLimitResponse, Status> {
    let invalid = |message: &str| Status::new(Code::InvalidArgument, message);
    if request.domain.is_empty() {
        return Err(invalid("rate limit domain must not be empty"));
    }
    if request.descriptors.is_empty() {
        return Err(invalid("rate limit descriptor list must not be empty"));
    }
    if request.descriptors.len() > DESCRIPTORS_MAX {
        return Err(Status::new(Code::InvalidArgument, format!("a request has at most {DESCRIPTORS_MAX} descriptors")));
    }
    match &server.limits.form {
        Form::Native { layer, .. } => native::answer(layer, request, peer, server.paths).await,
        Form::Envoy(domains) => of_domain(server, domains, request).await,
    }
}

/// Decides by the limits of the request's domain.
async fn of_domain(
    server: &Server,
    domains: &[Domain],
    request: RateLimitRequest,
) -> Result<RateLimitResponse, Status> {
    // In limits of another domain the descriptors match nothing.
    let domain = domains.iter().find(|domain| domain.limits.domain() == request.domain).or(domains.first());
    let domain = domain.ok_or_else(|| Status::new(Code::Unavailable, "no rate limit configuration loaded"))?;
    // Not UNKNOWN: see the beginning of this file. The log has the error.
    let answer = domain.limits.decide(&asked(request)?).await;
    let answer = answer.map_err(|_| Status::new(Code::Unavailable, "the limiter cannot answer"))?;
    Ok(RateLimitResponse {
        overall_code: code(answer.is_over_limit()),
        statuses: answer.statuses().iter().map(descriptor_status).collect(),
        response_headers_to_add: headers(&answer.headers(&server.limits.headers)),
        raw_body: Vec::new(),
    })
}

/// Returns what a request asks.
fn asked(request: RateLimitRequest) -> Result<DescriptorRequest, Status> {
    let hits_of_all = u64::from(request.hits_addend.max(1)); // 0 is the same as none
    request.descriptors.into_iter().try_fold(DescriptorRequest::new(request.domain), |asked, descriptor| {
        let hits = descriptor.hits_addend.map_or(hits_of_all, |hits| hits.value);
        let entries = descriptor.entries.into_iter().map(|entry| (entry.key, entry.value));
        let charged = Descriptor::new(entries).hits(hits);
        let quota = descriptor.limit.map(|limit| quota(&limit)).transpose()?;
        Ok(match (quota, descriptor.is_negative_hits) {
            (None, false) => asked.charge(charged),
            (None, true) => asked.refund(charged),
            (Some(quota), false) => asked.charge_under(charged, quota),
            (Some(quota), true) => asked.refund_under(charged, quota),
        })
    })
}

/// Returns the quota that a descriptor brings along. It counts as those of the file do.
fn quota(limit: &messages::RateLimitOverride) -> Result<Quota, Status> {
    let seconds = UNITS.iter().find(|(unit, _)| *unit == limit.unit).map(|(_, seconds)| *seconds);
    let seconds = seconds.ok_or_else(|| Status::new(Code::InvalidArgument, "a limit has an unknown unit"))?;
    Quota::fixed_window(u64::from(limit.requests_per_unit), Duration::from_secs(seconds))
        .map_err(|error| Status::new(Code::InvalidArgument, error.to_string()))
}
