//! fred's values as ours.

use bytes::Bytes;
use fred::types::Value as FredValue;

use crate::limiter::redis::value::Value;

pub(super) fn of(value: FredValue) -> Value {
    match value {
        FredValue::Null => Value::Nil,
        FredValue::Boolean(is) => Value::Integer(is.into()),
        FredValue::Integer(number) => Value::Integer(number),
        FredValue::Double(number) => Value::Bytes(Bytes::from(number.to_string())),
        FredValue::String(text) => Value::Bytes(text.into_inner()),
        FredValue::Bytes(bytes) => Value::Bytes(bytes),
        FredValue::Queued => Value::Bytes(Bytes::from_static(b"QUEUED")),
        FredValue::Array(values) => Value::Array(values.into_iter().map(of).collect()),
        // Only RESP3 has these, and no script of ours answers so.
        FredValue::Map(map) => Value::Array(
            map.inner().into_iter().flat_map(|(key, value)| [Value::Bytes(key.into_bytes()), of(value)]).collect(),
        ),
    }
}
