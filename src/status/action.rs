//! What an operator did on the page: data for the application's audit log, and for the page.

use std::fmt;

use crate::error::labelled;
use crate::json::Object;
use crate::mode::Mode;
use crate::time::{Timestamp, Utc};

labelled! {
    /// The kind of an operator's action.
    ActionKind,
    /// Returns the label for JSON and logs: `unblock`, `reset`, `switch`.
    as_str {
        /// A block was opened. What the key has used of its quotas stays used.
        Unblock = "unblock",
        /// What a key has used was forgotten, or its block was opened.
        Reset = "reset",
        /// A mode was switched.
        Switch = "switch",
    }
}

/// One action of an operator on a [status page](crate::observe::StatusPage::operators), for the application's audit
/// log. It prints in one line, and [`to_json`](Self::to_json) returns the same for programs.
///
/// It does not contain the key, but its [fingerprint](crate::observe::TopKey::fingerprint), and the name that
/// [`reveal`](crate::observe::StatsBuilder::reveal) gives to the key.
#[derive(Clone, Debug)]
pub struct OperatorAction {
    pub(super) at: Timestamp,
    pub(super) operator: Box<str>,
    pub(super) done: Done,
    pub(super) error: Option<Box<str>>,
}

/// What was done.
#[derive(Clone, Debug)]
pub(super) enum Done {
    /// A key was unblocked or reset under a policy.
    OnKey { kind: ActionKind, layer: Box<str>, policy: Box<str>, fingerprint: String, name: Option<Box<str>> },
    /// The switch of this name was set.
    Switched { switch: Box<str>, mode: Mode },
}

impl OperatorAction {
    /// Returns when the action ended, by the clock of the statistics.
    #[must_use]
    pub fn at(&self) -> Timestamp {
        self.at
    }

    /// Returns who asked for it, as the application's closure said: at most 128 bytes, without control characters.
    #[must_use]
    pub fn operator(&self) -> &str {
        &self.operator
    }

    /// Returns what was asked for.
    #[must_use]
    pub fn kind(&self) -> ActionKind {
        match &self.done {
            Done::OnKey { kind, .. } => *kind,
            Done::Switched { .. } => ActionKind::Switch,
        }
    }

    /// Returns the title of the layer. `None` if a mode was switched.
    #[must_use]
    pub fn layer(&self) -> Option<&str> {
        match &self.done {
            Done::OnKey { layer, .. } => Some(layer),
            Done::Switched { .. } => None,
        }
    }

    /// Returns the name of the policy that was unblocked or reset.
    #[must_use]
    pub fn policy(&self) -> Option<&str> {
        match &self.done {
            Done::OnKey { policy, .. } => Some(policy),
            Done::Switched { .. } => None,
        }
    }

    /// Returns the fingerprint of the key that was unblocked or reset.
    #[must_use]
    pub fn fingerprint(&self) -> Option<&str> {
        match &self.done {
            Done::OnKey { fingerprint, .. } => Some(fingerprint),
            Done::Switched { .. } => None,
        }
    }

    /// Returns the name that [`reveal`](crate::observe::StatsBuilder::reveal) gave to this key, if it did.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        match &self.done {
            Done::OnKey { name, .. } => name.as_deref(),
            Done::Switched { .. } => None,
        }
    }

    /// Returns the name of the switch that was set, and the mode. `None` if no mode was switched.
    #[must_use]
    pub fn switched(&self) -> Option<(&str, Mode)> {
        match &self.done {
            Done::OnKey { .. } => None,
            Done::Switched { switch, mode } => Some((switch, *mode)),
        }
    }

    /// Returns the error, with its causes, if the action failed or if it is not known whether it was done. `None` means
    /// that it was done.
    #[must_use]
    pub fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }

    /// Returns the action as a JSON object. Later versions may add fields.
    ///
    /// | field | value |
    /// |---|---|
    /// | `at` | when it ended, such as `2025-01-01T00:00:00Z` |
    /// | `operator` | who asked for it |
    /// | `action` | the label of its [kind](ActionKind::as_str) |
    /// | `layer`, `policy`, `fingerprint`, `name` | what was unblocked or reset; otherwise `null` |
    /// | `switch`, `mode` | what was switched; otherwise `null` |
    /// | `error` | `null` if it was done |
    #[must_use]
    pub fn to_json(&self) -> String {
        let mut json = String::new();
        let mut object = Object::begin(&mut json);
        object.text("at", &Utc(self.at).to_string());
        object.text("operator", &self.operator);
        object.text("action", self.kind().as_str());
        object.text_or_null("layer", self.layer());
        object.text_or_null("policy", self.policy());
        object.text_or_null("fingerprint", self.fingerprint());
        object.text_or_null("name", self.name());
        object.text_or_null("switch", self.switched().map(|(switch, _)| switch));
        object.text_or_null("mode", self.switched().map(|(_, mode)| mode.as_str()));
        object.text_or_null("error", self.error());
        object.end();
        json
    }
}

impl fmt::Display for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OnKey { kind, layer, policy, fingerprint, name } => {
                write!(f, "{kind} {policy} of {layer} for key {fingerprint}")?;
                name.as_ref().map_or(Ok(()), |name| write!(f, " ({name})"))
            }
            Self::Switched { switch, mode } => write!(f, "switch {switch} to {mode}"),
        }
    }
}

impl fmt::Display for OperatorAction {
    /// Prints one line, without control characters, such as
    /// `2025-01-01T00:00:00Z alice: reset client of public for key 0a1b2c3d: done`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let result = self.error.as_ref().map_or_else(|| "done".to_owned(), |error| format!("failed: {error}"));
        let line = format!("{} {}: {}: {result}", Utc(self.at), self.operator, self.done);
        f.write_str(&line.replace(char::is_control, "\u{fffd}"))
    }
}
