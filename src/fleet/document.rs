//! The text that all processes share. The text consists of lines of words.
//!
//! The first line is `tower-ratelimit-fleet 1 REVISION`. Every further line begins with its kind. A version of
//! this crate keeps lines of kinds that it does not know.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt::Write;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use super::change::{FleetAction, FleetChange, FleetEntry, FleetKind, FleetTarget, invalid, kept};
use super::error::{FleetError, FleetErrorKind};
use super::words::{push_encoded, push_number, push_word, read_text, words};
use crate::base::time::{Timestamp, Utc};

/// The longest text in bytes. A store accepts values of up to 945 kB.
pub(super) const TEXT_MAX: usize = 900_000;

/// The maximum number of entries.
const ENTRIES_MAX: usize = 20_000;

/// The maximum number of actions that are kept.
const ACTIONS_MAX: usize = 100;

/// Revisions are below this number, so that JSON and metrics hold them exactly.
const REVISION_MAX: u64 = 1 << 53;

const TITLE: &str = "tower-ratelimit-fleet 1 ";

/// The first words of three kinds of lines: an action, the author of a revision, and the secret.
const ACTION: &str = "did";
const AUTHOR: &str = "by";
const SECRET: &str = "secret";

/// The settings of operators. A clone shares the entries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct FleetDocument {
    pub(super) revision: u64,
    pub(super) entries: BTreeMap<FleetTarget, Arc<FleetEntry>>,
    /// The latest first.
    pub(super) actions: VecDeque<FleetAction>,
    /// A secret that all processes share, for the tokens of their status pages. The first change makes
    /// it, or the first page that needs it, which makes no revision.
    pub(super) secret: Option<u128>,
    /// The lines of other versions.
    unknown: Vec<Box<str>>,
}

/// The author of a change, its time and its reason.
#[derive(Clone, Copy)]
pub(super) struct FleetAuthor<'a> {
    pub(super) by: &'a str,
    pub(super) why: &'a str,
    pub(super) at: Timestamp,
    /// The lower half of the version that the change makes; see [`FleetAction::tag`].
    pub(super) tag: u64,
    /// The secret that the change adds if the document has no secret yet.
    pub(super) secret: u128,
}

impl FleetDocument {
    /// Reads a text. Returns `None` if this version cannot read the text.
    pub(super) fn parse(text: &str) -> Option<Self> {
        if text.len() > TEXT_MAX {
            return None;
        }
        // `lines` would leave out a carriage return, but only before a line feed. So a line could get a meaning when
        // the text is written again.
        let mut lines = text.split('\n');
        let revision = lines.next()?.strip_prefix(TITLE)?.parse().ok()?;
        if revision >= REVISION_MAX {
            return None;
        }
        let mut document = Self { revision, ..Self::default() };
        let (mut authors, mut entries) = (HashMap::new(), Vec::<(FleetTarget, Arc<FleetEntry>)>::new());
        for line in lines.filter(|line| !line.is_empty()) {
            let is_read = match line.split_once(' ') {
                Some((ACTION, rest)) => action(rest).map(|action| document.actions.push_back(action)),
                Some((AUTHOR, rest)) => author(rest).map(|(revision, author)| drop(authors.insert(revision, author))),
                Some((SECRET, rest)) => {
                    u128::from_str_radix(rest, 16).ok().map(|secret| document.secret = Some(secret))
                }
                Some((kind, rest)) => {
                    let entry = entry(kind, rest, &authors, entries.last().map(|(_, before)| &**before));
                    entry.map(|entry| entries.push((entry.target.clone(), Arc::new(entry))))
                }
                None => None,
            };
            if is_read.is_none() {
                document.unknown.push(line.into());
            }
        }
        document.entries = entries.into_iter().collect();
        document.actions.truncate(ACTIONS_MAX);
        Some(document)
    }

