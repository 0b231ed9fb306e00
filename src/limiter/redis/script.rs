//! Scripts, and calls of them.

use std::sync::atomic::{AtomicU32, Ordering};

use bytes::Bytes;

/// A call of a script, on keys of one slot.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) script: &'static Script,
    pub(super) keys: Vec<Bytes>,
    pub(super) args: Vec<Bytes>,
}

/// A script's text, and the name that Redis gives it.
#[derive(Debug)]
pub(super) struct Script {
    pub(super) text: &'static str,
    /// The name: the SHA-1 of the text, in hexadecimal digits.
    pub(super) sha: Box<str>,
    /// The script's bit in a set of scripts, or 0 if servers never know the script.
    pub(super) bit: u64,
}

impl Script {
    /// Makes the script of a static item. The first 64 scripts of the process get a bit.
    pub(super) fn new(text: &'static str) -> Self {
        static SCRIPTS: AtomicU32 = AtomicU32::new(0);
        let bit = 1_u64.checked_shl(SCRIPTS.fetch_add(1, Ordering::Relaxed)).unwrap_or(0);
        let sha = sha1_smol::Sha1::from(text.as_bytes()).digest().to_string().into_boxed_str();
        Self { text, sha, bit }
    }
}
