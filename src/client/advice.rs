//! [`Advice`]: what the headers of one response say.

use std::time::{Duration, SystemTime};

use base64::Engine as _;
use http::HeaderMap;
use http::header::{AGE, DATE, RETRY_AFTER};
use smallvec::SmallVec;

use crate::base::fields::{self, Dictionary, List, ListMember};
use crate::base::header_names::{Group, RETRY_AFTER_MS, Word, X_MS_RETRY_AFTER_MS, split};
use crate::base::wait::Wait;

use super::grpc;
use super::times::{LONGEST, beyond, decimal, duration_of, from_now};

/// The maximum number of policies of a response that an [`Advice`] keeps.
const POLICIES_MAX: usize = 16;

/// The maximum number of bytes of a name, a unit or a partition.
const NAME_MAX: usize = 256;

/// The advice in a response's headers about quotas and waits.
///
/// The [module's documentation](crate::client) lists the headers, and how their values are read.
///
/// ```
/// use std::time::{Duration, SystemTime};
/// use tower_ratelimit::{Wait, client::Advice};
///
/// let response =
///     http::Response::builder().status(429).header("retry-after", "30").body(()).unwrap();
/// let advice = Advice::read(response.headers(), SystemTime::now());
/// assert_eq!(advice.wait(), Wait::After(Duration::from_secs(30)));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Advice {
    policies: Vec<PolicyAdvice>,
    retry_after: Option<Duration>,
    forbids_retry: bool,
}

/// The advice in a response about one quota. A field that the response does not state is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicyAdvice {
    name: Option<Box<str>>,
    limit: Option<u64>,
    remaining: Option<u64>,
    window: Option<Duration>,
    until_reset: Option<Duration>,
    unit: Option<Box<str>>,
    partition: Option<Box<[u8]>>,
}

impl Advice {
    /// Reads the headers of a response that arrived at `now`. A gRPC client can also pass trailers to
    /// this function. The function does not read waits in bodies.
    ///
    /// The function never fails: a value that cannot be read is unknown. The running time is
    /// proportional to the size of the headers, and the advice holds at most 16 policies.
    #[must_use]
    pub fn read(headers: &HeaderMap, now: SystemTime) -> Self {
        let date = headers.get(DATE).and_then(|date| httpdate::parse_http_date(date.to_str().ok()?).ok());
        let age = headers.get(AGE).and_then(|age| decimal(age.to_str().ok()?.trim()));
        let mut reader = AdviceReader {
            headers,
            now: date.unwrap_or(now),
            is_cached: age.is_some_and(|age| age > 0),
            advice: Self::default(),
            lists: Lists::default(),
            groups: SmallVec::new(),
        };
        headers.keys().for_each(|name| reader.header(name.as_str()));
        reader.finish()
    }

    /// Returns the quotas that the response describes.
    #[must_use]
    pub fn policies(&self) -> &[PolicyAdvice] {
        &self.policies
    }

    /// Returns how long the server asks the client to wait before it retries this request: the longest
    /// wait in `Retry-After`, similar headers, and gRPC's pushback and `RetryInfo`. At most 366 days.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_after
    }

    /// Returns whether a gRPC server asks the client not to retry this request:
    /// `grpc-retry-pushback-ms` is negative, occurs twice, or cannot be read.
    #[must_use]
    pub fn forbids_retry(&self) -> bool {
        self.forbids_retry
    }

    /// Returns how long the client has to wait before its next request can pass: at most 366 days.
    ///
    /// Returns [`Wait::None`] if no header says that the client has to wait. Returns [`Wait::Unknown`]
    /// if a policy is exhausted and no header says how long the client has to wait. Never returns
    /// [`Wait::Never`], because another request with a smaller cost may pass even if the server
    /// [forbids a retry](Self::forbids_retry) of this request.
    ///
    /// * [`retry_after`](Self::retry_after) takes precedence over resets, as the drafts require,
    ///   because a reset may be the time until the quota is full again.
    /// * If `retry_after` is `None`, the wait ends at the latest reset of the
    ///   [exhausted](PolicyAdvice::is_exhausted) policies. If the server reports when the quota is full again,
    ///   as OpenAI does, the wait is longer than the next request needs.
    /// * A wait of zero counts as no wait.
    ///
    /// The wait may be as long as 366 days, the longest period of a quota. Cap it before you wait.
    ///
    /// A wait in the response's body is not read. A wait in gRPC's trailers is read if you pass the
    /// trailers to [`read`](Self::read).
    #[must_use]
    pub fn wait(&self) -> Wait {
        let is_open = |policy: &PolicyAdvice| policy.is_exhausted() && policy.until_reset.is_none();
        match self.retry_after.filter(|wait| !wait.is_zero()).or_else(|| self.latest_reset()) {
            Some(wait) => Wait::After(wait),
            None if self.policies.iter().any(is_open) => Wait::Unknown,
            None => Wait::None,
        }
    }

    /// Returns the latest reset of the exhausted policies, unless it is zero.
    pub(super) fn latest_reset(&self) -> Option<Duration> {
        let exhausted = self.policies.iter().filter(|policy| policy.is_exhausted());
        exhausted.filter_map(PolicyAdvice::until_reset).max().filter(|reset| !reset.is_zero())
    }
}

