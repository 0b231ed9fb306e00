//! The settings of operators as data: targets, changes, entries and actions.

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

/// The maximum length in bytes of each stored text: a name, an operator's name, a reason, a key or a value. A
/// text of rules may be longer.
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
        /// The text of rules, instead of the text in their file.
        Rules = "rules",
        /// The text that a rollback puts in force again: that before the last push.
        FormerRules = "former-rules",
        /// The text that was in force until a rollback, or until an operator ended it. It is kept until the next push.
        UndoneRules = "undone-rules",
    }
}

impl FleetKind {
    /// Returns whether a target of this kind has a subject: a key or a network.
    pub(super) fn has_subject(self) -> bool {
        matches!(self, Self::Override | Self::Plan | Self::Network | Self::Key)
    }

    /// Returns whether the value is a text of rules.
    pub(crate) fn is_text_of_rules(self) -> bool {
        matches!(self, Self::Rules | Self::FormerRules | Self::UndoneRules)
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
        if network.addr() != network.network() {
            let (whole, address) = (network.trunc(), network.addr());
            let message = format!("{network} is an address in a network: write {whole} for the network, or {address}");
            return Err(invalid(message));
        }
        let text = network.to_string();
        Ok(Self { subject: text.into_bytes().into(), ..Self::new(FleetKind::Network, name) })
    }

    /// Returns the kind.
    #[must_use]
    pub fn kind(&self) -> FleetKind {
        self.kind
    }

    /// Returns the name under which the program got the setting from the [`Fleet`](super::Fleet).
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns whether the target keeps rules that were in force under this name before: those that a rollback would
    /// restore, or those that it undid.
    #[must_use]
    pub fn is_former_rules(&self, name: &str) -> bool {
        matches!(self.kind, FleetKind::FormerRules | FleetKind::UndoneRules) && &*self.name == name
    }

    /// Returns the network, or the key as [`Key::display`] writes it. A key may be a secret.
    #[must_use]
    pub fn subject(&self) -> Option<String> {
        match self.key() {
            Some(key) => Some(key.display().to_string()),
            None => self.network().map(|network| network.to_string()),
        }
    }

    /// Returns the bytes of the key, or the text of the network. The bytes are empty if the kind has neither a key nor
    /// a network.
    #[cfg(feature = "status")]
    pub(crate) fn subject_bytes(&self) -> &[u8] {
        &self.subject
    }

    /// Returns the key, or `None` if the setting is not that of a key. A key may be a secret.
    #[must_use]
    pub fn key(&self) -> Option<Key> {
        let is_keyed = self.kind.has_subject() && self.kind != FleetKind::Network;
        if is_keyed { Key::from_bytes(&self.subject) } else { None }
    }

    pub(super) fn network(&self) -> Option<IpNet> {
        if self.kind == FleetKind::Network { std::str::from_utf8(&self.subject).ok()?.parse().ok() } else { None }
    }
}

/// A change of one target. [`Fleet::change`](super::Fleet::change) makes the change in all processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetChange {
    pub(super) target: FleetTarget,
    /// The new value. `None` if the entry ends.
    pub(super) value: Option<Arc<str>>,
    pub(super) lasting: Option<Duration>,
    pub(super) seen: Option<u64>,
    /// The words that are kept before the reason that the author gives.
    pub(super) note: Option<Box<str>>,
}

impl FleetChange {
    fn new(target: FleetTarget, value: &impl fmt::Display) -> Self {
        Self::of(target, Some(value.to_string().into()))
    }

