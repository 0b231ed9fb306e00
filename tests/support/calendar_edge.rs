//! Two processes that take from one key over the edge of a month, beside servers in trouble, and the accounts of what
//! they got.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tower_ratelimit::limiter::{Charge, Effect, Limiter, Refund};
use tower_ratelimit::{Key, Policy, Quota};

use super::proxy::Proxy;
use super::stepped_clock::{BEFORE_FEBRUARY_S, SteppedClock};

/// 2031-02-01 00:00:00 UTC.
const EDGE_S: i64 = BEFORE_FEBRUARY_S + 60;

const EDGE_US: i64 = EDGE_S * 1_000_000;

/// The units of a month.
const LIMIT: u64 = 40;

const CALLERS_OF_A_PROCESS: usize = 2;

/// The time that anything may take on a busy machine.
const LONG: Duration = Duration::from_secs(60);

const MS: Duration = Duration::from_millis(1);

/// The limiters of two processes whose clocks differ by a minute, one on each side of the server's, over the edge of a
/// month by the server's clock, while the server is far, silent, cut off, or replaced by one whose clock is behind.
///
/// `start` starts a server with a clock of its own, and returns its port. `process` makes a limiter with this deadline
/// behind a proxy. The time of a decision may be `away` from the server's, and a trip.
pub(crate) async fn take_over_an_edge<S, L: Limiter + Clone>(
    own: &SteppedClock,
    start: impl AsyncFn(&str) -> (S, u16, SteppedClock),
    process: impl AsyncFn(Duration, &Proxy) -> L,
    away: Duration,
) {
    let two_processes = async |deadline: Duration, proxy: &Proxy| {
        own.set(EDGE_S - 60);
        let first = process(deadline, proxy).await;
        own.set(EDGE_S);
        [first, process(deadline, proxy).await]
    };
    let (_far, far, far_clock) = start("far").await;
    let to_far = Proxy::start(far);
    to_far.delay(TRIP);
    let far_two = two_processes(2_000 * MS, &to_far).await;

    let (_silent, silent, silent_clock) = start("silent").await;
    let to_silent = Proxy::start(silent);
    let silent_two = two_processes(300 * MS, &to_silent).await;

    let (_cut, cut, cut_clock) = start("cut").await;
    let to_cut = Proxy::start(cut);
    let cut_two = two_processes(300 * MS, &to_cut).await;

    let ((_old, old, old_clock), (_new, new, new_clock)) = (start("old").await, start("new").await);
    let to_either = Proxy::start(old);
    let either_two = two_processes(300 * MS, &to_either).await;

    // On a busy machine, starting all of these may take longer than the rest of January.
    let far_crowd = Crowd::begin(&far_two, vec![far_clock], away + TRIP);
    let silent_crowd = Crowd::begin(&silent_two, vec![silent_clock], away);
    let cut_crowd = Crowd::begin(&cut_two, vec![cut_clock], away);
    let replaced_crowd = Crowd::begin(&either_two, vec![old_clock, new_clock], away);

    tokio::join!(
        far_crowd.plays("far", || {}, || {}),
        silent_crowd.plays("silent", || to_silent.hold(true), || to_silent.hold(false)),
        cut_crowd.plays("cut", || to_cut.reset(), || {}),
        async {
            replaced_crowd.exhausts(Window::January).await;
            replaced_crowd.goes_over_the_edge(|| {}).await;
            replaced_crowd.exhausts(Window::February).await;
            replaced_crowd.moves_to_the_next_server(|| {
                to_either.lead_to(new);
                to_either.reset();
            });
            replaced_crowd.plays("replaced", || {}, || {}).await;
        },
    );
}

/// The time there and back of a server that is far.
const TRIP: Duration = Duration::from_millis(80);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Window {
    January,
    February,
}

/// The callers, and the servers that one after the other keep the states.
struct Crowd<L> {
    shared: Arc<Shared>,
    limiter: L,
    callers: Vec<JoinHandle<()>>,
}

