//! The future of a response, which carries out what `call` decided.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::{Request, Response};
use http_body::Body;
use pin_project_lite::pin_project;
use tower_service::Service;

use super::body::ResponseBody;
use super::compiled::Compiled;
use super::decide::delay::{Counted, Delayed, InLine};
use super::decide::kind::OutcomeCause;
use super::decide::overflow::{NoOverflow, Overflow};
use super::decide::step::NextStep;
use super::discard::Discarding;
use super::pace::body::PacedBody;
use super::pace::request::pace_request;
use super::settle::in_flight::InFlight;
use super::settle::nested::NestedToken;
use super::settle::pending::{AnyTicket, OpenTicket, SettledBody};
use super::ticket::Ticket;
use crate::base::head::Head;
use crate::base::sync::polled_again;
use crate::decision::Decision;
use crate::headers::DueHeaders;
use crate::limiter::Limiter;
use crate::outcome::Outcome;

pin_project! {
    /// The future of a [`RateLimit`](super::RateLimit)'s response.
    ///
    /// If the future is dropped after the service was called, the request stays charged, because the service may have
    /// done all the work. Rules that settle charges may say otherwise; see
    /// [`Rule::on_aborted`](crate::Rule::on_aborted). A request that still waited for its departure is refunded.
    #[must_use = "futures do nothing unless polled"]
    pub struct ResponseFuture<S, L, B, O = NoOverflow>
    where
        S: Service<Request<B>>,
        L: Limiter,
        O: Overflow<S, B>,
    {
        #[pin]
        pub(super) state: ResponseState<S, L, B, O>,
    }
}

pin_project! {
    // The variants say how far the request is, and what is left to do.
    #[project = ProjectedState]
    pub(super) enum ResponseState<S, L, B, O>
    where
        S: Service<Request<B>>,
        L: Limiter,
        O: Overflow<S, B>,
    {
        Passing { #[pin] response: S::Future, on_response: OnResponse<L> },
        // `Deciding` is boxed, because every future would otherwise reserve room for it, even with limiters that
        // answer at once.
        Deciding { deciding: Pin<Box<Deciding<S, L, B, O>>> },
        // The request waits here in line until the limiter admits it or its wait ends.
        InLine { line: Box<Line<S, L, B, O>> },
        // The request waits here until it departs.
        Delayed { delayed: Box<Delayed<S, B, L>> },
        Overflowing { #[pin] response: O::Future, ticket: Box<OpenTicket<L>> },
        // A refusal that is returned after the rest of the request's body was read.
        Discarding { discarding: Pin<Box<Discarding<B, S::Response>>> },
        // The response is a refusal, or the error of an overflow service. `None` after the response was returned.
        Refused { response: Option<Result<S::Response, S::Error>> },
    }
}

pin_project! {
    // Waits for the limiter's answer.
    pub(super) struct Deciding<S, L, B, O>
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
                ticket.report_dropped(this.layer, &Head::from(&request));
            }
        }
    }
}

/// A request that may wait in line, and the services that may get the request.
pub(super) struct Line<S, L: Limiter, B, O> {
    in_line: Box<InLine<B, L>>,
    layer: Arc<Compiled<L>>,
    service: S,
    overflow: O,
}

/// The steps after the service's response. The future of a usual request has no copy of its charges.
pub(super) enum OnResponse<L: Limiter> {
    Nothing,
    /// These headers are added, according to the layer's configuration.
    AddHeaders(DueHeaders, Arc<Compiled<L>>),
    /// The response carries the outcome, or settles charges.
    Finish(Box<OpenTicket<L>>),
}

