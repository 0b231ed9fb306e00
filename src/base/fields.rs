//! Reads the values of `RateLimit` headers, for clients and for layers that add to a response's
//! headers.
//!
//! Lists follow RFC 9651 and the rules of the drafts. The text of an item is kept as it is, because
//! it may have parameters that this crate does not know.

pub(crate) type Items<'a> = Vec<ListMember<'a>>;

/// The kinds of lists, each with an item for each policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum List {
    /// The remaining units, as in draft 11: `"default";r=99;t=60`.
    Limits,
    /// The quotas, as in draft 11: `"default";q=100;w=60`.
    Policies,
    /// The quotas, as in drafts 06 and 07: `100;w=60`. The first drafts wrote `100;window=60`.
    Nameless,
}

/// A member of a list, with the parameters that the drafts define.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ListMember<'a> {
    pub(crate) raw: &'a [u8],
    /// The policy's name with its quotes. A name has only one spelling, so names are compared byte by
    /// byte. If the item has no name, this is the whole item.
    pub(crate) name: &'a [u8],
    /// The value of `r` or `q`, or the integer of a nameless item.
    pub(crate) units: u64,
    /// `t` or `w`.
    pub(crate) seconds: Option<u64>,
    /// `qu`, in its quotes.
    #[cfg_attr(not(feature = "client"), expect(dead_code, reason = "only clients read it"))]
    pub(crate) unit: Option<&'a [u8]>,
    /// `tower-r`: the units that can pass at this instant, if these are fewer than `r`.
    #[cfg_attr(not(feature = "client"), expect(dead_code, reason = "only clients read it"))]
    pub(crate) units_now: Option<u64>,
    /// `tower-ms`: `t` in milliseconds.
    #[cfg_attr(not(feature = "client"), expect(dead_code, reason = "only clients read it"))]
    pub(crate) millis: Option<u64>,
    /// `pk`: the partition key, in base64 between colons.
    #[cfg_attr(not(feature = "client"), expect(dead_code, reason = "only clients read it"))]
    pub(crate) partition: Option<&'a [u8]>,
}

/// The dictionary of draft 07.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Dictionary {
    pub(crate) limit: Option<u64>,
    pub(crate) remaining: Option<u64>,
    pub(crate) reset: Option<u64>,
}

impl<'a> ListMember<'a> {
    /// Returns whether this limit allows fewer units than `other`, or the same number of units in a
    /// longer time.
    pub(crate) fn is_stricter(&self, other: &Self) -> bool {
        let seconds = |item: &Self| item.seconds.unwrap_or(0);
        (other.units, seconds(self)) > (self.units, seconds(other))
    }
}

/// Parses the items of a list that is spread over these header lines. Returns no items if a line is not
/// a list of the kind `list`.
pub(crate) fn items<'a>(lines: impl Iterator<Item = &'a [u8]>, list: List) -> Items<'a> {
    let mut items = Items::new();
    if for_each_item(lines, list, |item| items.push(item)).is_none() {
        items.clear();
    }
    items
}

/// Parses a list that is spread over these header lines, and calls `each` with every item. Returns
/// `None` if a line is not a list of the kind `list`. If the function returns `None`, it has already
/// called `each` with the items before the error.
pub(crate) fn for_each_item<'a>(
    mut lines: impl Iterator<Item = &'a [u8]>,
    list: List,
    mut each: impl FnMut(ListMember<'a>),
) -> Option<()> {
    lines.try_for_each(|line| parse(line, list, &mut each))
}

/// Parses draft 07's dictionary. Returns `None` if the value is not a dictionary. Ignores values that
/// are not integers, and keys that are not known.
///
/// Also reads Zendesk's dictionary, which has semicolons between its members and calls two of the keys
/// `total` and `resets`.
pub(crate) fn dictionary(value: &[u8]) -> Option<Dictionary> {
    let mut found = Dictionary::default();
    for member in value.split(|byte| matches!(byte, b',' | b';')) {
        let member = member.trim_ascii();
        let equals = member.iter().position(|byte| *byte == b'=')?;
        let (key, number) = (member.get(..equals)?, member.get(equals + 1..)?);
        match key {
            b"limit" | b"total" => found.limit = integer(number),
            b"remaining" => found.remaining = integer(number),
            b"reset" | b"resets" => found.reset = integer(number),
            _ => {}
        }
    }
    Some(found)
}

