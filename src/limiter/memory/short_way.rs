//! The short way charges keys that have a slot, and whose states fit into the word of the slot. Most charges are of
//! this kind. [`charge_all`](States::charge_all) charges keys in any state.
//!
//! The short way reads each state and decides about it before the slot is locked. If the slot's word is still the
//! same, one compare-exchange locks the slot, and the new word unlocks it a few instructions later. The short way
//! waits for no other thread: if a slot has changed or is locked, nothing is taken, and
//! [`charge_all`](States::charge_all) does the work. A denied charge only reads, unless its quota counts denied
//! requests.
//!
//! The short way halves the instructions of a check and of a set (`benches/instructions`). Without the short way,
//! threads that are denied for the same key would take the key's cache line from each other (`benches/scaling.rs`).

use crate::algorithm::gcra::{Gcra, GcraVerdict};
use crate::algorithm::{Decider, Layout, Next, PairAlgorithm, PairDecider, TakeMode, Transition, WordLayout, by_type};
use crate::decision::{ChargeDecision, Several};
use crate::limiter::{Charge, Effect};

use super::slot_table::{Fingerprint, Seen, SlotLine};
use super::states::States;
use super::word::{HeldWord, NO_STATE, Now};

/// The maximum number of charges of a set on the short way. A larger set is rare, and would need memory of
/// its own.
const SET_MAX: usize = 4;

impl States {
    /// Takes one charge.
    #[inline(always)]
    pub(super) fn charge(&self, charge: Charge<'_>) -> ChargeDecision {
        // The function has several `return`s, so that the compiler writes the answer directly into the caller's
        // memory.
        let Some(bucket) = bucket_of_unit(charge) else { return self.charge_any(charge).in_words() };
        if let Some((seen, now)) = self.look(charge) {
            if let Some((verdict, word)) = take_unit(bucket, seen.word, now) {
                if word == seen.word || seen.replace(word) {
                    return bucket.describe(&verdict, now.at, 1);
                }
            }
        }
        self.charge_one(charge).in_words()
    }

    /// Takes one charge that is not for one unit of a bucket. This method is not inlined, so that the usual charge
    /// stays short.
    #[inline(never)]
    fn charge_any(&self, charge: Charge<'_>) -> ChargeDecision {
        if let Decider::Places(rules) = charge.policy.quota().decider() {
            return self.take_places(*rules, charge).unwrap_or_else(|| self.charge_one(charge));
        }
        if let (Some((seen, now)), Decider::Pair(rules, Layout::Word(layout))) =
            (self.look(charge), charge.policy.quota().decider())
        {
            by_type!(rules, rules => {
                if let Some((decision, word)) = decide(rules, *layout, charge, seen.word, now) {
                    if word == seen.word || seen.replace(word) {
                        return decision;
                    }
                }
            });
        }
        self.charge_one(charge)
    }

