//! Builders for what a rule does after the response: keep or refund the charge, and settle the
//! cost.

use std::sync::Arc;

use http::response::Parts;

use super::definition::Rule;
use super::settlement::OnAborted;

impl Rule {
    /// Keeps the charge of a request only if `predicate` holds for its response, and otherwise
    /// refunds the charge. For example, a rule can count only failed logins.
    ///
    /// * The charge is taken before the service is called. So requests that run at the same time
    ///   cannot slip through while their outcome is unknown: with a quota of 5, at most 5 of them
    ///   are in flight.
    /// * While requests of a key are in flight in this process and may be refunded, a refusal by a
    ///   [block](crate::Quota::block) promises no wait. If these requests are refunded, the next
    ///   request passes at once.
    /// * The headers of the response report the units that remain after the refund. The layer does
    ///   not ask a remote limiter again for these units: the layer calculates `remaining`, and
    ///   reports the window of the charge.
    /// * If the request was counted by a [meter](Self::overage), the meter is refunded.
    /// * The predicate sees the response's head: status, headers, extensions. In a gRPC response
    ///   `grpc-status` is in the head only if the call failed before its first message. In other
    ///   cases `grpc-status` follows the body, and the predicate does not see it.
    /// * If this method is called several times, or together with
    ///   [`refund_when`](Self::refund_when), the charge is kept only if all predicates keep it.
    ///
    /// ```
    /// use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, Rule, key};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let failed = Rule::new("failed-logins", Quota::per_hour(5))?
    ///     .charge_when(|response| response.status == 401);
    /// let layer = RateLimitLayer::new(MemoryLimiter::new(), failed, key::peer_ip());
    /// # Ok(()) }
    /// ```
    pub fn charge_when(mut self, predicate: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        self.settlement.keeps = Some(match self.settlement.keeps.take() {
            None => Arc::new(predicate),
            Some(earlier) => Arc::new(move |response: &Parts| earlier(response) && predicate(response)),
        });
        self
    }

    /// Refunds the charge of a request if `predicate` holds for its response, for example for a
    /// server error. This method is the opposite of [`charge_when`](Self::charge_when).
    ///
    /// ```
    /// use tower_ratelimit::{Quota, Rule};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let api = Rule::new("api", Quota::per_minute(100))?
    ///     .refund_when(|response| response.status.is_server_error());
    /// # Ok(()) }
    /// ```
    pub fn refund_when(self, predicate: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        self.charge_when(move |response| !predicate(response))
    }

    /// Takes the cost as a reservation, and settles the charge according to the cost that handlers
    /// report through a [`Usage`](crate::middleware::Usage), for example in tokens, rows or
    /// seconds. Each request that passes has a `Usage` in its extensions.
    ///
    /// * The request is settled once, when the response's body has ended or was dropped.
    /// * If too much was reserved, the excess is refunded as far as the receipt still holds it.
    ///   Units of a window that has ended are not added to the next window.
    /// * If too little was reserved, the missing units are charged even if too few units remain. The key is then in
    ///   debt. Later requests wait until the debt has drained. Debt beyond
    ///   [`Quota::max_debt`](crate::Quota::max_debt) is forgotten.
    /// * If no cost is reported, the request stays charged with its reservation.
    /// * An aborted request costs at least its reservation; see [`on_aborted`](Self::on_aborted).
    /// * At least one unit is reserved, even if the [cost](Self::cost) is 0. So a request passes
    ///   only while a unit is left. To reserve only this unit, use a cost of 0, and call
    ///   `usage.set(0)` for a request that turned out to be free.
    /// * Reserve the usual or the largest cost. While a request runs, other requests see its
    ///   reservation, and no cost beyond it.
    /// * A response to `HEAD` ends with its head and is not aborted. The request then costs the
    ///   units that were reported until the head. So do not serve `HEAD` with a handler that
    ///   reports its cost while it sends the body.
    /// * If the response switches protocols, for example to a WebSocket, its body ends at once.
    ///   Later reports have no effect.
    ///
    /// ```
    /// use tower_ratelimit::{
    ///     MemoryLimiter, Quota, RateLimitLayer, Rule, key, middleware::Usage,
    /// };
    ///
    /// // With axum: `usage: Usage`
    /// async fn complete(usage: Usage) -> String {
    ///     let (answer, tokens) = ("Hello!".to_owned(), 12);
    ///     usage.set(tokens);
    ///     answer
    /// }
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let tokens =
    ///     Rule::new("tokens", Quota::per_minute(100_000))?.cost(|_| 1_000).settle_by_usage();
    /// let layer = RateLimitLayer::new(MemoryLimiter::new(), tokens, key::header("x-api-key"));
    /// # Ok(()) }
    /// ```
    pub fn settle_by_usage(mut self) -> Self {
        self.settlement.by_usage = true;
        self
    }

