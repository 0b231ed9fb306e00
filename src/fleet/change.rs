//! Targets, changes, entries and actions: the settings of operators. Data.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;

use super::error::{FleetError, FleetErrorKind};
use crate::base::time::Timestamp;
use crate::error::labelled;
use crate::key::{IntoKey, Key, parse_network};
use crate::middleware::charge::access::Access;
use crate::mode::Mode;
use crate::quota::Quota;

/// The maximum length of a name, an operator, a reason, a key, and a value that is not a text of rules, in bytes.
const WORD_MAX: usize = 512;

labelled! {
    /// The kind of a [`FleetTarget`].
    #[derive(PartialOrd, Ord)]
    FleetKind,
    /// Returns the label for programs.
    as_str {
        /// The mode of a [`ModeSwitch`](crate::middleware::ModeSwitch).
        Mode = "mode",
        /// The quota of a [`QuotaSwitch`](crate::middleware::QuotaSwitch).
        Quota = "quota",
        /// The quota of one key in [`Overrides`](crate::middleware::Overrides).
        Override = "override",
        /// The number of one key's plan in [`Overrides`](crate::middleware::Overrides).
        Plan = "plan",
        /// The entry of a network in an [`AccessList`](crate::middleware::AccessList).
        Network = "network",
        /// The entry of a key in an [`AccessList`](crate::middleware::AccessList).
        Key = "key",
        /// The text of rules, in place of that of their file.
        Rules = "rules",
        /// The text of rules before its last change.
        FormerRules = "former-rules",
    }
}

impl FleetKind {
    /// Returns whether a target has a subject: a key or a network.
    pub(super) fn has_subject(self) -> bool {
        matches!(self, Self::Override | Self::Plan | Self::Network | Self::Key)
    }
}

/// A setting of an operator: a mode, a quota, an override of a key, an entry of an access list, or rules.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FleetTarget {
    pub(super) kind: FleetKind,
    pub(super) name: Arc<str>,
    /// The bytes of the key or the text of the network, if there is one.
    pub(super) subject: Arc<[u8]>,
}

impl FleetTarget {
    pub(super) fn new(kind: FleetKind, name: impl Into<Arc<str>>) -> Self {
        Self { kind, name: name.into(), subject: Arc::default() }
    }

    fn of_key(kind: FleetKind, name: impl Into<Arc<str>>, key: impl IntoKey) -> Result<Self, FleetError> {
        let key = key.into_key().ok_or_else(|| invalid("there is no key"))?;
        Ok(Self { subject: key.as_bytes().into(), ..Self::new(kind, name) })
    }

    fn of_network(name: impl Into<Arc<str>>, network: &str) -> Result<Self, FleetError> {
        let network = parse_network(network).map_err(|error| invalid("the network cannot be read").caused_by(error))?;
        let text = network.trunc().to_string();
        Ok(Self { subject: text.into_bytes().into(), ..Self::new(FleetKind::Network, name) })
    }

    /// Returns the kind.
    #[must_use]
    pub fn kind(&self) -> FleetKind {
        self.kind
    }

    /// Returns the name by which the program asked for it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the network, or the key as [`Key::display`] writes it. A key may be a secret.
    #[must_use]
    pub fn subject(&self) -> Option<String> {
        match self.key() {
            Some(key) => Some(key.display().to_string()),
            None => self.network().map(|network| network.to_string()),
        }
    }

    pub(crate) fn key(&self) -> Option<Key> {
        let is_keyed = self.kind.has_subject() && self.kind != FleetKind::Network;
        if is_keyed { Key::from_bytes(&self.subject) } else { None }
    }

    pub(super) fn network(&self) -> Option<IpNet> {
        if self.kind == FleetKind::Network { std::str::from_utf8(&self.subject).ok()?.parse().ok() } else { None }
    }
}

/// A change of one target. [`Fleet::change`](super::Fleet::change) makes it in all processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetChange {
    pub(super) target: FleetTarget,
    /// The new value. `None` if the entry ends.
    pub(super) value: Option<Arc<str>>,
    pub(super) lasting: Option<Duration>,
    pub(super) seen: Option<u64>,
}

