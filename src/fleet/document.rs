//! The text that processes share: lines of words.
//!
//! The first line is `tower-ratelimit-fleet 1 REVISION`. Each other line begins with its kind. A line of a kind that
//! this version does not know stays as it is.

use std::collections::{BTreeMap, HashMap, VecDeque};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, percent_encode};

use super::change::{FleetAction, FleetChange, FleetEntry, FleetKind, FleetTarget, invalid, kept};
use super::error::{FleetError, FleetErrorKind};
use crate::base::time::{Timestamp, Utc};

/// The longest text in bytes. A store takes values of up to 945 kB.
pub(super) const TEXT_MAX: usize = 900_000;

/// The maximum number of entries.
const ENTRIES_MAX: usize = 20_000;

/// The maximum number of actions that are kept.
const ACTIONS_MAX: usize = 100;

const TITLE: &str = "tower-ratelimit-fleet 1 ";

/// The words that begin the line of an action, and of the author of a revision.
const ACTION: &str = "did";
const AUTHOR: &str = "by";

/// The bytes that a word has percent-encoded.
const ENCODED: &AsciiSet = &CONTROLS.add(b' ').add(b'%');

/// The settings of operators.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct FleetDocument {
    pub(super) revision: u64,
    pub(super) entries: BTreeMap<FleetTarget, FleetEntry>,
    /// The latest first.
    pub(super) actions: VecDeque<FleetAction>,
    /// The lines of other versions.
    unknown: Vec<Box<str>>,
}

/// The author of a change, its time and its reason.
#[derive(Clone, Copy)]
pub(super) struct FleetAuthor<'a> {
    pub(super) by: &'a str,
    pub(super) why: &'a str,
    pub(super) at: Timestamp,
    /// A part of the version that the change makes.
    pub(super) tag: u64,
}

impl FleetDocument {
    /// Reads a text. Returns `None` if this version cannot read the text.
    pub(super) fn parse(text: &str) -> Option<Self> {
        if text.len() > TEXT_MAX {
            return None;
        }
        let mut lines = text.lines();
        let revision = lines.next()?.strip_prefix(TITLE)?.parse().ok()?;
        let mut document = Self { revision, ..Self::default() };
        let mut authors = HashMap::new();
        for line in lines {
            let words: Vec<&str> = line.split(' ').collect();
            let [first, rest @ ..] = words.as_slice() else { continue };
            if first.is_empty() {
                continue;
            }
            let is_read = match *first {
                ACTION => action(rest).map(|action| document.actions.push_back(action)),
                AUTHOR => author(rest).map(|(revision, author)| drop(authors.insert(revision, author))),
                kind => {
                    let entry = entry(kind, rest, &authors);
                    entry.map(|entry| drop(document.entries.insert(entry.target.clone(), entry)))
                }
            };
            if is_read.is_none() {
                document.unknown.push(line.into());
            }
        }
        document.actions.truncate(ACTIONS_MAX);
        Some(document)
    }

    pub(super) fn to_text(&self) -> String {
        let mut text = format!("{TITLE}{}\n", self.revision);
        // One change may make many entries, so the author is written once.
        let authors: BTreeMap<u64, &FleetEntry> = self.entries.values().map(|entry| (entry.revision, entry)).collect();
        for (revision, FleetEntry { at, by, why, .. }) in authors {
            let words = [AUTHOR.to_owned(), revision.to_string(), time(Some(*at)), word(by), word(why)];
            push_line(&mut text, words.into_iter());
        }
        for FleetEntry { target, value, until, revision, .. } in self.entries.values() {
            let words = [word(value), time(*until), revision.to_string()];
            push_line(&mut text, target_words(target).into_iter().chain(words));
        }
        for FleetAction { revision, tag, at, by, why, target, value, until } in &self.actions {
            let head = [ACTION.to_owned(), revision.to_string(), tag.to_string(), time(Some(*at)), word(by), word(why)];
            let value = value.as_ref().map_or_else(|| "ended".to_owned(), |value| format!("={}", word(value)));
            push_line(&mut text, head.into_iter().chain(target_words(target)).chain([value, time(*until)]));
        }
        for line in &self.unknown {
            text.push_str(line);
            text.push('\n');
        }
        text
    }

