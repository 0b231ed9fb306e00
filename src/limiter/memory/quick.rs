//! One charge: the usual case in straight-line code, and from there to the ways that wait.

use crate::algorithm::gcra::Gcra;
use crate::algorithm::one_unit::{OneUnit, Verdict};
use crate::algorithm::{Answer, How, Layout, Next, PairRules, Rules, WordLayout, by_type};
use crate::decision::ChargeDecision;
use crate::key::Key;
use crate::limiter::Charge;
use crate::policy::Policy;
use crate::sync::step_aside;

use super::one_large::LargeCharge;
use super::one_word::WordCharge;
use super::registry::UNNAMED;
use super::store::Store;
use super::words::{Fingerprint, Found, NO_STATE, Now};

/// How often a charge tries again when another thread was quicker. One of them always gets through; who does not for so
/// long locks the slot.
const ATTEMPTS: usize = 16;

impl Store {
    /// Takes one charge.
    #[inline(always)]
    pub(super) fn charge(&self, policy: &Policy, key: &Key, cost: u64, force: bool) -> ChargeDecision {
        let version = self.version(policy);
        let fingerprint = self.fingerprint(policy, key);
        // The clock after the key's hash, which nothing then keeps waiting: reading it takes as long as all the rest.
        let now = self.now();
        // Several ways out instead of one, so that the answer is written once, where the caller wants it.
        match policy.quota().rules() {
            Rules::Pair(PairRules::Gcra(Gcra { one_unit: Some(unit), .. }), Layout::Word(_)) if cost == 1 && !force => {
                if let Some(decision) = self.try_unit(unit, fingerprint, version, now) {
                    return decision;
                }
            }
            Rules::Pair(rules, Layout::Word(_)) => {
                return self.charge_word(policy, rules, fingerprint, now, cost, force);
            }
            _ => {}
        }
        self.charge_slowly(policy, fingerprint, version, cost, force)
    }

    /// The usual case of the usual charge: one unit of a bucket, the key has its slot. It is straight-line code; nothing
    /// was taken if it returns nothing.
    #[inline(always)]
    fn try_unit(&self, unit: &OneUnit, key: Fingerprint, version: u16, now: Now) -> Option<ChargeDecision> {
        for attempt in 0..ATTEMPTS {
            let seen = match self.words.find_quietly(key, version) {
                Found::Slot(seen) => seen,
                Found::Nothing => return None,
                Found::Changing => {
                    step_aside(attempt);
                    continue;
                }
            };
            let verdict = unit.look(WordLayout::unpack_ahead(seen.word, now))?;
            let written = match verdict {
                Verdict::Allowed { ahead, .. } => self.words.replace(seen, WordLayout::pack_ahead(ahead, now)),
                Verdict::Denied { .. } => true, // it only reads
            };
            if written {
                return Some(unit.tell(verdict, now.at));
            }
            step_aside(attempt);
        }
        None
    }

    /// The same for the other charges, out of the way of the first; and if that did not do, whatever the case.
    #[inline(never)]
    fn charge_word(
        &self,
        policy: &Policy,
        rules: &PairRules,
        key: Fingerprint,
        now: Now,
        cost: u64,
        force: bool,
    ) -> ChargeDecision {
        let version = self.version(policy);
        if let Layout::Word(layout) = policy.quota().rules().layout() {
            by_type!(rules, rules => {
                for attempt in 0..ATTEMPTS {
                    let seen = match self.words.find_quietly(key, version) {
                        Found::Slot(seen) => seen,
                        Found::Nothing => break,
                        Found::Changing => {
                            step_aside(attempt);
                            continue;
                        }
                    };
                    let state = layout.unpack(seen.word, now);
                    if state.is_some_and(|state| rules.is_clamped(state, now.at)) {
                        break; // `now` may be older than the state
                    }
                    let Answer { decision, next } = rules.decide(state, now.at, cost, force);
                    let written = match next {
                        Next::Keep => true,
                        Next::Set(state) => self.words.replace(seen, layout.pack(state, now)),
                        Next::Clear => self.words.replace(seen, NO_STATE),
                    };
                    if written {
                        return decision;
                    }
                    step_aside(attempt);
                }
            });
        }
        self.charge_slowly(policy, key, version, cost, force)
    }

    /// Takes one charge, whatever the case. It reads the clock itself, after the state.
    #[cold]
    #[inline(never)]
    fn charge_slowly(&self, policy: &Policy, key: Fingerprint, version: u16, cost: u64, force: bool) -> ChargeDecision {
        let how = if force { How::Force } else { How::IfAllowed };
        match policy.quota().rules() {
            Rules::Pair(rules, Layout::Word(layout)) if version != UNNAMED => {
                WordCharge { store: self, key, version, rules, layout: *layout, cost, how }.take()
            }
            rules => {
                let key = if version == UNNAMED { Self::unnamed(key, policy) } else { key };
                LargeCharge { store: self, key, version, rules, cost, how }.take()
            }
        }
    }

    /// Answers as [`charge`](Self::charge) would, and takes nothing.
    pub(super) fn peek(&self, charge: &Charge<'_>) -> ChargeDecision {
        self.look_at(charge, crate::limiter::how(&[*charge], 0, |_| false)).0
    }

    /// The same, and whether the charge would write anything: what it takes, or its refusal, which is counted or mends a
    /// state that is too far ahead.
    pub(super) fn look_at(&self, charge: &Charge<'_>, how: How) -> (ChargeDecision, bool) {
        let key = self.fingerprint(charge.policy, charge.key);
        let version = self.version(charge.policy);
        let cost = charge.cost;
        let (mut decision, writes) = match charge.policy.quota().rules() {
            Rules::Pair(rules, Layout::Word(layout)) if version != UNNAMED => {
                let word = WordCharge { store: self, key, version, rules, layout: *layout, cost, how };
                word.peek()
            }
            rules => {
                let key = if version == UNNAMED { Self::unnamed(key, charge.policy) } else { key };
                LargeCharge { store: self, key, version, rules, cost, how }.peek()
            }
        };
        decision.untaken();
        (decision, writes)
    }
}