    pub(super) fn of(target: FleetTarget, value: Option<Arc<str>>) -> Self {
        Self { target, value, lasting: None, seen: None, note: None }
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

    /// Sets a quota for one key.
    ///
    /// # Errors
    /// Returns an error if the key is missing.
    pub fn override_quota(name: impl Into<Arc<str>>, key: impl IntoKey, quota: Quota) -> Result<Self, FleetError> {
        Ok(Self::new(FleetTarget::of_key(FleetKind::Override, name, key)?, &quota))
    }

    /// Sets the number of the plan for one key.
    ///
    /// # Errors
    /// Returns an error if the key is missing.
    pub fn plan(name: impl Into<Arc<str>>, key: impl IntoKey, plan: usize) -> Result<Self, FleetError> {
        Ok(Self::new(FleetTarget::of_key(FleetKind::Plan, name, key)?, &plan))
    }

    /// Sets whether the clients of a network or an address are always allowed, always denied, or
    /// limited by the rules.
    ///
    /// # Errors
    /// Returns an error if the text is neither a network nor an address, such as 203.0.113.7/24: the network is
    /// 203.0.113.0/24.
    pub fn network(name: impl Into<Arc<str>>, network: impl AsRef<str>, access: Access) -> Result<Self, FleetError> {
        Ok(Self::new(FleetTarget::of_network(name, network.as_ref())?, &access))
    }

    /// Sets whether the requests of a key are always allowed, always denied, or limited by the rules.
    ///
    /// # Errors
    /// Returns an error if the key is missing.
    pub fn key(name: impl Into<Arc<str>>, key: impl IntoKey, access: Access) -> Result<Self, FleetError> {
        Ok(Self::new(FleetTarget::of_key(FleetKind::Key, name, key)?, &access))
    }

    /// Puts a text of rules in force, instead of the text of the file.
    #[must_use]
    pub fn rules(name: impl Into<Arc<str>>, text: impl Into<String>) -> Self {
        Self::new(FleetTarget::new(FleetKind::Rules, name), &text.into())
    }

    /// Ends the entry of a target. If the target is a text of rules, the rules of the file come into
    /// force again.
    #[must_use]
    pub fn end(target: FleetTarget) -> Self {
        Self::of(target, None)
    }

    /// Makes a change from texts that a form or a program sent. `subject` is the network or the key. If the target is
    /// a key and `subject` is the text of an address, the key is that of the address, which is IPv4 if the text is
    /// IPv4-mapped. Otherwise the key is that of the text. Without a value, the change ends the entry.
    ///
    /// # Errors
    /// Returns an error if the subject is missing or cannot be read, or if there is a subject for a kind that has none.
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
                Ok(address) => FleetTarget::of_key(kind, name, address.to_canonical())?,
                Err(_) => FleetTarget::of_key(kind, name, key)?,
            },
        };
        Ok(Self::of(target, value.map(Into::into)))
    }

    /// Makes a change of a known target. Without a value, the change ends the target's entry.
    #[cfg(feature = "status")]
    pub(crate) fn of_target(target: FleetTarget, value: Option<&str>) -> Self {
        Self::of(target, value.map(Into::into))
    }

    /// Returns the network that the change denies, if it does.
    #[cfg(feature = "status")]
    pub(crate) fn denied_network(&self) -> Option<IpNet> {
        let is_deny = self.value.as_ref().is_some_and(|value| matches!(value.parse(), Ok(Access::Deny)));
        self.target.network().filter(|_| is_deny)
    }

    /// Returns whether the change sets a value, rather than ends an entry.
    #[cfg(feature = "status")]
    pub(crate) fn sets_value(&self) -> bool {
        self.value.is_some()
    }

    /// Returns what is changed.
    #[must_use]
    pub fn target(&self) -> &FleetTarget {
        &self.target
    }

    /// Sets how long the entry lasts, at least a second. By default the entry stays until a change ends
    /// it.
    #[must_use]
    pub fn lasting(self, lasting: Duration) -> Self {
        Self { lasting: Some(lasting.max(Duration::from_secs(1))), ..self }
    }

    /// Makes the change fail if the target was changed after `revision`, or if this revision does not exist.
    #[must_use]
    pub fn seen(self, revision: u64) -> Self {
        Self { seen: Some(revision), ..self }
    }

    /// Returns an error if a text is too long, or if the name is empty.
    pub(super) fn check_size(&self) -> Result<(), FleetError> {
        let FleetTarget { kind, name, subject } = &self.target;
        if name.len().max(subject.len()) > WORD_MAX || name.is_empty() {
            return Err(invalid(format!("a name has 1 to {WORD_MAX} bytes, and a key at most as many")));
        }
        if !kind.is_text_of_rules() && self.value.as_ref().is_some_and(|value| value.len() > WORD_MAX) {
            return Err(invalid(format!("a value has at most {WORD_MAX} bytes")));
        }
        Ok(())
    }

    /// Returns an error if an access would deny every address of a family. Rules that do so are put in force by a file,
    /// which a rollback undoes.
    fn check_access(&self, access: Access) -> Result<(), FleetError> {
        match self.target.network() {
            Some(network) if network.prefix_len() == 0 && access == Access::Deny => Err(invalid(format!(
                "{network} has every address, so each client would be refused: name a smaller network. To refuse \
                 everybody on purpose, write the network into `deny` in the `access` of the rules"
            ))),
            _ => Ok(()),
        }
    }

    /// Returns an error if the value is not valid for the target's kind.
    pub(super) fn check_value(&self) -> Result<(), FleetError> {
        let Some(value) = &self.value else { return Ok(()) };
        match self.target.kind {
            FleetKind::Mode => value.parse::<Mode>().map(drop).map_err(wrong_value),
            FleetKind::Quota | FleetKind::Override => value.parse::<Quota>().map(drop).map_err(wrong_value),
            FleetKind::Network | FleetKind::Key => self.check_access(value.parse().map_err(wrong_value)?),
            FleetKind::Plan => {
                let number = value.parse::<usize>().map(drop);
                number.map_err(|_| invalid("a plan is set by its number, such as 0 for the first one"))
            }
            FleetKind::Rules => Ok(()),
            FleetKind::FormerRules | FleetKind::UndoneRules => {
                Err(invalid("former rules and undone rules cannot be set: they are kept when the rules change"))
            }
        }
    }
}

