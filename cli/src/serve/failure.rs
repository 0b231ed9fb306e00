//! Why the server cannot begin, and texts of errors.

use tower_ratelimit::rules::RulesError;

/// Why the server cannot begin.
pub(crate) enum Failure {
    /// A file has problems.
    Rules(Box<str>, RulesError),
    /// A setting is wrong, or a store refuses.
    Setup(String),
}

impl Failure {
    pub(crate) fn setup(error: impl std::fmt::Display) -> Self {
        Self::Setup(format!("error: {error}"))
    }
}

/// Makes the failure of an error with its causes.
#[allow(clippy::needless_pass_by_value, reason = "it is an argument of map_err")]
pub(crate) fn with_causes(error: impl std::error::Error) -> Failure {
    Failure::setup(text_with_causes(&error))
}

/// Returns the text of an error with its causes.
pub(crate) fn text_with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}
