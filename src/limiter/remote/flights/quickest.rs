//! The quickest call of the last seconds. The duration of this call distinguishes a distant store from a busy store:
//! no call to a distant store is quick, but some calls to a busy store are.

use std::time::Duration;

use tokio::time::Instant;

/// A call is forgotten after one to two times this span.
const SPAN: Duration = Duration::from_secs(5);

/// The longest time for which a call is remembered.
pub(crate) const REMEMBERED: Duration = Duration::from_secs(10);

/// The quickest call of this span, and of the span before.
#[derive(Default)]
pub(super) struct QuickestCall {
    began: Option<Instant>,
    of_this: Option<Duration>,
    of_last: Option<Duration>,
}

impl QuickestCall {
    /// Records an answered call.
    pub(super) fn record(&mut self, took: Duration, now: Instant) {
        self.advance(now);
        self.of_this = Some(self.of_this.map_or(took, |quickest| quickest.min(took)));
    }

    /// Returns the duration of the quickest call of the last five to ten seconds. `None` if there was no call.
    pub(super) fn read(&mut self, now: Instant) -> Option<Duration> {
        self.advance(now);
        self.of_this.into_iter().chain(self.of_last).min()
    }

    /// Begins the span of this instant, if the last span is over.
    fn advance(&mut self, now: Instant) {
        let began = *self.began.get_or_insert(now);
        let passed = now.saturating_duration_since(began);
        if passed >= SPAN {
            self.of_last = self.of_this.take().filter(|_| passed < 2 * SPAN);
            self.began = Some(if passed < 2 * SPAN { began + SPAN } else { now });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quickest_call_is_forgotten_after_five_to_ten_seconds() {
        assert_eq!(REMEMBERED, 2 * SPAN);
        let (mut quickest, began, ms) = (QuickestCall::default(), Instant::now(), Duration::from_millis);
        let at = |seconds| began + Duration::from_secs(seconds);
        assert_eq!(quickest.read(began), None);
        quickest.record(ms(3), began);
        quickest.record(ms(40), at(4));
        assert_eq!(quickest.read(at(9)), Some(ms(3)));
        quickest.record(ms(50), at(9));
        assert_eq!(quickest.read(at(9)), Some(ms(3)));
        assert_eq!(quickest.read(at(11)), Some(ms(50)), "the span of the others is over");
        assert_eq!(quickest.read(at(60)), None);
    }
}
