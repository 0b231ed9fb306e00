//! The layer, and what can be set on it.

use std::fmt;
use std::future::Future;
use std::sync::Arc;

use http::request::Parts;
use tower_layer::Layer;

use super::access::{AccessList, BoundList};
use super::bound::BoundRule;
use super::charging::Shared;
use super::delay::Timer;
use super::headers::Headers;
use super::overflow::{NoOverflow, OverflowTo};
use super::refusal::Refusals;
use super::rule::IntoRule;
use super::service::RateLimit;
use super::settings::Settings;
use super::switch::Live;
use crate::decision::ChargeDecision;
use crate::key::{IntoKey, Key};
use crate::limiter::{Charge, Limiter};
use crate::misuse::Misuse;
use crate::mode::ModeSwitch;
use crate::outcome::Observer;
use crate::policy::Policy;

/// A [`Layer`] that limits the rate of requests.
///
/// Each rule is a policy with an extractor: a closure over the request's head that returns whose allowance is charged.
/// All rules of a layer make one decision: all their charges are taken, or none is.
///
/// Clones of a layer, and all services it makes, share one allowance for each key, since they share one limiter.
///
/// ```
/// use tower_ratelimit::{MemoryLimiter, Policy, Quota, RateLimitLayer, key};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = MemoryLimiter::new();
/// let layer = RateLimitLayer::new(limiter, Quota::per_minute(100), key::peer_ip())
///     .and(Policy::new("token", Quota::per_hour(1_000))?, |request| {
///         request.headers.get("authorization").cloned()
///     });
/// # Ok(()) }
/// ```
///
/// The type names nothing but the limiter, so it can stand in a struct's field or be returned:
///
/// ```
/// use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, key};
///
/// struct App {
///     limit: RateLimitLayer<MemoryLimiter>,
/// }
///
/// fn limit() -> RateLimitLayer<MemoryLimiter> {
///     RateLimitLayer::new(MemoryLimiter::new(), Quota::per_second(5), key::header("x-api-key"))
/// }
/// ```
pub struct RateLimitLayer<L, O = NoOverflow> {
    shared: Arc<Shared<L>>,
    /// Where the configuration is found that is in force, if quotas follow switches.
    live: Option<Arc<Live<L>>>,
    overflow: O,
}

impl<L: Limiter + Clone> RateLimitLayer<L> {
    /// A layer with one rule: `rule` is a quota, a policy or a [`Rule`](super::Rule), and `extract` returns the key of a
    /// request: one of those in [`key`](crate::key), or a closure.
    ///
    /// A closure that returns what it borrows wraps it: `|request| Key::of(request.uri.path())`.
    #[must_use]
    pub fn new<E, K>(limiter: L, rule: impl IntoRule, extract: E) -> Self
    where
        E: Fn(&Parts) -> K + Send + Sync + 'static,
        K: IntoKey,
    {
        let rule = BoundRule::new(rule.into_rule(), extract);
        Self::of(limiter, Settings::new(rule), NoOverflow)
    }
}

impl<L: Limiter + Clone, O> RateLimitLayer<L, O> {
    /// Adds a rule. A request passes if every rule that applies to it allows it; if one does not, nothing is taken from
    /// the others either.
    ///
    /// The names of a layer's policies are unique. A policy whose name is taken in this layer already is numbered:
    /// with `api` twice, the second is `api-2` in header fields, metrics and stored keys. So the same quota by address
    /// and by user is two allowances, and never one by accident.
    #[must_use]
    pub fn and<E, K>(self, rule: impl IntoRule, extract: E) -> Self
    where
        E: Fn(&Parts) -> K + Send + Sync + 'static,
        K: IntoKey,
    {
        let mut rule = BoundRule::new(rule.into_rule(), extract);
        self.change(|settings| {
            rule.place_behind(&settings.rules);
            settings.rules.push(rule);
        })
    }

    /// Sets which header fields responses get.
    #[must_use]
    pub fn headers(self, headers: Headers) -> Self {
        self.change(|settings| settings.headers = headers)
    }

    /// Sets how a refusal is answered.
    #[must_use]
    pub fn refusals(self, refusals: Refusals) -> Self {
        self.change(|settings| settings.refusals = refusals)
    }