/// Returns the text of a string of RFC 9651, without its quotes and escapes.
#[cfg(feature = "client")]
pub(crate) fn unquoted(string: &[u8]) -> String {
    let inner = string.get(1..string.len().saturating_sub(1)).unwrap_or_default();
    let mut is_escaped = false;
    let kept = inner.iter().filter(|byte| {
        is_escaped = **byte == b'\\' && !is_escaped;
        !is_escaped
    });
    kept.map(|byte| char::from(*byte)).collect()
}

/// Returns the whole part of a decimal number.
pub(crate) fn whole_part(value: &[u8]) -> Option<u64> {
    let mut rest = Cursor(value.trim_ascii());
    let whole = rest.integer()?;
    if rest.next_is(b'.') && rest.digits().is_empty() {
        return None;
    }
    rest.0.is_empty().then_some(whole)
}

/// Parses an integer of up to 15 digits, without a sign.
pub(crate) fn integer(value: &[u8]) -> Option<u64> {
    let mut rest = Cursor(value);
    rest.integer().filter(|_| rest.0.is_empty())
}

/// Returns whether a media range of `Accept` has the weight 0. The weight 0 means that the client does not
/// accept the media type (RFC 9110, section 12.4.2).
pub(crate) fn is_unacceptable(range: &[u8]) -> bool {
    let weight = |parameter: &[u8]| {
        let (name, value) = parameter.split_at_checked(parameter.iter().position(|byte| *byte == b'=')? + 1)?;
        let is_zero =
            value.trim_ascii().first() == Some(&b'0') && value.trim_ascii().iter().all(|byte| b"0.".contains(byte));
        name.trim_ascii().eq_ignore_ascii_case(b"q=").then_some(is_zero)
    };
    range.split(|byte| *byte == b';').skip(1).any(|parameter| weight(parameter) == Some(true))
}

/// Parses one header line and calls `each` with every item. Returns `None` if the line is not a list of
/// the kind `list`.
fn parse<'a>(line: &'a [u8], list: List, each: &mut impl FnMut(ListMember<'a>)) -> Option<()> {
    let mut rest = Cursor(line);
    rest.take(|byte| byte == b' ');
    if rest.0.is_empty() {
        return Some(()); // an empty line has no items
    }
    loop {
        each(item(&mut rest, list)?);
        rest.take(is_space);
        if rest.0.is_empty() {
            return Some(());
        }
        rest.expect(b",")?;
        rest.take(is_space); // an item has to follow
    }
}

fn item<'a>(rest: &mut Cursor<'a>, list: List) -> Option<ListMember<'a>> {
    let (units_key, seconds_key): (&[u8], &[u8]) = match list {
        List::Limits => (b"r", b"t"),
        List::Policies => (b"q", b"w"),
        List::Nameless => (b"", b"w"),
    };
    let start = rest.0;
    let (mut units, mut seconds, mut unit, mut partition) = (None, None, None, None);
    let (mut units_now, mut millis) = (None, None);
    if list == List::Nameless {
        units = Some(rest.integer()?);
    } else {
        string(rest)?;
    }
    let name = rest.since(start);
    while rest.next_is(b';') {
        rest.take(|byte| byte == b' ');
        let key = key(rest)?;
        // If a key occurs twice, the last value counts.
        if key == units_key {
            units = value(rest, Cursor::integer)?;
        } else if key == seconds_key || (list == List::Nameless && key == b"window") {
            let least = u64::from(list != List::Limits);
            seconds = Some(value(rest, |rest| rest.integer().filter(|seconds| *seconds >= least))?);
        } else if key == b"qu" && list == List::Policies {
            unit = Some(value(rest, |rest| rest.text(string))?);
        } else if key == b"pk" && list != List::Nameless {
            partition = Some(value(rest, |rest| rest.text(bytes))?);
        } else if key == b"tower-r" && list == List::Limits {
            units_now = value(rest, Cursor::integer)?;
        } else if key == b"tower-ms" && list == List::Limits {
            millis = value(rest, Cursor::integer)?;
        } else if rest.next_is(b'=') {
            bare_item(rest)?;
        }
    }
    let raw = rest.since(start);
    let name = if list == List::Nameless { raw } else { name };
    // A parameter may be absent, but a parameter that is present must have this type.
    let (seconds, unit, partition) = (typed(seconds)?, typed(unit)?, typed(partition)?);
    Some(ListMember { raw, name, units: units?, seconds, unit, units_now, millis, partition })
}

/// Parses a parameter's value. Returns `Some(None)` if the value has another type than `parse`
/// expects.
fn value<'a, T>(rest: &mut Cursor<'a>, parse: impl Fn(&mut Cursor<'a>) -> Option<T>) -> Option<Option<T>> {
    if !rest.next_is(b'=') {
        return Some(None); // it is true
    }
    let start = rest.0;
    let found = parse(rest).filter(|_| rest.0.first() != Some(&b'.')); // a decimal is not an integer
    if found.is_none() {
        rest.0 = start;
        bare_item(rest)?;
    }
    Some(found)
}

