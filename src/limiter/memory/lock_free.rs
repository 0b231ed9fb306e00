//! The lock-free path beside [`charge_all`](Store::charge_all): charges of states that are words and have their slots, which
//! is the usual case of one charge and of a request's policies.
//!
//! Each state is read and decided about, and replaced if it is still the same. This path waits for no other thread, and a
//! denied charge only reads. Where it does not do, nothing was taken, and [`charge_all`](Store::charge_all) does the work.
//!
//! It halves the instructions of a check and of a set (`benches/instructions.rs`). Without it, threads that are denied the same
//! key would take its cache line from each other (`benches/scaling.rs`).

use crate::algorithm::gcra::{Gcra, Verdict};
use crate::algorithm::{Answer, How, Layout, Next, Pair, PairAlgorithm, PairRules, Rules, WordLayout, by_type};
use crate::decision::{ChargeDecision, Several};
use crate::key::Key;
use crate::limiter::{Charge, Effect};
use crate::policy::Policy;
use crate::sync::step_aside;

use super::slot_table::{Fingerprint, Found, Seen};
use super::store::Store;
use super::word::{NO_STATE, Now};

/// How often a charge tries again when another thread was quicker. One thread always gets through.
const ATTEMPTS: usize = 16;

/// The most charges of a set. A larger set is rare, and would need memory of its own.
const SET_MAX: usize = 4;

impl Store {
    /// Takes one charge.
    #[inline(always)]
    pub(super) fn charge(&self, policy: &Policy, key: &Key, cost: u64, force: bool) -> ChargeDecision {
        // Several ways out instead of one, so that the answer is written once, where the caller wants it.
        if let Rules::Pair(rules, Layout::Word(layout)) = policy.quota().rules() {
            let version = self.version(policy);
            let slot = (self.fingerprint(policy, key), version);
            // The clock after the key's hash, which nothing then keeps waiting: reading it takes as long as all the rest.
            let now = self.now();
            if let (PairRules::Gcra(bucket), 1, false) = (rules, cost, force) {
                if let Some(verdict) = self.try_one(slot, |word| look(bucket, word, now)) {
                    return bucket.describe(&verdict, now.at, 1);
                }
            } else {
                return self.charge_any((policy, key), slot, (rules, *layout), now, cost, force);
            }
        }
        self.charge_one(policy, key, cost, force)
    }

    /// Takes one charge that is not of one unit of a bucket. Out of line, so that the usual charge stays short.
    #[inline(never)]
    fn charge_any(
        &self,
        (policy, key): (&Policy, &Key),
        slot: (Fingerprint, u16),
        (rules, layout): (&PairRules, WordLayout),
        now: Now,
        cost: u64,
        force: bool,
    ) -> ChargeDecision {
        by_type!(rules, rules => {
            let is_clamped = |state| rules.is_clamped(state, now.at);
            let rules = |state| rules.decide(state, now.at, cost, force);
            if let Some(decision) = self.try_one(slot, |word| decide(word, layout, now, is_clamped, rules)) {
                return decision;
            }
        });
        self.charge_one(policy, key, cost, force)
    }

    /// Replaces the word of a slot as `decide` says, and returns what else it says. `decide` returns the word that it was
    /// given if nothing is to be written, and `None` if it does not know.
    #[inline(always)]
    fn try_one<T>(&self, (key, version): (Fingerprint, u16), decide: impl Fn(u64) -> Option<(T, u64)>) -> Option<T> {
        for attempt in 0..ATTEMPTS {
            match self.table.look(key, version) {
                Found::Slot(seen) => {
                    let (decided, word) = decide(seen.word)?;
                    if word == seen.word || self.table.replace(seen, word) {
                        return Some(decided);
                    }
                }
                Found::Nothing => return None,
                Found::Changing => {}
            }
            step_aside(attempt);
        }
        None
    }

