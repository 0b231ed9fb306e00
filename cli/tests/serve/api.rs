//! The interface for applications, and its description, against which each answer is held.

use serde_json::{Value, json};

use crate::health::client;
use crate::http::{Answer, get, post_json, send};
use crate::python;
use crate::server::{Folder, Server, rules};

const ENVOY: &str = "domain: shop\ndescriptors: [{key: path, rate_limit: {unit: year, requests_per_unit: 2}}]\n";

const MODES: &str = "
domain: shop
descriptors:
- {key: path, value: /search, rate_limit: {name: search, unit: year, requests_per_unit: 1}}
- {key: watched, shadow_mode: true, rate_limit: {unit: year, requests_per_unit: 1}}
- {key: free, rate_limit: {unlimited: true}}
- {key: other, rate_limit: {unit: year, requests_per_unit: 2, replaces: [{name: search}]}}
";

/// Holds a value against a schema of the description.
fn matches(api: &Value, schema: &Value, value: &Value) -> Result<(), String> {
    if let Some(path) = schema["$ref"].as_str() {
        return matches(api, api.pointer(path.trim_start_matches('#')).expect(path), value);
    }
    if let Some(choices) = schema["oneOf"].as_array() {
        let fitting = choices.iter().filter(|choice| matches(api, choice, value).is_ok()).count();
        return if fitting == 1 { Ok(()) } else { Err(format!("{value} fits {fitting} of {choices:?}")) };
    }
    let is = |kind: &str| match kind {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "null" => value.is_null(),
        other => panic!("the test does not know the type {other}"),
    };
    let kinds = schema["type"].as_array().cloned().unwrap_or_else(|| vec![schema["type"].clone()]);
    if !kinds.iter().any(|kind| is(kind.as_str().expect("a type is named"))) {
        return Err(format!("{value} is none of {kinds:?}"));
    }
    if schema["enum"].as_array().is_some_and(|all| !all.contains(value)) {
        return Err(format!("{value} is none of {}", schema["enum"]));
    }
    let number = value.as_i64();
    let (least, most) = (schema["minimum"].as_i64(), schema["maximum"].as_i64());
    if number.zip(least).is_some_and(|(n, least)| n < least) || number.zip(most).is_some_and(|(n, most)| n > most) {
        return Err(format!("{value} is out of its range"));
    }
    for part in value.as_array().into_iter().flatten() {
        matches(api, &schema["items"], part)?;
    }
    if let Some(fields) = value.as_object() {
        for name in schema["required"].as_array().into_iter().flatten() {
            fields.get(name.as_str().unwrap()).ok_or_else(|| format!("{name} is missing in {value}"))?;
        }
        for (name, part) in fields {
            match (schema["properties"].get(name), &schema["additionalProperties"]) {
                (Some(schema), _) => matches(api, schema, part)?,
                (None, Value::Bool(false)) => return Err(format!("{name} is not described")),
                (None, Value::Null | Value::Bool(true)) => {}
                (None, schema) => matches(api, schema, part)?,
            }
        }
    }
    Ok(())
}

/// A server, its description, and which of its answers were seen.
struct Api {
    server: Server,
    description: Value,
}

impl Api {
    fn start(rules: &str, arguments: &[&str]) -> Self {
        let folder = Folder::new();
        folder.write("operators", "alice 0123456789abcdef\n");
        let server = Server::start_in(folder, rules, &[&["--operators", "operators"], arguments].concat());
        let description = get(server.admin, "/openapi.json", &[]).json();
        Self { server, description }
    }

