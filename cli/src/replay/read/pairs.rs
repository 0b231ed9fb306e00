//! Lines of names and values, as in `method=GET path="/a b"`.

use std::borrow::Cow;

use memchr::memchr;

use super::field::Fields;
use super::json::Paths;

/// Adds the fields of a line. Returns `None` if a word of the line is not a name with a value.
pub(crate) fn read<'a>(line: &'a [u8], names: &Paths, fields: &mut Fields<'a>) -> Option<()> {
    let mut rest = line.trim_ascii();
    while !rest.is_empty() {
        let (name, behind) = rest.split_at_checked(memchr(b'=', rest)?)?;
        let is_name = |byte: &u8| byte.is_ascii_alphanumeric() || b"_.-".contains(byte);
        if name.is_empty() || !name.iter().all(is_name) {
            return None;
        }
        let behind = behind.get(1..)?;
        let (value, after) = match behind.strip_prefix(b"\"") {
            Some(quoted) => {
                let end = closing_quote(quoted)?;
                (quoted.get(..end)?, quoted.get(end + 1..)?)
            }
            None => behind.split_at_checked(memchr(b' ', behind).unwrap_or(behind.len()))?,
        };
        if let Some(field) = std::str::from_utf8(name).ok().and_then(|name| names.named(name)) {
            fields.add(field, Cow::Borrowed(value));
        }
        rest = after.trim_ascii_start();
    }
    Some(())
}

fn closing_quote(text: &[u8]) -> Option<usize> {
    let mut from = 0;
    loop {
        let end = from + memchr(b'"', text.get(from..)?)?;
        let escapes = text.get(..end)?.iter().rev().take_while(|byte| **byte == b'\\').count();
        if escapes % 2 == 0 {
            return Some(end);
        }
        from = end + 1;
    }
}

#[cfg(test)]
mod tests {
    use super::super::field::Field;
    use super::*;

    #[test]
    fn values_are_read_with_and_without_quotes() {
        let mut names = Paths::default();
        names.add("path", Field::Target);
        names.add("method", Field::Method);
        let read = |line: &str| {
            let mut fields = Fields::default();
            read(line.as_bytes(), &names, &mut fields)?;
            let text = |field| String::from_utf8_lossy(fields.get(field).unwrap_or_default()).into_owned();
            Some((text(Field::Method), text(Field::Target)))
        };
        let found = |method: &str, path: &str| Some((method.to_owned(), path.to_owned()));
        assert_eq!(read(r#"at=info method=GET path="/a=b \"c\"" host="#), found("GET", r#"/a=b \"c\""#));
        assert_eq!(read("method= path=/a"), found("", "/a"));
        for line in ["State changed", "a=\"b", "a b=c", "=a"] {
            assert_eq!(read(line), None, "{line}");
        }
    }
}
