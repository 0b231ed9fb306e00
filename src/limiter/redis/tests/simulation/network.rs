//! The network between the processes and the servers: it delays calls and answers, loses them, and cuts connections, as
//! a seed says.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep, sleep_until};

use super::chance::Chance;
use super::cluster::{Moves, SlotMap};
use super::ledger::Ledger;
use super::server::{Reply, Server};
#[cfg(feature = "store")]
use crate::limiter::store::{Change, Loaded, Swapped};

/// The server's time when a simulation begins: shortly before midnight, so that days of the calendar end.
const EPOCH_US: u64 = 1_790_035_198_500_000;

/// The faults of a seed: each number is of thousand calls.
#[derive(Clone, Debug, Default)]
pub(super) struct Faults {
    pub(super) lost_requests: u64,
    pub(super) lost_replies: u64,
    pub(super) cuts: u64,
    pub(super) long_delays: u64,
    pub(super) script_flushes: u64,
    /// The longest usual delay of one way, in milliseconds.
    pub(super) delay_ms: u64,
    /// The longest unusual delay.
    pub(super) long_delay_ms: u64,
    /// The time that the server takes for a call, and for each request in it.
    pub(super) call_us: u64,
    pub(super) request_us: u64,
    /// Calls of one connection may overtake each other, as they do behind a proxy.
    pub(super) reorders: bool,
}

/// A message on the wire.
#[derive(Clone, Debug)]
pub(in crate::limiter::redis) enum Sent {
    Script {
        command: &'static str,
        /// The script's name or text.
        script: &'static str,
        keys: Vec<Bytes>,
        args: Vec<Bytes>,
        /// It follows `ASKING`.
        is_asking: bool,
    },
    /// The question which server has which slot.
    Slots,
    #[cfg(feature = "store")]
    Load(Vec<Arc<str>>),
    #[cfg(feature = "store")]
    Swap(Vec<Change>),
}

/// The end of a call.
#[derive(Debug)]
pub(in crate::limiter::redis) enum Ended {
    Answered(Bytes),
    Number(i64),
    /// The first and the last slot of each range, and the number of the server that has it.
    Slots(Vec<(u16, u16, usize)>),
    /// The server refused it in these words.
    Refused(String),
    #[cfg(feature = "store")]
    Loaded(Loaded),
    #[cfg(feature = "store")]
    Swapped(Swapped),
    NotConnected,
    /// The connection ended before the answer came.
    Disconnected,
}

/// The network. Clones are one network.
#[derive(Clone)]
pub(super) struct Network(Arc<Mutex<State>>);

pub(super) struct State {
    began: Instant,
    pub(super) chance: Chance,
    pub(super) faults: Faults,
    processes: Vec<ProcessState>,
    /// The connections of each process, one to each server.
    links: Vec<Vec<LinkState>>,
    pub(super) servers: Vec<ServerState>,
    pub(super) moves: Moves,
    #[cfg(feature = "store")]
    pub(super) table: super::table::Table,
    pub(super) ledger: Ledger,
    /// The server's clock minus the usual one, in microseconds.
    pub(super) clock_offset_us: i64,
    last_us: u64,
    pub(super) calls: u64,
    pub(super) outcomes: Vec<super::load::Outcome>,
    pub(super) waiters: super::waiters::Waiters,
    pub(super) trace: String,
}

/// A process, as the network sees it.
struct ProcessState {
    is_dead: bool,
    is_stopped: bool,
    /// When it did not run.
    pauses: Vec<(Duration, Duration)>,
    /// Notified when it goes on.
    changed: Arc<Notify>,
}

/// A server. All servers have one clock.
pub(super) struct ServerState {
    pub(super) data: Server,
    /// The slots, as it sees them, if it is of a cluster.
    pub(super) slots: Option<SlotMap>,
    snapshot: Server,
    /// Until when it refuses connections.
    down_until: Instant,
    /// When it is done with the calls that have come.
    busy_until: Instant,
}

/// The connection of a process to a server.
struct LinkState {
    /// The number of the connection, if there is one.
    connection: Option<u64>,
    connections: u64,
    /// It leads to a server that is a replica now.
    is_demoted: bool,
    /// Notified when any of these changes.
    changed: Arc<Notify>,
    /// When the last call of the connection arrives at the server, and the last answer at the process.
    arrivals: [Instant; 2],
    /// The calls without an answer. If one is dropped, its call fails.
    pending: BTreeMap<u64, oneshot::Sender<Ended>>,
}

