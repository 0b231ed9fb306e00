//! The Tower middleware.

mod body;
mod charging;
pub(crate) mod extract;
mod future;
mod headers;
mod layer;
mod refusal;
mod rule;
mod service;

pub use body::Body;
pub use future::ResponseFuture;
pub use headers::Headers;
pub use layer::{OnError, RateLimitLayer};
pub use refusal::{Refusal, Refusals};
pub use rule::{IntoRule, MissingKey, Rule};
pub use service::RateLimit;
