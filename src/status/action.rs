//! The actions of operators on the page, as data for the application's audit log and for the page.

use std::fmt;

use crate::base::json::Object;
use crate::base::time::{Timestamp, Utc};
use crate::error::labelled;
use crate::mode::Mode;

labelled! {
    /// The kind of an operator's action.
    ActionKind,
    /// Returns the label for metrics and logs.
    as_str {
        /// A block was opened. The used units of the rule's quotas stay used.
        Unblock = "unblock",
        /// The usage of a key was forgotten, or its block was opened.
        Reset = "reset",
        /// An action that the [program added](crate::observe::StatusPage::action) was run.
        Own = "own",
        /// A mode was switched.
        Switch = "switch",
        /// A setting was made in [all processes](crate::observe::StatusPage::fleet).
        Set = "set",
        /// An entry for all processes was ended.
        End = "end",
        /// The rules from before the last push were put in force in all processes.
        Rollback = "rollback",
    }
}

/// One action of an operator on a [status page](crate::observe::StatusPage::operators), for the application's audit
/// log. An action is printed as one line. For programs, [`to_json`](Self::to_json) returns the action as JSON.
///
/// An action does not contain the key, only the key's [fingerprint](crate::observe::TopKey::fingerprint), and the name
/// that [`reveal`](crate::observe::StatsBuilder::reveal) gives to the key.
#[derive(Clone, Debug)]
pub struct OperatorAction {
    pub(super) at: Timestamp,
    pub(super) operator: Box<str>,
    pub(super) done: Done,
    pub(super) error: Option<Box<str>>,
    pub(super) warning: Option<Box<str>>,
}

/// The action on a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Act {
    Unblock,
    Reset,
    /// The program's own action with this name.
    Own(Box<str>),
}

impl fmt::Display for Act {
    /// Prints the word that programs send for the action.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unblock => ActionKind::Unblock.fmt(f),
            Self::Reset => ActionKind::Reset.fmt(f),
            Self::Own(name) => write!(f, "{OWN}{name}"),
        }
    }
}

/// The prefix of the words that programs send for own actions.
pub(super) const OWN: &str = "own.";

/// The action that was done.
#[derive(Clone, Debug)]
pub(super) enum Done {
    /// An action on a key under a policy.
    OnKey { act: Act, layer: Box<str>, policy: Box<str>, fingerprint: String, name: Option<Box<str>> },
    /// The switch with this name was set.
    Switched { switch: Box<str>, mode: Mode },
    /// An action for all processes.
    #[cfg_attr(not(feature = "fleet"), expect(dead_code, reason = "a fleet needs the feature fleet"))]
    ForAll { kind: ActionKind, setting: Box<str>, value: Option<Box<str>> },
}

impl OperatorAction {
    /// Returns the time at which the action ended, on the clock of the statistics.
    #[must_use]
    pub fn at(&self) -> Timestamp {
        self.at
    }

    /// Returns the operator's name from the application's closure: at most 128 bytes, without control characters.
    #[must_use]
    pub fn operator(&self) -> &str {
        &self.operator
    }

    /// Returns what was asked for.
    #[must_use]
    pub fn kind(&self) -> ActionKind {
        match &self.done {
            Done::OnKey { act: Act::Unblock, .. } => ActionKind::Unblock,
            Done::OnKey { act: Act::Reset, .. } => ActionKind::Reset,
            Done::OnKey { act: Act::Own(_), .. } => ActionKind::Own,
            Done::Switched { .. } => ActionKind::Switch,
            Done::ForAll { kind, .. } => *kind,
        }
    }

    /// Returns the name of the action, if the [program added](crate::observe::StatusPage::action) the action.
    #[must_use]
    pub fn own(&self) -> Option<&str> {
        match &self.done {
            Done::OnKey { act: Act::Own(name), .. } => Some(name),
            _ => None,
        }
    }

    /// Returns the title of the layer, or `None` if the action was not on a key.
    #[must_use]
    pub fn layer(&self) -> Option<&str> {
        match &self.done {
            Done::OnKey { layer, .. } => Some(layer),
            _ => None,
        }
    }

    /// Returns the name of the policy, or `None` if the action was not on a key.
    #[must_use]
    pub fn policy(&self) -> Option<&str> {
        match &self.done {
            Done::OnKey { policy, .. } => Some(policy),
            _ => None,
        }
    }

    /// Returns the fingerprint of the key, or `None` if the action was not on a key.
    #[must_use]
    pub fn fingerprint(&self) -> Option<&str> {
        match &self.done {
            Done::OnKey { fingerprint, .. } => Some(fingerprint),
            _ => None,
        }
    }

