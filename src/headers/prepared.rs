//! Rendering headers for one response.

use std::iter;
use std::ops::{Deref, Range};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use smallvec::SmallVec;

use crate::base::calendar::CalendarWindows;
use crate::base::fields::List;
use crate::base::time::{CLOCK_US_MAX, micros_ceil};
use crate::base::wait::Wait;
use crate::clock::{CalendarClock, Clock};
use crate::outcome::{Outcome, OutcomeKind};
use crate::policy::Policy;

use super::content::{Content, Header, Single};
use super::definition::{Format, Headers, PartitionKey, When};
use super::ietf::{
    Advertised, Precise, item_start, item_text, precisely, push_dictionary, push_item, push_partition, push_policy,
    push_precise,
};
use super::retry_after;
use super::text::{Text, integer};
use super::view::{PolicyView, binding, longest_wait_us};
use super::wait::{SECOND_US, Waits, seconds_ceil};

/// [`Headers`] compiled for the policies of one layer, with every constant text rendered.
#[derive(Debug)]
pub(crate) struct PreparedHeaders {
    pub(super) formats: Vec<PreparedFormat>,
    /// The headers of all formats, in the order in which they are sent.
    pub(super) headers: Vec<PreparedHeader>,
    /// Whether the headers of one policy can be rendered after the decision, from only the numbers of its charge. Dates
    /// are measured from the decision, and partition keys need the key.
    pub(super) is_of_numbers: bool,
    /// Whether requests may bring quotas of their own.
    pub(super) has_own_quotas: bool,
    /// True if responses to requests that passed get no headers.
    pub(crate) is_silent_if_passed: bool,
    waits: Waits,
    partition: Option<PartitionKey>,
    /// The clock for dates. Headers without dates do not read the clock.
    pub(super) clock: Arc<dyn Clock>,
    /// The limiter's clock. The limiter's calendar windows begin and end according to this clock.
    windows_clock: Arc<dyn Clock>,
}

/// Headers that are sent together and report the same policies. A format is prepared only if it reports
/// at least one policy of the layer.
#[derive(Debug)]
pub(super) struct PreparedFormat {
    pub(super) when: When,
    /// The header of the remaining units. Its value in the response is compared with the layer's
    /// value, to choose whose single values are sent.
    pub(super) remaining: Option<Header>,
    /// For each policy of the layer, whether the headers report the policy. `None` if the headers
    /// report all policies.
    reported: Option<Box<[bool]>>,
    /// The indices of the format's headers.
    pub(super) headers: Range<usize>,
}

