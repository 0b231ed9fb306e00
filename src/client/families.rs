//! Headers by the words in their names: `X-RateLimit-Remaining-Requests` has a prefix, a word that
//! says what the value is, and a group of words, whose headers describe one quota.

use std::time::Duration;

use crate::header_names::{SHOPIFY, SPELLINGS, WORDS, Word};

/// The headers that describe one quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Group<'a> {
    /// The text before `ratelimit`.
    pub(super) prefix: &'a str,
    /// The words that are not [`WORDS`], such as `requests` or `input-tokens`.
    pub(super) words: &'a str,
}

/// Splits a header's name, which is in lower case. Returns `None` if it says nothing about a limit.
pub(super) fn split(name: &str) -> Option<(Group<'_>, Word)> {
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

/// Returns what is left of a header's name without a word at its start or end. A period that is the
/// whole name stays, because it names the group.
fn without<'a>(rest: &'a str, word: &str) -> Option<&'a str> {
    if rest == word {
        return Some(if period(rest).is_some() { rest } else { "" });
    }
    if let Some(words) = rest.strip_prefix(word).and_then(|words| words.strip_prefix('-')) {
        return Some(words);
    }
    rest.strip_suffix(word).map(|words| words.trim_end_matches('-'))
}

impl<'a> Group<'a> {
    /// Returns the unit that the words name.
    pub(super) fn unit(self) -> Option<&'static str> {
        ["requests", "tokens"].into_iter().find(|unit| self.words.ends_with(unit))
    }

    /// Returns the window that the words name.
    pub(super) fn window(self) -> Option<Duration> {
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
