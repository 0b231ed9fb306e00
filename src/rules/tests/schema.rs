//! The schema for editors agrees with the reader.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value as Json, json};

use super::super::document::{Node, NodeValue, Type, decode, parse};
use super::super::error::Problems;
use super::super::{Rules, SCHEMA, read};
use super::{accepted, refused};
use crate::base::sampling::stride;
use crate::key::TrustedProxies;
use crate::{MissingKey, Mode};

fn schema() -> Json {
    serde_json::from_str(SCHEMA).unwrap()
}

/// Returns the file as JSON, or `None` if it is not YAML.
fn json_of(text: &str) -> Option<Json> {
    fn convert(node: &Node<'_>) -> Json {
        match (&node.value, node.kind()) {
            (_, Type::Nothing) => Json::Null,
            (NodeValue::Scalar { text, .. }, Type::Truth) => json!(text.eq_ignore_ascii_case("true")),
            (NodeValue::Scalar { text, .. }, Type::Number) => match text.parse::<i64>() {
                Ok(number) => json!(number),
                Err(_) => json!(text.parse::<f64>().unwrap_or(0.5)),
            },
            (NodeValue::Scalar { text, .. }, _) => json!(text),
            (NodeValue::List(items), _) => items.iter().map(|item| convert(item)).collect(),
            (NodeValue::Map(entries), _) => {
                entries.iter().map(|entry| (entry.name.to_string(), convert(&entry.node))).collect::<Map<_, _>>().into()
            }
        }
    }
    let text = decode(text.as_bytes()).ok()?;
    parse(text, &mut Problems::new(text)).whole().map(|root| convert(&root))
}

