//! A rule's corrections after the response, as data on which `settle` acts.

use std::sync::Arc;

use http::response::Parts;

/// A closure of the application over a response's head.
pub(crate) type ReadResponse<T> = Arc<dyn Fn(&Parts) -> T + Send + Sync>;

/// A rule's corrections after the response. Most rules have none.
#[derive(Clone, Default)]
pub(crate) struct Settlement {
    /// Whether the request stays charged.
    pub(crate) keeps: Option<ReadResponse<bool>>,
    /// Returns the cost that the response's head states.
    pub(crate) by_response: Option<ReadResponse<Option<u64>>>,
    /// A [`Usage`](crate::middleware::Usage) states the cost.
    pub(crate) by_usage: bool,
    /// The cost is the bytes of the response's body.
    pub(crate) by_body: bool,
    pub(crate) on_aborted: OnAborted,
}

impl Settlement {
    pub(crate) fn is_none(&self) -> bool {
        !self.reads_response() && self.on_aborted == OnAborted::Keep
    }

    /// Returns whether the response may change the cost.
    pub(crate) fn reads_response(&self) -> bool {
        self.keeps.is_some() || self.replaces_cost()
    }

    /// Returns whether the cost that is charged first is a reservation.
    pub(crate) fn replaces_cost(&self) -> bool {
        self.by_response.is_some() || self.waits_for_body()
    }

    /// Returns whether the cost is known only when the response's body has ended.
    pub(crate) fn waits_for_body(&self) -> bool {
        self.by_usage || self.by_body
    }
}

/// The cost of an aborted request; see [`Rule::on_aborted`](crate::Rule::on_aborted).
///
/// | when the request was aborted | `Keep` | `Refund` |
/// |---|---|---|
/// | nothing was stated or counted | its reservation | nothing |
/// | a [`Usage`](crate::middleware::Usage) stated less than was reserved, or fewer bytes were sent | its reservation | what was stated or sent |
/// | a `Usage` stated more than was reserved, or more bytes were sent | what was stated or sent | what was stated or sent |
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OnAborted {
    /// The request costs at least its reservation. This is the default, so that disconnecting early
    /// saves nothing.
    #[default]
    Keep,
    /// The request costs the units that were known when it was aborted. The rest is refunded.
    ///
    /// A client can then get work for free by disconnecting before the handler states the cost. Use
    /// this variant only if the handler states each cost as soon as it arises.
    Refund,
}