    /// Returns the entries of a kind and a name, in the order of their subjects.
    pub(super) fn entries_of<'a>(
        &'a self,
        kind: FleetKind,
        name: &'a str,
    ) -> impl Iterator<Item = &'a Arc<FleetEntry>> + Clone {
        let entries = self.entries.range(FleetTarget::new(kind, name)..).map(|(_, entry)| entry);
        entries.take_while(move |entry| entry.target.kind == kind && *entry.target.name == *name)
    }

    /// Returns the entries of a kind, in the order of their names.
    #[cfg(feature = "rules")]
    pub(super) fn entries_of_kind(&self, kind: FleetKind) -> impl Iterator<Item = &Arc<FleetEntry>> {
        let entries = self.entries.range(FleetTarget::new(kind, "")..).map(|(_, entry)| entry);
        entries.take_while(move |entry| entry.target.kind == kind)
    }

    pub(super) fn to_text(&self) -> String {
        let mut text = format!("{TITLE}{}\n", self.revision);
        if let Some(secret) = self.secret {
            let _ = writeln!(text, "{SECRET} {secret:032x}"); // writing into a String never fails
        }
        // One change may make many entries, so the author of a change is written once.
        let mut authors: BTreeMap<u64, &FleetEntry> = BTreeMap::new();
        let mut last = None;
        for entry in self.entries.values() {
            if last.replace(entry.revision) != Some(entry.revision) {
                authors.insert(entry.revision, entry);
            }
        }
        for (revision, FleetEntry { at, by, why, .. }) in authors {
            text.push_str(AUTHOR);
            push_number(&mut text, revision);
            push_time(&mut text, Some(*at));
            push_word(&mut text, by);
            push_word(&mut text, why);
            text.push('\n');
        }
        for entry in self.entries.values() {
            let FleetEntry { target, value, until, revision, .. } = &**entry;
            push_target(&mut text, target);
            push_word(&mut text, value);
            push_time(&mut text, *until);
            push_number(&mut text, *revision);
            text.push('\n');
        }
        for FleetAction { revision, tag, at, by, why, target, value, until } in &self.actions {
            text.push_str(ACTION);
            push_number(&mut text, *revision);
            push_number(&mut text, *tag);
            push_time(&mut text, Some(*at));
            push_word(&mut text, by);
            push_word(&mut text, why);
            text.push(' ');
            push_target(&mut text, target);
            match value {
                Some(value) => {
                    text.push_str(" =");
                    push_encoded(&mut text, value);
                }
                None => text.push_str(" ended"),
            }
            push_time(&mut text, *until);
            text.push('\n');
        }
        for line in &self.unknown {
            text.push_str(line);
            text.push('\n');
        }
        text
    }

    /// Returns the document after `changes`, and the text of the new document.
    pub(super) fn changed(
        &self,
        changes: &[FleetChange],
        author: FleetAuthor<'_>,
    ) -> Result<(Self, String), FleetError> {
        let mut next = self.clone();
        next.revision += u64::from(!changes.is_empty()); // without a change only the secret is new
        next.secret.get_or_insert(author.secret);
        next.entries.retain(|_, entry| entry.holds(author.at));
        let by = kept(author.by);
        let first_kept = changes.len().saturating_sub(ACTIONS_MAX);
        for (number, change) in changes.iter().enumerate() {
            self.refuse_unseen(change)?;
            let FleetChange { target, value, lasting, note, .. } = change;
            if value.is_none() && !next.entries.contains_key(target) {
                let FleetTarget { kind, name, .. } = target;
                let message = format!("there is nothing to end: no such `{kind}` of the name `{name}` is set");
                return Err(FleetError::new(FleetErrorKind::Conflict, message));
            }
            let action = FleetAction {
                revision: next.revision,
                tag: author.tag,
                at: author.at,
                by: Arc::clone(&by),
                why: match note {
                    Some(note) if author.why.trim().is_empty() => kept(note),
                    Some(note) => kept(&format!("{note}: {}", author.why)),
                    None => kept(author.why),
                },
                target: target.clone(),
                value: None,
                until: lasting.map(|lasting| author.at.saturating_add(lasting)),
            };
            next.make(value.as_ref(), &action);
            if number >= first_kept {
                next.actions.push_front(FleetAction { value: value.as_deref().map(kept), ..action });
            }
        }
        next.actions.truncate(ACTIONS_MAX);
        let text = next.to_text();
        if next.entries.len() > ENTRIES_MAX || text.len() > TEXT_MAX || next.revision >= REVISION_MAX {
            let message = format!(
                "at most {ENTRIES_MAX} entries and {TEXT_MAX} bytes are kept: end entries that are no longer needed, \
                 or set entries that end after a time"
            );
            return Err(FleetError::new(FleetErrorKind::Full, message));
        }
        Ok((next, text))
    }

    /// Returns an error if the target was changed after the revision that the author of the change had
    /// seen, or if that revision does not exist.
    fn refuse_unseen(&self, change: &FleetChange) -> Result<(), FleetError> {
        let Some(seen) = change.seen else { return Ok(()) };
        if seen > self.revision {
            let message = format!("the revision {seen} does not exist yet: the latest is {}", self.revision);
            return Err(FleetError::new(FleetErrorKind::Conflict, message));
        }
        let later = self.actions.iter().find(|action| action.target == change.target && action.revision > seen);
        let Some(FleetAction { by, at, revision, why, .. }) = later else {
            // The document keeps only the last actions. An older change shows only in the entry that it set.
            let entry = self.entries.get(&change.target).filter(|entry| entry.revision > seen);
            let Some(entry) = entry else { return Ok(()) };
            return Err(conflict(&entry.by, entry.at, entry.revision, &entry.why));
        };
        Err(conflict(by, *at, *revision, why))
    }

    /// Sets the value of an action's target, or ends its entry.
    fn make(&mut self, value: Option<&Arc<str>>, action: &FleetAction) {
        let FleetAction { revision, at, by, why, target, until, .. } = action;
        let before = self.entries.remove(target);
        if target.kind == FleetKind::Rules {
            self.keep_rules(target, before, value);
        }
        if let Some(value) = value {
            let entry = FleetEntry {
                target: target.clone(),
                value: Arc::clone(value),
                until: *until,
                revision: *revision,
                at: *at,
                by: Arc::clone(by),
                why: Arc::clone(why),
            };
            self.entries.insert(target.clone(), Arc::new(entry));
        }
    }

    /// Keeps the rules that are not in force any more: as former rules if other rules are pushed, so that a rollback
    /// restores them, and as undone rules if they are rolled back or ended. A rollback never restores undone rules.
    fn keep_rules(&mut self, rules: &FleetTarget, before: Option<Arc<FleetEntry>>, value: Option<&Arc<str>>) {
        let kept = |kind| FleetTarget { kind, ..rules.clone() };
        if before.as_ref().is_some_and(|before| Some(&before.value) == value) {
            return; // the same rules are pushed again
        }
        let former = self.entries.remove(&kept(FleetKind::FormerRules));
        self.entries.remove(&kept(FleetKind::UndoneRules));
        // If there is no entry, the rules of the file were in force.
        let Some(before) = before else { return };
        // A push of the former rules is a rollback, too.
        let is_restored = former.as_ref().map(|former| &former.value) == value;
        let is_undone = value.is_none() || is_restored;
        let target = kept(if is_undone { FleetKind::UndoneRules } else { FleetKind::FormerRules });
        let entry = FleetEntry { target: target.clone(), until: None, ..FleetEntry::clone(&before) };
        self.entries.insert(target, Arc::new(entry));
    }

    /// Returns the next instant at which an entry that is in force ends.
    pub(super) fn next_end(&self, now: Timestamp) -> Option<Timestamp> {
        self.entries.values().filter(|entry| entry.holds(now)).filter_map(|entry| entry.until).min()
    }

    /// Returns the revision that an action with this tag made.
    pub(super) fn made(&self, tag: u64) -> Option<u64> {
        self.actions.iter().find(|action| action.tag == tag).map(|action| action.revision)
    }

    /// Returns whether later actions have displaced all actions of a revision.
    pub(super) fn has_displaced(&self, revision: u64) -> bool {
        self.actions.len() == ACTIONS_MAX && self.actions.back().is_some_and(|oldest| oldest.revision > revision)
    }
}

