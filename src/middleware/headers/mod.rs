//! Which header fields tell clients about their quotas, and when.

mod ietf;
mod kept;
mod layout;
mod legacy;
mod merge;
mod prepared;
mod reset;
mod retry_after;
#[cfg(test)]
mod tests;
mod text;
mod wait;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderName;
use http::header::RETRY_AFTER;

use crate::key::Key;
use crate::policy::Policy;

pub use legacy::{HeadersError, HeadersErrorKind, LegacyHeaders};
pub use reset::{ResetEncoding, ResetMeaning};
pub use wait::Jitter;

pub(crate) use ietf::Advertised;
pub(crate) use layout::Layout;
pub(crate) use prepared::{Prepared, View};
pub(crate) use text::{Text, integer};

use wait::Waits;

const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATE_LIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

/// Which header fields tell clients about their quotas, and when. By default those of [draft 11](Self::draft_11), always,
/// and `Retry-After` on refusals.
///
/// ```
/// use tower_ratelimit::{Headers, ResetEncoding, When};
///
/// // The drafts' fields for new clients, the older ones for those that know them, and only when it matters.
/// let headers = Headers::draft_11()
///     .and(Headers::x_rate_limit(ResetEncoding::EpochSeconds))
///     .send(When::NearExhaustion { percent: 20 });
/// # assert_eq!(headers.names().len(), 6);
/// ```
///
/// # How quotas are told
///
/// * What remains is rounded down, every time is rounded up. A policy that refused is told with nothing remaining.
/// * `Retry-After` is in whole seconds, at least 1: the longest wait of the policies that refused. There is none if no
///   wait helps, since a cost is above its policy's capacity.
/// * The fields are not sent with redirects (3xx), where they could keep a client from following; `Retry-After` is.
/// * Fields that the response already has, from an inner layer or a handler, are merged, and what belongs together comes
///   from one source. Lists are extended; if both sources have an item for one policy, the one with less left tells of that
///   policy in both fields. Of the fields with one value, theirs stay if their `remaining` is no more than ours, and ours
///   replace all of them otherwise, `X-RateLimit-Used` and others of that prefix included. Of two `Retry-After` the
///   later stays. A value that cannot be read is replaced: clients would ignore it, or all of the field.
/// * A browser's scripts see none of these fields, `Retry-After` included, unless `Access-Control-Expose-Headers` names
///   them: give [`names`](Self::names) to tower-http's `CorsLayer::expose_headers`.
#[derive(Clone, Debug)]
pub struct Headers {
    formats: Vec<Format>,
    retry_after: bool,
    waits: Waits,
    partition: Option<PartitionKey>,
}

/// When the fields are sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum When {
    /// Never.
    Never,
    /// When the request is refused.
    OnRefusal,
    /// When the request is refused, or some policy has no more left than so many percent of its limit.
    NearExhaustion {
        /// Percent of the limit.
        percent: u8,
    },
    /// With every response to a request that a policy applied to.
    #[default]
    Always,
}

impl Headers {
    /// `RateLimit-Policy: "default";q=100;w=60` and `RateLimit: "default";r=99;t=60`, as in
    /// draft-ietf-httpapi-ratelimit-headers-11 (May 2026; on the wire the same since revision 08), and `Retry-After`.
    ///
    /// `q` is the capacity and `w` the seconds in which it comes back, so a token bucket whose burst is not its limit is
    /// told by its burst. `t` is the effective window: within it no more than `r` may be used. It is not the time until the
    /// quota is back. For a policy that refused, `t` is the wait, as `Retry-After` is; it is missing if no wait helps.
    ///
    /// The draft is work in progress and no standard.
    #[must_use]
    pub fn draft_11() -> Self {
        Self::with(vec![
            Field { name: RATE_LIMIT_POLICY, content: Content::Policies },
            Field { name: RATE_LIMIT, content: Content::Limits },
        ])
    }

    /// `RateLimit-Policy: 100;w=60` and `RateLimit: limit=100, remaining=50, reset=5`, as in draft 07 (2023), and
    /// `Retry-After`.
    ///
    /// `RateLimit` tells of the policy that binds; its `reset` is the time until the whole quota is back, and after a refusal
    /// the wait.
    #[must_use]
    pub fn draft_07() -> Self {
        Self::with(vec![
            Field { name: RATE_LIMIT_POLICY, content: Content::Nameless },
            Field { name: RATE_LIMIT, content: Content::Dictionary },
        ])
    }

