//! Reasons why a request has no answer, other than an error of the store.

use std::time::Duration;

use crate::event::StoreErrorKind;

/// Reasons why a request has no answer, other than an error of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unanswered {
    /// The caller is in no tokio runtime. The request was not sent.
    NoRuntime,
    /// This many requests wait already. The request was not sent.
    TooMany(usize),
    /// Earlier requests would have delayed the answer beyond the deadline. The request was not sent.
    Shed(Shed),
    /// Even if no other call is under way, a call takes this time, which is longer than the deadline. The
    /// request was not sent. `quickest` is the duration of the quickest call of the last seconds.
    TooFar { call: Duration, deadline: Duration, quickest: Option<Duration> },
    /// Earlier requests took longer than this deadline. The request was not sent.
    NotSent(Duration),
    /// This process had no time to read an answer within this deadline.
    TooBusy(Duration),
    /// There was no answer within this deadline. `quickest` is the duration of the quickest call of the last seconds,
    /// or `None` if no call was answered.
    TimedOut { deadline: Duration, quickest: Option<Duration> },
    /// The runtime that runs the flights as tasks has ended.
    RuntimeEnded,
    /// The store did not answer all requests of a call.
    LeftOut,
    /// The answer does not fit the request.
    Misunderstood,
    /// The limiter was closed.
    Closed,
    /// A set has more charges than the maximum: their number, and the maximum.
    TooLarge(usize, usize),
    /// The key of a concurrency limit was reset each time that the request was sent.
    KeyReset,
    /// An earlier refund of the queue failed, or too many later refunds came.
    RefundNotSent,
}

/// The load that would have delayed an answer beyond the deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shed {
    /// The number of requests that wait.
    pub(crate) waiting: usize,
    /// The number of requests that may be in flight.
    pub(crate) carries: u32,
    /// The duration of a call.
    pub(crate) call: Duration,
    pub(crate) deadline: Duration,
}

impl Shed {
    /// Returns how long a new check would wait for the requests before it.
    pub(super) fn wait(&self) -> Duration {
        self.call.saturating_mul(u32::try_from(self.waiting).unwrap_or(u32::MAX)) / self.carries.max(1)
    }

    fn message(self) -> String {
        let Self { waiting, carries, call, deadline } = self;
        let rate = u128::from(carries) * 1_000_000 / call.as_micros().max(1);
        format!(
            "the store answers about {rate} checks of this process a second, {waiting} checks wait, a call takes {}, \
             and the deadline is {deadline:?}: this check was not sent, because its answer would come too late",
            rounded(call)
        )
    }
}

/// Returns the text for a check that is not sent, because the store is down for this reason.
pub(crate) fn while_down(reason: &str) -> String {
    format!("{reason}; no check is sent until it answers")
}

/// Returns the text for a check without an answer within the deadline.
fn timed_out(deadline: Duration, quickest: Option<Duration>) -> String {
    match quickest {
        Some(call) if call >= deadline => {
            let call = rounded(call);
            format!(
                "answers of the store come too late: the quickest of the last seconds took {call}, and the deadline is \
                 {deadline:?}"
            )
        }
        Some(call) => format!(
            "no answer within {deadline:?}, including the wait behind earlier checks: the store is slow or silent now, \
             and its quickest answer of the last seconds took {}",
            rounded(call)
        ),
        None => format!(
            "no answer within {deadline:?}, including the wait behind earlier checks: the store is slow or silent, and \
             has answered no check in the last seconds"
        ),
    }
}

/// Returns the text for a check that is not sent, because a call takes longer than the deadline. The store is far only
/// if even the quickest call took long.
fn too_far(call: Duration, deadline: Duration, quickest: Option<Duration>) -> String {
    let advice = match quickest {
        Some(quickest) if quickest < deadline / 2 => {
            let quickest = rounded(quickest);
            format!("its quickest answer of the last seconds took {quickest}, so the store is busy, or this process is")
        }
        _ => "use a longer deadline, or a store that is nearer".to_owned(),
    };
    format!(
        "answers of the store come too late: a call takes about {}, and the deadline is {deadline:?}; this check was not \
         sent; {advice}",
        rounded(call)
    )
}

/// Formats a time with about three digits.
fn rounded(time: Duration) -> String {
    let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    let digits = if micros < 10_000 { micros } else { micros / 100 * 100 };
    format!("{:?}", Duration::from_micros(digits))
}

