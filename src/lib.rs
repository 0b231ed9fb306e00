//! Rate limiting for Tower services. A layer takes a key from each request and asks a limiter. The
//! layer then passes the request to the service, or answers it with 429 or the gRPC equivalent. Its
//! responses have standard headers.
//!
//! ```
//! use axum::{Router, body::Body, http::Request, routing::get};
//! use tower::ServiceExt;
//! use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer, Rule, key};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let api = Rule::new("api", Quota::per_minute(1))?;
//! let limit = RateLimitLayer::new(MemoryLimiter::new(), api, key::header("x-api-key"));
//! let app = Router::new().route("/", get(|| async { "hello" })).layer(limit);
//! let request = || Request::get("/").header("x-api-key", "alice").body(Body::empty());
//!
//! let first = app.clone().oneshot(request()?).await?;
//! assert_eq!(first.status(), 200);
//! assert_eq!(first.headers()["ratelimit"], "\"api\";r=0;t=60");
//!
//! let second = app.oneshot(request()?).await?;
//! assert_eq!(second.status(), 429);
//! assert!(second.headers().contains_key("retry-after"));
//! # Ok(()) }
//! ```
//!
//! **Start with the [guide].** The guide has a page for each task, from choosing an algorithm to
//! running Redis.
//!
//! # Concepts
//!
//! * A [`Quota`] says how much: a limit per period, an algorithm and its options.
//! * A [`Rule`] is a *named* quota as a layer applies it. A rule says to which requests its quota
//!   applies, at what cost, and in which [`Mode`]. The name is part of the stored state.
//! * A [`Policy`] is the name and quota of a rule. Limiters get policies, and clients and operators see them in headers
//!   and metrics.
//! * A [`Key`] says whose allowance is charged. An extractor gets the key from the request.
//! * A [`Limiter`](limiter::Limiter) keeps the states and decides. [`MemoryLimiter`] keeps the states
//!   of one process. [`RedisLimiter`](struct.RedisLimiter.html) and
//!   [`StoreLimiter`](limiter/store/struct.StoreLimiter.html) keep states that many processes share.
//! * A [`Decision`](limiter::Decision) is the limiter's answer. An [`Outcome`](observe::Outcome) is
//!   what the layer did with the request.
//!
//! A request is charged to all of its policies or to none. `remaining` is rounded down, and every
//! wait is rounded up.
//!
//! # Modules
//!
//! The crate root has the items that you need first. All other items are in modules:
//!
//! | module | contents |
//! |---|---|
//! | [`guide`] | documentation only: a page for each task |
//! | [`middleware`] | the service and its parts: switches, access lists, usage, refusals |
//! | [`key`] | extractors, trusted proxies, address prefixes |
//! | [`quota`] | options and errors of quotas |
//! | [`limiter`] | the `Limiter` trait and its contract, limiters in memory, on Redis and over other stores, fallback, blocks, meters |
//! | [`observe`] | outcomes, explanations, events, setup warnings, the `Observer` that sees them, `Stats`, which counts them (feature `stats`), and `StatusPage`, which shows them (feature `status`) |
//! | [`clock`] | clocks, some of them for tests, and timers, with which requests wait |
//! | [`client`](client/index.html) | for clients: what the headers of a response say about quotas and waits, and a layer that waits as long (feature `client`) |
//! | [`fleet`](fleet/index.html) | operators' settings for all processes (feature `fleet`) |
//! | [`rules`](rules/index.html) | [rules in a file](guide::rules_in_a_file), which can change while requests are served (feature `rules`) |
//! | [`conformance`](conformance/index.html) | the suite for limiters of your own (feature `conformance`) |
//!
//! # What it does not do
//!
//! * This crate is not a load shedder. `tower` has a load shedder.
//! * Requests wait only if you configure it. Requests can wait in a [leaky queue](Quota::leaky_queue),
//!   or in line for a [concurrency limit](Quota::max_wait), if the layer has a
//!   [timer](RateLimitLayer::timer).
//!
//! # Features
//!
//! No feature is on by default. Another crate of your program may enable further features. Features add
//! items and behaviour, and change existing behaviour in two ways. With `tracing` and a subscriber,
//! setup warnings are `tracing` events instead of lines on stderr. With both `fred` and `redis-rs`, a
//! `RedisLimiter` connects to Redis through fred, unless `RedisLimiterBuilder::client` selects
//! redis-rs.
//!
//! | feature | what it adds | dependency |
//! |---|---|---|
//! | `axum` | [`key::peer_ip`] finds axum's `ConnectInfo<SocketAddr>`, [`key::original_uri`] its `OriginalUri`; limited services can answer with axum's [`Body`](middleware::ResponseBody) | axum 0.8 without default features; `tokio` |
//! | `tonic` | [`key::peer_ip`] finds tonic's `TcpConnectInfo`; `RateLimitLayer::admit_call`; limited services can answer with tonic's [`Body`](middleware::ResponseBody) | tonic 0.14 without transport; `tokio` |
//! | `tokio` | `TokioTimer`, so that requests can wait; refusals [reach clients that still send](RateLimitLayer::discard_body); `TokioClock` for tests | tokio with its timer |
//! | `fleet` | `fleet::Fleet`: settings of operators for all processes at once; `tokio` | that of `tokio` |
//! | `tracing` | [logs](guide::observing#logs): outages of a store, refused rules, and each [`SetupWarning`](observe::SetupWarning) that no observer handles; with `stats`, `StatsBuilder::log_refusals` | tracing |
//! | `stats` | `observe::Stats` [counts](guide::observing), and writes metrics as text for Prometheus | none |
//! | `status` | `observe::StatusPage` [shows](guide::observing#a-status-page) the counts and the states of keys; `stats` | sha2 |
//! | `metrics` | `Stats::record_metrics` hands the counts to the recorder of `metrics`; `stats` | metrics |
//! | `fred` | `RedisLimiter`: one limit for many processes | fred with `credential-provider` and `sentinel-auth` only, tokio, futures-util, sha1_smol, sha2 |
//! | `redis-rs` | `RedisLimiter`, through the crate `redis` (redis-rs) | redis with `tokio-comp` only, tokio, futures-util, sha1_smol, sha2 |
//! | `store` | `StoreLimiter`: a limiter over [any store](guide::writing_a_backend#a-store) that can compare and swap | tokio, sha2, futures-util |
//! | `postgres` | `PostgresStore`: such a store [in PostgreSQL](guide::no_redis_but_a_database) | those of `store`, and tokio-postgres without TLS |
//! | `fred-rustls`, `fred-rustls-ring`, `fred-native-tls` | `rediss://`, by one of three TLS implementations | what fred needs for it, and rustls for the first two |
//! | `redis-rs-rustls`, `redis-rs-rustls-ring` | `rediss://` through redis-rs, by rustls with aws-lc-rs or ring | rustls, tokio-rustls, rustls-native-certs |
//! | `client` | the module `client`: reads what a server's headers say about its limits, and waits as long | none |
//! | `retry` | `client::RetryAfter`, a policy for `tower::retry` | tower with its retries |
//! | `serde` | settings in configuration files: [`Quota`], [`Mode`], [`MissingKey`], [`OnError`], [`OnFull`](limiter::memory::OnFull), [`TrustedProxies`](key::TrustedProxies), [`Prefixes`](key::Prefixes) | serde_core |
//! | `time-zones` | quotas, and times of rules, in [time zones](guide::quotas_and_rules#months-and-days-of-a-calendar) other than UTC | jiff, with the zones of the system and built-in ones |
//! | `rules` | `rules::Rules`: [rules in a file](guide::rules_in_a_file) | saphyr-parser, strsim |
//! | `conformance` | the suite that a limiter of your own has to pass; it may become stricter in any release | none |
//!
//! The package `tower-ratelimit-cli` has the program `tower-ratelimit`. This program [checks and
//! explains](guide::rules_in_a_file#check-a-file-before-it-is-deployed) files of rules, and [replays
//! access logs](guide::choosing_a_limit).
//!
//! The layer also works with axum or tonic without the feature of that name if you do two things: end
//! the layer with [`wrap_body`](RateLimitLayer::wrap_body), and insert the peer's address as a
//! [`PeerAddr`](key::PeerAddr). [Coming from axum 0.7](guide::coming_from::axum_07) shows both steps.
//!
//! # Rust version
//!
//! Rust 1.85 or later. A release that requires a higher version of Rust is a minor release.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod algorithm;
mod base;
#[cfg(feature = "client")]
pub mod client;
pub mod clock;
#[cfg(feature = "conformance")]
pub mod conformance;
mod decision;
mod error;
mod event;
mod explanation;
#[cfg(feature = "fleet")]
pub mod fleet;
#[cfg(any(doc, doctest))]
pub mod guide;
mod headers;
pub mod key;
pub mod limiter;
pub mod middleware;
mod mode;
pub mod observe;
mod outcome;
mod policy;
pub mod quota;
mod refusal;
#[cfg(feature = "rules")]
pub mod rules;
mod rules_in_force;
mod setup_warning;
#[cfg(feature = "stats")]
#[cfg_attr(not(feature = "status"), allow(dead_code, reason = "only the status page uses all of this module"))]
mod stats;
#[cfg(feature = "status")]
mod status;
mod store_load;

pub use base::head::Head;
pub use base::wait::Wait;
pub use error::{ConfigError, ConfigErrorKind};
pub use headers::Headers;
pub use key::value::Key;
pub use limiter::memory::limiter::MemoryLimiter;
#[cfg(any(feature = "fred", feature = "redis-rs"))]
pub use limiter::redis::limiter::RedisLimiter;
#[cfg(feature = "store")]
pub use limiter::store::StoreLimiter;
pub use middleware::layer::RateLimitLayer;
pub use middleware::rule::definition::{MissingKey, Rule};
pub use middleware::settings::OnError;
pub use mode::Mode;
pub use policy::{Part, Policy};
pub use quota::builder::Quota;
pub use refusal::Refusals;

/// Runs the README's code blocks as documentation tests. Some of them use Redis.
#[cfg(all(doctest, feature = "_redis"))]
#[doc = include_str!("../README.md")]
struct Readme;
