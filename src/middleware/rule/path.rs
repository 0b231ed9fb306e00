//! Path patterns, and an index that finds the rules whose pattern a path matches.

use std::collections::HashMap;
use std::fmt;

use foldhash::quality::RandomState;
use smallvec::SmallVec;

use crate::base::head::Head;
use crate::base::order::sort_indices;
use crate::key::original_uri;

/// A pattern for the path of a request, in the form of axum's routes: `/users/{id}/posts`, `/files/{*path}`. Segments
/// are compared as the client sent them: case counts, and percent-encoding is not decoded, apart from slashes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PathPattern {
    /// The segments, at least one. Slashes separate the segments, and a slash stands before the
    /// first segment.
    pub(crate) segments: Vec<Segment>,
}

/// A segment of a pattern.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Segment {
    /// Text that the segment must be equal to. The text may be empty, as after a slash at the end.
    Literal(Box<str>),
    /// One segment that is not empty.
    Any,
    /// The rest of the path, which is not empty. Only the last segment can be of this kind.
    Rest,
}

impl PathPattern {
    /// Returns whether the pattern can match paths that are in lower case, without `;` and without a
    /// slash at the end.
    #[cfg(feature = "rules")]
    pub(crate) fn is_folded(&self) -> bool {
        // Skips the two hexadecimal digits of each percent-encoding, because they are not letters of the path.
        let is_plain = |text: &str| !text.contains(|c: char| c.is_ascii_uppercase() || c == ';');
        let is_literal = |segment: &Segment| match segment {
            Segment::Literal(text) => text
                .split('%')
                .enumerate()
                .all(|(at, part)| is_plain(part.get(if at == 0 { 0 } else { 2 }..).unwrap_or(""))),
            Segment::Any | Segment::Rest => true,
        };
        let ends_with_slash = matches!(self.segments.as_slice(), [_, .., Segment::Literal(last)] if last.is_empty());
        self.segments.iter().all(is_literal) && !ends_with_slash
    }
}

/// Prints the pattern without the names of its segments, which are not kept.
impl fmt::Display for PathPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.segments.iter().try_for_each(|segment| match segment {
            Segment::Literal(text) => write!(f, "/{}", text.replace('{', "{{").replace('}', "}}")),
            Segment::Any => f.write_str("/{any}"),
            Segment::Rest => f.write_str("/{*rest}"),
        })
    }
}

/// Finds the rules that may apply to a request: the rules with a pattern that its path matches, and the rules
/// without a pattern. The time of a search grows with the number of segments of the path, and not with the number
/// of rules that do not match.
#[derive(Debug, Default)]
pub(crate) struct PathIndex {
    root: PathNode,
    /// The rules without a pattern.
    everywhere: Vec<usize>,
    /// The number of all rules.
    rules: usize,
}

/// The patterns that have the same beginning.
#[derive(Debug, Default)]
struct PathNode {
    literals: HashMap<Box<str>, Self, RandomState>,
    any: Option<Box<Self>>,
    /// The rules whose patterns end here.
    ends: Vec<usize>,
    /// The rules whose patterns continue only with a [`Segment::Rest`].
    rests: Vec<usize>,
}

impl PathIndex {
    /// Makes an index of the patterns of rules, in their order. A rule applies to the paths of any of its patterns.
    /// Returns `None` if no rule has a pattern.
    pub(crate) fn new<'a>(rules: impl Iterator<Item = &'a [PathPattern]>) -> Option<Self> {
        let mut index = Self::default();
        let mut has_pattern = false;
        for (rule, patterns) in rules.enumerate() {
            index.rules = rule + 1;
            if patterns.is_empty() {
                index.everywhere.push(rule);
            }
            for pattern in patterns {
                has_pattern = true;
                index.root.add(&pattern.segments, rule);
            }
        }
        has_pattern.then_some(index)
    }

    /// Returns the rules that may apply to a request, in their order. The path is the path that the client sent,
    /// also inside of a nested router. A request without a path, such as `OPTIONS *`, matches every pattern, so that
    /// it does not escape a rule. A path with an encoded slash does not escape a rule either: it also matches the
    /// patterns that it would match with a plain slash.
    pub(crate) fn rules(&self, head: &Head<'_>) -> SmallVec<[usize; 8]> {
        let Some(path) = original_uri(head).path().strip_prefix('/') else { return (0..self.rules).collect() };
        let mut found = SmallVec::from_slice(&self.everywhere);
        self.root.find(path, &mut found);
        if let Some(path) = with_plain_slashes(path) {
            self.root.find(&path, &mut found);
        }
        sort_indices(&mut found, &|one, other| one.cmp(&other));
        found.dedup();
        found
    }
}

/// Returns a path in the form that it has for servers that decode its slashes, merge them, and then resolve `.` and
/// `..`, as nginx does. Returns `None` if no slash is encoded.
fn with_plain_slashes(path: &str) -> Option<String> {
    let is_encoded_slash = |at: usize| path.get(at..at + 3).is_some_and(|text| text.eq_ignore_ascii_case("%2f"));
    if !path.match_indices('%').any(|(at, _)| is_encoded_slash(at)) {
        return None;
    }
    let plain = path.replace("%2F", "/").replace("%2f", "/");
    let mut segments: Vec<&str> = Vec::new();
    let mut ends_with_slash = false;
    for segment in plain.split('/') {
        ends_with_slash = matches!(segment, "" | "." | "..");
        match segment {
            "" | "." => {}
            ".." => _ = segments.pop(),
            segment => segments.push(segment),
        }
    }
    if ends_with_slash && !segments.is_empty() {
        segments.push("");
    }
    Some(segments.join("/"))
}

