//! The body of a refusal.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Either, Full};

use crate::error::BoxError;

/// The body of a refusal, made by the layer or by a [responder](crate::Refusals::with).
pub struct RefusalBody(Either<Full<Bytes>, UnsyncBoxBody<Bytes, BoxError>>);

impl RefusalBody {
    pub(crate) fn whole(bytes: Bytes) -> Self {
        Self(Either::Left(Full::new(bytes)))
    }

    pub(crate) fn own<B>(body: B) -> Self
    where
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        Self(Either::Right(body.map_err(Into::into).boxed_unsync()))
    }
}

impl Body for RefusalBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Pin::new(&mut self.0).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.size_hint()
    }
}

impl fmt::Debug for RefusalBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RefusalBody").field("length", &self.0.size_hint().exact()).finish_non_exhaustive()
    }
}
