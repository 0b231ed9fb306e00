//! The layer and its settings.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderName;
use tower_layer::Layer;

use super::charge::access::{AccessList, BoundList};
use super::compiled::Compiled;
use super::decide::overflow::{NoOverflow, OverflowTo};
use super::discard::DiscardBounds;
use super::follow::follow;
use super::latest::Latest;
use super::rule::{BoundRule, IntoRule};
use super::service::RateLimit;
use super::settings::{OnError, Settings};
#[cfg(feature = "rules")]
use super::source::RuleSource;
use super::wrap_body::WrapBodyLayer;
use crate::base::head::Head;
use crate::base::sync::OnceLock;
use crate::clock::Timer;
use crate::decision::ChargeDecision;
use crate::error::ConfigError;
use crate::headers::Headers;
use crate::key::{IntoKey, Key};
use crate::limiter::memory::limiter::MemoryLimiter;
use crate::limiter::{Blocks, Charge, Limiter, Meters};
use crate::mode::ModeSwitch;
use crate::outcome::Observer;
use crate::policy::Policy;
use crate::quota::Quota;
use crate::refusal::Refusals;
use crate::rules_in_force::RulesReader;
use crate::setup_warning::SetupWarning;

/// A [`Layer`] that limits the rate of requests.
///
/// Each rule has an extractor: a closure that reads the request's head and returns the key, whose
/// allowance is charged. All rules of a layer make one decision: all their charges are taken, or none is.
///
/// Clones of a layer, and all services that it makes, share one allowance for each key, because they share one
/// limiter.
///
/// ```
/// use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, Rule, key};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = MemoryLimiter::new();
/// let layer = RateLimitLayer::new(limiter, Quota::per_minute(100), key::peer_ip())
///     .and(Rule::new("token", Quota::per_hour(1_000))?, |request| {
///         request.headers.get("authorization").cloned()
///     });
/// # Ok(()) }
/// ```
///
/// The type has only the limiter as a parameter, so it can be a struct's field or a function's result. Without the
/// parameter the limiter is a [`MemoryLimiter`]:
///
/// ```
/// use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, key};
///
/// struct App {
///     limit: RateLimitLayer, // `RateLimitLayer<RedisLimiter>` for limits in Redis
/// }
///
/// fn limit() -> RateLimitLayer {
///     RateLimitLayer::new(
///         MemoryLimiter::new(),
///         Quota::per_second(5),
///         key::header("x-api-key"),
///     )
/// }
/// # let _ = App { limit: limit() };
/// ```
#[must_use = "a layer does nothing until it is applied to a service"]
pub struct RateLimitLayer<L = MemoryLimiter, O = NoOverflow> {
    limiter: Arc<L>,
    settings: Arc<Settings>,
    overflow: O,
    /// The configuration is compiled when it is first needed, and shared with clones.
    compiled: Arc<OnceLock<Configuration<L>>>,
}

/// A compiled configuration.
struct Configuration<L> {
    compiled: Arc<Compiled<L>>,
    /// Holds the configuration that is in force now, if the configuration can change.
    latest: Option<Arc<Latest<Compiled<L>>>>,
}

