//! Rendering headers for one response.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::RETRY_AFTER;
use http::{HeaderName, HeaderValue};

use crate::clock::{CalendarClock, Clock};
use crate::fields::List;
use crate::outcome::Outcome;
use crate::policy::Policy;
use crate::time::micros_ceil;

use super::content::{Content, Header};
use super::definition::{Format, Headers, PartitionKey, When};
use super::ietf::{item_parts, item_start, push_dictionary, push_partition, push_policy};
use super::text::{Text, integer};
use super::view::{PolicyView, binding, longest_wait_us};
use super::wait::{Waits, seconds_ceil};

/// [`Headers`] compiled for the policies of one layer, with every constant text rendered.
#[derive(Debug)]
pub(crate) struct PreparedHeaders {
    pub(super) formats: Vec<PreparedFormat>,
    /// The headers of all formats, in the order in which they are sent.
    pub(super) headers: Vec<PreparedHeader>,
    /// Whether no response to a request that passed gets a header.
    pub(crate) is_silent_if_passed: bool,
    waits: Waits,
    partition: Option<PartitionKey>,
    /// The names of all headers of all formats, also of those that are never sent.
    pub(super) names: Vec<HeaderName>,
    /// Read only for dates.
    pub(super) clock: Arc<dyn Clock>,
}

#[derive(Debug)]
pub(super) struct PreparedFormat {
    pub(super) when: When,
    pub(super) remaining: Option<Header>,
}

#[derive(Debug)]
pub(super) struct PreparedHeader {
    pub(super) name: HeaderName,
    pub(super) content: Content,
    /// The place of its format.
    pub(super) format: usize,
    /// The constant text of each policy's item, if it is a list: the whole item, or of
    /// [limits](List::Limits) the beginning.
    pub(super) items: Vec<HeaderValue>,
    /// The value if all policies apply, if it is a list of whole items.
    all: Option<HeaderValue>,
}

impl PreparedHeaders {
    pub(crate) fn new(headers: &Headers, policies: &[Policy]) -> Self {
        let retry_after = Format {
            headers: vec![Header { name: RETRY_AFTER, content: Content::RetryAfter }],
            when: if headers.retry_after { When::OnRefusal } else { When::Never },
            remaining: None,
        };
        let formats = || [&retry_after].into_iter().chain(&headers.formats).filter(|format| format.when != When::Never);
        let prepared = formats().enumerate().flat_map(|(place, format)| {
            format.headers.iter().map(move |header| PreparedHeader::new(header, place, policies))
        });
        Self {
            is_silent_if_passed: formats().all(|format| format.when == When::OnRefusal),
            headers: prepared.collect(),
            formats: formats()
                .map(|format| PreparedFormat { when: format.when, remaining: format.remaining.clone() })
                .collect(),
            waits: headers.waits,
            partition: headers.partition.clone(),
            names: headers.headers().map(|header| header.name.clone()).collect(),
            clock: headers.clock.clone().unwrap_or_else(|| Arc::new(CalendarClock)),
        }
    }

    /// Returns whether the seed of a refusal matters.
    pub(crate) fn is_jittered(&self) -> bool {
        self.waits.is_jittered()
    }

    /// Returns the wait that is reported to a refused client, with its jitter and its cap. Returns
    /// `None` if no wait helps.
    pub(crate) fn reported_wait(&self, outcome: &Outcome, seed: u64) -> Option<Duration> {
        let wait = outcome.retry_after()?;
        Some(Duration::from_micros(self.waits.reported_us(micros_ceil(wait), seed)))
    }