fn conflict(by: &str, at: Timestamp, revision: u64, why: &str) -> FleetError {
    let message = format!("{by} changed it in revision {revision}, at {}: {why}", Utc(at));
    FleetError::new(FleetErrorKind::Conflict, message)
}

/// Returns the change that puts the rules from before the last push in force again, and the entry that has their text.
/// Returns no entry if these are the rules of the file.
pub(super) fn rollback(
    document: &FleetDocument,
    name: &str,
    seen: Option<u64>,
) -> Result<(FleetChange, Option<Arc<FleetEntry>>), FleetError> {
    let entry = |kind| document.entries.get(&FleetTarget::new(kind, name)).map(Arc::clone);
    let former = entry(FleetKind::FormerRules);
    let value = former.as_ref().map(|entry| Arc::clone(&entry.value));
    let note = match &former {
        Some(former) => format!("rolled back to revision {}", former.revision),
        None => "rolled back to the rules of each process's own file".to_owned(),
    };
    let change = FleetChange::of(FleetTarget::new(FleetKind::Rules, name), value);
    let change = FleetChange { seen, note: Some(note.into()), ..change };
    document.refuse_unseen(&change)?;
    if let Some(undone) = entry(FleetKind::UndoneRules) {
        let FleetEntry { by, revision, .. } = &*undone;
        let to_the_file = match entry(FleetKind::Rules) {
            Some(_) => ", or end the pushed rules (`End` on the status page) to use the rules of each server's file",
            None => "",
        };
        let message = format!(
            "there is no push to roll back: the rules that {by} put in force in revision {revision} were rolled back or \
             ended, and a rollback never restores such rules. Push the rules that should be in force{to_the_file}. The \
             undone ones are kept as `{}` of `{name}`",
            undone.target.kind
        );
        return Err(FleetError::new(FleetErrorKind::Conflict, message));
    }
    if former.is_none() && entry(FleetKind::Rules).is_none() {
        return Err(invalid(format!("no rules were put in force for `{name}`: the rules of the file are in force")));
    }
    Ok((change, former))
}

