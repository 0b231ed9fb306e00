//! A story: what happens in the simulation of one seed.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, advance, sleep, sleep_until, timeout};

use super::chance::Chance;
use super::ledger::{CALLS, Claim, Noting, Seen};
use super::network::{Faults, Network, Wire};
#[cfg(feature = "store")]
use super::table::Remote;
use crate::algorithm::properties::quotas::any_algorithm;
use crate::clock::{Clock, TokioTimer};
use crate::decision::{ChargeDecision, Decision, Receipt};
#[cfg(feature = "store")]
use crate::event::StoreErrorKind;
use crate::key::Key;
use crate::limiter::redis::error::RedisError;
use crate::limiter::redis::limiter::RedisLimiter;
#[cfg(feature = "store")]
use crate::limiter::store::{StoreError, StoreLimiter, StoreLimiterBuilder};
use crate::limiter::{Charge, Effect, Limiter, Place, Refund};
use crate::policy::Policy;
use crate::quota::{Algorithm, Anchor, Quota};
use crate::random::seeded;
use crate::time::Timestamp;
use crate::wait::Wait;

/// No round trip takes as long while there are no faults.
const QUIET_TRIP: Duration = Duration::from_millis(5);

/// The time after its deadline within which a check ends.
const GRACE: Duration = Duration::from_millis(21);

/// The time after the last fault in which every process recovers.
const RECOVERY: Duration = Duration::from_secs(3);

/// A check that takes longer hangs.
const HANG: Duration = Duration::from_secs(15);

/// The longest wait that a story waits for.
const PATIENCE: Duration = Duration::from_secs(30);

/// The course of a seed.
pub(super) struct Plan {
    processes: usize,
    /// The quotas of each rule, which has one at a time.
    rules: Vec<Vec<Policy>>,
    keys: Vec<Key>,
    deadline: Duration,
    denials: usize,
    lease_units: u64,
    /// The time after which places lapse.
    lapse: Duration,
    faults: Faults,
    /// In their order, with the milliseconds since the beginning.
    events: Vec<(u64, Event)>,
}

#[derive(Clone, Debug)]
enum Event {
    Take {
        process: usize,
        key: usize,
        charges: Vec<Asked>,
        then: Then,
    },
    Settle {
        process: usize,
        key: usize,
        charges: Vec<Asked>,
    },
    Hold {
        process: usize,
        key: usize,
        cost: u64,
        for_ms: u64,
        /// The time after which the caller gives up, if it does.
        patience_ms: Option<u64>,
    },
    /// A process ends as it should.
    Close {
        process: usize,
    },
    /// A process has another quota from now on, as while a new version is rolled out.
    Change {
        process: usize,
        rule: usize,
        to: usize,
    },
    Reset {
        process: usize,
        rule: usize,
        key: usize,
    },
    Cut {
        process: usize,
    },
    Replicate,
    FailOver,
    Crash {
        ms: u64,
    },
    Step {
        us: i64,
    },
    Kill {
        process: usize,
    },
    Stop {
        process: usize,
    },
    GoOn {
        process: usize,
    },
    /// No process runs for this time.
    Stall {
        ms: u64,
    },
}

/// A charge that is asked for.
#[derive(Clone, Copy, Debug)]
struct Asked {
    rule: usize,
    cost: u64,
    effect: Effect,
}

/// The end of a check, as its caller chose it.
#[derive(Clone, Copy, Debug)]
enum Then {
    Keep,
    Refund { after_ms: u64 },
    Cancel { after_ms: u64 },
}

/// The end of a story.
pub(super) struct Ended {
    pub(super) trace: String,
    pub(super) problems: Vec<String>,
    pub(super) checks: u64,
}

impl Ended {
    /// The end of a story that panicked.
    pub(super) fn panicked() -> Self {
        Self { trace: String::new(), problems: vec!["it panicked".to_owned()], checks: 0 }
    }
}

/// The clock of a process.
#[derive(Debug)]
pub(super) struct OwnClock {
    began: Instant,
    at_first: Timestamp,
}

impl Clock for OwnClock {
    fn now(&self) -> Timestamp {
        self.at_first.saturating_add(self.began.elapsed())
    }
}

impl Plan {
    pub(super) fn of(seed: u64) -> Self {
        let mut chance = Chance::new(seed);
        let mut plan = Self::empty(&mut chance);
        match chance.below(20) {
            0..=1 => plan.add_leases(&mut chance),
            2..=5 => plan.add_places(&mut chance),
            6..=9 => plan.add_sets(&mut chance),
            10..=11 => plan.add_accounts(&mut chance),
            _ => plan.add_checks(&mut chance),
        }
        if chance.permille(800) {
            plan.add_faults(&mut chance);
        }
        plan.lapse = Duration::from_secs(*chance.of(&[3, 10]));
        plan.events.sort_by_key(|(at, _)| *at);
        plan
    }