    /// Takes the cost as a reservation, and settles the charge according to the response's head. If
    /// `actual` returns `None`, the reservation stays.
    ///
    /// Otherwise it works like [`settle_by_usage`](Self::settle_by_usage). If a rule is also
    /// settled by usage, the cost from the response's head replaces the cost that was reported
    /// before.
    ///
    /// ```
    /// use tower_ratelimit::{Quota, Rule};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let rows =
    ///     Rule::new("rows", Quota::per_minute(10_000))?.cost(|_| 100).settle_by_response(
    ///         |response| response.headers.get("x-rows")?.to_str().ok()?.parse().ok(),
    ///     );
    /// # Ok(()) }
    /// ```
    pub fn settle_by_response(mut self, actual: impl Fn(&Parts) -> Option<u64> + Send + Sync + 'static) -> Self {
        self.settlement.by_response = Some(Arc::new(actual));
        self
    }

    /// Takes the cost as a reservation of bytes, and settles the charge according to the bytes of
    /// the response's body that were handed to the server. Headers and the protocol's own bytes do
    /// not count. The quota's [unit](Self::unit) is `content-bytes`, unless another unit is stated.
    ///
    /// Otherwise it works like [`settle_by_usage`](Self::settle_by_usage). If a rule is also
    /// settled by usage, the bytes are added to the reported units.
    ///
    /// * If the client disconnects early, the request costs at least its reservation; see
    ///   [`on_aborted`](Self::on_aborted).
    /// * A response without a body costs no bytes: a response to `HEAD`, a 204 or a 304.
    /// * A response that switches protocols (101, or a success of `CONNECT`) stays charged with its
    ///   reservation, because the layer does not see the bytes of the connection.
    ///
    /// ```
    /// use tower_ratelimit::{Quota, Rule};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let downloads =
    ///     Rule::new("downloads", Quota::per_day(1 << 30))?.cost(|_| 64 << 10).settle_by_body();
    /// # Ok(()) }
    /// ```
    pub fn settle_by_body(mut self) -> Self {
        self.settlement.by_body = true;
        self.in_content_bytes()
    }

    /// Sets the cost of an aborted request. A request is aborted if, before the response's head, the
    /// client disconnects, or the service panics or returns an error. If the cost is settled by usage
    /// or by the body, one of these events between the head and the end of the body aborts the
    /// request as well. This setting also works in a rule without any other settlement.
    ///
    /// By default an aborted request costs at least its reservation, [`OnAborted::Keep`]. If
    /// disconnecting refunded the charge, an attacker could retry logins or start costly work
    /// forever. A request that waited for its departure and never reached the service is always
    /// refunded. A request whose client leaves while Redis or another store decides is also
    /// refunded, as soon as the store has answered. If that answer is lost, the charge stays.
    ///
    /// ```
    /// use tower_ratelimit::{middleware::OnAborted, Quota, Rule};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// // The handler reports each token before it sends it.
    /// let tokens = Rule::new("tokens", Quota::per_minute(100_000))?
    ///     .cost(|_| 1_000)
    ///     .settle_by_usage()
    ///     .on_aborted(OnAborted::Refund);
    /// # Ok(()) }
    /// ```
    pub fn on_aborted(mut self, on_aborted: OnAborted) -> Self {
        self.settlement.on_aborted = on_aborted;
        self
    }

    /// Makes a request return its units of a [concurrency limit](crate::Quota::concurrent) when the head of its
    /// response has come. Without this setting, the request holds the units until the body has ended or was dropped, so
    /// that a stream counts as long as it lasts.
    ///
    /// With this setting, a slow reader of a large response holds no units, and a stream is no longer limited after it
    /// has begun. If a handler has taken a [`Place`](crate::limiter::Place), the place holds the units for longer.
    ///
    /// ```
    /// use tower_ratelimit::{Quota, Rule};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let reports = Rule::new("reports", Quota::concurrent(3))?.until_head();
    /// # Ok(()) }
    /// ```
    pub fn until_head(mut self) -> Self {
        self.until_head = true;
        self
    }
}
