//! Writing headers into a response, which may have some already.

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use smallvec::SmallVec;

use crate::time::Timestamp;

use super::content::{Content, List};
use super::definition::When;
use super::merge;
use super::parse;
use super::prepared::{PreparedFormat, PreparedHeader, PreparedHeaders, Response};
use super::retry_after;
use super::text::integer;
use super::view::{PolicyView, binding, is_near};

/// Prefixes of headers that belong together by custom.
const FAMILIES: [&str; 2] = ["x-ratelimit-", "x-rate-limit-"];

impl PreparedHeaders {
    /// Adds the headers to a response.
    ///
    /// `views` has the policies that applied, in the layer's order. `seed` should be equal for all
    /// requests of a client. `wall_now` is called only if a header reports a date.
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
        if views.is_empty() || status.is_redirection() {
            return;
        }
        let response = self.response(views, seed, wall_now);
        // `keeps_theirs` comes before any writing, because two formats can have names in common.
        let due: SmallVec<[(&PreparedFormat, bool); 2]> = self
            .formats
            .iter()
            .filter(|format| format.when.applies(views, is_refusal))
            .map(|format| (format, format.keeps_theirs(headers, views)))
            .collect();
        for (format, keeps_theirs) in due {
            self.write_lists(headers, &format.lists, &response);
            if !keeps_theirs && !format.singles.is_empty() {
                self.write_singles(headers, &format.singles, &response);
            }
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

    /// Writes lists. If the response has one of them already, ours follow as the last lines, and
    /// are merged then.
    fn write_lists(&self, headers: &mut HeaderMap, lists: &[PreparedHeader], response: &Response<'_>) {
        let mut merges = false;
        for list in lists {
            if let Some(value) = self.value(list, response) {
                merges |= headers.try_append(&list.name, value).unwrap_or(false); // the map may be full
            }
        }
        if merges {
            merge_lists(headers, lists);
        }
    }

    /// Writes headers with one value, and removes those of others that report another quota.
    fn write_singles(&self, headers: &mut HeaderMap, singles: &[PreparedHeader], response: &Response<'_>) {
        self.remove_relatives(headers, singles);
        for header in singles {
            match self.value(header, response) {
                Some(value) => {
                    let _ = headers.try_insert(&header.name, value); // the map may be full
                }
                None => {
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
    fn keeps_theirs(&self, headers: &HeaderMap, views: &[PolicyView<'_>]) -> bool {
        let Some(remaining) = &self.remaining else { return false };
        let mut lines = headers.get_all(&remaining.name).iter();
        let (Some(line), None) = (lines.next(), lines.next()) else { return false };
        let theirs = match remaining.content {
            Content::Dictionary => parse::dictionary_remaining(line.as_bytes()),
            _ => parse::whole_part(line.as_bytes()),
        };
        let ours = binding(views).map(PolicyView::remaining);
        theirs.is_some_and(|theirs| ours.is_none_or(|ours| theirs <= ours))
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
