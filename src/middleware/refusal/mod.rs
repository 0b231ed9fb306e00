//! What a refused client gets: a response that says why, in the protocol it speaks.

mod body;
mod grpc;
mod prepared;
mod protocol;
#[cfg(test)]
mod tests;

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::request::Parts;
use http::{Response, StatusCode};

use crate::middleware::body::RefusalBody;
use crate::outcome::Outcome;
use crate::policy::Policy;

pub(crate) use prepared::PreparedRefusals;
#[cfg(feature = "tonic")]
pub(crate) use prepared::message;
pub use protocol::Protocol;

use body::Format;

/// A refused request, as a responder sees it.
#[derive(Clone, Copy)]
pub struct Refusal<'a> {
    parts: &'a Parts,
    outcome: &'a Outcome,
    retry_after: Option<Duration>,
    protocol: Protocol,
    prepared: Option<&'a PreparedRefusals>,
}

impl<'a> Refusal<'a> {
    /// `retry_after` is the wait as it is told, see [`Prepared::told_wait`](super::headers::Prepared::told_wait).
    pub(crate) fn new(parts: &'a Parts, outcome: &'a Outcome, retry_after: Option<Duration>) -> Self {
        Self { parts, outcome, retry_after, protocol: Protocol::of(parts), prepared: None }
    }

    /// The request without its body.
    #[must_use]
    pub fn parts(&self) -> &'a Parts {
        self.parts
    }

    /// Why it was refused, and how each policy stands.
    #[must_use]
    pub fn outcome(&self) -> &'a Outcome {
        self.outcome
    }

    /// In which protocol the client expects its answer.
    #[must_use]
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// After which time the same request may pass, with the [jitter](crate::Headers::jitter) and the
    /// [cap](crate::Headers::max_wait) of what is told. Nothing if it was not refused for its rate, or if no wait helps.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_after
    }

    /// [`retry_after`](Self::retry_after) in whole seconds, rounded up and at least 1: what `Retry-After` says.
    #[must_use]
    pub fn retry_after_seconds(&self) -> Option<u64> {
        let wait = self.retry_after?;
        Some(wait.as_secs().saturating_add(u64::from(wait.subsec_nanos() > 0)).max(1))
    }

    /// The response that would be sent without a responder of one's own, to be changed or taken as it is. The fields of
    /// [`Headers`](crate::Headers), `Retry-After` among them, are added to any response later.
    #[must_use]
    pub fn default_response(&self) -> Response<RefusalBody> {
        match self.prepared {
            Some(prepared) => prepared.default_response(self),
            None => Refusals::default().prepare(&[]).default_response(self),
        }
    }
}

impl fmt::Debug for Refusal<'_> {
    /// Without the request's headers, which may hold secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Refusal")
            .field("method", &self.parts.method)
            .field("outcome", &self.outcome)
            .field("retry_after", &self.retry_after)
            .field("protocol", &self.protocol)
            .finish_non_exhaustive()
    }
}