/// The setting of a target, with its author, its time and its reason.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FleetEntry {
    /// The target.
    pub target: FleetTarget,
    /// The value as text.
    pub value: Arc<str>,
    /// When the setting ends. `None` if the setting stays until an operator ends it.
    pub until: Option<Timestamp>,
    /// The revision that set it.
    pub revision: u64,
    /// When the setting was made.
    pub at: Timestamp,
    /// The person or program that made the setting.
    pub by: Arc<str>,
    /// The reason that the author gave.
    pub why: Arc<str>,
}

impl FleetEntry {
    pub(super) fn holds(&self, now: Timestamp) -> bool {
        self.until.is_none_or(|until| now < until)
    }
}

/// The result of [`Fleet::rollback`](super::Fleet::rollback).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FleetRollback {
    /// The revision that the rollback made.
    pub revision: u64,
    /// The former entry, whose rules are in force again. `None` if each process uses the rules of its file again.
    pub restored: Option<FleetEntry>,
}

/// A past action of an operator, for the history that operators read.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FleetAction {
    /// The revision that the action made.
    pub revision: u64,
    /// The random lower half of the version that the action made. A process that got no answer to its
    /// swap looks for this tag, to find out whether the action was made.
    pub(super) tag: u64,
    /// The time of the action.
    pub at: Timestamp,
    /// The person or program that acted.
    pub by: Arc<str>,
    /// The reason that the author gave.
    pub why: Arc<str>,
    /// The target that was changed.
    pub target: FleetTarget,
    /// The new value, cut to 512 bytes. `None` if the action ended the entry.
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

