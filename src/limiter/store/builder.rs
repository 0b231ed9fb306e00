//! The setup of a limiter over a store.

use std::fmt;
use std::sync::Arc;

use tokio::runtime::Handle;

use super::Store;
use super::backend::Swaps;
use super::calls::StoreCalls;
use super::error::StoreError;
use super::limiter::StoreLimiter;
use super::store_time::StoreTime;
use super::swapper::Swapper;
use crate::base::random;
use crate::event::StoreErrorKind;
use crate::limiter::remote::{Checks, Events, Flights, Options, shared_options};

/// Sets up a [`StoreLimiter`].
#[must_use]
pub struct StoreLimiterBuilder {
    shared: Options,
}

impl<S: Store> StoreLimiter<S> {
    /// Makes a limiter with the default setup. See [`StoreLimiterBuilder::build`].
    ///
    /// # Errors
    /// Returns an error if there is no tokio runtime.
    pub fn new(store: S) -> Result<Self, StoreError> {
        StoreLimiterBuilder::new().build(store)
    }
}

impl StoreLimiterBuilder {
    /// Begins the setup of a limiter.
    pub fn new() -> Self {
        Self { shared: Options::new() }
    }

    /// Sets the clock of the process, in a simulation.
    #[cfg(test)]
    pub(crate) fn own_clock(mut self, clock: impl crate::clock::Clock + 'static) -> Self {
        self.shared.own_clock = Arc::new(clock);
        self
    }

    /// Makes the limiter, without a call to the store.
    ///
    /// # Errors
    /// Returns an error if a setting is out of its range, or there is no tokio runtime.
    pub fn build<S: Store>(self, store: S) -> Result<StoreLimiter<S>, StoreError> {
        let misconfigured = |message: String| StoreError::new(StoreErrorKind::Misconfigured, message);
        let Options {
            prefix,
            key_secret,
            deadline,
            max_in_flight,
            max_denials,
            places_lapse_after,
            clock,
            own_clock,
            observers,
        } = {
            self.shared.check().map_err(misconfigured)?;
            self.shared
        };
        let Ok(runtime) = Handle::try_current() else {
            return Err(misconfigured("a limiter over a store must be made within a tokio runtime".to_owned()));
        };
        let before = format!("{prefix}:1:").into_boxed_str();
        let probe = format!("{before}probe:{:016x}", random::secret()).into();
        let events = Events::new(&observers);
        let calls = StoreCalls::new(
            store,
            StoreTime::new(clock, Arc::clone(&own_clock)),
            events,
            deadline,
            probe,
            runtime.clone(),
        );
        let swapper = Swapper::new(calls);
        let flights = Flights::new(swapper, (1, 1), max_in_flight, deadline, runtime);
        let swaps = Swaps::new(flights, before, key_secret);
        Ok(StoreLimiter(Checks::new(swaps, max_denials, 0, places_lapse_after, own_clock)))
    }
}

shared_options!(StoreLimiterBuilder);

impl Default for StoreLimiterBuilder {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for StoreLimiterBuilder {
    /// Leaves the secret out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreLimiterBuilder").field("shared", &self.shared).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::limiter::store::tests::lab::Lab;

    #[tokio::test]
    async fn settings_out_of_range_are_refused() {
        for (builder, word) in [
            (StoreLimiterBuilder::new().prefix(""), "prefix"),
            (StoreLimiterBuilder::new().prefix("a b"), "prefix"),
            (StoreLimiterBuilder::new().deadline(Duration::ZERO), "deadline"),
            (StoreLimiterBuilder::new().max_in_flight(0), "max_in_flight"),
            (StoreLimiterBuilder::new().max_denials(usize::MAX), "max_denials"),
        ] {
            let error = builder.build(Lab::default()).unwrap_err();
            assert!(error.kind() == StoreErrorKind::Misconfigured && error.to_string().contains(word), "{error}");
        }
    }
}
