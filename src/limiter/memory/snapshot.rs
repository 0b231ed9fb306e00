//! All live states as bytes, and back.
//!
//! Little-endian: a magic and a version; the two seeds; the policies, each with its name and its quota in words; then the
//! states: fingerprint, number of the policy, instant, number, and for a trail its entries. What is read is taken for
//! hostile: lengths are checked before anything is allocated, and a state that its quota could not have made is left out.

use std::collections::HashMap;

use crate::algorithm::{How, Layout, Pair, PairRules, Rules};
use crate::policy::Policy;
use crate::quota::Quota;

use super::builder::{MemoryLimiterError, MemoryLimiterErrorKind};
use super::large::{Index, Large, Shard, Stored};
use super::one_word::WordCharge;
use super::registry::UNNAMED;
use super::store::Store;
use super::words::{Fingerprint, Now, Seen, version_of};

const MAGIC: &[u8; 8] = b"trl-snap";
const VERSION: u8 = 1;

/// A snapshot that was read, or is to be written.
pub(super) struct Snapshot {
    pub(super) seeds: [u64; 2],
    policies: Vec<Policy>,
    states: Vec<State>,
}

struct State {
    key: Fingerprint,
    /// The place among the policies, from 0.
    policy: usize,
    pair: Pair,
    /// Of a trail; then the pair is zero.
    entries: Vec<(u64, u64)>,
}

impl Snapshot {
    /// The live states of a store: each that lives from the beginning to the end, as it was at an instant between.
    pub(super) fn of(store: &Store) -> Self {
        let now = store.now();
        let snapshot = Self { seeds: store.setup.secret.seeds, policies: Vec::new(), states: Vec::new() };
        let walk = |mut snapshot: Self| {
            for seen in store.words.iter() {
                snapshot.add_word(store, seen, now);
            }
            for number in 0..store.large.get().map_or(0, Large::shards) {
                let Some(large) = store.large.get() else { break };
                let shard = large.lock(number);
                for (index, key, version) in shard.iter() {
                    snapshot.add_large(store, &shard, index, key, version, now);
                }
            }
            snapshot
        };
        // The walk may have missed a key that moved, or have met it twice: the state that is added last is the one that holds.
        let meet = |snapshot: &mut Self, key| {
            let _stripe = store.lock_stripe(store.stripe_of(key));
            if let Some(seen) = store.words.find(key) {
                snapshot.add_word(store, seen, now);
            }
            if let Some(large) = store.large.get() {
                let shard = large.lock(large.shard_of(key));
                if let Some((index, version)) = shard.find(key) {
                    snapshot.add_large(store, &shard, index, key, version, now);
                }
            }
        };
        store.while_walking(|| walk(snapshot), meet, |snapshot| snapshot.name_policies(store))
    }

    /// Numbers the states' policies anew: only those of these states, since what was merely asked about leaves no trace.
    fn name_policies(&mut self, store: &Store) {
        let versions = store.registry.versions();
        let Self { policies, states, .. } = self;
        let mut places = HashMap::new();
        for state in states {
            state.policy = *places.entry(state.policy).or_insert_with(|| {
                policies.extend(versions.policies().get(state.policy).cloned());
                policies.len() - 1 // one for each state's version, so at least one
            });
        }
    }

    fn add_word(&mut self, store: &Store, seen: Seen, now: Now) {
        let version = version_of(seen.tag);
        let Some((_, layout)) = store.word_rules(version) else { return };
        if let Some(pair) = layout.unpack(seen.word, now) {
            let key = Fingerprint::of_tag(seen.tag);
            self.states.push(State { key, policy: usize::from(version) - 1, pair, entries: Vec::new() });
        }
    }

    fn add_large(&mut self, store: &Store, shard: &Shard, index: Index, key: Fingerprint, version: u16, now: Now) {
        let versions = store.registry.versions();
        let Some(policy) = versions.policy(version).filter(|_| !shard.expired(index, now.at)) else { return };
        let (pair, entries) = match shard.stored(index, policy.quota().rules()) {
            Stored::Pair(pair) => (pair, Vec::new()),
            Stored::Trail(trail) => (Pair { at: 0, n: 0 }, shard.entries(&trail)),
        };
        self.states.push(State { key, policy: usize::from(version) - 1, pair, entries });
    }

    /// Puts the states into a new store.
    pub(super) fn fill(&self, store: &Store) {
        let now = store.now();
        let mut news = store.news();
        let mut versions = HashMap::new();
        for state in &self.states {
            let Some(policy) = self.policies.get(state.policy) else { continue };
            let version = *versions.entry(state.policy).or_insert_with(|| store.version(policy));
            if version == UNNAMED {
                continue;
            }
            match policy.quota().rules() {
                Rules::Pair(rules, layout) => {
                    let Some(pair) = possible(rules, state.pair, now) else { continue };
                    if let Layout::Word(layout) = *layout {
                        let (key, cost, how) = (state.key, 0, How::IfAllowed);
                        let word = WordCharge { store, key, version, rules, layout, cost, how };
                        // A key that moved while the states were walked may have been met twice.
                        store.forget(key);
                        if let Some(claimed) = word.claim(now, &mut news) {
                            store.words.publish(claimed, key.tag(version), layout.pack(pair, now));
                        }
                    } else {
                        Self::fill_large(store, state, version, policy.quota(), pair, now);
                    }
                }
                Rules::Trail(_) => Self::fill_large(store, state, version, policy.quota(), state.pair, now),
            }
        }
    }