/// Writes a space, and then an instant in microseconds, or `-` for `None`.
fn push_time(text: &mut String, at: Option<Timestamp>) {
    match at {
        Some(at) => push_number(text, at.as_micros()),
        None => text.push_str(" -"),
    }
}

fn push_target(text: &mut String, target: &FleetTarget) {
    text.push_str(target.kind.as_str());
    push_word(text, &target.name);
    // A key is written in base64, because keys are bytes and base64 writes bytes as a short text.
    if target.subject.is_empty() {
        text.push_str(" -");
    } else {
        text.push_str(" =");
        URL_SAFE_NO_PAD.encode_string(&target.subject, text);
    }
}

fn read_time(word: &str) -> Option<Option<Timestamp>> {
    if word == "-" { Some(None) } else { word.parse().ok().map(|us| Some(Timestamp::from_micros(us))) }
}

/// Returns the text of the previous entry, `before`, if it is equal to `text`, and otherwise `text`. So
/// neighbouring entries with equal texts share memory.
fn shared(text: Arc<str>, before: Option<&Arc<str>>) -> Arc<str> {
    before.filter(|before| **before == text).map_or(text, Arc::clone)
}

fn target(kind: &str, name: &str, subject: &str) -> Option<FleetTarget> {
    let subject = match subject.strip_prefix('=') {
        Some(subject) => URL_SAFE_NO_PAD.decode(subject).ok()?,
        None => Vec::new(),
    };
    let target = FleetTarget { kind: kind.parse().ok()?, name: read_text(name)?, subject: subject.into() };
    let is_whole = match target.kind {
        FleetKind::Network => target.network().is_some(),
        kind if kind.has_subject() => target.key().is_some(),
        _ => target.subject.is_empty(),
    };
    is_whole.then_some(target)
}

