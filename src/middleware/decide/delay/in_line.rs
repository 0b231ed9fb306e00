//! Requests that wait in line for units of concurrency limits or, if the caller allows it, of any quota.
//!
//! A request that waits in line holds nothing. When the request's turn comes, the layer asks the limiter for all of
//! the request's charges again. If another concurrency limit denies the charges, the request moves to the line of that
//! limit, and keeps its number in line. If anything else denies the charges, the request waits no more.
//!
//! Some charges count refusals: the strikes of blocks, and charges to quotas that count denied requests. Each of
//! these charges counts a refused request once, although the layer asks the limiter several times. While a request
//! may still wait, the layer only peeks at an enforced block. If a quota counts denied requests, the layer peeks
//! at the whole set, and takes it only if the peek allows it. For the final decision, the layer asks the limiter
//! for all charges.
//!
//! A message may also wait for units that become free with time. The message waits for these units in a line of the
//! layer, and asks again at the instant that the limiter named. The message asks only when no earlier message waits for
//! units of one of its charges. If the line of one of these charges is full, the message is refused.
//!
//! A request asks again under the quotas that are in force then.
//!
//! If a limiter's store counts the units of many processes, the layer asks the limiter again and again, which
//! takes many calls. One failed call does not end the wait, but several failed calls in a row do.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http::Request;
use smallvec::SmallVec;

use super::delays::Counted;
use super::wait::{ReportedWait, report_began, report_ended};
use crate::base::head::Head;
use crate::base::sync::contained;
use crate::base::time::micros_floor;
use crate::base::wait::Wait;
use crate::decision::{ChargeDecision, Decision};
use crate::key::Key;
use crate::limiter::{
    AskTurn, BoundedTurn, Charge, Effect, Limiter, LineStep, LineTurn, Reply, ReplyFuture, supports_in_layer,
};
use crate::middleware::compiled::Compiled;
use crate::middleware::decide::kind::OutcomeCause;
use crate::middleware::decide::linked;
use crate::middleware::ticket::{Charged, Ticket, effect_of, is_strike};
use crate::mode::Mode;
use crate::outcome::OutcomeKind;
use crate::policy::Policy;

impl Ticket {
    /// Returns whether the request may wait in line before it passes or is refused.
    #[inline]
    pub(crate) fn goes_in_line<L: Limiter>(&self, layer: &Compiled<L>) -> bool {
        layer.has_lines() && (self.is_left_to_line || self.line_to_join(layer, Duration::ZERO).is_some())
    }

    /// Returns whether a refusal must not count yet, because the request may wait in line after the
    /// refusal.
    pub(crate) fn has_to_be_tried<L: Limiter>(&self, layer: &Compiled<L>) -> bool {
        layer.has_lines()
            && self.charges.iter().any(|charged| may_wait(layer, charged, Duration::ZERO))
            && self.refusal_counts(layer)
    }

    /// Returns whether one of the charges would count the request's refusal.
    pub(crate) fn refusal_counts<L: Limiter>(&self, layer: &Compiled<L>) -> bool {
        self.charges.iter().any(|charged| counts_refusals(layer, charged))
    }

    /// Returns the index of the charge in whose line the request waits: the first charge that refuses it. Returns
    /// `None` if a charge that refuses it allows no wait. A charge of a concurrency limit allows the wait of its
    /// quota, and any other charge allows `rates_wait`.
    pub(crate) fn line_to_join<L: Limiter>(&self, layer: &Compiled<L>, rates_wait: Duration) -> Option<usize> {
        if self.kind != OutcomeKind::Limited {
            return None;
        }
        let mut refusing = (0..self.answered().len()).filter(|at| linked::refuses(&self.charges, *at)).peekable();
        let first = *refusing.peek()?;
        let waits = |at: usize| {
            let charged = self.charges.get(at)?;
            let can_pass = match charged.decision.wait() {
                Wait::Unknown => is_of_places(layer, charged),
                Wait::After(_) => !is_of_places(layer, charged),
                _ => false,
            };
            (can_pass && may_wait(layer, charged, rates_wait)).then_some(())
        };
        refusing.all(|at| waits(at).is_some()).then_some(first)
    }

