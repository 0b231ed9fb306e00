//! States that another quota of their policy wrote. A decision reads them as its own quota takes them over, and they stay as
//! they are until it writes.

use crate::algorithm::carry::{Held, Kept};
use crate::algorithm::{How, Pair, Rules};
use crate::decision::ChargeDecision;

use super::arena::TrailView;
use super::large::Shard;
use super::registry::Versions;
use super::store::Store;
use super::words::{Fingerprint, Now, version_of};

/// A state that another quota wrote, as this one takes it over.
pub(super) struct Foreign {
    kept: Kept,
    /// It lies further ahead than this quota can put it, and would stay there.
    is_ahead: bool,
}

impl Foreign {
    /// The decision about a charge, and whether anything is to be written.
    pub(super) fn decide(&self, rules: &Rules, now: Now, cost: u64, how: How) -> (ChargeDecision, bool) {
        let (decision, writes) = self.kept.decide(rules, now.at, cost, how);
        (decision, writes || self.is_ahead && cost > 0)
    }

    /// Whether a receipt still holds anything of it.
    pub(super) fn is_refundable(&self, rules: &Rules, now: Now, units: u64, own: Pair) -> bool {
        self.kept.is_refundable(rules, now.at, units, own)
    }

    pub(super) fn into_kept(self) -> Kept {
        self.kept
    }

    /// The state of a quota whose states are pairs.
    pub(super) fn pair(&self) -> Option<Pair> {
        match self.kept {
            Kept::Pair(pair) => pair,
            Kept::Trail(_) => None,
        }
    }
}

impl Versions {
    /// A state of one version, as another takes it over.
    pub(super) fn take_over(&self, from: u16, to: u16, held: &Held<'_, TrailView<'_>>, now: Now) -> Option<Foreign> {
        let (from, to) = (self.policy(from)?.quota(), self.policy(to)?.quota());
        let share = to.spec().proportional.then_some((from.capacity(), to.capacity()));
        let (kept, is_ahead) = to.rules().take_over(from.rules(), held, now.at, share);
        Some(Foreign { kept, is_ahead })
    }
}

impl Store {
    /// The state of a key among the words, if another version wrote it.
    pub(super) fn foreign_word(&self, key: Fingerprint, version: u16, now: Now) -> Option<Foreign> {
        let seen = self.words.find(key).filter(|seen| version_of(seen.tag) != version)?;
        let versions = self.registry.versions();
        let written = version_of(seen.tag);
        let (_, layout) = versions.word_rules(written)?;
        versions.take_over(written, version, &Held::Pair(layout.unpack(seen.word, now)?), now)
    }

    /// The state of a key in its shard, or among the words, if another version wrote it.
    pub(super) fn foreign(&self, shard: &Shard, key: Fingerprint, version: u16, now: Now) -> Option<Foreign> {
        let versions = self.registry.versions();
        if let Some((index, written)) = shard.find(key) {
            if written == version {
                return None;
            }
            return shard.foreign(index, &versions, version, now);
        }
        drop(versions);
        self.foreign_word(key, version, now)
    }
}
