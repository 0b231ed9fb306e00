//! What users may rely on besides behaviour: where a type can be kept, sent and shown.

use std::error::Error;
use std::fmt::Debug;
use std::hash::Hash;

use tower::{Layer, Service, ServiceBuilder};
use tower_ratelimit::key::{self, PeerAddr, Prefixes, PrefixesError, TrustedProxies, TrustedProxiesError};
use tower_ratelimit::limiter::memory::{MemoryLimiterBuilder, MemoryLimiterError, MemoryLimiterErrorKind, OnFull};
use tower_ratelimit::middleware::{Body, OverflowTo, ResponseFuture};
use tower_ratelimit::{
    Algorithm, Anchor, Atomicity, BoxLimiter, Charge, ChargeDecision, Clock, Decision, Effect, GrpcCode, Headers,
    HeadersError, Jitter, Key, LegacyHeaders, Limiter, LimiterError, LimiterEvent, ManualClock, MemoryLimiter,
    MissingKey, Mode, ModeSwitch, MonotonicClock, Observer, Oldest, OnError, Outcome, OutcomeKind, Policy, PolicyError,
    Protocol, Quota, QuotaError, QuotaErrorKind, RateLimit, RateLimitLayer, Receipt, Refund, Refusal, Refusals, Reply,
    ReplyFuture, ResetEncoding, ResetMeaning, Rule, Standing, Timestamp, UnsupportedQuota, UnsupportedQuotaKind, When,
};

fn shared<T: Send + Sync + Unpin + Debug>() {}
fn kept<T: Send + Sync + Unpin + Debug + 'static>() {}
fn cloned<T: Clone + Send + Sync + Unpin + Debug + 'static>() {}
fn value<T: Copy + Eq + Hash + Send + Sync + Unpin + Debug + 'static>() {}
fn error<T: Error + Send + Sync + Unpin + 'static>() {}

type Inner = axum::Router;

#[test]
fn every_type_can_be_kept_sent_and_shown() {
    cloned::<RateLimitLayer<MemoryLimiter>>();
    cloned::<RateLimitLayer<BoxLimiter>>();
    cloned::<RateLimit<Inner, MemoryLimiter>>();
    cloned::<RateLimitLayer<MemoryLimiter, OverflowTo<Inner>>>();
    cloned::<RateLimit<Inner, MemoryLimiter, OverflowTo<Inner>>>();
    cloned::<ModeSwitch>();
    cloned::<MemoryLimiter>();
    cloned::<BoxLimiter>();
    cloned::<Key>();
    cloned::<Policy>();
    cloned::<Rule>();
    cloned::<Headers>();
    cloned::<LegacyHeaders>();
    cloned::<Refusals>();
    cloned::<TrustedProxies>();
    cloned::<Outcome>();
    cloned::<Standing>();
    cloned::<ChargeDecision>();
    cloned::<MonotonicClock>();
    cloned::<ManualClock>();
    kept::<MemoryLimiterBuilder>();
    kept::<Decision>();
    kept::<Receipt>();
    kept::<Refund>();
    kept::<Reply<Decision, LimiterError, std::future::Ready<Result<Decision, LimiterError>>>>();
    kept::<ReplyFuture<Decision, LimiterError, std::future::Ready<Result<Decision, LimiterError>>>>();
    shared::<Charge<'_>>();
    shared::<Refusal<'_>>();
    #[cfg(feature = "fast-clock")]
    kept::<tower_ratelimit::FastClock>();
}

#[test]
fn settings_and_names_are_values() {
    cloned::<Quota>();
    value::<Algorithm>();
    value::<Anchor>();
    value::<Oldest>();
    value::<Timestamp>();
    value::<QuotaErrorKind>();
    value::<Effect>();
    value::<Atomicity>();
    value::<UnsupportedQuotaKind>();
    value::<OnFull>();
    value::<MemoryLimiterErrorKind>();
    value::<MissingKey>();
    value::<Mode>();
    value::<OnError>();
    value::<OutcomeKind>();
    value::<When>();
    value::<ResetEncoding>();
    value::<ResetMeaning>();
    value::<GrpcCode>();
    value::<Protocol>();
    value::<Prefixes>();
    value::<PeerAddr>();
    cloned::<Jitter>();
}

#[test]
fn errors_cross_threads_and_name_their_case() {
    error::<QuotaError>();
    error::<PolicyError>();
    error::<LimiterError>();
    error::<UnsupportedQuota>();
    error::<MemoryLimiterError>();
    error::<HeadersError>();
    error::<PrefixesError>();
    error::<TrustedProxiesError>();
    assert_eq!("100 per nothing".parse::<Quota>().unwrap_err().to_string().lines().count(), 1);
    let none = MemoryLimiter::builder().capacity(0).build().unwrap_err();
    assert_eq!(none.kind(), MemoryLimiterErrorKind::Capacity);
}

#[test]
fn what_users_implement_can_be_boxed() {
    kept::<Box<dyn Clock>>();
    fn observers(_: Option<Box<dyn Observer>>) {}
    fn events(_: Option<&LimiterEvent>) {}
    observers(None);
    events(None);
}

/// The layer's future and body are as free as those of the service inside.
#[test]
fn futures_and_bodies_can_move_between_threads() {
    fn sent<T: Send>() {}
    sent::<ResponseFuture<Inner, MemoryLimiter, axum::body::Body>>();
    sent::<ResponseFuture<Inner, MemoryLimiter, axum::body::Body, OverflowTo<Inner>>>();
    sent::<Body<axum::body::Body>>();
}

struct Application<L> {
    layer: RateLimitLayer<L>,
    service: RateLimit<Inner, L>,
}

fn layer<L: Limiter + Clone>(limiter: L) -> RateLimitLayer<L> {
    RateLimitLayer::new(limiter, Quota::per_second(5), key::header("x-api-key"))
}

/// A service that hides what is inside.
fn erased(
    layer: &RateLimitLayer<MemoryLimiter>,
) -> impl Service<http::Request<axum::body::Body>, Error = std::convert::Infallible> + Clone + Send + Sync + 'static + use<>
{
    ServiceBuilder::new().layer(layer.clone()).service(Inner::new())
}

#[test]
fn the_layer_and_its_service_can_be_named_in_fields_and_returned() {
    let layer = layer(MemoryLimiter::new());
    let service = layer.layer(Inner::new());
    let application = Application { layer, service };
    let _ = (erased(&application.layer), application.service.clone());
}
