//! The state in which a request found a policy.

use crate::error::labelled;

labelled! {
    /// The state in which a request found a policy.
    PolicyState,
    /// Returns the label for metrics.
    as_str {
        /// The quota had room for the request.
        Within = "within",
        /// The quota had room for the request, and at most the percentage set by
        /// [`Rule::warn_at_percent`](crate::Rule::warn_at_percent) remains.
        Near = "near",
        /// The quota had no room for the request.
        Over = "over",
    }
}
