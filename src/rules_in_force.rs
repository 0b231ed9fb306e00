//! The rules of a file that are in force, for operators.

use std::fmt;
use std::sync::Arc;

use crate::base::time::Timestamp;

/// Identifies the [rules](crate#features) that are in force in this process. Two processes have the same rules if their
/// [`hash`](Self::hash) values are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RulesInForce {
    /// The number of times that the rules were replaced in this process, or made again with other settings of
    /// operators.
    pub version: u64,
    /// A hash of the rules' text with 48 bits, so that a metric can hold it exactly.
    pub hash: u64,
    /// The time of the calendar at which the rules with this text came into force. Operators' settings for the rules,
    /// such as an override, do not change it.
    pub loaded_at: Timestamp,
}

impl RulesInForce {
    /// Makes the facts about a text that comes into force.
    #[cfg(feature = "rules")]
    pub(crate) fn of_text(version: u64, text: &[u8], loaded_at: Timestamp) -> Self {
        Self { version, hash: hash(text), loaded_at }
    }
}

/// Returns at any time which rules are in force. A layer with rules of a file passes a [`RulesReader`] to its observer
/// by [`Observer::on_rules`](crate::observe::Observer::on_rules).
#[derive(Clone)]
pub struct RulesReader {
    /// The address of the rules.
    identity: usize,
    read: Arc<dyn Fn() -> Option<RulesInForce> + Send + Sync>,
}

impl RulesReader {
    pub(crate) fn new(identity: usize, read: impl Fn() -> Option<RulesInForce> + Send + Sync + 'static) -> Self {
        Self { identity, read: Arc::new(read) }
    }

    /// Returns which rules are in force now. Returns `None` if the rules and all their layers were dropped.
    #[must_use]
    pub fn read(&self) -> Option<RulesInForce> {
        (self.read)()
    }

    /// Returns whether both readers read the same rules. An observer of several layers then keeps only one of the
    /// readers.
    #[must_use]
    pub fn is_of_same(&self, other: &Self) -> bool {
        self.identity == other.identity
    }
}

impl fmt::Debug for RulesReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RulesReader").field(&self.read()).finish()
    }
}

/// Hashes a text with FNV-1a of 64 bits, folded to 48 bits. The hash of a text is the same in every process and
/// version.
#[cfg(any(feature = "rules", feature = "fleet", test))]
pub(crate) fn hash(text: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
    let hash = text.iter().fold(0xcbf2_9ce4_8422_2325, step);
    (hash >> 48) ^ (hash & ((1 << 48) - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_of_a_text_is_the_same_everywhere() {
        // FNV-1a of 64 bits: cbf29ce484222325 for nothing, af63dc4c8601ec8c for "a".
        assert_eq!(hash(b""), 0x9ce4_8422_2325 ^ 0xcbf2);
        assert_eq!(hash(b"a"), 0xdc4c_8601_ec8c ^ 0xaf63);
        assert!(hash(&[7; 1_000]) < 1 << 48);
    }
}