    fn fill_large(store: &Store, state: &State, version: u16, quota: &Quota, pair: Pair, now: Now) {
        store.forget(state.key);
        let large = store.large();
        let mut shard = large.lock(large.shard_of(state.key));
        let mut crowd = store.crowd(now);
        if let Some(index) = shard.insert(state.key, version, &mut crowd) {
            shard.restore(index, quota.rules(), pair, &state.entries, now.at);
        }
    }

    pub(super) fn write(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64 + 32 * self.states.len());
        out.extend_from_slice(MAGIC);
        out.push(VERSION);
        for seed in self.seeds {
            out.extend_from_slice(&seed.to_le_bytes());
        }
        let word = |out: &mut Vec<u8>, number: usize| out.extend_from_slice(&(number as u64).to_le_bytes());
        word(&mut out, self.policies.len());
        for policy in &self.policies {
            for text in [policy.name(), &policy.quota().to_string()] {
                word(&mut out, text.len());
                out.extend_from_slice(text.as_bytes());
            }
        }
        word(&mut out, self.states.len());
        for state in &self.states {
            for number in [state.key.bits() | state.policy as u64, state.pair.at, state.pair.n] {
                out.extend_from_slice(&number.to_le_bytes());
            }
            if matches!(self.policies.get(state.policy).map(|policy| policy.quota().rules()), Some(Rules::Trail(_))) {
                word(&mut out, state.entries.len());
                for (start, units) in &state.entries {
                    out.extend_from_slice(&start.to_le_bytes());
                    out.extend_from_slice(&units.to_le_bytes());
                }
            }
        }
        out
    }

    pub(super) fn read(bytes: &[u8]) -> Result<Self, MemoryLimiterError> {
        let mut reader = Reader { left: bytes, whole: bytes.len() };
        if reader.take(MAGIC.len())? != MAGIC {
            return Err(error("these bytes are not a snapshot of a limiter: restore what `snapshot()` returned"));
        }
        let version = reader.take(1)?[0];
        if version != VERSION {
            return Err(error(format!(
                "this snapshot has format {version}, and this version of the crate reads format {VERSION}: start without it"
            )));
        }
        let seeds = [reader.number()?, reader.number()?];
        let count = reader.count(16)?;
        let policies = (0..count).map(|_| reader.policy()).collect::<Result<Vec<_>, _>>()?;
        let count = reader.count(24)?;
        let mut states = Vec::with_capacity(count);
        for _ in 0..count {
            states.push(reader.state(&policies)?);
        }
        Ok(Self { seeds, policies, states })
    }
}

/// The state as a clock of now may find it: one that is further ahead than a word holds is clamped by its own rules.
fn possible(rules: &PairRules, pair: Pair, now: Now) -> Option<Pair> {
    if !rules.could_be(pair) || pair.at < now.at {
        return None;
    }
    if rules.is_clamped(pair, now.at) {
        return rules.brought_back(pair, now.at);
    }
    Some(pair)
}

/// Reads numbers off the front.
struct Reader<'a> {
    left: &'a [u8],
    whole: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], MemoryLimiterError> {
        match self.left.split_at_checked(count) {
            Some((taken, left)) => {
                self.left = left;
                Ok(taken)
            }
            None => Err(self.damaged("it ends too early")),
        }
    }

    fn number(&mut self) -> Result<u64, MemoryLimiterError> {
        let bytes = self.take(8)?;
        Ok(u64::from_le_bytes(bytes.try_into().unwrap_or_default()))
    }

    /// A number of things that take at least so many bytes each, which must be there.
    fn count(&mut self, bytes_each: usize) -> Result<usize, MemoryLimiterError> {
        let count = self.number()?;
        match usize::try_from(count) {
            Ok(count) if count <= self.left.len() / bytes_each => Ok(count),
            _ => Err(self.damaged("a length is too large")),
        }
    }

    fn text(&mut self) -> Result<&'a str, MemoryLimiterError> {
        let length = self.count(1)?;
        let bytes = self.take(length)?;
        std::str::from_utf8(bytes).map_err(|_| self.damaged("a text is not UTF-8"))
    }

    fn policy(&mut self) -> Result<Policy, MemoryLimiterError> {
        let (name, words) = (self.text()?, self.text()?);
        let quota: Quota = words.parse().map_err(|error| self.damaged(&format!("{error}")))?;
        Policy::new(name, quota).map_err(|error| self.damaged(&format!("{error}")))
    }

    fn state(&mut self, policies: &[Policy]) -> Result<State, MemoryLimiterError> {
        let tag = self.number()?;
        let pair = Pair { at: self.number()?, n: self.number()? };
        let policy = usize::from(version_of(tag));
        let Some(quota) = policies.get(policy).map(Policy::quota) else {
            return Err(self.damaged("a state names a policy that is not there"));
        };
        let mut entries = Vec::new();
        if matches!(quota.rules(), Rules::Trail(_)) {
            for _ in 0..self.count(16)? {
                entries.push((self.number()?, self.number()?));
            }
        }
        Ok(State { key: Fingerprint::of_tag(tag), policy, pair, entries })
    }

    fn damaged(&self, why: &str) -> MemoryLimiterError {
        let at = self.whole - self.left.len();
        error(format!("the snapshot is damaged at byte {at} of {}: {why}; start without it", self.whole))
    }
}

fn error(message: impl Into<String>) -> MemoryLimiterError {
    MemoryLimiterError::new(MemoryLimiterErrorKind::Snapshot, message)
}
