//! Fields of one's own names.

use std::fmt;

use http::HeaderName;

use super::reset::{ResetEncoding, ResetMeaning};
use super::{Content, Field, Format};

/// Fields of one's own names, for clients that know them from elsewhere. Each field is optional.
///
/// If several policies apply they tell of the one that binds: of those that refused the one with the longest wait, else
/// the one with the least remaining.
///
/// ```
/// use tower_ratelimit::{Headers, LegacyHeaders, ResetEncoding, ResetMeaning};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let headers = Headers::legacy(
///     LegacyHeaders::new()
///         .limit("x-app-limit")
///         .remaining("x-app-remaining")
///         .reset("x-app-reset-after", ResetEncoding::DeltaSecondsDecimal { digits: 3 }, ResetMeaning::NextUnit)
///         .policy_name("x-app-bucket"),
/// )?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, Default)]
pub struct LegacyHeaders {
    fields: Vec<(String, Content)>,
}

impl LegacyHeaders {
    /// No fields.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The field for the limit: the most units that can pass at one instant.
    #[must_use]
    pub fn limit(self, name: impl Into<String>) -> Self {
        self.with(name, Content::Limit)
    }

    /// The field for what remains, rounded down; 0 after a refusal.
    #[must_use]
    pub fn remaining(self, name: impl Into<String>) -> Self {
        self.with(name, Content::Remaining)
    }

    /// The field for what is used: the limit less what remains.
    #[must_use]
    pub fn used(self, name: impl Into<String>) -> Self {
        self.with(name, Content::Used)
    }

    /// A field for the reset. There may be several, of different names.
    #[must_use]
    pub fn reset(self, name: impl Into<String>, encoding: ResetEncoding, meaning: ResetMeaning) -> Self {
        self.with(name, Content::Reset(encoding, meaning))
    }

    /// The field for the policy's name.
    #[must_use]
    pub fn policy_name(self, name: impl Into<String>) -> Self {
        self.with(name, Content::PolicyName)
    }

    fn with(mut self, name: impl Into<String>, content: Content) -> Self {
        self.fields.push((name.into(), content));
        self
    }

    pub(super) fn into_format(self) -> Result<Format, HeadersError> {
        let mut fields: Vec<Field> = Vec::with_capacity(self.fields.len());
        for (text, content) in self.fields {
            let Ok(name) = HeaderName::from_bytes(text.as_bytes()) else {
                return Err(HeadersError { name: text, kind: HeadersErrorKind::Invalid });
            };
            if is_reserved(&name) {
                return Err(HeadersError { name: text, kind: HeadersErrorKind::Reserved });
            }
            if fields.iter().any(|field| field.name == name) {
                return Err(HeadersError { name: text, kind: HeadersErrorKind::Duplicate });
            }
            fields.push(Field { name, content });
        }
        Ok(Format::new(fields))
    }
}

/// Fields that mean something else to everyone between server and client.
fn is_reserved(name: &HeaderName) -> bool {
    const RESERVED: [&str; 14] = [
        "cache-control",
        "connection",
        "content-encoding",
        "content-length",
        "content-type",
        "date",
        "keep-alive",
        "location",
        "retry-after",
        "set-cookie",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    ];
    RESERVED.contains(&name.as_str()) || name.as_str().starts_with("grpc-")
}

/// A name was refused as the name of a header field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeadersError {
    name: String,
    kind: HeadersErrorKind,
}

/// Why a name was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HeadersErrorKind {
    /// It is not the name of a header.
    Invalid,
    /// A header of this name means something else.
    Reserved,
    /// Two headers would have this name.
    Duplicate,
}

impl HeadersError {
    /// Why the name was refused.
    #[must_use]
    pub fn kind(&self) -> HeadersErrorKind {
        self.kind
    }
}

impl fmt::Display for HeadersError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let problem = match self.kind {
            HeadersErrorKind::Invalid => {
                "it is not the name of a header field: use letters, digits and `-`, such as `x-ratelimit-remaining`"
            }
            HeadersErrorKind::Reserved => {
                "that header field means something else to clients and proxies: choose a name of your own"
            }
            HeadersErrorKind::Duplicate => "two fields would have this name: give each its own",
        };
        write!(f, "{:?} cannot be used: {problem}", self.name)
    }
}

impl std::error::Error for HeadersError {}