    fn empty(chance: &mut Chance) -> Self {
        Self {
            processes: chance.within(2..=3) as usize,
            rules: Vec::new(),
            keys: (0..chance.within(1..=2)).map(|number| Key::of(number).expect("a number is a key")).collect(),
            deadline: Duration::from_millis(*chance.of(&[20, 50, 50, 100])),
            denials: if chance.permille(700) { 64 } else { 0 },
            lease_units: 0,
            lapse: Duration::from_secs(3),
            faults: Faults { delay_ms: *chance.of(&[0, 1, 2, 5, 15]), ..Faults::default() },
            events: Vec::new(),
        }
    }

    /// Returns the story of limiters over a store that compares and swaps.
    #[cfg(feature = "store")]
    pub(super) fn of_store(seed: u64) -> Self {
        let mut chance = Chance::new(seed);
        let mut plan = Self::empty(&mut chance);
        plan.deadline *= 4; // each conflict is a round trip more
        match chance.below(10) {
            0..=4 => plan.add_accounts(&mut chance),
            5..=7 => plan.add_sets(&mut chance),
            _ => plan.add_checks(&mut chance),
        }
        if chance.permille(800) {
            plan.add_faults(&mut chance);
            plan.events.retain(|(_, event)| !matches!(event, Event::Replicate | Event::FailOver));
        }
        plan.events.sort_by_key(|(at, _)| *at);
        plan
    }

    /// Adds some kinds of faults. Each seed has a few, so that each is seen without the others.
    fn add_faults(&mut self, chance: &mut Chance) {
        let faults = &mut self.faults;
        let mut some = |most: u64| if chance.permille(300) { chance.within(5..=most) } else { 0 };
        faults.lost_requests = some(100);
        faults.lost_replies = some(150);
        faults.cuts = some(50);
        faults.long_delays = some(150);
        faults.script_flushes = some(200);
        faults.long_delay_ms = chance.within(20..=200);
        faults.reorders = chance.permille(200);
        let (processes, keys, rules) = (self.processes as u64, self.keys.len() as u64, self.rules.len() as u64);
        let process = |chance: &mut Chance| chance.below(processes) as usize;
        for _ in 0..chance.below(4) {
            let at = chance.below(1_500);
            match chance.below(9) {
                8 => self.events.push((at, Event::Close { process: process(chance) })),
                0 => self.events.push((at, Event::Cut { process: process(chance) })),
                1 => {
                    self.events.push((at, Event::Replicate));
                    self.events.push((at + chance.within(1..=200), Event::FailOver));
                }
                2 => self.events.push((at, Event::Crash { ms: chance.within(1..=600) })),
                3 => {
                    let us = chance.within(1_000..=3_000_000) as i64;
                    self.events.push((at, Event::Step { us: if chance.permille(500) { us } else { -us } }));
                }
                4 => self.events.push((at, Event::Kill { process: process(chance) })),
                5 => {
                    let process = process(chance);
                    self.events.push((at, Event::Stop { process }));
                    self.events.push((at + chance.within(1..=500), Event::GoOn { process }));
                }
                6 => self.events.push((at, Event::Stall { ms: chance.within(1..=400) })),
                _ => {
                    let (rule, key) = (chance.below(rules) as usize, chance.below(keys) as usize);
                    self.events.push((at, Event::Reset { process: process(chance), rule, key }));
                }
            }
        }
    }

    /// Adds checks of one rule.
    fn add_checks(&mut self, chance: &mut Chance) {
        let algorithm = any_algorithm(chance.below(1 << 20));
        let others = if chance.permille(150) { chance.within(1..=2) } else { 0 };
        let mut quotas = vec![quota(algorithm, chance)];
        quotas.extend((0..others).map(|_| quota(any_algorithm(chance.below(1 << 20)), chance)));
        self.add_rule(0, quotas);
        self.add_changes(chance);
        self.add_takes(chance, |chance| {
            vec![Asked { rule: 0, cost: *chance.of(&[1, 1, 1, 2, 3, 7]), effect: Effect::Enforce }]
        });
    }

    /// Adds checks of rules whose units do not come back while the story lasts.
    fn add_accounts(&mut self, chance: &mut Chance) {
        let (limit, month) = (chance.within(5..=60), Duration::from_secs(30 * 86_400));
        let quota = match chance.below(3) {
            0 => Quota::fixed_window(limit, month).and_then(|quota| quota.anchor(Anchor::FirstRequest)),
            1 => Quota::sliding_log(limit, month),
            _ => Quota::meter(limit, month),
        };
        self.add_rule(0, vec![quota.expect("the quota is possible")]);
        self.add_takes(chance, |chance| {
            vec![Asked { rule: 0, cost: *chance.of(&[1, 1, 2, 3]), effect: Effect::Enforce }]
        });
    }

