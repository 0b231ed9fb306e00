//! The script for all requests, put together from the algorithms' Lua twins and the parts in this
//! folder.

use std::sync::LazyLock;

use crate::limiter::redis::script::Script;

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

/// The usual case stands first. Redis makes each function anew with each call, so what only other
/// cases need stands in one function that is called by those alone.
const TEXT: &str = concat!(
    part!("clock"),
    twin!("gcra"),
    twin!("step_bucket"),
    twin!("fixed_window"),
    "local function muldiv(a, b, c) return math.floor(a * b / c) end -- for products below 2^53\n",
    twin!("sliding_window"),
    twin!("entry_log_plain"),
    part!("usual"),
    "local function make_general(try, pack, unpack, now, longer, program, FORM)\n",
    part!("wide"),
    twin!("gcra"),
    twin!("step_bucket"),
    twin!("fixed_window"),
    twin!("sliding_window"),
    twin!("entry_log"),
    twin!("block"),
    twin!("meter"),
    part!("convert"),
    part!("refund"),
    part!("general"),
    "end\n",
    part!("driver"),
);

/// No server knows a script by this name. So both commands are used to run it, which shows that the
/// user may use both.
const UNKNOWN: &str = "0000000000000000000000000000000000000000";

/// The script for all requests.
pub(super) fn requests() -> &'static Script {
    static SCRIPT: LazyLock<Script> = LazyLock::new(|| Script::new(TEXT));
    &SCRIPT
}

/// The script that returns which rights are missing.
pub(super) fn rights() -> &'static Script {
    static SCRIPT: LazyLock<Script> =
        LazyLock::new(|| Script { text: include_str!("rights.lua"), sha: UNKNOWN.into() });
    &SCRIPT
}
