//! The key of a request: a short byte string.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Bytes that fit without the heap; longer keys are boxed.
const INLINE: usize = 38;

/// Says whose allowance is charged: a short byte string, made from addresses, integers, text, bytes
/// and tuples of them.
///
/// Two keys are equal if and only if they have the same parts in the same order. Each part is
/// written with its kind and its length, so `("ab", "c")` is not `("a", "bc")`, and the text `"7"`
/// is not the number `7`.
///
/// * Tuples are flattened: `(("a", "b"), "c")` makes the key of `("a", ("b", "c"))`. `()` has no
///   part, so `("a", ())` makes the key of `"a"`.
/// * The Rust type is not part of the key: a `String` makes the key of its text, and `7_u64` that
///   of `7_i64`.
///
/// Up to 38 bytes stay inside the key (an address, an integer, a text of 36 bytes); longer ones
/// take one allocation.
///
/// ```
/// use std::net::{IpAddr, Ipv4Addr};
/// use tower_ratelimit::Key;
///
/// let by_address = Key::of(IpAddr::V4(Ipv4Addr::LOCALHOST));
/// let by_user_and_path = Key::of((7_u64, "/search"));
/// assert_ne!(by_address, by_user_and_path);
/// assert_ne!(Key::of(("ab", "c")), Key::of(("a", "bc")));
/// ```
#[derive(Clone)]
pub struct Key(Repr);

// Aligned to whole words, the tag too. A key is copied right after it was written, and store
// forwarding stalls if a word is read that was written byte by byte.
#[derive(Clone)]
#[repr(u64)]
enum Repr {
    Inline(Inline),
    Heap(Box<[u8]>),
}

#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Inline {
    bytes: [u8; INLINE],
    len: u16,
}

/// What a part of a key was made from. It is written before the part's length.
#[derive(Clone, Copy)]
#[repr(u8)]
enum Kind {
    Bytes = 1,
    Text = 2,
    Unsigned = 3,
    Signed = 4,
    V4 = 5,
    V6 = 6,
    Flag = 7,
    Absent = 8,
    Keyless = 9,
    /// A client whose address the trusted proxy does not report.
    Unnamed = 10,
    /// A client whose address the trusted proxy reports in a form that cannot be read.
    Unreadable = 11,
    /// A client that sends several values where one is expected.
    Ambiguous = 12,
}

impl Key {
    /// Returns the one key of a limit that all requests share.
    #[must_use]
    pub const fn global() -> Self {
        Self(Repr::Inline(Inline { bytes: [0; INLINE], len: 0 }))
    }

    /// Returns the key shared by all requests without a key. No [`IntoKey`] makes an equal one.
    pub(crate) fn keyless() -> Self {
        single(Kind::Keyless, &[])
    }

    /// Returns the key shared by all clients of `proxy` whose addresses are not reported.
    pub(crate) fn unnamed_client(proxy: Option<IpAddr>) -> Self {
        Self::unknown_client(Kind::Unnamed, proxy)
    }

    /// Returns the key shared by all clients of `proxy` whose addresses cannot be read.
    pub(crate) fn unreadable_client(proxy: Option<IpAddr>) -> Self {
        Self::unknown_client(Kind::Unreadable, proxy)
    }

    fn unknown_client(kind: Kind, proxy: Option<IpAddr>) -> Self {
        match proxy {
            None => single(kind, &[]),
            Some(IpAddr::V4(address)) => single(kind, &address.octets()),
            Some(IpAddr::V6(address)) => single(kind, &address.octets()),
        }
    }

    /// Returns the key shared by all clients that send several values where one is expected.
    pub(crate) fn ambiguous() -> Self {
        single(Kind::Ambiguous, &[])
    }

    /// Returns whether a part of the key stands for an address that cannot be read.
    pub(crate) fn is_unreadable(&self) -> bool {
        self.kinds().any(|kind| kind == Kind::Unreadable as u8)
    }

    /// Returns whether a part of the key stands for several values.
    pub(crate) fn is_ambiguous(&self) -> bool {
        self.kinds().any(|kind| kind == Kind::Ambiguous as u8)
    }

