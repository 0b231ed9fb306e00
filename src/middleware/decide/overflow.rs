//! The overflow: the service that answers requests that are over a quota, if there is one.

use std::future::{Future, Pending, pending};
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use tower_service::Service;

use crate::error::BoxError;
use crate::refusal::RefusalBody;

/// The destination of requests that are over a quota. The trait is sealed: it is implemented for a layer without an
/// overflow, and for a layer with the service that [`RateLimitLayer::overflow`](crate::RateLimitLayer::overflow) takes.
///
/// `S` is the service within the layer, and `B` is the body of its requests. The overflow's service takes the same
/// requests as `S`. The body of its responses has [`Bytes`] as data, and its error converts into the error of `S`.
pub trait Overflow<S: Service<Request<B>>, B>: Clone + Sealed {
    /// The error of the overflow's service.
    type Error: Into<S::Error>;

    /// The body of the overflow's responses. The layer converts this body into the body type of the
    /// service inside.
    type Body: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static;

    /// The overflow's response.
    type Future: Future<Output = Result<Response<Self::Body>, Self::Error>>;

    /// Returns a service that is ready to be called, if there is one at this moment.
    #[doc(hidden)]
    fn ready(&self, cx: &mut Context<'_>) -> Poll<Result<Self, Self::Error>>;

    /// Calls the service, which must be ready.
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
    type Body = RefusalBody;
    type Future = Pending<Result<Response<RefusalBody>, S::Error>>;

    fn ready(&self, _: &mut Context<'_>) -> Poll<Result<Self, S::Error>> {
        Poll::Pending
    }

    fn call(self, _: Request<B>) -> Self::Future {
        debug_assert!(false, "without an overflow, `ready` never returns a service to call");
        pending()
    }
}

/// Requests that are over a quota go to this service; see
/// [`RateLimitLayer::overflow`](crate::RateLimitLayer::overflow).
#[derive(Clone, Copy, Debug)]
pub struct OverflowTo<T>(T);

impl<T> OverflowTo<T> {
    pub(crate) fn new(service: T) -> Self {
        Self(service)
    }
}

impl<T> Sealed for OverflowTo<T> {}

impl<S, B, T, C> Overflow<S, B> for OverflowTo<T>
where
    S: Service<Request<B>>,
    T: Service<Request<B>, Response = Response<C>, Error: Into<S::Error>> + Clone,
    C: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    type Error = T::Error;
    type Body = C;
    type Future = T::Future;

    fn ready(&self, cx: &mut Context<'_>) -> Poll<Result<Self, T::Error>> {
        let mut service = self.clone();
        service.0.poll_ready(cx).map_ok(|()| service)
    }

    fn call(mut self, request: Request<B>) -> T::Future {
        self.0.call(request)
    }
}
