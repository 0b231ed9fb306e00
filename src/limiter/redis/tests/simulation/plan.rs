//! The plan of a seed: the processes, their quotas, the faults, and what happens when.

use std::time::Duration;

use super::chance::Chance;
use super::cluster::SlotStep;
use super::network::Faults;
use crate::algorithm::properties::quotas::{any_algorithm, plain};
use crate::key::Key;
use crate::limiter::Effect;
use crate::policy::Policy;
use crate::quota::{Algorithm, Anchor, Calendar, Quota};

/// The course of a seed.
pub(super) struct Plan {
    pub(super) processes: usize,
    /// More than one is a cluster.
    pub(super) servers: usize,
    /// The rules of a set have other keys, which may be in other slots.
    pub(super) is_spread: bool,
    /// Slots move as they should, and nothing else goes wrong: no check may fail.
    pub(super) is_orderly: bool,
    /// The quotas of each rule, which has one at a time.
    pub(super) rules: Vec<Vec<Policy>>,
    pub(super) keys: Vec<Key>,
    pub(super) deadline: Duration,
    pub(super) denials: usize,
    pub(super) lease_units: u64,
    /// The time after which places lapse.
    pub(super) lapse: Duration,
    pub(super) faults: Faults,
    /// The load, if the story is about load.
    pub(super) load: Option<super::load::Load>,
    /// In their order, with the milliseconds since the beginning.
    pub(super) events: Vec<(u64, Event)>,
}

