//! A layer that is asked by a handler: for limits that are known only there.

use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;

use http::request::Parts;
use http::{Extensions, Method, Response};

use super::bill::Bill;
use super::body::RefusalBody;
use super::charging::Shared;
use super::decided::{Answer, Asking, Decided};
use super::delay::Delayed;
use super::late::{Record, Settling};
use super::layer::RateLimitLayer;
use super::modes::kind_of_unkeyed;
#[cfg(feature = "tonic")]
use super::refusal::message;
use crate::limiter::Limiter;
use crate::outcome::{Outcome, OutcomeKind};

impl<L: Limiter> RateLimitLayer<L> {
    /// Decides about a request in a handler, by the rules and the settings of this layer, where a key or a cost is known only
    /// there: after the body was parsed, or the user was found.
    ///
    /// The rules read the request's head, so the handler puts what it knows into its extensions. The layer is not around any
    /// service for this; it is kept in the application's state.
    ///
    /// * The observer, access lists, modes, blocks and [`OnError`](super::OnError) are as in the layer. A request that has to
    ///   [wait](Self::delay) waits here.
    /// * There is no response that the layer sees. What was taken stays charged, unless the [`Admission`] says otherwise.
    /// * Layers around the handler keep what they took, also if they [refund](Self::refund_nested) what an inner layer
    ///   refuses.
    /// * A layer with an [overflow](Self::overflow) cannot be asked, since it has no request to hand over.
    ///
    /// ```
    /// use axum::Json;
    /// use axum::extract::State;
    /// use http::request::Parts;
    /// use tower_ratelimit::{MemoryLimiter, Policy, Quota, RateLimitLayer, Refused, key};
    ///
    /// #[derive(Clone)]
    /// struct Rows(u64);
    ///
    /// type Limit = RateLimitLayer<MemoryLimiter>;
    ///
    /// async fn import(State(limit): State<Limit>, mut head: Parts, rows: String) -> Result<String, Refused> {
    ///     let rows = rows.lines().count() as u64;
    ///     head.extensions.insert(Rows(rows));
    ///     limit.admit(&head).await?;
    ///     Ok(format!("imported {rows} rows\n"))
    /// }
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let rows = Policy::new("rows", Quota::per_minute(1_000))?
    ///     .cost(|request| request.extensions.get().map_or(1, |Rows(rows)| *rows));
    /// let limit = Limit::new(MemoryLimiter::new(), rows, key::peer_ip());
    /// let app: axum::Router = axum::Router::new().route("/rows", axum::routing::post(import)).with_state(limit);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// If the request is refused. The error is the response to return: the layer's own refusal with its headers, in the
    /// protocol of the request.
    pub async fn admit(&self, request: &Parts) -> Result<Admission, Refused> {
        let shared = &self.shared();
        if !shared.settings.enabled {
            return Ok(shared.admission(Decided::nothing()));
        }
        if shared.entered.get().is_none() {
            shared.look_at_setup(); // as a layer does when it makes its first service
        }
        let mut decided = match shared.ask(request) {
            Asking::Exempt => Decided::without_charges(OutcomeKind::Exempt),
            Asking::Unkeyed(mode) => Decided::without_charges(kind_of_unkeyed(mode)),
            Asking::Denied => Decided::without_charges(OutcomeKind::Denied),
            Asking::Charges(mut charges) => match shared.decide_unsupported(&mut charges) {
                Some(decided) => decided,
                None => {
                    let mut answer = shared.take(&charges).await;
                    shared.decide(&mut charges, &mut answer)
                }
            },
        };
        if let Some(place) = shared.place_to_wait(&mut decided) {
            let head = http::Request::from_parts(request.clone(), ());
            let mut waiting = Waiting { shared, delayed: Some(shared.delay((), head, decided, place)) };
            poll_fn(|cx| {
                waiting.delayed.as_mut().map_or(std::task::Poll::Ready(()), |delayed| delayed.poll_departure(cx))
            })
            .await;
            decided = waiting.delayed.take().map_or_else(Decided::nothing, |delayed| delayed.decided);
        }
        if decided.passes() {
            shared.tell(request, &decided);
            return Ok(shared.admission(decided));
        }
        let mut head = request.clone();
        let response = shared.refuse(&mut head, &decided);
        Err(Refused { outcome: shared.outcome(&decided), response: Box::new(response) })
    }

    /// Decides about a call in a handler of tonic, as [`admit`](Self::admit) does. The rules see the call's metadata as the
    /// request's headers, and its extensions.
    ///
    /// ```
    /// use tonic::{Request, Response, Status};
    /// use tower_ratelimit::{MemoryLimiter, RateLimitLayer};
    ///
    /// async fn import(limit: &RateLimitLayer<MemoryLimiter>, call: Request<Vec<u8>>) -> Result<Response<()>, Status> {
    ///     limit.admit_call(&call).await?;
    ///     Ok(Response::new(()))
    /// }
    /// ```
    ///
    /// # Errors
    /// If the call is refused: the layer's own status, with its details, and with its headers as metadata.
    #[cfg(feature = "tonic")]
    pub fn admit_call<T>(
        &self,
        call: &tonic::Request<T>,
    ) -> impl Future<Output = Result<Admission, tonic::Status>> + Send + use<'_, L, T> {
        let (mut head, ()) = http::Request::new(()).into_parts();
        head.method = Method::POST;
        head.version = http::Version::HTTP_2;
        head.headers = call.metadata().clone().into_headers();
        head.headers.insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static("application/grpc"));
        head.extensions = call.extensions().clone();
        async move { self.admit(&head).await.map_err(tonic::Status::from) }
    }
}

