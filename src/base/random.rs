//! Numbers that look random, and secrets that no client can guess.

#[cfg(any(feature = "_redis", feature = "store", feature = "fleet"))]
use std::hash::{BuildHasher, RandomState};

/// Applies the finalizer of SplitMix64 to the seed. If two seeds differ in few bits, the results differ
/// in about half of their bits.
pub(crate) fn mixed(seed: u64) -> u64 {
    let mut x = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A hasher with a secret, from [`hasher`].
#[cfg(any(feature = "_redis", feature = "store"))]
pub(crate) type Hasher = foldhash::quality::SeedableRandomState;

/// Returns a hasher with a secret of its own.
#[cfg(any(feature = "_redis", feature = "store"))]
pub(crate) fn hasher() -> Hasher {
    #[cfg(all(test, feature = "_redis"))]
    if let Some(number) = seeded::next() {
        return Hasher::with_seed(number, foldhash::SharedSeed::global_fixed());
    }
    Hasher::random()
}

/// Returns a number that no client can guess.
#[cfg(any(feature = "_redis", feature = "store", feature = "fleet"))]
pub(crate) fn secret() -> u64 {
    #[cfg(all(test, feature = "_redis"))]
    if let Some(number) = seeded::next() {
        return number;
    }
    // The standard library's hasher takes its random keys from the operating system.
    RandomState::new().hash_one("secret")
}

/// Secrets that a simulation chooses, so that the simulation can be repeated.
#[cfg(all(test, feature = "_redis"))]
pub(crate) mod seeded {
    use std::cell::Cell;

    thread_local! {
        static STATE: Cell<Option<u64>> = const { Cell::new(None) };
    }

    /// Derives this thread's secrets from `seed` until the returned guard is dropped.
    pub(crate) fn by(seed: u64) -> Seeded {
        STATE.set(Some(seed));
        Seeded(())
    }

    pub(crate) struct Seeded(());

    impl Drop for Seeded {
        fn drop(&mut self) {
            STATE.set(None);
        }
    }

    pub(super) fn next() -> Option<u64> {
        let state = STATE.get()?.wrapping_add(1);
        STATE.set(Some(state));
        Some(super::mixed(state))
    }
}