impl PolicyAdvice {
    /// Returns the policy's name, or the words that distinguish its headers, such as
    /// `requests` in `X-RateLimit-Remaining-Requests`.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Returns the quota, in [units](Self::unit) per [window](Self::window).
    #[must_use]
    pub fn limit(&self) -> Option<u64> {
        self.limit
    }

    /// Returns the units that are left after this response, rounded down.
    #[must_use]
    pub fn remaining(&self) -> Option<u64> {
        self.remaining
    }

    /// Returns the period of the quota: above zero, at most 366 days.
    #[must_use]
    pub fn window(&self) -> Option<Duration> {
        self.window
    }

    /// Returns the time from now until the quota resets, at most 366 days.
    ///
    /// The meaning of a reset depends on the server. In draft 11, the reset is the effective window,
    /// within which the client may use the remaining units. Other servers report the time until the
    /// quota is full again, or until the next unit is free.
    #[must_use]
    pub fn until_reset(&self) -> Option<Duration> {
        self.until_reset
    }

    /// Returns the quota's unit, such as `requests`, `tokens` or `content-bytes`. If the response does
    /// not name the unit, the unit is usually `requests`.
    #[must_use]
    pub fn unit(&self) -> Option<&str> {
        self.unit.as_deref()
    }

    /// Returns the partition: the name of the group of clients that share the quota. The partition is
    /// the decoded `pk` of the drafts, or the value of a `-Scope` header.
    #[must_use]
    pub fn partition(&self) -> Option<&[u8]> {
        self.partition.as_deref()
    }

    /// Returns whether nothing is left.
    #[must_use]
    pub fn is_exhausted(&self) -> bool {
        self.remaining == Some(0)
    }

    /// Returns whether any number of the policy is known. A policy without a known number is dropped.
    fn is_known(&self) -> bool {
        self.limit.is_some() || self.remaining.is_some() || self.until_reset.is_some()
    }

    /// Adds the values of an item in one of the drafts' lists.
    fn add(&mut self, list: List, item: &ListMember<'_>) {
        let seconds = item.seconds.map(Duration::from_secs).filter(|time| *time <= LONGEST);
        if list == List::Limits {
            // A proxy may have made `r` and `t` stricter, and does not know this crate's parameters. So
            // `tower-ms` counts only if it rounds up to `t`, and `tower-r` only if it is below `r`.
            let rounded = |millis: &u64| Some(millis.div_ceil(1_000).max(1)) == item.seconds;
            let millis = item.millis.filter(rounded).map(Duration::from_millis);
            self.remaining = Some(item.units_now.map_or(item.units, |now| now.min(item.units)));
            self.until_reset = millis.or(seconds);
        } else {
            (self.limit, self.window) = (Some(item.units), seconds);
        }
        if list != List::Nameless {
            self.name = string(item.name);
        }
        if let Some(unit) = item.unit {
            self.unit = string(unit);
        }
        if let Some(partition) = item.partition {
            self.partition = bytes(partition);
        }
    }
}

