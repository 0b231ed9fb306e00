//! The stored key of a state: `prefix:2:{caller}:4:name`, where 2 is the format's version and 4 the length of the
//! policy's name. With groups, the stored key is `prefix:2:{group}:4:name:caller`. The key of a concurrency limit has
//! a `p` before the length, because the units of a concurrency limit are counted apart from the units of a rate
//! with the same name.
//!
//! A cluster hashes the part between the braces. So all policies of one caller are in one slot, and one call
//! can decide them together.
//!
//! A caller's key may be a secret, so its hash is stored: `h` and 32 hexadecimal digits. They are the first half of a
//! SHA-256, whose input is the limiter's secret (16 zero bytes if there is none) and the key. The hash function is
//! public, so an attacker must not be able to find a key with another caller's hash. With `readable_keys`, keys are
//! stored as they are, after a `k`.
//!
//! Different (prefix, policy name, caller) triples have different stored keys: a prefix has no
//! brace, the length of the name is stored, and a caller's key that has a closing brace is hashed.

use std::fmt;

use super::connection;
use super::error::RedisError;
use crate::base::keyed_hash::{Hash, KeyedHash};
use crate::event::StoreErrorKind;
use crate::key::Key;
use crate::policy::Policy;
use bytes::Bytes;

/// The longest key of a caller, in bytes, that is stored readable if keys are readable. Longer keys are
/// hashed.
const CLEAR_MAX: usize = 128;

/// The number of slots of a cluster.
pub(super) const SLOTS: u16 = 16_384;

/// A stored key, and its slot in a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StoredKey {
    pub(super) bytes: Bytes,
    pub(super) slot: u16,
}

/// The form in which callers' keys are stored.
#[derive(Clone, Copy)]
pub(super) enum CallerKeys {
    /// Keys are stored as hashes with this secret, which is zero unless it was set.
    Hashed([u8; 16]),
    /// As they are.
    Readable,
}

/// Makes stored keys.
pub(super) struct KeySpace {
    /// The prefix and the format's version, up to the tag in braces.
    before: Box<str>,
    callers: CallerKeys,
    /// For each group, a number that hashes to the group's slot. The list is empty if each caller has its own
    /// slot.
    groups: Box<[u32]>,
}

impl KeySpace {
    /// # Errors
    /// Returns an error if there are no groups, or more groups than slots.
    pub(super) fn new(prefix: &str, callers: CallerKeys, groups: Option<u16>) -> Result<Self, RedisError> {
        let misconfigured = |message: String| Err(RedisError::new(StoreErrorKind::Misconfigured, message));
        let groups = match groups {
            None => Box::default(),
            Some(groups) if (1..=SLOTS).contains(&groups) => spread(groups),
            Some(groups) => {
                return misconfigured(format!(
                    "{groups} groups are not possible: use 1 to {SLOTS}, at most one for each slot"
                ));
            }
        };
        Ok(Self { before: format!("{prefix}:2:{{").into_boxed_str(), callers, groups })
    }

    /// Returns the key of the text that all processes share, `prefix:2:{fleet}`, and its slot. The caller's part of a
    /// stored key never begins with `f`.
    pub(super) fn shared_text_key(&self) -> (String, u16) {
        const TAG: &str = "fleet";
        (format!("{}{TAG}}}", self.before), connection::slot_of(TAG.as_bytes()))
    }

