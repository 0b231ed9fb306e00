//! The future of a response.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::{Request, Response};
use pin_project_lite::pin_project;
use tower_service::Service;

use super::body::{Body, RefusalBody};
use super::charging::Shared;
use super::decided::{Charges, Decided};
use super::delay::Delayed;
use super::nested::Copies;
use super::overflow::{NoOverflow, Overflow, TurnedAway};
use crate::decision::Decision;
use crate::limiter::Limiter;

pin_project! {
    /// The future of a [`RateLimit`](super::RateLimit)'s response.
    ///
    /// Dropped before it is ready, it keeps what its request took once the service was called: the service may have done
    /// all the work. A request that was still waiting for its departure is refunded. Rules that settle may say otherwise,
    /// see [`Rule::on_aborted`](super::Rule::on_aborted).
    #[must_use = "futures do nothing unless polled"]
    pub struct ResponseFuture<S, L, B, O = NoOverflow>
    where
        S: Service<Request<B>>,
        L: Limiter,
        O: Overflow<S, B>,
    {
        #[pin]
        state: State<S, L, B, O>,
        shared: Arc<Shared<L>>,
    }

    impl<S, L, B, O> PinnedDrop for ResponseFuture<S, L, B, O>
    where
        S: Service<Request<B>>,
        L: Limiter,
        O: Overflow<S, B>,
    {
        fn drop(this: Pin<&mut Self>) {
            let this = this.project();
            match this.state.project() {
                StateProjection::Passing { decided, copies, .. } => {
                    if let Some(copies) = copies.take() {
                        this.shared.refund_refused(decided, &copies);
                    }
                }
                StateProjection::Delayed { delayed } => this.shared.leave(delayed),
                _ => {}
            }
        }
    }
}

