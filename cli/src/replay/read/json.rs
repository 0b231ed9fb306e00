//! Lines of JSON, of which only some fields are read.

use std::borrow::Cow;
use std::fmt;

use serde_core::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::field::{Field, Fields, HeaderNames};

/// The fields to read, as a tree of their names.
#[derive(Clone, Debug, Default)]
pub(crate) struct Paths {
    root: Node,
    pub(crate) headers: HeaderNames,
}

#[derive(Clone, Debug, Default)]
struct Node {
    field: Option<Field>,
    children: Vec<(String, Self)>,
}

impl Paths {
    /// Adds a path such as `request.client_ip`. A dot within a name is written `\.`.
    pub(crate) fn add(&mut self, path: &str, field: Field) {
        let path = path.replace("\\.", "\0");
        let mut node = &mut self.root;
        for name in path.split('.').map(|name| name.replace('\0', ".")) {
            let at = node.children.iter().position(|(known, _)| *known == name).unwrap_or_else(|| {
                node.children.push((name, Node::default()));
                node.children.len() - 1
            });
            let Some((_, child)) = node.children.get_mut(at) else { return };
            node = child;
        }
        node.field = Some(field);
    }

    pub(crate) fn has(&self, wanted: &[Field]) -> bool {
        fn has(node: &Node, wanted: &[Field]) -> bool {
            node.field.is_some_and(|field| wanted.contains(&field))
                || node.children.iter().any(|(_, node)| has(node, wanted))
        }
        has(&self.root, wanted)
    }

    /// Returns the field of a name, for lines without a tree.
    pub(crate) fn named(&self, name: &str) -> Option<Field> {
        self.root.children.iter().find(|(known, _)| known == name)?.1.field
    }

    /// Adds the fields of a line. Returns `None` if the line is not one JSON object.
    pub(crate) fn read<'a>(&self, line: &'a [u8], fields: &mut Fields<'a>) -> Option<()> {
        if !line.trim_ascii_start().starts_with(b"{") {
            return None;
        }
        let mut json = serde_json::Deserializer::from_slice(line);
        Value { node: &self.root, fields }.deserialize(&mut json).ok()?;
        json.end().ok()
    }
}

/// The most names that a message lists.
const NAMES_MAX: usize = 12;

/// Returns the paths of the values of a line, for a message. It is empty if the line is not one JSON object.
pub(super) fn names_in_json(line: &[u8]) -> String {
    let Ok(serde_json::Value::Object(object)) = serde_json::from_slice(line) else { return String::new() };
    let mut names = Vec::new();
    for (name, value) in &object {
        match value {
            serde_json::Value::Object(inner) => names.extend(inner.keys().map(|inner| format!("{name}.{inner}"))),
            _ => names.push(name.clone()),
        }
    }
    let short = |name: &String| name.chars().take(40).collect::<String>();
    let shown: Vec<String> = names.iter().take(NAMES_MAX).map(short).collect();
    let more = if names.len() > NAMES_MAX { " and others" } else { "" };
    format!("{}{more}", shown.join(", "))
}

/// Reads one value: the part of the tree below its name says what is wanted of it.
struct Value<'n, 'f, 'a> {
    node: &'n Node,
    fields: &'f mut Fields<'a>,
}

impl<'a> Value<'_, '_, 'a> {
    fn take(self, value: Cow<'a, [u8]>) {
        if let Some(field) = self.node.field {
            self.fields.add(field, value);
        }
    }

    fn number(self, number: &impl ToString) {
        self.take(Cow::Owned(number.to_string().into_bytes()));
    }
}

impl<'a> DeserializeSeed<'a> for Value<'_, '_, 'a> {
    type Value = ();

    fn deserialize<D: Deserializer<'a>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_any(self)
    }
}

impl<'a> Visitor<'a> for Value<'_, '_, 'a> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(Name(name)) = map.next_key_seed(NameSeed)? {
            match self.node.children.iter().find(|(known, _)| *known == name) {
                Some((_, node)) => map.next_value_seed(Value { node, fields: self.fields })?,
                None => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(())
    }

    /// Servers write a header as the list of its values. The first one is read.
    fn visit_seq<A: SeqAccess<'a>>(self, mut list: A) -> Result<(), A::Error> {
        let is_empty = list.next_element_seed(Value { node: self.node, fields: self.fields })?.is_none();
        while !is_empty && list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(())
    }

    fn visit_borrowed_str<E: Error>(self, text: &'a str) -> Result<(), E> {
        self.take(Cow::Borrowed(text.as_bytes()));
        Ok(())
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<(), E> {
        self.take(Cow::Owned(text.as_bytes().to_vec()));
        Ok(())
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<(), E> {
        self.number(&number);
        Ok(())
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<(), E> {
        self.number(&number);
        Ok(())
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<(), E> {
        self.number(&number);
        Ok(())
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E: Error>(self) -> Result<(), E> {
        Ok(())
    }
}

struct Name<'a>(Cow<'a, str>);

struct NameSeed;

impl<'a> DeserializeSeed<'a> for NameSeed {
    type Value = Name<'a>;

    fn deserialize<D: Deserializer<'a>>(self, json: D) -> Result<Name<'a>, D::Error> {
        json.deserialize_str(self)
    }
}

impl<'a> Visitor<'a> for NameSeed {
    type Value = Name<'a>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_borrowed_str<E: Error>(self, name: &'a str) -> Result<Name<'a>, E> {
        Ok(Name(Cow::Borrowed(name)))
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<Name<'a>, E> {
        Ok(Name(Cow::Owned(name.to_owned())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths() -> Paths {
        let mut paths = Paths::default();
        for (path, field) in [
            ("ts", Field::End),
            ("request.client_ip", Field::Client),
            ("request.headers.User-Agent", Field::Header(0)),
            (r"a\.b", Field::User),
        ] {
            paths.add(path, field);
        }
        paths
    }

    #[test]
    fn fields_are_found_by_their_paths() {
        let line = r#" {"a":{"b":"no"},"x":[{"ts":1}],"ts":1646861401.5241024,"request":{"headers":{"User-Agent":["a\"b","c"],
            "Empty":[]},"client_ip":"192.0.2.1"},"a.b":"ann"} "#;
        let mut fields = Fields::default();
        paths().read(line.as_bytes(), &mut fields).expect("it is JSON");
        for (field, expected) in [
            (Field::End, "1646861401.5241024"),
            (Field::Client, "192.0.2.1"),
            (Field::Header(0), "a\"b"),
            (Field::User, "ann"),
        ] {
            assert_eq!(fields.get(field), Some(expected.as_bytes()), "{field:?}");
        }
    }

    #[test]
    fn line_that_is_no_object_is_not_read() {
        let deep = [r#"{"ts":"#.repeat(1_000_000), "}".repeat(1_000_000)].concat();
        let lists = [r#"{"ts":"#, &"[".repeat(1_000_000)].concat();
        for line in ["", "1", "[]", "{", "{}x", "{\"ts\":\"\u{0}\"}", "{\"ts\":nan}", &deep, &lists] {
            assert!(paths().read(line.as_bytes(), &mut Fields::default()).is_none());
        }
        let mut fields = Fields::default();
        assert!(paths().read(b"{\"ts\":\"\xff\"}", &mut fields).is_none());
        assert!(paths().read(b"{}", &mut fields).is_some() && fields.get(Field::End).is_none());
    }
}
