//! A layer as the page sees it, whatever its limiter.

use std::future::Future;
use std::pin::Pin;

use http::request::Parts;

use crate::decision::ChargeDecision;
use crate::error::WithSources;
use crate::explanation::Explanation;
use crate::key::Key;
use crate::limiter::{Charge, Limiter, Occupancy};
use crate::middleware::layer::{RateLimitLayer, reset_under};
use crate::mode::Mode;
use crate::policy::Policy;
use crate::setup_warning::SetupWarning;

/// A layer whose limiter's type is erased.
pub(super) trait Source: Send + Sync {
    /// The policies of each rule, with those that go with them, and the rule's mode.
    fn rules(&self) -> Vec<(Vec<Policy>, Mode)>;
    fn warning(&self) -> Option<SetupWarning>;
    fn occupancy(&self) -> Option<Occupancy>;
    fn explain<'a>(&'a self, request: &'a Parts) -> Answer<'a, Explanation>;
    /// Asks the limiter what it would answer to a charge of this cost. Its error is a text, with its causes.
    fn peek<'a>(&'a self, policy: &'a Policy, key: &'a Key, cost: u64) -> Answer<'a, Result<ChargeDecision, String>>;
    /// Forgets the state of a key under a policy.
    fn reset<'a>(&'a self, policy: &'a Policy, key: &'a Key) -> Answer<'a, Result<(), String>>;
}

/// An answer that comes now or later.
pub(super) type Answer<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

impl<L: Limiter, O: Send + Sync> Source for RateLimitLayer<L, O> {
    fn rules(&self) -> Vec<(Vec<Policy>, Mode)> {
        self.rules_in_force()
    }

    fn warning(&self) -> Option<SetupWarning> {
        self.check().err()
    }

    fn occupancy(&self) -> Option<Occupancy> {
        self.limiter().occupancy()
    }

    fn explain<'a>(&'a self, request: &'a Parts) -> Answer<'a, Explanation> {
        Box::pin(Self::explain(self, request))
    }

    fn peek<'a>(&'a self, policy: &'a Policy, key: &'a Key, cost: u64) -> Answer<'a, Result<ChargeDecision, String>> {
        Box::pin(async move {
            let decision = self.limiter().peek(&[Charge::new(policy, key).cost(cost)]).await;
            let decision = decision.map_err(|error| WithSources(&error).to_string())?;
            decision.charges().first().cloned().ok_or_else(|| "the limiter answered for no charge".to_owned())
        })
    }

    fn reset<'a>(&'a self, policy: &'a Policy, key: &'a Key) -> Answer<'a, Result<(), String>> {
        Box::pin(async move {
            reset_under(self.limiter(), policy, key).await.map_err(|error| WithSources(&error).to_string())
        })
    }
}