impl<S, L, B, C, O> ResponseState<S, L, B, O>
where
    S: Service<Request<B>, Response = Response<C>> + Clone,
    L: Limiter,
    B: Body + 'static,
    C: ResponseBody,
    O: Overflow<S, B>,
{
    /// Takes the next step of a request that the limiter has answered. `inner` is ready. If `call` itself decides a
    /// request, `call` also takes the step. So the request is not moved in between, which would stall on store
    /// forwarding.
    #[inline(never)]
    fn take_step(
        step: NextStep<L::Future<Decision>>,
        inner: &mut S,
        layer: &Arc<Compiled<L>>,
        mut request: Request<B>,
        ticket: &mut Ticket,
        overflow: &O,
        cx: &mut Context<'_>,
    ) -> Self {
        match step {
            NextStep::PassWithoutTicket(headers) => {
                let on_response = OnResponse::add_headers_if_any(layer, headers);
                Self::Passing { response: inner.call(request), on_response }
            }
            NextStep::Pass => {
                let on_response = OnResponse::prepare(layer, &mut request, ticket);
                Self::Passing { response: inner.call(request), on_response }
            }
            NextStep::AwaitAnswer(answer) => Self::deciding(answer, inner, layer, request, ticket.take(), overflow),
            NextStep::WaitInLine => Self::in_line(inner, layer, request, ticket.take(), overflow),
            NextStep::WaitForDeparture(place) => Self::delayed(inner, layer, request, ticket.take(), place),
            NextStep::TurnAway => Self::turned_away(inner, layer, request, ticket, overflow, cx),
        }
    }

    /// Returns the state of a request that the limiter answers later. `inner` is ready, and the state takes
    /// it.
    #[inline(never)]
    pub(super) fn deciding(
        answer: L::Future<Decision>,
        inner: &mut S,
        layer: &Arc<Compiled<L>>,
        request: Request<B>,
        ticket: Ticket,
        overflow: &O,
    ) -> Self {
        let next = inner.clone();
        let (ready, overflow) = (std::mem::replace(inner, next), overflow.clone());
        let (layer, held) = (Arc::clone(layer), Some((request, ticket)));
        let deciding = Box::pin(Deciding { answer, ready, overflow, layer, held });
        Self::Deciding { deciding }
    }

    /// Returns the state of a request that may wait in line. `inner` is ready, and is released as in
    /// [`delayed`](Self::delayed).
    #[inline(never)]
    pub(super) fn in_line(
        inner: &mut S,
        layer: &Arc<Compiled<L>>,
        request: Request<B>,
        ticket: Ticket,
        overflow: &O,
    ) -> Self {
        *inner = inner.clone();
        let (in_line, layer) = (InLine::new(layer, request, ticket), Arc::clone(layer));
        let line = Line { in_line, layer, service: inner.clone(), overflow: overflow.clone() };
        Self::InLine { line: Box::new(line) }
    }

    /// Returns the state of a request that waits for its departure. `inner` is ready. Replaces `inner` by a
    /// clone. This releases everything that the ready service holds, such as a permit.
    #[inline(never)]
    pub(super) fn delayed(
        inner: &mut S,
        layer: &Arc<Compiled<L>>,
        request: Request<B>,
        ticket: Ticket,
        place: Counted,
    ) -> Self {
        *inner = inner.clone();
        Self::Delayed { delayed: Delayed::new(inner.clone(), layer, request, ticket, place) }
    }

    /// Handles a request that does not pass. If the overflow is ready now, the request is sent to the overflow,
    /// and otherwise it is refused. `inner` is released as in [`delayed`](Self::delayed).
    #[inline(never)]
    pub(super) fn turned_away(
        inner: &mut S,
        layer: &Arc<Compiled<L>>,
        mut request: Request<B>,
        ticket: &mut Ticket,
        overflow: &O,
        cx: &mut Context<'_>,
    ) -> Self {
        *inner = inner.clone();
        let ready = if ticket.kind.may_overflow() { overflow.ready(cx) } else { Poll::Pending };
        let Poll::Ready(ready) = ready else {
            let discard = layer.responses.discard.as_ref().filter(|discard| discard.reads(&request));
            let (mut parts, body) = request.into_parts();
            let response = ticket.refuse(layer, &mut parts, C::from_body);
            return match discard {
                Some(discard) => Self::Discarding { discarding: Discarding::new(discard, body, response) },
                None => Self::Refused { response: Some(Ok(response)) },
            };
        };
        ticket.decide(layer, OutcomeCause::Overflow);
        if let Some(outcome) = ticket.report(layer, &Head::from(&request)) {
            request.extensions_mut().insert(outcome);
        }
        match ready {
            Ok(ready) => {
                pace_request(layer, &mut request, ticket);
                let ticket = OpenTicket::of(layer, ticket);
                Self::Overflowing { response: ready.call(request), ticket }
            }
            Err(error) => Self::Refused { response: Some(Err(error.into())) },
        }
    }
}

impl<L: Limiter> OnResponse<L> {
    fn add_headers_if_any(layer: &Arc<Compiled<L>>, headers: Option<DueHeaders>) -> Self {
        headers.map_or(Self::Nothing, |headers| Self::AddHeaders(headers, Arc::clone(layer)))
    }