    /// Sends a body, and holds it and the answer against the description.
    fn post(&self, path: &str, body: &Value) -> Answer {
        let is_for_operators = path != "/v1/check" && path != "/v1/report";
        let address = if is_for_operators { self.server.admin } else { self.server.asked };
        let answer = post_json(address, path, &[("Authorization", "Bearer 0123456789abcdef")], &body.to_string());
        let method = &self.description["paths"][path]["post"];
        let asked = matches(&self.description, &method["requestBody"]["content"]["application/json"]["schema"], body);
        assert_eq!(asked.is_err(), answer.status == 400 && asked.is_err(), "{path} {body}: {asked:?} {answer:?}");
        let mut described = &method["responses"][answer.status.to_string()];
        assert!(described.is_object(), "the description has no {} of {path}: {answer:?}", answer.status);
        if let Some(path) = described["$ref"].as_str() {
            described = self.description.pointer(path.trim_start_matches('#')).unwrap();
        }
        let schema = &described["content"]["application/json"]["schema"];
        matches(&self.description, schema, &answer.json()).unwrap_or_else(|error| panic!("{path} {body}: {error}"));
        answer
    }
}

#[test]
fn settings_of_operators_are_as_described() {
    let folder = Folder::new();
    let file = folder.path().join("set").display().to_string();
    let api = Api::start(&rules(), &["--fleet", &file]);
    let shadow = json!({"kind": "mode", "name": "login", "value": "shadow", "why": "too strict", "lasting": "1h"});
    assert_eq!(api.post("/v1/settings", &shadow).json(), json!({"revision": 1}));
    let end = json!({"kind": "mode", "name": "login", "why": "", "seen": 0});
    assert_eq!(api.post("/v1/settings", &end).status, 409);
    let block = json!({"kind": "network", "name": "rules", "subject": "::1", "value": "deny", "why": ""});
    assert_eq!(api.post("/v1/settings", &block).status, 200);
    assert_eq!(api.post("/v1/rollback", &json!({"name": "rules", "why": "none was pushed"})).status, 400);
    assert_eq!(api.post("/v1/settings", &json!({"kind": "mode", "name": "login"})).status, 400);
    let settings = get(api.server.admin, "/v1/settings", &[("Authorization", "Bearer 0123456789abcdef")]).json();
    matches(&api.description, &json!({"$ref": "#/components/schemas/Settings"}), &settings).unwrap();
    assert_eq!((settings["entries"].as_array().unwrap().len(), &settings["revision"]), (2, &json!(2)));
}

#[test]
fn customer_with_a_plan_is_raised() {
    let folder = Folder::new();
    let file = folder.path().join("set").display().to_string();
    let rules = "rules:
- name: customer
  plans: {by: header x-api-key, quotas: {acme: 20 per hour, usual: 5 per hour}, otherwise: usual}
  key: header x-api-key
- {name: two, quota: [100 per hour, 1000 per day], key: header x-api-key}
";
    let api = Api::start(rules, &["--fleet", &file]);
    let check = |key: &str| {
        let answer = api.post("/v1/check", &json!({"headers": {"x-api-key": key}})).json();
        let policies = answer["policies"].as_array().unwrap();
        let customer = policies.iter().find(|policy| policy["name"] == "customer").unwrap();
        (customer["limit"].as_u64().unwrap(), customer["remaining"].as_u64().unwrap())
    };
    assert_eq!([check("acme"), check("small"), check("small")], [(20, 19), (5, 4), (5, 3)]);
    for (key, value) in [("acme", "600 per hour"), ("small", "30 per hour")] {
        let raise = json!({"kind": "override", "name": "customer", "subject": key, "value": value, "why": "a sale"});
        assert_eq!(api.post("/v1/settings", &raise).status, 200);
    }
    let raised = [check("acme"), check("small"), check("other")];
    assert_eq!(raised.map(|(limit, _)| limit), [600, 30, 5], "the others keep their plan");
    assert!(raised[1].1 <= 27, "what it used stays used: {raised:?}");
    let end = json!({"kind": "override", "name": "customer", "subject": "acme", "why": "it is over"});
    assert_eq!(api.post("/v1/settings", &end).status, 200);
    assert_eq!(check("acme").0, 20);
    // An override without an effect is refused.
    let two = json!({"kind": "override", "name": "two", "subject": "acme", "value": "600 per hour", "why": ""});
    let answer = api.post("/v1/settings", &two);
    assert!(answer.status == 400 && answer.body.contains("no `override` of the name `two`"), "{answer:?}");
}

