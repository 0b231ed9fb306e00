//! Decides whether a request on the operators' address may act.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::HeaderMap;
use http::header::AUTHORIZATION;

use super::log::Log;

/// The shortest token.
const TOKEN_MIN: usize = 16;

/// The largest file, in bytes.
const FILE_MAX: usize = 1 << 20;

/// The shortest time between two readings of the file.
const EVERY_MIN: Duration = Duration::from_millis(100);

/// The time for which a changed file must stay unchanged before it is used, because its writer may only pause.
const SETTLES: Duration = Duration::from_secs(1);

/// The operators of a file, which is read again when it changes. After an error they stay as they were.
pub(crate) struct Operators {
    file: PathBuf,
    log: Log,
    state: Mutex<State>,
    /// Held by the thread that reads the file, so that no older text replaces a newer one.
    turn: Mutex<()>,
}

struct State {
    /// The result of the last reading.
    reading: Reading,
    in_force: Arc<Listed>,
}

/// The text of the file, or why it cannot be read.
type Reading = Result<String, String>;

/// Operators, each with a token.
struct Listed(Vec<(String, String)>);

/// The operator who sent a request, in its extensions.
#[derive(Clone)]
pub(crate) struct Operator(pub(crate) String);

impl Operators {
    /// Reads a file with an operator in each line: a name and a token.
    pub(crate) fn read(file: &Path, log: Log) -> Result<Self, String> {
        let reading = text_of(file);
        let listed = reading.clone().and_then(|text| Listed::parse(&text));
        let in_force = Arc::new(listed.map_err(|error| format!("the operators in {}: {error}", file.display()))?);
        let state = Mutex::new(State { reading, in_force });
        Ok(Self { file: file.to_owned(), log, state, turn: Mutex::default() })
    }

    /// Reads the file again.
    pub(crate) fn reload(&self) {
        self.reload_if(|_| true);
    }

    fn reload_if(&self, is_wanted: impl FnOnce(&Reading) -> bool) {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let reading = text_of(&self.file);
        if is_wanted(&reading) {
            self.take(reading);
        }
    }

    /// Starts a thread that looks for a new version of the file, as another thread does for rules.
    pub(crate) fn follow(self: &Arc<Self>, every: Duration) -> io::Result<()> {
        let operators = Arc::clone(self);
        let watch = move || loop {
            thread::sleep(every.max(EVERY_MIN));
            let reading = text_of(&operators.file);
            if operators.has_read(&reading) {
                continue;
            }
            thread::sleep(SETTLES);
            operators.reload_if(|again| *again == reading);
        };
        thread::Builder::new().name("operators".to_owned()).spawn(watch).map(drop)
    }

    fn has_read(&self, reading: &Reading) -> bool {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).reading == *reading
    }

    /// Puts the operators of a text in force, unless it has a problem.
    fn take(&self, reading: Reading) {
        let listed = reading.clone().and_then(|text| Listed::parse(&text));
        let (is_new, count) = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let is_new = state.reading != reading;
            state.reading = reading;
            let count = listed.map(|listed| {
                let count = listed.0.len();
                state.in_force = Arc::new(listed);
                count
            });
            (is_new, count)
        };
        match count {
            Ok(count) if is_new => {
                self.log.info("operators-loaded", format_args!("the file of operators names {count}, who may act"));
            }
            Ok(_) => {}
            Err(error) => {
                let file = self.file.display();
                self.log.warn("operators-refused", format_args!("the operators stay as they were: {file}: {error}"));
            }
        }
    }

    /// Returns the operator of a request: by `Authorization: Bearer TOKEN`, or, for browsers, by `Basic` with the name
    /// and the token.
    pub(crate) fn who(&self, headers: &HeaderMap) -> Option<Operator> {
        let listed = Arc::clone(&self.state.lock().unwrap_or_else(PoisonError::into_inner).in_force);
        listed.who(headers)
    }
}

/// Returns the text of a file.
fn text_of(file: &Path) -> Reading {
    let read = || {
        let mut text = String::new();
        File::open(file)?.take(FILE_MAX as u64 + 1).read_to_string(&mut text).map(|_| text)
    };
    let text = read().map_err(|cause: io::Error| cause.to_string())?;
    if text.len() > FILE_MAX { Err(format!("it has more than {FILE_MAX} bytes")) } else { Ok(text) }
}

impl Listed {
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

    fn who(&self, headers: &HeaderMap) -> Option<Operator> {
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
        let operators = Listed::parse("# who\nalice  0123456789abcdef\n\nbob fedcba9876543210\n").unwrap();
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
            assert!(Listed::parse(text).is_err_and(|error| error.contains(said)), "{text}");
        }
    }
}
