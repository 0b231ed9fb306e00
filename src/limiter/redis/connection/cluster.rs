//! A cluster: a connection to each master, and the map of the slots that each master has.
//!
//! While one server is away, fred's own client for clusters reaches no server at all. So this crate makes its own
//! connection to each master, with either client library.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::stream::{self, StreamExt};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout};

use super::address::{Address, TargetKind};
use super::failure::{CallFailure, Cause, misconfigured};
use super::link::Link;
use super::pause::jitter;
use super::server::Server;
use super::settings::ConnectionSettings;
use super::slots::{MASTERS, SERVERS, SLOTS, Slots};
use super::target::UrlTarget;
use super::transport::{RedisReply, SlotState};
use crate::event::StoreErrorKind;
use crate::limiter::redis::error::RedisError;
use crate::limiter::redis::script::Call;
use crate::limiter::remote::Events;

/// The intervals at which the map is fetched: the usual interval, the interval while a server is away, and
/// the shortest interval.
const EVERY: Duration = Duration::from_secs(60);
const WHILE_AWAY: Duration = Duration::from_millis(500);
const NO_SOONER: Duration = Duration::from_millis(100);

/// The number of servers from which the map is fetched at the same time.
const AT_ONCE: usize = 3;

/// The number of times that a call is sent to another server without a pause: to the server that has the slot, and to
/// the server to which the slot is moved.
const HOPS: usize = 2;

/// The first and the longest pause before a call is sent to yet another server. Servers that redirect a call
/// to each other do not agree about the slot yet. Each pause is twice as long as the pause before, until the
/// servers agree or the call's time is over.
const PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

const NO_SERVER: u16 = u16::MAX;

/// A cluster, whose connections end when this value is dropped.
pub(super) struct Cluster {
    shared: Arc<ClusterState>,
    refresher: AbortHandle,
}

struct ClusterState {
    map: RwLock<Map>,
    target: UrlTarget,
    settings: ConnectionSettings,
    events: Arc<Events>,
    runtime: Handle,
    /// Notified when the map may be outdated.
    refresh: Arc<Notify>,
    closed: AtomicBool,
}

struct Map {
    /// The index of each slot's server, or `NO_SERVER`.
    owners: Box<[u16]>,
    servers: Vec<Arc<Server>>,
    /// The number of each of `servers`, which it keeps as long as it is known.
    numbers: Vec<u16>,
    /// The number that was given last.
    last_number: u16,
    /// The addresses from which the map is fetched when no server answers.
    others: Vec<Address>,
    /// The reason why the map could not be fetched.
    trouble: Option<RedisError>,
}

impl Cluster {
    pub(super) fn start(
        runtime: &Handle,
        target: UrlTarget,
        settings: ConnectionSettings,
        events: Arc<Events>,
    ) -> Result<Self, RedisError> {
        let TargetKind::Cluster(seeds) = &target.kind else { return Err(misconfigured("not the URL of a cluster")) };
        let map = Map {
            owners: vec![NO_SERVER; SLOTS].into_boxed_slice(),
            servers: Vec::new(),
            numbers: Vec::new(),
            last_number: 0,
            others: seeds.iter().take(MASTERS).cloned().collect(),
            trouble: None,
        };
        // Reports wrong settings here, instead of later from a task in the background.
        if let Some(seed) = seeds.first() {
            target.transport(seed, Some(seed), &settings)?;
        }
        let refresh = Arc::new(Notify::new());
        let (map, closed) = (RwLock::new(map), AtomicBool::new(false));
        let shared =
            Arc::new(ClusterState { map, target, settings, events, runtime: runtime.clone(), refresh, closed });
        let refresher = runtime.spawn(keep_map(Arc::clone(&shared))).abort_handle();
        Ok(Self { shared, refresher })
    }