    /// Renders the value of a header. Returns `None` if the header has nothing to report.
    #[inline]
    pub(super) fn value(&self, header: &PreparedHeader, views: &[PolicyView<'_>], seed: u64) -> Option<HeaderValue> {
        let view = match header.content {
            Content::List(list) => return self.list_value(header, list, views, seed),
            Content::RetryAfter => return integer(self.waits.reported_seconds(longest_wait_us(views)?, seed)),
            _ => binding(views)?,
        };
        let limit = view.decision.limit();
        match header.content {
            Content::List(_) | Content::RetryAfter => None,
            Content::Limit => integer(limit),
            Content::Remaining => integer(view.remaining()),
            Content::Used => integer(limit.saturating_sub(view.remaining())),
            Content::Reset(encoding, meaning) => encoding.value(meaning.time_us(view, self.waits, seed)?, &*self.clock),
            Content::DraftReset => integer(self.draft_reset(view, seed)),
            Content::Dictionary => {
                let mut text = Text::new();
                push_dictionary(&mut text, limit, view.remaining(), self.draft_reset(view, seed));
                text.to_value()
            }
            // A header value neither begins nor ends with a space.
            Content::PolicyName => {
                let name = Some(view.policy.name().trim_ascii()).filter(|name| !name.is_empty())?;
                HeaderValue::from_str(name).ok()
            }
        }
    }

    #[inline]
    fn list_value(
        &self,
        header: &PreparedHeader,
        list: List,
        views: &[PolicyView<'_>],
        seed: u64,
    ) -> Option<HeaderValue> {
        if list == List::Limits {
            return self.limits(header, views, seed);
        }
        match views {
            [only] => header.items.get(only.place).cloned(),
            _ if views.len() == header.items.len() => header.all.clone(),
            _ => {
                let mut text = Text::new();
                for view in views {
                    text.push_separator();
                    text.push(header.items.get(view.place)?.as_bytes());
                }
                text.to_value()
            }
        }
    }

    #[inline]
    fn limits(&self, header: &PreparedHeader, views: &[PolicyView<'_>], seed: u64) -> Option<HeaderValue> {
        let mut text = Text::new();
        for view in views {
            let start = header.items.get(view.place)?.as_bytes();
            let (remaining, window) = self.limit_of(view, seed);
            let mut digits = [itoa::Buffer::new(); 2];
            let parts = item_parts(start, remaining, window, &mut digits);
            if views.len() == 1 && self.partition.is_none() {
                // Written once, because the copy of a text just written stalls on store forwarding (bench "layer,
                // allowed, header fields").
                return HeaderValue::from_maybe_shared(Bytes::from(parts.concat())).ok();
            }
            text.push_separator();
            parts.into_iter().for_each(|part| text.push(part));
            if let Some(key) = self.partition.as_ref().and_then(|partition| (partition.0)(view.policy, view.key)) {
                push_partition(&mut text, &key);
            }
        }
        text.to_value()
    }

    /// Returns draft 11's `r` and `t`.
    fn limit_of(&self, view: &PolicyView<'_>, seed: u64) -> (u64, Option<u64>) {
        let (remaining, window_us) = (view.decision.remaining(), view.decision.window_us);
        if view.refuses {
            return (0, view.retry_us().map(|wait_us| self.waits.reported_seconds(wait_us, seed)));
        }
        let window = match (window_us, remaining) {
            (0, _) => None,
            (_, 0) => Some(seconds_ceil(self.waits.capped_us(window_us)).max(1)),
            _ => Some(seconds_ceil(window_us)),
        };
        (remaining, window)
    }

    /// Returns the `reset` of drafts 06 and 07, which should agree with `Retry-After`.
    fn draft_reset(&self, view: &PolicyView<'_>, seed: u64) -> u64 {
        match view.retry_us().filter(|_| view.refuses) {
            Some(wait_us) => self.waits.reported_seconds(wait_us, seed),
            None => seconds_ceil(view.decision.reset_us),
        }
    }
}

impl PreparedHeader {
    fn new(header: &Header, format: usize, policies: &[Policy]) -> Self {
        let rendered = |policies: &[Policy], push: &dyn Fn(&mut Text, &Policy)| {
            let mut text = Text::new();
            policies.iter().for_each(|policy| push(&mut text, policy));
            text.to_shared_value()
        };
        let each =
            |push: &dyn Fn(&mut Text, &Policy)| policies.chunks(1).map_while(|policy| rendered(policy, push)).collect();
        let (items, all) = match header.content {
            Content::List(List::Limits) => (each(&item_start), None),
            Content::List(list) => {
                let push = |text: &mut Text, policy: &Policy| push_policy(text, policy, list);
                (each(&push), rendered(policies, &push))
            }
            _ => (Vec::new(), None),
        };
        Self { name: header.name.clone(), content: header.content, format, items, all }
    }
}
