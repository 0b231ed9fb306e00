//! A layer as the page sees it, whatever its limiter.

use std::future::Future;
use std::pin::Pin;

use http::request::Parts;

use crate::explanation::Explanation;
use crate::limiter::{Limiter, Occupancy};
use crate::middleware::layer::RateLimitLayer;
use crate::mode::Mode;
use crate::policy::Policy;
use crate::setup_warning::SetupWarning;

/// A layer whose limiter's type is erased.
pub(super) trait Source: Send + Sync {
    /// The policies of each rule, with those that go with them, and the rule's mode.
    fn rules(&self) -> Vec<(Vec<Policy>, Mode)>;
    fn warning(&self) -> Option<SetupWarning>;
    fn occupancy(&self) -> Option<Occupancy>;
    fn explain<'a>(&'a self, request: &'a Parts) -> Pin<Box<dyn Future<Output = Explanation> + Send + 'a>>;
}

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

    fn explain<'a>(&'a self, request: &'a Parts) -> Pin<Box<dyn Future<Output = Explanation> + Send + 'a>> {
        Box::pin(Self::explain(self, request))
    }
}