    /// Takes all charges or none, and returns whether it took them.
    #[inline(never)]
    pub(super) fn charge_set(&self, charges: &[Charge<'_>], decisions: &mut Several) -> bool {
        self.try_set(charges, decisions).unwrap_or_else(|| self.charge_all(charges, decisions, true))
    }

    /// Takes all charges or none. When all pass, each word is locked as it was read, and then all are written: from the
    /// moment the last is locked all are as they were decided on. It holds no slot while it waits for another.
    #[inline(always)]
    fn try_set(&self, charges: &[Charge<'_>], decisions: &mut Several) -> Option<bool> {
        let mut planned = [(Seen::NOTHING, 0); SET_MAX];
        let planned = planned.get_mut(..charges.len())?;
        let now = self.now();
        let mut is_refused = false;
        for (charge, plan) in charges.iter().zip(planned.iter_mut()) {
            let how = match charge.effect {
                Effect::Enforce | Effect::Observe => How::IfAllowed,
                Effect::Force => How::Force,
                Effect::OnRefusal { .. } => return None,
            };
            let Rules::Pair(rules, Layout::Word(layout)) = charge.policy.quota().rules() else { return None };
            let version = self.version(charge.policy);
            let key = self.fingerprint(charge.policy, charge.key);
            let Found::Slot(seen) = self.table.look(key, version) else { return None };
            let (decision, word) = decide_for_set(rules, *layout, seen.word, now, charge.cost, how)?;
            *plan = (seen, word);
            if charge.effect == Effect::Enforce && !decision.is_allowed() {
                if word != seen.word {
                    return None; // the refusal itself is to be written
                }
                is_refused = true;
            }
            decisions.push(decision);
        }
        if is_refused {
            // It holds at the instant at which a refusing state was read.
            stand(charges, planned, decisions, now);
            return Some(false);
        }
        self.write_set(planned).then_some(true)
    }

    /// Writes all words as planned, or none if one of the states has changed.
    #[inline(always)]
    fn write_set(&self, planned: &[(Seen, u64)]) -> bool {
        let written = || planned.iter().filter(|(seen, word)| seen.word != *word);
        for (at, (seen, _)) in written().enumerate() {
            // A state that two charges are for is not locked twice.
            if !self.table.try_lock(*seen) {
                written().take(at).for_each(|(seen, _)| self.table.set_word(seen.place, seen.word));
                return false;
            }
        }
        written().for_each(|(seen, word)| self.table.set_word(seen.place, *word));
        true
    }
}

/// Decides about one unit of a bucket, and returns the word to write.
#[inline(always)]
fn look(bucket: &Gcra<u64>, word: u64, now: Now) -> Option<(Verdict<u64>, u64)> {
    let verdict = bucket.look(WordLayout::unpack_ahead(word, now), 1, false)?;
    let next = match verdict {
        Verdict::Admitted { after, .. } => WordLayout::pack_ahead(after.ahead(), now),
        Verdict::Denied { .. } => word,
    };
    Some((verdict, next))
}

/// Decides about any other charge, and returns the word to write; `None` if `now` may be older than the state.
#[inline(always)]
fn decide(
    word: u64,
    layout: WordLayout,
    now: Now,
    is_clamped: impl Fn(Pair) -> bool,
    decide: impl Fn(Option<Pair>) -> Answer,
) -> Option<(ChargeDecision, u64)> {
    let state = layout.unpack(word, now);
    if state.is_some_and(is_clamped) {
        return None;
    }
    let Answer { decision, next } = decide(state);
    let next = match next {
        Next::Keep => word,
        Next::Set(state) => layout.pack(state, now),
        Next::Clear => NO_STATE,
    };
    Some((decision, next))
}

#[inline(always)]
fn decide_for_set(
    rules: &PairRules,
    layout: WordLayout,
    word: u64,
    now: Now,
    cost: u64,
    how: How,
) -> Option<(ChargeDecision, u64)> {
    if let (PairRules::Gcra(bucket), 1, How::IfAllowed) = (rules, cost, how) {
        if let Some((verdict, next)) = look(bucket, word, now) {
            return Some((bucket.describe(&verdict, now.at, 1), next));
        }
    }
    let is_clamped = |state| rules.is_clamped(state, now.at);
    decide(word, layout, now, is_clamped, |state| rules.decide_how(state, now.at, cost, how))
}

/// Makes the decisions of a refused set say how each quota stands that has nothing against its charge.
#[cold]
fn stand(charges: &[Charge<'_>], planned: &[(Seen, u64)], decisions: &mut Several, now: Now) {
    for ((charge, (seen, _)), decision) in charges.iter().zip(planned).zip(decisions) {
        if let (true, Rules::Pair(rules, Layout::Word(layout))) = (decision.is_allowed(), charge.policy.quota().rules())
        {
            *decision = rules.decide(layout.unpack(seen.word, now), now.at, 0, false).decision;
        }
        decision.untaken();
    }
}
