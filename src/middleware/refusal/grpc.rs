//! Refusals over gRPC: a response of headers alone, as gRPC's HTTP/2 mapping calls it *Trailers-Only*.
//!
//! The HTTP status is 200, the body empty. What is wrong is in `grpc-status` and `grpc-message`; when to come back is in
//! `grpc-retry-pushback-ms` (gRPC's proposal A6) and in the `RetryInfo` of `grpc-status-details-bin`.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderName, HeaderValue, Response};

use crate::middleware::body::RefusalBody;
use crate::middleware::headers::{Advertised, Text, integer};
use crate::outcome::Outcome;

use super::Protocol;

const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");
const DETAILS: HeaderName = HeaderName::from_static("grpc-status-details-bin");

/// The policies that details name: clients may take no more than 8 KiB of headers.
const VIOLATIONS_MAX: usize = 16;

/// What a gRPC client is told.
#[derive(Debug)]
pub(super) struct Status<'a> {
    pub(super) code: u8,
    pub(super) message: &'a str,
    pub(super) pushback: Option<Pushback>,
    pub(super) details: Option<Details<'a>>,
}

/// What `grpc-retry-pushback-ms` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pushback {
    After(Duration),
    Never,
}

/// What goes into `grpc-status-details-bin`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Details<'a> {
    pub(super) retry_after: Option<Duration>,
    pub(super) outcome: &'a Outcome,
}

pub(super) fn response(protocol: Protocol, status: &Status<'_>) -> Response<RefusalBody> {
    let mut response = Response::new(RefusalBody::whole(Bytes::new()));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, protocol.content_type());
    if let Some(code) = integer(u64::from(status.code)) {
        headers.insert(STATUS, code);
    }
    if let Some(message) = percent_encoded(status.message).to_value() {
        headers.insert(MESSAGE, message);
    }
    let pushback = match status.pushback {
        Some(Pushback::After(wait)) => integer(pushback_ms(wait)),
        Some(Pushback::Never) => Some(HeaderValue::from_static("-1")),
        None => None,
    };
    if let Some(pushback) = pushback {
        headers.insert(PUSHBACK, pushback);
    }
    if let Some(details) = &status.details {
        let encoded = STANDARD_NO_PAD.encode(details.encode(status.code, status.message));
        if let Ok(value) = HeaderValue::try_from(encoded) {
            headers.insert(DETAILS, value);
        }
    }
    response
}

/// Milliseconds, rounded up, as the signed 32-bit integer that clients read; 0 would be at once.
fn pushback_ms(wait: Duration) -> u64 {
    let millis = wait.as_nanos().div_ceil(1_000_000).clamp(1, i32::MAX as u128);
    u64::try_from(millis).unwrap_or(1)
}

/// What is outside of printable ASCII, and `%` itself, as gRPC's HTTP/2 mapping encodes `grpc-message`.
fn percent_encoded(message: &str) -> Text {
    const DIGITS: [u8; 16] = *b"0123456789ABCDEF";
    let digit = |n: u8| DIGITS.get(usize::from(n)).copied().unwrap_or(b'0');
    let mut text = Text::new();
    for byte in message.bytes() {
        match byte {
            0x20..=0x7e if byte != b'%' => text.push(&[byte]),
            _ => text.push(&[b'%', digit(byte >> 4), digit(byte & 0xf)]),
        }
    }
    text
}

impl Details<'_> {
    /// A `google.rpc.Status` with a `RetryInfo` and a `QuotaFailure`, each where there is something to say.
    fn encode(&self, code: u8, message: &str) -> Vec<u8> {
        let mut status = Message::default();
        status.integer(1, u64::from(code));
        status.bytes(2, message.as_bytes());
        if let Some(wait) = self.retry_after {
            status.any("type.googleapis.com/google.rpc.RetryInfo", &retry_info(wait));
        }
        let mut failure = Message::default();
        for standing in self.outcome.violated().take(VIOLATIONS_MAX) {
            let policy = standing.policy();
            let Advertised { quota, window } = Advertised::new(policy.quota());
            let unit = policy.quota_unit();
            let mut violation = Message::default();
            violation.bytes(1, format!("policy:{}", policy.name()).as_bytes());
            violation.bytes(2, format!("{quota} {unit} per {window} s exceeded").as_bytes());
            failure.message(1, &violation);
        }
        if !failure.0.is_empty() {
            status.any("type.googleapis.com/google.rpc.QuotaFailure", &failure);
        }
        status.0
    }
}

