//! Rate limiting for Tower services: a layer that takes a key from each request, asks a limiter, and lets the request
//! through or refuses it, over HTTP and gRPC, with the header fields that clients read.
//!
//! ```
//! use axum::Router;
//! use axum::routing::get;
//! use tower_ratelimit::{MemoryLimiter, Policy, Quota, RateLimitLayer, key};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let everyone = Policy::new("everyone", Quota::per_second(5_000))?;
//! let client = Policy::new("client", Quota::per_minute(100).burst(20)?)?;
//! let limit = RateLimitLayer::new(MemoryLimiter::new(), everyone, key::global()).and(client, key::peer_ip());
//!
//! let app: Router = Router::new().route("/", get(|| async { "hello" })).layer(limit);
//! // Served with `app.into_make_service_with_connect_info::<SocketAddr>()`: else no request has a peer's address.
//! # Ok(()) }
//! ```
//!
//! # Concepts
//!
//! * A [`Quota`] is how much: a limit per period, an [algorithm], and its options.
//! * A [`Policy`] is a *named* quota. The name is in header fields, in outcomes, and part of what a limiter stores.
//! * A [`Key`] is whose allowance is charged. An extractor takes it from the request: one of those in [`key`], or a closure.
//! * The cost is how many units a request takes, by default 1.
//! * A [`Limiter`] keeps the states and decides. [`MemoryLimiter`] does so in this process, `RedisLimiter` for many.
//! * A [`Decision`] is the limiter's answer, an [`Outcome`] is what the middleware did with the request.
//!
//! `remaining` is rounded down and every wait is rounded up. All charges of a request are taken, or none is.
//!
//! # Organised as follows
//!
//! * [`RateLimitLayer`] is where to begin; [`middleware`] says where in a stack it belongs, and what to know when deploying.
//! * [`Quota`] and [`algorithm`]: how to write a limit, and which algorithm to choose.
//! * [`key`]: ready-made extractors, trusted proxies, prefixes of addresses.
//! * [`Headers`] and [`Refusals`]: what clients are told.
//! * [`limiter`]: the [`Limiter`] trait with its contract, [`limiter::memory`], `limiter::redis`, and [`FallbackLimiter`].
//! * [`QuotaSwitch`]: a quota that changes while requests come.
//! * [`Mode`] and [`ModeSwitch`]: rules that only look, or let pass and say so; [`RateLimitLayer::delay`] and
//!   [`RateLimitLayer::overflow`]: what else may become of what is too much.
//! * [`Outcome`] and [`Observer`]: what happened, for handlers, logs and metrics.
//! * [`Clock`]: where a limiter's time comes from, [`ManualClock`] for tests.
//!
//! # What it does not do
//!
//! * It waits only if it is told to: by a [leaky queue](Quota::leaky_queue), in a layer with a [timer](RateLimitLayer::delay).
//! * It is no load shedder and no concurrency limiter; `tower` has those.
//!
//! # Crate features
//!
//! None is on by default, and none changes what the crate does without it.
//!
//! * **`axum`**: [`key::peer_ip`] and its kin find the `ConnectInfo<SocketAddr>` that axum puts into requests, and
//!   [`key::original_uri`] finds the `OriginalUri`. It depends on axum 0.8 without its default features. Without it the layer works in axum all the same, for other keys.
//! * **`tonic`**: they find the `TcpConnectInfo` that tonic puts into requests. It depends on tonic 0.14 without its
//!   transport. gRPC requests are recognised and refused as such without it.
//! * **`tokio`**: `TokioClock`, which a test can stop and move with Tokio's time, and `TokioTimer`, by which requests wait for their departure from a leaky queue. It depends on tokio with its
//!   timer alone.
//! * **`tracing`**: a [`Misuse`] that no observer sees is a warning of `tracing`. It depends on tracing without its default
//!   features.
//! * **`fast-clock`**: `FastClock`, a clock that reads the CPU's time stamp counter, about 12 ns faster for each decision. It
//!   depends on quanta. A counter that differs between cores makes it stand still for a moment, never go back by a
//!   millisecond or more.
//! * **`redis`**: `RedisLimiter`, whose states are in Redis, for one limit across many processes. It depends on fred without
//!   its default features and on tokio. **`redis-rustls`**, **`redis-rustls-ring`** and **`redis-native-tls`** choose how
//!   `rediss://` is reached; take one.
//! * **`serde`**: [`Quota`] in configuration files, as its words. It depends on serde_core.
//! * **`conformance`**: the suite that a limiter of one's own has to pass. It depends on nothing, and may grow stricter in
//!   any release.
//!
//! # Rust version
//!
//! 1.85 or later.

#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod algorithm;
mod clock;
#[cfg(feature = "conformance")]
pub mod conformance;
mod decision;
pub mod key;
pub mod limiter;
pub mod middleware;
mod misuse;
mod mode;
mod outcome;
mod policy;
mod quota;
mod sync;
mod time;

#[cfg(feature = "fast-clock")]
pub use clock::FastClock;
#[cfg(feature = "tokio")]
pub use clock::TokioClock;
pub use clock::{Clock, ManualClock, MonotonicClock};
pub use decision::{ChargeDecision, Decision, Receipt};
pub use key::{IntoKey, Key};
pub use limiter::memory::MemoryLimiter;
#[cfg(feature = "redis")]
pub use limiter::redis::{RedisError, RedisErrorKind, RedisFuture, RedisLimiter, RedisLimiterBuilder};
pub use limiter::{
    Atomicity, Blocks, BoxLimiter, Charge, Effect, FallbackLimiter, Limiter, LimiterError, Meters, Refund, Reply,
    ReplyFuture, Roster, UnsupportedQuota, UnsupportedQuotaKind,
};
#[cfg(feature = "tokio")]
pub use middleware::TokioTimer;
pub use middleware::{
    Access, AccessList, AccessListError, AccessListErrorKind, Admission, Bill, GrpcCode, Headers, HeadersError,
    HeadersErrorKind, IntoRule, Jitter, LegacyHeaders, MissingKey, OnAborted, OnError, PlanOverrides, Protocol,
    QuotaSwitch, QuotaSwitchError, QuotaSwitchErrorKind, RateLimit, RateLimitLayer, Refusal, Refusals, Refused,
    ResetEncoding, ResetMeaning, Rule, Timer, When,
};
pub use misuse::{Misuse, MisuseKind};
pub use mode::{Mode, ModeSwitch};
pub use outcome::{LimiterEvent, Observed, Observer, Outcome, OutcomeKind, Standing};
pub use policy::{Policy, PolicyError, PolicyErrorKind};
pub use quota::{Algorithm, Anchor, Oldest, Quota, QuotaError, QuotaErrorKind};
pub use time::Timestamp;

/// The examples of the README are run as those of the documentation are; they use Redis, too.
#[cfg(all(doctest, feature = "redis"))]
#[doc = include_str!("../README.md")]
struct Readme;
