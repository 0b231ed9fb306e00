//! Settings in configuration files, in the words that files of rules use (feature `serde`).

use std::fmt;

use serde_core::de::{Deserializer, Error, Visitor};

/// Implements serde's traits for an enum of [`labelled!`](crate::error::labelled): each variant is written
/// as its label.
macro_rules! by_label {
    ($enum:ident) => {
        impl serde_core::Serialize for $enum {
            fn serialize<S: serde_core::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }

        impl<'de> serde_core::Deserialize<'de> for $enum {
            fn deserialize<D: serde_core::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                $crate::base::serde::labelled(deserializer, Self::WORDS, Self::LABELS)
            }
        }
    };
}
pub(crate) use by_label;

/// Reads one of these words. Errors name them all.
pub(crate) fn labelled<'de, D: Deserializer<'de>, T: Copy>(
    deserializer: D,
    words: &'static [(&'static str, T)],
    labels: &'static [&'static str],
) -> Result<T, D::Error> {
    deserializer.deserialize_str(Labelled { words, labels })
}

struct Labelled<T: 'static> {
    words: &'static [(&'static str, T)],
    labels: &'static [&'static str],
}

impl<T: Copy> Visitor<'_> for Labelled<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("one of ")?;
        for (at, label) in self.labels.iter().enumerate() {
            write!(f, "{}`{label}`", if at > 0 { ", " } else { "" })?;
        }
        Ok(())
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        let found = self.words.iter().find(|(word, _)| *word == text);
        found.map(|(_, value)| *value).ok_or_else(|| E::unknown_variant(text, self.labels))
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;

    use serde_core::Serialize;
    use serde_core::de::DeserializeOwned;

    use crate::limiter::memory::OnFull;
    use crate::{MissingKey, Mode, OnError};

    fn has_words<T: Serialize + DeserializeOwned + PartialEq + Debug>(words: &[(&str, T)], allowed: &str) {
        for (word, value) in words {
            let text = format!("\"{word}\"");
            assert_eq!(serde_json::to_string(value).unwrap(), text);
            assert_eq!(serde_json::from_str::<T>(&text).unwrap(), *value);
        }
        let error = |text: &str| serde_json::from_str::<T>(text).unwrap_err().to_string();
        assert_eq!(error("\"off\""), format!("unknown variant `off`, expected {allowed} at line 1 column 5"));
        for other in ["true", "1", "null", "[]", "{}"] {
            let error = error(other);
            assert!(words.iter().all(|(word, _)| error.contains(&format!("`{word}`"))), "{error}");
        }
    }

    #[test]
    fn settings_are_the_words_of_files_of_rules() {
        has_words(
            &[("enforce", Mode::Enforce), ("degrade", Mode::Degrade), ("shadow", Mode::Shadow)],
            "one of `enforce`, `degrade`, `shadow`",
        );
        has_words(
            &[("reject", MissingKey::Reject), ("shared", MissingKey::Shared), ("exempt", MissingKey::Exempt)],
            "one of `reject`, `shared`, `exempt`",
        );
        has_words(
            &[("deny", OnError::Deny), ("allow", OnError::Allow), ("allow-always", OnError::AllowAlways)],
            "one of `deny`, `allow`, `allow-always`",
        );
        has_words(&[("evict", OnFull::Evict), ("deny", OnFull::Deny)], "`evict` or `deny`");
    }

    #[test]
    fn enums_with_labels_are_read_and_written_as_them() {
        fn all<T: Serialize + DeserializeOwned + PartialEq + Debug>(words: &[(&str, T)]) {
            for (word, value) in words {
                assert_eq!(serde_json::to_value(value).unwrap(), *word);
                assert_eq!(serde_json::from_value::<T>((*word).into()).unwrap(), *value);
            }
        }
        all(crate::middleware::Access::WORDS);
        all(crate::outcome::OutcomeKind::WORDS);
        all(crate::setup_warning::SetupWarningKind::WORDS);
        all(crate::quota::Algorithm::WORDS);
    }
}