    /// Iterates over the kinds of the key's parts.
    fn kinds(&self) -> impl Iterator<Item = u8> {
        let mut rest = self.as_bytes();
        std::iter::from_fn(move || {
            let [kind, short, after @ ..] = rest else { return None };
            let (length, after) = match short {
                &u8::MAX => {
                    let (long, after) = after.split_first_chunk()?;
                    (usize::try_from(u64::from_le_bytes(*long)).ok()?, after)
                }
                short => (usize::from(*short), after),
            };
            rest = after.get(length..)?;
            Some(*kind)
        })
    }

    /// Makes a key from `value`. Returns `None` if the value is `None` or `Err`.
    ///
    /// The value may be borrowed, so a closure need not copy it:
    /// `|request| Key::of((request.uri.path(), request.method.as_str()))`.
    #[inline]
    #[must_use]
    pub fn of(value: impl IntoKey) -> Option<Self> {
        value.into_key()
    }

    /// Returns the bytes of the key: each part with its kind and its length.
    #[inline]
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        match &self.0 {
            Repr::Inline(Inline { bytes, len }) => bytes.get(..usize::from(*len)).unwrap_or_default(),
            Repr::Heap(bytes) => bytes,
        }
    }

    /// Returns the address, if the key was made from an address alone.
    pub(crate) fn address(&self) -> Option<IpAddr> {
        let (head, part) = self.as_bytes().split_at_checked(2)?;
        match head[0] {
            kind if kind == Kind::V4 as u8 => Some(IpAddr::from(<[u8; 4]>::try_from(part).ok()?)),
            kind if kind == Kind::V6 as u8 => Some(IpAddr::from(<[u8; 16]>::try_from(part).ok()?)),
            _ => None,
        }
    }

    fn write(&mut self, more: &[u8]) {
        match &mut self.0 {
            Repr::Inline(Inline { bytes, len }) => {
                let start = usize::from(*len);
                if let Some(room) = bytes.get_mut(start..start + more.len()) {
                    room.copy_from_slice(more);
                    *len += more.len() as u16; // at most INLINE
                } else {
                    let mut heap = Vec::with_capacity(start + more.len());
                    heap.extend_from_slice(&bytes[..start]);
                    heap.extend_from_slice(more);
                    self.0 = Repr::Heap(heap.into_boxed_slice());
                }
            }
            Repr::Heap(bytes) => {
                let mut heap = std::mem::take(bytes).into_vec();
                heap.extend_from_slice(more);
                *bytes = heap.into_boxed_slice();
            }
        }
    }

    fn part(&mut self, kind: Kind, bytes: &[u8]) {
        match u8::try_from(bytes.len()) {
            Ok(len) if len < u8::MAX => self.write(&[kind as u8, len]),
            _ => {
                let mut head = [0; 10];
                head[0] = kind as u8;
                head[1] = u8::MAX;
                head[2..].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
                self.write(&head);
            }
        }
        self.write(bytes);
    }

    /// Appends the parts of another key, for tuples.
    fn append(&mut self, other: &Self) {
        self.write(other.as_bytes());
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.as_bytes() == other.as_bytes()
    }
}

impl Eq for Key {}

impl Hash for Key {
    /// Hashes a short key in words of 16 bytes, whatever its length: each word is one multiplication in the limiter in memory
    /// (`benches/instructions.rs`). The bytes beyond the key's length are zeros, and its parts say how long they are.
    #[inline(always)] // a call would keep the hash in memory
    fn hash<H: Hasher>(&self, state: &mut H) {
        let word = |bytes: &[u8]| bytes.try_into().map_or(0, u128::from_le_bytes);
        match &self.0 {
            Repr::Inline(Inline { bytes, len }) => {
                state.write_u128(word(&bytes[..16]));
                if *len > 16 {
                    state.write_u128(word(&bytes[16..32]));
                }
                if *len > 32 {
                    state.write(&bytes[32..]);
                }
            }
            Repr::Heap(bytes) => state.write(bytes),
        }
    }
}

impl fmt::Debug for Key {
    /// Prints only the key's length, because keys are often secrets or personal data.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({} bytes)", self.as_bytes().len())
    }
}

