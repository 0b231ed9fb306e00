//! Lets a handler ask a layer, for limits that only the handler knows.

use std::fmt;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::{Extensions, HeaderMap, Response};

use super::body::ResponseBody;
use super::compiled::Compiled;
use super::decide::delay::{Delayed, InLine};
use super::decide::step::NextStep;
use super::future::finish;
use super::layer::RateLimitLayer;
use super::settle::pending::{AnyTicket, OpenTicket};
use super::settle::usage::Usage;
use super::ticket::Ticket;
use crate::base::head::Head;
use crate::base::sync::contained;
use crate::error::debug_as_text;
use crate::limiter::Limiter;
use crate::outcome::{Outcome, OutcomeKind};
use crate::refusal::RefusalBody;

/// # In a handler
impl<L: Limiter> RateLimitLayer<L> {
    /// Decides about a request in a handler, according to the rules and the settings of this layer. Use
    /// this method if only the handler can know a key or a cost, because it first has to parse the body
    /// or find the user.
    ///
    /// The rules read the request's head, so the handler puts what it has found out into the head's extensions. The
    /// application keeps this layer in its state. The layer need not wrap a service.
    ///
    /// * The observer, access lists, modes, blocks and [`OnError`](crate::OnError) work as in a layer around a
    ///   service. A request that has to [wait](Self::timer) waits here.
    /// * If the handler does not use the [`Admission`], the taken units stay charged, and the response gets no
    ///   headers. [`headers`](Admission::headers) returns the layer's headers for the handler's response.
    ///   [`finish`](Admission::finish) adds these headers to the response, and settles the rules according to the
    ///   response.
    /// * Layers around the handler keep their charges of a refused request, even if they [refund](Self::refund_nested)
    ///   requests that an inner layer refuses.
    /// * A layer with an [overflow](Self::overflow) cannot decide in a handler, because it has no request
    ///   to hand over.
    ///
    /// ```
    /// use axum::Json;
    /// use axum::extract::State;
    /// use http::request::Parts;
    /// use tower_ratelimit::{
    ///     MemoryLimiter, Quota, RateLimitLayer, Rule, key, middleware::Refused,
    /// };
    ///
    /// #[derive(Clone)]
    /// struct Rows(u64);
    ///
    /// type Limit = RateLimitLayer<MemoryLimiter>;
    ///
    /// async fn import(
    ///     State(limit): State<Limit>,
    ///     mut head: Parts,
    ///     rows: String,
    /// ) -> Result<String, Refused> {
    ///     let rows = rows.lines().count() as u64;
    ///     head.extensions.insert(Rows(rows));
    ///     limit.admit(&head).await?.keep(); // it stays charged
    ///     Ok(format!("imported {rows} rows\n"))
    /// }
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let rows = Rule::new("rows", Quota::per_minute(1_000))?
    ///     .cost(|request| request.extensions.get().map_or(1, |Rows(rows)| *rows));
    /// let limit = Limit::new(MemoryLimiter::new(), rows, key::peer_ip());
    /// let app: axum::Router =
    ///     axum::Router::new().route("/rows", axum::routing::post(import)).with_state(limit);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Returns an error if the request is refused. The error is the response to send: the layer's own refusal with its
    /// headers, in the protocol of the request.
    pub fn admit<'a, H: Into<Head<'a>>>(
        &self,
        request: H,
    ) -> impl Future<Output = Result<Admission, Refused>> + Send + use<'a, '_, H, L> {
        let head = request.into();
        async move { Self::admit_head(&self.compiled(), &head, Duration::ZERO).await }
    }

    /// Decides about a message, which may wait if it is over a quota.
    pub(super) async fn admit_message(&self, head: &Head<'_>) -> Result<Admission, Refused> {
        let layer = self.compiled();
        Self::admit_head(&layer, head, layer.settings.max_message_wait).await
    }

