//! The configuration of the headers that report quotas.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use http::HeaderName;
use http::header::RETRY_AFTER;

use crate::base::fields::List;
use crate::base::header_names::{
    ANTHROPIC, DRAFT_LIMIT, DRAFT_REMAINING, DRAFT_RESET, GRPC_STATUS, OPENAI, RATE_LIMIT, RATE_LIMIT_POLICY,
    RETRY_AFTER_MS, X_LIMIT, X_REMAINING, X_RESET, X_RESOURCE, X_USED, are_of_one_family,
};
use crate::clock::Clock;
use crate::error::ConfigError;
use crate::key::Key;
use crate::policy::{CONCURRENT_REQUESTS, Policy};

use super::content::{Content, Header, Single};
use super::legacy::LegacyHeaders;
use super::reset::{ResetEncoding, ResetMeaning};
use super::scope::{Scope, ScopeCondition};
use super::wait::{Jitter, Waits};

/// Chooses the headers that report quotas to clients, and when they are sent. By default, every
/// response to a request to which a rule applied, except redirects, gets the headers of [draft
/// 11](Self::draft_11). Refusals get `Retry-After`.
///
/// ```
/// use tower_ratelimit::{middleware::{ResetEncoding, When}, Headers};
///
/// // The draft's headers and the older ones together, only when little remains.
/// let headers = Headers::draft_11()
///     .and(Headers::x_rate_limit(ResetEncoding::EpochSeconds))
///     .send(When::NearExhaustion { percent: 20 });
/// # assert_eq!(headers.names().len(), 10);
/// ```
///
/// # How quotas are reported
///
/// * Remaining units are rounded down, and times are rounded up. A policy that refused is reported
///   with nothing remaining.
/// * `Retry-After` is in whole seconds, at least 1: the longest wait of the policies that refused.
///   `Retry-After` is absent if the request can never pass, because a cost is above its policy's
///   capacity. `Retry-After` is also absent if no wait is known, as for a limit of [requests in
///   flight](crate::Quota::concurrent).
/// * Redirects (3xx) carry only `Retry-After`, because the other headers could keep a client from
///   following them.
/// * Headers that a response already has, from an inner layer or a handler, are merged. Headers that
///   describe one quota always come from one source:
///   * Lists are extended. If both sources have an item for a policy, `RateLimit` and
///     `RateLimit-Policy` get the items of the source with fewer remaining units.
///   * Single-valued headers of the response stay if their `remaining` is at most the layer's. If their
///     `remaining` is higher or cannot be read, the layer's headers replace all headers of the response
///     that describe the same quota, such as `X-RateLimit-Used` next to `X-RateLimit-Limit`. Headers of
///     another family stay, such as `X-RateLimit-Limit-Tokens`.
///   * The later `Retry-After` stays.
///   * A value that cannot be read is replaced, because clients would ignore the value or the whole
///     header.
/// * In browsers, scripts see these headers, including `Retry-After`, only if
///   `Access-Control-Expose-Headers` names them. Pass [`names`](Self::names) to tower-http's
///   `CorsLayer::expose_headers`.
#[derive(Clone, Debug)]
pub struct Headers {
    pub(super) formats: Vec<Format>,
    pub(super) retry_after: bool,
    /// Whether the wait is also sent in milliseconds if `retry_after` is sent.
    pub(super) retry_after_ms: bool,
    pub(super) waits: Waits,
    pub(super) partition: Option<PartitionKey>,
    /// The clock for dates. If the clock is `None`, dates follow the calendar time of the operating
    /// system.
    pub(super) clock: Option<Arc<dyn Clock>>,
}

/// Says when the headers are sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum When {
    /// Never.
    Never,
    /// When the request is refused.
    OnRefusal,
    /// When the request is refused, or when a policy that the headers report has at most `percent` of its limit
    /// left.
    NearExhaustion {
        /// Percent of the limit.
        percent: u8,
    },
    /// With every response to a request to which a policy applied.
    #[default]
    Always,
}

