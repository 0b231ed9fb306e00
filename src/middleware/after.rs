//! What a rule does after the response: whether a request stays charged, and what it cost in the end.

use std::fmt;
use std::sync::Arc;

use http::response::Parts;

use super::rule::{IntoRule, Rule};
use crate::policy::Policy;

type ReadResponse<T> = Arc<dyn Fn(&Parts) -> T + Send + Sync>;

/// What a rule does after the response. Nothing, for most.
#[derive(Clone, Default)]
pub(super) struct After {
    /// Whether the request stays charged.
    pub(super) keeps: Option<ReadResponse<bool>>,
    /// What it cost, as the response's head tells.
    pub(super) by_response: Option<ReadResponse<Option<u64>>>,
    /// A [`Bill`](super::Bill) tells what it cost.
    pub(super) by_bill: bool,
    /// The bytes of the response's body are counted.
    pub(super) by_body: bool,
    pub(super) on_aborted: OnAborted,
}

impl After {
    pub(super) fn is_nothing(&self) -> bool {
        self.keeps.is_none() && !self.is_settled()
    }

    /// The cost at the beginning is a reservation.
    pub(super) fn is_settled(&self) -> bool {
        self.by_response.is_some() || self.is_open()
    }

    /// What it cost is known only when the response's body has ended.
    pub(super) fn is_open(&self) -> bool {
        self.by_bill || self.by_body
    }
}

impl fmt::Debug for After {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("After")
            .field("by_outcome", &self.keeps.is_some())
            .field("by_response", &self.by_response.is_some())
            .field("by_bill", &self.by_bill)
            .field("by_body", &self.by_body)
            .field("on_aborted", &self.on_aborted)
            .finish()
    }
}

/// What an aborted request costs. See [`Rule::on_aborted`].
///
/// | when the request was aborted | `Keep` | `Refund` |
/// |---|---|---|
/// | nothing was said or counted | its reservation | nothing |
/// | a [`Bill`](super::Bill) said less than was reserved, or fewer bytes were sent | its reservation | what was said or sent |
/// | a `Bill` said more than was reserved, or more bytes were sent | what was said or sent | what was said or sent |
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OnAborted {
    /// At least its reservation. The default: a client that disconnects early gets nothing back.
    #[default]
    Keep,
    /// What was known of its cost when it was aborted; the rest is refunded.
    ///
    /// With this a client can have work done for free: it disconnects before the handler says what the work cost. Use it
    /// where the `Bill` is told of each cost as soon as it arises.
    Refund,
}

