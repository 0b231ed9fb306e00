//! For clients (feature `client`): reads what a response says about quotas and waits.
//!
//! [`Advice::read`] reads the headers of a response of any server: the `RateLimit` headers of the IETF's drafts, the
//! `X-RateLimit` headers of many vendors, `Retry-After`, and gRPC's equivalents.
//!
//! ```
//! use http::HeaderMap;
//! use std::time::{Duration, SystemTime};
//! use tower_ratelimit::{Wait, client::Advice};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut headers = HeaderMap::new();
//! headers
//!     .insert("ratelimit-policy", r#""burst";q=10;w=1, "daily";q=5000;w=86400"#.parse()?);
//! headers.insert("ratelimit", r#""burst";r=0;t=1, "daily";r=4998;t=69076"#.parse()?);
//!
//! let advice = Advice::read(&headers, SystemTime::now());
//! assert_eq!(advice.wait(), Wait::After(Duration::from_secs(1)));
//! let daily = &advice.policies()[1];
//! assert_eq!(
//!     (daily.name(), daily.limit(), daily.remaining()),
//!     (Some("daily"), Some(5000), Some(4998))
//! );
//! # Ok(()) }
//! ```
//!
//! # Which headers are read
//!
//! | header | read as |
//! |---|---|
//! | `RateLimit-Policy` and `RateLimit` of drafts 08 to 11 | a policy for each item; the two lists are joined by name and partition key |
//! | `RateLimit: limit=…, remaining=…, reset=…` of draft 07, also with semicolons (Zendesk) | one policy |
//! | `RateLimit-Limit`, `-Remaining`, `-Reset` of drafts 00 to 06 | one policy; further quotas in `RateLimit-Limit` or `RateLimit-Policy` (`100;w=60`) are policies of their own, unless they have its limit |
//! | `X-RateLimit-…`, `X-Rate-Limit-…`, `Vendor-RateLimit-…` | the same words with any prefix |
//! | `…-Limit-Requests`, `…-Tokens-Remaining`, `…-Remaining-Minute` | a policy for each group of words; it is the policy's name |
//! | `…-Used`, `-Usage`, `-Observed` | the limit minus what remains |
//! | `…-Resource`, `-Bucket`, `-Name` | the policy's name |
//! | `…-Scope` | the policy's partition |
//! | `…-Window`, `-Interval-Seconds`, `-Interval-Milliseconds` | the policy's window |
//! | `X-Shopify-Shop-Api-Call-Limit: 32/40` | used and limit |
//! | `Retry-After`, `…-RateLimit-Retry-After`, `Retry-After-Ms`, `X-Ms-Retry-After-Ms`, `grpc-retry-pushback-ms`, `RetryInfo` in `grpc-status-details-bin` | [`Advice::retry_after`]: the longest of them |
//!
//! * All formats in a response are read. So a quota may be listed twice.
//! * In `RateLimit` of drafts 08 to 11, this crate's own parameter `tower-r` replaces a larger `r`, and
//!   `tower-ms` is `t` in milliseconds.
//! * If a header with a single value occurs twice, the stricter value counts: the smallest limit, the
//!   smallest remainder, and the latest reset. If the value is a list of numbers, the first number
//!   counts.
//! * A `Retry-After` is ignored if it is only the wait of `Retry-After-Ms`, rounded up to a second.
//! * If a proxy has joined several values of `Retry-After`, as in `1, 2`, the longest counts. A malformed value is
//!   ignored. If a refusal has only malformed values, the client waits as if the refusal named no time.
//! * [`Advice::read`] reads only headers, and trailers that the program passes to it. The program itself has
//!   to read waits in bodies, such as Telegram's `retry_after`, and waits in gRPC's trailers after messages.
//!   The program can pass these waits to [`ObeyLayer::pause`].
//! * Structured fields follow RFC 9651. A malformed header is ignored as a whole, as the drafts
//!   require.
//! * A response with an `Age` above 0 comes from a cache. From such a response only waits are read, and
//!   no policies, as the drafts recommend.
//!
//! # What a time means
//!
//! Servers write resets in many formats, and do not name the format. Resets and `Retry-After` are read
//! according to this table:
//!
//! | value | read as | used by |
//! |---|---|---|
//! | a number below 10^9, also with decimals | seconds from now | the drafts, Envoy, Reddit, Discord's `-Reset-After` |
//! | a number from 10^9 and below 10^12 | seconds since 1970 | GitHub, GitLab, X, Twitch, Okta, Discord's `-Reset` |
//! | a number from 10^12 and below 10^15 | milliseconds since 1970 | Linear |
//! | `6m0s`, `1.5s`, `20ms`; units `d h m s ms us ns` | a duration | OpenAI, Groq |
//! | `2024-01-16T16:00:02Z`, also with an offset or without seconds | a date of RFC 3339 | Anthropic, Vimeo, Atlassian |
//! | `Tue, 16 Jan 2024 16:00:02 GMT` | a date of HTTP | `Retry-After`, GitLab's `-ResetTime` |
//!
//! * The first two rows cannot be confused, because a wait of 10^9 seconds would be 31 years, and 10^9
//!   seconds after 1970 was in 2001.
//! * In the structured fields (drafts 08 to 11, and 07's dictionary), times are always seconds from
//!   now.
//! * The time until a date is measured from the response's own `Date`, because the clocks of server and
//!   client differ. If the response has no `Date`, the time until a date is measured from the client's
//!   time. A date in the past is read as a time of zero.
//! * All times round up. No time is longer than 366 days, the longest period of a quota. A longer
//!   `Retry-After` is read as 366 days, and a longer reset or window is unknown.
//! * A date more than 366 days ago is unknown. The standard of `Retry-After` defines numbers as
//!   seconds. So a `Retry-After` that would be a date more than 366 days ago, or has more than 15
//!   digits, is a long wait, and is read as 366 days.
//!
//! # Hostile servers
//!
//! A value that cannot be read is unknown, never an error or a panic. The running time is proportional
//! to the size of the headers. An [`Advice`] keeps at most 16 policies of a response, with names and
//! partitions of at most 256 bytes. So an `Advice` has less than 20 KiB.
//!
//! # What a policy's numbers mean
//!
//! | you need | use |
//! |---|---|
//! | which limit it is | [`name`](PolicyAdvice::name), [`partition`](PolicyAdvice::partition) |
//! | how much is left | [`remaining`](PolicyAdvice::remaining) of [`limit`](PolicyAdvice::limit), in [`unit`](PolicyAdvice::unit) |
//! | the sustained rate | [`limit`](PolicyAdvice::limit) per [`window`](PolicyAdvice::window) |
//! | when the quota resets | [`until_reset`](PolicyAdvice::until_reset) |
//!
//! * Everything can be unknown. Few servers send all of these numbers.
//! * A quota may be listed twice, because many servers send two formats.
//! * The meaning of a reset depends on the server. In drafts 08 to 11, the reset is the time within
//!   which the client may use the remaining units. OpenAI and many other servers report the time until
//!   the quota is full again, which is longer than the wait for one request.
//!
//! # Limits of the reading
//!
//! * A reset in milliseconds from now is misread by a factor of 1,000, because such a number looks like
//!   seconds. Servers that send resets in milliseconds are rare. Misreading a reset in milliseconds
//!   makes the wait longer, never shorter.
//! * If a response states its reset as a date, and its `Date` comes from another clock, the time until
//!   the reset is wrong. Resets in seconds do not depend on any clock.
//! * Waits in bodies are not read, such as Telegram's `retry_after` or Google's `RetryInfo` in JSON. Waits
//!   in gRPC's trailers are not read either. Read these waits in your program, and pass them to
//!   [`ObeyLayer::pause`](crate::client::ObeyLayer::pause).

mod advice;
mod grpc;
mod obey;
#[cfg(feature = "retry")]
mod retry;
mod times;

pub use advice::{Advice, PolicyAdvice};
pub use obey::{Obey, ObeyError, ObeyErrorKind, ObeyFuture, ObeyLayer};
#[cfg(feature = "retry")]
pub use retry::RetryAfter;
