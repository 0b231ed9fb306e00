//! Nested layers over Redis are independent, and an outer layer that refunds is refunded exactly.

use std::convert::Infallible;
use std::future::{Future, pending};
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use axum::body::Body;
use http::{HeaderValue, Request, Response};
use proptest::prelude::*;
use tower::{Service, ServiceBuilder, ServiceExt, layer::layer_fn, service_fn};
use tower_ratelimit::{
    Key, Quota, RateLimitLayer, RedisLimiter,
    clock::{ManualClock, Timestamp},
    key,
    limiter::{Charge, Limiter},
};

use super::policy;
use crate::support::redis_server::Server;
use crate::support::{config, every_algorithm, refuses_dear};

type Answer = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;
type Boxed = tower::util::BoxCloneService<Request<String>, Response<Body>, Infallible>;

const DAY: Duration = Duration::from_secs(86_400);

const LAYERS: [&str; 4] = ["", "outer", "middle", "inner"];

/// An act of the handler, in the request's extensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Answer,
    /// The response never comes.
    Linger,
    Panic,
}

fn act(request: &Request<String>) -> Act {
    request.extensions().get().copied().unwrap_or(Act::Answer)
}

/// Middleware that builds another response of the same status.
fn between<S, B>(inner: S) -> Boxed
where
    S: Service<Request<String>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
    B: Send + 'static,
{
    let rebuild = |response: Response<B>| {
        let mut answer = Response::new(Body::empty());
        *answer.status_mut() = response.status();
        answer
    };
    ServiceExt::<Request<String>>::boxed_clone(inner.map_response(rebuild))
}

/// Counts the requests that reach it, and does what they say.
fn handler(reached: Arc<AtomicU64>) -> Boxed {
    ServiceExt::<Request<String>>::boxed_clone(service_fn(move |request: Request<String>| -> Answer {
        let (reached, act) = (Arc::clone(&reached), act(&request));
        Box::pin(async move {
            reached.fetch_add(1, Ordering::Relaxed);
            match act {
                Act::Linger => pending().await,
                Act::Panic => resume_unwind(Box::new("the handler panics")),
                Act::Answer => Ok(Response::new(Body::empty())),
            }
        })
    }))
}

/// Serves a request. If the handler neither answers nor panics, the client disconnects.
async fn serve(stack: &Boxed, request: Request<String>, reached: &AtomicU64) {
    let before = reached.load(Ordering::Relaxed);
    let lingers = act(&request) == Act::Linger;
    let mut response = pin!(stack.clone().oneshot(request));
    std::future::poll_fn(|context| {
        let polled = std::panic::catch_unwind(AssertUnwindSafe(|| response.as_mut().poll(context).is_ready()));
        let is_over = polled.unwrap_or(true) || (lingers && reached.load(Ordering::Relaxed) > before);
        if is_over { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

async fn used(limiter: &RedisLimiter, name: &str, quota: Quota) -> u64 {
    let (policy, key) = (policy(name, quota), Key::global());
    let looked = limiter.peek(&[Charge::new(&policy, &key).cost(0)]).await.unwrap();
    quota.capacity() - looked.charges()[0].remaining()
}

#[test]
fn sum_of_charges_on_redis_is_what_each_layer_keeps() {
    let server = Server::start();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let number = AtomicU64::new(0);
    let act = prop_oneof![2 => Just(Act::Answer), 1 => Just(Act::Linger), 1 => Just(Act::Panic)];
    let fates = proptest::collection::vec((0..LAYERS.len(), act), 1..40);
    proptest!(config(36), |(quota in prop::sample::select(every_algorithm(5_000, DAY)), refunds in any::<[bool; 3]>(), fates in fates)| {
        let (charged, expected) = runtime.block_on(async {
            let number = number.fetch_add(1, Ordering::Relaxed);
            let clock = ManualClock::at(Timestamp::from_micros(1_800_000_000_000_000));
            let builder = super::patient().prefix(format!("case-{number}")).clock(clock);
            let limiter = super::connected(builder, &server.url()).await;
            let reached = Arc::new(AtomicU64::new(0));
            let limit = |layer: usize| {
                let rule = refuses_dear(LAYERS[layer + 1], quota);
                RateLimitLayer::new(limiter.clone(), rule, key::global()).refund_nested(refunds[layer])
            };
            let stack = ServiceBuilder::new()
                .layer(layer_fn(between))
                .layer(limit(0))
                .layer(layer_fn(between))
                .layer(limit(1))
                .layer(layer_fn(between))
                .layer(limit(2))
                .service(handler(Arc::clone(&reached)));
            let mut expected = [0; 3];
            for (refused_by, act) in fates {
                let mut request = Request::new(String::new());
                request.headers_mut().insert("dear", HeaderValue::from_static(LAYERS[refused_by]));
                request.extensions_mut().insert(act);
                serve(&stack, request, &reached).await;
                for (layer, expected) in expected.iter_mut().enumerate() {
                    // The request passes the layers outside of the one that refuses it.
                    let passes = refused_by == 0 || layer + 1 < refused_by;
                    *expected += u64::from(passes && !(refunds[layer] && refused_by > 0));
                }
            }
            let mut charged = [0; 3];
            for (charged, name) in charged.iter_mut().zip(&LAYERS[1..]) {
                *charged = used(&limiter, name, quota).await;
            }
            limiter.close();
            (charged, expected)
        });
        prop_assert_eq!(charged, expected, "{}, refunds: {:?}", quota, refunds);
    });
}
