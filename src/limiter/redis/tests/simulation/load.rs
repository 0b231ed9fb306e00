//! Stories of load: a server that takes time for each call, more checks than it can carry, a server that becomes a
//! replica; and the law of load.

use std::time::Duration;

use super::chance::Chance;
use super::network::Faults;
use super::plan::{Asked, Event, Plan, Then};
use super::story::Story;
use super::subject::Subject;
use crate::limiter::Effect;
use crate::policy::Policy;
use crate::quota::{Anchor, Quota};

/// The most checks of a story. Each runs a script.
const CHECKS: u64 = 4_000;

/// How long processes see a quiet server first, in microseconds.
const QUIET_US: u64 = 200_000;

/// How much of what the server carries has to be decided, in thousandths: in 99 of 100 stories, and in every story
/// whose processes have seen the server quiet. Three processes that share a server of 3.5 ms a check have
/// windows of a few checks each, so it is not all. A process that has not seen the server quiet, and whose calls take
/// anything between 1 and 24 ms by themselves, may take these times for the turns of other clients for some seconds.
const USUAL: u64 = 750;
const LEAST: u64 = 500;

/// The time after a demotion in which every process has found the new master.
const FOUND: u64 = 2_000;

/// The load that a story offers to its server.
#[derive(Clone, Debug)]
pub(super) struct Load {
    /// The checks that a client could have decided which sends each by itself, and none too many.
    carried: u64,
    /// From when on the law holds: at first no process knows what calls take.
    from: Duration,
    /// True if no process has seen the server quiet.
    is_cold: bool,
    /// From when on no check may fail, because the new master was there for long enough.
    found: Option<Duration>,
}

/// The end of a check.
pub(super) struct Outcome {
    /// When it was sent, since the simulation began.
    pub(super) sent: Duration,
    /// Why it was not decided.
    pub(super) error: Option<String>,
}

impl Plan {
    /// Returns a story of load on Redis.
    pub(super) fn of_load(seed: u64) -> Self {
        let mut chance = Chance::new(seed);
        let processes = chance.within(1..=3) as usize;
        let mut plan = Self::loaded(&mut chance, processes);
        if chance.permille(300) {
            plan.add_demotion(&mut chance);
        }
        plan.finished()
    }

    /// Returns a story of load over a store that compares and swaps. Several processes would have conflicts, which are
    /// no load.
    #[cfg(feature = "store")]
    pub(super) fn of_load_over_a_store(seed: u64) -> Self {
        let mut plan = Self::loaded(&mut Chance::new(seed), 1);
        plan.deadline *= 2; // the first check of a key is two round trips
        plan.finished()
    }

    fn loaded(chance: &mut Chance, processes: usize) -> Self {
        let mut plan = Self::empty(chance);
        plan.processes = processes;
        plan.keys = (0..8_u64).map(|number| crate::key::Key::of(number).expect("a number is a key")).collect();
        plan.deadline = Duration::from_millis(*chance.of(&[50, 100]));
        plan.denials = 0;
        let (call_us, request_us) = (*chance.of(&[50, 200, 1_000]), *chance.of(&[1_000, 1_500, 2_500]));
        plan.faults = Faults { delay_ms: *chance.of(&[0, 1, 5, 12]), call_us, request_us, ..Faults::default() };
        let month = Duration::from_secs(30 * 86_400);
        let quota = Quota::fixed_window(1_000_000, month).and_then(|quota| quota.anchor(Anchor::FirstRequest));
        plan.rules = vec![vec![Policy::new("rule0", quota.expect("the quota is possible")).expect("it is a name")]];
        // What the server carries, in thousandths.
        let offered = *chance.of(&[300, 700, 1_000, 1_500, 3_000]);
        let apart_us = ((call_us + request_us) * 1_000 / offered).max(1);
        // Most processes have seen the server quiet. One that has not takes the wait that others cause for the server's
        // distance, until some seconds of the server's clock have shown otherwise (see `halving.rs`).
        let is_cold = chance.permille(200);
        let (quiet_us, longest_us) = if is_cold { (0, 5_000_000) } else { (QUIET_US, 1_500_000) };
        let lasts_us = (CHECKS * apart_us).min(longest_us);
        for process in 0..processes {
            (0..quiet_us).step_by(25_000).for_each(|at_us| plan.add_check_of(process, at_us / 1_000, chance));
        }
        let mut at_us = 0;
        while at_us < lasts_us {
            plan.add_check((quiet_us + at_us) / 1_000, chance);
            at_us += 1 + chance.below(2 * apart_us);
        }
        let from_us = if is_cold { lasts_us / 10 * 7 } else { lasts_us / 2 };
        let carried = (lasts_us - from_us) / (call_us + request_us);
        let from = Duration::from_micros(quiet_us + from_us);
        plan.load = Some(Load { carried, from, is_cold, found: None });
        plan
    }

