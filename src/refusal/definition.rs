//! The configuration of refusals, and the refused request as a responder sees it.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use http::{Response, StatusCode};
use http_body::Body;

use crate::base::head::Head;
use crate::base::wait::Wait;
use crate::error::BoxError;
use crate::outcome::Outcome;

use super::body::RefusalBody;
use super::problem::BodyFormat;
use super::protocol::Protocol;

/// A refused request as a responder sees it.
#[derive(Clone, Copy)]
pub struct Refusal<'a> {
    pub(super) head: &'a Head<'a>,
    pub(super) outcome: &'a Outcome,
    /// The reported wait, after jitter and cap.
    pub(super) wait: Wait,
    pub(super) protocol: Protocol,
    pub(super) default: &'a dyn DefaultResponse,
}

/// Builds the default response, which is sent if there is no responder.
pub(super) trait DefaultResponse: Send + Sync {
    fn default_response(&self, refusal: &Refusal<'_>) -> Response<RefusalBody>;

    /// Returns the status of the default response over HTTP.
    fn status(&self, outcome: &Outcome) -> StatusCode;
}

impl<'a> Refusal<'a> {
    /// Returns the request's head.
    #[must_use]
    pub fn head(&self) -> &'a Head<'a> {
        self.head
    }

    /// Returns why the request was refused, and the status of each policy.
    #[must_use]
    pub fn outcome(&self) -> &'a Outcome {
        self.outcome
    }

    /// Returns the protocol in which the client expects the answer.
    #[must_use]
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// Returns the HTTP status of the [default response](Self::default_response) over HTTP: 429, or another status from
    /// the table of [`Refusals`]. Over gRPC the default response has the HTTP status 200.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.default.status(self.outcome)
    }

    /// Returns the limit of the quota that refused: 100 for `Quota::per_minute(100)` with any burst. If several quotas
    /// refused, returns the limit of the quota with the longest wait. Returns `None` if no quota refused.
    #[must_use]
    pub fn limit(&self) -> Option<u64> {
        let refusing = self.outcome.binding().filter(|status| status.refuses());
        refusing.map(|status| status.policy().quota().limit())
    }

    /// Returns the wait until the same request may pass, with the [jitter](crate::Headers::jitter) and the
    /// [cap](crate::Headers::max_reported_wait) of reported waits. If the limiter failed, the wait is between 1 and 5 s
    /// and depends on the client's key, so that not all clients retry at once. If the request was refused for another
    /// reason than a quota or a failed limiter, the wait is [`Wait::None`].
    #[must_use]
    pub fn wait(&self) -> Wait {
        self.wait
    }

    /// Returns the [`wait`](Self::wait) in whole seconds, rounded up and at least 1: the value of
    /// `Retry-After`. Returns `None` if the wait is not known, or if no wait helps.
    #[must_use]
    pub fn retry_after_seconds(&self) -> Option<u64> {
        let wait = self.wait.duration()?;
        Some(wait.as_secs().saturating_add(u64::from(wait.subsec_nanos() > 0)).max(1))
    }

    /// Returns the response that would be sent without your responder. The layer later adds its
    /// [`Headers`](crate::Headers), including `Retry-After`, to every response.
    #[must_use]
    pub fn default_response(&self) -> Response<RefusalBody> {
        self.default.default_response(self)
    }
}

impl fmt::Debug for Refusal<'_> {
    /// Leaves out the request's headers, which may hold secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Refusal")
            .field("method", &self.head.method)
            .field("outcome", &self.outcome)
            .field("wait", &self.wait)
            .field("protocol", &self.protocol)
            .finish_non_exhaustive()
    }
}

