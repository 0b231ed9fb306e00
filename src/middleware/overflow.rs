//! Where refused requests go instead: nowhere, or to another service.

use std::future::{Future, Pending, pending};
use std::sync::Arc;
use std::task::{Context, Poll};

use http::header::{CACHE_CONTROL, Entry};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Request, Response};
use tower_service::Service;

use super::body::RefusalBody;
use super::charging::Shared;
use super::decided::Decided;
use crate::outcome::{Outcome, OutcomeKind};

/// What a layer does with requests that are over a quota: [`NoOverflow`] or [`OverflowTo`] another service. Sealed.
///
/// `S` is the service within the layer, `B` the body of its requests.
pub trait Overflow<S: Service<Request<B>>, B>: Clone + Sealed {
    /// What may go wrong there.
    type Error: Into<S::Error>;

    /// The response from there.
    type Future: Future<Output = Result<S::Response, Self::Error>>;

    /// A service that is ready to be called, if there is one at this moment.
    #[doc(hidden)]
    fn ready(&self, cx: &mut Context<'_>) -> Poll<Result<Self, Self::Error>>;

    /// Calls it, once it is ready.
    #[doc(hidden)]
    fn call(self, request: Request<B>) -> Self::Future;
}

/// Only the types of this file are overflows.
pub trait Sealed {}

/// Requests that are over a quota are refused.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct NoOverflow;

impl Sealed for NoOverflow {}

impl<S: Service<Request<B>>, B> Overflow<S, B> for NoOverflow {
    type Error = S::Error;
    type Future = Pending<Result<S::Response, S::Error>>;

    fn ready(&self, _: &mut Context<'_>) -> Poll<Result<Self, S::Error>> {
        Poll::Pending
    }

    fn call(self, _: Request<B>) -> Self::Future {
        pending()
    }
}

/// Requests that are over a quota go to this service; see [`RateLimitLayer::overflow`](super::RateLimitLayer::overflow).
#[derive(Clone, Copy, Debug)]
pub struct OverflowTo<T>(T);

impl<T> OverflowTo<T> {
    pub(super) fn new(service: T) -> Self {
        Self(service)
    }
}

impl<T> Sealed for OverflowTo<T> {}

impl<S, B, T> Overflow<S, B> for OverflowTo<T>
where
    S: Service<Request<B>>,
    T: Service<Request<B>, Response = S::Response> + Clone,
    T::Error: Into<S::Error>,
{
    type Error = T::Error;
    type Future = T::Future;

    fn ready(&self, cx: &mut Context<'_>) -> Poll<Result<Self, T::Error>> {
        let mut service = self.clone();
        service.0.poll_ready(cx).map_ok(|()| service)
    }

    fn call(mut self, request: Request<B>) -> T::Future {
        self.0.call(request)
    }
}

/// What becomes of a request that does not pass.
pub(super) enum TurnedAway<F, E> {
    Refused(Response<RefusalBody>),
    Overflowing(F, Decided),
    /// The overflow is broken.
    Failed(E),
}

/// What is served in place of the usual response is not stored, unless the service says so: clients within their quota are
/// not meant to get it.
pub(super) fn store_only_if_said(headers: &mut HeaderMap) {
    if let Ok(Entry::Vacant(vacant)) = headers.try_entry(CACHE_CONTROL) {
        let _ = vacant.try_insert(HeaderValue::from_static("no-store"));
    }
}

impl<L> Shared<L> {
    /// Answers a request that does not pass, or hands it to the overflow if that has room for it now.
    #[inline(never)]
    pub(super) fn turn_away<S, B, O>(
        self: &Arc<Self>,
        mut parts: Parts,
        body: B,
        mut decided: Decided,
        overflow: &O,
        cx: &mut Context<'_>,
    ) -> TurnedAway<O::Future, S::Error>
    where
        S: Service<Request<B>>,
        O: Overflow<S, B>,
    {
        if decided.kind() != OutcomeKind::Limited {
            return TurnedAway::Refused(self.refuse(&mut parts, &decided));
        }
        match overflow.ready(cx) {
            Poll::Pending => TurnedAway::Refused(self.refuse(&mut parts, &decided)),
            Poll::Ready(ready) => {
                decided.kind = OutcomeKind::Overflowed;
                if let Some(outcome) = self.tell(&parts, &decided) {
                    parts.extensions.insert(outcome);
                }
                let request = Request::from_parts(parts, body);
                match ready {
                    Ok(ready) => TurnedAway::Overflowing(ready.call(request), decided),
                    Err(error) => TurnedAway::Failed(error.into()),
                }
            }
        }
    }

    /// Writes the fields of a response from the overflow: those of a refusal. Its `Cache-Control` is the service's own, if
    /// it has one.
    pub(super) fn finish_overflow<B>(&self, response: &mut Response<B>, decided: &Decided) {
        store_only_if_said(response.headers_mut());
        self.write_refusals_headers(response, decided);
        // A limit within the overflow may have refused the request in turn.
        let is_refused = response.extensions().get().is_some_and(|inner: &Outcome| !inner.kind().passed());
        if !is_refused {
            response.extensions_mut().insert(self.outcome(decided));
        }
    }
}