    /// Takes all charges or none, and returns whether it took them.
    pub(super) fn charge_set(&self, charges: &[Charge<'_>], decisions: &mut Several) -> bool {
        self.try_set(charges, decisions).unwrap_or_else(|| self.charge_all(charges, decisions, true))
    }

    /// Takes all charges or none. If all charges pass, this method locks each slot, provided that the slot's
    /// word has not changed, and then writes all words. When the last slot is locked, no state has changed since the
    /// decision about it. This method waits for no slot.
    #[inline(always)]
    fn try_set(&self, charges: &[Charge<'_>], decisions: &mut Several) -> Option<bool> {
        let mut planned = [None; SET_MAX];
        let planned = planned.get_mut(..charges.len())?;
        // Prefetches the cache lines of all keys first, so that each line arrives while the next key is hashed. With
        // 300,000 keys, whose states do not fit into the cache, this saves a third of the time of a set of three
        // charges.
        let mut lines = [const { None }; SET_MAX];
        for (charge, line) in charges.iter().zip(&mut lines) {
            *line = self.line_of(*charge);
        }
        let now = self.now();
        let mut run = None;
        let mut is_refused = false;
        for ((charge, plan), line) in charges.iter().copied().zip(planned.iter_mut()).zip(&lines) {
            let (seen, decision, word) = match charge.policy.quota().decider() {
                Decider::Pair(rules, Layout::Word(layout)) => {
                    let (line, key, version) = line.as_ref()?;
                    let seen = self.table.look(line, *key, *version)?;
                    let (decision, word) = match bucket_of_unit(charge) {
                        Some(bucket) => {
                            let (verdict, word) = take_unit(bucket, seen.word, now)?;
                            (bucket.describe(&verdict, now.at, 1), word)
                        }
                        None => by_type!(rules, rules => decide(rules, *layout, charge, seen.word, now))?,
                    };
                    (seen, decision, word)
                }
                Decider::Places(rules) => {
                    let plan = self.plan_places(*rules, charge, *run.get_or_insert_with(|| self.run()))?;
                    (plan.seen, rules.describe(plan.verdict, plan.run), plan.word)
                }
                _ => return None,
            };
            *plan = Some((seen, word));
            if charge.effect == Effect::Enforce && !decision.is_allowed() {
                if word != seen.word {
                    return None; // the refusal itself is to be written
                }
                is_refused = true;
            }
            decisions.push(decision);
        }
        if is_refused {
            // Reports the refusal without comparing the states again, because the refusal is right for the instant at
            // which the states were read.
            report_untaken(charges, planned, decisions, now);
            return Some(false);
        }
        self.write_set(planned, run).then_some(true)
    }

    /// Writes all words as planned. Writes nothing if one of the states has changed, even if that state would not
    /// be written. With a `run`, this method also writes nothing if a key was reset since `run` was read, or if a
    /// request waits in line for one of the charges.
    #[inline(always)]
    fn write_set(&self, planned: &[Option<(Seen<'_>, u64)>], run: Option<u64>) -> bool {
        let written = || planned.iter().flatten().filter(|(seen, word)| seen.word != *word);
        let unlock = |count| written().take(count).for_each(|(seen, _)| seen.slot.set_word(seen.word));
        for (at, (seen, _)) in written().enumerate() {
            // Another thread has locked or written the slot since this thread read it. Or two charges share one state,
            // and this thread has locked the slot for the first of the two charges.
            if !seen.try_lock() {
                unlock(at);
                return false;
            }
        }
        // A charge changes nothing if it costs 0, or if it is observed and denied. The slot of such a charge is not
        // locked, so another thread may have written the slot since it was read. But the answer to such a charge must
        // be right at the instant at which the set's other slots are written, so the slot must be unchanged.
        let is_as_read = |(seen, word): &(Seen<'_>, u64)| seen.word != *word || seen.is_unchanged();
        let are_as_read = planned.iter().flatten().all(is_as_read);
        let slots = || planned.iter().flatten().map(|(seen, _)| *seen);
        if !are_as_read || run.is_some_and(|run| !self.is_run_without_lines(run, slots())) {
            unlock(planned.len());
            return false;
        }
        written().for_each(|(seen, word)| seen.slot.set_word(*word));
        true
    }

    /// Reads the clock, and then the slot of a charge whose state is a word. Returns `None` if the charge has no such
    /// slot, or another thread holds the slot.
    #[inline(always)]
    fn look(&self, charge: Charge<'_>) -> Option<(Seen<'_>, Now)> {
        let (line, key, version) = self.line_of(charge)?;
        // Reading the clock takes as long as the rest of the charge, and the key's cache line arrives meanwhile. The
        // prefetch in `line_of` needs only the hash.
        let now = self.now();
        Some((self.table.look(&line, key, version)?, now))
    }

    /// Returns the line, the key and the version with which the search for a charge's state begins. Returns `None` if
    /// the state is not a word.
    #[inline(always)]
    fn line_of(&self, charge: Charge<'_>) -> Option<(SlotLine<'_>, Fingerprint, u16)> {
        let Decider::Pair(_, Layout::Word(_)) = charge.policy.quota().decider() else { return None };
        let version = self.version_with_number(charge.policy)?;
        let key = self.fingerprint(charge.policy, charge.key);
        Some((self.table.prefetch(key)?, key, version))
    }
}

/// Returns the bucket of a charge of one unit, if its state is a word.
#[inline(always)]
fn bucket_of_unit<'a>(charge: Charge<'a>) -> Option<&'a Gcra<u64>> {
    match (charge.policy.quota().decider(), charge.effect) {
        (Decider::Pair(PairDecider::Gcra(bucket), Layout::Word(_)), Effect::Enforce | Effect::Observe)
            if charge.cost == 1 =>
        {
            Some(bucket)
        }
        _ => None,
    }
}

/// Decides about one unit of a bucket, and returns the word to write. Returns `None` if `now` may be older than the
/// state.
#[inline(always)]
fn take_unit(bucket: &Gcra<u64>, word: u64, now: Now) -> Option<(GcraVerdict<u64>, u64)> {
    let verdict = bucket.look(WordLayout::unpack_ahead(word, now), 1, false)?;
    let next = match verdict {
        GcraVerdict::Admitted { after, .. } => WordLayout::pack_ahead(after.ahead(), now),
        GcraVerdict::Denied { .. } => word,
    };
    Some((verdict, next))
}

/// Decides about any charge, and returns the word to write. Returns `None` if `now` may be older than the state, or
/// if another window has begun at `now`, because a new window needs a clock reading under the slot's lock.
#[inline(always)]
fn decide(
    rules: &impl PairAlgorithm,
    layout: WordLayout,
    charge: Charge<'_>,
    word: u64,
    now: Now,
) -> Option<(ChargeDecision, u64)> {
    let how = match charge.effect {
        Effect::Enforce | Effect::Observe => TakeMode::IfAllowed,
        Effect::Force => TakeMode::Force,
        Effect::OnRefusal { .. } => return None,
    };
    let state = layout.unpack(word, now);
    let is_clamped = state.is_some_and(|state| rules.is_clamped(state, now.at));
    if is_clamped || word != NO_STATE && rules.counts_anew(state, now.at) {
        return None;
    }
    let Transition { decision, next } = rules.decide_how(state, now.at, charge.cost, how);
    let next = match next {
        Next::Keep => word,
        Next::Set(state) => layout.pack(state, now),
        Next::Clear => NO_STATE,
    };
    Some((decision, next))
}

/// Completes the decisions of a refused set: if a quota allows its own charge, the decision reports the current
/// state of that quota.
#[cold]
fn report_untaken(charges: &[Charge<'_>], planned: &[Option<(Seen<'_>, u64)>], decisions: &mut Several, now: Now) {
    for ((charge, (seen, _)), decision) in charges.iter().zip(planned.iter().flatten()).zip(decisions) {
        match charge.policy.quota().decider() {
            _ if !decision.is_allowed() => {}
            Decider::Pair(rules, Layout::Word(layout)) => {
                *decision = rules.decide(layout.unpack(seen.word, now), now.at, 0, false).decision;
            }
            Decider::Places(rules) => {
                let held = if let HeldWord::Units(held) = HeldWord::of(seen.word) { held.units } else { 0 };
                *decision = rules.describe(rules.look(held, 0, TakeMode::IfAllowed), 0);
            }
            Decider::Pair(..) | Decider::EntryLog(_) => {}
        }
        decision.untaken();
    }
}
