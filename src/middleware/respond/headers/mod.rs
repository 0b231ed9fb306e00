//! The headers that report quotas to clients: their formats, and how they are rendered.
//!
//! [`Headers`] is the configuration. A layer compiles it into [`PreparedHeaders`], which renders
//! the headers of each response from one [`PolicyView`] per policy.
//!
//! # How to add a header format
//!
//! A format is a list of headers that are sent together. Each header has a name and a `Content`.
//!
//! 1. Add a constructor to `Headers` in `definition.rs`. It lists the names and their contents.
//!    Most formats need nothing else, because the existing contents suffice.
//! 2. If a header reports something new, add a variant to `Content` in `content.rs` and render it
//!    in `PreparedHeaders::value` in `prepared.rs`. That is the only place that chooses the text of
//!    a header; the writers are in `ietf.rs` and `reset.rs`.
//! 3. If a new content reports what remains of the quota, add it to `Content::reports_remaining` in
//!    `content.rs`, and read it in `PreparedFormat::keeps_theirs` in `write.rs`. Without that,
//!    headers of inner layers are always replaced.
//! 4. A list with one item per policy is a variant of `List`. It also needs `push_policy` in
//!    `ietf.rs` to write an item, and `parse.rs` to read the item that an inner layer wrote.
//! 5. Add its vectors to `tests/formats.rs` and `tests/merging.rs` of this folder, and a case to the
//!    property in `tests/properties.rs`.

mod content;
mod definition;
mod ietf;
mod item_cache;
mod layout;
mod legacy;
mod merge;
mod parse;
mod prepared;
mod reset;
mod retry_after;
#[cfg(test)]
mod tests;
mod text;
mod view;
mod wait;
mod write;

pub use definition::{Headers, When};
pub use legacy::{HeadersError, HeadersErrorKind, LegacyHeaders};
pub use reset::{ResetEncoding, ResetMeaning};
pub use wait::Jitter;

pub(crate) use ietf::Advertised;
pub(crate) use layout::RefusalLayout;
pub(crate) use prepared::PreparedHeaders;
pub(crate) use text::integer;
pub(crate) use view::{PolicyView, is_near};
pub(crate) use write::Rendered;