    /// Adds checks of several rules together.
    fn add_sets(&mut self, chance: &mut Chance) {
        let rules = chance.within(2..=3) as usize;
        for rule in 0..rules {
            let quota = quota(any_algorithm(chance.below(1 << 20)), chance);
            self.add_rule(rule, vec![quota]);
        }
        let observed = chance.permille(300);
        self.add_takes(chance, |chance| {
            let mut charges = Vec::new();
            for rule in 0..rules {
                let effect = if observed && chance.permille(300) { Effect::Observe } else { Effect::Enforce };
                if charges.is_empty() || chance.permille(700) {
                    charges.push(Asked { rule, cost: *chance.of(&[1, 1, 2, 3]), effect });
                }
            }
            charges
        });
        for _ in 0..chance.below(6) {
            let charges = vec![Asked { rule: chance.below(rules as u64) as usize, cost: 2, effect: Effect::Force }];
            let (process, key) = (self.any_process(chance), self.any_key(chance));
            self.events.push((chance.below(1_500), Event::Settle { process, key, charges }));
        }
    }

    /// Adds checks of a hot key, of which units are leased.
    fn add_leases(&mut self, chance: &mut Chance) {
        self.lease_units = chance.within(4..=30);
        self.keys.truncate(1);
        let (limit, period) = (chance.within(40..=400), Duration::from_millis(*chance.of(&[500, 1_000, 3_000])));
        let quota = match chance.below(4) {
            0 => Quota::fixed_window(limit, period),
            1 => Quota::sliding_window(limit, period),
            2 => Quota::sliding_log(limit, period),
            _ => Quota::token_bucket(limit, period),
        };
        self.add_rule(0, vec![quota.expect("the quota is possible")]);
        for _ in 0..chance.within(5..=15) {
            let (at, process) = (chance.below(1_500), self.any_process(chance));
            for check in 0..chance.within(5..=25) {
                let charges = vec![Asked { rule: 0, cost: *chance.of(&[1, 1, 2]), effect: Effect::Enforce }];
                self.events.push((at + check / 2, Event::Take { process, key: 0, charges, then: Then::Keep }));
            }
        }
    }

    /// Adds requests in flight.
    fn add_places(&mut self, chance: &mut Chance) {
        let mut quota = Quota::concurrent(chance.within(1..=6));
        if chance.permille(400) {
            quota = quota.max_wait(Duration::from_millis(chance.within(20..=1_500))).expect("the wait is possible");
        }
        self.add_rule(0, vec![quota]);
        let mut at = 0;
        for _ in 0..chance.within(20..=80) {
            at += chance.below(60);
            let (process, key) = (self.any_process(chance), self.any_key(chance));
            let for_ms = if chance.permille(30) { chance.below(5_000) } else { chance.below(200) };
            let patience_ms = chance.permille(100).then(|| chance.below(40));
            self.events.push((at, Event::Hold { process, key, cost: *chance.of(&[1, 1, 1, 2]), for_ms, patience_ms }));
        }
    }

    fn add_rule(&mut self, rule: usize, quotas: Vec<Quota>) {
        let policy = |quota| Policy::new(format!("rule{rule}"), quota).expect("the name is possible");
        self.rules.push(quotas.into_iter().map(policy).collect());
    }

    fn add_changes(&mut self, chance: &mut Chance) {
        let quotas = self.rules[0].len() as u64;
        for _ in 0..if quotas > 1 { chance.within(1..=4) } else { 0 } {
            let to = chance.below(quotas) as usize;
            self.events.push((chance.below(1_500), Event::Change { process: self.any_process(chance), rule: 0, to }));
        }
    }

    fn add_takes(&mut self, chance: &mut Chance, charges: impl Fn(&mut Chance) -> Vec<Asked>) {
        let mut at = 0;
        for _ in 0..chance.within(20..=100) {
            // Some come together, as they do under load.
            at += if chance.permille(500) { 0 } else { chance.below(40) };
            let charges = charges(chance);
            let then = match chance.below(10) {
                0..=5 => Then::Keep,
                6..=7 => Then::Refund { after_ms: chance.below(100) },
                _ => Then::Cancel { after_ms: chance.below(30) },
            };
            let (process, key) = (self.any_process(chance), self.any_key(chance));
            self.events.push((at, Event::Take { process, key, charges, then }));
        }
    }

    fn any_process(&self, chance: &mut Chance) -> usize {
        chance.below(self.processes as u64) as usize
    }

