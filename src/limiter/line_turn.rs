//! A turn in a line of either kind: for units of a concurrency limit, or for units that come back
//! with time.

use std::task::{Context, Poll};
use std::time::Duration;

use super::ask_lines::AskTurn;
use super::place_lines::{BoundedTurn, FAILED_POLLS_MAX, LineStep};
use crate::decision::ChargeDecision;

/// A turn of a request, or of a caller of [`Ready`](super::Ready), for a bounded time.
pub(crate) enum LineTurn {
    /// A turn in the limiter's line for units of a concurrency limit.
    Places(BoundedTurn),
    /// A turn in a line for units that come back with time.
    Asks(AskTurn),
}

impl LineTurn {
    /// Is ready when the waiter has to ask the limiter, or has to give up.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<LineStep> {
        match self {
            Self::Places(turn) => turn.poll(cx),
            Self::Asks(turn) => turn.poll(cx),
        }
    }

    /// Notes that the limiter did not answer the waiter at once.
    pub(crate) fn note_sent(&self) {
        if let Self::Asks(turn) = self {
            turn.note_sent();
        }
    }

    /// Returns whether the wait goes on after `failures` calls in a row have failed. The wait goes on only in
    /// a line whose first waiter asks again without being woken. In any other line, nothing would wake the
    /// first waiter after its call has failed.
    pub(crate) fn outlasts(&self, failures: u32) -> bool {
        matches!(self, Self::Places(turn) if turn.is_polled() && failures <= FAILED_POLLS_MAX)
    }

    /// Leaves the line, because the limiter admitted the waiter with these decisions. `own_limit` is as in
    /// [`PlaceTurn::leave_admitted`](super::place_lines::PlaceTurn::leave_admitted).
    pub(crate) fn leave_admitted<'a, D>(self, decisions: D, own_limit: Option<u64>)
    where
        D: Iterator<Item = &'a ChargeDecision> + Clone,
    {
        let known = decisions.filter(|own| own.is_known());
        let remaining = known.clone().map(ChargeDecision::remaining).min().unwrap_or(0);
        match self {
            Self::Places(turn) => turn.leave_admitted(remaining > 0, own_limit),
            Self::Asks(turn) => {
                // If nothing remains, the effective window of a quota ends when its next unit comes back.
                let used_up = known.filter(|own| own.remaining() == 0);
                let next = used_up.filter_map(ChargeDecision::effective_window).max();
                turn.leave_admitted(remaining, next.unwrap_or(Duration::ZERO));
            }
        }
    }
}
