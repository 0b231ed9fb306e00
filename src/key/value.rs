//! The key of a request: a short byte string.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::error::turns_text;

/// The number of bytes that a key can hold without the heap. Longer keys are boxed.
const INLINE: usize = 38;

/// Says whose allowance is charged. A key is a short byte string, made from addresses, integers, text,
/// bytes and tuples of these.
///
/// Two keys are equal if and only if they have the same parts in the same order. Each part is stored
/// with its kind and its length. So `("ab", "c")` is not `("a", "bc")`, and the text `"7"` is not the
/// number `7`.
///
/// * Tuples are flattened: `(("a", "b"), "c")` makes the same key as `("a", ("b", "c"))`. The key of
///   [`key::global`](crate::key::global) has no parts, so a tuple of this key and `"a"` makes the same
///   key as `"a"`.
/// * The Rust type is not part of the key. A `String` makes the same key as its text, and `7_u64` the
///   same key as `7_i64`.
///
/// A key may be a secret. So a key has no `Display`, and its `Debug` prints only its length.
/// [`display`](Self::display) returns its text.
///
/// A key of up to 38 bytes, such as an address, an integer, or a text of 36 bytes, needs no allocation.
/// A longer key needs one allocation.
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

// All fields, including the tag, are aligned to whole words. A key is copied right after it was written, and reading
// a word that was written byte by byte stalls on store forwarding.
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

/// The kind of a part of a key. The kind is stored before the part's length.
#[derive(Clone, Copy)]
#[repr(u8)]
pub(super) enum PartKind {
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
    /// A key of all clients that sent several values where one value is expected.
    Ambiguous = 12,
}

impl Key {
    /// Returns the key under which all requests share one allowance.
    #[must_use]
    pub const fn global() -> Self {
        Self(Repr::Inline(Inline { bytes: [0; INLINE], len: 0 }))
    }

    /// Returns the key that all requests without a key share. No [`IntoKey`] makes an equal key.
    pub(crate) fn keyless() -> Self {
        single(PartKind::Keyless, &[])
    }

    /// Returns the key that the unknown clients of `proxy` share. `kind` is the reason why the clients'
    /// addresses are unknown.
    pub(super) fn unknown_client(kind: PartKind, proxy: Option<IpAddr>) -> Self {
        match proxy {
            None => single(kind, &[]),
            Some(IpAddr::V4(address)) => single(kind, &address.octets()),
            Some(IpAddr::V6(address)) => single(kind, &address.octets()),
        }
    }

    pub(crate) fn ambiguous() -> Self {
        single(PartKind::Ambiguous, &[])
    }

    /// Returns whether a part of the key stands for an address that cannot be read.
    pub(crate) fn is_unreadable(&self) -> bool {
        self.kinds().any(|kind| kind == PartKind::Unreadable as u8)
    }

    /// Returns whether a part of the key stands for clients that their proxy did not report.
    pub(crate) fn is_unnamed(&self) -> bool {
        self.kinds().any(|kind| kind == PartKind::Unnamed as u8)
    }

    /// Returns whether a part of the key stands for several values.
    pub(crate) fn is_ambiguous(&self) -> bool {
        self.kinds().any(|kind| kind == PartKind::Ambiguous as u8)
    }

    /// Returns whether the key was made from only a text.
    #[cfg(all(feature = "rules", feature = "fleet"))]
    pub(crate) fn is_text(&self) -> bool {
        self.kinds().eq([PartKind::Text as u8])
    }

    /// Iterates over the kinds of the key's parts.
    fn kinds(&self) -> impl Iterator<Item = u8> {
        self.parts().map(|(kind, _)| kind)
    }

