//! The error of a setting, and macros for the crate's other errors and for enums whose variants have
//! labels.
//!
//! The cause of an error is its source. The text of an error does not repeat the text of its source.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

/// Any error, boxed as in Tower's services and bodies.
pub(crate) type BoxError = Box<dyn Error + Send + Sync>;

/// The cause of an error. Two causes are equal if their texts are equal.
#[derive(Clone, Debug)]
pub(crate) struct Source(Arc<dyn Error + Send + Sync>);

impl Source {
    pub(crate) fn new(error: impl Error + Send + Sync + 'static) -> Self {
        Self(Arc::new(error))
    }

    #[cfg(feature = "fleet")]
    pub(crate) fn of_box(error: BoxError) -> Self {
        Self(error.into())
    }

    pub(crate) fn get(&self) -> &(dyn Error + 'static) {
        &*self.0
    }
}

impl PartialEq for Source {
    fn eq(&self, other: &Self) -> bool {
        self.0.to_string() == other.0.to_string()
    }
}

impl Eq for Source {}

/// Prints an error and its sources, separated by colons: `what: why`.
pub(crate) struct WithSources<'a>(pub(crate) &'a dyn Error);

impl fmt::Display for WithSources<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut said = self.0.to_string();
        f.write_str(&said)?;
        let mut next = self.0.source();
        while let Some(source) = next {
            let text = source.to_string();
            // Some errors of other crates end with the text of their source.
            if !said.ends_with(&text) {
                write!(f, ": {text}")?;
                said = text;
            }
            next = source.source();
        }
        Ok(())
    }
}

/// Implements `Debug` for an error that has a kind, such as `ConfigError(Syntax): the text: why`. A program prints
/// this text if `main` returns the error, or if `unwrap` panics.
macro_rules! debug_as_text {
    ($error:ident) => {
        /// Prints the kind, the text, and the texts of the sources.
        impl std::fmt::Debug for $error {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let text = $crate::error::WithSources(self);
                write!(f, concat!(stringify!($error), "({:?}): {}"), self.kind(), text)
            }
        }
    };
}
pub(crate) use debug_as_text;

