//! The accounts of all keys whose bodies are paced.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use super::account::{Account, PaceSource, Turnstile};
use crate::base::sync::{Mutex, lock};
use crate::base::wait_list::remove_line;
use crate::clock::Timer;
use crate::key::Key;

/// The fingerprint of a policy's name, its quota, and a key.
pub(crate) type AccountId = (u64, AccountOf, Key);

/// The quota of an account, among the quotas of policies with one name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum AccountOf {
    /// The plan with this number. A rule has one or several plans, whose quotas may be switched.
    Plan(usize),
    /// The quota with this fingerprint, which requests bring.
    Quota(u64),
}

/// The accounts of a layer. A key has an account only while it has bodies.
pub(crate) struct Accounts {
    accounts: Mutex<HashMap<AccountId, CountedAccount>>,
    timer: Arc<dyn Timer>,
}

/// An account, and the number of its bodies.
struct CountedAccount {
    account: Arc<Account>,
    bodies: usize,
}

impl Accounts {
    pub(crate) fn new(timer: Arc<dyn Timer>) -> Arc<Self> {
        Arc::new(Self { accounts: Mutex::default(), timer })
    }

    /// Enters a body into the account of its key.
    pub(crate) fn enter(self: &Arc<Self>, id: AccountId, source: impl FnOnce() -> Box<dyn PaceSource>) -> BodyAccount {
        let account = {
            let mut accounts = lock(&self.accounts);
            let new = || CountedAccount { account: Account::new(source(), Arc::clone(&self.timer)), bodies: 0 };
            let counted = accounts.entry(id.clone()).or_insert_with(new);
            counted.bodies += 1;
            Arc::clone(&counted.account)
        };
        BodyAccount { turnstile: account.enter(), _counted: CountedBody { accounts: Arc::clone(self), id } }
    }

    /// Makes the accounts that `concerns` accepts ask at once if they were denied, because a mode or
    /// a quota has changed or a key was reset.
    pub(crate) fn let_ask(&self, concerns: impl Fn(&AccountId) -> bool) {
        let concerned =
            |(id, counted): (&AccountId, &CountedAccount)| concerns(id).then(|| Arc::clone(&counted.account));
        let called: Vec<Arc<Account>> = lock(&self.accounts).iter().filter_map(concerned).collect();
        called.iter().for_each(|account| account.let_ask());
    }

    pub(crate) fn timer(&self) -> &Arc<dyn Timer> {
        &self.timer
    }

    /// Returns how many keys have an account.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        lock(&self.accounts).len()
    }

    /// Removes a body from an account. Returns the account if no body is left in it.
    fn leave(&self, id: &AccountId) -> Option<Arc<Account>> {
        let mut accounts = lock(&self.accounts);
        let counted = accounts.get_mut(id)?;
        counted.bodies = counted.bodies.saturating_sub(1);
        if counted.bodies > 0 {
            return None;
        }
        remove_line(&mut accounts, id).map(|counted| counted.account)
    }
}

impl fmt::Debug for Accounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Accounts").finish_non_exhaustive()
    }
}

/// A body's place in the account of its key, until this value is dropped.
pub(crate) struct BodyAccount {
    /// Dropped first, so that the last body of an account leaves before the account is dropped.
    pub(crate) turnstile: Turnstile,
    _counted: CountedBody,
}

/// Counts one body of an account, until this value is dropped.
struct CountedBody {
    accounts: Arc<Accounts>,
    id: AccountId,
}

