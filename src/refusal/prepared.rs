//! Builds the response to one refused request.

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use smallvec::SmallVec;

use crate::base::head::Head;
use crate::base::wait::Wait;
use crate::outcome::{Outcome, PolicyStatus};
use crate::policy::{CONCURRENT_REQUESTS, Policy};

use super::body::RefusalBody;
use super::definition::{DefaultResponse, Refusal, Refusals};
use super::grpc;
use super::problem::ProblemDetails;
use super::protocol::Protocol;
use super::reason::{Reason, TOO_COSTLY, message};

const BLANK: &str = "about:blank";
const QUOTA_EXCEEDED: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";
const QUOTA_EXCEEDED_TITLE: &str = "Request cannot be satisfied as assigned quota has been exceeded";
const REDUCED_CAPACITY: &str = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";
const REDUCED_CAPACITY_TITLE: &str = "Request cannot be satisfied due to temporary server capacity constraints";

/// [`Refusals`] compiled for the policies of one layer, with the usual bodies rendered.
#[derive(Debug)]
pub(crate) struct PreparedRefusals {
    refusals: Refusals,
    /// For each policy, the body if only this policy refuses. A prepared body is not used if the body has to say how
    /// many requests are in progress, or that no wait helps.
    limited: Vec<(Policy, Bytes)>,
}

impl PreparedRefusals {
    pub(crate) fn new(refusals: Refusals, policies: &[Policy]) -> Self {
        let is_constant = |policy: &&Policy| !policy.limits_in_flight();
        let body = |policy: &Policy| (policy.clone(), refusals.limited_body(&[policy.name()], None));
        let limited = policies.iter().filter(is_constant).map(body);
        Self { limited: limited.collect(), refusals }
    }

    /// Returns the headers of every default refusal over plain HTTP.
    pub(crate) fn headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, self.refusals.format.content_type());
        forbid_storing(&mut headers);
        headers
    }

    /// Returns the HTTP status of a request that is over a quota.
    pub(crate) fn limited_status(&self) -> StatusCode {
        self.refusals.status
    }

    /// Returns whether the refusal is the usual refusal: the default response over plain HTTP for a request over a
    /// quota.
    pub(crate) fn is_usual(&self, head: &Head<'_>, outcome: &Outcome) -> bool {
        self.refusals.responder.is_none()
            && Reason::of(outcome) == Reason::Limited
            && self.protocol_of(head) == Protocol::Http
    }

    /// Returns the response, without the headers that report quotas. `wait` is the reported wait.
    pub(crate) fn respond(&self, head: &Head<'_>, outcome: &Outcome, wait: Wait) -> Response<RefusalBody> {
        let refusal = self.refusal(head, outcome, wait);
        let responder = self.refusals.responder.as_ref();
        match responder.filter(|own| own.every_protocol || refusal.protocol == Protocol::Http) {
            Some(own) => {
                let mut response = (own.respond)(&refusal);
                forbid_storing(response.headers_mut());
                response
            }
            None => self.default_response(&refusal),
        }
    }

    pub(super) fn refusal<'a>(&'a self, head: &'a Head<'a>, outcome: &'a Outcome, wait: Wait) -> Refusal<'a> {
        Refusal { head, outcome, wait, protocol: self.protocol_of(head), default: self }
    }

    fn protocol_of(&self, head: &Head<'_>) -> Protocol {
        if self.refusals.grpc { Protocol::of(head) } else { Protocol::Http }
    }

    fn http_response(&self, reason: Reason, outcome: &Outcome) -> Response<RefusalBody> {
        let body = match reason {
            Reason::Limited => self.limited_body(outcome),
            other => self.refusals.blank_body(other),
        };
        let mut response = Response::new(RefusalBody::whole(body));
        *response.status_mut() = reason.http_status(self.refusals.status);
        *response.headers_mut() = self.headers();
        response
    }

    /// Returns the body for a request that is over a quota.
    pub(crate) fn limited_body(&self, outcome: &Outcome) -> Bytes {
        let mut violated = outcome.violated_once();
        if let (Some(only), None) = (violated.next(), violated.next()) {
            // The prepared body of a policy fits any quota, because it names only the policy.
            let is_constant = !only.policy().limits_in_flight() && only.decision().wait() != Wait::Never;
            let is_it = |(policy, _): &&(Policy, Bytes)| is_constant && policy.name() == only.policy().name();
            if let Some((_, body)) = self.limited.iter().find(is_it) {
                return body.clone();
            }
        }
        let names: SmallVec<[&str; 4]> = outcome.violated_once().map(|status| status.policy().name()).collect();
        match outcome.wait() {
            Wait::Never => self.refusals.limited_body(&names, Some(TOO_COSTLY)),
            _ => self.refusals.limited_body(&names, in_progress(outcome).as_deref()),
        }
    }

    /// Returns the code and the message of a refused request over gRPC.
    pub(crate) fn grpc_status(&self, outcome: &Outcome) -> (u8, &'static str) {
        (Reason::of(outcome).grpc_status(self.refusals.grpc_code), message(outcome))
    }

    fn grpc_response(&self, reason: Reason, refusal: &Refusal<'_>) -> Response<RefusalBody> {
        let (code, message) = self.grpc_status(refusal.outcome);
        let mut response = Response::new(RefusalBody::whole(Bytes::new()));
        let headers = response.headers_mut();
        grpc::write_status(headers, refusal.protocol, code, message);
        let has_wait = matches!(reason, Reason::Limited | Reason::LimiterFailed);
        if has_wait && self.refusals.grpc_pushback {
            grpc::write_pushback(headers, refusal.wait);
        }
        if reason == Reason::Limited && self.refusals.grpc_details {
            grpc::write_details(headers, &grpc::details(code, message, refusal.wait, refusal.outcome));
        }
        forbid_storing(headers);
        response
    }
}