impl<L: Limiter> RateLimitLayer<L> {
    /// Makes a layer with one rule. `rule` is a [`Quota`](crate::Quota) or a [`Rule`](crate::Rule). `extract` returns
    /// the key of a request: `extract` is a function of [`key`](crate::key), or a closure.
    ///
    /// If the closure's result borrows from the request, the compiler says `lifetime may not live long enough`. Wrap
    /// the result in a [`Key`](crate::Key), or copy it:
    ///
    /// ```
    /// # use tower_ratelimit::{Key, MemoryLimiter, Quota, RateLimitLayer};
    /// # let (limiter, quota) = (MemoryLimiter::new(), Quota::per_minute(100));
    /// let by_path =
    ///     RateLimitLayer::new(limiter.clone(), quota, |request| Key::of(request.uri.path()));
    /// let by_user =
    ///     RateLimitLayer::new(limiter, quota, |request| request.headers.get("x-user").cloned());
    /// ```
    ///
    /// If a closure is first stored in a variable, it needs the type of its argument, `|request: &Head<'_>|`.
    /// Without the type, the compiler says `type annotations needed` (E0282).
    pub fn new<E, K>(limiter: L, rule: impl IntoRule, extract: E) -> Self
    where
        E: Fn(&Head<'_>) -> K + Send + Sync + 'static,
        K: IntoKey,
    {
        let mut settings = Settings::default();
        settings.add_rule(BoundRule::new(rule.into_rule(), extract));
        Self::of(limiter, Arc::new(settings))
    }

    /// Makes a layer with the rules of a source.
    #[cfg(feature = "rules")]
    pub(crate) fn sourced(limiter: L, source: Arc<dyn RuleSource>) -> Self {
        Self::of(limiter, Arc::new(Settings::sourced(source)))
    }

    fn of(limiter: L, settings: Arc<Settings>) -> Self {
        let layer = Self { limiter: Arc::new(limiter), settings, overflow: NoOverflow, compiled: Arc::default() };
        layer.entered()
    }
}

/// # Rules
impl<L: Limiter, O> RateLimitLayer<L, O> {
    /// Adds a rule. A request passes if every rule that applies to it allows it. If one rule refuses it, no rule is
    /// charged.
    ///
    /// Rules that have the same extractor share the key, which is then extracted once from a request. Extractors
    /// count as the same only if they capture no values, like [`key::peer_ip`](crate::key::peer_ip) or one
    /// function of your own.
    ///
    /// The names of a layer's policies are unique. If a policy's name is already used in this layer, the policy
    /// gets a number: of two policies named `api`, the second is `api-2` in headers, metrics and stored keys. So
    /// the same quota by address and by user gives two allowances, and never one allowance by accident. If you
    /// chose the name, [`check`](Self::check) [warns](crate::observe::SetupWarningKind::NameTaken), because the
    /// rules would swap their names if their order changed.
    pub fn and<E, K>(self, rule: impl IntoRule, extract: E) -> Self
    where
        E: Fn(&Head<'_>) -> K + Send + Sync + 'static,
        K: IntoKey,
    {
        let rule = BoundRule::new(rule.into_rule(), extract);
        self.change(|settings| settings.add_rule(rule))
    }

    /// Sets a [`Mode`](crate::mode::Mode) for all rules of the layer, or a [`ModeSwitch`] that changes the mode
    /// at run time. If a rule has its own mode, the milder of the two modes applies. In shadow mode, no rule of
    /// the layer refuses or degrades a request.
    ///
    /// If no enforced rule applies to a request, the request passes even if the limiter fails.
    pub fn mode(self, mode: impl Into<ModeSwitch>) -> Self {
        let mode = mode.into();
        self.change(|settings| settings.mode = Some(mode))
    }

    /// Looks up every request in a list before anything is charged. `extract` returns the key for the look-up. Allowed
    /// clients are exempt from this layer. Denied clients are refused with 403 (`PERMISSION_DENIED` over gRPC). The
    /// layer does not ask the limiter in either case. If the layer has several lists, the first list that has an entry
    /// for the request decides. A request without the key of a list is not in that list.
    ///
    /// If the list has networks, use an extractor that returns the whole address, such as
    /// [`key::peer_network`](crate::key::peer_network) or [`key::client_network`](crate::key::client_network) with
    /// [`Prefixes::exact()`](crate::key::Prefixes::exact). [`key::peer_ip`](crate::key::peer_ip) returns the first
    /// address of an IPv6 client's /64, so narrower networks of the list would not match the client.
    ///
    /// ```
    /// use tower_ratelimit::key::{self, Prefixes};
    /// use tower_ratelimit::middleware::{Access, AccessList};
    /// use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let partners = AccessList::new();
    /// partners.set("192.0.2.0/24", Access::Allow)?;
    /// partners.set("198.51.100.7", Access::Deny)?;
    /// let layer =
    ///     RateLimitLayer::new(MemoryLimiter::new(), Quota::per_minute(100), key::peer_ip())
    ///         .access(&partners, key::peer_network(Prefixes::exact()));
    /// # Ok(()) }
    /// ```
    pub fn access<E, K>(self, list: &AccessList, extract: E) -> Self
    where
        E: Fn(&Head<'_>) -> K + Send + Sync + 'static,
        K: IntoKey,
    {
        let list = BoundList::new(list.clone(), extract);
        self.change(|settings| settings.access.push(list))
    }

    /// Sets whether CORS preflight requests are exempt: `OPTIONS` with `Origin` and `Access-Control-Request-Method`.
    /// By default preflight requests are not exempt, because anyone can send such requests. A CORS layer *outside* of
    /// this layer is better: it answers preflight requests before this layer sees them.
    pub fn exempt_preflight(self, exempt_preflight: bool) -> Self {
        self.change(|settings| settings.exempt_preflight = exempt_preflight)
    }

    /// Sets whether the layer refunds a request's charges if an inner layer refuses the request because of its
    /// rate. By default the layer refunds nothing: nested layers are independent, and each layer keeps its
    /// charges.
    ///
    /// **The price:** a client that an inner limit refuses pays nothing in this layer, so it can make the service do
    /// all work between the two layers as often as it likes. Enable refunds only if the work between the layers costs
    /// little, and never if a password check or a call to another service is part of it. If limits belong together,
    /// put them into one layer with [`and`](Self::and), which charges all of them or none.
    ///
    /// * A refusal counts if its outcome is [`Limited`](crate::outcome::OutcomeKind::Limited) or
    ///   [`Blocked`](crate::outcome::OutcomeKind::Blocked), at any depth and with any limiter. A missing
    ///   key, a denied client, a failed limiter or an error of the service refunds nothing.
    /// * The layers find each other through the extensions of the request, so an inner layer may run in another
    ///   task. The charge is kept if middleware between the layers replaces the extensions.
    /// * If middleware between the layers copies the request, for example to retry it, the charge is refunded only if
    ///   a limit refused each copy. The same condition applies to a handler that calls another limited service with a
    ///   copy of the extensions.
    /// * The refund is made when the response arrives, even if middleware between the layers changed the response. If
    ///   the response's future is dropped after the refusal, also by a panic of the service, the refund is made then.
    /// * The headers report the units that remain after the refund. If the limiter answers at once, the layer asks
    ///   the limiter again; otherwise the layer calculates the remaining units. A refund to a leaky queue has no
    ///   effect while another request is queued behind it.
    ///
    /// ```
    /// use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, Rule, key};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = MemoryLimiter::new();
    /// // One client that the inner layer refuses does not use up what all clients share.
    /// let everyone = Rule::new("everyone", Quota::per_second(5_000))?;
    /// let outer =
    ///     RateLimitLayer::new(limiter.clone(), everyone, key::global()).refund_nested(true);
    /// let search = RateLimitLayer::new(
    ///     limiter,
    ///     Rule::new("search", Quota::per_second(10))?,
    ///     key::peer_ip(),
    /// );
    /// # Ok(()) }
    /// ```
    pub fn refund_nested(self, refund_nested: bool) -> Self {
        self.change(|settings| settings.refund_nested = refund_nested)
    }
}

/// # Answers
impl<L: Limiter, O> RateLimitLayer<L, O> {
    /// Sets which headers responses get. By default, every response to a request to which a rule applied gets the
    /// headers of draft 11, except redirects. Refusals also get `Retry-After`.
    ///
    /// ```
    /// use tower_ratelimit::{
    ///     Headers, MemoryLimiter, Quota, RateLimitLayer, key, middleware::ResetEncoding,
    /// };
    ///
    /// // Standard headers, and those that older clients read.
    /// let headers = Headers::draft_11().and(Headers::x_rate_limit(ResetEncoding::DeltaSeconds));
    /// let layer =
    ///     RateLimitLayer::new(MemoryLimiter::new(), Quota::per_minute(100), key::peer_ip())
    ///         .headers(headers);
    /// ```
    pub fn headers(self, headers: Headers) -> Self {
        self.change(|settings| settings.headers = headers)
    }

    /// Returns the names of the headers that this layer may add to responses, for `Access-Control-Expose-Headers`.
    /// These are the [names](Headers::names) of the layer's [headers](Self::headers).
    #[must_use]
    pub fn header_names(&self) -> Vec<HeaderName> {
        self.settings.headers.names()
    }

    /// Sets how the layer answers a refused request. By default the status is 429 and the body is a problem
    /// document; a gRPC client gets `RESOURCE_EXHAUSTED`.
    ///
    /// For a closure the compiler says `type annotations needed` (E0282), or ``expected `Refusals`, found closure``.
    /// Wrap the closure with [`Refusals::with`], or with [`Refusals::body`] if it makes only the body.
    ///
    /// ```
    /// use http::StatusCode;
    /// use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, Refusals, key};
    ///
    /// let refusals =
    ///     Refusals::problem_json().title("Slow down").status(StatusCode::SERVICE_UNAVAILABLE);
    /// let layer =
    ///     RateLimitLayer::new(MemoryLimiter::new(), Quota::per_minute(100), key::peer_ip());
    /// let layer = layer.refusals(refusals);
    ///
    /// // A response of your own. It keeps the right status for each kind of refusal.
    /// let layer = layer.refusals(Refusals::with(|refusal| {
    ///     let error = format!("{{\"error\":\"{}\"}}", refusal.outcome().kind().as_str());
    ///     let mut response = refusal.default_response().map(|_| error);
    ///     response
    ///         .headers_mut()
    ///         .insert("content-type", http::HeaderValue::from_static("application/json"));
    ///     response
    /// }));
    /// ```
    pub fn refusals(self, refusals: Refusals) -> Self {
        self.change(|settings| settings.refusals = refusals)
    }

    /// Sets whether a request passes when the limiter fails. By default the request is refused. A limiter in memory
    /// does not fail. If the limiter does [not support](crate::limiter::Limiter::supports) the quota of a rule, such
    /// as a log that is too long for a limiter in memory, each request of that rule counts as a failure.
    ///
    /// ```
    /// use tower_ratelimit::{
    ///     MemoryLimiter, OnError, Quota, RateLimitLayer, key, limiter::Limiter,
    /// };
    ///
    /// // The limit guards against mistakes, so requests pass while the store is away.
    /// fn lenient<L: Limiter>(limiter: L) -> RateLimitLayer<L> {
    ///     RateLimitLayer::new(limiter, Quota::per_minute(100), key::peer_ip())
    ///         .on_error(OnError::Allow)
    /// }
    /// # let layer = lenient(MemoryLimiter::new());
    /// ```
    pub fn on_error(self, on_error: OnError) -> Self {
        self.change(|settings| settings.on_error = on_error)
    }

    /// Sends requests that are over a quota to another service, with their bodies unread, instead of refusing them. For
    /// example, that service can put the requests into a queue and answer 202, or serve a page from a cache.
    ///
    /// The overflow takes the same requests as the inner service, and may answer with any body. In an
    /// axum application, use a `Router` or a `tower::service_fn`.
    ///
    /// * The request carries its [`Outcome`](crate::outcome::Outcome), of the kind
    ///   [`Overflowed`](crate::outcome::OutcomeKind::Overflowed).
    /// * The overflow's response gets the headers of a refusal, with `Retry-After`. The response also gets
    ///   `Cache-Control: no-store`, unless the overflow's service has set `Cache-Control`.
    /// * The overflow's errors are returned unchanged, like the errors of the inner service.
    /// * The overflow does not affect the readiness of the layer's service. When a request needs the overflow, the
    ///   layer polls a clone of the overflow's service once. If the clone is not ready, the request is refused. So
    ///   a concurrency limit around the overflow's service bounds its requests, and no request waits for the
    ///   overflow.
    /// * A request without a key does not go to the overflow, nor does a request that is refused
    ///   because the limiter failed.
    /// * If a limit within the overflow's service refuses the request, the response carries the outcome of that
    ///   refusal.
    ///
    /// ```
    /// use axum::body::Body;
    /// use http::{Request, Response, StatusCode};
    /// use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, key};
    ///
    /// let later = tower::service_fn(|_request: Request<Body>| async {
    ///     let mut response = Response::new(Body::from("come back for it\n"));
    ///     *response.status_mut() = StatusCode::ACCEPTED;
    ///     Ok::<_, std::convert::Infallible>(response)
    /// });
    /// let limit =
    ///     RateLimitLayer::new(MemoryLimiter::new(), Quota::per_minute(100), key::peer_ip())
    ///         .overflow(later);
    /// let app: axum::Router = axum::Router::new().layer(limit);
    /// ```
    pub fn overflow<T>(self, service: T) -> RateLimitLayer<L, OverflowTo<T>> {
        let Self { limiter, settings, compiled, .. } = self.change(|settings| settings.overflows = true);
        RateLimitLayer { limiter, settings, overflow: OverflowTo::new(service), compiled }
    }

    /// Sets how much of a refused request's body the layer reads, and discards, before it answers. The default is
    /// 2 MiB in 2 seconds.
    ///
    /// A client that is still sending while the server answers and closes the connection often sees a
    /// broken connection in place of the refusal and its `Retry-After`. A proxy answers 502 in this
    /// case. So the layer reads the rest of the request first.
    ///
    /// * The layer answers when the body has ended, or when the first of the two bounds is reached.
    ///   `max_time` counts from the decision about the request.
    /// * The layer answers at once if the request has no body. The layer also answers at once if
    ///   the request has the header `Expect`, because the client then sends no body before the
    ///   server asks for it. The layer also answers a gRPC call over HTTP/2 at once, because the
    ///   client reads the status while it sends. If `max_bytes` or `max_time` is 0, the layer
    ///   answers every request at once.
    /// * The bytes are dropped at once, so memory stays flat. A refused request takes the bandwidth of up to
    ///   `max_bytes`. For up to `max_time` the request holds its connection, and its units of limits *outside* of this
    ///   layer. The request holds no unit of this layer's rules and no inner service.
    /// * A request that goes to the [overflow](Self::overflow) is not read by this layer. If the
    ///   overflow's service leaves a body unread, the client may not see the answer.
    /// * The layer's [timer](Self::timer) measures the time. A layer without a timer uses `TokioTimer`
    ///   if the feature `tokio` is on, which `axum` and `tonic` enable. Without any timer, or outside of
    ///   a runtime, nothing is read. The runtime needs its time driver.
    /// * If the layer is in a client, the request's body has not been sent yet. Set
    ///   `discard_body(0, Duration::ZERO)` there.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, key};
    ///
    /// // Photos of up to 20 MB, and clients that upload 2 MB a second.
    /// let uploads =
    ///     RateLimitLayer::new(MemoryLimiter::new(), Quota::per_minute(10), key::peer_ip())
    ///         .discard_body(20_000_000, Duration::from_secs(10));
    /// ```
    ///
    /// # Measurements
    ///
    /// If the layer answered at once, only a part of the refused uploads got their refusal. The
    /// table shows this part for uploads of 20 kB, 100 kB and 1 MB. The clients were curl, Python,
    /// Node and Java on the server's machine, and all proxies had their default configuration. With
    /// the default of this setting, all of the same uploads got their refusal, also over HTTP/2.
    /// The program `tests/uploads/run` in the repository counts the refusals.
    ///
    /// | answered at once, over | HTTP/1 | HTTP/2 from the client |
    /// |---|---|---|
    /// | no proxy | 96, 95, 94 % | 90, 59, 57 % |
    /// | nginx 1.22 | 86, 87, 74 % | 86, 78, 83 % |
    /// | HAProxy 2.6 | 100, 95, 83 % | 100, 99, 59 % |
    /// | Caddy 2.6 | 99, 96, 94 % | 97, 94, 95 % |
    ///
    /// Some clients got fewer refusals than the average: curl over HTTP/2 got 7 of 50 refusals of 1
    /// MB, Python behind HAProxy 12 of 50, and Java over HTTP/2 behind HAProxy none of 8. Clients
    /// with a slow connection also need more time. The next table shows how many of 16 uploads of
    /// 20 kB to 2 MB at 1 to 50 Mbit/s got their refusal:
    ///
    /// | up to | 0.2 s | 1 s | 2 s | 5 s |
    /// |---|---|---|---|---|
    /// | 64 KiB | 6 | 6 | 6 | 6 |
    /// | 256 KiB | 7 | 8 | 8 | 8 |
    /// | 1 MiB | 8 | 10 | 11 | 11 |
    /// | 2 MiB | 8 | 11 | 13 | 14 |
    pub fn discard_body(self, max_bytes: u64, max_time: Duration) -> Self {
        self.change(|settings| settings.discard = Some(DiscardBounds { max_bytes, max_time }))
    }

    /// Allows the layer to limit services with any response body. This method is the last call of
    /// the builder.
    ///
    /// Without this method, a rate-limited service keeps the response body type of the inner service,
    /// which must be a [`ResponseBody`](super::ResponseBody). With this method, the response body is
    /// a [`WrappedBody`](super::WrappedBody) of the inner service's body.
    ///
    /// ```
    /// use bytes::Bytes;
    /// use http::{Request, Response};
    /// use http_body_util::Full;
    /// use tower::util::BoxCloneSyncService;
    /// use tower::{Layer, service_fn};
    /// use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, key};
    ///
    /// async fn hello(_: Request<Full<Bytes>>) -> Result<Response<Full<Bytes>>, std::io::Error> {
    ///     Ok(Response::new(Full::from("hello\n")))
    /// }
    ///
    /// let limit =
    ///     RateLimitLayer::new(MemoryLimiter::new(), Quota::per_minute(100), key::peer_ip());
    /// let service = BoxCloneSyncService::new(limit.wrap_body().layer(service_fn(hello)));
    /// ```
    ///
    /// Without `.wrap_body()` the last line does not compile, and the compiler's message names this
    /// method. If a method such as `oneshot` is called on a service with further layers outside, the
    /// message only says that its trait bounds were not satisfied.
    ///
    /// ```compile_fail,E0277
    /// # use bytes::Bytes;
    /// # use http::{Request, Response};
    /// # use http_body_util::Full;
    /// # use tower::util::BoxCloneSyncService;
    /// # use tower::{Layer, service_fn};
    /// # use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, key};
    /// # async fn hello(_: Request<Full<Bytes>>) -> Result<Response<Full<Bytes>>, std::io::Error> {
    /// #     Ok(Response::new(Full::from("hello\n")))
    /// # }
    /// # let limit = RateLimitLayer::new(MemoryLimiter::new(), Quota::per_minute(100), key::peer_ip());
    /// let service = BoxCloneSyncService::new(limit.layer(service_fn(hello)));
    /// ```
    #[must_use]
    pub fn wrap_body(self) -> WrapBodyLayer<Self> {
        WrapBodyLayer::new(self)
    }
}

/// # Waiting
impl<L: Limiter, O> RateLimitLayer<L, O> {
    /// Sets the timer with which requests wait, such as `TokioTimer` (feature `tokio`). Requests wait for the departure
    /// that a [leaky queue](crate::Quota::leaky_queue) gives them, or in line for units of a [concurrency
    /// limit](crate::Quota::concurrent) with a [wait](crate::Quota::max_wait). Without a timer, requests that a queue
    /// has admitted pass at once, so only the length of the queue is bounded. Requests over a concurrency limit are
    /// refused at once if there is no timer.
    ///
    /// Requests in line:
    ///
    /// * Requests of one key get units in the order in which they came to this process, whatever their costs
    ///   are. No other request of the key overtakes the line, even if it comes from another layer or would not
    ///   wait.
    /// * When units become free, one request is woken. The line stands still while the task of its first request does
    ///   not run.
    /// * A request in line holds nothing. If several rules apply, the request waits for the first rule that denied it.
    ///   If another concurrency limit denies the request at its turn, the request moves to the line of that limit,
    ///   ahead of all requests that came later. If any other rule denies the request, it is refused. Blocks, and quotas
    ///   that count denied requests, do not count the wait; they count the refusal at the end, if there is one.
    /// * A request is refused when the time since it came reaches the maximum wait of its line's quota. If the
    ///   limit changes while the request waits, it asks for units of the new limit.
    /// * A dropped request leaves its line at once. Over HTTP/1 a server does [not
    ///   always](crate::guide::requests_in_flight#when-a-client-has-gone) drop the request of a client that has gone.
    /// * At most 100 requests wait in line for one key; see [`max_in_line`](Self::max_in_line).
    ///
    /// Requests in leaky queues:
    ///
    /// * A request departs at its departure time or later, never earlier. Requests of one key depart one interval of
    ///   the quota apart, in the order in which they were admitted. If a request is charged to several queues, it
    ///   departs at the latest of its departure times.
    /// * A waiting request holds no inner service: a clone is made ready after the wait.
    /// * If a request is dropped while it waits, its charges are refunded, and requests of the same policy, key and
    ///   cost behind it in this layer move up by one. The line's last departure time then belongs to no request, and
    ///   is refunded to the limiter. If many requests are dropped at once, on any number of threads, one departure
    ///   time is refunded for each of them, the last time first.
    /// * If another request is queued behind the departure time of a dropped request, that time stays unused, and
    ///   the spacing is kept. The other request comes from another layer or process, or was admitted by the limiter
    ///   but has not joined its line yet. If the other request is dropped as well, and was admitted by the same
    ///   limiter, both departure times are refunded.
    /// * If the process stalls, requests whose departure times have passed depart together.
    /// * No request waits for longer than [`Quota::max_wait`](crate::Quota::max_wait).
    /// * At most 1,000 requests of this layer wait at a time, over all keys; see [`max_waiting`](Self::max_waiting).
    /// * The departure time of a waiting request is fixed: later changes of the limiter's clock or of the rule's mode
    ///   do not move it. If the limiter's clock steps back, the queue may refuse every request, for at most the time
    ///   in which its capacity and its largest debt drain. If the clock steps forward, later requests depart as if
    ///   the skipped time had passed.
    /// * A request that does not wait takes no lock.
    ///
    /// Both:
    ///
    /// * The outcome of a request that waited is [`Delayed`](crate::observe::OutcomeKind::Delayed),
    ///   reported after the wait, or [`Abandoned`](crate::observe::OutcomeKind::Abandoned) if the
    ///   request is dropped during the wait.
    /// * A waiting request holds memory.
    ///
    /// Rules in [shadow mode](crate::Mode::Shadow), and rules that [degrade](crate::Mode::Degrade), make no request
    /// wait. A layer with a timer in which no request can wait is a
    /// [misconfiguration](crate::observe::SetupWarningKind::NoQueue), which [`check`](Self::check) returns.
    pub fn timer(self, timer: impl Timer + 'static) -> Self {
        self.change(|settings| settings.timer = Some(Arc::new(timer)))
    }

    /// Sets how many requests of this layer may wait at a time, in queues and in line, over all keys. The default is
    /// 1,000.
    ///
    /// Each waiting request holds its head, its body and its connection, and a client with many keys has a queue for
    /// each key. When the maximum number of requests wait, a request that would have to wait is refused as over the
    /// limit. The refused request is not charged, its outcome is [`Limited`](crate::observe::OutcomeKind::Limited),
    /// and `Retry-After` is the time until it would have departed from its queue. A request that does not have to wait
    /// passes. With 0 no request waits. Without a [timer](Self::timer) the setting has no effect, because no request
    /// waits, and [`check`](Self::check) returns a [warning](crate::observe::SetupWarningKind::NoEffect).
    pub fn max_waiting(self, max_waiting: usize) -> Self {
        self.change(|settings| settings.max_waiting = Some(max_waiting))
    }

    /// Sets how many requests may wait in line for the units of one key. The default is 100.
    ///
    /// When this number of requests wait, a further request that would have to wait is refused as over
    /// the limit. The number counts the requests of the key in all layers of the limiter in this
    /// process. So other clients find room even if the requests of one client stay in line, on purpose
    /// or because the client has gone
    /// [unnoticed](crate::guide::requests_in_flight#when-a-client-has-gone). If all clients share a
    /// key, such as [`key::global`](crate::key::global), raise the number up to
    /// [`max_waiting`](Self::max_waiting). A [leaky queue](crate::Quota::leaky_queue) has its own
    /// bound for each key. Without a [timer](Self::timer) the setting has no effect, and
    /// [`check`](Self::check) returns a [warning](crate::observe::SetupWarningKind::NoEffect).
    pub fn max_in_line(self, max_in_line: usize) -> Self {
        self.change(|settings| settings.max_in_line = Some(max_in_line))
    }

    /// Sets how long a [message](Self::messages) over a quota may wait until it passes. By default
    /// messages over a quota are refused at once. This setting does not affect requests.
    ///
    /// Messages of one key wait in one line, whichever connection they come from, and pass in the order in which they
    /// came. If no message waits, several messages may ask at the same time. A store decides messages that ask at the
    /// same time in the order in which it gets their calls. The first message in line asks again at once if this layer
    /// refunds units of its key, resets the key, or changes the rule. A message that would have to wait for longer
    /// than `max` is refused at once. A message is also refused at once if its line is full. If a message waits, a
    /// [block](crate::Rule::block) counts it only if it is refused in the end. The bounds are
    /// [`max_waiting`](Self::max_waiting) and [`max_in_line`](Self::max_in_line). Without a [timer](Self::timer) no
    /// message waits, and [`check`](Self::check) returns a [warning](crate::observe::SetupWarningKind::NoTimer).
    pub fn max_message_wait(self, max: Duration) -> Self {
        self.change(|settings| settings.max_message_wait = max)
    }

    /// Returns the number of requests that wait now, in queues and in line, in this layer and its services.
    ///
    /// To get the number of units that wait for one key in all processes, call [`peek`](Limiter::peek) and
    /// read the [`position`](crate::limiter::ChargeDecision::position).
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.compiled().delays.as_ref().map_or(0, |delays| delays.waiting())
    }
}

/// # Observing
impl<L: Limiter, O> RateLimitLayer<L, O> {
    /// Sets the observer, which sees every outcome, every setup warning and every failure of the limiter. A layer has
    /// one observer: a second call replaces it. The guide shows [an observer that contains another
    /// observer](crate::guide::observing#an-observer-of-your-own).
    ///
    /// The limiter gets the observer when the layer makes its first service, and reports its
    /// [events](crate::observe::LimiterEvent) to the observer. A limiter reports each event to each of its observers
    /// once, even if several layers and its builder gave it the same observer; see [`Observer::identity`]. A limiter
    /// keeps at most 32 different observers, including those of its builder. Further observers get the layer's
    /// reports, but no events of the limiter. So layers that are made often, for example one for each customer,
    /// should share one observer.
    pub fn observer(self, observer: impl Observer + 'static) -> Self {
        self.change(|settings| settings.observer = Some(Arc::new(observer)))
    }

