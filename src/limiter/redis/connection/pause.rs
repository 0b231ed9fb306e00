//! The pauses between attempts to connect.

use std::time::Duration;

use tokio::time::Instant;

use crate::base::random;

/// The first and the longest pause between attempts to connect. Each pause is twice as long as the pause
/// before.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(250));

/// The least duration of a connection. A connection that ended sooner counts as a failed attempt.
const LASTED: Duration = Duration::from_millis(10);

/// The first and the longest time between two connections to an address whose server says that it cannot serve. Each
/// time is twice as long as the time before.
const RESTARTS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));

/// If there was no restart for this time, the times between restarts begin again with the shortest one.
const CALM: Duration = Duration::from_secs(10);

/// The pauses between attempts to connect to one server.
pub(super) struct Pauses(Duration);

impl Pauses {
    pub(super) fn new() -> Self {
        Self(PAUSES.0)
    }

    /// Returns the instant of the next attempt after an attempt that began at this time. `lasted` is how long the
    /// attempt's connection lasted, if one was made. If the connection lasted long enough, the next attempt follows
    /// at once. But at least the first pause lies between the beginnings of two attempts. So a server that cuts
    /// each connection does not keep this process busy.
    pub(super) fn next_attempt(&mut self, began: Instant, lasted: Option<Duration>) -> Instant {
        if lasted.is_some_and(|lasted| lasted >= LASTED) {
            self.0 = PAUSES.0;
            return began + PAUSES.0;
        }
        let pause = jitter(self.0);
        self.0 = (self.0 * 2).min(PAUSES.1);
        Instant::now() + pause
    }

    /// The longest pause.
    pub(super) fn longest() -> Duration {
        jitter(PAUSES.1)
    }
}

/// The restarts of a connection to a server that says that it cannot serve.
pub(super) struct Restarts {
    last: Option<Instant>,
    gap: Duration,
}

impl Restarts {
    pub(super) fn new() -> Self {
        Self { last: None, gap: RESTARTS.0 }
    }

    /// Returns whether to make the connection anew now, and counts that as a restart.
    pub(super) fn is_due(&mut self, now: Instant) -> bool {
        match self.last.map(|last| now.duration_since(last)) {
            Some(since) if since < self.gap => return false,
            Some(since) if since < CALM => self.gap = jitter((self.gap * 2).min(RESTARTS.1)),
            _ => self.gap = jitter(RESTARTS.0),
        }
        self.last = Some(now);
        true
    }
}

/// Returns a time that is up to a tenth longer, so that many processes do not connect at once.
pub(super) fn jitter(time: Duration) -> Duration {
    let part = random::secret() % 100;
    time + time * u32::try_from(part).unwrap_or(0) / 1_000
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[tokio::test(start_paused = true)]
    async fn pause_is_short_after_a_connection_that_lasted() {
        let mut pauses = Pauses::new();
        let began = Instant::now();
        tokio::time::advance(15 * MS).await;
        let next = |pauses: &mut Pauses, lasted| pauses.next_attempt(began, lasted) - began;
        let mut after = |lasted| next(&mut pauses, lasted).as_millis();
        assert_eq!(after(Some(14 * MS)), 20, "the time since the attempt began counts");
        for (lasted, least) in [(None, 35), (Some(MS), 55), (None, 95), (None, 175), (None, 265), (None, 265)] {
            let pause = after(lasted);
            assert!((least..=least + 26).contains(&pause), "{pause} of {least}");
        }
        assert_eq!(after(Some(10 * MS)), 20);
        assert!(after(None) < 40, "they begin anew");
    }

    #[tokio::test(start_paused = true)]
    async fn restarts_come_at_once_and_then_ever_more_slowly() {
        let mut restarts = Restarts::new();
        let mut times = Vec::new();
        for time in 0..5_000_u32 {
            if restarts.is_due(Instant::now()) {
                times.push(time);
            }
            tokio::time::advance(MS).await;
        }
        assert_eq!(times[0], 0);
        assert!(
            times.len() >= 7 && times.windows(2).all(|pair| (100..=1_211).contains(&(pair[1] - pair[0]))),
            "{times:?}"
        );
        assert!(times.windows(3).all(|three| three[2] - three[1] + 200 >= three[1] - three[0]), "{times:?}");
        tokio::time::advance(CALM).await;
        assert!(restarts.is_due(Instant::now()));
        tokio::time::advance(111 * MS).await;
        assert!(restarts.is_due(Instant::now()), "the gaps begin anew");
    }
}