/// Sets how refusals look. The default is 429 with a problem document (RFC 9457), and for gRPC
/// clients the status `RESOURCE_EXHAUSTED`.
///
/// | refused because | HTTP | gRPC |
/// |---|---|---|
/// | a quota is exceeded | [`status`](Self::status), by default 429 | [`grpc_status`](Self::grpc_status), by default `RESOURCE_EXHAUSTED` (8) |
/// | an access list denies the client | 403 | `PERMISSION_DENIED` (7) |
/// | the key is missing | 400 | `INVALID_ARGUMENT` (3) |
/// | the server does not provide the address of the peer | 500 | `INTERNAL` (13) |
/// | the limiter failed | 503, with a `Retry-After` of 1 to 5 s | `UNAVAILABLE` (14) |
///
/// The body of a refusal depends only on the policies that refused, on whether a wait can help, and on how many units
/// of a concurrency limit are held. Waits are in [`Headers`](crate::Headers). The format of the body is the server's
/// choice and is not negotiated. Bodies and messages are for clients. Information for operators goes to the
/// [`Observer`](crate::outcome::Observer) and to [`RateLimitLayer::check`](crate::RateLimitLayer::check).
///
/// # Caches
///
/// Every refusal has `Cache-Control: no-store`, in every protocol. Without this header a cache could store the refusal
/// and answer other clients with it. A responder's own `Cache-Control` is replaced. The header cannot be switched off,
/// because a refusal depends on a client and a moment that the cache does not know. Headers that overrule
/// `Cache-Control` for some caches, such as `CDN-Cache-Control` or `X-Accel-Expires`, are not changed; a responder
/// should not set them.
///
/// A refusal has the form of gRPC, with the status 200, only if the request is a gRPC request in
/// every respect; see [`Protocol`].
///
/// ```
/// use http::HeaderValue;
/// use tower_ratelimit::{
///     Refusals, Wait,
///     middleware::{GrpcCode, Refusal},
///     observe::OutcomeKind,
/// };
///
/// // A problem type of your own, for gRPC clients that retry only `UNAVAILABLE`.
/// let refusals = Refusals::problem_json()
///     .problem_type("https://example.com/problems/slow-down")
///     .title("Slow down")
///     .grpc_status(GrpcCode::Unavailable);
///
/// // A response of your own, with the default status. The text fits the reason.
/// let refusals = Refusals::with(|refusal: &Refusal<'_>| {
///     let text = match (refusal.outcome().kind(), refusal.wait()) {
///         (OutcomeKind::Limited | OutcomeKind::Blocked, Wait::Never) => {
///             "This request is too large.\n".to_owned()
///         }
///         (OutcomeKind::Limited | OutcomeKind::Blocked, _) => {
///             match refusal.retry_after_seconds() {
///                 Some(seconds) => format!("Come back in {seconds} s.\n"),
///                 None => "Come back later.\n".to_owned(), // too many at once
///             }
///         }
///         // The status is 500 if the server does not provide the peer's address.
///         (OutcomeKind::KeyMissing, _) if refusal.status().is_client_error() => {
///             "Send an API key.\n".to_owned()
///         }
///         (OutcomeKind::Denied, _) => "This client may not use the service.\n".to_owned(),
///         _ => "Try again later.\n".to_owned(), // the server or the limiter failed
///     };
///     let mut response = refusal.default_response().map(|_| text);
///     response.headers_mut().insert("content-type", HeaderValue::from_static("text/plain"));
///     response
/// });
/// ```
#[derive(Clone)]
pub struct Refusals {
    pub(super) format: BodyFormat,
    pub(super) status: StatusCode,
    pub(super) problem_type: Option<Arc<str>>,
    pub(super) title: Option<Arc<str>>,
    pub(super) grpc_code: GrpcCode,
    pub(super) grpc_details: bool,
    pub(super) grpc_pushback: bool,
    pub(super) grpc: bool,
    pub(super) responder: Option<Responder>,
}

/// The gRPC status of a request over a quota.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GrpcCode {
    /// 8, the code for quotas. Clients do not retry automatically after this code, except some clients that find a
    /// `RetryInfo` in the details. The code does not count as a server error.
    #[default]
    ResourceExhausted,
    /// 14, which most clients retry automatically, and which counts as a server error.
    Unavailable,
}

impl Refusals {
    /// Answers with `application/problem+json` (RFC 9457): the type `quota-exceeded` of
    /// draft-ietf-httpapi-ratelimit-headers-11, with the names of the policies that refused.
    #[must_use]
    pub fn problem_json() -> Self {
        Self::new(BodyFormat::ProblemJson)
    }

    /// Answers with the object of [`problem_json`](Self::problem_json) as `application/json`, for
    /// clients that know no other type.
    #[must_use]
    pub fn json() -> Self {
        Self::new(BodyFormat::Json)
    }

    /// Answers with `text/plain`: one line with the title and the names of the policies that refused. If no wait helps,
    /// or if requests in flight hold the whole limit, the line says so instead of naming the policies.
    #[must_use]
    pub fn text() -> Self {
        Self::new(BodyFormat::Text)
    }

