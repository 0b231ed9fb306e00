//! The names of headers that report limits: the names that layers write, and the parsing of the words in a
//! name.
//!
//! `X-RateLimit-Remaining-Requests` has a prefix, a word that says what the value is, and further words. Headers that
//! have the prefix and the further words in common describe one quota.

use std::time::Duration;

/// The two spellings of the word that every name contains.
const SPELLINGS: [&str; 2] = ["ratelimit", "rate-limit"];

/// The name of the list of remaining units, in draft 07 and later drafts.
pub(crate) const RATE_LIMIT: &str = "ratelimit";
/// The name of the list of quotas, in draft 06 and later drafts.
pub(crate) const RATE_LIMIT_POLICY: &str = "ratelimit-policy";

/// The names of the headers with single values, in the drafts up to 06.
pub(crate) const DRAFT_LIMIT: &str = "ratelimit-limit";
pub(crate) const DRAFT_REMAINING: &str = "ratelimit-remaining";
pub(crate) const DRAFT_RESET: &str = "ratelimit-reset";

/// The single values by custom.
pub(crate) const X_LIMIT: &str = "x-ratelimit-limit";
pub(crate) const X_REMAINING: &str = "x-ratelimit-remaining";
pub(crate) const X_USED: &str = "x-ratelimit-used";
pub(crate) const X_RESET: &str = "x-ratelimit-reset";
pub(crate) const X_RESOURCE: &str = "x-ratelimit-resource";

/// The header families of OpenAI's API. Each family has a unit, and the names of the headers for the
/// limit, the remaining units and the reset.
pub(crate) const OPENAI: [(&str, [&str; 3]); 2] = [
    ("requests", ["x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"]),
    ("tokens", ["x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"]),
];

/// The header families of Anthropic's API, in the form of [`OPENAI`].
pub(crate) const ANTHROPIC: [(&str, [&str; 3]); 4] = [
    (
        "requests",
        [
            "anthropic-ratelimit-requests-limit",
            "anthropic-ratelimit-requests-remaining",
            "anthropic-ratelimit-requests-reset",
        ],
    ),
    (
        "tokens",
        [
            "anthropic-ratelimit-tokens-limit",
            "anthropic-ratelimit-tokens-remaining",
            "anthropic-ratelimit-tokens-reset",
        ],
    ),
    (
        "input-tokens",
        [
            "anthropic-ratelimit-input-tokens-limit",
            "anthropic-ratelimit-input-tokens-remaining",
            "anthropic-ratelimit-input-tokens-reset",
        ],
    ),
    (
        "output-tokens",
        [
            "anthropic-ratelimit-output-tokens-limit",
            "anthropic-ratelimit-output-tokens-remaining",
            "anthropic-ratelimit-output-tokens-reset",
        ],
    ),
];

/// The headers that hold the status of a refusal over gRPC. Such a refusal has no trailers. Over gRPC-Web, a
/// browser therefore hides the status from scripts unless these headers are exposed.
pub(crate) const GRPC_STATUS: [&str; 4] =
    ["grpc-status", "grpc-message", "grpc-status-details-bin", "grpc-retry-pushback-ms"];

/// The name of a header with the wait in milliseconds, which is sent in addition to `Retry-After`.
pub(crate) const RETRY_AFTER_MS: &str = "retry-after-ms";

/// Azure's name for a header with the wait in milliseconds.
#[cfg(feature = "client")]
pub(crate) const X_MS_RETRY_AFTER_MS: &str = "x-ms-retry-after-ms";

/// Shopify's only header about limits. The name of this header contains neither of [`SPELLINGS`].
const SHOPIFY: &str = "x-shopify-shop-api-call-limit";

/// The meaning of a header's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    /// The name has no further word, as in `RateLimit`. The value is a list, a dictionary, or a limit.
    All,
    /// The name contains none of [`WORDS`]. The value may be a dictionary.
    Unknown,
    Policy,
    Limit,
    Remaining,
    Used,
    /// `32/40`.
    UsedOfLimit,
    Reset,
    /// The time until the reset. This reset is preferred to [`Reset`](Self::Reset), because a client
    /// reads it without a clock.
    ResetAfter,
    RetryAfter,
    Name,
    Scope,
    WindowSeconds,
    WindowMillis,
}

/// The words with which a name, without its prefix, can begin or end. If one word ends with another
/// word, the longer word comes first.
const WORDS: [(&str, Word); 28] = [
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

/// The headers that describe one quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Group<'a> {
    /// The text before `ratelimit`.
    pub(crate) prefix: &'a str,
    /// The words of the name that are not in [`WORDS`], such as `requests` or `input-tokens`.
    pub(crate) words: &'a str,
}

