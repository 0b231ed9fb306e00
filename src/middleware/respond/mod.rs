//! What the service, the observer and the client learn: outcomes, headers and refusals.

pub(crate) mod headers;
mod outcome;
pub(crate) mod refusal;
mod response;
