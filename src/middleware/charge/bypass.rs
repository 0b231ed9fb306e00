//! Requests whose fate is known before any rule is asked: by an access list, or as a CORS preflight request.

use http::request::Parts;
use http::{Method, header};

use super::access::{self, Access};
use crate::middleware::compiled::Compiled;
use crate::outcome::OutcomeKind;

/// Returns what becomes of a request whatever the rules say.
#[inline]
pub(super) fn kind<L>(layer: &Compiled<L>, parts: &Parts) -> Option<OutcomeKind> {
    if layer.diagnostics.is_watching() || layer.settings.exempt_preflight || !layer.settings.access.is_empty() {
        bypassed(layer, parts)
    } else {
        None
    }
}

#[inline(never)]
fn bypassed<L>(layer: &Compiled<L>, parts: &Parts) -> Option<OutcomeKind> {
    let (diagnostics, settings) = (&layer.diagnostics, &layer.settings);
    let looks = diagnostics.looks();
    if looks {
        diagnostics.look_at_request(settings, parts);
    }
    let looks_for_keys = diagnostics.looks_for_keys();
    let looked_up = |at, has_key| {
        if looks_for_keys {
            diagnostics.look_at_list(at, has_key);
        }
    };
    match access::ask(&settings.access, parts, looked_up) {
        Some((Access::Allow, list)) => {
            if looks {
                diagnostics.look_for_allowed_proxy(list, parts);
            }
            Some(OutcomeKind::Exempt)
        }
        Some((Access::Deny, _)) => Some(OutcomeKind::Denied),
        Some((Access::Limit, _)) | None => {
            (settings.exempt_preflight && is_preflight(parts)).then_some(OutcomeKind::Exempt)
        }
    }
}

/// Whether it is a CORS preflight request, as the Fetch standard (section 3.2.2) has browsers send it.
fn is_preflight(parts: &Parts) -> bool {
    parts.method == Method::OPTIONS
        && parts.headers.contains_key(header::ORIGIN)
        && parts.headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
}