impl State {
    /// The time since the simulation began.
    pub(super) fn now(&self) -> Duration {
        self.began.elapsed()
    }

    pub(super) fn log(&mut self, line: std::fmt::Arguments<'_>) {
        let now = self.now();
        writeln!(self.trace, "{:>6} ms  {line}", now.as_millis()).expect("a text takes everything");
    }

    /// Returns the server's time of the next call. No two have the same.
    fn next_server_us(&mut self) -> u64 {
        let behind_us = (self.last_us + 1).saturating_sub(self.server_now_us());
        self.clock_offset_us = self.clock_offset_us.saturating_add_unsigned(behind_us);
        self.last_us = self.server_now_us();
        self.last_us
    }

    /// Has the servers forget what is over.
    fn expire(&mut self) {
        let now_us = self.server_now_us();
        for server in &mut self.servers {
            for key in server.data.expire(now_us) {
                self.ledger.record_expiry(&key, now_us);
            }
        }
    }

    pub(super) fn server_now_us(&self) -> u64 {
        let now_us = EPOCH_US + u64::try_from(self.now().as_micros()).expect("a simulation is short");
        now_us.saturating_add_signed(self.clock_offset_us)
    }

    fn delay(&mut self) -> Duration {
        let most = if self.chance.permille(self.faults.long_delays) {
            self.faults.long_delay_ms
        } else {
            self.faults.delay_ms
        };
        Duration::from_millis(self.chance.within(0..=most))
    }

    /// Returns when what is sent now arrives, one way or the other.
    fn arrival(&mut self, (process, server): (usize, usize), way: usize) -> Instant {
        let arrives = Instant::now() + self.delay();
        if self.faults.reorders {
            return arrives;
        }
        let link = &mut self.links[process][server];
        let arrives = arrives.max(link.arrivals[way]);
        link.arrivals[way] = arrives;
        arrives
    }

    /// Ends the connections of a process.
    pub(super) fn cut(&mut self, process: usize) {
        (0..self.servers.len()).for_each(|server| self.cut_link((process, server)));
    }

    /// Ends the connection of a process to a server.
    fn cut_link(&mut self, (process, server): (usize, usize)) {
        let link = &mut self.links[process][server];
        if link.connection.take().is_some() {
            link.pending.clear();
            link.changed.notify_waiters();
            self.log(format_args!("connection of process {process} to {} is cut", shown_server(server)));
        }
    }

    /// Returns when a server is done with a call that has come now. It does one after the other.
    fn turn(&mut self, server: usize, sent: &Sent) -> Option<Instant> {
        let requests = match sent {
            Sent::Script { keys, .. } => keys.len(),
            Sent::Slots => 0,
            #[cfg(feature = "store")]
            Sent::Load(keys) => keys.len(),
            #[cfg(feature = "store")]
            Sent::Swap(changes) => changes.len(),
        };
        let takes = Duration::from_micros(self.faults.call_us + self.faults.request_us * requests as u64);
        let busy_until = &mut self.servers[server].busy_until;
        *busy_until = (*busy_until).max(Instant::now()) + takes;
        (!takes.is_zero()).then_some(*busy_until)
    }

    /// Makes the server a replica, which keeps its connections. New ones lead to the new master, which has its data.
    pub(super) fn demote(&mut self) {
        self.log(format_args!("server becomes a replica"));
        for link in self.links.iter_mut().flatten() {
            link.is_demoted = link.connection.is_some();
        }
    }