    /// Returns the document after these changes.
    pub(super) fn changed(&self, changes: &[FleetChange], author: FleetAuthor<'_>) -> Result<Self, FleetError> {
        let mut next = self.clone();
        next.revision += 1;
        next.entries.retain(|_, entry| entry.holds(author.at));
        for change in changes {
            self.refuse_unseen(change)?;
            next.make(change, author);
        }
        next.actions.truncate(ACTIONS_MAX);
        if next.entries.len() > ENTRIES_MAX || next.to_text().len() > TEXT_MAX {
            let message = format!(
                "at most {ENTRIES_MAX} entries and {TEXT_MAX} bytes are kept: end those that are no longer needed, or let \
                 them end by time"
            );
            return Err(FleetError::new(FleetErrorKind::Full, message));
        }
        Ok(next)
    }

    /// Returns an error if the target was changed after the revision that the change was made on.
    fn refuse_unseen(&self, change: &FleetChange) -> Result<(), FleetError> {
        let Some(seen) = change.seen else { return Ok(()) };
        let later = self.actions.iter().find(|action| action.target == change.target && action.revision > seen);
        let Some(FleetAction { by, at, revision, why, .. }) = later else {
            // A change that is older than the kept actions shows only in its entry.
            let entry = self.entries.get(&change.target).filter(|entry| entry.revision > seen);
            let Some(entry) = entry else { return Ok(()) };
            return Err(conflict(&entry.by, entry.at, entry.revision, &entry.why));
        };
        Err(conflict(by, *at, *revision, why))
    }

    fn make(&mut self, change: &FleetChange, author: FleetAuthor<'_>) {
        let (target, FleetAuthor { at, tag, .. }) = (&change.target, author);
        let (by, why) = (kept(author.by), kept(author.why));
        let until = change.lasting.map(|lasting| at.saturating_add(lasting));
        let (revision, before) = (self.revision, self.entries.remove(target));
        if target.kind == FleetKind::Rules {
            // A rollback puts the former text in force. `None` stands for the text of the file.
            let former = FleetTarget { kind: FleetKind::FormerRules, ..target.clone() };
            match before {
                Some(entry) => {
                    drop(self.entries.insert(former.clone(), FleetEntry { target: former, until: None, ..entry }))
                }
                None => drop(self.entries.remove(&former)),
            }
        }
        if let Some(value) = &change.value {
            let (by, why) = (by.clone(), why.clone());
            let entry = FleetEntry { target: target.clone(), value: value.clone(), until, revision, at, by, why };
            self.entries.insert(target.clone(), entry);
        }
        let value = change.value.as_deref().map(kept);
        self.actions.push_front(FleetAction { revision, tag, at, by, why, target: target.clone(), value, until });
    }

    /// Returns when an entry that holds ends next.
    pub(super) fn next_end(&self, now: Timestamp) -> Option<Timestamp> {
        self.entries.values().filter(|entry| entry.holds(now)).filter_map(|entry| entry.until).min()
    }

    /// Returns the revision with an action of this tag.
    pub(super) fn made(&self, tag: u64) -> Option<u64> {
        self.actions.iter().find(|action| action.tag == tag).map(|action| action.revision)
    }
}

fn conflict(by: &str, at: Timestamp, revision: u64, why: &str) -> FleetError {
    let message = format!("{by} changed it in revision {revision}, at {}: {why}", Utc(at));
    FleetError::new(FleetErrorKind::Conflict, message)
}

/// Returns the change that puts the former rules in force.
pub(super) fn rollback(document: &FleetDocument, name: &str) -> Result<FleetChange, FleetError> {
    let target = |kind| FleetTarget { kind, name: name.into(), subject: Box::default() };
    let (rules, former) = (target(FleetKind::Rules), target(FleetKind::FormerRules));
    if !document.entries.contains_key(&rules) && !document.entries.contains_key(&former) {
        return Err(invalid(format!("no rules were put in force for `{name}`: those of the file are")));
    }
    let value = document.entries.get(&former).map(|entry| entry.value.clone());
    Ok(FleetChange { target: rules, value, lasting: None, seen: Some(document.revision) })
}

