//! The parts of a limiter in memory, and what they share.

use std::sync::OnceLock;
use std::sync::atomic::AtomicU32;

use crate::base::sync::{AtomicBool, AtomicU64, Mutex, MutexGuard, Ordering, lock, try_lock};
use crate::base::time::CLOCK_US_MAX;
use crate::event::LimiterEvent;
use crate::key::Key;
use crate::limiter::queue_refunds::QueueRefunds;
use crate::limiter::{PairHash, PlaceLines, PolicyRegistry};
use crate::policy::Policy;

use super::entry_arena::EntryArena;
use super::setup::{AnyClock, Setup};
use super::slot_table::{Fingerprint, Seen, SlotTable, version_of};
use super::versions::{PHASE_US, UNNUMBERED, Versions};
use super::word::{NO_STATE, Now, RELATIVE_US_MAX, is_expired};

/// The largest backward step of a clock after which the base stays the same: about 200 days, in microseconds.
const BACK_US: u64 = 1 << 44;

/// Returns the base for a clock that shows an instant. The base is so early that no sum overflows.
fn base_for(now: u64) -> u64 {
    now.saturating_sub(BACK_US).min(CLOCK_US_MAX - RELATIVE_US_MAX)
}

/// The number of stripes. A thread that makes a slot for a new key holds the key's stripe.
const STRIPES: usize = if cfg!(any(ratelimit_loom, ratelimit_shuttle)) { 2 } else { 1_024 };

/// The states, and everything that decisions need.
pub(super) struct States {
    pub(super) table: SlotTable,
    arena: OnceLock<EntryArena>,
    pub(super) versions: Versions,
    pub(super) setup: Setup,
    pub(super) clock: AnyClock,
    /// The secret of the fingerprints.
    pub(super) seeds: [u64; 2],
    pair_hash: PairHash,
    /// The instant from which the instants in words are counted. If a clock steps so far that a word could not hold the
    /// time, the base moves, but the words stay the same. Every state then lies ahead of the clock, like a state that
    /// was written while the clock showed a later time. So no state is forgotten, and a state that is too far ahead is
    /// moved back when it is read.
    base: AtomicU64,
    pub(super) policy_registry: PolicyRegistry,
    stripes: Box<[Mutex<()>]>,
    /// The number of new keys in a row that found the table full, up to a bound. Only a hint.
    pub(super) crowding: AtomicU32,
    /// The time at which a key last got a slot, in whole seconds after the base. Only a hint.
    pub(super) claimed_s: AtomicU32,
    /// True if the limiter has reported to its observers that no version is left.
    is_reported: AtomicBool,
    /// The earliest instant of the next search for unused versions. The thread that walks over all slots holds
    /// this lock.
    walk: Mutex<u64>,
    /// The line that is split next. The thread that grows the table holds this lock.
    pub(super) growth: Mutex<usize>,
    /// True while a thread walks over all slots, so that no key may move.
    pub(super) is_walked: AtomicBool,
    pub(super) queue_refunds: QueueRefunds<Fingerprint, ()>,
    /// The number of resets of keys under concurrency limits.
    pub(super) resets: AtomicU64,
    /// The requests that wait for units of concurrency limits.
    pub(super) place_lines: PlaceLines,
}

impl States {
    pub(super) fn new(setup: Setup, clock: AnyClock, seeds: [u64; 2]) -> Self {
        let pair_hash = PairHash::new(seeds);
        Self {
            table: SlotTable::new(setup.capacity),
            arena: OnceLock::new(),
            versions: Versions::new(),
            base: AtomicU64::new(base_for(clock.now_us())),
            setup,
            clock,
            seeds,
            policy_registry: PolicyRegistry::new(),
            stripes: (0..STRIPES).map(|_| Mutex::new(())).collect(),
            crowding: AtomicU32::new(0),
            claimed_s: AtomicU32::new(0),
            is_reported: AtomicBool::new(false),
            walk: Mutex::new(0),
            growth: Mutex::new(0),
            is_walked: AtomicBool::new(false),
            queue_refunds: QueueRefunds::new(),
            resets: AtomicU64::new(0),
            place_lines: PlaceLines::hashed_by(pair_hash.clone()),
            pair_hash,
        }
    }

    /// Returns the arena, which is made when the first state needs it.
    #[inline]
    pub(super) fn arena(&self) -> &EntryArena {
        self.arena.get_or_init(|| EntryArena::new(self.setup.entries, self.table.len()))
    }

    /// Returns how many dated entries one key can have.
    pub(super) fn entries_max(&self) -> usize {
        EntryArena::entries_for(self.setup.entries, self.table.len())
    }