/// Splits a header's name, which must be in lower case. Returns `None` if the name does not belong to a
/// header about limits.
pub(crate) fn split(name: &str) -> Option<(Group<'_>, Word)> {
    if name == SHOPIFY {
        return Some((Group { prefix: "x-shopify-", words: "" }, Word::UsedOfLimit));
    }
    let (prefix, rest) = SPELLINGS.iter().find_map(|spelling| name.split_once(spelling))?;
    if rest.is_empty() {
        return Some((Group { prefix, words: "" }, Word::All));
    }
    let rest = rest.strip_prefix('-')?;
    let known = WORDS.iter().find_map(|(text, word)| Some((without(rest, text)?, *word)));
    let (words, word) = known.unwrap_or((rest, Word::Unknown));
    Some((Group { prefix, words }, word))
}

/// Returns whether both headers have a single value and describe one quota. Both header names must be in
/// lower case. Names with different [`SPELLINGS`] are of different families.
pub(crate) fn are_of_one_family(name: &str, other: &str) -> bool {
    let start = |name: &str| SPELLINGS.iter().find_map(|spelling| Some(name.find(spelling)? + spelling.len()));
    let Some(end) = start(name) else { return false };
    // Compares the beginnings of the names first, because most headers of a response begin differently.
    if name.get(..end) != other.get(..end) {
        return false;
    }
    let group = |name| split(name).filter(|(_, word)| word.is_value()).map(|(group, _)| group);
    group(name).is_some_and(|own| group(other) == Some(own))
}

/// Returns `rest` without `word`, if `rest` begins or ends with `word`. If `rest` equals `word`, returns an empty
/// text, unless `word` is a period. A period is kept, because it names the group of headers.
fn without<'a>(rest: &'a str, word: &str) -> Option<&'a str> {
    if rest == word {
        return Some(if period(rest).is_some() { rest } else { "" });
    }
    if let Some(words) = rest.strip_prefix(word).and_then(|words| words.strip_prefix('-')) {
        return Some(words);
    }
    rest.strip_suffix(word).map(|words| words.trim_end_matches('-'))
}

impl Word {
    /// Returns whether the header holds a single value of a quota, not a list, a wait or a value with an
    /// unknown meaning.
    fn is_value(self) -> bool {
        !matches!(self, Self::All | Self::Unknown | Self::Policy | Self::RetryAfter)
    }
}

#[cfg(feature = "client")]
impl Group<'_> {
    /// Returns the unit that the words name.
    pub(crate) fn unit(self) -> Option<&'static str> {
        ["requests", "tokens"].into_iter().find(|unit| self.words.ends_with(unit))
    }

    /// Returns the window that the words name.
    pub(crate) fn window(self) -> Option<Duration> {
        self.words.split('-').find_map(period)
    }
}

fn period(word: &str) -> Option<Duration> {
    Some(Duration::from_secs(match word {
        "second" | "secondly" => 1,
        "minute" => 60,
        "hour" | "hourly" => 3_600,
        "day" | "daily" => 86_400,
        _ => return None,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn family_is_the_headers_that_describe_one_quota() {
        for (name, other, expected) in [
            ("x-ratelimit-limit", "x-ratelimit-used", true),
            ("x-ratelimit-limit", "x-ratelimit-resource", true),
            ("x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", true),
            ("acme-ratelimit-tokens-limit", "acme-ratelimit-tokens-reset", true),
            ("ratelimit-limit", "ratelimit-observed", true),
            ("x-ratelimit-limit", "x-ratelimit-limit-tokens", false),
            ("x-ratelimit-limit-requests", "x-ratelimit-limit-tokens", false),
            ("x-ratelimit-limit", "x-rate-limit-limit", false),
            ("x-ratelimit-limit", "ratelimit-limit", false),
            ("x-ratelimit-limit", "x-ratelimit-retry-after", false),
            ("ratelimit-limit", "ratelimit", false),
            ("ratelimit-limit", "ratelimit-policy", false),
            ("x-app-limit", "x-app-remaining", false),
            ("x-ratelimit-limit", "content-type", false),
            ("x-ratelimit-limit", "x", false),
        ] {
            assert_eq!(are_of_one_family(name, other), expected, "{name} {other}");
            assert_eq!(are_of_one_family(other, name), expected, "{other} {name}");
        }
    }
}
