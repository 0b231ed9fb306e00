//! Several charges whose states are all words that are there: the usual case of a request's policies.
//!
//! Each state is read and decided; when all pass, each is locked as it was read, and then all are written. Who cannot lock
//! lets go and takes the way that waits ([`many`](super::many)); so nobody who holds a slot here waits for another. From
//! the moment the last is locked until the first is written all of them are as they were decided on: then the set takes
//! effect.

use smallvec::SmallVec;

use crate::algorithm::gcra::Gcra;
use crate::algorithm::one_unit::Verdict;
use crate::algorithm::{Answer, How, Layout, Next, PairRules, Rules, WordLayout};
use crate::decision::{ChargeDecision, Decision, Several};
use crate::limiter::{Charge, Effect};

use super::registry::UNNAMED;
use super::store::Store;
use super::words::{Now, Seen};

/// A state that was read, and the word that is to replace it.
struct Planned {
    seen: Seen,
    word: u64,
}

impl Store {
    /// Takes all charges or none, if this is the usual case; else nothing was done.
    pub(super) fn charge_words(&self, charges: &[Charge<'_>], now: Now) -> Option<Decision> {
        let mut decisions = Several::new();
        let mut planned: SmallVec<[Planned; 4]> = SmallVec::new();
        let mut allowed = true;
        let mut mends = false;
        for charge in charges {
            if matches!(charge.effect, Effect::OnRefusal { .. }) {
                return None;
            }
            let Rules::Pair(rules, Layout::Word(layout)) = charge.policy.quota().rules() else { return None };
            let version = self.registry.version(charge.policy);
            let key = self.fingerprint(charge.policy, charge.key);
            let seen = self.words.find_quietly(key, version)?;
            if version == UNNAMED || planned.iter().any(|other| other.seen.place == seen.place) {
                return None;
            }
            let how = if charge.effect == Effect::Force { How::Force } else { How::IfAllowed };
            let (decision, word) = decide(rules, *layout, seen, now, charge.cost, how);
            if charge.effect == Effect::Enforce && !decision.is_allowed() {
                allowed = false;
                mends |= word != seen.word;
            }
            decisions.push(decision);
            planned.push(Planned { seen, word });
        }
        if !allowed {
            // It holds at the instant at which a refusing state was read; unless the refusal itself is to be written.
            return (!mends).then(|| refused(charges, &planned, decisions, now));
        }
        planned.retain(|plan| plan.word != plan.seen.word);
        for (at, plan) in planned.iter().enumerate() {
            if !self.words.lock(plan.seen) {
                planned[..at].iter().for_each(|plan| self.words.put_back(plan.seen));
                return None;
            }
        }
        planned.iter().for_each(|plan| self.words.publish(plan.seen, plan.seen.tag, plan.word));
        Some(Decision::of(true, decisions))
    }
}

/// The decision, and the word to write: that which is there if nothing is to be written.
#[inline(always)]
fn decide(rules: &PairRules, layout: WordLayout, seen: Seen, now: Now, cost: u64, how: How) -> (ChargeDecision, u64) {
    // One unit of a bucket, as where it is the only charge.
    if let (PairRules::Gcra(Gcra { one_unit: Some(unit), .. }), 1, How::IfAllowed) = (rules, cost, how) {
        if let Some(verdict) = unit.look(WordLayout::unpack_ahead(seen.word, now)) {
            let word = match verdict {
                Verdict::Allowed { ahead, .. } => WordLayout::pack_ahead(ahead, now),
                Verdict::Denied { .. } => seen.word,
            };
            return (unit.tell(verdict, now.at), word);
        }
    }
    let Answer { decision, next } = rules.decide_how(layout.unpack(seen.word, now), now.at, cost, how);
    let word = match next {
        Next::Keep => seen.word,
        Next::Set(state) => layout.pack(state, now),
        Next::Clear => layout.cleared(now),
    };
    (decision, word)
}

/// What is told of a refused set: each that its own quota allows as it stands.
#[cold]
#[inline(never)]
fn refused(charges: &[Charge<'_>], planned: &[Planned], mut decisions: Several, now: Now) -> Decision {
    for ((charge, Planned { seen, .. }), decision) in charges.iter().zip(planned).zip(&mut decisions) {
        if let (true, Rules::Pair(rules, Layout::Word(layout))) = (decision.is_allowed(), charge.policy.quota().rules())
        {
            *decision = rules.decide(layout.unpack(seen.word, now), now.at, 0, false).decision;
        }
        decision.untaken();
    }
    Decision::of(false, decisions)
}
