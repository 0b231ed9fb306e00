//! A layer with any limiter, as the page sees it.

use std::time::Duration;

use http::request::Parts;

use crate::base::sync::{Mutex, lock};
use crate::base::time::Timestamp;
use crate::decision::ChargeDecision;
use crate::error::WithSources;
use crate::explanation::Explanation;
use crate::key::Key;
use crate::limiter::{BoxFuture, Charge, Limiter, Occupancy};
use crate::middleware::layer::{RateLimitLayer, reset_under};
use crate::mode::Mode;
use crate::policy::Policy;
use crate::setup_warning::SetupWarning;

/// A layer whose limiter's type is erased.
pub(super) trait ErasedLayer: Send + Sync {
    /// Returns for each rule its policies, including the linked policy, and its mode.
    fn rules(&self) -> Vec<(Vec<Policy>, Mode)>;
    fn warning(&self) -> Option<SetupWarning>;
    /// Returns how full the limiter is. The number for a large limiter is up to one second old.
    fn occupancy(&self, now: Timestamp) -> Option<Occupancy>;
    fn explain<'a>(&'a self, request: &'a Parts) -> BoxFuture<'a, Explanation>;
    /// Asks the limiter how it would decide a charge of this cost. The error is a text that includes its causes.
    fn peek<'a>(&'a self, policy: &'a Policy, key: &'a Key, cost: u64)
    -> BoxFuture<'a, Result<ChargeDecision, String>>;
    /// Forgets the state of a key under a policy.
    fn reset<'a>(&'a self, policy: &'a Policy, key: &'a Key) -> BoxFuture<'a, Result<(), String>>;
}

/// A layer, and how full its limiter was.
pub(super) struct LayerSource<L, O> {
    layer: RateLimitLayer<L, O>,
    counted: Mutex<Option<(Timestamp, Occupancy)>>,
}

/// The maximum capacity of a limiter whose keys are counted for each page. Counting a larger limiter takes
/// milliseconds.
const SMALL: usize = 100_000;

/// The time for which the last count of a large limiter is shown.
const COUNT_LASTS: Duration = Duration::from_secs(1);

impl<L: Limiter, O> LayerSource<L, O> {
    pub(super) fn new(layer: RateLimitLayer<L, O>) -> Self {
        Self { layer, counted: Mutex::default() }
    }

    fn limiter(&self) -> &L {
        self.layer.limiter()
    }
}

impl<L: Limiter, O: Send + Sync> ErasedLayer for LayerSource<L, O> {
    fn rules(&self) -> Vec<(Vec<Policy>, Mode)> {
        self.layer.rules_in_force()
    }

    fn warning(&self) -> Option<SetupWarning> {
        self.layer.check().err()
    }

    fn occupancy(&self, now: Timestamp) -> Option<Occupancy> {
        let is_recent = |(at, _): &(Timestamp, Occupancy)| *at <= now && now < at.saturating_add(COUNT_LASTS);
        if let Some((_, occupancy)) = lock(&self.counted).filter(is_recent) {
            return Some(occupancy);
        }
        let occupancy = self.limiter().hooks().occupancy()?;
        *lock(&self.counted) = (occupancy.capacity() > SMALL).then_some((now, occupancy));
        Some(occupancy)
    }

    fn explain<'a>(&'a self, request: &'a Parts) -> BoxFuture<'a, Explanation> {
        Box::pin(self.layer.explain(request))
    }

    fn peek<'a>(
        &'a self,
        policy: &'a Policy,
        key: &'a Key,
        cost: u64,
    ) -> BoxFuture<'a, Result<ChargeDecision, String>> {
        Box::pin(async move {
            let decision = self.limiter().peek(&[Charge::new(policy, key).cost(cost)]).await;
            let decision = decision.map_err(|error| WithSources(&error).to_string())?;
            decision.charges().first().cloned().ok_or_else(|| "the limiter's answer has no charge".to_owned())
        })
    }

    fn reset<'a>(&'a self, policy: &'a Policy, key: &'a Key) -> BoxFuture<'a, Result<(), String>> {
        Box::pin(async move {
            reset_under(self.limiter(), policy, key).await.map_err(|error| WithSources(&error).to_string())
        })
    }
}