    /// Returns the index of the first charge in whose line earlier messages wait for units that become free with
    /// time. Messages with a number below `number` are earlier. If `number` is `None`, every message in the line
    /// is earlier.
    pub(crate) fn line_ahead<L: Limiter>(&self, layer: &Compiled<L>, number: Option<u64>) -> Option<usize> {
        let asks = &layer.delays.as_ref()?.asks;
        let has_earlier = |policy: &Policy, key: &Key| match number {
            Some(number) => asks.has_before(policy, key, number),
            None => asks.has_line(policy, key),
        };
        let is_ahead = |charged: &Charged| {
            let is_enforced = charged.effect == Effect::Enforce && charged.mode == Mode::Enforce && charged.cost > 0;
            is_enforced && charged.policy_in(layer).is_some_and(|policy| has_earlier(policy, &charged.key))
        };
        self.charges.iter().position(is_ahead)
    }
}

/// Returns whether a request may wait in line if this charge is denied.
fn may_wait<L: Limiter>(layer: &Compiled<L>, charged: &Charged, rates_wait: Duration) -> bool {
    let is_enforced = charged.effect == Effect::Enforce && charged.mode == Mode::Enforce;
    is_enforced && !line_wait(layer, charged, rates_wait).is_zero()
}

fn line_wait<L: Limiter>(layer: &Compiled<L>, charged: &Charged, rates_wait: Duration) -> Duration {
    match charged.policy_in(layer) {
        Some(policy) if policy.limits_in_flight() => policy.quota().wait_in_line(),
        _ => rates_wait,
    }
}

fn is_of_places<L: Limiter>(layer: &Compiled<L>, charged: &Charged) -> bool {
    charged.policy_in(layer).is_some_and(Policy::limits_in_flight)
}

/// Returns whether this charge may count a refusal of the request.
fn counts_refusals<L: Limiter>(layer: &Compiled<L>, charged: &Charged) -> bool {
    matches!(charged.effect, Effect::OnRefusal { .. }) || counts_denied(layer, charged)
}

fn counts_denied<L: Limiter>(layer: &Compiled<L>, charged: &Charged) -> bool {
    charged.policy_in(layer).is_some_and(|policy| policy.quota().counts_denied())
}

/// A request that may wait in line, until it passes or is refused.
///
/// If this value is dropped before the request passes or is refused, the request leaves its line,
/// and the observer sees the outcome [`Abandoned`](OutcomeKind::Abandoned).
pub(crate) struct InLine<B, L: Limiter> {
    layer: Arc<Compiled<L>>,
    /// The request and the state of its charges, until the request is decided.
    held: Option<(Request<B>, Ticket)>,
    state: InLineState<L>,
    /// The instant of the layer's timer at which the request came.
    came: Duration,
    /// How long the request may wait for quotas other than concurrency limits.
    rates_wait: Duration,
    /// The request's turn, and the index of the charge in whose line it waits.
    turn: Option<(LineTurn, usize)>,
    /// The number that the request has in lines for units of concurrency limits.
    number: Option<u64>,
    /// The number that a message has in the layer's own lines, from its first line on.
    asks_number: Option<u64>,
    counted: Option<Counted>,
    /// The wait in a line that was reported to the observer.
    reported: Option<ReportedWait>,
    /// The number of consecutive calls that have failed.
    failures: u32,
}

/// The state of a request in line.
enum InLineState<L: Limiter> {
    /// The request waits for its turn.
    Waits,
    /// The limiter says whether it would take all charges.
    Peeks(LineAnswer<L>),
    /// The limiter takes all charges, or takes none and counts no refusal.
    Takes(LineAnswer<L>),
    /// The limiter is asked for the last time, and decides.
    Decides(LineAnswer<L>),
    /// The request is decided.
    Over,
}

/// A limiter's answer. The answer is boxed, because most requests do not wait, and their futures should not have room
/// for an answer.
type LineAnswer<L> = Pin<Box<ReplyFuture<Decision, <L as Limiter>::Error, <L as Limiter>::Future<Decision>>>>;

/// How the limiter is asked.
#[derive(Clone, Copy, PartialEq)]
enum How {
    Peek,
    /// Enforced blocks are only looked at.
    Try,
    AtLast,
}

impl<B, L: Limiter> InLine<B, L> {
    /// Begins the wait of a request that [goes in line](Ticket::goes_in_line).
    pub(crate) fn new(layer: &Arc<Compiled<L>>, request: Request<B>, ticket: Ticket) -> Box<Self> {
        Self::waiting(layer, request, ticket, Duration::ZERO)
    }

