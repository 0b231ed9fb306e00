//! The rate-limited service. If the limiter answers at once, `call` decides the request, so the inner service is
//! called without a clone.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use http::{Request, Response};
use http_body::Body;
use tower_service::Service;

use super::body::ResponseBody;
use super::compiled::Compiled;
use super::decide::overflow::{NoOverflow, Overflow};
use super::decide::step::NextStep;
use super::future::{OnResponse, ResponseFuture, ResponseState};
use super::latest::Latest;
use super::ticket::Ticket;
use crate::base::head::Head;
use crate::limiter::Limiter;
use crate::limiter::memory::limiter::MemoryLimiter;

/// A service with limited rates, made by a [`RateLimitLayer`](crate::RateLimitLayer).
///
/// This type is a `Service` if the response body of the inner service is a [`ResponseBody`]. Axum's
/// body (feature `axum`) and tonic's body (feature `tonic`) implement `ResponseBody`. For every
/// other body, end the layer with [`.wrap_body()`](crate::RateLimitLayer::wrap_body). The method
/// `wrap_body` is also the fix if the compiler finds no method `call`, `ready` or `oneshot`.
///
/// The request's body may be any [`http_body::Body`](Body), because the layer [discards the
/// rest](crate::RateLimitLayer::discard_body) of refused requests. For a test, `String` is a body,
/// and `()` is not.
///
/// * This service is ready when the inner service is ready, and calls the very service that was made ready. A
///   refused request releases the inner service's readiness, for example the permit that an inner concurrency limit
///   reserved.
/// * The errors of this service are the inner service's own. A refusal is a response.
/// * A request is charged in `call`, or, if the limiter answers later, while its future is polled. After the
///   inner service was called, the charge is kept, even if the future is dropped before it was polled. A
///   correction after the response is made once: when the response's head has come, or when its body has ended or
///   was dropped.
pub struct RateLimit<S, L = MemoryLimiter, O = NoOverflow> {
    inner: S,
    layer: Arc<Compiled<L>>,
    /// Holds the configuration that is in force now, if the configuration can change.
    latest: Option<Arc<Latest<Compiled<L>>>>,
    overflow: O,
}

impl<S, L, O> RateLimit<S, L, O> {
    pub(super) fn new(
        inner: S,
        layer: Arc<Compiled<L>>,
        latest: Option<Arc<Latest<Compiled<L>>>>,
        overflow: O,
    ) -> Self {
        Self { inner, layer, latest, overflow }
    }

    /// Returns the inner service.
    #[must_use]
    pub fn inner(&self) -> &S {
        &self.inner
    }

    /// Returns a mutable reference to the inner service.
    pub fn inner_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// Returns the inner service, without its limit.
    #[must_use]
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S, L, B, C, O> Service<Request<B>> for RateLimit<S, L, O>
where
    S: Service<Request<B>, Response = Response<C>> + Clone,
    L: Limiter,
    B: Body + 'static,
    C: ResponseBody,
    O: Overflow<S, B>,
{
    type Response = Response<C>;
    type Error = S::Error;
    type Future = ResponseFuture<S, L, B, O>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    // `call` and `decide` are not inlined, so that a caller that boxes the future writes the future once and moves it
    // once. The future of an axum router has 320 bytes, and each move of words that were just written stalls on store
    // forwarding.
    #[inline(never)]
    fn call(&mut self, request: Request<B>) -> Self::Future {
        ResponseFuture { state: self.decide(request) }
    }
}

impl<S, L, O> RateLimit<S, L, O> {
    /// Decides about a request, and calls the inner service if the request passes at once.
    #[inline(never)]
    fn decide<B, C>(&mut self, mut request: Request<B>) -> ResponseState<S, L, B, O>
    where
        S: Service<Request<B>, Response = Response<C>> + Clone,
        L: Limiter,
        B: Body + 'static,
        C: ResponseBody,
        O: Overflow<S, B>,
    {
        if let Some(latest) = &self.latest {
            latest.update(&mut self.layer);
        }
        let layer = &self.layer;
        let headers = {
            let mut ticket = Ticket::new();
            match ticket.charge(layer, &Head::from(&request)) {
                NextStep::PassWithoutTicket(headers) => headers,
                NextStep::Pass => {
                    let on_response = OnResponse::prepare(layer, &mut request, &mut ticket);
                    return ResponseState::Passing { response: self.inner.call(request), on_response };
                }
                NextStep::AwaitAnswer(answer) => {
                    return ResponseState::deciding(answer, &mut self.inner, layer, request, ticket, &self.overflow);
                }
                NextStep::WaitInLine => {
                    return ResponseState::in_line(&mut self.inner, layer, request, ticket, &self.overflow);
                }
                NextStep::WaitForDeparture(place) => {
                    return ResponseState::delayed(&mut self.inner, layer, request, ticket, place);
                }
                NextStep::TurnAway => {
                    // Polls with a waker that does nothing, because no request waits for an overflow service that is
                    // not ready.
                    let mut cx = Context::from_waker(Waker::noop());
                    let (inner, overflow) = (&mut self.inner, &self.overflow);
                    return ResponseState::turned_away(inner, layer, request, &mut ticket, overflow, &mut cx);
                }
            }
        };
        match headers {
            // No value has to be dropped if the service panics. So the compiler needs no temporary copy, and the
            // service writes its future directly to the future's final place.
            None => ResponseState::Passing {
                response: call_in_place(&mut self.inner, request),
                on_response: OnResponse::Nothing,
            },
            Some(headers) => {
                let on_response = OnResponse::AddHeaders(headers, Arc::clone(layer));
                ResponseState::Passing { response: self.inner.call(request), on_response }
            }
        }
    }
}

/// Calls a service. This function is not inlined, so that one function writes the service's future in place,
/// and the future is not moved.
#[inline(never)]
fn call_in_place<S: Service<R>, R>(service: &mut S, request: R) -> S::Future {
    service.call(request)
}

/// The limited service has the name of the inner service.
#[cfg(feature = "tonic")]
impl<S: tonic::server::NamedService, L, O> tonic::server::NamedService for RateLimit<S, L, O> {
    const NAME: &'static str = S::NAME;
}

impl<S: Clone, L, O: Clone> Clone for RateLimit<S, L, O> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            layer: Arc::clone(&self.layer),
            latest: self.latest.clone(),
            overflow: self.overflow.clone(),
        }
    }
}

impl<S: fmt::Debug, L, O> fmt::Debug for RateLimit<S, L, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimit")
            .field("inner", &self.inner)
            .field("rules", &self.layer.settings.rules)
            .finish_non_exhaustive()
    }
}