    /// Decides about a request or a message, which may wait for `max_wait` if it is over a quota.
    async fn admit_head(layer: &Arc<Compiled<L>>, head: &Head<'_>, max_wait: Duration) -> Result<Admission, Refused> {
        // Makes the ticket on the heap, because the ticket is large, and a move would copy words that were just
        // written, which stalls on store forwarding.
        let mut open = OpenTicket::new(layer);
        if layer.entered.get().is_none() {
            layer.look_at_setup(); // as when a layer makes its first service
        }
        let may_wait = !max_wait.is_zero() && layer.delays.as_ref().is_some_and(|delays| delays.can_sleep());
        let mut step = match may_wait {
            true => open.ticket.charge_to_wait(layer, head),
            false => open.ticket.charge_and_store(layer, head),
        };
        let mut has_waited = false;
        let passes = loop {
            let is_first_refusal = may_wait && !has_waited && matches!(step, NextStep::TurnAway);
            if is_first_refusal && open.ticket.line_to_join(layer, max_wait).is_some() {
                step = NextStep::WaitInLine;
            }
            step = match step {
                NextStep::PassWithoutTicket(_) | NextStep::Pass => break true,
                NextStep::AwaitAnswer(answer) => {
                    let mut asked = Asked(Some((&**layer, head, &mut open.ticket)));
                    let mut answer = answer.await;
                    asked.0.take().into_iter().for_each(|(layer, _, ticket)| ticket.answer(layer, &mut answer));
                    drop(asked);
                    open.ticket.next_step(layer)
                }
                NextStep::WaitInLine => {
                    has_waited = true;
                    let mut in_line = InLine::waiting(layer, head.to_request(), open.ticket.take(), max_wait);
                    poll_fn(|cx| in_line.poll_decision(cx)).await;
                    // `take` returns the ticket, because `in_line` holds the ticket until the request is decided.
                    open.ticket = in_line.take().map_or_else(Ticket::new, |(_, ticket)| ticket);
                    open.ticket.step_out_of_line(layer)
                }
                NextStep::WaitForDeparture(place) => {
                    let mut delayed = Delayed::new((), layer, head.to_request(), open.ticket.take(), place);
                    poll_fn(|cx| delayed.poll_departure(cx)).await;
                    // `depart` returns the ticket, because `delayed` holds the ticket until the request departs.
                    open.ticket = delayed.depart().map_or_else(Ticket::new, |(_, ticket)| ticket);
                    break true;
                }
                NextStep::TurnAway => break false,
            };
        };
        if passes {
            let mut extensions = Extensions::new();
            open.open(head.method.clone(), &mut extensions);
            let outcome = open.ticket.outcome(layer);
            // Calls the observer after the ticket is open, because the observer is the application's code and may
            // panic.
            open.ticket.observe(layer, head, &outcome);
            if layer.diagnostics.looks() {
                open.ticket.look_for_never(layer);
            }
            return Ok(Admission { outcome, usage: extensions.remove(), ticket: Some(open) });
        }
        let (mut parts, ()) = head.to_request().into_parts();
        let response = open.ticket.refuse(layer, &mut parts, std::convert::identity);
        let outcome = open.ticket.outcome(layer);
        Err(Refused {
            #[cfg(feature = "tonic")]
            grpc_status: layer.responses.refusals.grpc_status(&outcome),
            outcome,
            response: Box::new(Mutex::new(response)),
        })
    }

    /// Decides about a call in a handler of tonic, as [`admit`](Self::admit) does. The rules see the call's extensions,
    /// and its metadata as the request's headers. A handler does not know the call's path: the rules see `*`, and every
    /// rule of a file applies, even if it names other paths.
    ///
    /// ```
    /// use tonic::{Request, Response, Status};
    /// use tower_ratelimit::{MemoryLimiter, RateLimitLayer};
    ///
    /// async fn import(
    ///     limit: &RateLimitLayer<MemoryLimiter>,
    ///     call: Request<Vec<u8>>,
    /// ) -> Result<Response<()>, Status> {
    ///     limit.admit_call(&call).await?.keep();
    ///     Ok(Response::new(()))
    /// }
    /// ```
    ///
    /// # Errors
    /// Returns an error if the call is refused: the layer's own status, with its details, and with its
    /// headers as metadata.
    #[cfg(feature = "tonic")]
    pub fn admit_call<T>(
        &self,
        call: &tonic::Request<T>,
    ) -> impl Future<Output = Result<Admission, tonic::Status>> + Send + use<'_, L, T> {
        let head = head_of_call(call);
        async move { self.admit(&head).await.map_err(tonic::Status::from) }
    }
}

/// Returns the head of a call in a handler of tonic, which does not know the call's path.
#[cfg(feature = "tonic")]
pub(super) fn head_of_call<T>(call: &tonic::Request<T>) -> http::request::Parts {
    let (mut head, ()) = http::Request::new(()).into_parts();
    head.method = http::Method::POST;
    head.uri = http::Uri::from_static("*");
    head.version = http::Version::HTTP_2;
    head.headers = call.metadata().clone().into_headers();
    head.headers.insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static("application/grpc"));
    head.extensions = call.extensions().clone();
    head
}

