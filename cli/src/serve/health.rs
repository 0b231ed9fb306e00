//! Whether the server should get requests: asked over HTTP and by `grpc.health.v1`.
//!
//! The store is asked in the background, however many balancers ask, and strangers with them.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::Response;
use hyper::body::Frame;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::time::timeout;
use tower_ratelimit::OnError;
use tower_ratelimit::limiter::StoreErrorKind;

use super::grpc::{self, Code, Status};
use super::limits::Limits;
use super::log::Log;
use super::respond::Body;
use super::store::StoreFailure;

/// The longest time for asking the store.
const PROBE_TIME: Duration = Duration::from_secs(2);

/// The most calls of `Watch` at a time. Each takes a few hundred bytes for as long as it lasts.
const WATCHES_MAX: usize = 1_000;

/// The phase of the server: it serves, drains, or ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    Serving,
    /// It is not ready any more, and still answers.
    Draining,
    /// It accepts no connections, and answers what is under way.
    Ending,
}

/// The health of the server, which everybody may ask. It says only the kind of the store's error: the log has its text.
#[derive(Clone)]
pub(crate) struct Health {
    store: watch::Receiver<Store>,
    phase: watch::Receiver<Phase>,
    on_error: OnError,
    watches: Arc<Semaphore>,
}

/// Whether the store decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Store {
    Decides,
    Fails(StoreErrorKind),
}

impl Health {
    pub(crate) fn new(store: watch::Receiver<Store>, phase: watch::Receiver<Phase>, on_error: OnError) -> Self {
        Self { store, phase, on_error, watches: Arc::new(Semaphore::new(WATCHES_MAX)) }
    }

    /// Returns what there is to say if the server should get requests, and why not otherwise. If requests pass while
    /// the store fails, it is ready without the store: a proxy with no server that is ready would refuse them all.
    pub(crate) fn readiness(&self) -> Result<String, String> {
        let fails = |kind| format!("the store does not decide ({kind}): the log says why");
        let store = *self.store.borrow();
        match (*self.phase.borrow(), store, self.on_error) {
            (Phase::Draining | Phase::Ending, ..) => Err("the server ends".to_owned()),
            (Phase::Serving, Store::Decides, _) => Ok("ready".to_owned()),
            (Phase::Serving, Store::Fails(kind), OnError::Deny) => Err(fails(kind)),
            (Phase::Serving, Store::Fails(kind), _) => Ok(format!("ready, but {}", fails(kind))),
        }
    }
}

/// Asks the store whether it decides. Returns why not.
pub(crate) async fn probe(limits: &Limits) -> Result<(), StoreFailure> {
    let probed = timeout(PROBE_TIME, limits.probe()).await;
    probed.unwrap_or_else(|_| {
        let message = format!("it did not answer within {PROBE_TIME:?}");
        Err(StoreFailure { kind: StoreErrorKind::Timeout, message })
    })
}

/// Asks the store for the first time.
pub(crate) async fn first(limits: &Limits, log: Log) -> Store {
    match probe(limits).await {
        Ok(()) => Store::Decides,
        Err(StoreFailure { kind, message }) => {
            log.warn("store-away", format_args!("the store does not decide: {message}"));
            Store::Fails(kind)
        }
    }
}

/// The services of which the health is known. The empty name is the server as a whole.
const SERVICES: [&str; 3] = ["", "envoy.service.ratelimit.v3.RateLimitService", "grpc.health.v1.Health"];

/// The paths of the methods.
pub(crate) const CHECK: &str = "/grpc.health.v1.Health/Check";
pub(crate) const WATCH: &str = "/grpc.health.v1.Health/Watch";

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Request {
    #[prost(string, tag = "1")]
    pub(crate) service: String,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(crate) struct Answer {
    #[prost(int32, tag = "1")]
    pub(crate) status: i32,
}

const SERVING: i32 = 1;
const NOT_SERVING: i32 = 2;
const SERVICE_UNKNOWN: i32 = 3;

impl Health {
    /// Answers a call of `Check`.
    pub(crate) fn check(&self, request: &Request) -> Result<Answer, Status> {
        match self.status(request) {
            SERVICE_UNKNOWN => Err(Status::new(Code::NotFound, "there is no such service")),
            status => Ok(Answer { status }),
        }
    }

    /// Answers a call of `Watch`: by the status, and by each other one that follows, until the server ends.
    pub(crate) fn watch(&self, request: Request) -> Response<Body> {
        let Ok(place) = Arc::clone(&self.watches).try_acquire_owned() else {
            let message = format!("{WATCHES_MAX} calls watch already");
            return grpc::respond::<Answer>(Err(Status::new(Code::ResourceExhausted, message)));
        };
        let (frames, body) = mpsc::channel(1);
        tokio::spawn(self.clone().send_changes(request, frames, place));
        grpc::respond_with_frames(body)
    }

    /// Sends each change until the client has gone, or the server ends.
    async fn send_changes(
        mut self,
        request: Request,
        frames: mpsc::Sender<Frame<Bytes>>,
        _place: OwnedSemaphorePermit,
    ) {
        let mut last = None;
        while *self.phase.borrow_and_update() != Phase::Ending {
            self.store.mark_unchanged();
            let status = self.status(&request);
            if last.replace(status) != Some(status)
                && frames.send(Frame::data(grpc::framed(&Answer { status }))).await.is_err()
            {
                return;
            }
            tokio::select! {
                () = frames.closed() => return,
                changed = self.phase.changed() => if changed.is_err() { break },
                changed = self.store.changed() => if changed.is_err() { break },
            }
        }
        let end = Status::new(Code::Unavailable, "the server ends");
        let _ = frames.send(Frame::trailers(end.into_headers())).await; // the client may have gone
    }

    fn status(&self, request: &Request) -> i32 {
        match (SERVICES.contains(&&*request.service), self.readiness()) {
            (false, _) => SERVICE_UNKNOWN,
            (true, Ok(_)) => SERVING,
            (true, Err(_)) => NOT_SERVING,
        }
    }
}
