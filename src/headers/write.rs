//! Writes headers into a response, which may already have headers about quotas.

use std::slice;

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use smallvec::SmallVec;

use crate::base::fields;
use crate::base::header_names::are_of_one_family;
use crate::decision::ChargeDecision;
use crate::policy::Policy;

use super::content::{Content, Single};
use super::definition::When;
use super::merge::merged;
use super::prepared::{PreparedFormat, PreparedHeader, PreparedHeaders};
use super::retry_after;
use super::view::{PolicyView, binding, is_near};

/// The headers of one response, rendered before the service has responded.
#[derive(Debug)]
pub(crate) struct Rendered {
    headers: SmallVec<[RenderedHeader; 2]>,
}

/// A header that is due.
#[derive(Debug)]
struct RenderedHeader {
    /// The index of the header in the layer's [`PreparedHeaders`].
    index: usize,
    /// The value of the header. `None` if the header has nothing to report.
    value: Option<HeaderValue>,
    /// The remaining units of the policy that binds, chosen from the policies that the format reports.
    remaining: u64,
}

/// The headers that are to be added to the response to a request that passes.
#[derive(Debug)]
pub(crate) enum DueHeaders {
    /// The headers are rendered later, from the numbers of the only charge.
    Numbers(Numbers),
    /// Like `Numbers`, for a quota that the request brought, with its policy. The usual variant `Numbers` holds no
    /// policy, because dropping a policy costs instructions (`benches/instructions`, "layer, allowed, header
    /// fields").
    OwnNumbers(Numbers, Policy),
    Rendered(Box<Rendered>),
}

/// The numbers of an allowed charge that headers report. The numbers take a third of the memory of the decision,
/// and less than the headers. A content that reads more of a decision must return `false` from
/// [`is_of_numbers`](Content::is_of_numbers).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Numbers {
    /// The policy's index in the layer.
    index: usize,
    limit: u64,
    remaining: u64,
    reset_us: u64,
    window_us: u64,
}

