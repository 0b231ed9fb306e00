//! The shape of the crate's errors, and of enums whose variants have labels.

/// Declares an error that has a kind and a message.
macro_rules! kind_and_message {
    ($(#[$about:meta])* $error:ident, $kind:ident) => {
        $(#[$about])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct $error {
            kind: $kind,
            message: Box<str>,
        }

        impl $error {
            pub(crate) fn new(kind: $kind, message: impl Into<String>) -> Self {
                Self { kind, message: message.into().into() }
            }

            /// Returns the kind of the error.
            #[must_use]
            pub fn kind(&self) -> $kind {
                self.kind
            }
        }

        impl std::fmt::Display for $error {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(&self.message)
            }
        }

        impl std::error::Error for $error {}
    };
}
pub(crate) use kind_and_message;

/// Declares an enum whose variants have labels, and the method that returns them.
macro_rules! labelled {
    (
        $(#[$about:meta])* $enum:ident, $(#[$about_label:meta])* $label_of:ident
        { $($(#[$about_variant:meta])* $variant:ident = $label:literal,)+ }
    ) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum $enum {
            $($(#[$about_variant])* $variant,)+
        }

        impl $enum {
            #[allow(dead_code, reason = "not every enum is iterated")]
            pub(crate) const ALL: &'static [Self] = &[$(Self::$variant,)+];

            $(#[$about_label])*
            #[must_use]
            pub fn $label_of(self) -> &'static str {
                match self {
                    $(Self::$variant => $label,)+
                }
            }
        }
    };
}
pub(crate) use labelled;
