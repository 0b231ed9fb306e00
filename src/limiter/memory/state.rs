//! The state of a key while this thread has locked its slot: read, decide, write, for states of every size.

use crate::algorithm::carry::{Held, Kept};
use crate::algorithm::entry_log::{Edit, Entries, Trail};
use crate::algorithm::{How, Next, Pair, Rules};
use crate::decision::ChargeDecision;
use crate::key::Key;
use crate::policy::Policy;

use super::entry_arena::Chain;
use super::events::Events;
use super::slot_table::{Fingerprint, Place, Seen, version_of};
use super::store::Store;
use super::versions::{UNNAMED, word_layout};
use super::word::{NO_STATE, Now, block_of, block_word};

/// A key whose slot is locked, or that is known to have none.
pub(super) struct Hold<'a> {
    pub(super) key: Fingerprint,
    pub(super) version: u16,
    pub(super) rules: &'a Rules,
    /// An earlier key of the set is the same: the caller should have summed the charges.
    pub(super) is_twice: bool,
    /// Where the key was found.
    pub(super) place: Option<Place>,
    /// The locked slot as it was; `None` if the key has none, or the slot is written.
    pub(super) slot: Option<Seen>,
    /// The blocks of the slot, whichever version wrote them.
    chain: Chain,
    /// The chain is a new one, of which the slot does not know.
    is_begun: bool,
    state: State,
    change: Change,
}

/// A state as it is read.
#[derive(Debug)]
pub(super) enum State {
    /// No state, or one that has expired.
    Nothing,
    Pair(Pair),
    /// The entries of the chain.
    Entries,
    /// A state that another quota of the policy wrote, converted. The slot keeps the old state until this quota writes. If
    /// the state lies further in the future than this quota could put it, any charge with a cost writes it, even a refused
    /// one.
    Foreign {
        kept: Kept,
        is_ahead: bool,
    },
}

/// The word and the entries to write.
#[derive(Debug)]
enum Change {
    Nothing,
    Pair(Pair),
    Clear,
    Entries(Edit),
    /// Units to take out of the entry that starts then.
    Remove(u64, u64),
    /// The foreign state, as this quota takes it over, and then what this charge changes.
    Convert(u64, How),
}

impl<'a> Hold<'a> {
    pub(super) fn new(key: Fingerprint, version: u16, rules: &'a Rules) -> Self {
        Self {
            key,
            version,
            rules,
            is_twice: false,
            place: None,
            slot: None,
            chain: Chain::default(),
            is_begun: false,
            state: State::Nothing,
            change: Change::Nothing,
        }
    }

    pub(super) fn writes(&self) -> bool {
        !matches!(self.change, Change::Nothing)
    }

    pub(super) fn change_nothing(&mut self) {
        self.change = Change::Nothing;
    }
}

