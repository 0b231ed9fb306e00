//! The observers of a limiter.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, OnceLock};

use crate::event::LimiterEvent;
use crate::outcome::Observer;

/// The maximum number of observers of a limiter. Without this bound, a program that keeps making layers would slow the
/// limiter down.
const OBSERVERS_MAX: usize = 32;

/// The observers of a limiter: the builder's observer, and the observers of the layers. The observers are read
/// without a lock.
pub(crate) struct Observers(Box<[OnceLock<Arc<dyn Observer>>]>);

impl Default for Observers {
    fn default() -> Self {
        Self((0..OBSERVERS_MAX).map(|_| OnceLock::new()).collect())
    }
}

impl Observers {
    /// Adds an observer, unless it was added before, or the limiter already has [`OBSERVERS_MAX`] observers.
    /// Returns whether the observer is new.
    pub(crate) fn add(&self, observer: &Arc<dyn Observer>) -> bool {
        let identity = observer.identity();
        for place in &self.0 {
            let mut is_new = false;
            let kept = place.get_or_init(|| {
                is_new = true;
                Arc::clone(observer)
            });
            if is_new || kept.identity() == identity {
                return is_new;
            }
        }
        false
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.iter().next().is_none()
    }

    /// Reports an event to each observer, even if another observer panics. After all observers have the event,
    /// the first panic continues.
    pub(crate) fn report(&self, event: &LimiterEvent) {
        event.log();
        let report =
            |observer: &Arc<dyn Observer>| catch_unwind(AssertUnwindSafe(|| observer.on_limiter_event(event))).err();
        let panics: Vec<_> = self.iter().filter_map(report).collect();
        if let Some(panic) = panics.into_iter().next() {
            resume_unwind(panic);
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<dyn Observer>> {
        self.0.iter().map_while(OnceLock::get)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::stats::Stats;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Observer for Count {
        fn on_limiter_event(&self, _: &LimiterEvent) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn every_observer_gets_each_event_once() {
        let observers = Observers::default();
        assert!(observers.is_empty());
        let (stats, counts) = (Stats::new(), [Arc::new(Count::default()), Arc::new(Count::default())]);
        for _ in 0..2 {
            // As layers do: each wraps what it got.
            observers.add(&(Arc::new(stats.clone()) as Arc<dyn Observer>));
            observers.add(&(Arc::new(Arc::clone(&counts[0])) as Arc<dyn Observer>));
            observers.add(&(Arc::clone(&counts[1]) as Arc<dyn Observer>));
        }
        observers.report(&LimiterEvent::Full);
        assert_eq!(stats.snapshot().events().full(), 1);
        assert_eq!(counts.map(|count| count.0.load(Ordering::Relaxed)), [1, 1]);
    }

    struct Panics;

    impl Observer for Panics {
        fn on_limiter_event(&self, _: &LimiterEvent) {
            resume_unwind(Box::new("the observer panics"));
        }
    }

    #[test]
    fn observer_that_panics_hides_no_event_from_others() {
        let (observers, stats) = (Observers::default(), Stats::new());
        observers.add(&(Arc::new(Panics) as Arc<dyn Observer>));
        observers.add(&(Arc::new(stats.clone()) as Arc<dyn Observer>));
        let reported = catch_unwind(AssertUnwindSafe(|| observers.report(&LimiterEvent::Full)));
        assert_eq!((reported.is_err(), stats.snapshot().events().full()), (true, 1));
    }

    #[test]
    fn observers_are_bounded() {
        let observers = Observers::default();
        let added = (0..100).filter(|_| observers.add(&(Arc::new(Stats::new()) as Arc<dyn Observer>)));
        assert_eq!(added.count(), OBSERVERS_MAX);
        assert_eq!(observers.iter().count(), OBSERVERS_MAX);
    }

    #[test]
    fn observer_that_threads_add_at_once_is_there_once() {
        let (observers, stats) = (Observers::default(), Stats::new());
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| observers.add(&(Arc::new(stats.clone()) as Arc<dyn Observer>)));
            }
        });
        assert_eq!(observers.iter().count(), 1);
    }
}
