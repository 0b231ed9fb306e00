//! A layer that makes a client obey what servers say.

mod error;
mod future;
mod heard;
mod layer;
mod line;
mod origin;
mod rate;
mod service;
mod settings;
mod table;
mod visit;

#[cfg(feature = "retry")]
pub(in crate::client) use heard::{Heard, unnamed_wait_us};
#[cfg(feature = "retry")]
pub(in crate::client) use settings::WaitJitter;

pub use error::{ObeyError, ObeyErrorKind};
pub use future::ObeyFuture;
pub use layer::ObeyLayer;
pub use service::Obey;
