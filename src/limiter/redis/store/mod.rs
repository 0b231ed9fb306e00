//! The seam to `fred`: connections, their recovery, and what is known of each server. Nothing outside names that crate.

mod address;
mod breaker;
mod cluster;
mod failure;
mod keeper;
mod news;
mod server;
mod settings;
mod slots;
mod value;

use std::sync::Arc;
use std::time::Duration;

pub(super) use fred::clients::{Client, Pool};
use fred::interfaces::ClientLike;
use tokio::runtime::Handle;
use tokio::time::Instant;

use self::address::Address;
use self::cluster::Cluster;
use self::failure::{Cause, Misconfigured, misconfigured};
use self::news::News;
use self::server::{Role, Server};
pub(super) use self::settings::Settings;
use self::settings::{Target, TargetKind};
use super::error::{RedisError, RedisErrorKind};
use super::value::{Call, Value};

/// The slot of a key in a cluster, by what is between its first braces.
pub(super) fn slot(key: &[u8]) -> u16 {
    fred::util::redis_keyslot(key)
}

/// Redis. Clones are the same.
#[derive(Clone)]
pub(super) struct Store(Arc<Inner>);

struct Inner {
    settings: Settings,
    reach: Reach,
    news: Arc<News>,
}

/// What came of a call.
#[derive(Debug)]
pub(super) enum Ran {
    Replied(Value),
    /// Its keys are on two servers while their slot is moved: it did not run. A call for one of them would.
    Apart,
}

/// When a call has to end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Until(Instant);

impl Until {
    pub(super) fn after(time: Duration) -> Self {
        Self(Instant::now() + time)
    }
}

enum Reach {
    One(Server),
    Cluster(Cluster),
}

impl Store {
    /// Starts to connect, and returns at once, whether or not Redis is there.
    ///
    /// # Errors
    ///
    /// `Misconfigured`: a URL that is not valid, TLS without a feature for it, or no tokio runtime.
    pub(super) fn connect(url: &str, settings: Settings) -> Result<Self, RedisError> {
        let settings = settings.bounded();
        let target = Target::parse(url)?;
        let runtime = runtime()?;
        let news = Arc::new(News::new(settings.observer.clone()));
        let (address, role) = match &target.kind {
            TargetKind::Cluster(_) => {
                let cluster = Cluster::start(&runtime, target, settings.clone(), Arc::clone(&news))?;
                return Ok(Self(Arc::new(Inner { settings, reach: Reach::Cluster(cluster), news })));
            }
            TargetKind::One(address) => (address.clone(), Role::Own),
            TargetKind::Sentinel(address) => (address.clone(), Role::OwnSentinel),
        };
        let client = target.client(None, &settings)?;
        let server = Server::start(&runtime, address, vec![client], role, &settings, Arc::clone(&news), None);
        Ok(Self(Arc::new(Inner { settings, reach: Reach::One(server), news })))
    }

    /// Uses a client that the user has connected, and goes on to keep connected. Of a cluster it is known as a whole only:
    /// fred reaches none of its servers while one is away.
    ///
    /// # Errors
    ///
    /// `Misconfigured`: there is no tokio runtime.
    pub(super) fn of_client(client: Client, settings: Settings) -> Result<Self, RedisError> {
        Self::of_clients(vec![client], settings)
    }

    /// As [`of_client`](Self::of_client), with several connections.
    ///
    /// # Errors
    ///
    /// `Misconfigured`: there is no tokio runtime.
    pub(super) fn of_pool(pool: &Pool, settings: Settings) -> Result<Self, RedisError> {
        Self::of_clients(pool.clients().to_vec(), settings)
    }

    fn of_clients(clients: Vec<Client>, settings: Settings) -> Result<Self, RedisError> {
        let (settings, runtime) = (settings.bounded(), runtime()?);
        let Some(first) = clients.first() else { return Err(misconfigured("a pool without clients")) };
        let hosts = first.client_config().server.hosts();
        let address = hosts.first().map_or_else(|| Address::new("?", 0), |host| Address::new(&host.host, host.port));
        let role = if first.is_clustered() { Role::TheirsClustered } else { Role::Theirs };
        let news = Arc::new(News::new(settings.observer.clone()));
        let server = Server::start(&runtime, address, clients, role, &settings, Arc::clone(&news), None);
        Ok(Self(Arc::new(Inner { settings, reach: Reach::One(server), news })))
    }