    /// Begins the wait of a request that was refused, or about which the limiter is first asked in line. For
    /// quotas other than concurrency limits, the request may wait for up to `rates_wait`.
    pub(crate) fn waiting(
        layer: &Arc<Compiled<L>>,
        request: Request<B>,
        ticket: Ticket,
        rates_wait: Duration,
    ) -> Box<Self> {
        let came = layer.delays.as_ref().map_or(Duration::ZERO, |delays| delays.now());
        let is_to_be_tried = ticket.is_left_to_line;
        let ahead = if is_to_be_tried && !rates_wait.is_zero() { ticket.line_ahead(layer, None) } else { None };
        let mut in_line = Box::new(Self {
            layer: Arc::clone(layer),
            held: Some((request, ticket)),
            state: InLineState::Over,
            came,
            rates_wait,
            turn: None,
            number: None,
            asks_number: None,
            counted: None,
            reported: None,
            failures: 0,
        });
        match ahead {
            Some(at) => in_line.wait_behind(at),
            None if is_to_be_tried => in_line.try_again(),
            None => in_line.weigh(),
        }
        in_line
    }

    /// Returns `Ready` when the request is decided.
    pub(crate) fn poll_decision(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            match &mut self.state {
                InLineState::Waits => match self.turn.as_mut().map(|(turn, _)| turn.poll(cx)) {
                    Some(Poll::Pending) => return Poll::Pending,
                    Some(Poll::Ready(LineStep::Asks)) => self.take_turn(),
                    Some(Poll::Ready(LineStep::GivesUp)) | None => {
                        self.follow_modes();
                        self.follow_quotas();
                        self.state = self.ask(How::AtLast).map_or(InLineState::Over, InLineState::Decides)
                    }
                },
                InLineState::Peeks(reply) => {
                    let answer = ready!(reply.as_mut().poll(cx));
                    if self.waits_on(answer.is_err()) {
                        self.state = InLineState::Waits;
                    } else if answer.as_ref().is_ok_and(Decision::is_allowed) {
                        self.state = self.ask(How::Try).map_or(InLineState::Over, InLineState::Takes);
                    } else {
                        self.answer(answer);
                        self.weigh();
                    }
                }
                InLineState::Takes(reply) => {
                    let answer = ready!(reply.as_mut().poll(cx));
                    if self.waits_on(answer.is_err()) {
                        self.state = InLineState::Waits;
                    } else {
                        self.answer(answer);
                        self.weigh();
                    }
                }
                InLineState::Decides(reply) => {
                    let answer = ready!(reply.as_mut().poll(cx));
                    self.answer(answer);
                    self.state = InLineState::Over;
                }
                InLineState::Over => {
                    self.leave();
                    return Poll::Ready(());
                }
            }
        }
    }

    /// Takes the request out after it was decided. Returns `None` if it was taken out before.
    pub(crate) fn take(&mut self) -> Option<(Request<B>, Ticket)> {
        self.held.take()
    }

    /// Puts the message into the line of a charge, behind the messages that wait there, or refuses it if that
    /// line is full. The limiter is not asked, because it could admit the message before the messages in line.
    fn wait_behind(&mut self, at: usize) {
        if self.join(at) {
            self.state = InLineState::Waits;
            return;
        }
        self.state = InLineState::Over;
        let (layer, Some((_, ticket))) = (&self.layer, &mut self.held) else { return };
        (ticket.is_answered, ticket.is_left_to_line) = (true, false);
        for other in 0..ticket.charges.len() {
            let Some(charged) = ticket.charges.get_mut(other) else { return };
            let limit = charged.policy_in(layer).map_or(0, |policy| policy.quota().capacity());
            charged.decision = match other == at {
                true => ChargeDecision::denied(limit, 0, Wait::Unknown),
                false => ChargeDecision::unasked(limit),
            };
            let counts = matches!(charged.effect, Effect::OnRefusal { of } if (other.saturating_sub(of.into())..other).contains(&at));
            if counts && is_strike(layer, charged) {
                if let Some(block) = charged.policy_in(layer) {
                    layer.force(block, &charged.key, charged.cost);
                }
            }
        }
        ticket.decide(layer, OutcomeCause::NoRoomToWait);
    }

    /// Asks the limiter at the request's turn, unless an earlier message waits for units of another charge of the
    /// request.
    fn take_turn(&mut self) {
        let ahead = match (&self.held, self.asks_number) {
            (Some((_, ticket)), Some(number)) => ticket.line_ahead(&self.layer, Some(number)),
            _ => None,
        };
        match ahead.is_some_and(|at| self.join(at)) {
            true => self.state = InLineState::Waits,
            false => self.try_again(),
        }
    }

    /// Replaces the quotas of the request's charges with the present quotas of the rules, for all rates and not
    /// only for the rate that made the request wait. For concurrency limits, see [`Charged::policy_in_line`].
    fn follow_quotas(&mut self) {
        let (layer, Some((request, ticket))) = (&self.layer, &mut self.held) else { return };
        let head = Head::from(&*request);
        let is_rate = |policy: &Policy| policy.quota().algorithm().is_rate();
        for charged in ticket.charges.iter_mut().filter(|charged| charged.policy_in(layer).is_some_and(is_rate)) {
            let now = layer.policy_in_force(charged.policy, &head);
            let now = now.filter(|now| is_rate(now) && charged.policy_in(layer) != Some(now));
            if let Some(now) = now.filter(|now| supports_in_layer(&*layer.limiter, now.quota()).is_ok()) {
                charged.own = Some(now);
            }
        }
    }

    /// Charges the request according to the present modes of its rules, if these are milder than the modes
    /// that made the request wait.
    fn follow_modes(&mut self) {
        let (layer, Some((_, ticket))) = (&self.layer, &mut self.held) else { return };
        for at in 0..ticket.charges.len() {
            let Some(charged) = ticket.charges.get(at) else { return };
            // Skips the charge of a meter, which never makes a request wait.
            let is_plain = charged.effect == effect_of(charged.mode);
            if !is_plain && !is_strike(layer, charged) {
                continue;
            }
            let mode = layer.mode_now(charged.policy).map_or(charged.mode, |now| charged.mode.milder(now));
            if let Some(charged) = ticket.charges.get_mut(at).filter(|charged| charged.mode != mode) {
                charged.mode = mode;
                charged.effect = if is_plain { effect_of(mode) } else { charged.effect };
            }
        }
    }

    /// Asks the limiter for the request's charges. If the limiter refuses the request, it may wait.
    fn try_again(&mut self) {
        self.follow_modes();
        self.follow_quotas();
        let counts =
            |(_, ticket): &(_, Ticket)| ticket.charges.iter().any(|charged| counts_denied(&self.layer, charged));
        self.state = match self.held.as_ref().is_some_and(counts) {
            true => self.ask(How::Peek).map_or(InLineState::Over, InLineState::Peeks),
            false => self.ask(How::Try).map_or(InLineState::Over, InLineState::Takes),
        };
    }

    /// Asks the limiter for the request's charges. Returns `None` if there is no request any more.
    fn ask(&self, how: How) -> Option<LineAnswer<L>> {
        let (_, ticket) = self.held.as_ref()?;
        let policies: Vec<Option<Policy>> =
            ticket.charges.iter().map(|charged| charged.policy_in_line(&self.layer)).collect();
        let mut charges: SmallVec<[Charge<'_>; 4]> = SmallVec::new();
        for (charged, policy) in ticket.charges.iter().zip(&policies) {
            let Some(policy) = policy else { continue };
            let mut charge = charged.charge(policy);
            if how != How::AtLast && charged.mode == Mode::Enforce && is_strike(&self.layer, charged) {
                charge = charge.cost(0).effect(Effect::Enforce);
            }
            charges.push(match self.number {
                Some(number) => charge.arrived(number),
                None => charge,
            });
        }
        let reply: Reply<_, _, _> = match how {
            How::Peek => self.layer.limiter.peek(&charges),
            How::Try | How::AtLast => self.layer.limiter.take(&charges),
        };
        if let (Reply::Later(_), Some((turn, _))) = (&reply, &self.turn) {
            turn.note_sent();
        }
        Some(Box::pin(reply.into_future()))
    }

    /// Records whether a call has failed. Returns whether the request goes on waiting after a failed
    /// call.
    fn waits_on(&mut self, has_failed: bool) -> bool {
        self.failures = if has_failed { self.failures + 1 } else { 0 };
        has_failed && self.turn.as_ref().is_some_and(|(turn, _)| turn.outlasts(self.failures))
    }

    fn answer(&mut self, mut answer: Result<Decision, L::Error>) {
        if let Some((_, ticket)) = &mut self.held {
            (ticket.is_answered, ticket.is_left_to_line) = (false, false);
            ticket.answer(&self.layer, &mut answer);
        }
    }

    /// Chooses the next state after an answer that counted no refusal.
    fn weigh(&mut self) {
        let Some((_, ticket)) = &self.held else { return };
        let line = ticket.line_to_join(&self.layer, self.rates_wait);
        let is_counted = ticket.is_answered && !ticket.kind.passed() && ticket.refusal_counts(&self.layer);
        self.state = match line {
            Some(at) if self.join(at) => InLineState::Waits,
            _ if is_counted => self.ask(How::AtLast).map_or(InLineState::Over, InLineState::Decides),
            _ => InLineState::Over,
        };
    }

    /// Puts the request into the line of a charge, unless it waits there already. Returns whether the
    /// request waits.
    fn join(&mut self, at: usize) -> bool {
        let (layer, Some((_, ticket))) = (&self.layer, &self.held) else { return false };
        let (Some(delays), Some(charged)) = (&layer.delays, ticket.charges.get(at)) else { return false };
        let now = delays.now();
        let until = self.came.saturating_add(line_wait(layer, charged, self.rates_wait));
        let wait = charged.decision.wait().duration();
        if wait.is_some_and(|wait| now.saturating_add(wait) > until) {
            return false;
        }
        match &self.turn {
            Some((LineTurn::Places(_), own)) if *own == at => return true,
            Some((LineTurn::Asks(turn), own)) if *own == at => {
                turn.note_denied(wait.unwrap_or_default());
                return true;
            }
            _ => {}
        }
        let lines = layer.limiter.hooks().place_lines();
        let Some(policy) = charged.policy_in(layer).filter(|_| self.turn.is_none() || now < until) else {
            return false;
        };
        let is_of_places = policy.limits_in_flight();
        if is_of_places && lines.is_none() {
            return false;
        }
        if self.counted.is_none() {
            let has_room = match lines.filter(|_| is_of_places) {
                Some(lines) => delays.has_room_in_line(lines, policy, &charged.key),
                None => delays.has_room_to_ask(policy, &charged.key),
            };
            let Some(counted) = has_room.then(|| delays.count()).flatten() else { return false };
            self.counted = Some(counted);
        }
        // Calls the observer before the request joins a line, because the observer is the application's code and may
        // panic.
        report_ended(layer, self.reported.take());
        self.reported = report_began(layer, Some(policy));
        if self.asks_number.is_none() && !self.rates_wait.is_zero() {
            self.asks_number = Some(delays.asks.next_number());
        }
        let line = (policy, &charged.key);
        let turn = match lines.filter(|_| is_of_places) {
            Some(lines) => {
                let turn = BoundedTurn::join(lines, line, self.number, Arc::clone(&delays.timer), until);
                self.number = Some(turn.number());
                LineTurn::Places(turn)
            }
            None => {
                let until_us = micros_floor(until).min(u64::MAX - 1);
                let caller = (policy, &charged.key, charged.cost);
                LineTurn::Asks(AskTurn::join(&delays.asks, &delays.timer, caller, until_us, self.asks_number))
            }
        };
        self.turn = Some((turn, at)); // an earlier turn ends now
        true
    }

    /// Leaves the line, because the request passes or is refused.
    fn leave(&mut self) {
        let Some((turn, at)) = self.turn.take() else { return };
        if let Some((_, ticket)) = &mut self.held {
            let admitted = ticket
                .charges
                .get(at)
                .filter(|charged| ticket.kind.passed() && ticket.is_answered && charged.decision.is_allowed());
            match (turn, admitted) {
                (turn, Some(charged)) => {
                    // A switch raises the quotas of all requests in line at once, and wakes them.
                    let own_limit = charged.own.as_ref().map(|own| own.quota().limit());
                    turn.leave_admitted(std::iter::once(&charged.decision), own_limit);
                }
                (LineTurn::Asks(turn), None) if !ticket.is_answered => turn.leave_failed(),
                (turn, _) => drop(turn),
            }
            ticket.decide(&self.layer, OutcomeCause::WaitedInLine);
        }
        self.end_wait();
    }

    fn end_wait(&mut self) {
        self.counted = None;
        report_ended(&self.layer, self.reported.take());
    }
}

impl<B, L: Limiter> Drop for InLine<B, L> {
    fn drop(&mut self) {
        self.turn = None;
        // The observer is the application's code and may panic.
        contained(|| self.end_wait());
        if let Some((request, mut ticket)) = self.held.take() {
            ticket.report_dropped(&self.layer, &Head::from(&request));
        }
    }
}
