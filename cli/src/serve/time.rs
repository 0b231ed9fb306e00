//! Times as people write them.

use std::time::Duration;

/// Reads a time, such as `500ms`.
pub(crate) fn time(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|_| "write it like `500ms`, `5s`, `1h` or `1d`".to_owned())
}