    /// Sets whether the [`Outcome`](crate::outcome::Outcome) is put into the extensions of every request that passes,
    /// and of its response. By default it is not. The response of a refusal always has the outcome.
    ///
    /// A response keeps the outcome of an inner layer that refused the request; otherwise it has the
    /// outcome of the outermost layer.
    ///
    /// In axum a handler takes the outcome as an argument, `outcome: Outcome`. If the outcome is not exposed, the
    /// client gets a 500. Take an `Option<Outcome>` if the layer can be disabled.
    pub fn expose_outcome(self, expose_outcome: bool) -> Self {
        self.change(|settings| settings.expose_outcome = expose_outcome)
    }

    /// Changes a setting. Services that were made before, and clones, keep the old value.
    fn change(mut self, change: impl FnOnce(&mut Settings)) -> Self {
        change(Arc::make_mut(&mut self.settings));
        self.compiled = Arc::default();
        self.entered()
    }
}

impl<L: Limiter, O> RateLimitLayer<L, O> {
    /// Registers the layer with the switches of its rules and with its source of rules. So the switches and the
    /// source refuse a quota that the limiter does not support, even before the layer serves.
    fn entered(self) -> Self {
        if self.settings.can_change() {
            self.configuration();
        }
        self
    }

    fn configuration(&self) -> &Configuration<L> {
        self.compiled.get_or_init(|| {
            if let Some(observer) = &self.settings.observer {
                self.limiter.hooks().observe(observer);
                if let Some(sourced) = &self.settings.source {
                    let source = Arc::downgrade(&sourced.source);
                    let identity = source.as_ptr().cast::<()>().addr();
                    observer.on_rules(&RulesReader::new(identity, move || Some(source.upgrade()?.in_force())));
                }
            }
            let compiled = Arc::new(Compiled::new(Arc::clone(&self.limiter), Settings::clone(&self.settings)));
            let latest = follow(&compiled);
            Configuration { compiled, latest }
        })
    }

