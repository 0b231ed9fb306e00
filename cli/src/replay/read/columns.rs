//! Lines of columns: W3C's extended log format, in which a directive `#Fields` names the columns, and Squid's own
//! format.

use std::borrow::Cow;

use memchr::{memchr, memchr2};
use percent_encoding::percent_decode;

use super::field::{Field, Fields, HeaderNames, Unit};

/// The most columns, and the most headers, that directives may name. Further ones are skipped.
const COLUMNS_MAX: usize = 128;
const HEADERS_MAX: usize = 64;

/// The columns of a line, in their order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Columns {
    columns: Vec<Column>,
    /// Whether a line may have further columns.
    is_open: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Column {
    Field(Field),
    /// A value in which a server encodes spaces.
    Encoded(Field),
    Date,
    Time,
    /// A path without its query.
    Stem,
    Query,
    /// Seconds if it has a point, as CloudFront writes it. Otherwise milliseconds, as IIS and Squid write it.
    TimeTaken,
    /// Squid's code and the status, such as `TCP_MISS/200`.
    CodeAndStatus,
    Skipped,
}

impl Columns {
    /// Makes columns of their names. Lines may have further ones.
    pub(crate) fn open(names: &str, headers: &mut HeaderNames) -> Self {
        Self { is_open: true, ..Self::declared(names, headers) }
    }

    /// Makes columns of the names in a directive. A line has exactly these.
    pub(crate) fn declared(names: &str, headers: &mut HeaderNames) -> Self {
        let names: Vec<String> =
            names.split_ascii_whitespace().take(COLUMNS_MAX).map(str::to_ascii_lowercase).collect();
        // CloudFront's `cs(Host)` is the name of the distribution, and this is the name that the client sent.
        let has_host = names.iter().any(|name| name == "x-host-header");
        let columns = names.iter().map(|name| match &**name {
            "cs(host)" | "cs-host" if has_host => Column::Skipped,
            name => Column::named(name, headers),
        });
        Self { columns: columns.collect(), is_open: false }
    }

    /// Adds the fields of a line. Returns `None` if the line does not have these columns.
    pub(crate) fn read<'a>(&self, line: &'a [u8], fields: &mut Fields<'a>) -> Option<()> {
        let is_tabbed = memchr(b'\t', line).is_some();
        let mut cells = Cells { rest: Some(line), is_tabbed };
        let (mut date, mut time, mut stem, mut query) = (None, None, None, None);
        for column in &self.columns {
            let cell = cells.next()?;
            match column {
                Column::Field(field) => fields.add(*field, cell),
                Column::Encoded(field) => fields.add(*field, decoded(cell, is_tabbed)),
                Column::Date => date = Some(cell),
                Column::Time => time = Some(cell),
                // A path stays encoded, because a decoded one may mean another path. IIS writes a space as a plus.
                Column::Stem if is_tabbed => stem = Some(cell),
                Column::Stem => stem = Some(with_spaces(cell)),
                Column::Query => query = Some(cell),
                Column::TimeTaken => {
                    let unit = if memchr(b'.', &cell).is_some() { Unit::Seconds } else { Unit::Millis };
                    fields.add(Field::Duration(unit), cell);
                }
                Column::CodeAndStatus => fields.add(Field::Status, Cow::Owned(status(&cell)?.to_vec())),
                Column::Skipped => {}
            }
        }
        if self.columns.is_empty() || (!self.is_open && cells.next().is_some()) {
            return None;
        }
        if let (Some(date), Some(time)) = (date, time) {
            fields.add(Field::End, Cow::Owned([&*date, b"T", &*time].concat()));
        }
        if let Some(stem) = stem {
            let query = query.filter(|query| !matches!(&**query, b"" | b"-"));
            fields.add(
                Field::Target,
                match query {
                    Some(query) => Cow::Owned([&*stem, b"?", &*query].concat()),
                    None => stem,
                },
            );
        }
        Some(())
    }
}

