//! The interface for applications, in JSON. `openapi.json` describes it.
//!
//! | request | answer |
//! |---|---|
//! | `POST /v1/check` | decides about a request, and charges it |
//! | `POST /v1/report` | says how a request ended that `check` held: what it took is kept, refunded or settled |
//! | `POST /v1/explain` | for operators: which rules a request meets, and takes nothing |
//! | `POST /v1/reset` | for operators: forgets what the keys of a request have used |

use std::net::IpAddr;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, ORIGIN, RETRY_AFTER};
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode};
use hyper::body::Incoming;
use serde_json::{Map, Value, json};
use tower_ratelimit::observe::{Outcome, PolicyStatus};
use tower_ratelimit::rules::Descriptor;
use tower_ratelimit::{Key, Wait};

use super::described::{Described, HEADERS_MAX, X_FORWARDED_FOR};
use super::held::{HELD_MAX, HOLD_MAX};
use super::limits::{Form, Layer, Stated};
use super::respond::{self, Body, json as answer_json, text};
use super::server::Server;
use super::uri;

/// The description of the interface.
pub(crate) const OPENAPI: &str = include_str!("openapi.json");

/// Why a request of an application cannot be answered.
pub(crate) type Wrong = (StatusCode, String);

pub(crate) fn wrong(message: impl Into<String>) -> Wrong {
    (StatusCode::BAD_REQUEST, message.into())
}

/// Makes the response of a result.
pub(crate) fn response(answer: Result<Value, Wrong>) -> Response<Body> {
    match answer {
        Ok(value) => answer_json(StatusCode::OK, &value),
        Err((status, message)) => answer_json(status, &json!({ "error": message })),
    }
}

/// Reads the object that a request posts.
///
/// # Errors
/// Returns the response if the request posts none.
pub(crate) async fn posted(head: &Parts, incoming: Incoming) -> Result<Map<String, Value>, Box<Response<Body>>> {
    if head.method != Method::POST {
        return Err(Box::new(respond::wrong_method(&Method::POST)));
    }
    // A foreign site that a browser on this machine visits may have given this address a name of its own. The browser
    // then takes it for that site, and asks. Programs send no such header.
    if head.headers.contains_key(ORIGIN) {
        return Err(Box::new(text(StatusCode::FORBIDDEN, "this is for programs, and a browser asks")));
    }
    let bytes = respond::read(incoming).await?;
    object(head, &bytes).map_err(|wrong| Box::new(response(Err(wrong))))
}

/// Reads an object of JSON. Only `application/json` is read: a browser asks before another site may send that.
fn object(head: &Parts, bytes: &Bytes) -> Result<Map<String, Value>, Wrong> {
    let kind = head.headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    if kind.split(';').next().is_none_or(|kind| !kind.trim().eq_ignore_ascii_case("application/json")) {
        return Err((StatusCode::UNSUPPORTED_MEDIA_TYPE, "send application/json".to_owned()));
    }
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(fields)) => Ok(fields),
        Ok(_) => Err(wrong("send an object")),
        Err(error) => Err(wrong(format!("this is not JSON: {error}"))),
    }
}

/// The sender of a described request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sender {
    /// An application, which is a trusted peer.
    Application,
    /// An operator, who may come from any address.
    Operator,
}

/// A described request, with what else its sender wants.
struct Asked {
    head: Parts,
    domain: Option<String>,
    hold: Option<Duration>,
}

impl Asked {
    /// Reads the fields. An unknown one is an error.
    fn read(server: &Server, fields: Map<String, Value>, mut peer: IpAddr, sender: Sender) -> Result<Self, Wrong> {
        let (mut method, mut path, mut host, mut client, mut domain) = (None, None, None, None, None);
        let (mut hold, mut descriptors, mut headers) = (None, Vec::new(), HeaderMap::new());
        for (name, value) in fields {
            match &*name {
                "method" => method = Some(text_of(&name, value)?),
                "path" => path = Some(text_of(&name, value)?),
                "host" => host = Some(text_of(&name, value)?),
                "client" => client = Some(text_of(&name, value)?),
                "domain" => domain = Some(text_of(&name, value)?),
                "headers" => headers = headers_of(value)?,
                "descriptors" => descriptors = descriptors_of(value)?,
                "hold_seconds" if sender == Sender::Application => hold = Some(hold_of(&value)?),
                _ => return Err(wrong(format!("there is no field `{name}`"))),
            }
        }
        headers.remove(X_FORWARDED_FOR);
        if let Some(client) = client {
            let address: IpAddr = client.parse().map_err(|_| wrong("`client` is an address, such as 192.0.2.1"))?;
            let value = HeaderValue::try_from(address.to_string()).map_err(|_| wrong("`client` is an address"))?;
            headers.insert(X_FORWARDED_FOR, value);
            if sender == Sender::Operator {
                peer = address; // the operator's own address is not believed
            }
        }
        let method = method.unwrap_or_else(|| "GET".to_owned());
        let host =
            host.map(|host| HeaderValue::try_from(host).map_err(|_| wrong("`host` is not a host"))).transpose()?;
        let path = path.unwrap_or_else(|| "/".to_owned());
        let described = Described {
            method: Method::from_bytes(method.as_bytes()).map_err(|_| wrong("`method` is not a method"))?,
            uri: uri::read(path.as_bytes(), server.paths).ok_or_else(|| wrong("`path` begins with a slash"))?,
            host,
            length: headers.remove(http::header::CONTENT_LENGTH),
            headers,
            peer,
        };
        let mut head = described.into_head();
        head.extensions.insert(Stated(descriptors));
        Ok(Self { head, domain, hold })
    }

