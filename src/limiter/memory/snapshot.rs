//! Converts all live states to bytes, and bytes to states.
//!
//! A snapshot consists of a magic text, a version, the two seeds, the policies, and the states. The version is a
//! byte; all other numbers have 64 bits and are little-endian. A policy is stored as its name and its quota, each as
//! text. A state begins with a number that contains its fingerprint and the index of its policy. The two numbers of
//! the state's pair follow. For a log, the number of its entries and two numbers for each entry follow instead.
//! States that name no version are left out. The reader does not trust the bytes. The reader checks lengths
//! before it allocates, and leaves out a state that its quota could not have made.

use std::collections::HashMap;

use smallvec::{SmallVec, smallvec};

use crate::algorithm::carry::NewState;
use crate::algorithm::entry_log::{EntryLog, Listed, LogEntries};
use crate::algorithm::{Decider, Pair, PairDecider};
use crate::error::{ConfigError, ConfigErrorKind};
use crate::policy::Policy;
use crate::quota::Quota;

use super::events::PendingEvents;
use super::locked_key::{LoadedState, LockedKey};
use super::slot_table::{Fingerprint, Seen, version_of};
use super::states::States;
use super::versions::UNNUMBERED;
use super::word::Now;

const MAGIC: &[u8; 8] = b"trl-snap";
const VERSION: u8 = 1;

/// A snapshot that was read, or is to be written.
pub(super) struct Snapshot {
    pub(super) seeds: [u64; 2],
    policies: Vec<Policy>,
    states: Vec<SavedState>,
}

struct SavedState {
    key: Fingerprint,
    /// The index of the policy.
    policy: usize,
    /// The dated entries of a log, or the pair of any other state.
    entries: SmallVec<[(u64, u64); 2]>,
}

impl Snapshot {
    /// Copies the live states of a limiter. Each state that is live during the whole copy is copied as it was at
    /// one instant of the copy.
    pub(super) fn of(states: &States) -> Self {
        let now = states.now(); // not under a lock: the clock may be anybody's
        let mut snapshot = Self { seeds: states.seeds, policies: Vec::new(), states: Vec::new() };
        let mut positions = HashMap::new();
        states.walk(
            |_| false,
            |seen| {
                let state = snapshot.state(states, seen, now, &mut positions);
                snapshot.states.extend(state);
                seen
            },
        );
        snapshot
    }

    /// Copies the state of a slot that is locked, if the state is live. Only policies with live states get an index
    /// in the snapshot.
    fn state(
        &mut self,
        states: &States,
        seen: Seen<'_>,
        now: Now,
        positions: &mut HashMap<u64, usize>,
    ) -> Option<SavedState> {
        let (version, known) = (version_of(seen.tag), states.versions.known());
        let policy = known.policy(version)?;
        let entries = match states.unpack(seen, policy.quota().decider(), now) {
            (_, LoadedState::Pair(pair)) => smallvec![(pair.at, pair.n)],
            (chain, LoadedState::Entries) => states.arena().view(&chain).iter().collect(),
            _ => return None,
        };
        let policy = *positions.entry(version.into()).or_insert_with(|| {
            self.policies.push(policy.clone());
            self.policies.len() - 1 // at least one
        });
        Some(SavedState { key: Fingerprint::of_tag(seen.tag), policy, entries })
    }

    /// Puts the states into a new limiter. If the copy met a key twice, because the key was forgotten and came
    /// back, the later state counts.
    pub(super) fn fill(&self, states: &States) {
        let now = states.now();
        let mut events = PendingEvents::of(states);
        let versions: Vec<u16> = self.policies.iter().map(|policy| states.version(policy)).collect();
        for state in &self.states {
            debug_assert!(state.policy < self.policies.len(), "the reader refuses a state without a policy");
            let (Some(policy), Some(version)) = (self.policies.get(state.policy), versions.get(state.policy)) else {
                continue;
            };
            let rules = policy.quota().decider();
            let kept = match (rules, state.entries.as_slice()) {
                (Decider::Pair(rules, _), [(at, n)]) => {
                    possible(rules, Pair { at: *at, n: *n }, now).map(|pair| NewState::Pair(Some(pair)))
                }
                (Decider::EntryLog(rules), entries) => {
                    let possible = possible_entries(rules, entries, now);
                    (!possible.is_empty()).then_some(NewState::Entries(possible))
                }
                _ => None,
            };
            let Some(kept) = kept.filter(|_| *version != UNNUMBERED) else { continue };
            if !states.replace(&|| LockedKey::new(state.key, *version, policy.quota()), &kept, &mut events) {
                events.evicted(is_throttled(rules, &kept, now));
            }
        }
    }