    /// Iterates over the key's parts with their kinds.
    fn parts(&self) -> impl Iterator<Item = (u8, &[u8])> {
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
            let (part, after) = after.split_at_checked(length)?;
            rest = after;
            Some((*kind, part))
        })
    }

    /// Returns the key's parts as text, for people who operate the service: `192.0.2.1, /search`.
    ///
    /// Text that could be read as another kind of part is quoted. No part contains control characters or characters
    /// that change the direction of text. A key that is not made from values is written in parentheses: `(all
    /// requests)` is the [global](Self::global) key.
    ///
    /// A key may be a secret or personal data, such as a token or an address. Do not write keys to logs
    /// or metrics unchanged.
    ///
    /// ```
    /// use tower_ratelimit::Key;
    ///
    /// let key = Key::of((7, "7", "alice", "a, b")).unwrap();
    /// assert_eq!(key.display().to_string(), r#"7, "7", alice, "a, b""#);
    /// ```
    #[must_use]
    pub fn display(&self) -> impl fmt::Display + '_ {
        KeyText(self)
    }

    /// Makes a key from `value`. Returns `None` if the value is `None` or `Err`.
    ///
    /// The value may be borrowed, so a closure need not copy the value: `|request|
    /// Key::of((request.uri.path(), request.method.as_str()))`.
    #[inline(always)]
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

    /// Returns the address if the key was made from only an address.
    #[must_use]
    pub fn address(&self) -> Option<IpAddr> {
        let (head, part) = self.as_bytes().split_at_checked(2)?;
        match head[0] {
            kind if kind == PartKind::V4 as u8 => Some(IpAddr::from(<[u8; 4]>::try_from(part).ok()?)),
            kind if kind == PartKind::V6 as u8 => Some(IpAddr::from(<[u8; 16]>::try_from(part).ok()?)),
            _ => None,
        }
    }

    /// Makes a key from the bytes that [`as_bytes`](Self::as_bytes) returned. Returns `None` if no key has
    /// these bytes.
    #[cfg(feature = "fleet")]
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut key = Self::global();
        key.append(&Self(Repr::Heap(bytes.into())));
        let length: usize = key.parts().map(|(_, part)| part.len() + if part.len() < 255 { 2 } else { 10 }).sum();
        (length == bytes.len()).then_some(key)
    }

    /// Joins the parts of many keys into one key, like a tuple. The running time is linear in the total
    /// length.
    #[cfg(feature = "rules")]
    pub(crate) fn joined(keys: impl Iterator<Item = Self>) -> Self {
        let mut bytes = Vec::new();
        keys.for_each(|key| bytes.extend_from_slice(key.as_bytes()));
        let mut key = Self::global();
        key.append(&Self(Repr::Heap(bytes.into_boxed_slice())));
        key
    }

    /// Appends the parts of another key, for tuples.
    fn append(&mut self, other: &Self) {
        if let Repr::Inline(Inline { bytes, len }) = &mut self.0 {
            let (start, more) = (usize::from(*len), other.as_bytes());
            if let Some(room) = bytes.get_mut(start..start + more.len()) {
                room.copy_from_slice(more);
                *len += more.len() as u16; // at most INLINE
                return;
            }
        }
        self.0 = Repr::Heap([self.as_bytes(), other.as_bytes()].concat().into_boxed_slice());
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.as_bytes() == other.as_bytes()
    }
}

impl Eq for Key {}

impl Hash for Key {
    /// Hashes a short key in words of 16 bytes. Each word takes one multiplication in the limiter in memory
    /// (`benches/instructions`). The bytes after the end of the key are zeros. The zeros are unambiguous,
    /// because each part contains its length.
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

struct KeyText<'a>(&'a Key);

impl fmt::Display for KeyText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut is_first = true;
        for (kind, part) in self.0.parts() {
            if !std::mem::replace(&mut is_first, false) {
                f.write_str(", ")?;
            }
            part_text(kind, part, f)?;
        }
        if is_first { f.write_str("(all requests)") } else { Ok(()) }
    }
}

/// Writes a part of a key.
fn part_text(kind: u8, part: &[u8], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let of_proxy = |what: &str, f: &mut fmt::Formatter<'_>| match address(part) {
        Some(proxy) => write!(f, "({what} of proxy {proxy})"),
        None => write!(f, "({what})"),
    };
    match kind {
        kind if kind == PartKind::V4 as u8 || kind == PartKind::V6 as u8 => match address(part) {
            Some(address) => write!(f, "{address}"),
            None => Ok(()),
        },
        kind if kind == PartKind::Unsigned as u8 => {
            let long = part.first_chunk().map(|long| u128::from_le_bytes(*long));
            let short = part.first_chunk().map(|short| u128::from(u64::from_le_bytes(*short)));
            write!(f, "{}", long.or(short).unwrap_or_default())
        }
        kind if kind == PartKind::Signed as u8 => {
            let long = part.first_chunk().map(|long| i128::from_le_bytes(*long));
            let short = part.first_chunk().map(|short| i128::from(i64::from_le_bytes(*short)));
            write!(f, "{}", long.or(short).unwrap_or_default())
        }
        kind if kind == PartKind::Flag as u8 => write!(f, "{}", part.first() == Some(&1)),
        kind if kind == PartKind::Absent as u8 => f.write_str("(absent)"),
        kind if kind == PartKind::Keyless as u8 => f.write_str("(no key)"),
        kind if kind == PartKind::Unnamed as u8 => of_proxy("unknown client", f),
        kind if kind == PartKind::Unreadable as u8 => of_proxy("unreadable client", f),
        kind if kind == PartKind::Ambiguous as u8 => f.write_str("(several values)"),
        _ => match std::str::from_utf8(part) {
            Ok(text) if is_plain(text) => f.write_str(text),
            Ok(text) => write!(f, "{text:?}"),
            Err(_) => write!(f, "b\"{}\"", part.escape_ascii()),
        },
    }
}