    pub(super) fn bytes(&self) -> usize {
        self.table.bytes() + self.arena.get().map_or(0, EntryArena::bytes)
    }

    /// Returns the fingerprint of a key under a policy's name. The key's states under all quotas of that policy
    /// share this fingerprint.
    #[inline(always)]
    pub(super) fn fingerprint(&self, policy: &Policy, key: &Key) -> Fingerprint {
        Fingerprint::new(self.hash(policy, key))
    }

    /// Returns the fingerprint of a key whose units are held under a policy's name, for all quotas of that name.
    #[inline(always)]
    pub(super) fn fingerprint_of_held(&self, policy: &Policy, key: &Key) -> Fingerprint {
        Fingerprint::of_held(self.hash(policy, key))
    }

    #[inline(always)]
    fn hash(&self, policy: &Policy, key: &Key) -> u64 {
        self.pair_hash.of(policy.name_fingerprint(), key)
    }

    // Time ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Reads the clock before the state is read. A thread that is suspended between the two reads may find a
    /// newer state. So the caller gives up if the state is [ahead](crate::algorithm::PairDecider::is_clamped)
    /// of this reading.
    #[inline(always)] // as `now_us`
    pub(super) fn now(&self) -> Now {
        self.relative(self.clock.now_us())
    }

    /// Reads the clock after the state was locked. Only such a reading may rewind a state, because a state that is
    /// ahead of such a reading shows that the clock has stepped back.
    pub(super) fn now_after(&self) -> Now {
        self.relative(self.clock.now_us_in_order())
    }

    #[inline(always)] // as `now`
    fn relative(&self, at: u64) -> Now {
        // `Relaxed` suffices, because no other data is published with the base.
        let base = self.base.load(Ordering::Relaxed);
        let relative = at.wrapping_sub(base);
        // Uses a branch, because the processor predicts the usual case.
        if relative <= RELATIVE_US_MAX { Now { at, relative } } else { self.move_base(at, base) }
    }

    /// Moves the base for a clock that stepped far, unless another thread has done so.
    #[cold]
    fn move_base(&self, at: u64, base: u64) -> Now {
        let at = at.min(CLOCK_US_MAX);
        let moved = base_for(at);
        match self.base.compare_exchange(base, moved, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => Now::new(at, moved),
            Err(other) => Now::new(at, other),
        }
    }

    /// Reads the clock after a slot was locked. If the application's clock panics, the slot is unlocked unchanged.
    pub(super) fn now_under_lock(&self, slot: Seen<'_>) -> Now {
        let unlock = UnlockOnPanic(Some(slot));
        let now = self.now_after();
        unlock.cancel();
        now
    }