fn push_line(text: &mut String, words: impl Iterator<Item = String>) {
    for (at, word) in words.enumerate() {
        if at > 0 {
            text.push(' ');
        }
        text.push_str(&word);
    }
    text.push('\n');
}

/// Encodes a text as a word. An empty text is `-`.
fn word(text: &str) -> String {
    match percent_encode(text.as_bytes(), ENCODED).to_string() {
        word if word.is_empty() => "-".to_owned(),
        word if word == "-" => "%2D".to_owned(),
        word => word,
    }
}

fn text(word: &str) -> Option<Box<str>> {
    if word == "-" { Some("".into()) } else { Some(percent_decode_str(word).decode_utf8().ok()?.into()) }
}

/// Writes an instant in microseconds, or `-`.
fn time(at: Option<Timestamp>) -> String {
    at.map_or_else(|| "-".to_owned(), |at| at.as_micros().to_string())
}

fn read_time(word: &str) -> Option<Option<Timestamp>> {
    if word == "-" { Some(None) } else { word.parse().ok().map(|us| Some(Timestamp::from_micros(us))) }
}

fn target_words(target: &FleetTarget) -> [String; 3] {
    // Keys are bytes, and base64 is a short text of them.
    let subject = match &*target.subject {
        [] => "-".to_owned(),
        subject => format!("={}", URL_SAFE_NO_PAD.encode(subject)),
    };
    [target.kind.to_string(), word(&target.name), subject]
}

fn target(kind: &str, name: &str, subject: &str) -> Option<FleetTarget> {
    let subject = match subject.strip_prefix('=') {
        Some(subject) => URL_SAFE_NO_PAD.decode(subject).ok()?,
        None => Vec::new(),
    };
    let target = FleetTarget { kind: kind.parse().ok()?, name: text(name)?, subject: subject.into() };
    let is_whole = match target.kind {
        FleetKind::Network => target.network().is_some(),
        kind if kind.has_subject() => target.key().is_some(),
        _ => target.subject.is_empty(),
    };
    is_whole.then_some(target)
}

/// The author of a revision: when, who and why.
type RevisionAuthor = (Timestamp, Box<str>, Box<str>);

fn author(words: &[&str]) -> Option<(u64, RevisionAuthor)> {
    let [revision, at, by, why] = words else { return None };
    Some((revision.parse().ok()?, (read_time(at)??, text(by)?, text(why)?)))
}

fn entry(kind: &str, words: &[&str], authors: &HashMap<u64, RevisionAuthor>) -> Option<FleetEntry> {
    let [name, subject, value, until, revision] = words else { return None };
    let revision = revision.parse().ok()?;
    let (at, by, why) = authors.get(&revision)?.clone();
    let (target, value, until) = (target(kind, name, subject)?, text(value)?, read_time(until)?);
    Some(FleetEntry { target, value, until, revision, at, by, why })
}

