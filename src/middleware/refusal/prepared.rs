//! Answering one refused request.

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use smallvec::SmallVec;

use crate::middleware::body::RefusalBody;
use crate::outcome::{Outcome, OutcomeKind};
use crate::policy::Policy;

use super::body::Problem;
use super::grpc::{self, Details, Pushback, Status};
use super::{GrpcCode, Protocol, Refusal, Refusals};

const BLANK: &str = "about:blank";
const QUOTA_EXCEEDED: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";
const QUOTA_EXCEEDED_TITLE: &str = "Request cannot be satisfied as assigned quota has been exceeded";
const REDUCED_CAPACITY: &str = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";
const REDUCED_CAPACITY_TITLE: &str = "Request cannot be satisfied due to temporary server capacity constraints";

// Clients read these. What an operator has to know goes to the observer and to `RateLimitLayer::check`.
const KEY_MISSING: &str = "The request lacks what this service identifies clients by, such as an API key.";
const DENIED: &str = "This client may not use this service.";
const LIMITER_FAILED: &str = "The service cannot accept this request at the moment.";

/// [`Refusals`] for the policies of one layer, with the usual bodies built.
#[derive(Debug)]
pub(crate) struct PreparedRefusals {
    refusals: Refusals,
    /// The body if this policy alone refuses.
    bodies: Vec<(Policy, Bytes)>,
    denied: Bytes,
    key_missing: Bytes,
    limiter_failed: Bytes,
}

/// Why a request is refused.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reason {
    Limited,
    Denied,
    KeyMissing,
    LimiterFailed,
}

impl PreparedRefusals {
    pub(super) fn new(refusals: Refusals, policies: &[Policy]) -> Self {
        let bodies = policies.iter().map(|policy| (policy.clone(), refusals.limited_body(&[policy.name()]))).collect();
        let denied = refusals.blank_body(Reason::Denied, DENIED);
        let key_missing = refusals.blank_body(Reason::KeyMissing, KEY_MISSING);
        let limiter_failed = refusals.blank_body(Reason::LimiterFailed, LIMITER_FAILED);
        Self { refusals, bodies, denied, key_missing, limiter_failed }
    }

    /// The header fields of every built-in refusal over plain HTTP.
    pub(crate) fn fields(&self) -> HeaderMap {
        let mut fields = HeaderMap::new();
        fields.insert(CONTENT_TYPE, self.refusals.format.content_type());
        forbid_storing(&mut fields);
        fields
    }

    /// The status of a request that is over a quota.
    pub(crate) fn limited_status(&self) -> StatusCode {
        self.refusals.status
    }

    /// The usual refusal, over plain HTTP and without a responder, of a request that is over a quota: with these fields, the
    /// own ones among them. Nothing if another is due.
    pub(crate) fn usual(
        &self,
        parts: &Parts,
        outcome: &Outcome,
        fields: impl FnOnce() -> Option<HeaderMap>,
    ) -> Option<Response<RefusalBody>> {
        if self.refusals.responder.is_some()
            || Reason::of(outcome) != Reason::Limited
            || self.refusals.protocol_of(parts) != Protocol::Http
        {
            return None;
        }
        let fields = fields()?;
        let mut response = Response::new(RefusalBody::whole(self.limited_body(outcome)));
        *response.status_mut() = self.refusals.status;
        *response.headers_mut() = fields;
        Some(response)
    }

    /// The response without the fields of [`Headers`](crate::Headers), which the caller adds in every protocol.
    pub(crate) fn respond(&self, refusal: &Refusal<'_>) -> Response<RefusalBody> {
        let protocol = self.refusals.protocol_of(refusal.parts);
        let refusal = Refusal { protocol, prepared: Some(self), ..*refusal };
        let own = self.refusals.responder.as_ref();
        let mut response = match own.filter(|own| own.every_protocol || protocol == Protocol::Http) {
            Some(own) => (own.respond)(&refusal),
            None => self.default_response(&refusal),
        };
        forbid_storing(response.headers_mut());
        response
    }

    pub(super) fn default_response(&self, refusal: &Refusal<'_>) -> Response<RefusalBody> {
        let reason = Reason::of(refusal.outcome);
        match refusal.protocol {
            Protocol::Http => self.http_response(reason, refusal.outcome),
            protocol => {
                let mut response = grpc::response(protocol, &self.grpc_status(reason, refusal));
                forbid_storing(response.headers_mut());
                response
            }
        }
    }

    fn http_response(&self, reason: Reason, outcome: &Outcome) -> Response<RefusalBody> {
        let body = match reason {
            Reason::Limited => self.limited_body(outcome),
            Reason::Denied => self.denied.clone(),
            Reason::KeyMissing => self.key_missing.clone(),
            Reason::LimiterFailed => self.limiter_failed.clone(),
        };
        let mut response = Response::new(RefusalBody::whole(body));
        *response.status_mut() = self.refusals.http_status(reason);
        *response.headers_mut() = self.fields();
        response
    }

