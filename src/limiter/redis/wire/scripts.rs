//! The scripts, put together from the algorithms' twins and the drivers.
//!
//! A lean one for each kind of state holds what charges of that kind need and nothing else, since each function in a script
//! costs a call some 60 ns; the full one holds everything.

use std::sync::LazyLock;

use super::form::Kind;
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

/// A charge's form: the kind, the value's layout, the head, the value's size, the mode and the numbers.
macro_rules! form {
    ($numbers:literal) => {
        concat!("'<xc9Bc0BB", $numbers, "'")
    };
}

macro_rules! lean {
    ($name:literal, $form:literal, $found:literal, [$($part:expr),*]) => {
        concat!(
            "local FORM, FOUND, LONE = ", form!($form), ", '<B", $found, "', '<dB", $found, "'\n",
            part!("clock"), $($part,)* "local decide = ", $name, "\n", part!("lean")
        )
    };
}

/// Forms and states by their kind.
macro_rules! tables {
    () => {
        concat!(
            "local FORMS = {",
            form!("dddd"),
            ",",
            form!("ddddddd"),
            ",",
            form!("dddddd"),
            ",",
            form!("ddddddd"),
            ",",
            form!("ddddddd"),
            ",",
            form!("dddddddddd"),
            ",",
            form!("dddddddddd"),
            "}\n",
            "local FOUND = {'<Bd', '<Bdd', '<Bdd', '<Bdd', '<BdI4I4'}\n",
        )
    };
}

/// The usual case first: all that the others need is made only when one of them comes.
const TRAIL: &str = concat!(
    part!("clock"),
    twin!("trail_plain"),
    "if not ARGV[3] then\n",
    "  local told = trail_plain(KEYS[1], unpack(",
    form!("dddddddddd"),
    ", ARGV[1]))\n",
    "  if told then return pack('<d', now) .. told end\n",
    "end\n",
    "local used_of_value, with_used, quota_of, refund_pair, refund_list\n",
    part!("narrow"),
    twin!("trail"),
    tables!(),
    "local DECIDE = {[6] = trail, [7] = trail}\n",
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
    tables!(),
    "local DECIDE = {gcra, gcra, step_bucket, fixed_window, sliding_window, trail, trail}\n",
    part!("convert"),
    part!("refund"),
    part!("full"),
);

static SCRIPTS: LazyLock<[Script; 7]> = LazyLock::new(|| {
    [
        FULL,
        lean!("gcra", "dddd", "d", [twin!("gcra")]),
        lean!("gcra", "ddddddd", "dd", [twin!("gcra")]),
        lean!("step_bucket", "dddddd", "dd", [twin!("step_bucket")]),
        lean!("fixed_window", "ddddddd", "dd", [twin!("fixed_window")]),
        lean!("sliding_window", "ddddddd", "dI4I4", [part!("narrow"), twin!("sliding_window")]),
        TRAIL,
    ]
    .map(Script::new)
});

/// The lean script of a kind.
pub(super) fn lean(kind: Kind) -> &'static Script {
    let [full, whole, parts, step_bucket, fixed_window, two_counters, trail] = &*SCRIPTS;
    match kind {
        Kind::Whole => whole,
        Kind::Parts => parts,
        Kind::StepBucket => step_bucket,
        Kind::FixedWindow => fixed_window,
        Kind::TwoCounters => two_counters,
        Kind::Narrow | Kind::Wide => trail,
        Kind::Block | Kind::Meter => full,
    }
}

/// The script for everything.
pub(super) fn full() -> &'static Script {
    let [full, ..] = &*SCRIPTS;
    full
}