impl Headers {
    /// Sends `RateLimit-Policy: "default";q=100;w=60` and `RateLimit: "default";r=99;t=60`, as in
    /// draft-ietf-httpapi-ratelimit-headers-11 (May 2026; the same on the wire since revision 08),
    /// and `Retry-After`.
    ///
    /// * `q` is the capacity, and `w` the seconds in which the capacity refills. So the `q` of a token
    ///   bucket is its burst, and the `w` of a [block](crate::guide::blocks_and_meters#blocks) is its length.
    /// * `t` is the effective window, within which a client may use at most `r` units. `t` is not the
    ///   time until the quota is full again.
    /// * If the capacity refills within less than a second, `q` is the number of requests that pass in one
    ///   second: 50 per second with burst 10 is `q=50;w=1`.
    /// * If the capacity refills within less than half a second, `r` is the number of requests that pass in
    ///   the next second if they are spread evenly. For example, `r=49;t=1` is sent after a request against
    ///   `Quota::gcra` of 50 per second. If a client sends all `r` requests at once, most of them are
    ///   refused. But an `r` of 0 would stop an obedient client for a second after each request, so that it
    ///   would send only 1 of 50.
    /// * Two parameters of this crate are more exact than whole seconds. `tower-ms` is `t` in milliseconds.
    ///   `tower-r` is the number of units that can pass at this instant, if these are fewer than `r`. The
    ///   parameters are sent if the capacity refills within less than half a second. `tower-ms` is also sent if
    ///   nothing remains and the effective window is shorter than 20 seconds and not a whole number of seconds.
    ///   `client::ObeyLayer` reads these parameters. Other clients ignore `tower-ms` and `tower-r`, as the draft
    ///   requires.
    /// * For a policy that refused, `t` is the wait, like `Retry-After`. `t` is absent if the request
    ///   can never pass.
    ///
    /// The draft is work in progress and not a standard.
    ///
    /// # Quotas that refill within a second
    ///
    /// `t` and `Retry-After` are whole seconds, rounded up. A client that waits for a second whenever
    /// nothing remains gets one burst per second. One burst per second is the whole quota for `50 per
    /// second`, a fifth of it for `50 per second, burst 10`, and a thousandth of it for GCRA with 1,000
    /// per second. So draft 11's headers report more for quotas that refill within a second:
    ///
    /// | quota | after a request that took the last unit |
    /// |---|---|
    /// | `Quota::per_second(50)` | `q=50;w=1` and `r=0;t=1;tower-ms=20` |
    /// | `Quota::per_second(50).burst(10)?` | `q=50;w=1` and `r=49;t=1;tower-r=0;tower-ms=20` |
    /// | `Quota::gcra(1_000, second)?` | `q=1000;w=1` and `r=999;t=1;tower-r=0;tower-ms=1` |
    ///
    /// * If the capacity refills within less than half a second, a client that spreads `r` requests
    ///   over `t` seconds gets nearly the whole quota. A client that sends `r` requests at once is
    ///   refused after the burst, as by any limiter with such a small burst.
    /// * [`ObeyLayer`](crate::guide::being_a_client) gets 95 % of each quota or more if it is the
    ///   only client of its key.
    /// * Refusals report only whole seconds. A refused client that returns within milliseconds would be
    ///   refused again if many clients share the key.
    /// * Other formats have no parameters like `tower-r` and `tower-ms`. [`Headers::openai`] writes
    ///   milliseconds.
    #[must_use]
    pub fn draft_11() -> Self {
        Self::with(vec![Header::list(RATE_LIMIT_POLICY, List::Policies), Header::list(RATE_LIMIT, List::Limits)])
    }

    /// Sends `RateLimit-Policy: 100;w=60` and `RateLimit: limit=100, remaining=50, reset=5`, as in
    /// draft 07 (2023), and `Retry-After`.
    ///
    /// `RateLimit` reports the policy that binds. The `reset` is the time until the quota is full
    /// again. After a refusal, the `reset` is the wait.
    #[must_use]
    pub fn draft_07() -> Self {
        Self::with(vec![
            Header::list(RATE_LIMIT_POLICY, List::Nameless),
            Header::single(RATE_LIMIT, Single::Dictionary),
        ])
    }