    #[cfg(any(feature = "rules", feature = "status"))]
    pub(crate) fn limiter(&self) -> &L {
        &self.limiter
    }

    /// Returns the policies of each rule, with its linked policy, and the rule's present mode.
    #[cfg(feature = "status")]
    pub(crate) fn rules_in_force(&self) -> Vec<(Vec<Policy>, crate::mode::Mode)> {
        let compiled = self.compiled();
        let rules = compiled.settings.rules.iter().map(|bound| {
            let linked = bound.rule().linked.iter().map(|linked| &linked.policy);
            (bound.policies().iter().chain(linked).cloned().collect(), compiled.mode_of(bound))
        });
        rules.collect()
    }

    /// Returns the configuration that is in force now.
    pub(super) fn compiled(&self) -> Arc<Compiled<L>> {
        let Configuration { compiled, latest } = self.configuration();
        latest.as_ref().map_or_else(|| Arc::clone(compiled), |latest| latest.get())
    }
}

/// # Misconfigurations
impl<L: Limiter, O> RateLimitLayer<L, O> {
    /// Checks for likely misconfigurations. Returns the first [warning](crate::observe::SetupWarningKind) about this
    /// layer's setup, about other layers that serve with the same limiter, or about the requests that this layer has
    /// seen.
    ///
    /// Call this method when everything is set up, and in tests after a request. The layer's
    /// [observer](Self::observer) gets every warning.
    ///
    /// ```
    /// use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, Rule, key};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = MemoryLimiter::new();
    /// let read = RateLimitLayer::new(
    ///     limiter.clone(),
    ///     Rule::new("api", Quota::per_second(50))?,
    ///     key::peer_ip(),
    /// );
    /// let write =
    ///     RateLimitLayer::new(limiter, Rule::new("api", Quota::per_second(5))?, key::peer_ip());
    /// read.check()?;
    /// assert_eq!(write.check().unwrap_err().kind().as_str(), "two-quotas");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Returns the first warning. The warning's text says how to fix the problem.
    pub fn check(&self) -> Result<(), SetupWarning> {
        let compiled = self.compiled();
        compiled.look_at_setup();
        compiled.diagnostics.first().map_or(Ok(()), Err)
    }
}

/// # States
impl<L: Limiter, O> RateLimitLayer<L, O> {
    /// Returns the layer's policies as the limiter gets them, with the names that they have [in this
    /// layer](Self::and). The policies of the rules come first, in the order of the rules, and then the
    /// rules' [blocks](crate::Rule::block) and [meters](crate::Rule::overage).
    #[must_use]
    pub fn policies(&self) -> Arc<[Policy]> {
        Arc::clone(&self.compiled().policies)
    }