/// A request about which the limiter decides. If the request is dropped before the decision, the
/// observer gets an outcome of the kind `Abandoned`.
struct Asked<'a, L>(Option<(&'a Compiled<L>, &'a Head<'a>, &'a mut Ticket)>);

impl<L> Drop for Asked<'_, L> {
    fn drop(&mut self) {
        if let Some((layer, head, ticket)) = self.0.take() {
            ticket.report_dropped(layer, head);
        }
    }
}

/// Holds the charges of a request that a handler has [admitted](RateLimitLayer::admit).
///
/// One of these calls ends an admission:
///
/// | | what stays charged | headers |
/// |---|---|---|
/// | [`finish`](Self::finish) with the response | what each rule charges according to the response, as in a layer | added |
/// | [`settle`](Self::settle) with a cost | the cost, for rules that are [settled by usage](crate::Rule::settle_by_usage); for other rules the taken units | [`headers`](Self::headers) before |
/// | [`keep`](Self::keep) | the taken units, or the cost that was stated with [`usage`](Self::usage), whatever the rules say | `headers` before |
/// | [`refund`](Self::refund) | nothing | `headers` before |
/// | dropped | as for an aborted request, see [`Rule::on_aborted`](crate::Rule::on_aborted); by default the taken units | `headers` before |
///
/// If a rule is settled after the response, and handlers only drop their admissions, the layer
/// [warns](crate::observe::SetupWarningKind::NotSettled).
///
/// An admission holds units of a [concurrency limit](crate::Quota::concurrent) until it is ended or dropped, and after
/// `finish` until the end of the response's body. So keep the admission for as long as the work takes.
#[must_use = "dropping an admission returns the request's places and settles the request as aborted; end it with a \
              method"]
pub struct Admission {
    outcome: Outcome,
    usage: Option<Usage>,
    /// `None` after the admission was ended.
    ticket: Option<Box<dyn AnyTicket>>,
}

impl Admission {
    /// Returns the outcome, which has its kind and the status of each policy.
    #[must_use]
    pub fn outcome(&self) -> &Outcome {
        &self.outcome
    }

    /// Returns the handle that states the cost for rules that are [settled by
    /// usage](crate::Rule::settle_by_usage), for example while the body of the response is sent. The last
    /// stated cost counts, unless the admission is refunded. Returns `None` if the layer has no such
    /// rule.
    #[must_use]
    pub fn usage(&self) -> Option<&Usage> {
        self.usage.as_ref()
    }

