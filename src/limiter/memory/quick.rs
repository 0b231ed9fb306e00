//! One charge: the usual case in straight-line code, and from there to the ways that wait.

use crate::algorithm::{Answer, Decide, Layout, Next, PairRules, Rules, WordLayout, by_type};
use crate::decision::ChargeDecision;
use crate::key::Key;
use crate::limiter::{Charge, Effect};
use crate::policy::Policy;

use super::one_large::LargeCharge;
use super::one_word::WordCharge;
use super::registry::UNNAMED;
use super::store::Store;
use super::words::{Fingerprint, Now, Seen, version_of};

impl Store {
    /// Takes one charge.
    #[inline(always)]
    pub(super) fn charge(&self, policy: &Policy, key: &Key, cost: u64, force: bool) -> ChargeDecision {
        let now = self.now();
        let version = self.registry.version(policy);
        let fingerprint = self.fingerprint(policy, key);
        if let Some(seen) = self.words.find_quietly(fingerprint) {
            // Two ways out instead of one, so that the answer is written once, where the caller wants it.
            match policy.quota().rules() {
                Rules::Pair(PairRules::Gcra(rules), Layout::Word(_)) if version_of(seen.tag) == version => {
                    let layout = WordLayout::MICROSECONDS;
                    if let Some(decision) = self.try_word(rules, layout, seen, now, cost, force) {
                        return decision;
                    }
                }
                Rules::Pair(rules, Layout::Word(layout)) if version_of(seen.tag) == version => {
                    if let Some(decision) = self.try_rare(rules, *layout, seen, now, cost, force) {
                        return decision;
                    }
                }
                _ => {}
            }
        }
        self.charge_slowly(policy, fingerprint, version, now, cost, force)
    }

    /// The usual case of a charge whose state is a word: the key has its slot, nobody interferes. It is straight-line code;
    /// nothing was taken if it returns nothing.
    #[inline(always)]
    fn try_word(
        &self,
        rules: &impl Decide,
        layout: WordLayout,
        seen: Seen,
        now: Now,
        cost: u64,
        force: bool,
    ) -> Option<ChargeDecision> {
        let (next, found) = rules.admit(layout.unpack(seen.word, now), now.at, cost, force);
        let written = match next {
            Next::Keep => true,
            Next::Set(state) => self.words.replace(seen, layout.pack(state, now)),
            Next::Clear => self.words.replace(seen, layout.cleared(now)),
        };
        if written { Some(rules.tell(found)) } else { None }
    }

    /// The same for the other algorithms, out of the way of the first.
    #[inline(never)]
    fn try_rare(
        &self,
        rules: &PairRules,
        layout: WordLayout,
        seen: Seen,
        now: Now,
        cost: u64,
        force: bool,
    ) -> Option<ChargeDecision> {
        by_type!(rules, rules => self.try_word(rules, layout, seen, now, cost, force))
    }

    /// Takes one charge, whatever the case.
    #[cold]
    #[inline(never)]
    fn charge_slowly(
        &self,
        policy: &Policy,
        key: Fingerprint,
        version: u16,
        now: Now,
        cost: u64,
        force: bool,
    ) -> ChargeDecision {
        match policy.quota().rules() {
            Rules::Pair(rules, Layout::Word(layout)) if version != UNNAMED => {
                WordCharge { store: self, key, version, rules, layout: *layout, now, cost, force }.take()
            }
            rules => {
                let key = if version == UNNAMED { Self::unnamed(key, policy) } else { key };
                LargeCharge { store: self, key, version, rules, now, cost, force }.take()
            }
        }
    }

    /// Answers as [`charge`](Self::charge) would at `now`, and takes nothing.
    pub(super) fn peek(&self, charge: &Charge<'_>, now: Now) -> ChargeDecision {
        self.look_at(charge, now).0
    }

    /// The same, and whether the charge would write anything: what it takes, or its refusal, which is counted or mends a
    /// state that is too far ahead.
    pub(super) fn look_at(&self, charge: &Charge<'_>, now: Now) -> (ChargeDecision, bool) {
        let key = self.fingerprint(charge.policy, charge.key);
        let version = self.registry.version(charge.policy);
        let (cost, force) = (charge.cost, charge.effect == Effect::Force);
        let (mut decision, writes) = match charge.policy.quota().rules() {
            Rules::Pair(rules, Layout::Word(layout)) if version != UNNAMED => {
                let word = WordCharge { store: self, key, version, rules, layout: *layout, now, cost, force };
                let Answer { decision, next } = word.peek();
                (decision, next != Next::Keep)
            }
            rules => {
                let key = if version == UNNAMED { Self::unnamed(key, charge.policy) } else { key };
                LargeCharge { store: self, key, version, rules, now, cost, force }.peek()
            }
        };
        decision.untaken();
        (decision, writes)
    }
}
