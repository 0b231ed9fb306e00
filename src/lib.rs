//! Rate limiting for Tower services.

#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod algorithm;
mod clock;
#[cfg(feature = "conformance")]
pub mod conformance;
mod decision;
pub mod key;
pub mod limiter;
pub mod middleware;
mod outcome;
mod policy;
mod quota;
mod sync;
mod time;

#[cfg(feature = "fast-clock")]
pub use clock::FastClock;
pub use clock::{Clock, ManualClock, MonotonicClock};
pub use decision::{ChargeDecision, Decision, Receipt};
pub use key::{IntoKey, Key};
pub use limiter::memory::MemoryLimiter;
pub use limiter::{Atomicity, BoxLimiter, Charge, Effect, Limiter, LimiterError, Refund, Reply};
pub use middleware::{
    GrpcCode, Headers, HeadersError, IntoRule, Jitter, LegacyHeaders, MissingKey, OnError, Protocol, ProtocolRule,
    RateLimit, RateLimitLayer, Refusal, Refusals, ResetEncoding, ResetMeaning, Rule, When,
};
pub use outcome::{LimiterEvent, Observer, Outcome, OutcomeKind, Standing};
pub use policy::{Policy, PolicyError};
pub use quota::{Algorithm, Anchor, Oldest, Quota, QuotaError, QuotaErrorKind};
pub use time::Timestamp;
