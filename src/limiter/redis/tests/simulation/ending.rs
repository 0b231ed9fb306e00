//! The end of a story: the faults stop, and then every process recovers, every wait holds, and nothing stays taken.

use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::caller::HANG;
use super::network::{Faults, ServerState};
use super::plan::Asked;
use super::story::Story;
use super::subject::Subject;
use crate::limiter::Effect;

/// No round trip takes as long while there are no faults.
const QUIET_TRIP: Duration = Duration::from_millis(5);

/// The time of decisions stands still if the corrected time is behind it by at most this duration.
const STANDS: Duration = Duration::from_millis(5);

/// The time after the last fault in which every process recovers.
const RECOVERY: Duration = Duration::from_secs(3);

/// The longest wait that a story waits for.
const PATIENCE: Duration = Duration::from_secs(30);

impl<S: Subject> Story<S> {
    /// Ends the story, and checks what has to hold then.
    pub(super) async fn end(&mut self) {
        self.recover().await;
        self.end_moves();
        self.check_places_are_free().await;
        self.check_waits().await;
        sleep(RECOVERY).await;
        self.check_in_use().await;
        self.check_places().await;
        self.check_moves();
        if S::IS_SERVER_KNOWN {
            self.network.lock().ledger.settle(|process| !self.killed.contains(&process));
        }
    }

    /// Ends the faults, and waits until every process has recovered.
    pub(super) async fn recover(&mut self) {
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
        self.network.lock().check_waiters();
    }

    /// Checks that each process answers, and that a request which waits as it was told passes.
    async fn check_waits(&mut self) {
        for process in 0..self.plan.processes {
            self.learn_time(process).await;
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
                    // The time of a store is known to a round trip, and stands still while it is corrected.
                    let error = if S::IS_SERVER_KNOWN { Duration::ZERO } else { QUIET_TRIP + STANDS };
                    sleep(wait + error).await;
                    if caller.ask_in_quiet().await.is_some() {
                        let words = format!("process {process} was told to wait for {wait:?}, waited, and was denied");
                        self.network.lock().ledger.problem(words);
                    }
                }
            }
        }
    }

    /// Has a process get an answer. Its first decision after a step of the store's clock may be off by the step.
    async fn learn_time(&self, process: usize) {
        let charges = [Asked { rule: 0, cost: 0, effect: Effect::Enforce }];
        if let Some(caller) = self.caller(process, 0, &charges).filter(|_| !S::IS_SERVER_KNOWN) {
            drop(caller.limiter.peek(&caller.charges()).await);
        }
    }

    /// Checks what is in use of the rules whose units do not come back while the story lasts.
    async fn check_in_use(&mut self) {
        let Some(process) = self.processes.iter().position(Option::is_some) else { return };
        for rule in 0..self.plan.rules.len() {
            let spec = *self.policy(process, rule).quota().spec();
            // The day ends while the story lasts.
            let is_lasting = spec.period_us > 1_000 * 1_000_000 && spec.calendar.is_none();
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

    /// Checks that no place is taken soon after all were returned, unless a process could not return its own. A
    /// failover may bring back a row of which its process knows nothing any more: it lapses.
    async fn check_places_are_free(&mut self) {
        let Some(process) = self.processes.iter().position(Option::is_some) else { return };
        if !self.plan.rules[0][0].limits_in_flight() {
            return;
        }
        self.check_fallbacks();
        if !self.killed.is_empty() || self.network.lock().ledger.has_failed_over() {
            return;
        }
        sleep(Duration::from_secs(1)).await;
        for key in 0..self.plan.keys.len() {
            let charges = [Asked { rule: 0, cost: 0, effect: Effect::Enforce }];
            let Some(caller) = self.caller(process, key, &charges) else { continue };
            let problem = match caller.limiter.peek(&caller.charges()).await {
                Ok(decision) if caller.fell_back(&decision) => {
                    Some(format!("process {process} has not recovered: its fallback decides"))
                }
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

    /// Checks that no place of a fallback is taken. Its places do not lapse.
    fn check_fallbacks(&self) {
        for (process, limiter) in self.processes.iter().enumerate() {
            for key in &self.plan.keys {
                let held = limiter.as_ref().map_or(0, |limiter| limiter.held_of_fallback(self.policy(process, 0), key));
                if held > 0 {
                    let words =
                        format!("{held} places of the fallback of process {process} are taken, and all were returned");
                    self.network.lock().ledger.problem(words);
                }
            }
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
            let now_us = state.server_now_us();
            let in_servers = |server: &ServerState| {
                let mut data = server.data.clone();
                data.expire(now_us);
                data.keys.len()
            };
            let in_servers: usize = state.servers.iter().map(in_servers).sum();
            #[cfg(feature = "store")]
            let in_table = state.table.count(state.server_now_us());
            #[cfg(not(feature = "store"))]
            let in_table = 0;
            in_servers + in_table
        };
        if left > 0 {
            self.network
                .lock()
                .ledger
                .problem(format!("{left} keys have places {:?} after all were returned", self.plan.lapse));
        }
    }
}
