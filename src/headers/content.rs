//! The content of one header.

use http::HeaderName;

use crate::base::fields::List;

use super::reset::{ResetEncoding, ResetMeaning};

/// A header of a format.
#[derive(Clone, Debug)]
pub(super) struct Header {
    pub(super) name: HeaderName,
    pub(super) content: Content,
}

/// The content of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// A list that has an item for each policy.
    List(List),
    /// A value of the policy that binds.
    Single(Single),
    /// The longest wait of the policies that refused, in seconds.
    RetryAfter,
    /// The longest wait of the policies that refused, in milliseconds.
    RetryAfterMs,
}

/// A value of the policy that binds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Single {
    /// The dictionary of draft 07: `limit=100, remaining=50, reset=5`.
    Dictionary,
    /// The reset of drafts 06 and 07, which is the wait after a refusal.
    DraftReset,
    Limit,
    Remaining,
    Used,
    Reset(ResetEncoding, ResetMeaning),
    PolicyName,
}

impl Content {
    /// Returns whether a header with this content has a value of the policy that binds.
    pub(super) fn is_single(self) -> bool {
        matches!(self, Self::Single(_))
    }

    /// Returns whether a header with this content can be rendered after the decision. After the decision, only
    /// the policy and the [numbers](super::write::Numbers) of an allowed charge are available. A date cannot
    /// be rendered later, because it is measured from the decision. The match names each content, so that the
    /// compiler rejects a new content without an arm.
    pub(super) fn is_of_numbers(self) -> bool {
        match self {
            Self::List(List::Limits | List::Policies | List::Nameless) | Self::RetryAfter | Self::RetryAfterMs => true,
            Self::Single(single) => match single {
                Single::Reset(encoding, _) => !encoding.is_date(),
                Single::Dictionary | Single::DraftReset | Single::Limit | Single::Remaining | Single::Used => true,
                Single::PolicyName => true,
            },
        }
    }

    /// Returns whether a header with this content reports the remaining units of the quota.
    pub(super) fn reports_remaining(self) -> bool {
        matches!(self, Self::Single(Single::Remaining | Single::Dictionary))
    }
}

impl Header {
    /// Makes a header with an item for each policy. `name` must be in lower case, as `HeaderName::from_static`
    /// requires.
    pub(super) fn list(name: &'static str, list: List) -> Self {
        Self { name: HeaderName::from_static(name), content: Content::List(list) }
    }

    /// Makes a header with a value of the policy that binds. `name` must be in lower case, as
    /// `HeaderName::from_static` requires.
    pub(super) fn single(name: &'static str, value: Single) -> Self {
        Self { name: HeaderName::from_static(name), content: Content::Single(value) }
    }
}
