//! Parsing the values of headers that the response already has.
//!
//! Lists follow RFC 9651 and the rules of the drafts. The text of an item is kept as it is, because
//! it may have parameters that this crate does not know.

use smallvec::SmallVec;

use super::content::List;

pub(super) type Items<'a> = SmallVec<[Item<'a>; 4]>;

/// A member of a list, with the two parameters that are compared.
#[derive(Clone, Copy, Debug)]
pub(super) struct Item<'a> {
    pub(super) raw: &'a [u8],
    /// The policy's name in its quotes, which has only one spelling. For nameless items, the whole
    /// item.
    pub(super) name: &'a [u8],
    units: u64,
    seconds: Option<u64>,
}

impl Item<'_> {
    /// Returns whether this limit allows fewer units, or equally many in a longer time.
    pub(super) fn is_stricter(&self, other: &Self) -> bool {
        let strictness = |item: &Self| (std::cmp::Reverse(item.units), item.seconds.unwrap_or(0));
        strictness(self) > strictness(other)
    }
}

/// Parses the items of a list that is spread over these lines. Returns none if a line is not such a
/// list.
pub(super) fn items<'a>(lines: &[&'a [u8]], list: List) -> Items<'a> {
    let mut items = Items::new();
    if lines.iter().any(|line| parse(line, list, &mut items).is_none()) {
        items.clear();
    }
    items
}

/// Returns `remaining` of draft 07's dictionary. Returns `None` if the value is not that dictionary.
pub(super) fn dictionary_remaining(value: &[u8]) -> Option<u64> {
    let mut remaining = None;
    let mut has_limit = false;
    for member in value.split(|byte| *byte == b',') {
        let member = member.trim_ascii();
        let equals = member.iter().position(|byte| *byte == b'=')?;
        let (key, number) = (member.get(..equals)?, member.get(equals + 1..)?);
        match key {
            b"limit" => has_limit = integer(number).is_some(),
            b"remaining" => remaining = integer(number),
            _ => {}
        }
    }
    remaining.filter(|_| has_limit)
}

/// Returns the whole part of a decimal number.
pub(super) fn whole_part(value: &[u8]) -> Option<u64> {
    let value = value.trim_ascii();
    match value.iter().position(|byte| *byte == b'.') {
        Some(point) => {
            let decimals = value.get(point + 1..)?;
            if decimals.is_empty() || !decimals.iter().all(u8::is_ascii_digit) {
                return None;
            }
            integer(value.get(..point)?)
        }
        None => integer(value),
    }
}

/// Parses an integer of up to 15 digits, without a sign.
pub(super) fn integer(value: &[u8]) -> Option<u64> {
    if value.is_empty() || value.len() > 15 || !value.iter().all(u8::is_ascii_digit) {
        return None;
    }
    Some(value.iter().fold(0, |n, digit| n * 10 + u64::from(digit - b'0')))
}

/// Parses one line and appends its items. Returns `None` if it is not such a list.
fn parse<'a>(line: &'a [u8], list: List, items: &mut Items<'a>) -> Option<()> {
    let mut rest = Cursor(line);
    rest.skip(|byte| byte == b' ');
    if rest.is_empty() {
        return Some(()); // an empty line has no items
    }
    loop {
        items.push(item(&mut rest, list)?);
        rest.skip(is_space);
        if rest.is_empty() {
            return Some(());
        }
        rest.expect(b',')?;
        rest.skip(is_space);
        if rest.is_empty() {
            return None; // a comma at the end
        }
    }
}

fn item<'a>(rest: &mut Cursor<'a>, list: List) -> Option<Item<'a>> {
    let start = rest.0;
    let (units_key, seconds_key): (&[u8], &[u8]) = match list {
        List::Limits => (b"r", b"t"),
        List::Policies => (b"q", b"w"),
        List::Nameless => (b"", b"w"),
    };
    let mut units = None;
    if list == List::Nameless {
        units = Some(integer(rest.take(|byte| byte.is_ascii_digit()))?);
    } else {
        string(rest)?;
    }
    let name = rest.since(start);
    let mut seconds = None;
    while rest.next_is(b';') {
        rest.skip(|byte| byte == b' ');
        let key = key(rest)?;
        let value = if rest.next_is(b'=') { bare_item(rest)? } else { b"?1" };
        // If a key occurs twice, the last value counts.
        if key == units_key {
            units = Some(integer(value)?);
        } else if key == seconds_key {
            seconds = Some(integer(value).filter(|seconds| list == List::Limits || *seconds > 0)?);
        }
    }
    let raw = rest.since(start);
    Some(Item { raw, name: if list == List::Nameless { raw } else { name }, units: units?, seconds })
}

