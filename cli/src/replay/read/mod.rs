//! Reading logs: files, lines, formats, requests.

mod columns;
pub(crate) mod date;
mod field;
pub(crate) mod format;
pub(crate) mod input;
mod json;
mod lines;
pub(crate) mod log;
pub(crate) mod request;
mod text;