    fn limited_body(&self, outcome: &Outcome) -> Bytes {
        let mut violated = outcome.violated();
        if let (Some(only), None) = (violated.next(), violated.next()) {
            if let Some((_, body)) = self.bodies.iter().find(|(policy, _)| policy == only.policy()) {
                return body.clone();
            }
        }
        let names: SmallVec<[&str; 8]> = outcome.violated().map(|standing| standing.policy().name()).collect();
        self.refusals.limited_body(&names)
    }

    fn grpc_status<'a>(&self, reason: Reason, refusal: &Refusal<'a>) -> Status<'a> {
        let code = match (reason, self.refusals.grpc_code) {
            (Reason::Limited, GrpcCode::ResourceExhausted) => 8,
            (Reason::Limited, GrpcCode::Unavailable) => 14,
            (Reason::Denied, _) => 7,
            (Reason::KeyMissing, _) => 3,
            (Reason::LimiterFailed, _) => 14,
        };
        let outcome = refusal.outcome;
        let retry_after = refusal.retry_after.filter(|_| reason == Reason::Limited);
        let never = reason == Reason::Limited && outcome.is_never();
        let pushback = retry_after.map(Pushback::After).or(never.then_some(Pushback::Never));
        let details = (reason == Reason::Limited).then_some(Details { retry_after, outcome });
        Status {
            code,
            message: message(outcome),
            pushback: pushback.filter(|_| self.refusals.grpc_pushback),
            details: details.filter(|_| self.refusals.grpc_details),
        }
    }
}

impl Refusals {
    fn protocol_of(&self, parts: &Parts) -> Protocol {
        if self.grpc { Protocol::of(parts) } else { Protocol::Http }
    }

    fn http_status(&self, reason: Reason) -> StatusCode {
        match reason {
            Reason::Limited => self.status,
            Reason::Denied => StatusCode::FORBIDDEN,
            Reason::KeyMissing => StatusCode::BAD_REQUEST,
            Reason::LimiterFailed => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    fn limited_body(&self, names: &[&str]) -> Bytes {
        let default_kind =
            if self.status == StatusCode::SERVICE_UNAVAILABLE { REDUCED_CAPACITY } else { QUOTA_EXCEEDED };
        let kind = self.problem_type.as_deref().unwrap_or(default_kind);
        let default_title = match kind {
            BLANK => phrase(self.status),
            REDUCED_CAPACITY => REDUCED_CAPACITY_TITLE,
            _ => QUOTA_EXCEEDED_TITLE,
        };
        let title = self.title.as_deref().unwrap_or(default_title);
        let problem = Problem { kind, title, status: self.status, detail: None, policies: Some(names) };
        Bytes::from(self.format.render(&problem))
    }

    /// A problem that is not about quotas.
    fn blank_body(&self, reason: Reason, detail: &str) -> Bytes {
        let status = self.http_status(reason);
        let problem = Problem { kind: BLANK, title: phrase(status), status, detail: Some(detail), policies: None };
        Bytes::from(self.format.render(&problem))
    }
}

impl Reason {
    fn of(outcome: &Outcome) -> Self {
        match outcome.kind() {
            OutcomeKind::Denied => Self::Denied,
            OutcomeKind::KeyMissing => Self::KeyMissing,
            OutcomeKind::FailedClosed => Self::LimiterFailed,
            // The others are no refusals.
            OutcomeKind::Limited
            | OutcomeKind::Blocked
            | OutcomeKind::Allowed
            | OutcomeKind::Overage
            | OutcomeKind::Delayed
            | OutcomeKind::Degraded
            | OutcomeKind::ShadowLimited
            | OutcomeKind::Overflowed
            | OutcomeKind::Exempt
            | OutcomeKind::Abandoned
            | OutcomeKind::FailedOpen => Self::Limited,
        }
    }
}

/// What a client is told in a gRPC status.
pub(crate) fn message(outcome: &Outcome) -> &'static str {
    match Reason::of(outcome) {
        Reason::Limited => "rate limit exceeded",
        Reason::Denied => DENIED,
        Reason::KeyMissing => KEY_MISSING,
        Reason::LimiterFailed => LIMITER_FAILED,
    }
}

/// What HTTP calls a status, which is the title of a problem of the type `about:blank`.
fn phrase(status: StatusCode) -> &'static str {
    status.canonical_reason().unwrap_or("Refused")
}

/// A refusal is for one client at one moment, so no cache may give it to another, whatever a responder says.
fn forbid_storing(headers: &mut HeaderMap) {
    // It fails if the map is full, which a responder would have to fill.
    let _ = headers.try_insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
}
