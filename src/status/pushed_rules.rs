//! The differences between the rules that an operator pushed and the former rules.

use std::fmt::{self, Write};

use super::text::HtmlText;
use crate::base::json::Object;
use crate::error::WithSources;
use crate::fleet::{Fleet, FleetEntry, FleetKind};
use crate::rules::{RuleChange, compare};

/// The longest text that the page compares, in bytes. Two texts of this length take some milliseconds.
const TEXT_MAX: usize = 64 << 10;

/// The maximum number of changes that the page shows.
const SHOWN_MAX: usize = 50;

/// The differences between pushed rules and the former rules.
pub(super) struct PushedChanges {
    /// The words that describe the former rules.
    before: String,
    /// The differences, or why they are not known.
    changes: Result<Vec<RuleChange>, String>,
}

impl PushedChanges {
    /// Compares pushed rules with the rules that a rollback would restore, or with those that a rollback undid. Returns
    /// `None` if the entry has no rules, or if this process does not know the former rules.
    pub(super) fn of(entry: &FleetEntry, entries: &[FleetEntry], fleet: &Fleet) -> Option<Self> {
        let target = &entry.target;
        if target.kind() != FleetKind::Rules {
            return None;
        }
        let is_former = |other: &&FleetEntry| other.target.is_former_rules(target.name());
        let (old, before) = match entries.iter().find(is_former) {
            Some(FleetEntry { value, by, revision, .. }) => {
                (value.as_bytes().into(), format!("the rules that {by} put in force in revision {revision}"))
            }
            None => (fleet.own_rules(target.name())?, "this process's own rules".to_owned()),
        };
        let new = entry.value.as_bytes();
        let changes = if old.len().max(new.len()) > TEXT_MAX {
            Err("one of the two texts is too long to be compared here: use `tower-ratelimit diff`".to_owned())
        } else {
            compare(old, new).map_err(|error| WithSources(&error).to_string())
        };
        Some(Self { before, changes })
    }

    /// Writes the changes as a folded list.
    pub(super) fn write_html(&self, html: &mut String) -> fmt::Result {
        let before = HtmlText(&self.before);
        let changes = match &self.changes {
            Ok(changes) => changes,
            Err(error) => {
                return write!(
                    html,
                    "<details><summary>not compared with {before}</summary>{}</details>",
                    HtmlText(error)
                );
            }
        };
        if changes.is_empty() {
            return write!(html, "<div class=\"quota\">the same as {before}</div>");
        }
        let count = changes.len();
        let plural = if count == 1 { "" } else { "s" };
        write!(html, "<details><summary>{count} change{plural} of {before}</summary><ul>")?;
        for change in changes.iter().take(SHOWN_MAX) {
            let (kind, rule) = (change.kind().as_str(), HtmlText(change.rule().unwrap_or("access")));
            write!(html, "<li>{kind} <span class=\"name\">{rule}</span>: {}</li>", HtmlText(change.message()))?;
        }
        html.push_str("</ul>");
        if let more @ 1.. = count.saturating_sub(SHOWN_MAX) {
            write!(html, "<p class=\"soft\">and {more} more in the JSON of this page</p>")?;
        }
        html.write_str("</details>")
    }

    /// Writes the changes into the object of the entry.
    pub(super) fn write_json(&self, object: &mut Object<'_>) {
        object.text("compared_with", &self.before);
        match &self.changes {
            Ok(changes) => object.list("changes", changes, |json, change| {
                let mut object = Object::begin(json);
                object.text("kind", change.kind().as_str());
                object.text_or_null("rule", change.rule());
                object.text("message", change.message());
                object.end();
            }),
            Err(_) => object.plain("changes", "null"),
        }
    }
}