/// The author of a revision: when, who and why.
type RevisionAuthor = (Timestamp, Arc<str>, Arc<str>);

fn author(line: &str) -> Option<(u64, RevisionAuthor)> {
    let [revision, at, by, why] = words(line)?;
    Some((revision.parse().ok()?, (read_time(at)??, read_text(by)?, read_text(why)?)))
}

fn entry(
    kind: &str,
    line: &str,
    authors: &HashMap<u64, RevisionAuthor>,
    before: Option<&FleetEntry>,
) -> Option<FleetEntry> {
    let [name, subject, value, until, revision] = words(line)?;
    let revision = revision.parse().ok()?;
    // A line without an author has a meaning now. Otherwise it would get one when its revision is made.
    let (at, by, why) = authors.get(&revision).cloned().unwrap_or_default();
    let mut target = target(kind, name, subject)?;
    target.name = shared(target.name, before.map(|before| &before.target.name));
    let value = shared(read_text(value)?, before.map(|before| &before.value));
    Some(FleetEntry { target, value, until: read_time(until)?, revision, at, by, why })
}

fn action(line: &str) -> Option<FleetAction> {
    let [revision, tag, at, by, why, kind, name, subject, value, until] = words(line)?;
    let target = target(kind, name, subject)?;
    let value = match value.strip_prefix('=') {
        Some(value) => Some(read_text(value)?),
        None => None,
    };
    let (until, at) = (read_time(until)?, read_time(at)??);
    let (revision, tag) = (revision.parse().ok()?, tag.parse().ok()?);
    Some(FleetAction { revision, tag, at, by: read_text(by)?, why: read_text(why)?, target, value, until })
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
        FleetAuthor { by: "alice b", why: "", at: NOW, tag, secret: 7 }
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
        let first = FleetDocument::default().changed(&changes(), author(1)).unwrap().0;
        let second = first.changed(&[FleetChange::end(changes()[0].target.clone())], author(2)).unwrap().0;
        for document in [FleetDocument::default(), first, second] {
            assert_eq!(FleetDocument::parse(&document.to_text()).as_ref(), Some(&document), "{}", document.to_text());
        }
    }

    #[test]
    fn line_of_another_version_stays() {
        let text = "tower-ratelimit-fleet 1 4\nby 1 1 a b\nfuture a b c\nmode x y\n\nmode a - later - 1\nmode b - shadow - 9\n";
        let document = FleetDocument::parse(text).unwrap();
        let next = document.changed(&changes(), author(1)).unwrap().0;
        for line in ["\nfuture a b c\n", "\nmode x y\n", "\nmode a - later - 1\n", "\nmode b - shadow - 9\n"] {
            assert!(next.to_text().contains(line), "{line}");
        }
        assert_eq!(next.revision, 5);
        assert_eq!(FleetDocument::parse("tower-ratelimit-fleet 2 4\n"), None);
        assert_eq!(FleetDocument::parse(&format!("tower-ratelimit-fleet 1 {}\n", u64::MAX)), None);
        assert_eq!(FleetDocument::parse(""), None);
    }

    #[test]
    fn line_that_was_not_read_is_not_read_later() {
        let document = FleetDocument::parse("tower-ratelimit-fleet 1 4\nmode a - enforce - 3\r").unwrap();
        let (next, text) = document.changed(&[FleetChange::mode("a", Mode::Shadow)], author(1)).unwrap();
        assert_eq!(FleetDocument::parse(&text).unwrap(), next);
    }

    #[test]
    fn entry_without_an_author_does_not_undo_a_later_change() {
        let document = FleetDocument::parse("tower-ratelimit-fleet 1 4\nmode a - shadow - 5\n").unwrap();
        let (next, text) = document.changed(&[FleetChange::mode("a", Mode::Enforce)], author(1)).unwrap();
        let again = FleetDocument::parse(&text).unwrap();
        for document in [next, again] {
            let values: Vec<&str> = document.entries.values().map(|entry| &*entry.value).collect();
            assert_eq!(values, ["enforce"], "{text}");
        }
    }

    #[test]
    fn target_that_another_operator_changed_is_a_conflict() {
        let target = changes()[0].clone();
        let first = FleetDocument::default().changed(&changes(), author(1)).unwrap().0;
        let error = first.changed(&[target.clone().seen(0)], author(2)).unwrap_err();
        assert_eq!(error.kind(), FleetErrorKind::Conflict);
        assert!(error.to_string().starts_with("alice b changed it in revision 1"), "{error}");
        assert!(first.changed(&[target.clone().seen(1)], author(2)).is_ok());
        let ended = first.changed(&[FleetChange::end(target.target.clone())], author(2)).unwrap().0;
        assert!(ended.changed(&[target.clone().seen(1)], author(3)).is_err(), "the end was a change");
        let error = first.changed(&[target.seen(2)], author(2)).unwrap_err();
        assert_eq!(error.kind(), FleetErrorKind::Conflict);
        assert!(error.to_string().contains("the revision 2 does not exist yet: the latest is 1"), "{error}");
    }

    #[test]
    fn entry_that_does_not_exist_cannot_be_ended() {
        let first = FleetDocument::default().changed(&changes(), author(1)).unwrap().0;
        let network = changes().into_iter().find(|change| change.lasting.is_some()).unwrap();
        let end = FleetChange::end(network.target);
        let ended = first.changed(std::slice::from_ref(&end), author(2)).unwrap().0;
        let expired = FleetAuthor { at: NOW.saturating_add(Duration::from_secs(9)), ..author(2) };
        for (document, author) in [(&FleetDocument::default(), author(3)), (&ended, author(3)), (&first, expired)] {
            let error = document.changed(std::slice::from_ref(&end), author).unwrap_err();
            assert_eq!(error.kind(), FleetErrorKind::Conflict);
            assert!(error.to_string().contains("no such `network` of the name `clients` is set"), "{error}");
        }
    }

    #[test]
    fn entries_and_actions_are_bounded() {
        let many = |count: usize| -> Vec<FleetChange> {
            (0..count).map(|n| FleetChange::override_quota("customer", n, Quota::per_minute(600)).unwrap()).collect()
        };
        let document = FleetDocument::default().changed(&many(10_000), author(1)).unwrap().0;
        assert_eq!((document.entries.len(), document.actions.len()), (10_000, ACTIONS_MAX));
        let error = FleetDocument::default().changed(&many(ENTRIES_MAX + 1), author(1)).unwrap_err();
        assert_eq!(error.kind(), FleetErrorKind::Full);
    }

    #[test]
    fn document_may_have_the_most_entries_and_bytes() {
        let plans =
            |count: usize| -> Vec<FleetChange> { (0..count).map(|n| FleetChange::plan("c", n, 1).unwrap()).collect() };
        let (_, text) = FleetDocument::default().changed(&plans(ENTRIES_MAX), author(1)).unwrap();
        assert!(text.len() < TEXT_MAX, "the entries are short, so that their number is the bound");
        let error = FleetDocument::default().changed(&plans(ENTRIES_MAX + 1), author(1)).unwrap_err();
        assert_eq!(error.kind(), FleetErrorKind::Full);
        let rules = |bytes: usize| {
            let change = FleetChange::rules("rules", "a".repeat(bytes));
            FleetDocument::default().changed(&[change], author(1))
        };
        let others = rules(10_000).unwrap().1.len() - 10_000;
        let (document, text) = rules(TEXT_MAX - others).unwrap();
        assert_eq!((text.len(), FleetDocument::parse(&text)), (TEXT_MAX, Some(document)));
        assert_eq!(rules(TEXT_MAX - others + 1).unwrap_err().kind(), FleetErrorKind::Full);
    }

    #[test]
    fn ended_entry_leaves_with_the_next_change() {
        let first = FleetDocument::default().changed(&changes(), author(1)).unwrap().0;
        let later = FleetAuthor { at: NOW.saturating_add(Duration::from_secs(9)), ..author(2) };
        let next = first.changed(&[], later).unwrap().0;
        assert_eq!(first.entries.len() - next.entries.len(), 1);
    }

    /// A document with rules, as operators push them and roll them back.
    #[derive(Default)]
    struct Pushed(FleetDocument);

    impl Pushed {
        fn of(texts: &[&str]) -> Self {
            let mut pushed = Self::default();
            texts.iter().for_each(|text| pushed.push(text));
            pushed
        }

        fn change(&mut self, change: FleetChange) {
            self.0 = self.0.changed(&[change], author(1)).unwrap().0;
            // The next process knows only the stored text.
            self.0 = FleetDocument::parse(&self.0.to_text()).unwrap();
        }

        fn push(&mut self, text: &str) {
            self.change(FleetChange::rules("rules", text));
        }

        fn end(&mut self) {
            self.change(FleetChange::end(FleetTarget::new(FleetKind::Rules, "rules")));
        }

        /// Returns the text of an entry.
        fn text(&self, kind: FleetKind) -> Option<&str> {
            self.0.entries.get(&FleetTarget::new(kind, "rules")).map(|entry| &*entry.value)
        }

        /// Returns the text in force after a rollback, and the revision that it is from.
        fn roll_back(&mut self) -> Result<(Option<&str>, Option<u64>), FleetError> {
            let (change, restored) = rollback(&self.0, "rules", None)?;
            self.change(change);
            Ok((self.text(FleetKind::Rules), restored.map(|entry| entry.revision)))
        }
    }

    #[test]
    fn rollback_restores_the_rules_from_before_the_last_push() {
        assert!(Pushed::default().roll_back().is_err());
        for (texts, restored) in [
            (&["one"][..], (None, None)),
            (&["one", "two"], (Some("one"), Some(1))),
            (&["one", "two", "three"], (Some("two"), Some(2))),
            // A push of the text in force keeps the former text.
            (&["one", "two", "two"], (Some("one"), Some(1))),
            (&["one", "one"], (None, None)),
        ] {
            assert_eq!(Pushed::of(texts).roll_back().unwrap(), restored, "{texts:?}");
        }
    }

    #[test]
    fn rollback_never_restores_undone_rules() {
        let mut rolled_back = Pushed::of(&["one", "bad"]);
        rolled_back.roll_back().unwrap();
        let mut to_the_file = Pushed::of(&["bad"]);
        to_the_file.roll_back().unwrap();
        let mut ended = Pushed::of(&["one", "bad"]);
        ended.end();
        // The second push has the rules from before the first one.
        let reverted = Pushed::of(&["one", "bad", "one"]);
        for (mut pushed, in_force) in
            [(rolled_back, Some("one")), (to_the_file, None), (ended, None), (reverted, Some("one"))]
        {
            for _ in 0..2 {
                let error = pushed.roll_back().unwrap_err();
                assert_eq!(error.kind(), FleetErrorKind::Conflict, "{error}");
                assert!(error.to_string().contains("Push the rules that should be in force"), "{error}");
                let can_end = error.to_string().contains("or end the pushed rules (`End` on the status page)");
                assert_eq!(can_end, in_force.is_some(), "{error}");
                assert_eq!(pushed.text(FleetKind::Rules), in_force);
                assert_eq!(
                    (pushed.text(FleetKind::UndoneRules), pushed.text(FleetKind::FormerRules)),
                    (Some("bad"), None)
                );
            }
            pushed.push("next");
            assert_eq!(pushed.text(FleetKind::UndoneRules), None);
            assert_eq!(pushed.roll_back().unwrap().0, in_force, "{in_force:?}");
        }
    }

    #[test]
    fn undone_rules_can_be_pushed_again() {
        let mut pushed = Pushed::of(&["one", "bad"]);
        pushed.roll_back().unwrap();
        pushed.push("bad");
        assert_eq!((pushed.text(FleetKind::Rules), pushed.text(FleetKind::UndoneRules)), (Some("bad"), None));
        assert_eq!(pushed.roll_back().unwrap().0, Some("one"));
    }
}