    /// Returns the block of this name, with which you close and open keys and count strikes by hand. The block
    /// belongs to a [`Rule::block`](crate::Rule::block), or to a rule whose quota is a [block](crate::Quota::block).
    /// Returns `None` if the layer has no block of this name.
    ///
    /// The name is the one that the block has in [this layer](Self::and). If a file of rules changes the block's
    /// quota, call this method again.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_ratelimit::{Key, MemoryLimiter, Quota, RateLimitLayer, Rule, key};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let hour = Duration::from_secs(3_600);
    /// let login = Rule::new("login", Quota::per_minute(5))?
    ///     .block("login-block", Quota::block(3, hour, hour)?)?;
    /// let limit = RateLimitLayer::new(MemoryLimiter::new(), login, key::peer_ip());
    ///
    /// let blocks = limit.blocks("login-block").ok_or("there is no such block")?;
    /// let address = Key::of(std::net::Ipv4Addr::LOCALHOST).unwrap();
    /// assert_eq!(blocks.block(&address).await?, Some(hour));
    /// blocks.unblock(&address).await?;
    /// # assert_eq!(blocks.blocked_for(&address).await?, None);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn blocks(&self, name: &str) -> Option<Blocks<Arc<L>>> {
        self.by_hand(name, Blocks::new)
    }