impl PathNode {
    fn add(&mut self, segments: &[Segment], rule: usize) {
        let mut node = self;
        for segment in segments {
            node = match segment {
                Segment::Literal(literal) => node.literals.entry(literal.clone()).or_default(),
                Segment::Any => node.any.get_or_insert_default(),
                Segment::Rest => return node.rests.push(rule),
            };
        }
        node.ends.push(rule);
    }

    fn find(&self, path: &str, found: &mut SmallVec<[usize; 8]>) {
        if !path.is_empty() {
            found.extend_from_slice(&self.rests);
        }
        let (segment, rest) = path.split_once('/').map_or((path, None), |(segment, rest)| (segment, Some(rest)));
        let literal = if self.literals.is_empty() { None } else { self.literals.get(segment) };
        let any = self.any.as_deref().filter(|_| !segment.is_empty());
        for next in literal.into_iter().chain(any) {
            match rest {
                Some(rest) => next.find(rest, found),
                None => found.extend_from_slice(&next.ends),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use http::request::Parts;

    use super::*;

    /// A pattern, in which `{a}` is any segment and `{*a}` the rest.
    fn pattern(text: &str) -> PathPattern {
        let segment = |text: &str| match text.as_bytes() {
            [b'{', b'*', ..] => Segment::Rest,
            [b'{', ..] => Segment::Any,
            _ => Segment::Literal(text.into()),
        };
        PathPattern { segments: text.split('/').skip(1).map(segment).collect() }
    }

    fn parts(path: &str) -> Parts {
        http::Request::get(path).body(()).unwrap().into_parts().0
    }

    fn rules_of(patterns: &[&str], path: &str) -> Vec<usize> {
        let rules: Vec<[PathPattern; 1]> = patterns.iter().map(|text| [pattern(text)]).collect();
        PathIndex::new(rules.iter().map(|rule| &rule[..])).unwrap().rules(&Head::from(&parts(path))).to_vec()
    }

    #[test]
    fn pattern_matches_as_a_route_of_axum() {
        for (pattern, yes, no) in [
            ("/", &["/", "/?q"][..], &["/a", "//"][..]),
            ("/a", &["/a", "/a?b=/c"], &["/", "/a/", "/A", "/%61", "/a/b", "/ab"]),
            ("/a/", &["/a/"], &["/a", "/a//"]),
            ("/{id}", &["/a", "/%20"], &["/", "/a/", "/a/b"]),
            ("/a/{id}/b", &["/a/1/b", "/a/b/b"], &["/a//b", "/a/1/c", "/a/1/b/"]),
            ("/a/{*rest}", &["/a/b", "/a/b/", "/a/b/c", "/a//"], &["/a", "/a/", "/b/c"]),
            ("/{*rest}", &["/a", "/a/b"], &["/"]),
        ] {
            yes.iter().for_each(|path| assert_eq!(rules_of(&[pattern], path), [0], "{pattern} {path}"));
            no.iter().for_each(|path| assert!(rules_of(&[pattern], path).is_empty(), "{pattern} {path}"));
        }
    }

    #[test]
    fn rules_that_match_are_found_once_and_in_their_order() {
        let patterns = ["/v1/{*rest}", "/v1/users", "/{any}/users", "/v2", "/v1/{id}"];
        assert_eq!(rules_of(&patterns, "/v1/users"), [0, 1, 2, 4]);
        assert_eq!(rules_of(&patterns, "/v2"), [3]);
        assert!(rules_of(&patterns, "/v3").is_empty());
        let both = [pattern("/v1/users"), pattern("/v1/{id}")];
        assert_eq!(
            PathIndex::new([&both[..]].into_iter()).unwrap().rules(&Head::from(&parts("/v1/users"))).to_vec(),
            [0]
        );
    }

    #[test]
    fn rules_without_a_pattern_are_always_found() {
        let a = [pattern("/a")];
        let index = PathIndex::new([&[][..], &a, &[]].into_iter()).unwrap();
        assert_eq!(index.rules(&Head::from(&parts("/a"))).to_vec(), [0, 1, 2]);
        assert_eq!(index.rules(&Head::from(&parts("/b"))).to_vec(), [0, 2]);
        assert!(PathIndex::new([&[][..]].into_iter()).is_none());
    }

    #[test]
    fn request_without_a_path_matches_every_pattern() {
        let (a, b) = ([pattern("/a")], [pattern("/b/{*rest}")]);
        let index = PathIndex::new([&a[..], &[], &b].into_iter()).unwrap();
        for uri in ["*", "example.com:443"] {
            let mut without = parts("/a");
            without.uri = uri.parse().unwrap();
            assert_eq!(index.rules(&Head::from(&without)).to_vec(), [0, 1, 2], "{uri}");
        }
    }
}
