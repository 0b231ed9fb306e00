//! The guide: a page for each task, with examples that compile.
//!
//! # A first day
//!
//! ```no_run
#![doc = include_str!("../../examples/first_day.rs")]
//! ```
//!
//! `examples/first_day.rs` is this program. It needs the features `axum` and `stats` of this crate. Besides axum and
//! Tokio, it needs the crates `tower`, `tower-http` (feature `cors`) and `serde_json`. Each further step of the first
//! day takes one more line:
//!
//! * Behind a proxy, use [`key::client_ip`](crate::key::client_ip) instead of `key::peer_ip`.
//! * For a limit that several processes share, use
//!   [`RedisLimiter::connect(url).await?`](redis_and_failures) instead of `MemoryLimiter::new()`.
//! * To watch a rule before it refuses requests, add [`.mode(Mode::Shadow)`](crate::Mode::Shadow).
//!
//! # Read first
//!
//! * [Quotas and rules](quotas_and_rules): how to define limits and plans, and how to roll them out.
//! * [Who is the client](who_is_the_client): how to limit by address, proxy, API key or user.
//! * [What clients are told](what_clients_are_told): headers, bodies, gRPC statuses, and why a request was
//!   refused.
//! * [Testing your limits](testing_your_limits): how to test without waiting, and how to find
//!   misconfigurations.
//! * [Production checklist](production_checklist): what to check before a limit goes live.
//!
//! # Index
//!
//! | you want | use | page |
//! |---|---|---|
//! | an algorithm, and to know what it guarantees | constructors of [`Quota`] | [algorithms](choosing_an_algorithm) |
//! | several limits on a request, all or nothing | `RateLimitLayer::and`, `Rule::all_of` | [quotas and rules](quotas_and_rules) |
//! | plans, a quota for each customer, quotas that change at run time | `Rule::plans`, `Rule::quota_from`, `middleware::{QuotaSwitch, Overrides}` | [quotas and rules](quotas_and_rules) |
//! | to change modes, quotas, overrides and access lists in all processes | `fleet::Fleet` (feature `fleet`) | [the module](../fleet/index.html) |
//! | to watch a limit before it refuses | `Mode::Shadow`, `middleware::ModeSwitch`, `Rule::warn_at_percent` | [quotas and rules](quotas_and_rules) |
//! | a cost for each request: requests, tokens, bytes | `Rule::cost`, `Rule::unit` | [quotas and rules](quotas_and_rules) |
//! | rules in a YAML file, reloaded at run time | `rules::Rules` (feature `rules`) | [rules in a file](rules_in_a_file) |
//! | a limiter for nginx, Caddy, HAProxy, Traefik, Envoy, or a program in another language | `tower-ratelimit serve` | [a process of its own](a_process_of_its_own) |
//! | to check such a file, or convert one of Envoy's | `tower-ratelimit check`, `explain`, `convert` (package `tower-ratelimit-cli`) | [rules in a file](rules_in_a_file) |
//! | to choose a limit by access logs | `tower-ratelimit replay` | [choosing a limit](choosing_a_limit) |
//! | keys: addresses, proxies, API keys, users, closures | `key::*` | [who is the client](who_is_the_client) |
//! | clients that always pass, or never | `middleware::AccessList` | [who is the client](who_is_the_client) |
//! | other headers, bodies, gRPC codes | `Headers`, `Refusals` | [what clients are told](what_clients_are_told) |
//! | to count only failed logins, or refund server errors | `Rule::charge_when`, `Rule::refund_when` | [settling costs](settling_costs) |
//! | uploads by their bytes, and 411 if these are unknown | `Head::content_length` | [what clients are told](what_clients_are_told#refused-uploads) |
//! | costs that are known afterwards | `Rule::settle_by_usage`, `settle_by_response`, `settle_by_body` | [settling costs](settling_costs) |
//! | a key or cost that only the handler knows | `RateLimitLayer::admit`, `admit_call` | [settling costs](settling_costs) |
//! | requests that wait for their turn | `Quota::leaky_queue`, `RateLimitLayer::timer` | [delay and overflow](delay_and_overflow) |
//! | another answer than a refusal: 202, a cached page | `RateLimitLayer::overflow`, `Mode::Degrade` | [delay and overflow](delay_and_overflow) |
//! | at most `n` requests at once, the next in line | `Quota::concurrent`, `Quota::max_wait` | [requests in flight](requests_in_flight) |
//! | messages of a WebSocket or a gRPC stream | `RateLimitLayer::messages` | [messages, bytes and jobs](messages_bytes_and_jobs) |
//! | bytes per second of downloads and uploads | `Rule::pace_responses`, `Rule::pace_requests` | [messages, bytes and jobs](messages_bytes_and_jobs) |
//! | jobs of a worker that wait for their turn | `limiter::Ready` | [messages, bytes and jobs](messages_bytes_and_jobs) |
//! | to shut out clients that are refused too often | `Rule::block` | [blocks and meters](blocks_and_meters) |
//! | to let excess usage pass, and bill it | `Rule::overage` | [blocks and meters](blocks_and_meters) |
//! | a gateway for language models | `Headers::openai`, `Headers::anthropic`, `middleware::Usage` | [language models](language_models) |
//! | one limit for many processes, also while Redis is away | `RedisLimiter` (feature `fred`), `limiter::FallbackLimiter` | [Redis and failures](redis_and_failures) |
//! | the same in PostgreSQL | `PostgresStore` (feature `postgres`) | [a database](no_redis_but_a_database) |
//! | the same in a store of your own, or a limiter of your own | `StoreLimiter`, `limiter::Limiter`, `conformance::check` | [writing a backend](writing_a_backend) |
//! | a limiter that a setting chooses | `limiter::BoxLimiter` | [Redis and failures](redis_and_failures) |
//! | metrics, a status page, who is limited most | `observe::{Stats, StatusPage}` (features `stats`, `status`), `observe::Observer` | [observing] |
//! | why a request was refused, and to help | `RateLimitLayer::explain`, `limiter::Blocks` | [a user says](a_user_says) |
//! | tests without waiting | `clock::{ManualClock, TokioClock}`, `RateLimitLayer::check` | [testing your limits](testing_your_limits) |
//! | to obey other servers' limits | `client::{Advice, ObeyLayer, RetryAfter}` (features `client`, `retry`) | [being a client](being_a_client) |
//! | actix-web, poem, pingora, or no HTTP at all | `RateLimitLayer::admit`, `MemoryLimiter::take_one` | [without Tower](without_tower) |
//!
//! [Coming from] lists this crate's names for the settings of tower_governor, governor, axum-governor,
//! actix-governor, Tower, a function of your own, axum 0.7, nginx and Envoy. [Upgrades] says what may change
//! in which release. [How this is tested] says which tests try to break the crate, and what is not tested.
//! The `examples` folder of the repository has complete programs.
//!
//! [Coming from]: coming_from
//! [Upgrades]: upgrades
//! [How this is tested]: how_this_is_tested