/// Returns the beginning of a text in the form that is stored: at most 512 bytes in one line, with spaces instead of
/// line ends and tabs, and with other control characters replaced.
pub(super) fn kept(text: &str) -> Arc<str> {
    let text = text.replace("\r\n", " ").replace(['\n', '\r', '\t'], " ").replace(char::is_control, "\u{fffd}");
    let end = (0..=text.len().min(WORD_MAX)).rev().find(|end| text.is_char_boundary(*end));
    text.get(..end.unwrap_or(0)).unwrap_or_default().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_ends_are_kept_as_spaces() {
        for text in ["rules:\r\n- name: a", "rules:\n- name: a", "rules:\r- name: a", "rules:\t- name: a"] {
            assert_eq!(&*kept(text), "rules: - name: a", "{text:?}");
        }
        assert_eq!(&*kept("a\u{1b}[2J"), "a\u{fffd}[2J");
    }

    #[test]
    fn plan_that_is_no_number_is_refused_in_words() {
        let change = FleetChange::of_text(FleetKind::Plan, "customer", Some("a"), Some("gold")).unwrap();
        let error = change.check_value().unwrap_err();
        let said = crate::error::WithSources(&error).to_string();
        assert_eq!(said, "a plan is set by its number, such as 0 for the first one");
    }

    #[test]
    fn network_is_no_key() {
        let network = FleetChange::network("clients", "203.0.113.0/24", Access::Deny).unwrap().target;
        assert_eq!((network.key(), network.subject().as_deref()), (None, Some("203.0.113.0/24")));
        let key = FleetChange::key("clients", "203.0.113.0/24", Access::Deny).unwrap().target;
        assert_eq!((key.key(), key.network()), ("203.0.113.0/24".into_key(), None));
    }

    #[test]
    fn network_with_an_address_in_it_is_refused() {
        let said = |text: &str| FleetChange::network("clients", text, Access::Deny).unwrap_err().to_string();
        assert!(said("203.0.113.7/24").ends_with("write 203.0.113.0/24 for the network, or 203.0.113.7"));
        assert!(said("2001:db8::1/32").ends_with("write 2001:db8::/32 for the network, or 2001:db8::1"));
        let whole = |text: &str| FleetChange::network("clients", text, Access::Deny).unwrap().target.subject();
        assert_eq!(whole("203.0.113.7").as_deref(), Some("203.0.113.7/32"));
        assert_eq!(whole("::ffff:10.0.0.0/104").as_deref(), Some("10.0.0.0/8"));
    }

    #[test]
    fn network_of_everybody_is_not_denied_by_one_setting() {
        let check = |network: &str, access| FleetChange::network("clients", network, access).unwrap().check_value();
        for network in ["0.0.0.0/0", "::/0"] {
            let said = check(network, Access::Deny).unwrap_err().to_string();
            assert!(said.starts_with(network) && said.contains("each client would be refused"), "{said}");
            assert!([Access::Allow, Access::Limit].into_iter().all(|access| check(network, access).is_ok()));
        }
        assert!(check("0.0.0.0/1", Access::Deny).is_ok());
    }

    #[test]
    fn entry_lasts_at_least_a_second() {
        let lasting = |lasting| FleetChange::mode("client", Mode::Shadow).lasting(lasting).lasting;
        let second = Duration::from_secs(1);
        assert_eq!((lasting(Duration::ZERO), lasting(2 * second)), (Some(second), Some(2 * second)));
    }

    #[test]
    fn texts_of_a_change_may_have_the_most_bytes() {
        let long = |more: usize| "a".repeat(WORD_MAX + more);
        for is_longer in [0, 1] {
            let name = FleetChange::mode(long(is_longer), Mode::Shadow);
            let key = |length: usize| FleetChange::key("client", "a".repeat(length).as_str(), Access::Deny).unwrap();
            // The bytes of a key are those of the text and some before them.
            let more_of_a_key = key(WORD_MAX).target.subject.len() - WORD_MAX;
            let key = key(WORD_MAX - more_of_a_key + is_longer);
            let value = FleetChange::of_text(FleetKind::Mode, "client", None, Some(&long(is_longer))).unwrap();
            for change in [name, key, value] {
                assert_eq!(change.check_size().is_err(), is_longer == 1, "{:?}", change.target);
            }
        }
        assert!(FleetChange::rules("rules", long(1)).check_size().is_ok(), "rules may be longer");
        assert!(FleetChange::mode("", Mode::Shadow).check_size().is_err());
    }
}