impl Store {
    /// Prepares to lock the state of a (policy, key). No lock may be held.
    #[inline]
    pub(super) fn hold<'a>(&self, policy: &'a Policy, key: &Key) -> Hold<'a> {
        let version = self.version(policy);
        let mut key = self.fingerprint(policy, key);
        if version == UNNAMED {
            // Another quota is another state.
            key = Fingerprint::new(key.bits() ^ policy.state_fingerprint().rotate_left(17));
        }
        Hold::new(key, version, policy.quota().rules())
    }

    // Read ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Reads the state of a key that is locked. `now` was read after it was locked, so it is not older than the state.
    pub(super) fn read(&self, hold: &mut Hold<'_>, now: Now) {
        let Some(seen) = hold.slot else { return };
        (hold.chain, hold.state) = if version_of(seen.tag) == hold.version {
            self.unpack(seen, hold.rules, now)
        } else {
            self.take_over(seen, hold.version, now)
        };
    }

    /// Returns the blocks and the state of a slot that was written under these rules. If the state is not a word, the slot
    /// must be locked.
    pub(super) fn unpack(&self, seen: Seen, rules: &Rules, now: Now) -> (Chain, State) {
        if let Some(layout) = word_layout(rules, version_of(seen.tag)) {
            return (Chain::default(), layout.unpack(seen.word, now).map_or(State::Nothing, State::Pair));
        }
        let chain = self.arena().load(block_of(seen.word));
        let state = match rules {
            Rules::Pair(..) => {
                let live = self.arena().pair(&chain).filter(|pair| pair.at >= now.at);
                live.map_or(State::Nothing, State::Pair)
            }
            Rules::Trail(rules) => match self.expiry(&chain, rules) {
                Some(expires) if expires > now.at => State::Entries,
                _ => State::Nothing,
            },
        };
        (chain, state)
    }

    /// Returns when the entries of a chain count for nothing, if it has any.
    fn expiry(&self, chain: &Chain, rules: &Trail) -> Option<u64> {
        let (start, _) = self.arena().view(chain).newest()?;
        Some(start.saturating_add(rules.life_us()))
    }

    /// Returns the blocks of a slot of another version, and its state as this version takes it over.
    #[cold]
    fn take_over(&self, seen: Seen, version: u16, now: Now) -> (Chain, State) {
        let known = self.versions.known();
        let (Some(from), Some(to)) = (known.policy(version_of(seen.tag)), known.policy(version)) else {
            return (Chain::default(), State::Nothing); // not reached: a tag's version is known
        };
        let (from, to) = (from.quota(), to.quota());
        let (chain, state) = self.unpack(seen, from.rules(), now);
        let view = self.arena().view(&chain);
        let held = match state {
            State::Pair(pair) => Held::Pair(pair),
            State::Entries => Held::Trail(&view),
            State::Nothing | State::Foreign { .. } => return (chain, State::Nothing),
        };
        let share = to.spec().proportional.then_some((from.capacity(), to.capacity()));
        let (kept, is_ahead) = to.rules().take_over(from.rules(), &held, now.at, share);
        (chain, State::Foreign { kept, is_ahead })
    }

    // Decide ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Decides about a charge, and notes what it changes.
    #[inline]
    pub(super) fn decide(&self, hold: &mut Hold<'_>, now: Now, cost: u64, how: How) -> ChargeDecision {
        match (&hold.state, hold.rules) {
            (State::Foreign { kept, is_ahead }, rules) => {
                let (decision, writes) = kept.decide(rules, now.at, cost, how);
                let converts = writes || *is_ahead && cost > 0;
                hold.change = if converts { Change::Convert(cost, how) } else { Change::Nothing };
                decision
            }
            (state, Rules::Pair(rules, _)) => {
                let pair = if let State::Pair(pair) = state { Some(*pair) } else { None };
                let answer = rules.decide_how(pair, now.at, cost, how);
                hold.change = answer.next.into();
                answer.decision
            }
            (state, Rules::Trail(rules)) => {
                let chain = if let State::Entries = state { hold.chain } else { Chain::default() };
                let answer = rules.decide_how(&self.arena().view(&chain), now.at, cost, how);
                hold.change = answer.edit.map_or(Change::Nothing, Change::Entries);
                answer.decision
            }
        }
    }

    /// Notes what a refund changes: what the receipt `own` of `units` still holds.
    pub(super) fn decide_refund(&self, hold: &mut Hold<'_>, now: Now, units: u64, own: Pair, events: &mut Events<'_>) {
        if let State::Foreign { kept, .. } = &hold.state {
            if !kept.is_refundable(hold.rules, now.at, units, own) || !self.make_room(hold, now, events) {
                return;
            }
            self.convert(hold, now, 0, How::IfAllowed);
        }
        match (&hold.state, hold.rules) {
            (State::Pair(pair), Rules::Pair(rules, _)) => match rules.get().refund(*pair, now.at, units, own) {
                Next::Keep => {}
                next => hold.change = next.into(),
            },
            (State::Entries, Rules::Trail(rules)) => {
                let held = rules.refundable(&self.arena().view(&hold.chain), now.at, units, own.at);
                if let Some((start, units)) = held {
                    hold.change = Change::Remove(start, units);
                }
            }
            _ => {}
        }
    }

    /// Makes a hold replace its state by one that was kept elsewhere.
    pub(super) fn adopt(&self, hold: &mut Hold<'_>, kept: Kept) {
        hold.state = State::Foreign { kept, is_ahead: false };
        hold.change = Change::Convert(0, How::IfAllowed);
    }

    // Write ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Makes room for what a hold is to write: a slot if its key has none, and a block if its chain wants one. If there is no
    /// room, it returns `false`, and the change cannot be written.
    pub(super) fn make_room(&self, hold: &mut Hold<'_>, now: Now, events: &mut Events<'_>) -> bool {
        if hold.slot.is_none() {
            let Some(place) = self.claim(hold.key, hold.version, now, events) else { return false };
            hold.slot = Some(Seen { place, tag: 0, word: NO_STATE });
        }
        if word_layout(hold.rules, hold.version).is_none() && hold.chain.wants_block() {
            self.free_a_block(now);
            if !hold.chain.has_block() {
                let Some(chain) = self.arena().begin(hold.key) else { return false };
                (hold.chain, hold.is_begun) = (chain, true);
            }
        }
        true
    }

    /// Writes what a hold changes, for which there is room, and unlocks its slot.
    pub(super) fn write(&self, hold: &mut Hold<'_>, now: Now) {
        if let Change::Convert(cost, how) = hold.change {
            self.convert(hold, now, cost, how);
        }
        let key = hold.key;
        let chain = &mut hold.chain;
        let word = match (&hold.change, hold.rules) {
            (Change::Pair(pair), rules) => match word_layout(rules, hold.version) {
                Some(layout) => {
                    if chain.has_block() {
                        self.arena().clear(key, chain);
                    }
                    layout.pack(*pair, now)
                }
                None => {
                    self.arena().set_pair(key, chain, *pair);
                    self.arena().store(key, chain);
                    // Its number may count beyond its instant.
                    block_word(chain.first, pair.at.saturating_add(1), now)
                }
            },
            (Change::Entries(edit), Rules::Trail(rules)) => {
                if !matches!(hold.state, State::Entries) {
                    self.arena().empty(key, chain); // what has expired
                }
                self.arena().apply(key, chain, edit, rules.most());
                self.store_entries(key, chain, rules, now)
            }
            (Change::Remove(start, units), Rules::Trail(rules)) => {
                self.arena().remove_units(key, chain, *start, *units);
                self.store_entries(key, chain, rules, now)
            }
            (Change::Clear, _) => {
                if chain.has_block() {
                    self.arena().clear(key, chain);
                }
                NO_STATE
            }
            _ => return,
        };
        if let Some(seen) = hold.slot.take() {
            self.table.unlock(seen.place, key.tag(hold.version), word);
        }
    }

    /// Stores a chain of entries, and returns the word for its slot.
    fn store_entries(&self, key: Fingerprint, chain: &mut Chain, rules: &Trail, now: Now) -> u64 {
        let expires = self.expiry(chain, rules);
        self.arena().store(key, chain);
        expires.map_or(NO_STATE, |expires| block_word(chain.first, expires, now))
    }

    /// Makes a foreign state one of this version, and then decides about a charge.
    #[cold]
    fn convert(&self, hold: &mut Hold<'_>, now: Now, cost: u64, how: How) {
        if let State::Foreign { kept, .. } = std::mem::replace(&mut hold.state, State::Nothing) {
            match kept {
                Kept::Pair(pair) => hold.state = pair.map_or(State::Nothing, State::Pair),
                Kept::Trail(entries) => {
                    self.arena().empty(hold.key, &mut hold.chain);
                    for (start, units) in entries {
                        self.arena().push(hold.key, &mut hold.chain, start, units);
                        hold.state = State::Entries;
                    }
                }
            }
        }
        let _ = self.decide(hold, now, cost, how); // as it was decided before
        if !hold.writes() {
            hold.change = match &hold.state {
                State::Pair(pair) => Change::Pair(*pair),
                State::Entries => Change::Entries(Edit::default()),
                State::Nothing | State::Foreign { .. } => Change::Clear,
            };
        }
    }

    /// Unlocks a slot that was not written.
    pub(super) fn put_back(&self, hold: &mut Hold<'_>) {
        if std::mem::take(&mut hold.is_begun) && hold.slot.is_some() {
            self.arena().clear(hold.key, &mut hold.chain);
        }
        if let Some(seen) = hold.slot.take() {
            self.table.put_back(seen);
        }
    }

    /// Frees the blocks of a slot that is locked.
    pub(super) fn free_blocks(&self, seen: Seen) {
        let first = block_of(seen.word);
        if self.versions.form(version_of(seen.tag)).in_arena() && first != 0 {
            let mut chain = self.arena().load(first);
            self.arena().clear(Fingerprint::of_tag(seen.tag), &mut chain);
        }
    }
}

impl From<Next> for Change {
    #[inline]
    fn from(next: Next) -> Self {
        match next {
            Next::Keep => Self::Nothing,
            Next::Clear => Self::Clear,
            Next::Set(pair) => Self::Pair(pair),
        }
    }
}
