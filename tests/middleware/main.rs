//! Tests of `RateLimitLayer` through the public API: over `MemoryLimiter`, over a scripted limiter,
//! and over Redis.

mod access;
mod accounting;
mod admit;
mod all_or_nothing;
mod allocations;
mod bodies;
mod cache_in_front;
mod combinations;
mod companions;
mod defaults;
mod delay;
mod delay_changes;
mod departed;
mod envoy_file;
mod explain;
mod extract;
mod first_day;
mod fleet_page;
mod frameworks;
mod grpc;
mod grpc_python;
mod h2_resets;
mod header_families;
mod in_flight;
mod in_flight_campaign;
mod in_line;
mod layers;
mod messages;
mod messages_campaign;
mod modes;
mod nested;
mod operators;
mod overflow;
mod own_quotas;
mod pace;
mod queue_leaving;
mod readiness;
mod recent_refusals;
mod refusals;
mod retries;
mod rules;
mod rules_file;
mod settling;
mod settling_order;
mod settling_served;
mod setup_warnings;
mod spoofing;
mod stats;
mod status_page;
mod switch;
mod tiers;
mod uploads;
mod uploads_served;

#[path = "../support/in_flight.rs"]
mod in_flight_over_tcp;
#[path = "../support/lines.rs"]
mod lines;
#[path = "../support/mod.rs"]
mod support;