    /// Returns the name that [`reveal`](crate::observe::StatsBuilder::reveal) gave to the key, if it gave a name.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        match &self.done {
            Done::OnKey { name, .. } => name.as_deref(),
            _ => None,
        }
    }

    /// Returns the name of the switch that was set, and its new mode. Returns `None` if no mode was switched.
    #[must_use]
    pub fn switched(&self) -> Option<(&str, Mode)> {
        match &self.done {
            Done::Switched { switch, mode } => Some((switch, *mode)),
            _ => None,
        }
    }

    /// Returns the setting that was made or ended for all processes, such as `mode login`, and its value if it was
    /// made. Returns `None` for other actions.
    #[must_use]
    pub fn setting(&self) -> Option<(&str, Option<&str>)> {
        match &self.done {
            Done::ForAll { setting, value, .. } => Some((setting, value.as_deref())),
            _ => None,
        }
    }

    /// Returns the error, with its causes, if the action failed, or if it is unknown whether the action was done.
    /// Returns `None` if the action was done.
    #[must_use]
    pub fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }

    /// Returns why the action may not be meant although it was done: the key or the network of the setting may be
    /// mistyped.
    #[must_use]
    pub fn warning(&self) -> Option<&str> {
        self.warning.as_deref().filter(|_| self.error.is_none())
    }

    /// Returns the action as a JSON object. Later versions may add fields.
    ///
    /// | field | value |
    /// |---|---|
    /// | `at` | when it ended, such as `2025-01-01T00:00:00Z` |
    /// | `operator` | who asked for it |
    /// | `action` | `unblock`, `reset`, `switch`, `set`, `end`, `rollback`, or the name of an [own action](Self::own) after `own.` |
    /// | `layer`, `policy`, `fingerprint`, `name` | which key, and where; `null` unless something was done with a key |
    /// | `switch`, `mode` | what was switched; `null` for others |
    /// | `setting`, `value` | what was set or ended for all processes; `null` for others |
    /// | `error` | `null` if it was done |
    /// | `warning` | why it may not be meant although it was done; otherwise `null` |
    #[must_use]
    pub fn to_json(&self) -> String {
        let mut json = String::new();
        let mut object = Object::begin(&mut json);
        object.text("at", &Utc(self.at).to_string());
        object.text("operator", &self.operator);
        match &self.done {
            Done::OnKey { act, .. } => object.text("action", &act.to_string()),
            Done::Switched { .. } | Done::ForAll { .. } => object.text("action", self.kind().as_str()),
        }
        object.text_or_null("layer", self.layer());
        object.text_or_null("policy", self.policy());
        object.text_or_null("fingerprint", self.fingerprint());
        object.text_or_null("name", self.name());
        object.text_or_null("switch", self.switched().map(|(switch, _)| switch));
        object.text_or_null("mode", self.switched().map(|(_, mode)| mode.as_str()));
        object.text_or_null("setting", self.setting().map(|(setting, _)| setting));
        object.text_or_null("value", self.setting().and_then(|(_, value)| value));
        object.text_or_null("error", self.error());
        object.text_or_null("warning", self.warning());
        object.end();
        json
    }
}

impl fmt::Display for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OnKey { act, layer, policy, fingerprint, name } => {
                let act = if let Act::Own(name) = act { name.to_string() } else { act.to_string() };
                write!(f, "{act} {policy} of {layer} for key {fingerprint}")?;
                name.as_ref().map_or(Ok(()), |name| write!(f, " ({name})"))
            }
            Self::Switched { switch, mode } => write!(f, "switch {switch} to {mode}"),
            Self::ForAll { kind, setting, value } => {
                write!(f, "{kind} {setting}")?;
                value.as_ref().map_or(Ok(()), |value| write!(f, " to {value}"))?;
                f.write_str(" for all processes")
            }
        }
    }
}

impl fmt::Display for OperatorAction {
    /// Prints one line, without control characters, such as
    /// `2025-01-01T00:00:00Z alice: reset client of public for key 0a1b2c3d: done`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let result = match (self.error(), self.warning()) {
            (Some(error), _) => format!("failed: {error}"),
            (None, Some(warning)) => format!("done, with a warning: {warning}"),
            (None, None) => "done".to_owned(),
        };
        let line = format!("{} {}: {}: {result}", Utc(self.at), self.operator, self.done);
        f.write_str(&line.replace(char::is_control, "\u{fffd}"))
    }
}