    /// Returns the meter of this name, which you can read and settle. The meter belongs to a
    /// [`Rule::overage`](crate::Rule::overage), or to a rule whose quota is a [meter](crate::Quota::meter). Returns
    /// `None` if the layer has no meter of this name.
    #[must_use]
    pub fn meters(&self, name: &str) -> Option<Meters<Arc<L>>> {
        self.by_hand(name, Meters::new)
    }

    fn by_hand<T>(&self, name: &str, new: impl Fn(Arc<L>, Policy) -> Result<T, ConfigError>) -> Option<T> {
        let compiled = self.compiled();
        let mut named = compiled.policies.iter().filter(|policy| policy.name() == name);
        named.find_map(|policy| new(Arc::clone(&compiled.limiter), policy.clone()).ok())
    }

    /// Returns the state of a key under each of the layer's [policies](Self::policies), and takes nothing. A rule
    /// of [plans](crate::Rule::plans) has an entry for each plan.
    ///
    /// A rule whose requests [bring their quotas](crate::Rule::quota_from) has one entry, under a [placeholder
    /// policy](Policy::has_quota_of_request). The used units of the key are the limit minus the remaining units, as
    /// under [`Quota::unlimited`]. To see a key under a quota of your choice, call [`Limiter::peek`] with a policy
    /// that has the rule's name and that quota.
    ///
    /// The key is looked up under every policy, independently of the extractor of its rule. To ask about one policy
    /// only, use [`Limiter::peek`].
    ///
    /// # Errors
    /// Returns the limiter's error.
    pub fn peek<'a>(
        &'a self,
        key: &'a Key,
    ) -> impl Future<Output = Result<Vec<(Policy, ChargeDecision)>, L::Error>> + Send + 'a {
        let compiled = self.compiled();
        async move {
            let mut all = Vec::with_capacity(compiled.policies.len());
            // Asks about the plans one at a time, because plans share a name, and a set has no two charges for one
            // name.
            for policy in &*compiled.policies {
                let decision = compiled.limiter.peek(&[Charge::new(policy, key).cost(0)]).await?;
                all.extend(decision.charges().first().map(|found| (policy.clone(), found.clone())));
            }
            Ok(all)
        }
    }

    /// Forgets the units that a key has used under each of the layer's [policies](Self::policies), and opens the key's
    /// blocks. This method also forgets the key's meters, so bill the meters first. To open a block but keep the used
    /// units, use [`blocks`](Self::blocks).
    ///
    /// The key is reset under every policy, independently of the extractor of its rule. So [`Key::global`] resets the
    /// allowances that all clients share. To reset one policy only, use [`Limiter::reset`].
    ///
    /// With Redis or another store, other processes remember denials, and may go on refusing the key for about a
    /// second.
    ///
    /// ```
    /// use tower_ratelimit::{Key, MemoryLimiter, Policy, Quota, RateLimitLayer, Rule, key};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let quota = Quota::per_minute(100);
    /// let limit = RateLimitLayer::new(
    ///     MemoryLimiter::new(),
    ///     Rule::new("client", quota)?,
    ///     key::header("x-api-key"),
    /// )
    /// .and(Rule::new("team", quota)?, key::header("x-team"));
    /// let policies = limit.policies();
    /// let names: Vec<&str> = policies.iter().map(Policy::name).collect();
    /// assert_eq!(names, ["client", "team"]);
    ///
    /// let alice = Key::of("alice").unwrap();
    /// for (policy, status) in limit.peek(&alice).await? {
    ///     println!("{}: {} of {} left", policy.name(), status.remaining(), status.limit());
    /// }
    /// limit.reset(&alice).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Returns the limiter's error. Policies after the failed policy are not reset.
    pub fn reset<'a>(&'a self, key: &'a Key) -> impl Future<Output = Result<(), L::Error>> + Send + 'a {
        let compiled = self.compiled();
        async move {
            for policy in &*compiled.policies {
                reset_under(&*compiled.limiter, policy, key).await?;
                compiled.delays.iter().for_each(|delays| delays.let_first_ask(policy, key));
            }
            compiled.accounts.iter().for_each(|accounts| accounts.let_ask(|(_, _, of)| of == key));
            Ok(())
        }
    }
}

