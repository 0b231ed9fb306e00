//! Reads the answers in the script's reply.

use smallvec::SmallVec;

use super::charge::WireCharge;
use super::encode::StateKind;
use super::request::{WireOperation, WireRequest};
use super::{RedisAnswer, nonsense};
use crate::algorithm::{Decider, Pair, PairDecider, TakeMode, block};
use crate::base::time::Timestamp;
use crate::decision::{ChargeDecision, Decision, Receipt, Several};
use crate::event::StoreErrorKind;
use crate::limiter::redis::error::RedisError;
use crate::limiter::redis::keys;
use crate::limiter::remote::{CurrentRow, ROW_MISSING};

/// The first byte of the script's answer for a key or a request.
mod status {
    /// The key has no state.
    pub(super) const ABSENT: u8 = 0;
    /// The state that the script found follows.
    pub(super) const FOUND: u8 = 1;
    /// The script's decision about a list follows.
    pub(super) const TOLD: u8 = 2;
    /// The whole request fails, because one of its values was not written by this crate.
    pub(super) const FOREIGN: u8 = 3;
    /// The whole request fails, because Redis refused a command. A length of 16 bits and Redis' words follow.
    pub(super) const FAILED: u8 = 4;
    /// A refund or a reset is done.
    pub(super) const DONE: u8 = 5;
    /// A refund had no effect, because a later slot of the queue is taken.
    pub(super) const BEHIND: u8 = 6;
    /// The number of held units follows, and then the notes of the answer.
    pub(super) const HELD: u8 = 7;
    /// The whole request fails, because a row is of a later epoch. The charge's index, the row's resets and its epoch
    /// follow.
    pub(super) const REFUSED: u8 = 8;
    /// Units were returned, or a row renewed, although there was no row.
    pub(super) const MISSING: u8 = 9;
    /// The whole request fails, because the server's time is not in the window that the request named.
    pub(super) const OUTSIDE: u8 = 10;
}

/// Redis' words for a key of a slot that is being moved, when the key is not on this server. Redis returns
/// this error before anything is written.
const NOT_HERE: &str = "non local key";

/// The maximum number of keys that an error names.
const SHOWN: usize = 8;

/// Returns the answer to each request of the call with this number, in the order of the requests. `refused` makes an
/// error from Redis' words.
///
/// # Errors
/// Returns an error if the reply is not the script's reply to this call.
pub(in crate::limiter::redis) fn answers(
    requests: &[&WireRequest],
    number: u64,
    reply: &[u8],
    refused: &dyn Fn(&str) -> RedisError,
) -> Result<Vec<Result<RedisAnswer, RedisError>>, RedisError> {
    let mut reader = Reader { left: reply, refused };
    let read = |reader: &mut Reader<'_>| {
        if u64::from_le_bytes(reader.take()?) != number {
            return None;
        }
        let now = reader.whole()?.min(crate::base::time::CLOCK_US_MAX);
        let mut answers = Vec::with_capacity(requests.len()); // `collect` would reserve room for four
        for request in requests {
            answers.push(reader.answer(request, now)?);
        }
        reader.left.is_empty().then_some(answers)
    };
    read(&mut reader).ok_or_else(nonsense)
}

/// Returns the time at which the script ran. The time is the server's time, unless the call named the time of the
/// limiter's own clock.
pub(in crate::limiter::redis) fn time_of(reply: &[u8]) -> Option<Timestamp> {
    let refused = |words: &str| RedisError::new(StoreErrorKind::Foreign, words.to_owned());
    let mut reader = Reader { left: reply.get(size_of::<u64>()..)?, refused: &refused };
    reader.whole().map(Timestamp::from_micros)
}

struct Reader<'a> {
    left: &'a [u8],
    refused: &'a dyn Fn(&str) -> RedisError,
}

/// The state that the script found for a charge.
enum FoundState {
    /// The state before the charge. The algorithm repeats the script's decision from this state.
    State(Option<Pair>),
    Told(ChargeDecision),
    /// The units that were held before the charge, and the notes of the answer.
    Held(u64, u8),
}