// Some pages link to items that need a feature, so these links work only in the documentation with all features.
#![cfg_attr(
    not(all(
        feature = "client",
        feature = "redis-rs",
        feature = "postgres",
        feature = "status",
        feature = "fleet",
        feature = "conformance",
        feature = "rules"
    )),
    allow(rustdoc::broken_intra_doc_links)
)]

// Imports for the links in the pages below, because rustdoc resolves links in the scope of this module.
#[cfg(feature = "client")]
#[allow(unused_imports)]
use crate::client::{Advice, PolicyAdvice};
#[allow(unused_imports)]
use crate::{Headers, MemoryLimiter, MissingKey, Mode, OnError, Policy, Quota, RateLimitLayer, Refusals, Rule};

#[doc = include_str!("quotas_and_rules.md")]
pub mod quotas_and_rules {}

#[doc = include_str!("who_is_the_client.md")]
pub mod who_is_the_client {}

#[doc = include_str!("what_clients_are_told.md")]
pub mod what_clients_are_told {}

#[doc = include_str!("testing_your_limits.md")]
pub mod testing_your_limits {}

#[doc = include_str!("production_checklist.md")]
pub mod production_checklist {}

#[doc = include_str!("choosing_an_algorithm.md")]
pub mod choosing_an_algorithm {}

#[doc = include_str!("choosing_a_limit.md")]
pub mod choosing_a_limit {}

#[cfg_attr(feature = "rules", doc = include_str!("rules_in_a_file.md"))]
#[cfg_attr(not(feature = "rules"), doc = "Build the documentation with the feature `rules` to read this page.")]
pub mod rules_in_a_file {}