    /// Runs a script within the deadline.
    #[cfg(test)]
    async fn run(&self, call: &Call, slot: u16) -> Result<Value, RedisError> {
        match self.run_until(call, slot, self.until()).await? {
            Ran::Replied(value) => Ok(value),
            Ran::Apart => Err(RedisError::new(RedisErrorKind::Unavailable, "apart")),
        }
    }

    /// When a call that begins now has to end.
    pub(super) fn until(&self) -> Until {
        Until::after(self.0.settings.deadline)
    }

    /// Runs a script on the server that has the slot. It runs at most once. A future that is dropped may have run it.
    pub(super) async fn run_until(&self, call: &Call, slot: u16, Until(until): Until) -> Result<Ran, RedisError> {
        if Handle::try_current().is_err() {
            return Err(no_runtime());
        }
        match &self.0.reach {
            Reach::Cluster(cluster) => cluster.run(call, slot, until).await,
            Reach::One(server) => match server.link.run(call, slot, until, false).await {
                Ok(value) => Ok(Ran::Replied(value)),
                Err(failure) => match failure.cause {
                    Cause::TryAgain => Ok(Ran::Apart),
                    Cause::Moved(_) | Cause::Ask(_) if server.link.role != Role::TheirsClustered => {
                        let error = misconfigured(format!(
                            "Redis at {} is of a cluster: its URL begins with redis-cluster:// or rediss-cluster://",
                            server.link.address
                        ));
                        server.link.complain(Misconfigured::Slots, &error);
                        Err(error)
                    }
                    _ => Err(failure.error),
                },
            },
        }
    }

    /// What it means that the slot's server refused a command of a script in these words. It has the same consequences as
    /// if the server had refused the script.
    pub(super) fn refused(&self, slot: u16, words: &str) -> RedisError {
        match &self.0.reach {
            Reach::One(server) => server.link.refused(words),
            Reach::Cluster(cluster) => cluster.refused(slot, words),
        }
    }

    /// Tells the observer of a check that failed before it came here, or because of its value.
    pub(super) fn failed(&self, error: &RedisError) {
        self.0.news.failed(error);
    }

    /// The slot's server sent a reply that no script gives.
    pub(super) fn garbled(&self, slot: u16) {
        match &self.0.reach {
            Reach::One(server) => server.link.garbled(),
            Reach::Cluster(cluster) => cluster.garbled(slot),
        }
    }

    /// The slot's server gives its user too few rights: these are missing.
    pub(super) fn lacks(&self, slot: u16, rights: &str) -> RedisError {
        match &self.0.reach {
            Reach::One(server) => server.link.lacks(rights),
            Reach::Cluster(cluster) => cluster.lacks(slot, rights),
        }
    }

    /// Why a call to the slot's server is not worth a try, if it is believed dead or not known. Takes nanoseconds if it is not.
    pub(super) fn trouble(&self, slot: u16) -> Option<RedisError> {
        match &self.0.reach {
            Reach::One(server) => server.link.is_open().then(|| server.link.believed_dead().error),
            Reach::Cluster(cluster) => cluster.trouble(slot),
        }
    }

    #[cfg(test)]
    fn is_open(&self, slot: u16) -> bool {
        self.trouble(slot).is_some()
    }

    /// Whether it is a cluster, whose keys of one call have to be of one slot.
    pub(super) fn is_cluster(&self) -> bool {
        match &self.0.reach {
            Reach::One(server) => server.link.role == Role::TheirsClustered,
            Reach::Cluster(_) => true,
        }
    }

    /// Waits until every server that is known of answers.
    ///
    /// # Errors
    ///
    /// Why one does not, once `within` is over.
    pub(super) async fn connected(&self, within: Duration) -> Result<(), RedisError> {
        let until = Instant::now() + within;
        loop {
            let error = match &self.0.reach {
                Reach::One(server) => server::answers(&server.link, false, &self.0.settings).await.err(),
                Reach::Cluster(cluster) => cluster.answers().await.err(),
            };
            match error {
                None => return Ok(()),
                Some(error) if Instant::now() >= until || error.kind() == RedisErrorKind::Misconfigured => {
                    return Err(error);
                }
                Some(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    }

    /// Ends all connections of its own; those of the user's client stay. Calls fail from then on.
    pub(super) fn close(&self) {
        match &self.0.reach {
            Reach::One(server) => server.close(),
            Reach::Cluster(cluster) => cluster.close(),
        }
    }
}

fn runtime() -> Result<Handle, RedisError> {
    Handle::try_current().map_err(|_| no_runtime())
}

fn no_runtime() -> RedisError {
    misconfigured("Redis is reached from within a tokio runtime, with its timers and I/O enabled")
}

#[cfg(test)]
mod tests;
