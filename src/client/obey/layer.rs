//! [`ObeyLayer`]: the configuration.

use std::sync::Arc;
use std::time::Duration;

use tower_layer::Layer;

use super::origin::origin;
use super::service::Obey;
use super::settings::{ObeySettings, OwnQuota, WaitJitter};
use super::table::{LineTable, change};
use crate::base::head::Head;
use crate::base::time::{PERIOD_US_MAX, micros_ceil};
use crate::client::times::LONGEST_WAIT;
use crate::clock::Timer;
use crate::clock::{CalendarClock, Clock};
use crate::error::{ConfigError, ConfigErrorKind};
use crate::key::{IntoKey, Key};
use crate::limiter::{BoxLimiter, Limiter};
use crate::middleware::IntoRule;
use crate::middleware::rule::{BoundRule, TakenNames};
use crate::policy::Policy;

/// The default for how many requests of a key may wait.
const WAITING: usize = 10_000;

/// The default for how many keys a layer remembers.
const KEYS: usize = 10_000;

/// Makes a client's service obey servers: a request waits for the time that earlier responses ask for.
///
/// The layer works with every service of [`http::Request`]s that is `Clone`, such as the client of
/// `hyper-util` and the channel of `tonic`. All services of a layer and of its clones share what
/// responses have said.
///
/// ```
/// # #[cfg(feature = "tokio")] {
/// use tower::{ServiceBuilder, service_fn};
/// use tower_ratelimit::{client::ObeyLayer, clock::TokioTimer};
/// # use http::{Request, Response};
/// # let client = service_fn(|_: Request<()>| async { Ok::<_, std::convert::Infallible>(Response::new(())) });
///
/// let polite =
///     ServiceBuilder::new().layer(ObeyLayer::new(TokioTimer::new())).service(client);
/// # drop(polite);
/// # }
/// ```
///
/// # Around reqwest
///
/// `reqwest::Client` is a service of reqwest's own requests, and not of [`http::Request`]s. If you put an `ObeyLayer`
/// around a `reqwest::Client`, the compiler says
/// ``the method `ready` exists for struct `Obey<reqwest::Client>` ``, `but its trait bounds were not satisfied`.
/// Between the layer and the client, put a `service_fn` that converts the types:
///
/// ```
/// # #[cfg(feature = "tokio")] {
/// use bytes::Bytes;
/// use http::{Request, Response};
/// use tower::{ServiceBuilder, service_fn};
/// use tower_ratelimit::{client::ObeyLayer, clock::TokioTimer};
///
/// # fn polite() -> reqwest::Result<()> {
/// // Redirects that reqwest follows itself do not pass the layer.
/// let client =
///     reqwest::Client::builder().redirect(reqwest::redirect::Policy::none()).build()?;
/// let client = service_fn(move |request: Request<Bytes>| {
///     let client = client.clone();
///     async move {
///         let response = client.execute(request.try_into()?).await?;
///         Ok::<_, reqwest::Error>(Response::<reqwest::Body>::from(response))
///     }
/// });
/// let polite =
///     ServiceBuilder::new().layer(ObeyLayer::new(TokioTimer::new())).service(client);
/// # drop(tower::ServiceExt::oneshot(polite, Request::new(Bytes::new())));
/// # Ok(()) }
/// # polite().unwrap();
/// # }
/// ```
///
/// # What a crowd gains
///
/// In this simulation, 1,000 clients send as fast as they can for a minute, with a latency of 20 ms.
/// The clients share a limit of 1,000 per second on a server of this crate (`tests/client/crowd.rs`).
/// The guide [draws the results](crate::guide::being_a_client#the-crowd-drawn). Fairness is Jain's
/// index, which is 1 if the same number of requests of each client pass.
///
/// | the server sends | clients | refused | of the limit used | fairness | longest wait |
/// |---|---|---|---|---|---|
/// | draft 11 | no layer: each retries after 100 ms | 88.9 % | 99.97 % | 0.02 | for ever |
/// | draft 11 | one layer for all | 0 % | 99.7 % | 1.00 | 1.1 s |
/// | draft 11 | a layer for each, as in 1,000 processes | 42.2 % | 99.5 % | 0.78 | 34 s |
/// | only `Retry-After` | no layer | 88.9 % | 99.97 % | 0.02 | for ever |
/// | only `Retry-After` | one layer for all | 46.0 % | 84.7 % | 0.89 | 1.3 s |
/// | only `Retry-After` | one layer for all, which adapts | 2.9 % | 53.7 % | 1.00 | 3.1 s |
/// | only `Retry-After` | a layer for each, which adapts | 25.2 % | 99.9 % | 0.27 | 58 s |
///
/// * If responses say how many units remain, a shared layer sends exactly this number of requests.
/// * Processes that share no state exceed the limit together, even if each of them waits as it
///   should. Give processes without shared state a shared [quota of their own](Self::own_quota).
/// * If a server does not report what remains, clients cannot both spare the server and use its
///   whole limit.
///
/// # What it obeys
///
/// | a response | what happens to the requests after it |
/// |---|---|
/// | an error (400 and above, or a gRPC status other than `OK`) with `Retry-After` or an [equivalent](crate::client) | none is sent until then |
/// | nothing remains of a quota, with its reset | none is sent until then |
/// | 429, 503, `RESOURCE_EXHAUSTED` or `UNAVAILABLE`, without any time | none is sent for one second, then two, and so on up to 60 seconds, until a request succeeds |
/// | some requests remain | no more are sent until the next response |
///
/// * A response applies to all requests with the [key](Self::key) of the request that it answers. By
///   default the key is the origin of the request.
/// * Each wait is lengthened by 0 to 10 percent at random, so that clients do not return together. The exception
///   is a wait of less than a second in a response that is no refusal. This wait is shortened by the shortest
///   measured round trip, because the server began to count before its response left.
/// * While nothing remains, only one request is in flight at a time. So a client cannot use all of a
///   quota that refills within less than a round trip: with a round trip of 20 ms, GCRA with 1,000 per
///   second passes 50 requests per second.
/// * Requests are sent in the order in which they arrived. After a pause, the layer sends one request
///   as a probe. If the response says how many units remain, the layer then sends this number of
///   requests at once. If responses do not say what remains, each success allows one more request in
///   flight, so that the number doubles with each round trip. If no response arrives for ten seconds,
///   the layer sends the next request anyway.
/// * The [wait](Self::max_wait) of a request and the [number of waiting requests](Self::max_waiting)
///   are bounded. A request that would have to wait longer fails at once, with an
///   [`ObeyError`](super::ObeyError) that says how long the wait would be.
/// * The layer never retries. The layer reads only the heads of responses. If a gRPC status arrives in
///   trailers, after messages, the caller has to pass the status's wait to [`pause`](Self::pause).
///
/// Put the layer inside the layer that follows redirects, because a redirect may lead to another origin.
/// Put the layer outside of a concurrency limit, so that a waiting request holds no permit of that
/// limit. This layer does not refund what an outer layer has charged for a request that is not sent.
///
/// # Cost
///
/// A request locks the state of its key twice and the map of all keys once, each for a short time.
/// The work for a waiting request is O(log n) if n requests wait for its key. If the layer already
/// remembers k = [`max_keys`](Self::max_keys) keys, making room for a new key takes O(k log k).
/// Making room frees an eighth of the keys, or only one key if nearly all keys are in use or paused.
#[derive(Clone, Debug)]
pub struct ObeyLayer {
    settings: Arc<ObeySettings>,
}