/// The policies that applied to a request and that the headers of a format report.
pub(super) enum Reported<'v, 'p> {
    All(&'v [PolicyView<'p>]),
    These(SmallVec<[PolicyView<'p>; 4]>),
}

#[derive(Debug)]
pub(super) struct PreparedHeader {
    pub(super) name: HeaderName,
    pub(super) content: Content,
    /// The index of the header's format.
    pub(super) format: usize,
    /// The constant text of each policy: its name, or the item of a list. For [limits](List::Limits), the text is
    /// only the beginning of the item. `None` if the name cannot be a header value, or if the item depends on a
    /// quota that the request brings.
    pub(super) items: Vec<Option<HeaderValue>>,
    /// The header's value if all policies apply. Only a header that is a list of whole items has this
    /// value.
    all: Option<HeaderValue>,
}

impl PreparedHeaders {
    /// Prepares the headers that report `policies`. `limiter_clock` is `None` if the limiter's clock is not in this
    /// process.
    pub(crate) fn new(headers: &Headers, policies: &[Policy], limiter_clock: Option<Arc<dyn Clock>>) -> Self {
        let clock = headers.clock.clone().unwrap_or_else(|| Arc::new(CalendarClock));
        let waits = Format { when: When::OnRefusal, ..Format::new(headers.waits().collect()) };
        let (mut formats, mut prepared) = (Vec::new(), Vec::new());
        for format in iter::once(&waits).chain(&headers.formats).filter(|format| format.is_sent()) {
            let reported = format.scope.reported(policies);
            if reported.as_ref().is_some_and(|reported| !reported.contains(&true)) {
                continue;
            }
            let end = prepared.len() + format.headers.len();
            let ready = PreparedFormat {
                when: format.when,
                remaining: format.remaining_of_family(&headers.formats).cloned(),
                reported,
                headers: prepared.len()..end,
            };
            prepared.extend(format.headers.iter().map(|header| PreparedHeader::new(header, formats.len(), policies)));
            formats.push(ready);
        }
        Self {
            is_of_numbers: headers.partition.is_none() && prepared.iter().all(|header| header.content.is_of_numbers()),
            has_own_quotas: policies.iter().any(Policy::has_quota_of_request),
            is_silent_if_passed: formats.iter().all(|format| format.when == When::OnRefusal),
            formats,
            headers: prepared,
            waits: headers.waits,
            partition: headers.partition.clone(),
            windows_clock: limiter_clock.unwrap_or_else(|| Arc::clone(&clock)),
            clock,
        }
    }

    /// Returns whether the waits of refusals have jitter, so that the seed of a refusal is used.
    pub(crate) fn is_jittered(&self) -> bool {
        self.waits.is_jittered()
    }

    /// Returns approximately how many bytes the lists have if they report all of these policies. `policies`
    /// are the policies' indices.
    pub(crate) fn bytes_of_lists(&self, policies: &[usize]) -> usize {
        /// `99;t=60` and a separator.
        const NUMBERS: usize = 12;
        let lists = self.headers.iter().filter(|header| matches!(header.content, Content::List(_)));
        let of = |header: &PreparedHeader, index: &usize| match header.items.get(*index) {
            Some(Some(item)) => item.len() + NUMBERS,
            _ => 0,
        };
        lists.map(|header| policies.iter().map(|index| of(header, index)).sum::<usize>()).sum()
    }

    /// Returns the wait that is reported to a refused client, with its jitter and its cap.
    pub(crate) fn reported_wait(&self, outcome: &Outcome, seed: u64) -> Wait {
        match outcome.wait() {
            _ if outcome.kind() == OutcomeKind::FailedClosed => {
                Wait::After(Duration::from_micros(self.waits.after_failure_us(seed)))
            }
            Wait::After(wait) => Wait::After(Duration::from_micros(self.waits.reported_us(micros_ceil(wait), seed))),
            wait => wait,
        }
    }

    /// Writes the wait after a failure of the limiter, which no policy reports, into the headers for waits.
    pub(crate) fn add_wait(&self, wait: Wait, headers: &mut HeaderMap) {
        let Some(wait_us) = wait.duration().map(micros_ceil) else { return };
        for header in &self.headers {
            match header.content {
                Content::RetryAfter => retry_after::write(headers, integer(seconds_ceil(wait_us)), &*self.clock),
                Content::RetryAfterMs => {
                    retry_after::write_millis(headers, integer(wait_us.div_ceil(1_000)), &*self.clock);
                }
                Content::List(_) | Content::Single(_) => {}
            }
        }
    }

    /// Renders the value of a header. Returns `None` if the header has nothing to report. `views` are the policies
    /// that the header's format [reports](PreparedFormat::reported).
    #[inline]
    pub(super) fn value(&self, header: &PreparedHeader, views: &[PolicyView<'_>], seed: u64) -> Option<HeaderValue> {
        match header.content {
            Content::List(List::Limits) => self.limits(header, views, seed),
            Content::List(List::Policies | List::Nameless) => header.policies(views, &*self.windows_clock),
            Content::Single(single) => self.single(single, header, binding(views)?, seed),
            Content::RetryAfter => integer(self.waits.reported_seconds(longest_wait_us(views)?, seed)),
            Content::RetryAfterMs => integer(self.waits.reported_us(longest_wait_us(views)?, seed).div_ceil(1_000)),
        }
    }

    /// Renders a value of the policy that binds.
    #[inline]
    fn single(&self, value: Single, header: &PreparedHeader, view: &PolicyView<'_>, seed: u64) -> Option<HeaderValue> {
        let limit = view.decision.limit();
        match value {
            Single::Limit => integer(limit),
            Single::Remaining => integer(view.remaining()),
            Single::Used => integer(limit.saturating_sub(view.remaining())),
            Single::Reset(encoding, meaning) => encoding.value(meaning.time_us(view, self.waits, seed)?, &*self.clock),
            Single::DraftReset => integer(self.draft_reset(view, seed)?),
            Single::Dictionary => {
                let mut text = Text::new();
                push_dictionary(&mut text, limit, view.remaining(), self.draft_reset(view, seed));
                text.to_value()
            }
            Single::PolicyName => header.item(view).cloned(),
        }
    }

    /// Renders draft 11's list of remaining units.
    #[inline]
    fn limits(&self, header: &PreparedHeader, views: &[PolicyView<'_>], seed: u64) -> Option<HeaderValue> {
        if let ([view], None) = (views, &self.partition) {
            if let (remaining, window, None) = self.limit_of(view, seed) {
                let text = item_text(header.item(view)?.as_bytes(), remaining, window);
                return HeaderValue::from_maybe_shared(Bytes::from(text)).ok();
            }
        }
        let mut text = Text::new();
        for view in views {
            let (remaining, window, precise) = self.limit_of(view, seed);
            text.push_separator();
            push_item(&mut text, header.item(view)?.as_bytes(), remaining, window);
            if let Some(precise) = precise {
                push_precise(&mut text, precise);
            }
            if let Some(key) = self.partition.as_ref().and_then(|partition| (partition.0)(view.policy, view.key?)) {
                push_partition(&mut text, &key);
            }
        }
        text.to_value()
    }

    /// Returns draft 11's `r` and `t`, and the more exact numbers.
    #[inline]
    fn limit_of(&self, view: &PolicyView<'_>, seed: u64) -> (u64, Option<u64>, Option<Precise>) {
        let (remaining, window_us) = (view.decision.remaining(), view.decision.window_us);
        if view.refuses {
            return (0, view.wait_us().map(|wait_us| self.waits.reported_seconds(wait_us, seed)), None);
        }
        match (window_us, remaining) {
            (0, _) => (remaining, None, None),
            (1..SECOND_US, _) | (_, 0) => {
                let window_us = if remaining == 0 { self.waits.capped_us(window_us).max(1) } else { window_us };
                let (remaining, precise) = precisely(view.policy.quota(), remaining, window_us);
                (remaining, Some(seconds_ceil(window_us)), precise)
            }
            _ => (remaining, Some(seconds_ceil(window_us)), None),
        }
    }

    /// Returns the `reset` of drafts 06 and 07, which should agree with `Retry-After`. Returns `None` if the time
    /// is not known.
    fn draft_reset(&self, view: &PolicyView<'_>, seed: u64) -> Option<u64> {
        match view.wait_us().filter(|_| view.refuses) {
            Some(wait_us) => Some(self.waits.reported_seconds(wait_us, seed)),
            None => view.decision.known_reset_us().map(seconds_ceil),
        }
    }
}

impl PreparedFormat {
    /// Returns whether the headers report the policy at this index.
    #[inline]
    pub(super) fn reports(&self, index: usize) -> bool {
        self.reported.as_ref().is_none_or(|reported| reported.get(index) == Some(&true))
    }

    /// Returns the policies in `views` that the headers report.
    #[inline]
    pub(super) fn reported<'v, 'p>(&self, views: &'v [PolicyView<'p>]) -> Reported<'v, 'p> {
        if self.reported.is_none() {
            return Reported::All(views);
        }
        Reported::These(views.iter().filter(|view| self.reports(view.index)).copied().collect())
    }
}

impl<'p> Deref for Reported<'_, 'p> {
    type Target = [PolicyView<'p>];

    #[inline]
    fn deref(&self) -> &Self::Target {
        match self {
            Self::All(views) => views,
            Self::These(views) => views,
        }
    }
}

impl PreparedHeader {
    fn new(header: &Header, format: usize, policies: &[Policy]) -> Self {
        let items: Vec<_> = match header.content {
            Content::List(list) => policies.iter().map(|policy| constant_item(list, policy)).collect(),
            Content::Single(Single::PolicyName) => policies.iter().map(name).collect(),
            Content::Single(_) | Content::RetryAfter | Content::RetryAfterMs => Vec::new(),
        };
        let all = match header.content {
            Content::List(List::Policies | List::Nameless) => list(items.iter().map(Option::as_ref)),
            _ => None,
        };
        let all = all.and_then(|text| text.to_shared_value());
        Self { name: header.name.clone(), content: header.content, format, items, all }
    }

    /// Returns the constant text of a policy.
    #[inline]
    fn item(&self, view: &PolicyView<'_>) -> Option<&HeaderValue> {
        self.items.get(view.index)?.as_ref()
    }

    /// Returns the value of a list of quotas.
    #[inline]
    fn policies(&self, views: &[PolicyView<'_>], clock: &dyn Clock) -> Option<HeaderValue> {
        match views {
            [only] => self.item(only).cloned().or_else(|| self.own_item(only, clock)),
            _ if views.len() == self.items.len() && self.all.is_some() => self.all.clone(),
            _ => {
                let items: SmallVec<[Option<HeaderValue>; 4]> =
                    views.iter().map(|view| self.item(view).cloned().or_else(|| self.own_item(view, clock))).collect();
                list(items.iter().map(Option::as_ref))?.to_value()
            }
        }
    }

    /// Returns the item for a quota that the request brought, or for a calendar quota.
    #[inline(never)]
    fn own_item(&self, view: &PolicyView<'_>, clock: &dyn Clock) -> Option<HeaderValue> {
        match (self.content, view.policy.quota().known_windows()) {
            (Content::List(list), Some(windows)) => return calendar_item(list, windows, view, clock),
            (_, Some(_)) => return None,
            (_, None) => {}
        }
        match self.content {
            Content::List(List::Policies) => view.policy.item(|| constant_item(List::Policies, view.policy)),
            Content::List(list) => constant_item(list, view.policy),
            Content::Single(_) | Content::RetryAfter | Content::RetryAfterMs => None,
        }
    }
}

/// Returns the item for a calendar quota, with the length of the window that is open.
fn calendar_item(
    list: List,
    windows: &CalendarWindows,
    view: &PolicyView<'_>,
    clock: &dyn Clock,
) -> Option<HeaderValue> {
    let end = clock.now().as_micros().saturating_add(view.decision.window_us).min(CLOCK_US_MAX);
    // Looks half of a window before the end. So the right window is found even if the limiter's clock
    // differs from `clock` by up to half of a window.
    let window = windows.at(end.saturating_sub(windows.shortest_us() / 2));
    let mut text = Text::new();
    let advertised = Advertised::new(view.policy.quota()).within(window.length);
    push_policy(&mut text, view.policy, advertised, list);
    text.to_value()
}

/// Returns the constant text of a policy's item: the whole item, or the beginning of an item of [limits](List::Limits).
/// Returns `None` if the item depends on a quota that the request brings, or on the window that is open.
fn constant_item(list: List, policy: &Policy) -> Option<HeaderValue> {
    let mut text = Text::new();
    match list {
        List::Limits => item_start(&mut text, policy),
        List::Policies | List::Nameless if policy.has_quota_of_request() => return None,
        List::Policies | List::Nameless if policy.quota().calendar_windows().is_some() => return None,
        List::Policies | List::Nameless => push_policy(&mut text, policy, Advertised::new(policy.quota()), list),
    }
    let value = text.to_shared_value();
    debug_assert!(value.is_some(), "the name of each policy is valid in a list");
    value
}

/// Returns a policy's name as a header value, without spaces at its beginning and end.
fn name(policy: &Policy) -> Option<HeaderValue> {
    let mut text = Text::new();
    text.push(policy.name().trim_ascii().as_bytes());
    text.to_shared_value()
}

/// Returns a list of these items. Returns `None` if an item is missing, because an incomplete list would
/// be wrong.
fn list<'a>(items: impl Iterator<Item = Option<&'a HeaderValue>>) -> Option<Text> {
    let mut text = Text::new();
    for item in items {
        text.push_separator();
        text.push(item?.as_bytes());
    }
    Some(text)
}
