//! The simulated cluster: which server has a slot, as each of them sees it, and slots that move from one to another.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;

use super::chance::Chance;
use super::network::State;
use super::plan::{Asked, Event, Plan, Then};
use super::server::Server;
use super::story::Story;
use super::subject::Subject;
use crate::key::Key;
use crate::limiter::Effect;
use crate::limiter::redis::connection::slot_of;
use crate::limiter::redis::keys::SLOTS;
use crate::quota::{Anchor, Quota};

/// The slots, as a server sees them.
pub(super) struct SlotMap {
    own: usize,
    servers: usize,
    /// The slots that another server has than at first, or none.
    changed: BTreeMap<u16, Option<usize>>,
    /// The slots that this server gives away, with the servers that get them.
    migrating: BTreeMap<u16, usize>,
    /// The slots that this server is given.
    importing: BTreeSet<u16>,
}

impl SlotMap {
    pub(super) fn new(own: usize, servers: usize) -> Self {
        let (changed, migrating, importing) = Default::default();
        Self { own, servers, changed, migrating, importing }
    }

    fn owner(&self, slot: u16) -> Option<usize> {
        let at_first = usize::from(slot) * self.servers / usize::from(SLOTS);
        self.changed.get(&slot).copied().unwrap_or(Some(at_first))
    }

    /// Returns what the server says instead of running a call for these keys, if it does not run it.
    pub(super) fn refusal(&self, keys: &[Bytes], data: &Server, is_asking: bool) -> Option<String> {
        let slot = slot_of(keys.first()?);
        if keys.iter().any(|key| slot_of(key) != slot) {
            return Some("CROSSSLOT Keys in request don't hash to the same slot".to_owned());
        }
        let there = keys.iter().filter(|key| data.keys.contains_key(*key)).count();
        let try_again = || Some("TRYAGAIN Multiple keys request during rehashing of slot".to_owned());
        match (self.owner(slot), self.migrating.get(&slot)) {
            (Some(owner), None) if owner == self.own => None,
            (Some(owner), Some(_)) if owner == self.own && there == keys.len() => None,
            (Some(owner), Some(_)) if owner == self.own && there > 0 => try_again(),
            (Some(owner), Some(to)) if owner == self.own => Some(format!("ASK {slot} :{}", port_of(*to))),
            _ if is_asking && self.importing.contains(&slot) && keys.len() > 1 && there < keys.len() => try_again(),
            _ if is_asking && self.importing.contains(&slot) => None,
            (Some(owner), _) => Some(format!("MOVED {slot} :{}", port_of(owner))),
            (None, _) => Some("CLUSTERDOWN Hash slot not served".to_owned()),
        }
    }

    /// Returns the first and the last slot of each range, and the server that has it.
    pub(super) fn ranges(&self) -> Vec<(u16, u16, usize)> {
        let mut ranges: Vec<(u16, u16, usize)> = Vec::new();
        for slot in 0..SLOTS {
            let Some(owner) = self.owner(slot) else { continue };
            match ranges.last_mut() {
                Some((_, last, of)) if *of == owner && *last + 1 == slot => *last = slot,
                _ => ranges.push((slot, slot, owner)),
            }
        }
        ranges
    }
}

/// Returns the port of a server.
pub(in crate::limiter::redis) fn port_of(server: usize) -> u16 {
    u16::try_from(server + 1).expect("a simulation has few servers")
}

/// The slots that move, and how often processes asked a server that did not have the slot.
#[derive(Default)]
pub(super) struct Moves {
    under_way: BTreeMap<u16, Move>,
    /// The slots that no server has, with those that had them.
    lost: BTreeMap<u16, usize>,
    /// Whether no slot moves any more.
    is_over: bool,
    /// How often a process was sent to another server since then, for each process and slot.
    sent_on: BTreeMap<(usize, u16), u64>,
}

/// A slot on its way.
struct Move {
    from: usize,
    to: usize,
    is_taken: bool,
    is_left: bool,
}

/// What happens to a slot. As with `redis-cli`, a server is told that it has a slot, or that another one has it, after
/// all its keys were moved.
#[derive(Clone, Copy, Debug)]
pub(super) enum SlotStep {
    /// Its server begins to move it.
    Begin,
    /// One of its keys is moved.
    CarryOne,
    /// The new server is told that it has the slot.
    Take,
    /// The old server is told so. If it is told first, each sends calls to the other one until then.
    Leave,
    /// No server has it.
    Lose,
    /// The server that had it has it again.
    Find,
}

