//! The shape of the crate's errors.

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