/// Returns `None` if the parameter is present but has a wrong type.
#[expect(clippy::option_option, reason = "the outer `None` means a wrong type, and the inner `None` no parameter")]
fn typed<T>(parameter: Option<Option<T>>) -> Option<Option<T>> {
    parameter.map_or(Some(None), |found| found.map(Some))
}

/// Parses the key of a parameter.
fn key<'a>(rest: &mut Cursor<'a>) -> Option<&'a [u8]> {
    let key = rest.take(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-' | b'.' | b'*'));
    key.first().filter(|first| matches!(first, b'a'..=b'z' | b'*'))?;
    Some(key)
}

/// Parses any bare item of RFC 9651, except display strings, because these headers have none.
fn bare_item(rest: &mut Cursor<'_>) -> Option<()> {
    match rest.0.first()? {
        b'"' => string(rest),
        b':' => bytes(rest),
        b'?' => {
            rest.expect(b"?")?;
            rest.expect(b"01")
        }
        b'@' => {
            rest.expect(b"@")?;
            rest.next_is(b'-');
            rest.integer().map(drop)
        }
        b'-' | b'0'..=b'9' => {
            rest.next_is(b'-');
            let whole = rest.digits().len();
            let decimals = if rest.next_is(b'.') { Some(rest.digits().len()) } else { None };
            match decimals {
                None => (1..=15).contains(&whole),
                Some(decimals) => (1..=12).contains(&whole) && (1..=3).contains(&decimals),
            }
            .then_some(())
        }
        b'*' | b'A'..=b'Z' | b'a'..=b'z' => {
            rest.take(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~:/".contains(&byte));
            Some(())
        }
        _ => None,
    }
}

fn string(rest: &mut Cursor<'_>) -> Option<()> {
    rest.expect(b"\"")?;
    loop {
        rest.take(|byte| matches!(byte, 0x20..0x7f) && byte != b'"' && byte != b'\\');
        if rest.next_is(b'"') {
            return Some(());
        }
        rest.expect(b"\\")?;
        rest.expect(b"\"\\")?;
    }
}

/// Parses a byte sequence. RFC 9651 asks parsers to accept base64 without padding.
fn bytes(rest: &mut Cursor<'_>) -> Option<()> {
    rest.expect(b":")?;
    let length = rest.take(|byte| byte.is_ascii_alphanumeric() || b"+/".contains(&byte)).len();
    let padding = rest.take(|byte| byte == b'=').len();
    rest.expect(b":")?;
    (length % 4 != 1 && length + padding <= length.next_multiple_of(4)).then_some(())
}

fn is_space(byte: u8) -> bool {
    byte == b' ' || byte == b'\t'
}

/// The part of the text that has still to be parsed.
struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    #[inline]
    fn take(&mut self, accepts: impl Fn(u8) -> bool) -> &'a [u8] {
        let end = self.0.iter().position(|byte| !accepts(*byte)).unwrap_or(self.0.len());
        let (taken, rest) = self.0.split_at(end);
        self.0 = rest;
        taken
    }

    fn digits(&mut self) -> &'a [u8] {
        self.take(|byte| byte.is_ascii_digit())
    }

    /// Parses an integer of up to 15 digits, without a sign.
    fn integer(&mut self) -> Option<u64> {
        let digits = self.digits();
        let value = || digits.iter().fold(0, |n, digit| n * 10 + u64::from(digit - b'0'));
        (1..=15).contains(&digits.len()).then(value)
    }

    /// Returns the text that `parse` parses.
    fn text(&mut self, parse: fn(&mut Self) -> Option<()>) -> Option<&'a [u8]> {
        let start = self.0;
        parse(self)?;
        Some(self.since(start))
    }

    fn next_is(&mut self, byte: u8) -> bool {
        let is_next = self.0.first() == Some(&byte);
        if is_next {
            self.0 = self.0.get(1..).unwrap_or_default();
        }
        is_next
    }

    /// Skips the next byte if it is one of `bytes`. Returns `None` if the next byte is another.
    fn expect(&mut self, bytes: &[u8]) -> Option<()> {
        bytes.iter().any(|byte| self.next_is(*byte)).then_some(())
    }

    /// Returns the text that was parsed since `start`.
    fn since(&self, start: &'a [u8]) -> &'a [u8] {
        start.get(..start.len() - self.0.len()).unwrap_or_default()
    }
}
