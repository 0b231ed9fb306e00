//! What the observer and the service learn of a request, and its response.

mod outcome;
mod response;
