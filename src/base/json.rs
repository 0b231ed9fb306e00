//! Writing JSON (RFC 8259).

use std::fmt::{Display, Write as _};
use std::time::Duration;

/// Writes a string.
pub(crate) fn push_string(json: &mut String, text: &str) {
    json.push('"');
    for char in text.chars() {
        match char {
            '"' | '\\' => {
                json.push('\\');
                json.push(char);
            }
            // Older JavaScript does not accept U+2028 and U+2029 in strings. The control characters would move a
            // terminal's cursor.
            '\0'..='\x1f' | '\x7f'..='\u{9f}' | '\u{2028}' | '\u{2029}' => {
                let _ = write!(json, "\\u{:04x}", u32::from(char)); // writing into a String never fails
            }
            char => json.push(char),
        }
    }
    json.push('"');
}

/// Writes an object, field by field.
pub(crate) struct Object<'a> {
    json: &'a mut String,
    is_empty: bool,
}

impl<'a> Object<'a> {
    /// Begins an object.
    pub(crate) fn begin(json: &'a mut String) -> Self {
        json.push('{');
        Self { json, is_empty: true }
    }

    /// Writes a field's name. The caller writes the field's value into the returned text.
    pub(crate) fn field(&mut self, name: &str) -> &mut String {
        if !std::mem::replace(&mut self.is_empty, false) {
            self.json.push(',');
        }
        push_string(self.json, name);
        self.json.push(':');
        self.json
    }

    /// Writes a field whose value is a number or a truth value.
    pub(crate) fn plain(&mut self, name: &str, value: impl Display) {
        let _ = write!(self.field(name), "{value}");
    }

    /// Writes a field whose value is text.
    pub(crate) fn text(&mut self, name: &str, value: &str) {
        push_string(self.field(name), value);
    }

    /// Writes a field whose value is a number or a truth value, or `null`.
    pub(crate) fn or_null(&mut self, name: &str, value: Option<impl Display>) {
        match value {
            Some(value) => self.plain(name, value),
            None => self.plain(name, "null"),
        }
    }

    /// Writes a field whose value is text or `null`.
    pub(crate) fn text_or_null(&mut self, name: &str, value: Option<&str>) {
        match value {
            Some(value) => self.text(name, value),
            None => self.plain(name, "null"),
        }
    }

    /// Writes a field whose value is a time in whole microseconds, or `null`.
    pub(crate) fn micros(&mut self, name: &str, value: Option<Duration>) {
        self.or_null(name, value.map(|time| time.as_micros()));
    }

    /// Writes a field whose value is a list. `item` writes each value of the list.
    pub(crate) fn list<T>(&mut self, name: &str, items: impl IntoIterator<Item = T>, item: impl Fn(&mut String, T)) {
        let json = self.field(name);
        json.push('[');
        for (at, value) in items.into_iter().enumerate() {
            if at > 0 {
                json.push(',');
            }
            item(json, value);
        }
        json.push(']');
    }

    /// Ends the object.
    pub(crate) fn end(self) {
        self.json.push('}');
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn strings_are_read_as_they_were(text in any::<String>()) {
            let mut json = String::new();
            push_string(&mut json, &text);
            prop_assert!(!json.contains(char::is_control));
            prop_assert_eq!(serde_json::from_str::<String>(&json).unwrap(), text);
        }
    }

    #[test]
    fn object_has_its_fields_in_their_order() {
        let mut json = String::new();
        let mut object = Object::begin(&mut json);
        object.plain("a", 1);
        object.text("b", "\"\u{2028}");
        object.list("c", [true, false], |json, item| json.push_str(if item { "true" } else { "false" }));
        object.list("d", [(); 0], |_, ()| ());
        object.end();
        assert_eq!(json, r#"{"a":1,"b":"\"\u2028","c":[true,false],"d":[]}"#);
    }
}