    /// Returns the stored key of a (policy, key) pair.
    pub(super) fn key(&self, policy: &Policy, key: &Key) -> StoredKey {
        let (name, caller) = (policy.stored_name().as_bytes(), key.as_bytes());
        let hash = self.must_hash(caller).then(|| self.hash(caller));
        let mut bytes = Vec::with_capacity(self.before.len() + name.len() + caller.len().min(CLEAR_MAX) + 48);
        bytes.extend_from_slice(self.before.as_bytes());
        let tag = bytes.len();
        let grouped = match self.groups.len() {
            0 => None,
            groups => {
                let hash = hash.unwrap_or_else(|| self.hash(caller));
                self.groups.get((u128::from_be_bytes(hash) % groups as u128) as usize) // below the number of groups
            }
        };
        match grouped {
            Some(group) => bytes.extend_from_slice(itoa::Buffer::new().format(*group).as_bytes()),
            None => write_caller(&mut bytes, caller, hash),
        }
        let slot = connection::slot_of(&bytes[tag..]);
        bytes.extend_from_slice(b"}:");
        if policy.limits_in_flight() {
            bytes.push(b'p');
        }
        bytes.extend_from_slice(itoa::Buffer::new().format(name.len()).as_bytes());
        bytes.push(b':');
        bytes.extend_from_slice(name);
        if grouped.is_some() {
            bytes.push(b':');
            write_caller(&mut bytes, caller, hash);
        }
        StoredKey { bytes: bytes.into(), slot }
    }

    fn must_hash(&self, caller: &[u8]) -> bool {
        matches!(self.callers, CallerKeys::Hashed(_)) || caller.len() > CLEAR_MAX || caller.contains(&b'}')
    }

    fn hash(&self, caller: &[u8]) -> Hash {
        let secret = match self.callers {
            CallerKeys::Hashed(secret) => secret,
            CallerKeys::Readable => Default::default(),
        };
        KeyedHash::new(secret).hash(caller)
    }
}

/// Returns a stored key for the text of an error. A caller's key that is stored in clear may be a secret, so
/// a `*` stands in its place, as in a pattern for `redis-cli --scan`.
pub(super) fn shown(stored: &[u8]) -> String {
    let caller = |at: usize| (stored.get(at) == Some(&b'k')).then_some(at + 1);
    let opens = stored.iter().position(|byte| *byte == b'{').unwrap_or(stored.len());
    let closes = stored.iter().position(|byte| *byte == b'}').unwrap_or(stored.len());
    let hidden = match caller(opens + 1) {
        Some(from) => from..closes,
        // With groups, three parts follow the tag: the name's length in digits, the name, and the caller's part.
        None => {
            let marker = usize::from(stored.get(closes + 2) == Some(&b'p'));
            let closes = closes + marker;
            let rest = stored.get(closes + 2..).unwrap_or_default();
            let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
            let length = std::str::from_utf8(&rest[..digits]).ok().and_then(|digits| digits.parse::<usize>().ok());
            let at = length.and_then(|length| (closes + 4 + digits).checked_add(length));
            at.and_then(caller).map_or(stored.len()..stored.len(), |from| from..stored.len())
        }
    };
    let star = if hidden.is_empty() { "" } else { "*" };
    let (before, after) = (stored.get(..hidden.start), stored.get(hidden.end..));
    format!("{}{star}{}", before.unwrap_or_default().escape_ascii(), after.unwrap_or_default().escape_ascii())
}

/// Writes a caller's key, or its hash.
fn write_caller(bytes: &mut Vec<u8>, caller: &[u8], hash: Option<Hash>) {
    match hash {
        Some(hash) => bytes.extend_from_slice(&KeyedHash::digits(hash)),
        None => {
            bytes.push(b'k');
            bytes.extend_from_slice(caller);
        }
    }
}

/// Returns for each group a number whose slot lies in the group's own part of the slots.
fn spread(groups: u16) -> Box<[u32]> {
    let mut numbers = vec![None; usize::from(groups)];
    let mut left = numbers.len();
    let mut candidate = 0_u32;
    while left > 0 && candidate < u32::MAX {
        let slot = connection::slot_of(candidate.to_string().as_bytes());
        let group = usize::from(slot) * numbers.len() / usize::from(SLOTS);
        if let Some(number @ None) = numbers.get_mut(group) {
            *number = Some(candidate);
            left -= 1;
        }
        candidate += 1;
    }
    numbers.into_iter().flatten().collect()
}

impl fmt::Debug for KeySpace {
    /// Leaves the secret out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeySpace")
            .field("before", &self.before)
            .field("hashed", &matches!(self.callers, CallerKeys::Hashed(_)))
            .field("groups", &self.groups.len())
            .finish()
    }
}

#[cfg(test)]
mod tests;