    /// `RateLimit-Policy: 100;w=60`, `RateLimit-Limit: 100`, `RateLimit-Remaining: 50` and `RateLimit-Reset: 5`, as in draft
    /// 06 (2022), and `Retry-After`. They tell the same as [`draft_07`](Self::draft_07).
    #[must_use]
    pub fn draft_06() -> Self {
        Self::with(vec![
            Field { name: RATE_LIMIT_POLICY, content: Content::Nameless },
            Field { name: HeaderName::from_static("ratelimit-limit"), content: Content::Limit },
            Field { name: HeaderName::from_static("ratelimit-remaining"), content: Content::Remaining },
            Field { name: HeaderName::from_static("ratelimit-reset"), content: Content::DraftReset },
        ])
    }

    /// `X-RateLimit-Limit`, `X-RateLimit-Remaining` and `X-RateLimit-Reset`, which is when the whole quota is back, and
    /// `Retry-After`.
    ///
    /// There is no common encoding of the reset, so it has to be said.
    ///
    /// Beside [`draft_11`](Self::draft_11) these fields do not help every older client. Older versions of
    /// `ratelimit-header-parser` (npm) look at `RateLimit` first, read it as draft 07, and find no numbers in draft 11's:
    /// send their users this format alone, or [`draft_07`](Self::draft_07).
    #[must_use]
    pub fn x_rate_limit(reset: ResetEncoding) -> Self {
        Self::with(vec![
            Field { name: HeaderName::from_static("x-ratelimit-limit"), content: Content::Limit },
            Field { name: HeaderName::from_static("x-ratelimit-remaining"), content: Content::Remaining },
            Field {
                name: HeaderName::from_static("x-ratelimit-reset"),
                content: Content::Reset(reset, ResetMeaning::Full),
            },
        ])
    }

    /// As GitHub's API sends them: `x-ratelimit-limit`, `-remaining`, `-used`, and `-reset` in seconds since the epoch; and
    /// `Retry-After`.
    #[must_use]
    pub fn github() -> Self {
        Self::with(vec![
            Field { name: HeaderName::from_static("x-ratelimit-limit"), content: Content::Limit },
            Field { name: HeaderName::from_static("x-ratelimit-remaining"), content: Content::Remaining },
            Field { name: HeaderName::from_static("x-ratelimit-used"), content: Content::Used },
            Field {
                name: HeaderName::from_static("x-ratelimit-reset"),
                content: Content::Reset(ResetEncoding::EpochSeconds, ResetMeaning::Full),
            },
        ])
    }

    /// Fields of one's own names, and `Retry-After`.
    ///
    /// # Errors
    /// If a name is not that of a header field, comes twice, or means something else in HTTP or gRPC.
    pub fn legacy(headers: LegacyHeaders) -> Result<Self, HeadersError> {
        Ok(Self::of(vec![headers.into_format()?], true))
    }

    /// No fields at all, not even `Retry-After`.
    #[must_use]
    pub fn none() -> Self {
        Self::of(Vec::new(), false)
    }