#[cfg_attr(feature = "rules", doc = include_str!("a_process_of_its_own.md"))]
#[cfg_attr(not(feature = "rules"), doc = "Build the documentation with the feature `rules` to read this page.")]
pub mod a_process_of_its_own {}

#[doc = include_str!("settling_costs.md")]
pub mod settling_costs {}

#[doc = include_str!("delay_and_overflow.md")]
pub mod delay_and_overflow {}

#[doc = include_str!("requests_in_flight.md")]
pub mod requests_in_flight {}

#[doc = include_str!("messages_bytes_and_jobs.md")]
pub mod messages_bytes_and_jobs {}

#[doc = include_str!("blocks_and_meters.md")]
pub mod blocks_and_meters {}

#[cfg_attr(feature = "_redis", doc = include_str!("redis_and_failures.md"))]
#[cfg_attr(feature = "_redis", doc = "")]
#[cfg_attr(feature = "_redis", doc = include_str!("load.svg"))]
#[cfg_attr(not(feature = "_redis"), doc = "Build the documentation with the feature `fred` to read this page.")]
pub mod redis_and_failures {}

#[cfg_attr(feature = "postgres", doc = include_str!("no_redis_but_a_database.md"))]
#[cfg_attr(not(feature = "postgres"), doc = "Build the documentation with the feature `postgres` to read this page.")]
pub mod no_redis_but_a_database {}

#[cfg_attr(feature = "_redis", doc = include_str!("observing.md"))]
#[cfg_attr(not(feature = "_redis"), doc = "Build the documentation with the feature `fred` to read this page.")]
pub mod observing {}

#[doc = include_str!("a_user_says.md")]
pub mod a_user_says {}

#[doc = include_str!("language_models.md")]
pub mod language_models {}

#[doc = include_str!("being_a_client.md")]
#[doc = ""]
#[doc = "# The crowd, drawn"]
#[doc = ""]
#[doc = include_str!("crowd.svg")]
pub mod being_a_client {}

#[doc = include_str!("without_tower.md")]
pub mod without_tower {}

#[cfg_attr(feature = "conformance", doc = include_str!("writing_a_backend.md"))]
#[cfg_attr(
    not(feature = "conformance"),
    doc = "Build the documentation with the feature `conformance` to read this page."
)]
pub mod writing_a_backend {}

pub mod coming_from {
    //! This crate's names for the settings of other rate limiters, and the differences in behaviour.
    //!
    //! * [tower_governor] 0.8
    //! * [governor] 0.10
    //! * [axum-governor](axum_governor) 2.1
    //! * [actix-governor](actix_governor) 0.10
    //! * [Tower's own limit](tower_limit), `tower::limit::RateLimitLayer` 0.5
    //! * [a middleware function of your own](from_fn)
    //! * [axum 0.7](axum_07), for applications that stay on it
    //! * [nginx] `limit_req`
    //! * [Envoy](envoy)'s rate limit service
    //!
    //! The statements about other projects come from their released code and documentation, read in
    //! November 2026. The statements about nginx and the limiters in Rust were also checked with
    //! requests. Each block of code here is a test that sends requests, and its hidden lines say what
    //! the test expects.

    #[allow(unused_imports)]
    use super::*;

    #[doc = include_str!("coming_from/tower_governor.md")]
    pub mod tower_governor {}

    #[doc = include_str!("coming_from/governor.md")]
    pub mod governor {}

    #[doc = include_str!("coming_from/axum_governor.md")]
    pub mod axum_governor {}

    #[doc = include_str!("coming_from/actix_governor.md")]
    pub mod actix_governor {}

    #[doc = include_str!("coming_from/tower_limit.md")]
    pub mod tower_limit {}

    #[doc = include_str!("coming_from/from_fn.md")]
    pub mod from_fn {}

    #[doc = include_str!("coming_from/axum_07.md")]
    pub mod axum_07 {}

    #[doc = include_str!("coming_from/nginx.md")]
    pub mod nginx {}

    #[doc = include_str!("coming_from/envoy.md")]
    pub mod envoy {}
}

#[doc = include_str!("upgrades.md")]
pub mod upgrades {}

#[doc = include_str!("how_this_is_tested.md")]
pub mod how_this_is_tested {}
