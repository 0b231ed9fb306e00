//! The state of a key while this thread has locked its slot: read, decide, write, for states of every size.

use crate::algorithm::carry::{Fit, NewState, OldState};
use crate::algorithm::entry_log::{Edit, EntryLog, Listed, LogEntries};
use crate::algorithm::{Decider, Next, Pair, TakeMode};
use crate::decision::ChargeDecision;
use crate::key::Key;
use crate::policy::Policy;
use crate::quota::Quota;

use super::entry_arena::Chain;
use super::events::PendingEvents;
use super::places;
use super::slot_table::{Fingerprint, HELD_VERSION, Seen, SlotClaim, SlotRef, version_of};
use super::states::States;
use super::versions::{UNNUMBERED, word_layout};
use super::word::{HeldUnits, HeldWord, NO_STATE, Now, block_of, block_word};

/// A key whose slot is locked, or that is known to have no slot.
pub(super) struct LockedKey<'a> {
    pub(super) key: Fingerprint,
    version: u16,
    quota: &'a Quota,
    rules: &'a Decider,
    /// True if an earlier charge of the set has the same key. The caller should have added up the two
    /// charges.
    pub(super) is_twice: bool,
    /// The slot in which the key was found.
    pub(super) slot: Option<SlotRef<'a>>,
    /// The locked slot as it was read; `None` if the key has no slot, or the slot has been written.
    pub(super) locked: Option<Seen<'a>>,
    /// True if the key finds no room before the table has grown.
    pub(super) awaits_growth: bool,
    /// True if an earlier request waits in line for the key's units.
    pub(super) is_held_back: bool,
    /// The blocks of the slot's state in the arena, whatever the version of the state.
    chain: Chain,
    /// True if the chain is new, and not in the slot yet.
    is_begun: bool,
    /// A block for the first entry of a chain with a head.
    spare: Option<u32>,
    state: LoadedState,
    /// If another quota wrote the stored state, says which changes of this quota write the converted state.
    fit: Fit,
    change: StateChange,
}

/// A state as it was read. A state that another quota of the policy wrote is converted for this quota, and the slot
/// keeps the old state until this quota writes.
#[derive(Debug)]
pub(super) enum LoadedState {
    /// No state, or one that has expired.
    Nothing,
    Pair(Pair),
    /// The entries of the chain.
    Entries,
    /// Entries that are not in the chain yet.
    Listed(Vec<(u64, u64)>),
    /// Units that requests hold.
    Held(HeldUnits),
}

/// The change to write to a key's state.
#[derive(Debug)]
enum StateChange {
    Nothing,
    Pair(Pair),
    Clear,
    Entries(Edit),
    /// The start of an entry, and the units to remove from that entry.
    Remove(u64, u64),
    Held(HeldUnits),
}

impl<'a> LockedKey<'a> {
    pub(super) fn new(key: Fingerprint, version: u16, quota: &'a Quota) -> Self {
        Self {
            key,
            version,
            quota,
            rules: quota.decider(),
            is_twice: false,
            slot: None,
            locked: None,
            awaits_growth: false,
            is_held_back: false,
            chain: Chain::default(),
            is_begun: false,
            spare: None,
            state: LoadedState::Nothing,
            fit: Fit::Fits,
            change: StateChange::Nothing,
        }
    }

    #[cfg(all(test, not(ratelimit_loom)))]
    pub(super) fn version(&self) -> u16 {
        self.version
    }

    pub(super) fn change_nothing(&mut self) {
        self.change = StateChange::Nothing;
    }

    /// Notes that the key's state is to be removed.
    pub(super) fn clear(&mut self) {
        if self.locked.is_some() {
            self.change = StateChange::Clear;
        }
    }

    /// Notes that a state that was kept elsewhere replaces the key's state.
    pub(super) fn adopt(&mut self, kept: NewState) {
        self.state = kept.into();
        self.change = self.state.as_it_is();
    }
}