    /// Runs a script on the server that has the slot. Returns `None` if the call's keys are on two servers.
    pub(super) async fn run(&self, call: &Call, slot: u16, until: Instant) -> Result<Option<RedisReply>, RedisError> {
        let give_up = |failure: CallFailure| {
            failure.error.report_to(&self.shared.events);
            Err(failure.error)
        };
        let mut link = self.link(slot)?;
        let (mut slot_state, mut hops, mut pause) = (SlotState::Owned, 0, PAUSE);
        loop {
            let failure = match link.run_script(call, until, slot_state).await {
                Ok(answer) => return Ok(Some(answer)),
                Err(failure) => failure,
            };
            let next = match &failure.cause {
                Cause::Moved(to) => {
                    self.shared.refresh.notify_one();
                    slot_state = SlotState::Owned;
                    self.shared.at(to, Some(slot))
                }
                Cause::Ask(to) => {
                    slot_state = SlotState::Importing;
                    self.shared.at(to, None)
                }
                Cause::TryAgain => return Ok(None),
                _ => return Err(failure.error),
            };
            let Some(next) = next else { return give_up(failure) };
            link = Arc::clone(&next.link);
            hops += 1;
            if hops > HOPS {
                if until.saturating_duration_since(Instant::now()) < pause * 2 {
                    return give_up(failure);
                }
                sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            // The server may be new, so the call waits for its first connection.
            link.health.wait_for_connection(until).await.map_err(|failure| failure.error)?;
        }
    }

    /// Returns the link to the server that has the slot.
    ///
    /// # Errors
    /// Returns an error if no server is known to have the slot. In that case the map is fetched.
    pub(super) fn link(&self, slot: u16) -> Result<Arc<Link>, RedisError> {
        if let Some(server) = self.shared.map().owner(slot) {
            return Ok(Arc::clone(&server.link));
        }
        self.shared.refresh.notify_one();
        Err(self.shared.unknown(slot))
    }

    /// Returns the number of the server that has the slot, or 0 if none is known to have it.
    pub(super) fn server_of(&self, slot: u16) -> u16 {
        let map = self.shared.map();
        let owner = map.owners.get(usize::from(slot)).and_then(|owner| map.numbers.get(usize::from(*owner)));
        owner.copied().unwrap_or_default()
    }

    /// Finds out whether every slot has a server, and whether each of these servers answers before the deadline.
    pub(super) async fn verify(&self, until: Instant) -> Result<(), RedisError> {
        let servers = {
            let map = self.shared.map();
            if let Some(slot) = map.owners.iter().position(|owner| *owner == NO_SERVER) {
                let error = map.trouble.clone();
                let unknown = || self.shared.no_server(u16::try_from(slot).unwrap_or(NO_SERVER));
                return Err(error.unwrap_or_else(unknown));
            }
            map.servers.clone()
        };
        for server in servers {
            server.link.verify(until).await?;
        }
        Ok(())
    }

    /// Returns the known servers.
    pub(super) fn servers(&self) -> Vec<Arc<Server>> {
        self.shared.map().servers.clone()
    }

    pub(super) fn close(&self) {
        self.shared.closed.store(true, Ordering::Relaxed);
        self.refresher.abort();
        let servers = {
            let mut map = self.shared.map_mut();
            map.owners.fill(NO_SERVER);
            map.numbers.clear();
            std::mem::take(&mut map.servers)
        };
        servers.iter().for_each(|server| server.close());
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.refresher.abort();
    }
}

impl Map {
    fn owner(&self, slot: u16) -> Option<&Arc<Server>> {
        let owner = self.owners.get(usize::from(slot))?;
        self.servers.get(usize::from(*owner))
    }

    /// Returns whether a server or the owner of a slot is missing. Calls alone would not notice when the missing
    /// server or owner is back.
    fn lacks_something(&self) -> bool {
        self.owners.contains(&NO_SERVER) || self.servers.iter().any(|server| server.link.health.fails_at_once())
    }

    /// Returns a number that no server has. The number that was given up last is given again last, because the load of
    /// the server that had it is remembered under this number.
    fn free_number(&mut self) -> u16 {
        let mut free = (1..=SERVERS).map(|step| (self.last_number + step) % SERVERS);
        self.last_number = free.find(|number| !self.numbers.contains(number)).unwrap_or_default();
        self.last_number
    }

    fn find(&self, address: &Address) -> Option<usize> {
        self.servers.iter().position(|server| server.link.health.address == *address)
    }
}

impl ClusterState {
    fn map(&self) -> RwLockReadGuard<'_, Map> {
        self.map.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn map_mut(&self) -> RwLockWriteGuard<'_, Map> {
        self.map.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn unknown(&self, slot: u16) -> RedisError {
        if self.closed.load(Ordering::Relaxed) {
            return RedisError::new(StoreErrorKind::Unavailable, "this store was closed");
        }
        self.map().trouble.clone().unwrap_or_else(|| self.no_server(slot))
    }

