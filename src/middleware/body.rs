//! The body of a response: the service's own, or a refusal's.

use std::error::Error;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use http_body::{Frame, SizeHint};
use pin_project_lite::pin_project;

use super::late::Late;

type BoxError = Box<dyn Error + Send + Sync>;

pin_project! {
    /// The body of a response that went through a [`RateLimit`](super::RateLimit): the service's own, or a refusal's.
    ///
    /// It is a body wherever the service's own is one whose data can be made from [`Bytes`], and whose errors can be
    /// boxed. It is `Default` (empty) whatever the service's body is, since middleware outside, such as tower-http's
    /// timeout, answers with that.
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
        Refusal { body: RefusalBody },
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

    pub(super) fn refusal(body: RefusalBody) -> Self {
        Self { kind: Kind::Refusal { body } }
    }
}

impl<B> Default for Body<B> {
    fn default() -> Self {
        Self::refusal(RefusalBody::whole(Bytes::new()))
    }
}

impl<B> http_body::Body for Body<B>
where
    B: http_body::Body,
    B::Data: From<Bytes>,
    B::Error: Into<BoxError>,
{
    type Data = B::Data;
    type Error = BoxError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<B::Data>, BoxError>>> {
        match self.project().kind.project() {
            KindProjection::Inner { body } => body.poll_frame(cx).map_err(Into::into),
            KindProjection::Settling { mut body, late } => {
                let frame = ready!(body.as_mut().poll_frame(cx));
                match &frame {
                    Some(Ok(frame)) => {
                        // Nothing comes after trailers, and servers do not ask for more.
                        let is_last = frame.is_trailers() || body.is_end_stream();
                        late.count(frame.data_ref().map_or(0, Buf::remaining), is_last);
                    }
                    // Also where the server keeps the body longer.
                    Some(Err(_)) => late.end(),
                    None => late.complete(),
                }
                Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
            }
            KindProjection::Refusal { body } => {
                Pin::new(body).poll_frame(cx).map_ok(|frame| frame.map_data(B::Data::from))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Inner { body } | Kind::Settling { body, .. } => body.is_end_stream(),
            Kind::Refusal { body } => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Inner { body } | Kind::Settling { body, .. } => body.size_hint(),
            Kind::Refusal { body } => body.size_hint(),
        }
    }
}

/// The body of a refusal: bytes of the layer's, or whatever body a [responder](super::Refusals::with) answers with.
pub struct RefusalBody(Content);

enum Content {
    /// To be sent in one piece. An empty one has ended before it is polled: gRPC clients retry only a response that ended
    /// with its headers.
    Whole(Bytes),
    /// A responder's own, whose data, trailers and length are passed on.
    Own(Pin<Box<dyn http_body::Body<Data = Bytes, Error = BoxError> + Send>>),
}

impl RefusalBody {
    pub(super) fn whole(bytes: Bytes) -> Self {
        Self(Content::Whole(bytes))
    }

    pub(super) fn own<B>(body: B) -> Self
    where
        B: http_body::Body + Send + 'static,
        B::Error: Into<BoxError>,
    {
        Self(Content::Own(Box::pin(InBytes { body })))
    }
}

impl http_body::Body for RefusalBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match &mut self.0 {
            Content::Whole(bytes) if bytes.is_empty() => Poll::Ready(None),
            Content::Whole(bytes) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes))))),
            Content::Own(body) => body.as_mut().poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Content::Whole(bytes) => bytes.is_empty(),
            Content::Own(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Content::Whole(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Content::Own(body) => body.size_hint(),
        }
    }
}

impl fmt::Debug for RefusalBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Content::Whole(bytes) => f.debug_tuple("RefusalBody").field(bytes).finish(),
            Content::Own(_) => f.debug_struct("RefusalBody").finish_non_exhaustive(),
        }
    }
}

pin_project! {
    /// A body whose data becomes [`Bytes`], and whose errors are boxed.
    struct InBytes<B> {
        #[pin]
        body: B,
    }
}

impl<B> http_body::Body for InBytes<B>
where
    B: http_body::Body,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = self.project().body.poll_frame(cx);
        // Data that is `Bytes` is moved, not copied.
        let in_bytes = |frame: Frame<B::Data>| frame.map_data(|mut data| data.copy_to_bytes(data.remaining()));
        frame.map_ok(in_bytes).map_err(Into::into)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use http::{HeaderMap, HeaderValue};
    use http_body::Body as _;

    use super::*;

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

    fn frame(body: &mut Body<NoDefault>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Pin::new(body).poll_frame(&mut Context::from_waker(std::task::Waker::noop()))
    }

    fn next(body: &mut Body<NoDefault>) -> Option<Bytes> {
        match frame(body) {
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
        let mut body: Body<NoDefault> = Body::refusal(RefusalBody::whole(Bytes::from_static(b"too many")));
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

    /// Says what it is told to, in pieces that are no `Bytes`, and then fails.
    struct Streaming(VecDeque<Poll<Frame<VecDeque<u8>>>>);

    impl http_body::Body for Streaming {
        type Data = VecDeque<u8>;
        type Error = fmt::Error;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<VecDeque<u8>>, fmt::Error>>> {
            self.0.pop_front().map_or(Poll::Ready(Some(Err(fmt::Error))), |next| next.map(|frame| Some(Ok(frame))))
        }

        fn is_end_stream(&self) -> bool {
            self.0.is_empty()
        }

        fn size_hint(&self) -> SizeHint {
            let mut hint = SizeHint::new();
            hint.set_lower(2);
            hint.set_upper(9);
            hint
        }
    }

    #[test]
    fn a_responders_body_is_passed_on_with_its_trailers() {
        let trailers = HeaderMap::from_iter([(http::header::ETAG, HeaderValue::from_static("x"))]);
        let piece = |text: &str| Poll::Ready(Frame::data(text.bytes().collect()));
        let frames = [piece("a"), Poll::Pending, piece("bc"), Poll::Ready(Frame::trailers(trailers.clone()))];
        let mut body: Body<NoDefault> = Body::refusal(RefusalBody::own(Streaming(frames.into())));
        assert_eq!((body.size_hint().lower(), body.size_hint().upper()), (2, Some(9)));
        assert_eq!(next(&mut body).as_deref(), Some(&b"a"[..]));
        assert!(frame(&mut body).is_pending());
        assert_eq!(next(&mut body).as_deref(), Some(&b"bc"[..]));
        assert!(!body.is_end_stream());
        let Poll::Ready(Some(Ok(last))) = frame(&mut body) else { panic!("no trailers") };
        assert_eq!(last.into_trailers().unwrap(), trailers);
        assert!(body.is_end_stream());
        let Poll::Ready(Some(Err(error))) = frame(&mut body) else { panic!("no error") };
        assert!(error.is::<fmt::Error>());
    }

    #[test]
    fn a_refusal_takes_no_room_in_other_bodies() {
        assert!(size_of::<Body<[usize; 2]>>() <= 40);
    }
}
