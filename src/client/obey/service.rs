//! [`Obey`]: the service.

use std::sync::Arc;
use std::task::{Context, Poll};

use http::{Request, Response};
use tower_service::Service;

use super::future::{ObeyFuture, WaitStep, WaitingRequest};
use super::settings::ObeySettings;
use super::visit::Visit;
use crate::base::head::Head;
use crate::error::BoxError;

/// A client's service that obeys servers, made by an [`ObeyLayer`](super::ObeyLayer).
///
/// * The service is ready when the inner service is ready. A request that waits releases the readiness,
///   so that it holds no permit of a concurrency limit and no place in a buffer. When the request may
///   be sent, a clone of the inner service is made ready.
/// * The error is boxed: an [`ObeyError`](super::ObeyError) if the layer did not send the request, and
///   otherwise the inner service's error.
/// * A request joins the line in `call`. If the request's future is dropped, the request leaves the
///   line.
/// * If the compiler finds no method `call`, `ready` or `oneshot`, the inner service is not `Clone`, or does
///   not take [`http::Request`]s: [`reqwest::Client` needs a `service_fn`](super::ObeyLayer#around-reqwest).
#[derive(Clone, Debug)]
pub struct Obey<S> {
    inner: S,
    settings: Arc<ObeySettings>,
}

impl<S> Obey<S> {
    pub(super) fn new(inner: S, settings: Arc<ObeySettings>) -> Self {
        Self { inner, settings }
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

    /// Returns the inner service, without the waits of the layer.
    #[must_use]
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S, B, R> Service<Request<B>> for Obey<S>
where
    S: Service<Request<B>, Response = Response<R>, Error: Into<BoxError>> + Clone,
{
    type Response = Response<R>;
    type Error = BoxError;
    type Future = ObeyFuture<S, B>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let now_us = self.settings.now_us();
        let head = Head::from(&request);
        let key = (self.settings.key)(&head);
        let shares = self.settings.shares(&head);
        // A timer that cannot sleep reports `Duration::MAX` as its time.
        let Some(key) = key.filter(|_| now_us < u64::MAX) else {
            return ObeyFuture::calling(self.inner.call(request), None);
        };
        let begun = Visit::begin(&self.settings, key, shares, now_us).and_then(|mut visit| {
            let step = if visit.waits() { WaitStep::Line } else { WaitStep::after_line(&mut visit, now_us)? };
            let goes = matches!(step, WaitStep::Ready) && visit.go(now_us);
            Ok((visit, step, goes))
        });
        match begun {
            Ok((visit, _, true)) => ObeyFuture::calling(self.inner.call(request), Some(visit)),
            Ok((visit, step, false)) => {
                self.release_readiness();
                ObeyFuture::waiting(WaitingRequest::new(self.inner.clone(), request, visit, step))
            }
            Err(error) => {
                self.release_readiness();
                ObeyFuture::failed(error)
            }
        }
    }
}

impl<S: Clone> Obey<S> {
    fn release_readiness(&mut self) {
        self.inner = self.inner.clone();
    }
}
