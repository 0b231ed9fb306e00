//! The future of a response: what `call` decided, polled to its end.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::request::Parts;
use http::{Request, Response};
use pin_project_lite::pin_project;
use tower_service::Service;

use super::body::ResponseBody;
use super::compiled::Compiled;
use super::decide::delay::Delayed;
use super::decide::overflow::{NoOverflow, Overflow};
use super::respond::headers::Rendered;
use super::settle::nested::NestedToken;
use super::settle::pending::{AnyTicket, Metered, OpenTicket};
use super::ticket::Ticket;
use crate::decision::Decision;
use crate::limiter::Limiter;
use crate::outcome::{Outcome, OutcomeKind};

pin_project! {
    /// The future of a [`RateLimit`](super::RateLimit)'s response.
    ///
    /// If it is dropped before it is ready, it keeps what its request took once the service was called: the service may
    /// have done all the work. A request that still waited for its departure is refunded. Rules that settle may say
    /// otherwise, see [`Rule::on_aborted`](crate::Rule::on_aborted).
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
        Passing { #[pin] response: S::Future, after: After<L> },
        // Boxed: limiters that answer at once would else carry room for it in each future.
        Deciding { deciding: Pin<Box<Deciding<S, L, B, O>>> },
        // Until it departs.
        Delayed { delayed: Box<Delayed<S, B, L>> },
        Overflowing { #[pin] response: O::Future, ticket: Box<OpenTicket<L>> },
        // A refusal, or the error of an overflow that is broken.
        Refused { response: Option<Result<S::Response, S::Error>> },
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
        layer: Arc<Compiled<L>>,
        held: Option<(Request<B>, Ticket)>,
    }

    impl<S, L, B, O> PinnedDrop for Deciding<S, L, B, O>
    where
        L: Limiter,
    {
        fn drop(this: Pin<&mut Self>) {
            let this = this.project();
            if let Some((request, mut ticket)) = this.held.take() {
                ticket.report_dropped(this.layer, &request.into_parts().0);
            }
        }
    }
}

/// The work that is left when the service has answered. Nothing that a usual request charged is copied into its future.
enum After<L: Limiter> {
    Nothing,
    /// The headers are rendered. They are added as the layer is configured.
    Headers(Rendered, Arc<Compiled<L>>),
    /// The outcome is reported with the response, or charges are open.
    Open(Box<OpenTicket<L>>),
}

impl<S, L, B, C, O> ResponseFuture<S, L, B, O>
where
    S: Service<Request<B>, Response = Response<C>> + Clone,
    L: Limiter,
    C: ResponseBody,
    O: Overflow<S, B>,
{
    /// Creates the future of a request that the limiter answers later.
    pub(super) fn deciding(
        answer: L::Future<Decision>,
        ready: S,
        layer: &Arc<Compiled<L>>,
        request: Request<B>,
        ticket: Ticket,
        overflow: O,
    ) -> Self {
        let (layer, held) = (Arc::clone(layer), Some((request, ticket)));
        let deciding = Box::pin(Deciding { answer, ready, overflow, layer, held });
        Self { state: State::Deciding { deciding } }
    }

    /// Lets a request pass, wait, go to the overflow, or be refused. `inner` is ready; unless it is called, a clone
    /// takes its place, so that what it holds while it is ready (a permit, say) is released.
    #[inline(never)]
    pub(super) fn decided(
        inner: &mut S,
        layer: &Arc<Compiled<L>>,
        parts: Parts,
        body: B,
        ticket: &mut Ticket,
        overflow: &O,
        cx: &mut Context<'_>,
    ) -> Self {
        if let Some(place) = ticket.place_to_wait(layer) {
            *inner = inner.clone();
            let request = Request::from_parts(parts, body);
            Self {
                state: State::Delayed { delayed: Delayed::new(inner.clone(), layer, request, ticket.take(), place) },
            }
        } else if !ticket.kind.passed() {
            *inner = inner.clone();
            Self::turned_away(layer, parts, body, ticket, overflow, cx)
        } else {
            Self::prepared(inner, layer, parts, body, ticket)
        }
    }

    /// Creates the future of a request that passes, and of which nothing but its headers is reported.
    #[inline(always)]
    pub(super) fn passing(response: S::Future, layer: &Arc<Compiled<L>>, rendered: Option<Rendered>) -> Self {
        Self { state: State::Passing { response, after: After::headers(layer, rendered) } }
    }

    /// Reports a request that passes, lets it carry on what the service, its handlers and inner layers need, and calls
    /// the service. The ticket is kept if it is needed when the response has come.
    #[inline(never)]
    fn prepared(inner: &mut S, layer: &Arc<Compiled<L>>, mut parts: Parts, body: B, ticket: &mut Ticket) -> Self {
        let mut open = layer.needs_response(ticket.kind).then(|| OpenTicket::new(layer, ticket.take()));
        // Before the observer, which is the application's code and may panic: what is open is then settled as aborted.
        if let Some(open) = &mut open {
            open.open(parts.method.clone(), &mut parts.extensions);
        }
        let ticket = open.as_ref().map_or(&*ticket, |open| &open.ticket);
        if let Some(outcome) = ticket.report(layer, &parts) {
            // A request that an outer layer degraded stays degraded, also if this layer allows it.
            let is_degraded = parts.extensions.get().is_some_and(|outer: &Outcome| outer.kind().is_always_exposed());
            if ticket.kind.is_always_exposed() || !is_degraded {
                parts.extensions.insert(outcome);
            }
        }
        if layer.diagnostics.looks() {
            ticket.look_for_double_charge(layer, &mut parts.extensions);
            ticket.look_for_never(layer);
        }
        let after = match open {
            Some(mut open) => {
                open.copies = layer.settings.refund_nested.then(|| NestedToken::put(&mut parts.extensions));
                After::Open(open)
            }
            None => After::headers(layer, ticket.render(layer)),
        };
        Self { state: State::Passing { response: inner.call(Request::from_parts(parts, body)), after } }
    }

    /// Sends a request that does not pass to the overflow if that is ready now, else refuses it.
    #[inline(never)]
    fn turned_away(
        layer: &Arc<Compiled<L>>,
        mut parts: Parts,
        body: B,
        ticket: &mut Ticket,
        overflow: &O,
        cx: &mut Context<'_>,
    ) -> Self {
        let ready = match ticket.kind {
            OutcomeKind::Limited => overflow.ready(cx),
            _ => Poll::Pending,
        };
        let Poll::Ready(ready) = ready else {
            return Self {
                state: State::Refused { response: Some(Ok(ticket.refuse(layer, &mut parts, C::from_body))) },
            };
        };
        ticket.kind = OutcomeKind::Overflowed;
        if let Some(outcome) = ticket.report(layer, &parts) {
            parts.extensions.insert(outcome);
        }
        let state = match ready {
            Ok(ready) => {
                let ticket = OpenTicket::new(layer, ticket.take());
                State::Overflowing { response: ready.call(Request::from_parts(parts, body)), ticket }
            }
            Err(error) => State::Refused { response: Some(Err(error.into())) },
        };
        Self { state }
    }
}

impl<L: Limiter> After<L> {
    #[inline]
    fn headers(layer: &Arc<Compiled<L>>, rendered: Option<Rendered>) -> Self {
        rendered.map_or(Self::Nothing, |rendered| Self::Headers(rendered, Arc::clone(layer)))
    }

    /// Finishes the response, if it is there. It is changed in place, because each move of a response stalls on store
    /// forwarding (`benches/instructions.rs`).
    #[inline]
    fn finish<C: ResponseBody, E>(
        &mut self,
        mut answered: Poll<Result<Response<C>, E>>,
    ) -> Poll<Result<Response<C>, E>> {
        if let Poll::Ready(Ok(response)) = &mut answered {
            match self {
                Self::Nothing => {}
                Self::Headers(rendered, layer) => {
                    let status = response.status();
                    layer.headers.add(rendered, response.headers_mut(), status);
                }
                Self::Open(_) => answered = answered.map_ok(|response| self.finish_open(response)),
            }
        }
        answered
    }

    /// Finishes a response that carries the outcome or on which charges depend.
    #[inline(never)]
    fn finish_open<C: ResponseBody>(&mut self, response: Response<C>) -> Response<C> {
        let Self::Open(open) = std::mem::replace(self, Self::Nothing) else { return response };
        finish(open, response)
    }
}

/// Finishes a response: settles what its head settles and adds headers. What depends on its body too is settled when
/// that ends.
pub(super) fn finish<C: ResponseBody>(mut ticket: Box<dyn AnyTicket>, response: Response<C>) -> Response<C> {
    let (parts, body) = response.into_parts();
    let head = ticket.finish_head(Response::from_parts(parts, ()));
    if !ticket.is_open() {
        return head.map(|()| body);
    }
    // A server drops a body that has ended without polling it.
    if body.is_end_stream() {
        ticket.complete();
        return head.map(|()| body);
    }
    head.map(|()| C::from_body(Metered::new(body, ticket)))
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
                StateProjection::Passing { response, after } => {
                    return after.finish(response.poll(cx));
                }
                StateProjection::Deciding { deciding } => {
                    let deciding = deciding.as_mut().project();
                    let mut answer = ready!(deciding.answer.poll(cx));
                    // It is held until the answer has come, and then this state ends.
                    let Some((request, mut ticket)) = deciding.held.take() else { return Poll::Pending };
                    let layer = &*deciding.layer;
                    ticket.answer(layer, &mut answer);
                    let (parts, body) = request.into_parts();
                    let (inner, overflow) = (deciding.ready, &*deciding.overflow);
                    let decided = Self::decided(inner, layer, parts, body, &mut ticket, overflow, cx);
                    this.state.set(decided.state);
                }
                StateProjection::Delayed { delayed } => {
                    ready!(delayed.poll_departure(cx));
                    ready!(delayed.service.poll_ready(cx))?;
                    // It is held until it departs, and then this state ends.
                    let Some((request, mut ticket)) = delayed.depart() else { return Poll::Pending };
                    let Delayed { service, layer, .. } = &mut **delayed;
                    let (parts, body) = request.into_parts();
                    let passing = Self::prepared(service, layer, parts, body, &mut ticket);
                    this.state.set(passing.state);
                }
                StateProjection::Overflowing { response, ticket } => {
                    let mut response = ready!(response.poll(cx)).map_err(Into::into)?;
                    ticket.ticket.finish_overflow(&ticket.layer, &mut response);
                    return Poll::Ready(Ok(response.map(C::from_body)));
                }
                StateProjection::Refused { response } => {
                    // A future that is polled again after it was ready may do anything; this one stays pending.
                    return response.take().map_or(Poll::Pending, Poll::Ready);
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
    use crate::limiter::memory::limiter::MemoryLimiter;

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
    fn future_holds_no_request_and_no_charge() {
        let own = size_of::<ResponseFuture<Inner, MemoryLimiter, [u8; 4_096]>>();
        let inner = size_of::<<Inner as Service<Request<[u8; 4_096]>>>::Future>();
        assert!(own <= inner + 128, "{own} bytes around an inner future of {inner}");
    }
}
