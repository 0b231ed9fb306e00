//! The schema for editors agrees with the reader.

use std::collections::BTreeSet;

use serde_json::{Map, Value as Json, json};

use super::super::document::{Node, Type, Value, decode, parse};
use super::super::problem::Problems;
use super::super::read;
use super::{accepted, refused};

fn schema() -> Json {
    serde_json::from_str(include_str!("../schema.json")).unwrap()
}

/// Returns the file as JSON, or `None` if it is not YAML.
fn json_of(text: &str) -> Option<Json> {
    fn convert(node: &Node<'_>) -> Json {
        match (&node.value, node.kind()) {
            (_, Type::Nothing) => Json::Null,
            (Value::Scalar { text, .. }, Type::Truth) => json!(text.eq_ignore_ascii_case("true")),
            (Value::Scalar { text, .. }, Type::Number) => match text.parse::<i64>() {
                Ok(number) => json!(number),
                Err(_) => json!(text.parse::<f64>().unwrap_or(0.5)),
            },
            (Value::Scalar { text, .. }, _) => json!(text),
            (Value::List(items), _) => items.iter().map(|item| convert(item)).collect(),
            (Value::Map(entries), _) => {
                entries.iter().map(|entry| (entry.name.to_string(), convert(&entry.node))).collect::<Map<_, _>>().into()
            }
        }
    }
    let text = decode(text.as_bytes()).ok()?;
    parse(text, &mut Problems::new(text)).map(|root| convert(&root))
}

/// Returns whether a value is valid. Panics at a word of schemas that it does not know.
fn is_valid(value: &Json, schema: &Json, root: &Json) -> bool {
    let number = |limit: &Json| limit.as_f64().unwrap();
    let count = |limit: &Json| usize::try_from(limit.as_u64().unwrap()).unwrap();
    let valid = |schema: &Json| is_valid(value, schema, root);
    schema.as_object().unwrap().iter().all(|(word, rule)| match word.as_str() {
        "$schema" | "title" | "description" | "examples" | "definitions" => true,
        "$ref" => valid(root.pointer(&rule.as_str().unwrap()[1..]).unwrap()),
        "anyOf" => rule.as_array().unwrap().iter().any(valid),
        "allOf" => rule.as_array().unwrap().iter().all(valid),
        "oneOf" => rule.as_array().unwrap().iter().filter(|one| valid(one)).count() == 1,
        "const" => value == rule,
        "enum" => rule.as_array().unwrap().contains(value),
        "type" => match rule.as_str().unwrap() {
            "object" => value.is_object(),
            "array" => value.is_array(),
            "string" => value.is_string(),
            "integer" => value.is_i64() || value.is_u64(),
            "number" => value.is_number(),
            "boolean" => value.is_boolean(),
            "null" => value.is_null(),
            other => panic!("{other}"),
        },
        "minimum" => value.as_f64().is_none_or(|value| value >= number(rule)),
        "maximum" => value.as_f64().is_none_or(|value| value <= number(rule)),
        "minLength" => value.as_str().is_none_or(|text| text.chars().count() >= count(rule)),
        "maxLength" => value.as_str().is_none_or(|text| text.chars().count() <= count(rule)),
        "minItems" => value.as_array().is_none_or(|items| items.len() >= count(rule)),
        "maxItems" => value.as_array().is_none_or(|items| items.len() <= count(rule)),
        "minProperties" => value.as_object().is_none_or(|fields| fields.len() >= count(rule)),
        "maxProperties" => value.as_object().is_none_or(|fields| fields.len() <= count(rule)),
        "items" => value.as_array().is_none_or(|items| items.iter().all(|item| is_valid(item, rule, root))),
        "required" => {
            let has = |fields: &Map<String, Json>, name: &Json| fields.contains_key(name.as_str().unwrap());
            value.as_object().is_none_or(|fields| rule.as_array().unwrap().iter().all(|name| has(fields, name)))
        }
        "properties" => value.as_object().is_none_or(|fields| {
            fields.iter().all(|(name, value)| rule.get(name).is_none_or(|rule| is_valid(value, rule, root)))
        }),
        "additionalProperties" => value.as_object().is_none_or(|fields| {
            let others = fields.iter().filter(|(name, _)| schema["properties"].get(name).is_none());
            others.into_iter().all(|(_, value)| rule.as_bool().unwrap_or_else(|| is_valid(value, rule, root)))
        }),
        other => panic!("the test does not know `{other}`"),
    })
}

#[test]
fn schema_accepts_what_the_reader_accepts() {
    let schema = schema();
    for case in accepted() {
        assert!(is_valid(&json_of(&case.text).unwrap(), &schema, &schema), "{}", case.title);
    }
}

#[test]
fn schema_refuses_the_files_that_are_marked() {
    let schema = schema();
    for case in refused() {
        let is_refused = match json_of(&case.text) {
            Some(json) => !is_valid(&json, &schema, &schema),
            None => case.is_against_schema, // no editor gets to the schema
        };
        assert_eq!(is_refused, case.is_against_schema, "{}", case.title);
    }
}

#[test]
fn schema_has_the_fields_of_the_reader() {
    let schema = schema();
    let names = |pointer: &str| -> BTreeSet<String> {
        match schema.pointer(pointer).unwrap_or_else(|| panic!("{pointer}")) {
            Json::Object(fields) => fields.keys().cloned().collect(),
            list => list.as_array().unwrap().iter().map(|name| name.as_str().unwrap().to_owned()).collect(),
        }
    };
    fn words<T>(choices: &[(&'static str, T)]) -> Vec<&'static str> {
        choices.iter().map(|(name, _)| *name).collect()
    }
    for (pointer, fields) in [
        ("/definitions/file/properties", read::FILE.to_vec()),
        ("/definitions/file/properties/access/properties", read::ACCESS.to_vec()),
        ("/definitions/rule/properties", read::rule::RULE.to_vec()),
        ("/definitions/entry/properties", read::rule::ENTRY.to_vec()),
        ("/definitions/quota/anyOf/1/properties", read::quota::QUOTA.to_vec()),
        ("/definitions/plans/properties", read::quota::PLANS.to_vec()),
        ("/definitions/match/properties", read::condition::MATCH.to_vec()),
        ("/definitions/cost/anyOf/1/properties", read::quota::COST.to_vec()),
        ("/definitions/block/anyOf/1/properties", read::quota::BLOCK.to_vec()),
        ("/definitions/domain/properties", read::envoy::DOMAIN.to_vec()),
        ("/definitions/descriptor/properties", read::envoy::DESCRIPTOR.to_vec()),
        ("/definitions/rate-limit/properties", read::envoy::RATE_LIMIT.to_vec()),
        ("/definitions/rate-limit/properties/replaces/items/properties", read::envoy::REPLACES.to_vec()),
        ("/definitions/descriptor/properties/metadata/properties", vec![read::envoy::OURS]),
        (
            "/definitions/descriptor/properties/metadata/properties/tower_ratelimit/properties",
            read::envoy::METADATA.to_vec(),
        ),
        ("/definitions/unit/enum", words(read::quota::UNITS)),
        ("/definitions/mode/enum", words(read::rule::MODES)),
        ("/definitions/missing-key/enum", words(read::rule::MISSING_KEYS)),
    ] {
        assert_eq!(names(pointer), fields.iter().map(ToString::to_string).collect(), "{pointer}");
    }
    let examples = names("/definitions/key/anyOf/0/examples");
    for (key, _) in read::key::KEYS {
        assert!(examples.contains(*key), "{key}");
    }
}