    /// These and the other's, each [when](Self::send) it was told to.
    ///
    /// A field that both have is sent as these say. `Retry-After` is sent if either sends it; of two longest waits the
    /// shorter holds, and the other's jitter only if these have none.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        for format in other.formats {
            let mut fields = format.fields.clone();
            fields.retain(|field| !self.fields().any(|known| known.name == field.name));
            self.formats.push(Format { fields, ..format });
        }
        self.retry_after |= other.retry_after;
        self.partition = self.partition.or(other.partition);
        self.waits = self.waits.and(other.waits);
        self
    }

    /// When the fields named so far are sent. `Retry-After` is sent on refusals, whatever this says.
    #[must_use]
    pub fn send(mut self, when: When) -> Self {
        for format in &mut self.formats {
            format.when = when;
        }
        self
    }

    /// Whether `Retry-After` is sent on refusals.
    #[must_use]
    pub fn retry_after(mut self, send: bool) -> Self {
        self.retry_after = send;
        self
    }

    /// The longest wait that is told, by default one day: huge values can harm clients. It caps `Retry-After`, the `t` of a
    /// policy with nothing remaining, the drafts' `reset` after a refusal, a field for the
    /// [next unit](ResetMeaning::NextUnit) or the [window](ResetMeaning::Window) after one, and gRPC's equals of these. A
    /// `t` beside something that remains is not a wait, and is not cut: it would invite to a higher rate.
    ///
    /// Below one second, waits are still told as at least 1.
    #[must_use]
    pub fn max_wait(mut self, max: Duration) -> Self {
        self.waits.limit_to(max);
        self
    }

    /// Adds to the waits of refusals, so that clients do not all come back at once. By default nothing is added.
    #[must_use]
    pub fn jitter(mut self, jitter: Jitter) -> Self {
        self.waits.add(jitter);
        self
    }

    /// Names the partition of each policy that a request is counted in, as the draft's `pk`: by these bytes, for the
    /// policy and the request's key. It stands in the items of [`draft_11`](Self::draft_11)'s `RateLimit`.
    ///
    /// By default none is sent. That is the safe choice: clients and every proxy on the way can read it. Never send the key
    /// itself, if it is a secret or an address, nor its plain hash, which can be guessed: send a name that is meant to be
    /// known, such as a tenant's, or a hash by a secret key (HMAC).
    ///
    /// ```
    /// use tower_ratelimit::{Headers, Key, Policy};
    ///
    /// let headers = Headers::draft_11().partition_keys(|policy: &Policy, key: &Key| {
    ///     // Tenants' names are public, users' are not.
    ///     (policy.name() == "tenant").then(|| key.as_bytes().to_vec())
    /// });
    /// ```
    #[must_use]
    pub fn partition_keys(mut self, name: impl Fn(&Policy, &Key) -> Option<Vec<u8>> + Send + Sync + 'static) -> Self {
        self.partition = Some(PartitionKey(Arc::new(name)));
        self
    }

    /// The names of all fields that may be sent, for `Access-Control-Expose-Headers`.
    #[must_use]
    pub fn names(&self) -> Vec<HeaderName> {
        let sent = self.formats.iter().filter(|format| format.when != When::Never);
        let mut names: Vec<HeaderName> =
            sent.flat_map(|format| format.fields.iter().map(|field| field.name.clone())).collect();
        if self.retry_after {
            names.push(RETRY_AFTER);
        }
        names
    }

    /// Renders what does not change, for a layer with these policies.
    pub(crate) fn prepare(&self, policies: &[Policy]) -> Prepared {
        Prepared::new(self, policies)
    }

    fn with(fields: Vec<Field>) -> Self {
        Self::of(vec![Format::new(fields)], true)
    }

    fn of(formats: Vec<Format>, retry_after: bool) -> Self {
        Self { formats, retry_after, waits: Waits::default(), partition: None }
    }

    fn fields(&self) -> impl Iterator<Item = &Field> {
        self.formats.iter().flat_map(|format| &format.fields)
    }
}

impl Default for Headers {
    fn default() -> Self {
        Self::draft_11()
    }
}

/// Returns the name that a partition has in the header, if it has one.
type NamePartition = dyn Fn(&Policy, &Key) -> Option<Vec<u8>> + Send + Sync;

#[derive(Clone)]
struct PartitionKey(Arc<NamePartition>);

impl fmt::Debug for PartitionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PartitionKey")
    }
}

/// Fields that are sent together.
#[derive(Clone, Debug)]
struct Format {
    fields: Vec<Field>,
    when: When,
    /// The field that says what remains, if there is one, and how to read it. It may be one of an earlier format.
    remaining: Option<(HeaderName, Reader)>,
}

/// Reads what remains from a field's value.
type Reader = fn(&[u8]) -> Option<u64>;

impl Format {
    fn new(fields: Vec<Field>) -> Self {
        let remaining = fields.iter().find_map(|field| {
            let read: Reader = match field.content {
                Content::Remaining => merge::whole_part,
                Content::Dictionary => merge::dictionary_remaining,
                _ => return None,
            };
            Some((field.name.clone(), read))
        });
        Self { fields, when: When::default(), remaining }
    }
}

#[derive(Clone, Debug)]
struct Field {
    name: HeaderName,
    content: Content,
}

/// What a field tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    /// Draft 11's list of policies.
    Policies,
    /// Draft 11's list of what remains.
    Limits,
    /// The list of policies of drafts 06 and 07.
    Nameless,
    /// Draft 07's `limit=…, remaining=…, reset=…`.
    Dictionary,
    /// Draft 06's reset.
    DraftReset,
    Limit,
    Remaining,
    Used,
    Reset(ResetEncoding, ResetMeaning),
    PolicyName,
}