    /// Sets what becomes of a request when the limiter fails.
    #[must_use]
    pub fn on_error(self, on_error: OnError) -> Self {
        self.change(|settings| settings.on_error = on_error)
    }

    /// Sets who sees every outcome, and every failure of the limiter.
    #[must_use]
    pub fn observer(self, observer: impl Observer + 'static) -> Self {
        self.change(|settings| settings.observer = Some(Arc::new(observer)))
    }

    /// Sets whether the [`Outcome`](crate::Outcome) is put into the extensions of every request that passes, and of its
    /// response. Off by default; a refusal's response has it always.
    ///
    /// A response keeps the outcome of an inner layer that refused; otherwise the outermost layer's stays.
    ///
    /// In axum, take it as `Option<Extension<Outcome>>`: a handler that takes `Extension<Outcome>` answers 500 if the
    /// outcome is not exposed, or if the layer is disabled.
    #[must_use]
    pub fn expose_outcome(self, expose_outcome: bool) -> Self {
        self.change(|settings| settings.expose_outcome = expose_outcome)
    }

    /// Sets a [`Mode`](crate::Mode) for all rules of the layer, or a [`ModeSwitch`] for it. Of this one and a rule's own the
    /// milder holds: in shadow no rule of the layer refuses or degrades, whatever it says itself.
    ///
    /// A layer in which no rule that applies to a request is enforced lets it pass also if the limiter fails.
    #[must_use]
    pub fn mode(self, mode: impl Into<ModeSwitch>) -> Self {
        let mode = mode.into();
        self.change(|settings| settings.mode = Some(mode))
    }

    /// Looks every request up in a list before anything is charged, by the key that `extract` returns: what is allowed is
    /// exempt from this layer, what is denied is refused with 403 (`PERMISSION_DENIED` over gRPC), and the limiter is not
    /// asked. Called more than once, the first list that says anything decides. A request without this key is in no list.
    ///
    /// Where networks are listed, take an extractor that returns the whole address, such as
    /// [`key::peer_network`](crate::key::peer_network) or [`key::client_network`](crate::key::client_network) with
    /// [`Prefixes::exact()`](crate::key::Prefixes::exact): to [`key::peer_ip`](crate::key::peer_ip) an IPv6 client is the
    /// first address of its /64, and narrower networks of the list do not find it.
    #[must_use]
    pub fn access<E, K>(self, list: &AccessList, extract: E) -> Self
    where
        E: Fn(&Parts) -> K + Send + Sync + 'static,
        K: IntoKey,
    {
        let list = BoundList::new(list.clone(), extract);
        self.change(|settings| settings.access.push(list))
    }

    /// Sets whether CORS preflight requests are exempt: `OPTIONS` with `Origin` and `Access-Control-Request-Method`. Off
    /// by default, since anyone can send those too. A CORS layer *outside* this one answers them before they come here,
    /// which is better.
    #[must_use]
    pub fn exempt_preflight(self, exempt_preflight: bool) -> Self {
        self.change(|settings| settings.exempt_preflight = exempt_preflight)
    }