/// Leaves the lines if the handler is dropped while it waits.
struct Waiting<'a, L: Limiter> {
    shared: &'a Shared<L>,
    delayed: Option<Box<Delayed<(), ()>>>,
}

impl<L: Limiter> Drop for Waiting<'_, L> {
    fn drop(&mut self) {
        if let Some(delayed) = &mut self.delayed {
            self.shared.leave(delayed);
        }
    }
}

impl<L: Limiter> Shared<L> {
    fn admission(self: &Arc<Self>, mut decided: Decided) -> Admission {
        let outcome = self.outcome(&decided);
        let mut extensions = Extensions::new();
        if self.afters.is_some() {
            self.take_over(&mut extensions, Method::default(), &mut decided);
        }
        Admission { outcome, decided, bill: extensions.remove(), layer: Arc::<Self>::clone(self) }
    }
}

/// What a request took that a handler has [admitted](RateLimitLayer::admit).
///
/// It stays charged. A rule that is [settled by a bill](super::Rule::settle_by_bill) is settled by
/// [`settle`](Self::settle); what a rule does by a response's head or body has no effect here. An admission that is dropped
/// is settled as an aborted request, see [`Rule::on_aborted`](super::Rule::on_aborted): by default its charge stays.
pub struct Admission {
    outcome: Outcome,
    decided: Decided,
    bill: Option<Bill>,
    layer: Arc<dyn Settling>,
}

impl Admission {
    /// Returns what was decided, and how each policy stands.
    #[must_use]
    pub fn outcome(&self) -> &Outcome {
        &self.outcome
    }

    /// Keeps what was taken, whatever the rules say of aborted requests.
    pub fn keep(mut self) {
        self.complete();
    }

    /// Refunds what was taken, whatever the rules say: nothing was done for the request.
    pub fn refund(mut self) {
        let decided = std::mem::replace(&mut self.decided, Decided::nothing());
        self.layer.give_back(decided);
    }

    /// Settles the rules that are settled by a bill: the request cost this many units. The others keep what they took.
    pub fn settle(mut self, units: u64) {
        if let Some(bill) = &self.bill {
            bill.set(units);
        }
        self.complete();
    }

    fn complete(&mut self) {
        if let Answer::Several(record) = &mut self.decided.answer {
            if let Record::Late(late) = &mut **record {
                late.complete();
            }
        }
    }
}

impl fmt::Debug for Admission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admission").field("outcome", &self.outcome).finish_non_exhaustive()
    }
}

/// A request that a layer refused in a handler: the response to return.
///
/// With the feature `axum` it is a response of axum, so that handlers return `Result<_, Refused>`. With the feature `tonic` it
/// becomes a `tonic::Status`.
#[derive(Debug)]
pub struct Refused {
    outcome: Outcome,
    response: Box<Response<RefusalBody>>,
}

impl Refused {
    /// Returns the kind of the outcome.
    #[must_use]
    pub fn kind(&self) -> OutcomeKind {
        self.outcome.kind()
    }

    /// Returns why it was refused, and how each policy stands.
    #[must_use]
    pub fn outcome(&self) -> &Outcome {
        &self.outcome
    }

    /// Returns the refusal, as the layer would have sent it.
    #[must_use]
    pub fn into_response(self) -> Response<RefusalBody> {
        *self.response
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the request was refused: {}", self.outcome.kind().as_str())
    }
}

impl std::error::Error for Refused {}

#[cfg(feature = "axum")]
impl axum::response::IntoResponse for Refused {
    fn into_response(self) -> axum::response::Response {
        self.response.map(axum::body::Body::new)
    }
}

#[cfg(feature = "tonic")]
impl From<Refused> for tonic::Status {
    /// The status of a call that was refused. A refusal over plain HTTP becomes the equal status, with its headers.
    fn from(refused: Refused) -> Self {
        let (head, _) = refused.response.into_parts();
        Self::from_header_map(&head.headers).unwrap_or_else(|| {
            let code = match refused.outcome.kind() {
                OutcomeKind::Denied => tonic::Code::PermissionDenied,
                OutcomeKind::KeyMissing => tonic::Code::InvalidArgument,
                OutcomeKind::FailedClosed => tonic::Code::Unavailable,
                _ => tonic::Code::ResourceExhausted,
            };
            let metadata = tonic::metadata::MetadataMap::from_headers(head.headers);
            Self::with_metadata(code, message(&refused.outcome), metadata)
        })
    }
}
