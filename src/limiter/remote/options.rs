//! The options that the builders of all limiters with a remote store have.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::denial_cache::DENIALS_MAX;
use crate::clock::{Clock, MonotonicClock};
use crate::outcome::Observer;

/// The longest time after which places may lapse. `places.lua` and `places_reset.lua` have the same number.
pub(super) const PLACES_LAPSE_MAX: Duration = Duration::from_secs(24 * 3_600);

/// The shortest time after which places may lapse. A process renews its places three times in this
/// time.
const PLACES_LAPSE_MIN: Duration = Duration::from_secs(3);

/// The time after which places lapse by default.
const PLACES_LAPSE: Duration = Duration::from_secs(30);

/// The time that a check may take by default, and its bounds.
pub(crate) const DEADLINE: Duration = Duration::from_millis(50);
const DEADLINE_MIN: Duration = Duration::from_millis(1);
const DEADLINE_MAX: Duration = Duration::from_secs(60);

/// The number of checks that may wait for an answer by default.
const IN_FLIGHT: usize = 8_192;

/// The number of denials that are remembered by default.
const DENIALS: usize = 4_096;

/// The longest prefix of stored keys, in bytes.
const PREFIX_MAX: usize = 128;

/// The values of the options.
pub(crate) struct Options {
    pub(crate) prefix: String,
    pub(crate) key_secret: [u8; 16],
    pub(crate) deadline: Duration,
    pub(crate) max_in_flight: usize,
    pub(crate) max_denials: usize,
    pub(crate) places_lapse_after: Duration,
    pub(crate) clock: Option<Arc<dyn Clock>>,
    /// The clock of this process, which bounds how long denials, leases and places are remembered. A simulation sets
    /// it.
    pub(crate) own_clock: Arc<dyn Clock>,
    pub(crate) observers: Vec<Arc<dyn Observer>>,
}

impl Options {
    pub(crate) fn new() -> Self {
        Self {
            prefix: "ratelimit".to_owned(),
            key_secret: [0; 16],
            deadline: DEADLINE,
            max_in_flight: IN_FLIGHT,
            max_denials: DENIALS,
            places_lapse_after: PLACES_LAPSE,
            clock: None,
            own_clock: Arc::new(MonotonicClock::new()),
            observers: Vec::new(),
        }
    }

    /// Checks that each option is in its range.
    ///
    /// # Errors
    /// Returns a text that says which option is out of its range, and what to use.
    pub(crate) fn check(&self) -> Result<(), String> {
        let Self { prefix, deadline, max_in_flight, max_denials, places_lapse_after, .. } = self;
        let is_possible = |byte: u8| byte.is_ascii_graphic() && !matches!(byte, b'{' | b'}');
        if !(1..=PREFIX_MAX).contains(&prefix.len()) || !prefix.bytes().all(is_possible) {
            return Err(format!(
                "{prefix:?} cannot be a prefix of stored keys: use 1 to {PREFIX_MAX} printable ASCII characters without \
                 blanks and braces"
            ));
        }
        if !(DEADLINE_MIN..=DEADLINE_MAX).contains(deadline) {
            return Err(format!("a deadline of {deadline:?} is not possible: use 1 ms to 60 s"));
        }
        if *max_in_flight == 0 {
            return Err("with a max_in_flight of 0 every check would fail: use at least 1".to_owned());
        }
        if *max_denials > DENIALS_MAX {
            return Err(format!("max_denials of {max_denials} is not possible: use at most {DENIALS_MAX}"));
        }
        if !(PLACES_LAPSE_MIN..=PLACES_LAPSE_MAX).contains(places_lapse_after) {
            return Err(format!("places_lapse_after of {places_lapse_after:?} is not possible: use 3 s to 24 h"));
        }
        Ok(())
    }
}

impl fmt::Debug for Options {
    /// Leaves the secret out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("prefix", &self.prefix)
            .field("deadline", &self.deadline)
            .field("max_in_flight", &self.max_in_flight)
            .field("max_denials", &self.max_denials)
            .field("places_lapse_after", &self.places_lapse_after)
            .finish_non_exhaustive()
    }
}