impl Column {
    /// Returns the column of a name in lower case.
    fn named(name: &str, headers: &mut HeaderNames) -> Self {
        match name {
            "date" => Self::Date,
            "time" => Self::Time,
            "c-ip" => Self::Field(Field::Client),
            "cs-username" => Self::Encoded(Field::User),
            "cs-method" => Self::Field(Field::Method),
            "cs-uri" => Self::Field(Field::Target),
            "cs-uri-stem" => Self::Stem,
            "cs-uri-query" => Self::Query,
            "cs(host)" | "cs-host" | "x-host-header" => Self::Field(Field::Host),
            "sc-status" => Self::Field(Field::Status),
            "time-taken" => Self::TimeTaken,
            // These two are Squid's, which names no columns.
            "squid-time" => Self::Field(Field::End),
            "squid-status" => Self::CodeAndStatus,
            name => {
                let header = name.strip_prefix("cs(").and_then(|name| name.strip_suffix(')'));
                let header = header.or(Some(name).filter(|name| *name == "x-forwarded-for"));
                let field = header.and_then(|name| headers.field_within(name, HEADERS_MAX));
                field.map_or(Self::Skipped, Self::Encoded)
            }
        }
    }
}

/// A value, which is owned if quotes or an encoding were taken out of it.
type Cell<'a> = Cow<'a, [u8]>;

/// The values of a line: between single tabs if it has tabs, and otherwise between spaces.
struct Cells<'a> {
    rest: Option<&'a [u8]>,
    is_tabbed: bool,
}

impl<'a> Iterator for Cells<'a> {
    type Item = Cell<'a>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut rest = self.rest.take()?;
        let separator = if self.is_tabbed { b'\t' } else { b' ' };
        if !self.is_tabbed {
            let spaces = rest.iter().take_while(|byte| **byte == b' ').count();
            rest = rest.get(spaces..).filter(|rest| !rest.is_empty())?;
        }
        if let Some((value, after)) = quoted(rest, separator) {
            self.rest = after;
            return Some(value);
        }
        let Some(end) = memchr(separator, rest) else { return Some(Cow::Borrowed(rest)) };
        self.rest = rest.get(end + 1..);
        rest.get(..end).map(Cow::Borrowed)
    }
}

/// Returns a value in quotes, and what stands behind the separator after it. Within quotes, two quotes are one. Returns
/// `None` if the text does not begin with such a value.
fn quoted(text: &[u8], separator: u8) -> Option<(Cell<'_>, Option<&[u8]>)> {
    let inner = text.strip_prefix(b"\"")?;
    let mut from = 0;
    let (end, has_quotes) = loop {
        let at = from + memchr(b'"', inner.get(from..)?)?;
        match inner.get(at + 1) {
            Some(b'"') => from = at + 2,
            None => break (at, from > 0),
            Some(next) if *next == separator => break (at, from > 0),
            Some(_) => return None,
        }
    };
    let (value, after) = inner.split_at_checked(end)?;
    let value = if !has_quotes {
        Cow::Borrowed(value)
    } else {
        let mut plain = Vec::with_capacity(value.len());
        let mut was_quote = false;
        for byte in value {
            was_quote = *byte == b'"' && !was_quote;
            if !was_quote {
                plain.push(*byte);
            }
        }
        Cow::Owned(plain)
    };
    Some((value, after.get(2..)))
}

