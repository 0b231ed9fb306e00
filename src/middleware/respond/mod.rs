//! Reports a request to the observer and the service, and makes its response.

mod outcome;
mod response;
