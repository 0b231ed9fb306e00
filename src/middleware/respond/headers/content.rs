//! The content of one header.

use http::HeaderName;

use crate::fields::List;

use super::reset::{ResetEncoding, ResetMeaning};

/// A header of a format.
#[derive(Clone, Debug)]
pub(super) struct Header {
    pub(super) name: HeaderName,
    pub(super) content: Content,
}

/// The content of a header. A header that is not a list reports the policy that binds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// A list with an item for each policy.
    List(List),
    /// The dictionary of draft 07: `limit=100, remaining=50, reset=5`.
    Dictionary,
    /// The reset of drafts 06 and 07, which is the wait after a refusal.
    DraftReset,
    Limit,
    Remaining,
    Used,
    Reset(ResetEncoding, ResetMeaning),
    PolicyName,
    /// The longest wait of the policies that refused.
    RetryAfter,
}

impl Content {
    /// Returns whether a header with this content reports what remains of the quota.
    pub(super) fn reports_remaining(self) -> bool {
        matches!(self, Self::Remaining | Self::Dictionary)
    }
}

impl Header {
    /// Creates a header. `name` is in lower case, as `HeaderName::from_static` requires.
    pub(super) fn new(name: &'static str, content: Content) -> Self {
        Self { name: HeaderName::from_static(name), content }
    }
}