    fn add_check(&mut self, at: u64, chance: &mut Chance) {
        let process = chance.below(self.processes as u64) as usize;
        self.add_check_of(process, at, chance);
    }

    fn add_check_of(&mut self, process: usize, at: u64, chance: &mut Chance) {
        let key = chance.below(self.keys.len() as u64) as usize;
        let charges = vec![Asked { rule: 0, cost: 1, effect: Effect::Enforce }];
        self.events.push((at, Event::Take { process, key, charges, then: Then::Keep }));
    }

    /// Has the server become a replica, and new connections lead to its successor.
    fn add_demotion(&mut self, chance: &mut Chance) {
        let at = chance.within(100..=600);
        self.events.retain(|(then, _)| *then < at + 200);
        self.events.push((at, Event::Demote));
        // A process finds out by a check, so each has some all the time.
        for later in 0..300 {
            self.add_check(at + 200 + 10 * later, chance);
        }
        if let Some(load) = &mut self.load {
            (load.carried, load.found) = (0, Some(Duration::from_millis(at + FOUND)));
        }
    }
}

impl<S: Subject> Story<S> {
    /// Checks that what is decided rises with what is offered up to what the server carries, and stays there. Returns
    /// a text if fewer checks are decided than usual.
    pub(super) fn check_load(&self, began: Duration) -> Option<String> {
        let load = self.plan.load.as_ref()?;
        let mut state = self.network.lock();
        let outcomes = std::mem::take(&mut state.outcomes);
        let counted: Vec<_> = outcomes.iter().filter(|outcome| outcome.sent >= began + load.from).collect();
        let decided = counted.iter().filter(|outcome| outcome.error.is_none()).count() as u64;
        let offered = counted.len() as u64;
        let due = |part: u64| load.carried.min(offered) * part / 1_000;
        let usual = due(USUAL);
        let shortfall = (decided < usual)
            .then(|| format!("{decided} of {offered} checks were decided, and {usual} are in 99 of 100 stories"));
        if !load.is_cold && decided < due(LEAST) {
            let least = due(LEAST);
            state.ledger.problem(format!("{decided} of {offered} checks were decided, and {least} is the least"));
        }
        // The server answers each call, if late. So no process may believe that it is dead.
        let dead = outcomes.iter().filter_map(|outcome| outcome.error.as_ref());
        let dead = dead.filter(|error| error.contains("no check is sent until")).count();
        if dead > 0 && load.found.is_none() {
            state.ledger.problem(format!("{dead} checks failed because a server that answers is believed dead"));
        }
        // A swap is one call, and the first one of a key is two.
        let (calls, all) = (state.calls, outcomes.iter().filter(|outcome| outcome.error.is_none()).count() as u64);
        if !S::IS_SERVER_KNOWN && calls > all * 3 / 2 + 100 {
            state.ledger.problem(format!("the server had {calls} calls for {all} checks that were decided"));
        }
        if let Some(found) = load.found {
            let late = outcomes.iter().filter(|outcome| outcome.sent >= began + found);
            let mut late = late.filter_map(|outcome| outcome.error.as_ref());
            if let Some(error) = late.find(|error| error.contains("READONLY")) {
                state.ledger.problem(format!("the new master is not found after {FOUND} ms: {error}"));
            }
        }
        shortfall
    }
}
