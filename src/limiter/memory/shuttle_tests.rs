//! Random schedules that are too large for loom: several threads with many steps each. `tests/campaigns.sh` has the
//! command that runs them.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use shuttle::future::block_on;
use shuttle::thread;

use crate::MemoryLimiter;
use crate::base::sampling::explore;
use crate::clock::{ManualClock, Sleep, Timer};
use crate::event::LimiterEvent;
use crate::key::Key;
use crate::limiter::{Charge, Limiter, Ready, Refund};
use crate::outcome::Observer;
use crate::policy::Policy;
use crate::quota::Quota;

const HOUR: Duration = Duration::from_secs(3_600);

fn policy(name: &str, quota: Quota) -> Policy {
    Policy::new(name, quota).expect("it is a name")
}

fn key(number: u64) -> Key {
    Key::of(number).expect("it is short")
}

/// Counts keys that were forgotten to make room. No other thread runs within a step of it.
#[derive(Clone, Default)]
struct Forgotten(Arc<AtomicU64>);

impl Observer for Forgotten {
    fn on_limiter_event(&self, event: &LimiterEvent) {
        if matches!(event, LimiterEvent::Evicted { .. }) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn limiter(clock: &ManualClock) -> MemoryLimiter {
    MemoryLimiter::builder().max_keys(8).min_entries(1).clock(clock.clone()).build().expect("the setup is possible")
}

fn join<T>(threads: Vec<thread::JoinHandle<T>>) -> Vec<T> {
    threads.into_iter().map(|thread| thread.join().expect("the thread ends")).collect()
}

/// A key is admitted its quota, and once more for each time that it was forgotten. A snapshot has each state as it was
/// at an instant while it was made.
#[test]
fn snapshot_during_evictions_has_each_state_as_it_was() {
    explore(1_000, || {
        let (clock, forgotten) = (ManualClock::new(), Forgotten::default());
        let builder = || MemoryLimiter::builder().min_entries(1).clock(clock.clone());
        let limiter = builder().max_keys(8).observer(forgotten.clone()).build().expect("the setup is possible");
        let bucket = policy("bucket", Quota::token_bucket(10, HOUR).expect("the quota is possible"));
        let kept = key(0);
        assert!(limiter.take_one(&bucket, &kept, 4).is_allowed());
        let spawn = |keys: Vec<Key>, cost| {
            let (limiter, bucket) = (limiter.clone(), bucket.clone());
            thread::spawn(move || {
                let taken = keys.iter().map(|key| limiter.take_one(&bucket, key, cost).is_allowed());
                taken.filter(|is_allowed| *is_allowed).count() as u64 * cost
            })
        };
        let keys = |numbers: std::ops::Range<u64>| numbers.map(key).collect::<Vec<_>>();
        let threads = vec![spawn(keys(1..7), 7), spawn(keys(3..9), 7), spawn(vec![kept.clone(); 3], 1)];
        let snapshot = limiter.snapshot();
        let admitted: u64 = join(threads).into_iter().sum();
        let forgotten = forgotten.0.load(Ordering::Relaxed);
        assert!(admitted + 4 <= 10 * (9 + forgotten), "{admitted} of 9 keys, {forgotten} forgotten");
        // All states have room in it.
        let restored = builder().max_keys(1_000).restore(snapshot).build().expect("the snapshot is whole");
        let left = |limiter: &MemoryLimiter| limiter.peek_one(&bucket, &kept, 0).remaining();
        let (then, now) = (left(&restored), left(&limiter));
        assert!(forgotten > 0 || (now, then) == (3, then.clamp(3, 6)), "{then} then, {now} now");
        assert!((3..=6).contains(&then) || forgotten > 0 && then <= 10, "{then} then, {now} now");
    });
}

/// Counts what runs. No other thread runs between the answer of the limiter and the count.
#[derive(Clone, Default)]
struct Running(Arc<[AtomicU64; 2]>);

impl Running {
    fn begin(&self, limit: u64) {
        let now = self.0[0].fetch_add(1, Ordering::Relaxed) + 1;
        assert!(now <= limit, "{now} run at a time, of {limit}");
        self.0[1].fetch_add(1, Ordering::Relaxed);
    }

    fn end(&self) {
        self.0[0].fetch_sub(1, Ordering::Relaxed);
    }

    fn ran(&self) -> u64 {
        self.0[1].load(Ordering::Relaxed)
    }
}

#[test]
fn places_of_many_threads_are_held_once_and_come_back() {
    explore(1_000, || {
        let limiter = limiter(&ManualClock::new());
        let (places, rate) = (policy("places", Quota::concurrent(2)), policy("rate", Quota::per_hour(7)));
        let running = Running::default();
        let threads = (0..4).map(|number| {
            let (limiter, places, rate, running) = (limiter.clone(), places.clone(), rate.clone(), running.clone());
            thread::spawn(move || {
                for _ in 0..3 {
                    // Half of them take a unit of a rate with their place.
                    let (key, with_rate) = (key(1), number % 2 == 0);
                    let charges = [Charge::new(&places, &key), Charge::new(&rate, &key)];
                    let mut taken = limiter.take_now(if with_rate { &charges } else { &charges[..1] });
                    if !taken.is_allowed() {
                        continue;
                    }
                    running.begin(2);
                    thread::yield_now();
                    running.end();
                    let receipt = taken.charge_mut(0).and_then(|charge| charge.take_receipt());
                    let receipt = receipt.expect("a place was taken");
                    limiter.refund_now(&[Refund::new(places.clone(), key, receipt)]);
                }
            })
        });
        join(threads.collect());
        assert!(running.ran() > 0);
        assert_eq!(limiter.peek_one(&places, &key(1), 0).remaining(), 2);
        assert!(limiter.peek_one(&rate, &key(1), 0).remaining() >= 1, "six took a unit at most");
    });
}

/// A timer of which each sleep ends after some polls, and wakes its task for them.
#[derive(Clone, Copy, Debug)]
struct Polls(u32);

struct Sleeps(u32);

impl Timer for Polls {
    fn now(&self) -> Duration {
        Duration::ZERO
    }

    fn sleep_until(&self, _: Duration) -> Sleep {
        Box::pin(Sleeps(self.0))
    }
}

impl Future for Sleeps {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        match self.0 {
            0 => return Poll::Ready(()),
            u32::MAX => return Poll::Pending, // it never ends
            polls => self.0 = polls - 1,
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

/// A request that waits for as long as it takes gets a place, whatever the others do. A lost wake is a deadlock, which
/// shuttle reports.
#[test]
fn line_of_many_threads_serves_all_that_stay_in_it() {
    for with_reset in [false, true] {
        explore(500, move || {
            let limiter = limiter(&ManualClock::new());
            let places = policy("places", Quota::concurrent(2).max_wait(HOUR).expect("it is short"));
            let running = Running::default();
            let threads = [(1, u32::MAX), (2, u32::MAX), (1, u32::MAX), (2, 2), (1, 0)].map(|(cost, polls)| {
                let (places, running) = (places.clone(), running.clone());
                let ready = Ready::new(limiter.clone()).timer(Polls(polls)).max_wait(HOUR);
                thread::spawn(move || {
                    for _ in 0..2 {
                        let place = block_on(ready.hold(&places, &key(1), cost));
                        let Ok(_place) = place else {
                            assert!(polls < u32::MAX, "it waits for as long as it takes");
                            continue;
                        };
                        // After a reset more may run than the limit says.
                        let limit = if with_reset { u64::MAX } else { 2 };
                        (0..cost).for_each(|_| running.begin(limit));
                        thread::yield_now();
                        (0..cost).for_each(|_| running.end());
                    }
                })
            });
            if with_reset {
                limiter.reset_now(&places, &key(1));
            }
            join(threads.into());
            assert_eq!(limiter.peek_one(&places, &key(1), 0).remaining(), 2);
            assert!(limiter.hooks().place_lines().is_some_and(|lines| lines.is_empty()));
        });
    }
}
