//! A story: what happens in the simulation of one seed.

use std::time::Duration;

use tokio::time::{Instant, advance, sleep, sleep_until};

use super::caller::Caller;
use super::chance::Chance;
use super::ledger::Noting;
use super::network::{Faults, Network, Wire};
use super::plan::{Asked, Event, Plan};
use super::subject::{OwnClock, Subject, WithFallback};
#[cfg(feature = "store")]
use super::table::Remote;
use super::waiters::Noted;
use crate::base::random::seeded;
use crate::base::time::Timestamp;
use crate::limiter::redis::connection::slot_of;
use crate::limiter::redis::limiter::RedisLimiter;
#[cfg(feature = "store")]
use crate::limiter::store::StoreLimiter;
use crate::limiter::{Effect, Ready};
use crate::policy::Policy;

/// The end of a story.
pub(super) struct Ended {
    pub(super) trace: String,
    pub(super) problems: Vec<String>,
    /// A text if it is a story of load in which fewer checks were decided than usual.
    pub(super) shortfall: Option<String>,
    pub(super) checks: u64,
}

impl Ended {
    /// The end of a story that panicked.
    pub(super) fn panicked() -> Self {
        Self { trace: String::new(), problems: vec!["it panicked".to_owned()], shortfall: None, checks: 0 }
    }
}

/// Plays the story of a seed with limiters on Redis.
pub(super) fn play(seed: u64) -> Ended {
    play_plan::<RedisLimiter>(seed, Plan::of(seed))
}

/// Plays the story of a seed with limiters on a cluster.
pub(super) fn play_cluster(seed: u64) -> Ended {
    play_plan::<RedisLimiter>(seed, Plan::of_cluster(seed))
}

/// Plays the story of a split set whose strike closes its block.
pub(super) fn play_split_strike(seed: u64) -> Ended {
    play_plan::<RedisLimiter>(seed, Plan::of_split_strike(seed))
}

/// Plays the story of a check at the end of a day.
pub(super) fn play_edge(seed: u64) -> Ended {
    play_plan::<RedisLimiter>(seed, Plan::of_edge(seed))
}

/// Plays the story of a check that waits for a connection after a failover.
pub(super) fn play_failover(seed: u64) -> Ended {
    play_plan::<RedisLimiter>(seed, Plan::of_failover(seed))
}

/// Plays the story of load of a seed with limiters on Redis.
pub(super) fn play_load(seed: u64) -> Ended {
    play_plan::<RedisLimiter>(seed, Plan::of_load(seed))
}

/// Plays the story of load of a seed with a limiter over a store.
#[cfg(feature = "store")]
pub(super) fn play_store_load(seed: u64) -> Ended {
    play_plan::<StoreLimiter<Remote>>(seed, Plan::of_load_over_a_store(seed))
}

/// Plays the story of callers that wait of a seed, with limiters on Redis.
pub(super) fn play_waiters(seed: u64) -> Ended {
    play_plan::<RedisLimiter>(seed, Plan::of_waiters(seed))
}

/// Plays the story of callers that wait of a seed, with limiters over a store.
#[cfg(feature = "store")]
pub(super) fn play_store_waiters(seed: u64) -> Ended {
    play_plan::<StoreLimiter<Remote>>(seed, Plan::of_waiters_over_a_store(seed))
}

