//! Connections, their recovery, and the state of each server. No other folder names a client library.

mod address;
mod cluster;
mod current;
mod error_class;
mod failure;
#[cfg(feature = "redis-rs")]
mod given;
mod health;
pub(super) mod link;
#[cfg(feature = "fred")]
mod on_fred;
#[cfg(feature = "redis-rs")]
mod on_redis_rs;
mod pause;
mod reconnect;
mod renewal;
mod server;
mod settings;
mod slots;
mod target;
mod tls;
mod transport;
#[cfg(feature = "redis-rs")]
mod url;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::runtime::Handle;
use tokio::time::{Instant, timeout_at};

use self::address::{Address, TargetKind};
use self::cluster::Cluster;
use self::failure::{Cause, misconfigured};
use self::link::Link;
use self::server::Server;
pub(super) use self::settings::ConnectionSettings;
pub(super) use self::slots::{SERVERS, slot_of};
use self::target::UrlTarget;
pub(super) use self::tls::{Identity, Pem};
use self::transport::{RedisReply, SlotState, Transport};
use super::error::RedisError;
use super::script::Call;
use crate::event::StoreErrorKind;
use crate::limiter::remote::Events;

/// Redis. Clones share its connections.
#[derive(Clone)]
pub(super) struct RedisConnections(Arc<Inner>);

struct Inner {
    reach: Reach,
    events: Arc<Events>,
    #[cfg(test)]
    deadline: Duration,
}

enum Reach {
    One(Server),
    Cluster(Cluster),
}

impl RedisConnections {
    /// Starts to connect, and returns at once, whether or not Redis can be reached.
    ///
    /// # Errors
    ///
    /// Returns `Misconfigured` if the URL is not valid, if it needs TLS and the build has no feature for
    /// that, or if there is no tokio runtime.
    pub(super) fn connect(url: &str, settings: ConnectionSettings) -> Result<Self, RedisError> {
        let (settings, runtime) = (settings.bounded(), runtime()?);
        let target = UrlTarget::parse(url, &settings)?;
        let events = Arc::new(Events::new(&settings.observers));
        let address = match &target.kind {
            TargetKind::Cluster(_) => {
                let cluster = Cluster::start(&runtime, target, settings.clone(), Arc::clone(&events))?;
                return Ok(Self(Arc::new(Inner {
                    reach: Reach::Cluster(cluster),
                    events,
                    #[cfg(test)]
                    deadline: settings.deadline,
                })));
            }
            TargetKind::One(address) | TargetKind::Sentinel(address) => address.clone(),
        };
        let transport = target.transport(&address, None, &settings)?;
        Ok(Self::of_server(&runtime, address, transport, &settings, events))
    }

    /// Uses a connection of the application.
    ///
    /// # Errors
    ///
    /// Returns `Misconfigured` if there is no tokio runtime.
    #[cfg(feature = "redis-rs")]
    pub(super) fn over<C>(connection: C, settings: ConnectionSettings) -> Result<Self, RedisError>
    where
        C: redis::aio::ConnectionLike + Clone + Send + Sync + 'static,
    {
        let (settings, runtime) = (settings.bounded(), runtime()?);
        let events = Arc::new(Events::new(&settings.observers));
        let address = Address::new("the application's connection", 0);
        let transport = Box::new(given::Given::new(connection, &address));
        Ok(Self::of_server(&runtime, address, transport, &settings, events))
    }

    /// Uses a process's end of a simulated network.
    #[cfg(test)]
    pub(super) fn simulated(
        wire: super::tests::simulation::Wire,
        settings: ConnectionSettings,
    ) -> Result<Self, RedisError> {
        let (settings, runtime) = (settings.bounded(), runtime()?);
        let events = Arc::new(Events::new(&settings.observers));
        if wire.servers() > 1 {
            let target = UrlTarget::simulated(wire);
            let cluster = Cluster::start(&runtime, target, settings.clone(), Arc::clone(&events))?;
            let deadline = settings.deadline;
            return Ok(Self(Arc::new(Inner { reach: Reach::Cluster(cluster), events, deadline })));
        }
        let address = tests::simulated::address_of(&wire);
        let transport = Box::new(tests::simulated::Simulated::at(&address, &wire));
        Ok(Self::of_server(&runtime, address, transport, &settings, events))
    }

    fn of_server(
        runtime: &Handle,
        address: Address,
        transport: Box<dyn Transport>,
        settings: &ConnectionSettings,
        events: Arc<Events>,
    ) -> Self {
        let server = Server::start(runtime, address, transport, None, settings, Arc::clone(&events));
        Self(Arc::new(Inner {
            reach: Reach::One(server),
            events,
            #[cfg(test)]
            deadline: settings.deadline,
        }))
    }

    /// Returns the deadline of a call that begins now.
    #[cfg(test)]
    fn until(&self) -> Instant {
        Instant::now() + self.0.deadline
    }

    /// Runs a script on the server that has the slot, within a tokio runtime. The script runs at most once.
    /// Even if the future is dropped, the script may have run.
    ///
    /// `until` is the instant at which the last caller stops waiting. The limiter still waits for a later answer,
    /// until the connection ends, or the server was silent for so long that it is believed dead. If the server's
    /// connection was lost before the call, the call waits for the next connection until the deadline.
    ///
    /// Returns `None` if the slot is being moved and the call's keys are on two servers. In that case the
    /// script did not run, but a call for only one of the keys would run.
    pub(super) async fn run(&self, call: &Call, slot: u16, until: Instant) -> Result<Option<Bytes>, RedisError> {
        let bytes = |reply| if let RedisReply::Bytes(bytes) = reply { bytes } else { Bytes::new() };
        Ok(self.reply(call, slot, until).await?.map(bytes))
    }