/// Returns whether text needs no quotes, because it cannot be read as another kind of part.
fn is_plain(text: &str) -> bool {
    let is_odd = |c: char| c.is_control() || turns_text(c) || matches!(c, '"' | '\\' | '\u{2028}' | '\u{2029}');
    let is_other = text.parse::<i128>().is_ok()
        || text.parse::<u128>().is_ok()
        || text.parse::<IpAddr>().is_ok()
        || matches!(text, "true" | "false")
        || text.starts_with('(');
    !text.is_empty() && text.trim() == text && !text.contains(", ") && !text.contains(is_odd) && !is_other
}

fn address(part: &[u8]) -> Option<IpAddr> {
    match part.len() {
        4 => Some(IpAddr::from(<[u8; 4]>::try_from(part).ok()?)),
        16 => Some(IpAddr::from(<[u8; 16]>::try_from(part).ok()?)),
        _ => None,
    }
}

impl fmt::Debug for Key {
    /// Prints only the key's length, because keys are often secrets or personal data.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({} bytes)", self.as_bytes().len())
    }
}

/// A value from which a key can be made.
///
/// Implemented for addresses, integers, text, bytes, `bool`, header values and methods. Also
/// implemented for tuples of up to six such values, and for `Option` and `Result`.
///
/// `None` and `Err` mean that the key is missing; see
/// [`Rule::missing_key`](crate::Rule::missing_key). To say that a rule does not apply, use
/// [`Rule::when`](crate::Rule::when).
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be used as a rate-limit key",
    note = "return an address, an integer, text, bytes, a tuple of these, or an `Option` of one",
    note = "for a type of your own, return the field that identifies the client, or implement `IntoKey`",
    note = "an extractor cannot be `async`: let middleware in front insert the value into the request's extensions, and \
            use `key::extension`",
    note = "for a value that is borrowed from the request, return `Key::of(..)`",
    note = "for a `Uuid`, return `.as_u128()`; for one key for all requests, use `key::global()`",
    note = "a closure that ends in `;` returns `()`: leave the semicolon out"
)]
pub trait IntoKey {
    /// Returns the key, or `None` if it is missing.
    fn into_key(self) -> Option<Key>;
}

/// Makes a key with one part. A short key is written in whole words, because hashing reads the key in words right
/// after the writing. If the bytes were written in other pieces, hashing would stall on store forwarding.
#[inline(always)]
fn single(kind: PartKind, part: &[u8]) -> Key {
    if part.len() > INLINE - 2 {
        return Key(Repr::Heap(long(kind, part)));
    }
    let head = (part.len() as u64) << 8 | kind as u64; // two bytes
    let words = [head | word(part, 0) << 16, word(part, 6), word(part, 14), word(part, 22), word(part, 30)];
    let mut bytes = [0; INLINE];
    for (room, word) in bytes.chunks_mut(8).zip(words) {
        room.copy_from_slice(&word.to_le_bytes()[..room.len()]);
    }
    Key(Repr::Inline(Inline { bytes, len: part.len() as u16 + 2 }))
}

/// Returns eight bytes of a part from `start` on as a little-endian word. Bytes after the end of the part are
/// zeros.
#[inline(always)]
fn word(part: &[u8], start: usize) -> u64 {
    let Some(rest) = part.get(start..).filter(|rest| !rest.is_empty()) else { return 0 };
    match (rest.first_chunk(), part.last_chunk()) {
        (Some(all), _) => u64::from_le_bytes(*all),
        (None, Some(last)) => u64::from_le_bytes(*last) >> (64 - 8 * rest.len()),
        (None, None) => rest.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)),
    }
}

#[cold]
fn long(kind: PartKind, part: &[u8]) -> Box<[u8]> {
    let length = (part.len() as u64).to_le_bytes();
    match u8::try_from(part.len()) {
        Ok(len) if len < u8::MAX => [&[kind as u8, len], part].concat().into(),
        _ => [&[kind as u8, u8::MAX], &length[..], part].concat().into(),
    }
}