/// How refusals look. By default 429 with a problem of RFC 9457 as the body, and to gRPC clients the status
/// `RESOURCE_EXHAUSTED`.
///
/// | refused because | HTTP | gRPC |
/// |---|---|---|
/// | it is over a quota | [`status`](Self::status), by default 429 | [`grpc_status`](Self::grpc_status), by default `RESOURCE_EXHAUSTED` (8) |
/// | a list denies it | 403 | `PERMISSION_DENIED` (7) |
/// | it has no key | 400 | `INVALID_ARGUMENT` (3) |
/// | the limiter failed | 503 | `UNAVAILABLE` (14), without pushback |
///
/// Bodies depend on the policies that refused alone, so they are built once; when to come back is in the header fields, see
/// [`Headers`](crate::Headers). The format of the body is the server's choice and not negotiated. Bodies and messages are
/// for clients; what an operator has to know goes to the [`Observer`](crate::Observer) and to
/// [`RateLimitLayer::check`](crate::RateLimitLayer::check).
///
/// # Caches
///
/// Every refusal has `Cache-Control: no-store`, in every protocol. A responder's own `Cache-Control` is replaced: a cache
/// that stored a refusal would answer other clients with it. The layer does not touch fields that overrule
/// `Cache-Control` for some caches, such as `CDN-Cache-Control` or `X-Accel-Expires`: a responder should not set them.
///
/// A refusal has gRPC's shape, with the status 200, only if the request is gRPC's in every respect, see [`Protocol`].
///
/// ```
/// use tower_ratelimit::{GrpcCode, Refusal, Refusals};
///
/// // Problems of one's own type; gRPC clients that only retry what is unavailable.
/// let refusals = Refusals::problem_json()
///     .problem_type("https://example.com/problems/slow-down")
///     .title("Slow down")
///     .grpc_status(GrpcCode::Unavailable);
///
/// // A response of one's own.
/// let refusals = Refusals::with(|refusal: &Refusal<'_>| {
///     let seconds = refusal.retry_after_seconds().unwrap_or(60);
///     let mut response = refusal.default_response().map(|_| format!("come back in {seconds} s\n"));
///     response.headers_mut().insert("content-type", http::HeaderValue::from_static("text/plain"));
///     response
/// });
/// ```
#[derive(Clone)]
pub struct Refusals {
    format: Format,
    status: StatusCode,
    problem_type: Option<Arc<str>>,
    title: Option<Arc<str>>,
    grpc_code: GrpcCode,
    grpc_details: bool,
    grpc_pushback: bool,
    grpc: bool,
    responder: Option<Responder>,
}

/// The gRPC status of a request that is over a quota.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GrpcCode {
    /// 8, the code for quotas. Clients do not repeat it by themselves, except some that find a `RetryInfo` with it; it is
    /// not counted as a server's error.
    #[default]
    ResourceExhausted,
    /// 14, which most clients repeat by themselves, and which is counted as a server's error.
    Unavailable,
}

impl Refusals {
    /// `application/problem+json`: a problem of RFC 9457, of the type `quota-exceeded` and with the names of the policies
    /// that refused, as draft-ietf-httpapi-ratelimit-headers-11 defines them.
    #[must_use]
    pub fn problem_json() -> Self {
        Self::new(Format::ProblemJson)
    }

    /// `application/json`: the same object, for clients that know no other type.
    #[must_use]
    pub fn json() -> Self {
        Self::new(Format::Json)
    }

    /// `text/plain`: one line for people, the title and the names of the policies that refused.
    #[must_use]
    pub fn text() -> Self {
        Self::new(Format::Text)
    }

