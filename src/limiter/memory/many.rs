//! Several charges at once: all are taken or none is, and nobody sees anything in between.

use smallvec::SmallVec;

use crate::algorithm::{Answer, How, Layout, Next, Rules};
use crate::decision::{ChargeDecision, Decision, Several};
use crate::limiter::{Charge, Effect, binds, how, outlives_refusal, stands};

use super::large::{Change, Index, Shard};
use super::news::News;
use super::one_large::NoRoom;
use super::one_word::{Adopted, WordCharge};
use super::registry::UNNAMED;
use super::store::Store;
use super::words::{Fingerprint, NO_STATE, Now, Seen, version_of};
use crate::sync::MutexGuard;

/// So many charges of a request need no memory of their own.
const INLINE: usize = 4;

/// A charge, and where its state is.
enum Held<'a> {
    Word {
        word: WordCharge<'a>,
        state: WordState<'a>,
    },
    Large {
        key: Fingerprint,
        version: u16,
        rules: &'a Rules,
        shard: usize,
        /// Where the state is, if there is one; or there is one among the words, and no room for it here.
        index: Result<Option<Index>, NoRoom>,
    },
    /// The state is another quota's, and stays as it is, since nothing is written.
    Left(ChargeDecision),
    /// Of a (policy, key) that an earlier charge of the set is for: the caller should have summed them.
    Twice,
}

/// A word that is held.
enum WordState<'a> {
    There(Locked<'a>),
    Absent,
    /// It lies among the large ones, and there is no room for it here.
    NoRoom,
}

/// A locked slot. Dropped without being written it goes back as it was.
struct Locked<'a> {
    store: &'a Store,
    seen: Seen,
}

impl Locked<'_> {
    fn write(self, tag: u64, word: u64) {
        self.store.words.publish(self.seen, tag, word);
        std::mem::forget(self); // it holds nothing else
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.store.words.put_back(self.seen);
    }
}

/// What is to be written, once all charges are known to pass.
enum Write {
    Nothing,
    Word(u64),
    Large(Change),
}

