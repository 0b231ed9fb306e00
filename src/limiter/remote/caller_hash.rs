//! The form in which callers' keys are stored.
//!
//! A caller's key may be a secret, so its hash is stored: `h` and 32 hexadecimal digits, the first half of the
//! SHA-256 of the limiter's secret (16 zero bytes if there is none) and the key. The hash function is public, so an
//! attacker must not be able to find a key with another caller's hash.

use sha2::{Digest, Sha256};

/// Hashes callers' keys with a secret.
#[derive(Clone, Copy)]
pub(crate) struct CallerHash([u8; 16]);

pub(crate) type Hash = [u8; 16];

impl CallerHash {
    pub(crate) fn new(secret: [u8; 16]) -> Self {
        Self(secret)
    }

    pub(crate) fn hash(&self, caller: &[u8]) -> Hash {
        let whole: [u8; 32] = Sha256::new().chain_update(self.0).chain_update(caller).finalize().into();
        whole.first_chunk().copied().unwrap_or_default() // it is longer
    }

    /// Returns a hash as text.
    pub(crate) fn digits(hash: Hash) -> [u8; 33] {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let mut text = [b'h'; 33];
        for (pair, byte) in text[1..].chunks_exact_mut(2).zip(hash) {
            let digits = [byte >> 4, byte & 15].map(|digit| DIGITS[usize::from(digit)]); // below 16
            pair.copy_from_slice(&digits);
        }
        text
    }
}
