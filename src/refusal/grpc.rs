//! Refusals over gRPC: a response with headers only, which gRPC's HTTP/2 mapping calls *Trailers-Only*.
//!
//! The HTTP status is 200 and the body is empty. The error is in `grpc-status` and `grpc-message`.
//! The wait is in `grpc-retry-pushback-ms` (gRPC's proposal A6) and in the `RetryInfo` of
//! `grpc-status-details-bin`.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderName, HeaderValue};

use crate::base::wait::Wait;
use crate::headers::{Advertised, integer};
use crate::outcome::Outcome;

use super::protocol::Protocol;

const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");
const DETAILS: HeaderName = HeaderName::from_static("grpc-status-details-bin");

/// The maximum number of policies that details name, because clients may accept no more than 8 KiB of headers.
const VIOLATIONS_MAX: usize = 16;

/// Writes the content type, the status and its message, which needs no percent-encoding.
pub(super) fn write_status(headers: &mut HeaderMap, protocol: Protocol, code: u8, message: &'static str) {
    headers.insert(CONTENT_TYPE, protocol.content_type());
    headers.extend(integer(u64::from(code)).map(|code| (STATUS, code)));
    headers.insert(MESSAGE, HeaderValue::from_static(message));
}

/// Writes the wait before a retry if it is known, or -1 if no wait helps.
pub(super) fn write_pushback(headers: &mut HeaderMap, wait: Wait) {
    let pushback = match wait {
        Wait::After(wait) => integer(pushback_ms(wait)),
        Wait::Never => Some(HeaderValue::from_static("-1")),
        Wait::None | Wait::Unknown => None,
    };
    headers.extend(pushback.map(|pushback| (PUSHBACK, pushback)));
}

/// Writes the encoded [`details`].
pub(super) fn write_details(headers: &mut HeaderMap, details: &[u8]) {
    let encoded = HeaderValue::try_from(STANDARD_NO_PAD.encode(details)).ok();
    headers.extend(encoded.map(|encoded| (DETAILS, encoded)));
}

/// Returns milliseconds, rounded up, within the signed 32 bits that clients parse. The smallest
/// value is 1, because 0 would mean an immediate retry.
fn pushback_ms(wait: Duration) -> u64 {
    let millis = wait.as_nanos().div_ceil(1_000_000).clamp(1, i32::MAX as u128);
    u64::try_from(millis).unwrap_or(1)
}

/// Encodes a `google.rpc.Status`. The status has a `RetryInfo` if the wait is known, and a `QuotaFailure` if policies
/// refused the request.
pub(super) fn details(code: u8, message: &str, wait: Wait, outcome: &Outcome) -> Vec<u8> {
    let mut status = Message::default();
    status.integer(1, u64::from(code));
    status.bytes(2, message.as_bytes());
    if let Some(wait) = wait.duration() {
        status.any("type.googleapis.com/google.rpc.RetryInfo", &retry_info(wait));
    }
    let mut failure = Message::default();
    for policy_status in outcome.violated_once().take(VIOLATIONS_MAX) {
        let policy = policy_status.policy();
        let Advertised { quota, window } = Advertised::new(policy.quota());
        let unit = policy.unit();
        let mut violation = Message::default();
        violation.bytes(1, format!("policy:{}", policy.name()).as_bytes());
        let exceeded = match (policy.quota().calendar_windows(), window) {
            (Some(calendar), _) => format!("{quota} {unit} per calendar {calendar} exceeded"),
            (None, Some(window)) => format!("{quota} {unit} per {window} s exceeded"),
            (None, None) => format!("{quota} {unit} exceeded"),
        };
        violation.bytes(2, exceeded.as_bytes());
        failure.message(1, &violation);
    }
    if !failure.0.is_empty() {
        status.any("type.googleapis.com/google.rpc.QuotaFailure", &failure);
    }
    status.0
}

/// Returns `RetryInfo { Duration retry_delay = 1 }` with `Duration { int64 seconds = 1; int32 nanos = 2 }`.
fn retry_info(wait: Duration) -> Message {
    let mut duration = Message::default();
    duration.integer(1, wait.as_secs());
    duration.integer(2, u64::from(wait.subsec_nanos()));
    let mut info = Message::default();
    info.message(1, &duration);
    info
}

/// A Protocol Buffers message. As in proto3, zeros and empty strings are omitted, but empty messages are not.
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

    /// Adds a detail to a status: `Any { string type_url = 1; bytes value = 2 }`.
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
    use crate::refusal::reason::Reason;

    #[test]
    fn pushback_is_in_milliseconds_rounded_up_and_capped() {
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

    /// gRPC's HTTP/2 mapping percent-encodes other bytes of `grpc-message`.
    #[test]
    fn messages_need_no_percent_encoding() {
        for reason in [Reason::Limited, Reason::Denied, Reason::KeyMissing, Reason::PeerUnknown, Reason::LimiterFailed]
        {
            assert!(reason.message().bytes().all(|byte| (0x20..0x7f).contains(&byte) && byte != b'%'));
        }
    }

    #[test]
    fn details_omit_zeros_but_keep_empty_messages() {
        let outcome = Outcome::new(crate::outcome::OutcomeKind::Limited, smallvec::SmallVec::new());
        assert_eq!(
            STANDARD_NO_PAD.encode(details(8, "", Wait::After(Duration::ZERO), &outcome)),
            "CAgaLgoodHlwZS5nb29nbGVhcGlzLmNvbS9nb29nbGUucnBjLlJldHJ5SW5mbxICCgA"
        );
    }

    #[test]
    fn large_numbers_are_encoded_as_in_prost() {
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
