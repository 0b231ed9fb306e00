//! Writing the fields of one response.

use std::time::Duration;

use http::header::Entry;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use smallvec::SmallVec;

use crate::decision::ChargeDecision;
use crate::key::Key;
use crate::outcome::Outcome;
use crate::policy::{Policy, REQUESTS};
use crate::time::{Timestamp, micros_ceil};

use super::ietf::{Advertised, item_value, push_dictionary, push_item, push_item_start, push_partition, push_string};
use super::merge::{self, List};
use super::text::{Text, integer};
use super::wait::{Waits, seconds_ceil};
use super::{Content, Field, Format, Headers, PartitionKey, Reader, When, retry_after};

/// How the names of fields begin that go together by custom.
const FAMILIES: [&str; 2] = ["x-ratelimit-", "x-rate-limit-"];

/// How one policy stands, borrowed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View<'a> {
    pub(crate) policy: &'a Policy,
    pub(crate) key: &'a Key,
    pub(crate) decision: &'a ChargeDecision,
    /// Whether this policy refused the request.
    pub(crate) refuses: bool,
}

/// [`Headers`] for the policies of one layer, with everything rendered that does not change.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(super) formats: Vec<PreparedFormat>,
    policies: Vec<PreparedPolicy>,
    pub(super) retry_after: bool,
    waits: Waits,
    partition: Option<PartitionKey>,
    /// Of all fields that may be sent.
    names: Vec<HeaderName>,
    /// There is no format, or only such that are sent on refusals.
    silent_if_passed: bool,
}

#[derive(Debug)]
pub(super) struct PreparedFormat {
    pub(super) when: When,
    pub(super) lists: Vec<PreparedList>,
    /// Fields with one value, which tell of the policy that binds.
    pub(super) singles: Vec<Field>,
    /// The field whose `remaining` says which is the tighter of two, and how to read it.
    remaining: Option<(HeaderName, Reader)>,
}

#[derive(Debug)]
pub(super) struct PreparedList {
    pub(super) name: HeaderName,
    list: List,
    /// Its value if all policies apply; nothing for what changes from response to response.
    pub(super) whole: Option<HeaderValue>,
    /// Its value for each policy, if that is the only one that applies: a plan.
    alone: Vec<HeaderValue>,
}

#[derive(Debug)]
struct PreparedPolicy {
    policy: Policy,
    /// Draft 11's item up to the number that remains.
    item_start: Box<[u8]>,
    name: Option<HeaderValue>,
    limit: Option<HeaderValue>,
}

/// What is the same for all fields of one response.
pub(super) struct Response<'a> {
    pub(super) views: &'a [View<'a>],
    /// They are of all prepared policies.
    pub(super) all_apply: bool,
    pub(super) seed: u64,
    pub(super) wall_now: &'a dyn Fn() -> Timestamp,
}

impl Prepared {
    pub(super) fn new(headers: &Headers, policies: &[Policy]) -> Self {
        let formats = headers.formats.iter().filter(|format| format.when != When::Never);
        Self {
            silent_if_passed: formats.clone().all(|format| format.when == When::OnRefusal),
            formats: formats.map(|format| PreparedFormat::new(format, policies)).collect(),
            policies: policies.iter().map(PreparedPolicy::new).collect(),
            retry_after: headers.retry_after,
            waits: headers.waits,
            partition: headers.partition.clone(),
            names: headers.fields().map(|field| field.name.clone()).collect(),
        }
    }