    // Stripes ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    pub(super) fn lock_stripe(&self, stripe: usize) -> MutexGuard<'_, ()> {
        lock(&self.stripes[stripe % STRIPES])
    }

    pub(super) fn lock_stripe_of(&self, key: Fingerprint) -> MutexGuard<'_, ()> {
        lock(&self.stripes[stripe_of(key)])
    }

    pub(super) fn try_lock_stripe(&self, key: Fingerprint) -> Option<MutexGuard<'_, ()>> {
        try_lock(&self.stripes[stripe_of(key)])
    }

    /// Waits until each thread that holds a stripe during the call has released the stripe.
    pub(super) fn pass_stripes(&self) {
        (0..STRIPES).for_each(|stripe| drop(self.lock_stripe(stripe)));
    }

    // Walks ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Locks one slot after the other, except empty slots and those that `is_skipped` names. Each slot is unlocked
    /// with the content that `visit` returns. During the walk no key moves to an earlier slot, so the walk meets each
    /// key. Only one walk runs at a time, so a version keeps its meaning during a walk.
    pub(super) fn walk(&self, is_skipped: impl Fn(Seen<'_>) -> bool, visit: impl FnMut(Seen<'_>) -> Seen<'_>) {
        let _one = lock(&self.walk);
        self.walk_alone(is_skipped, visit);
    }

    fn walk_alone(&self, is_skipped: impl Fn(Seen<'_>) -> bool, mut visit: impl FnMut(Seen<'_>) -> Seen<'_>) {
        let _walk = Walk::begin(&self.is_walked);
        self.pass_stripes(); // a key moves under its stripe: a move that did not see the walk is done after this
        for slot in self.table.all_slots() {
            if slot.read().is_some_and(|seen| seen.tag == 0 || is_skipped(seen)) {
                continue;
            }
            visit(slot.lock()).put_back();
        }
    }

    // Versions ────────────────────────────────────────────────────────────────────────────────────────────────────────

    /// Returns the number of a policy's version. A charge asks for this number only once, because a later
    /// answer may differ.
    #[inline]
    pub(super) fn version(&self, policy: &Policy) -> u16 {
        match self.versions.cached(policy) {
            Some(version) => version,
            None => self.version_slowly(policy),
        }
    }

    /// Returns the number of a policy's version, or `None` if no number is left for it.
    #[inline(always)]
    pub(super) fn version_with_number(&self, policy: &Policy) -> Option<u16> {
        match self.versions.cached(policy) {
            Some(version) => Some(version),
            None => self.version_with_number_slowly(policy),
        }
    }

    #[cold]
    #[inline(never)]
    fn version_with_number_slowly(&self, policy: &Policy) -> Option<u16> {
        Some(self.version_slowly(policy)).filter(|version| *version != UNNUMBERED)
    }

    /// Looks a policy's version up. The caller must hold no lock.
    #[cold]
    #[inline(never)]
    fn version_slowly(&self, policy: &Policy) -> u16 {
        let mut version = self.versions.look_up(policy);
        if self.versions.is_crowded() && self.free_versions() && version == UNNUMBERED {
            version = self.versions.look_up(policy);
        }
        if version == UNNUMBERED && !self.is_reported.swap(true, Ordering::Relaxed) {
            self.setup.observers.report(&LimiterEvent::TooManyQuotas);
        }
        version
    }

    /// Frees the versions that no charge asked for since the last search, and that have no live states. Returns
    /// `false` if the last search was less than [`PHASE_US`] ago, or if another thread is searching.
    pub(super) fn free_versions(&self) -> bool {
        let Some(mut next_phase_us) = try_lock(&self.walk) else { return false };
        let now = self.now();
        // Compares `now` with both ends of the phase, so that the next phase is at most one phase away even if the
        // clock stepped back.
        if now.at < *next_phase_us && *next_phase_us <= now.at + PHASE_US {
            return false;
        }
        *next_phase_us = now.at + PHASE_US;
        self.is_reported.store(false, Ordering::Relaxed);
        let unused = self.versions.idle();
        let is_unused = |seen: Seen<'_>| &unused[usize::from(version_of(seen.tag))];
        self.walk_alone(
            |seen| !is_unused(seen).get(),
            |seen| {
                let shift = self.versions.form(version_of(seen.tag)).shift();
                // Reads the clock after the lock, because after a backward step of the clock, an older reading would
                // forget a state that still counts.
                let is_over = || is_expired(seen.word, shift, self.now_under_lock(seen));
                if is_unused(seen).get() && is_over() {
                    // Empties the slot, because its tag would name a version that is about to get another policy.
                    self.free_blocks(seen);
                    return Seen { tag: 0, word: NO_STATE, ..seen };
                }
                is_unused(seen).set(false);
                seen
            },
        );
        self.versions.begin_phase(&unused);
        true
    }
}

/// A walk over all slots. The walk ends when this value is dropped, because the application's clock may panic
/// during the walk.
struct Walk<'a>(&'a AtomicBool);

impl<'a> Walk<'a> {
    fn begin(is_walked: &'a AtomicBool) -> Self {
        is_walked.store(true, Ordering::Relaxed);
        Self(is_walked)
    }
}

impl Drop for Walk<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// A locked slot, which is unlocked unchanged when this value is dropped.
struct UnlockOnPanic<'a>(Option<Seen<'a>>);

impl UnlockOnPanic<'_> {
    fn cancel(mut self) {
        self.0 = None;
    }
}

impl Drop for UnlockOnPanic<'_> {
    fn drop(&mut self) {
        if let Some(slot) = self.0.take() {
            slot.put_back();
        }
    }
}

/// Returns the number of a key's stripe.
pub(super) fn stripe_of(key: Fingerprint) -> usize {
    (key.bits() >> 32) as usize % STRIPES
}