/// Notes on the answer to a charge of units that are held.
mod notes {
    /// Set if there is no room for a row of this process.
    pub(super) const NO_ROOM: u8 = 1;
    /// Set if there was no row of this process.
    pub(super) const MISSING: u8 = 2;
}

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.left.split_first_chunk()?;
        self.left = rest;
        Some(*first)
    }

    fn float(&mut self) -> Option<f64> {
        self.take().map(f64::from_le_bytes)
    }

    /// Reads a whole number of at most 2^53. A negative number, or a value that is not a number, counts as 0.
    fn whole(&mut self) -> Option<u64> {
        self.float().map(|number| (number as u64).min(1 << 53))
    }

    /// Returns a request's answer, or `None` if the reply makes no sense.
    fn answer(&mut self, request: &WireRequest, now: u64) -> Option<Result<RedisAnswer, RedisError>> {
        let (status, rest) = self.left.split_first()?;
        match *status {
            status::FOREIGN => {
                self.left = rest;
                Some(Err(foreign(request)))
            }
            status::FAILED => {
                self.left = rest;
                let length = usize::from(u16::from_le_bytes(self.take()?));
                let (words, rest) = self.left.split_at_checked(length)?;
                self.left = rest;
                let words = String::from_utf8_lossy(words);
                // If the slot is being moved and the key was just deleted, this server cannot write the key again.
                Some(if words.contains(NOT_HERE) {
                    Ok(RedisAnswer::Elsewhere)
                } else {
                    Err(naming_keys((self.refused)(&words), request))
                })
            }
            status::OUTSIDE => {
                self.left = rest;
                Some(Ok(RedisAnswer::Outside(Timestamp::from_micros(now))))
            }
            status::REFUSED => {
                self.left = rest;
                let place = usize::from(u16::from_le_bytes(self.take()?));
                let row = CurrentRow { resets: u32::from_le_bytes(self.take()?), epoch: self.whole()? };
                Some(Ok(RedisAnswer::Refused(place, row)))
            }
            _ if matches!(
                request.operation,
                WireOperation::Refund | WireOperation::Reset | WireOperation::ResetPlaces
            ) =>
            {
                match self.take()? {
                    [status::DONE] => Some(Ok(RedisAnswer::Done)),
                    [status::MISSING] if request.operation == WireOperation::Refund => Some(Ok(RedisAnswer::Missing)),
                    [status::BEHIND] if request.operation == WireOperation::Refund => Some(Ok(RedisAnswer::Behind)),
                    _ => None,
                }
            }
            _ => Some(Ok(RedisAnswer::Decided(self.decision(request, now)?))),
        }
    }

    fn decision(&mut self, request: &WireRequest, now: u64) -> Option<Decision> {
        let charges = &request.charges;
        let mut states: SmallVec<[Option<FoundState>; 2]> = SmallVec::new();
        let mut decisions = Several::new();
        for charge in charges {
            let found = self.found(charge)?;
            let denied = |place: usize| decisions.get(place).is_some_and(|one: &ChargeDecision| !one.is_allowed());
            let how = charge.how(denied);
            let (found, decision) = match found {
                FoundState::State(state) => (Some(found), decide(charge, state, charge.cost, now, how)),
                FoundState::Held(held, notes) => (Some(found), decide_places(charge, held, notes, charge.cost, how)),
                FoundState::Told(decision) => (None, decision),
            };
            states.push(found);
            decisions.push(decision);
        }
        let allowed = charges.iter().zip(&decisions).all(|(charge, decision)| !charge.binds() || decision.is_allowed());
        if !allowed || request.operation == WireOperation::Peek {
            decisions.iter_mut().for_each(ChargeDecision::untaken);
        }
        if !allowed {
            // A charge that its own quota allows is reported with the units that are left. If the state is a list, the
            // script's reply already has the number of units that are left.
            for ((charge, found), decision) in charges.iter().zip(&states).zip(&mut decisions) {
                if !decision.is_allowed() || charge.outlives_refusal() {
                    continue;
                }
                match found {
                    Some(FoundState::State(state)) => *decision = decide(charge, *state, 0, now, TakeMode::IfAllowed),
                    Some(FoundState::Held(held, _)) => {
                        *decision = decide_places(charge, *held, 0, 0, TakeMode::IfAllowed)
                    }
                    Some(FoundState::Told(_)) | None => {}
                }
            }
        }
        // In a receipt of held units, the numbers have a meaning of their own: the units that were taken, and whether
        // the row is missing.
        for (found, decision) in states.iter().zip(&mut decisions) {
            if let Some(FoundState::Held(_, notes)) = found {
                let taken = decision.taken();
                let row = if notes & notes::MISSING == 0 { 0 } else { ROW_MISSING };
                decision.put_receipt(Receipt::new(taken, row, 0));
            }
        }
        Some(Decision::new(allowed, decisions))
    }

    fn found(&mut self, charge: &WireCharge) -> Option<FoundState> {
        let quota = charge.policy.quota();
        let [status] = self.take()?;
        if let Decider::Places(_) = quota.decider() {
            let held = if status == status::HELD { self.whole()? } else { return None };
            let [notes] = self.take()?;
            return Some(FoundState::Held(held, notes));
        }
        let Decider::Pair(decider, _) = quota.decider() else {
            return if status == status::TOLD { self.told(charge).map(FoundState::Told) } else { None };
        };
        match status {
            status::ABSENT => return Some(FoundState::State(None)),
            status::FOUND => {}
            _ => return None,
        }
        let at = self.whole()?;
        let state = match (StateKind::of(quota), decider) {
            (StateKind::Whole, _) => Pair { at, n: 0 },
            (StateKind::Block, _) => {
                let (span_us, counts) = (self.whole()?, self.whole()?);
                // Numbers that are too large for a block become `u64::MAX`. No block has this number, so the state
                // counts as missing, see below.
                let is_ours = span_us < 1 << block::SPAN_BITS && counts < 1 << (64 - block::SPAN_BITS);
                Pair { at, n: if is_ours { block::pack(block::BlockParts { span_us, counts }) } else { u64::MAX } }
            }
            (StateKind::Calendar, _) => {
                let state = Pair { at, n: self.whole()? };
                self.float()?; // the start, which follows from the end
                state
            }
            (_, PairDecider::TwoCounterWindow(counters)) => {
                let before = u32::from_le_bytes(self.take()?);
                counters.pair(at, before, u32::from_le_bytes(self.take()?))
            }
            _ => Pair { at, n: self.whole()? },
        };
        // Ignores a state that the algorithm cannot have, because the stored value may be anything.
        Some(FoundState::State(Some(state).filter(|state| decider.get().could_be(*state))))
    }

    /// Reads the decision about a list.
    fn told(&mut self, charge: &WireCharge) -> Option<ChargeDecision> {
        let [ok] = self.take()?;
        let (remaining, reset_us, window_us) = (self.whole()?, self.whole()?, self.whole()?);
        let wait = self.float()?;
        let (units, start) = (self.whole()?, self.whole()?);
        let retry_us = match ok {
            0 if wait < 0.0 => None,
            0 => Some((wait as u64).clamp(1, 1 << 53)),
            _ => Some(0),
        };
        // Bounds the numbers, because a server that is not Redis may send anything.
        let limit = charge.policy.quota().capacity();
        let (remaining, units) = (remaining.min(limit), units.min(charge.cost));
        Some(ChargeDecision::found(limit, remaining, reset_us, window_us, retry_us).receipted(units, start, 0))
    }
}

