//! Several charges whose states are all words that are there: the usual case of a request's policies.
//!
//! Each state is read and decided; when all pass, each is locked as it was read, and then all are written. Who cannot lock
//! lets go and takes the way that waits ([`many`](super::many)); so nobody who holds a slot here waits for another. From
//! the moment the last is locked until the first is written all of them are as they were decided on: then the set takes
//! effect.

use crate::algorithm::gcra::Gcra;
use crate::algorithm::one_unit::Verdict;
use crate::algorithm::{Answer, How, Layout, Next, PairRules, Rules, WordLayout};
use crate::decision::{ChargeDecision, Receipt, Several};
use crate::limiter::{Charge, Effect};

use super::registry::UNNAMED;
use super::store::Store;
use super::words::{Found, NO_STATE, Now, Seen};

/// So many states need no memory of their own.
const INLINE: usize = 4;

/// A state that was read, and the word that is to replace it.
#[derive(Clone, Copy)]
struct Planned {
    seen: Seen,
    word: u64,
}

impl Planned {
    /// In the place of one.
    const NOTHING: Self = Self { seen: Seen::NOTHING, word: 0 };

    fn writes(&self) -> bool {
        self.word != self.seen.word
    }
}

/// What is known of charges whose states were read.
enum Set {
    Passes,
    Refused,
    /// The refusal itself is to be written.
    Mends,
}

impl Store {
    /// Takes all charges or none, and says which, if this is the usual case; else nothing was done.
    #[inline(always)]
    pub(super) fn charge_words(&self, charges: &[Charge<'_>], now: Now, decisions: &mut Several) -> Option<bool> {
        let (mut few, mut many) = ([Planned::NOTHING; INLINE], Vec::new());
        let planned = match few.get_mut(..charges.len()) {
            Some(planned) => planned,
            None => {
                many.resize(charges.len(), Planned::NOTHING);
                many.as_mut_slice()
            }
        };
        let tell = |decision| {
            decisions.push(decision);
            Some(())
        };
        match self.plan(charges, now, planned, tell)? {
            Set::Passes => self.write(planned).then_some(true),
            // It holds at the instant at which a refusing state was read.
            Set::Refused => {
                refused(charges, planned, decisions, now);
                Some(false)
            }
            Set::Mends => None,
        }
    }

    /// Takes all charges, if they pass and this is the usual case, and tells their receipts only; else nothing was done.
    #[inline(never)]
    pub(super) fn charge_quietly(&self, charges: &[Charge<'_>], receipts: &mut [Receipt]) -> bool {
        let mut planned = [Planned::NOTHING; INLINE];
        let Some(planned) = planned.get_mut(..charges.len()) else { return false };
        let mut receipts = receipts.iter_mut();
        let tell = |mut decision: ChargeDecision| {
            if !decision.is_allowed() {
                return None;
            }
            *receipts.next()? = decision.take_receipt().unwrap_or(Receipt::NOTHING);
            Some(())
        };
        self.plan(charges, self.now(), planned, tell).is_some() && self.write(planned)
    }

    /// Reads and decides, and tells each decision, as long as somebody wants to know.
    #[inline(always)]
    fn plan(
        &self,
        charges: &[Charge<'_>],
        now: Now,
        planned: &mut [Planned],
        mut tell: impl FnMut(ChargeDecision) -> Option<()>,
    ) -> Option<Set> {
        let mut set = Set::Passes;
        for (charge, plan) in charges.iter().zip(planned) {
            if matches!(charge.effect, Effect::OnRefusal { .. }) {
                return None;
            }
            let Rules::Pair(rules, Layout::Word(layout)) = charge.policy.quota().rules() else { return None };
            let version = self.version(charge.policy);
            let key = self.fingerprint(charge.policy, charge.key);
            let Found::Slot(seen) = self.words.find_quietly(key, version) else { return None };
            if version == UNNAMED {
                return None;
            }
            let how = if charge.effect == Effect::Force { How::Force } else { How::IfAllowed };
            let (decision, word) = decide(rules, *layout, seen, now, charge.cost, how)?;
            *plan = Planned { seen, word };
            if charge.effect == Effect::Enforce && !decision.is_allowed() {
                set = if plan.writes() || matches!(set, Set::Mends) { Set::Mends } else { Set::Refused };
            }
            tell(decision)?;
        }
        Some(set)
    }

    /// Writes all states as planned, or none, if one of them has changed.
    #[inline(always)]
    fn write(&self, planned: &[Planned]) -> bool {
        for (at, plan) in planned.iter().enumerate() {
            // A state that two charges are for is not locked twice.
            if plan.writes() && !self.words.lock(plan.seen) {
                let locked = planned.iter().take(at).filter(|plan| plan.writes());
                locked.for_each(|plan| self.words.unlock(plan.seen, plan.seen.word));
                return false;
            }
        }
        planned.iter().filter(|plan| plan.writes()).for_each(|plan| self.words.unlock(plan.seen, plan.word));
        true
    }
}

/// The decision, and the word to write: that which is there if nothing is to be written. Nothing if `now` may be older than
/// the state.
#[inline(always)]
fn decide(
    rules: &PairRules,
    layout: WordLayout,
    seen: Seen,
    now: Now,
    cost: u64,
    how: How,
) -> Option<(ChargeDecision, u64)> {
    // One unit of a bucket, as where it is the only charge.
    if let (PairRules::Gcra(Gcra { one_unit: Some(unit), .. }), 1, How::IfAllowed) = (rules, cost, how) {
        if let Some(verdict) = unit.look(WordLayout::unpack_ahead(seen.word, now)) {
            let word = match verdict {
                Verdict::Allowed { ahead, .. } => WordLayout::pack_ahead(ahead, now),
                Verdict::Denied { .. } => seen.word,
            };
            return Some((unit.tell(verdict, now.at), word));
        }
    }
    let state = layout.unpack(seen.word, now);
    if state.is_some_and(|state| rules.is_clamped(state, now.at)) {
        return None;
    }
    let Answer { decision, next } = rules.decide_how(state, now.at, cost, how);
    let word = match next {
        Next::Keep => seen.word,
        Next::Set(state) => layout.pack(state, now),
        Next::Clear => NO_STATE,
    };
    Some((decision, word))
}

/// What is told of a refused set: each that its own quota allows as it stands.
#[cold]
#[inline(never)]
fn refused(charges: &[Charge<'_>], planned: &[Planned], decisions: &mut Several, now: Now) {
    for ((charge, Planned { seen, .. }), decision) in charges.iter().zip(planned).zip(decisions) {
        if let (true, Rules::Pair(rules, Layout::Word(layout))) = (decision.is_allowed(), charge.policy.quota().rules())
        {
            *decision = rules.decide(layout.unpack(seen.word, now), now.at, 0, false).decision;
        }
        decision.untaken();
    }
}
