//! Merging our lists with those that an inner layer or a handler wrote.
//!
//! Everything about one policy comes from the stricter source. A list that cannot be parsed is
//! replaced, because clients would ignore it.

use http::{HeaderMap, HeaderValue};
use smallvec::{SmallVec, smallvec};

use crate::fields::{Item, Items, List, items};

use super::prepared::PreparedHeader;
use super::text::Text;

/// Names of policies, as quoted strings.
type Names<'a> = SmallVec<[&'a [u8]; 4]>;

/// The lines of a list. Ours is the last one.
struct Lines<'a> {
    list: List,
    theirs: Items<'a>,
    last: &'a [u8],
    /// Whether a policy of theirs may be one of the layer's.
    overlap: bool,
}

/// Merges our lists, each the last line of its header, with the lines before it.
pub(super) fn merged<'a>(
    headers: &HeaderMap,
    lists: impl Iterator<Item = (&'a PreparedHeader, List)>,
) -> SmallVec<[Option<HeaderValue>; 2]> {
    let lines: SmallVec<[Lines<'_>; 2]> = lists.map(|(header, list)| Lines::new(headers, header, list)).collect();
    // Usually no policy is in both sources. Then our lines are appended as they are.
    let overlap = lines.iter().any(|lines| lines.overlap);
    let ours: SmallVec<[Items<'_>; 2]> = lines.iter().map(|lines| lines.ours(overlap)).collect();
    let both = || lines.iter().zip(&ours);
    let limits = both().find(|(lines, _)| lines.list == List::Limits);
    let keep = limits.map(|(limits, ours)| kept_policies(&limits.theirs, ours)).unwrap_or_default();
    both().map(|(lines, ours)| merge(&lines.theirs, ours, &keep)).collect()
}

impl<'a> Lines<'a> {
    fn new(headers: &'a HeaderMap, header: &PreparedHeader, list: List) -> Self {
        let mut lines = headers.get_all(&header.name).into_iter().map(HeaderValue::as_bytes);
        let last = lines.next_back().unwrap_or_default();
        let theirs = items(lines, list);
        let overlap =
            theirs.iter().any(|item| header.items.iter().flatten().any(|own| own.as_bytes().starts_with(item.name)));
        Self { list, theirs, last, overlap }
    }

    /// Returns our items: parsed, or all in one if they need not be separated.
    fn ours(&self, parsed: bool) -> Items<'a> {
        if parsed { items([self.last].into_iter(), self.list) } else { smallvec![Item::nameless(self.last)] }
    }
}

/// Returns the policies whose items of theirs stay, because theirs are at least as strict as ours.
fn kept_policies<'a>(theirs: &[Item<'a>], ours: &[Item<'a>]) -> Names<'a> {
    let is_kept = |own: &&Item<'a>| theirs.iter().any(|item| item.name == own.name && !own.is_stricter(item));
    ours.iter().filter(is_kept).map(|own| own.name).collect()
}

/// Merges two lists. An item of ours replaces theirs of the same name in its place, unless `keep`
/// names the policy: theirs stays then.
fn merge(theirs: &[Item<'_>], ours: &[Item<'_>], keep: &[&[u8]]) -> Option<HeaderValue> {
    let ours = || ours.iter().filter(|own| !keep.contains(&own.name));
    let mut text = Text::new();
    let mut push = |item: &Item<'_>| {
        text.push_separator();
        text.push(item.raw);
    };
    let mut replaced = Names::new();
    for item in theirs {
        match ours().find(|own| own.name == item.name) {
            None => push(item),
            Some(own) if !replaced.contains(&own.name) => {
                replaced.push(own.name);
                push(own);
            }
            Some(_) => {} // a second item of theirs for a policy that is replaced
        }
    }
    ours().filter(|own| !replaced.contains(&own.name)).for_each(push);
    text.to_value()
}