/// Returns a value without its encoding: `%20`, and in lines without tabs `+`, which IIS writes for a space.
fn decoded(value: Cell<'_>, is_tabbed: bool) -> Cell<'_> {
    if memchr2(b'%', b'+', &value).is_none() {
        return value;
    }
    let value = if is_tabbed { value } else { with_spaces(value) };
    Cow::Owned(percent_decode(&value).collect())
}

fn with_spaces(value: Cell<'_>) -> Cell<'_> {
    if memchr(b'+', &value).is_none() {
        return value;
    }
    Cow::Owned(value.iter().map(|byte| if *byte == b'+' { b' ' } else { *byte }).collect())
}

/// Returns the status of `TCP_MISS/200`.
fn status(cell: &[u8]) -> Option<&[u8]> {
    let (code, status) = cell.split_at_checked(cell.len().checked_sub(3)?)?;
    let is_code = code.first()?.is_ascii_uppercase() && code.last() == Some(&b'/');
    (is_code && status.iter().all(u8::is_ascii_digit)).then_some(status)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(names: &str, line: &str, field: Field) -> Option<String> {
        let mut fields = Fields::default();
        Columns::declared(names, &mut HeaderNames::default()).read(line.as_bytes(), &mut fields)?;
        Some(String::from_utf8_lossy(fields.get(field).unwrap_or(b"nothing")).into_owned())
    }

    #[test]
    fn values_of_columns_are_decoded() {
        for (names, line, field, expected) in [
            ("date time", "2015-05-17 10:05:03", Field::End, "2015-05-17T10:05:03"),
            ("c-ip cs(User-Agent)", "::1 A+%28b%29+c", Field::Header(0), "A (b) c"),
            ("c-ip cs(User-Agent)", "::1\tA%20+b%2520", Field::Header(0), "A +b%20"),
            ("c-ip\tcs(User-Agent)", "::1\tA b", Field::Header(0), "A b"),
            ("c-ip cs(User-Agent)", r#"::1 "A ""b"" c""#, Field::Header(0), r#"A "b" c"#),
            ("cs(Referer) c-ip", r#""a b" ::1"#, Field::Client, "::1"),
            ("cs(Referer) c-ip", r#""a"b ::1"#, Field::Header(0), r#""a"b"#),
            ("cs(Referer) c-ip", "%zz% ::1", Field::Header(0), "%zz%"),
            ("X-FORWARDED-FOR", "::1,%20::2", Field::Header(0), "::1, ::2"),
            ("cs-username", "SHOP\\ann+b", Field::User, "SHOP\\ann b"),
            ("cs-username c-ip", "- ::1", Field::User, "nothing"),
            ("cs-uri-stem cs-uri-query", "/a+b -", Field::Target, "/a b"),
            ("cs-uri-stem cs-uri-query", "/a%2Fb\tc+d", Field::Target, "/a%2Fb?c+d"),
            ("cs(Host) c-ip x-host-header", "d.cloudfront.net ::1 e.org", Field::Host, "e.org"),
            ("time-taken", "0.5", Field::Duration(Unit::Seconds), "0.5"),
            ("time-taken", "500", Field::Duration(Unit::Millis), "500"),
            ("squid-status", "NONE_NONE/400", Field::Status, "400"),
        ] {
            assert_eq!(read(names, line, field).as_deref(), Some(expected), "{names}: {line}");
        }
    }

    #[test]
    fn line_with_other_columns_is_not_read() {
        for (names, line) in [
            ("c-ip sc-status", "::1"),
            ("c-ip sc-status", "::1 200 3"),
            ("c-ip sc-status", "::1\t200\t"),
            ("c-ip sc-status", "   "),
            ("c-ip squid-status", "::1 200"),
            ("c-ip squid-status", "::1 TCP_MISS/2x0"),
            ("", "::1"),
        ] {
            assert_eq!(read(names, line, Field::Client), None, "{names}: {line}");
        }
        let open = Columns::open("c-ip", &mut HeaderNames::default());
        assert!(open.read(b"::1 further", &mut Fields::default()).is_some());
    }

    #[test]
    fn directive_names_a_bounded_number_of_columns() {
        let mut headers = HeaderNames::default();
        for n in 0..100 {
            let names: String = (0..1_000).map(|m| format!("cs(X-{n}-{m}) ")).collect();
            assert_eq!(Columns::declared(&names, &mut headers).columns.len(), COLUMNS_MAX);
        }
        assert_eq!(headers.0.len(), HEADERS_MAX);
    }
}