    fn any_key(&self, chance: &mut Chance) -> usize {
        chance.below(self.keys.len() as u64) as usize
    }
}

/// Returns a quota that the checks of a story exceed.
fn quota(algorithm: Algorithm, chance: &mut Chance) -> Quota {
    let limit = chance.within(1..=12);
    let period = Duration::from_micros(*chance.of(&[100_000, 333_333, 1_000_000, 2_000_003]));
    let quota = match algorithm {
        Algorithm::TokenBucket => Quota::token_bucket(limit, period),
        Algorithm::Gcra => Quota::gcra(limit, period),
        Algorithm::LeakyBucket => Quota::leaky_bucket(limit, period),
        Algorithm::LeakyQueue => Quota::leaky_queue(limit, period),
        Algorithm::StepBucket => Quota::step_bucket(limit, period),
        Algorithm::FixedWindow => Quota::fixed_window(limit, period),
        Algorithm::SlidingWindow => Quota::sliding_window(limit, period),
        Algorithm::SlidingLog => Quota::sliding_log(limit, period),
        Algorithm::Block => Quota::block(limit, period, Duration::from_millis(chance.within(50..=2_000))),
        Algorithm::Meter => Quota::meter(limit, period),
        Algorithm::Concurrency => Ok(Quota::concurrent(limit)),
    };
    let mut quota = quota.expect("the quota is possible");
    // Options that the algorithm does not have are left out.
    if chance.permille(200) {
        quota = quota.burst(chance.within(1..=20)).unwrap_or(quota);
    }
    if chance.permille(200) {
        quota = quota.anchor(Anchor::FirstRequest).unwrap_or(quota);
    }
    if chance.permille(200) {
        quota = quota.buckets(*chance.of(&[2, 4, 10])).unwrap_or(quota);
    }
    if chance.permille(150) {
        quota = quota.count_denied().unwrap_or(quota);
    }
    if chance.permille(150) {
        quota = quota.max_debt(chance.within(1..=5)).unwrap_or(quota);
    }
    quota
}

/// A limiter that is simulated.
pub(super) trait Subject: Limiter + Clone {
    /// Whether the ledger knows the server's decisions.
    const IS_SERVER_KNOWN: bool;

    /// Makes the limiter of a process.
    fn make(plan: &Plan, wire: Wire, clock: OwnClock) -> Self;

    /// Returns a name of a key.
    fn stored(&self, policy: &Policy, key: &Key) -> Bytes;

    /// Ends what the limiter holds.
    fn close(&self);

    /// Takes a place, and waits in line for it if the quota says so.
    fn hold(
        &self,
        policy: &Policy,
        key: &Key,
        cost: u64,
    ) -> impl Future<Output = Result<Result<Place, ChargeDecision>, Self::Error>> + Send;
}

impl Subject for RedisLimiter {
    const IS_SERVER_KNOWN: bool = true;

    fn make(plan: &Plan, wire: Wire, clock: OwnClock) -> Self {
        let number = (wire.process as u64 + 1) * CALLS;
        let builder = Self::builder()
            .deadline(plan.deadline)
            .max_denials(plan.denials)
            .lease_units(plan.lease_units)
            .places_lapse_after(plan.lapse);
        builder.simulated(wire, clock, number).expect("the setup is possible")
    }

    fn stored(&self, policy: &Policy, key: &Key) -> Bytes {
        self.0.backend().space.key(policy, key).bytes
    }

    async fn hold(&self, policy: &Policy, key: &Key, cost: u64) -> Result<Result<Place, ChargeDecision>, RedisError> {
        self.hold_in_line(policy, key, cost, TokioTimer::new()).await
    }

    fn close(&self) {
        Self::close(self);
    }
}

#[cfg(feature = "store")]
impl Subject for StoreLimiter<Remote> {
    const IS_SERVER_KNOWN: bool = false;

    fn make(plan: &Plan, wire: Wire, clock: OwnClock) -> Self {
        let builder = StoreLimiterBuilder::new().deadline(plan.deadline).max_denials(plan.denials);
        builder.own_clock(clock).build(Remote(wire)).expect("the setup is possible")
    }

    fn stored(&self, policy: &Policy, key: &Key) -> Bytes {
        [policy.name().as_bytes(), key.as_bytes()].concat().into()
    }

    async fn hold(&self, _: &Policy, _: &Key, _: u64) -> Result<Result<Place, ChargeDecision>, StoreError> {
        Err(StoreError::of(StoreErrorKind::Misconfigured, "stores keep no places"))
    }

    fn close(&self) {}
}

/// Plays the story of a seed with limiters on Redis.
pub(super) fn play(seed: u64) -> Ended {
    play_plan::<RedisLimiter>(seed, Plan::of(seed))
}

