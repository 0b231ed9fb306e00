//! Room for a new key: a free slot, a slot whose key can move to its other line, or the slot of the key that is least
//! worth keeping.
//!
//! The caller holds slots and stripes, so no function here waits. A slot is skipped if another thread holds a lock
//! that is needed for the slot.

use smallvec::SmallVec;

use crate::algorithm::{Decider, Fullness, PairDecider};
use crate::base::sync::Ordering;

use super::entry_arena::Chain;
use super::events::PendingEvents;
use super::locked_key::LoadedState;
use super::setup::OnFull;
use super::slot_table::{Fingerprint, Growth, HELD_VERSION, SLOTS_PER_LINE, Seen, SlotClaim, SlotRef, version_of};
use super::states::States;
use super::versions::{KnownPolicies, UNNUMBERED, word_layout};
use super::word::{HeldWord, NO_STATE, Now, block_of, expiry_of, is_expired, is_returned_after};

/// The maximum number of searches of a key's lines. A search is repeated if another thread took the slot
/// first.
const ATTEMPTS: usize = 16;

/// The maximum number of pinned slots of a line, so that other keys find room. If both lines of a pinned key have
/// reached the maximum while the table grows, the key takes any free slot of these lines.
const PINNED_MAX: usize = SLOTS_PER_LINE / 2;

/// The maximum number of pinned keys that move, each to the slot of the next, so that another pinned key finds room. In
/// a limiter filled to its capacity with pinned keys, one pinned key in five found no room if no key moved, and one in
/// 200 if up to two keys moved.
const PINNED_MOVES: u32 = 4;

/// If this many new keys in a row found no room in any other line, the table counts as full. If nineteen of twenty
/// slots are live, one key in five finds no room, so 64 keys without room in a row are practically impossible.
const CROWDED: u32 = 64;

/// The time for which a key keeps its slot after its state expired, while the table can grow.
const KEPT_US: u64 = 10_000_000;

/// The maximum number of blocks that one call draws at random if the arena is full.
const DRAWS_MAX: usize = 16;

/// How much a state is worth keeping. The limiter first forgets the state that has used the smallest part of its
/// quota. If all states are out of allowance, the limiter forgets the state that expires first, and closed blocks
/// last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Worth {
    rank: Rank,
    /// The used part of the capacity, if some allowance is left.
    used: u64,
    expires: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    Left,
    Throttled,
    Closed,
}

impl Worth {
    fn new(rules: &Decider, fullness: Fullness, expires: u64) -> Self {
        let rank = match rules {
            _ if !fullness.throttled => Rank::Left,
            Decider::Pair(PairDecider::Block(_), _) => Rank::Closed,
            _ => Rank::Throttled,
        };
        Self { rank, used: if rank == Rank::Left { fullness.used } else { 0 }, expires }
    }

    /// Returns whether forgetting the state gives its client a fresh allowance.
    fn is_throttled(&self) -> bool {
        self.rank != Rank::Left
    }
}

