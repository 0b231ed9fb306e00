//! URLs of Redis, for clients that do not read all of them.

use percent_encoding::percent_decode_str;

use super::address::{Address, sentinel_hint};
use super::failure::misconfigured;
use crate::limiter::redis::error::RedisError;

/// A parsed URL.
///
/// ```text
/// redis|rediss :// [[username]:password@] host [:port] [/database]
/// redis|rediss -cluster :// [[username]:password@] host [:port] [?node=host:port[&node=…]]
/// redis|rediss -sentinel :// [[username]:password@] host [:port] [/database] ?sentinelServiceName=name
///     [&node=host:port …] [&sentinelUsername=…] [&sentinelPassword=…]
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Url {
    pub(super) uses_tls: bool,
    pub(super) kind: UrlKind,
    /// The servers, or the sentinels: at least one.
    pub(super) hosts: Vec<Address>,
    pub(super) login: Login,
    pub(super) database: u16,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum UrlKind {
    One,
    Cluster,
    Sentinel { service: Box<str>, login: Login },
}

#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct Login {
    pub(super) username: Option<Box<str>>,
    pub(super) password: Option<Box<str>>,
}

impl Url {
    /// Parses a URL whose scheme is known. Errors do not repeat the URL, because it may contain a password.
    pub(super) fn parse(url: &str) -> Result<Self, RedisError> {
        let hint = sentinel_hint(url);
        let wrong = |what: &str| misconfigured(format!("the URL for Redis is not valid{hint}: {what}"));
        let (scheme, rest) = url.split_once("://").ok_or_else(|| wrong("it has no scheme"))?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (login, host) = match authority.rsplit_once('@') {
            None => (Login::default(), authority),
            Some((login, host)) => {
                let (username, password) =
                    login.split_once(':').map_or((login, None), |(name, word)| (name, Some(word)));
                let decoded = |text: &str| decoded(text).ok_or_else(|| wrong("the user or the password is not UTF-8"));
                let username = Some(decoded(username)?).filter(|name| !name.is_empty());
                (Login { username, password: password.map(decoded).transpose()? }, host)
            }
        };
        let mut hosts = Vec::new();
        let (mut service, mut sentinels) = (None, Login::default());
        let is_sentinel = scheme.ends_with("-sentinel");
        let port = if is_sentinel { 26_379 } else { 6_379 };
        hosts.push(address(host, port).ok_or_else(|| wrong("the host or the port"))?);
        for (name, value) in query.split('&').filter_map(|pair| pair.split_once('=')) {
            let value = decoded(value).ok_or_else(|| wrong("a parameter is not UTF-8"))?;
            match name {
                "node" => {
                    // Requires a port, because fred has no default port for a node either.
                    let node = address(&value, 0).filter(|node| node.port != 0);
                    hosts.push(node.ok_or_else(|| wrong("write a node as host:port"))?);
                }
                "sentinelServiceName" => service = Some(value),
                "sentinelUsername" => sentinels.username = Some(value),
                "sentinelPassword" => sentinels.password = Some(value),
                _ => {}
            }
        }
        let kind = match service {
            Some(service) if is_sentinel => UrlKind::Sentinel { service, login: sentinels },
            None if is_sentinel => return Err(wrong("add ?sentinelServiceName=, the name of the master")),
            _ if scheme.ends_with("-cluster") => UrlKind::Cluster,
            _ => UrlKind::One,
        };
        let database = if path.is_empty() { "0" } else { path };
        let database =
            database.parse().map_err(|_| wrong("the path after the host must be the number of a database"))?;
        Ok(Self { uses_tls: scheme.starts_with("rediss"), kind, hosts, login, database })
    }
}

fn decoded(text: &str) -> Option<Box<str>> {
    percent_decode_str(text).decode_utf8().ok().map(|text| text.into())
}

fn address(text: &str, default_port: u16) -> Option<Address> {
    let after_brackets = text.strip_prefix('[').and_then(|text| text.split_once(']'));
    let (host, port) = match after_brackets {
        Some((host, port)) => (host, port.strip_prefix(':')),
        None => text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port))),
    };
    let port = port.map_or(Some(default_port), |port| port.parse().ok().filter(|port| *port != 0))?;
    (!host.is_empty() && !host.contains(|it: char| it.is_whitespace())).then(|| Address::new(host, port))
}

impl std::fmt::Debug for Login {
    /// Leaves the password out.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Login").field("username", &self.username).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::StoreErrorKind;

    fn login(username: &str, password: &str) -> Login {
        let some = |text: &str| (!text.is_empty()).then(|| text.into());
        Login { username: some(username), password: some(password) }
    }

    #[test]
    fn url_is_taken_apart() {
        for (url, expected) in [
            ("redis://localhost", (false, vec![("localhost", 6_379)], login("", ""), 0)),
            ("rediss://app:p%40ss:w@10.0.0.1:7000/3", (true, vec![("10.0.0.1", 7_000)], login("app", "p@ss:w"), 3)),
            ("redis://:secret@[::1]:7000/", (false, vec![("::1", 7_000)], login("", "secret"), 0)),
            (
                "redis-cluster://a:1?node=b:2&node=[::1]:3",
                (false, vec![("a", 1), ("b", 2), ("::1", 3)], login("", ""), 0),
            ),
        ] {
            let parsed = Url::parse(url).unwrap();
            let hosts: Vec<_> = parsed.hosts.iter().map(|host| (&*host.host, host.port)).collect();
            assert_eq!((parsed.uses_tls, hosts, parsed.login, i32::from(parsed.database)), expected, "{url}");
        }
        let parsed = Url::parse("redis-sentinel://a?sentinelServiceName=main&sentinelPassword=x&node=b:2").unwrap();
        assert_eq!(parsed.kind, UrlKind::Sentinel { service: "main".into(), login: login("", "x") });
        assert_eq!(parsed.hosts, [Address::new("a", 26_379), Address::new("b", 2)]);
    }

    #[test]
    fn wrong_url_is_refused_without_its_password() {
        for url in [
            "redis://",
            "redis://:hunter2@",
            "redis://:hunter2@host:port",
            "redis://:hunter2@host:0",
            "redis://:hunter2@host:70000",
            "redis://:hunter2@host/name",
            "redis://:%ff@hunter2",
            "redis-sentinel://:hunter2@host",
            "redis-cluster://:hunter2@host?node=:1",
        ] {
            let error = Url::parse(url).unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Misconfigured);
            assert!(!error.to_string().contains("hunter2"), "{error}");
        }
    }
}