    /// Sends `RateLimit-Policy: 100;w=60`, `RateLimit-Limit: 100`, `RateLimit-Remaining: 50` and
    /// `RateLimit-Reset: 5`, as in draft 06 (2022), and `Retry-After`. The values are the same as in
    /// [`draft_07`](Self::draft_07).
    #[must_use]
    pub fn draft_06() -> Self {
        Self::with(vec![
            Header::list(RATE_LIMIT_POLICY, List::Nameless),
            Header::single(DRAFT_LIMIT, Single::Limit),
            Header::single(DRAFT_REMAINING, Single::Remaining),
            Header::single(DRAFT_RESET, Single::DraftReset),
        ])
    }

    /// Sends `X-RateLimit-Limit`, `X-RateLimit-Remaining`, `X-RateLimit-Reset`, and `Retry-After`. The
    /// reset is the instant at which the quota is full again.
    ///
    /// Servers encode the reset in different ways, so you have to choose an encoding.
    ///
    /// Older versions of `ratelimit-header-parser` (npm) read `RateLimit` first, and expect the format
    /// of draft 07. These parser versions find no numbers in draft 11's `RateLimit`. If your clients
    /// use such versions, do not send [`draft_11`](Self::draft_11) together with this format. Send this
    /// format alone, or [`draft_07`](Self::draft_07).
    #[must_use]
    pub fn x_rate_limit(reset: ResetEncoding) -> Self {
        Self::with(vec![
            Header::single(X_LIMIT, Single::Limit),
            Header::single(X_REMAINING, Single::Remaining),
            Header::single(X_RESET, Single::Reset(reset, ResetMeaning::Full)),
        ])
    }

    /// Sends the headers of GitHub's API: `x-ratelimit-limit`, `-remaining`, `-used`, `-reset` in seconds
    /// since the epoch, and `-resource`, which is the policy's name. Also sends `Retry-After`.
    #[must_use]
    pub fn github() -> Self {
        Self::with(vec![
            Header::single(X_LIMIT, Single::Limit),
            Header::single(X_REMAINING, Single::Remaining),
            Header::single(X_USED, Single::Used),
            Header::single(X_RESET, Single::Reset(ResetEncoding::EpochSeconds, ResetMeaning::Full)),
            Header::single(X_RESOURCE, Single::PolicyName),
        ])
    }

    /// Sends the headers of OpenAI's API: `x-ratelimit-limit-requests`, `x-ratelimit-remaining-requests` and
    /// `x-ratelimit-reset-requests`, and the same headers for `tokens`. The reset is the time until the
    /// quota is full again, as a duration: `12ms`, `1s`, `6m0s`. Refusals carry `Retry-After` and
    /// `retry-after-ms`, because OpenAI's clients read the milliseconds first.
    ///
    /// The [unit](crate::Rule::unit) of a policy chooses its headers: `requests`, which is the default, or
    /// `tokens`. A policy with another unit is not reported. If several policies have the same unit,
    /// the headers report the policy that binds. The policy that binds is the refusing policy with the longest
    /// wait, or if no policy refused, the policy with the fewest remaining units.
    ///
    /// ```
    /// use tower_ratelimit::{Headers, MemoryLimiter, Quota, RateLimitLayer, Rule, key};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    /// let requests = Rule::new("requests", Quota::per_minute(60))?;
    /// let tokens = Rule::new("tokens", Quota::per_day(150_000))?.unit("tokens")?.cost(|_| 16);
    /// let layer = RateLimitLayer::new(MemoryLimiter::new(), requests, key::global())
    ///     .and(tokens, key::global())
    ///     .headers(Headers::openai());
    /// # let (head, ()) = http::Request::new(()).into_parts();
    /// # let mut headers = http::HeaderMap::new();
    /// # layer.admit(&head).await?.add_headers(&mut headers);
    /// // The response to the first request:
    /// assert_eq!(headers["x-ratelimit-remaining-requests"], "59");
    /// assert_eq!(headers["x-ratelimit-reset-requests"], "1s");
    /// assert_eq!(headers["x-ratelimit-limit-tokens"], "150000");
    /// assert_eq!(headers["x-ratelimit-remaining-tokens"], "149984");
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn openai() -> Self {
        Self { retry_after_ms: true, ..Self::by_unit(&OPENAI, ResetEncoding::GoDuration) }
    }

