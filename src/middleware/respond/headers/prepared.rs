//! Rendering headers for one response.

use std::time::Duration;

use http::{HeaderName, HeaderValue};

use crate::outcome::Outcome;
use crate::policy::Policy;
use crate::time::{Timestamp, micros_ceil};

use super::content::{Content, Header, List};
use super::definition::{Format, Headers, PartitionKey, When};
use super::ietf::{item_start, item_value, push_dictionary, push_item, push_partition, push_policy};
use super::text::{Text, integer};
use super::view::{PolicyView, binding, longest_wait_us};
use super::wait::{Waits, seconds_ceil};

/// [`Headers`] compiled for the policies of one layer, with every constant value rendered.
#[derive(Debug)]
pub(crate) struct PreparedHeaders {
    pub(super) formats: Vec<PreparedFormat>,
    /// Whether no response to a request that passed gets a header.
    pub(crate) is_silent_if_passed: bool,
    policies: Vec<Policy>,
    /// The beginning of each policy's item in draft 11's `RateLimit`.
    item_starts: Vec<Text>,
    pub(super) retry_after: bool,
    waits: Waits,
    partition: Option<PartitionKey>,
    /// The names of all headers of all formats, also of those that are never sent.
    pub(super) names: Vec<HeaderName>,
}

#[derive(Debug)]
pub(super) struct PreparedFormat {
    pub(super) when: When,
    /// Headers with one item per policy.
    pub(super) lists: Vec<PreparedHeader>,
    /// Headers with one value, which reports the policy that binds.
    pub(super) singles: Vec<PreparedHeader>,
    pub(super) remaining: Option<Header>,
}

#[derive(Clone, Debug)]
pub(super) struct PreparedHeader {
    pub(super) name: HeaderName,
    pub(super) content: Content,
    /// Its place among the headers of all formats.
    pub(super) place: usize,
    /// The value if all policies apply, unless it changes from response to response.
    all: Option<HeaderValue>,
    /// For each policy, the value if it alone applies, as with plans.
    alone: Vec<HeaderValue>,
}

/// A response to render headers for.
pub(super) struct Response<'a> {
    pub(super) views: &'a [PolicyView<'a>],
    applying: Applying,
    pub(super) seed: u64,
    pub(super) wall_now: &'a dyn Fn() -> Timestamp,
}

/// Which of the layer's policies apply to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Applying {
    All,
    /// Only the policy at this index.
    One(usize),
    Others,
}