impl PreparedHeaders {
    /// Returns the headers of the response to a request that passes, or `None` if the response gets no headers.
    /// `views` is as for [`render`](Self::render).
    #[inline]
    pub(crate) fn due(&self, views: &[PolicyView<'_>]) -> Option<DueHeaders> {
        match views {
            _ if self.is_silent_if_passed => None,
            [PolicyView { index, policy, decision, .. }] if self.is_of_numbers => {
                let numbers = Numbers {
                    index: *index,
                    limit: decision.limit(),
                    remaining: decision.remaining(),
                    reset_us: decision.reset_us,
                    window_us: decision.window_us,
                };
                Some(match self.has_own_quotas {
                    false => DueHeaders::Numbers(numbers),
                    true => DueHeaders::OwnNumbers(numbers, (*policy).clone()),
                })
            }
            _ => self.render(views, None).map(|rendered| DueHeaders::Rendered(Box::new(rendered))),
        }
    }

    /// Adds the headers `due` to a response. `policies` are the policies of the layer.
    pub(crate) fn add_due(
        &self,
        due: &mut DueHeaders,
        policies: &[Policy],
        headers: &mut HeaderMap,
        status: StatusCode,
    ) {
        match due {
            DueHeaders::Numbers(numbers) => {
                debug_assert!(numbers.index < policies.len(), "the headers report a policy of the layer");
                if let Some(policy) = policies.get(numbers.index) {
                    self.add_numbers(*numbers, policy, headers, status);
                }
            }
            DueHeaders::OwnNumbers(numbers, policy) => self.add_numbers(*numbers, policy, headers, status),
            DueHeaders::Rendered(rendered) => self.add(rendered, headers, status),
        }
    }

    fn add_numbers(&self, numbers: Numbers, policy: &Policy, headers: &mut HeaderMap, status: StatusCode) {
        let Numbers { index, limit, remaining, reset_us, window_us } = numbers;
        let decision = ChargeDecision::found(limit, remaining, reset_us, window_us, Some(0));
        self.add_view(PolicyView { index, policy, key: None, decision: &decision, refuses: false }, headers, status);
    }

    /// Renders the headers of a response. Returns `None` if the response gets no headers.
    ///
    /// `views` has the policies that applied, in the layer's order. `refusal_seed` is the seed of the
    /// jitter, and `None` if the request passed. The seed should be equal for all requests of a client.
    #[inline(always)]
    pub(crate) fn render(&self, views: &[PolicyView<'_>], refusal_seed: Option<u64>) -> Option<Rendered> {
        // `render` is inlined, because a layer without headers calls it for each request.
        if self.is_silent_if_passed && refusal_seed.is_none() { None } else { self.render_due(views, refusal_seed) }
    }

    #[inline(never)]
    fn render_due(&self, views: &[PolicyView<'_>], refusal_seed: Option<u64>) -> Option<Rendered> {
        let mut rendered = SmallVec::new();
        for format in &self.formats {
            let views = format.reported(views);
            let Some(binding) = binding(&views).filter(|_| format.when.applies(&views, refusal_seed.is_some())) else {
                continue;
            };
            for index in format.headers.clone() {
                let value = self.value(self.headers.get(index)?, &views, refusal_seed.unwrap_or(0));
                rendered.push(RenderedHeader { index, value, remaining: binding.remaining() });
            }
        }
        (!rendered.is_empty()).then_some(Rendered { headers: rendered })
    }

    /// Adds rendered headers to a response. Takes the values out of `rendered`.
    pub(crate) fn add(&self, rendered: &mut Rendered, headers: &mut HeaderMap, status: StatusCode) {
        let rendered = &mut rendered.headers;
        let picks = self.picks(status);
        rendered.retain(|RenderedHeader { index, remaining, .. }| {
            let header = self.headers.get(*index);
            header.is_some_and(|header| !picks || self.is_sent(header, headers, *remaining, status))
        });
        let sent: SmallVec<[&PreparedHeader; 4]> =
            rendered.iter().filter_map(|header| self.headers.get(header.index)).collect();
        let mut values = rendered.iter_mut();
        self.write(&sent, headers, |_| values.next()?.value.take());
    }

    /// Renders the headers of a response and adds them at once. The request passed, and only one policy applied to
    /// the request.
    fn add_view(&self, view: PolicyView<'_>, headers: &mut HeaderMap, status: StatusCode) {
        let views = slice::from_ref(&view);
        let picks = self.picks(status);
        let mut sent: SmallVec<[&PreparedHeader; 4]> = SmallVec::new();
        for format in &self.formats {
            if !format.reports(view.index) || !format.when.applies(views, false) {
                continue;
            }
            for header in self.headers.get(format.headers.clone()).unwrap_or_default() {
                if !picks || self.is_sent(header, headers, view.remaining(), status) {
                    sent.push(header);
                }
            }
        }
        self.write(&sent, headers, |header| self.value(header, views, 0));
    }

    /// Returns whether some headers may have to be left out of the response. If so, all headers are checked before
    /// the first is written, because two formats can have header names in common.
    fn picks(&self, status: StatusCode) -> bool {
        status.is_redirection() || self.formats.iter().any(|format| format.remaining.is_some())
    }

    /// Writes the headers `sent` with their values, which `value` returns in order.
    #[inline]
    fn write(
        &self,
        sent: &[&PreparedHeader],
        headers: &mut HeaderMap,
        mut value: impl FnMut(&PreparedHeader) -> Option<HeaderValue>,
    ) {
        let (mut merges, mut replaces) = (false, false);
        for header in sent {
            match (header.content, value(header)) {
                (Content::RetryAfter, value) => retry_after::write(headers, value, &*self.clock),
                (Content::RetryAfterMs, value) => retry_after::write_millis(headers, value, &*self.clock),
                (Content::List(_), Some(value)) => {
                    merges |= headers.try_append(&header.name, value).unwrap_or(false); // the map may be full
                }
                (Content::List(_), None) => {}
                (Content::Single(_), value) => {
                    replaces = true;
                    replace(headers, &header.name, value);
                }
            }
        }
        if merges {
            merge_lists(headers, sent.iter().copied());
        }
        if replaces {
            Self::remove_relatives(headers, sent);
        }
    }

    /// Returns whether a rendered header is sent with this response.
    #[inline]
    fn is_sent(&self, header: &PreparedHeader, headers: &HeaderMap, remaining: u64, status: StatusCode) -> bool {
        match header.content {
            Content::RetryAfter | Content::RetryAfterMs => true,
            _ if status.is_redirection() => false,
            Content::List(_) => true,
            _ => self.formats.get(header.format).is_some_and(|format| !format.keeps_theirs(headers, remaining)),
        }
    }

    /// Removes headers that describe the same quota as the headers that are sent, such as
    /// `X-RateLimit-Used`.
    fn remove_relatives(headers: &mut HeaderMap, sent: &[&PreparedHeader]) {
        let is_relative = |name: &HeaderName| {
            let mut singles = sent.iter().filter(|own| own.content.is_single());
            // Compares whole names first, because comparing the words of a name takes longer.
            !sent.iter().any(|own| own.name == *name)
                && singles.any(|own| are_of_one_family(own.name.as_str(), name.as_str()))
        };
        let relatives: Vec<HeaderName> = headers.keys().filter(|name| is_relative(name)).cloned().collect();
        for name in &relatives {
            headers.remove(name);
        }
    }
}

/// Merges the layer's lists with the response's lists. Each of the layer's lists is the last line of
/// its header.
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
    /// Returns whether the single values of the response stay. The single values stay if the response
    /// has exactly one readable value of `remaining`, and this value is at most the layer's.
    fn keeps_theirs(&self, headers: &HeaderMap, ours: u64) -> bool {
        let Some(remaining) = &self.remaining else { return false };
        let mut lines = headers.get_all(&remaining.name).iter();
        let (Some(line), None) = (lines.next(), lines.next()) else { return false };
        let theirs = match remaining.content {
            Content::Single(Single::Dictionary) => dictionary_remaining(line.as_bytes()),
            _ => fields::whole_part(line.as_bytes()),
        };
        theirs.is_some_and(|theirs| theirs <= ours)
    }
}

/// Returns `remaining` of draft 07's dictionary. Returns `None` if the value is not this dictionary, or
/// has no limit.
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
