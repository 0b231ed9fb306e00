//! The service: decides in `call`, so that an allowed request costs no allocation and no clone.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response};
use tower_service::Service;

use super::body::Body;
use super::bound::Asked;
use super::charging::Shared;
use super::decided::{Asking, Charges, Decided, Owing, OwnedCharge};
use super::future::{InFlight, ResponseFuture};
use super::modes::kind_of_unkeyed;
use super::overflow::{NoOverflow, Overflow};
use super::switch::Live;
use crate::decision::ChargeDecision;
use crate::limiter::{Limiter, Reply};
use crate::mode::Mode;
use crate::outcome::OutcomeKind;

/// A service with limited rates, made by a [`RateLimitLayer`](super::RateLimitLayer).
///
/// * Its readiness is the inner service's own, and the inner service that was made ready is the one that is called. A
///   request that is refused gives that readiness back, as what a concurrency limit inside had set aside for it.
/// * Its errors are the inner service's own. A refusal is a response.
/// * A request is charged in `call`, or, if the limiter answers later, while its future is polled. Once the inner service
///   was called, the charge is kept, also if the future is dropped before it was polled. What a rule settles after the
///   response is settled once: by its head, or when its body has ended or was dropped.
pub struct RateLimit<S, L, O = NoOverflow> {
    inner: S,
    shared: Arc<Shared<L>>,
    /// Where the configuration is found that is in force, if quotas follow switches.
    live: Option<Arc<Live<L>>>,
    overflow: O,
}

impl<S, L, O> RateLimit<S, L, O> {
    pub(super) fn of(inner: S, shared: Arc<Shared<L>>, live: Option<Arc<Live<L>>>, overflow: O) -> Self {
        Self { inner, shared, live, overflow }
    }

