//! The Tower middleware: a layer that lets a request through, or answers it with a refusal.
//!
//! ```text
//! request ─ when? ─ extractor ─▶ charges ─▶ Limiter::take ─▶ Decision ─▶ (delay ─▶) inner service │ overflow │ refusal
//!                                                                            └─ header fields on the way out ─┘
//! ```
//!
//! One limit for each client address, in an axum application:
//!
//! ```
//! use axum::Router;
//! use axum::routing::get;
//! use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, key};
//!
//! let limit = RateLimitLayer::new(MemoryLimiter::new(), Quota::per_minute(100), key::peer_ip());
//! let app: Router = Router::new().route("/", get(|| async { "hello" })).layer(limit);
//! // Served with `app.into_make_service_with_connect_info::<SocketAddr>()`: else no request has a peer's address.
//! ```
//!
//! Several policies, of which each request must meet all that apply to it:
//!
//! ```
//! use tower_ratelimit::key::{self, TrustedProxies};
//! use tower_ratelimit::{Key, MemoryLimiter, MissingKey, OnError, Policy, Quota, RateLimitLayer};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let everyone = Policy::new("everyone", Quota::per_second(5_000))?;
//! let client = Policy::new("client", Quota::per_minute(300).burst(50)?)?;
//! let search = Policy::new("search", Quota::per_second(10))?
//!     .when(|request| request.uri.path().starts_with("/search"))
//!     .missing_key(MissingKey::Shared);
//!
//! let limit = RateLimitLayer::new(MemoryLimiter::new(), everyone, key::global())
//!     .and(client, key::client_ip(TrustedProxies::count(1)?))
//!     .and(search, |request| Key::of((request.headers.get("x-api-key"), "search")))
//!     .on_error(OnError::Allow);
//! # Ok(()) }
//! ```
//!
//! # Where to put the layer
//!
//! * **CORS outside of it.** A browser shows a script nothing of a refusal without `Access-Control-Allow-Origin`, and hides
//!   the rate-limit fields and `Retry-After` unless CORS exposes them by name. A CORS layer outside also answers preflight
//!   requests before they are charged; where it cannot be, see [`RateLimitLayer::exempt_preflight`].
//! * **Tracing outside of it,** so that refusals are seen; **compression and body limits on either side.**
//! * **Authentication outside of it** if the key is a user's, or else the key is whatever the client claims. But what is
//!   dear to check, such as a password, wants a limit by address outside of the check as well.
//! * **In axum**, `Router::layer` covers unknown paths too, `route_layer` only known ones. With `ServiceBuilder` the first
//!   layer is the outermost, with several calls of `Router::layer` the last one is.
//! * **With tonic**, `Server::layer`; one layer value serves HTTP and gRPC alike, since a refusal takes the shape of
//!   the request's [`Protocol`]. A `GrpcWebLayer` belongs outside of it.
//! * **In several layers** only where something lies between them that a layer has to protect; see
//!   [below](#nested-layers). Tiers that belong together go into one layer, by [`RateLimitLayer::and`]: it makes one
//!   decision in one round trip, and takes from all of them or from none.
//!
//! # What becomes of a request
//!
//! | its quota says | in [`Mode::Enforce`](crate::Mode) | in `Mode::Degrade` | in `Mode::Shadow` |
//! |---|---|---|---|
//! | yes | passes, charged | passes, charged | passes, charged |
//! | yes, with a departure (a leaky queue in a layer with a [timer](RateLimitLayer::delay)) | waits, then passes, charged | passes, charged | passes, charged |
//! | the same, and as many wait as [may](RateLimitLayer::max_waiting) | as no | passes, charged | passes, charged |
//! | no | goes to the [overflow](RateLimitLayer::overflow) if that is ready, else is refused; nothing is charged to any rule | passes, the service is told; charged to the rules that say yes | passes; charged to the rules that say yes |
//! | no, in a rule with a [meter](Rule::overage) that has room | passes; the meter is charged instead | passes, the service is told; nothing is metered | passes; nothing is metered |
//! | no, in a rule with a [block](Rule::block) | is refused, and that is a strike | passes, the service is told; a strike | passes; a strike |
//! | whatever, and the key is blocked | is refused | passes, the service is told; the rule charges nothing | passes; the rule charges nothing |
//! | there is no key ([`MissingKey::Reject`]) | is refused, 400 | passes, the service is told | passes |
//! | the limiter failed | as [`OnError`] says | passes, if no enforced rule applies | passes, if no enforced rule applies |
//!
//! Modes go with every quota, with [several](crate::Policy::several), [plans](crate::Policy::choose), conditions and costs:
//! the rule's mode is that of each of its quotas. Where several rules say no, one that is enforced refuses; else one that
//! degrades is told; else [`OutcomeKind`](crate::OutcomeKind) tells of one in shadow.
//!
//! # Nested layers
//!
//! Nested layers are independent: each keeps what it took, whatever happens further in. A limit by address outside of a
//! password check therefore bounds how often the check runs, also for a client that an inner limit refuses.
//!
//! The price of independence is that a refused client uses up outer limits. If all clients share an outer limit, one client
//! can exhaust it. Put both limits into one layer by [`RateLimitLayer::and`], or, if something has to lie between them, let
//! the outer layer refund what an inner limit refuses: [`RateLimitLayer::refund_nested`].
//!
//! Header fields: those of an inner layer are merged, each policy listed once, the tightest in fields with one value, and
//! the longest `Retry-After`.
//!
//! # Defaults
//!
//! Where nothing is said, a layer does what an attacker does not like. Each choice that trades safety is asked for:
//!
//! | when | by default | asked for with |
//! |---|---|---|
//! | a request over its quota | it is refused, and nothing is charged to any rule | [`Mode`](crate::Mode), [`RateLimitLayer::overflow`] |
//! | a request without a key | it is refused with 400 | [`Rule::missing_key`] |
//! | the limiter fails | the request is refused with 503 | [`RateLimitLayer::on_error`], [`FallbackLimiter`](crate::FallbackLimiter) |
//! | an inner layer refuses | the outer layers keep their charge | [`RateLimitLayer::refund_nested`] |
//! | a request is aborted | it costs at least its reservation | [`Rule::on_aborted`] |
//! | the cost is settled later | at least one unit is reserved, so no request passes in debt | - |
//! | requests wait in queues | no more than 1,000 in a layer, over all keys; others are refused | [`RateLimitLayer::max_waiting`] |
//! | a request says who it is from | no header is believed; the client is the peer of the connection | [`key::client_ip`](crate::key::client_ip) with [`TrustedProxies`](crate::key::TrustedProxies) |
//! | an IPv6 address | its /64 is one client | [`Prefixes`](crate::key::Prefixes) |
//! | an access list, and an unknown address | the list does not allow it | - |
//! | a CORS preflight request | it is charged as any other | [`RateLimitLayer::exempt_preflight`] |
//! | a refusal, and a cache | it has `Cache-Control: no-store` | - |
//! | a response in place of the usual one ([degraded](crate::Mode::Degrade), or from an overflow), and a cache | it has `Cache-Control: no-store` | a `Cache-Control` that the service sets |
//! | a refusal, and gRPC | only a request that is gRPC's in every respect gets gRPC's status 200 | - |
//! | what a response carries inside the server | no outcome, so nothing that middleware could leak | [`RateLimitLayer::expose_outcome`] |
//!
//! A limiter has defaults of its own: `MemoryLimiter` is [bounded](crate::limiter::memory), and `RedisLimiter` has a
//! deadline, a bounded queue, and stores no caller's key in clear.
//!
//! # Costs that are known in the end
//!
//! [`Rule::charge_when`] and [`Rule::give_back_when`] let the response's head say whether a request stays charged;
//! [`Rule::settle_by_bill`], [`Rule::settle_by_response`] and [`Rule::settle_by_body`] make the cost a reservation, which is
//! settled by what the request cost in the end. The order of events:
//!
//! 1. Everything is taken before the service is called: what is unknown yet is taken as if it will be charged.
//! 2. A request that never reached the service, or that a layer refunds since a limit within
//!    [refused it](RateLimitLayer::refund_nested), is refunded whole.
//! 3. Aborted (the client disconnects, a panic, an error), it costs at least its reservation; [`Rule::on_aborted`] can
//!    choose otherwise.
//! 4. The response's head decides by outcome, and settles what depends on nothing else. The header fields tell what is left
//!    after that; what is still open they tell as reserved.
//! 5. The end of the body settles the rest. If the body is dropped before its end, the request was aborted. A stream is
//!    charged once.
//!
//! What was metered beyond a quota is given back and settled as what was taken from it; a strike that a refusal was stays.
//!
//! A settlement is sent to a remote limiter and not waited for. If it fails, the [observer](RateLimitLayer::observer) is told
//! where that is known at once, and the reservation stays as it was.
//!
//! # Limits that only a handler knows
//!
//! A key or a cost may be known only after the body was parsed. Then the handler asks a layer that it has in its state:
//! [`RateLimitLayer::admit`] decides by the layer's rules and settings, and its error is the layer's own refusal. In a
//! handler of tonic it is `admit_call` (feature `tonic`).
//!
//! # Deployment
//!
//! * A limiter in memory counts for its own process. With *n* processes a client has up to *n* quotas, and a restart gives
//!   every client a fresh one.
//! * Behind a proxy [`key::peer_ip`](crate::key::peer_ip) is the proxy's address, and all clients share one allowance: use
//!   [`key::client_ip`](crate::key::client_ip). It believes no header field that was not asked for by name.
//! * A key that the client can make up, as a path, a header field that nobody checked, or a cookie, is a fresh allowance
//!   each time. Limit by address besides.
//! * A streaming request or response is charged once, when it begins. A `HEAD` or a retry costs as much as any other.
//! * An admitted request goes on at once. The [delay](crate::ChargeDecision::delay) that a leaky queue gives is waited for
//!   only in a layer that has a timer for it: [`RateLimitLayer::delay`].
//!
//! # Differences from `tower::limit::RateLimit`
//!
//! | | [`RateLimit`] | `tower::limit::RateLimit` |
//! |---|---|---|
//! | Over the limit | answers with a refusal at once, or lets the request wait in a bounded queue | is not ready, so callers wait |
//! | Counts | for each key, by any number of policies | all requests of one service value |
//! | `Clone` | yes, and clones share the allowance | no; behind a `Buffer` each clone of the whole waits in one queue |
//! | Algorithms | each of [`Algorithm`](crate::Algorithm) | fixed windows that begin with a request |
//! | Works on | `http::Request` | any request |
//!
//! To wait for one's turn with requests of any type, tower's is the right one.