/// Items of lists, each with the prefix of its header's name: `x-` for `x-ratelimit-policy`.
type PrefixedMember<'a> = SmallVec<[(&'a str, ListMember<'a>); 4]>;

/// The lists of the drafts.
#[derive(Default)]
struct Lists<'a> {
    limits: PrefixedMember<'a>,
    policies: PrefixedMember<'a>,
    nameless: PrefixedMember<'a>,
}

/// The single-valued headers of one quota.
struct SingleHeaders<'a> {
    group: Group<'a>,
    policy: PolicyAdvice,
    used: Option<u64>,
    reset: Option<Duration>,
}

struct AdviceReader<'a> {
    headers: &'a HeaderMap,
    /// The server's time from `Date` if it is known, and otherwise the client's time.
    now: SystemTime,
    is_cached: bool,
    advice: Advice,
    lists: Lists<'a>,
    groups: SmallVec<[SingleHeaders<'a>; 2]>,
}

/// Returns the wait that a value of `Retry-After` stands for. If a proxy has joined several values with commas, returns
/// the longest wait. A date of HTTP contains a comma, so not every comma separates values.
fn longest(value: &str, now: SystemTime) -> Option<Duration> {
    let time = |value: &str| from_now(value, now).or_else(|| beyond(value));
    time(value).or_else(|| {
        let commas = || value.match_indices(',').map(|(at, _)| at);
        let starts = || [0].into_iter().chain(commas().map(|at| at + 1));
        let ends = || commas().chain([value.len()]);
        let members = starts().zip(ends()).chain(starts().zip(ends().skip(1)));
        members.filter_map(|(start, end)| time(value.get(start..end)?)).max()
    })
}

impl<'a> AdviceReader<'a> {
    fn header(&mut self, name: &'a str) {
        match name {
            _ if name == RETRY_AFTER => {
                let seconds = self.longest(name);
                let millis = self.millis(RETRY_AFTER_MS).max(self.millis(X_MS_RETRY_AFTER_MS));
                // A server that sends both seconds and milliseconds has rounded the seconds up.
                let rounded = millis.map(|wait| wait.as_secs() + u64::from(wait.subsec_nanos() > 0));
                self.wait(seconds.filter(|_| rounded.map(Duration::from_secs) != seconds));
            }
            RETRY_AFTER_MS | X_MS_RETRY_AFTER_MS => self.wait(self.millis(name)),
            "grpc-retry-pushback-ms" => {
                let pushback = self.texts(name).next().and_then(grpc::pushback);
                let is_single = self.headers.get_all(name).iter().nth(1).is_none();
                self.advice.forbids_retry = pushback.is_none() || !is_single;
                self.wait(pushback);
            }
            "grpc-status-details-bin" => {
                let delays = self.headers.get_all(name).iter().filter_map(|value| grpc::retry_delay(value.as_bytes()));
                self.wait(delays.max());
            }
            _ => match split(name) {
                Some((_, Word::RetryAfter)) => self.wait(self.longest(name)),
                Some((group, word)) if !self.is_cached => self.policy_header(name, group, word),
                _ => {}
            },
        }
    }

    /// Returns the longest wait in the values of a header that has seconds or dates.
    fn longest(&self, name: &str) -> Option<Duration> {
        self.texts(name).filter_map(|value| longest(value, self.now)).max()
    }

    /// Returns the longest wait in the values of a header that has milliseconds.
    fn millis(&self, name: &str) -> Option<Duration> {
        let time = |value: &str| Some(duration_of(decimal(value.trim())?.div_ceil(1_000)));
        self.texts(name).filter_map(|value| time(value).or_else(|| beyond(value))).max()
    }

    /// Adds a wait. The longest wait counts.
    fn wait(&mut self, wait: Option<Duration>) {
        self.advice.retry_after = self.advice.retry_after.max(wait.map(|wait| wait.min(LONGEST)));
    }