/// A value that a key can be made from.
///
/// Implemented for addresses, integers, text, bytes, `bool`, `()` (the shared key), header values
/// and methods, tuples of up to six of them, and for `Option` and `Result`.
///
/// `None` and `Err` mean that the key is missing; see
/// [`Rule::missing_key`](crate::Rule::missing_key). They do not say that a rule does not apply.
/// That is what [`Rule::when`](crate::Rule::when) is for.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be used as a rate-limit key",
    note = "return an address, an integer, text, bytes, a tuple of these, or an `Option` of one",
    note = "a value that is borrowed from the request is made into a key by `Key::of(..)`"
)]
pub trait IntoKey {
    /// Returns the key, or `None` if it is missing.
    fn into_key(self) -> Option<Key>;
}

/// Makes a key of one part.
#[inline]
fn single(kind: Kind, part: &[u8]) -> Key {
    let mut bytes = [0; INLINE];
    match (bytes.get_mut(2..2 + part.len()), u8::try_from(part.len())) {
        (Some(room), Ok(len)) => {
            room.copy_from_slice(part);
            (bytes[0], bytes[1]) = (kind as u8, len);
            Key(Repr::Inline(Inline { bytes, len: u16::from(len) + 2 }))
        }
        _ => long(kind, part),
    }
}

#[cold]
fn long(kind: Kind, part: &[u8]) -> Key {
    let mut key = Key::global();
    key.part(kind, part);
    key
}

impl IntoKey for Key {
    #[inline]
    fn into_key(self) -> Option<Key> {
        Some(self)
    }
}

impl IntoKey for () {
    #[inline]
    fn into_key(self) -> Option<Key> {
        Some(Key::global())
    }
}

impl<T: IntoKey> IntoKey for Option<T> {
    #[inline]
    fn into_key(self) -> Option<Key> {
        self.and_then(IntoKey::into_key)
    }
}

impl<T: IntoKey, E> IntoKey for Result<T, E> {
    #[inline]
    fn into_key(self) -> Option<Key> {
        self.ok().and_then(IntoKey::into_key)
    }
}

impl<T: IntoKey + Clone> IntoKey for &T {
    #[inline]
    fn into_key(self) -> Option<Key> {
        self.clone().into_key()
    }
}

impl IntoKey for &str {
    #[inline]
    fn into_key(self) -> Option<Key> {
        Some(single(Kind::Text, self.as_bytes()))
    }
}

impl IntoKey for &[u8] {
    #[inline]
    fn into_key(self) -> Option<Key> {
        Some(single(Kind::Bytes, self))
    }
}