impl Store {
    /// Takes all charges or none, and says which. Each is for another (policy, key).
    #[inline(never)]
    pub(super) fn charge_all(&self, charges: &[Charge<'_>], decisions: &mut Several) -> bool {
        let now = self.now();
        match self.charge_words(charges, now, decisions) {
            Some(allowed) => allowed,
            None => self.charge_any(charges, decisions),
        }
    }

    /// The same, whatever they are.
    #[inline(never)]
    fn charge_any(&self, charges: &[Charge<'_>], decisions: &mut Several) -> bool {
        let (allowed, writes) = self.look(charges, decisions);
        // A refusal that writes nothing holds at the instant at which the refusing state was read.
        if !writes {
            return allowed;
        }
        let mut news = self.news();
        let versions: SmallVec<[u16; INLINE]> = charges.iter().map(|charge| self.version(charge.policy)).collect();
        let keys: SmallVec<[Fingerprint; INLINE]> =
            charges.iter().zip(&versions).map(|(charge, version)| self.key_of(charge, *version)).collect();
        let mut stripes: SmallVec<[usize; INLINE]> = keys.iter().map(|key| self.stripe_of(*key)).collect();
        stripes.sort_unstable();
        stripes.dedup();
        let _stripes: SmallVec<[MutexGuard<'_, ()>; INLINE]> =
            stripes.iter().map(|stripe| self.lock_stripe(*stripe)).collect();
        let mut shards = self.lock_shards(charges, &keys, &versions);
        let now = self.now_after();
        let mut held: SmallVec<[Held<'_>; INLINE]> = SmallVec::new();
        for (at, charge) in charges.iter().enumerate() {
            let twice = keys[..at].contains(&keys[at]);
            let next = if twice {
                Held::Twice
            } else {
                self.hold(charge, keys[at], versions[at], now, &mut shards, &held, &mut news)
            };
            held.push(next);
        }

        // After all states: from here on nobody else writes them.
        let now = self.now_after();
        decisions.clear();
        let mut writes: SmallVec<[Write; INLINE]> = SmallVec::new();
        for (at, (charge, held)) in charges.iter().zip(&held).enumerate() {
            let how = how(charges, at, |at| is_denied(decisions, at));
            let (decision, write) = held.decide(charge, now, how, &shards);
            decisions.push(decision);
            writes.push(write);
        }
        let mut allowed = is_allowed(charges, decisions);
        // Of a refused set only what its refusals count, or that mend a state ahead of the clock, is written.
        let is_written = |at: usize, allowed: bool, decisions: &[ChargeDecision]| {
            allowed || outlives_refusal(charges, at, is_denied(decisions, at))
        };
        // Room first: if there is none, nothing has been written.
        let mut keep: SmallVec<[(usize, Index); INLINE]> = held.iter().filter_map(Held::index).collect();
        for (at, held) in held.iter_mut().enumerate() {
            if matches!(writes[at], Write::Nothing) || !is_written(at, allowed, decisions) {
                continue;
            }
            if !held.make_room(self, now, &mut shards, &writes[at], &mut keep, &mut news) {
                writes[at] = Write::Nothing;
                if decisions[at].is_allowed() {
                    decisions[at] = news.full(std::mem::replace(&mut decisions[at], ChargeDecision::blank()));
                    allowed = is_allowed(charges, decisions);
                }
            }
        }
        for (at, (held, write)) in held.into_iter().zip(writes).enumerate() {
            if !allowed {
                if stands(charges, at, is_denied(decisions, at)) {
                    decisions[at] = held.decide(&charges[at].cost(0), now, How::IfAllowed, &shards).0;
                }
                decisions[at].untaken();
            }
            if is_written(at, allowed, decisions) {
                held.write(write, now, &mut shards);
            }
        }
        allowed
    }

    /// Answers without taking.
    pub(super) fn peek_all(&self, charges: &[Charge<'_>]) -> Decision {
        Decision::made(|decisions| self.look(charges, decisions).0)
    }

    /// Decides as the states are now, one after the other: whether they pass, and whether anything is to be written.
    fn look(&self, charges: &[Charge<'_>], decisions: &mut Several) -> (bool, bool) {
        decisions.clear();
        let (mut takes, mut refusals) = (false, false);
        for (at, charge) in charges.iter().enumerate() {
            let how = how(charges, at, |at| is_denied(decisions, at));
            let (decision, writes) = self.look_at(charge, how);
            takes |= writes;
            refusals |= writes && outlives_refusal(charges, at, !decision.is_allowed());
            decisions.push(decision);
        }
        let allowed = is_allowed(charges, decisions);
        if !allowed {
            for (at, charge) in charges.iter().enumerate() {
                if stands(charges, at, is_denied(decisions, at)) {
                    decisions[at] = self.look_at(&charge.cost(0), How::IfAllowed).0;
                }
            }
        }
        (allowed, if allowed { takes } else { refusals })
    }

    fn key_of(&self, charge: &Charge<'_>, version: u16) -> Fingerprint {
        let key = self.fingerprint(charge.policy, charge.key);
        if version == UNNAMED { Self::unnamed(key, charge.policy) } else { key }
    }

    /// Locks the shards of the charges that are or may be in one, in order.
    fn lock_shards(&self, charges: &[Charge<'_>], keys: &[Fingerprint], versions: &[u16]) -> Shards<'_> {
        let mixed = self.registry.is_mixed();
        let mut numbers: SmallVec<[usize; INLINE]> = charges
            .iter()
            .zip(keys.iter().zip(versions))
            .filter(|(charge, (_, version))| mixed || **version == UNNAMED || !is_word(charge))
            .map(|(_, (key, _))| self.large().shard_of(*key))
            .collect();
        numbers.sort_unstable();
        numbers.dedup();
        numbers.into_iter().map(|number| (number, self.large().lock(number))).collect()
    }

    /// Locks a charge's state, after converting it to the charge's quota.
    #[expect(clippy::too_many_arguments, reason = "what the set has locked so far, and what this charge needs")]
    fn hold<'a>(
        &'a self,
        charge: &Charge<'a>,
        key: Fingerprint,
        version: u16,
        now: Now,
        shards: &mut Shards<'_>,
        held: &[Held<'_>],
        news: &mut News<'_>,
    ) -> Held<'a> {
        let how = match charge.effect {
            Effect::Enforce | Effect::Observe => Some(How::IfAllowed),
            Effect::Force => Some(How::Force),
            Effect::OnRefusal { .. } => None, // it depends on the others
        };
        let shard = self.large.get().and_then(|large| shard_mut(shards, large.shard_of(key)));
        let foreign = match shard {
            Some(shard) => self.foreign(shard, key, version, now),
            None => self.foreign_word(key, version, now),
        };
        if let (Some(foreign), Some(how)) = (foreign, how) {
            let (decision, writes) = foreign.decide(charge.policy.quota().rules(), now, charge.cost, how);
            if !writes {
                return Held::Left(decision);
            }
        }
        match charge.policy.quota().rules() {
            Rules::Pair(rules, Layout::Word(layout)) if version != UNNAMED => {
                let how = How::IfAllowed; // how it is taken is known when it is decided
                let word = WordCharge { store: self, key, version, rules, layout: *layout, cost: charge.cost, how };
                Held::Word { word, state: word.hold(shards, news) }
            }
            rules => {
                let shard = self.large().shard_of(key);
                let mut crowd = self.crowd(now);
                // What comes over from the words must not push out another state of this request.
                crowd.keep.extend(
                    held.iter()
                        .filter_map(Held::index)
                        .filter(|(in_shard, _)| *in_shard == shard)
                        .map(|(_, index)| index),
                );
                let index = shard_mut(shards, shard)
                    .map_or(Ok(None), |shard| self.settle_large(shard, key, version, rules, now, &mut crowd));
                news.crowd(&crowd);
                Held::Large { key, version, rules, shard, index }
            }
        }
    }
}

impl<'a> WordCharge<'a> {
    /// Under the key's stripe, with its shard locked if need be: locks the key's slot.
    fn hold(&self, shards: &mut Shards<'_>, news: &mut News<'_>) -> WordState<'a> {
        loop {
            let Some(seen) = self.store.words.find(self.key) else {
                let number = self.store.large.get().map(|large| large.shard_of(self.key));
                match number.and_then(|number| shard_mut(shards, number)).map(|shard| self.adopt(shard, news)) {
                    Some(Adopted::Came) => continue,
                    Some(Adopted::NoRoom) => return WordState::NoRoom,
                    Some(Adopted::Nothing) | None => return WordState::Absent,
                }
            };
            if version_of(seen.tag) != self.version {
                self.convert(seen, self.store.now_after());
            } else if self.store.words.lock(seen) {
                return WordState::There(Locked { store: self.store, seen });
            }
        }
    }
}

impl Held<'_> {
    fn index(&self) -> Option<(usize, Index)> {
        match self {
            Self::Large { shard, index: Ok(Some(index)), .. } => Some((*shard, *index)),
            _ => None,
        }
    }

    fn decide(&self, charge: &Charge<'_>, now: Now, how: How, shards: &Shards<'_>) -> (ChargeDecision, Write) {
        match self {
            Self::Word { word, state } => {
                let state = match state {
                    WordState::There(locked) => word.layout.unpack(locked.seen.word, now),
                    WordState::Absent | WordState::NoRoom => None,
                };
                let Answer { decision, next } = WordCharge { how, cost: charge.cost, ..*word }.decide(state, now);
                let write = match next {
                    Next::Keep => Write::Nothing,
                    Next::Set(state) => Write::Word(word.layout.pack(state, now)),
                    Next::Clear => Write::Word(NO_STATE),
                };
                (decision, write)
            }
            Self::Large { rules, shard, index, .. } => {
                let Some((_, shard)) = shards.iter().find(|(locked, _)| locked == shard) else {
                    return (ChargeDecision::blank(), Write::Nothing);
                };
                let (decision, change) = shard.decide(index.unwrap_or(None), rules, now.at, charge.cost, how);
                let write = if change.writes() { Write::Large(change) } else { Write::Nothing };
                (decision, write)
            }
            Self::Left(decision) => (decision.clone(), Write::Nothing),
            Self::Twice => (ChargeDecision::denied(charge.policy.quota().capacity(), 0, None), Write::Nothing),
        }
    }

    /// Sees to it that this charge can be written; `keep` are the states of the request.
    fn make_room(
        &mut self,
        store: &Store,
        now: Now,
        shards: &mut Shards<'_>,
        write: &Write,
        keep: &mut SmallVec<[(usize, Index); INLINE]>,
        news: &mut News<'_>,
    ) -> bool {
        match self {
            Self::Word { word, state } => match state {
                WordState::There(_) => true,
                WordState::NoRoom => false,
                WordState::Absent => match word.claim(now, news) {
                    Some(seen) => {
                        *state = WordState::There(Locked { store: word.store, seen });
                        true
                    }
                    None => false,
                },
            },
            Self::Large { key, version, rules, shard: number, index } => {
                let (Some(shard), Ok(index)) = (shard_mut(shards, *number), index) else { return false };
                let mut crowd = store.crowd(now);
                crowd.keep.extend(keep.iter().filter(|(shard, _)| shard == number).map(|(_, index)| *index));
                if let Write::Large(change) = write {
                    store.make_large_room(shard, *key, *index, rules, change, &crowd);
                }
                if index.is_none() {
                    *index = shard.insert(*key, *version, &mut crowd);
                    keep.extend(index.map(|index| (*number, index)));
                }
                news.crowd(&crowd);
                index.is_some()
            }
            Self::Left(_) | Self::Twice => true,
        }
    }

    /// Writes what was decided; without anything to write the state is left as it was.
    fn write(self, write: Write, now: Now, shards: &mut Shards<'_>) {
        match (self, write) {
            (Self::Word { word, state: WordState::There(locked) }, Write::Word(next)) => {
                locked.write(word.key.tag(word.version), next);
            }
            (Self::Large { rules, shard, index: Ok(Some(index)), .. }, Write::Large(change)) => {
                if let Some(shard) = shard_mut(shards, shard) {
                    shard.apply(index, rules, now.at, &change);
                }
            }
            _ => {}
        }
    }
}

fn is_allowed(charges: &[Charge<'_>], decisions: &[ChargeDecision]) -> bool {
    (0..charges.len()).all(|at| !binds(charges, at) || !is_denied(decisions, at))
}

fn is_word(charge: &Charge<'_>) -> bool {
    matches!(charge.policy.quota().rules().layout(), Layout::Word(_))
}

fn is_denied(decisions: &[ChargeDecision], at: usize) -> bool {
    decisions.get(at).is_some_and(|decision| !decision.is_allowed())
}

type Shards<'a> = SmallVec<[(usize, MutexGuard<'a, Shard>); INLINE]>;

fn shard_mut<'a>(shards: &'a mut Shards<'_>, number: usize) -> Option<&'a mut Shard> {
    shards.iter_mut().find(|(locked, _)| *locked == number).map(|(_, shard)| &mut **shard)
}