#[cfg(all(test, not(ratelimit_loom)))]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::base::time::Timestamp;
    use crate::clock::ManualClock;
    use crate::limiter::Charge;
    use crate::quota::Quota;

    const HOUR: Duration = Duration::from_secs(3_600);
    const PHASE: Duration = Duration::from_micros(PHASE_US);

    fn store(clock: &ManualClock) -> States {
        let setup = Setup { capacity: 1, entries: 1, ..Setup::default() };
        States::new(setup, AnyClock::Other(Arc::new(clock.clone())), [1, 2])
    }

    #[test]
    fn states_of_unused_versions_give_their_blocks_back() {
        let clock = ManualClock::at(Timestamp::from_micros(1_790_000_000_000_000));
        let states = store(&clock);
        let free = states.arena().free_blocks();
        let policy = Policy::new("log", Quota::sliding_log(10, HOUR).expect("it is possible")).expect("it is a name");
        assert!(states.charge(Charge::new(&policy, &Key::global())).is_allowed());
        assert!(states.free_versions(), "a phase begins, in which no charge asks");
        clock.advance(PHASE);
        assert!(states.free_versions());
        let in_use = || (states.versions.known().in_use(), states.arena().free_blocks());
        assert_eq!(in_use(), (1, free - 1), "its state lives");
        clock.advance(2 * HOUR);
        assert!(states.free_versions());
        assert_eq!(in_use(), (0, free));
    }

    /// Each visit locks its slot, and a table has many slots that were never used.
    #[test]
    fn walk_visits_what_is_held_and_not_skipped() {
        let clock = ManualClock::at(Timestamp::from_micros(1_790_000_000_000_000));
        let setup = Setup { capacity: 100, ..Setup::default() };
        let states = States::new(setup, AnyClock::Other(Arc::new(clock)), [1, 2]);
        let policies = [1, 2].map(|limit| Policy::from(Quota::per_hour(limit)));
        for (policy, keys) in policies.iter().zip([0..5, 5..12]) {
            keys.for_each(|key| {
                assert!(states.charge(Charge::new(policy, &Key::of(key).expect("it is short"))).is_allowed())
            });
        }
        let other = states.version(&policies[1]);
        let visited = |skips: bool| {
            let mut counts = [0, 0];
            states.walk(
                |seen| skips && version_of(seen.tag) == other,
                |seen| {
                    counts[usize::from(version_of(seen.tag) == other)] += 1;
                    seen
                },
            );
            counts
        };
        assert_eq!((visited(false), visited(true)), ([5, 7], [5, 0]));
    }

    /// A number that is used again must not give an old state another meaning.
    #[test]
    fn state_of_an_unused_version_means_nothing_to_the_next_one() {
        let clock = ManualClock::at(Timestamp::from_micros(1_790_000_000_000_000));
        let states = store(&clock);
        let of = |hours: u32| {
            let quota = Quota::sliding_log(10, hours * HOUR).expect("it is possible");
            Policy::new("log", quota).expect("it is a name")
        };
        let (short, long) = (of(1), of(100));
        assert!(states.charge(Charge::new(&short, &Key::global())).is_allowed());
        assert!(states.free_versions());
        clock.advance(2 * HOUR);
        assert!(states.free_versions());
        assert_eq!(states.versions.known().in_use(), 0);
        assert_eq!(states.charge(Charge::new(&long, &Key::global()).cost(0)).remaining(), 10);
    }

    /// A device that begins in 1970 gets the time later. Words hold thirteen years.
    #[test]
    fn time_goes_on_after_a_step_of_any_length() {
        let (today, minute) = (1_790_000_000_000_000, Duration::from_secs(60));
        let hourly = Quota::fixed_window(2, HOUR).expect("it is possible");
        for (before, after) in [(30, today), (today, 30), (today, today / 2), (today / 2, today), (today, 2 * today)] {
            for quota in [Quota::per_minute(2), hourly, Quota::per_calendar_month(2)] {
                let clock = ManualClock::at(Timestamp::from_micros(before));
                let states = store(&clock);
                let policy = Policy::from(quota);
                let take = || states.charge(Charge::new(&policy, &Key::global()));
                assert!(take().is_allowed() && take().is_allowed() && !take().is_allowed());
                clock.set(Timestamp::from_micros(after));
                let is_second = take().is_allowed();
                assert!(!is_second || after > before, "{before} to {after}: a step back is no second quota of {quota}");
                while is_second && take().is_allowed() {}
                let wait = take().wait().duration().expect("a wait helps");
                assert!(wait <= 2 * quota.period(), "{before} to {after}: {wait:?} of {quota}");
                clock.advance(wait);
                assert!(take().is_allowed(), "{before} to {after}: time goes on for {quota}");
                for _ in 0..40 {
                    clock.advance(minute.max(quota.period()));
                    assert!(take().is_allowed(), "{before} to {after}: it still does for {quota}");
                }
            }
        }
    }

    #[test]
    fn step_back_delays_the_look_for_versions_by_a_phase() {
        let now = Timestamp::from_micros(1_790_000_000_000_000);
        let clock = ManualClock::at(now);
        let states = store(&clock);
        assert!(states.free_versions() && !states.free_versions());
        clock.set(Timestamp::from_micros(now.as_micros() - PHASE_US / 2));
        assert!(states.free_versions(), "the step is longer than what was left of the phase");
        clock.set(Timestamp::from_micros(now.as_micros() - PHASE_US));
        assert!(states.free_versions());
        clock.advance(PHASE);
        assert!(states.free_versions());
    }
}