/// Plays the story of a seed with limiters over a store.
#[cfg(feature = "store")]
pub(super) fn play_store(seed: u64) -> Ended {
    play_plan::<StoreLimiter<Remote>>(seed, Plan::of_store(seed))
}

fn play_plan<S: Subject>(seed: u64, plan: Plan) -> Ended {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let _seeded = seeded::by(seed);
    let _noting = Noting::begin();
    runtime.expect("the runtime starts").block_on(async { Story::<S>::begin(seed, plan).play().await })
}

struct Story<S> {
    plan: Plan,
    network: Network,
    /// `None` if it was killed.
    processes: Vec<Option<S>>,
    /// The checks, with their processes.
    checks: Vec<(usize, tokio::task::JoinHandle<()>)>,
    /// The quota that each process has for each rule.
    current: Vec<Vec<usize>>,
    killed: Vec<usize>,
}

/// A check and its caller.
struct Caller<S> {
    network: Network,
    process: usize,
    limiter: S,
    deadline: Duration,
    charges: Vec<(Policy, Key, u64, Effect)>,
}

impl<S: Subject> Story<S> {
    fn begin(seed: u64, plan: Plan) -> Self {
        let network = Network::new(plan.processes, Chance::new(seed ^ 1), Faults::default());
        network.lock().ledger.leases = plan.lease_units > 0;
        network.lock().ledger.lapse = plan.lapse;
        network.lock().ledger.is_server_known = S::IS_SERVER_KNOWN;
        let (began, mut chance) = (Instant::now(), Chance::new(seed ^ 2));
        let process = |process: usize| {
            // The clocks of processes differ from each other and from the server's.
            let at_first = Timestamp::from_micros(chance.within(1..=4_000_000_000_000_000));
            let wire = Wire { network: network.clone(), process };
            Some(S::make(&plan, wire, OwnClock { began, at_first }))
        };
        let processes = (0..plan.processes).map(process).collect();
        Self {
            current: vec![vec![0; plan.rules.len()]; plan.processes],
            plan,
            network,
            processes,
            checks: Vec::new(),
            killed: Vec::new(),
        }
    }

    async fn play(mut self) -> Ended {
        sleep(Duration::from_millis(50)).await; // all connect
        self.network.lock().faults = self.plan.faults.clone();
        let began = Instant::now();
        for (at, event) in self.plan.events.clone() {
            sleep_until(began + Duration::from_millis(at)).await;
            self.happen(event).await;
        }
        sleep(Duration::from_millis(200)).await;
        self.recover().await;
        self.check_places_are_free().await;
        self.check_waits().await;
        sleep(RECOVERY).await;
        self.check_in_use().await;
        self.check_places().await;
        let mut state = self.network.lock();
        if S::IS_SERVER_KNOWN {
            state.ledger.settle(|process| !self.killed.contains(&process));
        }
        Ended {
            trace: std::mem::take(&mut state.trace),
            problems: state.ledger.problems().to_vec(),
            checks: self.checks.len() as u64,
        }
    }

    async fn happen(&mut self, event: Event) {
        match event {
            Event::Take { process, key, charges, then } => {
                let Some(caller) = self.caller(process, key, &charges) else { return };
                self.checks.push((process, tokio::spawn(caller.check(then))));
            }
            Event::Settle { process, key, charges } => {
                let Some(caller) = self.caller(process, key, &charges) else { return };
                self.checks.push((process, tokio::spawn(caller.settle())));
            }
            Event::Close { process } => {
                if let Some(limiter) = self.processes[process].take() {
                    self.network.lock().log(format_args!("process {process} closes"));
                    self.network.lock().ledger.record_death(process);
                    limiter.close();
                    self.killed.push(process);
                }
            }
            Event::Hold { process, key, cost, for_ms, patience_ms } => {
                let charges = [Asked { rule: 0, cost, effect: Effect::Enforce }];
                let Some(caller) = self.caller(process, key, &charges) else { return };
                let number = self.checks.len() as u64;
                self.checks
                    .push((process, tokio::spawn(caller.hold(number, Duration::from_millis(for_ms), patience_ms))));
            }
            Event::Change { process, rule, to } => self.current[process][rule] = to,
            Event::Reset { process, rule, key } => {
                let Some(limiter) = self.processes[process].clone() else { return };
                let (policy, key) = (self.policy(process, rule).clone(), self.plan.keys[key].clone());
                let network = self.network.clone();
                network.lock().ledger.record_forgotten(&limiter.stored(&policy, &key));
                tokio::spawn(async move {
                    let is_reset = limiter.reset(&policy, &key).await.is_ok();
                    let mut state = network.lock();
                    let now = state.now();
                    state.log(format_args!("process {process} reset {key:?}: {is_reset}"));
                    state.ledger.record_freed(process, &limiter.stored(&policy, &key), now);
                });
            }
            Event::Cut { process } => self.network.lock().cut(process),
            Event::Replicate => self.network.lock().replicate(),
            Event::FailOver => self.network.lock().fail_over(),
            Event::Crash { ms } => self.network.lock().crash(Duration::from_millis(ms)),
            Event::Step { us } => self.network.lock().step_clock(us),
            Event::Kill { process } => {
                self.network.lock().kill(process);
                self.network.lock().ledger.record_death(process);
                self.checks.iter().filter(|(of, _)| *of == process).for_each(|(_, check)| check.abort());
                self.processes[process] = None;
                self.killed.push(process);
            }
            Event::Stop { process } => self.network.lock().stop(process),
            Event::GoOn { process } => self.network.lock().go_on(process),
            Event::Stall { ms } => {
                self.network.lock().record_stall(Duration::from_millis(ms));
                advance(Duration::from_millis(ms)).await;
            }
        }
    }