    /// Sets whether the layer refunds what a request took when a layer within refuses it for its rate. Off by default:
    /// nested layers are independent, and each keeps what it took.
    ///
    /// **The price:** a client that an inner limit refuses pays nothing here, so it can make the service do everything that
    /// lies between the two layers, as often as it likes. Ask for a refund only if that costs little; never around a
    /// password check or another service. Limits that belong together are better put into one layer by
    /// [`and`](Self::and), which takes from all of them or from none.
    ///
    /// * A refusal counts if its outcome is [`Limited`](crate::OutcomeKind::Limited) or
    ///   [`Blocked`](crate::OutcomeKind::Blocked), whatever limiter the inner layer has and however deep it lies. A missing
    ///   key, a denied client, a failed limiter or an error of the service refunds nothing.
    /// * The layers find each other by the extensions of the request: an inner layer may run in another task. The charge is
    ///   kept if middleware in between replaces the extensions.
    /// * If middleware in between copies the request, to retry it say, the charge is refunded only if a limit refused each
    ///   copy. A handler that calls another limited service with a copy of the extensions is such a case, too.
    /// * The refund comes with the response, whatever middleware in between made of it, or when the response's future is
    ///   dropped after the refusal. If the service panics in `call`, the charge is kept.
    /// * The header fields say what is left after the refund: the limiter is asked again if it answers at once, else what
    ///   remains is calculated. A refund to a leaky queue has no effect once another request has queued behind it.
    ///
    /// ```
    /// use tower_ratelimit::{MemoryLimiter, Policy, Quota, RateLimitLayer, key};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = MemoryLimiter::new();
    /// // One client that the inner layer refuses does not use up what all clients share.
    /// let everyone = Policy::new("everyone", Quota::per_second(5_000))?;
    /// let outer = RateLimitLayer::new(limiter.clone(), everyone, key::global()).refund_nested(true);
    /// let search = RateLimitLayer::new(limiter, Policy::new("search", Quota::per_second(10))?, key::peer_ip());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn refund_nested(self, refund_nested: bool) -> Self {
        self.change(|settings| settings.refund_nested = refund_nested)
    }

    /// Sets whether the layer does anything. A layer that is not enabled passes every request and response on untouched,
    /// with the same types.
    ///
    /// Use this where a layer is wanted on some condition: `tower::util::option_layer` does not type-check in a `Router`,
    /// because responses have another body type with the layer than without it.
    ///
    /// ```
    /// use axum::Router;
    /// use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, key};
    ///
    /// # fn app(is_limited: bool) -> Router {
    /// let limit = RateLimitLayer::new(MemoryLimiter::new(), Quota::per_minute(100), key::peer_ip());
    /// Router::new().layer(limit.enabled(is_limited))
    /// # }
    /// ```
    #[must_use]
    pub fn enabled(self, enabled: bool) -> Self {
        self.change(|settings| settings.enabled = enabled)
    }

    /// Lets requests wait for the departure that a [leaky queue](crate::Quota::leaky_queue) gives them, by this timer, such as
    /// a `TokioTimer` (feature `tokio`). Without one they go on as soon as they are admitted, and only the queue's bound is
    /// kept.
    ///
    /// * A request departs at the time that the limiter said, never earlier: those of one key one interval of the quota
    ///   apart, first come first served. If it is charged to several queues, it departs at the latest of its times.
    /// * It holds nothing while it waits: the service within is made ready afterwards.
    /// * When a request is dropped while it waits, it gives back what it took, and those of the same policy, key and cost
    ///   that wait behind it in this layer move up by one. Their last place goes back to the limiter, unless somebody has
    ///   come after it, in another process say: then it stays empty, and the spacing is kept.
    /// * No request waits for longer than the queue is long: [`Quota::max_wait`](crate::Quota::max_wait).
    /// * No more than 1,000 requests of this layer wait at a time, over all keys; see [`max_waiting`](Self::max_waiting).
    /// * Whoever waits departs when it was told, by the timer, whatever the limiter's clock or the rule's mode do meanwhile.
    ///   If that clock steps back, the queue is shut for at most one full drain of what may be owed; if it steps forward,
    ///   those who come after depart as if the time that was skipped had passed.
    /// * The outcome is [`Delayed`](crate::OutcomeKind::Delayed), which is reported when the request departs, or
    ///   [`Abandoned`](crate::OutcomeKind::Abandoned) if it is dropped before.
    /// * Who waits costs memory as long as it waits; whoever does not have to wait asks for no lock.
    ///
    /// Queues in [shadow](crate::Mode::Shadow), or that [degrade](crate::Mode::Degrade), keep nobody waiting. A layer with a
    /// timer, and without any queue, is [misuse](crate::MisuseKind::NoQueue), and told so before the first request.
    #[must_use]
    pub fn delay(self, timer: impl Timer + 'static) -> Self {
        self.change(|settings| settings.timer = Some(Arc::new(timer)))
    }

    /// Sets how many requests of this layer may wait for their departure at a time, over all keys. The default is 1,000.
    ///
    /// Each waiting request holds its head, its body and its connection, and a client with many keys has a queue for each of
    /// them. At the bound, a request that would have to wait is refused as over the limit: it takes nothing, its outcome is
    /// [`Limited`](crate::OutcomeKind::Limited), and `Retry-After` is when it would have departed. A request that does not
    /// have to wait passes. With 0 no request waits. Without a [timer](Self::delay) this has no effect, since then no request
    /// waits at all.
    #[must_use]
    pub fn max_waiting(self, max_waiting: usize) -> Self {
        self.change(|settings| settings.max_waiting = max_waiting)
    }

    /// How many requests wait for their departure now, in this layer and its services.
    ///
    /// How many wait for one key, in all processes, is what a [`peek`](Limiter::peek) says by its
    /// [`position`](crate::ChargeDecision::position).
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.shared.delays.as_ref().map_or(0, |delays| delays.waiting())
    }

    /// Sends requests that are over a quota to another service, whole and with their bodies unread, instead of refusing
    /// them: it may put them into a queue and answer 202, or serve a page from a cache.
    ///
    /// It takes the requests of the service within the layer and answers with the same type; what is different is made equal
    /// by the combinators of `tower::ServiceExt`. In an axum application, a `Router` will do, or a `tower::service_fn`.
    ///
    /// * The request carries its [`Outcome`](crate::Outcome), of the kind [`Overflowed`](crate::OutcomeKind::Overflowed).
    /// * Its response gets the header fields of a refusal, `Retry-After` among them: when the same request would pass. It
    ///   also gets `Cache-Control: no-store`, unless the overflow's service has set a `Cache-Control` of its own.
    /// * Its errors are handed on as they are, as those of the service.
    /// * It does not count for the readiness of the layer's service. A clone of it is asked for its own at the moment when
    ///   it is needed: if it is not ready then, the request is refused as without it. So a concurrency limit around it bounds
    ///   it, and nobody waits.
    /// * Requests without a key, or refused because the limiter failed, do not go there.
    /// * If a limit within the overflow's service refuses the request, the response carries the outcome of that refusal.
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
    /// let limit = RateLimitLayer::new(MemoryLimiter::new(), Quota::per_minute(100), key::peer_ip()).overflow(later);
    /// let app: axum::Router = axum::Router::new().layer(limit);
    /// ```
    #[must_use]
    pub fn overflow<T>(self, service: T) -> RateLimitLayer<L, OverflowTo<T>> {
        RateLimitLayer { shared: self.shared, live: self.live, overflow: OverflowTo::new(service) }
    }

    /// Services made before keep what they have.
    fn change(self, change: impl FnOnce(&mut Settings)) -> Self {
        let Self { shared, live, overflow } = self;
        drop(live); // its quotas are read from their switches again
        let (limiter, mut settings) = match Arc::try_unwrap(shared) {
            Ok(Shared { limiter, settings, .. }) => (limiter, settings),
            Err(shared) => (shared.limiter.clone(), shared.settings.clone()),
        };
        change(&mut settings);
        Self::of(limiter, settings, overflow)
    }

    fn of(limiter: L, settings: Settings, overflow: O) -> Self {
        let shared = Arc::new(Shared::new(limiter, settings));
        let live = Live::of(&shared);
        Self { shared, live, overflow }
    }
}

