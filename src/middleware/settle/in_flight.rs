//! A request's places, for handlers that go on working when the response has been sent.

use std::fmt;
use std::sync::{Arc, Weak};

use http::Extensions;
use smallvec::SmallVec;

use crate::limiter::{AnyPlaces, Place, shared_place};

/// A handle to the units that a request holds of [concurrency limits](crate::Quota::concurrent). The handle is in the
/// extensions of each request that passes a layer with such a limit. If requests [bring their
/// quotas](crate::Rule::quota_from), only requests that are charged to such a limit have the handle. A handler of all
/// requests then takes an `Option<InFlight>`.
///
/// The handle itself holds nothing. A request's units are returned when the body of its response has ended or was
/// dropped. A handler whose work goes on after that takes a [`Place`], and moves the place into that work:
///
/// ```
/// use http::StatusCode;
/// use tower_ratelimit::middleware::InFlight;
///
/// async fn upload(in_flight: InFlight, video: String) -> StatusCode {
///     let place = in_flight.hold();
///     tokio::spawn(async move {
///         // Encode the video.
///         drop((video, place));
///     });
///     StatusCode::ACCEPTED
/// }
/// ```
///
/// A WebSocket also needs a place, because the response that [switches protocols](Self::hold) has no
/// body.
#[derive(Clone)]
pub struct InFlight(SmallVec<[Weak<dyn AnyPlaces>; 1]>);

impl InFlight {
    /// Puts a handle into the extensions of a request. The outer layers use the same handle.
    pub(crate) fn put(extensions: &mut Extensions, held: Option<&Arc<dyn AnyPlaces>>) {
        match (held, extensions.get_mut::<Self>()) {
            (Some(held), Some(Self(all))) => all.push(Arc::downgrade(held)),
            (held, None) => drop(extensions.insert(Self(held.map(Arc::downgrade).into_iter().collect()))),
            (None, Some(_)) => {}
        }
    }

    /// Holds the request's units until the returned place is dropped, but at least as long as the request holds them.
    /// Returns `None` if the request holds no units, or no longer holds any.
    ///
    /// The body of a response that switches protocols (status 101, or 2xx to `CONNECT`) ends at once. So take a place
    /// before such a response is returned, and move it into the task that serves the connection:
    ///
    /// ```
    /// use axum::response::Response;
    /// use tower_ratelimit::middleware::InFlight;
    ///
    /// # trait OnUpgrade: Sized { fn on_upgrade<F: Future<Output = ()>>(self, serve: impl FnOnce(u8) -> F) -> Response; }
    /// async fn chat(upgrade: impl OnUpgrade, in_flight: InFlight) -> Response {
    ///     let place = in_flight.hold();
    ///     upgrade.on_upgrade(|socket| async move {
    ///         // Serve the socket.
    ///         drop((socket, place));
    ///     })
    /// }
    /// ```
    #[must_use = "the units are returned when the place is dropped"]
    pub fn hold(&self) -> Option<Place> {
        shared_place(self.0.iter().cloned())
    }
}

impl fmt::Debug for InFlight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlight").finish_non_exhaustive()
    }
}