impl States {
    /// Locks a slot for a key that has none, and empties the slot. The caller holds the key's stripe.
    #[cold]
    pub(super) fn claim<'a>(
        &'a self,
        key: Fingerprint,
        version: u16,
        now: Now,
        events: &mut PendingEvents<'_>,
    ) -> SlotClaim<'a> {
        let is_pinned = self.versions.form(version).is_pinned();
        self.note_claim(now);
        let mut read = now;
        for _ in 0..ATTEMPTS {
            // Each search computes `now` once. If the growth ends during the search, the slots of states that expired
            // within `KEPT_US` still count as kept for this search.
            let may_grow = self.table.may_grow();
            let now = if may_grow { read.earlier(KEPT_US) } else { read };
            let mut slots = self.table.candidates(key);
            if is_pinned {
                let all = slots.clone();
                slots.retain(|seen| self.pinned_beside(*seen, &all, now) < PINNED_MAX);
                // While the table grows, a pinned state may take any slot. Without this rule, this call would split all
                // remaining lines and then begin the next growth.
                if slots.is_empty() && self.table.growth() != Growth::Settled {
                    slots = all;
                } else if slots.is_empty() && !all.is_empty() && !may_grow {
                    let vacated = all.iter().find_map(|seen| self.vacate_pinned(*seen, now, PINNED_MOVES));
                    return vacated.map_or(SlotClaim::Nothing, SlotClaim::Slot);
                }
            }
            // Takes a slot that was never used, preferably of the first line. If all slots were used before, takes
            // the slot that has been free longest, so that an idle key keeps its slot for a while.
            let free = slots.iter().filter(|seen| self.is_free(**seen, now));
            if let Some(seen) = free.min_by_key(|seen| if seen.tag == 0 { 0 } else { seen.word.max(1) }) {
                if let Some(slot) = self.lock_free_slot(*seen) {
                    self.found_room(true);
                    return SlotClaim::Slot(slot);
                }
                read = self.now_after(); // another thread was quicker, or the clock stepped back
                continue;
            }
            let moved = self.vacate_one(key, &slots, now);
            // If `slots` is empty, pinned states occupy all slots that the key could take. Other lines of the table may
            // have room.
            if !slots.is_empty() {
                self.found_room(moved.is_some());
            }
            if let Some(slot) = moved {
                return SlotClaim::Slot(slot);
            }
            if may_grow {
                return SlotClaim::AfterGrowth;
            }
            if self.setup.on_full == OnFull::Deny {
                return SlotClaim::Nothing;
            }
            let known = self.versions.known();
            let worth = |seen: Seen<'a>| Some((self.worth(seen, &known, now)?, seen));
            let least = slots.iter().copied().filter_map(worth).min_by_key(|(worth, _)| *worth);
            if let Some((worth, slot)) = least.and_then(|(worth, seen)| Some((worth, self.lock_and_empty(seen)?))) {
                events.evicted(worth.is_throttled());
                return SlotClaim::Slot(slot);
            }
        }
        SlotClaim::Nothing
    }

    /// Notes the second in which a key gets a slot.
    fn note_claim(&self, now: Now) {
        let second = (now.relative / 1_000_000) as u32; // below 2^29
        if self.claimed_s.load(Ordering::Relaxed) != second {
            self.claimed_s.store(second, Ordering::Relaxed); // only a change: a write takes the line from other threads
        }
    }

    /// Returns the number of live states, excluding those that are being written.
    pub(super) fn keys(&self) -> usize {
        let now = self.now();
        self.table
            .all_slots()
            .filter_map(SlotRef::read)
            .filter(|seen| seen.tag != 0 && !self.is_free(*seen, now))
            .count()
    }

    /// Returns the latest expiry of states whose slots may be used again.
    ///
    /// While the table can grow, a key keeps its slot for a while after its state expired. So the next charge of a
    /// client that comes back takes the short way, and the size of the table follows the number of clients.
    pub(super) fn free_until(&self, now: Now) -> Now {
        if self.table.may_grow() { now.earlier(KEPT_US) } else { now }
    }

    pub(super) fn is_free(&self, seen: Seen<'_>, now: Now) -> bool {
        let version = version_of(seen.tag);
        is_expired(seen.word, self.versions.form(version).shift(), now)
            // After the clock stepped back, the instant at which a key returned its last unit may be in the future.
            // Without this condition, the key would keep its slot at least until that instant.
            || version == HELD_VERSION && is_returned_after(seen.word, now, KEPT_US)
    }

    /// Returns whether a state is never forgotten while it counts. The state of a key without held units is
    /// not pinned.
    fn is_pinned(&self, seen: Seen<'_>) -> bool {
        match version_of(seen.tag) {
            HELD_VERSION => HeldWord::of(seen.word) != HeldWord::Nothing,
            version => self.versions.form(version).is_pinned(),
        }
    }

    /// Returns the number of pinned states in a slot's line.
    fn pinned_beside(&self, seen: Seen<'_>, slots: &[Seen<'_>], now: Now) -> usize {
        let line = self.table.line_of(seen.slot);
        let pinned = |other: &&Seen<'_>| {
            self.table.line_of(other.slot) == line && self.is_pinned(**other) && !self.is_free(**other, now)
        };
        slots.iter().filter(pinned).count()
    }

    /// Locks and empties a slot whose state has expired. The clock is read again, because it may have stepped back,
    /// and the state may have been written after the step.
    fn lock_free_slot<'a>(&self, seen: Seen<'a>) -> Option<SlotRef<'a>> {
        let is_free = seen.word == NO_STATE || self.is_free(seen, self.now_after());
        if is_free { self.lock_and_empty(seen) } else { None }
    }

    fn lock_and_empty<'a>(&self, seen: Seen<'a>) -> Option<SlotRef<'a>> {
        if !seen.try_lock() {
            return None;
        }
        self.free_blocks(seen);
        seen.slot.set_tag(0);
        Some(seen.slot)
    }

    /// Moves the key of one of these slots to its other line, and returns the slot, locked and empty. In a table that
    /// cannot grow, another key of the other line is moved first if that line is full.
    ///
    /// Each look into another line waits for memory. After [`CROWDED`] new keys in a row found no room, the limiter
    /// looks into another line for only about one in eight further keys, until a key finds room. With this rule, a
    /// flood of fresh keys takes a tenth of the time.
    fn vacate_one<'a>(&self, key: Fingerprint, slots: &[Seen<'a>], now: Now) -> Option<SlotRef<'a>> {
        if self.crowding.load(Ordering::Relaxed) < CROWDED || self.setup.on_full == OnFull::Deny {
            let vacate = |deeper| slots.iter().find_map(|seen| self.vacate(*seen, now, deeper));
            return vacate(false).or_else(|| if self.table.may_grow() { None } else { vacate(true) });
        }
        let lot = (key.bits() >> 24) as usize % (8 * slots.len().max(1));
        self.vacate(*slots.get(lot)?, now, false)
    }

    /// Counts the new keys in a row that found no room.
    fn found_room(&self, found: bool) {
        let misses = self.crowding.load(Ordering::Relaxed);
        let now = if found { 0 } else { (misses + 1).min(CROWDED) };
        if now != misses {
            self.crowding.store(now, Ordering::Relaxed); // only a change: a write takes the line from other threads
        }
    }

    /// Moves the key of a slot to a free slot of its other line, if there is one, and returns the slot, locked and
    /// empty. If that line is full and `deeper` is true, a key of that line is moved first. Pinned keys are moved
    /// only by [`vacate_pinned`](Self::vacate_pinned).
    pub(super) fn vacate<'a>(&self, seen: Seen<'a>, now: Now, deeper: bool) -> Option<SlotRef<'a>> {
        if self.is_pinned(seen) {
            return None;
        }
        let to = match self.table.elsewhere(seen).find(|to| self.is_free(*to, now)) {
            Some(free) => self.lock_free_slot(free)?,
            None if deeper => self.table.elsewhere(seen).find_map(|other| self.vacate(other, now, false))?,
            None => return None,
        };
        self.move_key(seen, to)
    }

    /// Moves the pinned key of a slot to the key's other line, if that line has fewer than [`PINNED_MAX`] pinned keys,
    /// and returns the slot, locked and empty. If the other line has [`PINNED_MAX`] pinned keys, one of these is moved
    /// first, in at most `moves` moves in all.
    pub(super) fn vacate_pinned<'a>(&self, seen: Seen<'a>, now: Now, moves: u32) -> Option<SlotRef<'a>> {
        if moves == 0 || !self.is_pinned(seen) || self.is_free(seen, now) {
            return None;
        }
        let others: SmallVec<[Seen<'_>; 2 * SLOTS_PER_LINE]> = self.table.elsewhere(seen).collect();
        let to = if self.pinned_beside(*others.first()?, &others, now) < PINNED_MAX {
            match others.iter().find(|to| self.is_free(**to, now)) {
                Some(free) => self.lock_free_slot(*free)?,
                None => others.iter().find_map(|other| self.vacate(*other, now, false))?,
            }
        } else {
            others.iter().find_map(|other| self.vacate_pinned(*other, now, moves - 1))?
        };
        self.move_key(seen, to)
    }

    /// Moves a key to a slot that is locked and empty, and returns the key's old slot, locked and empty. If
    /// the move fails, the empty slot is unlocked.
    ///
    /// The move takes the stripe of the moved key, because a thread that misses a moving key looks again under the
    /// stripe. No key moves during a walk over all slots, so that the walk meets each key.
    fn move_key<'a>(&self, seen: Seen<'a>, to: SlotRef<'_>) -> Option<SlotRef<'a>> {
        let stripe = self.try_lock_stripe(Fingerprint::of_tag(seen.tag));
        // `Relaxed` suffices, because the stripe's lock orders this load (see `while_no_key_moves`).
        if stripe.is_none() || self.is_walked.load(Ordering::Relaxed) || !seen.try_lock() {
            to.unlock(0, NO_STATE);
            return None;
        }
        to.unlock(seen.tag, seen.word);
        seen.slot.set_tag(0);
        Some(seen.slot)
    }

    /// Returns what a state is worth. Returns `None` if the state must not be forgotten, or if another thread holds it.
    fn worth(&self, seen: Seen<'_>, known: &KnownPolicies, now: Now) -> Option<Worth> {
        if self.is_pinned(seen) {
            return None;
        }
        let version = version_of(seen.tag);
        let expires = expiry_of(seen.word, self.versions.form(version).shift());
        match version {
            UNNUMBERED => return self.worth_unnumbered(seen, expires, now),
            // The key holds no units any more, and the clock has stepped back since the last unit was returned.
            HELD_VERSION => return Some(Worth { rank: Rank::Left, used: 0, expires }),
            _ => {}
        }
        let rules = known.policy(version)?.quota().decider();
        let is_word = word_layout(rules, version).is_some();
        if !is_word && !seen.try_lock() {
            return None;
        }
        let (chain, state) = self.unpack(seen, rules, now);
        let fullness = self.fullness(rules, &chain, &state, now);
        if !is_word {
            seen.put_back();
        }
        Some(Worth::new(rules, fullness, expires))
    }

    /// Does what [`worth`](Self::worth) does, for a state that is stored together with its quota.
    fn worth_unnumbered(&self, seen: Seen<'_>, expires: u64, now: Now) -> Option<Worth> {
        if !seen.try_lock() {
            return None;
        }
        let worth = self.arena().quota(block_of(seen.word)).map(|quota| {
            let rules = quota.decider();
            let (chain, state) = self.unpack(seen, rules, now);
            Worth::new(rules, self.fullness(rules, &chain, &state, now), expires)
        });
        seen.put_back();
        Some(worth.unwrap_or(Worth { rank: Rank::Left, used: 0, expires }))
    }

    fn fullness(&self, rules: &Decider, chain: &Chain, state: &LoadedState, now: Now) -> Fullness {
        match (rules, state) {
            (Decider::Pair(rules, _), LoadedState::Pair(pair)) => rules.get().fullness(*pair, now.at),
            (Decider::EntryLog(rules), LoadedState::Entries) => rules.fullness(&self.arena().view(chain), now.at),
            _ => Fullness { throttled: false, used: 0 }, // it has just expired
        }
    }

    /// If the arena is full, draws up to [`DRAWS_MAX`] random blocks, and frees at least one block of other keys if a
    /// drawn block allows it. Expired entries are forgotten. Entries that count are
    /// [folded](super::entry_arena::EntryArena::fold), two blocks into one.
    pub(super) fn free_a_block(&self) {
        let arena = self.arena();
        if arena.has_free() {
            return;
        }
        for owner in (0..DRAWS_MAX).filter_map(|_| arena.draw_owner()) {
            let slot = self.table.slot_of(owner).and_then(SlotRef::read);
            let Some(seen) = slot.filter(|seen| Fingerprint::of_tag(seen.tag) == owner) else { continue };
            let form = self.versions.form(version_of(seen.tag));
            if !form.in_arena() || block_of(seen.word) == 0 || !seen.try_lock() {
                continue;
            }
            // Reads the clock after the lock, because after a backward step of the clock, an older reading would
            // free a state that still counts.
            let now = self.now_under_lock(seen);
            let mut chain = self.load_chain(seen);
            let (is_freed, word) = if is_expired(seen.word, form.shift(), now) {
                arena.clear(owner, &mut chain);
                (true, NO_STATE)
            } else {
                let is_folded = arena.fold(owner, &mut chain);
                arena.store(owner, &mut chain);
                (is_folded, seen.word)
            };
            Seen { word, ..seen }.put_back();
            if is_freed {
                return;
            }
        }
    }
}

