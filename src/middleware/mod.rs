//! The middleware's response side.

#![allow(dead_code, unused_imports, reason = "the service that calls this is on another branch")]

pub(crate) mod headers;
pub(crate) mod refusal;

pub use headers::{Headers, HeadersError, Jitter, LegacyHeaders, ResetEncoding, ResetMeaning, When};
pub use refusal::{GrpcCode, Protocol, ProtocolRule, Refusal, Refusals};
