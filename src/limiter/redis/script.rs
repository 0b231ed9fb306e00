//! Scripts, and calls of them.

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
}

impl Script {
    pub(super) fn new(text: &'static str) -> Self {
        let sha = sha1_smol::Sha1::from(text.as_bytes()).digest().to_string().into_boxed_str();
        Self { text, sha }
    }
}