mod access;
mod admit;
mod after;
mod bill;
mod body;
mod bound;
mod charging;
mod companions;
mod decided;
mod delay;
pub(crate) mod extract;
mod future;
mod headers;
mod late;
mod layer;
mod modes;
mod nested;
mod overflow;
mod overrides;
mod quiet;
mod refusal;
mod rule;
mod screen;
mod service;
mod settings;
mod switch;
mod telling;
mod watch;

pub use access::{Access, AccessList, AccessListError, AccessListErrorKind};
pub use admit::{Admission, Refused};
pub use after::OnAborted;
pub use bill::Bill;
pub use body::{Body, RefusalBody};
#[cfg(feature = "tokio")]
pub use delay::TokioTimer;
pub use delay::{Sleep, Timer};
pub use future::ResponseFuture;
pub use headers::{Headers, HeadersError, HeadersErrorKind, Jitter, LegacyHeaders, ResetEncoding, ResetMeaning, When};
pub use layer::{OnError, RateLimitLayer};
pub use overflow::{NoOverflow, Overflow, OverflowTo};
pub use overrides::PlanOverrides;
pub use refusal::{GrpcCode, Protocol, Refusal, Refusals};
pub use rule::{IntoRule, MissingKey, Rule};
pub use service::RateLimit;
pub use switch::{QuotaSwitch, QuotaSwitchError, QuotaSwitchErrorKind};