    /// Returns the quota that a process has for a rule.
    fn policy(&self, process: usize, rule: usize) -> &Policy {
        &self.plan.rules[rule][self.current[process][rule]]
    }

    fn caller(&self, process: usize, key: usize, charges: &[Asked]) -> Option<Caller<S>> {
        let charge = |asked: &Asked| {
            (self.policy(process, asked.rule).clone(), self.plan.keys[key].clone(), asked.cost, asked.effect)
        };
        Some(Caller {
            network: self.network.clone(),
            process,
            limiter: self.processes[process].clone()?,
            deadline: self.plan.deadline,
            charges: charges.iter().map(charge).collect(),
        })
    }

    /// Ends the faults, and waits until every process has recovered.
    async fn recover(&mut self) {
        {
            let mut state = self.network.lock();
            state.faults = Faults { delay_ms: 1, ..Faults::default() };
            (0..self.plan.processes).for_each(|process| state.go_on(process));
            state.log(format_args!("the faults are over"));
        }
        sleep(RECOVERY).await;
        for (number, (_, check)) in self.checks.iter_mut().enumerate() {
            let problem = match timeout(HANG, check).await {
                Ok(Ok(())) => continue,
                Ok(Err(error)) if error.is_cancelled() => continue, // its process was killed
                Ok(Err(error)) => format!("check {number} panicked: {error}"),
                Err(_) => format!("check {number} hangs"),
            };
            self.network.lock().ledger.problem(problem);
        }
    }

    /// Checks that each process answers, and that a request which waits as it was told passes.
    async fn check_waits(&mut self) {
        for process in 0..self.plan.processes {
            for rule in 0..self.plan.rules.len() {
                for key in 0..self.plan.keys.len() {
                    let charge = Asked { rule, cost: 1, effect: Effect::Enforce };
                    let Some(caller) = self.caller(process, key, &[charge]) else { continue };
                    if caller.charges[0].0.limits_in_flight() {
                        continue;
                    }
                    let Some(wait) = caller.ask_in_quiet().await else { continue };
                    // A quota that the key did not have before promises no wait.
                    if wait > PATIENCE || self.plan.rules[rule].len() > 1 {
                        continue;
                    }
                    // The time of a store is known to half a round trip.
                    let error = if S::IS_SERVER_KNOWN { Duration::ZERO } else { QUIET_TRIP };
                    sleep(wait + error).await;
                    if caller.ask_in_quiet().await.is_some() {
                        let words = format!("process {process} was told to wait for {wait:?}, waited, and was denied");
                        self.network.lock().ledger.problem(words);
                    }
                }
            }
        }
    }

    /// Checks what is in use of the rules whose units do not come back while the story lasts.
    async fn check_in_use(&mut self) {
        let Some(process) = self.processes.iter().position(Option::is_some) else { return };
        for rule in 0..self.plan.rules.len() {
            let is_lasting = self.policy(process, rule).quota().spec().period_us > 1_000 * 1_000_000;
            for key in 0..if is_lasting { self.plan.keys.len() } else { 0 } {
                let charges = [Asked { rule, cost: 0, effect: Effect::Enforce }];
                let Some(caller) = self.caller(process, key, &charges) else { continue };
                let Ok(decision) = caller.limiter.peek(&caller.charges()).await else { continue };
                let (policy, key, ..) = &caller.charges[0];
                let stored = caller.limiter.stored(policy, key);
                let told = &decision.charges()[0];
                self.network.lock().ledger.check_in_use(&stored, told.limit() - told.remaining());
            }
        }
    }

