//! The future of a response: what `call` decided, polled to its end.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use http::{Request, Response};
use pin_project_lite::pin_project;
use tower_service::Service;

use super::body::{Metered, RefusalBody, ResponseBody};
use super::decide::delay::Delayed;
use super::decide::overflow::{NoOverflow, Overflow};
use super::settle::nested::NestedToken;
use super::settle::pending::OpenTicket;
use super::ticket::Ticket;
use crate::decision::Decision;
use crate::limiter::Limiter;
use crate::outcome::{Outcome, OutcomeKind};

pin_project! {
    /// The future of a [`RateLimit`](super::RateLimit)'s response.
    ///
    /// If it is dropped before it is ready, it keeps what its request took once the service was called: the service may have
    /// done all the work. A request that still waited for its departure is refunded. Rules that settle may say otherwise, see
    /// [`Rule::on_aborted`](crate::Rule::on_aborted).
    #[must_use = "futures do nothing unless polled"]
    pub struct ResponseFuture<S, L, B, O = NoOverflow>
    where
        S: Service<Request<B>>,
        L: Limiter,
        O: Overflow<S, B>,
    {
        #[pin]
        state: State<S, L, B, O>,
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
        // The ticket is there until the response has come.
        Passing { #[pin] response: S::Future, ticket: Option<Ticket<L>> },
        // Boxed: limiters that answer at once would else carry room for it in each future.
        Deciding { deciding: Pin<Box<Deciding<S, L, B, O>>> },
        // Until it departs.
        Delayed { delayed: Box<Delayed<S, B, L>> },
        Overflowing { #[pin] response: O::Future, ticket: Ticket<L> },
        // A refusal, or the error of an overflow that is broken.
        Refused { response: Option<Result<Response<RefusalBody>, S::Error>> },
    }
}

pin_project! {
    // Waits for the limiter's answer.
    struct Deciding<S, L, B, O>
    where
        L: Limiter,
    {
        #[pin]
        answer: L::Future<Decision>,
        ready: S,
        overflow: O,
        held: Option<(Request<B>, Ticket<L>)>,
    }
}

impl<S, L, B, O> ResponseFuture<S, L, B, O>
where
    S: Service<Request<B>>,
    L: Limiter,
    O: Overflow<S, B>,
{
    pub(super) fn deciding(
        answer: L::Future<Decision>,
        ready: S,
        request: Request<B>,
        ticket: Ticket<L>,
        overflow: O,
    ) -> Self {
        let deciding = Box::pin(Deciding { answer, ready, overflow, held: Some((request, ticket)) });
        Self { state: State::Deciding { deciding } }
    }
}

impl<S, L, B, O> ResponseFuture<S, L, B, O>
where
    S: Service<Request<B>> + Clone,
    L: Limiter,
    O: Overflow<S, B>,
{
    /// Creates the future of a request that was decided.
    #[inline]
    pub(super) fn decided(
        inner: &mut S,
        request: Request<B>,
        ticket: Ticket<L>,
        overflow: &O,
        cx: &mut Context<'_>,
    ) -> Self {
        Self { state: State::decided(inner, request, ticket, overflow, cx) }
    }
}

impl<S, L, B, O> State<S, L, B, O>
where
    S: Service<Request<B>> + Clone,
    L: Limiter,
    O: Overflow<S, B>,
{
    /// Lets a request pass, wait, go to the overflow, or be refused. `inner` is ready; unless it is called, a clone takes its
    /// place, so that what it holds while it is ready (a permit, say) is released.
    #[inline]
    fn decided(inner: &mut S, request: Request<B>, mut ticket: Ticket<L>, overflow: &O, cx: &mut Context<'_>) -> Self {
        if let Some(place) = ticket.place_to_wait() {
            *inner = inner.clone();
            Self::Delayed { delayed: Delayed::new(inner.clone(), request, ticket, place) }
        } else if ticket.kind.passed() {
            Self::passing(inner, request, ticket)
        } else {
            *inner = inner.clone();
            Self::turned_away(request, ticket, overflow, cx)
        }
    }

    /// Calls the service.
    #[inline]
    fn passing(inner: &mut S, mut request: Request<B>, mut ticket: Ticket<L>) -> Self {
        if ticket.needs_request() {
            request = prepared(request, &mut ticket);
        }
        Self::Passing { response: inner.call(request), ticket: Some(ticket) }
    }

    /// Sends a request that does not pass to the overflow if that is ready now, else refuses it.
    #[inline(never)]
    fn turned_away(request: Request<B>, mut ticket: Ticket<L>, overflow: &O, cx: &mut Context<'_>) -> Self {
        let (mut parts, body) = request.into_parts();
        let ready = match ticket.kind {
            OutcomeKind::Limited => overflow.ready(cx),
            _ => Poll::Pending,
        };
        let Poll::Ready(ready) = ready else {
            return Self::Refused { response: Some(Ok(ticket.refuse(&mut parts))) };
        };
        ticket.kind = OutcomeKind::Overflowed;
        if let Some(outcome) = ticket.report(&parts) {
            parts.extensions.insert(outcome);
        }
        match ready {
            Ok(ready) => Self::Overflowing { response: ready.call(Request::from_parts(parts, body)), ticket },
            Err(error) => Self::Refused { response: Some(Err(error.into())) },
        }
    }
}

impl<L: Limiter> Ticket<L> {
    /// Whether anything is done with a request before the service is called: it is reported or carries something on.
    #[inline]
    fn needs_request(&self) -> bool {
        self.layer.prepares || self.kind.is_told() || self.layer.diagnostics.looks()
    }
}

/// Reports a request that passes, and lets it carry on what the service, its handlers and inner layers need.
#[inline(never)]
fn prepared<B, L: Limiter>(request: Request<B>, ticket: &mut Ticket<L>) -> Request<B> {
    let (mut parts, body) = request.into_parts();
    // Before the observer, which is the application's code and may panic: what is open is then settled as aborted.
    ticket.open(parts.method.clone(), &mut parts.extensions);
    if let Some(outcome) = ticket.report(&parts) {
        // A request that an outer layer degraded stays degraded, also if this layer allows it.
        let is_degraded = parts.extensions.get().is_some_and(|outer: &Outcome| outer.kind().is_told());
        if ticket.kind.is_told() || !is_degraded {
            parts.extensions.insert(outcome);
        }
    }
    if ticket.layer.diagnostics.looks() {
        ticket.look_for_double_charge(&mut parts.extensions);
    }
    if ticket.layer.settings.refund_nested {
        ticket.pending.get_or_insert_default().copies = Some(NestedToken::put(&mut parts.extensions));
    }
    Request::from_parts(parts, body)
}

impl<S, L, B, C, O> Future for ResponseFuture<S, L, B, O>
where
    S: Service<Request<B>, Response = Response<C>> + Clone,
    L: Limiter,
    C: ResponseBody,
    O: Overflow<S, B>,
{
    type Output = Result<Response<C>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        loop {
            match this.state.as_mut().project() {
                StateProjection::Passing { response, ticket } => {
                    let mut response = ready!(response.poll(cx))?;
                    return Poll::Ready(Ok(match ticket {
                        Some(open) if open.pending.is_some() => finished_open(response, ticket),
                        Some(ticket) => {
                            ticket.finish(&mut response);
                            response
                        }
                        None => response,
                    }));
                }
                StateProjection::Deciding { deciding } => {
                    let deciding = deciding.as_mut().project();
                    let answer = ready!(deciding.answer.poll(cx));
                    // It is held until the answer has come, and then this state ends.
                    let Some((request, mut ticket)) = deciding.held.take() else { return Poll::Pending };
                    ticket.answer(answer);
                    let state = State::decided(deciding.ready, request, ticket, deciding.overflow, cx);
                    this.state.set(state);
                }
                StateProjection::Delayed { delayed } => {
                    ready!(delayed.poll_departure(cx));
                    ready!(delayed.service.poll_ready(cx))?;
                    // It is held until it departs, and then this state ends.
                    let Some((request, ticket)) = delayed.depart() else { return Poll::Pending };
                    let state = State::passing(&mut delayed.service, request, ticket);
                    this.state.set(state);
                }
                StateProjection::Overflowing { response, ticket } => {
                    let mut response = ready!(response.poll(cx)).map_err(Into::into)?;
                    ticket.finish_overflow(&mut response);
                    return Poll::Ready(Ok(response.map(C::from_body)));
                }
                StateProjection::Refused { response } => {
                    // A future that is polled again after it was ready may do anything; this one stays pending.
                    return response
                        .take()
                        .map_or(Poll::Pending, |response| Poll::Ready(Ok(response?.map(C::from_body))));
                }
            }
        }
    }
}

/// Finishes a response on which charges depend. What depends on its body too is settled when that ends.
#[inline(never)]
fn finished_open<C: ResponseBody, L: Limiter>(response: Response<C>, held: &mut Option<Ticket<L>>) -> Response<C> {
    let (parts, body) = response.into_parts();
    if let Some(ticket) = held {
        ticket.see_head(&parts);
    }
    let mut response = Response::from_parts(parts, ());
    if let Some(ticket) = held {
        ticket.finish(&mut response);
    }
    match held.take() {
        // A server drops a body that has ended without polling it.
        Some(mut ticket) if body.is_end_stream() => {
            ticket.complete();
            response.map(|()| body)
        }
        Some(mut ticket) if ticket.pending.is_some() => {
            if let Some(pending) = &mut ticket.pending {
                pending.response.expect(body.size_hint().exact());
            }
            response.map(|()| C::from_body(Metered::new(body, ticket)))
        }
        _ => response.map(|()| body),
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