impl DefaultResponse for PreparedRefusals {
    fn status(&self, outcome: &Outcome) -> StatusCode {
        Reason::of(outcome).http_status(self.refusals.status)
    }

    fn default_response(&self, refusal: &Refusal<'_>) -> Response<RefusalBody> {
        let reason = Reason::of(refusal.outcome);
        match refusal.protocol {
            Protocol::Http => self.http_response(reason, refusal.outcome),
            Protocol::Grpc | Protocol::GrpcWeb { .. } => self.grpc_response(reason, refusal),
        }
    }
}

impl Refusals {
    /// Renders the body for a request that these policies refused.
    fn limited_body(&self, policies: &[&str], detail: Option<&str>) -> Bytes {
        let default_kind =
            if self.status == StatusCode::SERVICE_UNAVAILABLE { REDUCED_CAPACITY } else { QUOTA_EXCEEDED };
        let kind = self.problem_type.as_deref().unwrap_or(default_kind);
        let default_title = match kind {
            BLANK => phrase(self.status),
            REDUCED_CAPACITY => REDUCED_CAPACITY_TITLE,
            _ => QUOTA_EXCEEDED_TITLE,
        };
        let title = self.title.as_deref().unwrap_or(default_title);
        let problem = ProblemDetails { kind, title, status: self.status, detail, policies: Some(policies) };
        Bytes::from(self.format.render(&problem))
    }

    /// Renders the body for a refusal that is not about a quota.
    fn blank_body(&self, reason: Reason) -> Bytes {
        let status = reason.http_status(self.status);
        let detail = Some(reason.message());
        let problem = ProblemDetails { kind: BLANK, title: phrase(status), status, detail, policies: None };
        Bytes::from(self.format.render(&problem))
    }
}

/// Returns how much of a concurrency limit is held, if such a limit refused the request and can admit it after
/// other requests end.
fn in_progress(outcome: &Outcome) -> Option<String> {
    let is_held = |status: &&PolicyStatus| status.policy().limits_in_flight();
    let status = outcome.violated().filter(is_held).find(|status| status.decision().wait() == Wait::Unknown)?;
    let limit = status.decision().limit();
    let held = limit.saturating_sub(status.decision().remaining());
    Some(match status.policy().unit() {
        CONCURRENT_REQUESTS => format!("{held} of {limit} requests are in progress"),
        unit => format!("{held} of {limit} {unit} are in use"),
    })
}

/// Returns the phrase of a status, which is the title of a problem of the type `about:blank`.
fn phrase(status: StatusCode) -> &'static str {
    status.canonical_reason().unwrap_or("Refused")
}

/// Forbids caches to store a refusal, because the refusal is for one client at one moment. A
/// responder's own `Cache-Control` is replaced.
fn forbid_storing(headers: &mut HeaderMap) {
    let _ = headers.try_insert(CACHE_CONTROL, HeaderValue::from_static("no-store")); // a responder may fill the map
}