    /// Checks that no place is taken soon after all were returned, unless a process could not return its own. A failover
    /// may bring back a row of which its process knows nothing any more: it lapses.
    async fn check_places_are_free(&mut self) {
        let Some(process) = self.processes.iter().position(Option::is_some) else { return };
        let is_lapse_needed = !self.killed.is_empty() || self.network.lock().ledger.has_failed_over();
        if !self.plan.rules[0][0].limits_in_flight() || is_lapse_needed {
            return;
        }
        sleep(Duration::from_secs(1)).await;
        for key in 0..self.plan.keys.len() {
            let charges = [Asked { rule: 0, cost: 0, effect: Effect::Enforce }];
            let Some(caller) = self.caller(process, key, &charges) else { continue };
            let problem = match caller.limiter.peek(&caller.charges()).await {
                Ok(decision) => {
                    let told = &decision.charges()[0];
                    let taken = told.limit() - told.remaining();
                    (taken > 0).then(|| format!("{taken} places are taken, and all were returned"))
                }
                Err(error) => Some(format!("process {process} has not recovered: {error}")),
            };
            problem.into_iter().for_each(|words| self.network.lock().ledger.problem(words));
        }
    }

    /// Checks that no place is taken once all were returned, or have lapsed.
    async fn check_places(&mut self) {
        if !self.plan.rules[0][0].limits_in_flight() {
            return;
        }
        sleep(3 * self.plan.lapse).await;
        let left = {
            let state = self.network.lock();
            let mut server = state.server.clone();
            server.expire(state.server_now_us());
            server.keys.len()
        };
        if left > 0 {
            self.network
                .lock()
                .ledger
                .problem(format!("{left} keys have places {:?} after all were returned", self.plan.lapse));
        }
    }
}

/// A caller without an answer. Dropped, it is one that never gets it.
struct Asks<'a, S: Subject>(Option<&'a Caller<S>>);

impl<S: Subject> Drop for Asks<'_, S> {
    fn drop(&mut self) {
        self.0.into_iter().for_each(Caller::record_unknown);
    }
}

impl<S: Subject> Caller<S> {
    /// Forces the charges.
    async fn settle(self) {
        self.network.goes_on(self.process).await;
        let sent = self.network.lock().now();
        let answer = self.answered(self.limiter.settle(&self.charges())).await;
        // It waits behind checks in flight, each for its deadline.
        drop(self.record(sent, 2 * self.deadline, answer));
    }

    /// Takes a place, and returns it after a while.
    async fn hold(self, number: u64, time: Duration, patience_ms: Option<u64>) {
        self.network.goes_on(self.process).await;
        let (policy, key, cost, _) = &self.charges[0];
        let sent = self.network.lock().now();
        let held = S::hold(&self.limiter, policy, key, *cost);
        let patience = patience_ms.map_or(HANG, Duration::from_millis);
        let Ok(held) = timeout(patience, held).await else {
            let mut state = self.network.lock();
            state.log(format_args!("process {}: caller {number} of {cost} gives up", self.process));
            if patience_ms.is_none() {
                state.ledger.problem(format!("caller {number} waits for ever"));
            }
            return;
        };
        let place = {
            let mut state = self.network.lock();
            let now = state.now();
            // It is asked about before it waits and after, three times if the key is reset each time.
            let longest = policy.quota().wait_in_line() + 6 * (self.deadline + GRACE);
            if now - sent > longest && !state.was_paused(self.process, sent, now) {
                state.ledger.problem(format!("caller {number} waited for {:?}", now - sent));
            }
            let shown = match &held {
                Ok(Ok(_)) => "has a place".to_owned(),
                Ok(Err(denied)) => format!("has no place: {denied:?}"),
                Err(error) => format!("fails: {error}"),
            };
            state.log(format_args!("process {}: caller {number} of {cost} {shown}", self.process));
            let Ok(Ok(place)) = held else { return };
            let (stored, limit) = (self.limiter.stored(policy, key), policy.quota().limit());
            state.ledger.record_hold((number, self.process, *cost), &stored, limit, sent..=now);
            place
        };
        sleep(time).await;
        self.network.goes_on(self.process).await;
        {
            let mut state = self.network.lock();
            state.log(format_args!("process {}: caller {number} leaves", self.process));
            state.ledger.record_release(number);
        }
        drop(place);
    }