    /// Reports a request that passes, and puts into its extensions the values that the service, its handlers and
    /// inner layers need. The ticket is kept if the response needs it.
    #[inline(never)]
    pub(super) fn prepare<B: Body + 'static>(
        layer: &Arc<Compiled<L>>,
        request: &mut Request<B>,
        ticket: &mut Ticket,
    ) -> Self {
        pace_request(layer, request, ticket);
        let is_open = layer.needs_response(ticket.kind) || ticket.places.is_some();
        let mut open = is_open.then(|| OpenTicket::of(layer, ticket));
        // Stores the open ticket before the observer is called, so that the ticket is settled as aborted if the
        // observer panics.
        if let Some(open) = &mut open {
            open.open(request.method().clone(), request.extensions_mut());
        }
        let ticket = open.as_ref().map_or(&*ticket, |open| &open.ticket);
        // A request that brings a rate gets no handle here, because the shorter path that such requests usually take
        // makes no handle either.
        if ticket.may_hold(layer) {
            InFlight::put(request.extensions_mut(), ticket.places.as_ref());
        }
        if let Some(outcome) = ticket.report(layer, &Head::from(&*request)) {
            let extensions = request.extensions_mut();
            // A request that an outer layer degraded stays degraded, even if this layer allows it.
            let is_degraded = extensions.get().is_some_and(|outer: &Outcome| outer.kind().is_always_exposed());
            if ticket.kind.is_always_exposed() || !is_degraded {
                extensions.insert(outcome);
            }
        }
        if layer.diagnostics.looks() {
            ticket.look_for_double_charge(layer, request.extensions_mut());
            ticket.look_for_never(layer);
        }
        match open {
            Some(mut open) => {
                open.copies = layer.settings.refund_nested.then(|| NestedToken::put(request.extensions_mut()));
                Self::Finish(open)
            }
            None => Self::add_headers_if_any(layer, ticket.due_headers(layer)),
        }
    }

    /// Adds headers to the response, if the response has come.
    #[inline]
    fn add_headers<C, E>(&mut self, answered: &mut Poll<Result<Response<C>, E>>) {
        match (answered, &mut *self) {
            (Poll::Ready(Ok(response)), Self::AddHeaders(due, layer)) => {
                let status = response.status();
                layer.responses.headers.add_due(due, &layer.policies, response.headers_mut(), status);
            }
            (Poll::Ready(Err(_)), _) => *self = Self::Nothing, // the caller may keep the future
            _ => {}
        }
    }

    /// Finishes a response of any kind, if it has come. The response may carry the outcome, and
    /// charges may depend on it.
    fn finish<C: ResponseBody, E>(
        &mut self,
        mut answered: Poll<Result<Response<C>, E>>,
    ) -> Poll<Result<Response<C>, E>> {
        if answered.is_ready() {
            if let Self::Finish(_) = self {
                let Self::Finish(open) = std::mem::replace(self, Self::Nothing) else { return answered };
                return answered.map_ok(|response| finish(open, response));
            }
        }
        self.add_headers(&mut answered);
        answered
    }
}

/// Finishes a response: settles the charges that depend on its head only, and adds headers. Charges that also depend on
/// its body are settled when the body ends.
pub(super) fn finish<C: ResponseBody>(mut ticket: Box<dyn AnyTicket>, response: Response<C>) -> Response<C> {
    let (mut head, mut body) = response.into_parts();
    ticket.finish_head(&mut head);
    // A server drops a body that has ended, and does not poll it.
    if body.is_end_stream() {
        if ticket.is_open() {
            ticket.complete();
        }
        return Response::from_parts(head, body);
    }
    if let Some(paces) = ticket.response_paces() {
        body = C::from_body(PacedBody::new(body, paces));
    }
    if ticket.is_open() {
        body = C::from_body(SettledBody::new(body, ticket)); // what is settled is what passed
    }
    Response::from_parts(head, body)
}

impl<S, L, B, C, O> Future for ResponseFuture<S, L, B, O>
where
    S: Service<Request<B>, Response = Response<C>> + Clone,
    L: Limiter,
    B: Body + 'static,
    C: ResponseBody,
    O: Overflow<S, B>,
{
    type Output = Result<Response<C>, S::Error>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        // The response of a usual request is written once and changed in place, because each move of a response
        // stalls on store forwarding (`benches/instructions`, "layer, allowed, no header fields").
        if let ProjectedState::Passing { response, on_response } = self.as_mut().project().state.project() {
            match on_response {
                OnResponse::Nothing => return response.poll(cx),
                OnResponse::AddHeaders(..) => {
                    let mut answered = response.poll(cx);
                    on_response.add_headers(&mut answered);
                    return answered;
                }
                OnResponse::Finish(_) => {}
            }
        }
        self.poll_any(cx)
    }
}

