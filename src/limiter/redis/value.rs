//! What a script answers, whoever brought it.

use std::borrow::Cow;

use bytes::Bytes;

/// A reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Value {
    Nil,
    Integer(i64),
    /// A string. A script tells of the failure of one check among several by one.
    Bytes(Bytes),
    Array(Vec<Self>),
}

/// A script to be run, once or for many checks, on keys of one slot.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) script: &'static Script,
    pub(super) keys: Vec<Bytes>,
    pub(super) args: Vec<Bytes>,
}

/// A script's text, and the name that Redis gives it.
#[derive(Debug)]
pub(super) struct Script {
    pub(super) text: Cow<'static, str>,
    /// The SHA-1 of the text in hexadecimal digits.
    pub(super) sha: Box<str>,
}

impl Script {
    pub(super) fn new(text: impl Into<Cow<'static, str>>) -> Self {
        let text = text.into();
        let sha = sha1_smol::Sha1::from(text.as_bytes()).digest().to_string().into_boxed_str();
        Self { text, sha }
    }
}
