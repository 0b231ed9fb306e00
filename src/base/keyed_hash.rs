//! A hash with a secret. Nobody without the secret can compute the hash. All processes, versions and builds compute the
//! same hash.
//!
//! A hash is the first half of the SHA-256 of the secret and the bytes. With only this half, nobody can compute
//! the hash of the same bytes followed by other bytes.

use sha2::{Digest, Sha256};

/// Hashes with a secret.
#[derive(Clone, Copy)]
pub(crate) struct KeyedHash([u8; 16]);

pub(crate) type Hash = [u8; 16];

impl KeyedHash {
    pub(crate) fn new(secret: [u8; 16]) -> Self {
        Self(secret)
    }

    #[cfg(any(feature = "_redis", feature = "store"))]
    pub(crate) fn hash(&self, bytes: &[u8]) -> Hash {
        first_half(Sha256::new().chain_update(self.0).chain_update(bytes))
    }

    /// Hashes several parts, each after its length, so that no part can be mistaken for a piece of its neighbour.
    #[cfg(feature = "status")]
    pub(crate) fn hash_parts<'a>(&self, parts: impl IntoIterator<Item = &'a [u8]>) -> Hash {
        let begin = Sha256::new().chain_update(self.0);
        first_half(
            parts
                .into_iter()
                .fold(begin, |hash, part| hash.chain_update((part.len() as u64).to_be_bytes()).chain_update(part)),
        )
    }

    /// Returns a hash as text: `h` and 32 hexadecimal digits.
    #[cfg(any(feature = "_redis", feature = "store"))]
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

fn first_half(hash: Sha256) -> Hash {
    let whole: [u8; 32] = hash.finalize().into();
    whole.first_chunk().copied().unwrap_or_default() // it is longer
}

#[cfg(all(test, feature = "status", feature = "store"))]
mod tests {
    use super::*;

    /// Processes of other builds have to compute the same, so the values are those of another program: the first 16
    /// bytes of `printf ... | sha256sum`.
    #[test]
    fn keyed_hash_is_the_same_in_every_build() {
        let hash = KeyedHash::new([7; 16]);
        assert_eq!(hash.hash(b"ab"), 0x2548_27b7_001c_b439_1a02_3c1c_2288_4528_u128.to_be_bytes());
        assert_eq!(
            hash.hash_parts([&b"a"[..], b"", b"bc"]),
            0xb503_fded_f01e_f5f4_85e4_db97_e3f6_8ab4_u128.to_be_bytes()
        );
        assert_ne!(hash.hash_parts([&b"ab"[..], b"c"]), hash.hash_parts([&b"a"[..], b"bc"]));
        assert_ne!(hash.hash(b"ab"), KeyedHash::new([8; 16]).hash(b"ab"));
    }
}
