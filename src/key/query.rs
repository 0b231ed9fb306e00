//! Extractors for parameters of the query.

use std::borrow::Cow;

use percent_encoding::percent_decode;

use crate::base::head::Head;

use super::paths::original_uri;
use super::value::{IntoKey, Key};

/// The maximum length in bytes, and the maximum number of parameters, of a query that is searched. There is a
/// maximum because a request may be compared with many rules. Servers refuse longer queries by default.
const BYTES_MAX: usize = 8 << 10;
const PARAMETERS_MAX: usize = 256;

/// Returns an extractor of a parameter of the query: `key::query("api_key")`.
///
/// Names and values are percent-decoded, and `+` is a space, as in forms. So a client does not get a second allowance
/// with another spelling.
///
/// The key is missing if the parameter is absent or empty. In these cases all requests share one key, because the
/// service may read another value than the extractor:
///
/// * The parameter is given twice, or as `name[…]`, which some servers read as `name`.
/// * The value is not percent-encoded UTF-8, such as `%zz` or `%ff`.
/// * The query has more than 8 KiB or 256 parameters. A longer query is not searched.
///
/// The case of names matters, and only `&` separates parameters. The value is not checked; see
/// [`header`](super::header).
///
/// ```
/// use http::Request;
/// use tower_ratelimit::{Head, Key, key};
/// # fn main() -> Result<(), http::Error> {
/// let by_key = key::query("api_key");
/// let request = Request::get("/?page=2&api_key=a%2Db").body(())?;
/// assert_eq!(by_key(&Head::from(&request)), Key::of("a-b"));
/// # Ok(()) }
/// ```
pub fn query(name: impl Into<String>) -> impl Fn(&Head<'_>) -> Option<Key> + Clone + Send + Sync + 'static {
    let name = name.into();
    move |head| match parameter(head, &name) {
        QueryParameter::Absent => None,
        QueryParameter::Value(value) => (!value.is_empty()).then(|| value.into_key())?,
        QueryParameter::Unclear => Some(Key::ambiguous()),
    }
}

/// A parameter of a request's query.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum QueryParameter<'a> {
    Absent,
    /// The decoded value.
    Value(Cow<'a, str>),
    /// The service may read another value than this crate.
    Unclear,
}

/// Finds a parameter, in time that is linear in the length of the query.
pub(crate) fn parameter<'a>(head: &Head<'a>, name: &str) -> QueryParameter<'a> {
    let query = original_uri(head).query().unwrap_or_default();
    if query.len() > BYTES_MAX {
        return QueryParameter::Unclear;
    }
    let mut found = None;
    for (count, pair) in query.split('&').enumerate() {
        if count == PARAMETERS_MAX {
            return QueryParameter::Unclear;
        }
        let (other, value) = pair.split_once('=').unwrap_or((pair, ""));
        // The comparison ends at the first byte that differs.
        let mut rest = decoded(other.as_bytes());
        if name.bytes().all(|byte| rest.next() == Some(byte)) {
            match rest.next() {
                None if found.is_none() => found = Some(value),
                None | Some(b'[') => return QueryParameter::Unclear,
                Some(_) => {}
            }
        }
    }
    let Some(value) = found else { return QueryParameter::Absent };
    let bytes = value.as_bytes();
    if !bytes.iter().any(|byte| matches!(byte, b'%' | b'+')) {
        return QueryParameter::Value(Cow::Borrowed(value));
    }
    let escapes = bytes.split(|byte| *byte == b'%').skip(1);
    if !escapes.into_iter().all(|rest| matches!(rest, [a, b, ..] if a.is_ascii_hexdigit() && b.is_ascii_hexdigit())) {
        return QueryParameter::Unclear;
    }
    match String::from_utf8(decoded(bytes).collect()) {
        Ok(value) => QueryParameter::Value(Cow::Owned(value)),
        Err(_) => QueryParameter::Unclear,
    }
}

/// Decodes bytes of a query. A `%` that begins no valid escape stays as it is.
fn decoded(bytes: &[u8]) -> impl Iterator<Item = u8> {
    // A `+` that was percent-encoded is not a space.
    bytes.split_inclusive(|byte| *byte == b'+').flat_map(|part| match part.split_last() {
        Some((b'+', before)) => percent_decode(before).chain(Some(b' ')),
        _ => percent_decode(part).chain(None),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(query: &str, name: &str, check: impl FnOnce(QueryParameter<'_>)) {
        let (parts, ()) = http::Request::get(format!("/a?{query}")).body(()).unwrap().into_parts();
        check(parameter(&Head::from(&parts), name));
    }

    #[test]
    fn parameter_is_decoded_as_in_forms() {
        for (query, name, value) in [
            ("q=1", "q", "1"),
            ("a=2&q=1&b=3", "q", "1"),
            ("q", "q", ""),
            ("q=", "q", ""),
            ("q=a=b", "q", "a=b"),
            ("%71=%31", "q", "1"),
            ("sort+by=a+b%2B%20", "sort by", "a b+ "),
            ("sort%5bby%5d=x", "sort[by]", "x"),
            ("q=caf%C3%A9", "q", "café"),
            ("Q=2&qq=3&q%00=4&q=1", "q", "1"),
            ("%zz=2&q=1", "q", "1"),
            ("a;q=2&q=1", "q", "1"),
        ] {
            found(query, name, |found| assert_eq!(found, QueryParameter::Value(value.into()), "{query}"));
        }
        for query in ["", "a=q", "Q=1", "qq=1", "a;q=1", "%2571=1", "q%5Da=1"] {
            found(query, "q", |found| assert_eq!(found, QueryParameter::Absent, "{query}"));
        }
    }

    #[test]
    fn parameter_that_servers_read_differently_is_unclear() {
        for query in
            ["q=1&q=2", "q=1&q=1", "q&%71=1", "q=1&q[]=2", "q%5B0%5D=2", "q=%", "q=%4", "q=%zz", "q=%ff", "q=%C3"]
        {
            found(query, "q", |found| assert_eq!(found, QueryParameter::Unclear, "{query}"));
        }
        let many = |count: usize| format!("q=1{}", "&a=2".repeat(count - 1));
        found(&many(PARAMETERS_MAX), "q", |found| assert_eq!(found, QueryParameter::Value("1".into())));
        found(&many(PARAMETERS_MAX + 1), "q", |found| assert_eq!(found, QueryParameter::Unclear));
        let long = |bytes: usize| format!("q=1&a={}", "x".repeat(bytes - 6));
        found(&long(BYTES_MAX), "q", |found| assert_eq!(found, QueryParameter::Value("1".into())));
        found(&long(BYTES_MAX + 1), "q", |found| assert_eq!(found, QueryParameter::Unclear));
    }

    #[test]
    fn parameter_is_a_key() {
        let key = |query: &str| {
            let (parts, ()) = http::Request::get(format!("/a?{query}")).body(()).unwrap().into_parts();
            super::query("user")(&Head::from(&parts))
        };
        assert_eq!(key("user=alice"), Key::of("alice"));
        assert_eq!(key("us%65r=%61lice"), Key::of("alice"));
        assert_eq!(key("user=alice&user=bob"), Some(Key::ambiguous()));
        assert_eq!((key("user="), key("name=alice")), (None, None));
    }
}