    pub(super) fn write(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64 + 32 * self.states.len());
        out.extend_from_slice(MAGIC);
        out.push(VERSION);
        let put = |out: &mut Vec<u8>, number: u64| out.extend_from_slice(&number.to_le_bytes());
        self.seeds.iter().for_each(|seed| put(&mut out, *seed));
        put(&mut out, self.policies.len() as u64);
        for policy in &self.policies {
            for text in [policy.stored_name(), &policy.quota().to_string()] {
                put(&mut out, text.len() as u64);
                out.extend_from_slice(text.as_bytes());
            }
        }
        put(&mut out, self.states.len() as u64);
        for SavedState { key, policy, entries } in &self.states {
            put(&mut out, key.bits() | *policy as u64);
            if is_log(&self.policies[*policy]) {
                put(&mut out, entries.len() as u64);
            }
            for (start, units) in entries {
                put(&mut out, *start);
                put(&mut out, *units);
            }
        }
        out
    }

    pub(super) fn read(bytes: &[u8]) -> Result<Self, ConfigError> {
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
        let count = reader.count(16)?;
        let mut states = Vec::with_capacity(count);
        for _ in 0..count {
            states.push(reader.state(&policies)?);
        }
        Ok(Self { seeds, policies, states })
    }
}

/// Returns the state as a decision may find it now. A state that is further ahead than a word can hold is clamped by
/// the rules of its quota.
fn possible(rules: &PairDecider, pair: Pair, now: Now) -> Option<Pair> {
    if !rules.get().could_be(pair) || pair.at < now.at {
        return None;
    }
    if rules.is_clamped(pair, now.at) {
        return rules.brought_back(pair, now.at);
    }
    Some(pair)
}

/// Returns the entries that are in order and still count, up to the number that the quota can hold. A state
/// that is further ahead than the quota allows is read as the next charge would read it.
fn possible_entries(rules: &EntryLog, entries: &[(u64, u64)], now: Now) -> Vec<(u64, u64)> {
    let (mut possible, mut total) = (Vec::new(), 0);
    for (start, held) in entries.iter().copied() {
        let counts = start.saturating_add(rules.life_us()) > now.at;
        let units = held.min(rules.most()).min(rules.most_kept().saturating_sub(total));
        let is_newer = possible.last().is_none_or(|(last, _)| *last < start);
        // Keeps an entry even if all its units were refunded, because the entry says when the state expires.
        if counts && (units > 0 || held == 0) && start % rules.grain_us() == 0 && is_newer {
            total += units;
            possible.push((start, units));
        }
    }
    rules.gathered(&Listed(&possible), now.at).map_or(possible, Vec::from)
}

/// Returns whether a state leaves its key no allowance.
fn is_throttled(rules: &Decider, kept: &NewState, now: Now) -> bool {
    match (rules, kept) {
        (Decider::Pair(rules, _), NewState::Pair(Some(pair))) => rules.get().fullness(*pair, now.at).throttled,
        (Decider::EntryLog(rules), NewState::Entries(entries)) => rules.fullness(&Listed(entries), now.at).throttled,
        _ => false,
    }
}

fn is_log(policy: &Policy) -> bool {
    matches!(policy.quota().decider(), Decider::EntryLog(_))
}

/// Reads numbers off the front.
struct Reader<'a> {
    left: &'a [u8],
    whole: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], ConfigError> {
        match self.left.split_at_checked(count) {
            Some((taken, left)) => {
                self.left = left;
                Ok(taken)
            }
            None => Err(self.damaged("it ends too early")),
        }
    }

    fn number(&mut self) -> Result<u64, ConfigError> {
        match self.left.split_first_chunk() {
            Some((number, left)) => {
                self.left = left;
                Ok(u64::from_le_bytes(*number))
            }
            None => Err(self.damaged("it ends too early")),
        }
    }

    /// Reads the number of elements of a list. At least `bytes_each` bytes must follow for each element.
    fn count(&mut self, bytes_each: usize) -> Result<usize, ConfigError> {
        let count = self.number()?;
        match usize::try_from(count) {
            Ok(count) if count <= self.left.len() / bytes_each => Ok(count),
            _ => Err(self.damaged("a length is too large")),
        }
    }

    fn text(&mut self) -> Result<&'a str, ConfigError> {
        let length = self.count(1)?;
        let bytes = self.take(length)?;
        std::str::from_utf8(bytes).map_err(|_| self.damaged("a text is not UTF-8"))
    }

    fn policy(&mut self) -> Result<Policy, ConfigError> {
        let (name, words) = (self.text()?, self.text()?);
        let quota: Quota = words.parse().map_err(|error| self.damaged(&format!("{error}")))?;
        Policy::new(name, quota).map_err(|error| self.damaged(&format!("{error}")))
    }

    fn state(&mut self, policies: &[Policy]) -> Result<SavedState, ConfigError> {
        let tag = self.number()?;
        let policy = usize::from(version_of(tag));
        let Some(quota) = policies.get(policy) else {
            return Err(self.damaged("a state names a policy that the snapshot does not have"));
        };
        let count = if is_log(quota) { self.count(16)? } else { 1 };
        let entries = (0..count).map(|_| Ok((self.number()?, self.number()?))).collect::<Result<_, _>>()?;
        Ok(SavedState { key: Fingerprint::new(tag), policy, entries }) // no state in a snapshot is of units that are held
    }

    fn damaged(&self, why: &str) -> ConfigError {
        let at = self.whole - self.left.len();
        error(format!("the snapshot is damaged at byte {at} of {}: {why}; start without it", self.whole))
    }
}

fn error(message: impl Into<String>) -> ConfigError {
    ConfigError::new(ConfigErrorKind::Snapshot, message)
}
