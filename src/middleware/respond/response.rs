//! The response to a request: the service's response with headers added, or a refusal.

use std::hash::BuildHasher;

use http::header::{CACHE_CONTROL, Entry};
use http::request::Parts;
use http::{Extensions, HeaderMap, HeaderValue, Response, StatusCode, response};
use smallvec::SmallVec;

use crate::base::head::Head;
use crate::headers::{DueHeaders, PolicyView, keep_one_of_each};
use crate::limiter::Limiter;
use crate::middleware::compiled::Compiled;
use crate::middleware::decide::linked;
use crate::middleware::settle::nested::NestedToken;
use crate::middleware::ticket::Ticket;
use crate::mode::Mode;
use crate::outcome::{Outcome, OutcomeKind};
use crate::refusal::RefusalBody;

impl Ticket {
    /// Returns the headers of the service's response, or `None` if the response gets no headers.
    #[inline]
    pub(crate) fn due_headers<L>(&self, layer: &Compiled<L>) -> Option<DueHeaders> {
        let has_headers = self.is_answered && !layer.responses.headers.is_silent_if_passed;
        if has_headers { self.headers_if_passed(layer) } else { None }
    }

    #[inline(never)]
    fn headers_if_passed<L>(&self, layer: &Compiled<L>) -> Option<DueHeaders> {
        self.with_views(layer, false, |views| layer.responses.headers.due(views))
    }

    /// Adds the layer's headers, and its outcome if the layer exposes it, to the service's
    /// response.
    pub(crate) fn finish<L>(&self, layer: &Compiled<L>, response: &mut response::Parts) {
        self.add_headers(layer, &mut response.headers, response.status);
        if layer.settings.expose_outcome || self.kind.is_always_exposed() {
            self.expose(layer, &mut response.extensions);
        }
    }

    /// Adds the headers of a response to a request that passes.
    pub(crate) fn add_headers<L>(&self, layer: &Compiled<L>, headers: &mut HeaderMap, status: StatusCode) {
        if let Some(mut due) = self.due_headers(layer) {
            layer.responses.headers.add_due(&mut due, &layer.policies, headers, status);
        }
        if self.kind == OutcomeKind::Degraded {
            store_only_if_allowed(headers);
        }
    }

    /// Adds the headers and the outcome of a refusal to the overflow's response.
    pub(crate) fn finish_overflow<L, B>(&self, layer: &Compiled<L>, response: &mut Response<B>) {
        store_only_if_allowed(response.headers_mut());
        self.add_refusal_headers(layer, self.seed(layer), response);
        // The overflow service may have a limit of its own, which refused the request.
        let is_refused = response.extensions().get().is_some_and(|inner: &Outcome| !inner.kind().passed());
        if !is_refused {
            response.extensions_mut().insert(self.outcome(layer));
        }
    }

    /// Puts the outcome into the response's extensions, unless an inner layer refused the request, or left an
    /// outcome that is always exposed when this outcome is not.
    #[cold]
    fn expose<L>(&self, layer: &Compiled<L>, response: &mut Extensions) {
        let inner = response.get().map(Outcome::kind);
        let is_refused = inner.is_some_and(|inner| !inner.passed());
        let says_more = inner.is_some_and(OutcomeKind::is_always_exposed) && !self.kind.is_always_exposed();
        if !is_refused && !says_more {
            response.insert(self.outcome(layer));
        }
    }

