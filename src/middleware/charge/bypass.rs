//! Requests that are decided before any rule is asked: by an access list, or as a CORS preflight request.

use http::{Method, header};

use super::access::{self, Access, BoundList};
use crate::base::head::Head;
use crate::key::{AddressSource, Key};
use crate::middleware::compiled::Compiled;
use crate::middleware::decide::kind::OutcomeCause;
use crate::middleware::settings::Settings;

/// Returns the reason if no rule is asked about a request.
#[inline]
pub(super) fn cause<L>(layer: &Compiled<L>, head: &Head<'_>) -> Option<OutcomeCause> {
    if layer.diagnostics.is_watching() || layer.settings.exempt_preflight || !layer.settings.access.is_empty() {
        bypassed(layer, head)
    } else {
        None
    }
}

#[inline(never)]
fn bypassed<L>(layer: &Compiled<L>, head: &Head<'_>) -> Option<OutcomeCause> {
    let (diagnostics, settings) = (&layer.diagnostics, &layer.settings);
    let looks = diagnostics.looks();
    if looks {
        diagnostics.look_at_request(settings, head);
    }
    let looks_for_keys = diagnostics.looks_for_keys();
    let looked_up = |at, by, key: Option<&Key>| {
        if looks_for_keys {
            diagnostics.look_at_list(at, by, key);
        }
    };
    let bypass = Bypass::of(settings, head, looked_up)?;
    if let (Bypass::Allowed(list), true) = (&bypass, looks) {
        diagnostics.look_for_allowed_proxy(list, head);
    }
    Some(bypass.cause())
}

/// The reason why no rule is asked about a request.
pub(super) enum Bypass<'a> {
    Allowed(&'a BoundList),
    Denied,
    Preflight,
}

impl<'a> Bypass<'a> {
    /// Returns the reason why no rule is asked about a request, if there is one. `looked_up` gets the index of
    /// each access list that was asked, and the key for that list.
    pub(super) fn of(
        settings: &'a Settings,
        head: &Head<'_>,
        looked_up: impl Fn(usize, AddressSource, Option<&Key>),
    ) -> Option<Self> {
        match access::ask(&settings.access, head, looked_up) {
            Some((Access::Allow, list)) => Some(Self::Allowed(list)),
            Some((Access::Deny, _)) => Some(Self::Denied),
            Some((Access::Limit, _)) | None => {
                (settings.exempt_preflight && is_preflight(head)).then_some(Self::Preflight)
            }
        }
    }

    pub(super) fn cause(&self) -> OutcomeCause {
        match self {
            Self::Allowed(_) | Self::Preflight => OutcomeCause::Exempted,
            Self::Denied => OutcomeCause::Denied,
        }
    }
}

/// Returns whether a request is a CORS preflight request, as browsers send it according to the Fetch standard
/// (section 3.2.2).
fn is_preflight(head: &Head<'_>) -> bool {
    head.method == Method::OPTIONS
        && head.headers.contains_key(header::ORIGIN)
        && head.headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
}