/// Returns whether a character changes the direction of the text after it, so that a reader sees other text
/// than a program reads.
pub(crate) fn turns_text(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Replaces a character that could move a terminal's cursor or change the direction of text, because terminals show
/// errors.
pub(crate) fn printable(c: char) -> char {
    if c.is_control() || turns_text(c) { '\u{fffd}' } else { c }
}

/// Declares an error that has a kind, a message and, if something caused it, a source.
macro_rules! kind_and_message {
    ($(#[$about:meta])* $error:ident, $kind:ident) => {
        $crate::error::kind_and_message! { $(#[$about])* $error, $kind, pub(crate) }
    };
    // `$made` is the visibility of `new`.
    ($(#[$about:meta])* $error:ident, $kind:ident, $made:vis) => {
        $(#[$about])*
        #[derive(Clone, PartialEq, Eq)]
        pub struct $error {
            kind: $kind,
            message: Box<str>,
            source: Option<$crate::error::Source>,
        }

        impl $error {
            /// Makes an error of this kind. The message says what is wrong and how to fix it.
            #[must_use]
            $made fn new(kind: $kind, message: impl Into<String>) -> Self {
                Self { kind, message: message.into().into(), source: None }
            }

            #[allow(dead_code, reason = "not every error has a source")]
            pub(crate) fn caused_by(self, source: impl std::error::Error + Send + Sync + 'static) -> Self {
                Self { source: Some($crate::error::Source::new(source)), ..self }
            }

            /// Returns the kind of the error.
            #[must_use]
            pub fn kind(&self) -> $kind {
                self.kind
            }
        }

        $crate::error::debug_as_text!($error);

        impl std::fmt::Display for $error {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(&self.message)
            }
        }

        impl std::error::Error for $error {
            fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
                self.source.as_ref().map($crate::error::Source::get)
            }
        }
    };
}
pub(crate) use kind_and_message;

kind_and_message! {
    /// The error of a setting that cannot be used: a quota, a rule, a header's name, a network, a size. The error's
    /// text says what is wrong, where, and how to fix it; [`kind`](Self::kind) distinguishes the cases.
    ///
    /// ```
    /// use tower_ratelimit::{ConfigError, ConfigErrorKind, Quota, Rule};
    ///
    /// fn search(burst: u64) -> Result<Rule, ConfigError> {
    ///     Rule::new("search", Quota::per_minute(100).burst(burst)?)
    /// }
    /// assert_eq!(search(20)?.policies()[0].quota().capacity(), 20);
    ///
    /// let error = search(0).unwrap_err();
    /// assert_eq!(error.kind(), ConfigErrorKind::Range);
    /// assert!(error.to_string().contains("1 for strict spacing"));
    /// # Ok::<(), ConfigError>(())
    /// ```
    ConfigError, ConfigErrorKind
}

/// The kind of a [`ConfigError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ConfigErrorKind {
    /// The parts do not fit together: two quotas of a rule count in the same way, or a quota cannot replace
    /// another quota.
    Combination,
    /// A table of [`Overrides`](crate::middleware::Overrides) is full, and none of its entries has
    /// ended.
    Full,
    /// A part is missing: a rule has no quota, an override has no key, or a list has no network.
    Missing,
    /// A name of a rule, a unit or a header cannot be used.
    Name,
    /// The option has no meaning for this algorithm, or for a client's own quota.
    NotAnOption,
    /// A number of units, proxies or keys, or the length of a prefix, is out of its range. This kind also
    /// reports a period that is zero, longer than 366 days, or not a whole number of microseconds.
    Range,
    /// The bytes are not a snapshot, are damaged, or come from another version of this crate.
    Snapshot,
    /// The text is not a valid quota, network, time zone, or label.
    Syntax,
    /// The limiter does not [support](crate::limiter::Limiter::supports) the quota.
    Unsupported,
}

impl ConfigError {
    /// Makes the error for a text that is not a label of an enum, such as [`Mode`](crate::Mode).
    pub(crate) fn no_label(text: &str, labels: &[&str]) -> Self {
        let text: String = text.chars().take(40).map(printable).collect();
        Self::new(ConfigErrorKind::Syntax, format!("`{text}` is none of `{}`", labels.join("`, `")))
    }
}

/// Declares an enum whose variants have labels, and the method that returns them. `Display` prints them.
macro_rules! labelled {
    (
        $(#[$about:meta])* $enum:ident, $(#[$about_label:meta])* as_str
        { $($(#[$about_variant:meta])* $variant:ident = $label:literal,)+ }
    ) => {
        $(#[$about])*
        #[doc = ""]
        #[doc = "With the feature `serde`, this type is read and written as its [label](Self::as_str)."]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum $enum {
            $(
                $(#[$about_variant])*
                #[doc = ""]
                #[doc = concat!("Its label is `", $label, "`.")]
                $variant,
            )+
        }

        impl $enum {
            /// All variants, in the order of their declaration.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// The variants with their labels, for texts that name them.
            pub(crate) const WORDS: &'static [(&'static str, Self)] = &[$(($label, Self::$variant),)+];

            pub(crate) const LABELS: &'static [&'static str] = &[$($label,)+];

            $(#[$about_label])*
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $label,)+
                }
            }
        }

        /// Reads the label.
        impl std::str::FromStr for $enum {
            type Err = $crate::error::ConfigError;

            fn from_str(label: &str) -> Result<Self, Self::Err> {
                let found = Self::WORDS.iter().find(|(word, _)| *word == label);
                found.map(|(_, value)| *value).ok_or_else(|| Self::Err::no_label(label, Self::LABELS))
            }
        }

        /// Prints the label.
        impl std::fmt::Display for $enum {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.as_str())
            }
        }

        #[cfg(feature = "serde")]
        $crate::base::serde::by_label!($enum);
    };
}
pub(crate) use labelled;

#[cfg(test)]
#[allow(unreachable_pub, reason = "the macro declares public errors")]
mod tests {
    use super::*;

    kind_and_message! {
        /// An error.
        Failure, FailureKind
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum FailureKind {
        Only,
    }

    #[test]
    fn label_is_read_as_the_variant_that_prints_it() {
        for mode in crate::Mode::ALL {
            assert_eq!(mode.to_string().parse(), Ok(*mode));
        }
        for kind in crate::setup_warning::SetupWarningKind::ALL {
            assert_eq!(kind.as_str().parse(), Ok(*kind));
        }
        let long = "a".repeat(1_000) + "\u{1b}[2J";
        let error = long.parse::<crate::OnError>().expect_err("it is no label");
        assert_eq!(error.to_string(), format!("`{}` is none of `deny`, `allow`, `allow-always`", "a".repeat(40)));
    }

    #[test]
    fn error_with_a_source_prints_its_own_level() {
        let error = |why: &str| Failure::new(FailureKind::Only, "no answer").caused_by(std::io::Error::other(why));
        assert_eq!(error("the cable").to_string(), "no answer");
        assert_eq!(WithSources(&error("the cable")).to_string(), "no answer: the cable");
        assert_eq!(format!("{:?}", error("the cable")), "Failure(Only): no answer: the cable");
        let twice =
            Failure::new(FailureKind::Only, "no answer: the cable").caused_by(std::io::Error::other("the cable"));
        assert_eq!(WithSources(&twice).to_string(), "no answer: the cable");
        assert_eq!(error("the cable"), error("the cable"));
        assert_ne!(error("the cable"), error("the plug"));
        assert_ne!(error("the cable"), Failure::new(error("").kind(), "no answer"));
    }
}
