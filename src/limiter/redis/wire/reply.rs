//! The answers out of a script's reply.

use super::ask::{Item, Unit, Verb};
use super::form::Kind;
use super::{Answer, Ask, nonsense};
use crate::algorithm::{How, Pair, PairRules, Rules, block};
use crate::decision::{ChargeDecision, Decision, Several};
use crate::limiter::Effect;
use crate::limiter::redis::error::{RedisError, RedisErrorKind};
use crate::limiter::redis::value::Value;
use crate::quota::Quota;

/// What a script answers for a key. Each is one byte in front of what belongs to it.
mod status {
    /// There is no state.
    pub(super) const ABSENT: u8 = 0;
    /// The state that was found follows.
    pub(super) const FOUND: u8 = 1;
    /// The decision about a trail follows.
    pub(super) const TOLD: u8 = 2;
    /// Of the whole request: a value has to be converted.
    pub(super) const AGAIN: u8 = 3;
    /// Of the whole request: a value is not one of ours.
    pub(super) const FOREIGN: u8 = 4;
    /// Of the whole request: a length of 16 bits and Redis' own words follow.
    pub(super) const FAILED: u8 = 5;
    /// A refund or a reset was done.
    pub(super) const DONE: u8 = 6;
    /// Two decisions about a trail follow, each with its own `TOLD`: as asked, and how it stands.
    pub(super) const TOLD_BOTH: u8 = 7;
}

/// What follows `TOLD`.
const TOLD_BYTES: usize = 1 + 6 * size_of::<f64>();

/// What became of each request, in their order.
///
/// # Errors
/// If the reply is not one of our scripts'.
pub(in crate::limiter::redis) fn answers(asks: &[&Ask], reply: Value) -> Result<Vec<Answer>, RedisError> {
    let Value::Bytes(bytes) = reply else { return Err(nonsense()) };
    let mut reader = Reader(&bytes);
    let read = |reader: &mut Reader<'_>| {
        let now = reader.whole()?.min(crate::time::CLOCK_US_MAX);
        let answers = asks.iter().map(|ask| reader.answer(ask, now)).collect::<Option<Vec<Answer>>>()?;
        reader.0.is_empty().then_some(answers)
    };
    read(&mut reader).ok_or_else(nonsense)
}

