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

use std::time::Duration;

use http::HeaderName;
use http::header::RETRY_AFTER;

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
/// * Fields that the response already has, from an inner layer or a handler, are merged: lists are extended, and of two
///   items for one policy the stricter stays; of the fields with one value those of the smaller `remaining` stay; of two
///   `Retry-After` the later. A value that cannot be parsed is left as it is; to a list ours is added on a line of its own.
/// * A browser's scripts see none of these fields, `Retry-After` included, unless `Access-Control-Expose-Headers` names
///   them: give [`names`](Self::names) to tower-http's `CorsLayer::expose_headers`.
#[derive(Clone, Debug)]
pub struct Headers {
    formats: Vec<Format>,
    retry_after: bool,
    waits: Waits,
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
        Ok(Self { formats: vec![headers.into_format()?], retry_after: true, waits: Waits::default() })
    }

    /// No fields at all, not even `Retry-After`.
    #[must_use]
    pub fn none() -> Self {
        Self { formats: Vec::new(), retry_after: false, waits: Waits::default() }
    }

    /// These and the other's, each [when](Self::send) it was told to.
    ///
    /// A field that both have is sent as these say. `Retry-After` is sent if either sends it; of two longest waits the
    /// shorter holds, and the other's jitter only if these have none.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        for format in other.formats {
            let mut fields = format.fields;
            fields.retain(|field| !self.fields().any(|known| known.name == field.name));
            self.formats.push(Format { fields, when: format.when });
        }
        self.retry_after |= other.retry_after;
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
        Self { formats: vec![Format::new(fields)], retry_after: true, waits: Waits::default() }
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

/// Fields that are sent together.
#[derive(Clone, Debug)]
struct Format {
    fields: Vec<Field>,
    when: When,
}

impl Format {
    fn new(fields: Vec<Field>) -> Self {
        Self { fields, when: When::default() }
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
