//! Responses of this server, and reading the bodies of requests.

use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderValue, Method, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use serde_json::Value;

/// The body of every response.
pub(crate) type Body = UnsyncBoxBody<Bytes, Box<dyn std::error::Error + Send + Sync>>;

/// The largest body of a request, in bytes.
pub(crate) const BODY_MAX: usize = 64 << 10;

/// The longest time for the body of a request.
const BODY_TIME: Duration = Duration::from_secs(10);

/// Makes a body of bytes.
pub(crate) fn body(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never: Infallible| match never {}).boxed_unsync()
}

/// Makes a response that no cache stores.
pub(crate) fn response(status: StatusCode, kind: &'static str, bytes: impl Into<Bytes>) -> Response<Body> {
    let mut response = Response::new(body(bytes));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// Makes a response of one line of text.
pub(crate) fn text(status: StatusCode, line: &str) -> Response<Body> {
    response(status, "text/plain; charset=utf-8", format!("{line}\n"))
}

pub(crate) fn json(status: StatusCode, value: &Value) -> Response<Body> {
    response(status, "application/json", format!("{value}\n"))
}

/// Says that a path has no such method.
pub(crate) fn wrong_method(allowed: &Method) -> Response<Body> {
    let mut response = text(StatusCode::METHOD_NOT_ALLOWED, &format!("use {allowed}"));
    if let Ok(allowed) = HeaderValue::from_str(allowed.as_str()) {
        response.headers_mut().insert(ALLOW, allowed);
    }
    response
}

/// Reads the body of a request.
///
/// # Errors
/// Returns a response if the body is too large or too slow, or if its client has gone.
pub(crate) async fn read(incoming: Incoming) -> Result<Bytes, Box<Response<Body>>> {
    let collected = tokio::time::timeout(BODY_TIME, Limited::new(incoming, BODY_MAX).collect()).await;
    match collected {
        Ok(Ok(whole)) => Ok(whole.to_bytes()),
        Ok(Err(error)) if error.is::<http_body_util::LengthLimitError>() => {
            Err(Box::new(text(StatusCode::PAYLOAD_TOO_LARGE, &format!("a body has at most {BODY_MAX} bytes"))))
        }
        Ok(Err(_)) => Err(Box::new(text(StatusCode::BAD_REQUEST, "the body did not come"))),
        Err(_) => Err(Box::new(text(StatusCode::REQUEST_TIMEOUT, "the body took too long"))),
    }
}