impl<S, L, B, C, O> ResponseFuture<S, L, B, O>
where
    S: Service<Request<B>, Response = Response<C>> + Clone,
    L: Limiter,
    B: Body + 'static,
    C: ResponseBody,
    O: Overflow<S, B>,
{
    /// Polls a future in any state. This method is not inlined, so that the usual request runs
    /// through little code.
    #[inline(never)]
    fn poll_any(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<Response<C>, S::Error>> {
        let mut this = self.project();
        loop {
            match this.state.as_mut().project() {
                ProjectedState::Passing { response, on_response } => {
                    return on_response.finish(response.poll(cx));
                }
                ProjectedState::Deciding { deciding } => {
                    let deciding = deciding.as_mut().project();
                    let mut answer = ready!(deciding.answer.poll(cx));
                    // `held` has the ticket until the answer arrives, which ends this state.
                    let Some((request, mut ticket)) = deciding.held.take() else { return polled_again() };
                    let layer = &*deciding.layer;
                    ticket.answer(layer, &mut answer);
                    let step = ticket.next_step(layer);
                    let (ready, overflow) = (deciding.ready, deciding.overflow);
                    let next = ResponseState::take_step(step, ready, layer, request, &mut ticket, overflow, cx);
                    this.state.set(next);
                }
                ProjectedState::InLine { line } => {
                    ready!(line.in_line.poll_decision(cx));
                    // `in_line` has the ticket until the request is decided, which ends this state.
                    let Some((request, mut ticket)) = line.in_line.take() else { return polled_again() };
                    let Line { layer, service, overflow, .. } = &mut **line;
                    let next = match ticket.step_out_of_line(layer) {
                        // The service is not ready.
                        NextStep::Pass => ResponseState::Delayed {
                            delayed: Delayed::admitted(service.clone(), layer, request, ticket),
                        },
                        step => ResponseState::take_step(step, service, layer, request, &mut ticket, overflow, cx),
                    };
                    this.state.set(next);
                }
                ProjectedState::Delayed { delayed } => {
                    ready!(delayed.poll_departure(cx));
                    if let Err(error) = ready!(delayed.service.poll_ready(cx)) {
                        this.state.set(ResponseState::Refused { response: None }); // the caller may keep the future
                        return Poll::Ready(Err(error));
                    }
                    // `delayed` has the ticket until the request departs, which ends this state.
                    let Some((mut request, mut ticket)) = delayed.depart() else { return polled_again() };
                    let Delayed { service, layer, .. } = &mut **delayed;
                    let on_response = OnResponse::prepare(layer, &mut request, &mut ticket);
                    let response = service.call(request);
                    this.state.set(ResponseState::Passing { response, on_response });
                }
                ProjectedState::Overflowing { response, ticket } => {
                    let mut response = ready!(response.poll(cx)).map_err(Into::into)?;
                    ticket.ticket.finish_overflow(&ticket.layer, &mut response);
                    return Poll::Ready(Ok(response.map(C::from_body)));
                }
                ProjectedState::Discarding { discarding } => {
                    let response = ready!(discarding.as_mut().poll_response(cx));
                    return response.map_or_else(polled_again, |response| Poll::Ready(Ok(response)));
                }
                ProjectedState::Refused { response } => {
                    return response.take().map_or_else(polled_again, Poll::Ready);
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
            ResponseState::Passing { .. } => "passing",
            ResponseState::Deciding { .. } => "deciding",
            ResponseState::InLine { .. } => "in line",
            ResponseState::Delayed { .. } => "delayed",
            ResponseState::Overflowing { .. } => "overflowing",
            ResponseState::Discarding { .. } => "discarding",
            ResponseState::Refused { .. } => "refused",
        };
        f.debug_struct("ResponseFuture").field("state", &state).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::memory::limiter::MemoryLimiter;
    use http_body::Frame;

    #[derive(Clone)]
    struct Inner;

    #[expect(dead_code, reason = "only its size matters")]
    struct Large([u8; 4_096]);

    impl Body for Large {
        type Data = bytes::Bytes;
        type Error = std::convert::Infallible;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
            Poll::Ready(None)
        }
    }

    impl Service<Request<Large>> for Inner {
        type Response = Response<()>;
        type Error = std::convert::Infallible;
        type Future = std::future::Ready<Result<Response<()>, Self::Error>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: Request<Large>) -> Self::Future {
            std::future::ready(Ok(Response::new(())))
        }
    }

    #[test]
    fn future_holds_no_request_and_no_charge() {
        let own = size_of::<ResponseFuture<Inner, MemoryLimiter, Large>>();
        let inner = size_of::<<Inner as Service<Request<Large>>>::Future>();
        assert!(own <= inner + 128, "{own} bytes around an inner future of {inner}");
    }
}
