//! All live states as bytes, and back.
//!
//! Little-endian: a magic and a version; the two seeds; the policies, each with its name and its quota in words; then the
//! states: fingerprint, number of the policy, instant, number, and for a trail its entries. What is read is taken for
//! hostile: lengths are checked before anything is allocated, and a state that its quota could not have made is left out.

use std::collections::HashMap;

use crate::algorithm::carry::Kept;
use crate::algorithm::entry_log::{Entries, Trail};
use crate::algorithm::{Pair, PairRules, Rules};
use crate::policy::Policy;
use crate::quota::Quota;

use super::builder::{MemoryLimiterError, MemoryLimiterErrorKind};
use super::events::Events;
use super::slot_table::{Fingerprint, Seen, version_of};
use super::state::{Hold, State as Held};
use super::store::Store;
use super::versions::UNNAMED;
use super::word::Now;

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
    /// Copies the live states of a store: each that lives from the beginning to the end, as it was at an instant between.
    pub(super) fn of(store: &Store) -> Self {
        let now = store.now(); // not under a lock: the clock may be anybody's
        store.while_no_key_moves(|| {
            let mut snapshot = Self { seeds: store.setup.secret.seeds, policies: Vec::new(), states: Vec::new() };
            let mut places = HashMap::new();
            for place in store.table.places() {
                if store.table.read(place).is_some_and(|seen| seen.tag == 0) {
                    continue;
                }
                let Some(seen) = store.table.lock(place) else { continue };
                let state = snapshot.state(store, seen, now, &mut places);
                store.table.put_back(seen);
                snapshot.states.extend(state);
            }
            snapshot
        })
    }

    /// Copies the state of a slot that is locked, if it lives. Policies are numbered anew: only those of live states.
    fn state(&mut self, store: &Store, seen: Seen, now: Now, places: &mut HashMap<u16, usize>) -> Option<State> {
        let (version, known) = (version_of(seen.tag), store.versions.known());
        let policy = known.policy(version)?;
        let (pair, entries) = match store.unpack(seen, policy.quota().rules(), now) {
            (_, Held::Pair(pair)) => (pair, Vec::new()),
            (chain, Held::Entries) => (Pair { at: 0, n: 0 }, store.arena().view(&chain).iter().collect()),
            _ => return None,
        };
        let policy = *places.entry(version).or_insert_with(|| {
            self.policies.push(policy.clone());
            self.policies.len() - 1 // at least one
        });
        Some(State { key: Fingerprint::of_tag(seen.tag), policy, pair, entries })
    }

    /// Puts the states into a new store. If a key was met twice, since it was forgotten and came back, the later state holds.
    pub(super) fn fill(&self, store: &Store) {
        let now = store.now();
        let mut events = Events::of(store);
        let versions: Vec<u16> = self.policies.iter().map(|policy| store.version(policy)).collect();
        for state in &self.states {
            let (Some(policy), Some(version)) = (self.policies.get(state.policy), versions.get(state.policy)) else {
                continue;
            };
            let rules = policy.quota().rules();
            let kept = match rules {
                Rules::Pair(rules, _) => possible(rules, state.pair, now).map(|pair| Kept::Pair(Some(pair))),
                Rules::Trail(rules) => Some(Kept::Trail(possible_entries(rules, &state.entries, now))),
            };
            if let Some(kept) = kept.filter(|_| *version != UNNAMED) {
                store.replace(Hold::new(state.key, *version, rules), kept, now, &mut events);
            }
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
    if !rules.get().could_be(pair) || pair.at < now.at {
        return None;
    }
    if rules.is_clamped(pair, now.at) {
        return rules.brought_back(pair, now.at);
    }
    Some(pair)
}

/// Returns the entries that are in order and still count, as far as the quota holds them.
fn possible_entries(rules: &Trail, entries: &[(u64, u64)], now: Now) -> Vec<(u64, u64)> {
    let (mut possible, mut total) = (Vec::new(), 0);
    for (start, held) in entries.iter().copied() {
        let counts = start.saturating_add(rules.life_us()) > now.at && start <= now.at.saturating_add(rules.life_us());
        let units = held.min(rules.most().saturating_sub(total));
        let is_newer = possible.last().is_none_or(|(last, _)| *last < start);
        // An entry whose units were all refunded is kept too: it says when the state expires.
        if counts && (units > 0 || held == 0) && start % rules.grain_us() == 0 && is_newer {
            total += units;
            possible.push((start, units));
        }
    }
    possible
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