impl<L, O> RateLimitLayer<L, O> {
    /// The configuration that is in force.
    pub(super) fn shared(&self) -> Arc<Shared<L>> {
        self.live.as_ref().map_or_else(|| Arc::clone(&self.shared), |live| live.current())
    }
}

impl<L: Limiter, O> RateLimitLayer<L, O> {
    /// Whether the layer is set up as it can be meant: returns the first [misuse](crate::MisuseKind) that is noticed, by its
    /// setup, by that of the other layers that serve with the same limiter, or, if this layer serves, by its requests so far.
    ///
    /// To be called when everything is set up, and in tests after a request. The layer's
    /// [observer](Self::observer) is told the same.
    ///
    /// ```
    /// use tower_ratelimit::{MemoryLimiter, Policy, Quota, RateLimitLayer, key};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = MemoryLimiter::new();
    /// let read = RateLimitLayer::new(limiter.clone(), Policy::new("api", Quota::per_second(50))?, key::peer_ip());
    /// let write = RateLimitLayer::new(limiter, Policy::new("api", Quota::per_second(5))?, key::peer_ip());
    /// read.check()?;
    /// assert_eq!(write.check().unwrap_err().kind().as_str(), "two-quotas");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// If a misuse was noticed; it says how to mend it.
    pub fn check(&self) -> Result<(), Misuse> {
        let shared = self.shared();
        shared.look_at_setup();
        shared.watch.first().map_or(Ok(()), Err)
    }
}