    /// Returns the layer that decides about the request.
    fn layer<'s>(&self, server: &'s Server) -> Result<&'s Layer, Wrong> {
        let stated = self.head.extensions.get::<Stated>().is_some_and(|stated| !stated.0.is_empty());
        match (&server.limits.form, &self.domain) {
            (Form::Native { .. }, Some(_)) => Err(wrong("`domain` is for files in Envoy's form")),
            (Form::Native { .. }, None) if stated => Err(wrong("`descriptors` are for files in Envoy's form")),
            (Form::Native { layer, .. }, None) => Ok(layer),
            (Form::Envoy(_), _) if !stated => Err(wrong("the file has Envoy's form: send `descriptors`")),
            (Form::Envoy(domains), name) => {
                let named =
                    domains.iter().find(|domain| name.as_ref().is_none_or(|name| domain.limits.domain() == *name));
                named.map(|domain| &*domain.layer).ok_or_else(|| wrong("no file has this `domain`"))
            }
        }
    }
}

pub(crate) fn text_of(name: &str, value: Value) -> Result<String, Wrong> {
    match value {
        Value::String(text) => Ok(text),
        _ => Err(wrong(format!("`{name}` is text"))),
    }
}

fn headers_of(value: Value) -> Result<HeaderMap, Wrong> {
    let Value::Object(fields) = value else { return Err(wrong("`headers` is an object")) };
    let mut headers = HeaderMap::new();
    for (name, value) in fields {
        let values = match value {
            Value::Array(values) => values,
            value => vec![value],
        };
        let header = HeaderName::from_bytes(name.as_bytes()).map_err(|_| wrong(format!("{name:?} is not a header")))?;
        for value in values {
            let value = HeaderValue::try_from(text_of(&name, value)?);
            headers.append(&header, value.map_err(|_| wrong(format!("the header `{name}` has a control character")))?);
            if headers.len() > HEADERS_MAX {
                return Err(wrong(format!("a request has at most {HEADERS_MAX} headers")));
            }
        }
    }
    Ok(headers)
}

fn descriptors_of(value: Value) -> Result<Vec<Descriptor>, Wrong> {
    let message = "`descriptors` is a list of lists of objects with `key` and `value`";
    let list = |value: Value| if let Value::Array(list) = value { Ok(list) } else { Err(wrong(message)) };
    let entry = |value: Value| match value {
        Value::Object(mut fields) => match (fields.remove("key"), fields.remove("value")) {
            (Some(Value::String(key)), Some(Value::String(value))) if fields.is_empty() => Ok((key, value)),
            _ => Err(wrong(message)),
        },
        _ => Err(wrong(message)),
    };
    let descriptor = |value: Value| {
        let entries = list(value)?.into_iter().map(entry).collect::<Result<Vec<_>, _>>()?;
        Ok(Descriptor::new(entries))
    };
    list(value)?.into_iter().map(descriptor).collect()
}

fn hold_of(value: &Value) -> Result<Duration, Wrong> {
    let most = HOLD_MAX.as_secs();
    let seconds = value.as_u64().filter(|seconds| (1..=most).contains(seconds));
    seconds.map(Duration::from_secs).ok_or_else(|| wrong(format!("`hold_seconds` is a number from 1 to {most}")))
}

/// Decides about a request, and charges it.
pub(crate) async fn check(server: &Server, fields: Map<String, Value>, peer: IpAddr) -> Result<Value, Wrong> {
    let asked = Asked::read(server, fields, peer, Sender::Application)?;
    let layer = asked.layer(server)?;
    let place = match asked.hold {
        None => None,
        Some(time) => {
            let message = || format!("{HELD_MAX} requests are held: report them, or hold them for less time");
            let place = server.held.reserve().ok_or_else(|| (StatusCode::SERVICE_UNAVAILABLE, message()))?;
            Some((place, time))
        }
    };
    match layer.admit(&asked.head).await {
        Ok(admission) => {
            let mut answer = decided(admission.outcome(), &admission.headers());
            match place {
                Some((place, time)) => _ = answer.insert("id".to_owned(), place.hold(admission, time).into()),
                None => admission.keep(),
            }
            Ok(answer.into())
        }
        Err(refused) => {
            let outcome = refused.outcome().clone();
            let refusal = refused.into_http();
            let mut answer = decided(&outcome, refusal.headers());
            answer.insert("status".to_owned(), refusal.status().as_u16().into());
            Ok(answer.into())
        }
    }
}

