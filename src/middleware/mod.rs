//! The Tower middleware: a layer that passes a request on or answers it with a refusal.
//!
//! ```text
//! request ─ when? ─ extractor ─▶ charges ─▶ Limiter::take ─▶ Decision ─▶ (delay ─▶) inner service │ overflow │ refusal
//!                                                                            └──── headers on the way out ────┘
//! ```
//!
//! [`RateLimitLayer`](crate::RateLimitLayer) is where to begin. The [guide](crate::guide) has a
//! page for each task.
//!
//! # Where to put the layer
//!
//! * **CORS outside of the layer.** Without `Access-Control-Allow-Origin`, a browser hides refusals
//!   from scripts. The browser also hides the rate limit headers, unless CORS exposes them by name.
//!   A CORS layer outside also answers preflight requests before they are charged. If the CORS
//!   layer must be inside, see [`exempt_preflight`](crate::RateLimitLayer::exempt_preflight).
//! * **Tracing outside of the layer,** so that refusals are logged.
//! * **Compression and body limits on either side.** A rate-limited service keeps the response body
//!   type of the service inside. If middleware inside of the layer changes that type, as compression
//!   and tracing do in one `ServiceBuilder`, end the layer with
//!   [`wrap_body`](crate::RateLimitLayer::wrap_body). See [`ResponseBody`].
//! * **Optionally** with `tower::util::option_layer`: the response has the same type with the layer
//!   and without it.
//! * **Authentication outside of the layer** if the key is a user's. Without authentication, the
//!   key is whatever the client claims. An expensive check, such as a password, also needs a limit
//!   by address outside of the check.
//! * **In axum,** `Router::layer` covers the routes that the router has so far, and unknown paths;
//!   `route_layer` covers only known paths. Routes that are added afterwards are not limited, so add the
//!   layer last. If `Router::layer` is called several times, the last call adds the outermost layer; in a
//!   `ServiceBuilder`, the first call does.
//! * **With tonic,** use `Server::layer`, inside of a `GrpcWebLayer`. The first layer is the outermost.
//!   Put an interceptor that authenticates before the limit, as an `InterceptorLayer`; see [the
//!   guide](crate::guide::who_is_the_client#the-user-of-a-grpc-call). One layer serves HTTP and gRPC,
//!   because a refusal has the form of the request's [`Protocol`].
//! * Use **several layers** only if the outer layer protects something that lies between the
//!   layers. Put limits that belong together into one layer, with
//!   [`RateLimitLayer::and`](crate::RateLimitLayer::and).
//!
//! # What happens to a request
//!
//! | the quota's answer | in [`Mode::Enforce`](crate::Mode) | in `Mode::Degrade` | in `Mode::Shadow` |
//! |---|---|---|---|
//! | allowed | passes, charged | passes, charged | passes, charged |
//! | allowed with a departure (a leaky queue in a layer with a [timer](crate::RateLimitLayer::timer)) | waits, then passes, charged | passes, charged | passes, charged |
//! | allowed with a departure, and [too many requests](crate::RateLimitLayer::max_waiting) wait already | as denied | passes, charged | passes, charged |
//! | denied by a concurrency limit with a [wait](crate::Quota::max_wait), in a layer with a timer | waits in line, then passes, charged, or is refused | passes with its outcome; charged to the rules that allow it | passes; charged to the rules that allow it |
//! | denied | goes to the [overflow](crate::RateLimitLayer::overflow) if that is ready, otherwise is refused; no rule is charged | passes with its outcome; charged to the rules that allow it | passes; charged to the rules that allow it |
//! | denied, and the rule has a [meter](crate::Rule::overage) with room | passes; the meter is charged instead | passes with its outcome; nothing is metered | passes; nothing is metered |
//! | denied, and the rule has a [block](crate::Rule::block) | is refused, and counts as a strike | passes with its outcome; a strike | passes; a strike |
//! | the key is blocked | is refused | passes with its outcome; the rule charges nothing | passes; the rule charges nothing |
//! | the key is missing ([`MissingKey::Reject`](crate::MissingKey::Reject)) | is refused with 400 | passes with its outcome | passes |
//! | the limiter failed | as [`OnError`](crate::OnError) says | passes, if no enforced rule applies | passes, if no enforced rule applies |
//!
//! A rule's mode is the mode of each of its quotas. If several rules deny a request, a rule that
//! enforces refuses it. If none of these rules enforces, a rule that degrades sets the outcome. If
//! none of these rules enforces or degrades, the outcome is
//! [`ShadowLimited`](crate::observe::OutcomeKind::ShadowLimited).
//!
//! # Nested layers
//!
//! Nested layers are independent: each keeps its own charges, independently of the inner layers. An outer limit by
//! address therefore bounds how often a password check between the layers runs, even for a client that the inner limit
//! refuses.
//!
//! The price is that a refused client uses up outer limits. If all clients share an outer limit,
//! one client can exhaust it. Put both limits into one layer with
//! [`and`](crate::RateLimitLayer::and). If something has to lie between them, the outer layer can
//! refund its charges for requests that an inner limit refuses: see
//! [`refund_nested`](crate::RateLimitLayer::refund_nested).
//!
//! Headers of nested layers are merged: each policy is listed once, single-valued headers come from
//! the tightest policy, and the longest `Retry-After` stays.
//!
//! # Defaults
//!
//! Each default is the choice that an attacker likes least. The last column names the method that
//! changes the default:
//!
//! | when | by default | changed by |
//! |---|---|---|
//! | a request over its quota | it is refused, and no rule is charged | [`Mode`](crate::Mode), [`overflow`](crate::RateLimitLayer::overflow) |
//! | a request without a key | it is refused with 400, or with 500 if the server does not provide the peer's address | [`Rule::missing_key`](crate::Rule::missing_key) |
//! | the limiter fails | the request is refused with 503 | [`on_error`](crate::RateLimitLayer::on_error), [`FallbackLimiter`](crate::limiter::FallbackLimiter) |
//! | an inner layer refuses | the outer layers keep their charges | [`refund_nested`](crate::RateLimitLayer::refund_nested) |
//! | a request is aborted | it costs at least its reservation | [`Rule::on_aborted`](crate::Rule::on_aborted) |
//! | the cost is settled later | at least one unit is reserved, so no request passes in debt | - |
//! | requests wait in queues and in line | at most 1,000 in a layer, over all keys; others are refused | [`max_waiting`](crate::RateLimitLayer::max_waiting) |
//! | requests of one key wait in line | at most 100; others are refused | [`max_in_line`](crate::RateLimitLayer::max_in_line) |
//! | a request is refused while its body is sent | up to 2 MiB are read and discarded, for up to 2 seconds | [`discard_body`](crate::RateLimitLayer::discard_body) |
//! | a request says who it is from | no header is believed; the client is the peer of the connection | [`key::client_ip`](crate::key::client_ip) with [`TrustedProxies`](crate::key::TrustedProxies) |
//! | an IPv6 address | its /64 is one client | [`Prefixes`](crate::key::Prefixes) |
//! | an access list, and an unknown address | the list does not allow it | - |
//! | a CORS preflight request | it is charged like any other request | [`exempt_preflight`](crate::RateLimitLayer::exempt_preflight) |
//! | a refusal, and a cache | it has `Cache-Control: no-store` | - |
//! | a response in place of the usual one ([degraded](crate::Mode::Degrade), or from an overflow), and a cache | it has `Cache-Control: no-store` | a `Cache-Control` that the service sets |
//! | a refusal, and gRPC | only a request that follows gRPC in every respect gets gRPC's status 200 | - |
//! | the extensions of a response | they have no outcome, so middleware cannot leak it | [`expose_outcome`](crate::RateLimitLayer::expose_outcome) |
//!
//! A limiter has defaults of its own: `MemoryLimiter` is [bounded](crate::limiter::memory), and
//! `RedisLimiter` and `StoreLimiter` have a deadline and a bounded queue, and store no caller's key in plain
//! text.
//!
//! # Differences from `tower::limit::RateLimit`
//!
//! | | [`RateLimit`] | `tower::limit::RateLimit` |
//! |---|---|---|
//! | over the limit | answers with a refusal at once, or lets a bounded number of requests wait | is not ready, so callers wait |
//! | counts | for each key, under any number of policies | all requests of one service value |
//! | `Clone` | yes, and clones share the allowance | no; behind a `Buffer` all clones wait in one queue |
//! | algorithms | each [`Algorithm`](crate::quota::Algorithm) | fixed windows that begin with a request |
//! | works on | `http::Request` | any request |
//!
//! Use Tower's `RateLimit` if you want callers to wait, or if your requests are not HTTP.