impl FleetChange {
    fn new(target: FleetTarget, value: &impl fmt::Display) -> Self {
        Self { target, value: Some(value.to_string().into()), lasting: None, seen: None }
    }

    /// Sets a mode.
    #[must_use]
    pub fn mode(name: impl Into<Arc<str>>, mode: Mode) -> Self {
        Self::new(FleetTarget::new(FleetKind::Mode, name), &mode)
    }

    /// Sets a quota.
    #[must_use]
    pub fn quota(name: impl Into<Arc<str>>, quota: Quota) -> Self {
        Self::new(FleetTarget::new(FleetKind::Quota, name), &quota)
    }

    /// Gives a key a quota of its own.
    ///
    /// # Errors
    /// Returns an error if there is no key.
    pub fn override_quota(name: impl Into<Arc<str>>, key: impl IntoKey, quota: Quota) -> Result<Self, FleetError> {
        Ok(Self::new(FleetTarget::of_key(FleetKind::Override, name, key)?, &quota))
    }

    /// Gives a key a plan, by its number.
    ///
    /// # Errors
    /// Returns an error if there is no key.
    pub fn plan(name: impl Into<Arc<str>>, key: impl IntoKey, plan: usize) -> Result<Self, FleetError> {
        Ok(Self::new(FleetTarget::of_key(FleetKind::Plan, name, key)?, &plan))
    }

    /// Exempts, blocks or limits the clients of a network or an address.
    ///
    /// # Errors
    /// Returns an error if the text is neither a network nor an address.
    pub fn network(name: impl Into<Arc<str>>, network: impl AsRef<str>, access: Access) -> Result<Self, FleetError> {
        Ok(Self::new(FleetTarget::of_network(name, network.as_ref())?, &access))
    }

    /// Exempts, blocks or limits a key.
    ///
    /// # Errors
    /// Returns an error if there is no key.
    pub fn key(name: impl Into<Arc<str>>, key: impl IntoKey, access: Access) -> Result<Self, FleetError> {
        Ok(Self::new(FleetTarget::of_key(FleetKind::Key, name, key)?, &access))
    }

    /// Puts a text of rules in force, in place of the file's.
    #[must_use]
    pub fn rules(name: impl Into<Arc<str>>, text: impl Into<String>) -> Self {
        Self::new(FleetTarget::new(FleetKind::Rules, name), &text.into())
    }

    /// Ends the entry of a target. For rules, those of the file are in force again.
    #[must_use]
    pub fn end(target: FleetTarget) -> Self {
        Self { target, value: None, lasting: None, seen: None }
    }

    /// Reads a change of texts, as a form or a program sends them. `subject` is the network, or the key: an address
    /// stands for the key of that address, and any other text for the key of the text. Without a value the entry ends.
    ///
    /// # Errors
    /// Returns an error if the subject is missing, cannot be read, or must not be there.
    pub fn of_text(
        kind: FleetKind,
        name: &str,
        subject: Option<&str>,
        value: Option<&str>,
    ) -> Result<Self, FleetError> {
        let target = match (kind.has_subject(), subject) {
            (true, None) => {
                return Err(invalid(format!("an entry of the kind `{kind}` needs a network or a key: name one")));
            }
            (false, Some(_)) => {
                return Err(invalid(format!("an entry of the kind `{kind}` has no key or network: leave it out")));
            }
            (false, None) => FleetTarget::new(kind, name),
            (true, Some(network)) if kind == FleetKind::Network => FleetTarget::of_network(name, network)?,
            (true, Some(key)) => match key.parse::<std::net::IpAddr>() {
                Ok(address) => FleetTarget::of_key(kind, name, address)?,
                Err(_) => FleetTarget::of_key(kind, name, key)?,
            },
        };
        Ok(Self { target, value: value.map(Into::into), lasting: None, seen: None })
    }

    /// Sets the value of a target that is known, or without a value ends its entry.
    #[cfg(feature = "status")]
    pub(crate) fn of_target(target: FleetTarget, value: Option<&str>) -> Self {
        Self { target, value: value.map(Into::into), lasting: None, seen: None }
    }

