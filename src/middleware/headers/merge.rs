//! Fields that are there already, from an inner layer or a handler: what becomes of them.
//!
//! Fields that belong together come from one source. What tells of one policy is ours or theirs, whichever is stricter. A
//! value that cannot be read is replaced: clients would ignore it, or all of the field.

use smallvec::SmallVec;

use super::text::Text;

/// Which list a field holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum List {
    /// `"default";r=99;t=60`
    Limits,
    /// `"default";q=100;w=60`
    Policies,
    /// `100;w=60`
    Nameless,
}

/// Names of policies, in their quotes.
pub(super) type Names<'a> = SmallVec<[&'a [u8]; 4]>;

/// The policies of our [limits](List::Limits) of which theirs tell no less strictly.
pub(super) fn stricter<'a>(theirs: &[&[u8]], ours: &'a [u8]) -> Names<'a> {
    let theirs = read(theirs, List::Limits);
    let ours = read(&[ours], List::Limits);
    let stays = |own: &&Item<'a>| theirs.iter().any(|item| item.name == own.name && !own.is_stricter(item));
    ours.iter().filter(stays).map(|own| own.name).collect()
}

/// A list of theirs and ours, in which their items stay for the policies in `stay`, and ours replace theirs of the same
/// name otherwise. Nothing of theirs stays if one of its lines is not such a list.
pub(super) fn merge(theirs: &[&[u8]], ours: &[u8], list: List, stay: &[&[u8]]) -> Text {
    let (theirs, ours) = (read(theirs, list), read(&[ours], list));
    let own = |name: &[u8]| ours.iter().find(|own| own.name == name && !stay.contains(&name));
    let mut text = Text::new();
    let mut push = |item: &Item<'_>| {
        text.push_separator();
        text.push(item.raw);
    };
    let mut replaced = Names::new();
    for item in &theirs {
        match own(item.name) {
            None => push(item),
            // In its place, once.
            Some(own) if !replaced.contains(&own.name) => {
                replaced.push(own.name);
                push(own);
            }
            Some(_) => {}
        }
    }
    ours.iter().filter(|own| !stay.contains(&own.name) && !replaced.contains(&own.name)).for_each(push);
    text
}

/// The items of a list of these lines; none if it is not such a list.
fn read<'a>(lines: &[&'a [u8]], list: List) -> Items<'a> {
    let mut items = Items::new();
    if lines.iter().any(|line| parse(line, list, &mut items).is_none()) {
        items.clear();
    }
    items
}

/// The `remaining` of draft 07's dictionary, if it is one.
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

/// A decimal number's whole part.
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

/// Digits, up to 15 of them.
pub(super) fn integer(value: &[u8]) -> Option<u64> {
    if value.is_empty() || value.len() > 15 || !value.iter().all(u8::is_ascii_digit) {
        return None;
    }
    Some(value.iter().fold(0, |n, digit| n * 10 + u64::from(digit - b'0')))
}

type Items<'a> = SmallVec<[Item<'a>; 4]>;

/// A member of a list, with the two parameters that are compared.
#[derive(Clone, Copy, Debug)]
struct Item<'a> {
    raw: &'a [u8],
    /// The name in its quotes, of which there is one form only; for nameless items all of the item.
    name: &'a [u8],
    units: u64,
    seconds: Option<u64>,
}

impl Item<'_> {
    /// Whether this limit allows fewer units, or as many for longer.
    fn is_stricter(&self, other: &Self) -> bool {
        self.units < other.units
            || (self.units == other.units && self.seconds.unwrap_or(0) > other.seconds.unwrap_or(0))
    }
}

/// Parses one field line and appends its items; nothing if it is not such a list.
fn parse<'a>(line: &'a [u8], list: List, items: &mut Items<'a>) -> Option<()> {
    let mut rest = Cursor(line);
    rest.skip(|byte| byte == b' ');
    if rest.is_empty() {
        return Some(()); // an empty line says nothing
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
        // A key that comes twice counts as it came last.
        if key == units_key {
            units = Some(integer(value)?);
        } else if key == seconds_key {
            seconds = Some(integer(value).filter(|seconds| list == List::Limits || *seconds > 0)?);
        }
    }
    let raw = rest.since(start);
    Some(Item { raw, name: if list == List::Nameless { raw } else { name }, units: units?, seconds })
}

/// The key of a parameter.
fn key<'a>(rest: &mut Cursor<'a>) -> Option<&'a [u8]> {
    let key = rest.take(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"_-.*".contains(&byte));
    key.first().filter(|first| first.is_ascii_lowercase() || **first == b'*')?;
    Some(key)
}

/// Any bare item of RFC 9651, as it is written.
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
        _ => return None, // display strings too: no such field has one
    }
    Some(rest.since(start))
}

/// An integer of up to 15 digits, or a decimal of up to 12 and 3.
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

/// What is still to be read.
struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn take(&mut self, belongs: impl Fn(u8) -> bool) -> &'a [u8] {
        let end = self.0.iter().position(|byte| !belongs(*byte)).unwrap_or(self.0.len());
        let (taken, rest) = self.0.split_at(end);
        self.0 = rest;
        taken
    }

    fn skip(&mut self, belongs: impl Fn(u8) -> bool) {
        self.take(belongs);
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

    /// What was read since the cursor stood at `start`.
    fn since(&self, start: &'a [u8]) -> &'a [u8] {
        start.get(..start.len() - self.0.len()).unwrap_or_default()
    }
}