/// Implements the setters of the options for a builder with a field `shared`.
macro_rules! shared_options {
    ($builder:ident) => {
        impl $builder {
            /// Sets the beginning of every stored key: 1 to 128 printable ASCII characters without blanks and braces,
            /// `ratelimit` by default. Limiters with the same prefix share their states. So if two applications use
            /// one store and both keep the default, they share the limits of policies with the same name.
            pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
                self.shared.prefix = prefix.into();
                self
            }

            /// Sets the secret with which callers' keys are hashed. All processes need the same secret. A process
            /// with another secret gives every key its whole quota once more.
            ///
            /// Callers' keys (API keys, tokens, addresses) are stored as a hash even without a secret: 128 bits of
            /// SHA-256, so that an attacker cannot make a key with the hash of another caller's key. But without a
            /// secret, anybody who can read the store can find out whether a guessable key, such as an address or a
            /// user's name, has a state.
            pub fn key_secret(mut self, secret: [u8; 16]) -> Self {
                self.shared.key_secret = secret;
                self
            }

            /// Sets how long a check may take, from 1 ms to 60 s; 50 ms by default. A check that takes longer fails at
            /// most 20 ms later. The charge of such a check may or may not have been taken. A refund or a settlement
            /// first waits for the calls that are under way, and then for the store's answer, even if the answer is
            /// late. So a refund or a settlement can take twice this time, or longer if very many corrections wait or
            /// the store is silent. If keys of concurrency limits were reset, a check of these keys is sent again,
            /// once for each such key.
            pub fn deadline(mut self, deadline: std::time::Duration) -> Self {
                self.shared.deadline = deadline;
                self
            }

            /// Sets how many checks may wait for an answer at a time: at least 1, and 8,192 by default. A check
            /// beyond that number fails at once as [`Overloaded`](crate::limiter::StoreErrorKind::Overloaded). The
            /// maximum number of waiting refunds is the same number, but at least 64. A refund beyond that number is
            /// not sent: its units come back with time, as used units do.
            pub fn max_in_flight(mut self, checks: usize) -> Self {
                self.shared.max_in_flight = checks;
                self
            }

            /// Sets how many denials are remembered, at about 200 bytes each: from 0 to 1,048,576, and 4,096 by
            /// default.
            ///
            /// After the store has denied a key, the limiter itself denies the key, until the key's wait is over or a
            /// second has passed. Meanwhile the limiter does not ask the store. So a caller that has to wait for longer
            /// than a second costs one call a second. If waits are only some milliseconds, most checks of a denied key
            /// still cost a call each. If there is no room for a denial, it replaces an older denial, whose key then
            /// costs a call again. A request with a larger cost than the denied request gets the denied request's wait,
            /// which can be too short.
            ///
            /// A set that has a charge [on refusal](crate::limiter::Effect::OnRefusal), for a block or a meter, goes to
            /// the store each time.
            pub fn max_denials(mut self, denials: usize) -> Self {
                self.shared.max_denials = denials;
                self
            }

            /// Sets the time after which the places of this process are free again if the process does not renew
            /// them, from 3 s to 24 h; 30 s by default. This option concerns [concurrency
            /// limits](crate::Quota::concurrent) only.
            ///
            /// A process renews its places three times in this time. So the time should be longer than a failover of
            /// the store. The places of a killed process stay held until this time has passed.
            pub fn places_lapse_after(mut self, time: std::time::Duration) -> Self {
                self.shared.places_lapse_after = time;
                self
            }

            /// Sets the clock whose time is used instead of the store's time: for a manual clock in tests, and for
            /// stores whose time cannot be read. All processes must then agree on the time.
            pub fn clock(mut self, clock: impl $crate::clock::Clock + 'static) -> Self {
                self.shared.clock = Some(std::sync::Arc::new(clock));
                self
            }

            /// Adds an observer that gets events from the beginning: when a check has ended, when the store stops
            /// answering, and when it answers again. A [layer's observer](crate::RateLimitLayer::observer) need not be
            /// added here: each layer adds its observer before its first request.
            pub fn observer(mut self, observer: impl $crate::outcome::Observer + 'static) -> Self {
                self.shared.observers.push(std::sync::Arc::new(observer));
                self
            }
        }
    };
}
pub(crate) use shared_options;