#[derive(Clone, Debug)]
pub(super) enum Event {
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
    /// A caller waits until the first rule admits it.
    Wait {
        process: usize,
        key: usize,
        cost: u64,
        then: Then,
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
    /// The server becomes a replica, and keeps its connections. New ones lead to the new master.
    Demote,
    Crash {
        server: usize,
        ms: u64,
    },
    /// Something happens to the slot of a key.
    Slot {
        key: usize,
        step: SlotStep,
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
pub(super) struct Asked {
    pub(super) rule: usize,
    pub(super) cost: u64,
    pub(super) effect: Effect,
}

/// The end of a check, as its caller chose it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Then {
    Keep,
    Refund { after_ms: u64 },
    Cancel { after_ms: u64 },
}

impl Plan {
    pub(super) fn of(seed: u64) -> Self {
        let mut chance = Chance::new(seed);
        let mut plan = Self::empty(&mut chance);
        match chance.below(20) {
            0..=1 => plan.add_leases(&mut chance),
            2..=5 => plan.add_places(&mut chance, true),
            6..=9 => plan.add_sets(&mut chance),
            10..=11 => plan.add_accounts(&mut chance),
            12..=17 => plan.add_checks(&mut chance),
            _ => plan.add_strikes(&mut chance),
        }
        if chance.permille(800) {
            plan.add_faults(&mut chance);
        }
        plan.lapse = Duration::from_secs(*chance.of(&[3, 10]));
        plan.finished()
    }

    /// Puts the events in order. If the server's clock steps by so much that rows lapse between two renewals, more
    /// places than the limit are granted, and the guide says so. So all steps of a story that holds places take less
    /// than half of that time.
    pub(super) fn finished(mut self) -> Self {
        let most = if self.rules[0][0].quota().algorithm() == Algorithm::Concurrency {
            self.lapse.as_micros() as i64 / 8 // there are at most three
        } else {
            i64::MAX
        };
        for (_, event) in &mut self.events {
            if let Event::Step { us } = event {
                *us = (*us).clamp(-most, most);
            }
        }
        self.events.sort_by_key(|(at, _)| *at);
        self
    }

    pub(super) fn empty(chance: &mut Chance) -> Self {
        Self {
            processes: chance.within(2..=3) as usize,
            servers: 1,
            is_spread: false,
            is_orderly: false,
            rules: Vec::new(),
            keys: (0..chance.within(1..=2)).map(|number| Key::of(number).expect("a number is a key")).collect(),
            deadline: Duration::from_millis(*chance.of(&[20, 50, 50, 100])),
            denials: if chance.permille(700) { 64 } else { 0 },
            lease_units: 0,
            lapse: Duration::from_secs(3),
            faults: Faults { delay_ms: *chance.of(&[0, 1, 2, 5, 15]), ..Faults::default() },
            load: None,
            events: Vec::new(),
        }
    }

    /// Returns a story in which a check begins before the end of a day, and is answered after it. Each call takes 80 ms.
    /// The server's clock was set back since the last answer, so the check names the next day 10 ms too early.
    pub(super) fn of_edge(seed: u64) -> Self {
        let mut plan = Self::empty(&mut Chance::new(seed));
        (plan.denials, plan.deadline) = (0, Duration::from_secs(1));
        plan.faults = Faults { call_us: 80_000, ..Faults::default() };
        plan.add_rule(0, vec![Quota::calendar(10, Calendar::day()).expect("the quota is possible")]);
        let charges = vec![Asked { rule: 0, cost: 1, effect: Effect::Enforce }];
        let take = Event::Take { process: 0, key: 0, charges, then: Then::Keep };
        // The first event is 50 ms after the beginning, and the day ends 1,450 ms later, or 20 ms more.
        let (back_ms, early_ms, call_ms) = (20, 10, 80);
        plan.events = vec![(0, take.clone()), (300, take.clone()), (500, Event::Step { us: -1_000 * back_ms })];
        plan.events.push((1_450 + back_ms.unsigned_abs() - early_ms - call_ms, take.clone()));
        plan.events.push((2_000, take));
        plan
    }

    /// Returns a story in which the first caller of a process has a place, and a failover loses it. The second caller
    /// asks before the process is connected again. The first one leaves then, and another process asks for all places
    /// before the rows are renewed.
    pub(super) fn of_failover(seed: u64) -> Self {
        let mut plan = Self::empty(&mut Chance::new(seed));
        (plan.denials, plan.deadline, plan.lapse) = (0, Duration::from_secs(1), Duration::from_secs(30));
        plan.faults = Faults::default();
        plan.add_rule(0, vec![Quota::concurrent(2)]);
        let hold = |process, cost, for_ms| Event::Hold { process, key: 0, cost, for_ms, patience_ms: None };
        let (at, down_ms) = (1_100, 30); // the rows are renewed each second if they are due
        plan.events = vec![(at - 20, hold(0, 1, 35)), (at, Event::FailOver)];
        plan.events.push((at, Event::Crash { server: 0, ms: down_ms }));
        plan.events.push((at + 10, hold(0, 1, 500)));
        plan.events.push((at + 200, hold(1, 2, 10)));
        plan
    }

    /// Returns the story of limiters over a store that compares and swaps.
    #[cfg(feature = "store")]
    pub(super) fn of_store(seed: u64) -> Self {
        let mut chance = Chance::new(seed);
        let mut plan = Self::empty(&mut chance);
        plan.deadline *= 4; // each conflict is a round trip more
        match chance.below(12) {
            0..=4 => plan.add_accounts(&mut chance),
            5..=7 => plan.add_sets(&mut chance),
            8 => plan.add_checks(&mut chance),
            9 => plan.add_strikes(&mut chance),
            _ => plan.add_places(&mut chance, true),
        }
        if chance.permille(800) {
            plan.add_faults(&mut chance);
            plan.events.retain(|(_, event)| !matches!(event, Event::Replicate | Event::FailOver));
        }
        plan.finished()
    }

    /// Returns the story of the operators' settings, without a check. A store that compares and swaps loses nothing.
    pub(super) fn of_fleet(seed: u64, can_lose_writes: bool) -> Self {
        let mut chance = Chance::new(seed);
        let mut plan = Self::empty(&mut chance);
        plan.add_rule(0, vec![Quota::per_hour(1)]);
        plan.add_faults(&mut chance);
        let is_kept = |event: &Event| match event {
            Event::Replicate | Event::FailOver => can_lose_writes,
            Event::Reset { .. } => false,
            _ => true,
        };
        plan.events.retain(|(_, event)| is_kept(event));
        plan.finished()
    }

    /// Returns the story of limiters that have a fallback. The server is away once or more.
    pub(super) fn of_fallback(seed: u64) -> Self {
        let mut chance = Chance::new(seed);
        let mut plan = Self::empty(&mut chance);
        match chance.below(3) {
            0 => plan.add_places(&mut chance, false),
            _ => plan.add_accounts(&mut chance),
        }
        plan.add_faults(&mut chance);
        for _ in 0..chance.within(1..=2) {
            plan.events.push((chance.below(1_500), Event::Crash { server: 0, ms: chance.within(50..=1_000) }));
        }
        plan.finished()
    }

    /// Adds some kinds of faults. Each seed has a few, so that each is seen without the others.
    pub(super) fn add_faults(&mut self, chance: &mut Chance) {
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
                2 => self.events.push((at, Event::Crash { server: 0, ms: chance.within(1..=600) })),
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
    pub(super) fn add_checks(&mut self, chance: &mut Chance) {
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
    pub(super) fn add_accounts(&mut self, chance: &mut Chance) {
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
    pub(super) fn add_sets(&mut self, chance: &mut Chance) {
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

    /// Adds checks whose refusals a block or a meter counts.
    pub(super) fn add_strikes(&mut self, chance: &mut Chance) {
        self.add_rule(0, vec![quota(*chance.of(&Algorithm::rates()), chance)]);
        let counter = *chance.of(&[Algorithm::Block, Algorithm::Block, Algorithm::Meter]);
        self.add_rule(1, vec![quota(counter, chance)]);
        let observed = chance.permille(300);
        self.add_takes(chance, |chance| {
            let effect = if observed && chance.permille(500) { Effect::Observe } else { Effect::Enforce };
            let limited = Asked { rule: 0, cost: *chance.of(&[1, 1, 2, 3]), effect };
            vec![limited, Asked { rule: 1, cost: *chance.of(&[1, 1, 2]), effect: Effect::OnRefusal { of: 1 } }]
        });
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

    /// Adds requests in flight. Some wait in line if they may.
    pub(super) fn add_places(&mut self, chance: &mut Chance, may_wait: bool) {
        let mut quota = Quota::concurrent(chance.within(1..=6));
        if may_wait && chance.permille(400) {
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

    pub(super) fn add_rule(&mut self, rule: usize, quotas: Vec<Quota>) {
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

    pub(super) fn any_process(&self, chance: &mut Chance) -> usize {
        chance.below(self.processes as u64) as usize
    }

    pub(super) fn any_key(&self, chance: &mut Chance) -> usize {
        chance.below(self.keys.len() as u64) as usize
    }
}

/// Returns a quota that the checks of a story exceed.
fn quota(algorithm: Algorithm, chance: &mut Chance) -> Quota {
    let limit = chance.within(1..=12);
    let period = Duration::from_micros(*chance.of(&[100_000, 333_333, 1_000_000, 2_000_003]));
    let lasts = match algorithm {
        Algorithm::Block => Duration::from_millis(chance.within(50..=2_000)),
        _ => Duration::ZERO,
    };
    let quota = match algorithm {
        Algorithm::FixedWindow if chance.permille(300) => Quota::calendar(limit, Calendar::day()),
        _ => plain(algorithm, limit, period, lasts),
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
