//! Addresses of servers, and what a URL names.

use std::fmt;

/// A host and a port. The port is 0 if it is not known.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Address {
    pub(super) host: Box<str>,
    pub(super) port: u16,
}

impl Address {
    pub(super) fn new(host: &str, port: u16) -> Self {
        Self { host: host.into(), port }
    }

    /// Makes an address that is only for messages.
    pub(super) fn in_words(words: &str) -> Self {
        Self::new(words, 0)
    }

    /// Parses `host:port` as servers write it. If the text has no host, the host is that of the
    /// server that sent the text.
    pub(super) fn parse(text: &str, said_by: &Self) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        let host = if host.is_empty() { &said_by.host } else { host };
        Some(Self::new(host, port.parse().ok().filter(|port| *port != 0)?))
    }
}

/// The server or servers that a URL names.
pub(super) enum TargetKind {
    One(Address),
    /// The master that sentinels know by a name. The address is only for messages.
    Sentinel(Address),
    /// Some of a cluster's servers.
    Cluster(Vec<Address>),
}

impl TargetKind {
    /// Makes the target for the master with this name, which the sentinel at this address knows.
    pub(super) fn sentinel(master: &str, host: &str, port: u16) -> Self {
        // A message says that the master fails, and not the sentinel.
        Self::Sentinel(Address::new(&format!("master {master} of sentinel {host}"), port))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            0 => f.write_str(&self.host), // words, such as for a connection whose server is not known
            port => write!(f, "{}:{port}", self.host),
        }
    }
}

/// Returns the form of a URL of several sentinels, for the error of a URL of sentinels that cannot be read.
pub(super) fn sentinel_hint(url: &str) -> &'static str {
    match url.split_once("://") {
        Some((scheme, _)) if scheme.ends_with("-sentinel") => {
            " (several sentinels are written as \
             redis-sentinel://a:26379?node=b:26379&node=c:26379&sentinelServiceName=NAME)"
        }
        _ => "",
    }
}