    /// Runs a call on a server. Returns what comes of it.
    fn execute(&mut self, (process, server): (usize, usize), sent: &Sent) -> Ended {
        if self.links[process][server].is_demoted {
            return Ended::Refused("READONLY You can't write against a read only replica.".to_owned());
        }
        let now_us = self.next_server_us();
        let (command, script, keys, args, is_asking) = match sent {
            Sent::Script { command, script, keys, args, is_asking } => (command, script, keys, args, *is_asking),
            Sent::Slots => {
                let slots = self.servers[server].slots.as_ref().expect("only a cluster is asked for its slots");
                return Ended::Slots(slots.ranges());
            }
            #[cfg(feature = "store")]
            Sent::Load(keys) => return Ended::Loaded(self.table.load(keys, now_us)),
            #[cfg(feature = "store")]
            Sent::Swap(changes) => return Ended::Swapped(self.table.swap(changes, now_us)),
        };
        if self.chance.permille(self.faults.script_flushes) {
            self.servers[server].data.flush_scripts();
        }
        self.expire();
        let Self { servers, moves, .. } = self;
        let ServerState { data, slots, .. } = &mut servers[server];
        if let Some(elsewhere) = slots.as_ref().and_then(|slots| slots.refusal(keys, data, is_asking)) {
            moves.record_refusal(process, keys, &elsewhere);
            return Ended::Refused(elsewhere);
        }
        let reply = data.eval(command, script, keys, args, now_us);
        if let Some(number) = number_of(sent) {
            let now = self.now();
            match &reply {
                Reply::Text(bytes) => self.ledger.record_execution(process, number, now, now_us, bytes),
                Reply::Error(words) if words.starts_with("NOSCRIPT") => {}
                other => self.ledger.problem(format!("call {number:x} got {other:?}")),
            }
            for key in keys {
                if self.servers[server].data.keys.get(key).is_some_and(|entry| entry.until_ms.is_none()) {
                    self.ledger.problem(format!("key {} has no expiry", key.escape_ascii()));
                }
            }
        }
        match reply {
            Reply::Text(bytes) => Ended::Answered(bytes),
            Reply::Integer(number) => Ended::Number(number),
            Reply::Error(words) => Ended::Refused(words),
            Reply::Nil | Reply::Done | Reply::List(_) => Ended::Refused("ERR no such reply".to_owned()),
        }
    }

    /// Replaces the server by one that lacks the writes since the last snapshot. It is of no cluster.
    pub(super) fn fail_over(&mut self) {
        self.log(format_args!("failover"));
        for server in &mut self.servers {
            server.data = server.snapshot.clone();
            server.data.flush_scripts();
        }
        let now = self.now();
        self.ledger.fail_over(now);
        (0..self.links.len()).for_each(|process| self.cut(process));
    }

    /// Copies the server to its replica.
    pub(super) fn replicate(&mut self) {
        self.servers.iter_mut().for_each(|server| server.snapshot = server.data.clone());
        self.ledger.replicate();
    }

    /// Ends all connections to a server, and refuses new ones for this time.
    pub(super) fn crash(&mut self, server: usize, time: Duration) {
        self.log(format_args!("{} is down for {time:?}", shown_server(server)));
        self.servers[server].down_until = Instant::now() + time;
        (0..self.links.len()).for_each(|process| self.cut_link((process, server)));
    }

    /// Moves the server's clock.
    pub(super) fn step_clock(&mut self, by_us: i64) {
        self.log(format_args!("server's clock steps by {by_us} µs"));
        self.expire();
        self.clock_offset_us += by_us;
        self.last_us = 0;
    }

    /// Kills a process: nothing that it sends from now on leaves it.
    pub(super) fn kill(&mut self, process: usize) {
        self.log(format_args!("process {process} is killed"));
        self.processes[process].is_dead = true;
        self.processes[process].changed.notify_waiters();
        self.cut(process);
    }

    /// Stops a process: nothing reaches it or leaves it.
    pub(super) fn stop(&mut self, process: usize) {
        self.log(format_args!("process {process} is stopped"));
        self.processes[process].is_stopped = true;
        let now = self.now();
        self.processes[process].pauses.push((now, Duration::MAX));
    }

    /// Lets a process go on, if it is stopped.
    pub(super) fn go_on(&mut self, process: usize) {
        if !self.processes[process].is_stopped {
            return;
        }
        self.log(format_args!("process {process} goes on"));
        let now = self.now();
        let state = &mut self.processes[process];
        state.is_stopped = false;
        state.pauses.iter_mut().for_each(|(_, until)| *until = now.min(*until));
        state.changed.notify_waiters();
    }

    /// Records that no process runs for this time.
    pub(super) fn record_stall(&mut self, time: Duration) {
        self.log(format_args!("no process runs for {time:?}"));
        let now = self.now();
        self.processes.iter_mut().for_each(|process| process.pauses.push((now, now + time)));
    }

