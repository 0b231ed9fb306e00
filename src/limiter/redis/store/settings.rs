//! The settings of a store, and of fred.

use std::sync::Arc;
use std::time::Duration;

use fred::clients::Client;
use fred::types::Builder;
use fred::types::config::{Config, ReconnectPolicy, ServerConfig, TcpConfig, UnresponsiveConfig};

use super::address::Address;
use super::error_class::misconfigured;
use crate::limiter::redis::error::RedisError;
use crate::outcome::Observer;

/// The time that a connection may take, and again its greeting.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);

/// The interval at which a server that is believed dead is probed, unless the deadline is long.
const PROBE_EVERY: Duration = Duration::from_millis(250);

/// The settings of a store.
#[derive(Clone)]
pub(in crate::limiter::redis) struct Settings {
    /// The time that a call may take: from 2 ms, because fred's timers are no finer, to a minute.
    pub(in crate::limiter::redis) deadline: Duration,
    /// The number of calls in a row without an answer after which a server is believed dead.
    pub(in crate::limiter::redis) failures: u32,
    /// The observers, which get the events of servers.
    pub(in crate::limiter::redis) observers: Vec<Arc<dyn Observer>>,
}

impl Default for Settings {
    fn default() -> Self {
        Self { deadline: Duration::from_millis(50), failures: 5, observers: Vec::new() }
    }
}

impl Settings {
    /// Moves the deadline into its range.
    pub(super) fn bounded(mut self) -> Self {
        self.deadline = self.deadline.clamp(Duration::from_millis(2), Duration::from_secs(60));
        self
    }

    /// The time for which a connection may owe an answer before it is closed.
    fn patience(&self) -> Duration {
        (self.deadline * 3).max(Duration::from_millis(150))
    }

    /// Returns the time between two probes. Each write begins fred's patience anew, so probes come
    /// less often than that.
    pub(super) fn probe_every(&self) -> Duration {
        PROBE_EVERY.max(self.patience() + Duration::from_millis(50))
    }
}

/// A parsed URL.
pub(super) struct Target {
    config: Config,
    pub(super) kind: TargetKind,
}

pub(super) enum TargetKind {
    One(Address),
    Sentinel(Address),
    /// Some of a cluster's servers.
    Cluster(Vec<Address>),
}

const SCHEMES: [&str; 6] = ["redis", "rediss", "redis-cluster", "rediss-cluster", "redis-sentinel", "rediss-sentinel"];

const HAS_TLS: bool = cfg!(any(feature = "redis-rustls", feature = "redis-rustls-ring", feature = "redis-native-tls"));

/// Returns an error if the scheme needs TLS and the build has none.
fn check_tls(scheme: &str, has_tls: bool) -> Result<(), RedisError> {
    if has_tls || !scheme.starts_with("rediss") {
        return Ok(());
    }
    Err(misconfigured(format!(
        "{scheme}:// needs TLS: enable one of the features redis-rustls, redis-rustls-ring, redis-native-tls"
    )))
}

impl Target {
    /// Parses a URL. Errors do not repeat it, because there may be a password in it.
    pub(super) fn parse(url: &str) -> Result<Self, RedisError> {
        let scheme = url.split_once("://").map_or("", |(scheme, _)| scheme);
        if !SCHEMES.contains(&scheme) {
            return Err(misconfigured(format!(
                "a URL for Redis begins with one of {}, each with ://",
                SCHEMES.join(", ")
            )));
        }
        check_tls(scheme, HAS_TLS)?;
        let config =
            Config::from_url(url).map_err(|error| misconfigured("the URL for Redis is not valid").caused_by(error))?;
        let kind = match &config.server {
            ServerConfig::Centralized { server } => TargetKind::One(Address::new(&server.host, server.port)),
            ServerConfig::Clustered { hosts, .. } => {
                TargetKind::Cluster(hosts.iter().map(|host| Address::new(&host.host, host.port)).collect())
            }
            ServerConfig::Sentinel { hosts, service_name, .. } => match hosts.first() {
                Some(host) => {
                    TargetKind::Sentinel(Address::new(&format!("{service_name} of {}", host.host), host.port))
                }
                None => return Err(misconfigured("the URL for Redis names no sentinel")),
            },
            #[allow(unreachable_patterns, reason = "features of fred's that others enable add kinds")]
            _ => return Err(misconfigured("the URL for Redis names no host")),
        };
        Ok(Self { config, kind })
    }

    /// Returns a client that is not connected yet: to what the URL names, or to one server of its
    /// cluster.
    pub(super) fn client(&self, only: Option<&Address>, settings: &Settings) -> Result<Client, RedisError> {
        let mut config = self.config.clone();
        // This is about the first connection only: reconnect.rs tries again, and hears the reason.
        config.fail_fast = true;
        if let Some(address) = only {
            config.server = ServerConfig::new_centralized(&*address.host, address.port);
        }
        // The first attempt comes soon, because until its end calls wait and do not fail at once.
        let mut policy = ReconnectPolicy::new_exponential(0, 20, 250, 2);
        policy.set_jitter(20);
        let mut builder = Builder::from_config(config);
        builder.set_policy(policy);
        builder.with_performance_config(|performance| performance.default_command_timeout = settings.deadline);
        builder.with_connection_config(|connection| {
            connection.connection_timeout = CONNECT_TIMEOUT;
            connection.internal_command_timeout = CONNECT_TIMEOUT;
            // A script that was sent is never sent again.
            connection.max_command_attempts = 1;
            connection.unresponsive =
                UnresponsiveConfig { max_timeout: Some(settings.patience()), interval: Duration::from_millis(50) };
            connection.reconnect_on_auth_error = true;
            connection.disable_cluster_health_check = true;
            connection.tcp = TcpConfig { nodelay: Some(true), ..TcpConfig::default() };
            // If it were bounded, fred's own request to reconnect could find no room, and fred
            // would never reconnect.
            connection.max_command_buffer_len = 0;
        });
        builder.build().map_err(|error| misconfigured("fred does not take these settings").caused_by(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn build_without_tls_refuses_schemes_that_need_it() {
        for scheme in SCHEMES {
            assert_eq!(check_tls(scheme, true), Ok(()));
            let refused = check_tls(scheme, false).err().map(|error| error.to_string());
            assert_eq!(refused.is_some(), scheme.starts_with("rediss"), "{scheme}");
            assert!(refused.is_none_or(|error| error.starts_with(scheme) && error.contains("redis-rustls")));
        }
    }
}