impl PreparedHeaders {
    pub(crate) fn new(headers: &Headers, policies: &[Policy]) -> Self {
        let formats = headers.formats.iter().filter(|format| format.when != When::Never);
        let mut formats: Vec<_> = formats.map(|format| PreparedFormat::new(format, policies)).collect();
        let all = formats.iter_mut().flat_map(|format| format.lists.iter_mut().chain(&mut format.singles));
        all.enumerate().for_each(|(place, header)| header.place = place);
        Self {
            is_silent_if_passed: formats.iter().all(|format| format.when == When::OnRefusal),
            formats,
            policies: policies.to_vec(),
            item_starts: policies.iter().map(item_start).collect(),
            retry_after: headers.retry_after,
            waits: headers.waits,
            partition: headers.partition.clone(),
            names: headers.headers().map(|header| header.name.clone()).collect(),
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

    #[inline]
    pub(super) fn response<'a>(
        &self,
        views: &'a [PolicyView<'a>],
        seed: u64,
        wall_now: &'a dyn Fn() -> Timestamp,
    ) -> Response<'a> {
        let applying = match views {
            [view] => {
                self.policies.iter().position(|known| known == view.policy).map_or(Applying::Others, Applying::One)
            }
            _ if views.iter().map(|view| view.policy).eq(&self.policies) => Applying::All,
            _ => Applying::Others,
        };
        Response { views, applying, seed, wall_now }
    }

    /// Renders the value of a header. Returns `None` if the header has nothing to report.
    #[inline]
    pub(super) fn value(&self, header: &PreparedHeader, response: &Response<'_>) -> Option<HeaderValue> {
        let seed = response.seed;
        let view = match header.content {
            Content::List(list) => return self.list_value(header, list, response),
            Content::RetryAfter => return integer(self.retry_after_seconds(response.views, seed)?),
            _ => binding(response.views)?,
        };
        let limit = view.decision.limit();
        match header.content {
            Content::List(_) | Content::RetryAfter => None,
            Content::Limit => integer(limit),
            Content::Remaining => integer(view.remaining()),
            Content::Used => integer(limit.saturating_sub(view.remaining())),
            Content::Reset(encoding, meaning) => {
                encoding.value(meaning.time_us(view, self.waits, seed)?, response.wall_now)
            }
            Content::DraftReset => integer(self.draft_reset(view, seed)),
            Content::Dictionary => {
                let mut text = Text::new();
                push_dictionary(&mut text, limit, view.remaining(), self.draft_reset(view, seed));
                text.to_value()
            }
            // A header value neither begins nor ends with a space.
            Content::PolicyName => Text::from(view.policy.name().trim_ascii()).to_value(),
        }
    }

    #[inline]
    fn list_value(&self, header: &PreparedHeader, list: List, response: &Response<'_>) -> Option<HeaderValue> {
        let constant = match response.applying {
            Applying::All => header.all.as_ref(),
            Applying::One(at) => header.alone.get(at),
            Applying::Others => None,
        };
        if constant.is_some() {
            return constant.cloned();
        }
        // Most layers have one policy. Its item needs no buffer on the stack (bench "layer,
        // allowed, header fields").
        if let ([view], Applying::One(at), None) = (response.views, response.applying, &self.partition) {
            let (remaining, window) = self.limit_of(view, response.seed);
            return item_value(self.item_starts.get(at)?.as_bytes(), remaining, window);
        }
        self.list_text(list, response).to_value()
    }

    fn list_text(&self, list: List, response: &Response<'_>) -> Text {
        let mut text = Text::new();
        for view in response.views {
            if list != List::Limits {
                push_policy(&mut text, view.policy, list);
                continue;
            }
            let (remaining, window) = self.limit_of(view, response.seed);
            push_item(&mut text, view.policy, remaining, window);
            if let Some(key) = self.partition.as_ref().and_then(|partition| (partition.0)(view.policy, view.key)) {
                push_partition(&mut text, &key);
            }
        }
        text
    }

    /// Returns draft 11's `r` and `t`.
    fn limit_of(&self, view: &PolicyView<'_>, seed: u64) -> (u64, Option<u64>) {
        let (remaining, window_us) = (view.decision.remaining(), view.decision.window_us());
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
            None => seconds_ceil(view.decision.reset_us()),
        }
    }

    /// Returns the seconds of `Retry-After`, or `None` if no wait helps.
    pub(super) fn retry_after_seconds(&self, views: &[PolicyView<'_>], seed: u64) -> Option<u64> {
        Some(self.waits.reported_seconds(longest_wait_us(views)?, seed))
    }
}

impl PreparedFormat {
    fn new(format: &Format, policies: &[Policy]) -> Self {
        let prepared = format.headers.iter().map(|header| PreparedHeader::new(header, policies));
        let (lists, singles) = prepared.partition(|header| matches!(header.content, Content::List(_)));
        Self { when: format.when, lists, singles, remaining: format.remaining.clone() }
    }
}

impl PreparedHeader {
    pub(super) fn new(header: &Header, policies: &[Policy]) -> Self {
        let (mut all, mut alone) = (None, Vec::new());
        if let Content::List(list @ (List::Policies | List::Nameless)) = header.content {
            all = rendered(list, policies);
            alone = policies.chunks(1).map_while(|policy| rendered(list, policy)).collect();
        }
        Self { name: header.name.clone(), content: header.content, place: 0, all, alone }
    }
}

/// Renders the value of a list of these policies.
fn rendered(list: List, policies: &[Policy]) -> Option<HeaderValue> {
    let mut text = Text::new();
    policies.iter().for_each(|policy| push_policy(&mut text, policy, list));
    text.to_shared_value()
}