    /// Adds the fields for a response to a request that was decided.
    ///
    /// `views` are in the order of the prepared policies and may lack those that did not apply. `seed` should be the same
    /// whenever the same client comes; `wall_now` is asked only if a field tells a date.
    pub(crate) fn write(
        &self,
        headers: &mut HeaderMap,
        views: &[View<'_>],
        status: StatusCode,
        refused: bool,
        seed: u64,
        wall_now: &dyn Fn() -> Timestamp,
    ) {
        // Of a response without fields none has to be looked for: those that are added differ by name.
        let fresh = headers.is_empty();
        if refused && self.retry_after {
            self.write_retry_after(headers, views, seed, wall_now);
        }
        if views.is_empty() || status.is_redirection() {
            return;
        }
        let response = Response { views, all_apply: self.all_apply(views), seed, wall_now };
        let held = || self.formats.iter().filter(|format| format.when.holds(views, refused));
        // Read before any of them is written, since formats can have names in common.
        let theirs: SmallVec<[bool; 2]> =
            if fresh { SmallVec::new() } else { held().map(|format| format.keeps_theirs(headers, views)).collect() };
        for (at, format) in held().enumerate() {
            self.write_lists(headers, &format.lists, fresh, &response);
            if !theirs.get(at).copied().unwrap_or(false) {
                self.write_singles(headers, format, fresh, &response);
            }
        }
    }

    /// Whether no response to a request that passed gets a field, whatever was decided.
    #[inline]
    pub(crate) fn is_silent_if_passed(&self) -> bool {
        self.silent_if_passed
    }

    /// Whether the seed of a refusal is looked at.
    pub(crate) fn is_jittered(&self) -> bool {
        self.waits.is_jittered()
    }

    /// The wait that a refused client is told, with its jitter and its cap, if waiting helps.
    pub(crate) fn told_wait(&self, outcome: &Outcome, seed: u64) -> Option<Duration> {
        let wait = outcome.retry_after()?;
        Some(Duration::from_micros(self.waits.told_us(micros_ceil(wait), seed)))
    }

    #[cold]
    fn write_retry_after(
        &self,
        headers: &mut HeaderMap,
        views: &[View<'_>],
        seed: u64,
        wall_now: &dyn Fn() -> Timestamp,
    ) {
        if let Some(wait_us) = retry_after::longest_wait(views) {
            retry_after::write(headers, self.told_seconds(wait_us, seed), wall_now);
        }
    }

    #[inline]
    fn write_lists(&self, headers: &mut HeaderMap, lists: &[PreparedList], fresh: bool, response: &Response<'_>) {
        for (at, list) in lists.iter().enumerate() {
            // Neither, if the map has no room for one more name.
            if fresh {
                if let Some(value) = self.list_value(list, response) {
                    let _ = headers.try_insert(&list.name, value);
                }
                continue;
            }
            match headers.try_entry(&list.name) {
                Ok(Entry::Vacant(vacant)) => {
                    if let Some(value) = self.list_value(list, response) {
                        let _ = vacant.try_insert(value);
                    }
                }
                Ok(Entry::Occupied(_)) => return self.merge_lists(headers, lists, at, response),
                Err(_) => {}
            }
        }
    }

    /// Writes lists of which one is there already. Those before `first` were not, and are ours.
    #[cold]
    fn merge_lists(&self, headers: &mut HeaderMap, lists: &[PreparedList], first: usize, response: &Response<'_>) {
        let theirs = |at: usize, headers: &HeaderMap| -> SmallVec<[HeaderValue; 2]> {
            let lines = lists.get(at).filter(|_| at >= first).map(|list| headers.get_all(&list.name));
            lines.into_iter().flatten().cloned().collect()
        };
        // What is left of each policy says which of the two tells of it.
        let limits = lists.iter().position(|list| list.list == List::Limits);
        let left = limits.map(|at| theirs(at, headers)).unwrap_or_default();
        let ours = self.list_text(List::Limits, response);
        let stay = merge::stricter(&lines(&left), ours.as_bytes());
        for (at, list) in lists.iter().enumerate() {
            let stay = if list.list == List::Nameless { &[] } else { stay.as_slice() };
            let theirs = theirs(at, headers);
            let ours = self.list_text(list.list, response);
            match merge::merge(&lines(&theirs), ours.as_bytes(), list.list, stay).to_value() {
                Some(merged) => {
                    let _ = headers.try_insert(&list.name, merged);
                }
                None => {
                    headers.remove(&list.name);
                }
            }
        }
    }

    #[inline]
    pub(super) fn list_value(&self, list: &PreparedList, response: &Response<'_>) -> Option<HeaderValue> {
        if self.partition.is_some() && list.list == List::Limits {
            return self.list_text(list.list, response).to_value();
        }
        if response.all_apply {
            if list.whole.is_some() {
                return list.whole.clone();
            }
            // The usual layer has one policy.
            if let ([view], [known], List::Limits) = (response.views, self.policies.as_slice(), list.list) {
                let (remaining, window) = self.limit_of(view, response.seed);
                return item_value(&known.item_start, remaining, window);
            }
        }
        self.list_value_of_some(list, response)
    }

    /// The same where there are other policies, which may apply too.
    #[inline(never)]
    fn list_value_of_some(&self, list: &PreparedList, response: &Response<'_>) -> Option<HeaderValue> {
        if let Some(whole) = self.whole_list(list, response) {
            return Some(whole.clone());
        }
        if let ([view], List::Limits) = (response.views, list.list) {
            if let Some(known) = self.known(0, view.policy) {
                let (remaining, window) = self.limit_of(view, response.seed);
                return item_value(&known.item_start, remaining, window);
            }
        }
        self.list_text(list.list, response).to_value()
    }

    /// The list as it was rendered before, if it does not change from response to response.
    fn whole_list<'a>(&self, list: &'a PreparedList, response: &Response<'_>) -> Option<&'a HeaderValue> {
        if response.all_apply {
            return list.whole.as_ref();
        }
        let [view] = response.views else { return None };
        list.alone.get(self.policies.iter().position(|known| known.policy == *view.policy)?)
    }

    fn list_text(&self, list: List, response: &Response<'_>) -> Text {
        let mut text = Text::new();
        for (index, view) in response.views.iter().enumerate() {
            match list {
                List::Limits => {
                    let (remaining, window) = self.limit_of(view, response.seed);
                    match self.known(index, view.policy) {
                        Some(known) => push_item(&mut text, &known.item_start, remaining, window),
                        None => push_item(&mut text, item_start(view.policy).as_bytes(), remaining, window),
                    }
                    if let Some(partition) = self.partition.as_ref().and_then(|of| (of.0)(view.policy, view.key)) {
                        push_partition(&mut text, &partition);
                    }
                }
                List::Policies | List::Nameless => push_policy(&mut text, view.policy, list),
            }
        }
        text
    }

    /// Draft 11's `r` and `t`.
    fn limit_of(&self, view: &View<'_>, seed: u64) -> (u64, Option<u64>) {
        let decision = view.decision;
        if view.refuses {
            let wait = (!decision.is_never()).then(|| self.told_seconds(decision.retry_us(), seed));
            return (0, wait);
        }
        let window = match (decision.window_us(), decision.remaining()) {
            (0, _) => None,
            (window_us, 0) => Some(seconds_ceil(self.waits.capped_us(window_us)).max(1)),
            (window_us, _) => Some(seconds_ceil(window_us)),
        };
        (decision.remaining(), window)
    }

    pub(super) fn told_seconds(&self, wait_us: u64, seed: u64) -> u64 {
        seconds_ceil(self.waits.told_us(wait_us, seed)).max(1)
    }

    /// Writes fields with one value, all of them ours.
    fn write_singles(&self, headers: &mut HeaderMap, format: &PreparedFormat, fresh: bool, response: &Response<'_>) {
        let Some(binding) = binding(response.views) else { return };
        if !fresh {
            self.remove_relatives(headers, format);
        }
        for field in &format.singles {
            match self.single(field.content, binding, response) {
                Some(value) => {
                    let _ = headers.try_insert(&field.name, value);
                }
                None if fresh => {}
                None => {
                    headers.remove(&field.name);
                }
            }
        }
    }

    /// Removes fields that go with those of this format by custom, such as `X-RateLimit-Used`, and would tell of another
    /// quota beside them.
    fn remove_relatives(&self, headers: &mut HeaderMap, format: &PreparedFormat) {
        for family in FAMILIES {
            let is_of = |name: &HeaderName| name.as_str().starts_with(family);
            if format.singles.iter().any(|field| is_of(&field.name)) {
                let relatives = headers.keys().filter(|name| is_of(name) && !self.names.contains(name));
                let relatives: SmallVec<[HeaderName; 2]> = relatives.cloned().collect();
                for name in &relatives {
                    headers.remove(name);
                }
            }
        }
    }

    pub(super) fn single(&self, content: Content, view: &View<'_>, response: &Response<'_>) -> Option<HeaderValue> {
        let Response { seed, wall_now, .. } = *response;
        let decision = view.decision;
        let known = || self.policies.iter().find(|known| known.policy == *view.policy);
        match content {
            Content::Limit => match known().filter(|_| decision.limit() == view.policy.quota().capacity()) {
                Some(known) => known.limit.clone(),
                None => integer(decision.limit()),
            },
            Content::Remaining => integer(remaining(view)),
            Content::Used => integer(decision.limit().saturating_sub(remaining(view))),
            Content::Reset(encoding, meaning) => {
                encoding.value(meaning.time_us(decision, view.refuses, self.waits, seed)?, wall_now)
            }
            Content::DraftReset => integer(self.draft_reset(view, seed)),
            Content::Dictionary => {
                let mut text = Text::new();
                push_dictionary(&mut text, decision.limit(), remaining(view), self.draft_reset(view, seed));
                text.to_value()
            }
            Content::PolicyName => match known() {
                Some(known) => known.name.clone(),
                None => HeaderValue::from_str(view.policy.name().trim_ascii()).ok().filter(|name| !name.is_empty()),
            },
            Content::Policies | Content::Limits | Content::Nameless => None, // lists
        }
    }

    /// The `reset` of drafts 06 and 07, which should agree with `Retry-After`.
    fn draft_reset(&self, view: &View<'_>, seed: u64) -> u64 {
        if view.refuses && !view.decision.is_never() {
            self.told_seconds(view.decision.retry_us(), seed)
        } else {
            seconds_ceil(view.decision.reset_us())
        }
    }

    pub(super) fn all_apply(&self, views: &[View<'_>]) -> bool {
        views.len() == self.policies.len()
            && views.iter().zip(&self.policies).all(|(view, known)| *view.policy == known.policy)
    }

    /// What is prepared for a policy, which is most often at `index`.
    fn known(&self, index: usize, policy: &Policy) -> Option<&PreparedPolicy> {
        let guess = self.policies.get(index).filter(|known| known.policy == *policy);
        guess.or_else(|| self.policies.iter().find(|known| known.policy == *policy))
    }
}

impl PreparedFormat {
    fn new(of: &Format, policies: &[Policy]) -> Self {
        let remaining = of.remaining.clone();
        let mut format = Self { when: of.when, lists: Vec::new(), singles: Vec::new(), remaining };
        for field in &of.fields {
            let list = match field.content {
                Content::Limits => List::Limits,
                Content::Policies => List::Policies,
                Content::Nameless => List::Nameless,
                _ => {
                    format.singles.push(field.clone());
                    continue;
                }
            };
            let rendered = |policies: &[Policy]| {
                let mut text = Text::new();
                policies.iter().for_each(|policy| push_policy(&mut text, policy, list));
                text.to_shared_value()
            };
            let (mut whole, mut alone) = (None, Vec::new());
            if list != List::Limits {
                whole = rendered(policies);
                alone = policies.chunks(1).map_while(rendered).collect();
            }
            format.lists.push(PreparedList { name: field.name.clone(), list, whole, alone });
        }
        format
    }

    /// Whether the fields with one value stay that are there: what they say remains can be read, and is no more than ours.
    fn keeps_theirs(&self, headers: &HeaderMap, views: &[View<'_>]) -> bool {
        if self.singles.is_empty() {
            return false;
        }
        let Some((name, read)) = &self.remaining else { return false };
        let mut lines = headers.get_all(name).iter();
        let (Some(line), None) = (lines.next(), lines.next()) else { return false };
        let ours = binding(views).map(remaining);
        read(line.as_bytes()).is_some_and(|theirs| ours.is_none_or(|ours| theirs <= ours))
    }
}

impl PreparedPolicy {
    fn new(policy: &Policy) -> Self {
        let mut name = Text::new();
        name.push(policy.name().trim_ascii().as_bytes()); // no field value begins or ends with a space
        let mut limit = Text::new();
        limit.push_field_integer(policy.quota().capacity());
        Self {
            item_start: item_start(policy).as_bytes().into(),
            name: name.to_shared_value(),
            limit: limit.to_shared_value(),
            policy: policy.clone(),
        }
    }
}

impl When {
    fn holds(self, views: &[View<'_>], refused: bool) -> bool {
        match self {
            Self::Never => false,
            Self::OnRefusal => refused,
            Self::NearExhaustion { percent } => {
                refused
                    || views.iter().any(|view| {
                        let (remaining, limit) = (view.decision.remaining(), view.decision.limit());
                        u128::from(remaining) * 100 <= u128::from(limit) * u128::from(percent)
                    })
            }
            Self::Always => true,
        }
    }
}

/// The policy that binds: of those that refused the one with the longest wait, else the one with the least remaining.
pub(super) fn binding<'a>(views: &'a [View<'a>]) -> Option<&'a View<'a>> {
    let refusing = views.iter().filter(|view| view.refuses).max_by_key(|view| view.decision.retry_us());
    refusing.or_else(|| views.iter().min_by_key(|view| view.decision.remaining()))
}

/// What is told to remain: nothing after a refusal, since what remains is not enough.
fn remaining(view: &View<'_>) -> u64 {
    if view.refuses { 0 } else { view.decision.remaining() }
}

fn lines(values: &[HeaderValue]) -> SmallVec<[&[u8]; 2]> {
    values.iter().map(HeaderValue::as_bytes).collect()
}

fn item_start(policy: &Policy) -> Text {
    let mut text = Text::new();
    push_item_start(&mut text, policy.name());
    text
}

fn push_policy(text: &mut Text, policy: &Policy, list: List) {
    let advertised = Advertised::new(policy.quota());
    text.push_separator();
    if list == List::Nameless {
        advertised.push_nameless(text);
    } else {
        push_string(text, policy.name());
        let unit = Some(policy.quota_unit()).filter(|unit| *unit != REQUESTS);
        advertised.push_parameters(unit, text);
    }
}