    fn no_server(&self, slot: u16) -> RedisError {
        RedisError::new(StoreErrorKind::Unavailable, format!("no server of the cluster is known to have slot {slot}"))
    }

    fn start(&self, address: &Address) -> Result<Arc<Server>, RedisError> {
        let (events, refresh) = (Arc::clone(&self.events), Some(Arc::clone(&self.refresh)));
        let transport = self.target.transport(address, Some(address), &self.settings)?;
        let (runtime, address) = (&self.runtime, address.clone());
        Ok(Arc::new(Server::start(runtime, address, transport, refresh, &self.settings, events)))
    }

    /// Returns the server that another server has named. `owns` is the slot that the named server already has, or
    /// `None` while the slot is still being moved to it.
    fn at(&self, address: &Address, owns: Option<u16>) -> Option<Arc<Server>> {
        if owns.is_none() {
            let map = self.map();
            if let Some(at) = map.find(address) {
                return map.servers.get(at).cloned();
            }
        }
        let mut map = self.map_mut();
        if self.closed.load(Ordering::Relaxed) {
            return None;
        }
        let at = match map.find(address) {
            Some(at) => at,
            None if map.servers.len() >= MASTERS => return None,
            None => {
                let server = self.start(address).ok()?;
                let number = map.free_number();
                map.servers.push(server);
                map.numbers.push(number);
                map.servers.len() - 1
            }
        };
        if let Some(owner) = owns.and_then(|slot| map.owners.get_mut(usize::from(slot))) {
            *owner = u16::try_from(at).unwrap_or(NO_SERVER);
        }
        map.servers.get(at).cloned()
    }

    /// Replaces the map with the map that a server has sent. Servers that the new map does not have are dropped.
    fn install(&self, slots: Slots, from: &Arc<Server>) -> Result<(), RedisError> {
        // The replaced servers are dropped after the lock is released, because the drop calls observers, which may
        // use the limiter.
        let mut servers = Vec::with_capacity(slots.masters.len());
        let mut map = self.map_mut();
        if self.closed.load(Ordering::Relaxed) {
            return Ok(());
        }
        let mut numbers = Vec::with_capacity(slots.masters.len());
        for address in &slots.masters {
            let known = map.find(address);
            servers.push(match known.and_then(|at| map.servers.get(at)) {
                Some(server) => Arc::clone(server),
                None if from.link.health.address == *address => Arc::clone(from),
                None => self.start(address)?,
            });
            numbers.push(known.and_then(|at| map.numbers.get(at)).copied());
        }
        let numbers = numbers.into_iter().map(|number| number.unwrap_or_else(|| map.free_number())).collect();
        let mut owners = vec![NO_SERVER; SLOTS].into_boxed_slice();
        for (first, last, at) in slots.ranges {
            if let Some(range) = owners.get_mut(usize::from(first)..=usize::from(last)) {
                range.fill(u16::try_from(at).unwrap_or(NO_SERVER));
            }
        }
        debug_assert!(
            matches!(self.target.kind, TargetKind::Cluster(_)),
            "`Cluster::start` refuses a URL that does not name a Redis Cluster"
        );
        let TargetKind::Cluster(seeds) = &self.target.kind else { return Ok(()) };
        let replicas = slots.replicas.into_iter().filter(|replica| !seeds.contains(replica));
        map.others = replicas.chain(seeds.iter().take(MASTERS).cloned()).collect();
        std::mem::swap(&mut map.servers, &mut servers);
        (map.owners, map.numbers, map.trouble) = (owners, numbers, None);
        Ok(())
    }