    /// Answers refusals over plain HTTP, whatever the reason, with a response of your own. gRPC clients still get what
    /// they can read.
    ///
    /// The body may be any [`http_body::Body`]: a `String`, axum's `Body`, or that of
    /// [`Refusal::default_response`], which follows the other settings. So an axum application answers with its own
    /// error type, by `into_response()`:
    ///
    /// ```
    /// use axum::response::{IntoResponse, Response};
    /// use http::StatusCode;
    /// use tower_ratelimit::{Refusal, Refusals};
    ///
    /// enum AppError {
    ///     SlowDown,
    /// }
    ///
    /// impl IntoResponse for AppError {
    ///     fn into_response(self) -> Response {
    ///         (StatusCode::TOO_MANY_REQUESTS, "please slow down").into_response()
    ///     }
    /// }
    ///
    /// let refusals = Refusals::with(|_refusal: &Refusal<'_>| AppError::SlowDown.into_response());
    /// ```
    #[must_use]
    pub fn with<F, B>(respond: F) -> Self
    where
        F: Fn(&Refusal<'_>) -> Response<B> + Send + Sync + 'static,
        B: http_body::Body + Send + 'static,
        B::Error: Into<Box<dyn Error + Send + Sync>>,
    {
        Self::default().responder(respond, false)
    }

    /// A responder of one's own for every protocol: see [`Refusal::protocol`]. A gRPC client needs a status of 200, an empty
    /// body, and `grpc-status`, as [`Refusal::default_response`] has them. To any other client a refusal should be an
    /// error (4xx, 5xx).
    #[must_use]
    pub fn with_all<F, B>(respond: F) -> Self
    where
        F: Fn(&Refusal<'_>) -> Response<B> + Send + Sync + 'static,
        B: http_body::Body + Send + 'static,
        B::Error: Into<Box<dyn Error + Send + Sync>>,
    {
        Self::default().responder(respond, true)
    }

    /// The HTTP status of a request that is over a quota, by default 429: it means that this client exceeded its quota.
    /// 503 suits limits that protect the server from everyone together, and makes the problem's type
    /// `temporary-reduced-capacity`.
    ///
    /// It should be one of a final response that is an error (4xx, 5xx).
    #[must_use]
    pub fn status(mut self, status: StatusCode) -> Self {
        self.status = status;
        self
    }

    /// The problem's type of a request that is over a quota: a URI, or `about:blank` for a problem that says no more than its
    /// status. Text has no type.
    #[must_use]
    pub fn problem_type(mut self, uri: impl Into<String>) -> Self {
        self.problem_type = Some(uri.into().into());
        self
    }

    /// The problem's title, and the first words of a text, for a request that is over a quota. It should be the same for
    /// every one.
    #[must_use]
    pub fn title(mut self, title: impl Into<String>) -> Self {
        self.title = Some(title.into().into());
        self
    }

    /// The gRPC status of a request that is over a quota.
    #[must_use]
    pub fn grpc_status(mut self, code: GrpcCode) -> Self {
        self.grpc_code = code;
        self
    }

    /// Whether gRPC clients get details (`grpc-status-details-bin`): a `RetryInfo` if a wait helps, and a `QuotaFailure` that
    /// names the policies that refused, never the client's key. By default they do.
    #[must_use]
    pub fn grpc_details(mut self, send: bool) -> Self {
        self.grpc_details = send;
        self
    }

    /// Whether gRPC clients get `grpc-retry-pushback-ms`: when to come back, or -1 for never, which clients with a retry
    /// policy obey. By default they do.
    #[must_use]
    pub fn grpc_pushback(mut self, send: bool) -> Self {
        self.grpc_pushback = send;
        self
    }

    /// Whether gRPC and gRPC-Web requests are refused in gRPC's form. By default they are. Without it they are refused
    /// as plain HTTP, which gRPC clients cannot read: that suits a service without gRPC.
    #[must_use]
    pub fn grpc(mut self, on: bool) -> Self {
        self.grpc = on;
        self
    }

    /// Builds what does not change, for a layer with these policies.
    pub(crate) fn prepare(&self, policies: &[Policy]) -> PreparedRefusals {
        PreparedRefusals::new(self.clone(), policies)
    }

    fn new(format: Format) -> Self {
        Self {
            format,
            status: StatusCode::TOO_MANY_REQUESTS,
            problem_type: None,
            title: None,
            grpc_code: GrpcCode::default(),
            grpc_details: true,
            grpc_pushback: true,
            grpc: true,
            responder: None,
        }
    }

    fn responder<F, B>(mut self, respond: F, every_protocol: bool) -> Self
    where
        F: Fn(&Refusal<'_>) -> Response<B> + Send + Sync + 'static,
        B: http_body::Body + Send + 'static,
        B::Error: Into<Box<dyn Error + Send + Sync>>,
    {
        let respond = Arc::new(move |refusal: &Refusal<'_>| respond(refusal).map(RefusalBody::own));
        self.responder = Some(Responder { respond, every_protocol });
        self
    }
}

impl Default for Refusals {
    fn default() -> Self {
        Self::problem_json()
    }
}

impl fmt::Debug for Refusals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Refusals")
            .field("format", &self.format)
            .field("status", &self.status)
            .field("problem_type", &self.problem_type)
            .field("title", &self.title)
            .field("grpc_code", &self.grpc_code)
            .field("grpc_details", &self.grpc_details)
            .field("grpc_pushback", &self.grpc_pushback)
            .field("grpc", &self.grpc)
            .field("own_responder", &self.responder.is_some())
            .finish()
    }
}

type Respond = dyn Fn(&Refusal<'_>) -> Response<RefusalBody> + Send + Sync;

/// A responder of the user's.
#[derive(Clone)]
struct Responder {
    respond: Arc<Respond>,
    every_protocol: bool,
}
