//! Decides whether a request on the operators' address may act.

use std::fs;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::HeaderMap;
use http::header::AUTHORIZATION;

/// The shortest token.
const TOKEN_MIN: usize = 16;

/// The operators of a file, each with a token.
pub(crate) struct Operators(Vec<(String, String)>);

/// The operator who sent a request, in its extensions.
#[derive(Clone)]
pub(crate) struct Operator(pub(crate) String);

impl Operators {
    /// Reads a file with an operator in each line: a name and a token.
    pub(crate) fn read(file: &Path) -> Result<Self, String> {
        let error = |message: String| format!("error: the operators in {}: {message}", file.display());
        let text = fs::read_to_string(file).map_err(|cause| error(cause.to_string()))?;
        Self::parse(&text).map_err(error)
    }

    fn parse(text: &str) -> Result<Self, String> {
        let mut operators: Vec<(String, String)> = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let number = number + 1;
            let mut words = line.split_whitespace();
            match (words.next(), words.next(), words.next()) {
                (None, ..) => {}
                (Some(name), ..) if name.starts_with('#') => {}
                (Some(name), Some(token), None) if token.len() >= TOKEN_MIN && !name.contains(':') => {
                    if operators.iter().any(|(known, _)| known == name) {
                        return Err(format!("line {number}: {name} comes twice"));
                    }
                    operators.push((name.to_owned(), token.to_owned()));
                }
                _ => return Err(format!("line {number}: write a name and a token of at least {TOKEN_MIN} characters")),
            }
        }
        if operators.is_empty() { Err("there is none".to_owned()) } else { Ok(Self(operators)) }
    }

    /// Returns the operator of a request: by `Authorization: Bearer TOKEN`, or, for browsers, by `Basic` with the name
    /// and the token.
    pub(crate) fn who(&self, headers: &HeaderMap) -> Option<Operator> {
        let mut values = headers.get_all(AUTHORIZATION).iter();
        let (Some(value), None) = (values.next(), values.next()) else { return None };
        let (scheme, given) = value.to_str().ok()?.split_once(' ')?;
        let (name, token) = match scheme.to_ascii_lowercase().as_str() {
            "bearer" => (None, given.trim().to_owned()),
            "basic" => {
                let pair = String::from_utf8(STANDARD.decode(given.trim()).ok()?).ok()?;
                let (name, token) = pair.split_once(':')?;
                (Some(name.to_owned()), token.to_owned())
            }
            _ => return None,
        };
        let mut found = None;
        for (known, known_token) in &self.0 {
            // All are compared, and each as a whole, so that the time says nothing about tokens.
            if is_equal(known_token.as_bytes(), token.as_bytes()) && name.as_ref().is_none_or(|name| name == known) {
                found = Some(Operator(known.clone()));
            }
        }
        found
    }
}

/// Compares two texts in a time that depends on their lengths only.
fn is_equal(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operator_is_known_by_the_token_only() {
        let operators = Operators::parse("# who\nalice  0123456789abcdef\n\nbob fedcba9876543210\n").unwrap();
        let who = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(AUTHORIZATION, value.parse().unwrap());
            operators.who(&headers).map(|operator| operator.0)
        };
        assert_eq!(who("Bearer 0123456789abcdef").as_deref(), Some("alice"));
        assert_eq!(who("bearer fedcba9876543210").as_deref(), Some("bob"));
        let basic = |pair: &str| format!("Basic {}", STANDARD.encode(pair));
        assert_eq!(who(&basic("bob:fedcba9876543210")).as_deref(), Some("bob"));
        for wrong in [
            "Bearer 0123456789abcdeX".to_owned(),
            "Bearer ".to_owned(),
            "0123456789abcdef".to_owned(),
            "Digest 0123456789abcdef".to_owned(),
            basic("alice:fedcba9876543210"),
            basic("alice"),
            "Basic ????".to_owned(),
        ] {
            assert_eq!(who(&wrong), None, "{wrong}");
        }
    }

    #[test]
    fn file_without_proper_tokens_is_refused() {
        for (text, said) in [
            ("", "there is none"),
            ("alice short", "line 1"),
            ("\nalice", "line 2"),
            ("a:b 0123456789abcdef", "line 1"),
            ("a 0123456789abcdef c", "line 1"),
            ("a 0123456789abcdef\na 0123456789abcdeg", "line 2: a comes twice"),
        ] {
            assert!(Operators::parse(text).is_err_and(|error| error.contains(said)), "{text}");
        }
    }
}