    /// Runs a script for which no check waits, within the given time.
    pub(super) async fn run_within(
        &self,
        call: &Call,
        slot: u16,
        within: Duration,
    ) -> Result<Option<Bytes>, RedisError> {
        self.run(call, slot, Instant::now() + within).await
    }

    async fn reply(&self, call: &Call, slot: u16, until: Instant) -> Result<Option<RedisReply>, RedisError> {
        let link = match &self.0.reach {
            // In a box, so that the future of a call to one server is small.
            Reach::Cluster(cluster) => return Box::pin(cluster.run(call, slot, until)).await,
            Reach::One(server) => &server.link,
        };
        match link.run_script(call, until, SlotState::Owned).await {
            Ok(value) => Ok(Some(value)),
            Err(failure) if matches!(failure.cause, Cause::Moved(_) | Cause::Ask(_)) => {
                let error = misconfigured(format!(
                    "Redis at {} belongs to a cluster: use a URL that begins with redis-cluster:// or \
                     rediss-cluster://",
                    link.health.address
                ));
                link.health.report_misconfiguration(&error);
                Err(error)
            }
            Err(failure) => Err(failure.error),
        }
    }

    /// Returns the number of the server that has a slot: below [`SERVERS`], and no other known server's.
    pub(super) fn server_of(&self, slot: u16) -> u16 {
        match &self.0.reach {
            Reach::One(_) => 0,
            Reach::Cluster(cluster) => cluster.server_of(slot),
        }
    }

    /// Returns the link to the slot's server, or the reason why there is none.
    fn link(&self, slot: u16) -> Result<Arc<Link>, RedisError> {
        match &self.0.reach {
            Reach::One(server) => Ok(Arc::clone(&server.link)),
            Reach::Cluster(cluster) => cluster.link(slot),
        }
    }

    /// Returns the error for a script's command that the slot's server refused with these words. The
    /// consequences are the same as if the server had refused the script.
    pub(super) fn record_refusal(&self, slot: u16, words: &str) -> RedisError {
        self.link(slot).map_or_else(|error| error, |link| link.health.record_refusal(words))
    }

    /// Records the error of a check that was not sent, or that failed although the server replied to its call.
    pub(super) fn record_failure(&self, error: &RedisError) {
        error.report_to(&self.0.events);
    }

    /// Records that all checks of a call succeeded.
    pub(super) fn record_success(&self) {
        self.0.events.record_success();
    }

    /// Returns the events, through which observers learn what happens.
    pub(super) fn events(&self) -> &Events {
        &self.0.events
    }

    /// Restarts the slot's connection, because the connection delivered a reply that no script gives, with this error.
    pub(super) fn restart_garbled(&self, slot: u16, because: &RedisError) {
        if let Ok(link) = self.link(slot) {
            link.health.restart_garbled_connection(because);
        }
    }

    /// Returns the error of a call that would fail at once, because the slot's server is believed dead or not
    /// known.
    pub(super) fn error_at_once(&self, slot: u16) -> Option<RedisError> {
        match self.link(slot) {
            Ok(link) => link.health.fails_at_once().then(|| link.health.failure_at_once().error),
            Err(error) => Some(error),
        }
    }

    #[cfg(test)]
    fn fails_at_once(&self, slot: u16) -> bool {
        self.error_at_once(slot).is_some()
    }

    /// Returns whether Redis is a cluster, in which the keys of one call have to be in one slot.
    pub(super) fn is_cluster(&self) -> bool {
        matches!(self.0.reach, Reach::Cluster(_))
    }

    /// Waits until every known server answers.
    ///
    /// # Errors
    ///
    /// Returns the error of a server that does not answer within the given time.
    pub(super) async fn wait_until_ready(&self, within: Duration) -> Result<(), RedisError> {
        let until = Instant::now() + within;
        loop {
            let error = match &self.0.reach {
                Reach::One(server) => server.link.verify(until).await.err(),
                Reach::Cluster(cluster) => cluster.verify(until).await.err(),
            };
            match error {
                None => return Ok(()),
                Some(error) if Instant::now() >= until || error.kind() == StoreErrorKind::Misconfigured => {
                    return Err(error);
                }
                Some(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    }

    /// Measures the round trips to the servers, for at most this time.
    pub(super) async fn measure_distance(&self, within: Duration) {
        let links: Vec<Arc<Link>> = match &self.0.reach {
            Reach::One(server) => vec![Arc::clone(&server.link)],
            Reach::Cluster(cluster) => cluster.servers().iter().map(|server| Arc::clone(&server.link)).collect(),
        };
        let measured = async {
            for link in links {
                link.round_trip().await;
            }
        };
        timeout_at(Instant::now() + within, measured).await.ok(); // the rest is measured while checks are served
    }

    /// Returns whether the server is believed dead.
    pub(super) fn is_dead(&self) -> bool {
        matches!(&self.0.reach, Reach::One(server) if server.link.health.fails_at_once())
    }

    /// Ends all connections. Calls fail from then on.
    pub(super) fn close(&self) {
        match &self.0.reach {
            Reach::One(server) => server.close(),
            Reach::Cluster(cluster) => cluster.close(),
        }
    }
}

fn runtime() -> Result<Handle, RedisError> {
    let message = "a connection to Redis needs a tokio runtime with its timers and I/O enabled";
    Handle::try_current().map_err(|_| misconfigured(message))
}

#[cfg(test)]
mod tests;
