//! Giving back: a refund by receipt, and a reset.

use crate::algorithm::{How, Layout, Next, Pair, Rules};
use crate::key::Key;
use crate::limiter::Refund;
use crate::policy::Policy;

use super::one_word::WordCharge;
use super::registry::UNNAMED;
use super::store::Store;
use super::words::{Fingerprint, NO_STATE, Seen, version_of};

impl Store {
    /// Gives back what a receipt still holds, as an act of the policy that was charged.
    pub(super) fn refund(&self, refund: &Refund) {
        let (policy, receipt) = (&refund.policy, &refund.receipt);
        let version = self.version(policy);
        let key = self.fingerprint(policy, &refund.key);
        let own = Pair { at: receipt.at_us(), n: receipt.part() };
        match policy.quota().rules() {
            Rules::Pair(rules, Layout::Word(layout)) if version != UNNAMED => {
                let word =
                    WordCharge { store: self, key, version, rules, layout: *layout, cost: 0, how: How::IfAllowed };
                word.refund(receipt.units(), own);
            }
            rules => {
                let key = if version == UNNAMED { Self::unnamed(key, policy) } else { key };
                let mut news = self.news();
                let (_stripe, mut shard) = self.lock_large(key);
                let now = self.now_after();
                // What another quota wrote stays as it is, unless there is something to give back.
                let foreign = self.foreign(&shard, key, version, now);
                if foreign.is_some_and(|foreign| !foreign.is_refundable(rules, now, receipt.units(), own)) {
                    return;
                }
                let mut crowd = self.crowd(now);
                if let Ok(Some(index)) = self.settle_large(&mut shard, key, version, rules, now, &mut crowd) {
                    shard.refund(index, rules, now.at, receipt.units(), own);
                }
                news.crowd(&crowd);
            }
        }
    }

    /// Forgets a key's state under a policy's name, whatever its quota was.
    pub(super) fn reset(&self, policy: &Policy, key: &Key) {
        let version = self.version(policy);
        let named = self.fingerprint(policy, key);
        self.forget(if version == UNNAMED { Self::unnamed(named, policy) } else { named });
    }

    /// Forgets a key's state, wherever it is.
    pub(super) fn forget(&self, key: Fingerprint) {
        let _stripe = self.lock_stripe(self.stripe_of(key));
        while let Some(seen) = self.words.find(key) {
            if self.words.lock(seen) {
                self.words.put_back(seen.emptied());
                break;
            }
        }
        if let Some(large) = self.large.get() {
            let mut shard = large.lock(large.shard_of(key));
            if let Some((index, _)) = shard.find(key) {
                shard.forget(index);
            }
        }
    }
}

impl WordCharge<'_> {
    fn refund(&self, units: u64, own: Pair) {
        while let Some(seen) = self.find().or_else(|| self.fetch(units, own)) {
            let now = self.store.now_after();
            if version_of(seen.tag) != self.version {
                let foreign = self.foreign(seen, now);
                if !foreign.is_some_and(|foreign| foreign.is_refundable(&self.own_rules(), now, units, own)) {
                    return;
                }
                self.convert(seen, now);
                continue;
            }
            let Some(state) = self.layout.unpack(seen.word, now) else { return };
            let word = match self.rules.refund(state, now.at, units, own) {
                Next::Keep => return,
                Next::Set(state) => self.layout.pack(state, now),
                Next::Clear => NO_STATE,
            };
            if self.store.words.replace(seen, word) {
                return;
            }
        }
    }

    /// Fetches a state that lies among the large ones, if a receipt still holds anything of it.
    fn fetch(&self, units: u64, own: Pair) -> Option<Seen> {
        let mut news = self.store.news();
        if !self.store.registry.is_mixed() {
            return None;
        }
        let (_stripe, mut shard) = self.store.lock_large(self.key);
        let now = self.store.now_after();
        let foreign = self.store.foreign(&shard, self.key, self.version, now)?;
        if !foreign.is_refundable(&self.own_rules(), now, units, own) {
            return None;
        }
        self.adopt(&mut shard, &mut news);
        self.store.words.find(self.key)
    }
}
