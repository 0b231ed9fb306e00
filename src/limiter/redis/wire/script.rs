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

/// The text of the script for all requests. Redis creates each function of a script again with each call. So the
/// functions that a usual charge does not need are in branches of `twin`: an algorithm's functions in the branch of
/// its kind, and the functions for refunds and for values of other quotas in the branch of kind 0. By far the most
/// frequent call is a lone charge of a bucket, a fixed window or a sliding window. The script decides such a
/// charge with the same twins, before it creates any of these functions.
const TEXT: &str = concat!(
    part!("clock"),
    "do\n",
    part!("lone"),
    "if lone then\nlocal decide\nif lone <= 2 then\n",
    twin!("gcra"),
    "decide = gcra\nelseif lone == 4 or lone == 11 then\n",
    twin!("fixed_window"),
    "decide = fixed_window\nelse\n",
    part!("muldiv"),
    twin!("sliding_window"),
    "decide = sliding_window\nend\n",
    part!("lone_take"),
    "end\nend\n",
    "local function twin(kind)\n",
    "if kind == 0 then\n",
    "return function(try, pack, unpack, now, longer, twin, key, f, found, at, n, m, other)\n",
    "if not found then\n",
    part!("wide"),
    part!("look"),
    "end\n",
    part!("refund"),
    "end\n",
    "elseif kind <= 2 then\n",
    twin!("gcra"),
    "return gcra\n",
    "elseif kind == 3 then\n",
    twin!("step_bucket"),
    "return step_bucket, step_level, step_store\n",
    "elseif kind == 4 or kind == 11 then\n",
    twin!("fixed_window"),
    "return fixed_window\n",
    "elseif kind == 8 then\n",
    twin!("block"),
    "return block, block_view, block_stored, block_struck, block_adopt\n",
    "elseif kind == 9 then\n",
    twin!("meter"),
    "return meter\n",
    "elseif kind == 10 then\n",
    twin!("places"),
    "return places, places_write\n",
    "elseif kind == 12 then\n",
    twin!("places_reset"),
    "return places_reset\n",
    "end\n",
    part!("muldiv"),
    "if kind == 5 then\n",
    twin!("sliding_window"),
    "return sliding_window\n",
    "elseif kind == 6 or kind == 7 then\n",
    twin!("entry_log"),
    "return entry_log, log_write, log_entry, muldiv\n",
    "end\n",
    "error('script.rs has no twin for states of kind ' .. kind)\n",
    "end\n",
    part!("charge"),
    part!("driver"),
);

/// No server knows a script of this name. So running such a script takes both `EVALSHA` and `EVAL`, which
/// shows that the user may use both commands.
const UNKNOWN: &str = "0000000000000000000000000000000000000000";

/// The script for all requests.
pub(super) fn requests() -> &'static Script {
    static SCRIPT: LazyLock<Script> = LazyLock::new(|| Script::new(TEXT));
    &SCRIPT
}

/// Returns the script that finds out which rights are missing.
pub(super) fn rights() -> &'static Script {
    static SCRIPT: LazyLock<Script> =
        LazyLock::new(|| Script { text: include_str!("rights.lua"), sha: UNKNOWN.into(), bit: 0 });
    &SCRIPT
}