    /// Returns the response to a request that does not pass. `into_body` converts the response's
    /// body.
    #[cold]
    pub(crate) fn refuse<L: Limiter, B>(
        &self,
        layer: &Compiled<L>,
        parts: &mut Parts,
        into_body: fn(RefusalBody) -> B,
    ) -> Response<B> {
        NestedToken::spend(&mut parts.extensions, self.kind);
        let outcome = self.outcome(layer);
        self.observe(layer, &Head::from(&*parts), &outcome);
        if layer.diagnostics.looks() {
            self.look_for_double_charge(layer, &mut parts.extensions);
            self.look_for_never(layer);
        }
        let seed = self.seed(layer);
        let mut response = match self.usual_headers(layer, &Head::from(&*parts), &outcome, seed) {
            Some(headers) => {
                let body = layer.responses.refusals.limited_body(&outcome);
                let mut response = Response::new(into_body(RefusalBody::whole(body)));
                *response.status_mut() = layer.responses.refusals.limited_status();
                *response.headers_mut() = headers;
                response
            }
            None => {
                let wait = layer.responses.headers.reported_wait(&outcome, seed);
                let mut response =
                    layer.responses.refusals.respond(&Head::from(&*parts), &outcome, wait).map(into_body);
                self.add_refusal_headers(layer, seed, &mut response);
                if self.kind == OutcomeKind::FailedClosed {
                    layer.responses.headers.add_wait(wait, response.headers_mut());
                }
                response
            }
        };
        if response.extensions().is_empty() {
            // The response reuses the emptied map of the request's extensions, which saves an allocation.
            parts.extensions.clear();
            *response.extensions_mut() = std::mem::take(&mut parts.extensions);
        }
        response.extensions_mut().insert(outcome);
        response
    }

    /// Returns all headers of a usual refusal, or `None` if the refusal is unusual.
    fn usual_headers<L>(
        &self,
        layer: &Compiled<L>,
        head: &Head<'_>,
        outcome: &Outcome,
        seed: u64,
    ) -> Option<HeaderMap> {
        let layout = layer.responses.layout.as_ref().filter(|_| layer.responses.refusals.is_usual(head, outcome))?;
        self.with_views(layer, true, |views| layer.responses.headers.fill(layout, views, seed))
    }

    /// Adds the headers of a refusal to a response.
    fn add_refusal_headers<L, B>(&self, layer: &Compiled<L>, seed: u64, response: &mut Response<B>) {
        let rendered = self.with_views(layer, true, |views| layer.responses.headers.render(views, Some(seed)));
        if let Some(mut rendered) = rendered {
            let status = response.status();
            layer.responses.headers.add(&mut rendered, response.headers_mut(), status);
        }
    }

    /// Calls `then` with the status of each policy that clients see.
    #[inline]
    fn with_views<L, R>(&self, layer: &Compiled<L>, is_refusal: bool, then: impl FnOnce(&[PolicyView<'_>]) -> R) -> R {
        let charges = self.answered();
        let visible = |at: usize| {
            let charged = charges.get(at)?;
            let (refuses, decision) = linked::status(charges, at)?;
            if !decision.is_known() || charged.mode == Mode::Shadow {
                return None;
            }
            let policy = charged.policy_in(layer).filter(|policy| !policy.quota().is_unlimited())?;
            Some(PolicyView {
                index: charged.policy,
                policy,
                key: Some(&charged.key),
                decision,
                refuses: is_refusal && refuses,
            })
        };
        match charges.len() {
            // The usual request has one charge, which needs no vector.
            1 => then(visible(0).as_slice()),
            count => {
                let mut views: SmallVec<[PolicyView<'_>; 4]> = (0..count).filter_map(visible).collect();
                if layer.settings.finder().is_some() {
                    keep_one_of_each(&mut views);
                }
                then(&views)
            }
        }
    }

    /// Returns the seed of a refusal's jitter. The seed is the same for all refusals of a key, so that a client
    /// cannot get another jitter by asking again.
    fn seed<L>(&self, layer: &Compiled<L>) -> u64 {
        // After a failure of the limiter, clients get different waits, even if the waits of quotas have no jitter.
        if !layer.responses.headers.is_jittered() && self.kind != OutcomeKind::FailedClosed {
            return 0;
        }
        let hash = foldhash::fast::FixedState::default();
        self.charges.first().map_or(0, |charged| hash.hash_one(&charged.key))
    }
}

/// Forbids caches to store a response that replaces the usual response, because a client within its quota must
/// not get the replacement. A `Cache-Control` that the service has set stays.
fn store_only_if_allowed(headers: &mut HeaderMap) {
    if let Ok(Entry::Vacant(vacant)) = headers.try_entry(CACHE_CONTROL) {
        let _ = vacant.try_insert(HeaderValue::from_static("no-store"));
    }
}