/// Returns what was decided, as JSON.
fn decided(outcome: &Outcome, headers: &HeaderMap) -> Map<String, Value> {
    let retry_after = headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    let named = |(name, value): (&HeaderName, &HeaderValue)| {
        let value = value.to_str().ok().filter(|_| name != CONTENT_TYPE)?;
        Some((name.as_str().to_owned(), Value::from(value)))
    };
    let headers: Map<String, Value> = headers.iter().filter_map(named).collect();
    let policies: Vec<Value> = outcome.policies().iter().map(policy).collect();
    let mut answer = Map::new();
    answer.insert("allowed".to_owned(), outcome.kind().passed().into());
    answer.insert("outcome".to_owned(), outcome.kind().as_str().into());
    answer.insert("retry_after_seconds".to_owned(), retry_after.into());
    answer.insert("policies".to_owned(), policies.into());
    answer.insert("headers".to_owned(), headers.into());
    answer
}

fn policy(status: &PolicyStatus) -> Value {
    let decision = status.decision();
    let millis = |time: Option<Duration>| time.and_then(|time| u64::try_from(time.as_micros().div_ceil(1_000)).ok());
    let wait = match decision.wait() {
        Wait::After(wait) => json!(millis(Some(wait))),
        _ => Value::Null,
    };
    json!({
        "name": status.policy().name(),
        "quota": status.policy().quota().to_string(),
        "mode": status.mode().as_str(),
        "limit": decision.limit(),
        "remaining": decision.remaining(),
        "reset_after_ms": millis(decision.reset_after()),
        "wait_ms": wait,
        "cost": status.cost(),
        "refuses": status.refuses(),
    })
}

/// Ends a request that `check` held.
pub(crate) fn report(server: &Server, fields: Map<String, Value>) -> Result<Value, Wrong> {
    let (mut id, mut refunds, mut cost) = (None, None, None);
    for (name, value) in fields {
        match (&*name, value) {
            ("id", Value::String(text)) => id = Some(text),
            ("refund", Value::Bool(is_refunded)) => refunds = Some(is_refunded),
            ("cost", Value::Number(units)) if units.is_u64() => cost = units.as_u64(),
            ("id" | "refund" | "cost", _) => {
                return Err(wrong("`id` is text, `refund` is true or false, and `cost` is a number of units"));
            }
            _ => return Err(wrong(format!("there is no field `{name}`"))),
        }
    }
    let (Some(id), true) = (id, refunds.is_some() != cost.is_some()) else {
        return Err(wrong("send `id`, and either `refund` or `cost`"));
    };
    let message = || "no request with this id is held: it was reported, or its time is over".to_owned();
    let admission = server.held.take(&id).ok_or_else(|| (StatusCode::NOT_FOUND, message()))?;
    match cost {
        Some(units) if admission.usage().is_some() => {
            admission.settle(units);
            Ok(json!({ "cost": units }))
        }
        Some(_) => {
            admission.keep();
            let message =
                "the request costs what it took: no rule has a cost such as `{reserve: 100}`, which a report settles";
            Err((StatusCode::CONFLICT, message.to_owned()))
        }
        None if refunds == Some(true) => {
            admission.refund();
            Ok(json!({ "refunded": true }))
        }
        None => {
            admission.keep();
            Ok(json!({ "refunded": false }))
        }
    }
}

/// Says which rules a request meets.
pub(crate) async fn explain(server: &Server, fields: Map<String, Value>, peer: IpAddr) -> Result<Value, Wrong> {
    let asked = Asked::read(server, fields, peer, Sender::Operator)?;
    let explanation = asked.layer(server)?.explain(&asked.head).await;
    serde_json::from_str(&explanation.to_json()).map_err(|error| wrong(error.to_string()))
}

/// Forgets what the keys of a request have used. Returns the keys.
pub(crate) async fn reset(server: &Server, fields: Map<String, Value>, peer: IpAddr) -> Result<Vec<Key>, Wrong> {
    let asked = Asked::read(server, fields, peer, Sender::Operator)?;
    let layer = asked.layer(server)?;
    let explanation = layer.explain(&asked.head).await;
    let mut keys: Vec<_> = explanation.rules().iter().filter_map(|rule| rule.key()).cloned().collect();
    keys.dedup();
    for key in &keys {
        layer.reset(key).await.map_err(|error| (StatusCode::SERVICE_UNAVAILABLE, error.to_string()))?;
    }
    Ok(keys)
}

/// Says that a path is none.
pub(crate) fn not_found() -> Response<Body> {
    text(StatusCode::NOT_FOUND, "there is nothing here")
}