/// Plays the story of a seed with limiters on Redis that have a fallback.
pub(super) fn play_fallback(seed: u64) -> Ended {
    play_plan::<WithFallback>(seed, Plan::of_fallback(seed))
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

/// A story that is played.
pub(super) struct Story<S> {
    pub(super) plan: Plan,
    pub(super) network: Network,
    /// `None` if it was killed.
    pub(super) processes: Vec<Option<S>>,
    /// The lines of each process. `None` if it was killed.
    ready: Vec<Option<Ready<Noted<S>>>>,
    /// The checks, with their processes.
    pub(super) checks: Vec<(usize, tokio::task::JoinHandle<()>)>,
    /// The quota that each process has for each rule.
    pub(super) current: Vec<Vec<usize>>,
    pub(super) killed: Vec<usize>,
    /// The slot of each key, which all of its rules share.
    slots: Vec<u16>,
}

impl<S: Subject> Story<S> {
    pub(super) fn begin(seed: u64, plan: Plan) -> Self {
        let network = Network::new(plan.processes, plan.servers, Chance::new(seed ^ 1), Faults::default());
        network.lock().ledger.leases = plan.lease_units > 0;
        network.lock().ledger.lapse = plan.lapse;
        network.lock().ledger.processes = plan.processes as u64;
        network.lock().ledger.is_server_known = S::IS_SERVER_KNOWN;
        let (began, mut chance) = (Instant::now(), Chance::new(seed ^ 2));
        let process = |process: usize| {
            // The clocks of processes differ from each other and from the server's.
            let at_first = Timestamp::from_micros(chance.within(1..=4_000_000_000_000_000));
            let wire = Wire { network: network.clone(), process, server: 0 };
            Some(S::make(&plan, wire, OwnClock { began, at_first }))
        };
        let processes: Vec<Option<S>> = (0..plan.processes).map(process).collect();
        let slot = |key| slot_of(&processes[0].as_ref().expect("it was just made").stored(&plan.rules[0][0], key));
        let slots = plan.keys.iter().map(slot).collect();
        let lines = |(process, limiter): (usize, &Option<S>)| Some(Noted::ready(limiter.clone()?, process, &network));
        Self {
            ready: processes.iter().enumerate().map(lines).collect(),
            current: vec![vec![0; plan.rules.len()]; plan.processes],
            plan,
            network,
            processes,
            checks: Vec::new(),
            killed: Vec::new(),
            slots,
        }
    }

    async fn play(mut self) -> Ended {
        sleep(Duration::from_millis(50)).await; // all connect
        self.network.lock().faults = self.plan.faults.clone();
        let (began, since) = (Instant::now(), self.network.lock().now());
        for (at, event) in self.plan.events.clone() {
            sleep_until(began + Duration::from_millis(at)).await;
            self.happen(event).await;
        }
        sleep(Duration::from_millis(200)).await;
        let shortfall = self.check_load(since);
        self.end().await;
        let mut state = self.network.lock();
        Ended {
            trace: std::mem::take(&mut state.trace),
            problems: state.ledger.problems().to_vec(),
            shortfall,
            checks: self.checks.len() as u64,
        }
    }

    pub(super) async fn happen(&mut self, event: Event) {
        match event {
            Event::Take { process, key, charges, then } => {
                let Some(caller) = self.caller(process, key, &charges) else { return };
                self.checks.push((process, tokio::spawn(caller.check(then))));
            }
            Event::Settle { process, key, charges } => {
                let Some(caller) = self.caller(process, key, &charges) else { return };
                self.checks.push((process, tokio::spawn(caller.settle())));
            }
            Event::Wait { process, key, cost, then } => {
                let charges = [Asked { rule: 0, cost, effect: Effect::Enforce }];
                let Some(caller) = self.caller(process, key, &charges) else { return };
                let Some(ready) = self.ready[process].clone() else { return };
                self.checks.push((process, tokio::spawn(caller.wait(ready, then))));
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
                    network.lock().ledger.record_fallback_refund(process, &limiter.stored(&policy, &key), None);
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
            Event::Demote => self.network.lock().demote(),
            Event::Crash { server, ms } => self.network.lock().crash(server, Duration::from_millis(ms)),
            Event::Slot { key, step } => {
                self.network.lock().step_slot(self.slots[key], step);
            }
            Event::Step { us } => self.network.lock().step_clock(us),
            Event::Kill { process } => {
                self.network.lock().kill(process);
                self.network.lock().ledger.record_death(process);
                self.checks.iter().filter(|(of, _)| *of == process).for_each(|(_, check)| check.abort());
                (self.processes[process], self.ready[process]) = (None, None);
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
    pub(super) fn policy(&self, process: usize, rule: usize) -> &Policy {
        &self.plan.rules[rule][self.current[process][rule]]
    }

    pub(super) fn caller(&self, process: usize, key: usize, charges: &[Asked]) -> Option<Caller<S>> {
        let keys = &self.plan.keys;
        let charge = |asked: &Asked| {
            let key = if self.plan.is_spread { (key + asked.rule) % keys.len() } else { key };
            (self.policy(process, asked.rule).clone(), keys[key].clone(), asked.cost, asked.effect)
        };
        Some(Caller {
            network: self.network.clone(),
            process,
            limiter: self.processes[process].clone()?,
            deadline: self.plan.deadline,
            charges: charges.iter().map(charge).collect(),
        })
    }
}
