//! Tickets whose charges stay open until the response has ended.

use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Buf;
use http::response::Parts;
use http::{HeaderMap, Method, StatusCode};
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use smallvec::SmallVec;

use super::nested::Copies;
use super::usage::Usage;
use crate::base::sync::contained;
use crate::limiter::Limiter;
use crate::middleware::compiled::Compiled;
use crate::middleware::diagnostics::Diagnostics;
use crate::middleware::pace::body::BodyPaces;
use crate::middleware::pace::source::paces;
use crate::middleware::rule::{OnAborted, PacedBodies};
use crate::middleware::ticket::Ticket;
use crate::middleware::unsettled::Strikes;
use crate::policy::Policy;

/// The ticket of a request whose response has not ended yet, and the layer that charged the
/// request.
///
/// If the ticket is dropped before the response's head has come, the request's charges are kept, because the service
/// may have done the work. There are two exceptions. A layer that refunds nested refusals refunds a request that an
/// inner limit has refused. A rule that settles its charges after the response follows its [`OnAborted`].
pub(crate) struct OpenTicket<L: Limiter> {
    pub(crate) layer: Arc<Compiled<L>>,
    pub(crate) ticket: Ticket,
    /// The copies of the request, if the layer refunds requests that inner limits refuse.
    pub(crate) copies: Option<Arc<Copies>>,
    /// The charges of each rule that settles later.
    pub(crate) open: SmallVec<[Open; 1]>,
    /// The index and the cost in units of each charge whose cost is known but not settled yet.
    to_settle: SmallVec<[(usize, u64); 1]>,
    /// The strikes that the response may refund.
    pub(super) strikes: Vec<Strikes>,
    pub(crate) response: SentResponse,
}

/// The charges of one rule that are not settled.
pub(crate) struct Open {
    /// The indices of the rule's charges among the charges of the request.
    pub(crate) charges: Range<usize>,
    /// The index of one of the rule's policies.
    pub(crate) policy: usize,
    /// The cost that was stated or counted so far.
    pub(crate) usage: Usage,
}

/// The part of a response that was sent. A request whose response is not whole was aborted.
#[derive(Default)]
pub(crate) struct SentResponse {
    pub(crate) method: Method,
    /// The number of bytes of the body that were handed to the server.
    sent: u64,
    /// The number of bytes of the whole body, or `None` if it is unknown.
    pub(crate) length: Option<u64>,
    pub(crate) is_whole: bool,
    /// True if the client gets no body, even if the server reads the service's body.
    pub(crate) is_bodiless: bool,
}

impl<L: Limiter> OpenTicket<L> {
    /// Makes an open ticket without charges.
    pub(crate) fn new(layer: &Arc<Compiled<L>>) -> Box<Self> {
        Box::new(Self {
            layer: Arc::clone(layer),
            ticket: Ticket::new(),
            copies: None,
            open: SmallVec::new(),
            to_settle: SmallVec::new(),
            strikes: Vec::new(),
            response: SentResponse::default(),
        })
    }

    /// Opens a ticket. Moves the ticket directly into its box, because each copy of words just written stalls on store
    /// forwarding (`benches/instructions`, "layer of a concurrency limit, no header fields").
    pub(crate) fn of(layer: &Arc<Compiled<L>>, ticket: &mut Ticket) -> Box<Self> {
        let mut open = Self::new(layer);
        open.ticket = ticket.take();
        open
    }

    /// Refunds all charges. After this, handlers can state no cost, and no charge is settled.
    fn refund_all(&mut self) {
        self.close();
        self.ticket.refund(&self.layer);
    }

    /// Refunds all charges, and updates the quotas that the response reports.
    pub(super) fn refund_and_report(&mut self) {
        self.close();
        self.ticket.refund_and_report(&self.layer);
    }

    fn close(&mut self) {
        self.copies = None;
        for open in self.open.drain(..) {
            open.usage.close();
        }
    }

    /// Settles the open charges at the end of the response. The response is complete only if all its bytes were
    /// counted.
    fn settle_rest(&mut self) {
        if self.copies.take().is_some_and(|copies| copies.are_refused()) {
            self.refund_all();
        }
        while let Some(open) = self.open.pop() {
            let on_aborted = self.layer.settlement(open.policy).map(|found| found.on_aborted).unwrap_or_default();
            let units = match (open.usage.close(), on_aborted) {
                (stated, _) if self.response.is_whole => stated,
                (stated, OnAborted::Keep) => stated.filter(|stated| *stated > open.usage.reserved()),
                (stated, OnAborted::Refund) => Some(stated.unwrap_or(0)),
            };
            self.owe(open.charges, units);
        }
        self.settle(false);
    }

    /// Notes that the response can no longer refund the strikes.
    pub(super) fn end_strikes(&mut self) {
        if let Some(unsettled) = &self.layer.unsettled {
            self.strikes.drain(..).for_each(|strikes| unsettled.remove(&strikes));
        }
    }

    /// Notes that each of these charges costs `units`. If `units` is `None`, the charges keep what they took.
    pub(super) fn owe(&mut self, charges: Range<usize>, units: Option<u64>) {
        if let Some(units) = units {
            self.to_settle.extend(charges.map(|at| (at, units)));
        }
    }

    /// Settles the charges whose cost is known. `is_reported` is true if the response still reports the charges.
    ///
    /// Settles one charge at a time, so that `drop` can settle the rest if the application's code panics.
    pub(super) fn settle(&mut self, is_reported: bool) {
        while let Some((at, units)) = self.to_settle.pop() {
            self.ticket.settle(&self.layer, at, units, is_reported);
        }
    }
}