impl LoadedState {
    /// Returns the change that writes the state as it was read.
    fn as_it_is(&self) -> StateChange {
        match self {
            Self::Nothing => StateChange::Clear,
            Self::Pair(pair) => StateChange::Pair(*pair),
            Self::Held(held) => StateChange::Held(*held),
            Self::Entries | Self::Listed(_) => StateChange::Entries(Edit::default()),
        }
    }
}

impl From<NewState> for LoadedState {
    fn from(kept: NewState) -> Self {
        match kept {
            NewState::Pair(Some(pair)) => Self::Pair(pair),
            NewState::Entries(entries) if !entries.is_empty() => Self::Listed(entries),
            NewState::Pair(None) | NewState::Entries(_) => Self::Nothing,
        }
    }
}

impl States {
    /// Prepares to lock the state of a (policy, key) pair. The caller must hold no lock.
    #[inline(always)]
    pub(super) fn hold<'a>(&'a self, policy: &'a Policy, key: &Key) -> LockedKey<'a> {
        let quota = policy.quota();
        if let Decider::Places(_) = quota.decider() {
            return LockedKey::new(self.fingerprint_of_held(policy, key), HELD_VERSION, quota);
        }
        let version = self.version(policy);
        LockedKey::new(self.fingerprint(policy, key), version, quota)
    }

    // Read ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Reads the state of a locked key. `now` was read after the key was locked, so `now` is not older than the
    /// state.
    #[inline(always)]
    pub(super) fn read(&self, hold: &mut LockedKey<'_>, now: Now) {
        let Some(seen) = hold.locked else { return };
        let has_own_quota = match version_of(seen.tag) {
            UNNUMBERED => {
                hold.version == UNNUMBERED && self.arena().names(block_of(seen.word), &hold.quota.spec().of_states())
            }
            version => version == hold.version,
        };
        if has_own_quota {
            (hold.chain, hold.state) = self.unpack(seen, hold.rules, now);
        } else {
            self.take_over(hold, seen, now);
        }
    }

    /// Returns the blocks and the state of a slot that was written under these rules. If the state is larger than a
    /// word, the slot must be locked.
    #[inline]
    pub(super) fn unpack(&self, seen: Seen<'_>, rules: &Decider, now: Now) -> (Chain, LoadedState) {
        if let Decider::Places(_) = rules {
            return self.unpack_places(seen);
        }
        if let Some(layout) = word_layout(rules, version_of(seen.tag)) {
            return (Chain::default(), layout.unpack(seen.word, now).map_or(LoadedState::Nothing, LoadedState::Pair));
        }
        let chain = self.load_chain(seen);
        let state = match rules {
            Decider::Pair(..) => {
                let live = self.arena().pair(&chain).filter(|pair| pair.at >= now.at);
                live.map_or(LoadedState::Nothing, LoadedState::Pair)
            }
            Decider::Places(_) => LoadedState::Nothing, // see above
            Decider::EntryLog(rules) => match self.expiry(&chain, rules) {
                Some(expires) if expires > now.at => LoadedState::Entries,
                _ => LoadedState::Nothing,
            },
        };
        (chain, state)
    }

    fn unpack_places(&self, seen: Seen<'_>) -> (Chain, LoadedState) {
        let block = match HeldWord::of(seen.word) {
            HeldWord::Nothing => return (Chain::default(), LoadedState::Nothing),
            HeldWord::Units(held) => return (Chain::default(), LoadedState::Held(held)),
            HeldWord::InArena(block) => block,
        };
        let chain = self.arena().load(block);
        let held = self.arena().pair(&chain).map(|Pair { at: run, n: units }| HeldUnits { units, run });
        (chain, held.map_or(LoadedState::Nothing, LoadedState::Held))
    }

    /// Returns the blocks of a slot that is locked and whose state is in the arena.
    pub(super) fn load_chain(&self, seen: Seen<'_>) -> Chain {
        let block = block_of(seen.word);
        if version_of(seen.tag) == UNNUMBERED { self.arena().load_headed(block) } else { self.arena().load(block) }
    }