    /// Sets the body of refusals over plain HTTP. The status, the headers and the content type stay unchanged. A
    /// service with its own JSON format needs only this call:
    ///
    /// ```
    /// use tower_ratelimit::Refusals;
    ///
    /// let refusals = Refusals::json().body(|refusal| {
    ///     let id = refusal.head().headers.get("x-request-id");
    ///     let id: u64 = id.and_then(|id| id.to_str().ok()?.parse().ok()).unwrap_or(0);
    ///     let status = refusal.status().as_u16();
    ///     format!(r#"{{"error": {{"status": {status}, "request": {id}}}}}"#)
    /// });
    /// ```
    ///
    /// The body is also sent with the statuses 400, 403 and 503 of refusals for other reasons than a quota, so do not
    /// write in every body that the client has to slow down.
    ///
    /// [`Refusal`] has the reason and the wait. With `serde_json`, return `serde_json::json!({..}).to_string()`. `body`
    /// replaces a response that was set by [`with`](Self::with) or [`with_all`](Self::with_all).
    #[must_use]
    pub fn body<F, T>(self, body: F) -> Self
    where
        F: Fn(&Refusal<'_>) -> T + Send + Sync + 'static,
        T: Into<Bytes>,
    {
        let respond = move |refusal: &Refusal<'_>| {
            let text = body(refusal).into();
            refusal.default_response().map(|_| RefusalBody::whole(text))
        };
        self.respond(respond, false)
    }

    /// Answers all refusals over plain HTTP with a response of your own. gRPC clients still get
    /// gRPC statuses.
    ///
    /// Any client can pretend to be a gRPC client by sending the headers that [`Protocol::Grpc`]
    /// names. In a service without gRPC, add [`.grpc(false)`](Self::grpc): your response then
    /// answers every refusal.
    ///
    /// The body may be any [`http_body::Body`] of [`Bytes`]: a `String`, axum's `Body`, or the body
    /// of [`Refusal::default_response`], which follows the other settings. The layer sends the
    /// frames of the body, including trailers, as the service's own [body
    /// type](crate::middleware::ResponseBody). An axum application can convert its own error type
    /// with `into_response()`:
    ///
    /// ```
    /// use axum::response::{IntoResponse, Response};
    /// use http::StatusCode;
    /// use tower_ratelimit::{Refusals, middleware::Refusal, observe::OutcomeKind};
    ///
    /// enum AppError {
    ///     SlowDown,
    ///     Forbidden,
    ///     NoApiKey,
    ///     Unavailable,
    /// }
    ///
    /// impl IntoResponse for AppError {
    ///     fn into_response(self) -> Response {
    ///         match self {
    ///             Self::SlowDown => (StatusCode::TOO_MANY_REQUESTS, "please slow down"),
    ///             Self::Forbidden => (StatusCode::FORBIDDEN, "not for you"),
    ///             Self::NoApiKey => (StatusCode::BAD_REQUEST, "send an API key"),
    ///             Self::Unavailable => (StatusCode::SERVICE_UNAVAILABLE, "try again later"),
    ///         }
    ///         .into_response()
    ///     }
    /// }
    ///
    /// # use tower::ServiceExt;
    /// # use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, key, middleware::{Access, AccessList}};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let refusals = Refusals::with(|refusal: &Refusal<'_>| {
    ///     let error = match refusal.outcome().kind() {
    ///         OutcomeKind::Denied => AppError::Forbidden,        // by an access list
    ///         OutcomeKind::KeyMissing => AppError::NoApiKey,
    ///         OutcomeKind::FailedClosed => AppError::Unavailable, // the limiter failed
    ///         _ => AppError::SlowDown,
    ///     };
    ///     error.into_response()
    /// });
    /// # let list = AccessList::new();
    /// # list.set_key("denied", Access::Deny);
    /// # let layer = RateLimitLayer::new(MemoryLimiter::new(), Quota::per_hour(1), key::header("x-api-key"));
    /// # let layer = layer.access(&list, key::header("x-api-key")).refusals(refusals);
    /// # let app: axum::Router = axum::Router::new().route("/", axum::routing::get(|| async {})).layer(layer);
    /// # for (key, status) in [(Some("a"), 200), (Some("a"), 429), (Some("denied"), 403), (None, 400)] {
    /// #     let mut request = http::Request::new(axum::body::Body::empty());
    /// #     key.map(|key| request.headers_mut().insert("x-api-key", http::HeaderValue::from_static(key)));
    /// #     assert_eq!(app.clone().oneshot(request).await?.status(), status);
    /// # }
    /// # Ok(()) }
    /// ```
    ///
    /// Do not use one status for all refusals. With the status for a quota, a client that an access list denies would
    /// wait and retry, and so would a client that is refused because the limiter failed. [`Refusal::default_response`]
    /// has the right status.
    #[must_use]
    pub fn with<F, B>(respond: F) -> Self
    where
        F: Fn(&Refusal<'_>) -> Response<B> + Send + Sync + 'static,
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        Self::default().responder(respond, false)
    }

