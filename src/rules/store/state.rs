//! The rules in force, and those that were refused or are kept for later.

use std::sync::{Arc, Weak};

use super::super::error::RulesError;
use super::file::{Reading, has_end_mark};
use super::in_force::{Draft, InForce, RulesOrigin, RulesText};
use crate::error::WithSources;
use crate::event::RulesEvent;
#[cfg(feature = "fleet")]
use crate::fleet::{Fleet, FleetEntry, FleetRuleSettings};
use crate::middleware::rule::Follow;

/// The rules in force, the rules that may come into force later, and the layers that follow them.
pub(super) struct RulesState {
    /// The result of the last reading of the file, even if the rules that were read are not in
    /// force.
    pub(super) read: Reading,
    /// The number of the last reading of the file.
    pub(super) reading: u64,
    /// The number of changes of this state. Rules that were made before the last change are made again.
    pub(super) changes: u64,
    pub(super) in_force: InForce,
    /// True if the program's last valid file ends with `...`.
    is_marked: bool,
    /// The rules of the program or its file, which are in force unless operators put other rules in force.
    #[cfg(feature = "fleet")]
    pub(super) own: RulesText,
    /// The latest rules that came from the program or from its file, if these rules were refused.
    refused: Option<RefusedRules>,
    /// The rules that an operator pushed. They are in force unless they were refused.
    #[cfg(feature = "fleet")]
    pub(super) pushed: Option<Arc<FleetEntry>>,
    /// The last rules that an operator pushed and that were refused.
    #[cfg(feature = "fleet")]
    refused_pushed: Option<RefusedRules>,
    /// The settings of operators for the rules.
    #[cfg(feature = "fleet")]
    pub(super) settings: FleetRuleSettings,
    /// The fleet whose operators may put other rules in force.
    #[cfg(feature = "fleet")]
    pub(super) fleet: Option<Fleet>,
    pub(super) layers: Vec<Weak<dyn Follow>>,
}

/// The rules that a caller wants in force. Their text is chosen under the state's lock, so that it is the latest one.
pub(super) enum Wish {
    /// New rules of the program, and the number of the reading of their file. If an operator pushed the rules in force,
    /// the new rules are only kept for later.
    New(RulesText, Option<u64>),
    /// The rules that an operator pushed, or the program's own rules if no operator pushed any.
    #[cfg(feature = "fleet")]
    OfOperators,
    /// The program's own rules.
    #[cfg(feature = "fleet")]
    Own,
    /// The rules in force, made again with the present settings of operators.
    #[cfg(feature = "fleet")]
    Present,
}

/// Rules that were not put in force, and why.
pub(super) struct RefusedRules {
    pub(super) text: RulesText,
    pub(super) error: RulesError,
}

impl Wish {
    /// Returns the number of the reading that the rules are from, if a file was read for them.
    pub(super) fn reading(&self) -> Option<u64> {
        match self {
            Self::New(_, reading) => *reading,
            #[cfg(feature = "fleet")]
            _ => None,
        }
    }
}

impl RulesState {
    /// Makes the state of rules that were just read from `content`.
    pub(super) fn new(content: Arc<[u8]>, in_force: InForce) -> Self {
        let is_marked = has_end_mark(&content);
        Self {
            read: Ok(content),
            reading: 0,
            changes: 0,
            is_marked,
            #[cfg(feature = "fleet")]
            own: in_force.text.clone(),
            in_force,
            refused: None,
            #[cfg(feature = "fleet")]
            pushed: None,
            #[cfg(feature = "fleet")]
            refused_pushed: None,
            #[cfg(feature = "fleet")]
            settings: FleetRuleSettings::default(),
            #[cfg(feature = "fleet")]
            fleet: None,
            layers: Vec::new(),
        }
    }

    /// Returns whether the file was read again after the reading with this number.
    pub(super) fn is_outdated(&self, reading: Option<u64>) -> bool {
        reading.is_some_and(|reading| reading != self.reading)
    }

    /// Returns the text that a caller wants in force.
    pub(super) fn text_of(&self, wish: &Wish) -> RulesText {
        match wish {
            Wish::New(text, _) => text.clone(),
            #[cfg(feature = "fleet")]
            Wish::OfOperators => self.pushed.as_ref().map_or_else(|| self.own.clone(), RulesText::pushed),
            #[cfg(feature = "fleet")]
            Wish::Own => self.own.clone(),
            #[cfg(feature = "fleet")]
            Wish::Present => self.in_force.text.clone(),
        }
    }