impl Unanswered {
    /// Returns whether there were more requests than can be answered in time.
    pub(super) fn is_overload(self) -> bool {
        matches!(self, Self::TooMany(_) | Self::Shed(_) | Self::NotSent(_) | Self::TooBusy(_))
    }

    /// Returns the kind and the text of a limiter's error.
    pub(crate) fn kind_and_message(self) -> (StoreErrorKind, String) {
        match self {
            Self::NoRuntime => (
                StoreErrorKind::Misconfigured,
                "checks on a store have to be made within a tokio runtime, with its timers enabled".to_owned(),
            ),
            Self::TooMany(waiting) => (
                StoreErrorKind::Overloaded,
                format!("{waiting} checks wait for the store already: this check was not sent"),
            ),
            Self::Shed(shed) => (StoreErrorKind::Overloaded, shed.message()),
            Self::TooFar { call, deadline, quickest } => (StoreErrorKind::Timeout, too_far(call, deadline, quickest)),
            Self::NotSent(deadline) => (
                StoreErrorKind::Overloaded,
                format!("earlier checks took longer than {deadline:?}: this check was not sent"),
            ),
            Self::TooBusy(deadline) => (
                StoreErrorKind::Overloaded,
                format!("no answer was read within {deadline:?}: this process is too busy"),
            ),
            Self::TimedOut { deadline, quickest } => (StoreErrorKind::Timeout, timed_out(deadline, quickest)),
            Self::RuntimeEnded => (
                StoreErrorKind::Unavailable,
                "the runtime in which the limiter was made has ended, or code of the application panicked there"
                    .to_owned(),
            ),
            Self::LeftOut => (StoreErrorKind::Foreign, "the store answered fewer checks than it was sent".to_owned()),
            Self::Misunderstood => (StoreErrorKind::Foreign, "the store's answer does not fit the request".to_owned()),
            Self::Closed => (StoreErrorKind::Unavailable, "this limiter was closed".to_owned()),
            Self::TooLarge(charges, most) => {
                (StoreErrorKind::Misconfigured, format!("a set of {charges} charges is too large: use at most {most}"))
            }
            Self::KeyReset => {
                (StoreErrorKind::Unavailable, "the key of a concurrency limit was reset during the call".to_owned())
            }
            Self::RefundNotSent => (StoreErrorKind::Unavailable, "the refund was not sent".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_that_is_not_sent_says_what_the_store_carries() {
        let (call, deadline) = (Duration::from_nanos(40_123_456), Duration::from_millis(100));
        let (kind, message) = Unanswered::Shed(Shed { waiting: 900, carries: 512, call, deadline }).kind_and_message();
        assert_eq!(kind, StoreErrorKind::Overloaded);
        assert_eq!(
            message,
            "the store answers about 12760 checks of this process a second, 900 checks wait, a call takes 40.1ms, and \
             the deadline is 100ms: this check was not sent, because its answer would come too late"
        );
    }

    #[test]
    fn store_is_called_far_only_if_its_quickest_call_is_long() {
        let (call, deadline) = (Duration::from_micros(120_370), Duration::from_millis(100));
        let near = "its quickest answer of the last seconds took 386µs, so the store is busy, or this process is";
        let far = "use a longer deadline, or a store that is nearer";
        for (quickest, advice) in [(Some(386), near), (Some(91_000), far), (None, far)] {
            let quickest = quickest.map(Duration::from_micros);
            let (kind, message) = Unanswered::TooFar { call, deadline, quickest }.kind_and_message();
            assert_eq!(kind, StoreErrorKind::Timeout);
            let said = "answers of the store come too late: a call takes about 120.3ms, and the deadline is 100ms; this \
                        check was not sent; ";
            assert_eq!(message, format!("{said}{advice}"));
        }
    }

    #[test]
    fn check_without_an_answer_says_whether_others_are_late() {
        let deadline = Duration::from_millis(50);
        for (quickest, said) in [
            (
                Some(91),
                "answers of the store come too late: the quickest of the last seconds took 91ms, and the deadline is 50ms",
            ),
            (
                Some(2),
                "no answer within 50ms, including the wait behind earlier checks: the store is slow or silent now, and \
                 its quickest answer of the last seconds took 2ms",
            ),
            (
                None,
                "no answer within 50ms, including the wait behind earlier checks: the store is slow or silent, and has \
                 answered no check in the last seconds",
            ),
        ] {
            let quickest = quickest.map(Duration::from_millis);
            let (kind, message) = Unanswered::TimedOut { deadline, quickest }.kind_and_message();
            assert_eq!((kind, &*message), (StoreErrorKind::Timeout, said));
        }
    }
}
