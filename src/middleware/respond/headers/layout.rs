//! Usual refusals: their headers are laid out once, and each refusal gets a filled-in copy.
//!
//! Copying a map neither hashes the names again nor grows it. The bench "layer, refused, header
//! fields" shows the gain. Responses that pass do not do this, because they often get more headers
//! later, for which the copy has no room.

use http::header::RETRY_AFTER;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

use crate::time::Timestamp;

use super::content::{Content, Header};
use super::prepared::{PreparedHeader, PreparedHeaders};
use super::view::PolicyView;

/// The headers of a refusal, with the values to fill in.
#[derive(Debug)]
pub(crate) struct RefusalLayout {
    headers: HeaderMap,
    /// For each value of `headers`, in their order, what to fill in. `None` for a constant value.
    slots: Vec<Option<PreparedHeader>>,
}

impl PreparedHeaders {
    /// Lays out the headers of refusals with this status: `headers`, and after them those that
    /// report quotas. No name may occur in both. Returns `None` for redirects, which get fewer
    /// headers.
    pub(crate) fn lay_out_refusal(&self, mut headers: HeaderMap, status: StatusCode) -> Option<RefusalLayout> {
        if status.is_redirection() {
            return None;
        }
        let retry_after = Header { name: RETRY_AFTER, content: Content::RetryAfter };
        let retry_after = self.retry_after.then(|| PreparedHeader::new(&retry_after, &[]));
        let in_formats = self.formats.iter().flat_map(|format| format.lists.iter().chain(&format.singles));
        let reported: Vec<&PreparedHeader> = retry_after.iter().chain(in_formats).collect();
        for header in &reported {
            headers.try_insert(&header.name, HeaderValue::from_static("")).ok()?;
        }
        let slot = |name: &HeaderName| reported.iter().find(|header| header.name == *name).copied().cloned();
        let slots = headers.keys().map(slot).collect();
        Some(RefusalLayout { headers, slots })
    }

    /// Returns the headers of one refusal, equal to those that [`write`](Self::write) would add.
    /// Returns `None` if a header of the layout has nothing to report.
    pub(crate) fn fill(
        &self,
        layout: &RefusalLayout,
        views: &[PolicyView<'_>],
        seed: u64,
        wall_now: &dyn Fn() -> Timestamp,
    ) -> Option<HeaderMap> {
        let response = self.response(views, seed, wall_now);
        let mut headers = layout.headers.clone();
        for (value, slot) in headers.values_mut().zip(&layout.slots) {
            if let Some(header) = slot {
                *value = self.value(header, &response)?;
            }
        }
        Some(headers)
    }
}