    /// Sends the headers of Anthropic's API: `anthropic-ratelimit-requests-limit`,
    /// `anthropic-ratelimit-requests-remaining` and `anthropic-ratelimit-requests-reset`, and the same
    /// headers for `tokens`, `input-tokens` and `output-tokens`. The reset is the instant at which the
    /// quota is full again, as a date of RFC 3339: `2024-01-16T16:00:01Z`. Also sends `Retry-After`.
    ///
    /// The [unit](crate::Rule::unit) of a policy chooses its headers, as in [`openai`](Self::openai).
    #[must_use]
    pub fn anthropic() -> Self {
        Self::by_unit(&ANTHROPIC, ResetEncoding::Rfc3339)
    }

    /// Sends headers with names of your own, and `Retry-After`.
    ///
    /// # Errors
    /// Returns an error if a name is not a valid header name, occurs twice, or has another meaning in
    /// HTTP or gRPC.
    pub fn legacy(headers: LegacyHeaders) -> Result<Self, ConfigError> {
        Ok(Self::with(headers.into_headers()?))
    }

    /// Sends no headers, not even `Retry-After`.
    #[must_use]
    pub fn none() -> Self {
        Self {
            formats: Vec::new(),
            retry_after: false,
            retry_after_ms: false,
            waits: Waits::default(),
            partition: None,
            clock: None,
        }
    }

