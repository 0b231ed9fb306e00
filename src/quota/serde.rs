//! Quotas as text in configuration files.

use std::fmt;

use serde_core::de::{self, Deserialize, Deserializer, Visitor};
use serde_core::ser::{Serialize, Serializer};

use super::builder::Quota;

/// Serializes a quota as its text: `"100 per minute, burst 20, token bucket"`.
impl Serialize for Quota {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Deserializes a quota from its text, as [`FromStr`](std::str::FromStr) reads it.
impl<'de> Deserialize<'de> for Quota {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(QuotaVisitor)
    }
}

struct QuotaVisitor;

impl Visitor<'_> for QuotaVisitor {
    type Value = Quota;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a quota in words, such as \"100 per minute, burst 20\"")
    }

    fn visit_str<E: de::Error>(self, words: &str) -> Result<Quota, E> {
        words.parse().map_err(E::custom)
    }
}
