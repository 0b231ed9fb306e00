//! Writing headers into a response, which may have some already.

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use smallvec::SmallVec;

use crate::fields;

use super::content::Content;
use super::definition::When;
use super::merge::merged;
use super::prepared::{PreparedFormat, PreparedHeader, PreparedHeaders};
use super::retry_after;
use super::view::{PolicyView, binding, is_near};

/// Prefixes of headers that belong together by custom.
const FAMILIES: [&str; 2] = ["x-ratelimit-", "x-rate-limit-"];

/// The headers of one response, rendered before the response is there.
#[derive(Debug)]
pub(crate) struct Rendered {
    /// Each header that is due, by its place, and its value if it has something to report.
    values: SmallVec<[(usize, Option<HeaderValue>); 2]>,
    /// The remaining units of the policy that binds.
    remaining: u64,
}

impl PreparedHeaders {
    /// Renders the headers of a response. Returns `None` if it gets none.
    ///
    /// `views` has the policies that applied, in the layer's order. `refusal_seed` is `None` if the
    /// request passed. It should be equal for all requests of a client.
    #[inline(always)]
    pub(crate) fn render(&self, views: &[PolicyView<'_>], refusal_seed: Option<u64>) -> Option<Rendered> {
        // In place, because a layer without headers asks for each request.
        if self.is_silent_if_passed && refusal_seed.is_none() { None } else { self.render_due(views, refusal_seed) }
    }

    #[inline(never)]
    fn render_due(&self, views: &[PolicyView<'_>], refusal_seed: Option<u64>) -> Option<Rendered> {
        let remaining = binding(views)?.remaining();
        let mut values = SmallVec::new();
        for (place, header) in self.headers.iter().enumerate() {
            let format = self.formats.get(header.format)?;
            if format.when.applies(views, refusal_seed.is_some()) {
                values.push((place, self.value(header, views, refusal_seed.unwrap_or(0))));
            }
        }
        (!values.is_empty()).then_some(Rendered { values, remaining })
    }

    /// Adds rendered headers to a response. It takes the values out of `rendered`.
    pub(crate) fn add(&self, rendered: &mut Rendered, headers: &mut HeaderMap, status: StatusCode) {
        let remaining = rendered.remaining;
        if status.is_redirection() || self.formats.iter().any(|format| format.remaining.is_some()) {
            // Before anything is written, because two formats can have names in common.
            rendered.values.retain(|(place, _)| {
                self.headers.get(*place).is_some_and(|header| self.is_sent(header, headers, remaining, status))
            });
        }
        let (mut merges, mut replaces) = (false, false);
        for (place, value) in &mut rendered.values {
            let Some(header) = self.headers.get(*place) else { continue };
            match (header.content, value.take()) {
                (Content::RetryAfter, value) => retry_after::write(headers, value, &*self.clock),
                (Content::List(_), Some(value)) => {
                    merges |= headers.try_append(&header.name, value).unwrap_or(false); // the map may be full
                }
                (Content::List(_), None) => {}
                (_, value) => {
                    replaces = true;
                    replace(headers, &header.name, value);
                }
            }
        }
        let sent = rendered.values.iter().filter_map(|(place, _)| self.headers.get(*place));
        if merges {
            merge_lists(headers, sent.clone());
        }
        if replaces {
            self.remove_relatives(headers, &sent);
        }
    }

    /// Returns whether a header that is due is sent with this response.
    #[inline]
    fn is_sent(&self, header: &PreparedHeader, headers: &HeaderMap, remaining: u64, status: StatusCode) -> bool {
        match header.content {
            Content::RetryAfter => true,
            _ if status.is_redirection() => false,
            Content::List(_) => true,
            _ => self.formats.get(header.format).is_some_and(|format| !format.keeps_theirs(headers, remaining)),
        }
    }

    /// Removes headers of the same family as ours, such as `X-RateLimit-Used`.
    fn remove_relatives<'a>(&self, headers: &mut HeaderMap, sent: &(impl Iterator<Item = &'a PreparedHeader> + Clone)) {
        let family = |name: &HeaderName| FAMILIES.iter().find(|prefix| name.as_str().starts_with(**prefix));
        let is_relative = |name: &HeaderName| {
            family(name).is_some_and(|found| sent.clone().any(|own| family(&own.name) == Some(found)))
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
fn merge_lists<'a>(headers: &mut HeaderMap, sent: impl Iterator<Item = &'a PreparedHeader> + Clone) {
    let lists = sent.filter_map(|header| match header.content {
        Content::List(list) => Some((header, list)),
        _ => None,
    });
    for ((header, _), value) in lists.clone().zip(merged(headers, lists)) {
        replace(headers, &header.name, value);
    }
}

/// Replaces a header, or removes it if there is no value.
fn replace(headers: &mut HeaderMap, name: &HeaderName, value: Option<HeaderValue>) {
    match value {
        Some(value) => {
            let _ = headers.try_insert(name, value); // the map may be full
        }
        None => {
            headers.remove(name);
        }
    }
}

impl PreparedFormat {
    /// Returns whether the single values of the response stay: there is one readable `remaining`,
    /// and it is at most ours.
    fn keeps_theirs(&self, headers: &HeaderMap, ours: u64) -> bool {
        let Some(remaining) = &self.remaining else { return false };
        let mut lines = headers.get_all(&remaining.name).iter();
        let (Some(line), None) = (lines.next(), lines.next()) else { return false };
        let theirs = match remaining.content {
            Content::Dictionary => dictionary_remaining(line.as_bytes()),
            _ => fields::whole_part(line.as_bytes()),
        };
        theirs.is_some_and(|theirs| theirs <= ours)
    }
}

/// Returns `remaining` of draft 07's dictionary. Returns `None` if the value has no limit, or is not
/// that dictionary.
fn dictionary_remaining(value: &[u8]) -> Option<u64> {
    let found = fields::dictionary(value)?;
    found.limit.and(found.remaining)
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