#[cfg(all(test, not(ratelimit_loom), not(ratelimit_shuttle)))]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use crate::clock::ManualClock;
    use crate::limiter::Charge;
    use crate::limiter::memory::setup::{AnyClock, Setup};
    use crate::limiter::memory::states::States;
    use crate::{Key, Policy, Quota};

    /// Charges `count` keys of a limiter for 100 keys, with each of many seeds. Returns the number of denials.
    fn denials(policy: &Policy, count: u64) -> usize {
        let denials = |seed| {
            let clock = AnyClock::Other(Arc::new(ManualClock::new()));
            let states = States::new(Setup { capacity: 100, ..Setup::default() }, clock, [seed, 1]);
            let keys: Vec<Key> = (0..count).map(|key| Key::of(key).expect("it is short")).collect();
            let denied = keys.iter().filter(|key| !states.charge(Charge::new(policy, key)).is_allowed()).count();
            // A moved key keeps its state.
            assert!(keys.iter().all(|key| !states.charge(Charge::new(policy, key)).is_allowed()), "seed {seed}");
            denied
        };
        (0..200).map(denials).sum()
    }

    #[test]
    fn pinned_keys_find_room_up_to_the_number_of_keys() {
        let meter = Quota::meter(1, Duration::from_secs(60)).expect("it is a quota");
        for quota in [Quota::concurrent(1), meter] {
            let policy = Policy::from(quota);
            assert_eq!(denials(&policy, 80), 0, "{policy:?}");
            let denials = denials(&policy, 100);
            assert!(denials <= 20, "{policy:?}: {denials} of 20,000");
        }
    }
}
