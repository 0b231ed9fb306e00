//! The response to a request: the service's own with headers added, or a refusal.

use std::hash::BuildHasher;

use http::header::{CACHE_CONTROL, Entry};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Response};
use smallvec::SmallVec;

use super::headers::{PolicyView, Rendered};
use crate::clock::wall_now;
use crate::middleware::body::RefusalBody;
use crate::middleware::compiled::Compiled;
use crate::middleware::decide::linked;
use crate::middleware::settle::nested::NestedToken;
use crate::middleware::ticket::Ticket;
use crate::mode::Mode;
use crate::outcome::{Outcome, OutcomeKind};

impl Ticket {
    /// Renders the headers of the service's response. Returns `None` if it gets none.
    #[inline]
    pub(crate) fn render<L>(&self, layer: &Compiled<L>) -> Option<Rendered> {
        if !self.is_answered || layer.headers.is_silent_if_passed {
            return None;
        }
        self.with_views(layer, false, |views| layer.headers.render_passed(views))
    }

    /// Adds to the service's response what the layer reports.
    pub(crate) fn finish<L, B>(&self, layer: &Compiled<L>, response: &mut Response<B>) {
        if let Some(mut rendered) = self.render(layer) {
            let status = response.status();
            layer.headers.add(&mut rendered, response.headers_mut(), status);
        }
        if self.kind == OutcomeKind::Degraded {
            store_only_if_allowed(response.headers_mut());
        }
        if layer.settings.expose_outcome || self.kind.is_always_exposed() {
            self.expose(layer, response);
        }
    }

    /// Adds to the overflow's response what a refusal reports.
    pub(crate) fn finish_overflow<L, B>(&self, layer: &Compiled<L>, response: &mut Response<B>) {
        store_only_if_allowed(response.headers_mut());
        self.write_headers(layer, response, Some(self.seed(layer)));
        // A limit within the overflow may have refused the request in turn.
        let is_refused = response.extensions().get().is_some_and(|inner: &Outcome| !inner.kind().passed());
        if !is_refused {
            response.extensions_mut().insert(self.outcome(layer));
        }
    }

    /// Puts the outcome into the response's extensions, unless an inner layer refused the request or an outcome there
    /// says more.
    #[cold]
    fn expose<L, B>(&self, layer: &Compiled<L>, response: &mut Response<B>) {
        let inner = response.extensions().get().map(Outcome::kind);
        let is_refused = inner.is_some_and(|inner| !inner.passed());
        let says_more = inner.is_some_and(OutcomeKind::is_always_exposed) && !self.kind.is_always_exposed();
        if !is_refused && !says_more {
            response.extensions_mut().insert(self.outcome(layer));
        }
    }

    /// Returns the response to a request that does not pass.
    #[cold]
    pub(crate) fn refuse<L>(&self, layer: &Compiled<L>, parts: &mut Parts) -> Response<RefusalBody> {
        NestedToken::spend(&mut parts.extensions, self.kind);
        let outcome = self.outcome(layer);
        self.observe(layer, parts, &outcome);
        if outcome.is_never() {
            layer.diagnostics.look_for_never(&layer.settings, &outcome);
        }
        let mut response = self.refusal(layer, parts, &outcome);
        if response.extensions().is_empty() {
            // The memory of the request's extensions serves the response.
            parts.extensions.clear();
            *response.extensions_mut() = std::mem::take(&mut parts.extensions);
        }
        response.extensions_mut().insert(outcome);
        response
    }

    fn refusal<L>(&self, layer: &Compiled<L>, parts: &Parts, outcome: &Outcome) -> Response<RefusalBody> {
        let seed = self.seed(layer);
        let laid_out = || {
            let layout = layer.layout.as_ref()?;
            self.with_views(layer, true, |views| layer.headers.fill(layout, views, seed, &wall_now))
        };
        if let Some(response) = layer.refusals.usual(parts, outcome, laid_out) {
            return response;
        }
        let wait = layer.headers.reported_wait(outcome, seed);
        let mut response = layer.refusals.respond(parts, outcome, wait);
        self.write_headers(layer, &mut response, Some(seed));
        response
    }

    /// Writes the headers of the layer. `refusal_seed` is the seed of a refusal's jitter; other responses have none.
    fn write_headers<L, B>(&self, layer: &Compiled<L>, response: &mut Response<B>, refusal_seed: Option<u64>) {
        if self.answered().is_empty() {
            return;
        }
        let (status, is_refusal, seed) = (response.status(), refusal_seed.is_some(), refusal_seed.unwrap_or(0));
        let write = |views: &[PolicyView<'_>]| {
            layer.headers.write(response.headers_mut(), views, status, is_refusal, seed, &wall_now);
        };
        self.with_views(layer, is_refusal, write);
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
            let policy = layer.policy(charged.policy)?;
            Some(PolicyView { policy, key: &charged.key, decision, refuses: is_refusal && refuses })
        };
        match charges.len() {
            // Without a vector: the usual request has one charge.
            1 => then(visible(0).as_slice()),
            count => then(&(0..count).filter_map(visible).collect::<SmallVec<[PolicyView<'_>; 4]>>()),
        }
    }

    /// Returns the seed of a refusal's jitter. It is equal for all refusals of a key, so that a client cannot draw again.
    fn seed<L>(&self, layer: &Compiled<L>) -> u64 {
        if !layer.headers.is_jittered() {
            return 0;
        }
        let hash = foldhash::fast::FixedState::default();
        self.answered().first().map_or(0, |charged| hash.hash_one(&charged.key))
    }
}

/// Forbids caches to store a response that stands in for the usual one, unless the service has set `Cache-Control`: a
/// client within its quota must not get it.
fn store_only_if_allowed(headers: &mut HeaderMap) {
    if let Ok(Entry::Vacant(vacant)) = headers.try_entry(CACHE_CONTROL) {
        let _ = vacant.try_insert(HeaderValue::from_static("no-store"));
    }
}
