//! A text that all processes of a store share.

use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use crate::error::BoxError;
use crate::limiter::reply::BoxFuture;

/// A text that all processes with one store share: the operators' settings for all these processes.
/// [`LimiterHooks::shared_text`](crate::limiter::LimiterHooks::shared_text) returns the text of a limiter's
/// store, and `fleet::Fleet` reads and replaces it.
///
/// * The text is replaced as a whole, by compare and swap, in one atomic step.
/// * A load that begins after a swap has returned sees the swap's text.
/// * The text stays until it is replaced, for ten years at least.
/// * The text has at most a megabyte.
/// * A swap that returns an error may have been made, and may even be made later. A caller may drop
///   a future before it is ready.
pub trait SharedText: Send + Sync {
    /// Returns the text, unless `known` is its version. `None` is the version of a missing text.
    ///
    /// Each process calls this method once a second, so an unchanged text should cost little.
    fn load(&self, known: Option<u128>) -> BoxFuture<'_, Result<TextRead, BoxError>>;

    /// Replaces the text if `expect` is its version. Returns whether the text was replaced.
    fn swap<'a>(&'a self, expect: Option<u128>, next: &'a VersionedText) -> BoxFuture<'a, Result<bool, BoxError>>;

    /// Keeps a report for a time. A report is what a process says about itself, in at most [`REPORT_MAX`] bytes. The
    /// version of a report names the process, and is the same for all reports of that process. `place` is below
    /// [`REPORTS_MAX`]. Returns `false` if another process has its report at this place.
    ///
    /// By default no report is kept.
    fn put_report<'a>(
        &'a self,
        _place: usize,
        _report: &'a VersionedText,
        _lasting: Duration,
    ) -> BoxFuture<'a, Result<bool, BoxError>> {
        Box::pin(ready(Ok(true)))
    }

    /// Returns the reports that are kept. A place may hold data of another application, which counts as an empty
    /// report.
    fn reports(&self) -> BoxFuture<'_, Result<Vec<VersionedText>, BoxError>> {
        Box::pin(ready(Ok(Vec::new())))
    }
}

/// The maximum number of reports.
pub const REPORTS_MAX: usize = 64;

/// The longest report in bytes.
pub const REPORT_MAX: usize = 8_000;

/// A text and its version.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct VersionedText {
    /// The version: random, and new with each swap.
    pub version: u128,
    /// The text.
    pub text: Arc<str>,
}

impl VersionedText {
    /// Makes a text.
    #[must_use]
    pub fn new(version: u128, text: impl Into<Arc<str>>) -> Self {
        Self { version, text: text.into() }
    }

    /// Returns the bytes of the version, followed by the bytes of the text.
    #[cfg(feature = "_redis")]
    pub(crate) fn to_stored(&self) -> Vec<u8> {
        [&self.version.to_be_bytes(), self.text.as_bytes()].concat()
    }

    /// Reads a text that was stored after the bytes of its version.
    #[cfg(any(feature = "_redis", feature = "store"))]
    pub(crate) fn from_stored(stored: &[u8]) -> Result<Self, BoxError> {
        let found = stored.split_first_chunk().and_then(|(version, text)| {
            Some(Self::new(u128::from_be_bytes(*version), std::str::from_utf8(text).ok()?))
        });
        found.ok_or_else(|| "this crate did not write the stored text".into())
    }
}

/// The answer to a load.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a text is unchanged or changed, and there is no third case")]
pub enum TextRead {
    /// The caller knows the current version.
    Unchanged,
    /// The current text, or `None` if there is no text.
    Changed(Option<VersionedText>),
}
