//! What a policy does with a request that is over its quota.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::limiter::Effect;

/// What a rule does with a request that is over its quota, or that has no key where it needs one.
///
/// Whatever the mode, the quota decides in the same way: a policy that is alone in its layer gives the same decisions,
/// request by request, in each of them. A request that passes is charged by every policy that has room for it; one that an
/// enforcing policy refuses is charged by none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mode {
    /// It is refused. The default.
    #[default]
    Enforce,
    /// It passes, with the [`Outcome`](crate::Outcome) in its extensions, of the kind
    /// [`Degraded`](crate::OutcomeKind::Degraded): the service is to serve less. Its response gets
    /// `Cache-Control: no-store`, unless the service has set a `Cache-Control` of its own: a cache would serve less to
    /// others, too.
    Degrade,
    /// It passes, as if there were no such rule, and only the outcome tells, by the kind
    /// [`ShadowLimited`](crate::OutcomeKind::ShadowLimited). Header fields do not: clients would slow down for a limit that
    /// is not there yet.
    Shadow,
}

impl Mode {
    /// From the strictest to the mildest.
    const ALL: [Self; 3] = [Self::Enforce, Self::Degrade, Self::Shadow];

    /// What a denial by the quota does to the decision of a request.
    #[inline]
    pub(crate) fn effect(self) -> Effect {
        match self {
            Self::Enforce => Effect::Enforce,
            Self::Degrade | Self::Shadow => Effect::Observe,
        }
    }

    /// The milder of two: that which interferes less.
    pub(crate) fn milder(self, other: Self) -> Self {
        if self.number() < other.number() { other } else { self }
    }

    pub(crate) fn of_number(number: u8) -> Self {
        Self::ALL.into_iter().find(|mode| mode.number() == number).unwrap_or_default()
    }

    #[inline]
    pub(crate) fn number(self) -> u8 {
        match self {
            Self::Enforce => 0,
            Self::Degrade => 1,
            Self::Shadow => 2,
        }
    }
}

/// A [`Mode`] that can be switched while requests come, by any clone; no state is lost, since every mode charges alike.
///
/// A request is decided in the mode that it meets. One that is on its way when the mode is switched may still go by the
/// one before.
///
/// ```
/// use tower_ratelimit::{MemoryLimiter, Mode, ModeSwitch, Policy, Quota, RateLimitLayer, key};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mode = ModeSwitch::new(Mode::Shadow);
/// let client = Policy::new("client", Quota::per_minute(100))?.mode(mode.clone());
/// let layer = RateLimitLayer::new(MemoryLimiter::new(), client, key::peer_ip());
///
/// // Later, when the metrics say that it would refuse nobody but those it is there for:
/// mode.set(Mode::Enforce);
/// # Ok(()) }
/// ```
#[derive(Clone, Default)]
pub struct ModeSwitch(Arc<AtomicU8>);

impl ModeSwitch {
    /// A switch that is set to `mode`.
    #[must_use]
    pub fn new(mode: Mode) -> Self {
        Self(Arc::new(AtomicU8::new(mode.number())))
    }

    /// The mode.
    #[must_use]
    pub fn get(&self) -> Mode {
        // Nothing else is published with it.
        let number = self.0.load(Ordering::Relaxed);
        Mode::of_number(number)
    }

    /// Sets the mode, and returns the one before.
    pub fn set(&self, mode: Mode) -> Mode {
        let number = self.0.swap(mode.number(), Ordering::Relaxed);
        Mode::of_number(number)
    }
}

impl From<Mode> for ModeSwitch {
    /// A switch that nobody else holds.
    fn from(mode: Mode) -> Self {
        Self::new(mode)
    }
}

impl From<&Self> for ModeSwitch {
    fn from(switch: &Self) -> Self {
        switch.clone()
    }
}

impl fmt::Debug for ModeSwitch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ModeSwitch").field(&self.get()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_switch_is_what_any_clone_of_it_was_set_to() {
        for mode in Mode::ALL {
            let switch = ModeSwitch::default();
            assert_eq!(switch.clone().set(mode), Mode::Enforce);
            assert_eq!(switch.get(), mode);
            assert_eq!(ModeSwitch::from(mode).get(), mode);
        }
    }

    #[test]
    fn of_two_modes_the_milder_holds() {
        assert_eq!(Mode::Enforce.milder(Mode::Degrade), Mode::Degrade);
        assert_eq!(Mode::Shadow.milder(Mode::Degrade), Mode::Shadow);
        assert_eq!(Mode::Enforce.milder(Mode::Enforce), Mode::Enforce);
    }
}