impl Moves {
    /// Records what a server said to a process instead of running its call.
    pub(super) fn record_refusal(&mut self, process: usize, keys: &[Bytes], words: &str) {
        let Some(key) = keys.first().filter(|_| self.is_over && words.starts_with("MOVED")) else { return };
        *self.sent_on.entry((process, slot_of(key))).or_default() += 1;
    }
}

impl State {
    pub(super) fn step_slot(&mut self, slot: u16, step: SlotStep) {
        let Some(owner) = self.servers[0].slots.as_ref().map(|slots| slots.owner(slot)) else { return };
        self.log(format_args!("slot {slot}: {step:?}"));
        match (step, owner, self.moves.under_way.get(&slot)) {
            (SlotStep::Begin, Some(from), None) => {
                let to = (from + 1) % self.servers.len();
                self.moves.under_way.insert(slot, Move { from, to, is_taken: false, is_left: false });
                self.slots(from).migrating.insert(slot, to);
                self.slots(to).importing.insert(slot);
            }
            (SlotStep::CarryOne, _, Some(Move { from, to, .. })) => self.carry(slot, (*from, *to), 1),
            (SlotStep::Take | SlotStep::Leave, _, Some(Move { from, to, .. })) => {
                let (from, to) = (*from, *to);
                self.carry(slot, (from, to), usize::MAX);
                self.end_move(slot, if matches!(step, SlotStep::Take) { to } else { from }, to);
            }
            (SlotStep::Lose, Some(owner), None) => {
                self.moves.lost.insert(slot, owner);
                self.set_owner(slot, None);
            }
            (SlotStep::Find, None, None) => {
                let owner = self.moves.lost.remove(&slot);
                self.set_owner(slot, owner);
            }
            _ => {} // another step has come between
        }
    }

    /// Tells all servers which one has a slot, if any.
    fn set_owner(&mut self, slot: u16, owner: Option<usize>) {
        for server in 0..self.servers.len() {
            self.slots(server).changed.insert(slot, owner);
        }
    }

    fn slots(&mut self, server: usize) -> &mut SlotMap {
        self.servers[server].slots.as_mut().expect("it is of a cluster")
    }

    /// Moves this many keys of a slot.
    fn carry(&mut self, slot: u16, (from, to): (usize, usize), most: usize) {
        let keys = self.servers[from].data.keys.keys().filter(|key| slot_of(key) == slot);
        for key in keys.take(most).cloned().collect::<Vec<_>>() {
            let value = self.servers[from].data.keys.remove(&key).expect("it is there");
            self.log(format_args!("key {} is moved", key.escape_ascii()));
            let before = self.servers[to].data.keys.insert(key, value);
            if before.is_some() {
                self.ledger.problem("a key was on two servers".to_owned());
            }
        }
    }

    /// Tells a server which one has the slot. Its move is over when both know.
    fn end_move(&mut self, slot: u16, told: usize, owner: usize) {
        let slots = self.slots(told);
        slots.changed.insert(slot, Some(owner));
        slots.migrating.remove(&slot);
        slots.importing.remove(&slot);
        let Some(moving) = self.moves.under_way.get_mut(&slot) else { return };
        moving.is_taken |= told == moving.to;
        moving.is_left |= told == moving.from;
        if moving.is_taken && moving.is_left {
            self.moves.under_way.remove(&slot);
        }
    }
}

impl Plan {
    /// Returns a story of limiters on a cluster of two servers.
    pub(super) fn of_cluster(seed: u64) -> Self {
        let mut chance = Chance::new(seed);
        let mut plan = Self::empty(&mut chance);
        plan.servers = 2;
        plan.keys = (0..chance.within(2..=4)).map(|_| any_key(&mut chance)).collect();
        plan.deadline *= 2; // a call that is sent on is another round trip
        match chance.below(12) {
            0..=4 => plan.add_sets(&mut chance),
            5..=6 => plan.add_strikes(&mut chance),
            7..=8 => plan.add_accounts(&mut chance),
            9 => plan.add_checks(&mut chance),
            _ => plan.add_places(&mut chance, true),
        }
        // The charges of most sets are in several slots.
        plan.is_spread = chance.permille(800);
        plan.is_orderly = chance.permille(200);
        if plan.is_orderly {
            (plan.faults.delay_ms, plan.deadline) = (1, Duration::from_millis(100));
        } else if chance.permille(500) {
            plan.add_faults(&mut chance);
            plan.events.retain(|(_, event)| !matches!(event, Event::Replicate | Event::FailOver));
        }
        for (_, event) in &mut plan.events {
            if let Event::Crash { server, .. } = event {
                *server = chance.below(2) as usize;
            }
        }
        for _ in 0..chance.within(1..=4) {
            plan.add_move(&mut chance);
        }
        plan.finished()
    }

