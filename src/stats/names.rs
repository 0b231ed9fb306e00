//! The stand-ins for a key: its fingerprint, and the name that the application gives it. The key itself is kept only
//! for operators who may act on it.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::key::Key;

/// The longest name in bytes.
const NAME_MAX: usize = 128;

/// The longest key in bytes that is kept.
const KEY_MAX: usize = 512;

/// Returns the name of a key, or `None` if the key must not be named.
pub(super) type Reveal = dyn Fn(&Key) -> Option<String> + Send + Sync;

pub(super) struct KeyNames {
    /// The secret of the fingerprints. It is new in each process, so that nobody can find an address by trying all.
    secret: RandomState,
    reveal: Option<Box<Reveal>>,
    /// Whether keys are kept.
    keeps: AtomicBool,
}

/// The part of a listed key that is kept.
#[derive(Clone, Default)]
pub(super) struct KnownKey {
    /// `None` if the key must not be named.
    pub(super) name: Option<Box<str>>,
    /// `None` if keys are not kept, or if this one is too long.
    pub(super) key: Option<Arc<Key>>,
}

impl KeyNames {
    pub(super) fn new(reveal: Option<Box<Reveal>>) -> Self {
        Self { secret: RandomState::new(), reveal, keeps: AtomicBool::new(false) }
    }

    /// Keeps the keys that are listed from now on.
    pub(super) fn keep_keys(&self) {
        self.keeps.store(true, Ordering::Relaxed);
    }

    /// Returns the fingerprint of a key.
    pub(super) fn fingerprint(&self, key: &Key) -> u64 {
        self.secret.hash_one(key)
    }

    /// Returns whether keys have names or are kept, beside their fingerprints.
    pub(super) fn knows(&self) -> bool {
        self.reveal.is_some() || self.keeps.load(Ordering::Relaxed)
    }

    /// Returns the parts of a key that are kept. It calls the application's code, so do not call it under a lock.
    pub(super) fn known(&self, key: &Key) -> KnownKey {
        let is_kept = self.keeps.load(Ordering::Relaxed) && key.as_bytes().len() <= KEY_MAX;
        KnownKey { name: self.name(key), key: is_kept.then(|| Arc::new(key.clone())) }
    }

    /// Returns the name that the application gives to a key, cut to its bound. It calls the application's code, so
    /// do not call it under a lock.
    pub(super) fn name(&self, key: &Key) -> Option<Box<str>> {
        let name = self.reveal.as_ref()?(key)?;
        Some(cut(&name, NAME_MAX).into())
    }
}

/// Returns the first eight hex digits of a fingerprint.
pub(super) fn short_fingerprint(fingerprint: u64) -> String {
    format!("{:08x}", fingerprint >> 32)
}

/// Returns the beginning of a text, at most `max` bytes.
pub(crate) fn cut(text: &str, max: usize) -> &str {
    let end = (0..=max.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    text.get(..end).unwrap_or_default()
}
