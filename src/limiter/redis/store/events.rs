//! The events of a store, for the observers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::address::Address;
use crate::limiter::observers::Observers;
use crate::limiter::redis::error::{RedisError, RedisErrorKind};
use crate::outcome::{LimiterEvent, Observer};
use crate::sync::contained;

/// Errors of one kind are reported again after this time.
const AGAIN: Duration = Duration::from_secs(60);

/// Reports to the observers, if there are any.
pub(super) struct Events {
    observers: Observers,
    /// The servers that are down, with their errors: an observer that comes later learns of them. It is held while these
    /// events are reported, so that each observer gets them in their order.
    down: Mutex<BTreeMap<String, String>>,
    /// When an error of each kind was last reported.
    reported: [Mutex<Option<Instant>>; 5],
}

impl Events {
    pub(super) fn new(observer: Option<Arc<dyn Observer>>) -> Self {
        Self { observers: Observers::from(observer), down: Mutex::default(), reported: Default::default() }
    }

    pub(super) fn down(&self, server: &Address, error: &RedisError) {
        let (server, error) = (server.to_string(), error.to_string());
        let mut down = self.servers_down();
        down.insert(server.clone(), error.clone());
        self.report(|| LimiterEvent::StoreDown { server, error });
    }

    pub(super) fn up(&self, server: &Address) {
        let server = server.to_string();
        let mut down = self.servers_down();
        down.remove(&server);
        self.report(|| LimiterEvent::StoreUp { server });
    }

    pub(super) fn left(&self, server: &Address) {
        let server = server.to_string();
        let mut down = self.servers_down();
        down.remove(&server);
        self.report(|| LimiterEvent::StoreLeft { server });
    }

    /// Reports an error, once a minute for each kind.
    pub(super) fn failed(&self, error: &RedisError) {
        let kind = match error.kind() {
            RedisErrorKind::Unavailable => 0,
            RedisErrorKind::Timeout => 1,
            RedisErrorKind::Overloaded => 2,
            RedisErrorKind::Foreign => 3,
            RedisErrorKind::Misconfigured => 4,
        };
        if !self.is_observed() || !is_due(&self.reported[kind]) {
            return;
        }
        self.report(|| match error.kind() {
            RedisErrorKind::Misconfigured => LimiterEvent::StoreMisconfigured { error: error.to_string() },
            _ => LimiterEvent::StoreFailed { error: error.to_string() },
        });
    }

    /// Adds an observer. A new one gets an event for each server that is down.
    pub(super) fn observe(&self, observer: &Arc<dyn Observer>) {
        let down = self.servers_down();
        if !self.observers.add(observer) {
            return;
        }
        for (server, error) in &*down {
            report_to(observer, &LimiterEvent::StoreDown { server: server.clone(), error: error.clone() });
        }
    }

    fn servers_down(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        self.down.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_observed(&self) -> bool {
        !self.observers.is_empty()
    }

    pub(super) fn report(&self, event: impl FnOnce() -> LimiterEvent) {
        if self.observers.is_empty() {
            return;
        }
        let event = event();
        self.observers.iter().for_each(|observer| report_to(observer, &event));
    }
}

/// Reports an event. The tasks that keep connections go on if the observer panics.
fn report_to(observer: &Arc<dyn Observer>, event: &LimiterEvent) {
    contained(|| observer.on_event(event));
}

/// Whether something is to be reported again. If so, it counts as reported now.
fn is_due(reported: &Mutex<Option<Instant>>) -> bool {
    let now = Instant::now();
    let mut reported = reported.lock().unwrap_or_else(PoisonError::into_inner);
    let due = reported.is_none_or(|last| now.duration_since(last) >= AGAIN);
    if due {
        *reported = Some(now);
    }
    due
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Stats;

    #[derive(Default)]
    struct Count(Mutex<usize>);

    impl Observer for Count {
        fn on_event(&self, _: &LimiterEvent) {
            *self.0.lock().unwrap() += 1;
        }
    }

    #[test]
    fn observer_that_comes_later_learns_of_servers_that_are_down() {
        let (events, stats) = (Events::new(None), [Stats::new(), Stats::new()]);
        let servers = [("a", 1), ("b", 2)].map(|(host, port)| Address::new(host, port));
        let error = RedisError::new(RedisErrorKind::Unavailable, "away");
        events.observe(&(Arc::new(stats[0].clone()) as Arc<dyn Observer>));
        servers.iter().for_each(|server| events.down(server, &error));
        events.up(&servers[0]);
        events.observe(&(Arc::new(stats[1].clone()) as Arc<dyn Observer>));
        let down = |stats: &Stats| stats.snapshot().events().servers_down().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(stats.each_ref().map(down), [["b:2"], ["b:2"]]);
        events.left(&servers[1]);
        assert!(stats.iter().all(|stats| down(stats).is_empty()));
    }

    #[tokio::test(start_paused = true)]
    async fn errors_are_reported_once_a_minute_for_each_kind() {
        use RedisErrorKind::{Foreign, Misconfigured, Overloaded, Timeout, Unavailable};
        let count = Arc::new(Count::default());
        let events = Events::new(Some(Arc::clone(&count) as Arc<dyn Observer>));
        for minute in 1..=2 {
            for kind in [Unavailable, Timeout, Overloaded, Foreign, Misconfigured].into_iter().cycle().take(50) {
                events.failed(&RedisError::new(kind, "wrong"));
            }
            tokio::time::advance(AGAIN - Duration::from_millis(1)).await;
            events.failed(&RedisError::new(Misconfigured, "wrong"));
            assert_eq!(*count.0.lock().unwrap(), 5 * minute);
            tokio::time::advance(Duration::from_millis(1)).await;
        }
    }
}
