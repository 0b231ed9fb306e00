//! The body of a response: the service's own, or a refusal's.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use http_body::{Frame, SizeHint};
use pin_project_lite::pin_project;

use super::late::Late;

pin_project! {
    /// The body of a response that went through a [`RateLimit`](super::RateLimit): the service's own, or a refusal's.
    ///
    /// It is a body wherever the service's own is one whose data can be made from [`Bytes`]. It is `Default` (empty)
    /// whatever the service's body is, since middleware outside, such as tower-http's timeout, answers with that.
    #[derive(Debug)]
    pub struct Body<B> {
        #[pin]
        kind: Kind<B>,
    }
}

pin_project! {
    #[project = KindProjection]
    #[derive(Debug)]
    enum Kind<B> {
        Inner { #[pin] body: B },
        Whole { bytes: Option<Bytes> },
        // What is charged depends on it; boxed, since it is rare.
        Settling { #[pin] body: B, late: Box<Late> },
    }
}

impl<B> Body<B> {
    pub(super) fn inner(body: B) -> Self {
        Self { kind: Kind::Inner { body } }
    }

    /// The service's own, whose end or loss settles what its request cost.
    pub(super) fn settling(body: B, late: Box<Late>) -> Self {
        Self { kind: Kind::Settling { body, late } }
    }

    /// An empty one has ended before it is polled: gRPC clients retry only what ended with its headers.
    pub(super) fn whole(bytes: Bytes) -> Self {
        Self { kind: Kind::Whole { bytes: (!bytes.is_empty()).then_some(bytes) } }
    }
}

impl<B> Default for Body<B> {
    fn default() -> Self {
        Self::whole(Bytes::new())
    }
}

impl<B> http_body::Body for Body<B>
where
    B: http_body::Body,
    B::Data: From<Bytes>,
{
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        match self.project().kind.project() {
            KindProjection::Inner { body } => body.poll_frame(cx),
            KindProjection::Settling { mut body, late } => {
                let frame = ready!(body.as_mut().poll_frame(cx));
                match &frame {
                    Some(Ok(frame)) => late.count(frame.data_ref().map_or(0, Buf::remaining), body.is_end_stream()),
                    // Also where the server keeps the body longer.
                    Some(Err(_)) => late.end(),
                    None => late.complete(),
                }
                Poll::Ready(frame)
            }
            KindProjection::Whole { bytes } => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes.into())))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Inner { body } | Kind::Settling { body, .. } => body.is_end_stream(),
            Kind::Whole { bytes } => bytes.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Inner { body } | Kind::Settling { body, .. } => body.size_hint(),
            Kind::Whole { bytes } => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body::Body as _;

    struct NoDefault;

    impl http_body::Body for NoDefault {
        type Data = Bytes;
        type Error = std::convert::Infallible;

        fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
            Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"inner")))))
        }

        fn size_hint(&self) -> SizeHint {
            SizeHint::with_exact(5)
        }
    }

    fn next(body: &mut Body<NoDefault>) -> Option<Bytes> {
        let mut cx = Context::from_waker(std::task::Waker::noop());
        match Pin::new(body).poll_frame(&mut cx) {
            Poll::Ready(Some(Ok(frame))) => frame.into_data().ok(),
            _ => None,
        }
    }

    #[test]
    fn an_empty_body_has_ended_before_it_is_polled() {
        let body: Body<NoDefault> = Body::default();
        assert!(body.is_end_stream());
        assert_eq!(body.size_hint().exact(), Some(0));
    }

    #[test]
    fn a_refusals_bytes_come_once_and_their_length_is_known() {
        let mut body: Body<NoDefault> = Body::whole(Bytes::from_static(b"too many"));
        assert_eq!(body.size_hint().exact(), Some(8));
        assert!(!body.is_end_stream());
        assert_eq!(next(&mut body).as_deref(), Some(&b"too many"[..]));
        assert!(body.is_end_stream());
        assert_eq!(next(&mut body), None);
    }

    #[test]
    fn the_services_own_body_is_passed_on() {
        let mut body = Body::inner(NoDefault);
        assert_eq!(body.size_hint().exact(), Some(5));
        assert_eq!(next(&mut body).as_deref(), Some(&b"inner"[..]));
    }
}