impl ObeyLayer {
    /// Makes a layer whose requests wait with `timer`.
    #[must_use]
    pub fn new(timer: impl Timer + 'static) -> Self {
        Self {
            settings: Arc::new(ObeySettings {
                timer: Arc::new(timer),
                clock: Arc::new(CalendarClock),
                key: Arc::new(origin),
                own: Vec::new(),
                names: TakenNames::default(),
                max_wait: LONGEST_WAIT,
                max_waiting: WAITING,
                max_keys: KEYS,
                paces: false,
                adapts: false,
                jitter: Arc::new(WaitJitter::random()),
                table: Arc::new(LineTable::default()),
            }),
        }
    }

    /// Sets the key of a request. Requests with one key are those that the server limits together. By
    /// default the key is the origin, such as `Key::of("https://example.org:443")`, or [`Key::global`] if
    /// the request has no host. The clients of `tonic-build` send only paths, without a host. If the
    /// closure returns no key, the request is sent at once, and its response is not read.
    ///
    /// All services of a layer share their keys. So use a separate layer for each channel whose requests
    /// have no host.
    ///
    /// Errors show the key, so do not put a secret into the key.
    ///
    /// ```
    /// # #[cfg(feature = "tokio")] {
    /// use tower_ratelimit::{Key, client::ObeyLayer, clock::TokioTimer};
    ///
    /// // An API whose search has a limit of its own.
    /// let layer = ObeyLayer::new(TokioTimer::new()).key(|request| {
    ///     Key::of((request.uri.host(), request.uri.path().starts_with("/search")))
    /// });
    /// # drop(layer);
    /// # }
    /// ```
    #[must_use]
    pub fn key<K: IntoKey>(mut self, key: impl Fn(&Head<'_>) -> K + Send + Sync + 'static) -> Self {
        self.set().key = Arc::new(move |head| Key::of(key(head)));
        self
    }

    /// Adds a quota of the client's own. A request takes its cost from the quota before it is sent, and waits
    /// until the quota has enough units. By default the cost is one unit. The quota is charged under the
    /// request's [key](Self::key).
    ///
    /// `quota` is anything that a server's layer accepts as a rule: a [`Quota`](crate::Quota), or a
    /// [`Rule`](crate::Rule) of one or several quotas or plans, with a condition and a cost. If this method is
    /// called several times, every quota applies. A request takes its units from all quotas or from none, and holds
    /// no units while it waits. As in a server's layer, a policy whose name is already used gets a number: `api`
    /// becomes `api-2`.
    ///
    /// ```
    /// # #[cfg(feature = "tokio")] {
    /// use tower_ratelimit::{MemoryLimiter, Quota, Rule, client::ObeyLayer, clock::TokioTimer};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    ///
    /// let limiter = MemoryLimiter::new();
    /// let layer = ObeyLayer::new(TokioTimer::new())
    ///     .own_quota(
    ///         limiter.clone(),
    ///         Rule::all_of("vendor", [Quota::per_second(2), Quota::per_day(50_000)])?,
    ///     )?
    ///     // Searches have a limit of their own, and one of ten pages costs ten.
    ///     .own_quota(
    ///         limiter,
    ///         Rule::new("search", Quota::per_minute(100))?
    ///             .when(|request| request.uri.path() == "/search")
    ///             .cost(|request| if request.uri.query().is_some() { 10 } else { 1 }),
    ///     )?;
    /// # drop(layer);
    /// # Ok(()) }
    /// # main().unwrap();
    /// # }
    /// ```
    ///
    /// * With a limiter on Redis, all processes share the quota. The requests of a key in a process ask the
    ///   limiter one after the other, so that they are sent in order. A request to which the quota does not
    ///   apply therefore also waits behind the requests before it.
    /// * A request takes all policies of one `own_quota` call in one step. If the method was called several times, a
    ///   request charges the quotas one after the other. If a later quota denies the charge, the earlier charges are
    ///   refunded.
    /// * A token bucket admits a burst and then its refill: `Quota::per_second(50)` sends up to 99 in its first
    ///   second. If the vendor counts in strict windows, use a small burst (`.burst(1)`), or a [sliding
    ///   log](crate::Quota::sliding_log), which sends at most 50 requests in any second.
    /// * If the limiter fails, the request fails. Use a
    ///   [`FallbackLimiter`](crate::limiter::FallbackLimiter) if requests should continue without the
    ///   limiter.
    ///
    /// # Errors
    /// Returns an error if the limiter does not support a quota, or if the rule has an option that only servers
    /// have. Options that only servers have are a mode, a block or a meter, a quota switch, quotas that
    /// requests bring, a settlement, a warning, a setting for missing keys, and a limit of requests in flight.
    pub fn own_quota(mut self, limiter: impl Limiter, quota: impl IntoRule) -> Result<Self, ConfigError> {
        let rule = quota.into_rule();
        let supported = rule.policies().iter().try_for_each(|policy| limiter.supports(policy.quota()));
        // `ConfigError` has no `From` for this error, because a second `From` would keep the compiler from inferring
        // the error type of closures that use `?`.
        supported.map_err(|error| ConfigError::new(ConfigErrorKind::Unsupported, error.to_string()))?;
        if let Some(option) = rule.option_of_servers() {
            return Err(ConfigError::new(
                ConfigErrorKind::NotAnOption,
                format!(
                    "a client's own quota {:?} has {option}, which only a server's rule has: leave it out",
                    rule.policies().first().map_or("", Policy::name)
                ),
            ));
        }
        if let Some(policy) = rule.policies().iter().find(|policy| policy.limits_in_flight()) {
            return Err(ConfigError::new(
                ConfigErrorKind::NotAnOption,
                format!(
                    "a client's own quota {:?} limits requests in flight (\"{}\"), and an ObeyLayer has no such \
                     limit: hold a place with MemoryLimiter::hold while the request runs, or use tower's \
                     ConcurrencyLimit",
                    policy.name(),
                    policy.quota()
                ),
            ));
        }
        let settings = self.set();
        let mut rule = BoundRule::new(rule, |_: &Head<'_>| Key::global());
        rule.place_behind(&mut settings.names);
        settings.own.push(OwnQuota { limiter: BoxLimiter::new(limiter), rule });
        Ok(self)
    }

    /// Sets how long a request may wait, by default 5 minutes. A request that would wait longer fails at
    /// once. With zero no request waits. `max` does not bound how long the inner service takes to become
    /// ready, or how long the limiters of the [own quotas](Self::own_quota) take to answer.
    #[must_use]
    pub fn max_wait(mut self, max: Duration) -> Self {
        self.set().max_wait = max;
        self
    }

    /// Sets how many requests of a key may wait at a time, by default 10,000. A further request fails
    /// at once. With 0 no request waits.
    #[must_use]
    pub fn max_waiting(mut self, max: usize) -> Self {
        self.set().max_waiting = max;
        self
    }

    /// Sets how many keys the layer remembers at a time, by default 10,000. Each takes about 500 bytes.
    ///
    /// A key is idle if it is not paused, and none of its requests waits or is in flight. For a new
    /// key beyond this number, the layer forgets the least recently used idle keys. If no key is
    /// idle, the layer forgets one key that has no requests and is paused for longer than
    /// [`max_wait`](Self::max_wait). So servers that name absurd times cannot fill the table. If the
    /// layer can forget no key, the request fails.
    #[must_use]
    pub fn max_keys(mut self, max: usize) -> Self {
        self.set().max_keys = max;
        self
    }

    /// Spaces requests evenly until the quota's reset, if less than 20 percent of the quota remains. The
    /// spacing between two requests is at most [`max_wait`](Self::max_wait). By default, requests are not
    /// spaced: they are sent as they arrive, until nothing remains.
    #[must_use]
    pub fn pace(mut self, pace: bool) -> Self {
        self.set().paces = pace;
        self
    }

    /// Adapts the rate to servers that do not say what remains. By default the rate is not adapted, and a
    /// refusal by such a server only pauses the key.
    ///
    /// The first refusal sets the rate to half of the requests that succeeded in a second. Each later refusal halves
    /// the rate, at most once per round trip, down to one request per minute. Each success raises the rate by one
    /// request per second for each second since the rate last changed, but at most doubles the rate. Each
    /// [`own_quota`](Self::own_quota) is an upper bound.
    #[must_use]
    pub fn adapt(mut self, adapt: bool) -> Self {
        self.set().adapts = adapt;
        self
    }

    /// Sets the clock for dates in responses without `Date`: the time until such a date is measured
    /// from this clock. By default the clock shows the calendar time of the operating system.
    #[must_use]
    pub fn clock(mut self, clock: impl Clock + 'static) -> Self {
        self.set().clock = Arc::new(clock);
        self
    }

    /// Sets the seed of the random part of waits, for tests. By default the seed is random.
    #[must_use]
    pub fn jitter_seed(mut self, seed: u64) -> Self {
        self.set().jitter = Arc::new(WaitJitter::seeded(seed));
        self
    }

    /// Pauses a key, like a response with this wait in its headers. A longer wait than 366 days is
    /// shortened to 366 days. Use this method for waits that are not in headers: in the body, as Telegram
    /// writes them, or in gRPC's trailers.
    ///
    /// ```
    /// # #[cfg(feature = "tokio")] {
    /// use std::time::Duration;
    /// use tower_ratelimit::{Key, client::ObeyLayer, clock::TokioTimer};
    ///
    /// let layer = ObeyLayer::new(TokioTimer::new());
    /// // The body of a response was {"ok": false, "parameters": {"retry_after": 35}}.
    /// if let Some(key) = Key::of("https://api.telegram.org:443") {
    ///     layer.pause(&key, Duration::from_secs(35));
    /// }
    /// # }
    /// ```
    ///
    /// This method does nothing if the timer cannot sleep, or if the key is new and [`max_keys`](Self::max_keys)
    /// other keys are in use or paused. With Tokio's timer, call this method within the runtime.
    pub fn pause(&self, key: &Key, wait: Duration) {
        let (settings, now_us) = (&*self.settings, self.settings.now_us());
        if now_us == u64::MAX {
            return; // a timer that cannot sleep reports `Duration::MAX`, at which every other pause is over
        }
        let wait_us = settings.jitter.lengthen(micros_ceil(wait).min(PERIOD_US_MAX));
        if let Some(line) = settings.line(key, now_us) {
            change(&line, |line, wakers| line.halt(now_us, wait_us, wakers));
        }
    }

    /// Returns how long the requests of a key stay paused. Returns zero if the key is not paused, or if the timer
    /// cannot sleep.
    #[must_use]
    pub fn pause_of(&self, key: &Key) -> Duration {
        let line = self.settings.table.known(key);
        let opens_us = line.map_or(0, |line| crate::base::sync::lock(&line).opens_us());
        Duration::from_micros(opens_us.saturating_sub(self.settings.now_us()))
    }

    /// Forgets what responses said about a key, for example because a server has named an absurd time.
    /// Requests that already wait are not affected.
    pub fn forget(&self, key: &Key) {
        self.settings.table.forget(key);
    }

    fn set(&mut self) -> &mut ObeySettings {
        Arc::make_mut(&mut self.settings)
    }
}

impl<S> Layer<S> for ObeyLayer {
    type Service = Obey<S>;

    fn layer(&self, inner: S) -> Obey<S> {
        Obey::new(inner, Arc::clone(&self.settings))
    }
}
