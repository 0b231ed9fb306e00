//! [`RetryAfter`]: a retry policy for Tower's retry layer.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use tower::retry::Policy;
use tower::retry::budget::{Budget, TpsBudget};

use super::Advice;
use super::obey::{Heard, WaitJitter, unnamed_wait_us};
use super::times::LONGEST_WAIT;
use crate::clock::{CalendarClock, Clock};
use crate::clock::{Sleep, Timer};

/// The default for how many times a request is retried.
const RETRIES: u32 = 3;

/// A policy for [`tower::retry`] that retries refused requests after the time that the server names.
///
/// ```
/// use http::{Request, Response};
/// use tower::{ServiceBuilder, service_fn};
/// use tower_ratelimit::{client::RetryAfter, clock::TokioTimer};
/// # let client = service_fn(|_: Request<()>| async { Ok::<_, std::convert::Infallible>(Response::new(())) });
///
/// let retrying =
///     ServiceBuilder::new().retry(RetryAfter::new(TokioTimer::new())).service(client);
/// # drop(retrying);
/// ```
///
/// * The policy retries requests whose response is 429 or 503, and gRPC calls that end with
///   `RESOURCE_EXHAUSTED` or `UNAVAILABLE` before any message. The policy does not retry after an error
///   of the service.
/// * By default the policy retries only idempotent methods: GET, HEAD, OPTIONS, TRACE, PUT and DELETE.
///   [`any_method`](Self::any_method) changes this.
/// * The request's body has to be `Clone`, such as `Full<Bytes>` or `()`. The bodies of axum, hyper and tonic are not
///   `Clone`, because they may be streams. [An example](#grpc) shows how to retry a unary call of tonic.
/// * The policy reads only the head of the response. Waits in the body, or in gRPC's trailers after
///   messages, are not read.
/// * If the server names no time, the request waits one second before the first retry, then two, and so
///   on up to 60 seconds. Each wait is lengthened by 0 to 10 percent at random.
/// * The policy gives up at once, and returns the response, if the wait is longer than
///   [`max_wait`](Self::max_wait) or the request was retried [`max_retries`](Self::max_retries) times.
///   The policy also gives up if the [budget](Self::budget) is used up, or if a gRPC server forbids a
///   retry.
///
/// An [`ObeyLayer`](super::ObeyLayer) inside the retry layer makes the other requests to the origin
/// wait too.
///
/// # gRPC
///
/// The body of a tonic client's request is not `Clone`, so collect it first. Collecting the body works for unary
/// calls, whose body is one message. A stream from the client cannot be sent again.
///
/// ```
/// # #[cfg(all(feature = "tonic", feature = "tokio"))] {
/// use bytes::Bytes;
/// use http::Request;
/// use http_body_util::{BodyExt, Full};
/// use tower::{BoxError, ServiceBuilder, ServiceExt, service_fn};
/// use tower_ratelimit::{client::RetryAfter, clock::TokioTimer};
/// # use http::Response;
/// # use tower::Service;
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), BoxError> {
/// # let mut calls = 0;
/// # let (sender, receiver) = std::sync::mpsc::channel();
/// # let channel = service_fn(move |request: Request<tonic::body::Body>| {
/// #     calls += 1;
/// #     let response = Response::builder().header("grpc-status", if calls == 1 { "8" } else { "0" });
/// #     let response = response.header("grpc-retry-pushback-ms", "1").body(tonic::body::Body::empty());
/// #     let sender = sender.clone();
/// #     async move {
/// #         sender.send(request.into_body().collect().await?.to_bytes())?;
/// #         Ok::<_, BoxError>(response?)
/// #     }
/// # });
///
/// // `channel` is a `tonic::transport::Channel`.
/// let retrying = ServiceBuilder::new()
///     .retry(RetryAfter::new(TokioTimer::new()).any_method(true))
///     .map_request(|request: Request<Full<Bytes>>| request.map(tonic::body::Body::new))
///     .service(channel);
/// let unary = service_fn(move |request: Request<tonic::body::Body>| {
///     let retrying = retrying.clone();
///     async move {
///         let (head, body) = request.into_parts();
///         let message = body.collect().await?.to_bytes();
///         retrying
///             .oneshot(Request::from_parts(head, Full::new(message)))
///             .await
///             .map_err(BoxError::from)
///     }
/// });
/// // let client = GreeterClient::new(unary);
/// # let request = Request::post("/").body(tonic::body::Body::new(Full::new(Bytes::from_static(b"message"))))?;
/// # assert_eq!(unary.oneshot(request).await?.headers()["grpc-status"], "0");
/// # assert_eq!(receiver.try_iter().collect::<Vec<_>>(), [&b"message"[..]; 2]);
/// # Ok(()) }
/// # main().unwrap();
/// # }
/// ```
#[derive(Clone)]
pub struct RetryAfter {
    timer: Arc<dyn Timer>,
    clock: Arc<dyn Clock>,
    jitter: Arc<WaitJitter>,
    budget: Arc<dyn Budget + Send + Sync>,
    max_wait: Duration,
    max_retries: u32,
    /// The retries of this request. Tower clones the policy for each request.
    retries: u32,
    any_method: bool,
}

impl RetryAfter {
    /// Makes a policy whose retries wait with `timer`.
    #[must_use]
    pub fn new(timer: impl Timer + 'static) -> Self {
        Self {
            timer: Arc::new(timer),
            clock: Arc::new(CalendarClock),
            jitter: Arc::new(WaitJitter::random()),
            budget: Arc::new(TpsBudget::default()),
            max_wait: LONGEST_WAIT,
            max_retries: RETRIES,
            retries: 0,
            any_method: false,
        }
    }

    /// Sets the longest wait before a retry, by default 5 minutes. If the server names a longer wait,
    /// the request is not retried.
    #[must_use]
    pub fn max_wait(mut self, max: Duration) -> Self {
        self.max_wait = max;
        self
    }

    /// Sets how many times a request is retried, by default 3.
    #[must_use]
    pub fn max_retries(mut self, max: u32) -> Self {
        self.max_retries = max;
        self
    }

    /// Sets the budget of retries, which all clones share. By default the budget is Tower's
    /// [`TpsBudget`], which allows one retry for every five requests of the last ten seconds, and ten
    /// more retries per second.
    #[must_use]
    pub fn budget(mut self, budget: impl Budget + Send + Sync + 'static) -> Self {
        self.budget = Arc::new(budget);
        self
    }

    /// Retries requests of every method, for servers that refuse requests before these have an effect, and for
    /// gRPC, whose calls are all POST. By default, only idempotent methods are retried. The body still has to be
    /// `Clone`: see [gRPC](Self#grpc).
    #[must_use]
    pub fn any_method(mut self, any_method: bool) -> Self {
        self.any_method = any_method;
        self
    }

    /// Sets the clock for dates in responses without `Date`: the time until such a date is measured
    /// from this clock. By default the clock shows the calendar time of the operating system.
    #[must_use]
    pub fn clock(mut self, clock: impl Clock + 'static) -> Self {
        self.clock = Arc::new(clock);
        self
    }

    /// Sets the seed of the random part of waits, for tests. By default the seed is random.
    #[must_use]
    pub fn jitter_seed(mut self, seed: u64) -> Self {
        self.jitter = Arc::new(WaitJitter::seeded(seed));
        self
    }

    /// Returns how long to wait before the retry, or `None` if the request is not retried.
    fn wait<R>(&self, response: &Response<R>) -> Option<Duration> {
        let advice = Advice::read(response.headers(), self.clock.now().into());
        let heard = Heard::new(response.status(), response.headers(), &advice);
        if !heard.is_refusal {
            self.budget.deposit();
            return None;
        }
        if self.retries >= self.max_retries || advice.forbids_retry() {
            return None;
        }
        let wait_us = heard.wait_us.unwrap_or_else(|| unnamed_wait_us(self.retries));
        // Withdraws from the budget last, because each withdrawal uses up a part of the budget.
        let is_retried = Duration::from_micros(wait_us) <= self.max_wait && self.budget.withdraw();
        is_retried.then(|| Duration::from_micros(self.jitter.lengthen(wait_us)))
    }
}

impl<B: Clone, R, E> Policy<Request<B>, Response<R>, E> for RetryAfter {
    type Future = Sleep;

    fn retry(&mut self, _: &mut Request<B>, result: &mut Result<Response<R>, E>) -> Option<Sleep> {
        let wait = self.wait(result.as_ref().ok()?)?;
        self.retries += 1;
        Some(self.timer.sleep_until(self.timer.now().saturating_add(wait)))
    }

    fn clone_request(&mut self, request: &Request<B>) -> Option<Request<B>> {
        (self.any_method || request.method().is_idempotent()).then(|| request.clone())
    }
}

impl fmt::Debug for RetryAfter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RetryAfter")
            .field("max_wait", &self.max_wait)
            .field("max_retries", &self.max_retries)
            .field("any_method", &self.any_method)
            .finish_non_exhaustive()
    }
}