fn action(words: &[&str]) -> Option<FleetAction> {
    let [revision, tag, at, by, why, kind, name, subject, value, until] = words else { return None };
    let target = target(kind, name, subject)?;
    let value = match value.strip_prefix('=') {
        Some(value) => Some(text(value)?),
        None => None,
    };
    let (until, at) = (read_time(until)?, read_time(at)??);
    let (revision, tag) = (revision.parse().ok()?, tag.parse().ok()?);
    Some(FleetAction { revision, tag, at, by: text(by)?, why: text(why)?, target, value, until })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::middleware::charge::access::Access;
    use crate::mode::Mode;
    use crate::quota::Quota;

    const NOW: Timestamp = Timestamp::from_micros(1_000_000);

    fn author(tag: u64) -> FleetAuthor<'static> {
        FleetAuthor { by: "alice b", why: "", at: NOW, tag }
    }

    fn changes() -> Vec<FleetChange> {
        vec![
            FleetChange::mode("-", Mode::Shadow),
            FleetChange::quota("a b%\n", Quota::per_minute(7)),
            FleetChange::override_quota("customer", ("acme", 7), Quota::per_hour(9)).unwrap(),
            FleetChange::plan("customer", "acme", 2).unwrap(),
            FleetChange::network("clients", "203.0.113.7", Access::Deny).unwrap().lasting(Duration::from_secs(9)),
            FleetChange::key("clients", "leaked", Access::Deny).unwrap(),
            FleetChange::rules("rules", "rules: []\n# ü\n"),
        ]
    }

    #[test]
    fn document_is_read_as_it_was_written() {
        let first = FleetDocument::default().changed(&changes(), author(1)).unwrap();
        let second = first.changed(&[FleetChange::end(changes()[0].target.clone())], author(2)).unwrap();
        for document in [FleetDocument::default(), first, second] {
            assert_eq!(FleetDocument::parse(&document.to_text()).as_ref(), Some(&document), "{}", document.to_text());
        }
    }

    #[test]
    fn line_of_another_version_stays() {
        let text = "tower-ratelimit-fleet 1 4\nby 1 1 a b\nfuture a b c\nmode x y\n\nmode a - later - 1\nmode a - shadow - 9\n";
        let document = FleetDocument::parse(text).unwrap();
        let next = document.changed(&changes(), author(1)).unwrap();
        for line in ["\nfuture a b c\n", "\nmode x y\n", "\nmode a - later - 1\n", "\nmode a - shadow - 9\n"] {
            assert!(next.to_text().contains(line), "{line}");
        }
        assert_eq!(next.revision, 5);
        assert_eq!(FleetDocument::parse("tower-ratelimit-fleet 2 4\n"), None);
        assert_eq!(FleetDocument::parse(""), None);
    }

    #[test]
    fn target_that_another_operator_changed_is_a_conflict() {
        let target = changes()[0].clone();
        let first = FleetDocument::default().changed(&changes(), author(1)).unwrap();
        let error = first.changed(&[target.clone().seen(0)], author(2)).unwrap_err();
        assert_eq!(error.kind(), FleetErrorKind::Conflict);
        assert!(error.to_string().starts_with("alice b changed it in revision 1"), "{error}");
        assert!(first.changed(&[target.clone().seen(1)], author(2)).is_ok());
        let ended = first.changed(&[FleetChange::end(target.target.clone())], author(2)).unwrap();
        assert!(ended.changed(&[target.seen(1)], author(3)).is_err(), "the end was a change");
    }

    #[test]
    fn entries_and_actions_are_bounded() {
        let many = |count: usize| -> Vec<FleetChange> {
            (0..count).map(|n| FleetChange::override_quota("customer", n, Quota::per_minute(600)).unwrap()).collect()
        };
        let document = FleetDocument::default().changed(&many(10_000), author(1)).unwrap();
        assert_eq!((document.entries.len(), document.actions.len()), (10_000, ACTIONS_MAX));
        let error = FleetDocument::default().changed(&many(ENTRIES_MAX + 1), author(1)).unwrap_err();
        assert_eq!(error.kind(), FleetErrorKind::Full);
        let long = FleetChange::rules("rules", "a".repeat(TEXT_MAX));
        assert_eq!(document.changed(&[long], author(2)).unwrap_err().kind(), FleetErrorKind::Full);
    }

    #[test]
    fn ended_entry_leaves_with_the_next_change() {
        let first = FleetDocument::default().changed(&changes(), author(1)).unwrap();
        let later = FleetAuthor { at: NOW.saturating_add(Duration::from_secs(9)), ..author(2) };
        let next = first.changed(&[], later).unwrap();
        assert_eq!(first.entries.len() - next.entries.len(), 1);
    }

    #[test]
    fn rollback_puts_the_former_rules_in_force() {
        let set = |document: &FleetDocument, change: FleetChange| document.changed(&[change], author(1)).unwrap();
        let rules = |document: &FleetDocument| {
            document
                .entries
                .values()
                .find(|entry| entry.target.kind == FleetKind::Rules)
                .map(|entry| entry.value.clone())
        };
        assert!(rollback(&FleetDocument::default(), "rules").is_err());
        let first = set(&FleetDocument::default(), FleetChange::rules("rules", "one"));
        let second = set(&first, FleetChange::rules("rules", "two"));
        let back = set(&second, rollback(&second, "rules").unwrap());
        assert_eq!(rules(&back).as_deref(), Some("one"));
        let forth = set(&back, rollback(&back, "rules").unwrap());
        assert_eq!(rules(&forth).as_deref(), Some("two"));
        assert_eq!(rules(&set(&first, rollback(&first, "rules").unwrap())), None, "the file's");
    }
}