    /// Returns the headers of the layer, for the handler's response. These headers report the remaining units
    /// before any settlement.
    ///
    /// If the handler is inside another layer, that layer merges its own headers with these headers, as with
    /// the headers of a [nested layer](crate::Headers).
    ///
    /// ```
    /// use axum::response::IntoResponse;
    /// use http::request::Parts;
    /// use tower_ratelimit::{
    ///     Headers, MemoryLimiter, Quota, RateLimitLayer, Rule, key, middleware::Refused,
    /// };
    ///
    /// async fn complete(
    ///     tokens: &RateLimitLayer<MemoryLimiter>,
    ///     head: &Parts,
    /// ) -> Result<impl IntoResponse, Refused> {
    ///     let admission = tokens.admit(head).await?;
    ///     Ok((admission.headers(), "a text"))
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    /// let tokens = Rule::new("tokens", Quota::per_day(150_000))?.unit("tokens")?.cost(|_| 16);
    /// let tokens = RateLimitLayer::new(MemoryLimiter::new(), tokens, key::global())
    ///     .headers(Headers::openai());
    /// let (head, ()) = http::Request::new(()).into_parts();
    /// let response = complete(&tokens, &head).await?.into_response();
    /// assert_eq!(response.headers()["x-ratelimit-remaining-tokens"], "149984");
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        self.add_headers(&mut headers);
        headers
    }

    /// Adds the [headers](Self::headers) of the layer to a response's headers, and [merges](crate::Headers) them as a
    /// layer does. With this method, a handler merges the headers of several layers that it asks, or adds headers to
    /// a response that it passes on. A layer sends headers only with a response that is not a redirect.
    ///
    /// ```
    /// use axum::response::{IntoResponse, Response};
    /// use http::request::Parts;
    /// use tower_ratelimit::{MemoryLimiter, RateLimitLayer};
    ///
    /// type Limit = RateLimitLayer<MemoryLimiter>;
    ///
    /// async fn complete(requests: &Limit, tokens: &Limit, head: &Parts) -> Response {
    ///     let of_requests = match requests.admit(head).await {
    ///         Ok(admission) => admission,
    ///         Err(refused) => return refused.into_response(),
    ///     };
    ///     let mut response = match tokens.admit(head).await {
    ///         Ok(of_tokens) => of_tokens.finish(Response::new("a text".into())),
    ///         Err(refused) => refused.into_response(),
    ///     };
    ///     of_requests.add_headers(response.headers_mut()); // of both layers, also on a refusal
    ///     response
    /// }
    /// ```
    pub fn add_headers(&self, headers: &mut HeaderMap) {
        if let Some(ticket) = &self.ticket {
            ticket.add_headers(headers);
        }
    }

    /// Finishes the response as the layer would: settles each rule according to the response, and adds the layer's
    /// headers, which report the units that remain after the settlement. Rules that depend on the body are settled
    /// when the body has ended or was dropped.
    ///
    /// ```
    /// use axum::response::{IntoResponse, Response};
    /// use http::StatusCode;
    /// use http::request::Parts;
    /// use tower_ratelimit::{
    ///     MemoryLimiter, Quota, RateLimitLayer, Rule, key, middleware::Refused,
    /// };
    ///
    /// async fn login(
    ///     limit: &RateLimitLayer<MemoryLimiter>,
    ///     head: &Parts,
    ///     is_right: bool,
    /// ) -> Result<Response, Refused> {
    ///     let admission = limit.admit(head).await?;
    ///     let status = if is_right { StatusCode::OK } else { StatusCode::UNAUTHORIZED };
    ///     Ok(admission.finish(status.into_response()))
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    /// let failed = Rule::new("failed", Quota::per_hour(5))?
    ///     .charge_when(|response| response.status == 401);
    /// let limit = RateLimitLayer::new(MemoryLimiter::new(), failed, key::global());
    /// let (head, ()) = http::Request::new(()).into_parts();
    /// let right = login(&limit, &head, true).await?;
    /// let wrong = login(&limit, &head, false).await?;
    /// assert!(right.headers()["ratelimit"].to_str()?.contains("r=5"));
    /// assert!(wrong.headers()["ratelimit"].to_str()?.contains("r=4"));
    /// # Ok(()) }
    /// ```
    #[must_use = "the response has the headers, and its body may settle the charge"]
    pub fn finish<B: ResponseBody>(mut self, response: Response<B>) -> Response<B> {
        match self.end() {
            Some(ticket) => finish(ticket, response),
            None => response,
        }
    }

    /// Keeps the taken units charged, whatever the rules say about responses and aborted requests. For rules that
    /// are settled by usage, a cost that was stated with [`usage`](Self::usage) counts instead.
    pub fn keep(mut self) {
        self.end().into_iter().for_each(|mut ticket| ticket.complete());
    }

    /// Refunds the taken units, whatever the rules say. Use this method if nothing was done for the
    /// request.
    pub fn refund(mut self) {
        self.end().into_iter().for_each(|mut ticket| ticket.refund());
    }

    /// States that the request cost this many units, for rules that are settled by usage. For the other rules, the
    /// taken units stay charged.
    ///
    /// A layer without a rule that is settled by usage [warns](crate::observe::SetupWarningKind::NotSettled).
    pub fn settle(mut self, units: u64) {
        let Some(mut ticket) = self.end() else { return };
        match &self.usage {
            Some(usage) => drop(usage.set(units)),
            None => ticket.diagnostics().look_for_lost_cost(),
        }
        ticket.complete();
    }

    /// Takes the ticket out, because the handler ends the admission.
    fn end(&mut self) -> Option<Box<dyn AnyTicket>> {
        let ticket = self.ticket.take()?;
        ticket.diagnostics().admission_has_ended();
        Some(ticket)
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket.take() else { return };
        if let Some(policy) = ticket.unsettled() {
            // Contains a panic, because the observer is the application's code.
            contained(|| ticket.diagnostics().look_for_dropped_admission(policy));
        }
    }
}

impl fmt::Debug for Admission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admission").field("outcome", &self.outcome).finish_non_exhaustive()
    }
}

