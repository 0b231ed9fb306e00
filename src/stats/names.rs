//! What stands for a key: its fingerprint, and the name that the application gives it.

use std::hash::{BuildHasher, RandomState};

use crate::key::Key;

/// The longest name in bytes.
const NAME_MAX: usize = 128;

/// Names a key, or says that it must not be named.
pub(super) type Reveal = dyn Fn(&Key) -> Option<String> + Send + Sync;

pub(super) struct Names {
    /// The secret that fingerprints are made with: new in each process, so that an address cannot be found by trying
    /// all.
    secret: RandomState,
    reveal: Option<Box<Reveal>>,
}

impl Names {
    pub(super) fn new(reveal: Option<Box<Reveal>>) -> Self {
        Self { secret: RandomState::new(), reveal }
    }

    /// Returns the fingerprint of a key.
    pub(super) fn fingerprint(&self, key: &Key) -> u64 {
        self.secret.hash_one(key)
    }

    /// Returns whether the application names keys.
    pub(super) fn reveals(&self) -> bool {
        self.reveal.is_some()
    }

    /// Returns the name that the application gives to a key, cut to its bound. It is the application's code: do not
    /// call it under a lock.
    pub(super) fn name(&self, key: &Key) -> Option<Box<str>> {
        let name = self.reveal.as_ref()?(key)?;
        Some(cut(&name, NAME_MAX).into())
    }
}

/// Returns the first eight hex digits of a fingerprint.
pub(super) fn short_fingerprint(fingerprint: u64) -> String {
    format!("{:08x}", fingerprint >> 32)
}

/// Returns the beginning of a text, at most so many bytes.
pub(super) fn cut(text: &str, max: usize) -> &str {
    let end = (0..=max.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    text.get(..end).unwrap_or_default()
}