/// `RetryInfo { Duration retry_delay = 1 }`, `Duration { int64 seconds = 1; int32 nanos = 2 }`
fn retry_info(wait: Duration) -> Message {
    let mut duration = Message::default();
    duration.integer(1, wait.as_secs());
    duration.integer(2, u64::from(wait.subsec_nanos()));
    let mut info = Message::default();
    info.message(1, &duration);
    info
}

/// A message of protocol buffers. As proto3 has it, zeros and empty strings are left out, empty messages are not.
#[derive(Debug, Default)]
struct Message(Vec<u8>);

impl Message {
    fn integer(&mut self, field: u8, value: u64) {
        if value != 0 {
            self.0.push(field << 3);
            self.varint(value);
        }
    }

    fn bytes(&mut self, field: u8, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.delimited(field, bytes);
        }
    }

    fn message(&mut self, field: u8, message: &Self) {
        self.delimited(field, &message.0);
    }

    /// One of a status' details: `Any { string type_url = 1; bytes value = 2 }`.
    fn any(&mut self, type_url: &str, value: &Self) {
        let mut any = Self::default();
        any.bytes(1, type_url.as_bytes());
        any.bytes(2, &value.0);
        self.message(3, &any);
    }

    fn delimited(&mut self, field: u8, bytes: &[u8]) {
        self.0.push(field << 3 | 2);
        self.varint(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }

    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80); // the lowest seven bits
            value >>= 7;
        }
        self.0.push(value as u8); // below 0x80
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pushback_is_in_milliseconds_rounded_up_and_fits_what_clients_read() {
        for (wait, expected) in [
            (Duration::from_millis(600), 600),
            (Duration::from_nanos(1), 1),
            (Duration::ZERO, 1),
            (Duration::from_micros(1_001), 2),
            (Duration::from_secs(40 * 86_400), 2_147_483_647),
            (Duration::MAX, 2_147_483_647),
        ] {
            assert_eq!(pushback_ms(wait), expected);
        }
    }

    #[test]
    fn a_message_is_percent_encoded() {
        for (message, expected) in [
            ("rate limit exceeded", "rate limit exceeded"),
            ("100%", "100%25"),
            ("a\nb\u{7f}", "a%0Ab%7F"),
            ("größer", "gr%C3%B6%C3%9Fer"),
        ] {
            assert_eq!(percent_encoded(message).as_bytes(), expected.as_bytes());
        }
    }

    #[test]
    fn zeros_are_left_out_but_not_the_message_that_holds_them() {
        let outcome = Outcome::new(crate::outcome::OutcomeKind::Limited, smallvec::SmallVec::new());
        let details = Details { retry_after: Some(Duration::ZERO), outcome: &outcome };
        assert_eq!(
            STANDARD_NO_PAD.encode(details.encode(8, "")),
            "CAgaLgoodHlwZS5nb29nbGVhcGlzLmNvbS9nb29nbGUucnBjLlJldHJ5SW5mbxICCgA"
        );
    }

    #[test]
    fn large_numbers_are_encoded_as_prost_encodes_them() {
        use prost::Message as _;
        for seconds in [0, 1, 127, 128, 300, 1 << 21, i64::MAX as u64] {
            let info = retry_info(Duration::new(seconds, 999_999_999));
            let delay = prost_duration(&info.0);
            assert_eq!((delay.seconds as u64, delay.nanos), (seconds, 999_999_999));
        }
        #[derive(Clone, PartialEq, prost::Message)]
        struct Delay {
            #[prost(int64, tag = "1")]
            seconds: i64,
            #[prost(int32, tag = "2")]
            nanos: i32,
        }
        #[derive(Clone, PartialEq, prost::Message)]
        struct Info {
            #[prost(message, tag = "1")]
            retry_delay: Option<Delay>,
        }
        fn prost_duration(bytes: &[u8]) -> Delay {
            Info::decode(bytes).unwrap().retry_delay.unwrap()
        }
    }
}
