//! The reasons for refusals, and the status and text of each reason in each protocol.

use http::StatusCode;

use crate::base::wait::Wait;
use crate::outcome::{Outcome, OutcomeKind};

use super::definition::GrpcCode;

/// The text for a client whose request would be refused at any time.
pub(super) const TOO_COSTLY: &str = "This request costs more than its limit, so no wait helps.";

/// Why a request is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Reason {
    Limited,
    Denied,
    KeyMissing,
    /// The server does not provide the address that the request came from.
    PeerUnknown,
    LimiterFailed,
}

impl Reason {
    pub(super) fn of(outcome: &Outcome) -> Self {
        match outcome.kind() {
            OutcomeKind::Denied => Self::Denied,
            OutcomeKind::KeyMissing if outcome.lacks_peer() => Self::PeerUnknown,
            OutcomeKind::KeyMissing => Self::KeyMissing,
            OutcomeKind::FailedClosed => Self::LimiterFailed,
            OutcomeKind::Limited | OutcomeKind::Blocked => Self::Limited,
            // Requests with one of these outcomes are not refused.
            OutcomeKind::Allowed
            | OutcomeKind::Overage
            | OutcomeKind::Delayed
            | OutcomeKind::Degraded
            | OutcomeKind::ShadowLimited
            | OutcomeKind::Overflowed
            | OutcomeKind::Exempt
            | OutcomeKind::Abandoned
            | OutcomeKind::FailedOpen => Self::Limited,
        }
    }

    /// Returns the HTTP status. `limited` is the status for requests over a quota.
    pub(super) fn http_status(self, limited: StatusCode) -> StatusCode {
        match self {
            Self::Limited => limited,
            Self::Denied => StatusCode::FORBIDDEN,
            Self::KeyMissing => StatusCode::BAD_REQUEST,
            Self::PeerUnknown => StatusCode::INTERNAL_SERVER_ERROR,
            Self::LimiterFailed => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// Returns the gRPC status. `limited` is the status for requests over a quota.
    pub(super) fn grpc_status(self, limited: GrpcCode) -> u8 {
        match (self, limited) {
            (Self::Limited, GrpcCode::ResourceExhausted) => 8,
            (Self::Limited, GrpcCode::Unavailable) | (Self::LimiterFailed, _) => 14,
            (Self::Denied, _) => 7,
            (Self::KeyMissing, _) => 3,
            (Self::PeerUnknown, _) => 13,
        }
    }

    /// Returns a text for clients, in printable ASCII without `%`. Texts for operators go to the
    /// observer and to `RateLimitLayer::check`.
    pub(super) fn message(self) -> &'static str {
        match self {
            Self::Limited => "rate limit exceeded",
            Self::Denied => "This client may not use this service.",
            Self::KeyMissing => "The request has no value that identifies its client, such as an API key.",
            Self::PeerUnknown => "The service cannot tell which client sent this request.",
            Self::LimiterFailed => "The service cannot accept this request at the moment.",
        }
    }
}

/// Returns the message of a gRPC status for a refused request.
pub(super) fn message(outcome: &Outcome) -> &'static str {
    match Reason::of(outcome) {
        Reason::Limited if outcome.wait() == Wait::Never => TOO_COSTLY,
        reason => reason.message(),
    }
}
