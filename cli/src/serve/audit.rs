//! Prepares an operator's request for the log.
//!
//! A key may be a secret. The log has its fingerprint, as the status page does, and of a request that an operator
//! describes neither the values of headers nor the query.

use std::net::IpAddr;

use serde_json::{Map, Value};
use tower_ratelimit::Key;
use tower_ratelimit::fleet::{FleetChange, FleetKind};
use tower_ratelimit::observe::Stats;

/// The longest text that the log has, in bytes. A text of rules is longer, and may have keys.
const TEXT_MAX: usize = 512;

/// Returns the fields of a change.
pub(crate) fn of_change(stats: &Stats, fields: &Map<String, Value>) -> String {
    let mut logged = plain(fields, &["kind", "name", "value", "why", "lasting", "seen"]);
    if let Some(subject) = fields.get("subject").and_then(Value::as_str) {
        let kind = fields.get("kind").and_then(Value::as_str).and_then(|kind| kind.parse().ok());
        logged.insert("subject".to_owned(), shown_subject(stats, kind, subject).into());
    }
    Value::from(logged).to_string()
}

/// Returns the fields of a described request.
pub(crate) fn of_request(stats: &Stats, fields: &Map<String, Value>) -> String {
    let mut logged = plain(fields, &["method", "host", "domain"]);
    let text = |name: &str| fields.get(name).and_then(Value::as_str);
    if let Some(path) = text("path").and_then(|path| path.split('?').next()) {
        logged.insert("path".to_owned(), path.into());
    }
    if let Some(client) = text("client").and_then(|client| client.parse::<IpAddr>().ok()).and_then(Key::of) {
        logged.insert("client".to_owned(), stats.shown_key(&client).into());
    }
    if let Some(headers) = fields.get("headers").and_then(Value::as_object) {
        logged.insert("headers".to_owned(), headers.keys().cloned().collect());
    }
    Value::from(logged).to_string()
}

/// Returns a network, or the fingerprint of a key. A text that is no network where one is needed counts as a key.
fn shown_subject(stats: &Stats, kind: Option<FleetKind>, subject: &str) -> Option<String> {
    let kinds = kind.into_iter().chain([FleetKind::Override]);
    let change = kinds.filter_map(|kind| FleetChange::of_text(kind, "-", Some(subject), None).ok()).next()?;
    let target = change.target();
    target.key().map_or_else(|| target.subject(), |key| Some(stats.shown_key(&key)))
}

/// Returns those of the fields that are texts or numbers. Instead of a long text, the log has its length.
fn plain(fields: &Map<String, Value>, names: &[&str]) -> Map<String, Value> {
    let shown = |value: &Value| match value {
        Value::String(text) if text.len() > TEXT_MAX => Some(format!("a text of {} bytes", text.len()).into()),
        Value::String(_) | Value::Number(_) => Some(value.clone()),
        _ => None,
    };
    names.iter().filter_map(|name| Some(((*name).to_owned(), shown(fields.get(*name)?)?))).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Returns what is logged of an object.
    fn logged(of: impl Fn(&Stats, &Map<String, Value>) -> String, object: &Value) -> Value {
        serde_json::from_str(&of(&Stats::new(), object.as_object().unwrap())).unwrap()
    }

    #[test]
    fn key_of_a_change_is_logged_as_its_fingerprint() {
        let fingerprint = |text: &str| text.len() == 8 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        for kind in [json!("override"), json!("plan"), json!("network"), json!("overide"), json!(7), Value::Null] {
            let object = json!({"kind": kind, "name": "customer", "subject": "ent-SECRETKEY", "why": "a sale"});
            let logged = logged(of_change, &object);
            assert!(fingerprint(logged["subject"].as_str().unwrap()), "{logged}");
            assert_eq!((&logged["name"], &logged["why"]), (&json!("customer"), &json!("a sale")));
        }
        let network = json!({"kind": "network", "name": "rules", "subject": "203.0.113.0/24", "value": "deny"});
        assert_eq!(logged(of_change, &network), network);
        let odd = json!({"kind": "override", "subjet": "SECRET", "subject": ["SECRET"], "value": {"a": "SECRET"}});
        assert_eq!(logged(of_change, &odd), json!({"kind": "override"}));
        let rules = json!({"kind": "rules", "value": "a".repeat(1_000)});
        assert_eq!(logged(of_change, &rules)["value"], "a text of 1000 bytes");
    }

    #[test]
    fn described_request_is_logged_without_its_secrets() {
        let object = json!({"method": "GET", "path": "/a?user=SECRET", "headers": {"x-api-key": "SECRET"},
                            "descriptors": [[{"key": "user", "value": "SECRET"}]], "client": "203.0.113.9"});
        let logged = logged(of_request, &object);
        assert!(!logged.to_string().contains("SECRET"), "{logged}");
        assert_eq!((&logged["path"], &logged["headers"]), (&json!("/a"), &json!(["x-api-key"])));
        assert!(logged["client"].as_str().is_some_and(|client| !client.contains("203.0.113.9")), "{logged}");
    }
}
