//! Rules in a file.
//!
//! * `document` reads bytes as a tree of values with positions.
//! * `read` reads the tree as rules.
//! * `spec` has the content of the file, as plain data.
//! * `error` collects the problems of a file, and `problem` has the type of a problem. `report` has the findings of a
//!   check that are not problems.
//! * `pattern` compares texts with patterns.
//! * `times` says at which times of the week a rule applies.
//! * `warn` finds probable mistakes in valid rules, and `contained` finds rules that never refuse a request.
//! * `tree` finds the limits of descriptors, in files of Envoy's form.
//! * `bind` makes a layer's rules from the spec, with the names that the program registered.
//! * `descriptors` decides about descriptors without an HTTP request.
//! * `convert` rewrites a file in Envoy's form, and `compare` says what another file would change.
//! * `store` has the rules in force, and `watch` looks for a new version of the file.
//!
//! # Files in Envoy's form
//!
//! The guide [shows such a file](crate::guide::rules_in_a_file#envoys-form). A layer and a service
//! that answers Envoy share each allowance if they use the same limiter:
//!
//! ```
//! use tower_ratelimit::MemoryLimiter;
//! use tower_ratelimit::rules::{Descriptor, DescriptorRequest, Rules};
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let text = "{domain: edge, descriptors: [{key: path, rate_limit: {unit: minute, requests_per_unit: 100}}]}";
//! let rules = Rules::builder()
//!     .descriptors(|request| [Descriptor::new([("path", request.uri.path())])])
//!     .read_text(text)?;
//! let limiter = MemoryLimiter::new();
//! let layer = rules.layer(limiter.clone())?; // around the application
//! let limits = rules.descriptor_limits(limiter)?; // for what Envoy asks
//! let request =
//!     DescriptorRequest::new("edge").charge(Descriptor::new([("path", "/search")]));
//! let answer = limits.decide(&request).await?;
//! assert!(!answer.is_over_limit());
//! # Ok(()) }
//! ```
//!
//! * **Matching.** At each level, the entry with the exact value counts. Without such an entry, the
//!   first matching pattern of the file counts, and otherwise the entry without a value. A limit
//!   counts if the descriptor ends at the limit's level. A descriptor that matches no limit passes.
//!   With `share_threshold` all values of a pattern have one counter.
//! * **Counting** is in fixed windows that begin with the clock's minutes, hours and so on. Windows
//!   of a week, of a month of 30 days and of a year of 365 days are counted from the epoch.
//!   `options` in `metadata` are the words that follow the limit in the text of a
//!   [`Quota`](crate::Quota): `sliding window`, for example. A misspelt field of this crate in
//!   `metadata` is a problem. Fields of other programs in `metadata` are not read.
//! * **All or nothing.** If one descriptor is over its limit, the other descriptors are not
//!   charged. Envoy's service behaves like this with
//!   `STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT=true`. If [`DescriptorLimits`] refuses a request
//!   because a window has too few units left for the request's hits, the window is used up, as in
//!   Envoy's service.
//! * `unlimited`, `shadow_mode`, `name` and `replaces` have the same meaning as in Envoy's service.
//!   `detailed_metric` and `value_to_metric` have no effect, because an
//!   [`Observer`](crate::observe::Observer) gets each key.
//! * **Names.** In the guide's file, the limit of `/search*` is the policy `edge:path=/search*,tenant`. Clients see the
//!   name of the policy in the headers, and usage is stored under that name. Separators within keys and values are
//!   encoded, so that different keys and values give different names.
//! * **Differences.** Each of the following is a problem of the file here, although Envoy's service accepts it:
//!
//!   | in the file | Envoy's service |
//!   |---|---|
//!   | a number like `010` | reads 8; other readers of YAML read 10 |
//!   | a number like `1_000` or `0x10` | reads it |
//!   | `yes`, `on`, `no` or `off` as a truth value | reads it |
//!   | a merge key, `<<` | merges |
//!   | `rate_limit` without `requests_per_unit` | takes 0, and refuses every request |
//!   | `*` in a `key` | compares the key and the value, as one text, with the pattern |
//!   | `quota_mode: true` | refuses a request only if all its limits in this mode are over, and reports to Envoy which are |
//!   | one domain in two files (`MERGE_DOMAIN_CONFIG`) | merges them; here each file has its own domain |
//!
//!   The following counts differently:
//!
//!   | what happens | Envoy's service | here |
//!   |---|---|---|
//!   | an entry gets a `value`, or loses it | counts on, because a counter belongs to the request's descriptor | counts afresh, because a counter belongs to the limit of the file |
//!   | a request has one descriptor twice | charges it twice, and the first status shows what is left before the second charge | charges it twice, and both statuses show what is left after both |
//!   | the answer's headers | only with `LIMIT_RESPONSE_HEADERS_ENABLED` | a server decides; `tower-ratelimit serve` always adds them |
//! * While the program runs, a file can change neither its domain nor its form: descriptors of the
//!   former domain would have no limits. [`convert_envoy`] and `tower-ratelimit convert` convert a
//!   file in Envoy's form into the native form, with comments where the two forms differ.
//!
//! # How large a file may be
//!
//! | what | at most |
//! |---|---|
//! | the file | 1 MiB |
//! | rules | 10,000 |
//! | quotas of a rule | 32 |
//! | entries of a `not` | 32 |
//! | names of headers or of parameters in a `match` or an entry of `not` | 32 |
//! | patterns with `*` of hosts, headers, parameters and user agents, in all rules | 10,000 |
//! | nesting | 32 levels |
//! | brackets, braces, commas, colons and question marks | 200,000 |
//! | with its aliases written out | 250,000 values and 2 MiB of text |
//! | what all rules together take over from [`defaults` and templates](crate::guide::rules_in_a_file#say-it-once) | 500,000 values and 2 MiB of text |
//!
//! The time to decide a request grows with the number of rules that its path may match, and with
//! the number of rules that have no `path`. If you have many rules, give each a `path`. The time
//! also grows with the number of patterns with `*` in these rules: on a usual machine 10,000
//! patterns of one rule take 2 ms, and 10,000 rules with one pattern each take 10 ms. A file has at
//! most 10,000 patterns.

mod bind;
mod check;
mod compare;
mod contained;
mod convert;
mod descriptors;
mod document;
mod error;
mod handle;
mod names;
mod pattern;
pub(crate) mod problem;
pub(crate) mod read;
mod report;
#[cfg(all(test, ratelimit_shuttle, feature = "axum"))]
mod shuttle_tests;
pub(crate) mod spec;
mod store;
#[cfg(all(test, not(ratelimit_loom)))]
mod tests;
mod times;
mod tree;
mod warn;
mod watch;

pub use compare::{RuleChange, RuleChangeKind, compare};
pub use convert::convert_envoy;
pub use descriptors::{DescriptorAnswer, DescriptorLimits, DescriptorRequest, DescriptorStatus};
pub use error::RulesError;
pub use handle::{Rules, RulesBuilder};
pub use problem::{Problem, RulesErrorKind};
pub use report::{NameKind, RulesReport, RulesWarning, RulesWarningKind, UnregisteredName};
pub use tree::Descriptor;

/// The JSON Schema of files of rules, for editors and other tools.
///
/// The schema checks the form of a file. The schema cannot read the texts of quotas, and it cannot compare a value,
/// such as a name, with another value. [`RulesBuilder::check`] checks everything.
pub const SCHEMA: &str = include_str!("schema.json");
