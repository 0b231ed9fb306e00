//! The guide: one page for each task, with examples that compile. Every user needs the first five.
//!
//! | page | what it answers |
//! |---|---|
//! | [Quotas and rules](quotas_and_rules) | How do I state a limit, several limits, plans, and roll them out? |
//! | [Who is the client](who_is_the_client) | How do I limit by address, proxy, API key or user? |
//! | [What clients are told](what_clients_are_told) | Which headers, bodies and gRPC statuses are sent? How do I find out why a request was refused? |
//! | [Testing your limits](testing_your_limits) | How do I test limits without waiting, and find misconfigurations? |
//! | [Production checklist](production_checklist) | What should I check before the limit goes live? |
//! | [Choosing an algorithm](choosing_an_algorithm) | Which algorithm fits, and what does it guarantee? |
//! | [Choosing a limit](choosing_a_limit) | How large should a limit be, by the access logs that I have? |
//! | [Rules in a file](rules_in_a_file) | How do I keep limits in a file, and change them while the service runs? |
//! | [Settling costs](settling_costs) | How do I charge by the response: failed logins, tokens, bytes? |
//! | [Delay and overflow](delay_and_overflow) | How do requests wait, or go elsewhere, instead of being refused? |
//! | [Requests in flight](requests_in_flight) | How do I limit how many requests of a client run at once, and let others wait? |
//! | [Blocks and meters](blocks_and_meters) | How do I shut out abusers, or bill the excess? |
//! | [Redis and failures](redis_and_failures) | How do many processes share a limit, and what if Redis is away? |
//! | [No Redis, but a database](no_redis_but_a_database) | How do many processes share a limit in PostgreSQL? |
//! | [Observing](observing) | Which metrics are there, who is limited most, and what should alert me? |
//! | [A user says](a_user_says) | A user reports a wrong 429, a limit too early or too late: where do I look, and what do I do? |
//! | [Language models](language_models) | How do I build a gateway for language models: tokens, streams, several limits? |
//! | [Being a client](being_a_client) | How do I read what other servers say about their limits, and obey it? |
//! | [Without Tower](without_tower) | How do I limit in actix-web, poem, pingora, or a worker without HTTP? |
//! | [Writing a backend](writing_a_backend) | How do I keep the states elsewhere? |
//! | [Coming from](coming_from) | What are the settings of tower_governor, governor, axum-governor, actix-governor, Tower, a function of your own, axum 0.7, nginx and Envoy called here? |
//! | [Upgrades](upgrades) | What may change in which release, and what does a new axum, tonic or tower mean? |
//! | [How this is tested](how_this_is_tested) | What was tried to break it, how hard, and what was not tried? |
//!
//! The `examples` folder of the repository has complete programs.

// Some pages link to items of features, which exist in the documentation of all features only.
#![cfg_attr(
    not(all(
        feature = "client",
        feature = "redis-rs",
        feature = "postgres",
        feature = "tokio",
        feature = "conformance",
        feature = "rules"
    )),
    allow(rustdoc::broken_intra_doc_links)
)]

// Links on the pages are looked up here.
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

#[doc = include_str!("settling_costs.md")]
pub mod settling_costs {}

#[doc = include_str!("delay_and_overflow.md")]
pub mod delay_and_overflow {}

#[doc = include_str!("requests_in_flight.md")]
pub mod requests_in_flight {}

#[doc = include_str!("blocks_and_meters.md")]
pub mod blocks_and_meters {}

#[cfg_attr(feature = "_redis", doc = include_str!("redis_and_failures.md"))]
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
    //! The names of other rate limiters' settings in this crate, and the differences in behaviour.
    //!
    //! * [tower_governor] 0.8
    //! * [governor] 0.10
    //! * [axum-governor](axum_governor) 2.1
    //! * [actix-governor](actix_governor) 0.10
    //! * [Tower's own limit](tower_limit), `tower::limit::RateLimitLayer` 0.5
    //! * [a middleware function of your own](from_fn)
    //! * [axum 0.7](axum_07), to stay on it
    //! * [nginx] `limit_req`
    //! * [Envoy](envoy)'s rate limit service
    //!
    //! The statements about other projects were read from their released code and documentation in
    //! November 2026. The limiters in Rust and nginx were also sent requests, and answered as the pages
    //! say. Each block of code here is a test, which sends requests too; its hidden lines say what it
    //! expects.

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
