//! [`ObeyError`]: the error of a request that was not sent.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use crate::base::time::Humane;
use crate::base::wait::Wait;
use crate::error::debug_as_text;
use crate::key::Key;
use crate::limiter::LimiterError;
use crate::policy::Policy;

/// The error of a request that an [`Obey`](super::Obey) did not send. The service is not called.
///
/// `Obey` returns a boxed error, as other layers of Tower do. Get the `ObeyError` with
/// `error.downcast_ref::<ObeyError>()`.
pub struct ObeyError {
    kind: ObeyErrorKind,
    wait: Wait,
    message: Box<str>,
    source: Option<LimiterError>,
}

/// The kind of an [`ObeyError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ObeyErrorKind {
    /// The request would have to wait longer than [`max_wait`](super::ObeyLayer::max_wait).
    TooLong,
    /// [`max_waiting`](super::ObeyLayer::max_waiting) requests already wait for the key.
    TooManyWaiting,
    /// [`max_keys`](super::ObeyLayer::max_keys) keys are in use or paused.
    TooManyKeys,
    /// An [own quota](super::ObeyLayer::own_quota) never lets the request pass, because the request costs
    /// more than the quota's capacity.
    Never,
    /// The limiter of an [own quota](super::ObeyLayer::own_quota) failed. Its error is the source.
    OwnQuota,
}

impl ObeyError {
    /// Returns the kind of the error.
    #[must_use]
    pub fn kind(&self) -> ObeyErrorKind {
        self.kind
    }

    /// Returns the shortest time for which the request would have had to wait. The time is known if the
    /// kind is [`TooLong`](ObeyErrorKind::TooLong) or
    /// [`TooManyWaiting`](ObeyErrorKind::TooManyWaiting).
    #[must_use]
    pub fn wait(&self) -> Wait {
        self.wait
    }

    fn new(kind: ObeyErrorKind, wait: Wait, message: String) -> Self {
        Self { kind, wait, message: message.into(), source: None }
    }

    pub(super) fn too_long(key: &Key, wait_us: u64, most: Duration) -> Self {
        let wait = Duration::from_micros(wait_us);
        let message = format!(
            "{}: the request would have to wait for at least {} more, and `max_wait` is {}",
            Unsent(key),
            Humane(about(wait)),
            Humane(most)
        );
        Self::new(ObeyErrorKind::TooLong, Wait::After(wait), message)
    }

    pub(super) fn too_many_waiting(key: &Key, wait_us: u64, most: usize) -> Self {
        let message = format!("{}: {most} requests wait already, the most that `max_waiting` allows", Unsent(key));
        Self::new(ObeyErrorKind::TooManyWaiting, Wait::After(Duration::from_micros(wait_us)), message)
    }

    pub(super) fn too_many_keys(key: &Key, most: usize) -> Self {
        let message =
            format!("{}: {most} other keys are in use or paused, the most that `max_keys` allows", Unsent(key));
        Self::new(ObeyErrorKind::TooManyKeys, Wait::Unknown, message)
    }

    pub(super) fn never(policy: &Policy, cost: u64) -> Self {
        let message = format!(
            "the request was not sent: it costs {cost} units of the client's own quota {:?}, which never has more than \
             {}",
            policy.name(),
            policy.quota().capacity()
        );
        Self::new(ObeyErrorKind::Never, Wait::Never, message)
    }

    pub(super) fn own_quota(policy: &str, error: LimiterError) -> Self {
        let message = format!("the request was not sent: the limiter of the client's own quota \"{policy}\" failed");
        Self { source: Some(error), ..Self::new(ObeyErrorKind::OwnQuota, Wait::Unknown, message) }
    }
}

/// The beginning of an error's text. The text shows at most 100 characters of the key, because keys may
/// be long.
struct Unsent<'a>(&'a Key);

impl fmt::Display for Unsent<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self.0 == Key::global() {
            return f.write_str("the request was not sent");
        }
        let text = self.0.display().to_string();
        let (shown, dots) = match text.char_indices().nth(100) {
            Some((end, _)) => (text.get(..end).unwrap_or_default(), "…"),
            None => (text.as_str(), ""),
        };
        write!(f, "the request to {shown}{dots} was not sent")
    }
}

/// Rounds a wait of a minute or more up to whole seconds.
fn about(wait: Duration) -> Duration {
    let seconds = wait.as_secs().saturating_add(u64::from(wait.subsec_nanos() > 0));
    if seconds < 60 { wait } else { Duration::from_secs(seconds) }
}

debug_as_text!(ObeyError);

impl fmt::Display for ObeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for ObeyError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_ref().map(|source| source as _)
    }
}
