//! Explains what a layer would do with a request.

use super::layer::RateLimitLayer;
use super::ticket::Ticket;
use crate::base::head::Head;
use crate::explanation::Explanation;
use crate::limiter::Limiter;

/// # Explanations
impl<L: Limiter, O> RateLimitLayer<L, O> {
    /// Explains what this layer would do with a request now, and takes nothing. The explanation says which rules
    /// apply, why other rules do not, the keys, the cost, the remaining units, and whether the request would pass.
    ///
    /// The request is handled like any other request, but the layer only asks the limiter, with
    /// [`peek`](Limiter::peek), what it would decide. So nothing is charged, no strike is counted, no request
    /// waits, and neither the [observer](Self::observer) nor the [setup warnings](crate::observe::SetupWarning) see
    /// the request. A limiter that fails may report the failure to its own observer.
    ///
    /// The explanation follows the quotas, and not the limiter's own state. So a limiter in memory that is
    /// [full](crate::limiter::memory) may refuse a request with a new key, although the explanation says that it
    /// passes. Units that a process has leased from Redis count as used.
    ///
    /// The program's own closures run as for any other request. The request needs everything that these closures
    /// read: the extensions that other middleware puts into requests, and the client's address, as a
    /// [`key::PeerAddr`](crate::key::PeerAddr).
    ///
    /// An explanation takes as long as deciding about a request, plus the time to write some text for each rule. Give
    /// only operators access to explanations, because they reveal the limits and the request's keys.
    ///
    /// ```
    /// use std::net::{IpAddr, Ipv4Addr};
    /// use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, Rule, key};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let client = Rule::new("client", Quota::per_minute(100))?;
    /// let post =
    ///     Rule::new("post", Quota::per_hour(5))?.when(|request| request.method == "POST");
    /// let layer = RateLimitLayer::new(MemoryLimiter::new(), client, key::peer_ip())
    ///     .and(post, key::peer_ip());
    ///
    /// let (mut request, ()) = http::Request::get("/posts").body(())?.into_parts();
    /// request.extensions.insert(key::PeerAddr::from(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1))));
    /// let explanation = layer.explain(&request).await;
    ///
    /// assert!(explanation.passes());
    /// assert_eq!(
    ///     explanation.to_string(),
    ///     "passes: allowed\n\
    ///      client: charges 1 to 192.0.2.1\n  \
    ///      100 per minute, token bucket: 99 of 100 left, all in 600ms\n\
    ///      post: does not apply: its condition does not hold"
    /// );
    /// # Ok(()) }
    /// ```
    pub fn explain<'a, H: Into<Head<'a>>>(
        &self,
        request: H,
    ) -> impl Future<Output = Explanation> + Send + use<'a, H, L, O> {
        let (layer, head) = (self.compiled(), request.into());
        async move { Ticket::new().look(&layer, &head).await }
    }
}
