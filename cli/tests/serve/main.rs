//! Tests of `tower-ratelimit serve`, with the proxies that ask it. A proxy that is missing is a failure, which says
//! how to install it.
#![cfg(feature = "serve")]
#![allow(clippy::disallowed_methods, reason = "processes start and end in real time")]

mod api;
mod attacks;
mod container;
mod envoy;
mod fleet;
mod health;
mod http;
mod operation;
mod proxies;
mod python;
mod server;
mod store;
mod support;
mod wait;
