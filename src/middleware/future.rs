//! The future of a response.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{Request, Response};
use pin_project_lite::pin_project;
use tower_service::Service;

use super::body::Body;
use super::charging::{Charges, Decided, Shared};
use super::composed::Passage;
use crate::decision::Decision;
use crate::limiter::Limiter;

pin_project! {
    /// The future of a [`RateLimit`](super::RateLimit)'s response.
    ///
    /// Dropped before it was first polled, it gives back what its request took: the service did nothing for it. Dropped
    /// later, it does not, unless a layer within has refused the request: the service may have done all the work. Rules that
    /// settle may say otherwise, see [`Rule::unanswered`](super::Rule::unanswered).
    pub struct ResponseFuture<S, L, B>
    where
        S: Service<Request<B>>,
        L: Limiter,
    {
        #[pin]
        state: State<S, L, B>,
        polled: bool,
        shared: Arc<Shared<L>>,
    }

    impl<S, L, B> PinnedDrop for ResponseFuture<S, L, B>
    where
        S: Service<Request<B>>,
        L: Limiter,
    {
        fn drop(this: Pin<&mut Self>) {
            let this = this.project();
            if let StateProjection::Passing { decided, passage, .. } = this.state.project() {
                if *this.polled {
                    this.shared.settle(decided, passage);
                } else {
                    this.shared.give_back(std::mem::replace(decided, Decided::nothing()));
                }
            }
        }
    }
}

pin_project! {
    #[project = StateProjection]
    enum State<S, L, B>
    where
        S: Service<Request<B>>,
        L: Limiter,
    {
        // The passage if there are layers within this one.
        Passing { #[pin] response: S::Future, decided: Decided, passage: Option<Passage> },
        // Boxed, since limiters that answer at once would else carry room for it in each future.
        Deciding { waiting: Pin<Box<Waiting<S, L, B>>> },
        Refused { response: Option<Response<Bytes>> },
    }
}

pin_project! {
    // What waits for the limiter's answer.
    struct Waiting<S, L, B>
    where
        L: Limiter,
    {
        #[pin]
        answer: L::Future<Decision>,
        asked: Option<Asked<S, B>>,
    }
}

/// What was asked, and for whom.
struct Asked<S, B> {
    charges: Charges,
    ready: S,
    request: Request<B>,
}

impl<S, L, B> ResponseFuture<S, L, B>
where
    S: Service<Request<B>>,
    L: Limiter,
{
    pub(super) fn untouched(response: S::Future, shared: Arc<Shared<L>>) -> Self {
        Self { state: State::Passing { response, decided: Decided::nothing(), passage: None }, polled: false, shared }
    }

    #[inline(always)]
    pub(super) fn passing(
        response: S::Future,
        decided: Decided,
        passage: Option<Passage>,
        shared: Arc<Shared<L>>,
    ) -> Self {
        Self { state: State::Passing { response, decided, passage }, polled: false, shared }
    }

    pub(super) fn deciding(
        answer: L::Future<Decision>,
        charges: Charges,
        ready: S,
        request: Request<B>,
        shared: Arc<Shared<L>>,
    ) -> Self {
        let asked = Some(Asked { charges, ready, request });
        let waiting = Box::pin(Waiting { answer, asked });
        Self { state: State::Deciding { waiting }, polled: false, shared }
    }

    pub(super) fn refused(response: Response<Bytes>, shared: Arc<Shared<L>>) -> Self {
        Self { state: State::Refused { response: Some(response) }, polled: false, shared }
    }
}

impl<S, L, B, C> Future for ResponseFuture<S, L, B>
where
    S: Service<Request<B>, Response = Response<C>>,
    L: Limiter,
{
    type Output = Result<Response<Body<C>>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        *this.polled = true;
        loop {
            match this.state.as_mut().project() {
                StateProjection::Passing { response, decided, passage } => {
                    let noticing = this.shared.noticing();
                    let polled = response.poll(cx);
                    noticing.end();
                    let mut response = ready!(polled)?;
                    if decided.is_late() {
                        return Poll::Ready(Ok(this.shared.finish_late(response, decided, passage)));
                    }
                    // Left where it is, since it is large.
                    this.shared.finish(&mut response, decided);
                    this.shared.settle_with(decided, passage, &response);
                    return Poll::Ready(Ok(response.map(Body::inner)));
                }
                StateProjection::Deciding { waiting } => {
                    let waiting = waiting.as_mut().project();
                    let answer = ready!(waiting.answer.poll(cx));
                    // There until the answer came, and then this state is left.
                    let Some(Asked { charges, mut ready, request }) = waiting.asked.take() else {
                        return Poll::Pending;
                    };
                    let (parts, body) = request.into_parts();
                    let mut decided = this.shared.decide(charges, answer);
                    if decided.passes() {
                        let request = Request::from_parts(parts, body);
                        let (response, passage) = this.shared.pass(&mut ready, request, &mut decided);
                        this.state.set(State::Passing { response, decided, passage });
                    } else {
                        let response = Some(this.shared.refuse(&parts, &decided));
                        this.state.set(State::Refused { response });
                    }
                }
                StateProjection::Refused { response } => {
                    // Polled again after it was ready, a future may do anything; this one stays silent.
                    return response
                        .take()
                        .map_or(Poll::Pending, |response| Poll::Ready(Ok(response.map(Body::whole))));
                }
            }
        }
    }
}

impl<S, L, B> fmt::Debug for ResponseFuture<S, L, B>
where
    S: Service<Request<B>>,
    L: Limiter,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.state {
            State::Passing { .. } => "passing",
            State::Deciding { .. } => "deciding",
            State::Refused { .. } => "refused",
        };
        f.debug_struct("ResponseFuture").field("state", &state).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::memory::MemoryLimiter;

    #[derive(Clone)]
    struct Inner;

    impl Service<Request<[u8; 4_096]>> for Inner {
        type Response = Response<()>;
        type Error = std::convert::Infallible;
        type Future = std::future::Ready<Result<Response<()>, Self::Error>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: Request<[u8; 4_096]>) -> Self::Future {
            std::future::ready(Ok(Response::new(())))
        }
    }

    #[test]
    fn the_future_has_no_room_for_a_request() {
        let own = size_of::<ResponseFuture<Inner, MemoryLimiter, [u8; 4_096]>>();
        let inner = size_of::<<Inner as Service<Request<[u8; 4_096]>>>::Future>();
        assert!(own <= inner + 400, "{own} bytes around an inner future of {inner}");
    }
}