impl Drop for CountedBody {
    fn drop(&mut self) {
        // Drops the account without the lock, because the drop of an account refunds its units.
        drop(self.accounts.leave(&self.id));
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::task::{Context, Poll, Waker};
    use std::time::Duration;

    use tokio::time::{Instant, advance, timeout};

    use super::*;
    use crate::base::sync::AtomicU64;
    use crate::base::sync::Ordering;
    use crate::base::wait::Wait;
    use crate::clock::{StoppedTimer, TokioTimer};
    use crate::decision::Receipt;
    use crate::limiter::Refund;
    use crate::middleware::pace::account::{BytePace, PaceAnswer, PaceReply, PaceTerms};
    use crate::policy::Policy;
    use crate::quota::Quota;

    /// Counts what it is asked for and what is refunded, and answers as `answer` says.
    struct Counting<A> {
        taken: Arc<AtomicU64>,
        most: u64,
        answer: A,
    }

    impl<A: Fn(u64) -> PaceReply + Send + Sync> PaceSource for Counting<A> {
        fn terms(&self) -> PaceTerms {
            PaceTerms::Paced(BytePace { units: 100_000, period_us: 1_000_000, most: self.most })
        }

        fn ask(&self, units: u64) -> PaceReply {
            self.taken.fetch_add(units, Ordering::Relaxed);
            (self.answer)(units)
        }

        fn refund(&self, refund: Refund) {
            self.taken.fetch_sub(refund.receipt.units(), Ordering::Relaxed);
        }
    }

    fn given(units: u64, delay: Duration) -> PaceAnswer {
        let refund = Refund::new(Policy::from(Quota::per_second(1)), Key::global(), Receipt::new(units, 0, 0));
        PaceAnswer::Taken { refund: Some(refund), delay }
    }

    /// Returns two bodies of an account whose source answers so, and what the source counts.
    fn bodies(
        most: u64,
        answer: impl Fn(u64) -> PaceReply + Clone + Send + Sync + 'static,
    ) -> ([BodyAccount; 2], Arc<AtomicU64>) {
        let (accounts, taken) = (Accounts::new(Arc::new(StoppedTimer)), Arc::new(AtomicU64::new(0)));
        let enter = |()| {
            let source = Counting { taken: Arc::clone(&taken), most, answer: answer.clone() };
            accounts.enter((1, AccountOf::Plan(0), Key::global()), || Box::new(source))
        };
        ([(); 2].map(enter), taken)
    }

    #[test]
    fn batch_is_no_larger_than_one_call_may_take() {
        let answer = |units| PaceReply::Now(given(units, Duration::ZERO));
        let ([mut body, _other], taken) = bodies(3_000, answer);
        assert!(body.turnstile.poll(1_000, &mut Context::from_waker(Waker::noop())).is_ready());
        assert_eq!(taken.load(Ordering::Relaxed), 3_000);
    }

    #[test]
    fn batch_that_has_not_departed_is_refunded() {
        let answer = |units| PaceReply::Now(given(units, Duration::from_secs(1)));
        let ([mut body, other], taken) = bodies(50_000, answer);
        for _ in 0..2 {
            assert!(body.turnstile.poll(1_000, &mut Context::from_waker(Waker::noop())).is_pending());
        }
        assert_eq!(taken.load(Ordering::Relaxed), 7_500);
        drop((body, other));
        assert_eq!(taken.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn source_that_panics_leaves_the_account_to_other_bodies() {
        let panics = Arc::new(AtomicU64::new(1));
        let answer = move |units| {
            assert_eq!(panics.swap(0, Ordering::Relaxed), 0, "the source panics once");
            PaceReply::Now(given(units, Duration::ZERO))
        };
        let ([mut body, mut other], _) = bodies(50_000, answer);
        let polled = std::panic::AssertUnwindSafe(|| {
            let _ = body.turnstile.poll(1_000, &mut Context::from_waker(Waker::noop()));
        });
        assert!(std::panic::catch_unwind(polled).is_err());
        drop(body);
        assert!(other.turnstile.poll(1_000, &mut Context::from_waker(Waker::noop())).is_ready());
    }

    #[test]
    fn answer_that_comes_while_it_is_polled_wakes_the_body() {
        struct Woken(AtomicU64);
        impl std::task::Wake for Woken {
            fn wake(self: Arc<Self>) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        let answer = |units| {
            let mut polls = 0;
            PaceReply::Later(Box::pin(std::future::poll_fn(move |cx| {
                polls += 1;
                if polls > 1 {
                    return Poll::Ready(given(units, Duration::ZERO));
                }
                cx.waker().wake_by_ref();
                Poll::Pending
            })))
        };
        let ([mut body, _other], _) = bodies(50_000, answer);
        let woken = Arc::new(Woken(AtomicU64::new(0)));
        let waker = Waker::from(Arc::clone(&woken));
        assert!(body.turnstile.poll(1_000, &mut Context::from_waker(&waker)).is_pending());
        assert_eq!(woken.0.load(Ordering::Relaxed), 1);
        assert!(body.turnstile.poll(1_000, &mut Context::from_waker(&waker)).is_ready());
    }

    const MS: Duration = Duration::from_millis(1);

    fn denied(wait: Duration, remaining: u64) -> PaceAnswer {
        PaceAnswer::Denied { wait: Wait::After(wait), remaining }
    }

    /// Reads one body to its end and, after five seconds, another body of the same account, for ten seconds together,
    /// in Tokio's paused time. Returns the milliseconds and the units of each question to the source. `answer` gets the
    /// number of the question, from 0 on, and its units.
    async fn questions(answer: impl Fn(usize, u64) -> PaceAnswer + Send + Sync + 'static) -> Vec<(u128, u64)> {
        let (asked, began) = (Arc::new(Mutex::new(Vec::new())), Instant::now());
        let log = Arc::clone(&asked);
        let answer = move |units| {
            let number = {
                let mut log = lock(&log);
                log.push((began.elapsed().as_millis(), units));
                log.len() - 1
            };
            PaceReply::Now(answer(number, units))
        };
        let accounts = Accounts::new(Arc::new(TokioTimer::new()));
        let source = Box::new(Counting { taken: Arc::default(), most: 50_000, answer });
        let first = accounts.enter((1, AccountOf::Plan(0), Key::global()), || source);
        let second = accounts.enter((1, AccountOf::Plan(0), Key::global()), || unreachable!("the key has an account"));
        let read = async |mut body: BodyAccount| {
            while let Ok(units) = poll_fn(|cx| body.turnstile.poll(50_000, cx)).await {
                body.turnstile.spend(units);
            }
        };
        let reading = async {
            read(first).await;
            advance(5_000 * MS).await;
            read(second).await;
        };
        let _ = timeout(10_000 * MS, reading).await;
        std::mem::take(&mut *lock(&asked))
    }

    /// The first batch is half of one, so that the bytes are never a whole batch ahead of the pace.
    #[tokio::test(start_paused = true)]
    async fn first_batch_is_half_of_one_after_a_denial_too() {
        let asked = questions(|number, units| match number {
            0 => denied(100 * MS, 0),
            _ => given(units, Duration::ZERO),
        });
        let asked = asked.await;
        let (at, units) = asked[1];
        assert!((100..110).contains(&at) && (6_000..=7_500).contains(&units), "{:?}", &asked[..3]);
    }

    #[tokio::test(start_paused = true)]
    async fn account_asks_at_once_and_once_for_what_remains() {
        let asked = questions(|number, units| match number {
            0 => denied(100 * MS, 5_000),
            1 => denied(100 * MS, 4_000),
            _ => given(units, Duration::ZERO),
        });
        let asked = asked.await;
        assert_eq!(asked[..2], [(0, 7_500), (0, 5_000)]);
        assert!((90..110).contains(&asked[2].0), "{:?}", &asked[..3]);
    }

    /// 15,000 bytes pass after 100 ms. The account asks for seven eighths of them, which pass 18.75 ms earlier.
    #[tokio::test(start_paused = true)]
    async fn smaller_batch_after_a_denial_is_asked_for_sooner() {
        let asked = questions(|number, units| match number {
            1 => denied(100 * MS, 0),
            _ => given(units, Duration::ZERO),
        });
        let asked = asked.await;
        let (before, after) = (asked[1], asked[2]);
        assert!((15_000..15_500).contains(&before.1) && (13_000..13_500).contains(&after.1), "{:?}", &asked[..3]);
        assert!((75..95).contains(&(after.0 - before.0)), "{:?}", &asked[..3]);
    }

    /// The time until a departure is not made up for by larger batches: the queue has other callers in this time.
    #[tokio::test(start_paused = true)]
    async fn batch_after_a_late_departure_is_no_larger() {
        let asked = questions(|_, units| given(units, 500 * MS)).await;
        assert!((500..510).contains(&asked[1].0), "{:?}", &asked[..4]);
        assert!(asked[1..].iter().all(|(_, units)| (15_000..15_500).contains(units)), "{asked:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn sixth_failure_ends_a_body_and_the_next_one_begins_anew() {
        let asked = questions(|number, units| match number {
            1..=6 => PaceAnswer::FailedClosed,
            _ => given(units, Duration::ZERO),
        });
        let asked = asked.await;
        let pauses: Vec<_> = asked[1..=6].windows(2).map(|pair| (pair[1].0 - pair[0].0) / 100).collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16], "{:?}", &asked[..8]);
        let (at, units) = asked[7];
        assert!((8_000..8_500).contains(&at), "five seconds after the body has ended: {:?}", &asked[..8]);
        assert_eq!(units, 7_500, "no body waited, so nothing is made up for");
    }

    #[test]
    fn key_has_an_account_only_while_it_has_bodies() {
        let (accounts, taken) = (Accounts::new(Arc::new(StoppedTimer)), Arc::new(AtomicU64::new(0)));
        let mut cx = Context::from_waker(Waker::noop());
        for before in [0, 4_000] {
            let enter = || {
                let answer = |units| PaceReply::Now(given(units, Duration::ZERO));
                let source = Counting { taken: Arc::clone(&taken), most: 50_000, answer };
                accounts.enter((1, AccountOf::Plan(0), Key::global()), || Box::new(source))
            };
            let (mut first, mut second) = (enter(), enter());
            assert_eq!(accounts.len(), 1);
            // The first batch, which is worth 75 milliseconds. The first body sends a part of it.
            assert!(first.turnstile.poll(1_000, &mut cx).is_ready());
            first.turnstile.spend(1_000);
            drop(first);
            assert_eq!((accounts.len(), taken.load(Ordering::Relaxed)), (1, before + 7_500));
            assert!(second.turnstile.poll(3_000, &mut cx).is_ready());
            second.turnstile.spend(3_000);
            drop(second);
            assert_eq!((accounts.len(), taken.load(Ordering::Relaxed)), (0, before + 4_000));
        }
    }
}
