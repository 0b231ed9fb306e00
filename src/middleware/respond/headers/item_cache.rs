//! A cache of draft 11 items with nothing remaining, which repeat while many requests are refused.
//!
//! Each thread has a cache of its own. With a shared one, the cores would contend for the reference
//! counts of a few buffers.

use std::cell::RefCell;

use bytes::Bytes;
use http::HeaderValue;

/// The number of items that each thread keeps.
const PLACES: usize = 16;

struct Place {
    window: u64,
    /// `None` until an item is wanted twice in a row: if the waits differ from client to client,
    /// caching costs more than it saves.
    value: Option<HeaderValue>,
}

thread_local! {
    static CACHE: RefCell<[Place; PLACES]> = const { RefCell::new([const { Place { window: 0, value: None } }; PLACES]) };
}

/// Returns the item that begins with `start` and ends with `0;t=` and the window. `write` writes it
/// on a cache miss.
#[inline]
pub(super) fn exhausted(start: &[u8], window: u64, write: impl Fn() -> Bytes) -> Option<HeaderValue> {
    let written = || HeaderValue::from_maybe_shared(write()).ok();
    let cached = CACHE.try_with(|cache| {
        let mut cache = cache.try_borrow_mut().ok()?;
        let place = cache.get_mut((window as usize).wrapping_add(start.len()) % PLACES)?; // the lower bits suffice
        if place.window != window {
            *place = Place { window, value: None };
            return None;
        }
        // Only the window follows the start.
        if !place.value.as_ref().is_some_and(|value| value.as_bytes().starts_with(start)) {
            place.value = written();
        }
        place.value.clone()
    });
    cached.ok().flatten().or_else(written)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exhausted_as_text(start: &str, window: u64) -> String {
        let write = || Bytes::from(format!("{start}0;t={window}"));
        exhausted(start.as_bytes(), window, write).unwrap().to_str().unwrap().to_owned()
    }

    #[test]
    fn cached_item_belongs_to_its_policy_and_window() {
        for _ in 0..3 {
            // Starts of one length, and windows that share a place.
            for window in [5, 5 + PLACES as u64, 5, 5] {
                for start in ["\"a\";r=", "\"b\";r=", "\"a\";r="] {
                    assert_eq!(exhausted_as_text(start, window), format!("{start}0;t={window}"));
                }
            }
        }
    }
}
