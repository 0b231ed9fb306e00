//! The names of headers about limits: the names that a layer writes, and what the words in a name mean to a client.

/// What every name contains, in either spelling.
#[cfg(feature = "client")]
pub(crate) const SPELLINGS: [&str; 2] = ["ratelimit", "rate-limit"];

/// The beginnings of the names that are a custom, in either spelling.
pub(crate) const X_PREFIXES: [&str; 2] = ["x-ratelimit-", "x-rate-limit-"];

/// The list of what remains, in the drafts since 07.
pub(crate) const RATE_LIMIT: &str = "ratelimit";
/// The list of quotas, in the drafts since 06.
pub(crate) const RATE_LIMIT_POLICY: &str = "ratelimit-policy";

/// The single values of the drafts until 06.
pub(crate) const DRAFT_LIMIT: &str = "ratelimit-limit";
pub(crate) const DRAFT_REMAINING: &str = "ratelimit-remaining";
pub(crate) const DRAFT_RESET: &str = "ratelimit-reset";

/// The single values by custom.
pub(crate) const X_LIMIT: &str = "x-ratelimit-limit";
pub(crate) const X_REMAINING: &str = "x-ratelimit-remaining";
pub(crate) const X_USED: &str = "x-ratelimit-used";
pub(crate) const X_RESET: &str = "x-ratelimit-reset";

/// Waits in milliseconds.
#[cfg(feature = "client")]
pub(crate) const RETRY_AFTER_MS: [&str; 2] = ["retry-after-ms", "x-ms-retry-after-ms"];

/// Shopify's only header, whose name has no word of [`WORDS`].
#[cfg(feature = "client")]
pub(crate) const SHOPIFY: &str = "x-shopify-shop-api-call-limit";

/// The meaning of a header's value.
#[cfg(feature = "client")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    /// The header is the family's name alone: a list, a dictionary, or a limit.
    All,
    /// None of [`WORDS`] is in the name. The value may be a dictionary.
    Unknown,
    Policy,
    Limit,
    Remaining,
    Used,
    /// `32/40`.
    UsedOfLimit,
    Reset,
    /// A reset that is preferred to [`Reset`](Self::Reset), because it needs no clock.
    ResetAfter,
    RetryAfter,
    Name,
    Scope,
    WindowSeconds,
    WindowMillis,
}

/// The words that a name can begin or end with. A word comes before those that it ends with.
#[cfg(feature = "client")]
pub(crate) const WORDS: [(&str, Word); 28] = [
    ("retry-after-seconds", Word::RetryAfter),
    ("retry-after", Word::RetryAfter),
    ("reset-after", Word::ResetAfter),
    ("after", Word::ResetAfter),
    ("reset-time", Word::Reset),
    ("resettime", Word::Reset),
    ("resetson", Word::Reset),
    ("resets", Word::Reset),
    ("reset", Word::Reset),
    ("next", Word::Reset),
    ("policy", Word::Policy),
    ("limit", Word::Limit),
    ("max", Word::Limit),
    ("remaining", Word::Remaining),
    ("used", Word::Used),
    ("usage", Word::Used),
    ("observed", Word::Used),
    ("resource", Word::Name),
    ("bucket", Word::Name),
    ("name", Word::Name),
    ("scope", Word::Scope),
    ("interval-seconds", Word::WindowSeconds),
    ("window-seconds", Word::WindowSeconds),
    ("window", Word::WindowSeconds),
    ("interval-milliseconds", Word::WindowMillis),
    ("secondly", Word::Limit),
    ("hourly", Word::Limit),
    ("daily", Word::Limit),
];
