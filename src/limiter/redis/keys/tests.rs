use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::event::StoreErrorKind;
use crate::quota::Quota;

fn policy(name: &str) -> Policy {
    Policy::new(name, Quota::per_minute(1)).unwrap()
}

fn key(of: &[u8]) -> Key {
    Key::of(of).unwrap()
}

fn hashed(secret: u8, groups: Option<u16>) -> KeySpace {
    KeySpace::new("test", CallerKeys::Hashed([secret; 16]), groups).unwrap()
}

fn readable(groups: Option<u16>) -> KeySpace {
    KeySpace::new("test", CallerKeys::Readable, groups).unwrap()
}

#[test]
fn slot_groups_are_at_least_one_and_at_most_the_slots() {
    for groups in [0, SLOTS + 1] {
        let error = KeySpace::new("p", CallerKeys::Readable, Some(groups)).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured);
    }
}

/// Bytes that would tear a key apart if it were put together carelessly.
fn nasty() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(prop::sample::select(b"k{}:h12\x00\xff".to_vec()), 0..6)
}

proptest! {
    #[test]
    fn stored_keys_differ_by_prefix_policy_and_key(
        parts in prop::collection::vec(("[a1:]{1,4}", "[ -~]{1,4}", nasty()), 2..40),
        secret in any::<Option<[u8; 16]>>(),
        groups in prop::option::of(1..4_u16),
    ) {
        let mut seen: HashMap<Bytes, (String, String, Vec<u8>)> = HashMap::new();
        for (prefix, name, caller) in parts {
            let callers = secret.map_or(CallerKeys::Readable, CallerKeys::Hashed);
            let space = KeySpace::new(&prefix, callers, groups).unwrap();
            let stored = space.key(&policy(&name), &key(&caller));
            prop_assert_eq!(stored.slot, connection::slot_of(&stored.bytes), "the slot is the whole key's");
            prop_assert_eq!(stored.slot, space.key(&policy("other"), &key(&caller)).slot, "one caller, one slot");
            let own = (prefix, name, caller);
            let before = seen.insert(stored.bytes, own.clone());
            prop_assert!(before.is_none_or(|before| before == own));
        }
    }
}

#[test]
fn long_keys_are_stored_as_their_hash() {
    let long = vec![b'x'; 1 << 20];
    let mut other = long.clone();
    other[500_000] = b'y';
    for space in [readable(None), hashed(0, None)] {
        let stored = space.key(&policy("p"), &key(&long));
        assert!(stored.bytes.len() < 80);
        assert_ne!(stored, space.key(&policy("p"), &key(&other)));
    }
}

#[test]
fn keys_are_hashed_by_default_and_readable_by_choice() {
    let name = b"api-key-7";
    let is_clear = |stored: &StoredKey| stored.bytes.windows(5).any(|part| part == b"api-k");
    for groups in [None, Some(16)] {
        let stored =
            [hashed(0, groups), hashed(1, groups), hashed(2, groups)].map(|space| space.key(&policy("p"), &key(name)));
        assert!(!stored.iter().any(is_clear));
        assert!(stored[0] != stored[1] && stored[1] != stored[2], "each secret has hashes of its own");
        assert!(is_clear(&readable(groups).key(&policy("p"), &key(name))));
    }
    assert!(!format!("{:?}", hashed(77, None)).contains("77"), "the secret is not printed");
}

#[test]
fn the_hash_is_the_documented_one() {
    let stored = hashed(0, None).key(&policy("p"), &key(b"api-key-7"));
    // Another program computed it: the SHA-256 of 16 zero bytes and the key's bytes, which are its
    // kind, its length and "api-key-7".
    assert_eq!(stored.bytes.escape_ascii().to_string(), "test:2:{h0499981011b3e8477761769ef4081483}:1:p");
}

#[test]
fn groups_are_spread_evenly_over_the_slots() {
    for groups in [1, 3, 16, 1_000, SLOTS] {
        let space = readable(Some(groups));
        let mut slots: Vec<u32> =
            space.groups.iter().map(|group| u32::from(connection::slot_of(group.to_string().as_bytes()))).collect();
        slots.sort_unstable();
        assert_eq!(slots.len(), usize::from(groups));
        for (at, slot) in slots.iter().enumerate() {
            let share = u32::from(SLOTS) / u32::from(groups);
            assert_eq!(slot * u32::from(groups) / u32::from(SLOTS), at as u32, "one in each part of {share} slots");
        }
        let slots: std::collections::HashSet<u16> =
            (0..1_000_u64).map(|caller| space.key(&policy("p"), &Key::of(caller).unwrap()).slot).collect();
        assert!(slots.len() >= usize::from(groups).min(500), "{} slots of {groups} groups are used", slots.len());
    }
}

#[test]
fn error_shows_stored_keys_but_no_caller_in_clear() {
    for groups in [None, Some(16)] {
        for (name, caller) in [("p", "sk-live"), ("k:7:k{", "k"), ("h}", "a:b{c"), ("4:name", "h00"), ("p", "has a }")]
        {
            let (policy, caller) = (policy(name), key(caller.as_bytes()));
            let stored = hashed(7, groups).key(&policy, &caller).bytes;
            assert_eq!(shown(&stored), stored.escape_ascii().to_string());
            let stored = readable(groups).key(&policy, &caller).bytes;
            let clear = if caller.as_bytes().contains(&b'}') { &b""[..] } else { caller.as_bytes() };
            let shown = shown(&stored);
            if clear.is_empty() {
                assert_eq!(shown, stored.escape_ascii().to_string());
            } else {
                let (before, after) = shown.split_once("k*").unwrap();
                let whole = [before.as_bytes(), b"k", clear, after.as_bytes()].concat();
                assert_eq!(whole, stored.as_ref());
            }
        }
    }
}