struct Shared {
    policy: Policy,
    over: Policy,
    clocks: Vec<SteppedClock>,
    /// The index of the server that new calls reach.
    server: AtomicUsize,
    /// How far the time of a decision may be from the server's.
    away_us: i64,
    is_over: AtomicBool,
    accounts: Mutex<Accounts>,
}

/// What callers know, by server and window.
#[derive(Debug, Default)]
struct Accounts {
    taken: BTreeMap<(usize, Window), u64>,
    refunded: BTreeMap<(usize, Window), u64>,
    /// By server.
    denied: BTreeMap<usize, u64>,
    /// Calls without an answer, and those that another server may have answered.
    unknown: u64,
    /// The callers that were denied.
    exhausted: BTreeSet<(usize, Window, usize)>,
}

impl<L: Limiter + Clone> Crowd<L> {
    /// Begins with the first of these servers, whose clock is set to the last minute of January. Each limiter is a
    /// process. The time of a decision may be `away` from the server's.
    fn begin(limiters: &[L], clocks: Vec<SteppedClock>, away: Duration) -> Self {
        clocks[0].set(EDGE_S - 30);
        let shared = Arc::new(Shared {
            policy: Policy::new("monthly", Quota::per_calendar_month(LIMIT)).unwrap(),
            over: Policy::new("over", Quota::meter(1_000_000, 86_400_000 * MS).unwrap()).unwrap(),
            clocks,
            server: AtomicUsize::new(0),
            away_us: i64::try_from(away.as_micros()).unwrap(),
            is_over: AtomicBool::new(false),
            accounts: Mutex::default(),
        });
        let callers = (0..limiters.len() * CALLERS_OF_A_PROCESS).map(|number| {
            let limiter = limiters[number % limiters.len()].clone();
            tokio::spawn(Arc::clone(&shared).call(limiter, number))
        });
        Self { callers: callers.collect(), limiter: limiters[0].clone(), shared }
    }

    /// Uses up January, goes over the edge in trouble, which then ends, and uses up February.
    async fn plays(self, name: &str, trouble: impl FnMut(), end: impl FnOnce()) {
        self.exhausts(Window::January).await;
        self.goes_over_the_edge(trouble).await;
        end();
        self.exhausts(Window::February).await;
        self.ends(name).await;
    }

    /// Waits until the present server has denied each caller in this window.
    async fn exhausts(&self, window: Window) {
        let (began, server) = (Instant::now(), self.shared.server.load(Ordering::SeqCst));
        loop {
            {
                let accounts = self.shared.accounts();
                let of_window = accounts.exhausted.iter().filter(|(at, other, _)| (*at, *other) == (server, window));
                if of_window.count() == self.callers.len() {
                    return;
                }
                assert!(began.elapsed() < LONG, "{window:?} is not used up: {accounts:?}");
            }
            sleep(5 * MS).await;
        }
    }

    /// Sets the clock of the present server to the last second of January, and lets `trouble` happen again and again
    /// until February has begun.
    async fn goes_over_the_edge(&self, mut trouble: impl FnMut()) {
        let clock = &self.shared.clocks[self.shared.server.load(Ordering::SeqCst)];
        clock.set(EDGE_S - 1);
        while clock.now_us() < EDGE_US + 300_000 {
            trouble();
            sleep(50 * MS).await;
        }
    }

    /// The next server takes over. Its clock shows the last minute of January.
    fn moves_to_the_next_server(&self, lead: impl FnOnce()) {
        let next = self.shared.server.load(Ordering::SeqCst) + 1;
        self.shared.clocks[next].set(EDGE_S - 30);
        // No caller sends while the server changes.
        let accounts = self.shared.accounts();
        self.shared.server.store(next, Ordering::SeqCst);
        lead();
        drop(accounts);
    }

