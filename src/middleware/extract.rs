//! Arguments of axum's handlers.

use std::convert::Infallible;
use std::sync::Once;

use axum::extract::{FromRequestParts, OptionalFromRequestParts};
use http::StatusCode;
use http::request::Parts;

use super::settle::in_flight::InFlight;
use super::settle::usage::Usage;
use crate::outcome::Outcome;
use crate::setup_warning::{SetupWarning, SetupWarningKind};

/// Implements axum's traits for a value that a layer puts into the extensions of requests.
macro_rules! extracted {
    ($type:ident, $layer:literal) => {
        /// Returns the value that the layer put into the request. Without this value, the handler is not called: the
        /// client gets an empty 500, and the [setup warning](SetupWarningKind::NotExposed) says what is missing. A
        /// handler that also serves requests without the value takes an `Option`.
        impl<S: Sync> FromRequestParts<S> for $type {
            type Rejection = StatusCode;

            async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, StatusCode> {
                static WARNED: Once = Once::new();
                parts.extensions.get().cloned().ok_or_else(|| {
                    WARNED.call_once(|| {
                        warn(concat!(
                            "a handler takes `",
                            stringify!($type),
                            "`, and this request has none, so it was answered with \
                         500: put the handler inside ",
                            $layer,
                            ", or take `Option<",
                            stringify!($type),
                            ">`"
                        ))
                    });
                    StatusCode::INTERNAL_SERVER_ERROR
                })
            }
        }

        /// Returns the value if the layer put one into the request.
        impl<S: Sync> OptionalFromRequestParts<S> for $type {
            type Rejection = Infallible;

            async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Infallible> {
                Ok(parts.extensions.get().cloned())
            }
        }
    };
}

extracted!(Outcome, "a layer with `expose_outcome(true)`");
extracted!(Usage, "a layer with a rule that is settled by usage");
extracted!(InFlight, "a layer with a concurrency limit");

/// Reports the warning on stderr or with `tracing`, because there is no layer whose observer could get
/// it.
fn warn(text: &str) {
    SetupWarning::new(SetupWarningKind::NotExposed, text.to_owned()).report();
}
