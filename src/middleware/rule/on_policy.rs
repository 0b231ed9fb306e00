//! The builder methods of rules, on policies.

use http::{request, response};

use super::definition::{IntoRule, MissingKey, Rule};
use super::settlement::OnAborted;
use crate::mode::ModeSwitch;
use crate::policy::Policy;
use crate::quota::PolicyError;

/// Declares methods that make a rule of the policy and call the rule's method of the same name.
macro_rules! of_rules {
    ($($(#[$about:meta])* fn $method:ident($($argument:ident: $type:ty)?) -> $made:ty;)+) => {
        impl Policy {
            $($(#[$about])*
            pub fn $method(self, $($argument: $type)?) -> $made {
                self.into_rule().$method($($argument)?)
            })+
        }
    };
}
of_rules! {
    /// Returns a rule that applies this policy only to requests for which `predicate` holds; see
    /// [`Rule::when`].
    fn when(predicate: impl Fn(&request::Parts) -> bool + Send + Sync + 'static) -> Rule;

    /// Returns a rule in which `cost` returns the cost of a request; see [`Rule::cost`].
    fn cost(cost: impl Fn(&request::Parts) -> u64 + Send + Sync + 'static) -> Rule;

    /// Returns a rule whose quota has this unit; see [`Rule::unit`].
    ///
    /// # Errors
    /// Returns the errors of [`Rule::unit`].
    fn unit(unit: impl AsRef<str>) -> Result<Rule, PolicyError>;

    /// Returns a rule in this mode; see [`Rule::mode`].
    fn mode(mode: impl Into<ModeSwitch>) -> Rule;

    /// Returns a rule that warns when little remains; see [`Rule::warn_at_percent`].
    fn warn_at_percent(percent: u8) -> Rule;

    /// Returns a rule that sets what happens to requests without a key; see [`Rule::missing_key`].
    fn missing_key(missing_key: MissingKey) -> Rule;

    /// Returns a rule that keeps the charge only for some responses; see [`Rule::charge_when`].
    fn charge_when(predicate: impl Fn(&response::Parts) -> bool + Send + Sync + 'static) -> Rule;

    /// Returns a rule that refunds the charge for some responses; see [`Rule::refund_when`].
    fn refund_when(predicate: impl Fn(&response::Parts) -> bool + Send + Sync + 'static) -> Rule;

    /// Returns a rule that is settled by what handlers report; see [`Rule::settle_by_usage`].
    fn settle_by_usage() -> Rule;

    /// Returns a rule that is settled by the response's head; see [`Rule::settle_by_response`].
    fn settle_by_response(actual: impl Fn(&response::Parts) -> Option<u64> + Send + Sync + 'static) -> Rule;

    /// Returns a rule that is settled by the bytes of the response's body; see
    /// [`Rule::settle_by_body`].
    fn settle_by_body() -> Rule;

    /// Returns a rule that sets the cost of aborted requests; see [`Rule::on_aborted`].
    fn on_aborted(on_aborted: OnAborted) -> Rule;

    /// Returns a rule that closes a key which it refuses too often; see [`Rule::block`].
    ///
    /// # Errors
    /// Returns the errors of [`Rule::block`].
    fn block(block: Policy) -> Result<Rule, PolicyError>;

    /// Returns a rule that meters requests beyond its quota; see [`Rule::overage`].
    ///
    /// # Errors
    /// Returns the errors of [`Rule::overage`].
    fn overage(meter: Policy) -> Result<Rule, PolicyError>;
}