    /// Returns the instant from which the entries of a chain no longer count, if the chain has entries.
    fn expiry(&self, chain: &Chain, rules: &EntryLog) -> Option<u64> {
        let (start, _) = self.arena().view(chain).newest()?;
        Some(start.saturating_add(rules.life_us()))
    }

    /// Reads a state of another version, and converts it to this version.
    #[cold]
    fn take_over(&self, hold: &mut LockedKey<'_>, seen: Seen<'_>, now: Now) {
        let from = match version_of(seen.tag) {
            // If the slot's word names no block, there is no state.
            UNNUMBERED => self.arena().quota(block_of(seen.word)),
            version => {
                let known = self.versions.known().policy(version).map(|policy| *policy.quota());
                debug_assert!(known.is_some(), "the version in the tag of a state is known");
                known
            }
        };
        let (Some(from), to) = (from, hold.quota) else { return };
        let (chain, state) = self.unpack(seen, from.decider(), now);
        hold.chain = chain;
        let view = self.arena().view(&chain);
        let held = match state {
            LoadedState::Pair(pair) => OldState::Pair(pair),
            LoadedState::Entries => OldState::Entries(&view),
            LoadedState::Nothing | LoadedState::Listed(_) | LoadedState::Held(_) => return,
        };
        let share = to.spec().proportional.then_some((from.capacity(), to.capacity()));
        let (kept, fit) = to.decider().take_over(from.decider(), &held, now.at, share);
        (hold.state, hold.fit) = (kept.into(), fit);
    }

    // Decide ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Decides about a charge, and notes what the charge changes.
    #[inline(always)]
    pub(super) fn decide(&self, hold: &mut LockedKey<'_>, now: Now, cost: u64, how: TakeMode) -> ChargeDecision {
        let decision = match hold.rules {
            Decider::Pair(rules, _) => {
                let pair = if let LoadedState::Pair(pair) = hold.state { Some(pair) } else { None };
                let answer = rules.decide_how(pair, now.at, cost, how);
                hold.change = answer.next.into();
                answer.decision
            }
            Decider::EntryLog(rules) => {
                let answer = match &hold.state {
                    LoadedState::Entries => rules.decide_how(&self.arena().view(&hold.chain), now.at, cost, how),
                    LoadedState::Listed(entries) => rules.decide_how(&Listed(entries), now.at, cost, how),
                    LoadedState::Nothing | LoadedState::Pair(_) | LoadedState::Held(_) => {
                        rules.decide_how(&Listed(&[]), now.at, cost, how)
                    }
                };
                hold.change = answer.edit.map_or(StateChange::Nothing, StateChange::Entries);
                answer.decision
            }
            Decider::Places(rules) => {
                let held = if let LoadedState::Held(held) = hold.state { Some(held) } else { None };
                let (verdict, after) = places::look(*rules, held, self.run(), (cost, how), hold.is_held_back);
                hold.change = if verdict.taken() > 0 { StateChange::Held(after) } else { StateChange::Nothing };
                rules.describe(verdict, after.run)
            }
        };
        match (hold.fit, &hold.change) {
            (Fit::Ahead, StateChange::Nothing) if cost > 0 => hold.change = hold.state.as_it_is(),
            (Fit::Over, _) => hold.change_nothing(),
            _ => {}
        }
        decision
    }