    /// Answers refusals in every protocol with a response of your own; see [`Refusal::protocol`]. A
    /// gRPC client needs the status 200, an empty body and `grpc-status`, like
    /// [`Refusal::default_response`]. For other clients a refusal should be an error (4xx or 5xx).
    #[must_use]
    pub fn with_all<F, B>(respond: F) -> Self
    where
        F: Fn(&Refusal<'_>) -> Response<B> + Send + Sync + 'static,
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        Self::default().responder(respond, true)
    }

    /// Sets the HTTP status for a request over a quota. The default 429 means that this client
    /// exceeded its quota. The status 503 suits limits that protect the server from all clients
    /// together. With 503 the problem's type becomes `temporary-reduced-capacity`.
    ///
    /// The status should be that of an error (4xx or 5xx).
    #[must_use]
    pub fn status(mut self, status: StatusCode) -> Self {
        self.status = status;
        self
    }

    /// Sets the type of the problem for a request over a quota: a URI, or `about:blank` for a
    /// problem that has no meaning beyond its status. Text has no type.
    #[must_use]
    pub fn problem_type(mut self, uri: impl Into<String>) -> Self {
        self.problem_type = Some(uri.into().into());
        self
    }

    /// Sets the title of the problem, or the beginning of the text, for a request over a quota. The
    /// title should not depend on the request.
    #[must_use]
    pub fn title(mut self, title: impl Into<String>) -> Self {
        self.title = Some(title.into().into());
        self
    }

    /// Sets the gRPC status for a request over a quota.
    #[must_use]
    pub fn grpc_status(mut self, code: GrpcCode) -> Self {
        self.grpc_code = code;
        self
    }

    /// Sets whether gRPC clients get details (`grpc-status-details-bin`): a `RetryInfo` if a wait
    /// helps, and a `QuotaFailure` with the names of the policies that refused, never with the
    /// client's key. On by default.
    #[must_use]
    pub fn grpc_details(mut self, send: bool) -> Self {
        self.grpc_details = send;
        self
    }

    /// Sets whether gRPC clients get `grpc-retry-pushback-ms`: the wait, or -1 for never. Clients
    /// with a retry policy obey this header. On by default.
    #[must_use]
    pub fn grpc_pushback(mut self, send: bool) -> Self {
        self.grpc_pushback = send;
        self
    }

    /// Sets whether gRPC and gRPC-Web requests are refused in gRPC's form, which has the HTTP status
    /// 200. On by default. Switch this off in a service without gRPC. All refusals are then plain
    /// HTTP, which gRPC clients cannot read, and your own response ([`with`](Self::with)) answers every
    /// refusal.
    #[must_use]
    pub fn grpc(mut self, on: bool) -> Self {
        self.grpc = on;
        self
    }

    fn new(format: BodyFormat) -> Self {
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

    fn responder<F, B>(self, respond: F, every_protocol: bool) -> Self
    where
        F: Fn(&Refusal<'_>) -> Response<B> + Send + Sync + 'static,
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        self.respond(move |refusal| respond(refusal).map(RefusalBody::own), every_protocol)
    }

    fn respond<F>(mut self, respond: F, every_protocol: bool) -> Self
    where
        F: Fn(&Refusal<'_>) -> Response<RefusalBody> + Send + Sync + 'static,
    {
        self.responder = Some(Responder { respond: Arc::new(respond), every_protocol });
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

pub(super) type Respond = dyn Fn(&Refusal<'_>) -> Response<RefusalBody> + Send + Sync;

/// A responder of the application.
#[derive(Clone)]
pub(super) struct Responder {
    pub(super) respond: Arc<Respond>,
    pub(super) every_protocol: bool,
}