// `layer` is the first module, because rustdoc shows the methods of `RateLimitLayer` in the order of the modules.
pub(crate) mod layer;

mod admit;
mod body;
pub(crate) mod charge;
mod compiled;
mod decide;
mod diagnostics;
mod discard;
mod explain;
#[cfg(feature = "axum")]
mod extract;
mod follow;
mod future;
mod latest;
mod messages;
mod pace;
mod plan;
mod respond;
pub(crate) mod rule;
mod service;
pub(crate) mod settings;
mod settle;
mod setup;
#[cfg_attr(not(feature = "rules"), allow(dead_code, reason = "only files of rules are sources of rules"))]
pub(crate) mod source;
mod ticket;
mod unsettled;
mod wrap_body;

#[cfg(feature = "axum")]
pub use admit::Admit;
pub use admit::{Admission, Refused};
pub use body::{ResponseBody, WrappedBody};
pub use charge::access::{Access, AccessList};
pub use decide::overflow::Overflow;
// These types are parts of the types that methods of a layer return. The types are public, so that a program can name
// the type of a field that holds such a value.
#[doc(hidden)]
pub use decide::overflow::{NoOverflow, OverflowTo};
pub use future::ResponseFuture;
pub use messages::{MessageStream, Messages, message_units};
pub use rule::{IntoPlan, IntoQuota, IntoRule, OnAborted, OverrideId, Overrides, QuotaSwitch};
pub use service::RateLimit;
pub use settle::in_flight::InFlight;
pub use settle::usage::Usage;
#[doc(hidden)]
pub use wrap_body::{WrapBody, WrapBodyFuture, WrapBodyLayer};

pub use crate::headers::{Jitter, LegacyHeaders, ResetEncoding, ResetMeaning, When};
pub use crate::mode::ModeSwitch;
pub use crate::refusal::{GrpcCode, Protocol, Refusal, RefusalBody};
