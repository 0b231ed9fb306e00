//! Waits: how long until a refused charge could pass.

use std::time::Duration;

/// The wait until a charge or request could pass, if nothing else is charged meanwhile.
///
/// ```
/// use std::time::Duration;
/// use tower_ratelimit::{Key, MemoryLimiter, Policy, Quota, Wait};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (limiter, policy) =
///     (MemoryLimiter::new(), Policy::new("hourly", Quota::per_hour(2))?);
/// assert_eq!(limiter.take_one(&policy, &Key::global(), 2).wait(), Wait::None);
/// match limiter.take_one(&policy, &Key::global(), 1).wait() {
///     Wait::After(wait) => assert!(wait <= Duration::from_secs(1_800)),
///     wait => panic!("{wait:?}"),
/// }
/// assert_eq!(limiter.take_one(&policy, &Key::global(), 3).wait(), Wait::Never);
/// # Ok(()) }
/// ```
///
/// The greatest of several waits is the wait for all of them. [`Never`](Self::Never) is above every
/// duration. A known duration is above [`Unknown`](Self::Unknown), because the wait for both takes
/// at least the known duration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Wait {
    /// The charge or request passes now.
    #[default]
    None,
    /// The charge or request does not pass now, and the limiter does not know when it will pass.
    Unknown,
    /// The charge or request can pass after this time.
    After(Duration),
    /// The charge or request never passes, because it costs more than the capacity.
    Never,
}

impl Wait {
    /// Returns the time of [`After`](Self::After), or `None` for the other variants.
    #[must_use]
    pub fn duration(self) -> Option<Duration> {
        match self {
            Self::After(wait) => Some(wait),
            Self::None | Self::Unknown | Self::Never => None,
        }
    }

    /// Returns the label for JSON: `none`, `unknown`, `after`, `never`.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Unknown => "unknown",
            Self::After(_) => "after",
            Self::Never => "never",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_for_several_is_never_or_the_longest_that_is_known() {
        let after = |seconds| Wait::After(Duration::from_secs(seconds));
        for (waits, all) in [
            (vec![Wait::None, Wait::None], Wait::None),
            (vec![Wait::None, Wait::Unknown], Wait::Unknown),
            (vec![Wait::Unknown, after(1), after(2)], after(2)),
            (vec![after(1), Wait::Never, Wait::Unknown], Wait::Never),
        ] {
            assert_eq!(waits.iter().copied().max(), Some(all), "{waits:?}");
        }
    }
}
