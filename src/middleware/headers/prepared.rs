//! Writing the fields of one response.

use std::time::Duration;

use http::header::{Entry, OccupiedEntry};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

use crate::decision::ChargeDecision;
use crate::outcome::Outcome;
use crate::policy::Policy;
use crate::time::{Timestamp, micros_ceil};

use super::ietf::{Advertised, item_value, push_dictionary, push_item, push_item_start, push_string};
use super::merge::{self, List, Merged};
use super::text::{Text, integer};
use super::wait::{Waits, seconds_ceil};
use super::{Content, Field, Headers, When, retry_after};

/// How one policy stands, borrowed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View<'a> {
    pub(crate) policy: &'a Policy,
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
    /// There is no format, or only such that are sent on refusals.
    silent_if_passed: bool,
}

#[derive(Debug)]
pub(super) struct PreparedFormat {
    pub(super) when: When,
    pub(super) lists: Vec<PreparedList>,
    /// Fields with one value, which tell of the policy that binds.
    pub(super) singles: Vec<Field>,
    /// The field among them whose `remaining` says which is the tighter of two, and how to read it.
    remaining: Option<(HeaderName, Reader)>,
}

/// Reads the `remaining` of a field's value.
type Reader = fn(&[u8]) -> Option<u64>;

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
            formats: formats.map(|format| PreparedFormat::new(&format.fields, format.when, policies)).collect(),
            policies: policies.iter().map(PreparedPolicy::new).collect(),
            retry_after: headers.retry_after,
            waits: headers.waits,
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
        for format in &self.formats {
            if format.when.holds(views, refused) {
                for list in &format.lists {
                    self.write_list(headers, list, fresh, &response);
                }
                if !format.singles.is_empty() {
                    self.write_singles(headers, format, &response);
                }
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
    fn write_list(&self, headers: &mut HeaderMap, list: &PreparedList, fresh: bool, response: &Response<'_>) {
        // Neither, if the map has no room for one more name.
        if fresh {
            if let Some(value) = self.list_value(list, response) {
                let _ = headers.try_insert(&list.name, value);
            }
            return;
        }
        match headers.try_entry(&list.name) {
            Ok(Entry::Vacant(vacant)) => {
                if let Some(value) = self.list_value(list, response) {
                    let _ = vacant.try_insert(value);
                }
            }
            Ok(Entry::Occupied(known)) => self.merge_list(known, list, response),
            Err(_) => {}
        }
    }

    #[cold]
    fn merge_list(&self, mut known: OccupiedEntry<'_, HeaderValue>, list: &PreparedList, response: &Response<'_>) {
        let whole = self.whole_list(list, response);
        let text = if whole.is_some() { Text::new() } else { self.list_text(list.list, response) };
        let lines = known.iter().map(HeaderValue::as_bytes);
        let ours = whole.map_or(text.as_bytes(), HeaderValue::as_bytes);
        match merge::merge(lines, ours, list.list) {
            Merged::Unchanged => {}
            Merged::Replaced(merged) => {
                if let Some(merged) = merged.to_value() {
                    known.insert(merged);
                }
            }
            Merged::Foreign => {
                if let Some(value) = whole.cloned().or_else(|| text.to_value()) {
                    known.append(value);
                }
            }
        }
    }

    #[inline]
    pub(super) fn list_value(&self, list: &PreparedList, response: &Response<'_>) -> Option<HeaderValue> {
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

    fn write_singles(&self, headers: &mut HeaderMap, format: &PreparedFormat, response: &Response<'_>) {
        let Some(binding) = binding(response.views) else { return };
        let mut replace = false;
        if let Some((name, read)) = &format.remaining {
            if let Some(theirs) = headers.get(name) {
                let tighter = read(theirs.as_bytes()).is_some_and(|theirs| remaining(binding) < theirs);
                if !tighter {
                    return;
                }
                replace = true;
            }
        }
        for field in &format.singles {
            let value = self.single(field.content, binding, response);
            if replace {
                match value {
                    Some(value) => {
                        let _ = headers.try_insert(&field.name, value);
                    }
                    None => {
                        headers.remove(&field.name);
                    }
                }
            } else if let (Some(value), Ok(Entry::Vacant(vacant))) = (value, headers.try_entry(&field.name)) {
                let _ = vacant.try_insert(value);
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
                None => HeaderValue::from_str(view.policy.name()).ok(),
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
    fn new(fields: &[Field], when: When, policies: &[Policy]) -> Self {
        let mut format = Self { when, lists: Vec::new(), singles: Vec::new(), remaining: None };
        for field in fields {
            let list = match field.content {
                Content::Limits => List::Limits,
                Content::Policies => List::Policies,
                Content::Nameless => List::Nameless,
                content => {
                    match content {
                        Content::Remaining => format.remaining = Some((field.name.clone(), merge::whole_part)),
                        Content::Dictionary => {
                            format.remaining = Some((field.name.clone(), merge::dictionary_remaining))
                        }
                        _ => {}
                    }
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
}

impl PreparedPolicy {
    fn new(policy: &Policy) -> Self {
        let mut name = Text::new();
        name.push(policy.name().as_bytes());
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
        advertised.push_parameters(text);
    }
}