#[test]
fn check_decides_and_charges() {
    let api = Api::start(&rules(), &[]);
    let login = json!({"method": "POST", "path": "/login", "client": "203.0.113.9", "host": "shop.example"});
    for remaining in [2, 1, 0] {
        let answer = api.post("/v1/check", &login).json();
        assert_eq!((&answer["allowed"], &answer["outcome"]), (&json!(true), &json!("allowed")), "{answer}");
        let policy = answer["policies"].as_array().unwrap().iter().find(|policy| policy["name"] == "login").unwrap();
        assert_eq!((&policy["remaining"], &policy["limit"]), (&json!(remaining), &json!(3)));
        assert!(answer["headers"]["ratelimit"].as_str().unwrap().contains("\"login\""));
    }
    let refused = api.post("/v1/check", &login).json();
    assert_eq!((&refused["allowed"], &refused["status"]), (&json!(false), &json!(429)), "{refused}");
    assert!(refused["retry_after_seconds"].as_u64().is_some_and(|seconds| (1..=1_200).contains(&seconds)), "{refused}");
    // A proxy and an application share the allowance.
    let nginx = [("X-Original-Method", "POST"), ("X-Original-URI", "/login"), ("X-Forwarded-For", "203.0.113.9")];
    assert_eq!(get(api.server.asked, "/auth/nginx", &nginx).status, 401);
    let other = json!({"method": "POST", "path": "//login", "client": "203.0.113.10", "headers": {"x-a": ["1", "2"]}});
    assert_eq!(api.post("/v1/check", &other).json()["allowed"], true);
}

#[test]
fn reported_request_is_refunded_or_kept() {
    let api = Api::start(&rules(), &[]);
    let login = json!({"method": "POST", "path": "/login", "client": "203.0.113.9", "hold_seconds": 60});
    let id = |answer: &Value| answer["id"].as_str().unwrap().to_owned();
    for _ in 0..10 {
        let held = api.post("/v1/check", &login).json();
        let report = json!({"id": id(&held), "refund": true});
        assert_eq!(api.post("/v1/report", &report).json(), json!({"refunded": true}));
        assert_eq!(api.post("/v1/report", &report).status, 404, "a request is reported once");
    }
    for _ in 0..3 {
        let held = api.post("/v1/check", &login).json();
        assert_eq!(api.post("/v1/report", &json!({"id": id(&held), "refund": false})).status, 200);
    }
    let refused = api.post("/v1/check", &login).json();
    assert_eq!((&refused["allowed"], &refused["id"]), (&json!(false), &Value::Null));
}

#[test]
fn reported_cost_settles_what_was_reserved() {
    let rules = "rules:
- {name: tokens, quota: 100 per hour, key: client-ip, cost: {reserve: {header: x-max, at-most: 50}}}
- {name: requests, quota: 9 per hour, key: client-ip}
";
    let api = Api::start(rules, &[]);
    let complete = json!({"client": "203.0.113.9", "headers": {"x-max": "40"}, "hold_seconds": 60});
    let left = |answer: &Value| {
        answer["policies"].as_array().unwrap().iter().map(|policy| policy["remaining"].clone()).collect::<Vec<_>>()
    };
    for (cost, expected) in [(7, [60, 8]), (50, [53, 7]), (0, [3, 6])] {
        let held = api.post("/v1/check", &complete).json();
        assert_eq!(left(&held), expected, "{held}");
        let report = json!({"id": held["id"], "cost": cost});
        assert_eq!(api.post("/v1/report", &report).json(), json!({"cost": cost}));
        assert_eq!(api.post("/v1/report", &report).status, 404, "a request is reported once");
    }
    // More than is left is owed.
    let held = api.post("/v1/check", &complete).json();
    assert_eq!(api.post("/v1/report", &json!({"id": held["id"], "cost": 90})).status, 200);
    assert_eq!(api.post("/v1/check", &complete).json()["allowed"], false);
    // Nothing says what it costs: it stays at the reservation.
    let other = json!({"client": "203.0.113.10", "headers": {"x-max": "40"}, "hold_seconds": 60});
    let held = api.post("/v1/check", &other).json();
    assert_eq!(api.post("/v1/report", &json!({"id": held["id"], "refund": false})).json(), json!({"refunded": false}));
    assert_eq!(left(&api.post("/v1/check", &other).json()), [20, 7]);
}

