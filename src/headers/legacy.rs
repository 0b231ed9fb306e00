//! Headers whose names the application chooses.

use http::HeaderName;

use crate::base::header_names::RETRY_AFTER_MS;
use crate::error::{ConfigError, ConfigErrorKind};

use super::content::{Content, Header, Single};
use super::reset::{ResetEncoding, ResetMeaning};

/// Headers with names of your own, for clients that already expect these names. Each header is
/// optional.
///
/// If several policies apply, the headers report the policy that binds. The policy that binds is the
/// refusing policy with the longest wait, or if no policy refused, the policy with the fewest remaining
/// units.
///
/// ```
/// use tower_ratelimit::{
///     Headers,
///     middleware::{LegacyHeaders, ResetEncoding, ResetMeaning},
/// };
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let headers = Headers::legacy(
///     LegacyHeaders::new()
///         .limit("x-app-limit")
///         .remaining("x-app-remaining")
///         .reset(
///             "x-app-reset-after",
///             ResetEncoding::DeltaSecondsDecimal { digits: 3 },
///             ResetMeaning::NextUnit,
///         )
///         .policy_name("x-app-bucket"),
/// )?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, Default)]
pub struct LegacyHeaders {
    values: Vec<(String, Single)>,
}

impl LegacyHeaders {
    /// Makes a format without headers.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the header of the limit: the maximum number of units that can pass at one instant.
    #[must_use]
    pub fn limit(self, name: impl Into<String>) -> Self {
        self.with(name, Single::Limit)
    }

    /// Sets the header of the remaining units, rounded down. The value of this header is 0 after a
    /// refusal.
    #[must_use]
    pub fn remaining(self, name: impl Into<String>) -> Self {
        self.with(name, Single::Remaining)
    }

    /// Sets the header of the used units: the limit minus the remaining units.
    #[must_use]
    pub fn used(self, name: impl Into<String>) -> Self {
        self.with(name, Single::Used)
    }

    /// Adds a header of the reset. A format may have several such headers, with different names.
    #[must_use]
    pub fn reset(self, name: impl Into<String>, encoding: ResetEncoding, meaning: ResetMeaning) -> Self {
        self.with(name, Single::Reset(encoding, meaning))
    }

    /// Sets the header of the policy's name.
    #[must_use]
    pub fn policy_name(self, name: impl Into<String>) -> Self {
        self.with(name, Single::PolicyName)
    }

    fn with(mut self, name: impl Into<String>, value: Single) -> Self {
        self.values.push((name.into(), value));
        self
    }

    pub(super) fn into_headers(self) -> Result<Vec<Header>, ConfigError> {
        let mut headers: Vec<Header> = Vec::with_capacity(self.values.len());
        for (text, value) in self.values {
            let (kind, why) = match HeaderName::from_bytes(text.as_bytes()) {
                Err(_) => (
                    ConfigErrorKind::Name,
                    "it is not a valid header name: use letters, digits and `-`, such as `x-ratelimit-remaining`",
                ),
                Ok(name) if is_reserved(&name) => {
                    (ConfigErrorKind::Name, "HTTP or gRPC gives this name another meaning: choose a name of your own")
                }
                Ok(name) if headers.iter().any(|header| header.name == name) => {
                    (ConfigErrorKind::Name, "two headers would have this name: give each header a name of its own")
                }
                Ok(name) => {
                    headers.push(Header { name, content: Content::Single(value) });
                    continue;
                }
            };
            return Err(ConfigError::new(kind, format!("{text:?} cannot be used for a header: {why}")));
        }
        Ok(headers)
    }
}

/// Returns whether HTTP or gRPC gives the name another meaning.
fn is_reserved(name: &HeaderName) -> bool {
    const RESERVED: [&str; 15] = [
        "cache-control",
        "connection",
        "content-encoding",
        "content-length",
        "content-type",
        "date",
        "keep-alive",
        "location",
        "retry-after",
        RETRY_AFTER_MS,
        "set-cookie",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    ];
    RESERVED.contains(&name.as_str()) || name.as_str().starts_with("grpc-")
}
