//! The headers of usual refusals, which are laid out once. Each refusal gets a copy of these headers
//! with its own values.
//!
//! Copying a header map does not hash the names again, and does not grow the map. The bench "layer,
//! refused, header fields" shows the gain. Responses to requests that pass do not use a layout, because
//! they often get more headers later, and a copy has no room for these.

use http::{HeaderMap, HeaderValue, StatusCode};

use super::prepared::PreparedHeaders;
use super::view::PolicyView;

/// The headers of a refusal, with the values to fill in.
#[derive(Debug)]
pub(crate) struct RefusalLayout {
    headers: HeaderMap,
    /// For each value of `headers`, in order: the index of the header that fills the value in, or `None` if
    /// the value is constant.
    slots: Vec<Option<usize>>,
}

impl PreparedHeaders {
    /// Lays out the headers of refusals with this status: first `headers`, and then the headers that
    /// report quotas. No header name may occur in both parts. Returns `None` for redirects, which get
    /// fewer headers.
    pub(crate) fn lay_out_refusal(&self, mut headers: HeaderMap, status: StatusCode) -> Option<RefusalLayout> {
        if status.is_redirection() {
            return None;
        }
        for header in &self.headers {
            headers.try_insert(&header.name, HeaderValue::from_static("")).ok()?;
        }
        let slots = headers.keys().map(|name| self.headers.iter().position(|header| header.name == *name)).collect();
        Some(RefusalLayout { headers, slots })
    }

    /// Returns the headers of one refusal. The result equals the headers that are rendered without a
    /// layout. Returns `None` if a header of the layout has nothing to report.
    pub(crate) fn fill(&self, layout: &RefusalLayout, views: &[PolicyView<'_>], seed: u64) -> Option<HeaderMap> {
        let mut headers = layout.headers.clone();
        for (value, slot) in headers.values_mut().zip(&layout.slots) {
            if let Some(index) = *slot {
                let header = self.headers.get(index)?;
                *value = self.value(header, &self.formats.get(header.format)?.reported(views), seed)?;
            }
        }
        Some(headers)
    }
}
