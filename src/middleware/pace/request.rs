//! The body of a request, which keeps its type when it gets a pace.

use std::any::Any;
use std::mem;
use std::sync::Arc;

use bytes::Bytes;
use http::Request;
use http_body::Body;
use http_body_util::combinators::UnsyncBoxBody;

use super::body::{BodyPaces, PacedBody};
use super::source::paces;
use crate::error::BoxError;
use crate::limiter::Limiter;
use crate::middleware::body::ResponseBody;
use crate::middleware::compiled::Compiled;
use crate::middleware::rule::PacedBodies;
use crate::middleware::ticket::Ticket;
use crate::refusal::RefusalBody;
use crate::setup_warning::SetupWarningKind;

/// Gives the body of a request its pace, if the request has a pace.
#[inline]
pub(crate) fn pace_request<B, L>(layer: &Arc<Compiled<L>>, request: &mut Request<B>, ticket: &Ticket)
where
    B: Body + 'static,
    L: Limiter,
{
    if let Some(paced) = ticket.paced.get().filter(|_| !request.body().is_end_stream()) {
        let paces = paces(layer, paced, PacedBodies::Requests);
        if !paces.is_empty() && pace_body(request.body_mut(), paces).is_some() {
            let body = std::any::type_name::<B>();
            layer.diagnostics.notice(SetupWarningKind::NoEffect, || {
                format!(
                    "a rule has pace_requests, which has no effect on a request's body of the type {body}: put a layer \
                     outside of this one that makes the body one of axum or tonic (with these features), or an \
                     UnsyncBoxBody whose error is a Box<dyn Error + Send + Sync>"
                )
            });
        }
    }
}

/// Gives a body its pace. If the body's type cannot hold another body, the body stays as it is, and the
/// function returns `paces`. The server chooses the type, so the layer cannot require a trait of it.
fn pace_body(body: &mut dyn Any, paces: BodyPaces) -> Option<BodyPaces> {
    let mut paces = Some(paces);
    #[cfg(feature = "axum")]
    replace::<axum::body::Body>(body, &mut paces);
    #[cfg(feature = "tonic")]
    replace::<tonic::body::Body>(body, &mut paces);
    replace::<UnsyncBoxBody<Bytes, BoxError>>(body, &mut paces);
    paces
}

/// Gives a body its pace if the body's type is `T`.
fn replace<T: ResponseBody>(body: &mut dyn Any, paces: &mut Option<BodyPaces>) {
    let Some(body) = body.downcast_mut::<T>() else { return };
    let Some(paces) = paces.take() else { return };
    let inner = mem::replace(body, T::from_body(RefusalBody::whole(Bytes::new())));
    *body = T::from_body(PacedBody::new(inner, paces));
}
