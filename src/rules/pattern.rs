//! Texts in which `*` matches any characters, and the results of comparisons with such texts.

use std::borrow::Cow;
use std::collections::HashSet;

/// The result of a comparison. A part of a request is unclear if it cannot be read, or if other programs may read it in
/// another way. An unclear part meets `match` but does not meet `not`, so a client cannot escape a rule with an unclear
/// request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MatchResult {
    Yes,
    No,
    Unclear,
}

impl From<bool> for MatchResult {
    fn from(is_met: bool) -> Self {
        if is_met { Self::Yes } else { Self::No }
    }
}

/// A text in which each `*` matches any characters, or no character. The text has at least one `*`.
pub(super) struct Pattern {
    begin: Box<str>,
    /// The texts between two neighbouring `*`, in their order.
    middle: Vec<Box<str>>,
    end: Box<str>,
    /// The number of bytes without the `*`. A shorter text cannot match.
    shortest: usize,
}

impl Pattern {
    pub(super) fn new(text: &str) -> Self {
        let (begin, rest) = text.split_once('*').unwrap_or((text, ""));
        let (middle, end) = rest.rsplit_once('*').unwrap_or(("", rest));
        let middle = middle.split('*').filter(|part| !part.is_empty()).map(Into::into).collect();
        let shortest = text.len() - text.matches('*').count();
        Self { begin: begin.into(), middle, end: end.into(), shortest }
    }

    /// Returns whether a text matches. The time is linear in the length of the text.
    pub(super) fn matches(&self, text: &str) -> bool {
        if text.len() < self.shortest {
            return false;
        }
        let rest = text.strip_prefix(&*self.begin).and_then(|rest| rest.strip_suffix(&*self.end));
        let Some(mut rest) = rest else { return false };
        self.middle.iter().all(|part| match rest.split_once(&**part) {
            Some((_, after)) => {
                rest = after;
                true
            }
            None => false,
        })
    }
}

/// The longest text that is compared with patterns, in bytes.
const COMPARED_MAX: usize = 1_000;

/// Texts and patterns. At least one of these texts and patterns must match the bytes of a header.
pub(super) struct AnyOf {
    exact: HashSet<Box<str>>,
    patterns: Vec<Pattern>,
    ignores_case: bool,
}

impl AnyOf {
    pub(super) fn new<'t>(texts: impl IntoIterator<Item = &'t str>, ignores_case: bool) -> Self {
        let mut any = Self { exact: HashSet::new(), patterns: Vec::new(), ignores_case };
        for text in texts {
            let text = any.characters(text.as_bytes());
            if text.contains('*') {
                any.patterns.push(Pattern::new(&text));
            } else {
                any.exact.insert(text.into());
            }
        }
        any
    }

    /// Returns whether one of the texts and patterns matches. For each pattern, the time is linear in the length of
    /// `text`.
    pub(super) fn find(&self, text: &[u8]) -> MatchResult {
        // A text above `COMPARED_MAX` is not compared, so that no client can make the comparison slow.
        if text.len() > COMPARED_MAX {
            return MatchResult::Unclear;
        }
        let text = self.characters(text);
        (self.exact.contains(&*text) || self.patterns.iter().any(|pattern| pattern.matches(&text))).into()
    }

    /// Returns bytes as a text with one character for each byte. The text is in lower case if case does not matter.
    fn characters<'b>(&self, bytes: &'b [u8]) -> Cow<'b, str> {
        let is_upper = self.ignores_case && bytes.iter().any(u8::is_ascii_uppercase);
        match std::str::from_utf8(bytes) {
            Ok(text) if text.is_ascii() && !is_upper => Cow::Borrowed(text),
            Ok(text) if text.is_ascii() => Cow::Owned(text.to_ascii_lowercase()),
            _ => {
                let byte = |byte: &u8| if is_upper { byte.to_ascii_lowercase() } else { *byte };
                bytes.iter().map(|one| char::from(byte(one))).collect()
            }
        }
    }
}

#[cfg(all(test, not(ratelimit_loom)))]
mod tests {
    use super::*;

    const PATTERNS: &[(&str, &[&str], &[&str])] = &[
        ("*", &["", "a", "é", "a*b"], &[]),
        ("foo*", &["foo", "foo1", "foo*"], &["", "fo", "bar"]),
        ("/api*v1", &["/apiv1", "/api/x/v1"], &["/api", "/api/v2", "/av1"]),
        ("svc*ep*rpc", &["svceprpc", "svc-1-ep-2-rpc", "svcepeprpc"], &["svcrpc", "svceprp", "svcrpcep"]),
        ("a*a", &["aa", "aba"], &["a"]),
        ("a**b", &["ab", "axb"], &["a"]),
        ("*bot*", &["bot", "a bot b"], &["bo"]),
        ("*.example.com", &["a.example.com", ".example.com"], &["example.com", "a.example.com.b"]),
        ("a*b*c", &["abc", "aXbYc", "abbcc", "abcbc"], &["ab", "acb", "abcd"]),
        ("*é*", &["é", "café au lait"], &["e", "caf\u{e8}"]),
    ];

    #[test]
    fn pattern_stands_for_any_characters() {
        for (text, yes, no) in PATTERNS {
            let (pattern, any) = (Pattern::new(text), AnyOf::new([*text], false));
            let both = |text: &str| (pattern.matches(text), any.find(text.as_bytes()));
            yes.iter().for_each(|text| assert_eq!(both(text), (true, MatchResult::Yes), "{text}"));
            no.iter().for_each(|text| assert_eq!(both(text), (false, MatchResult::No), "{text}"));
        }
    }

    #[test]
    fn any_bytes_are_compared() {
        let any = AnyOf::new(["a", "*Bot*", "café"], true);
        for text in [&b"A"[..], b"GoogleBOT/2", b"\xffbot\xfe", "CAFé".as_bytes()] {
            assert_eq!(any.find(text), MatchResult::Yes, "{text:?}");
        }
        for text in [&b""[..], b"aa", b"*", b"\xff", b"caf\xe9"] {
            assert_eq!(any.find(text), MatchResult::No, "{text:?}");
        }
        let long = [b'x'; COMPARED_MAX + 1];
        assert_eq!((any.find(&long), any.find(&long[1..])), (MatchResult::Unclear, MatchResult::No));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn comparing_takes_time_that_is_linear_in_the_text() {
        use super::super::tests::running_time;
        for pattern in
            [|half: usize| format!("*{}b*", "a".repeat(half)), |half: usize| format!("{}b*", "*a".repeat(half))]
        {
            // The nanoseconds of a thousand comparisons, measured over many ticks of the scheduler.
            let of = |length: usize| {
                let (any, text) = (AnyOf::new([&*pattern(length / 2)], true), "a".repeat(length));
                let (began, mut thousands) = (running_time(), 0);
                while running_time() - began < 200_000_000 {
                    (0..1_000)
                        .for_each(|_| assert_eq!(any.find(std::hint::black_box(text.as_bytes())), MatchResult::No));
                    thousands += 1;
                }
                (running_time() - began) / thousands
            };
            let (short, long) = (of(100), of(1_000));
            assert!(long < 30 * short, "{} takes {short} ns, and {long} ns for the tenfold", pattern(2));
        }
    }
}
