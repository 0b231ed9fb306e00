//! The middleware's response side.

#![allow(dead_code, reason = "the service that calls this is on another branch")]

pub(crate) mod headers;

pub use headers::{Headers, HeadersError, Jitter, LegacyHeaders, ResetEncoding, ResetMeaning, When};
