//! What becomes of a request that was decided.

use super::delay::Counted;
use crate::limiter::Limiter;
use crate::middleware::compiled::Compiled;
use crate::middleware::ticket::Ticket;

pub(crate) enum Fate {
    /// It goes to the service.
    Passes,
    /// It waits in this place until it departs.
    Waits(Counted),
    /// It goes to the overflow, or is refused.
    IsTurnedAway,
}

impl Ticket {
    /// Returns what becomes of the request, which the limiter has answered or which needs no answer.
    #[inline(never)]
    pub(crate) fn fate<L: Limiter>(&mut self, layer: &Compiled<L>) -> Fate {
        match self.place_to_wait(layer) {
            Some(place) => Fate::Waits(place),
            None if self.kind.passed() => Fate::Passes,
            None => Fate::IsTurnedAway,
        }
    }
}