    /// Notes the change that a refund makes: the refund returns the part of `units` that the receipt `own` still holds.
    /// Returns `true` if the refund changes nothing yet, because a later slot of the queue is taken.
    pub(super) fn decide_refund(&self, hold: &mut LockedKey<'_>, now: Now, units: u64, own: Pair) -> bool {
        if hold.fit == Fit::Over {
            return false;
        }
        let held = match (&hold.state, hold.rules) {
            (LoadedState::Held(held), _) => {
                hold.change = places::without(*held, units, own.at).map_or(StateChange::Nothing, StateChange::Held);
                return false;
            }
            (LoadedState::Pair(pair), Decider::Pair(rules, _)) => {
                hold.change = rules.get().refund(*pair, now.at, units, own).into();
                return rules.get().is_behind(*pair, now.at, own);
            }
            (LoadedState::Entries, Decider::EntryLog(rules)) => {
                rules.refundable(&self.arena().view(&hold.chain), now.at, units, own.at)
            }
            (LoadedState::Listed(entries), Decider::EntryLog(rules)) => {
                rules.refundable(&Listed(entries), now.at, units, own.at)
            }
            _ => None,
        };
        hold.change = held.map_or(StateChange::Nothing, |(start, units)| StateChange::Remove(start, units));
        false
    }

