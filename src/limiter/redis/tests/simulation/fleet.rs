//! The operators' settings in a simulation: changes in all processes while calls and answers are lost, connections are
//! cut, processes are stopped or killed, and the server loses its last writes. When the faults are over, all agree.

use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until};

use super::chance::Chance;
use super::ledger::Noting;
use super::plan::{Event, Plan};
use super::story::{Ended, Story};
use super::subject::Subject;
#[cfg(feature = "store")]
use super::table::Remote;
use crate::base::random::seeded;
use crate::fleet::{Fleet, FleetChange};
use crate::limiter::redis::limiter::RedisLimiter;
#[cfg(feature = "store")]
use crate::limiter::store::StoreLimiter;
use crate::mode::{Mode, ModeSwitch};

/// The modes that operators switch.
const NAMES: [&str; 3] = ["a", "b", "c"];

/// The time in which operators change something. The faults are in its first half.
const CHANGES_MS: u64 = 3_000;

/// A change, with the number of its process and its own.
struct Attempt {
    process: usize,
    number: String,
    /// The revision that it made, or its error.
    outcome: JoinHandle<Result<u64, String>>,
}

/// A process with a fleet, and its modes.
struct Process {
    fleet: Fleet,
    modes: Vec<ModeSwitch>,
}

/// Plays the story of a seed with limiters on Redis.
pub(super) fn play(seed: u64) -> Ended {
    play_plan::<RedisLimiter>(seed, Plan::of_fleet(seed, true))
}

/// Plays the story of a seed with limiters over a store.
#[cfg(feature = "store")]
pub(super) fn play_store(seed: u64) -> Ended {
    play_plan::<StoreLimiter<Remote>>(seed, Plan::of_fleet(seed, false))
}

fn play_plan<S: Subject>(seed: u64, plan: Plan) -> Ended {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let _seeded = seeded::by(seed);
    let _noting = Noting::begin();
    let loses_writes = plan.events.iter().any(|(_, event)| matches!(event, Event::FailOver));
    let story = async { play_story(seed, Story::<S>::begin(seed, plan), loses_writes).await };
    runtime.expect("the runtime starts").block_on(story)
}

async fn play_story<S: Subject>(seed: u64, mut story: Story<S>, loses_writes: bool) -> Ended {
    sleep(Duration::from_millis(50)).await; // all connect
    let mut processes = Vec::new();
    for limiter in story.processes.iter().flatten() {
        processes.push(Process::beside(limiter).await);
    }
    story.network.lock().faults = story.plan.faults.clone();
    let began = Instant::now();
    let attempts = attempts(seed, &processes, began);
    for (at, event) in story.plan.events.clone() {
        sleep_until(began + Duration::from_millis(at)).await;
        story.happen(event).await;
    }
    sleep_until(began + Duration::from_millis(CHANGES_MS)).await;
    story.recover().await;
    let mut made = Vec::new();
    for Attempt { process, number, outcome } in attempts {
        let outcome = outcome.await.expect("a change does not panic");
        story.network.lock().log(format_args!("change {number} of process {process}: {outcome:?}"));
        // What a process learned after it was killed is no answer.
        made.push((number, outcome.is_ok() && !story.killed.contains(&process)));
    }
    sleep(Duration::from_secs(4)).await;
    let mut living = Vec::new();
    for (at, process) in processes.into_iter().enumerate() {
        if let Some(limiter) = &story.processes[at] {
            living.push(process);
            living.push(Process::beside(limiter).await); // one that starts now
        }
    }
    for problem in problems(&living, &made, loses_writes) {
        story.network.lock().ledger.problem(problem);
    }
    let mut state = story.network.lock();
    Ended {
        trace: std::mem::take(&mut state.trace),
        problems: state.ledger.problems().to_vec(),
        shortfall: None,
        checks: made.len() as u64,
    }
}

impl Process {
    async fn beside<S: Subject>(limiter: &S) -> Self {
        let fleet = Fleet::beside(limiter).await.expect("the limiter has a store");
        let modes = NAMES.map(|name| fleet.mode(name, Mode::Enforce)).to_vec();
        Self { fleet, modes }
    }
}

/// Begins the changes, each at its time.
fn attempts(seed: u64, processes: &[Process], began: Instant) -> Vec<Attempt> {
    let mut chance = Chance::new(seed ^ 3);
    let count = chance.within(1..=20);
    let attempt = |number: u64| {
        let process = chance.below(processes.len() as u64) as usize;
        let at = began + Duration::from_millis(chance.below(CHANGES_MS));
        let (name, mode) = (*chance.of(&NAMES), *chance.of(&[Mode::Shadow, Mode::Degrade, Mode::Enforce]));
        let (fleet, number) = (processes[process].fleet.clone(), number.to_string());
        let by = number.clone();
        let outcome = tokio::spawn(async move {
            sleep_until(at).await;
            fleet.change(&by, "", [FleetChange::mode(name, mode)]).await.map_err(|error| error.to_string())
        });
        Attempt { process, number, outcome }
    };
    (0..count).map(attempt).collect()
}

/// Returns what does not hold at the end.
fn problems(living: &[Process], made: &[(String, bool)], loses_writes: bool) -> Vec<String> {
    let Some(first) = living.first() else { return Vec::new() };
    let mut problems = Vec::new();
    let last = first.fleet.in_force();
    for (at, Process { fleet, modes }) in living.iter().enumerate() {
        let in_force = fleet.in_force();
        if (in_force.revision, in_force.hash) != (last.revision, last.hash) || in_force.error.is_some() {
            problems.push(format!("process {at} has {in_force:?}, and another one has {last:?}"));
        }
        let entries = first.fleet.entries();
        for (name, mode) in NAMES.iter().zip(modes) {
            let entry = entries.iter().find(|entry| entry.target.name() == *name);
            let set = entry.map_or("enforce", |entry| &entry.value);
            if mode.get().as_str() != set {
                problems.push(format!("process {at} has {name} as {}, and {set} is set", mode.get()));
            }
        }
    }
    let actions = first.fleet.actions();
    for (number, is_made) in made {
        let times = actions.iter().filter(|action| *action.by == **number).count();
        if times > 1 || (*is_made && times == 0 && !loses_writes) {
            problems.push(format!("change {number} was made {times} times, and it returned {is_made}"));
        }
    }
    for name in NAMES {
        let latest = actions.iter().find(|action| action.target.name() == name);
        let entries = first.fleet.entries();
        let entry = entries.iter().find(|entry| entry.target.name() == name);
        if latest.and_then(|action| action.value.clone()) != entry.map(|entry| entry.value.clone()) {
            problems.push(format!("{name} is {entry:?}, and {latest:?} was the last change"));
        }
    }
    problems
}
