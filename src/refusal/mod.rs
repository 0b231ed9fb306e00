//! The responses to refused requests, in the protocol that the client speaks.

mod body;
mod definition;
mod grpc;
mod prepared;
mod problem;
mod protocol;
mod reason;
#[cfg(all(test, not(ratelimit_loom)))]
mod tests;

pub use body::RefusalBody;
pub use definition::{GrpcCode, Refusal, Refusals};
pub use protocol::Protocol;

pub(crate) use prepared::PreparedRefusals;
