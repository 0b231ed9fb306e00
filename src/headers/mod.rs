//! The headers that report quotas to clients: their formats, and how they are rendered.
//!
//! [`Headers`] is the configuration. A layer compiles this configuration into [`PreparedHeaders`],
//! which renders the headers of each response from one [`PolicyView`] per policy.
//!
//! # How to add a header format
//!
//! A format is a list of headers that are sent together. Each header has a name and a `Content`.
//! Files that are named without a folder are in `src/headers/`.
//!
//! 1. Add a constructor to `Headers` in `definition.rs`. The constructor lists the names of the headers
//!    and their contents. The names are constants in `src/base/header_names.rs`, in lower case. Most
//!    formats need nothing else, because the existing contents suffice. If a name contains a word that
//!    clients do not know yet, add the word to `WORDS` in that file. Names with `ratelimit` or
//!    `rate-limit` are split at these words, and the split also decides which headers describe one
//!    quota.
//! 2. If a header reports something new, add a variant to `Single` in `content.rs` and render it
//!    in `PreparedHeaders::single` in `prepared.rs`. `Text` and `integer` are in `text.rs`; longer
//!    writers are in `ietf.rs` and `reset.rs`. Use `view.remaining()`: it is 0 for a policy that
//!    refused.
//! 3. If the remaining units can be computed from a new content, and no other header of the format reports
//!    them, add the content to `Content::reports_remaining` in `content.rs`. Also add an arm to
//!    `keeps_theirs` in `write.rs`, with a parser in `src/base/fields.rs`. The `_` arm there reads a plain
//!    number, so the compiler does not remind you. If one of these steps is missing, a laxer outer layer
//!    also replaces the headers of inner layers.
//! 4. For a list with one item per policy, add a variant to `List`. Extend `constant_item` in `prepared.rs` to render
//!    the items, and `src/base/fields.rs` to read the items that an inner layer wrote. Other code compares lists with
//!    `==`: run `grep -n 'List::' src/headers/*.rs` to find this code.
//! 5. `Content::is_of_numbers` in `content.rs` says whether the new content can be rendered after the decision, from
//!    `limit`, `remaining`, `reset_us` and `window_us` alone. `Numbers` in `write.rs` keeps only these four numbers
//!    of a decision. Return `false` if the content reads another part of the decision, or the clock.
//! 6. Add the expected headers of the format to `src/headers/tests/formats.rs` and
//!    `src/headers/tests/merging.rs`. Add a case to `headers_parse_as_structured_fields` in
//!    `src/headers/tests/properties.rs`. If the format reports the remaining units, also add a case to
//!    `merged_single_values_have_one_source`.

mod content;
mod definition;
mod ietf;
mod layout;
mod legacy;
mod merge;
mod prepared;
mod reset;
mod retry_after;
mod scope;
#[cfg(all(test, not(ratelimit_loom)))]
mod tests;
mod text;
mod view;
mod wait;
mod write;

pub use definition::{Headers, When};
pub use legacy::LegacyHeaders;
pub use reset::{ResetEncoding, ResetMeaning};
pub use wait::Jitter;

pub(crate) use ietf::Advertised;
pub(crate) use layout::RefusalLayout;
pub(crate) use prepared::PreparedHeaders;
pub(crate) use text::integer;
pub(crate) use view::{PolicyView, is_near, keep_one_of_each};
pub(crate) use write::DueHeaders;
