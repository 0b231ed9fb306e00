//! gRPC calls of one request, over HTTP/2.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{BufMut, Bytes, BytesMut};
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::{Frame, Incoming};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use prost::Message;
use tokio::sync::mpsc;

use super::respond::{self, Body, body};

/// The codes of gRPC that are answered here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Code {
    InvalidArgument = 3,
    NotFound = 5,
    ResourceExhausted = 8,
    Unimplemented = 12,
    Unavailable = 14,
}

/// Why a call fails.
#[derive(Debug)]
pub(crate) struct Status(pub(crate) Code, pub(crate) String);

impl Status {
    pub(crate) fn new(code: Code, message: impl Into<String>) -> Self {
        Self(code, message.into())
    }

    /// Returns it as headers or trailers.
    pub(crate) fn into_headers(self) -> HeaderMap {
        let Self(code, message) = self;
        let mut headers = HeaderMap::new();
        headers.insert(GRPC_STATUS, HeaderValue::from(code as u16));
        let message = utf8_percent_encode(&message, MESSAGE).to_string();
        if let Ok(message) = HeaderValue::try_from(message) {
            headers.insert(GRPC_MESSAGE, message);
        }
        headers
    }
}

const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const GRPC_ACCEPT_ENCODING: HeaderName = HeaderName::from_static("grpc-accept-encoding");

/// The characters that are percent-encoded in a `grpc-message`.
const MESSAGE: &AsciiSet = &CONTROLS.add(b'%');

/// A length and a sign of compression stand before each message.
const PREFIX: usize = 5;

/// Returns whether a request is a call.
pub(crate) fn is_call(head: &Parts) -> bool {
    let kind = head.headers.get(CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
    let rest = kind.strip_prefix(b"application/grpc");
    head.method == Method::POST && rest.is_some_and(|rest| matches!(rest.first(), None | Some(b'+' | b';')))
}

/// Reads the one message of a call.
pub(crate) async fn read<M: Message + Default>(incoming: Incoming) -> Result<M, Status> {
    let bytes = respond::read(incoming).await.map_err(|_| {
        let message = format!("a message has at most {} bytes and comes within ten seconds", respond::BODY_MAX);
        Status::new(Code::ResourceExhausted, message)
    })?;
    decode(&bytes)
}

fn decode<M: Message + Default>(bytes: &[u8]) -> Result<M, Status> {
    let wrong = |message: &str| Status::new(Code::InvalidArgument, message);
    let (prefix, message) = bytes.split_at_checked(PREFIX).ok_or_else(|| wrong("there is no message"))?;
    let [compressed, length @ ..] = prefix else { return Err(wrong("there is no message")) };
    if *compressed != 0 {
        return Err(Status::new(Code::Unimplemented, "messages are not compressed here"));
    }
    let length = length.iter().fold(0_u64, |length, byte| length << 8 | u64::from(*byte));
    if u64::try_from(message.len()) != Ok(length) {
        return Err(wrong("a call has one message"));
    }
    M::decode(message).map_err(|_| wrong("the message cannot be read"))
}

/// Makes the response to a call.
pub(crate) fn respond<M: Message>(answer: Result<M, Status>) -> Response<Body> {
    match answer {
        Ok(message) => {
            let mut trailers = HeaderMap::new();
            trailers.insert(GRPC_STATUS, HeaderValue::from_static("0"));
            let whole = Full::new(framed(&message)).with_trailers(async move { Some(Ok(trailers)) });
            response(whole.map_err(|never| match never {}).boxed_unsync())
        }
        Err(status) => {
            let mut response = response(body(""));
            response.headers_mut().extend(status.into_headers());
            response
        }
    }
}

/// Makes the response to a call that is answered by several messages, each [framed], and by a status as trailers.
pub(crate) fn respond_with_frames(frames: mpsc::Receiver<Frame<Bytes>>) -> Response<Body> {
    response(Frames(frames).boxed_unsync())
}

/// Returns a message with its length.
pub(crate) fn framed<M: Message>(message: &M) -> Bytes {
    let length = message.encoded_len();
    let mut bytes = BytesMut::with_capacity(PREFIX + length);
    bytes.put_u8(0);
    bytes.put_u32(u32::try_from(length).unwrap_or(u32::MAX)); // it is no longer than the request
    bytes.put_slice(&message.encode_to_vec());
    bytes.freeze()
}

fn response(body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response.headers_mut().insert(GRPC_ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    response
}

/// A body of frames that come later.
struct Frames(mpsc::Receiver<Frame<Bytes>>);

impl hyper::body::Body for Frames {
    type Data = Bytes;
    type Error = Box<dyn std::error::Error + Send + Sync>;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        self.0.poll_recv(cx).map(|frame| frame.map(Ok))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, PartialEq, prost::Message)]
    struct Named {
        #[prost(string, tag = "1")]
        name: String,
    }

    #[test]
    fn message_of_another_form_is_refused() {
        let read = |bytes: &[u8]| decode::<Named>(bytes).map_err(|status| status.0);
        assert_eq!(read(b"\0\0\0\0\x03\x0a\x01a").unwrap().name, "a");
        assert_eq!(read(b"\0\0\0\0\0").unwrap().name, "");
        for (bytes, code) in [
            (&b""[..], Code::InvalidArgument),
            (b"\0\0\0\0", Code::InvalidArgument),
            (b"\0\0\0\0\x04\x0a\x01a", Code::InvalidArgument),
            (b"\0\xff\xff\xff\xff\x0a", Code::InvalidArgument),
            (b"\0\0\0\0\x02\x0a\xff", Code::InvalidArgument),
            (b"\0\0\0\0\x01a\0\0\0\0\x01a", Code::InvalidArgument),
            (b"\x01\0\0\0\x03\x0a\x01a", Code::Unimplemented),
        ] {
            assert_eq!(read(bytes), Err(code), "{bytes:?}");
        }
    }
}