/// Forgets the units that a key has used under one policy of a layer.
pub(crate) async fn reset_under<L: Limiter>(limiter: &L, policy: &Policy, key: &Key) -> Result<(), L::Error> {
    limiter.reset(policy, key).await?;
    // Requests in flight have a state of their own, apart from the state of a rate.
    let in_flight = policy.with_quota(Quota::concurrent(1));
    if policy.has_quota_of_request() && limiter.supports(in_flight.quota()).is_ok() {
        limiter.reset(&in_flight, key).await?;
    }
    Ok(())
}

impl<S, L: Limiter, O: Clone> Layer<S> for RateLimitLayer<L, O> {
    type Service = RateLimit<S, L, O>;

    fn layer(&self, inner: S) -> Self::Service {
        let compiled = self.compiled();
        compiled.look_at_setup();
        RateLimit::new(inner, compiled, self.configuration().latest.clone(), self.overflow.clone())
    }
}

impl<L, O: Clone> Clone for RateLimitLayer<L, O> {
    fn clone(&self) -> Self {
        Self {
            limiter: Arc::clone(&self.limiter),
            settings: Arc::clone(&self.settings),
            overflow: self.overflow.clone(),
            compiled: Arc::clone(&self.compiled),
        }
    }
}

impl<L, O> fmt::Debug for RateLimitLayer<L, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimitLayer").field("rules", &self.settings.rules).finish_non_exhaustive()
    }
}
