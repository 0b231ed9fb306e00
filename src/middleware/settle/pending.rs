//! The charges of a request that are open until its response has come. Data: the ticket acts on it.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use http::Method;
use smallvec::SmallVec;

use super::nested::Copies;
use super::usage::Item;

/// The open parts of a request.
#[derive(Default)]
pub(crate) struct Pending {
    /// The copies of the request, if the layer refunds what limits within refuse.
    pub(crate) copies: Option<Arc<Copies>>,
    /// The rules that settle their charges later.
    pub(crate) open: SmallVec<[Open; 1]>,
    pub(crate) response: Progress,
}

/// The charges of one rule that are not settled.
pub(crate) struct Open {
    /// Their places among the request's charges.
    pub(crate) charges: Range<usize>,
    /// One of the rule's policies.
    pub(crate) policy: usize,
    /// Where the cost is stated or counted, if the rule replaces the cost.
    pub(crate) item: Option<Arc<Item>>,
}

/// How much of a response was sent. A request whose response is not whole was aborted.
#[derive(Default)]
pub(crate) struct Progress {
    pub(crate) method: Method,
    /// Bytes of the body that were handed to the server.
    sent: u64,
    /// Bytes of the whole body, as far as known.
    pub(crate) length: Option<u64>,
    pub(crate) is_whole: bool,
}

impl Pending {
    /// Forgets what is open: nothing can be stated any more, and nothing is settled.
    pub(crate) fn close(&mut self) {
        self.copies = None;
        for open in self.open.drain(..) {
            open.close();
        }
    }
}

impl Open {
    /// Returns what was stated or counted. Nothing can be from now on.
    pub(crate) fn close(&self) -> Option<u64> {
        self.item.as_ref().and_then(|item| item.close())
    }

    pub(crate) fn add(&self, units: u64) {
        if let Some(item) = &self.item {
            item.add(units);
        }
    }

    pub(crate) fn reserved(&self) -> u64 {
        self.item.as_ref().map_or(0, |item| item.reserved())
    }
}

impl Progress {
    /// Counts bytes of the body that were handed to the server.
    pub(crate) fn count(&mut self, bytes: u64, is_last: bool) {
        self.sent = self.sent.saturating_add(bytes);
        // A server drops a body of known length as soon as it has all bytes, and does not ask for its end.
        self.is_whole |= is_last || self.length.is_some_and(|length| self.sent >= length);
    }

    /// Notes how many bytes the server will ask for, if that is known.
    pub(crate) fn expect(&mut self, length: Option<u64>) {
        self.length = self.length.or(length);
        self.is_whole |= self.length == Some(0);
    }
}

/// A ticket whose limiter's type is erased: what a response's body and a handler's admission hold.
pub(crate) trait OpenTicket: fmt::Debug + Send + Sync {
    /// Counts bytes of the body that were handed to the server. `is_last` if the body says that no more will come.
    fn count(&mut self, bytes: u64, is_last: bool);

    /// Settles what is open: the response, or the handler's work, is complete.
    fn complete(&mut self);

    /// Settles what is open: the response ends here, and is not complete unless all its bytes were counted.
    fn end(&mut self);

    /// Refunds everything.
    fn refund(&mut self);
}
