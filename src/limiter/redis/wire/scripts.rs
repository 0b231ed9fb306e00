//! The scripts, put together from the algorithms' twins and the drivers.
//!
//! A lean one for each shape of request holds what such need and nothing else, since each function in a script costs a call
//! some 60 ns; the full one holds everything.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{LazyLock, OnceLock, PoisonError, RwLock};

use super::ask::Lean;
use super::shape::Shape;
use crate::limiter::redis::value::Script;

macro_rules! twin {
    ($name:literal) => {
        concat!(include_str!(concat!("../../../algorithm/", $name, ".lua")), "\n")
    };
}

macro_rules! part {
    ($name:literal) => {
        concat!(include_str!(concat!($name, ".lua")), "\n")
    };
}

/// The form of a key with one charge: the kind, the value's layout, the head, the value's size, the mode and the numbers.
macro_rules! form {
    ($numbers:literal) => {
        concat!("'<xI2c0I2c0I2B", $numbers, "'")
    };
}

/// What is told of a state that was found, by its kind.
macro_rules! found {
    () => {
        "local FOUND = {'<Bd', '<Bdd', '<Bdd', '<Bdd', '<BdI4I4', [9] = '<Bddd', [10] = '<Bdd'}\n"
    };
}

/// The usual case first: all that the others need is made only when one of them comes.
const TRAIL: &str = concat!(
    part!("clock"),
    twin!("trail_plain"),
    "if alone then\n",
    "  local told = trail_plain(try, pack, unpack, now, longer, alone, KEYS[1], unpack(",
    form!("dddddddddd"),
    ", ARGV[1]))\n",
    "  if told then return told end\n",
    "end\n",
    "local taken_over, quota_of, refund_pair, refund_list, block_view\n",
    part!("narrow"),
    twin!("trail"),
    found!(),
    "local DECIDE = {[6] = trail, [7] = trail}\n",
    part!("states"),
    part!("full"),
);

const FULL: &str = concat!(
    part!("clock"),
    part!("wide"),
    twin!("gcra"),
    twin!("step_bucket"),
    twin!("fixed_window"),
    twin!("sliding_window"),
    twin!("trail_plain"),
    twin!("trail"),
    twin!("block"),
    twin!("meter"),
    found!(),
    "local DECIDE = {gcra, gcra, step_bucket, fixed_window, sliding_window, trail, trail, false, block, meter}\n",
    part!("convert"),
    part!("refund"),
    part!("states"),
    part!("packed"),
    part!("full"),
);

/// No server knows a script by this name, so that it is asked for by both commands, and shows that the user may run both.
const UNKNOWN: &str = "0000000000000000000000000000000000000000";

static RIGHTS_SCRIPT: LazyLock<Script> =
    LazyLock::new(|| Script { text: Cow::Borrowed(include_str!("rights.lua")), sha: UNKNOWN.into() });
static FULL_SCRIPT: LazyLock<Script> = LazyLock::new(|| Script::new(FULL));
static TRAIL_SCRIPT: LazyLock<Script> = LazyLock::new(|| Script::new(TRAIL));

/// Of each kind that of a lone charge.
static LONE: [OnceLock<Script>; 5] = [const { OnceLock::new() }; 5];

/// Of other shapes; they stay, and so may only be so many. A layer has one, or one for each choice of its rules' conditions.
static SHAPED: LazyLock<RwLock<HashMap<Shape, &'static Script>>> = LazyLock::new(RwLock::default);
const SHAPES_MAX: usize = 256;

/// The script for everything.
pub(super) fn full() -> &'static Script {
    &FULL_SCRIPT
}

/// The script that says which rights are missing.
pub(super) fn rights() -> &'static Script {
    &RIGHTS_SCRIPT
}

/// The lean script for requests like this; the one for everything, if there are too many already.
pub(super) fn lean(lean: &Lean) -> &'static Script {
    match lean {
        Lean::Trail => &TRAIL_SCRIPT,
        Lean::Shape(shape) => match shape.lone().and_then(|kind| LONE.get(kind as usize - 1)) {
            Some(script) => script.get_or_init(|| Script::new(written(shape))),
            None => shaped(shape),
        },
    }
}

fn shaped(shape: &Shape) -> &'static Script {
    if let Some(script) = SHAPED.read().unwrap_or_else(PoisonError::into_inner).get(shape) {
        return script;
    }
    let mut scripts = SHAPED.write().unwrap_or_else(PoisonError::into_inner);
    if scripts.len() >= SHAPES_MAX {
        return scripts.get(shape).copied().unwrap_or_else(full);
    }
    scripts.entry(shape.clone()).or_insert_with(|| Box::leak(Box::new(Script::new(written(shape)))))
}

/// The lean script of a shape.
fn written(shape: &Shape) -> String {
    let mut text = part!("clock").to_owned();
    for function in shape.functions() {
        text.push_str(match function {
            "gcra" => twin!("gcra"),
            "step_bucket" => twin!("step_bucket"),
            "fixed_window" => twin!("fixed_window"),
            _ => concat!(part!("narrow"), twin!("sliding_window")),
        });
    }
    let lean = part!("lean").replace("FORM", &shape.form()).replace("BODY", &shape.body());
    text.push_str(&lean.replace("UNITS", &shape.key_count().to_string()));
    text
}