/// Parses the key of a parameter.
fn key<'a>(rest: &mut Cursor<'a>) -> Option<&'a [u8]> {
    let key = rest.take(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"_-.*".contains(&byte));
    key.first().filter(|first| first.is_ascii_lowercase() || **first == b'*')?;
    Some(key)
}

/// Parses any bare item of RFC 9651, and returns its text.
fn bare_item<'a>(rest: &mut Cursor<'a>) -> Option<&'a [u8]> {
    let start = rest.0;
    match rest.0.first()? {
        b'"' => string(rest)?,
        b':' => {
            rest.expect(b':')?;
            let length = rest.take(|byte| byte.is_ascii_alphanumeric() || b"+/".contains(&byte)).len();
            let padding = rest.take(|byte| byte == b'=').len();
            if padding > 2 || (length + padding) % 4 != 0 {
                return None;
            }
            rest.expect(b':')?;
        }
        b'?' => {
            rest.expect(b'?')?;
            if !rest.next_is(b'0') && !rest.next_is(b'1') {
                return None;
            }
        }
        b'-' | b'0'..=b'9' => number(rest)?,
        b'*' | b'A'..=b'Z' | b'a'..=b'z' => {
            rest.skip(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~:/".contains(&byte));
        }
        b'@' => {
            rest.expect(b'@')?;
            rest.next_is(b'-');
            if !(1..=15).contains(&rest.take(|byte| byte.is_ascii_digit()).len()) {
                return None;
            }
        }
        _ => return None, // display strings too, because these headers have none
    }
    Some(rest.since(start))
}

/// Parses an integer of up to 15 digits, or a decimal of up to 12 digits and 3 decimals.
fn number(rest: &mut Cursor<'_>) -> Option<()> {
    rest.next_is(b'-');
    let whole = rest.take(|byte| byte.is_ascii_digit()).len();
    let decimals = if rest.next_is(b'.') { Some(rest.take(|byte| byte.is_ascii_digit()).len()) } else { None };
    match decimals {
        None => (1..=15).contains(&whole),
        Some(decimals) => (1..=12).contains(&whole) && (1..=3).contains(&decimals),
    }
    .then_some(())
}

fn string(rest: &mut Cursor<'_>) -> Option<()> {
    rest.expect(b'"')?;
    loop {
        rest.skip(|byte| (0x20..0x7f).contains(&byte) && byte != b'"' && byte != b'\\');
        if rest.next_is(b'"') {
            return Some(());
        }
        rest.expect(b'\\')?;
        if !rest.next_is(b'"') && !rest.next_is(b'\\') {
            return None;
        }
    }
}

fn is_space(byte: u8) -> bool {
    byte == b' ' || byte == b'\t'
}

/// The rest of the text that is being parsed.
struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn take(&mut self, accepts: impl Fn(u8) -> bool) -> &'a [u8] {
        let end = self.0.iter().position(|byte| !accepts(*byte)).unwrap_or(self.0.len());
        let (taken, rest) = self.0.split_at(end);
        self.0 = rest;
        taken
    }

    fn skip(&mut self, accepts: impl Fn(u8) -> bool) {
        self.take(accepts);
    }

    fn next_is(&mut self, byte: u8) -> bool {
        match self.0.split_first() {
            Some((first, rest)) if *first == byte => {
                self.0 = rest;
                true
            }
            _ => false,
        }
    }

    fn expect(&mut self, byte: u8) -> Option<()> {
        self.next_is(byte).then_some(())
    }

    /// Returns what was parsed since the cursor stood at `start`.
    fn since(&self, start: &'a [u8]) -> &'a [u8] {
        start.get(..start.len() - self.0.len()).unwrap_or_default()
    }
}
