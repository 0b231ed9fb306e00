//! The next step of a request that was charged.

use super::delay::Counted;
use crate::decision::Decision;
use crate::headers::DueHeaders;
use crate::limiter::Limiter;
use crate::middleware::compiled::Compiled;
use crate::middleware::ticket::Ticket;

/// The next step of a request. `F` is the future of a limiter's answer.
pub(crate) enum NextStep<F> {
    /// The service is called. The request no longer needs its ticket. The response gets these headers, or no
    /// headers, and the observer has seen all that it needs.
    PassWithoutTicket(Option<DueHeaders>),
    /// The service is called, after the observer has seen the outcome in the ticket.
    Pass,
    /// The limiter answers later. Then [`Ticket::answer`] decides.
    AwaitAnswer(F),
    /// The request goes in line: it was refused and waits for units, or the limiter is first asked there.
    WaitInLine,
    /// The request waits in this place until it departs from its queues.
    WaitForDeparture(Counted),
    /// The request goes to the overflow, or is refused.
    TurnAway,
}

impl Ticket {
    /// Returns the next step of a request that is decided, or about which the limiter is first asked in line.
    #[inline]
    pub(crate) fn next_step<L: Limiter>(&mut self, layer: &Compiled<L>) -> NextStep<L::Future<Decision>> {
        // No request waits if the layer has no timer.
        if layer.delays.is_none() { self.pass_or_turn_away() } else { self.wait_or_go_on(layer) }
    }

    #[inline(never)]
    fn wait_or_go_on<L: Limiter>(&mut self, layer: &Compiled<L>) -> NextStep<L::Future<Decision>> {
        if self.goes_in_line(layer) { NextStep::WaitInLine } else { self.step_out_of_line(layer) }
    }

    /// Returns the next step of a request that does not wait in line any more.
    pub(crate) fn step_out_of_line<L: Limiter>(&mut self, layer: &Compiled<L>) -> NextStep<L::Future<Decision>> {
        match self.place_to_wait(layer) {
            Some(place) => NextStep::WaitForDeparture(place),
            None => self.pass_or_turn_away(),
        }
    }

    #[inline]
    fn pass_or_turn_away<F>(&self) -> NextStep<F> {
        if self.kind.passed() { NextStep::Pass } else { NextStep::TurnAway }
    }
}