    /// The inner service.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    /// The inner service, by mutable reference.
    pub fn inner_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// The inner service, without its limit.
    #[must_use]
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S, L, O> RateLimit<S, L, O> {
    /// A request whose limiter is to be asked, if it is.
    #[inline(never)]
    fn answer<B>(&mut self, request: Request<B>, asking: &mut Asking) -> ResponseFuture<S, L, B, O>
    where
        S: Service<Request<B>> + Clone,
        L: Limiter,
        O: Overflow<S, B>,
    {
        let charges = match asking {
            Asking::Charges(charges) => charges,
            Asking::Exempt => return self.go_on(request, Decided::without_charges(OutcomeKind::Exempt)),
            Asking::Unkeyed(mode) => return self.go_on(request, Decided::without_charges(kind_of_unkeyed(*mode))),
            Asking::Denied => return self.go_on(request, Decided::without_charges(OutcomeKind::Denied)),
        };
        if let Some(decided) = self.shared.decide_unsupported(charges) {
            return self.go_on(request, decided);
        }
        let mut reply = self.shared.take(charges);
        match reply {
            Reply::Now(ref mut answer) => {
                let decided = self.shared.decide(charges, answer);
                self.go_on(request, decided)
            }
            Reply::Later(answer) => {
                let next = self.inner.clone();
                let ready = std::mem::replace(&mut self.inner, next);
                let asked = InFlight { charges: charges.take(), ready, request, overflow: self.overflow.clone() };
                ResponseFuture::deciding(answer, asked, Arc::clone(&self.shared))
            }
        }
    }

    /// A request that was decided.
    #[inline(always)]
    fn go_on<B>(&mut self, request: Request<B>, mut decided: Decided) -> ResponseFuture<S, L, B, O>
    where
        S: Service<Request<B>> + Clone,
        L: Limiter,
        O: Overflow<S, B>,
    {
        if let Some(place) = self.shared.place_to_wait(&mut decided) {
            // What is ready is let go, for others.
            self.inner = self.inner.clone();
            let delayed = self.shared.delay(self.inner.clone(), request, decided, place);
            ResponseFuture::delayed(delayed, Arc::clone(&self.shared))
        } else if decided.passes() {
            let (response, copies) = self.shared.pass(&mut self.inner, request, &mut decided);
            ResponseFuture::passing(response, decided, copies, Arc::clone(&self.shared))
        } else {
            let (parts, body) = request.into_parts();
            self.turn_away(parts, body, decided)
        }
    }

    /// A request that does not pass.
    #[inline(always)]
    fn turn_away<B>(&mut self, parts: Parts, body: B, decided: Decided) -> ResponseFuture<S, L, B, O>
    where
        S: Service<Request<B>> + Clone,
        L: Limiter,
        O: Overflow<S, B>,
    {
        // The service that is ready holds what it set aside for this request (a permit, say) until it is dropped.
        self.inner = self.inner.clone();
        // Nobody waits for an overflow that is not ready.
        let mut cx = Context::from_waker(Waker::noop());
        let turned_away = self.shared.turn_away(parts, body, decided, &self.overflow, &mut cx);
        ResponseFuture::turned_away(turned_away, Arc::clone(&self.shared))
    }

    /// One charge that was denied at once. Apart, so that the usual request is not moved for it.
    #[inline(never)]
    fn refuse_one<B>(
        &mut self,
        parts: Parts,
        body: B,
        charge: OwnedCharge,
        decision: ChargeDecision,
    ) -> ResponseFuture<S, L, B, O>
    where
        S: Service<Request<B>> + Clone,
        L: Limiter,
        O: Overflow<S, B>,
    {
        self.turn_away(parts, body, Decided::one(false, charge, decision))
    }
}

impl<S, L, B, C, O> Service<Request<B>> for RateLimit<S, L, O>
where
    S: Service<Request<B>, Response = Response<C>> + Clone,
    L: Limiter,
    C: http_body::Body,
    C::Data: From<Bytes>,
    O: Overflow<S, B>,
{
    type Response = Response<Body<C>>;
    type Error = S::Error;
    type Future = ResponseFuture<S, L, B, O>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        if !self.shared.is_direct {
            if let Some(live) = &self.live {
                live.catch_up(&mut self.shared);
            }
            if !self.shared.settings.enabled {
                return ResponseFuture::untouched(self.inner.call(request), Arc::clone(&self.shared));
            }
        }
        let (parts, body) = request.into_parts();
        // The usual case in straight-line code, so that what was decided is written once.
        let mut asking = if let Some((rule, policy)) = self.shared.usual() {
            match rule.ask(&parts) {
                Asked::Charge { key, cost } => match self.shared.limiter.take_at_once(policy, &key, cost) {
                    Some(decision) if decision.is_allowed() => {
                        let response = self.inner.call(Request::from_parts(parts, body));
                        let decided = Decided::one(true, OwnedCharge::usual(key, cost), decision);
                        return ResponseFuture::passing(response, decided, None, Arc::clone(&self.shared));
                    }
                    Some(decision) => return self.refuse_one(parts, body, OwnedCharge::usual(key, cost), decision),
                    None => Asking::Charges(Charges::One(OwnedCharge::usual(key, cost))),
                },
                Asked::Nothing | Asked::Exempt => Asking::Exempt,
                Asked::Key => Asking::Unkeyed(Mode::Enforce),
            }
        } else if self.shared.is_quiet() {
            let mut owed = Owing::new();
            match self.shared.take_quietly(&parts, &mut owed) {
                None => {
                    let response = self.inner.call(Request::from_parts(parts, body));
                    return ResponseFuture::passing(response, Decided::owing(owed), None, Arc::clone(&self.shared));
                }
                Some(asking) => asking,
            }
        } else {
            self.shared.ask(&parts)
        };
        self.answer(Request::from_parts(parts, body), &mut asking)
    }
}

/// The limited service is served under the name of the service within.
#[cfg(feature = "tonic")]
impl<S: tonic::server::NamedService, L, O> tonic::server::NamedService for RateLimit<S, L, O> {
    const NAME: &'static str = S::NAME;
}

impl<S: Clone, L, O: Clone> Clone for RateLimit<S, L, O> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            shared: Arc::clone(&self.shared),
            live: self.live.clone(),
            overflow: self.overflow.clone(),
        }
    }
}

impl<S: fmt::Debug, L, O> fmt::Debug for RateLimit<S, L, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimit")
            .field("inner", &self.inner)
            .field("rules", &self.shared.settings.rules)
            .finish_non_exhaustive()
    }
}
