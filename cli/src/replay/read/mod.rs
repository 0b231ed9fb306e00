//! Reading logs: files, lines, formats, requests.

mod columns;
pub(crate) mod date;
mod envelope;
mod field;
pub(crate) mod format;
pub(crate) mod input;
mod json;
mod lines;
pub(crate) mod log;
mod pairs;
pub(crate) mod request;
pub(crate) mod sources;
mod text;