    fn policy_header(&mut self, name: &'a str, group: Group<'a>, word: Word) {
        let Group { prefix, words } = group;
        let has_list = match word {
            Word::All if words.is_empty() => self.list(List::Limits, name, prefix),
            Word::Policy => self.list(List::Policies, name, prefix) || self.list(List::Nameless, name, prefix),
            _ => false,
        };
        let has_value = word != Word::Unknown || self.texts(name).any(|value| value.contains('='));
        if has_list || word == Word::Policy || !has_value {
            return;
        }
        let Some(at) = self.group(group) else { return };
        for value in self.texts(name) {
            if let Some(single) = self.groups.get_mut(at) {
                single.add(word, value.trim(), self.now);
            }
        }
        if word == Word::Limit || word == Word::All {
            // In `100, 100;w=10, 1000;w=3600`, the first item is the limit that is closest to being reached, and the
            // other items are quotas.
            self.list(List::Nameless, name, prefix);
        }
    }

    /// Reads a header as a list of the kind `list`. Returns whether the header is such a list.
    fn list(&mut self, list: List, name: &'a str, prefix: &'a str) -> bool {
        let mut items = PrefixedMember::new();
        let each = |item| {
            if items.len() < POLICIES_MAX {
                items.push((prefix, item));
            }
        };
        let is_list = fields::for_each_item(self.lines(name), list, each).is_some();
        if is_list {
            let known = match list {
                List::Limits => &mut self.lists.limits,
                List::Policies => &mut self.lists.policies,
                List::Nameless => &mut self.lists.nameless,
            };
            // An item without a window only repeats the limit that the headers of the group report.
            known.extend(items.into_iter().filter(|(_, item)| list != List::Nameless || item.seconds.is_some()));
            known.truncate(POLICIES_MAX);
        }
        is_list
    }

    /// Returns the index of a group of headers in `groups`, or `None` if there are too many groups.
    fn group(&mut self, group: Group<'a>) -> Option<usize> {
        let known = self.groups.iter().position(|single| single.group == group);
        if known.is_none() && self.groups.len() < POLICIES_MAX {
            let policy = PolicyAdvice {
                name: text(group.words),
                window: group.window(),
                unit: group.unit().map(Into::into),
                ..PolicyAdvice::default()
            };
            self.groups.push(SingleHeaders { group, policy, used: None, reset: None });
            return Some(self.groups.len() - 1);
        }
        known
    }

    fn lines(&self, name: &str) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        self.headers.get_all(name).into_iter().map(|value| value.as_bytes())
    }

    /// Returns the values of a header that are visible ASCII.
    fn texts(&self, name: &str) -> impl Iterator<Item = &'a str> + use<'a> {
        self.headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok())
    }

    fn finish(self) -> Advice {
        let Self { mut advice, lists, groups, .. } = self;
        debug_assert!(groups.len() <= POLICIES_MAX, "a response is read in bounded memory and time");
        let mut policies: Vec<(&str, PolicyAdvice)> = Vec::new();
        for (prefix, item) in &lists.limits {
            let mut policy = PolicyAdvice::default();
            policy.add(List::Limits, item);
            policies.push((prefix, policy));
        }
        let listed = policies.len();
        for (prefix, item) in &lists.policies {
            let mut quota = PolicyAdvice::default();
            quota.add(List::Policies, item);
            let mut is_joined = false;
            for (_, policy) in policies.iter_mut().take(listed).filter(|(other, policy)| {
                let is_other =
                    policy.partition.is_some() && quota.partition.is_some() && policy.partition != quota.partition;
                other == prefix && policy.name == quota.name && !is_other
            }) {
                policy.add(List::Policies, item);
                is_joined = true;
            }
            if !is_joined {
                policies.push((prefix, quota));
            }
        }
        let singles = policies.len();
        policies.extend(groups.into_iter().map(|single| (single.group.prefix, single.finished())));
        for (prefix, item) in &lists.nameless {
            let mut quota = PolicyAdvice::default();
            quota.add(List::Nameless, item);
            let known = policies.iter_mut().skip(singles).find(|(other, policy)| {
                let is_other = policy.window.is_some_and(|window| Some(window) != quota.window);
                other == prefix && policy.limit == quota.limit && !is_other
            });
            match known {
                Some((_, policy)) => policy.window = policy.window.or(quota.window),
                None => policies.push((prefix, quota)),
            }
        }
        advice.policies = policies.into_iter().map(|(_, policy)| policy).filter(PolicyAdvice::is_known).collect();
        advice.policies.truncate(POLICIES_MAX);
        advice
    }
}