    /// Adds the headers of `other`. Each format keeps its own settings: [when it is sent](Self::send), and
    /// which policies it reports ([`for_policy`](Self::for_policy), [`for_unit`](Self::for_unit)).
    ///
    /// If `self` and `other` have the same header, the header of `self` is sent. If they report
    /// different policies with one single-valued header, the format in `other` that has this header
    /// loses all its single-valued headers. Otherwise clients would read the numbers of both formats
    /// as the numbers of one quota. [`check`](crate::RateLimitLayer::check) then warns. `Retry-After`
    /// is sent if `self` or `other` sends it. The shorter of the two [longest waits](Self::max_reported_wait)
    /// is used. The jitter, the partition keys and the clock of `other` are each used only if `self`
    /// does not set them.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        let sends_millis = |headers: &Self| headers.retry_after && headers.retry_after_ms;
        self.retry_after_ms = sends_millis(&self) || sends_millis(&other);
        for mut format in other.formats {
            format.join(&self.formats);
            self.formats.push(format);
        }
        self.retry_after |= other.retry_after;
        self.partition = self.partition.or(other.partition);
        self.clock = self.clock.or(other.clock);
        self.waits = self.waits.and(other.waits);
        self
    }

    /// Sets when the headers chosen so far are sent. `when` does not affect `Retry-After`, which is
    /// sent on refusals.
    #[must_use]
    pub fn send(mut self, when: When) -> Self {
        for format in &mut self.formats {
            format.when = when;
        }
        self
    }

    /// Makes the headers chosen so far report only policies with this name. `name` is the name of the
    /// [rule](crate::Rule::new), or a name that
    /// [`RateLimitLayer::policies`](crate::RateLimitLayer::policies) returns. If no policy with this name
    /// applied to a request, the response does not get these headers.
    ///
    /// With this method, each policy can have separate headers:
    ///
    /// ```
    /// use tower_ratelimit::{
    ///     Headers, MemoryLimiter, Quota, RateLimitLayer, Rule, key, middleware::LegacyHeaders,
    /// };
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    /// let family = |policy: &str| {
    ///     let names = LegacyHeaders::new()
    ///         .limit(format!("x-ratelimit-limit-{policy}"))
    ///         .remaining(format!("x-ratelimit-remaining-{policy}"));
    ///     Headers::legacy(names).map(|headers| headers.for_policy(policy))
    /// };
    /// let (reads, exports) = (
    ///     Rule::new("reads", Quota::per_minute(60))?,
    ///     Rule::new("exports", Quota::per_day(5))?,
    /// );
    /// let layer = RateLimitLayer::new(MemoryLimiter::new(), reads, key::global())
    ///     .and(exports, key::global())
    ///     .headers(family("reads")?.and(family("exports")?));
    /// # let (head, ()) = http::Request::new(()).into_parts();
    /// # let mut headers = http::HeaderMap::new();
    /// # layer.admit(&head).await?.add_headers(&mut headers);
    /// // The response to the first request:
    /// assert_eq!(headers["x-ratelimit-remaining-reads"], "59");
    /// assert_eq!(headers["x-ratelimit-remaining-exports"], "4");
    /// # Ok(()) }
    /// ```
    ///
    /// `Retry-After` is still the longest wait of all policies that refused. If the layer has no policy
    /// with this name, [`check`](crate::RateLimitLayer::check) warns.
    #[must_use]
    pub fn for_policy(self, name: impl Into<String>) -> Self {
        self.limited_to(&ScopeCondition::Policy(name.into()))
    }

    /// Makes the headers chosen so far report only policies with this [unit](crate::Rule::unit), such
    /// as `tokens`. A rule that sets no unit has the [default unit](crate::Policy::unit) of its quota,
    /// usually `requests`. In all other respects, this method is like [`for_policy`](Self::for_policy).
    /// If both methods are called, headers report only policies with the given name and unit.
    #[must_use]
    pub fn for_unit(self, unit: impl Into<String>) -> Self {
        self.limited_to(&ScopeCondition::Unit(unit.into()))
    }

    fn limited_to(mut self, condition: &ScopeCondition) -> Self {
        for format in &mut self.formats {
            format.scope.add(condition.clone());
        }
        self
    }

    /// Sets whether refusals carry `Retry-After`, and for [`openai`](Self::openai) `retry-after-ms`.
    #[must_use]
    pub fn retry_after(mut self, send: bool) -> Self {
        self.retry_after = send;
        self
    }

    /// Sets the longest wait that is reported, by default one day, because huge values can harm
    /// clients.
    ///
    /// The maximum caps `Retry-After`, the `t` of a policy with nothing remaining, the drafts' `reset`
    /// after a refusal, and gRPC's equivalents. The maximum also caps resets with the meanings
    /// [`NextUnit`](ResetMeaning::NextUnit) and [`Window`](ResetMeaning::Window) after a refusal. The
    /// maximum does not cap `t` if units remain, because `t` is then not a wait, and a smaller `t`
    /// would invite a higher rate. A maximum below one second does not reduce waits in whole seconds
    /// below 1 s.
    #[must_use]
    pub fn max_reported_wait(mut self, max: Duration) -> Self {
        self.waits.limit_to(max);
        self
    }

    /// Lengthens the waits of refusals by a part that depends on the client's key, so that clients do
    /// not all return at once. By default, waits are not lengthened.
    #[must_use]
    pub fn jitter(mut self, jitter: Jitter) -> Self {
        self.waits.add(jitter);
        self
    }

    /// Sets the clock for resets that are dates: seconds or milliseconds since the epoch, RFC 3339 and HTTP dates. By
    /// default the clock shows the calendar time of the operating system, even if the limiter has another clock,
    /// because clients compare dates with their own calendar. In tests, pass the
    /// [`ManualClock`](crate::clock::ManualClock) of the limiter. On a target without an operating system, such as
    /// `wasm32-unknown-unknown`, set a clock, because the default clock always shows 1970 there.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::{
    ///     Headers, MemoryLimiter, Quota, RateLimitLayer, clock::ManualClock, key,
    /// };
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    /// let clock = ManualClock::new(); // 2025-01-01 00:00:00 UTC, which is 1735689600
    /// let limiter = MemoryLimiter::builder().clock(clock.clone()).build()?;
    /// let layer = RateLimitLayer::new(limiter, Quota::per_minute(60), key::global())
    ///     .headers(Headers::github().clock(clock));
    /// # let (head, ()) = http::Request::new(()).into_parts();
    /// # let mut headers = http::HeaderMap::new();
    /// # layer.admit(&head).await?.add_headers(&mut headers);
    /// // The response to the first request:
    /// assert_eq!(headers["x-ratelimit-reset"], "1735689601");
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn clock(mut self, clock: impl Clock + 'static) -> Self {
        self.clock = Some(Arc::new(clock));
        self
    }

    /// Sends the draft's partition key `pk` in the items of [`draft_11`](Self::draft_11)'s `RateLimit`.
    /// `name` returns the bytes of the partition key for a policy and the request's key.
    ///
    /// By default no partition key is sent. Sending no partition key is the safe choice, because
    /// clients and all proxies in between can read a partition key. Never send the request's key itself
    /// if it is a secret or an address. Never send the plain hash of such a key either, because the key
    /// can be guessed from the hash. Send a public name, such as a tenant's, or a keyed hash (HMAC).
    ///
    /// If `name` panics, the request is served, but no `pk` is sent. The request is not refused,
    /// because it was already charged.
    ///
    /// ```
    /// use tower_ratelimit::{Headers, Key, Policy};
    ///
    /// let headers = Headers::draft_11().partition_keys(|policy: &Policy, key: &Key| {
    ///     // Tenants' names are public, users' are not.
    ///     (policy.name() == "tenant").then(|| key.as_bytes().to_vec())
    /// });
    /// ```
    #[must_use]
    pub fn partition_keys(mut self, name: impl Fn(&Policy, &Key) -> Option<Vec<u8>> + Send + Sync + 'static) -> Self {
        let name =
            move |policy: &Policy, key: &Key| catch_unwind(AssertUnwindSafe(|| name(policy, key))).unwrap_or_default();
        self.partition = Some(PartitionKey(Arc::new(name)));
        self
    }

    /// Returns the names of all headers that may be sent, for `Access-Control-Expose-Headers`.
    ///
    /// The names include the headers that hold the status of a refusal over gRPC, such as `grpc-status`. If a browser
    /// hides these headers, a gRPC-Web client sees a failure without a reason.
    #[must_use]
    pub fn names(&self) -> Vec<HeaderName> {
        let sent = self.formats.iter().filter(|format| format.when != When::Never);
        let names = sent.flat_map(|format| &format.headers).map(|header| header.name.clone());
        let waits = self.waits().map(|header| header.name);
        names.chain(waits).chain(GRPC_STATUS.map(HeaderName::from_static)).collect()
    }

    fn with(headers: Vec<Header>) -> Self {
        Self { formats: vec![Format::new(headers)], retry_after: true, ..Self::none() }
    }

    /// Sends a family of headers for each of these units. `families` has the names of the headers for the limit, the
    /// remaining units, and the reset.
    fn by_unit(families: &[(&str, [&'static str; 3])], encoding: ResetEncoding) -> Self {
        let format = |(unit, [limit, remaining, reset]): &(&str, [&'static str; 3])| {
            let mut format = Format::new(vec![
                Header::single(limit, Single::Limit),
                Header::single(remaining, Single::Remaining),
                Header::single(reset, Single::Reset(encoding, ResetMeaning::Full)),
            ]);
            format.scope.add(ScopeCondition::Unit((*unit).to_owned()));
            format
        };
        Self { formats: families.iter().map(format).collect(), retry_after: true, ..Self::none() }
    }

    /// Returns a description of the problem if some headers can never be sent, because of the layer's policies or of
    /// other headers.
    pub(crate) fn unsent(&self, policies: &[Policy]) -> Option<String> {
        let sent = || self.formats.iter().filter(|format| format.when != When::Never);
        if let Some(name) = sent().find_map(|format| format.contested.as_ref()) {
            return Some(format!(
                "two families of headers report different policies by the header {:?}, and only the earlier \
                 family sends it: give each family header names of its own",
                name.as_str()
            ));
        }
        let scoped = || sent().filter(|format| !format.scope.is_all());
        // Layers with different policies may share headers, so a family of headers without a policy may be intended. A
        // policy without a family is probably a mistake, unless it is a limit of requests in flight, for which no
        // vendor has headers.
        let idle = scoped().find(|format| !policies.iter().any(|policy| format.scope.includes(policy)))?;
        let mut rates = policies.iter().filter(|policy| policy.unit() != CONCURRENT_REQUESTS);
        let lost = rates.find(|policy| !scoped().any(|format| format.scope.includes(policy)))?;
        let names: Vec<&str> = idle.headers.iter().map(|header| header.name.as_str()).collect();
        Some(format!(
            "the headers {} report policies of {}, but the layer has no such policy, and no headers of this kind \
             report the policy {:?} (unit {:?}): change Headers::for_policy, Headers::for_unit, the rule's name or \
             Rule::unit",
            names.join(", "),
            idle.scope,
            lost.name(),
            lost.unit()
        ))
    }

    /// Returns the headers that report the wait of a refusal. The header in milliseconds comes first, because it is
    /// merged with the `Retry-After` that the response already has. The layer's `Retry-After` is written after that.
    pub(super) fn waits(&self) -> impl Iterator<Item = Header> + use<> {
        let millis = (HeaderName::from_static(RETRY_AFTER_MS), Content::RetryAfterMs);
        let headers = [(millis, self.retry_after_ms), ((RETRY_AFTER, Content::RetryAfter), true)];
        let is_sent = self.retry_after;
        let sent = headers.into_iter().filter(move |(_, is_chosen)| is_sent && *is_chosen);
        sent.map(|((name, content), _)| Header { name, content })
    }
}

impl Default for Headers {
    fn default() -> Self {
        Self::draft_11()
    }
}

/// Returns the partition key for a policy and a request's key, if there is one.
type NamePartition = dyn Fn(&Policy, &Key) -> Option<Vec<u8>> + Send + Sync;

#[derive(Clone)]
pub(super) struct PartitionKey(pub(super) Arc<NamePartition>);

impl fmt::Debug for PartitionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PartitionKey")
    }
}

/// Headers that are sent together, and report the same policies.
#[derive(Clone, Debug)]
pub(super) struct Format {
    pub(super) headers: Vec<Header>,
    pub(super) when: When,
    pub(super) scope: Scope,
    /// The header that reports the remaining units. This header is stored separately because
    /// [`Headers::and`] removes it from `headers` if an earlier format has it too.
    pub(super) remaining: Option<Header>,
    /// A header that [`Headers::and`] removed, because an earlier format reports other policies with
    /// this header.
    pub(super) contested: Option<HeaderName>,
}

impl Format {
    pub(super) fn new(headers: Vec<Header>) -> Self {
        let remaining = headers.iter().find(|header| header.content.reports_remaining()).cloned();
        Self { headers, when: When::default(), scope: Scope::default(), remaining, contested: None }
    }

    /// Returns whether the format's headers are ever sent.
    pub(super) fn is_sent(&self) -> bool {
        self.when != When::Never && !self.headers.is_empty()
    }

    /// Returns the header that reports the remaining units: the format's own header, or the header of another format
    /// that describes the same quota.
    pub(super) fn remaining_of_family<'a>(&'a self, formats: &'a [Self]) -> Option<&'a Header> {
        let is_of_family = |other: &&Header| {
            let mut singles = self.headers.iter().filter(|own| own.content.is_single());
            singles.any(|own| are_of_one_family(own.name.as_str(), other.name.as_str()))
        };
        let others = || formats.iter().filter_map(|format| format.remaining.as_ref());
        self.remaining.as_ref().or_else(|| others().find(is_of_family))
    }

    /// Removes headers that earlier formats have.
    fn join(&mut self, earlier: &[Self]) {
        let others = || earlier.iter().filter(|format| format.scope != self.scope);
        let has = |format: &Self, header: &Header| format.headers.iter().any(|known| known.name == header.name);
        // A list is not contested if the earlier format lists all policies in it, because that list also has the
        // policies of this format.
        let is_contested = |header: &&Header| {
            others().any(|format| has(format, header) && (header.content.is_single() || !format.scope.is_all()))
        };
        self.contested = self.headers.iter().find(is_contested).map(|header| header.name.clone());
        if self.headers.iter().filter(is_contested).any(|header| header.content.is_single()) {
            self.headers.retain(|header| !header.content.is_single());
        }
        self.headers.retain(|header| !earlier.iter().any(|format| has(format, header)));
    }
}
