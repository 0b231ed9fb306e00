//! Merging our list with a list that an inner layer or a handler wrote.
//!
//! Everything about one policy comes from the stricter source. A list that cannot be parsed is
//! replaced, because clients would ignore it.

use smallvec::SmallVec;

use super::content::List;
use super::parse::{Item, Items, items};
use super::text::Text;

/// Names of policies, as quoted strings.
pub(super) type Names<'a> = SmallVec<[&'a [u8]; 4]>;

/// Returns the policies whose items of theirs stay, because theirs are at least as strict as ours.
/// `lines` holds [limits](List::Limits), ours in the last line.
pub(super) fn kept_policies<'a>(lines: &[&'a [u8]]) -> Names<'a> {
    let (theirs, ours) = split(lines, List::Limits);
    let is_kept = |own: &&Item<'a>| theirs.iter().any(|item| item.name == own.name && !own.is_stricter(item));
    ours.iter().filter(is_kept).map(|own| own.name).collect()
}

/// Merges the lines of a list, ours in the last line. An item of ours replaces theirs of the same
/// name in its place, unless `keep` names the policy: theirs stays then.
pub(super) fn merge(lines: &[&[u8]], list: List, keep: &[&[u8]]) -> Text {
    let (theirs, mut ours) = split(lines, list);
    ours.retain(|own| !keep.contains(&own.name));
    let mut text = Text::new();
    let mut push = |item: &Item<'_>| {
        text.push_separator();
        text.push(item.raw);
    };
    let mut replaced = Names::new();
    for item in &theirs {
        match ours.iter().find(|own| own.name == item.name) {
            None => push(item),
            Some(own) if !replaced.contains(&own.name) => {
                replaced.push(own.name);
                push(own);
            }
            Some(_) => {} // a second item of theirs for a policy that is replaced
        }
    }
    ours.iter().filter(|own| !replaced.contains(&own.name)).for_each(push);
    text
}

/// Parses the items of all lines but the last, and those of the last. If one of theirs is not such
/// a list, none of theirs count.
fn split<'a>(lines: &[&'a [u8]], list: List) -> (Items<'a>, Items<'a>) {
    let (theirs, ours) = lines.split_at(lines.len().saturating_sub(1));
    (items(theirs, list), items(ours, list))
}
