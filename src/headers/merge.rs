//! Merges the layer's lists with the lists that an inner layer or a handler wrote.
//!
//! All items about one policy come from the stricter source. A list that cannot be parsed is replaced,
//! because clients would ignore it.

use http::{HeaderMap, HeaderValue};
use smallvec::SmallVec;

use crate::base::fields::{Items, List, ListMember, for_each_item, items};

use super::prepared::PreparedHeader;
use super::text::Text;

/// Names of policies, as quoted strings.
type PolicyNames<'a> = Vec<&'a [u8]>;

/// Merges the layer's lists with the response's lists. Each of the layer's lists is the last line of
/// its header.
pub(super) fn merged<'a>(
    headers: &HeaderMap,
    lists: impl Iterator<Item = (&'a PreparedHeader, List)> + Clone,
) -> SmallVec<[Option<HeaderValue>; 4]> {
    let mut values = SmallVec::new();
    for (header, list) in lists.clone() {
        match joined(headers, header, list) {
            Some(value) => values.push(value),
            None => return merged_by_policy(headers, lists),
        }
    }
    values
}

/// Joins the lines of a header. Returns `None` if an item of the response's lines may be about a policy of the
/// layer, which is unusual. This function looks at the items one by one, because a list of them would be large
/// (bench "features", "two layers").
fn joined(headers: &HeaderMap, header: &PreparedHeader, list: List) -> Option<Option<HeaderValue>> {
    let (theirs, ours) = lines(headers, header);
    let (mut text, mut is_in_both) = (Text::new(), false);
    let is_list = for_each_item(theirs, list, |item| {
        is_in_both |= header.items.iter().any(|own| may_be_of(own.as_ref(), &item));
        text.push_separator();
        text.push(item.raw);
    });
    if is_in_both {
        return None;
    }
    if is_list.is_none() {
        text.clear();
    }
    text.push_separator();
    text.push(ours);
    Some(text.to_value())
}

/// Returns whether an item may be about the policy of the layer whose constant text is `own`. `own` is `None`
/// if requests bring the policy's quota, or if the quota is a calendar quota.
fn may_be_of(own: Option<&HeaderValue>, item: &ListMember<'_>) -> bool {
    own.is_none_or(|own| own.as_bytes().starts_with(item.name))
}

/// Merges the layer's lists with the response's lists, policy by policy.
#[cold]
fn merged_by_policy<'a>(
    headers: &HeaderMap,
    lists: impl Iterator<Item = (&'a PreparedHeader, List)>,
) -> SmallVec<[Option<HeaderValue>; 4]> {
    let both: Vec<(List, Items<'_>, Items<'_>)> = lists
        .map(|(header, list)| {
            let (theirs, ours) = lines(headers, header);
            (list, items(theirs, list), items([ours].into_iter(), list))
        })
        .collect();
    let limits = both.iter().find(|(list, ..)| *list == List::Limits);
    let keep = limits.map(|(_, theirs, ours)| kept_policies(theirs, ours)).unwrap_or_default();
    both.iter().map(|(_, theirs, ours)| merge(theirs, ours, &keep)).collect()
}

/// Returns the lines of a header: the response's lines, and the layer's line, which is the last.
fn lines<'a>(headers: &'a HeaderMap, header: &PreparedHeader) -> (impl Iterator<Item = &'a [u8]>, &'a [u8]) {
    let mut lines = headers.get_all(&header.name).into_iter().map(HeaderValue::as_bytes);
    let ours = lines.next_back().unwrap_or_default();
    (lines, ours)
}

/// Returns the policies whose items in the response stay, because they are at least as strict as the
/// layer's.
fn kept_policies<'a>(theirs: &[ListMember<'a>], ours: &[ListMember<'a>]) -> PolicyNames<'a> {
    let is_kept = |own: &&ListMember<'a>| theirs.iter().any(|item| item.name == own.name && !own.is_stricter(item));
    ours.iter().filter(is_kept).map(|own| own.name).collect()
}

/// Merges two lists. The layer's item replaces the response's item with the same name, at the same position. If
/// `keep` names the policy, the response's item stays.
fn merge(theirs: &[ListMember<'_>], ours: &[ListMember<'_>], keep: &[&[u8]]) -> Option<HeaderValue> {
    let ours = || ours.iter().filter(|own| !keep.contains(&own.name));
    let mut text = Text::new();
    let mut push = |item: &ListMember<'_>| {
        text.push_separator();
        text.push(item.raw);
    };
    let mut replaced = PolicyNames::new();
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
