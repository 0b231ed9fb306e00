//! The fingerprint of a key, and the name that the application gives it. Statistics store the fingerprint and the name
//! instead of the key. The key itself is stored only if operators may act on keys.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::key::Key;

/// The length of the longest name, in bytes.
const NAME_MAX: usize = 128;

/// The length of the longest key that is stored, in bytes.
const KEY_MAX: usize = 512;

/// Returns the name of a key, or `None` if the key must not be named.
pub(super) type Reveal = dyn Fn(&Key) -> Option<String> + Send + Sync;

pub(super) struct KeyNames {
    /// The secret of the fingerprints. Each process has a new secret, so that nobody can find the address behind a
    /// fingerprint by trying all addresses.
    secret: RandomState,
    reveal: Option<Box<Reveal>>,
    /// Whether keys are stored.
    keeps: AtomicBool,
}

/// The stored data about a listed key, in addition to its fingerprint.
#[derive(Clone, Default)]
pub(super) struct KnownKey {
    /// The name of the key, or `None` if the key must not be named.
    pub(super) name: Option<Box<str>>,
    /// The key, or `None` if keys are not stored or this key is too long.
    pub(super) key: Option<Arc<Key>>,
}

impl KnownKey {
    /// Returns whether neither the name nor the key is stored.
    pub(super) fn is_none(&self) -> bool {
        self.name.is_none() && self.key.is_none()
    }
}

impl KeyNames {
    pub(super) fn new(reveal: Option<Box<Reveal>>) -> Self {
        Self { secret: RandomState::new(), reveal, keeps: AtomicBool::new(false) }
    }

    /// Stores each key that is listed after this call.
    pub(super) fn keep_keys(&self) {
        self.keeps.store(true, Ordering::Relaxed);
    }

    /// Returns the fingerprint of a key.
    pub(super) fn fingerprint(&self, key: &Key) -> u64 {
        self.secret.hash_one(key)
    }

    /// Returns whether names or keys are stored in addition to fingerprints.
    pub(super) fn knows(&self) -> bool {
        self.reveal.is_some() || self.keeps.load(Ordering::Relaxed)
    }

    /// Returns the data about a key that is stored. The method calls the application's code, so it must not be called
    /// under a lock.
    pub(super) fn known(&self, key: &Key) -> KnownKey {
        let is_kept = self.keeps.load(Ordering::Relaxed) && key.as_bytes().len() <= KEY_MAX;
        KnownKey { name: self.name(key), key: is_kept.then(|| Arc::new(key.clone())) }
    }

    /// Returns the name that the application gives to a key, cut to 128 bytes. The method calls the application's code,
    /// so it must not be called under a lock.
    pub(super) fn name(&self, key: &Key) -> Option<Box<str>> {
        let name = self.reveal.as_ref()?(key)?;
        Some(cut(&name, NAME_MAX).into())
    }
}

/// Returns the first eight hex digits of a fingerprint.
pub(super) fn short_fingerprint(fingerprint: u64) -> String {
    format!("{:08x}", fingerprint >> 32)
}

/// Returns the beginning of a text, with at most `max` bytes.
pub(crate) fn cut(text: &str, max: usize) -> &str {
    let end = (0..=max.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    text.get(..end).unwrap_or_default()
}
