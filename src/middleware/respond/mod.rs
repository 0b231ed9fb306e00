//! Outcomes, headers and refusals: the reports to the service, the observer and the client.

pub(crate) mod headers;
mod outcome;
pub(crate) mod refusal;
mod response;