    /// Ends the callers, and compares what they got with the laws and with what the last server keeps.
    async fn ends(self, name: &str) {
        self.shared.is_over.store(true, Ordering::SeqCst);
        for caller in self.callers {
            caller.await.unwrap();
        }
        let Shared { policy, over, server, accounts, .. } = &*self.shared;
        let accounts = std::mem::take(&mut *accounts.lock().unwrap());
        println!("{name}: {accounts:?}");
        let net = |at: &(usize, Window)| {
            accounts.taken.get(at).unwrap_or(&0).saturating_sub(*accounts.refunded.get(at).unwrap_or(&0))
        };
        for at in accounts.taken.keys() {
            assert!(net(at) <= LIMIT, "{name}: more than the limit in {at:?}: {accounts:?}");
        }
        let server = server.load(Ordering::SeqCst);
        let began = Instant::now();
        let key = Key::global();
        let kept = loop {
            match self.limiter.peek(&[Charge::new(policy, &key).cost(0), Charge::new(over, &key).cost(0)]).await {
                Ok(decision) => break decision,
                Err(error) => assert!(began.elapsed() < LONG, "{name}: {error}"),
            }
            sleep(5 * MS).await;
        };
        let [used, metered] = [0, 1].map(|at| kept.charges()[at].limit() - kept.charges()[at].remaining());
        let (known, denied) = (net(&(server, Window::February)), accounts.denied.get(&server).copied().unwrap_or(0));
        let is_between = |number: u64, least: u64| (least..=least + accounts.unknown).contains(&number);
        assert!(is_between(used, known), "{name}: {used} are used, {known} are known: {accounts:?}");
        assert!(is_between(metered, denied), "{name}: {metered} are metered, {denied} were denied: {accounts:?}");
    }
}

impl Shared {
    fn accounts(&self) -> MutexGuard<'_, Accounts> {
        self.accounts.lock().unwrap()
    }

    /// Takes units until it is over. It refunds some of them at once, and a few of January in February.
    async fn call<L: Limiter>(self: Arc<Self>, limiter: L, number: usize) {
        let (key, mut of_january) = (Key::global(), Vec::new());
        for turn in 0.. {
            if self.is_over.load(Ordering::SeqCst) {
                return;
            }
            sleep(10 * MS).await;
            let charges =
                [Charge::new(&self.policy, &key), Charge::new(&self.over, &key).effect(Effect::OnRefusal { of: 1 })];
            let (server, sent_us) = self.present();
            let answer = limiter.take(&charges).await;
            let (answered_by, answered_us) = self.present();
            let Some(mut decision) = answer.ok().filter(|_| server == answered_by) else {
                self.accounts().unknown += 1;
                continue;
            };
            let reset = decision.charges()[0].reset_after().unwrap_or_else(|| panic!("a window ends: {decision:?}"));
            let window = if reset <= 60_000 * MS { Window::January } else { Window::February };
            let is_its_time = match window {
                Window::January => sent_us < EDGE_US + self.away_us,
                Window::February => answered_us >= EDGE_US - self.away_us,
            };
            assert!(is_its_time, "{window:?} from {} to {} us", sent_us - EDGE_US, answered_us - EDGE_US);
            if !decision.is_allowed() {
                let mut accounts = self.accounts();
                *accounts.denied.entry(server).or_default() += 1;
                accounts.exhausted.insert((server, window, number));
                continue;
            }
            *self.accounts().taken.entry((server, window)).or_default() += 1;
            let receipt = decision.take_receipts().swap_remove(0).expect("a unit was taken");
            let mut refunds = match window {
                Window::January => Vec::new(),
                Window::February => std::mem::take(&mut of_january),
            };
            if window == Window::January && of_january.len() < 3 {
                of_january.push((server, window, receipt));
            } else if turn % 3 == 0 {
                refunds.push((server, window, receipt));
            }
            for (of_server, of_window, receipt) in refunds {
                if of_server != server {
                    continue;
                }
                // A refund of January has no effect in February.
                if of_window == window {
                    *self.accounts().refunded.entry((server, window)).or_default() += 1;
                }
                let refund = Refund::new(self.policy.clone(), key.clone(), receipt);
                if limiter.refund(vec![refund]).await.is_err() {
                    self.accounts().unknown += 1;
                }
            }
        }
    }

    /// Returns the server that a call reaches, and its time.
    fn present(&self) -> (usize, i64) {
        let _unchanged = self.accounts();
        let server = self.server.load(Ordering::SeqCst);
        (server, self.clocks[server].now_us())
    }
}
