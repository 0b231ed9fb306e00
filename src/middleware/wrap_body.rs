//! A layer that wraps response bodies inside of a rate limit, so that they can hold a refusal.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use http::{Request, Response};
use pin_project_lite::pin_project;
use tower_layer::Layer;
use tower_service::Service;

use super::body::WrappedBody;

/// A rate limit for services with any response body. Made by
/// [`RateLimitLayer::wrap_body`](crate::RateLimitLayer::wrap_body).
#[derive(Clone, Debug)]
pub struct WrapBodyLayer<L>(L);

impl<L> WrapBodyLayer<L> {
    pub(super) fn new(layer: L) -> Self {
        Self(layer)
    }
}

impl<S, L: Layer<WrapBody<S>>> Layer<S> for WrapBodyLayer<L> {
    type Service = L::Service;

    fn layer(&self, inner: S) -> L::Service {
        self.0.layer(WrapBody(inner))
    }
}

/// A service inside of a [`RateLimit`](super::RateLimit). Its response bodies are
/// [wrapped](WrappedBody).
#[derive(Clone, Debug)]
pub struct WrapBody<S>(S);

impl<S, B, C> Service<Request<B>> for WrapBody<S>
where
    S: Service<Request<B>, Response = Response<C>>,
{
    type Response = Response<WrappedBody<C>>;
    type Error = S::Error;
    type Future = WrapBodyFuture<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        WrapBodyFuture { response: self.0.call(request) }
    }
}

/// tonic serves a [`WrapBody`] under the name of the inner service.
#[cfg(feature = "tonic")]
impl<S: tonic::server::NamedService> tonic::server::NamedService for WrapBody<S> {
    const NAME: &'static str = S::NAME;
}

pin_project! {
    /// The future of a [`WrapBody`]'s response.
    #[derive(Debug)]
    #[must_use = "futures do nothing unless polled"]
    pub struct WrapBodyFuture<F> {
        #[pin]
        response: F,
    }
}

impl<F, C, E> Future for WrapBodyFuture<F>
where
    F: Future<Output = Result<Response<C>, E>>,
{
    type Output = Result<Response<WrappedBody<C>>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let response = ready!(self.project().response.poll(cx));
        Poll::Ready(response.map(|response| response.map(WrappedBody::new)))
    }
}