    /// Returns what is changed.
    #[must_use]
    pub fn target(&self) -> &FleetTarget {
        &self.target
    }

    /// Lets the entry end after this time, at least a second. Without it the entry stays until it is ended.
    #[must_use]
    pub fn lasting(self, lasting: Duration) -> Self {
        Self { lasting: Some(lasting.max(Duration::from_secs(1))), ..self }
    }

    /// Makes the change only if nobody else changed the target after this revision.
    #[must_use]
    pub fn seen(self, revision: u64) -> Self {
        Self { seen: Some(revision), ..self }
    }

    /// Returns an error if a text is too long, or there is no name.
    pub(super) fn check_size(&self) -> Result<(), FleetError> {
        let FleetTarget { kind, name, subject } = &self.target;
        if name.len().max(subject.len()) > WORD_MAX || name.is_empty() {
            return Err(invalid(format!("a name and a key have 1 to {WORD_MAX} bytes")));
        }
        let is_text = matches!(kind, FleetKind::Rules | FleetKind::FormerRules);
        if !is_text && self.value.as_ref().is_some_and(|value| value.len() > WORD_MAX) {
            return Err(invalid(format!("a value has at most {WORD_MAX} bytes")));
        }
        Ok(())
    }

    /// Returns an error if the value does not fit the kind.
    pub(super) fn check_value(&self) -> Result<(), FleetError> {
        let Some(value) = &self.value else { return Ok(()) };
        match self.target.kind {
            FleetKind::Mode => value.parse::<Mode>().map(drop).map_err(wrong_value),
            FleetKind::Quota | FleetKind::Override => value.parse::<Quota>().map(drop).map_err(wrong_value),
            FleetKind::Network | FleetKind::Key => value.parse::<Access>().map(drop).map_err(wrong_value),
            FleetKind::Plan => value.parse::<usize>().map(drop).map_err(wrong_value),
            FleetKind::Rules => Ok(()),
            FleetKind::FormerRules => {
                Err(invalid("the former rules cannot be set: each change of the rules keeps them"))
            }
        }
    }
}

/// The setting of a target, who made it, when and why.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FleetEntry {
    /// The target.
    pub target: FleetTarget,
    /// The value as text.
    pub value: Arc<str>,
    /// When it ends. `None` if it stays until somebody ends it.
    pub until: Option<Timestamp>,
    /// The revision that set it.
    pub revision: u64,
    /// When it was set.
    pub at: Timestamp,
    /// The person or program that set it.
    pub by: Arc<str>,
    /// The reason that was given.
    pub why: Arc<str>,
}

impl FleetEntry {
    pub(super) fn holds(&self, now: Timestamp) -> bool {
        self.until.is_none_or(|until| now < until)
    }
}

/// An action that was done, for the history that operators read.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FleetAction {
    /// The revision that it made.
    pub revision: u64,
    /// A part of the version that the action made. The process that acted finds the action by it.
    pub(super) tag: u64,
    /// When it was done.
    pub at: Timestamp,
    /// The person or program that did it.
    pub by: Arc<str>,
    /// The reason that was given.
    pub why: Arc<str>,
    /// The target that was changed.
    pub target: FleetTarget,
    /// The value that was set, cut to 512 bytes. `None` if the entry was ended.
    pub value: Option<Arc<str>>,
    /// When the entry ends, if it was set for a time.
    pub until: Option<Timestamp>,
}

pub(super) fn invalid(message: impl Into<String>) -> FleetError {
    FleetError::new(FleetErrorKind::Invalid, message)
}

fn wrong_value(error: impl std::error::Error + Send + Sync + 'static) -> FleetError {
    invalid("the value cannot be read").caused_by(error)
}

/// Returns the beginning of a text, as it is kept: without control characters, and of at most 512 bytes.
pub(super) fn kept(text: &str) -> Arc<str> {
    let text = text.replace(char::is_control, "\u{fffd}");
    let end = (0..=text.len().min(WORD_MAX)).rev().find(|end| text.is_char_boundary(*end));
    text.get(..end.unwrap_or(0)).unwrap_or_default().into()
}