    /// Returns a story in which a strike of a split set closes its block. All is asked for while the slot moves, and
    /// neither state is in it before.
    pub(super) fn of_split_strike(seed: u64) -> Self {
        let mut plan = Self::empty(&mut Chance::new(seed));
        (plan.servers, plan.is_orderly, plan.denials) = (2, true, 0);
        (plan.faults.delay_ms, plan.deadline) = (1, Duration::from_millis(100));
        let (second, limited) = (Duration::from_secs(1), Quota::fixed_window(1, Duration::from_secs(1)));
        let limited = limited.and_then(|quota| quota.anchor(Anchor::FirstRequest));
        plan.add_rule(0, vec![limited.expect("the quota is possible")]);
        plan.add_rule(1, vec![Quota::block(1, second, second).expect("the quota is possible")]);
        let asked = |rule, effect| Asked { rule, cost: 1, effect };
        let charges = vec![asked(0, Effect::Enforce), asked(1, Effect::OnRefusal { of: 1 })];
        plan.events.push((0, Event::Slot { key: 0, step: SlotStep::Begin }));
        for (at, process) in [(10, 0), (40, 1), (70, 0)] {
            plan.events.push((at, Event::Take { process, key: 0, charges: charges.clone(), then: Then::Keep }));
        }
        plan.events.push((100, Event::Slot { key: 0, step: SlotStep::Take }));
        plan.events.push((110, Event::Slot { key: 0, step: SlotStep::Leave }));
        plan
    }

    fn add_move(&mut self, chance: &mut Chance) {
        let key = chance.below(self.keys.len() as u64) as usize;
        let at = if self.is_orderly {
            // The moves of a slot do not overlap, as with `redis-cli`.
            let steps = self.events.iter().filter(|(_, event)| matches!(event, Event::Slot { .. }));
            steps.map(|(at, _)| at + 1).max().unwrap_or(0) + chance.below(500)
        } else {
            chance.below(1_500)
        };
        let mut add = |at, step| self.events.push((at, Event::Slot { key, step }));
        if !self.is_orderly && chance.permille(250) {
            add(at, SlotStep::Lose);
            add(at + chance.within(1..=400), SlotStep::Find);
            return;
        }
        add(at, SlotStep::Begin);
        for _ in 0..chance.below(3) {
            add(at + chance.below(200), SlotStep::CarryOne);
        }
        let (taken, apart) = (at + chance.within(100..=400), chance.below(100));
        add(taken, SlotStep::Take);
        let is_told_first = !self.is_orderly && chance.permille(400);
        add(if is_told_first { taken - apart } else { taken + apart }, SlotStep::Leave);
    }
}

fn any_key(chance: &mut Chance) -> Key {
    Key::of(chance.below(1_000)).expect("a number is a key")
}

impl<S: Subject> Story<S> {
    /// Records that no slot moves from now on.
    pub(super) fn end_moves(&self) {
        let mut state = self.network.lock();
        debug_assert!(state.moves.under_way.is_empty() && state.moves.lost.is_empty(), "each move has its end");
        state.moves.is_over = true;
    }

    /// Checks that each process has learned where the slots are, and that no check failed because a slot moved.
    pub(super) fn check_moves(&self) {
        let mut state = self.network.lock();
        for ((process, slot), times) in std::mem::take(&mut state.moves.sent_on) {
            if times > 1 {
                state.ledger.problem(format!("process {process} was told {times} times where slot {slot} is"));
            }
        }
        let failed = state.outcomes.iter().find_map(|outcome| outcome.error.clone());
        if let Some(error) = failed.filter(|_| self.plan.is_orderly) {
            state.ledger.problem(format!("a check failed because a slot moved: {error}"));
        }
    }
}
