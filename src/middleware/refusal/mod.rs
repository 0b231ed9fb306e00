//! Stand-in: a status and a line of text, or a gRPC status.

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderValue, Response, StatusCode, header};

use crate::outcome::{Outcome, OutcomeKind};
use crate::policy::Policy;

/// How a refusal is answered.
#[derive(Clone, Default)]
pub struct Refusals(Option<Responder>);

type Responder = std::sync::Arc<dyn Fn(&Refusal<'_>) -> Response<Bytes> + Send + Sync>;

impl std::fmt::Debug for Refusals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Refusals")
    }
}

pub(crate) struct PreparedRefusals(Refusals);

/// What a responder knows.
#[derive(Debug)]
pub struct Refusal<'a> {
    parts: &'a Parts,
    outcome: &'a Outcome,
}

impl<'a> Refusal<'a> {
    pub(crate) fn new(parts: &'a Parts, outcome: &'a Outcome, _retry_after: Option<std::time::Duration>) -> Self {
        Self { parts, outcome }
    }

    /// The request's head.
    #[must_use]
    pub fn parts(&self) -> &'a Parts {
        self.parts
    }

    /// What was decided.
    #[must_use]
    pub fn outcome(&self) -> &'a Outcome {
        self.outcome
    }
}

impl Refusals {
    /// The user's own responder.
    pub fn with<F, B>(respond: F) -> Self
    where
        F: Fn(&Refusal<'_>) -> Response<B> + Send + Sync + 'static,
        B: Into<Bytes>,
    {
        Self(Some(std::sync::Arc::new(move |refusal| respond(refusal).map(Into::into))))
    }

    pub(crate) fn prepare(&self, _policies: &[Policy]) -> PreparedRefusals {
        PreparedRefusals(self.clone())
    }
}

impl PreparedRefusals {
    pub(crate) fn respond(&self, refusal: &Refusal<'_>) -> Response<Bytes> {
        if let Some(respond) = &self.0.0 {
            return respond(refusal);
        }
        let (status, grpc) = match refusal.outcome.kind() {
            OutcomeKind::KeyMissing => (StatusCode::BAD_REQUEST, "3"),
            OutcomeKind::FailedClosed => (StatusCode::SERVICE_UNAVAILABLE, "14"),
            _ => (StatusCode::TOO_MANY_REQUESTS, "8"),
        };
        let content_type = refusal.parts.headers.get(header::CONTENT_TYPE);
        if content_type.is_some_and(|value| value.as_bytes().starts_with(b"application/grpc")) {
            let mut response = Response::new(Bytes::new());
            response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
            response.headers_mut().insert("grpc-status", HeaderValue::from_static(grpc));
            return response;
        }
        let mut response = Response::new(Bytes::from_static(b"refused\n"));
        *response.status_mut() = status;
        response
    }
}