impl IntoKey for Key {
    #[inline]
    fn into_key(self) -> Option<Key> {
        Some(self)
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
    #[inline(always)]
    fn into_key(self) -> Option<Key> {
        Some(single(PartKind::Text, self.as_bytes()))
    }
}

impl IntoKey for &[u8] {
    #[inline(always)]
    fn into_key(self) -> Option<Key> {
        Some(single(PartKind::Bytes, self))
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
        Some(single(PartKind::Flag, &[u8::from(self)]))
    }
}

impl IntoKey for Ipv4Addr {
    #[inline(always)]
    fn into_key(self) -> Option<Key> {
        Some(single(PartKind::V4, &self.octets()))
    }
}

impl IntoKey for Ipv6Addr {
    #[inline(always)]
    fn into_key(self) -> Option<Key> {
        Some(single(PartKind::V6, &self.octets()))
    }
}

impl IntoKey for IpAddr {
    #[inline(always)]
    fn into_key(self) -> Option<Key> {
        match self {
            Self::V4(address) => address.into_key(),
            Self::V6(address) => address.into_key(),
        }
    }
}

#[inline]
fn unsigned(number: u128) -> Key {
    match u64::try_from(number) {
        Ok(short) => single(PartKind::Unsigned, &short.to_le_bytes()),
        Err(_) => single(PartKind::Unsigned, &number.to_le_bytes()),
    }
}

#[inline]
fn signed(number: i128) -> Key {
    match (u128::try_from(number), i64::try_from(number)) {
        (Ok(positive), _) => unsigned(positive),
        (Err(_), Ok(short)) => single(PartKind::Signed, &short.to_le_bytes()),
        (Err(_), Err(_)) => single(PartKind::Signed, &number.to_le_bytes()),
    }
}

macro_rules! integers {
    ($write:ident as $wide:ty: $($int:ty)*) => {$(
        impl IntoKey for $int {
            /// Returns the key of the number. Equal numbers of different integer types have one key.
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
#[expect(clippy::exhaustive_structs, reason = "a plain wrapper never gets a second field")]
pub struct OrAbsent<T>(
    /// The part, if there is one.
    pub Option<T>,
);

impl<T: IntoKey> IntoKey for OrAbsent<T> {
    #[inline]
    fn into_key(self) -> Option<Key> {
        self.0.into_key().or_else(|| Some(single(PartKind::Absent, &[])))
    }
}

macro_rules! tuples {
    ($($($name:ident)+;)*) => {$(
        impl<$($name: IntoKey),+> IntoKey for ($($name,)+) {
            #[expect(non_snake_case, reason = "the names of the variables are those of the type parameters")]
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
                Self::Unit => Some(Key::global()),
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
        #![proptest_config(crate::base::sampling::config(5_000))]

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
            prop_assert!(Key::of((Key::unknown_client(PartKind::Unreadable, None), key)).unwrap().is_unreadable());
        }
    }

    #[test]
    fn tuples_are_flattened() {
        assert_eq!(Key::of((("a", "b"), "c")), Key::of(("a", ("b", "c"))));
        assert_eq!(Key::of(("a", Key::global())), Key::of("a"));
        assert_ne!(Key::of(("a", OrAbsent::<u8>(None))), Key::of("a"));
    }

    #[test]
    fn key_is_shown_as_its_parts() {
        let text = |key: Option<Key>| key.unwrap().display().to_string();
        for (key, expected) in [
            (Some(Key::global()), "(all requests)"),
            (Key::of(("192.0.2.1".parse::<IpAddr>().unwrap(), "/search")), "192.0.2.1, /search"),
            (Key::of("2001:db8::".parse::<IpAddr>().unwrap()), "2001:db8::"),
            (Key::of("192.0.2.1"), "\"192.0.2.1\""),
            (Key::of(u128::MAX.to_string()), &format!("\"{}\"", u128::MAX)),
            (Key::of((u64::MAX, u128::MAX, -7, i128::MIN)), &format!("{}, {}, -7, {}", u64::MAX, u128::MAX, i128::MIN)),
            (Key::of(("-7", true, "true", OrAbsent::<u8>(None))), "\"-7\", true, \"true\", (absent)"),
            (Key::of(("a b", "a, b", "", " a", "(no key)")), "a b, \"a, b\", \"\", \" a\", \"(no key)\""),
            (Key::of("\u{1b}[2J\n\u{202e}"), "\"\\u{1b}[2J\\n\\u{202e}\""),
            (Key::of(("a\u{2067}", "\u{200f}")), "\"a\\u{2067}\", \"\\u{200f}\""),
            (Key::of(&b"\xffa"[..]), "b\"\\xffa\""),
            (Some(Key::keyless()), "(no key)"),
            (Some(Key::ambiguous()), "(several values)"),
            (Some(Key::unknown_client(PartKind::Unnamed, None)), "(unknown client)"),
            (
                Some(Key::unknown_client(PartKind::Unreadable, Some(Ipv4Addr::LOCALHOST.into()))),
                "(unreadable client of proxy 127.0.0.1)",
            ),
        ] {
            assert_eq!(text(key), expected);
        }
        let long = "a".repeat(1_000);
        assert_eq!(text(Key::of(&long)), long);
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
