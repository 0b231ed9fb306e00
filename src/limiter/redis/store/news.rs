//! What an observer is told of a store.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::address::Address;
use super::failure::Misconfigured;
use crate::limiter::redis::error::{RedisError, RedisErrorKind};
use crate::outcome::{LimiterEvent, Observer};

/// What somebody has to mend is told again after so long.
const AGAIN: Duration = Duration::from_secs(60);

/// Tells the observer, if there is one.
pub(super) struct News {
    observer: Option<Arc<dyn Observer>>,
    /// When each kind was last told.
    told: [Told; Misconfigured::COUNT],
    /// When checks last failed with each kind of error.
    failed: [Told; 4],
}

/// When something was last told.
#[derive(Default)]
struct Told(Mutex<Option<Instant>>);

impl Told {
    /// Whether it is to be told now; then it was.
    fn is_due(&self) -> bool {
        let now = Instant::now();
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let due = told.is_none_or(|told| now.duration_since(told) >= AGAIN);
        if due {
            *told = Some(now);
        }
        due
    }
}

impl News {
    pub(super) fn new(observer: Option<Arc<dyn Observer>>) -> Self {
        Self { observer, told: Default::default(), failed: Default::default() }
    }

    pub(super) fn down(&self, server: &Address, error: &RedisError) {
        self.tell(|| LimiterEvent::StoreDown { server: server.to_string(), error: error.to_string() });
    }

    pub(super) fn up(&self, server: &Address) {
        self.tell(|| LimiterEvent::StoreUp { server: server.to_string() });
    }

    /// Somebody has to mend it: told once a minute for each kind.
    pub(super) fn misconfigured(&self, kind: Misconfigured, error: &RedisError) {
        if self.observer.is_some() && self.told[kind as usize].is_due() {
            self.tell(|| LimiterEvent::StoreMisconfigured { error: error.to_string() });
        }
    }

    /// A check failed with what passes by itself, or concerns one key: told once a minute for each kind.
    pub(super) fn failed(&self, error: &RedisError) {
        let kind = match error.kind() {
            RedisErrorKind::Unavailable => 0,
            RedisErrorKind::Timeout => 1,
            RedisErrorKind::Overloaded => 2,
            RedisErrorKind::Foreign => 3,
            RedisErrorKind::Misconfigured => return, // reported by what is to be fixed
        };
        if self.observer.is_some() && self.failed[kind].is_due() {
            self.tell(|| LimiterEvent::StoreFailed { error: error.to_string() });
        }
    }

    fn tell(&self, event: impl FnOnce() -> LimiterEvent) {
        if let Some(observer) = &self.observer {
            // The tasks that keep connections go on even if it panics.
            let _ = catch_unwind(AssertUnwindSafe(|| observer.on_event(&event())));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Count(Mutex<usize>);

    impl Observer for Count {
        fn on_event(&self, _: &LimiterEvent) {
            *self.0.lock().unwrap() += 1;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_to_be_mended_is_told_once_a_minute_for_each_kind() {
        let count = Arc::new(Count::default());
        let news = News::new(Some(Arc::clone(&count) as Arc<dyn Observer>));
        let error = RedisError::new(RedisErrorKind::Misconfigured, "wrong");
        let told = |kind| {
            let before = *count.0.lock().unwrap();
            news.misconfigured(kind, &error);
            *count.0.lock().unwrap() - before
        };
        assert_eq!(told(Misconfigured::Password), 1);
        assert_eq!(told(Misconfigured::Password), 0);
        assert_eq!(told(Misconfigured::Rights), 1, "of another kind");
        tokio::time::advance(AGAIN - Duration::from_millis(1)).await;
        assert_eq!(told(Misconfigured::Password), 0);
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(told(Misconfigured::Password), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn failures_are_told_once_a_minute_for_each_kind() {
        use RedisErrorKind::{Foreign, Misconfigured, Overloaded, Timeout, Unavailable};
        let count = Arc::new(Count::default());
        let news = News::new(Some(Arc::clone(&count) as Arc<dyn Observer>));
        for _ in 0..2 {
            let before = *count.0.lock().unwrap();
            for kind in [Unavailable, Timeout, Overloaded, Foreign, Misconfigured].into_iter().cycle().take(50) {
                news.failed(&RedisError::new(kind, "wrong"));
            }
            assert_eq!(*count.0.lock().unwrap() - before, 4, "misconfigurations are reported by what is to be fixed");
            tokio::time::advance(AGAIN).await;
        }
    }
}