    /// Whether a process did not run for a part of this time.
    pub(super) fn was_paused(&self, process: usize, since: Duration, until: Duration) -> bool {
        self.processes[process].pauses.iter().any(|(from, to)| *from <= until && *to >= since)
    }
}

/// Returns the words for a server in the trace.
fn shown_server(server: usize) -> String {
    format!("server {server}")
}

/// Returns the words for a call in the trace.
fn shown(sent: &Sent) -> String {
    match sent {
        Sent::Script { command, .. } => {
            number_of(sent).map_or_else(|| (*command).to_owned(), |number| super::ledger::shown(command, number))
        }
        Sent::Slots => "slots".to_owned(),
        #[cfg(feature = "store")]
        Sent::Load(keys) => format!("load {}", keys.join(", ")),
        #[cfg(feature = "store")]
        Sent::Swap(changes) => {
            let change = |change: &Change| format!("{} {:?} to {:?}", change.key, change.expect, change.then);
            changes.iter().map(change).collect::<Vec<_>>().join("; ")
        }
    }
}

fn outcome(ended: &Ended) -> String {
    match ended {
        #[cfg(feature = "store")]
        Ended::Swapped(swapped) => if swapped.is_done() { "done" } else { "conflict" }.to_owned(),
        Ended::Refused(words) => words.clone(),
        _ => "answered".to_owned(),
    }
}

/// Returns the number of a call of the limiter.
fn number_of(sent: &Sent) -> Option<u64> {
    let Sent::Script { keys, args, .. } = sent else { return None };
    // A probe has no key. Keys that end so are the operators' settings.
    if keys.first().is_none_or(|key| key.ends_with(b"{fleet}")) {
        return None;
    }
    // It precedes the program.
    Some(u64::from_le_bytes(*args.first()?.first_chunk()?))
}

impl Network {
    pub(super) fn new(processes: usize, servers: usize, chance: Chance, faults: Faults) -> Self {
        let now = Instant::now();
        let process =
            || ProcessState { is_dead: false, is_stopped: false, pauses: Vec::new(), changed: Arc::new(Notify::new()) };
        let server = |number| ServerState {
            data: Server::default(),
            slots: (servers > 1).then(|| SlotMap::new(number, servers)),
            snapshot: Server::default(),
            down_until: now,
            busy_until: now,
        };
        let link = |_| LinkState {
            connection: None,
            connections: 0,
            is_demoted: false,
            changed: Arc::new(Notify::new()),
            arrivals: [now; 2],
            pending: BTreeMap::new(),
        };
        Self(Arc::new(Mutex::new(State {
            began: now,
            chance,
            faults,
            processes: (0..processes).map(|_| process()).collect(),
            links: (0..processes).map(|_| (0..servers).map(link).collect()).collect(),
            servers: (0..servers).map(server).collect(),
            moves: Moves::default(),
            #[cfg(feature = "store")]
            table: super::table::Table::default(),
            ledger: Ledger::default(),
            clock_offset_us: 0,
            last_us: 0,
            calls: 0,
            outcomes: Vec::new(),
            waiters: super::waiters::Waiters::default(),
            trace: String::new(),
        })))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits while a process is stopped.
    pub(super) async fn goes_on(&self, process: usize) {
        loop {
            let changed = {
                let state = self.lock();
                let process = &state.processes[process];
                if !process.is_stopped || process.is_dead {
                    return;
                }
                Arc::clone(&process.changed).notified_owned()
            };
            changed.await;
        }
    }

    /// Takes a call to a server and its answer back.
    async fn travel(self, (process, server): (usize, usize), connection: u64, id: u64, sent: Sent) {
        self.goes_on(process).await;
        let arrives = {
            let mut state = self.lock();
            if state.processes[process].is_dead {
                return;
            }
            let faults = state.faults.clone();
            if state.chance.permille(faults.lost_requests) {
                state.log(format_args!("call {id} of process {process} is lost"));
                return;
            }
            state.arrival((process, server), 0)
        };
        sleep_until(arrives).await;
        let turn = self.lock().turn(server, &sent);
        if let Some(turn) = turn {
            sleep_until(turn).await;
        }
        let (reply, arrives) = {
            let mut state = self.lock();
            let faults = state.faults.clone();
            let is_cut = state.links[process][server].connection != Some(connection);
            if Instant::now() < state.servers[server].down_until || is_cut && state.chance.permille(500) {
                return; // what was on its way when the connection ended may be lost, or not
            }
            if !is_cut && state.chance.permille(faults.cuts) {
                state.cut_link((process, server));
                return;
            }
            let reply = state.execute((process, server), &sent);
            let at = shown_server(server);
            state.log(format_args!(
                "call {id} of process {process} runs on {at}: {}: {}",
                shown(&sent),
                outcome(&reply)
            ));
            if state.chance.permille(faults.lost_replies) {
                state.log(format_args!("answer to call {id} is lost"));
                return;
            }
            if state.chance.permille(faults.cuts) {
                state.cut_link((process, server));
                return;
            }
            (reply, state.arrival((process, server), 1))
        };
        sleep_until(arrives).await;
        self.goes_on(process).await;
        let mut state = self.lock();
        if let Some(sender) = state.links[process][server].pending.remove(&id) {
            let is_split = matches!(&reply, Ended::Refused(words) if words.starts_with("TRYAGAIN"));
            if let Some(number) = number_of(&sent).filter(|_| is_split) {
                state.ledger.record_split(number);
            }
            let is_answer = matches!(reply, Ended::Answered(_));
            let is_read = sender.send(reply).is_ok() && is_answer;
            if let Some(number) = number_of(&sent).filter(|_| is_read) {
                state.ledger.record_delivery(number);
            }
        }
    }
}

/// The network, as one process sees it, with its way to one server.
#[derive(Clone)]
pub(in crate::limiter::redis) struct Wire {
    pub(super) network: Network,
    pub(super) process: usize,
    pub(in crate::limiter::redis) server: usize,
}

impl Wire {
    /// Returns the number of servers. More than one are a cluster.
    pub(in crate::limiter::redis) fn servers(&self) -> usize {
        self.network.lock().servers.len()
    }