#[test]
fn cost_is_reported_only_for_a_rule_that_reserves() {
    let api = Api::start("rules: [{name: a, quota: 2 per hour, key: global}]", &[]);
    let held = api.post("/v1/check", &json!({"hold_seconds": 60})).json();
    let answer = api.post("/v1/report", &json!({"id": held["id"], "cost": 0}));
    assert_eq!(answer.status, 409);
    assert!(answer.json()["error"].as_str().unwrap().contains("`{reserve: 100}`"), "{answer:?}");
    assert_eq!(api.post("/v1/check", &json!({})).json()["policies"][0]["remaining"], 0, "it stays charged");
}

#[test]
fn held_request_is_kept_when_its_time_is_over() {
    let api = Api::start("rules: [{name: a, quota: 1 per hour, key: global}]", &[]);
    let held = api.post("/v1/check", &json!({"hold_seconds": 1})).json();
    std::thread::sleep(std::time::Duration::from_millis(1_100));
    assert_eq!(api.post("/v1/report", &json!({"id": held["id"], "refund": true})).status, 404);
    assert_eq!(api.post("/v1/check", &json!({})).json()["allowed"], false);
}

#[test]
fn operator_explains_and_resets() {
    let mut api = Api::start(&rules(), &[]);
    let login = json!({"method": "POST", "path": "/login?token=SECRET", "client": "203.0.113.9",
                       "headers": {"x-api-key": "ent-SECRET"}});
    (0..4).for_each(|_| drop(api.post("/v1/check", &login)));
    let explained = api.post("/v1/explain", &login).json();
    assert!(explained.to_string().contains("\"login\""), "{explained}");
    assert_eq!(api.post("/v1/check", &login).json()["allowed"], false);
    assert!(api.post("/v1/reset", &login).json()["keys"].as_u64() >= Some(1));
    assert_eq!(api.post("/v1/check", &login).json()["allowed"], true);
    let line = api.server.wait_for_line(|line| line["event"] == "operator");
    assert_eq!((&line["operator"], &line["result"]), (&json!("alice"), &json!("ok")), "{line}");
    assert!(line["keys"].as_str().unwrap().contains("(203.0.113.0/24)"), "{line}");
    for secret in ["SECRET", "203.0.113.9"] {
        assert!(!line.to_string().contains(secret), "{line}");
    }
}

/// The operator's own address is not trusted here, and the client may be a proxy that is.
#[test]
fn page_and_interface_explain_the_client_alike() {
    let rules = "{access: {deny: [198.51.100.0/24]}, rules: [{name: a, quota: 2 per hour, key: client-ip}]}";
    let api = Api::start(rules, &["--trust", "10.0.0.0/8"]);
    let on_page = |client: &str| {
        let form = ("Content-Type", "application/x-www-form-urlencoded");
        let headers = [("Authorization", "Bearer 0123456789abcdef"), ("Accept", "application/json"), form];
        let fields = format!("action=explain&uri=%2F&client={client}");
        send(api.server.admin, "POST", "/limits", &headers, &fields).json()[0]["explanation"].clone()
    };
    for client in ["203.0.113.9", "10.0.0.9"] {
        let explained = api.post("/v1/explain", &json!({ "client": client })).json();
        assert_eq!(explained["rules"][0]["key"], client, "{explained}");
        assert_eq!(explained["rules"], on_page(client)["rules"]);
    }
    let denied = api.post("/v1/explain", &json!({"client": "198.51.100.7"})).json();
    assert_eq!((&denied["outcome"], &denied["network"]), (&json!("denied"), &json!("198.51.100.0/24")));
    assert_eq!(denied, on_page("198.51.100.7"));
}