macro_rules! borrowed {
    ($as:ty: $($type:ty),+) => {$(
        impl IntoKey for $type {
            #[inline]
            fn into_key(self) -> Option<Key> {
                let borrowed: &$as = self.as_ref();
                borrowed.into_key()
            }
        }
    )+};
}
borrowed!(str: String, std::borrow::Cow<'_, str>, std::sync::Arc<str>);
borrowed!([u8]: Vec<u8>, bytes::Bytes);

impl<const N: usize> IntoKey for [u8; N] {
    #[inline]
    fn into_key(self) -> Option<Key> {
        self.as_slice().into_key()
    }
}

impl IntoKey for bool {
    #[inline]
    fn into_key(self) -> Option<Key> {
        Some(single(Kind::Flag, &[u8::from(self)]))
    }
}

/// Makes the key of an address. It has the bytes that [`single`] would write, but is written in
/// whole words: hashing reads it in words at once, and store forwarding would stall on bytes
/// written one by one.
#[inline]
fn address(kind: Kind, len: u8, octets: u128) -> Option<Key> {
    let first = (octets as u64) << 16 | u64::from(len) << 8 | kind as u64; // the lowest six octets
    let words = [first, (octets >> 48) as u64, (octets >> 112) as u64]; // the next eight, and the last two
    let mut bytes = [0; INLINE];
    for (room, word) in bytes.chunks_exact_mut(8).zip(words) {
        room.copy_from_slice(&word.to_le_bytes());
    }
    Some(Key(Repr::Inline(Inline { bytes, len: u16::from(len) + 2 })))
}

impl IntoKey for Ipv4Addr {
    #[inline]
    fn into_key(self) -> Option<Key> {
        address(Kind::V4, 4, u128::from(u32::from_le_bytes(self.octets())))
    }
}

impl IntoKey for Ipv6Addr {
    #[inline]
    fn into_key(self) -> Option<Key> {
        address(Kind::V6, 16, u128::from_le_bytes(self.octets()))
    }
}

impl IntoKey for IpAddr {
    #[inline]
    fn into_key(self) -> Option<Key> {
        // Both families share one return, so that the key is written once.
        let (kind, len, octets) = match self {
            Self::V4(address) => (Kind::V4, 4, u128::from(u32::from_le_bytes(address.octets()))),
            Self::V6(address) => (Kind::V6, 16, u128::from_le_bytes(address.octets())),
        };
        address(kind, len, octets)
    }
}

#[inline]
fn unsigned(number: u128) -> Key {
    match u64::try_from(number) {
        Ok(short) => single(Kind::Unsigned, &short.to_le_bytes()),
        Err(_) => single(Kind::Unsigned, &number.to_le_bytes()),
    }
}

#[inline]
fn signed(number: i128) -> Key {
    match (u128::try_from(number), i64::try_from(number)) {
        (Ok(positive), _) => unsigned(positive),
        (Err(_), Ok(short)) => single(Kind::Signed, &short.to_le_bytes()),
        (Err(_), Err(_)) => single(Kind::Signed, &number.to_le_bytes()),
    }
}

macro_rules! integers {
    ($write:ident as $wide:ty: $($int:ty)*) => {$(
        impl IntoKey for $int {
            /// Returns the key of the number, which is the same for every integer type.
            #[inline]
            fn into_key(self) -> Option<Key> {
                Some($write(self as $wide))
            }
        }
    )*};
}
integers!(unsigned as u128: u8 u16 u32 u64 u128 usize);
integers!(signed as i128: i8 i16 i32 i64 i128 isize);

/// A part of a tuple that may be absent without making the whole key missing.
///
/// ```
/// use tower_ratelimit::key::{self, OrAbsent};
/// use tower_ratelimit::Key;
///
/// let token: Option<&str> = None;
/// assert!(Key::of(("api", token)).is_none());
/// assert!(Key::of(("api", OrAbsent(token))).is_some());
/// ```
#[derive(Clone, Copy, Debug)]
#[expect(clippy::exhaustive_structs, reason = "a plain wrapper, complete by nature")]
pub struct OrAbsent<T>(
    /// The part, if there is one.
    pub Option<T>,
);

impl<T: IntoKey> IntoKey for OrAbsent<T> {
    #[inline]
    fn into_key(self) -> Option<Key> {
        self.0.into_key().or_else(|| Some(single(Kind::Absent, &[])))
    }
}

macro_rules! tuples {
    ($($($name:ident)+;)*) => {$(
        impl<$($name: IntoKey),+> IntoKey for ($($name,)+) {
            #[expect(non_snake_case, reason = "the type parameters name the parts")]
            #[inline]
            fn into_key(self) -> Option<Key> {
                let ($($name,)+) = self;
                let mut key = Key::global();
                $(key.append(&$name.into_key()?);)+
                Some(key)
            }
        }
    )*};
}
tuples! { A; A B; A B C; A B C D; A B C D E; A B C D E F; }

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A value of any shape that a key can be made from.
    #[derive(Clone, Debug)]
    enum Value {
        Bytes(Vec<u8>),
        Text(String),
        Number(i128, u8),
        Address(IpAddr),
        Flag(bool),
        Absent,
        Unit,
        Tuple(Vec<Self>),
    }

    #[derive(Debug, PartialEq)]
    enum Part {
        Bytes(Vec<u8>),
        Text(String),
        Number(i128),
        Address(IpAddr),
        Flag(bool),
        Absent,
    }

    impl Value {
        fn parts(&self) -> Vec<Part> {
            vec![match self.clone() {
                Self::Bytes(bytes) => Part::Bytes(bytes),
                Self::Text(text) => Part::Text(text),
                Self::Number(number, _) => Part::Number(number),
                Self::Address(address) => Part::Address(address),
                Self::Flag(flag) => Part::Flag(flag),
                Self::Absent => Part::Absent,
                Self::Unit => return Vec::new(),
                Self::Tuple(values) => return values.iter().flat_map(Self::parts).collect(),
            }]
        }

        fn key(&self) -> Option<Key> {
            match self {
                Self::Bytes(bytes) => Key::of(bytes.clone()),
                Self::Text(text) => Key::of(text),
                Self::Number(number, 0) if u8::try_from(*number).is_ok() => Key::of(*number as u8),
                Self::Number(number, 1) if i8::try_from(*number).is_ok() => Key::of(*number as i8),
                Self::Number(number, 2) if u64::try_from(*number).is_ok() => Key::of(*number as u64),
                Self::Number(number, 3) if i64::try_from(*number).is_ok() => Key::of(*number as i64),
                Self::Number(number, 4) if u128::try_from(*number).is_ok() => Key::of(*number as u128),
                Self::Number(number, _) => Key::of(*number),
                Self::Address(address) => Key::of(*address),
                Self::Flag(flag) => Key::of(*flag),
                Self::Absent => Key::of(OrAbsent::<u8>(None)),
                Self::Unit => Key::of(()),
                Self::Tuple(values) => match &values.iter().map(Self::key).collect::<Vec<_>>()[..] {
                    [a] => Key::of((a,)),
                    [a, b] => Key::of((a, b)),
                    [a, b, c] => Key::of((a, b, c)),
                    _ => unreachable!("tuples of one to three"),
                },
            }
        }
    }

    /// From few values, so that equal ones are met often.
    fn value() -> impl Strategy<Value = Value> {
        let numbers = prop::sample::select(vec![0, 1, 2, -1, 255, i128::from(i64::MIN), 1 << 64, i128::MIN]);
        let leaf = prop_oneof![
            prop::collection::vec(prop::sample::select(vec![0, 1, 2, 255]), 0..3).prop_map(Value::Bytes),
            "[ab\\x01\\x02]{0,3}".prop_map(Value::Text),
            Just(Value::Text("a".repeat(300))),
            (numbers, 0..6_u8).prop_map(|(number, form)| Value::Number(number, form)),
            prop::sample::select(vec!["1.1.1.1", "::", "::1"]).prop_map(|text| Value::Address(text.parse().unwrap())),
            any::<bool>().prop_map(Value::Flag),
            Just(Value::Absent),
            Just(Value::Unit),
        ];
        leaf.prop_recursive(3, 8, 3, |inner| prop::collection::vec(inner, 1..4).prop_map(Value::Tuple))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(5_000))]

        #[test]
        fn keys_are_equal_exactly_if_their_parts_are(first in value(), second in value()) {
            prop_assert_eq!(first.key() == second.key(), first.parts() == second.parts());
            let first_of_both = Value::Tuple(vec![first.clone(), second.clone()]);
            let second_of_both = Value::Tuple(vec![second, first]);
            prop_assert_eq!(
                first_of_both.key() == second_of_both.key(),
                first_of_both.parts() == second_of_both.parts()
            );
        }

        #[test]
        fn kinds_are_those_of_the_parts(value in value()) {
            let key = value.key().unwrap();
            prop_assert_eq!(key.kinds().count(), value.parts().len());
            prop_assert!(!key.is_unreadable() && !key.is_ambiguous());
            prop_assert!(Key::of((key.clone(), Key::ambiguous())).unwrap().is_ambiguous());
            prop_assert!(Key::of((Key::unreadable_client(None), key)).unwrap().is_unreadable());
        }
    }

    #[test]
    fn tuples_are_flattened() {
        assert_eq!(Key::of((("a", "b"), "c")), Key::of(("a", ("b", "c"))));
        assert_eq!(Key::of(("a", ())), Key::of("a"));
        assert_ne!(Key::of(("a", OrAbsent::<u8>(None))), Key::of("a"));
    }

    #[test]
    fn number_is_one_key_in_every_type() {
        let seven = Key::of(7_u64);
        assert!(
            [Key::of(7_u8), Key::of(7_i32), Key::of(7_i64), Key::of(7_u128), Key::of(7_isize)]
                .iter()
                .all(|k| *k == seven)
        );
        assert_eq!(Key::of(-7_i8), Key::of(-7_i128));
        assert_ne!(Key::of(-1_i64), Key::of(u64::MAX));
        assert_ne!(Key::of("7"), seven);
    }
}