    // Write ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Makes room for the change of a locked key: a slot if the key has none, and a block if its chain needs one.
    /// Returns `false` if there is no room; the locked key then changes nothing.
    #[inline(always)]
    pub(super) fn make_room<'a>(&'a self, hold: &mut LockedKey<'a>, now: Now, events: &mut PendingEvents<'_>) -> bool {
        // A change that only removes units needs no new block, so no other key is forgotten to make room.
        let adds = match hold.change {
            StateChange::Nothing | StateChange::Clear => false,
            StateChange::Held(held) => held.units > 0 && held.pack().is_none(),
            StateChange::Remove(..) => !matches!(hold.state, LoadedState::Entries),
            StateChange::Pair(_) | StateChange::Entries(_) => true,
        };
        let has_room = matches!(hold.change, StateChange::Nothing)
            || (hold.locked.is_some() || self.make_slot(hold, now, events))
                && (!adds
                    || word_layout(hold.rules, hold.version).is_some()
                    || (!hold.chain.wants_block() || self.make_block(hold)) && self.make_spare(hold));
        if !has_room {
            hold.change_nothing();
        }
        has_room
    }

    fn make_slot<'a>(&'a self, hold: &mut LockedKey<'a>, now: Now, events: &mut PendingEvents<'_>) -> bool {
        // A quota of 0 may leave no state to store, and the key then needs no slot.
        if matches!(hold.change, StateChange::Clear) {
            hold.change_nothing();
            return true;
        }
        match self.claim(hold.key, hold.version, now, events) {
            SlotClaim::Slot(slot) => hold.locked = Some(Seen { slot, tag: 0, word: NO_STATE }),
            SlotClaim::AfterGrowth => hold.awaits_growth = true,
            SlotClaim::Nothing => {}
        }
        hold.locked.is_some()
    }

    fn make_block(&self, hold: &mut LockedKey<'_>) -> bool {
        self.free_a_block();
        if !hold.chain.has_block() {
            let Some(chain) = self.arena().begin(hold.key) else { return false };
            (hold.chain, hold.is_begun) = (chain, true);
        }
        true
    }

    /// Makes room for the first entry of a chain with a head.
    fn make_spare(&self, hold: &mut LockedKey<'_>) -> bool {
        let is_needed = hold.version == UNNUMBERED && matches!(hold.rules, Decider::EntryLog(_));
        if is_needed && hold.spare.is_none() && hold.chain.wants_entries() {
            self.free_a_block();
            hold.spare = self.arena().spare(hold.key);
            return hold.spare.is_some();
        }
        true
    }

    /// Writes the change of a locked key, for which there is room, and unlocks its slot.
    #[inline]
    pub(super) fn write(&self, hold: &mut LockedKey<'_>, now: Now) {
        let LockedKey { key, version, quota, rules, chain, spare, state, change, .. } = hold;
        let spec = (*version == UNNUMBERED).then(|| quota.spec().of_states());
        let word = match (&mut *change, rules) {
            (StateChange::Pair(pair), rules) => match word_layout(rules, *version) {
                Some(layout) => {
                    self.free_chain(*key, chain);
                    layout.pack(*pair, now)
                }
                None => {
                    match &spec {
                        Some(spec) => self.arena().set_headed_pair(*key, chain, *pair, spec),
                        None => self.arena().set_pair(*key, chain, *pair),
                    }
                    // The chain expires one microsecond after the pair's instant, because the units of the pair may
                    // still count at that instant.
                    self.store_chain(*key, chain, Some(pair.at.saturating_add(1)), now)
                }
            },
            (StateChange::Held(held), _) if held.units > 0 => held.pack().unwrap_or_else(|| {
                self.arena().set_pair(*key, chain, Pair { at: held.run, n: held.units });
                self.arena().store(*key, chain);
                HeldUnits::in_arena(chain.block())
            }),
            (StateChange::Held(_), _) => {
                self.free_chain(*key, chain);
                HeldUnits::returned(now.relative)
            }
            (StateChange::Clear, _) => {
                self.free_chain(*key, chain);
                NO_STATE
            }
            (change @ (StateChange::Entries(_) | StateChange::Remove(..)), Decider::EntryLog(rules)) => {
                let arena = self.arena();
                if !matches!(state, LoadedState::Entries) {
                    // The stored state has expired, or belongs to another quota.
                    match &spec {
                        Some(spec) => arena.empty_headed(*key, chain, spec, spare),
                        None => arena.empty_plain(*key, chain),
                    }
                }
                if let LoadedState::Listed(entries) = state {
                    let gone = match change {
                        StateChange::Entries(edit) if edit.move_to.is_none() => std::mem::take(&mut edit.drop),
                        _ => 0,
                    };
                    entries.iter().skip(gone).for_each(|(start, units)| arena.push(*key, chain, *start, *units));
                }
                match change {
                    StateChange::Remove(start, units) => arena.remove_units(*key, chain, *start, *units),
                    StateChange::Entries(edit) => arena.apply(*key, chain, edit, rules.most()),
                    _ => {}
                }
                let expires = self.expiry(chain, rules);
                self.store_chain(*key, chain, expires, now)
            }
            (StateChange::Nothing, _) => return,
            (StateChange::Entries(_) | StateChange::Remove(..), Decider::Pair(..) | Decider::Places(_)) => {
                debug_assert!(false, "a state that is a pair has no entries to change");
                return;
            }
        };
        if let Some(spare) = spare.take() {
            self.arena().free_spare(*key, spare);
        }
        if let Some(seen) = hold.locked.take() {
            seen.slot.unlock(key.tag(*version), word);
        }
    }

    /// Stores a chain, and returns the word for its slot.
    #[inline]
    fn store_chain(&self, key: Fingerprint, chain: &mut Chain, expires: Option<u64>, now: Now) -> u64 {
        self.arena().store(key, chain);
        expires.map_or(NO_STATE, |expires| block_word(chain.block(), expires, now))
    }

    /// Unlocks a slot that was not written.
    pub(super) fn put_back(&self, hold: &mut LockedKey<'_>) {
        if let Some(spare) = hold.spare.take() {
            self.arena().free_spare(hold.key, spare);
        }
        if let Some(seen) = hold.locked.take() {
            if hold.is_begun {
                self.free_chain(hold.key, &mut hold.chain);
            }
            seen.put_back();
        }
    }

    /// Frees the blocks of a chain.
    #[inline]
    fn free_chain(&self, key: Fingerprint, chain: &mut Chain) {
        if chain.has_block() {
            self.arena().clear(key, chain);
        }
    }

    /// Frees the blocks of a slot that is locked.
    pub(super) fn free_blocks(&self, seen: Seen<'_>) {
        let first = block_of(seen.word);
        if self.versions.form(version_of(seen.tag)).in_arena() && first != 0 {
            let mut chain = self.load_chain(seen);
            self.arena().clear(Fingerprint::of_tag(seen.tag), &mut chain);
        }
    }
}

impl From<Next> for StateChange {
    #[inline]
    fn from(next: Next) -> Self {
        match next {
            Next::Keep => Self::Nothing,
            Next::Clear => Self::Clear,
            Next::Set(pair) => Self::Pair(pair),
        }
    }
}