#[test]
fn wrong_field_is_named() {
    let api = Api::start(&rules(), &[]);
    for (path, body, said) in [
        ("/v1/check", json!({"paht": "/"}), "there is no field `paht`"),
        ("/v1/check", json!({"path": 1}), "`path` is text"),
        ("/v1/check", json!({"path": "login"}), "`path` begins with a slash"),
        ("/v1/check", json!({"client": "me"}), "`client` is an address"),
        ("/v1/check", json!({"method": "a b"}), "`method` is not a method"),
        ("/v1/check", json!({"headers": {"a b": "c"}}), "is not a header"),
        ("/v1/check", json!({"headers": {"a": "\n"}}), "has a control character"),
        ("/v1/check", json!({"hold_seconds": 0}), "a number from 1 to 600"),
        ("/v1/check", json!({"domain": "shop"}), "files in Envoy's form"),
        ("/v1/explain", json!({"hold_seconds": 1}), "there is no field `hold_seconds`"),
        ("/v1/report", json!({"id": "a"}), "send `id`, and either `refund` or `cost`"),
        ("/v1/report", json!({"id": "a", "refund": true, "cost": 1}), "send `id`, and either `refund` or `cost`"),
        ("/v1/report", json!({"id": "a", "refund": "yes"}), "`refund` is true or false"),
        ("/v1/report", json!({"id": "a", "cost": -1}), "`cost` is a number of units"),
    ] {
        let answer = api.post(path, &body);
        assert_eq!(answer.status, 400, "{body}: {answer:?}");
        assert!(answer.json()["error"].as_str().unwrap().contains(said), "{body}: {answer:?}");
    }
}

#[test]
fn descriptors_are_checked_by_a_file_in_envoys_form() {
    let api = Api::start(ENVOY, &[]);
    let search = json!({"domain": "shop", "descriptors": [[{"key": "path", "value": "/search"}]]});
    for allowed in [true, true, false] {
        assert_eq!(api.post("/v1/check", &search).json()["allowed"], allowed);
    }
    assert_eq!(api.post("/v1/check", &json!({"path": "/"})).status, 400, "it says nothing about requests");
    assert_eq!(api.post("/v1/check", &json!({"domain": "no", "descriptors": search["descriptors"]})).status, 400);
    // A proxy must not take a file that says nothing about requests for a permission.
    let nginx = [("X-Original-Method", "GET"), ("X-Original-URI", "/"), ("X-Forwarded-For", "203.0.113.9")];
    assert_eq!(get(api.server.asked, "/auth/nginx", &nginx).status, 501);
}

#[test]
fn modes_of_envoys_form_are_answered() {
    let api = Api::start(MODES, &[]);
    let check = |entries: &[(&str, &str)]| {
        let descriptors: Vec<Value> =
            entries.iter().map(|(key, value)| json!([{"key": key, "value": value}])).collect();
        let answer = api.post("/v1/check", &json!({"domain": "shop", "descriptors": descriptors})).json();
        answer["outcome"].as_str().unwrap().to_owned()
    };
    let search = ("path", "/search");
    assert_eq!([check(&[search]), check(&[search])], ["allowed", "limited"]);
    assert_eq!([check(&[("watched", "a")]), check(&[("watched", "a")])], ["allowed", "shadow_limited"]);
    assert_eq!([check(&[("free", "a")]), check(&[("unknown", "a")])], ["exempt", "exempt"]);
    // The limit of `search` does not count a request to which the limit of `other` applies.
    let both = [search, ("other", "a")];
    assert_eq!([check(&both), check(&both), check(&both)], ["allowed", "allowed", "limited"]);
}

#[test]
fn validator_of_openapi_accepts_description_and_answers() {
    let rules = "rules:
- {name: client, quota: 1000 per hour, key: client-ip}
- {name: login, quota: 9 per hour, key: client-ip, match: {path: /login}, cost: {reserve: 2}}
";
    let folder = Folder::new();
    let file = folder.path().join("set").display().to_string();
    let api = Api::start(rules, &["--fleet", &file]);
    let mut validator = client("openapi.py");
    validator.args([api.server.asked.to_string(), api.server.admin.to_string(), "0123456789abcdef".to_owned()]);
    println!("{}", python::run(&mut validator, ""));
}