impl<L: Limiter, O> RateLimitLayer<L, O> {
    /// Returns the layer's policies as the limiter knows them, under the names that they have [in this layer](Self::and):
    /// those of its rules, in their order, then the [blocks](super::Rule::block) and [meters](super::Rule::overage) that go
    /// with them.
    #[must_use]
    pub fn policies(&self) -> Arc<[Policy]> {
        Arc::clone(&self.shared().policies)
    }

    /// Returns how a key stands under each of the layer's [policies](Self::policies), and takes nothing. A rule of
    /// [plans](Policy::choose) has an entry for each plan.
    ///
    /// The key is looked up under every policy, whatever the extractor of its rule is. To ask about one policy only, use
    /// [`Limiter::peek`].
    ///
    /// # Errors
    /// The limiter's own.
    pub fn peek<'a>(
        &'a self,
        key: &'a Key,
    ) -> impl Future<Output = Result<Vec<(Policy, ChargeDecision)>, L::Error>> + Send + 'a {
        let shared = self.shared();
        async move {
            let mut all = Vec::with_capacity(shared.policies.len());
            // One at a time: plans have one name, and a limiter takes no two charges for it together.
            for policy in &*shared.policies {
                let decision = shared.limiter.peek(&[Charge::new(policy, key).cost(0)]).await?;
                all.extend(decision.charges().first().map(|found| (policy.clone(), found.clone())));
            }
            Ok(all)
        }
    }

    /// Forgets what a key has used under each of the layer's [policies](Self::policies), and opens its blocks. Its meters
    /// are forgotten, too: bill them before.
    ///
    /// The key is reset under every policy, whatever the extractor of its rule is. So [`Key::global`] resets what all
    /// clients share. To reset one policy only, use [`Limiter::reset`].
    ///
    /// ```
    /// use tower_ratelimit::{Key, MemoryLimiter, Policy, Quota, RateLimitLayer, key};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let api = || Policy::new("api", Quota::per_minute(100));
    /// let limit = RateLimitLayer::new(MemoryLimiter::new(), api()?, key::header("x-api-key"))
    ///     .and(api()?, key::header("x-team"));
    /// let policies = limit.policies();
    /// let names: Vec<&str> = policies.iter().map(Policy::name).collect();
    /// assert_eq!(names, ["api", "api-2"]);
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
    /// The limiter's own. Policies after the one that failed are not reset.
    pub fn reset<'a>(&'a self, key: &'a Key) -> impl Future<Output = Result<(), L::Error>> + Send + 'a {
        let shared = self.shared();
        async move {
            for policy in &*shared.policies {
                shared.limiter.reset(policy, key).await?;
            }
            Ok(())
        }
    }
}

impl<S, L: Limiter, O: Clone> Layer<S> for RateLimitLayer<L, O> {
    type Service = RateLimit<S, L, O>;

    fn layer(&self, inner: S) -> Self::Service {
        let shared = self.shared();
        shared.look_at_setup();
        RateLimit::of(inner, shared, self.live.clone(), self.overflow.clone())
    }
}

impl<L, O: Clone> Clone for RateLimitLayer<L, O> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared), live: self.live.clone(), overflow: self.overflow.clone() }
    }
}

impl<L, O> fmt::Debug for RateLimitLayer<L, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimitLayer").field("rules", &self.shared().settings.rules).finish_non_exhaustive()
    }
}

/// What becomes of a request when the limiter fails to decide.
///
/// A third way is to let another limiter decide meanwhile: [`FallbackLimiter`](crate::FallbackLimiter).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OnError {
    /// It is refused: `503 Service Unavailable`, or the gRPC equal of it. The default: a limit never silently stops.
    #[default]
    Deny,
    /// It passes, without rate-limit header fields.
    Allow,
}
