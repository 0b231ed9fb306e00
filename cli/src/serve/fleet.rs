//! Operators' settings for all processes, over HTTP.
//!
//! | request | answer |
//! |---|---|
//! | `GET /v1/settings` | what is set, by whom, and which revision is in force here |
//! | `POST /v1/settings` | sets or ends one thing in all processes |
//! | `POST /v1/rollback` | puts the rules from before the last push in force in all processes |

use std::time::Duration;

use http::StatusCode;
use serde_json::{Map, Value, json};
use tower_ratelimit::fleet::{Fleet, FleetChange, FleetEntry, FleetError, FleetErrorKind, FleetKind};
use tower_ratelimit::observe::StatusPage;

use super::api::{Wrong, text_of, wrong};
use super::failure::text_with_causes;
use super::operators::Operator;
use super::time::time;

/// The fields of a change, or of a rollback.
#[derive(Default)]
struct Fields {
    kind: Option<String>,
    name: Option<String>,
    subject: Option<String>,
    value: Option<String>,
    why: Option<String>,
    lasting: Option<Duration>,
    seen: Option<u64>,
}

impl Fields {
    fn read(fields: Map<String, Value>) -> Result<Self, Wrong> {
        let mut read = Self::default();
        for (name, value) in fields {
            match &*name {
                "kind" => read.kind = Some(text_of(&name, value)?),
                "name" => read.name = Some(text_of(&name, value)?),
                "subject" => read.subject = Some(text_of(&name, value)?),
                "value" if value.is_null() => {}
                "value" => read.value = Some(text_of(&name, value)?),
                "why" => read.why = Some(text_of(&name, value)?),
                "lasting" => {
                    let lasting = time(&text_of(&name, value)?);
                    read.lasting = Some(lasting.map_err(|error| wrong(format!("`lasting`: {error}")))?);
                }
                "seen" => read.seen = Some(value.as_u64().ok_or_else(|| wrong("`seen` is a revision"))?),
                _ => return Err(wrong(format!("there is no field `{name}`"))),
            }
        }
        Ok(read)
    }
}

/// Sets or ends something in all processes. Returns the revision, a warning if the key or the network may be
/// mistyped, and what is in force now if pushed rules ended.
pub(crate) async fn change(
    fleet: &Fleet,
    page: &StatusPage,
    operator: &Operator,
    fields: Map<String, Value>,
) -> Result<Value, Wrong> {
    let fields = Fields::read(fields)?;
    let (Some(kind), Some(name), Some(why)) = (fields.kind, fields.name, fields.why) else {
        return Err(wrong("send `kind`, `name` and `why`; `value` sets it, and without it the entry ends"));
    };
    let kind: FleetKind = kind.parse().map_err(|error| wrong(format!("`kind`: {error}")))?;
    let is_ours = matches!(kind, FleetKind::Mode | FleetKind::Override | FleetKind::Network | FleetKind::Rules);
    // If there is a value, the fleet says why it is refused, and what to set instead.
    if !is_ours && fields.value.is_none() {
        return Err(wrong(format!(
            "a server has no `{kind}`, so another program set it: end it there, or on the status page"
        )));
    }
    let is_end = fields.value.is_none();
    let change = FleetChange::of_text(kind, &name, fields.subject.as_deref(), fields.value.as_deref());
    let mut change = change.map_err(failed)?;
    if let Some(lasting) = fields.lasting {
        change = change.lasting(lasting);
    }
    if let Some(revision) = fields.seen {
        change = change.seen(revision);
    }
    let warning = page.check_key(&change).await.map_err(failed)?;
    let revision = fleet.change(&operator.0, &why, [change]).await.map_err(failed)?;
    let mut answer = Map::new();
    answer.insert("revision".to_owned(), revision.into());
    answer.extend(warning.map(|warning| ("warning".to_owned(), warning.into())));
    if kind == FleetKind::Rules && is_end {
        let message = format!(
            "each server uses the rules of its own file again. The ended rules are kept as `undone-rules` of `{name}`: \
             push them to restore them"
        );
        answer.insert("message".to_owned(), message.into());
    }
    Ok(answer.into())
}

/// Puts the rules from before the last push in force in all processes. Returns the revision, and the origin of these
/// rules.
pub(crate) async fn rollback(fleet: &Fleet, operator: &Operator, fields: Map<String, Value>) -> Result<Value, Wrong> {
    match Fields::read(fields)? {
        Fields { name: Some(name), why: Some(why), kind: None, subject: None, value: None, lasting: None, seen } => {
            let done = fleet.rollback(&operator.0, &why, &name, seen).await.map_err(failed)?;
            let restored = done
                .restored
                .map(|FleetEntry { by, why, revision, .. }| json!({ "by": &*by, "why": &*why, "revision": revision }));
            Ok(json!({ "revision": done.revision, "restored": restored }))
        }
        _ => Err(wrong("send `name`, that of the rules, and `why`; `seen` is a revision")),
    }
}

/// Returns the status of an error, and its text with the causes.
#[allow(clippy::needless_pass_by_value, reason = "it is an argument of map_err")]
fn failed(error: FleetError) -> Wrong {
    let status = match error.kind() {
        FleetErrorKind::Invalid => StatusCode::BAD_REQUEST,
        FleetErrorKind::Conflict => StatusCode::CONFLICT,
        FleetErrorKind::Full => StatusCode::INSUFFICIENT_STORAGE,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    };
    (status, text_with_causes(&error))
}