fn has_type(value: &Json, name: &str) -> bool {
    match name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        other => panic!("{other}"),
    }
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
        "not" => !valid(rule),
        "pattern" => value.as_str().is_none_or(|text| match rule.as_str().unwrap() {
            "\\*" => text.contains('*'),
            "^[^*]*$" => !text.contains('*'),
            other => panic!("the test does not know the pattern `{other}`"),
        }),
        "const" => value == rule,
        "enum" => rule.as_array().unwrap().contains(value),
        "type" => match rule {
            Json::Array(types) => types.iter().any(|one| has_type(value, one.as_str().unwrap())),
            one => has_type(value, one.as_str().unwrap()),
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
fn guide_describes_each_field_of_a_rule() {
    let page = include_str!("../../guide/rules_in_a_file.md");
    for field in read::rule::RULE {
        assert!(page.contains(&format!("\n| `{field}` | ")), "rules_in_a_file.md has no row for `{field}`");
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
        ("/definitions/settings/properties", read::shared::SETTINGS.to_vec()),
        ("/definitions/entry/properties", read::rule::ENTRY.to_vec()),
        ("/definitions/quota/anyOf/1/properties", read::quota::QUOTA.to_vec()),
        ("/definitions/plans/properties", read::quota::PLANS.to_vec()),
        ("/definitions/match/properties", read::condition::MATCH.to_vec()),
        ("/definitions/not/properties", read::condition::NOT.to_vec()),
        ("/definitions/cost/anyOf/1/properties", read::quota::COST.to_vec()),
        ("/definitions/cost/anyOf/1/properties/reserve/anyOf/1/properties", read::quota::RESERVE.to_vec()),
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
        ("/definitions/mode/enum", words(Mode::WORDS)),
        ("/definitions/missing-key/enum", words(MissingKey::WORDS)),
    ] {
        assert_eq!(names(pointer), fields.iter().map(ToString::to_string).collect(), "{pointer}");
    }
    let examples = names("/definitions/key/anyOf/0/examples");
    for (key, _) in read::key::KEYS {
        assert!(examples.contains(*key), "{key}");
    }
}

/// The messages of problems that the schema cannot see, and why it cannot.
const BEYOND_THE_SCHEMA: &[(&str, &str)] = &[
    ("is not a quota", GRAMMAR),
    ("is not a block", GRAMMAR),
    ("must be a number of units", GRAMMAR),
    ("is not a time:", GRAMMAR),
    ("counts bytes", COMPARISON),
    ("no template is named", COMPARISON),
    ("neither the rule nor its template", COMPARISON),
    ("is not a time of up to", GRAMMAR),
    ("is not a key", GRAMMAR),
    ("is not a method", GRAMMAR),
    ("is not a host", GRAMMAR),
    ("is not the name of a header", GRAMMAR),
    ("is neither an address", GRAMMAR),
    ("no path matches", GRAMMAR),
    ("must be text without spaces around it", GRAMMAR),
    ("cannot be a rule's name", GRAMMAR),
    ("bytes; the most is", "a schema counts characters"),
    ("is too large: at most", "the bound depends on the unit"),
    ("no request could pass: each request costs", COMPARISON),
    ("could never pass, because", COMPARISON),
    ("which has no quota", COMPARISON),
    ("two descriptors have the key", COMPARISON),
    ("is listed twice", COMPARISON),
    ("count alike", COMPARISON),
    ("needs a `pace`", "the other field may stand in a template"),
];

/// A regular expression would repeat the reader.
const GRAMMAR: &str = "the text has a grammar of its own";

const COMPARISON: &str = "a schema cannot compare two values";

/// Returns the values that a value is replaced by.
fn replacements(value: &Json) -> Vec<Json> {
    let mut all = vec![
        Json::Null,
        json!(true),
        json!(false),
        json!(0),
        json!(1),
        json!(-1),
        json!(1.5),
        json!(101),
        json!(u64::MAX),
        json!(""),
        json!(" "),
        json!("x"),
        json!("5/s"),
        json!("*"),
        json!("a b"),
        json!([]),
        json!({}),
        json!([value]),
        json!([value, value]),
        json!([[value]]),
        json!({ "name": value }),
        json!([{}]),
        json!(["x", 1]),
    ];
    if let Some(text) = value.as_str() {
        all.extend([
            json!(text.to_uppercase()),
            json!(format!("{text} ")),
            json!(format!("{text}\n")),
            json!(text.repeat(200)),
        ]);
    }
    all
}

/// Calls `take` with the value after each change of one of its parts.
fn each_mutant(whole: &Json, take: &mut dyn FnMut(&Json)) {
    fn pointers(value: &Json, at: &str, all: &mut Vec<String>) {
        all.push(at.to_owned());
        let escaped = |name: &str| name.replace('~', "~0").replace('/', "~1");
        match value {
            Json::Array(items) => {
                items.iter().enumerate().for_each(|(place, item)| pointers(item, &format!("{at}/{place}"), all));
            }
            Json::Object(fields) => {
                fields.iter().for_each(|(name, value)| pointers(value, &format!("{at}/{}", escaped(name)), all));
            }
            _ => {}
        }
    }
    let mut all = Vec::new();
    pointers(whole, "", &mut all);
    for pointer in &all {
        let changed = |change: &dyn Fn(&mut Json)| {
            let mut mutant = whole.clone();
            change(mutant.pointer_mut(pointer).unwrap());
            mutant
        };
        let value = whole.pointer(pointer).unwrap();
        for other in replacements(value) {
            take(&changed(&|value| *value = other.clone()));
        }
        if let Some(fields) = value.as_object() {
            for name in fields.keys() {
                take(&changed(&|value| drop(value.as_object_mut().unwrap().remove(name))));
                take(&changed(&|value| {
                    let fields = value.as_object_mut().unwrap();
                    let own = fields.remove(name).unwrap();
                    fields.insert(format!("{name}s"), own);
                }));
            }
            take(&changed(&|value| drop(value.as_object_mut().unwrap().insert("other".to_owned(), json!("x")))));
        }
    }
}

#[test]
fn schema_and_reader_agree_on_changed_files() {
    let schema = schema();
    let proxies = TrustedProxies::count(1).unwrap();
    let builder = Rules::builder().trusted_proxies(proxies);
    let (mut count, mut differing, mut used) = (0, BTreeMap::<String, (usize, String)>::new(), BTreeSet::new());
    for case in accepted() {
        let json = json_of(&case.text).unwrap();
        each_mutant(&json, &mut |mutant| {
            count += 1;
            if count % stride() != 0 {
                return;
            }
            let text = mutant.to_string();
            let read = builder.check(&text);
            let is_valid = is_valid(mutant, &schema, &schema);
            let what = match read {
                Ok(_) if !is_valid => format!("accepted, and against the schema: {text}"),
                Err(error) if is_valid => {
                    let problem = &error.problems()[0];
                    let known = BEYOND_THE_SCHEMA.iter().find(|(message, _)| problem.message().contains(message));
                    if let Some((message, _)) = known {
                        used.insert(*message);
                        return;
                    }
                    format!("{:?} {}", problem.kind(), problem.message())
                }
                _ => return,
            };
            differing.entry(what).or_insert((0, text)).0 += 1;
        });
    }
    let sum: usize = differing.values().map(|(count, _)| count).sum();
    for (what, (count, text)) in &differing {
        println!("{count} x {what}\n      {text}");
    }
    println!("{count} files, {sum} differ");
    assert!(differing.is_empty() && count > 5_000);
    let unused = BEYOND_THE_SCHEMA.iter().filter(|(message, _)| !used.contains(message));
    assert!(stride() > 1 || unused.count() == 0, "{used:?}");
}
