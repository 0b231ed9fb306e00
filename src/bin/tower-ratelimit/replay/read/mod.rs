//! Reading logs: lines, formats, requests.

pub(crate) mod date;
mod field;
pub(crate) mod format;
mod json;
mod lines;
pub(crate) mod log;
pub(crate) mod request;
mod text;