impl SingleHeaders<'_> {
    /// Adds the value of a header. If a header occurs twice, the stricter value counts.
    fn add(&mut self, word: Word, value: &str, now: SystemTime) {
        let policy = &mut self.policy;
        let stricter = |known: Option<u64>, value: Option<u64>| known.into_iter().chain(value).min();
        let window = |time: Option<Duration>| time.filter(|time| !time.is_zero() && *time <= LONGEST);
        match word {
            Word::All | Word::Unknown if value.contains('=') => {
                let Dictionary { limit, remaining, reset } = fields::dictionary(value.as_bytes()).unwrap_or_default();
                policy.limit = stricter(policy.limit, limit);
                policy.remaining = stricter(policy.remaining, remaining);
                self.reset = self.reset.max(reset.map(Duration::from_secs));
            }
            Word::All | Word::Limit => policy.limit = stricter(policy.limit, whole(value)),
            Word::Remaining => policy.remaining = stricter(policy.remaining, floor(value)),
            Word::Used => self.used = self.used.max(ceil(value)),
            Word::UsedOfLimit => {
                if let Some((used, limit)) = value.split_once('/') {
                    self.used = self.used.max(ceil(used));
                    policy.limit = stricter(policy.limit, whole(limit));
                    policy.unit = Some("requests".into());
                }
            }
            Word::Reset => self.reset = self.reset.max(from_now(value, now)),
            Word::ResetAfter => policy.until_reset = policy.until_reset.max(from_now(value, now)),
            Word::Name => policy.name = text(value),
            Word::Scope => policy.partition = Some(value.as_bytes()).filter(|value| is_short(value)).map(Into::into),
            Word::WindowSeconds => policy.window = window(from_now(value, now)),
            Word::WindowMillis => policy.window = window(value.parse().ok().map(Duration::from_millis)),
            Word::Unknown | Word::Policy | Word::RetryAfter => {}
        }
    }

    fn finished(self) -> PolicyAdvice {
        let Self { mut policy, used, reset, .. } = self;
        policy.until_reset = policy.until_reset.or(reset).filter(|time| *time <= LONGEST);
        match (policy.limit, policy.remaining, used) {
            (Some(limit), None, Some(used)) => policy.remaining = Some(limit.saturating_sub(used)),
            (None, Some(remaining), Some(used)) => policy.limit = remaining.checked_add(used),
            _ => {}
        }
        policy
    }
}

/// Returns the first number of a list, multiplied by 10^9. Parameters of the number are ignored.
fn first(value: &str) -> Option<u128> {
    decimal(value.split([',', ';']).next()?.trim())
}

const NANOS: u128 = 1_000_000_000;

fn floor(value: &str) -> Option<u64> {
    u64::try_from(first(value)? / NANOS).ok()
}

fn ceil(value: &str) -> Option<u64> {
    u64::try_from(first(value)?.div_ceil(NANOS)).ok()
}

/// Returns a limit. A fraction is not a limit but a rate, such as the 0.5 requests per second that AWS
/// reports.
fn whole(value: &str) -> Option<u64> {
    first(value).filter(|n| n % NANOS == 0).and_then(|n| u64::try_from(n / NANOS).ok())
}

fn is_short(value: &[u8]) -> bool {
    (1..=NAME_MAX).contains(&value.len())
}

fn text(value: &str) -> Option<Box<str>> {
    is_short(value.as_bytes()).then(|| value.into())
}

/// Returns the text of a string of RFC 9651. An escaped character of the string has two bytes.
fn string(string: &[u8]) -> Option<Box<str>> {
    Some(string).filter(|string| string.len() <= 2 * NAME_MAX + 2).and_then(|string| text(&fields::unquoted(string)))
}

/// Decodes a byte sequence of RFC 9651.
fn bytes(sequence: &[u8]) -> Option<Box<[u8]>> {
    let inner = sequence.get(1..sequence.len().saturating_sub(1)).filter(|inner| inner.len() <= NAME_MAX)?;
    grpc::BASE64.decode(inner).ok().filter(|bytes| is_short(bytes)).map(Into::into)
}