    async fn check(self, then: Then) {
        self.network.goes_on(self.process).await;
        let sent = self.network.lock().now();
        let charges = self.charges();
        let taken = self.limiter.take(&charges);
        let answer = async { taken.await };
        let answer = match then {
            Then::Cancel { after_ms } => match self.answered(timeout(Duration::from_millis(after_ms), answer)).await {
                Ok(answer) => answer,
                Err(_) => {
                    self.network.lock().log(format_args!("process {} gives {} up", self.process, self.costs()));
                    self.record_unknown();
                    return;
                }
            },
            Then::Keep | Then::Refund { .. } => self.answered(answer).await,
        };
        let refunds = self.record(sent, self.deadline, answer);
        if let Then::Refund { after_ms } = then {
            sleep(Duration::from_millis(after_ms)).await;
            self.network.goes_on(self.process).await;
            if !refunds.is_empty() {
                let all = refunds.into_iter().map(|refund| self.record_refund(refund)).collect();
                let refunded = self.answered(self.limiter.refund(all)).await.is_ok();
                if !refunded {
                    self.record_unknown();
                }
                self.network.lock().log(format_args!("process {} refunded: {refunded}", self.process));
            }
        }
    }

    /// Takes the charges while nothing else happens. Returns the wait if they are denied.
    async fn ask_in_quiet(&self) -> Option<Duration> {
        let sent = self.network.lock().now();
        let answer = self.limiter.take(&self.charges()).await;
        let wait = match &answer {
            Ok(decision) if decision.is_allowed() => None,
            Ok(decision) => match decision.charges()[0].wait() {
                Wait::After(wait) => Some(wait),
                _ => Some(Duration::MAX),
            },
            Err(error) => {
                let words = format!("process {} has not recovered: {error}", self.process);
                self.network.lock().ledger.problem(words);
                None
            }
        };
        self.record(sent, self.deadline, answer);
        wait
    }

    fn charges(&self) -> Vec<Charge<'_>> {
        let charges = self.charges.iter();
        charges.map(|(policy, key, cost, effect)| Charge::new(policy, key).cost(*cost).effect(*effect)).collect()
    }

    /// Waits for an answer. If the process is killed meanwhile, it is not known what became of the charges.
    async fn answered<T>(&self, answer: impl IntoFuture<Output = T>) -> T {
        let mut asks = Asks(Some(self));
        let answer = answer.await;
        asks.0 = None;
        answer
    }

    /// Records that it is not known what became of the charges.
    fn record_unknown(&self) {
        for (policy, key, cost, _) in &self.charges {
            let stored = self.limiter.stored(policy, key);
            self.network.lock().ledger.record_unknown(self.process, &stored, *cost);
        }
    }

    /// Returns the words for the charges in the trace.
    fn costs(&self) -> String {
        let charge = |(policy, key, cost, _): &(Policy, Key, u64, Effect)| {
            format!("{cost} of {} for {}", policy.name(), key.as_bytes().escape_ascii())
        };
        self.charges.iter().map(charge).collect::<Vec<_>>().join(", ")
    }

    /// Records what the caller was told. Returns what it can refund.
    fn record<E: std::fmt::Display>(
        &self,
        sent: Duration,
        deadline: Duration,
        answer: Result<Decision, E>,
    ) -> Vec<(usize, Receipt)> {
        let mut state = self.network.lock();
        let (ended, process) = (state.now(), self.process);
        if ended - sent > deadline + GRACE && !state.was_paused(process, sent, ended) {
            let took = ended - sent;
            state.ledger.problem(format!("a check took {took:?}, and its deadline is {deadline:?}"));
        }
        let mut decision = match answer {
            Ok(decision) => decision,
            Err(error) => {
                state.log(format_args!("process {process} takes {} since {sent:?}: {error}", self.costs()));
                drop(state);
                self.record_unknown();
                return Vec::new();
            }
        };
        state.log(format_args!(
            "process {process} takes {} since {sent:?}: {} {:?}",
            self.costs(),
            decision.is_allowed(),
            decision.charges()
        ));
        let receipts = decision.take_receipts();
        let shown: Vec<_> = receipts
            .iter()
            .map(|receipt| receipt.as_ref().map(|receipt| (receipt.units(), receipt.at_us(), receipt.part())))
            .collect();
        let charges: Vec<(Bytes, u64)> =
            self.charges.iter().map(|(policy, key, cost, _)| (self.limiter.stored(policy, key), *cost)).collect();
        state.ledger.check(&mut Seen { process, sent, ended, charges: &charges, decision: &decision }, &shown);
        receipts.into_iter().enumerate().filter_map(|(at, receipt)| Some((at, receipt?))).collect()
    }

    fn record_refund(&self, (at, receipt): (usize, Receipt)) -> Refund {
        let (policy, key, ..) = &self.charges[at];
        let stored = self.limiter.stored(policy, key);
        let mut state = self.network.lock();
        let now = state.now();
        let (process, units, own) = (self.process, receipt.units(), (receipt.at_us(), receipt.part()));
        state.ledger.record_refund(Claim { process, key: stored, units, receipt: own }, now);
        Refund::new(policy.clone(), key.clone(), receipt)
    }
}
