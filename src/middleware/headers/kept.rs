//! Items that say the same again and again: with nothing remaining, while many requests are refused.
//!
//! Each thread keeps those that it wrote of late. Were they kept for all of them, every core would count the users of the
//! same few buffers.

use std::cell::RefCell;

use bytes::Bytes;
use http::HeaderValue;

/// So many are kept by each thread.
const PLACES: usize = 16;

struct Place {
    window: u64,
    /// Only once it was wanted twice in a row: where waits differ from client to client, keeping costs more than it saves.
    value: Option<HeaderValue>,
}

thread_local! {
    static KEPT: RefCell<[Place; PLACES]> = const { RefCell::new([const { Place { window: 0, value: None } }; PLACES]) };
}

/// The item that begins with `start` and tells that nothing remains within this window. `write` writes it.
#[inline]
pub(super) fn exhausted(start: &[u8], window: u64, write: impl Fn() -> Bytes) -> Option<HeaderValue> {
    let kept = KEPT.try_with(|kept| {
        let mut kept = kept.try_borrow_mut().ok()?;
        let place = kept.get_mut((window as usize).wrapping_add(start.len()) % PLACES)?; // of its lower bits
        if place.window != window {
            *place = Place { window, value: None };
            return None;
        }
        match &place.value {
            // All that follows the start is the window.
            Some(value) if value.as_bytes().starts_with(start) => Some(value.clone()),
            _ => {
                place.value = HeaderValue::from_maybe_shared(write()).ok();
                place.value.clone()
            }
        }
    });
    // Without a place: the first of its kind, or one of a thread that ends.
    kept.ok().flatten().or_else(|| HeaderValue::from_maybe_shared(write()).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exhausted_as_text(start: &str, window: u64) -> String {
        let write = || Bytes::from(format!("{start}0;t={window}"));
        exhausted(start.as_bytes(), window, write).unwrap().to_str().unwrap().to_owned()
    }

    #[test]
    fn what_is_kept_is_told_for_its_own_policy_and_window_alone() {
        for _ in 0..3 {
            // Of starts of one length, and of windows a round apart, all in one place.
            for window in [5, 5 + PLACES as u64, 5, 5] {
                for start in ["\"a\";r=", "\"b\";r=", "\"a\";r="] {
                    assert_eq!(exhausted_as_text(start, window), format!("{start}0;t={window}"));
                }
            }
        }
    }
}