/// Redis' words for a key of a slot that is being moved, and that is not here. They come before anything is written.
const NOT_HERE: &str = "non local key";

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    fn float(&mut self) -> Option<f64> {
        self.take().map(f64::from_le_bytes)
    }

    /// A whole number; one below zero or that is no number reads as 0, and none is above 2^53.
    fn whole(&mut self) -> Option<u64> {
        self.float().map(|number| (number as u64).min(1 << 53))
    }

    /// A request's answer; nothing if the reply makes no sense.
    fn answer(&mut self, ask: &Ask, now: u64) -> Option<Answer> {
        match ask.verb {
            Verb::Refund | Verb::Reset => self.done(ask),
            Verb::Take | Verb::Peek => {
                if let Some(first) = ask.units.first() {
                    if let Some(answer) = self.failure(first)? {
                        return Some(answer);
                    }
                }
                let states = Reader(self.0);
                let mut charges = Several::new();
                for unit in &ask.units {
                    self.unit(unit, now, &mut charges)?;
                }
                let counts = |(item, decision): (&Item, &ChargeDecision)| !item.binds() || decision.is_allowed();
                let allowed = ask.items().zip(&charges).all(counts);
                if !allowed && charges.len() > 1 {
                    states.stand(ask, now, &mut charges)?;
                }
                if !allowed || ask.verb == Verb::Peek {
                    charges.iter_mut().for_each(ChargeDecision::untaken);
                }
                Some(Answer::Decided(Decision::new(allowed, ordered(charges, ask.order.as_deref()))))
            }
        }
    }

    /// Tells how each charge of a refused set stands that its own quota allows and that is not written. Of trails it is told
    /// by the script: in the place of what would have been taken, or behind it if nothing was to be.
    #[cold]
    #[inline(never)]
    fn stand(mut self, ask: &Ask, now: u64, charges: &mut Several) -> Option<()> {
        let mut charges = charges.iter_mut();
        for unit in &ask.units {
            let [status] = self.take()?;
            if let status::TOLD | status::TOLD_BOTH = status {
                let (item, charge) = (unit.items.first()?.as_ref()?, charges.next()?);
                if status == status::TOLD_BOTH {
                    self.take::<{ 1 + TOLD_BYTES + 1 }>()?;
                }
                let told = self.told(item)?;
                if charge.is_allowed() {
                    *charge = told;
                }
                continue;
            }
            for (quota, item) in unit.states() {
                let Rules::Pair(rules, _) = quota.rules() else { return None };
                let state = if status == status::FOUND { Some(self.state(quota, rules)?) } else { None };
                let Some(item) = item else { continue };
                let charge = charges.next()?;
                if charge.is_allowed() && !item.outlives_refusal() {
                    *charge = decide(rules, state, 0, now, How::IfAllowed);
                }
            }
        }
        Some(())
    }

    /// Of several the first failure.
    fn done(&mut self, ask: &Ask) -> Option<Answer> {
        let mut failed = None;
        for unit in &ask.units {
            match self.failure(unit)? {
                Some(answer) => failed = failed.or(Some(answer)),
                None if self.take()? == [status::DONE] => {}
                None => return None,
            }
        }
        Some(failed.unwrap_or(Answer::Done))
    }

    /// Why nothing was done for a request, if nothing was.
    fn failure(&mut self, unit: &Unit) -> Option<Option<Answer>> {
        let (first, rest) = self.0.split_first()?;
        let answer = match *first {
            status::AGAIN => Answer::Again,
            status::FOREIGN => Answer::Failed(foreign(unit)),
            status::FAILED => {
                self.0 = rest;
                let length = usize::from(u16::from_le_bytes(self.take()?));
                let (text, rest) = self.0.split_at_checked(length)?;
                self.0 = rest;
                let text = String::from_utf8_lossy(text);
                // What was deleted just before, in a slot that is being moved, is not there again before it is elsewhere.
                let is_away = text.contains(NOT_HERE);
                return Some(Some(if is_away { Answer::Elsewhere } else { Answer::Refused(text.into()) }));
            }
            _ => return Some(None),
        };
        self.0 = rest;
        Some(Some(answer))
    }

    /// The decisions about what is asked of a key.
    fn unit(&mut self, unit: &Unit, now: u64, charges: &mut Several) -> Option<()> {
        let [status] = self.take()?;
        if let status::TOLD | status::TOLD_BOTH = status {
            let item = unit.items.first()?.as_ref()?;
            if status == status::TOLD_BOTH {
                self.take::<1>()?;
            }
            charges.push(self.told(item)?);
            if status == status::TOLD_BOTH {
                self.take::<{ 1 + TOLD_BYTES }>()?;
            }
            return Some(());
        }
        if status != status::ABSENT && status != status::FOUND {
            return None;
        }
        for (quota, item) in unit.states() {
            let Rules::Pair(rules, _) = quota.rules() else { return None };
            let state = if status == status::FOUND { Some(self.state(quota, rules)?) } else { None };
            if let Some(item) = item {
                let how = how(item, charges);
                charges.push(decide(rules, state, item.cost, now, how));
            }
        }
        Some(())
    }

    fn state(&mut self, quota: &Quota, rules: &PairRules) -> Option<Pair> {
        let at = self.whole()?;
        Some(match (Kind::of(quota), rules) {
            (Kind::Whole, _) => Pair { at, n: 0 },
            (Kind::Block, _) => {
                let (span_us, counts) = (self.whole()?, self.whole()?);
                // What no block of ours has is as nothing.
                let is_ours = span_us < 1 << block::SPAN_BITS && counts < 1 << (64 - block::SPAN_BITS);
                Pair { at, n: if is_ours { block::pack(block::Parts { span_us, counts }) } else { u64::MAX } }
            }
            (_, PairRules::TwoCounters(counters)) => {
                let before = u32::from_le_bytes(self.take()?);
                counters.pair(at, before, u32::from_le_bytes(self.take()?))
            }
            _ => Pair { at, n: self.whole()? },
        })
    }

    /// The decision about a trail.
    fn told(&mut self, item: &Item) -> Option<ChargeDecision> {
        let quota = item.policy.quota();
        let Rules::Trail(_) = quota.rules() else { return None };
        let [ok] = self.take()?;
        let (remaining, reset_us, window_us) = (self.whole()?, self.whole()?, self.whole()?);
        let wait = self.float()?;
        let (units, start) = (self.whole()?, self.whole()?);
        let retry_us = match ok {
            0 if wait < 0.0 => None,
            0 => Some((wait as u64).clamp(1, 1 << 53)),
            _ => Some(0),
        };
        let decision = ChargeDecision::found(quota.capacity(), remaining, reset_us, window_us, retry_us);
        Some(decision.receipted(units, start, 0))
    }
}

/// The answers in the order of the charges. Of charges that were made one the first has the receipt.
pub(super) fn ordered(mut charges: Several, order: Option<&[usize]>) -> Several {
    let Some(order) = order else { return charges };
    let found = order.iter().map(|place| {
        let charge = charges.get_mut(*place)?;
        let receipt = charge.take_receipt();
        let told = charge.clone();
        Some(receipt.map_or_else(|| told.clone(), |receipt| told.clone().with_receipt(&receipt)))
    });
    found.map(|charge| charge.unwrap_or_else(ChargeDecision::blank)).collect()
}

/// What is told of a state, as the script has decided about it.
fn decide(rules: &PairRules, state: Option<Pair>, cost: u64, now: u64, how: How) -> ChargeDecision {
    // What somebody else wrote may be anything. Beside others what is not there is two zeros.
    let state = state.filter(|state| (state.at > 0 || state.n > 0) && rules.could_be(*state));
    rules.decide_how(state, now, cost, how).decision
}

/// How a charge was taken, after these answers to others.
fn how(item: &Item, answers: &[ChargeDecision]) -> How {
    match (&item.partners, item.effect) {
        (Some(partners), _) => {
            let denied = |place: &usize| answers.get(*place).is_some_and(|answer| !answer.is_allowed());
            How::OnRefusal { refused: partners.refused || partners.places.iter().any(denied) }
        }
        (None, Effect::Force) => How::Force,
        _ => How::IfAllowed,
    }
}

/// It names the policy and what all keys of the prefix begin with: the caller's key may be a secret.
fn foreign(unit: &Unit) -> RedisError {
    let policy = unit.items.iter().flatten().next().map_or("", |item| item.policy.name());
    let prefix = unit.key.split(|byte| *byte == b'{').next().unwrap_or_default().escape_ascii();
    RedisError::new(
        RedisErrorKind::Foreign,
        format!(
            "what is stored for the policy \"{policy}\" under a key of {} bytes is not a state of this version's: something \
             else uses keys that begin with `{prefix}`; delete it (redis-cli --scan --pattern '{prefix}*' lists them), or \
             choose another prefix",
            unit.key.len()
        ),
    )
}