    /// Returns whether rules are only kept for later, because an operator pushed the rules in force.
    #[cfg_attr(not(feature = "fleet"), expect(unused_variables, reason = "operators push nothing"))]
    pub(super) fn keeps(&self, wish: &Wish) -> bool {
        #[cfg(feature = "fleet")]
        return matches!(wish, Wish::New(..)) && self.in_force.text.pushed.is_some();
        #[cfg(not(feature = "fleet"))]
        false
    }

    /// Collects the data from which the rules of a text are made.
    pub(super) fn draft(&self, text: RulesText, is_of_file: bool) -> Draft {
        let origin = RulesOrigin {
            version: self.in_force.rules.version + 1,
            history: self.in_force.history.clone(),
            #[cfg(feature = "fleet")]
            settings: self.settings.clone(),
        };
        let (domain, layers, changes) = (self.in_force.domain(), self.layers(), self.changes);
        let before = self.in_force.text.clone();
        Draft { text, origin, before, domain, layers, is_marked: self.is_marked && is_of_file, changes }
    }

    /// Takes over a text that is valid. If the text is new, it is the program's own text from now on.
    pub(super) fn take(&mut self, wish: &Wish, text: &RulesText) {
        self.changes += 1;
        if wish.reading().is_some() {
            self.is_marked = has_end_mark(&text.content);
        }
        #[cfg(feature = "fleet")]
        if matches!(wish, Wish::New(..)) {
            self.own.clone_from(text);
        }
    }

    /// Removes the errors that no longer apply, because this text is valid. Returns whether there were any.
    pub(super) fn end_error(&mut self, wish: &Wish, text: &RulesText) -> bool {
        let is_new = matches!(wish, Wish::New(..));
        let is_ended = |refused: &mut RefusedRules| is_new || refused.text.content == text.content;
        let own = self.refused.take_if(is_ended);
        #[cfg(feature = "fleet")]
        let own = own.or(if matches!(wish, Wish::OfOperators) { self.refused_pushed.take() } else { None });
        own.is_some()
    }

    /// Returns the rules that were refused: the program's latest rules, and those that an operator pushed.
    pub(super) fn refused(&self) -> impl Iterator<Item = &RefusedRules> {
        let refused = self.refused.iter();
        #[cfg(feature = "fleet")]
        let refused = refused.chain(self.refused_pushed.iter().filter(|pushed| pushed.text.pushed == self.pushed));
        refused
    }

    /// Notes that rules were refused. Returns the event, or `None` if it was reported before.
    pub(super) fn refuse(&mut self, refused: RefusedRules) -> Option<RulesEvent> {
        let event = self.refused_event(&refused);
        #[cfg(feature = "fleet")]
        if refused.text.pushed.is_some() {
            let is_known = self.refused_pushed.as_ref().is_some_and(|known| known.error == refused.error);
            if refused.text.pushed == self.pushed {
                self.refused_pushed = Some(refused);
            }
            return Some(event).filter(|_| !is_known);
        }
        self.refused = Some(refused);
        Some(event)
    }

    /// Returns the event which says that rules were refused.
    fn refused_event(&self, refused: &RefusedRules) -> RulesEvent {
        let error = WithSources(&refused.error).to_string();
        #[cfg(feature = "fleet")]
        if let (None, Some(pushed)) = (&refused.text.pushed, &self.in_force.text.pushed) {
            return RulesEvent::unused(&*pushed.by, pushed.revision, Some(error));
        }
        RulesEvent::refused(error)
    }

    /// Returns the events which say that the rules are in force, after these changes, and that other rules are still
    /// refused.
    pub(super) fn loaded(&self, changes: String) -> Vec<RulesEvent> {
        let refused = self.refused().map(|refused| self.refused_event(refused));
        std::iter::once(self.in_force.event(changes)).chain(refused).collect()
    }

    /// Returns whether the rules in force were made with the present settings of operators.
    pub(super) fn has_settings(&self) -> bool {
        #[cfg(feature = "fleet")]
        return self.in_force.settings.is_alike(&self.settings);
        #[cfg(not(feature = "fleet"))]
        true
    }

    pub(super) fn layers(&self) -> Vec<Arc<dyn Follow>> {
        self.layers.iter().filter_map(Weak::upgrade).collect()
    }
}
