//! A setup warning of a layer without an observer is a warning of `tracing`.
//!
//! A binary of its own, because the feature changes what every other test of setup warnings sees,
//! and because the subscriber is set for the whole process.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use axum::body::Body;
use http::{Request, Response};
use tower::{Layer, ServiceExt, service_fn};
use tower_ratelimit::observe::{Observer, SetupWarning};
use tower_ratelimit::{MemoryLimiter, Policy, Quota, RateLimitLayer, key};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// The warnings that the subscriber got.
#[derive(Clone, Default)]
struct Events(Arc<Mutex<Vec<String>>>);

struct Written(String);

impl Visit for Written {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0 += &format!("{field}={value:?};");
    }
}

impl Subscriber for Events {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "tower_ratelimit" && *metadata.level() == Level::WARN
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        let mut written = Written(String::new());
        event.record(&mut written);
        self.0.lock().unwrap().push(written.0);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

struct Silent;

impl Observer for Silent {
    fn on_setup_warning(&self, _: &SetupWarning) {}
}

/// A layer whose every request costs more than its quota ever allows.
fn never_passes(name: &str) -> RateLimitLayer<MemoryLimiter> {
    let policy = Policy::new(name, Quota::per_hour(9)).unwrap();
    RateLimitLayer::new(MemoryLimiter::new(), policy.cost(|_| 10), key::global())
}

async fn serve(layer: &RateLimitLayer<MemoryLimiter>, requests: u32) {
    let answer = service_fn(async |_: Request<()>| Ok::<_, Infallible>(Response::new(Body::empty())));
    for _ in 0..requests {
        layer.layer(answer).oneshot(Request::new(())).await.unwrap();
    }
}

#[tokio::test]
async fn setup_warning_without_observer_goes_to_tracing() {
    let events = Events::default();
    tracing::subscriber::set_global_default(events.clone()).unwrap();
    serve(&never_passes("traced"), 5).await;
    serve(&never_passes("observed").observer(Silent), 1).await;
    let events = events.0.lock().unwrap();
    let of = |policy: &'static str| events.iter().filter(move |event| event.contains(policy)).collect::<Vec<_>>();
    assert_eq!(of("\"observed\"").len(), 0);
    let [event] = of("\"traced\"")[..] else { panic!("{events:?}") };
    assert!(event.contains("kind=\"never-passes\";") && event.contains("message=a request cost 10 units"), "{event}");
}
