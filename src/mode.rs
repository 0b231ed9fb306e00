//! Modes: what a rule does with a request that is over its quota.

use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Weak};

use crate::base::sync::{Mutex, contained, lock};
use crate::error::labelled;

labelled! {
    /// The treatment of a request that is over the quota of a rule, or that has no key for the rule.
    ///
    /// The mode does not change how the quota decides: a policy that is alone in its layer makes the same decisions in
    /// every mode. A request that passes is charged to every policy that has room for it. A request that an enforcing
    /// policy refuses is charged to no policy.
    #[derive(Default)]
    Mode,
    /// Returns the label for metrics, logs and files.
    as_str {
        /// The request is refused. The default.
        #[default]
        Enforce = "enforce",
        /// The request passes, and the service should send a reduced response. The request carries
        /// an [`Outcome`](crate::outcome::Outcome) of the kind
        /// [`Degraded`](crate::outcome::OutcomeKind::Degraded) in its extensions. The response gets
        /// `Cache-Control: no-store` unless the service sets its own, so that no cache serves the
        /// reduced response to other clients.
        Degrade = "degrade",
        /// The request passes as if the rule did not exist. Only the outcome shows that the rule would have refused the
        /// request, by the kind [`ShadowLimited`](crate::outcome::OutcomeKind::ShadowLimited). Headers do not report
        /// the rule, because clients would slow down for a limit that is not enforced yet.
        Shadow = "shadow",
    }
}

impl Mode {
    /// Returns the milder of two modes. `Shadow` is the mildest.
    pub(crate) fn milder(self, other: Self) -> Self {
        if (self as u8) < other as u8 { other } else { self }
    }

    /// Returns the stricter of two modes. `Enforce` is the strictest.
    pub(crate) fn stricter(self, other: Self) -> Self {
        if (self as u8) < other as u8 { self } else { other }
    }

    fn of_number(number: u8) -> Self {
        match number {
            0 => Self::Enforce,
            1 => Self::Degrade,
            _ => Self::Shadow,
        }
    }
}

/// A [`Mode`] that any clone can switch while requests are served. A switch loses no state, because
/// every mode charges requests in the same way.
///
/// A request that is being decided while the mode is switched may still use the previous mode. A request in line for
/// units of a [concurrency limit](crate::Quota::concurrent), a message that waits, and a paced body go on at once if
/// the new mode is milder than the previous mode.
///
/// ```
/// use tower_ratelimit::{
///     MemoryLimiter, Mode, Quota, RateLimitLayer, Rule, key, middleware::ModeSwitch,
/// };
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mode = ModeSwitch::new(Mode::Shadow);
/// let client = Rule::new("client", Quota::per_minute(100))?.mode(mode.clone());
/// let layer = RateLimitLayer::new(MemoryLimiter::new(), client, key::peer_ip());
///
/// // Later, when metrics show that it would refuse only the clients that it should:
/// mode.set(Mode::Enforce);
/// # Ok(()) }
/// ```
#[derive(Clone, Default)]
pub struct ModeSwitch(Arc<Switch>);

#[derive(Default)]
struct Switch {
    /// The mode as a number.
    mode: AtomicU8,
    followers: Mutex<Vec<Weak<dyn FollowMode>>>,
}

/// Follows the changes of a mode. A [`ModeSwitch`] holds only a weak reference to a follower.
pub(crate) trait FollowMode: Send + Sync {
    /// Is called after the mode was changed. The caller holds no lock.
    fn mode_has_changed(&self);
}

impl ModeSwitch {
    /// Makes a switch that is set to `mode`.
    #[must_use]
    pub fn new(mode: Mode) -> Self {
        Self(Arc::new(Switch { mode: AtomicU8::new(mode as u8), followers: Mutex::default() }))
    }

    /// Returns the mode.
    #[must_use]
    pub fn get(&self) -> Mode {
        // `Relaxed` suffices, because no other data is published with the mode.
        let number = self.0.mode.load(Ordering::Relaxed);
        Mode::of_number(number)
    }

    /// Sets the mode and returns the previous one.
    pub fn set(&self, mode: Mode) -> Mode {
        let before = Mode::of_number(self.0.mode.swap(mode as u8, Ordering::Relaxed));
        if before != mode {
            let followers: Vec<_> = lock(&self.0.followers).iter().filter_map(Weak::upgrade).collect();
            // The followers wake tasks, whose wakers are the application's code.
            followers.iter().for_each(|follower| contained(|| follower.mode_has_changed()));
        }
        before
    }

    /// Adds a follower. A switch no longer calls a follower that was dropped.
    pub(crate) fn enter(&self, follower: Weak<dyn FollowMode>) {
        let mut followers = lock(&self.0.followers);
        followers.retain(|other| other.strong_count() > 0);
        followers.push(follower);
    }
}

impl From<Mode> for ModeSwitch {
    /// Makes a new switch that is set to this mode.
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
        for mode in [Mode::Enforce, Mode::Degrade, Mode::Shadow] {
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