/// A request that a layer refused in a handler. This value holds the response to return.
///
/// With the feature `axum`, this type implements axum's `IntoResponse`, so that handlers can return a
/// `Result<_, Refused>`. With the feature `tonic`, this type converts into a `tonic::Status`.
///
/// This type is `Send` and `Sync`, so `?` also makes it a `Box<dyn Error + Send + Sync>` or an
/// `anyhow::Error`.
pub struct Refused {
    outcome: Outcome,
    /// The code and the message of the refusal over gRPC.
    #[cfg(feature = "tonic")]
    grpc_status: (u8, &'static str),
    /// The lock is never taken. The lock makes the type `Sync`, because a responder's body need not
    /// be `Sync`.
    response: Box<Mutex<Response<RefusalBody>>>,
}

impl Refused {
    /// Returns the kind of the outcome.
    #[must_use]
    pub fn kind(&self) -> OutcomeKind {
        self.outcome.kind()
    }

    /// Returns the reason for the refusal, and the status of each policy.
    #[must_use]
    pub fn outcome(&self) -> &Outcome {
        &self.outcome
    }

    /// Returns the refusal, as the layer would have sent it, for any framework. In axum, `refused.into_response()` is
    /// axum's response.
    #[must_use]
    pub fn into_http(self) -> Response<RefusalBody> {
        self.response.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

debug_as_text!(Refused);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the request was refused: {}", self.outcome.kind())
    }
}

impl std::error::Error for Refused {}

/// The admission of a request by a layer in the router's state, as an argument of a handler of axum. A refused request
/// gets the layer's refusal, and the handler is not called.
///
/// axum calls [`RateLimitLayer::admit`] with the request's head before it calls the handler. The state is the layer,
/// or a type from which `FromRef` makes the layer. Without a type parameter, the layer's limiter is a
/// [`MemoryLimiter`](crate::MemoryLimiter).
///
/// ```
/// use axum::{Router, response::{IntoResponse, Response}, routing::post};
/// use tower_ratelimit::middleware::Admit;
/// use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, Rule, key};
///
/// async fn complete(Admit { admission, .. }: Admit, prompt: String) -> Response {
///     let headers = admission.headers();
///     admission.settle(prompt.len() as u64);
///     (headers, "an answer").into_response()
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let bytes = Rule::new("bytes", Quota::per_day(1_000_000))?.settle_by_usage();
/// let limit = RateLimitLayer::new(MemoryLimiter::new(), bytes, key::header("x-api-key"));
/// let app: Router = Router::new().route("/", post(complete)).with_state(limit);
/// # let _ = app;
/// # Ok(()) }
/// ```
///
/// If a later argument fails, such as a body that is not JSON, the admission is dropped, and so settled as an aborted
/// request. If the cost is known only from the body, call [`admit`](RateLimitLayer::admit) in the handler.
#[cfg(feature = "axum")]
pub struct Admit<L = crate::limiter::memory::limiter::MemoryLimiter> {
    /// The admission. The admission has the layer's headers. With its methods the handler says
    /// which units stay charged.
    pub admission: Admission,
    limiter: std::marker::PhantomData<fn() -> L>,
}

#[cfg(feature = "axum")]
impl<L> fmt::Debug for Admit<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Admit").field(&self.admission).finish()
    }
}

#[cfg(feature = "axum")]
impl<S, L> axum::extract::FromRequestParts<S> for Admit<L>
where
    S: Send + Sync,
    L: Limiter,
    RateLimitLayer<L>: axum::extract::FromRef<S>,
{
    type Rejection = Refused;

    async fn from_request_parts(parts: &mut http::request::Parts, state: &S) -> Result<Self, Refused> {
        let limit = <RateLimitLayer<L> as axum::extract::FromRef<S>>::from_ref(state);
        Ok(Self { admission: limit.admit(&*parts).await?, limiter: std::marker::PhantomData })
    }
}

#[cfg(feature = "axum")]
impl axum::response::IntoResponse for Refused {
    fn into_response(self) -> axum::response::Response {
        self.into_http().map(axum::body::Body::new)
    }
}

#[cfg(feature = "tonic")]
impl From<Refused> for tonic::Status {
    /// Returns the status of a refused call. A refusal over plain HTTP becomes the status that the layer sends over
    /// gRPC, with the headers of the refusal.
    fn from(refused: Refused) -> Self {
        let (code, message) = refused.grpc_status;
        let (head, _) = refused.into_http().into_parts();
        Self::from_header_map(&head.headers).unwrap_or_else(|| {
            let metadata = tonic::metadata::MetadataMap::from_headers(head.headers);
            Self::with_metadata(tonic::Code::from_i32(code.into()), message, metadata)
        })
    }
}