    /// Fetches the map from the known servers, a few at a time, and connected servers first. The first answer
    /// is used.
    async fn learn(&self, turn: usize) -> Result<(), RedisError> {
        let (servers, others) = {
            let map = self.map();
            let mut servers = map.servers.clone();
            if !servers.is_empty() {
                // Each turn begins with another server, because a server may be cut off from the other servers
                // without noticing it.
                let count = servers.len();
                servers.rotate_left(turn % count);
            }
            servers.sort_by_key(|server| server.link.health.fails_at_once() || !server.link.health.is_connected());
            let others = map.others.iter().filter(|other| map.find(other).is_none()).cloned();
            (servers, others.collect::<Vec<_>>())
        };
        // The connections to `others` are used only to ask for the map, unless the map names their servers.
        let others = others.into_iter().map(|address| self.start(&address));
        let mut answers = stream::iter(servers.into_iter().map(Ok).chain(others))
            .map(|server| async move {
                let server = server?;
                Ok((self.slots_of(&server.link).await?, server))
            })
            .buffer_unordered(AT_ONCE);
        let mut last = None;
        while let Some(answer) = answers.next().await {
            match answer {
                Ok((slots, server)) => return self.install(slots, &server),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| self.no_server(0)))
    }

    async fn slots_of(&self, link: &Link) -> Result<Slots, RedisError> {
        let until = Instant::now() + self.settings.connect_timeout();
        link.health.until_connected(until).await;
        let answer = link.send_keyless("CLUSTER", &["SLOTS"], until).await;
        let answer = answer.map_err(|failure| link.health.explain(failure))?;
        Slots::parse(&answer, &link.health.address).ok_or_else(|| {
            let message = format!("Redis at {} knows of no slots of its cluster", link.health.address);
            RedisError::new(StoreErrorKind::Unavailable, message)
        })
    }
}

/// The task that keeps the map up to date.
async fn keep_map(shared: Arc<ClusterState>) {
    for turn in 0_usize.. {
        let failed = match shared.learn(turn).await {
            Ok(()) => {
                // Clears a pending notification that a server is away, because the map has just been read from
                // another server.
                let _ = shared.refresh.notified().now_or_never();
                false
            }
            Err(error) => {
                shared.map_mut().trouble = Some(error);
                true
            }
        };
        sleep(jitter(NO_SOONER)).await;
        let away = failed || shared.map().lacks_something();
        let pause = if away { WHILE_AWAY } else { EVERY };
        let _ = timeout(jitter(pause), shared.refresh.notified()).await;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use super::*;
    use crate::event::LimiterEvent;
    use crate::outcome::Observer;

    /// Notes whether a server is down, and whether a check could be made when it has left the map.
    #[derive(Default)]
    struct Looks {
        shared: OnceLock<Arc<ClusterState>>,
        seen: OnceLock<bool>,
        is_down: AtomicBool,
    }

    impl Observer for Looks {
        fn on_limiter_event(&self, event: &LimiterEvent) {
            self.is_down.store(matches!(event, LimiterEvent::StoreDown { .. }), Ordering::Relaxed);
            if let (LimiterEvent::StoreLeft { .. }, Some(shared)) = (event, self.shared.get()) {
                self.seen.get_or_init(|| shared.map.try_read().is_ok());
            }
        }
    }

    #[tokio::test]
    async fn observers_hear_of_a_server_that_has_left() {
        let looks = Arc::new(Looks::default());
        let settings = ConnectionSettings {
            observers: vec![Arc::clone(&looks) as Arc<dyn Observer>],
            ..ConnectionSettings::default()
        };
        let target = UrlTarget::parse("redis-cluster://127.0.0.1:1", &settings).unwrap();
        let events = Arc::new(Events::new(&settings.observers));
        let cluster = Cluster::start(&Handle::current(), target, settings, events).unwrap();
        let shared = &cluster.shared;
        looks.shared.get_or_init(|| Arc::clone(shared));
        let [gone, stays] = [1, 2].map(|port| Address::new("127.0.0.1", port));
        let link = Arc::clone(&shared.at(&gone, Some(0)).unwrap().link);
        let fail = || {
            link.health.record_end(Some(CallFailure::lost(StoreErrorKind::Unavailable, "it is not there")));
            looks.is_down.load(Ordering::Relaxed)
        };
        assert!(fail());
        let slots = Slots { ranges: vec![(0, 1, 0)], masters: vec![stays.clone()], replicas: Vec::new() };
        shared.install(slots, &shared.start(&stays).unwrap()).unwrap();
        assert_eq!(looks.seen.get(), Some(&true), "they may use the limiter");
        assert!(!fail(), "calls that were under way fail, and nothing would report its end");
    }
}