impl<L: Limiter> Drop for OpenTicket<L> {
    fn drop(&mut self) {
        // The application's observer may panic about one charge; the others are settled anyway.
        while self.copies.is_some() || !self.open.is_empty() || !self.to_settle.is_empty() {
            contained(|| self.settle_rest());
        }
        // Ends the strikes only after the charges are returned. Otherwise a refusal in between would promise a wait
        // that depends on strikes that are about to be refunded.
        self.end_strikes();
    }
}

impl SentResponse {
    /// Counts bytes of the body that were handed to the server.
    fn count(&mut self, bytes: u64, is_last: bool) {
        self.sent = self.sent.saturating_add(bytes);
        // A server drops a body of known length as soon as the server has all bytes, without asking for the body's
        // end.
        self.is_whole |= is_last || self.length.is_some_and(|length| self.sent >= length);
    }

    /// Notes how many bytes of the body the server will read, or `None` if that is unknown.
    fn expect(&mut self, length: Option<u64>) {
        self.length = self.length.or(length);
        self.is_whole |= self.length == Some(0);
    }
}

/// An [`OpenTicket`] whose limiter's type is erased.
pub(crate) trait AnyTicket: Send + Sync {
    /// Settles the charges that the response's head decides, and adds the layer's headers to the head.
    fn finish_head(&mut self, head: &mut Parts);

    /// Returns whether the end of the body settles a charge or refunds units that the request
    /// holds.
    fn is_open(&self) -> bool;

    /// Returns the paces of the response's body, if it has any.
    fn response_paces(&self) -> Option<BodyPaces>;

    /// Notes how many bytes of the body the server will read, or `None` if that is unknown.
    fn expect(&mut self, length: Option<u64>);

    /// Counts bytes of the body that were handed to the server. `is_last` is true if the body reports that no bytes
    /// follow.
    fn count(&mut self, bytes: u64, is_last: bool);

    /// Settles the open charges at the end of the body. The body is complete only if all its bytes were counted.
    fn end(&mut self);

    /// Settles the open charges after the body, or the work of the handler, was completed.
    fn complete(&mut self);

    /// Refunds everything.
    fn refund(&mut self);

    /// Adds the headers of a response that passes.
    fn add_headers(&self, headers: &mut HeaderMap);

    /// Returns the diagnostics of the layer.
    fn diagnostics(&self) -> &Diagnostics;

    /// Returns a policy whose charge is settled later, if there is one.
    fn unsettled(&self) -> Option<&Policy>;
}

impl<L: Limiter> AnyTicket for OpenTicket<L> {
    fn finish_head(&mut self, head: &mut Parts) {
        self.see_head(head);
        self.ticket.finish(&self.layer, head);
    }

    fn is_open(&self) -> bool {
        !self.open.is_empty() || self.ticket.places.is_some()
    }

    fn response_paces(&self) -> Option<BodyPaces> {
        let paced = self.ticket.paced.get().filter(|_| !self.response.is_bodiless)?;
        Some(paces(&self.layer, paced, PacedBodies::Responses)).filter(|paces| !paces.is_empty())
    }

    fn expect(&mut self, length: Option<u64>) {
        self.response.expect(length);
    }

    fn count(&mut self, bytes: u64, is_last: bool) {
        if !self.response.is_bodiless {
            let counts = |open: &&Open| self.layer.settlement(open.policy).is_some_and(|found| found.by_body);
            for open in self.open.iter().filter(counts) {
                open.usage.add(bytes);
            }
        }
        self.response.count(bytes, is_last);
        if self.response.is_whole {
            // Refunds the held units before the end of the body, because a client that has all bytes may send its
            // next request before the server asks for the end.
            self.ticket.places = None;
        }
    }

    fn end(&mut self) {
        self.ticket.places = None;
        self.settle_rest();
    }

    fn complete(&mut self) {
        self.response.is_whole = true;
        self.ticket.places = None;
        self.settle_rest();
    }

    fn refund(&mut self) {
        self.refund_all();
    }

    fn add_headers(&self, headers: &mut HeaderMap) {
        self.ticket.add_headers(&self.layer, headers, StatusCode::OK);
    }

    fn diagnostics(&self) -> &Diagnostics {
        &self.layer.diagnostics
    }

    fn unsettled(&self) -> Option<&Policy> {
        self.layer.policy(self.open.first()?.policy)
    }
}

pin_project! {
    /// The inner service's body. When the body ends or is dropped, the charges of the request are
    /// settled.
    pub(crate) struct SettledBody<B> {
        #[pin]
        body: B,
        ticket: Box<dyn AnyTicket>,
    }
}

impl<B: Body> SettledBody<B> {
    pub(crate) fn new(body: B, mut ticket: Box<dyn AnyTicket>) -> Self {
        ticket.expect(body.size_hint().exact());
        Self { body, ticket }
    }
}

impl<B: Body> Body for SettledBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let mut this = self.project();
        let frame = ready!(this.body.as_mut().poll_frame(cx));
        match &frame {
            Some(Ok(frame)) => {
                // Servers do not poll a body again after its trailers.
                let is_last = frame.is_trailers() || this.body.is_end_stream();
                this.ticket.count(frame.data_ref().map_or(0, Buf::remaining) as u64, is_last); // no wider than 64 bits
            }
            // Ends the ticket here and not when the body is dropped, because a server may keep a failed body for
            // longer.
            Some(Err(_)) => this.ticket.end(),
            None => this.ticket.complete(),
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
