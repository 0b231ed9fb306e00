//! The settings of operators, as JSON.

use super::change::{FleetAction, FleetEntry, FleetTarget};
use super::handle::Fleet;
use super::in_force::FleetInForce;
use crate::base::json::Object;
use crate::base::time::{Timestamp, Utc};

impl Fleet {
    /// Returns the revision in force, the entries, and the last actions of all processes, as a JSON
    /// object.
    ///
    /// The object contains keys in the form of [`Key::display`](crate::Key::display), and a key may be
    /// a secret.
    #[must_use]
    pub fn to_json(&self) -> String {
        let mut json = String::new();
        let mut object = Object::begin(&mut json);
        let (in_force, entries, actions) = self.all_in_force();
        push_in_force(&mut object, &in_force);
        object.list("entries", entries, |json, entry| push_entry(json, &entry));
        object.list("actions", actions, |json, action| push_action(json, &action));
        object.end();
        json
    }
}

fn push_in_force(object: &mut Object<'_>, in_force: &FleetInForce) {
    object.plain("revision", in_force.revision);
    object.text("hash", &format!("{:012x}", in_force.hash));
    push_time(object, "since", (in_force.revision > 0).then_some(in_force.since));
    push_time(object, "read_at", in_force.read_at);
    push_time(object, "restored_at", in_force.restored_at);
    object.text_or_null("error", in_force.error.as_deref());
}

fn push_target(object: &mut Object<'_>, target: &FleetTarget) {
    object.text("kind", target.kind().as_str());
    object.text("name", target.name());
    object.text_or_null("subject", target.subject().as_deref());
}

fn push_time(object: &mut Object<'_>, name: &str, at: Option<Timestamp>) {
    object.text_or_null(name, at.map(|at| Utc(at).to_string()).as_deref());
}

fn push_entry(json: &mut String, entry: &FleetEntry) {
    let mut object = Object::begin(json);
    push_target(&mut object, &entry.target);
    object.text("value", &entry.value);
    push_time(&mut object, "until", entry.until);
    object.plain("revision", entry.revision);
    object.text("at", &Utc(entry.at).to_string());
    object.text("by", &entry.by);
    object.text("why", &entry.why);
    object.end();
}

fn push_action(json: &mut String, action: &FleetAction) {
    let mut object = Object::begin(json);
    object.plain("revision", action.revision);
    object.text("at", &Utc(action.at).to_string());
    object.text("by", &action.by);
    object.text("why", &action.why);
    push_target(&mut object, &action.target);
    object.text_or_null("value", action.value.as_deref());
    push_time(&mut object, "until", action.until);
    object.end();
}
