//! The waits that gRPC servers report: `grpc-retry-pushback-ms` of gRPC's proposal A6, and the
//! `RetryInfo` in `grpc-status-details-bin`.

use std::time::Duration;

use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};

/// The maximum number of bytes of encoded details that are read. gRPC's clients allow 8 KiB for all headers.
const DETAILS_MAX: usize = 16 * 1024;

/// The decoder for base64 (RFC 4648). The decoder accepts input with or without padding and with any padding
/// bits, as RFC 9651 and gRPC's HTTP/2 mapping require.
pub(super) const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_allow_trailing_bits(true)
        .with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Returns the wait of `grpc-retry-pushback-ms`. Returns `None` if the value is negative or cannot be
/// read, which means that the client must not retry.
pub(super) fn pushback(value: &str) -> Option<Duration> {
    let millis: i32 = value.trim().parse().ok()?;
    Some(Duration::from_millis(u64::try_from(millis).ok()?))
}

/// Returns the `retry_delay` of the `google.rpc.RetryInfo` in an encoded `google.rpc.Status`.
pub(super) fn retry_delay(encoded: &[u8]) -> Option<Duration> {
    let encoded = encoded.trim_ascii();
    if encoded.len() > DETAILS_MAX {
        return None;
    }
    let status = BASE64.decode(encoded).ok()?;
    // Status { repeated Any details = 3 }
    let details = MessageRest(&status).filter_map(|field| field.bytes(3));
    // Any { string type_url = 1; bytes value = 2 }
    let info = details.filter_map(|any| {
        let type_url = MessageRest(any).filter_map(|field| field.bytes(1)).last()?;
        type_url
            .ends_with(b"/google.rpc.RetryInfo")
            .then(|| MessageRest(any).filter_map(|field| field.bytes(2)).last())?
    });
    // RetryInfo { Duration retry_delay = 1 }
    let delays = info.filter_map(|info| MessageRest(info).filter_map(|field| field.bytes(1)).last());
    delays.filter_map(duration).max()
}

/// Parses `Duration { int64 seconds = 1; int32 nanos = 2 }`. Returns `None` if the duration is negative
/// or invalid.
fn duration(message: &[u8]) -> Option<Duration> {
    let integer = |number| MessageRest(message).filter_map(|field| field.integer(number)).last().unwrap_or(0);
    let seconds = i64::try_from(integer(1)).ok()?; // a negative one has the highest bit
    let nanos = u32::try_from(integer(2)).ok().filter(|nanos| *nanos < 1_000_000_000)?;
    Some(Duration::new(u64::try_from(seconds).ok()?, nanos))
}

/// The part of a Protocol Buffers message that has still to be read. The iterator ends at the first
/// field that cannot be read.
struct MessageRest<'a>(&'a [u8]);

/// A field of a message.
struct Field<'a> {
    number: u64,
    value: FieldValue<'a>,
}

enum FieldValue<'a> {
    Integer(u64),
    Bytes(&'a [u8]),
    /// A number of fixed width. The messages that are read here have no such field.
    Fixed,
}

impl<'a> Field<'a> {
    fn bytes(&self, number: u64) -> Option<&'a [u8]> {
        match self.value {
            FieldValue::Bytes(bytes) if self.number == number => Some(bytes),
            _ => None,
        }
    }

    fn integer(&self, number: u64) -> Option<u64> {
        match self.value {
            FieldValue::Integer(integer) if self.number == number => Some(integer),
            _ => None,
        }
    }
}

impl<'a> Iterator for MessageRest<'a> {
    type Item = Field<'a>;

    fn next(&mut self) -> Option<Self::Item> {
        let tag = self.varint()?;
        let value = match tag & 7 {
            0 => FieldValue::Integer(self.varint()?),
            1 => self.take(8).map(|_| FieldValue::Fixed)?,
            2 => {
                let length = usize::try_from(self.varint()?).ok()?;
                FieldValue::Bytes(self.take(length)?)
            }
            5 => self.take(4).map(|_| FieldValue::Fixed)?,
            _ => return None, // groups, which proto3 does not have
        };
        Some(Field { number: tag >> 3, value })
    }
}

impl<'a> MessageRest<'a> {
    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let (byte, rest) = self.0.split_first()?;
            self.0 = rest;
            value |= u64::from(byte & 0x7f) << shift; // only one bit of the tenth byte counts
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Encodes a field of bytes, below 128 of them.
    fn bytes(number: u8, value: &[u8]) -> Vec<u8> {
        [&[number << 3 | 2, value.len() as u8], value].concat()
    }

    fn any(type_url: &str, value: &[u8]) -> Vec<u8> {
        bytes(3, &[bytes(1, type_url.as_bytes()), bytes(2, value)].concat())
    }

    fn retry_info(duration: &[u8]) -> Vec<u8> {
        any("type.googleapis.com/google.rpc.RetryInfo", &bytes(1, duration))
    }

    fn read(status: &[u8]) -> Option<u128> {
        retry_delay(BASE64.encode(status).as_bytes()).map(|delay| delay.as_nanos())
    }

    #[test]
    fn retry_info_is_found_among_other_fields() {
        let other = any("type.googleapis.com/google.rpc.QuotaFailure", &bytes(1, &[8, 5]));
        let unknown =
            [bytes(15, b"text"), vec![8 << 3 | 5, 1, 2, 3, 4], vec![9 << 3 | 1, 1, 2, 3, 4, 5, 6, 7, 8]].concat();
        let status = [vec![8, 8], bytes(2, b"message"), unknown, other, retry_info(&[8, 5, 16, 7])].concat();
        assert_eq!(read(&status), Some(5_000_000_007));
        for length in 0..status.len() {
            assert_eq!(read(&status[..length]), None, "cut at {length}");
        }
        let longer = [status, retry_info(&[8, 6]), retry_info(&[8, 4])].concat();
        assert_eq!(read(&longer), Some(6_000_000_000));
    }

    #[test]
    fn delay_that_protobuf_forbids_is_none() {
        assert_eq!(read(&retry_info(&[16, 0xff, 0x93, 0xeb, 0xdc, 3])), Some(999_999_999));
        assert_eq!(read(&retry_info(&[16, 0x80, 0x94, 0xeb, 0xdc, 3])), None, "a second of nanoseconds");
        let minus_one = [[0xff; 9].as_slice(), &[1]].concat();
        assert_eq!(read(&retry_info(&[&[8], minus_one.as_slice()].concat())), None);
        assert_eq!(read(&retry_info(&[&[16], minus_one.as_slice()].concat())), None);
        assert_eq!(read(&retry_info(&[&[8], [0xff; 10].as_slice(), &[1]].concat())), Some(0), "a varint has ten bytes");
        assert_eq!(read(&any("type.googleapis.com/other.RetryInfo", &bytes(1, &[8, 5]))), None);
    }

    #[test]
    fn details_up_to_their_bound_are_read() {
        let delay = retry_info(&[8, 5]);
        // Three bytes become four letters.
        let longest = DETAILS_MAX / 4 * 3;
        let of = |length: usize| {
            let text = length - delay.len() - 3;
            let begin = vec![15 << 3 | 2, 0x80 | (text & 0x7f) as u8, (text >> 7) as u8];
            [begin, vec![b'x'; text], delay.clone()].concat()
        };
        assert_eq!((read(&of(longest)), read(&of(longest + 1))), (Some(5_000_000_000), None));
    }
}