/// Returns the decision about a charge of this state. The script's decision is the same.
fn decide(charge: &WireCharge, state: Option<Pair>, cost: u64, now: u64, how: TakeMode) -> ChargeDecision {
    match charge.policy.quota().decider() {
        Decider::Pair(decider, _) => decider.decide_how(state, now, cost, how).decision,
        // The script decides about lists, and `decide_places` decides about concurrency limits.
        Decider::EntryLog(_) | Decider::Places(_) => ChargeDecision::blank(),
    }
}

/// Returns the decision about a charge while these units are held. The script's decision is the same.
fn decide_places(charge: &WireCharge, held: u64, notes: u8, cost: u64, how: TakeMode) -> ChargeDecision {
    let Decider::Places(places) = charge.policy.quota().decider() else { return ChargeDecision::blank() };
    let decision = places.describe(places.look(held, cost, how), 0);
    if notes & notes::NO_ROOM == 0 || !decision.is_allowed() {
        return decision;
    }
    places.decide_without_room(held, how)
}

fn foreign(request: &WireRequest) -> RedisError {
    let policy = request.charges.first().map_or("", |charge| charge.policy.name());
    let message = format!(
        "this version cannot read the state of the policy \"{policy}\": another program or version uses such \
         keys; delete the key, or choose another prefix"
    );
    naming_keys(RedisError::new(StoreErrorKind::Foreign, message), request)
}

/// Names the stored keys in an error that is about a stored value. The names are hashes, because a caller's
/// key may be a secret.
fn naming_keys(error: RedisError, request: &WireRequest) -> RedisError {
    if error.kind() != StoreErrorKind::Foreign {
        return error;
    }
    let keys: Vec<_> = request.charges.iter().take(SHOWN).map(|charge| keys::shown(&charge.key)).collect();
    let which = if keys.len() > 1 { "one of the keys" } else { "the key" };
    RedisError::new(error.kind(), format!("{error} ({which} `{}`)", keys.join("`, `")))
}
