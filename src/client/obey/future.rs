//! The future of a request.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http::{Request, Response};
use pin_project_lite::pin_project;
use tower_service::Service;

use super::error::ObeyError;
use super::visit::{LaterAnswer, OwnDecision, Visit};
use crate::base::sync::polled_again;
use crate::clock::Sleep;
use crate::error::BoxError;
use crate::limiter::Reply;

pin_project! {
    /// The future of an [`Obey`](super::Obey).
    #[must_use = "futures do nothing unless polled"]
    pub struct ObeyFuture<S, B>
    where
        S: Service<Request<B>>,
    {
        #[pin]
        state: CallState<S, B, S::Future>,
    }
}

pin_project! {
    #[project = StateProjection]
    enum CallState<S, B, F> {
        Failed { error: Option<ObeyError> },
        Waiting { waiting: Box<WaitingRequest<S, B>> },
        Calling { #[pin] future: F, visit: Option<Visit> },
    }
}

impl<S: Service<Request<B>>, B> ObeyFuture<S, B> {
    pub(super) fn failed(error: ObeyError) -> Self {
        Self { state: CallState::Failed { error: Some(error) } }
    }

    pub(super) fn waiting(waiting: Box<WaitingRequest<S, B>>) -> Self {
        Self { state: CallState::Waiting { waiting } }
    }

    pub(super) fn calling(future: S::Future, visit: Option<Visit>) -> Self {
        Self { state: CallState::Calling { future, visit } }
    }
}

impl<S, B, R> Future for ObeyFuture<S, B>
where
    S: Service<Request<B>, Response = Response<R>, Error: Into<BoxError>> + Clone,
{
    type Output = Result<Response<R>, BoxError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        loop {
            match state.as_mut().project() {
                StateProjection::Failed { error } => {
                    return error.take().map_or_else(polled_again, |error| Poll::Ready(Err(error.into())));
                }
                StateProjection::Waiting { waiting } => match ready!(waiting.poll(cx)) {
                    Ok(Some((future, visit))) => state.set(CallState::Calling { future, visit: Some(visit) }),
                    Ok(None) => return polled_again(),
                    Err(error) => {
                        state.set(CallState::Failed { error: None });
                        return Poll::Ready(Err(error));
                    }
                },
                StateProjection::Calling { future, visit } => {
                    let response = ready!(future.poll(cx));
                    let visit = visit.take();
                    if let (Ok(response), Some(visit)) = (&response, visit) {
                        visit.hear(response);
                    }
                    return Poll::Ready(response.map_err(Into::into));
                }
            }
        }
    }
}

impl<S: Service<Request<B>>, B> fmt::Debug for ObeyFuture<S, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObeyFuture").finish_non_exhaustive()
    }
}

/// The future of the called service, with the visit of its request. `None` if an earlier poll already
/// returned the future.
type Gone<F> = Option<(F, Visit)>;

/// The next step of a waiting request.
pub(super) enum WaitStep {
    /// The request waits in the line.
    Line,
    /// The request waits for an answer of the limiter of the client's own quotas.
    Own(LaterAnswer),
    /// The request waits until the service is ready.
    Ready,
}

impl WaitStep {
    /// Returns the next step of a request that has left the line and may be sent.
    pub(super) fn after_line(visit: &mut Visit, now_us: u64) -> Result<Self, ObeyError> {
        while let Some(reply) = visit.ask() {
            match reply {
                Reply::Now(answer) => {
                    if !visit.answered(answer, now_us)? {
                        return Ok(Self::Line);
                    }
                }
                Reply::Later(answer) => return Ok(Self::Own(answer)),
            }
        }
        Ok(if visit.waits_for_departure(now_us) { Self::Line } else { Self::Ready })
    }

    /// Returns the next step of a request after the limiter of the client's own quotas has answered.
    fn after_own(visit: &mut Visit, answer: OwnDecision, now_us: u64) -> Result<Self, ObeyError> {
        if visit.answered(answer, now_us)? { Self::after_line(visit, now_us) } else { Ok(Self::Line) }
    }
}

/// A request that waits. A waiting request holds a clone of the service, which is not made ready before
/// the request may be sent.
pub(super) struct WaitingRequest<S, B> {
    service: S,
    /// The request and its visit. `None` after the request was sent.
    held: Option<(Request<B>, Visit)>,
    step: WaitStep,
    /// The instant until which the request sleeps, in microseconds of the timer, and the sleep.
    sleep: Option<(u64, Sleep)>,
}

impl<S, B, R> WaitingRequest<S, B>
where
    S: Service<Request<B>, Response = Response<R>, Error: Into<BoxError>> + Clone,
{
    pub(super) fn new(service: S, request: Request<B>, visit: Visit, step: WaitStep) -> Box<Self> {
        Box::new(Self { service, held: Some((request, visit)), step, sleep: None })
    }

    /// Returns the future of the called service after the request was sent. Is pending until then.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Gone<S::Future>, BoxError>> {
        loop {
            let Some((_, visit)) = &mut self.held else { return Poll::Ready(Ok(None)) };
            self.step = match &mut self.step {
                WaitStep::Line => {
                    ready!(poll_line(visit, &mut self.sleep, cx))?;
                    let now_us = visit.settings().now_us();
                    WaitStep::after_line(visit, now_us)?
                }
                WaitStep::Own(answer) => {
                    let answer = ready!(answer.as_mut().poll(cx));
                    let now_us = visit.settings().now_us();
                    WaitStep::after_own(visit, answer, now_us)?
                }
                WaitStep::Ready => {
                    ready!(self.service.poll_ready(cx)).map_err(Into::into)?;
                    let now_us = visit.settings().now_us();
                    if visit.go(now_us) {
                        let gone = self.held.take();
                        return Poll::Ready(Ok(gone.map(|(request, visit)| (self.service.call(request), visit))));
                    }
                    // The readiness goes back.
                    self.service = self.service.clone();
                    WaitStep::Line
                }
            };
        }
    }
}

/// Is ready when the request may leave the line.
fn poll_line(visit: &mut Visit, sleep: &mut Option<(u64, Sleep)>, cx: &mut Context<'_>) -> Poll<Result<(), ObeyError>> {
    let mut now_us = visit.settings().now_us();
    while let Some(until_us) = visit.poll(now_us, cx.waker())? {
        if sleep.as_ref().is_none_or(|(set_us, _)| *set_us != until_us) {
            *sleep = Some((until_us, visit.settings().timer.sleep_until(Duration::from_micros(until_us))));
        }
        let Some((_, sleeping)) = sleep else { break };
        ready!(sleeping.as_mut().poll(cx));
        *sleep = None;
        // The sleep has ended, so the time is now at least `until_us`, even if the timer's clock is wrong and shows
        // less. With the time that the clock shows, the request could poll forever.
        now_us = visit.settings().now_us().max(until_us);
    }
    *sleep = None;
    Poll::Ready(Ok(()))
}
