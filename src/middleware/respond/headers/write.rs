//! Writing headers into a response, which may have some already.

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use smallvec::SmallVec;

use crate::clock::wall_now;
use crate::time::Timestamp;

use super::content::{Content, List};
use super::definition::When;
use super::merge;
use super::parse;
use super::prepared::{PreparedFormat, PreparedHeader, PreparedHeaders};
use super::retry_after;
use super::text::integer;
use super::view::{PolicyView, binding, is_near};

/// Prefixes of headers that belong together by custom.
const FAMILIES: [&str; 2] = ["x-ratelimit-", "x-rate-limit-"];

/// The headers of one response, rendered before the response is there.
#[derive(Debug)]
pub(crate) struct Rendered {
    /// What becomes of each header, at its [place](PreparedHeader::place).
    changes: SmallVec<[Change; 2]>,
    /// What remains of the policy that binds.
    remaining: u64,
}

/// What becomes of a header of the response.
#[derive(Debug)]
enum Change {
    Keep,
    Remove,
    Set(HeaderValue),
}

impl PreparedHeaders {
    /// Renders the headers of the response to a request that passes. Returns `None` if it gets none.
    #[inline]
    pub(crate) fn render_passed(&self, views: &[PolicyView<'_>]) -> Option<Rendered> {
        if self.is_silent_if_passed { None } else { self.render(views, false, 0, &wall_now) }
    }

    /// Renders the headers of a response. Returns `None` if it gets none.
    ///
    /// `views` has the policies that applied, in the layer's order. `seed` should be equal for all
    /// requests of a client. `wall_now` is called only if a header reports a date.
    fn render(
        &self,
        views: &[PolicyView<'_>],
        is_refusal: bool,
        seed: u64,
        wall_now: &dyn Fn() -> Timestamp,
    ) -> Option<Rendered> {
        let remaining = binding(views)?.remaining();
        let response = self.response(views, seed, wall_now);
        let (mut changes, mut is_any_due) = (SmallVec::new(), false);
        for format in &self.formats {
            let is_due = format.when.applies(views, is_refusal);
            is_any_due |= is_due;
            let value = |header| if is_due { self.value(header, &response) } else { None };
            for list in &format.lists {
                changes.push(value(list).map_or(Change::Keep, Change::Set));
            }
            for single in &format.singles {
                let absent = if is_due { Change::Remove } else { Change::Keep };
                changes.push(value(single).map_or(absent, Change::Set));
            }
        }
        is_any_due.then_some(Rendered { changes, remaining })
    }

    /// Adds rendered headers to a response. It takes the values out of `rendered`.
    pub(crate) fn add(&self, rendered: &mut Rendered, headers: &mut HeaderMap, status: StatusCode) {
        if status.is_redirection() {
            return;
        }
        // Before anything is written, because two formats can have names in common.
        for format in &self.formats {
            if format.keeps_theirs(headers, rendered.remaining) {
                rendered.changes(&format.singles).for_each(|(_, change)| *change = Change::Keep);
            }
        }
        for format in &self.formats {
            write_lists(headers, &format.lists, rendered);
            if rendered.changes(&format.singles).any(|(_, change)| !matches!(change, Change::Keep)) {
                self.write_singles(headers, &format.singles, rendered);
            }
        }
    }

    /// Adds the headers to a response: those of [`render`](Self::render), and `Retry-After` to a
    /// refusal.
    pub(crate) fn write(
        &self,
        headers: &mut HeaderMap,
        views: &[PolicyView<'_>],
        status: StatusCode,
        is_refusal: bool,
        seed: u64,
        wall_now: &dyn Fn() -> Timestamp,
    ) {
        if is_refusal && self.retry_after {
            self.write_retry_after(headers, views, seed, wall_now);
        }
        if let Some(mut rendered) = self.render(views, is_refusal, seed, wall_now) {
            self.add(&mut rendered, headers, status);
        }
    }

    #[cold]
    fn write_retry_after(
        &self,
        headers: &mut HeaderMap,
        views: &[PolicyView<'_>],
        seed: u64,
        wall_now: &dyn Fn() -> Timestamp,
    ) {
        let Some(seconds) = self.retry_after_seconds(views, seed) else { return };
        if let Some(ours) = integer(seconds) {
            retry_after::write(headers, ours, seconds, wall_now);
        }
    }

    /// Writes headers with one value, and removes those of others that report another quota.
    fn write_singles(&self, headers: &mut HeaderMap, singles: &[PreparedHeader], rendered: &mut Rendered) {
        self.remove_relatives(headers, singles);
        for (header, change) in rendered.changes(singles) {
            match change.take() {
                Change::Keep => {}
                Change::Set(value) => {
                    let _ = headers.try_insert(&header.name, value); // the map may be full
                }
                Change::Remove => {
                    headers.remove(&header.name);
                }
            }
        }
    }

    /// Removes headers of the same family as ours, such as `X-RateLimit-Used`.
    fn remove_relatives(&self, headers: &mut HeaderMap, singles: &[PreparedHeader]) {
        let family = |name: &HeaderName| FAMILIES.iter().find(|prefix| name.as_str().starts_with(**prefix));
        let is_relative = |name: &HeaderName| {
            family(name).is_some_and(|found| singles.iter().any(|own| family(&own.name) == Some(found)))
                && !self.names.contains(name)
        };
        let relatives: SmallVec<[HeaderName; 2]> = headers.keys().filter(|name| is_relative(name)).cloned().collect();
        for name in &relatives {
            headers.remove(name);
        }
    }
}

impl Rendered {
    /// Iterates over headers of one format and what becomes of each.
    #[inline]
    fn changes<'a>(
        &'a mut self,
        headers: &'a [PreparedHeader],
    ) -> impl Iterator<Item = (&'a PreparedHeader, &'a mut Change)> {
        let first = headers.first().map_or(0, |header| header.place);
        headers.iter().zip(self.changes.iter_mut().skip(first))
    }
}

impl Change {
    fn take(&mut self) -> Self {
        std::mem::replace(self, Self::Keep)
    }
}

/// Writes lists. If the response has one of them already, ours follow as the last lines, and are
/// merged then.
#[inline]
fn write_lists(headers: &mut HeaderMap, lists: &[PreparedHeader], rendered: &mut Rendered) {
    let mut merges = false;
    for (list, change) in rendered.changes(lists) {
        if let Change::Set(value) = change.take() {
            merges |= headers.try_append(&list.name, value).unwrap_or(false); // the map may be full
        }
    }
    if merges {
        merge_lists(headers, lists);
    }
}

/// Merges our lists, each the last line of its header, with the lines before it.
#[cold]
fn merge_lists(headers: &mut HeaderMap, lists: &[PreparedHeader]) {
    let values = |headers: &HeaderMap, list: &PreparedHeader| -> SmallVec<[HeaderValue; 4]> {
        headers.get_all(&list.name).iter().cloned().collect()
    };
    let limits = lists.iter().find(|list| list.content == Content::List(List::Limits));
    let limits = limits.map(|list| values(headers, list)).unwrap_or_default();
    let keep = merge::kept_policies(&lines(&limits));
    for header in lists {
        let Content::List(list) = header.content else { continue };
        match merge::merge(&lines(&values(headers, header)), list, &keep).to_value() {
            Some(merged) => {
                let _ = headers.try_insert(&header.name, merged); // the name is there already
            }
            None => {
                headers.remove(&header.name);
            }
        }
    }
}

fn lines(values: &[HeaderValue]) -> SmallVec<[&[u8]; 4]> {
    values.iter().map(HeaderValue::as_bytes).collect()
}

impl PreparedFormat {
    /// Returns whether the single values of the response stay: there is one readable `remaining`,
    /// and it is at most ours.
    fn keeps_theirs(&self, headers: &HeaderMap, ours: u64) -> bool {
        let Some(remaining) = &self.remaining else { return false };
        let mut lines = headers.get_all(&remaining.name).iter();
        let (Some(line), None) = (lines.next(), lines.next()) else { return false };
        let theirs = match remaining.content {
            Content::Dictionary => parse::dictionary_remaining(line.as_bytes()),
            _ => parse::whole_part(line.as_bytes()),
        };
        theirs.is_some_and(|theirs| theirs <= ours)
    }
}

impl When {
    fn applies(self, views: &[PolicyView<'_>], is_refusal: bool) -> bool {
        match self {
            Self::Never => false,
            Self::OnRefusal => is_refusal,
            Self::NearExhaustion { percent } => is_refusal || views.iter().any(|view| is_near(view.decision, percent)),
            Self::Always => true,
        }
    }
}