impl Rule {
    /// Keeps the charge of a request only if `predicate` holds for its response; else it is given back. So only failed
    /// logins count, say.
    ///
    /// The charge is taken before the service is called, so requests that run at the same time cannot slip through while
    /// their outcome is unknown: of a quota of 5, no more than 5 are in flight. The header fields of a response tell what is
    /// left after the charge was given back. What a [meter](Self::overage) was charged instead is given back too. A remote limiter is not asked again for that: `remaining` is reckoned, and the
    /// window stays that of the charge.
    ///
    /// The predicate sees the response's head: status, header fields, extensions. Of a gRPC response, `grpc-status` is
    /// there only if the call failed before its first message; otherwise it comes after the body, and is not seen.
    ///
    /// What is called more than once, or together with [`give_back_when`](Self::give_back_when), must all agree that the
    /// charge stays.
    ///
    /// ```
    /// use tower_ratelimit::{MemoryLimiter, Policy, Quota, RateLimitLayer, key};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let failed = Policy::new("failed-logins", Quota::per_hour(5))?.charge_when(|response| response.status == 401);
    /// let layer = RateLimitLayer::new(MemoryLimiter::new(), failed, key::peer_ip());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn charge_when(mut self, predicate: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        self.after.keeps = Some(match self.after.keeps.take() {
            None => Arc::new(predicate),
            Some(earlier) => Arc::new(move |response: &Parts| earlier(response) && predicate(response)),
        });
        self
    }

    /// Gives the charge of a request back if `predicate` holds for its response: one of a server's error, say. See
    /// [`charge_when`](Self::charge_when), of which it is the opposite.
    ///
    /// ```
    /// use tower_ratelimit::{Policy, Quota};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let api = Policy::new("api", Quota::per_minute(100))?.give_back_when(|response| response.status.is_server_error());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn give_back_when(self, predicate: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        self.charge_when(move |response| !predicate(response))
    }

    /// Takes the cost as a reservation, and settles it by what handlers say that the request cost: each request that
    /// passes has a [`Bill`](super::Bill) in its extensions for that. For tokens of a language model, rows, seconds.
    ///
    /// It is settled once, when the response's body has ended or was dropped. What was reserved too much is given back, as
    /// far as the receipt still holds it: what was taken from a window that is over is not given to the next one. What was
    /// reserved too little is taken then, whatever is left, into debt, so that later requests wait for it. How far that
    /// goes, [`Quota::max_debt`](crate::Quota::max_debt) says: what is beyond is not remembered.
    ///
    /// If nothing was said, the request stays charged with its reservation. A request that is aborted costs at least its
    /// reservation, see [`on_aborted`](Self::on_aborted). A response to `HEAD` ends with its head and is no abort: what was
    /// said until then is all that it costs. So do not serve `HEAD` by a handler that says its cost bit by bit while it
    /// sends the body.
    ///
    /// At least one unit is reserved, also if the [cost](Self::cost) is 0: a request passes only while a unit is left, and
    /// none passes in debt. To check now and bill later, reserve nothing more, and call `bill.set(0)` for a request that
    /// turned out to be free.
    ///
    /// Reserve about as much as a request usually costs, or the most it may cost: what is
    /// not reserved does not hold back requests that run at the same time. The body of a response that switches protocols, as
    /// for a WebSocket, ends at once, and so does what can be said.
    ///
    /// ```
    /// use tower_ratelimit::{Bill, MemoryLimiter, Policy, Quota, RateLimitLayer, key};
    ///
    /// // With axum: `Extension(bill): Extension<Bill>`
    /// async fn complete(bill: Bill) -> String {
    ///     let (answer, tokens) = ("Hello!".to_owned(), 12);
    ///     bill.set(tokens);
    ///     answer
    /// }
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let tokens = Policy::new("tokens", Quota::per_minute(100_000))?.cost(|_| 1_000).settle_by_bill();
    /// let layer = RateLimitLayer::new(MemoryLimiter::new(), tokens, key::header("x-api-key"));
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn settle_by_bill(mut self) -> Self {
        self.after.by_bill = true;
        self
    }

    /// Takes the cost as a reservation, and settles it by the response's head; `None` leaves it as it is. Otherwise as
    /// [`settle_by_bill`](Self::settle_by_bill); with both, the response's head replaces what was said before it.
    ///
    /// ```
    /// use tower_ratelimit::{Policy, Quota};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let rows = Policy::new("rows", Quota::per_minute(10_000))?
    ///     .cost(|_| 100)
    ///     .settle_by_response(|response| response.headers.get("x-rows")?.to_str().ok()?.parse().ok());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn settle_by_response(mut self, actual: impl Fn(&Parts) -> Option<u64> + Send + Sync + 'static) -> Self {
        self.after.by_response = Some(Arc::new(actual));
        self
    }

    /// Takes the cost as a reservation of bytes, and settles it by the bytes of the response's body, as they are handed to
    /// the server. Header fields and the protocol's own bytes do not count. The quota's [unit](Self::unit) is
    /// `content-bytes`, unless another one is stated. Otherwise as
    /// [`settle_by_bill`](Self::settle_by_bill), to whose units the bytes are added.
    ///
    /// * If the client disconnects in the middle, the request costs at least its reservation, see
    ///   [`on_aborted`](Self::on_aborted).
    /// * A response without a body costs no bytes: one to `HEAD`, 204, or 304.
    /// * A response that switches protocols (101 as for a WebSocket, or a success of `CONNECT`) stays charged with its
    ///   reservation: the layer does not see the bytes of the connection.
    ///
    /// ```
    /// use tower_ratelimit::{Policy, Quota};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let downloads = Policy::new("downloads", Quota::per_day(1 << 30))?.cost(|_| 64 << 10).settle_by_body();
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn settle_by_body(mut self) -> Self {
        self.after.by_body = true;
        self.in_content_bytes()
    }

    /// Sets what a request costs that is aborted: the client disconnects, the service panics, or it returns an error, before
    /// the response's head, or, where the cost is settled by a bill or by the body, before the body has ended.
    ///
    /// By default it costs at least what it reserved, [`OnAborted::Keep`]: if disconnecting refunded it, an attacker could
    /// retry logins, or start costly work, for ever. A request that never reached the service is always refunded.
    ///
    /// ```
    /// use tower_ratelimit::{OnAborted, Policy, Quota};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// // The handler adds each token to its `Bill` before it sends it.
    /// let tokens = Policy::new("tokens", Quota::per_minute(100_000))?
    ///     .cost(|_| 1_000)
    ///     .settle_by_bill()
    ///     .on_aborted(OnAborted::Refund);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn on_aborted(mut self, on_aborted: OnAborted) -> Self {
        self.after.on_aborted = on_aborted;
        self
    }
}

impl Policy {
    /// A rule that keeps the charge only if the response is so; see [`Rule::charge_when`].
    #[must_use]
    pub fn charge_when(self, predicate: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Rule {
        self.into_rule().charge_when(predicate)
    }

    /// A rule that gives the charge back if the response is so; see [`Rule::give_back_when`].
    #[must_use]
    pub fn give_back_when(self, predicate: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Rule {
        self.into_rule().give_back_when(predicate)
    }

    /// Returns a rule that is settled by what handlers say; see [`Rule::settle_by_bill`].
    #[must_use]
    pub fn settle_by_bill(self) -> Rule {
        self.into_rule().settle_by_bill()
    }

    /// Returns a rule that is settled by the response's head; see [`Rule::settle_by_response`].
    #[must_use]
    pub fn settle_by_response(self, actual: impl Fn(&Parts) -> Option<u64> + Send + Sync + 'static) -> Rule {
        self.into_rule().settle_by_response(actual)
    }

    /// Returns a rule that is settled by the bytes of the response's body; see [`Rule::settle_by_body`].
    #[must_use]
    pub fn settle_by_body(self) -> Rule {
        self.into_rule().settle_by_body()
    }

    /// Returns a rule with this cost of aborted requests; see [`Rule::on_aborted`].
    #[must_use]
    pub fn on_aborted(self, on_aborted: OnAborted) -> Rule {
        self.into_rule().on_aborted(on_aborted)
    }
}
