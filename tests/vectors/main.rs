//! Replays the sequences of `tests/vectors.json`: assertions from the tests of other rate limiters,
//! each with its repository, test and commit. An assertion that does not hold here is in
//! [`left_out`] with its reason.
//!
//! [`mapping`] translates another project's parameters and answers, [`replay`] makes the calls, and
//! [`expectation`] compares. Each fails on anything that it does not know.

mod expectation;
mod left_out;
mod mapping;
#[cfg(feature = "_redis")]
mod on_redis;
mod properties;
mod replay;
#[cfg(feature = "_redis")]
#[path = "../support/mod.rs"]
mod support;

use std::collections::BTreeSet;

use serde_json::{Value, json};
use tower_ratelimit::quota::Algorithm;

use left_out::{LEFT_OUT, LeftOut, Why};
use mapping::{block, quota};
use properties::PROPERTIES;
use replay::{Failure, replay};

/// All vectors.
fn vectors() -> Vec<Value> {
    let file: Value = serde_json::from_str(include_str!("../vectors.json")).expect("the file is JSON");
    file["vectors"].as_array().expect("it holds a list of vectors").clone()
}

/// Returns the vector of this name.
fn vector(id: &str) -> Value {
    vectors().into_iter().find(|vector| vector["id"] == id).expect("the vector is in the file")
}

fn id(vector: &Value) -> &str {
    vector["id"].as_str().expect("a vector has an id")
}

fn omission(id: &str) -> Option<&'static LeftOut> {
    LEFT_OUT.iter().find(|left_out| left_out.id == id)
}

/// Returns the vectors that are replayed: all that are in no table.
fn replayed() -> Vec<Value> {
    let elsewhere = |vector: &Value| omission(id(vector)).is_some() || PROPERTIES.contains(&id(vector));
    vectors().into_iter().filter(|vector| !elsewhere(vector)).collect()
}

#[test]
fn replayed_vectors_give_every_stated_answer() {
    let failures: Vec<String> = replayed()
        .iter()
        .filter_map(|vector| replay(vector).err().map(|failure| format!("{}: {failure}", id(vector))))
        .collect();
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn vectors_are_replayed_or_left_out_for_a_reason() {
    let all = vectors();
    let known: BTreeSet<&str> = all.iter().map(id).collect();
    assert_eq!(known.len(), all.len(), "ids are different");
    let elsewhere: Vec<&str> = LEFT_OUT.iter().map(|left_out| left_out.id).chain(PROPERTIES).collect();
    for name in &elsewhere {
        assert!(known.contains(name), "{name} is in a table and not in the file");
        assert_eq!(elsewhere.iter().filter(|other| *other == name).count(), 1, "{name} is told of twice");
    }
    for left_out in LEFT_OUT {
        assert!(left_out.reason.len() > 20, "{} has no reason", left_out.id);
    }
    let of = |use_of: &str, vectors: &[Value]| vectors.iter().filter(|vector| vector["use"] == use_of).count();
    let played = replayed();
    let oracles_left_out = LEFT_OUT.iter().filter(|left_out| vector(left_out.id)["use"] == "oracle").count();
    assert_eq!(of("oracle", &played) + oracles_left_out, of("oracle", &all));
    // So that a vector cannot move from one side to the other unseen.
    assert_eq!((of("oracle", &all), of("oracle", &played)), (61, 55));
    assert_eq!((of("adapter", &all), of("adapter", &played)), (22, 8));
}

/// The algorithms that no vector is about, and the reason.
const WITHOUT_VECTORS: [(Algorithm, &str); 2] = [
    (Algorithm::Meter, "other projects count what is to be billed outside of their limiters"),
    (Algorithm::Concurrency, "vectors are sequences of instants, and no instant changes its answers"),
];

#[test]
fn algorithm_has_a_vector_or_a_reason_for_none() {
    let mut found: Vec<Algorithm> = Vec::new();
    for vector in vectors() {
        let params = vector["params"].as_object().expect("a vector has parameters");
        let algorithm = vector["algorithm"].as_str().expect("a vector has an algorithm");
        let quotas = [quota(algorithm, params, 0), block(params).transpose().unwrap_or_else(|| Err("none".into()))];
        found.extend(quotas.into_iter().flatten().map(|quota| quota.algorithm()));
    }
    for algorithm in Algorithm::ALL {
        let has_reason = WITHOUT_VECTORS.iter().any(|(without, _)| without == algorithm);
        assert!(
            found.contains(algorithm) != has_reason,
            "add a vector or a reason to `WITHOUT_VECTORS`, and not both: {algorithm}"
        );
    }
}

#[test]
fn left_out_vector_differs_exactly_where_stated() {
    for left_out in LEFT_OUT {
        let outcome = replay(&vector(left_out.id));
        match (&left_out.why, outcome) {
            (Why::Differs { step, field }, Err(Failure { step: at, field: Some(found), .. })) => {
                assert_eq!((at, found.as_str()), (*step, *field), "{}", left_out.id);
            }
            (Why::NotHere, Err(Failure { field: None, .. })) => {}
            (_, outcome) => panic!("{}: {outcome:?}", left_out.id),
        }
    }
}

/// The vector also states that a block is not prolonged by retries, and that it ends.
#[test]
fn block_vector_differs_only_in_a_cost_that_never_passes() {
    let mut vector = vector("fw-rlf-block");
    let told =
        vector["steps"][0]["expect"].as_object_mut().expect("a step expects something").remove("retry_after_ms_min");
    assert_eq!(told, Some(json!(1001)));
    replay(&vector).unwrap_or_else(|failure| panic!("{failure}"));
    vector["steps"][1]["expect"]["retry_after_ms_max"] = json!(798);
    let failure = replay(&vector).expect_err("it lasts for its 2 s");
    assert_eq!((failure.step, failure.field.as_deref()), (1, Some("retry_after_ms_max")));
}

/// Each expected field of each replayed vector is changed, one at a time, and the replay must then
/// fail at it.
#[test]
fn replay_fails_if_any_stated_answer_is_changed() {
    let mut changed = 0;
    for vector in replayed() {
        let slack = vector["tolerance_ms"].as_u64().expect("a tolerance is stated");
        for (step, before) in vector["steps"].as_array().expect("a vector has steps").iter().enumerate() {
            for (field, value) in before["expect"].as_object().expect("a step expects something, or {}") {
                let mut other = vector.clone();
                other["steps"][step]["expect"][field] = another(field, value, slack);
                match replay(&other) {
                    Err(Failure { step: at, field: Some(found), .. }) if (at, &found) == (step, field) => changed += 1,
                    outcome => panic!("{}, step {step}, {field} was not asserted: {outcome:?}", id(&vector)),
                }
            }
        }
    }
    assert!(changed > 400, "{changed}");
}

/// A value of the same field that cannot be right if `value` is, with twice the slack of the vector
/// between them.
fn another(field: &str, value: &Value, slack: u64) -> Value {
    match value {
        Value::Bool(value) => json!(!value),
        Value::String(_) => json!(1),
        Value::Array(_) => json!([]),
        Value::Object(_) => json!({ "limit1": 77 }),
        Value::Number(status) if field == "http_status" => json!(if *status == 200.into() { 429 } else { 200 }),
        Value::Number(_) if field.ends_with("_min") => json!(1_000_000_000_000_u64),
        Value::Number(_) if field.ends_with("_max") => json!(-1),
        value => json!(value.as_i64().expect("a whole number") + 2 * i64::try_from(slack).expect("a short time") + 1),
    }
}