    /// Returns the way to the server of this number.
    pub(in crate::limiter::redis) fn to(&self, server: usize) -> Self {
        Self { server, ..self.clone() }
    }

    /// Sends a command, and waits for what comes of it.
    pub(in crate::limiter::redis) async fn send(&self, sent: Sent) -> Ended {
        let (sender, ended) = oneshot::channel();
        {
            let mut state = self.network.lock();
            state.calls += 1;
            let id = state.calls;
            let link = &mut state.links[self.process][self.server];
            let Some(connection) = link.connection else { return Ended::NotConnected };
            link.pending.insert(id, sender);
            tokio::spawn(self.network.clone().travel((self.process, self.server), connection, id, sent));
        }
        ended.await.unwrap_or(Ended::Disconnected)
    }

    pub(in crate::limiter::redis) fn is_connected(&self) -> bool {
        self.network.lock().links[self.process][self.server].connection.is_some()
    }

    /// Connects. Returns whether that succeeded.
    pub(in crate::limiter::redis) async fn connect(&self) -> bool {
        let delay = {
            let mut state = self.network.lock();
            state.delay() + state.delay()
        };
        sleep(delay).await;
        self.network.goes_on(self.process).await;
        let mut state = self.network.lock();
        if Instant::now() < state.servers[self.server].down_until || state.processes[self.process].is_dead {
            return false;
        }
        let link = &mut state.links[self.process][self.server];
        link.connections += 1;
        link.connection = Some(link.connections);
        link.is_demoted = false;
        link.arrivals = [Instant::now(); 2];
        link.changed.notify_waiters();
        let (process, server) = (self.process, shown_server(self.server));
        state.log(format_args!("process {process} is connected to {server}"));
        true
    }

    /// Waits until the connection ends.
    pub(in crate::limiter::redis) async fn until_cut(&self) {
        let first = self.network.lock().links[self.process][self.server].connection;
        loop {
            let changed = {
                let state = self.network.lock();
                let link = &state.links[self.process][self.server];
                if link.connection.is_none() || link.connection != first {
                    return;
                }
                Arc::clone(&link.changed).notified_owned()
            };
            changed.await;
        }
    }

    /// Ends the connection, as the client does.
    pub(in crate::limiter::redis) fn disconnect(&self) {
        self.network.lock().cut_link((self.process, self.server));
    }
}