pin_project! {
    #[project = StateProjection]
    enum State<S, L, B, O>
    where
        S: Service<Request<B>>,
        L: Limiter,
        O: Overflow<S, B>,
    {
        // The copies of the request if it is refunded once limits within refuse it.
        Passing { #[pin] response: S::Future, decided: Decided, copies: Option<Arc<Copies>> },
        // Boxed, since limiters that answer at once would else carry room for it in each future.
        Deciding { waiting: Pin<Box<Waiting<S, L, B, O>>> },
        // Until it departs.
        Delayed { delayed: Box<Delayed<S, B>> },
        Overflowing { #[pin] response: O::Future, decided: Decided },
        // Or the error of an overflow that could not be called.
        Refused { response: Option<Result<Response<RefusalBody>, S::Error>> },
    }
}

pin_project! {
    // What waits for the limiter's answer.
    struct Waiting<S, L, B, O>
    where
        L: Limiter,
    {
        #[pin]
        answer: L::Future<Decision>,
        asked: Option<InFlight<S, B, O>>,
    }
}

/// What was asked, and for whom.
pub(super) struct InFlight<S, B, O> {
    pub(super) charges: Charges,
    pub(super) ready: S,
    pub(super) request: Request<B>,
    pub(super) overflow: O,
}

impl<S, L, B, O> ResponseFuture<S, L, B, O>
where
    S: Service<Request<B>>,
    L: Limiter,
    O: Overflow<S, B>,
{
    pub(super) fn untouched(response: S::Future, shared: Arc<Shared<L>>) -> Self {
        Self { state: State::Passing { response, decided: Decided::nothing(), copies: None }, shared }
    }

    #[inline(always)]
    pub(super) fn passing(
        response: S::Future,
        decided: Decided,
        copies: Option<Arc<Copies>>,
        shared: Arc<Shared<L>>,
    ) -> Self {
        Self { state: State::Passing { response, decided, copies }, shared }
    }

    pub(super) fn deciding(answer: L::Future<Decision>, asked: InFlight<S, B, O>, shared: Arc<Shared<L>>) -> Self {
        let waiting = Box::pin(Waiting { answer, asked: Some(asked) });
        Self { state: State::Deciding { waiting }, shared }
    }

    pub(super) fn delayed(delayed: Box<Delayed<S, B>>, shared: Arc<Shared<L>>) -> Self {
        Self { state: State::Delayed { delayed }, shared }
    }

    pub(super) fn turned_away(turned_away: TurnedAway<O::Future, S::Error>, shared: Arc<Shared<L>>) -> Self {
        Self { state: State::turned_away(turned_away), shared }
    }
}

impl<S, L, B, O> State<S, L, B, O>
where
    S: Service<Request<B>>,
    L: Limiter,
    O: Overflow<S, B>,
{
    fn turned_away(turned_away: TurnedAway<O::Future, S::Error>) -> Self {
        match turned_away {
            TurnedAway::Refused(response) => Self::Refused { response: Some(Ok(response)) },
            TurnedAway::Overflowing(response, decided) => Self::Overflowing { response, decided },
            TurnedAway::Failed(error) => Self::Refused { response: Some(Err(error)) },
        }
    }
}

impl<S, L, B, C, O> Future for ResponseFuture<S, L, B, O>
where
    S: Service<Request<B>, Response = Response<C>> + Clone,
    L: Limiter,
    C: http_body::Body,
    O: Overflow<S, B>,
{
    type Output = Result<Response<Body<C>>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        loop {
            match this.state.as_mut().project() {
                StateProjection::Passing { response, decided, copies } => {
                    let response = ready!(response.poll(cx))?;
                    let copies = copies.take();
                    if decided.is_late() {
                        return Poll::Ready(Ok(this.shared.finish_late(response, decided, copies.as_deref())));
                    }
                    // In its last form at once, and what was decided is left where it is: both are large.
                    let mut response = response.map(Body::inner);
                    if let Some(copies) = copies {
                        this.shared.refund_refused(decided, &copies);
                    }
                    this.shared.finish(&mut response, decided);
                    return Poll::Ready(Ok(response));
                }
                StateProjection::Deciding { waiting } => {
                    let waiting = waiting.as_mut().project();
                    let mut answer = ready!(waiting.answer.poll(cx));
                    // There until the answer came, and then this state is left.
                    let Some(InFlight { mut charges, mut ready, request, overflow }) = waiting.asked.take() else {
                        return Poll::Pending;
                    };
                    let mut decided = this.shared.decide(&mut charges, &mut answer);
                    if let Some(place) = this.shared.place_to_wait(&mut decided) {
                        // What was ready is let go.
                        let delayed = this.shared.delay(ready.clone(), request, decided, place);
                        this.state.set(State::Delayed { delayed });
                    } else if decided.passes() {
                        let (response, copies) = this.shared.pass(&mut ready, request, &mut decided);
                        this.state.set(State::Passing { response, decided, copies });
                    } else {
                        let (parts, body) = request.into_parts();
                        let turned_away = this.shared.turn_away(parts, body, decided, &overflow, cx);
                        this.state.set(State::turned_away(turned_away));
                    }
                }
                StateProjection::Delayed { delayed } => {
                    ready!(delayed.poll_departure(cx));
                    ready!(delayed.service.poll_ready(cx))?;
                    // There until it departs, and then this state is left.
                    let Some(request) = delayed.request.take() else { return Poll::Pending };
                    let mut decided = std::mem::replace(&mut delayed.decided, Decided::nothing());
                    let (response, copies) = this.shared.pass(&mut delayed.service, request, &mut decided);
                    this.state.set(State::Passing { response, decided, copies });
                }
                StateProjection::Overflowing { response, decided } => {
                    let mut response = ready!(response.poll(cx)).map_err(Into::into)?;
                    this.shared.finish_overflow(&mut response, decided);
                    return Poll::Ready(Ok(response.map(Body::inner)));
                }
                StateProjection::Refused { response } => {
                    // Polled again after it was ready, a future may do anything; this one stays silent.
                    return response
                        .take()
                        .map_or(Poll::Pending, |response| Poll::Ready(Ok(response?.map(Body::refusal))));
                }
            }
        }
    }
}

impl<S, L, B, O> fmt::Debug for ResponseFuture<S, L, B, O>
where
    S: Service<Request<B>>,
    L: Limiter,
    O: Overflow<S, B>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &self.state {
            State::Passing { .. } => "passing",
            State::Deciding { .. } => "deciding",
            State::Delayed { .. } => "delayed",
            State::Overflowing { .. } => "overflowing",
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
